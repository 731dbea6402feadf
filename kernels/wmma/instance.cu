/* Instances of wmma: the kernels of one head_dim. */
#include "common/score.cuh" // score_params
#include "wmma/config.cuh"
#include "wmma/kernel.cuh" // wmma_kernel, Params
#include "wmma/shape.cuh"  // Config

namespace fa::wmma_tiles {
namespace {

template <typename T, class C, bool kSimple>
fa_code launch_as(const Params &params, const fa_plan &plan, const fa_launch &launch) {
    const auto kernel = wmma_kernel<T, C, kSimple>;
    FA_TRY(fa_allow_smem(kernel, plan.smem_bytes, launch));
    FA_CHAOS_ARM(launch.stream, launch);
    kernel<<<unsigned(plan.blocks), C::kThreads, plan.smem_bytes, static_cast<cudaStream_t>(launch.stream)>>>(params);
    FA_CUDA_TRY(launch, cudaGetLastError());
    return FA_OK;
}

template <class C> fa_code launch_shape(const fa_problem &problem, const fa_plan &plan, const fa_launch &launch) {
    const fa_forward &p = problem.forward;
    const Own &own = fa_own<Own>(&plan);
    const Params params = {
        .p = attention_params(p),
        .options = {score_params(p), problem.forward.alibi, own.bias_in_fours, own.mask_in_fours},
        .tiles_m = own.tiles_m,
        .q_aligned = own.q_aligned,
        .k_aligned = own.k_aligned,
        .v_aligned = own.v_aligned,
        .out_aligned = own.out_aligned,
    };
    if (p.dtype == FA_F16)
        return own.simple ? launch_as<__half, C, true>(params, plan, launch)
                          : launch_as<__half, C, false>(params, plan, launch);
    return own.simple ? launch_as<__nv_bfloat16, C, true>(params, plan, launch)
                      : launch_as<__nv_bfloat16, C, false>(params, plan, launch);
}

} // namespace

#define FA_DEFINE(name, head_dim)                                                                                      \
    extern "C" Launch name;                                                                                            \
    fa_code name(const fa_problem &problem, const fa_plan &plan, const fa_launch &launch) {                            \
        return fa_own<Own>(&plan).wide ? launch_shape<Config<head_dim, true>>(problem, plan, launch)                   \
                                       : launch_shape<Config<head_dim, false>>(problem, plan, launch);                 \
    }
FA_INSTANCES(FA_DEFINE)

} // namespace fa::wmma_tiles
