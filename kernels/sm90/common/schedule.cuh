/* Which output tiles a persistent CTA computes, in which order, and which key blocks a tile needs. */
#pragma once
#include <stdint.h> // uint32_t

#include "common/mask.cuh"         // ShiftedBand, tile_span
#include "common/tiles.cuh"        // longest_first
#include "sm90/common/barrier.cuh" // mbarrier_wait, RingState

namespace fa::sm90 {

/* Tiles of a call. Plain order: query tiles of one head follow each other, so that CTAs in flight share few heads'
 * keys. Longest-first order (causal): heads go in sections whose keys and values fit in L2, each section from its last
 * query tile to its first. CTAs then take the next tile from a counter, or, without one, every gridDim.x-th tile with
 * each second round backwards, which evens out their sums where a section is a whole number of pairs of rounds. */
struct Schedule {
    uint32_t tiles;         // query tiles * heads * batch
    uint32_t query_tiles;   // of one head
    uint32_t heads;         // query heads of one batch entry
    uint32_t section_heads; // (batch, head) pairs a section; 0: plain order
    uint32_t *counter;      // zero at launch; NULL: static order
};

struct alignas(16) Tile {
    int row; // first query row; negative: no more tiles
    int head, batch;
    int span; // of a call over sequences: whose tile it is
};

__device__ __forceinline__ Tile tile_at(const Schedule &s, uint32_t index, int tile_m) {
    if (index >= s.tiles) return {-1};
    uint32_t query_tile, pair;
    if (s.section_heads == 0) {
        pair = index / s.query_tiles;
        query_tile = index - pair * s.query_tiles;
    } else {
        const SectionPlace place = longest_first(index, s.tiles, s.query_tiles, s.section_heads);
        query_tile = place.tile;
        pair = place.head;
    }
    const uint32_t batch = pair / s.heads;
    return {int(query_tile) * tile_m, int(pair - batch * s.heads), int(batch), 0};
}

/* Index of this CTA's tile in `round` of the static order; at or past s.tiles: none (and none in later rounds). */
__device__ __forceinline__ uint32_t static_tile(const Schedule &s, uint32_t round) {
    const bool backwards = s.section_heads != 0 && (round & 1);
    return round * gridDim.x + (backwards ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
}

/* The same from the counter: round 0 needs none. One thread a CTA. */
__device__ __forceinline__ uint32_t dynamic_tile(const Schedule &s, uint32_t round) {
    return round == 0 ? blockIdx.x : gridDim.x + atomicAdd(s.counter, 1);
}

/* Index of this CTA's tile in `round`, in whichever order. One thread a CTA. */
template <bool kUnequal> __device__ __forceinline__ uint32_t next_tile(const Schedule &s, uint32_t round) {
    if (!kUnequal || !s.counter) return static_tile(s, round);
    return dynamic_tile(s, round);
}

/* The producer hands a tile to the consumers: Smem has tile[], and tile_full[] and tile_empty[] of kTileStages. */
template <class Smem>
__device__ __forceinline__ void announce_tile(Smem &smem, RingState<Smem::kTileStages> &ring, const Tile &tile) {
    mbarrier_wait(&smem.tile_empty[ring.stage], ring.parity);
    smem.tile[ring.stage] = tile;
    mbarrier_arrive(&smem.tile_full[ring.stage]);
    ring.advance();
}

/* First row of the tile of `round`, once it is there; negative: no more tiles. The warp calls it. */
template <class Smem> __device__ __forceinline__ int tile_row_of(Smem &smem, uint32_t round) {
    mbarrier_wait(&smem.tile_full[round % Smem::kTileStages], round / Smem::kTileStages % 2);
    return __shfl_sync(0xffffffff, smem.tile[round % Smem::kTileStages].row, 0); // uniform for the compiler too
}

/* Key blocks of a tile, visited from the last to the first: block b holds keys [end - (b + 1) * tile_n, end - b *
 * tile_n). The first block may start below 0; TMA reads zeros there and the mask excludes them. */
struct KeyBlocks {
    int end, count;
};

template <bool Masked, int TileN>
__device__ __forceinline__ KeyBlocks key_blocks(const ShiftedBand &v, int row_begin, int row_end) {
    if (!Masked) {
        const int count = (v.seq_k + TileN - 1) / TileN;
        return {count * TileN, count};
    }
    const int begin = begin_of(v, row_begin), end = end_of(v, row_end - 1);
    return {end, end > begin ? (end - begin + TileN - 1) / TileN : 0};
}

} // namespace fa::sm90
