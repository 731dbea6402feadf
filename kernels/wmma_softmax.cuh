/* The softmax of a warp's strip of scores in shared memory. Every row has one owner, which keeps its maximum and sum: a
 * lane where the strip has 32 rows, a pair of lanes (half of the columns each) where it has 16. */
#ifndef FA_WMMA_SOFTMAX_CUH
#define FA_WMMA_SOFTMAX_CUH

#include <stdint.h> // int64_t

#include "convert.cuh" // Chunk
#include "fa.h"        // fa_problem
#include "mask.cuh"    // KeyRange, mask_row
#include "score.cuh"   // ScoreParams, score_of, bias_of
#include "softmax.cuh" // RowState

namespace fa::wmma_row {

__device__ __forceinline__ uint32_t pack(float low, float high, __half) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t *>(&pair);
}
__device__ __forceinline__ uint32_t pack(float low, float high, __nv_bfloat16) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t *>(&pair);
}

/* Keys [begin, end) in 32 bits; none when end <= begin. */
struct Keys {
    int begin, end;

    __device__ Keys(int from, int to) : begin(from), end(to) {}
    __device__ Keys(const KeyRange &range)
        : begin(int(range.empty() ? 0 : range.begin)), end(int(range.empty() ? 0 : range.end)) {}
};

/* What one owner lane knows of its row. */
struct OwnedRow {
    int row;
    Keys keys; // that the row sees; none for a row past the end
    RowState state;
};

/* Turns ROWS x COLUMNS products, of the keys from `key` on, into weights of type T over their own memory: the weights
 * of a row start where its products did (`pitch` floats from row to row). Returns the factor for what the row
 * accumulated before. SIMPLE: scale > 0 and neither softcap, bias nor mask. `all_visible`: every row sees every key of
 * the tile. */
template <typename T, int ROWS, int COLUMNS, bool SIMPLE>
__device__ __forceinline__ float softmax_strip(const fa_problem &p, const ScoreParams &params, int64_t batch,
                                               int64_t head, OwnedRow &owned, float *strip, int pitch, int key,
                                               bool all_visible, int lane) {
    constexpr int SHARERS = 32 / ROWS, MINE = COLUMNS / SHARERS; // columns of this lane
    static_assert(MINE % 8 == 0, "weights are written eight at a time");
    const int first = lane / ROWS * MINE;
    float *row = strip + lane % ROWS * pitch;
    float s[MINE];
#pragma unroll
    for (int i = 0; i < MINE; i += 4) {
        const float4 read = *reinterpret_cast<const float4 *>(row + first + i);
        s[i] = read.x, s[i + 1] = read.y, s[i + 2] = read.z, s[i + 3] = read.w;
    }
    const int from = key + first, low = owned.keys.begin - from, high = owned.keys.end - from;
    if constexpr (!SIMPLE) {
        const int64_t bias = p.bias.data ? bias_row(p, batch, head, owned.row) : 0;
        const uint8_t *mask = p.mask.data ? mask_row(p, batch, head, owned.row) : nullptr;
#pragma unroll
        for (int i = 0; i < MINE; ++i) {
            s[i] = score_of(params, s[i]);
            const bool visible = i >= low && i < high && (!mask || mask[int64_t(from + i) * p.mask.stride[3]]);
            if (visible && p.bias.data) s[i] += bias_of(p, bias, from + i);
            if (!visible) s[i] = -INFINITY;
        }
    } else if (!all_visible) {
#pragma unroll
        for (int i = 0; i < MINE; ++i)
            if (i < low || i >= high) s[i] = -INFINITY;
    }

    float largest[4] = {s[0], s[1], s[2], s[3]};
#pragma unroll
    for (int i = 4; i < MINE; ++i) largest[i % 4] = fmaxf(largest[i % 4], s[i]);
    float maximum = fmaxf(fmaxf(largest[0], largest[1]), fmaxf(largest[2], largest[3]));
    if constexpr (SIMPLE) maximum *= params.scale_log2;
    if constexpr (SHARERS == 2) maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, 16));
    const float factor = owned.state.raise(maximum);
    const float shift = softmax_shift(owned.state.maximum);

    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    uint4 *weights = reinterpret_cast<uint4 *>(reinterpret_cast<T *>(row) + first);
    __syncwarp(); // both sharers of a row have read it
#pragma unroll
    for (int i = 0; i < MINE; i += 8) {
        float w[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            w[j] = exp2_fast(SIMPLE ? fmaf(s[i + j], params.scale_log2, -shift) : s[i + j] - shift);
            sum[j % 4] += w[j];
        }
        weights[i / 8] =
            make_uint4(pack(w[0], w[1], T()), pack(w[2], w[3], T()), pack(w[4], w[5], T()), pack(w[6], w[7], T()));
    }
    owned.state.sum += (sum[0] + sum[1]) + (sum[2] + sum[3]); // of this lane's columns alone
    return factor;
}

} // namespace fa::wmma_row

#endif
