/* cpu_merge: results over parts of the keys -> the result over all of them, on all cores.
 *
 *     m = max(lse_i, sink)    w_i = exp(lse_i - m), 0 for an empty part    W = sum w_i + exp(sink - m)
 *     out = sum w_i out_i / W    lse = m + log W
 *
 * A part whose LSE is -inf or +inf is empty, and its out is not read. In float64 whatever the dtype, in the order of
 * the list; where one part alone counts, its elements are copied.
 */
#include <math.h>
#include <string.h>

#include "cpu/element.h"
#include "cpu/limit.h"
#include "fa.h"

enum { ROWS = 64 }; /* of a task */

/* The plan's own part. */
typedef struct own {
    int64_t tiles; /* tasks of a head */
} own;
_Static_assert(sizeof(own) <= FA_PLAN_OWN, "");

static fa_answer plan(const fa_problem *problem, const fa_device_info *device, fa_plan *plan, fa_why *why) {
    (void)device, (void)why;
    const fa_merge *p = &problem->merge;
    own *mine = (own *)plan->own;
    mine->tiles = (p->seq + ROWS - 1) / ROWS;
    plan->blocks = p->batch * p->heads * mine->tiles;
    plan->threads = problem->threads < plan->blocks ? problem->threads : (int)plan->blocks;
    return FA_TAKES;
}

enum { KEPT = 64 }; /* weights of a row that are kept; of parts beyond, they are worked out for each element */

/* A row of the result. */
typedef struct row {
    int64_t batch, head, seq;
    double origin, sum, sink; /* the largest LSE or sink, the weights about it, the sink or -inf */
    int count, last;          /* parts that are not empty, and the last of them */
    double weight[KEPT];      /* negative for an empty part */
} row;

static int64_t offset_of(const fa_operand *x, const row *r) {
    return r->batch * x->stride[0] + r->head * x->stride[1] + r->seq * x->stride[2];
}

static double lse_of(const fa_merge *p, const row *r, int n) {
    return fa_load(p->parts[n].lse.data, p->lse_dtype, offset_of(&p->parts[n].lse, r));
}

/* exp(x - origin), 1 where both are the same infinity. */
static double weight(double x, double origin) { return x == origin ? 1 : exp(x - origin); }

/* Negative for an empty part. */
static double weight_of(const fa_merge *p, const row *r, int n) {
    const double lse = lse_of(p, r, n);
    return isinf(lse) ? -1 : weight(lse, r->origin);
}

static void weigh(const fa_merge *p, row *r) {
    r->sink = -INFINITY;
    if (p->sinks.data)
        r->sink = fa_bounded(fa_load(p->sinks.data, p->sinks_dtype, r->head * p->sinks.stride[0]), p->dtype);
    r->origin = r->sink;
    r->count = 0;
    for (int n = 0; n < p->count; n++) {
        const double lse = lse_of(p, r, n);
        if (isinf(lse)) continue;
        r->count++;
        r->last = n;
        if (isnan(lse) || lse > r->origin) r->origin = lse; /* once NaN, it stays */
    }
    r->sum = r->sink == -INFINITY ? 0 : weight(r->sink, r->origin);
    for (int n = 0; n < p->count; n++) {
        const double w = weight_of(p, r, n);
        if (n < KEPT) r->weight[n] = w;
        if (!(w < 0)) r->sum += w;
    }
}

/* One part alone: its bits. */
static void copy_out(const fa_merge *p, const row *r) {
    const fa_operand *x = &p->parts[r->last].out;
    const int64_t bytes = (int64_t)fa_dtype_size(p->dtype), from = offset_of(x, r), to = offset_of(&p->out, r);
    for (int d = 0; d < p->head_dim; d++)
        memmove((char *)p->out.data + (to + d * p->out.stride[3]) * bytes,
                (const char *)x->data + (from + d * x->stride[3]) * bytes, (size_t)bytes);
}

static void write_out(const fa_merge *p, const row *r) {
    const int64_t to = offset_of(&p->out, r);
    for (int d = 0; d < p->head_dim; d++) {
        double sum = 0;
        for (int n = 0; n < p->count; n++) {
            const fa_operand *x = &p->parts[n].out;
            const double w = n < KEPT ? r->weight[n] : weight_of(p, r, n);
            if (w < 0) continue; /* whatever its out holds */
            sum += w * fa_load(x->data, p->dtype, offset_of(x, r) + d * x->stride[3]);
        }
        fa_store(p->out.data, p->out_dtype, to + d * p->out.stride[3], r->count ? sum / r->sum : 0);
    }
}

/* Shared by the threads of a launch. */
typedef struct shared {
    const fa_merge *problem;
    const own *own;
} shared;

static void run_task(const void *context, int64_t index, int worker) {
    (void)worker;
    const shared *s = context;
    const fa_merge *p = s->problem;
    const int64_t pair = index / s->own->tiles, first = index % s->own->tiles * ROWS;
    row r = {.batch = pair / p->heads, .head = pair % p->heads};
    for (r.seq = first; r.seq < p->seq && r.seq < first + ROWS; r.seq++) {
        weigh(p, &r);
        if (r.count == 1 && !p->sinks.data && p->out_dtype == p->dtype)
            copy_out(p, &r);
        else
            write_out(p, &r);
        const double lse = !r.count ? r.sink : r.sum == 1 ? r.origin : r.origin + log(r.sum);
        fa_store(p->lse.data, p->lse_dtype, offset_of(&p->lse, &r), lse);
    }
}

static fa_code launch(const fa_problem *problem, const fa_plan *plan, const fa_launch *launch) {
    const shared s = {&problem->merge, (const own *)plan->own};
    launch->host->loop(plan->threads, plan->blocks, run_task, &s);
    return FA_OK;
}

extern const fa_kernel fa_kernel_cpu_merge;
FA_EXPORT const fa_kernel fa_kernel_cpu_merge = {
    .abi = FA_KERNEL_ABI,
    .op = FA_MERGE,
    .device = FA_CPU,
    .name = "cpu_merge",
    .summary = "merges results over parts of the keys: portable C on all cores",
    .dtypes = 1 << FA_F16 | 1 << FA_BF16 | 1 << FA_F32 | 1 << FA_F64,
    .takes = FA_WITH_SINKS,
    .plan = plan,
    .launch = launch,
};
