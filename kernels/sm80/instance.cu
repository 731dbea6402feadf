/* Instances of mma_sm80 for dense calls: the kernels of one padded head_dim. */
#include "common/launch.cuh" // FA_CUDA_TRY
#include "sm80/kinds.cuh"

namespace fa {
namespace {

template <class C> fa_code launch_config(const MmaArgs &args, unsigned blocks, const fa_launch &launch) {
    auto kernel = mma_kernel<C>;
    cudaStream_t stream = static_cast<cudaStream_t>(launch.stream);
    if (args.shared_bytes > kSmemFree) FA_TRY(fa_allow_smem(kernel, args.shared_bytes, launch));
    FA_CHAOS_ARM(stream, launch);
    kernel<<<dim3(blocks, args.splits), C::kThreads, args.shared_bytes, stream>>>(args);
    FA_CUDA_TRY(launch, cudaGetLastError());
    if (args.splits == 1) return FA_OK;
    combine_splits<typename C::T, C::kHeadDim><<<unsigned((args.rows() + 3) / 4), 128, 0, stream>>>(args);
    FA_CUDA_TRY(launch, cudaGetLastError());
    return FA_OK;
}

template <typename T, int D>
fa_code launch_kind(const MmaArgs &args, int kind, unsigned blocks, const fa_launch &launch) {
    switch (kind) {
    case kLarge: return launch_config<Choose<T, D, kLarge>>(args, blocks, launch);
    case kMedium: return launch_config<Choose<T, D, kMedium>>(args, blocks, launch);
    case kCompact: return launch_config<Choose<T, D, kCompact>>(args, blocks, launch);
    case kSmall: return launch_config<Choose<T, D, kSmall>>(args, blocks, launch);
    case kBiased: return launch_config<Choose<T, D, kBiased>>(args, blocks, launch);
    default: return launch_config<Choose<T, D, kGeneral>>(args, blocks, launch);
    }
}

} // namespace

#define FA_DEFINE(name, Type, D)                                                                                       \
    extern "C" Type name;                                                                                              \
    fa_code name(const MmaArgs &args, fa_dtype dtype, int kind, unsigned blocks, const fa_launch &launch) {            \
        if (dtype == FA_F16) return launch_kind<__half, D>(args, kind, blocks, launch);                                \
        return launch_kind<__nv_bfloat16, D>(args, kind, blocks, launch);                                              \
    }
FA_INSTANCES(FA_DEFINE)

} // namespace fa
