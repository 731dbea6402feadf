/* Tiles of 16-bit rows in shared memory: where an element lies, how a block fills a tile, what ldmatrix reads of it.
 *
 * A tile is ROWS rows of COLUMNS elements, cut into 16-byte chunks. Chunk c of row r lies at position c ^ key(r) of its
 * row. With COLUMNS a multiple of 64 the key is r % 8; a row is then a multiple of 128 bytes, all banks once. Otherwise
 * (32, 96: an odd multiple of 64 bytes) it is r / 2 % 4. Either way the eight rows that one phase of ldmatrix reads,
 * and the chunks that eight neighbouring threads write, fall on eight different groups of four banks. */
#pragma once

#include <stdint.h> // int64_t, uint32_t

#include "common/ptx.cuh" // cp_async_16, store_shared

namespace fa {

template <int COLUMNS> struct TileLayout {
    static_assert(COLUMNS % 32 == 0, "a row is a multiple of 64 bytes");
    static constexpr int ROW_BYTES = COLUMNS * 2;
    static constexpr int PERIOD = COLUMNS % 64 == 0 ? 8 : 4; // chunks that the key permutes

    __device__ static uint32_t key(int row) { return PERIOD == 8 ? row & 7 : row >> 1 & 3; }
    __device__ static uint32_t offset(int row, int chunk) { return row * ROW_BYTES + ((chunk ^ key(row)) << 4); }
};

/* In which order ldmatrix delivers the 8x8 matrices of a 16x16 block, so that the registers are an operand of
 * mma_16x8x16 as they come (an operand is consecutive registers: any other order costs moves). */
enum class BlockOrder {
    ROWS_FIRST,    // (0, 0), (8, 0), (0, 8), (8, 8): query rows as operand a; value rows, transposed, as two operands b
    COLUMNS_FIRST, // (0, 0), (0, 8), (8, 0), (8, 8): key rows as two operands b
};

/* The address that a lane gives to ldmatrix for a 16x16 block at (row, column), both multiples of 16, is
 * `at(column / 16) + row * ROW_BYTES`. The lane's own row and chunk inside the block are in `base`; the key depends on
 * the lane alone, and column / 16 enters its XOR through PERIOD / 2 values: the rest are immediate offsets. */
template <int COLUMNS, BlockOrder ORDER> class BlockAddress {
    using Layout = TileLayout<COLUMNS>;
    uint32_t base;

  public:
    __device__ BlockAddress(uint32_t tile, int lane) {
        const int low = lane >> 3 & 1, high = lane >> 4;
        base = tile + (ORDER == BlockOrder::ROWS_FIRST ? Layout::offset((lane & 7) + low * 8, high)
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
        constexpr int period = Layout::PERIOD / 2;
        return (base ^ (block % period * 32)) + block / period * (period * 32);
    }
};

/* Rows of one head of an operand in global memory, as one thread of a block of THREADS copies them into tiles of ROWS
 * rows, from the last tile to the first. Columns from `columns` to COLUMNS and rows outside [begin, end) become zeros
 * and are not read. */
template <int COLUMNS, int THREADS, int ROWS> class RowLoader {
    using Layout = TileLayout<COLUMNS>;
    static constexpr int CHUNKS = Layout::PERIOD;         // neighbouring chunks that neighbouring threads take
    static constexpr int STEP = THREADS / CHUNKS;         // rows between two chunks of a thread
    static constexpr int GROUPS = COLUMNS / (CHUNKS * 8); // chunks of a thread in one row
    static_assert(STEP % 8 == 0, "a thread's rows share one key");
    static_assert(ROWS % STEP == 0 || ROWS < STEP, "only a thread's first row can lie beyond the tile");

    const char *from; // this thread's first chunk of the tile to be copied next
    int64_t row_bytes, element_bytes;
    int begin, end;
    int columns; // that exist, counted from this thread's first chunk

    __device__ static int thread_row() { return threadIdx.x / CHUNKS; }
    __device__ static int thread_chunk() { return threadIdx.x % CHUNKS; }

  public:
    /* `first_row`: of the tile that will be copied first. */
    __device__ RowLoader(const void *head, const int64_t (&stride)[4], int head_dim, int begin, int end, int first_row)
        : row_bytes(stride[2] * 2), element_bytes(stride[3] * 2), begin(begin), end(end),
          columns(head_dim - thread_chunk() * 8) {
        from = static_cast<const char *>(head) + (first_row + thread_row()) * row_bytes +
               thread_chunk() * 8 * element_bytes;
    }

    /* Starts the copy of rows [row, row + ROWS), which are ROWS before those of the last call. `chunks`: whole 16-byte
     * aligned chunks of neighbouring elements; otherwise element by element, read when this returns. */
    __device__ __forceinline__ void copy(uint32_t tile, int row, bool chunks) {
        const uint32_t to = tile + Layout::offset(thread_row(), thread_chunk());
        const unsigned first = row + thread_row() - begin, rows = end - begin;
        if (ROWS >= STEP || thread_row() < ROWS) {
            if (chunks)
                copy_chunks(to, first, rows);
            else
                copy_elements(to, first, rows);
        }
        from -= ROWS * row_bytes;
    }

  private:
    __device__ __forceinline__ void copy_chunks(uint32_t to, unsigned first, unsigned rows) const {
        const char *at = from;
#pragma unroll
        for (int r = 0; r < ROWS; r += STEP) {
#pragma unroll
            for (int g = 0; g < GROUPS; ++g)
                cp_async_16(to + r * Layout::ROW_BYTES + g * CHUNKS * 16, at + g * CHUNKS * 16,
                            first + r < rows && g * CHUNKS * 8 < columns);
            at += STEP * row_bytes;
        }
    }

    __device__ __forceinline__ void copy_elements(uint32_t to, unsigned first, unsigned rows) const {
#pragma unroll 1
        for (int r = 0; r < ROWS; r += STEP) {
#pragma unroll 1
            for (int g = 0; g < GROUPS; ++g) {
                const char *at = from + r * row_bytes + g * CHUNKS * 8 * element_bytes;
                const int count = first + r < rows ? columns - g * CHUNKS * 8 : 0;
                uint32_t word[4] = {};
#pragma unroll
                for (int i = 0; i < 8; ++i)
                    if (i < count)
                        word[i / 2] |= uint32_t(*reinterpret_cast<const uint16_t *>(at + i * element_bytes))
                                       << i % 2 * 16;
                store_shared(to + r * Layout::ROW_BYTES + g * CHUNKS * 16,
                             make_uint4(word[0], word[1], word[2], word[3]));
            }
        }
    }
};

} // namespace fa
