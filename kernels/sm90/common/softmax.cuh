/* The online softmax of 64 x N scores in wgmma accumulators: each thread holds parts of two rows, four threads a row.
 *
 * weight = 2^(s * factor - maximum * factor), one FFMA and one ex2 a score: `maximum` is kept in units of the raw
 * product, which is why the scale must be positive. Any shift gives the same quotient as long as nothing over- or
 * underflows. So after a tile's first block the maximum is not looked for: weights are computed with the old one, and
 * their sums, which are needed anyway, tell whether a row outgrew it (kWeightSum). Only then are the scores, still
 * there, searched for the new maximum and everything before rescaled. Underflow cannot happen: the maximum is that of
 * keys already counted.
 *
 * Wide rows (common/softmax.cuh) are taken by absorb() alone: a warp that has one leaves the fast path.
 */
#pragma once
#include "common/ptx.cuh"     // exp2_fast, pack, tanh_fast
#include "common/softmax.cuh" // RowState, RowResult, finish_row, finish_fast, weight_rounding
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <type_traits>

namespace fa::sm90 {

template <class T, int Count>
__device__ __forceinline__ void pack_scores(uint32_t (&words)[Count / 2], const float (&scores)[Count]) {
#pragma unroll
    for (int i = 0; i < Count / 2; ++i) words[i] = pack<T>(scores[2 * i], scores[2 * i + 1]);
}

/* A thread's columns of one row are 8 * g + lane_column + {0, 1}, lane_column = 2 * (lane % 4). Those below `column`,
 * as bits 2 * g + {0, 1}. */
__device__ __forceinline__ uint32_t columns_below(int column, int lane_column) {
    const int x = max(column - lane_column, 0);
    uint32_t mask;
    asm("bmsk.clamp.b32 %0, 0, %1;" : "=r"(mask) : "r"(2 * (x >> 3) + min(x & 7, 2)));
    return mask;
}

/* Bits of a thread's columns of one row of a block, as columns_below() counts them, that lie in [low, high). */
__device__ __forceinline__ uint32_t columns_between(int low, int high, int lane_column) {
    return columns_below(high, lane_column) & ~columns_below(low, lane_column);
}

/* Excludes the scores of row r (0, 1) whose bits are not in `visible`. */
template <int Count> __device__ __forceinline__ void hide_scores(float (&scores)[Count], int r, uint32_t visible) {
    static_assert(Count <= 64, "32 columns of a row");
#pragma unroll
    for (int i = 2 * r; i < Count; i += 4) {
        if (!(visible >> i / 4 * 2 & 1)) scores[i] = -INFINITY;
        if (!(visible >> i / 4 * 2 & 2)) scores[i + 1] = -INFINITY;
    }
}

/* The same at block columns outside [low[r], high[r]). */
template <int Count>
__device__ __forceinline__ void mask_scores(float (&scores)[Count], const int (&low)[2], const int (&high)[2],
                                            int lane_column) {
#pragma unroll
    for (int r = 0; r < 2; ++r) hide_scores(scores, r, columns_between(low[r], high[r], lane_column));
}

__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffff, x, 1);
    return x + __shfl_xor_sync(0xffffffff, x, 2);
}

/* Largest sum of a thread's weights of one row and block under a stale maximum: float16 holds them, and no accumulator
 * comes near its range. Low, so that keys which alone decide a row get weights of about 1; at 1024 fewer than 1 in 1000
 * blocks of N(0, 1) scores exceed it, at 64 the rows of a causal diagonal, which see few keys, cost 5% at 512 keys. */
inline constexpr float kWeightSum = 1024.0f;

/* A softcap's score of a product s in base 2 where |s| < limit: s * at(s * s - limit * limit), in 2 or 3 terms. */
struct CapPolynomial {
    float limit_squared, coefficient[3];
    template <int Terms> __device__ __forceinline__ float at(float w) const {
        static_assert(Terms == 2 || Terms == 3);
        return fmaf(w, Terms == 2 ? coefficient[1] : fmaf(w, coefficient[2], coefficient[1]), coefficient[0]);
    }
};

__device__ __forceinline__ bool all_narrow(const float (&maximum_log2)[2]) {
    return !is_wide(maximum_log2[0]) && !is_wide(maximum_log2[1]);
}

/* State of a thread's two rows. */
struct OnlineSoftmax {
    float maximum[2] = {-INFINITY, -INFINITY}; // raw products
    float sum[2] = {0.0f, 0.0f};               // of this thread's weights; quad_sum() gives the row's
    bool narrow = true;                        // neither row is wide
    float rescale[2];                          // factor for what was accumulated, when absorb() returned true

    /* Weights of a block under the present maximum, 2^exponent(i) for its score i. False, for the whole warp and with
     * the state unchanged, when some row has no maximum yet, outgrew it or is wide, or when something is NaN: absorb()
     * then takes the block. */
    template <class T, int Words, class Exponent>
    __device__ __forceinline__ bool try_absorb_by(uint32_t (&weights)[Words], Exponent exponent) {
        float part[2][2] = {{0.0f, 0.0f}, {0.0f, 0.0f}};
#pragma unroll
        for (int i = 0; i < 2 * Words; i += 2) {
            const int r = (i >> 1) & 1, chain = (i >> 2) & 1;
            const float low = exp2_fast(exponent(i)), high = exp2_fast(exponent(i + 1));
            part[r][chain] += low;
            part[r][chain] += high;
            weights[i / 2] = pack<T>(low, high);
        }
        const float block[2] = {part[0][0] + part[0][1], part[1][0] + part[1][1]};
        if (!__all_sync(0xffffffff, block[0] <= kWeightSum && block[1] <= kWeightSum && narrow)) return false;
        sum[0] += block[0];
        sum[1] += block[1];
        return true;
    }
    template <class T, int Count>
    __device__ __forceinline__ bool try_absorb(uint32_t (&weights)[Count / 2], const float (&scores)[Count],
                                               float factor) {
        const float shift[2] = {-maximum[0] * factor, -maximum[1] * factor};
        return try_absorb_by<T>(weights, [&](int i) { return fmaf(scores[i], factor, shift[(i >> 1) & 1]); });
    }

    /* The same of raw products under a softcap, by the polynomial. `near` becomes false where a product of the warp lay
     * beyond its limit: then, too, the state is unchanged. */
    template <class T, int Terms, int Count>
    __device__ __forceinline__ bool try_absorb_near(uint32_t (&weights)[Count / 2], const float (&products)[Count],
                                                    float factor, const CapPolynomial &cap, bool &near) {
        const float shift[2] = {-maximum[0] * factor, -maximum[1] * factor};
        float part[2][2] = {{0.0f, 0.0f}, {0.0f, 0.0f}};
        uint32_t inside = 0xffffffff; // sign bit: that of all differences
#pragma unroll
        for (int i = 0; i < Count; i += 2) {
            const int r = (i >> 1) & 1, chain = (i >> 2) & 1;
            const float w0 = fmaf(products[i], products[i], -cap.limit_squared);
            const float w1 = fmaf(products[i + 1], products[i + 1], -cap.limit_squared);
            inside &= __float_as_uint(w0) & __float_as_uint(w1);
            const float low = exp2_fast(fmaf(products[i], cap.at<Terms>(w0), shift[r]));
            const float high = exp2_fast(fmaf(products[i + 1], cap.at<Terms>(w1), shift[r]));
            part[r][chain] += low;
            part[r][chain] += high;
            weights[i / 2] = pack<T>(low, high);
        }
        const bool all_inside = static_cast<int32_t>(inside) < 0;
        const float block[2] = {part[0][0] + part[0][1], part[1][0] + part[1][1]};
        if (!__all_sync(0xffffffff, block[0] <= kWeightSum && block[1] <= kWeightSum && narrow && all_inside)) {
            near = __all_sync(0xffffffff, all_inside);
            return false;
        }
        sum[0] += block[0];
        sum[1] += block[1];
        return true;
    }

    /* Turns a block's scores into weights under the true maximum. True (for the whole warp) when the accumulated output
     * must be multiplied by rescale[row]; never for the `First` block of a tile. The largest weight is 1 but for the
     * rounding of maximum * factor, which counts at scores in the thousands: with `Rounds`, weights are summed as they
     * are rounded for P V, so that a row of one key is that key's value. Else finish() needs highest_rounding(). */
    template <bool First, class T, bool Rounds = std::is_same_v<T, __half>, int Count>
    __device__ __forceinline__ bool absorb(float (&scores)[Count], float factor) {
        float block[2][2] = {{maximum[0], maximum[0]}, {maximum[1], maximum[1]}};
#pragma unroll
        for (int i = 0; i < Count; ++i) {
            float &m = block[(i >> 1) & 1][(i >> 2) & 1];
            m = fmaxf(m, scores[i]);
        }
        float by[2] = {factor, factor}, shift[2];
        narrow = true;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float top = quad_max(fmaxf(block[r][0], block[r][1]));
            if constexpr (First) {
                by[r] = row_factor(top, factor);
                narrow = narrow && by[r] == factor;
                shift[r] = __fmul_rn(softmax_shift(top), by[r]);
            } else { // products less the maximum, where another factor would take registers that later blocks lack
                shift[r] = __fmul_rn(softmax_shift(top), factor);
                rescale[r] = exp2_fast(__fsub_rn(__fmul_rn(maximum[r], factor), shift[r]));
                if (is_wide(shift[r])) [[unlikely]] {
                    narrow = false, shift[r] = 0.0f, rescale[r] = maximum[r] == top ? 1.0f : 0.0f;
#pragma unroll
                    for (int i = 2 * r; i < Count; i += 4) scores[i] -= top, scores[i + 1] -= top;
                }
                sum[r] *= rescale[r];
            }
            maximum[r] = top;
        }
        float part[2][2] = {{0.0f, 0.0f}, {0.0f, 0.0f}};
#pragma unroll
        for (int i = 0; i < Count; ++i) {
            const int r = (i >> 1) & 1;
            scores[i] = exp2_fast(fmaf(scores[i], by[r], -shift[r]));
            if constexpr (Rounds) scores[i] = to_float(from_float<T>(scores[i]));
            part[r][(i >> 2) & 1] += scores[i];
        }
        sum[0] += part[0][0] + part[0][1];
        sum[1] += part[1][0] + part[1][1];
        return !First;
    }

    template <int Count> __device__ __forceinline__ void rescale_output(float (&out)[Count]) const {
#pragma unroll
        for (int i = 0; i < Count; ++i) out[i] *= rescale[(i >> 1) & 1];
    }

    /* The rounding of row r's highest weight, where absorb() left it out: once a tile it is cheaper. */
    template <class T> __device__ __forceinline__ float highest_rounding(int r, float factor) const {
        if constexpr (std::is_same_v<T, __half>) return 0.0f;
        return weight_rounding<T>(maximum[r], factor, maximum_score(maximum[r], factor));
    }

    /* The factor that normalises row r, and its LSE; `sink` is -inf where there is none, `added` joins the sum. All
     * four threads of the row call this. */
    __device__ __forceinline__ RowResult finish(int r, float factor, float sink, float added = 0.0f) const {
        RowState row;
        row.maximum = maximum_score(maximum[r], factor);
        row.sum = quad_sum(sum[r]) + added;
        if (sink != -INFINITY) return finish_row(row, sink);
        return finish_fast(row);
    }
};

} // namespace fa::sm90
