/* merge: results over parts of the keys -> the result over all of them.
 *
 *     m = max(lse_i, sink)    w_i = exp(lse_i - m), 0 for an empty part    W = sum w_i + exp(sink - m)
 *     out = sum w_i out_i / W    lse = m + log W
 *
 * A part whose LSE is -inf or +inf is empty, and its out is not read. In float32, in the order of the list; where one
 * part alone counts, its elements are copied. A group of lanes of one warp owns 2 to 16 rows and reads them in 16-byte
 * chunks where all operands allow it, else by elements: bound by memory. Each lane weighs the parts for one of the rows
 * and the group shares the weights by shuffles; chunks of kTogether parts of kAtOnce rows are on their way at a time.
 * Of heads and rows the axis whose elements lie closer together is the inner one, along which groups lie. The result
 * may be the first part itself, since one lane reads a row's LSEs and writes its LSE, and each lane reads an element
 * before it writes that element.
 *
 * Float16, bfloat16, float32 parts; a result of any of these; any strides, head_dim up to 256. The first parts travel
 * as arguments of the launch; where there are more, small launches before it write all of them to workspace, so that a
 * captured graph holds them.
 */
#include <algorithm>   // std::max, std::min
#include <cstdlib>     // std::abs
#include <math.h>      // INFINITY
#include <type_traits> // std::conditional_t, std::is_same_v
#include <utility>     // std::swap

#include "common/convert.cuh" // to_float, from_float, load_as_float
#include "common/launch.cuh"  // fa_own, FA_CUDA_TRY
#include "common/rows.cuh"    // Chunk, row_offset, takes_chunks
#include "fa.h"               // fa_merge

namespace fa {
namespace {

constexpr int kWarp = 32, kMaxThreads = 128;
constexpr int kFewestLanes = 8; // of a group
constexpr int kBusyWarps = 16;  // of a multiprocessor
constexpr int kMostRows = 16;   // of a group, which has no more than lanes
constexpr int kAtOnce = 2;      // of them that are read at a time
constexpr int kTogether = 2;    // parts that are read at a time
constexpr int kArguments = 32;  // a multiple of kTogether: parts that are arguments of a launch
constexpr int kBlocks = 8;      // of a multiprocessor
constexpr int64_t kMaxGrid = 65535;

struct Parts {
    fa_part part[kArguments];
};

/* The arguments of the kernel beside the parts. Axes of operands, here and of the parts: batch, outer, inner, head_dim.
 */
struct Args {
    fa_operand out, lse, sinks; // sinks: stride[1], stride[2]
    int64_t batch, outer, inner;
    int outer_step, inner_step; // from one of a group's rows to the next
    int outer_tile, inner_tile; // rows of a block
    int count, head_dim;
    int lanes, lanes_log2; // of a group: a power of 2 from kFewestLanes to kWarp
    int rows;              // of a group
    int steps;             // of a row: one chunk a lane
    fa_dtype out_dtype, sinks_dtype;
    bool same; // the result has the parts' dtype
};

/* The plan's own part. */
struct Own {
    int lanes, rows; // of a group
    bool chunks;     // 16 bytes at a time
    bool heads;      // are the inner axis
    bool one_outer;  // a group's rows lie along the inner axis, too
};

__global__ void store_parts(const __grid_constant__ Parts parts, fa_part *to, int count) {
    if (int(threadIdx.x) < count) to[threadIdx.x] = parts.part[threadIdx.x];
}

__device__ __forceinline__ float sink_of(const Args &a, int64_t outer, int64_t inner) {
    if (!a.sinks.data) return -INFINITY;
    const float sink =
        load_as_float(a.sinks.data, a.sinks_dtype, outer * a.sinks.stride[1] + inner * a.sinks.stride[2]);
    return isinf(sink) || isnan(sink) ? sink : fminf(fmaxf(sink, -FA_LIMIT), FA_LIMIT);
}

/* exp(x - origin), 1 where both are the same infinity. */
__device__ __forceinline__ float weight(float x, float origin) { return x == origin ? 1.0f : expf(x - origin); }

/* Elements of a store of up to 16 bytes, of N. */
template <typename T, int N> constexpr int kWidth = N * sizeof(T) <= 16 ? N : 16 / int(sizeof(T));

/* Elements as the low bits of a word. */
__device__ __forceinline__ uint32_t word_of(float x) { return __float_as_uint(x); }
__device__ __forceinline__ uint32_t word_of(__half2 x) { return *reinterpret_cast<const uint32_t *>(&x); }
__device__ __forceinline__ uint32_t word_of(__nv_bfloat162 x) { return *reinterpret_cast<const uint32_t *>(&x); }

/* Four bytes of a row, rounded from one or two floats. */
template <typename T> __device__ __forceinline__ uint32_t rounded(const float *x) {
    if constexpr (sizeof(T) == 4)
        return word_of(x[0]);
    else if constexpr (std::is_same_v<T, __half>)
        return word_of(__floats2half2_rn(x[0], x[1]));
    else
        return word_of(__floats2bfloat162_rn(x[0], x[1]));
}

/* The result of one load: 16 bytes as words, which nvcc keeps in the registers that they came in (it gives 16-bit
 * elements a register each, and waits for one load before the next), or one element. */
template <typename T, int N> using Loaded = std::conditional_t<N == 1, T, uint4>;

__device__ __forceinline__ void add_word(float (&sum)[4], float, float w, uint32_t word, int at) {
    sum[at] += w * __uint_as_float(word);
}
template <typename T> __device__ __forceinline__ void add_word(float (&sum)[8], T, float w, uint32_t word, int at) {
    float low, high;
    if constexpr (std::is_same_v<T, __half>) {
        const __half2 pair = *reinterpret_cast<const __half2 *>(&word);
        low = __half2float(pair.x), high = __half2float(pair.y);
    } else {
        low = __uint_as_float(word << 16), high = __uint_as_float(word & 0xffff0000u);
    }
    sum[2 * at] += w * low, sum[2 * at + 1] += w * high;
}

/* Adds w times each element. */
template <typename T, int N> __device__ __forceinline__ void add(float (&sum)[N], float w, const Loaded<T, N> &x) {
    if constexpr (N == 1) {
        sum[0] += w * to_float(x);
    } else {
        add_word(sum, T(), w, x.x, 0), add_word(sum, T(), w, x.y, 1);
        add_word(sum, T(), w, x.z, 2), add_word(sum, T(), w, x.w, 3);
    }
}

/* N elements in stores of up to 16 bytes. The bytes are made one integer by hand: of a struct or vector whose elements
 * were computed nvcc 13.0 makes a store each here. */
template <typename T, int N> __device__ __forceinline__ void store(T *to, const float (&sum)[N]) {
    if constexpr (N == 1) {
        *to = from_float<T>(sum[0]);
    } else {
        constexpr int W = kWidth<T, N>, kEach = 4 / sizeof(T);
        using Bytes = std::conditional_t<W * sizeof(T) == 16, unsigned __int128, uint64_t>;
        static_assert(sizeof(Bytes) == W * sizeof(T));
#pragma unroll
        for (int first = 0; first < N; first += W) {
            Bytes bytes = 0;
#pragma unroll
            for (int i = 0; i < W; i += kEach) bytes |= Bytes(rounded<T>(sum + first + i)) << 32 * (i / kEach);
            *reinterpret_cast<Bytes *>(to + first) = bytes;
        }
    }
}

/* Elements from one of a group's rows to the next. */
__device__ __forceinline__ int64_t step_of(const Args &a, const fa_operand &x) {
    return a.outer_step * x.stride[1] + a.inner_step * x.stride[2];
}

/* The weights of a row's parts, from their LSEs. */
struct Weights {
    float origin, lse;
    float factor; // of the parts' weights: their sum is 1, or with a sink less
    int copied;   // the part whose elements are the row's, or -1
    float first[kTogether];

    /* Of a part with this LSE; -1 where it is empty. */
    __device__ __forceinline__ float of(float part) const {
        return isinf(part) ? -1.0f : factor * weight(part, origin);
    }
};

/* `lse_of(n)`: of part n; -inf where there is none. */
template <class Lse> __device__ __forceinline__ Weights weigh(const Args &a, float sink, Lse lse_of) {
    const float lses[kTogether] = {lse_of(0), lse_of(1)};
    Weights w;
    w.origin = sink;
    int counted = 0, last = 0;
    const auto look = [&](int n, float lse) {
        if (isinf(lse)) return;
        ++counted, last = n;
        if (isnan(lse) || lse > w.origin) w.origin = lse; // once NaN, it stays
    };
    look(0, lses[0]), look(1, lses[1]);
#pragma unroll 1
    for (int n = kTogether; n < a.count; ++n) look(n, lse_of(n));
    float sum = sink == -INFINITY ? 0.0f : weight(sink, w.origin);
    w.factor = 1.0f;
    const auto join = [&](float lse) {
        const float weight = w.of(lse);
        if (!(weight < 0.0f)) sum += weight;
    };
    join(lses[0]), join(lses[1]);
#pragma unroll 1
    for (int n = kTogether; n < a.count; ++n) join(lse_of(n));
    w.copied = counted == 1 && !a.sinks.data && a.same ? last : -1;
    w.factor = 1.0f / sum;
    w.first[0] = w.of(lses[0]), w.first[1] = w.of(lses[1]);
    w.lse = !counted ? sink : sum == 1.0f ? w.origin : w.origin + logf(sum);
    return w;
}

/* A group of lanes and the rows that it merges, of one batch entry. N: elements a lane has at a time, 16 bytes of
 * T, or 1. kStored: the parts are in `stored`, else in `given`. */
template <typename T, int N, bool kStored> struct Group {
    const Args &a;
    const Parts &given;
    const fa_part *stored;
    int lane;
    int64_t batch, outer, inner; // of the first row
    bool is_row = false;         // the row that this lane weighs exists
    Weights mine = {};           // of the lane's row

    __device__ __forceinline__ const fa_part &part_of(int n) const {
        if constexpr (kStored)
            return stored[n < a.count ? n : a.count - 1];
        else
            return given.part[n];
    }
    __device__ __forceinline__ int64_t my_outer() const { return outer + lane * a.outer_step; }
    __device__ __forceinline__ int64_t my_inner() const { return inner + lane * a.inner_step; }
    __device__ __forceinline__ float lse_of(int n) const {
        if (!is_row || n >= a.count) return -INFINITY;
        const fa_operand &lse = part_of(n).lse;
        return static_cast<const float *>(lse.data)[row_offset(lse, batch, my_outer(), my_inner())];
    }
    /* Where element d of the first of some rows begins; `begin`: which of the group's. */
    __device__ __forceinline__ const T *row_from(const fa_operand &x, int begin, int d) const {
        return row_of<const T>(x, batch, outer, inner) + d * x.stride[3] + begin * step_of(a, x);
    }

    /* The first lanes weigh the parts of a row each; for the others all parts are empty. */
    __device__ __forceinline__ void weigh_rows() {
        is_row = lane < a.rows && my_inner() < a.inner && my_outer() < a.outer;
        const float sink = is_row ? sink_of(a, my_outer(), my_inner()) : -INFINITY;
        mine = weigh(a, sink, [&](int n) { return lse_of(n); });
    }

    using Sums = float[kAtOnce][N];
    /* Adds kTogether parts' elements of kAtOnce rows. `own`: their weights for the lane's row. */
    __device__ __forceinline__ void add_parts(Sums &sums, const float (&own)[kTogether],
                                              const T *const (&from)[kTogether], const int64_t (&between)[kTogether],
                                              int begin, bool inside) const {
        float w[kTogether][kAtOnce];
        Loaded<T, N> x[kTogether][kAtOnce] = {};
#pragma unroll
        for (int r = 0; r < kAtOnce; ++r)
#pragma unroll
            for (int i = 0; i < kTogether; ++i) {
                w[i][r] = __shfl_sync(~0u, own[i], begin + r, a.lanes);
                if (inside && !(w[i][r] < 0.0f))
                    x[i][r] = *reinterpret_cast<const Loaded<T, N> *>(from[i] + r * between[i]);
            }
            /* An empty part adds -1 * 0, which changes no bit. */
#pragma unroll
        for (int r = 0; r < kAtOnce; ++r)
#pragma unroll
            for (int i = 0; i < kTogether; ++i) add<T>(sums[r], w[i][r], x[i][r]);
    }

    /* The parts after the first. */
    __device__ __forceinline__ void add_others(Sums &sums, int begin, int d) const {
#pragma unroll 1
        for (int n = kTogether; n < a.count; n += kTogether) {
            float own[kTogether];
            const T *from[kTogether];
            int64_t between[kTogether];
#pragma unroll
            for (int i = 0; i < kTogether; ++i) {
                own[i] = mine.of(lse_of(n + i));
                from[i] = row_from(part_of(n + i).out, begin, d), between[i] = step_of(a, part_of(n + i).out);
            }
            add_parts(sums, own, from, between, begin, d < a.head_dim);
        }
    }

    /* Elements from d on of all rows of `written`, those that are no copies. */
    template <class R> __device__ __forceinline__ void write(R *out, unsigned written, int d) const {
        const bool inside = d < a.head_dim;
        const T *from[kTogether];
        int64_t between[kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i)
            from[i] = row_from(part_of(i).out, 0, d), between[i] = step_of(a, part_of(i).out);
        R *to = out + row_offset(a.out, batch, outer, inner) + d * a.out.stride[3];
        const int64_t step = step_of(a, a.out);
#pragma unroll 1
        for (int begin = 0; begin < a.rows; begin += kAtOnce) {
            Sums sums = {};
            add_parts(sums, mine.first, from, between, begin, inside);
            if (a.count > kTogether) add_others(sums, begin, d);
#pragma unroll
            for (int r = 0; r < kAtOnce; ++r, to += step)
                if (inside && (written >> (begin + r) & 1)) store(to, sums[r]);
#pragma unroll
            for (int i = 0; i < kTogether; ++i) from[i] += kAtOnce * between[i];
        }
    }

    /* Those rows that are one part's, bit for bit. */
    __device__ __forceinline__ void copy(int d) const {
#pragma unroll 1
        for (int r = 0; r < a.rows; ++r) {
            const int part = __shfl_sync(~0u, mine.copied, r, a.lanes);
            if (d >= a.head_dim || part < 0) continue;
            const T *from = row_from(part_of(part).out, r, d);
            T *to = const_cast<T *>(row_from(a.out, r, d));
            *reinterpret_cast<Loaded<T, N> *>(to) = *reinterpret_cast<const Loaded<T, N> *>(from);
        }
    }

    __device__ __forceinline__ void merge() {
        weigh_rows();
        const unsigned written = __ballot_sync(~0u, is_row && mine.copied < 0) >> (threadIdx.x % kWarp - lane);
        const bool any_copies = __any_sync(~0u, mine.copied >= 0);
#pragma unroll 1
        for (int step = 0; step < a.steps; ++step) {
            const int d = (step * a.lanes + lane) * N;
            if (a.same)
                write(static_cast<T *>(a.out.data), written, d);
            else if (a.out_dtype == FA_F16)
                write(static_cast<__half *>(a.out.data), written, d);
            else if (a.out_dtype == FA_BF16)
                write(static_cast<__nv_bfloat16 *>(a.out.data), written, d);
            else
                write(static_cast<float *>(a.out.data), written, d);
            if (any_copies) copy(d);
        }
        if (is_row) static_cast<float *>(a.lse.data)[row_offset(a.lse, batch, my_outer(), my_inner())] = mine.lse;
    }
};

template <typename T, int N, bool kStored>
__global__ void __launch_bounds__(kMaxThreads, kBlocks)
    merge_kernel(const __grid_constant__ Args a, const __grid_constant__ Parts given, const fa_part *stored) {
    const int lane = threadIdx.x & (a.lanes - 1);
    const int64_t inner = int64_t(blockIdx.x) * a.inner_tile + (threadIdx.x >> a.lanes_log2);
    for (int64_t batch = blockIdx.z; batch < a.batch; batch += gridDim.z)
        for (int64_t outer = int64_t(blockIdx.y) * a.outer_tile; outer < a.outer;
             outer += int64_t(gridDim.y) * a.outer_tile)
            Group<T, N, kStored>{a, given, stored, lane, batch, outer, inner}.merge();
}

/* Whether all operands can be read and written in chunks, 16 bytes of T at a time. */
template <typename T> bool all_chunks(const fa_merge &p) {
    constexpr int N = 16 / sizeof(T);
    bool all = p.out_dtype == FA_F32 ? takes_chunks<float>(p.out, p.head_dim, kWidth<float, N>)
                                     : takes_chunks<uint16_t>(p.out, p.head_dim, kWidth<uint16_t, N>);
    for (int n = 0; n < p.count; ++n) all = all && takes_chunks<T>(p.parts[n].out, p.head_dim, N);
    return all;
}

int64_t tiles(int64_t rows, int of_tile) { return (rows + of_tile - 1) / of_tile; }

/* The operand with its axes as the kernel takes them, its heads the inner one or not. */
fa_operand in_order(fa_operand x, bool heads) {
    if (heads) std::swap(x.stride[1], x.stride[2]);
    return x;
}

/* Of a group: many, since what their weights need is worked out together, but no more than leave kBusyWarps a
 * multiprocessor. */
int rows_of_group(int64_t all, int lanes, int multiprocessors) {
    int rows = std::min(lanes, kMostRows);
    while (rows > kAtOnce && all * lanes < int64_t(kWarp) * kBusyWarps * multiprocessors * rows) rows /= 2;
    return rows;
}

Args args_of(const fa_merge &p, const Own &own, int threads) {
    Args a = {};
    a.out = in_order(p.out, own.heads), a.lse = in_order(p.lse, own.heads);
    a.sinks.data = p.sinks.data, a.sinks.stride[own.heads ? 2 : 1] = p.sinks.stride[0];
    a.batch = p.batch, a.outer = own.heads ? p.seq : p.heads, a.inner = own.heads ? p.heads : p.seq;
    const int groups = threads / own.lanes;
    a.lanes = own.lanes, a.rows = own.rows;
    a.outer_step = own.one_outer ? 0 : 1, a.inner_step = own.one_outer ? groups : 0;
    a.outer_tile = own.one_outer ? 1 : a.rows, a.inner_tile = own.one_outer ? groups * a.rows : groups;
    a.count = p.count, a.head_dim = p.head_dim;
    while (1 << a.lanes_log2 < a.lanes) ++a.lanes_log2;
    const int width = own.lanes * (own.chunks ? 16 / int(fa_dtype_size(p.dtype)) : 1);
    a.steps = int(tiles(p.head_dim, width));
    a.out_dtype = p.out_dtype, a.sinks_dtype = p.sinks_dtype, a.same = p.out_dtype == p.dtype;
    return a;
}

dim3 grid_of(const Args &a) {
    return dim3(unsigned(tiles(a.inner, a.inner_tile)), unsigned(std::min(tiles(a.outer, a.outer_tile), kMaxGrid)),
                unsigned(std::min(a.batch, kMaxGrid)));
}

fa_answer plan(const fa_problem *problem, const fa_device_info *device, fa_plan *plan, fa_why *why) {
    const fa_merge &p = problem->merge;
    Own &own = fa_own<Own>(plan);
    const bool half = fa_dtype_size(p.dtype) == 2;
    own.chunks = half ? all_chunks<uint16_t>(p) : all_chunks<float>(p);
    const int steps = own.chunks ? p.head_dim * int(fa_dtype_size(p.dtype)) / 16 : p.head_dim;
    own.lanes = kFewestLanes;
    while (own.lanes < steps && own.lanes < kWarp) own.lanes *= 2;
    own.heads = p.seq <= 1 || (p.heads > 1 && std::abs(p.out.stride[1]) < std::abs(p.out.stride[2]));
    const int64_t inner = own.heads ? p.heads : p.seq, outer = own.heads ? p.seq : p.heads;
    own.rows = rows_of_group(p.batch * p.heads * p.seq, own.lanes, device->sm_count);
    own.one_outer = outer < own.rows; // such rows alone would leave most of a group idle
    const int64_t groups = own.one_outer ? tiles(inner, own.rows) : inner;
    const int64_t wanted = std::max<int64_t>(std::min<int64_t>(groups * own.lanes, kMaxThreads), kWarp);
    plan->threads = int((wanted + kWarp - 1) / kWarp * kWarp);
    const Args args = args_of(p, own, plan->threads);
    const dim3 grid = grid_of(args);
    plan->blocks = int64_t(grid.x) * grid.y * grid.z;
    if (p.count > kArguments) plan->workspace_bytes = p.count * sizeof(fa_part);
    if (tiles(args.inner, args.inner_tile) >> 31) return fa_because(why, FA_REFUSES, FA_WHY_TILES, 31, 0, 0);
    return FA_TAKES;
}

template <typename T>
fa_code launch_as(const fa_merge &p, const fa_plan *plan, const Parts &given, const fa_launch &launch) {
    const Own &own = fa_own<Own>(plan);
    const auto kernel = p.count > kArguments
                            ? own.chunks ? merge_kernel<T, 16 / sizeof(T), true> : merge_kernel<T, 1, true>
                        : own.chunks ? merge_kernel<T, 16 / sizeof(T), false>
                                     : merge_kernel<T, 1, false>;
    const Args args = args_of(p, own, plan->threads);
    kernel<<<grid_of(args), plan->threads, 0, static_cast<cudaStream_t>(launch.stream)>>>(
        args, given, static_cast<const fa_part *>(launch.workspace));
    FA_CUDA_TRY(launch, cudaGetLastError());
    return FA_OK;
}

/* Up to kArguments parts from part `begin` on, their axes in a launch's order. */
Parts parts_from(const fa_merge &p, int begin, bool heads) {
    Parts parts = {};
    for (int n = 0; n < std::min(kArguments, p.count - begin); ++n)
        parts.part[n] = {in_order(p.parts[begin + n].out, heads), in_order(p.parts[begin + n].lse, heads)};
    return parts;
}

/* Writes all parts to workspace. */
fa_code store_all(const fa_merge &p, bool heads, const fa_launch &launch) {
    fa_part *to = static_cast<fa_part *>(launch.workspace);
    for (int begin = 0; begin < p.count; begin += kArguments) {
        store_parts<<<1, kArguments, 0, static_cast<cudaStream_t>(launch.stream)>>>(
            parts_from(p, begin, heads), to + begin, std::min(kArguments, p.count - begin));
        FA_CUDA_TRY(launch, cudaGetLastError());
    }
    return FA_OK;
}

fa_code launch(const fa_problem *problem, const fa_plan *plan, const fa_launch *launch) {
    const fa_merge &p = problem->merge;
    const bool heads = fa_own<Own>(plan).heads;
    Parts given = {};
    if (plan->workspace_bytes)
        FA_TRY(store_all(p, heads, *launch));
    else
        given = parts_from(p, 0, heads);
    if (p.dtype == FA_F16) return launch_as<__half>(p, plan, given, *launch);
    if (p.dtype == FA_BF16) return launch_as<__nv_bfloat16>(p, plan, given, *launch);
    return launch_as<float>(p, plan, given, *launch);
}

} // namespace
} // namespace fa

FA_DEFINE_KERNEL(merge) = {
    .abi = FA_KERNEL_ABI,
    .op = FA_MERGE,
    .device = FA_CUDA,
    .name = "merge",
    .summary = "merges results over parts of the keys, a group of lanes a row",
    .cc_from = 80,
    .cc_to = 0,
    .dtypes = fa::kFloatBits,
    .takes = FA_WITH_SINKS,
    .plan = fa::plan,
    .launch = fa::launch,
};
