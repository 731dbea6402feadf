/* wgmma_backward_sm90: gradients on Hopper (sm_90a) by two kernels without sums in memory: TMA, wgmma, warp
 * specialisation.
 *
 *     queries: LSE and delta of each query, to workspace; dq, a tile of queries a CTA      queries.cuh
 *     keys:    dk and dv, a tile of keys of a kv head a CTA, over its group of query heads   keys.cuh,
 *              from 192 columns on                                                           keys_wide.cuh,
 *              192 columns of k, 128 of v                                                    keys_pair.cuh
 *     sinks:   dsinks, from partial sums that the first kernel leaves
 *
 * S and dP are worked out in both: seven products instead of five, but no dq in float32, no atomics and no exchange, so
 * that the bits are the same from run to run and do not depend on the batch.
 *
 * Layout: any strides of 16-byte multiples with a contiguous head_dim axis for q, k, v, out and dout; gradients, lse
 * and dlse have any strides. Limits: head_dim a multiple of 8 up to 256, computed at 64, 96, 128, 192 or 256 columns,
 * head_dim_v = head_dim, or a multiple of 8 up to 128 with head_dim from 136 to 192, computed at 128 and 192 columns;
 * out of q's dtype; no bias, no boolean mask. 8 bytes of workspace a query row, heads in groups where they do not fit.
 *
 * Over sequences (sequences.cuh) two small kernels come first, that say where each lies and make its tensor maps.
 * Instances of theirs have no full kind: the masked one cuts keys as the full one does where all are seen.
 *
 * @arch sm_90a
 * @instances instance.cu
 * @instance d{256,192,128,96,64}_{full,masked,capped}_{f16,bf16}
 *           {1} {1} {2:kFull,kMasked,kCapped} false {3:__half,__nv_bfloat16}
 * @instance d192v128_{full,masked,capped}_{f16,bf16} 192 128 {1:kFull,kMasked,kCapped} false {2:__half,__nv_bfloat16}
 * @instance sequences_d{256,192,128,96,64}_masked_{f16,bf16} {1} {1} kMasked true {2:__half,__nv_bfloat16}
 * @instance sequences_d{256,128,64}_capped_{f16,bf16} {1} {1} kCapped true {2:__half,__nv_bfloat16}
 * @instance sequences_d192v128_masked_{f16,bf16} 192 128 kMasked true {1:__half,__nv_bfloat16}
 * @core d(64|128)_(masked_\w+|(full|capped)_bf16) d256_(masked_\w+|capped_bf16) (d192v128|d96)_masked_bf16
 *       sequences_d128_masked_\w+ sequences_d(96|256)_masked_bf16
 */
#include "sm90/backward/config.cuh"
#include "sm90/backward/host.cuh"
#include "sm90/backward/sequence_calls.cuh"
#include <algorithm> // min, max

namespace fa::sm90 {

namespace { // Of this file alone: other kernels have instances of the same name, and templates of these.
struct Instance {
    int head_dim, head_dim_v, kind;
    bool sequences;
    fa_dtype dtype;
    Launch *launch; // null: this build leaves it out
};
} // namespace
#define FA_ENTRY(name, head_dim, head_dim_v, kind, sequences, T)                                                       \
    {head_dim, head_dim_v, kind, sequences, kDtypeOf<T>, name},
FA_INSTANCES(FA_DECLARE_INSTANCE)
static const Instance kInstances[] = {FA_INSTANCES(FA_ENTRY)};

/* ---- plan ---- */

/* The plan's own part. */
struct BackwardOwn {
    int instance;              // of kInstances
    int64_t pairs;             // batch entries times kv heads of one launch
    int64_t query_tiles;       // a query head
    int64_t key_tiles;         // a kv head
    int64_t row_blocks;        // a query head; 0: the second kernel is not wanted
    int64_t sink_parts;        // a query head; 0: dsinks is not wanted
    int64_t parts_at, rows_at; // bytes into the workspace, which begins with two counters
    SequenceRoom room;         // of sequences
};

constexpr int64_t kCounterBytes = 256;
constexpr int kMaxHeadDim = 256, kPairAbove = 128, kPairHeadDim = 192, kPairHeadDimV = 128;

static const Instance &instance_of(const BackwardOwn &own) { return kInstances[own.instance]; }

static BackwardTiling tiling_of(const BackwardOwn &own) {
    const Instance &instance = instance_of(own);
    return backward_tiling(instance.head_dim, instance.head_dim_v, instance.kind);
}

static SequenceTiles tiles_of(const fa_problem *problem, const BackwardOwn &own) {
    const Instance &instance = instance_of(own);
    return sequence_tiles(problem, {kBackwardTile, key_tile(instance.head_dim, instance.head_dim_v),
                                    backward_tiling(instance.head_dim, instance.head_dim_v, instance.kind).tile_q});
}

/* Sizes of launches and of the workspace. False when not even one pair's rows fit into the limit. */
static bool backward_sizes(const fa_problem *problem, const fa_device_info *device, BackwardOwn *own, fa_plan *plan) {
    const fa_backward &p = problem->backward;
    const fa_forward &f = p.forward;
    const BackwardTiling t = tiling_of(*own);
    const int64_t entries = entries_of(problem), all = entries * f.heads_kv;
    const int64_t group = f.heads_kv ? f.heads / f.heads_kv : 1;
    const bool keys_wanted = p.wants >> FA_GRAD_K & 3;
    own->query_tiles = divide_up(f.seq_q, kBackwardTile);
    own->key_tiles = divide_up(f.seq_k, key_tile(instance_of(*own).head_dim, instance_of(*own).head_dim_v));
    own->row_blocks = divide_up(f.seq_q, t.tile_q);
    if (problem->sequences.given) {
        const SequenceTiles tiles = tiles_of(problem, *own);
        own->query_tiles = tiles.count(kTilesOfQueries), own->key_tiles = tiles.count(kTilesOfKeys);
        own->row_blocks = tiles.count(kTilesOfRows);
    }
    if (!keys_wanted) own->row_blocks = 0;
    own->sink_parts = p.wants >> FA_GRAD_SINKS & 1 ? own->query_tiles * 4 * kBackwardConsumers : 0;
    own->parts_at = kCounterBytes;
    const int64_t part_bytes = entries * f.heads * own->sink_parts * int64_t(sizeof(float));
    own->rows_at = own->parts_at + divide_up(part_bytes, 256) * 256;
    if (problem->sequences.given) {
        own->room = room_of_sequences(own->rows_at, tiles_of(problem, *own));
        own->rows_at = own->room.end;
    }
    const int64_t pair_bytes = group * own->row_blocks * t.tile_q * int64_t(2 * sizeof(float));
    const int64_t left = int64_t(std::min<size_t>(device->workspace_limit, INT64_MAX)) - own->rows_at;
    own->pairs = pair_bytes == 0 ? all : left < pair_bytes ? 0 : std::min(all, left / pair_bytes);
    if (all > 0 && (own->pairs == 0 || left < 0)) return false;
    plan->workspace_bytes = size_t(own->rows_at + own->pairs * pair_bytes);
    return true;
}

/* Whether the number of a tile fits, and that of a row block. */
static bool tiles_fit(const fa_problem *problem, const BackwardOwn &own) {
    const fa_forward &f = problem->forward;
    const int64_t most = INT64_C(1) << kMaxTilesBits, heads = std::max<int64_t>(entries_of(problem) * f.heads, 1);
    return std::max({own.query_tiles, own.key_tiles, own.row_blocks}) <= most / heads;
}

static fa_answer backward_plan(const fa_problem *problem, const fa_device_info *device, fa_plan *plan, fa_why *why) {
    const fa_backward &p = problem->backward;
    const fa_forward &f = p.forward;
    BackwardOwn &own = fa_own<BackwardOwn>(plan);
    const bool pair = f.head_dim_v != f.head_dim;
    if (std::max(f.head_dim, f.head_dim_v) > kMaxHeadDim)
        return fa_because(why, FA_REFUSES, FA_WHY_HEAD_DIM, kMaxHeadDim, 0, 0);
    if (f.head_dim % 8) return fa_because(why, FA_REFUSES, FA_WHY_HEAD_DIM_MULTIPLE, 8, 0, 0);
    if (pair &&
        (f.head_dim <= kPairAbove || f.head_dim > kPairHeadDim || f.head_dim_v > kPairHeadDimV || f.head_dim_v % 8))
        return fa_because(why, FA_REFUSES, FA_WHY_HEAD_DIM_PAIR, kPairAbove, kPairHeadDim, kPairHeadDimV);
    const bool sequences = problem->sequences.given;
    if (!lengths_fit(f.seq_q, f.seq_k, sequences ? kBitsInBand : kBitsInFours, why)) return FA_REFUSES;
    if (!sequences && (std::max(f.seq_q, f.seq_k) + 63) / 64 >
                          (INT64_C(1) << kMaxTilesBits) / std::max<int64_t>(f.heads * f.batch, 1))
        return fa_because(why, FA_REFUSES, FA_WHY_TILES, kMaxTilesBits, 0, 0);
    if (f.out_dtype != f.dtype) return fa_because(why, FA_REFUSES, FA_WHY_OUT_DTYPE, 0, 0, 0);
    const int64_t keys = sequences ? f.seq_k : f.key_end - f.key_begin;
    const bool reads = f.batch > 0 && f.heads > 0 && f.seq_q > 0 && keys > 0; // strides of empty operands mean nothing
    if (reads && (!takes_tensor_map(f.q, FA_OPERAND_q, f.head_dim, f.seq_q, why) ||
                  !takes_tensor_map(f.k, FA_OPERAND_k, f.head_dim, keys, why) ||
                  !takes_tensor_map(f.v, FA_OPERAND_v, f.head_dim_v, keys, why) ||
                  !takes_tensor_map(f.out, FA_OPERAND_out, f.head_dim_v, f.seq_q, why) ||
                  (p.dout.data && !takes_tensor_map(p.dout, FA_OPERAND_dout, f.head_dim_v, f.seq_q, why))))
        return FA_REFUSES;
    if (!device->tensor_maps) return fa_because(why, FA_NOT_HERE, FA_WHY_TENSOR_MAPS, 0, 0, 0);
    if (sequences && pair && f.softcap > 0) return fa_because(why, FA_REFUSES, FA_WHY_FEATURES, FA_WITH_SOFTCAP, 0, 0);
    const Instance *found =
        instance_for(kInstances, f.head_dim, backward_kind(f), f.dtype, [pair, sequences](const Instance &i) {
            return pair == (i.head_dim != i.head_dim_v) && i.sequences == sequences;
        });
    if (!found) return fa_because(why, FA_REFUSES, FA_WHY_INSTANCE, 0, 0, 0);
    own.instance = int(found - kInstances);
    if (!backward_sizes(problem, device, &own, plan)) return fa_because(why, FA_REFUSES, FA_WHY_ROW_WORKSPACE, 0, 0, 0);
    if (sequences && !tiles_fit(problem, own)) return fa_because(why, FA_REFUSES, FA_WHY_TILES, kMaxTilesBits, 0, 0);
    const int64_t group = f.heads_kv ? f.heads / f.heads_kv : 1;
    plan->threads = 128 * (kBackwardConsumers + 1);
    plan->blocks = std::min<int64_t>(device->sm_count, std::max(own.pairs * group * own.query_tiles,
                                                                own.row_blocks ? own.pairs * own.key_tiles : 0));
    plan->keep = true;
    return FA_TAKES;
}

/* ---- launch ---- */

/* Heads of a sequence whose tiles follow one another by length. */
struct BackwardSections {
    int64_t row_bytes, group; // a query's of what tiles of keys stream, and a key's of what tiles of queries do
    bool whole;               // tiles are alike
    __device__ __forceinline__ int64_t operator()(const SequenceCall &call, int tiling) const {
        if (whole) return 1;
        return tiling == kTilesOfQueries ? section_heads(call.visible.seq_k * row_bytes, group)
                                         : section_heads(group * call.seq_q * row_bytes, 1);
    }
};

/* Tensor maps of one operand for both kernels; keys NULL: for the first alone. */
struct MapPair {
    CUtensorMap *queries, *keys;
    int queries_box, keys_box;
    CachedTensorMap *cached; // of the two
};
struct CachedMaps {
    CachedTensorMap q[2] = {{FA_OPERAND_q}, {FA_OPERAND_q}}, dout[2] = {{FA_OPERAND_dout}, {FA_OPERAND_dout}};
    CachedTensorMap k[2] = {{FA_OPERAND_k}, {FA_OPERAND_k}}, v[2] = {{FA_OPERAND_v}, {FA_OPERAND_v}};
    CachedTensorMap out = {FA_OPERAND_out};
};
static thread_local CachedMaps cached_maps;

static fa_code encode(const MapPair &to, const fa_launch &launch, const fa_operand &x, fa_dtype dtype, int64_t columns,
                      int64_t rows, int64_t heads, int64_t batch) {
    FA_TRY(tensor_map_encode(to.queries, to.cached[0], launch, x, dtype, columns, rows, heads, batch, to.queries_box));
    if (!to.keys) return FA_OK;
    return tensor_map_encode(to.keys, to.cached[1], launch, x, dtype, columns, rows, heads, batch, to.keys_box);
}

static fa_code encode_maps(const fa_backward &p, const BackwardOwn &own, const BackwardCall &call, BackwardWork *work,
                           const fa_launch &launch) {
    const BackwardTiling t = tiling_of(own);
    const fa_forward &f = p.forward;
    QueriesParams &a = work->queries;
    KeysParams &b = work->keys;
    const int64_t rows = call.row_end - call.row_begin, keys = call.visible.seq_k;
    if (rows <= 0) return FA_OK;                        // no tile touches a map
    const fa_operand dout = p.dout.data ? p.dout : f.q; // what is past its end is not read
    const auto of_queries = [&](const MapPair &to, const fa_operand &x, int columns) {
        return encode(to, launch, rows_of(x, call.row_begin), f.dtype, columns, rows, f.heads, f.batch);
    };
    const auto of_keys = [&](const MapPair &to, const fa_operand &x, int columns) {
        return encode(to, launch, rows_of(x, f.key_begin), f.dtype, columns, keys, f.heads_kv, f.batch);
    };
    auto &cached = cached_maps;
    FA_TRY(of_queries({&a.q, &b.q, 64, t.tile_q, cached.q}, f.q, f.head_dim));
    FA_TRY(of_queries({&a.dout, &b.dout, 64, t.tile_q, cached.dout}, dout, f.head_dim_v));
    if (is_wide(instance_of(own).head_dim))
        a.out_rows = {f.out.data, {f.out.stride[0], f.out.stride[1], f.out.stride[2]}};
    else
        FA_TRY(of_queries({&a.out, nullptr, 64, 0, &cached.out}, f.out, f.head_dim_v));
    FA_TRY(of_keys({&a.k, &b.k, t.tile_n, 64, cached.k}, f.k, f.head_dim));
    FA_TRY(of_keys({&a.v, &b.v, t.tile_n, 64, cached.v}, f.v, f.head_dim_v));
    const auto steps = [](int *step, const fa_operand &x) { step[0] = x.stride[1] != 0, step[1] = x.stride[0] != 0; };
    steps(a.q_step, f.q), steps(a.dout_step, dout), steps(a.out_step, f.out), steps(a.k_step, f.k),
        steps(a.v_step, f.v);
    steps(b.q_step, f.q), steps(b.dout_step, dout), steps(b.k_step, f.k), steps(b.v_step, f.v);
    return FA_OK;
}

/* The kernels that leave calls and maps of sequences in workspace, and the lists of tiles. */
static fa_code make_calls(const fa_problem *problem, const BackwardOwn &own, BackwardWork *work,
                          const fa_launch &launch) {
    const fa_backward &p = problem->backward;
    const fa_forward &f = p.forward;
    QueriesParams &a = work->queries;
    KeysParams &b = work->keys;
    const bool wide = is_wide(instance_of(own).head_dim), whole = backward_kind(f) == kFull;
    const int tile_n = tiling_of(own).tile_n;
    SequenceMaking<BackwardSections> making;
    FA_TRY(make_sequences(problem, tiles_of(problem, own), own.room, {64, 64, wide ? 0 : 64, tile_n, tile_n, 64, 64},
                          kTilesOfRows, BackwardSections{2 * (f.head_dim + f.head_dim_v), f.heads / f.heads_kv, whole},
                          &making, launch));
    if (wide) a.out_rows = {f.out.data, {f.out.stride[0], f.out.stride[1], f.out.stride[2]}};
    const auto step = [&](int map) { return int(making.of[map].stride[1] != 0); };
    a.q_step[0] = b.q_step[0] = step(kMapOfQ), a.dout_step[0] = b.dout_step[0] = step(kMapOfDout);
    a.out_step[0] = step(kMapOfOut);
    a.k_step[0] = b.k_step[0] = step(kMapOfKeys), a.v_step[0] = b.v_step[0] = step(kMapOfValues);
    work->queries.list = {.calls = making.calls, .span = making.t.span[kTilesOfQueries], .whole = whole};
    work->keys.list = {.calls = making.calls, .span = making.t.span[kTilesOfKeys], .whole = whole};
    if (own.sink_parts) // tiles that are spare leave none
        FA_CUDA_TRY(launch, cudaMemsetAsync(static_cast<char *>(launch.workspace) + own.parts_at, 0,
                                            f.heads * own.sink_parts * sizeof(float),
                                            static_cast<cudaStream_t>(launch.stream)));
    return FA_OK;
}

/* The launches over sequences of one group of pairs. */
static fa_code launch_pairs_of_sequences(const fa_backward &p, const BackwardOwn &own, BackwardWork *work,
                                         int64_t first, int64_t pairs, const fa_launch &launch) {
    auto *counters = static_cast<uint32_t *>(launch.workspace);
    const int64_t group = p.forward.heads / p.forward.heads_kv, sm_count = launch.device->sm_count;
    work->queries.call.first_pair = work->keys.call.first_pair = int(first);
    const auto set = [&](SequenceList &list, Schedule &schedule, int64_t tiles, int64_t heads, uint32_t *counter) {
        list.units = uint32_t(tiles * heads), list.heads = uint32_t(heads), list.counter = counter;
        schedule.query_tiles = uint32_t(tiles);
        return std::min(tiles * heads, sm_count);
    };
    work->query_blocks = set(work->queries.list, work->queries.schedule, own.query_tiles, pairs * group, counters);
    work->key_blocks = set(work->keys.list, work->keys.schedule,
                           own.row_blocks || p.wants >> FA_GRAD_K & 3 ? own.key_tiles : 0, pairs, counters + 1);
    if (first > 0) // those of the first group are 0
        FA_CUDA_TRY(launch,
                    cudaMemsetAsync(counters, 0, 2 * sizeof *counters, static_cast<cudaStream_t>(launch.stream)));
    return instance_of(own).launch(*work, launch);
}

/* The launches of one group of pairs. */
static fa_code launch_pairs(const fa_backward &p, const BackwardOwn &own, BackwardWork *work, int64_t first,
                            int64_t pairs, const fa_launch &launch) {
    const fa_forward &f = p.forward;
    const bool unequal = instance_of(own).kind != kFull && (f.left < FA_UNBOUNDED || f.right < FA_UNBOUNDED);
    const int64_t group = f.heads / f.heads_kv, keys = f.key_end - f.key_begin;
    auto *counters = static_cast<uint32_t *>(launch.workspace);
    work->queries.call.first_pair = work->keys.call.first_pair = int(first);
    work->query_blocks = order(&work->queries.schedule, unequal, own.query_tiles, pairs * group,
                               section_heads(2 * keys * (f.head_dim + f.head_dim_v), group), counters, launch);
    work->key_blocks =
        order(&work->keys.schedule, unequal, own.row_blocks || p.wants >> FA_GRAD_K & 3 ? own.key_tiles : 0, pairs,
              section_heads(2 * group * f.seq_q * (f.head_dim + f.head_dim_v), 1), counters + 1, launch);
    if (work->queries.schedule.counter || work->keys.schedule.counter)
        FA_CUDA_TRY(launch,
                    cudaMemsetAsync(counters, 0, 2 * sizeof *counters, static_cast<cudaStream_t>(launch.stream)));
    return instance_of(own).launch(*work, launch);
}

static fa_code backward_launch(const fa_problem *problem, const fa_plan *plan, const fa_launch *launch) {
    const fa_backward &p = problem->backward;
    const fa_forward &f = p.forward;
    const BackwardOwn &own = fa_own<BackwardOwn>(plan);
    char *const workspace = static_cast<char *>(launch->workspace);
    const bool sequences = problem->sequences.given;
    const int64_t entries = entries_of(problem), all = entries * f.heads_kv;
    if (all > 0) {
        BackwardWork work = {};
        work.queries.call = work.keys.call = backward_call(p);
        FA_TRY(sequences ? make_calls(problem, own, &work, *launch)
                         : encode_maps(p, own, work.queries.call, &work, *launch));
        QueriesParams &a = work.queries;
        KeysParams &b = work.keys;
        a.dq = gradient(p, FA_GRAD_Q), b.dk = gradient(p, FA_GRAD_K), b.dv = gradient(p, FA_GRAD_V);
        a.scale = b.scale = static_cast<float>(f.scale);
        a.lse = static_cast<const float *>(p.lse.data), a.dlse = static_cast<const float *>(p.dlse.data);
        for (int axis = 0; axis < 3; ++axis)
            a.lse_stride[axis] = p.lse.stride[axis], a.dlse_stride[axis] = p.dlse.stride[axis];
        if (own.row_blocks) a.row_blocks = workspace + own.rows_at;
        b.row_blocks = a.row_blocks;
        a.row_block_count = b.row_block_count = int(own.row_blocks);
        if (own.sink_parts) a.sink_parts = reinterpret_cast<float *>(workspace + own.parts_at);
        a.sinks = f.sinks.data, a.sinks_stride = f.sinks.stride[0], a.sinks_dtype = f.sinks_dtype;
        for (int64_t first = 0; first < all; first += own.pairs)
            FA_TRY((sequences ? launch_pairs_of_sequences : launch_pairs)(p, own, &work, first,
                                                                          std::min(own.pairs, all - first), *launch));
    }
    if (p.wants >> FA_GRAD_SINKS & 1 && f.heads > 0) {
        FA_CHAOS_ARM(launch->stream, *launch);
        backward_sinks<<<static_cast<unsigned>(f.heads), kSinkThreads, 0, static_cast<cudaStream_t>(launch->stream)>>>(
            reinterpret_cast<const float *>(workspace + own.parts_at), own.sink_parts, entries, f.heads,
            gradient(p, FA_GRAD_SINKS));
        FA_CUDA_TRY(*launch, cudaGetLastError());
    }
    return FA_OK;
}

} // namespace fa::sm90

FA_DEFINE_KERNEL(wgmma_backward_sm90) = {
    .abi = FA_KERNEL_ABI,
    .op = FA_BACKWARD,
    .device = FA_CUDA,
    .name = "wgmma_backward_sm90",
    .summary = "Hopper gradients in two ordered kernels, float16 and bfloat16: TMA, wgmma and warp specialisation",
    .cc_from = 90,
    .cc_to = 90,
    .dtypes = fa::kFloat16Bits,
    .takes = FA_WITH_SINKS | FA_WITH_SOFTCAP | FA_WITH_WINDOW | FA_WITH_DLSE | FA_WITH_DSINKS | FA_WITH_ACCUMULATE |
             FA_WITH_ORDERED | FA_WITH_HEAD_DIM_V | FA_WITH_LENGTHS | FA_WITH_RANGES,
    .plan = fa::sm90::backward_plan,
    .launch = fa::sm90::backward_launch,
};
