/* Hopper synchronisation: mbarriers in shared memory, named barriers, register reallocation (sm_90a).
 *
 * Protocol of a ring of stages: `full` counts one arrival (the producer's arrive_expect) plus the bytes that TMA
 * delivers, `empty` one arrival for each consumer. A waiter passes the parity of the phase that it waits to end:
 * consumers start at 0, producers at 1 (a fresh barrier reads as if the phase before had ended), both flip when the
 * ring wraps; `RingState` keeps count. `site` is the caller's line, for
 * a chaos build (chaos.cuh).
 */
#pragma once
#include <stdint.h> // uint64_t

#include "common/chaos.cuh"
#include "common/ptx.cuh"  // shared_address, named_barrier_sync
#include "common/ring.cuh" // RingState

namespace fa::sm90 {

__device__ __forceinline__ void mbarrier_init(uint64_t *barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals));
}

/* Its memory may be used for something else, a new barrier, too. Nobody waits there or arrives any more. */
__device__ __forceinline__ void mbarrier_invalidate(uint64_t *barrier) {
    asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

/* Makes mbarrier_init visible to TMA and to the cluster; follow with __syncthreads(). */
__device__ __forceinline__ void mbarrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint64_t *barrier, int site = __builtin_LINE()) {
    FA_CHAOS_POINT(site);
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

/* Arrives and adds `bytes` to what the phase waits for. One thread, before it issues the copies. */
__device__ __forceinline__ void mbarrier_arrive_expect(uint64_t *barrier, uint32_t bytes, int site = __builtin_LINE()) {
    FA_CHAOS_POINT(site);
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ bool mbarrier_try_wait(uint64_t *barrier, uint32_t parity) {
    uint32_t done;
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, p;\n"
                 "}"
                 : "=r"(done)
                 : "r"(shared_address(barrier)), "r"(parity)
                 : "memory");
    return done != 0;
}

__device__ __forceinline__ void mbarrier_wait(uint64_t *barrier, uint32_t parity, int site = __builtin_LINE()) {
    FA_CHAOS_POINT(site);
#ifdef FA_CHAOS
    const uint32_t begun = chaos::now();
    while (!mbarrier_try_wait(barrier, parity)) chaos::limit(begun, site, parity);
#else
    while (!mbarrier_try_wait(barrier, parity)) {
    }
#endif
}

/* Registers a thread from here on: all warps of a warpgroup, multiples of 8 in [24, 256]. */
template <int Registers> __device__ __forceinline__ void registers_raise() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}
template <int Registers> __device__ __forceinline__ void registers_lower() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}

/* True in one lane of a converged warp. */
__device__ __forceinline__ bool elect_one() {
    uint32_t elected;
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "elect.sync _|p, 0xffffffff;\n"
                 "selp.u32 %0, 1, 0, p;\n"
                 "}"
                 : "=r"(elected));
    return elected != 0;
}

} // namespace fa::sm90
