/* The two register-blocked products of attention. Lanes are query rows: S^T = K Q^T and O^T += V^T P^T both take a
 * vector of rows times one broadcast number of K or V, so that K and V are read where they lie, in their own order, and
 * the softmax needs no reduction across lanes.
 *
 * `mr` is the width of a block in vectors, `nr` how many value columns stand against it in registers: mr * nr sums, mr
 * operands and one broadcast; of keys, whose sums have two parts, there are half as many. Both are compile-time
 * constants wherever these functions are expanded.
 */
#ifndef FA_CPU_SIMD_GEMM_H
#define FA_CPU_SIMD_GEMM_H

#include "cpu/simd_vector.h"

/* Lanes of a whole block. */
#define BLOCK_ROWS     (FA_CPU_MR * LANES)

/* What fits the registers beside the operands, at most 8: (32 - 1 - 4) / 4 = 6 columns against 4 vectors with AVX-512.
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

/* Products of a score that are summed apart from the others. */
#define EIGHT        8

/* s[n * mr * LANES + lane] = scale * total[n][m][lane], and the maximum of each lane. */
INLINE void store_scores(const int mr, const int nr, const vreal (*total)[FA_CPU_MR], real scale, real *restrict s,
                         real *restrict maximum) {
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

/* o[c * mr * LANES + lane] = o[...] * decay[lane] + sum[c][m][lane]. */
INLINE void add_decayed(const int mr, const int nr, const vreal (*sum)[FA_CPU_MR], real *restrict o,
                        const real *restrict decay) {
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

/* s[n * mr * LANES + lane] = scale * sum over d of k[n * k_pitch + d] q[d * mr * LANES + lane] for n < nr;
 * maximum[lane] rises to the largest of them.
 *
 * Products are summed by eights: eight in order, then their sum joins the total. The total is rounded before it is
 * scaled. These are the sums of the plain formula (fa_ext/reference/__init__.py), rounding by rounding: where scores
 * are large few keys decide a row, and sums in another order would be off elsewhere, if no further. */
INLINE void score_block(const int mr, const int nr, const real *restrict q, const real *restrict k, int64_t k_pitch,
                        int head_dim, real scale, real *restrict s, real *restrict maximum) {
    vreal total[NR_LARGEST][FA_CPU_MR];
    UNROLL
    for (int n = 0; n < nr; n++) {
        UNROLL
        for (int m = 0; m < mr; m++) total[n][m] = v_set1(0);
    }
    for (int d = 0; d < head_dim;) {
        const int end = head_dim - d < EIGHT ? head_dim : d + EIGHT;
        vreal sum[NR_LARGEST][FA_CPU_MR];
        UNROLL
        for (int n = 0; n < nr; n++) {
            UNROLL
            for (int m = 0; m < mr; m++) sum[n][m] = v_set1(0);
        }
        UNROLL_FOUR
        for (; d < end; d++) {
            vreal rows[FA_CPU_MR];
            UNROLL
            for (int m = 0; m < mr; m++) rows[m] = v_load(q + (d * mr + m) * LANES);
            UNROLL
            for (int n = 0; n < nr; n++) {
                const vreal key = v_set1(k[n * k_pitch + d]);
                UNROLL
                for (int m = 0; m < mr; m++) sum[n][m] = v_fma_once(rows[m], key, sum[n][m]);
            }
        }
        UNROLL
        for (int n = 0; n < nr; n++) {
            UNROLL
            for (int m = 0; m < mr; m++) total[n][m] += sum[n][m];
        }
    }
    store_scores(mr, nr, total, scale, s, maximum);
}

/* o[c * mr * LANES + lane] = o[...] * decay[lane] + sum over n of v[n * v_pitch + c] p[n * mr * LANES + lane], c < nr.
 */
INLINE void value_block(const int mr, const int nr, const real *restrict p, const real *restrict v, int64_t v_pitch,
                        int keys, real *restrict o, const real *restrict decay) {
    vreal sum[NR_LARGEST][FA_CPU_MR];
    UNROLL
    for (int c = 0; c < nr; c++) {
        UNROLL
        for (int m = 0; m < mr; m++) sum[c][m] = v_set1(0);
    }
    for (int n = 0; n < keys; n++, v += v_pitch) {
        vreal rows[FA_CPU_MR];
        UNROLL
        for (int m = 0; m < mr; m++) rows[m] = v_load(p + (n * mr + m) * LANES);
        UNROLL
        for (int c = 0; c < nr; c++) {
            const vreal value = v_set1(v[c]);
            UNROLL
            for (int m = 0; m < mr; m++) sum[c][m] = v_fma(rows[m], value, sum[c][m]);
        }
    }
    add_decayed(mr, nr, sum, o, decay);
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

INLINE void multiply_scores(const int mr, const real *q, const real *k, int64_t k_pitch, int head_dim, int keys,
                            real scale, real *s, real *maximum) {
    int n = 0;
#define SCORE_RUN(nr) score_block(mr, nr, q, k + n * k_pitch, k_pitch, head_dim, scale, s + n * mr * LANES, maximum)
    FOR_RUNS(SCORE_NR(mr), n, keys, SCORE_RUN);
#undef SCORE_RUN
}

INLINE void multiply_values(const int mr, const real *p, const real *v, int64_t v_pitch, int keys, int head_dim_v,
                            real *o, const real *decay) {
    int c = 0;
#define VALUE_RUN(nr) value_block(mr, nr, p, v + c, v_pitch, keys, o + c * mr * LANES, decay)
    FOR_RUNS(NR(mr), c, head_dim_v, VALUE_RUN);
#undef VALUE_RUN
}

/* multiply_values() that passes over excluded keys (p is -0.0 there) whatever v holds. */
static inline void multiply_values_contained(int mr, const real *p, const real *v, int64_t v_pitch, int keys,
                                             int head_dim_v, real *o, const real *decay) {
    const bits excluded = (bits)1 << (8 * FA_CPU_REAL_BYTES - 1);
    for (int c = 0; c < head_dim_v; c++)
        for (int m = 0; m < mr; m++) {
            vreal sum = v_set1(0);
            for (int n = 0; n < keys; n++) {
                const vreal row = v_load(p + (n * mr + m) * LANES);
                const vint skip = (vbits)row == excluded;
                sum = v_select(skip, sum, v_fma(row, v_set1(v[n * v_pitch + c]), sum));
            }
            real *at = o + (c * mr + m) * LANES;
            v_store(at, v_fma(v_load(at), v_load(decay + m * LANES), sum));
        }
}

#endif
