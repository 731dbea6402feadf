/* Makes the lists of block_list.cuh: a launch after that of make_map.cuh. */
#pragma once
#include "common/launch.cuh" // fa_start
#include "sm90/score/block_list.cuh"

namespace fa::sm90 {

struct ListParams {
    PairMap map;
    BlockShape shape;
    int tiles, length;
    uint32_t *words;
    int *counts;    // [plane][tile]
    int *order;     // NULL: not wanted
    uint32_t *done; // [plane], 0 at launch: tiles whose lists are there
};

inline constexpr int kListThreads = 128;
inline constexpr int kMostOrdered = 4096; // tiles of a plane that are ordered at most

/* Tiles of a plane from the one with the fewest blocks to the one with the most. */
__device__ __forceinline__ void order_plane(const ListParams &p, int plane) {
    __shared__ int counts[kMostOrdered];
    for (int tile = threadIdx.x; tile < p.tiles; tile += kListThreads)
        counts[tile] = __ldcg(p.counts + int64_t(plane) * p.tiles + tile);
    __syncthreads();
    for (int tile = threadIdx.x; tile < p.tiles; tile += kListThreads) {
        int before = 0;
        for (int other = 0; other < p.tiles; ++other)
            before += counts[other] < counts[tile] || (counts[other] == counts[tile] && other < tile);
        p.order[int64_t(plane) * p.tiles + before] = tile;
    }
}

/* A block of threads a tile; the last of a plane orders its tiles. */
static __global__ void __launch_bounds__(kListThreads) list_blocks(const __grid_constant__ ListParams p) {
    __shared__ int seen_by[kListThreads / 32];
    __shared__ int is_last;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int plane = blockIdx.x / p.tiles, tile = blockIdx.x % p.tiles, row = tile * 64 * p.shape.warpgroups;
    uint32_t *const list = p.words + int64_t(blockIdx.x) * p.length;
    const Span<int> blocks = p.shape.blocks(row); // count, end
    int total = 0;
    for (int first = 0; first < blocks.begin; first += kListThreads) {
        const int block = first + threadIdx.x;
        uint32_t word = 0;
        if (block < blocks.begin) word = p.shape.word_of(&p.map, plane, row, blocks.end - (block + 1) * p.shape.tile_n);
        const bool seen = word & BlockWord::kSeen;
        const uint32_t together = __ballot_sync(0xffffffff, seen);
        if (lane == 0) seen_by[warp] = __popc(together);
        __syncthreads();
        int place = total + __popc(together & ((1u << lane) - 1));
        for (int n = 0; n < kListThreads / 32; ++n) {
            if (n < warp) place += seen_by[n];
            total += seen_by[n];
        }
        if (seen) list[place] = word;
        __syncthreads(); // of seen_by, and of the list
    }
    if (threadIdx.x == 0) {
        if (total == 0) list[0] = uint32_t((blocks.end - p.shape.tile_n) >> 6) << BlockWord::kShift | BlockWord::kLast;
        if (total > 0) list[total - 1] |= BlockWord::kLast;
        p.counts[blockIdx.x] = total;
        __threadfence();
        is_last = p.order && atomicAdd(p.done + plane, 1) + 1 == uint32_t(p.tiles);
    }
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    order_plane(p, plane);
}

} // namespace fa::sm90
