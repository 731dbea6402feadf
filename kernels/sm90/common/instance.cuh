/* Instances of the kernels with a producer warp: their kinds. */
#pragma once
#include "common/instances.cuh"

namespace fa::sm90 {

enum Kind : int {
    kFull,    // no key is excluded but by the end of the keys
    kMasked,  // a range of keys a row: causal, window
    kCapped,  // the same, with softcap
    kDropout, // a range of keys a row, with dropout
    kLight,   // a range of keys a row, with a boolean mask or ALiBi
    kGeneral, // the same, with a bias, too
};

/* Whether an instance of one kind takes what asks for another. */
constexpr bool does(int kind, int wanted) { return kind == wanted || (kind == kMasked && wanted == kFull); }

/* The narrowest instance in this build that takes a head_dim, a kind, a dtype and what `fits` asks for, and of those
 * the least kind; NULL: they are left out. */
template <class Instance, size_t N, class Fits>
const Instance *instance_for(const Instance (&instances)[N], int head_dim, int kind, fa_dtype dtype, Fits fits) {
    const Instance *found = nullptr;
    for (const Instance &i : instances) {
        if (!i.launch || i.dtype != dtype || i.head_dim < head_dim || !does(i.kind, kind) || !fits(i)) continue;
        if (!found || i.head_dim < found->head_dim || (i.head_dim == found->head_dim && i.kind < found->kind))
            found = &i;
    }
    return found;
}
template <class Instance, size_t N>
const Instance *instance_for(const Instance (&instances)[N], int head_dim, int kind, fa_dtype dtype) {
    return instance_for(instances, head_dim, kind, dtype, [](const Instance &) { return true; });
}

} // namespace fa::sm90
