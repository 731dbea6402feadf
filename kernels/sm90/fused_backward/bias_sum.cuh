/* The gradient of a bias that TMA cannot store, of what the pairs leave in workspace: summed over the axes that the
 * bias is broadcast along, in one order, in float32; of other dtypes and strides; added to what is there. */
#pragma once
#include "common/convert.cuh" // from_float, write_gradient
#include "common/ptx.cuh"     // pack, unpack
#include "sm90/backward/kernel.cuh"

namespace fa::sm90 {

struct BiasSumParams {
    const void *parts; // (batch, heads, seq_q, row_elements), 16-bit
    int64_t batch, heads, seq_q, seq_k, row_elements;
    bool sums_batch, sums_heads;
    Gradient to;
};

inline constexpr int kBiasSumThreads = 128;
inline constexpr int kBiasSumKeys = 8; // of a thread

/* Threads that have keys. */
inline int64_t bias_sum_threads(const BiasSumParams &p) {
    return (p.sums_batch ? 1 : p.batch) * (p.sums_heads ? 1 : p.heads) * p.seq_q * (p.row_elements / kBiasSumKeys);
}

template <class T>
__global__ void __launch_bounds__(kBiasSumThreads) sum_bias(const __grid_constant__ BiasSumParams p) {
    FA_CHAOS_BEGIN();
    const int64_t across = p.row_elements / kBiasSumKeys, heads = p.sums_heads ? 1 : p.heads;
    const int64_t index = int64_t(blockIdx.x) * kBiasSumThreads + threadIdx.x, row = index / across;
    const int64_t key = (index - row * across) * kBiasSumKeys, plane = row / p.seq_q, query = row - plane * p.seq_q;
    const int64_t batch = plane / heads, head = plane - batch * heads;
    if (batch >= (p.sums_batch ? 1 : p.batch)) return;

    float sums[kBiasSumKeys] = {};
    for (int64_t b = batch; b < (p.sums_batch ? p.batch : batch + 1); ++b) {
        const int64_t first = ((b * p.heads + head) * p.seq_q + query) * p.row_elements + key;
#pragma unroll 4
        for (int64_t h = 0; h < (p.sums_heads ? p.heads : 1); ++h) {
            const T *const from = static_cast<const T *>(p.parts) + first + h * p.seq_q * p.row_elements;
            const uint4 eight = __ldcg(reinterpret_cast<const uint4 *>(from));
            const uint32_t words[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 x = unpack<T>(words[i]);
                sums[2 * i] += x.x, sums[2 * i + 1] += x.y;
            }
        }
    }
    const int64_t to = batch * p.to.stride[0] + head * p.to.stride[1] + query * p.to.stride[2] + key * p.to.stride[3];
    if (p.to.vectors && key + kBiasSumKeys <= p.seq_k) {
        *reinterpret_cast<uint4 *>(static_cast<T *>(p.to.data) + to) = make_uint4(
            pack<T>(sums[0], sums[1]), pack<T>(sums[2], sums[3]), pack<T>(sums[4], sums[5]), pack<T>(sums[6], sums[7]));
        return;
    }
#pragma unroll
    for (int i = 0; i < kBiasSumKeys; ++i)
        if (key + i < p.seq_k) write_gradient(p.to.data, p.to.dtype, p.to.accumulate, to + i * p.to.stride[3], sums[i]);
}

} // namespace fa::sm90
