/* merge: results over parts of the keys -> the result over all of them.
 *
 *     m = max(lse_i, sink)    w_i = exp(lse_i - m), 0 for an empty part    W = sum w_i + exp(sink - m)
 *     out = sum w_i out_i / W    lse = m + log W
 *
 * A part whose LSE is -inf or +inf is empty, and its out is not read. In float32, in the order of the list; where one
 * part alone counts, its elements are copied. A group of lanes of one warp owns a row and reads it in 16-byte chunks
 * where all operands allow it, else by elements: bound by memory. Each lane weighs the parts for itself. The result may
 * be the first part itself, since a group reads its row's LSEs before it writes one, and each lane an element before it
 * writes that element.
 *
 * Float16, bfloat16, float32 parts; a result of any of these; any strides, head_dim up to 256. The first parts travel
 * as arguments of the launch; where there are more, small launches before it write all of them to workspace, so that a
 * captured graph holds them.
 */
#include <algorithm> // std::copy_n, std::max, std::min

#include "common/convert.cuh" // to_float, from_float, load_as_float
#include "common/launch.cuh"  // fa_own, FA_CUDA_TRY
#include "common/rows.cuh"    // Chunk, row_offset, takes_chunks
#include "fa.h"               // fa_merge

namespace fa {
namespace {

constexpr int kWarp = 32, kMaxThreads = 128;
constexpr int kArguments = 32; // parts that are arguments of a launch
constexpr int64_t kMaxGrid = 65535;

struct Parts {
    fa_part part[kArguments];
};

/* What the kernel needs beside the parts. */
struct Args {
    fa_operand out, lse, sinks;
    int64_t batch, heads, seq;
    int count, head_dim;
    int lanes; // of a row: a power of 2 up to kWarp
    fa_dtype out_dtype, sinks_dtype;
    bool same; // the result has the parts' dtype
};

/* The plan's own part. */
struct Own {
    int lanes;
    bool chunks; // 16 bytes at a time
};

__global__ void store_parts(const __grid_constant__ Parts parts, fa_part *to, int count) {
    if (int(threadIdx.x) < count) to[threadIdx.x] = parts.part[threadIdx.x];
}

__device__ __forceinline__ float sink_of(const Args &a, int64_t head) {
    if (!a.sinks.data) return -INFINITY;
    const float sink = load_as_float(a.sinks.data, a.sinks_dtype, head * a.sinks.stride[0]);
    return isinf(sink) || isnan(sink) ? sink : fminf(fmaxf(sink, -FA_LIMIT), FA_LIMIT);
}

/* exp(x - origin), 1 where both are the same infinity. */
__device__ __forceinline__ float weight(float x, float origin) { return x == origin ? 1.0f : expf(x - origin); }

/* Elements of a store of up to 16 bytes, of N. */
template <typename T, int N> constexpr int kWidth = N * sizeof(T) <= 16 ? N : 16 / int(sizeof(T));

template <typename T, int N>
__device__ __forceinline__ void store(const Args &a, int64_t at, const float (&sum)[N], float factor) {
    constexpr int W = kWidth<T, N>;
#pragma unroll
    for (int first = 0; first < N; first += W) {
        Chunk<T, W> chunk;
#pragma unroll
        for (int i = 0; i < W; ++i) chunk.element[i] = from_float<T>(sum[first + i] * factor);
        *reinterpret_cast<Chunk<T, W> *>(static_cast<T *>(a.out.data) + at + first) = chunk;
    }
}

/* N: elements a lane has at a time, 16 bytes of T, or 1. kStored: the parts are in `stored`, else in `given`. */
template <typename T, int N, bool kStored>
__global__ void __launch_bounds__(kMaxThreads)
    merge_kernel(const __grid_constant__ Args a, const __grid_constant__ Parts given, const fa_part *stored) {
    const auto part_of = [&](int n) -> const fa_part & {
        if constexpr (kStored)
            return stored[n];
        else
            return given.part[n];
    };
    const int lane = threadIdx.x % a.lanes;
    const int64_t row = int64_t(blockIdx.x) * (blockDim.x / a.lanes) + threadIdx.x / a.lanes;
    const int count = row < a.seq ? a.count : 0, columns = row < a.seq ? a.head_dim : 0;
    for (int64_t batch = blockIdx.z; batch < a.batch; batch += gridDim.z)
        for (int64_t head = blockIdx.y; head < a.heads; head += gridDim.y) {
            const auto lse_of = [&](int n) {
                const fa_operand &lse = part_of(n).lse;
                return static_cast<const float *>(lse.data)[row_offset(lse, batch, head, row)];
            };
            const float sink = sink_of(a, head);
            float origin = sink, sum = 0.0f;
            int counted = 0, last = 0;
            for (int n = 0; n < count; ++n) {
                const float lse = lse_of(n);
                if (isinf(lse)) continue;
                ++counted, last = n;
                if (isnan(lse) || lse > origin) origin = lse; // once NaN, it stays
            }
            if (sink != -INFINITY) sum = weight(sink, origin);
            for (int n = 0; n < count; ++n) {
                const float lse = lse_of(n);
                if (!isinf(lse)) sum += weight(lse, origin);
            }
            const bool copies = counted == 1 && !a.sinks.data && a.same;
            const float factor = counted ? 1.0f / sum : 0.0f;
            for (int d = lane * N; d < columns; d += a.lanes * N) {
                const int64_t to = row_offset(a.out, batch, head, row) + d * a.out.stride[3];
                float out[N] = {};
                Chunk<T, N> chunk = {};
                for (int n = copies ? last : 0; n < (copies ? last + 1 : count); ++n) {
                    const float lse = lse_of(n);
                    if (isinf(lse)) continue;
                    const fa_operand &x = part_of(n).out;
                    const int64_t at = row_offset(x, batch, head, row) + d * x.stride[3];
                    chunk = *reinterpret_cast<const Chunk<T, N> *>(static_cast<const T *>(x.data) + at);
                    const float w = weight(lse, origin);
#pragma unroll
                    for (int i = 0; i < N; ++i) out[i] += w * to_float(chunk.element[i]);
                }
                if (copies)
                    *reinterpret_cast<Chunk<T, N> *>(static_cast<T *>(a.out.data) + to) = chunk;
                else if (a.out_dtype == FA_F16)
                    store<__half>(a, to, out, factor);
                else if (a.out_dtype == FA_BF16)
                    store<__nv_bfloat16>(a, to, out, factor);
                else
                    store<float>(a, to, out, factor);
            }
            __syncwarp(); // the result's LSE may be the first part's
            if (count > 0 && lane == 0)
                static_cast<float *>(a.lse.data)[row_offset(a.lse, batch, head, row)] = !counted ? sink
                                                                                        : sum == 1.0f
                                                                                            ? origin
                                                                                            : origin + logf(sum);
        }
}

/* Whether all operands can be read and written in chunks, 16 bytes of T at a time. */
template <typename T> bool all_chunks(const fa_merge &p) {
    constexpr int N = 16 / sizeof(T);
    bool all = p.out_dtype == FA_F32 ? takes_chunks<float>(p.out, p.head_dim, kWidth<float, N>)
                                     : takes_chunks<uint16_t>(p.out, p.head_dim, kWidth<uint16_t, N>);
    for (int n = 0; n < p.count; ++n) all = all && takes_chunks<T>(p.parts[n].out, p.head_dim, N);
    return all;
}

fa_answer plan(const fa_problem *problem, const fa_device_info *, fa_plan *plan, fa_why *why) {
    const fa_merge &p = problem->merge;
    Own &own = fa_own<Own>(plan);
    const bool half = fa_dtype_size(p.dtype) == 2;
    own.chunks = half ? all_chunks<uint16_t>(p) : all_chunks<float>(p);
    const int steps = own.chunks ? p.head_dim * int(fa_dtype_size(p.dtype)) / 16 : p.head_dim;
    own.lanes = 1;
    while (own.lanes < steps && own.lanes < kWarp) own.lanes *= 2;
    const int64_t wanted = std::max<int64_t>(std::min<int64_t>(p.seq * own.lanes, kMaxThreads), kWarp);
    plan->threads = int((wanted + kWarp - 1) / kWarp * kWarp);
    const int64_t rows = plan->threads / own.lanes, tiles = (p.seq + rows - 1) / rows;
    plan->blocks = tiles * std::min(p.heads, kMaxGrid) * std::min(p.batch, kMaxGrid);
    if (p.count > kArguments) plan->workspace_bytes = p.count * sizeof(fa_part);
    if (tiles >> 31) return fa_because(why, FA_REFUSES, FA_WHY_TILES, 31, 0, 0);
    return FA_TAKES;
}

template <typename T>
fa_code launch_as(const fa_merge &p, const fa_plan *plan, const Args &args, const Parts &given,
                  const fa_launch &launch) {
    const Own &own = fa_own<Own>(plan);
    const int rows = plan->threads / own.lanes;
    const dim3 grid(unsigned((p.seq + rows - 1) / rows), unsigned(std::min(p.heads, kMaxGrid)),
                    unsigned(std::min(p.batch, kMaxGrid)));
    const auto kernel = p.count > kArguments
                            ? own.chunks ? merge_kernel<T, 16 / sizeof(T), true> : merge_kernel<T, 1, true>
                        : own.chunks ? merge_kernel<T, 16 / sizeof(T), false>
                                     : merge_kernel<T, 1, false>;
    kernel<<<grid, plan->threads, 0, static_cast<cudaStream_t>(launch.stream)>>>(
        args, given, static_cast<const fa_part *>(launch.workspace));
    FA_CUDA_TRY(launch, cudaGetLastError());
    return FA_OK;
}

/* Writes all parts to workspace. */
fa_code store_all(const fa_merge &p, const fa_launch &launch) {
    fa_part *to = static_cast<fa_part *>(launch.workspace);
    for (int begin = 0; begin < p.count; begin += kArguments) {
        const int count = std::min(kArguments, p.count - begin);
        Parts parts;
        std::copy_n(p.parts + begin, count, parts.part);
        store_parts<<<1, kArguments, 0, static_cast<cudaStream_t>(launch.stream)>>>(parts, to + begin, count);
        FA_CUDA_TRY(launch, cudaGetLastError());
    }
    return FA_OK;
}

fa_code launch(const fa_problem *problem, const fa_plan *plan, const fa_launch *launch) {
    const fa_merge &p = problem->merge;
    const Args args = {p.out,       p.lse,         p.sinks,
                       p.batch,     p.heads,       p.seq,
                       p.count,     p.head_dim,    fa_own<Own>(plan).lanes,
                       p.out_dtype, p.sinks_dtype, p.out_dtype == p.dtype};
    Parts given = {};
    if (plan->workspace_bytes)
        FA_TRY(store_all(p, *launch));
    else
        std::copy_n(p.parts, p.count, given.part);
    if (p.dtype == FA_F16) return launch_as<__half>(p, plan, args, given, *launch);
    if (p.dtype == FA_BF16) return launch_as<__nv_bfloat16>(p, plan, args, given, *launch);
    return launch_as<float>(p, plan, args, given, *launch);
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
