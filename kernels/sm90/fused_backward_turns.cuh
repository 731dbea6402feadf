/* The order of additions to dq of wgmma_fused_backward_sm90, for deterministic=True.
 *
 * A block of queries has a counter, its turn. Tiles of keys add to its sums from the last to the first; of those that
 * see it, which follow each other, the first stores, and each passes the turn on to the next. So the order is a head's
 * own: it depends on neither the number of multiprocessors nor what they do. A tile visits its blocks from the first:
 * with causal each tile begins a tile's length past the one that adds after it, so that tiles that start together find
 * their turns there, at a turn's way of up to a step.
 *
 * Why nobody waits for ever: CTAs take all their tiles, the first one included, from one counter, of a head from the
 * last to the first. A tile waits for tiles of lower index alone. Who has those runs: it took them before, and finishes
 * its tiles in the order in which it took them. So of the tiles that are not done the one of lowest index waits for
 * nobody, however few of the CTAs are resident. A CTA takes its next tile when it loads the last step of the one
 * before: taken a tile ahead, a tile is held up for as long as the one before lasts, and with it all those of its head.
 *
 * One thread keeps the turns of a CTA, so that the ways to memory and back are nobody else's: it waits for a turn,
 * has the consumers add their dQ, and passes the turn on once they have. The turn is acquired and released at the GPU's
 * scope; between it and the consumers stand `open` and `done`.
 *
 * Why no waiter falls two phases behind: `done` has one waiter, the keeper, without which `open` does not go on. All
 * warps wait for `open`; its next phase ends after the same phase of `done`, where each warp arrives for itself, past
 * its own wait. The keeper waits for tile_full as consumers do, and arrives at tile_empty for itself.
 *
 * Within a CTA the keeper waits for turns and for what all warps do without it, up to the step whose turn it has; they
 * wait for it with at most the next step's dQ in their hands. */
#pragma once
#include "sm90/fused_backward_config.cuh"

namespace fa::sm90 {

/* Waits for `turn`: what who passed it on had done is done. One thread. */
__device__ __forceinline__ void wait_turn(const uint32_t *counter, uint32_t turn, int site = __builtin_LINE()) {
    FA_CHAOS_POINT(site);
#ifdef FA_CHAOS
    const uint32_t begun = chaos::now();
#endif
    for (;;) {
        uint32_t now;
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
        if (now == turn) return;
#ifdef FA_CHAOS
        chaos::limit(begun, site, turn);
#endif
    }
}

/* Lets `turn` go on, with all that this thread knows to be done. */
__device__ __forceinline__ void pass_turn(uint32_t *counter, uint32_t turn, int site = __builtin_LINE()) {
    FA_CHAOS_POINT(site);
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(counter), "r"(turn) : "memory");
}

template <class C> __device__ __forceinline__ void fused_keep_turns(const OrderedFusedParams &p, FusedSmem<C> &smem) {
    using Smem = FusedSmem<C>;
    uint32_t parity = 0;
    for (uint32_t round = 0;; ++round) {
        const uint32_t slot = round % Smem::kTileStages;
        mbarrier_wait(&smem.tile_full[slot], round / Smem::kTileStages % 2);
        const int tile_row = smem.tile[slot].row;
        const uint32_t tile_head = smem.tile[slot].head;
        mbarrier_arrive(&smem.tile_empty[slot]);
        if (tile_row < 0) return;
        const uint32_t turn = p.schedule.query_tiles - 1 - uint32_t(tile_row) / C::kTileK;
        const FusedWalk later = fused_walk<C>(p.call, tile_row + C::kTileK); // of the tile that adds before
        for (FusedWalk walk = fused_walk<C>(p.call, tile_row); walk.begin < walk.end && walk.member < p.call.group;
             walk.advance(), parity ^= 1) {
            const uint32_t block = (tile_head * p.call.group + walk.member) * p.row_block_count + walk.block;
            const bool first = walk.block < later.begin || walk.block >= later.end;
            if (!first) wait_turn(p.turns + block, turn);
            smem.turns.block = make_uint2(block, first);
            mbarrier_arrive(&smem.turns.open);
            mbarrier_wait(&smem.turns.done, parity);
            pass_turn(p.turns + block, turn + 1);
        }
    }
}

} // namespace fa::sm90
