/* Rows of operands in global memory: addresses, and chunks of up to 16 bytes. */
#pragma once

#include <stdint.h> // int64_t, uint4

#include "fa.h" // fa_operand

namespace fa {

/* Elements from an operand's data to its row (i, j, k): the element at offset 0 of the last axis. 64-bit throughout. */
__device__ __forceinline__ int64_t row_offset(const fa_operand &x, int64_t i, int64_t j, int64_t k) {
    return i * x.stride[0] + j * x.stride[1] + k * x.stride[2];
}

/* Address of that row. */
template <typename T> __device__ __forceinline__ T *row_of(const fa_operand &x, int64_t i, int64_t j, int64_t k) {
    return static_cast<T *>(x.data) + i * x.stride[0] + j * x.stride[1] + k * x.stride[2];
}

/* ---- of a kernel's parameters, which have the operand that is read under its name ---- */

/* Where the bias of one query starts, in elements: that of key j lies `j * p.bias.stride[3]` further on. */
template <class Params>
__device__ __forceinline__ int64_t bias_row(const Params &p, int64_t batch, int64_t head, int64_t row) {
    return row_offset(p.bias, batch, head, row);
}

/* Row of the boolean mask for one query; element `key` lies at mask_row[key * p.mask.stride[3]], not 0 = attend. */
template <class Params>
__device__ __forceinline__ const uint8_t *mask_row(const Params &p, int64_t batch, int64_t head, int64_t row) {
    return row_of<const uint8_t>(p.mask, batch, head, row);
}

/* Writes the LSE of a query where the call wants it. */
template <class Params>
__device__ __forceinline__ void store_lse(const Params &p, int64_t batch, int64_t head, int64_t row, float lse) {
    if (p.lse.data) *row_of<float>(p.lse, batch, head, row) = lse;
}

/* ---- chunks ---- */

/* N consecutive elements as one value of N * sizeof(T) <= 16 bytes, which is also their alignment. */
template <typename T, int N> struct alignas(N * sizeof(T)) Chunk {
    static_assert(N > 0 && (N & (N - 1)) == 0 && N * sizeof(T) <= 16, "a chunk is one load of 1 to 16 bytes");
    T element[N];
};

/* Writes the elements [first, first + N) of a row whose elements are `stride` apart; those from `length` on are not
 * written. `vectors`: the operand satisfies takes_chunks<T>(N), so that one store writes all N. */
template <typename T, int N>
__device__ __forceinline__ void store_chunk(T *row, int64_t stride, int first, int length, bool vectors,
                                            const Chunk<T, N> &chunk) {
    if (first >= length) return;
    if (vectors) {
        *reinterpret_cast<Chunk<T, N> *>(row + first) = chunk;
    } else {
#pragma unroll
        for (int n = 0; n < N; ++n)
            if (first + n < length) row[(first + n) * stride] = chunk.element[n];
    }
}

/* Host: every chunk of N elements that starts at a multiple of N of a row can be loaded or stored at once. `length` is
 * the length of the last axis, which must hold whole chunks. */
template <typename T> inline bool takes_chunks(const fa_operand &x, int64_t length, int n) {
    if (length % n || (x.stride[3] != 1 && length > 1) || reinterpret_cast<uintptr_t>(x.data) % (n * sizeof(T)))
        return false;
    return x.stride[0] % n == 0 && x.stride[1] % n == 0 && x.stride[2] % n == 0;
}

} // namespace fa
