/* Elements of global memory to float registers and back: float16, bfloat16, float32. */
#pragma once

#include <cuda_bf16.h> // __nv_bfloat16, __float2bfloat16_rn
#include <cuda_fp16.h> // __half, __float2half_rn
#include <stdint.h>    // int64_t

#include "fa.h" // fa_dtype

namespace fa {

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

/* Rounds to nearest even; NaN stays NaN, and what exceeds T's range becomes infinite. */
template <typename T> __device__ __forceinline__ T from_float(float x);
template <> __device__ __forceinline__ float from_float<float>(float x) { return x; }
template <> __device__ __forceinline__ __half from_float<__half>(float x) { return __float2half_rn(x); }
template <> __device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
    return __float2bfloat16_rn(x);
}

/* Element `index` of an array whose dtype is known at run time only (bias, sinks): float16, bfloat16 or float32. */
__device__ __forceinline__ float load_as_float(const void *data, fa_dtype dtype, int64_t index) {
    if (dtype == FA_F32) return static_cast<const float *>(data)[index];
    if (dtype == FA_F16) return to_float(static_cast<const __half *>(data)[index]);
    return to_float(static_cast<const __nv_bfloat16 *>(data)[index]);
}

/* Writes one element of a gradient, of such a dtype; with `accumulate` adds it in float32 to what is there. */
__device__ __forceinline__ void write_gradient(void *data, fa_dtype dtype, bool accumulate, int64_t index,
                                               float value) {
    if (accumulate) value += load_as_float(data, dtype, index);
    if (dtype == FA_F32)
        static_cast<float *>(data)[index] = value;
    else if (dtype == FA_F16)
        static_cast<__half *>(data)[index] = from_float<__half>(value);
    else
        static_cast<__nv_bfloat16 *>(data)[index] = from_float<__nv_bfloat16>(value);
}

} // namespace fa
