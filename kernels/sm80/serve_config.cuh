/* mma_sm80 for calls with more than dense arrays: the shape of an instance, and the values that a launch reads.
 *
 * A tile has 64 rows: the pairs of a query and a query head of one K/V head, row query * pack + head, so that K and V
 * are read once for all heads that share them; with dropout, which counts by queries, the queries of one head (pack 1).
 * Rows are counted from the first query of their sequence, and keys from its first key, so that the bits of a sequence
 * depend on that sequence alone.
 *
 * A sequence of at most 64 rows, a decode step, is cut into chunks of keys as common/fold.cuh says, and where the grid
 * needs it into parts, a unit of work each: groups of chunks, or single chunks. The others are walked in one piece, as
 * are all with dropout, where the shards of a call so have the bits of the whole. */
#pragma once

#include <stdint.h> // int64_t

#include "common/fold.cuh" // kChunkKeys, kGroup
#include "common/intervals.cuh"
#include "common/max_logit.cuh"
#include "common/score.cuh" // ScoreParams
#include "common/segments.cuh"
#include "common/spot.cuh"  // Serving
#include "common/tiles.cuh" // Divider
#include "sm80/config.cuh"  // MmaConfig

namespace fa::sm80 {

/* Two tiles of K and V, so that one is on its way while the other is at work; 32 keys where 64 take more than the 99 KB
 * of a block on sm_86 and sm_89. */
constexpr MmaShape serve_shape(int head_dim, bool dressed) {
    return {1, 4, 1, head_dim <= 128 ? 64 : 32, 2, head_dim <= 64, head_dim <= 96 && !dressed ? 3 : 2};
}

/* kDressed: bias, boolean mask, segments, intervals, dropout, max_logit. */
template <typename T, int kHeadDim, bool kDressed_>
struct ServeConfig : MmaConfig<T, kHeadDim, serve_shape(kHeadDim, kDressed_), Surface::kServing> {
    static constexpr bool kDressed = kDressed_;
};

constexpr int kServeRows = 64;

struct ServeArgs {
    Serving call;
    ScoreParams score;
    Divider pack, page;   // rows a query; keys a page
    int64_t units, tiles; // all; those of a packed head without parts
    int64_t tiles_m;      // of a sequence, where q has no starts
    int64_t slots;        // rows of a part in workspace
    float *workspace;     // as partial.cuh says: (parts, slots, kHeadDim), then (parts, slots) states
    int packed_heads;     // heads / pack
    int parts;            // units of a sequence, at most
    bool cuts;            // sequences of few rows are cut into chunks
    bool chunk_parts;     // a part is a chunk
    bool whole;           // a unit takes all chunks; workspace: partials of a group of chunks, of all before
    bool slots_by_query;  // a slot is a row of out, else a row of a tile
    bool chunks_q, chunks_k, chunks_v, chunks_o; // whether 16-byte chunks are aligned
    Segments segments;
    Intervals intervals;
    MaxLogit max_logit;
};

/* Where a row of the tile stands, and the keys that it sees. */
struct ServeRow {
    int begin, end;
    int position;
    float slope; // of ALiBi; NaN where it is not finite
};

/* Where a key lies, in elements from the head's first, of k and of v. */
struct KeyPlace {
    int64_t k, v;
};
constexpr int64_t kNowhere = INT64_MIN; // of a key that no query sees

} // namespace fa::sm80
