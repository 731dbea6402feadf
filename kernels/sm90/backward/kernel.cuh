/* Shared by the two kernels of wgmma_backward_sm90: the call's description, scores to weights and back, results.
 *
 *     queries.cuh   LSE and delta of each query, to memory; dq
 *     keys.cuh      dk and dv
 *
 * Keys are counted from the first visible one of the call, and queries from 0. The queries that see a key are those of
 * [row_begin, row_end): every row sees a range of keys whose ends grow with the row. Tensor maps cover these queries
 * and the visible keys alone, so that what others hold, NaN included, is read as zero and reaches no product. */
#pragma once
#include "common/convert.cuh"
#include "common/mask.cuh"
#include "common/score.cuh"
#include "common/softcap.cuh" // tanh_exact
#include "fa.h"
#include "sm90/common/epilogue.cuh"
#include "sm90/common/schedule.cuh"
#include "sm90/common/tma.cuh"
#include "sm90/common/wgmma.cuh"
#include <type_traits> // is_same_v

namespace fa::sm90 {

inline constexpr uint64_t kEvictNormal = 0x1000000000000000;

/* The call as both kernels see it. A pair is a batch entry's kv head; a launch does some of them, with the query heads
 * that belong to them. */
struct BackwardCall {
    ShiftedBand visible; // keys of the call
    ScoreParams score;
    int seq_q, seq_k, key_begin; // key_begin: the first visible key
    int row_begin, row_end;      // queries that see a key
    int dout_row;                // added to the row of dout: 0, or beyond its end, where it reads as zeros
    int heads, heads_kv, group, head_dim;
    int first_pair;
    int head_dim_v; // read by the kernels of a head_dim_v of its own alone
};

/* A gradient with axes (batch, head, row, column). */
struct Gradient {
    void *data; // NULL: not wanted
    int64_t stride[4];
    fa_dtype dtype;  // the call's, or float32
    bool accumulate; // added to what is there, in float32, before it is rounded
    bool vectors;    // of the call's dtype and not added: rows are written 16 bytes at a time
    bool pairs;      // two neighbours of a row are one aligned access
};

/* The same number, from which the compiler derives nothing ahead of a loop. Loop invariants, some 20
 * descriptors of shared memory among them, would otherwise stay in registers that the products need. */
template <class Int> __device__ __forceinline__ Int fresh(Int x) {
    static_assert(sizeof x == 4);
    asm volatile("" : "+r"(x));
    return x;
}
__device__ __forceinline__ uint32_t fresh_address(const void *pointer) { return fresh(shared_address(pointer)); }

/* ---- what a launch sends from the first kernel to the second ---- */

/* Of `Rows` queries, as TMA brings them to shared memory. */
template <int Rows> struct alignas(128) RowBlock {
    float lse[Rows];   // in base 2; +inf where a query sees no key, and past the last query
    float delta[Rows]; // dout . out - dlse; 0 there
};

/* `bytes`, a multiple of 16, from global to shared memory, both 16-byte aligned; counts on `barrier`. One thread. */
__device__ __forceinline__ void bulk_load(void *to, const void *from, uint32_t bytes, uint64_t *barrier,
                                          int site = __builtin_LINE()) {
    FA_CHAOS_POINT(site);
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}

/* Frees a stage for this warp: all its lanes have read it. Each warp arrives for itself, so that nothing rests on what
 * the other warps of the warpgroup have waited for. The whole warp calls it. */
__device__ __forceinline__ void warp_arrive(uint64_t *barrier, int lane) {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(barrier);
}

/* ---- visibility ---- */

/* Columns of v, dO and dv. */
template <class C> __device__ __forceinline__ int value_columns(const BackwardCall &call) {
    return C::kHeadDimV == C::kHeadDim ? call.head_dim : call.head_dim_v;
}

/* Whether accumulator i of a thread is among its rows' bits. */
__device__ __forceinline__ bool is_visible(const uint32_t (&visible)[2], int i) {
    return visible[(i >> 1) & 1] >> ((i >> 2) * 2 + (i & 1)) & 1;
}

template <class Call> __device__ __forceinline__ bool row_sees(const Call &call, int row) {
    return row < call.seq_q && !row_span(call.visible, row).empty();
}

/* ---- scores, weights and their gradients ---- */

/* P of a product: exp(s - lse), both in base 2. */
__device__ __forceinline__ float weight_of(float product, float factor, float lse) {
    return exp2_fast(fmaf(product, factor, -lse));
}

/* With softcap: P and (through `slope`) what dS is to be multiplied by. */
__device__ __forceinline__ float capped_weight_of(float product, const ScoreParams &score, float lse, float *slope) {
    const float capped = tanh_exact(product * score.scale_cap);
    *slope = fmaxf(fmaf(-capped, capped, 1.0f), 0.0f);
    return exp2_fast(fmaf(capped, score.cap_log2, -lse));
}

/* ---- delta ---- */

/* Where 16-byte chunk `chunk` of row `row` lies in a tile of 64 rows as tma_load_tile() lays it out, in bytes. */
__device__ __forceinline__ int tile_chunk(int chunk, int row) {
    return chunk / 8 * (64 * kSlabRowBytes) + row * kSlabRowBytes + ((chunk % 8) ^ (row % 8)) * 16;
}

/* Two 16-bit elements as floats, the low half first. By the shifts of unpack() ptxas serialises the wgmma of
 * keys_pair.cuh in bfloat16 for lack of registers. */
template <class T> __device__ __forceinline__ float2 unpack_pair(uint32_t word) {
    if constexpr (std::is_same_v<T, __half>)
        return __half22float2(*reinterpret_cast<const __half2 *>(&word));
    else
        return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162 *>(&word));
}

/* sum + x . y */
template <class T> __device__ __forceinline__ float chunk_product(const uint4 &x, const uint4 &y, float sum) {
    const uint32_t xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 u = unpack_pair<T>(xs[i]), v = unpack_pair<T>(ys[i]);
        sum = fmaf(u.x, v.x, sum);
        sum = fmaf(u.y, v.y, sum);
    }
    return sum;
}

/* Dot product of row `row` of two tiles of 64 rows as tma_load_tile() lays them out. The four threads of a quad have
 * the same row and share the sum. */
template <class T, int Columns>
__device__ __forceinline__ float tile_row_product(const char *a, const char *b, int row, int lane) {
    static_assert(Columns % 32 == 0);
    float sum = 0.0f;
#pragma unroll
    for (int n = 0; n < Columns / 32; ++n) {
        const int offset = tile_chunk(4 * n + lane % 4, row);
        const uint4 x = *reinterpret_cast<const uint4 *>(a + offset), y = *reinterpret_cast<const uint4 *>(b + offset);
        sum = chunk_product<T>(x, y, sum);
    }
    return quad_sum(sum);
}

/* The same where row `row` of the second operand lies in global memory, 16-byte aligned; NULL: 0. `columns` of it
 * count, a multiple of 8. */
template <class T, int Columns>
__device__ __forceinline__ float row_product(const char *a, const T *b, int columns, int row, int lane) {
    float sum = 0.0f;
#pragma unroll
    for (int n = 0; n < Columns / 32; ++n) {
        const int chunk = 4 * n + lane % 4; // of 16 bytes
        if (!b || 8 * chunk >= columns) continue;
        const uint4 y = *reinterpret_cast<const uint4 *>(b + 8 * chunk);
        const uint4 x = *reinterpret_cast<const uint4 *>(a + tile_chunk(chunk, row));
        sum = chunk_product<T>(x, y, sum);
    }
    return quad_sum(sum);
}

/* ---- results ---- */

template <class U> struct alignas(2 * sizeof(U)) ElementPair { U x, y; };

/* Row `row` + 8 * r of a gradient from accumulators, in elements or in pairs of elements of U. */
template <class U, int Count>
__device__ __forceinline__ void store_elements(const Gradient &g, int64_t base, const float (&sums)[Count], int r,
                                               float factor, int columns, int lane) {
    U *row = static_cast<U *>(g.data) + base;
#pragma unroll
    for (int i = 2 * r; i < Count; i += 4) {
        const int column = 8 * (i >> 2) + 2 * (lane % 4);
        if (column >= columns) continue;
        float x = factor == 0.0f ? 0.0f : sums[i] * factor, y = factor == 0.0f ? 0.0f : sums[i + 1] * factor;
        U *const first = row + column * g.stride[3], *const second = first + g.stride[3];
        if (g.pairs) {
            auto *pair = reinterpret_cast<ElementPair<U> *>(first);
            if (g.accumulate) {
                const ElementPair<U> old = *pair;
                x += to_float(old.x), y += to_float(old.y);
            }
            *pair = {from_float<U>(x), from_float<U>(y)};
        } else {
            if (g.accumulate) x += to_float(*first), y += to_float(*second);
            *first = from_float<U>(x), *second = from_float<U>(y);
        }
    }
}

/* Rows `row` and `row` + 8, below `rows`, of a warp's 16 x 2 * Count accumulators, multiplied by factor[row], columns
 * below `columns`, a multiple of 8. Rows whose factor is 0 become 0 (nothing is added), whatever the accumulators hold.
 * The whole warp calls it. */
template <class T, int Count>
__device__ __forceinline__ void store_gradient(const Gradient &g, int batch, int head, int row, int rows,
                                               const float (&sums)[Count], const float (&factor)[2], int columns,
                                               int lane) {
    const int64_t base = batch * g.stride[0] + head * g.stride[1] + row * g.stride[2];
    if (g.vectors) {
        T *target[2];
#pragma unroll
        for (int r = 0; r < 2; ++r)
            target[r] = row + 8 * r < rows ? static_cast<T *>(g.data) + base + 8 * r * g.stride[2] : nullptr;
        store_rows(target, sums, factor, columns, lane);
        return;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        if (row + 8 * r >= rows) continue;
        if (g.dtype == FA_F32)
            store_elements<float>(g, base + 8 * r * g.stride[2], sums, r, factor[r], columns, lane);
        else
            store_elements<T>(g, base + 8 * r * g.stride[2], sums, r, factor[r], columns, lane);
    }
}

} // namespace fa::sm90
