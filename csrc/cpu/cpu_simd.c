/* cpu_simd: attention on vector units and cores, one pass over the keys (online softmax; Milakov & Gimelshein 2018,
 * Dao et al. 2022).
 *
 * A task is a tile of query rows of one (batch, key/value head); threads take tasks in turn. Inside a task the
 * lanes of a vector are query rows (simd_gemm.h), so any head_dim, stride and mask costs the same kernel; tasks of few
 * rows, as in decoding, read K and V along their rows instead (simd_narrow.h). float16 and bfloat16 are converted to
 * float32 as tiles are read; sums are float32, for float64 input float64 throughout. Neither the task that a row falls
 * into nor the thread that takes it changes a bit of the result.
 *
 * Instances: AVX-512 (F, BW, DQ, VL), AVX2 + FMA + F16C, and the compiler's own vectors elsewhere, each for float and
 * double; for bfloat16 also AVX512-BF16, whose products take pairs of bfloat16 as they are (simd_bf16.h), and AMX,
 * which multiplies tiles of them (simd_amx.h). The best one this CPU has is taken;
 * FA_EXT_CPU_ISA=amxbf16|avx512bf16|avx512|avx2|generic in the environment, as it is when fa_ext is imported, forces
 * one.
 *
 * Bench: python -m bench measure --preset cpu --kernels cpu_simd
 *
 * @beside simd_isa.c
 * @flags -ffp-contract=fast
 * @instance amxbf16_f32 -DFA_CPU_VECTOR_BYTES=64 -DFA_CPU_REAL_BYTES=4 -DFA_CPU_BF16=1 -DFA_CPU_AMX=1
 * @instance avx512bf16_f32 -DFA_CPU_VECTOR_BYTES=64 -DFA_CPU_REAL_BYTES=4 -DFA_CPU_BF16=1
 * @instance avx512_f32 -DFA_CPU_VECTOR_BYTES=64 -DFA_CPU_REAL_BYTES=4
 * @instance avx512_f64 -DFA_CPU_VECTOR_BYTES=64 -DFA_CPU_REAL_BYTES=8
 * @instance avx2_f32 -DFA_CPU_VECTOR_BYTES=32 -DFA_CPU_REAL_BYTES=4
 * @instance avx2_f64 -DFA_CPU_VECTOR_BYTES=32 -DFA_CPU_REAL_BYTES=8
 * @instance generic_f32 -DFA_CPU_VECTOR_BYTES=16 -DFA_CPU_REAL_BYTES=4
 * @instance generic_f64 -DFA_CPU_VECTOR_BYTES=16 -DFA_CPU_REAL_BYTES=8
 *
 * @tune FA_CPU_MR=4 of 1 2 3 4
 * @tune FA_CPU_NR=6 of 2 3 4 6 8 12
 * @tune FA_CPU_TILE_N=96 of 32 48 64 96 128 192
 * @tune FA_CPU_TILE_M=256 of 64 128 256 512
 */
#ifdef FA_INSTANCE

/* ---- configuration of an instance: the tuner's where it has run, else these ---- */

#include "cpu/simd_tuned.h"

#if FA_CPU_AMX /* the tuner's are of float32 */
/* Blocks of 32 rows, and tiles of keys of which K, V^T, S^T and P^T stay in 48 KB of first-level cache beside the
 * block. Xeon with AMX, one core, S 2048 D64: 13.4 ms; 17.0 with 96 keys, 17.3 with 128, 17.0 with 64 rows. More rows
 * share V's transposition: D128 46.1 ms with 512, 49.0 with 256. */
#undef FA_CPU_MR
#undef FA_CPU_TILE_N
#undef FA_CPU_TILE_M
#define FA_CPU_MR     2
#define FA_CPU_TILE_N 64
#define FA_CPU_TILE_M 512
#endif
/* FA_CPU_NR, value columns in a register block: by default what fits the registers, simd_gemm.h. */
/* Keys a tile: scores of a block and a tile of K or V share the first-level cache. Flat: 48 to 192 keys stay within 2%
 * (Zen 5, float32, head_dim 64 to 256). */
#ifndef FA_CPU_TILE_N
#define FA_CPU_TILE_N 96
#endif
/* Query rows a task at most: they share each conversion of K and V, and its way from the outer caches. Zen 5, bfloat16,
 * head_dim 64: 230, 242, 249, 252 GFLOP/s a core with 64, 128, 256, 512 rows; float32 255 with any. */
#ifndef FA_CPU_TILE_M
#define FA_CPU_TILE_M 256
#endif
_Static_assert(FA_CPU_TILE_N >= 1 && FA_CPU_TILE_N <= 4096, "FA_CPU_TILE_N is 1 to 4096 keys");
#ifdef FA_CPU_NR
_Static_assert(FA_CPU_NR >= 1 && FA_CPU_NR <= 16, "FA_CPU_NR is 1 to 16 value columns");
#endif

#include "cpu/simd_target.h"
#if FA_CPU_HAS_INSTANCE
#include "cpu/simd_tile.h"
FA_CPU_TARGET_END
#endif

#else /* the host part */

#include <math.h>
#include <string.h>

#include "cpu/cpu_simd.h"
#include "cpu/element.h"
#include "cpu/simd_isa.h"

static const fa_simd_instance *const instances[FA_ISA_COUNT][2] = FA_ISA_TABLE(fa_simd);

static const fa_simd_instance *instance_of(int isa, fa_dtype dtype) {
#if defined(__x86_64__)
    if (isa == FA_ISA_AMX_BF16 && dtype == FA_BF16) return &fa_simd_amxbf16_f32;
    if (isa == FA_ISA_AVX512_BF16 && dtype == FA_BF16) return &fa_simd_avx512bf16_f32;
#endif
    return instances[isa][dtype == FA_F64];
}

const char *fa_cpu_simd_isa(const fa_device_info *cpu) {
    int isa;
    fa_why why;
    return fa_isa_choose(cpu, &isa, &why) == FA_TAKES ? fa_isa_name((fa_isa)isa) : NULL;
}

/* ---- plan, launch ---- */

/* The plan's own part. */
typedef struct own {
    int isa;
    int tile_m;     /* of sequences: at most */
    int64_t tiles;  /* of a key/value head; of sequences: known at the launch */
    size_t queue;   /* bytes of the queue of sequences */
    size_t scratch; /* bytes a thread */
} own;
_Static_assert(sizeof(own) <= FA_PLAN_OWN, "");

/* A second thread is worth waking for WORK_OF_TWO multiplications, some 20 us of one core's, each further one for
 * WORK_PER_THREAD. Xeon, two cores, B1 H8 D64 float32, calls in a row, the median with one thread and with two: seq 32
 * (1.0e6) 29 and 24 us, 48 (2.4e6) 56 and 37, 64 (4.2e6) 83 and 55. Where the other core is busy, a team's end can wait
 * 8 ms for a thread: at seq 32 the median falls from 30 to 23 us there and the mean rises from 32 to 40. */
#define WORK_OF_TWO     1e6
#define WORK_PER_THREAD 8e6

/* Multiplications of an entry whose rows all see as many keys as the query in the middle. */
static double work_of(const fa_forward *p, const fa_entry *e) {
    return fa_cpu_pairs(p, e) * (p->head_dim + p->head_dim_v);
}

static int useful_threads(int threads, double work) {
    double useful = 1 + work / WORK_PER_THREAD;
    if (useful < 2 && work >= WORK_OF_TWO) useful = 2;
    return threads > useful ? (int)useful : threads;
}

static int64_t tiles_of(int64_t rows, int tile_m) { return (rows + tile_m - 1) / tile_m; }

static fa_answer plan(const fa_problem *problem, const fa_device_info *device, fa_plan *plan, fa_why *why) {
    const fa_forward *p = &problem->forward;
    own *mine = (own *)plan->own;
    if (fa_simd_takes_scale(p, why) != FA_TAKES) return FA_REFUSES;
    const fa_answer answer = fa_isa_choose(device, &mine->isa, why);
    if (answer != FA_TAKES || problem->empty) return answer;
    const fa_simd_instance *instance = instance_of(mine->isa, p->dtype);
    const int64_t rows = p->heads / p->heads_kv * p->seq_q, groups = p->batch * p->heads_kv;
    const bool sequences = problem->sequences.given; /* how many rows and keys they have is known at the launch */
    int threads = problem->threads, tile_m = instance->tile_m;
    if (!sequences) {
        fa_cpu_walk walk = {0, 0};
        const fa_cpu_entry entry = fa_cpu_next(problem, 0, &walk);
        threads = useful_threads(threads, (double)p->batch * work_of(p, &entry.entry));
        /* The largest tile that leaves each thread a few tasks. */
        while (tile_m > instance->block_rows && groups * tiles_of(rows, tile_m) < (int64_t)4 * threads)
            tile_m -= instance->block_rows;
    }
    /* The smallest tile has scratch below a megabyte, the least that the limit can be. */
    while (tile_m > instance->block_rows && instance->scratch_bytes(problem, tile_m) > device->workspace_limit)
        tile_m -= instance->block_rows;
    mine->tile_m = tile_m < rows ? tile_m : (int)rows;
    mine->tiles = tiles_of(rows, mine->tile_m);
    mine->scratch = instance->scratch_bytes(problem, mine->tile_m);
    mine->queue = sequences ? fa_cpu_queue_bytes(problem) : 0;
    plan->blocks = groups * mine->tiles;
    if (threads > plan->blocks && !sequences) threads = (int)plan->blocks;
    const size_t fitting = device->workspace_limit / mine->scratch;
    if ((size_t)threads > fitting) threads = fitting ? (int)fitting : 1;
    plan->threads = threads;
    plan->workspace_bytes = mine->queue + (size_t)threads * mine->scratch;
    return FA_TAKES;
}

/* Shared by the threads of a launch. */
typedef struct shared {
    const fa_problem *problem;
    const own *own;
    const fa_cpu_queued *queue; /* NULL: a dense call */
    int64_t entries;
    int tile_m;
    char *scratch;
} shared;

static void run_task(const void *context, int64_t index, int worker) {
    const shared *s = context;
    const fa_forward *p = &s->problem->forward;
    fa_cpu_walk walk = {0, 0};
    fa_cpu_entry entry;
    int64_t tiles = s->own->tiles;
    if (s->queue) {
        const fa_cpu_queued *owner = fa_cpu_owner(s->queue, s->entries, index);
        entry = owner->entry;
        index -= owner->first;
        tiles = tiles_of(p->heads / p->heads_kv * entry.entry.seq_q, s->tile_m);
    } else {
        entry = fa_cpu_next(s->problem, index / tiles / p->heads_kv, &walk);
        index -= entry.batch * p->heads_kv * tiles;
    }
    const int64_t rows = p->heads / p->heads_kv * entry.entry.seq_q, first = (tiles - 1 - index % tiles) * s->tile_m;
    const fa_simd_task task = {
        .entry = &entry,
        .head_kv = index / tiles,
        .first_row = first,
        .rows = (int)(rows - first < s->tile_m ? rows - first : s->tile_m),
    };
    instance_of(s->own->isa, p->dtype)->attend(s->problem, &task, s->scratch + (size_t)worker * s->own->scratch);
}

/* Rows that are no query: 0 and -inf. */
static void write_idle_rows(const fa_problem *problem, const fa_cpu_entry *e) {
    const fa_forward *p = &problem->forward;
    const int64_t *to = p->out.stride, begin = e->entry.first_q, end = begin + e->entry.seq_q;
    for (int64_t row = e->rows.begin; row < e->rows.end; row++) {
        if (row == begin && begin < end) row = end;
        if (row == e->rows.end || fa_stopped(problem)) break;
        for (int64_t head = 0; head < p->heads; head++) {
            for (int d = 0; d < p->head_dim_v; d++)
                fa_store(p->out.data, p->out_dtype, e->batch * to[0] + head * to[1] + row * to[2] + d * to[3], 0);
            if (p->lse.data) fa_store(p->lse.data, p->lse_dtype, fa_at(&p->lse, e->batch, head, row, 0), -INFINITY);
        }
    }
}

/* Sequences: their tasks follow from what they turn out to be. */
static fa_code launch_sequences(const fa_problem *problem, const fa_plan *plan, const fa_launch *launch) {
    const fa_forward *p = &problem->forward;
    const own *mine = (const own *)plan->own;
    const int64_t entries = fa_cpu_entries(problem), group = p->heads / p->heads_kv;
    const int block_rows = instance_of(mine->isa, p->dtype)->block_rows;
    fa_cpu_queued *queue = launch->workspace;
    fa_cpu_walk walk = {0, 0};
    double work = 0;
    for (int64_t b = 0; b < entries; b++) {
        queue[b].entry = fa_cpu_next(problem, b, &walk);
        write_idle_rows(problem, &queue[b].entry);
        work += queue[b].work = work_of(p, &queue[b].entry.entry);
    }
    const int threads = useful_threads(plan->threads, work);
    int tile_m = mine->tile_m;
    int64_t tasks;
    for (;; tile_m -= block_rows) {
        tasks = 0;
        for (int64_t b = 0; b < entries; b++) {
            queue[b].first = tasks;
            tasks += p->heads_kv * tiles_of(group * queue[b].entry.entry.seq_q, tile_m);
        }
        if (tile_m <= block_rows || tasks >= (int64_t)4 * threads) break;
    }
    const shared s = {problem, mine, queue, entries, tile_m, (char *)launch->workspace + mine->queue};
    launch->host->loop(threads, tasks, run_task, &s);
    return FA_OK;
}

static fa_code launch(const fa_problem *problem, const fa_plan *plan, const fa_launch *launch) {
    const own *mine = (const own *)plan->own;
    if (problem->sequences.given) return launch_sequences(problem, plan, launch);
    const shared s = {problem, mine, NULL, 0, mine->tile_m, launch->workspace};
    launch->host->loop(plan->threads, plan->blocks, run_task, &s);
    return FA_OK;
}

/* ---- for tests ---- */

/* y = 2^x or tanh(x) by one instance; false when this platform or CPU lacks it. `count` is a multiple of 16. */
FA_EXPORT bool fa_cpu_simd_apply(const char *isa_name, const char *function, bool twice, const void *x, void *y,
                                 size_t count);
bool fa_cpu_simd_apply(const char *isa_name, const char *function, bool twice, const void *x, void *y, size_t count) {
    for (int isa = 0; isa < FA_ISA_COUNT; isa++) {
        if (strcmp(isa_name, fa_isa_name((fa_isa)isa)) != 0 || !fa_isa_here((fa_isa)isa)) continue;
        const fa_simd_instance *instance = instances[isa][twice];
        (strcmp(function, "tanh") == 0 ? instance->tanh : instance->exp2)(x, y, count);
        return true;
    }
    return false;
}

/* ---- the kernel ---- */

extern const fa_kernel fa_kernel_cpu_simd;
FA_EXPORT const fa_kernel fa_kernel_cpu_simd = {
    .abi = FA_KERNEL_ABI,
    .op = FA_FORWARD,
    .device = FA_CPU,
    .name = "cpu_simd",
    .summary = "AVX-512, AVX2 or portable vectors on all cores, online softmax",
    .dtypes = 1 << FA_F16 | 1 << FA_BF16 | 1 << FA_F32 | 1 << FA_F64,
    .takes = FA_WITH_BIAS | FA_WITH_MASK | FA_WITH_SINKS | FA_WITH_SOFTCAP | FA_WITH_WINDOW | FA_WITH_HEAD_DIM_V |
             FA_WITH_ALIBI | FA_WITH_INTERVALS | FA_WITH_LENGTHS | FA_WITH_PAGES | FA_WITH_RANGES | FA_WITH_POSITIONS |
             FA_WITH_OUT_FLOAT32 | FA_WITH_DROPOUT | FA_WITH_MAX_LOGIT,
    .plan = plan,
    .launch = launch,
};

#endif
