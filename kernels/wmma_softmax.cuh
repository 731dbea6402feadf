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

/* Pitch of a strip of scores, in floats: rows 8 banks apart, so that a fragment's pairs of floats store without
 * conflicts. Rows 0..3 and 4..7 of the eight that load 16 bytes at a time would then meet: the latter read every two
 * neighbouring chunks in the other order. Weights have rows 4 banks apart, which suits both who writes and who reads.
 */
template <int COLUMNS> constexpr int SCORE_PITCH = COLUMNS + 8;

/* Turns ROWS x COLUMNS products (pitch SCORE_PITCH), of the keys from `key` on, into weights of type T (pitch
 * WEIGHT_PITCH) in the same memory. Returns the factor for what the row accumulated before. SIMPLE: scale > 0 and
 * neither softcap, bias nor mask. `all_visible`: every row sees every key of the tile. */
template <typename T, int ROWS, int COLUMNS, int WEIGHT_PITCH, bool SIMPLE>
__device__ __forceinline__ float softmax_strip(const fa_problem &p, const ScoreParams &params, int64_t batch,
                                               int64_t head, OwnedRow &owned, float *strip, int key, bool all_visible,
                                               int lane) {
    constexpr int SHARERS = 32 / ROWS, MINE = COLUMNS / SHARERS; // columns of this lane
    static_assert(MINE % 8 == 0, "weights are written eight at a time");
    const int first = lane / ROWS * MINE, swap = lane & 4; // s[i] belongs to column first + (i ^ swap)
    const float *row = strip + lane % ROWS * SCORE_PITCH<COLUMNS> + first;
    float s[MINE];
#pragma unroll
    for (int i = 0; i < MINE; i += 4) {
        const float4 read = *reinterpret_cast<const float4 *>(row + (i ^ swap));
        s[i] = read.x, s[i + 1] = read.y, s[i + 2] = read.z, s[i + 3] = read.w;
    }
    const int from = key + first, low = owned.keys.begin - from, high = owned.keys.end - from;
    if constexpr (!SIMPLE) {
        const int64_t bias = p.bias.data ? bias_row(p, batch, head, owned.row) : 0;
        const uint8_t *mask = p.mask.data ? mask_row(p, batch, head, owned.row) : nullptr;
#pragma unroll
        for (int i = 0; i < MINE; ++i) {
            const int column = i ^ swap;
            s[i] = score_of(params, s[i]);
            const bool visible =
                column >= low && column < high && (!mask || mask[int64_t(from + column) * p.mask.stride[3]]);
            if (visible && p.bias.data) s[i] += bias_of(p, bias, from + column);
            if (!visible) s[i] = -INFINITY;
        }
    } else if (!all_visible) {
#pragma unroll
        for (int i = 0; i < MINE; ++i)
            if ((i ^ swap) < low || (i ^ swap) >= high) s[i] = -INFINITY;
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
    T *weights = reinterpret_cast<T *>(strip) + lane % ROWS * WEIGHT_PITCH + first;
    __syncwarp(); // every row of the strip has been read
#pragma unroll
    for (int i = 0; i < MINE; i += 8) {
        uint32_t packed[4];
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
            float w[2];
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                const float x = s[i + j + n];
                w[n] = exp2_fast(SIMPLE ? fmaf(x, params.scale_log2, -shift) : x - shift);
                sum[(j + n) % 4] += w[n];
            }
            packed[j / 2] = pack(w[0], w[1], T());
        }
        *reinterpret_cast<uint4 *>(weights + i) = swap ? make_uint4(packed[2], packed[3], packed[0], packed[1])
                                                       : make_uint4(packed[0], packed[1], packed[2], packed[3]);
    }
    owned.state.sum += (sum[0] + sum[1]) + (sum[2] + sum[3]); // of this lane's columns alone
    return factor;
}

} // namespace fa::wmma_row

#endif
