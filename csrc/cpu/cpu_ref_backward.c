/* cpu_ref_backward: the gradients of attention as they are defined, pair by pair, in portable C.
 *
 *   P = exp(s - lse)   delta = dout . out - dlse   dS = P (dout . v - delta)   dT = dS (1 - tanh^2)
 *   dq_i = scale sum_j dT k_j   dk_j = scale sum_hi dT q_i   dv_j = sum_hi P dout_i   dbias = dS   dsinks = -sum
 * exp(sink - lse) delta
 *
 * Every sum is float64 and belongs to one task, in a fixed order: the bits do not depend on the threads. Hidden pairs
 * are skipped, so that what they hold never matters. Scores are worked out anew for each gradient that needs them: no
 * memory beyond a few rows, which lie in workspace, since a thread may have a small stack. Takes everything the API
 * accepts on the CPU; the safety net under faster kernels.
 *
 * @beside gradient.c
 */
#include <math.h>
#include <string.h>

#include "cpu/gradient.h"
#include "philox.h"

enum { TILE = 8 }; /* rows or keys that a task owns */

/* Another thread is woken for so many multiplications a pass, some tenths of a millisecond. */
#define PRODUCTS_PER_THREAD 2e5

/* A query with its row of dout, and a key with its value. */
typedef struct query {
    fa_query at;
    double q[FA_MAX_HEAD_DIM], dout[FA_MAX_HEAD_DIM];
    double lse, delta;
} query;

typedef struct key {
    int64_t index;
    double k[FA_MAX_HEAD_DIM], v[FA_MAX_HEAD_DIM];
} key;

/* Contribution of one pair. */
typedef struct pair {
    double weight, ds, dt; /* P with dropout's factor, dS, dT */
} pair;

/* Scratch memory of one thread. */
typedef struct scratch {
    query x[TILE];
    key y[TILE];
    double first[TILE][FA_MAX_HEAD_DIM], second[TILE][FA_MAX_HEAD_DIM]; /* sums of a task */
} scratch;

/* Shared by the threads of a launch. */
typedef struct shared {
    const fa_problem *problem;
    scratch *scratch; /* one each */
} shared;

static void load_row(const fa_operand *x, fa_dtype dtype, int64_t b, int64_t h, int64_t i, int length, double *row) {
    const int64_t base = b * x->stride[0] + h * x->stride[1] + i * x->stride[2];
    for (int d = 0; d < length; d++) row[d] = fa_load(x->data, dtype, base + d * x->stride[3]);
}

static double dot(const double *a, const double *b, int length) {
    double sum = 0;
    for (int d = 0; d < length; d++) sum += a[d] * b[d];
    return sum;
}

static void load_query(const fa_problem *problem, int64_t b, int64_t h, int64_t i, query *x) {
    const fa_backward *p = &problem->backward;
    const fa_forward *f = &p->forward;
    x->at = fa_query_at(problem, b, h, i);
    load_row(&f->q, f->dtype, b, h, i, f->head_dim, x->q);
    for (int d = 0; d < f->head_dim_v; d++) x->dout[d] = 0;
    if (p->dout.data) load_row(&p->dout, f->dtype, b, h, i, f->head_dim_v, x->dout);
    x->delta = fa_delta(p, b, h, i);
    x->lse = fa_load(p->lse.data, f->lse_dtype, fa_at(&p->lse, b, h, i, 0));
}

static void load_key(const fa_backward *p, int64_t b, int64_t h_kv, int64_t j, key *y) {
    const fa_forward *f = &p->forward;
    y->index = j;
    load_row(&f->k, f->dtype, b, h_kv, j, f->head_dim, y->k);
    load_row(&f->v, f->dtype, b, h_kv, j, f->head_dim_v, y->v);
}

/* False: the query does not see the key. */
static bool weigh(const fa_problem *problem, const query *x, const key *y, pair *r) {
    const fa_forward *f = &problem->forward;
    double bias, slope = 1;
    if (y->index < x->at.keys.begin || y->index >= x->at.keys.end) return false;
    if (!fa_pair_seen(problem, &x->at, y->index, &bias)) return false;
    double score = f->scale * dot(x->q, y->k, f->head_dim);
    if (f->softcap > 0) {
        const double capped = tanh(score / f->softcap);
        score = f->softcap * capped;
        slope = 1 - capped * capped;
    }
    const double weight = exp(score + bias - x->lse);
    const double factor = fa_dropout_factor(&problem->forward.dropout, x->at.batch, x->at.head, x->at.index, y->index);
    r->weight = weight * factor;
    r->ds = weight * (factor * dot(x->dout, y->v, f->head_dim_v) - x->delta);
    r->dt = r->ds * slope;
    return true;
}

static void write_row(const fa_backward *p, fa_grad grad, int64_t b, int64_t h, int64_t i, const double *row,
                      double factor, int length) {
    const int64_t base = fa_at(&p->grad[grad], b, h, i, 0);
    for (int d = 0; d < length; d++) fa_write_gradient(p, grad, base + d * p->grad[grad].stride[3], factor * row[d]);
}

static void add_row(double *sum, double factor, const double *row, int length) {
    for (int d = 0; d < length; d++) sum[d] += factor * row[d];
}

static int64_t tiles(int64_t length) { return (length + TILE - 1) / TILE; }
static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

/* Asks at every 16th row: of TILE pairs, each. */
static bool stopped(const fa_problem *problem, int64_t row) { return row % 16 == 15 && fa_stopped(problem); }

/* dq of a tile of queries of one head. */
static void queries_task(const void *context, int64_t index, int worker) {
    const shared *s = context;
    const fa_problem *problem = s->problem;
    const fa_backward *p = &problem->backward;
    const fa_forward *f = &p->forward;
    const int64_t first = index % tiles(f->seq_q) * TILE, head = index / tiles(f->seq_q) % f->heads;
    const int64_t b = index / tiles(f->seq_q) / f->heads, count = least(TILE, f->seq_q - first);
    query *x = s->scratch[worker].x;
    key *y = s->scratch[worker].y;
    pair r;
    double(*sum)[FA_MAX_HEAD_DIM] = s->scratch[worker].first;
    memset(sum, 0, sizeof s->scratch[worker].first);
    for (int64_t n = 0; n < count; n++) load_query(problem, b, head, first + n, &x[n]);
    fa_span keys = x[0].at.keys;
    for (int64_t n = 1; n < count; n++) keys = fa_span_joined(keys, x[n].at.keys);
    for (int64_t j = keys.begin; j < keys.end && !stopped(problem, j); j++) {
        load_key(p, b, head / fa_group(f), j, y);
        for (int64_t n = 0; n < count; n++)
            if (weigh(problem, &x[n], y, &r)) add_row(sum[n], r.dt, y->k, f->head_dim);
    }
    for (int64_t n = 0; n < count; n++) write_row(p, FA_GRAD_Q, b, head, first + n, sum[n], f->scale, f->head_dim);
}

/* dk and dv of a tile of keys of one kv head. */
static void keys_task(const void *context, int64_t index, int worker) {
    const shared *s = context;
    const fa_problem *problem = s->problem;
    const fa_backward *p = &problem->backward;
    const fa_forward *f = &p->forward;
    const int64_t first = index % tiles(f->seq_k) * TILE, h_kv = index / tiles(f->seq_k) % f->heads_kv;
    const int64_t b = index / tiles(f->seq_k) / f->heads_kv, group = fa_group(f);
    const int64_t last = least(first + TILE, f->seq_k) - 1;
    key *y = s->scratch[worker].y;
    query *x = s->scratch[worker].x;
    pair r;
    double(*dk)[FA_MAX_HEAD_DIM] = s->scratch[worker].first, (*dv)[FA_MAX_HEAD_DIM] = s->scratch[worker].second;
    memset(dk, 0, sizeof s->scratch[worker].first);
    memset(dv, 0, sizeof s->scratch[worker].second);
    const int64_t from = most(first, f->key_begin),
                  to = least(last + 1, f->key_end); /* what no query sees is not read */
    for (int64_t j = from; j < to; j++) load_key(p, b, h_kv, j, &y[j - first]);
    const bool anywhere = problem->sequences.positions; /* queries that see a key may be any of them */
    const int64_t row_begin = anywhere ? 0 : most(0, from - f->diagonal - f->right);
    const int64_t row_end = from >= to ? 0 : anywhere ? f->seq_q : least(f->seq_q, to - f->diagonal + f->left);
    for (int64_t h = h_kv * group; h < (h_kv + 1) * group; h++)
        for (int64_t i = row_begin; i < row_end && !stopped(problem, i); i++) {
            load_query(problem, b, h, i, x);
            for (int64_t j = from; j < to; j++) {
                if (!weigh(problem, x, &y[j - first], &r)) continue;
                add_row(dk[j - first], r.dt, x->q, f->head_dim);
                add_row(dv[j - first], r.weight, x->dout, f->head_dim_v);
            }
        }
    for (int64_t j = first; j <= last; j++) {
        if (p->wants >> FA_GRAD_K & 1) write_row(p, FA_GRAD_K, b, h_kv, j, dk[j - first], f->scale, f->head_dim);
        if (p->wants >> FA_GRAD_V & 1) write_row(p, FA_GRAD_V, b, h_kv, j, dv[j - first], 1, f->head_dim_v);
    }
}

/* Indices [begin, end) of an axis that an element of dbias sums over: all, or its own. */
typedef struct span {
    int64_t begin, end;
} span;

static span span_of(const fa_backward *p, int axis, int64_t own, int64_t extent) {
    return p->bias_sums >> axis & 1 ? (span){0, extent} : (span){own, own + 1};
}

/* Extents of dbias. */
static void bias_extents(const fa_backward *p, int64_t extent[4]) {
    const fa_forward *f = &p->forward;
    const int64_t whole[4] = {f->batch, f->heads, f->seq_q, f->seq_k};
    for (int axis = 0; axis < 4; axis++) extent[axis] = p->bias_sums >> axis & 1 ? 1 : whole[axis];
}

/* Adds the pairs of one head and one tile of keys [first, end) to sum, an element a key or one for all. */
static void add_bias(const fa_problem *problem, scratch *own, int64_t b, int64_t h, span rows, int64_t first,
                     int64_t end, double *sum) {
    const fa_backward *p = &problem->backward;
    const fa_forward *f = &p->forward;
    key *y = own->y;
    query *x = own->x;
    pair r;
    for (int64_t j = first; j < end; j++) load_key(p, b, h / fa_group(f), j, &y[j - first]);
    for (int64_t i = rows.begin; i < rows.end && !stopped(problem, i); i++) {
        const fa_span keys = fa_keys_of(problem, i);
        if (keys.begin >= end || keys.end <= first) continue;
        load_query(problem, b, h, i, x);
        for (int64_t j = first; j < end; j++)
            if (weigh(problem, x, &y[j - first], &r)) sum[p->bias_sums >> 3 & 1 ? 0 : j - first] += r.ds;
    }
}

/* A tile of elements of dbias along its last axis. */
static void bias_task(const void *context, int64_t index, int worker) {
    const shared *s = context;
    const fa_problem *problem = s->problem;
    scratch *mine = &s->scratch[worker];
    const fa_backward *p = &problem->backward;
    const fa_forward *f = &p->forward;
    int64_t extent[4], own[4];
    bias_extents(p, extent);
    own[3] = index % tiles(extent[3]) * TILE, index /= tiles(extent[3]);
    for (int axis = 2; axis >= 0; axis--) own[axis] = index % extent[axis], index /= extent[axis];
    const span batches = span_of(p, 0, own[0], f->batch), heads = span_of(p, 1, own[1], f->heads);
    const span rows = span_of(p, 2, own[2], f->seq_q);
    const bool whole_row = p->bias_sums >> 3 & 1;
    double sum[TILE] = {0};
    for (int64_t b = batches.begin; b < batches.end; b++) {
        fa_problem alone;
        int64_t at = b; /* the entry, of `of` */
        const fa_problem *of = fa_cpu_padded(problem, &at, &alone);
        const fa_forward *entry = &of->forward;
        const span queries = {rows.begin, least(rows.end, entry->seq_q)};
        const int64_t from = most(whole_row ? 0 : own[3], entry->key_begin);
        const int64_t to = least(whole_row ? entry->seq_k : own[3] + TILE, entry->key_end);
        for (int64_t h = heads.begin; h < heads.end; h++) {
            if (whole_row)
                for (int64_t j = from; j < to; j += TILE)
                    add_bias(of, mine, at, h, queries, j, least(j + TILE, to), sum);
            else if (from < to)
                add_bias(of, mine, at, h, queries, from, to, sum + (from - own[3]));
        }
    }
    for (int64_t n = 0; n < TILE && own[3] + n < extent[3]; n++)
        fa_write_gradient(p, FA_GRAD_BIAS, fa_at(&p->grad[FA_GRAD_BIAS], own[0], own[1], own[2], own[3] + n), sum[n]);
}

static void sinks_task(const void *context, int64_t index, int worker) {
    fa_sink_gradient(((const shared *)context)->problem, index, worker);
}

/* Threads that the products of dense entries are worth. */
static int useful_threads(const fa_forward *f, int threads) {
    const double products = (double)f->batch * (double)f->heads * (double)f->seq_q *
                            (double)(f->key_end - f->key_begin) * (f->head_dim + f->head_dim_v);
    const double worth = 1 + products / PRODUCTS_PER_THREAD;
    return worth < threads ? (int)worth : threads;
}

static fa_answer plan(const fa_problem *problem, const fa_device_info *device, fa_plan *plan, fa_why *why) {
    (void)why;
    const fa_forward *f = &problem->backward.forward;
    plan->threads = problem->sequences.given ? problem->threads : useful_threads(f, problem->threads);
    const size_t fitting = device->workspace_limit / sizeof(scratch);
    if ((size_t)plan->threads > fitting) plan->threads = fitting ? (int)fitting : 1;
    plan->blocks = plan->threads;
    plan->workspace_bytes = (size_t)plan->threads * sizeof(scratch);
    return FA_TAKES;
}

/* dq, dk and dv. */
static void run_pairs(const shared *s, int threads, const fa_host *host) {
    const fa_backward *p = &s->problem->backward;
    const fa_forward *f = &p->forward;
    if (p->wants >> FA_GRAD_Q & 1) host->loop(threads, f->batch * f->heads * tiles(f->seq_q), queries_task, s);
    if (p->wants & (1 << FA_GRAD_K | 1 << FA_GRAD_V))
        host->loop(threads, f->batch * f->heads_kv * tiles(f->seq_k), keys_task, s);
}

static void run_sequences(const shared *s, int threads, const fa_host *host) {
    const fa_problem *problem = s->problem;
    fa_cpu_walk walk = {0, 0};
    for (int64_t b = 0; b < fa_cpu_entries(problem) && !fa_stopped(problem); b++) {
        const fa_cpu_entry sequence = fa_cpu_next(problem, b, &walk);
        fa_cpu_clear(problem, &sequence);
        if (b == problem->forward.batch) break;
        fa_problem alone;
        fa_cpu_alone(problem, &sequence, &alone);
        const shared own = {&alone, s->scratch};
        run_pairs(&own, useful_threads(&alone.forward, threads), host);
    }
}

static fa_code launch(const fa_problem *problem, const fa_plan *plan, const fa_launch *launch) {
    const fa_backward *p = &problem->backward;
    const shared s = {problem, launch->workspace};
    if (problem->sequences.given)
        run_sequences(&s, plan->threads, launch->host);
    else
        run_pairs(&s, plan->threads, launch->host);
    int64_t extent[4];
    bias_extents(p, extent);
    if (p->wants >> FA_GRAD_BIAS & 1)
        launch->host->loop(plan->threads, extent[0] * extent[1] * extent[2] * tiles(extent[3]), bias_task, &s);
    if (p->wants >> FA_GRAD_SINKS & 1) launch->host->loop(plan->threads, p->forward.heads, sinks_task, &s);
    return FA_OK;
}

extern const fa_kernel fa_kernel_cpu_ref_backward;
FA_EXPORT const fa_kernel fa_kernel_cpu_ref_backward = {
    .abi = FA_KERNEL_ABI,
    .op = FA_BACKWARD,
    .device = FA_CPU,
    .name = "cpu_ref_backward",
    .summary = "every gradient, pair by pair, in portable C with float64 sums",
    .dtypes = 1 << FA_F16 | 1 << FA_BF16 | 1 << FA_F32 | 1 << FA_F64,
    .takes = FA_WITH_SEGMENTS | FA_WITH_INTERVALS | FA_WITH_BIAS | FA_WITH_MASK | FA_WITH_SINKS | FA_WITH_SOFTCAP |
             FA_WITH_WINDOW | FA_WITH_HEAD_DIM_V | FA_WITH_DLSE | FA_WITH_DBIAS | FA_WITH_DSINKS | FA_WITH_ACCUMULATE |
             FA_WITH_ORDERED | FA_WITH_ALIBI | FA_WITH_DROPOUT | FA_WITH_LENGTHS | FA_WITH_RANGES | FA_WITH_POSITIONS,
    .plan = plan,
    .launch = launch,
};
