/* The options of the kinds kLight and kGeneral, besides a range of keys a query: a boolean mask and intervals, as a
 * pair map with keys as rows, and ALiBi, each by a flag of the launch.
 *
 * Hidden pairs have 0 in place of P and dT by selection: what their scores, or the rows of queries and keys, hold
 * reaches nothing. Of queries that the mask hides from all keys not even 0 times Q and dO may be taken, which NaN
 * outlasts: the rows kernel marks them, and their rows of a stage are cleared before they are multiplied. */
#pragma once
#include <climits> // INT_MAX

#include "common/alibi.cuh"     // slope_of
#include "common/dropout.cuh"   // permute_bytes
#include "common/intervals.cuh" // Intervals
#include "sm90/fused_backward/step.cuh"
#include "sm90/score/pair_map.cuh"

namespace fa::sm90 {

/* A step of a tile: a block of queries that sees some pair of it (light_steps.cuh). */
struct alignas(16) LightStep {
    int member, block;    // the query head of the group, and its block
    uint32_t turn, place; // how many tiles add to the block's sums before; kAddsFirst, kAddsLast
};

struct LightScore {
    PairMap map;  // rows are keys from `map_key` on, columns are queries; words NULL: neither mask nor intervals
    int map_key;  // a multiple of a tile's keys, counted as in k
    bool alibi;   // row blocks have slopes
    int diagonal; // query i stands at key i + diagonal
    const LightStep *steps;
    const int *counts; // steps of each tile
    int capacity;      // steps of a tile at most
};

/* Parameters of the kernel that makes the lists. */
struct LightStepsParams {
    BackwardCall call;
    PairMap map; // with queries as rows, of which `seen` is read; NULL: ranges alone say it
    int map_key; // a multiple of a tile's keys
    LightStep *steps;
    int *counts;
    int capacity, tiles, key_tiles; // steps of a tile at most; tiles of the launch; of a head
};

/* A row block, and what the rows kernel finds besides. */
template <int Rows> struct alignas(128) LightRowBlock : FusedRowBlock<Rows> {
    alignas(16) uint16_t unseeing[8]; // [16 queries], a bit each: the mask leaves no key of those that the query sees
    float slope;                      // of the head, in base 2
};

/* The slope of ALiBi in base 2; NaN where it is not finite. Bounded where a negative one would leave float32 within
 * 2^29 keys: an LSE that has such a slope takes less off a weight than the slope puts on it otherwise. */
__device__ __forceinline__ float slope_in_base_2(const fa_operand &slopes, int batch, int head) {
    const float slope = __fmul_rz(slope_of(slopes, batch, head), kLog2E);
    return slope < -5.7e29f ? -5.7e29f : slope;
}

/* Whether the mask and the intervals leave a query none of the keys that it sees by its range. The warp calls it. */
template <class Call>
__device__ __forceinline__ bool all_hidden(const fa_operand &mask, const Intervals &intervals, const Call &call,
                                           int batch, int head, int row, int lane) {
    const auto *from = static_cast<const uint8_t *>(mask.data) + batch * mask.stride[0] + head * mask.stride[1] +
                       row * mask.stride[2] + call.key_begin * mask.stride[3];
    const Span<int> keys = row_span(call.visible, row);
    Held held = {{{0, INT_MAX}, {0, 0}}};
    if (intervals.begins) held = intervals.of_query(batch, head, row);
    for (int key = keys.begin; key < keys.end; key += 32) {
        const int own = key + lane;
        const bool seen = own < keys.end && held.holds(own + call.key_begin);
        if (__any_sync(~0u, seen && (!mask.data || from[own * mask.stride[3]]))) return false;
    }
    return true;
}

/* ---- of a consumer's step ---- */

/* Which of a lane's pairs of 64 keys x `Queries` queries are visible: of each 64 queries a word of a pair map. */
template <int Queries> struct VisiblePairs {
    uint32_t words[Queries / 64];

    /* By the mask, of 16 keys and the queries from `block` * Queries on. What lies beyond the map has any bits: ends
     * hide it. */
    __device__ __forceinline__ void load(const PairMap &map, int plane, int sixteenth, int block, int lane) {
        const int group = map.group_of(plane, min(sixteenth, map.row_blocks * 4 - 1));
        const uint32_t *const from = map.words_of(group) + lane;
#pragma unroll
        for (int n = 0; n < Queries / 64; ++n) {
            const int column = min(block * (Queries / 64) + n, map.column_blocks - 1) * map.column_step;
            words[n] = __ldg(from + int64_t(column) * 32);
        }
    }
    __device__ __forceinline__ void show_all() {
#pragma unroll
        for (uint32_t &word : words) word = ~0u;
    }
    /* Leaves those that `of_keys` has of the lane's two keys, as columns_between() counts queries. */
    __device__ __forceinline__ void meet(const uint32_t (&of_keys)[2]) {
#pragma unroll
        for (int n = 0; n < Queries / 64; ++n) words[n] &= __byte_perm(of_keys[0], of_keys[1], n ? 0x7632 : 0x5410);
    }
    /* Whether all pairs of the warp are. */
    __device__ __forceinline__ bool all() const {
        uint32_t common = words[0];
#pragma unroll
        for (int n = 1; n < Queries / 64; ++n) common &= words[n];
        return __all_sync(~0u, common == ~0u);
    }
    /* 0 in place of what hidden pairs have in packed accumulators. */
    __device__ __forceinline__ void hide(uint32_t (&a)[Queries / 4], uint32_t (&b)[Queries / 4]) const {
#pragma unroll
        for (int n = 0; n < Queries / 64; ++n) {
#pragma unroll
            for (int pair = 0; pair < 4; ++pair) { // bits 2 pair and the next of each byte become the bytes' signs
                const uint32_t low = words[n] << (7 - 2 * pair), high = words[n] << (6 - 2 * pair);
#pragma unroll
                for (int byte = 0; byte < 4; ++byte) { // of queries 8 g and after, g = 4 (byte % 2) + pair
                    const uint32_t kept = permute_bytes(low, high, 0x8 * 0x1111 + 0x4400 + byte * 0x1111);
                    const int i = 16 * n + 2 * (byte % 2 * 4 + pair) + byte / 2;
                    a[i] &= kept, b[i] &= kept;
                }
            }
        }
    }
};

} // namespace fa::sm90
