/* Partial results of a row, over parts of its keys: a maximum, and the sum and the output of weights 2^(score -
 * maximum). Here maxima are finite also where a part has no visible key; those of softmax.cuh, which are -inf there,
 * are joined by RowState::raise(). */
#pragma once

#include <stdint.h> // int64_t

#include "common/ptx.cuh"     // exp2_fast
#include "common/score.cuh"   // kLog2E, kLn2
#include "common/softmax.cuh" // RowResult

namespace fa {

/* The end of a row whose maximum is finite though it may have seen no key: finish_row() with the approximate logarithm
 * and reciprocal (2 ulp). `sink` is -inf where there is none. */
__device__ __forceinline__ RowResult finish_joined(float maximum, float sum, float sink) {
    const float joins = __fmul_rn(sink, kLog2E), raised = fmaxf(maximum, joins);
    const float factor = exp2_fast(maximum - raised), total = sum * factor + exp2_fast(joins - raised);
    const float lse = sum == 0.0f ? sink : (raised + __log2f(total)) * kLn2;
    return {sum == 0.0f ? 0.0f : __fdividef(factor, total), lse};
}

/* Parts of the keys in workspace: the outputs (parts, rows, kColumns), then the states (parts, rows), maximum and sum.
 */
template <int kColumns>
__device__ __forceinline__ float2 *partial_states(const float *outputs, int parts, int64_t rows) {
    return reinterpret_cast<float2 *>(const_cast<float *>(outputs + parts * rows * kColumns));
}
} // namespace fa
