/* From wgmma accumulators to global memory: through shared memory for TMA (stage_rows), or, where there is no room, in
 * 16-byte stores after shuffles (store_rows). On an H200 the end of a tile of 128 columns takes some 1000 cycles with
 * the first and 1450 with the second. */
#pragma once
#include "common/ptx.cuh" // pack
#include "sm90/common/barrier.cuh"
#include "sm90/common/softmax.cuh"
#include "sm90/common/tma.cuh"

namespace fa::sm90 {

/* 4 x 4 transpose over the four threads of a row: thread t gives word[g] and gets word[s] = what thread s gave as
 * word[t].
 */
__device__ __forceinline__ void quad_transpose(uint32_t (&word)[4], int t) {
    auto exchange = [&](int i, int j, int mask) {
        const bool high = t & mask;
        const uint32_t got = __shfl_xor_sync(0xffffffff, high ? word[i] : word[j], mask);
        word[i] = high ? got : word[i];
        word[j] = high ? word[j] : got;
    };
    exchange(0, 1, 1);
    exchange(2, 3, 1);
    exchange(0, 2, 2);
    exchange(1, 3, 2);
}

/* Writes rows lane / 4 and lane / 4 + 8 of a warp's 16 x 2 * Count accumulators, multiplied by factor[row], to `row[r]`
 * (16-byte aligned; NULL: not written), columns below `columns`, a multiple of 8. The whole warp calls it. */
template <class T, int Count>
__device__ __forceinline__ void store_rows(T *const (&row)[2], const float (&out)[Count], const float (&factor)[2],
                                           int columns, int lane) {
    static_assert(Count % 16 == 0);
    FA_CHAOS_POINT(__LINE__);
#pragma unroll
    for (int g = 0; g < Count / 4; g += 4) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            uint32_t word[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float *pair = &out[4 * (g + i) + 2 * r];
                word[i] = factor[r] == 0.0f ? 0 : pack<T>(pair[0] * factor[r], pair[1] * factor[r]);
            }
            quad_transpose(word, lane % 4);
            const int column = 8 * (g + lane % 4);
            if (row[r] && column < columns)
                *reinterpret_cast<uint4 *>(row[r] + column) = make_uint4(word[0], word[1], word[2], word[3]);
        }
    }
}

/* Rows whose factor is 0 become 0, whatever the accumulators hold. */
template <int Count> __device__ __forceinline__ void clear_rows(float (&out)[Count], const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < Count; ++i)
        if (factor[(i >> 1) & 1] == 0.0f) out[i] = 0.0f;
}

/* Lays a warp's 16 x 2 * Count accumulators, multiplied by factor[row], out as boxes of 64 columns x 16 rows with
 * 128-byte swizzle, one after the other from `boxes` (1024-byte aligned). The whole warp calls it. */
template <class T, int Count>
__device__ __forceinline__ void stage_rows(void *boxes, const float (&out)[Count], const float (&factor)[2], int lane) {
    static_assert(Count % 8 == 0);
    FA_CHAOS_POINT(__LINE__);
    // Lanes give the addresses of the rows of four 8 x 8 matrices: two below each other, then the next eight columns.
    const uint32_t row = shared_address(boxes) + lane % 16 * kSlabRowBytes;
    const uint32_t chunk = lane / 16 ^ lane % 8;
#pragma unroll
    for (int j = 0; j < Count / 8; ++j) { // columns 16 * j to 16 * j + 15
        uint32_t word[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            word[i] = pack<T>(out[8 * j + 2 * i] * factor[i % 2], out[8 * j + 2 * i + 1] * factor[i % 2]);
        const uint32_t address = row + j / 4 * (16 * kSlabRowBytes) + 16 * (chunk ^ (j % 4 * 2));
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(word[0]),
                     "r"(word[1]), "r"(word[2]), "r"(word[3])
                     : "memory");
    }
}

} // namespace fa::sm90
