/* The two register-blocked products of attention. Lanes are query rows: S^T = K Q^T and O^T += V^T P^T both take a
 * vector of rows times one broadcast number of K or V, so that K and V are read where they lie, in their own order, and
 * the softmax needs no reduction across lanes.
 *
 * `mr` is the width of a block in vectors, `nr` how many value columns stand against it in registers: mr * nr sums, mr
 * operands and one broadcast; of keys, whose sums have two parts, there are half as many. Both are compile-time
 * constants wherever these functions are expanded. simd_plain.h and simd_bf16.h say what
 * an operand is, a number or a pair.
 */
#ifndef FA_CPU_SIMD_GEMM_H
#define FA_CPU_SIMD_GEMM_H

#include <math.h>
#include <string.h>

#if FA_CPU_BF16
#include "cpu/simd_bf16.h"
#else
#include "cpu/simd_plain.h"
#endif

/* The number that fits the registers beside the operands, at most 8: (32 - 1 - 4) / 4 = 6 columns against 4 vectors
 * with AVX-512.
 */
#define NR_FITTING(mr) ((VECTOR_REGISTERS - 1 - (mr)) / (mr) < 8 ? (VECTOR_REGISTERS - 1 - (mr)) / (mr) : 8)
#ifdef FA_CPU_NR
#define NR(mr) ((mr) == FA_CPU_MR ? FA_CPU_NR : NR_FITTING(mr))
#else
#define NR(mr) NR_FITTING(mr)
#endif
#define NR_LARGEST   16

/* Keys against a block of queries: a score holds two registers, the sum of eight products and the total. */
#define SCORE_NR(mr) ((VECTOR_REGISTERS - 1 - (mr)) / (2 * (mr)) < 8 ? (VECTOR_REGISTERS - 1 - (mr)) / (2 * (mr)) : 8)

/* Operands of a score whose products are summed apart from the others. */
#define EIGHT        8

/* A thread can multiply between these: here always. */
INLINE void begin_products(bool narrow) { (void)narrow; }
INLINE void end_products(void) {}

/* s[n * mr * LANES + lane] = scale * sum over d of k[n * k_pitch] [d] q[d * mr * LANES + lane] for n < nr, d < depth;
 * maximum[lane] rises to the largest of them.
 *
 * Products are summed by eights: eight in order, then their sum joins the total. The total is rounded before it is
 * scaled. Of numbers these are the sums of the plain formula (fa_ext/reference/__init__.py), rounding by rounding:
 * where scores are large few keys decide a row, and sums in another order would be off elsewhere, if no further. */
INLINE void score_block(const int mr, const int nr, const real *restrict q, const key_number *restrict k,
                        int64_t k_pitch, int depth, real scale, real *restrict s, real *restrict maximum) {
    vreal total[NR_LARGEST][FA_CPU_MR];
    UNROLL
    for (int n = 0; n < nr; n++) {
        UNROLL
        for (int m = 0; m < mr; m++) total[n][m] = v_set1(0);
    }
    for (int d = 0; d < depth;) {
        const int end = depth - d < EIGHT ? depth : d + EIGHT;
        vreal sum[NR_LARGEST][FA_CPU_MR];
        UNROLL
        for (int n = 0; n < nr; n++) {
            UNROLL
            for (int m = 0; m < mr; m++) sum[n][m] = v_set1(0);
        }
        UNROLL_FOUR
        for (; d < end; d++) {
            voperand rows[FA_CPU_MR];
            UNROLL
            for (int m = 0; m < mr; m++) rows[m] = v_operands(q + (d * mr + m) * LANES);
            UNROLL
            for (int n = 0; n < nr; n++) {
                const voperand key = v_key(k + n * k_pitch, d);
                UNROLL
                for (int m = 0; m < mr; m++) sum[n][m] = v_add_score(sum[n][m], rows[m], key);
            }
        }
        UNROLL
        for (int n = 0; n < nr; n++) {
            UNROLL
            for (int m = 0; m < mr; m++) total[n][m] += sum[n][m];
        }
    }
    UNROLL
    for (int m = 0; m < mr; m++) {
        vreal top = v_load(maximum + m * LANES);
        UNROLL
        for (int n = 0; n < nr; n++) {
            const vreal score = total[n][m] * scale;
            top = v_max(score, top);
            v_store(s + (n * mr + m) * LANES, score);
        }
        v_store(maximum + m * LANES, top);
    }
}

/* o[c * mr * LANES + lane] = o[...] * decay[lane] + sum over n of v[n * v_pitch + c] p[n * mr * LANES + lane], c < nr.
 */
INLINE void value_block(const int mr, const int nr, const real *restrict p, const value_number *restrict v,
                        int64_t v_pitch, int count, real *restrict o, const real *restrict decay) {
    vreal sum[NR_LARGEST][FA_CPU_MR];
    UNROLL
    for (int c = 0; c < nr; c++) {
        UNROLL
        for (int m = 0; m < mr; m++) sum[c][m] = v_set1(0);
    }
    for (int n = 0; n < count; n++, v += v_pitch) {
        voperand rows[FA_CPU_MR];
        UNROLL
        for (int m = 0; m < mr; m++) rows[m] = v_operands(p + (n * mr + m) * LANES);
        UNROLL
        for (int c = 0; c < nr; c++) {
            const voperand value = v_value(v[c]);
            UNROLL
            for (int m = 0; m < mr; m++) sum[c][m] = v_add_value(sum[c][m], rows[m], value);
        }
    }
    UNROLL
    for (int m = 0; m < mr; m++) {
        const vreal factor = v_load(decay + m * LANES);
        UNROLL
        for (int c = 0; c < nr; c++) {
            real *at = o + (c * mr + m) * LANES;
            v_store(at, v_fma(v_load(at), factor, sum[c][m]));
        }
    }
}

/* Calls BLOCK(nr) for consecutive runs of nr <= most rows that cover [0, count), advancing `at`. */
#define FOR_RUNS(most, at, count, BLOCK)                                                                               \
    do {                                                                                                               \
        for (; at + (most) <= count; at += (most)) BLOCK(most);                                                        \
        for (; (most) > 8 && at + 8 <= count; at += 8) BLOCK(8);                                                       \
        if ((most) > 4 && at + 4 <= count) {                                                                           \
            BLOCK(4);                                                                                                  \
            at += 4;                                                                                                   \
        }                                                                                                              \
        if ((most) > 2 && at + 2 <= count) {                                                                           \
            BLOCK(2);                                                                                                  \
            at += 2;                                                                                                   \
        }                                                                                                              \
        if ((most) > 1 && at < count) BLOCK(1);                                                                        \
    } while (0)

INLINE void multiply_scores(const int mr, const real *q, const key_number *k, int64_t k_pitch, int head_dim, int keys,
                            real scale, real *s, real *maximum) {
    int n = 0;
#define SCORE_RUN(nr)                                                                                                  \
    score_block(mr, nr, q, k + n * k_pitch, k_pitch, OPERANDS(head_dim), scale, s + n * mr * LANES, maximum)
    FOR_RUNS(SCORE_NR(mr), n, keys, SCORE_RUN);
#undef SCORE_RUN
}

/* `count` rows of V. */
INLINE void multiply_values(const int mr, const real *p, const value_number *v, int64_t v_pitch, int count,
                            int head_dim_v, real *o, const real *decay) {
    int c = 0;
#define VALUE_RUN(nr) value_block(mr, nr, p, v + c, v_pitch, count, o + c * mr * LANES, decay)
    FOR_RUNS(NR(mr), c, head_dim_v, VALUE_RUN);
#undef VALUE_RUN
}

/* multiply_values() that passes over excluded keys (p is -0.0 there) whatever v holds. */
static void multiply_values_contained(int mr, const real *p, const value_number *v, int64_t v_pitch, int count,
                                      int head_dim_v, real *o, const real *decay) {
    for (int c = 0; c < head_dim_v; c++)
        for (int m = 0; m < mr; m++) {
            vreal sum = v_set1(0);
            for (int n = 0; n < count; n++)
                sum = v_add_seen_value(sum, v_operands(p + (n * mr + m) * LANES), v_value(v[n * v_pitch + c]));
            real *at = o + (c * mr + m) * LANES;
            v_store(at, v_fma(v_load(at), v_load(decay + m * LANES), sum));
        }
}

/* ---- one query alone, rounding by rounding as above ---- */

/* Value columns that a pass over a tile of V sums, in vectors. */
#define NARROW_COLUMNS (VECTOR_REGISTERS / 2)

/* Elements of a cache line, and the rows of K or V that are asked for ahead of their use. Xeon, two cores, 268 MB of K
 * and V in float32, time over torch's in the same run, two runs each: 0.95 and 0.98 with 8 rows, 0.84 and 0.88 with 16,
 * 0.91 and 0.93 with 24, 0.91 and 0.92 with 32, 1.00 and 1.01 with 64. */
#define LINE           (64 / FA_CPU_REAL_BYTES)
#define AHEAD          16

/* Scores of LANES keys, the sums of score_block(): operands of LANES rows of K are transposed, so that lanes are keys.
 */
INLINE vreal narrow_group(const real *q, const key_number *const k[LANES], int64_t k_pitch, int depth, real scale) {
    vreal total = v_set1(0), sum = v_set1(0);
    for (int d = 0; d < depth; d += LANES) {
        vreal tile[LANES];
        UNROLL
        for (int n = 0; n < LANES; n++) {
            const key_number *at = k[n] + OPERAND_NUMBERS * d;
            if (d % LINE == 0) __builtin_prefetch(at + AHEAD * k_pitch);
            memcpy(&tile[n], at, sizeof tile[n]);
        }
        v_transpose(tile);
        UNROLL
        for (int e = 0; e < LANES; e++) {
            if (LANES > EIGHT ? e % EIGHT == 0 : e == 0 && d % EIGHT == 0) {
                total += sum;
                sum = v_set1(0);
            }
            sum = v_add_score(sum, v_key((const key_number *)q, d + e), (voperand)tile[e]);
        }
    }
    return (total + sum) * scale;
}

/* s[n] = scale * q . k[n * k_pitch] for n < keys: the largest. `s` has room for whole vectors of keys. */
INLINE real narrow_scores(const real *q, const key_number *k, int64_t k_pitch, int head_dim, int keys, real scale,
                          real *s) {
    vreal top = v_set1(-(real)INFINITY);
    for (int n = 0; n < keys; n += LANES) {
        const key_number *rows[LANES]; /* past the end: the last key again */
        for (int lane = 0; lane < LANES; lane++) rows[lane] = k + (n + lane < keys ? n + lane : keys - 1) * k_pitch;
        const vreal score = narrow_group(q, rows, k_pitch, OPERANDS(head_dim), scale);
        top = v_max(score, top);
        v_store(s + n, score);
    }
    real highest = -(real)INFINITY;
    for (int lane = 0; lane < LANES; lane++) highest = top[lane] > highest ? top[lane] : highest;
    return highest;
}

/* o[c] = o[c] * decay + sum over n of p[n] v[n * v_pitch + c] for c < LANES * columns and `count` rows of V. */
INLINE void narrow_values(const int columns, const real *p, const value_number *v, int64_t v_pitch, int count, real *o,
                          real decay) {
    vreal sum[NARROW_COLUMNS];
    UNROLL
    for (int c = 0; c < columns; c++) sum[c] = v_set1(0);
    for (int n = 0; n < count; n++, v += v_pitch) {
        value_number number;
        memcpy(&number, p + n, sizeof number);
        const voperand weight = v_value(number);
        UNROLL
        for (int c = 0; c < columns; c++) {
            if (c * LANES % LINE == 0) __builtin_prefetch(v + c * LANES + AHEAD * v_pitch);
            sum[c] = v_add_value(sum[c], weight, v_values(v + c * LANES));
        }
    }
    UNROLL
    for (int c = 0; c < columns; c++) v_store(o + c * LANES, v_fma(v_load(o + c * LANES), v_set1(decay), sum[c]));
}

/* ---- the softmax's own arithmetic ---- */

/* A row's maximum after keys of which `highest` is the largest score. */
INLINE vreal v_next_maximum(vreal before, vreal highest) { return v_max(highest, before); }
/* x / y, where 1 / y is there. */
INLINE vreal v_quotient(vreal x, vreal y, vreal inverse) {
    (void)inverse;
    return x / y;
}

#endif
