/* The order of a call's tiles of queries by what a map (pair_map.cuh) leaves of them, so that the longest can go first.
 */
#pragma once
#include "common/launch.cuh" // fa_start
#include "common/mask.cuh"   // ShiftedBand, tile_span
#include "sm90/score/pair_map.cuh"

namespace fa::sm90 {

struct OrderParams {
    PairMap map;
    ShiftedBand visible;
    int seq_q, tile_rows, tiles; // tiles: of a plane
    int *order;                  // [plane][tiles]
};

/* Blocks of 64 keys that some row of a tile sees. */
__device__ __forceinline__ int seen_blocks(const OrderParams &p, int plane, int tile) {
    const int row = tile * p.tile_rows, end = min(row + p.tile_rows, p.seq_q);
    const Span<int> keys = tile_span(p.visible, row, end - 1);
    if (keys.empty()) return 0;
    const Span<int> blocks = {keys.begin / 64, (keys.end + 63) / 64};
    if (!p.map.column_step) return blocks.end - blocks.begin;
    int count = 0;
    for (int word = blocks.begin / 32; word * 32 < blocks.end; ++word) {
        uint32_t seen = 0;
        for (int block = row / 64; block * 64 < end; ++block) seen |= p.map.seen[p.map.bits_of(plane, block) + word];
        if (word == blocks.begin / 32) seen &= ~0u << blocks.begin % 32;
        if (blocks.end - word * 32 < 32) seen &= (1u << (blocks.end - word * 32)) - 1;
        count += __popc(seen);
    }
    return count;
}

/* Tiles of a plane from the one with the fewest blocks to the one with the most. A block of threads a plane. */
static __global__ void __launch_bounds__(256) order_tiles(const __grid_constant__ OrderParams p) {
    extern __shared__ int counts[];
    const int plane = blockIdx.x;
    for (int tile = threadIdx.x; tile < p.tiles; tile += blockDim.x) counts[tile] = seen_blocks(p, plane, tile);
    __syncthreads();
    for (int tile = threadIdx.x; tile < p.tiles; tile += blockDim.x) {
        int before = 0;
        for (int other = 0; other < p.tiles; ++other)
            before += counts[other] < counts[tile] || (counts[other] == counts[tile] && other < tile);
        p.order[int64_t(plane) * p.tiles + before] = tile;
    }
}

/* Tiles of a plane that are ordered at most: a block of threads holds a number for each. */
inline constexpr int kMostOrdered = 4096;

inline fa_code launch_order(const OrderParams &params, int64_t planes, const fa_launch &launch) {
    return fa_start(order_tiles, planes, 256, params.tiles * sizeof(int), launch, params);
}

} // namespace fa::sm90
