/* wgmma_dropout_sm90: attention forward on Hopper (sm_90a) with dropout.
 *
 * Takes:  as wgmma_sm90, with head_dim up to 128 and dropout, without softcap.
 * How:    that kernel (wgmma_sm90.cu, sm90/forward/kernel.cuh). While scores are on their way a thread finds which of
 *         its 64 weights dropout keeps, one call of the generator for 8 of them (common/dropout.cuh), and leaves the
 *         others out of P V; they count in the sum and in the LSE.
 * Layout: as there.
 * Limits: as there.
 * Bench:  python -m bench measure --preset dropout --kernels wgmma_dropout_sm90
 *
 * @arch sm_90a
 * @instance d{128,64}_masked_{f16,bf16} -DFA_HEAD_DIM={1} -DFA_KIND=FA_MASKED -DFA_ELEMENT={2:__half,__nv_bfloat16}
 */
#define FA_DROPOUT
#include "sm90/forward/wgmma_sm90.cu"

#ifndef FA_INSTANCE

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
    .plan = fa::sm90::dropout::plan,
    .launch = fa::sm90::dropout::launch,
};

#endif
