/* Chunks of keys: where a sequence's are cut, and how the states of a row over them are folded.
 *
 *     fold(a, b):  m = max(a.m, b.m);  l = b.l 2^(b.m - m) + a.l 2^(a.m - m);  O alike, not normalised
 *
 * Chunks are folded from left to right within groups of 8 (cut at multiples of 8 chunks), groups from left to right.
 * The first of a group, and the first group, are taken as they are. Float32 in memory loses nothing, and every thread
 * does these operations, each rounded by itself: so the bits are the same whichever thread folds, where and when. */
#pragma once

#include <stdint.h> // int64_t

#include "common/ptx.cuh"     // exp2_fast
#include "common/softmax.cuh" // RowState, softmax_shift

namespace fa {

constexpr int kChunkKeys = 64;  // of the shortest chunk
constexpr int kMaxChunks = 128; // of the keys that a sequence's queries see: they are cut at 127 * 64 * 2^e
constexpr int kGroup = 8;       // chunks that are folded before their groups are

/* e for `keys` keys, from the first to the last that some query sees: chunks are cut at multiples of 64 * 2^e keys,
 * or other shortest chunks, counted from the sequence's first, so that there are `most` at most. */
__host__ __device__ inline int chunk_shift(int64_t keys, int shortest = kChunkKeys, int most = kMaxChunks) {
    int shift = 0;
    while (keys > (most - 1) * int64_t(shortest) << shift) ++shift;
    return shift;
}

struct Factors {
    float old, added;
};

/* Folds a maximum and a sum into a state; returns the factors for what was accumulated. */
__device__ __forceinline__ Factors fold_state(RowState &to, float maximum, float sum) {
    const float top = fmaxf(to.maximum, maximum), shift = softmax_shift(top);
    const Factors f = {exp2_fast(__fsub_rn(to.maximum, shift)), exp2_fast(__fsub_rn(maximum, shift))};
    to.sum = __fmaf_rn(sum, f.added, __fmul_rn(to.sum, f.old));
    to.maximum = top;
    return f;
}
__device__ __forceinline__ float fold_value(float old, float added, Factors f) {
    return __fmaf_rn(added, f.added, __fmul_rn(old, f.old));
}

} // namespace fa
