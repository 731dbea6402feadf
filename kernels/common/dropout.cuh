/* Which weights dropout keeps, of what a lane has of a tile in the accumulators of mma.sync or wgmma. */
#pragma once

#include "fa.h"     // fa_dropout
#include "philox.h" // fa_philox, fa_dropout_head, fa_dropout_keeps

namespace fa {

/* Where a lane's elements of a step lie: its element [0][0][0], and the query head. */
struct PairPlace {
    int own, other;
    int64_t batch, head;
};

/* Whether dropout keeps one of the 8 pairs that a call of its generator serves. */
__device__ __forceinline__ uint32_t keeps(uint32_t word, int half, const fa_dropout &dropout) {
    return (half ? word >> 16 : word & 0xffff) >= dropout.threshold;
}

/* Which of a lane's elements of a step dropout keeps: bit 4 j + e, of one row tile.
 *
 * A call of the generator serves queries {i, i + 8} and keys {j, j + 1, j + 8, j + 9}. Where queries own, these are a
 * lane's 8 elements of 16 x 16 pairs. Where keys own, it has queries {i, i + 1, i + 8, i + 9} and keys {j, j + 8}, half
 * of what the calls of i and of i + 1 serve, whose other halves are those of the lane of key j ^ 1: each of the two
 * makes one call, and they swap two words. Both where the whole that the call is a part of has its origin at multiples
 * of 16; elsewhere a call serves one pair. Lanes enter together. */
template <bool kQueries, int kStep>
__device__ __forceinline__ uint32_t kept_pairs(const fa_dropout &dropout, const PairPlace &place) {
    static_assert(kStep <= 64);
    uint32_t kept = 0;
    if ((dropout.origin[2] | dropout.origin[3]) % 16) {
#pragma unroll 1
        for (int n = 0; n < kStep / 2; ++n) {
            const int own = place.own + n % 4 / 2 * 8, other = place.other + n / 4 * 8 + n % 2;
            kept |= uint32_t(fa_dropout_keeps(&dropout, place.batch, place.head, kQueries ? own : other,
                                              kQueries ? other : own))
                    << n;
        }
        return kept;
    }
    const uint32_t head = fa_dropout_head(&dropout, place.batch, place.head);
    const bool odd = !kQueries && place.own % 2; // a lane's keys
#pragma unroll 1
    for (int n = 0; n < kStep / 16; ++n) {
        const uint32_t own = uint32_t(place.own), other = uint32_t(place.other + 16 * n);
        const uint32_t i = (kQueries ? own : other + odd) + dropout.origin[2];
        const uint32_t j = (kQueries ? other : own) + dropout.origin[3];
        uint32_t word[4] = {j >> 4 << 5 | (i & 7) << 2 | (j & 7) >> 1, i >> 4, head, dropout.offset};
        fa_philox(word, dropout.seed[0], dropout.seed[1]);
        if constexpr (!kQueries) { // to the words of (query i, i + 8; query i + 1, i + 9)
            const uint32_t low = __shfl_xor_sync(~0u, odd ? word[0] : word[2], 4);
            const uint32_t high = __shfl_xor_sync(~0u, odd ? word[1] : word[3], 4);
            word[0] = odd ? low : word[0], word[1] = odd ? high : word[1];
            word[2] = odd ? word[2] : low, word[3] = odd ? word[3] : high;
        }
        uint32_t bits = 0;
#pragma unroll
        for (int m = 0; m < 8; ++m) { // element [2 n + m / 4][m % 4]
            const int of_own = m % 4 / 2, of_other = m / 4, neighbour = m % 2;
            const int query = kQueries ? of_own : of_other, key = kQueries ? of_other : of_own; // 8 further
            bits |= keeps(word[2 * neighbour + query], key, dropout) << m;
        }
        kept |= bits << 8 * n;
    }
    return kept;
}

} // namespace fa
