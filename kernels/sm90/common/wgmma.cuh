/* Hopper's warpgroup matrix multiply (wgmma, sm_90a): descriptors, ordering, instructions.
 *
 * D (64 x N, float32, registers) = A (64 x 16) B (16 x N) + D, A and B fp16 or bf16. Thread t of the warpgroup holds
 * d[i] = D[16 * (t / 32) + (t % 32) / 4 + 8 * ((i >> 1) & 1)][8 * (i >> 2) + 2 * (t % 4) + (i & 1)]. As a register
 * operand, the four words of A for columns 16j..16j+15 are the packed pairs d[8j..8j+7] of such a D: scores become the
 * A operand without a shuffle.
 *
 * Shared operands lie in 64-column slabs with 128-byte swizzle, 1024-byte aligned, as sm90/common/tma.cuh loads them:
 *   K-major (queries as A; keys as B, B = K^T): columns are the reduction axis; 16 of them are 32 bytes further on.
 *   MN-major (values as B): rows are the reduction axis, columns N; 16 rows are 2048 bytes further on, and the next 64
 *   columns one slab.
 *
 * Order: wgmma_fence(); instructions; wgmma_commit(); ... wgmma_wait<pending>(); then wgmma_pin() on the registers that
 * became ready, so that the compiler moves no use of them to before the wait.
 */
#pragma once
#include "sm90/common/barrier.cuh"
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <type_traits>

namespace fa::sm90 {

/* Descriptor of a K-major slab at `address` (shared window, bytes): 8-row groups lie 1024 bytes apart. Adding
 * bytes / 16 moves it. */
__device__ __forceinline__ uint64_t descriptor_k_major(uint32_t address) {
    return (uint64_t(1) << 62) | (uint64_t(1024 >> 4) << 32) | (uint64_t(1) << 16) | ((address & 0x3FFFF) >> 4);
}

/* Descriptor of an MN-major operand whose 64-column slabs lie `slab_bytes` apart. */
__device__ __forceinline__ uint64_t descriptor_mn_major(uint32_t address, uint32_t slab_bytes) {
    return (uint64_t(1) << 62) | (uint64_t(1024 >> 4) << 32) | (uint64_t(slab_bytes >> 4) << 16) |
           ((address & 0x3FFFF) >> 4);
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
/* Waits until at most `Pending` committed groups are unfinished. */
template <int Pending> __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

template <int Count> __device__ __forceinline__ void wgmma_pin(float (&d)[Count]) {
#pragma unroll
    for (int i = 0; i < Count; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int Count> __device__ __forceinline__ void wgmma_pin(uint32_t (&a)[Count]) {
#pragma unroll
    for (int i = 0; i < Count; ++i) asm volatile("" : "+r"(a[i])::"memory");
}

/* Register lists of the accumulators, in groups of eight (N grows by 16 a group). */
#define FA_R0  "%0,%1,%2,%3,%4,%5,%6,%7"
#define FA_R1  "%8,%9,%10,%11,%12,%13,%14,%15"
#define FA_R2  "%16,%17,%18,%19,%20,%21,%22,%23"
#define FA_R3  "%24,%25,%26,%27,%28,%29,%30,%31"
#define FA_R4  "%32,%33,%34,%35,%36,%37,%38,%39"
#define FA_R5  "%40,%41,%42,%43,%44,%45,%46,%47"
#define FA_R6  "%48,%49,%50,%51,%52,%53,%54,%55"
#define FA_R7  "%56,%57,%58,%59,%60,%61,%62,%63"
#define FA_R8  "%64,%65,%66,%67,%68,%69,%70,%71"
#define FA_R9  "%72,%73,%74,%75,%76,%77,%78,%79"
#define FA_R10 "%80,%81,%82,%83,%84,%85,%86,%87"
#define FA_R11 "%88,%89,%90,%91,%92,%93,%94,%95"
#define FA_R12 "%96,%97,%98,%99,%100,%101,%102,%103"
#define FA_R13 "%104,%105,%106,%107,%108,%109,%110,%111"
#define FA_R14 "%112,%113,%114,%115,%116,%117,%118,%119"
#define FA_R15 "%120,%121,%122,%123,%124,%125,%126,%127"
#define FA_D8(g)                                                                                                       \
    "+f"(d[8 * g]), "+f"(d[8 * g + 1]), "+f"(d[8 * g + 2]), "+f"(d[8 * g + 3]), "+f"(d[8 * g + 4]),                    \
        "+f"(d[8 * g + 5]), "+f"(d[8 * g + 6]), "+f"(d[8 * g + 7])
#define FA_LIST_16  FA_R0
#define FA_ACC_16   FA_D8(0)
#define FA_LIST_32  FA_LIST_16 "," FA_R1
#define FA_ACC_32   FA_ACC_16, FA_D8(1)
#define FA_LIST_48  FA_LIST_32 "," FA_R2
#define FA_ACC_48   FA_ACC_32, FA_D8(2)
#define FA_LIST_64  FA_LIST_48 "," FA_R3
#define FA_ACC_64   FA_ACC_48, FA_D8(3)
#define FA_LIST_80  FA_LIST_64 "," FA_R4
#define FA_ACC_80   FA_ACC_64, FA_D8(4)
#define FA_LIST_96  FA_LIST_80 "," FA_R5
#define FA_ACC_96   FA_ACC_80, FA_D8(5)
#define FA_LIST_112 FA_LIST_96 "," FA_R6
#define FA_ACC_112  FA_ACC_96, FA_D8(6)
#define FA_LIST_128 FA_LIST_112 "," FA_R7
#define FA_ACC_128  FA_ACC_112, FA_D8(7)
#define FA_LIST_144 FA_LIST_128 "," FA_R8
#define FA_ACC_144  FA_ACC_128, FA_D8(8)
#define FA_LIST_160 FA_LIST_144 "," FA_R9
#define FA_ACC_160  FA_ACC_144, FA_D8(9)
#define FA_LIST_176 FA_LIST_160 "," FA_R10
#define FA_ACC_176  FA_ACC_160, FA_D8(10)
#define FA_LIST_192 FA_LIST_176 "," FA_R11
#define FA_ACC_192  FA_ACC_176, FA_D8(11)
#define FA_LIST_208 FA_LIST_192 "," FA_R12
#define FA_ACC_208  FA_ACC_192, FA_D8(12)
#define FA_LIST_224 FA_LIST_208 "," FA_R13
#define FA_ACC_224  FA_ACC_208, FA_D8(13)
#define FA_LIST_240 FA_LIST_224 "," FA_R14
#define FA_ACC_240  FA_ACC_224, FA_D8(14)
#define FA_LIST_256 FA_LIST_240 "," FA_R15
#define FA_ACC_256  FA_ACC_240, FA_D8(15)

/* One instruction. ss: operands after the accumulators are A, B, accumulate; rs: four words of A, B, accumulate. */
#define FA_WGMMA_SS(N, TYPE, a, b, c)                                                                                  \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #c ", 0;\n"                                                      \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" FA_LIST_##N                      \
                 "}, %" #a ", %" #b ", p, 1, 1, 0, 0;\n}"                                                              \
                 : FA_ACC_##N                                                                                          \
                 : "l"(a_descriptor), "l"(b_descriptor), "r"(accumulate))
#define FA_WGMMA_RS(N, TYPE, a0, a1, a2, a3, b, c)                                                                     \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #c ", 0;\n"                                                      \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" FA_LIST_##N                      \
                 "}, {%" #a0 ",%" #a1 ",%" #a2 ",%" #a3 "}, %" #b ", p, 1, 1, 1;\n}"                                   \
                 : FA_ACC_##N                                                                                          \
                 : "r"(a0_), "r"(a1_), "r"(a2_), "r"(a3_), "l"(b_descriptor), "r"(accumulate))
#define FA_WGMMA_CASE_SS(N, a, b, c)                                                                                   \
    if constexpr (Count * 2 == N) {                                                                                    \
        if constexpr (std::is_same_v<T, __half>)                                                                       \
            FA_WGMMA_SS(N, "f16", a, b, c);                                                                            \
        else                                                                                                           \
            FA_WGMMA_SS(N, "bf16", a, b, c);                                                                           \
    }
#define FA_WGMMA_CASE_RS(N, a0, a1, a2, a3, b, c)                                                                      \
    if constexpr (Count * 2 == N) {                                                                                    \
        if constexpr (std::is_same_v<T, __half>)                                                                       \
            FA_WGMMA_RS(N, "f16", a0, a1, a2, a3, b, c);                                                               \
        else                                                                                                           \
            FA_WGMMA_RS(N, "bf16", a0, a1, a2, a3, b, c);                                                              \
    }

/* D = A B (+ D if accumulate), A and B in shared memory, both K-major. N = 2 * Count: multiples of 16 up to 256. */
template <class T, int Count>
__device__ __forceinline__ void wgmma_ss(float (&d)[Count], uint64_t a_descriptor, uint64_t b_descriptor,
                                         int accumulate) {
    static_assert(Count % 8 == 0 && Count >= 8 && Count <= 128);
    FA_WGMMA_CASE_SS(16, 8, 9, 10)
    FA_WGMMA_CASE_SS(32, 16, 17, 18)
    FA_WGMMA_CASE_SS(48, 24, 25, 26)
    FA_WGMMA_CASE_SS(64, 32, 33, 34)
    FA_WGMMA_CASE_SS(80, 40, 41, 42)
    FA_WGMMA_CASE_SS(96, 48, 49, 50)
    FA_WGMMA_CASE_SS(112, 56, 57, 58)
    FA_WGMMA_CASE_SS(128, 64, 65, 66)
    FA_WGMMA_CASE_SS(144, 72, 73, 74)
    FA_WGMMA_CASE_SS(160, 80, 81, 82)
    FA_WGMMA_CASE_SS(176, 88, 89, 90)
    FA_WGMMA_CASE_SS(192, 96, 97, 98)
    FA_WGMMA_CASE_SS(208, 104, 105, 106)
    FA_WGMMA_CASE_SS(224, 112, 113, 114)
    FA_WGMMA_CASE_SS(240, 120, 121, 122)
    FA_WGMMA_CASE_SS(256, 128, 129, 130)
}

/* The same with A in registers and B in shared memory, MN-major. */
template <class T, int Count>
__device__ __forceinline__ void wgmma_rs(float (&d)[Count], uint32_t a0_, uint32_t a1_, uint32_t a2_, uint32_t a3_,
                                         uint64_t b_descriptor, int accumulate) {
    static_assert(Count % 8 == 0 && Count >= 8 && Count <= 128);
    FA_WGMMA_CASE_RS(16, 8, 9, 10, 11, 12, 13)
    FA_WGMMA_CASE_RS(32, 16, 17, 18, 19, 20, 21)
    FA_WGMMA_CASE_RS(48, 24, 25, 26, 27, 28, 29)
    FA_WGMMA_CASE_RS(64, 32, 33, 34, 35, 36, 37)
    FA_WGMMA_CASE_RS(80, 40, 41, 42, 43, 44, 45)
    FA_WGMMA_CASE_RS(96, 48, 49, 50, 51, 52, 53)
    FA_WGMMA_CASE_RS(112, 56, 57, 58, 59, 60, 61)
    FA_WGMMA_CASE_RS(128, 64, 65, 66, 67, 68, 69)
    FA_WGMMA_CASE_RS(144, 72, 73, 74, 75, 76, 77)
    FA_WGMMA_CASE_RS(160, 80, 81, 82, 83, 84, 85)
    FA_WGMMA_CASE_RS(176, 88, 89, 90, 91, 92, 93)
    FA_WGMMA_CASE_RS(192, 96, 97, 98, 99, 100, 101)
    FA_WGMMA_CASE_RS(208, 104, 105, 106, 107, 108, 109)
    FA_WGMMA_CASE_RS(224, 112, 113, 114, 115, 116, 117)
    FA_WGMMA_CASE_RS(240, 120, 121, 122, 123, 124, 125)
    FA_WGMMA_CASE_RS(256, 128, 129, 130, 131, 132, 133)
}

#undef FA_WGMMA_CASE_SS
#undef FA_WGMMA_CASE_RS
#undef FA_WGMMA_SS
#undef FA_WGMMA_RS

/* scores (64 x 2 * Count) = Q K^T. `q` and `k` are tiles of HeadDim columns in slabs of 64: `q` addresses this
 * warpgroup's first row, slabs `q_slab_bytes` apart. Commits nothing. */
template <class T, int HeadDim, int Count>
__device__ __forceinline__ void gemm_qk(float (&scores)[Count], uint32_t q, uint32_t q_slab_bytes, uint32_t k,
                                        uint32_t k_slab_bytes) {
    const uint64_t a = descriptor_k_major(q), b = descriptor_k_major(k);
#pragma unroll
    for (int step = 0; step < HeadDim / 16; ++step) {
        const uint32_t slab = step / 4, inside = (step % 4) * 32;
        wgmma_ss<T>(scores, a + ((slab * q_slab_bytes + inside) >> 4), b + ((slab * k_slab_bytes + inside) >> 4),
                    step != 0);
    }
}

/* out (64 x 2 * Count) = P V (+ out if accumulate), P packed in registers (64 x 4 * Words), V in slabs of 64 columns,
 * 4 * Words rows each. Commits nothing. */
template <class T, int Count, int Words>
__device__ __forceinline__ void gemm_pv(float (&out)[Count], const uint32_t (&p)[Words], uint32_t v,
                                        uint32_t v_slab_bytes, int accumulate) {
    const uint64_t b = descriptor_mn_major(v, v_slab_bytes);
#pragma unroll
    for (int step = 0; step < Words / 4; ++step)
        wgmma_rs<T>(out, p[4 * step], p[4 * step + 1], p[4 * step + 2], p[4 * step + 3], b + ((step * 2048) >> 4),
                    step == 0 ? accumulate : 1);
}

} // namespace fa::sm90
