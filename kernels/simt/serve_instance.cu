/* Instances of simt for sequences and more: the kernels of one dtype. */
#include "simt/config.cuh"
#include "simt/serve.cuh" // simt_serve, serve_bytes

namespace fa::simt {
namespace {

template <int kIndex> struct Config { static constexpr Tile tile = kServeTiles[kIndex]; };

template <typename T, int kIndex>
fa_code launch_tile(const fa_problem &problem, const fa_plan &plan, const fa_launch &launch) {
    if constexpr (kIndex < kServeTileCount) {
        const Own &own = fa_own<Own>(&plan);
        if (own.tile != kIndex) return launch_tile<T, kIndex + 1>(problem, plan, launch);
        auto kernel = simt_serve<T, Config<kIndex>>;
        static_assert(serve_bytes<kServeTiles[kIndex]>() <= kServeTiles[kIndex].smem_bytes() + kServeExtraBytes);
        if (plan.smem_bytes > kSmemFree) FA_TRY(fa_allow_smem(kernel, plan.smem_bytes, launch));
        FA_CHAOS_ARM(launch.stream, launch);
        kernel<<<static_cast<unsigned>(plan.blocks), plan.threads, plan.smem_bytes,
                 static_cast<cudaStream_t>(launch.stream)>>>(
            serving(problem), own.options, segments_of(problem.forward), intervals_of(problem.forward),
            max_logit_of(problem.forward));
        FA_CUDA_TRY(launch, cudaGetLastError());
    }
    return FA_OK;
}

} // namespace

#define FA_DEFINE(name, serve, T)                                                                                      \
    extern "C" Launch name;                                                                                            \
    fa_code name(const fa_problem &problem, const fa_plan &plan, const fa_launch &launch) {                            \
        return launch_tile<T, 0>(problem, plan, launch);                                                               \
    }
FA_INSTANCES(FA_DEFINE)

} // namespace fa::simt
