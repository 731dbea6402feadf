/* What a launch of mma_backward_sm80 is made of: tile shapes, arguments, the place of a block, who sees whom.
 *
 * Every kernel here has a side of its own and a side that streams past. Queries own: dq, keys stream. Keys own: dk and
 * dv, the queries of all heads of their group stream. "Own rows" and "other rows" are meant so throughout. */
#pragma once

#include <stdint.h> // int64_t

#include "common/mask.cuh"  // Band, Span
#include "common/score.cuh" // ScoreParams
#include "common/tiles.cuh" // longest_first
#include "fa.h"             // fa_backward

namespace fa {

/* Which gradients an instance makes. KEY and VALUE share the work of KEYS where dk and dv together exceed the registers
 * of a warp: one product more. */
enum class Role {
    QUERIES, // dq
    KEYS,    // dk and dv
    KEY,     // dk
    VALUE,   // dv
};

/* Tile shape of one instance. */
struct BackwardShape {
    int row_tiles; // of 16 own rows, a warp
    int warps;     // each with own rows of its own
    int tile;      // other rows in shared memory at a time, in each of two stages
    int step;      // of them, those whose scores are in registers at a time
    int blocks;    // a multiprocessor, that registers are to allow
};

/* HEAD_DIM: of q, k and v, padded. GENERAL: softcap, bias, boolean mask, rows of any alignment; else none of these. */
template <typename T_, int HEAD_DIM_, Role ROLE_, bool GENERAL_, BackwardShape SHAPE> struct BackwardConfig {
    using T = T_;
    static constexpr Role ROLE = ROLE_;
    static constexpr bool QUERIES = ROLE == Role::QUERIES, GENERAL = GENERAL_;
    static constexpr bool FIRST = ROLE != Role::VALUE;                        // dq or dk, of dS
    static constexpr bool SECOND = ROLE == Role::KEYS || ROLE == Role::VALUE; // dv, of P
    static constexpr int HEAD_DIM = HEAD_DIM_, ROW_TILES = SHAPE.row_tiles, TILE = SHAPE.tile, STEP = SHAPE.step;
    static constexpr int BLOCKS = SHAPE.blocks, THREADS = SHAPE.warps * 32;
    static constexpr int WARP_ROWS = 16 * ROW_TILES, OWN = SHAPE.warps * WARP_ROWS;
    static constexpr int ROW_BYTES = HEAD_DIM * 2, OWN_BYTES = OWN * ROW_BYTES, TILE_BYTES = TILE * ROW_BYTES;

    /* Shared memory: own rows of q, dout or k, v; two stages of the other rows; what BackwardArgs::rows has of the
     * queries, in two stages too where they stream. */
    static constexpr int OWN_TILES = FIRST ? 2 : 1; // dv needs no v
    static constexpr int STAGES_AT = OWN_TILES * OWN_BYTES, ROWS_AT = STAGES_AT + 4 * TILE_BYTES;
    static constexpr int STAGE_ROWS_BYTES = QUERIES ? 0 : TILE * 8;
    static constexpr int SHARED_BYTES = ROWS_AT + (QUERIES ? OWN * 8 : 2 * STAGE_ROWS_BYTES);

    static_assert(STEP % 16 == 0 && TILE % STEP == 0 && HEAD_DIM % 32 == 0, "mma.sync tiles of 16");
    static_assert(SHARED_BYTES <= 99 * 1024, "fits a block of sm_86 and sm_89");
};

/* Rows a head has in BackwardArgs::rows, a multiple of every tile of streamed queries. */
constexpr int ROWS_MULTIPLE = 64;

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
    fa_backward problem;
    ScoreParams score;
    Band visible;
    float scale, softcap;
    float2 *rows;  // (pairs, group, pitch): LSE and delta; (+inf, -dlse) where the query sees no key, (+inf, 0) beyond
    int64_t pitch; // a multiple of ROWS_MULTIPLE
    int first_pair, pairs, group; // a pair is a batch entry's kv head; those whose rows are there
    TaskOrder queries, keys;
    bool chunks_q, chunks_k, chunks_v, chunks_dout, chunks_out; // whether rows are aligned chunks of 16 bytes
    bool pairs_bias, pairs_mask;                                // the same of pairs of neighbouring keys
    uint8_t stores_pairs;                                       // 1 << fa_grad: two neighbouring elements are one store
    double *sinks;                                              // (batch, heads): parts of dsinks
    float *bias_parts;                                          // (parts, elements of dbias); parts > 1
    int parts;
};

/* The task of this block. */
struct TaskPlace {
    int item, block;

    __device__ explicit TaskPlace(const TaskOrder &order) {
        const SectionPlace place = longest_first(blockIdx.x, order.blocks * order.items, order.blocks, order.section);
        item = place.head;
        block = order.reversed ? place.tile : order.blocks - 1 - place.tile;
    }
};

/* The other rows that an own row sees, or that see it. Both ends grow with the row, where it sees any. */
template <bool QUERIES> __device__ __forceinline__ Span<int> seen_by(const Band &visible, int row, int seq_q) {
    if (QUERIES) return row < seq_q ? row_span(visible, row) : Span<int>{0, 0};
    if (row < visible.key_begin || row >= visible.key_end) return {0, 0};
    const int query = row - visible.diagonal;
    return {max(query - visible.right, 0), min(query + visible.left + 1, seq_q)};
}

/* What some row, and what every row, of a tile of own rows sees. */
struct Sight {
    Span<int> some, all;
};

/* Of the own rows [first, first + count). Queries beyond the last, and other queries beyond the last, count as seeing
 * everything: their LSE of +inf makes every weight 0. */
template <bool QUERIES>
__device__ __forceinline__ Sight sight_of(const Band &visible, int first, int count, int seq_q) {
    const int begin = QUERIES ? first : max(first, visible.key_begin);
    const int end = min(first + count, QUERIES ? seq_q : visible.key_end);
    if (begin >= end) return {{0, 0}, {0, 0}};
    const Span<int> low = seen_by<QUERIES>(visible, begin, seq_q), high = seen_by<QUERIES>(visible, end - 1, seq_q);
    Sight sight = {{low.begin, high.end}, {high.begin, low.end}};
    if (!QUERIES && end - begin < count)
        sight.all = {0, 0};
    else if (!QUERIES && low.end == seq_q)
        sight.all.end += ROWS_MULTIPLE;
    return sight;
}

} // namespace fa
