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

/* Rows of one head of an operand in global memory, as one thread of a block of THREADS copies them into tiles. Columns
 * from `columns` to COLUMNS and rows outside [begin, end) become zeros and are not read. */
template <int COLUMNS, int THREADS> class RowLoader {
    using Layout = TileLayout<COLUMNS>;
    static constexpr int CHUNKS = Layout::PERIOD;           // neighbouring chunks that neighbouring threads take
    static constexpr int STEP = THREADS / CHUNKS;           // rows between two chunks of a thread
    static constexpr int GROUPS = COLUMNS / (CHUNKS * 8);   // chunks of a thread in one row
    static_assert(STEP % 8 == 0, "a thread's rows share one key");

    const char *first; // this thread's chunk of row 0
    int64_t row_bytes;
    int64_t element_bytes; // distance of neighbouring elements: 2 where cp.async copies
    int bytes[GROUPS];     // that exist of each of this thread's chunks
    uint32_t shared_offset;
    int row;

  public:
    __device__ RowLoader(const void *head, int64_t row_stride, int64_t element_stride, int columns) {
        const int chunk = threadIdx.x % CHUNKS;
        row = threadIdx.x / CHUNKS;
        row_bytes = row_stride * 2;
        element_bytes = element_stride * 2;
        first = static_cast<const char *>(head) + chunk * 8 * element_bytes;
        shared_offset = Layout::offset(row, chunk);
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) bytes[g] = min(max(columns - (chunk + g * CHUNKS) * 8, 0), 8) * 2;
    }

    /* Starts the copy of rows [first_row, first_row + ROWS) into `tile`. Needs 16-byte aligned chunks. */
    template <int ROWS> __device__ __forceinline__ void copy(uint32_t tile, int first_row, int begin, int end) const {
        static_assert(ROWS % STEP == 0 || ROWS < STEP, "no thread's last step is beyond the tile, but its first");
        if (ROWS < STEP && row >= ROWS) return;
        const char *from = first + (first_row + row) * row_bytes;
        const int from_begin = first_row + row - begin;
        const unsigned rows = max(end - begin, 0);
#pragma unroll
        for (int r = 0; r < ROWS; r += STEP) {
            const bool exists = unsigned(from_begin + r) < rows;
#pragma unroll
            for (int g = 0; g < GROUPS; ++g)
                cp_async_16(tile + shared_offset + r * Layout::ROW_BYTES + g * CHUNKS * 16, from + g * CHUNKS * 16,
                            exists ? bytes[g] : 0);
            from += STEP * row_bytes;
        }
    }

    /* The same for rows of any alignment and element stride, element by element; has read them when it returns. */
    template <int ROWS> __device__ void copy_elements(uint32_t tile, int first_row, int begin, int end) const {
        if (ROWS < STEP && row >= ROWS) return;
#pragma unroll 1
        for (int n = 0; n < (ROWS + STEP - 1) / STEP * GROUPS; ++n) {
            const int r = n / GROUPS * STEP, g = n % GROUPS, at = first_row + row + r;
            const char *from = first + at * row_bytes + g * CHUNKS * 8 * element_bytes;
            int count = bytes[0] / 2;
#pragma unroll
            for (int i = 1; i < GROUPS; ++i)
                if (i == g) count = bytes[i] / 2;
            if (at < begin || at >= end) count = 0;
            uint32_t word[4];
#pragma unroll
            for (int i = 0; i < 8; i += 2) {
                uint32_t low = i < count ? *reinterpret_cast<const uint16_t *>(from + i * element_bytes) : 0;
                uint32_t high = i + 1 < count ? *reinterpret_cast<const uint16_t *>(from + (i + 1) * element_bytes) : 0;
                word[i / 2] = low | high << 16;
            }
            store_shared(tile + shared_offset + r * Layout::ROW_BYTES + g * CHUNKS * 16,
                         make_uint4(word[0], word[1], word[2], word[3]));
        }
    }
};

} // namespace fa

#endif
