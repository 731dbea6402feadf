/* cpu_simd_backward: the gradients of attention on vector units and cores, in one pass over tiles of queries and chunks
 * of keys (the backward pass of FlashAttention-2; Dao 2023): five products a pair.
 *
 * A task is a chunk of the keys of one (batch, key/value head) against all queries of its heads: dk and dv of the chunk
 * are complete, and its share of dq is added to the shares of the chunks before it, always in this order. One thread
 * takes all chunks of a head where there are heads enough; else chunks run side by side, their shares are kept and then
 * added up. float16 and bfloat16 are converted to float32 as tiles are read; sums are float32, for float64 input
 * float64 throughout. Neither the number of threads nor which of them takes a task changes a bit of the result.
 * A sequence is a dense problem of its own (gradient.h); those that are no large part of the call share the threads, a
 * kv head of one a task.
 *
 * Instances, and what forces one: as cpu_simd.
 *
 * @beside simd_isa.c gradient.c
 * @flags -ffp-contract=fast
 * @instance avx512_f32 -DFA_CPU_VECTOR_BYTES=64 -DFA_CPU_REAL_BYTES=4
 * @instance avx512_f64 -DFA_CPU_VECTOR_BYTES=64 -DFA_CPU_REAL_BYTES=8
 * @instance avx2_f32 -DFA_CPU_VECTOR_BYTES=32 -DFA_CPU_REAL_BYTES=4
 * @instance avx2_f64 -DFA_CPU_VECTOR_BYTES=32 -DFA_CPU_REAL_BYTES=8
 * @instance generic_f32 -DFA_CPU_VECTOR_BYTES=16 -DFA_CPU_REAL_BYTES=4
 * @instance generic_f64 -DFA_CPU_VECTOR_BYTES=16 -DFA_CPU_REAL_BYTES=8
 */
#ifdef FA_INSTANCE

/* Keys a chunk, 512 bytes of a row of dT: K as lanes and as panels, V, dK and dV of a chunk share the second-level
 * cache with a tile of queries. */
#ifndef FA_CPU_CHUNK
#define FA_CPU_CHUNK (512 / FA_CPU_REAL_BYTES)
#endif
/* Queries a tile: they share the first-level cache with a block of keys. */
#ifndef FA_CPU_TILE_Q
#define FA_CPU_TILE_Q 64
#endif

#include "cpu/simd_target.h"
#if FA_CPU_HAS_INSTANCE
#include "cpu/simd_gradient.h"
FA_CPU_TARGET_END
#endif

#else /* the host part */

#include <string.h>

#include "cpu/cpu_simd_backward.h"
#include "cpu/gradient.h"
#include "cpu/simd_isa.h"

static const fa_gradient_instance *const instances[FA_ISA_COUNT][2] = FA_ISA_TABLE(fa_gradient);

/* The plan's own part. */
typedef struct own {
    int isa;
    bool by_heads;  /* a task is all chunks of a kv head */
    int64_t chunks; /* of a kv head */
    int64_t beside; /* chunks of a kv head whose shares of dq are kept at a time; 1: added at once */
    size_t scratch; /* bytes a thread */
    size_t dq;      /* bytes of the rows of dq of a kv head; 0: dq is not wanted */
} own;
_Static_assert(sizeof(own) <= FA_PLAN_OWN, "");

static const fa_gradient_instance *instance_of(const own *mine, const fa_backward *p) {
    return instances[mine->isa][p->forward.dtype == FA_F64];
}

/* A thread more is worth waking for this many multiplications: as in cpu_simd. */
#define WORK_PER_THREAD 8e6

static double work_of(const fa_forward *f, const fa_entry *e) {
    return fa_cpu_pairs(f, e) * (3 * f->head_dim + 2 * f->head_dim_v);
}

/* How tasks are cut for so many threads: false where their workspace is over the limit. */
static bool cut(const fa_backward *p, size_t limit, int threads, own *mine) {
    const int64_t heads = p->forward.batch * p->forward.heads_kv;
    const size_t scratch = (size_t)threads * mine->scratch;
    if (scratch > limit) return false;
    const size_t left = limit - scratch;
    mine->by_heads = threads == 1 || heads % threads == 0 || heads >= (int64_t)4 * threads;
    if (mine->by_heads) return !mine->dq || (size_t)threads <= left / mine->dq;
    mine->beside = mine->chunks;
    if (!mine->dq) return true;
    const size_t fitting = left / mine->dq / (size_t)heads; /* rows of dq a kv head: the sum, and the shares */
    if (fitting < 1) return false;
    const int64_t wanted = ((int64_t)4 * threads + heads - 1) / heads;
    if (mine->beside > wanted) mine->beside = wanted;
    if (mine->beside >= (int64_t)fitting) mine->beside = fitting > 2 ? (int64_t)fitting - 1 : 1;
    return mine->beside * heads >= threads || mine->beside == mine->chunks;
}

static int useful_threads(int threads, double work) {
    const double useful = 1 + work / WORK_PER_THREAD;
    return threads < useful ? threads : (int)useful;
}

/* Of one dense problem: chunks, and bytes of the rows of dq. */
static void measure(const fa_backward *p, own *mine) {
    const fa_gradient_instance *instance = instance_of(mine, p);
    mine->chunks = (p->forward.seq_k + instance->chunk - 1) / instance->chunk;
    mine->dq = p->wants >> FA_GRAD_Q & 1 ? instance->dq_bytes(p) : 0;
}

/* Sequences: how long they are is known at the launch, and each may have all rows that there are. The queue comes
 * first, then scratch, then rows of dq: a set a thread at least, and as many as a sequence alone has use for. */
static fa_answer plan_sequences(const fa_problem *problem, size_t limit, fa_plan *plan, fa_why *why) {
    const fa_backward *p = &problem->backward;
    own *mine = (own *)plan->own;
    const size_t queue = fa_cpu_queue_bytes(problem), heads = (size_t)p->forward.heads_kv;
    size_t threads = (size_t)problem->threads;
    while (threads > 1 && queue + threads * (mine->scratch + mine->dq) > limit) threads--;
    if (queue + threads * (mine->scratch + mine->dq) > limit)
        return fa_because(why, FA_REFUSES, FA_WHY_SUM_WORKSPACE, 0, 0, 0);
    const size_t beside = heads ? (4 * threads + heads - 1) / heads : 0, fixed = queue + threads * mine->scratch;
    size_t sets = heads * (1 + beside);
    if (sets < threads) sets = threads;
    if (mine->dq && sets > (limit - fixed) / mine->dq) sets = (limit - fixed) / mine->dq;
    plan->threads = (int)threads;
    plan->blocks = plan->threads;
    plan->workspace_bytes = fixed + sets * mine->dq;
    return FA_TAKES;
}

static fa_answer plan(const fa_problem *problem, const fa_device_info *device, fa_plan *plan, fa_why *why) {
    const fa_backward *p = &problem->backward;
    const fa_forward *f = &p->forward;
    own *mine = (own *)plan->own;
    if (fa_simd_takes_scale(f, why) != FA_TAKES) return FA_REFUSES;
    const fa_answer answer = fa_isa_choose(device, &mine->isa, why);
    if (answer != FA_TAKES || problem->empty) return answer;
    mine->scratch = instance_of(mine, p)->scratch_bytes(problem);
    measure(p, mine);
    if (problem->sequences.given) return plan_sequences(problem, device->workspace_limit, plan, why);
    const fa_entry entry = fa_cpu_dense(problem);
    int threads = useful_threads(problem->threads, (double)f->batch * work_of(f, &entry));
    while (!cut(p, device->workspace_limit, threads, mine)) {
        if (threads == 1) return fa_because(why, FA_REFUSES, FA_WHY_SUM_WORKSPACE, 0, 0, 0);
        threads--;
    }
    const int64_t heads = f->batch * f->heads_kv;
    const size_t sums = mine->by_heads     ? (size_t)threads
                        : mine->beside > 1 ? (size_t)(heads * (1 + mine->beside))
                                           : (size_t)heads;
    plan->threads = threads;
    plan->blocks = mine->by_heads ? heads : heads * mine->beside;
    plan->workspace_bytes = (size_t)threads * mine->scratch + sums * mine->dq;
    return FA_TAKES;
}

/* Shared by the threads of a launch. The workspace holds the scratch of each thread, then rows of dq: one set a thread
 * by heads, else the sums of all kv heads, then the shares of each chunk that is beside others. */
typedef struct shared {
    const fa_problem *problem;
    const fa_backward *p;
    const own *own;
    const fa_gradient_instance *instance;
    char *scratch, *sums;
    int64_t first, beside; /* chunks of this round */
} shared;

static char *scratch_of(const shared *s, int worker) { return s->scratch + (size_t)worker * s->own->scratch; }

static char *sums_of(const shared *s, int64_t index) {
    return s->own->dq ? s->sums + (size_t)index * s->own->dq : NULL;
}

/* The rows of dq that a chunk of this round has for itself; those of the head where it is alone. */
static char *share_of(const shared *s, int64_t head, int64_t beside) {
    const int64_t heads = s->p->forward.batch * s->p->forward.heads_kv;
    return sums_of(s, s->own->beside > 1 ? heads + head * s->own->beside + beside : head);
}

/* All chunks of a kv head; `dq`: room for its rows, or NULL. */
static void head_gradients(const fa_problem *problem, const own *mine, int64_t head, char *dq, char *scratch) {
    const fa_backward *p = &problem->backward;
    const fa_forward *f = &p->forward;
    const fa_gradient_instance *instance = instance_of(mine, p);
    fa_gradient_task task = {head / f->heads_kv, head % f->heads_kv, 0, dq, true};
    if (dq) memset(dq, 0, mine->dq);
    for (; task.chunk < mine->chunks; task.chunk++) instance->chunk_gradients(problem, &task, scratch);
    if (dq) instance->write_dq(p, task.batch, task.head_kv, dq, 0, fa_group(f) * f->seq_q, scratch);
}

static void head_step(const void *context, int64_t index, int worker) {
    const shared *s = context;
    head_gradients(s->problem, s->own, index, sums_of(s, worker), scratch_of(s, worker));
}

static void chunk_step(const void *context, int64_t index, int worker) {
    const shared *s = context;
    const fa_forward *f = &s->p->forward;
    const int64_t head = index % (f->batch * f->heads_kv), n = index / (f->batch * f->heads_kv);
    const fa_gradient_task task = {head / f->heads_kv, head % f->heads_kv, s->first + n, share_of(s, head, n),
                                   s->own->beside == 1};
    s->instance->chunk_gradients(s->problem, &task, scratch_of(s, worker));
}

/* Tiles of the queries of a kv head. */
static int64_t tiles_of(const shared *s) {
    const fa_forward *f = &s->p->forward;
    return fa_group(f) * ((f->seq_q + s->instance->tile - 1) / s->instance->tile);
}

/* Rows of dq of a step: one tile of one query head, as rows of its kv head; `row` is the query it begins with. */
typedef struct tile_rows {
    int64_t head, row, begin, end;
} tile_rows;

static tile_rows tile_of(const shared *s, int64_t index) {
    const fa_forward *f = &s->p->forward;
    const int64_t a_head = (f->seq_q + s->instance->tile - 1) / s->instance->tile, tile = index % tiles_of(s);
    tile_rows t = {.head = index / tiles_of(s), .row = tile % a_head * s->instance->tile};
    const int64_t rows = f->seq_q - t.row < s->instance->tile ? f->seq_q - t.row : s->instance->tile;
    t.begin = tile / a_head * f->seq_q + t.row;
    t.end = t.begin + rows;
    return t;
}

static void sum_step(const void *context, int64_t index, int worker) {
    (void)worker;
    const shared *s = context;
    const tile_rows t = tile_of(s, index);
    for (int64_t n = 0; n < s->beside; n++) {
        int64_t begin, end;
        s->instance->queries(s->p, s->first + n, &begin, &end);
        if (t.row < begin || t.row >= end) continue;
        s->instance->add_dq(s->p, sums_of(s, t.head), share_of(s, t.head, n), t.begin, t.end);
    }
}

static void write_step(const void *context, int64_t index, int worker) {
    const shared *s = context;
    const tile_rows t = tile_of(s, index);
    const int64_t heads_kv = s->p->forward.heads_kv;
    s->instance->write_dq(s->p, t.head / heads_kv, t.head % heads_kv, sums_of(s, t.head), t.begin, t.end,
                          scratch_of(s, worker));
}

static void bias_step(const void *context, int64_t index, int worker) {
    const shared *s = context;
    s->instance->bias_gradient(s->problem, index, scratch_of(s, worker));
}

static void launch_chunks(shared *s, int threads, const fa_host *host) {
    const int64_t heads = s->p->forward.batch * s->p->forward.heads_kv;
    if (s->own->dq) memset(s->sums, 0, (size_t)heads * s->own->dq);
    for (; s->first < s->own->chunks; s->first += s->beside) {
        s->beside = s->own->chunks - s->first < s->own->beside ? s->own->chunks - s->first : s->own->beside;
        host->loop(threads, heads * s->beside, chunk_step, s);
        if (s->own->dq && s->own->beside > 1) host->loop(threads, heads * tiles_of(s), sum_step, s);
    }
    if (s->own->dq) host->loop(threads, heads * tiles_of(s), write_step, s);
}

/* dq, dk and dv of a dense problem. */
static void launch_pairs(shared *s, int threads, const fa_host *host) {
    const fa_forward *f = &s->p->forward;
    if (s->own->by_heads)
        host->loop(threads, f->batch * f->heads_kv, head_step, s);
    else
        launch_chunks(s, threads, host);
}

/* Sequences that share the threads, a kv head of one a task. */
typedef struct pool {
    const shared *all;
    const fa_cpu_queued *queue;
    int64_t entries;
} pool;

static void pool_step(const void *context, int64_t index, int worker) {
    const pool *s = context;
    const fa_cpu_queued *owner = fa_cpu_owner(s->queue, s->entries, index);
    own mine = *s->all->own;
    fa_problem alone;
    fa_cpu_alone(s->all->problem, &owner->entry, &alone);
    measure(&alone.backward, &mine);
    head_gradients(&alone, &mine, index - owner->first, sums_of(s->all, worker), scratch_of(s->all, worker));
}

/* One sequence by all threads; false where the workspace is too small for it. */
static bool launch_alone(const shared *all, const fa_cpu_queued *sequence, const fa_plan *plan, const fa_host *host) {
    own mine = *all->own;
    fa_problem alone;
    fa_cpu_alone(all->problem, &sequence->entry, &alone);
    measure(&alone.backward, &mine);
    const int threads = useful_threads(plan->threads, sequence->work);
    const size_t left = plan->workspace_bytes - fa_cpu_queue_bytes(all->problem);
    if (!cut(&alone.backward, left, threads, &mine)) return false;
    shared s = *all;
    s.problem = &alone, s.p = &alone.backward, s.own = &mine;
    s.sums = s.scratch + (size_t)threads * mine.scratch;
    launch_pairs(&s, threads, host);
    return true;
}

/* A sequence whose kv head is over a quarter of a thread's share would leave threads without work at the end: it has
 * all of them for itself. Which way a sequence goes changes no bit. */
static void launch_sequences(const shared *all, const fa_plan *plan, const fa_launch *launch) {
    const fa_problem *problem = all->problem;
    const fa_forward *f = &problem->forward;
    fa_cpu_queued *queue = launch->workspace;
    const int64_t entries = fa_cpu_entries(problem);
    fa_cpu_walk walk = {0, 0};
    double total = 0;
    for (int64_t b = 0; b < entries; b++) {
        queue[b].entry = fa_cpu_next(problem, b, &walk);
        queue[b].work = work_of(f, &queue[b].entry.entry);
        fa_cpu_clear(problem, &queue[b].entry);
        total += queue[b].work;
    }
    const int threads = useful_threads(plan->threads, total);
    int64_t tasks = 0, queued = 0; /* entries that the call came to before it was stopped */
    for (; queued < entries && !fa_stopped(problem); queued++) {
        const int64_t b = queued;
        const fa_entry *e = &queue[b].entry.entry;
        const bool large = threads > 1 && queue[b].work * 4 * threads > total * (double)f->heads_kv;
        queue[b].first = tasks;
        if (!e->seq_q && !e->seq_k) continue;
        if (!large || !launch_alone(all, &queue[b], plan, launch->host)) tasks += f->heads_kv;
    }
    const pool s = {all, queue, queued};
    launch->host->loop(threads, tasks, pool_step, &s);
}

static fa_code launch(const fa_problem *problem, const fa_plan *plan, const fa_launch *launch) {
    const fa_backward *p = &problem->backward;
    const own *mine = (const own *)plan->own;
    const fa_host *host = launch->host;
    const bool sequences = problem->sequences.given;
    char *scratch = (char *)launch->workspace + (sequences ? fa_cpu_queue_bytes(problem) : 0);
    shared s = {problem, p, mine, instance_of(mine, p), scratch, scratch + (size_t)plan->threads * mine->scratch, 0, 0};
    if (p->wants & (1 << FA_GRAD_Q | 1 << FA_GRAD_K | 1 << FA_GRAD_V)) {
        if (sequences)
            launch_sequences(&s, plan, launch);
        else
            launch_pairs(&s, plan->threads, host);
    }
    if (p->wants >> FA_GRAD_BIAS & 1) host->loop(plan->threads, s.instance->bias_parts(p), bias_step, &s);
    if (p->wants >> FA_GRAD_SINKS & 1) host->loop(plan->threads, p->forward.heads, fa_sink_gradient, problem);
    return FA_OK;
}

extern const fa_kernel fa_kernel_cpu_simd_backward;
FA_EXPORT const fa_kernel fa_kernel_cpu_simd_backward = {
    .abi = FA_KERNEL_ABI,
    .op = FA_BACKWARD,
    .device = FA_CPU,
    .name = "cpu_simd_backward",
    .summary = "AVX-512, AVX2 or portable vectors on all cores, five products a pair",
    .dtypes = 1 << FA_F16 | 1 << FA_BF16 | 1 << FA_F32 | 1 << FA_F64,
    .takes = FA_WITH_BIAS | FA_WITH_MASK | FA_WITH_SINKS | FA_WITH_SOFTCAP | FA_WITH_WINDOW | FA_WITH_HEAD_DIM_V |
             FA_WITH_INTERVALS | FA_WITH_DLSE | FA_WITH_DBIAS | FA_WITH_DSINKS | FA_WITH_ACCUMULATE | FA_WITH_ORDERED |
             FA_WITH_ALIBI | FA_WITH_DROPOUT | FA_WITH_LENGTHS | FA_WITH_RANGES,
    .plan = plan,
    .launch = launch,
};

#endif
