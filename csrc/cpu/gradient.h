/* Shared by the kernels of the backward pass on the CPU: sequences as problems of their own, pairs one at a time, and
 * the gradient of the sinks. */
#ifndef FA_CPU_GRADIENT_H
#define FA_CPU_GRADIENT_H

#include <math.h>

#include "cpu/alibi.h"
#include "cpu/element.h"
#include "cpu/entries.h"
#include "cpu/intervals.h"
#include "cpu/limit.h"
#include "fa.h"

/* Query heads that share a kv head; 0 where there are none. */
static inline int64_t fa_group(const fa_forward *f) { return f->heads_kv ? f->heads / f->heads_kv : 0; }

/* Keys that query i may see through causal and window. */
static inline fa_span fa_keys_of(const fa_problem *problem, int64_t i) {
    const fa_entry entry = fa_cpu_dense(problem);
    return fa_row_keys(&entry, problem->forward.left, problem->forward.right, fa_position(&entry, i));
}

/* Values that all pairs of a query share. */
typedef struct fa_query {
    int64_t batch, head, index;
    int64_t position; /* where it stands among the keys */
    fa_span keys;     /* that it may see through causal, window and intervals */
    double slope;     /* of its head */
    fa_held held;
} fa_query;

static inline fa_query fa_query_at(const fa_problem *problem, int64_t b, int64_t h, int64_t i) {
    const fa_entry entry = fa_cpu_dense(problem);
    const int64_t position = fa_position(&entry, i);
    const fa_span keys = fa_row_keys(&entry, problem->forward.left, problem->forward.right, position);
    const fa_held held = fa_held_keys(&problem->forward, b, h, i);
    return (fa_query){b, h, i, position, fa_held_within(&held, keys), fa_slope(&problem->forward, b, h), held};
}

/* Whether intervals, segments, mask and bias leave a pair, and what bias and ALiBi add to its score. */
static inline bool fa_pair_seen(const fa_problem *problem, const fa_query *x, int64_t j, double *bias) {
    const fa_forward *f = &problem->forward;
    *bias = 0;
    if (!fa_holds(&x->held, j) || !fa_same_segment(f, x->batch, x->index, j)) return false;
    if (f->mask.data && !((const uint8_t *)f->mask.data)[fa_at(&f->mask, x->batch, x->head, x->index, j)]) return false;
    if (f->bias.data) {
        *bias = fa_load(f->bias.data, f->bias_dtype, fa_at(&f->bias, x->batch, x->head, x->index, j));
        if (*bias == -INFINITY) return false;
        *bias = fa_bounded(*bias, f->dtype);
    }
    if (x->slope != 0) *bias = fa_with_alibi(*bias, x->slope, j - x->position, f->dtype);
    return true;
}

static inline double fa_dlse(const fa_backward *p, int64_t b, int64_t h, int64_t i) {
    return p->dlse.data ? fa_load(p->dlse.data, p->forward.lse_dtype, fa_at(&p->dlse, b, h, i, 0)) : 0;
}

/* delta = dout . out - dlse. */
static inline double fa_delta(const fa_backward *p, int64_t b, int64_t h, int64_t i) {
    const fa_forward *f = &p->forward;
    double sum = 0;
    for (int d = 0; d < f->head_dim_v && p->dout.data; d++)
        sum += fa_load(p->dout.data, f->dtype, fa_at(&p->dout, b, h, i, d)) *
               fa_load(f->out.data, f->out_dtype, fa_at(&f->out, b, h, i, d));
    return sum - fa_dlse(p, b, h, i);
}

/* Element `index` of a gradient. */
static inline void fa_write_gradient(const fa_backward *p, fa_grad grad, int64_t index, double value) {
    void *data = p->grad[grad].data;
    const fa_dtype dtype = p->grad_dtype[grad];
    fa_store(data, dtype, index, p->accumulate ? fa_load(data, dtype, index) + value : value);
}

/* A sequence as a dense problem of one batch entry, whose first query and key are its own; it alone may have positions
 * without being given sequences. */
void fa_cpu_alone(const fa_problem *problem, const fa_cpu_entry *sequence, fa_problem *alone);

/* The problem that has entry *b of a call that is not packed: the call itself, or where sequences are given `alone`,
 * whose entry 0 it is. */
const fa_problem *fa_cpu_padded(const fa_problem *problem, int64_t *b, fa_problem *alone);

/* Writes 0 to the gradients of the entry's rows of no sequence. */
void fa_cpu_clear(const fa_problem *problem, const fa_cpu_entry *entry);

/* A step of fa_host's loop, on an fa_problem: writes dsinks of head h. */
void fa_sink_gradient(const void *context, int64_t h, int worker);

#endif
