/* Operands that are pairs of bfloat16, for the products of simd_gemm.h by AVX512-BF16 and those of simd_amx.h:
 * vdpbf16ps multiplies two pairs of neighbours along the sum and adds both products to a float. Lanes are query rows as
 * there; a lane's pair is two columns of Q, or the weights of two keys, rounded to bfloat16 as the matrix units of a
 * GPU take them.
 *
 * Keys are paired by their number in the sequence, an even one with the next, so that a row's products meet in the same
 * pairs wherever a tile is cut; keys outside the tile have weight and value 0 there. The instruction takes subnormal
 * numbers for 0. Its products of a score are summed by sixteens, eight instructions, and their sums then.
 */
#ifndef FA_CPU_SIMD_BF16_H
#define FA_CPU_SIMD_BF16_H

#include <string.h>

#include "cpu/simd_rows.h"

typedef vint voperand;         /* a pair a lane, the first in the low half */
typedef uint16_t key_number;   /* of a tile of K: rows of head_dim, an even number */
typedef uint32_t value_number; /* of a tile of V: rows of head_dim_v pairs of keys */

/* Numbers of an operand, columns of Q and K that a product takes at least, and operands of a row of Q or K. */
#define OPERAND_NUMBERS 2
#if FA_CPU_AMX
#define PRODUCT_COLUMNS 32
#else
#define PRODUCT_COLUMNS 2
#endif
#define WHOLE(dim)    (((dim) + PRODUCT_COLUMNS - 1) / PRODUCT_COLUMNS * PRODUCT_COLUMNS)
#define OPERANDS(dim) (WHOLE(dim) / OPERAND_NUMBERS)

INLINE voperand v_operands(const real *from) { return (voperand)v_load(from); }
INLINE voperand v_value(value_number value) { return (voperand)_mm512_set1_epi32((int)value); }
INLINE voperand v_values(const value_number *from) { return (voperand)_mm512_loadu_si512(from); }
INLINE voperand v_key(const key_number *row, int d) {
    value_number pair;
    memcpy(&pair, row + 2 * d, sizeof pair);
    return v_value(pair);
}
INLINE vreal v_add_score(vreal sum, voperand rows, voperand key) {
    return (vreal)_mm512_dpbf16_ps((__m512)sum, (__m512bh)rows, (__m512bh)key);
}
INLINE vreal v_add_value(vreal sum, voperand weights, voperand value) { return v_add_score(sum, weights, value); }
/* Without the halves whose weight is -0.0. */
INLINE vreal v_add_seen_value(vreal sum, voperand weights, voperand value) {
    const __mmask32 seen = _mm512_cmpneq_epi16_mask((__m512i)weights, _mm512_set1_epi16((short)0x8000));
    return v_add_score(sum, weights, (voperand)_mm512_maskz_mov_epi16(seen, (__m512i)value));
}

/* Pairs (low, high) of two vectors, each number rounded to bfloat16. */
INLINE voperand v_join(vreal low, vreal high) {
    static const uint16_t interleaved[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                             8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
    return (voperand)_mm512_permutexvar_epi16(_mm512_loadu_si512(interleaved), both);
}

/* ---- operands ---- */

/* A row of `dim` elements, followed by zeros up to WHOLE(dim). */
static void read_half_row(uint16_t *to, const char *from, int64_t stride, int dim) {
    const uint16_t *row = (const uint16_t *)from;
    if (stride == 1)
        memcpy(to, row, (size_t)dim * sizeof *to);
    else
        for (int d = 0; d < dim; d++) to[d] = row[d * stride];
    for (int d = dim; d < WHOLE(dim); d++) to[d] = 0;
}

/* to[c * pitch + lane] = pair c of rows[lane], as words of `real` that nothing computes with. `buffer` holds
 * LANES * padded(dim) words. */
static void read_queries(real *to, int pitch, const char *const rows[LANES], fa_dtype dtype, int64_t stride, int dim,
                         real *buffer) {
    (void)dtype;
    const bool in_place = stride == 1 && dim % (OPERAND_NUMBERS * LANES) == 0;
    for (int lane = 0; lane < LANES && !in_place; lane++)
        read_half_row((uint16_t *)(buffer + lane * padded(dim)), rows[lane], stride, dim);
    for (int first = 0; first < OPERANDS(dim); first += LANES) {
        const int columns = OPERANDS(dim) - first < LANES ? OPERANDS(dim) - first : LANES;
        vreal tile[LANES];
        for (int lane = 0; lane < LANES; lane++)
            tile[lane] = v_load((in_place ? (const real *)rows[lane] : buffer + lane * padded(dim)) + first);
        v_transpose(tile);
        for (int c = 0; c < columns; c++) v_store(to + (first + c) * pitch, tile[c]);
    }
}

/* A row of one query alone. */
static void read_query(real *to, const char *from, fa_dtype dtype, int64_t stride, int dim) {
    (void)dtype;
    read_half_row((uint16_t *)to, from, stride, dim);
}

/* `count` rows of K one stride apart, copied. */
static void copy_keys(const fa_operand *operand, fa_dtype dtype, const char *from, int64_t count, int dim,
                      key_number *copy) {
    const int64_t stride = operand->stride[2] * (int64_t)fa_dtype_size(dtype);
    for (int64_t n = 0; n < count; n++)
        read_half_row(copy + n * WHOLE(dim), from + n * stride, operand->stride[3], dim);
}

/* The same in place, where they can be read so. */
static const key_number *keys_at(const fa_operand *operand, fa_dtype dtype, const char *from, int64_t count, int dim,
                                 key_number *copy, int64_t *pitch) {
    const int64_t stride = operand->stride[2];
    if (operand->stride[3] == 1 && dim % PRODUCT_COLUMNS == 0 && stride >= 0 && stride <= 2 * dim) {
        *pitch = stride;
        return (const key_number *)from;
    }
    *pitch = WHOLE(dim);
    copy_keys(operand, dtype, from, count, dim, copy);
    return copy;
}

/* Two rows of V, NULL: zeros, as a row of pairs. */
static void join_value_rows(value_number *to, const char *even, const char *odd, int64_t stride, int dim) {
    const uint16_t *low = (const uint16_t *)even, *high = (const uint16_t *)odd;
    int c = 0;
    for (; stride == 1 && low && high && c + LANES <= dim; c += LANES) {
        const __m512i a = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(low + c))),
                      b = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(high + c)));
        _mm512_storeu_si512(to + c, _mm512_or_si512(a, _mm512_slli_epi32(b, 16)));
    }
    for (; c < dim; c++) to[c] = (low ? low[c * stride] : 0u) | (uint32_t)(high ? high[c * stride] : 0u) << 16;
}

/* ---- pairs of keys along vectors ---- */

#if !FA_CPU_AMX
#define VALUES_AT(begin, key, pitch) (((key) / 2 - (begin) / 2) * (pitch))
#define VALUE_ROOM(keys, dim)        ((size_t)((keys) / 2 + 1) * (size_t)(dim))
#define JOINED_ROOM(keys)            0
#define OUT_ROOM(dim)                (dim)

/* Weights of the keys [begin, begin + keys) to pairs, in place; *count: how many. */
INLINE const real *join_weights(const int mr, real *p, real *joined, int64_t begin, int keys, int *count) {
    (void)joined;
    const int odd = (int)(begin % 2);
    *count = (odd + keys + 1) / 2;
    for (int n = 0; n < *count; n++) {
        const int at = 2 * n - odd; /* the even key, which pairs written before have not reached */
        UNROLL
        for (int m = 0; m < mr; m++) {
            const vreal none = v_set1(-(real)0);
            const vreal low = at >= 0 ? v_load(p + (at * mr + m) * LANES) : none;
            const vreal high = at + 1 < keys ? v_load(p + ((at + 1) * mr + m) * LANES) : none;
            v_store(p + (n * mr + m) * LANES, (vreal)v_join(low, high));
        }
    }
    return p;
}

/* The same of one row, (keys). A place is written after it was read. */
INLINE int join_narrow_weights(real *p, int64_t begin, int keys) {
    uint16_t *to = (uint16_t *)p;
    const int odd = (int)(begin % 2);
    for (int n = 0; n < keys; n += LANES)
        _mm256_storeu_si256((__m256i *)(to + odd + n), (__m256i)_mm512_cvtneps_pbh((__m512)v_load(p + n)));
    if (odd) to[0] = 0;
    if ((odd + keys) % 2) to[odd + keys] = 0;
    return (odd + keys + 1) / 2;
}
#endif

#endif
