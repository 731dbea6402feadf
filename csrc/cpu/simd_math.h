/* exp2 and tanh of a vector.
 *
 * 2^x = 2^n (1 + r Q(r)) with n = round(x) and r = x - n in [-1/2, 1/2]; Q is the minimax polynomial of
 * (2^r - 1) / r: relative error 1.1e-8 (degree 5, float), 1.8e-17 (degree 10, double).
 */
#ifndef FA_CPU_SIMD_MATH_H
#define FA_CPU_SIMD_MATH_H

#include "cpu/simd_vector.h"

#define LOG2E 1.4426950408889634

#if FA_CPU_REAL_BYTES == 4
static const real exp2_coefficients[] = {0.693147187927f,   0.24022649795f,    0.0555035743365f,
                                         0.00961823749418f, 0.00133907354754f, 0.000154035126187f};
#else
static const real exp2_coefficients[] = {0x1.62e42fefa39efp-1,  0x1.ebfbdff82c598p-3,  0x1.c6b08d704a08ep-5,
                                         0x1.3b2ab6fba1e40p-7,  0x1.5d87fe78b211ap-10, 0x1.4309130958e77p-13,
                                         0x1.ffcbfc1ea37c7p-17, 0x1.62bfd4b4adf2bp-20, 0x1.b525a09339debp-24,
                                         0x1.e605d28b72567p-28, 0x1.e8cab7c976947p-32};
#endif
#define EXP2_DEGREE ((int)(sizeof exp2_coefficients / sizeof *exp2_coefficients) - 1)

/* Arguments below this give 0. */
#define EXP2_LOWEST ((real)-EXPONENT_BIAS)

/* Q(r) for r in [-1/2, 1/2]. */
INLINE vreal v_exp2_polynomial(vreal r) {
    vreal q = v_set1(exp2_coefficients[EXP2_DEGREE]);
    UNROLL
    for (int n = EXP2_DEGREE - 1; n >= 0; n--) q = v_fma(q, r, v_set1(exp2_coefficients[n]));
    return q;
}

/* 2^x for x <= 127 (float) or 1023 (double). Largest error of a normal result, over every float: 0.85 ulp with fused
 * multiply-add, 1.13 without. 2^-inf = 0, NaN stays NaN. */
INLINE vreal v_exp2(vreal x) {
    vpower power;
    x = v_max(v_set1(EXP2_LOWEST), x);
    const vreal r = x - v_round(x, &power);
    return v_ldexp(v_fma(v_exp2_polynomial(r), r, v_set1(1)), power);
}

/* tanh(x) where y = x * 2 log2(e): with E = 2^y - 1 = 2^n (2^r - 1) + (2^n - 1), tanh is E / (E + 2), which keeps its
 * relative accuracy around 0: at most 3.9 ulp, over every float. NaN stays NaN. */
INLINE vreal v_tanh_scaled(vreal y) {
    const real limit = FA_CPU_REAL_BYTES == 4 ? 40 : 120; /* tanh has long been 1 in this precision */
    vpower power;
    y = v_max(v_set1(-limit), y);
    y = v_select(y > limit, v_set1(limit), y);
    const vreal r = y - v_round(y, &power);
    const vreal scale = v_ldexp(v_set1(1), power);
    const vreal e = v_fma(scale, v_exp2_polynomial(r) * r, scale - 1);
    return e / (e + 2);
}

#endif
