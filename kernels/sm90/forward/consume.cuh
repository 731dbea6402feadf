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

    const auto state_factor = [&] { return C::kLight ? 1.0f : p.score_factor; }; // of the running maximum to base 2
    int tile_row;
    for (uint32_t round = 0; (tile_row = tile_row_of(smem, round)) >= 0; ++round) {
        const KeyBlocks blocks = forward_blocks<C>(p, tile_row);
        const int wg_row = tile_row + wg * 64, row = wg_row + warp * 16 + lane / 4; // this thread's rows: row, row + 8
        OnlineSoftmax softmax;
        float out[C::kHeadDim / 2];
        [[maybe_unused]] LightRows light;
        if constexpr (C::kLight) {
            const Tile &tile = smem.tile[round % Smem::kTileStages];
            light.begin(light_of(p), tile.batch, tile.head, row, lane);
        }

        if (blocks.count > 0) {
            float scores[kTileN / 2];
            uint32_t weights[kTileN / 4];
            // The warpgroup skips blocks past the last key that one of its rows sees: it begins with `first`.
            int seen_end = 0, first = 0;
            if constexpr (C::kMasked && !C::kLight) {
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
            BlockWord told = {}; // of the block in the ring's stage, in the light kind
            auto wait_keys = [&] {
                mbarrier_wait(&smem.k_full[k_ring.stage], k_ring.parity);
                if constexpr (C::kLight) // uniform for the compiler too
                    told.word = __shfl_sync(0xffffffff, smem.blocks.of[k_ring.stage].word, 0);
            };
            auto is_last = [&](int block) { return C::kLight ? told.last() : block + 1 == blocks.count; };
            auto free_keys = [&](bool last) {
                if constexpr (C::kLight) __syncwarp(); // each warp for itself: all lanes have read the block's word
                if (C::kLight ? lane == 0 : elected) mbarrier_arrive(&smem.k_empty[k_ring.stage]);
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
            auto band = [&](int first_key, int(&low)[2], int(&high)[2]) {
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    low[r] = (C::kMasked ? begin_of(p.visible, row + 8 * r) : 0) - first_key;
                    high[r] = (C::kMasked ? end_of(p.visible, row + 8 * r) : p.visible.seq_k) - first_key;
                }
            };
            uint32_t visible[2]; // pairs of the block, a word a row, in the light kind
            auto see = [&] {
                if constexpr (C::kLight) {
                    int low[2], high[2];
                    const int first_key = told.first_key();
                    band(first_key, low, high);
#pragma unroll
                    for (int r = 0; r < 2; ++r) visible[r] = columns_between(low[r], high[r], 2 * (lane % 4));
                    const LightParams &options = light_of(p);
                    if (options.map.words) light.mask<kTileN>(visible, options.map, first_key, lane);
                    if (options.intervals.begins)
                        LightRows::hold(visible, options, smem.tile[round % Smem::kTileStages], row, p.seq_q, first_key,
                                        lane);
                }
            };
            auto mask = [&](auto &scores, int block) {
                if constexpr (C::kLight) {
#pragma unroll
                    for (int r = 0; r < 2; ++r) hide_scores(scores, r, visible[r]);
                } else {
                    int low[2], high[2];
                    band(blocks.end - (block + 1) * kTileN, low, high);
                    mask_scores(scores, low, high, 2 * (lane % 4));
                }
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
            [[maybe_unused]] std::conditional_t<C::kBias, BiasBlock<T, kTileN>, Tile> bias;
            auto load_bias = [&] {
                if constexpr (C::kBias)
                    bias.load(light_of(p).bias, smem.tile[round % Smem::kTileStages], row, p.seq_q, told.first_key(),
                              p.visible.seq_k, lane);
            };
            /* Products to scores in base 2, where the fast path does not take them. */
            auto transform = [&](auto &scores) {
                if constexpr (C::kLight) {
                    for (float &score : scores) score = round_score(score, p.score_factor);
                    if (light_of(p).alibi.data) light.slope_down(scores, told.first_key());
                }
                if constexpr (C::kBias)
#pragma unroll
                    for (int i = 0; i < kTileN / 2; ++i) scores[i] = add_bias(scores[i], bias.of(i));
            };
            auto try_absorb = [&]<bool kMaskBlock>(auto &fresh, std::bool_constant<kMaskBlock>) {
                if constexpr (C::kLight) {
                    // A score's exponent from what all of it but product and bias come to.
                    const auto exponent = [&](int i, float rest) {
                        if constexpr (C::kBias) rest = add_bias(rest, bias.of(i));
                        const float whole = fmaf(scores[i], p.score_factor, rest);
                        return kMaskBlock && !(visible[(i >> 1) & 1] >> (i / 4 * 2 + i % 2) & 1) ? -INFINITY : whole;
                    };
                    if (!light_of(p).alibi.data)
                        return softmax.try_absorb_by<T>(
                            fresh, [&](int i) { return exponent(i, -softmax.maximum[(i >> 1) & 1]); });
                    const int first_key = told.first_key();
                    if (LightRows::straddles(light_of(p), first_key, kTileN, wg_row)) return false;
                    const float along = light.along(light_of(p), first_key, wg_row);
                    const float start[2] = {light.start(along, first_key, 0, softmax.maximum[0]),
                                            light.start(along, first_key, 1, softmax.maximum[1])};
                    return softmax.try_absorb_by<T>(
                        fresh, [&](int i) { return exponent(i, fmaf(along, score_column(i), start[(i >> 1) & 1])); });
                } else {
                    return softmax.try_absorb<T>(fresh, scores, p.score_factor);
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
                if constexpr (!C::kLight) wait_keys();
                load_bias();
                turn_wait();
                wgmma_fence();
                issue_qk();
                mbarrier_wait(&smem.v_full[v_ring.stage], v_ring.parity);
                wgmma_fence();
                issue_pv(old, block > first + 1);
                if constexpr (!C::kLateTurns) turn_pass();
                keep(block);
                if constexpr (kMaskBlock) see();
                wgmma_wait<1>();
                wgmma_pin(scores);
                if constexpr (C::kLateTurns) turn_pass();
                free_keys(is_last(block));
                if constexpr (!kPolynomial) cap(scores);
                if constexpr (kMaskBlock && !C::kLight) mask(scores, block);
                if constexpr (!C::kOverlap) wait_out();
                bool done = false;
                if constexpr (kPolynomial) {
                    if (near)
                        done = softmax.try_absorb_near<T, C::kCapTerms>(fresh, scores, p.score_factor, p.cap_polynomial,
                                                                        near);
                    if (!done) cap(scores);
                }
                if constexpr (C::kBias) bias.order(lane);
                if (!done && !try_absorb(fresh, std::bool_constant<kMaskBlock>())) {
                    if constexpr (C::kLight) {
                        transform(scores);
                        if constexpr (kMaskBlock) mask(scores, block);
                    }
                    softmax.absorb<false, T>(scores, state_factor());
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
            /* The same where the word of the block, which is there, says whether the warpgroup sees all its pairs. */
            auto step_told = [&](int block, auto &old, auto &fresh) {
                if (told.mixed(wg))
                    step(block, old, fresh, std::true_type());
                else
                    step(block, old, fresh, std::false_type());
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

            /* From `block` to the last that the producer tells of. Returns how many blocks there are. */
            auto steps_told = [&](int block) {
                [[maybe_unused]] uint32_t spare[kTileN / 4];
                while (!told.last()) {
                    wait_keys();
                    if constexpr (!C::kOverlap) {
                        step_told(block++, weights, weights);
                    } else {
                        step_told(block++, weights, spare);
                        if (told.last()) {
#pragma unroll
                            for (int i = 0; i < kTileN / 4; ++i) weights[i] = spare[i];
                            break;
                        }
                        wait_keys();
                        step_told(block++, spare, weights);
                    }
                }
                return block;
            };

            /* Weights of the first block; with `half`, this warpgroup sees none of its later keys. */
            auto begin = [&]<bool kHalf>(std::bool_constant<kHalf>) {
                constexpr int kColumns = kHalf ? kTileN / 2 : kTileN;
                auto &part = reinterpret_cast<float(&)[kColumns / 2]>(scores);
                auto &part_weights = reinterpret_cast<uint32_t(&)[kColumns / 4]>(weights);
                load_bias();
                wgmma_fence();
                gemm_qk<T, C::kHeadDim>(part, shared_address(smem.q[q_ring.stage][wg]), Smem::kQuerySlabBytes,
                                        shared_address(smem.k[k_ring.stage]), Smem::kKeySlabBytes);
                wgmma_commit();
                keep(first);
                see();
                wgmma_wait<0>();
                wgmma_pin(part);
                free_keys(is_last(first));
                cap(part);
                if constexpr (C::kBias) bias.order(lane);
                transform(part);
                if (C::kMasked || blocks.end > p.visible.seq_k) mask(part, first);
                softmax.absorb<true, T>(part, state_factor());
                pack_scores<T>(part_weights, part);
#pragma unroll
                for (int i = kColumns / 4; i < kTileN / 4; ++i) weights[i] = 0;
                if constexpr (C::kDropout) drop(weights, kept);
            };

            mbarrier_wait(&smem.q_full[q_ring.stage][wg], q_ring.parity);
            auto take_turn = [&](int block) {
                if (block > 0) {
                    turn_wait();
                    turn_pass();
                }
            };
            auto skip = [&](int block) { // another's
                take_turn(block);
                join_warps();
                free_keys(is_last(block));
                if (block > 0) skip_values(); // no later: the producer loads them before more keys
            };
            if constexpr (C::kLight)
                for (wait_keys(); !told.sees(wg); wait_keys()) {
                    skip(first++);
                    if (told.last()) break;
                }
            else
                for (int block = 0; block < first; ++block) {
                    wait_keys();
                    skip(block);
                }
            const auto sees = [&] { return C::kLight ? told.sees(wg) : first < blocks.count; };
            if (sees()) {
                if constexpr (!C::kLight) wait_keys();
                take_turn(first);
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
            if (sees()) {
                int block = first + 1;
                if constexpr (C::kLight) {
                    block = steps_told(block);
                } else if constexpr (C::kMasked) {
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
                issue_pv(weights, (C::kLight ? block : blocks.count) - first > 1);
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
                softmax.finish(r, state_factor(), sink, softmax.highest_rounding<T>(r, state_factor()));
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
