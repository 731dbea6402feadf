/* Scores of one warp, in the registers where mma.sync leaves them: which query and key each belongs to, masking,
 * softcap, bias.
 *
 * `Scores<R, N>` holds 16 R queries by N keys. Element [r][j][2 i + e] of lane l is query 16 r + 8 i + l / 4 and key
 * 8 j + 2 (l % 4) + e: a thread has two queries of each of its R row tiles, and four neighbouring lanes share a query.
 */
#ifndef FA_MMA_SCORES_CUH
#define FA_MMA_SCORES_CUH

#include <math.h>   // INFINITY
#include <stdint.h> // int64_t, uint8_t, uintptr_t

#include "convert.cuh" // load_as_float
#include "fa.h"        // fa_problem
#include "mask.cuh"    // mask_row
#include "score.cuh"   // ScoreParams, bias_row, LOG2_E
#include "softmax.cuh" // exp2_fast

namespace fa {

template <int ROW_TILES, int KEYS> using Scores = float[ROW_TILES][KEYS / 8][4];

/* Causal, window and key range of a call in 32 bits: query i sees the keys [begin(i), end(i)). */
struct Visibility {
    int left, right, diagonal, key_begin, key_end;

    __device__ int begin(int query) const { return max(key_begin, query + diagonal - left); }
    __device__ int end(int query) const { return min(key_end, query + diagonal + right + 1); }
};

/* Where a warp's scores lie in the problem. `query` and `key` are those of this thread's element [0][0][0]. */
struct ScorePlace {
    int64_t batch, head;
    int query, key;

    __device__ int query_of(int row_tile, int half) const { return query + row_tile * 16 + half * 8; }
};

/* -inf for every key that its query does not see. */
template <int ROW_TILES, int KEYS>
__device__ __forceinline__ void mask_scores(Scores<ROW_TILES, KEYS> &s, const Visibility &visible,
                                            const ScorePlace &place) {
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int begin = visible.begin(place.query_of(r, i)) - place.key;
            const int end = visible.end(place.query_of(r, i)) - place.key;
#pragma unroll
            for (int j = 0; j < KEYS / 8; ++j)
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    if (8 * j + e < begin || 8 * j + e >= end) s[r][j][2 * i + e] = -INFINITY;
        }
}

/* tanh to about 5e-7 relative: the exponential's cancellation near 0 is replaced by the series there. */
__device__ __forceinline__ float tanh_fast(float x) {
    const float square = x * x;
    const float series = x + x * square * (-1.0f / 3 + square * (2.0f / 15 - square * (17.0f / 315)));
    const float closed = 1.0f - __fdividef(2.0f, exp2_fast(x * (2.0f * LOG2_E)) + 1.0f);
    return fabsf(x) < 0.25f ? series : closed;
}

/* Two neighbouring elements, bias in base 2 or mask (attend: 0, else -inf), of `row` + {0, 1} * stride. `pairs`: both
 * lie in one aligned word. The second and first exist as told; what does not exist is not read and 0. */
__device__ __forceinline__ float2 load_bias_pair(const void *data, fa_dtype dtype, int64_t index, int64_t stride,
                                                 bool pairs, bool first, bool second) {
    float2 x = make_float2(0.0f, 0.0f);
    if (pairs && first && second) {
        if (dtype == FA_F32)
            x = *reinterpret_cast<const float2 *>(static_cast<const float *>(data) + index);
        else if (dtype == FA_F16)
            x = __half22float2(*reinterpret_cast<const __half2 *>(static_cast<const __half *>(data) + index));
        else
            x = __bfloat1622float2(
                *reinterpret_cast<const __nv_bfloat162 *>(static_cast<const __nv_bfloat16 *>(data) + index));
    } else {
        if (first) x.x = load_as_float(data, dtype, index);
        if (second) x.y = load_as_float(data, dtype, index + stride);
    }
    return make_float2(x.x * LOG2_E, x.y * LOG2_E);
}
__device__ __forceinline__ float2 load_mask_pair(const uint8_t *row, int64_t stride, bool pairs, bool first,
                                                 bool second) {
    bool attend[2] = {true, true};
    if (pairs && first && second) {
        const uint16_t both = *reinterpret_cast<const uint16_t *>(row);
        attend[0] = both & 0xff, attend[1] = both >> 8;
    } else {
        if (first) attend[0] = row[0];
        if (second) attend[1] = row[stride];
    }
    return make_float2(attend[0] ? 0.0f : -INFINITY, attend[1] ? 0.0f : -INFINITY);
}

/* Whether bias or mask elements of an even key and the next one form aligned words. */
inline bool has_pairs(const fa_operand &x, size_t element_bytes) {
    return x.stride[3] == 1 && reinterpret_cast<uintptr_t>(x.data) % (2 * element_bytes) == 0 && x.stride[0] % 2 == 0 &&
           x.stride[1] % 2 == 0 && x.stride[2] % 2 == 0;
}

/* What bias and boolean mask add to the scores. Keys that a query does not see are not looked up; mask_scores()
 * excludes them. */
template <int ROW_TILES, int KEYS>
__device__ __forceinline__ void fetch_added(Scores<ROW_TILES, KEYS> &added, const fa_problem &p, bool pairs_bias,
                                            bool pairs_mask, const Visibility &visible, const ScorePlace &place) {
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int query = place.query_of(r, i);
            const int begin = visible.begin(query) - place.key;
            const int end = query < p.seq_q ? visible.end(query) - place.key : begin;
#pragma unroll
            for (int j = 0; j < KEYS / 8; ++j) added[r][j][2 * i] = added[r][j][2 * i + 1] = 0.0f;
            if (p.bias.data) {
                const int64_t row = bias_row(p, place.batch, place.head, query) + place.key * p.bias.stride[3];
#pragma unroll
                for (int j = 0; j < KEYS / 8; ++j) {
                    const float2 x = load_bias_pair(p.bias.data, p.bias_dtype, row + 8 * j * p.bias.stride[3],
                                                    p.bias.stride[3], pairs_bias, 8 * j >= begin && 8 * j < end,
                                                    8 * j + 1 >= begin && 8 * j + 1 < end);
                    added[r][j][2 * i] += x.x, added[r][j][2 * i + 1] += x.y;
                }
            }
            if (p.mask.data) {
                const uint8_t *row = mask_row(p, place.batch, place.head, query) + place.key * p.mask.stride[3];
#pragma unroll
                for (int j = 0; j < KEYS / 8; ++j) {
                    const float2 x =
                        load_mask_pair(row + 8 * j * p.mask.stride[3], p.mask.stride[3], pairs_mask,
                                       8 * j >= begin && 8 * j < end, 8 * j + 1 >= begin && 8 * j + 1 < end);
                    // Not a sum: a masked key is excluded whatever its bias.
                    if (x.x != 0.0f) added[r][j][2 * i] = x.x;
                    if (x.y != 0.0f) added[r][j][2 * i + 1] = x.y;
                }
            }
        }
}

/* Products to scores in base 2: scale, softcap, what fetch_added() found. A key is excluded by -inf even if its product
 * is not finite. */
template <int ROW_TILES, int KEYS>
__device__ __forceinline__ void transform_scores(Scores<ROW_TILES, KEYS> &s, const ScoreParams &params,
                                                 const Scores<ROW_TILES, KEYS> &added, bool adds) {
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
        for (int j = 0; j < KEYS / 8; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float score = params.cap_log2 > 0 ? params.cap_log2 * tanh_fast(s[r][j][e] * params.scale_cap)
                                                        : s[r][j][e] * params.scale_log2;
                s[r][j][e] = !adds ? score : added[r][j][e] == -INFINITY ? -INFINITY : score + added[r][j][e];
            }
}

} // namespace fa

#endif
