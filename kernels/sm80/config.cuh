/* The parts of a launch of the mma.sync kernel: the tile shape of an instance, the arguments, the place of a block.
 */
#pragma once

#include <stdint.h> // int64_t, uint32_t

#include "common/mask.cuh"    // Band
#include "common/params.cuh"  // AttentionParams
#include "common/partial.cuh" // Partials
#include "common/score.cuh"   // ScoreParams
#include "common/tiles.cuh"   // Divider

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

/* The calls that an instance takes. */
enum class Surface {
    kPlain,   // scores are products: the scale (> 0) is folded into the exponent; rows of Q, K and V are 16-byte chunks
    kBiased,  // scale of any sign, softcap up to kMaxFastCap, bias, boolean mask; rows of all are chunks
    kGeneral, // the same with any softcap and rows of any alignment
    kServing, // what sm80/serve.cuh does
};

/* kHeadDim: of Q, K and V, padded. */
template <typename T_, int kHeadDim_, MmaShape kShape, Surface kSurface> struct MmaConfig {
    using T = T_;
    static constexpr int kHeadDim = kHeadDim_, kRowTiles = kShape.row_tiles, kKeys = kShape.keys,
                         kStages = kShape.stages;
    static constexpr int kWarpsM = kShape.warps_m, kWarpsN = kShape.warps_n, kBlocksPerSm = kShape.blocks_per_sm;
    static constexpr bool kQueryInRegisters = kShape.query_in_registers;
    static constexpr bool kPlain = kSurface == Surface::kPlain, kGeneral = kSurface == Surface::kGeneral;
    static constexpr bool kShort = !kPlain && kRowTiles > 1; // of registers: what is cheap is worked out for each tile
    static constexpr bool kSplits = kGeneral || kWarpsN > 1; // whether blocks may share a row's keys

    static constexpr bool kKeepAddresses = kRowTiles * kHeadDim < 256; // else the output takes the registers

    static constexpr int kThreads = kWarpsM * kWarpsN * 32;
    static constexpr int kWarpRows = 16 * kRowTiles;
    static constexpr int kTileM = kWarpsM * kWarpRows;
    static constexpr int kTileN = kWarpsN * kKeys;
    static constexpr int kRowBytes = kHeadDim * 2;
    static constexpr int kQueryBytes = kTileM * kRowBytes;
    static constexpr int kTileBytes = kTileN * kRowBytes; // one tile of K or of V
    static constexpr int kSharedBytes = kQueryBytes + 2 * kStages * kTileBytes;

    /* The values that a warp of a later split of the keys hands over: output, maxima, sums, a column of 32 floats each.
     */
    static constexpr int kMergeValues = kRowTiles * (kHeadDim / 2 + 4);
    static_assert((kWarpsN - 1) * kWarpsM * kMergeValues * 32 * 4 <= 2 * kStages * kTileBytes,
                  "the merge reuses the K and V tiles");
    static_assert(kPlain || kSurface == Surface::kServing || (kStages == 1 && kWarpsN == 1),
                  "one tile of bias and mask, in whole rows of a warp");
    static_assert(kKeys % 16 == 0 && kHeadDim % 32 == 0, "mma.sync tiles of 16");
};

/* A launch. The sequence lengths, and so every row and key index, fit in 28 bits. */
struct MmaArgs {
    AttentionParams problem;
    ScoreParams score;
    Band visible;
    Divider heads, group;                   // query heads a batch entry, a K/V head
    Divider per_section, width, last_width; // blocks of a section; heads of one, of the last one
    int row_blocks;                         // tiles of kTileM queries a head
    int sections;
    bool chunks_q, chunks_k, chunks_v, chunks_o; // whether 16-byte chunks are aligned
    bool chunks_bias, chunks_mask;               // the same of bias and mask
    int bias_at, mask_at;                        // where in shared memory
    int shared_bytes;
    int64_t sink_row; // distance of the sinks of neighbouring rows: 0, or heads are rows
    int splits;       // parts of the keys; with more than 1, each writes to `partial`
    float *partial;   // as partial.cuh says: (splits, rows, kHeadDim), then (splits, rows) states

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
