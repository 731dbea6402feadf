/* The online softmax of one query row: the exact recurrence, without clamps.
 *
 * State after some keys: the maximum m of their scores and the sum of e^(s - m). A new block with maximum m' multiplies
 * the sum, and the output accumulated with the same m, by e^(m - m'). An excluded key has the score -inf and the weight
 * 0. NaN scores leave m alone and make the sum NaN, so that they reach the output.
 *
 * Scores of any magnitude. The weight of a product s, with the factor f to base 2, is 2^(s f - c), where c is m f
 * rounded and s f is not: the rounding error of c is the same in all weights of the row and cancels. It is at most 8
 * while |c| < kWide = 2^28. Further on it may be more than an exponent holds; but there the products that differ from
 * m, by at least its last digit, have weights below 2^-16. Such a row is wide: a power of two takes the place of f
 * (row_factor), with which m f is exact and all those weights are 0. Where only scores are kept, not products, weights
 * are 2^(t - max t) of scores t that were rounded once. round_score() rounds toward zero: a finite product has a finite
 * score. */
#pragma once

#include <math.h>   // INFINITY
#include <stdint.h> // uint32_t

#include "common/convert.cuh" // from_float, load_as_float, to_float
#include "common/ptx.cuh"     // exp2_fast
#include "common/score.cuh"   // kLog2E, kLn2, bounded, round_score

namespace fa {

/* Magnitude of a row's maximum in base 2 from which on the row is wide. */
inline constexpr float kWide = 0x1p28f;

__device__ __forceinline__ bool is_wide(float maximum_log2) { return fabsf(maximum_log2) >= kWide; }

/* The factor of a row whose highest product is `maximum`: `factor`, or in a wide row the power of two that brings it to
 * 2^29 and its last digit to 2^6. Any in a row that has seen no key. */
__device__ __forceinline__ float row_factor(float maximum, float factor) {
    if (!is_wide(maximum * factor)) return factor;
    constexpr uint32_t kExponents = 0x7f800000, kLeast = 29u << 23, kSum = (127u + 127 + 29) << 23;
    return __uint_as_float(kSum - max(__float_as_uint(maximum) & kExponents, kLeast));
}

/* The score of a row's highest product, from which narrow rows count. */
__device__ __forceinline__ float maximum_score(float maximum, float factor) {
    const float c = __fmul_rn(maximum, factor);
    return is_wide(c) ? round_score(maximum, factor) : c;
}

/* The amount that rounding to T adds to the weight 2^(product scale - shift) of a row's highest score, from which the
 * shift is made. P V takes rounded weights. This weight is 1 up to the rounding of the shift, which in float16 counts
 * where scores exceed 5,700. With this amount in the sum a row that one key decides has that key's value. */
template <typename T> __device__ __forceinline__ float weight_rounding(float product, float scale, float shift) {
    if (is_wide(shift)) return 0.0f;
    const float weight = exp2_fast(fmaf(product, scale, -shift));
    return to_float(from_float<T>(weight)) - weight;
}

/* Subtracted from scores for the maximum m: m itself, but 0 while no key was visible, since -inf - -inf is NaN.
 */
__device__ __forceinline__ float softmax_shift(float maximum) { return maximum == -INFINITY ? 0.0f : maximum; }

/* The end of a row: factor for the accumulated output, and the LSE (natural logarithm). */
struct RowResult {
    float factor, lse;
};

/* Units of scores: natural ones, or times log2(e). Natural scores have one rounding less, base 2 one operation less. */
enum class Unit { kNatural, kBase2 };

template <Unit kUnit> struct RowStateIn {
    float maximum = -INFINITY; // over the keys so far
    float sum = 0.0f;          // of exponential(score - softmax_shift(maximum))

    static __device__ __forceinline__ float exponential(float x) {
        return exp2_fast(kUnit == Unit::kBase2 ? x : __fmul_rn(x, kLog2E));
    }

    /* Takes in a block's maximum; returns the factor for what was accumulated before. Add the block's weights after. */
    __device__ __forceinline__ float raise(float block_maximum) {
        const float old = maximum;
        maximum = fmaxf(old, block_maximum);
        const float factor = weight(old);
        sum *= factor;
        return factor;
    }

    /* Weight of a score under the present maximum. */
    __device__ __forceinline__ float weight(float score) const {
        return exponential(__fsub_rn(score, softmax_shift(maximum)));
    }
};
using RowState = RowStateIn<Unit::kBase2>;
using NaturalRowState = RowStateIn<Unit::kNatural>;

/* Without visible keys and sink: factor 0, LSE -inf. */
__device__ __forceinline__ RowResult finish_row(const RowState &state) {
    if (state.sum == 0.0f) return {0.0f, -INFINITY};
    return {1.0f / state.sum, (state.maximum + log2f(state.sum)) * kLn2};
}
__device__ __forceinline__ RowResult finish_row(const NaturalRowState &state) {
    if (state.sum == 0.0f) return {0.0f, -INFINITY};
    return {1.0f / state.sum, state.maximum + logf(state.sum)};
}

/* The sink joins the denominator with exp(sink), unscaled. A sink of -inf adds nothing. */
template <Unit kUnit> __device__ __forceinline__ RowResult finish_row(const RowStateIn<kUnit> &state, float sink) {
    if (sink == -INFINITY) return finish_row(state);
    sink = bounded(sink);
    if (state.sum == 0.0f) return {0.0f, sink}; // exactly, not through base 2, and also where it is not finite
    RowStateIn<kUnit> joined = state;
    const float score = kUnit == Unit::kBase2 ? __fmul_rn(sink, kLog2E) : sink, factor = joined.raise(score);
    joined.sum += joined.weight(score);
    RowResult result = finish_row(joined);
    result.factor *= factor;
    return result;
}

/* The same by the approximate reciprocal and logarithm, good to 2^-22, of a sum that is 0, NaN or at least about 1. */
__device__ __forceinline__ RowResult finish_fast(const RowState &state) {
    if (state.sum == 0.0f) return {0.0f, -INFINITY};
    return {__fdividef(1.0f, state.sum), (state.maximum + __log2f(state.sum)) * kLn2};
}

/* The two in one: with the head's sink of a kernel's parameters, or without. */
template <class Params, Unit kUnit>
__device__ __forceinline__ RowResult finish_row(const Params &p, int64_t head, const RowStateIn<kUnit> &state) {
    if (!p.sinks.data) return finish_row(state);
    return finish_row(state, load_as_float(p.sinks.data, p.sinks_dtype, head * p.sinks.stride[0]));
}

} // namespace fa
