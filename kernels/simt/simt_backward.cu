/* simt_backward: gradients on the ordinary floating-point units; the kernel that takes every call on float types.
 *
 *     rows:     LSE and delta = dout . out - dlse of each query, to workspace
 *     queries:  dq, a tile of queries a thread block
 *     keys:     dk and dv, a tile of keys of a kv head a thread block, over all query heads of its group
 *     bias:     dbias, a tile of its own elements a thread block, over all that it is broadcast along
 *     sinks:    dsinks, a head a thread block
 *
 * S and dP are worked out anew in each: seven products instead of five, but no atomics and no sums in memory, so that
 * the bits are the same from run to run and do not depend on the batch. simt/backward.cuh says which thread holds what.
 *
 * Whole dense surface: float16, bfloat16, float32; any strides; GQA, causal, window, softcap, bias, boolean mask,
 * ALiBi, dropout, sinks, gradients of bias and sinks and through the LSE, accumulation; head_dim and head_dim_v 1..256
 * apart; zero sizes. Limits: no tensor cores, element loads; 8 bytes of workspace a query row, heads in groups where
 * they do not fit.
 *
 * @instance f16 -DSIMT_TYPE=__half
 * @instance bf16 -DSIMT_TYPE=__nv_bfloat16
 * @instance f32 -DSIMT_TYPE=float
 */
#include "common/launch.cuh" // fa_own, FA_CUDA_TRY
#include "fa.h"              // fa_backward, fa_kernel
#include "philox.h"          // fa_dropout_scale
#include "simt/backward.cuh" // Tile, Work, the kernels

namespace simt_backward {

/* By head_dim, the first that fits: the larger tile, then one within the 99 KB a thread block of sm_86 and sm_89. */
constexpr Tile kTiles[] = {
    {64, 64},  //  87 KB
    {128, 64}, // 153 KB
    {128, 32}, //  73 KB
    {256, 32}, // 138 KB
    {256, 16}, //  68 KB
};
constexpr int kTileCount = sizeof(kTiles) / sizeof(kTiles[0]);

/* The plan's own part. */
struct Own {
    int tile;      // of kTiles
    int64_t pairs; // batch entries times kv heads whose rows the workspace holds
};

/* One a dtype, each compiled as an instance of this file. */
using Launcher = fa_code(const fa_problem &, const fa_plan &, const fa_launch &);
Launcher launch_f16, launch_bf16, launch_f32;

} // namespace simt_backward

#ifdef FA_INSTANCE

/* ---- one dtype's kernels ---- */

namespace simt_backward {

template <int kIndex> struct Config { static constexpr Tile tile = kTiles[kIndex]; };

/* Launches a kernel on `count` tasks. */
template <class Kernel, class... Args>
fa_code start(Kernel *kernel, int64_t count, size_t smem_bytes, const fa_launch &launch, const Args &...args) {
    return fa_start(kernel, count, kThreads, smem_bytes, launch, args...);
}

inline int64_t tiles(int64_t length, int64_t block) { return (length + block - 1) / block; }

/* Everything that works on the rows of work.pairs. */
template <typename T, class C>
fa_code launch_pairs(const fa::GradientParams &p, const Work &work, const fa_plan &plan, const fa_launch &launch) {
    const fa::AttentionParams &f = p.forward;
    const int64_t block = C::tile.block, heads = work.pairs * work.group;
    FA_TRY(start(rows_kernel<T>, tiles(heads * f.seq_q, kThreads), 0, launch, p, work));
    if (p.wants >> FA_GRAD_Q & 1)
        FA_TRY(start(queries_kernel<T, C>, heads * tiles(f.seq_q, block), plan.smem_bytes, launch, p, work));
    if (p.wants >> FA_GRAD_K & 3)
        FA_TRY(start(keys_kernel<T, C>, work.pairs * tiles(f.seq_k, block), plan.smem_bytes, launch, p, work));
    return FA_OK;
}

template <typename T, class C>
fa_code launch_bias(const fa::GradientParams &p, const Work &work, const fa_plan &plan, const fa_launch &launch) {
    const fa::AttentionParams &f = p.forward;
    const int64_t lengths[4] = {f.batch, f.heads, tiles(f.seq_q, C::tile.block), tiles(f.seq_k, C::tile.block)};
    int64_t count = 1;
    for (int axis = 0; axis < 4; ++axis) count *= p.bias_sums >> axis & 1 ? 1 : lengths[axis];
    return start(bias_kernel<T, C>, count, plan.smem_bytes, launch, p, work);
}

template <typename T, int kIndex>
fa_code launch_tile(const fa_problem &problem, const fa_plan &plan, const fa_launch &launch) {
    if constexpr (kIndex < kTileCount) {
        const Own &own = fa_own<Own>(&plan);
        if (own.tile != kIndex) return launch_tile<T, kIndex + 1>(problem, plan, launch);
        const fa_forward &f = problem.backward.forward;
        const fa::GradientParams p = fa::gradient_params(problem.backward);
        const int64_t all = f.batch * f.heads_kv;
        Work work = {.score = fa::score_params(f),
                     .scale = static_cast<float>(f.scale),
                     .softcap = static_cast<float>(f.softcap),
                     .rows = static_cast<float2 *>(launch.workspace),
                     .first_pair = 0,
                     .pairs = 0,
                     .group = f.heads_kv ? f.heads / f.heads_kv : 1,
                     .alibi = problem.forward.alibi,
                     .dropout = problem.forward.dropout,
                     .kept = static_cast<float>(fa_dropout_scale(&problem.forward.dropout))};
        for (; work.first_pair < all && own.pairs; work.first_pair += own.pairs) {
            work.pairs = all - work.first_pair < own.pairs ? all - work.first_pair : own.pairs;
            FA_TRY((launch_pairs<T, Config<kIndex>>(p, work, plan, launch)));
        }
        if (p.wants >> FA_GRAD_BIAS & 1) FA_TRY((launch_bias<T, Config<kIndex>>(p, work, plan, launch)));
        if (p.wants >> FA_GRAD_SINKS & 1) FA_TRY(start(sinks_kernel<T>, f.heads, 0, launch, p));
    }
    return FA_OK;
}

#define SIMT_JOIN(a, b)         a##b
#define SIMT_LAUNCHER(instance) SIMT_JOIN(launch_, instance)
fa_code SIMT_LAUNCHER(FA_INSTANCE)(const fa_problem &problem, const fa_plan &plan, const fa_launch &launch) {
    return launch_tile<SIMT_TYPE, 0>(problem, plan, launch);
}

} // namespace simt_backward

#else

/* ---- host: plan, launch ---- */

namespace {

using simt_backward::kTiles;

fa_answer plan(const fa_problem *problem, const fa_device_info *device, fa_plan *plan, fa_why *why) {
    const fa_backward &p = problem->backward;
    const fa_forward &f = p.forward;
    const int head_dim = f.head_dim > f.head_dim_v ? f.head_dim : f.head_dim_v;
    simt_backward::Own &own = fa_own<simt_backward::Own>(plan);
    size_t least = SIZE_MAX;
    own.tile = -1;
    for (int i = 0; i < simt_backward::kTileCount; ++i) {
        const size_t bytes = kTiles[i].smem_bytes();
        if (kTiles[i].dim < head_dim) continue;
        if (bytes < least) least = bytes;
        if (own.tile < 0 && bytes <= device->smem_per_block) own.tile = i;
    }
    if (own.tile < 0)
        return fa_because(why, FA_NOT_HERE, FA_WHY_SHARED_MEMORY, int64_t(least), int64_t(device->smem_per_block), 0);

    const int64_t all = f.batch * f.heads_kv, group = f.heads_kv ? f.heads / f.heads_kv : 1;
    const double pair_bytes = 8.0 * double(group) * double(f.seq_q),
                 fits = double(device->workspace_limit) / pair_bytes;
    const bool rows_wanted = p.wants & ~(1u << FA_GRAD_SINKS);
    const bool at_once = p.wants >> FA_GRAD_BIAS & 1; // dbias may add up over all heads
    own.pairs = !rows_wanted ? 0 : f.seq_q == 0 || double(all) <= fits ? all : int64_t(fits);
    if (rows_wanted && all && (own.pairs == 0 || (at_once && own.pairs < all)))
        return fa_because(why, FA_REFUSES, FA_WHY_ROW_WORKSPACE, 0, 0, 0);
    plan->workspace_bytes = size_t(own.pairs * group * f.seq_q) * sizeof(float2);
    plan->threads = simt_backward::kThreads;
    plan->blocks = all * ((f.seq_k + kTiles[own.tile].block - 1) / kTiles[own.tile].block);
    plan->smem_bytes = kTiles[own.tile].smem_bytes();
    plan->keep = true;
    return FA_TAKES;
}

fa_code launch(const fa_problem *problem, const fa_plan *plan, const fa_launch *launch) {
    const fa_dtype dtype = problem->backward.forward.dtype;
    if (dtype == FA_F16) return simt_backward::launch_f16(*problem, *plan, *launch);
    if (dtype == FA_BF16) return simt_backward::launch_bf16(*problem, *plan, *launch);
    return simt_backward::launch_f32(*problem, *plan, *launch);
}

} // namespace

FA_DEFINE_KERNEL(simt_backward) = {
    .abi = FA_KERNEL_ABI,
    .op = FA_BACKWARD,
    .device = FA_CUDA,
    .name = "simt_backward",
    .summary = "gradients without tensor cores or atomics: takes every call on float types",
    .cc_from = 80,
    .cc_to = 0,
    .dtypes = fa::kFloatBits,
    .takes = FA_WITH_BIAS | FA_WITH_MASK | FA_WITH_SINKS | FA_WITH_SOFTCAP | FA_WITH_WINDOW | FA_WITH_HEAD_DIM_V |
             FA_WITH_ALIBI | FA_WITH_DROPOUT | FA_WITH_DLSE | FA_WITH_DBIAS | FA_WITH_DSINKS | FA_WITH_ACCUMULATE |
             FA_WITH_ORDERED,
    .plan = plan,
    .launch = launch,
};

#endif
