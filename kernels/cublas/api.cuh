/* cuBLAS found at run time: the few functions the kernel calls, and its handles.
 *
 * The declarations below are cuBLAS's C interface (unchanged since version 11), so that building needs no cuBLAS
 * headers and the extension has no cuBLAS among its dependencies. One state a context, in the context's slot: the
 * library, and the handles that no launch is using. A launch takes a handle of its device, or makes one, and returns it
 * when its work is queued: no two threads share a handle, and each launch gives it its own stream and its own
 * workspace. */
#pragma once

#include <cuda_runtime.h> // cudaStream_t
#include <dlfcn.h>        // dlsym
#include <stdlib.h>       // calloc, free
#include <unistd.h>       // getpid

#include "fa.h" // fa_host, fa_launch

namespace fa::cublas {

using Handle = struct cublasContext *;

constexpr int kOpN = 0, kOpT = 1;                         // cublasOperation_t
constexpr int kReal32F = 0, kReal16F = 2, kRealBf16 = 14; // cudaDataType_t
constexpr int kCompute32F = 68;                           // cublasComputeType_t: float32 throughout, never TF32
constexpr int kGemmDefault = -1;                          // cublasGemmAlgo_t
constexpr int kMathDisallowReducedPrecision = 16;         // cublasMath_t: partial sums are float32, too
constexpr int kStatusAllocFailed = 3;                     // cublasStatus_t

inline int data_type(fa_dtype dtype) { return dtype == FA_F16 ? kReal16F : dtype == FA_BF16 ? kRealBf16 : kReal32F; }

struct Library {
    int (*create)(Handle *);
    int (*destroy)(Handle);
    int (*set_stream)(Handle, cudaStream_t);
    int (*set_workspace)(Handle, void *, size_t);
    int (*set_math_mode)(Handle, int);
    /* C (m x n) = alpha op(A) op(B) + beta C, column-major, for each of `count` equally spaced triples. */
    int (*gemm)(Handle, int op_a, int op_b, int m, int n, int k, const void *alpha, const void *a, int a_type, int a_ld,
                long long a_stride, const void *b, int b_type, int b_ld, long long b_stride, const void *beta, void *c,
                int c_type, int c_ld, long long c_stride, int count, int compute_type, int algorithm);
    const char *(*status_name)(int);
};

struct IdleHandle {
    Handle handle;
    int device;
    IdleHandle *next;
};

struct State {
    Library library;
    IdleHandle *idle;
    pid_t owner; // process that made the handles
};

inline void free_state(void *slot) {
    State *state = static_cast<State *>(slot);
    while (IdleHandle *idle = state->idle) {
        state->idle = idle->next;
        if (state->owner == getpid()) state->library.destroy(idle->handle); // CUDA does not survive a fork
        free(idle);
    }
    free(state); // the library stays loaded: others in the process may use it
}

/* Finds the functions of cuBLAS. */
inline fa_code load_library(const fa_launch &launch, Library *library) {
    void *handle;
    FA_TRY(launch.host->open_library(launch.context, FA_CUBLAS, &handle, launch.status));
    struct {
        const char *name;
        void *target;
    } const wanted[] = {
        {"cublasCreate_v2", &library->create},          {"cublasDestroy_v2", &library->destroy},
        {"cublasSetStream_v2", &library->set_stream},   {"cublasSetWorkspace_v2", &library->set_workspace},
        {"cublasSetMathMode", &library->set_math_mode}, {"cublasGemmStridedBatchedEx", &library->gemm},
        {"cublasGetStatusName", &library->status_name},
    };
    for (const auto &function : wanted) {
        void *found = dlsym(handle, function.name);
        if (!found)
            return launch.host->fail(launch.status, FA_EUNSUPPORTED, "cuBLAS is too old: it has no %s", function.name);
        *static_cast<void **>(function.target) = found;
    }
    return FA_OK;
}

/* One launch's exclusive use of a handle of the current device; returned when the object goes. */
class Session {
    const fa_launch &launch;
    State *state = nullptr;
    IdleHandle *taken = nullptr;
    cudaStreamCaptureMode outer_mode = cudaStreamCaptureModeRelaxed;
    bool mode_exchanged = false;

    fa_code check(int code, const char *what) const {
        if (code == 0) return FA_OK;
        fa_code kind = code == kStatusAllocFailed ? FA_EMEMORY : FA_ECUDA;
        return launch.host->fail(launch.status, kind, "cuBLAS: %s failed with %s", what,
                                 state->library.status_name(code));
    }

    /* The context's state; a new one becomes it unless there is one. NULL: none, or out of memory. */
    State *keep_state(State *made) const {
        static const char key = 0;
        launch.host->lock(launch.context);
        void **slot = launch.host->slot(launch.context, &key, free_state);
        if (slot && !*slot) *slot = made;
        State *kept = slot ? static_cast<State *>(*slot) : nullptr;
        launch.host->unlock(launch.context);
        return kept;
    }

    fa_code find_state() {
        state = keep_state(nullptr);
        if (state) return FA_OK;
        State *made = static_cast<State *>(calloc(1, sizeof(State)));
        if (!made) return fail(FA_EMEMORY, "out of memory");
        made->owner = getpid();
        fa_code code = load_library(launch, &made->library);
        if (code == FA_OK) state = keep_state(made);
        if (state != made) free(made); // another thread's came first
        return code == FA_OK && !state ? fail(FA_EMEMORY, "out of memory") : code;
    }

    /* Takes an idle handle of the device, if there is one. */
    void take() {
        launch.host->lock(launch.context);
        for (IdleHandle **link = &state->idle; *link; link = &(*link)->next) {
            if ((*link)->device != launch.device->device.id) continue;
            taken = *link;
            *link = taken->next;
            break;
        }
        launch.host->unlock(launch.context);
    }

  public:
    explicit Session(const fa_launch &of) : launch(of) {}
    Session(const Session &) = delete;

    fa_code fail(fa_code code, const char *text) const { return launch.host->fail(launch.status, code, "%s", text); }

    /* Queues on the launch's stream from now on, with `workspace` for cuBLAS. Creating a handle allocates and cuBLAS
     * may load code, which a capture of another stream must not forbid: this thread is in relaxed capture mode
     * meanwhile. */
    fa_code open(void *workspace, size_t bytes) {
        mode_exchanged = cudaThreadExchangeStreamCaptureMode(&outer_mode) == cudaSuccess;
        FA_TRY(find_state());
        take();
        const Library &library = state->library;
        if (!taken) {
            taken = static_cast<IdleHandle *>(calloc(1, sizeof(IdleHandle)));
            if (!taken) return fail(FA_EMEMORY, "out of memory");
            taken->device = launch.device->device.id;
            FA_TRY(check(library.create(&taken->handle), "cublasCreate"));
            FA_TRY(check(library.set_math_mode(taken->handle, kMathDisallowReducedPrecision), "cublasSetMathMode"));
        }
        cudaStream_t stream = static_cast<cudaStream_t>(launch.stream);
        FA_TRY(check(library.set_stream(taken->handle, stream), "cublasSetStream"));
        return check(library.set_workspace(taken->handle, workspace, bytes), "cublasSetWorkspace");
    }

    ~Session() {
        if (mode_exchanged) cudaThreadExchangeStreamCaptureMode(&outer_mode);
        if (taken && taken->handle) {
            launch.host->lock(launch.context);
            taken->next = state->idle;
            state->idle = taken;
            launch.host->unlock(launch.context);
        } else {
            free(taken);
        }
    }

    /* cublasGemmStridedBatchedEx with beta = 0 and float32 arithmetic. */
    fa_code gemm(int op_a, int op_b, int m, int n, int k, float alpha, const void *a, int a_type, int a_ld,
                 int64_t a_stride, const void *b, int b_type, int b_ld, int64_t b_stride, void *c, int c_type, int c_ld,
                 int64_t c_stride, int count) const {
        const float beta = 0.0f;
        return check(state->library.gemm(taken->handle, op_a, op_b, m, n, k, &alpha, a, a_type, a_ld, a_stride, b,
                                         b_type, b_ld, b_stride, &beta, c, c_type, c_ld, c_stride, count, kCompute32F,
                                         kGemmDefault),
                     "cublasGemmStridedBatchedEx");
    }
};

} // namespace fa::cublas
