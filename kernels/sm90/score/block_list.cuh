/* Which blocks of keys each tile of queries needs, of what a map (pair_map.cuh) and the range of keys a row leave: a
 * list a tile, from the last block to the first, so that a producer reads one word a block; and the order of tiles by
 * the length of their lists, so that the longest can go first. */
#pragma once
#include "common/mask.cuh" // ShiftedBand, tile_span
#include "sm90/score/pair_map.cuh"

namespace fa::sm90 {

/* A block of a list: its first key in units of 64, which may be -1, and flags: which warpgroups see some of its pairs,
 * and for which some are hidden. A tile that sees nothing has one block, which nobody sees. */
struct BlockWord {
    static constexpr int kShift = 7; // up to three warpgroups
    static constexpr uint32_t kSeen = 7, kLast = 64;
    uint32_t word;

    __device__ __forceinline__ int first_key() const { return (static_cast<int>(word) >> kShift) * 64; }
    __device__ __forceinline__ bool sees(int wg) const { return word >> wg & 1; }
    __device__ __forceinline__ bool mixed(int wg) const { return word >> (3 + wg) & 1; }
    __device__ __forceinline__ bool last() const { return word & kLast; }
};

/* The lists of a call, [plane of the map][tile][length]. */
struct BlockLists {
    const uint32_t *words; // NULL: every block of a tile's range of keys
    const int *order;      // [plane][tile]: tiles, the longest last; NULL: as they lie
    int tiles, length;     // of a plane; of a list

    __device__ __forceinline__ const uint32_t *of(int plane, int tile) const {
        return words + (int64_t(plane) * tiles + tile) * length;
    }
};

/* A call in the tiles and blocks of a main loop: warpgroups of 64 rows a tile, keys a block. */
struct BlockShape {
    ShiftedBand visible;
    int seq_q, warpgroups, tile_n;

    /* The end of the last block of the tile of queries from `row`, a multiple of 64, and how many blocks there are. */
    __device__ __forceinline__ Span<int> blocks(int row) const {
        const Span<int> keys = tile_span(visible, row, min(row + 64 * warpgroups, seq_q) - 1);
        if (keys.empty()) return {0, 0};
        const int end = keys.end + (-keys.end & 63);
        return {(end - keys.begin + tile_n - 1) / tile_n, end};
    }
    /* The word of the block of keys from `first` on, but for kLast; without a map by the ranges alone. */
    __device__ __forceinline__ uint32_t word_of(const PairMap *map, int plane, int tile_row, int first) const {
        uint32_t flags = 0;
#pragma unroll 1
        for (int wg = 0; wg < warpgroups; ++wg) {
            const int row = tile_row + wg * 64, last = min(row + 64, seq_q) - 1;
            if (row > last) break;
            bool sees = tile_span(visible, row, last).meets(first, tile_n);
            bool whole = common_span(visible, row, last).holds(first, tile_n);
            if (map) {
                uint32_t some = 0, all = 1;
                for (int key = max(first, 0); key < first + tile_n; key += 64) {
                    const int column = key / 64 * map->column_step;
                    const int64_t at = map->bits_of(plane, row / 64) + column / 32;
                    some |= map->seen[at] >> column % 32, all &= map->whole[at] >> column % 32;
                }
                sees = sees && (some & 1), whole = whole && (all & 1);
            }
            flags |= (uint32_t(sees) | (whole ? 0u : 8u)) << wg;
        }
        return uint32_t(first >> 6) << BlockWord::kShift | flags;
    }
};

} // namespace fa::sm90
