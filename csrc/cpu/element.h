/* Elements of any dtype as doubles, one at a time. */
#ifndef FA_CPU_ELEMENT_H
#define FA_CPU_ELEMENT_H

#include "cpu/half.h"
#include "fa.h"

static inline double fa_load(const void *data, fa_dtype dtype, int64_t index) {
    switch (dtype) {
    case FA_F16: return fa_float_from_f16(((const uint16_t *)data)[index]);
    case FA_BF16: return fa_float_from_bf16(((const uint16_t *)data)[index]);
    case FA_F32: return ((const float *)data)[index];
    default: return ((const double *)data)[index];
    }
}

static inline void fa_store(void *data, fa_dtype dtype, int64_t index, double value) {
    switch (dtype) {
    case FA_F16: ((uint16_t *)data)[index] = fa_f16_from_float((float)value); break;
    case FA_BF16: ((uint16_t *)data)[index] = fa_bf16_from_float((float)value); break;
    case FA_F32: ((float *)data)[index] = (float)value; break;
    default: ((double *)data)[index] = value;
    }
}

#endif
