/* From wgmma accumulators to global memory in 16-byte stores, without shared memory. */
#pragma once
#include "sm90_softmax.cuh"

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
#pragma unroll
    for (int g = 0; g < Count / 4; g += 4) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            uint32_t word[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float *pair = &out[4 * (g + i) + 2 * r];
                word[i] = factor[r] == 0.0f ? 0 : pack_pair<T>(pair[0] * factor[r], pair[1] * factor[r]);
            }
            quad_transpose(word, lane % 4);
            const int column = 8 * (g + lane % 4);
            if (row[r] && column < columns)
                *reinterpret_cast<uint4 *>(row[r] + column) = make_uint4(word[0], word[1], word[2], word[3]);
        }
    }
}

} // namespace fa::sm90
