/* Tiles of rows on their way through mma_backward_sm80: from global to shared memory, and as operands of mma.sync.
 *
 * A tile lies as sm80/tile.cuh says. One copy of the other rows serves twice: as operand b of S or dP (rows of the tile
 * are columns of the product), read by ldmatrix as it lies, and as operand b of a gradient (rows of the tile are summed
 * over), read by ldmatrix.trans. The weights between are accumulators of the former product, which are operand a of the
 * latter as they come: no weight passes through shared memory. */
#pragma once

#include <stdint.h> // int64_t, uint32_t

#include "common/ptx.cuh"  // cp_async_16, store_shared, ldmatrix_x4, mma_16x8x16, pack
#include "common/rows.cuh" // row_of
#include "fa.h"            // fa_operand
#include "sm80/scores.cuh" // Scores
#include "sm80/tile.cuh"   // TileLayout, BlockAddress

namespace fa {

/* Copies of kRows rows of kColumns 16-bit elements by a block of kThreads. */
template <int kColumns, int kThreads, int kRows> struct RowCopy {
    using Layout = TileLayout<kColumns>;
    static constexpr int kChunks = Layout::kPeriod;          // neighbouring chunks that neighbouring threads take
    static constexpr int kStep = kThreads / kChunks;         // rows between two chunks of a thread
    static constexpr int kGroups = kColumns / (kChunks * 8); // chunks of a thread in one row
    static_assert(kStep % 8 == 0, "a thread's rows share one key of the layout");
    static_assert(kRows % kStep == 0 || kRows < kStep, "only a thread's first row can lie beyond the tile");

    /* Starts the copy of the rows [first, first + kRows) of (batch, head), counted from row `base` of the operand.
     * Columns from `length` on, rows that `exists` does not name, and all of an absent operand become zeros and are not
     * read. `chunks`: rows are whole 16-byte aligned chunks of neighbouring elements; otherwise the elements are read
     * when this returns. */
    template <class Exists>
    __device__ static __forceinline__ void start(uint32_t tile, const fa_operand &x, int64_t batch, int64_t head,
                                                 int base, int first, int length, bool chunks, Exists &&exists) {
        const int row = threadIdx.x / kChunks, chunk = threadIdx.x % kChunks;
        if (kRows < kStep && row >= kRows) return;
        const int columns = x.data ? length - chunk * 8 : 0;
        const uint32_t to = tile + Layout::offset(row, chunk);
        const uint16_t *from = row_of<const uint16_t>(x, batch, head, first + row + base) + chunk * 8 * x.stride[3];
        if (chunks) {
#pragma unroll
            for (int r = 0; r < kRows; r += kStep, from += kStep * x.stride[2]) {
                const bool there = exists(first + row + r);
#pragma unroll
                for (int g = 0; g < kGroups; ++g)
                    cp_async_16(to + r * Layout::kRowBytes + g * kChunks * 16, from + g * kChunks * 8,
                                there && g * kChunks * 8 < columns);
            }
        } else {
#pragma unroll 1
            for (int r = 0; r < kRows; r += kStep, from += kStep * x.stride[2]) {
                const bool there = exists(first + row + r);
#pragma unroll 1
                for (int g = 0; g < kGroups; ++g) {
                    const uint16_t *at = from + g * kChunks * 8 * x.stride[3];
                    const int count = there ? columns - g * kChunks * 8 : 0;
                    uint32_t word[4] = {};
#pragma unroll
                    for (int i = 0; i < 8; ++i)
                        if (i < count) word[i / 2] |= uint32_t(at[i * x.stride[3]]) << i % 2 * 16;
                    store_shared(to + r * Layout::kRowBytes + g * kChunks * 16,
                                 make_uint4(word[0], word[1], word[2], word[3]));
                }
            }
        }
    }
};

/* Products of one warp, kRowTiles * 16 own rows, with kStep other rows. */
template <typename T, int kHeadDim, int kRowTiles, int kStep> struct WarpProduct {
    using Layout = TileLayout<kHeadDim>;
    using OwnAddress = BlockAddress<kHeadDim, BlockOrder::kRowsFirst>;       // own rows as operand a
    using ColumnAddress = BlockAddress<kHeadDim, BlockOrder::kColumnsFirst>; // other rows as columns of b
    using SummedAddress = BlockAddress<kHeadDim, BlockOrder::kRowsFirst>;    // other rows, transposed, as rows of b
    using Pairs = Scores<kRowTiles, kStep>;
    using Gradient = float[kRowTiles][kHeadDim / 8][4]; // as Pairs, head_dim in place of other rows
    static constexpr int kBlockBytes = 16 * Layout::kRowBytes;

    __device__ static __forceinline__ void clear(Pairs &s) {
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
            for (int j = 0; j < kStep / 8; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) s[r][j][e] = 0.0f;
    }

    /* s += own rows times other rows, over columns [16 step, 16 step + 16). */
    __device__ static __forceinline__ void add_block(Pairs &s, const OwnAddress &own, const ColumnAddress &other,
                                                     int step) {
        uint32_t a[kRowTiles][4];
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) ldmatrix_x4<false>(a[r], own.at(step) + r * kBlockBytes);
#pragma unroll
        for (int n = 0; n < kStep / 16; ++n) {
            multiply_block<T, false>(s, n, a, other.at(step) + n * kBlockBytes);
        }
    }

    /* s += own rows times other rows, over all columns; not unrolled beyond what the layout needs. */
    __device__ static __forceinline__ void add_product(Pairs &s, const OwnAddress &own, const ColumnAddress &other) {
        constexpr int kSteps = Layout::kPeriod / 2;
#pragma unroll 1
        for (int bytes = 0; bytes < Layout::kRowBytes; bytes += kSteps * 32)
#pragma unroll
            for (int step = 0; step < kSteps; ++step) add_block(s, own.shifted(bytes), other.shifted(bytes), step);
    }

    /* gradient += the weights, rounded to T, times the other rows. */
    __device__ static __forceinline__ void add_weighted(Gradient &gradient, const Pairs &weights,
                                                        const SummedAddress &other) {
#pragma unroll
        for (int n = 0; n < kStep / 16; ++n) {
            uint32_t a[kRowTiles][4];
#pragma unroll
            for (int r = 0; r < kRowTiles; ++r) {
                round_operand<T>(a[r], weights[r][2 * n], weights[r][2 * n + 1]);
            }
#pragma unroll
            for (int step = 0; step < kHeadDim / 16; ++step) {
                multiply_block<T, true>(gradient, step, a, other.at(step) + n * kBlockBytes);
            }
        }
    }
};

} // namespace fa
