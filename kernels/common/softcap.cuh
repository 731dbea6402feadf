/* Softcap: tanh as precisely as its place asks for, and with its slope.
 *
 * score_of() of score.cuh has tanhf. tanh_fast() of ptx.cuh is the MUFU's. */
#pragma once

#include <math.h> // fabsf

#include "common/ptx.cuh"   // exp2_fast, reciprocal_fast
#include "common/score.cuh" // kLog2E

namespace fa {

/* tanh near 0, |x| < 0.25, where its closed form cancels: the beginning of its series. */
__device__ __forceinline__ float tanh_series(float x) {
    const float square = x * x;
    return x + x * square * (-1.0f / 3 + square * (2.0f / 15 - square * (17.0f / 315)));
}

/* tanh at most 1.5e-6 off, relatively, with exp2 and the division as inexact as they may be (2 ulp each). */
__device__ __forceinline__ float tanh_by_exp2(float x) {
    const float series = tanh_series(x);
    const float closed = 1.0f - __fdividef(2.0f, exp2_fast(x * (2.0f * kLog2E)) + 1.0f);
    return fabsf(x) < 0.25f ? series : closed;
}

/* The closed form of tanh is at most 4e-7 off, absolutely: nothing to a cap of up to this. Larger ones need the series
 * near 0. */
constexpr float kMaxFastCap = 256.0f;

/* tanh, and its slope 1 - tanh^2, which the closed form gives without cancellation: never negative. About 1e-6 off. */
struct Capped {
    float value, slope;
};
__device__ __forceinline__ Capped tanh_and_slope(float x) {
    const float part = reciprocal_fast(exp2_fast(x * (2.0f * kLog2E)) + 1.0f), series = tanh_series(x);
    if (fabsf(x) < 0.25f) return {series, 1.0f - series * series};
    return {1.0f - 2.0f * part, 4.0f * part * (1.0f - part)};
}

/* tanh, at most 2 ulp off: the MUFU's own is good to 2^-11 relatively, which times a softcap of 50 would be 0.02 in the
 * exponent. Below 0.55 an interpolating polynomial, above 1 - 2 / (e^2x + 1). */
__device__ __forceinline__ float tanh_exact(float x) {
    const float u = x * x;
    float near = fmaf(u, 0.02131274f, -0.05391007f);
    near = fmaf(u, fmaf(-0.00661575f, u * u, near), 0.13333118f);
    near = fmaf(u, near, -0.33333332f);
    near = fmaf(x * u, near, x);
    const float far = 1.0f - __fdividef(2.0f, 1.0f + exp2_fast(2.8853900817779268f * x));
    return fabsf(x) < 0.55f ? near : far;
}

} // namespace fa
