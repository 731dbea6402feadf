/* Tiles of 16-bit rows in shared memory: where an element lies, how a block fills a tile, what ldmatrix reads of it.
 *
 * A tile is ROWS rows of COLUMNS elements, cut into 16-byte chunks. Chunk c of row r lies at position c ^ key(r) of its
 * row. With COLUMNS a multiple of 64 the key is r % 8; a row is then a multiple of 128 bytes, all banks once. Otherwise
 * (32, 96: an odd multiple of 64 bytes) it is r / 2 % 4. Either way the eight rows that one phase of ldmatrix reads, and
 * the chunks that eight neighbouring threads write, fall on eight different groups of four banks. */
#ifndef FA_MMA_TILE_CUH
#define FA_MMA_TILE_CUH

#include <stdint.h> // int64_t, uint32_t

#include "sm80_ptx.cuh" // cp_async_16, ldmatrix_x4, store_shared

namespace fa {

template <int COLUMNS> struct TileLayout {
    static_assert(COLUMNS % 32 == 0, "a row is a multiple of 64 bytes");
    static constexpr int ROW_BYTES = COLUMNS * 2;
    static constexpr int PERIOD = COLUMNS % 64 == 0 ? 8 : 4; // chunks that the key permutes

    __device__ static uint32_t key(int row) { return PERIOD == 8 ? row & 7 : row >> 1 & 3; }
    __device__ static uint32_t offset(int row, int chunk) { return row * ROW_BYTES + ((chunk ^ key(row)) << 4); }
};

/* The address that a lane gives to ldmatrix for a 16x16 block at (row, column), both multiples of 16, is
 * `at(column / 16) + row * ROW_BYTES`. The lane's own row and chunk inside the block are in `base`; the key depends on
 * the lane alone, and column / 16 enters its XOR through PERIOD / 2 values: the rest are immediate offsets. */
template <int COLUMNS> struct BlockAddress {
    using Layout = TileLayout<COLUMNS>;
    uint32_t base;

    __device__ BlockAddress(uint32_t tile, int lane_row, int lane_chunk)
        : base(tile + Layout::offset(lane_row, lane_chunk)) {}
    __device__ uint32_t at(int block) const {
        constexpr int period = Layout::PERIOD / 2;
        return (base ^ (block % period * 32)) + block / period * (period * 32);
    }
};

/* Lane's row and chunk for operand a (query rows) and, transposed, for operand b of weights times values: matrices in
 * the order (0, 0), (8, 0), (0, 8), (8, 8) of the block. */
__device__ __forceinline__ int rows_first_row(int lane) { return lane & 15; }
__device__ __forceinline__ int rows_first_chunk(int lane) { return lane >> 4; }
/* For operand b of query times key: (0, 0), (0, 8), (8, 0), (8, 8), so that registers 0, 1 belong to keys 0..7. */
__device__ __forceinline__ int columns_first_row(int lane) { return (lane & 7) + (lane >> 4 << 3); }
__device__ __forceinline__ int columns_first_chunk(int lane) { return lane >> 3 & 1; }

/* Rows of one head of an operand in global memory, as one thread of a block of THREADS copies them into tiles: from
 * `seek` on, each copy takes ROWS rows and the next one the ROWS rows before them. Columns from `columns` to COLUMNS and
 * rows outside [begin, end) become zeros and are not read. */
template <int COLUMNS, int THREADS, int ROWS> class RowLoader {
    using Layout = TileLayout<COLUMNS>;
    static constexpr int CHUNKS = Layout::PERIOD;         // neighbouring chunks that neighbouring threads take
    static constexpr int STEP = THREADS / CHUNKS;         // rows between two chunks of a thread
    static constexpr int GROUPS = COLUMNS / (CHUNKS * 8); // chunks of a thread in one row
    static_assert(STEP % 8 == 0, "a thread's rows share one key");
    static_assert(ROWS % STEP == 0 || ROWS < STEP, "only a thread's first row can lie beyond the tile");

    const char *from; // this thread's first chunk
    int64_t row_bytes, element_bytes;
    int row, rows; // of `from`, counted from `begin`; rows that exist
    int columns;   // that exist, counted from this thread's first chunk
    uint32_t to;   // offset in the tile

  public:
    __device__ RowLoader(const void *head, const int64_t (&stride)[4], int begin, int end, int head_dim) {
        const int chunk = threadIdx.x % CHUNKS;
        row = int(threadIdx.x) / CHUNKS - begin;
        rows = end - begin;
        columns = head_dim - chunk * 8;
        row_bytes = stride[2] * 2;
        element_bytes = stride[3] * 2;
        from = static_cast<const char *>(head) + threadIdx.x / CHUNKS * row_bytes + chunk * 8 * element_bytes;
        to = Layout::offset(threadIdx.x / CHUNKS, chunk);
    }

    /* The next copy takes the rows from `first_row` on; before the first copy only. */
    __device__ __forceinline__ void seek(int first_row) {
        row += first_row;
        from += first_row * row_bytes;
    }

    /* Starts the copy of the next rows into `tile`. Needs whole 16-byte aligned chunks. */
    __device__ __forceinline__ void copy(uint32_t tile) {
        if (ROWS >= STEP || threadIdx.x / CHUNKS < ROWS) {
            const char *at = from;
#pragma unroll
            for (int r = 0; r < ROWS; r += STEP) {
                const bool exists = unsigned(row + r) < unsigned(rows);
#pragma unroll
                for (int g = 0; g < GROUPS; ++g)
                    cp_async_16(tile + to + r * Layout::ROW_BYTES + g * CHUNKS * 16, at + g * CHUNKS * 16,
                                exists && g * CHUNKS * 8 < columns);
                at += STEP * row_bytes;
            }
        }
        seek(-ROWS);
    }

    /* The same for rows of any alignment and element stride, element by element; has read them when it returns. */
    __device__ __forceinline__ void copy_elements(uint32_t tile) {
        if (ROWS >= STEP || threadIdx.x / CHUNKS < ROWS) {
#pragma unroll 1
            for (int r = 0; r < ROWS; r += STEP) {
#pragma unroll 1
                for (int g = 0; g < GROUPS; ++g) {
                    const char *at = from + r * row_bytes + g * CHUNKS * 8 * element_bytes;
                    const int count = unsigned(row + r) < unsigned(rows) ? columns - g * CHUNKS * 8 : 0;
                    uint32_t word[4] = {};
#pragma unroll
                    for (int i = 0; i < 8; ++i)
                        if (i < count)
                            word[i / 2] |= uint32_t(*reinterpret_cast<const uint16_t *>(at + i * element_bytes))
                                           << i % 2 * 16;
                    store_shared(tile + to + r * Layout::ROW_BYTES + g * CHUNKS * 16,
                                 make_uint4(word[0], word[1], word[2], word[3]));
                }
            }
        }
        seek(-ROWS);
    }

    __device__ __forceinline__ void copy(uint32_t tile, bool chunks) { chunks ? copy(tile) : copy_elements(tile); }
};

} // namespace fa

#endif
