/* float16 and bfloat16 as bits, to and from float; rounding to nearest even, NaN kept as a quiet NaN. Portable C. */
#ifndef FA_CPU_HALF_H
#define FA_CPU_HALF_H

#include <stdint.h>
#include <string.h>

static inline float fa_float_from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t fa_bits_of_float(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float fa_float_from_bf16(uint16_t half) { return fa_float_from_bits((uint32_t)half << 16); }

static inline uint16_t fa_bf16_from_float(float value) {
    uint32_t bits = fa_bits_of_float(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(bits >> 16 | 0x40u);
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

static inline float fa_float_from_f16(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16, magnitude = half & 0x7fffu;
    if (magnitude >= 0x7c00u) return fa_float_from_bits(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
    if (magnitude >= 0x0400u) return fa_float_from_bits(sign | ((magnitude << 13) + (112u << 23)));
    float subnormal = (float)magnitude * 0x1p-24f; /* exact */
    return fa_float_from_bits(sign | fa_bits_of_float(subnormal));
}

static inline uint16_t fa_f16_from_float(float value) {
    uint32_t bits = fa_bits_of_float(value);
    uint16_t sign = (uint16_t)(bits >> 16 & 0x8000u);
    uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return (uint16_t)(sign | 0x7e00u);
    if (magnitude >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u); /* 65520 and above round to infinity */
    if (magnitude < 0x38800000u) {                                   /* below 2^-14: a multiple of 2^-24 */
        float aligned = fa_float_from_bits(magnitude) + 0x1p-1f;     /* the sum's last bit is worth 2^-24 */
        return (uint16_t)(sign | (uint16_t)(fa_bits_of_float(aligned) - fa_bits_of_float(0x1p-1f)));
    }
    uint32_t rounded = magnitude + 0x0fffu + (magnitude >> 13 & 1u);
    return (uint16_t)(sign | (uint16_t)((rounded - (112u << 23)) >> 13));
}

#endif
