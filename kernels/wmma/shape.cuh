/* Block shapes of the wmma row: how many warps and rows, how long a key tile, what lies in shared memory. */
#pragma once

#include <stdint.h> // uint64_t

#include "wmma/softmax.cuh" // SCORE_PITCH, STRIP_ROWS
#include "wmma/tile.cuh"    // PITCH, WARP

namespace fa::wmma_row {

template <int HEAD_DIM_, int CONSUMERS_, int TILE_N_, int BLOCKS_, bool QUERY_IN_REGISTERS_> struct Shape {
    static constexpr int HEAD_DIM = HEAD_DIM_, STEPS = HEAD_DIM / 16;
    static constexpr int CONSUMERS = CONSUMERS_; // warps of STRIP_ROWS query rows each
    static constexpr int TILE_N = TILE_N_;
    static constexpr int BLOCKS = BLOCKS_; // wanted on a multiprocessor
    static constexpr int STAGES = 2;
    static constexpr int TILE_M = CONSUMERS * STRIP_ROWS;
    static constexpr int THREADS = (CONSUMERS + 1) * WARP;
    static constexpr bool QUERY_IN_REGISTERS = QUERY_IN_REGISTERS_;   // else loaded anew for each key tile
    static constexpr int SCORE_PITCH = wmma_row::SCORE_PITCH<TILE_N>; // floats
    static constexpr int WEIGHT_PITCH = PITCH<TILE_N>;
    static constexpr int OUT_COLUMNS = TILE_N < 64 ? 32 : 64; // of the output that pass through a strip at a time

    struct Shared {
        alignas(128) char k[STAGES][TILE_N * PITCH<HEAD_DIM> * 2];
        alignas(128) char v[STAGES][TILE_N * PITCH<HEAD_DIM> * 2];
        alignas(128) float strip[CONSUMERS][STRIP_ROWS * SCORE_PITCH];
        alignas(128) char q[CONSUMERS][QUERY_IN_REGISTERS ? 128 : STRIP_ROWS * PITCH<HEAD_DIM> * 2];
        alignas(128) float factor[CONSUMERS][STRIP_ROWS];
        alignas(8) uint64_t k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
    };
    static_assert(HEAD_DIM % OUT_COLUMNS == 0 && TILE_N % 16 == 0);
    static_assert(!QUERY_IN_REGISTERS || SCORE_PITCH * 4 >= PITCH<HEAD_DIM> * 2, "the strip must hold the query rows");
};

/* The shapes of a padded head_dim. One block of many consumers keeps one producer busy and every register in use; where
 * that leaves multiprocessors without a block, and where its shared memory does not fit (99 KB on sm_86 and sm_89), the
 * small shape runs. */
template <int HEAD_DIM, bool WIDE> struct Config;
// head_dim, consumers, tile_n, blocks, query in registers
template <> struct Config<64, false> : Shape<64, 4, 64, 3, false> {};
template <> struct Config<64, true> : Shape<64, 11, 64, 1, true> {};
template <> struct Config<128, false> : Shape<128, 5, 48, 2, false> {};
template <> struct Config<128, true> : Shape<128, 11, 64, 1, false> {};
static_assert(sizeof(Config<64, false>::Shared) <= 99 << 10 && sizeof(Config<128, false>::Shared) <= 99 << 10,
              "a small shape runs everywhere");

} // namespace fa::wmma_row
