/* wgmma_fused_backward_sm90: gradients on Hopper (sm_90a) in one pass over pairs of keys and queries: TMA, wgmma, warp
 * specialisation.
 *
 *     rows:   LSE and delta of each query, to workspace; sums of dq in float32 cleared   rows.cuh
 *     fused:  dk and dv, a tile of keys of a kv head a CTA; dq added to its sums         kernel.cuh
 *     finish: dq from its sums; in order, of queries that see no key alone               rows.cuh
 *     sinks:  dsinks, from partial sums that the first kernel leaves                     backward/host.cuh
 *
 * Five products, where wgmma_backward_sm90 makes seven, for 4 bytes of workspace an element of dq.
 * dk, dv and dsinks have one order. The order of dq's sums differs from run to run, for deterministic=False; for True,
 * and where they are faster, the instances ordered_* take turns (turns.cuh): the sums are not cleared,
 * the first to add stores, and the last makes dq of them.
 * At head_dim 128 turns take as long as the two products they save or longer (0.94 to 1.00 of wgmma_backward_sm90's
 * rate on an H100).
 *
 * Layout: any strides of 16-byte multiples with a contiguous head_dim axis for q, k, v, out and dout; gradients, lse
 * and dlse have any strides. Limits: head_dim a multiple of 8 up to 128, computed at 64 or 128 columns, head_dim_v =
 * head_dim, out of q's dtype; no bias, no boolean mask. Heads go in groups where their workspace does not fit.
 *
 * @arch sm_90a
 * @instance d{128,64}_{full,masked,capped}_{f16,bf16} -DFA_HEAD_DIM={1}
 *           -DFA_KIND={2:FA_FULL,FA_MASKED,FA_CAPPED} -DFA_ELEMENT={3:__half,__nv_bfloat16}
 * @instance ordered_d64_{full,masked,capped}_{f16,bf16} -DFA_ORDERED -DFA_HEAD_DIM=64
 *           -DFA_KIND={1:FA_FULL,FA_MASKED,FA_CAPPED} -DFA_ELEMENT={2:__half,__nv_bfloat16}
 */
#include "sm90/backward/host.cuh"
#include "sm90/fused_backward/kernel.cuh"
#include "sm90/fused_backward/rows.cuh"
#include <algorithm> // min, max
#include <cmath>     // ceil
#include <iterator>  // size

/* ---- configuration ---- */

#ifdef FA_DROPOUT // of wgmma_dropout_backward_sm90.cu, which has this file's configuration, plan and launch with other
                  // instances
#define FA_SPACE fa::sm90::dropout
#else
#define FA_SPACE fa::sm90
#endif

namespace FA_SPACE {

constexpr int kFusedConsumers = 2, kFusedTileK = 64 * kFusedConsumers;

/* Queries of a step, and steps in flight. A tuner's values replace these. */
constexpr int fused_tile_q(int head_dim) { return head_dim <= 64 ? 128 : 64; }
constexpr int fused_stages(int head_dim) {
#ifdef FA_QUERY_STAGES
    return FA_QUERY_STAGES;
#endif
#ifdef FA_CHAOS // whose counts need the room of the third
    return 2;
#endif
    return head_dim <= 64 ? 2 : 3;
}

template <class T, int HeadDim, int Kind> struct FusedConfig {
    using Element = T;
    static constexpr int kHeadDim = HeadDim, kConsumers = kFusedConsumers, kTileK = kFusedTileK,
                         kTileQ = fused_tile_q(HeadDim), kStages = fused_stages(HeadDim), kKeyStages = 1;
    static constexpr bool kOrdered = false, kDropout = false, kMasked = Kind != FA_FULL, kSoftcap = Kind == FA_CAPPED;
    // 64 Ki registers: what the consumers leave is the producer's.
#ifdef FA_CHAOS // whose delays need some there too
    static constexpr int kConsumerRegisters = 232, kProducerRegisters = 40;
#else
    static constexpr int kConsumerRegisters = 240, kProducerRegisters = 24;
#endif
    static_assert(kStages >= 2, "a step's stage is held while the next step's products are issued");
};
template <class T, int HeadDim, int Kind> struct OrderedFusedConfig : FusedConfig<T, HeadDim, Kind> {
    static constexpr bool kOrdered = true;
    static constexpr int kKeyStages = 2; // dQ takes no shared memory
};
#ifdef FA_DROPOUT
template <class T, int HeadDim, int Kind> struct DropoutFusedConfig : OrderedFusedConfig<T, HeadDim, Kind> {
    static constexpr bool kDropout = true;
};
#endif

/* ---- instances: the kernels of one head_dim, kind and dtype a compilation ---- */

/* The work of one launch of an instance. */
struct FusedWork {
#ifdef FA_DROPOUT
    DropoutRowsParams rows;
    DropoutFusedParams fused;
#else
    OrderedRowsParams rows;
    OrderedFusedParams fused;
#endif
    FusedFinishParams finish;
    int64_t query_blocks, key_blocks, finish_blocks;
};
using FusedLaunch = fa_code(const FusedWork &, const fa_launch &);

#ifdef FA_INSTANCE

FusedLaunch FA_PASTE(wgmma_fused_backward_sm90_, FA_INSTANCE);
fa_code FA_PASTE(wgmma_fused_backward_sm90_, FA_INSTANCE)(const FusedWork &work, const fa_launch &launch) {
#if defined FA_DROPOUT
    using C = DropoutFusedConfig<FA_ELEMENT, FA_HEAD_DIM, FA_KIND>;
    constexpr auto kRows = fused_rows_dropout<FA_ELEMENT, C::kHeadDim, C::kTileQ>;
    constexpr auto kFused = backward_fused_dropout<C>;
    const DropoutRowsParams &rows = work.rows;
    const DropoutFusedParams &fused = work.fused;
#elif defined FA_ORDERED
    using C = OrderedFusedConfig<FA_ELEMENT, FA_HEAD_DIM, FA_KIND>;
    constexpr auto kRows = fused_rows_ordered<FA_ELEMENT, C::kHeadDim, C::kTileQ>;
    constexpr auto kFused = backward_fused_ordered<C>;
    const OrderedRowsParams &rows = work.rows;
    const OrderedFusedParams &fused = work.fused;
#else
    using C = FusedConfig<FA_ELEMENT, FA_HEAD_DIM, FA_KIND>;
    constexpr auto kRows = fused_rows<FA_ELEMENT, C::kHeadDim, C::kTileQ>;
    constexpr auto kFused = backward_fused<C>;
    const FusedRowsParams &rows = work.rows;
    const FusedParams &fused = work.fused;
#endif
    static_assert(sizeof(FusedSmem<C>) <= 227 * 1024, "shared memory of a block");
    constexpr auto kFinish = fused_finish<FA_ELEMENT, C::kHeadDim, C::kTileQ>;
    FA_TRY(fa_start(kRows, work.query_blocks * (C::kTileQ / kFusedRowsQueries), kFusedRowsThreads, 0, launch, rows));
    FA_TRY(fa_start(kFused, work.key_blocks, 128 * (C::kConsumers + 1), sizeof(FusedSmem<C>), launch, fused));
    return fa_start(kFinish, work.finish_blocks, kFusedFinishThreads, 0, launch, work.finish);
}

} // namespace FA_SPACE

#else

// A tuner links single instances: those left out are null.
#define FA_DECLARE(d, kind)                                                                                            \
    __attribute__((weak)) FusedLaunch wgmma_fused_backward_sm90_##d##_##kind##_f16,                                    \
        wgmma_fused_backward_sm90_##d##_##kind##_bf16
#define FA_DECLARE_ALL(d)                                                                                              \
    FA_DECLARE(d, full);                                                                                               \
    FA_DECLARE(d, masked);                                                                                             \
    FA_DECLARE(d, capped)
#define FA_ENTRY(d, kind)                                                                                              \
    { wgmma_fused_backward_sm90_##d##_##kind##_f16, wgmma_fused_backward_sm90_##d##_##kind##_bf16 }
#ifdef FA_DROPOUT
FA_DECLARE(ordered_d64, masked);
static constexpr int kFusedHeadDims[] = {64};
static FusedLaunch *const kFusedLaunches[2][1][3][2] = {{}, {{{}, FA_ENTRY(ordered_d64, masked), {}}}};
#else
FA_DECLARE_ALL(d64);
FA_DECLARE_ALL(d128);
FA_DECLARE(ordered_d64, full);
FA_DECLARE(ordered_d64, masked);
FA_DECLARE(ordered_d64, capped);

static constexpr int kFusedHeadDims[] = {64, 128};
static FusedLaunch *const kFusedLaunches[2][2][3][2] = {
    // [in any order, ordered][head_dim][kind][float16, bfloat16]
    {{FA_ENTRY(d64, full), FA_ENTRY(d64, masked), FA_ENTRY(d64, capped)},
     {FA_ENTRY(d128, full), FA_ENTRY(d128, masked), FA_ENTRY(d128, capped)}},
    {{FA_ENTRY(ordered_d64, full), FA_ENTRY(ordered_d64, masked), FA_ENTRY(ordered_d64, capped)}},
};
#endif

/* ---- plan ---- */

/* The plan's own part. */
struct FusedOwn {
    int ordered, index, kind;                     // of kFusedLaunches
    int64_t pairs;                                // batch entries times kv heads of one launch
    int64_t key_tiles;                            // a kv head
    int64_t row_blocks;                           // a query head
    int64_t sink_parts;                           // a query head; 0: dsinks is not wanted
    int64_t parts_at, rows_at, sums_at, turns_at; // bytes into the workspace, which begins with a counter
};

constexpr int64_t kFusedCounterBytes = 256;

static FusedLaunch *fused_instance(const fa_backward &p, const FusedOwn &own) {
    return kFusedLaunches[own.ordered][own.index][own.kind][p.forward.dtype == FA_BF16];
}

/* Sizes of launches and of the workspace. False when not even one pair fits into the limit. */
static bool fused_sizes(const fa_backward &p, const fa_device_info *device, FusedOwn *own, fa_plan *plan) {
    const fa_forward &f = p.forward;
    const int tile_q = fused_tile_q(kFusedHeadDims[own->index]);
    const int64_t all = f.batch * f.heads_kv, group = f.heads_kv ? f.heads / f.heads_kv : 1;
    own->key_tiles = divided_up(f.seq_k, kFusedTileK);
    own->row_blocks = divided_up(f.seq_q, tile_q);
    own->sink_parts = p.wants >> FA_GRAD_SINKS & 1 ? own->row_blocks * (tile_q / 16) : 0;
    own->parts_at = kFusedCounterBytes;
    own->rows_at = own->parts_at + divided_up(f.batch * f.heads * own->sink_parts * int64_t(sizeof(float)), 256) * 256;
    const int64_t row_bytes = group * own->row_blocks * tile_q * int64_t(3 * sizeof(float));
    const int64_t sum_bytes = group * own->row_blocks * kQueryElements * int64_t(sizeof(float));
    const int64_t turn_bytes = own->ordered ? group * own->row_blocks * int64_t(sizeof(uint32_t)) : 0;
    const int64_t pair_bytes = row_bytes + sum_bytes + turn_bytes;
    const int64_t left = int64_t(std::min<size_t>(device->workspace_limit, INT64_MAX)) - own->rows_at;
    own->pairs = pair_bytes == 0 ? all : left < pair_bytes ? 0 : std::min(all, left / pair_bytes);
    if (all > 0 && (own->pairs == 0 || left < 0)) return false;
    own->sums_at = own->rows_at + own->pairs * row_bytes;
    own->turns_at = own->sums_at + own->pairs * sum_bytes;
    plan->workspace_bytes = size_t(own->rows_at + own->pairs * pair_bytes);
    return true;
}

/* Keys that some queries see: on average, or queries that see a key if those are fewer, and by the mean over the most.
 */
struct Visible {
    int64_t mean;
    double evenness; // 1: all see the same number
};
static Visible visible_of(const fa_forward &f) {
    constexpr int64_t kRows = 16;
    int64_t keys = 0, most = 1;
    for (int64_t n = 0; n < kRows; ++n) {
        const KeyRange seen = row_keys(f, (2 * n + 1) * f.seq_q / (2 * kRows));
        if (seen.empty()) continue;
        keys += seen.end - seen.begin;
        most = std::max<int64_t>(most, seen.end - seen.begin);
    }
    return {std::min(keys, keys * f.seq_q / std::max<int64_t>(f.seq_k, 1)) / kRows, double(keys) / (kRows * most)};
}

static int64_t key_tiles_of(const fa_forward &f) { return f.batch * f.heads_kv * divided_up(f.seq_k, kFusedTileK); }

/* Whether CTAs that take turns hardly wait for one another: several tiles for each, and not many tiles a head of few
 * steps. The ordered instance is then as fast or faster in any order too: it neither clears sums nor reads all of them
 * again (an H100: bench/log/wgmma_fused_backward_sm90.md). */
static bool turns_are_short(const fa_forward &f, const fa_device_info *device) {
    return key_tiles_of(f) >= 5 * device->sm_count && 2 * f.seq_q >= f.seq_k;
}

/* Share of their time that multiprocessors work on tiles: equal ones fill rounds, the last of which may be nearly
 * empty; others go longest first, and the longest ends last where there are few. */
static double busy_share(int64_t tiles, int sm_count, double evenness) {
    const double rounds = double(tiles) / sm_count;
    return evenness == 1 ? rounds / std::ceil(rounds) : std::min(1.0, rounds * evenness);
}

/* Whether tiles of keys leave multiprocessors idle that tiles of queries keep busy, as with groups of query heads,
 * whose keys are fewer. wgmma_backward_sm90 makes three of its seven products by tiles of queries. */
static bool keys_are_few(const fa_forward &f, const fa_device_info *device, double evenness) {
    constexpr double kIdle = 1.125; // 1.2 at 0.93 of wgmma_backward_sm90's rate, 1 at 1.04 to 1.21 (an H100)
    const int64_t query_tiles = f.batch * f.heads * divided_up(f.seq_q, kFusedTileK);
    return busy_share(query_tiles, device->sm_count, evenness) >
           kIdle * busy_share(key_tiles_of(f), device->sm_count, evenness);
}

/* Whether this kernel is faster than wgmma_backward_sm90, on an H100 (bench/log/wgmma_fused_backward_sm90.md).
 * wgmma_backward_sm90 computes head_dim 96 at 96 columns, this kernel at 128, which takes it 1.12 to 1.14 times as
 * long. */
static bool fused_is_faster(const fa_forward &f, const fa_device_info *device, const FusedOwn &own) {
    constexpr int kNarrow = 96;
    if (own.index > 0 ? f.head_dim <= kNarrow || f.seq_k < 1024 : std::min(f.seq_q, f.seq_k) < 128) return false;
    if (own.ordered) return turns_are_short(f, device);
    const bool at_once = 4 * key_tiles_of(f) <= 3 * device->sm_count && f.heads == f.heads_kv;
    if (own.index == 0 && at_once) return true;
    const Visible visible = visible_of(f);
    return visible.mean >= 2048 && !keys_are_few(f, device, visible.evenness);
}

static fa_answer fused_plan(const fa_problem *problem, const fa_device_info *device, fa_plan *plan, fa_why *why) {
    constexpr int kMaxRowsBits = 29, kMaxTilesBits = 31, kAll = 1 << FA_GRAD_Q | 1 << FA_GRAD_K | 1 << FA_GRAD_V;
    const fa_backward &p = problem->backward;
    const fa_forward &f = p.forward;
    FusedOwn &own = fa_own<FusedOwn>(plan);
    if (f.head_dim > kFusedHeadDims[std::size(kFusedHeadDims) - 1])
        return fa_because(why, FA_REFUSES, FA_WHY_HEAD_DIM, kFusedHeadDims[std::size(kFusedHeadDims) - 1], 0, 0);
    if (f.head_dim % 8) return fa_because(why, FA_REFUSES, FA_WHY_HEAD_DIM_MULTIPLE, 8, 0, 0);
    if (std::max(f.seq_q, f.seq_k) >> kMaxRowsBits)
        return fa_because(why, FA_REFUSES, FA_WHY_LENGTH, kMaxRowsBits, 0, 0);
    if ((std::max(f.seq_q, f.seq_k) + 63) / 64 >
        (INT64_C(1) << kMaxTilesBits) / std::max<int64_t>(f.heads * f.batch, 1))
        return fa_because(why, FA_REFUSES, FA_WHY_TILES, kMaxTilesBits, 0, 0);
    if (f.out_dtype != f.dtype) return fa_because(why, FA_REFUSES, FA_WHY_OUT_DTYPE, 0, 0, 0);
    const int64_t keys = f.key_end - f.key_begin;
    const bool reads = f.batch > 0 && f.heads > 0 && f.seq_q > 0 && keys > 0; // strides of empty operands mean nothing
    if (reads && (!takes_tensor_map(f.q, FA_OPERAND_Q, f.head_dim, f.seq_q, why) ||
                  !takes_tensor_map(f.k, FA_OPERAND_K, f.head_dim, keys, why) ||
                  !takes_tensor_map(f.v, FA_OPERAND_V, f.head_dim, keys, why) ||
                  !takes_tensor_map(f.out, FA_OPERAND_OUT, f.head_dim, f.seq_q, why) ||
                  (p.dout.data && !takes_tensor_map(p.dout, FA_OPERAND_DOUT, f.head_dim, f.seq_q, why))))
        return FA_REFUSES;
    if (!device->tensor_maps) return fa_because(why, FA_NOT_HERE, FA_WHY_TENSOR_MAPS, 0, 0, 0);
    while (kFusedHeadDims[own.index] < f.head_dim) ++own.index;
#ifdef FA_DROPOUT
    if (problem->extra.dropout.threshold > UINT16_MAX) return fa_because(why, FA_REFUSES, FA_WHY_NOTHING_KEPT, 0, 0, 0);
    own.kind = FA_MASKED, own.ordered = true;
#else
    own.kind = backward_kind(f);
    if (p.ordered && own.index > 0) return fa_because(why, FA_REFUSES, FA_WHY_ORDERED, kFusedHeadDims[0], 0, 0);
    own.ordered = p.ordered || (own.index == 0 && turns_are_short(f, device));
#endif
    if (!fused_instance(p, own)) return fa_because(why, FA_REFUSES, FA_WHY_INSTANCE, 0, 0, 0);
    if (!fused_sizes(p, device, &own, plan)) return fa_because(why, FA_REFUSES, FA_WHY_ROW_WORKSPACE, 0, 0, 0);
    plan->threads = 128 * (kFusedConsumers + 1);
    plan->blocks = std::min<int64_t>(device->sm_count, own.pairs * own.key_tiles);
    plan->keep = true;
#ifdef FA_DROPOUT
    return problem->extra.dropout.threshold ? FA_TAKES : fa_because(why, FA_DECLINES, FA_WHY_NO_DROPOUT, 0, 0, 0);
#endif
    return (p.wants & kAll) == kAll && fused_is_faster(f, device, own)
               ? FA_TAKES
               : fa_because(why, FA_DECLINES, FA_WHY_TWO_PASSES, 0, 0, 0);
}

/* ---- launch ---- */

static fa_code fused_maps(const fa_backward &p, int tile_q, FusedParams *to, const fa_launch &launch) {
    const fa_forward &f = p.forward;
    const int64_t rows = to->call.row_end - to->call.row_begin, keys = to->call.visible.seq_k;
    if (rows <= 0) return FA_OK;                        // no tile touches a map
    const fa_operand dout = p.dout.data ? p.dout : f.q; // what is past its end is not read
    const auto encode = [&](CUtensorMap *map, int *step, const fa_operand &x, int64_t first, int64_t extent,
                            int64_t heads, int box, fa_operand_name name) {
        step[0] = x.stride[1] != 0, step[1] = x.stride[0] != 0;
        return tensor_map_encode(map, launch, rows_of(x, first), f.dtype, f.head_dim, extent, heads, f.batch, box,
                                 name);
    };
    FA_TRY(encode(&to->q, to->q_step, f.q, to->call.row_begin, rows, f.heads, tile_q, FA_OPERAND_Q));
    FA_TRY(encode(&to->dout, to->dout_step, dout, to->call.row_begin, rows, f.heads, tile_q, FA_OPERAND_OUT));
    FA_TRY(encode(&to->k, to->k_step, f.k, f.key_begin, keys, f.heads_kv, kFusedTileK, FA_OPERAND_K));
    return encode(&to->v, to->v_step, f.v, f.key_begin, keys, f.heads_kv, kFusedTileK, FA_OPERAND_V);
}

static RowsOperand rows_operand(const fa_operand &x) { return {x.data, {x.stride[0], x.stride[1], x.stride[2]}}; }

/* The values that all launches of a call share. */
static fa_code fused_work(const fa_backward &p, const FusedOwn &own, FusedWork *work, const fa_launch &launch) {
    const fa_forward &f = p.forward;
    char *const workspace = static_cast<char *>(launch.workspace);
    auto &rows = work->rows;
    auto &fused = work->fused;
    FusedFinishParams &finish = work->finish;
    fused.call = backward_call(p);
    FA_TRY(fused_maps(p, fused_tile_q(kFusedHeadDims[own.index]), &fused, launch));
    rows.call = finish.call = fused.call;
    rows.out = rows_operand(f.out), rows.dout = rows_operand(p.dout);
    rows.lse = rows_operand(p.lse), rows.dlse = rows_operand(p.dlse);
    rows.row_blocks = workspace + own.rows_at;
    rows.sums = reinterpret_cast<float *>(workspace + own.sums_at);
    if (own.ordered) rows.turns = fused.turns = reinterpret_cast<uint32_t *>(workspace + own.turns_at);
    if (own.sink_parts) rows.sink_parts = reinterpret_cast<float *>(workspace + own.parts_at);
    rows.sinks = f.sinks.data, rows.sinks_stride = f.sinks.stride[0], rows.sinks_dtype = f.sinks_dtype;
    fused.row_blocks = rows.row_blocks;
    fused.sums = rows.sums, finish.sums = rows.sums;
    rows.row_block_count = fused.row_block_count = finish.row_block_count = int(own.row_blocks);
    finish.dq = gradient(p, FA_GRAD_Q), fused.dk = gradient(p, FA_GRAD_K), fused.dv = gradient(p, FA_GRAD_V);
    if (own.ordered) fused.dq = finish.dq;
    if (own.ordered && fused.call.row_begin < fused.call.row_end) {
        const int tile_q = fused_tile_q(kFusedHeadDims[own.index]);
        finish.done_begin = fused.call.row_begin / tile_q;
        finish.done_end = int(divided_up(fused.call.row_end, tile_q));
    }
    fused.scale = finish.scale = static_cast<float>(f.scale);
    return FA_OK;
}

/* Heads whose streamed operands and sums, head_bytes each, a section of the longest-first order holds: few, so that
 * what is in flight stays in L2; the next section's longest tiles follow the shortest of this one. In order a section
 * of fewer than four heads has more tiles at work on each, every one of them a turn's way behind the one before. */
static int64_t fused_section_heads(int64_t head_bytes, int head_dim, bool ordered) {
    const int64_t bytes = int64_t(head_dim <= 64 ? 24 : 16) << 20, most = INT64_C(40) << 20;
    if (head_bytes <= 0) return 1;
    const int64_t heads = std::max<int64_t>(1, bytes / head_bytes);
    return ordered ? std::max(heads, std::min<int64_t>(4, most / head_bytes)) : heads;
}

/* The least section where heads have few tiles, as in groups of query heads, and these differ in length: three tiles a
 * multiprocessor, so that the longest ones of the last section are not left to a few; sections are alike. */
static int64_t least_section_heads(int64_t key_tiles, int64_t pairs, int sm_count) {
    const int64_t least = divided_up(INT64_C(3) * sm_count, std::max<int64_t>(key_tiles, 1));
    return divided_up(pairs, std::max<int64_t>(pairs / least, 1));
}

/* The launches of one group of pairs. */
static fa_code launch_fused(const fa_backward &p, const FusedOwn &own, FusedWork *work, int64_t first, int64_t pairs,
                            const fa_launch &launch) {
    const fa_forward &f = p.forward;
    const bool unequal = own.kind != FA_FULL && (f.left < FA_UNBOUNDED || f.right < FA_UNBOUNDED);
    const int64_t group = f.heads / f.heads_kv;
    auto *counter = static_cast<uint32_t *>(launch.workspace);
    work->rows.call.first_pair = work->fused.call.first_pair = work->finish.call.first_pair = int(first);
    work->query_blocks = pairs * group * own.row_blocks;
    const bool unfinished = work->finish.done_begin > 0 || work->finish.done_end < own.row_blocks;
    work->finish_blocks = work->finish.dq.data && unfinished ? work->query_blocks : 0;
    int64_t section = fused_section_heads(8 * group * f.seq_q * f.head_dim, f.head_dim, own.ordered);
    if (!own.ordered && group > 1 && (f.left >= FA_UNBOUNDED || f.right >= FA_UNBOUNDED)) // a window's tiles are alike
        section = std::max(section, least_section_heads(own.key_tiles, pairs, launch.device->sm_count));
    work->key_blocks = order(&work->fused.schedule, unequal, own.key_tiles, pairs, section, counter, launch);
    if (own.ordered) { // whatever the tiles' lengths: see turns.cuh
        work->fused.schedule.section_heads = uint32_t(std::min(pairs, section));
        work->fused.schedule.counter = counter;
    }
    if (work->fused.schedule.counter)
        FA_CUDA_TRY(launch, cudaMemsetAsync(counter, 0, sizeof *counter, static_cast<cudaStream_t>(launch.stream)));
    return fused_instance(p, own)(*work, launch);
}

static fa_code fused_launch(const fa_problem *problem, const fa_plan *plan, const fa_launch *launch) {
    const fa_backward &p = problem->backward;
    const fa_forward &f = p.forward;
    const FusedOwn &own = fa_own<FusedOwn>(plan);
    const int64_t all = f.batch * f.heads_kv;
    if (all > 0) {
        FusedWork work = {};
        FA_TRY(fused_work(p, own, &work, *launch));
#ifdef FA_DROPOUT
        work.fused.dropout = problem->extra.dropout;
        work.fused.kept = static_cast<float>(fa_dropout_scale(&problem->extra.dropout));
        work.fused.scale *= work.fused.kept, work.rows.delta_factor = 1 / work.fused.kept;
#endif
        for (int64_t first = 0; first < all; first += own.pairs)
            FA_TRY(launch_fused(p, own, &work, first, std::min(own.pairs, all - first), *launch));
    }
    if (p.wants >> FA_GRAD_SINKS & 1 && f.heads > 0) {
        FA_CHAOS_ARM(launch->stream, *launch);
        backward_sinks<<<static_cast<unsigned>(f.heads), kSinkThreads, 0, static_cast<cudaStream_t>(launch->stream)>>>(
            reinterpret_cast<const float *>(static_cast<char *>(launch->workspace) + own.parts_at), own.sink_parts,
            f.batch, f.heads, gradient(p, FA_GRAD_SINKS));
        FA_CUDA_TRY(*launch, cudaGetLastError());
    }
    return FA_OK;
}

} // namespace FA_SPACE

#ifndef FA_DROPOUT
FA_DEFINE_KERNEL(wgmma_fused_backward_sm90) = {
    .abi = FA_KERNEL_ABI,
    .op = FA_BACKWARD,
    .device = FA_CUDA,
    .name = "wgmma_fused_backward_sm90",
    .summary = "Hopper gradients in one pass, float16 and bfloat16: TMA, wgmma, dq added up in memory",
    .cc_from = 90,
    .cc_to = 90,
    .dtypes = fa::kFloat16Bits,
    .takes = FA_WITH_SINKS | FA_WITH_SOFTCAP | FA_WITH_WINDOW | FA_WITH_DLSE | FA_WITH_DSINKS | FA_WITH_ACCUMULATE |
             FA_WITH_ORDERED,
    .plan = fa::sm90::fused_plan,
    .launch = fa::sm90::fused_launch,
};

#endif
#endif
