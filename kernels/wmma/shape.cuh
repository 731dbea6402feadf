/* Block shapes of the wmma kernel: how many warps and rows, how long a key tile, what lies in shared memory. */
#pragma once

#include <stdint.h> // uint64_t

#include "wmma/softmax.cuh" // kScorePitch, kStripRows
#include "wmma/tile.cuh"    // kPitch, kWarp

namespace fa::wmma_tiles {

template <int kHeadDim_, int kConsumers_, int kTileN_, int kBlocks_, bool kQueryInRegisters_> struct Shape {
    static constexpr int kHeadDim = kHeadDim_, kSteps = kHeadDim / 16;
    static constexpr int kConsumers = kConsumers_; // warps of kStripRows query rows each
    static constexpr int kTileN = kTileN_;
    static constexpr int kBlocks = kBlocks_; // wanted on a multiprocessor
    static constexpr int kStages = 2;
    static constexpr int kTileM = kConsumers * kStripRows;
    static constexpr int kThreads = (kConsumers + 1) * kWarp;
    static constexpr bool kQueryInRegisters = kQueryInRegisters_;       // else loaded anew for each key tile
    static constexpr int kScorePitch = wmma_tiles::kScorePitch<kTileN>; // floats
    static constexpr int kWeightPitch = kPitch<kTileN>;
    static constexpr int kOutColumns = kTileN < 64 ? 32 : 64; // of the output that pass through a strip at a time

    struct Shared {
        alignas(128) char k[kStages][kTileN * kPitch<kHeadDim> * 2];
        alignas(128) char v[kStages][kTileN * kPitch<kHeadDim> * 2];
        alignas(128) float strip[kConsumers][kStripRows * kScorePitch];
        alignas(128) char q[kConsumers][kQueryInRegisters ? 128 : kStripRows * kPitch<kHeadDim> * 2];
        alignas(128) float factor[kConsumers][kStripRows];
        alignas(8) uint64_t k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
    };
    static_assert(kHeadDim % kOutColumns == 0 && kTileN % 16 == 0);
    static_assert(!kQueryInRegisters || kScorePitch * 4 >= kPitch<kHeadDim> * 2, "the strip must hold the query rows");
};

/* The shapes of a padded head_dim. One block of many consumers keeps one producer busy and every register in use; where
 * that leaves multiprocessors without a block, and where its shared memory does not fit (99 KB on sm_86 and sm_89), the
 * small shape runs. */
template <int kHeadDim, bool kWide> struct Config;
// head_dim, consumers, tile_n, blocks, query in registers
template <> struct Config<64, false> : Shape<64, 4, 64, 3, false> {};
template <> struct Config<64, true> : Shape<64, 11, 64, 1, true> {};
template <> struct Config<128, false> : Shape<128, 5, 48, 2, false> {};
template <> struct Config<128, true> : Shape<128, 11, 64, 1, false> {};
static_assert(sizeof(Config<64, false>::Shared) <= 99 << 10 && sizeof(Config<128, false>::Shared) <= 99 << 10,
              "a small shape runs everywhere");

} // namespace fa::wmma_tiles
