/* mma_sm80 for sequences, pages, positions, segments, intervals, ALiBi, dropout, max_logit and float32 results: a
 * block takes units of work (64 rows and the keys that they see, or a part of them), one after another.
 *
 * Tiles of keys are walked from the first to the last. While one is at work the next is on its way by cp.async, row by
 * row, and the keys after it are looked up. No phases are counted: a thread waits for its own copies, then
 * __syncthreads joins all warps: every copy of the tile is there, and no warp reads the stage and the places that are
 * filled next. A warp without rows loads, and does nothing else.
 *
 * States of chunks are folded through workspace, where a lane finds what it wrote itself; of a sequence in parts the
 * last state of each part stays there, and fold_parts() joins them. */
#pragma once

#include "common/convert.cuh"    // from_float
#include "common/fold.cuh"       // fold_state, fold_value
#include "common/ptx.cuh"        // cp_async_commit, cp_async_wait
#include "philox.h"              // fa_dropout_read
#include "sm80/scores.cuh"       // scale_scores
#include "sm80/serve_config.cuh" // ServeArgs
#include "sm80/serve_job.cuh"    // Job, find_job, place_rows, Chunks, KeyLookup
#include "sm80/serve_rows.cuh"   // ServeRows
#include "sm80/serve_tile.cuh"   // RowGatherer

namespace fa::sm80 {

/* Keys that some, and that all, of a warp's rows see. */
struct WarpSight {
    unsigned begin, end, all_begin, all_end;

    template <class Shared> __device__ __forceinline__ WarpSight(const Shared &shared, const Job &job, int warp_row) {
        const int row = warp_row + threadIdx.x % 16;
        const ServeRow mine = shared.row[row];
        const bool exists = row < job.count, sees = exists && mine.begin < mine.end;
        begin = __reduce_min_sync(~0u, sees ? unsigned(mine.begin) : ~0u);
        end = __reduce_max_sync(~0u, sees ? unsigned(mine.end) : 0u);
        all_begin = __reduce_max_sync(~0u, exists ? unsigned(mine.begin) : 0u);
        all_end = __reduce_min_sync(~0u, exists ? unsigned(mine.end) : ~0u);
    }
    __device__ __forceinline__ bool meets(unsigned key, unsigned keys) const { return key < end && key + keys > begin; }
    __device__ __forceinline__ bool holds(unsigned key, unsigned keys) const {
        return key >= all_begin && key + keys <= all_end;
    }
};

/* A block's way through one unit. */
template <class C> struct ServeUnit {
    using T = typename C::T;
    using Shared = ServeShared<C>;
    using Gatherer = RowGatherer<C::kHeadDim, C::kThreads, C::kTileN>;
    using QueryGatherer = RowGatherer<C::kHeadDim, C::kThreads, kServeRows>;
    static_assert(C::kTileM == kServeRows);

    const ServeArgs &args;
    const Job &job;
    Shared &shared;
    const uint32_t tiles; // shared memory: Q, K, V
    const Chunks chunks;
    const int chunk_begin, chunk_end; // of this unit
    const int tile_begin, tile_end;

    __device__ __forceinline__ ServeUnit(const ServeArgs &args, const Job &job, Shared &shared, uint32_t tiles)
        : args(args), job(job), shared(shared), tiles(tiles), chunks(job.chunked(args), shared.keys),
          chunk_begin(chunks.first_of(args, job.part)), chunk_end(chunks.first_of(args, job.part + 1)),
          tile_begin(tile_of(chunk_begin, shared.keys.begin)), tile_end(tile_of_end()) {}

    __device__ __forceinline__ int tile_of(int chunk, int64_t least) const {
        const int64_t key = int64_t(chunk) << chunks.shift;
        return int((key > least ? key : least) / C::kTileN);
    }
    __device__ __forceinline__ int tile_of_end() const {
        const int64_t key = int64_t(chunk_end) << chunks.shift, end = shared.keys.end;
        return shared.keys.begin < end ? int(((key < end ? key : end) + C::kTileN - 1) / C::kTileN) : tile_begin;
    }
    __device__ __forceinline__ bool exists() const {
        return job.part == 0 || (job.chunked(args) && chunk_begin < chunk_end);
    }
    __device__ __forceinline__ uint32_t keys_at(int stage) const {
        return tiles + C::kQueryBytes + stage * 2 * C::kTileBytes;
    }

    __device__ __forceinline__ void load_query() const {
        const AttentionParams &p = args.call.p;
        const int64_t batch = job.out_batch(args);
        QueryGatherer(p.q, 0, p.head_dim, args.chunks_q).copy(tiles, [&](int row) {
            if (row >= job.count) return kNowhere;
            const RowPlace at = job.at(args, row);
            return row_offset(p.q, batch, at.head, job.entry.first_q + at.query);
        });
    }
    /* A tile of K and V to its stage; its keys have been looked up. */
    __device__ __forceinline__ void load(int stage, int at) const {
        const AttentionParams &p = args.call.p;
        const KeyPlace *place = shared.place[at];
        Gatherer(p.k, job.head_kv, p.head_dim, args.chunks_k).copy(keys_at(stage), [&](int row) {
            return place[row].k;
        });
        Gatherer(p.v, job.head_kv, p.head_dim_v, args.chunks_v).copy(keys_at(stage) + C::kTileBytes, [&](int row) {
            return place[row].v;
        });
    }

    /* Whether some key of a tile has a place: with segments or intervals whole tiles may have none, and change nothing.
     */
    __device__ __forceinline__ bool some_held(int at) const {
        if (!C::kDressed || !(args.segments.q || args.intervals.begins)) return true;
        return C::kTileN == 64 ? shared.held[at][0] | shared.held[at][C::kTileN / 32 - 1] : shared.held[at][0];
    }

    /* Products to scores in base 2. */
    __device__ __forceinline__ void score(typename ServeRows<C>::Tile &s, int row, int first) const {
        scale_scores<1, C::kKeys, true>(s, args.score);
        const bool biased = C::kDressed && args.call.p.bias.data;
        if constexpr (C::kDressed)
            if (biased) ServeRows<C>::add_biases(s, args, job, shared, row, first);
        if (!biased && args.call.alibi.data) ServeRows<C>::add_slopes(s, shared, row, first);
    }

    /* Products to weights, of the tile whose keys begin at `key`. With max_logit keys are hidden twice: from the
     * products, which it is the largest of, then from the scores. */
    __device__ __forceinline__ void weigh(ServeRows<C> &rows, typename ServeRows<C>::Tile &s, const WarpSight &sight,
                                          int warp_row, int key, int at) const {
        const AttentionParams &p = args.call.p;
        const int lane = threadIdx.x % 32, row = warp_row + lane / 4, first = key + lane % 4 * 2;
        const auto hide = [&] {
            uint64_t held = shared.held[at][0];
            if constexpr (C::kTileN == 64) held |= uint64_t(shared.held[at][1]) << 32;
            const uint64_t all = ~uint64_t(0) >> (64 - C::kTileN);
            if (held != all || !sight.holds(key, C::kTileN) ||
                (C::kDressed && (p.mask.data || args.segments.q || args.intervals.count > 1)))
                rows.mask(s, args, job, shared, row, first, held >> (first - key));
        };
        if constexpr (C::kDressed) {
            bool of_products = args.max_logit.at;
#pragma unroll 1
            while (true) {
                if (!of_products) score(s, row, first);
                hide();
                if (!of_products) break;
                rows.note_logits(s, args, job, shared, row, first);
                of_products = false;
            }
        } else {
            score(s, row, first);
            hide();
        }
        rows.weigh(s);
        if constexpr (C::kDressed)
            if (args.call.dropout.threshold) {
                const RowPlace place = job.at(args, row);
                rows.drop(s, shared.dropout, job.batch, place.head, place.query, first);
            }
    }

    /* The end of this unit. */
    __device__ __forceinline__ void end(ServeRows<C> &rows, const typename ServeRows<C>::States &states,
                                        const Slots &slots, int warp_row, int slot) const {
        const bool parted = chunks.parts(args) > 1;
        if (parted) rows.leave(states, job, slots, warp_row + threadIdx.x % 32 / 4, slot);
        if (!parted || job.part == 0) // rows of no query are those of the first part
            rows.finish(states, args, job, warp_row, parted ? job.count : 0, tiles + warp_row * C::kRowBytes);
    }

    /* The end of chunk `chunk`; `last`: of this unit. */
    __device__ __forceinline__ void close(ServeRows<C> &rows, int warp_row, int chunk, bool last) const {
        const Slots slots(args, job);
        const int row = warp_row + threadIdx.x % 32 / 4;
        const bool grouped = job.chunked(args) && !args.chunk_parts;
        const int slot = args.whole ? 0 : job.part;
        auto states = rows.states();
        if (grouped && chunk != chunk_begin && chunk % kGroup) rows.fold(states, job, slots, row, slot);
        if (!last && (chunk + 1) % kGroup) {
            rows.leave(states, job, slots, row, slot);
        } else {
            if (args.whole && chunk / kGroup != chunk_begin / kGroup) rows.fold(states, job, slots, row, 1);
            if (!last)
                rows.leave(states, job, slots, row, 1);
            else
                end(rows, states, slots, warp_row, slot);
        }
        if (!last) rows.clear();
    }

    __device__ __forceinline__ void run() const {
        const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * C::kWarpRows;
        const WarpSight sight(shared, job, warp_row);
        ServeRows<C> rows(tiles + warp_row * C::kRowBytes, lane);
        KeyLookup<C> lookup;
        if (tile_begin < tile_end) {
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                lookup.find(args, job, shared, tile_begin + n, tile_begin + n < tile_end);
                lookup.store(shared, n);
            }
            load_query();
            __syncthreads();
            load(0, 0);
            cp_async_commit();
        }
        int stage = 0, at = 0; // of the tile at work: where it lies, where its places do
        for (int tile = tile_begin; tile < tile_end; ++tile) {
            const int next = at == 2 ? 0 : at + 1, after = next == 2 ? 0 : next + 1;
            cp_async_wait<0>();
            __syncthreads();
            if (tile == tile_begin) rows.load_query();
            if (tile + 1 < tile_end) load(stage ^ 1, next);
            cp_async_commit();
            lookup.find(args, job, shared, tile + 2, tile + 2 < tile_end);
            const int key = tile * C::kTileN;
            if (sight.meets(key, C::kTileN) && some_held(at)) {
                typename ServeRows<C>::Tile s;
                rows.multiply_keys(s, typename ServeRows<C>::KeysAddress(keys_at(stage), lane));
                weigh(rows, s, sight, warp_row, key, at);
                rows.multiply_values(s, typename ServeRows<C>::RowsAddress(keys_at(stage) + C::kTileBytes, lane));
            }
            lookup.store(shared, after);
            const int64_t end = int64_t(tile + 1) * C::kTileN;
            if (warp_row < job.count && tile + 1 < tile_end && !(end & ((int64_t(1) << chunks.shift) - 1)))
                close(rows, warp_row, int(key >> chunks.shift), false);
            stage ^= 1, at = next;
        }
        if constexpr (C::kDressed)
            if (args.max_logit.at) rows.raise_logits(args, job, warp_row + lane / 4);
        if (warp_row < job.rows_out) close(rows, warp_row, chunk_end - 1, true);
    }
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocksPerSm) mma_serve(const __grid_constant__ ServeArgs args) {
    FA_CHAOS_BEGIN();
    extern __shared__ __align__(128) unsigned char memory[];
    auto &shared = *reinterpret_cast<ServeShared<C> *>(memory + C::kSharedBytes);
    if constexpr (C::kDressed)
        if (threadIdx.x == 0 && args.call.dropout.threshold) shared.dropout = fa_dropout_read(&args.call.dropout);
    for (int64_t n = blockIdx.x; n < args.units; n += gridDim.x) {
        const Job job = find_job(args, n, shared.joined);
        if (!job.may_exist(args)) continue; // the same in all threads
        if (threadIdx.x == 0) shared.job = job;
        place_rows(args, job, shared);
        if constexpr (C::kDressed) {
            if (args.segments.q) place_ids(args, job, shared);
            if (args.intervals.begins) place_intervals(args, job, shared);
        }
        const ServeUnit<C> unit(args, shared.job, shared, shared_address(memory));
        if (unit.exists()) unit.run();
        __syncthreads(); // all threads are done with the shared memory
    }
}

/* Shared memory of fold_parts. */
struct FoldShared {
    ServeRow row[kServeRows];
    int64_t joined[kFewestWarps];
    fa_span keys;
};

/* A row of a sequence in parts, in a warp: each lane has every 32nd column. */
template <int kHeadDim> struct FoldRow {
    static constexpr int kColumns = kHeadDim / 32;
    RowState total, group;
    float total_out[kColumns], group_out[kColumns];

    __device__ static __forceinline__ void join(RowState &to, float (&out)[kColumns], const RowState &state,
                                                const float (&values)[kColumns], bool first) {
        Factors f = {0.0f, 1.0f};
        if (first)
            to = state;
        else
            f = fold_state(to, state.maximum, state.sum);
#pragma unroll
        for (int i = 0; i < kColumns; ++i) out[i] = first ? values[i] : fold_value(out[i], values[i], f);
    }

    __device__ __forceinline__ FoldRow(const ServeArgs &args, const Job &job, const Slots &slots, const Chunks &chunks,
                                       int row) {
        const int parts = chunks.parts(args);
        bool first = true;
#pragma unroll 4
        for (int part = 0; part < parts; ++part) {
            const int64_t slot = slots.at(job, row, part);
            const float2 saved = *slots.template state<kHeadDim>(slot);
            const float *from = slots.template values<kHeadDim>(slot) + threadIdx.x % 32;
            RowState state;
            state.maximum = saved.x, state.sum = saved.y;
            float values[kColumns];
#pragma unroll
            for (int i = 0; i < kColumns; ++i) values[i] = from[32 * i];
            const int chunk = chunks.first_of(args, part), last = chunks.first_of(args, part + 1);
            join(group, group_out, state, values, part == 0 || chunk % kGroup == 0);
            if (part + 1 < parts && last % kGroup) continue;
            join(total, total_out, group, group_out, first);
            first = false;
        }
    }

    template <typename T> __device__ __forceinline__ void write(const ServeArgs &args, const Job &job, int row) const {
        const AttentionParams &p = args.call.p;
        const int lane = threadIdx.x % 32;
        const RowPlace at = job.at(args, row);
        const int64_t batch = job.out_batch(args), query = job.first_out + at.query;
        const RowResult result = finish_joined(total.maximum, total.sum, serve_sink(p, at.head));
        const fa_dropout &dropout = args.call.dropout;
        const float kept = dropout.threshold ? static_cast<float>(fa_dropout_scale(&dropout)) : 1.0f;
        if (lane == 0) store_lse(p, batch, at.head, query, result.lse);
        const int64_t to = row_offset(p.out, batch, at.head, query);
#pragma unroll
        for (int i = 0; i < kColumns; ++i)
            store_element<T>(p, to, lane + 32 * i, total.sum != 0.0f ? total_out[i] * (result.factor * kept) : 0.0f);
    }
};

/* A sequence and pack of heads a block. */
template <typename T, int kHeadDim>
__global__ void __launch_bounds__(128) fold_parts(const __grid_constant__ ServeArgs args) {
    FA_CHAOS_BEGIN();
    __shared__ FoldShared shared;
    for (int64_t n = blockIdx.x; n < args.call.p.batch * args.packed_heads; n += gridDim.x) {
        const int64_t b = n / args.packed_heads;
        const Job job = job_of(args, find_sequence(args.call, b, shared.joined), int(n - b * args.packed_heads), 0);
        if (!job.chunked(args)) continue; // the same in all threads
        place_rows(args, job, shared);
        const Chunks chunks(true, shared.keys);
        if (chunks.parts(args) > 1)
            for (int row = threadIdx.x / 32; row < job.count; row += 4)
                FoldRow<kHeadDim>(args, job, Slots(args, job), chunks, row).template write<T>(args, job, row);
        __syncthreads(); // all threads are done with the shared memory
    }
}

} // namespace fa::sm80
