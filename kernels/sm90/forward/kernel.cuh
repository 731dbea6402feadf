/* The Hopper forward kernel: one producer warp, C::kConsumers warpgroups of 64 query rows each, persistent CTAs.
 *
 * The producer fills rings of key and value blocks and each warpgroup's own queries by TMA. A warpgroup computes
 * S = Q K^T into registers, turns it into weights there, and feeds them back as the A operand of O += P V:
 *
 *     issue S(b) = Q K(b), then O += P(b-1) V(b-1)
 *     wait for S(b); P(b) = weights of S(b)       with C::kOverlap under the second product
 *     wait for O; where S(b) outgrew the maximum: rescale O
 *
 * With C::kTurns the warpgroups issue their products in turns, so that one's run under another's exponentials. The
 * instruction path of one warpgroup is the limit (sm90/common/softmax.cuh shortens it), then power. In short sequences
 * the costs of a tile besides its blocks count: on an H200 at head_dim 128 some 390 cycles to its first product,
 * 590 for that, 1500 for the first weights, 700 for the last product and 1000 for the output; a block takes 2090.
 *
 * Why no waiter falls two phases behind. A wait names a parity, so a barrier that has moved on by two phases looks as
 * if it had not moved, and the waiting thread then waits for ever. So no phase of a barrier may end before all
 * threads that wait for the phase before it have passed:
 *
 *   k_full, v_full, q_full: all warps of the consumers wait. The next phase ends after the producer's arrive_expect,
 *   and that after its wait for `empty`. There one thread a warpgroup arrives, when its four warps have passed `full`:
 *   where the block is multiplied, wgmma has joined them (it runs once all four warps have issued it, and is done
 *   when it has read for all four; PTX does not promise that, CUTLASS and FlashAttention-3 rely on it too), and where
 *   the block is skipped, join_warps() has.
 *
 *   k_empty, v_empty, q_empty, tile_empty: only the producer's thread waits, and its own arrival allows what follows.
 *
 *   tile_full: all warps of the consumers wait. The producer waits for tile_empty, where each warp arrives for itself.
 *
 *   Turns, named barriers 1 to kConsumers: a warpgroup arrives for its neighbour again after a turn of its own. That
 *   turn has come round through the neighbour, all of whose warps had left the barrier to pass it on.
 *
 *   join_warps, the named barriers above those: only the warpgroup's own 128 threads, and all of them wait.
 *
 * Shared memory, 16-bit, swizzled: queries [stage][warpgroup][slab][64][64], keys and values [stage][slab][tile_n][64],
 * with C::kStaged the output [warpgroup][warp][slab][16][64].
 */
#pragma once
#include "common/dropout.cuh"
#include "sm90/common/epilogue.cuh"
#include "sm90/common/schedule.cuh"
#include "sm90/common/tma.cuh"
#include "sm90/common/wgmma.cuh"
#include <type_traits> // bool_constant

namespace fa::sm90 {

struct ForwardParams {
    CUtensorMap q, k, v;   // k and v cover the call's visible keys alone
    CUtensorMap out_map;   // of out, boxes of 16 rows; with C::kStaged
    void *out;             // (B, H, Sq, D); without
    int64_t out_stride[3]; // elements, of B, H, Sq
    float *lse;            // (B, H, Sq) or NULL
    int64_t lse_stride[3]; // elements
    const void *sinks;     // (H) or NULL
    int64_t sinks_stride;
    fa_dtype sinks_dtype;
    Schedule schedule;
    ShiftedBand visible;
    int seq_q, head_dim, group;          // group: query heads a key head
    int q_step[2], k_step[2], v_step[2]; // factors 0 or 1 of the head and batch coordinates
    float score_factor;                  // 2^(score_factor * s): scale or softcap, times log2(e)
    float cap_factor;                    // softcap: s = tanh(cap_factor * product)
    CapPolynomial cap_polynomial;        // the same below a limit, without the MUFU
};

struct DropoutForwardParams : ForwardParams {
    fa_dropout dropout;
    float kept;    // what a weight is multiplied by that dropout keeps
    int key_begin; // the first visible key
};
__device__ __forceinline__ const DropoutForwardParams &dropout_of(const ForwardParams &p) {
    return static_cast<const DropoutForwardParams &>(p);
}

template <bool Dropout> struct ForwardDropout {};
template <> struct ForwardDropout<true> {
    fa_dropout words; // as they were when the block began
};

template <class C> struct ForwardSmem {
    static constexpr int kSlabs = (C::kHeadDim + kSlabColumns - 1) / kSlabColumns;
    static constexpr int kQuerySlabBytes = 64 * kSlabRowBytes;
    static constexpr int kKeySlabBytes = C::kTileN * kSlabRowBytes;
    static constexpr int kQueryBytes = kSlabs * kQuerySlabBytes; // of one warpgroup
    static constexpr int kKeyBytes = kSlabs * kKeySlabBytes;
    static constexpr int kTileStages = 4; // of tile[]: at least this tile, the next and the one after; a power of 2

    alignas(1024) char q[C::kQueryStages][C::kConsumers][kQueryBytes];
    alignas(1024) char k[C::kStages][kKeyBytes];
    alignas(1024) char v[C::kStages][kKeyBytes];
    alignas(C::kStaged ? 1024 : 16) char out[C::kStaged ? C::kConsumers : 1][4][C::kStaged ? kQueryBytes / 4 : 16];
    alignas(16) Tile tile[kTileStages];
    uint64_t q_full[C::kQueryStages][C::kConsumers], q_empty[C::kQueryStages][C::kConsumers];
    uint64_t k_full[C::kStages], k_empty[C::kStages], v_full[C::kStages], v_empty[C::kStages];
    uint64_t tile_full[kTileStages], tile_empty[kTileStages]; // the producer hands tiles to the consumers
    [[no_unique_address]] ForwardDropout<C::kDropout> dropout;
};

/* Key blocks of the tile of queries from `row`. With dropout the last ends with a whole 16 keys, of which a lane has
 * what one call of the generator serves. */
template <class C> __device__ __forceinline__ KeyBlocks forward_blocks(const ForwardParams &p, int row) {
    const int row_end = min(row + C::kTileM, p.seq_q);
    KeyBlocks blocks = key_blocks<C::kMasked, C::kTileN>(p.visible, row, row_end);
    if constexpr (C::kDropout) {
        if (blocks.count == 0) return blocks;
        const int key_begin = dropout_of(p).key_begin;
        blocks.end += -(key_begin + blocks.end) & 15;
        blocks.count = (blocks.end - begin_of(p.visible, row) + C::kTileN - 1) / C::kTileN;
    }
    return blocks;
}

template <class C> __device__ __forceinline__ void forward_produce(const ForwardParams &p, ForwardSmem<C> &smem) {
    using Smem = ForwardSmem<C>;
    RingState<C::kStages> k_ring(1), v_ring(1);
    RingState<C::kQueryStages> q_ring(1);
    RingState<Smem::kTileStages> tile_ring(1);
    auto announce = [&](uint32_t index) {
        const Tile tile = tile_at(p.schedule, index, C::kTileM);
        announce_tile(smem, tile_ring, tile);
        return tile;
    };
    Tile tile = announce(next_tile<C::kMasked>(p.schedule, 0)), next;
    for (uint32_t round = 1; tile.row >= 0; ++round, tile = next) {
        const uint32_t next_index =
            next_tile<C::kMasked>(p.schedule, round); // early: the counter answers while this tile is loaded
        const KeyBlocks blocks = forward_blocks<C>(p, tile.row);
        if (blocks.count == 0) {
            next = announce(next_index);
            continue;
        }
        const int kv_head = tile.head / p.group;
        const int k_head = kv_head * p.k_step[0], k_batch = tile.batch * p.k_step[1];
        const int v_head = kv_head * p.v_step[0], v_batch = tile.batch * p.v_step[1];
        auto load_keys = [&](int block) {
            mbarrier_wait(&smem.k_empty[k_ring.stage], k_ring.parity);
            mbarrier_arrive_expect(&smem.k_full[k_ring.stage], Smem::kKeyBytes);
            tma_load_tile<C::kHeadDim, C::kTileN>(smem.k[k_ring.stage], &p.k, &smem.k_full[k_ring.stage],
                                                  blocks.end - (block + 1) * C::kTileN, k_head, k_batch, kEvictLast);
            k_ring.advance();
        };
        auto load_values = [&](int block) {
            mbarrier_wait(&smem.v_empty[v_ring.stage], v_ring.parity);
            mbarrier_arrive_expect(&smem.v_full[v_ring.stage], Smem::kKeyBytes);
            tma_load_tile<C::kHeadDim, C::kTileN>(smem.v[v_ring.stage], &p.v, &smem.v_full[v_ring.stage],
                                                  blocks.end - (block + 1) * C::kTileN, v_head, v_batch, kEvictLast);
            v_ring.advance();
        };
        load_keys(0);
        for (int wg = 0; wg < C::kConsumers; ++wg) {
            uint64_t *full = &smem.q_full[q_ring.stage][wg];
            mbarrier_wait(&smem.q_empty[q_ring.stage][wg], q_ring.parity);
            mbarrier_arrive_expect(full, Smem::kQueryBytes);
            tma_load_tile<C::kHeadDim, 64>(smem.q[q_ring.stage][wg], &p.q, full, tile.row + wg * 64,
                                           tile.head * p.q_step[0], tile.batch * p.q_step[1], kEvictFirst);
        }
        q_ring.advance();
        next = announce(next_index);
        for (int block = 1; block < blocks.count; ++block) {
            load_keys(block);
            load_values(block - 1);
        }
        load_values(blocks.count - 1);
    }
}

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

template <class C, class Params> __device__ __forceinline__ void forward_block(const Params &p) {
    FA_CHAOS_BEGIN();
    extern __shared__ __align__(1024) char raw[];
    auto &smem = *reinterpret_cast<ForwardSmem<C> *>(raw);
    const int wg = __shfl_sync(0xffffffff, threadIdx.x / 128, 0); // uniform for the compiler too

    if (threadIdx.x == 0) {
        tensor_map_prefetch(&p.q);
        tensor_map_prefetch(&p.k);
        tensor_map_prefetch(&p.v);
        if (C::kStaged) tensor_map_prefetch(&p.out_map);
        for (int stage = 0; stage < C::kQueryStages; ++stage)
            for (int consumer = 0; consumer < C::kConsumers; ++consumer) {
                mbarrier_init(&smem.q_full[stage][consumer], 1);
                mbarrier_init(&smem.q_empty[stage][consumer], 1);
            }
        for (int stage = 0; stage < ForwardSmem<C>::kTileStages; ++stage) {
            mbarrier_init(&smem.tile_full[stage], 1);
            mbarrier_init(&smem.tile_empty[stage], C::kConsumers * 4);
        }
        for (int stage = 0; stage < C::kStages; ++stage) {
            mbarrier_init(&smem.k_full[stage], 1);
            mbarrier_init(&smem.v_full[stage], 1);
            mbarrier_init(&smem.k_empty[stage], C::kConsumers);
            mbarrier_init(&smem.v_empty[stage], C::kConsumers);
        }
        mbarrier_init_fence();
        if constexpr (C::kDropout) smem.dropout.words = fa_dropout_read(&p.dropout);
    }
    __syncthreads();

    if (wg == 0) {
        registers_lower<C::kProducerRegisters>();
        if (threadIdx.x / 32 == 0 && elect_one()) forward_produce<C>(p, smem);
    } else {
        registers_raise<C::kConsumerRegisters>();
        forward_consume<C>(p, smem, wg - 1);
    }
}

template <class C>
__global__ void __launch_bounds__(128 * (C::kConsumers + 1), 1) forward(const __grid_constant__ ForwardParams p) {
    forward_block<C>(p);
}
template <class C>
__global__ void __launch_bounds__(128 * (C::kConsumers + 1), 1)
    forward_dropout(const __grid_constant__ DropoutForwardParams p) {
    forward_block<C>(p);
}

} // namespace fa::sm90
