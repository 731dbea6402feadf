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

#include "fa.h"
#include "launch.cuh"
#include "sm90_split.cuh"
#include "sm90_tensor_map.h"

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

/* ---- rejects, plan, launch ---- */

constexpr int64_t kMaxRows = INT64_C(1) << 28; // sums of four such numbers fit in an int

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
    if (p->seq_q >= kMaxRows || p->seq_k >= kMaxRows) return "a sequence has 2^28 rows or more";
    if (p->heads > 65535 || p->batch > 65535) return "batch or heads is over 65535";
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
    if (p->seq_q <= 16) return "slower here than mma_sm80: a few queries leave most of a 64-row tile empty";
    return nullptr;
}

template <class C> void fill_plan(int64_t tiles, int config, int splits, fa_plan *plan) {
    plan->config = config;
    plan->tile_m = kTileM;
    plan->tile_n = C::kTileN;
    plan->stages = C::kStages;
    plan->splits = splits;
    plan->threads = C::kThreads;
    plan->blocks = tiles * splits;
    plan->smem_bytes = C::kSharedBytes;
}

/* The largest cluster that the machine holds at once and that leaves every warpgroup a block of keys. */
fa_code plan(const fa_problem *p, const fa_device_info *device, fa_plan *plan, fa_status *) {
    const int64_t tiles = query_tiles(p), keys = p->key_end - p->key_begin;
    const int share = p->head_dim <= 64 ? Short64::kWarpgroups * Short64::kTileN : Any128::kWarpgroups * Any128::kTileN;
    int splits = 1;
    while (!p->batch_invariant && splits < kMaxCluster && tiles * splits * 2 <= device->sm_count &&
           int64_t(share) * splits < keys)
        splits *= 2;
    const int64_t blocks = (keys + int64_t(share) * splits - 1) / (int64_t(share) * splits); // a warpgroup
    if (p->head_dim > 64)
        fill_plan<Any128>(tiles, 3, splits, plan);
    else if (blocks <= 2)
        fill_plan<Short64>(tiles, 0, splits, plan);
    else if (blocks <= 4)
        fill_plan<Middle64>(tiles, 1, splits, plan);
    else
        fill_plan<Long64>(tiles, 2, splits, plan);
    return FA_OK;
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

/* The rows [key_begin, key_end) of k or v. */
fa_code encode_keys(CUtensorMap *map, const fa_problem *p, fa_operand x, const fa_plan *plan, void *encode, int name,
                    fa_status *status) {
    x.data = static_cast<char *>(x.data) + p->key_begin * x.stride[2] * 2;
    return tensor_map_encode(map, encode, x, p->dtype, p->head_dim, p->key_end - p->key_begin, p->heads_kv, p->batch,
                             plan->tile_n, name, status);
}

void fill_params(Params *params, const fa_problem *p, int splits) {
    params->seq_q = static_cast<int>(p->seq_q);
    params->key_begin = static_cast<int>(p->key_begin);
    params->key_end = static_cast<int>(p->key_end);
    params->diagonal = static_cast<int>(p->diagonal);
    params->left = static_cast<int>(std::min(p->left, 2 * kMaxRows));
    params->right = static_cast<int>(std::min(p->right, 2 * kMaxRows));
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
    params->lse = static_cast<float *>(p->lse);
    params->sinks = p->sinks.data;
    params->sinks_stride = p->sinks.stride[0];
    params->sinks_dtype = p->sinks_dtype;
    params->heads = static_cast<int>(p->heads);
}

fa_code launch(const fa_problem *p, const fa_plan *plan, const fa_launch *launch, fa_status *status) {
    Params params;
    void *encode = launch->device->encode_tensor_map;
    FA_TRY(tensor_map_encode(&params.q, encode, p->q, p->dtype, p->head_dim, p->seq_q, p->heads, p->batch, kTileM, 0,
                             status));
    FA_TRY(encode_keys(&params.k, p, p->k, plan, encode, 1, status));
    FA_TRY(encode_keys(&params.v, p, p->v, plan, encode, 2, status));
    fill_params(&params, p, plan->splits);

    const bool capped = p->softcap > 0;
    const Kernel kernel =
        p->dtype == FA_F16 ? kernel_of<__half>(plan->config, capped) : kernel_of<__nv_bfloat16>(plan->config, capped);
    FA_TRY(fa_allow_smem(kernel, plan->smem_bytes, status));
    cudaLaunchAttribute attributes[2];
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim.x = static_cast<unsigned>(plan->splits);
    attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = FA_SPLIT_DEPENDENT_LAUNCH;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>((p->seq_q + kTileM - 1) / kTileM * plan->splits),
                          static_cast<unsigned>(p->heads), static_cast<unsigned>(p->batch));
    config.blockDim = dim3(static_cast<unsigned>(plan->threads));
    config.dynamicSmemBytes = plan->smem_bytes;
    config.stream = static_cast<cudaStream_t>(launch->stream);
    config.attrs = attributes;
    config.numAttrs = 2;
    FA_CHAOS_ARM(launch->stream, status);
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
