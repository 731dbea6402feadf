/* Thread-block clusters and distributed shared memory (sm_90 and later). */
#pragma once
#include <stdint.h> // uint32_t

#include "common/chaos.cuh"

namespace fa {

__device__ __forceinline__ uint32_t cluster_rank() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ uint32_t cluster_index() {
    uint32_t index;
    asm volatile("mov.u32 %0, %%clusterid.x;" : "=r"(index));
    return index;
}

/* Halves of a barrier of all threads of the cluster: no thread passes the wait before all have arrived. Arriving orders
 * only those memory accesses that a fence before it orders (mbarrier_init_fence). */
__device__ __forceinline__ void cluster_arrive_relaxed(int site = __builtin_LINE()) {
    FA_CHAOS_POINT(site);
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
/* Arriving orders what this thread has read and written before, in all memory. */
__device__ __forceinline__ void cluster_arrive(int site = __builtin_LINE()) {
    FA_CHAOS_POINT(site);
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait(int site = __builtin_LINE()) {
    FA_CHAOS_POINT(site);
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

/* Address, in the cluster's shared window, of `address` (this block's shared window) in the block of rank `rank`. */
__device__ __forceinline__ uint32_t cluster_address(uint32_t address, uint32_t rank) {
    uint32_t mapped;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
    return mapped;
}

/* Writes a word at such an address. */
__device__ __forceinline__ void cluster_store(uint32_t to, uint32_t word) {
    asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(to), "r"(word) : "memory");
}

} // namespace fa
