/* Factors of the weights of a row of pairs under dropout: philox.h, several calls of the generator at a time. */
#ifndef FA_CPU_SIMD_DROPOUT_H
#define FA_CPU_SIMD_DROPOUT_H

#include <string.h>

#include "cpu/simd_vector.h"
#include "philox.h"

/* Numbers that dropout_row() needs for this many keys. */
#define DROPOUT_ROOM(keys) ((keys) + 48)

/* A 32-bit word in the low half of each lane; the high halves hold anything. */
#define WORDS              (FA_CPU_VECTOR_BYTES / 8)
typedef uint64_t vword __attribute__((vector_size(FA_CPU_VECTOR_BYTES)));

INLINE vword v_product(vword a, uint64_t b) {
#if FA_CPU_VECTOR_BYTES == 64
    return (vword)_mm512_mul_epu32((__m512i)a, (__m512i)(b - (vword){0}));
#elif FA_CPU_VECTOR_BYTES == 32
    return (vword)_mm256_mul_epu32((__m256i)a, (__m256i)(b - (vword){0}));
#else
    return (a & 0xffffffff) * b;
#endif
}

/* WORDS calls of fa_philox(): word[n] is the n-th word of each. */
INLINE void v_philox(vword word[4], uint32_t key0, uint32_t key1) {
    UNROLL
    for (int round = 0; round < FA_PHILOX_ROUNDS; round++) {
        const vword a = v_product(word[0], FA_PHILOX_M0), b = v_product(word[2], FA_PHILOX_M1);
        word[0] = (b >> 32) ^ word[1] ^ (uint64_t)key0;
        word[1] = b;
        word[2] = (a >> 32) ^ word[3] ^ (uint64_t)key1;
        word[3] = a;
        key0 += FA_PHILOX_W0;
        key1 += FA_PHILOX_W1;
    }
}

/* The factors of WORDS calls from `first` on. `even` and `odd` hold 16 bits for keys 2n and 2n + 1, and above them 16
 * for the keys 8 further on, of call n of four. */
INLINE void store_factors(real *row, int first, vword even, vword odd, uint32_t threshold, real scale) {
#if FA_CPU_REAL_BYTES == 4 && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    enum { CALLS = WORDS < 4 ? WORDS : 4 }; /* that lie in one run of 16 keys */
    for (int high = 0; high < 2; high++) {
        const vword pairs = (even >> 16 * high & 0xffff) | (odd >> 16 * high & 0xffff) << 32;
        const vreal factors = v_select((vint)pairs < (integer)threshold, v_set1(0), v_set1(scale));
        for (int n = 0; n < WORDS; n += CALLS)
            memcpy(row + (first + n) / 4 * 16 + first % 4 * 2 + 8 * high, (const char *)&factors + 8 * n, 8 * CALLS);
    }
#else
    for (int n = 0; n < WORDS; n++) {
        const uint32_t a = (uint32_t)even[n], b = (uint32_t)odd[n];
        real *to = row + (first + n) / 4 * 16 + (first + n) % 4 * 2;
        to[0] = (a & 0xffff) >= threshold ? scale : 0;
        to[1] = (b & 0xffff) >= threshold ? scale : 0;
        to[8] = a >> 16 >= threshold ? scale : 0;
        to[9] = b >> 16 >= threshold ? scale : 0;
    }
#endif
}

/* Writes the factors of the weights of a query and keys [key, key + keys) to `row`, which has room for
 * DROPOUT_ROOM(keys), and returns where they begin: key % 16 of the whole's keys after the beginning of `row`. */
static const real *dropout_row(const fa_dropout *dropout, int64_t batch, int64_t head, int64_t query, int64_t key,
                               int keys, real *row) {
    const uint32_t i = (uint32_t)query + dropout->origin[2], j = (uint32_t)key + dropout->origin[3];
    const uint32_t threshold = dropout->threshold, skipped = j & 15;
    const int calls = (keys + (int)skipped + 15) / 16 * 4;
    const real scale = (real)fa_dropout_scale(dropout);
    vword start = {0}; /* each call serves 2 keys and the 2 after 8 more, of 16 */
    for (int n = 0; n < WORDS; n++) start[n] = ((uint64_t)(j >> 4) + (n >> 2)) << 5 | (i & 7) << 2 | (n & 3);
    for (int first = 0; first < calls; first += WORDS) {
        vword word[4] = {start + (uint64_t)((first >> 2 << 5) + (first & 3)), (vword){0} + (uint64_t)(i >> 4),
                         (vword){0} + (uint64_t)fa_dropout_head(dropout, batch, head),
                         (vword){0} + (uint64_t)dropout->offset};
        v_philox(word, dropout->seed[0], dropout->seed[1]);
        store_factors(row, first, word[i >> 3 & 1], word[2 + (i >> 3 & 1)], threshold, scale);
    }
    return row + skipped;
}

#endif
