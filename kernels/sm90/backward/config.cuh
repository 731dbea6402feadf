/* wgmma_backward_sm90: tiles of each head_dim and kind, the work of a launch. */
#pragma once
#include "sm90/backward/keys_pair.cuh"
#include "sm90/backward/keys_wide.cuh"
#include "sm90/backward/queries.cuh"
#include "sm90/common/instance.cuh"

namespace fa::sm90 {

/* Shape of the two kernels, two warpgroups each. A tuner's values replace these. */
struct BackwardTiling {
    int tile_n, stages;                   // queries kernel: keys a block, rings of keys and of values
    bool turns;                           // its warpgroups issue their products in turns
    bool overlap;                         // a block's dQ is in flight with the next block's S and dP
    int tile_q, query_stages, key_stages; // keys kernel: queries a step, ring of steps, tiles of keys
    int rows_ahead;                       // its rows read before the wait for their products: 1 LSE, 2 delta too
    int value_stages, dout_stages;        // from 192 columns on: rings of values and of dO apart from the others
    bool key_turns;                       // turns in keys_pair.cuh
};

constexpr BackwardTiling backward_tiling(int head_dim, int head_dim_v, int kind) {
    BackwardTiling t = {128, 2, true, false, 64, 4, 1, 1};
    if (head_dim <= 64) t = {128, 4, true, true, 64, 6, 2, 2};
    if (head_dim > 128) t = {64, 3, true, true, 64, 3, 1, 1, 2, 3};
    if (head_dim > 192) t = {64, 2, true, false, 64, 2, 1, 1, 1, 2};
    if (head_dim != head_dim_v) t = {80, 3, true, true, 64, 3, 1, 1, 2, 0, true};
    if (head_dim != head_dim_v && kind == kCapped) t.tile_q = 32, t.query_stages = 6;
#ifdef FA_TILE_N
    t.tile_n = FA_TILE_N;
#endif
#ifdef FA_STAGES
    t.stages = FA_STAGES;
#endif
#ifdef FA_TURNS
    t.turns = FA_TURNS;
#endif
#ifdef FA_OVERLAP
    t.overlap = FA_OVERLAP;
#endif
#ifdef FA_TILE_Q
    t.tile_q = FA_TILE_Q;
#endif
#ifdef FA_QUERY_STAGES
    t.query_stages = FA_QUERY_STAGES;
#endif
#ifdef FA_KEY_STAGES
    t.key_stages = FA_KEY_STAGES;
#endif
#ifdef FA_ROWS_AHEAD
    t.rows_ahead = FA_ROWS_AHEAD;
#endif
#ifdef FA_VALUE_STAGES
    t.value_stages = FA_VALUE_STAGES;
#endif
#ifdef FA_KEY_TURNS
    t.key_turns = FA_KEY_TURNS;
#endif
#ifdef FA_DOUT_STAGES
    t.dout_stages = FA_DOUT_STAGES;
#endif
    return t;
}

constexpr int kBackwardConsumers = 2, kBackwardTile = 64 * kBackwardConsumers;

/* Whether the queries kernel has rings of their own for keys and values and reads out where it lies. */
constexpr bool is_wide(int head_dim) { return head_dim > 128; }
/* Whether the keys kernel is that of keys_wide.cuh. */
constexpr bool has_roles(int head_dim, int head_dim_v) { return is_wide(head_dim) && head_dim == head_dim_v; }
constexpr int key_tile(int head_dim, int head_dim_v) { return has_roles(head_dim, head_dim_v) ? 64 : kBackwardTile; }

template <class T, int HeadDim, int HeadDimV, int Kind, bool Sequences> struct BackwardConfig {
    static constexpr BackwardTiling kTiling = backward_tiling(HeadDim, HeadDimV, Kind);
    using Element = T;
    static constexpr int kHeadDim = HeadDim, kHeadDimV = HeadDimV, kConsumers = kBackwardConsumers;
    static constexpr bool kMasked = Kind != kFull, kSoftcap = Kind == kCapped, kWide = is_wide(HeadDim);
    static constexpr bool kSequences = Sequences;
    // 64 Ki registers: what the consumers leave is the producer's, and of the warp that tells tiles of sequences.
#ifdef FA_CHAOS // whose delays need some there too
    static constexpr int kConsumerRegisters = 232, kProducerRegisters = 40;
#else
    static constexpr bool kSpare = Sequences && HeadDim == HeadDimV && (HeadDim <= 64 || HeadDim > 128);
    static constexpr int kConsumerRegisters = kSpare ? 232 : 240, kProducerRegisters = kSpare ? 40 : 24;
#endif
};
template <class T, int HeadDim, int HeadDimV, int Kind, bool Sequences>
struct QueriesConfig : BackwardConfig<T, HeadDim, HeadDimV, Kind, Sequences> {
    using Base = BackwardConfig<T, HeadDim, HeadDimV, Kind, Sequences>;
    static constexpr int kTileM = kBackwardTile, kTileN = Base::kTiling.tile_n, kStages = Base::kTiling.stages,
                         kValueStages = Base::kWide ? Base::kTiling.value_stages : kStages,
                         kRowBlock = Base::kTiling.tile_q;
    static constexpr bool kTurns = Base::kTiling.turns;
    // Of sequences at 192 and 128 columns there are no registers for it.
    static constexpr bool kOverlap = Base::kTiling.overlap && !(Sequences && HeadDim != HeadDimV);
    static_assert(kTileN % 16 == 0 && kTileN <= 128, "the bits of a row's mask");
    static_assert(kStages >= 2, "a block's keys are held while the next block's products are issued");
    static_assert(kTileM % kRowBlock == 0, "row blocks are written whole");
};
template <class T, int HeadDim, int HeadDimV, int Kind, bool Sequences>
struct KeysConfig : BackwardConfig<T, HeadDim, HeadDimV, Kind, Sequences> {
    using Base = BackwardConfig<T, HeadDim, HeadDimV, Kind, Sequences>;
    static constexpr bool kRoles = has_roles(HeadDim, HeadDimV), kPair = HeadDim != HeadDimV && Kind != kCapped;
    static constexpr int kTileK = key_tile(HeadDim, HeadDimV), kTileQ = Base::kTiling.tile_q,
                         kStages = Base::kTiling.query_stages, kKeyStages = Base::kTiling.key_stages;
#ifdef FA_CHAOS // whose counts take 1 KiB, which sequences of 192 columns do not leave
    static constexpr int kDoutStages = Base::kTiling.dout_stages - (Sequences && kRoles && HeadDim == 192);
#else
    static constexpr int kDoutStages = Base::kTiling.dout_stages;
#endif
    static constexpr bool kKeyTurns = Base::kTiling.key_turns;
    static constexpr int kRowsAhead = Base::kSoftcap ? 0 : Base::kTiling.rows_ahead; // its registers are spoken for
    static_assert(kTileQ % 16 == 0 && kTileQ <= 128, "the bits of a row's mask");
    static_assert(!Sequences || kTileQ == 64, "boxes of q and dO are those of the first kernel");
    static_assert(kStages >= 2, "a step's stage is held while the next step's products are issued");
};

/* The work of one launch of an instance: a kernel without blocks is left out. Lists are of calls over sequences. */
struct BackwardWork {
    SequenceQueriesParams queries;
    SequenceKeysParams keys;
    int64_t query_blocks, key_blocks;
};
using Launch = fa_code(const BackwardWork &, const fa_launch &);

} // namespace fa::sm90
