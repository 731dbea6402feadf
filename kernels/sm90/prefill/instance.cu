/* Instances of prefill_sm90. */
#include "sm90/prefill/kernel.cuh"
#include "sm90/prefill/launch.cuh"

namespace fa::sm90::prefill {
namespace {

template <class C> fa_code launch_instance(const Params &params, const fa_plan &plan, const fa_launch &launch) {
    constexpr int kBytes = sizeof(Smem<C>), kThreads = 128 * (C::kConsumers + 1);
    static_assert(kBytes <= 227 * 1024, "shared memory of a block");
    static_assert(kStateBytes<C> == state_bytes(64 * C::kConsumers, C::kHeadDim));
    FA_TRY(fa_allow_smem(prefill_sm90_kernel<C>, kBytes, launch));
    FA_CHAOS_ARM(launch.stream, launch);
    const Configuration c(plan.blocks, kThreads, kBytes, launch);
    FA_CUDA_TRY(launch, cudaLaunchKernelEx(&c.config, prefill_sm90_kernel<C>, params));
    return FA_OK;
}

} // namespace

#define FA_DEFINE(name, head_dim, kind, T)                                                                             \
    extern "C" Launch name;                                                                                            \
    fa_code name(const Params &params, const fa_plan &plan, const fa_launch &launch) {                                 \
        return launch_instance<Config<T, head_dim, kind>>(params, plan, launch);                                       \
    }
FA_INSTANCES(FA_DEFINE)

} // namespace fa::sm90::prefill
