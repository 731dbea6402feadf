/* dk and dv of 192 and 256 columns, of which a thread's registers hold one: keys.cuh's sums, with the two
 * warpgroups in roles. A CTA takes 64 keys of a kv head, both warpgroups read each tile of Q and dO once, and P goes
 * from one to the other in float32:
 *
 *     weights, step n:  wait for S(n);  P = exp2(S - lse), to memory;          issue dV += P^T dO, S(n + 1)
 *                       wait for dV(n), free dO
 *     slopes, step n:   wait for dP(n) and P;  dT = P (dP - delta), free dO;   issue dK += dT^T Q, dP(n + 1)
 *                       wait for dK(n), free Q
 *
 * Operands are swapped as there. dk and dv of 128 keys in two launches would take five products a step instead of four.
 *
 * Limits, at 256 columns and 64 queries a step: the tensor cores need 2048 cycles and shared memory 2304. Each
 * warpgroup has half of the products, and makes its P or dT under the other's.
 *
 * Why no waiter falls two phases behind (see sm90/forward/kernel.cuh): of q_full, dout_full and tile_full all warps
 * wait, of k_full those of the first warpgroup, of v_full those of the second; the next phase of each ends after the
 * same phase of its `empty`, where each of these warps arrives for itself, past its own wait. Of those only the
 * producer's thread waits; over sequences tiles are told by another, as in queries.cuh. weights_full and weights_empty
 * join a warp to the one with its number in the other warpgroup, and each of the two waits in every phase before it
 * allows the next.
 *
 * Why every wait ends, with two stages of Q and one of dO: take S(0), dP(0), then for each n P(n), dV(n), dT(n),
 * dK(n), S(n + 1), dP(n + 1), and Q(n) and dO(n), which the producer loads in turns, before S(n) and dP(n). Each waits
 * for what comes before it alone: Q(n + 1) for P(n - 1) and dK(n - 1), whose stage is freed once dP(n) is issued; dO(n
 * + 1) for dP(n) and dV(n), whose stage is freed once S(n + 1) is issued; P(n) for dT(n - 2). With one stage of Q, Q(n
 * + 1) and dP(n + 1) would wait for each other.
 *
 * Shared memory: keys and values [slab][64][64], Q and dO [stage][slab][kTileQ][64], swizzled; P [stage][warp] as the
 * accumulators have it; LSE goes with Q, delta with dO. */
#pragma once
#include "sm90/backward/keys.cuh"

namespace fa::sm90 {

template <class C> struct WideKeysSmem {
    static constexpr int kSlabs = (C::kHeadDim + kSlabColumns - 1) / kSlabColumns;
    static constexpr int kKeySlabBytes = 64 * kSlabRowBytes;
    static constexpr int kQuerySlabBytes = C::kTileQ * kSlabRowBytes;
    static constexpr int kKeyBytes = kSlabs * kKeySlabBytes;
    static constexpr int kQueryBytes = kSlabs * kQuerySlabBytes;
    static constexpr int kTileStages = tile_stages<C>;
    static constexpr int kWeightStages = 2;

    alignas(1024) char k[kKeyBytes];
    alignas(1024) char v[kKeyBytes];
    alignas(1024) char q[C::kStages][kQueryBytes];
    alignas(1024) char dout[C::kDoutStages][kQueryBytes];
    float4 weights[kWeightStages][4][C::kTileQ / 8][32]; // [stage][warp][four accumulators][lane]
    alignas(16) float lse[C::kStages][C::kTileQ];
    alignas(16) float delta[C::kDoutStages][C::kTileQ];
    alignas(16) Tile tile[kTileStages];
    [[no_unique_address]] SequenceCalls<C::kSequences, kTileStages> calls; // of the tiles
    uint64_t k_full, k_empty, v_full, v_empty;
    uint64_t q_full[C::kStages], q_empty[C::kStages];               // Q and LSE
    uint64_t dout_full[C::kDoutStages], dout_empty[C::kDoutStages]; // dO and delta
    uint64_t weights_full[kWeightStages][4], weights_empty[kWeightStages][4];
    uint64_t tile_full[kTileStages], tile_empty[kTileStages];
};

template <class C, class Params>
__device__ __forceinline__ void wide_keys_produce(const Params &p, WideKeysSmem<C> &smem) {
    using Smem = WideKeysSmem<C>;
    using Rows = RowBlock<C::kTileQ>;
    RingState<C::kStages> q_ring(1);
    RingState<C::kDoutStages> dout_ring(1);
    RingState<1> kv_ring(1);
    produce_tiles<C, C::kTileK, true>(p, smem, [&](const auto &call, const Tile &tile, auto &&announce_next) {
        const int key = tile.row - call.key_begin;
        const QueryBlocks blocks = find_queries<C::kTileQ>(call, key, key + C::kTileK);
        if (blocks.begin >= blocks.end) return announce_next();
        const int batch = C::kSequences ? 0 : kv_head_of<C>(p.call, tile).batch;
        const auto kv_head = [&] { return kv_head_of<C>(p.call, tile).head; };
        const int count = blocks.end - blocks.begin, steps = p.call.group * count;
        if constexpr (C::kSequences)
            if (is_new_span(smem, tile)) acquire_keys_maps(call);
        auto rows_at = [&](int member, int block) { // LSE; delta follows
            const int64_t head = int64_t(tile.head) * p.call.group + member;
            return p.row_blocks + (head * p.row_block_count + first_row_block(call) + block) * int64_t(sizeof(Rows));
        };
        auto load_q = [&](int step) {
            const int member = step / count, block = blocks.begin + step - member * count;
            uint64_t *full = &smem.q_full[q_ring.stage];
            mbarrier_wait(&smem.q_empty[q_ring.stage], q_ring.parity);
            mbarrier_arrive_expect(full, Smem::kQueryBytes + sizeof smem.lse[0]);
            tma_load_tile<C::kHeadDim, C::kTileQ>(
                smem.q[q_ring.stage], map_of<kMapOfQ>(p, call), full, block * C::kTileQ - call.row_begin,
                (kv_head() * p.call.group + member) * p.q_step[0], batch * p.q_step[1], kEvictLast);
            bulk_load(smem.lse[q_ring.stage], rows_at(member, block), sizeof smem.lse[0], full);
            q_ring.advance();
        };
        auto load_dout = [&](int step) {
            const int member = step / count, block = blocks.begin + step - member * count;
            uint64_t *full = &smem.dout_full[dout_ring.stage];
            mbarrier_wait(&smem.dout_empty[dout_ring.stage], dout_ring.parity);
            mbarrier_arrive_expect(full, Smem::kQueryBytes + sizeof smem.delta[0]);
            tma_load_tile<C::kHeadDim, C::kTileQ>(smem.dout[dout_ring.stage], map_of<kMapOfDout>(p, call), full,
                                                  block * C::kTileQ - call.row_begin + p.call.dout_row,
                                                  (kv_head() * p.call.group + member) * p.dout_step[0],
                                                  batch * p.dout_step[1], kEvictLast);
            bulk_load(smem.delta[dout_ring.stage], rows_at(member, block) + offsetof(Rows, delta), sizeof smem.delta[0],
                      full);
            dout_ring.advance();
        };
        auto load_keys = [&](char *to, const CUtensorMap *map, const int(&map_step)[2], uint64_t *full,
                             uint64_t *empty) {
            mbarrier_wait(empty, kv_ring.parity);
            mbarrier_arrive_expect(full, Smem::kKeyBytes);
            tma_load_tile<C::kHeadDim, 64>(to, map, full, key, kv_head() * map_step[0], batch * map_step[1],
                                           kEvictFirst);
        };
        load_keys(smem.k, map_of<kMapOfTileK>(p, call), p.k_step, &smem.k_full, &smem.k_empty);
        load_q(0);
        load_keys(smem.v, map_of<kMapOfTileV>(p, call), p.v_step, &smem.v_full, &smem.v_empty);
        kv_ring.advance();
        announce_next();
        for (int step = 0; step < steps; ++step) {
            load_dout(step);
            if (step + 1 < steps) load_q(step + 1);
        }
    });
}

/* The current tile, for both roles: 64 keys, of which a thread has `key` and `key` + 8. */
struct WideTile {
    QueryBlocks blocks;
    int first, key, steps; // first: key of the tile; steps: of all heads of the group
    int warp, lane;
};

/* Whether some of 64 keys from `first` on is hidden from some query of a block. */
template <int TileQ> __device__ __forceinline__ bool hides_some(const ShiftedBand &v, int first, int block) {
    return block * TileQ < min(first + 64, v.seq_k) - v.upper || (block + 1) * TileQ > max(first, 0) - v.lower + 1;
}

/* 0 in place of what hidden pairs of keys `key`, `key` + 8 and queries of a block have, whatever it is: 0 times that
 * may be NaN. */
template <int TileQ>
__device__ __forceinline__ void hide_queries(float (&values)[TileQ / 2], const ShiftedBand &v, int key, int block,
                                             int lane) {
    uint32_t visible[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int first = key + 8 * r + 1 - block * TileQ; // column of the query after
        visible[r] = columns_between(first - v.upper, first - v.lower, 2 * (lane % 4));
    }
#pragma unroll
    for (int i = 0; i < TileQ / 2; ++i)
        if (!is_visible(visible, i)) values[i] = 0.0f;
}

/* LSE or delta of the queries of a thread's accumulators, two of each four. */
template <int Count>
__device__ __forceinline__ void read_rows(float2 (&to)[Count], const float (&rows)[8 * Count], int lane) {
#pragma unroll
    for (int n = 0; n < Count; ++n) to[n] = *reinterpret_cast<const float2 *>(&rows[8 * n + 2 * (lane % 4)]);
}

/* The first warpgroup: S, P and dV. */
template <class C> struct WeightsRole {
    using T = typename C::Element;
    using Smem = WideKeysSmem<C>;
    static constexpr int kTileQ = C::kTileQ;
    RingState<C::kStages> q_ring{0};
    RingState<C::kDoutStages> dout_ring{0};
    RingState<1> k_ring{0};
    RingState<Smem::kWeightStages> weights_ring{1};

    static __device__ __forceinline__ const Gradient &gradient(const KeysParams &p) { return p.dv; }
    static __device__ __forceinline__ float factor(const KeysParams &) { return 1.0f; }

    /* P in place of S; with softcap `slopes` gets it multiplied by the slope of the cap. */
    static __device__ __forceinline__ void weigh(float (&scores)[kTileQ / 2], float (&slopes)[kTileQ / 2],
                                                 const float2 (&lse)[kTileQ / 8], const ScoreParams &score) {
#pragma unroll
        for (int i = 0; i < kTileQ / 2; ++i) {
            const float row = i & 1 ? lse[i >> 2].y : lse[i >> 2].x;
            if constexpr (C::kSoftcap) {
                float slope;
                scores[i] = capped_weight_of(scores[i], score, row, &slope);
                slopes[i] = scores[i] * slope;
            } else {
                scores[i] = weight_of(scores[i], score.scale_log2, row);
            }
        }
    }

    __device__ __forceinline__ void send(Smem &smem, const float (&values)[kTileQ / 2], int warp, int lane) {
        mbarrier_wait(&smem.weights_empty[weights_ring.stage][warp], weights_ring.parity);
#pragma unroll
        for (int n = 0; n < kTileQ / 8; ++n)
            smem.weights[weights_ring.stage][warp][n][lane] =
                make_float4(values[4 * n], values[4 * n + 1], values[4 * n + 2], values[4 * n + 3]);
        warp_arrive(&smem.weights_full[weights_ring.stage][warp], lane);
        weights_ring.advance();
    }

    template <class Call>
    __device__ __forceinline__ void sum(const KeysParams &p, const Call &call, Smem &smem, const WideTile &tile,
                                        float (&dv)[C::kHeadDim / 2]) {
        const int lane = tile.lane;
        float scores[kTileQ / 2], slopes[kTileQ / 2]; // slopes: with softcap
        uint32_t words[kTileQ / 4];                   // P, rounded: the A operand
        float2 lse[kTileQ / 8];
        auto issue_scores = [&] { // S^T of the ring's step
            mbarrier_wait(&smem.q_full[q_ring.stage], q_ring.parity);
            if constexpr (!C::kSoftcap) read_rows(lse, smem.lse[q_ring.stage], lane);
            wgmma_fence();
            gemm_qk<T, C::kHeadDim>(scores, fresh_address(smem.k), Smem::kKeySlabBytes,
                                    fresh_address(smem.q[q_ring.stage]), Smem::kQuerySlabBytes);
            wgmma_commit();
        };
        auto free_dout = [&] {
            wgmma_pin(words);
            warp_arrive(&smem.dout_empty[dout_ring.stage], lane);
            dout_ring.advance();
        };
        mbarrier_wait(&smem.k_full, k_ring.parity);
        issue_scores();
        for (int left = tile.steps, block = tile.blocks.begin;;) {
            wgmma_wait<0>();
            wgmma_pin(scores);
            if (left == 1) warp_arrive(&smem.k_empty, lane);
            if constexpr (C::kSoftcap) read_rows(lse, smem.lse[q_ring.stage], lane);
            weigh(scores, slopes, lse, p.call.score);
            tma_store_fence(); // this thread's reads of LSE come before the next copy into it
            warp_arrive(&smem.q_empty[q_ring.stage], lane);
            q_ring.advance();
            if (C::kMasked && hides_some<kTileQ>(call().visible, tile.first, block)) {
                hide_queries<kTileQ>(scores, call().visible, fresh(tile.key), block, lane);
                if constexpr (C::kSoftcap) hide_queries<kTileQ>(slopes, call().visible, fresh(tile.key), block, lane);
            }
            send(smem, C::kSoftcap ? slopes : scores, tile.warp, lane);
            pack_scores<T>(words, scores);
            mbarrier_wait(&smem.dout_full[dout_ring.stage], dout_ring.parity);
            wgmma_fence();
            gemm_pv<T>(dv, words, fresh_address(smem.dout[dout_ring.stage]), Smem::kQuerySlabBytes, left != tile.steps);
            wgmma_commit();
            if (--left == 0) break;
            issue_scores();
            wgmma_wait<1>();
            free_dout();
            if (++block == tile.blocks.end) block = tile.blocks.begin;
        }
        wgmma_wait<0>();
        wgmma_pin(dv);
        free_dout();
        k_ring.advance();
    }
};

/* The second: dP, dT and dK. */
template <class C> struct SlopesRole {
    using T = typename C::Element;
    using Smem = WideKeysSmem<C>;
    static constexpr int kTileQ = C::kTileQ;
    RingState<C::kStages> q_ring{0};
    RingState<C::kDoutStages> dout_ring{0};
    RingState<1> v_ring{0};
    RingState<Smem::kWeightStages> weights_ring{0};

    static __device__ __forceinline__ const Gradient &gradient(const KeysParams &p) { return p.dk; }
    static __device__ __forceinline__ float factor(const KeysParams &p) { return p.scale; }

    /* dT in place of dP. */
    __device__ __forceinline__ void differentiate(Smem &smem, float (&products)[kTileQ / 2],
                                                  const float2 (&delta)[kTileQ / 8], int warp, int lane) {
        mbarrier_wait(&smem.weights_full[weights_ring.stage][warp], weights_ring.parity);
#pragma unroll
        for (int n = 0; n < kTileQ / 8; ++n) {
            const float4 weight = smem.weights[weights_ring.stage][warp][n][lane];
            products[4 * n] = weight.x * (products[4 * n] - delta[n].x);
            products[4 * n + 1] = weight.y * (products[4 * n + 1] - delta[n].y);
            products[4 * n + 2] = weight.z * (products[4 * n + 2] - delta[n].x);
            products[4 * n + 3] = weight.w * (products[4 * n + 3] - delta[n].y);
        }
        warp_arrive(&smem.weights_empty[weights_ring.stage][warp], lane);
        weights_ring.advance();
    }

    template <class Call>
    __device__ __forceinline__ void sum(const KeysParams &p, const Call &call, Smem &smem, const WideTile &tile,
                                        float (&dk)[C::kHeadDim / 2]) {
        const int lane = tile.lane;
        float products[kTileQ / 2]; // dP
        uint32_t words[kTileQ / 4]; // dT, rounded: the A operand
        float2 delta[kTileQ / 8];
        auto issue_products = [&] { // dP^T of the ring's step
            mbarrier_wait(&smem.dout_full[dout_ring.stage], dout_ring.parity);
            read_rows(delta, smem.delta[dout_ring.stage], lane);
            wgmma_fence();
            gemm_qk<T, C::kHeadDim>(products, fresh_address(smem.v), Smem::kKeySlabBytes,
                                    fresh_address(smem.dout[dout_ring.stage]), Smem::kQuerySlabBytes);
            wgmma_commit();
        };
        auto free_q = [&] {
            wgmma_pin(words);
            warp_arrive(&smem.q_empty[q_ring.stage], lane);
            q_ring.advance();
        };
        mbarrier_wait(&smem.v_full, v_ring.parity);
        issue_products();
        for (int left = tile.steps, block = tile.blocks.begin;;) {
            wgmma_wait<0>();
            wgmma_pin(products);
            if (left == 1) warp_arrive(&smem.v_empty, lane);
            tma_store_fence(); // this thread's reads of delta come before the next copy into it
            warp_arrive(&smem.dout_empty[dout_ring.stage], lane);
            dout_ring.advance();
            differentiate(smem, products, delta, tile.warp, lane);
            if (C::kMasked && hides_some<kTileQ>(call().visible, tile.first, block))
                hide_queries<kTileQ>(products, call().visible, fresh(tile.key), block, lane);
            pack_scores<T>(words, products);
            mbarrier_wait(&smem.q_full[q_ring.stage], q_ring.parity);
            wgmma_fence();
            gemm_pv<T>(dk, words, fresh_address(smem.q[q_ring.stage]), Smem::kQuerySlabBytes, left != tile.steps);
            wgmma_commit();
            if (--left == 0) break;
            issue_products();
            wgmma_wait<1>();
            free_q();
            if (++block == tile.blocks.end) block = tile.blocks.begin;
        }
        wgmma_wait<0>();
        wgmma_pin(dk);
        free_q();
        v_ring.advance();
    }
};

template <class C, class Role, class Params>
__device__ __forceinline__ void wide_keys_consume(const Params &p, WideKeysSmem<C> &smem) {
    using T = typename C::Element;
    const int lane = threadIdx.x % 32, warp = (threadIdx.x / 32) % 4;
    Role role;
    int tile_row;
    for (uint32_t round = 0; (tile_row = tile_row_of(smem, round)) >= 0; ++round) {
        const auto call = [&]() -> const auto & { return call_of<C>(p, smem, round); };
        const int first = tile_row - call().key_begin, key = first + warp * 16 + lane / 4;
        const QueryBlocks blocks = find_queries<C::kTileQ>(call(), first, first + C::kTileK);
        const bool seen = blocks.begin < blocks.end;
        float sums[C::kHeadDim / 2];
        const int steps = p.call.group * (blocks.end - blocks.begin);
        if (seen) role.sum(p, call, smem, {blocks, first, key, steps, warp, lane}, sums);

        const Tile tile = smem.tile[round % WideKeysSmem<C>::kTileStages];
        uint64_t *const empty = &smem.tile_empty[round % WideKeysSmem<C>::kTileStages];
        if (!C::kSequences) warp_arrive(empty, lane);
        if (Role::gradient(p).data) {
            const CallHead at = kv_head_of<C>(p.call, tile);
            const auto &of = call();
            float factor[2];
#pragma unroll
            for (int r = 0; r < 2; ++r)
                factor[r] = seen && key + 8 * r >= 0 && key + 8 * r < of.visible.seq_k ? Role::factor(p) : 0.0f;
            store_gradient<T>(Role::gradient(p), at.batch, at.head, first_key(of) + key + of.key_begin, end_of_keys(of),
                              sums, factor, p.call.head_dim, lane);
        }
        if constexpr (C::kSequences) warp_arrive(empty, lane);
    }
}

template <class C, class Params> __device__ __forceinline__ void wide_keys_block(const Params &p) {
    static_assert(C::kConsumers == 2, "two roles");
    FA_CHAOS_BEGIN();
    extern __shared__ __align__(1024) char raw[];
    auto &smem = *reinterpret_cast<WideKeysSmem<C> *>(raw);
    const int wg = __shfl_sync(0xffffffff, threadIdx.x / 128, 0); // uniform for the compiler too

    if (threadIdx.x == 0) {
        if constexpr (!C::kSequences)
            for (const CUtensorMap *map : {&p.q, &p.dout, &p.k, &p.v}) tensor_map_prefetch(map);
        const auto init = [](uint64_t *full, uint64_t *empty, int stages, int full_arrivals, int empty_arrivals) {
            for (int stage = 0; stage < stages; ++stage) {
                mbarrier_init(&full[stage], full_arrivals);
                mbarrier_init(&empty[stage], empty_arrivals);
            }
        };
        init(&smem.k_full, &smem.k_empty, 1, 1, 4);
        init(&smem.v_full, &smem.v_empty, 1, 1, 4);
        init(smem.q_full, smem.q_empty, C::kStages, 1, 8);
        init(smem.dout_full, smem.dout_empty, C::kDoutStages, 1, 8);
        init(smem.tile_full, smem.tile_empty, WideKeysSmem<C>::kTileStages, 1, 8 + C::kSequences);
        init(smem.weights_full[0], smem.weights_empty[0], WideKeysSmem<C>::kWeightStages * 4, 1, 1);
        mbarrier_init_fence();
    }
    __syncthreads();

    if (wg == 0) {
        registers_lower<C::kProducerRegisters>();
        if constexpr (C::kSequences)
            if (threadIdx.x / 32 == 1 && elect_one()) tell_tiles<kTilesOfKeys, C::kTileK>(p.list, smem);
        if (threadIdx.x / 32 == 0 && elect_one()) wide_keys_produce<C>(p, smem);
    } else {
        registers_raise<C::kConsumerRegisters>();
        if (wg == 1)
            wide_keys_consume<C, WeightsRole<C>>(p, smem);
        else
            wide_keys_consume<C, SlopesRole<C>>(p, smem);
    }
}

template <class C>
__global__ void __launch_bounds__(128 * (C::kConsumers + 1), 1)
    backward_keys_wide(const __grid_constant__ KeysParams p) {
    wide_keys_block<C>(p);
}
template <class C>
__global__ void __launch_bounds__(128 * (C::kConsumers + 1), 1)
    backward_keys_wide_of_sequences(const __grid_constant__ SequenceKeysParams p) {
    wide_keys_block<C>(p);
}

} // namespace fa::sm90
