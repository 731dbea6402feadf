/* simt: tiled online softmax on the ordinary floating-point units; the row that takes every call on float types.
 *
 * A thread block owns BLOCK_M query rows of one head and walks over the keys they see, BLOCK_N at a time. Both products
 * are register-blocked float32 matrix products from shared memory, where Q, K and V lie as float32:
 *
 *     S = Q K^T -> base-2 scores, softmax state in registers -> P to shared memory -> O += P V
 *
 * With KEY_GROUPS > 1 the warps form groups that share the query rows and divide the key blocks; their results are
 * merged at the end. That keeps more warps busy where there are few query rows. simt_kernel.cuh says who holds what.
 *
 * Whole dense surface: float16, bfloat16, float32; any strides (16-byte loads where they allow it, else element loads);
 * GQA, causal, window, softcap, bias, boolean mask, sinks, LSE; head_dim and head_dim_v 1..256 apart; zero keys.
 * Limits: no tensor cores, so at most the float32 rate; keys are not divided over thread blocks, so that a few query
 * rows against many keys leave most of the GPU idle.
 *
 * @instance f16 -DSIMT_TYPE=__half
 * @instance bf16 -DSIMT_TYPE=__nv_bfloat16
 * @instance f32 -DSIMT_TYPE=float
 *
 *     python -m bench measure --preset history --rows simt
 *     python fa_ext/_build.py simt -o variant.so -DHEAD_DIM=64 -DBLOCK_M=64 -DNUM_WARPS=2     (one tile alone)
 */
#include "convert.cuh"    // takes_chunks
#include "fa.h"           // fa_problem, fa_kernel
#include "launch.cuh"     // FA_CUDA_TRY
#include "score.cuh"      // score_params
#include "simt_tile.cuh"  // Tile, Options
#include "simt_tuned.cuh" // TUNED_64

/* ---- configuration ---- */

#ifndef VEC_WIDTH
#define VEC_WIDTH 0 // elements a global load, 1 to 8; 0: 16 bytes
#endif
#ifndef REDUCE
#define REDUCE 0 // 0: row maxima by warp shuffles; 1: through shared memory
#endif

namespace simt {

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
#define SYNC_POLICY 0 // SYNC_SEPARATE (1) + SYNC_PREFETCH (2)
#endif
#ifndef MIN_BLOCKS
#define MIN_BLOCKS 1 // thread blocks a multiprocessor that the registers must allow
#endif
constexpr Tile TILES[] = {tile(HEAD_DIM, BLOCK_M, BLOCK_N, NUM_WARPS, KEY_GROUPS, SYNC_POLICY, MIN_BLOCKS)};

#else

/* By head_dim, and within it by falling BLOCK_M: for many query rows, then those that fill the GPU with fewer, last one
 * for a handful. For each use there is one within the 99 KB a thread block of sm_86 and sm_89: where two tiles have the
 * same rows and groups, the second is for them. */
constexpr Tile TILES[] = {
    // head_dim, BLOCK_M, BLOCK_N, NUM_WARPS, KEY_GROUPS, SYNC_POLICY, MIN_BLOCKS
    tile(64, 128, 64, 4, 1, 2, 2),  //  85 KB
    tile(64, 64, 64, 8, 2, 2, 1),   //  85 KB
    TUNED_64,                       // the tuner's, for few query rows
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

#endif

constexpr int TILE_COUNT = sizeof(TILES) / sizeof(TILES[0]);

constexpr bool tiles_are_valid() {
    for (const Tile &t : TILES)
        if (!t.valid()) return false;
    return true;
}
static_assert(tiles_are_valid(), "BLOCK_M must be a multiple of 4 NUM_WARPS / KEY_GROUPS, BLOCK_N of 8, HEAD_DIM of 32 "
                                 "up to 256; KEY_GROUPS must divide NUM_WARPS and be at most 15; SYNC_POLICY 0..3, "
                                 "REDUCE 0..1, VEC_WIDTH 0, 1, 2, 4 or 8; the tile must fit 227 KB of shared memory");

/* One a dtype, each compiled as an instance of this file. */
using Launcher = fa_code(const fa_problem &, const Options &, const fa_plan &, cudaStream_t, fa_status *);
Launcher launch_f16, launch_bf16, launch_f32;

} // namespace simt

#ifdef FA_INSTANCE

/* ---- one dtype's kernels ---- */

#include "simt_kernel.cuh" // simt_kernel

namespace simt {

template <int INDEX> struct Config { static constexpr Tile tile = TILES[INDEX]; };

template <typename T, int INDEX>
fa_code launch_tile(const fa_problem &p, const Options &o, const fa_plan &plan, cudaStream_t stream,
                    fa_status *status) {
    if constexpr (INDEX < TILE_COUNT) {
        if (plan.config != INDEX) return launch_tile<T, INDEX + 1>(p, o, plan, stream, status);
        auto kernel = simt_kernel<T, Config<INDEX>>;
        if (plan.smem_bytes > FA_SMEM_FREE) FA_TRY(fa_allow_smem(kernel, plan.smem_bytes, status));
        FA_CHAOS_ARM(stream, status);
        kernel<<<static_cast<unsigned>(plan.blocks), plan.threads, plan.smem_bytes, stream>>>(p, o);
        FA_CUDA_TRY(status, cudaGetLastError());
        return FA_OK;
    } else {
        return fa_fail(status, FA_EUNSUPPORTED, "simt has no tile %d", plan.config);
    }
}

#define SIMT_JOIN(a, b)         a##b
#define SIMT_LAUNCHER(instance) SIMT_JOIN(launch_, instance)
fa_code SIMT_LAUNCHER(FA_INSTANCE)(const fa_problem &p, const Options &o, const fa_plan &plan, cudaStream_t stream,
                                   fa_status *status) {
    return launch_tile<SIMT_TYPE, 0>(p, o, plan, stream, status);
}

} // namespace simt

#else

/* ---- host: rejects, plan, launch ---- */

namespace {

using simt::TILES;

int64_t tiles_m(const fa_problem *p, int tile) { return (p->seq_q + TILES[tile].block_m - 1) / TILES[tile].block_m; }

/* The tile to use, -1 if none of this build fits. Within the smallest head_dim that will do, the first tile whose rows
 * are used and that fills 3/4 of the places for thread blocks (1.5 times their number when later rows see more keys:
 * unequal tiles balance only if there are many); a tile for a handful of rows only where there are so few. With
 * batch_invariant the choice looks at head_dim alone, so that a batch entry's bits do not depend on the others. */
int choose_tile(const fa_problem *p, const fa_device_info *device) {
    const int head_dim = p->head_dim > p->head_dim_v ? p->head_dim : p->head_dim_v;
    int chosen = -1;
    for (int i = 0; i < simt::TILE_COUNT; ++i) {
        const simt::Tile &t = TILES[i];
        if (t.head_dim < head_dim || t.smem_bytes() > device->smem_per_block) continue;
        if (chosen >= 0) {
            const simt::Tile &before = TILES[chosen];
            const bool rows_idle = p->seq_q <= before.block_m / 4;
            const int64_t tiles = p->batch * p->heads * tiles_m(p, chosen), slots = device->sm_count * before.blocks;
            const bool sms_idle = 4 * tiles < (p->right != FA_UNBOUNDED ? 6 : 3) * slots;
            if (p->batch_invariant || t.head_dim != before.head_dim) break;
            if (t.block_m == before.block_m && t.groups == before.groups) continue; // for less shared memory
            if (!rows_idle && (!sms_idle || t.block_m < 16)) break;
        }
        chosen = i;
    }
    return chosen;
}

const char *rejects(const fa_problem *p, const fa_device_info *device) {
    if (device->cc < 80) return "needs compute capability 8.0 (Ampere) or newer";
    if (p->dtype == FA_F64) return "takes float16, bfloat16 and float32, not float64";
    if (choose_tile(p, device) < 0) return "no tile of this build takes this head_dim in the device's shared memory";
    return nullptr;
}

fa_code plan(const fa_problem *p, const fa_device_info *device, fa_plan *plan, fa_status *) {
    const int tile = choose_tile(p, device);
    const int64_t tiles = p->batch * p->heads * tiles_m(p, tile);
    plan->config = tile;
    plan->tile_m = TILES[tile].block_m;
    plan->tile_n = TILES[tile].block_n;
    plan->splits = 1;
    plan->stages = 1;
    plan->threads = TILES[tile].threads();
    plan->blocks = tiles < INT32_MAX ? tiles : INT32_MAX; // the kernel strides over the rest
    plan->smem_bytes = TILES[tile].smem_bytes();
    return FA_OK;
}

template <typename T> void find_chunks(const fa_problem *p, const simt::Tile &tile, simt::Options *o) {
    const int width = simt::chunk_width<T>(tile);
    o->q_chunks = fa::takes_chunks<T>(p->q, p->head_dim, width);
    o->k_chunks = fa::takes_chunks<T>(p->k, p->head_dim, width);
    o->v_chunks = fa::takes_chunks<T>(p->v, p->head_dim_v, width);
    o->out_chunks = fa::takes_chunks<T>(p->out, p->head_dim_v, 4);
}

fa_code launch(const fa_problem *p, const fa_plan *plan, const fa_launch *launch, fa_status *status) {
    if (plan->blocks == 0) return FA_OK;
    const simt::Tile &tile = TILES[plan->config];
    simt::Options o = {};
    o.score = fa::score_params(*p);
    o.tiles_m = tiles_m(p, plan->config);
    o.tiles = p->batch * p->heads * o.tiles_m;
    o.longest_first = p->right != FA_UNBOUNDED;
    o.general = p->softcap > 0 || p->bias.data || p->mask.data || o.score.scale_log2 == 0;
    cudaStream_t stream = static_cast<cudaStream_t>(launch->stream);
    if (p->dtype == FA_F16) {
        find_chunks<__half>(p, tile, &o);
        return simt::launch_f16(*p, o, *plan, stream, status);
    }
    if (p->dtype == FA_BF16) {
        find_chunks<__nv_bfloat16>(p, tile, &o);
        return simt::launch_bf16(*p, o, *plan, stream, status);
    }
    find_chunks<float>(p, tile, &o);
    return simt::launch_f32(*p, o, *plan, stream, status);
}

} // namespace

extern "C" FA_EXPORT const fa_kernel fa_row_simt;
const fa_kernel fa_row_simt = {
    .abi = FA_ROW_ABI,
    .device = FA_CUDA,
    .name = "simt",
    .summary = "tiled online softmax without tensor cores: takes every call on float types",
    .rejects = rejects,
    .declines = nullptr,
    .plan = plan,
    .launch = launch,
};

#endif
