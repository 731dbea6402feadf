/* wgmma_split_sm90: shape, parameters and shares of a launch, and the merge of the partial results of a tile.
 *
 * A unit is 8 rows of the tile. Each block of the cluster finishes 8 / splits of them, for which all warpgroups of the
 * cluster (the parts) send it what they found: unnormalised outputs as [unit][part][chunk][lane], where the lanes of a
 * warp hold 16 columns in the order of the accumulators, and the rows' states. Every access is then 16 bytes a lane
 * side by side, and the one exchange needs no barrier of the cluster: it counts on the receiver's mbarrier. */
#pragma once
#include "common/convert.cuh" // load_as_float
#include "common/mask.cuh"    // Span
#include "common/ptx.cuh"     // pack
#include "common/score.cuh"
#include "common/softmax.cuh"
#include "fa.h"
#include "sm90/common/cluster.cuh"
#include "sm90/common/epilogue.cuh"
#include "sm90/common/tma.cuh"

namespace fa::sm90::split {

constexpr int kTileM = 64;     // query rows: one wgmma tile
constexpr int kUnits = 8;      // of 8 rows
constexpr int kMaxCluster = 8; // the largest portable cluster

template <int Columns, int Warpgroups, int TileN, int Stages, bool Resident> struct Config {
    static constexpr int kColumns = Columns; // head_dim, zero-padded by TMA
    static constexpr int kWarpgroups = Warpgroups;
    static constexpr int kTileN = TileN;
    static constexpr int kStages = Stages;
    static constexpr bool kResident = Resident; // no warpgroup has more than two blocks of keys, each with a stage
    static constexpr int kBlocks = Resident && TileN <= 64 ? 2 : 1; // on a multiprocessor: the next launch starts early
    static constexpr int kWarps = Warpgroups * 4;
    static constexpr int kThreads = kWarps * 32;

    static constexpr int kQueryBytes = kTileBytes<Columns, kTileM>;
    static constexpr int kBlockBytes = kTileBytes<Columns, TileN>; // of K, and of V
    static constexpr int kRingBytes = 2 * Stages * kBlockBytes;
    static constexpr int kSentBytes = Warpgroups * kTileM * (Columns * 4 + 8); // outputs and states, of all parts
    static constexpr bool kByRows = Columns > 64;            // how a block merges that has the tile to itself
    static constexpr int kRowFloats = Columns + 8 * kByRows; // 8 spreads the rows of a fragment over the banks
    static constexpr int kPartialBytes = Warpgroups * kTileM * kRowFloats * 4;
    static constexpr int kStateBytes = Warpgroups * kTileM * 8;
    static constexpr int kWeightBytes = kByRows ? Warpgroups * kTileM * 4 : 0;
    static constexpr int kBarrierBytes = (2 + 2 * Stages * Warpgroups) * 8;
    static constexpr int kSharedBytes =
        kQueryBytes + Warpgroups * kRingBytes + kPartialBytes + kStateBytes + kWeightBytes + kBarrierBytes;

    static_assert(Columns == 64 || Columns == 128);
    static_assert(Warpgroups == 2 || Warpgroups == 4); // a warp for each unit
    static_assert(TileN % 16 == 0 && TileN <= 256 && Stages >= 1);
    static_assert(!Resident || Stages == 2);
    static_assert(kSharedBytes <= 227 * 1024, "a block of sm_90 has 227 KB of shared memory");
};

/* The values that the device reads of the call, packed: each line of the constant bank that a launch touches first is a
 * miss. */
struct Params {
    CUtensorMap q, k, v; // k and v begin at key_begin and end at key_end: TMA reads zeros beyond
    int seq_q, key_begin, key_end, diagonal, left, right;
    int split_shift; // 2^split_shift blocks a cluster
    int group;       // query heads a key head
    int head_dim;
    bool q_batch, q_head, k_batch, k_head, v_batch, v_head; // false: stride 0, the coordinate stays 0
    ScoreParams score;
    void *out;
    int64_t out_batch, out_head, out_row; // strides, elements
    float *lse;
    int64_t lse_batch, lse_head, lse_row; // strides, elements
    const void *sinks;
    int64_t sinks_stride;
    fa_dtype sinks_dtype;
};

/* Which part of the call this warpgroup does. The grid is (query tiles x splits, heads, batch). */
struct Work {
    int row;                // first query of the tile
    Span<int> keys;         // of the tile
    Span<int> common;       // seen by every query of the tile
    int part, parts, count; // this share does the blocks part, part + parts, ... : `count` of them

    template <class C> static __device__ __forceinline__ Work find(const Params &params, int warpgroup) {
        Work work;
        work.row = static_cast<int>(cluster_index()) * kTileM;
        const Span<int> first = row_span(params, work.row);
        const Span<int> last = row_span(params, min(work.row + kTileM, params.seq_q) - 1);
        work.keys = {first.begin, last.end};
        work.common = {last.begin, first.end};
        work.part = static_cast<int>(cluster_rank()) * C::kWarpgroups + warpgroup;
        work.parts = C::kWarpgroups << params.split_shift;
        const int blocks = (max(work.keys.end - work.keys.begin, 0) + C::kTileN - 1) / C::kTileN;
        const unsigned rounded = max(blocks - work.part + work.parts - 1, 0);
        work.count = (rounded >> params.split_shift) / C::kWarpgroups;
        return work;
    }

    template <class C> __device__ __forceinline__ int first_key(int step) const {
        return keys.begin + (part + step * parts) * C::kTileN;
    }
};

/* Where the partial results of the units that a block finishes arrive, in shared memory. */
template <class C> struct Landing {
    static constexpr int kChunks = C::kColumns / 16;
    float4 *partials;
    float2 *states;    // [unit][part][row]
    uint64_t *arrived; // counts what the other blocks of the cluster send
    int parts;

    __device__ __forceinline__ float4 *partial(int unit, int part) const {
        return partials + (unit * parts + part) * kChunks * 32;
    }
    __device__ __forceinline__ float2 *state(int unit, int part) const { return states + (unit * parts + part) * 8; }
};

/* This warpgroup's out (unnormalised) and states, to the blocks that finish the rows. */
template <class C>
__device__ __forceinline__ void publish(const Params &params, int part, const float (&out)[C::kColumns / 2],
                                        const RowState (&state)[2], const Landing<C> &landing) {
    const int lane = threadIdx.x % 32, shift = 3 - params.split_shift; // 2^shift units a block
    const int first = __shfl_sync(0xffffffff, threadIdx.x % 128 / 32, 0) * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int owner = (first + half) >> shift, unit = first + half - (owner << shift);
        float4 *partial = landing.partial(unit, part) + lane;
        float2 *states = landing.state(unit, part) + lane / 4;
        const auto chunk = [&](int c) {
            const float *from = out + 8 * c + 2 * half;
            return make_float4(from[0], from[1], from[4], from[5]);
        };
        const float2 mine = make_float2(state[half].maximum, state[half].sum);
        if (owner == int(cluster_rank())) {
#pragma unroll
            for (int c = 0; c < Landing<C>::kChunks; ++c) partial[32 * c] = chunk(c);
            if (lane % 4 == 0) *states = mine;
        } else {
            const uint32_t barrier = cluster_address(shared_address(landing.arrived), owner);
            const uint32_t to = cluster_address(shared_address(partial), owner);
#pragma unroll
            for (int c = 0; c < Landing<C>::kChunks; ++c) cluster_send(to + 512 * c, barrier, chunk(c));
            if (lane % 4 == 0) cluster_send(cluster_address(shared_address(states), owner), barrier, mine);
        }
    }
}

__device__ __forceinline__ RowResult finish_total(const Params &params, const RowState &total) {
    if (!params.sinks) return finish_fast(total);
    return finish_row(total, load_as_float(params.sinks, params.sinks_dtype, blockIdx.y * params.sinks_stride));
}
__device__ __forceinline__ void store_lse(const Params &params, int query, float lse) {
    if (params.lse && query < params.seq_q)
        params.lse[blockIdx.z * params.lse_batch + blockIdx.y * params.lse_head + query * params.lse_row] = lse;
}

/* Merges the partial results of the rows that this block finishes, from `row` on, and writes them: each warp takes one
 * unit, 32 columns at a time, a thread 16 bytes of output. The parts are added in the order of the keys. `Splits`: the
 * blocks of the cluster, or 0 for any number. */
template <class T, class C, int Splits>
__device__ __forceinline__ void finish(const Params &params, int row, const Landing<C> &landing) {
    constexpr int kGroups = C::kColumns / 32;
    const int lane = threadIdx.x % 32, warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
    const int units = Splits ? kUnits / (Splits + !Splits) : kUnits >> params.split_shift;
    const int parts = Splits ? Splits * C::kWarpgroups : landing.parts;
    const int unit = warp % unsigned(units), query = row + unit * 8 + lane / 4;
    const float2 *states = landing.states + unit * parts * 8 + lane / 4;
    const float4 *partials = landing.partials + unit * parts * Landing<C>::kChunks * 32 + lane;
    const int stride = C::kWarps / units; // warps a unit
    const int group0 = stride == 1 ? 0 : warp / unsigned(units);
    RowState total;
#pragma unroll 4
    for (int part = 0; part < parts; ++part) total.maximum = fmaxf(total.maximum, states[8 * part].x);
    float sums[kGroups][8] = {};
#pragma unroll 4
    for (int part = 0; part < parts; ++part) {
        const float2 state = states[8 * part];
        const float weight = total.weight(state.x);
        total.sum += weight * state.y;
#pragma unroll
        for (int trip = 0; trip < kGroups; ++trip) {
            const int group = group0 + trip * stride;
            if (trip * stride >= kGroups || (stride > kGroups && group >= kGroups)) break;
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const float4 x = partials[(part * Landing<C>::kChunks + 2 * group + c) * 32];
                sums[trip][4 * c] += weight * x.x, sums[trip][4 * c + 1] += weight * x.y;
                sums[trip][4 * c + 2] += weight * x.z, sums[trip][4 * c + 3] += weight * x.w;
            }
        }
    }
    const RowResult result = finish_total(params, total);
    T *out = static_cast<T *>(params.out) + blockIdx.z * params.out_batch + blockIdx.y * params.out_head +
             query * params.out_row;
#pragma unroll
    for (int trip = 0; trip < kGroups; ++trip) {
        const int group = group0 + trip * stride, column = 32 * group + 8 * (lane % 4);
        if (trip * stride >= kGroups || (stride > kGroups && group >= kGroups)) break;
        uint32_t word[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32_t pair = pack<T>(sums[trip][2 * i] * result.factor, sums[trip][2 * i + 1] * result.factor);
            word[i] = result.factor == 0.0f ? 0 : pair;
        }
        quad_transpose(word, lane % 4);
        if (query < params.seq_q && column < params.head_dim)
            *reinterpret_cast<uint4 *>(out + column) = make_uint4(word[0], word[1], word[2], word[3]);
    }
    if (warp < units && lane % 4 == 0) store_lse(params, query, result.lse);
}

/* The same for a block that has the tile to itself and head_dim over 64: partial results by rows, weights once a row,
 * so that a warp writes whole rows. Measured: 7.3 us against 7.5 at B1 H16 S512 D128, but 7.6 against 7.4 at B1 H8
 * S1024 D64. */
template <class T, class C>
__device__ __forceinline__ void merge_rows(const Params &params, const Work &work, const float (&out)[C::kColumns / 2],
                                           const RowState (&state)[2], float *partials, float2 *states,
                                           float *weights) {
    const int warp_row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4, lane_column = 2 * (threadIdx.x % 4);
    float *to = partials + (work.part * kTileM + warp_row) * C::kRowFloats + lane_column;
#pragma unroll
    for (int i = 0; i < C::kColumns / 2; i += 2)
        *reinterpret_cast<float2 *>(to + 8 * ((i >> 1) & 1) * C::kRowFloats + 8 * (i >> 2)) =
            make_float2(out[i], out[i + 1]);
    if (lane_column == 0) {
        states[work.part * kTileM + warp_row] = make_float2(state[0].maximum, state[0].sum);
        states[work.part * kTileM + warp_row + 8] = make_float2(state[1].maximum, state[1].sum);
    }
    __syncthreads();
    const int row = threadIdx.x;
    if (row < kTileM) {
        RowState total;
#pragma unroll
        for (int part = 0; part < C::kWarpgroups; ++part)
            total.maximum = fmaxf(total.maximum, states[part * kTileM + row].x);
#pragma unroll
        for (int part = 0; part < C::kWarpgroups; ++part) {
            const float2 found = states[part * kTileM + row];
            total.sum += total.weight(found.x) * found.y;
        }
        const RowResult result = finish_total(params, total);
        store_lse(params, work.row + row, result.lse);
#pragma unroll
        for (int part = 0; part < C::kWarpgroups; ++part)
            weights[part * kTileM + row] = total.weight(states[part * kTileM + row].x) * result.factor;
    }
    __syncthreads();
    constexpr int kChunks = C::kColumns / 4;
    T *tile = static_cast<T *>(params.out) + blockIdx.z * params.out_batch + blockIdx.y * params.out_head;
    for (int item = threadIdx.x; item < kTileM * kChunks; item += C::kThreads) {
        const int row = item / kChunks, column = item % kChunks * 4;
        float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int part = 0; part < C::kWarpgroups; ++part) {
            const float weight = weights[part * kTileM + row];
            const float4 x =
                *reinterpret_cast<const float4 *>(partials + (part * kTileM + row) * C::kRowFloats + column);
            sum.x += weight * x.x, sum.y += weight * x.y, sum.z += weight * x.z, sum.w += weight * x.w;
        }
        if (work.row + row < params.seq_q && column < params.head_dim)
            *reinterpret_cast<uint2 *>(tile + (work.row + row) * params.out_row + column) =
                make_uint2(pack<T>(sum.x, sum.y), pack<T>(sum.z, sum.w));
    }
}

} // namespace fa::sm90::split
