/* Device mathematics on the host. Approximate instructions are as precise as the host's functions unless they say
 * otherwise; rounding to other than nearest goes by double, whose one rounding more can be seen in ties alone. */
#pragma once
#include <bit>
#include <cfenv>
#include <cmath>
#include <stdint.h>

#define EMU_MIN_MAX(type)                                                                                              \
    inline type min(type a, type b) { return b < a ? b : a; }                                                          \
    inline type max(type a, type b) { return a < b ? b : a; }
EMU_MIN_MAX(int)
EMU_MIN_MAX(unsigned)
EMU_MIN_MAX(long)
EMU_MIN_MAX(unsigned long)
EMU_MIN_MAX(long long)
EMU_MIN_MAX(unsigned long long)
#undef EMU_MIN_MAX
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }

inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }

namespace emu {

/* A value that the compiler takes for unknown, so that what is made of it is not contracted. */
inline float opaque(float x) {
    __asm__("" : "+x"(x));
    return x;
}
inline float flushed(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x; }

/* `exact` as float32, rounded toward zero. */
inline float rounded_to_zero(double exact) {
    const float x = static_cast<float>(exact);
    return fabs(x) > fabs(exact) ? nextafterf(x, 0.0f) : x;
}

inline float ex2(float x) { return flushed(exp2f(flushed(x))); }
inline float rcp(float x) { return flushed(1.0f / flushed(x)); }
/* tanh.approx is off by up to 2^-11, relatively; this by up to 2^-12. */
inline float tanh_approx(float x) {
    const float y = tanhf(x);
    return std::isfinite(y) ? __uint_as_float((__float_as_uint(y) + 0x800u) & ~0xfffu) : y;
}
inline float max_nan(float a, float b) { return std::isnan(a) || std::isnan(b) ? NAN : fmaxf(a, b); }
inline float min_nan(float a, float b) { return std::isnan(a) || std::isnan(b) ? NAN : fminf(a, b); }
inline uint32_t bit_mask(uint32_t from, uint32_t width) {
    if (from >= 32) return 0;
    const uint64_t ones = width >= 32 ? 0xffffffffu : (uint64_t(1) << width) - 1;
    return static_cast<uint32_t>(ones << from);
}

} // namespace emu

inline float __fmul_rn(float a, float b) { return emu::opaque(a * b); }
inline float __fadd_rn(float a, float b) { return emu::opaque(emu::opaque(a) + emu::opaque(b)); }
inline float __fsub_rn(float a, float b) { return emu::opaque(emu::opaque(a) - emu::opaque(b)); }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fmul_rz(float a, float b) { return emu::rounded_to_zero(double(a) * b); }
inline float __fmaf_rz(float a, float b, float c) {
    if (!std::isfinite(a) || !std::isfinite(b) || !std::isfinite(c)) return fmaf(a, b, c);
    return emu::rounded_to_zero(double(a) * b + c);
}
inline float __fdividef(float a, float b) { return fabsf(b) > 0x1p126f && fabsf(b) < INFINITY ? 0.0f : a / b; }
inline float __expf(float x) { return expf(x); }
inline float __exp2f(float x) { return emu::ex2(x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(emu::flushed(x)); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __frsqrt_rn(float x) { return 1.0f / sqrtf(x); }
inline float __saturatef(float x) { return !(x > 0.0f) ? 0.0f : x < 1.0f ? x : 1.0f; }

inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(uint64_t(a) * b >> 32); }
inline int __mulhi(int a, int b) { return static_cast<int>(int64_t(a) * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
inline int __popc(unsigned x) { return std::popcount(x); }
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }
inline int __ffs(int x) { return x ? std::countr_zero(static_cast<unsigned>(x)) + 1 : 0; }
inline unsigned __brev(unsigned x) {
    unsigned y = 0;
    for (int i = 0; i < 32; ++i) y |= (x >> i & 1) << (31 - i);
    return y;
}
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
    const uint64_t both = uint64_t(high) << 32 | low;
    unsigned y = 0;
    for (int i = 0; i < 4; ++i) {
        const unsigned s = selector >> 4 * i & 15, byte = both >> 8 * (s & 7) & 255;
        y |= (s & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * i;
    }
    return y;
}
