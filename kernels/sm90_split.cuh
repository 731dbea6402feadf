/* The device side of wgmma_split_sm90: a tile's keys dealt to the warpgroups of a cluster, and the merge of what they
 * find. See wgmma_split_sm90.cu. */
#pragma once
#include "convert.cuh"
#include "fa.h"
#include "mask.cuh"
#include "score.cuh"
#include "sm90_cluster.cuh"
#include "sm90_tma.cuh"
#include "sm90_wgmma.cuh"
#include "softmax.cuh"

namespace fa::sm90::split {

constexpr int kTileM = 64;     // query rows: one wgmma tile
constexpr int kMaxCluster = 8; // the largest portable cluster

template <int Columns, int Warpgroups, int TileN, int Stages> struct Config {
    static constexpr int kColumns = Columns; // head_dim, zero-padded by TMA
    static constexpr int kWarpgroups = Warpgroups;
    static constexpr int kTileN = TileN;
    static constexpr int kStages = Stages;
    static constexpr int kThreads = kWarpgroups * 128;
    static constexpr int kPartialStride = Columns + 8; // floats; 8 spreads the rows of a fragment over the banks

    static constexpr int kQueryBytes = kTileBytes<Columns, kTileM>;
    static constexpr int kBlockBytes = kTileBytes<Columns, kTileN>; // of K, and of V
    static constexpr int kRingBytes = 2 * kStages * kBlockBytes;
    static constexpr int kPartialBytes = kTileM * kPartialStride * 4;
    static constexpr int kStateBytes = kWarpgroups * kTileM * 8; // (maximum, sum) of each row of each warpgroup
    static constexpr int kClusterStateBytes = kTileM * 8;        // the same from each block of the cluster
    static constexpr int kWeightBytes = kTileM * 4 * kWarpgroups;
    static constexpr int kBarrierBytes = (2 + 2 * kStages * kWarpgroups) * 8;
    static constexpr int kSharedBytes = 1024 + kQueryBytes + kWarpgroups * (kRingBytes + kPartialBytes) + kStateBytes +
                                        kClusterStateBytes + kWeightBytes + kBarrierBytes; // 1024: alignment

    static_assert(kWarpgroups * kRingBytes >= kPartialBytes, "the cluster's partial results reuse the rings");
    static_assert(Columns == 64 || Columns == 128);
    static_assert(kTileN % 16 == 0 && kTileN <= 256 && kWarpgroups >= 1 && kWarpgroups <= 8 && kStages >= 1);
    static_assert(kSharedBytes <= 227 * 1024, "a block of sm_90 has 227 KB of shared memory");
};

/* What the device reads of the call, packed: each line of the constant bank that a launch touches first is a miss. */
struct Params {
    CUtensorMap q, k, v; // k and v begin at key_begin and end at key_end: TMA reads zeros beyond
    int seq_q, key_begin, key_end, diagonal, left, right;
    int splits; // blocks a cluster
    int rows;   // of the tile that each of them finishes: kTileM / splits
    int group;  // query heads a key head
    int head_dim;
    bool q_batch, q_head, k_batch, k_head, v_batch, v_head; // false: stride 0, the coordinate stays 0
    ScoreParams score;
    void *out;
    int64_t out_batch, out_head, out_row; // strides, elements
    float *lse;
    const void *sinks;
    int64_t sinks_stride;
    fa_dtype sinks_dtype;
    int heads;
};

/* ---- device ---- */

template <class T> __device__ __forceinline__ uint32_t pack(float low, float high);
template <> __device__ __forceinline__ uint32_t pack<__half>(float low, float high) {
    __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<uint32_t *>(&pair);
}
template <> __device__ __forceinline__ uint32_t pack<__nv_bfloat16>(float low, float high) {
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<uint32_t *>(&pair);
}

/* Which part of the call this warpgroup does. The grid is (query tiles x splits, heads, batch). */
struct Work {
    int row;                // first query of the tile
    KeyRange keys;          // of the tile
    KeyRange common;        // seen by every query of the tile
    int part, parts, count; // this share does the blocks part, part + parts, ... : `count` of them

    template <class C> static __device__ __forceinline__ Work find(const Params &params, int warpgroup) {
        Work work;
        work.row = static_cast<int>(cluster_index()) * kTileM;
        const int end = min(work.row + kTileM, params.seq_q);
        work.keys = tile_keys(params, work.row, end);
        work.common = tile_common_keys(params, work.row, end);
        work.part = static_cast<int>(cluster_rank()) * C::kWarpgroups + warpgroup;
        work.parts = params.splits * C::kWarpgroups;
        const int length = work.keys.empty() ? 0 : static_cast<int>(work.keys.end - work.keys.begin);
        const unsigned blocks = (length + C::kTileN - 1) / C::kTileN;
        work.count = work.part < int(blocks) ? (blocks - work.part + work.parts - 1) / unsigned(work.parts) : 0;
        return work;
    }

    template <class C> __device__ __forceinline__ int64_t first_key(int step) const {
        return keys.begin + (part + step * parts) * C::kTileN;
    }
};

/* One warpgroup's K and V stages. Only its first thread fills them. */
template <class C> struct Ring {
    char *k, *v; // kStages blocks each
    uint64_t *full_k, *full_v;

    __device__ __forceinline__ void fill(const CUtensorMap *map, char *blocks, uint64_t *full, const Params &params,
                                         const Work &work, int head, int batch, int step) const {
        const int stage = step % C::kStages;
        mbarrier_arrive_expect(full + stage, C::kBlockBytes);
        tma_load_tile<C::kColumns, C::kTileN>(blocks + stage * C::kBlockBytes, map, full + stage,
                                              static_cast<int>(work.first_key<C>(step)) - params.key_begin, head, batch,
                                              kEvictLast);
    }
    __device__ __forceinline__ void fill_k(const Params &params, const Work &work, int step) const {
        fill(&params.k, k, full_k, params, work, params.k_head ? blockIdx.y / unsigned(params.group) : 0,
             params.k_batch ? blockIdx.z : 0, step);
    }
    __device__ __forceinline__ void fill_v(const Params &params, const Work &work, int step) const {
        fill(&params.v, v, full_v, params, work, params.v_head ? blockIdx.y / unsigned(params.group) : 0,
             params.v_batch ? blockIdx.z : 0, step);
    }
};

/* Scores of keys that a row does not see become -inf. `first` is the block's first key. */
template <int Count>
__device__ __forceinline__ void exclude(float (&scores)[Count], const Params &params, int row, int64_t first) {
    const int lane_column = 2 * (threadIdx.x % 4);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const KeyRange keys = row_keys(params, row + 8 * half);
        const int begin = static_cast<int>(max(keys.begin - first, int64_t(0)));
        const int end = static_cast<int>(min(max(keys.end - first, int64_t(0)), int64_t(2 * Count)));
#pragma unroll
        for (int i = 0; i < Count; ++i)
            if (((i >> 1) & 1) == half) {
                const int column = 8 * (i >> 2) + lane_column + (i & 1);
                if (column < begin || column >= end) scores[i] = -INFINITY;
            }
    }
}

/* One block of keys: raises the states and turns scores into weights, in place. Returns the factors for what was
 * accumulated before. Both rows and two accumulators each go side by side: a warp has nobody to hide the latency of a
 * single chain. */
template <int Count>
__device__ __forceinline__ float2 soften(float (&scores)[Count], RowState (&state)[2], float multiplier) {
    float maximum[4] = {scores[0], scores[1], scores[2], scores[3]};
#pragma unroll
    for (int i = 4; i < Count; ++i) maximum[i & 3] = fmaxf(maximum[i & 3], scores[i]);
    float factor[2], shift[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float row = fmaxf(maximum[2 * half], maximum[2 * half + 1]);
        row = fmaxf(row, __shfl_xor_sync(0xffffffff, row, 1));
        row = fmaxf(row, __shfl_xor_sync(0xffffffff, row, 2));
        factor[half] = state[half].raise(row * multiplier);
        shift[half] = softmax_shift(state[half].maximum);
    }
    float sum[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < Count; ++i) {
        scores[i] = exp2_fast(fmaf(scores[i], multiplier, -shift[(i >> 1) & 1]));
        sum[i & 3] += scores[i];
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) state[half].sum += sum[2 * half] + sum[2 * half + 1];
    return make_float2(factor[0], factor[1]);
}

/* The online softmax over this warpgroup's share. The weights of a block meet V on the tensor cores while the scores of
 * the next block, computed together with them, are softened. */
template <class T, class C, bool Capped>
__device__ __forceinline__ void attend(const Params &params, const Work &work, const Ring<C> &ring, uint32_t queries,
                                       int warpgroup, float (&out)[C::kColumns / 2], RowState (&state)[2]) {
    constexpr int kScores = C::kTileN / 2;
    const float multiplier = Capped ? 1.0f : params.score.scale_log2;
    const int row = work.row + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    float scores[kScores];
    uint32_t weights[kScores / 2];

    const auto start_scores = [&](int step) {
        const int stage = step % C::kStages;
        mbarrier_wait(ring.full_k + stage, step / C::kStages & 1);
        wgmma_fence();
        gemm_qk<T, C::kColumns>(scores, queries, kTileM * kSlabRowBytes, smem_address(ring.k + stage * C::kBlockBytes),
                                C::kTileN * kSlabRowBytes);
        wgmma_commit();
    };
    const auto start_out = [&](int step) {
        const int stage = step % C::kStages;
        mbarrier_wait(ring.full_v + stage, step / C::kStages & 1);
        wgmma_fence();
        gemm_pv<T>(out, weights, smem_address(ring.v + stage * C::kBlockBytes), C::kTileN * kSlabRowBytes, 1);
        wgmma_commit();
    };
    // The stage of block `step` is free once all four warps have read it.
    const auto refill = [&](bool of_k, int step) {
        if (step + C::kStages >= work.count) return;
        named_barrier_sync(1 + warpgroup, 128);
        if (threadIdx.x % 128) return;
        if (of_k)
            ring.fill_k(params, work, step + C::kStages);
        else
            ring.fill_v(params, work, step + C::kStages);
    };
    const auto soften_block = [&](int step) {
        if constexpr (Capped) {
#pragma unroll
            for (int i = 0; i < kScores; ++i) scores[i] = score_of(params.score, scores[i]);
        }
        const int64_t first = work.first_key<C>(step);
        if (first < work.common.begin || first + C::kTileN > work.common.end) exclude(scores, params, row, first);
        return soften(scores, state, multiplier);
    };
    const auto pack_weights = [&] {
#pragma unroll
        for (int i = 0; i < kScores / 2; ++i) weights[i] = pack<T>(scores[2 * i], scores[2 * i + 1]);
    };

    if (work.count == 0) return;
    start_scores(0);
    wgmma_wait<0>();
    wgmma_pin(scores);
    refill(true, 0);
    soften_block(0);
    pack_weights();
#pragma unroll 1
    for (int step = 1; step < work.count; ++step) {
        wgmma_pin(weights);
        wgmma_pin(out);
        start_scores(step);
        start_out(step - 1);
        wgmma_wait<1>();
        wgmma_pin(scores);
        refill(true, step);
        const float2 factor = soften_block(step);
        wgmma_wait<0>();
        wgmma_pin(out);
        refill(false, step - 1);
        if (__any_sync(0xffffffff, factor.x != 1.0f || factor.y != 1.0f)) {
#pragma unroll
            for (int i = 0; i < C::kColumns / 2; ++i) out[i] *= (i >> 1) & 1 ? factor.y : factor.x;
        }
        pack_weights();
    }
    wgmma_pin(weights);
    wgmma_pin(out);
    wgmma_fence();
    start_out(work.count - 1);
    wgmma_wait<0>();
    wgmma_pin(out);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        state[half].sum += __shfl_xor_sync(0xffffffff, state[half].sum, 1);
        state[half].sum += __shfl_xor_sync(0xffffffff, state[half].sum, 2);
    }
}

/* This warpgroup's out (unnormalised) and state, to shared memory. */
template <class C>
__device__ __forceinline__ void publish(const float (&out)[C::kColumns / 2], const RowState (&state)[2], float *partial,
                                        float2 *states) {
    const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4, column = 2 * (threadIdx.x % 4);
#pragma unroll
    for (int i = 0; i < C::kColumns / 2; i += 2)
        *reinterpret_cast<float2 *>(partial + (row + 8 * ((i >> 1) & 1)) * C::kPartialStride + 8 * (i >> 2) + column) =
            make_float2(out[i], out[i + 1]);
    if (column == 0) {
        states[row] = make_float2(state[0].maximum, state[0].sum);
        states[row + 8] = make_float2(state[1].maximum, state[1].sum);
    }
}

/* The end of a row without a sink: finish_row() with the fast reciprocal and logarithm, good to 2^-22. The sum is at
 * least 1 where a key is visible. */
__device__ __forceinline__ RowResult finish_fast(const RowState &total) {
    if (total.sum == 0.0f) return {0.0f, -INFINITY};
    return {__fdividef(1.0f, total.sum), (total.maximum + __log2f(total.sum)) * LN_2};
}

/* Joins the states [part][row] of row `local`; weights[part][row] become the factors of the partial results: so that
 * their sum is normalised, and the LSE is written, where `Final`. `row` is the call's. */
template <bool Final>
__device__ __forceinline__ RowState weigh(const Params &params, int parts, int rows, int local, int row,
                                          const float2 *states, float *weights) {
    RowState total;
#pragma unroll 4
    for (int part = 0; part < parts; ++part) total.maximum = fmaxf(total.maximum, states[part * rows + local].x);
#pragma unroll 4
    for (int part = 0; part < parts; ++part) {
        const float2 state = states[part * rows + local];
        total.sum += total.weight(state.x) * state.y;
    }
    float factor = 1;
    if constexpr (Final) {
        const RowResult result =
            params.sinks
                ? finish_row(total, load_as_float(params.sinks, params.sinks_dtype, blockIdx.y * params.sinks_stride))
                : finish_fast(total);
        factor = result.factor;
        if (params.lse && row < params.seq_q)
            params.lse[(int64_t(blockIdx.z) * params.heads + blockIdx.y) * params.seq_q + row] = result.lse;
    }
#pragma unroll 4
    for (int part = 0; part < parts; ++part)
        weights[part * rows + local] = total.weight(states[part * rows + local].x) * factor;
    return total;
}

/* Calls store(row, column, x) with the weighted sum of the partial results [part][row][column], 4 columns at a time. */
template <class C, class Store>
__device__ __forceinline__ void combine(int parts, int rows, const float *partials, const float *weights, Store store) {
    constexpr int kChunks = C::kColumns / 4;
    for (int item = threadIdx.x; item < rows * kChunks; item += C::kThreads) {
        const int row = item / kChunks, column = item % kChunks * 4;
        float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 4
        for (int part = 0; part < parts; ++part) {
            const float weight = weights[part * rows + row];
            const float4 x =
                *reinterpret_cast<const float4 *>(partials + (part * rows + row) * C::kPartialStride + column);
            sum.x += weight * x.x, sum.y += weight * x.y, sum.z += weight * x.z, sum.w += weight * x.w;
        }
        store(row, column, sum);
    }
}

/* Rows of the result from partial results of all shares, whose states are in place: [part][row]. */
template <class T, class C>
__device__ __forceinline__ void write_rows(const Params &params, int first, int parts, int rows, const float *partials,
                                           const float *weights) {
    T *out = static_cast<T *>(params.out) + blockIdx.z * params.out_batch + blockIdx.y * params.out_head;
    combine<C>(parts, rows, partials, weights, [&](int row, int column, float4 x) {
        if (first + row < params.seq_q && column < params.head_dim)
            *reinterpret_cast<uint2 *>(out + (first + row) * params.out_row + column) =
                make_uint2(pack<T>(x.x, x.y), pack<T>(x.z, x.w));
    });
}

/* One block a tile: the warpgroups' results become rows of the output. */
template <class T, class C>
__device__ __forceinline__ void merge_block(const Params &params, const Work &work, const float *partials,
                                            const float2 *states, float *weights) {
    __syncthreads();
    const int row = threadIdx.x;
    if (row < kTileM) weigh<true>(params, C::kWarpgroups, kTileM, row, work.row + row, states, weights);
    __syncthreads();
    write_rows<T, C>(params, work.row, C::kWarpgroups, kTileM, partials, weights);
}

/* A cluster a tile: each block joins its warpgroups' results, sends each row to the block that finishes it, and
 * finishes its own rows. What is sent lands where the rings were, and its bytes count on the receiver's barrier
 * `arrived`. */
template <class T, class C>
__device__ __forceinline__ void merge_cluster(const Params &params, const Work &work, const float *partials,
                                              const float2 *states, float *weights, float *landing,
                                              float2 *landing_states, uint64_t *arrived) {
    __syncthreads();
    cluster_arrive_relaxed(); // this block's rings are free
    const int row = threadIdx.x, rows = params.rows, rank = static_cast<int>(cluster_rank());
    RowState joined;
    if (row == 0) mbarrier_arrive_expect(arrived, kTileM * (C::kColumns * 4 + 8));
    if (row < kTileM) joined = weigh<false>(params, C::kWarpgroups, kTileM, row, 0, states, weights);
    __syncthreads();
    cluster_wait(); // everybody's rings are free
    if (row < kTileM)
        cluster_send(landing_states + rank * rows + row % unsigned(rows), arrived, row / unsigned(rows),
                     make_float2(joined.maximum, joined.sum));
    combine<C>(C::kWarpgroups, kTileM, partials, weights, [&](int from, int column, float4 x) {
        const int slot = rank * rows + from % unsigned(rows);
        cluster_send(landing + slot * C::kPartialStride + column, arrived, from / unsigned(rows), x);
    });
    __syncthreads(); // the weights are read
    mbarrier_wait(arrived, 0);
    const int first = work.row + rank * rows;
    if (row < rows) weigh<true>(params, params.splits, rows, row, first + row, landing_states, weights);
    __syncthreads();
    write_rows<T, C>(params, first, params.splits, rows, landing, weights);
}

template <class T, class C, bool Capped>
__global__ void __launch_bounds__(C::kThreads, 1) wgmma_split_sm90_kernel(const __grid_constant__ Params params) {
    extern __shared__ char unaligned[];
    char *shared = unaligned + (-smem_address(unaligned) & 1023);
    char *queries = shared, *rings = queries + C::kQueryBytes;
    float *partials = reinterpret_cast<float *>(rings + C::kWarpgroups * C::kRingBytes);
    float2 *states = reinterpret_cast<float2 *>(partials + C::kWarpgroups * C::kPartialBytes / 4);
    float2 *landing_states = states + C::kWarpgroups * kTileM;
    float *weights = reinterpret_cast<float *>(landing_states + kTileM);
    uint64_t *full_q = reinterpret_cast<uint64_t *>(weights + C::kWeightBytes / 4), *arrived = full_q + 1;

    const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
    const Work work = Work::find<C>(params, warpgroup);
    char *stages = rings + warpgroup * C::kRingBytes;
    const Ring<C> ring{stages, stages + C::kStages * C::kBlockBytes, full_q + 2 + warpgroup * 2 * C::kStages,
                       full_q + 2 + warpgroup * 2 * C::kStages + C::kStages};

    // Each leader prepares its own barriers and starts its own loads before anybody waits.
    if (threadIdx.x % 128 == 0) {
        for (int n = 0; n < 2 * C::kStages; ++n) mbarrier_init(ring.full_k + n, 1);
        if (warpgroup == 0) {
            mbarrier_init(full_q, 1);
            mbarrier_init(arrived, 1);
            tensor_map_prefetch(&params.q);
        }
        mbarrier_init_fence();
        tensor_map_prefetch(&params.k);
        tensor_map_prefetch(&params.v);
        dependency_wait();
        if (warpgroup == 0) {
            mbarrier_arrive_expect(full_q, C::kQueryBytes);
            tma_load_tile<C::kColumns, kTileM>(queries, &params.q, full_q, work.row, params.q_head ? blockIdx.y : 0,
                                               params.q_batch ? blockIdx.z : 0, kEvictFirst);
        }
        const int ready = work.count < C::kStages ? work.count : C::kStages;
        for (int step = 0; step < ready; ++step) {
            ring.fill_k(params, work, step);
            ring.fill_v(params, work, step);
        }
    }
    __syncthreads();
    dependency_wait();
    dependency_release();

    mbarrier_wait(full_q, 0);
    float out[C::kColumns / 2];
#pragma unroll
    for (int i = 0; i < C::kColumns / 2; ++i) out[i] = 0;
    RowState state[2];
    attend<T, C, Capped>(params, work, ring, smem_address(queries), warpgroup, out, state);
    publish<C>(out, state, partials + warpgroup * (C::kPartialBytes / 4), states + warpgroup * kTileM);
    if (params.splits == 1)
        merge_block<T, C>(params, work, partials, states, weights);
    else
        merge_cluster<T, C>(params, work, partials, states, weights, reinterpret_cast<float *>(rings), landing_states,
                            arrived);
}

} // namespace fa::sm90::split
