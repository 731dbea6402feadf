/* Written by `python -m bench tune simt --write`, not by hand; the run: bench/evidence/tune-simt.json.
 * B1,H8,S512,D64,float16 on NVIDIA H200, 2026-11-21 04:16 UTC: 23.35 us,
 * 0.963 [0.963, 0.963] of the time of the configuration set by hand;
 * error against float64 2.07e-04; 36 of 2388 configurations tried; sources 1c974d0d028265d8. */
#pragma once

#include "simt/tile.cuh" // Tile

namespace fa::simt {

// HEAD_DIM, BLOCK_M, BLOCK_N, NUM_WARPS, KEY_GROUPS, SYNC_POLICY, MIN_BLOCKS, VEC_WIDTH, REDUCE
constexpr Tile kTuned64 = {64, 32, 64, 8, 4, 2, 1, 0, 0};

} // namespace fa::simt
