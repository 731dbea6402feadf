/* dq, dk and dv in one pass: after fused_rows, which left LSE and delta of each query in memory. A CTA takes 128 keys
 * of a kv head, a warpgroup 64 of them, and goes over the query heads of the group and their query blocks. Operands are
 * swapped, as in backward/keys.cuh: S^T = K Q^T, dP^T = V dO^T, and P^T and dT^T are A operands in registers. dT^T
 * goes to shared memory too, where both warpgroups find all 128 keys of it: each makes dQ = dT K of 64 queries x 64
 * columns (halves of 128 queries at head_dim 64, of 128 columns at 128) and adds it to float32 sums in global memory.
 *
 *     step n:  wait for dK(n - 1), free its stage;  dT(n - 1) to shared memory, for all
 *              read LSE and -delta of n;  issue S(n), and dP(n) onto -delta
 *              wait for S(n);  P = exp2(S - lse)                                 under dP(n)
 *              wait for dP(n);  dT = P (dP - delta); both rounded
 *              issue dV += P^T dO(n);  wait for dT(n - 1) of both, issue dQ(n - 1);  issue dK += dT^T Q(n)
 *              wait for dQ(n - 1), on its way to memory                          under dK(n)
 *
 * At head_dim 128 dT(n - 1) is stored under S(n) and dP(n), and dK(n - 1) waited for there: at 64 registers are short.
 *
 * P stays in float32 until dT is made of it. Products of P and dP - delta, both rounded to bfloat16, save instructions,
 * but gave gradients 1.2 to 1.4 times the error (bench/log/wgmma_fused_backward_sm90.md).
 *
 * dQ is a step late, so that no warpgroup waits for the other's dT. A warpgroup's own waits decide the time: LSE and
 * delta were 700 of 4,200 cycles a step where each was read after its product was there, and the proxy fence 400 to 500
 * where the writer of dT had it, its stores still on their way; the exponentials behind the wait for dP cost 2 to 9% in
 * order at head_dim 64, P's rounding before it up to 6% more.
 *
 * dQ goes to memory through shared memory and TMA, or, in order, from the registers, which wait for the way to L2: in
 * any order 3 to 8% slower at head_dim 64 with full masks of 2,048 keys or more.
 *
 * Tiles of unequal length go longest first. A CTA takes its next one when the last step of the one before is on its
 * way: taken a tile ahead, the short ones that even out the rest wait for CTAs that are in their last long one, 8% of
 * an H100's time with one head of 16,384 keys a section (fused_section_heads). Over sequences a warp of the producer's
 * warpgroup takes them (backward/sequences.cuh), two steps earlier, since it takes reads that depend on one another.
 *
 * CTAs of one head would add to the same sums at a time: where no key is hidden, each begins with another block. With
 * C::kOrdered they take turns, which two threads of the producer's warpgroup keep: turns.cuh.
 *
 * With dropout a thread finds which of its pairs are kept, 8 a call of the generator, before it waits for dK(n - 1). dP
 * is added to -delta over the factor of what is kept, which is put into dq, dk and dv at the end; where a pair is
 * dropped that -delta takes the place of the sum.
 *
 * Of the kind kLight (light.cuh) the steps of a tile are a list that a small kernel has left, and the producer says
 * with each stage which one it is. Where it holds queries that the mask hides from all keys, both warpgroups clear half
 * of these rows and meet at a named barrier before they multiply: the one ahead waits there for the one behind, which
 * waits for nothing of it up to that step. The kind kGeneral has a bias besides, in a ring of its own: bias.cuh.
 *
 * Why no waiter falls two phases behind (see sm90/forward/kernel.cuh): of full, kv_full and tile_full all warps wait;
 * the next phase of each ends after the same phase of empty, kv_empty or tile_empty, where each warp arrives for
 * itself, past its own wait. Of those only the producer's thread waits, or for tile_empty, over sequences, the thread
 * that tells tiles: the producer is then among those that wait for tile_full and arrive, once for `wanted` too, which
 * the teller waits for before it tells the next tile. Of ds_full all warps of both warpgroups wait,
 * and each warp arrives for itself: for the next phase of a barrier, two steps later, past its own wait for the phase
 * before.
 *
 * Why every wait ends: of two warpgroups at different steps the one behind waits for nothing that the other has
 * yet to do. For `full` of step n + 1 both wait with at most one stage held, that of n, hence two stages. The keys of
 * the next tile are asked for once all steps of this one are on their way.
 *
 * Why dT(n) may be written where dT(n - 2) was: this warp has waited for dT(n - 1) of all warps, and each of them
 * arrived there past its wait for its part of dQ(n - 2). The end of a tile changes nothing: the steps of the next go
 * on.
 *
 * Shared memory: keys and values [stage][slab][128][64], Q and dO [stage][slab][kTileQ][64], dT^T [2][slab of queries]
 * [128 keys][64], swizzled; dQ [warpgroup][warp]; row blocks [stage]. */
#pragma once
#include "sm90/fused_backward/consume.cuh"
#include "sm90/fused_backward/turns.cuh"
#include <climits>     // INT_MIN
#include <type_traits> // conditional_t

namespace fa::sm90 {

/* The producer's thread and its rings. */
template <class C> struct FusedProducer {
    using Smem = FusedSmem<C>;
    // In order, and over sequences, one register less decides.
    using Block = std::conditional_t<C::kOrdered || C::kSequences, uint32_t, int64_t>;

    const FusedParams &p;
    Smem &smem;
    RingState<C::kStages> ring{1};
    RingState<C::kKeyStages> kv_ring{1};
    RingState<kBiasStages> bias_ring{1};

    __device__ __forceinline__ FusedProducer(const FusedParams &p, Smem &smem) : p(p), smem(smem) {}

    struct Place {
        int kv_head, batch, key;
    };
    template <class Call> __device__ __forceinline__ Place place_of(const Call &call, const Tile &tile) const {
        const CallHead at = kv_head_of<C>(p.call, tile);
        return {at.head, C::kSequences ? 0 : at.batch, tile.row - call.key_begin};
    }
    template <class Call> __device__ __forceinline__ void prefetch_keys(const Call &call, const Tile &tile) const {
        const Place at = place_of(call, tile);
        tma_prefetch_tile<C::kHeadDim>(map_of<kMapOfTileK>(p, call), at.key, at.kv_head * p.k_step[0],
                                       at.batch * p.k_step[1]);
        tma_prefetch_tile<C::kHeadDim>(map_of<kMapOfTileV>(p, call), at.key, at.kv_head * p.v_step[0],
                                       at.batch * p.v_step[1]);
    }
    /* Keys and values of a tile that has steps. */
    template <class Call> __device__ __forceinline__ void load_keys(const Call &call, const Tile &tile) {
        const Place at = place_of(call, tile);
        uint64_t *full = &smem.kv_full[kv_ring.stage];
        mbarrier_wait(&smem.kv_empty[kv_ring.stage], kv_ring.parity);
        mbarrier_arrive_expect(full, 2 * Smem::kKeyBytes);
        tma_load_tile<C::kHeadDim, C::kTileK>(smem.k[kv_ring.stage], map_of<kMapOfTileK>(p, call), full, at.key,
                                              at.kv_head * p.k_step[0], at.batch * p.k_step[1], kEvictFirst);
        tma_load_tile<C::kHeadDim, C::kTileK>(smem.v[kv_ring.stage], map_of<kMapOfTileV>(p, call), full, at.key,
                                              at.kv_head * p.v_step[0], at.batch * p.v_step[1], kEvictFirst);
        kv_ring.advance();
    }
    /* Steps of a tile; before_step() is called ahead of the wait for room. */
    template <class Call, class BeforeStep>
    __device__ __forceinline__ void load_steps(const Call &call, const Tile &tile, BeforeStep &&before_step) {
        const Place at = place_of(call, tile);
        for (auto walk = steps_of<C>(p, call, tile); walk.more(p.call.group); walk.advance()) {
            const int head = at.kv_head * p.call.group + walk.member, row = walk.block * C::kTileQ - call.row_begin;
            const Block block = (Block(tile.head) * p.call.group + walk.member) * p.row_block_count +
                                first_row_block(call) + walk.block;
            uint64_t *full = &smem.full[ring.stage];
            before_step();
            mbarrier_wait(&smem.empty[ring.stage], ring.parity);
            if constexpr (C::kLight) smem.steps.at[ring.stage] = make_int2(walk.member, walk.block);
            mbarrier_arrive_expect(full, 2 * Smem::kQueryBytes + sizeof(RowBlockOf<C>));
            tma_load_tile<C::kHeadDim, C::kTileQ>(smem.q[ring.stage], map_of<kMapOfQ>(p, call), full, row,
                                                  head * p.q_step[0], at.batch * p.q_step[1], kEvictLast);
            bulk_load(&smem.rows[ring.stage], p.row_blocks + block * int64_t(sizeof(RowBlockOf<C>)),
                      sizeof(RowBlockOf<C>), full);
            tma_load_tile<C::kHeadDim, C::kTileQ>(smem.dout[ring.stage], map_of<kMapOfDout>(p, call), full,
                                                  row + p.call.dout_row, head * p.dout_step[0],
                                                  at.batch * p.dout_step[1], kEvictLast);
            ring.advance();
            if constexpr (C::kBias) load_bias(tile.row, walk.block * C::kTileQ, head, at.batch);
        }
    }
    /* Of a step. */
    __device__ __forceinline__ void load_bias(int key, int query, int head, int batch) {
        const auto &of = static_cast<const GeneralFusedParams &>(p);
#pragma unroll 1
        for (int n = 0; n < C::kTileQ / kBiasQueries; ++n, query += kBiasQueries) {
            uint64_t *const full = &smem.bias.full[bias_ring.stage];
            mbarrier_wait(&smem.bias.empty[bias_ring.stage], bias_ring.parity);
            smem.bias.at[bias_ring.stage] = make_int4(key, query, head, batch);
            mbarrier_arrive_expect(full, C::kConsumers * kBiasBoxBytes);
            for (int wg = 0; wg < C::kConsumers; ++wg)
                tma_load(smem.bias.box[bias_ring.stage][wg], &of.bias, full, key + wg * kBiasKeys, query,
                         head * of.bias_step[0], batch * of.bias_step[1], kEvictFirst);
            bias_ring.advance();
        }
    }
    /* Lets the thread that stores tiles know that there are no more. */
    __device__ __forceinline__ void end_bias() {
        mbarrier_wait(&smem.bias.empty[bias_ring.stage], bias_ring.parity);
        smem.bias.at[bias_ring.stage].x = INT_MIN;
        mbarrier_arrive(&smem.bias.full[bias_ring.stage]);
    }
};

/* Over sequences: tiles that another warp tells. */
template <class C, class Params>
__device__ __forceinline__ void fused_produce_told(const Params &p, FusedSmem<C> &smem) {
    constexpr int kWantedBefore = 2; // steps of a tile that are left when the next one is taken
    FusedProducer<C> producer(p, smem);
    produce_tiles<C, C::kTileK, true>(p, smem, [&](const SequenceCall &call, const Tile &tile, auto &&) {
        const FusedWalk walk = fused_walk<C>(p, call, tile.row);
        const int steps = (walk.end - walk.begin) * p.call.group;
        if (steps == 0) return mbarrier_arrive(&smem.calls.wanted);
        if (is_new_span(smem, tile)) acquire_keys_maps(call);
        if (C::kKeyStages == 1) producer.prefetch_keys(call, tile);
        producer.load_keys(call, tile);
        producer.load_steps(call, tile, [&, left = max(steps, kWantedBefore)]() mutable {
            if (left-- == kWantedBefore) mbarrier_arrive(&smem.calls.wanted);
        });
    });
}

template <class C> __device__ __forceinline__ void fused_produce(const FusedParams &p, FusedSmem<C> &smem) {
    FusedProducer<C> producer(p, smem);
    RingState<FusedSmem<C>::kTileStages> tile_ring(1);
    auto announce = [&](uint32_t index) {
        Tile tile = tile_at(p.schedule, index, 1);
        if constexpr (C::kOrdered) // the first is shortest
            tile.row *= C::kTileK;
        else if (tile.row >= 0)
            tile.row = (int(p.schedule.query_tiles) - 1 - tile.row) * C::kTileK; // the first is longest
        if constexpr (C::kLight)
            if (tile.row >= 0) tile.span = static_cast<const LightFusedParams &>(p).light.counts[light_tile(p, tile)];
        // Without queries that see a key the maps are empty.
        if (C::kKeyStages == 1 && tile.row >= 0 && p.call.row_begin < p.call.row_end)
            producer.prefetch_keys(p.call, tile);
        announce_tile(smem, tile_ring, tile);
        return tile;
    };
    auto load_keys = [&](const Tile &tile) {
        if (tile.row < 0) return;
        if constexpr (C::kLight) {
            if (tile.span > 0) producer.load_keys(p.call, tile);
            return;
        }
        const FusedWalk walk = fused_walk<C>(p, p.call, tile.row);
        if (walk.begin < walk.end) producer.load_keys(p.call, tile);
    };
    auto take = [&](uint32_t round) {
        if constexpr (C::kOrdered)
            return atomicAdd(p.schedule.counter, 1u);
        else
            return next_tile<C::kMasked>(p.schedule, round);
    };
    Tile tile = announce(take(0)), next;
    load_keys(tile);
    for (uint32_t round = 1; tile.row >= 0; ++round, tile = next) {
        producer.load_steps(p.call, tile, [] {});
        next = announce(take(round));
        load_keys(next);
    }
    if constexpr (C::kBias)
        if (static_cast<const GeneralFusedParams &>(p).stores_bias) producer.end_bias();
}

template <class C, class Params> __device__ __forceinline__ void fused_block(const Params &p) {
    FA_CHAOS_BEGIN();
    extern __shared__ __align__(1024) char raw[];
    auto &smem = *reinterpret_cast<FusedSmem<C> *>(raw);
    const int wg = __shfl_sync(0xffffffff, threadIdx.x / 128, 0); // uniform for the compiler too

    if (threadIdx.x == 0) {
        if constexpr (C::kSequences)
            mbarrier_init(&smem.calls.wanted, 1);
        else
            for (const CUtensorMap *map : {&p.q, &p.dout, &p.k, &p.v}) tensor_map_prefetch(map);
        for (int stage = 0; stage < C::kKeyStages; ++stage) {
            mbarrier_init(&smem.kv_full[stage], 1);
            mbarrier_init(&smem.kv_empty[stage], C::kConsumers * 4);
        }
        for (int buffer = 0; buffer < 2; ++buffer) mbarrier_init(&smem.ds_full[buffer], C::kConsumers * 4);
        for (int stage = 0; stage < FusedSmem<C>::kTileStages; ++stage) {
            mbarrier_init(&smem.tile_full[stage], 1);
            mbarrier_init(&smem.tile_empty[stage], C::kConsumers * 4 + C::kOrdered + C::kSequences);
        }
        for (int stage = 0; stage < C::kStages; ++stage) {
            mbarrier_init(&smem.full[stage], 1);
            mbarrier_init(&smem.empty[stage], C::kConsumers * 4);
        }
        if constexpr (C::kOrdered) {
            for (int step = 0; step < 2; ++step) {
                mbarrier_init(&smem.turns.open[step], 1);
                mbarrier_init(&smem.turns.done[step], C::kConsumers * 4);
                mbarrier_init(&smem.turns.seen[step], 1);
            }
        }
        if constexpr (C::kBias) init_bias_barriers<C>(smem.bias, p.stores_bias);
        mbarrier_init_fence();
        if constexpr (C::kDropout) smem.dropout.words = fa_dropout_read(&p.dropout);
    }
    __syncthreads();

    if (wg == 0) {
        registers_lower<C::kProducerRegisters>();
        const int warp = threadIdx.x / 32;
        if constexpr (C::kSequences)
            if (warp == 3 && elect_one()) tell_tiles<kTilesOfKeys, C::kTileK, kTakenInTurns>(p.list, smem);
        if constexpr (C::kOrdered) {
            if (warp == 1 && elect_one()) fused_open_steps<C>(p, smem);
            if (warp == 2 && elect_one()) fused_pass_turns<C>(p, smem);
        }
        if constexpr (C::kBias)
            if (warp == 3 && p.stores_bias && elect_one()) store_bias_tiles<C>(p, smem);
        if (warp > 0) return;
        if (!elect_one()) return;
        if constexpr (C::kSequences)
            fused_produce_told<C>(p, smem);
        else
            fused_produce<C>(p, smem);
    } else {
        registers_raise<C::kConsumerRegisters>();
        fused_consume<C>(p, smem, wg - 1);
    }
}

template <class C>
__global__ void __launch_bounds__(128 * (C::kConsumers + 1), 1) backward_fused(const __grid_constant__ FusedParams p) {
    fused_block<C>(p);
}
template <class C>
__global__ void __launch_bounds__(128 * (C::kConsumers + 1), 1)
    backward_fused_ordered(const __grid_constant__ OrderedFusedParams p) {
    fused_block<C>(p);
}
template <class C>
__global__ void __launch_bounds__(128 * (C::kConsumers + 1), 1)
    backward_fused_dropout(const __grid_constant__ DropoutFusedParams p) {
    fused_block<C>(p);
}
template <class C>
__global__ void __launch_bounds__(128 * (C::kConsumers + 1), 1)
    backward_fused_light(const __grid_constant__ LightFusedParams p) {
    fused_block<C>(p);
}
template <class C>
__global__ void __launch_bounds__(128 * (C::kConsumers + 1), 1)
    backward_fused_general(const __grid_constant__ GeneralFusedParams p) {
    fused_block<C>(p);
}
template <class C, class Params>
__global__ void __launch_bounds__(128 * (C::kConsumers + 1), 1)
    backward_fused_of_sequences(const __grid_constant__ OfSequences<Params> p) {
    fused_block<C>(p);
}

} // namespace fa::sm90
