/* wgmma_sm90, wgmma_dropout_sm90: tiles of each head_dim and kind, what the launches of their instances take. */
#pragma once
#include "sm90/common/instance.cuh"
#include "sm90/forward/kernel.cuh"

namespace fa::sm90 {

/* Shape of a kernel. */
struct Tiling {
    int consumers;    // warpgroups of 64 query rows
    int tile_n;       // keys a block
    int stages;       // of the rings of key and of value blocks
    int query_stages; // query tiles
    bool turns;       // the warpgroups issue their products in turns
    bool overlap;     // a block's exponentials run under P V of the block before, with two sets of weights
    bool half;        // a warpgroup that sees only half of its first block multiplies that half alone
    bool late;        // a turn passes when its scores are there, not when its products are issued
    int cap_terms;    // softcap by a polynomial of 2 or 3 terms where the scores allow; 0: by the MUFU alone
    bool staged;      // the output goes through shared memory of its own
    bool counter;     // tiles of unequal length always come from a counter
};

/* Measured on an H200; shared memory (227 KiB) and registers bound tile_n. */
constexpr Tiling tiling(int head_dim, int kind) {
    const bool full = kind == kFull, masked = kind == kMasked, capped = kind == kCapped;
    Tiling t = {};
    t.consumers = 2, t.tile_n = 128, t.stages = 2, t.query_stages = head_dim <= 128 ? 2 : 1, t.turns = true;
    t.staged = head_dim <= 128;
    t.cap_terms = !capped || head_dim > 128 ? 0 : head_dim > 96 ? 2 : 3;
    if (head_dim <= 64) {
        t.consumers = 3, t.tile_n = capped ? 96 : 128, t.stages = 4;
        t.half = masked, t.late = !masked, t.counter = true;
    } else if (head_dim <= 128) {
        t.overlap = t.cap_terms != 3;
    } else if (head_dim <= 192) {
        t.tile_n = full ? 96 : 112, t.overlap = full;
    } else {
        t.tile_n = full ? 80 : 64, t.late = full;
    }
    if (kind == kDropout) t.consumers = 2, t.half = t.late = t.overlap = false; // registers for the generator
    if (kind == kLight || kind == kGeneral) t.half = t.late = false;
    if (kind == kGeneral) t.consumers = 2, t.overlap = false; // registers for the bias
#ifdef FA_CONSUMERS                                           // from here on: a tuner's choice
    t.consumers = FA_CONSUMERS;
#endif
#ifdef FA_TILE_N
    t.tile_n = FA_TILE_N;
#endif
#ifdef FA_STAGES
    t.stages = FA_STAGES;
#endif
#ifdef FA_QUERY_STAGES
    t.query_stages = FA_QUERY_STAGES;
#endif
#ifdef FA_TURNS
    t.turns = FA_TURNS;
#endif
#ifdef FA_OVERLAP
    t.overlap = FA_OVERLAP;
#endif
#ifdef FA_HALF
    t.half = FA_HALF;
#endif
#ifdef FA_LATE
    t.late = FA_LATE;
#endif
#ifdef FA_CAP_TERMS
    t.cap_terms = FA_CAP_TERMS;
#endif
#ifdef FA_STAGED
    t.staged = FA_STAGED;
#endif
#ifdef FA_COUNTER
    t.counter = FA_COUNTER;
#endif
    return t;
}

template <class T, int HeadDim, int Kind> struct Config {
    static constexpr Tiling kTiling = tiling(HeadDim, Kind);
    using Element = T;
    static constexpr int kHeadDim = HeadDim, kConsumers = kTiling.consumers, kTileM = 64 * kConsumers,
                         kTileN = kTiling.tile_n, kStages = kTiling.stages, kQueryStages = kTiling.query_stages;
    static constexpr bool kMasked = Kind != kFull, kSoftcap = Kind == kCapped, kTurns = kConsumers > 1 && kTiling.turns,
                          kOverlap = kTiling.overlap, kHalfBlocks = kMasked && kTiling.half,
                          kLateTurns = kTurns && kTiling.late, kStaged = kTiling.staged;
    static constexpr bool kDropout = Kind == sm90::kDropout, kBias = Kind == kGeneral,
                          kLight = kBias || Kind == sm90::kLight;
    static constexpr int kCapTerms = kSoftcap ? kTiling.cap_terms : 0;
    // 64 Ki registers: what the consumers leave is the producer's.
#ifdef FA_CHAOS // whose delays need some there too
    static constexpr int kConsumerRegisters = kConsumers == 1 ? 240 : kConsumers == 2 ? 232 : 160;
    static constexpr int kProducerRegisters = kConsumers == 1 ? 72 : kConsumers == 2 ? 40 : 32;
#else
    static constexpr int kConsumerRegisters = kConsumers == 1 ? 256 : kConsumers == 2 ? 240 : 160;
    static constexpr int kProducerRegisters = kConsumers == 1 ? 56 : kConsumers == 2 ? 24 : 32;
#endif
    static_assert(kTileN % (kHalfBlocks ? 32 : 16) == 0 && kTileN <= 256);
    static_assert(HeadDim % 16 == 0 && HeadDim <= FA_MAX_HEAD_DIM);
#ifndef FA_CHAOS
    static_assert(kTileN / 2 + (kOverlap || kBias ? 2 : 1) * kTileN / 4 + HeadDim / 2 + 24 <= kConsumerRegisters,
                  "scores, weights, bias and output");
#endif
};

/* Launches an instance; what the params have of options that it lacks says nothing. */
using Launch = fa_code(const LightForwardParams &, int64_t blocks, const fa_launch &);

} // namespace fa::sm90
