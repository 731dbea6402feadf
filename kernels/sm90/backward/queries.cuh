/* dq, and LSE and delta of each query for the second kernel (keys.cuh). The skeleton is
 * sm90/forward/kernel.cuh's: one producer warp, C::kConsumers warpgroups of 64 queries each, persistent CTAs, rings of
 * key and value blocks.
 *
 *     first:   issue S(0) = Q K(0)^T, dP(0) = dO V(0)^T; under them delta, and LSE and delta to memory
 *     block b: wait for S(b);  P = exp2(S - lse)                        under dP(b)
 *              wait for dP(b); dT = P (dP - delta)
 *              issue dQ += dT(b) K(b), S(b + 1), dP(b + 1)
 *
 * dT is the A operand from registers, and K(b) is read K-major for S and MN-major for dQ, from one tile. A query's dq
 * has one owner and one order of its sums: the same bits from run to run.
 *
 * Limits, at head_dim 128 and 128 keys a block: two warpgroups keep the tensor cores busy for 3072 cycles a block
 * and shared memory for 2560; the exponentials take the MUFU 1024, and with C::kTurns one warpgroup's run under the
 * other's products. Where the turns fail, both warpgroups make dT at a time and the tensor cores idle some 400 cycles.
 *
 * C::kWide, from 192 columns on: Q, dO and two stages of keys leave room for one or two of values, which have a ring of
 * their own since dP is all that they are read for, and none for out, which delta is made of where it lies. A turn is
 * then one of dQ and S: with one stage, dP(b + 1) waits for values that are loaded once both warpgroups have dP(b).
 *
 * Why no waiter falls two phases behind (see sm90/forward/kernel.cuh): of full (keys and values of a block), v_full
 * (values apart), q_full (Q, dO and out of a warpgroup) and tile_full all warps wait; the next phase of each ends after
 * the same phase of empty, v_empty, q_empty or tile_empty, where each warp arrives for itself, past its own wait and
 * reads. Of those only the producer's thread waits. The turns are those of the forward.
 *
 * Why every wait ends: a warpgroup that waits for `full` of a block holds at most the block before, hence two
 * stages; it holds none while it skips. While it waits for v_full it holds no values, and no other warpgroup waits for
 * its turn. Each warpgroup takes one turn a block, also of blocks that it skips.
 *
 * Shared memory: Q, dO, out [warpgroup][slab][64][64], keys and values [stage][slab][tile_n][64], swizzled. */
#pragma once
#include "sm90/backward/kernel.cuh"

namespace fa::sm90 {

/* Rows of the call's out in global memory, columns contiguous, 16-byte aligned. */
struct OutRows {
    const void *data;
    int64_t stride[3]; // elements, of B, H, Sq
};

struct QueriesParams {
    BackwardCall call;
    CUtensorMap q, dout; // boxes of 64 rows, queries that see a key
    union {
        CUtensorMap out;  // the same
        OutRows out_rows; // with C::kWide
    };
    CUtensorMap k, v;                                               // boxes of tile_n rows, visible keys
    int q_step[2], dout_step[2], out_step[2], k_step[2], v_step[2]; // factors 0 or 1 of head and batch coordinates
    Gradient dq;                                                    // without data: no products, LSE and delta alone
    float scale;
    Schedule schedule; // a "head" is a query head of the launch; tile rows are queries
    const float *lse, *dlse;
    int64_t lse_stride[3], dlse_stride[3]; // of (B, H, Sq)
    char *row_blocks;                      // RowBlock<C::kRowBlock> [head of the launch][block]; NULL: not wanted
    int row_block_count;                   // a head
    const void *sinks;
    int64_t sinks_stride;
    fa_dtype sinks_dtype;
    float *sink_parts; // [head of the call][tile][warp], sums over 16 queries; NULL: dsinks is not wanted
};

template <class C> struct QueriesSmem {
    static constexpr int kQuerySlabBytes = 64 * kSlabRowBytes;
    static constexpr int kKeySlabBytes = C::kTileN * kSlabRowBytes;
    static constexpr int kQueryBytes = kTileBytes<C::kHeadDim, 64>; // of one warpgroup
    static constexpr int kDoutBytes = kTileBytes<C::kHeadDimV, 64>;
    static constexpr int kKeyBytes = kTileBytes<C::kHeadDim, C::kTileN>;
    static constexpr int kValueBytes = kTileBytes<C::kHeadDimV, C::kTileN>;
    static constexpr int kTileStages = 4; // as in ForwardSmem

    alignas(1024) char q[C::kConsumers][kQueryBytes];
    alignas(1024) char dout[C::kConsumers][kDoutBytes];
    alignas(C::kWide ? 16 : 1024) char out[C::kConsumers][C::kWide ? 16 : kDoutBytes];
    alignas(1024) char k[C::kStages][kKeyBytes];
    alignas(1024) char v[C::kValueStages][kValueBytes];
    alignas(16) Tile tile[kTileStages];
    uint64_t q_full[C::kConsumers], q_empty[C::kConsumers];
    uint64_t full[C::kStages], empty[C::kStages]; // keys and values of a block; with C::kWide keys
    uint64_t tile_full[kTileStages], tile_empty[kTileStages];
    uint64_t v_full[C::kValueStages], v_empty[C::kValueStages]; // with C::kWide
};

/* Blocks of a tile: `seen` says whether a query of it sees a key, `count` how many blocks are multiplied. */
struct TileBlocks {
    int end, count;
    bool seen;
};
template <class C> __device__ __forceinline__ TileBlocks tile_blocks(const QueriesParams &p, int row) {
    const KeyBlocks blocks = key_blocks<C::kMasked, C::kTileN>(p.call.visible, row, min(row + C::kTileM, p.call.seq_q));
    return {blocks.end, p.dq.data ? blocks.count : 0, blocks.count > 0};
}

template <class C> __device__ __forceinline__ void queries_produce(const QueriesParams &p, QueriesSmem<C> &smem) {
    using Smem = QueriesSmem<C>;
    RingState<C::kStages> ring(1); // of keys and of values
    RingState<Smem::kTileStages> tile_ring(1);
    RingState<1> q_ring(1);
    RingState<C::kValueStages> v_ring(1); // with C::kWide
    auto load_values = [&](int key, int kv_head, int batch) {
        uint64_t *full = &smem.v_full[v_ring.stage];
        mbarrier_wait(&smem.v_empty[v_ring.stage], v_ring.parity);
        mbarrier_arrive_expect(full, Smem::kValueBytes);
        tma_load_tile<C::kHeadDimV, C::kTileN>(smem.v[v_ring.stage], &p.v, full, key, kv_head * p.v_step[0],
                                               batch * p.v_step[1], kEvictLast);
        v_ring.advance();
    };
    auto announce = [&](uint32_t index) {
        const Tile tile = tile_at(p.schedule, index, C::kTileM);
        announce_tile(smem, tile_ring, tile);
        return tile;
    };
    Tile tile = announce(next_tile<C::kMasked>(p.schedule, 0)), next;
    for (uint32_t round = 1; tile.row >= 0; ++round, tile = next) {
        const uint32_t next_index =
            next_tile<C::kMasked>(p.schedule, round); // early: the counter answers while this tile is loaded
        const TileBlocks blocks = tile_blocks<C>(p, tile.row);
        if (!blocks.seen) {
            next = announce(next_index);
            continue;
        }
        const int head = p.call.first_pair * p.call.group + tile.head; // of all batch entries
        const int batch = head / p.call.heads, own = head - batch * p.call.heads, kv_head = own / p.call.group;
        auto load_block = [&](int block) {
            const int key = blocks.end - (block + 1) * C::kTileN;
            uint64_t *full = &smem.full[ring.stage];
            mbarrier_wait(&smem.empty[ring.stage], ring.parity);
            mbarrier_arrive_expect(full, Smem::kKeyBytes + (C::kWide ? 0 : Smem::kValueBytes));
            tma_load_tile<C::kHeadDim, C::kTileN>(smem.k[ring.stage], &p.k, full, key, kv_head * p.k_step[0],
                                                  batch * p.k_step[1], kEvictLast);
            if constexpr (C::kWide) {
                load_values(key, kv_head, batch);
            } else {
                tma_load_tile<C::kHeadDimV, C::kTileN>(smem.v[ring.stage], &p.v, full, key, kv_head * p.v_step[0],
                                                       batch * p.v_step[1], kEvictLast);
            }
            ring.advance();
        };
        for (int wg = 0; wg < C::kConsumers; ++wg) {
            const int row = tile.row + wg * 64 - p.call.row_begin;
            uint64_t *full = &smem.q_full[wg];
            mbarrier_wait(&smem.q_empty[wg], q_ring.parity);
            mbarrier_arrive_expect(full, Smem::kQueryBytes + (C::kWide ? 1 : 2) * Smem::kDoutBytes);
            tma_load_tile<C::kHeadDim, 64>(smem.q[wg], &p.q, full, row, own * p.q_step[0], batch * p.q_step[1],
                                           kEvictNormal);
            tma_load_tile<C::kHeadDimV, 64>(smem.dout[wg], &p.dout, full, row + p.call.dout_row, own * p.dout_step[0],
                                            batch * p.dout_step[1], kEvictNormal);
            if constexpr (!C::kWide)
                tma_load_tile<C::kHeadDimV, 64>(smem.out[wg], &p.out, full, row, own * p.out_step[0],
                                                batch * p.out_step[1], kEvictFirst);
        }
        q_ring.advance();
        if (blocks.count > 0) load_block(0);
        next = announce(next_index);
        for (int block = 1; block < blocks.count; ++block) load_block(block);
    }
}

/* The two queries of a thread, rows lane / 4 and lane / 4 + 8 of its warp. */
struct QueryRows {
    float lse[2];   // in base 2
    float delta[2]; // rows that see no key: lse +inf, delta 0
};

/* Rows of a tile: LSE and delta, to memory too, and the tile's part of dsinks. `products`: dout . out. */
template <class C>
__device__ __forceinline__ QueryRows finish_rows(const QueriesParams &p, const Tile &tile, int row,
                                                 const float (&lse)[2], const float (&dlse)[2],
                                                 const float (&products)[2], int warp, int lane) {
    const int head = p.call.first_pair * p.call.group + tile.head, own = head % p.call.heads;
    QueryRows rows;
    float sink = -INFINITY, part = 0.0f;
    if (p.sink_parts) sink = bounded(load_as_float(p.sinks, p.sinks_dtype, own * p.sinks_stride));
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int i = row + 8 * r;
        const bool sees = row_sees(p.call, i);
        // -inf: a weight of 0, not of infinity
        rows.lse[r] = sees && lse[r] != -INFINITY ? lse_of_weights(lse[r]) * kLog2E : INFINITY;
        rows.delta[r] = sees ? products[r] - dlse[r] : 0.0f;
        if (sink != -INFINITY && i < p.call.seq_q) // where no key is seen the sink has all the weight
            part += sees ? -sink_weight(sink, lse[r]) * rows.delta[r] : dlse[r];
        if (p.row_blocks && lane % 4 == 0 && i < p.row_block_count * C::kRowBlock) {
            auto *block = reinterpret_cast<RowBlock<C::kRowBlock> *>(p.row_blocks) +
                          (int64_t(tile.head) * p.row_block_count + i / C::kRowBlock);
            block->lse[i % C::kRowBlock] = rows.lse[r];
            block->delta[i % C::kRowBlock] = rows.delta[r];
        }
    }
    if (p.sink_parts) {
        part += __shfl_xor_sync(0xffffffff, part, 4);
        part += __shfl_xor_sync(0xffffffff, part, 8);
        part += __shfl_xor_sync(0xffffffff, part, 16);
        const int64_t parts = int64_t(p.schedule.query_tiles) * (4 * C::kConsumers);
        if (lane == 0) p.sink_parts[head * parts + tile.row / C::kTileM * (4 * C::kConsumers) + warp] = part;
    }
    return rows;
}

template <class C>
__device__ __forceinline__ void queries_consume(const QueriesParams &p, QueriesSmem<C> &smem, int wg) {
    using T = typename C::Element;
    using Smem = QueriesSmem<C>;
    constexpr int kTileN = C::kTileN;
    constexpr uint32_t kTurnThreads = 256; // the warpgroup whose turn it is, and the one before, which arrives
    const int lane = threadIdx.x % 32, warp = (threadIdx.x / 32) % 4;
    RingState<C::kStages> ring(0); // of the block whose products are issued next
    RingState<C::kValueStages> v_ring(0);
    RingState<1> q_ring(0);

    auto turn_wait = [&] {
        if constexpr (C::kTurns) named_barrier_sync(1 + wg, kTurnThreads);
    };
    auto turn_pass = [&] {
        if constexpr (C::kTurns) named_barrier_arrive(1 + (wg + 1 == C::kConsumers ? 0 : wg + 1), kTurnThreads);
    };
    if (C::kTurns && wg == C::kConsumers - 1) turn_pass();

    int tile_row;
    for (uint32_t round = 0; (tile_row = tile_row_of(smem, round)) >= 0; ++round) {
        const TileBlocks blocks = tile_blocks<C>(p, tile_row);
        const ShiftedBand &v = p.call.visible;
        const int wg_row = tile_row + wg * 64, row = wg_row + warp * 16 + lane / 4; // this thread's rows: row, row + 8
        float scores[kTileN / 2], products[kTileN / 2], dq[C::kHeadDim / 2];        // products: dP
        uint32_t gradients[kTileN / 4];                                             // dT
        QueryRows rows;
        int stage = 0; // of the block whose S and dP come next, or were there last

        // The warpgroup skips blocks past the last key that one of its rows sees: it begins with `first`.
        int seen_end = 0, first = 0;
        if constexpr (C::kMasked) {
            if (wg_row < p.call.seq_q) seen_end = end_of(v, min(wg_row + 64, p.call.seq_q) - 1);
            if (blocks.end > seen_end) first = min(blocks.count, (blocks.end - seen_end) / kTileN);
        }

        auto issue_scores = [&] { // S and dP of the ring's block; then the turn is the other's
            gemm_qk<T, C::kHeadDim>(scores, fresh_address(smem.q[wg]), Smem::kQuerySlabBytes,
                                    fresh_address(smem.k[ring.stage]), Smem::kKeySlabBytes);
            wgmma_commit();
            if constexpr (C::kWide) {
                turn_pass(); // values have fewer stages: the other's dQ and S do not wait for them
                mbarrier_wait(&smem.v_full[v_ring.stage], v_ring.parity);
                wgmma_fence();
            }
            gemm_qk<T, C::kHeadDimV>(products, fresh_address(smem.dout[wg]), Smem::kQuerySlabBytes,
                                     fresh_address(smem.v[C::kWide ? v_ring.stage : ring.stage]), Smem::kKeySlabBytes);
            wgmma_commit();
            if constexpr (!C::kWide) turn_pass();
        };
        auto issue_dq = [&](int accumulate) { // of the block of `stage`
            gemm_pv<T>(dq, gradients, fresh_address(smem.k[stage]), Smem::kKeySlabBytes, accumulate);
            wgmma_commit();
        };
        auto wait_block = [&] { mbarrier_wait(&smem.full[ring.stage], ring.parity); };
        auto free_block = [&](int stage) { warp_arrive(&smem.empty[stage], lane); };
        auto free_values = [&] {
            warp_arrive(&smem.v_empty[v_ring.stage], lane);
            v_ring.advance();
        };
        auto wait_products = [&](int block) { // after the last block the queries are free
            wgmma_wait<0>();
            wgmma_pin(products);
            if constexpr (C::kWide) free_values();
            if (block + 1 == blocks.count) warp_arrive(&smem.q_empty[wg], lane);
        };
        /* 0 in place of what hidden pairs have, whatever it is: 0 times that may be NaN. */
        auto hide = [&](float(&values)[kTileN / 2], int block) {
            const int first_key = blocks.end - (block + 1) * kTileN;
            uint32_t visible[2];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int i = fresh(wg_row) + warp * 16 + lane / 4 + 8 * r;
                const int low = C::kMasked ? begin_of(v, i) : 0;
                const int high = C::kMasked ? end_of(v, i) : v.seq_k;
                visible[r] = columns_between(low - first_key, high - first_key, 2 * (lane % 4));
            }
#pragma unroll
            for (int i = 0; i < kTileN / 2; ++i)
                if (!is_visible(visible, i)) values[i] = 0.0f;
        };
        // Whether some key of a block is hidden from some query of the warpgroup.
        auto is_masked = [&](int block) {
            const int key_end = blocks.end - block * kTileN;
            if constexpr (!C::kMasked) return key_end > v.seq_k;
            return !common_span(v, wg_row, wg_row + 63).holds(key_end - kTileN, kTileN);
        };
        /* P and dT of a block, dT rounded. */
        auto weigh = [&](int block) {
            if constexpr (C::kSoftcap) wait_products(block);
#pragma unroll
            for (int i = 0; i < kTileN / 2; ++i) {
                const int r = (i >> 1) & 1;
                if constexpr (C::kSoftcap) {
                    float slope;
                    scores[i] = capped_weight_of(scores[i], p.call.score, rows.lse[r], &slope);
                    products[i] = scores[i] * (products[i] - rows.delta[r]) * slope;
                } else {
                    scores[i] = weight_of(scores[i], p.call.score.scale_log2, rows.lse[r]);
                }
            }
            if constexpr (!C::kSoftcap) {
                if (is_masked(block)) hide(scores, block);
                wait_products(block);
#pragma unroll
                for (int i = 0; i < kTileN / 2; ++i) products[i] = scores[i] * (products[i] - rows.delta[(i >> 1) & 1]);
            }
            if (is_masked(block)) hide(products, block);
            pack_scores<T>(gradients, products);
        };

        if (blocks.seen) mbarrier_wait(&smem.q_full[wg], q_ring.parity);
        for (int block = 0; block < first; ++block) { // the others' blocks, in turn
            wait_block();
            turn_wait();
            turn_pass();
            free_block(ring.stage);
            ring.advance();
            if constexpr (C::kWide) {
                mbarrier_wait(&smem.v_full[v_ring.stage], v_ring.parity);
                free_values();
            }
        }
        /* Under the first products, where there are any. */
        auto begin_rows = [&] {
            const Tile tile = smem.tile[round % Smem::kTileStages];
            const int head = p.call.first_pair * p.call.group + tile.head, batch = head / p.call.heads;
            const int own = head - batch * p.call.heads;
            float lse[2], dlse[2], sums[2] = {};
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int64_t i = row + 8 * r;
                const bool there = i < p.call.seq_q;
                lse[r] = there ? p.lse[batch * p.lse_stride[0] + own * p.lse_stride[1] + i * p.lse_stride[2]] : 0.0f;
                dlse[r] = there && p.dlse
                              ? p.dlse[batch * p.dlse_stride[0] + own * p.dlse_stride[1] + i * p.dlse_stride[2]]
                              : 0.0f;
            }
            if (blocks.seen) {
                if (p.call.dout_row == 0) {
#pragma unroll
                    for (int r = 0; r < 2; ++r) {
                        const int own_row = warp * 16 + lane / 4 + 8 * r;
                        if constexpr (C::kWide) {
                            const T *out = row + 8 * r < p.call.seq_q
                                               ? static_cast<const T *>(p.out_rows.data) +
                                                     batch * p.out_rows.stride[0] + own * p.out_rows.stride[1] +
                                                     (row + 8 * r) * p.out_rows.stride[2]
                                               : nullptr;
                            sums[r] = row_product<T, C::kHeadDimV>(smem.dout[wg], out, value_columns<C>(p.call),
                                                                   own_row, lane);
                        } else {
                            sums[r] = tile_row_product<T, C::kHeadDimV>(smem.dout[wg], smem.out[wg], own_row, lane);
                        }
                    }
                }
                tma_store_fence(); // these reads come before the next copy into what they read
            }
            rows = finish_rows<C>(p, tile, row, lse, dlse, sums, wg * 4 + warp, lane);
        };
        if (first < blocks.count) {
            wait_block();
            turn_wait();
            wgmma_fence();
            issue_scores();
            begin_rows();
            for (int block = first;; ++block) {
                wgmma_wait<1>();
                wgmma_pin(scores);
                if (C::kOverlap && block > first) {
                    wgmma_pin(gradients);
                    free_block(stage);
                }
                stage = ring.stage;
                ring.advance();
                weigh(block);
                if (block + 1 == blocks.count) break;
                if constexpr (C::kOverlap) {
                    wait_block();
                    turn_wait();
                    wgmma_fence();
                    issue_dq(block > first);
                } else {
                    wgmma_fence();
                    issue_dq(block > first);
                    wait_block();
                    wgmma_wait<0>();
                    wgmma_pin(gradients);
                    free_block(stage);
                    turn_wait();
                    wgmma_fence();
                }
                issue_scores();
            }
            wgmma_fence();
            issue_dq(blocks.count - first > 1);
            wgmma_wait<0>();
            wgmma_pin(dq);
            wgmma_pin(gradients);
            free_block(stage);
        } else {
            begin_rows();
            if (blocks.seen) warp_arrive(&smem.q_empty[wg], lane);
        }
        if (blocks.seen) q_ring.advance();

        const Tile tile = smem.tile[round % Smem::kTileStages];
        __syncwarp();
        if (lane == 0) mbarrier_arrive(&smem.tile_empty[round % Smem::kTileStages]);
        if (p.dq.data) {
            const int head = p.call.first_pair * p.call.group + tile.head, batch = head / p.call.heads;
            float factor[2];
#pragma unroll
            for (int r = 0; r < 2; ++r) factor[r] = row_sees(p.call, row + 8 * r) ? p.scale : 0.0f;
            store_gradient<T>(p.dq, batch, head - batch * p.call.heads, row, p.call.seq_q, dq, factor, p.call.head_dim,
                              lane);
        }
    }
}

template <class C>
__global__ void __launch_bounds__(128 * (C::kConsumers + 1), 1)
    backward_queries(const __grid_constant__ QueriesParams p) {
    FA_CHAOS_BEGIN();
    extern __shared__ __align__(1024) char raw[];
    auto &smem = *reinterpret_cast<QueriesSmem<C> *>(raw);
    const int wg = __shfl_sync(0xffffffff, threadIdx.x / 128, 0); // uniform for the compiler too

    if (threadIdx.x == 0) {
        for (const CUtensorMap *map : {&p.q, &p.dout, C::kWide ? &p.q : &p.out, &p.k, &p.v}) tensor_map_prefetch(map);
        for (int consumer = 0; consumer < C::kConsumers; ++consumer) {
            mbarrier_init(&smem.q_full[consumer], 1);
            mbarrier_init(&smem.q_empty[consumer], 4);
        }
        for (int stage = 0; stage < QueriesSmem<C>::kTileStages; ++stage) {
            mbarrier_init(&smem.tile_full[stage], 1);
            mbarrier_init(&smem.tile_empty[stage], C::kConsumers * 4);
        }
        for (int stage = 0; stage < C::kStages; ++stage) {
            mbarrier_init(&smem.full[stage], 1);
            mbarrier_init(&smem.empty[stage], C::kConsumers * 4);
        }
        if constexpr (C::kWide)
            for (int stage = 0; stage < C::kValueStages; ++stage) {
                mbarrier_init(&smem.v_full[stage], 1);
                mbarrier_init(&smem.v_empty[stage], C::kConsumers * 4);
            }
        mbarrier_init_fence();
    }
    __syncthreads();

    if (wg == 0) {
        registers_lower<C::kProducerRegisters>();
        if (threadIdx.x / 32 == 0 && elect_one()) queries_produce<C>(p, smem);
    } else {
        registers_raise<C::kConsumerRegisters>();
        queries_consume<C>(p, smem, wg - 1);
    }
}

} // namespace fa::sm90
