/* prefill_sm90: shape and parameters of a launch, what lies in shared memory and in workspace. */
#pragma once
#include <cuda.h>
#include <stdint.h>

#include "common/score.cuh" // kLog2E
#include "fa.h"
#include "faults/faults.h" // fa_fault_board
#include "sm90/common/instance.cuh"
#include "sm90/common/sequence_list.cuh"
#include "sm90/common/tma.cuh"

namespace fa::sm90::prefill {

constexpr int kPackBelow = 128; // sequences of fewer queries have the heads of a kv head in the rows of a tile
constexpr int kCut = 64; // a tile's blocks of keys end at a multiple of it, counted from the sequence's first key
constexpr int kSmallestBox = 8; // keys: what TMA brings of a page at a time, at least

/* Sequences of few units and many keys are cut into chunks of kChunk * 2^e keys at multiples of that, of which there
 * are about kSplitTarget in all units of a sequence: one a multiprocessor. Where there are many units chunks are
 * longer: a fold of a state takes as long as some 500 keys. Constants: part of what a sequence's bits are. */
constexpr int kSplitUnits = 64, kSplitTarget = 132, kChunk = 1024, kManyUnits = 16, kManyChunk = 2048;

constexpr int kNowhere = 1 << 30; // a row that no array has: TMA writes zeros and reads nothing

/* ---- shapes ---- */

/* Shape of a kernel; as those of wgmma_sm90, except that blocks are a whole number of boxes of pages. */
struct Tiling {
    int consumers;    // warpgroups of 64 rows
    int tile_n;       // keys a block
    int stages;       // of the rings of key and of value blocks
    int query_stages; // tiles
    bool overlap;     // a block's exponentials run under P V of the block before, with two sets of weights
    bool half;        // a warpgroup that sees only half of its first block multiplies that half alone
    bool staged;      // whole warps of rows go through shared memory of their own to TMA
};
constexpr Tiling tiling(int head_dim, int kind) {
    if (head_dim <= 64) return {3, kind == kCapped ? 96 : 128, 4, 2, false, kind == kMasked, true};
    if (head_dim <= 128) return {2, 128, 2, 2, true, false, true};
    if (head_dim <= 192) return {2, 96, 2, 1, false, false, false};
    return {2, 64, 2, 1, false, false, false};
}

template <class T, int HeadDim, int Kind> struct Config {
    static constexpr Tiling kTiling = tiling(HeadDim, Kind);
    using Element = T;
    static constexpr int kHeadDim = HeadDim, kConsumers = kTiling.consumers, kTileM = 64 * kConsumers,
                         kTileN = kTiling.tile_n, kStages = kTiling.stages, kQueryStages = kTiling.query_stages;
    static constexpr bool kSoftcap = Kind == kCapped, kOverlap = kTiling.overlap, kHalfBlocks = kTiling.half,
                          kStaged = kTiling.staged, kHalfTiles = kTileN == 2 * kCut,
                          kKeepsHalf = kStaged && !kSoftcap; // of the state of a unit of several chunks, where rows are
                                                             // staged; registers lack for it where scores are capped
    // A block is launched with what 64 Ki registers allow each thread, a multiple of 8, and shares that out anew.
    static constexpr int kLaunchRegisters = kConsumers == 2 ? 168 : 128;
    static constexpr int kConsumerRegisters = kConsumers == 2 ? 232 : 160;
    static constexpr int kProducerRegisters = kConsumers == 2 ? 40 : 32;
    static_assert(kConsumers * kConsumerRegisters + kProducerRegisters <= (kConsumers + 1) * kLaunchRegisters);
    static_assert(kTileN % (kHalfBlocks ? 32 : 16) == 0 && kTileN <= 128 && kTileN % kSmallestBox == 0);
    static_assert((kStages & (kStages - 1)) == 0 && (kQueryStages & (kQueryStages - 1)) == 0, "powers of 2");
};

/* ---- workspace: what prefill_list_kernel leaves ---- */

constexpr int kListThreads = 512; // of that kernel, at most: as many warps as sequences fill

/* How many chunks of a tile each warpgroup has left in their slots. */
struct alignas(16) Left {
    uint32_t count[4];
};

/* Records, as many again where a thread of prefill_list_kernel has several sequences, then for each slot how many are
 * left (where it is a tile's first) and a state. The last slots are the blocks' own. A state is the accumulators of a
 * tile, in the order of the threads that hold them, then a maximum and a sum for each row. */
struct Workspace {
    char *base;
    int64_t batch, slots, state_bytes;

    __host__ __device__ int64_t left_at() const {
        return sizeof(ListHeader) + sizeof(Record) * batch * (batch > kListThreads ? 2 : 1);
    }
    __host__ __device__ int64_t states_at() const {
        return (left_at() + int64_t(sizeof(Left)) * slots + 127) / 128 * 128;
    }
    __host__ __device__ int64_t bytes(int64_t blocks) const {
        return states_at() + (slots ? (slots + blocks) * state_bytes : 0);
    }
    __device__ __forceinline__ ListHeader *header() const { return reinterpret_cast<ListHeader *>(base); }
    __device__ __forceinline__ Record *record(int n) const {
        return reinterpret_cast<Record *>(base + sizeof(ListHeader)) + n;
    }
    __device__ __forceinline__ Record *draft(int b) const { return record(static_cast<int>(batch) + b); }
    __device__ __forceinline__ Left *left(int slot) const { return reinterpret_cast<Left *>(base + left_at()) + slot; }
    __device__ __forceinline__ float4 *state(int slot) const {
        return reinterpret_cast<float4 *>(base + states_at() + slot * state_bytes);
    }
};

/* ---- parameters ---- */

/* The fields of the problem that the kernels read, and numbers that follow from them. */
struct Call {
    fa_operand q, k, v, out, lse, sinks;
    int64_t batch, heads, heads_kv, seq_q;
    int64_t left, right, diagonal;
    int head_dim, head_dim_v;
    fa_dtype sinks_dtype;
    fa_sequences s; // of a dense call too: all rows of every batch entry
    Workspace workspace;
    fa_fault_board *faults; // NULL: faults are not counted
    int group;              // query heads a kv head
    int group_queries;      // that a warpgroup has of the heads of a kv head: 64 / group
    int store_queries;      // the same of 16 rows, if that is a whole number; else 0
    int tile_m;             // rows of a tile
    int blocks;             // of the main kernel
    FewRows few;
};

/* The change of queries in shared memory before they are multiplied: weights need a scale above 0. */
enum class Queries : int { kAsTheyAre, kNegated, kZero };

struct Params {
    CUtensorMap q;         // boxes of 64 rows of one head
    CUtensorMap q_heads;   // boxes of `group` heads of `group_queries` rows
    CUtensorMap k, v;      // boxes of box_rows keys
    CUtensorMap out_map;   // boxes of 16 rows; with C::kStaged
    CUtensorMap out_heads; // boxes of `group` heads of `store_queries` rows
    Call call;
    int box_rows; // 0: row by row
    int boxes;    // of a block
    Queries queries;
    float score_factor; // 2^(score_factor * s): scale or softcap, times log2(e)
    float cap_factor;   // softcap: s = tanh(cap_factor * product)
};

/* Whether a sequence's tiles hold all heads of a kv head. A constant of the sequence and the heads alone. */
__host__ __device__ inline bool packs(const Call &call, int seq_q) {
    return call.group > 1 && call.group <= 64 && seq_q < kPackBelow;
}
/* Queries of a tile; units of one tile of queries. */
__host__ __device__ inline int tile_queries(const Call &call, bool packed) {
    return packed ? call.tile_m / 64 * call.group_queries : call.tile_m;
}
__host__ __device__ inline int tile_heads(const Call &call, bool packed) {
    return static_cast<int>(packed ? call.heads_kv : call.heads);
}

/* ---- shared memory ---- */

/* The keys that a warpgroup of a tile sees. Blocks are counted from the tile's first, which holds the last keys: the
 * warpgroup skips those before `first`, and needs masks before `plain` and from `plain_end` on. */
struct alignas(16) Part {
    int rows;  // that exist; the others hold zeros for queries
    int query; // the first one, counted from the sequence's first
    int first, plain, plain_end;
    int low, high; // keys that the first query sees, the n-th those n further on, unless it has a position of its own
    int seen_end;  // no row sees keys from here on
};

/* A tile: the scheduler writes it, all other warps read it. */
struct alignas(16) Tile {
    int blocks;    // of keys: block n holds keys [end - (n + 1) * tile_n, end - n * tile_n); negative: no more tiles
    int end;       // a multiple of kCut
    int low, high; // keys that some row sees lie in [low, high)
    int head, kv_head; // the first query head
    int packed;        // all heads of the kv head
    int half;          // one block, of whose keys the tile sees the lower half alone: the other is not brought
    int query;         // the first one, counted from the sequence's first
    int slot;          // of a chunk's state; negative: the sequence is not cut
    int first_slot;    // of the tile's chunks, each a unit of its own; negative: this unit has all of them, in one slot
    int folds, ends;   // the chunks before are in the slot, to be folded with; what comes of it is the end
    Record of;         // the sequence, with the keys of the chunk
    Part part[3];      // of the warpgroups
};

/* The state of the scheduler's warp, in shared memory since it has few registers. */
struct Scheduler {
    int at;     // the unit's record is this one or comes after it
    int chunk;  // of the unit
    bool again; // the unit has more chunks than this
    uint32_t units, unit;
};

template <class C> struct Smem {
    static constexpr int kSlabs = (C::kHeadDim + kSlabColumns - 1) / kSlabColumns;
    static constexpr int kQuerySlabBytes = 64 * kSlabRowBytes;
    static constexpr int kKeySlabBytes = C::kTileN * kSlabRowBytes;
    static constexpr int kQueryBytes = kSlabs * kQuerySlabBytes; // of one warpgroup
    static constexpr int kKeyBytes = kSlabs * kKeySlabBytes;
    // A power of 2. A block that took more tiles ahead would keep them from others at the end.
    static constexpr int kTileStages = 2;

    alignas(1024) char q[C::kQueryStages][C::kConsumers][kQueryBytes];
    alignas(1024) char k[C::kStages][kKeyBytes];
    alignas(1024) char v[C::kStages][kKeyBytes];
    alignas(C::kStaged ? 1024 : 16) char out[C::kStaged ? C::kConsumers : 1][4][C::kStaged ? kQueryBytes / 4 : 16];
    alignas(16) Tile tile[kTileStages];
    Scheduler scheduler;
    uint32_t left[C::kConsumers];                   // how many chunks of its tile a warpgroup found in their slots
    int2 span[C::kConsumers][64];                   // keys that a row sees
    alignas(16) uint32_t hidden[2 * C::kStages][4]; // bit n: key n of the block has no page
    uint64_t q_full[C::kQueryStages][C::kConsumers], q_empty[C::kQueryStages][C::kConsumers];
    uint64_t k_full[C::kStages], k_empty[C::kStages], v_full[C::kStages], v_empty[C::kStages];
    uint64_t v_landed; // a block of values whose rows are not all seen
    uint64_t tile_full[kTileStages], tile_empty[kTileStages];
};

__device__ __forceinline__ int64_t diagonal_of(const Call &call, const Record &of) {
    return !call.s.given ? call.diagonal : call.s.top_left ? 0 : of.seq_k - of.seq_q;
}
__device__ __forceinline__ fa_entry entry_of(const Call &call, const Record &of) {
    return entry_at(call.s, of, diagonal_of(call, of));
}

} // namespace fa::sm90::prefill
