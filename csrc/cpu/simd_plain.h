/* Operands of the products of simd_gemm.h that are numbers of the instance's arithmetic: the layer that simd_bf16.h has
 * for pairs of bfloat16. */
#ifndef FA_CPU_SIMD_PLAIN_H
#define FA_CPU_SIMD_PLAIN_H

#include "cpu/simd_rows.h"

typedef vreal voperand;
typedef real key_number, value_number; /* of a tile of K and of V: rows of head_dim, and of head_dim_v */

/* Numbers of an operand, and operands of a row of Q or K. */
#define OPERAND_NUMBERS              1
#define OPERANDS(dim)                (dim)

/* Where the rows of V from `key` on lie in a tile that begins at `begin`, and what a tile of so many keys takes. */
#define VALUES_AT(begin, key, pitch) (((key) - (begin)) * (pitch))
#define VALUE_ROOM(keys, dim)        ((size_t)(keys) * (size_t)(dim))
#define JOINED_ROOM(keys)            0
#define OUT_ROOM(dim)                (dim)

INLINE voperand v_operands(const real *from) { return v_load(from); }
INLINE voperand v_key(const key_number *row, int d) { return v_set1(row[d]); }
INLINE voperand v_value(value_number value) { return v_set1(value); }
INLINE voperand v_values(const value_number *from) { return v_load(from); }
INLINE vreal v_add_score(vreal sum, voperand rows, voperand key) { return v_fma_once(rows, key, sum); }
INLINE vreal v_add_value(vreal sum, voperand weights, voperand value) { return v_fma(weights, value, sum); }
/* Without the lanes whose weight is -0.0. */
INLINE vreal v_add_seen_value(vreal sum, voperand weights, voperand value) {
    const bits excluded = (bits)1 << (8 * FA_CPU_REAL_BYTES - 1);
    return v_select((vbits)weights == excluded, sum, v_fma(weights, value, sum));
}

/* Weights of the keys [begin, begin + keys), (keys, mr * LANES), as multiply_values() takes them, in place or in
 * `joined`, of JOINED_ROOM() rows; *count: the rows of V that they meet. narrow: (keys). */
INLINE const real *join_weights(const int mr, real *p, real *joined, int64_t begin, int keys, int *count) {
    (void)mr, (void)joined, (void)begin;
    *count = keys;
    return p;
}
INLINE int join_narrow_weights(real *p, int64_t begin, int keys) {
    (void)p, (void)begin;
    return keys;
}

#define read_queries read_transposed
#define read_query   read_row
#define keys_at      rows_at
#define copy_keys    copy_rows

#endif
