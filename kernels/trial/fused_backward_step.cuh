/* What wgmma_fused_backward_sm90 does with dS: to shared memory, into dQ = dS K, and from there to the sums of dQ in
 * global memory.
 *
 * A block of queries has kQueryElements sums in float32, in the order of the accumulators that make them: [warpgroup]
 * [warp][accumulators 4 c .. 4 c + 3][lane][4]. A warp's part is kPartElements without a gap, which one bulk addition
 * moves; fused_backward_rows.cuh clears the sums and turns them into dq. */
#pragma once
#include "sm90/backward.cuh"

namespace fa::sm90 {

inline constexpr int kDqCount = 32;                          // accumulators a thread: 64 queries x 64 columns
inline constexpr int kPartElements = 32 * kDqCount;          // of a warp
inline constexpr int kPartBytes = kPartElements * 4;         // float32
inline constexpr int kQueryElements = 2 * 4 * kPartElements; // of two warpgroups
inline constexpr int kRowsOfPart = 16, kColumnsOfPart = 64;  // what a warp's part covers

/* d (64 x 64) = A B (+ d if accumulate), both in shared memory with the reduction axis along rows. */
template <class T>
__device__ __forceinline__ void wgmma_rows(float (&d)[kDqCount], uint64_t a_descriptor, uint64_t b_descriptor,
                                           int accumulate) {
#define FA_WGMMA_ROWS(TYPE)                                                                                            \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"                                                          \
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {" FA_LIST_64                           \
                 "}, %32, %33, p, 1, 1, 1, 1;\n}"                                                                      \
                 : FA_ACC_64                                                                                           \
                 : "l"(a_descriptor), "l"(b_descriptor), "r"(accumulate))
    if constexpr (std::is_same_v<T, __half>)
        FA_WGMMA_ROWS("f16");
    else
        FA_WGMMA_ROWS("bf16");
#undef FA_WGMMA_ROWS
}

/* dq (64 queries x 64 columns) = dS K of `Keys` keys: a slab of dS^T and one of K, both with a row a key. Commits
 * nothing. */
template <class T, int Keys>
__device__ __forceinline__ void gemm_dq(float (&dq)[kDqCount], uint32_t ds_slab, uint32_t k_slab) {
    const uint64_t a = descriptor_mn_major(ds_slab, 0), b = descriptor_mn_major(k_slab, 0);
#pragma unroll
    for (int step = 0; step < Keys / 16; ++step)
        wgmma_rows<T>(dq, a + ((step * 16 * kSlabRowBytes) >> 4), b + ((step * 16 * kSlabRowBytes) >> 4), step != 0);
}

/* A warp's 16 keys x 4 * Words queries, packed as an A operand, to rows of slabs of 64 queries, `slab_bytes` apart.
 * `rows` addresses the first of the 16 rows. The whole warp calls it. */
template <int Words>
__device__ __forceinline__ void store_words(uint32_t rows, uint32_t slab_bytes, uint32_t (&words)[Words], int lane) {
    FA_CHAOS_POINT(__LINE__);
    const uint32_t row = rows + lane % 16 * kSlabRowBytes, chunk = lane / 16 ^ lane % 8;
#pragma unroll
    for (int j = 0; j < Words / 4; ++j) { // queries 16 * j to 16 * j + 15
        const uint32_t address = row + j / 4 * slab_bytes + 16 * (chunk ^ (j % 4 * 2));
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                     "r"(words[4 * j]), "r"(words[4 * j + 1]), "r"(words[4 * j + 2]), "r"(words[4 * j + 3])
                     : "memory");
    }
}

/* Adds `bytes` of float32 from shared to global memory, both 16-byte aligned, without waiting. One thread, always the
 * same one, as for tma_store(). */
__device__ __forceinline__ void bulk_add(float *to, const void *from, uint32_t bytes, int site = __builtin_LINE()) {
    FA_CHAOS_POINT(site);
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
                 "r"(shared_address(from)), "r"(bytes)
                 : "memory");
}

/* A warp's dq to `staged`, kPartBytes of shared memory that are the warp's own. Its addition before may still read
 * them: lane 0 waits for that. The whole warp calls it. */
__device__ __forceinline__ void stage_part(float4 *staged, const float (&dq)[kDqCount], int lane) {
    if (lane == 0) tma_store_wait_read();
    __syncwarp();
#pragma unroll
    for (int c = 0; c < kDqCount / 4; ++c)
        staged[c * 32 + lane] = make_float4(dq[4 * c], dq[4 * c + 1], dq[4 * c + 2], dq[4 * c + 3]);
}

/* Adds it to the warp's part of the sums, after a tma_store_fence() of all lanes and __syncwarp(). Lane 0 calls it. */
__device__ __forceinline__ void add_part(float *part, const float4 *staged) {
    bulk_add(part, staged, kPartBytes);
    tma_store_commit();
}

} // namespace fa::sm90
