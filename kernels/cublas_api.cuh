/* cuBLAS found at run time: the few functions the row calls, and its handles.
 *
 * The declarations below are cuBLAS's C interface (unchanged since version 11), so that building needs no cuBLAS
 * headers and the extension has no cuBLAS among its dependencies. One state a context, in the context's slot: the
 * library, and the handles that no launch is using. A launch takes a handle of its device, or makes one, and returns it
 * when its work is queued: no two threads share a handle, and each launch gives it its own stream and its own
 * workspace. */
#ifndef FA_CUBLAS_API_CUH
#define FA_CUBLAS_API_CUH

#include <cuda_runtime.h> // cudaStream_t
#include <dlfcn.h>        // dlopen, dlsym
#include <stdlib.h>       // calloc, free
#include <unistd.h>       // getpid

#include "device.h" // fa_context_slot, fa_cublas_path
#include "fa.h"     // fa_status

namespace fa::cublas {

using Handle = struct cublasContext *;

constexpr int OP_N = 0, OP_T = 1;                   // cublasOperation_t
constexpr int R_32F = 0, R_16F = 2, R_16BF = 14;    // cudaDataType_t
constexpr int COMPUTE_32F = 68;                     // cublasComputeType_t: float32 throughout, never TF32
constexpr int GEMM_DEFAULT = -1;                    // cublasGemmAlgo_t
constexpr int MATH_DISALLOW_REDUCED_PRECISION = 16; // cublasMath_t: partial sums are float32, too
constexpr int STATUS_ALLOC_FAILED = 3;              // cublasStatus_t

inline int data_type(fa_dtype dtype) { return dtype == FA_F16 ? R_16F : dtype == FA_BF16 ? R_16BF : R_32F; }

struct Library {
    void *handle;
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

/* Fills `library` from the context's path, or the names the loader knows. */
inline fa_code load_library(const char *path, Library *library, fa_status *status) {
    const char *names[] = {path, "libcublas.so.13", "libcublas.so.12"};
    for (const char *name : names) {
        if (!library->handle && name) library->handle = dlopen(name, RTLD_LAZY | RTLD_LOCAL);
    }
    if (!library->handle) return fa_fail(status, FA_EUNSUPPORTED, "cuBLAS cannot be loaded: %s", dlerror());
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
        void *found = dlsym(library->handle, function.name);
        if (!found) return fa_fail(status, FA_EUNSUPPORTED, "cuBLAS is too old: it has no %s", function.name);
        *static_cast<void **>(function.target) = found;
    }
    return FA_OK;
}

/* One launch's exclusive use of a handle of the current device; returned when the object goes. */
class Session {
    fa_context *context = nullptr;
    State *state = nullptr;
    IdleHandle *taken = nullptr;
    cudaStreamCaptureMode outer_mode = cudaStreamCaptureModeRelaxed;
    bool mode_exchanged = false;

    fa_code check(int code, const char *what, fa_status *status) const {
        if (code == 0) return FA_OK;
        fa_code kind = code == STATUS_ALLOC_FAILED ? FA_EMEMORY : FA_ECUDA;
        return fa_fail(status, kind, "cuBLAS: %s failed with %s", what, state->library.status_name(code));
    }

    /* Takes the context's state, made on first use, and an idle handle of `device`, if there is one. */
    fa_code take(int device, fa_status *status) {
        fa_code code = FA_OK;
        fa_context_lock(context);
        void **slot = fa_context_slot(context, free_state);
        if (!*slot) {
            State *made = static_cast<State *>(calloc(1, sizeof(State)));
            code = made ? load_library(fa_cublas_path(context), &made->library, status)
                        : fa_fail(status, FA_EMEMORY, "out of memory");
            if (code == FA_OK) {
                made->owner = getpid();
                *slot = made;
            } else {
                free(made);
            }
        }
        state = static_cast<State *>(*slot);
        for (IdleHandle **link = state ? &state->idle : nullptr; link && *link; link = &(*link)->next) {
            if ((*link)->device != device) continue;
            taken = *link;
            *link = taken->next;
            break;
        }
        fa_context_unlock(context);
        return code;
    }

  public:
    Session() = default;
    Session(const Session &) = delete;

    /* Queues on `stream` from now on, with `workspace` for cuBLAS. Creating a handle allocates and cuBLAS may load
     * code, which a capture of another stream must not forbid: this thread is in relaxed capture mode meanwhile. */
    fa_code open(fa_context *owner, int device, cudaStream_t stream, void *workspace, size_t bytes, fa_status *status) {
        context = owner;
        mode_exchanged = cudaThreadExchangeStreamCaptureMode(&outer_mode) == cudaSuccess;
        FA_TRY(take(device, status));
        const Library &library = state->library;
        if (!taken) {
            taken = static_cast<IdleHandle *>(calloc(1, sizeof(IdleHandle)));
            if (!taken) return fa_fail(status, FA_EMEMORY, "out of memory");
            taken->device = device;
            FA_TRY(check(library.create(&taken->handle), "cublasCreate", status));
            FA_TRY(check(library.set_math_mode(taken->handle, MATH_DISALLOW_REDUCED_PRECISION), "cublasSetMathMode",
                         status));
        }
        FA_TRY(check(library.set_stream(taken->handle, stream), "cublasSetStream", status));
        return check(library.set_workspace(taken->handle, workspace, bytes), "cublasSetWorkspace", status);
    }

    ~Session() {
        if (mode_exchanged) cudaThreadExchangeStreamCaptureMode(&outer_mode);
        if (taken && taken->handle) {
            fa_context_lock(context);
            taken->next = state->idle;
            state->idle = taken;
            fa_context_unlock(context);
        } else {
            free(taken);
        }
    }

    /* cublasGemmStridedBatchedEx with beta = 0 and float32 arithmetic. */
    fa_code gemm(int op_a, int op_b, int m, int n, int k, float alpha, const void *a, int a_type, int a_ld,
                 int64_t a_stride, const void *b, int b_type, int b_ld, int64_t b_stride, void *c, int c_type, int c_ld,
                 int64_t c_stride, int count, fa_status *status) const {
        const float beta = 0.0f;
        return check(state->library.gemm(taken->handle, op_a, op_b, m, n, k, &alpha, a, a_type, a_ld, a_stride, b,
                                         b_type, b_ld, b_stride, &beta, c, c_type, c_ld, c_stride, count, COMPUTE_32F,
                                         GEMM_DEFAULT),
                     "cublasGemmStridedBatchedEx", status);
    }
};

} // namespace fa::cublas

#endif
