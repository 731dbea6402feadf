/* wmma: the plan of a launch, as the host's file makes it and instances read it. */
#pragma once
#include "common/launch.cuh" // fa_own

namespace fa::wmma_tiles {

/* The plan's own part. */
struct Own {
    int head_dim; // of the instance: both head dims are padded to it
    bool wide;    // many rows a block
    bool simple;  // no softcap, bias, ALiBi or mask, a positive scale
    bool bias_in_fours, mask_in_fours;
    bool q_aligned, k_aligned, v_aligned, out_aligned;
    unsigned tiles_m;
};

/* Launches the instance of a head_dim. */
using Launch = fa_code(const fa_problem &, const fa_plan &, const fa_launch &);

} // namespace fa::wmma_tiles
