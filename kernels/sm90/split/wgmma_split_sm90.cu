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
 * Bench: python -m bench measure --preset small --kernels wgmma_split_sm90
 * @arch sm_90a
 */
#include <algorithm> // std::max, std::min
#include <cuda_runtime.h>

#include "common/launch.cuh"
#include "common/limits.cuh" // band_of, lengths_fit
#include "fa.h"
#include "sm90/common/tensor_map.h"
#include "sm90/split/kernel.cuh"

/* ---- configuration ----
 *
 * Four shapes of a block. Head_dim up to 64: two warpgroups that hold all their keys, in two short or two long blocks;
 * four with a ring for more keys. Head_dim up to 128: two with a ring. */

#ifndef FA_SPLIT_64_TILE_N
#define FA_SPLIT_64_TILE_N 64 // keys a block of K and of V; two warpgroups of two such blocks
#endif
#ifndef FA_SPLIT_LONG_WARPGROUPS
#define FA_SPLIT_LONG_WARPGROUPS 4 // warpgroups a block
#endif
#ifndef FA_SPLIT_LONG_TILE_N
#define FA_SPLIT_LONG_TILE_N 64
#endif
#ifndef FA_SPLIT_LONG_STAGES
#define FA_SPLIT_LONG_STAGES 1 // blocks of keys in flight for each warpgroup
#endif
#ifndef FA_SPLIT_128_WARPGROUPS
#define FA_SPLIT_128_WARPGROUPS 2
#endif
#ifndef FA_SPLIT_128_TILE_N
#define FA_SPLIT_128_TILE_N 128
#endif
#ifndef FA_SPLIT_128_STAGES
#define FA_SPLIT_128_STAGES 1
#endif
#ifndef FA_SPLIT_DEPENDENT_LAUNCH
#define FA_SPLIT_DEPENDENT_LAUNCH 1
#endif

namespace {

using namespace fa;
using namespace fa::sm90;
using namespace fa::sm90::split;

using Short64 = Config<64, 2, FA_SPLIT_64_TILE_N, 2, true>;
using Middle64 = Config<64, 2, 2 * FA_SPLIT_64_TILE_N, 2, true>;
using Long64 = Config<64, FA_SPLIT_LONG_WARPGROUPS, FA_SPLIT_LONG_TILE_N, FA_SPLIT_LONG_STAGES, false>;
using Any128 = Config<128, FA_SPLIT_128_WARPGROUPS, FA_SPLIT_128_TILE_N, FA_SPLIT_128_STAGES, false>;

/* ---- plan, launch ---- */

constexpr int64_t kMaxGrid = 65535;

/* The plan's own part. */
struct Own {
    int config;
    int tile_n;
    int splits;      // blocks of a cluster
    int query_tiles; // of a head
};

template <class C> void fill_plan(int64_t tiles, int config, fa_plan *plan) {
    Own &own = fa_own<Own>(plan);
    own.config = config;
    own.tile_n = C::kTileN;
    plan->threads = C::kThreads;
    plan->blocks = tiles * own.splits;
    plan->smem_bytes = C::kSharedBytes;
}

/* The largest cluster that the machine holds at once and that leaves every warpgroup a block of keys. */
void choose(const fa_problem *problem, const fa_device_info *device, int64_t tiles, fa_plan *plan) {
    const fa_forward &p = problem->forward;
    const int64_t keys = p.key_end - p.key_begin;
    const int64_t share =
        p.head_dim <= 64 ? Short64::kWarpgroups * Short64::kTileN : Any128::kWarpgroups * Any128::kTileN;
    int &splits = fa_own<Own>(plan).splits;
    splits = 1;
    while (!problem->batch_invariant && splits < kMaxCluster && tiles * splits * 2 <= device->sm_count &&
           share * splits < keys)
        splits *= 2;
    const int64_t blocks = (keys + share * splits - 1) / (share * splits); // a warpgroup
    if (p.head_dim > 64)
        fill_plan<Any128>(tiles, 3, plan);
    else if (blocks <= 2)
        fill_plan<Short64>(tiles, 0, plan);
    else if (blocks <= 4)
        fill_plan<Middle64>(tiles, 1, plan);
    else
        fill_plan<Long64>(tiles, 2, plan);
}

fa_answer plan(const fa_problem *problem, const fa_device_info *device, fa_plan *plan, fa_why *why) {
    const fa_forward &p = problem->forward;
    if (p.head_dim > 128) return fa_because(why, FA_REFUSES, FA_WHY_HEAD_DIM, 128, 0, 0);
    if (p.head_dim % 8) return fa_because(why, FA_REFUSES, FA_WHY_HEAD_DIM_MULTIPLE, 8, 0, 0);
    if (!(p.scale > 0)) return fa_because(why, FA_REFUSES, FA_WHY_SCALE, 0, 0, 0);
    if (p.key_end == 0) return fa_because(why, FA_REFUSES, FA_WHY_NO_KEYS, 0, 0, 0);
    if (!lengths_fit(p.seq_q, p.seq_k, kBitsInBand, why)) return FA_REFUSES;
    if (std::max(p.heads, p.batch) > kMaxGrid) return fa_because(why, FA_REFUSES, FA_WHY_GRID, kMaxGrid, 0, 0);
    if (!takes_tensor_map(p.q, FA_OPERAND_q, p.head_dim, p.seq_q, why) ||
        !takes_tensor_map(p.k, FA_OPERAND_k, p.head_dim, p.seq_k, why) ||
        !takes_tensor_map(p.v, FA_OPERAND_v, p.head_dim, p.seq_k, why) ||
        !takes_tensor_map(p.out, FA_OPERAND_out, p.head_dim, p.seq_q, why))
        return FA_REFUSES;
    if (!device->tensor_maps) return fa_because(why, FA_NOT_HERE, FA_WHY_TENSOR_MAPS, 0, 0, 0);

    const int64_t query_tiles = (p.seq_q + kTileM - 1) / kTileM, tiles = p.batch * p.heads * query_tiles;
    choose(problem, device, tiles, plan);
    fa_own<Own>(plan).query_tiles = static_cast<int>(query_tiles);
    plan->keep = true;
    if (problem->batch_invariant) return fa_because(why, FA_DECLINES, FA_WHY_CHOICE_BY_BATCH, 0, 0, 0);
    if (tiles > device->sm_count) return fa_because(why, FA_DECLINES, FA_WHY_FULL, 0, 0, 0);
    if (p.seq_q < 16) return fa_because(why, FA_DECLINES, FA_WHY_FEW_QUERIES, 0, 0, 0);
    return FA_TAKES;
}

using Kernel = void (*)(Params);

template <class T> Kernel kernel_of(int config, bool capped) {
    static constexpr Kernel kernels[4][2] = {
        {wgmma_split_sm90_kernel<T, Short64, false>, wgmma_split_sm90_kernel<T, Short64, true>},
        {wgmma_split_sm90_kernel<T, Middle64, false>, wgmma_split_sm90_kernel<T, Middle64, true>},
        {wgmma_split_sm90_kernel<T, Long64, false>, wgmma_split_sm90_kernel<T, Long64, true>},
        {wgmma_split_sm90_kernel<T, Any128, false>, wgmma_split_sm90_kernel<T, Any128, true>}};
    return kernels[config][capped];
}

struct CachedMaps {
    CachedTensorMap q = {FA_OPERAND_q}, k = {FA_OPERAND_k}, v = {FA_OPERAND_v};
};
thread_local CachedMaps cached_maps;

/* The rows [key_begin, key_end) of k or v. */
fa_code encode_keys(CUtensorMap *map, CachedTensorMap &cached, const fa_forward *p, fa_operand x, int tile_n,
                    const fa_launch &launch) {
    x.data = static_cast<char *>(x.data) + p->key_begin * x.stride[2] * 2;
    return tensor_map_encode(map, cached, launch, x, p->dtype, p->head_dim, p->key_end - p->key_begin, p->heads_kv,
                             p->batch, tile_n);
}

void fill_params(Params *params, const fa_forward *p, int splits) {
    const Band band = band_of(*p);
    params->seq_q = static_cast<int>(p->seq_q);
    params->key_begin = band.key_begin, params->key_end = band.key_end;
    params->diagonal = band.diagonal, params->left = band.left, params->right = band.right;
    params->split_shift = 0;
    while (1 << params->split_shift < splits) ++params->split_shift;
    params->group = static_cast<int>(p->heads / p->heads_kv);
    params->head_dim = p->head_dim;
    params->q_batch = p->q.stride[0], params->q_head = p->q.stride[1];
    params->k_batch = p->k.stride[0], params->k_head = p->k.stride[1];
    params->v_batch = p->v.stride[0], params->v_head = p->v.stride[1];
    params->score = score_params(*p);
    params->out = p->out.data;
    params->out_batch = p->out.stride[0], params->out_head = p->out.stride[1], params->out_row = p->out.stride[2];
    params->lse = static_cast<float *>(p->lse.data);
    params->lse_batch = p->lse.stride[0], params->lse_head = p->lse.stride[1], params->lse_row = p->lse.stride[2];
    params->sinks = p->sinks.data;
    params->sinks_stride = p->sinks.stride[0];
    params->sinks_dtype = p->sinks_dtype;
}

fa_code launch(const fa_problem *problem, const fa_plan *plan, const fa_launch *launch) {
    const fa_forward *p = &problem->forward;
    const Own &own = fa_own<Own>(plan);
    Params params;
    auto &cached = cached_maps;
    FA_TRY(tensor_map_encode(&params.q, cached.q, *launch, p->q, p->dtype, p->head_dim, p->seq_q, p->heads, p->batch,
                             kTileM));
    FA_TRY(encode_keys(&params.k, cached.k, p, p->k, own.tile_n, *launch));
    FA_TRY(encode_keys(&params.v, cached.v, p, p->v, own.tile_n, *launch));
    fill_params(&params, p, own.splits);

    const bool capped = p->softcap > 0;
    const Kernel kernel =
        p->dtype == FA_F16 ? kernel_of<__half>(own.config, capped) : kernel_of<__nv_bfloat16>(own.config, capped);
    FA_TRY(fa_allow_smem(kernel, plan->smem_bytes, *launch));
    cudaLaunchAttribute attributes[2];
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim.x = static_cast<unsigned>(own.splits);
    attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = FA_SPLIT_DEPENDENT_LAUNCH;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(own.query_tiles * own.splits), static_cast<unsigned>(p->heads),
                          static_cast<unsigned>(p->batch));
    config.blockDim = dim3(static_cast<unsigned>(plan->threads));
    config.dynamicSmemBytes = plan->smem_bytes;
    config.stream = static_cast<cudaStream_t>(launch->stream);
    config.attrs = attributes;
    config.numAttrs = 2;
    FA_CHAOS_ARM(launch->stream, *launch);
    FA_CUDA_TRY(*launch, cudaLaunchKernelEx(&config, kernel, params));
    return FA_OK;
}

} // namespace

FA_DEFINE_KERNEL(wgmma_split_sm90) = {
    .abi = FA_KERNEL_ABI,
    .op = FA_FORWARD,
    .device = FA_CUDA,
    .name = "wgmma_split_sm90",
    .summary = "Hopper, few query tiles: keys split over warpgroups and a cluster, merged in shared memory",
    .cc_from = 90,
    .cc_to = 90,
    .dtypes = fa::kFloat16Bits,
    .takes = FA_WITH_SINKS | FA_WITH_SOFTCAP | FA_WITH_WINDOW,
    .plan = plan,
    .launch = launch,
};
