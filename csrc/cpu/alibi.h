/* ALiBi (Press et al., 2022): what a head's slope takes from the score of a key. */
#ifndef FA_CPU_ALIBI_H
#define FA_CPU_ALIBI_H

#include <math.h>

#include "cpu/limit.h"
#include "fa.h"

/* Slope of a query head: 0 without ALiBi, NaN where it is not finite. */
static inline double fa_slope(const fa_forward *f, int64_t batch, int64_t head) {
    const fa_operand *alibi = &f->alibi;
    if (!alibi->data) return 0;
    const float slope = ((const float *)alibi->data)[batch * alibi->stride[0] + head * alibi->stride[1]];
    return isfinite(slope) ? slope : NAN;
}

/* bias - slope * |distance| within the limit of a bias, for a bias that does not exclude the key. */
static inline double fa_with_alibi(double bias, double slope, int64_t distance, fa_dtype dtype) {
    return fa_bounded(bias - fa_bounded(slope * fabs((double)distance), dtype), dtype);
}

#endif
