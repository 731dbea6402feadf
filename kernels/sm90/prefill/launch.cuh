/* Launches of prefill_sm90: for the host's file and the instances'. */
#pragma once
#include <cuda_runtime.h>

#include "common/launch.cuh"
#include "sm90/prefill/config.cuh"

namespace fa::sm90::prefill {

/* Of the state of a tile. */
constexpr int64_t state_bytes(int tile_m, int head_dim) { return int64_t(tile_m) * (head_dim * 4 + 8); }

/* The plan's own part. */
struct Own {
    int instance; // of kInstances
    int columns;  // of the instance
    int tile_m, tile_n;
    int box_rows; // keys that TMA brings at a time; 0: none, they come row by row
    bool staged;
    int slots;  // for states of chunks
    int blocks; // of the main kernel
};

/* For packed_sm90, too: the plan, and the launches of the list and of the tiles. */
fa_answer plan_call(const fa_problem *problem, const fa_device_info *device, fa_plan *plan, fa_why *why);
fa_code launch_list(const fa_problem *problem, const fa_plan *plan, const fa_launch *launch, const FewRows &few);
fa_code launch_tiles(const fa_problem *problem, const fa_plan *plan, const fa_launch *launch, const FewRows &few);

using Launch = fa_code(const Params &, const fa_plan &, const fa_launch &);

/* A launch that may start before the one before it has ended. Points into itself. */
struct Configuration {
    cudaLaunchAttribute attribute;
    cudaLaunchConfig_t config = {};

    Configuration(int64_t blocks, int threads, size_t shared, const fa_launch &launch) {
        attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attribute.val.programmaticStreamSerializationAllowed = 1;
        config.gridDim = dim3(static_cast<unsigned>(blocks));
        config.blockDim = dim3(static_cast<unsigned>(threads));
        config.dynamicSmemBytes = shared;
        config.stream = static_cast<cudaStream_t>(launch.stream);
        config.attrs = &attribute;
        config.numAttrs = 1;
    }
    Configuration(const Configuration &) = delete;
};

} // namespace fa::sm90::prefill
