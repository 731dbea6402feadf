/* Elements of global memory to float registers and back: float16, bfloat16, float32. */
#ifndef FA_CONVERT_CUH
#define FA_CONVERT_CUH

#include <cuda_bf16.h> // __nv_bfloat16, __float2bfloat16_rn
#include <cuda_fp16.h> // __half, __float2half_rn
#include <stdint.h>    // int64_t, uint4

#include "fa.h" // fa_dtype, fa_operand

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

/* Address of row (i, j, k) of a four-axis operand: the element at offset 0 of its last axis. 64-bit throughout. */
template <typename T> __device__ __forceinline__ T *row_of(const fa_operand &x, int64_t i, int64_t j, int64_t k) {
    return static_cast<T *>(x.data) + i * x.stride[0] + j * x.stride[1] + k * x.stride[2];
}

/* N consecutive elements as one value of N * sizeof(T) <= 16 bytes, which is also their alignment. */
template <typename T, int N> struct alignas(N * sizeof(T)) Chunk {
    static_assert(N > 0 && (N & (N - 1)) == 0 && N * sizeof(T) <= 16, "a chunk is one load of 1 to 16 bytes");
    T element[N];
};

/* Writes the elements [first, first + N) of a row whose elements are `stride` apart; those from `length` on are not
 * written. `vectors`: the operand satisfies takes_chunks<T>(N), so that one store writes all N. */
template <typename T, int N>
__device__ __forceinline__ void store_chunk(T *row, int64_t stride, int first, int length, bool vectors,
                                            const Chunk<T, N> &chunk) {
    if (first >= length) return;
    if (vectors) {
        *reinterpret_cast<Chunk<T, N> *>(row + first) = chunk;
    } else {
#pragma unroll
        for (int n = 0; n < N; ++n)
            if (first + n < length) row[(first + n) * stride] = chunk.element[n];
    }
}

/* Host: every chunk of N elements that starts at a multiple of N of a row can be loaded or stored at once. `length` is
 * the length of the last axis, which must hold whole chunks. */
template <typename T> inline bool takes_chunks(const fa_operand &x, int64_t length, int n) {
    if (length % n || (x.stride[3] != 1 && length > 1) || reinterpret_cast<uintptr_t>(x.data) % (n * sizeof(T)))
        return false;
    return x.stride[0] % n == 0 && x.stride[1] % n == 0 && x.stride[2] % n == 0;
}

} // namespace fa

#endif
