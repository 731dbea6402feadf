/* wgmma_dropout_backward_sm90: gradients on Hopper (sm_90a) with dropout, in one pass.
 *
 * As wgmma_fused_backward_sm90, whose plan and launch these are with other instances: sums of dq in one order, head_dim
 * a multiple of 8 up to 128, without softcap. How dropout comes in: kernel.cuh.
 *
 * @arch sm_90a
 * @instances instance.cu
 * @instance ordered_d{64,128}_masked_{f16,bf16} DropoutFusedConfig {1} kMasked {2:__half,__nv_bfloat16}
 * @instance ordered_d{64,128}_light_{f16,bf16} DropoutLightFusedConfig {1} kLight {2:__half,__nv_bfloat16}
 * @core ordered_d64_masked_\w+ ordered_d128_masked_bf16
 */
#include "sm90/fused_backward/host.cuh"

namespace fa::sm90 {

FA_INSTANCES(FA_DECLARE_INSTANCE)
static const Instance kInstances[] = {FA_INSTANCES(FA_FUSED_INSTANCE)};

static fa_answer dropout_plan(const fa_problem *problem, const fa_device_info *device, fa_plan *plan, fa_why *why) {
    const uint32_t threshold = problem->forward.dropout.threshold;
    if (threshold > UINT16_MAX) return fa_because(why, FA_REFUSES, FA_WHY_NOTHING_KEPT, 0, 0, 0);
    const fa_answer answer = plan_fused(kInstances, problem, device, plan, why);
    return answer == FA_TAKES && !threshold ? fa_because(why, FA_DECLINES, FA_WHY_NO_DROPOUT, 0, 0, 0) : answer;
}

static fa_code dropout_launch(const fa_problem *problem, const fa_plan *plan, const fa_launch *launch) {
    return launch_call(
        kInstances, problem, plan, launch, [](FusedWork *, int64_t, int64_t) { return FA_OK; },
        [](int64_t, int64_t) { return FA_OK; });
}

} // namespace fa::sm90

FA_DEFINE_KERNEL(wgmma_dropout_backward_sm90) = {
    .abi = FA_KERNEL_ABI,
    .op = FA_BACKWARD,
    .device = FA_CUDA,
    .name = "wgmma_dropout_backward_sm90",
    .summary = "Hopper gradients with dropout in one pass, float16 and bfloat16: TMA, wgmma, dq added up in memory",
    .cc_from = 90,
    .cc_to = 90,
    .dtypes = fa::kFloat16Bits,
    .takes = FA_WITH_MASK | FA_WITH_ALIBI | FA_WITH_INTERVALS | FA_WITH_SINKS | FA_WITH_WINDOW | FA_WITH_DROPOUT |
             FA_WITH_DLSE | FA_WITH_DSINKS | FA_WITH_ACCUMULATE | FA_WITH_ORDERED,
    .plan = fa::sm90::dropout_plan,
    .launch = fa::sm90::dropout_launch,
};
