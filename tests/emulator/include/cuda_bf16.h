/* bfloat16 on the host. */
#pragma once
#include "cuda_vectors.h"
#include <bit>
#include <stdint.h>

struct alignas(2) __nv_bfloat16 {
    uint16_t bits;
};
struct alignas(4) __nv_bfloat162 {
    __nv_bfloat16 x, y;
};

inline float __bfloat162float(__nv_bfloat16 x) { return std::bit_cast<float>(uint32_t(x.bits) << 16); }
/* To nearest even; NaN becomes CUDA's. */
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    if (x != x) return {0x7fff};
    return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
inline __nv_bfloat16 __float2bfloat16(float x) { return __float2bfloat16_rn(x); }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
    return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)};
}
inline __nv_bfloat162 __float22bfloat162_rn(float2 x) { return __floats2bfloat162_rn(x.x, x.y); }
inline float2 __bfloat1622float2(__nv_bfloat162 x) { return {__bfloat162float(x.x), __bfloat162float(x.y)}; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) { return {bits}; }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits; }
