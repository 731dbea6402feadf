/* ALiBi (Press et al., 2022): what a head's slope takes from the score of a key. */
#pragma once

#include <math.h>   // INFINITY, NAN
#include <stdint.h> // int64_t

#include "common/score.cuh" // within_limit
#include "fa.h"             // fa_operand

namespace fa {

/* Slope of a query head: 0 without ALiBi, NaN where it is not finite. */
__device__ __forceinline__ float slope_of(const fa_operand &alibi, int64_t batch, int64_t head) {
    if (!alibi.data) return 0.0f;
    const float slope = static_cast<const float *>(alibi.data)[batch * alibi.stride[0] + head * alibi.stride[1]];
    return isfinite(slope) ? slope : NAN;
}

/* The amount that a slope takes from the score of a key at a distance. */
__device__ __forceinline__ float taken_by(float slope, float distance) { return within_limit(slope * fabsf(distance)); }

/* A bias less that, within the limit of a bias; for a bias within it, or infinite, that does not exclude the key. */
__device__ __forceinline__ float less_taken(float bias, float taken) {
    const float sum = bias - taken;
    return bias == INFINITY ? sum : within_limit(sum);
}

__device__ __forceinline__ float with_alibi(float bias, float slope, float distance) {
    return less_taken(bias, taken_by(slope, distance));
}

} // namespace fa
