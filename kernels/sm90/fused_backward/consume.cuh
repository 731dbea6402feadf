/* A consumer warpgroup of wgmma_fused_backward_sm90: see kernel.cuh. */
#pragma once
#include "common/ptx.cuh" // pack
#include "sm90/fused_backward/config.cuh"
#include "sm90/fused_backward/step.cuh"

namespace fa::sm90 {

/* A warpgroup's state for a tile of keys, 64 of which are its own. Accumulators are keys x queries. */
template <class C> struct FusedConsumer {
    using T = typename C::Element;
    using Smem = FusedSmem<C>;
    static constexpr int kTileQ = C::kTileQ, kSlabs = Smem::kSlabs, kGroups = kTileQ / 16;
    // Groups of 16 queries whose LSE is read before S is there; more, and registers are short.
    static constexpr int kAhead = C::kSoftcap || (C::kLight && kTileQ == 64) ? 1 : 4;
    static constexpr int kBefore = C::kSoftcap ? 1 : kGroups; // that are weighed before dP is waited for; else spills
    static constexpr bool kPublishesUnder = kTileQ == 64 && !C::kSoftcap; // S and dP; else registers are short
    static_assert(!C::kDropout || (C::kOrdered && C::kMasked && !C::kSoftcap));
    static_assert(kTileQ * kSlabs == 128 && C::kTileK == 128 && C::kConsumers == 2,
                  "a block's dQ is 64 x 64 for each warpgroup");

    const FusedParams &p;
    Smem &smem;
    const int wg, warp, lane;
    RingState<C::kStages> ring{0};
    RingState<C::kKeyStages> kv_ring{0};
    RingState<kBiasStages> bias_ring{0};
    uint32_t stored = 0; // steps whose dT is in shared memory
    uint32_t round = 0;  // of the tile
    int tile_key, stage;
    BlockRange whole;    // blocks of which nothing is hidden
    float *sums;         // this lane's of the first block
    int pending, before; // the row block of the last step, and of that whose dQ is with the warp
    bool staged;         // the latter, in shared memory, where sums have no order
    FusedWalk walk;
    float scores[kTileQ / 2], products[kTileQ / 2], dq[kDqCount], dk[C::kHeadDim / 2], dv[C::kHeadDim / 2];
    uint32_t weights[kTileQ / 4], words[kTileQ / 4]; // A operands, rounded: P, dT
    int pair;                                        // of the tile; with dropout
    uint32_t kept[C::kDropout ? kTileQ / 64 : 1];    // of this thread's pairs of a step
    VisiblePairs<kTileQ> visible;                    // of a step

    __device__ __forceinline__ FusedConsumer(const FusedParams &p, Smem &smem, int wg)
        : p(p), smem(smem), wg(wg), warp(threadIdx.x / 32 % 4), lane(threadIdx.x % 32) {}

    /* The query head of a step, and its block; the steps of a tile. */
    __device__ __forceinline__ int member() const {
        if constexpr (C::kLight)
            return smem.steps.at[stage].x;
        else
            return walk.member;
    }
    __device__ __forceinline__ int block() const {
        if constexpr (C::kLight)
            return smem.steps.at[stage].y;
        else
            return walk.block;
    }
    __device__ __forceinline__ int steps() const {
        if constexpr (C::kLight)
            return __shfl_sync(0xffffffff, tile().span, 0);
        else
            return (walk.end - walk.begin) * p.call.group;
    }
    __device__ __forceinline__ const auto &call() const { return call_of<C>(p, smem, round); }
    __device__ __forceinline__ int key() const { // of accumulators 0, 1, 4, 5, ...; the others' is 8 further on
        return fresh(tile_key) + wg * 64 + warp * 16 + lane / 4;
    }

    /* ---- products ---- */

    __device__ __forceinline__ void issue_scores() { // S^T of the ring's step
        gemm_qk<T, C::kHeadDim>(scores, fresh_address(smem.k[kv_ring.stage]) + wg * 64 * kSlabRowBytes,
                                Smem::kKeySlabBytes, fresh_address(smem.q[ring.stage]), Smem::kQuerySlabBytes);
        wgmma_commit();
    }
    __device__ __forceinline__ void issue_products() { // dP^T - delta
        gemm_onto<T, C::kHeadDim>(products, fresh_address(smem.v[kv_ring.stage]) + wg * 64 * kSlabRowBytes,
                                  Smem::kKeySlabBytes, fresh_address(smem.dout[ring.stage]), Smem::kQuerySlabBytes);
        wgmma_commit();
    }
    __device__ __forceinline__ void issue_dq() { // of the last step that this warp stored dT of, once all have
        const uint32_t step = stored - 1, slab = wg * Smem::kKeySlabBytes;
        mbarrier_wait(&smem.ds_full[step % 2], step / 2 % 2);
        tma_store_fence(); // all warps' dT before wgmma; this thread's reads of row blocks and its dQ before TMA
        wgmma_fence();
        gemm_dq<T, C::kTileK>(dq, fresh_address(smem.ds[step % 2]) + (kSlabs == 1 ? slab : 0),
                              fresh_address(smem.k[kv_ring.stage]) + (kSlabs == 1 ? 0 : slab));
        wgmma_commit();
    }
    template <bool IsFirst> __device__ __forceinline__ void issue_dv() {
        wgmma_fence();
        gemm_pv<T>(dv, weights, fresh_address(smem.dout[stage]), Smem::kQuerySlabBytes, !IsFirst);
        wgmma_commit();
    }
    template <bool IsFirst> __device__ __forceinline__ void issue_dk() {
        wgmma_fence();
        gemm_pv<T>(dk, words, fresh_address(smem.q[stage]), Smem::kQuerySlabBytes, !IsFirst);
        wgmma_commit();
    }

    /* ---- between them ---- */

    __device__ __forceinline__ float4 lse_of(int group) const {
        return *reinterpret_cast<const float4 *>(&smem.rows[stage].lse[group * 16 + lane % 4 * 4]);
    }
    __device__ __forceinline__ void load_deltas() { // with their sign changed, to where dP is added to them
#pragma unroll
        for (int c = 0; c < kTileQ / 8; ++c) {
            const float4 own = *reinterpret_cast<const float4 *>(&smem.rows[stage].minus_delta[c * 16 + lane % 4 * 4]);
            products[4 * c] = own.x, products[4 * c + 1] = own.y;
            products[4 * c + 2] = own.z, products[4 * c + 3] = own.w;
        }
    }
    /* P of the j-th 16 queries in place of the scores; with softcap what dP - delta is multiplied by, and P is rounded
     * here. */
    __device__ __forceinline__ void weigh(int j, const float4 (&first)[kAhead]) {
        const float4 own = j < kAhead ? first[j] : lse_of(j);
        const float lse[4] = {own.x, own.y, own.z, own.w};
#pragma unroll
        for (int i = 8 * j; i < 8 * j + 8; i += 2) {
            const float *query = lse + i % 8 / 4 * 2;
            if constexpr (C::kSoftcap) {
                float slope[2];
                const float low = capped_weight_of(scores[i], p.call.score, query[0], &slope[0]);
                const float high = capped_weight_of(scores[i + 1], p.call.score, query[1], &slope[1]);
                weights[i / 2] = pack<T>(low, high);
                scores[i] = low * slope[0], scores[i + 1] = high * slope[1];
            } else {
                scores[i] = weight_of(scores[i], p.call.score.scale_log2, query[0]);
                scores[i + 1] = weight_of(scores[i + 1], p.call.score.scale_log2, query[1]);
            }
        }
    }
    /* ---- of the kind kLight: light.cuh ---- */

    __device__ __forceinline__ const LightScore &light() const {
        return static_cast<const LightFusedParams &>(p).light;
    }
    __device__ __forceinline__ const GeneralFusedParams &general() const {
        return static_cast<const GeneralFusedParams &>(p);
    }
    /* Of the bias of the step that has been weighed. */
    __device__ __forceinline__ int first_bias_stage() const {
        const int stage = bias_ring.stage - kTileQ / kBiasQueries;
        return stage < 0 ? stage + kBiasStages : stage;
    }
    __device__ __forceinline__ const Tile &tile() const { // there, for lack of registers
        return smem.tile[fresh(round) % Smem::kTileStages];
    }
    /* Clears the rows of Q and dO of queries that the mask hides from all keys, each warpgroup half of them. */
    __device__ __forceinline__ void clear_unseeing() {
        const uint4 bits = *reinterpret_cast<const uint4 *>(smem.rows[stage].unseeing);
        if ((bits.x | bits.y | (kTileQ > 64 ? bits.z | bits.w : 0)) == 0) return;
#pragma unroll 1
        for (int n = fresh(threadIdx.x) - 128; n < kTileQ * 2 * kSlabs * 8; n += 128 * C::kConsumers) { // 16 bytes
            const int row = n / 8 % kTileQ, slab = n / 8 / kTileQ;
            if (!(smem.rows[stage].unseeing[row / 16] >> row % 16 & 1)) continue;
            char *const tile = slab < kSlabs ? smem.q[stage] : smem.dout[stage];
            const int place = slab % kSlabs * Smem::kQuerySlabBytes + row * kSlabRowBytes + n % 8 * 16;
            *reinterpret_cast<uint4 *>(tile + place) = make_uint4(0, 0, 0, 0);
        }
        tma_store_fence(); // before wgmma
        named_barrier_sync(1, 128 * C::kConsumers);
    }
    /* The mask's bits of a step. */
    __device__ __forceinline__ void load_visible() {
        const PairMap &map = light().map;
        if (!map.words) return visible.show_all();
        const CallHead at = kv_head_of<C>(p.call, tile());
        visible.load(map, map.plane(at.batch, at.head * p.call.group + member()),
                     (tile().row - light().map_key) / 16 + fresh(threadIdx.x) / 32 - 4, block(), lane);
    }
    /* From this lane's first key to the place of its first query. */
    __device__ __forceinline__ float first_distance() const {
        const int key = tile().row + wg * 64 + warp * 16 + lane / 4;
        return float(block() * kTileQ + light().diagonal + 2 * (lane % 4) - key);
    }
    /* weigh() of all queries with ALiBi. A distance serves both keys, the second one 8 queries further on, and |.|
     * costs nothing there. */
    __device__ __forceinline__ void weigh_sloped(const float4 (&first)[kAhead]) {
        const float slope = smem.rows[stage].slope, distance = first_distance();
#pragma unroll
        for (int j = 0; j < kGroups; ++j) {
            const float4 own = j < kAhead ? first[j] : lse_of(j);
            const float lse[4] = {own.x, own.y, own.z, own.w};
#pragma unroll
            for (int query = 0; query < 4; ++query) {
                const int column = 16 * j + query / 2 * 8 + query % 2;
                const float low = fmaf(slope, fabsf(distance + float(column)), lse[query]);
                const float high = fmaf(slope, fabsf(distance + float(column - 8)), lse[query]);
                float *const score = scores + 8 * j + query / 2 * 4 + query % 2;
                score[0] = weight_of(score[0], p.call.score.scale_log2, low);
                score[2] = weight_of(score[2], p.call.score.scale_log2, high);
            }
        }
    }
    __device__ __forceinline__ void weigh_light(const float4 (&first)[kAhead]) {
        if constexpr (C::kBias)
            return light().alibi ? weigh_biased<true>(*this, first) : weigh_biased<false>(*this, first);
        if (light().alibi) return weigh_sloped(first);
#pragma unroll
        for (int j = 0; j < kGroups; ++j) weigh(j, first);
    }
    __device__ __forceinline__ void hide_light() {
        if (!whole.holds(block())) {
            uint32_t of_keys[2];
            band_of(of_keys);
            visible.meet(of_keys);
        }
        if (!visible.all()) visible.hide(weights, words);
    }

    /* ---- of dropout ---- */

    /* Which pairs of a step dropout keeps. */
    __device__ __forceinline__ void keep(const FusedWalk &at) {
        const int batch = pair / p.call.heads_kv;
        const int head = (pair - batch * p.call.heads_kv) * p.call.group + at.member;
#pragma unroll
        for (int n = 0; n < kTileQ / 64; ++n)
            kept[n] =
                kept_pairs<false, 64>(smem.dropout.words, {key() + p.call.key_begin,
                                                           at.block * kTileQ + 64 * n + 2 * (lane % 4), batch, head});
    }
    __device__ __forceinline__ bool keeps(int i) const { return kept[i / 32] >> i % 32 & 1; }
    /* differentiate() with dropout. */
    __device__ __forceinline__ void differentiate_kept(int j) {
#pragma unroll
        for (int i = 4 * j; i < 4 * j + 4; ++i) {
            const int low = 2 * i, high = low + 1;
            const float2 own =
                *reinterpret_cast<const float2 *>(&smem.rows[stage].minus_delta[i / 2 * 16 + lane % 4 * 4]);
            weights[i] = pack<T>(keeps(low) ? scores[low] : 0.0f, keeps(high) ? scores[high] : 0.0f);
            words[i] = pack<T>(scores[low] * (keeps(low) ? products[low] : own.x),
                               scores[high] * (keeps(high) ? products[high] : own.y));
        }
    }
    /* Their dT = P (dP - delta), and P, rounded. P no earlier: its registers are those that dP leaves. */
    __device__ __forceinline__ void differentiate(int j) {
        if constexpr (C::kDropout) {
            differentiate_kept(j);
        } else {
#pragma unroll
            for (int i = 4 * j; i < 4 * j + 4; ++i) {
                if (!C::kSoftcap) weights[i] = pack<T>(scores[2 * i], scores[2 * i + 1]);
                words[i] = pack<T>(scores[2 * i] * products[2 * i], scores[2 * i + 1] * products[2 * i + 1]);
            }
        }
    }
    /* Which queries of a step see each of the two keys, by their ranges. */
    __device__ __forceinline__ void band_of(uint32_t (&of_keys)[2]) const {
        const ShiftedBand &band = call().visible;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int own = key() + 8 * r, first = own + 1 - block() * kTileQ; // column of the query after
            of_keys[r] = columns_between(first - band.upper, first - band.lower, 2 * (lane % 4));
            if (own < 0 || own >= band.seq_k) of_keys[r] = 0;
        }
    }
    /* 0 in place of what hidden pairs have, whatever it is: 0 times that may be NaN. */
    __device__ __forceinline__ void hide(uint32_t (&of)[kTileQ / 4]) const {
        uint32_t visible[2];
        band_of(visible);
#pragma unroll
        for (int i = 0; i < kTileQ / 2; i += 2)
            of[i / 2] &= (is_visible(visible, i) ? 0x0000ffffu : 0) | (is_visible(visible, i + 1) ? 0xffff0000u : 0);
    }
    __device__ __forceinline__ int own_lane() const { // again where registers are short
        if constexpr (C::kLight && C::kDropout)
            return fresh(int(threadIdx.x)) % 32;
        else
            return lane;
    }
    __device__ __forceinline__ void publish() { // dT, to all
        store_words(fresh_address(smem.ds[stored % 2]) + (wg * 64 + warp * 16) * kSlabRowBytes, Smem::kKeySlabBytes,
                    words, own_lane());
        warp_arrive(&smem.ds_full[stored % 2], lane);
        ++stored;
    }

    /* ---- dQ, on its way ---- */

    __device__ __forceinline__ float *sums_of(int block) const { return sums + int64_t(block) * kQueryElements; }
    __device__ __forceinline__ void take_dq() { // out of the accumulators
        wgmma_pin(dq);
        if constexpr (C::kOrdered) {
            take_dq_in_turn();
        } else {
            stage_part(smem.dq[wg][warp], dq, lane);
            staged = true;
        }
    }
    __device__ __forceinline__ void finish_dq(uint32_t block) { // dq of its sums
        const auto &ordered = static_cast<const OrderedFusedParams &>(p);
        if (!ordered.dq.data) return;
        const int launch_head = block / p.row_block_count, flat = p.call.first_pair * p.call.group + launch_head;
        const auto &of = call();
        const CallHead at = head_of<C>(flat, p.call.heads, smem.tile[round % Smem::kTileStages]);
        const int number = block - launch_head * p.row_block_count - first_row_block(of);
        const int inside = (kSlabs == 1 ? wg * 64 : 0) + warp * 16 + lane / 4, row = number * kTileQ + inside;
        float factor[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            factor[r] = row_sees(of, row + 8 * r) ? p.scale : 0.0f;
            if constexpr (C::kLight) {
                const auto &rows = reinterpret_cast<const RowBlockOf<C> *>(p.row_blocks)[block];
                const int thread = fresh(int(threadIdx.x)) - 128, part = thread / 32 % (kTileQ / 16);
                if (rows.unseeing[part] >> (thread % 32 / 4 + 8 * r) & 1) factor[r] = 0.0f;
            }
        }
        if constexpr (kSlabs == 1) {
            store_gradient<T>(ordered.dq, at.batch, at.head, first_query(of) + row, end_of_queries(of), dq, factor,
                              p.call.head_dim, lane);
        } else { // 64 columns of the same queries for each warpgroup
            const int column = wg * kColumnsOfPart;
            Gradient part = ordered.dq;
            part.data = static_cast<char *>(part.data) + column * part.stride[3] * (part.dtype == FA_F32 ? 4 : 2);
            if (column < p.call.head_dim)
                store_gradient<T>(part, at.batch, at.head, first_query(of) + row, end_of_queries(of), dq, factor,
                                  p.call.head_dim - column, lane);
        }
    }
    __device__ __forceinline__ void take_dq_in_turn() { // once the step has its turn
        const uint32_t step = stored - 1;
        mbarrier_wait(&smem.turns.open[step % 2], step / 2 % 2);
        const uint32_t block = smem.turns.block[step % 2];
        float *to = p.sums + int64_t(block / 4) * kQueryElements + (wg * 4 + warp) * kPartElements + lane * 4;
        if (block & kAddsLast) {
            if (!(block & kAddsFirst)) take_part(dq, to);
            finish_dq(block / 4);
        } else if (block & kAddsFirst) {
            store_part(to, dq);
        } else {
            add_part(to, dq);
        }
        warp_arrive(&smem.turns.done[step % 2], lane);
    }
    __device__ __forceinline__ void send_dq() { // what is staged, after a fence
        if constexpr (!C::kOrdered) {
            __syncwarp();
            if (staged && lane == 0) bulk_add(sums_of(before), smem.dq[wg][warp], kPartBytes);
        }
        before = pending;
    }

    /* ---- steps ---- */

    template <bool IsFirst> __device__ __forceinline__ void step() {
        mbarrier_wait(&smem.full[ring.stage], ring.parity);
        const int last = stage;
        stage = ring.stage;
        if constexpr (C::kLight) clear_unseeing();
        if constexpr (C::kDropout) {
            FusedWalk at = walk;
            if constexpr (C::kLight)
                at.member = member(), at.block = block();
            else if (!IsFirst)
                at.advance();
            keep(at);
        }
        if constexpr (!IsFirst && !kPublishesUnder) {
            wgmma_wait<0>();
            wgmma_pin(words);
            publish();
            warp_arrive(&smem.empty[last], lane);
            if constexpr (!C::kLight) walk.advance();
        }
        load_deltas();
        float4 first[kAhead];
#pragma unroll
        for (int j = 0; j < kAhead; ++j) first[j] = lse_of(j);
        wgmma_fence();
        issue_scores();
        issue_products();
        if constexpr (!IsFirst && kPublishesUnder) {
            publish();
            if constexpr (!C::kLight) walk.advance();
            wgmma_wait<2>();
            wgmma_pin(words);
            warp_arrive(&smem.empty[last], lane);
        }
        if constexpr (C::kLight) load_visible();
        wgmma_wait<1>();
        wgmma_pin(scores);
        if constexpr (C::kLight) {
            weigh_light(first);
        } else {
#pragma unroll
            for (int j = 0; j < kBefore; ++j) weigh(j, first);
        }
        if (!C::kSoftcap) wgmma_pin(scores); // else most exponentials would be put behind the wait for dP
        wgmma_wait<0>();
        wgmma_pin(products);
#pragma unroll
        for (int j = 0; j < kBefore; ++j) differentiate(j);
#pragma unroll
        for (int j = kBefore; j < kGroups; ++j) weigh(j, first);
#pragma unroll
        for (int j = kBefore; j < kGroups; ++j) differentiate(j);
        if constexpr (C::kLight) {
            hide_light();
        } else if (!whole.holds(block())) {
            hide(weights);
            hide(words);
        }
        if constexpr (C::kBias) leave_bias(*this);
        issue_dv<IsFirst>();
        if constexpr (IsFirst) {
            tma_store_fence(); // of the reads of the row block
        } else {
            issue_dq();
            send_dq();
        }
        if constexpr (C::kBias) pass_bias(*this);
        pending = member() * p.row_block_count + block();
        issue_dk<IsFirst>();
        ring.advance();
        wgmma_wait<1>();
        wgmma_pin(weights);
        if constexpr (!IsFirst) take_dq();
    }

    /* dk and dv of a tile that has steps. */
    __device__ __forceinline__ void run(int tile_head) {
        if constexpr (C::kDropout) pair = p.call.first_pair + tile_head;
        const int64_t first_head = int64_t(tile_head) * p.call.group;
        sums = p.sums + (first_head * p.row_block_count + first_row_block(call())) * kQueryElements +
               (wg * 4 + warp) * kPartElements + lane * 4;
        whole = whole_blocks<C>(uniform<C>(call().visible), tile_key + wg * 64);
        staged = false;
        mbarrier_wait(&smem.kv_full[kv_ring.stage], kv_ring.parity);
        step<true>();
        for (int left = steps(); --left;) step<false>();
        publish();
        issue_dq();
        send_dq();
        wgmma_wait<0>();
        wgmma_pin(words);
        take_dq();
        if constexpr (!C::kOrdered) {
            tma_store_fence();
            send_dq();
        }
        warp_arrive(&smem.empty[stage], lane);
        warp_arrive(&smem.kv_empty[kv_ring.stage], lane);
        kv_ring.advance();
        wgmma_pin(dk);
        wgmma_pin(dv);
    }

    __device__ __forceinline__ void store(const Tile &tile, bool seen) {
        const CallHead at = kv_head_of<C>(p.call, tile);
        const auto &of = call();
        const int key = this->key(), row = first_key(of) + key + of.key_begin;
        float k_factor[2], v_factor[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const bool visible = seen && key + 8 * r >= 0 && key + 8 * r < of.visible.seq_k;
            k_factor[r] = visible ? p.scale : 0.0f;
            v_factor[r] = visible ? 1.0f : 0.0f;
            if constexpr (C::kDropout) v_factor[r] *= static_cast<const DropoutFusedParams &>(p).kept;
        }
        if (p.dk.data)
            store_gradient<T>(p.dk, at.batch, at.head, row, end_of_keys(of), dk, k_factor, p.call.head_dim, lane);
        if (p.dv.data)
            store_gradient<T>(p.dv, at.batch, at.head, row, end_of_keys(of), dv, v_factor, p.call.head_dim, lane);
    }
};

template <class C> __device__ __forceinline__ void fused_consume(const FusedParams &p, FusedSmem<C> &smem, int wg) {
    FusedConsumer<C> consumer(p, smem, wg);
    int tile_row;
    for (uint32_t &round = consumer.round; (tile_row = tile_row_of(smem, round)) >= 0; ++round) {
        const int slot = round % FusedSmem<C>::kTileStages;
        consumer.tile_key = uniform<C>(tile_row - consumer.call().key_begin);
        bool seen;
        if constexpr (C::kLight) {
            seen = consumer.steps() > 0;
        } else {
            consumer.walk = uniform_walk<C>(fused_walk<C>(p, consumer.call(), tile_row));
            seen = consumer.walk.begin < consumer.walk.end;
        }
        if (seen) consumer.run(__shfl_sync(0xffffffff, smem.tile[slot].head, 0));
        const Tile tile = smem.tile[slot];
        if constexpr (!C::kSequences) warp_arrive(&smem.tile_empty[slot], consumer.lane);
        consumer.store(tile, seen);
        if constexpr (C::kSequences) warp_arrive(&smem.tile_empty[round % FusedSmem<C>::kTileStages], consumer.lane);
    }
    if (!C::kOrdered && consumer.lane == 0) tma_store_wait(); // the last addition reads this block's shared memory
}

} // namespace fa::sm90
