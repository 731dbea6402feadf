/* A task of few query rows, as in decoding: K and V are streamed once, each key or value row by vectors of its own
 * elements. The rest is the block's arithmetic (simd_block.h), rounding by rounding, so that a row's bits do not tell
 * which of the two computed it.
 */
#ifndef FA_CPU_SIMD_NARROW_H
#define FA_CPU_SIMD_NARROW_H

#include "cpu/simd_block.h"

/* Rows up to which transposing K for each of them costs less than lanes that hold no row. */
#define NARROW_ROWS    (LANES < 16 ? LANES / 2 : 2)

/* Columns of K that are transposed at once. */
#define NARROW_DIM     (FA_CPU_BF16 ? 2 * LANES : LANES)

/* Value columns that a pass over a tile of V sums, in vectors. */
#define NARROW_COLUMNS (VECTOR_REGISTERS / 2)

/* Elements of a cache line, and the rows of K or V that are asked for ahead of their use. */
#define LINE           (64 / FA_CPU_REAL_BYTES)
#define AHEAD          32

typedef struct narrow_row {
    int64_t query, head;
    fa_span keys;
    real *q, *o;
    real maximum, sum;
} narrow_row;

static bool is_narrow(const work *w, const fa_simd_task *task) {
    const fa_forward *p = w->p;
    return task->rows <= NARROW_ROWS && p->head_dim % NARROW_DIM == 0 && p->head_dim_v % LANES == 0 &&
           p->softcap <= 0 && !w->biased && !w->problem->extra.dropout.threshold && !p->mask.data;
}

#if FA_CPU_BF16
/* Scores of LANES keys, the sums of pair_score_block(): pairs of LANES rows of K are transposed. */
INLINE vreal narrow_scores(const real *q, const key_number *const k[LANES], int64_t k_pitch, int head_dim, real scale) {
    const uint16_t *row = (const uint16_t *)q;
    vreal total = v_set1(0), sum = v_set1(0);
    for (int d = 0; d < head_dim; d += 2 * LANES) {
        vreal tile[LANES];
        UNROLL
        for (int n = 0; n < LANES; n++) {
            __builtin_prefetch(k[n] + d + AHEAD * k_pitch);
            tile[n] = (vreal)v_load_pairs(k[n] + d);
        }
        v_transpose(tile);
        UNROLL
        for (int e = 0; e < LANES; e++) {
            if (e % SIXTEEN_PAIRS == 0) {
                total += sum;
                sum = v_set1(0);
            }
            sum = v_dot(sum, v_pair(pair_at(row + d + 2 * e)), (vint)tile[e]);
        }
    }
    return (total + sum) * scale;
}

/* o[c] = o[c] * decay + sum over pairs of p[n] v[n * v_pitch + c] for c < LANES * columns. */
INLINE void narrow_values(const int columns, const real *p, const value_number *v, int64_t v_pitch, int pairs, real *o,
                          real decay) {
    vreal sum[NARROW_COLUMNS];
    UNROLL
    for (int c = 0; c < columns; c++) sum[c] = v_set1(0);
    for (int n = 0; n < pairs; n++, v += v_pitch) {
        const vint weight = v_pair(pair_at((const uint16_t *)p + 2 * n));
        UNROLL
        for (int c = 0; c < columns; c++) sum[c] = v_dot(sum[c], weight, v_load_pairs(v + c * LANES));
    }
    UNROLL
    for (int c = 0; c < columns; c++) v_store(o + c * LANES, v_fma(v_load(o + c * LANES), v_set1(decay), sum[c]));
}

static void narrow_query(real *to, const char *from, fa_dtype dtype, int64_t stride, int dim) {
    (void)dtype;
    copy_half_row((uint16_t *)to, from, stride, dim);
}

/* Weights of the keys [begin, begin + keys) to pairs, in place: how many there are. What is written has been read. */
static int narrow_weights(real *p, int64_t begin, int keys) {
    uint16_t *to = (uint16_t *)p;
    const int odd = (int)(begin % 2), pairs = (odd + keys + 1) / 2;
    for (int n = 0; n < keys; n += LANES)
        _mm256_storeu_si256((__m256i *)(to + odd + n), (__m256i)_mm512_cvtneps_pbh((__m512)v_load(p + n)));
    if (odd) to[0] = 0;
    if ((odd + keys) % 2) to[odd + keys] = 0;
    return pairs;
}
#else
/* Scores of LANES keys, the sums of score_block(): LANES rows of K are transposed, so that lanes are keys. */
INLINE vreal narrow_scores(const real *q, const key_number *const k[LANES], int64_t k_pitch, int head_dim, real scale) {
    vreal total = v_set1(0), sum = v_set1(0);
    for (int d = 0; d < head_dim; d += LANES) {
        vreal tile[LANES];
        UNROLL
        for (int n = 0; n < LANES; n++) {
            if (d % LINE == 0) __builtin_prefetch(k[n] + d + AHEAD * k_pitch);
            tile[n] = v_load(k[n] + d);
        }
        v_transpose(tile);
        UNROLL
        for (int e = 0; e < LANES; e++) {
            if (LANES > EIGHT ? e % EIGHT == 0 : e == 0 && d % EIGHT == 0) {
                total += sum;
                sum = v_set1(0);
            }
            sum = v_fma_once(v_set1(q[d + e]), tile[e], sum);
        }
    }
    return (total + sum) * scale;
}

/* o[c] = o[c] * decay + sum over n of p[n] v[n * v_pitch + c] for c < LANES * columns. */
INLINE void narrow_values(const int columns, const real *p, const value_number *v, int64_t v_pitch, int keys, real *o,
                          real decay) {
    vreal sum[NARROW_COLUMNS];
    UNROLL
    for (int c = 0; c < columns; c++) sum[c] = v_set1(0);
    for (int n = 0; n < keys; n++, v += v_pitch) {
        const vreal weight = v_set1(p[n]);
        UNROLL
        for (int c = 0; c < columns; c++) {
            if (c * LANES % LINE == 0) __builtin_prefetch(v + c * LANES + AHEAD * v_pitch);
            sum[c] = v_fma(weight, v_load(v + c * LANES), sum[c]);
        }
    }
    UNROLL
    for (int c = 0; c < columns; c++) v_store(o + c * LANES, v_fma(v_load(o + c * LANES), v_set1(decay), sum[c]));
}

static void narrow_query(real *to, const char *from, fa_dtype dtype, int64_t stride, int dim) {
    read_row(to, from, dtype, stride, dim);
}

/* Weights of the keys [begin, begin + keys) as narrow_values() takes them: how many rows of V they meet. */
static int narrow_weights(real *p, int64_t begin, int keys) {
    (void)p, (void)begin;
    return keys;
}
#endif

static void narrow_begin(const work *w, narrow_row *r) {
    const fa_forward *p = w->p;
    const fa_entry *e = &w->entry->entry;
    r->keys = fa_row_keys(e, p->left, p->right, fa_position(e, r->query));
    narrow_query(r->q, element(&p->q, p->dtype, w->entry->batch, r->head, e->first_q + r->query), p->dtype,
                 p->q.stride[3], p->head_dim);
    memset(r->o, 0, (size_t)p->head_dim_v * sizeof(real));
    const real sink = first_maximum(p, r->head);
    r->maximum = sink;
    r->sum = sink == -(real)INFINITY ? 0 : 1;
}

static void narrow_step(const work *w, narrow_row *r, const key_tile *t) {
    const fa_forward *p = w->p;
    const int keys = (int)(t->end - t->begin);
    real *scores = w->scores;
    vreal top = v_set1(-(real)INFINITY);
    for (int n = 0; n < keys; n += LANES) {
        const key_number *rows[LANES]; /* past the end: the last key again */
        for (int lane = 0; lane < LANES; lane++)
            rows[lane] = t->k + (n + lane < keys ? n + lane : keys - 1) * t->k_pitch;
        const vreal score = narrow_scores(r->q, rows, t->k_pitch, p->head_dim, w->scale);
        top = v_max(score, top);
        v_store(scores + n, score);
    }
    real highest = -(real)INFINITY;
    for (int lane = 0; lane < LANES; lane++) highest = top[lane] > highest ? top[lane] : highest;
    const real before = r->maximum;
    real origin = 0, factor = 1;
    r->maximum = highest > before ? highest : before;
    if (highest != -(real)INFINITY) {
        origin = r->maximum;
        factor = v_exp2((v_set1(before) - origin) * (real)LOG2E)[0];
    }
    for (int n = 0; n < keys; n += LANES) v_store(scores + n, v_exp2((v_load(scores + n) - origin) * (real)LOG2E));
    real sum = 0;
    for (int n = 0; n < keys; n++) sum += scores[n];
    r->sum = v_fma(v_set1(r->sum), v_set1(factor), v_set1(sum))[0];
    const int count = narrow_weights(scores, t->begin, keys);
    int c = 0;
    for (; c + NARROW_COLUMNS * LANES <= p->head_dim_v; c += NARROW_COLUMNS * LANES)
        narrow_values(NARROW_COLUMNS, scores, t->v + c, t->v_pitch, count, r->o + c, factor);
    for (; c < p->head_dim_v; c += LANES) narrow_values(1, scores, t->v + c, t->v_pitch, count, r->o + c, factor);
}

static void narrow_end(const work *w, narrow_row *r) {
    const fa_forward *p = w->p;
    for (int c = 0; c < p->head_dim_v; c++) r->o[c] = r->sum == 0 ? 0 : r->o[c] / r->sum;
    char *to = (char *)element(&p->out, p->out_dtype, w->entry->batch, r->head, w->entry->entry.first_q + r->query);
    write_row(to, p->out_dtype, p->out.stride[3], r->o, p->head_dim_v);
    if (p->lse.data) write_lse(w, r->head, r->query, r->maximum, r->sum);
}

#endif
