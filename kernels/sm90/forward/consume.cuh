/* The Hopper forward kernel: what a consumer warpgroup computes. */
#pragma once
#include "sm90/common/epilogue.cuh"
#include "sm90/common/wgmma.cuh"
#include "sm90/forward/params.cuh"
#include <type_traits> // bool_constant

namespace fa::sm90 {

template <class C>
__device__ __forceinline__ void forward_consume(const ForwardParams &p, ForwardSmem<C> &smem, int wg) {
    using T = typename C::Element;
    using Smem = ForwardSmem<C>;
    constexpr int kTileN = C::kTileN;
    constexpr uint32_t kTurnThreads = 256; // the warpgroup whose turn it is, and the one before, which arrives
    static_assert(!C::kDropout || (C::kMasked && kTileN % 64 == 0 && !C::kHalfBlocks && !C::kSoftcap));
    const int lane = threadIdx.x % 32, warp = (threadIdx.x / 32) % 4;
    const bool elected = threadIdx.x % 128 == 0; // one thread a warpgroup frees stages, once its warps are joined
    RingState<C::kStages> k_ring(0), v_ring(0);
    RingState<C::kQueryStages> q_ring(0);

    auto turn_wait = [&] {
        if constexpr (C::kTurns) named_barrier_sync(1 + wg, kTurnThreads);
    };
    auto join_warps = [&] { named_barrier_sync(1 + C::kConsumers + wg, 128); };
    auto turn_pass = [&] {
        if constexpr (C::kTurns) named_barrier_arrive(1 + (wg + 1 == C::kConsumers ? 0 : wg + 1), kTurnThreads);
    };
    if (C::kTurns && wg == C::kConsumers - 1) turn_pass();

    int tile_row;
    for (uint32_t round = 0; (tile_row = tile_row_of(smem, round)) >= 0; ++round) {
        const KeyBlocks blocks = forward_blocks<C>(p, tile_row);
        const int wg_row = tile_row + wg * 64, row = wg_row + warp * 16 + lane / 4; // this thread's rows: row, row + 8
        OnlineSoftmax softmax;
        float out[C::kHeadDim / 2];

        if (blocks.count > 0) {
            float scores[kTileN / 2];
            uint32_t weights[kTileN / 4];
            // The warpgroup skips blocks past the last key that one of its rows sees: it begins with `first`.
            int seen_end = 0, first = 0;
            if constexpr (C::kMasked) {
                if (wg_row < p.seq_q) seen_end = min(p.visible.seq_k, min(wg_row + 64, p.seq_q) - 1 + p.visible.upper);
                if (blocks.end > seen_end) first = min(blocks.count, (blocks.end - seen_end) / kTileN);
            }

            auto issue_qk = [&] {
                gemm_qk<T, C::kHeadDim>(scores, shared_address(smem.q[q_ring.stage][wg]), Smem::kQuerySlabBytes,
                                        shared_address(smem.k[k_ring.stage]), Smem::kKeySlabBytes);
                wgmma_commit();
            };
            auto issue_pv = [&](auto &weights, int accumulate) {
                gemm_pv<T>(out, weights, shared_address(smem.v[v_ring.stage]), Smem::kKeySlabBytes, accumulate);
                wgmma_commit();
            };
            auto free_keys = [&](bool last) {
                if (elected) mbarrier_arrive(&smem.k_empty[k_ring.stage]);
                if (elected && last) mbarrier_arrive(&smem.q_empty[q_ring.stage][wg]);
                k_ring.advance();
            };
            auto free_values = [&] {
                if (elected) mbarrier_arrive(&smem.v_empty[v_ring.stage]);
                v_ring.advance();
            };
            auto skip_values = [&] {
                mbarrier_wait(&smem.v_full[v_ring.stage], v_ring.parity);
                join_warps();
                free_values();
            };
            auto cap = [&](auto &scores) {
                if constexpr (C::kSoftcap)
                    for (float &score : scores) score = tanh_fast(score * p.cap_factor);
            };
            auto mask = [&](auto &scores, int block) {
                const int first_key = blocks.end - (block + 1) * kTileN;
                int low[2], high[2];
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    low[r] = (C::kMasked ? begin_of(p.visible, row + 8 * r) : 0) - first_key;
                    high[r] = (C::kMasked ? end_of(p.visible, row + 8 * r) : p.visible.seq_k) - first_key;
                }
                mask_scores(scores, low, high, 2 * (lane % 4));
            };
            /* Which of a block's weights dropout keeps, while its scores are on their way. */
            uint32_t kept[C::kDropout ? kTileN / 8 : 1];
            auto keep = [&](int block) {
                if constexpr (C::kDropout) {
                    const Tile &tile = smem.tile[round % Smem::kTileStages];
                    const int key = blocks.end - (block + 1) * kTileN + dropout_of(p).key_begin + 2 * (lane % 4);
                    kept_flags<kTileN>(kept, smem.dropout.words, {row, key, tile.batch, tile.head});
                }
            };
            bool near = true; // with softcap, until a product of this tile lay beyond the polynomial's limit
            /* One block: `old` holds the weights of the block before, `fresh` gets this block's. */
            auto step = [&]<bool kMaskBlock>(int block, auto &old, auto &fresh, std::bool_constant<kMaskBlock>) {
                constexpr bool kPolynomial = C::kCapTerms > 0 && !kMaskBlock;
                auto wait_out = [&] {
                    wgmma_wait<0>();
                    wgmma_pin(out);
                    wgmma_pin(old);
                    free_values();
                };
                mbarrier_wait(&smem.k_full[k_ring.stage], k_ring.parity);
                turn_wait();
                wgmma_fence();
                issue_qk();
                mbarrier_wait(&smem.v_full[v_ring.stage], v_ring.parity);
                wgmma_fence();
                issue_pv(old, block > first + 1);
                if constexpr (!C::kLateTurns) turn_pass();
                keep(block);
                wgmma_wait<1>();
                wgmma_pin(scores);
                if constexpr (C::kLateTurns) turn_pass();
                free_keys(block + 1 == blocks.count);
                if constexpr (!kPolynomial) cap(scores);
                if constexpr (kMaskBlock) mask(scores, block);
                if constexpr (!C::kOverlap) wait_out();
                bool done = false;
                if constexpr (kPolynomial) {
                    if (near)
                        done = softmax.try_absorb_near<T, C::kCapTerms>(fresh, scores, p.score_factor, p.cap_polynomial,
                                                                        near);
                    if (!done) cap(scores);
                }
                if (!done && !softmax.try_absorb<T>(fresh, scores, p.score_factor)) {
                    softmax.absorb<false, T>(scores, p.score_factor);
                    pack_scores<T>(fresh, scores);
                    if constexpr (C::kOverlap) {
                        wgmma_wait<0>();
                        wgmma_pin(out);
                    }
                    softmax.rescale_output(out);
                }
                if constexpr (C::kDropout) drop(fresh, kept);
                if constexpr (C::kOverlap) wait_out();
            };
            /* Blocks [block, end). With overlap the weights go to and fro between two sets of registers. */
            auto steps = [&](int block, int end, auto mask_block) {
                if constexpr (C::kOverlap) {
                    uint32_t spare[kTileN / 4];
                    for (; block + 1 < end; block += 2) {
                        step(block, weights, spare, mask_block);
                        step(block + 1, spare, weights, mask_block);
                    }
                    if (block < end) {
                        step(block, weights, spare, mask_block);
#pragma unroll
                        for (int i = 0; i < kTileN / 4; ++i) weights[i] = spare[i];
                        ++block;
                    }
                } else {
                    for (; block < end; ++block) step(block, weights, weights, mask_block);
                }
                return block;
            };

            /* Weights of the first block; with `half`, this warpgroup sees none of its later keys. */
            auto begin = [&]<bool kHalf>(std::bool_constant<kHalf>) {
                constexpr int kColumns = kHalf ? kTileN / 2 : kTileN;
                auto &part = reinterpret_cast<float(&)[kColumns / 2]>(scores);
                auto &part_weights = reinterpret_cast<uint32_t(&)[kColumns / 4]>(weights);
                wgmma_fence();
                gemm_qk<T, C::kHeadDim>(part, shared_address(smem.q[q_ring.stage][wg]), Smem::kQuerySlabBytes,
                                        shared_address(smem.k[k_ring.stage]), Smem::kKeySlabBytes);
                wgmma_commit();
                keep(first);
                wgmma_wait<0>();
                wgmma_pin(part);
                free_keys(first + 1 == blocks.count);
                cap(part);
                if (C::kMasked || blocks.end > p.visible.seq_k) mask(part, first);
                softmax.absorb<true, T>(part, p.score_factor);
                pack_scores<T>(part_weights, part);
#pragma unroll
                for (int i = kColumns / 4; i < kTileN / 4; ++i) weights[i] = 0;
                if constexpr (C::kDropout) drop(weights, kept);
            };

            mbarrier_wait(&smem.q_full[q_ring.stage][wg], q_ring.parity);
            for (int block = 0; block < first; ++block) { // the others' blocks, in turn
                mbarrier_wait(&smem.k_full[k_ring.stage], k_ring.parity);
                if (block > 0) {
                    turn_wait();
                    turn_pass();
                }
                join_warps();
                free_keys(block + 1 == blocks.count);
                if (block > 0) skip_values(); // no later: the producer loads them before more keys
            }
            if (first < blocks.count) {
                mbarrier_wait(&smem.k_full[k_ring.stage], k_ring.parity);
                if (first > 0) {
                    turn_wait();
                    turn_pass();
                }
                if constexpr (C::kHalfBlocks) {
                    if (seen_end - (blocks.end - (first + 1) * kTileN) <= kTileN / 2)
                        begin(std::true_type());
                    else
                        begin(std::false_type());
                } else {
                    begin(std::false_type());
                }
            }
            if (first > 0) skip_values();
            if (first < blocks.count) {
                int block = first + 1;
                if constexpr (C::kMasked) {
                    // Blocks that reach past the last key of this warpgroup's first row, then plain ones, then those
                    // that begin before the first key of its last row.
                    const int high = end_of(p.visible, wg_row), low = begin_of(p.visible, wg_row + 63);
                    const int plain = (blocks.end - high + kTileN - 1) / kTileN;
                    const int plain_end = blocks.end > low ? (blocks.end - low) / kTileN : 0;
                    block = steps(block, min(plain, blocks.count), std::true_type());
                    block = steps(block, min(plain_end, blocks.count), std::false_type());
                    steps(block, blocks.count, std::true_type());
                } else {
                    steps(block, blocks.count, std::false_type());
                }
                mbarrier_wait(&smem.v_full[v_ring.stage], v_ring.parity);
                wgmma_fence();
                issue_pv(weights, blocks.count - first > 1);
                wgmma_wait<0>();
                wgmma_pin(out);
                wgmma_pin(weights);
                free_values();
            }
            q_ring.advance();
        } // without keys every factor below is 0, and so is what is written

        const Tile tile = smem.tile[round % Smem::kTileStages];
        __syncwarp();
        if (lane == 0) mbarrier_arrive(&smem.tile_empty[round % Smem::kTileStages]);
        float factor[2], lse[2];
        float sink = -INFINITY;
        if (p.sinks) sink = load_as_float(p.sinks, p.sinks_dtype, tile.head * p.sinks_stride);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const RowResult result =
                softmax.finish(r, p.score_factor, sink, softmax.highest_rounding<T>(r, p.score_factor));
            factor[r] = result.factor;
            if constexpr (C::kDropout) factor[r] *= dropout_of(p).kept;
            lse[r] = result.lse;
        }
        if constexpr (C::kStaged) {
            if (__any_sync(0xffffffff, factor[0] == 0.0f || factor[1] == 0.0f)) clear_rows(out, factor);
            auto &staged = smem.out[wg][warp];
            if (lane == 0) tma_store_wait_read();
            __syncwarp();
            stage_rows<T>(staged, out, factor, lane);
            tma_store_fence();
            __syncwarp();
            if (lane == 0) {
                for (int slab = 0; slab < Smem::kSlabs; ++slab)
                    tma_store(&p.out_map, &staged[slab * 16 * kSlabRowBytes], slab * kSlabColumns, wg_row + warp * 16,
                              tile.head, tile.batch);
                tma_store_commit();
            }
        } else {
            T *target[2];
#pragma unroll
            for (int r = 0; r < 2; ++r)
                target[r] = row + 8 * r < p.seq_q ? static_cast<T *>(p.out) + tile.batch * p.out_stride[0] +
                                                        tile.head * p.out_stride[1] + (row + 8 * r) * p.out_stride[2]
                                                  : nullptr;
            store_rows(target, out, factor, p.head_dim, lane);
        }
        // Last: before `out` it takes registers that the products of masked bfloat16 at head_dim 64 have not to spare.
#pragma unroll
        for (int r = 0; r < 2; ++r)
            if (const int i = row + 8 * r; p.lse && i < p.seq_q && lane % 4 == 0)
                p.lse[tile.batch * p.lse_stride[0] + tile.head * p.lse_stride[1] + i * p.lse_stride[2]] = lse[r];
    }
    if (C::kStaged && lane == 0) tma_store_wait();
}

} // namespace fa::sm90
