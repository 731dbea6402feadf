/* The wmma kernel: one producer warp that fetches key and value tiles, consumer warps that own query rows.
 *
 * No waiter falls two phases behind: each lane waits for itself and arrives for itself. A phase of `full` ends with an
 * arrival of all 32 lanes of the producer, each after its own wait for `empty`; a phase of `empty` with one of every
 * lane of every consumer, each after its own wait for `full`. A lane that arrived for its warp would need the warp
 * joined first. */
#pragma once

#include "common/mask.cuh"    // tile_keys, tile_common_keys
#include "common/params.cuh"  // AttentionParams
#include "common/ring.cuh"    // RingState
#include "common/rows.cuh"    // row_of, store_lse
#include "common/softmax.cuh" // finish_row, softmax_shift, weight_rounding
#include "wmma/fragment.cuh"  // load_block, scale_rows
#include "wmma/pipeline.cuh"  // barriers
#include "wmma/softmax.cuh"   // softmax_strip
#include "wmma/tile.cuh"      // load_tile, store_rows

namespace fa::wmma_tiles {

struct Params {
    AttentionParams p;
    ScoreOptions options;
    unsigned tiles_m;
    bool q_aligned, k_aligned, v_aligned, out_aligned;
};

template <typename T, class C>
__device__ __forceinline__ void produce(const Params &params, typename C::Shared &shared, int64_t batch,
                                        int64_t head_kv, const Span<int> &keys, int lane) {
    const AttentionParams &p = params.p;
    const HeadRows<T> k = {row_of<T>(p.k, batch, head_kv, 0), p.k.stride[2], p.k.stride[3], p.head_dim,
                           params.k_aligned};
    const HeadRows<T> v = {row_of<T>(p.v, batch, head_kv, 0), p.v.stride[2], p.v.stride[3], p.head_dim_v,
                           params.v_aligned};
    const auto fetch = [&](const HeadRows<T> &rows, char *slot, uint64_t *full, int key) {
        load_tile<C::kTileN, C::kHeadDim>(reinterpret_cast<T *>(slot), rows, key, p.key_begin, p.key_end, lane);
        if (rows.aligned)
            barrier_arrive_after_copies(full);
        else
            barrier_arrive(full);
    };
    RingState<C::kStages> at(0);
    for (int key = keys.begin; key < keys.end; key += C::kTileN, at.advance()) {
        barrier_wait(&shared.k_empty[at.stage], at.parity ^ 1);
        fetch(k, shared.k[at.stage], &shared.k_full[at.stage], key);
        barrier_wait(&shared.v_empty[at.stage], at.parity ^ 1);
        fetch(v, shared.v[at.stage], &shared.v_full[at.stage], key);
    }
    wait_copies();
}

/* Q of a warp in fragments, or room for one of them that is loaded anew for each key tile. */
template <typename T, class C> using Query = Left<T>[C::kQueryInRegisters ? C::kSteps : 1];

/* strip = Q K^T for the keys of a tile `k`; `q_tile`: the warp's query rows, read where fragments do not hold them. */
template <typename T, class C>
__device__ __forceinline__ void multiply_keys(float *strip, Query<T, C> &query, const T *q_tile, const T *k) {
    constexpr int kBlocksN = C::kTileN / 16;
    Accumulator scores[kBlocksN];
#pragma unroll
    for (int n = 0; n < kBlocksN; ++n) wmma::fill_fragment(scores[n], 0.0f);
#pragma unroll
    for (int d = 0; d < C::kSteps; ++d) {
        if constexpr (!C::kQueryInRegisters) load_block(query[0], q_tile + 16 * d, kPitch<C::kHeadDim>);
#pragma unroll
        for (int n = 0; n < kBlocksN; ++n) {
            RightTransposed<T> block;
            load_block(block, k + 16 * n * kPitch<C::kHeadDim> + 16 * d, kPitch<C::kHeadDim>);
            wmma::mma_sync(scores[n], query[C::kQueryInRegisters ? d : 0], block, scores[n]);
        }
    }
#pragma unroll
    for (int n = 0; n < kBlocksN; ++n)
        wmma::store_matrix_sync(strip + 16 * n, scores[n], C::kScorePitch, wmma::mem_row_major);
}

/* out += P V for the values of a tile `v`. */
template <typename T, class C>
__device__ __forceinline__ void multiply_values(Accumulator (&out)[C::kSteps], const T *weights, const T *v) {
#pragma unroll
    for (int n = 0; n < C::kTileN / 16; ++n) {
        Left<T> left;
        load_block(left, weights + 16 * n, C::kWeightPitch);
#pragma unroll
        for (int d = 0; d < C::kSteps; ++d) {
            Right<T> block;
            load_block(block, v + 16 * n * kPitch<C::kHeadDim> + 16 * d, kPitch<C::kHeadDim>);
            wmma::mma_sync(out[d], left, block, out[d]);
        }
    }
}

/* Writes the normalised output of a warp's rows from `warp_row` on, by way of its strip. */
template <typename T, class C>
__device__ __forceinline__ void write_output(const Params &params, int64_t batch, int64_t head, int warp_row,
                                             const Accumulator (&out)[C::kSteps], float *strip, int lane) {
    const AttentionParams &p = params.p;
    constexpr int kParts = C::kOutColumns / 16;
#pragma unroll
    for (int d = 0; d < C::kSteps; d += kParts) {
        __syncwarp();
#pragma unroll
        for (int i = 0; i < kParts; ++i)
            wmma::store_matrix_sync(strip + 16 * i, out[d + i], C::kScorePitch, wmma::mem_row_major);
        __syncwarp();
        store_rows<kStripRows, C::kOutColumns>(row_of<T>(p.out, batch, head, 0), p.out.stride[2], p.out.stride[3],
                                               params.out_aligned, p.head_dim_v, 16 * d, warp_row, p.seq_q, strip,
                                               C::kScorePitch, lane);
    }
}

template <typename T, class C, bool kSimple>
__device__ __forceinline__ void consume(const Params &params, typename C::Shared &shared, int64_t batch, int64_t head,
                                        int first_row, const Span<int> &keys, int warp, int lane) {
    const AttentionParams &p = params.p;
    float *strip = shared.strip[warp], *factor = shared.factor[warp];
    T *const q_tile = reinterpret_cast<T *>(C::kQueryInRegisters ? reinterpret_cast<char *>(strip) : shared.q[warp]);
    const int warp_row = first_row + warp * kStripRows;

    OwnedRow owned = {.row = warp_row + lane % kStripRows, .keys = {0, 0}};
    if (owned.row < p.seq_q) owned.keys = narrow(row_keys(p, owned.row));
    const int end_row = min(warp_row + kStripRows, int(p.seq_q));
    Span<int> seen = {0, 0}, common = {0, 0};
    if (warp_row < p.seq_q) {
        const HeadRows<T> q = {row_of<T>(p.q, batch, head, 0), p.q.stride[2], p.q.stride[3], p.head_dim,
                               params.q_aligned};
        load_tile<kStripRows, C::kHeadDim>(q_tile, q, warp_row, 0, p.seq_q, lane);
        seen = narrow(tile_keys(p, warp_row, end_row));
        common = narrow(tile_common_keys(p, warp_row, end_row));
        wait_copies();
    }
    __syncwarp();
    Query<T, C> query;
    if constexpr (C::kQueryInRegisters) {
#pragma unroll
        for (int d = 0; d < C::kSteps; ++d) load_block(query[d], q_tile + 16 * d, kPitch<C::kHeadDim>);
        __syncwarp();
    }

    Accumulator out[C::kSteps];
#pragma unroll
    for (int d = 0; d < C::kSteps; ++d) wmma::fill_fragment(out[d], 0.0f);

    RingState<C::kStages> at(0);
    for (int key = keys.begin; key < keys.end; key += C::kTileN, at.advance()) {
        const bool needed = key < seen.end && key + C::kTileN > seen.begin;
        barrier_wait(&shared.k_full[at.stage], at.parity);
        if (needed) multiply_keys<T, C>(strip, query, q_tile, reinterpret_cast<const T *>(shared.k[at.stage]));
        __syncwarp();
        barrier_arrive(&shared.k_empty[at.stage]);
        if (needed) {
            const bool all_visible = common.holds(key, C::kTileN);
            const float rescale = softmax_strip<T, C::kTileN, C::kWeightPitch, kSimple>(
                p, params.options, batch, head, owned, strip, key, all_visible, lane);
            if (lane < kStripRows) factor[lane] = rescale;
            const bool changed = __any_sync(~0u, rescale != 1.0f);
            __syncwarp();
            if (changed) scale_rows(out, factor);
        }
        barrier_wait(&shared.v_full[at.stage], at.parity);
        if (needed)
            multiply_values<T, C>(out, reinterpret_cast<const T *>(strip),
                                  reinterpret_cast<const T *>(shared.v[at.stage]));
        __syncwarp();
        barrier_arrive(&shared.v_empty[at.stage]);
    }

    owned.state.sum += __shfl_xor_sync(~0u, owned.state.sum, 16);
    if constexpr (kSimple)
        owned.state.sum +=
            weight_rounding<T>(owned.highest, params.options.score.scale_log2, softmax_shift(owned.state.maximum));
    const RowResult result = finish_row(p, head, owned.state);
    if (lane < kStripRows) factor[lane] = result.factor;
    if (lane < kStripRows && owned.row < p.seq_q) store_lse(p, batch, head, owned.row, result.lse);
    __syncwarp();
    scale_rows(out, factor);
    write_output<T, C>(params, batch, head, warp_row, out, strip, lane);
}

/* Where three blocks share a multiprocessor, bias, ALiBi and mask take the registers of the third. */
template <typename T, class C, bool kSimple>
__global__ void __launch_bounds__(C::kThreads, !kSimple && C::kBlocks > 2 ? 2 : C::kBlocks)
    wmma_kernel(const __grid_constant__ Params params) {
    FA_CHAOS_BEGIN();
    extern __shared__ __align__(128) char memory[];
    typename C::Shared &shared = *reinterpret_cast<typename C::Shared *>(memory);
    const AttentionParams &p = params.p;
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const unsigned tiles = params.tiles_m, unit = blockIdx.x / tiles, heads = p.heads;
    const int first_row = int(tiles - 1 - blockIdx.x % tiles) * C::kTileM; // causal: the longest first
    const int64_t head = unit % heads, batch = unit / heads;
    Span<int> keys = narrow(tile_keys(p, first_row, min(first_row + C::kTileM, int(p.seq_q))));
    keys.begin &= ~3; // bias and mask are read by fours

    if (threadIdx.x == 0) {
        for (int s = 0; s < C::kStages; ++s) {
            barrier_init(&shared.k_full[s], kWarp);
            barrier_init(&shared.v_full[s], kWarp);
            barrier_init(&shared.k_empty[s], C::kConsumers * kWarp);
            barrier_init(&shared.v_empty[s], C::kConsumers * kWarp);
        }
    }
    __syncthreads();
    if (warp == C::kConsumers)
        produce<T, C>(params, shared, batch, head / (p.heads / p.heads_kv), keys, lane);
    else
        consume<T, C, kSimple>(params, shared, batch, head, first_row, keys, warp, lane);
}

} // namespace fa::wmma_tiles
