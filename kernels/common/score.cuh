/* From the product q . k to the score in base 2, in the order that a call defines: scale, softcap, bias.
 *
 * Scores are kept multiplied by log2(e), so that the exponential is one ex2 instruction: exp(s) = 2^(s log2 e). */
#pragma once

#include <float.h>  // FLT_MAX
#include <math.h>   // INFINITY, fmin, fmax
#include <stdint.h> // int64_t

#include "common/convert.cuh" // load_as_float
#include "common/ptx.cuh"     // exp2_fast
#include "common/rows.cuh"    // bias_row
#include "fa.h"               // fa_forward

namespace fa {

inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;

/* Turns a product into a score; made on the host in float64, once a launch. */
struct ScoreParams {
    float scale_log2; // scale * log2(e): the whole transformation where there is neither softcap nor bias
    float scale_cap;  // scale / softcap
    float cap_log2;   // softcap * log2(e); 0: no softcap
};

inline ScoreParams score_params(const fa_forward &p) {
    constexpr double log2_e = 1.4426950408889634;
    constexpr double largest = 1e37; // times 2 log2(e) it is finite: infinity would make NaN of a product that is 0
    const double cap = p.softcap > 0 ? p.scale / p.softcap : 0;
    return {static_cast<float>(p.scale * log2_e), static_cast<float>(fmin(fmax(cap, -largest), largest)),
            static_cast<float>(p.softcap * log2_e)};
}

/* A product times its factor, rounded toward zero: what is beyond float32 becomes its largest number, not infinity.
 * nvcc joins it to no sum, which would take it unrounded. */
__device__ __forceinline__ float round_score(float product, float factor) { return __fmul_rz(product, factor); }

/* A finite score that may have left float32's range, within it; NaN as it is. */
__device__ __forceinline__ float finite_score(float x) {
    asm("max.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(-FLT_MAX));
    asm("min.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(FLT_MAX));
    return x;
}

/* Score in base 2 of one product, before bias. tanhf, not tanh.approx: the latter's 2^-11 times a softcap of 50 would
 * be an error of 0.02 in the exponent. */
__device__ __forceinline__ float score_of(const ScoreParams &s, float product) {
    return s.cap_log2 > 0 ? __fmul_rn(s.cap_log2, tanhf(product * s.scale_cap)) : round_score(product, s.scale_log2);
}

/* Bias of a key, as it is stored, by a kernel's parameters. `row` is bias_row(); p.bias.data is not NULL. */
template <class Params> __device__ __forceinline__ float bias_of(const Params &p, int64_t row, int64_t key) {
    return load_as_float(p.bias.data, p.bias_dtype, row + key * p.bias.stride[3]);
}

/* Score in base 2 with its bias. Rounded toward zero, a finite bias whose product with log2(e) is beyond float32 stays
 * finite (FA_LIMIT) at no cost: keys that all have the smallest float32 remain visible. NaN propagates; -inf excludes
 * the key, unless its score is NaN or infinite. */
__device__ __forceinline__ float add_bias(float score, float bias) { return __fmaf_rz(bias, kLog2E, score); }

/* The same; -inf excludes the key whatever its score is. (Costs wmma 4 to 18% of a call with bias.) */
__device__ __forceinline__ float add_bias_or_exclude(float score, float bias) {
    return bias == -INFINITY ? bias : add_bias(score, bias);
}

/* x from -FA_LIMIT to FA_LIMIT; NaN as it is. */
__device__ __forceinline__ float within_limit(float x) {
    asm("max.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(-FA_LIMIT));
    asm("min.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(FA_LIMIT));
    return x;
}

/* The same of a bias or sink, which may be infinite. */
__device__ __forceinline__ float bounded(float x) { return isinf(x) ? x : within_limit(x); }

/* A row's LSE as the weights e^(score - LSE) of its gradients take it. From 2^21 on the rounding of either is as large
 * as exponents are, and would make a weight of 2^100 of one that is 1: the LSE is moved up by more than both roundings,
 * so that weights are at most 1. */
__device__ __forceinline__ float lse_of_weights(float lse) {
    if (!(fabsf(lse) >= 0x1p21f) || isinf(lse)) return lse;
    return fminf(fmaf(fabsf(lse), 0x1p-19f, lse), FA_LIMIT);
}

/* Weight of the sink beside an LSE that includes it: at most 1, however both were rounded. */
__device__ __forceinline__ float sink_weight(float sink, float lse) {
    const float difference = sink - lse;
    return difference > 0.0f ? 1.0f : exp2_fast(difference * kLog2E);
}

} // namespace fa
