/* max_logit: the largest scaled products of heads, which threads raise together. */
#ifndef FA_CPU_MAX_LOGIT_H
#define FA_CPU_MAX_LOGIT_H

#include "fa.h"

/* Raises the maximum of a head to `logit`, the largest of some of its pairs; NaN raises nothing. */
static inline void fa_raise_logit(const fa_forward *p, int64_t batch, int64_t head, double logit) {
    const float mine = (float)logit;
    float *at = (float *)p->max_logit.data + batch * p->max_logit.stride[0] + head * p->max_logit.stride[1], there;
    __atomic_load(at, &there, __ATOMIC_RELAXED);
    while (mine > there) {
        float raised = mine;
        if (__atomic_compare_exchange(at, &there, &raised, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) return;
    }
}

#endif
