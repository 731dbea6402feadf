/* float16 on the host. */
#pragma once
#include "cuda_vectors.h"
#include <stdint.h>
#include <string.h>

struct alignas(2) __half {
    uint16_t bits;
};
struct alignas(4) __half2 {
    __half x, y;
};
using half = __half;
using half2 = __half2;

inline float __half2float(__half x) {
    _Float16 y;
    memcpy(&y, &x, 2);
    return static_cast<float>(y);
}
/* To nearest even; NaN stays NaN. */
inline __half __float2half_rn(float x) {
    const _Float16 y = static_cast<_Float16>(x);
    __half z;
    memcpy(&z, &y, 2);
    return z;
}
inline __half __float2half(float x) { return __float2half_rn(x); }
inline __half2 __floats2half2_rn(float x, float y) { return {__float2half_rn(x), __float2half_rn(y)}; }
inline __half2 __float22half2_rn(float2 x) { return __floats2half2_rn(x.x, x.y); }
inline float2 __half22float2(__half2 x) { return {__half2float(x.x), __half2float(x.y)}; }
inline __half __ushort_as_half(unsigned short bits) { return {bits}; }
inline unsigned short __half_as_ushort(__half x) { return x.bits; }
