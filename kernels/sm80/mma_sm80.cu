/* mma_sm80: the tensor-core kernel of every NVIDIA GPU from Ampere on, in the manner of FlashAttention-2.
 *
 * Float16 and bfloat16, float32 accumulation, mma.sync m16n8k16, head_dim and head_dim_v from 1 to 256 (padded with
 * zeros to the next of 32, 64, 96, 128, 192, 256). The kernel and its maths stand in sm80/attention.cuh; what else is
 * here: sm80/tile.cuh (swizzled tiles, loads), sm80/scores.cuh (masks, softcap), sm80/bias.cuh (bias and boolean mask),
 * ptx.cuh (instructions).
 *
 * Sequences of any length, pages, k_range, positions, segments, intervals, ALiBi, dropout and float32 results have
 * instances of their own with one tile shape a head_dim, so that a sequence's bits are its own (sm80/serve.cuh,
 * sm80/serve_plan.cuh).
 *
 * Several tile shapes for each padded head_dim and dtype (`Kind` below): for grids that fill the device, by the shared
 * memory of its multiprocessors; for smaller grids; one that does everything else, and one that does it faster for bias
 * and mask in large grids. Each but the last fits the 99 KB of shared memory that a block has on sm_86 and sm_89.
 * Figures of speed are for the H200; sm_80, 86 and 89 are built, not run.
 *
 *     python -m bench measure --preset paper --kernels mma_sm80
 *
 * @instances instance.cu
 * @instance d{32,64,96,128,192,256} Dense {1}
 * @instances serve_instance.cu
 * @instance serve_d{32,64,96,128,192,256} Serve {1}
 */
#include "common/launch.cuh" // fa_own
#include "common/limits.cuh" // band_of, divide_up, lengths_fit
#include "common/rows.cuh"   // takes_chunks
#include "common/score.cuh"  // score_params
#include "fa.h"              // fa_forward, fa_kernel
#include "sm80/kinds.cuh"
#include "sm80/serve_plan.cuh" // ServeArgs, plan_serving

namespace fa {

#define FA_DECLARE(name, Type, D) extern "C" __attribute__((weak)) Type name;
FA_INSTANCES(FA_DECLARE)

namespace {

struct Tile {
    int tile_m, tile_n, stages, threads, blocks_per_sm;
    int shared_bytes, wide_bytes, half_bytes, mask_bytes; // of Q, K and V; of a bias of 4 or 2 bytes, of a mask
};

template <class C> constexpr Tile tile_of() {
    Tile tile = {C::kTileM, C::kTileN, C::kStages, C::kThreads, C::kBlocksPerSm, C::kSharedBytes, 0, 0, 0};
    if constexpr (!C::kPlain) {
        using Bias = BiasTiles<C>;
        tile.wide_bytes = Bias::kWideBytes, tile.half_bytes = Bias::kHalfBytes, tile.mask_bytes = Bias::kMaskBytes;
    }
    return tile;
}

struct DenseInstance {
    int head_dim;
    Dense *launch; // null: this build leaves it out
    Tile tile[kKinds];
};
struct ServeInstance {
    int head_dim;
    Serve *launch; // null: this build leaves it out
    sm80::ServeForm form;
};

template <int D> constexpr DenseInstance dense_of(Dense *launch) {
    return {D,
            launch,
            {tile_of<Choose<__half, D, kLarge>>(), tile_of<Choose<__half, D, kMedium>>(),
             tile_of<Choose<__half, D, kCompact>>(), tile_of<Choose<__half, D, kSmall>>(),
             tile_of<Choose<__half, D, kGeneral>>(), tile_of<Choose<__half, D, kBiased>>()}};
}
template <int D> constexpr ServeInstance serve_of(Serve *launch) {
    return {D, launch, sm80::serve_form<sm80::ServeConfig<__half, D, false>>()};
}

/* Both ascending by head_dim. */
#define FA_IN_DENSE(name, Type, D)   FA_DENSE_FROM_##Type(name, D)
#define FA_DENSE_FROM_Dense(name, D) dense_of<D>(name),
#define FA_DENSE_FROM_Serve(name, D)
#define FA_IN_SERVE(name, Type, D) FA_SERVE_FROM_##Type(name, D)
#define FA_SERVE_FROM_Dense(name, D)
#define FA_SERVE_FROM_Serve(name, D) serve_of<D>(name),
const DenseInstance kDense[] = {FA_INSTANCES(FA_IN_DENSE)};
const ServeInstance kServe[] = {FA_INSTANCES(FA_IN_SERVE)};

template <int D> constexpr bool fits() {
    const DenseInstance dense = dense_of<D>(nullptr);
    for (int kind = 0; kind < kBiased; ++kind) {
        const Tile &tile = dense.tile[kind];
        if (tile.shared_bytes + tile.wide_bytes + tile.mask_bytes > 99 * 1024) return false;
    }
    return serve_of<D>(nullptr).form.shared_bytes <= 99 * 1024;
}
#define FA_FITS(name, Type, D)                                                                                         \
    static_assert(fits<D>(), "all but kBiased fit a block's shared memory on sm_86 and sm_89");
FA_INSTANCES(FA_FITS)
#define FA_WIDEST(name, Type, D) || D == FA_MAX_HEAD_DIM
static_assert(false FA_INSTANCES(FA_WIDEST), "an instance for every head_dim");

/* The plan's own part. */
struct Own {
    int index; // of kDense, or of kServe
    Kind kind;
    int splits;
    bool folded; // the query heads of a K/V head are its rows
    bool chunks_q, chunks_k, chunks_v, chunks_o, chunks_bias, chunks_mask;
    int bias_at, mask_at; // in shared memory
    int64_t section;      // heads walked together
    int row_blocks;       // tiles of queries a head
    bool serves;          // and nothing above but `index` counts
    sm80::ServeOwn serve;
};

/* The narrowest instance in this build that holds both head dims; NULL: it is left out. */
template <class Instance, size_t N> const Instance *instance_for(const Instance (&instances)[N], const fa_forward *p) {
    const int wanted = p->head_dim > p->head_dim_v ? p->head_dim : p->head_dim_v;
    for (const Instance &i : instances)
        if (i.launch && i.head_dim >= wanted) return &i;
    return nullptr;
}

/* Whether rows consist of whole 16-byte aligned chunks of neighbouring elements. A bias or mask that is absent passes.
 */
bool has_chunks(const fa_operand &x, int columns) { return takes_chunks<uint16_t>(x, columns, 8); }
bool has_bias_chunks(const fa_forward *p) {
    if (!p->bias.data) return true;
    return p->bias_dtype == FA_F32 ? takes_chunks<float>(p->bias, p->seq_k, 4)
                                   : takes_chunks<uint16_t>(p->bias, p->seq_k, 8);
}
bool has_mask_chunks(const fa_forward *p) { return !p->mask.data || takes_chunks<uint8_t>(p->mask, p->seq_k, 16); }

int64_t blocks_of(const fa_forward *p, const Tile &tile) {
    return divide_up(p->seq_q, tile.tile_m) * p->batch * p->heads;
}

/* Shared memory of a launch: Q, K and V, then the bias, then the mask. */
struct SharedLayout {
    int bias, mask, bytes;
};

SharedLayout shared_layout(const fa_forward *p, const Tile &tile) {
    const int bias_bytes = !p->bias.data ? 0 : p->bias_dtype == FA_F32 ? tile.wide_bytes : tile.half_bytes;
    const int mask = tile.shared_bytes + bias_bytes;
    return {tile.shared_bytes, mask, mask + (p->mask.data ? tile.mask_bytes : 0)};
}

Kind kind_of(const fa_forward *p, bool batch_invariant, const fa_device_info *device, const DenseInstance &instance) {
    // A folded scale multiplies -inf, so it is neither 0 nor rounded to 0.
    const bool folds = p->scale > 1e-30 && p->scale < 1e30;
    const int64_t sms = device->sm_count;
    const auto blocks = [&](Kind kind) { return blocks_of(p, instance.tile[kind]); };
    const auto fits = [&](Kind kind) {
        const Tile &tile = instance.tile[kind];
        const size_t bytes = shared_layout(p, tile).bytes + 1024; // 1 KB a block is CUDA's own
        return tile.blocks_per_sm * bytes <= device->smem_per_sm;
    };
    const bool chunks =
        has_chunks(p->q, p->head_dim) && has_chunks(p->k, p->head_dim) && has_chunks(p->v, p->head_dim_v);
    if ((p->bias.data || p->mask.data) && chunks && has_bias_chunks(p) && has_mask_chunks(p) &&
        p->softcap <= kMaxFastCap) {
        // kGeneral gains while all its blocks run at once; and two rounds of them, where the lengths of blocks differ.
        const int64_t at_once = sms * instance.tile[kGeneral].blocks_per_sm;
        const bool fills = blocks(kGeneral) > (p->right != FA_UNBOUNDED ? 2 : 1) * at_once;
        return (fills || batch_invariant) && fits(kBiased) ? kBiased : kGeneral;
    }
    if (!folds || p->softcap > 0 || p->bias.data || p->mask.data || !chunks) return kGeneral;
    // kSmall gains while all its blocks run at once; four a multiprocessor where the lengths of blocks differ and
    // kLarge would wait for its longest one.
    const int per_sm = p->right != FA_UNBOUNDED ? 4 : instance.head_dim > 128 ? 1 : instance.tile[kSmall].blocks_per_sm;
    if (!batch_invariant && blocks(kSmall) <= sms * per_sm) return kSmall;
    return fits(kLarge) ? kLarge : fits(kMedium) ? kMedium : kCompact;
}

/* With one query a head, the query heads that share a K/V head become the rows of one head, so that K and V are read
 * once for all of them. The one query's visible keys are exactly [key_begin, key_end). */
bool folds_heads(const fa_forward &p) { return p.seq_q == 1 && p.heads_kv > 0 && p.heads > p.heads_kv; }

fa_forward fold_heads(const fa_forward &problem) {
    fa_forward p = problem;
    const int64_t group = p.heads / p.heads_kv;
    for (fa_operand *x : {&p.q, &p.out, &p.lse, &p.bias, &p.mask}) {
        x->stride[2] = x->stride[1];
        x->stride[1] *= group;
    }
    p.sinks.stride[0] *= group;
    p.heads = p.heads_kv;
    p.seq_q = group;
    p.left = p.right = FA_UNBOUNDED;
    p.diagonal = 0;
    return p;
}

/* Parts that the keys are split into: enough to fill the device, each of two tiles or more, if that shortens the
 * longest block by at least four tiles, which the second kernel is worth. */
int64_t splits_of(const fa_forward *p, const fa_device_info *device, const Tile &tile, int head_dim) {
    const int64_t resident = int64_t(device->sm_count) * tile.blocks_per_sm;
    const int64_t tiles = divide_up(p->key_end - p->key_begin, tile.tile_n), blocks = blocks_of(p, tile);
    const int64_t row_bytes = p->batch * p->heads * p->seq_q * (head_dim + 2) * 4;
    int64_t splits = resident / (blocks > 0 ? blocks : 1);
    if (splits > tiles / 2) splits = tiles / 2;
    if (row_bytes > 0 && splits > int64_t(device->workspace_limit) / row_bytes)
        splits = int64_t(device->workspace_limit) / row_bytes;
    if (splits < 2) return 1;
    const int64_t share = divide_up(tiles, splits);
    return tiles - share < 4 ? 1 : divide_up(tiles, share);
}

/* Heads walked together: where row blocks differ in length, as many as half of the L2 cache holds, else one by one. */
int64_t section_of(const fa_forward *p, const fa_device_info *device) {
    const int64_t bytes = p->seq_k * (p->head_dim + p->head_dim_v) * 2, pairs = p->batch * p->heads;
    int64_t section = 1;
    if (p->right != FA_UNBOUNDED && bytes > 0)
        section = int64_t(device->l2_bytes / 2) / bytes * (p->heads / p->heads_kv);
    const int64_t sections = section > 0 && pairs > section ? pairs / section : 1; // of about equal size
    return section < 1 ? 1 : divide_up(pairs, sections);
}

fa_answer plan_dense(const fa_problem *problem, const fa_device_info *device, fa_plan *plan, fa_why *why) {
    const bool folded = folds_heads(problem->forward);
    fa_forward rows;
    const fa_forward *p = &problem->forward;
    if (folded) rows = fold_heads(*p), p = &rows;
    if (!lengths_fit(p->seq_q, p->seq_k, kBitsInBand, why)) return FA_REFUSES;
    const DenseInstance *found = instance_for(kDense, p);
    if (!found) return fa_because(why, FA_REFUSES, FA_WHY_INSTANCE, 0, 0, 0);
    const DenseInstance &instance = *found;
    const Kind kind = kind_of(p, problem->batch_invariant, device, instance);
    const Tile &tile = instance.tile[kind];
    const SharedLayout shared = shared_layout(p, tile);
    const int64_t blocks = blocks_of(p, tile);
    if (blocks >> kMaxTilesBits) return fa_because(why, FA_REFUSES, FA_WHY_TILES, kMaxTilesBits, 0, 0);
    if (size_t(shared.bytes) > device->smem_per_block)
        return fa_because(why, FA_NOT_HERE, FA_WHY_SHARED_MEMORY, shared.bytes, int64_t(device->smem_per_block), 0);
    const bool splits = (kind == kSmall || kind == kGeneral) && !problem->batch_invariant;
    Own &own = fa_own<Own>(plan);
    own = {
        .index = int(found - kDense),
        .kind = kind,
        .splits = splits ? int(splits_of(p, device, tile, instance.head_dim)) : 1,
        .folded = folded,
        .chunks_q = has_chunks(p->q, p->head_dim),
        .chunks_k = has_chunks(p->k, p->head_dim),
        .chunks_v = has_chunks(p->v, p->head_dim_v),
        .chunks_o = has_chunks(p->out, p->head_dim_v),
        .chunks_bias = has_bias_chunks(p),
        .chunks_mask = has_mask_chunks(p),
        .bias_at = shared.bias,
        .mask_at = shared.mask,
        .section = problem->empty ? 1 : section_of(p, device),
        .row_blocks = int(divide_up(p->seq_q, tile.tile_m)),
    };
    plan->threads = tile.threads;
    plan->blocks = blocks * own.splits;
    plan->smem_bytes = shared.bytes;
    if (own.splits > 1)
        plan->workspace_bytes = size_t(own.splits * p->batch * p->heads * p->seq_q * (instance.head_dim + 2)) * 4;
    plan->keep = true;
    return FA_TAKES;
}

fa_answer plan(const fa_problem *problem, const fa_device_info *device, fa_plan *plan, fa_why *why) {
    if (!sm80::serves(problem)) return plan_dense(problem, device, plan, why);
    Own &own = fa_own<Own>(plan);
    const ServeInstance *found = instance_for(kServe, &problem->forward);
    if (!found) return fa_because(why, FA_REFUSES, FA_WHY_INSTANCE, 0, 0, 0);
    own.index = int(found - kServe);
    own.serves = true;
    return plan_serving(problem, device, found->form, own.serve, plan, why);
}

fa_code launch(const fa_problem *problem, const fa_plan *plan, const fa_launch *launch) {
    const Own &own = fa_own<Own>(plan);
    if (own.serves)
        return kServe[own.index].launch(serve_args(problem, own.serve, launch->workspace), problem->forward.dtype,
                                        own.serve.dressed, *plan, *launch);
    fa_forward rows;
    const fa_forward *p = &problem->forward;
    if (own.folded) rows = fold_heads(*p), p = &rows;
    const int64_t pairs = p->batch * p->heads, sections = divide_up(pairs, own.section);
    const MmaArgs args = {
        .problem = attention_params(*p),
        .score = score_params(*p),
        .visible = band_of(*p),
        .heads = Divider::of(p->heads),
        .group = Divider::of(p->heads / p->heads_kv),
        .per_section = Divider::of(own.section * own.row_blocks),
        .width = Divider::of(own.section),
        .last_width = Divider::of(pairs - (sections - 1) * own.section),
        .row_blocks = own.row_blocks,
        .sections = int(sections),
        .chunks_q = own.chunks_q,
        .chunks_k = own.chunks_k,
        .chunks_v = own.chunks_v,
        .chunks_o = own.chunks_o,
        .chunks_bias = own.chunks_bias,
        .chunks_mask = own.chunks_mask,
        .bias_at = own.bias_at,
        .mask_at = own.mask_at,
        .shared_bytes = int(plan->smem_bytes),
        .sink_row = own.folded ? problem->forward.sinks.stride[0] : 0,
        .splits = own.splits,
        .partial = static_cast<float *>(launch->workspace),
    };
    return kDense[own.index].launch(args, p->dtype, own.kind, unsigned(plan->blocks / own.splits), *launch);
}

} // namespace

FA_DEFINE_KERNEL(mma_sm80) = {
    .abi = FA_KERNEL_ABI,
    .op = FA_FORWARD,
    .device = FA_CUDA,
    .name = "mma_sm80",
    .summary = "mma.sync tensor cores with cp.async pipelines, from Ampere on",
    .cc_from = 80,
    .cc_to = 0,
    .dtypes = fa::kFloat16Bits,
    .takes = FA_WITH_BIAS | FA_WITH_MASK | FA_WITH_SINKS | FA_WITH_SOFTCAP | FA_WITH_WINDOW | FA_WITH_HEAD_DIM_V |
             fa::sm80::kServed,
    .plan = plan,
    .launch = launch,
};

} // namespace fa
