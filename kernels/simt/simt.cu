/* simt: tiled online softmax on the ordinary floating-point units; the row that takes every call on float types.
 *
 * A thread block owns BLOCK_M query rows of one head and walks over the keys they see, BLOCK_N at a time. Both products
 * are register-blocked float32 matrix products from shared memory, where Q, K and V lie as float32:
 *
 *     S = Q K^T -> base-2 scores, softmax state in registers -> P to shared memory -> O += P V
 *
 * With KEY_GROUPS > 1 the warps form groups that share the query rows and divide the key blocks; their results are
 * merged at the end. That keeps more warps busy where there are few query rows. simt/kernel.cuh says which thread holds
 * what.
 *
 * Whole dense surface: float16, bfloat16, float32; any strides (16-byte loads where they allow it, else element loads);
 * GQA, causal, window, softcap, bias, boolean mask, sinks, LSE; head_dim and head_dim_v 1..256 apart; zero keys. Calls
 * with more (sequences of any length, pages, k_range, positions, ALiBi, dropout, float32 results) have instances of
 * their own with one tile a head_dim, so that a sequence's bits are its own: simt/serve.cuh.
 * Limits: no tensor cores, so at most the float32 rate; keys are not divided over thread blocks, so that a few query
 * rows against many keys leave most of the GPU idle.
 *
 * @instance f16 -DSIMT_TYPE=__half
 * @instance bf16 -DSIMT_TYPE=__nv_bfloat16
 * @instance f32 -DSIMT_TYPE=float
 * @instance serve_f16 -DSIMT_TYPE=__half -DSIMT_SERVE
 * @instance serve_bf16 -DSIMT_TYPE=__nv_bfloat16 -DSIMT_SERVE
 * @instance serve_f32 -DSIMT_TYPE=float -DSIMT_SERVE
 *
 * @tune BLOCK_M=32 of 16 32 64 128
 * @tune BLOCK_N=32 of 16 32 64 128
 * @tune NUM_WARPS=8 of 2 4 8 16
 * @tune KEY_GROUPS=4 of 1 2 4 8
 * @tune SYNC_POLICY=2 of 0 1 2 3
 * @tune VEC_WIDTH=0 of 0 4
 * @tune REDUCE=0 of 0 1
 * @tune MIN_BLOCKS=1 of 1 2 3
 *
 *     python -m bench measure --preset history --kernels simt
 *     python fa_ext/_build.py simt -o variant.so -DHEAD_DIM=64 -DBLOCK_M=64 -DNUM_WARPS=2     (one tile alone)
 */
#include "common/launch.cuh" // fa_own, FA_CUDA_TRY
#include "common/rows.cuh"   // takes_chunks
#include "common/score.cuh"  // score_params
#include "common/spot.cuh"   // tiles_of_packed
#include "fa.h"              // fa_forward, fa_kernel
#include "simt/tile.cuh"     // Tile, Options
#include "simt/tuned.cuh"    // kTuned64

/* ---- configuration ---- */

#ifndef VEC_WIDTH
#define VEC_WIDTH 0 // elements a global load, 1 to 8; 0: 16 bytes
#endif
#ifndef REDUCE
#define REDUCE 0 // 0: row maxima by warp shuffles; 1: through shared memory
#endif

namespace fa::simt {

constexpr Tile tile(int head_dim, int block_m, int block_n, int warps, int groups, int sync, int blocks) {
    return {head_dim, block_m, block_n, warps, groups, sync, blocks, VEC_WIDTH, REDUCE};
}

#if defined(HEAD_DIM) || defined(BLOCK_M) || defined(BLOCK_N) || defined(NUM_WARPS) || defined(KEY_GROUPS) ||          \
    defined(SYNC_POLICY)

/* A build with one tile, for head_dim up to HEAD_DIM: what a tuner compiles. */
#ifndef HEAD_DIM
#define HEAD_DIM 64
#endif
#ifndef BLOCK_M
#define BLOCK_M 128
#endif
#ifndef BLOCK_N
#define BLOCK_N 64
#endif
#ifndef NUM_WARPS
#define NUM_WARPS 4
#endif
#ifndef KEY_GROUPS
#define KEY_GROUPS 1 // groups of warps
#endif
#ifndef SYNC_POLICY
#define SYNC_POLICY 0 // kSyncSeparate (1) + kSyncPrefetch (2)
#endif
#ifndef MIN_BLOCKS
#define MIN_BLOCKS 1 // thread blocks a multiprocessor that the registers must allow
#endif
constexpr Tile kTiles[] = {tile(HEAD_DIM, BLOCK_M, BLOCK_N, NUM_WARPS, KEY_GROUPS, SYNC_POLICY, MIN_BLOCKS)};
constexpr Tile kServeTiles[] = {tile(HEAD_DIM, 32, 32, 4, HEAD_DIM > 128 ? 1 : 2, 0, 1)};

#else

/* By head_dim, and within it by falling BLOCK_M: for many query rows, then those that fill the GPU with fewer, last one
 * for a handful. For each use there is one within the 99 KB a thread block of sm_86 and sm_89: where two tiles have the
 * same rows and groups, the second is for them. */
constexpr Tile kTiles[] = {
    // head_dim, BLOCK_M, BLOCK_N, NUM_WARPS, KEY_GROUPS, SYNC_POLICY, MIN_BLOCKS
    tile(64, 128, 64, 4, 1, 2, 2),  //  85 KB
    tile(64, 64, 64, 8, 2, 2, 1),   //  85 KB
    kTuned64,                       // the tuner's, for few query rows
    tile(64, 32, 32, 8, 4, 2, 1),   //  60 KB
    tile(64, 4, 32, 8, 8, 2, 1),    //  74 KB
    tile(128, 128, 64, 8, 1, 2, 1), // 133 KB
    tile(128, 64, 64, 4, 1, 2, 2),  //  83 KB
    tile(128, 64, 64, 8, 2, 2, 1),  // 133 KB
    tile(128, 32, 32, 8, 2, 2, 1),  //  59 KB
    tile(128, 4, 16, 8, 8, 2, 2),   //  71 KB
    tile(256, 64, 32, 8, 2, 0, 1),  // 148 KB
    tile(256, 32, 32, 4, 1, 0, 3),  //  70 KB
    tile(256, 32, 32, 8, 4, 0, 1),  // 181 KB
    tile(256, 4, 16, 4, 4, 2, 2),   //  70 KB
};

/* By head_dim alone: what else decided would be seen in the bits of a sequence. At most 32 rows, one a lane. */
constexpr Tile kServeTiles[] = {
    tile(64, 32, 32, 8, 4, 0, 1),  // 60 KB and 3 of indices
    tile(128, 32, 32, 8, 2, 0, 1), // 59 KB and 2
    tile(256, 32, 32, 4, 1, 0, 2), // 70 KB and 1
};

#endif

[[maybe_unused]] constexpr int kTileCount = sizeof(kTiles) / sizeof(kTiles[0]);

[[maybe_unused]] constexpr int kServeTileCount = sizeof(kServeTiles) / sizeof(kServeTiles[0]);

constexpr bool tiles_are_valid() {
    for (const Tile &t : kTiles)
        if (!t.valid()) return false;
    for (const Tile &t : kServeTiles)
        if (!t.valid()) return false;
    return true;
}
static_assert(tiles_are_valid(), "BLOCK_M must be a multiple of 4 NUM_WARPS / KEY_GROUPS, BLOCK_N of 8, HEAD_DIM of 32 "
                                 "up to 256; KEY_GROUPS must divide NUM_WARPS and be at most 15; SYNC_POLICY 0..3, "
                                 "REDUCE 0..1, VEC_WIDTH 0, 1, 2, 4 or 8; the tile must fit 227 KB of shared memory");

/* One a dtype, each compiled as an instance of this file. */
using Launcher = fa_code(const fa_forward &, const fa_plan &, const fa_launch &);
Launcher launch_f16, launch_bf16, launch_f32;
using ServeLauncher = fa_code(const fa_problem &, const fa_plan &, const fa_launch &);
ServeLauncher launch_serve_f16, launch_serve_bf16, launch_serve_f32;

/* Shared memory of an instance that serves, beside its tile's: at most. */
[[maybe_unused]] constexpr size_t kServeExtraBytes = 4096;

/* The plan's own part. */
struct Own {
    int tile;   // of kTiles, or of kServeTiles
    bool serve; // by the instances of serve.cuh
    Options options;
};

} // namespace fa::simt

#ifdef FA_INSTANCE

/* ---- one dtype's kernels ---- */

#define SIMT_JOIN(a, b)         a##b
#define SIMT_LAUNCHER(instance) SIMT_JOIN(launch_, instance)

#ifdef SIMT_SERVE

#include "simt/serve.cuh" // simt_serve, serve_bytes

namespace fa::simt {

template <int kIndex> struct Config { static constexpr Tile tile = kServeTiles[kIndex]; };

template <typename T, int kIndex>
fa_code launch_tile(const fa_problem &problem, const fa_plan &plan, const fa_launch &launch) {
    if constexpr (kIndex < kServeTileCount) {
        const Own &own = fa_own<Own>(&plan);
        if (own.tile != kIndex) return launch_tile<T, kIndex + 1>(problem, plan, launch);
        auto kernel = simt_serve<T, Config<kIndex>>;
        static_assert(serve_bytes<kServeTiles[kIndex]>() <= kServeTiles[kIndex].smem_bytes() + kServeExtraBytes);
        if (plan.smem_bytes > kSmemFree) FA_TRY(fa_allow_smem(kernel, plan.smem_bytes, launch));
        FA_CHAOS_ARM(launch.stream, launch);
        kernel<<<static_cast<unsigned>(plan.blocks), plan.threads, plan.smem_bytes,
                 static_cast<cudaStream_t>(launch.stream)>>>(serving(problem), own.options);
        FA_CUDA_TRY(launch, cudaGetLastError());
    }
    return FA_OK;
}

fa_code SIMT_LAUNCHER(FA_INSTANCE)(const fa_problem &problem, const fa_plan &plan, const fa_launch &launch) {
    return launch_tile<SIMT_TYPE, 0>(problem, plan, launch);
}

} // namespace fa::simt

#else

#include "simt/kernel.cuh" // simt_kernel

namespace fa::simt {

template <int kIndex> struct Config { static constexpr Tile tile = kTiles[kIndex]; };

template <typename T, int kIndex>
fa_code launch_tile(const fa_forward &p, const fa_plan &plan, const fa_launch &launch) {
    if constexpr (kIndex < kTileCount) {
        const Own &own = fa_own<Own>(&plan);
        if (own.tile != kIndex) return launch_tile<T, kIndex + 1>(p, plan, launch);
        auto kernel = simt_kernel<T, Config<kIndex>>;
        if (plan.smem_bytes > kSmemFree) FA_TRY(fa_allow_smem(kernel, plan.smem_bytes, launch));
        FA_CHAOS_ARM(launch.stream, launch);
        kernel<<<static_cast<unsigned>(plan.blocks), plan.threads, plan.smem_bytes,
                 static_cast<cudaStream_t>(launch.stream)>>>(attention_params(p), own.options);
        FA_CUDA_TRY(launch, cudaGetLastError());
    }
    return FA_OK;
}

fa_code SIMT_LAUNCHER(FA_INSTANCE)(const fa_forward &p, const fa_plan &plan, const fa_launch &launch) {
    return launch_tile<SIMT_TYPE, 0>(p, plan, launch);
}

} // namespace fa::simt

#endif

#else

/* ---- host: plan, launch ---- */

namespace fa::simt {
namespace {

int64_t tiles_m(const fa_forward &p, int tile) { return (p.seq_q + kTiles[tile].block_m - 1) / kTiles[tile].block_m; }

/* The tile to use, -1 if none of this build fits. Within the smallest head_dim that will do, the first tile whose rows
 * are used and that fills 3/4 of the places for thread blocks (1.5 times their number when later rows see more keys:
 * unequal tiles balance only if there are many); a tile for a handful of rows only where there are so few. With
 * batch_invariant the choice looks at head_dim alone, so that a batch entry's bits do not depend on the others. */
int choose_tile(const fa_problem *problem, const fa_device_info *device) {
    const fa_forward &p = problem->forward;
    const int head_dim = p.head_dim > p.head_dim_v ? p.head_dim : p.head_dim_v;
    int chosen = -1;
    for (int i = 0; i < kTileCount; ++i) {
        const Tile &t = kTiles[i];
        if (t.head_dim < head_dim || t.smem_bytes() > device->smem_per_block) continue;
        if (chosen >= 0) {
            const Tile &before = kTiles[chosen];
            const bool rows_idle = p.seq_q <= before.block_m / 4;
            const int64_t tiles = p.batch * p.heads * tiles_m(p, chosen), slots = device->sm_count * before.blocks;
            const bool sms_idle = 4 * tiles < (p.right != FA_UNBOUNDED ? 6 : 3) * slots;
            if (problem->batch_invariant || t.head_dim != before.head_dim) break;
            if (t.block_m == before.block_m && t.groups == before.groups) continue; // for less shared memory
            if (!rows_idle && (!sms_idle || t.block_m < 16)) break;
        }
        chosen = i;
    }
    return chosen;
}

/* Why there is no tile: a build for a tuner has one alone, and a device may have little shared memory. */
fa_answer refuse(const fa_forward &p, const fa_device_info *device, fa_why *why) {
    const int head_dim = p.head_dim > p.head_dim_v ? p.head_dim : p.head_dim_v;
    int widest = 0;
    size_t least = SIZE_MAX;
    for (const Tile &t : kTiles) {
        if (t.head_dim > widest) widest = t.head_dim;
        if (t.head_dim >= head_dim && t.smem_bytes() < least) least = t.smem_bytes();
    }
    if (widest < head_dim) return fa_because(why, FA_REFUSES, FA_WHY_HEAD_DIM, widest, 0, 0);
    return fa_because(why, FA_NOT_HERE, FA_WHY_SHARED_MEMORY, int64_t(least), int64_t(device->smem_per_block), 0);
}

template <typename T> void find_chunks(const fa_forward &p, const Tile &tile, Options *o) {
    const int width = chunk_width<T>(tile);
    o->q_chunks = takes_chunks<T>(p.q, p.head_dim, width);
    o->k_chunks = takes_chunks<T>(p.k, p.head_dim, width);
    o->v_chunks = takes_chunks<T>(p.v, p.head_dim_v, width);
    o->out_chunks = takes_chunks<T>(p.out, p.head_dim_v, 4);
}

void set_scores(const fa_forward &p, Options *o) {
    o->score = score_params(p);
    o->scale = static_cast<float>(p.scale);
    o->softcap = static_cast<float>(p.softcap);
}

/* The features that only the serving instances have. */
constexpr uint32_t kServed = FA_WITH_LENGTHS | FA_WITH_PAGES | FA_WITH_RANGES | FA_WITH_POSITIONS |
                             FA_WITH_OUT_FLOAT32 | FA_WITH_ALIBI | FA_WITH_DROPOUT;

fa_answer plan_serving(const fa_problem *problem, const fa_device_info *device, fa_plan *plan, fa_why *why) {
    const fa_forward &p = problem->forward;
    const fa_sequences &s = problem->sequences;
    const int head_dim = p.head_dim > p.head_dim_v ? p.head_dim : p.head_dim_v;
    int chosen = 0;
    while (chosen < kServeTileCount && kServeTiles[chosen].head_dim < head_dim) ++chosen;
    if (chosen == kServeTileCount) return refuse(p, device, why);
    const Tile &tile = kServeTiles[chosen];
    plan->smem_bytes = tile.smem_bytes() + kServeExtraBytes;
    if (plan->smem_bytes > device->smem_per_block)
        return fa_because(why, FA_NOT_HERE, FA_WHY_SHARED_MEMORY, int64_t(plan->smem_bytes),
                          int64_t(device->smem_per_block), 0);
    Own &own = fa_own<Own>(plan);
    own.tile = chosen;
    own.serve = true;
    Options &o = own.options;
    set_scores(p, &o);
    o.general = p.softcap > 0 || p.bias.data || p.mask.data || problem->forward.alibi.data;
    o.tiles_m = s.packed_q ? 1 : (p.seq_q + tile.block_m - 1) / tile.block_m;
    o.tiles = p.heads * (s.q.starts ? tiles_of_packed(p, 1, tile.block_m) : p.batch * o.tiles_m);
    if (fa_dtype_size(p.dtype) == 2)
        find_chunks<uint16_t>(p, tile, &o);
    else
        find_chunks<float>(p, tile, &o);
    if (p.out_dtype == FA_F32) o.out_chunks = takes_chunks<float>(p.out, p.head_dim_v, 4);
    plan->threads = tile.threads();
    plan->blocks = o.tiles < INT32_MAX ? o.tiles : INT32_MAX; // the kernel strides over the rest
    plan->keep = true;
    return FA_TAKES;
}

fa_answer plan(const fa_problem *problem, const fa_device_info *device, fa_plan *plan, fa_why *why) {
    const fa_forward &p = problem->forward;
    if (problem->sequences.given || problem->features & kServed) return plan_serving(problem, device, plan, why);
    const int chosen = choose_tile(problem, device);
    if (chosen < 0) return refuse(p, device, why);
    const Tile &tile = kTiles[chosen];
    Own &own = fa_own<Own>(plan);
    own.tile = chosen;
    Options &o = own.options;
    set_scores(p, &o);
    o.tiles_m = tiles_m(p, chosen);
    o.tiles = p.batch * p.heads * o.tiles_m;
    o.longest_first = p.right != FA_UNBOUNDED;
    o.general = p.softcap > 0 || p.bias.data || p.mask.data;
    if (fa_dtype_size(p.dtype) == 2)
        find_chunks<uint16_t>(p, tile, &o);
    else
        find_chunks<float>(p, tile, &o);
    plan->threads = tile.threads();
    plan->blocks = o.tiles < INT32_MAX ? o.tiles : INT32_MAX; // the kernel strides over the rest
    plan->smem_bytes = tile.smem_bytes();
    plan->keep = true;
    return FA_TAKES;
}

fa_code launch(const fa_problem *problem, const fa_plan *plan, const fa_launch *launch) {
    const fa_forward &p = problem->forward;
    if (fa_own<Own>(plan).serve) {
        const auto serve = p.dtype == FA_F16    ? launch_serve_f16
                           : p.dtype == FA_BF16 ? launch_serve_bf16
                                                : launch_serve_f32;
        return serve(*problem, *plan, *launch);
    }
    if (p.dtype == FA_F16) return launch_f16(p, *plan, *launch);
    if (p.dtype == FA_BF16) return launch_bf16(p, *plan, *launch);
    return launch_f32(p, *plan, *launch);
}

} // namespace
} // namespace fa::simt

FA_DEFINE_KERNEL(simt) = {
    .abi = FA_KERNEL_ABI,
    .op = FA_FORWARD,
    .device = FA_CUDA,
    .name = "simt",
    .summary = "tiled online softmax without tensor cores: takes every call on float types",
    .cc_from = 80,
    .cc_to = 0,
    .dtypes = fa::kFloatBits,
    .takes = FA_WITH_BIAS | FA_WITH_MASK | FA_WITH_SINKS | FA_WITH_SOFTCAP | FA_WITH_WINDOW | FA_WITH_HEAD_DIM_V |
             fa::simt::kServed,
    .plan = fa::simt::plan,
    .launch = fa::simt::launch,
};

#endif
