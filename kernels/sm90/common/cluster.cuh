/* Thread-block clusters, distributed shared memory and dependent launches (sm_90). */
#pragma once
#include "sm90/common/barrier.cuh"

namespace fa::sm90 {

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

/* Sends to the cluster-window address `to` of another block; the bytes count on `barrier`, a barrier of that block. */
__device__ __forceinline__ void cluster_send(uint32_t to, uint32_t barrier, float2 x, int site = __builtin_LINE()) {
    FA_CHAOS_POINT(site);
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%2, %3}, [%1];" ::"r"(to),
                 "r"(barrier), "f"(x.x), "f"(x.y)
                 : "memory");
}
__device__ __forceinline__ void cluster_send(uint32_t to, uint32_t barrier, float4 x, int site = __builtin_LINE()) {
    FA_CHAOS_POINT(site);
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%2, %3, %4, %5}, [%1];" ::"r"(to),
        "r"(barrier), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w)
        : "memory");
}

/* A launch with programmatic stream serialisation may start while the kernel before it still runs: nothing of global
 * memory may be read or written before dependency_wait(). dependency_release() lets the next such launch start. */
__device__ __forceinline__ void dependency_wait(int site = __builtin_LINE()) {
    FA_CHAOS_POINT(site);
    asm volatile("griddepcontrol.wait;" ::: "memory");
}
__device__ __forceinline__ void dependency_release(int site = __builtin_LINE()) {
    FA_CHAOS_POINT(site);
    asm volatile("griddepcontrol.launch_dependents;");
}

} // namespace fa::sm90
