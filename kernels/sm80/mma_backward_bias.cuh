/* dbias on mma.sync: dS summed over the axes that the bias is broadcast along.
 *
 * A block owns a tile of pairs, or where the bias has extent 1 along queries or keys the tiles of that axis, and walks
 * over all that its elements are summed over, batch entries and heads among them, adding up in registers. Where so few
 * blocks would be left that the device is not filled, the walk is cut into parts, whose sums backward_bias_sum() adds
 * in their order. One tile of each operand, two barriers a tile: before the copies (all threads are done with the last
 * ones) and after each thread's wait for its own. */
#pragma once

#include "common/chaos.cuh"             // FA_CHAOS_BEGIN
#include "common/params.cuh"            // GradientParams, write_gradient
#include "common/ptx.cuh"               // cp_async_commit, cp_async_wait
#include "philox.h"                     // fa_dropout_read
#include "sm80/mma_backward_config.cuh" // BackwardArgs
#include "sm80/mma_backward_score.cuh"  // weigh, load_bias
#include "sm80/mma_backward_tile.cuh"   // RowCopy, WarpProduct

namespace fa {

/* kExtended: with ALiBi and dropout. */
template <typename T_, int kHeadDim_, bool kExtended_, bool kSequences_> struct BiasConfig {
    using T = T_;
    static constexpr bool kExtended = kExtended_, kSequences = kSequences_;
    static constexpr int kHeadDim = kHeadDim_, kWarps = 4, kThreads = 32 * kWarps;
    static constexpr int kQueries = 16 * kWarps, kKeys = kHeadDim <= 192 ? 64 : 32;
    static constexpr int kRowBytes = kHeadDim * 2, kSumFloats = kKeys + 4;               // of a row, in the end
    static constexpr int kDropoutAt = 2 * (kQueries + kKeys) * kRowBytes + kQueries * 8, // behind the operands
        kOperandBytes = kDropoutAt + (kExtended ? int(sizeof(fa_dropout)) : 0), kSumBytes = kQueries * kSumFloats * 4;
    static constexpr int kSharedBytes = kOperandBytes > kSumBytes ? kOperandBytes : kSumBytes;
    static_assert(kSharedBytes <= 99 * 1024, "fits a block of sm_86 and sm_89");
};

/* ---- of fa_backward or GradientParams ---- */

/* Along one axis of (B, H, Sq, Sk), in steps of one or a tile: those of the call, and whether dbias sums over them. */
struct BiasAxis {
    int64_t steps;
    bool summed;

    __host__ __device__ int64_t own() const { return summed ? 1 : steps; }    // that blocks share out
    __host__ __device__ int64_t walked() const { return summed ? steps : 1; } // that a block walks over
};

struct BiasAxes {
    BiasAxis axis[4];

    template <class Problem> __host__ __device__ BiasAxes(const Problem &p, int queries, int keys) {
        const auto &f = p.forward;
        const int64_t steps[4] = {f.batch, f.heads, (f.seq_q + queries - 1) / queries, (f.seq_k + keys - 1) / keys};
        for (int n = 0; n < 4; ++n) axis[n] = {steps[n], (p.bias_sums >> n & 1) != 0};
    }
    __host__ __device__ int64_t tasks() const { return axis[0].own() * axis[1].own() * axis[2].own() * axis[3].own(); }
    __host__ __device__ int64_t walk() const {
        return axis[0].walked() * axis[1].walked() * axis[2].walked() * axis[3].walked();
    }
};

/* Elements of dbias. */
template <class Problem> __host__ __device__ inline int64_t bias_elements(const Problem &p) {
    const auto &f = p.forward;
    const int64_t extents[4] = {f.batch, f.heads, f.seq_q, f.seq_k};
    int64_t count = 1;
    for (int n = 0; n < 4; ++n) count *= p.bias_sums >> n & 1 ? 1 : extents[n];
    return count;
}

/* Writes a tile of sums at (b, h, query, key) of dbias, first added up along its summed axes: to dbias, or as part
 * `part`. */
template <class C>
__device__ __forceinline__ void write_bias(const BackwardArgs &args, float *tile, int part, const int64_t (&at)[4]) {
    const GradientParams &p = args.problem;
    const AttentionParams &f = p.forward;
    const bool sum_rows = p.bias_sums >> 2 & 1, sum_keys = p.bias_sums >> 3 & 1;
    const int n = threadIdx.x;
    if (sum_keys && n < C::kQueries)
        for (int j = 1; j < C::kKeys; ++j) tile[n * C::kSumFloats] += tile[n * C::kSumFloats + j];
    __syncthreads();
    if (sum_rows && n < (sum_keys ? 1 : C::kKeys))
        for (int i = 1; i < C::kQueries; ++i) tile[n] += tile[i * C::kSumFloats + n];
    __syncthreads();
    const int rows = sum_rows ? 1 : C::kQueries, keys = sum_keys ? 1 : C::kKeys;
    const int64_t row_end = sum_rows ? 1 : f.seq_q, key_end = sum_keys ? 1 : f.seq_k;
    const int64_t heads = p.bias_sums >> 1 & 1 ? 1 : f.heads;
    const fa_operand &x = p.grad[FA_GRAD_BIAS];
    for (int m = n; m < rows * keys; m += C::kThreads) {
        const int64_t row = at[2] + m / keys, key = at[3] + m % keys;
        if (row >= row_end || key >= key_end) continue;
        const float value = tile[m / keys * C::kSumFloats + m % keys];
        if (args.parts > 1)
            args.bias_parts[part * bias_elements(p) + ((at[0] * heads + at[1]) * row_end + row) * key_end + key] =
                value;
        else
            write_gradient(p, FA_GRAD_BIAS,
                           at[0] * x.stride[0] + at[1] * x.stride[1] + row * x.stride[2] + key * x.stride[3], value);
    }
}

/* Batch entry b, of arrays that are not packed; and where the rows of its head h begin in args.rows. */
template <bool kSequences>
__device__ __forceinline__ BackwardEntry<kSequences> entry_of_batch(const ArgsOf<kSequences> &args, int64_t b) {
    if constexpr (kSequences)
        return {args.sequences.places[b + 1]};
    else
        return {int(b)};
}
__device__ __forceinline__ int64_t rows_of_head(const BackwardArgs &args, const BackwardEntry<false> &, int64_t b,
                                                int64_t h) {
    return (b * args.problem.forward.heads + h) * args.pitch;
}
__device__ __forceinline__ int64_t rows_of_head(const BackwardArgs &args, const BackwardEntry<true> &entry, int64_t,
                                                int64_t h) {
    return entry.rows_at(args, int(h));
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) backward_bias(const __grid_constant__ ArgsOf<C::kSequences> args) {
    FA_CHAOS_BEGIN();
    extern __shared__ __align__(128) unsigned char shared[];
    using T = typename C::T;
    using Product = WarpProduct<T, C::kHeadDim, 1, C::kKeys>;
    const GradientParams &p = args.problem;
    const AttentionParams &f = p.forward;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, of_call = int(f.seq_q);
    const uint32_t queries = shared_address(shared), douts = queries + C::kQueries * C::kRowBytes;
    const uint32_t keys = douts + C::kQueries * C::kRowBytes, values = keys + C::kKeys * C::kRowBytes;
    const uint32_t rows = values + C::kKeys * C::kRowBytes, warp_rows = warp * 16 * C::kRowBytes;

    auto &dropout = *reinterpret_cast<fa_dropout *>(shared + C::kDropoutAt); // as it was when the block began
    if constexpr (C::kExtended)
        if (threadIdx.x == 0 && args.dropout.threshold) dropout = fa_dropout_read(&args.dropout);

    const BiasAxes axes(p, C::kQueries, C::kKeys);
    const int part = blockIdx.x % args.parts;
    int64_t own[4], rest = blockIdx.x / args.parts;
    for (int n = 3; n >= 0; --n) own[n] = rest % axes.axis[n].own(), rest /= axes.axis[n].own();

    typename Product::Pairs sums;
    Product::clear(sums);
    const int64_t walk = axes.walk(), walk_end = walk * (part + 1) / args.parts;
    for (int64_t at = walk * part / args.parts; at < walk_end; ++at) {
        int64_t step[4], left = at;
        for (int n = 3; n >= 0; --n) step[n] = own[n] + left % axes.axis[n].walked(), left /= axes.axis[n].walked();
        const int64_t b = step[0], h = step[1];
        const int query = int(step[2]) * C::kQueries, key = int(step[3]) * C::kKeys;
        const auto entry = entry_of_batch<C::kSequences>(args, b);
        const int seq_q = C::kSequences ? entry.seq_q(args) : of_call;
        const Sight seen = sight_of<true>(entry.visible(args), query, C::kQueries, seq_q);
        if (!seen.some.meets(key, C::kKeys)) continue;

        __syncthreads();
        const auto is_query = [&](int row) { return row < seq_q; };
        const auto is_own_key = [&](int row) { return is_key(args, entry, row); };
        using CopyQueries = RowCopy<C::kHeadDim, C::kThreads, C::kQueries>;
        using CopyKeys = RowCopy<C::kHeadDim, C::kThreads, C::kKeys>;
        CopyQueries::start(queries, f.q, b, h, 0, query, f.head_dim, args.chunks_q, is_query);
        CopyQueries::start(douts, p.dout, b, h, 0, query, f.head_dim_v, args.chunks_dout, is_query);
        CopyKeys::start(keys, f.k, b, h / args.group, 0, key, f.head_dim, args.chunks_k, is_own_key);
        CopyKeys::start(values, f.v, b, h / args.group, 0, key, f.head_dim_v, args.chunks_v, is_own_key);
        cp_async_commit();

        const PairPlace place = {query + warp * 16 + lane / 4, key + lane % 4 * 2, b, h};
        if (threadIdx.x < C::kQueries)
            store_row(rows + threadIdx.x * 8, args.rows + rows_of_head(args, entry, b, h), query + threadIdx.x, seq_q);
        typename Product::Pairs s, g, bias;
        uint32_t kept = ~0u;
        load_bias<true, 1, C::kKeys>(args, entry, place, bias);
        if constexpr (C::kExtended) {
            extend_bias<true, 1, C::kKeys>(args, entry, place, bias);
            if (args.dropout.threshold) kept = kept_pairs<true, C::kKeys>(dropout, place);
        }
        cp_async_wait<0>();
        __syncthreads();
        const typename Product::OwnAddress a_s(queries + warp_rows, lane), a_p(douts + warp_rows, lane);
        const typename Product::ColumnAddress b_s(keys, lane), b_p(values, lane);
        Product::clear(s), Product::clear(g);
#pragma unroll
        for (int k = 0; k < C::kHeadDim / 16; ++k)
            Product::add_block(s, a_s, b_s, k), Product::add_block(g, a_p, b_p, k);
        weigh<true, true, true, true, true, C::kExtended, 1, C::kKeys>(args, entry, place, s, g, &bias,
                                                                       rows + (warp * 16 + lane / 4) * 8, kept);
        each_pair<1, C::kKeys>([&](int r, int j, int e, int, int) { sums[r][j][e] += g[r][j][e]; });
    }

    __syncthreads();
    float *tile = reinterpret_cast<float *>(shared);
    each_pair<1, C::kKeys>([&](int r, int j, int e, int row, int column) {
        tile[(warp * 16 + lane / 4 + row) * C::kSumFloats + lane % 4 * 2 + column] = sums[r][j][e];
    });
    __syncthreads();
    const int64_t first[4] = {own[0], own[1], own[2] * C::kQueries, own[3] * C::kKeys};
    write_bias<C>(args, tile, part, first);
}

/* dbias of its parts, an element a thread. */
static __global__ void __launch_bounds__(128) backward_bias_sum(const __grid_constant__ BackwardArgs args) {
    FA_CHAOS_BEGIN();
    const GradientParams &p = args.problem;
    const AttentionParams &f = p.forward;
    const int64_t extents[4] = {f.batch, f.heads, f.seq_q, f.seq_k}, count = bias_elements(p);
    const fa_operand &x = p.grad[FA_GRAD_BIAS];
    for (int64_t n = int64_t(blockIdx.x) * 128 + threadIdx.x; n < count; n += int64_t(gridDim.x) * 128) {
        float sum = 0.0f;
        for (int part = 0; part < args.parts; ++part) sum += args.bias_parts[part * count + n];
        int64_t index = 0, rest = n;
        for (int axis = 3; axis >= 0; --axis) {
            if (p.bias_sums >> axis & 1) continue;
            index += rest % extents[axis] * x.stride[axis];
            rest /= extents[axis];
        }
        write_gradient(p, FA_GRAD_BIAS, index, sum);
    }
}

} // namespace fa
