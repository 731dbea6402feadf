/* mma_sm80 serving: rows that lie anywhere on their way to a tile in shared memory. */
#pragma once

#include <stdint.h> // int64_t, uint32_t

#include "common/ptx.cuh"        // cp_async_16, store_shared
#include "sm80/serve_config.cuh" // kNowhere
#include "sm80/tile.cuh"         // TileLayout

namespace fa::sm80 {

/* Copies kRows rows of 16-bit elements, row r from `base` + offset_of(r) elements on; one of kNowhere becomes zeros, as
 * do the columns from `columns` to kColumns, and is not read. `chunks`: whole 16-byte aligned chunks of neighbouring
 * elements; otherwise element by element, read when this returns. By a block of kThreads. */
template <int kColumns, int kThreads, int kRows> struct RowGatherer {
    using Layout = TileLayout<kColumns>;
    static constexpr int kChunks = Layout::kPeriod, kStep = kThreads / kChunks, kGroups = kColumns / (kChunks * 8);
    static_assert(kStep % 8 == 0 && kRows % kStep == 0, "a thread's rows share one key");

    const char *base;
    int64_t element_bytes;
    int columns;
    bool chunks;

    __device__ RowGatherer(const fa_operand &x, int64_t head, int columns, bool chunks)
        : base(static_cast<const char *>(x.data) + head * x.stride[1] * 2), element_bytes(x.stride[3] * 2),
          columns(columns), chunks(chunks) {}

    template <class OffsetOf> __device__ __forceinline__ void copy(uint32_t tile, OffsetOf offset_of) const {
        const int row = threadIdx.x / kChunks, chunk = threadIdx.x % kChunks;
        const uint32_t to = tile + Layout::offset(row, chunk);
        if (!chunks) return copy_elements(to, row, chunk, offset_of);
#pragma unroll
        for (int r = 0; r < kRows; r += kStep) {
            const int64_t offset = offset_of(row + r);
            const bool exists = offset != kNowhere;
            const char *from = base + (exists ? offset * 2 + chunk * 16 : 0);
#pragma unroll
            for (int g = 0; g < kGroups; ++g)
                cp_async_16(to + r * Layout::kRowBytes + g * kChunks * 16, from + g * kChunks * 16,
                            exists && (g * kChunks + chunk) * 8 < columns);
        }
    }

  private:
    template <class OffsetOf>
    __device__ __forceinline__ void copy_elements(uint32_t to, int row, int chunk, OffsetOf offset_of) const {
#pragma unroll 1
        for (int r = 0; r < kRows; r += kStep) {
            const int64_t offset = offset_of(row + r);
#pragma unroll 1
            for (int g = 0; g < kGroups; ++g) {
                const int first = (g * kChunks + chunk) * 8;
                const int count = offset != kNowhere ? columns - first : 0;
                const char *from = base + (offset != kNowhere ? offset * 2 + first * element_bytes : 0);
                uint32_t word[4] = {};
#pragma unroll
                for (int i = 0; i < 8; ++i)
                    if (i < count)
                        word[i / 2] |= uint32_t(*reinterpret_cast<const uint16_t *>(from + i * element_bytes))
                                       << i % 2 * 16;
                store_shared(to + r * Layout::kRowBytes + g * kChunks * 16,
                             make_uint4(word[0], word[1], word[2], word[3]));
            }
        }
    }
};

} // namespace fa::sm80
