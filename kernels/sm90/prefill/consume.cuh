/* prefill_sm90: the work of a warpgroup on its 64 rows of a tile.
 *
 * The products, turns and weights are those of wgmma_sm90 (sm90/forward/kernel.cuh, which says why), in the same order.
 * Three things differ: a row is a query, or a query and a head; the keys that it sees are looked up in shared memory,
 * where masks are needed at all; and rows that do not exist hold zeros for queries, so that no bit of the others
 * depends on the data beside a sequence. */
#pragma once
#include "sm90/common/epilogue.cuh"
#include "sm90/common/wgmma.cuh"
#include "sm90/prefill/rows.cuh"
#include <type_traits> // bool_constant

namespace fa::sm90::prefill {

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
    const int lane = threadIdx.x % 32;
    __syncwarp(); // those of the tile before have been read
    if (lane < 16) {
        const Part &part = tile.part[wg];
        const int at = threadIdx.x / 32 % 4 * 16 + lane, row = min(at, part.rows - 1);
        if (!call.s.positions) {
            const int query = tile.packed ? row / call.group : row;
            span[at] = make_int2(max(part.low + query, tile.of.key_begin), min(part.high + query, tile.of.key_end));
        } else if (row >= 0) {
            const fa_entry e = entry_of(call, tile.of);
            const fa_span seen =
                fa_row_keys(&e, call.left, call.right, fa_position(&e, row_place(call, tile, wg, row).query));
            span[at] = make_int2(static_cast<int>(fa_clamp(seen.begin, 0, e.seq_k)),
                                 static_cast<int>(fa_clamp(seen.end, 0, e.seq_k)));
        }
    }
    __syncwarp();
}

/* After a chunk of a tile's keys: leaves its state, or folds it with those before. True where that was the last, so
 * that the tile's rows are whole. The warpgroup that leaves the last of a tile's chunks that are units of their own
 * folds them all, from the first to the last: in registers at head_dim 128, where two states fit and ptxas serialises
 * no products for it, else with those so far in the first slot, which waits for memory twice a chunk. The warpgroup
 * calls it. */
template <class C, class Join>
__device__ __forceinline__ bool end_chunk(const Params &params, Smem<C> &smem, const Tile &tile, int wg,
                                          OnlineSoftmax &softmax, float (&out)[C::kHeadDim / 2], Join &&join_warps) {
    constexpr bool kInRegisters = C::kHeadDim == 128;
    const auto uniform = [](int x) { return __shfl_sync(0xffffffff, x, 0); };
    const Workspace &workspace = params.call.workspace;
    const int first_slot = uniform(tile.first_slot), chunks = uniform(tile.of.chunks);
    const bool has_rows = uniform(own_row(0)) < tile.part[wg].rows; // of the warp's 16
    State<C> own = State<C>::of(workspace.state(uniform(tile.slot)), wg), so_far = own;
    if constexpr (C::kKeepsHalf) { // a fold waits less for shared memory
        static_assert(State<C>::kHalf * 512 <= sizeof smem.out[0][0]);
        float4 *const staged = reinterpret_cast<float4 *>(smem.out[wg][threadIdx.x / 32 % 4]) + threadIdx.x % 32;
        if (threadIdx.x % 32 == 0) tma_store_wait_read(); // of the rows that were staged there
        __syncwarp();
        own.low = first_slot < 0 ? staged : own.low;
        so_far = own;
    }
    if (first_slot >= 0) so_far = State<C>::of(workspace.state(first_slot), wg);
    bool folds = uniform(tile.folds), ends = uniform(tile.ends);
#pragma unroll 1
    for (int chunk = 1;; ++chunk) {
        if (folds && has_rows) fold_with(so_far, softmax, out, params.score_factor);
        if (ends) return true;
        if (has_rows) leave_state(own, softmax, out);
        own = so_far;
        if (first_slot < 0) return false;
        if (chunk == 1) {
            __threadfence();
            join_warps();
            if (threadIdx.x % 128 == 0) smem.left[wg] = atomicAdd(&workspace.left(first_slot)->count[wg], 1u);
            join_warps();
            if (uniform(smem.left[wg]) + 1 != chunks) return false;
            __threadfence();
        }
        if constexpr (kInRegisters) {
            if (has_rows) fold_chunks<C>(workspace, first_slot, chunks, wg, softmax, out, params.score_factor);
            return true;
        } else {
            if (has_rows) take_state(State<C>::of(workspace.state(first_slot + chunk), wg), softmax, out);
            folds = true, ends = chunk + 1 == chunks;
        }
    }
}

template <class C> __device__ __forceinline__ void consume(const Params &params, Smem<C> &smem, int wg) {
    using T = typename C::Element;
    constexpr int kTileN = C::kTileN;
    constexpr uint32_t kTurnThreads = 256; // the warpgroup whose turn it is, and the one before, which arrives
    const Call &call = params.call;
    const int lane = threadIdx.x % 32, warp = __shfl_sync(0xffffffff, threadIdx.x / 32 % 4, 0);
    const bool elected = threadIdx.x % 128 == 0; // one thread a warpgroup frees stages, once its warps are joined
    auto turn_wait = [&] { named_barrier_sync(1 + wg, kTurnThreads); };
    auto turn_pass = [&] { named_barrier_arrive(1 + (wg + 1 == C::kConsumers ? 0 : wg + 1), kTurnThreads); };
    auto join_warps = [&] { named_barrier_sync(1 + C::kConsumers + wg, 128); };
    if (wg == C::kConsumers - 1) turn_pass();

    uint32_t n = 0; // blocks of all tiles so far: block n has stage n % kStages of both rings
    for (uint32_t round = 0;; ++round) {
        const uint32_t tile_stage = round % Smem<C>::kTileStages;
        mbarrier_wait(&smem.tile_full[tile_stage], round / Smem<C>::kTileStages % 2);
        const Tile &tile = smem.tile[tile_stage];
        // Uniform for the compiler too, which sees it here alone: all that loops and waits depend on.
        const auto uniform = [](int x) { return __shfl_sync(0xffffffff, x, 0); };
        const int blocks = uniform(tile.blocks), end = uniform(tile.end), rows = uniform(tile.part[wg].rows);
        if (blocks < 0) break;
        auto wait_queries = [&] {
            mbarrier_wait(&smem.q_full[round % C::kQueryStages][wg], round / C::kQueryStages % 2);
        };
        OnlineSoftmax softmax;
        float out[C::kHeadDim / 2];

        RowEnds row_ends = {};
        bool ended = false; // row_ends says how

        if (blocks > 0) [[likely]] {
            float scores[kTileN / 2];
            uint32_t weights[kTileN / 4];
            const uint32_t end_n = n + blocks;
            const uint32_t top = end + n * kTileN;
            const uint32_t begin_n = n, first = n + uniform(tile.part[wg].first);
            const uint32_t plain = n + uniform(tile.part[wg].plain), plain_end = n + uniform(tile.part[wg].plain_end);
            const bool half = C::kHalfTiles && uniform(tile.half);
            char *const queries = smem.q[round % C::kQueryStages][wg];

            auto first_key = [&](uint32_t n) { return static_cast<int>(top - (n + 1) * kTileN); };
            auto wait_keys = [&](uint32_t n) { mbarrier_wait(&smem.k_full[n % C::kStages], n / C::kStages % 2); };
            auto wait_values = [&](uint32_t n) { mbarrier_wait(&smem.v_full[n % C::kStages], n / C::kStages % 2); };
            auto issue_qk = [&](auto &scores, uint32_t n) {
                gemm_qk<T, C::kHeadDim>(scores, shared_address(queries), Smem<C>::kQuerySlabBytes,
                                        shared_address(smem.k[n % C::kStages]), Smem<C>::kKeySlabBytes);
                wgmma_commit();
            };
            auto issue_pv = [&](auto &weights, uint32_t n, int accumulate) {
                gemm_pv<T>(out, weights, shared_address(smem.v[n % C::kStages]), Smem<C>::kKeySlabBytes, accumulate);
                wgmma_commit();
            };
            auto free_keys = [&](uint32_t n) {
                if (elected) mbarrier_arrive(&smem.k_empty[n % C::kStages]);
                if (elected && n + 1 == end_n) mbarrier_arrive(&smem.q_empty[round % C::kQueryStages][wg]);
            };
            auto free_values = [&](uint32_t n) {
                if (elected) mbarrier_arrive(&smem.v_empty[n % C::kStages]);
            };
            auto skip_values = [&](uint32_t n) {
                wait_values(n);
                join_warps();
                free_values(n);
            };
            auto cap = [&](auto &scores) {
                if constexpr (C::kSoftcap)
                    for (float &score : scores) score = tanh_fast(score * params.cap_factor);
            };
            auto mask = [&](auto &scores, uint32_t n) {
                int low[2], high[2];
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const int2 span = smem.span[wg][warp * 16 + lane / 4 + 8 * r];
                    low[r] = span.x - first_key(n), high[r] = span.y - first_key(n);
                }
                mask_scores(scores, low, high, 2 * (lane % 4));
            };
            /* Whether a key of the block has no page: there are almost never any. Read before the block's product is
             * issued, the bits themselves until that of the next block but one is. */
            auto hides = [&](uint32_t n) {
                if (!call.s.pages.table) return false;
                const uint4 bits = *reinterpret_cast<const uint4 *>(smem.hidden[n % (2 * C::kStages)]);
                return __any_sync(0xffffffff, bits.x | bits.y | bits.z | bits.w) != 0;
            };
            auto hide = [&](auto &scores, uint32_t n) {
                hide_scores(scores, smem.hidden[n % (2 * C::kStages)], 2 * (lane % 4));
            };
            /* Block n: `old` holds the weights of the block before, `fresh` gets this block's. */
            auto step = [&]<bool kMaskBlock>(auto &old, auto &fresh, std::bool_constant<kMaskBlock>) {
                constexpr bool kOverlap = C::kOverlap && !kMaskBlock;
                auto wait_out = [&] {
                    wgmma_wait<0>();
                    wgmma_pin(out);
                    wgmma_pin(old);
                    free_values(n - 1);
                };
                wait_keys(n);
                const bool hidden = hides(n);
                turn_wait();
                wgmma_fence();
                issue_qk(scores, n);
                wait_values(n - 1);
                wgmma_fence();
                issue_pv(old, n - 1, n != first + 1);
                turn_pass();
                wgmma_wait<1>();
                wgmma_pin(scores);
                free_keys(n);
                cap(scores);
                if constexpr (kMaskBlock) mask(scores, n);
                if (hidden) [[unlikely]]
                    hide(scores, n);
                if constexpr (!kOverlap) wait_out();
                if (!softmax.try_absorb<T>(fresh, scores, params.score_factor)) [[unlikely]] {
                    softmax.absorb<false, T, true>(scores, params.score_factor);
                    pack_scores<T>(fresh, scores);
                    if constexpr (kOverlap) {
                        wgmma_wait<0>();
                        wgmma_pin(out);
                    }
                    softmax.rescale_output(out);
                }
                if constexpr (kOverlap) wait_out();
                ++n;
            };
            /* Blocks up to `end`. With overlap the weights go to and fro between two sets of registers; blocks with
             * masks are few. */
            auto masked_steps = [&](uint32_t end) {
#pragma unroll 1
                while (int(end - n) > 0) step(weights, weights, std::true_type());
            };
            auto plain_steps = [&](uint32_t end) {
                if constexpr (C::kOverlap) {
                    uint32_t spare[kTileN / 4];
                    while (int(end - n) > 1) {
                        step(weights, spare, std::false_type());
                        step(spare, weights, std::false_type());
                    }
                    if (int(end - n) > 0) {
                        step(weights, spare, std::false_type());
#pragma unroll
                        for (int i = 0; i < kTileN / 4; ++i) weights[i] = spare[i];
                    }
                } else {
                    while (int(end - n) > 0) step(weights, weights, std::false_type());
                }
            };

            /* Weights of the first block; with `half`, this warpgroup sees none of its later keys. */
            auto begin = [&]<bool kHalf>(std::bool_constant<kHalf>) {
                constexpr int kColumns = kHalf ? kTileN / 2 : kTileN;
                auto &part = reinterpret_cast<float(&)[kColumns / 2]>(scores);
                auto &part_weights = reinterpret_cast<uint32_t(&)[kColumns / 4]>(weights);
                const bool hidden = hides(n);
                wgmma_fence();
                issue_qk(part, n);
                note_spans(call, tile, wg, smem.span[wg]);
                wgmma_wait<0>();
                wgmma_pin(part);
                free_keys(n);
                cap(part);
                mask(part, n);
                if (hidden) [[unlikely]]
                    hide(part, n);
                softmax.absorb<true, T, true>(part, params.score_factor);
                pack_scores<T>(part_weights, part);
#pragma unroll
                for (int i = kColumns / 4; i < kTileN / 4; ++i) weights[i] = 0;
                ++n;
            };

            wait_queries();
            if (first != end_n && (rows < 64 || params.queries != Queries::kAsTheyAre)) [[unlikely]] {
                prepare_queries<C>(queries, rows, params.queries);
                join_warps();
            }
            for (; n != first; ++n) { // the others' blocks, in turn
                wait_keys(n);
                if (n != begin_n) {
                    turn_wait();
                    turn_pass();
                }
                join_warps();
                free_keys(n);
                if (n != begin_n) skip_values(n - 1);
            }
            if (first != end_n) {
                wait_keys(n);
                if (n != begin_n) {
                    turn_wait();
                    turn_pass();
                }
                if constexpr (C::kHalfBlocks || C::kHalfTiles) {
                    if (C::kHalfBlocks ? uniform(tile.part[wg].seen_end) - first_key(n) <= kTileN / 2 : half)
                        begin(std::true_type());
                    else [[likely]]
                        begin(std::false_type());
                } else {
                    begin(std::false_type());
                }
            }
            if (first != begin_n) skip_values(first - 1);
            if (first != end_n) {
                // Blocks that reach past the last key that all rows see, then plain ones, then those that begin before
                // the first such key.
                masked_steps(plain);
                plain_steps(plain_end);
                masked_steps(end_n);
                wait_values(n - 1);
                if (half) {
                    wgmma_fence();
                    issue_pv(reinterpret_cast<uint32_t(&)[kTileN / 8]>(weights), n - 1, 0);
                } else {
                    wgmma_fence();
                    issue_pv(weights, n - 1, n != first + 1);
                }
                // While that runs; registers lack for it where scores are capped.
                if constexpr (!C::kSoftcap) row_ends = end_rows(params, tile, wg, softmax);
                ended = !C::kSoftcap;
                wgmma_wait<0>();
                wgmma_pin(out);
                wgmma_pin(weights);
                free_values(n - 1);
            }
        } else { // every factor below is 0, and so is what is written
            wait_queries();
            join_warps();
            if (elected) mbarrier_arrive(&smem.q_empty[round % C::kQueryStages][wg]);
        }

        bool ends = rows > 0;
        const bool chunk = uniform(tile.slot) >= 0;
        if (chunk && rows > 0) [[unlikely]]
            ends = end_chunk<C>(params, smem, tile, wg, softmax, out, join_warps);
        if (!ends) {
            __syncwarp();
            if (lane == 0) mbarrier_arrive(&smem.tile_empty[tile_stage]);
            continue;
        }
        if (chunk || !ended) [[unlikely]]
            row_ends = end_rows(params, tile, wg, softmax);
        const auto &factor = row_ends.factor;
        if (call.lse.data) [[unlikely]]
            store_lses(call, tile, wg, row_ends.lse);
        const bool packed = tile.packed;
        const int queries = packed ? call.store_queries : 16;
        const bool box = C::kStaged && queries > 0 && rows >= warp * 16 + 16; // rows that all exist
        const int head = call.out.stride[1] ? tile.head : 0,
                  first_row = tile.of.first_q + tile.part[wg].query + warp * queries;
        const int batch = call.s.packed_q ? 0 : tile.of.b;
        T *target[2];
        if (!box) [[unlikely]]
            row_targets(params, tile, wg, target);
        __syncwarp();
        if (lane == 0) mbarrier_arrive(&smem.tile_empty[tile_stage]);
        if (box) [[likely]] {
            if constexpr (C::kStaged) {
                if (__any_sync(0xffffffff, factor[0] == 0.0f || factor[1] == 0.0f)) [[unlikely]]
                    clear_rows(out, factor);
                auto &staged = smem.out[wg][warp];
                if (lane == 0) tma_store_wait_read();
                __syncwarp();
                stage_rows<T>(staged, out, factor, lane);
                tma_store_fence();
                __syncwarp();
                if (lane == 0) {
                    for (int slab = 0; slab < Smem<C>::kSlabs; ++slab)
                        tma_store(packed ? &params.out_heads : &params.out_map, &staged[slab * 16 * kSlabRowBytes],
                                  slab * kSlabColumns, packed ? head : first_row, packed ? first_row : head, batch);
                    tma_store_commit();
                }
            }
        } else {
            store_rows(target, out, factor, call.head_dim, lane);
        }
    }
    if (C::kStaged && lane == 0) tma_store_wait();
}

} // namespace fa::sm90::prefill
