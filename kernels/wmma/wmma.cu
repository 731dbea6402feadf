/* wmma: fused attention through nvcuda::wmma, the tensor-core interface of CUDA C++, for Ampere and newer.
 *
 * A block takes kTileM query rows of one head and walks over the keys kTileN at a time. One producer warp copies K and
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
 * Float16 and bfloat16, head_dim and head_dim_v up to 128 (padded with zeros to 64 or 128), everything a dense call can
 * ask for but dropout, any strides; rows that are not 16-byte aligned are copied element by element. The scores' trip
 * through shared memory is what mma_sm80 saves.
 *
 *     python -m bench measure --preset history --kernels wmma
 *
 * @pass-an-arch (pipeline.cuh)
 * @instances instance.cu
 * @instance d{64,128} {1}
 * @core (?!)
 */
#include "common/instances.cuh"
#include "common/launch.cuh" // fa_own
#include "common/limits.cuh" // lengths_fit
#include "common/score.cuh"  // score_params
#include "fa.h"              // fa_forward, fa_kernel
#include "wmma/config.cuh"
#include "wmma/kernel.cuh" // in_fours, rows_aligned
#include "wmma/shape.cuh"  // Config

namespace fa::wmma_tiles {

FA_INSTANCES(FA_DECLARE_INSTANCE)

namespace {

struct Instance {
    int head_dim;
    Launch *launch; // null: this build leaves it out
};
#define FA_ENTRY(name, head_dim) {head_dim, name},
const Instance kInstances[] = {FA_INSTANCES(FA_ENTRY)}; // ascending

/* The narrowest that is wide enough; NULL: it is left out. */
const Instance *instance_for(int head_dim) {
    for (const Instance &i : kInstances)
        if (i.launch && i.head_dim >= head_dim) return &i;
    return nullptr;
}

constexpr int64_t kWideFromKeys = 1024; // batch_invariant: the shape follows from seq_k alone

template <class C> int64_t tiles_m(const fa_forward &p) { return (p.seq_q + C::kTileM - 1) / C::kTileM; }
template <class C> int64_t blocks_of(const fa_forward &p) { return tiles_m<C>(p) * p.heads * p.batch; }

template <class C> fa_answer plan_shape(const fa_problem *problem, bool wide, fa_plan *plan, fa_why *why) {
    const fa_forward &p = problem->forward;
    plan->threads = C::kThreads;
    plan->blocks = blocks_of<C>(p);
    plan->smem_bytes = sizeof(typename C::Shared);
    plan->keep = true;
    if (plan->blocks > INT32_MAX) return fa_because(why, FA_REFUSES, FA_WHY_TILES, kMaxTilesBits, 0, 0);
    const float scale = score_params(p).scale_log2;
    fa_own<Own>(plan) = {
        .head_dim = C::kHeadDim,
        .wide = wide,
        // -inf times a scale that rounds to 0 would be NaN
        .simple = scale > 1e-30f && p.softcap == 0 && !p.bias.data && !p.mask.data && !problem->forward.alibi.data,
        .bias_in_fours = in_fours(p.bias, int(fa_dtype_size(p.bias_dtype))),
        .mask_in_fours = in_fours(p.mask, 1),
        .q_aligned = rows_aligned(p.q, p.head_dim),
        .k_aligned = rows_aligned(p.k, p.head_dim),
        .v_aligned = rows_aligned(p.v, p.head_dim_v),
        .out_aligned = rows_aligned(p.out, p.head_dim_v),
        .tiles_m = unsigned(tiles_m<C>(p)),
    };
    return FA_TAKES;
}

/* The wide shape where it fits and its blocks, one a multiprocessor at a time, leave at most a quarter of the rows of
 * their rounds empty. (With three tenths, B2 S1024, D64 H16 takes 62 us against 57 in the small shape and D128 H8 49
 * against 52.) */
template <int kHeadDim>
fa_answer plan_dim(const fa_problem *problem, const fa_device_info *device, fa_plan *plan, fa_why *why) {
    using Wide = Config<kHeadDim, true>;
    const fa_forward &p = problem->forward;
    const int64_t sms = device->sm_count, rounds = (blocks_of<Wide>(p) + sms - 1) / sms;
    const bool full = 4 * p.seq_q * p.heads * p.batch >= 3 * rounds * sms * Wide::kTileM;
    const bool wide = problem->batch_invariant ? p.seq_k >= kWideFromKeys : full;
    if (wide && sizeof(typename Wide::Shared) <= device->smem_per_block)
        return plan_shape<Wide>(problem, true, plan, why);
    return plan_shape<Config<kHeadDim, false>>(problem, false, plan, why);
}

fa_answer plan(const fa_problem *problem, const fa_device_info *device, fa_plan *plan, fa_why *why) {
    const fa_forward &p = problem->forward;
    const int widest = p.head_dim > p.head_dim_v ? p.head_dim : p.head_dim_v;
    constexpr int kMaxHeadDim = 128;
    if (widest > kMaxHeadDim) return fa_because(why, FA_REFUSES, FA_WHY_HEAD_DIM, kMaxHeadDim, 0, 0);
    if (!lengths_fit(p.seq_q, p.seq_k, kBitsInPairs, why)) return FA_REFUSES;
    const Instance *found = instance_for(widest);
    if (!found) return fa_because(why, FA_REFUSES, FA_WHY_INSTANCE, 0, 0, 0);
    return found->head_dim == 64 ? plan_dim<64>(problem, device, plan, why) : plan_dim<128>(problem, device, plan, why);
}

fa_code launch(const fa_problem *problem, const fa_plan *plan, const fa_launch *launch) {
    return instance_for(fa_own<Own>(plan).head_dim)->launch(*problem, *plan, *launch);
}

} // namespace
} // namespace fa::wmma_tiles

FA_DEFINE_KERNEL(wmma) = {
    .abi = FA_KERNEL_ABI,
    .op = FA_FORWARD,
    .device = FA_CUDA,
    .name = "wmma",
    .summary = "fused kernel through nvcuda::wmma, scores in shared memory",
    .cc_from = 80,
    .cc_to = 0,
    .dtypes = fa::kFloat16Bits,
    .takes = FA_WITH_BIAS | FA_WITH_MASK | FA_WITH_SINKS | FA_WITH_SOFTCAP | FA_WITH_WINDOW | FA_WITH_HEAD_DIM_V |
             FA_WITH_ALIBI,
    .plan = fa::wmma_tiles::plan,
    .launch = fa::wmma_tiles::launch,
};
