/* prefill_sm90: rows of a tile: which queries they are, what a chunk of their keys leaves, how chunks are folded, how
 * rows end.
 *
 *     fold(a, b):  m = max(a.m, b.m);  l = b.l 2^(b.m - m) + a.l 2^(a.m - m);  O alike, not normalised
 *
 * from the first chunk to the last. Float32 in memory loses nothing: the bits are the same whichever warpgroup folds.
 */
#pragma once
#include "common/rows.cuh"
#include "sm90/common/softmax.cuh"
#include "sm90/prefill/config.cuh"

namespace fa::sm90::prefill {

/* Row `row` of a warpgroup's 64: which query of the sequence, and which head. */
struct RowPlace {
    int query, head;
};
__device__ __forceinline__ RowPlace row_place(const Call &call, const Tile &tile, int wg, int row) {
    if (!tile.packed) return {tile.part[wg].query + row, tile.head};
    const int query = row / call.group;
    return {tile.part[wg].query + query, tile.head + row - query * call.group};
}

/* Which of the warpgroup's rows this thread's row r is. */
__device__ __forceinline__ int own_row(int r) { return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + 8 * r; }

/* Where a thread's part of a state lies: two halves of its accumulators, float4 that are 32 apart, and the maximum and
 * sum of its rows. All of it lies in a slot of workspace, or one half where the warp stages its rows. */
template <class C> struct State {
    static constexpr int kHalf = C::kHeadDim / 16; // float4 of a thread
    static_assert(C::kHeadDim % 16 == 0);
    float4 *low, *high;
    float2 *sums;

    static __device__ __forceinline__ State of(float4 *slot, int wg) {
        float4 *const own = slot + (wg * 4 + threadIdx.x % 128 / 32) * (2 * kHalf * 32) + threadIdx.x % 32;
        float2 *const sums = reinterpret_cast<float2 *>(slot + C::kTileM * C::kHeadDim / 4);
        return {own, own + kHalf * 32, sums + wg * 64};
    }
    __device__ __forceinline__ float4 &quad(int n) const { return (n < kHalf ? low : high)[n % kHalf * 32]; }
    __device__ __forceinline__ float2 &sum(int r) const { return sums[own_row(r)]; }
};
template <class C>
inline constexpr int64_t kStateBytes = int64_t(C::kTileM) * (C::kHeadDim * sizeof(float) + sizeof(float2));

/* A row without keys leaves 0, whatever its accumulators hold. */
template <class C>
__device__ __forceinline__ void leave_state(const State<C> &state, const OnlineSoftmax &softmax,
                                            const float (&out)[C::kHeadDim / 2]) {
    float sum[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        sum[r] = quad_sum(softmax.sum[r]);
        if (threadIdx.x % 4 == 0) state.sum(r) = make_float2(softmax.maximum[r], sum[r]);
    }
    __syncwarp(); // the next chunk's fold reads what one lane of four wrote
#pragma unroll
    for (int n = 0; n < C::kHeadDim / 8; ++n) {
        const float *x = &out[4 * n];
        state.quad(n) = make_float4(sum[0] == 0.0f ? 0.0f : x[0], sum[0] == 0.0f ? 0.0f : x[1],
                                    sum[1] == 0.0f ? 0.0f : x[2], sum[1] == 0.0f ? 0.0f : x[3]);
    }
}

/* A state, to registers. */
template <class C>
__device__ __forceinline__ void take_state(const State<C> &state, OnlineSoftmax &softmax,
                                           float (&out)[C::kHeadDim / 2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float2 x = state.sum(r);
        softmax.maximum[r] = x.x;
        softmax.sum[r] = threadIdx.x % 4 == 0 ? x.y : 0.0f; // quad_sum() gives the row's
    }
#pragma unroll
    for (int n = 0; n < C::kHeadDim / 8; ++n) {
        const float4 x = state.quad(n);
        out[4 * n] = x.x, out[4 * n + 1] = x.y, out[4 * n + 2] = x.z, out[4 * n + 3] = x.w;
    }
}

/* The registers become fold(before, registers): before_sums(r) are maximum and sum, before_quad(n) accumulators
 * 4 n and so on. */
template <class C, class Sums, class Quad>
__device__ __forceinline__ void fold(Sums &&before_sums, Quad &&before_quad, OnlineSoftmax &softmax,
                                     float (&out)[C::kHeadDim / 2], float factor) {
    float old[2], added[2];
    bool empty[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float2 before = before_sums(r);
        const float sum = quad_sum(softmax.sum[r]), top = fmaxf(before.x, softmax.maximum[r]);
        const float by = row_factor(top, factor), shift = __fmul_rn(softmax_shift(top), by);
        old[r] = exp2_fast(__fsub_rn(__fmul_rn(before.x, by), shift));
        added[r] = exp2_fast(__fsub_rn(__fmul_rn(softmax.maximum[r], by), shift));
        empty[r] = sum == 0.0f;
        softmax.maximum[r] = top;
        const float all = __fmaf_rn(sum, added[r], __fmul_rn(before.y, old[r]));
        softmax.sum[r] = threadIdx.x % 4 == 0 ? all : 0.0f;
    }
    __syncwarp(); // before sums in memory are written again
#pragma unroll
    for (int n = 0; n < C::kHeadDim / 8; ++n) {
        const float4 x = before_quad(n);
        const float before[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int i = 0; i < 4; ++i)
            out[4 * n + i] =
                __fmaf_rn(empty[i / 2] ? 0.0f : out[4 * n + i], added[i / 2], __fmul_rn(before[i], old[i / 2]));
    }
}
template <class C>
__device__ __forceinline__ void fold_with(const State<C> &state, OnlineSoftmax &softmax, float (&out)[C::kHeadDim / 2],
                                          float factor) {
    fold<C>([&](int r) { return state.sum(r); }, [&](int n) { return state.quad(n); }, softmax, out, factor);
}

/* Folds the states of `chunks` slots, two or more, from the first to the last, in registers. */
template <class C>
__device__ __forceinline__ void fold_chunks(const Workspace &workspace, int first_slot, int chunks, int wg,
                                            OnlineSoftmax &softmax, float (&out)[C::kHeadDim / 2], float factor) {
    take_state(State<C>::of(workspace.state(first_slot), wg), softmax, out);
#pragma unroll 1
    for (int chunk = 1; chunk < chunks; ++chunk) {
        OnlineSoftmax added;
        float x[C::kHeadDim / 2];
        take_state(State<C>::of(workspace.state(first_slot + chunk), wg), added, x);
        fold<C>([&](int r) { return make_float2(softmax.maximum[r], quad_sum(softmax.sum[r])); },
                [&](int n) { return make_float4(out[4 * n], out[4 * n + 1], out[4 * n + 2], out[4 * n + 3]); }, added,
                x, factor);
        softmax = added;
#pragma unroll
        for (int i = 0; i < C::kHeadDim / 2; ++i) out[i] = x[i];
    }
}

/* The end of this thread's rows. */
struct RowEnds {
    float factor[2], lse[2];
};
__device__ __forceinline__ RowEnds end_rows(const Params &params, const Tile &tile, int wg,
                                            const OnlineSoftmax &softmax) {
    const Call &call = params.call;
    RowEnds ends;
    if (call.sinks.data) [[unlikely]] {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = min(own_row(r), max(tile.part[wg].rows - 1, 0));
            const int64_t at = row_place(call, tile, wg, row).head * call.sinks.stride[0];
            const RowResult result =
                softmax.finish(r, params.score_factor, load_as_float(call.sinks.data, call.sinks_dtype, at));
            ends.factor[r] = result.factor, ends.lse[r] = result.lse;
        }
    } else { // finish_fast(), without a branch
        const float sum[2] = {quad_sum(softmax.sum[0]), quad_sum(softmax.sum[1])};
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float maximum = maximum_score(softmax.maximum[r], params.score_factor);
            ends.factor[r] = sum[r] == 0.0f ? 0.0f : __fdividef(1.0f, sum[r]);
            ends.lse[r] = sum[r] == 0.0f ? -INFINITY : (maximum + __log2f(sum[r])) * kLn2;
        }
    }
    return ends;
}

__device__ __forceinline__ void store_lses(const Call &call, const Tile &tile, int wg, const float (&lse)[2]) {
    if (threadIdx.x % 4) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        if (own_row(r) >= tile.part[wg].rows) continue;
        const RowPlace place = row_place(call, tile, wg, own_row(r));
        store_lse(call, call.s.packed_q ? 0 : tile.of.b, place.head, tile.of.first_q + place.query, lse[r]);
    }
}

/* Where this thread's rows go; NULL: such a row does not exist. */
template <class T>
__device__ __forceinline__ void row_targets(const Params &params, const Tile &tile, int wg, T *(&target)[2]) {
    const Call &call = params.call;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const RowPlace place = row_place(call, tile, wg, own_row(r));
        const bool exists = own_row(r) < tile.part[wg].rows;
        target[r] = exists ? row_of<T>(call.out, call.s.packed_q ? 0 : tile.of.b, place.head,
                                       int64_t(tile.of.first_q) + place.query)
                           : nullptr;
    }
}

} // namespace fa::sm90::prefill
