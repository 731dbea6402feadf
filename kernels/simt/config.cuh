/* simt: its tiles, and the plan of a launch as the host's file makes it and instances read it. */
#pragma once
#include "common/launch.cuh" // fa_own
#include "simt/tile.cuh"     // Tile, Options
#include "simt/tuned.cuh"    // kTuned64

/* ---- configuration ---- */

#ifndef VEC_WIDTH
#define VEC_WIDTH 0 // elements a global load, 1 to 8; 0: 16 bytes
#endif
#ifndef REDUCE
#define REDUCE 0 // 0: row maxima by warp shuffles; 1: through shared memory
#endif

namespace fa::simt {

constexpr Tile tile(int head_dim, int block_m, int block_n, int warps, int groups, int sync, int blocks) {
    return {head_dim, block_m, block_n, warps, groups, sync, blocks, VEC_WIDTH, REDUCE};
}

#if defined(HEAD_DIM) || defined(BLOCK_M) || defined(BLOCK_N) || defined(NUM_WARPS) || defined(KEY_GROUPS) ||          \
    defined(SYNC_POLICY)

/* A build with one tile, for head_dim up to HEAD_DIM: what a tuner compiles. */
#ifndef HEAD_DIM
#define HEAD_DIM 64
#endif
#ifndef BLOCK_M
#define BLOCK_M 128
#endif
#ifndef BLOCK_N
#define BLOCK_N 64
#endif
#ifndef NUM_WARPS
#define NUM_WARPS 4
#endif
#ifndef KEY_GROUPS
#define KEY_GROUPS 1 // groups of warps
#endif
#ifndef SYNC_POLICY
#define SYNC_POLICY 0 // kSyncSeparate (1) + kSyncPrefetch (2)
#endif
#ifndef MIN_BLOCKS
#define MIN_BLOCKS 1 // thread blocks a multiprocessor that the registers must allow
#endif
constexpr Tile kTiles[] = {tile(HEAD_DIM, BLOCK_M, BLOCK_N, NUM_WARPS, KEY_GROUPS, SYNC_POLICY, MIN_BLOCKS)};
constexpr Tile kServeTiles[] = {tile(HEAD_DIM, 32, 32, 4, HEAD_DIM > 128 ? 1 : 2, 0, 1)};

#else

/* By head_dim, and within it by falling BLOCK_M: for many query rows, then those that fill the GPU with fewer, last one
 * for a handful. For each use there is one within the 99 KB a thread block of sm_86 and sm_89: where two tiles have the
 * same rows and groups, the second is for them. */
constexpr Tile kTiles[] = {
    // head_dim, BLOCK_M, BLOCK_N, NUM_WARPS, KEY_GROUPS, SYNC_POLICY, MIN_BLOCKS
    tile(64, 128, 64, 4, 1, 2, 2),  //  85 KB
    tile(64, 64, 64, 8, 2, 2, 1),   //  85 KB
    kTuned64,                       // the tuner's, for few query rows
    tile(64, 32, 32, 8, 4, 2, 1),   //  60 KB
    tile(64, 4, 32, 8, 8, 2, 1),    //  74 KB
    tile(128, 128, 64, 8, 1, 2, 1), // 133 KB
    tile(128, 64, 64, 4, 1, 2, 2),  //  83 KB
    tile(128, 64, 64, 8, 2, 2, 1),  // 133 KB
    tile(128, 32, 32, 8, 2, 2, 1),  //  59 KB
    tile(128, 4, 16, 8, 8, 2, 2),   //  71 KB
    tile(256, 64, 32, 8, 2, 0, 1),  // 148 KB
    tile(256, 32, 32, 4, 1, 0, 3),  //  70 KB
    tile(256, 32, 32, 8, 4, 0, 1),  // 181 KB
    tile(256, 4, 16, 4, 4, 2, 2),   //  70 KB
};

/* By head_dim alone: what else decided would be seen in the bits of a sequence. At most 32 rows, one a lane. */
constexpr Tile kServeTiles[] = {
    tile(64, 32, 32, 8, 4, 0, 1),  // 60 KB and 3 of indices
    tile(128, 32, 32, 8, 2, 0, 1), // 59 KB and 2
    tile(256, 32, 32, 4, 1, 0, 2), // 70 KB and 1
};

#endif

[[maybe_unused]] constexpr int kTileCount = sizeof(kTiles) / sizeof(kTiles[0]);

[[maybe_unused]] constexpr int kServeTileCount = sizeof(kServeTiles) / sizeof(kServeTiles[0]);

constexpr bool tiles_are_valid() {
    for (const Tile &t : kTiles)
        if (!t.valid()) return false;
    for (const Tile &t : kServeTiles)
        if (!t.valid()) return false;
    return true;
}
static_assert(tiles_are_valid(), "BLOCK_M must be a multiple of 4 NUM_WARPS / KEY_GROUPS, BLOCK_N of 8, HEAD_DIM of 32 "
                                 "up to 256; KEY_GROUPS must divide NUM_WARPS and be at most 15; SYNC_POLICY 0..3, "
                                 "REDUCE 0..1, VEC_WIDTH 0, 1, 2, 4 or 8; the tile must fit 227 KB of shared memory");

/* Shared memory of an instance that serves, beside its tile's: at most. */
[[maybe_unused]] constexpr size_t kServeExtraBytes = 4096;

/* The plan's own part. */
struct Own {
    int tile;   // of kTiles, or of kServeTiles
    bool serve; // by the instances of serve.cuh
    Options options;
};

/* Launches the instance of a dtype. */
using Launch = fa_code(const fa_problem &, const fa_plan &, const fa_launch &);

} // namespace fa::simt
