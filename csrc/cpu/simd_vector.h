/* One vector of `real` (float or double) for one instruction set: the layer that hides which.
 *
 * Arithmetic is written with the compiler's vector extensions; here stand what those lack. FA_CPU_VECTOR_BYTES chooses:
 * 64 AVX-512 (F, BW, DQ, VL), 32 AVX2 with FMA and F16C, 16 whatever the compiler has (SSE2, NEON, plain C).
 * FA_CPU_REAL_BYTES is 4 or 8. Included once by an instance, after its #pragma that switches the instruction set on.
 */
#ifndef FA_CPU_SIMD_VECTOR_H
#define FA_CPU_SIMD_VECTOR_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#if FA_CPU_VECTOR_BYTES > 16
#include <immintrin.h>
#endif

#include "cpu/half.h"

#define INLINE static inline __attribute__((always_inline))
#ifdef __clang__
#define UNROLL      _Pragma("clang loop unroll(full)")
#define UNROLL_FOUR _Pragma("clang loop unroll_count(4)")
#else
#define UNROLL      _Pragma("GCC unroll 16")
#define UNROLL_FOUR _Pragma("GCC unroll 4")
#endif

#define LANES (FA_CPU_VECTOR_BYTES / FA_CPU_REAL_BYTES)
#if FA_CPU_REAL_BYTES == 4
typedef float real;
typedef int32_t integer;
typedef uint32_t bits;
#else
typedef double real;
typedef int64_t integer;
typedef uint64_t bits;
#endif
typedef real vreal __attribute__((vector_size(FA_CPU_VECTOR_BYTES)));
typedef integer vint __attribute__((vector_size(FA_CPU_VECTOR_BYTES)));
typedef bits vbits __attribute__((vector_size(FA_CPU_VECTOR_BYTES)));

/* Architectural vector registers: what the register blocks are sized by. */
#if FA_CPU_VECTOR_BYTES == 64 || defined(__aarch64__)
#define VECTOR_REGISTERS 32
#else
#define VECTOR_REGISTERS 16
#endif

INLINE vreal v_load(const real *from) {
    vreal value;
    memcpy(&value, from, sizeof value);
    return value;
}

INLINE void v_store(real *to, vreal value) { memcpy(to, &value, sizeof value); }

INLINE vreal v_set1(real value) { return value - (vreal){0}; } /* x - 0 is x, also for -0 */

/* Comparisons of the vector extensions give all-ones or zero lanes. */
INLINE vreal v_select(vint condition, vreal yes, vreal no) {
    return (vreal)((condition & (vint)yes) | (~condition & (vint)no));
}

INLINE bool v_any(vint condition) {
    integer any = 0;
    for (int n = 0; n < LANES; n++) any |= condition[n];
    return any != 0;
}

/* a * b + c, rounded once where the machine can; v_fma_once(): in float always. v_max(a, b) is b where either is NaN,
 * like x86's. */
#if FA_CPU_VECTOR_BYTES == 64 && FA_CPU_REAL_BYTES == 4
INLINE vreal v_fma(vreal a, vreal b, vreal c) { return (vreal)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
INLINE vreal v_max(vreal a, vreal b) { return (vreal)_mm512_max_ps((__m512)a, (__m512)b); }
#elif FA_CPU_VECTOR_BYTES == 64
INLINE vreal v_fma(vreal a, vreal b, vreal c) { return (vreal)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c); }
INLINE vreal v_max(vreal a, vreal b) { return (vreal)_mm512_max_pd((__m512d)a, (__m512d)b); }
#elif FA_CPU_VECTOR_BYTES == 32 && FA_CPU_REAL_BYTES == 4
INLINE vreal v_fma(vreal a, vreal b, vreal c) { return (vreal)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
INLINE vreal v_max(vreal a, vreal b) { return (vreal)_mm256_max_ps((__m256)a, (__m256)b); }
#elif FA_CPU_VECTOR_BYTES == 32
INLINE vreal v_fma(vreal a, vreal b, vreal c) { return (vreal)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c); }
INLINE vreal v_max(vreal a, vreal b) { return (vreal)_mm256_max_pd((__m256d)a, (__m256d)b); }
#else
INLINE vreal v_fma(vreal a, vreal b, vreal c) { return a * b + c; }
INLINE vreal v_max(vreal a, vreal b) { return v_select(a > b, a, b); }
#endif

#if FA_CPU_VECTOR_BYTES > 16 || FA_CPU_REAL_BYTES == 8 || defined(__aarch64__)
#define v_fma_once v_fma
#else
/* By way of double, in which the product is exact: slow, for machines without the instruction. */
typedef double vdouble __attribute__((vector_size(8 * LANES)));
INLINE vreal v_fma_once(vreal a, vreal b, vreal c) {
    const vdouble product = __builtin_convertvector(a, vdouble) * __builtin_convertvector(b, vdouble);
    return __builtin_convertvector(product + __builtin_convertvector(c, vdouble), vreal);
}
#endif

/* ---- rounding to an integer n, and multiplication by 2^n ---- */

/* v_round(x, &power) gives x rounded to the nearest integer n; v_ldexp(y, power) gives y * 2^n for -bias < n, 0 for
 * n = -bias. Adding 1.5 * 2^mantissa rounds x at the last bit, and leaves n in the low bits of the sum: shifted to the
 * exponent's place it is 2^n, or zero for n = -bias. No result is subnormal on the way to a weight of 0, which excluded
 * keys have. */
typedef vbits vpower;
#if FA_CPU_REAL_BYTES == 4
#define ROUNDER       0x1.8p23f
#define EXPONENT_BIAS 127
#define MANTISSA      23
#else
#define ROUNDER       0x1.8p52
#define EXPONENT_BIAS 1023
#define MANTISSA      52
#endif
INLINE vreal v_round(vreal x, vpower *power) {
    const vreal sum = x + ROUNDER;
    *power = ((vbits)sum + EXPONENT_BIAS) << MANTISSA;
    return sum - ROUNDER;
}
INLINE vreal v_ldexp(vreal y, vpower power) { return y * (vreal)power; }

/* ---- loads and stores that convert ---- */

/* GCC's __builtin_convertvector widens integers lane by lane, hence the intrinsics. */

#if FA_CPU_REAL_BYTES == 4
typedef uint16_t vhalf __attribute__((vector_size(2 * LANES)));

INLINE vreal v_load_bf16(const uint16_t *from) {
#if FA_CPU_VECTOR_BYTES == 64
    return (vreal)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)), 16);
#elif FA_CPU_VECTOR_BYTES == 32
    return (vreal)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from)), 16);
#else
    vhalf half;
    memcpy(&half, from, sizeof half);
    return (vreal)(__builtin_convertvector(half, vbits) << 16);
#endif
}

INLINE void v_store_bf16(uint16_t *to, vreal value) {
    const vbits b = (vbits)value;
    const vint nan = value != value;
    const vbits rounded = (b + 0x7fff + (b >> 16 & 1)) >> 16;
    const vbits chosen = ((vbits)nan & (b >> 16 | 0x40)) | (~(vbits)nan & rounded);
    const vhalf half = __builtin_convertvector(chosen, vhalf);
    memcpy(to, &half, sizeof half);
}

#if FA_CPU_VECTOR_BYTES == 64
INLINE vreal v_load_f16(const uint16_t *from) {
    return (vreal)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
}
INLINE void v_store_f16(uint16_t *to, vreal value) {
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
#elif FA_CPU_VECTOR_BYTES == 32
INLINE vreal v_load_f16(const uint16_t *from) { return (vreal)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from)); }
INLINE void v_store_f16(uint16_t *to, vreal value) {
    _mm_storeu_si128((__m128i *)to, _mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT));
}
#else
INLINE vreal v_load_f16(const uint16_t *from) {
    vreal value;
    for (int n = 0; n < LANES; n++) value[n] = fa_float_from_f16(from[n]);
    return value;
}
INLINE void v_store_f16(uint16_t *to, vreal value) {
    for (int n = 0; n < LANES; n++) to[n] = fa_f16_from_float(value[n]);
}
#endif
#else
typedef float vsingle __attribute__((vector_size(4 * LANES)));

INLINE vreal v_load_f32(const float *from) {
    vsingle single;
    memcpy(&single, from, sizeof single);
    return __builtin_convertvector(single, vreal);
}
#endif

/* 0 where the byte is set, -inf where it is zero. */
INLINE vreal v_load_mask(const uint8_t *from) {
    const real excluded = -(real)INFINITY;
#if FA_CPU_VECTOR_BYTES == 64 && FA_CPU_REAL_BYTES == 4
    const __m128i bytes = _mm_loadu_si128((const __m128i *)from);
    return (vreal)_mm512_maskz_mov_ps(_mm_testn_epi8_mask(bytes, bytes), (__m512)v_set1(excluded));
#elif FA_CPU_VECTOR_BYTES == 64
    const __m128i bytes = _mm_loadl_epi64((const __m128i *)from);
    return (vreal)_mm512_maskz_mov_pd((__mmask8)_mm_testn_epi8_mask(bytes, bytes), (__m512d)v_set1(excluded));
#elif FA_CPU_VECTOR_BYTES == 32 && FA_CPU_REAL_BYTES == 4
    const vint wide = (vint)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)from));
    return v_select(wide == 0, v_set1(excluded), v_set1(0));
#elif FA_CPU_VECTOR_BYTES == 32
    int32_t bytes;
    memcpy(&bytes, from, sizeof bytes);
    const vint wide = (vint)_mm256_cvtepu8_epi64(_mm_cvtsi32_si128(bytes));
    return v_select(wide == 0, v_set1(excluded), v_set1(0));
#else
    vreal value;
    for (int n = 0; n < LANES; n++) value[n] = from[n] ? 0 : excluded;
    return value;
#endif
}

/* ---- transposition ---- */

#if LANES == 2
#define LOW_LANES  0, 2
#define HIGH_LANES 1, 3
#elif LANES == 4
#define LOW_LANES  0, 4, 1, 5
#define HIGH_LANES 2, 6, 3, 7
#elif LANES == 8
#define LOW_LANES  0, 8, 1, 9, 2, 10, 3, 11
#define HIGH_LANES 4, 12, 5, 13, 6, 14, 7, 15
#else
#define LOW_LANES  0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define HIGH_LANES 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#endif
#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (vint){__VA_ARGS__})
#endif

#if LANES == 8 && FA_CPU_VECTOR_BYTES == 32
/* Transposes 8 x 8: by pairs of rows, by pairs of pairs, by halves, each with one instruction a vector. */
INLINE void v_transpose(vreal rows[LANES]) {
    vreal pairs[LANES], fours[LANES];
    UNROLL
    for (int n = 0; n < 8; n += 2) {
        pairs[n] = SHUFFLE(rows[n], rows[n + 1], 0, 8, 1, 9, 4, 12, 5, 13);
        pairs[n + 1] = SHUFFLE(rows[n], rows[n + 1], 2, 10, 3, 11, 6, 14, 7, 15);
    }
    UNROLL
    for (int n = 0; n < 8; n++) {
        const vreal low = pairs[n / 4 * 4 + n % 4 / 2], high = pairs[n / 4 * 4 + n % 4 / 2 + 2];
        fours[n] =
            n % 2 ? SHUFFLE(low, high, 2, 3, 10, 11, 6, 7, 14, 15) : SHUFFLE(low, high, 0, 1, 8, 9, 4, 5, 12, 13);
    }
    UNROLL
    for (int n = 0; n < 4; n++) {
        rows[n] = SHUFFLE(fours[n], fours[n + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        rows[n + 4] = SHUFFLE(fours[n], fours[n + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
}
#else
/* Transposes LANES x LANES: each round interleaves row n with row n + LANES / 2 (a perfect shuffle of the index bits),
 * and log2(LANES) rounds exchange rows and columns. */
INLINE void v_transpose(vreal rows[LANES]) {
    UNROLL
    for (int round = 1; round < LANES; round *= 2) {
        vreal shuffled[LANES];
        UNROLL
        for (int n = 0; n < LANES / 2; n++) {
            shuffled[2 * n] = SHUFFLE(rows[n], rows[n + LANES / 2], LOW_LANES);
            shuffled[2 * n + 1] = SHUFFLE(rows[n], rows[n + LANES / 2], HIGH_LANES);
        }
        UNROLL
        for (int n = 0; n < LANES; n++) rows[n] = shuffled[n];
    }
}
#endif

#endif
