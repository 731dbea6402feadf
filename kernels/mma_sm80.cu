/* mma_sm80: the tensor-core kernel of every NVIDIA GPU from Ampere on, in the manner of FlashAttention-2.
 *
 * Float16 and bfloat16, float32 accumulation, mma.sync m16n8k16, head_dim and head_dim_v from 1 to 256 (padded with zeros
 * to the next of 64, 96, 128, 192, 256). The kernel and its maths stand in mma_attention.cuh; what else is here:
 * mma_tile.cuh (swizzled tiles, loads), mma_scores.cuh (masks, softcap, bias in registers), sm80_ptx.cuh (instructions).
 *
 * Three instances for each padded head_dim and dtype:
 *   large    rows of 16-byte chunks, scale > 0, any of causal, window, sinks, GQA, ragged lengths
 *   small    the same for grids that would leave multiprocessors idle: fewer rows a block, several warps a row
 *   general  softcap, bias, boolean mask, scale <= 0, and operands of any alignment
 *
 * Every instance fits the 99 KB of shared memory that a block has on sm_86 and sm_89.
 *
 *     python -m bench measure --preset paper --rows mma_sm80
 *
 * @instance d64  -DFA_MMA_HEAD_DIM=64
 * @instance d96  -DFA_MMA_HEAD_DIM=96
 * @instance d128 -DFA_MMA_HEAD_DIM=128
 * @instance d192 -DFA_MMA_HEAD_DIM=192
 * @instance d256 -DFA_MMA_HEAD_DIM=256
 */
#include "fa.h"              // fa_problem, fa_kernel
#include "launch.cuh"        // FA_CUDA_TRY
#include "mma_attention.cuh" // mma_kernel, MmaConfig, MmaArgs

#ifndef FA_MMA_HEAD_DIMS // all instances of a build, ascending
#define FA_MMA_HEAD_DIMS(X) X(64) X(96) X(128) X(192) X(256)
#endif

namespace {

using fa::MmaArgs;
using fa::MmaConfig;

enum Kind { LARGE, SMALL, GENERAL, KINDS };

/* MmaConfig<T, head_dim, row tiles, warps over rows, warps over keys, keys, stages, Q in registers, blocks, general>. */
template <typename T, int HEAD_DIM, Kind KIND> struct Choose;
#ifdef FA_MMA_TUNE // row tiles, warps over rows, warps over keys, keys, stages, Q in registers, blocks per multiprocessor
template <typename T, int D> struct Choose<T, D, LARGE> {
    using Config = MmaConfig<T, D, FA_MMA_TUNE, false>;
};
#else
template <typename T> struct Choose<T, 64, LARGE> {
    using Config = MmaConfig<T, 64, 2, 4, 1, 64, 2, true, 2, false>;
};
template <typename T> struct Choose<T, 96, LARGE> {
    using Config = MmaConfig<T, 96, 2, 4, 1, 64, 1, false, 2, false>;
};
template <typename T> struct Choose<T, 128, LARGE> {
    using Config = MmaConfig<T, 128, 2, 4, 1, 64, 1, false, 2, false>;
};
template <typename T> struct Choose<T, 192, LARGE> {
    using Config = MmaConfig<T, 192, 1, 4, 1, 64, 1, false, 2, false>;
};
template <typename T> struct Choose<T, 256, LARGE> {
    using Config = MmaConfig<T, 256, 1, 4, 1, 64, 1, false, 2, false>;
};
#endif
#ifdef FA_MMA_TUNE_SMALL
template <typename T, int D> struct Choose<T, D, SMALL> {
    using Config = MmaConfig<T, D, FA_MMA_TUNE_SMALL, false>;
};
#else
template <typename T, int D> struct Choose<T, D, SMALL> {
    using Config = MmaConfig<T, D, 1, 2, D <= 128 ? 4 : 2, 32, D <= 64 ? 2 : 1, D <= 128, 1, false>;
};
#endif
template <typename T, int D> struct Choose<T, D, GENERAL> {
    using Config = MmaConfig<T, D, 1, 4, 1, 32, 1, false, 2, true>;
};

} // namespace

/* Launches one kind of instance for the dtype of the problem; one such function a padded head_dim, in its own object. */
#define FA_MMA_JOIN(head_dim) fa_mma_sm80_launch_d##head_dim
#define FA_MMA_LAUNCH(head_dim)                                                                                        \
    fa_code FA_MMA_JOIN(head_dim)(const MmaArgs &args, int kind, unsigned blocks, cudaStream_t stream,                 \
                                  fa_status *status)

#ifdef FA_INSTANCE

namespace {

template <class C> fa_code launch_config(const MmaArgs &args, unsigned blocks, cudaStream_t stream, fa_status *status) {
    auto kernel = fa::mma_kernel<C>;
    if (C::SHARED_BYTES > 48 * 1024)
        FA_CUDA_TRY(status, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, C::SHARED_BYTES));
    kernel<<<blocks, C::THREADS, C::SHARED_BYTES, stream>>>(args);
    FA_CUDA_TRY(status, cudaGetLastError());
    return FA_OK;
}

template <typename T>
fa_code launch_kind(const MmaArgs &args, int kind, unsigned blocks, cudaStream_t stream, fa_status *status) {
    constexpr int D = FA_MMA_HEAD_DIM;
    if (kind == LARGE) return launch_config<typename Choose<T, D, LARGE>::Config>(args, blocks, stream, status);
    if (kind == SMALL) return launch_config<typename Choose<T, D, SMALL>::Config>(args, blocks, stream, status);
    return launch_config<typename Choose<T, D, GENERAL>::Config>(args, blocks, stream, status);
}

} // namespace

FA_MMA_LAUNCH(FA_MMA_HEAD_DIM) {
    if (args.problem.dtype == FA_F16) return launch_kind<__half>(args, kind, blocks, stream, status);
    return launch_kind<__nv_bfloat16>(args, kind, blocks, stream, status);
}

#else // the host part

#define FA_MMA_DECLARE(head_dim) FA_MMA_LAUNCH(head_dim);
FA_MMA_HEAD_DIMS(FA_MMA_DECLARE)

namespace {

constexpr int64_t MAX_LENGTH = int64_t(1) << 28;        // queries or keys: the kernel adds up to four such numbers in 32 bits
constexpr int64_t MAX_BLOCKS = (int64_t(1) << 31) - 1;

struct Shape {
    int tile_m, tile_n, stages, threads;
    size_t shared_bytes;
};

template <class C> constexpr Shape shape_of() {
#if !defined(FA_MMA_TUNE) && !defined(FA_MMA_TUNE_SMALL)
    static_assert(C::SHARED_BYTES <= 99 * 1024, "fits a block of sm_86 and sm_89");
#endif
    return {C::TILE_M, C::TILE_N, C::STAGES, C::THREADS, C::SHARED_BYTES};
}

struct Instance {
    int head_dim;
    fa_code (*launch)(const MmaArgs &, int kind, unsigned blocks, cudaStream_t, fa_status *);
    Shape shape[KINDS];
};

#define FA_MMA_INSTANCE(D)                                                                                             \
    {D,                                                                                                                \
     FA_MMA_JOIN(D),                                                                                                   \
     {shape_of<Choose<__half, D, LARGE>::Config>(), shape_of<Choose<__half, D, SMALL>::Config>(),                      \
      shape_of<Choose<__half, D, GENERAL>::Config>()}},
constexpr Instance INSTANCES[] = {FA_MMA_HEAD_DIMS(FA_MMA_INSTANCE)};

/* Index of the narrowest instance that holds both head dims; -1: none in this build. */
int instance_of(const fa_problem *p) {
    const int wanted = p->head_dim > p->head_dim_v ? p->head_dim : p->head_dim_v;
    for (int i = 0; i < int(sizeof(INSTANCES) / sizeof(*INSTANCES)); ++i)
        if (INSTANCES[i].head_dim >= wanted) return i;
    return -1;
}

/* Whether rows consist of whole 16-byte aligned chunks of neighbouring elements. */
bool has_chunks(const fa_operand &x, int columns) {
    return x.stride[3] == 1 && columns % 8 == 0 && reinterpret_cast<uintptr_t>(x.data) % 16 == 0 &&
           x.stride[0] % 8 == 0 && x.stride[1] % 8 == 0 && x.stride[2] % 8 == 0;
}

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

Kind kind_of(const fa_problem *p, const fa_device_info *device, const Instance &instance) {
    // A folded scale multiplies -inf, so it is neither 0 nor rounded to 0.
    const bool folds = p->scale > 1e-30 && p->scale < 1e30;
    if (!folds || p->softcap > 0 || p->bias.data || p->mask.data || !has_chunks(p->q, p->head_dim) ||
        !has_chunks(p->k, p->head_dim) || !has_chunks(p->v, p->head_dim_v))
        return GENERAL;
    const int64_t blocks = divide_up(p->seq_q, instance.shape[LARGE].tile_m) * p->batch * p->heads;
    return blocks < device->sm_count && !p->batch_invariant ? SMALL : LARGE;
}

const char *rejects(const fa_problem *p, const fa_device_info *device) {
    if (device->cc < 80) return "needs compute capability 8.0 (Ampere) or newer";
    if (p->dtype != FA_F16 && p->dtype != FA_BF16) return "takes float16 and bfloat16 only";
    const int index = instance_of(p);
    if (index < 0) return "this build leaves out the instance for that head_dim";
    if (p->seq_q > MAX_LENGTH || p->seq_k > MAX_LENGTH) return "takes at most 2^28 queries and keys";
    const Shape &shape = INSTANCES[index].shape[kind_of(p, device, INSTANCES[index])];
    if (divide_up(p->seq_q, shape.tile_m) * p->batch * p->heads > MAX_BLOCKS) return "needs more than 2^31 blocks";
    if (shape.shared_bytes > device->smem_per_block) return "needs 99 KB of shared memory a block";
    return nullptr;
}

fa_code plan(const fa_problem *p, const fa_device_info *device, fa_plan *plan, fa_status *) {
    const int index = instance_of(p);
    const Kind kind = kind_of(p, device, INSTANCES[index]);
    const Shape &shape = INSTANCES[index].shape[kind];
    plan->config = index * KINDS + kind;
    plan->tile_m = shape.tile_m;
    plan->tile_n = shape.tile_n;
    plan->splits = 1;
    plan->stages = shape.stages;
    plan->threads = shape.threads;
    plan->blocks = divide_up(p->seq_q, shape.tile_m) * p->batch * p->heads;
    plan->smem_bytes = shape.shared_bytes;

    // Heads walked together: where row blocks differ in length, as many as half of the L2 cache holds, else one by one.
    const int64_t pairs = p->batch * p->heads, bytes = p->seq_k * (p->head_dim + p->head_dim_v) * 2;
    int64_t section = 1;
    if (p->right != FA_UNBOUNDED && bytes > 0)
        section = int64_t(device->l2_bytes / 2) / bytes * (p->heads / p->heads_kv);
    plan->extra[0] = section < 1 ? 1 : section < pairs ? section : pairs;
    return FA_OK;
}

int clamp_bound(int64_t bound) { return int(bound < 2 * MAX_LENGTH ? bound : 2 * MAX_LENGTH); }

fa_code launch(const fa_problem *p, const fa_plan *plan, const fa_launch *launch, fa_status *status) {
    if (plan->blocks == 0) return FA_OK;
    const MmaArgs args = {
        .problem = *p,
        .score = fa::score_params(*p),
        .visible = {.left = clamp_bound(p->left),
                    .right = clamp_bound(p->right),
                    .diagonal = int(p->diagonal),
                    .key_begin = int(p->key_begin),
                    .key_end = int(p->key_end)},
        .heads = int(p->heads),
        .group = int(p->heads / p->heads_kv),
        .row_blocks = int(divide_up(p->seq_q, plan->tile_m)),
        .pairs = int(p->batch * p->heads),
        .section = int(plan->extra[0]),
        .chunks_q = has_chunks(p->q, p->head_dim),
        .chunks_k = has_chunks(p->k, p->head_dim),
        .chunks_v = has_chunks(p->v, p->head_dim_v),
        .chunks_o = has_chunks(p->out, p->head_dim_v),
    };
    return INSTANCES[plan->config / KINDS].launch(args, plan->config % KINDS, unsigned(plan->blocks),
                                                  static_cast<cudaStream_t>(launch->stream), status);
}

} // namespace

extern "C" FA_EXPORT const fa_kernel fa_row_mma_sm80;
const fa_kernel fa_row_mma_sm80 = {
    .abi = FA_ROW_ABI,
    .device = FA_CUDA,
    .name = "mma_sm80",
    .summary = "mma.sync tensor cores with cp.async pipelines, from Ampere on",
    .rejects = rejects,
    .declines = nullptr,
    .plan = plan,
    .launch = launch,
};

#endif
