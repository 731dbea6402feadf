/* Dropout: which weights are kept. Philox4x32-7 (Salmon et al., 2011) keyed by the seed and counted by the position of
 * a pair, so that one mask comes out of any tiling, kernel, device or shard. Valid C11 and CUDA.
 *
 * A call of the generator serves the 8 pairs of queries {i, i + 8} and keys {j, j + 1, j + 8, j + 9}, i % 16 < 8, j %
 * 16 even and below 8: what one thread holds of an accumulator of m16n8k16.
 */
#ifndef FA_PHILOX_H
#define FA_PHILOX_H

#include "fa.h"

#ifdef __CUDACC__
#define FA_PHILOX static __host__ __device__ __forceinline__
#else
#define FA_PHILOX static inline
#endif

#define FA_PHILOX_ROUNDS 7
#define FA_PHILOX_M0     0xD2511F53u
#define FA_PHILOX_M1     0xCD9E8D57u
#define FA_PHILOX_W0     0x9E3779B9u /* added to the key from round to round */
#define FA_PHILOX_W1     0xBB67AE85u

/* counter -> four random words, in place. */
FA_PHILOX void fa_philox(uint32_t counter[4], uint32_t key0, uint32_t key1) {
    for (int round = 0; round < FA_PHILOX_ROUNDS; round++) {
        const uint64_t a = (uint64_t)FA_PHILOX_M0 * counter[0], b = (uint64_t)FA_PHILOX_M1 * counter[2];
        counter[0] = (uint32_t)(b >> 32) ^ counter[1] ^ key0;
        counter[1] = (uint32_t)b;
        counter[2] = (uint32_t)(a >> 32) ^ counter[3] ^ key1;
        counter[3] = (uint32_t)a;
        key0 += FA_PHILOX_W0;
        key1 += FA_PHILOX_W1;
    }
}

/* Takes over the eight words of a state. */
FA_PHILOX void fa_dropout_set(fa_dropout *dropout, const uint32_t *words) {
    dropout->seed[0] = words[0], dropout->seed[1] = words[1];
    dropout->offset = words[2];
    for (int n = 0; n < 4; n++) dropout->origin[n] = words[3 + n];
    if (words[7]) dropout->heads = words[7];
}

/* The parameters that a kernel drops by: `given`, with its state read now. One thread of a block calls this, once. */
FA_PHILOX fa_dropout fa_dropout_read(const fa_dropout *given) {
    fa_dropout dropout = *given;
    if (given->state) fa_dropout_set(&dropout, given->state);
    return dropout;
}

/* The third word of the counter. */
FA_PHILOX uint32_t fa_dropout_head(const fa_dropout *dropout, int64_t batch, int64_t head) {
    return ((uint32_t)batch + dropout->origin[0]) * dropout->heads + (uint32_t)head + dropout->origin[1];
}

/* Whether the weight of a pair is kept: 16 bits, uniform, against the threshold. */
FA_PHILOX bool fa_dropout_keeps(const fa_dropout *dropout, int64_t batch, int64_t head, int64_t query, int64_t key) {
    const uint32_t i = (uint32_t)query + dropout->origin[2], j = (uint32_t)key + dropout->origin[3];
    uint32_t word[4] = {j >> 4 << 5 | (i & 7) << 2 | (j & 7) >> 1, i >> 4, fa_dropout_head(dropout, batch, head),
                        dropout->offset};
    fa_philox(word, dropout->seed[0], dropout->seed[1]);
    const uint32_t two = word[2 * (j & 1) + (i >> 3 & 1)];
    return (j & 8 ? two >> 16 : two & 0xffff) >= dropout->threshold;
}

/* The factor of a kept weight: one over the probability that it is kept; 0 where none is. */
FA_PHILOX double fa_dropout_scale(const fa_dropout *dropout) {
    return dropout->threshold < 65536 ? 65536.0 / (65536 - (int)dropout->threshold) : 0;
}

/* The factor of a pair's weight; 1 without dropout. */
FA_PHILOX double fa_dropout_factor(const fa_dropout *dropout, int64_t batch, int64_t head, int64_t query, int64_t key) {
    if (!dropout->threshold) return 1;
    return fa_dropout_keeps(dropout, batch, head, query, key) ? fa_dropout_scale(dropout) : 0;
}

#endif
