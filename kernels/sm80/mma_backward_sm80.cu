/* mma_backward_sm80: gradients on the tensor cores of every NVIDIA GPU from Ampere on.
 *
 *     sequences: where each lies, and whose each tile is, to workspace      (common/sequence_tiles.cuh)
 *     rows:      LSE and delta = dout . out - dlse of each query, to workspace   (mma_backward_rows.cuh)
 *     queries:   dq, a tile of queries a thread block                                 (mma_backward.cuh)
 *     keys:      dk and dv, a tile of keys of a kv head a thread block, over all query heads of its group
 *     bias:      dbias, a tile of its own elements a thread block, over all that it is broadcast along
 *                                                                                (mma_backward_bias.cuh)
 *     sinks:     dsinks, of the rows in workspace
 *
 * S and dP are worked out anew in each: seven products instead of five, but no sum leaves a block's registers before it
 * is whole: no atomics, no float32 copy of a gradient, the same bits from run to run and in any batch, and dk, dv of
 * grouped heads cost nothing more. Kernels follow one another on one stream; what one leaves in memory for the next are
 * the lists of sequences, the rows and the parts of dsinks and dbias. Barriers: mma_backward.cuh.
 *
 * A sequence is a dense problem of its own: a block works on the tile of one sequence, with its rows, lengths and band,
 * so that the bits are those of the dense call, whatever lies beside it; rows of no sequence, and those that are not
 * used, get 0. Packed and padded on either side, k_range, all options but positions.
 *
 * Float16 and bfloat16, float32 accumulation, head_dim and head_dim_v from 1 to 256 (padded with zeros to the next of
 * 32, 64, 96, 128, 192, 256), any strides; causal, window, softcap, bias, boolean mask, intervals, ALiBi, dropout,
 * sinks, gradients of bias and sinks and through the LSE, accumulation; zero sizes. Segments of padded arrays are taken
 * with those of sequences. Instances a head_dim, dtype and side: by the size of the grid, one for softcap, bias, mask
 * and rows that are no aligned chunks, and one for all these, ALiBi, dropout, segments and intervals; of sequences,
 * head_dim 64 and more, the one for large grids and the last. 99 KB of shared memory a block at most. 8 bytes of
 * workspace a query row, heads in groups where they do not fit. From head_dim 192 on dk and dv are made one after the
 * other.
 *
 * @instances backward_instance.cu
 * @instance d{32,64,96,128,192,256} {1} Family::kDense
 * @instance d{32,64,96,128,192,256}_general {1} Family::kGeneral
 * @instance sequences_d{64,96,128,192,256} {1} Family::kSequences
 * @core d(32|64|128|256)|d(64|128)_general|sequences_d(64|128|256)
 */
#include <algorithm> // max

#include "common/instances.cuh"
#include "common/launch.cuh" // fa_own
#include "common/limits.cuh" // band_of, divide_up, lengths_fit
#include "common/rows.cuh"   // takes_chunks
#include "common/score.cuh"  // score_params
#include "fa.h"              // fa_backward, fa_kernel
#include "philox.h"          // fa_dropout_scale
#include "sm80/mma_backward_kinds.cuh"

namespace fa {

FA_INSTANCES(FA_DECLARE_INSTANCE)

namespace {

struct Instance {
    int head_dim;
    Family family;
    Launch *launch;                            // null: this build leaves it out
    int shared_bytes;                          // the most that one of its kernels takes
    int bias_queries, bias_keys;               // of a tile of dbias
    int own_queries[kKinds], own_keys[kKinds]; // that a block owns, by kind
};

template <int D, Family kFamily> constexpr Instance instance_of(Launch *launch) {
    constexpr bool kSequences = kFamily == Family::kSequences;
    using T = __half; // dtypes do not differ
    using Bias = BiasConfig<T, D, true, kSequences>;
    constexpr Role kQueries = Role::kQueries;
    constexpr Role kKeys = has_both(D) ? Role::kKeys : Role::kKey, kValues = has_both(D) ? Role::kKeys : Role::kValue;
    static_assert(Choose<T, D, kKeys, kLarge>::kOwn == Choose<T, D, kValues, kLarge>::kOwn);
    int bytes = Bias::kSharedBytes;
    for (const int other : {Choose<T, D, kQueries, kLarge, kSequences>::kSharedBytes,
                            Choose<T, D, kQueries, kExtended, kSequences>::kSharedBytes,
                            Choose<T, D, kKeys, kLarge, kSequences>::kSharedBytes,
                            Choose<T, D, kKeys, kExtended, kSequences>::kSharedBytes,
                            Choose<T, D, kValues, kLarge, kSequences>::kSharedBytes,
                            Choose<T, D, kValues, kExtended, kSequences>::kSharedBytes})
        bytes = other > bytes ? other : bytes;
    return {.head_dim = D,
            .family = kFamily,
            .launch = launch,
            .shared_bytes = bytes,
            .bias_queries = Bias::kQueries,
            .bias_keys = Bias::kKeys,
            .own_queries = {Choose<T, D, kQueries, kLarge>::kOwn, Choose<T, D, kQueries, kSmall>::kOwn,
                            Choose<T, D, kQueries, kGeneral>::kOwn, Choose<T, D, kQueries, kExtended>::kOwn},
            .own_keys = {Choose<T, D, kKeys, kLarge>::kOwn, Choose<T, D, kKeys, kSmall>::kOwn,
                         Choose<T, D, kKeys, kGeneral>::kOwn, Choose<T, D, kKeys, kExtended>::kOwn}};
}

#define FA_ENTRY(name, D, family) instance_of<D, family>(name),
const Instance kInstances[] = {FA_INSTANCES(FA_ENTRY)}; // of a family ascending by head_dim
#define FA_WIDEST(name, D, family) || D == FA_MAX_HEAD_DIM
static_assert(false FA_INSTANCES(FA_WIDEST), "an instance for every head_dim");

/* The narrowest in this build that is wide enough; NULL: it is left out. */
const Instance *instance_for(int head_dim, Family family) {
    for (const Instance &i : kInstances)
        if (i.launch && i.head_dim >= head_dim && i.family == family) return &i;
    return nullptr;
}

/* The plan's own part. */
struct Own {
    int index; // of kInstances
    fa_mma_kinds kinds;
    bool chunks_q, chunks_k, chunks_v, chunks_dout, chunks_out;
    bool pairs_bias, pairs_mask;
    uint8_t stores_pairs;
    int parts;                             // of the walks of dbias
    int64_t pairs;                         // whose rows the workspace holds at a time
    int64_t pitch;                         // rows a head there
    int64_t lists_at, sinks_at, bias_at;   // in the workspace, bytes
    int64_t section_queries, section_keys; // heads, kv heads walked together
};

bool has_chunks(const fa_operand &x, int columns) { return takes_chunks<uint16_t>(x, columns, 8); }

/* Gradients of which two neighbouring elements can be stored at once. */
uint8_t pair_stores(const fa_backward &p) {
    const int lengths[3] = {p.forward.head_dim, p.forward.head_dim, p.forward.head_dim_v};
    uint8_t stores = 0;
    for (int n = FA_GRAD_Q; n <= FA_GRAD_V; ++n) {
        const fa_operand &x = p.grad[n];
        const bool pairs = p.grad_dtype[n] == FA_F32 ? takes_chunks<float>(x, lengths[n], 2)
                                                     : takes_chunks<uint16_t>(x, lengths[n], 2);
        if (pairs) stores |= 1 << n;
    }
    return stores;
}

/* Heads walked together: where blocks differ in length, as many as half of the L2 cache holds what streams past them
 * of, else one by one. */
int64_t section_of(const fa_forward &f, const fa_device_info *device, int64_t streamed_rows, int64_t items) {
    const int64_t bytes = streamed_rows * (f.head_dim + f.head_dim_v) * 2;
    int64_t section = 1;
    if (f.right != FA_UNBOUNDED && bytes > 0) section = int64_t(device->l2_bytes / 2) / bytes;
    return section < 1 ? 1 : section > items && items > 0 ? items : section;
}

/* Parts of the walks of dbias: enough to fill the device, within the workspace that is left. */
int parts_of(const fa_backward &p, const fa_device_info *device, const Instance &instance, size_t used) {
    if (!(p.wants >> FA_GRAD_BIAS & 1)) return 1;
    const BiasAxes axes(p, instance.bias_queries, instance.bias_keys);
    const int64_t tasks = axes.tasks(), walk = axes.walk(), filled = int64_t(device->sm_count) * 2;
    if (tasks == 0 || walk < 2 || tasks >= filled || used >= device->workspace_limit) return 1;
    const int64_t fits = int64_t(device->workspace_limit - used) / 4 / bias_elements(p);
    int64_t parts = divide_up(filled, tasks);
    if (parts > walk) parts = walk;
    if (parts > fits) parts = fits;
    return parts < 2 ? 1 : int(parts);
}

int64_t group_of(const fa_forward &f) { return f.heads_kv ? f.heads / f.heads_kv : 1; }

/* Pairs of all: of sequences, which lie one after another, those of one entry. */
int64_t pairs_of(const fa_problem *problem) {
    const fa_forward &f = problem->forward;
    return problem->sequences.given ? f.heads_kv : f.batch * f.heads_kv;
}

SequenceTiles tiles_of(const fa_problem *problem, const Own &own) {
    const Instance &instance = kInstances[own.index];
    return sequence_tiles(problem,
                          {instance.own_queries[own.kinds.queries], instance.own_keys[own.kinds.keys], kRowsMultiple});
}

/* The instance and its kind, kLarge also for what kSmall may take; NULL: it is left out. */
const Instance *choose(const fa_problem *problem, Own &own, Kind &kind) {
    const fa_backward &p = problem->backward;
    const fa_forward &f = p.forward;
    const bool sequences = problem->sequences.given;
    const int head_dim = f.head_dim > f.head_dim_v ? f.head_dim : f.head_dim_v;
    own.chunks_q = has_chunks(f.q, f.head_dim), own.chunks_k = has_chunks(f.k, f.head_dim);
    own.chunks_v = has_chunks(f.v, f.head_dim_v);
    own.chunks_dout = !p.dout.data || has_chunks(p.dout, f.head_dim_v);
    own.chunks_out = f.out_dtype == f.dtype && has_chunks(f.out, f.head_dim_v);
    own.pairs_bias =
        f.bias_dtype == FA_F32 ? takes_chunks<float>(f.bias, f.seq_k, 2) : takes_chunks<uint16_t>(f.bias, f.seq_k, 2);
    own.pairs_mask = takes_chunks<uint8_t>(f.mask, f.seq_k, 2);
    own.stores_pairs = pair_stores(p);
    bool extended = f.alibi.data || f.dropout.threshold || f.q_segments.data || f.intervals.data;
    const bool general = f.bias.data || f.mask.data || f.softcap > 0 || !own.chunks_q || !own.chunks_k ||
                         !own.chunks_v || !own.chunks_dout;
    const Instance *found = instance_for(head_dim, sequences ? Family::kSequences : Family::kDense);
    if (general && !extended) { // kExtended takes what kGeneral does, where that is left out
        const Instance *own_kind = sequences ? nullptr : instance_for(head_dim, Family::kGeneral);
        extended = !own_kind || (found && found->head_dim < own_kind->head_dim);
        if (!extended) found = own_kind;
    }
    kind = extended ? kExtended : general ? kGeneral : kLarge;
    return found;
}

/* Rows in workspace, those of some pairs at a time where they do not fit, and what lies behind them. */
fa_answer plan_workspace(const fa_problem *problem, const fa_device_info *device, Own &own, fa_plan *plan,
                         fa_why *why) {
    const fa_backward &p = problem->backward;
    const fa_forward &f = p.forward;
    const int64_t all = pairs_of(problem), group = group_of(f);
    int64_t lists_bytes = 0, sink_parts = f.batch;
    own.pitch = divide_up(f.seq_q, kRowsMultiple) * kRowsMultiple;
    if (problem->sequences.given) {
        const SequenceTiles tiles = tiles_of(problem, own);
        own.pitch = tiles.count(kTilesOfRows) * kRowsMultiple;
        sink_parts = divide_up(own.pitch, kSinksRows);
        lists_bytes = sequence_tiles_bytes(tiles);
    }
    const size_t sinks_bytes = p.wants >> FA_GRAD_SINKS & 1 ? size_t(sink_parts * f.heads) * sizeof(double) : 0;
    const double left = double(device->workspace_limit) - double(sinks_bytes) - double(lists_bytes),
                 fits = left / (8.0 * double(group) * double(own.pitch));
    own.pairs = own.pitch == 0 || double(all) <= fits ? all : left > 0 ? int64_t(fits) : 0;
    const bool at_once = p.wants >> FA_GRAD_BIAS & 1; // dbias may add up over all heads
    if (all && (own.pairs == 0 || (at_once && own.pairs < all)))
        return fa_because(why, FA_REFUSES, FA_WHY_ROW_WORKSPACE, 0, 0, 0);
    own.lists_at = own.pairs * group * own.pitch * 8;
    own.sinks_at = own.lists_at + lists_bytes;
    own.bias_at = own.sinks_at + int64_t(sinks_bytes);
    own.parts = parts_of(p, device, kInstances[own.index], size_t(own.bias_at));
    plan->workspace_bytes = size_t(own.bias_at) + (own.parts > 1 ? size_t(own.parts * bias_elements(p)) * 4 : 0);
    return FA_TAKES;
}

/* Blocks of the largest launch of those where queries or keys own. */
int64_t blocks_of(const fa_problem *problem, const Own &own) {
    const fa_backward &p = problem->backward;
    const fa_forward &f = p.forward;
    const Instance &instance = kInstances[own.index];
    if (problem->sequences.given) {
        const SequenceTiles tiles = tiles_of(problem, own);
        return std::max(f.heads * tiles.count(kTilesOfQueries), f.heads_kv * tiles.count(kTilesOfKeys));
    }
    return std::max(f.batch * f.heads * divide_up(f.seq_q, instance.own_queries[own.kinds.queries]),
                    f.batch * f.heads_kv * divide_up(f.seq_k, instance.own_keys[own.kinds.keys]));
}

fa_answer plan(const fa_problem *problem, const fa_device_info *device, fa_plan *plan, fa_why *why) {
    const fa_backward &p = problem->backward;
    const fa_forward &f = p.forward;
    const bool sequences = problem->sequences.given;
    if (!lengths_fit(f.seq_q, f.seq_k, kBitsInBand, why)) return FA_REFUSES;
    Own &own = fa_own<Own>(plan);
    Kind kind;
    const Instance *found = choose(problem, own, kind);
    if (!found) return fa_because(why, FA_REFUSES, FA_WHY_INSTANCE, 0, 0, 0);
    own.index = int(found - kInstances);
    const Instance &instance = *found;
    if (size_t(instance.shared_bytes) > device->smem_per_block)
        return fa_because(why, FA_NOT_HERE, FA_WHY_SHARED_MEMORY, instance.shared_bytes,
                          int64_t(device->smem_per_block), 0);
    own.kinds = {kind, kind};
    const fa_answer answer = plan_workspace(problem, device, own, plan, why);
    if (answer != FA_TAKES) return answer;
    if (kind == kLarge && !sequences) {
        const auto by_size = [&](int64_t heads, int64_t length, int rows) {
            return heads * divide_up(length, rows) > device->sm_count ? kLarge : kSmall;
        };
        own.kinds = {by_size(own.pairs * group_of(f), f.seq_q, instance.own_queries[kLarge]),
                     by_size(own.pairs, f.seq_k, instance.own_keys[kLarge])};
    }
    const int64_t blocks_bias =
        !(p.wants >> FA_GRAD_BIAS & 1) ? 0 : BiasAxes(p, instance.bias_queries, instance.bias_keys).tasks();
    plan->blocks = blocks_of(problem, own);
    if (plan->blocks >> kMaxTilesBits || blocks_bias >> kMaxTilesBits ||
        (sequences && own.pitch >> kMaxTilesBits)) // whose rows and tiles have numbers, even without heads
        return fa_because(why, FA_REFUSES, FA_WHY_TILES, kMaxTilesBits, 0, 0);
    own.section_queries = (sequences ? 1 : section_of(f, device, f.seq_k, own.pairs)) * group_of(f);
    own.section_keys = sequences ? 1 : section_of(f, device, f.seq_q * group_of(f), own.pairs);
    plan->threads = kind != kLarge && instance.head_dim <= 128 ? 256 : 128;
    plan->smem_bytes = size_t(instance.shared_bytes);
    plan->keep = true;
    return FA_TAKES;
}

fa_code launch(const fa_problem *problem, const fa_plan *plan, const fa_launch *launch) {
    const fa_backward &p = problem->backward;
    const fa_forward &f = p.forward;
    const Own &own = fa_own<Own>(plan);
    const int64_t all = pairs_of(problem), group = group_of(f);
    char *workspace = static_cast<char *>(launch->workspace);
    BackwardArgs dense = {
        .problem = gradient_params(p),
        .score = score_params(f),
        .visible = band_of(f),
        .scale = float(f.scale),
        .softcap = float(f.softcap),
        .rows = reinterpret_cast<float2 *>(workspace),
        .pitch = own.pitch,
        .first_pair = 0,
        .pairs = 0,
        .group = int(group),
        .queries = {.blocks = 0, .items = 0, .section = unsigned(own.section_queries), .reversed = true},
        .keys = {.blocks = 0, .items = 0, .section = unsigned(own.section_keys), .reversed = false},
        .chunks_q = own.chunks_q,
        .chunks_k = own.chunks_k,
        .chunks_v = own.chunks_v,
        .chunks_dout = own.chunks_dout,
        .chunks_out = own.chunks_out,
        .pairs_bias = own.pairs_bias,
        .pairs_mask = own.pairs_mask,
        .stores_pairs = own.stores_pairs,
        .sinks = reinterpret_cast<double *>(workspace + own.sinks_at),
        .bias_parts = reinterpret_cast<float *>(workspace + own.bias_at),
        .parts = own.parts,
        .alibi = problem->forward.alibi,
        .dropout = problem->forward.dropout,
        .kept = float(fa_dropout_scale(&problem->forward.dropout)),
        .intervals = intervals_of(f),
    };
    SequenceArgs args = {dense, {}, segments_of(f)};
    if (problem->sequences.given) {
        args.sequences = tiles_of(problem, own);
        lay_out(args.sequences, workspace + own.lists_at);
    }
    const auto run = kInstances[own.index].launch;
    do { // once for no pairs, whose sums of nothing are results too
        args.pairs = int(all - args.first_pair < own.pairs ? all - args.first_pair : own.pairs);
        args.queries.items = unsigned(args.pairs * group), args.keys.items = unsigned(args.pairs);
        FA_TRY(run(args, f.dtype, own.kinds, false, *launch));
        args.first_pair += args.pairs;
    } while (args.first_pair < all);
    args.first_pair = 0, args.pairs = int(all);
    return p.wants >> FA_GRAD_BIAS & 1 ? run(args, f.dtype, own.kinds, true, *launch) : FA_OK;
}

} // namespace

FA_DEFINE_KERNEL(mma_backward_sm80) = {
    .abi = FA_KERNEL_ABI,
    .op = FA_BACKWARD,
    .device = FA_CUDA,
    .name = "mma_backward_sm80",
    .summary = "gradients by mma.sync tensor cores with cp.async pipelines, without atomics, from Ampere on",
    .cc_from = 80,
    .cc_to = 0,
    .dtypes = fa::kFloat16Bits,
    .takes = FA_WITH_BIAS | FA_WITH_MASK | FA_WITH_SINKS | FA_WITH_SOFTCAP | FA_WITH_WINDOW | FA_WITH_HEAD_DIM_V |
             FA_WITH_ALIBI | FA_WITH_DROPOUT | FA_WITH_LENGTHS | FA_WITH_RANGES | FA_WITH_DLSE | FA_WITH_DBIAS |
             FA_WITH_DSINKS | FA_WITH_ACCUMULATE | FA_WITH_ORDERED | FA_WITH_SEGMENTS | FA_WITH_INTERVALS,
    .plan = plan,
    .launch = launch,
};

} // namespace fa
