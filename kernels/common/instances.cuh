/* Instances of a kernel as its host's file knows them: FA_INSTANCES(X), which the build makes of the @instance lines.
 */
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stddef.h> // size_t

#include "fa.h" // fa_dtype

/* Declares an instance, a function of the type Launch. Those that a build leaves out are null. */
#define FA_DECLARE_INSTANCE(name, ...) extern "C" __attribute__((weak)) Launch name;

namespace fa {

template <class T> constexpr fa_dtype kDtypeOf = FA_F32;
template <> constexpr fa_dtype kDtypeOf<__half> = FA_F16;
template <> constexpr fa_dtype kDtypeOf<__nv_bfloat16> = FA_BF16;

/* The greatest head_dim of all instances, those that are left out too. */
template <class Instance, size_t N> constexpr int widest(const Instance (&instances)[N]) {
    int most = 0;
    for (const Instance &instance : instances) most = instance.head_dim > most ? instance.head_dim : most;
    return most;
}

} // namespace fa
