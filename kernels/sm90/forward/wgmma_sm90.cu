/* wgmma_sm90: attention forward on Hopper (sm_90a): TMA, wgmma, warp specialisation.
 *
 * Takes:  float16 and bfloat16; head_dim a multiple of 8 up to 256, computed at 64, 96, 128, 192 or 256 columns (TMA
 *         fills with zeros); grouped heads; ragged lengths; causal, two-sided windows, softcap, sinks; LSE.
 * How:    sm90/forward/kernel.cuh. Three kinds of kernel: full (only the end of the keys is excluded), masked (a
 *         range of keys a row) and capped (masked, with softcap; up to head_dim 128 scores that are small beside the
 *         cap cost less, see cap_polynomial).
 * Layout: any strides of 16-byte multiples with a contiguous head_dim axis: "bhsd", "bshd" and slices of them.
 * Limits: no bias, no boolean mask, scale > 0, head_dim_v = head_dim.
 * Bench:  python -m bench measure --preset paper --kernels wgmma_sm90
 *
 * @arch sm_90a
 * @instance d{256,192,128,96,64}_{full,masked,capped}_{f16,bf16} -DFA_HEAD_DIM={1}
 *           -DFA_KIND={2:FA_FULL,FA_MASKED,FA_CAPPED} -DFA_ELEMENT={3:__half,__nv_bfloat16}
 */
#include "common/launch.cuh"
#include "sm90/common/instance.cuh"
#include "sm90/common/tensor_map.h"
#include "sm90/forward/kernel.cuh"
#include <algorithm> // min, max
#include <cmath>     // pow
#include <iterator>  // size
#include <numbers>   // log2e
#include <numeric>   // gcd

/* ---- configuration ---- */

#ifdef FA_DROPOUT // of wgmma_dropout_sm90.cu, which has this file's configuration, plan and launch with other instances
#define FA_SPACE fa::sm90::dropout
#else
#define FA_SPACE fa::sm90
#endif

namespace FA_SPACE {

/* Shape of a kernel. */
struct Tiling {
    int consumers;    // warpgroups of 64 query rows
    int tile_n;       // keys a block
    int stages;       // of the rings of key and of value blocks
    int query_stages; // query tiles
    bool turns;       // the warpgroups issue their products in turns
    bool overlap;     // a block's exponentials run under P V of the block before, with two sets of weights
    bool half;        // a warpgroup that sees only half of its first block multiplies that half alone
    bool late;        // a turn passes when its scores are there, not when its products are issued
    int cap_terms;    // softcap by a polynomial of 2 or 3 terms where the scores allow; 0: by the MUFU alone
    bool staged;      // the output goes through shared memory of its own
    bool counter;     // tiles of unequal length always come from a counter
};

/* Measured on an H200; shared memory (227 KiB) and registers bound tile_n. */
constexpr Tiling tiling(int head_dim, int kind) {
    const bool full = kind == FA_FULL, masked = kind == FA_MASKED, capped = kind == FA_CAPPED;
    Tiling t = {};
    t.consumers = 2, t.tile_n = 128, t.stages = 2, t.query_stages = head_dim <= 128 ? 2 : 1, t.turns = true;
    t.staged = head_dim <= 128;
    t.cap_terms = !capped || head_dim > 128 ? 0 : head_dim > 96 ? 2 : 3;
    if (head_dim <= 64) {
        t.consumers = 3, t.tile_n = capped ? 96 : 128, t.stages = 4;
        t.half = masked, t.late = !masked, t.counter = true;
    } else if (head_dim <= 128) {
        t.overlap = t.cap_terms != 3;
    } else if (head_dim <= 192) {
        t.tile_n = full ? 96 : 112, t.overlap = full;
    } else {
        t.tile_n = full ? 80 : 64, t.late = full;
    }
#ifdef FA_DROPOUT
    t.consumers = 2, t.half = t.late = t.overlap = false; // registers for the generator
#endif
#ifdef FA_CONSUMERS // from here on: a tuner's choice
    t.consumers = FA_CONSUMERS;
#endif
#ifdef FA_TILE_N
    t.tile_n = FA_TILE_N;
#endif
#ifdef FA_STAGES
    t.stages = FA_STAGES;
#endif
#ifdef FA_QUERY_STAGES
    t.query_stages = FA_QUERY_STAGES;
#endif
#ifdef FA_TURNS
    t.turns = FA_TURNS;
#endif
#ifdef FA_OVERLAP
    t.overlap = FA_OVERLAP;
#endif
#ifdef FA_HALF
    t.half = FA_HALF;
#endif
#ifdef FA_LATE
    t.late = FA_LATE;
#endif
#ifdef FA_CAP_TERMS
    t.cap_terms = FA_CAP_TERMS;
#endif
#ifdef FA_STAGED
    t.staged = FA_STAGED;
#endif
#ifdef FA_COUNTER
    t.counter = FA_COUNTER;
#endif
    return t;
}

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

template <class T, int HeadDim, int Kind> struct Config {
    static constexpr Tiling kTiling = tiling(HeadDim, Kind);
    using Element = T;
    static constexpr int kHeadDim = HeadDim, kConsumers = kTiling.consumers, kTileM = 64 * kConsumers,
                         kTileN = kTiling.tile_n, kStages = kTiling.stages, kQueryStages = kTiling.query_stages;
    static constexpr bool kMasked = Kind != FA_FULL, kSoftcap = Kind == FA_CAPPED,
                          kTurns = kConsumers > 1 && kTiling.turns, kOverlap = kTiling.overlap,
                          kHalfBlocks = kMasked && kTiling.half, kLateTurns = kTurns && kTiling.late,
                          kStaged = kTiling.staged;
#ifdef FA_DROPOUT
    static constexpr bool kDropout = true;
#else
    static constexpr bool kDropout = false;
#endif
    static constexpr int kCapTerms = kSoftcap ? kTiling.cap_terms : 0;
    // 64 Ki registers: what the consumers leave is the producer's.
#ifdef FA_CHAOS // whose delays need some there too
    static constexpr int kConsumerRegisters = kConsumers == 1 ? 240 : kConsumers == 2 ? 232 : 160;
    static constexpr int kProducerRegisters = kConsumers == 1 ? 72 : kConsumers == 2 ? 40 : 32;
#else
    static constexpr int kConsumerRegisters = kConsumers == 1 ? 256 : kConsumers == 2 ? 240 : 160;
    static constexpr int kProducerRegisters = kConsumers == 1 ? 56 : kConsumers == 2 ? 24 : 32;
#endif
    static_assert(kTileN % (kHalfBlocks ? 32 : 16) == 0 && kTileN <= 256);
    static_assert(HeadDim % 16 == 0 && HeadDim <= FA_MAX_HEAD_DIM);
#ifndef FA_CHAOS
    static_assert(kTileN / 2 + (kOverlap ? 2 : 1) * kTileN / 4 + HeadDim / 2 + 24 <= kConsumerRegisters,
                  "scores, weights and output");
#endif
};

/* ---- instances: one kernel a compilation ---- */

#ifdef FA_DROPOUT
using Params = DropoutForwardParams;
#else
using Params = ForwardParams;
#endif
using Launch = fa_code(const Params &, int64_t blocks, const fa_launch &);

#ifdef FA_INSTANCE

Launch FA_PASTE(wgmma_sm90_, FA_INSTANCE);
fa_code FA_PASTE(wgmma_sm90_, FA_INSTANCE)(const Params &params, int64_t blocks, const fa_launch &launch) {
    using Instance = Config<FA_ELEMENT, FA_HEAD_DIM, FA_KIND>;
#ifdef FA_DROPOUT
    constexpr auto kForward = forward_dropout<Instance>;
#else
    constexpr auto kForward = forward<Instance>;
#endif
    constexpr int kBytes = sizeof(ForwardSmem<Instance>);
    static_assert(kBytes <= 227 * 1024, "shared memory of a block");
    FA_TRY(fa_allow_smem(kForward, kBytes, launch));
    FA_CHAOS_ARM(launch.stream, launch);
    kForward<<<static_cast<unsigned>(blocks), 128 * (Instance::kConsumers + 1), kBytes,
               static_cast<cudaStream_t>(launch.stream)>>>(params);
    FA_CUDA_TRY(launch, cudaGetLastError());
    return FA_OK;
}

} // namespace FA_SPACE

#else

// A tuner links single instances: those left out are null.
#define FA_DECLARE(d, kind) __attribute__((weak)) Launch wgmma_sm90_d##d##_##kind##_f16, wgmma_sm90_d##d##_##kind##_bf16
#define FA_DECLARE_ALL(d)                                                                                              \
    FA_DECLARE(d, full);                                                                                               \
    FA_DECLARE(d, masked);                                                                                             \
    FA_DECLARE(d, capped)
#define FA_ENTRY(d, kind)                                                                                              \
    { wgmma_sm90_d##d##_##kind##_f16, wgmma_sm90_d##d##_##kind##_bf16 }
#ifdef FA_DROPOUT
FA_DECLARE(64, masked);
FA_DECLARE(128, masked);
static constexpr int kHeadDims[] = {64, 128};
static Launch *const kLaunches[][3][2] = {{{}, FA_ENTRY(64, masked), {}}, {{}, FA_ENTRY(128, masked), {}}};
#else
FA_DECLARE_ALL(64);
FA_DECLARE_ALL(96);
FA_DECLARE_ALL(128);
FA_DECLARE_ALL(192);
FA_DECLARE_ALL(256);

static constexpr int kHeadDims[] = {64, 96, 128, 192, 256};
static Launch *const kLaunches[][3][2] = {
    // [head_dim][kind][float16, bfloat16]
    {FA_ENTRY(64, full), FA_ENTRY(64, masked), FA_ENTRY(64, capped)},
    {FA_ENTRY(96, full), FA_ENTRY(96, masked), FA_ENTRY(96, capped)},
    {FA_ENTRY(128, full), FA_ENTRY(128, masked), FA_ENTRY(128, capped)},
    {FA_ENTRY(192, full), FA_ENTRY(192, masked), FA_ENTRY(192, capped)},
    {FA_ENTRY(256, full), FA_ENTRY(256, masked), FA_ENTRY(256, capped)},
};
#endif

/* ---- plan, launch ---- */

/* The plan's own part. */
struct Own {
    int index, kind; // of kLaunches
    int tile_m, tile_n;
    int cap_terms;
    bool staged;
    uint32_t query_tiles;   // a head
    uint32_t section_heads; // of the longest-first order; 0: tiles go in the order of heads
};

static int head_dim_index(const fa_forward &p) {
    int i = 0;
    while (kHeadDims[i] < p.head_dim) ++i;
    return i;
}

static int kind_of(const fa_forward &p) {
#ifdef FA_DROPOUT
    return FA_MASKED;
#endif
    if (p.softcap > 0) return FA_CAPPED;
    return p.left >= FA_UNBOUNDED && p.right >= FA_UNBOUNDED ? FA_FULL : FA_MASKED;
}

/* Tiles of unequal length go longest first, in sections of heads (Schedule). The static order serves where sections of
 * heads fill a whole number of pairs of rounds over the CTAs and stay within three times the bytes asked for, or where
 * there is one section, and no tile is partial. Else a counter deals the tiles, which costs a memset and the workspace.
 */
static void order(const fa_forward &p, bool counter, fa_plan *plan) {
    Own &own = fa_own<Own>(plan);
    const int64_t query_tiles = own.query_tiles, heads = p.heads * p.batch;
    if (p.right >= FA_UNBOUNDED || query_tiles * heads <= plan->blocks) return;
    const int64_t group = p.heads_kv > 0 ? p.heads / p.heads_kv : 1;
    const int64_t head_bytes = 4 * (p.key_end - p.key_begin) * p.head_dim, bytes = section_mib(head_bytes) << 20;
    const int64_t fit = head_bytes > 0 && bytes > head_bytes ? bytes / head_bytes * group : group;
    const int64_t even = std::min(heads, 2 * plan->blocks / std::gcd(2 * plan->blocks, query_tiles));
    const bool balanced = !counter && p.seq_q % own.tile_m == 0 && even <= 3 * fit;
    own.section_heads = static_cast<uint32_t>(std::min(heads, balanced ? std::max(even, fit / even * even) : fit));
    if (!balanced) plan->workspace_bytes = sizeof(uint32_t);
}

static void fill_plan(const fa_forward &p, int index, int kind, const fa_device_info *device, fa_plan *plan) {
    const Tiling t = tiling(kHeadDims[index], kind);
    const int tile_m = 64 * t.consumers;
    const int64_t query_tiles = (p.seq_q + tile_m - 1) / tile_m, tiles = query_tiles * p.heads * p.batch;
    fa_own<Own>(plan) = {index, kind, tile_m, t.tile_n, t.cap_terms, t.staged, static_cast<uint32_t>(query_tiles), 0};
    plan->threads = 128 * (t.consumers + 1);
    plan->blocks = tiles < device->sm_count ? tiles : device->sm_count;
    const int64_t slabs = (kHeadDims[index] + kSlabColumns - 1) / kSlabColumns;
    plan->smem_bytes = slabs * kSlabRowBytes * ((t.query_stages + t.staged) * tile_m + 2 * t.stages * t.tile_n);
    plan->keep = true;
    order(p, t.counter, plan);
}

static fa_answer plan(const fa_problem *problem, const fa_device_info *device, fa_plan *plan, fa_why *why) {
    constexpr int kMaxRowsBits = 30, kMaxTilesBits = 31;
    const fa_forward &p = problem->forward;
    constexpr int kMost = kHeadDims[std::size(kHeadDims) - 1];
    if (kMost < FA_MAX_HEAD_DIM && p.head_dim > kMost) return fa_because(why, FA_REFUSES, FA_WHY_HEAD_DIM, kMost, 0, 0);
    if (p.head_dim % 8) return fa_because(why, FA_REFUSES, FA_WHY_HEAD_DIM_MULTIPLE, 8, 0, 0);
    if (!(static_cast<float>(p.scale) > 1e-30f && p.scale < 1e30))
        return fa_because(why, FA_REFUSES, FA_WHY_SCALE, 0, 0, 0);
    if (std::max(p.seq_q, p.seq_k) >> kMaxRowsBits)
        return fa_because(why, FA_REFUSES, FA_WHY_LENGTH, kMaxRowsBits, 0, 0);
    if ((p.seq_q + 63) / 64 > (INT64_C(1) << kMaxTilesBits) / std::max<int64_t>(p.heads * p.batch, 1))
        return fa_because(why, FA_REFUSES, FA_WHY_TILES, kMaxTilesBits, 0, 0);
    const int64_t keys = p.key_end - p.key_begin;
    if (!takes_tensor_map(p.q, FA_OPERAND_Q, p.head_dim, p.seq_q, why) ||
        !takes_tensor_map(p.k, FA_OPERAND_K, p.head_dim, keys, why) ||
        !takes_tensor_map(p.v, FA_OPERAND_V, p.head_dim, keys, why) ||
        !takes_tensor_map(p.out, FA_OPERAND_OUT, p.head_dim, p.seq_q, why))
        return FA_REFUSES;
    if (!device->tensor_maps) return fa_because(why, FA_NOT_HERE, FA_WHY_TENSOR_MAPS, 0, 0, 0);
    const int index = head_dim_index(p), kind = kind_of(p);
    if (!kLaunches[index][kind][p.dtype == FA_BF16]) return fa_because(why, FA_REFUSES, FA_WHY_INSTANCE, 0, 0, 0);
    fill_plan(p, index, kind, device, plan);
#ifdef FA_DROPOUT
    if (!problem->extra.dropout.threshold) return fa_because(why, FA_DECLINES, FA_WHY_NO_DROPOUT, 0, 0, 0);
#endif
    return p.seq_q <= 16 ? fa_because(why, FA_DECLINES, FA_WHY_FEW_QUERIES, 0, 0, 0) : FA_TAKES;
}

/* K or V over the visible keys alone, so that TMA reads zeros beyond them. */
static fa_operand visible(const fa_operand &x, int64_t key_begin) {
    fa_operand part = x;
    part.data = static_cast<char *>(x.data) + key_begin * x.stride[2] * 2;
    return part;
}

static int clamp_bound(int64_t x) {
    constexpr int64_t kFar = 1 << 30;
    return static_cast<int>(x < -kFar ? -kFar : x > kFar ? kFar : x);
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
static CapPolynomial cap_polynomial(int terms, double scale, double softcap) {
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

static fa_code launch(const fa_problem *problem, const fa_plan *plan, const fa_launch *launch) {
    const fa_forward &p = problem->forward;
    const Own &own = fa_own<Own>(plan);
    const int64_t keys = p.key_end - p.key_begin;
    Params params = {};
    FA_TRY(
        tensor_map_encode(&params.q, *launch, p.q, p.dtype, p.head_dim, p.seq_q, p.heads, p.batch, 64, FA_OPERAND_Q));
    if (keys > 0) { // without keys no tile touches these maps
        FA_TRY(tensor_map_encode(&params.k, *launch, visible(p.k, p.key_begin), p.dtype, p.head_dim, keys, p.heads_kv,
                                 p.batch, own.tile_n, FA_OPERAND_K));
        FA_TRY(tensor_map_encode(&params.v, *launch, visible(p.v, p.key_begin), p.dtype, p.head_dim, keys, p.heads_kv,
                                 p.batch, own.tile_n, FA_OPERAND_V));
    }
    if (own.staged)
        FA_TRY(tensor_map_encode(&params.out_map, *launch, p.out, p.dtype, p.head_dim, p.seq_q, p.heads, p.batch, 16,
                                 FA_OPERAND_OUT));
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
    if (plan->workspace_bytes) {
        params.schedule.counter = static_cast<uint32_t *>(launch->workspace);
        FA_CUDA_TRY(*launch, cudaMemsetAsync(params.schedule.counter, 0, sizeof(uint32_t),
                                             static_cast<cudaStream_t>(launch->stream)));
    }
    const int64_t first = p.diagonal - p.key_begin;
    params.visible = {static_cast<int>(keys), clamp_bound(first - p.left), clamp_bound(first + p.right + 1)};
    params.seq_q = static_cast<int>(p.seq_q);
    params.head_dim = p.head_dim;
#ifdef FA_DROPOUT
    params.dropout = problem->extra.dropout;
    params.kept = static_cast<float>(fa_dropout_scale(&problem->extra.dropout));
    params.key_begin = static_cast<int>(p.key_begin);
#endif
    const fa_operand *const operands[] = {&p.q, &p.k, &p.v};
    int *const steps[] = {params.q_step, params.k_step, params.v_step};
    for (int i = 0; i < 3; ++i) {
        steps[i][0] = operands[i]->stride[1] != 0;
        steps[i][1] = operands[i]->stride[0] != 0;
    }
    params.score_factor = static_cast<float>((p.softcap > 0 ? p.softcap : p.scale) * std::numbers::log2e);
    params.cap_factor = p.softcap > 0 ? static_cast<float>(p.scale / p.softcap) : 0.0f;
    if (p.softcap > 0) params.cap_polynomial = cap_polynomial(own.cap_terms, p.scale, p.softcap);
    return kLaunches[own.index][own.kind][p.dtype == FA_BF16](params, plan->blocks, *launch);
}

} // namespace FA_SPACE

#ifndef FA_DROPOUT
FA_DEFINE_KERNEL(wgmma_sm90) = {
    .abi = FA_KERNEL_ABI,
    .op = FA_FORWARD,
    .device = FA_CUDA,
    .name = "wgmma_sm90",
    .summary = "Hopper: TMA, wgmma and warp specialisation, float16 and bfloat16",
    .cc_from = 90,
    .cc_to = 90,
    .dtypes = fa::kFloat16Bits,
    .takes = FA_WITH_SINKS | FA_WITH_SOFTCAP | FA_WITH_WINDOW,
    .plan = fa::sm90::plan,
    .launch = fa::sm90::launch,
};

#endif
#endif
