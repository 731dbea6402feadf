/* Sequences as problems of their own, and the gradient of the sinks. See gradient.h. */
#include "cpu/gradient.h"

#include <math.h>
#include <string.h>

/* ---- sequences ---- */

static void move(fa_operand *x, fa_dtype dtype, int64_t batch, int64_t row) {
    if (x->data) x->data = (char *)x->data + fa_at(x, batch, 0, row, 0) * (int64_t)fa_dtype_size(dtype);
}

/* Bounds that exclude nothing are none, as in a dense problem. */
static void drop_bounds(fa_forward *f) {
    if (f->left >= f->seq_q - 1 + f->diagonal) f->left = FA_UNBOUNDED;
    if (f->right >= f->seq_k - 1 - f->diagonal) f->right = FA_UNBOUNDED;
}

void fa_cpu_alone(const fa_problem *problem, const fa_cpu_entry *sequence, fa_problem *alone) {
    const fa_entry *e = &sequence->entry;
    const int64_t b = sequence->batch;
    *alone = *problem;
    fa_backward *p = &alone->backward;
    fa_forward *f = &p->forward;
    const fa_span keys = fa_entry_keys(e, f->left, f->right);
    f->batch = 1, f->seq_q = e->seq_q, f->seq_k = e->seq_k, f->diagonal = e->diagonal;
    f->key_begin = keys.begin, f->key_end = keys.end;
    if (!e->positions) drop_bounds(f);
    move(&f->q, f->dtype, b, e->first_q);
    move(&f->k, f->dtype, b, e->first_k);
    move(&f->v, f->dtype, b, e->first_k);
    move(&f->out, f->out_dtype, b, e->first_q);
    move(&f->bias, f->bias_dtype, b, 0);
    move(&f->mask, FA_BOOL, b, 0);
    move(&f->alibi, FA_F32, b, 0);
    move(&f->q_segments, FA_I32, b, 0);
    move(&f->k_segments, FA_I32, b, 0);
    move(&p->dout, f->dtype, b, e->first_q);
    move(&p->lse, f->lse_dtype, b, e->first_q);
    move(&p->dlse, f->lse_dtype, b, e->first_q);
    move(&p->grad[FA_GRAD_Q], p->grad_dtype[FA_GRAD_Q], b, e->first_q);
    move(&p->grad[FA_GRAD_K], p->grad_dtype[FA_GRAD_K], b, e->first_k);
    move(&p->grad[FA_GRAD_V], p->grad_dtype[FA_GRAD_V], b, e->first_k);
    f->dropout.origin[0] += (uint32_t)b;
    alone->sequences = (fa_sequences){.positions = e->positions};
}

const fa_problem *fa_cpu_padded(const fa_problem *problem, int64_t *b, fa_problem *alone) {
    fa_cpu_walk walk = {0, 0}; /* where the entries before it end does not matter */
    if (!problem->sequences.given) return problem;
    const fa_cpu_entry sequence = fa_cpu_next(problem, *b, &walk);
    fa_cpu_alone(problem, &sequence, alone);
    *b = 0;
    return alone;
}

static void clear_row(const fa_operand *x, fa_dtype dtype, int64_t at, int length) {
    const size_t size = fa_dtype_size(dtype);
    if (x->stride[3] == 1)
        memset((char *)x->data + at * (int64_t)size, 0, (size_t)length * size);
    else
        for (int d = 0; d < length; d++) fa_store(x->data, dtype, at + d * x->stride[3], 0);
}

static void clear_rows(const fa_problem *problem, fa_grad grad, int64_t b, fa_span rows, fa_span used) {
    const fa_backward *p = &problem->backward;
    const fa_forward *f = &p->forward;
    const fa_operand *x = &p->grad[grad];
    const int64_t heads = grad == FA_GRAD_Q ? f->heads : f->heads_kv;
    const int length = grad == FA_GRAD_V ? f->head_dim_v : f->head_dim;
    if (!(p->wants >> grad & 1)) return;
    for (int64_t row = rows.begin; row < rows.end; row++) {
        if (row == used.begin && used.begin < used.end) row = used.end;
        if (row == rows.end || fa_stopped(problem)) break;
        for (int64_t h = 0; h < heads; h++) clear_row(x, p->grad_dtype[grad], fa_at(x, b, h, row, 0), length);
    }
}

void fa_cpu_clear(const fa_problem *problem, const fa_cpu_entry *entry) {
    const fa_entry *e = &entry->entry;
    const fa_span queries = {e->first_q, e->first_q + e->seq_q}, keys = {e->first_k, e->first_k + e->seq_k};
    if (problem->backward.accumulate) return;
    clear_rows(problem, FA_GRAD_Q, entry->batch, entry->rows, queries);
    clear_rows(problem, FA_GRAD_K, entry->batch, entry->key_rows, keys);
    clear_rows(problem, FA_GRAD_V, entry->batch, entry->key_rows, keys);
}

/* ---- sinks ---- */

/* Whether intervals, segments, mask and bias, which hide a key whatever its slope, leave none of the keys of query i.
 */
static bool sees_nothing(const fa_problem *problem, int64_t b, int64_t h, int64_t i) {
    const fa_forward *f = &problem->forward;
    fa_query x = fa_query_at(problem, b, h, i);
    x.slope = 0;
    const bool alike =
        !f->q_segments.data && (!f->mask.data || f->mask.stride[3] == 0) && (!f->bias.data || f->bias.stride[3] == 0);
    const int64_t end = alike && x.keys.begin < x.keys.end ? x.keys.begin + 1 : x.keys.end;
    double bias;
    for (int64_t j = x.keys.begin; j < end; j++)
        if (fa_pair_seen(problem, &x, j, &bias)) return false;
    return true;
}

/* The sum over the queries of batch entry b. Where a query sees no key, the sink has all the weight, and its out and
 * dout do not matter. */
static double sink_terms(const fa_problem *problem, int64_t b, int64_t h, double sink) {
    const fa_backward *p = &problem->backward;
    const fa_forward *f = &p->forward;
    double sum = 0;
    for (int64_t i = 0; i < f->seq_q && !fa_stopped(problem); i++) {
        if (sees_nothing(problem, b, h, i)) {
            sum += fa_dlse(p, b, h, i);
        } else {
            const double lse = fa_load(p->lse.data, f->lse_dtype, fa_at(&p->lse, b, h, i, 0));
            sum -= exp(sink - lse) * fa_delta(p, b, h, i);
        }
    }
    return sum;
}

void fa_sink_gradient(const void *context, int64_t h, int worker) {
    (void)worker;
    const fa_problem *problem = context;
    const fa_backward *p = &problem->backward;
    const fa_forward *f = &p->forward;
    const double sink = fa_bounded(fa_load(f->sinks.data, f->sinks_dtype, h * f->sinks.stride[0]), f->dtype);
    fa_cpu_walk walk = {0, 0};
    double sum = 0;
    for (int64_t b = 0; b < f->batch && sink != -INFINITY; b++) {
        if (problem->sequences.given) {
            const fa_cpu_entry sequence = fa_cpu_next(problem, b, &walk);
            fa_problem alone;
            fa_cpu_alone(problem, &sequence, &alone);
            sum += sink_terms(&alone, 0, h, sink);
        } else {
            sum += sink_terms(problem, b, h, sink);
        }
    }
    fa_write_gradient(p, FA_GRAD_SINKS, h * p->grad[FA_GRAD_SINKS].stride[0], sum);
}
