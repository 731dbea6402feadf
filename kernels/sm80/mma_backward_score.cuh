/* From the products of a pair to its weights: S and dP in, P and dT (or dS) out, in the registers of mma.sync.
 *
 * A lane's elements are those of Scores (sm80/scores.cuh), own rows in place of queries, other rows in place of keys.
 * An excluded pair is selected, never multiplied away: its exponent is -inf, its weights are 0, whatever its products
 * are. */
#pragma once

#include <math.h>      // INFINITY
#include <type_traits> // remove_cvref_t

#include "common/alibi.cuh"             // slope_of, with_alibi
#include "common/convert.cuh"           // to_float
#include "common/dropout.cuh"           // PairPlace, kept_pairs
#include "common/ptx.cuh"               // exp2_fast, load_shared_16, load_shared_pair, store_shared
#include "common/rows.cuh"              // Chunk
#include "common/score.cuh"             // kLog2E, bounded
#include "common/softcap.cuh"           // tanh_and_slope
#include "sm80/mma_backward_config.cuh" // BackwardArgs, seen_by, segments_in
#include "sm80/scores.cuh"              // Scores

namespace fa {

/* Calls body(r, j, e, own, other) for each of a lane's elements, with the distance of its rows from those of the first.
 */
template <int kRowTiles, int kStep, class Body> __device__ __forceinline__ void each_pair(Body &&body) {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
        for (int e = 0; e < 4; ++e)
#pragma unroll
            for (int j = 0; j < kStep / 8; ++j) body(r, j, e, 16 * r + e / 2 * 8, 8 * j + e % 2);
}

/* -inf in place of what is added to the scores of pairs of two ids. */
template <bool kQueries, int kRowTiles, int kStep, class Entry>
__device__ __forceinline__ void hide_others(const BackwardArgs &args, const Entry &entry, const PairPlace &place,
                                            Scores<kRowTiles, kStep> &bias) {
    const Segments segments = segments_in<Entry>(args);
    const auto id_of = [&](bool query, int row) {
        if (query) return row < entry.seq_q(args) ? segments.of_query(place.batch, row) : 0;
        return is_key(args, entry, row) ? segments.of_key(place.batch, row) : 0;
    };
    int32_t own[kRowTiles][2], other[kStep / 8][2];
#pragma unroll
    for (int n = 0; n < 2 * kRowTiles; ++n) own[n / 2][n % 2] = id_of(kQueries, place.own + 8 * n);
#pragma unroll
    for (int n = 0; n < kStep / 4; ++n) other[n / 2][n % 2] = id_of(!kQueries, place.other + n / 2 * 8 + n % 2);
    each_pair<kRowTiles, kStep>([&](int r, int j, int e, int, int) {
        if (own[r][e / 2] != other[j][e % 2]) bias[r][j][e] = -INFINITY;
    });
}

/* -inf in place of what is added to the scores of pairs that intervals leave out, a query after the other. */
template <bool kQueries, int kRowTiles, int kStep, class Entry>
__device__ __forceinline__ void hide_unheld(const BackwardArgs &args, const Entry &entry, const PairPlace &place,
                                            Scores<kRowTiles, kStep> &bias) {
    constexpr int kCount = kQueries ? 2 * kRowTiles : kStep / 4; // queries of a lane
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
        const int apart = kQueries ? 8 * n : n / 2 * 8 + n % 2;
        const int query = (kQueries ? place.own : place.other) + apart;
        if (query >= entry.seq_q(args)) continue;
        const Held held = args.intervals.of_query(place.batch, place.head, query);
        each_pair<kRowTiles, kStep>([&](int r, int j, int e, int own, int other) {
            if ((kQueries ? own : other) != apart) return;
            const int key = kQueries ? place.other + other : place.own + own;
            if (!held.holds(key)) bias[r][j][e] = -INFINITY;
        });
    }
}

/* The amount added to each score without ALiBi: the bias, or -inf where the pair is excluded. */
template <bool kQueries, int kRowTiles, int kStep, class Entry>
__device__ __forceinline__ void load_bias(const BackwardArgs &args, const Entry &entry, const PairPlace &place,
                                          Scores<kRowTiles, kStep> &bias) {
    const AttentionParams &f = args.problem.forward;
    const int seq_q = entry.seq_q(args);
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const Span<int> span = seen_in<kQueries>(args, entry, place.own + 16 * r + 8 * i, seq_q);
            const int begin = span.begin - place.other, end = span.end - place.other;
#pragma unroll
            for (int j = 0; j < kStep / 8; ++j)
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    bias[r][j][2 * i + e] = 8 * j + e >= begin && 8 * j + e < end ? 0.0f : -INFINITY;
        }
    if (Entry::kSequence && segments_in<Entry>(args).q)
        hide_others<kQueries, kRowTiles, kStep>(args, entry, place, bias);
    const auto visit = [&](const auto *data, const fa_operand &x, bool pairs, auto &&body) {
        using Element = std::remove_cvref_t<decltype(*data)>;
        const int64_t own_step = x.stride[kQueries ? 2 : 3], other_step = x.stride[kQueries ? 3 : 2];
        data += place.batch * x.stride[0] + place.head * x.stride[1] + place.own * own_step + place.other * other_step;
        if (kQueries && pairs) { // a lane's neighbouring keys in one load
#pragma unroll
            for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
                for (int i = 0; i < 2; ++i)
#pragma unroll
                    for (int j = 0; j < kStep / 8; ++j) {
                        float &low = bias[r][j][2 * i], &high = bias[r][j][2 * i + 1];
                        if (low == -INFINITY && high == -INFINITY) continue;
                        const auto both =
                            *reinterpret_cast<const Chunk<Element, 2> *>(data + (16 * r + 8 * i) * own_step + 8 * j);
                        if (low != -INFINITY) low = body(both.element[0]);
                        if (high != -INFINITY) high = body(both.element[1]);
                    }
        } else {
            each_pair<kRowTiles, kStep>([&](int r, int j, int e, int own, int other) {
                float &to = bias[r][j][e];
                if (to != -INFINITY) to = body(data[own * own_step + other * other_step]);
            });
        }
    };
    if (f.mask.data)
        visit(static_cast<const uint8_t *>(f.mask.data), f.mask, args.pairs_mask,
              [](uint8_t x) { return x ? 0.0f : -INFINITY; });
    if (!f.bias.data) return;
    const auto value = [](auto x) { return bounded(to_float(x)); };
    if (f.bias_dtype == FA_F32)
        visit(static_cast<const float *>(f.bias.data), f.bias, args.pairs_bias, value);
    else if (f.bias_dtype == FA_F16)
        visit(static_cast<const __half *>(f.bias.data), f.bias, args.pairs_bias, value);
    else
        visit(static_cast<const __nv_bfloat16 *>(f.bias.data), f.bias, args.pairs_bias, value);
}

/* The same with what kExtended has beside: intervals, and ALiBi, which leaves -inf as it is. */
template <bool kQueries, int kRowTiles, int kStep, class Entry>
__device__ __forceinline__ void extend_bias(const BackwardArgs &args, const Entry &entry, const PairPlace &place,
                                            Scores<kRowTiles, kStep> &bias) {
    if (has_intervals<Entry>(args)) hide_unheld<kQueries, kRowTiles, kStep>(args, entry, place, bias);
    const float slope = slope_of(args.alibi, place.batch, place.head);
    if (slope == 0) return;
    const int diagonal = entry.visible(args).diagonal;
    const int first =
        kQueries ? place.other - place.own - diagonal : place.own - place.other - diagonal; // key - position
    each_pair<kRowTiles, kStep>([&](int r, int j, int e, int own, int other) {
        float &to = bias[r][j][e];
        const float distance = static_cast<float>(first + (kQueries ? other - own : own - other));
        if (to != -INFINITY) to = with_alibi(to, slope, distance);
    });
}

/* Puts what args.rows has of a query, (+inf, 0) beyond the last, where weigh() reads it. */
__device__ __forceinline__ void store_row(uint32_t to, const float2 *rows, int query, int seq_q) {
    const float2 row = query < seq_q ? rows[query] : make_float2(INFINITY, 0.0f);
    store_shared(to, __float_as_uint(row.x)), store_shared(to + 4, __float_as_uint(row.y));
}

/* Turns a step's products into weights: P in `s`, and in `g` dS, multiplied by the slope of the softcap unless kDs.
 *
 * Exponents are in base e up to the difference from the LSE, so that large scores are rounded once. kSelect: pairs may
 * be excluded, by `bias` if kGeneral, else by the band. `rows`: where in shared memory LSE and delta of this lane's
 * first query are; the others follow, 8 bytes each. kExtended: with ALiBi, which `bias` has, and dropout, which leaves
 * the elements of `kept` (kept_pairs). */
template <bool kQueries, bool kGeneral, bool kSelect, bool kNeedsDs, bool kDs, bool kExtended, int kRowTiles, int kStep,
          class Entry>
__device__ __forceinline__ void weigh(const BackwardArgs &args, const Entry &entry, const PairPlace &place,
                                      Scores<kRowTiles, kStep> &s, Scores<kRowTiles, kStep> &g,
                                      const Scores<kRowTiles, kStep> *bias, uint32_t rows, uint32_t kept) {
    static_assert(!kExtended || (kGeneral && kRowTiles == 1));
    float2 mine[kRowTiles][2];
    if constexpr (kQueries) {
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
            for (int i = 0; i < 2; ++i) mine[r][i] = load_shared_pair(rows + (16 * r + 8 * i) * 8);
    }
    int begin[kRowTiles][2], end[kRowTiles][2];
    if constexpr (kSelect && !kGeneral) {
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const Span<int> span = seen_in<kQueries>(args, entry, place.own + 16 * r + 8 * i, entry.seq_q(args));
                begin[r][i] = span.begin - place.other, end[r][i] = span.end - place.other;
            }
    }
#pragma unroll
    for (int j = 0; j < kStep / 8; ++j) {
        float2 column[2] = {};
        if constexpr (!kQueries) {
            const uint4 x = load_shared_16(rows + j * 64);
            column[0] = make_float2(__uint_as_float(x.x), __uint_as_float(x.y));
            column[1] = make_float2(__uint_as_float(x.z), __uint_as_float(x.w));
        }
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float2 query = kQueries ? mine[r][e / 2] : column[e % 2];
                float exponent, slope = 1.0f;
                if constexpr (kGeneral) {
                    const float extra = (*bias)[r][j][e];
                    if (args.softcap > 0) {
                        const Capped capped = tanh_and_slope(s[r][j][e] * args.score.scale_cap);
                        exponent = fmaf(args.softcap, capped.value, extra) - query.x;
                        slope = capped.slope;
                    } else if (args.problem.forward.bias.data || (kExtended && args.alibi.data)) {
                        exponent = fmaf(s[r][j][e], args.scale, extra) - query.x;
                    } else {
                        exponent = fmaf(s[r][j][e], args.scale, -query.x);
                    }
                    if (extra == -INFINITY) exponent = -INFINITY;
                } else {
                    exponent = fmaf(s[r][j][e], args.scale, -query.x);
                    if (kSelect && (8 * j + e % 2 < begin[r][e / 2] || 8 * j + e % 2 >= end[r][e / 2]))
                        exponent = -INFINITY;
                }
                const float weight = exp2_fast(exponent * kLog2E);
                const float factor = !kExtended ? 1.0f : kept >> (4 * j + e) & 1 ? args.kept : 0.0f;
                s[r][j][e] = kExtended ? factor * weight : weight;
                if constexpr (kNeedsDs) {
                    float ds = weight * (kExtended ? fmaf(factor, g[r][j][e], -query.y) : g[r][j][e] - query.y);
                    if (kSelect && exponent == -INFINITY) ds = 0.0f;
                    if (kGeneral && !kDs) ds *= slope;
                    g[r][j][e] = ds;
                }
            }
    }
}

} // namespace fa
