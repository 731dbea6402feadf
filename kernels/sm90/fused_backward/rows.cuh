/* The passes over memory before and after the products of wgmma_fused_backward_sm90:
 *
 *     fused_rows    LSE and delta of each query, sums of dq cleared, partial sums of dsinks
 *     fused_finish  dq from its sums: scaled, rounded, added to what is there with `accumulate`; in order, where the
 *                   last to add makes dq, only of queries that see no key */
#pragma once
#include "sm90/backward/sequences.cuh"
#include "sm90/fused_backward/light.cuh"
#include "sm90/fused_backward/step.cuh"
#include <type_traits> // conditional_t, is_base_of_v, is_same_v

namespace fa::sm90 {

/* An operand of 16-bit rows that are read 16 bytes at a time, and a vector of float32, axes (batch, head, row). */
struct RowsOperand {
    const void *data; // NULL: zeros
    int64_t stride[3];
};

struct FusedRowsParams {
    BackwardCall call;
    RowsOperand out, dout, lse, dlse;
    char *row_blocks; // FusedRowBlock<TileQ> [head of the launch][block]
    int row_block_count;
    float *sums; // kQueryElements a block
    const void *sinks;
    int64_t sinks_stride;
    fa_dtype sinks_dtype;
    float *sink_parts; // [head of the call][16 queries]; NULL: dsinks is not wanted
};

inline constexpr int kFusedRowsThreads = 128;
inline constexpr int kFusedRowsQueries = kFusedRowsThreads / 32 * 16; // a thread block's

/* dout . out of 16 queries from `first`, that of query `lane % L * (32 / L) + lane / L` in lanes with lane % L < L / 2,
 * L = Columns / 8. A query that sees no key has 0, whatever its rows hold. */
template <class T, int Columns, class Call>
__device__ __forceinline__ float row_products(const FusedRowsParams &p, const Call &call, int batch, int head,
                                              int first, int lane) {
    constexpr int kLanes = Columns / 8, kRows = 32 / kLanes; // lanes a row, rows a pass
    float mine = 0.0f;
    if (!p.dout.data) return mine;
    const int column = lane % kLanes * 8;
    uint4 x[16 / kRows] = {}, y[16 / kRows] = {};
#pragma unroll
    for (int pass = 0; pass < 16 / kRows; ++pass) {
        const int row = first + pass * kRows + lane / kLanes;
        if (column >= p.call.head_dim || !row_sees(call, row)) continue;
        const auto at = [&](const RowsOperand &of) {
            return reinterpret_cast<const uint4 *>(static_cast<const T *>(of.data) + batch * of.stride[0] +
                                                   head * of.stride[1] + (first_query(call) + row) * of.stride[2] +
                                                   column);
        };
        x[pass] = *at(p.dout), y[pass] = *at(p.out);
    }
#pragma unroll
    for (int pass = 0; pass < 16 / kRows; ++pass) {
        const uint32_t xs[4] = {x[pass].x, x[pass].y, x[pass].z, x[pass].w};
        const uint32_t ys[4] = {y[pass].x, y[pass].y, y[pass].z, y[pass].w};
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 u = unpack<T>(xs[i]), v = unpack<T>(ys[i]);
            sum = fmaf(u.x, v.x, sum);
            sum = fmaf(u.y, v.y, sum);
        }
#pragma unroll
        for (int mask = 1; mask < kLanes; mask *= 2) sum += __shfl_xor_sync(0xffffffff, sum, mask);
        if (lane % kLanes == pass) mine = sum;
    }
    return mine;
}

struct OrderedRowsParams : FusedRowsParams {
    uint32_t *turns; // a block of queries; cleared in place of the sums, to which the first stores
};

struct DropoutRowsParams : OrderedRowsParams {
    float delta_factor; // one over what a weight is multiplied by that dropout keeps
};

struct LightRowsParams : DropoutRowsParams {
    fa_operand mask, slopes; // data NULL: none
    Intervals intervals;     // begins NULL: none
};

template <class Params> inline constexpr bool kOfSequences = requires(const Params &p) { p.list; };

/* The call that a head's row block `block` belongs to. */
template <class Params> __device__ __forceinline__ const auto &call_at(const Params &p, int block) {
    if constexpr (kOfSequences<Params>)
        return p.list.calls[p.list.span[block]];
    else
        return p.call;
}
template <class Call> __device__ __forceinline__ int batch_of(const Call &call, int flat_batch) {
    if constexpr (std::is_same_v<Call, SequenceCall>)
        return call.batch;
    else
        return flat_batch;
}

template <class Params> inline constexpr bool kIsLight = std::is_same_v<Params, LightRowsParams>;
template <class Params, int TileQ>
using RowBlockOfRows = std::conditional_t<kIsLight<Params>, LightRowBlock<TileQ>, FusedRowBlock<TileQ>>;

/* Which of 16 queries from `first` the mask and the intervals leave no key of those that they see; a lane has `row`, or
 * none that sees. Without a sink the LSE says it; with one that is a row of the sink alone, or of keys that count for
 * nothing. */
template <class Call>
__device__ __forceinline__ uint32_t unseeing_rows(const LightRowsParams &p, const Call &call, int batch, int head,
                                                  int first, int row, bool sees, float lse, int lane) {
    if (!p.mask.data && !p.intervals.begins) return 0;
    if (!p.sinks) return __reduce_or_sync(~0u, uint32_t(sees && lse == -INFINITY) << (row - first));
    uint32_t unseeing = 0;
    for (int i = 0; i < 16; ++i)
        if (row_sees(call, first + i) && all_hidden(p.mask, p.intervals, call, batch, head, first + i, lane))
            unseeing |= 1u << i;
    return unseeing;
}

template <class T, int Columns, int TileQ, class Params> __device__ __forceinline__ void rows_block(const Params &p) {
    FA_CHAOS_BEGIN();
    constexpr int kLanes = Columns / 8, kRows = 32 / kLanes;
    const int lane = threadIdx.x % 32, per_head = p.row_block_count * (TileQ / kFusedRowsQueries);
    const int launch_head = blockIdx.x / per_head;
    const int place = int(blockIdx.x - launch_head * per_head) * kFusedRowsQueries + int(threadIdx.x / 32) * 16;
    const auto &call = call_at(p, place / TileQ);
    const int first = place - first_row_block(call) * TileQ;
    const int flat = p.call.first_pair * p.call.group + launch_head, flat_batch = flat / p.call.heads;
    const int head = flat - flat_batch * p.call.heads, batch = batch_of(call, flat_batch);
    const auto leave_sink_part = [&](float part) {
        if (lane == 0) p.sink_parts[int64_t(flat) * p.row_block_count * (TileQ / 16) + place / 16] = part;
    };

    if constexpr (kOfSequences<Params>) {
        if (first / TileQ * TileQ >= call.seq_q) { // of no query: nobody reads it
            if (p.sink_parts) leave_sink_part(0.0f);
            return;
        }
    }
    if constexpr (std::is_base_of_v<OrderedRowsParams, Params>) {
        if (first % TileQ == 0 && lane == 0) p.turns[int64_t(launch_head) * p.row_block_count + place / TileQ] = 0;
    } else {
        auto *sums =
            reinterpret_cast<float4 *>(p.sums + (int64_t(launch_head) * p.row_block_count * TileQ + place) * Columns);
#pragma unroll
        for (int i = 0; i < 16 * Columns / 4 / 32; ++i) sums[i * 32 + lane] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }

    const float product = row_products<T, Columns>(p, call, batch, head, first, lane);
    const int row = first + lane % kLanes * kRows + lane / kLanes;
    const bool mine = lane % kLanes < 16 / kRows, there = mine && row < call.seq_q;
    bool sees = mine && row_sees(call, row);
    const auto value = [&](const RowsOperand &of) {
        return there && of.data
                   ? static_cast<const float *>(
                         of.data)[batch * of.stride[0] + head * of.stride[1] + (first_query(call) + row) * of.stride[2]]
                   : 0.0f;
    };
    const float lse = value(p.lse);
    if constexpr (kIsLight<Params>) {
        auto &block = reinterpret_cast<LightRowBlock<TileQ> *>(
            p.row_blocks)[int64_t(launch_head) * p.row_block_count + first / TileQ];
        const uint32_t unseeing = unseeing_rows(p, call, batch, head, first, row, sees, lse, lane);
        sees = sees && !(unseeing >> (row - first) & 1);
        if (lane == 0) block.unseeing[first % TileQ / 16] = uint16_t(unseeing);
        if (lane == 0 && first % TileQ == 0) block.slope = slope_in_base_2(p.slopes, batch, head);
    }
    const float dlse = value(p.dlse), delta = sees ? product - dlse : 0.0f;
    if (mine) {
        auto *block = reinterpret_cast<RowBlockOfRows<Params, TileQ> *>(p.row_blocks) +
                      (int64_t(launch_head) * p.row_block_count + first_row_block(call) + row / TileQ);
        const int inside = row % TileQ, quad = inside % 8 / 2; // the lane that has it, and where
        block->lse[inside / 16 * 16 + quad * 4 + inside % 16 / 8 * 2 + inside % 2] =
            sees && lse != -INFINITY ? lse_of_weights(lse) * kLog2E : INFINITY; // -inf: a weight of 0, not of inf
        float *const twice = &block->minus_delta[inside / 8 * 16 + quad * 4 + inside % 2];
        if constexpr (std::is_base_of_v<DropoutRowsParams, Params>)
            twice[0] = twice[2] = -delta * p.delta_factor;
        else
            twice[0] = twice[2] = -delta;
    }
    if (!p.sink_parts) return;
    const float sink = bounded(load_as_float(p.sinks, p.sinks_dtype, head * p.sinks_stride));
    float part = 0.0f;
    if (sink != -INFINITY && there) // where no key is seen the sink has all the weight
        part = sees ? -sink_weight(sink, lse) * delta : dlse;
#pragma unroll
    for (int mask = 1; mask < 32; mask *= 2) part += __shfl_xor_sync(0xffffffff, part, mask);
    leave_sink_part(part);
}

template <class T, int Columns, int TileQ>
__global__ void __launch_bounds__(kFusedRowsThreads) fused_rows(const __grid_constant__ FusedRowsParams p) {
    rows_block<T, Columns, TileQ>(p);
}
template <class T, int Columns, int TileQ>
__global__ void __launch_bounds__(kFusedRowsThreads) fused_rows_ordered(const __grid_constant__ OrderedRowsParams p) {
    rows_block<T, Columns, TileQ>(p);
}
template <class T, int Columns, int TileQ>
__global__ void __launch_bounds__(kFusedRowsThreads) fused_rows_dropout(const __grid_constant__ DropoutRowsParams p) {
    rows_block<T, Columns, TileQ>(p);
}
template <class T, int Columns, int TileQ>
__global__ void __launch_bounds__(kFusedRowsThreads) fused_rows_light(const __grid_constant__ LightRowsParams p) {
    rows_block<T, Columns, TileQ>(p);
}
template <class T, int Columns, int TileQ, class Params>
__global__ void __launch_bounds__(kFusedRowsThreads)
    fused_rows_of_sequences(const __grid_constant__ OfSequences<Params> p) {
    rows_block<T, Columns, TileQ>(p);
}

struct FusedFinishParams {
    BackwardCall call;
    const float *sums;
    int row_block_count;      // a head
    int done_begin, done_end; // blocks of each head whose dq is there already; of sequences is_done() knows
    Gradient dq;
    float scale;
};

/* Of the kind kLight: blocks that no row of sees a key have no sums. */
struct LightFinishParams : FusedFinishParams {
    const char *row_blocks;
};

inline constexpr int kFusedFinishThreads = 256; // a warp for each part of a block's sums

/* Whether the finish kernel has nothing to do for a block: its dq is there, or it has no row of a gradient. */
template <int TileQ>
__device__ __forceinline__ bool is_done(const FusedFinishParams &p, const BackwardCall &, int block) {
    return block >= p.done_begin && block < p.done_end;
}
template <int TileQ>
__device__ __forceinline__ bool is_done(const FusedFinishParams &, const SequenceCall &call, int block) {
    if (first_query(call) + block * TileQ >= end_of_queries(call)) return true;
    return call.row_begin < call.row_end && (block + 1) * TileQ > call.row_begin && block * TileQ < call.row_end;
}

/* Whether a row of a thread block's block sees a key: the tile that adds last then makes dq. The warp calls it. */
template <int TileQ> __device__ __forceinline__ bool some_row_sees(const LightFinishParams &p, int block, int lane) {
    const auto &rows = reinterpret_cast<const LightRowBlock<TileQ> *>(p.row_blocks)[blockIdx.x];
    for (int i = lane; i < TileQ; i += 32)
        if (__any_sync(~0u, row_sees(p.call, block * TileQ + i) && !(rows.unseeing[i / 16] >> i % 16 & 1))) return true;
    return false;
}

template <class T, int Columns, int TileQ, class Params> __device__ __forceinline__ void finish_block(const Params &p) {
    FA_CHAOS_BEGIN();
    constexpr int kAcross = Columns / kColumnsOfPart; // warpgroups side by side in a block
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, wg = warp / 4;
    const int launch_head = blockIdx.x / p.row_block_count, place = blockIdx.x - launch_head * p.row_block_count;
    const auto &call = call_at(p, place);
    const int block = place - first_row_block(call);
    constexpr bool is_light = std::is_same_v<Params, LightFinishParams>;
    if constexpr (is_light) {
        if (is_done<TileQ>(p, call, block) && some_row_sees<TileQ>(p, block, lane)) return;
    } else {
        if (is_done<TileQ>(p, call, block)) return;
    }
    const int flat = p.call.first_pair * p.call.group + launch_head, batch = flat / p.call.heads;
    const int row = block * TileQ + wg / kAcross * 64 + warp % 4 * 16 + lane / 4,
              column = wg % kAcross * kColumnsOfPart;
    const auto *from = reinterpret_cast<const float4 *>(p.sums + (int64_t(blockIdx.x) * 8 + warp) * kPartElements);
    float dq[kDqCount], factor[2];
    constexpr bool has_sums =
        !kOfSequences<Params> && !is_light; // else the last to add has made dq of them, and the rest is 0
#pragma unroll
    for (int c = 0; c < kDqCount / 4; ++c) {
        const float4 x = has_sums ? from[c * 32 + lane] : float4{};
        dq[4 * c] = x.x, dq[4 * c + 1] = x.y, dq[4 * c + 2] = x.z, dq[4 * c + 3] = x.w;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) factor[r] = !is_light && row_sees(call, row + 8 * r) ? p.scale : 0.0f;
    Gradient part = p.dq;
    part.data = static_cast<char *>(part.data) + column * part.stride[3] * (part.dtype == FA_F32 ? 4 : 2);
    if (column < p.call.head_dim)
        store_gradient<T>(part, batch_of(call, batch), flat - batch * p.call.heads, first_query(call) + row,
                          end_of_queries(call), dq, factor, p.call.head_dim - column, lane);
}

template <class T, int Columns, int TileQ>
__global__ void __launch_bounds__(kFusedFinishThreads) fused_finish(const __grid_constant__ FusedFinishParams p) {
    finish_block<T, Columns, TileQ>(p);
}
template <class T, int Columns, int TileQ>
__global__ void __launch_bounds__(kFusedFinishThreads) fused_finish_light(const __grid_constant__ LightFinishParams p) {
    finish_block<T, Columns, TileQ>(p);
}
template <class T, int Columns, int TileQ>
__global__ void __launch_bounds__(kFusedFinishThreads)
    fused_finish_of_sequences(const __grid_constant__ OfSequences<FusedFinishParams> p) {
    finish_block<T, Columns, TileQ>(p);
}

} // namespace fa::sm90
