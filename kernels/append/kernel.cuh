/* The append kernel and the rows of its tokens. See append.cu. */
#pragma once

#include <type_traits> // std::conditional_t

#include "append/tokens.cuh"
#include "common/chaos.cuh"
#include "common/convert.cuh"
#include "common/rows.cuh" // Chunk, row_of, takes_chunks

namespace fa {

/* kPairs elements of a row as what one load brings: 8 bytes, or one element. An integer, because of a struct whose
 * elements are computed nvcc 13.0 may make a store each. */
template <typename T, int kPairs> using Piece = std::conditional_t<kPairs == 1, T, uint64_t>;

__device__ __forceinline__ float2 two_of(uint64_t word, float) {
    return {__uint_as_float(static_cast<uint32_t>(word)), __uint_as_float(static_cast<uint32_t>(word >> 32))};
}
__device__ __forceinline__ float2 two_of(uint32_t word, __half) {
    const __half2 pair = *reinterpret_cast<const __half2 *>(&word);
    return {__half2float(pair.x), __half2float(pair.y)};
}
__device__ __forceinline__ float2 two_of(uint32_t word, __nv_bfloat16) {
    return {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u)};
}
__device__ __forceinline__ uint32_t word_of(__half2 x) { return *reinterpret_cast<const uint32_t *>(&x); }
__device__ __forceinline__ uint32_t word_of(__nv_bfloat162 x) { return *reinterpret_cast<const uint32_t *>(&x); }
__device__ __forceinline__ uint32_t rounded(__half, float x, float y) { return word_of(__floats2half2_rn(x, y)); }
__device__ __forceinline__ uint32_t rounded(__nv_bfloat16, float x, float y) {
    return word_of(__floats2bfloat162_rn(x, y));
}

template <typename T, int kPairs> __device__ __forceinline__ void unpack(const Piece<T, kPairs> &piece, float *x) {
    if constexpr (kPairs == 1) {
        x[0] = to_float(piece);
    } else if constexpr (kPairs == 2) {
        const float2 both = two_of(piece, T());
        x[0] = both.x, x[1] = both.y;
    } else {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float2 both = two_of(static_cast<uint32_t>(piece >> 32 * i), T());
            x[2 * i] = both.x, x[2 * i + 1] = both.y;
        }
    }
}
template <typename T, int kPairs> __device__ __forceinline__ Piece<T, kPairs> packed(const float *x) {
    if constexpr (kPairs == 1)
        return from_float<T>(x[0]);
    else if constexpr (kPairs == 2)
        return __float_as_uint(x[0]) | static_cast<uint64_t>(__float_as_uint(x[1])) << 32;
    else
        return rounded(T(), x[0], x[1]) | static_cast<uint64_t>(rounded(T(), x[2], x[3])) << 32;
}

/* cos and sin of pairs pair[0..kPairs) of a position. */
template <typename R, int kPairs>
__device__ __forceinline__ void load_angles(const Params &p, bool two, int64_t position, const int (&pair)[kPairs],
                                            float (&c)[kPairs], float (&d)[kPairs]) {
    const R *cos = static_cast<const R *>(p.cos.data) + position * p.cos.stride[0];
    const R *sin = static_cast<const R *>(p.sin.data) + position * p.sin.stride[0];
    if (kPairs > 1 && two) {
        using Two = std::conditional_t<sizeof(R) == 4, uint64_t, uint32_t>;
#pragma unroll
        for (int n = 0; n < kPairs; n += 2) {
            const float2 x = two_of(*reinterpret_cast<const Two *>(cos + pair[n]), R());
            const float2 y = two_of(*reinterpret_cast<const Two *>(sin + pair[n]), R());
            c[n] = x.x, d[n] = y.x;
            if (n + 1 < kPairs) c[n + 1] = x.y, d[n + 1] = y.y;
        }
    } else {
#pragma unroll
        for (int n = 0; n < kPairs; ++n)
            c[n] = to_float(cos[pair[n] * p.cos.stride[1]]), d[n] = to_float(sin[pair[n] * p.sin.stride[1]]);
    }
}

/* A pair of numbers turned. */
__device__ __forceinline__ void turn(float &a, float &b, float c, float d) {
    const float x = a, y = b;
    a = fmaf(x, c, -(y * d)), b = fmaf(y, c, x * d);
}

/* Some rows of one token: their heads are neighbours. */
struct Unit {
    int token, head, rows; // of the block's tokens; the first head
    int kind;              // 0: k, 1: v, 2: q
    int item;              // the first of them
};

__device__ __forceinline__ Unit unit_of(const Params &p, const Work &work, int n) {
    const int keys = static_cast<int>(p.heads_kv), of_keys = (keys + kRows - 1) / kRows;
    Unit unit;
    unit.token = static_cast<int>(static_cast<unsigned>(n) / static_cast<unsigned>(work.units));
    int at = n - unit.token * work.units, step = 0;
    if (work.steps > 1) step = at % work.steps, at /= work.steps;
    unit.item = step * work.lanes;
    unit.kind = at < of_keys ? 0 : p.v_cache.data && at < 2 * of_keys ? 1 : 2;
    if (unit.kind) at -= unit.kind == 2 && p.v_cache.data ? 2 * of_keys : of_keys;
    unit.head = at * kRows;
    const int heads = unit.kind == 2 ? static_cast<int>(p.heads) : keys;
    unit.rows = heads - unit.head < kRows ? heads - unit.head : kRows;
    return unit;
}

/* A thread's share of a unit: item `item` of each of its rows, two pieces. Of the first items a piece is the first of
 * all pairs and one the second, or with neighbours for pairs pieces of each half of the columns that are rotated; of
 * those behind them pieces of each half of the other columns. Lanes side by side so read bytes side by side. */
template <typename T, int kPairs> struct Share {
    static constexpr bool kVectors = kPairs > 1;
    Piece<T, kPairs> x[kRows][2];
    int at[2]; // columns of the pieces
    bool exists, turns, two;

    __device__ __forceinline__ Share(const Params &p, const Work &work, const Unit &unit, int item) {
        const int length = unit.kind == 1 ? p.head_dim_v : p.head_dim, half = unit.kind == 1 ? 0 : work.half;
        const int turned = half / kPairs, rest = length - 2 * half;
        turns = item < turned;
        two = kVectors || turns;
        exists = turns || item - turned < rest / (kVectors ? 2 * kPairs : 1);
        at[0] = turns ? item * kPairs : 2 * half + (item - turned) * kPairs;
        at[1] = at[0] + (turns ? half : rest / 2);
        if (!kVectors && turns && p.interleaved) at[0] = 2 * item, at[1] = 2 * item + 1;
    }

    __device__ __forceinline__ void load(const T *row, int64_t heads_apart, int64_t stride, int rows) {
#pragma unroll
        for (int r = 0; r < kRows; ++r, row += heads_apart) {
            x[r][0] = x[r][1] = Piece<T, kPairs>();
            if (!exists || r >= rows) continue;
            x[r][0] = *reinterpret_cast<const Piece<T, kPairs> *>(row + at[0] * (kVectors ? 1 : stride));
            if (two) x[r][1] = *reinterpret_cast<const Piece<T, kPairs> *>(row + at[1] * (kVectors ? 1 : stride));
        }
    }

    __device__ __forceinline__ void rotate(const Params &p, const Work &work, int64_t position, int item) {
        int pair[kPairs];
        const bool neighbours = kVectors && p.interleaved;
        constexpr int kHalf = kVectors ? kPairs / 2 : 1;
#pragma unroll
        for (int n = 0; n < kPairs; ++n)
            pair[n] = neighbours ? item * kHalf + n % kHalf + (n < kHalf ? 0 : work.half / 2) : item * kPairs + n;
        float c[kPairs], d[kPairs];
        if (p.rotary_dtype == FA_F32)
            load_angles<float, kPairs>(p, work.tables, position, pair, c, d);
        else if constexpr (sizeof(T) == 2)
            load_angles<T, kPairs>(p, work.tables, position, pair, c, d);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            float y[2][kPairs];
            unpack<T, kPairs>(x[r][0], y[0]), unpack<T, kPairs>(x[r][1], y[1]);
            if (neighbours) {
#pragma unroll
                for (int n = 0; kVectors && n < kPairs; ++n)
                    turn(y[n / kHalf][2 * (n % kHalf)], y[n / kHalf][2 * (n % kHalf) + 1], c[n], d[n]);
            } else {
#pragma unroll
                for (int n = 0; n < kPairs; ++n) turn(y[0][n], y[1][n], c[n], d[n]);
            }
            x[r][0] = packed<T, kPairs>(y[0]), x[r][1] = packed<T, kPairs>(y[1]);
        }
    }

    __device__ __forceinline__ void store(T *row, int64_t heads_apart, int64_t stride, int rows, bool zero) const {
#pragma unroll
        for (int r = 0; r < kRows; ++r, row += heads_apart) {
            if (!exists || r >= rows) continue;
            *reinterpret_cast<Piece<T, kPairs> *>(row + at[0] * (kVectors ? 1 : stride)) =
                zero ? Piece<T, kPairs>() : x[r][0];
            if (two)
                *reinterpret_cast<Piece<T, kPairs> *>(row + at[1] * (kVectors ? 1 : stride)) =
                    zero ? Piece<T, kPairs>() : x[r][1];
        }
    }
};

template <typename T, bool kVectors>
__global__ void __launch_bounds__(kThreads, kBlocks)
    append_tokens(const __grid_constant__ Params p, const __grid_constant__ fa_sequences s, fa_fault_board *faults,
                  const __grid_constant__ Work work) {
    FA_CHAOS_BEGIN();
    constexpr int kPairs = kVectors ? 16 / (2 * static_cast<int>(sizeof(T))) : 1;
    __shared__ fa_token found[kTokens];
    __shared__ int replaced[kTokens]; // k and v of the token are not written
    __shared__ Marks marks;
    __shared__ int64_t ends[kWarps];

    const unsigned blocks = gridDim.x - (p.slots.data ? 0 : 1); // and one for the lengths of sequences
    if (blockIdx.x == blocks) {
        if (blockIdx.y == 0) check_lengths(p, s, faults, ends);
        return;
    }

    const int lane = threadIdx.x & (work.lanes - 1), together = kThreads >> work.lanes_log2;
    for (int64_t first = int64_t(blockIdx.x) * work.tokens; first < work.rows; first += int64_t(blocks) * work.tokens) {
        const int64_t left = work.rows - first;
        const int tokens = left < work.tokens ? static_cast<int>(left) : work.tokens, units = tokens * work.units;
        /* The data to copy does not depend on where it goes: its first part is on its way while one warp, which has
         * nothing to copy where a block has few units, looks up the places. */
        if (threadIdx.x >= kThreads - kWarp) {
            const int n = threadIdx.x % kWarp;
            replaced[n] = 0;
            const fa_token token = find_token(p, s, faults, first + (n < tokens ? n : 0), n < tokens, blockIdx.y == 0);
            if (n < tokens) found[n] = token;
            if (p.slots.data) marks.set(p, token);
        }
        Slots slots;
        if (p.slots.data) slots.load(p, first + 1);
        bool looked = false;
        for (int n = int(blockIdx.y) * together + (threadIdx.x >> work.lanes_log2);; n += work.parts * together) {
            const Unit unit = unit_of(p, work, n < units ? n : 0);
            const int item = unit.item + lane;
            Share<T, kPairs> mine(p, work, unit, item);
            if (n < units) {
                const fa_operand &x = unit.kind == 2 ? p.q : unit.kind == 1 ? p.v : p.k;
                int64_t batch, row;
                find_row(p, s, first + unit.token, batch, row);
                mine.load(row_of<T>(x, batch, unit.head, row), x.stride[1], x.stride[3], unit.rows);
            }
            if (!looked) {
                __syncthreads();
                if (p.slots.data) {
                    mark_replaced(p, s, first, tokens, found, marks, slots, replaced);
                    __syncthreads();
                }
                looked = true;
            }
            if (n >= units) break;
            const fa_token &token = found[unit.token];
            if (unit.kind < 2 && (token.skipped || replaced[unit.token])) continue;
            if (mine.turns && !token.skipped) mine.rotate(p, work, token.position, item);
            const fa_operand &to = unit.kind == 2 ? p.out : unit.kind == 1 ? p.v_cache : p.k_cache;
            const int64_t batch = unit.kind == 2 ? token.batch : token.page;
            const int64_t row = unit.kind == 2 ? token.row : token.place;
            mine.store(row_of<T>(to, batch, unit.head, row), to.stride[1], to.stride[3], unit.rows, token.skipped);
        }
        __syncthreads();
    }
}

} // namespace fa
