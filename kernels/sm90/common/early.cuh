/* Launches that may begin before the kernel before them in the stream has ended (programmatic stream serialisation). */
#pragma once
#include "common/launch.cuh"

namespace fa::sm90 {

/* fa_start() of a kernel that touches no global memory before dependency_wait() (sm90/common/cluster.cuh). */
template <class Params>
fa_code start_early(void (*kernel)(Params), int64_t count, int threads, size_t smem_bytes, const fa_launch &launch,
                    const Params &params) {
    if (count == 0) return FA_OK;
    if (smem_bytes > kSmemFree) FA_TRY(fa_allow_smem(kernel, smem_bytes, launch));
    FA_CHAOS_ARM(launch.stream, launch);
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(count));
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = smem_bytes;
    config.stream = static_cast<cudaStream_t>(launch.stream);
    config.attrs = &attribute;
    config.numAttrs = 1;
    FA_CUDA_TRY(launch, cudaLaunchKernelEx(&config, kernel, params));
    return FA_OK;
}

} // namespace fa::sm90
