/* The kernels of simt_backward, on tiles of pairs (simt/backward_tile.cuh).
 *
 * A thread block owns `block` queries of a head, or keys of a kv head, and walks over the tiles of the other side that
 * see them:
 *
 *     queries own:  S, dP -> dT to shared memory -> dQ += dT K
 *     keys own:     S, dP -> dT to shared memory -> dK += dT Q;  P to shared memory -> dV += P dout
 *                   (all of the group)
 *     dbias:        S, dP -> dS, added up in registers over what the bias is broadcast along
 *
 * Which weights dropout keeps is worked out anew in each, from the place of the pair (philox.h). Every sum has one
 * owner and one order. */
#pragma once

#include "common/chaos.cuh"       // FA_CHAOS_BEGIN
#include "common/convert.cuh"     // to_float, load_as_float
#include "common/mask.cuh"        // row_keys, tile_keys, tile_queries
#include "common/params.cuh"      // GradientParams, write_gradient
#include "common/rows.cuh"        // row_of, row_offset
#include "common/score.cuh"       // bounded, lse_of_weights, sink_weight
#include "simt/backward_tile.cuh" // Tile, Work, Shared, Pairs, Sums

namespace simt_backward {

/* ---- rows ---- */

/* The keys that a query's intervals hold; all without intervals. */
struct HeldKeys {
    bool some;
    fa::Held held;

    __device__ __forceinline__ HeldKeys(const fa::Intervals &intervals, int64_t b, int64_t h, int64_t i)
        : some(intervals.begins), held() {
        if (some) held = intervals.of_query(b, h, i);
    }
    __device__ __forceinline__ fa::KeyRange within(const fa::KeyRange &keys) const {
        return some ? held.within(keys) : keys;
    }
    __device__ __forceinline__ bool operator()(int64_t key) const { return !some || held.holds(key); }
};

/* Of a query that sees the keys [begin, end) but for bias and mask, and for those that are not `among`. */
template <class... Among>
__device__ inline bool sees_nothing(const fa::AttentionParams &f, const fa::KeyRange &keys, int64_t b, int64_t h,
                                    int64_t i, const Among &...among) {
    float bias;
    for (int64_t j = keys.begin; j < keys.end; ++j)
        if ((among(j) && ...) && shown(f, b, h, i, j, &bias)) return false;
    return true;
}

__device__ __forceinline__ float lse_of(const fa_operand &x, int64_t b, int64_t h, int64_t i) {
    return *fa::row_of<const float>(x, b, h, i);
}

/* dout . out - dlse, of a query that sees a key. The products are added up in the order of dout . v in pair_weights(),
 * so that a single key, whose v is out, gives a difference of exactly 0. */
template <typename T> __device__ float delta_of(const fa::GradientParams &p, int64_t b, int64_t h, int64_t i) {
    const fa::AttentionParams &f = p.forward;
    float sum = 0.0f;
    if (p.dout.data) {
        const T *dout = fa::row_of<const T>(p.dout, b, h, i);
        const int64_t out = fa::row_offset(f.out, b, h, i);
        for (int first = 0; first < f.head_dim_v; first += kChunk) {
            float chunk = 0.0f;
            for (int d = first; d < first + kChunk && d < f.head_dim_v; ++d)
                chunk = fmaf(fa::to_float(dout[d * p.dout.stride[3]]),
                             fa::load_as_float(f.out.data, f.out_dtype, out + d * f.out.stride[3]), chunk);
            sum += chunk;
        }
    }
    return p.dlse.data ? sum - lse_of(p.dlse, b, h, i) : sum;
}

/* A query's element of work.rows. */
template <typename T, class... Among>
__device__ __forceinline__ float2 row_values(const fa::GradientParams &p, const fa::KeyRange &keys, int64_t b,
                                             int64_t h, int64_t i, const Among &...among) {
    float2 row = make_float2(INFINITY, 0.0f);
    if (!sees_nothing(p.forward, keys, b, h, i, among...)) {
        row = make_float2(fa::lse_of_weights(lse_of(p.lse, b, h, i)), delta_of<T>(p, b, h, i));
        if (row.x == -INFINITY) row.x = INFINITY; // a weight of 0, not of infinity
    }
    return row;
}

/* Fills work.rows, a query a thread. */
template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    rows_kernel(const __grid_constant__ fa::GradientParams p, const __grid_constant__ Work work) {
    FA_CHAOS_BEGIN();
    const fa::AttentionParams &f = p.forward;
    const int64_t count = work.pairs * work.group * f.seq_q;
    for (int64_t n = int64_t(blockIdx.x) * kThreads + threadIdx.x; n < count; n += int64_t(gridDim.x) * kThreads) {
        const int64_t i = n % f.seq_q, head = n / f.seq_q, pair = work.first_pair + head / work.group;
        const int64_t b = pair / f.heads_kv, h = pair % f.heads_kv * work.group + head % work.group;
        const HeldKeys held(work.intervals, b, h, i);
        work.rows[n] = row_values<T>(p, held.within(fa::row_keys(f, i)), b, h, i, held);
    }
}

/* ---- results ---- */

/* Rows [first, first + block) below `end` of a gradient; 0 where `zero(row)`, whatever the sums are. */
template <Tile t, class Zero>
__device__ __forceinline__ void write_rows(const fa::GradientParams &p, fa_grad grad, int64_t b, int64_t h,
                                           int64_t first, int64_t end, int length, float factor, const Sums<t> &sums,
                                           Zero zero) {
    const int ty = threadIdx.x / kSide, tx = threadIdx.x % kSide;
    const fa_operand &x = p.grad[grad];
#pragma unroll
    for (int i = 0; i < Sums<t>::R; ++i) {
        const int row = ty + kSide * i;
        if (first + row >= end) continue;
        const bool nothing = zero(row);
        const int64_t base = fa::row_offset(x, b, h, first + row);
#pragma unroll
        for (int c = 0; c < Sums<t>::C; ++c) {
            const float4 s = sums.sum[i][c];
            const float value[4] = {s.x, s.y, s.z, s.w};
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                const int d = 4 * tx + 4 * kSide * c + n;
                if (d < length) fa::write_gradient(p, grad, base + d * x.stride[3], nothing ? 0.0f : factor * value[n]);
            }
        }
    }
}

/* ---- dq: queries own ---- */

/* dq of queries [first, end), up to a block of them, of a head whose rows of work.rows begin at `rows`; 0 from `end` on
 * up to `room`. */
template <typename T, Tile t, class Sight>
__device__ __forceinline__ void own_queries(const fa::GradientParams &p, const Work &work, const Shared<t> &shared,
                                            const Sight &sight, int64_t b, int64_t h, int64_t h_kv, int64_t first,
                                            int64_t end, int64_t room, const float2 *rows) {
    const fa::AttentionParams &f = p.forward;
    __syncthreads();
    shared.template load_queries<T>(p, sight, b, h, first, end, rows);
    Sums<t> dq;
    const fa::KeyRange keys = sight.place(f, first, end);
    for (int64_t key0 = keys.begin; key0 < keys.end; key0 += t.block) {
        __syncthreads();
        shared.template load_keys<T>(p, b, h_kv, key0, sight.unseen(key0));
        __syncthreads();
        Pairs<t> pairs;
        pair_weights<t, false, false>(p, work, shared, sight, b, h, first, key0, pairs);
        dq.add(shared.weights, pairs.second, shared.keys);
    }
    __syncthreads();
    write_rows<t>(p, FA_GRAD_Q, b, h, first, room, f.head_dim, work.scale, dq,
                  [&](int row) { return shared.lse[row] == INFINITY; });
}

template <typename T, class C>
__global__ void __launch_bounds__(kThreads, 1)
    queries_kernel(const __grid_constant__ fa::GradientParams p, const __grid_constant__ Work work) {
    FA_CHAOS_BEGIN();
    constexpr Tile t = C::tile;
    extern __shared__ float4 memory[];
    const Shared<t> shared(reinterpret_cast<float *>(memory), work);
    const fa::AttentionParams &f = p.forward;
    const int64_t tiles = (f.seq_q + t.block - 1) / t.block;
    for (int64_t n = blockIdx.x; n < work.pairs * work.group * tiles; n += gridDim.x) {
        const int64_t head = n / tiles, pair = work.first_pair + head / work.group, first = n % tiles * t.block;
        const int64_t b = pair / f.heads_kv, h_kv = pair % f.heads_kv, h = h_kv * work.group + head % work.group;
        const int64_t end = first + t.block < f.seq_q ? first + t.block : f.seq_q;
        own_queries<T, t>(p, work, shared, BandSight{work.intervals, b, h}, b, h, h_kv, first, end, end,
                          work.rows + head * f.seq_q);
    }
}

/* ---- dk, dv: keys own ---- */

/* dk and dv of keys [first, room), up to a block of them, of a kv head; the rows of work.rows of its first query head
 * begin at `rows`, those of the next `stride` further. */
template <typename T, Tile t, class Sight>
__device__ __forceinline__ void own_keys(const fa::GradientParams &p, const Work &work, const Shared<t> &shared,
                                         const Sight &sight, int64_t b, int64_t h_kv, int64_t first, int64_t room,
                                         const float2 *rows, int64_t stride) {
    const fa::AttentionParams &f = p.forward;
    const bool wants_k = p.wants >> FA_GRAD_K & 1, wants_v = p.wants >> FA_GRAD_V & 1;
    const fa::KeyRange seen = {first > f.key_begin ? first : f.key_begin,
                               first + t.block < f.key_end ? first + t.block : f.key_end};
    const fa::KeyRange queries = sight.queries(f, seen);
    __syncthreads();
    shared.template load_keys<T>(p, b, h_kv, first);
    Sums<t> dk, dv;
    for (int64_t g = 0; g < work.group; ++g)
        for (int64_t query0 = queries.begin; query0 < queries.end; query0 += t.block) {
            __syncthreads();
            if (!sight.meets(f, query0, queries.end, seen)) continue;
            shared.template load_queries<T>(p, sight, b, h_kv * work.group + g, query0, queries.end, rows + g * stride);
            __syncthreads();
            Pairs<t> pairs;
            const int64_t h = h_kv * work.group + g;
            pair_weights<t, true, false>(p, work, shared, sight.of_head(h), b, h, query0, first, pairs);
            if (wants_k) dk.add(shared.weights, pairs.second, shared.queries);
            if (wants_k && wants_v) __syncthreads();
            if (wants_v) dv.add(shared.weights, pairs.first, shared.douts);
        }
    const auto hidden = [&](int row) { return first + row < f.key_begin || first + row >= f.key_end; };
    if (wants_k) write_rows<t>(p, FA_GRAD_K, b, h_kv, first, room, f.head_dim, work.scale, dk, hidden);
    if (wants_v) write_rows<t>(p, FA_GRAD_V, b, h_kv, first, room, f.head_dim_v, 1.0f, dv, hidden);
}

template <typename T, class C>
__global__ void __launch_bounds__(kThreads, 1)
    keys_kernel(const __grid_constant__ fa::GradientParams p, const __grid_constant__ Work work) {
    FA_CHAOS_BEGIN();
    constexpr Tile t = C::tile;
    extern __shared__ float4 memory[];
    const Shared<t> shared(reinterpret_cast<float *>(memory), work);
    const fa::AttentionParams &f = p.forward;
    const int64_t tiles = (f.seq_k + t.block - 1) / t.block;
    for (int64_t n = blockIdx.x; n < work.pairs * tiles; n += gridDim.x) {
        const int64_t local = n / tiles, pair = work.first_pair + local, first = n % tiles * t.block;
        const int64_t b = pair / f.heads_kv, h_kv = pair % f.heads_kv;
        own_keys<T, t>(p, work, shared, BandSight{work.intervals, b, 0}, b, h_kv, first, f.seq_k,
                       work.rows + local * work.group * f.seq_q, f.seq_q);
    }
}

/* ---- dbias: its own elements own ---- */

/* Indices that an element of dbias adds up along an axis, in steps of `step`: all, or its own. */
struct Span {
    int64_t begin, end;
};
__device__ __forceinline__ Span span_of(const fa::GradientParams &p, int axis, int64_t own, int64_t step,
                                        int64_t extent) {
    if (p.bias_sums >> axis & 1) return {0, extent};
    return {own, own + step < extent ? own + step : extent};
}

/* Writes the tile `sums` of dbias at (b, h, query0, key0) of its own extents, first added up along its summed axes. */
template <Tile t>
__device__ __forceinline__ void write_bias(const fa::GradientParams &p, float *weights,
                                           const float (&sums)[Pairs<t>::R][Pairs<t>::R], int64_t b, int64_t h,
                                           int64_t query0, int64_t key0) {
    const int ty = threadIdx.x / kSide, tx = threadIdx.x % kSide;
    const bool sum_rows = p.bias_sums >> 2 & 1, sum_keys = p.bias_sums >> 3 & 1;
    const fa_operand &x = p.grad[FA_GRAD_BIAS];
#pragma unroll
    for (int i = 0; i < Pairs<t>::R; ++i)
#pragma unroll
        for (int j = 0; j < Pairs<t>::R; ++j)
            weights[(ty + kSide * i) * t.weight_floats() + tx + kSide * j] = sums[i][j];
    __syncthreads();
    const int n = threadIdx.x;
    if (sum_keys && n < t.block)
        for (int j = 1; j < t.block; ++j) weights[n * t.weight_floats()] += weights[n * t.weight_floats() + j];
    __syncthreads();
    if (sum_rows && n < (sum_keys ? 1 : t.block))
        for (int i = 1; i < t.block; ++i) weights[n] += weights[i * t.weight_floats() + n];
    __syncthreads();
    const int rows = sum_rows ? 1 : t.block, keys = sum_keys ? 1 : t.block;
    const int64_t row_end = sum_rows ? 1 : p.forward.seq_q, key_end = sum_keys ? 1 : p.forward.seq_k;
    for (int m = n; m < rows * keys; m += kThreads) {
        const int row = m / keys, key = m % keys;
        if (query0 + row < row_end && key0 + key < key_end)
            fa::write_gradient(p, FA_GRAD_BIAS, fa::row_offset(x, b, h, query0 + row) + (key0 + key) * x.stride[3],
                               weights[row * t.weight_floats() + key]);
    }
}

/* Adds dS of the pairs of queries and keys from query0 and key0 on, of a head whose rows of work.rows begin at `rows`.
 */
template <typename T, Tile t, class Sight>
__device__ __forceinline__ void add_bias(const fa::GradientParams &p, const Work &work, const Shared<t> &shared,
                                         const Sight &sight, int64_t b, int64_t h, int64_t query0, int64_t key0,
                                         const float2 *rows, float (&sums)[Pairs<t>::R][Pairs<t>::R]) {
    constexpr int R = Pairs<t>::R;
    const fa::AttentionParams &f = p.forward;
    const int64_t end = query0 + t.block < f.seq_q ? query0 + t.block : f.seq_q;
    const fa::KeyRange keys = sight.place(f, query0, end);
    if (keys.begin >= key0 + t.block || keys.end <= key0) return;
    __syncthreads();
    shared.template load_queries<T>(p, sight, b, h, query0, end, rows);
    shared.template load_keys<T>(p, b, h / work.group, key0);
    __syncthreads();
    Pairs<t> pairs;
    pair_weights<t, false, true>(p, work, shared, sight, b, h, query0, key0, pairs);
#pragma unroll
    for (int i = 0; i < R; ++i)
#pragma unroll
        for (int j = 0; j < R; ++j) sums[i][j] += pairs.second[i][j];
}

/* Writes dbias, whose elements of a batch entry `add(b, heads, rows, keys, sums)` adds up in a tile. */
template <Tile t, class Add>
__device__ __forceinline__ void own_biases(const fa::GradientParams &p, const Shared<t> &shared, Add add) {
    constexpr int R = Pairs<t>::R;
    const fa::AttentionParams &f = p.forward;
    const auto tiles_of = [&](int axis, int64_t extent, int64_t step) {
        return p.bias_sums >> axis & 1 ? int64_t(1) : (extent + step - 1) / step;
    };
    const int64_t batches = tiles_of(0, f.batch, 1), heads = tiles_of(1, f.heads, 1);
    const int64_t row_tiles = tiles_of(2, f.seq_q, t.block), key_tiles = tiles_of(3, f.seq_k, t.block);
    for (int64_t n = blockIdx.x; n < batches * heads * row_tiles * key_tiles; n += gridDim.x) {
        const int64_t own_key = n % key_tiles * t.block, own_row = n / key_tiles % row_tiles * t.block;
        const int64_t own_head = n / key_tiles / row_tiles % heads, own_batch = n / key_tiles / row_tiles / heads;
        const Span of_batch = span_of(p, 0, own_batch, 1, f.batch), of_head = span_of(p, 1, own_head, 1, f.heads);
        const Span of_row = span_of(p, 2, own_row, t.block, f.seq_q), of_key = span_of(p, 3, own_key, t.block, f.seq_k);
        float sums[R][R] = {};
        for (int64_t b = of_batch.begin; b < of_batch.end; ++b) add(b, of_head, of_row, of_key, sums);
        __syncthreads();
        write_bias<t>(p, shared.weights, sums, own_batch, own_head, own_row, own_key);
    }
}

template <typename T, class C>
__global__ void __launch_bounds__(kThreads, 1)
    bias_kernel(const __grid_constant__ fa::GradientParams p, const __grid_constant__ Work work) {
    FA_CHAOS_BEGIN();
    constexpr Tile t = C::tile;
    extern __shared__ float4 memory[];
    const Shared<t> shared(reinterpret_cast<float *>(memory), work);
    const fa::AttentionParams &f = p.forward;
    own_biases<t>(p, shared, [&](int64_t b, const Span &heads, const Span &rows, const Span &keys, auto &sums) {
        for (int64_t h = heads.begin; h < heads.end; ++h)
            for (int64_t query0 = rows.begin; query0 < rows.end; query0 += t.block)
                for (int64_t key0 = keys.begin; key0 < keys.end; key0 += t.block)
                    add_bias<T, t>(p, work, shared, BandSight{work.intervals, b, h}, b, h, query0, key0,
                                   work.rows + (b * f.heads + h) * f.seq_q, sums);
    });
}

/* ---- dsinks: a head a thread block ---- */

__device__ __forceinline__ float sink_of(const fa::AttentionParams &f, int64_t h) {
    return fa::bounded(fa::load_as_float(f.sinks.data, f.sinks_dtype, h * f.sinks.stride[0]));
}

/* Writes dsinks of a head, the sum of what the threads have. By the block. */
__device__ __forceinline__ void write_sink(const fa::GradientParams &p, int64_t h, double sum, double *parts) {
    __syncthreads();
    parts[threadIdx.x] = sum;
    for (int half = kThreads / 2; half; half /= 2) {
        __syncthreads();
        if (int(threadIdx.x) < half) parts[threadIdx.x] += parts[threadIdx.x + half];
    }
    if (threadIdx.x == 0)
        fa::write_gradient(p, FA_GRAD_SINKS, h * p.grad[FA_GRAD_SINKS].stride[0], static_cast<float>(parts[0]));
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    sinks_kernel(const __grid_constant__ fa::GradientParams p, const __grid_constant__ fa::Intervals intervals) {
    FA_CHAOS_BEGIN();
    __shared__ double parts[kThreads];
    const fa::AttentionParams &f = p.forward;
    for (int64_t h = blockIdx.x; h < f.heads; h += gridDim.x) {
        const float sink = sink_of(f, h);
        double sum = 0;
        for (int64_t n = threadIdx.x; n < f.batch * f.seq_q && sink != -INFINITY; n += kThreads) {
            const int64_t b = n / f.seq_q, i = n % f.seq_q;
            const HeldKeys held(intervals, b, h, i);
            if (sees_nothing(f, held.within(fa::row_keys(f, i)), b, h, i, held)) // the sink has all the weight
                sum += p.dlse.data ? lse_of(p.dlse, b, h, i) : 0.0f;
            else
                sum -= fa::sink_weight(sink, lse_of(p.lse, b, h, i)) * delta_of<T>(p, b, h, i);
        }
        write_sink(p, h, sum, parts);
    }
}

} // namespace simt_backward
