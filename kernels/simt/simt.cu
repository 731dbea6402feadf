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
 * with more (sequences of any length, pages, k_range, positions, segments, intervals, ALiBi, dropout, max_logit,
 * float32 results) have instances of their own with one tile a head_dim, so that a sequence's bits are its own:
 * simt/serve.cuh. Limits: no tensor cores, so at most the float32 rate; keys are not divided over thread blocks, so
 * that a few query rows against many keys leave most of the GPU idle.
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
 *
 * @instances instance.cu
 * @instance {f16,bf16,f32} false {1:__half,__nv_bfloat16,float}
 * @instances serve_instance.cu
 * @instance serve_{f16,bf16,f32} true {1:__half,__nv_bfloat16,float}
 * @core (serve_)?f32
 */
#include "common/instances.cuh"
#include "common/launch.cuh" // fa_own
#include "common/rows.cuh"   // takes_chunks
#include "common/score.cuh"  // score_params
#include "common/spot.cuh"   // tiles_of_packed
#include "fa.h"              // fa_forward, fa_kernel
#include "simt/config.cuh"   // kTiles, kServeTiles

namespace fa::simt {

FA_INSTANCES(FA_DECLARE_INSTANCE)

namespace {

struct Instance {
    bool serve;
    fa_dtype dtype;
    Launch *launch; // null: this build leaves it out
};
#define FA_ENTRY(name, serve, T) {serve, kDtypeOf<T>, name},
const Instance kInstances[] = {FA_INSTANCES(FA_ENTRY)};

/* NULL: it is left out. */
const Instance *instance_for(bool serve, fa_dtype dtype) {
    for (const Instance &i : kInstances)
        if (i.launch && i.serve == serve && i.dtype == dtype) return &i;
    return nullptr;
}

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
constexpr uint32_t kServed = FA_WITH_LENGTHS | FA_WITH_PAGES | FA_WITH_RANGES | FA_WITH_POSITIONS | FA_WITH_SEGMENTS |
                             FA_WITH_OUT_FLOAT32 | FA_WITH_ALIBI | FA_WITH_INTERVALS | FA_WITH_DROPOUT |
                             FA_WITH_MAX_LOGIT;

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
    o.general =
        p.softcap > 0 || p.bias.data || p.mask.data || p.alibi.data || p.q_segments.data || p.intervals_count > 1;
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
    const bool serve = problem->sequences.given || problem->features & kServed;
    if (!instance_for(serve, p.dtype)) return fa_because(why, FA_REFUSES, FA_WHY_INSTANCE, 0, 0, 0);
    if (serve) return plan_serving(problem, device, plan, why);
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
    return instance_for(fa_own<Own>(plan).serve, problem->forward.dtype)->launch(*problem, *plan, *launch);
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
