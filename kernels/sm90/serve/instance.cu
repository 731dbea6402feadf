/* Instances of serve_sm90. */
#include "sm90/serve/kernel.cuh"
#include "sm90/serve/plan.cuh"

namespace fa::sm90::serve {
namespace {

/* Launches a kernel that may start before the one before it has ended, in clusters of so many blocks. */
template <class Kernel>
fa_code launch_kernel(Kernel *kernel, dim3 blocks, int threads, size_t shared, const Params &params,
                      const fa_launch &launch, int cluster = 1) {
    cudaLaunchAttribute attributes[2];
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim.x = static_cast<unsigned>(cluster);
    attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = blocks;
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = shared;
    config.stream = static_cast<cudaStream_t>(launch.stream);
    config.attrs = attributes;
    config.numAttrs = cluster > 1 ? 2 : 1;
    if (shared > kSmemFree) FA_TRY(fa_allow_smem(kernel, shared, launch));
    FA_CHAOS_ARM(launch.stream, launch);
    FA_CUDA_TRY(launch, cudaLaunchKernelEx(&config, kernel, params));
    return FA_OK;
}

/* Whether the plain kernels know all that a call says. */
bool is_plain(const Params &params) {
    const fa_sequences &s = params.call.s;
    const bool positions = s.positions || s.begin || s.end;
    return !positions && params.boxes && !params.call.alibi.data && params.score.cap_log2 <= 0;
}

template <class C> fa_code launch_both(const Params &params, const Own &own, const fa_launch &launch) {
    const dim3 blocks(static_cast<unsigned>(params.jobs * own.parts));
    const dim3 fold(static_cast<unsigned>(params.jobs), static_cast<unsigned>(own.fold_parts));
    FA_TRY(launch_kernel(serve_sm90_kernel<C>, blocks, C::kThreads, Shared<C>::bytes(), params, launch,
                         own.clustered ? own.parts : 1));
    if (own.parts == 1 || own.clustered) return FA_OK;
    return launch_kernel(serve_fold_kernel<C>, fold, C::kThreads, 0, params, launch);
}

/* All, or plain; see Config. Lists and short sequences have no plain kernels, which would take half as long
 * again to compile. */
template <class All, class Plain> fa_code launch_shape(const Params &params, const Own &own, const fa_launch &launch) {
    if (params.listed.list)
        return launch_kernel(serve_listed_kernel<All>, dim3(static_cast<unsigned>(own.blocks)), All::kThreads,
                             Shared<All>::bytes(), params, launch);
    if (own.brief) {
        const dim3 blocks(static_cast<unsigned>((params.jobs + All::kWarps - 1) / All::kWarps));
        return launch_kernel(serve_short_kernel<All>, blocks, All::kThreads, Shared<All>::bytes(), params, launch);
    }
    const bool plain = is_plain(params) && !own.thin && (own.by_number || !params.call.s.q.starts);
    return plain ? launch_both<Plain>(params, own, launch) : launch_both<All>(params, own, launch);
}

} // namespace

#define FA_DEFINE(name, columns, T)                                                                                    \
    extern "C" Launch name;                                                                                            \
    fa_code name(const Params &params, const Own &own, const fa_launch &launch) {                                      \
        return launch_shape<Config<T, columns>, Config<T, columns, true>>(params, own, launch);                        \
    }
FA_INSTANCES(FA_DEFINE)

} // namespace fa::sm90::serve
