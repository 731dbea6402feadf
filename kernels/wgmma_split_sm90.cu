/* wgmma_split_sm90: forward attention for few query tiles (Hopper).
 *
 * With 64-row tiles and one tile a block, a small call leaves most multiprocessors idle and each block alone with all
 * keys. Here the keys of a tile are dealt block-wise to the WARPGROUPS of a block and to the blocks of a cluster; each
 * warpgroup runs the online softmax over its share by itself (own ring of K and V stages, filled by TMA; products by
 * wgmma; no barrier with anybody), and the partial results meet once, in shared memory, distributed over the cluster:
 * one launch, no workspace, no second kernel.
 *
 *   merge: m = max_p m_p;  out = sum_p 2^(m_p - m) out_p / sum_p 2^(m_p - m) sum_p
 *
 * Limits: sm_90, float16 and bfloat16, head_dim = head_dim_v a multiple of 8 up to 128, operands that TMA can address,
 * scale > 0; no bias, no boolean mask. Declines what fills the machine with whole tiles.
 * The launch is programmatic: its set-up overlaps the end of the kernel before it in the stream.
 *
 * Bench: python -m bench measure --preset small --rows wgmma_split_sm90
 * @arch sm_90a
 */
#include <algorithm> // std::min
#include <cuda_runtime.h>

#include "convert.cuh"
#include "fa.h"
#include "launch.cuh"
#include "mask.cuh"
#include "score.cuh"
#include "sm90_cluster.cuh"
#include "sm90_tensor_map.h"
#include "sm90_tma.cuh"
#include "sm90_wgmma.cuh"
#include "softmax.cuh"

/* ---- configuration ---- */

#ifndef FA_SPLIT_WARPGROUPS_64
#define FA_SPLIT_WARPGROUPS_64 4 // warpgroups a block where head_dim <= 64
#endif
#ifndef FA_SPLIT_WARPGROUPS_128
#define FA_SPLIT_WARPGROUPS_128 4
#endif
#ifndef FA_SPLIT_TILE_N_64
#define FA_SPLIT_TILE_N_64 64 // keys a block of K and V
#endif
#ifndef FA_SPLIT_TILE_N_128
#define FA_SPLIT_TILE_N_128 64
#endif
#ifndef FA_SPLIT_STAGES_64
#define FA_SPLIT_STAGES_64 2 // K and V blocks in flight for each warpgroup
#endif
#ifndef FA_SPLIT_STAGES_128
#define FA_SPLIT_STAGES_128 1
#endif
#ifndef FA_SPLIT_MAX_CLUSTER
#define FA_SPLIT_MAX_CLUSTER 8 // the largest portable cluster
#endif
#ifndef FA_SPLIT_DEPENDENT_LAUNCH
#define FA_SPLIT_DEPENDENT_LAUNCH 1
#endif

namespace {

using namespace fa;
using namespace fa::sm90;

constexpr int kTileM = 64; // query rows: one wgmma tile

template <int Columns> struct Config {
    static constexpr int kColumns = Columns; // head_dim, zero-padded by TMA
    static constexpr int kWarpgroups = Columns == 64 ? FA_SPLIT_WARPGROUPS_64 : FA_SPLIT_WARPGROUPS_128;
    static constexpr int kTileN = Columns == 64 ? FA_SPLIT_TILE_N_64 : FA_SPLIT_TILE_N_128;
    static constexpr int kStages = Columns == 64 ? FA_SPLIT_STAGES_64 : FA_SPLIT_STAGES_128;
    static constexpr int kThreads = kWarpgroups * 128;
    static constexpr int kPartialStride = Columns + 8; // floats; 8 spreads the rows of a fragment over the banks

    static constexpr int kQueryBytes = kTileBytes<Columns, kTileM>;
    static constexpr int kBlockBytes = kTileBytes<Columns, kTileN>; // of K, and of V
    static constexpr int kRingBytes = 2 * kStages * kBlockBytes;
    static constexpr int kPartialBytes = kTileM * kPartialStride * 4;
    // A warpgroup's ring, and after its last block its partial result.
    static constexpr int kShareBytes = ((kRingBytes > kPartialBytes ? kRingBytes : kPartialBytes) + 1023) / 1024 * 1024;
    static constexpr int kStateBytes = kWarpgroups * kTileM * 8; // (maximum, sum) of each row
    static constexpr int kBarrierBytes = (1 + 2 * kStages * kWarpgroups) * 8;
    static constexpr int kSharedBytes =
        1024 + kQueryBytes + kWarpgroups * kShareBytes + kStateBytes + kBarrierBytes; // 1024: alignment

    static_assert(Columns == 64 || Columns == 128);
    static_assert(kTileN % 16 == 0 && kTileN <= 256 && kWarpgroups >= 1 && kWarpgroups <= 8 && kStages >= 1);
    static_assert(kSharedBytes <= 227 * 1024, "a block of sm_90 has 227 KB of shared memory");
};

struct Params {
    CUtensorMap q, k, v; // k and v begin at key_begin and end at key_end: TMA reads zeros beyond
    fa_problem problem;
    ScoreParams score;
    int64_t tiles_m; // query tiles a head
    int splits;      // blocks a cluster
};

/* ---- device ---- */

template <class T> __device__ __forceinline__ uint32_t pack(float low, float high);
template <> __device__ __forceinline__ uint32_t pack<__half>(float low, float high) {
    __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<uint32_t *>(&pair);
}
template <> __device__ __forceinline__ uint32_t pack<__nv_bfloat16>(float low, float high) {
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<uint32_t *>(&pair);
}

/* Which part of the call this warpgroup does. */
struct Work {
    int64_t batch, head, head_kv, row; // row: first query of the tile
    KeyRange keys;                     // of the tile
    KeyRange common;                   // seen by every query of the tile
    int part, parts, count;            // this share does the blocks part, part + parts, ... : `count` of them
};

template <class C> __device__ __forceinline__ Work find_work(const Params &params, int warpgroup) {
    const fa_problem &p = params.problem;
    Work work;
    const int64_t tile = blockIdx.x / params.splits, head = tile / params.tiles_m;
    work.batch = head / p.heads;
    work.head = head % p.heads;
    work.head_kv = work.head / (p.heads / p.heads_kv);
    work.row = tile % params.tiles_m * kTileM;
    const int64_t end = min(work.row + kTileM, p.seq_q);
    work.keys = tile_keys(p, work.row, end);
    work.common = tile_common_keys(p, work.row, end);
    work.part = blockIdx.x % params.splits * C::kWarpgroups + warpgroup;
    work.parts = params.splits * C::kWarpgroups;
    const int64_t length = work.keys.empty() ? 0 : work.keys.end - work.keys.begin;
    const int blocks = static_cast<int>((length + C::kTileN - 1) / C::kTileN);
    work.count = work.part < blocks ? (blocks - work.part + work.parts - 1) / work.parts : 0;
    return work;
}

/* One warpgroup's K and V stages. Only its first thread fills them. */
template <class C> struct Ring {
    char *k, *v; // kStages blocks each
    uint64_t *full_k, *full_v;

    __device__ __forceinline__ void fill(const CUtensorMap *map, char *blocks, uint64_t *full, const Params &params,
                                         const Work &work, int step) const {
        const fa_problem &p = params.problem;
        const int stage = step % C::kStages;
        const int64_t key = work.keys.begin + (int64_t(work.part) + int64_t(step) * work.parts) * C::kTileN;
        mbarrier_arrive_expect(full + stage, C::kBlockBytes);
        tma_load_tile<C::kColumns, C::kTileN>(blocks + stage * C::kBlockBytes, map, full + stage,
                                              static_cast<int>(key - p.key_begin),
                                              p.k.stride[1] ? static_cast<int>(work.head_kv) : 0,
                                              p.k.stride[0] ? static_cast<int>(work.batch) : 0, kEvictLast);
    }
    __device__ __forceinline__ void fill_k(const Params &params, const Work &work, int step) const {
        fill(&params.k, k, full_k, params, work, step);
    }
    __device__ __forceinline__ void fill_v(const Params &params, const Work &work, int step) const {
        fill(&params.v, v, full_v, params, work, step);
    }
};

/* Scores of keys that a row does not see become -inf. `first` is the block's first key. */
template <int Count>
__device__ __forceinline__ void exclude(float (&scores)[Count], const fa_problem &p, int64_t row, int64_t first) {
    const int lane_column = 2 * (threadIdx.x % 4);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const KeyRange keys = row_keys(p, row + 8 * half);
        const int begin = static_cast<int>(max(keys.begin - first, int64_t(0)));
        const int end = static_cast<int>(min(max(keys.end - first, int64_t(0)), int64_t(2 * Count)));
#pragma unroll
        for (int i = 0; i < Count; ++i)
            if (((i >> 1) & 1) == half) {
                const int column = 8 * (i >> 2) + lane_column + (i & 1);
                if (column < begin || column >= end) scores[i] = -INFINITY;
            }
    }
}

/* One block of keys: scores -> weights (packed as the A operand), state raised, out rescaled. */
template <class T, int Count, int Outputs>
__device__ __forceinline__ void soften(float (&scores)[Count], uint32_t (&weights)[Count / 2], float (&out)[Outputs],
                                       RowState (&state)[2], float multiplier) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float maximum = -INFINITY;
#pragma unroll
        for (int i = 0; i < Count; ++i)
            if (((i >> 1) & 1) == half) maximum = fmaxf(maximum, scores[i]);
        maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffff, maximum, 1));
        maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffff, maximum, 2));
        const float factor = state[half].raise(maximum * multiplier);
        const float shift = softmax_shift(state[half].maximum);
        float sum = 0;
#pragma unroll
        for (int i = 0; i < Count; ++i)
            if (((i >> 1) & 1) == half) {
                scores[i] = exp2_fast(fmaf(scores[i], multiplier, -shift));
                sum += scores[i];
            }
        state[half].sum += sum;
#pragma unroll
        for (int i = 0; i < Outputs; ++i)
            if (((i >> 1) & 1) == half) out[i] *= factor;
    }
#pragma unroll
    for (int i = 0; i < Count / 2; ++i) weights[i] = pack<T>(scores[2 * i], scores[2 * i + 1]);
}

/* The online softmax over this warpgroup's share. */
template <class T, class C>
__device__ __forceinline__ void attend(const Params &params, const Work &work, const Ring<C> &ring, uint32_t queries,
                                       int warpgroup, float (&out)[C::kColumns / 2], RowState (&state)[2]) {
    const bool leader = threadIdx.x % 128 == 0;
    const bool capped = params.score.cap_log2 > 0;
    const float multiplier = capped ? 1.0f : params.score.scale_log2;
    const int64_t row = work.row + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    RingState<C::kStages> turn(0);
#pragma unroll 1
    for (int step = 0; step < work.count; ++step, turn.advance()) {
        float scores[C::kTileN / 2];
        mbarrier_wait(ring.full_k + turn.stage, turn.parity);
        wgmma_fence();
        gemm_qk<T, C::kColumns>(scores, queries, kTileM * kSlabRowBytes,
                                smem_address(ring.k + turn.stage * C::kBlockBytes), C::kTileN * kSlabRowBytes);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_pin(scores);
        if (step + C::kStages < work.count) { // all four warps have read this stage of K
            named_barrier_sync(1 + warpgroup, 128);
            if (leader) ring.fill_k(params, work, step + C::kStages);
        }
        if (capped) {
#pragma unroll
            for (int i = 0; i < C::kTileN / 2; ++i) scores[i] = score_of(params.score, scores[i]);
        }
        const int64_t first = work.keys.begin + (int64_t(work.part) + int64_t(step) * work.parts) * C::kTileN;
        if (first < work.common.begin || first + C::kTileN > work.common.end)
            exclude(scores, params.problem, row, first);
        uint32_t weights[C::kTileN / 4];
        soften<T>(scores, weights, out, state, multiplier);
        mbarrier_wait(ring.full_v + turn.stage, turn.parity);
        wgmma_pin(weights);
        wgmma_pin(out);
        wgmma_fence();
        gemm_pv<T>(out, weights, smem_address(ring.v + turn.stage * C::kBlockBytes), C::kTileN * kSlabRowBytes, 1);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_pin(out);
        if (step + C::kStages < work.count) {
            named_barrier_sync(1 + warpgroup, 128);
            if (leader) ring.fill_v(params, work, step + C::kStages);
        }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        state[half].sum += __shfl_xor_sync(0xffffffff, state[half].sum, 1);
        state[half].sum += __shfl_xor_sync(0xffffffff, state[half].sum, 2);
    }
}

/* This warpgroup's out (unnormalised) and state to shared memory. */
template <class C>
__device__ __forceinline__ void publish(const float (&out)[C::kColumns / 2], const RowState (&state)[2], float *partial,
                                        float2 *states) {
    const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4, column = 2 * (threadIdx.x % 4);
#pragma unroll
    for (int i = 0; i < C::kColumns / 2; i += 2)
        *reinterpret_cast<float2 *>(partial + (row + 8 * ((i >> 1) & 1)) * C::kPartialStride + 8 * (i >> 2) + column) =
            make_float2(out[i], out[i + 1]);
    if (threadIdx.x % 4 == 0) {
        states[row] = make_float2(state[0].maximum, state[0].sum);
        states[row + 8] = make_float2(state[1].maximum, state[1].sum);
    }
}

/* Each block of the cluster finishes its share of the tile's rows from the partial results of all. */
template <class T, class C>
__device__ __forceinline__ void merge(const Params &params, const Work &work, uint32_t partials, uint32_t states) {
    const fa_problem &p = params.problem;
    constexpr int kChunks = C::kColumns / 4;
    const int rank = blockIdx.x % params.splits, rows = kTileM / params.splits;
    for (int item = threadIdx.x; item < rows * kChunks; item += C::kThreads) {
        const int local = rank * rows + item / kChunks, column = item % kChunks * 4;
        RowState total;
        for (int block = 0; block < params.splits; ++block)
#pragma unroll
            for (int w = 0; w < C::kWarpgroups; ++w)
                total.maximum = fmaxf(total.maximum,
                                      cluster_load_float2(cluster_address(states + (w * kTileM + local) * 8, block)).x);
        float4 sum = make_float4(0, 0, 0, 0);
        for (int block = 0; block < params.splits; ++block)
#pragma unroll
            for (int w = 0; w < C::kWarpgroups; ++w) {
                const float2 part = cluster_load_float2(cluster_address(states + (w * kTileM + local) * 8, block));
                const float4 x = cluster_load_float4(
                    cluster_address(partials + w * C::kShareBytes + (local * C::kPartialStride + column) * 4, block));
                const float weight = total.weight(part.x);
                total.sum += weight * part.y;
                sum.x += weight * x.x, sum.y += weight * x.y, sum.z += weight * x.z, sum.w += weight * x.w;
            }
        const int64_t row = work.row + local;
        if (row >= p.seq_q) continue;
        const RowResult result = finish_row(p, work.head, total);
        if (column < p.head_dim_v) {
            const uint2 packed = make_uint2(pack<T>(sum.x * result.factor, sum.y * result.factor),
                                            pack<T>(sum.z * result.factor, sum.w * result.factor));
            *reinterpret_cast<uint2 *>(row_of<T>(p.out, work.batch, work.head, row) + column) = packed;
        }
        if (column == 0 && p.lse)
            static_cast<float *>(p.lse)[(work.batch * p.heads + work.head) * p.seq_q + row] = result.lse;
    }
}

template <class T, int Columns>
__global__ void __launch_bounds__(Config<Columns>::kThreads, 1)
    wgmma_split_sm90_kernel(const __grid_constant__ Params params) {
    using C = Config<Columns>;
    extern __shared__ char unaligned[];
    char *shared = unaligned + (-smem_address(unaligned) & 1023);
    char *queries = shared, *shares = queries + C::kQueryBytes;
    float2 *states = reinterpret_cast<float2 *>(shares + C::kWarpgroups * C::kShareBytes);
    uint64_t *full_q = reinterpret_cast<uint64_t *>(states + C::kWarpgroups * kTileM);

    const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
    const Work work = find_work<C>(params, warpgroup);
    char *share = shares + warpgroup * C::kShareBytes;
    const Ring<C> ring{share, share + C::kStages * C::kBlockBytes, full_q + 1 + warpgroup * 2 * C::kStages,
                       full_q + 1 + warpgroup * 2 * C::kStages + C::kStages};

    // Each leader prepares its own barriers and starts its own loads before anybody waits.
    if (threadIdx.x % 128 == 0) {
        for (int n = 0; n < 2 * C::kStages; ++n) mbarrier_init(ring.full_k + n, 1);
        if (warpgroup == 0) mbarrier_init(full_q, 1);
        mbarrier_init_fence();
        dependency_wait();
        if (warpgroup == 0) {
            const fa_problem &p = params.problem;
            mbarrier_arrive_expect(full_q, C::kQueryBytes);
            tma_load_tile<Columns, kTileM>(queries, &params.q, full_q, static_cast<int>(work.row),
                                           p.q.stride[1] ? static_cast<int>(work.head) : 0,
                                           p.q.stride[0] ? static_cast<int>(work.batch) : 0, kEvictFirst);
        }
        const int ready = work.count < C::kStages ? work.count : C::kStages;
        for (int step = 0; step < ready; ++step) {
            ring.fill_k(params, work, step);
            ring.fill_v(params, work, step);
        }
    }
    __syncthreads();
    dependency_wait();
    dependency_release();

    float out[Columns / 2];
#pragma unroll
    for (int i = 0; i < Columns / 2; ++i) out[i] = 0;
    RowState state[2];
    mbarrier_wait(full_q, 0);
    attend<T, C>(params, work, ring, smem_address(queries), warpgroup, out, state);

    named_barrier_sync(1 + warpgroup, 128); // all four warps have read the ring that the partial result overwrites
    publish<C>(out, state, reinterpret_cast<float *>(share), states + warpgroup * kTileM);
    cluster_sync();
    merge<T, C>(params, work, smem_address(shares), smem_address(states));
    if (params.splits > 1) cluster_sync(); // no block leaves while another reads its shared memory
}

/* ---- rejects, plan, launch ---- */

const char *rejects(const fa_problem *p, const fa_device_info *device) {
    if (device->cc / 10 != 9) return "needs compute capability 9.0 (Hopper)";
    if (!device->encode_tensor_map) return "the driver has no tensor maps (cuTensorMapEncodeTiled)";
    if (p->dtype != FA_F16 && p->dtype != FA_BF16) return "takes float16 and bfloat16 only";
    if (p->head_dim > 128) return "head_dim is over 128";
    if (p->head_dim % 8) return "head_dim is no multiple of 8";
    if (p->head_dim_v != p->head_dim) return "head_dim of v differs from that of q and k";
    if (p->bias.data) return "takes no bias";
    if (p->mask.data) return "takes no boolean mask";
    if (!(p->scale > 0)) return "scale is not positive";
    if (p->key_end == 0) return "no query sees a key";
    if (p->seq_q >= INT64_C(1) << 30 || p->seq_k >= INT64_C(1) << 30) return "a sequence has 2^30 rows or more";
    if (p->batch * p->heads * ((p->seq_q + kTileM - 1) / kTileM) >= INT64_C(1) << 27) return "too many query tiles";
    const char *reason = tma_refusal(p->q, 0, p->head_dim, p->seq_q);
    if (!reason) reason = tma_refusal(p->k, 1, p->head_dim, p->seq_k);
    if (!reason) reason = tma_refusal(p->v, 2, p->head_dim, p->seq_k);
    if (!reason) reason = tma_refusal(p->out, 3, p->head_dim, p->seq_q);
    return reason;
}

int64_t query_tiles(const fa_problem *p) { return p->batch * p->heads * ((p->seq_q + kTileM - 1) / kTileM); }

const char *declines(const fa_problem *p, const fa_device_info *device) {
    if (p->batch_invariant) return "batch_invariant: the choice of this row depends on the batch";
    if (query_tiles(p) > device->sm_count) return "slower here than wgmma_sm90: the query tiles fill the machine";
    return nullptr;
}

/* The largest cluster that the machine holds at once and that leaves every warpgroup a block of keys. */
template <class C> void plan_for(const fa_problem *p, const fa_device_info *device, fa_plan *plan) {
    const int64_t tiles = query_tiles(p), share = C::kWarpgroups * C::kTileN;
    int splits = 1;
    while (!p->batch_invariant && splits < FA_SPLIT_MAX_CLUSTER && tiles * splits * 2 <= device->sm_count &&
           share * splits < p->key_end - p->key_begin)
        splits *= 2;
    plan->config = C::kColumns;
    plan->tile_m = kTileM;
    plan->tile_n = C::kTileN;
    plan->stages = C::kStages;
    plan->splits = splits;
    plan->threads = C::kThreads;
    plan->blocks = tiles * splits;
    plan->smem_bytes = C::kSharedBytes;
}

fa_code plan(const fa_problem *p, const fa_device_info *device, fa_plan *plan, fa_status *) {
    if (p->head_dim <= 64)
        plan_for<Config<64>>(p, device, plan);
    else
        plan_for<Config<128>>(p, device, plan);
    return FA_OK;
}

using Kernel = void (*)(Params);

Kernel kernel_of(const fa_problem *p, int config) {
    const bool half = p->dtype == FA_F16;
    if (config == 64) return half ? wgmma_split_sm90_kernel<__half, 64> : wgmma_split_sm90_kernel<__nv_bfloat16, 64>;
    return half ? wgmma_split_sm90_kernel<__half, 128> : wgmma_split_sm90_kernel<__nv_bfloat16, 128>;
}

/* The rows [key_begin, key_end) of k or v. */
fa_code encode_keys(CUtensorMap *map, const fa_problem *p, fa_operand x, const fa_plan *plan, void *encode,
                    const char *name, fa_status *status) {
    x.data = static_cast<char *>(x.data) + p->key_begin * x.stride[2] * 2;
    return tensor_map_encode(map, encode, x, p->dtype, p->head_dim, p->key_end - p->key_begin, p->heads_kv, p->batch,
                             plan->tile_n, name, status);
}

fa_code launch(const fa_problem *p, const fa_plan *plan, const fa_launch *launch, fa_status *status) {
    Params params;
    void *encode = launch->device->encode_tensor_map;
    FA_TRY(tensor_map_encode(&params.q, encode, p->q, p->dtype, p->head_dim, p->seq_q, p->heads, p->batch, kTileM, "q",
                             status));
    FA_TRY(encode_keys(&params.k, p, p->k, plan, encode, "k", status));
    FA_TRY(encode_keys(&params.v, p, p->v, plan, encode, "v", status));
    params.problem = *p;
    params.score = score_params(*p);
    params.tiles_m = (p->seq_q + kTileM - 1) / kTileM;
    params.splits = plan->splits;

    Kernel kernel = kernel_of(p, plan->config);
    FA_CUDA_TRY(status, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                             static_cast<int>(plan->smem_bytes)));
    cudaLaunchAttribute attributes[2];
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim.x = static_cast<unsigned>(plan->splits);
    attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = FA_SPLIT_DEPENDENT_LAUNCH;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(plan->blocks));
    config.blockDim = dim3(static_cast<unsigned>(plan->threads));
    config.dynamicSmemBytes = plan->smem_bytes;
    config.stream = static_cast<cudaStream_t>(launch->stream);
    config.attrs = attributes;
    config.numAttrs = 2;
    FA_CUDA_TRY(status, cudaLaunchKernelEx(&config, kernel, params));
    return FA_OK;
}

} // namespace

extern "C" {
extern const fa_kernel fa_row_wgmma_split_sm90;
FA_EXPORT const fa_kernel fa_row_wgmma_split_sm90 = {
    .abi = FA_ROW_ABI,
    .device = FA_CUDA,
    .name = "wgmma_split_sm90",
    .summary = "Hopper, few query tiles: keys split over warpgroups and a cluster, merged in shared memory",
    .rejects = rejects,
    .declines = declines,
    .plan = plan,
    .launch = launch,
};
}
