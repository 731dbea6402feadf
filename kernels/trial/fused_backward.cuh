/* dq, dk and dv in one pass: after fused_rows, which left LSE and delta of each query in memory. A CTA takes 128 keys
 * of a kv head, a warpgroup 64 of them, and goes over the query heads of the group and their query blocks. Operands are
 * swapped, as in backward_keys.cuh: S^T = K Q^T, dP^T = V dO^T, and P^T and dT^T are A operands in registers. dT^T
 * goes to shared memory too, where both warpgroups find all 128 keys of it: each makes dQ = dT K of 64 queries x 64
 * columns (halves of 128 queries at head_dim 64, of 128 columns at 128) and adds it to float32 sums in global memory.
 *
 *     step n:  wait for S(n), free the stage of n - 1, issue dP(n);  P = exp2(S - lse)  under dP(n)
 *              issue dV += P^T dO(n);  wait for dT(n - 1) of both, issue dQ(n - 1)
 *              wait for dP(n);  dT = P (dP - delta), P as it was rounded                under dV(n), dQ(n - 1)
 *              issue dK += dT^T Q(n);  wait for dQ(n - 1), to shared memory             under dK(n)
 *              issue S(n + 1);  dT(n) to shared memory, send dQ(n - 1) to be added      under dK(n), S(n + 1)
 *
 * dQ is a step late, so that nobody waits for the other warpgroup's dT, and has the registers of S, which P has left.
 * dT is made from the rounded P, which saves the registers of the other: 208 are live at head_dim 128, 224 at 64.
 *
 * What limits, a step of 64 queries at head_dim 128 (128 at 64), in cycles: the tensor cores 2560; shared memory 2944
 * (2816), of which S, dP and dQ take 512 each (384, 384 and 512), dV and dK 256 each, dT 128 (256), copies of Q and dO
 * 256, and dQ on its way 512. The MUFU takes 512 (1024). That is why the blocks have 128 queries at head_dim 64: with
 * 64 products of n = 64 and n = 32 shared memory would take 1664 cycles for 1280.
 *
 * CTAs of one head would add to the same sums at a time: where no key is hidden, each begins with another block.
 *
 * Why no waiter falls two phases behind (see sm90/forward.cuh): of full, kv_full and tile_full all warps wait; the next
 * phase of each ends after the same phase of empty, kv_empty or tile_empty, where each warp arrives for itself, past
 * its own wait. Of those only the producer's thread waits. Of ds_full all warps of both warpgroups wait, and each warp
 * arrives for itself: for the next phase of a barrier, two steps later, past its own wait for the phase before.
 *
 * Why nobody waits for ever: of two warpgroups at different steps the one behind waits for nothing that the other has
 * yet to do. For `full` of step n + 1 both wait with at most one stage held, that of n, hence two stages.
 *
 * Why dT(n) may be written where dT(n - 2) was: this warp has waited for dT(n - 1) of all warps, and each of them
 * arrived there past its wait for its part of dQ(n - 2). The end of a tile changes nothing: the steps of the next go
 * on.
 *
 * Shared memory: keys and values [slab][128][64], Q and dO [stage][slab][kTileQ][64], dT^T [2][slab of queries][128
 * keys][64], swizzled; dQ [warpgroup][warp]; row blocks [stage]. */
#pragma once
#include "sm90/backward_keys.cuh" // find_queries
#include "trial/fused_backward_step.cuh"

namespace fa::sm90 {

struct FusedParams {
    BackwardCall call;
    CUtensorMap q, dout;                               // boxes of kTileQ rows, queries that see a key
    CUtensorMap k, v;                                  // boxes of kTileK rows, visible keys
    int q_step[2], dout_step[2], k_step[2], v_step[2]; // factors 0 or 1 of head and batch coordinates
    Gradient dk, dv;
    float scale;
    Schedule schedule; // a "head" is a pair of the launch, tiles count from the last key block
    const char *row_blocks;
    int row_block_count; // a head
    float *sums;         // of dq: kQueryElements [head of the launch][block]
};

template <class C> struct FusedSmem {
    static constexpr int kSlabs = (C::kHeadDim + kSlabColumns - 1) / kSlabColumns;
    static constexpr int kKeySlabBytes = C::kTileK * kSlabRowBytes; // of dT too
    static constexpr int kQuerySlabBytes = C::kTileQ * kSlabRowBytes;
    static constexpr int kKeyBytes = kSlabs * kKeySlabBytes;
    static constexpr int kQueryBytes = kSlabs * kQuerySlabBytes;
    static constexpr int kTileStages = 4; // as in ForwardSmem

    alignas(1024) char k[C::kKeyStages][kKeyBytes];
    alignas(1024) char v[C::kKeyStages][kKeyBytes];
    alignas(1024) char q[C::kStages][kQueryBytes];
    alignas(1024) char dout[C::kStages][kQueryBytes];
    alignas(1024) char ds[2][C::kTileQ / kSlabColumns * kKeySlabBytes];
    FusedRowBlock<C::kTileQ> rows[C::kStages];
    alignas(16) Tile tile[kTileStages];
    uint64_t kv_full[C::kKeyStages], kv_empty[C::kKeyStages];
    uint64_t full[C::kStages], empty[C::kStages]; // Q, dO and the row block
    uint64_t ds_full[2];
    uint64_t tile_full[kTileStages], tile_empty[kTileStages];
};

/* The steps of a tile: blocks [begin, end) of each query head of the group, from block `first` and round. */
struct FusedWalk {
    int begin, end, first, block, member;

    __device__ __forceinline__ void advance() {
        if (++block == end) block = begin;
        if (block == first) ++member;
    }
};
template <class C> __device__ __forceinline__ FusedWalk fused_walk(const BackwardCall &call, int tile_row) {
    const int key = tile_row - call.key_begin;
    const QueryBlocks blocks = find_queries<C::kTileQ>(call, key, key + C::kTileK);
    int first = blocks.begin;
    if (!C::kMasked && blocks.begin < blocks.end) first += tile_row / C::kTileK % (blocks.end - blocks.begin);
    return {blocks.begin, blocks.end, first, first, 0};
}

/* Query blocks [begin, end). */
struct BlockRange {
    int begin, end;
    __device__ __forceinline__ bool holds(int block) const { return block >= begin && block < end; }
};

/* The blocks of queries that see all 64 keys from `key`. */
template <class C> __device__ __forceinline__ BlockRange whole_blocks(const ShiftedBand &v, int key) {
    if (key < 0 || key + 64 > v.seq_k) return {0, 0};
    if (!C::kMasked) return {0, INT_MAX};
    return {ceil_blocks<C::kTileQ>(key + 64 - v.upper), floor_blocks<C::kTileQ>(key + 1 - v.lower)};
}

template <class C> __device__ __forceinline__ void fused_produce(const FusedParams &p, FusedSmem<C> &smem) {
    using Smem = FusedSmem<C>;
    RingState<C::kStages> ring(1);
    RingState<C::kKeyStages> kv_ring(1);
    RingState<Smem::kTileStages> tile_ring(1);
    struct Place {
        int kv_head, batch, key;
    };
    auto place_of = [&](const Tile &tile) {
        const int pair = p.call.first_pair + tile.head, batch = pair / p.call.heads_kv;
        return Place{pair - batch * p.call.heads_kv, batch, tile.row - p.call.key_begin};
    };
    auto announce = [&](uint32_t index) {
        Tile tile = tile_at(p.schedule, index, 1);
        if (tile.row >= 0) tile.row = (int(p.schedule.query_tiles) - 1 - tile.row) * C::kTileK; // the first is longest
        if (tile.row >= 0 && C::kKeyStages == 1) {
            const Place at = place_of(tile);
            tma_prefetch_tile<C::kHeadDim>(&p.k, at.key, at.kv_head * p.k_step[0], at.batch * p.k_step[1]);
            tma_prefetch_tile<C::kHeadDim>(&p.v, at.key, at.kv_head * p.v_step[0], at.batch * p.v_step[1]);
        }
        announce_tile(smem, tile_ring, tile);
        return tile;
    };
    auto load_keys = [&](const Tile &tile) { // and values, of a tile that has steps
        if (tile.row < 0) return;
        const FusedWalk walk = fused_walk<C>(p.call, tile.row);
        if (walk.begin >= walk.end) return;
        const Place at = place_of(tile);
        uint64_t *full = &smem.kv_full[kv_ring.stage];
        mbarrier_wait(&smem.kv_empty[kv_ring.stage], kv_ring.parity);
        mbarrier_arrive_expect(full, 2 * Smem::kKeyBytes);
        tma_load_tile<C::kHeadDim, C::kTileK>(smem.k[kv_ring.stage], &p.k, full, at.key, at.kv_head * p.k_step[0],
                                              at.batch * p.k_step[1], kEvictFirst);
        tma_load_tile<C::kHeadDim, C::kTileK>(smem.v[kv_ring.stage], &p.v, full, at.key, at.kv_head * p.v_step[0],
                                              at.batch * p.v_step[1], kEvictFirst);
        kv_ring.advance();
    };
    Tile tile = announce(next_tile<C::kMasked>(p.schedule, 0)), next;
    load_keys(tile);
    for (uint32_t round = 1; tile.row >= 0; ++round, tile = next) {
        const uint32_t next_index = next_tile<C::kMasked>(p.schedule, round);
        bool announced = false; // after a step, under which the counter answers
        auto announce_next = [&] {
            if (!announced) next = announce(next_index);
            if (!announced && C::kKeyStages > 1) load_keys(next);
            announced = true;
        };
        const Place at = place_of(tile);
        for (FusedWalk walk = fused_walk<C>(p.call, tile.row); walk.begin < walk.end && walk.member < p.call.group;
             walk.advance()) {
            const int head = at.kv_head * p.call.group + walk.member, row = walk.block * C::kTileQ - p.call.row_begin;
            const int64_t block = (int64_t(tile.head) * p.call.group + walk.member) * p.row_block_count + walk.block;
            uint64_t *full = &smem.full[ring.stage];
            mbarrier_wait(&smem.empty[ring.stage], ring.parity);
            mbarrier_arrive_expect(full, 2 * Smem::kQueryBytes + sizeof(FusedRowBlock<C::kTileQ>));
            tma_load_tile<C::kHeadDim, C::kTileQ>(smem.q[ring.stage], &p.q, full, row, head * p.q_step[0],
                                                  at.batch * p.q_step[1], kEvictLast);
            bulk_load(&smem.rows[ring.stage], p.row_blocks + block * int64_t(sizeof(FusedRowBlock<C::kTileQ>)),
                      sizeof(FusedRowBlock<C::kTileQ>), full);
            tma_load_tile<C::kHeadDim, C::kTileQ>(smem.dout[ring.stage], &p.dout, full, row + p.call.dout_row,
                                                  head * p.dout_step[0], at.batch * p.dout_step[1], kEvictLast);
            ring.advance();
            announce_next();
        }
        announce_next();
        if (C::kKeyStages == 1) load_keys(next);
    }
}

template <class C> __device__ __forceinline__ void fused_consume(const FusedParams &p, FusedSmem<C> &smem, int wg) {
    using T = typename C::Element;
    using Smem = FusedSmem<C>;
    constexpr int kTileQ = C::kTileQ, kSlabs = Smem::kSlabs;
    static_assert(kTileQ * kSlabs == 128 && C::kTileK == 128 && C::kConsumers == 2,
                  "a block's dQ is 64 x 64 for each warpgroup");
    const int lane = threadIdx.x % 32, warp = (threadIdx.x / 32) % 4;
    RingState<C::kStages> ring(0);
    RingState<C::kKeyStages> kv_ring(0);
    uint32_t stored = 0; // steps whose dT is in shared memory

    int tile_row;
    for (uint32_t round = 0; (tile_row = tile_row_of(smem, round)) >= 0; ++round) {
        const ShiftedBand &v = p.call.visible;
        const int tile_key = tile_row - p.call.key_begin;
        const auto key_of = [&](int tile_key) { return tile_key + wg * 64 + warp * 16 + lane / 4; }; // and that + 8
        float dk[C::kHeadDim / 2], dv[C::kHeadDim / 2];

        FusedWalk walk = fused_walk<C>(p.call, tile_row);
        const bool seen = walk.begin < walk.end;
        if (seen) {
            float scores[kTileQ / 2], products[kTileQ / 2], dq[kDqCount]; // products: dP - delta
            uint32_t weights[kTileQ / 4], words[kTileQ / 4];              // A operands, rounded: P, dT
            const int first_head = __shfl_sync(0xffffffff, smem.tile[round % Smem::kTileStages].head, 0) * p.call.group;
            float *const sums = p.sums + int64_t(first_head) * p.row_block_count * kQueryElements +
                                (wg * 4 + warp) * kPartElements + lane * 4;
            const BlockRange whole = whole_blocks<C>(v, tile_key + wg * 64); // nothing of which is hidden
            auto issue_scores = [&] {                                        // S^T of the ring's step
                gemm_qk<T, C::kHeadDim>(scores, fresh_address(smem.k[kv_ring.stage]) + wg * 64 * kSlabRowBytes,
                                        Smem::kKeySlabBytes, fresh_address(smem.q[ring.stage]), Smem::kQuerySlabBytes);
                wgmma_commit();
            };
            auto issue_products = [&] { // dP^T - delta
                gemm_onto<T, C::kHeadDim>(products, fresh_address(smem.v[kv_ring.stage]) + wg * 64 * kSlabRowBytes,
                                          Smem::kKeySlabBytes, fresh_address(smem.dout[ring.stage]),
                                          Smem::kQuerySlabBytes);
                wgmma_commit();
            };
            auto issue_dq = [&] { // of the last step that this warp stored dT of, once all have
                const uint32_t step = stored - 1, slab = wg * Smem::kKeySlabBytes;
                mbarrier_wait(&smem.ds_full[step % 2], step / 2 % 2);
                wgmma_fence();
                gemm_dq<T, C::kTileK>(dq, fresh_address(smem.ds[step % 2]) + (kSlabs == 1 ? slab : 0),
                                      fresh_address(smem.k[kv_ring.stage]) + (kSlabs == 1 ? 0 : slab));
                wgmma_commit();
            };
            /* P of the step, rounded; with softcap also dT, in place of dP. */
            auto weigh = [&](const FusedRowBlock<kTileQ> &rows) {
#pragma unroll
                for (int j = 0; j < kTileQ / 16; ++j) {
                    const float4 own = *reinterpret_cast<const float4 *>(
                        &rows.lse[j * 16 + lane % 4 * 4]); // of the queries of accumulators 8 j + {0, 1, 4, 5}
                    const float lse[4] = {own.x, own.y, own.z, own.w};
                    float weight[8];
#pragma unroll
                    for (int n = 0; n < 8; ++n) {
                        const int i = 8 * j + n;
                        const float query = lse[n / 4 * 2 + n % 2];
                        if constexpr (C::kSoftcap) {
                            float slope;
                            weight[n] = capped_weight_of(scores[i], p.call.score, query, &slope);
                            products[i] *= weight[n] * slope;
                        } else {
                            weight[n] = weight_of(scores[i], p.call.score.scale_log2, query);
                        }
                    }
#pragma unroll
                    for (int n = 0; n < 4; ++n) weights[4 * j + n] = pack_pair<T>(weight[2 * n], weight[2 * n + 1]);
                }
            };
            auto load_deltas = [&](const FusedRowBlock<kTileQ> &rows) { // with their sign changed
#pragma unroll
                for (int c = 0; c < kTileQ / 8; ++c) {
                    const float4 own = *reinterpret_cast<const float4 *>(&rows.minus_delta[c * 16 + lane % 4 * 4]);
                    products[4 * c] = own.x, products[4 * c + 1] = own.y;
                    products[4 * c + 2] = own.z, products[4 * c + 3] = own.w;
                }
            };
            auto differentiate = [&] { // dT = P (dP - delta), P as it was rounded
#pragma unroll
                for (int i = 0; i < kTileQ / 4; ++i) {
                    if constexpr (C::kSoftcap)
                        words[i] = pack_pair<T>(products[2 * i], products[2 * i + 1]);
                    else
                        words[i] = weighted<T>(weights[i], products[2 * i], products[2 * i + 1]);
                }
            };
            /* 0 in place of what hidden pairs have, whatever it is: 0 times that may be NaN. */
            auto hide = [&](uint32_t(&of)[kTileQ / 4], int block) {
                uint32_t visible[2];
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const int key = key_of(fresh(tile_key)) + 8 * r;
                    const int first = key + 1 - block * kTileQ; // column of the query after
                    visible[r] = columns_between(first - v.upper, first - v.lower, 2 * (lane % 4));
                    if (key < 0 || key >= v.seq_k) visible[r] = 0;
                }
#pragma unroll
                for (int i = 0; i < kTileQ / 2; i += 2)
                    of[i / 2] &=
                        (is_visible(visible, i) ? 0x0000ffffu : 0) | (is_visible(visible, i + 1) ? 0xffff0000u : 0);
            };

            int stage = 0, left = (walk.end - walk.begin) * p.call.group; // steps
            int before = 0; // the row block of the step whose dQ is not added yet
            /* From the scores of the ring's step on their way to dK on its way. */
            auto do_step = [&](auto is_first) {
                constexpr bool kIsFirst = decltype(is_first)::value;
                stage = ring.stage;
                const FusedRowBlock<kTileQ> &rows = smem.rows[stage];
                load_deltas(rows);
                wgmma_fence();
                issue_products();
                wgmma_wait<C::kSoftcap ? 0 : 1>();
                wgmma_pin(scores);
                if constexpr (C::kSoftcap) wgmma_pin(products);
                weigh(rows);
                const bool hidden = !whole.holds(walk.block);
                if (hidden) hide(weights, walk.block);
                wgmma_fence();
                gemm_pv<T>(dv, weights, fresh_address(smem.dout[stage]), Smem::kQuerySlabBytes, !kIsFirst);
                wgmma_commit();
                if constexpr (!kIsFirst) issue_dq();
                wgmma_wait<kIsFirst ? 1 : 2>();
                wgmma_pin(products);
                differentiate();
                if (hidden) hide(words, walk.block);
                wgmma_fence();
                gemm_pv<T>(dk, words, fresh_address(smem.q[stage]), Smem::kQuerySlabBytes, !kIsFirst);
                wgmma_commit();
                wgmma_wait<1>();
                wgmma_pin(weights);
                if constexpr (!kIsFirst) {
                    wgmma_pin(dq);
                    add_part(sums + int64_t(before) * kQueryElements, dq);
                }
                before = walk.member * p.row_block_count + walk.block;
                walk.advance();
                ring.advance();
            };
            auto publish = [&] { // dT to shared memory, for all
                store_words(fresh_address(smem.ds[stored % 2]) + (wg * 64 + warp * 16) * kSlabRowBytes,
                            Smem::kKeySlabBytes, words, lane);
                tma_store_fence(); // also of this thread's reads of the row block, before the next copy into it
                warp_arrive(&smem.ds_full[stored % 2], lane);
                ++stored;
            };
            auto add_dq = [&] { // the warp's part, to its sums
                add_part(sums + int64_t(before) * kQueryElements, dq);
            };

            mbarrier_wait(&smem.kv_full[kv_ring.stage], kv_ring.parity);
            mbarrier_wait(&smem.full[ring.stage], ring.parity);
            wgmma_fence();
            issue_scores();
            do_step(std::true_type());
            while (--left) {
                mbarrier_wait(&smem.full[ring.stage], ring.parity);
                wgmma_fence();
                issue_scores();
                publish();
                wgmma_wait<1>();
                wgmma_pin(words);
                warp_arrive(&smem.empty[stage], lane);
                do_step(std::false_type());
            }
            publish();
            issue_dq();
            wgmma_wait<0>();
            wgmma_pin(words);
            wgmma_pin(dq);
            add_dq();
            warp_arrive(&smem.empty[stage], lane);
            warp_arrive(&smem.kv_empty[kv_ring.stage], lane);
            kv_ring.advance();
            wgmma_pin(dk);
            wgmma_pin(dv);
        }

        const Tile tile = smem.tile[round % Smem::kTileStages];
        warp_arrive(&smem.tile_empty[round % Smem::kTileStages], lane);
        const int pair = p.call.first_pair + tile.head, batch = pair / p.call.heads_kv;
        const int kv_head = pair - batch * p.call.heads_kv, key = key_of(tile_key);
        float k_factor[2], v_factor[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const bool visible = seen && key + 8 * r >= 0 && key + 8 * r < v.seq_k;
            k_factor[r] = visible ? p.scale : 0.0f;
            v_factor[r] = visible ? 1.0f : 0.0f;
        }
        if (p.dk.data)
            store_gradient<T>(p.dk, batch, kv_head, key + p.call.key_begin, p.call.seq_k, dk, k_factor, p.call.head_dim,
                              lane);
        if (p.dv.data)
            store_gradient<T>(p.dv, batch, kv_head, key + p.call.key_begin, p.call.seq_k, dv, v_factor, p.call.head_dim,
                              lane);
    }
}

template <class C>
__global__ void __launch_bounds__(128 * (C::kConsumers + 1), 1) backward_fused(const __grid_constant__ FusedParams p) {
    FA_CHAOS_BEGIN();
    extern __shared__ __align__(1024) char raw[];
    auto &smem = *reinterpret_cast<FusedSmem<C> *>(raw);
    const int wg = __shfl_sync(0xffffffff, threadIdx.x / 128, 0); // uniform for the compiler too

    if (threadIdx.x == 0) {
        for (const CUtensorMap *map : {&p.q, &p.dout, &p.k, &p.v}) tensor_map_prefetch(map);
        for (int stage = 0; stage < C::kKeyStages; ++stage) {
            mbarrier_init(&smem.kv_full[stage], 1);
            mbarrier_init(&smem.kv_empty[stage], C::kConsumers * 4);
        }
        for (int buffer = 0; buffer < 2; ++buffer) mbarrier_init(&smem.ds_full[buffer], C::kConsumers * 4);
        for (int stage = 0; stage < FusedSmem<C>::kTileStages; ++stage) {
            mbarrier_init(&smem.tile_full[stage], 1);
            mbarrier_init(&smem.tile_empty[stage], C::kConsumers * 4);
        }
        for (int stage = 0; stage < C::kStages; ++stage) {
            mbarrier_init(&smem.full[stage], 1);
            mbarrier_init(&smem.empty[stage], C::kConsumers * 4);
        }
        mbarrier_init_fence();
    }
    __syncthreads();

    if (wg == 0) {
        registers_lower<C::kProducerRegisters>();
        if (threadIdx.x / 32 == 0 && elect_one()) fused_produce<C>(p, smem);
    } else {
        registers_raise<C::kConsumerRegisters>();
        fused_consume<C>(p, smem, wg - 1);
    }
}

} // namespace fa::sm90
