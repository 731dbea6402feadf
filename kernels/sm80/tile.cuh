/* Tiles of 16-bit rows in shared memory: where an element lies, how a block fills a tile, what ldmatrix reads of it.
 *
 * A tile is kRows rows of kColumns elements, cut into 16-byte chunks. Chunk c of row r lies at position c ^ key(r) of
 * its row. With kColumns a multiple of 64 the key is r % 8; a row is then a multiple of 128 bytes, all banks once.
 * Otherwise (32, 96: an odd multiple of 64 bytes) it is r / 2 % 4. Either way the eight rows that one phase of ldmatrix
 * reads, and the chunks that eight neighbouring threads write, fall on eight different groups of four banks. */
#pragma once

#include <stdint.h> // int64_t, uint32_t

#include "common/ptx.cuh" // cp_async_16, ldmatrix_x4, mma_16x8x16, pack, store_shared

namespace fa {

template <int kColumns> struct TileLayout {
    static_assert(kColumns % 32 == 0, "a row is a multiple of 64 bytes");
    static constexpr int kRowBytes = kColumns * 2;
    static constexpr int kPeriod = kColumns % 64 == 0 ? 8 : 4; // chunks that the key permutes

    __device__ static uint32_t key(int row) { return kPeriod == 8 ? row & 7 : row >> 1 & 3; }
    __device__ static uint32_t offset(int row, int chunk) { return row * kRowBytes + ((chunk ^ key(row)) << 4); }
};

/* In which order ldmatrix delivers the 8x8 matrices of a 16x16 block, so that the registers are an operand of
 * mma_16x8x16 as they come (an operand is consecutive registers: any other order costs moves). */
enum class BlockOrder {
    kRowsFirst,    // (0, 0), (8, 0), (0, 8), (8, 8): query rows as operand a; value rows, transposed, as two operands b
    kColumnsFirst, // (0, 0), (0, 8), (8, 0), (8, 8): key rows as two operands b
};

/* The address that a lane gives to ldmatrix for a 16x16 block at (row, column), both multiples of 16, is
 * `at(column / 16) + row * kRowBytes`. The lane's own row and chunk inside the block are in `base`; the key depends on
 * the lane alone, and column / 16 enters its XOR through kPeriod / 2 values: the rest are immediate offsets. */
template <int kColumns, BlockOrder kOrder> class BlockAddress {
    using Layout = TileLayout<kColumns>;
    uint32_t base;

  public:
    __device__ BlockAddress(uint32_t tile, int lane) {
        const int low = lane >> 3 & 1, high = lane >> 4;
        base = tile + (kOrder == BlockOrder::kRowsFirst ? Layout::offset((lane & 7) + low * 8, high)
                                                        : Layout::offset((lane & 7) + high * 8, low));
    }
    __device__ BlockAddress shifted(uint32_t bytes) const {
        BlockAddress moved = *this;
        moved.base += bytes;
        return moved;
    }
    /* Makes the compiler keep the address in a register: it would compute it anew for each tile, 20 instructions. */
    __device__ void keep() { asm volatile("" : "+r"(base)); }

    __device__ uint32_t at(int block) const {
        constexpr int period = Layout::kPeriod / 2;
        return (base ^ (block % period * 32)) + block / period * (period * 32);
    }
};

/* Columns [16 j, 16 j + 16) of d += a b, for row tiles of 16 rows each. `a`: operand a of mma_16x8x16, 16 columns of
 * each row tile; `address`: what this lane gives to ldmatrix for b, a 16x16 block. */
template <typename T, bool kTransposed, int kRowTiles, int kTiles>
__device__ __forceinline__ void multiply_block(float (&d)[kRowTiles][kTiles][4], int j,
                                               const uint32_t (&a)[kRowTiles][4], uint32_t address) {
    uint32_t b[4];
    ldmatrix_x4<kTransposed>(b, address);
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
        mma_16x8x16<T>(d[r][2 * j], a[r], b[0], b[1]);
        mma_16x8x16<T>(d[r][2 * j + 1], a[r], b[2], b[3]);
    }
}

/* Two neighbouring accumulators, 16 x 8 each, rounded to operand a of the next product. */
template <typename T>
__device__ __forceinline__ void round_operand(uint32_t (&a)[4], const float (&low)[4], const float (&high)[4]) {
    a[0] = pack<T>(low[0], low[1]), a[1] = pack<T>(low[2], low[3]);
    a[2] = pack<T>(high[0], high[1]), a[3] = pack<T>(high[2], high[3]);
}

/* Rows of one head of an operand in global memory, as one thread of a block of kThreads copies them into tiles of kRows
 * rows, from the last tile to the first. Columns from `columns` to kColumns and rows outside [begin, end) become zeros
 * and are not read. */
template <int kColumns, int kThreads, int kRows> class RowLoader {
    using Layout = TileLayout<kColumns>;
    static constexpr int kChunks = Layout::kPeriod;          // neighbouring chunks that neighbouring threads take
    static constexpr int kStep = kThreads / kChunks;         // rows between two chunks of a thread
    static constexpr int kGroups = kColumns / (kChunks * 8); // chunks of a thread in one row
    static_assert(kStep % 8 == 0, "a thread's rows share one key");
    static_assert(kRows % kStep == 0 || kRows < kStep, "only a thread's first row can lie beyond the tile");

    const char *from; // this thread's first chunk of the tile to be copied next
    int64_t row_bytes, element_bytes;
    int begin, end;
    int columns; // that exist, counted from this thread's first chunk

    __device__ static int thread_row() { return threadIdx.x / kChunks; }
    __device__ static int thread_chunk() { return threadIdx.x % kChunks; }

  public:
    /* `first_row`: of the tile that will be copied first. */
    __device__ RowLoader(const void *head, const int64_t (&stride)[4], int head_dim, int begin, int end, int first_row)
        : row_bytes(stride[2] * 2), element_bytes(stride[3] * 2), begin(begin), end(end),
          columns(head_dim - thread_chunk() * 8) {
        from = static_cast<const char *>(head) + (first_row + thread_row()) * row_bytes +
               thread_chunk() * 8 * element_bytes;
    }

    /* Starts the copy of rows [row, row + kRows), which are kRows before those of the last call. `chunks`: whole
     * 16-byte aligned chunks of neighbouring elements; otherwise element by element, read when this returns. */
    __device__ __forceinline__ void copy(uint32_t tile, int row, bool chunks) {
        const uint32_t to = tile + Layout::offset(thread_row(), thread_chunk());
        const unsigned first = row + thread_row() - begin, rows = end - begin;
        if (kRows >= kStep || thread_row() < kRows) {
            if (chunks)
                copy_chunks(to, first, rows);
            else
                copy_elements(to, first, rows);
        }
        from -= kRows * row_bytes;
    }

  private:
    __device__ __forceinline__ void copy_chunks(uint32_t to, unsigned first, unsigned rows) const {
        const char *at = from;
#pragma unroll
        for (int r = 0; r < kRows; r += kStep) {
#pragma unroll
            for (int g = 0; g < kGroups; ++g)
                cp_async_16(to + r * Layout::kRowBytes + g * kChunks * 16, at + g * kChunks * 16,
                            first + r < rows && g * kChunks * 8 < columns);
            at += kStep * row_bytes;
        }
    }

    __device__ __forceinline__ void copy_elements(uint32_t to, unsigned first, unsigned rows) const {
#pragma unroll 1
        for (int r = 0; r < kRows; r += kStep) {
#pragma unroll 1
            for (int g = 0; g < kGroups; ++g) {
                const char *at = from + r * row_bytes + g * kChunks * 8 * element_bytes;
                const int count = first + r < rows ? columns - g * kChunks * 8 : 0;
                uint32_t word[4] = {};
#pragma unroll
                for (int i = 0; i < 8; ++i)
                    if (i < count)
                        word[i / 2] |= uint32_t(*reinterpret_cast<const uint16_t *>(at + i * element_bytes))
                                       << i % 2 * 16;
                store_shared(to + r * Layout::kRowBytes + g * kChunks * 16,
                             make_uint4(word[0], word[1], word[2], word[3]));
            }
        }
    }
};

} // namespace fa
