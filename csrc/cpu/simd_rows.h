/* Operands as the tiles of a kernel read them, and the scratch that a thread has. */
#ifndef FA_CPU_SIMD_ROWS_H
#define FA_CPU_SIMD_ROWS_H

#include <math.h>

#include "cpu/simd_pack.h"

/* Lanes of a whole block of register-blocked products. */
#define BLOCK_ROWS (FA_CPU_MR * LANES)

static const char *element(const fa_operand *operand, fa_dtype dtype, int64_t a, int64_t b, int64_t c) {
    const int64_t *s = operand->stride;
    return (const char *)operand->data + (a * s[0] + b * s[1] + c * s[2]) * (int64_t)fa_dtype_size(dtype);
}

/* `count` rows, one stride apart, converted into `copy`. */
static void copy_rows(const fa_operand *operand, fa_dtype dtype, const char *from, int64_t count, int dim, real *copy) {
    const int64_t stride = operand->stride[2] * (int64_t)fa_dtype_size(dtype);
    for (int64_t n = 0; n < count; n++) read_row(copy + n * dim, from + n * stride, dtype, operand->stride[3], dim);
}

/* `count` rows of a head from `from` on: in place where the products can read them, else converted into `copy`. Rows
 * that lie far apart are copied too: at power-of-two distances they would fall into a few sets of the first-level
 * cache. */
static const real *rows_at(const fa_operand *operand, fa_dtype dtype, const char *from, int64_t count, int dim,
                           real *copy, int64_t *pitch) {
    const int64_t stride = operand->stride[2];
    if (dtype == REAL_DTYPE && (operand->stride[3] == 1 || dim == 1) && stride >= 0 && stride <= 2 * dim) {
        *pitch = stride;
        return (const real *)from;
    }
    *pitch = dim;
    copy_rows(operand, dtype, from, count, dim, copy);
    return copy;
}

/* Rows [begin, end) of a head. */
INLINE const real *rows_of(const fa_operand *operand, fa_dtype dtype, int64_t batch, int64_t head, int64_t begin,
                           int64_t end, int dim, real *copy, int64_t *pitch) {
    return rows_at(operand, dtype, element(operand, dtype, batch, head, begin), end - begin, dim, copy, pitch);
}

/* A bias whose difference from a score fits its type in base 2 too; infinities and NaN as they are. */
INLINE vreal v_bounded(vreal bias) {
    const real limit = FA_CPU_REAL_BYTES == 4 ? (real)FA_LIMIT : (real)FA_LIMIT_F64;
    bias = v_select((bias < -limit) & (bias > -(real)INFINITY), v_set1(-limit), bias);
    return v_select((bias > limit) & (bias < (real)INFINITY), v_set1(limit), bias);
}

/* A bounded bias less slope * |distance|. Product and difference stay within the limit: the difference is made of
 * halves, which do not overflow. */
INLINE vreal v_with_alibi(vreal bias, vreal slope, vreal distance) {
    const vreal limit = v_set1(FA_CPU_REAL_BYTES == 4 ? (real)FA_LIMIT : (real)FA_LIMIT_F64), halved = limit / 2;
    vreal product = slope * v_select(distance < 0, -distance, distance);
    product = v_select(product > limit, limit, v_select(product < -limit, -limit, product));
    vreal half = bias * (real)0.5 - product * (real)0.5;
    half = v_select(half > halved, halved, v_select(half < -halved, -halved, half));
    const vint kept = (bias == -(real)INFINITY) | ((bias == (real)INFINITY) & (product == product));
    return v_select(kept, bias, half * 2);
}

static bool is_biased(const fa_problem *problem) { return problem->forward.bias.data || problem->forward.alibi.data; }

static size_t rounded(size_t bytes) { return (bytes + 255) / 256 * 256; }

/* Hands out consecutive pieces of the scratch; with base NULL only their sizes add up. */
typedef struct arena {
    char *base;
    size_t used;
} arena;

static void *take(arena *a, size_t count, size_t size) {
    void *piece = a->base ? a->base + a->used : NULL;
    a->used += rounded(count * size);
    return piece;
}

#endif
