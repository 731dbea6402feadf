/* cpu_ref: attention as it is defined, one query row at a time, in portable C.
 *
 *   s_j = softcap(scale * q . k_j) + bias_j - slope |j - position| for each visible key j;  o = sum_j exp(s_j - m) v_j
 * / (sum_j exp(s_j - m) + exp(sink - m))
 *
 * Every sum is float64, whatever the dtype. Excluded keys are skipped, so that what they hold never matters to the row.
 * Takes everything the API accepts on the CPU; the safety net under the faster CPU rows. One thread.
 */
#include <math.h>
#include <stdlib.h>

#include "cpu/alibi.h"
#include "cpu/element.h"
#include "cpu/limit.h"
#include "fa.h"

/* The query row at work. */
typedef struct row {
    int64_t batch, head, head_kv, query;
    double slope;
    double q[FA_MAX_HEAD_DIM], out[FA_MAX_HEAD_DIM];
} row;

static bool excluded(const fa_forward *p, const row *r, int64_t key) {
    if (!p->mask.data) return false;
    const int64_t *s = p->mask.stride;
    return !((const uint8_t *)p->mask.data)[r->batch * s[0] + r->head * s[1] + r->query * s[2] + key * s[3]];
}

static double score(const fa_forward *p, const row *r, int64_t key) {
    const int64_t base = r->batch * p->k.stride[0] + r->head_kv * p->k.stride[1] + key * p->k.stride[2];
    double sum = 0;
    for (int d = 0; d < p->head_dim; d++) sum += r->q[d] * fa_load(p->k.data, p->dtype, base + d * p->k.stride[3]);
    double value = p->scale * sum;
    if (p->softcap > 0) value = p->softcap * tanh(value / p->softcap);
    double bias = 0;
    if (p->bias.data) {
        const int64_t *s = p->bias.stride;
        bias = fa_load(p->bias.data, p->bias_dtype, r->batch * s[0] + r->head * s[1] + r->query * s[2] + key * s[3]);
        if (bias == -INFINITY) return -INFINITY; /* excludes like a mask: a NaN score does not get through */
        bias = fa_bounded(bias, p->dtype);
    }
    if (r->slope != 0) bias = fa_with_alibi(bias, r->slope, key - r->query - p->diagonal, p->dtype);
    return value + bias;
}

static double visible_score(const fa_forward *p, const row *r, int64_t key) {
    return excluded(p, r, key) ? -INFINITY : score(p, r, key);
}

/* Fills r->out and returns the LSE. `scores` has room for the first `kept` keys; the others' are computed twice. */
static double attend(const fa_forward *p, row *r, double *scores, int64_t kept) {
    const int64_t centre = r->query + p->diagonal;
    const int64_t first = centre - p->left > p->key_begin ? centre - p->left : p->key_begin;
    const int64_t end = centre + p->right + 1 < p->key_end ? centre + p->right + 1 : p->key_end;
    double sink = -INFINITY;
    if (p->sinks.data)
        sink = fa_bounded(fa_load(p->sinks.data, p->sinks_dtype, r->head * p->sinks.stride[0]), p->dtype);
    double maximum = sink, sum = 0;
    for (int64_t key = first; key < end; key++) {
        const double value = visible_score(p, r, key);
        if (key - first < kept) scores[key - first] = value;
        if (value > maximum) maximum = value;
    }
    const double origin = maximum == -INFINITY ? 0 : maximum;
    if (p->sinks.data) sum = exp(sink - origin);
    for (int d = 0; d < p->head_dim_v; d++) r->out[d] = 0;
    bool seen = false;
    for (int64_t key = first; key < end; key++) {
        const double value = key - first < kept ? scores[key - first] : visible_score(p, r, key);
        if (value == -INFINITY) continue;
        const int64_t base = r->batch * p->v.stride[0] + r->head_kv * p->v.stride[1] + key * p->v.stride[2];
        const double weight = exp(value - origin);
        seen = true;
        sum += weight;
        for (int d = 0; d < p->head_dim_v; d++)
            r->out[d] += weight * fa_load(p->v.data, p->dtype, base + d * p->v.stride[3]);
    }
    if (!seen) return sink; /* whatever it is; the sum of one that is infinite is NaN */
    for (int d = 0; d < p->head_dim_v && sum != 0; d++) r->out[d] /= sum;
    return sum == 0 ? -INFINITY : origin + log(sum);
}

/* The plan's own part. */
typedef struct own {
    int64_t kept; /* scores that the workspace holds */
} own;
_Static_assert(sizeof(own) <= FA_PLAN_OWN, "");

static fa_answer plan(const fa_problem *problem, const fa_device_info *device, fa_plan *plan, fa_why *why) {
    (void)why;
    const fa_forward *p = &problem->forward;
    const int64_t keys = p->key_end - p->key_begin, fitting = (int64_t)(device->workspace_limit / sizeof(double));
    own *mine = (own *)plan->own;
    mine->kept = keys < fitting ? keys : fitting;
    plan->threads = 1;
    plan->blocks = 1;
    plan->workspace_bytes = (size_t)mine->kept * sizeof(double);
    plan->keep = true;
    return FA_TAKES;
}

static fa_code launch(const fa_problem *problem, const fa_plan *plan, const fa_launch *launch) {
    const fa_forward *p = &problem->forward;
    const own *mine = (const own *)plan->own;
    row r;
    for (r.batch = 0; r.batch < p->batch; r.batch++)
        for (r.head = 0; r.head < p->heads; r.head++)
            for (r.query = 0; r.query < p->seq_q; r.query++) {
                r.head_kv = r.head / (p->heads / p->heads_kv);
                r.slope = fa_slope(&problem->extra, r.batch, r.head);
                const int64_t base = r.batch * p->q.stride[0] + r.head * p->q.stride[1] + r.query * p->q.stride[2];
                for (int d = 0; d < p->head_dim; d++) r.q[d] = fa_load(p->q.data, p->dtype, base + d * p->q.stride[3]);
                const double lse = attend(p, &r, (double *)launch->workspace, mine->kept);
                const int64_t to = r.batch * p->out.stride[0] + r.head * p->out.stride[1] + r.query * p->out.stride[2];
                for (int d = 0; d < p->head_dim_v; d++)
                    fa_store(p->out.data, p->out_dtype, to + d * p->out.stride[3], r.out[d]);
                if (p->lse) fa_store(p->lse, p->lse_dtype, (r.batch * p->heads + r.head) * p->seq_q + r.query, lse);
            }
    return FA_OK;
}

extern const fa_kernel fa_kernel_cpu_ref;
FA_EXPORT const fa_kernel fa_kernel_cpu_ref = {
    .abi = FA_KERNEL_ABI,
    .op = FA_FORWARD,
    .device = FA_CPU,
    .name = "cpu_ref",
    .summary = "portable C, float64 sums, one query row at a time",
    .dtypes = 1 << FA_F16 | 1 << FA_BF16 | 1 << FA_F32 | 1 << FA_F64,
    .takes = FA_WITH_BIAS | FA_WITH_MASK | FA_WITH_SINKS | FA_WITH_SOFTCAP | FA_WITH_WINDOW | FA_WITH_HEAD_DIM_V |
             FA_WITH_ALIBI,
    .plan = plan,
    .launch = launch,
};
