/* The append kernel: where tokens go, and their rows. See append.cu. */
#pragma once

#include "common/chaos.cuh"
#include "common/convert.cuh"
#include "common/faults.cuh" // count_fault, count_length_faults
#include "common/rows.cuh"   // Chunk, row_of, takes_chunks
#include "tokens.h"          // fa_token_of_slot, fa_token_of_sequence

namespace fa {

constexpr int kWarp = 32, kThreads = 256, kWarps = kThreads / kWarp;
constexpr int kTokens = 32; // the most of a block

/* What the host works out for a launch. */
struct Work {
    int64_t rows; // of k and q, one after another over all batch entries
    int tokens;   // a block
    int parts;    // blocks that share the heads of the same tokens
    int half;     // of the columns that are rotated
    int lanes;    // threads that share a row: a power of two
    bool vectors; // 16 bytes a load are possible everywhere
};

/* The sequence of a row of packed k. */
struct Owner {
    int64_t sequence; // -1: of none
    fa_span rows;
};

/* By one warp, which gives all its lanes the same answer. Ends of sequences are the running maximum of the starts, so
 * the row is of the sequence before the first start that is larger than it. */
__device__ __forceinline__ Owner owner_of(const fa_sequences &s, int64_t batch, int64_t row) {
    if (!s.q.starts) return {row, {row, row + 1}};
    const int lane = threadIdx.x % kWarp;
    int64_t before = 0;
    for (int64_t first = 0; first <= batch; first += kWarp) {
        const int64_t b = first + lane;
        const int64_t start = b <= batch ? fa_clamp(s.q.starts[b], 0, s.q.rows) : 0;
        const unsigned larger = __ballot_sync(~0u, start > row);
        const int found = larger ? __ffs(static_cast<int>(larger)) - 1 : kWarp;
        int64_t largest = lane < found ? start : 0;
#pragma unroll
        for (int offset = kWarp / 2; offset; offset /= 2) {
            const int64_t other = __shfl_xor_sync(~0u, largest, offset);
            largest = other > largest ? other : largest;
        }
        before = largest > before ? largest : before;
        if (found == kWarp) continue;
        const int64_t end = __shfl_sync(~0u, start, found);
        return {first + found - 1, {before, end}};
    }
    return {-1, {before, s.q.rows}};
}

__device__ __forceinline__ fa_token no_token(int64_t batch, int64_t row) {
    fa_token token = {};
    token.batch = batch;
    token.row = row;
    token.skipped = true;
    token.fault = FA_FAULT_COUNT;
    return token;
}

/* What becomes of row n of k: by one warp. Counts its fault, once. */
__device__ __forceinline__ fa_token find_token(const fa_append &p, const fa_sequences &s, fa_fault_board *faults,
                                               int64_t n, bool counts) {
    fa_token token = no_token(0, n);
    if (p.slots) {
        token = fa_token_of_slot(&p, &s, n);
    } else {
        const Owner owner = s.packed_q ? owner_of(s, p.batch, n) : Owner{n / p.rows, {0, p.rows}};
        const int64_t batch = s.packed_q ? 0 : owner.sequence, row = s.packed_q ? n : n % p.rows;
        token = no_token(batch, row);
        if (owner.sequence >= 0) {
            const int64_t count = fa_used(&s.q, owner.sequence, owner.rows.end - owner.rows.begin);
            const int64_t t = row - owner.rows.begin;
            if (t < count) token = fa_token_of_sequence(&p, &s, owner.sequence, owner.rows.begin, count, t);
            /* A bad page is one fault, whatever the number of its tokens. */
            counts &= token.fault != FA_FAULT_page || t == 0 || token.place == 0;
        }
    }
    if (counts && token.fault != FA_FAULT_COUNT && threadIdx.x % kWarp == 0)
        count_fault(faults, token.fault, token.sequence, token.index, token.value);
    return token;
}

/* Says which of a block's tokens, the first of them token `first`, have a later one with the same slot: by all threads,
 * which look at each later slot once. */
__device__ __forceinline__ void mark_replaced(const fa_append &p, const fa_sequences &s, int64_t first, int tokens,
                                              const fa_token *token, int *replaced) {
    int64_t low = INT64_MAX, high = -1;
    for (int n = 0; n < tokens; ++n) {
        if (token[n].skipped) continue;
        const int64_t slot = token[n].page * p.page_size + token[n].place;
        low = slot < low ? slot : low;
        high = slot > high ? slot : high;
    }
#pragma unroll 4
    for (int64_t other = first + 1 + threadIdx.x; other < p.slot_count; other += kThreads) {
        const int64_t slot = fa_slot(&p, other);
        if (slot < low || slot > high) continue;
        for (int n = 0; n < tokens && first + n < other; ++n)
            if (!token[n].skipped && token[n].page * p.page_size + token[n].place == slot &&
                !fa_token_of_slot(&p, &s, other).skipped)
                atomicExch(&replaced[n], 1);
    }
}

/* N elements that begin at a multiple of N of a row. */
template <typename T, int N> __device__ __forceinline__ Chunk<T, N> load(const T *row, int64_t stride, int first) {
    if constexpr (N > 1) return *reinterpret_cast<const Chunk<T, N> *>(row + first);
    return {row[first * stride]};
}
template <typename T, int N>
__device__ __forceinline__ void store(T *row, int64_t stride, int first, const Chunk<T, N> &chunk) {
    if constexpr (N > 1)
        *reinterpret_cast<Chunk<T, N> *>(row + first) = chunk;
    else
        row[first * stride] = chunk.element[0];
}

/* Pairs [first, first + kPairs) of a row: elements n and half + n, or neighbours. */
template <typename T, int kPairs, bool kInterleaved>
__device__ __forceinline__ void rotate(const fa_append &p, int64_t position, const T *from, int64_t stride, T *to,
                                       int64_t stride_to, int half, int first) {
    const int begin[2] = {kInterleaved ? 2 * first : first, kInterleaved ? 2 * first + kPairs : half + first};
    Chunk<T, kPairs> x[2], turned[2];
#pragma unroll
    for (int n = 0; n < 2; ++n) x[n] = load<T, kPairs>(from, stride, begin[n]);
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
        const int64_t pair = first + n;
        const float c = load_as_float(p.cos.data, p.rotary_dtype, position * p.cos.stride[0] + pair * p.cos.stride[1]);
        const float d = load_as_float(p.sin.data, p.rotary_dtype, position * p.sin.stride[0] + pair * p.sin.stride[1]);
        const int i = kInterleaved ? 2 * n : n, j = kInterleaved ? 2 * n + 1 : kPairs + n; // of both chunks together
        const float a = to_float(x[i / kPairs].element[i % kPairs]), b = to_float(x[j / kPairs].element[j % kPairs]);
        turned[i / kPairs].element[i % kPairs] = from_float<T>(fmaf(a, c, -(b * d)));
        turned[j / kPairs].element[j % kPairs] = from_float<T>(fmaf(b, c, a * d));
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) store<T, kPairs>(to, stride_to, begin[n], turned[n]);
}

/* Item `item` of a row of `length` elements: some pairs, or some elements behind them. */
template <typename T, int kPairs>
__device__ __forceinline__ void copy_item(const fa_append &p, int64_t position, const T *from, int64_t stride, T *to,
                                          int64_t stride_to, int half, int length, int item) {
    constexpr int kWidth = kPairs > 1 ? 2 * kPairs : 1;
    const int rotated = half / kPairs;
    if (item < rotated && p.interleaved)
        return rotate<T, kPairs, true>(p, position, from, stride, to, stride_to, half, item * kPairs);
    if (item < rotated) return rotate<T, kPairs, false>(p, position, from, stride, to, stride_to, half, item * kPairs);
    const int first = 2 * half + (item - rotated) * kWidth;
    if (first < length) store<T, kWidth>(to, stride_to, first, load<T, kWidth>(from, stride, first));
}

template <typename T, int kPairs>
__device__ __forceinline__ void clear_item(T *to, int64_t stride_to, int length, int item) {
    constexpr int kWidth = kPairs > 1 ? 2 * kPairs : 1;
    const int first = item * kWidth;
    if (first < length) store<T, kWidth>(to, stride_to, first, Chunk<T, kWidth>{});
}

/* Counts what is bad in starts and lengths, by one block. */
__device__ __forceinline__ void check_lengths(const fa_append &p, const fa_sequences &s, fa_fault_board *faults,
                                              int64_t *ends) {
    if (!s.q.starts && !s.q.used) return;
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    int64_t before = s.q.starts ? fa_clamp(s.q.starts[0], 0, s.q.rows) : 0; // the end of the sequence before
    for (int64_t first = 0; first < p.batch; first += kThreads) {
        const int64_t b = first + threadIdx.x;
        fa_span rows = s.packed_q ? fa_span{b, b + 1} : fa_span{0, p.rows};
        if (s.q.starts) {
            int64_t end = b < p.batch ? fa_clamp(s.q.starts[b + 1], 0, s.q.rows) : 0;
#pragma unroll
            for (int offset = 1; offset < kWarp; offset *= 2) {
                const int64_t other = __shfl_up_sync(~0u, end, offset);
                if (lane >= offset && other > end) end = other;
            }
            if (lane == kWarp - 1) ends[warp] = end;
            __syncthreads();
            int64_t largest = before;
            for (int w = 0; w < kWarps; ++w) {
                if (w == warp) rows.begin = largest;
                largest = ends[w] > largest ? ends[w] : largest;
            }
            const int64_t earlier = __shfl_up_sync(~0u, end, 1);
            rows.end = end > rows.begin ? end : rows.begin;
            if (lane > 0 && earlier > rows.begin) rows.begin = earlier;
            before = largest;
            __syncthreads();
        }
        if (b < p.batch) count_length_faults(faults, s.q, b, rows, 0);
    }
}

template <typename T, bool kVectors>
__global__ void __launch_bounds__(kThreads, 2)
    append_tokens(const __grid_constant__ fa_append p, const __grid_constant__ fa_sequences s, fa_fault_board *faults,
                  const __grid_constant__ Work work) {
    FA_CHAOS_BEGIN();
    constexpr int kPairs = kVectors ? 16 / (2 * static_cast<int>(sizeof(T))) : 1, kWidth = kVectors ? 2 * kPairs : 1;
    __shared__ fa_token found[kTokens];
    __shared__ int replaced[kTokens]; // k and v of the token are not written
    __shared__ int64_t ends[kWarps];

    const unsigned blocks = gridDim.x - (p.slots ? 0 : 1); // and one for the lengths of sequences
    if (blockIdx.x == blocks) {
        if (blockIdx.y == 0) check_lengths(p, s, faults, ends);
        return;
    }

    const int64_t keys = p.heads_kv, values = p.v_cache.data ? keys : 0; // rows of a token
    const int64_t of_token = keys + values + (p.out.data ? p.heads : 0);
    const int longest = p.head_dim > p.head_dim_v ? p.head_dim : p.head_dim_v;
    const int items = (longest + kWidth - 1) / kWidth, together = kThreads / work.lanes;

    for (int64_t first = int64_t(blockIdx.x) * work.tokens; first < work.rows; first += int64_t(blocks) * work.tokens) {
        const int64_t left = work.rows - first;
        const int tokens = left < work.tokens ? static_cast<int>(left) : work.tokens;
        if (threadIdx.x < kTokens) replaced[threadIdx.x] = 0;
        for (int n = threadIdx.x / kWarp; n < tokens; n += kWarps) {
            const fa_token token = find_token(p, s, faults, first + n, blockIdx.y == 0);
            if (threadIdx.x % kWarp == 0) found[n] = token;
        }
        __syncthreads();
        if (p.slots) {
            mark_replaced(p, s, first, tokens, found, replaced);
            __syncthreads();
        }
        for (int64_t n = int64_t(blockIdx.y) * together + threadIdx.x / work.lanes; n < tokens * of_token;
             n += int64_t(work.parts) * together) {
            const fa_token &token = found[n / of_token];
            const int64_t slot = n % of_token;
            const bool is_query = slot >= keys + values, is_value = !is_query && slot >= keys;
            const int64_t head = slot - (is_query ? keys + values : is_value ? keys : 0);
            if (!is_query && (token.skipped || replaced[n / of_token])) continue;
            const fa_operand &x = is_query ? p.q : is_value ? p.v : p.k;
            const fa_operand &to = is_query ? p.out : is_value ? p.v_cache : p.k_cache;
            const int length = is_value ? p.head_dim_v : p.head_dim, half = is_value ? 0 : work.half;
            const T *from = row_of<T>(x, token.batch, head, token.row);
            T *target =
                is_query ? row_of<T>(to, token.batch, head, token.row) : row_of<T>(to, token.page, head, token.place);
            for (int item = threadIdx.x % work.lanes; item < items; item += work.lanes)
                if (token.skipped)
                    clear_item<T, kPairs>(target, to.stride[3], length, item);
                else
                    copy_item<T, kPairs>(p, token.position, from, x.stride[3], target, to.stride[3], half, length,
                                         item);
        }
        __syncthreads();
    }
}

} // namespace fa
