/* The gradient of the sinks. See gradient.h. */
#include "cpu/gradient.h"

#include <math.h>

/* Whether mask and bias, which hide a key whatever its slope, leave none of the keys of query i. */
static bool sees_nothing(const fa_problem *problem, int64_t b, int64_t h, int64_t i) {
    const fa_forward *f = &problem->forward;
    const fa_query x = {.batch = b, .head = h, .index = i, .keys = fa_keys_of(f, i)};
    const bool alike = (!f->mask.data || f->mask.stride[3] == 0) && (!f->bias.data || f->bias.stride[3] == 0);
    const int64_t end = alike && x.keys.begin < x.keys.end ? x.keys.begin + 1 : x.keys.end;
    double bias;
    for (int64_t j = x.keys.begin; j < end; j++)
        if (fa_pair_seen(problem, &x, j, &bias)) return false;
    return true;
}

/* Where a query sees no key, the sink has all the weight, and its out and dout do not matter. */
void fa_sink_gradient(const void *context, int64_t h, int worker) {
    (void)worker;
    const fa_problem *problem = context;
    const fa_backward *p = &problem->backward;
    const fa_forward *f = &p->forward;
    const double sink = fa_bounded(fa_load(f->sinks.data, f->sinks_dtype, h * f->sinks.stride[0]), f->dtype);
    double sum = 0;
    for (int64_t b = 0; b < f->batch && sink != -INFINITY; b++)
        for (int64_t i = 0; i < f->seq_q && !fa_stopped(problem); i++) {
            if (sees_nothing(problem, b, h, i)) {
                sum += fa_dlse(p, b, h, i);
            } else {
                const double lse = fa_load(p->lse.data, f->lse_dtype, fa_at(&p->lse, b, h, i, 0));
                sum -= exp(sink - lse) * fa_delta(p, b, h, i);
            }
        }
    fa_write_gradient(p, FA_GRAD_SINKS, h * p->grad[FA_GRAD_SINKS].stride[0], sum);
}
