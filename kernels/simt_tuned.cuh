/* Written by `python -m bench tune simt --write`, not by hand; the run: bench/evidence/tune-simt.json.
 * B1,H8,S512,D64,float16 on NVIDIA H200, 2026-11-21 03:45 UTC: 23.03 us,
 * 0.958 [0.958, 0.958] of the time of the configuration set by hand;
 * error against float64 2.07e-04; 34 of 2388 configurations tried; sources 9e1bf097c6966f98. */
#ifndef FA_SIMT_TUNED_CUH
#define FA_SIMT_TUNED_CUH

#include "simt_tile.cuh" // Tile

namespace simt {

// HEAD_DIM, BLOCK_M, BLOCK_N, NUM_WARPS, KEY_GROUPS, SYNC_POLICY, MIN_BLOCKS, VEC_WIDTH, REDUCE
constexpr Tile TUNED_64 = {64, 32, 64, 8, 4, 2, 1, 0, 0};

} // namespace simt

#endif
