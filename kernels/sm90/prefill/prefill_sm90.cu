/* prefill_sm90: attention of sequences of any lengths on Hopper, many queries each: prefill, chunks of it, batches of
 * both. TMA, wgmma, warp specialisation.
 *
 * Takes:  float16 and bfloat16; head_dim = head_dim_v a multiple of 8 up to 256; dense, padded, packed and paged keys,
 *         dense, padded and packed queries, lengths and tables on the device; causal, two-sided windows, positions,
 *         k_range, softcap, sinks, a scale of either sign; LSE.
 * How:    prefill_list_kernel orders the sequences, prefill_sm90_kernel takes units from a counter (list.cuh).
 *         load.cuh fetches and zeroes, consume.cuh multiplies. A sequence of fewer
 *         than 128 queries has the heads of a kv head in the rows of a tile; one of few tiles and many keys is cut into
 *         chunks, whose states are folded from left to right (rows.cuh).
 * Bits:   tiles of queries, blocks of keys and the order of sums follow from a sequence's own lengths and what its
 *         queries see: not from the batch, the storage or the size of a page.
 * Limits: no bias, no mask, no ALiBi; out of q's dtype.
 *
 * @arch sm_90a
 * @instances instance.cu
 * @instance d{256,192,128,96,64}_{masked,capped}_{f16,bf16} {1} {2:kMasked,kCapped} {3:__half,__nv_bfloat16}
 * @core d(64|128|256)_(masked_\w+|capped_bf16)
 */
#include <algorithm> // std::max, std::min
#include <cmath>     // fabs

#include "common/launch.cuh"
#include "common/limits.cuh" // lengths_fit
#include "sm90/common/dense_choice.cuh"
#include "sm90/common/tensor_map.h"
#include "sm90/prefill/launch.cuh"
#include "sm90/prefill/list.cuh"

namespace fa::sm90::prefill {

namespace { // Of this file alone: other kernels have instances of the same name, and templates of these.
struct Instance {
    int head_dim, kind;
    fa_dtype dtype;
    Launch *launch; // null: this build leaves it out
};
} // namespace
#define FA_ENTRY(name, head_dim, kind, T) {head_dim, kind, kDtypeOf<T>, name},
FA_INSTANCES(FA_DECLARE_INSTANCE)
static const Instance kInstances[] = {FA_INSTANCES(FA_ENTRY)};

/* Rows of k and v on their own axis, and how many batch entries or pages. */
struct Extent {
    int64_t rows, batch;
};
static Extent key_extent(const fa_problem *problem) {
    const fa_sequences &s = problem->sequences;
    if (s.pages.table) return {s.pages.size, s.pages.count};
    return {problem->forward.seq_k, s.packed_k ? 1 : problem->forward.batch};
}

/* Calls that say nothing of sequences are faster on wgmma_sm90, but where tiles of all heads of a kv head save enough
 * waves (sm90/common/dense_choice.cuh). Few queries are faster on mma_sm80, but not with pages that come by TMA: there
 * mma_sm80 took 1.0 to 2.0 times as long on an H200 for one query each (pages of 16, 64 and 256 keys, 2k to 128k of
 * them, 1 to 128 sequences; bench/log/serve_sm90.md). Lengths on the device count for nothing, and neither does the
 * number of sequences or tokens: a sequence has one kernel in every batch. */
static fa_answer choose(const fa_problem *problem, int64_t sms, fa_why *why) {
    static_assert(kGathered == kPackBelow);
    constexpr int kFewRows = 64; // of queries and heads
    const fa_forward &p = problem->forward;
    const fa_sequences &s = problem->sequences;
    if (!s.given && saves_waves(p, sms))
        return problem->batch_invariant ? fa_because(why, FA_DECLINES, FA_WHY_CHOICE_BY_BATCH, 0, 0, 0) : FA_TAKES;
    if (!s.given) {
        const bool brief = is_short(p, problem->batch_invariant ? 0 : sms);
        const fa_reason slower = p.seq_q <= kFewDense                                ? FA_WHY_FEW_QUERIES
                                 : brief                                             ? FA_WHY_SHORT
                                 : !problem->batch_invariant && wants_splits(p, sms) ? FA_WHY_UNSPLIT
                                                                                     : FA_WHY_FULL;
        return fa_because(why, FA_DECLINES, slower, 0, 0, 0);
    }
    const int64_t group = p.heads_kv > 0 ? p.heads / p.heads_kv : 1, most = s.packed_q ? 1 : p.seq_q;
    const bool boxes = s.pages.table && (s.pages.size & -s.pages.size) >= kSmallestBox;
    if (!s.q.starts && most * group <= kFewRows && !boxes)
        return fa_because(why, FA_DECLINES, FA_WHY_FEW_QUERIES, 0, 0, 0);
    return FA_TAKES;
}

fa_answer plan_call(const fa_problem *problem, const fa_device_info *device, fa_plan *plan, fa_why *why) {
    const fa_forward &p = problem->forward;
    const fa_sequences &s = problem->sequences;
    if (p.head_dim % 8 || p.head_dim == 0) return fa_because(why, FA_REFUSES, FA_WHY_HEAD_DIM_MULTIPLE, 8, 0, 0);
    const double scale = std::fabs(p.scale);
    if (scale >= 1e30 || (scale != 0 && scale < 1e-30))
        return fa_because(why, FA_REFUSES, FA_WHY_SCALE_LIMIT, 30, 0, 0);
    if (!lengths_fit(p.seq_q, p.seq_k, kBitsInPairs, why)) return FA_REFUSES;
    const int64_t rows_q = s.packed_q ? p.seq_q : p.seq_q * p.batch;
    if ((rows_q + p.batch) / 16 > (INT64_C(1) << kMaxTilesBits) / std::max<int64_t>(p.heads, 1))
        return fa_because(why, FA_REFUSES, FA_WHY_TILES, kMaxTilesBits, 0, 0);
    const Extent keys = key_extent(problem);
    const bool some = rows_q > 0, some_keys = keys.rows * keys.batch > 0; // else strides say nothing
    if (some && (!takes_tensor_map(p.q, FA_OPERAND_q, p.head_dim, p.seq_q, why) ||
                 !takes_tensor_map(p.out, FA_OPERAND_out, p.head_dim, p.seq_q, why)))
        return FA_REFUSES;
    if (some && p.q.stride[1] == 0 && p.heads > 1)
        return fa_because(why, FA_REFUSES, FA_WHY_STRIDES, FA_OPERAND_q, 0, 0);
    if (some_keys && (!takes_tensor_map(p.k, FA_OPERAND_k, p.head_dim, keys.rows, why) ||
                      !takes_tensor_map(p.v, FA_OPERAND_v, p.head_dim, keys.rows, why)))
        return FA_REFUSES;
    if (!device->tensor_maps) return fa_because(why, FA_NOT_HERE, FA_WHY_TENSOR_MAPS, 0, 0, 0);

    Own &own = fa_own<Own>(plan);
    own = {};
    const Instance *found = instance_for(kInstances, p.head_dim, p.softcap > 0 ? kCapped : kMasked, p.dtype);
    if (!found) return fa_because(why, FA_REFUSES, FA_WHY_INSTANCE, 0, 0, 0);
    own.instance = int(found - kInstances), own.columns = found->head_dim;
    const Tiling t = tiling(found->head_dim, found->kind);
    own.tile_m = 64 * t.consumers, own.tile_n = t.tile_n, own.staged = t.staged;
    own.box_rows = std::min<int>(t.tile_n, t.tile_n % kCut ? t.tile_n : kCut);
    if (s.pages.table) {
        const int64_t divisor = s.pages.size & -s.pages.size; // of the tile and the cut, too: 32 or 64, whatever is odd
        own.box_rows = static_cast<int>(std::min<int64_t>({divisor, kCut, t.tile_n & -t.tile_n}));
        if (own.box_rows < kSmallestBox) own.box_rows = 0;
    }
    // Room for the chunks of eight sequences; where FA_EXT_WORKSPACE_MB leaves less, the other units are longer.
    constexpr int kSplitSequences = 8;
    Workspace workspace = {nullptr, p.batch, 0, state_bytes(own.tile_m, own.columns)};
    if (p.seq_k >= 2 * kChunk)
        workspace.slots = std::min<int64_t>(kSplitSequences, p.batch) * (kSplitTarget + kSplitUnits);
    const int64_t units = ((rows_q + 15) / 16 + p.batch) * p.heads + workspace.slots; // more than there can be
    plan->blocks = std::max<int64_t>(1, std::min<int64_t>(device->sm_count, units));
    plan->threads = 128 * (t.consumers + 1);
    while (workspace.slots > 1 && workspace.bytes(plan->blocks) > int64_t(device->workspace_limit))
        workspace.slots /= 2;
    own.slots = static_cast<int>(workspace.slots);
    own.blocks = static_cast<int>(plan->blocks);
    plan->workspace_bytes = workspace.bytes(plan->blocks);
    const int64_t slabs = (own.columns + kSlabColumns - 1) / kSlabColumns;
    plan->smem_bytes = slabs * kSlabRowBytes * ((t.query_stages + t.staged) * own.tile_m + 2 * t.stages * t.tile_n);
    plan->keep = true;
    return choose(problem, device->sm_count, why);
}

struct CachedMaps {
    CachedTensorMap q = {FA_OPERAND_q}, q_heads = {FA_OPERAND_q}, k = {FA_OPERAND_k}, v = {FA_OPERAND_v};
    CachedTensorMap out = {FA_OPERAND_out}, out_heads = {FA_OPERAND_out};
};
static thread_local CachedMaps cached_maps;

/* q or out again, with heads before rows: a box has `rows` rows of all heads of a kv head. */
static fa_code encode_heads(CUtensorMap *map, CachedTensorMap &cached, const fa_launch &launch, const fa_forward &p,
                            const fa_operand &x, int group, int rows) {
    TensorMapKey key = tensor_map_key(x, p.dtype, CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
    key.extent[0] = cuuint64_t(p.head_dim), key.extent[1] = cuuint64_t(p.heads), key.extent[2] = cuuint64_t(p.seq_q);
    key.extent[3] = x.stride[0] ? cuuint64_t(p.batch) : 1;
    key.stride[0] = tensor_map_stride(x.stride[1]), key.stride[1] = tensor_map_stride(x.stride[2]);
    key.stride[2] = tensor_map_stride(x.stride[0]);
    key.box[0] = cuuint32_t(group), key.box[1] = cuuint32_t(rows);
    return tensor_map_encode(map, cached, launch, key);
}

static fa_code encode(Params *params, const fa_problem *problem, const Own &own, const fa_launch &launch) {
    const fa_forward &p = problem->forward;
    const Call &call = params->call;
    auto &cached = cached_maps;
    FA_TRY(tensor_map_encode(&params->q, cached.q, launch, p.q, p.dtype, p.head_dim, p.seq_q, p.heads, p.batch, 64));
    params->q_heads = params->q;
    if (call.group > 1 && call.group <= 64)
        FA_TRY(encode_heads(&params->q_heads, cached.q_heads, launch, p, p.q, call.group, call.group_queries));
    if (own.staged)
        FA_TRY(tensor_map_encode(&params->out_map, cached.out, launch, p.out, p.dtype, p.head_dim, p.seq_q, p.heads,
                                 p.batch, 16));
    params->out_heads = params->out_map;
    if (own.staged && call.store_queries > 0)
        FA_TRY(encode_heads(&params->out_heads, cached.out_heads, launch, p, p.out, call.group, call.store_queries));
    const Extent keys = key_extent(problem);
    if (keys.rows * keys.batch == 0 || own.box_rows == 0) {
        // Pages of a table may be asked for all the same: none is there.
        const fa_operand nothing = {p.q.data, {0, 0, 0, 1}};
        FA_TRY(tensor_map_encode(&params->k, cached.k, launch, nothing, p.dtype, p.head_dim, 1, 1, 1,
                                 std::max(own.box_rows, 1)));
        params->v = params->k;
        return FA_OK;
    }
    FA_TRY(tensor_map_encode(&params->k, cached.k, launch, p.k, p.dtype, p.head_dim, keys.rows, p.heads_kv, keys.batch,
                             own.box_rows));
    return tensor_map_encode(&params->v, cached.v, launch, p.v, p.dtype, p.head_dim, keys.rows, p.heads_kv, keys.batch,
                             own.box_rows);
}

static Call call_of(const fa_problem *problem, const Own &own, const FewRows &few, void *workspace) {
    const fa_forward &p = problem->forward;
    const int group = static_cast<int>(p.heads / p.heads_kv);
    Call call = {
        .q = p.q,
        .k = p.k,
        .v = p.v,
        .out = p.out,
        .lse = p.lse,
        .sinks = p.sinks,
        .batch = p.batch,
        .heads = p.heads,
        .heads_kv = p.heads_kv,
        .seq_q = p.seq_q,
        .left = p.left,
        .right = p.right,
        .diagonal = p.diagonal,
        .head_dim = p.head_dim,
        .head_dim_v = p.head_dim_v,
        .sinks_dtype = p.sinks_dtype,
        .s = problem->sequences,
        .workspace = {static_cast<char *>(workspace), p.batch, own.slots, state_bytes(own.tile_m, own.columns)},
        .faults = problem->faults,
        .group = group,
        .group_queries = std::max(64 / group, 1),
        .store_queries = group <= 16 && 16 % group == 0 ? 16 / group : 0,
        .tile_m = own.tile_m,
        .blocks = own.blocks,
        .few = few,
    };
    if (!call.s.given) call.s.q.rows = p.seq_q, call.s.k.rows = p.seq_k;
    return call;
}

static fa_code params_of(const fa_problem *problem, const Own &own, const FewRows &few, const fa_launch *launch,
                         Params &params) {
    const fa_forward &p = problem->forward;
    params.call = call_of(problem, own, few, launch->workspace);
    params.box_rows = own.box_rows, params.boxes = own.box_rows ? own.tile_n / own.box_rows : 0;
    params.queries = p.scale > 0 ? Queries::kAsTheyAre : p.scale < 0 ? Queries::kNegated : Queries::kZero;
    const double scale = p.scale == 0 ? 1 : std::fabs(p.scale);
    params.score_factor = static_cast<float>((p.softcap > 0 ? p.softcap : scale) * kLog2E);
    params.cap_factor = p.softcap > 0 ? static_cast<float>(scale / p.softcap) : 0.0f;
    FA_TRY(encode(&params, problem, own, *launch));
    return FA_OK;
}

fa_code launch_list(const fa_problem *problem, const fa_plan *plan, const fa_launch *launch, const FewRows &few) {
    const Call call = call_of(problem, fa_own<Own>(plan), few, launch->workspace);
    FA_CHAOS_ARM(launch->stream, *launch);
    const int threads =
        static_cast<int>(std::min<int64_t>(std::max<int64_t>(call.batch + 31, 32) / 32 * 32, kListThreads));
    const Configuration list(1, threads, 0, *launch);
    FA_CUDA_TRY(*launch, cudaLaunchKernelEx(&list.config, prefill_list_kernel, call));
    return FA_OK;
}

fa_code launch_tiles(const fa_problem *problem, const fa_plan *plan, const fa_launch *launch, const FewRows &few) {
    const Own &own = fa_own<Own>(plan);
    Params params = {};
    FA_TRY(params_of(problem, own, few, launch, params));
    FA_CHAOS_ARM(launch->stream, *launch);
    return kInstances[own.instance].launch(params, *plan, *launch);
}

static fa_code prefill_launch(const fa_problem *problem, const fa_plan *plan, const fa_launch *launch) {
    FA_TRY(launch_list(problem, plan, launch, {}));
    return launch_tiles(problem, plan, launch, {});
}

} // namespace fa::sm90::prefill

FA_DEFINE_KERNEL(prefill_sm90) = {
    .abi = FA_KERNEL_ABI,
    .op = FA_FORWARD,
    .device = FA_CUDA,
    .name = "prefill_sm90",
    .summary = "Hopper, sequences of any lengths with many queries: TMA, wgmma, warp specialisation",
    .cc_from = 90,
    .cc_to = 90,
    .dtypes = fa::kFloat16Bits,
    .takes = FA_WITH_SINKS | FA_WITH_SOFTCAP | FA_WITH_WINDOW | FA_WITH_LENGTHS | FA_WITH_PAGES | FA_WITH_RANGES |
             FA_WITH_POSITIONS,
    .plan = fa::sm90::prefill::plan_call,
    .launch = fa::sm90::prefill::prefill_launch,
};
