/* The steps of tiles in instances of the kinds kLight and kGeneral: a list a tile, of the blocks of queries that see a
 * pair of it.
 *
 * A warp makes a tile's list before the products. For each block it counts the tiles of the block that add to its sums
 * before: turns count those that see the block alone, so that the first and the last to add are known, and no tile
 * waits for one that leaves the block out. */
#pragma once
#include "sm90/fused_backward/config.cuh"

namespace fa::sm90 {

inline constexpr int kLightStepsWarps = 4;

/* Which of 32 tiles of 128 keys, from 32 * `word` on, hold a pair that a block of queries sees by the map. */
template <int TileQ>
__device__ __forceinline__ uint32_t tiles_seen(const PairMap &map, int plane, int block, int word) {
    if (!map.seen) return ~0u;
    uint32_t low = 0, high = 0;
#pragma unroll
    for (int n = 0; n < TileQ / 64; ++n) {
        const uint32_t *const bits = map.seen + map.bits_of(plane, min(block * (TileQ / 64) + n, map.row_blocks - 1));
        if (!map.column_step) {
            low |= bits[0] & 1 ? ~0u : 0, high = low;
            continue;
        }
        if (2 * word < map.bit_words) low |= bits[2 * word];
        if (2 * word + 1 < map.bit_words) high |= bits[2 * word + 1];
    }
    const auto pairs = [](uint32_t x) { // one bit for two
        x = (x | x >> 1) & 0x55555555, x = (x | x >> 1) & 0x33333333, x = (x | x >> 2) & 0x0f0f0f0f;
        return (x | x >> 4) & 0x00ff00ff;
    };
    const uint32_t a = pairs(low), b = pairs(high);
    return (a & 0xff) | (a >> 8 & 0xff00) | (b & 0xff) << 16 | (b >> 16 & 0xff) << 24;
}

/* Bits of a word that stand for [begin, end), of which it has 32 from `first` on. */
__device__ __forceinline__ uint32_t bits_between(int begin, int end, int first) {
    const auto below = [](int n) { return n <= 0 ? 0u : n >= 32 ? ~0u : (1u << n) - 1; };
    return below(end - first) & ~below(begin - first);
}

/* The step of a tile for a block of queries; false: the tile leaves it out. Tiles count from the map's first key. */
template <int TileQ>
__device__ __forceinline__ bool light_step(const LightStepsParams &p, int plane, int block, int tile, LightStep *step) {
    const int first = max(block * TileQ, p.call.row_begin), last = min((block + 1) * TileQ, p.call.row_end) - 1;
    const Span<int> keys = tile_span(p.call.visible, first, last);
    const int offset = p.call.key_begin - p.map_key;
    const int begin = (keys.begin + offset) / kFusedTileK, end = (keys.end - 1 + offset) / kFusedTileK + 1;
    if (first > last || keys.empty() || tile < begin || tile >= end) return false;
    if (!(tiles_seen<TileQ>(p.map, plane, block, tile / 32) >> tile % 32 & 1)) return false;
    uint32_t before = 0, after = 0;
    for (int word = begin / 32; word <= (end - 1) / 32; ++word) {
        const uint32_t seen = tiles_seen<TileQ>(p.map, plane, block, word);
        before += __popc(seen & bits_between(tile + 1, end, 32 * word));
        after |= seen & bits_between(begin, tile, 32 * word);
    }
    step->turn = before, step->place = (before ? 0 : kAddsFirst) | (after ? 0 : kAddsLast);
    return true;
}

template <int TileQ>
__global__ void __launch_bounds__(32 * kLightStepsWarps) light_steps(const __grid_constant__ LightStepsParams p) {
    FA_CHAOS_BEGIN();
    const int lane = threadIdx.x % 32, index = blockIdx.x * kLightStepsWarps + threadIdx.x / 32;
    if (index >= p.tiles) return;
    const int pair = index / p.key_tiles, tile = index - pair * p.key_tiles, flat = p.call.first_pair + pair;
    const int batch = flat / p.call.heads_kv, kv_head = flat - batch * p.call.heads_kv;
    const int key = tile * kFusedTileK - p.call.key_begin;
    const QueryBlocks blocks = find_queries<TileQ>(p.call, key, key + kFusedTileK);
    LightStep *const steps = p.steps + int64_t(index) * p.capacity;
    int count = 0;
    for (int member = 0; member < p.call.group; ++member) {
        const int plane = p.map.plane(batch, kv_head * p.call.group + member);
        for (int first = blocks.begin; first < blocks.end; first += 32) {
            LightStep step = {member, first + lane, 0, 0};
            const bool seen = step.block < blocks.end &&
                              light_step<TileQ>(p, plane, step.block, tile - p.map_key / kFusedTileK, &step);
            const uint32_t all = __ballot_sync(~0u, seen);
            if (seen) steps[count + __popc(all & ((1u << lane) - 1))] = step;
            count += __popc(all);
        }
    }
    if (lane == 0) p.counts[index] = count;
}

} // namespace fa::sm90
