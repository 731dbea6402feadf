/* The values of each query that mma_backward_sm80 needs before it walks: LSE and delta = dout . out - dlse; and dsinks,
 * which is a sum over them. */
#pragma once

#include <math.h> // INFINITY

#include "common/chaos.cuh"             // FA_CHAOS_BEGIN
#include "common/convert.cuh"           // to_float, load_as_float, write_gradient
#include "common/rows.cuh"              // row_of, row_offset, Chunk, bias_row, mask_row
#include "common/score.cuh"             // bias_of, bounded, lse_of_weights, sink_weight
#include "sm80/mma_backward_config.cuh" // BackwardArgs

namespace fa {

constexpr int kRowsWarps = 8, kSinksThreads = 128;

/* Whether band, intervals (kHeld: there are some), segments, mask and bias leave query i no key. For a whole warp. */
template <class Entry, bool kHeld>
__device__ __forceinline__ bool sees_nothing(const BackwardArgs &args, const Band &visible, int64_t b, int64_t h,
                                             int i) {
    const AttentionParams &f = args.problem.forward;
    const Segments segments = segments_in<Entry>(args);
    int begin = begin_of(visible, i), end = end_of(visible, i);
    Span<int> gap = {0, 0}; // keys between two intervals
    if constexpr (kHeld) {
        const Held held = args.intervals.of_query(b, h, i);
        const Span<int> keys = held.within(Span<int>{begin, end});
        begin = keys.begin, end = keys.end;
        gap = held.gap();
    }
    for (int first = begin; first < end; first += 32) {
        const int j = first + threadIdx.x % 32;
        bool shown = j < end && (!kHeld || j < gap.begin || j >= gap.end);
        if (shown && segments.q) shown = segments.of_query(b, i) == segments.of_key(b, j);
        if (shown && f.mask.data) shown = mask_row(f, b, h, i)[j * f.mask.stride[3]];
        if (shown && f.bias.data) shown = bounded(bias_of(f, bias_row(f, b, h, i), j)) != -INFINITY;
        if (__any_sync(~0u, shown)) return false;
    }
    return true;
}

/* Lanes that share a query, 8 columns each. */
constexpr int row_lanes(int head_dim) { return head_dim <= 32 ? 4 : head_dim <= 64 ? 8 : head_dim <= 128 ? 16 : 32; }

/* dout . out over this lane's 8 columns, `first` and after. In one order, whatever the strides. */
template <typename T>
__device__ __forceinline__ float row_part(const BackwardArgs &args, int64_t b, int64_t h, int64_t i, int first) {
    const AttentionParams &f = args.problem.forward;
    const fa_operand &x = args.problem.dout;
    const T *dout = row_of<const T>(x, b, h, i) + first * x.stride[3];
    const int64_t out = row_offset(f.out, b, h, i) + first * f.out.stride[3];
    float sum = 0.0f;
    if (args.chunks_dout && args.chunks_out) {
        if (first >= f.head_dim_v) return sum;
        const auto y = *reinterpret_cast<const Chunk<T, 8> *>(static_cast<const T *>(f.out.data) + out);
        const auto dy = *reinterpret_cast<const Chunk<T, 8> *>(dout);
#pragma unroll
        for (int n = 0; n < 8; ++n) sum = fmaf(to_float(dy.element[n]), to_float(y.element[n]), sum);
    } else {
#pragma unroll
        for (int n = 0; n < 8; ++n)
            if (first + n < f.head_dim_v)
                sum = fmaf(to_float(dout[n * x.stride[3]]),
                           load_as_float(f.out.data, f.out_dtype, out + n * f.out.stride[3]), sum);
    }
    return sum;
}

/* The batch entry of a tile of rows, in 64 bits where it is of a dense call. */
template <bool kSequences> struct RowsEntry;

template <> struct RowsEntry<false> {
    static constexpr bool kSequence = false;
    static constexpr int first_q = 0;
    int64_t batch;

    __device__ __forceinline__ RowsEntry(const BackwardArgs &args, int64_t pair, int64_t)
        : batch(pair / args.problem.forward.heads_kv) {}
    __device__ __forceinline__ const Band &visible(const BackwardArgs &args) const { return args.visible; }
    __device__ __forceinline__ int64_t seq_q(const BackwardArgs &args) const { return args.problem.forward.seq_q; }
};

template <> struct RowsEntry<true> : BackwardEntry<true> {
    __device__ __forceinline__ RowsEntry(const SequenceArgs &args, int64_t, int64_t row)
        : BackwardEntry<true>{args.sequences.places[args.sequences.span[kTilesOfRows][row / kRowsMultiple]]} {}
};

/* Fills args.rows, `row_lanes` lanes a query. A warp's queries are of one head, and of one sequence. */
template <typename T, int kHeadDim, bool kSequences, bool kHeld = false>
__global__ void __launch_bounds__(32 * kRowsWarps) backward_rows(const __grid_constant__ ArgsOf<kSequences> args) {
    FA_CHAOS_BEGIN();
    constexpr int kLanes = row_lanes(kHeadDim), kQueries = 32 / kLanes; // of a warp
    static_assert(kRowsMultiple % kQueries == 0);
    const GradientParams &p = args.problem;
    const AttentionParams &f = p.forward;
    const int lane = threadIdx.x % 32, mine = lane / kLanes;
    const int64_t count = int64_t(args.pairs) * args.group * args.pitch;
    for (int64_t n = (int64_t(blockIdx.x) * kRowsWarps + threadIdx.x / 32) * kQueries; n < count;
         n += int64_t(gridDim.x) * kRowsWarps * kQueries) {
        const int64_t local = n / args.pitch, pair = args.first_pair + local / args.group;
        const int64_t h = pair % f.heads_kv * args.group + local % args.group;
        const RowsEntry<kSequences> entry(args, pair, n - local * args.pitch);
        const int64_t b = entry.batch;
        int first = int(n - local * args.pitch);
        if constexpr (kSequences) first -= entry.place.tile[kTilesOfRows] * kRowsMultiple;
        const int i = first + mine;
        const auto &visible = entry.visible(args);
        bool nothing = i >= (kSequences ? entry.seq_q(args) : f.seq_q) || begin_of(visible, i) >= end_of(visible, i);
        if (kHeld || f.mask.data || f.bias.data || segments_in<RowsEntry<kSequences>>(args).q)
            for (int q = 0; q < kQueries && first + q < (kSequences ? entry.seq_q(args) : f.seq_q); ++q) {
                const bool empty = sees_nothing<RowsEntry<kSequences>, kHeld>(args, visible, b, h, first + q);
                if (q == mine) nothing = empty;
            }
        const int at = entry.first_q + i; // in the operands
        float sum = !nothing && p.dout.data ? row_part<T>(args, b, h, at, lane % kLanes * 8) : 0.0f;
#pragma unroll
        for (int step = kLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
        if (lane % kLanes > 0) continue;
        float2 row = make_float2(INFINITY, 0.0f);
        if (i < (kSequences ? entry.seq_q(args) : f.seq_q)) {
            row.y = p.dlse.data ? sum - *row_of<const float>(p.dlse, b, h, at) : sum;
            if (!nothing) row.x = lse_of_weights(*row_of<const float>(p.lse, b, h, at));
            if (row.x == -INFINITY) row.x = INFINITY; // a weight of 0, not of infinity
        }
        args.rows[n + mine] = row;
    }
}

/* How many parts dsinks has: one a batch entry, or one so many rows of all sequences. */
template <bool kSequences> __host__ __device__ inline int64_t sink_parts(const BackwardArgs &args) {
    return kSequences ? (args.pitch + kSinksRows - 1) / kSinksRows : args.problem.forward.batch;
}

/* Part of dsinks of one head and batch entry, or some rows of all sequences, a block each. The sink has all the weight
 * of a query without a key; rows beyond the last add 0. */
template <typename T, bool kSequences>
__global__ void __launch_bounds__(kSinksThreads) backward_sink_parts(const __grid_constant__ BackwardArgs args) {
    FA_CHAOS_BEGIN();
    __shared__ double parts[kSinksThreads];
    const AttentionParams &f = args.problem.forward;
    const int count = kSequences ? int(sink_parts<true>(args)) : 1, local = blockIdx.x / count;
    const int pair = args.first_pair + local / args.group;
    const int64_t b = kSequences ? blockIdx.x % count : pair / f.heads_kv;
    const int64_t h = pair % f.heads_kv * args.group + local % args.group;
    const int64_t begin = kSequences ? b * kSinksRows : 0, end = min(begin + kSinksRows, args.pitch);
    const float sink = bounded(load_as_float(f.sinks.data, f.sinks_dtype, h * f.sinks.stride[0]));
    double sum = 0;
    for (int64_t i = begin + threadIdx.x; i < (kSequences ? end : f.seq_q) && sink != -INFINITY; i += kSinksThreads) {
        const float2 row = args.rows[local * args.pitch + i];
        const float weight = row.x == INFINITY ? 1.0f : sink_weight(sink, row.x);
        sum -= weight * row.y;
    }
    parts[threadIdx.x] = sum;
    for (int half = kSinksThreads / 2; half; half /= 2) {
        __syncthreads();
        if (int(threadIdx.x) < half) parts[threadIdx.x] += parts[threadIdx.x + half];
    }
    if (threadIdx.x == 0) args.sinks[b * f.heads + h] = parts[0];
}

/* dsinks of all heads, a thread each, over the parts in their order. */
template <bool kSequences>
static __global__ void __launch_bounds__(kSinksThreads) backward_sinks(const __grid_constant__ BackwardArgs args) {
    FA_CHAOS_BEGIN();
    const AttentionParams &f = args.problem.forward;
    for (int64_t h = int64_t(blockIdx.x) * kSinksThreads + threadIdx.x; h < f.heads;
         h += int64_t(gridDim.x) * kSinksThreads) {
        double sum = 0;
        for (int64_t part = 0; part < sink_parts<kSequences>(args); ++part) sum += args.sinks[part * f.heads + h];
        write_gradient(args.problem, FA_GRAD_SINKS, h * args.problem.grad[FA_GRAD_SINKS].stride[0], float(sum));
    }
}

} // namespace fa
