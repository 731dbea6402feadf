/* Instances of wgmma_sm90 and wgmma_dropout_sm90. */
#include "common/launch.cuh"
#include "sm90/forward/config.cuh"

namespace fa::sm90 {
namespace {

template <class C> fa_code launch_forward(const LightForwardParams &params, int64_t blocks, const fa_launch &launch) {
    constexpr int kBytes = sizeof(ForwardSmem<C>);
    static_assert(kBytes <= 227 * 1024, "shared memory of a block");
    const auto start = [&](auto kernel) {
        FA_TRY(fa_allow_smem(kernel, kBytes, launch));
        FA_CHAOS_ARM(launch.stream, launch);
        kernel<<<static_cast<unsigned>(blocks), 128 * (C::kConsumers + 1), kBytes,
                 static_cast<cudaStream_t>(launch.stream)>>>(params);
        FA_CUDA_TRY(launch, cudaGetLastError());
        return FA_OK;
    };
    if constexpr (C::kDropout)
        return start(forward_dropout<C>);
    else if constexpr (C::kLight)
        return start(forward_light<C>);
    else
        return start(forward<C>);
}

} // namespace

#define FA_DEFINE(name, head_dim, kind, T)                                                                             \
    extern "C" Launch name;                                                                                            \
    fa_code name(const LightForwardParams &params, int64_t blocks, const fa_launch &launch) {                          \
        return launch_forward<Config<T, head_dim, kind>>(params, blocks, launch);                                      \
    }
FA_INSTANCES(FA_DEFINE)

} // namespace fa::sm90
