/* The attention kernel on mma.sync: one block takes kTileM query rows of one head and walks over the keys they see.
 *
 *     S = Q K^T            a = query fragments (registers or ldmatrix), b = ldmatrix of the key rows as they lie
 *     P = 2^(c S - shift)  in the registers of S; rounded to T, two neighbouring 8-key columns of S are operand a again
 *     O = O 2^(..) + P V   b = ldmatrix.trans of the value rows
 *
 * Warps: kWarpsM groups of 16 kRowTiles query rows; kWarpsN warps share a group's rows and split each key tile, each
 * with its own shift, sum and output, merged in shared memory at the end (small grids: more warps a row). Where even so
 * the grid is small and keys are many, blocks split the keys as well, and combine_splits() joins their parts. Key tiles
 * are walked from the last to the first, so that the masked ones of a causal call come first, in the shadow of the
 * first loads; a tile that a warp's rows see whole is not masked, one that they do not see is not multiplied. K and V:
 * a ring of kStages tiles filled by cp.async, one barrier a tile; with kStages 1 the next K is fetched while P V runs,
 * and with it the tile's bias and mask, and V while Q K^T runs, two barriers a tile.
 *
 * No phases are counted: a thread waits for its own copies (cp.async groups, in their order), then __syncthreads joins
 * all warps: every copy of the tile is there, and no warp reads the stage that is filled next. */
#pragma once

#include "common/convert.cuh" // from_float
#include "common/partial.cuh" // finish_joined, partial_states
#include "common/ptx.cuh"     // cp_async_commit, cp_async_wait, exp2_fast
#include "common/rows.cuh"    // row_of, store_lse
#include "common/softmax.cuh" // RowResult
#include "common/tiles.cuh"   // place_of
#include "sm80/bias.cuh"      // BiasTiles
#include "sm80/config.cuh"    // MmaArgs, BlockPlace
#include "sm80/scores.cuh"    // mask_scores, scale_scores
#include "sm80/tile.cuh"      // RowLoader
#include "sm80/warp.cuh"      // MmaWarp

namespace fa {

/* Keys that the block's rows see, as tiles; with splits, this block's share of them. */
template <class C> __device__ __forceinline__ Span<int> tiles_of_block(const MmaArgs &args, int block_query) {
    const int block_last = min(block_query + C::kTileM, int(args.problem.seq_q)) - 1;
    const int begin = begin_of(args.visible, block_query), end = end_of(args.visible, block_last);
    Span<int> tiles = {begin / C::kTileN, 0};
    tiles.end = begin < end ? (end + C::kTileN - 1) / C::kTileN : tiles.begin;
    if constexpr (C::kSplits) {
        const int count = tiles.end - tiles.begin,
                  share = args.splits > 1 ? (count + args.splits - 1) / args.splits : count;
        tiles.begin = min(tiles.begin + int(blockIdx.y) * share, tiles.end);
        tiles.end = min(tiles.begin + share, tiles.end);
    }
    return tiles;
}

/* Starts the copy of the block's queries to shared memory. */
template <class C>
__device__ __forceinline__ void copy_queries(const MmaArgs &args, const BlockPlace &block, uint32_t to, int first) {
    const AttentionParams &p = args.problem;
    RowLoader<C::kHeadDim, C::kThreads, C::kTileM> loader(row_of<typename C::T>(p.q, block.batch, block.head, 0),
                                                          p.q.stride, p.head_dim, 0, int(p.seq_q), first);
    loader.copy(to, first, !C::kGeneral || args.chunks_q);
    cp_async_commit();
}

/* Of a warp whose rows start at `first`: keys that some of its rows see, and that all of them see. */
struct Sight {
    Span<int> some, all;
};
template <class C> __device__ __forceinline__ Sight sight_of(const Band &visible, int first, int seq_q) {
    const int last = min(first + C::kWarpRows, seq_q) - 1;
    return {{begin_of(visible, first), first <= last ? end_of(visible, last) : 0}, common_span(visible, first, last)};
}

/* Steps of the walk over key tiles: what is copied of tile n to stage m, the keys that the warp sees, scores of keys
 * from one on in a stage, and their weights times its values. */
template <class LoadKeys, class LoadValues, class SightOf, class ScoresOf, class AddValues> struct WalkSteps {
    LoadKeys load_keys;
    LoadValues load_values;
    SightOf sight;
    ScoresOf scores;
    AddValues add_values;
};

/* The walk with one stage, two barriers a tile. The warp's keys begin at `warp_key` of each tile. */
template <class C, class Steps>
__device__ __forceinline__ void walk_single(MmaWarp<C> &mine, typename MmaWarp<C>::Tile &s, float scale,
                                            const Span<int> &tiles, int warp_key, const Steps &steps) {
    int tile = tiles.end - 1;
    if constexpr (C::kPlain) {
        if (!tiles.empty()) {
            steps.load_keys(tile, 0);
            cp_async_commit();
            cp_async_wait<1>();
            __syncthreads();
            mine.load_query();
        }
    } else if (!tiles.empty()) {
        tile = tiles.end; // a first round that only loads: the copies of bias and mask are long, once is enough
    }
    for (; tile >= tiles.begin; --tile) {
        const bool there = C::kPlain || tile < tiles.end;
        const int key = tile * C::kTileN + warp_key;
        const Sight seen = steps.sight();
        const bool some = there && key < seen.some.end && key + C::kKeys > seen.some.begin;
        const bool masked = key < seen.all.begin || key + C::kKeys > seen.all.end;
        cp_async_wait<0>();
        __syncthreads();
        if (there)
            steps.load_values(tile, 0);
        else
            mine.load_query();
        cp_async_commit();
        auto next_keys = [&] {
            cp_async_wait<0>();
            __syncthreads();
            if (tile > tiles.begin) steps.load_keys(tile - 1, 0);
            cp_async_commit();
        };
        if (some) steps.scores(key, masked, 0);
        if constexpr (C::kRowTiles == 1) {
            next_keys(); // the earlier the better
            if (some) mine.weigh(s, scale, [&] { steps.add_values(s, 0); });
        } else { // but not beside the scores of two row tiles: too many registers
            typename MmaWarp<C>::Weights weights;
            if (some) mine.weigh(s, scale, [&] { mine.round_weights(weights, s); });
            next_keys();
            if (some) steps.add_values(weights, 0);
        }
    }
}

/* The walk with a ring of stages, one barrier a tile. */
template <class C, class Steps>
__device__ __forceinline__ void walk_ring(MmaWarp<C> &mine, typename MmaWarp<C>::Tile &s, float scale,
                                          const Span<int> &tiles, int warp_key, const Steps &steps) {
    if (!tiles.empty()) {
#pragma unroll
        for (int n = 0; n < C::kStages - 1; ++n) {
            const int tile = tiles.end - 1 - n;
            if (tile >= tiles.begin) steps.load_keys(tile, n), steps.load_values(tile, n);
            cp_async_commit();
        }
        cp_async_wait<C::kStages - 1>();
        __syncthreads();
        mine.load_query();
    }
    int stage = 0;
    for (int tile = tiles.end - 1; tile >= tiles.begin; --tile) {
        const int key = tile * C::kTileN + warp_key;
        const Sight seen = steps.sight();
        const bool some = key < seen.some.end && key + C::kKeys > seen.some.begin;
        const bool masked = key < seen.all.begin || key + C::kKeys > seen.all.end;
        cp_async_wait<C::kStages - 2>();
        __syncthreads();
        const int next = tile - (C::kStages - 1), free = stage == 0 ? C::kStages - 1 : stage - 1;
        if (next >= tiles.begin) steps.load_keys(next, free), steps.load_values(next, free);
        cp_async_commit();
        if (some) {
            steps.scores(key, masked, stage);
            mine.weigh(s, scale, [&] { steps.add_values(s, stage); });
        }
        stage = stage == C::kStages - 1 ? 0 : stage + 1;
    }
}

/* Merges the warps that share a group's rows: the first one of a group has the result. `slots` is free by then. */
template <class C>
__device__ __forceinline__ void join_warps(MmaWarp<C> &mine, float *slots, int warp_m, int warp_n, int lane) {
    auto slot = [&](int part) { return slots + ((part - 1) * C::kWarpsM + warp_m) * C::kMergeValues * 32; };
    __syncthreads();
    if (warp_n > 0) mine.give(slot(warp_n), lane);
    __syncthreads();
    if (warp_n > 0) return;
    for (int part = 1; part < C::kWarpsN; ++part) mine.take(slot(part), lane);
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocksPerSm) mma_kernel(const __grid_constant__ MmaArgs args) {
    FA_CHAOS_BEGIN();
    extern __shared__ __align__(128) unsigned char shared[];
    using T = typename C::T;
    const AttentionParams &p = args.problem;
    const Band &visible = args.visible;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warp_m = warp % C::kWarpsM, warp_n = warp / C::kWarpsM;

    const BlockPlace block(args);
    const int block_query = block.row_block * C::kTileM, seq_q = int(p.seq_q);
    const Span<int> tiles = tiles_of_block<C>(args, block_query);
    const int warp_query = block_query + warp_m * C::kWarpRows;
    const Sight kept = sight_of<C>(visible, warp_query, seq_q);
    // Values computed from again(x) are computed anew for each tile.
    auto again = [](int x) {
        asm volatile("" : "+r"(x));
        return x;
    };

    const uint32_t query_tile = shared_address(shared), key_tiles = query_tile + C::kQueryBytes;
    const uint32_t value_tiles = key_tiles + C::kStages * C::kTileBytes;
    const uint32_t warp_query_rows = query_tile + warp_m * C::kWarpRows * C::kRowBytes;
    const uint32_t warp_key_rows = warp_n * C::kKeys * C::kRowBytes; // in each tile

    using Loader = RowLoader<C::kHeadDim, C::kThreads, C::kTileN>;
    const int last_tile = (tiles.end - 1) * C::kTileN;
    const int head_kv = args.group.quotient(block.head);
    Loader key_loader(row_of<T>(p.k, block.batch, head_kv, 0), p.k.stride, p.head_dim, visible.key_begin,
                      visible.key_end, last_tile);
    Loader value_loader(row_of<T>(p.v, block.batch, head_kv, 0), p.v.stride, p.head_dim_v, visible.key_begin,
                        visible.key_end, last_tile);
    auto load_keys = [&](int tile, int stage) {
        key_loader.copy(key_tiles + stage * C::kTileBytes, tile * C::kTileN, !C::kGeneral || args.chunks_k);
        if constexpr (!C::kPlain) BiasTiles<C>::copy(args, block, query_tile, tile * C::kTileN);
    };
    auto load_values = [&](int tile, int stage) {
        value_loader.copy(value_tiles + stage * C::kTileBytes, tile * C::kTileN, !C::kGeneral || args.chunks_v);
    };

    MmaWarp<C> mine(warp_query_rows, lane);
    const float scale = C::kPlain ? args.score.scale_log2 : 1.0f;
    ScorePlace place{warp_query + lane / 4, 0};
    typename MmaWarp<C>::Tile s;

    typename MmaWarp<C>::KeysAddress key_address(key_tiles + warp_key_rows, lane);
    typename MmaWarp<C>::RowsAddress value_address(value_tiles + warp_key_rows, lane);
    if (C::kKeepAddresses) key_address.keep(), value_address.keep();
    auto second_product = [&](const auto &weights, int stage) {
        mine.multiply_values(weights, value_address.shifted(stage * C::kTileBytes));
    };
    auto scores = [&](int key, bool masked, int stage) {
        place.key = key + lane % 4 * 2;
        mine.multiply_keys(s, key_address.shifted(stage * C::kTileBytes));
        if constexpr (!C::kPlain) {
            scale_scores<C::kRowTiles, C::kKeys, C::kGeneral>(s, args.score);
            BiasTiles<C>::apply(args, query_tile, warp_m * C::kWarpRows, lane, s);
        }
        if (C::kShort) place.query = again(warp_query) + lane / 4;
        if (masked) mask_scores<C::kRowTiles, C::kKeys>(s, visible, place);
    };

    if (!tiles.empty()) copy_queries<C>(args, block, query_tile, block_query);
    const auto sight = [&] { return C::kShort ? sight_of<C>(visible, again(warp_query), seq_q) : kept; };
    const WalkSteps steps{load_keys, load_values, sight, scores, second_product};
    if constexpr (C::kStages == 1)
        walk_single(mine, s, scale, tiles, warp_n * C::kKeys, steps);
    else
        walk_ring(mine, s, scale, tiles, warp_n * C::kKeys, steps);
    if constexpr (C::kWarpsN > 1) {
        join_warps(mine, reinterpret_cast<float *>(shared + C::kQueryBytes), warp_m, warp_n, lane);
        if (warp_n > 0) return;
    }
    if (C::kSplits && args.splits > 1)
        mine.finish_part(args, warp_m, blockIdx.y, lane);
    else
        mine.finish(args, warp_m, warp_query_rows, lane);
}

/* Joins the parts of a row, one warp a row, in their order: the result does not depend on which was done first. */
template <typename T, int kHeadDim>
__global__ void __launch_bounds__(128) combine_splits(const __grid_constant__ MmaArgs args) {
    constexpr int kColumns = kHeadDim / 32; // of a lane: every 32nd
    const AttentionParams &p = args.problem;
    const int64_t rows = args.rows(), row = int64_t(blockIdx.x) * 4 + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    if (row >= rows) return;
    const auto [batch, head, query] = place_of(row, p.seq_q, p.heads);
    const float2 *states = partial_states<kHeadDim>(args.partial, args.splits, rows) + row;

    const float sink = sink_of(args, head, int(query));
    float shift = kNoShift;
    for (int n = 0; n < args.splits; ++n) shift = fmaxf(shift, states[n * rows].x);
    float sum = 0.0f, out[kColumns] = {};
#pragma unroll 4
    for (int n = 0; n < args.splits; ++n) {
        const float2 state = states[n * rows];
        const float factor = exp2_fast(state.x - shift);
        sum += state.y * factor;
        const float *part = args.partial + (n * rows + row) * kHeadDim + lane;
#pragma unroll
        for (int i = 0; i < kColumns; ++i) out[i] += part[32 * i] * factor;
    }
    const RowResult result = finish_joined(shift, sum, sink);
    if (lane == 0) store_lse(p, batch, head, query, result.lse);
    T *to = row_of<T>(p.out, batch, head, query);
#pragma unroll
    for (int i = 0; i < kColumns; ++i)
        if (lane + 32 * i < p.head_dim_v) to[(lane + 32 * i) * p.out.stride[3]] = from_float<T>(out[i] * result.factor);
}

} // namespace fa
