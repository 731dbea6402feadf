/* The softmax between the two products of the cublas kernel: scores in, weights out, in the same memory.
 *
 * A chunk of scores is (heads of the chunk, rows, ld) float32, already multiplied by the scale (in base 2, or divided
 * by the softcap). The weights of a row, normalised and rounded to the dtype of V, replace it from its first byte on: a
 * row of weights has ld * 4 / sizeof(T) elements from one to the next. Weight j lies at or before score j, so that a
 * group which reads scores from the left, and writes what it has read, overwrites nothing it still needs. Warps that
 * share a row meet at __syncthreads; products and softmax follow each other in the stream. */
#pragma once

#include <stdint.h> // int64_t

#include "common/alibi.cuh" // slope_of, with_alibi
#include "common/chaos.cuh"
#include "common/convert.cuh" // from_float
#include "common/mask.cuh"    // row_keys
#include "common/rows.cuh"    // bias_row, mask_row, row_of, store_lse
#include "common/score.cuh"   // bias_of, add_bias_or_exclude, bounded, finite_score
#include "common/softmax.cuh" // RowState, finish_row
#include "fa.h"               // fa_operand, fa_dtype

namespace fa::cublas {

/* Scores of the queries [row_begin, row_begin + rows) and keys [key_begin, key_begin + keys) of heads that follow each
 * other, from (batch, head) on: `heads` of each batch entry. */
struct Chunk {
    float *scores;
    int64_t ld; // floats from one row to the next, a multiple of 8
    int64_t row_begin, rows;
    int64_t key_begin, keys;
    int64_t batch, head, heads;
    int64_t count; // rows of all heads; like `keys`, less than 2^30
};

/* The fields of the problem that the kernels read. */
struct Params {
    fa_operand out, lse;
    fa_operand bias, mask, sinks, alibi;
    int64_t left, right, diagonal, key_begin, key_end;
    float cap_log2; // softcap * log2(e), as in ScoreParams
    int head_dim_v;
    fa_dtype bias_dtype, sinks_dtype;
};

constexpr int kStep = 4;      // neighbouring scores a thread takes at a time
constexpr int kHeldSteps = 4; // of them that it can hold in registers

/* Largest and sum over the threads that share a row; every thread gets it, in the same order on every run. */
template <int kThreads, class Combine>
__device__ __forceinline__ float reduce(float x, float *shared, Combine combine) {
#pragma unroll
    for (int offset = 16; offset; offset /= 2) x = combine(x, __shfl_xor_sync(~0u, x, offset));
    if constexpr (kThreads > 32) {
        if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
        __syncthreads();
        x = shared[0];
#pragma unroll
        for (int w = 1; w < kThreads / 32; ++w) x = combine(x, shared[w]);
    }
    return x;
}

/* One row of scores: where it lies in the call, and what a thread does with kStep scores of it. */
template <typename T> struct Row {
    const Params &p;
    const Chunk &chunk;
    float slope;
    int64_t batch, head, row;
    int begin, end; // visible keys, relative to the chunk's first

    __device__ Row(const Params &params, const Chunk &c, unsigned n) : p(params), chunk(c) {
        const unsigned unit = n / unsigned(c.rows);
        row = c.row_begin + n % unsigned(c.rows);
        batch = c.batch + unit / unsigned(c.heads);
        head = c.head + unit % unsigned(c.heads);
        slope = slope_of(p.alibi, batch, head);
        const KeyRange keys = row_keys(p, row);
        begin = keys.empty() ? 0 : int(keys.begin - c.key_begin);
        end = keys.empty() ? 0 : int(keys.end - c.key_begin);
    }

    /* The amount added to the score of a key: its bias, to which `at` (bias_row()) leads, less what ALiBi takes. */
    __device__ __forceinline__ float added(int64_t at, int64_t key) const {
        const float bias = p.bias.data ? bias_of(p, at, key) : 0.0f;
        if (slope == 0.0f || bias == -INFINITY) return bias;
        return with_alibi(bounded(bias), slope, float(key - (row + p.diagonal)));
    }

    /* The scores in base 2 of keys [first, first + kStep) of the chunk; -inf for excluded keys, which are not read. */
    __device__ __forceinline__ void load(const float *scores, int first, float (&s)[kStep]) const {
        if (first >= end || first + kStep <= begin) {
#pragma unroll
            for (int i = 0; i < kStep; ++i) s[i] = -INFINITY;
            return;
        }
        const float4 read = *reinterpret_cast<const float4 *>(scores + first);
        s[0] = read.x, s[1] = read.y, s[2] = read.z, s[3] = read.w;
        if (p.cap_log2 > 0) {
#pragma unroll
            for (int i = 0; i < kStep; ++i) s[i] = __fmul_rn(p.cap_log2, tanhf(s[i]));
        } else {
#pragma unroll
            for (int i = 0; i < kStep; ++i) s[i] = finite_score(s[i]);
        }
        if (p.bias.data || slope != 0.0f) {
            const int64_t at = bias_row(p, batch, head, row);
#pragma unroll
            for (int i = 0; i < kStep; ++i)
                if (first + i < end) s[i] = add_bias_or_exclude(s[i], added(at, chunk.key_begin + first + i));
        }
        if (p.mask.data) {
            const uint8_t *mask = mask_row(p, batch, head, row);
#pragma unroll
            for (int i = 0; i < kStep; ++i)
                if (first + i < end && !mask[(chunk.key_begin + first + i) * p.mask.stride[3]]) s[i] = -INFINITY;
        }
#pragma unroll
        for (int i = 0; i < kStep; ++i)
            if (first + i < begin || first + i >= end) s[i] = -INFINITY;
    }

    __device__ __forceinline__ static void store(T *weights, int first, const float (&w)[kStep]) {
        fa::Chunk<T, kStep> packed;
#pragma unroll
        for (int i = 0; i < kStep; ++i) packed.element[i] = from_float<T>(w[i]);
        *reinterpret_cast<fa::Chunk<T, kStep> *>(weights + first) = packed;
    }
};

/* kThreads share a row. kHeld: a row has at most kThreads * kStep * kHeldSteps scores, which stay in registers;
 * otherwise the row is read twice. A block has `blockDim.x / kThreads` rows, and all its warps have work or leave
 * together. */
template <typename T, int kThreads, bool kHeld>
__global__ void __launch_bounds__(kThreads < 128 ? 128 : kThreads)
    softmax_kernel(const __grid_constant__ Params p, const __grid_constant__ Chunk chunk) {
    FA_CHAOS_BEGIN();
    __shared__ float shared[2][32];
    const unsigned n = blockIdx.x * (blockDim.x / kThreads) + threadIdx.x / kThreads;
    const int thread = threadIdx.x % kThreads, keys = int(chunk.keys);
    if (n >= chunk.count) return;
    const Row<T> row(p, chunk, n);
    float *scores = chunk.scores + n * chunk.ld;
    T *weights = reinterpret_cast<T *>(scores);
    const auto larger = [](float x, float y) { return fmaxf(x, y); };
    const auto plus = [](float x, float y) { return x + y; };

    float held[kHeld ? kHeldSteps : 1][kStep];
    RowState state;
    if constexpr (kHeld) {
#pragma unroll
        for (int step = 0; step < kHeldSteps; ++step) {
            row.load(scores, (step * kThreads + thread) * kStep, held[step]);
#pragma unroll
            for (int i = 0; i < kStep; ++i) state.maximum = fmaxf(state.maximum, held[step][i]);
        }
        state.maximum = reduce<kThreads>(state.maximum, shared[0], larger);
#pragma unroll
        for (int step = 0; step < kHeldSteps; ++step)
#pragma unroll
            for (int i = 0; i < kStep; ++i) state.sum += held[step][i] = state.weight(held[step][i]);
        state.sum = reduce<kThreads>(state.sum, shared[1], plus);
    } else {
        for (int first = thread * kStep; first < keys; first += kThreads * kStep) {
            row.load(scores, first, held[0]);
            float largest = fmaxf(fmaxf(held[0][0], held[0][1]), fmaxf(held[0][2], held[0][3]));
            if (largest > state.maximum) state.raise(largest);
#pragma unroll
            for (int i = 0; i < kStep; ++i) state.sum += state.weight(held[0][i]);
        }
        const float mine = state.maximum;
        state.maximum = reduce<kThreads>(mine, shared[0], larger);
        state.sum = reduce<kThreads>(state.sum * state.weight(mine), shared[1], plus);
    }

    const RowResult result = finish_row(p, row.head, state);
    if (thread == 0) store_lse(p, row.batch, row.head, row.row, result.lse);
    if constexpr (kHeld) {
        __syncwarp(); // where a block shares the row, reduce() held it together
#pragma unroll
        for (int step = 0; step < kHeldSteps; ++step) {
            const int first = (step * kThreads + thread) * kStep;
            if (first >= keys) break;
#pragma unroll
            for (int i = 0; i < kStep; ++i) held[step][i] *= result.factor;
            row.store(weights, first, held[step]);
        }
    } else {
        for (int start = 0; start < keys; start += kThreads * kStep) {
            const int first = start + thread * kStep;
            if (first < keys) row.load(scores, first, held[0]);
#pragma unroll
            for (int i = 0; i < kStep; ++i) held[0][i] = state.weight(held[0][i]) * result.factor;
            __syncthreads(); // weights lie on scores of their own step and of steps before, which all have read now
            if (first < keys) row.store(weights, first, held[0]);
        }
    }
}

/* Rows of queries that see no key at all: output 0, LSE the sink or -inf. One thread an output element. */
template <typename T>
__global__ void empty_rows_kernel(const __grid_constant__ Params p, const __grid_constant__ Chunk chunk) {
    const int64_t total = chunk.count * p.head_dim_v;
    for (int64_t n = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; n < total; n += int64_t(gridDim.x) * blockDim.x) {
        const Row<T> row(p, chunk, unsigned(n / p.head_dim_v));
        const int64_t dim = n % p.head_dim_v;
        row_of<T>(p.out, row.batch, row.head, row.row)[dim * p.out.stride[3]] = from_float<T>(0.0f);
        if (dim == 0) store_lse(p, row.batch, row.head, row.row, finish_row(p, row.head, RowState()).lse);
    }
}

/* Queues the softmax of a chunk; a chunk without keys gets its output here and needs no product. */
template <typename T> cudaError_t softmax(const Params &p, const Chunk &chunk, cudaStream_t stream) {
    constexpr int kHeld = kStep * kHeldSteps;
    const auto blocks = [&](int per_block) { return unsigned((chunk.count + per_block - 1) / per_block); };
    if (chunk.keys == 0)
        empty_rows_kernel<T><<<256, 256, 0, stream>>>(p, chunk);
    else if (chunk.keys <= 32 * kHeld)
        softmax_kernel<T, 32, true><<<blocks(4), 128, 0, stream>>>(p, chunk);
    else if (chunk.keys <= 128 * kHeld)
        softmax_kernel<T, 128, true><<<blocks(1), 128, 0, stream>>>(p, chunk);
    else if (chunk.keys <= 512 * kHeld)
        softmax_kernel<T, 512, true><<<blocks(1), 512, 0, stream>>>(p, chunk);
    else
        softmax_kernel<T, 512, false><<<blocks(1), 512, 0, stream>>>(p, chunk);
    return cudaGetLastError();
}

} // namespace fa::cublas
