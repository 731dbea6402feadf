/* wgmma_fused_backward_sm90: gradients on Hopper (sm_90a) in one pass over pairs of keys and queries: TMA, wgmma, warp
 * specialisation.
 *
 *     rows:   LSE and delta of each query, to workspace; sums of dq in float32 cleared   rows.cuh
 *     steps:  with a mask, ALiBi or a bias, the list of steps of each tile               light_steps.cuh
 *     fused:  dk and dv, a tile of keys of a kv head a CTA; dq added to its sums         kernel.cuh
 *     finish: dq from its sums; in order, of queries that see no key alone               rows.cuh
 *     sinks:  dsinks, from partial sums that the first kernel leaves                     backward/host.cuh
 *     bias:   dbias, where TMA does not store it, from what each pair leaves             bias_sum.cuh
 *
 * Five products, where wgmma_backward_sm90 makes seven, for 4 bytes of workspace an element of dq.
 * dk, dv and dsinks have one order. The order of dq's sums differs from run to run, for deterministic=False; for True,
 * and where they are faster, the instances ordered_* take turns (turns.cuh): the sums are not cleared,
 * the first to add stores, and the last makes dq of them.
 * At head_dim 128 turns take as long as the two products they save or longer (0.94 to 1.00 of wgmma_backward_sm90's
 * rate on an H100).
 *
 * Over sequences (backward/sequences.cuh) two small kernels come first, that say where each lies and make its tensor
 * maps. Row blocks, sums and turns are numbered through all sequences of a head, each sequence from a block of its own.
 * Instances of theirs are masked: of one order they give the bits of the dense call, with a full mask too.
 *
 * Layout: any strides of 16-byte multiples with a contiguous head_dim axis for q, k, v, out and dout; gradients, lse
 * and dlse have any strides. Limits: head_dim a multiple of 8 up to 128, computed at 64 or 128 columns, head_dim_v =
 * head_dim, out of q's dtype. Heads go in groups where their workspace does not fit. Boolean masks, intervals and ALiBi
 * (light.cuh), and a bias beside them (bias.cuh), have instances of one order, without softcap. A bias is of q's dtype,
 * with rows of whole 16 bytes. TMA stores its gradient; where that is a sum over the batch or heads, of another dtype
 * or stride, or added to what is there, it takes 2 bytes a pair of workspace.
 *
 * @arch sm_90a
 * @instances instance.cu
 * @instance d{128,64}_{full,masked,capped}_{f16,bf16}
 *           FusedConfig {1} {2:kFull,kMasked,kCapped} {3:__half,__nv_bfloat16}
 * @instance ordered_d64_{full,masked,capped}_{f16,bf16}
 *           OrderedFusedConfig 64 {1:kFull,kMasked,kCapped} {2:__half,__nv_bfloat16}
 * @instance ordered_d{64,128}_light_{f16,bf16} LightFusedConfig {1} kLight {2:__half,__nv_bfloat16}
 * @instance ordered_d{64,128}_general_{f16,bf16} GeneralFusedConfig {1} kGeneral {2:__half,__nv_bfloat16}
 * @instance sequences_ordered_d64_masked_{f16,bf16} OrderedSequencesFusedConfig 64 kMasked {1:__half,__nv_bfloat16}
 * @core (ordered_)?d\d+_(masked_\w+|(full|light|general)_bf16) (d128|ordered_d64)_capped_bf16 sequences_\w+
 */
#include "sm90/fused_backward/bias_sum.cuh"
#include "sm90/fused_backward/host.cuh"
#include <algorithm> // min

namespace fa::sm90 {

FA_INSTANCES(FA_DECLARE_INSTANCE)
static const Instance kInstances[] = {FA_INSTANCES(FA_FUSED_INSTANCE)};

static fa_answer fused_plan(const fa_problem *problem, const fa_device_info *device, fa_plan *plan, fa_why *why) {
    constexpr int kAll = 1 << FA_GRAD_Q | 1 << FA_GRAD_K | 1 << FA_GRAD_V;
    fa_problem room;
    const fa_answer answer = plan_fused(kInstances, by_heads(problem, &room), device, plan, why);
    if (answer != FA_TAKES) return answer;
    const fa_backward &p = problem->backward;
    const fa_forward &f = p.forward;
    if (has_steps(fa_own<FusedOwn>(plan).kind))
        return std::min(f.seq_q, f.seq_k) >= kLightLeast
                   ? FA_TAKES
                   : fa_because(why, FA_DECLINES, FA_WHY_FEW_PAIRS, kLightLeast, 0, 0);
    return (p.wants & kAll) == kAll && fused_is_faster(problem, device, fa_own<FusedOwn>(plan))
               ? FA_TAKES
               : fa_because(why, FA_DECLINES, FA_WHY_TWO_PASSES, 0, 0, 0);
}

/* The steps before and after a launch that leaves the dS of pairs [first, first + pairs) in workspace: what is left
 * out becomes 0; the gradient of the bias is made of it. */
static fa_code begin_bias_sum(const fa_backward &p, int64_t parts_at, int64_t first, int64_t pairs,
                              GeneralFusedParams *to, const fa_launch &launch) {
    to->bias_first = int(first / p.forward.heads_kv);
    if (!leaves_pairs_out(p.forward)) return FA_OK;
    return clear_bias(bias_target(p, parts_at, launch), p.forward, pairs / p.forward.heads_kv, launch);
}
static fa_code end_bias_sum(const fa_backward &p, int64_t parts_at, int64_t first, int64_t pairs,
                            const fa_launch &launch) {
    const fa_forward &f = p.forward;
    BiasSumParams params = {
        .parts = static_cast<char *>(launch.workspace) + parts_at,
        .batch = pairs / f.heads_kv,
        .heads = f.heads,
        .seq_q = f.seq_q,
        .seq_k = f.seq_k,
        .row_elements = bias_row_elements(f),
        .sums_batch = is_bias_summed_over(p, 0),
        .sums_heads = is_bias_summed_over(p, 1),
        .to = gradient(p, FA_GRAD_BIAS),
    };
    if (!params.sums_batch)
        params.to.data = static_cast<char *>(params.to.data) +
                         first / f.heads_kv * params.to.stride[0] * int64_t(fa_dtype_size(params.to.dtype));
    const int64_t blocks = divide_up(bias_sum_threads(params), kBiasSumThreads);
    return f.dtype == FA_F16 ? fa_start(sum_bias<__half>, blocks, kBiasSumThreads, 0, launch, params)
                             : fa_start(sum_bias<__nv_bfloat16>, blocks, kBiasSumThreads, 0, launch, params);
}

static fa_code fused_launch(const fa_problem *problem, const fa_plan *plan, const fa_launch *launch) {
    const int64_t parts_at = fa_own<FusedOwn>(plan).bias_at;
    fa_problem room;
    const fa_problem *const view = by_heads(problem, &room);
    const fa_backward &p = view->backward;
    const auto before = [&](FusedWork *work, int64_t first, int64_t pairs) {
        return parts_at < 0 ? FA_OK : begin_bias_sum(p, parts_at, first, pairs, &work->fused, *launch);
    };
    const auto after = [&](int64_t first, int64_t pairs) {
        return parts_at < 0 ? FA_OK : end_bias_sum(p, parts_at, first, pairs, *launch);
    };
    return launch_call(kInstances, view, plan, launch, before, after);
}

} // namespace fa::sm90

FA_DEFINE_KERNEL(wgmma_fused_backward_sm90) = {
    .abi = FA_KERNEL_ABI,
    .op = FA_BACKWARD,
    .device = FA_CUDA,
    .name = "wgmma_fused_backward_sm90",
    .summary = "Hopper gradients in one pass, float16 and bfloat16: TMA, wgmma, dq added up in memory",
    .cc_from = 90,
    .cc_to = 90,
    .dtypes = fa::kFloat16Bits,
    .takes = FA_WITH_BIAS | FA_WITH_MASK | FA_WITH_ALIBI | FA_WITH_INTERVALS | FA_WITH_SINKS | FA_WITH_SOFTCAP |
             FA_WITH_WINDOW | FA_WITH_DLSE | FA_WITH_DBIAS | FA_WITH_DSINKS | FA_WITH_ACCUMULATE | FA_WITH_ORDERED |
             FA_WITH_LENGTHS | FA_WITH_RANGES,
    .plan = fa::sm90::fused_plan,
    .launch = fa::sm90::fused_launch,
};
