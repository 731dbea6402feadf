/* A boolean mask, intervals and ALiBi beside a range of keys a row, in a main loop whose accumulators have queries as
 * rows.
 *
 * Scores are then in base 2, product * factor - slope * |key - place|, and so is the running maximum: the fast path
 * takes products as they are,
 *
 *     weight = 2^(product * factor + (slope * column + start)),    start = slope * (first key - place) - maximum
 *
 * one FFMA more than without (two with a bias, which joins the sum in base 2), wherever all keys of a block lie on one
 * side of the rows' places; the sign of the slope says on which. Distances count from the block's first key, so that
 * long rows keep their bits. Where a block straddles the places, and where the fast path gives up, scores are computed
 * in place (transform()). */
#pragma once
#include "common/alibi.cuh"         // slope_of
#include "common/intervals.cuh"     // Intervals
#include "common/score.cuh"         // kLog2E, round_score
#include "sm90/common/schedule.cuh" // Tile
#include "sm90/common/softmax.cuh"  // columns_between
#include "sm90/score/bias.cuh"
#include "sm90/score/block_list.cuh"
#include "sm90/score/pair_map.cuh"

namespace fa::sm90 {

struct LightParams {
    PairMap map; // seen NULL: neither mask nor intervals; words NULL: no mask
    BlockLists lists;
    Intervals intervals; // begins NULL: none
    fa_operand alibi;    // data NULL: none
    BiasParams bias;     // of the kind that has one
    int key_begin;       // the call's first visible key
    int diagonal;        // row i stands at key i + diagonal, counted from the call's first visible one
    bool behind;         // no row sees a key beyond its place
};

/* Column of a thread's score i in a block, from its first one. */
__device__ __forceinline__ float score_column(int i) { return static_cast<float>(i / 4 * 8 + i % 2); }

/* A thread's part of a tile: rows `row` and row + 8. Few registers: the rest is read again where it is needed. */
struct LightRows {
    int group;   // of 16 rows, where the mask's words are
    float slope; // times log2(e)
    int place;   // of the lane's first column, from where its first row stands

    __device__ __forceinline__ void begin(const LightParams &p, int batch, int head, int row, int lane) {
        group = p.map.group_of(p.map.plane(batch, head), row / 16);
        slope = round_score(slope_of(p.alibi, batch, head), kLog2E);
        place = 2 * (lane % 4) - (row + p.diagonal);
    }

    /* Leaves of a block's pairs, a word a row, as columns_below() counts them, what the mask lets through. */
    template <int kKeys>
    __device__ __forceinline__ void mask(uint32_t (&visible)[2], const PairMap &map, int first_key, int lane) const {
        static_assert(kKeys == 64 || kKeys == 128);
        const int block = first_key >> 6; // -1 where the block begins before the first key
        const uint32_t *const words = map.words_of(group) + lane;
        const uint32_t low = words[int64_t(max(block, 0)) * map.column_step * 32];
        const uint32_t high = kKeys == 128 ? words[int64_t(block + 1) * map.column_step * 32] : 0;
        visible[0] &= __byte_perm(low, high, 0x5410), visible[1] &= __byte_perm(low, high, 0x7632);
    }
    /* The same of intervals. */
    static __device__ __forceinline__ void hold(uint32_t (&visible)[2], const LightParams &p, const Tile &tile, int row,
                                                int rows, int first_key, int lane) {
        const int first = first_key + p.key_begin;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const Held held = p.intervals.of_query(tile.batch, tile.head, min(row + 8 * r, rows - 1));
            uint32_t bits = 0;
#pragma unroll
            for (const Span<int> &keys : held.of)
                bits |= columns_between(keys.begin - first, keys.end - first, 2 * (lane % 4));
            visible[r] &= bits;
        }
    }

    /* Whether `keys` keys from first_key on lie on both sides of the places of some of a warpgroup's rows, the first of
     * which is `row`. */
    static __device__ __forceinline__ bool straddles(const LightParams &p, int first_key, int keys, int row) {
        return !p.behind && first_key < row + p.diagonal + 63 && first_key + keys - 1 > row + p.diagonal;
    }
    /* The slope along the keys of a block that does not straddle. */
    __device__ __forceinline__ float along(const LightParams &p, int first_key, int row) const {
        return p.behind || first_key < row + p.diagonal + 63 ? slope : -slope;
    }
    /* The start of row r's exponents in the fast path. */
    __device__ __forceinline__ float start(float along, int first_key, int r, float maximum) const {
        return fmaf(along, static_cast<float>(first_key + place - 8 * r), -maximum);
    }

    /* Takes ALiBi's part from scores in base 2. */
    template <int Count> __device__ __forceinline__ void slope_down(float (&scores)[Count], int first_key) const {
        const float from[2] = {static_cast<float>(first_key + place), static_cast<float>(first_key + place - 8)};
#pragma unroll
        for (int i = 0; i < Count; ++i) {
            const float distance = fabsf(from[(i >> 1) & 1] + score_column(i));
            scores[i] = fmaf(-slope, distance, scores[i]); // to nearest: keys at one distance remain equal
            asm("max.NaN.f32 %0, %0, %1;" : "+f"(scores[i]) : "f"(-FLT_MAX));
        }
    }
};

} // namespace fa::sm90
