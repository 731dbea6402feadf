/* cpu_ref: attention as it is defined, one query row at a time, in portable C.
 *
 *   s_j = softcap(scale * q . k_j) + bias_j - slope |j - position| for each visible key j;  o = sum_j exp(s_j - m) v_j
 * / (sum_j exp(s_j - m) + exp(sink - m))
 *
 * Every sum is float64, whatever the dtype. Excluded keys are skipped, so that what they hold never matters to the row.
 * Takes everything the API accepts on the CPU; the safety net under the faster CPU kernels. One thread.
 */
#include <math.h>
#include <stdlib.h>

#include "cpu/alibi.h"
#include "cpu/element.h"
#include "cpu/entries.h"
#include "cpu/intervals.h"
#include "cpu/limit.h"
#include "cpu/max_logit.h"
#include "fa.h"
#include "philox.h"

/* The query row at work. */
typedef struct row {
    const fa_cpu_entry *entry;
    int64_t batch, head, head_kv, query;
    int64_t position; /* where the query stands among the keys */
    double slope;
    double logit; /* the largest of the head's pairs so far, scaled */
    fa_held held;
    int64_t pairs; /* and rows, since the caller was asked whether it wants more */
    double q[FA_MAX_HEAD_DIM], out[FA_MAX_HEAD_DIM];
} row;

static bool masked(const fa_forward *p, const row *r, int64_t key) {
    if (!fa_same_segment(p, r->batch, r->query, key) || !fa_holds(&r->held, key)) return true;
    if (!p->mask.data) return false;
    return !((const uint8_t *)p->mask.data)[fa_at(&p->mask, r->batch, r->head, r->query, key)];
}

static double score(const fa_problem *problem, row *r, int64_t key, fa_cpu_place place) {
    const fa_forward *p = &problem->forward;
    const int64_t base = fa_at(&p->k, place.first, r->head_kv, place.row, 0);
    double sum = 0;
    for (int d = 0; d < p->head_dim; d++) sum += r->q[d] * fa_load(p->k.data, p->dtype, base + d * p->k.stride[3]);
    const double logit = p->scale * sum;
    double value = logit;
    if (p->softcap > 0) value = p->softcap * tanh(value / p->softcap);
    double bias = 0;
    if (p->bias.data) {
        const int64_t *s = p->bias.stride;
        bias = fa_load(p->bias.data, p->bias_dtype, r->batch * s[0] + r->head * s[1] + r->query * s[2] + key * s[3]);
        if (bias == -INFINITY) return -INFINITY; /* excludes like a mask: a NaN score does not get through */
        bias = fa_bounded(bias, p->dtype);
    }
    if (logit > r->logit) r->logit = logit;
    if (r->slope != 0) bias = fa_with_alibi(bias, r->slope, key - r->position, p->dtype);
    return value + bias;
}

/* Whether the caller wants no more; asks after some tenths of a millisecond of pairs and rows. */
static bool stopped(const fa_problem *problem, row *r) {
    enum { ENOUGH = 1024 };
    if (++r->pairs < ENOUGH) return false;
    if (fa_stopped(problem)) return true;
    r->pairs = 0;
    return false;
}

static double visible_score(const fa_problem *problem, row *r, int64_t key) {
    const fa_cpu_place place = fa_cpu_find(problem, r->entry, key);
    return place.first < 0 || masked(&problem->forward, r, key) ? -INFINITY : score(problem, r, key, place);
}

/* Fills r->out and returns the LSE. `scores` has room for the first `kept` keys; the others' are computed twice. */
static double attend(const fa_problem *problem, row *r, double *scores, int64_t kept) {
    const fa_forward *p = &problem->forward;
    const fa_entry *e = &r->entry->entry;
    const fa_span keys = fa_held_within(&r->held, fa_row_keys(e, p->left, p->right, r->position));
    double sink = -INFINITY;
    if (p->sinks.data)
        sink = fa_bounded(fa_load(p->sinks.data, p->sinks_dtype, r->head * p->sinks.stride[0]), p->dtype);
    double maximum = sink, sum = 0;
    for (int64_t key = keys.begin; key < keys.end && !stopped(problem, r); key++) {
        const double value = visible_score(problem, r, key);
        if (key - keys.begin < kept) scores[key - keys.begin] = value;
        if (value > maximum) maximum = value;
    }
    const double origin = maximum == -INFINITY ? 0 : maximum;
    if (p->sinks.data) sum = exp(sink - origin);
    for (int d = 0; d < p->head_dim_v; d++) r->out[d] = 0;
    bool seen = false;
    for (int64_t key = keys.begin; key < keys.end && !stopped(problem, r); key++) {
        const double value = key - keys.begin < kept ? scores[key - keys.begin] : visible_score(problem, r, key);
        if (value == -INFINITY) continue;
        const fa_cpu_place place = fa_cpu_find(problem, r->entry, key);
        if (place.first < 0) continue; /* it had a page when its score was worked out */
        const int64_t base = fa_at(&p->v, place.first, r->head_kv, place.row, 0);
        const double weight = exp(value - origin);
        const double left = weight * fa_dropout_factor(&problem->forward.dropout, r->batch, r->head, r->query, key);
        seen = true;
        sum += weight;
        for (int d = 0; d < p->head_dim_v; d++)
            r->out[d] += left * fa_load(p->v.data, p->dtype, base + d * p->v.stride[3]);
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
    const int64_t keys = problem->sequences.given ? p->seq_k : p->key_end - p->key_begin;
    const int64_t fitting = (int64_t)(device->workspace_limit / sizeof(double));
    own *mine = (own *)plan->own;
    mine->kept = keys < fitting ? keys : fitting;
    plan->threads = 1;
    plan->blocks = 1;
    plan->workspace_bytes = (size_t)mine->kept * sizeof(double);
    plan->keep = true;
    return FA_TAKES;
}

/* Row `row` of out and lse, which is a query of the entry or of no sequence. */
static void write_row(const fa_problem *problem, row *r, int64_t row, double *scores, int64_t kept) {
    const fa_forward *p = &problem->forward;
    const fa_entry *e = &r->entry->entry;
    double lse = -INFINITY;
    r->query = row - e->first_q;
    if (r->query >= 0 && r->query < e->seq_q) {
        const int64_t base = r->batch * p->q.stride[0] + r->head * p->q.stride[1] + row * p->q.stride[2];
        for (int d = 0; d < p->head_dim; d++) r->q[d] = fa_load(p->q.data, p->dtype, base + d * p->q.stride[3]);
        r->position = fa_position(e, r->query);
        r->held = fa_held_keys(p, r->batch, r->head, r->query);
        lse = attend(problem, r, scores, kept);
    } else {
        for (int d = 0; d < p->head_dim_v; d++) r->out[d] = 0;
    }
    const int64_t to = r->batch * p->out.stride[0] + r->head * p->out.stride[1] + row * p->out.stride[2];
    for (int d = 0; d < p->head_dim_v; d++) fa_store(p->out.data, p->out_dtype, to + d * p->out.stride[3], r->out[d]);
    if (p->lse.data) fa_store(p->lse.data, p->lse_dtype, fa_at(&p->lse, r->batch, r->head, row, 0), lse);
}

static fa_code launch(const fa_problem *problem, const fa_plan *plan, const fa_launch *launch) {
    const fa_forward *p = &problem->forward;
    const own *mine = (const own *)plan->own;
    fa_cpu_walk walk = {0, 0};
    row r = {.pairs = 0};
    for (int64_t b = 0; b < fa_cpu_entries(problem) && !fa_stopped(problem); b++) {
        const fa_cpu_entry entry = fa_cpu_next(problem, b, &walk);
        r.entry = &entry, r.batch = b;
        for (r.head = 0; r.head < p->heads; r.head++) {
            r.head_kv = r.head / (p->heads / p->heads_kv);
            r.slope = b < p->batch ? fa_slope(&problem->forward, b, r.head) : 0;
            r.logit = -INFINITY;
            for (int64_t row = entry.rows.begin; row < entry.rows.end && !stopped(problem, &r); row++)
                write_row(problem, &r, row, (double *)launch->workspace, mine->kept);
            if (p->max_logit.data && b < p->batch) fa_raise_logit(p, b, r.head, r.logit);
        }
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
             FA_WITH_ALIBI | FA_WITH_INTERVALS | FA_WITH_LENGTHS | FA_WITH_PAGES | FA_WITH_RANGES | FA_WITH_POSITIONS |
             FA_WITH_OUT_FLOAT32 | FA_WITH_DROPOUT | FA_WITH_SEGMENTS | FA_WITH_MAX_LOGIT,
    .plan = plan,
    .launch = launch,
};
