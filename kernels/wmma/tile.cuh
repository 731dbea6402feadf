/* Tiles of rows in shared memory as the WMMA loads want them: row-major, and padded by 16 bytes a row, so that the rows
 * that one load touches fall on different banks while every 16th row stays 32-byte aligned. */
#pragma once

#include <stdint.h> // int64_t

#include "common/convert.cuh" // from_float
#include "common/rows.cuh"    // Chunk
#include "wmma/pipeline.cuh"  // copy_16_async

namespace fa::wmma_tiles {

constexpr int kWarp = 32;
constexpr int kChunk = 8; // elements in 16 bytes

/* Elements from one row of a tile to the next. */
template <int kColumns> constexpr int kPitch = kColumns + kChunk;

/* Rows of one head in global memory: `columns` elements each, row r from data + r * row_stride. */
template <typename T> struct HeadRows {
    const T *data;
    int64_t row_stride, column_stride;
    int columns;
    bool aligned; // every row starts at a multiple of 16 bytes and is contiguous
};

/* Host: whether HeadRows of this operand are aligned. */
inline bool rows_aligned(const fa_operand &x, int columns) {
    return reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && (x.stride[3] == 1 || columns == 1) &&
           x.stride[0] % kChunk == 0 && x.stride[1] % kChunk == 0 && x.stride[2] % kChunk == 0;
}

/* One warp fills `tile` (kRows x kColumns) with rows [first, first + kRows); rows outside [begin, end) and columns that
 * do not exist become 0 and are not read. Aligned rows are copied asynchronously; others are there when this returns.
 */
template <int kRows, int kColumns, typename T>
__device__ __forceinline__ void load_tile(T *tile, const HeadRows<T> &rows, int first, int begin, int end, int lane) {
    constexpr int kAcross = kColumns / kChunk < kWarp ? kColumns / kChunk : kWarp; // lanes that share a row
    constexpr int kDown = kWarp / kAcross;
    static_assert(kColumns % kChunk == 0 && (kAcross & (kAcross - 1)) == 0 && kColumns == kAcross * kChunk &&
                  kRows % kDown == 0);
    const int column = lane % kAcross * kChunk, row = lane / kAcross;
    const int count = min(max(rows.columns - column, 0), kChunk);
    T *to = tile + row * kPitch<kColumns> + column;
    const T *from = rows.data + (first + row) * rows.row_stride + column * rows.column_stride;
    const int low = begin - first, high = end - first;
    if (rows.aligned) {
#pragma unroll 4
        for (int r = 0; r < kRows; r += kDown) {
            const bool exists = r + row >= low && r + row < high;
            copy_16_async(to, exists ? from : rows.data, exists ? count * int(sizeof(T)) : 0);
            to += kDown * kPitch<kColumns>;
            from += kDown * rows.row_stride;
        }
    } else {
#pragma unroll 1
        for (int r = 0; r < kRows; r += kDown) {
            const bool exists = r + row >= low && r + row < high;
            Chunk<T, kChunk> chunk;
#pragma unroll
            for (int i = 0; i < kChunk; ++i)
                chunk.element[i] = exists && i < count ? from[i * rows.column_stride] : from_float<T>(0.0f);
            *reinterpret_cast<Chunk<T, kChunk> *>(to) = chunk;
            to += kDown * kPitch<kColumns>;
            from += kDown * rows.row_stride;
        }
    }
}

/* One warp writes kRows rows of kColumns floats, `pitch` apart, to rows [first, ...) of the output that exist, from
 * column `column` on. `out` is row 0 of the head. */
template <int kRows, int kColumns, typename T>
__device__ __forceinline__ void store_rows(T *out, int64_t row_stride, int64_t column_stride, bool aligned, int columns,
                                           int column, int first, int end, const float *tile, int pitch, int lane) {
    constexpr int kAcross = kColumns / kChunk, kDown = kWarp / kAcross;
    static_assert(kColumns % kChunk == 0 && kWarp % kAcross == 0 && kRows % kDown == 0);
    const int at = lane % kAcross * kChunk, count = min(columns - column - at, kChunk);
    for (int r = lane / kAcross; r < kRows && first + r < end; r += kDown) {
        const float *from = tile + r * pitch + at;
        T *to = out + (first + r) * row_stride + (column + at) * column_stride;
        Chunk<T, kChunk> chunk;
#pragma unroll
        for (int i = 0; i < kChunk; ++i) chunk.element[i] = from_float<T>(from[i]);
        if (aligned && count == kChunk)
            *reinterpret_cast<Chunk<T, kChunk> *>(to) = chunk;
        else
            for (int i = 0; i < count; ++i) to[i * column_stride] = from_float<T>(from[i]);
    }
}

} // namespace fa::wmma_tiles
