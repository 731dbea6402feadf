/* max_logit: the largest scaled products of heads, which all blocks raise. */
#pragma once

#include <math.h>   // INFINITY
#include <stdint.h> // int64_t

#include "fa.h" // fa_forward

namespace fa {

/* By value: `at` is NULL without. */
struct MaxLogit {
    float *at;
    int64_t stride[2]; // of the batch entry and the head
    float scale;

    /* Raises a head's maximum to `logit`; NaN raises nothing, and -0 is 0. Floats without the sign are ordered as
     * signed integers, those with it the other way round as unsigned ones, which are above all without it. */
    __device__ __forceinline__ void raise(int64_t batch, int64_t head, float logit) const {
        float *to = at + batch * stride[0] + head * stride[1];
        if (!(logit > *static_cast<const volatile float *>(to))) return;
        if (__float_as_int(logit) >= 0)
            atomicMax(reinterpret_cast<int *>(to), __float_as_int(logit));
        else
            atomicMin(reinterpret_cast<unsigned *>(to), __float_as_uint(logit));
    }
};

inline MaxLogit max_logit_of(const fa_forward &p) {
    return {static_cast<float *>(p.max_logit.data),
            {p.max_logit.stride[0], p.max_logit.stride[1]},
            static_cast<float>(p.scale)};
}

} // namespace fa
