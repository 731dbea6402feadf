/* serve_sm90: the end of a row, and rows of no query. States are folded as common/fold.cuh says. */
#pragma once
#include "common/convert.cuh"
#include "common/fold.cuh"
#include "common/rows.cuh"
#include "common/softmax.cuh"
#include "trial/serve_config.cuh"

namespace fa::sm90::serve {

/* A row of a call: row `row` of the rows of sequence b, kv head `head`. */
struct RowPlace {
    int64_t query; // row of q and out
    int batch, head;
};
__device__ __forceinline__ RowPlace row_place(const Params &params, int b, int kv_head, int64_t first_q, int row) {
    const int query = row / params.group;
    return {first_q + query, params.s.packed_q ? 0 : b, kv_head * params.group + row - query * params.group};
}

/* Factor of the accumulated output; the LSE is written. */
__device__ __forceinline__ float finish(const Params &params, const RowPlace &row, const RowState &state, bool writes) {
    const RowResult result = params.p.sinks.data ? finish_row(params.p, row.head, state) : finish_fast(state);
    if (writes) store_lse(params.p, row.batch, row.head, row.query, result.lse);
    return result.factor;
}

template <class T>
__device__ __forceinline__ void store_out(const Params &params, const RowPlace &row, int column, float x) {
    const fa_forward &p = params.p;
    if (column >= p.head_dim_v) return;
    const int64_t at = row.batch * p.out.stride[0] + row.head * p.out.stride[1] + row.query * p.out.stride[2] +
                       column * p.out.stride[3];
    if (p.out_dtype == FA_F32)
        static_cast<float *>(p.out.data)[at] = x;
    else
        static_cast<T *>(p.out.data)[at] = from_float<T>(x);
}

/* Rows [begin, end) of the heads of a kv head belong to no query: 0 and -inf. One warp. */
template <class T>
__device__ __forceinline__ void write_nothing(const Params &params, int b, int kv_head, int64_t begin, int64_t end) {
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int64_t query = begin; query < end; ++query)
#pragma unroll 1
        for (int head = kv_head * params.group; head < (kv_head + 1) * params.group; ++head) {
            const RowPlace row = {query, params.s.packed_q ? 0 : b, head};
            if (lane == 0) store_lse(params.p, row.batch, row.head, row.query, -INFINITY);
#pragma unroll 1
            for (int column = lane; column < params.p.head_dim_v; column += 32) store_out<T>(params, row, column, 0.0f);
        }
}

} // namespace fa::sm90::serve
