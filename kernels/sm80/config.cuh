/* What a launch of the mma.sync kernel is made of: the tile shape of an instance, the arguments, the place of a block.
 */
#pragma once

#include <stdint.h> // int64_t, uint32_t

#include "common/mask.cuh"    // Band
#include "common/partial.cuh" // Partials
#include "common/score.cuh"   // ScoreParams
#include "common/tiles.cuh"   // Divider
#include "fa.h"               // fa_forward

namespace fa {

/* Tile shape of one instance. */
struct MmaShape {
    int row_tiles;           // of 16 query rows, a warp
    int warps_m, warps_n;    // groups of rows; warps that share a group's rows and split its keys
    int keys;                // of a tile, a warp
    int stages;              // tiles of K and of V in shared memory
    bool query_in_registers; // else read from shared memory for each tile
    int blocks_per_sm;       // that registers are to allow
};

/* What an instance takes. */
enum class Surface {
    PLAIN,   // scores are products: the scale (> 0) is folded into the exponent; rows of Q, K and V are 16-byte chunks
    BIASED,  // scale of any sign, softcap up to MAX_FAST_CAP, bias, boolean mask; rows of all are chunks
    GENERAL, // the same with any softcap and rows of any alignment
};

/* HEAD_DIM: of Q, K and V, padded. */
template <typename T_, int HEAD_DIM_, MmaShape SHAPE, Surface SURFACE> struct MmaConfig {
    using T = T_;
    static constexpr int HEAD_DIM = HEAD_DIM_, ROW_TILES = SHAPE.row_tiles, KEYS = SHAPE.keys, STAGES = SHAPE.stages;
    static constexpr int WARPS_M = SHAPE.warps_m, WARPS_N = SHAPE.warps_n, BLOCKS_PER_SM = SHAPE.blocks_per_sm;
    static constexpr bool QUERY_IN_REGISTERS = SHAPE.query_in_registers;
    static constexpr bool PLAIN = SURFACE == Surface::PLAIN, GENERAL = SURFACE == Surface::GENERAL;
    static constexpr bool SHORT = !PLAIN && ROW_TILES > 1; // of registers: what is cheap is worked out for each tile
    static constexpr bool SPLITS = GENERAL || WARPS_N > 1; // whether blocks may share a row's keys

    static constexpr bool KEEP_ADDRESSES = ROW_TILES * HEAD_DIM < 256; // else the output takes the registers

    static constexpr int THREADS = WARPS_M * WARPS_N * 32;
    static constexpr int WARP_ROWS = 16 * ROW_TILES;
    static constexpr int TILE_M = WARPS_M * WARP_ROWS;
    static constexpr int TILE_N = WARPS_N * KEYS;
    static constexpr int ROW_BYTES = HEAD_DIM * 2;
    static constexpr int QUERY_BYTES = TILE_M * ROW_BYTES;
    static constexpr int TILE_BYTES = TILE_N * ROW_BYTES; // one tile of K or of V
    static constexpr int SHARED_BYTES = QUERY_BYTES + 2 * STAGES * TILE_BYTES;

    /* What a warp with key part > 0 hands over: output, maxima and sums, a column of 32 floats each. */
    static constexpr int MERGE_VALUES = ROW_TILES * (HEAD_DIM / 2 + 4);
    static_assert((WARPS_N - 1) * WARPS_M * MERGE_VALUES * 32 * 4 <= 2 * STAGES * TILE_BYTES,
                  "the merge reuses the K and V tiles");
    static_assert(PLAIN || (STAGES == 1 && WARPS_N == 1), "one tile of bias and mask, in whole rows of a warp");
    static_assert(KEYS % 16 == 0 && HEAD_DIM % 32 == 0, "mma.sync tiles of 16");
};

/* A launch. The sequence lengths, and so every row and key index, fit in 28 bits. */
struct MmaArgs {
    fa_forward problem;
    ScoreParams score;
    Band visible;
    Divider heads, group;                   // query heads a batch entry, a K/V head
    Divider per_section, width, last_width; // blocks of a section; heads of one, of the last one
    int row_blocks;                         // tiles of TILE_M queries a head
    int sections;
    bool chunks_q, chunks_k, chunks_v, chunks_o; // whether 16-byte chunks are aligned
    bool chunks_bias, chunks_mask;               // the same of bias and mask
    int bias_at, mask_at;                        // where in shared memory
    int shared_bytes;
    int64_t sink_row; // distance of the sinks of neighbouring rows: 0, or heads are rows
    int splits;       // parts of the keys; with more than 1, each writes to `partial`
    float *partial;   // as partial.cuh says: (splits, rows, HEAD_DIM), then (splits, rows) states

    __host__ __device__ int64_t rows() const { return problem.batch * problem.heads * problem.seq_q; }
};

/* The work of this block. It is made anew from the block's index where the output is written, so that it takes no
 * registers while the keys are walked. */
struct BlockPlace {
    int batch, head, row_block;

    /* Sections of heads whose K and V fit the L2 cache together; in a section the last row blocks, the longest ones of
     * a causal call, come first, so that no long block starts late. */
    __device__ explicit BlockPlace(const MmaArgs &args) {
        int index;
        asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
        const int section = args.per_section.quotient(index), rest = index - section * args.per_section.divisor;
        const Divider &width = section < args.sections - 1 ? args.width : args.last_width;
        const int reversed = width.quotient(rest);
        const int pair = section * args.width.divisor + rest - reversed * width.divisor;
        row_block = args.row_blocks - 1 - reversed;
        batch = args.heads.quotient(pair);
        head = pair - batch * args.heads.divisor;
    }
};

} // namespace fa
