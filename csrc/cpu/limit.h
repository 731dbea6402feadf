/* Bias and sinks as they enter float32 and float64 sums. */
#ifndef FA_CPU_LIMIT_H
#define FA_CPU_LIMIT_H

#include <math.h>

#include "fa.h"

/* Bias or sink of a call on `dtype` within the limit; infinities and NaN as they are. */
static inline double fa_bounded(double x, fa_dtype dtype) {
    const double limit = dtype == FA_F64 ? FA_LIMIT_F64 : FA_LIMIT;
    return isfinite(x) && fabs(x) > limit ? copysign(limit, x) : x;
}

#endif
