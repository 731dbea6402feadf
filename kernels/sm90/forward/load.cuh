/* The Hopper forward kernel: the producer's thread. */
#pragma once
#include "sm90/forward/params.cuh"

namespace fa::sm90 {

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

} // namespace fa::sm90
