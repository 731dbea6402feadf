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
#define NARROW_DIM     (OPERAND_NUMBERS * LANES)

/* Value columns that a pass over a tile of V sums, in vectors. */
#define NARROW_COLUMNS (VECTOR_REGISTERS / 2)

/* Elements of a cache line, and the rows of K or V that are asked for ahead of their use. Zen 4, two cores, 268 MB of K
 * and V in float32: 16.7, 15.2, 13.9, 11.5, 12.4 ms with 8, 16, 32, 64, 128 rows; adding up as many bytes took 10.5. */
#define LINE           (64 / FA_CPU_REAL_BYTES)
#define AHEAD          64

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

/* Scores of LANES keys, the sums of score_block(): operands of LANES rows of K are transposed, so that lanes are keys.
 */
INLINE vreal narrow_scores(const real *q, const key_number *const k[LANES], int64_t k_pitch, int depth, real scale) {
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

static void narrow_begin(const work *w, narrow_row *r) {
    const fa_forward *p = w->p;
    const fa_entry *e = &w->entry->entry;
    r->keys = fa_row_keys(e, p->left, p->right, fa_position(e, r->query));
    read_query(r->q, element(&p->q, p->dtype, w->entry->batch, r->head, e->first_q + r->query), p->dtype,
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
        const vreal score = narrow_scores(r->q, rows, t->k_pitch, OPERANDS(p->head_dim), w->scale);
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
    const int count = join_narrow_weights(scores, t->begin, keys);
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
