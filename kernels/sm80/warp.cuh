/* One warp of the mma.sync kernel: its query rows' running output, the two products, the softmax between them, the end.
 */
#pragma once

#include <float.h>     // FLT_MAX
#include <type_traits> // is_same_v

#include "common/convert.cuh" // load_as_float
#include "common/partial.cuh" // finish_joined, partial_states
#include "common/ptx.cuh"     // exp2_fast, ldmatrix_x4, mma_16x8x16, pack
#include "common/rows.cuh"    // row_of
#include "common/score.cuh"   // bounded
#include "common/softmax.cuh" // weight_rounding, RowResult
#include "sm80/config.cuh"    // MmaArgs, BlockPlace
#include "sm80/scores.cuh"    // Scores
#include "sm80/tile.cuh"      // BlockAddress

namespace fa {

/* The shift of a row that has seen no key: no score is lower (see add_bias), yet finite, so that 2^(-inf - shift) is 0,
 * not NaN. */
constexpr float kNoShift = -FLT_MAX;

/* The sink of a row, or -inf. Rows beyond the last query may look at any head's. */
__device__ __forceinline__ float sink_of(const MmaArgs &args, int64_t head, int query) {
    const AttentionParams &p = args.problem;
    if (!p.sinks.data) return -INFINITY;
    const int64_t row = min(query, int(p.seq_q) - 1);
    return bounded(load_as_float(p.sinks.data, p.sinks_dtype, head * p.sinks.stride[0] + row * args.sink_row));
}

/* The state of one warp from tile to tile, and its part of the work. */
template <class C> struct MmaWarp {
    using T = typename C::T;
    static constexpr int kRowTiles = C::kRowTiles, kKeys = C::kKeys, kSteps = C::kHeadDim / 16;
    using Tile = Scores<kRowTiles, kKeys>;
    using Layout = TileLayout<C::kHeadDim>;
    using RowsAddress = BlockAddress<C::kHeadDim, BlockOrder::kRowsFirst>;
    using KeysAddress = BlockAddress<C::kHeadDim, BlockOrder::kColumnsFirst>;

    float out[kRowTiles][C::kHeadDim / 8][4]; // as Scores, head_dim in place of keys
    float shift[kRowTiles][2];                // `out` and `sum` are of weights 2^(score - shift); see weigh()
    float sum[kRowTiles][2];                  // this lane's share
    bool wide = false;                        // some row of the warp is (common/softmax.cuh); of products alone
    uint32_t query[C::kQueryInRegisters ? kRowTiles : 1][C::kQueryInRegisters ? kSteps : 1][4];
    RowsAddress query_address;

    __device__ explicit MmaWarp(uint32_t query_rows, int lane) : query_address(query_rows, lane) {
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
            for (int i = 0; i < 2; ++i) shift[r][i] = kNoShift, sum[r][i] = 0.0f;
#pragma unroll
            for (int j = 0; j < C::kHeadDim / 8; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) out[r][j][e] = 0.0f;
        }
    }

    __device__ __forceinline__ void load_query_block(uint32_t (&a)[4], int row_tile, int step) const {
        ldmatrix_x4<false>(a, query_address.at(step) + row_tile * 16 * C::kRowBytes);
    }

    __device__ __forceinline__ void load_query() {
        if constexpr (C::kQueryInRegisters) {
#pragma unroll
            for (int step = 0; step < kSteps; ++step)
#pragma unroll
                for (int r = 0; r < kRowTiles; ++r) load_query_block(query[r][step], r, step);
        }
    }

    using Operand = uint32_t[kRowTiles][4]; // a of mma_16x8x16, 16 columns of a row tile each

    /* s = Q K^T for this warp's kKeys key rows. */
    __device__ __forceinline__ void multiply_keys(Tile &s, const KeysAddress &keys) {
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
            for (int j = 0; j < kKeys / 8; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) s[r][j][e] = 0.0f;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            Operand a;
#pragma unroll
            for (int r = 0; r < kRowTiles; ++r) {
                if constexpr (C::kQueryInRegisters) {
#pragma unroll
                    for (int e = 0; e < 4; ++e) a[r][e] = query[r][step][e];
                } else {
                    load_query_block(a[r], r, step);
                }
            }
#pragma unroll
            for (int n = 0; n < kKeys / 16; ++n)
                multiply_block<T, false>(s, n, a, keys.at(step) + n * 16 * C::kRowBytes);
        }
    }

    /* Turns products (times `scale`: scores in base 2) into weights 2^(score - shift) and joins them to the sums. The
     * shift of a row is its maximum of some earlier moment. It is raised to the present one, and the output rescaled,
     * when some score of the warp exceeds its row's by more than 8; until then no lane needs to know the others'
     * maxima, and weights up to 2^8 are held by float32 sums and 16-bit operands as precisely as weights up to 1. In a
     * warp with a wide row it is raised at every tile, and the products of wide rows are rounded to scores. `then` is
     * what follows, twice in the code, so that the usual way has no branch between the exponentials and it. */
    template <class Then> __device__ __forceinline__ void weigh(Tile &s, float scale, Then &&then) {
        float highest[kRowTiles][2]; // of this lane's products of a row
        bool outgrown = false;
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float m = fmaxf(s[r][0][2 * i], s[r][0][2 * i + 1]);
#pragma unroll
                for (int j = 1; j < kKeys / 8; ++j) m = fmaxf(m, fmaxf(s[r][j][2 * i], s[r][j][2 * i + 1]));
                highest[r][i] = m;
                outgrown |= m * scale - shift[r][i] > 8.0f;
            }
        if (__any_sync(~0u, outgrown) || (C::kPlain && wide)) {
            bool any_wide = false;
#pragma unroll
            for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    float m = highest[r][i];
                    m = fmaxf(m, __shfl_xor_sync(~0u, m, 1));
                    m = fmaxf(m, __shfl_xor_sync(~0u, m, 2));
                    const float top = C::kPlain ? maximum_score(m, scale) : m, raised = fmaxf(shift[r][i], top);
                    const float factor = exp2_fast(shift[r][i] - raised);
                    shift[r][i] = raised;
                    sum[r][i] *= factor;
                    if (C::kPlain && top == raised) // each of four lanes a quarter
                        sum[r][i] += 0.25f * weight_rounding<T>(m, scale, raised);
#pragma unroll
                    for (int j = 0; j < C::kHeadDim / 8; ++j)
                        out[r][j][2 * i] *= factor, out[r][j][2 * i + 1] *= factor;
                    any_wide |= raised != kNoShift && is_wide(raised);
                }
            wide = C::kPlain && __any_sync(~0u, any_wide);
        }
        const auto weigh_by = [&](auto &&exponent) {
#pragma unroll
            for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
                for (int i = 0; i < 2; ++i)
#pragma unroll
                    for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
                        for (int e = 2 * i; e < 2 * i + 2; ++e)
                            s[r][j][e] = exp2_fast(exponent(s[r][j][e], shift[r][i]));
                        sum[r][i] += s[r][j][2 * i] + s[r][j][2 * i + 1];
                    }
            then();
        };
        if (C::kPlain && wide) [[unlikely]]
            weigh_by([&](float x, float from) {
                return is_wide(from) ? __fsub_rn(round_score(x, scale), from) : fmaf(x, scale, -from);
            });
        else
            weigh_by([&](float x, float from) { return fmaf(x, scale, -from); });
    }

    /* Rounds the weights to operand a of the second product: half the registers. */
    using Weights = uint32_t[kRowTiles][kKeys / 16][4];
    __device__ static void round_weights(Weights &weights, const Tile &s) {
#pragma unroll
        for (int n = 0; n < kKeys / 16; ++n)
#pragma unroll
            for (int r = 0; r < kRowTiles; ++r) round_operand<T>(weights[r][n], s[r][2 * n], s[r][2 * n + 1]);
    }

    /* out += P V for this warp's kKeys value rows. Takes the weights as Weights or as Tile. */
    template <typename W> __device__ __forceinline__ void multiply_values(const W &weights, const RowsAddress &values) {
#pragma unroll
        for (int n = 0; n < kKeys / 16; ++n) {
            Operand a;
#pragma unroll
            for (int r = 0; r < kRowTiles; ++r) {
                if constexpr (std::is_same_v<W, Tile>) {
                    round_operand<T>(a[r], weights[r][2 * n], weights[r][2 * n + 1]);
                } else {
#pragma unroll
                    for (int e = 0; e < 4; ++e) a[r][e] = weights[r][n][e];
                }
            }
#pragma unroll
            for (int step = 0; step < kSteps; ++step)
                multiply_block<T, true>(out, step, a, values.at(step) + n * 16 * C::kRowBytes);
        }
    }

    /* The whole sum of a row, in each of the four lanes that share it. */
    __device__ __forceinline__ float row_sum(int row_tile, int half) const {
        const float pair = sum[row_tile][half] + __shfl_xor_sync(~0u, sum[row_tile][half], 1);
        return pair + __shfl_xor_sync(~0u, pair, 2);
    }

    /* The warps of key parts > 0 put what they have at `slot` (kMergeValues columns of 32 floats); the warp of part 0
     * takes it in, part by part in a fixed order. */
    __device__ __forceinline__ void give(float *slot, int lane) const {
        slot += lane;
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
            for (int i = 0; i < 2; ++i) *slot = shift[r][i], slot[32] = sum[r][i], slot += 64;
#pragma unroll
            for (int j = 0; j < C::kHeadDim / 8; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) *slot = out[r][j][e], slot += 32;
        }
    }
    __device__ __forceinline__ void take(const float *slot, int lane) {
        slot += lane;
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
            float mine[2], theirs[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float other = *slot, raised = fmaxf(shift[r][i], other);
                mine[i] = exp2_fast(shift[r][i] - raised);
                theirs[i] = exp2_fast(other - raised);
                shift[r][i] = raised;
                sum[r][i] = sum[r][i] * mine[i] + slot[32] * theirs[i];
                slot += 64;
            }
#pragma unroll
            for (int j = 0; j < C::kHeadDim / 8; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    out[r][j][e] = out[r][j][e] * mine[e / 2] + *slot * theirs[e / 2], slot += 32;
        }
    }

    /* Writes what this part of the keys adds to the rows, for combine_splits(). */
    __device__ __forceinline__ void finish_part(const MmaArgs &args, int warp_m, int split, int lane) const {
        const BlockPlace place(args);
        const int first_query = place.row_block * C::kTileM + warp_m * C::kWarpRows;
        const AttentionParams &p = args.problem;
        const int64_t first_row = split * args.rows() + (int64_t(place.batch) * p.heads + place.head) * p.seq_q;
        float2 *states = partial_states<C::kHeadDim>(args.partial, args.splits, args.rows());
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float total = row_sum(r, i);
                const int query = first_query + r * 16 + i * 8 + lane / 4;
                if (query >= p.seq_q) continue;
                if (lane % 4 == 0) states[first_row + query] = make_float2(shift[r][i], total);
                float *to = args.partial + (first_row + query) * C::kHeadDim + lane % 4 * 2;
#pragma unroll
                for (int j = 0; j < C::kHeadDim / 8; ++j)
                    *reinterpret_cast<float2 *>(to + 8 * j) = make_float2(out[r][j][2 * i], out[r][j][2 * i + 1]);
            }
    }

    /* Normalises, writes the LSE, and the output through this warp's own rows of the query tile, which it alone reads.
     */
    __device__ __forceinline__ void finish(const MmaArgs &args, int warp_m, uint32_t rows, int lane) {
        const AttentionParams &p = args.problem;
        const BlockPlace place(args);
        const int first_query = place.row_block * C::kTileM + warp_m * C::kWarpRows;
        const int queries = min(C::kWarpRows, int(p.seq_q) - first_query);
        float *lse = row_of<float>(p.lse, place.batch, place.head, first_query);
        __syncwarp();
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float total = row_sum(r, i);
                const int row = r * 16 + i * 8 + lane / 4;
                const RowResult result =
                    finish_joined(shift[r][i], total, sink_of(args, place.head, first_query + row));
                if (p.lse.data && lane % 4 == 0 && row < queries) lse[row * p.lse.stride[2]] = result.lse;
#pragma unroll
                for (int j = 0; j < C::kHeadDim / 8; ++j)
                    store_shared(rows + Layout::offset(row, j) + lane % 4 * 4,
                                 pack<T>(out[r][j][2 * i] * result.factor, out[r][j][2 * i + 1] * result.factor));
            }
        __syncwarp();
        T *to = row_of<T>(p.out, place.batch, place.head, first_query);
        constexpr int kChunks = Layout::kPeriod,
                      kGroups = C::kHeadDim / 8 / kChunks; // of a row; as RowLoader splits them
        if (args.chunks_o) {
#pragma unroll
            for (int n = 0; n < C::kWarpRows * kChunks / 32; ++n)
#pragma unroll
                for (int g = 0; g < kGroups; ++g) {
                    const int row = n * (32 / kChunks) + lane / kChunks, chunk = g * kChunks + lane % kChunks;
                    const uint4 x = load_shared_16(rows + Layout::offset(row, chunk));
                    if (row < queries && chunk * 8 < p.head_dim_v)
                        reinterpret_cast<uint4 *>(to + row * p.out.stride[2])[chunk] = x;
                }
        } else {
#pragma unroll 1
            for (int n = lane; n < queries * (C::kHeadDim / 2); n += 32) {
                const int row = n / (C::kHeadDim / 2), column = n % (C::kHeadDim / 2) * 2;
                const uint32_t x = load_shared_4(rows + Layout::offset(row, column / 8) + column % 8 * 2);
                uint16_t *at = reinterpret_cast<uint16_t *>(to + row * p.out.stride[2] + column * p.out.stride[3]);
                if (column < p.head_dim_v) *at = uint16_t(x);
                if (column + 1 < p.head_dim_v) at[p.out.stride[3]] = uint16_t(x >> 16);
            }
        }
    }
};

} // namespace fa
