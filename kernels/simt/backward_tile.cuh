/* Shared by the kernels of simt_backward: a tile of pairs of queries and keys in shared memory, its scores and
 * weights, and products with them.
 *
 * The threads form a grid of kSide x kSide; a thread holds the pairs (ty + 16 i, tx + 16 j) of owner and streamed rows,
 * and the columns 4 tx + 64 c + {0..3} of the owner's gradients. Rows are padded by 16 bytes: 16-byte loads of 8
 * neighbours then meet no bank conflict. */
#pragma once

#include "common/alibi.cuh"   // slope_of, with_alibi
#include "common/convert.cuh" // to_float
#include "common/intervals.cuh"
#include "common/mask.cuh"   // key_band, tile_keys, tile_queries
#include "common/params.cuh" // AttentionParams, GradientParams
#include "common/ptx.cuh"    // exp2_fast
#include "common/rows.cuh"   // row_of, bias_row, mask_row
#include "common/score.cuh"  // kLog2E, ScoreParams, bias_of, bounded
#include "philox.h"          // fa_dropout_keeps, fa_dropout_read

namespace simt_backward {

constexpr int kSide = 16, kThreads = kSide * kSide;

struct Tile {
    int dim;   // the largest head_dim and head_dim_v, a multiple of 64
    int block; // queries and keys, a multiple of kSide

    constexpr int row_floats() const { return dim + 4; }
    constexpr int weight_floats() const { return block + 4; }
    constexpr int side_floats() const { return block * row_floats(); } // one of the four operands
    constexpr size_t smem_bytes() const {
        return sizeof(float) * (4 * side_floats() + block * weight_floats() + 2 * block) + sizeof(fa_dropout);
    }
};

/* Computed on the host, and the options of scores. A pair is a batch entry's kv head. */
struct Work {
    fa::ScoreParams score;
    float scale, softcap; // softcap 0: none
    float2 *rows;         // (pairs, group, seq_q): LSE, +inf where the query sees no key, and delta
    int64_t first_pair, pairs, group;
    fa_operand alibi;
    fa_dropout dropout;
    float kept;              // what dropout multiplies a weight by that it keeps; 1 without dropout
    fa::Intervals intervals; // of a dense call
};

/* Whether mask and bias leave a pair; *bias is what they add. */
__device__ __forceinline__ bool shown(const fa::AttentionParams &f, int64_t b, int64_t h, int64_t i, int64_t j,
                                      float *bias) {
    *bias = 0.0f;
    if (f.mask.data && !fa::mask_row(f, b, h, i)[j * f.mask.stride[3]]) return false;
    if (!f.bias.data) return true;
    *bias = fa::bounded(fa::bias_of(f, fa::bias_row(f, b, h, i), j));
    return *bias != -INFINITY;
}

/* How the queries of a dense call see its keys: by its diagonal, and by the intervals of a head. A tile's queries are
 * placed before they are used. */
struct BandSight {
    const fa::Intervals &intervals;
    int64_t batch, head;

    /* Whether without bias and mask, too, a placed query may see no key. */
    __device__ __forceinline__ bool empties() const { return intervals.begins; }
    /* The same for another head. */
    __device__ __forceinline__ BandSight of_head(int64_t other) const { return {intervals, batch, other}; }

    /* Places queries [first, end), of which there are some. Returns what keys they see. By the block. */
    __device__ __forceinline__ fa::KeyRange place(const fa::AttentionParams &f, int64_t first, int64_t end) const {
        return fa::tile_keys(f, first, end);
    }
    /* Places queries of those from tile_queries(), up to a block of them. Whether they see any of the keys. */
    __device__ __forceinline__ bool meets(const fa::AttentionParams &, int64_t, int64_t, const fa::KeyRange &) const {
        return true;
    }
    /* Queries that may see some of the keys. */
    __device__ __forceinline__ fa::KeyRange queries(const fa::AttentionParams &f, const fa::KeyRange &keys) const {
        return fa::tile_queries(f, keys);
    }
    /* Keys from key0 on that none of the queries sees, though they lie between those that some see: see load_tile(). */
    __device__ __forceinline__ const float2 *unseen(int64_t) const { return nullptr; }
    /* Says which pairs of placed queries, from query0, and keys, from key0, see each other. */
    struct Band {
        fa::KeyBand band;
        const BandSight &sight;
        int64_t query0, key0;

        __device__ __forceinline__ bool sees(int query, int key) const {
            if (!band.sees(query, key)) return false;
            return !sight.intervals.begins ||
                   sight.intervals.of_query(sight.batch, sight.head, query0 + query).holds(key0 + key);
        }
    };
    __device__ __forceinline__ Band band(const fa::AttentionParams &f, int64_t query0, int64_t key0) const {
        return {fa::key_band(f, query0, key0), *this, query0, key0};
    }
    /* How far a key is from where the query stands. */
    __device__ __forceinline__ int64_t distance(const fa::AttentionParams &f, int64_t query0, int64_t key0, int query,
                                                int key) const {
        return key0 + key - (query0 + query + f.diagonal);
    }
};

/* Rows [first, first + block) of an operand to shared memory; 0 from `end` on and before `begin`, beyond `length`,
 * where the operand is absent and, with `rows`, where rows[].x is INFINITY, as of queries that see no key: 0 times what
 * they hold may be NaN. */
template <typename T, Tile t>
__device__ __forceinline__ void load_tile(float *smem, const fa_operand &x, int64_t b, int64_t h, int64_t first,
                                          int64_t begin, int64_t end, int length, const float2 *rows) {
    const T *base = x.data ? fa::row_of<const T>(x, b, h, first) : nullptr;
    int thread = threadIdx.x;
    if constexpr (t.block < 32)
        asm volatile("" : "+r"(thread)); // places made anew: kept, they spill the kernel of dbias
#pragma unroll 4
    for (int n = thread; n < t.block * t.dim; n += kThreads) {
        const int row = n / t.dim, d = n % t.dim;
        float value = 0.0f;
        if (base && first + row >= begin && first + row < end && d < length && !(rows && rows[row].x == INFINITY))
            value = fa::to_float(base[row * x.stride[2] + d * x.stride[3]]);
        smem[row * t.row_floats() + d] = value;
    }
}

/* The operands of a tile of pairs, in shared memory. */
template <Tile t> struct Shared {
    float *queries, *douts, *keys, *values; // block rows each
    float *weights;                         // (owner, streamed)
    float *lse, *delta;                     // of the queries
    fa_dropout *dropout;                    // as it was when the block began

    /* Reads the dropout: a barrier comes before it is used. */
    __device__ Shared(float *smem, const Work &work)
        : queries(smem), douts(queries + t.side_floats()), keys(douts + t.side_floats()),
          values(keys + t.side_floats()), weights(values + t.side_floats()), lse(weights + t.block * t.weight_floats()),
          delta(lse + t.block), dropout(reinterpret_cast<fa_dropout *>(delta + t.block)) {
        if (threadIdx.x == 0 && work.dropout.threshold) *dropout = fa_dropout_read(&work.dropout);
    }

    /* Queries [first, first + block) below `end` of a head whose rows of work.rows begin at `rows`. */
    template <typename T, class Sight>
    __device__ void load_queries(const fa::GradientParams &p, const Sight &sight, int64_t b, int64_t h, int64_t first,
                                 int64_t end, const float2 *rows) const {
        const fa::AttentionParams &f = p.forward;
        const float2 *empties = sight.empties() || f.mask.data || f.bias.data ? rows + first : nullptr;
        load_tile<T, t>(queries, f.q, b, h, first, 0, end, f.head_dim, empties);
        load_tile<T, t>(douts, p.dout, b, h, first, 0, end, f.head_dim_v, empties);
        for (int n = threadIdx.x; n < t.block; n += kThreads) {
            const float2 row = first + n < end ? rows[first + n] : make_float2(INFINITY, 0.0f);
            lse[n] = row.x, delta[n] = row.y;
        }
    }

    /* Keys [first, first + block); those that no query of the call sees are 0, as those `unseen`. */
    template <typename T>
    __device__ void load_keys(const fa::GradientParams &p, int64_t b, int64_t h_kv, int64_t first,
                              const float2 *unseen = nullptr) const {
        const fa::AttentionParams &f = p.forward;
        load_tile<T, t>(keys, f.k, b, h_kv, first, f.key_begin, f.key_end, f.head_dim, unseen);
        load_tile<T, t>(values, f.v, b, h_kv, first, f.key_begin, f.key_end, f.head_dim_v, unseen);
    }
};

/* A thread's pairs of a tile. */
template <Tile t> struct Pairs {
    static constexpr int R = t.block / kSide;
    float first[R][R] = {}, second[R][R] = {}; // products, then what weigh() makes of them
};

/* Products are added up in chunks of so many columns: one chain over all 256 would leave float32 scores near 1000 off
 * by several ulp. */
constexpr int kChunk = 16;

/* sums[i][j] = a row (ty + 16 i) . b row (tx + 16 j) over the first `length` columns, rounded up to whole chunks. */
template <Tile t>
__device__ __forceinline__ void product(const float *a, const float *b, int length,
                                        float (&sums)[Pairs<t>::R][Pairs<t>::R]) {
    constexpr int R = Pairs<t>::R;
    const int ty = threadIdx.x / kSide, tx = threadIdx.x % kSide;
#pragma unroll 1
    for (int first = 0; first < length; first += kChunk) {
        float chunk[R][R] = {};
#pragma unroll
        for (int d = first; d < first + kChunk; d += 4) {
            float4 x[R], y[R];
#pragma unroll
            for (int i = 0; i < R; ++i) {
                x[i] = *reinterpret_cast<const float4 *>(a + (ty + kSide * i) * t.row_floats() + d);
                y[i] = *reinterpret_cast<const float4 *>(b + (tx + kSide * i) * t.row_floats() + d);
            }
#pragma unroll
            for (int i = 0; i < R; ++i)
#pragma unroll
                for (int j = 0; j < R; ++j) {
                    chunk[i][j] = fmaf(x[i].x, y[j].x, chunk[i][j]);
                    chunk[i][j] = fmaf(x[i].y, y[j].y, chunk[i][j]);
                    chunk[i][j] = fmaf(x[i].z, y[j].z, chunk[i][j]);
                    chunk[i][j] = fmaf(x[i].w, y[j].w, chunk[i][j]);
                }
        }
#pragma unroll
        for (int i = 0; i < R; ++i)
#pragma unroll
            for (int j = 0; j < R; ++j) sums[i][j] += chunk[i][j];
    }
}

/* P of a pair from its product q . k, and what dS is to be multiplied by for dT. In base e up to the difference, so
 * that large scores are rounded once. `biased`: `bias` is not always 0. */
__device__ __forceinline__ float weight_of(const Work &work, float product, float bias, bool biased, float lse,
                                           float *slope) {
    float x;
    *slope = 1.0f;
    if (work.softcap > 0) {
        const float capped = tanhf(product * work.score.scale_cap);
        *slope = 1.0f - capped * capped;
        x = fmaf(work.softcap, capped, bias) - lse;
    } else if (biased) {
        x = fmaf(product, work.scale, bias) - lse;
    } else {
        x = fmaf(product, work.scale, -lse);
    }
    return fa::exp2_fast(x * fa::kLog2E);
}

/* Which of a thread's pairs dropout keeps: bit R i + j. A call of its own: in line, the kernel of dbias spills. */
template <Tile t, bool kKeysOwn>
__device__ __noinline__ uint32_t kept_pairs(const fa_dropout &dropout, int64_t b, int64_t h, int64_t query0,
                                            int64_t key0) {
    constexpr int R = Pairs<t>::R;
    static_assert(R * R <= 32);
    const int ty = threadIdx.x / kSide, tx = threadIdx.x % kSide;
    uint32_t kept = 0;
#pragma unroll 1
    for (int n = 0; n < R * R; ++n) {
        const int owner = ty + kSide * (n / R), other = tx + kSide * (n % R);
        const int query = kKeysOwn ? other : owner, key = kKeysOwn ? owner : other;
        kept |= uint32_t(fa_dropout_keeps(&dropout, b, h, query0 + query, key0 + key)) << n;
    }
    return kept;
}

/* S and dP of a tile of pairs, and of them P with dropout's factor in `first` and dT (or dS with kDs) in `second`; both
 * 0 where the query does not see the key. kKeysOwn: rows of the thread grid are keys, columns queries; else the
 * reverse. */
template <Tile t, bool kKeysOwn, bool kDs, class Sight>
__device__ __forceinline__ void pair_weights(const fa::GradientParams &p, const Work &work, const Shared<t> &shared,
                                             const Sight &sight, int64_t b, int64_t h, int64_t query0, int64_t key0,
                                             Pairs<t> &pairs) {
    const fa::AttentionParams &f = p.forward;
    const int ty = threadIdx.x / kSide, tx = threadIdx.x % kSide;
    product<t>(kKeysOwn ? shared.keys : shared.queries, kKeysOwn ? shared.queries : shared.keys, f.head_dim,
               pairs.first);
    if (!kKeysOwn || (p.wants >> FA_GRAD_K & 1)) // P alone makes dv
        product<t>(kKeysOwn ? shared.values : shared.douts, kKeysOwn ? shared.douts : shared.values, f.head_dim_v,
                   pairs.second);
    const auto band = sight.band(f, query0, key0);
    const float alibi = fa::slope_of(work.alibi, b, h);
    const bool biased = f.bias.data || alibi != 0;
    const uint32_t kept = work.dropout.threshold ? kept_pairs<t, kKeysOwn>(*shared.dropout, b, h, query0, key0) : ~0u;
#pragma unroll
    for (int i = 0; i < Pairs<t>::R; ++i)
#pragma unroll
        for (int j = 0; j < Pairs<t>::R; ++j) {
            const int owner = ty + kSide * i, other = tx + kSide * j;
            const int query = kKeysOwn ? other : owner, key = kKeysOwn ? owner : other;
            float bias, slope, weight = 0.0f, ds = 0.0f;
            if (query0 + query < f.seq_q && band.sees(query, key) &&
                shown(f, b, h, query0 + query, key0 + key, &bias)) {
                if (alibi != 0) {
                    const int64_t distance = sight.distance(f, query0, key0, query, key);
                    bias = fa::with_alibi(bias, alibi, static_cast<float>(distance));
                }
                weight = weight_of(work, pairs.first[i][j], bias, biased, shared.lse[query], &slope);
                const float factor = kept >> (Pairs<t>::R * i + j) & 1 ? work.kept : 0.0f;
                ds = weight * fmaf(factor, pairs.second[i][j], -shared.delta[query]);
                if (!kDs) ds *= slope;
                weight *= factor;
            }
            pairs.first[i][j] = weight, pairs.second[i][j] = ds;
        }
}

/* A thread's part of a gradient of the owner's rows. */
template <Tile t> struct Sums {
    static constexpr int R = t.block / kSide, C = t.dim / (4 * kSide);
    float4 sum[R][C];

    __device__ Sums() {
#pragma unroll
        for (int i = 0; i < R; ++i)
#pragma unroll
            for (int c = 0; c < C; ++c) sum[i][c] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }

    /* Adds weights (owner, streamed) times the streamed rows. The weights are this block's: barriers on both sides. */
    __device__ void add(float *weights, const float (&mine)[R][R], const float *rows) {
        const int ty = threadIdx.x / kSide, tx = threadIdx.x % kSide;
#pragma unroll
        for (int i = 0; i < R; ++i)
#pragma unroll
            for (int j = 0; j < R; ++j) weights[(ty + kSide * i) * t.weight_floats() + tx + kSide * j] = mine[i][j];
        __syncthreads();
#pragma unroll 1
        for (int n = 0; n < t.block; n += 4) {
            float4 w[R];
#pragma unroll
            for (int i = 0; i < R; ++i)
                w[i] = *reinterpret_cast<const float4 *>(weights + (ty + kSide * i) * t.weight_floats() + n);
            add_row(rows + n * t.row_floats() + 4 * tx, w, [](const float4 &x) { return x.x; });
            add_row(rows + (n + 1) * t.row_floats() + 4 * tx, w, [](const float4 &x) { return x.y; });
            add_row(rows + (n + 2) * t.row_floats() + 4 * tx, w, [](const float4 &x) { return x.z; });
            add_row(rows + (n + 3) * t.row_floats() + 4 * tx, w, [](const float4 &x) { return x.w; });
        }
    }

    template <class Part> __device__ __forceinline__ void add_row(const float *row, const float4 (&w)[R], Part part) {
#pragma unroll
        for (int c = 0; c < C; ++c) {
            const float4 x = *reinterpret_cast<const float4 *>(row + 4 * kSide * c);
#pragma unroll
            for (int i = 0; i < R; ++i) {
                float4 &s = sum[i][c];
                const float factor = part(w[i]);
                s = make_float4(fmaf(factor, x.x, s.x), fmaf(factor, x.y, s.y), fmaf(factor, x.z, s.z),
                                fmaf(factor, x.w, s.w));
            }
        }
    }
};

} // namespace simt_backward
