/* The products of simd_gemm.h by AVX512-BF16, for bfloat16 operands: vdpbf16ps multiplies two pairs of neighbours along
 * the sum and adds both products to a float. Lanes are query rows as there; a lane's pair is two columns of Q, or the
 * weights of two keys, rounded to bfloat16 as the matrix units of a GPU take them.
 *
 * Keys are paired by their number in the sequence, an even one with the next, so that a row's products meet in the same
 * pairs wherever a tile is cut; who is not in the tile has weight and value 0 there. The instruction takes subnormal
 * numbers for 0. Products of a score are summed by sixteens, eight instructions, and their sums then.
 */
#ifndef FA_CPU_SIMD_BF16_H
#define FA_CPU_SIMD_BF16_H

#include "cpu/simd_gemm.h"
#include "cpu/simd_rows.h"

typedef uint16_t key_number;   /* a tile of K: rows of head_dim, an even number */
typedef uint32_t value_number; /* a tile of V: rows of pairs of keys, the even one in the low half */

/* Numbers of a copied row of K. */
#define KEY_COLUMNS(dim)       (((dim) + 1) / 2 * 2)

/* Keys of a tile before `key`, in rows of V. */
#define VALUE_ROWS(begin, key) ((key) / 2 - (begin) / 2)
/* Rows of V that so many keys take at most. */
#define VALUE_ROOM(keys)       ((keys) / 2 + 1)

#define SIXTEEN_PAIRS          8

#define EXCLUDED_HALF          0x8000 /* -0.0, the weight of a key that a row does not see */

INLINE uint32_t pair_at(const uint16_t *from) {
    uint32_t pair;
    memcpy(&pair, from, sizeof pair);
    return pair;
}
INLINE vint v_pair(uint32_t pair) { return (vint)_mm512_set1_epi32((int)pair); }
INLINE vreal v_dot(vreal sum, vint a, vint b) { return (vreal)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b); }
INLINE vint v_load_pairs(const void *from) {
    vint value;
    memcpy(&value, from, sizeof value);
    return value;
}
INLINE void v_store_pairs(void *to, vint value) { memcpy(to, &value, sizeof value); }

/* ---- operands ---- */

/* A row of `dim` elements, followed by zeros up to KEY_COLUMNS(dim). */
static void copy_half_row(uint16_t *to, const char *from, int64_t stride, int dim) {
    const uint16_t *row = (const uint16_t *)from;
    if (stride == 1)
        memcpy(to, row, (size_t)dim * sizeof *to);
    else
        for (int d = 0; d < dim; d++) to[d] = row[d * stride];
    if (dim % 2) to[dim] = 0;
}

/* to[c * pitch + lane] = pair c of rows[lane], as words of `real` that nothing computes with. `buffer` holds
 * LANES * KEY_COLUMNS(dim) / 2 words. */
static void read_queries(real *to, int pitch, const char *const rows[LANES], fa_dtype dtype, int64_t stride, int dim,
                         real *buffer) {
    (void)dtype;
    uint16_t *halves = (uint16_t *)buffer;
    for (int lane = 0; lane < LANES; lane++) copy_half_row(halves + lane * KEY_COLUMNS(dim), rows[lane], stride, dim);
    for (int first = 0; first < KEY_COLUMNS(dim) / 2; first += LANES) {
        const int columns = KEY_COLUMNS(dim) / 2 - first < LANES ? KEY_COLUMNS(dim) / 2 - first : LANES;
        vreal tile[LANES];
        for (int lane = 0; lane < LANES; lane++) {
            tile[lane] = (vreal){0};
            memcpy(&tile[lane], halves + lane * KEY_COLUMNS(dim) + 2 * first, (size_t)columns * 4);
        }
        v_transpose(tile);
        for (int c = 0; c < columns; c++) v_store(to + (first + c) * pitch, tile[c]);
    }
}

/* `count` rows of K one stride apart, copied. */
static void copy_key_rows(const fa_operand *operand, fa_dtype dtype, const char *from, int64_t count, int dim,
                          key_number *copy) {
    const int64_t stride = operand->stride[2] * (int64_t)fa_dtype_size(dtype);
    for (int64_t n = 0; n < count; n++)
        copy_half_row(copy + n * KEY_COLUMNS(dim), from + n * stride, operand->stride[3], dim);
}

/* The same in place, where they can be read so. */
static const key_number *key_rows_at(const fa_operand *operand, fa_dtype dtype, const char *from, int64_t count,
                                     int dim, key_number *copy, int64_t *pitch) {
    const int64_t stride = operand->stride[2];
    if (operand->stride[3] == 1 && dim % 2 == 0 && stride >= 0 && stride <= 2 * dim) {
        *pitch = stride;
        return (const key_number *)from;
    }
    *pitch = KEY_COLUMNS(dim);
    copy_key_rows(operand, dtype, from, count, dim, copy);
    return copy;
}

/* Two rows of V, NULL: zeros, as a row of pairs. */
static void join_value_rows(value_number *to, const char *even, const char *odd, int64_t stride, int dim) {
    const uint16_t *low = (const uint16_t *)even, *high = (const uint16_t *)odd;
    int c = 0;
    for (; stride == 1 && low && high && c + LANES <= dim; c += LANES) {
        const __m512i a = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(low + c))),
                      b = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(high + c)));
        v_store_pairs(to + c, (vint)_mm512_or_si512(a, _mm512_slli_epi32(b, 16)));
    }
    for (; c < dim; c++) to[c] = (low ? low[c * stride] : 0u) | (uint32_t)(high ? high[c * stride] : 0u) << 16;
}

/* ---- blocks of rows ---- */

/* As score_block(), `head_dim` even. */
INLINE void pair_score_block(const int mr, const int nr, const real *restrict q, const key_number *restrict k,
                             int64_t k_pitch, int head_dim, real scale, real *restrict s, real *restrict maximum) {
    vreal total[NR_LARGEST][FA_CPU_MR];
    UNROLL
    for (int n = 0; n < nr; n++) {
        UNROLL
        for (int m = 0; m < mr; m++) total[n][m] = v_set1(0);
    }
    for (int d = 0; d < head_dim / 2;) {
        const int end = head_dim / 2 - d < SIXTEEN_PAIRS ? head_dim / 2 : d + SIXTEEN_PAIRS;
        vreal sum[NR_LARGEST][FA_CPU_MR];
        UNROLL
        for (int n = 0; n < nr; n++) {
            UNROLL
            for (int m = 0; m < mr; m++) sum[n][m] = v_set1(0);
        }
        UNROLL_FOUR
        for (; d < end; d++) {
            vint rows[FA_CPU_MR];
            UNROLL
            for (int m = 0; m < mr; m++) rows[m] = v_load_pairs(q + (d * mr + m) * LANES);
            UNROLL
            for (int n = 0; n < nr; n++) {
                const vint key = v_pair(pair_at(k + n * k_pitch + 2 * d));
                UNROLL
                for (int m = 0; m < mr; m++) sum[n][m] = v_dot(sum[n][m], rows[m], key);
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

/* o[c * mr * LANES + lane] = o[...] * decay[lane] + sum over pairs of v[n * v_pitch + c] p[n * mr * LANES + lane]. */
INLINE void pair_value_block(const int mr, const int nr, const real *restrict p, const value_number *restrict v,
                             int64_t v_pitch, int pairs, real *restrict o, const real *restrict decay) {
    vreal sum[NR_LARGEST][FA_CPU_MR];
    UNROLL
    for (int c = 0; c < nr; c++) {
        UNROLL
        for (int m = 0; m < mr; m++) sum[c][m] = v_set1(0);
    }
    for (int n = 0; n < pairs; n++, v += v_pitch) {
        vint rows[FA_CPU_MR];
        UNROLL
        for (int m = 0; m < mr; m++) rows[m] = v_load_pairs(p + (n * mr + m) * LANES);
        UNROLL
        for (int c = 0; c < nr; c++) {
            const vint value = v_pair(v[c]);
            UNROLL
            for (int m = 0; m < mr; m++) sum[c][m] = v_dot(sum[c][m], rows[m], value);
        }
    }
    add_decayed(mr, nr, sum, o, decay);
}

INLINE void multiply_key_scores(const int mr, const real *q, const key_number *k, int64_t k_pitch, int head_dim,
                                int keys, real scale, real *s, real *maximum) {
    int n = 0;
#define SCORE_RUN(nr)                                                                                                  \
    pair_score_block(mr, nr, q, k + n * k_pitch, k_pitch, KEY_COLUMNS(head_dim), scale, s + n * mr * LANES, maximum)
    FOR_RUNS(SCORE_NR(mr), n, keys, SCORE_RUN);
#undef SCORE_RUN
}

/* Weights of the keys [begin, begin + keys) to pairs, in place: how many there are. */
INLINE int pair_weights(const int mr, real *p, int64_t begin, int keys) {
    static const uint16_t interleaved[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                             8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512i order = _mm512_loadu_si512(interleaved);
    const int odd = (int)(begin % 2), pairs = (odd + keys + 1) / 2;
    for (int n = 0; n < pairs; n++) {
        const int at = 2 * n - odd; /* the even key, which pairs written before have not reached */
        UNROLL
        for (int m = 0; m < mr; m++) {
            const vreal none = v_set1(-(real)0);
            const vreal low = at >= 0 ? v_load(p + (at * mr + m) * LANES) : none;
            const vreal high = at + 1 < keys ? v_load(p + ((at + 1) * mr + m) * LANES) : none;
            const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
            v_store_pairs(p + (n * mr + m) * LANES, (vint)_mm512_permutexvar_epi16(order, both));
        }
    }
    return pairs;
}

/* P^T, which becomes pairs, times V, added to O^T. The weights are of the keys [begin, begin + keys). Contained: it
 * passes over excluded keys whatever v holds. */
INLINE void add_values(const int mr, real *p, const value_number *v, int64_t v_pitch, int64_t begin, int keys,
                       int head_dim_v, real *o, const real *decay, bool contained) {
    const int pairs = pair_weights(mr, p, begin, keys);
    int c = 0;
    if (contained) {
        const __m512i excluded = _mm512_set1_epi16((short)EXCLUDED_HALF);
        for (; c < head_dim_v; c++)
            for (int m = 0; m < mr; m++) {
                vreal sum = v_set1(0);
                for (int n = 0; n < pairs; n++) {
                    const vint row = v_load_pairs(p + (n * mr + m) * LANES);
                    const __mmask32 seen = _mm512_cmpneq_epi16_mask((__m512i)row, excluded);
                    sum = v_dot(sum, row, (vint)_mm512_maskz_mov_epi16(seen, (__m512i)v_pair(v[n * v_pitch + c])));
                }
                real *at = o + (c * mr + m) * LANES;
                v_store(at, v_fma(v_load(at), v_load(decay + m * LANES), sum));
            }
        return;
    }
#define PAIR_RUN(nr) pair_value_block(mr, nr, p, v + c, v_pitch, pairs, o + c * mr * LANES, decay)
    FOR_RUNS(NR(mr), c, head_dim_v, PAIR_RUN);
#undef PAIR_RUN
}

#endif
