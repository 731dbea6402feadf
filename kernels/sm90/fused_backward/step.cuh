/* The way of dS in wgmma_fused_backward_sm90: to shared memory, into dQ = dS K, and from there to the sums of dQ in
 * global memory.
 *
 * A block of queries has kQueryElements sums in float32, in the order of the accumulators that make them: [warpgroup]
 * [warp][accumulators 4 c .. 4 c + 3][lane][4]. A warp's part is kPartElements without a gap, which one bulk addition
 * moves; rows.cuh clears the sums and turns them into dq. */
#pragma once
#include "sm90/backward/kernel.cuh"
#include <limits.h>    // INT_MAX
#include <type_traits> // is_same_v

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
    tma_store_commit();
}

/* A warp's dq to its part of shared memory. */
__device__ __forceinline__ void copy_part(float4 *staged, const float (&dq)[kDqCount], int lane) {
#pragma unroll
    for (int c = 0; c < kDqCount / 4; ++c)
        staged[c * 32 + lane] = make_float4(dq[4 * c], dq[4 * c + 1], dq[4 * c + 2], dq[4 * c + 3]);
}

/* A warp's dq to `staged`, kPartBytes of shared memory that are the warp's own. Its addition before may still read
 * them: lane 0 waits for that. The whole warp calls it. */
__device__ __forceinline__ void stage_part(float4 *staged, const float (&dq)[kDqCount], int lane) {
    if (lane == 0) tma_store_wait_read();
    __syncwarp();
    copy_part(staged, dq, lane);
}

/* A warp's dq to its sums, this lane's first of which is at `to`. */
__device__ __forceinline__ void add_part(float *to, const float (&dq)[kDqCount], int site = __builtin_LINE()) {
    FA_CHAOS_POINT(site);
#pragma unroll
    for (int c = 0; c < kDqCount / 4; ++c)
        asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to + c * 128), "f"(dq[4 * c]),
                     "f"(dq[4 * c + 1]), "f"(dq[4 * c + 2]), "f"(dq[4 * c + 3])
                     : "memory");
}

/* The same where nothing has been added before. */
__device__ __forceinline__ void store_part(float *to, const float (&dq)[kDqCount]) {
#pragma unroll
    for (int c = 0; c < kDqCount / 4; ++c)
        *reinterpret_cast<float4 *>(to + c * 128) = make_float4(dq[4 * c], dq[4 * c + 1], dq[4 * c + 2], dq[4 * c + 3]);
}

/* Adds to a warp's dq the sums of the CTAs before it, this lane's first of which is at `from`. The caller has waited
 * for their turn. Reads past L1, which may hold older sums. */
__device__ __forceinline__ void take_part(float (&dq)[kDqCount], const float *from) {
    float4 before[kDqCount / 4];
#pragma unroll
    for (int c = 0; c < kDqCount / 4; ++c) before[c] = __ldcg(reinterpret_cast<const float4 *>(from + c * 128));
#pragma unroll
    for (int c = 0; c < kDqCount / 4; ++c) {
        dq[4 * c] += before[c].x, dq[4 * c + 1] += before[c].y;
        dq[4 * c + 2] += before[c].z, dq[4 * c + 3] += before[c].w;
    }
}

/* Of `Rows` queries, as TMA brings them to shared memory and a thread reads them 16 bytes at a time. */
template <int Rows> struct alignas(128) FusedRowBlock {
    float lse[Rows]; // [16 queries][lane % 4]: queries 2 l, 2 l + 1, 2 l + 8, 2 l + 9, in base 2; +inf where
                     // one sees no key, and past the last
    float minus_delta[2 * Rows]; // [8 queries][lane % 4]: queries 2 l, 2 l + 1, and both again; 0 there
};

template <int Tile> __device__ __forceinline__ int floor_blocks(int row) {
    return row >= 0 ? row / Tile : -((Tile - 1 - row) / Tile);
}
template <int Tile> __device__ __forceinline__ int ceil_blocks(int row) { return floor_blocks<Tile>(row + Tile - 1); }

/* scores (64 x 2 * Count) += Q K^T, else as gemm_qk(). */
template <class T, int HeadDim, int Count>
__device__ __forceinline__ void gemm_onto(float (&scores)[Count], uint32_t q, uint32_t q_slab_bytes, uint32_t k,
                                          uint32_t k_slab_bytes) {
    const uint64_t a = descriptor_k_major(q), b = descriptor_k_major(k);
#pragma unroll
    for (int step = 0; step < HeadDim / 16; ++step) {
        const uint32_t slab = step / 4, inside = (step % 4) * 32;
        wgmma_ss<T>(scores, a + ((slab * q_slab_bytes + inside) >> 4), b + ((slab * k_slab_bytes + inside) >> 4), 1);
    }
}

/* Keys or values of a tile of 128 rows to L2. One thread. */
template <int Columns>
__device__ __forceinline__ void tma_prefetch_tile(const CUtensorMap *map, int row, int head, int batch) {
#pragma unroll
    for (int column = 0; column < Columns; column += kSlabColumns)
        asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(map), "r"(column),
                     "r"(row), "r"(head), "r"(batch)
                     : "memory");
}

} // namespace fa::sm90
