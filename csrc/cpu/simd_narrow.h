/* A task of few query rows, as in decoding: K and V are streamed once, each key or value row by vectors of its own
 * elements. The rest is the block's arithmetic (simd_block.h), rounding by rounding, so that a row's bits do not tell
 * which of the two computed it.
 */
#ifndef FA_CPU_SIMD_NARROW_H
#define FA_CPU_SIMD_NARROW_H

#include <math.h>
#include <string.h>

#include "cpu/simd_block.h"

/* Rows up to which transposing K for each of them costs less than lanes that hold no row. */
#define NARROW_ROWS (LANES < 16 ? LANES / 2 : 2)

/* Columns of K that are transposed at once. */
#define NARROW_DIM  (OPERAND_NUMBERS * LANES)

typedef struct narrow_row {
    int64_t query, head;
    fa_span keys;
    real *q, *o;
    real maximum, sum;
    real logit; /* the largest scaled product */
} narrow_row;

static bool is_narrow(const work *w, const fa_simd_task *task) {
    const fa_forward *p = w->p;
    return task->rows <= NARROW_ROWS && p->head_dim % NARROW_DIM == 0 && p->head_dim_v % LANES == 0 &&
           p->softcap <= 0 && !w->biased && !w->problem->forward.dropout.threshold && !p->mask.data &&
           p->intervals_count < 2 && /* a row sees one range of keys */
           (!FA_CPU_AMX || p->v.stride[3] == 1);
}

static void narrow_begin(const work *w, narrow_row *r) {
    const fa_forward *p = w->p;
    const fa_entry *e = &w->entry->entry;
    const fa_held held = fa_held_keys(p, w->entry->batch, r->head, r->query);
    r->keys = fa_held_within(&held, fa_row_keys(e, p->left, p->right, fa_position(e, r->query)));
    read_query(r->q, element(&p->q, p->dtype, w->entry->batch, r->head, e->first_q + r->query), p->dtype,
               p->q.stride[3], p->head_dim);
    memset(r->o, 0, (size_t)p->head_dim_v * sizeof(real));
    const real sink = first_maximum(p, r->head);
    r->maximum = sink;
    r->sum = sink == -(real)INFINITY ? 0 : 1;
    r->logit = -(real)INFINITY;
}

/* Passes over all columns of V, each as wide as they allow: a pass reads its part of every row of the tile. */
#define NARROW_PASSES(dim, pass)                                                                                       \
    NARROW_PASS(NARROW_COLUMNS, dim, pass)                                                                             \
    NARROW_PASS(NARROW_COLUMNS / 2, dim, pass) NARROW_PASS(NARROW_COLUMNS / 4, dim, pass) NARROW_PASS(1, dim, pass)
#define NARROW_PASS(columns, dim, pass)                                                                                \
    for (; c + LANES * (columns) <= (dim); c += LANES * (columns)) pass(columns);

/* o = o * decay + P V; P is in w->scores. */
static void narrow_add(const work *w, const narrow_row *r, const key_tile *t, real decay) {
    const int keys = (int)(t->end - t->begin), dim = w->p->head_dim_v;
    int c = 0;
#if FA_CPU_AMX
    const char *const *rows = w->value_rows + (t->begin - w->value_begin);
    uint16_t *weights = (uint16_t *)w->joined;
    const int64_t ahead = AHEAD * w->p->v.stride[2] * (int64_t)sizeof *weights;
    for (int n = 0; n < keys; n += LANES)
        _mm256_storeu_si256((__m256i *)(weights + n), (__m256i)_mm512_cvtneps_pbh((__m512)v_load(w->scores + n)));
#define PASS(columns) narrow_values(columns, weights, rows, c, t->begin, keys, r->o + c, decay, ahead)
    NARROW_PASSES(dim, PASS)
#undef PASS
#else
    const int count = join_narrow_weights(w->scores, t->begin, keys);
#define PASS(columns) narrow_values(columns, w->scores, t->v + c, t->v_pitch, count, r->o + c, decay)
    NARROW_PASSES(dim, PASS)
#undef PASS
#endif
}

static void narrow_step(const work *w, narrow_row *r, const key_tile *t) {
    const fa_forward *p = w->p;
    const int keys = (int)(t->end - t->begin);
    real *scores = w->scores;
    const real highest = narrow_scores(r->q, t->k, t->k_pitch, p->head_dim, keys, w->scale, scores);
    const real before = r->maximum;
    if (highest > r->logit) r->logit = highest;
    real origin = 0, factor = 1;
    r->maximum = v_next_maximum(v_set1(before), v_set1(highest))[0];
    if (highest != -(real)INFINITY) {
        origin = r->maximum;
        factor = v_exp2((v_set1(before) - origin) * (real)LOG2E)[0];
    }
    for (int n = 0; n < keys; n += LANES) v_store(scores + n, v_exp2((v_load(scores + n) - origin) * (real)LOG2E));
    real sum = 0;
    for (int n = 0; n < keys; n++) sum += scores[n];
    r->sum = v_fma(v_set1(r->sum), v_set1(factor), v_set1(sum))[0];
    narrow_add(w, r, t, factor);
}

static void narrow_end(const work *w, narrow_row *r) {
    const fa_forward *p = w->p;
    const vreal sum = v_set1(r->sum == 0 ? 1 : r->sum), inverse = 1 / sum;
    for (int c = 0; c < p->head_dim_v; c += LANES)
        v_store(r->o + c, r->sum == 0 ? v_set1(0) : v_quotient(v_load(r->o + c), sum, inverse));
    char *to = (char *)element(&p->out, p->out_dtype, w->entry->batch, r->head, w->entry->entry.first_q + r->query);
    write_row(to, p->out_dtype, p->out.stride[3], r->o, p->head_dim_v);
    if (p->lse.data) write_lse(w, r->head, r->query, r->maximum, r->sum);
    if (w->problem->forward.max_logit.data) fa_raise_logit(&w->problem->forward, w->entry->batch, r->head, r->logit);
}

#endif
