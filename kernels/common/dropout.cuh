/* Which weights dropout keeps, of what a lane has of a tile in the accumulators of mma.sync or wgmma: as bits, or as
 * flags for packed weights. */
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

/* Which of a lane's elements of a step dropout keeps, a call of the generator for each: bit 4 j + e, of one row tile.
 */
template <bool kQueries, int kStep>
__device__ __forceinline__ uint32_t kept_one_by_one(const fa_dropout &dropout, const PairPlace &place) {
    uint32_t kept = 0;
#pragma unroll 1
    for (int n = 0; n < kStep / 2; ++n) {
        const int own = place.own + n % 4 / 2 * 8, other = place.other + n / 4 * 8 + n % 2;
        kept |= uint32_t(
                    fa_dropout_keeps(&dropout, place.batch, place.head, kQueries ? own : other, kQueries ? other : own))
                << n;
    }
    return kept;
}

/* The same, a call for as many pairs as it serves.
 *
 * A call of the generator serves queries {i, i + 8} and keys {j, j + 1, j + 8, j + 9}. Where queries own, these are a
 * lane's 8 elements of 16 x 16 pairs. Where keys own, it has queries {i, i + 1, i + 8, i + 9} and keys {j, j + 8}, half
 * of what the calls of i and of i + 1 serve, whose other halves are those of the lane of key j ^ 1: each of the two
 * makes one call, and they swap two words. Both where the whole that the call is a part of has its origin at multiples
 * of 16; elsewhere a call serves one pair. Lanes enter together. */
template <bool kQueries, int kStep>
__device__ __forceinline__ uint32_t kept_pairs(const fa_dropout &dropout, const PairPlace &place) {
    static_assert(kStep <= 64);
    if ((dropout.origin[2] | dropout.origin[3]) % 16) return kept_one_by_one<kQueries, kStep>(dropout, place);
    uint32_t kept = 0;
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

/* A threshold, for two halves of a word at once. */
struct DropThreshold {
    uint32_t low, not_high; // its lower 15 bits; all ones where bit 15 is 0
};

__device__ __forceinline__ DropThreshold drop_threshold(const fa_dropout &dropout) {
    const uint32_t high = dropout.threshold >= 0x8000; // 65536, which no half reaches: 0x8000 remains
    return {(dropout.threshold - (high << 15)) * 0x10001u, high - 1};
}

/* Bits 15 and 31: whether the lower and the higher half of `word` are kept. The others say nothing. */
__device__ __forceinline__ uint32_t kept_halves(uint32_t word, const DropThreshold &threshold) {
    const uint32_t low = (word | 0x80008000u) - threshold.low; // bit 15: by the lower 15 bits alone
    return (word & low) | (word & threshold.not_high) | (low & threshold.not_high);
}

/* Bytes of `low` (0 to 3) and `high` (4 to 7); 8 more: eight times the byte's sign. */
__device__ __forceinline__ uint32_t permute_bytes(uint32_t low, uint32_t high, uint32_t selector) {
    uint32_t made;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(made) : "r"(low), "r"(high), "r"(selector));
    return made;
}

/* As kept_pairs where queries own, of `kKeys` keys: the signs of the bytes of flags[2 n + r] say of query r (1: 8
 * further) whether keys j, j + 1, j + 8 and j + 9 from the lane's first and 16 n are kept. */
template <int kKeys>
__device__ __forceinline__ void kept_flags(uint32_t (&flags)[kKeys / 8], const fa_dropout &dropout,
                                           const PairPlace &place) {
    static_assert(kKeys % 64 == 0);
    if ((dropout.origin[2] | dropout.origin[3]) % 16) {
#pragma unroll
        for (int m = 0; m < kKeys / 64; ++m) {
            const PairPlace at = {place.own, place.other + 64 * m, place.batch, place.head};
            const uint32_t bits = kept_one_by_one<true, 64>(dropout, at);
#pragma unroll
            for (int n = 0; n < 8; ++n) { // bit 8 (n / 2) + 4 h + 2 r + e: query r = n % 2, key j + 8 h + e
                uint32_t signs = 0;
#pragma unroll
                for (int byte = 0; byte < 4; ++byte)
                    signs |= (bits >> (n / 2 * 8 + byte / 2 * 4 + n % 2 * 2 + byte % 2) & 1) << (8 * byte + 7);
                flags[8 * m + n] = signs;
            }
        }
        return;
    }
    const DropThreshold threshold = drop_threshold(dropout);
    const uint32_t i = place.own + dropout.origin[2], j = place.other + dropout.origin[3];
    const uint32_t head = fa_dropout_head(&dropout, place.batch, place.head);
    const uint32_t first = j >> 4 << 5 | (i & 7) << 2 | (j & 7) >> 1;
#pragma unroll
    for (int n = 0; n < kKeys / 16; ++n) {
        uint32_t word[4] = {first + 32 * n, i >> 4, head, dropout.offset};
        fa_philox(word, dropout.seed[0], dropout.seed[1]);
#pragma unroll
        for (int r = 0; r < 2; ++r) // key j and j + 8 of word[r], j + 1 and j + 9 of the other
            flags[2 * n + r] =
                permute_bytes(kept_halves(word[r], threshold), kept_halves(word[2 + r], threshold), 0x7351);
    }
}

/* Packed weights without those that `flags` leave out: words[4 n + 2 h + r] of query r, keys j + 8 h and the next. */
template <int kWords>
__device__ __forceinline__ void drop(uint32_t (&words)[kWords], const uint32_t (&flags)[kWords / 2]) {
#pragma unroll
    for (int i = 0; i < kWords; ++i)
        words[i] &= permute_bytes(flags[i / 4 * 2 + i % 2], 0, i / 2 % 2 ? 0xbbaa : 0x9988);
}

} // namespace fa
