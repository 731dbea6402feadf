/* Operands of a block of rows in the arithmetic of the instance itself: what simd_bf16.h has for pairs of bfloat16. */
#ifndef FA_CPU_SIMD_PLAIN_H
#define FA_CPU_SIMD_PLAIN_H

#include "cpu/simd_gemm.h"
#include "cpu/simd_rows.h"

typedef real key_number, value_number; /* of a tile of K, and of V: rows of head_dim, and of head_dim_v */

/* Numbers of a copied row of K. */
#define KEY_COLUMNS(dim)       (dim)

/* Keys of a tile before `key`, in rows of V. */
#define VALUE_ROWS(begin, key) ((key) - (begin))
/* Rows of V that so many keys take at most. */
#define VALUE_ROOM(keys)       (keys)

#define read_queries           read_transposed
#define key_rows_at            rows_at
#define copy_key_rows          copy_rows
#define multiply_key_scores    multiply_scores

/* P^T times V, added to O^T. The weights are of the keys [begin, begin + keys). */
INLINE void add_values(const int mr, real *p, const value_number *v, int64_t v_pitch, int64_t begin, int keys,
                       int head_dim_v, real *o, const real *decay, bool contained) {
    (void)begin;
    if (contained)
        multiply_values_contained(mr, p, v, v_pitch, keys, head_dim_v, o, decay);
    else
        multiply_values(mr, p, v, v_pitch, keys, head_dim_v, o, decay);
}

#endif
