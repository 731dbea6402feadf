/* wgmma_dropout_backward_sm90: gradients on Hopper (sm_90a) with dropout, in one pass.
 *
 * As wgmma_fused_backward_sm90, whose file this is with other instances: sums of dq in one order, head_dim a multiple
 * of 8 up to 64, without softcap. How dropout comes in: kernel.cuh.
 *
 * @arch sm_90a
 * @instance ordered_d64_masked_{f16,bf16} -DFA_HEAD_DIM=64 -DFA_KIND=FA_MASKED -DFA_ELEMENT={1:__half,__nv_bfloat16}
 */
#define FA_DROPOUT
#include "sm90/fused_backward/wgmma_fused_backward_sm90.cu"

#ifndef FA_INSTANCE

FA_DEFINE_KERNEL(wgmma_dropout_backward_sm90) = {
    .abi = FA_KERNEL_ABI,
    .op = FA_BACKWARD,
    .device = FA_CUDA,
    .name = "wgmma_dropout_backward_sm90",
    .summary = "Hopper gradients with dropout in one pass, float16 and bfloat16: TMA, wgmma, dq added up in memory",
    .cc_from = 90,
    .cc_to = 90,
    .dtypes = fa::kFloat16Bits,
    .takes = FA_WITH_SINKS | FA_WITH_WINDOW | FA_WITH_DROPOUT | FA_WITH_DLSE | FA_WITH_DSINKS | FA_WITH_ACCUMULATE |
             FA_WITH_ORDERED,
    .plan = fa::sm90::dropout::fused_plan,
    .launch = fa::sm90::dropout::fused_launch,
};

#endif
