/* WMMA fragments of 16x16x16 products, loaded from shared memory. */
#pragma once

#include <mma.h> // nvcuda::wmma

#include "common/ptx.cuh" // shared_address

namespace fa::wmma_tiles {

namespace wmma = nvcuda::wmma;

using Accumulator = wmma::fragment<wmma::accumulator, 16, 16, 16, float>;
template <typename T> using Left = wmma::fragment<wmma::matrix_a, 16, 16, 16, T, wmma::row_major>;
template <typename T> using RightTransposed = wmma::fragment<wmma::matrix_b, 16, 16, 16, T, wmma::col_major>;
template <typename T> using Right = wmma::fragment<wmma::matrix_b, 16, 16, 16, T, wmma::row_major>;

/* load_matrix_sync for a block in shared memory, rows `pitch` elements apart. Its bfloat16 overloads take generic
 * addresses whatever the compiler knows (CUDA 13.0), which costs four loads where one ldmatrix does: 160 generic loads
 * a key tile instead of 40. The instruction they wrap can say .shared. It is ordered by the barriers around it. */
template <class Fragment> __device__ __forceinline__ void load_block(Fragment &f, const __half *block, int pitch) {
    wmma::load_matrix_sync(f, block, pitch);
}

#define FA_WMMA_LOAD_BF16(FRAGMENT, OPERAND, ORDER)                                                                    \
    __device__ __forceinline__ void load_block(FRAGMENT<__nv_bfloat16> &f, const __nv_bfloat16 *block, int pitch) {    \
        static_assert(sizeof f.x == 16, "four registers");                                                             \
        uint32_t *r = reinterpret_cast<uint32_t *>(f.x);                                                               \
        asm volatile("wmma.load." OPERAND ".sync.aligned." ORDER ".m16n16k16.shared.bf16 {%0,%1,%2,%3}, [%4], %5;"     \
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])                                                  \
                     : "r"(shared_address(block)), "r"(pitch));                                                        \
    }
FA_WMMA_LOAD_BF16(Left, "a", "row")
FA_WMMA_LOAD_BF16(RightTransposed, "b", "col")
FA_WMMA_LOAD_BF16(Right, "b", "row")
#undef FA_WMMA_LOAD_BF16

/* Multiplies every row of fragments side by side by its factor, one float a row in shared memory. */
template <int kCount> __device__ __forceinline__ void scale_rows(Accumulator (&out)[kCount], const float *factor) {
    Accumulator rows;
    wmma::load_matrix_sync(rows, factor, 0, wmma::mem_col_major);
#pragma unroll
    for (int d = 0; d < kCount; ++d)
#pragma unroll
        for (int i = 0; i < rows.num_elements; ++i) out[d].x[i] *= rows.x[i];
}

} // namespace fa::wmma_tiles
