/* Which pairs of a query and a key a boolean mask leaves, as main loops read it.
 *
 * A PairMap has two parts, over blocks of 64 rows x 64 columns. Rows are those of a main loop's accumulators: queries,
 * or in a kernel whose accumulators have keys as rows, keys. Columns are the other ones.
 *
 *   seen, whole   a bit a block: whether some of its pairs are visible, and whether all are.
 *   words         the pairs themselves, in the order of accumulators. 16 rows x 64 columns are 32 words, one a lane:
 * bit 2 g + e of lane l's is the pair of row l / 4 and column 8 g + 2 (l % 4) + e, bit 16 + 2 g + e that of row l / 4
 * + 8.
 *
 * Keys are counted from the call's first visible one. A mask that is the same along an axis has one block of it, and a
 * step of 0. A block that the end of the rows or columns cuts is judged by the pairs that are there, whose bits alone
 * mean something: causal, windows and ends are not in a map. */
#pragma once
#include <stdint.h> // uint32_t, int64_t

namespace fa::sm90 {

struct PairMap {
    const uint32_t *words;                            // [batch][head][row block * 4][column block][32]
    const uint32_t *seen, *whole;                     // [batch][head][row block][bits of column blocks, 32 a word]
    int heads, row_blocks, column_blocks, bit_words;  // extents of the map
    int batch_step, head_step, row_step, column_step; // 0: the mask is the same along the axis; else 1

    __device__ __forceinline__ int plane(int batch, int head) const {
        return batch * batch_step * heads + head * head_step;
    }
    /* Where the bits of a block of rows begin, in `seen` and in `whole`. */
    __device__ __forceinline__ int64_t bits_of(int plane, int row_block) const {
        return (int64_t(plane) * row_blocks + row_block * row_step) * bit_words;
    }
    /* Which group of 16 rows that are `sixteenth` of a plane's is; where its words begin. Those of a block of columns
     * are 32 * column_step further than the block before's. */
    __device__ __forceinline__ int group_of(int plane, int sixteenth) const {
        return plane * row_blocks * 4 + sixteenth * row_step;
    }
    __device__ __forceinline__ const uint32_t *words_of(int group) const {
        return words + int64_t(group) * column_blocks * 32;
    }
};

} // namespace fa::sm90
