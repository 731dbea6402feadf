/* The Hopper forward kernel: the producer's thread. */
#pragma once
#include "sm90/forward/params.cuh"

namespace fa::sm90 {

/* The tile of an index, in the order of what a map leaves of tiles where there is one. */
template <class C> __device__ __forceinline__ Tile forward_tile(const ForwardParams &p, uint32_t index) {
    Tile tile = tile_at(p.schedule, index, C::kTileM);
    if constexpr (C::kLight)
        if (const BlockLists &lists = light_of(p).lists; lists.order && tile.row >= 0) {
            const int plane = light_of(p).map.plane(tile.batch, tile.head);
            tile.row = lists.order[int64_t(plane) * lists.tiles + tile.row / C::kTileM] * C::kTileM;
        }
    return tile;
}

/* The words of a tile's blocks, in the light kinds: those of its list, or without one of all blocks.
 */
template <class C> struct ToldBlocks {
    const ForwardParams &p;
    const KeyBlocks &blocks;
    const int row;
    const uint32_t *list = nullptr;

    __device__ __forceinline__ ToldBlocks(const ForwardParams &p, const KeyBlocks &blocks, const Tile &tile)
        : p(p), blocks(blocks), row(tile.row) {
        const LightParams &light = light_of(p);
        if (light.lists.words) list = light.lists.of(light.map.plane(tile.batch, tile.head), tile.row / C::kTileM);
    }
    __device__ __forceinline__ BlockWord at(int block) const {
        if (list) return {list[block]};
        const BlockShape shape = {p.visible, p.seq_q, C::kConsumers, C::kTileN};
        const uint32_t last = block + 1 >= blocks.count ? BlockWord::kLast : 0;
        return {shape.word_of(nullptr, 0, row, blocks.end - (block + 1) * C::kTileN) | last};
    }
};

template <class C> __device__ __forceinline__ void forward_produce(const ForwardParams &p, ForwardSmem<C> &smem) {
    using Smem = ForwardSmem<C>;
    RingState<C::kStages> k_ring(1), v_ring(1);
    RingState<C::kQueryStages> q_ring(1);
    RingState<Smem::kTileStages> tile_ring(1);
    auto announce = [&](uint32_t index) {
        const Tile tile = forward_tile<C>(p, index);
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
        auto load_keys = [&](int first_key, BlockWord told = {}) {
            mbarrier_wait(&smem.k_empty[k_ring.stage], k_ring.parity);
            if constexpr (C::kLight) smem.blocks.of[k_ring.stage] = told; // read before k_empty, visible with k_full
            mbarrier_arrive_expect(&smem.k_full[k_ring.stage], Smem::kKeyBytes);
            tma_load_tile<C::kHeadDim, C::kTileN>(smem.k[k_ring.stage], &p.k, &smem.k_full[k_ring.stage], first_key,
                                                  k_head, k_batch, kEvictLast);
            k_ring.advance();
        };
        auto load_values = [&](int first_key) {
            mbarrier_wait(&smem.v_empty[v_ring.stage], v_ring.parity);
            mbarrier_arrive_expect(&smem.v_full[v_ring.stage], Smem::kKeyBytes);
            tma_load_tile<C::kHeadDim, C::kTileN>(smem.v[v_ring.stage], &p.v, &smem.v_full[v_ring.stage], first_key,
                                                  v_head, v_batch, kEvictLast);
            v_ring.advance();
        };
        auto first_key_of = [&](int block) { return blocks.end - (block + 1) * C::kTileN; };
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
            const ToldBlocks<C> told(p, blocks, tile);
            BlockWord word = told.at(0), after = {};
            if (!word.last()) after = told.at(1);
            load_keys(word.first_key(), word);
            load_queries();
            next = announce(next_index);
            for (int block = 1; !word.last(); ++block) {
                const int before = word.first_key();
                word = after;
                if (!word.last()) after = told.at(block + 1); // on its way while stages are waited for
                load_keys(word.first_key(), word);
                load_values(before);
            }
            load_values(word.first_key());
        } else {
            load_keys(first_key_of(0));
            load_queries();
            next = announce(next_index);
            for (int block = 1; block < blocks.count; ++block) {
                load_keys(first_key_of(block));
                load_values(first_key_of(block - 1));
            }
            load_values(first_key_of(blocks.count - 1));
        }
    }
}

} // namespace fa::sm90
