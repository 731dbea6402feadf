/* The softmax of a warp's strip of scores in shared memory, 16 rows. A pair of lanes, l and l + 16, owns row l: each
 * takes half of the columns and keeps the row's maximum and its part of the sum. */
#pragma once

#include <stdint.h> // int64_t

#include "common/alibi.cuh"   // slope_of, with_alibi
#include "common/convert.cuh" // load_as_float, to_float
#include "common/mask.cuh"    // KeyRange, Span
#include "common/params.cuh"  // AttentionParams
#include "common/ptx.cuh"     // exp2_fast, pack
#include "common/rows.cuh"    // Chunk, bias_row, mask_row
#include "common/score.cuh"   // ScoreParams, add_bias, bounded
#include "common/softcap.cuh" // tanh_by_exp2
#include "common/softmax.cuh" // RowState

namespace fa::wmma_tiles {

/* Keys in 32 bits. */
__device__ __forceinline__ Span<int> narrow(const KeyRange &range) {
    return {int(range.empty() ? 0 : range.begin), int(range.empty() ? 0 : range.end)};
}

constexpr int kStripRows = 16;

/* An owner lane's state of its row. */
struct OwnedRow {
    int row;
    Span<int> keys; // that the row sees; none for a row past the end
    RowState state;
    float highest = -INFINITY; // of the products, where the scale is folded into the exponent (kSimple)
};

/* Pitch of a strip of scores, in floats: rows 8 banks apart, so that a fragment's pairs of floats store without
 * conflicts. Rows 0..3 and 4..7 of the eight that load 16 bytes at a time would then meet: the latter read every two
 * neighbouring chunks in the other order. Weights have rows 4 banks apart, which suits both writers and readers.
 */
template <int kColumns> constexpr int kScorePitch = kColumns + 8;

/* Options that change single scores, and whether four neighbours of their last axis are one aligned load. */
struct ScoreOptions {
    ScoreParams score;
    fa_operand alibi; // (B, H) slopes; data NULL: none
    bool bias_vectors, mask_vectors;
};

/* Host: whether every four elements of `bytes` each, from a multiple of four on, are contiguous and aligned. */
inline bool in_fours(const fa_operand &x, int bytes) {
    if (x.stride[3] != 1 || reinterpret_cast<uintptr_t>(x.data) % (4 * bytes)) return false;
    return x.stride[0] % 4 == 0 && x.stride[1] % 4 == 0 && x.stride[2] % 4 == 0;
}

template <typename T> __device__ __forceinline__ void load_four(const void *data, int64_t at, float (&x)[4]) {
    const auto read = *reinterpret_cast<const Chunk<T, 4> *>(static_cast<const T *>(data) + at);
#pragma unroll
    for (int j = 0; j < 4; ++j) x[j] = to_float(read.element[j]);
}

/* Bias of the keys [key, key + 4) from `row` (bias_row()) on; 0 past the last key. */
__device__ __forceinline__ void load_bias(const AttentionParams &p, bool vectors, int64_t row, int key,
                                          float (&bias)[4]) {
    const bool whole = vectors && key + 4 <= p.seq_k;
    if (whole && p.bias_dtype == FA_F32) {
        load_four<float>(p.bias.data, row + key, bias);
    } else if (whole && p.bias_dtype == FA_F16) {
        load_four<__half>(p.bias.data, row + key, bias);
    } else if (whole) {
        load_four<__nv_bfloat16>(p.bias.data, row + key, bias);
    } else {
#pragma unroll
        for (int j = 0; j < 4; ++j)
            bias[j] =
                key + j < p.seq_k ? load_as_float(p.bias.data, p.bias_dtype, row + (key + j) * p.bias.stride[3]) : 0.0f;
    }
}

/* -inf for the scores of the keys [key, key + 4) that the mask's row does not let through. */
__device__ __forceinline__ void apply_mask(const AttentionParams &p, bool vectors, const uint8_t *row, int key,
                                           float *s) {
    if (vectors && key + 4 <= p.seq_k) {
        const uint32_t read = *reinterpret_cast<const uint32_t *>(row + key);
#pragma unroll
        for (int j = 0; j < 4; ++j)
            if (!(read & 0xffu << 8 * j)) s[j] = -INFINITY;
    } else {
#pragma unroll
        for (int j = 0; j < 4; ++j)
            if (key + j < p.seq_k && !row[(key + j) * p.mask.stride[3]]) s[j] = -INFINITY;
    }
}

/* Softcap or scale, bias, ALiBi and mask for a lane's products of `row`: s[i] belongs to key from + (i ^ swap). */
template <int kMine>
__device__ __forceinline__ void score_products(const AttentionParams &p, const ScoreOptions &options, int64_t batch,
                                               int64_t head, int64_t row, int from, int swap, float (&s)[kMine]) {
    if (options.score.cap_log2 > 0) {
#pragma unroll
        for (int i = 0; i < kMine; ++i)
            s[i] = __fmul_rn(options.score.cap_log2, tanh_by_exp2(s[i] * options.score.scale_cap));
    } else {
#pragma unroll
        for (int i = 0; i < kMine; ++i) s[i] = round_score(s[i], options.score.scale_log2);
    }
    const float slope = slope_of(options.alibi, batch, head); // kept from tile to tile, it would cost spills
    if (p.bias.data || slope != 0.0f) {
        const int64_t bias_at = bias_row(p, batch, head, row);
        const int distance = from - int(row + p.diagonal); // of the key `from`
#pragma unroll
        for (int i = 0; i < kMine; i += 4) {
            float bias[4] = {};
            if (p.bias.data) load_bias(p, options.bias_vectors, bias_at, from + (i ^ swap), bias);
            if (slope != 0.0f) {
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    if (bias[j] != -INFINITY) bias[j] = with_alibi(bounded(bias[j]), slope, distance + (i ^ swap) + j);
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) s[i + j] = add_bias(s[i + j], bias[j]);
        }
    }
    if (p.mask.data) {
        const uint8_t *mask = mask_row(p, batch, head, row);
#pragma unroll
        for (int i = 0; i < kMine; i += 4) apply_mask(p, options.mask_vectors, mask, from + (i ^ swap), s + i);
    }
}

/* Turns kStripRows x kColumns products (pitch kScorePitch), of the keys from `key` on, into weights of type T (pitch
 * kWeightPitch) in the same memory. Returns the factor for what the row accumulated before. kSimple: scale > 0 and
 * neither softcap, bias, ALiBi nor mask. `all_visible`: every row sees every key of the tile. `key` is a multiple of 4.
 */
template <typename T, int kColumns, int kWeightPitch, bool kSimple>
__device__ __forceinline__ float softmax_strip(const AttentionParams &p, const ScoreOptions &options, int64_t batch,
                                               int64_t head, OwnedRow &owned, float *strip, int key, bool all_visible,
                                               int lane) {
    constexpr int kMine = kColumns / 2; // columns of this lane
    static_assert(kMine % 8 == 0, "weights are written eight at a time");
    const int first = lane / kStripRows * kMine, swap = lane & 4; // s[i] belongs to column first + (i ^ swap)
    const float *row = strip + lane % kStripRows * kScorePitch<kColumns> + first;
    float s[kMine];
#pragma unroll
    for (int i = 0; i < kMine; i += 4) {
        const float4 read = *reinterpret_cast<const float4 *>(row + (i ^ swap));
        s[i] = read.x, s[i + 1] = read.y, s[i + 2] = read.z, s[i + 3] = read.w;
    }
    const int from = key + first, low = owned.keys.begin - from, high = owned.keys.end - from;
    if constexpr (!kSimple) // rows past the end read a row that exists
        score_products(p, options, batch, head, min(int64_t(owned.row), p.seq_q - 1), from, swap, s);
    if (!all_visible) {
#pragma unroll
        for (int i = 0; i < kMine; ++i)
            if ((i ^ swap) < low || (i ^ swap) >= high) s[i] = -INFINITY;
    }

    float largest[4] = {s[0], s[1], s[2], s[3]};
#pragma unroll
    for (int i = 4; i < kMine; ++i) largest[i % 4] = fmaxf(largest[i % 4], s[i]);
    float highest = fmaxf(fmaxf(largest[0], largest[1]), fmaxf(largest[2], largest[3]));
    highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 16));
    if constexpr (kSimple) owned.highest = fmaxf(owned.highest, highest);
    const float factor = owned.state.raise(kSimple ? maximum_score(highest, options.score.scale_log2) : highest);
    const float by = kSimple ? row_factor(owned.highest, options.score.scale_log2) : 1.0f;
    const float shift = kSimple ? __fmul_rn(softmax_shift(owned.highest), by) : softmax_shift(owned.state.maximum);

    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    T *weights = reinterpret_cast<T *>(strip) + lane % kStripRows * kWeightPitch + first;
    __syncwarp(); // every row of the strip has been read
#pragma unroll
    for (int i = 0; i < kMine; i += 8) {
        uint32_t packed[4];
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
            float w[2];
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                const float x = s[i + j + n];
                w[n] = exp2_fast(kSimple ? fmaf(x, by, -shift) : __fsub_rn(x, shift));
                sum[(j + n) % 4] += w[n];
            }
            packed[j / 2] = pack<T>(w[0], w[1]);
        }
        *reinterpret_cast<uint4 *>(weights + i) = swap ? make_uint4(packed[2], packed[3], packed[0], packed[1])
                                                       : make_uint4(packed[0], packed[1], packed[2], packed[3]);
    }
    owned.state.sum += (sum[0] + sum[1]) + (sum[2] + sum[3]); // of this lane's columns alone
    return factor;
}

} // namespace fa::wmma_tiles
