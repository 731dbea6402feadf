/* dq, or dk and dv, on mma.sync: one block takes kOwn rows of its own side and walks over the other side's tiles.
 *
 *     queries own:  S = Q K^T    dP = dO V^T    dQ += dT K
 *     keys own:     S = K Q^T    dP = V dO^T    dV += P dO,  dK += dT Q      (written S^T, dP^T ... elsewhere)
 *
 * Operand a of the first two: own rows, by ldmatrix from shared memory, where they stay. Operand b: the tile of other
 * rows as it lies. Operand a of the others: the weights in the accumulators of the first two, rounded to T; b: the same
 * tile, by ldmatrix.trans. Every sum has one owner and one order, so that bits never differ from run to run; where keys
 * own, the heads of their group are walked one after the other into the same registers.
 *
 * Synchronisation. Two stages of other rows, one barrier a tile. A thread waits for its own copies (cp.async group of
 * the tile), then __syncthreads: (1) every thread's copies of the tile, and on the way of single elements its stores,
 * are there for all; (2) every warp has done with the tile before, whose stage is filled next, after the barrier. Own
 * rows belong to the first group. Nothing in shared memory is written but by these copies, and nothing is read after
 * the last tile, so that no barrier follows. All of a block's threads see the same number of tiles; a warp that has
 * nothing to see in a tile skips the products alone. A block of sequences begins with a barrier of its own, after which
 * the record of its sequence is there; nobody writes it again. No thread passes a barrier that another has not reached,
 * and all pass the same ones, so that none waits for one that is two ahead. */
#pragma once

#include <math.h>   // INFINITY
#include <stdint.h> // INT32_MAX, INT32_MIN

#include "common/chaos.cuh"             // FA_CHAOS_BEGIN
#include "common/convert.cuh"           // write_gradient
#include "common/ptx.cuh"               // cp_async_commit, cp_async_wait, pack, unpack
#include "common/rows.cuh"              // row_offset
#include "philox.h"                     // fa_dropout_read
#include "sm80/mma_backward_config.cuh" // BackwardArgs, TaskPlace, Sight
#include "sm80/mma_backward_score.cuh"  // weigh, load_bias
#include "sm80/mma_backward_tile.cuh"   // RowCopy, WarpProduct

namespace fa {

/* Two neighbouring elements of a row of dq, dk or dv, of which `left` are there. */
template <typename T>
__device__ __forceinline__ void write_pair(const BackwardArgs &args, fa_grad grad, int64_t index, int left, float low,
                                           float high) {
    const GradientParams &p = args.problem;
    if (args.stores_pairs >> grad & 1) { // rows are whole pairs
        if (left <= 0) return;
        if (p.grad_dtype[grad] == FA_F32) {
            float2 *to = reinterpret_cast<float2 *>(static_cast<float *>(p.grad[grad].data) + index);
            const float2 old = p.accumulate ? *to : make_float2(0.0f, 0.0f);
            *to = p.accumulate ? make_float2(low + old.x, high + old.y) : make_float2(low, high);
        } else {
            uint32_t *to = reinterpret_cast<uint32_t *>(static_cast<uint16_t *>(p.grad[grad].data) + index);
            const float2 old = p.accumulate ? unpack<T>(*to) : make_float2(0.0f, 0.0f);
            *to = p.accumulate ? pack<T>(low + old.x, high + old.y) : pack<T>(low, high);
        }
        return;
    }
    if (left > 0) write_gradient(p, grad, index, low);
    if (left > 1) write_gradient(p, grad, index + p.grad[grad].stride[3], high);
}

/* Writes this lane's part of the own rows of a gradient that lie below `end`: 0 where zero(row), whatever the
 * sums are. `row`: the lane's first own row, counted from row `base_row` of the gradient. */
template <typename T, int kRowTiles, int kBlocks, class Zero>
__device__ __forceinline__ void write_rows(const BackwardArgs &args, fa_grad grad, int64_t batch, int64_t head,
                                           int base_row, int row, int end, int length, float factor,
                                           const float (&sums)[kRowTiles][kBlocks][4], Zero &&zero) {
    const fa_operand &x = args.problem.grad[grad];
    const int column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int at = row + 16 * r + 8 * i;
            if (at >= end) continue;
            const bool nothing = zero(at);
            const int64_t base = row_offset(x, batch, head, base_row + at) + column * x.stride[3];
#pragma unroll
            for (int j = 0; j < kBlocks; ++j)
                write_pair<T>(args, grad, base + 8 * j * x.stride[3], length - column - 8 * j,
                              nothing ? 0.0f : factor * sums[r][j][2 * i],
                              nothing ? 0.0f : factor * sums[r][j][2 * i + 1]);
        }
}

/* One warp: its own rows' gradients, and what it does with a step of other rows. */
template <class C> struct BackwardWarp {
    using T = typename C::T;
    using Product = WarpProduct<T, C::kHeadDim, C::kRowTiles, C::kStep>;
    using Pairs = typename Product::Pairs;

    typename Product::Gradient first, second; // dq or dk; dv

    __device__ BackwardWarp() {
#pragma unroll
        for (int r = 0; r < C::kRowTiles; ++r)
#pragma unroll
            for (int j = 0; j < C::kHeadDim / 8; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) first[r][j][e] = second[r][j][e] = 0.0f;
    }

    /* own_s, own_p: this warp's rows of q and dout, or of k and v. other_s, other_p: the step's rows of the others. */
    __device__ __forceinline__ void step(const BackwardArgs &args, const BackwardEntry<C::kSequences> &entry,
                                         const fa_dropout &dropout, const PairPlace &place, bool masked, uint32_t own_s,
                                         uint32_t own_p, uint32_t other_s, uint32_t other_p, uint32_t rows) {
        const int lane = threadIdx.x % 32;
        Pairs s, g, bias;
        uint32_t kept = ~0u;
        if constexpr (C::kGeneral) load_bias<C::kQueries, C::kRowTiles, C::kStep>(args, entry, place, bias);
        if constexpr (C::kExtended) {
            extend_bias<C::kQueries, C::kRowTiles, C::kStep>(args, entry, place, bias);
            if (args.dropout.threshold) kept = kept_pairs<C::kQueries, C::kStep>(dropout, place);
        }
        {
            const typename Product::OwnAddress a_s(own_s, lane), a_p(own_p, lane);
            const typename Product::ColumnAddress b_s(other_s, lane), b_p(other_p, lane);
            Product::clear(s);
            if constexpr (C::kFirst) Product::clear(g);
            // Side by side, for chains enough of products that wait for each other; where a warp has two row tiles, one
            // after the other and little by little, for the registers.
            if constexpr (C::kRowTiles == 1) {
#pragma unroll
                for (int k = 0; k < C::kHeadDim / 16; ++k) {
                    Product::add_block(s, a_s, b_s, k);
                    if constexpr (C::kFirst) Product::add_block(g, a_p, b_p, k);
                }
            } else {
                Product::add_product(s, a_s, b_s);
                if constexpr (C::kFirst) Product::add_product(g, a_p, b_p);
            }
        }
        if constexpr (C::kGeneral) {
            weigh<C::kQueries, true, true, C::kFirst, false, C::kExtended, C::kRowTiles, C::kStep>(
                args, entry, place, s, g, &bias, rows, kept);
        } else if (masked) {
            weigh<C::kQueries, false, true, C::kFirst, false, false, C::kRowTiles, C::kStep>(args, entry, place, s, g,
                                                                                             nullptr, rows, kept);
        } else {
            weigh<C::kQueries, false, false, C::kFirst, false, false, C::kRowTiles, C::kStep>(args, entry, place, s, g,
                                                                                              nullptr, rows, kept);
        }
        if constexpr (C::kSecond) {
            const typename Product::SummedAddress b_p(other_p, lane);
            if (C::kRole == Role::kValue || args.problem.wants >> FA_GRAD_V & 1) Product::add_weighted(second, s, b_p);
        }
        if constexpr (C::kFirst) {
            const typename Product::SummedAddress b_s(other_s, lane);
            if (C::kRole != Role::kKeys || args.problem.wants >> FA_GRAD_K & 1) Product::add_weighted(first, g, b_s);
        }
    }
};

/* The copies to shared memory that a block starts: its own rows, and tiles of the others. `first_local`, `first_head`:
 * of query heads the group's first one or this block's, of the workspace and of the problem. */
template <class C> struct BackwardCopies {
    const BackwardArgs &args;
    int own; // the first own row
    Span<int> others;
    BackwardEntry<C::kSequences> entry;
    int head_kv, first_head, first_local;
    uint32_t own_s, own_p, stages, stage_rows;

    __device__ __forceinline__ void start_own() const {
        using Copy = RowCopy<C::kHeadDim, C::kThreads, C::kOwn>;
        const GradientParams &p = args.problem;
        const AttentionParams &f = p.forward;
        const int seq_q = entry.seq_q(args), head = C::kQueries ? first_head : head_kv;
        const int base = C::kQueries ? entry.first_q : entry.first_k;
        const auto exists = [&](int row) { return C::kQueries ? row < seq_q : is_key(args, entry, row); };
        Copy::start(own_s, C::kQueries ? f.q : f.k, entry.batch, head, base, own, f.head_dim,
                    !C::kGeneral || (C::kQueries ? args.chunks_q : args.chunks_k), exists);
        if (C::kFirst)
            Copy::start(own_p, C::kQueries ? p.dout : f.v, entry.batch, head, base, own, f.head_dim_v,
                        !C::kGeneral || (C::kQueries ? args.chunks_dout : args.chunks_v), exists);
    }

    __device__ __forceinline__ void start_others(int head, int tile, int stage) const {
        using Copy = RowCopy<C::kHeadDim, C::kThreads, C::kTile>;
        const GradientParams &p = args.problem;
        const AttentionParams &f = p.forward;
        const float2 *rows = args.rows + entry.rows_at(args, first_local + head);
        const auto exists = [&](int row) {
            if (C::kQueries) return is_key(args, entry, row);
            // A query that sees no key gives nothing to any: 0 times what it holds may be NaN.
            const bool there = row >= others.begin && row < others.end;
            if constexpr (C::kSequences)
                if (there && C::kGeneral && segments_in<decltype(entry)>(args).q && rows[row].x == INFINITY)
                    return false;
            if constexpr (C::kExtended)
                if (there && has_intervals<decltype(entry)>(args) && rows[row].x == INFINITY) return false;
            return there && !(C::kGeneral && (f.mask.data || f.bias.data) && rows[row].x == INFINITY);
        };
        const uint32_t to = stages + stage * 2 * C::kTileBytes;
        const int of = C::kQueries ? head_kv : first_head + head;
        const int base = C::kQueries ? entry.first_k : entry.first_q;
        Copy::start(to, C::kQueries ? f.k : f.q, entry.batch, of, base, tile * C::kTile, f.head_dim,
                    !C::kGeneral || (C::kQueries ? args.chunks_k : args.chunks_q), exists);
        Copy::start(to + C::kTileBytes, C::kQueries ? f.v : p.dout, entry.batch, of, base, tile * C::kTile,
                    f.head_dim_v, !C::kGeneral || (C::kQueries ? args.chunks_v : args.chunks_dout), exists);
        if (!C::kQueries && threadIdx.x < C::kTile / 2)
            cp_async_16(stage_rows + stage * C::kStageRowsBytes + threadIdx.x * 16,
                        rows + tile * C::kTile + threadIdx.x * 2, true);
    }
};

/* The entry of a block. A record of a sequence lies in shared memory then, for the registers. */
template <class C>
__device__ __forceinline__ BackwardEntry<C::kSequences> entry_of(const ArgsOf<C::kSequences> &args, int pair, int block,
                                                                 unsigned char *shared) {
    if constexpr (C::kSequences) {
        const int *span = args.sequences.span[C::kQueries ? kTilesOfQueries : kTilesOfKeys];
        const int *from = reinterpret_cast<const int *>(&args.sequences.places[span[block]]);
        int *to = reinterpret_cast<int *>(shared + C::kPlaceAt);
        if (threadIdx.x < sizeof(SequencePlace) / sizeof(int)) to[threadIdx.x] = from[threadIdx.x];
        __syncthreads(); // the first of the block: nobody is beyond it
        return {*reinterpret_cast<const SequencePlace *>(to)};
    } else {
        return {pair / int(args.problem.forward.heads_kv)};
    }
}

/* Which of the entry's tiles a block has; -1: one without rows, as a sequence may have. */
template <class C> __device__ __forceinline__ int own_tile(const BackwardEntry<C::kSequences> &entry, int block) {
    if constexpr (C::kSequences) {
        const int tile = block - entry.place.tile[C::kQueries ? kTilesOfQueries : kTilesOfKeys];
        return tile * C::kOwn < (C::kQueries ? entry.place.rows_q : entry.place.rows_k) ? tile : -1;
    } else {
        return block;
    }
}

/* Writes the gradients of own rows; `row`: this thread's first. */
template <class C>
__device__ __forceinline__ void write_own(const BackwardArgs &args, const BackwardEntry<C::kSequences> &entry,
                                          BackwardWarp<C> &mine, int head, int row, int first_local) {
    using T = typename C::T;
    const GradientParams &p = args.problem;
    const AttentionParams &f = p.forward;
    if constexpr (C::kQueries) {
        write_rows<T>(args, FA_GRAD_Q, entry.batch, head, entry.first_q, row, entry.rows_q(args), f.head_dim,
                      args.scale, mine.first,
                      [&](int query) { return args.rows[entry.rows_at(args, first_local) + query].x == INFINITY; });
    } else {
        const auto hidden = [&](int key) {
            if constexpr (!C::kSequences)
                return key < args.visible.key_begin || key >= args.visible.key_end;
            else
                return key < entry.place.key_begin || key >= entry.place.key_end;
        };
        const int rows = C::kSequences ? entry.rows_k(args) : int(f.seq_k), base = entry.first_k;
        if (C::kFirst && p.wants >> FA_GRAD_K & 1)
            write_rows<T>(args, FA_GRAD_K, entry.batch, head, base, row, rows, f.head_dim, args.scale, mine.first,
                          hidden);
        if (C::kSecond && p.wants >> FA_GRAD_V & 1)
            write_rows<T>(args, FA_GRAD_V, entry.batch, head, base, row, rows, f.head_dim_v, 1.0f, mine.second, hidden);
    }
}

/* The ids of segments of a warp's own rows lie between two. Of arguments without segments everything meets. */
template <class C> struct OwnIds {
    static constexpr bool kKnown = C::kSequences && C::kExtended;
    using Entry = BackwardEntry<C::kSequences>;
    static_assert(!kKnown || (32 % C::kWarpRows == 0 && 32 % C::kStep == 0), "a lane holds a row");
    int low = INT32_MIN, high = INT32_MAX;

    /* The id of row `row`, of queries or of keys; `there`: it is in the arrays. */
    __device__ __forceinline__ static bool id_of(const BackwardArgs &args, const Entry &entry, bool query, int row,
                                                 int &id) {
        const Segments segments = segments_in<Entry>(args);
        if (query ? row >= entry.seq_q(args) : !is_key(args, entry, row)) return false;
        id = query ? segments.of_query(entry.batch, row) : segments.of_key(entry.batch, row);
        return true;
    }
    __device__ __forceinline__ OwnIds(const BackwardArgs &args, const Entry &entry, int warp_own) {
        if constexpr (kKnown) {
            if (!segments_in<Entry>(args).q) return;
            int id = 0;
            const bool there = id_of(args, entry, C::kQueries, warp_own + threadIdx.x % C::kWarpRows, id);
            low = __reduce_min_sync(~0u, there ? id : INT32_MAX), high = __reduce_max_sync(~0u, there ? id : INT32_MIN);
        }
    }
    /* Whether some of a step's other rows may be seen. By a warp. */
    __device__ __forceinline__ bool meet(const BackwardArgs &args, const Entry &entry, int other) const {
        if constexpr (kKnown) {
            if (!segments_in<Entry>(args).q) return true;
            int id = 0;
            const bool there = id_of(args, entry, !C::kQueries, other + threadIdx.x % C::kStep, id);
            return __any_sync(~0u, there && id >= low && id <= high);
        } else {
            return true;
        }
    }
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocks)
    backward_kernel(const __grid_constant__ ArgsOf<C::kSequences> args) {
    FA_CHAOS_BEGIN();
    extern __shared__ __align__(128) unsigned char shared[];
    const GradientParams &p = args.problem;
    const AttentionParams &f = p.forward;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, dense_q = int(f.seq_q);

    const TaskPlace task(C::kQueries ? args.queries : args.keys);
    const int group = args.group, pair = args.first_pair + (C::kQueries ? task.item / group : task.item);
    const BackwardEntry<C::kSequences> entry = entry_of<C>(args, pair, task.block, shared);
    const int head_kv = pair % int(f.heads_kv), own_block = own_tile<C>(entry, task.block);
    if (C::kSequences && own_block < 0) return; // all threads of the block
    const int own = own_block * C::kOwn, warp_own = own + warp * C::kWarpRows;
    // Of query heads: the group's first one or this block's, of the workspace and of the problem.
    const int first_local = C::kQueries ? task.item : task.item * group;
    const int first_head = head_kv * group + (C::kQueries ? task.item % group : 0);
    const int heads = C::kQueries ? 1 : group;

    const Sight of_block =
        sight_of<C::kQueries>(entry.visible(args), own, C::kOwn, (C::kSequences ? entry.seq_q(args) : dense_q));
    const Sight kept = sight_of<C::kQueries>(entry.visible(args), warp_own, C::kWarpRows,
                                             (C::kSequences ? entry.seq_q(args) : dense_q));
    // Values computed from again(x) are computed anew for each step, where registers are short.
    const auto again = [](int x) {
        if constexpr (C::kRowTiles > 1) asm volatile("" : "+r"(x));
        return x;
    };
    const Span<int> others = of_block.some;
    const int tile_begin = others.begin / C::kTile;
    const int tile_end = others.begin < others.end ? (others.end + C::kTile - 1) / C::kTile : tile_begin;

    const uint32_t own_s = shared_address(shared), own_p = own_s + (C::kOwnTiles - 1) * C::kOwnBytes;
    const uint32_t stages = own_s + C::kStagesAt, stage_rows = own_s + C::kRowsAt;

    const BackwardCopies<C> copies = {args,        own,   others, entry,  head_kv,   first_head,
                                      first_local, own_s, own_p,  stages, stage_rows};
    auto &dropout = *reinterpret_cast<fa_dropout *>(shared + C::kDropoutAt); // as it was when the block began
    if constexpr (C::kExtended) // for this thread's first barrier to publish
        if (threadIdx.x == 0 && args.dropout.threshold) dropout = fa_dropout_read(&args.dropout);
    const OwnIds<C> ids(args, entry, warp_own);
    BackwardWarp<C> mine;
    if constexpr (C::kQueries) // for this thread's first barrier to publish
        for (int n = threadIdx.x; n < C::kOwn; n += C::kThreads)
            store_row(stage_rows + n * 8, args.rows + entry.rows_at(args, first_local), own + n,
                      (C::kSequences ? entry.seq_q(args) : dense_q));

    int head = tile_begin < tile_end ? 0 : heads, tile = tile_begin, stage = 0;
    if (head < heads) {
        copies.start_own();
        copies.start_others(head, tile, 0);
        cp_async_commit();
    }
    while (head < heads) {
        const int present = tile * C::kTile, of = head;
        cp_async_wait<0>();
        __syncthreads();
        if (++tile == tile_end) tile = tile_begin, ++head;
        if (head < heads) copies.start_others(head, tile, stage ^ 1);
        cp_async_commit();
        const uint32_t other_s = stages + stage * 2 * C::kTileBytes, other_p = other_s + C::kTileBytes;
        const uint32_t rows = C::kQueries ? stage_rows + (warp * C::kWarpRows + lane / 4) * 8
                                          : stage_rows + stage * C::kStageRowsBytes + lane % 4 * 16;
#pragma unroll 1
        for (int at = 0; at < C::kTile; at += C::kStep) {
            const int other = present + at;
            const Sight of_warp = C::kRowTiles > 1
                                      ? sight_of<C::kQueries>(entry.visible(args), again(warp_own), C::kWarpRows,
                                                              (C::kSequences ? entry.seq_q(args) : dense_q))
                                      : kept;
            if (!of_warp.some.meets(other, C::kStep) || !ids.meet(args, entry, other)) continue;
            const PairPlace place = {warp_own + lane / 4, other + lane % 4 * 2, entry.batch, first_head + of};
            mine.step(args, entry, dropout, place, !of_warp.all.holds(other, C::kStep),
                      own_s + warp * C::kWarpRows * C::kRowBytes, own_p + warp * C::kWarpRows * C::kRowBytes,
                      other_s + at * C::kRowBytes, other_p + at * C::kRowBytes, rows + (C::kQueries ? 0 : at * 8));
        }
        stage ^= 1;
    }

    write_own<C>(args, entry, mine, C::kQueries ? first_head : head_kv, warp_own + lane / 4, first_local);
}

} // namespace fa
