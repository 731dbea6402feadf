/* The order of additions to dq of wgmma_fused_backward_sm90, for deterministic=True, and for few keys in any order.
 *
 * A block of queries has a counter, its turn. Tiles of keys add to its sums from the last to the first; of those that
 * see it, which follow each other, the first stores, the last makes dq of the sums and its own part, and each passes
 * the turn on to the next. So the order is a head's own: it depends on neither the number of multiprocessors nor what
 * they do. A tile visits its blocks from the first: with causal each tile begins a tile's length past the one that adds
 * after it, so that tiles that start together find their turns there, at a turn's way of up to a step.
 *
 * Why every wait ends: CTAs take all their tiles, the first one included, from one counter, of a head from the last to
 * the first. A tile waits for tiles of lower index alone. The CTAs that have those are running: they took them before,
 * and a CTA finishes its tiles in the order in which it took them. So of the unfinished tiles the one of lowest index
 * waits for no other, however few of the CTAs are resident. A tile taken well ahead would be held up for as long as the
 * one before lasts, and with it all those of its head.
 *
 * Over sequences the same holds for each head of each sequence: sums and turns are its own, and turns count its tiles
 * alone. These follow one another in the list, in sections of heads, those of a head from the last to the first
 * (tell_tiles()). Spare tiles add nothing, so that nobody waits for them.
 *
 * Of the kind kLight a mask may hide all pairs of a tile and a block: the tile then has no step there, and the turn of
 * the block counts the tiles that have one alone (light_steps.cuh), so that nobody waits for it. The order is that of
 * the call and its mask. All that waits is as above: a tile still waits for tiles of lower index alone, and steps that
 * are left out are steps of nobody, so that phases of `open`, `done` and `seen` follow one another as before.
 *
 * Two threads keep the turns of a CTA, so that no other thread takes the ways to memory and back: one waits for a
 * step's turn and opens the step, the other passes the turn on once the consumers have added their dQ. A step is
 * opened while the one before is added: with one thread for both, a turn's way there and its way back lay between
 * two steps. Turns are acquired and released at the GPU's scope; between them and the consumers stand `open` and
 * `done`.
 *
 * Why no waiter falls two phases behind, of `open`, `done` and `seen`, each of which two steps further on is used
 * again: the thread that opens waits for `seen` of a step before it opens the one after the next, and no other thread
 * waits for it. The thread that passes turns on arrives there past its waits for `open` and `done` of that step, and
 * `done` has the arrivals of all consumers' warps past their wait for `open`. The opener waits for tile_full as
 * consumers do, and arrives at tile_empty for itself.
 *
 * Within a CTA the opener waits for turns and for what all warps do without it, up to the step whose turn it has;
 * the thread that passes turns on waits for the steps that were opened. Consumers wait for the opener with at most the
 * next step's dQ in their hands. */
#pragma once
#include <climits> // UINT_MAX

#include "sm90/fused_backward/config.cuh"

namespace fa::sm90 {

/* Waits for `turn`: all that the CTA before had done is visible then. One thread. */
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

/* Tiles of keys of a head. */
__device__ __forceinline__ uint32_t key_tiles_of(const FusedParams &p, const BackwardCall &) {
    return p.schedule.query_tiles;
}
__device__ __forceinline__ uint32_t key_tiles_of(const FusedParams &, const SequenceCall &call) {
    return call.tiles[kTilesOfKeys];
}

/* Opens each step of the CTA's tiles when its turn has come. One thread. */
template <class C> __device__ __forceinline__ void fused_open_steps(const OrderedFusedParams &p, FusedSmem<C> &smem) {
    using Smem = FusedSmem<C>;
    auto &turns = smem.turns;
    uint32_t step = 0;
    const auto open = [&](uint32_t block, uint32_t place, uint32_t turn) {
        const uint32_t at = step % 2;
        if (step >= 2) mbarrier_wait(&turns.seen[at], step / 2 % 2 ^ 1);
        turns.block[at] = 4 * block + place, turns.turn[at] = turn;
        mbarrier_arrive(&turns.open[at]);
        ++step;
    };
    for (uint32_t round = 0;; ++round) {
        const uint32_t slot = round % Smem::kTileStages;
        mbarrier_wait(&smem.tile_full[slot], round / Smem::kTileStages % 2);
        const int tile_row = smem.tile[slot].row;
        const uint32_t tile_head = smem.tile[slot].head;
        int light_count = 0;
        if constexpr (C::kLight) light_count = smem.tile[slot].span;
        if constexpr (!C::kSequences) mbarrier_arrive(&smem.tile_empty[slot]);
        if (tile_row < 0) break;
        if constexpr (C::kLight) {
            const Tile tile = {tile_row, int(tile_head), 0, light_count};
            for (auto walk = steps_of<C>(p, p.call, tile); walk.more(0); walk.advance()) {
                const uint32_t block = (tile_head * p.call.group + walk.member) * p.row_block_count + walk.block;
                if (!(walk.step->place & kAddsFirst)) wait_turn(p.turns + block, walk.step->turn);
                open(block, walk.step->place, walk.step->turn);
            }
            continue;
        }
        const auto &call = call_of<C>(p, smem, round);
        const uint32_t turn = key_tiles_of(p, call) - 1 - uint32_t(tile_row) / C::kTileK;
        const FusedWalk before = fused_walk<C>(p, call, tile_row + C::kTileK); // of the tile that adds before this one
        const FusedWalk after = fused_walk<C>(p, call, tile_row - C::kTileK);
        const uint32_t first_block = first_row_block(call);
        for (FusedWalk walk = fused_walk<C>(p, call, tile_row); walk.begin < walk.end && walk.member < p.call.group;
             walk.advance()) {
            const uint32_t block =
                (tile_head * p.call.group + walk.member) * p.row_block_count + first_block + walk.block;
            const bool first = walk.block < before.begin || walk.block >= before.end;
            const bool last = walk.block < after.begin || walk.block >= after.end;
            if (!first) wait_turn(p.turns + block, turn);
            open(block, (first ? kAddsFirst : 0) | (last ? kAddsLast : 0), turn);
        }
        if constexpr (C::kSequences) mbarrier_arrive(&smem.tile_empty[slot]);
    }
    open(0, 0, UINT_MAX);
}

/* Passes on the turn of each step that the consumers have added. One thread. */
template <class C> __device__ __forceinline__ void fused_pass_turns(const OrderedFusedParams &p, FusedSmem<C> &smem) {
    auto &turns = smem.turns;
    for (uint32_t step = 0;; ++step) {
        const uint32_t at = step % 2, parity = step / 2 % 2;
        mbarrier_wait(&turns.open[at], parity);
        const uint32_t block = turns.block[at] / 4, turn = turns.turn[at];
        if (turn == UINT_MAX) return;
        mbarrier_wait(&turns.done[at], parity);
        mbarrier_arrive(&turns.seen[at]);
        pass_turn(p.turns + block, turn + 1);
    }
}

} // namespace fa::sm90
