#ifndef FA_SIMT_TUNED_CUH
#define FA_SIMT_TUNED_CUH

#include "simt_tile.cuh" // Tile

namespace simt {

// HEAD_DIM, BLOCK_M, BLOCK_N, NUM_WARPS, KEY_GROUPS, SYNC_POLICY, MIN_BLOCKS, VEC_WIDTH, REDUCE
constexpr Tile TUNED_64 = {64, 32, 64, 8, 4, 2, 1, 0, 0};

} // namespace simt

#endif
