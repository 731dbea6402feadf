/* What the kernels of the backward pass on the CPU share: pairs one at a time, and the gradient of the sinks. */
#ifndef FA_CPU_GRADIENT_H
#define FA_CPU_GRADIENT_H

#include "cpu/alibi.h"
#include "cpu/element.h"
#include "cpu/limit.h"
#include "fa.h"

static inline int64_t fa_at(const fa_operand *x, int64_t b, int64_t h, int64_t i, int64_t j) {
    return b * x->stride[0] + h * x->stride[1] + i * x->stride[2] + j * x->stride[3];
}

/* Query heads that share a kv head; 0 where there are none. */
static inline int64_t fa_group(const fa_forward *f) { return f->heads_kv ? f->heads / f->heads_kv : 0; }

/* Keys [begin, end) that query i may see through causal and window. */
static inline int64_t fa_first_key(const fa_forward *f, int64_t i) {
    const int64_t first = i + f->diagonal - f->left;
    return first > f->key_begin ? first : f->key_begin;
}
static inline int64_t fa_end_key(const fa_forward *f, int64_t i) {
    const int64_t end = i + f->diagonal + f->right + 1;
    return end < f->key_end ? end : f->key_end;
}

/* Whether mask and bias leave a pair, and what bias and ALiBi add to its score. */
static inline bool fa_pair_seen(const fa_problem *problem, int64_t b, int64_t h, int64_t i, int64_t j, double *bias) {
    const fa_forward *f = &problem->forward;
    const double slope = fa_slope(&problem->extra, b, h);
    *bias = 0;
    if (f->mask.data && !((const uint8_t *)f->mask.data)[fa_at(&f->mask, b, h, i, j)]) return false;
    if (f->bias.data) {
        *bias = fa_load(f->bias.data, f->bias_dtype, fa_at(&f->bias, b, h, i, j));
        if (*bias == -INFINITY) return false;
        *bias = fa_bounded(*bias, f->dtype);
    }
    if (slope != 0) *bias = fa_with_alibi(*bias, slope, j - i - f->diagonal, f->dtype);
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

/* A step of fa_host's loop, on an fa_problem: writes dsinks of head h. */
void fa_sink_gradient(const void *context, int64_t h, int worker);

#endif
