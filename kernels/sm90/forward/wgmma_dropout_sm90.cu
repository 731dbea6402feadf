/* wgmma_dropout_sm90: attention forward on Hopper (sm_90a) with dropout.
 *
 * Takes:  as wgmma_sm90, with head_dim up to 128 and dropout, without softcap.
 * How:    that kernel (sm90/forward/kernel.cuh). While scores are on their way a thread finds which of
 *         its 64 weights dropout keeps, one call of the generator for 8 of them (common/dropout.cuh), and leaves the
 *         others out of P V; they count in the sum and in the LSE.
 * Layout: as there.
 * Limits: as there.
 * Bench:  python -m bench measure --preset dropout --kernels wgmma_dropout_sm90
 *
 * @arch sm_90a
 * @instances instance.cu
 * @instance d{128,64}_masked_{f16,bf16} {1} kDropout {2:__half,__nv_bfloat16}
 */
#include "sm90/forward/host.cuh"

namespace fa::sm90 {

FA_INSTANCES(FA_DECLARE_INSTANCE)
static const Instance kInstances[] = {FA_INSTANCES(FA_FORWARD_INSTANCE)};

static fa_answer plan(const fa_problem *problem, const fa_device_info *device, fa_plan *plan, fa_why *why) {
    const fa_answer answer = plan_forward(kInstances, kDropout, problem, device, plan, why);
    if (answer != FA_REFUSES && answer != FA_NOT_HERE && !problem->forward.dropout.threshold)
        return fa_because(why, FA_DECLINES, FA_WHY_NO_DROPOUT, 0, 0, 0);
    return answer;
}

static fa_code launch(const fa_problem *problem, const fa_plan *plan, const fa_launch *launch) {
    return launch_forward(kInstances, problem, plan, launch);
}

} // namespace fa::sm90

FA_DEFINE_KERNEL(wgmma_dropout_sm90) = {
    .abi = FA_KERNEL_ABI,
    .op = FA_FORWARD,
    .device = FA_CUDA,
    .name = "wgmma_dropout_sm90",
    .summary = "Hopper with dropout: TMA, wgmma and warp specialisation, float16 and bfloat16",
    .cc_from = 90,
    .cc_to = 90,
    .dtypes = fa::kFloat16Bits,
    .takes = FA_WITH_SINKS | FA_WITH_WINDOW | FA_WITH_DROPOUT,
    .plan = fa::sm90::plan,
    .launch = fa::sm90::launch,
};
