/* Host side of wgmma_fused_backward_sm90 and wgmma_dropout_backward_sm90: plan, launch. For the host's compilation of a
 * kernel alone. */
#pragma once
#include "sm90/backward/host.cuh"
#include "sm90/backward/sequence_calls.cuh"
#include "sm90/fused_backward/bias_host.cuh"
#include "sm90/fused_backward/config.cuh"
#include "sm90/score/make_map.cuh"
#include <algorithm> // min, max
#include <cmath>     // ceil

namespace fa::sm90 {

namespace { // Of this file alone: other kernels have instances of the same name, and templates of these.
struct Instance {
    bool ordered, sequences;
    int head_dim, kind;
    fa_dtype dtype;
    Launch *launch; // null: this build leaves it out
};
} // namespace
#define FA_FUSED_INSTANCE(name, Config, head_dim, kind, T)                                                             \
    {Config<T, head_dim, kind>::kOrdered, Config<T, head_dim, kind>::kSequences, head_dim, kind, kDtypeOf<T>, name},

/* ---- plan ---- */

/* The plan's own part. */
struct FusedOwn {
    int instance;       // of the kernel's
    bool ordered;       // its sums of dq have one order
    int columns, kind;  // of the instance
    int64_t pairs;      // batch entries times kv heads of one launch
    int64_t key_tiles;  // a kv head
    int64_t row_blocks; // a query head
    int64_t sink_parts; // a query head; 0: dsinks is not wanted
    int64_t map_at, bias_at, rows_at, sums_at, steps_at,
        turns_at;      // bytes into the workspace, which begins with counters; bias_at -1: no dS there
    SequenceRoom room; // of sequences
};

constexpr int64_t kFusedCounterBytes = 256; // partial sums of dsinks follow
constexpr int kOrderedHeadDim = 64; // of calls that take sums of one order without options that ask for them, at most
constexpr int kLightLeast = 128;    // queries and keys of calls of the kind kLight

static int fused_kind(const fa_forward &f) {
    if (f.bias.data) return kGeneral;
    return has_map(f) || f.alibi.data ? kLight : backward_kind(f);
}
/* Whether an instance of a kind takes its steps from a list. */
static bool has_steps(int kind) { return kind == kLight || kind == kGeneral; }

/* Its row blocks have fused_tile_q() queries. */
static SequenceTiles tiles_of(const fa_problem *problem, int columns) {
    return sequence_tiles(problem, {fused_tile_q(columns), kFusedTileK, fused_tile_q(columns)});
}

/* The call as its pair map has it: whose keys begin with a whole tile. */
static fa_forward mapped_call(const fa_forward &f) {
    fa_forward mapped = f;
    mapped.key_begin = f.key_begin / kFusedTileK * kFusedTileK;
    return mapped;
}
static MapPlan fused_map(const fa_forward &mapped, int64_t at) {
    return map_plan(mapped, mapped.key_end - mapped.key_begin, false, true, at);
}

/* Of the steps of a tile, and how many there are. */
static int64_t light_tile_bytes(int64_t steps) { return steps * int64_t(sizeof(LightStep)) + int64_t(sizeof(int)); }

/* Sizes of launches and of the workspace. False when not even one pair fits into the limit. */
static bool fused_sizes(const fa_problem *problem, const fa_device_info *device, FusedOwn *own, fa_plan *plan) {
    const fa_backward &p = problem->backward;
    const fa_forward &f = p.forward;
    const int tile_q = fused_tile_q(own->columns);
    const bool sequences = problem->sequences.given;
    const int64_t entries = entries_of(problem), all = entries * f.heads_kv;
    const int64_t group = f.heads_kv ? f.heads / f.heads_kv : 1;
    own->key_tiles = divide_up(f.seq_k, kFusedTileK);
    own->row_blocks = divide_up(f.seq_q, tile_q);
    if (sequences) {
        const SequenceTiles tiles = tiles_of(problem, own->columns);
        own->key_tiles = tiles.count(kTilesOfKeys), own->row_blocks = tiles.count(kTilesOfRows);
    }
    own->sink_parts = p.wants >> FA_GRAD_SINKS & 1 ? own->row_blocks * (tile_q / 16) : 0;
    own->rows_at =
        kFusedCounterBytes + divide_up(entries * f.heads * own->sink_parts * int64_t(sizeof(float)), 256) * 256;
    if (sequences) {
        own->room = room_of_sequences(own->rows_at, tiles_of(problem, own->columns));
        own->rows_at = own->room.end;
    }
    if (has_map(f)) {
        own->map_at = own->rows_at;
        own->rows_at = divide_up(fused_map(mapped_call(f), own->map_at).bytes, 256) * 256;
    }
    int64_t row_block_bytes = tile_q * int64_t(3 * sizeof(float));
    if (has_steps(own->kind)) row_block_bytes += sizeof(LightRowBlock<64>) - sizeof(FusedRowBlock<64>);
    const int64_t row_bytes = group * own->row_blocks * row_block_bytes;
    const int64_t sum_bytes = group * own->row_blocks * kQueryElements * int64_t(sizeof(float));
    const int64_t turn_bytes = own->ordered ? group * own->row_blocks * int64_t(sizeof(uint32_t)) : 0;
    const int64_t step_bytes = has_steps(own->kind) ? own->key_tiles * light_tile_bytes(group * own->row_blocks) : 0;
    const int64_t bias_bytes = is_bias_summed(p) ? bias_pair_bytes(f) : 0;
    const int64_t pair_bytes = row_bytes + sum_bytes + step_bytes + turn_bytes;
    const int64_t left = int64_t(std::min<size_t>(device->workspace_limit, INT64_MAX)) - own->rows_at -
                         (bias_bytes ? kBiasAlignment : 0);
    const int64_t all_bytes = pair_bytes + bias_bytes;
    own->pairs = all_bytes == 0 ? all : left < all_bytes ? 0 : std::min(all, left / all_bytes);
    own->pairs = pairs_of_launch(p, own->pairs);
    if (all > 0 && (own->pairs == 0 || left < 0)) return false;
    own->bias_at = bias_bytes ? own->rows_at : -1;
    own->rows_at += divide_up(own->pairs * bias_bytes, kBiasAlignment) * kBiasAlignment;
    own->sums_at = own->rows_at + own->pairs * row_bytes;
    own->steps_at = own->sums_at + own->pairs * sum_bytes;
    own->turns_at = own->steps_at + own->pairs * step_bytes;
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

static int64_t key_tiles_of(const fa_forward &f) { return f.batch * f.heads_kv * divide_up(f.seq_k, kFusedTileK); }

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
    const int64_t query_tiles = f.batch * f.heads * divide_up(f.seq_q, kFusedTileK);
    return busy_share(query_tiles, device->sm_count, evenness) >
           kIdle * busy_share(key_tiles_of(f), device->sm_count, evenness);
}

/* Whether this kernel is faster than wgmma_backward_sm90, on an H100 (bench/log/wgmma_fused_backward_sm90.md).
 * wgmma_backward_sm90 computes head_dim 96 at 96 columns, this kernel at 128, which takes it 1.12 to 1.14 times as
 * long. */
[[maybe_unused]] static bool fused_is_faster(const fa_problem *problem, const fa_device_info *device,
                                             const FusedOwn &own) {
    constexpr int kNarrow = 96;
    const fa_forward &f = problem->backward.forward;
    if (problem->sequences.given) return true; // in any batch, so that a sequence has its bits in every one
    if (own.columns > kOrderedHeadDim ? f.head_dim <= kNarrow || f.seq_k < 1024 : std::min(f.seq_q, f.seq_k) < 128)
        return false;
    if (own.ordered) return turns_are_short(f, device);
    const bool at_once = 4 * key_tiles_of(f) <= 3 * device->sm_count && f.heads == f.heads_kv;
    if (own.columns <= kOrderedHeadDim && at_once) return true;
    const Visible visible = visible_of(f);
    return visible.mean >= 2048 && !keys_are_few(f, device, visible.evenness);
}

/* The instance for a call. Without a need for one order the ordered one is taken where it is as fast, or alone there.
 */
template <size_t N>
const Instance *find_instance(const Instance (&instances)[N], const fa_problem *problem, const fa_device_info *device) {
    const fa_backward &p = problem->backward;
    const fa_forward &f = p.forward;
    const bool sequences = problem->sequences.given;
    const int kind = fused_kind(f);
    const auto find = [&](bool ordered) {
        return instance_for(instances, f.head_dim, kind, f.dtype,
                            [=](const Instance &i) { return i.ordered == ordered && i.sequences == sequences; });
    };
    const bool ordered =
        p.ordered || sequences || has_steps(kind) || (f.head_dim <= kOrderedHeadDim && turns_are_short(f, device));
    const Instance *found = find(ordered);
    return found || p.ordered || sequences ? found : find(!ordered);
}

/* The greatest head_dim of the instances whose sums have one order, those that are left out too. */
template <size_t N> int widest_ordered(const Instance (&instances)[N], int kind) {
    int most = 0;
    for (const Instance &i : instances)
        if (i.ordered && !i.sequences && does(i.kind, kind)) most = std::max(most, i.head_dim);
    return most;
}

/* Whether a mask, intervals, slopes of ALiBi or a bias stand beside what their instances take. */
static bool light_fits(const fa_problem *problem, int widest_head_dim, fa_why *why) {
    const fa_forward &f = problem->backward.forward;
    const int64_t light = problem->features & (FA_WITH_MASK | FA_WITH_ALIBI | FA_WITH_INTERVALS | FA_WITH_BIAS);
    if (!light) return true;
    const bool sequences = problem->sequences.given;
    if (sequences)
        fa_because(why, FA_REFUSES, FA_WHY_TOGETHER, light, FA_WITH_LENGTHS, 0);
    else if (f.softcap > 0)
        fa_because(why, FA_REFUSES, FA_WHY_SOFTCAP_BESIDE, 0, 0, 0);
    return !sequences && f.softcap == 0 && takes_bias_tiles(problem->backward, widest_head_dim, why);
}

template <size_t N>
fa_answer plan_fused(const Instance (&instances)[N], const fa_problem *problem, const fa_device_info *device,
                     fa_plan *plan, fa_why *why) {
    const fa_backward &p = problem->backward;
    const fa_forward &f = p.forward;
    FusedOwn &own = fa_own<FusedOwn>(plan);
    if (f.head_dim > widest(instances)) return fa_because(why, FA_REFUSES, FA_WHY_HEAD_DIM, widest(instances), 0, 0);
    if (f.head_dim % 8) return fa_because(why, FA_REFUSES, FA_WHY_HEAD_DIM_MULTIPLE, 8, 0, 0);
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
                  !takes_tensor_map(f.v, FA_OPERAND_v, f.head_dim, keys, why) ||
                  !takes_tensor_map(f.out, FA_OPERAND_out, f.head_dim, f.seq_q, why) ||
                  (p.dout.data && !takes_tensor_map(p.dout, FA_OPERAND_dout, f.head_dim, f.seq_q, why))))
        return FA_REFUSES;
    if (!device->tensor_maps) return fa_because(why, FA_NOT_HERE, FA_WHY_TENSOR_MAPS, 0, 0, 0);
    const int ordered = widest_ordered(instances, fused_kind(f));
    if (!light_fits(problem, ordered, why)) return FA_REFUSES;
    if (p.ordered && f.head_dim > ordered) return fa_because(why, FA_REFUSES, FA_WHY_ORDERED, ordered, 0, 0);
    if (sequences && f.head_dim > kOrderedHeadDim)
        return fa_because(why, FA_REFUSES, FA_WHY_HEAD_DIM, kOrderedHeadDim, 0, 0);
    if (sequences && f.softcap > 0) return fa_because(why, FA_REFUSES, FA_WHY_FEATURES, FA_WITH_SOFTCAP, 0, 0);
    const Instance *found = find_instance(instances, problem, device);
    if (!found) return fa_because(why, FA_REFUSES, FA_WHY_INSTANCE, 0, 0, 0);
    own.instance = int(found - instances);
    own.ordered = found->ordered, own.columns = found->head_dim, own.kind = found->kind;
    if (!fused_sizes(problem, device, &own, plan))
        return fa_because(why, FA_REFUSES, is_bias_summed(p) ? FA_WHY_BIAS_WORKSPACE : FA_WHY_ROW_WORKSPACE, 0, 0, 0);
    if (sequences && 2 * std::max(own.key_tiles, own.row_blocks) > // twice: turns.block
                         (INT64_C(1) << kMaxTilesBits) / std::max<int64_t>(f.heads, 1))
        return fa_because(why, FA_REFUSES, FA_WHY_TILES, kMaxTilesBits, 0, 0);
    plan->threads = 128 * (kFusedConsumers + 1);
    plan->blocks = std::min<int64_t>(device->sm_count, own.pairs * own.key_tiles);
    plan->keep = true;
    return FA_TAKES;
}

/* ---- launch ---- */

/* Maps of the kernel that includes this. */
struct CachedMaps {
    CachedTensorMap q = {FA_OPERAND_q}, k = {FA_OPERAND_k}, v = {FA_OPERAND_v}, dout = {FA_OPERAND_dout};
};
static thread_local CachedMaps cached_maps;

static fa_code fused_maps(const fa_backward &p, int tile_q, FusedParams *to, const fa_launch &launch) {
    const fa_forward &f = p.forward;
    const int64_t rows = to->call.row_end - to->call.row_begin, keys = to->call.visible.seq_k;
    if (rows <= 0) return FA_OK;                        // no tile touches a map
    const fa_operand dout = p.dout.data ? p.dout : f.q; // what is past its end is not read
    const auto encode = [&](CUtensorMap *map, int *step, const fa_operand &x, int64_t first, int64_t extent,
                            int64_t heads, int box, CachedTensorMap &cached) {
        step[0] = x.stride[1] != 0, step[1] = x.stride[0] != 0;
        return tensor_map_encode(map, cached, launch, rows_of(x, first), f.dtype, f.head_dim, extent, heads, f.batch,
                                 box);
    };
    FA_TRY(encode(&to->q, to->q_step, f.q, to->call.row_begin, rows, f.heads, tile_q, cached_maps.q));
    FA_TRY(encode(&to->dout, to->dout_step, dout, to->call.row_begin, rows, f.heads, tile_q, cached_maps.dout));
    FA_TRY(encode(&to->k, to->k_step, f.k, f.key_begin, keys, f.heads_kv, kFusedTileK, cached_maps.k));
    return encode(&to->v, to->v_step, f.v, f.key_begin, keys, f.heads_kv, kFusedTileK, cached_maps.v);
}

/* Heads whose streamed operands and sums, head_bytes each, a section of the longest-first order holds: few, so that
 * what is in flight stays in L2; the next section's longest tiles follow the shortest of this one. In order a section
 * of fewer than four heads has more tiles at work on each, every one of them a turn's way behind the one before. */
static __host__ __device__ int64_t fused_section_heads(int64_t head_bytes, int head_dim, bool ordered) {
    const int64_t bytes = int64_t(head_dim <= 64 ? 24 : 16) << 20, most = INT64_C(40) << 20;
    if (head_bytes <= 0) return 1;
    const int64_t heads = std::max<int64_t>(1, bytes / head_bytes);
    return ordered ? std::max(heads, std::min<int64_t>(4, most / head_bytes)) : heads;
}

/* Heads of a sequence whose tiles follow one another by length. */
struct FusedSections {
    int64_t row_bytes; // a query's of what tiles stream and add up
    int head_dim;
    bool ordered, whole; // whole: tiles are alike
    __device__ __forceinline__ int64_t operator()(const SequenceCall &call, int) const {
        return whole && !ordered ? 1 : fused_section_heads(call.seq_q * row_bytes, head_dim, ordered);
    }
};

/* The kernels that leave calls and maps of sequences in workspace, and the lists of tiles. */
static fa_code fused_sequences(const fa_problem *problem, const FusedOwn &own, FusedWork *work,
                               const fa_launch &launch) {
    const fa_backward &p = problem->backward;
    const fa_forward &f = p.forward;
    const int tile_q = fused_tile_q(own.columns);
    const bool whole = backward_kind(f) == kFull;
    SequenceMaking<FusedSections> making;
    FA_TRY(make_sequences(problem, tiles_of(problem, own.columns), own.room,
                          {tile_q, tile_q, 0, 0, 0, kFusedTileK, kFusedTileK}, kTilesOfQueries,
                          FusedSections{8 * f.heads / f.heads_kv * f.head_dim, f.head_dim, own.ordered, whole}, &making,
                          launch));
    const auto step = [&](int map) { return int(making.of[map].stride[1] != 0); };
    FusedParams &fused = work->fused;
    fused.q_step[0] = step(kMapOfQ), fused.dout_step[0] = step(kMapOfDout);
    fused.k_step[0] = step(kMapOfTileK), fused.v_step[0] = step(kMapOfTileV);
    work->row_list = {.calls = making.calls, .span = making.t.span[kTilesOfRows], .whole = whole};
    work->key_list = {.calls = making.calls, .span = making.t.span[kTilesOfKeys], .whole = whole};
    return FA_OK;
}

static RowsOperand rows_operand(const fa_operand &x) { return {x.data, {x.stride[0], x.stride[1], x.stride[2]}}; }

/* Launches the pair map of a call with a mask or intervals, and says where it is. */
static fa_code fused_light(const fa_backward &p, const FusedOwn &own, FusedWork *work, const fa_launch &launch) {
    const fa_forward &f = p.forward, mapped = mapped_call(f);
    char *const workspace = static_cast<char *>(launch.workspace);
    LightScore &light = work->fused.light;
    LightStepsParams &steps = work->steps;
    steps.call = work->fused.call, steps.key_tiles = int(own.key_tiles);
    steps.capacity = light.capacity = int(f.heads / f.heads_kv * own.row_blocks);
    light.steps = steps.steps = reinterpret_cast<LightStep *>(workspace + own.steps_at);
    light.counts = steps.counts = reinterpret_cast<int *>(steps.steps + own.pairs * own.key_tiles * steps.capacity);
    work->finish.row_blocks = workspace + own.rows_at;
    light.alibi = f.alibi.data != nullptr;
    light.diagonal = int(f.diagonal);
    work->rows.mask = f.mask, work->rows.slopes = f.alibi, work->rows.intervals = intervals_of(f);
    if (!has_map(f) || f.key_end <= f.key_begin || f.seq_q == 0) return FA_OK;
    const MapPlan plan = fused_map(mapped, own.map_at);
    light.map = pair_map_of_keys(plan, launch), light.map_key = int(mapped.key_begin);
    steps.map = pair_map(plan, launch), steps.map_key = light.map_key;
    return launch_map(plan, mapped, mapped.key_end - mapped.key_begin, nullptr, 0, launch);
}

/* The values that all launches of a call share. */
static fa_code fused_work(const fa_problem *problem, const FusedOwn &own, FusedWork *work, const fa_launch &launch) {
    const fa_backward &p = problem->backward;
    const fa_forward &f = p.forward;
    char *const workspace = static_cast<char *>(launch.workspace);
    auto &rows = work->rows;
    auto &fused = work->fused;
    FusedFinishParams &finish = work->finish;
    fused.call = backward_call(p);
    FA_TRY(problem->sequences.given ? fused_sequences(problem, own, work, launch)
                                    : fused_maps(p, fused_tile_q(own.columns), &fused, launch));
    rows.call = finish.call = fused.call;
    if (has_steps(own.kind)) FA_TRY(fused_light(p, own, work, launch));
    if (own.kind == kGeneral) FA_TRY(fused_bias(p, own.bias_at, &fused, launch));
    rows.out = rows_operand(f.out), rows.dout = rows_operand(p.dout);
    rows.lse = rows_operand(p.lse), rows.dlse = rows_operand(p.dlse);
    rows.row_blocks = workspace + own.rows_at;
    rows.sums = reinterpret_cast<float *>(workspace + own.sums_at);
    if (own.ordered) rows.turns = fused.turns = reinterpret_cast<uint32_t *>(workspace + own.turns_at);
    if (own.sink_parts) rows.sink_parts = reinterpret_cast<float *>(workspace + kFusedCounterBytes);
    rows.sinks = f.sinks.data, rows.sinks_stride = f.sinks.stride[0], rows.sinks_dtype = f.sinks_dtype;
    fused.row_blocks = rows.row_blocks;
    fused.sums = rows.sums, finish.sums = rows.sums;
    rows.row_block_count = fused.row_block_count = finish.row_block_count = int(own.row_blocks);
    finish.dq = gradient(p, FA_GRAD_Q), fused.dk = gradient(p, FA_GRAD_K), fused.dv = gradient(p, FA_GRAD_V);
    if (own.ordered) fused.dq = finish.dq;
    if (own.ordered && fused.call.row_begin < fused.call.row_end) {
        const int tile_q = fused_tile_q(own.columns);
        finish.done_begin = fused.call.row_begin / tile_q;
        finish.done_end = int(divide_up(fused.call.row_end, tile_q));
    }
    fused.scale = finish.scale = static_cast<float>(f.scale);
    return FA_OK;
}

/* The least section where heads have few tiles, as in groups of query heads, and these differ in length: three tiles a
 * multiprocessor, so that the longest ones of the last section are not left to a few; sections are alike. */
static int64_t least_section_heads(int64_t key_tiles, int64_t pairs, int sm_count) {
    const int64_t least = divide_up(INT64_C(3) * sm_count, std::max<int64_t>(key_tiles, 1));
    return divide_up(pairs, std::max<int64_t>(pairs / least, 1));
}

/* The launches of one group of pairs. */
static fa_code launch_fused(const Instance &instance, const fa_backward &p, const FusedOwn &own, FusedWork *work,
                            int64_t first, int64_t pairs, const fa_launch &launch) {
    const fa_forward &f = p.forward;
    const bool unequal = own.kind != kFull && (f.left < FA_UNBOUNDED || f.right < FA_UNBOUNDED);
    const int64_t group = f.heads / f.heads_kv;
    auto *counter = static_cast<uint32_t *>(launch.workspace);
    work->rows.call.first_pair = work->fused.call.first_pair = work->finish.call.first_pair = int(first);
    work->query_blocks = pairs * group * own.row_blocks;
    work->steps.call.first_pair = int(first), work->steps.tiles = int(pairs * own.key_tiles);
    const bool unfinished = instance.sequences || work->steps.map.seen || work->finish.done_begin > 0 ||
                            work->finish.done_end < own.row_blocks;
    work->finish_blocks = work->finish.dq.data && unfinished ? work->query_blocks : 0;
    if (instance.sequences) {
        work->key_list.heads = uint32_t(pairs), work->key_list.units = uint32_t(pairs * own.key_tiles);
        work->key_list.counter = counter;
        work->key_blocks = std::min<int64_t>(pairs * own.key_tiles, launch.device->sm_count);
        if (first > 0) // that of the first group is 0
            FA_CUDA_TRY(launch, cudaMemsetAsync(counter, 0, sizeof *counter, static_cast<cudaStream_t>(launch.stream)));
        return instance.launch(*work, launch);
    }
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
    return instance.launch(*work, launch);
}

/* before(work, first, pairs) and after(first, pairs): of each group of pairs. */
template <class Before, class After>
fa_code launch_call(const Instance *instances, const fa_problem *problem, const fa_plan *plan, const fa_launch *launch,
                    Before before, After after) {
    const fa_backward &p = problem->backward;
    const fa_forward &f = p.forward;
    const FusedOwn &own = fa_own<FusedOwn>(plan);
    const int64_t entries = entries_of(problem), all = entries * f.heads_kv;
    if (all > 0) {
        FusedWork work = {};
        FA_TRY(fused_work(problem, own, &work, *launch));
        work.fused.dropout = problem->forward.dropout;
        work.fused.kept = static_cast<float>(fa_dropout_scale(&problem->forward.dropout)); // 1 without dropout
        work.fused.scale *= work.fused.kept, work.rows.delta_factor = 1 / work.fused.kept;
        for (int64_t first = 0; first < all; first += own.pairs) {
            const int64_t pairs = std::min(own.pairs, all - first);
            FA_TRY(before(&work, first, pairs));
            FA_TRY(launch_fused(instances[own.instance], p, own, &work, first, pairs, *launch));
            FA_TRY(after(first, pairs));
        }
    }
    if (p.wants >> FA_GRAD_SINKS & 1 && f.heads > 0) {
        FA_CHAOS_ARM(launch->stream, *launch);
        backward_sinks<<<static_cast<unsigned>(f.heads), kSinkThreads, 0, static_cast<cudaStream_t>(launch->stream)>>>(
            reinterpret_cast<const float *>(static_cast<char *>(launch->workspace) + kFusedCounterBytes),
            own.sink_parts, entries, f.heads, gradient(p, FA_GRAD_SINKS));
        FA_CUDA_TRY(*launch, cudaGetLastError());
    }
    return FA_OK;
}

} // namespace fa::sm90
