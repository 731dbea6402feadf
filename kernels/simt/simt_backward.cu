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
 * intervals, ALiBi, dropout, sinks, gradients of bias and sinks and through the LSE, accumulation; head_dim and
 * head_dim_v 1..256 apart; zero sizes. Sequences, packed or padded, with ranges of keys and positions, have instances
 * of their own, whose tiles belong to one sequence each: a sequence has the bits of its dense call
 * (simt/backward_serve.cuh). Limits: no tensor cores, element loads; 8 bytes of workspace a query row, heads in groups
 * where they do not fit. With positions keys look at all queries of their sequence, tile by tile.
 *
 * @instances backward_instance.cu
 * @instance {f16,bf16,f32} false {1:__half,__nv_bfloat16,float}
 * @instances backward_serve_instance.cu
 * @instance serve_{f16,bf16,f32} true {1:__half,__nv_bfloat16,float}
 * @core (serve_)?f32
 */
#include "common/instances.cuh"
#include "common/launch.cuh" // fa_own
#include "fa.h"              // fa_backward, fa_kernel
#include "simt/backward_config.cuh"

namespace simt_backward {

FA_INSTANCES(FA_DECLARE_INSTANCE)

namespace {

struct Instance {
    bool sequences;
    fa_dtype dtype;
    Launch *launch; // null: this build leaves it out
};
#define FA_ENTRY(name, sequences, T) {sequences, fa::kDtypeOf<T>, name},
const Instance kInstances[] = {FA_INSTANCES(FA_ENTRY)};

/* NULL: it is left out. */
const Instance *instance_for(bool sequences, fa_dtype dtype) {
    for (const Instance &i : kInstances)
        if (i.launch && i.sequences == sequences && i.dtype == dtype) return &i;
    return nullptr;
}

fa_answer plan(const fa_problem *problem, const fa_device_info *device, fa_plan *plan, fa_why *why) {
    const fa_backward &p = problem->backward;
    const fa_forward &f = p.forward;
    const bool sequences = problem->sequences.given;
    if (!instance_for(sequences, f.dtype)) return fa_because(why, FA_REFUSES, FA_WHY_INSTANCE, 0, 0, 0);
    const int head_dim = f.head_dim > f.head_dim_v ? f.head_dim : f.head_dim_v;
    Own &own = fa_own<Own>(plan);
    size_t least = SIZE_MAX;
    own.tile = -1;
    own.sequences = sequences;
    for (int i = 0; i < kTileCount; ++i) {
        const size_t bytes = kTiles[i].smem_bytes() + (sequences ? kSequenceBytes : 0);
        if (kTiles[i].dim < head_dim) continue;
        if (bytes < least) least = bytes;
        if (own.tile < 0 && bytes <= device->smem_per_block) own.tile = i;
    }
    if (own.tile < 0)
        return fa_because(why, FA_NOT_HERE, FA_WHY_SHARED_MEMORY, int64_t(least), int64_t(device->smem_per_block), 0);

    const int64_t all = sequences ? f.heads_kv : f.batch * f.heads_kv, group = f.heads_kv ? f.heads / f.heads_kv : 1;
    const int64_t rows = sequences ? stored_rows(*problem) : f.seq_q;
    const double pair_bytes = 8.0 * double(group) * double(rows), fits = double(device->workspace_limit) / pair_bytes;
    const bool rows_wanted = sequences || (p.wants & ~(1u << FA_GRAD_SINKS));
    const bool at_once = p.wants >> FA_GRAD_BIAS & 1; // dbias may add up over all heads
    own.pairs = !rows_wanted ? 0 : rows == 0 || double(all) <= fits ? all : int64_t(fits);
    if (rows_wanted && all && (own.pairs == 0 || (at_once && own.pairs < all)))
        return fa_because(why, FA_REFUSES, FA_WHY_ROW_WORKSPACE, 0, 0, 0);
    plan->workspace_bytes = size_t(own.pairs * group * rows) * sizeof(float2);
    plan->threads = kThreads;
    const int64_t block = kTiles[own.tile].block;
    plan->blocks =
        all * (sequences ? tiles_of_keys(problem->sequences, f, block).count : (f.seq_k + block - 1) / block);
    plan->smem_bytes = kTiles[own.tile].smem_bytes();
    plan->keep = true;
    return FA_TAKES;
}

fa_code launch(const fa_problem *problem, const fa_plan *plan, const fa_launch *launch) {
    const Instance *instance = instance_for(fa_own<Own>(plan).sequences, problem->backward.forward.dtype);
    return instance->launch(*problem, *plan, *launch);
}

} // namespace
} // namespace simt_backward

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
             FA_WITH_ALIBI | FA_WITH_INTERVALS | FA_WITH_DROPOUT | FA_WITH_DLSE | FA_WITH_DBIAS | FA_WITH_DSINKS |
             FA_WITH_ACCUMULATE | FA_WITH_ORDERED | FA_WITH_LENGTHS | FA_WITH_RANGES | FA_WITH_POSITIONS |
             FA_WITH_SEGMENTS,
    .plan = simt_backward::plan,
    .launch = simt_backward::launch,
};
