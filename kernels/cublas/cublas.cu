/* cublas: attention as two library products with a softmax of ours between them, the plain way done well.
 *
 *     scores = scale Q K^T      weights = softmax(scores)      out = weights V
 *
 * The products are strided-batched cuBLAS GEMMs with float32 accumulation; cuBLAS is found at run time, never linked.
 * The scores stay float32 (rounded to bfloat16, one just under 4 is off by up to 0.008, four times what the LSE may be)
 * and live in workspace, one chunk at a time: some batch entries, some heads of one, or some query rows, whatever fits
 * the limit. With causal or a window a chunk has few rows and its products only the keys that its rows see. The softmax
 * turns a chunk into weights in place. Query heads that share a key head are extra rows of one product where the
 * strides allow it, else products of their own.
 *
 * Float16, bfloat16 and float32, everything a dense call can ask for but dropout, and any strides that a leading
 * dimension can express. cuBLAS cannot be called from inside a kernel, on tiles in shared memory: it is a library of
 * kernels that the host launches. So each chunk is three launches, and its scores cross memory; that traffic is what
 * the fused rows save.
 *
 *     python -m bench measure --preset history --kernels cublas
 */
#include "common/launch.cuh"  // FA_CUDA_TRY
#include "common/limits.cuh"  // lengths_fit
#include "common/mask.cuh"    // tile_keys
#include "common/score.cuh"   // score_params
#include "cublas/api.cuh"     // Session
#include "cublas/gemm.cuh"    // multiply
#include "cublas/softmax.cuh" // softmax, Chunk
#include "fa.h"               // fa_forward, fa_kernel

namespace fa {
namespace {

using cublas::Chunk;
using cublas::Matrix;

constexpr int64_t kBoundedRows = 512; // rows a chunk with causal or a window: its keys are clipped to what they see
constexpr size_t kLibraryBytesSm90 = 32 << 20; // workspace for cuBLAS, as its documentation recommends
constexpr size_t kLibraryBytes = 4 << 20;

size_t library_bytes(const fa_device_info *device) { return device->cc >= 90 ? kLibraryBytesSm90 : kLibraryBytes; }

/* The most that a batch of rows covers, the plan's own data. Either all heads of `batches` entries, or `heads` of one:
 * whole groups of query heads that share a key head, or a divisor of a group. */
struct Tiling {
    int64_t rows, heads, batches, ld;

    int64_t bytes() const { return rows * heads * batches * ld * int64_t(sizeof(float)); }
};

/* False when not even one row of scores fits the limit. Follows from one batch entry where the call asks for that. */
bool make_tiling(const fa_problem *problem, const fa_device_info *device, Tiling *t) {
    const fa_forward &p = problem->forward;
    const int64_t group = p.heads_kv ? p.heads / p.heads_kv : 1;
    const bool bounded = p.left != FA_UNBOUNDED || p.right != FA_UNBOUNDED;
    *t = {p.seq_q, p.heads, 1, 0};
    if (bounded && t->rows > 2 * kBoundedRows) t->rows = kBoundedRows;
    int64_t keys = p.key_end - p.key_begin;
    const int64_t seen = t->rows + p.left + p.right; // by the rows of a chunk, from the first to the last
    if (seen < keys) keys = seen;
    t->ld = (keys + 7) / 8 * 8;

    const int64_t limit = int64_t(device->workspace_limit) - int64_t(library_bytes(device));
    if (t->bytes() <= limit) {
        if (t->bytes() > 0 && !problem->batch_invariant) t->batches = limit / t->bytes();
        if (t->batches > p.batch) t->batches = p.batch;
        return true;
    }
    const int64_t head_bytes = t->bytes() / t->heads;
    t->heads = limit > 0 ? limit / head_bytes : 0;
    if (t->heads >= group)
        t->heads -= t->heads % group;
    else
        while (t->heads > 1 && group % t->heads) --t->heads;
    if (t->heads > 0) return true;
    t->heads = 1;
    t->rows = limit > 0 ? limit / (head_bytes / t->rows) : 0;
    return t->rows > 0;
}

bool expressible(const fa_operand &x, int64_t rows, int64_t columns) {
    cublas::Form form;
    return cublas::express(x.stride[2], x.stride[3], rows, columns, &form);
}

/* Float32, microseconds on an H200 (this kernel, simt): B4 H16 S2048 D64 2449, 1949; D128 3731, 3854; D128 causal 2838,
 * 2045; decoding 4096 keys at D128: B1 H32 48, 244, but B16 H32/8 1391, 573. The 16-bit kernels come before this one.
 */
fa_answer judge(const fa_forward &p, fa_why *why) {
    if (p.dtype != FA_F32) return FA_TAKES;
    const int dim = p.head_dim > p.head_dim_v ? p.head_dim : p.head_dim_v;
    const bool bounded = p.left != FA_UNBOUNDED || p.right != FA_UNBOUNDED;
    if (p.seq_q == 1)
        return p.heads == p.heads_kv ? FA_TAKES : fa_because(why, FA_DECLINES, FA_WHY_SHARED_HEADS, 0, 0, 0);
    if (dim <= 64) return fa_because(why, FA_DECLINES, FA_WHY_NARROW, 0, 0, 0);
    if (bounded && dim <= 128) return fa_because(why, FA_DECLINES, FA_WHY_BOUNDED, 0, 0, 0);
    return FA_TAKES;
}

fa_answer plan(const fa_problem *problem, const fa_device_info *device, fa_plan *plan, fa_why *why) {
    const fa_forward &p = problem->forward;
    Tiling &t = fa_own<Tiling>(plan);
    plan->keep = true;
    if (device->library_error[FA_CUBLAS]) return fa_because(why, FA_NOT_HERE, FA_WHY_LIBRARY, FA_CUBLAS, 0, 0);
    if (!lengths_fit(p.seq_q, p.seq_k, kBitsInFours, why)) return FA_REFUSES;
    if (problem->empty) return judge(p, why);
    const bool expressed = expressible(p.q, p.seq_q, p.head_dim) && expressible(p.k, p.seq_k, p.head_dim) &&
                           expressible(p.v, p.seq_k, p.head_dim_v) && expressible(p.out, p.seq_q, p.head_dim_v);
    if (p.key_end > p.key_begin && !expressed) return fa_because(why, FA_REFUSES, FA_WHY_LEADING_DIMENSION, 0, 0, 0);
    if (!make_tiling(problem, device, &t)) return fa_because(why, FA_REFUSES, FA_WHY_WORKSPACE, 0, 0, 0);
    plan->workspace_bytes = library_bytes(device) + t.bytes();
    return judge(p, why);
}

Matrix matrix_of(const fa_operand &x, fa_dtype dtype, int64_t batch, int64_t head, int64_t row) {
    const int bytes = int(fa_dtype_size(dtype));
    const int64_t at = batch * x.stride[0] + head * x.stride[1] + row * x.stride[2];
    return {static_cast<char *>(x.data) + at * bytes, cublas::data_type(dtype), bytes, x.stride[2], x.stride[3]};
}

/* One chunk: product, softmax, product. */
fa_code run_chunk(const cublas::Session &session, const fa_problem *problem, const Chunk &chunk, int64_t batches,
                  const fa_launch &launch) {
    const fa_forward *p = &problem->forward;
    const ScoreParams score = score_params(*p);
    cudaStream_t stream = static_cast<cudaStream_t>(launch.stream);
    const int64_t group = p->heads / p->heads_kv, in_group = chunk.heads < group ? chunk.heads : group;
    const int64_t groups = chunk.heads / in_group, head_kv = chunk.head / group;
    const int type = cublas::data_type(p->dtype), bytes = int(fa_dtype_size(p->dtype));
    const int64_t head_scores = chunk.rows * chunk.ld, shrink = int64_t(sizeof(float)) / bytes;
    char *workspace = reinterpret_cast<char *>(chunk.scores);

    if (chunk.keys > 0) {
        const Matrix scores = {workspace, cublas::kReal32F, int(sizeof(float)), chunk.ld, 1};
        FA_TRY(cublas::multiply(session, matrix_of(p->q, p->dtype, chunk.batch, chunk.head, chunk.row_begin),
                                matrix_of(p->k, p->dtype, chunk.batch, head_kv, chunk.key_begin).transposed(), scores,
                                chunk.rows, chunk.keys, p->head_dim,
                                score.cap_log2 > 0 ? score.scale_cap : score.scale_log2,
                                {{batches, p->q.stride[0], p->k.stride[0], chunk.heads * head_scores},
                                 {groups, in_group * p->q.stride[1], p->k.stride[1], in_group * head_scores},
                                 {in_group, p->q.stride[1], 0, head_scores}}));
    }
    const cublas::Params params = {
        .out = p->out,
        .lse = p->lse,
        .bias = p->bias,
        .mask = p->mask,
        .sinks = p->sinks,
        .alibi = problem->forward.alibi,
        .left = p->left,
        .right = p->right,
        .diagonal = p->diagonal,
        .key_begin = p->key_begin,
        .key_end = p->key_end,
        .cap_log2 = score.cap_log2,
        .head_dim_v = p->head_dim_v,
        .bias_dtype = p->bias_dtype,
        .sinks_dtype = p->sinks_dtype,
    };
    FA_CHAOS_ARM(stream, launch);
    if (p->dtype == FA_F16)
        FA_CUDA_TRY(launch, fa::cublas::softmax<__half>(params, chunk, stream));
    else if (p->dtype == FA_BF16)
        FA_CUDA_TRY(launch, fa::cublas::softmax<__nv_bfloat16>(params, chunk, stream));
    else
        FA_CUDA_TRY(launch, fa::cublas::softmax<float>(params, chunk, stream));
    if (chunk.keys == 0) return FA_OK;

    const Matrix weights = {workspace, type, bytes, chunk.ld * shrink, 1};
    return cublas::multiply(session, weights, matrix_of(p->v, p->dtype, chunk.batch, head_kv, chunk.key_begin),
                            matrix_of(p->out, p->dtype, chunk.batch, chunk.head, chunk.row_begin), chunk.rows,
                            p->head_dim_v, chunk.keys, 1.0f,
                            {{batches, chunk.heads * head_scores * shrink, p->v.stride[0], p->out.stride[0]},
                             {groups, in_group * head_scores * shrink, p->v.stride[1], in_group * p->out.stride[1]},
                             {in_group, head_scores * shrink, 0, p->out.stride[1]}});
}

fa_code launch(const fa_problem *problem, const fa_plan *plan, const fa_launch *launch) {
    const fa_forward *p = &problem->forward;
    const Tiling &t = fa_own<Tiling>(plan);
    const size_t library = library_bytes(launch->device);
    char *workspace = static_cast<char *>(launch->workspace);

    cublas::Session session(*launch);
    FA_TRY(session.open(workspace, library));
    for (int64_t row = 0; row < p->seq_q; row += t.rows) {
        const int64_t rows = p->seq_q - row < t.rows ? p->seq_q - row : t.rows;
        const KeyRange keys = tile_keys(*p, row, row + rows);
        for (int64_t batch = 0; batch < p->batch; batch += t.batches) {
            const int64_t batches = p->batch - batch < t.batches ? p->batch - batch : t.batches;
            for (int64_t head = 0; head < p->heads; head += t.heads) {
                const int64_t heads = p->heads - head < t.heads ? p->heads - head : t.heads;
                const Chunk chunk = {
                    .scores = reinterpret_cast<float *>(workspace + library),
                    .ld = t.ld,
                    .row_begin = row,
                    .rows = rows,
                    .key_begin = keys.empty() ? 0 : keys.begin,
                    .keys = keys.empty() ? 0 : keys.end - keys.begin,
                    .batch = batch,
                    .head = head,
                    .heads = heads,
                    .count = batches * heads * rows,
                };
                FA_TRY(run_chunk(session, problem, chunk, batches, *launch));
            }
        }
    }
    return FA_OK;
}

} // namespace
} // namespace fa

FA_DEFINE_KERNEL(cublas) = {
    .abi = FA_KERNEL_ABI,
    .op = FA_FORWARD,
    .device = FA_CUDA,
    .name = "cublas",
    .summary = "two cuBLAS products with a softmax between them",
    .cc_from = 80,
    .cc_to = 0,
    .dtypes = fa::kFloatBits,
    .takes = FA_WITH_BIAS | FA_WITH_MASK | FA_WITH_SINKS | FA_WITH_SOFTCAP | FA_WITH_WINDOW | FA_WITH_HEAD_DIM_V |
             FA_WITH_ALIBI,
    .plan = fa::plan,
    .launch = fa::launch,
};
