/* The Hopper forward kernel: the producer's thread. */
#pragma once
#include "sm90/forward/params.cuh"

namespace fa::sm90 {

/* The key blocks of a tile that some warpgroup sees, from the last to the first, in the light kind. A tile that sees
 * nothing has one, which nobody sees. One thread. */
template <class C> class SeenBlocks {
    static constexpr int kSixtyFours = C::kTileN / 64;
    static_assert(!C::kLight || C::kTileN % 64 == 0);
    const ForwardParams &p_;
    const KeyBlocks blocks_;
    const int row_, plane_;
    int block_;
    uint32_t flags_ = 0; // of block_

    /* Where the bits of a warpgroup's rows begin. */
    __device__ __forceinline__ int64_t bits_of(int wg) const {
        return light_of(p_).map.bits_of(plane_, row_ / 64 + wg);
    }

    /* Which warpgroups see a block, and to which it is mixed. */
    __device__ __forceinline__ uint32_t flags_of(int block) const {
        const PairMap &map = light_of(p_).map;
        const int first = blocks_.end - (block + 1) * C::kTileN;
        uint32_t flags = 0;
#pragma unroll 1 // for its few registers
        for (int wg = 0; wg < C::kConsumers; ++wg) {
            const int row = row_ + wg * 64, last = min(row + 64, p_.seq_q) - 1;
            if (row > last) continue;
            bool sees = !map.seen, whole = common_span(p_.visible, row, last).holds(first, C::kTileN);
            if (map.seen)
#pragma unroll
                for (int n = 0; n < kSixtyFours; ++n) {
                    const int column = (first / 64 + n) * map.column_step;
                    if (first + 64 * n < 0) continue;
                    const int64_t at = bits_of(wg) + column / 32;
                    sees = sees || (map.seen[at] >> column % 32 & 1);
                    whole = whole && (map.whole[at] >> column % 32 & 1);
                }
            sees = sees && tile_span(p_.visible, row, last).meets(first, C::kTileN);
            flags |= (uint32_t(sees) | (whole ? 0u : 8u)) << wg;
        }
        return flags;
    }

    /* The first block from `block` on that some warpgroup sees, with its flags; blocks_.count: none. */
    __device__ __forceinline__ int find(int block, uint32_t &flags) const {
        const PairMap &map = light_of(p_).map;
        while (block < blocks_.count) {
            if (map.seen && map.column_step) {                               // on to a block of which a bit is set
                const int last = blocks_.end / 64 - 1 - block * kSixtyFours; // its last 64 keys
                if (last < 0) return blocks_.count;
                uint32_t seen = 0;
#pragma unroll 1
                for (int wg = 0; wg < C::kConsumers; ++wg)
                    if (row_ + wg * 64 < p_.seq_q) seen |= map.seen[bits_of(wg) + last / 32];
                seen &= (2u << last % 32) - 1;
                const int found = seen ? last / 32 * 32 + 31 - __clz(seen) : last / 32 * 32 - 1;
                const int further = (blocks_.end / 64 - 1 - found) / kSixtyFours;
                const bool moves = further > block; // else the block has keys of the word before, too
                block = further;
                if (moves && (!seen || block >= blocks_.count)) continue;
            }
            flags = flags_of(block);
            if (flags & BlockWord::kSeen) break;
            ++block;
        }
        return block;
    }

  public:
    __device__ __forceinline__ SeenBlocks(const ForwardParams &p, const KeyBlocks &blocks, const Tile &tile)
        : p_(p), blocks_(blocks), row_(tile.row), plane_(light_of(p).map.plane(tile.batch, tile.head)) {
        block_ = find(0, flags_);
        if (block_ == blocks_.count) block_ = 0, flags_ = 0;
    }
    /* The next block, in the order of the tile, and its word. */
    __device__ __forceinline__ int take(BlockWord &word) {
        const int block = block_, first = blocks_.end - (block + 1) * C::kTileN;
        uint32_t flags = flags_;
        block_ = find(block + 1, flags_);
        if (block_ == blocks_.count) flags |= BlockWord::kLast;
        word = {uint32_t(first >> 6) << BlockWord::kShift | flags};
        return block;
    }
};

template <class C> __device__ __forceinline__ void forward_produce(const ForwardParams &p, ForwardSmem<C> &smem) {
    using Smem = ForwardSmem<C>;
    RingState<C::kStages> k_ring(1), v_ring(1);
    RingState<C::kQueryStages> q_ring(1);
    RingState<Smem::kTileStages> tile_ring(1);
    auto announce = [&](uint32_t index) {
        Tile tile = tile_at(p.schedule, index, C::kTileM);
        if constexpr (C::kLight)
            if (const LightParams &light = light_of(p); light.order && tile.row >= 0) {
                const int64_t first = int64_t(light.map.plane(tile.batch, tile.head)) * p.schedule.query_tiles;
                tile.row = light.order[first + tile.row / C::kTileM] * C::kTileM;
            }
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
        auto load_keys = [&](int block, BlockWord told = {}) {
            mbarrier_wait(&smem.k_empty[k_ring.stage], k_ring.parity);
            if constexpr (C::kLight) smem.blocks.of[k_ring.stage] = told; // read before k_empty, visible with k_full
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
        auto load_queries = [&] {
            for (int wg = 0; wg < C::kConsumers; ++wg) {
                uint64_t *full = &smem.q_full[q_ring.stage][wg];
                mbarrier_wait(&smem.q_empty[q_ring.stage][wg], q_ring.parity);
                mbarrier_arrive_expect(full, Smem::kQueryBytes);
                tma_load_tile<C::kHeadDim, 64>(smem.q[q_ring.stage][wg], &p.q, full, tile.row + wg * 64,
                                               tile.head * p.q_step[0], tile.batch * p.q_step[1], kEvictFirst);
            }
            q_ring.advance();
        };
        if constexpr (C::kLight) {
            SeenBlocks<C> seen(p, blocks, tile);
            BlockWord word;
            int block = seen.take(word);
            load_keys(block, word);
            load_queries();
            next = announce(next_index);
            while (!word.last()) {
                const int before = block;
                block = seen.take(word);
                load_keys(block, word);
                load_values(before);
            }
            load_values(block);
        } else {
            load_keys(0);
            load_queries();
            next = announce(next_index);
            for (int block = 1; block < blocks.count; ++block) {
                load_keys(block);
                load_values(block - 1);
            }
            load_values(blocks.count - 1);
        }
    }
}

} // namespace fa::sm90
