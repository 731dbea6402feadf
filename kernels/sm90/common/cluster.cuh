/* Sends within a cluster, and dependent launches (sm_90). */
#pragma once
#include "common/cluster.cuh" // cluster_rank, cluster_arrive, cluster_address
#include "sm90/common/barrier.cuh"

namespace fa::sm90 {

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
