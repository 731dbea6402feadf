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
 * reads. Of those only the producer's thread waits, or for tile_empty, over sequences, the thread that tells tiles: the
 * producer is then among those that wait for tile_full and arrive. The turns are those of the forward.
 *
 * Why every wait ends: a warpgroup that waits for `full` of a block holds at most the block before, hence two
 * stages; it holds none while it skips. While it waits for v_full it holds no values, and no other warpgroup waits for
 * its turn. Each warpgroup takes one turn a block, also of blocks that it skips.
 *
 * Shared memory: Q, dO, out [warpgroup][slab][64][64], keys and values [stage][slab][tile_n][64], swizzled. */
#pragma once
#include "sm90/backward/queries_load.cuh"

namespace fa::sm90 {

/* The two queries of a thread, rows lane / 4 and lane / 4 + 8 of its warp. */
struct QueryRows {
    float lse[2];   // in base 2
    float delta[2]; // rows that see no key: lse +inf, delta 0
};

/* Rows of a tile: LSE and delta, to memory too, and the tile's part of dsinks. `products`: dout . out. */
template <class C, class Params, class Call>
__device__ __forceinline__ QueryRows finish_rows(const Params &p, const Call &call, const Tile &tile, int row,
                                                 const float (&lse)[2], const float (&dlse)[2],
                                                 const float (&products)[2], int warp, int lane) {
    const int head = p.call.first_pair * p.call.group + tile.head, own = head % p.call.heads;
    QueryRows rows;
    float sink = -INFINITY, part = 0.0f;
    if (p.sink_parts) sink = bounded(load_as_float(p.sinks, p.sinks_dtype, own * p.sinks_stride));
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int i = row + 8 * r;
        const bool sees = row_sees(call, i);
        // -inf: a weight of 0, not of infinity
        rows.lse[r] = sees && lse[r] != -INFINITY ? lse_of_weights(lse[r]) * kLog2E : INFINITY;
        rows.delta[r] = sees ? products[r] - dlse[r] : 0.0f;
        if (sink != -INFINITY && i < call.seq_q) // where no key is seen the sink has all the weight
            part += sees ? -sink_weight(sink, lse[r]) * rows.delta[r] : dlse[r];
        if (p.row_blocks && lane % 4 == 0 && i < row_blocks_of<C::kRowBlock>(p, call) * C::kRowBlock) {
            auto *block = reinterpret_cast<RowBlock<C::kRowBlock> *>(p.row_blocks) +
                          (int64_t(tile.head) * p.row_block_count + first_row_block(call) + i / C::kRowBlock);
            block->lse[i % C::kRowBlock] = rows.lse[r];
            block->delta[i % C::kRowBlock] = rows.delta[r];
        }
    }
    if (p.sink_parts) {
        part += __shfl_xor_sync(0xffffffff, part, 4);
        part += __shfl_xor_sync(0xffffffff, part, 8);
        part += __shfl_xor_sync(0xffffffff, part, 16);
        const int64_t parts = int64_t(p.schedule.query_tiles) * (4 * C::kConsumers);
        const int number = first_tile(call, kTilesOfQueries) + tile.row / C::kTileM;
        if (lane == 0) p.sink_parts[head * parts + number * (4 * C::kConsumers) + warp] = part;
    }
    return rows;
}

template <class C, class Params>
__device__ __forceinline__ void queries_consume(const Params &p, QueriesSmem<C> &smem, int wg) {
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
        const auto call = [&]() -> const auto & { return call_of<C>(p, smem, round); };
        const TileBlocks blocks = uniform_blocks<C>(tile_blocks<C>(p, call(), tile_row));
        const int wg_row = tile_row + wg * 64, row = wg_row + warp * 16 + lane / 4; // this thread's rows: row, row + 8
        float scores[kTileN / 2], products[kTileN / 2], dq[C::kHeadDim / 2];        // products: dP
        uint32_t gradients[kTileN / 4];                                             // dT
        QueryRows rows;
        int stage = 0; // of the block whose S and dP come next, or were there last

        // The warpgroup skips blocks past the last key that one of its rows sees: it begins with `first`.
        int seen_end = 0, first = 0;
        if constexpr (C::kMasked) {
            if (wg_row < call().seq_q) seen_end = end_of(call().visible, min(wg_row + 64, call().seq_q) - 1);
            seen_end = uniform<C>(seen_end);
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
            const ShiftedBand &v = call().visible;
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
        // Whether some key of a block is hidden from some query of the warpgroup. Of a sequence: but for blocks [plain,
        // plain_end).
        int plain = 0, plain_end = 0;
        if constexpr (C::kSequences) {
            const Span<int> common = common_span(call().visible, wg_row, wg_row + 63);
            plain = uniform<C>((max(blocks.end - common.end, 0) + kTileN - 1) / kTileN);
            plain_end = uniform<C>(max(blocks.end - common.begin, 0) / kTileN);
        }
        auto is_masked = [&](int block) {
            if constexpr (C::kSequences) return block < plain || block >= plain_end;
            const int key_end = blocks.end - block * kTileN;
            const ShiftedBand &v = call().visible;
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
            const CallHead at = query_head_of<C>(p.call, tile);
            const int batch = at.batch, own = at.head;
            const auto &of = call();
            float lse[2], dlse[2], sums[2] = {};
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const bool there = row + 8 * r < of.seq_q;
                const int64_t i = first_query(of) + row + 8 * r;
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
                            const T *out = row + 8 * r < of.seq_q
                                               ? static_cast<const T *>(p.out_rows.data) +
                                                     batch * p.out_rows.stride[0] + own * p.out_rows.stride[1] +
                                                     (first_query(of) + row + 8 * r) * p.out_rows.stride[2]
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
            rows = finish_rows<C>(p, of, tile, row, lse, dlse, sums, wg * 4 + warp, lane);
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
        if (!C::kSequences && lane == 0) mbarrier_arrive(&smem.tile_empty[round % Smem::kTileStages]);
        if (p.dq.data) {
            const CallHead at = query_head_of<C>(p.call, tile);
            const auto &of = call();
            const int again = C::kSequences ? fresh(wg_row) + warp * 16 + lane / 4 : row; // of a register less
            float factor[2];
#pragma unroll
            for (int r = 0; r < 2; ++r) factor[r] = row_sees(of, again + 8 * r) ? p.scale : 0.0f;
            store_gradient<T>(p.dq, at.batch, at.head, first_query(of) + again, end_of_queries(of), dq, factor,
                              p.call.head_dim, lane);
        }
        if constexpr (C::kSequences) warp_arrive(&smem.tile_empty[round % Smem::kTileStages], lane);
    }
}

template <class C, class Params> __device__ __forceinline__ void queries_block(const Params &p) {
    FA_CHAOS_BEGIN();
    extern __shared__ __align__(1024) char raw[];
    auto &smem = *reinterpret_cast<QueriesSmem<C> *>(raw);
    const int wg = __shfl_sync(0xffffffff, threadIdx.x / 128, 0); // uniform for the compiler too

    if (threadIdx.x == 0) {
        if constexpr (!C::kSequences)
            for (const CUtensorMap *map : {&p.q, &p.dout, C::kWide ? &p.q : &p.out, &p.k, &p.v})
                tensor_map_prefetch(map);
        for (int consumer = 0; consumer < C::kConsumers; ++consumer) {
            mbarrier_init(&smem.q_full[consumer], 1);
            mbarrier_init(&smem.q_empty[consumer], 4);
        }
        for (int stage = 0; stage < QueriesSmem<C>::kTileStages; ++stage) {
            mbarrier_init(&smem.tile_full[stage], 1);
            mbarrier_init(&smem.tile_empty[stage], C::kConsumers * 4 + C::kSequences);
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
        if constexpr (C::kSequences)
            if (threadIdx.x / 32 == 1 && elect_one()) tell_tiles<kTilesOfQueries, C::kTileM>(p.list, smem);
        if (threadIdx.x / 32 == 0 && elect_one()) queries_produce<C>(p, smem);
    } else {
        registers_raise<C::kConsumerRegisters>();
        queries_consume<C>(p, smem, wg - 1);
    }
}

template <class C>
__global__ void __launch_bounds__(128 * (C::kConsumers + 1), 1)
    backward_queries(const __grid_constant__ QueriesParams p) {
    queries_block<C>(p);
}
template <class C>
__global__ void __launch_bounds__(128 * (C::kConsumers + 1), 1)
    backward_queries_of_sequences(const __grid_constant__ SequenceQueriesParams p) {
    queries_block<C>(p);
}

} // namespace fa::sm90
