/* Launches: what CUDA would refuse, faults of memory, endless loops, errors. */
#include "machine.h"

#include <cuda_runtime.h>
#include <mutex>
#include <set>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <ucontext.h>

namespace emu {

static std::mutex launch_lock;
static cudaError_t last_error;
static std::map<const void *, int> allowed_shared;
static std::set<const void *> large_clusters;
constexpr int SECONDS = 30; // of processor time that a launch may take

static void on_signal(int signal, siginfo_t *info, void *opaque) {
    if (!machine.active || !self) {
        struct sigaction standard = {};
        standard.sa_handler = SIG_DFL;
        sigaction(signal, &standard, nullptr);
        return; // the instruction faults again
    }
    const ucontext_t *context = static_cast<const ucontext_t *>(opaque);
    void *at = reinterpret_cast<void *>(context->uc_mcontext.gregs[REG_RIP]);
    Fiber &fiber = current();
    void *saved[7] = {};
    saved[5] = reinterpret_cast<void *>(context->uc_mcontext.gregs[REG_RBP]);
    saved[6] = static_cast<char *>(at) + 1;
    fiber.stack_pointer = saved;
    self = nullptr; // its place is that of the signal
    const std::string place = place_of(fiber, nullptr);
    if (signal == SIGVTALRM)
        fail("no end after %d s of processor time: %s\n%s", SECONDS, place.c_str(), places().c_str());
    fail("access to %s\n%s",
         info->si_code == SI_KERNEL ? "a misaligned address" : describe_address(info->si_addr).c_str(), place.c_str());
}

/* Signals of a launch, which are the process's own again afterwards. */
class Signals {
    static constexpr int NUMBER[3] = {SIGSEGV, SIGBUS, SIGVTALRM};
    struct sigaction before[3];
    stack_t stack_before;
    itimerval timer_before;
    static inline char stack[64 << 10];

  public:
    Signals() {
        stack_t own = {};
        own.ss_sp = stack, own.ss_size = sizeof stack;
        sigaltstack(&own, &stack_before);
        struct sigaction action = {};
        action.sa_sigaction = on_signal;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
        for (int n = 0; n < 3; ++n) sigaction(NUMBER[n], &action, &before[n]);
        const itimerval limit = {{0, 0}, {SECONDS, 0}};
        setitimer(ITIMER_VIRTUAL, &limit, &timer_before);
    }
    ~Signals() {
        setitimer(ITIMER_VIRTUAL, &timer_before, nullptr);
        for (int n = 0; n < 3; ++n) sigaction(NUMBER[n], &before[n], nullptr);
        sigaltstack(&stack_before, nullptr);
    }
};

static const char *refusal(const void *kernel, const Grid &grid) {
    const uint64_t threads = uint64_t(grid.block.x) * grid.block.y * grid.block.z;
    if (!threads || threads > 1024) return "a block has 1 to 1024 threads";
    if (!grid.grid.x || !grid.grid.y || !grid.grid.z) return "an empty grid";
    if (grid.grid.y > 65535 || grid.grid.z > 65535 || grid.grid.x > INT32_MAX) return "the grid is too large";
    const unsigned cluster = grid.cluster.x * grid.cluster.y * grid.cluster.z;
    const unsigned largest = large_clusters.contains(kernel) ? 16 : 8;
    if (!cluster || cluster > largest || grid.grid.x % grid.cluster.x || grid.grid.y % grid.cluster.y ||
        grid.grid.z % grid.cluster.z)
        return "clusters of 1 to 8 blocks, or 16 where the kernel may have them, divide the grid";
    const auto allowed = allowed_shared.find(kernel);
    if (grid.shared > size_t(allowed == allowed_shared.end() ? 48 << 10 : allowed->second))
        return "more dynamic shared memory than the kernel was allowed";
    return nullptr;
}

cudaError_t launch_checked(const void *kernel, const Grid &grid, void (*body)(void *), void *context) {
    const std::lock_guard<std::mutex> guard(launch_lock);
    if (const char *why = refusal(kernel, grid)) {
        machine.error = why;
        return last_error = cudaErrorInvalidConfiguration;
    }
    const char *seed = getenv("FA_EMULATOR_SEED");
    machine.seed = seed ? strtoull(seed, nullptr, 10) : 0;
    machine.error.clear();
    machine.active = true;
    {
        const Signals signals;
        run(grid, body, context);
    }
    machine.active = false;
    return last_error = machine.error.empty() ? cudaSuccess : cudaErrorEmulator;
}

} // namespace emu

/* A kernel compiled with -fsanitize=alignment calls these before a misaligned access. */
struct Misaligned {
    struct {
        const char *file;
        uint32_t line, column;
    } place;
    const void *type;
    unsigned char alignment_log2, kind;
};
extern "C" __attribute__((visibility("hidden"))) void __ubsan_handle_type_mismatch_v1_abort(const Misaligned *what,
                                                                                            const void *pointer) {
    using namespace emu;
    if (!machine.active || !self) {
        fprintf(stderr, "%s:%u: a misaligned access on the host\n", what->place.file, what->place.line);
        abort();
    }
    fail("%s: misaligned, of alignment %u\n%s", describe_address(pointer).c_str(), 1u << what->alignment_log2,
         place_of(current(), __builtin_return_address(0)).c_str());
}

cudaError_t emu_allow_shared(const void *kernel, int bytes) {
    if (bytes > 227 * 1024) {
        emu::machine.error = "a block has 227 KB of shared memory";
        return emu::last_error = cudaErrorInvalidValue;
    }
    emu::allowed_shared[kernel] = bytes;
    return cudaSuccess;
}
void emu_allow_large_clusters(const void *kernel) { emu::large_clusters.insert(kernel); }
/* As if a block filled a multiprocessor, and clusters lay anywhere. */
int emu_active_clusters(const cudaLaunchConfig_t &config) {
    unsigned size = 1;
    for (unsigned n = 0; n < config.numAttrs; ++n)
        if (config.attrs[n].id == cudaLaunchAttributeClusterDimension) size = config.attrs[n].val.clusterDim.x;
    const char *sms = getenv("FA_EMULATOR_SMS");
    return (sms ? atoi(sms) : FA_EMULATED_SM_COUNT) / static_cast<int>(size);
}
cudaError_t cudaPeekAtLastError() { return emu::last_error; }
cudaError_t cudaGetLastError() {
    const cudaError_t error = emu::last_error;
    emu::last_error = cudaSuccess;
    return error;
}
const char *cudaGetErrorName(cudaError_t error) {
    return error == cudaErrorEmulator ? "cudaErrorEmulator"
           : error == cudaSuccess     ? "cudaSuccess"
                                      : "cudaErrorInvalidConfiguration";
}
const char *cudaGetErrorString(cudaError_t error) {
    return error == cudaSuccess ? "no error" : emu::machine.error.c_str();
}
