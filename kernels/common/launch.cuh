/* Host side of a kernel: its plan inside the fa_plan, CUDA errors as text in the fa_status, shared memory. */
#pragma once

#include <atomic>
#include <climits> // INT32_MAX
#include <mutex>
#include <type_traits> // std::is_trivially_copyable_v

#include <cuda_runtime.h> // cudaError_t, cudaGetErrorName, cudaGetLastError

#include "common/chaos.cuh" // FA_CHAOS_ARM
#include "fa.h"             // fa_plan, fa_launch

namespace fa {

constexpr uint32_t kFloat16Bits = 1 << FA_F16 | 1 << FA_BF16, kFloatBits = kFloat16Bits | 1 << FA_F32;

/* Bytes of dynamic shared memory that a block may use without fa_allow_smem; a chaos build takes some itself. */
#ifdef FA_CHAOS
constexpr size_t kSmemFree = 47 * 1024;
#else
constexpr size_t kSmemFree = 48 * 1024;
#endif

constexpr int kSmemEntries = 1024, kSmemProbes = 16; // of fa_smem_allowed

} // namespace fa

/* The end of a kernel's file: `FA_DEFINE_KERNEL(name) = {.abi = FA_KERNEL_ABI, ...};`. */
#define FA_DEFINE_KERNEL(name)                                                                                         \
    extern "C" FA_EXPORT const fa_kernel fa_kernel_##name;                                                             \
    const fa_kernel fa_kernel_##name

/* The kernel's own part of a plan, a struct of values. */
template <class Own> Own &fa_own(fa_plan *plan) {
    static_assert(sizeof(Own) <= FA_PLAN_OWN && alignof(Own) <= 8 && std::is_trivially_copyable_v<Own>);
    return *reinterpret_cast<Own *>(plan->own);
}
template <class Own> const Own &fa_own(const fa_plan *plan) { return fa_own<Own>(const_cast<fa_plan *>(plan)); }

/* Turns a CUDA error into FA_ECUDA with its name and the call that failed, and clears CUDA's last error. A context that
 * is lost (illegal address, launch failure ...) keeps failing, which the message says. */
inline fa_code fa_cuda_fail(const fa_launch &launch, cudaError_t error, const char *what) {
    cudaGetLastError();
    bool lost = error == cudaErrorIllegalAddress || error == cudaErrorLaunchFailure || error == cudaErrorAssert ||
                error == cudaErrorHardwareStackError || error == cudaErrorIllegalInstruction ||
                error == cudaErrorMisalignedAddress || error == cudaErrorInvalidPc || error == cudaErrorLaunchTimeout;
    fa_code code = error == cudaErrorMemoryAllocation ? FA_EMEMORY : FA_ECUDA;
    return launch.host->fail(launch.status, code, "%s: %s (%s)%s", what, cudaGetErrorName(error),
                             cudaGetErrorString(error),
                             lost ? "; this process's CUDA context is lost, restart the process" : "");
}

/* Evaluates a call that returns cudaError_t; leaves the enclosing function with FA_ECUDA unless it succeeded. */
#define FA_CUDA_TRY(launch, call)                                                                                      \
    do {                                                                                                               \
        cudaError_t fa_cuda_error = (call);                                                                            \
        if (fa_cuda_error != cudaSuccess) return fa_cuda_fail((launch), fa_cuda_error, #call);                         \
    } while (0)

/* Shared memory that kernels have been allowed, by kernel and device: asking costs a tenth of setting it again (25 and
 * 210 ns on an H200's host). Entries are added under the lock, never change their key and only grow their bytes. */
struct fa_smem_entry {
    std::atomic<uint64_t> key; // 0: free
    std::atomic<int> bytes;
};
inline fa_smem_entry fa_smem_allowed[fa::kSmemEntries];
inline std::mutex fa_smem_lock;

/* The entry of `key`, or a free one for it, or NULL where its places are taken. */
inline fa_smem_entry *fa_smem_find(uint64_t key) {
    const uint64_t first = key * UINT64_C(0x9E3779B97F4A7C15) >> 32;
    for (int n = 0; n < fa::kSmemProbes; ++n) {
        fa_smem_entry &entry = fa_smem_allowed[(first + n) % fa::kSmemEntries];
        const uint64_t found = entry.key.load(std::memory_order_acquire);
        if (found == key || found == 0) return &entry;
    }
    return nullptr;
}

/* Lets a kernel use `bytes` of dynamic shared memory a block on the current device, once for each device. */
template <class Kernel> fa_code fa_allow_smem(Kernel *kernel, size_t bytes, const fa_launch &launch) {
    int device;
    FA_CUDA_TRY(launch, cudaGetDevice(&device));
    const uint64_t key = reinterpret_cast<uintptr_t>(kernel) << 8 | static_cast<uint8_t>(device + 1);
    const int wanted = static_cast<int>(bytes);
    fa_smem_entry *entry = fa_smem_find(key);
    if (entry && entry->key.load(std::memory_order_relaxed) == key &&
        entry->bytes.load(std::memory_order_acquire) >= wanted)
        return FA_OK;
    const std::lock_guard<std::mutex> guard(fa_smem_lock);
    entry = fa_smem_find(key); // another thread may have added it
    if (entry && entry->key.load(std::memory_order_relaxed) == key && entry->bytes.load() >= wanted) return FA_OK;
    FA_CUDA_TRY(launch, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, wanted));
    if (entry) {
        entry->bytes.store(wanted, std::memory_order_release);
        entry->key.store(key, std::memory_order_release);
    }
    return FA_OK;
}

/* Launches a kernel on `count` blocks of one axis, if there are any; a kernel walks over what is above INT32_MAX. */
template <class Kernel, class... Args>
fa_code fa_start(Kernel *kernel, int64_t count, int threads, size_t smem_bytes, const fa_launch &launch,
                 const Args &...args) {
    if (count == 0) return FA_OK;
    if (smem_bytes > fa::kSmemFree) FA_TRY(fa_allow_smem(kernel, smem_bytes, launch));
    FA_CHAOS_ARM(launch.stream, launch);
    const unsigned blocks = static_cast<unsigned>(count < INT32_MAX ? count : INT32_MAX);
    kernel<<<blocks, threads, smem_bytes, static_cast<cudaStream_t>(launch.stream)>>>(args...);
    FA_CUDA_TRY(launch, cudaGetLastError());
    return FA_OK;
}
