/* minimal: the shortest fused attention kernel here, and the one to read first.
 *
 * One warp a query row. For each key that the row sees, the lanes share the dot product q . k; the online softmax then
 * takes in one score at a time, so that neither the scores nor their exponentials ever exist in memory:
 *
 *     s = scale * (q . k_j)
 *     m' = max(m, s)      l' = l e^(m - m') + e^(s - m')      o' = o e^(m - m') + e^(s - m') v_j
 *
 * and at the end out = o / l, LSE = m + log l. Lane t holds eight elements of q, from 8t on, whose products it
 * sums; the lanes' sums are then added in order, as the plain formula adds them (fa_ext/reference/__init__.py). Of o it
 * holds the elements t, t + 32, t + 64, ... Float16, bfloat16 and float32 with float32 arithmetic; any strides, GQA,
 * causal, scale, LSE, head_dim up to 256. Each key is read from cache once for every row: the kernel is a baseline to
 * understand, not one to use.
 *
 *     python -m bench measure --preset history --kernels minimal,simt
 */
#include "common/convert.cuh" // to_float, from_float
#include "common/launch.cuh"  // fa_own, FA_CUDA_TRY
#include "common/mask.cuh"    // row_keys
#include "common/rows.cuh"    // row_of, store_lse
#include "common/score.cuh"   // round_score
#include "common/softmax.cuh" // NaturalRowState, finish_row
#include "common/tiles.cuh"   // place_of
#include "fa.h"               // fa_forward, fa_kernel

namespace fa {
namespace {

constexpr int kWarp = 32;
constexpr int kWarps = 8;  // rows a block
constexpr int kEight = 8;  // products of a score that a lane sums
constexpr int kChunk = 64; // keys summed apart: one sum over thousands of keys would be off by its many roundings

static_assert(kWarp * kEight >= FA_MAX_HEAD_DIM);

/* The fields of fa_forward that the kernel reads. */
struct Params {
    fa_operand q, k, v, out, lse;
    int64_t batch, heads, heads_kv, seq_q;
    int64_t left, right, diagonal, key_begin, key_end;
    int head_dim, head_dim_v;
    float scale;
};

/* kLaneDims: elements of an output row that a lane holds, head_dim_v over 32, rounded up. Registers shall allow three
 * blocks a multiprocessor: at four, float32 of head_dim 64 takes 1.2 times as long on an H200. */
template <typename T, int kLaneDims>
__global__ void __launch_bounds__(kWarp *kWarps, 3) minimal_kernel(const __grid_constant__ Params p) {
    const int lane = threadIdx.x % kWarp;
    const int64_t rows = p.batch * p.heads * p.seq_q;

    for (int64_t n = int64_t(blockIdx.x) * kWarps + threadIdx.x / kWarp; n < rows; n += int64_t(gridDim.x) * kWarps) {
        const auto [batch, head, row] = place_of(n, p.seq_q, p.heads);
        const int64_t head_kv = head / (p.heads / p.heads_kv);
        const T *q = row_of<T>(p.q, batch, head, row);

        float query[kEight], out[kLaneDims] = {};
        for (int i = 0; i < kEight; ++i) {
            int d = lane * kEight + i;
            query[i] = d < p.head_dim ? to_float(q[d * p.q.stride[3]]) : 0.0f;
        }

        NaturalRowState state;
        const KeyRange keys = row_keys(p, row);
        for (int64_t first = keys.begin; first < keys.end; first += kChunk) {
            const int64_t end = first + kChunk < keys.end ? first + kChunk : keys.end;
            float chunk[kLaneDims] = {}, chunk_sum = 0.0f;
            for (int64_t key = first; key < end; ++key) {
                const T *k = row_of<T>(p.k, batch, head_kv, key);
                float sum = 0.0f, product = 0.0f;
                for (int i = 0; i < kEight; ++i) {
                    int d = lane * kEight + i;
                    if (d < p.head_dim) sum = fmaf(query[i], to_float(k[d * p.k.stride[3]]), sum);
                }
                for (int t = 0; t * kEight < p.head_dim; ++t) product += __shfl_sync(~0u, sum, t);

                const float score = round_score(product, p.scale), factor = state.raise(score);
                const float weight = state.weight(score);
                chunk_sum = chunk_sum * factor + weight;

                const T *v = row_of<T>(p.v, batch, head_kv, key);
                for (int i = 0; i < kLaneDims; ++i) {
                    int d = lane + i * kWarp;
                    out[i] *= factor;
                    if (d < p.head_dim_v) chunk[i] = chunk[i] * factor + weight * to_float(v[d * p.v.stride[3]]);
                }
            }
            state.sum += chunk_sum;
            for (int i = 0; i < kLaneDims; ++i) out[i] += chunk[i];
        }

        const RowResult result = finish_row(state);
        T *o = row_of<T>(p.out, batch, head, row);
        for (int i = 0; i < kLaneDims; ++i) {
            int d = lane + i * kWarp;
            if (d < p.head_dim_v) o[d * p.out.stride[3]] = from_float<T>(out[i] * result.factor);
        }
        if (lane == 0) store_lse(p, batch, head, row, result.lse);
    }
}

/* The plan's own part. */
struct Own {
    bool wide; // head_dim_v over 64
};

fa_answer plan(const fa_problem *problem, const fa_device_info *, fa_plan *plan, fa_why *) {
    const fa_forward &p = problem->forward;
    const int64_t rows = p.batch * p.heads * p.seq_q, blocks = (rows + kWarps - 1) / kWarps;
    fa_own<Own>(plan).wide = p.head_dim_v > 64;
    plan->threads = kWarp * kWarps;
    plan->blocks = blocks < INT32_MAX ? blocks : INT32_MAX; // the kernel strides over the rest
    plan->keep = true;
    return FA_TAKES;
}

template <typename T> fa_code launch_as(const fa_forward &p, const fa_plan *plan, const fa_launch &launch) {
    auto kernel = fa_own<Own>(plan).wide ? minimal_kernel<T, FA_MAX_HEAD_DIM / kWarp> : minimal_kernel<T, 64 / kWarp>;
    cudaStream_t stream = static_cast<cudaStream_t>(launch.stream);
    const Params params = {
        .q = p.q,
        .k = p.k,
        .v = p.v,
        .out = p.out,
        .lse = p.lse,
        .batch = p.batch,
        .heads = p.heads,
        .heads_kv = p.heads_kv,
        .seq_q = p.seq_q,
        .left = p.left,
        .right = p.right,
        .diagonal = p.diagonal,
        .key_begin = p.key_begin,
        .key_end = p.key_end,
        .head_dim = p.head_dim,
        .head_dim_v = p.head_dim_v,
        .scale = static_cast<float>(p.scale),
    };
    kernel<<<unsigned(plan->blocks), plan->threads, 0, stream>>>(params);
    FA_CUDA_TRY(launch, cudaGetLastError());
    return FA_OK;
}

fa_code launch(const fa_problem *problem, const fa_plan *plan, const fa_launch *launch) {
    const fa_forward &p = problem->forward;
    if (p.dtype == FA_F16) return launch_as<__half>(p, plan, *launch);
    if (p.dtype == FA_BF16) return launch_as<__nv_bfloat16>(p, plan, *launch);
    return launch_as<float>(p, plan, *launch);
}

} // namespace
} // namespace fa

FA_DEFINE_KERNEL(minimal) = {
    .abi = FA_KERNEL_ABI,
    .op = FA_FORWARD,
    .device = FA_CUDA,
    .name = "minimal",
    .summary = "one warp a query row: the shortest fused kernel, to read first",
    .cc_from = 80,
    .cc_to = 0,
    .dtypes = fa::kFloatBits,
    .takes = FA_WITH_HEAD_DIM_V,
    .plan = fa::plan,
    .launch = fa::launch,
};
