/* wgmma_sm90: attention forward on Hopper (sm_90a): TMA, wgmma, warp specialisation.
 *
 * Takes:  float16 and bfloat16; head_dim a multiple of 8 up to 256, computed at 64, 96, 128, 192 or 256 columns (TMA
 *         fills with zeros); grouped heads; ragged lengths; causal, two-sided windows, softcap, sinks; boolean masks,
 *         intervals, ALiBi and bias, without softcap; LSE.
 * How:    sm90/forward/kernel.cuh. Five kinds of kernel: full (only the end of the keys is excluded), masked (a
 *         range of keys a row), capped (masked, with softcap; up to head_dim 128 scores that are small beside the
 *         cap cost less, see cap_polynomial), light (masked, with a boolean mask, intervals, ALiBi or all of them) and
 *         general (light, with a bias). A mask and intervals become bits first (sm90/score/make_map.cuh); blocks of
 *         64 x 64 pairs that they hide whole are left out, and those that they leave whole are computed as without
 *         them. A bias goes from memory to registers (sm90/score/bias.cuh).
 * Layout: any strides of 16-byte multiples with a contiguous head_dim axis: "bhsd", "bshd" and slices of them.
 * Limits: a bias of q's dtype alone, whose rows lie 16-byte aligned, for head_dim up to 128; scale > 0; head_dim_v =
 *         head_dim. Declines calls of few queries that sm90/common/dense_choice.cuh tells of.
 * Bench:  python -m bench measure --preset paper --kernels wgmma_sm90
 *
 * @arch sm_90a
 * @instances instance.cu
 * @instance d{256,192,128,96,64}_{full,masked,capped}_{f16,bf16} {1} {2:kFull,kMasked,kCapped} {3:__half,__nv_bfloat16}
 * @instance d{256,128,64}_light_{f16,bf16} {1} kLight {2:__half,__nv_bfloat16}
 * @instance d{128,64}_general_{f16,bf16} {1} kGeneral {2:__half,__nv_bfloat16}
 * @core d(64|128|256)_((full|masked)_\w+|(light|general|capped)_bf16)|d96_masked_bf16
 */
#include "sm90/forward/host.cuh"

namespace fa::sm90 {

FA_INSTANCES(FA_DECLARE_INSTANCE)
static const Instance kInstances[] = {FA_INSTANCES(FA_FORWARD_INSTANCE)};

constexpr int kBiasHeadDim = 128; // of calls with a bias, at most

static int kind_of(const fa_forward &p) {
    if (p.bias.data) return kGeneral;
    if (has_map(p) || p.alibi.data) return kLight;
    if (p.softcap > 0) return kCapped;
    return p.left >= FA_UNBOUNDED && p.right >= FA_UNBOUNDED ? kFull : kMasked;
}

/* Whether mma_sm80 is faster for a call of the light and general kinds: where making its map and lists costs more than
 * their use saves (10 to 12 us, as much as 1.2e9 products of a call), or where there are few tiles of many keys, which
 * it splits. Measured on an H100. */
static bool is_small(const fa_forward &p, int sm_count, fa_reason *reason) {
    const int64_t heads = p.batch * p.heads, keys = p.key_end - p.key_begin;
    *reason = FA_WHY_SHORT;
    if (has_map(p) && 1.0 * heads * p.seq_q * keys * p.head_dim < 1.2e9) return true;
    *reason = FA_WHY_UNSPLIT;
    return keys >= 1024 && heads * divide_up(p.seq_q, 128) * 4 <= sm_count;
}

static fa_answer plan(const fa_problem *problem, const fa_device_info *device, fa_plan *plan, fa_why *why) {
    const fa_forward &p = problem->forward;
    const bool dressed = kind_of(p) == kLight || kind_of(p) == kGeneral;
    if (p.softcap > 0 && dressed) return fa_because(why, FA_REFUSES, FA_WHY_SOFTCAP_BESIDE, 0, 0, 0);
    if (p.bias.data && !takes_bias(p, kBiasHeadDim, why)) return FA_REFUSES;
    const fa_answer answer = plan_forward(kInstances, kind_of(p), problem, device, plan, why);
    if (answer != FA_TAKES) return answer;
    if (!problem->batch_invariant && !dressed && saves_waves(p, device->sm_count))
        return fa_because(why, FA_DECLINES, FA_WHY_TILE_A_HEAD, 0, 0, 0);
    fa_reason reason;
    if (!problem->batch_invariant && dressed && is_small(p, device->sm_count, &reason))
        return fa_because(why, FA_DECLINES, reason, 0, 0, 0);
    if (!problem->batch_invariant && wants_splits(p, device->sm_count))
        return fa_because(why, FA_DECLINES, FA_WHY_UNSPLIT, 0, 0, 0);
    return is_short(p, problem->batch_invariant ? 0 : device->sm_count)
               ? fa_because(why, FA_DECLINES, FA_WHY_SHORT, 0, 0, 0)
               : FA_TAKES;
}

static fa_code launch(const fa_problem *problem, const fa_plan *plan, const fa_launch *launch) {
    return launch_forward(kInstances, problem, plan, launch);
}

} // namespace fa::sm90

FA_DEFINE_KERNEL(wgmma_sm90) = {
    .abi = FA_KERNEL_ABI,
    .op = FA_FORWARD,
    .device = FA_CUDA,
    .name = "wgmma_sm90",
    .summary = "Hopper: TMA, wgmma and warp specialisation, float16 and bfloat16",
    .cc_from = 90,
    .cc_to = 90,
    .dtypes = fa::kFloat16Bits,
    .takes = FA_WITH_SINKS | FA_WITH_SOFTCAP | FA_WITH_WINDOW | FA_WITH_MASK | FA_WITH_ALIBI | FA_WITH_INTERVALS |
             FA_WITH_BIAS,
    .plan = fa::sm90::plan,
    .launch = fa::sm90::launch,
};
