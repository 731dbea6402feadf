/* simt_backward: its tiles, and the plan of a launch as the host's file makes it and instances read it. */
#pragma once
#include "common/launch.cuh" // fa_own
#include "simt/backward.cuh" // Tile

namespace simt_backward {

/* By head_dim, the first that fits: the larger tile, then one within the 99 KB a thread block of sm_86 and sm_89. */
constexpr Tile kTiles[] = {
    {64, 64},  //  87 KB
    {128, 64}, // 153 KB
    {128, 32}, //  73 KB
    {256, 32}, // 138 KB
    {256, 16}, //  68 KB
};
constexpr int kTileCount = sizeof(kTiles) / sizeof(kTiles[0]);

/* The plan's own part. */
struct Own {
    int tile;      // of kTiles
    int64_t pairs; // batch entries times kv heads whose rows the workspace holds
};

/* Launches the instance of a dtype. */
using Launch = fa_code(const fa_problem &, const fa_plan &, const fa_launch &);

} // namespace simt_backward
