/* ALiBi (Press et al., 2022): what a head's slope takes from the score of a key. */
#pragma once

#include <math.h>   // INFINITY, NAN
#include <stdint.h> // int64_t

#include "fa.h" // fa_extra, FA_LIMIT

namespace fa {

/* Slope of a query head: 0 without ALiBi, NaN where it is not finite. */
__device__ __forceinline__ float slope_of(const fa_extra &extra, int64_t batch, int64_t head) {
    const fa_operand &alibi = extra.alibi;
    if (!alibi.data) return 0.0f;
    const float slope = static_cast<const float *>(alibi.data)[batch * alibi.stride[0] + head * alibi.stride[1]];
    return isfinite(slope) ? slope : NAN;
}

/* x within the limit of a bias; NaN as it is. */
__device__ __forceinline__ float within_limit(float x) {
    asm("max.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(-FA_LIMIT));
    asm("min.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(FA_LIMIT));
    return x;
}

/* bias - slope * |distance| within the limit of a bias, for a bias within it, or infinite, that does not exclude the
 * key. */
__device__ __forceinline__ float with_alibi(float bias, float slope, float distance) {
    const float sum = bias - within_limit(slope * fabsf(distance));
    return bias == INFINITY ? sum : within_limit(sum);
}

} // namespace fa
