/* dk of 192 columns and dv of 128: keys.cuh's tiles, rings and producer, with S and dP one after the other in
 * the same registers. dk and dv are 160 of a thread's registers for 64 keys: 64 queries' S beside their dP find no
 * place, and 32 queries a step would make shared memory the limit.
 *
 *     step n:  wait for S(n);  P = exp2(S - lse)                          under dK(n - 1)
 *              wait for dK(n - 1), free the stage of n - 1;  round P
 *              in turn: issue dP(n), dV += P^T dO; wait for both
 *              dT = P (dP - delta), rounded; issue S(n + 1), dK += dT^T Q
 *
 * dT is made of the rounded P, as torch's unfused formula has it: P itself would need 32 registers more.
 *
 * Limits, at 64 queries a step: the tensor cores need 2560 cycles for both warpgroups, shared memory 2240, the
 * MUFU 512. While a warpgroup makes dT none of its products are in flight. So the warpgroups take turns with dP and dV
 * (C::kKeyTurns): one's dT, some 250 cycles, is made under the other's 512.
 *
 * Why no waiter falls two phases behind: as in keys.cuh, whose barriers these are. A turn's barrier joins the
 * warpgroup whose turn it is with the other's arrival; the other arrives again past its own next turn, for which it
 * waits until this one, past the barrier, has passed the turn on.
 *
 * Why every wait ends: a warpgroup that waits for `full` of a step holds at most the stage of the step before,
 * hence two stages, and no turn. Each takes one turn a step, also of steps that it skips, in the same order of steps;
 * it waits for its turn once `full` of its step is there, and the other, whose turn comes first, is at that step or the
 * one before: what that one needs is there too. */
#pragma once
#include "sm90/backward/keys_wide.cuh"

namespace fa::sm90 {

/* The sums of one warpgroup over the queries that see its 64 keys. */
template <class C, class Params> struct PairSums {
    using T = typename C::Element;
    using Smem = KeysSmem<C>;
    static constexpr int kTileQ = C::kTileQ;
    const Params &p;
    Smem &smem;
    const int wg, warp, lane;
    RingState<C::kStages> ring{0};
    RingState<C::kKeyStages> kv_ring{0};
    uint32_t round = 0; // of the tile

    __device__ __forceinline__ const auto &call() { return call_of<C>(p, smem, round); }

    using Dk = float[C::kHeadDim / 2];
    using Dv = float[C::kHeadDimV / 2];
    using Values = float[kTileQ / 2];   // S, P, dP, dT
    using Words = uint32_t[kTileQ / 4]; // P, then dT, rounded: the A operand
    using Rows = float2[kTileQ / 8];    // LSE or delta of a thread's columns

    static constexpr uint32_t kTurnThreads = 256; // the warpgroup whose turn it is, and the other, which arrives
    __device__ __forceinline__ void turn_wait() {
        if constexpr (C::kKeyTurns) named_barrier_sync(1 + wg, kTurnThreads);
    }
    __device__ __forceinline__ void turn_pass() {
        if constexpr (C::kKeyTurns) named_barrier_arrive(2 - wg, kTurnThreads);
    }

    __device__ __forceinline__ void free_stage(int stage) { warp_arrive(&smem.empty[stage], lane); }

    __device__ __forceinline__ QueryBlocks blocks_of(int tile_key) {
        return find_queries<kTileQ>(call(), tile_key, tile_key + C::kTileK);
    }
    /* Of this warpgroup; none: it skips all of the tile's. */
    __device__ __forceinline__ QueryBlocks own_blocks_of(int tile_key) {
        if constexpr (!C::kMasked) return blocks_of(tile_key);
        return find_queries<kTileQ>(call(), tile_key + wg * 64, tile_key + wg * 64 + 64);
    }
    __device__ __forceinline__ int key_of(int tile_key) { return tile_key + wg * 64 + warp * 16 + lane / 4; }

    __device__ __forceinline__ void skip(int count) {
        for (int n = 0; n < count; ++n) {
            mbarrier_wait(&smem.full[ring.stage], ring.parity);
            turn_wait();
            turn_pass();
            free_stage(ring.stage);
            ring.advance();
        }
    }

    /* Once the ring's step is there: its LSE, and S^T = K Q^T. */
    __device__ __forceinline__ void issue_scores(Values &values, Rows &lse) {
        mbarrier_wait(&smem.full[ring.stage], ring.parity);
        read_rows(lse, smem.rows[ring.stage].lse, lane); // its latency passes under the wait for S
        wgmma_fence();
        gemm_qk<T, C::kHeadDim>(values, fresh_address(smem.k[kv_ring.stage][wg]), Smem::kKeySlabBytes,
                                fresh_address(smem.q[ring.stage]), Smem::kQuerySlabBytes);
        wgmma_commit();
    }

    __device__ __forceinline__ void issue_dk(Dk &dk, Words &words, int stage) {
        gemm_pv<T>(dk, words, fresh_address(smem.q[stage]), Smem::kQuerySlabBytes, 1);
        wgmma_commit();
    }

    /* dP^T = V dO^T and dV += P^T dO of the step in `stage`, in turn; both are there afterwards. */
    __device__ __forceinline__ void multiply_dout(Dv &dv, Values &values, Words &words, int stage) {
        turn_wait();
        wgmma_fence();
        gemm_qk<T, C::kHeadDimV>(values, fresh_address(smem.v[kv_ring.stage][wg]), Smem::kKeySlabBytes,
                                 fresh_address(smem.dout[stage]), Smem::kQuerySlabBytes);
        gemm_pv<T>(dv, words, fresh_address(smem.dout[stage]), Smem::kQuerySlabBytes, 1);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_pin(values);
        wgmma_pin(words);
        turn_pass();
    }

    /* P in place of S. */
    __device__ __forceinline__ void weigh(Values &values, const Rows &lse) {
#pragma unroll
        for (int i = 0; i < kTileQ / 2; ++i)
            values[i] = weight_of(values[i], p.call.score.scale_log2, i & 1 ? lse[i >> 2].y : lse[i >> 2].x);
    }

    /* dT in place of dP, of the rounded P: word i has what accumulators 2i and 2i + 1 stand for. */
    __device__ __forceinline__ void differentiate(Values &values, const Words &words, int stage) {
        Rows delta;
        read_rows(delta, smem.rows[stage].delta, lane);
#pragma unroll
        for (int i = 0; i < kTileQ / 4; ++i) {
            const float2 weight = unpack_pair<T>(words[i]);
            values[2 * i] = weight.x * (values[2 * i] - delta[i >> 1].x);
            values[2 * i + 1] = weight.y * (values[2 * i + 1] - delta[i >> 1].y);
        }
    }

    /* 0 in place of what hidden pairs of a block have. */
    __device__ __forceinline__ void hide(Values &values, int tile_key, int block) {
        if (C::kMasked && hides_some<kTileQ>(call().visible, fresh(tile_key) + wg * 64, block))
            hide_queries<kTileQ>(values, call().visible, key_of(fresh(tile_key)), block, lane);
    }

    /* The query blocks `own` of one head, of which there is one at least. */
    __device__ __forceinline__ void add_head(Dk &dk, Dv &dv, int tile_key, const QueryBlocks &own) {
        Values values;
        Words words;
        Rows lse;
        issue_scores(values, lse);
        wgmma_commit(); // an empty group in place of dK(n - 1)
        for (int block = own.begin;; ++block) {
            wgmma_wait<1>();
            wgmma_pin(values);
            const int stage = ring.stage;
            weigh(values, lse);
            hide(values, tile_key, block);
            wgmma_wait<0>();
            wgmma_pin(words);
            if (block > own.begin) free_stage(stage ? stage - 1 : C::kStages - 1);
            pack_scores<T>(words, values);
            multiply_dout(dv, values, words, stage);
            differentiate(values, words, stage);
            hide(values, tile_key, block);
            pack_scores<T>(words, values);
            tma_store_fence(); // this thread's reads of the row block come before the next copy into it
            ring.advance();
            if (block + 1 == own.end) {
                wgmma_fence();
                issue_dk(dk, words, stage);
                wgmma_wait<0>();
                wgmma_pin(words);
                free_stage(stage);
                return;
            }
            issue_scores(values, lse);
            issue_dk(dk, words, stage);
        }
    }

    template <int Count> static __device__ __forceinline__ void clear(float (&sums)[Count]) {
#pragma unroll
        for (int i = 0; i < Count; ++i) sums[i] = 0.0f;
    }

    /* dk and dv of a tile that some query sees. */
    __device__ __forceinline__ void add_tile(Dk &dk, Dv &dv, int tile_key) {
        clear(dk), clear(dv);
        mbarrier_wait(&smem.kv_full[kv_ring.stage][wg], kv_ring.parity);
        for (int member = 0; member < p.call.group; ++member) {
            const int from = fresh(tile_key);
            const QueryBlocks blocks = blocks_of(from), own = own_blocks_of(from);
            if (own.begin >= own.end) {
                skip(blocks.end - blocks.begin);
                continue;
            }
            skip(own.begin - blocks.begin);
            add_head(dk, dv, tile_key, own);
            const int to = fresh(tile_key);
            skip(blocks_of(to).end - own_blocks_of(to).end);
        }
        wgmma_pin(dk);
        wgmma_pin(dv);
        warp_arrive(&smem.kv_empty[kv_ring.stage][wg], lane);
        kv_ring.advance();
    }

    __device__ __forceinline__ void store(const Dk &dk, const Dv &dv, const Tile &tile, int tile_key) {
        const CallHead at = kv_head_of<C>(p.call, tile);
        const int key = key_of(tile_key);
        const QueryBlocks own = own_blocks_of(tile_key);
        float k_factor[2], v_factor[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const bool visible = own.begin < own.end && key + 8 * r >= 0 && key + 8 * r < call().visible.seq_k;
            k_factor[r] = visible ? p.scale : 0.0f;
            v_factor[r] = visible ? 1.0f : 0.0f;
        }
        const int lane = fresh(this->lane); // its columns are worked out here, not ahead
        const int row = first_key(call()) + key + call().key_begin, end = end_of_keys(call());
        if (p.dk.data) store_gradient<T>(p.dk, at.batch, at.head, row, end, dk, k_factor, p.call.head_dim, lane);
        if (p.dv.data) store_gradient<T>(p.dv, at.batch, at.head, row, end, dv, v_factor, p.call.head_dim_v, lane);
    }
};

template <class C, class Params>
__device__ __forceinline__ void keys_pair_consume(const Params &p, KeysSmem<C> &smem, int wg) {
    using Smem = KeysSmem<C>;
    PairSums<C, Params> sums{p, smem, wg, int(threadIdx.x / 32) % 4, int(threadIdx.x % 32)};
    if (wg == 1) sums.turn_pass();
    int tile_row;
    for (; (tile_row = tile_row_of(smem, sums.round)) >= 0; ++sums.round) {
        const int tile_key = tile_row - sums.call().key_begin;
        float dk[C::kHeadDim / 2], dv[C::kHeadDimV / 2];
        if (const QueryBlocks blocks = sums.blocks_of(tile_key); blocks.begin < blocks.end)
            sums.add_tile(dk, dv, tile_key);
        const Tile tile = smem.tile[sums.round % Smem::kTileStages];
        uint64_t *const empty = &smem.tile_empty[sums.round % Smem::kTileStages];
        if (!C::kSequences) warp_arrive(empty, sums.lane);
        sums.store(dk, dv, tile, tile_key);
        if constexpr (C::kSequences) warp_arrive(empty, sums.lane);
    }
}

template <class C, class Params> __device__ __forceinline__ void keys_pair_block(const Params &p) {
    static_assert(C::kConsumers == 2, "two take turns");
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
        keys_pair_consume<C>(p, smem, wg - 1);
    }
}

template <class C>
__global__ void __launch_bounds__(128 * (C::kConsumers + 1), 1)
    backward_keys_pair(const __grid_constant__ KeysParams p) {
    keys_pair_block<C>(p);
}
template <class C>
__global__ void __launch_bounds__(128 * (C::kConsumers + 1), 1)
    backward_keys_pair_of_sequences(const __grid_constant__ SequenceKeysParams p) {
    keys_pair_block<C>(p);
}

} // namespace fa::sm90
