/* Limits of numbers that kernels hold in 32 bits, and bounds of keys cut to them. On the host. */
#pragma once

#include <algorithm> // clamp, max, min
#include <stdint.h>  // int64_t

#include "common/mask.cuh" // Band, ShiftedBand
#include "fa.h"            // fa_forward, fa_because

namespace fa {

/* Bits that the number of a row or key may have, by how many of them a kernel adds up in an int. */
constexpr int kBitsAlone = 31, kBitsInPairs = 30, kBitsInFours = 29;
constexpr int kBitsInBand = 28; // in fours, and two of them are a Band's bounds, which reach twice as far

constexpr int kMaxTilesBits = 31; // of the tiles of a launch

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* Whether rows and keys have numbers of so many bits; `why` has the refusal where they have not. */
inline bool lengths_fit(int64_t rows, int64_t keys, int bits, fa_why *why) {
    if (!(std::max(rows, keys) >> bits)) return true;
    fa_because(why, FA_REFUSES, FA_WHY_LENGTH, bits, 0, 0);
    return false;
}

/* Of a problem whose lengths have kBitsInBand. */
inline Band band_of(const fa_forward &p) {
    constexpr int64_t kFar = INT64_C(2) << kBitsInBand;
    return {static_cast<int>(std::min(p.left, kFar)), static_cast<int>(std::min(p.right, kFar)),
            static_cast<int>(p.diagonal), static_cast<int>(p.key_begin), static_cast<int>(p.key_end)};
}

/* Of a problem whose lengths have kBitsInPairs. */
inline ShiftedBand shifted_band_of(const fa_forward &p) {
    constexpr int64_t kFar = INT64_C(1) << kBitsInPairs;
    const int64_t first = p.diagonal - p.key_begin;
    return {static_cast<int>(p.key_end - p.key_begin), static_cast<int>(std::clamp(first - p.left, -kFar, kFar)),
            static_cast<int>(std::clamp(first + p.right + 1, -kFar, kFar))};
}

} // namespace fa
