/* The parts of a launch of mma_backward_sm80: tile shapes, arguments, the place of a block, visible pairs.
 *
 * Every kernel here has a side of its own and a side that streams past. Queries own: dq, keys stream. Keys own: dk and
 * dv, the queries of all heads of their group stream. "Own rows" and "other rows" are meant so throughout. */
#pragma once

#include <stdint.h>    // int64_t
#include <type_traits> // conditional_t

#include "common/intervals.cuh"
#include "common/mask.cuh"   // Band, Span
#include "common/params.cuh" // GradientParams
#include "common/score.cuh"  // ScoreParams
#include "common/segments.cuh"
#include "common/sequence_tiles.cuh" // SequenceTiles
#include "common/tiles.cuh"          // longest_first
#include "fa.h"                      // fa_dropout

namespace fa {

/* Which gradients an instance makes. kKey and kValue share the work of kKeys where dk and dv together exceed the
 * registers of a warp: one product more. */
enum class Role {
    kQueries, // dq
    kKeys,    // dk and dv
    kKey,     // dk
    kValue,   // dv
};

/* Tile shape of one instance. */
struct BackwardShape {
    int row_tiles; // of 16 own rows, a warp
    int warps;     // each with own rows of its own
    int tile;      // other rows in shared memory at a time, in each of two stages
    int step;      // of them, those whose scores are in registers at a time
    int blocks;    // a multiprocessor, that registers are to allow
};

/* The options that an instance has beside the plain walk. */
enum class Options {
    kNone,
    kGeneral,  // softcap, bias, boolean mask, rows of any alignment
    kExtended, // the same, ALiBi, dropout, segments and intervals
};

/* kHeadDim: of q, k and v, padded. */
template <typename T_, int kHeadDim_, Role kRole_, Options kOptions, BackwardShape kShape, bool kSequences_>
struct BackwardConfig {
    using T = T_;
    static constexpr bool kSequences = kSequences_;
    static constexpr Role kRole = kRole_;
    static constexpr bool kQueries = kRole == Role::kQueries;
    static constexpr bool kGeneral = kOptions != Options::kNone, kExtended = kOptions == Options::kExtended;
    static constexpr bool kFirst = kRole != Role::kValue;                          // dq or dk, of dS
    static constexpr bool kSecond = kRole == Role::kKeys || kRole == Role::kValue; // dv, of P
    static constexpr int kHeadDim = kHeadDim_, kRowTiles = kShape.row_tiles, kTile = kShape.tile, kStep = kShape.step;
    static constexpr int kBlocks = kShape.blocks, kThreads = kShape.warps * 32;
    static constexpr int kWarpRows = 16 * kRowTiles, kOwn = kShape.warps * kWarpRows;
    static constexpr int kRowBytes = kHeadDim * 2, kOwnBytes = kOwn * kRowBytes, kTileBytes = kTile * kRowBytes;

    /* Shared memory: own rows of q, dout or k, v; two stages of the other rows; what BackwardArgs::rows has of the
     * queries, in two stages too where they stream; the dropout; the sequence. */
    static constexpr int kOwnTiles = kFirst ? 2 : 1; // dv needs no v
    static constexpr int kStagesAt = kOwnTiles * kOwnBytes, kRowsAt = kStagesAt + 4 * kTileBytes;
    static constexpr int kStageRowsBytes = kQueries ? 0 : kTile * 8;
    static constexpr int kDropoutAt = kRowsAt + (kQueries ? kOwn * 8 : 2 * kStageRowsBytes);
    static constexpr int kPlaceAt = kDropoutAt + (kExtended ? int(sizeof(fa_dropout) + 15) / 16 * 16 : 0);
    static constexpr int kSharedBytes = kSequences  ? kPlaceAt + int(sizeof(SequencePlace))
                                        : kExtended ? kDropoutAt + int(sizeof(fa_dropout))
                                                    : kDropoutAt;

    static_assert(kStep % 16 == 0 && kTile % kStep == 0 && kHeadDim % 32 == 0, "mma.sync tiles of 16");
    static_assert(kSharedBytes <= 99 * 1024, "fits a block of sm_86 and sm_89");
};

/* Rows a head has in BackwardArgs::rows, a multiple of every tile of streamed queries. */
constexpr int kRowsMultiple = 64;
constexpr int kSinksRows = 4096; // of a part of dsinks, where sequences lie one after another

/* In which order blocks take their tasks: sections of heads that the L2 cache holds together; in one, block by block
 * over its heads, the longest blocks of a causal call first. */
struct TaskOrder {
    unsigned blocks;  // of own rows a head
    unsigned items;   // heads
    unsigned section; // heads walked together
    bool reversed;    // the last block first
};

/* A launch. Sequence lengths, and so every row and key index, fit in 28 bits; heads times batch in 31. */
struct BackwardArgs {
    GradientParams problem;
    ScoreParams score;
    Band visible;
    float scale, softcap;
    float2 *rows;  // (pairs, group, pitch): LSE and delta; (+inf, -dlse) where the query sees no key, (+inf, 0) beyond
    int64_t pitch; // a multiple of kRowsMultiple; with sequences a head's tiles of rows one after another
    int first_pair, pairs,
        group; // a pair is a batch entry's kv head, or that of all sequences; those whose rows are there
    TaskOrder queries, keys;
    bool chunks_q, chunks_k, chunks_v, chunks_dout, chunks_out; // whether rows are aligned chunks of 16 bytes
    bool pairs_bias, pairs_mask;                                // the same of pairs of neighbouring keys
    uint8_t stores_pairs;                                       // 1 << fa_grad: two neighbouring elements are one store
    double *sinks;     // (batch, heads), or with sequences (pitch / kSinksRows, heads): parts of dsinks
    float *bias_parts; // (parts, elements of dbias); parts > 1
    int parts;
    fa_operand alibi;
    fa_dropout dropout;
    float kept;          // what dropout multiplies a weight by that it keeps; 1 without dropout
    Intervals intervals; // of a dense call
};

/* A launch over sequences. */
struct SequenceArgs : BackwardArgs {
    SequenceTiles sequences;
    Segments segments;
};
template <bool kSequences> using ArgsOf = std::conditional_t<kSequences, SequenceArgs, BackwardArgs>;

/* The segments of a launch, whose arguments are those of sequences where Entry is. */
template <class Entry> __device__ __forceinline__ Segments segments_in(const BackwardArgs &args) {
    if constexpr (Entry::kSequence)
        return static_cast<const SequenceArgs &>(args).segments;
    else
        return {};
}

/* Whether a launch has intervals, whose arguments are those of a dense call where Entry is. */
template <class Entry> __device__ __forceinline__ bool has_intervals(const BackwardArgs &args) {
    return !Entry::kSequence && args.intervals.begins;
}

/* The task of this block: of all heads whose rows are there, and of the tiles of one. */
struct TaskPlace {
    int item, block;

    __device__ explicit TaskPlace(const TaskOrder &order) {
        const SectionPlace place = longest_first(blockIdx.x, order.blocks * order.items, order.blocks, order.section);
        item = place.head;
        block = order.reversed ? place.tile : order.blocks - 1 - place.tile;
    }
};

/* The batch entry that a block works on: one of a dense call, or a sequence. Rows count from the entry's own first,
 * which is row first_q or first_k of the operands. What is read of a dense call is read where it always was: the dense
 * kernels' machine code is that without sequences. */
template <bool kSequences> struct BackwardEntry;

template <> struct BackwardEntry<false> {
    static constexpr bool kSequence = false;
    static constexpr int first_q = 0, first_k = 0;
    int batch;

    __device__ __forceinline__ const Band &visible(const BackwardArgs &args) const { return args.visible; }
    __device__ __forceinline__ int seq_q(const BackwardArgs &args) const { return int(args.problem.forward.seq_q); }
    /* How many are to be written. */
    __device__ __forceinline__ int rows_q(const BackwardArgs &args) const { return seq_q(args); }
    __device__ __forceinline__ int rows_k(const BackwardArgs &args) const { return int(args.problem.forward.seq_k); }
    /* Where the rows of a head of workspace begin in args.rows. */
    __device__ __forceinline__ int64_t rows_at(const BackwardArgs &args, int head) const { return head * args.pitch; }
};

template <> struct BackwardEntry<true> {
    static constexpr bool kSequence = true;
    const SequencePlace &place; // which nobody writes meanwhile
    const int &batch = place.batch, &first_q = place.first_q, &first_k = place.first_k;

    __device__ __forceinline__ Band visible(const BackwardArgs &args) const { return band_of(args.visible, place); }
    __device__ __forceinline__ int seq_q(const BackwardArgs &) const { return place.seq_q; }
    __device__ __forceinline__ int rows_q(const BackwardArgs &args) const {
        return args.problem.accumulate ? place.seq_q : place.rows_q;
    }
    __device__ __forceinline__ int rows_k(const BackwardArgs &args) const {
        return args.problem.accumulate ? place.seq_k : place.rows_k;
    }
    __device__ __forceinline__ int64_t rows_at(const BackwardArgs &args, int head) const {
        return head * args.pitch + int64_t(place.tile[kTilesOfRows]) * kRowsMultiple;
    }
};

/* Whether some query may see a key. */
template <class Entry> __device__ __forceinline__ bool is_key(const BackwardArgs &args, const Entry &entry, int key) {
    if constexpr (Entry::kSequence)
        return key >= entry.place.key_begin && key < entry.place.key_end;
    else
        return key >= args.visible.key_begin && key < args.visible.key_end;
}

/* The other rows that an own row sees, or that see it. Both ends grow with the row, where it sees any. */
template <bool kQueries> __device__ __forceinline__ Span<int> seen_by(const Band &visible, int row, int seq_q) {
    if (kQueries) return row < seq_q ? row_span(visible, row) : Span<int>{0, 0};
    if (row < visible.key_begin || row >= visible.key_end) return {0, 0};
    const int query = row - visible.diagonal;
    return {max(query - visible.right, 0), min(query + visible.left + 1, seq_q)};
}

template <bool kQueries, class Entry>
__device__ __forceinline__ Span<int> seen_in(const BackwardArgs &args, const Entry &entry, int row, int seq_q) {
    if constexpr (Entry::kSequence)
        return seen_by<kQueries>(entry.visible(args), row, seq_q);
    else
        return seen_by<kQueries>(args.visible, row, seq_q);
}

/* The rows that some row, and those that every row, of a tile of own rows sees. */
struct Sight {
    Span<int> some, all;
};

/* Of the own rows [first, first + count). Queries beyond the last, and other queries beyond the last, count as seeing
 * everything: their LSE of +inf makes every weight 0. */
template <bool kQueries>
__device__ __forceinline__ Sight sight_of(const Band &visible, int first, int count, int seq_q) {
    const int begin = kQueries ? first : max(first, visible.key_begin);
    const int end = min(first + count, kQueries ? seq_q : visible.key_end);
    if (begin >= end) return {{0, 0}, {0, 0}};
    const Span<int> low = seen_by<kQueries>(visible, begin, seq_q), high = seen_by<kQueries>(visible, end - 1, seq_q);
    Sight sight = {{low.begin, high.end}, {high.begin, low.end}};
    if (!kQueries && end - begin < count)
        sight.all = {0, 0};
    else if (!kQueries && low.end == seq_q)
        sight.all.end += kRowsMultiple;
    return sight;
}

} // namespace fa
