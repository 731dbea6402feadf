/* The instructions of Ampere and later that kernels need: approximations, cp.async, ldmatrix, mma.sync, named barriers,
 * packed conversion.
 *
 * Shared memory is addressed in bytes of the shared window (uint32_t). Nothing but the barriers synchronises. `site` is
 * the caller's line, for a chaos build (chaos.cuh). */
#pragma once

#include <cuda_bf16.h> // __nv_bfloat16
#include <cuda_fp16.h> // __half
#include <stdint.h>    // uint32_t

#include "common/chaos.cuh"

namespace fa {

/* 2^x, at most 2 ulp off; results below 2^-126 become 0. */
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* 1 / x, at most 1 ulp off; 0 for infinity. */
__device__ __forceinline__ float reciprocal_fast(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* tanh by the MUFU, up to 4.9e-4 off relatively: the softcap's error in a score is that times the score. */
__device__ __forceinline__ float tanh_fast(float x) {
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ uint32_t shared_address(const void *pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

/* Named barriers 1..15 (0 is __syncthreads). `threads` counts those that sync plus those that only arrive. */
__device__ __forceinline__ void named_barrier_sync(uint32_t id, uint32_t threads, int site = __builtin_LINE()) {
    FA_CHAOS_POINT(site);
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(uint32_t id, uint32_t threads, int site = __builtin_LINE()) {
    FA_CHAOS_POINT(site);
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* Starts a copy of 16 bytes, or fills them with zeros and reads nothing. Both addresses are multiples of 16. */
__device__ __forceinline__ void cp_async_16(uint32_t to, const void *from, bool exists) {
    asm volatile("{\n"
                 ".reg .pred absent;\n"
                 "setp.eq.u32 absent, %2, 0;\n"
                 "cp.async.cg.shared.global [%0], [%1], 16, absent;\n"
                 "}" ::"r"(to),
                 "l"(from), "r"(uint32_t(exists))
                 : "memory");
}

/* Closes the group of the copies that this thread started since the last one. */
__device__ __forceinline__ void cp_async_commit(int site = __builtin_LINE()) {
    FA_CHAOS_POINT(site);
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Waits until all but the latest kPending groups of this thread have landed. */
template <int kPending> __device__ __forceinline__ void cp_async_wait(int site = __builtin_LINE()) {
    FA_CHAOS_POINT(site);
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

/* Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8. Lane l receives in r[i]
 * the elements (l / 4, 2 (l % 4) + {0, 1}) of matrix i; transposed, the elements (2 (l % 4) + {0, 1}, l / 4). */
template <bool kTransposed> __device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t row) {
    if constexpr (kTransposed)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(row));
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(row));
}

__device__ __forceinline__ void store_shared(uint32_t to, uint32_t x) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(x) : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t to, uint4 x) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
}
__device__ __forceinline__ uint32_t load_shared_2(uint32_t from) {
    uint16_t x;
    asm volatile("ld.shared.b16 %0, [%1];" : "=h"(x) : "r"(from) : "memory");
    return x;
}
__device__ __forceinline__ float2 load_shared_pair(uint32_t from) {
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(from) : "memory");
    return x;
}
__device__ __forceinline__ uint32_t load_shared_4(uint32_t from) {
    uint32_t x;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(from) : "memory");
    return x;
}
__device__ __forceinline__ uint4 load_shared_16(uint32_t from) {
    uint4 x;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(from)
                 : "memory");
    return x;
}

/* d += a b for a 16x8 tile: a (16, 16) row-major, b (16, 8) column-major, float32 accumulators. Of lane l, with g = l /
 * 4 and t = 2 (l % 4): a = {(g, t), (g + 8, t), (g, t + 8), (g + 8, t + 8)}, each an element and its right neighbour;
 * b = {(t, g), (t + 8, g)}, each an element and the one below; d = {(g, t), (g, t + 1), (g + 8, t), (g + 8, t + 1)}. */
template <typename T>
__device__ __forceinline__ void mma_16x8x16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <>
__device__ __forceinline__ void mma_16x8x16<__half>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void mma_16x8x16<__nv_bfloat16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                                           uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* Two floats rounded to nearest even; `low` in the low half. */
template <typename T> __device__ __forceinline__ uint32_t pack(float low, float high);
template <> __device__ __forceinline__ uint32_t pack<__half>(float low, float high) {
    uint32_t x;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
    return x;
}
template <> __device__ __forceinline__ uint32_t pack<__nv_bfloat16>(float low, float high) {
    uint32_t x;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
    return x;
}

/* Two 16-bit elements as floats, the low half first. */
template <typename T> __device__ __forceinline__ float2 unpack(uint32_t x);
template <> __device__ __forceinline__ float2 unpack<__half>(uint32_t x) {
    return __half22float2(*reinterpret_cast<const __half2 *>(&x));
}
template <> __device__ __forceinline__ float2 unpack<__nv_bfloat16>(uint32_t x) {
    return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u));
}

} // namespace fa
