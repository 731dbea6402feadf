/* The online softmax of one query row: the exact recurrence, without clamps.
 *
 * State after some keys: the maximum m of their scores (base 2) and the sum of 2^(s - m). A new block with maximum m'
 * multiplies the sum, and the output accumulated with the same m, by 2^(m - m'). An excluded key has the score -inf and
 * the weight 0. NaN scores leave m alone and make the sum NaN, so that they reach the output. */
#pragma once

#include <math.h> // INFINITY

#include "common/convert.cuh" // from_float, load_as_float, to_float
#include "common/ptx.cuh"     // exp2_fast
#include "common/score.cuh"   // kLog2E, kLn2, bounded

namespace fa {

/* What rounding to T adds to the weight 2^(product scale - shift) of a row's highest score, of which the shift is made.
 * P V takes weights rounded. This one is 1 but for the rounding of the shift, which in float16 counts where scores
 * exceed 5,700. Taken into the sum, it makes of a row that one key decides that key's value. */
template <typename T> __device__ __forceinline__ float weight_rounding(float product, float scale, float shift) {
    const float weight = exp2_fast(fmaf(product, scale, -shift));
    return to_float(from_float<T>(weight)) - weight;
}

/* What is subtracted from scores for the maximum m: m itself, but 0 while no key was visible, since -inf - -inf is NaN.
 */
__device__ __forceinline__ float softmax_shift(float maximum) { return maximum == -INFINITY ? 0.0f : maximum; }

/* Score of a product for raise(), where weights come from bounded_weight(). */
__device__ __forceinline__ float scaled_down(float product, float scale) { return __fmul_rd(product, scale); }

struct RowState {
    float maximum = -INFINITY; // base 2, over the keys so far
    float sum = 0.0f;          // of 2^(score - softmax_shift(maximum))

    /* Takes in a block's maximum; returns the factor for what was accumulated before. Add the block's weights after. */
    __device__ __forceinline__ float raise(float block_maximum) {
        float old = maximum;
        maximum = fmaxf(old, block_maximum);
        float factor = exp2_fast(old - softmax_shift(maximum));
        sum *= factor;
        return factor;
    }

    /* Weight of a score under the present maximum; of the score `scale` times `product`. */
    __device__ __forceinline__ float weight(float score) const { return exp2_fast(score - softmax_shift(maximum)); }
    __device__ __forceinline__ float weight(float product, float scale) const {
        return exp2_fast(fmaf(product, scale, -softmax_shift(maximum)));
    }

    /* The latter takes back the rounding of the maximum, which is nothing to speak of below 2^24, but up to 2^103 where
     * all keys of a row have a bias like -1e30. Where that can be, the maximum must have been rounded down
     * (scaled_down()), and this weight, of at most 2^64, take its place. */
    __device__ __forceinline__ float bounded_weight(float product, float scale) const {
        float x = fmaf(product, scale, -softmax_shift(maximum));
        asm("min.NaN.f32 %0, %0, 0f42800000;" : "+f"(x)); // 64
        return exp2_fast(x);
    }
};

/* The end of a row: factor for the accumulated output, and the LSE (natural logarithm). */
struct RowResult {
    float factor, lse;
};

/* Without visible keys and sink: factor 0, LSE -inf. */
__device__ __forceinline__ RowResult finish_row(const RowState &state) {
    if (state.sum == 0.0f) return {0.0f, -INFINITY};
    return {1.0f / state.sum, (state.maximum + log2f(state.sum)) * kLn2};
}

/* The sink joins the denominator with exp(sink), unscaled. A sink of -inf adds nothing. */
__device__ __forceinline__ RowResult finish_row(const RowState &state, float sink) {
    if (sink == -INFINITY) return finish_row(state);
    sink = bounded(sink);
    if (state.sum == 0.0f) return {0.0f, sink}; // exactly, not through base 2, and also where it is not finite
    RowState joined = state;
    float factor = joined.raise(sink * kLog2E);
    joined.sum += joined.weight(sink * kLog2E);
    RowResult result = finish_row(joined);
    result.factor *= factor;
    return result;
}

/* The same by the approximate reciprocal and logarithm, good to 2^-22, of a sum that is 0, NaN or at least about 1. */
__device__ __forceinline__ RowResult finish_fast(const RowState &state) {
    if (state.sum == 0.0f) return {0.0f, -INFINITY};
    return {__fdividef(1.0f, state.sum), (state.maximum + __log2f(state.sum)) * kLn2};
}

/* The two in one: `sinks` of a problem, or none. */
__device__ __forceinline__ RowResult finish_row(const fa_forward &p, int64_t head, const RowState &state) {
    if (!p.sinks.data) return finish_row(state);
    return finish_row(state, load_as_float(p.sinks.data, p.sinks_dtype, head * p.sinks.stride[0]));
}

} // namespace fa
