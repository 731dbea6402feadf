/* prefill_sm90: what a warpgroup does with its 64 rows of a tile.
 *
 * The products, turns and weights are those of wgmma_sm90 (sm90/forward.cuh, which says why), in the same order. What
 * differs: a row is a query, or a query and a head; which keys it sees is looked up in shared memory, where masks are
 * needed at all; and rows that do not exist hold zeros for queries, so that no bit of the others depends on what lies
 * beside a sequence. */
#pragma once
#include "sm90/epilogue.cuh"
#include "sm90/wgmma.cuh"
#include "trial/prefill_config.cuh"

namespace fa::sm90::prefill {

/* Row `row` of a warpgroup's 64: which query of the sequence, and which head. */
struct RowPlace {
    int query, head;
};
__device__ __forceinline__ RowPlace row_place(const Call &call, const Tile &tile, int wg, int row) {
    if (!tile.packed) return {tile.query + wg * 64 + row, tile.head};
    const int query = row / call.group;
    return {tile.query + wg * call.group_queries + query, tile.head + row - query * call.group};
}

/* Excludes keys without a page. `hidden` has a bit for each column of the block. */
template <int Count>
__device__ __forceinline__ void hide_scores(float (&scores)[Count], const uint32_t *hidden, int lane_column) {
#pragma unroll
    for (int i = 0; i < Count; i += 4) {
        const uint32_t bits = hidden[i / 16] >> (i / 4 % 4 * 8 + lane_column);
        if (bits & 1) scores[i] = scores[i + 2] = -INFINITY;
        if (bits & 2) scores[i + 1] = scores[i + 3] = -INFINITY;
    }
}

/* Rows from `rows` on become zeros, and all of them what `queries` says. The warpgroup calls it; the join comes after.
 */
template <class C> __device__ __forceinline__ void prepare_queries(char *q, int rows, Queries queries) {
    if (queries == Queries::kZero) rows = 0;
#pragma unroll 1
    for (int n = threadIdx.x % 128; n < Smem<C>::kSlabs * 64 * 8; n += 128) {
        uint4 *at = reinterpret_cast<uint4 *>(q + n / 512 * Smem<C>::kQuerySlabBytes + n % 512 * 16);
        constexpr uint32_t kSigns = 0x80008000u;
        if (n % 512 / 8 >= rows) {
            *at = make_uint4(0, 0, 0, 0);
        } else if (queries == Queries::kNegated) {
            const uint4 x = *at;
            *at = make_uint4(x.x ^ kSigns, x.y ^ kSigns, x.z ^ kSigns, x.w ^ kSigns);
        }
    }
    tma_store_fence(); // the products read what was written here
}

/* Keys that this warp's rows see, to shared memory. */
__device__ __forceinline__ void note_spans(const Call &call, const Tile &tile, int wg, int2 (&span)[64]) {
    const int lane = threadIdx.x % 32, rows = tile.part[wg].rows;
    __syncwarp(); // those of the tile before have been read
    if (lane < 16 && rows > 0) {
        const int row = threadIdx.x / 32 % 4 * 16 + lane;
        const fa_entry e = entry_of(call, tile);
        const int64_t at = fa_position(&e, row_place(call, tile, wg, min(row, rows - 1)).query);
        const fa_span seen = fa_row_keys(&e, call.p.left, call.p.right, at);
        span[row] = make_int2(static_cast<int>(fa_clamp(seen.begin, 0, e.seq_k)),
                              static_cast<int>(fa_clamp(seen.end, 0, e.seq_k)));
    }
    __syncwarp();
}

template <class C> __device__ __forceinline__ void consume(const Params &params, Smem<C> &smem, int wg) {
    using T = typename C::Element;
    constexpr int kTileN = C::kTileN;
    constexpr uint32_t kTurnThreads = 256; // the warpgroup whose turn it is, and the one before, which arrives
    const Call &call = params.call;
    const int lane = threadIdx.x % 32, warp = (threadIdx.x / 32) % 4;
    const bool elected = threadIdx.x % 128 == 0; // one thread a warpgroup frees stages, once its warps are joined
    RingState<C::kStages> k_ring(0), v_ring(0);
    RingState<C::kQueryStages> q_ring(0);

    auto turn_wait = [&] { named_barrier_sync(1 + wg, kTurnThreads); };
    auto turn_pass = [&] { named_barrier_arrive(1 + (wg + 1 == C::kConsumers ? 0 : wg + 1), kTurnThreads); };
    auto join_warps = [&] { named_barrier_sync(1 + C::kConsumers + wg, 128); };
    if (wg == C::kConsumers - 1) turn_pass();

    for (uint32_t round = 0;; ++round) {
        const uint32_t tile_stage = round % Smem<C>::kTileStages;
        mbarrier_wait(&smem.tile_full[tile_stage], round / Smem<C>::kTileStages % 2);
        const Tile &tile = smem.tile[tile_stage];
        const int blocks = __shfl_sync(0xffffffff, tile.blocks, 0); // uniform for the compiler too
        if (blocks < 0) break;
        const int rows = __shfl_sync(0xffffffff, tile.part[wg].rows, 0);
        OnlineSoftmax softmax;
        float out[C::kHeadDim / 2];

        if (blocks > 0) {
            const int end = __shfl_sync(0xffffffff, tile.end, 0);
            float scores[kTileN / 2];
            uint32_t weights[kTileN / 4];
            // The warpgroup skips blocks past the last key that one of its rows sees: it begins with `first`.
            const int seen_end = __shfl_sync(0xffffffff, tile.part[wg].seen_end, 0);
            const int first = min(blocks, max(end - seen_end, 0) / kTileN);
            note_spans(call, tile, wg, smem.span[wg]);

            auto issue_qk = [&] {
                gemm_qk<T, C::kHeadDim>(scores, shared_address(smem.q[q_ring.stage][wg]), Smem<C>::kQuerySlabBytes,
                                        shared_address(smem.k[k_ring.stage]), Smem<C>::kKeySlabBytes);
                wgmma_commit();
            };
            auto issue_pv = [&](auto &weights, int accumulate) {
                gemm_pv<T>(out, weights, shared_address(smem.v[v_ring.stage]), Smem<C>::kKeySlabBytes, accumulate);
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
                    for (float &score : scores) score = tanh_fast(score * params.cap_factor);
            };
            auto mask = [&](auto &scores, int block) {
                const int first_key = end - (block + 1) * kTileN;
                int low[2], high[2];
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const int2 span = smem.span[wg][warp * 16 + lane / 4 + 8 * r];
                    low[r] = span.x - first_key, high[r] = span.y - first_key;
                }
                mask_scores(scores, low, high, 2 * (lane % 4));
            };
            /* Keys of the block that k_ring is at and that have no page, or NULL: of which there are almost never any.
             * Read before the block's product is issued, and until that of the block but one after it is. */
            auto hidden_of = [&]() -> const uint32_t * {
                if (!call.s.pages.table) return nullptr;
                const uint32_t *words = smem.hidden[k_ring.stage + C::kStages * k_ring.parity];
                const uint4 bits = *reinterpret_cast<const uint4 *>(words);
                return __shfl_sync(0xffffffff, bits.x | bits.y | bits.z | bits.w, 0) ? words : nullptr;
            };
            /* One block: `old` holds the weights of the block before, `fresh` gets this block's. */
            auto step = [&]<bool kMaskBlock>(int block, auto &old, auto &fresh, std::bool_constant<kMaskBlock>) {
                auto wait_out = [&] {
                    wgmma_wait<0>();
                    wgmma_pin(out);
                    wgmma_pin(old);
                    free_values();
                };
                mbarrier_wait(&smem.k_full[k_ring.stage], k_ring.parity);
                const uint32_t *hidden = hidden_of();
                turn_wait();
                wgmma_fence();
                issue_qk();
                mbarrier_wait(&smem.v_full[v_ring.stage], v_ring.parity);
                wgmma_fence();
                issue_pv(old, block > first + 1);
                turn_pass();
                wgmma_wait<1>();
                wgmma_pin(scores);
                free_keys(block + 1 == blocks);
                cap(scores);
                if constexpr (kMaskBlock) mask(scores, block);
                if (hidden) hide_scores(scores, hidden, 2 * (lane % 4));
                if constexpr (!C::kOverlap) wait_out();
                if (!softmax.try_absorb<T>(fresh, scores, params.score_factor)) {
                    softmax.absorb<false, T>(scores, params.score_factor);
                    pack_scores<T>(fresh, scores);
                    if constexpr (C::kOverlap) {
                        wgmma_wait<0>();
                        wgmma_pin(out);
                    }
                    softmax.rescale_output(out);
                }
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
                const uint32_t *hidden = hidden_of();
                wgmma_fence();
                gemm_qk<T, C::kHeadDim>(part, shared_address(smem.q[q_ring.stage][wg]), Smem<C>::kQuerySlabBytes,
                                        shared_address(smem.k[k_ring.stage]), Smem<C>::kKeySlabBytes);
                wgmma_commit();
                wgmma_wait<0>();
                wgmma_pin(part);
                free_keys(first + 1 == blocks);
                cap(part);
                mask(part, first);
                if (hidden) hide_scores(part, hidden, 2 * (lane % 4));
                softmax.absorb<true, T>(part, params.score_factor);
                pack_scores<T>(part_weights, part);
#pragma unroll
                for (int i = kColumns / 4; i < kTileN / 4; ++i) weights[i] = 0;
            };

            mbarrier_wait(&smem.q_full[q_ring.stage][wg], q_ring.parity);
            if (first < blocks && (rows < 64 || params.queries != Queries::kAsTheyAre)) {
                prepare_queries<C>(smem.q[q_ring.stage][wg], rows, params.queries);
                join_warps();
            }
            for (int block = 0; block < first; ++block) { // the others' blocks, in turn
                mbarrier_wait(&smem.k_full[k_ring.stage], k_ring.parity);
                if (block > 0) {
                    turn_wait();
                    turn_pass();
                }
                join_warps();
                free_keys(block + 1 == blocks);
                if (block > 0) skip_values();
            }
            if (first < blocks) {
                mbarrier_wait(&smem.k_full[k_ring.stage], k_ring.parity);
                if (first > 0) {
                    turn_wait();
                    turn_pass();
                }
                if constexpr (C::kHalfBlocks) {
                    if (seen_end - (end - (first + 1) * kTileN) <= kTileN / 2)
                        begin(std::true_type());
                    else
                        begin(std::false_type());
                } else {
                    begin(std::false_type());
                }
            }
            if (first > 0) skip_values();
            if (first < blocks) {
                // Blocks that reach past the last key that all rows see, then plain ones, then those that begin before
                // the first such key.
                const int high = __shfl_sync(0xffffffff, tile.part[wg].common_end, 0);
                const int low = __shfl_sync(0xffffffff, tile.part[wg].common_begin, 0);
                const int plain = (end - high + kTileN - 1) / kTileN;
                const int plain_end = end > low ? (end - low) / kTileN : 0;
                int block = first + 1;
                block = steps(block, min(plain, blocks), std::true_type());
                block = steps(block, min(plain_end, blocks), std::false_type());
                steps(block, blocks, std::true_type());
                mbarrier_wait(&smem.v_full[v_ring.stage], v_ring.parity);
                wgmma_fence();
                issue_pv(weights, blocks - first > 1);
                wgmma_wait<0>();
                wgmma_pin(out);
                wgmma_pin(weights);
                free_values();
            }
            q_ring.advance();
        } // without keys every factor below is 0, and so is what is written

        const fa_forward &p = call.p;
        float factor[2];
        T *target[2];
        const int batch = call.s.packed_q ? 0 : tile.b;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = warp * 16 + lane / 4 + 8 * r;
            const RowPlace place = row_place(call, tile, wg, row);
            const int64_t query = tile.first_q + place.query;
            const bool exists = row < rows;
            float sink = -INFINITY;
            if (p.sinks.data && exists)
                sink = load_as_float(p.sinks.data, p.sinks_dtype, place.head * p.sinks.stride[0]);
            const RowResult result = softmax.finish(r, params.score_factor, sink);
            factor[r] = result.factor;
            if (p.lse && exists && lane % 4 == 0)
                static_cast<float *>(p.lse)[lse_index(batch, place.head, query, p.heads, p.seq_q)] = result.lse;
            target[r] = exists ? row_of<T>(p.out, batch, place.head, query) : nullptr;
        }
        const int head = tile.head, first_row = tile.first_q + tile.query + wg * 64 + warp * 16;
        const bool box = C::kStaged && !tile.packed && rows >= warp * 16 + 16; // rows of one head that all exist
        __syncwarp();
        if (lane == 0) mbarrier_arrive(&smem.tile_empty[tile_stage]);
        if (box) {
            if constexpr (C::kStaged) {
                if (__any_sync(0xffffffff, factor[0] == 0.0f || factor[1] == 0.0f)) clear_rows(out, factor);
                auto &staged = smem.out[wg][warp];
                if (lane == 0) tma_store_wait_read();
                __syncwarp();
                stage_rows<T>(staged, out, factor, lane);
                tma_store_fence();
                __syncwarp();
                if (lane == 0) {
                    for (int slab = 0; slab < Smem<C>::kSlabs; ++slab)
                        tma_store(&params.out_map, &staged[slab * 16 * kSlabRowBytes], slab * kSlabColumns, first_row,
                                  p.out.stride[1] ? head : 0, batch);
                    tma_store_commit();
                }
            }
        } else {
            store_rows(target, out, factor, p.head_dim, lane);
        }
    }
    if (C::kStaged && lane == 0) tma_store_wait();
}

} // namespace fa::sm90::prefill
