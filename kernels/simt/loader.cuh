/* Blocks of rows from global memory of any strides to float32 in shared memory. */
#pragma once

#include <bit>         // bit_cast
#include <type_traits> // conditional_t

#include "common/convert.cuh" // to_float
#include "common/rows.cuh"    // Chunk, row_of
#include "simt/tile.cuh"      // Tile

namespace fa::simt {

/* threadIdx.x, in a way that keeps the compiler from holding the addresses made of it in registers over the key loop:
 * with them the 32x64 tile took 168 registers instead of 128, and the 128x64 tile spilled. */
__device__ __forceinline__ int thread_index() {
    int t = threadIdx.x;
    asm volatile("" : "+r"(t));
    return t;
}

/* kRows rows of Q, K or V, dealt in chunks over kThreads threads (a group of warps, or the whole thread block). Rows
 * from `end` on and elements from `length` on are zero in shared memory and not read. */
template <typename T, Tile t, int kRows, int kThreads> struct Loader {
    static constexpr int kDim = t.head_dim, kStride = t.row_floats();
    static constexpr int kWidth = chunk_width<T>(t);
    static constexpr int kChunks = kDim / kWidth, kItems = (kRows * kChunks + kThreads - 1) / kThreads;
    using Word = std::conditional_t<kWidth * sizeof(T) % 4, uint16_t, uint32_t>;
    using Raw = Chunk<Word, kWidth * sizeof(T) / sizeof(Word)>; // a chunk on its way, in whole registers

    const T *base; // row 0 of the head
    int64_t stride_row, stride_dim;
    int length;
    bool chunks; // whole chunks may be loaded

    __device__ Loader(const fa_operand &x, int64_t batch, int64_t head, int length, bool chunks)
        : base(row_of<T>(x, batch, head, 0)), stride_row(x.stride[2]), stride_dim(x.stride[3]), length(length),
          chunks(chunks) {}

    /* Chunk `item` of this thread, of the block of rows that starts at `first`. */
    __device__ Raw fetch(int item, int64_t first, int64_t end) const {
        const int n = thread_index() % kThreads + item * kThreads, row = n / kChunks, dim = n % kChunks * kWidth;
        if (row < kRows && first + row < end && dim < length)
            return *reinterpret_cast<const Raw *>(base + (first + row) * stride_row + dim);
        return Raw{};
    }

    __device__ static void store(float *smem, int item, const Raw &raw) {
        const int n = thread_index() % kThreads + item * kThreads, row = n / kChunks, dim = n % kChunks * kWidth;
        if (item >= kItems || row >= kRows) return;
        const auto chunk = std::bit_cast<Chunk<T, kWidth>>(raw);
        float *target = smem + row * kStride + dim;
        if constexpr (kWidth % 4 == 0) {
#pragma unroll
            for (int i = 0; i < kWidth; i += 4)
                *reinterpret_cast<float4 *>(target + i) =
                    make_float4(to_float(chunk.element[i]), to_float(chunk.element[i + 1]),
                                to_float(chunk.element[i + 2]), to_float(chunk.element[i + 3]));
        } else {
#pragma unroll
            for (int i = 0; i < kWidth; ++i) target[i] = to_float(chunk.element[i]);
        }
    }

    /* Global to shared memory. Rolled, kBatch chunks at a time: their loads overlap without holding many registers. */
    __device__ void copy(float *smem, int64_t first, int64_t end) const {
        if (!chunks) return copy_elements(smem, first, end);
        constexpr int kBatch = kItems < 4 ? kItems : 4;
#pragma unroll 1
        for (int item = 0; item < kItems; item += kBatch) {
            Raw raw[kBatch];
#pragma unroll
            for (int i = 0; i < kBatch; ++i) raw[i] = fetch(item + i, first, end);
#pragma unroll
            for (int i = 0; i < kBatch; ++i) store(smem, item + i, raw[i]);
        }
    }

    __device__ void copy_elements(float *smem, int64_t first, int64_t end) const {
#pragma unroll 4
        for (int n = thread_index() % kThreads; n < kRows * kDim; n += kThreads) {
            const int row = n / kDim, dim = n % kDim;
            const bool inside = first + row < end && dim < length;
            smem[row * kStride + dim] = inside ? to_float(base[(first + row) * stride_row + dim * stride_dim]) : 0.0f;
        }
    }
};

/* A block of K or V rows on its way. With kSyncPrefetch it leaves global memory at fetch() and waits in registers,
 * where chunks can be loaded and the registers suffice (64 are for addresses and the like); else all happens in
 * store(). On the 128x64 tile the 16 registers of float16 gain 10%, where the 32 of float32 lost 5%. */
template <Tile t, typename L> struct NextBlock {
    static constexpr int kWords = L::kItems * sizeof(typename L::Raw) / sizeof(float);
    static constexpr bool kPrefetch =
        t.prefetch() && kWords + t.accumulators() + 4 * t.lane_rows() + 64 <= t.registers();
    typename L::Raw raw[kPrefetch ? L::kItems : 1];

    __device__ void fetch(const L &loader, int64_t first, int64_t end) {
        if constexpr (kPrefetch) {
            if (!loader.chunks) return;
#pragma unroll
            for (int i = 0; i < L::kItems; ++i) raw[i] = loader.fetch(i, first, end);
        }
    }
    __device__ void store(const L &loader, float *smem, int64_t first, int64_t end) const {
        if constexpr (kPrefetch) {
            if (!loader.chunks) return loader.copy_elements(smem, first, end);
#pragma unroll
            for (int i = 0; i < L::kItems; ++i) L::store(smem, i, raw[i]);
        } else {
            loader.copy(smem, first, end);
        }
    }
};

} // namespace fa::simt
