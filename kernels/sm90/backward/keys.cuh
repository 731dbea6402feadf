/* dk and dv: after queries.cuh, which left LSE and delta of each query in memory. A CTA takes
 * C::kConsumers x 64 keys of a kv head, a warpgroup 64 of them, and goes over the query heads of the group and their
 * query blocks, so that the sums over a group of heads stay in registers. Operands are swapped, S^T = K Q^T and dP^T =
 * V dO^T, so that P^T and dT^T are A operands in registers, and Q and dO serve K-major for the scores and MN-major for
 * the gradients:
 *
 *     step n:  wait for S(n) and dK(n - 1), free the stage of n - 1;  P = exp2(S - lse)   under dP(n)
 *              issue dV += P^T dO;  wait for dP(n);  dT = P (dP - delta)                  under dV(n)
 *              issue S(n + 1);  wait for dV(n);  round dT into the registers of P         under S(n + 1)
 *              issue dK += dT^T Q, dP(n + 1)
 *
 * Limits, at head_dim 128 and 64 queries a step: the tensor cores need 2048 cycles for both warpgroups, shared
 * memory 1792, the MUFU 512. The warpgroups need no turns: while both make P, their dP run, while both make dT, their
 * dV, and while they wait for dV, their dK.
 *
 * Why no waiter falls two phases behind (see sm90/forward/kernel.cuh): of full, kv_full and tile_full all warps wait;
 * the next phase of each ends after the same phase of empty, kv_empty or tile_empty, where each warp arrives for
 * itself, past its own wait. Of those only the producer's thread waits; over sequences tiles are told by another, as in
 * queries.cuh.
 *
 * Why every wait ends: a warpgroup that waits for `full` of a step holds at most the stage of the step before,
 * hence two stages; it holds none while it skips.
 *
 * Shared memory: keys and values [key stage][warpgroup][slab][64][64], Q and dO [stage][slab][kTileQ][64], swizzled;
 * row blocks [stage]. */
#pragma once
#include "sm90/backward/sequences.cuh"

namespace fa::sm90 {

struct KeysParams {
    BackwardCall call;
    CUtensorMap q, dout;                               // boxes of kTileQ rows, queries that see a key
    CUtensorMap k, v;                                  // boxes of 64 rows, visible keys
    int q_step[2], dout_step[2], k_step[2], v_step[2]; // factors 0 or 1 of head and batch coordinates
    Gradient dk, dv;
    float scale;
    Schedule schedule; // a "head" is a pair of the launch, tiles count from the last key block
    const char *row_blocks;
    int row_block_count; // a head
};
using SequenceKeysParams = OfSequences<KeysParams>; // a "head" of the list is a kv head of the launch

template <MapOf kMap> __device__ __forceinline__ const CUtensorMap *map_of(const KeysParams &p, const BackwardCall &) {
    return kMap == kMapOfQ ? &p.q : kMap == kMapOfDout ? &p.dout : kMap == kMapOfTileK ? &p.k : &p.v;
}
/* One thread, that of the producer. */
__device__ __forceinline__ void acquire_keys_maps(const SequenceCall &call) {
    for (const int map : {kMapOfQ, kMapOfDout, kMapOfTileK, kMapOfTileV}) acquire_sequence_map(call.maps + map);
}

template <class C> struct KeysSmem {
    static constexpr int kKeySlabBytes = 64 * kSlabRowBytes;
    static constexpr int kQuerySlabBytes = C::kTileQ * kSlabRowBytes;
    static constexpr int kKeyBytes = kTileBytes<C::kHeadDim, 64>; // of one warpgroup
    static constexpr int kValueBytes = kTileBytes<C::kHeadDimV, 64>;
    static constexpr int kQueryBytes = kTileBytes<C::kHeadDim, C::kTileQ>;
    static constexpr int kDoutBytes = kTileBytes<C::kHeadDimV, C::kTileQ>;
    static constexpr int kTileStages = tile_stages<C>;

    alignas(1024) char k[C::kKeyStages][C::kConsumers][kKeyBytes];
    alignas(1024) char v[C::kKeyStages][C::kConsumers][kValueBytes];
    alignas(1024) char q[C::kStages][kQueryBytes];
    alignas(1024) char dout[C::kStages][kDoutBytes];
    RowBlock<C::kTileQ> rows[C::kStages];
    alignas(16) Tile tile[kTileStages];
    [[no_unique_address]] SequenceCalls<C::kSequences, kTileStages> calls; // of the tiles
    uint64_t kv_full[C::kKeyStages][C::kConsumers], kv_empty[C::kKeyStages][C::kConsumers];
    uint64_t full[C::kStages], empty[C::kStages]; // Q, dO and the row block
    uint64_t tile_full[kTileStages], tile_empty[kTileStages];
};

/* Query blocks [begin, end) with queries that see keys [key, key_end), counted from the first visible one. */
struct QueryBlocks {
    int begin, end;
};
template <int TileQ, class Call>
__device__ __forceinline__ QueryBlocks find_queries(const Call &call, int key, int key_end) {
    const ShiftedBand &v = call.visible;
    const int low = max(key, 0), high = min(key_end, v.seq_k);
    const int begin = max(call.row_begin, low - v.upper + 1), end = min(call.row_end, high - v.lower);
    if (low >= high || begin >= end) return {0, 0};
    return {begin / TileQ, (end + TileQ - 1) / TileQ};
}

template <class C, class Params> __device__ __forceinline__ void keys_produce(const Params &p, KeysSmem<C> &smem) {
    using Smem = KeysSmem<C>;
    RingState<C::kStages> ring(1);
    RingState<C::kKeyStages> kv_ring(1);
    produce_tiles<C, C::kTileK, true>(p, smem, [&](const auto &call, const Tile &tile, auto &&announce_next) {
        const int key = tile.row - call.key_begin;
        const QueryBlocks blocks = find_queries<C::kTileQ>(call, key, key + C::kTileK);
        if (blocks.begin >= blocks.end) return announce_next();
        const CallHead at = kv_head_of<C>(p.call, tile);
        const int batch = C::kSequences ? 0 : at.batch, kv_head = at.head;
        if constexpr (C::kSequences)
            if (is_new_span(smem, tile)) acquire_keys_maps(call);
        for (int wg = 0; wg < C::kConsumers; ++wg) {
            uint64_t *full = &smem.kv_full[kv_ring.stage][wg];
            mbarrier_wait(&smem.kv_empty[kv_ring.stage][wg], kv_ring.parity);
            mbarrier_arrive_expect(full, Smem::kKeyBytes + Smem::kValueBytes);
            tma_load_tile<C::kHeadDim, 64>(smem.k[kv_ring.stage][wg], map_of<kMapOfTileK>(p, call), full, key + wg * 64,
                                           kv_head * p.k_step[0], batch * p.k_step[1], kEvictFirst);
            tma_load_tile<C::kHeadDimV, 64>(smem.v[kv_ring.stage][wg], map_of<kMapOfTileV>(p, call), full,
                                            key + wg * 64, kv_head * p.v_step[0], batch * p.v_step[1], kEvictFirst);
        }
        kv_ring.advance();
        announce_next();
        for (int member = 0; member < p.call.group; ++member) {
            const int head = kv_head * p.call.group + member;
            const char *row_blocks = p.row_blocks + ((int64_t(tile.head) * p.call.group + member) * p.row_block_count +
                                                     first_row_block(call)) *
                                                        int64_t(sizeof(RowBlock<C::kTileQ>));
            for (int block = blocks.begin; block < blocks.end; ++block) {
                const int row = block * C::kTileQ - call.row_begin;
                uint64_t *full = &smem.full[ring.stage];
                mbarrier_wait(&smem.empty[ring.stage], ring.parity);
                mbarrier_arrive_expect(full, Smem::kQueryBytes + Smem::kDoutBytes + sizeof(RowBlock<C::kTileQ>));
                tma_load_tile<C::kHeadDim, C::kTileQ>(smem.q[ring.stage], map_of<kMapOfQ>(p, call), full, row,
                                                      head * p.q_step[0], batch * p.q_step[1], kEvictLast);
                bulk_load(&smem.rows[ring.stage], row_blocks + block * int64_t(sizeof(RowBlock<C::kTileQ>)),
                          sizeof(RowBlock<C::kTileQ>), full);
                tma_load_tile<C::kHeadDimV, C::kTileQ>(smem.dout[ring.stage], map_of<kMapOfDout>(p, call), full,
                                                       row + p.call.dout_row, head * p.dout_step[0],
                                                       batch * p.dout_step[1], kEvictLast);
                ring.advance();
            }
        }
    });
}

template <class C, class Params>
__device__ __forceinline__ void keys_consume(const Params &p, KeysSmem<C> &smem, int wg) {
    using T = typename C::Element;
    using Smem = KeysSmem<C>;
    constexpr int kTileQ = C::kTileQ;
    const int lane = threadIdx.x % 32, warp = (threadIdx.x / 32) % 4;
    RingState<C::kStages> ring(0);
    RingState<C::kKeyStages> kv_ring(0);

    int tile_row;
    for (uint32_t round = 0; (tile_row = tile_row_of(smem, round)) >= 0; ++round) {
        const auto call = [&]() -> const auto & { return call_of<C>(p, smem, round); };
        const ShiftedBand v = uniform<C>(call().visible);
        const int tile_key = uniform<C>(tile_row - call().key_begin);
        const auto blocks_of = [&](int tile_key) {
            return find_queries<kTileQ>(call(), tile_key, tile_key + C::kTileK);
        };
        const auto own_blocks_of = [&](int tile_key) { // of this warpgroup; none: it skips all of the tile's
            if constexpr (!C::kMasked) return blocks_of(tile_key);
            return find_queries<kTileQ>(call(), tile_key + wg * 64, tile_key + wg * 64 + 64);
        };
        const auto key_of = [&](int tile_key) { return tile_key + wg * 64 + warp * 16 + lane / 4; }; // and that + 8
        float dk[C::kHeadDim / 2], dv[C::kHeadDimV / 2];

        if (const QueryBlocks blocks = blocks_of(tile_key); blocks.begin < blocks.end) {
            float scores[kTileQ / 2], products[kTileQ / 2]; // products: dP
            uint32_t words[kTileQ / 4];                     // P, then dT, rounded: the A operand
            int accumulate = 0;                             // 1 once dk and dv hold something
            // Whether some key of the warpgroup is hidden from some query of a block. Of a sequence: but for blocks
            // [plain, plain_end).
            int plain = 0, plain_end = 0;
            if constexpr (C::kSequences) {
                const int first = tile_key + wg * 64;
                plain = uniform<C>(max(min(first + 64, v.seq_k) - v.upper + kTileQ - 1, 0) / kTileQ);
                plain_end = uniform<C>(max(max(first, 0) - v.lower + 1, 0) / kTileQ);
            }
            const auto is_masked = [&](int block) {
                if constexpr (C::kSequences) return block < plain || block >= plain_end;
                if constexpr (!C::kMasked) return false;
                const int first = fresh(tile_key) + wg * 64;
                return block * kTileQ < min(first + 64, v.seq_k) - v.upper ||
                       (block + 1) * kTileQ > max(first, 0) - v.lower + 1;
            };

            auto issue_scores = [&] { // S^T of the ring's step
                gemm_qk<T, C::kHeadDim>(scores, fresh_address(smem.k[kv_ring.stage][wg]), Smem::kKeySlabBytes,
                                        fresh_address(smem.q[ring.stage]), Smem::kQuerySlabBytes);
                wgmma_commit();
            };
            auto issue_products = [&] { // dP^T
                gemm_qk<T, C::kHeadDimV>(products, fresh_address(smem.v[kv_ring.stage][wg]), Smem::kKeySlabBytes,
                                         fresh_address(smem.dout[ring.stage]), Smem::kQuerySlabBytes);
                wgmma_commit();
            };
            auto free_stage = [&](int stage) { warp_arrive(&smem.empty[stage], lane); };
            auto skip = [&](int count) {
                for (int n = 0; n < count; ++n) {
                    mbarrier_wait(&smem.full[ring.stage], ring.parity);
                    free_stage(ring.stage);
                    ring.advance();
                }
            };
            /* LSE and delta of the queries of accumulators i and i + 1. The first C::kRowsAhead of them are read before
             * the wait for the products, which then hides their latency. */
            float2 lse_ahead[C::kRowsAhead ? kTileQ / 8 : 1], delta_ahead[C::kRowsAhead > 1 ? kTileQ / 8 : 1];
            const auto rows_of = [&](const float(&rows)[kTileQ], int i) {
                return *reinterpret_cast<const float2 *>(&rows[8 * (i >> 2) + 2 * (lane % 4)]);
            };
            auto read_ahead = [&](int stage) {
#pragma unroll
                for (int n = 0; n < kTileQ / 8; ++n) {
                    if constexpr (C::kRowsAhead > 0) lse_ahead[n] = rows_of(smem.rows[stage].lse, 4 * n);
                    if constexpr (C::kRowsAhead > 1) delta_ahead[n] = rows_of(smem.rows[stage].delta, 4 * n);
                }
            };
            const auto lse_of = [&](int stage, int i) {
                return C::kRowsAhead > 0 ? lse_ahead[i >> 2] : rows_of(smem.rows[stage].lse, i);
            };
            const auto delta_of = [&](int stage, int i) {
                return C::kRowsAhead > 1 ? delta_ahead[i >> 2] : rows_of(smem.rows[stage].delta, i);
            };
            /* P of the step in `stage`, in place of S, with softcap also dT; then dT, in place of dP. */
            auto weigh = [&](int stage) {
#pragma unroll
                for (int i = 0; i < kTileQ / 2; i += 2) {
                    const float2 lse = lse_of(stage, i);
#pragma unroll
                    for (int n = 0; n < 2; ++n) {
                        float &score = scores[i + n];
                        if constexpr (C::kSoftcap) {
                            const float2 delta = delta_of(stage, i);
                            float slope, &product = products[i + n];
                            score = capped_weight_of(score, p.call.score, n ? lse.y : lse.x, &slope);
                            product = score * (product - (n ? delta.y : delta.x)) * slope;
                        } else {
                            score = weight_of(score, p.call.score.scale_log2, n ? lse.y : lse.x);
                        }
                    }
                }
            };
            auto differentiate = [&](int stage) {
#pragma unroll
                for (int i = 0; i < kTileQ / 2; i += 2) {
                    const float2 delta = delta_of(stage, i);
                    products[i] = scores[i] * (products[i] - delta.x);
                    products[i + 1] = scores[i + 1] * (products[i + 1] - delta.y);
                }
            };
            /* 0 in place of what hidden pairs have, whatever it is: 0 times that may be NaN. */
            auto hide = [&](float(&values)[kTileQ / 2], int block) {
                uint32_t visible[2];
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const int first = key_of(fresh(tile_key)) + 8 * r + 1 - block * kTileQ; // column of the query after
                    visible[r] = columns_between(first - v.upper, first - v.lower, 2 * (lane % 4));
                }
#pragma unroll
                for (int i = 0; i < kTileQ / 2; ++i)
                    if (!is_visible(visible, i)) values[i] = 0.0f;
            };
            /* dK of the step in `stage`, once its dV no longer reads `words`. */
            auto issue_dk = [&](int stage) {
                wgmma_pin(words);
                wgmma_pin(products); // not packed ahead of the wait, which would take more registers
                pack_scores<T>(words, products);
                wgmma_fence();
                gemm_pv<T>(dk, words, fresh_address(smem.q[stage]), Smem::kQuerySlabBytes, accumulate);
                wgmma_commit();
                accumulate = 1;
            };

            mbarrier_wait(&smem.kv_full[kv_ring.stage][wg], kv_ring.parity);
            for (int member = 0; member < p.call.group; ++member) {
                const int from = fresh(tile_key);
                const QueryBlocks blocks = blocks_of(from), own = own_blocks_of(from);
                if (own.begin >= own.end) {
                    skip(blocks.end - blocks.begin);
                    continue;
                }
                skip(own.begin - blocks.begin);
                mbarrier_wait(&smem.full[ring.stage], ring.parity);
                read_ahead(ring.stage);
                wgmma_fence();
                issue_scores();
                issue_products();
                int stage = 0;
                for (int block = own.begin;; ++block) {
                    wgmma_wait<1>();
                    wgmma_pin(scores);
                    if (block > own.begin) {
                        wgmma_pin(words);
                        free_stage(stage);
                    }
                    stage = ring.stage;
                    if constexpr (C::kSoftcap) {
                        wgmma_wait<0>();
                        wgmma_pin(products);
                    }
                    weigh(stage);
                    if (is_masked(block)) {
                        hide(scores, block);
                        if constexpr (C::kSoftcap) hide(products, block);
                    }
                    pack_scores<T>(words, scores);
                    wgmma_fence();
                    gemm_pv<T>(dv, words, fresh_address(smem.dout[stage]), Smem::kQuerySlabBytes, accumulate);
                    wgmma_commit();
                    if constexpr (!C::kSoftcap) {
                        wgmma_wait<1>();
                        wgmma_pin(products);
                        differentiate(stage);
                        if (is_masked(block)) hide(products, block);
                    }
                    tma_store_fence(); // this thread's reads of the row block come before the next copy into it
                    ring.advance();
                    if (block + 1 == own.end) break;
                    mbarrier_wait(&smem.full[ring.stage], ring.parity);
                    read_ahead(ring.stage);
                    wgmma_fence();
                    issue_scores();
                    wgmma_wait<1>();
                    issue_dk(stage);
                    issue_products();
                }
                wgmma_wait<0>();
                issue_dk(stage);
                wgmma_wait<0>();
                wgmma_pin(words);
                free_stage(stage);
                const int to = fresh(tile_key);
                skip(blocks_of(to).end - own_blocks_of(to).end);
            }
            wgmma_pin(dk);
            wgmma_pin(dv);
            warp_arrive(&smem.kv_empty[kv_ring.stage][wg], lane);
            kv_ring.advance();
        }

        const Tile tile = smem.tile[round % Smem::kTileStages];
        __syncwarp();
        if (!C::kSequences && lane == 0) mbarrier_arrive(&smem.tile_empty[round % Smem::kTileStages]);
        const CallHead at = kv_head_of<C>(p.call, tile);
        const auto &of = call();
        const int key = key_of(tile_key), row = first_key(of) + key + of.key_begin;
        const QueryBlocks own = own_blocks_of(tile_key);
        float k_factor[2], v_factor[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const bool visible = own.begin < own.end && key + 8 * r >= 0 && key + 8 * r < of.visible.seq_k;
            k_factor[r] = visible ? p.scale : 0.0f;
            v_factor[r] = visible ? 1.0f : 0.0f;
        }
        if (p.dk.data)
            store_gradient<T>(p.dk, at.batch, at.head, row, end_of_keys(of), dk, k_factor, p.call.head_dim, lane);
        if (p.dv.data)
            store_gradient<T>(p.dv, at.batch, at.head, row, end_of_keys(of), dv, v_factor, value_columns<C>(p.call),
                              lane);
        if constexpr (C::kSequences) warp_arrive(&smem.tile_empty[round % Smem::kTileStages], lane);
    }
}

/* Barriers, ready for all threads of the CTA. */
template <class C> __device__ __forceinline__ void keys_begin(const KeysParams &p, KeysSmem<C> &smem) {
    if (threadIdx.x == 0) {
        if constexpr (!C::kSequences)
            for (const CUtensorMap *map : {&p.q, &p.dout, &p.k, &p.v}) tensor_map_prefetch(map);
        for (int stage = 0; stage < C::kKeyStages; ++stage)
            for (int consumer = 0; consumer < C::kConsumers; ++consumer) {
                mbarrier_init(&smem.kv_full[stage][consumer], 1);
                mbarrier_init(&smem.kv_empty[stage][consumer], 4);
            }
        for (int stage = 0; stage < KeysSmem<C>::kTileStages; ++stage) {
            mbarrier_init(&smem.tile_full[stage], 1);
            mbarrier_init(&smem.tile_empty[stage], C::kConsumers * 4 + C::kSequences);
        }
        for (int stage = 0; stage < C::kStages; ++stage) {
            mbarrier_init(&smem.full[stage], 1);
            mbarrier_init(&smem.empty[stage], C::kConsumers * 4);
        }
        mbarrier_init_fence();
    }
    __syncthreads();
}

template <class C, class Params> __device__ __forceinline__ void keys_block(const Params &p) {
    FA_CHAOS_BEGIN();
    extern __shared__ __align__(1024) char raw[];
    auto &smem = *reinterpret_cast<KeysSmem<C> *>(raw);
    const int wg = __shfl_sync(0xffffffff, threadIdx.x / 128, 0); // uniform for the compiler too

    keys_begin<C>(p, smem);

    if (wg == 0) {
        registers_lower<C::kProducerRegisters>();
        if constexpr (C::kSequences)
            if (threadIdx.x / 32 == 1 && elect_one()) tell_tiles<kTilesOfKeys, C::kTileK>(p.list, smem);
        if (threadIdx.x / 32 == 0 && elect_one()) keys_produce<C>(p, smem);
    } else {
        registers_raise<C::kConsumerRegisters>();
        keys_consume<C>(p, smem, wg - 1);
    }
}

template <class C>
__global__ void __launch_bounds__(128 * (C::kConsumers + 1), 1) backward_keys(const __grid_constant__ KeysParams p) {
    keys_block<C>(p);
}
template <class C>
__global__ void __launch_bounds__(128 * (C::kConsumers + 1), 1)
    backward_keys_of_sequences(const __grid_constant__ SequenceKeysParams p) {
    keys_block<C>(p);
}

} // namespace fa::sm90
