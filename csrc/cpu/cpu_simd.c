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
 * double. The best one this CPU has is taken; FA_EXT_CPU_ISA=avx512|avx2|generic in the environment, as it is when
 * fa_ext is imported, forces one.
 *
 * Bench: python -m bench measure --preset cpu --rows cpu_simd
 *
 * @flags -ffp-contract=fast
 * @instance avx512_f32 -DFA_CPU_VECTOR_BYTES=64 -DFA_CPU_REAL_BYTES=4
 * @instance avx512_f64 -DFA_CPU_VECTOR_BYTES=64 -DFA_CPU_REAL_BYTES=8
 * @instance avx2_f32 -DFA_CPU_VECTOR_BYTES=32 -DFA_CPU_REAL_BYTES=4
 * @instance avx2_f64 -DFA_CPU_VECTOR_BYTES=32 -DFA_CPU_REAL_BYTES=8
 * @instance generic_f32 -DFA_CPU_VECTOR_BYTES=16 -DFA_CPU_REAL_BYTES=4
 * @instance generic_f64 -DFA_CPU_VECTOR_BYTES=16 -DFA_CPU_REAL_BYTES=8
 */
#ifdef FA_INSTANCE

/* ---- configuration of an instance: the tuner's where it has run, else these ---- */

#include "cpu/simd_tuned.h"

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

#include <string.h>

#include "cpu/cpu_simd.h"
#include "cpu/simd_isa.h"

static const fa_simd_instance *const instances[FA_ISA_COUNT][2] = FA_ISA_TABLE(fa_simd);

static const fa_simd_instance *instance_of(int isa, fa_dtype dtype) { return instances[isa][dtype == FA_F64]; }

const char *fa_cpu_simd_isa(const fa_device_info *cpu) {
    int index;
    fa_why why;
    return choose_isa(cpu, &index, &why) == FA_TAKES ? isas[index].name : NULL;
}

/* ---- plan, launch ---- */

/* The plan's own part. */
typedef struct own {
    int isa;
    int tile_m;
    int64_t tiles;  /* of a key/value head */
    size_t scratch; /* bytes a thread */
} own;
_Static_assert(sizeof(own) <= FA_PLAN_OWN, "");

/* A thread more is worth waking for this many multiplications, some 90 us of one core's. Two threads took of the time
 * of one, calls in a row, B1 H8 D64 float32 on 2 Zen 5 cores: 0.73 at seq 48 (2.4e6), 0.74 at 64 (4.2e6), 0.51 at 96
 * and at 128 (9.4e6, 16.8e6). Where the other core is busy, a team's end can wait 8 ms for a thread: smaller calls gain
 * too little for that. */
#define WORK_PER_THREAD 8e6

/* Multiplications of a call whose rows all see as many keys as the query in the middle. */
static double work_of(const fa_forward *p) {
    const int64_t centre = p->seq_q / 2 + p->diagonal, low = centre - p->left, high = centre + p->right + 1;
    const int64_t begin = low > p->key_begin ? low : p->key_begin, end = high < p->key_end ? high : p->key_end;
    const double rows = (double)p->batch * (double)p->heads * (double)p->seq_q;
    return end > begin ? rows * (double)(end - begin) * (p->head_dim + p->head_dim_v) : 0;
}

static fa_answer plan(const fa_problem *problem, const fa_device_info *device, fa_plan *plan, fa_why *why) {
    const fa_forward *p = &problem->forward;
    own *mine = (own *)plan->own;
    if (fa_simd_takes_scale(p, why) != FA_TAKES) return FA_REFUSES;
    const fa_answer answer = fa_isa_choose(device, &mine->isa, why);
    if (answer != FA_TAKES || problem->empty) return answer;
    const fa_simd_instance *instance = instance_of(mine->isa, p->dtype);
    const int64_t rows = p->heads / p->heads_kv * p->seq_q, groups = p->batch * p->heads_kv;
    const double useful = 1 + work_of(p) / WORK_PER_THREAD;
    int threads = problem->threads, tile_m = instance->tile_m;
    if (threads > useful) threads = (int)useful;
    /* The largest tile that leaves each thread a few tasks. */
    while (tile_m > instance->block_rows && groups * ((rows + tile_m - 1) / tile_m) < (int64_t)4 * threads)
        tile_m -= instance->block_rows;
    /* The smallest tile has scratch below a megabyte, the least that the limit can be. */
    while (tile_m > instance->block_rows && instance->scratch_bytes(problem, tile_m) > device->workspace_limit)
        tile_m -= instance->block_rows;
    mine->tile_m = tile_m < rows ? tile_m : (int)rows;
    mine->tiles = (rows + mine->tile_m - 1) / mine->tile_m;
    mine->scratch = instance->scratch_bytes(problem, mine->tile_m);
    plan->blocks = groups * mine->tiles;
    if (threads > plan->blocks) threads = (int)plan->blocks;
    const size_t fitting = device->workspace_limit / mine->scratch;
    if ((size_t)threads > fitting) threads = fitting ? (int)fitting : 1;
    plan->threads = threads;
    plan->workspace_bytes = (size_t)threads * mine->scratch;
    return FA_TAKES;
}

/* What the threads of a launch share. */
typedef struct shared {
    const fa_problem *problem;
    const own *own;
    char *workspace;
} shared;

static void run_task(const void *context, int64_t index, int worker) {
    const shared *s = context;
    const fa_forward *p = &s->problem->forward;
    const own *mine = s->own;
    const int64_t rows = p->heads / p->heads_kv * p->seq_q;
    const int64_t group = index / mine->tiles, first = (mine->tiles - 1 - index % mine->tiles) * mine->tile_m;
    const fa_simd_task task = {
        .batch = group / p->heads_kv,
        .head_kv = group % p->heads_kv,
        .first_row = first,
        .rows = (int)(rows - first < mine->tile_m ? rows - first : mine->tile_m),
    };
    instance_of(mine->isa, p->dtype)->attend(s->problem, &task, s->workspace + (size_t)worker * mine->scratch);
}

static fa_code launch(const fa_problem *problem, const fa_plan *plan, const fa_launch *launch) {
    const shared s = {problem, (const own *)plan->own, launch->workspace};
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
             FA_WITH_ALIBI,
    .plan = plan,
    .launch = launch,
};

#endif
