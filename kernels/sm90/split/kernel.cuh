/* The device side of wgmma_split_sm90: a tile's keys dealt to the warpgroups of a cluster. See wgmma_split_sm90.cu; the
 * merge of what they find is in sm90/split/merge.cuh.
 *
 * Why no waiter falls two phases behind (see sm90/forward/kernel.cuh):
 *
 *   full_q, arrived: one phase a launch.
 *
 *   full of a ring: all four warps of a warpgroup wait; the next phase ends after the refill of the stage, and that
 *   comes after a named barrier of the same warps (Ring::refill).
 *
 * No block sends to one that has not begun or has ended: the cluster's barrier comes before every send, and a block
 * ends after `arrived`, which counts the bytes of all others. dependency_wait() comes before every access to memory and
 * before every way out, so a launch that follows one that has not ended knows that those before it have. */
#pragma once
#include <float.h> // FLT_MAX

#include "common/score.cuh"
#include "common/softmax.cuh"
#include "sm90/common/cluster.cuh"
#include "sm90/common/softmax.cuh"
#include "sm90/common/tma.cuh"
#include "sm90/common/wgmma.cuh"
#include "sm90/split/merge.cuh"

namespace fa::sm90::split {

/* K or V of one warpgroup: kStages blocks, filled by one thread of its first warp. */
template <class C> struct Ring {
    const CUtensorMap *map;
    char *blocks;
    uint64_t *full;
    int head, batch;

    __device__ __forceinline__ void init() const {
#pragma unroll
        for (int stage = 0; stage < C::kStages; ++stage) mbarrier_init(full + stage, 1);
    }
    __device__ __forceinline__ void fill(const Params &params, const Work &work, int step) const {
        const int stage = step % C::kStages;
        mbarrier_arrive_expect(full + stage, C::kBlockBytes);
        tma_load_tile<C::kColumns, C::kTileN>(blocks + stage * C::kBlockBytes, map, full + stage,
                                              work.first_key<C>(step) - params.key_begin, head, batch, kEvictLast);
    }
    /* Address of block `step` once it is there. */
    __device__ __forceinline__ uint32_t wait(int step) const {
        mbarrier_wait(full + step % C::kStages, step / C::kStages & 1);
        return shared_address(blocks + step % C::kStages * C::kBlockBytes);
    }
    /* The stage of block `step` is filled again once all four warps have read it. The warpgroup calls it. */
    __device__ __forceinline__ void refill(const Params &params, const Work &work, int step) const {
        if (step + C::kStages >= work.count) return;
        const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
        named_barrier_sync(1 + warp / 4, 128);
        if (warp % 4 == 0 && elect_one()) fill(params, work, step + C::kStages);
    }
};

/* One block of keys: raises the states, and the highest scores, and turns scores into weights, in place. Returns the
 * factors for what was accumulated before. Both rows and two accumulators each go side by side: no other warp
 * hides the latency of a single chain. */
template <int Count>
__device__ __forceinline__ float2 soften(float (&scores)[Count], RowState (&state)[2], float (&highest)[2],
                                         float multiplier) {
    float maximum[4] = {scores[0], scores[1], scores[2], scores[3]};
#pragma unroll
    for (int i = 4; i < Count; ++i) maximum[i & 3] = fmaxf(maximum[i & 3], scores[i]);
    float factor[2], by[2], shift[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        highest[half] = fmaxf(highest[half], quad_max(fmaxf(maximum[2 * half], maximum[2 * half + 1])));
        const float c = finite_score(__fmul_rn(highest[half], multiplier));
        factor[half] = exp2_fast(__fsub_rn(state[half].maximum, c));
        state[half].maximum = c, state[half].sum *= factor[half];
        by[half] = row_factor(highest[half], multiplier);
        shift[half] = __fmul_rn(highest[half], by[half]);
    }
    float sum[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < Count; ++i) {
        scores[i] = exp2_fast(fmaf(scores[i], by[(i >> 1) & 1], -shift[(i >> 1) & 1]));
        sum[i & 3] += scores[i];
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) state[half].sum += sum[2 * half] + sum[2 * half + 1];
    return make_float2(factor[0], factor[1]);
}

/* The scores of a block, softened: hidden keys are excluded. `row`: this thread's first. */
template <class C, bool Capped, int Count>
__device__ __forceinline__ float2 soften_block(const Params &params, const Work &work, int row, int step,
                                               float (&scores)[Count], RowState (&state)[2], float (&highest)[2]) {
    if constexpr (Capped) {
#pragma unroll
        for (int i = 0; i < Count; ++i) scores[i] = score_of(params.score, scores[i]);
    }
    const int first = work.first_key<C>(step);
    if (first < work.common.begin || first + C::kTileN > work.common.end) {
        const Span<int> low = row_span(params, row), high = row_span(params, row + 8);
        mask_scores(scores, {low.begin - first, high.begin - first}, {low.end - first, high.end - first},
                    2 * (threadIdx.x % 4));
    }
    return soften(scores, state, highest, Capped ? 1.0f : params.score.scale_log2);
}

/* The output so far, by the factors of a thread's two rows. */
template <int Count> __device__ __forceinline__ void rescale(float (&out)[Count], float2 factor) {
#pragma unroll
    for (int i = 0; i < Count; ++i) out[i] *= (i >> 1) & 1 ? factor.y : factor.x;
}

/* Start S = Q K^T and O += P V for a block of keys or values in shared memory. */
template <class T, class C>
__device__ __forceinline__ void start_scores(float (&scores)[C::kTileN / 2], uint32_t queries, uint32_t keys) {
    wgmma_fence();
    gemm_qk<T, C::kColumns>(scores, queries, kTileM * kSlabRowBytes, keys, C::kTileN * kSlabRowBytes);
    wgmma_commit();
}
template <class T, class C>
__device__ __forceinline__ void start_out(float (&out)[C::kColumns / 2], uint32_t (&weights)[C::kTileN / 4],
                                          uint32_t values) {
    wgmma_pin(weights);
    wgmma_pin(out);
    wgmma_fence();
    gemm_pv<T>(out, weights, values, C::kTileN * kSlabRowBytes, 1);
    wgmma_commit();
}

/* The online softmax over this warpgroup's share: out and states. */
template <class T, class C, bool Capped>
__device__ __forceinline__ void attend(const Params &params, const Work &work, const Ring<C> &k, const Ring<C> &v,
                                       uint32_t queries, float (&out)[C::kColumns / 2], RowState (&state)[2]) {
    constexpr int kScores = C::kTileN / 2;
    const float multiplier = Capped ? 1.0f : params.score.scale_log2;
    const int row = work.row + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    float scores[kScores], highest[2] = {-FLT_MAX, -FLT_MAX}; // no product is lower
    uint32_t weights[kScores / 2];
    state[0].maximum = state[1].maximum = -FLT_MAX; // finite where no key was seen

    const auto soften_at = [&](float(&scores)[kScores], int step) {
        return soften_block<C, Capped>(params, work, row, step, scores, state, highest);
    };

    const int last = work.count - 1;
    if (last < 0) return;
    start_scores<T, C>(scores, queries, k.wait(0));
    wgmma_wait<0>();
    wgmma_pin(scores);
    if constexpr (C::kResident) {
        // At most two blocks: the scores of the second are computed while those of the first are softened, and the
        // first meets V while the second is softened.
        if (last == 0) {
            soften_at(scores, 0);
            pack_scores<T>(weights, scores);
        } else {
            float others[kScores];
            start_scores<T, C>(others, queries, k.wait(1));
            soften_at(scores, 0);
            pack_scores<T>(weights, scores);
            start_out<T, C>(out, weights, v.wait(0));
            wgmma_wait<1>();
            wgmma_pin(others);
            const float2 factor = soften_at(others, 1);
            wgmma_pin(others);
            // The branch keeps ptxas from moving the exponentials to after the wait.
            if (__any_sync(0xffffffff, factor.x != 1.0f || factor.y != 1.0f)) {
                wgmma_wait<0>();
                wgmma_pin(out);
                rescale(out, factor);
            }
            wgmma_wait<0>();
            wgmma_pin(out);
            pack_scores<T>(weights, others);
        }
    } else {
        // The scores of a block are computed together with the weights of the block before times V. Both are waited for
        // before softening: to overlap it with the latter gains less than the earlier refill of V.
        k.refill(params, work, 0);
        soften_at(scores, 0);
        pack_scores<T>(weights, scores);
#pragma unroll 1
        for (int step = 1; step <= last; ++step) {
            start_scores<T, C>(scores, queries, k.wait(step));
            start_out<T, C>(out, weights, v.wait(step - 1));
            wgmma_wait<1>();
            wgmma_pin(scores);
            k.refill(params, work, step);
            wgmma_wait<0>();
            wgmma_pin(out);
            v.refill(params, work, step - 1);
            const float2 factor = soften_at(scores, step);
            if (__any_sync(0xffffffff, factor.x != 1.0f || factor.y != 1.0f)) rescale(out, factor);
            pack_scores<T>(weights, scores);
        }
    }
    start_out<T, C>(out, weights, v.wait(last));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        state[half].sum = quad_sum(state[half].sum);
        if constexpr (!Capped) // whose highest weight is 1
            state[half].sum += weight_rounding<T>(highest[half], multiplier, state[half].maximum);
    }
    wgmma_wait<0>();
    wgmma_pin(out);
}

/* Merges the shares of all warpgroups, of the block or of its cluster, and writes the rows that are this block's. */
template <class T, class C>
__device__ __forceinline__ void merge_shares(const Params &params, const Work &work, float (&out)[C::kColumns / 2],
                                             RowState (&state)[2], const Landing<C> &landing, float *weights) {
    if (C::kByRows && params.split_shift == 0) {
        merge_rows<T, C>(params, work, out, state, reinterpret_cast<float *>(landing.partials), landing.states,
                         weights);
        return;
    }
    publish<C>(params, work.part, out, state, landing);
    __syncthreads();
    if (params.split_shift) mbarrier_wait(landing.arrived, 0);
    const int row = work.row + (int(cluster_rank()) * kTileM >> params.split_shift);
    if (!C::kByRows && params.split_shift == 0)
        finish<T, C, 1>(params, row, landing);
    else if (params.split_shift == 1)
        finish<T, C, 2>(params, row, landing);
    else
        finish<T, C, 0>(params, row, landing);
}

template <class T, class C, bool Capped>
__global__ void __launch_bounds__(C::kThreads, C::kBlocks)
    wgmma_split_sm90_kernel(const __grid_constant__ Params params) {
    FA_CHAOS_BEGIN();
    extern __shared__ __align__(1024) char queries[];
    char *rings = queries + C::kQueryBytes;
    float4 *partials = reinterpret_cast<float4 *>(rings + C::kWarpgroups * C::kRingBytes);
    float2 *states = reinterpret_cast<float2 *>(partials + C::kPartialBytes / 16);
    float *weights = reinterpret_cast<float *>(states + C::kStateBytes / 8);
    uint64_t *full_q = reinterpret_cast<uint64_t *>(weights + C::kWeightBytes / 4), *arrived = full_q + 1;

    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), warpgroup = warp / 4;
    const Work work = Work::find<C>(params, warpgroup);
    const int key_head = params.group == 1 ? blockIdx.y : blockIdx.y / unsigned(params.group), batch = blockIdx.z;
    char *blocks = rings + warpgroup * C::kRingBytes;
    uint64_t *full = arrived + 1 + warpgroup * 2 * C::kStages;
    const Ring<C> k{&params.k, blocks, full, params.k_head ? key_head : 0, params.k_batch ? batch : 0};
    const Ring<C> v{&params.v, blocks + C::kStages * C::kBlockBytes, full + C::kStages, params.v_head ? key_head : 0,
                    params.v_batch ? batch : 0};

    // One thread of each warpgroup prepares its barriers and starts its loads before anybody waits.
    if (warp % 4 == 0) {
        if (elect_one()) {
            k.init();
            v.init();
            if (warpgroup == 0) {
                mbarrier_init(full_q, 1);
                mbarrier_init(arrived, 1);
                tensor_map_prefetch(&params.q);
            }
            mbarrier_init_fence();
            tensor_map_prefetch(&params.k);
            tensor_map_prefetch(&params.v);
            if (warpgroup == 0) {
                mbarrier_arrive_expect(full_q, C::kQueryBytes);
                mbarrier_arrive_expect(arrived, C::kSentBytes - (C::kSentBytes >> params.split_shift));
            }
        }
        dependency_wait();
        if (elect_one()) {
            if (warpgroup == 0)
                tma_load_tile<C::kColumns, kTileM>(queries, &params.q, full_q, work.row, params.q_head ? blockIdx.y : 0,
                                                   params.q_batch ? blockIdx.z : 0, kEvictFirst);
#pragma unroll
            for (int step = 0; step < C::kStages; ++step)
                if (step < work.count) k.fill(params, work, step);
        }
    }
    // Reads the words of the constant bank that only the end needs: a miss costs less here.
    asm volatile("" ::"l"(params.out), "l"(params.out_row), "l"(params.lse), "l"(params.lse_row));
    __syncthreads();
    if (warp % 4 == 0 && elect_one()) { // V after the K of every warpgroup
#pragma unroll
        for (int step = 0; step < C::kStages; ++step)
            if (step < work.count) v.fill(params, work, step);
    }
    __syncwarp();
    if (params.split_shift) cluster_arrive_relaxed(); // `arrived` is ready
    dependency_wait();
    dependency_release();
    if (params.split_shift) cluster_wait();

    float out[C::kColumns / 2];
#pragma unroll
    for (int i = 0; i < C::kColumns / 2; ++i) out[i] = 0;
    RowState state[2];
    mbarrier_wait(full_q, 0);
    attend<T, C, Capped>(params, work, k, v, shared_address(queries), out, state);

    merge_shares<T, C>(params, work, out, state, {partials, states, arrived, work.parts}, weights);
}

} // namespace fa::sm90::split
