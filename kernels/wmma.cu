/* wmma: fused attention through nvcuda::wmma, the tensor-core interface of CUDA C++, for Ampere and newer.
 *
 * A block takes TILE_M query rows of one head and walks over the keys TILE_N at a time. One producer warp copies K and
 * V into a ring of two slots each with cp.async; consumer warps own 16 query rows each and, per key tile,
 *
 *     1. multiply Q K^T into accumulator fragments and store them to a strip of shared memory of their own,
 *     2. run the online softmax there, two lanes a row, and leave the weights in the strip, rounded to 16 bits,
 *     3. rescale the output fragments and add weights times V.
 *
 * The warps meet at the ring's barriers alone. WMMA hides which element of a fragment a thread holds, so a factor a row
 * reaches the fragments through the interface itself: an accumulator fragment loaded with a leading dimension of 0
 * holds at every element its row's factor, and fragments of one type agree on where an element is.
 *
 * Float16 and bfloat16, head_dim and head_dim_v up to 128 (padded with zeros to 64 or 128), everything a call can ask
 * for, any strides; rows that are not 16-byte aligned are copied element by element. The scores' trip through shared
 * memory is what mma_sm80 saves.
 *
 *     python -m bench measure --preset history --rows wmma
 *
 * @instance d64 -DFA_WMMA_HEAD_DIM=64
 * @instance d128 -DFA_WMMA_HEAD_DIM=128
 */
#include "fa.h"            // fa_problem, fa_kernel
#include "launch.cuh"      // FA_CUDA_TRY
#include "score.cuh"       // score_params
#include "wmma_kernel.cuh" // wmma_kernel, Params
#include "wmma_shape.cuh"  // Config

namespace fa::wmma_row {

fa_code launch_64(const fa_problem *p, const fa_plan *plan, cudaStream_t stream, fa_status *status);
fa_code launch_128(const fa_problem *p, const fa_plan *plan, cudaStream_t stream, fa_status *status);

#ifdef FA_INSTANCE

template <typename T, class C, bool SIMPLE>
fa_code launch_as(const Params &params, const fa_plan *plan, cudaStream_t stream, fa_status *status) {
    const auto kernel = wmma_kernel<T, C, SIMPLE>;
    FA_TRY(fa_allow_smem(kernel, plan->smem_bytes, status));
    FA_CHAOS_ARM(stream, status);
    kernel<<<unsigned(plan->blocks), C::THREADS, plan->smem_bytes, stream>>>(params);
    FA_CUDA_TRY(status, cudaGetLastError());
    return FA_OK;
}

template <class C>
fa_code launch_shape(const fa_problem *p, const fa_plan *plan, cudaStream_t stream, fa_status *status) {
    const Params params = {
        .p = *p,
        .options = {score_params(*p), in_fours(p->bias, int(fa_dtype_size(p->bias_dtype))), in_fours(p->mask, 1)},
        .tiles_m = unsigned((p->seq_q + C::TILE_M - 1) / C::TILE_M),
        .q_aligned = rows_aligned(p->q, p->head_dim),
        .k_aligned = rows_aligned(p->k, p->head_dim),
        .v_aligned = rows_aligned(p->v, p->head_dim_v),
        .out_aligned = rows_aligned(p->out, p->head_dim_v),
    };
    // -inf times a scale that rounds to 0 would be NaN
    const bool simple = params.options.score.scale_log2 > 1e-30f && p->softcap == 0 && !p->bias.data && !p->mask.data;
    if (p->dtype == FA_F16)
        return simple ? launch_as<__half, C, true>(params, plan, stream, status)
                      : launch_as<__half, C, false>(params, plan, stream, status);
    return simple ? launch_as<__nv_bfloat16, C, true>(params, plan, stream, status)
                  : launch_as<__nv_bfloat16, C, false>(params, plan, stream, status);
}

#define FA_JOIN_(a, b) a##b
#define FA_JOIN(a, b)  FA_JOIN_(a, b)

fa_code FA_JOIN(launch_, FA_WMMA_HEAD_DIM)(const fa_problem *p, const fa_plan *plan, cudaStream_t stream,
                                           fa_status *status) {
    return plan->config ? launch_shape<Config<FA_WMMA_HEAD_DIM, true>>(p, plan, stream, status)
                        : launch_shape<Config<FA_WMMA_HEAD_DIM, false>>(p, plan, stream, status);
}

#else

namespace {

constexpr int MAX_HEAD_DIM = 128;
constexpr int64_t MAX_LENGTH = 1 << 30;  // so that 32-bit row and key numbers hold
constexpr int64_t WIDE_FROM_KEYS = 1024; // batch_invariant: the shape follows from seq_k alone

int padded(const fa_problem *p) { return (p->head_dim > p->head_dim_v ? p->head_dim : p->head_dim_v) <= 64 ? 64 : 128; }

template <class C> int64_t blocks_of(const fa_problem *p) {
    return (p->seq_q + C::TILE_M - 1) / C::TILE_M * p->heads * p->batch;
}

const char *rejects(const fa_problem *p, const fa_device_info *device) {
    if (device->cc < 80) return "needs compute capability 8.0 (Ampere) or newer";
    if (p->dtype != FA_F16 && p->dtype != FA_BF16) return "takes float16 and bfloat16";
    if (p->head_dim > MAX_HEAD_DIM || p->head_dim_v > MAX_HEAD_DIM) return "takes head_dim and head_dim_v up to 128";
    if (p->seq_q > MAX_LENGTH || p->seq_k > MAX_LENGTH) return "takes sequences of up to 2^30 rows";
    const int64_t blocks = padded(p) == 64 ? blocks_of<Config<64, false>>(p) : blocks_of<Config<128, false>>(p);
    if (blocks > INT32_MAX) return "takes up to 2^31 tiles of queries";
    return nullptr;
}

template <class C> fa_code plan_shape(const fa_problem *p, int config, fa_plan *plan) {
    plan->config = config;
    plan->tile_m = C::TILE_M;
    plan->tile_n = C::TILE_N;
    plan->splits = 1;
    plan->stages = C::STAGES;
    plan->threads = C::THREADS;
    plan->blocks = blocks_of<C>(p);
    plan->smem_bytes = sizeof(typename C::Shared);
    return FA_OK;
}

/* The wide shape where it fits and its blocks, one a multiprocessor at a time, leave at most a quarter of the rows of
 * their rounds empty. (With three tenths, B2 S1024, D64 H16 takes 62 us against 57 in the small shape and D128 H8 49
 * against 52.) */
template <int HEAD_DIM> fa_code plan_dim(const fa_problem *p, const fa_device_info *device, fa_plan *plan) {
    using Wide = Config<HEAD_DIM, true>;
    const int64_t sms = device->sm_count, rounds = (blocks_of<Wide>(p) + sms - 1) / sms;
    const bool full = 4 * p->seq_q * p->heads * p->batch >= 3 * rounds * sms * Wide::TILE_M;
    const bool wide = p->batch_invariant ? p->seq_k >= WIDE_FROM_KEYS : full;
    if (wide && sizeof(typename Wide::Shared) <= device->smem_per_block) return plan_shape<Wide>(p, 1, plan);
    return plan_shape<Config<HEAD_DIM, false>>(p, 0, plan);
}

fa_code plan(const fa_problem *p, const fa_device_info *device, fa_plan *plan, fa_status *) {
    return padded(p) == 64 ? plan_dim<64>(p, device, plan) : plan_dim<128>(p, device, plan);
}

fa_code launch(const fa_problem *p, const fa_plan *plan, const fa_launch *launch, fa_status *status) {
    cudaStream_t stream = static_cast<cudaStream_t>(launch->stream);
    if (plan->blocks == 0) return FA_OK;
    return padded(p) == 64 ? launch_64(p, plan, stream, status) : launch_128(p, plan, stream, status);
}

} // namespace

#endif

} // namespace fa::wmma_row

#ifndef FA_INSTANCE
extern "C" FA_EXPORT const fa_kernel fa_row_wmma;
const fa_kernel fa_row_wmma = {
    .abi = FA_ROW_ABI,
    .device = FA_CUDA,
    .name = "wmma",
    .summary = "fused kernel through nvcuda::wmma, scores in shared memory",
    .rejects = fa::wmma_row::rejects,
    .declines = nullptr,
    .plan = fa::wmma_row::plan,
    .launch = fa::wmma_row::launch,
};
#endif
