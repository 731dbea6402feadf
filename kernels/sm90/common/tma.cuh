/* Hopper's bulk tensor copies (TMA), device side: 4-D tiles between global memory and swizzled shared memory.
 *
 * Maps come from sm90/common/tensor_map.h: axes (column, row, head, batch), boxes of 64 columns x `rows` rows, so a
 * tile of head_dim columns is ceil(head_dim / 64) slabs, each `rows` x 128 bytes, 1024-byte aligned, 128-byte swizzled:
 * the 16-byte chunk c of row r lies at chunk c ^ (r % 8). Elements outside the tensor, negative coordinates included,
 * read as zero and count among the bytes that the barrier expects.
 */
#pragma once
#include "sm90/common/barrier.cuh"
#include <cuda.h>

namespace fa::sm90 {

inline constexpr int kSlabColumns = 64;   // 16-bit elements in a 128-byte row
inline constexpr int kSlabRowBytes = 128; // also the swizzle span

/* L2 eviction priorities, as createpolicy.fractional encodes them. */
inline constexpr uint64_t kEvictFirst = 0x12F0000000000000;
inline constexpr uint64_t kEvictLast = 0x14F0000000000000;

__device__ __forceinline__ void tensor_map_prefetch(const CUtensorMap *map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/* One slab to shared memory; completes on `barrier`. One thread. */
__device__ __forceinline__ void tma_load(void *to, const CUtensorMap *map, uint64_t *barrier, int column, int row,
                                         int head, int batch, uint64_t policy) {
    FA_CHAOS_POINT(__LINE__);
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared_address(to)),
                 "l"(map), "r"(shared_address(barrier)), "r"(column), "r"(row), "r"(head), "r"(batch), "l"(policy)
                 : "memory");
}

/* All slabs of a tile of `Columns` columns and `Rows` rows, one after the other in shared memory. One thread. */
template <int Columns, int Rows>
__device__ __forceinline__ void tma_load_tile(void *to, const CUtensorMap *map, uint64_t *barrier, int row, int head,
                                              int batch, uint64_t policy) {
    constexpr int kSlabs = (Columns + kSlabColumns - 1) / kSlabColumns;
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab)
        tma_load(static_cast<char *>(to) + slab * Rows * kSlabRowBytes, map, barrier, slab * kSlabColumns, row, head,
                 batch, policy);
}

/* Makes this thread's writes to shared memory visible to TMA; then a barrier, then one thread stores. */
__device__ __forceinline__ void tma_store_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

/* One box from shared memory, what lies outside the tensor left out. One thread, always the same one: it commits its
 * stores as a group and waits until they have read (`tma_store_wait_read`) before the memory is written again. */
__device__ __forceinline__ void tma_store(const CUtensorMap *map, const void *from, int column, int row, int head,
                                          int batch, int site = __builtin_LINE()) {
    FA_CHAOS_POINT(site);
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
                 "r"(shared_address(from)), "r"(column), "r"(row), "r"(head), "r"(batch)
                 : "memory");
}
__device__ __forceinline__ void tma_store_commit(int site = __builtin_LINE()) {
    FA_CHAOS_POINT(site);
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
__device__ __forceinline__ void tma_store_wait_read(int site = __builtin_LINE()) {
    FA_CHAOS_POINT(site);
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
/* Waits until this thread's stores are done: before the CTA ends. */
__device__ __forceinline__ void tma_store_wait(int site = __builtin_LINE()) {
    FA_CHAOS_POINT(site);
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

/* Bytes that tma_load_tile delivers. */
template <int Columns, int Rows>
inline constexpr int kTileBytes = (Columns + kSlabColumns - 1) / kSlabColumns *Rows *kSlabRowBytes;

} // namespace fa::sm90
