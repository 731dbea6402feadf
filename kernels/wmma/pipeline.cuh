/* Shared-memory barriers between the warps that fetch tiles and the warps that use them (sm_80 and newer).
 *
 * A ring of kStages slots has two barriers a slot: `full` completes when the slot's copies have landed, `empty` when
 * every consumer has let go of it. The n-th use of a slot waits for phase parity n % 2 of `full`, and a fetch for the
 * opposite parity of `empty`, which lets the first fetch through. */
#pragma once

#include <stdint.h> // uint64_t

#include "common/ptx.cuh" // shared_address

namespace fa::wmma_tiles {

__device__ __forceinline__ void barrier_init(uint64_t *barrier, int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

/* This thread has written, or read, what it had to; everything before is visible to the threads that wait. */
__device__ __forceinline__ void barrier_arrive(uint64_t *barrier, int site = __builtin_LINE()) {
    FA_CHAOS_POINT(site);
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(shared_address(barrier))
                 : "memory");
}

/* The same, once this thread's asynchronous copies so far have landed. Does not wait. */
__device__ __forceinline__ void barrier_arrive_after_copies(uint64_t *barrier, int site = __builtin_LINE()) {
    FA_CHAOS_POINT(site);
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

/* Whether the phase of this parity has ended; on sm_90 the question sleeps a while for it. */
__device__ __forceinline__ bool barrier_try_wait(uint64_t *barrier, int parity) {
    uint32_t done;
    asm volatile("{\n"
                 ".reg .pred done;\n"
#if __CUDA_ARCH__ >= 900
                 "mbarrier.try_wait.parity.shared.b64 done, [%1], %2;\n"
#else
                 "mbarrier.test_wait.parity.shared.b64 done, [%1], %2;\n"
#endif
                 "selp.u32 %0, 1, 0, done;\n"
                 "}"
                 : "=r"(done)
                 : "r"(shared_address(barrier)), "r"(parity)
                 : "memory");
    return done != 0;
}

__device__ __forceinline__ void barrier_wait(uint64_t *barrier, int parity, int site = __builtin_LINE()) {
    FA_CHAOS_POINT(site);
#ifdef FA_CHAOS
    const uint32_t begun = chaos::now();
    while (!barrier_try_wait(barrier, parity)) chaos::limit(begun, site, parity);
#else
    while (!barrier_try_wait(barrier, parity)) {
    }
#endif
}

/* Copies 16 bytes to shared memory, of which the first `bytes` come from global memory and the rest are 0; with 0 bytes
 * nothing is read. Both addresses are multiples of 16. */
__device__ __forceinline__ void copy_16_async(void *to, const void *from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void wait_copies(int site = __builtin_LINE()) {
    FA_CHAOS_POINT(site);
    asm volatile("cp.async.wait_all;" ::: "memory");
}

} // namespace fa::wmma_tiles
