/* Shared by the producer and the consumers of wgmma_fused_backward_sm90: parameters, shared memory, the steps of a
 * tile. */
#pragma once
#include <climits>     // INT_MAX
#include <type_traits> // conditional_t

#include "common/dropout.cuh"
#include "sm90/backward/keys.cuh" // find_queries
#include "sm90/common/instance.cuh"
#include "sm90/fused_backward/bias.cuh"
#include "sm90/fused_backward/light.cuh"
#include "sm90/fused_backward/rows.cuh"
#include "sm90/fused_backward/step.cuh"

namespace fa::sm90 {

/* ---- tiles ---- */

constexpr int kFusedConsumers = 2, kFusedTileK = 64 * kFusedConsumers;

/* Queries of a step, and steps in flight. A tuner's values replace these. */
constexpr int fused_tile_q(int head_dim) { return head_dim <= 64 ? 128 : 64; }
constexpr int fused_stages(int head_dim) {
#ifdef FA_QUERY_STAGES
    return FA_QUERY_STAGES;
#endif
#ifdef FA_CHAOS // whose counts need the room of the third
    return 2;
#endif
    return head_dim <= 64 ? 2 : 3;
}

template <class T, int HeadDim, int Kind> struct FusedConfig {
    using Element = T;
    static constexpr int kHeadDim = HeadDim, kConsumers = kFusedConsumers, kTileK = kFusedTileK,
                         kTileQ = fused_tile_q(HeadDim), kStages = fused_stages(HeadDim), kKeyStages = 1;
    static constexpr bool kOrdered = false, kDropout = false, kLight = false, kBias = false, kMasked = Kind != kFull,
                          kSoftcap = Kind == kCapped;
    static constexpr bool kSequences = false;
    // 64 Ki registers: what the consumers leave is the producer's.
#ifdef FA_CHAOS // whose delays need some there too
    static constexpr int kConsumerRegisters = 232, kProducerRegisters = 40;
#else
    static constexpr int kConsumerRegisters = 240, kProducerRegisters = 24;
#endif
    static_assert(kStages >= 2, "a step's stage is held while the next step's products are issued");
};
template <class T, int HeadDim, int Kind> struct OrderedFusedConfig : FusedConfig<T, HeadDim, Kind> {
    static constexpr bool kOrdered = true;
    static constexpr int kKeyStages = HeadDim <= 64 ? 2 : 1; // dQ takes no shared memory
};
template <class T, int HeadDim, int Kind> struct DropoutFusedConfig : OrderedFusedConfig<T, HeadDim, Kind> {
    static constexpr bool kDropout = true;
};
template <class T, int HeadDim, int Kind> struct LightFusedConfig : OrderedFusedConfig<T, HeadDim, Kind> {
    static constexpr bool kLight = true;
};
template <class T, int HeadDim, int Kind> struct DropoutLightFusedConfig : LightFusedConfig<T, HeadDim, Kind> {
    static constexpr bool kDropout = true;
};
template <class T, int HeadDim, int Kind> struct GeneralFusedConfig : LightFusedConfig<T, HeadDim, Kind> {
    static constexpr bool kBias = true;
    static constexpr int kStages = 2, kKeyStages = 1; // the rest of shared memory is the bias's
};
template <class T, int HeadDim, int Kind> struct OrderedSequencesFusedConfig : OrderedFusedConfig<T, HeadDim, Kind> {
    static constexpr bool kSequences = true;
};

/* ---- parameters ---- */

struct FusedParams {
    BackwardCall call;
    CUtensorMap q, dout;                               // boxes of kTileQ rows, queries that see a key
    CUtensorMap k, v;                                  // boxes of kTileK rows, visible keys
    int q_step[2], dout_step[2], k_step[2], v_step[2]; // factors 0 or 1 of head and batch coordinates
    Gradient dk, dv;
    float scale;
    Schedule schedule; // a "head" is a pair of the launch, tiles count from the last key block
    const char *row_blocks;
    int row_block_count; // a head
    float *sums;         // of dq: kQueryElements [head of the launch][block]
};
struct OrderedFusedParams : FusedParams {
    uint32_t *turns; // 0 at launch: turns.cuh
    Gradient dq;     // the CTA that adds last to a block's sums makes dq of them; data NULL: not wanted
};
struct DropoutFusedParams : OrderedFusedParams {
    fa_dropout dropout;
    float kept; // what a weight is multiplied by that dropout keeps: in `scale`, and dv's factor
};
struct LightFusedParams : DropoutFusedParams {
    LightScore light;
};
struct GeneralFusedParams : LightFusedParams {
    CUtensorMap bias, dbias; // boxes of 64 queries x 64 keys, of all that there are; dbias: where stores_bias
    int bias_step[2];        // factors of head and batch coordinates
    int bias_first;          // batch entry that dbias begins with
    bool stores_bias;
};
/* The work of one launch of an instance; members that it does not take say nothing. */
struct FusedWork {
    LightRowsParams rows;
    GeneralFusedParams fused;
    LightFinishParams finish;
    LightStepsParams steps;
    SequenceList row_list, key_list; // of row blocks, and of tiles of keys
    int64_t query_blocks, key_blocks, finish_blocks;
};
using Launch = fa_code(const FusedWork &, const fa_launch &);

template <MapOf kMap> __device__ __forceinline__ const CUtensorMap *map_of(const FusedParams &p, const BackwardCall &) {
    return kMap == kMapOfQ ? &p.q : kMap == kMapOfDout ? &p.dout : kMap == kMapOfTileK ? &p.k : &p.v;
}

/* ---- shared memory ---- */

template <class C> using RowBlockOf = std::conditional_t<C::kLight, LightRowBlock<C::kTileQ>, FusedRowBlock<C::kTileQ>>;

template <bool Dropout> struct FusedDropout {};
template <> struct FusedDropout<true> {
    fa_dropout words; // as they were when the block began
};

inline constexpr uint32_t kAddsFirst = 1, kAddsLast = 2; // to a block's sums: they are stored; dq is made of them
template <bool Ordered> struct FusedTurns {};
template <> struct FusedTurns<true> { // between the keepers of turns and the consumers, of steps 2 n and 2 n + 1
    uint64_t open[2];                 // a step's dQ may be added
    uint64_t done[2];                 // it has been
    uint64_t seen[2];                 // the thread that passes the turn on knows that it has
    uint32_t block[2];                // of queries, four times its number, and kAddsFirst, kAddsLast
    uint32_t turn[2];                 // its turn; UINT_MAX: no more steps
};

template <bool Light, int Stages> struct FusedSteps {};
template <int Stages> struct FusedSteps<true, Stages> {
    int2 at[Stages]; // the query head of the group, and its block
};

template <class C> struct FusedSmem {
    static constexpr int kSlabs = (C::kHeadDim + kSlabColumns - 1) / kSlabColumns;
    static constexpr int kKeySlabBytes = C::kTileK * kSlabRowBytes; // of dT too
    static constexpr int kQuerySlabBytes = C::kTileQ * kSlabRowBytes;
    static constexpr int kKeyBytes = kSlabs * kKeySlabBytes;
    static constexpr int kQueryBytes = kSlabs * kQuerySlabBytes;
    static constexpr int kTileStages = tile_stages<C>;

    alignas(1024) char k[C::kKeyStages][kKeyBytes];
    alignas(1024) char v[C::kKeyStages][kKeyBytes];
    alignas(1024) char q[C::kStages][kQueryBytes];
    alignas(1024) char dout[C::kStages][kQueryBytes];
    alignas(1024) char ds[2][C::kTileQ / kSlabColumns * kKeySlabBytes];
    [[no_unique_address]] BiasTiles<C::kBias, C::kConsumers> bias;
    alignas(128) float4 dq[C::kConsumers][4][C::kOrdered ? 1 : kPartElements / 4];
    RowBlockOf<C> rows[C::kStages];
    alignas(16) Tile tile[kTileStages];
    [[no_unique_address]] SequenceCalls<C::kSequences, kTileStages> calls; // of the tiles
    uint64_t kv_full[C::kKeyStages], kv_empty[C::kKeyStages];
    uint64_t full[C::kStages], empty[C::kStages]; // Q, dO and the row block
    uint64_t ds_full[2];
    uint64_t tile_full[kTileStages], tile_empty[kTileStages];
    FusedTurns<C::kOrdered> turns;
    [[no_unique_address]] FusedDropout<C::kDropout> dropout;
    [[no_unique_address]] FusedSteps<C::kLight, C::kStages> steps;
};

/* ---- steps ---- */

/* The steps of a tile: blocks [begin, end) of each query head of the group, from block `first` and round. */
struct FusedWalk {
    int begin, end, first, block, member;

    __device__ __forceinline__ bool more(int group) const { return begin < end && member < group; }
    __device__ __forceinline__ void advance() {
        if (++block == end) block = begin;
        if (block == first) ++member;
    }
};
/* Whether each tile of a head begins with another block. */
template <class C> __device__ __forceinline__ bool begins_apart(const FusedParams &p) {
    if constexpr (C::kOrdered) return false;
    if constexpr (C::kSequences) return static_cast<const OfSequences<FusedParams> &>(p).list.whole;
    return !C::kMasked;
}
template <class C, class Call>
__device__ __forceinline__ FusedWalk fused_walk(const FusedParams &p, const Call &call, int tile_row) {
    const int key = tile_row - call.key_begin;
    const QueryBlocks blocks = find_queries<C::kTileQ>(call, key, key + C::kTileK);
    int first = blocks.begin;
    if (begins_apart<C>(p) && blocks.begin < blocks.end) first += tile_row / C::kTileK % (blocks.end - blocks.begin);
    return {blocks.begin, blocks.end, first, first, 0};
}

template <class C> __device__ __forceinline__ FusedWalk uniform_walk(const FusedWalk &walk) {
    const int first = uniform<C>(walk.first);
    return {uniform<C>(walk.begin), uniform<C>(walk.end), first, first, 0};
}

/* The same of the kind kLight, by the tile's list; Tile::span says how many there are. */
struct LightWalk {
    const LightStep *step;
    int left, member, block;

    __device__ __forceinline__ LightWalk(const LightScore &light, int64_t tile, int count)
        : step(light.steps + tile * light.capacity), left(count) {
        read();
    }
    __device__ __forceinline__ bool more(int) const { return left > 0; }
    __device__ __forceinline__ void read() {
        if (left > 0) member = step->member, block = step->block;
    }
    __device__ __forceinline__ void advance() {
        --left, ++step;
        read();
    }
};
/* The number of a tile of the launch. */
__device__ __forceinline__ int64_t light_tile(const FusedParams &p, const Tile &tile) {
    return int64_t(tile.head) * p.schedule.query_tiles + tile.row / kFusedTileK;
}
template <class C, class Call>
__device__ __forceinline__ auto steps_of(const FusedParams &p, const Call &call, const Tile &tile) {
    if constexpr (C::kLight)
        return LightWalk(static_cast<const LightFusedParams &>(p).light, light_tile(p, tile), tile.span);
    else
        return fused_walk<C>(p, call, tile.row);
}

/* Query blocks [begin, end). */
struct BlockRange {
    int begin, end;
    __device__ __forceinline__ bool holds(int block) const { return block >= begin && block < end; }
};

/* The blocks of queries that see all 64 keys from `key`. */
template <class C> __device__ __forceinline__ BlockRange whole_blocks(const ShiftedBand &v, int key) {
    if (key < 0 || key + 64 > v.seq_k) return {0, 0};
    if (!C::kMasked) return {0, INT_MAX};
    return {ceil_blocks<C::kTileQ>(key + 64 - v.upper), floor_blocks<C::kTileQ>(key + 1 - v.lower)};
}

} // namespace fa::sm90
