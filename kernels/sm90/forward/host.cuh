/* Host side of wgmma_sm90 and wgmma_dropout_sm90: plan, launch. For the host's compilation of a kernel alone. */
#pragma once
#include "common/launch.cuh"
#include "common/limits.cuh" // lengths_fit, shifted_band_of
#include "sm90/common/dense_choice.cuh"
#include "sm90/common/tensor_map.h"
#include "sm90/forward/config.cuh"
#include "sm90/score/make_list.cuh"
#include "sm90/score/make_map.cuh"
#include <algorithm> // min, max
#include <cmath>     // pow
#include <numbers>   // log2e
#include <numeric>   // gcd

namespace fa::sm90 {

namespace { // Of this file alone: other kernels have instances of the same name, and templates of these.
struct Instance {
    int head_dim, kind;
    fa_dtype dtype;
    Launch *launch; // null: this build leaves it out
};
} // namespace
#define FA_FORWARD_INSTANCE(name, head_dim, kind, T) {head_dim, kind, kDtypeOf<T>, name},

/* MiB of keys and values that a section of the longest-first order holds, given those of one head in bytes. Short heads
 * gain from L2 (50 MiB), long ones from many tiles of like length. Measured at head_dim 128 and 256, 512 to 16k keys.
 */
constexpr int64_t section_mib(int64_t head_bytes) {
#ifdef FA_SECTION_MIB
    return FA_SECTION_MIB;
#else
    return head_bytes <= 256 << 10 ? 16 : head_bytes <= 1 << 20 ? 32 : 64;
#endif
}

/* The plan's own part. */
struct Own {
    int instance; // of the kernel's
    int tile_m, tile_n;
    int cap_terms;
    bool staged;
    bool counter;           // tiles come from one
    bool ordered;           // by what the map leaves of them
    uint32_t query_tiles;   // a head
    uint32_t section_heads; // of the longest-first order; 0: tiles go in the order of heads
    MapPlan map;            // of a mask or intervals
};

/* The workspace of a call: a map, then numbers. */
struct Room {
    int64_t zeros, counts, order, lists, bytes; // places; zeros: the counter of tiles, then one a plane of the map
    int planes, length;                         // length: of a tile's list of blocks
};
inline Room room_of(const fa_forward &p, const Own &own) {
    Room room = {};
    room.planes = has_map(p) ? static_cast<int>(own.map.planes()) : 0;
    const int64_t tiles = int64_t(room.planes) * own.query_tiles;
    room.length = static_cast<int>(divide_up(p.key_end - p.key_begin, own.tile_n) + 1);
    room.zeros = has_map(p) ? own.map.bytes : 0;
    room.counts = room.zeros + divide_up((1 + room.planes) * 4, 256) * 256;
    room.order = room.counts + tiles * 4;
    room.lists = room.order + tiles * 4;
    room.bytes = room.lists + tiles * room.length * 4;
    return room;
}

/* Tiles of unequal length go longest first, in sections of heads (Schedule). The static order serves where sections of
 * heads fill a whole number of pairs of rounds over the CTAs and stay within three times the bytes asked for, or where
 * there is one section, and no tile is partial. Else a counter deals the tiles, which costs a memset and the workspace.
 */
inline void order(const fa_forward &p, bool counter, fa_plan *plan) {
    Own &own = fa_own<Own>(plan);
    const int64_t query_tiles = own.query_tiles, heads = p.heads * p.batch;
    if (query_tiles * heads <= plan->blocks) return;
    own.counter = has_map(p);
    own.ordered = own.counter && own.map.step[2] && query_tiles > 1 && query_tiles <= kMostOrdered;
    if (p.right >= FA_UNBOUNDED && !own.ordered) return;
    const int64_t group = p.heads_kv > 0 ? p.heads / p.heads_kv : 1;
    const int64_t head_bytes = 4 * (p.key_end - p.key_begin) * p.head_dim, bytes = section_mib(head_bytes) << 20;
    const int64_t fit = head_bytes > 0 && bytes > head_bytes ? bytes / head_bytes * group : group;
    const int64_t even = std::min(heads, 2 * plan->blocks / std::gcd(2 * plan->blocks, query_tiles));
    const bool balanced = !counter && !own.counter && p.seq_q % own.tile_m == 0 && even <= 3 * fit;
    own.section_heads = static_cast<uint32_t>(std::min(heads, balanced ? std::max(even, fit / even * even) : fit));
    own.counter = !balanced;
}

inline void fill_plan(const fa_forward &p, int number, const Instance &instance, const fa_device_info *device,
                      fa_plan *plan) {
    const Tiling t = tiling(instance.head_dim, instance.kind);
    const int tile_m = 64 * t.consumers;
    const int64_t query_tiles = (p.seq_q + tile_m - 1) / tile_m, tiles = query_tiles * p.heads * p.batch;
    Own &own = fa_own<Own>(plan);
    own = {.instance = number,
           .tile_m = tile_m,
           .tile_n = t.tile_n,
           .cap_terms = t.cap_terms,
           .staged = t.staged,
           .query_tiles = static_cast<uint32_t>(query_tiles)};
    plan->threads = 128 * (t.consumers + 1);
    plan->blocks = tiles < device->sm_count ? tiles : device->sm_count;
    const int64_t slabs = (instance.head_dim + kSlabColumns - 1) / kSlabColumns;
    plan->smem_bytes = slabs * kSlabRowBytes * ((t.query_stages + t.staged) * tile_m + 2 * t.stages * t.tile_n);
    plan->keep = true;
    if (has_map(p)) own.map = map_plan(p, p.key_end - p.key_begin, true, false, 0);
    order(p, t.counter, plan);
    if (own.counter || has_map(p)) plan->workspace_bytes = room_of(p, own).bytes;
}

/* Whether a kernel's lanes read a bias by 16 bytes: BiasParams. */
inline bool takes_bias(const fa_forward &p, int most_head_dim, fa_why *why) {
    const fa_operand &x = p.bias;
    bool taken = p.head_dim <= most_head_dim && p.bias_dtype == p.dtype && x.stride[3] == 1;
    for (int axis = 0; axis < 3; ++axis) taken = taken && x.stride[axis] % 8 == 0;
    taken = taken && reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && p.key_begin % 8 == 0 && p.seq_k % 8 == 0;
    if (!taken) fa_because(why, FA_REFUSES, FA_WHY_BIAS_ROWS, most_head_dim, 0, 0);
    return taken;
}

template <size_t N>
fa_answer plan_forward(const Instance (&instances)[N], int kind, const fa_problem *problem,
                       const fa_device_info *device, fa_plan *plan, fa_why *why) {
    const fa_forward &p = problem->forward;
    if (p.head_dim > widest(instances)) return fa_because(why, FA_REFUSES, FA_WHY_HEAD_DIM, widest(instances), 0, 0);
    if (p.head_dim % 8) return fa_because(why, FA_REFUSES, FA_WHY_HEAD_DIM_MULTIPLE, 8, 0, 0);
    if (!(static_cast<float>(p.scale) > 1e-30f && p.scale < 1e30))
        return fa_because(why, FA_REFUSES, FA_WHY_SCALE, 0, 0, 0);
    if (!lengths_fit(p.seq_q, p.seq_k, kBitsInPairs, why)) return FA_REFUSES;
    if ((p.seq_q + 63) / 64 > (INT64_C(1) << kMaxTilesBits) / std::max<int64_t>(p.heads * p.batch, 1))
        return fa_because(why, FA_REFUSES, FA_WHY_TILES, kMaxTilesBits, 0, 0);
    const int64_t keys = p.key_end - p.key_begin;
    if (!takes_tensor_map(p.q, FA_OPERAND_q, p.head_dim, p.seq_q, why) ||
        !takes_tensor_map(p.k, FA_OPERAND_k, p.head_dim, keys, why) ||
        !takes_tensor_map(p.v, FA_OPERAND_v, p.head_dim, keys, why) ||
        !takes_tensor_map(p.out, FA_OPERAND_out, p.head_dim, p.seq_q, why))
        return FA_REFUSES;
    if (!device->tensor_maps) return fa_because(why, FA_NOT_HERE, FA_WHY_TENSOR_MAPS, 0, 0, 0);
    const Instance *found = instance_for(instances, p.head_dim, kind, p.dtype);
    if (!found) return fa_because(why, FA_REFUSES, FA_WHY_INSTANCE, 0, 0, 0);
    fill_plan(p, static_cast<int>(found - instances), *found, device, plan);
    if (has_map(p) && plan->workspace_bytes > device->workspace_limit)
        return fa_because(why, FA_REFUSES, FA_WHY_MAP_WORKSPACE, 0, 0, 0);
    return p.seq_q <= kFewDense ? fa_because(why, FA_DECLINES, FA_WHY_FEW_QUERIES, 0, 0, 0) : FA_TAKES;
}

/* K or V over the visible keys alone, so that TMA reads zeros beyond them. */
inline fa_operand visible(const fa_operand &x, int64_t key_begin) {
    fa_operand part = x;
    part.data = static_cast<char *>(x.data) + key_begin * x.stride[2] * 2;
    return part;
}

/* tanh(x) by an odd polynomial for |x| below a limit, here with x = factor * product, in powers of the product's square
 * less the limit's, and times what turns x / factor into the score in base 2.
 *   3 terms: x * (1 + c1 x^2 + c2 x^4) for |x| < 1/2, the best such polynomial: off by at most 9e-6 and relatively by
 *            3.7e-5.
 *   2 terms: x * (c0 + c1 x^2), Taylor's series with x^7 and x^5 replaced by the best lower powers up to the limit: off
 *            by 2/15 limit^5 / 16. The limit keeps that below 8e-4 in the score: scores up to 9.5 under a softcap of
 *            30, up to 14 under one of 50.
 * The MUFU's tanh is good to 4.9e-4 relatively, with errors that differ from key to key; a smooth error of half that
 * size added up to 3e-3 in the LSE at scores of 16. The limit in products is bounded, so that no power that matters
 * underflows under a huge softcap. */
inline CapPolynomial cap_polynomial(int terms, double scale, double softcap) {
    constexpr double kT3 = -1.0 / 3, kT5 = 2.0 / 15, kT7 = -17.0 / 315; // tanh(x) = x + t3 x^3 + t5 x^5 + t7 x^7
    double limit = 0.5, c0 = 1, c1 = -0.33185113, c2 = 0.115442204;
    if (terms == 2) {
        limit = std::min(limit, std::pow(8e-4 * 16 / kT5 / softcap, 0.2));
        const double u = limit * limit, t5 = kT5 + kT7 * 7 / 4 * u;
        c0 = 1 + kT7 * 7 / 64 * u * u * u - t5 * 5 / 16 * u * u;
        c1 = kT3 - kT7 * 7 / 8 * u * u + t5 * 5 / 4 * u;
        c2 = 0;
    }
    const double factor = scale / softcap, square = factor * factor, score_factor = scale * std::numbers::log2e;
    const double limit_squared = std::min(limit * limit / square, 1e10), x2 = square * limit_squared;
    if (!(score_factor * square * square < 1e37)) return {-1.0f, {}}; // no product is below this limit
    return {static_cast<float>(limit_squared),
            {static_cast<float>(score_factor * (c0 + x2 * (c1 + x2 * c2))),
             static_cast<float>(score_factor * square * (c1 + 2 * x2 * c2)),
             static_cast<float>(score_factor * square * square * c2)}};
}

/* Maps of the kernel that includes this. */
struct CachedMaps {
    CachedTensorMap q = {FA_OPERAND_q}, k = {FA_OPERAND_k}, v = {FA_OPERAND_v}, out = {FA_OPERAND_out};
};
static thread_local CachedMaps cached_maps;

inline LightParams light_params(const fa_forward &p) {
    LightParams light = {};
    light.intervals = intervals_of(p);
    light.key_begin = static_cast<int>(p.key_begin);
    light.alibi = p.alibi;
    if (p.bias.data) light.bias.data = static_cast<const char *>(p.bias.data) + p.key_begin * 2;
    for (int axis = 0; axis < 3; ++axis) light.bias.stride[axis] = p.bias.stride[axis];
    light.diagonal = static_cast<int>(p.diagonal - p.key_begin);
    light.behind = p.right <= 0;
    return light;
}

/* Makes the map of a call, and the lists of blocks that its tiles see. */
static fa_code launch_lists(const fa_forward &p, const Own &own, const Room &room, const fa_launch &launch,
                            LightForwardParams *params) {
    FA_TRY(launch_map(own.map, p, p.key_end - p.key_begin, map_part(launch, room.zeros), 1 + room.planes, launch));
    params->light.map = pair_map(own.map, launch);
    ListParams lists = {};
    lists.map = params->light.map;
    lists.shape = {params->visible, static_cast<int>(p.seq_q), own.tile_m / 64, own.tile_n};
    lists.tiles = static_cast<int>(own.query_tiles), lists.length = room.length;
    lists.words = map_part(launch, room.lists);
    lists.counts = reinterpret_cast<int *>(map_part(launch, room.counts));
    if (own.ordered) lists.order = reinterpret_cast<int *>(map_part(launch, room.order));
    lists.done = map_part(launch, room.zeros) + 1;
    params->light.lists = {lists.words, lists.order, lists.tiles, lists.length};
    return fa_start(list_blocks, int64_t(room.planes) * own.query_tiles, kListThreads, 0, launch, lists);
}

static fa_code launch_forward(const Instance *instances, const fa_problem *problem, const fa_plan *plan,
                              const fa_launch *launch) {
    const fa_forward &p = problem->forward;
    const Own &own = fa_own<Own>(plan);
    const int64_t keys = p.key_end - p.key_begin;
    LightForwardParams params = {};
    auto &cached = cached_maps;
    FA_TRY(tensor_map_encode(&params.q, cached.q, *launch, p.q, p.dtype, p.head_dim, p.seq_q, p.heads, p.batch, 64));
    if (keys > 0) { // without keys no tile touches these maps
        FA_TRY(tensor_map_encode(&params.k, cached.k, *launch, visible(p.k, p.key_begin), p.dtype, p.head_dim, keys,
                                 p.heads_kv, p.batch, own.tile_n));
        FA_TRY(tensor_map_encode(&params.v, cached.v, *launch, visible(p.v, p.key_begin), p.dtype, p.head_dim, keys,
                                 p.heads_kv, p.batch, own.tile_n));
    }
    if (own.staged)
        FA_TRY(tensor_map_encode(&params.out_map, cached.out, *launch, p.out, p.dtype, p.head_dim, p.seq_q, p.heads,
                                 p.batch, 16));
    params.out = p.out.data;
    for (int axis = 0; axis < 3; ++axis) params.out_stride[axis] = p.out.stride[axis];
    params.lse = static_cast<float *>(p.lse.data);
    for (int axis = 0; axis < 3; ++axis) params.lse_stride[axis] = p.lse.stride[axis];
    params.sinks = p.sinks.data;
    params.sinks_stride = p.sinks.stride[0];
    params.sinks_dtype = p.sinks_dtype;
    params.schedule.query_tiles = own.query_tiles;
    params.schedule.heads = static_cast<uint32_t>(p.heads);
    params.schedule.tiles = static_cast<uint32_t>(own.query_tiles * p.heads * p.batch);
    params.group = static_cast<int>(p.heads / p.heads_kv);
    params.schedule.section_heads = own.section_heads;
    params.visible = shifted_band_of(p);
    const Room room = room_of(p, own);
    uint32_t *const zeros = map_part(*launch, room.zeros);
    if (own.counter) params.schedule.counter = zeros;
    if (own.counter && !has_map(p))
        FA_CUDA_TRY(*launch, cudaMemsetAsync(zeros, 0, sizeof(uint32_t), static_cast<cudaStream_t>(launch->stream)));
    params.light = light_params(p);
    if (has_map(p) && keys > 0) FA_TRY(launch_lists(p, own, room, *launch, &params));
    params.seq_q = static_cast<int>(p.seq_q);
    params.head_dim = p.head_dim;
    params.dropout = problem->forward.dropout;
    params.kept = static_cast<float>(fa_dropout_scale(&problem->forward.dropout));
    params.key_begin = static_cast<int>(p.key_begin);
    const fa_operand *const operands[] = {&p.q, &p.k, &p.v};
    int *const steps[] = {params.q_step, params.k_step, params.v_step};
    for (int i = 0; i < 3; ++i) {
        steps[i][0] = operands[i]->stride[1] != 0;
        steps[i][1] = operands[i]->stride[0] != 0;
    }
    params.score_factor = static_cast<float>((p.softcap > 0 ? p.softcap : p.scale) * std::numbers::log2e);
    params.cap_factor = p.softcap > 0 ? static_cast<float>(p.scale / p.softcap) : 0.0f;
    if (p.softcap > 0) params.cap_polynomial = cap_polynomial(own.cap_terms, p.scale, p.softcap);
    return instances[own.instance].launch(params, plan->blocks, *launch);
}

} // namespace fa::sm90
