/* Scores of one warp, in the registers where mma.sync leaves them: which query and key each belongs to, masking,
 * softcap.
 *
 * `Scores<R, N>` holds 16 R queries by N keys. Element [r][j][2 i + e] of lane l is query 16 r + 8 i + l / 4 and key
 * 8 j + 2 (l % 4) + e: a thread has two queries of each of its R row tiles, and four neighbouring lanes share a query.
 */
#pragma once

#include <math.h> // INFINITY

#include "common/mask.cuh"    // Band
#include "common/ptx.cuh"     // exp2_fast, reciprocal_fast
#include "common/score.cuh"   // ScoreParams, kLog2E
#include "common/softcap.cuh" // tanh_by_exp2, kMaxFastCap

namespace fa {

template <int kRowTiles, int kKeys> using Scores = float[kRowTiles][kKeys / 8][4];

/* Where a warp's scores lie in the problem. `query` and `key` are those of this thread's element [0][0][0]. */
struct ScorePlace {
    int query, key;

    __device__ int query_of(int row_tile, int half) const { return query + row_tile * 16 + half * 8; }
};

/* -inf for every key that its query does not see. */
template <int kRowTiles, int kKeys>
__device__ __forceinline__ void mask_scores(Scores<kRowTiles, kKeys> &s, const Band &visible, const ScorePlace &place) {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int begin = begin_of(visible, place.query_of(r, i)) - place.key;
            const int end = end_of(visible, place.query_of(r, i)) - place.key;
#pragma unroll
            for (int j = 0; j < kKeys / 8; ++j)
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    if (8 * j + e < begin || 8 * j + e >= end) s[r][j][2 * i + e] = -INFINITY;
        }
}

/* Products to scores in base 2, before bias: scale or softcap. kAnyCap: the cap may be above kMaxFastCap. */
template <int kRowTiles, int kKeys, bool kAnyCap>
__device__ __forceinline__ void scale_scores(Scores<kRowTiles, kKeys> &s, const ScoreParams &params) {
    const auto each = [&](auto &&body) {
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
            for (int j = 0; j < kKeys / 8; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) body(s[r][j][e]);
    };
    const float cap = params.cap_log2;
    if (cap == 0) {
        each([&](float &x) { x = round_score(x, params.scale_log2); });
    } else if (!kAnyCap || cap <= kMaxFastCap * kLog2E) {
        const float scale = params.scale_cap * (2.0f * kLog2E);
        each([&](float &x) { x = cap - 2.0f * cap * reciprocal_fast(exp2_fast(x * scale) + 1.0f); });
    } else {
        each([&](float &x) { x = __fmul_rn(cap, tanh_by_exp2(x * params.scale_cap)); });
    }
}

} // namespace fa
