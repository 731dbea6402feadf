/* serve_sm90: attention of few queries over long sequences on Hopper: decode, speculative steps.
 *
 * Dense, padded, packed and paged keys of any page size, lengths and tables on the device. One block or several take a
 * kv head of a sequence (job.cuh). Where it has up to 8 rows, each of their warps takes chunks of 64 * 2^e keys, which
 * it brings to its own ring of tiles (load.cuh), multiplies by mma.sync (chunk.cuh) and leaves as states of rows in
 * workspace. Where it has more (few_rows.cuh), a block takes chunks of 256 * 2^e keys by wgmma (thin_load.cuh,
 * thin.cuh). In larger calls of packed_sm90 blocks that stay take the jobs of a list
 * (listed.cuh). States are folded in an order that only a sequence's keys fix (fold.cuh). The bits do not depend on who
 * computes a chunk, nor on the number of blocks, the batch around a sequence or its storage.
 *
 * Float16 and bfloat16, head_dim = head_dim_v a multiple of 8 up to 256, rows of 16-byte chunks; no bias, no mask. Rows
 * beyond 64 of a kv head (8 where head_dim is above 128) read its keys again.
 *
 * @arch sm_90a
 * @instances instance.cu
 * @instance d{64,128,256}_{f16,bf16} {1} {2:__half,__nv_bfloat16}
 * @core d(64|128)_\w+|d256_bf16
 */
#include <algorithm> // std::max, std::min

#include "common/instances.cuh"
#include "common/launch.cuh"
#include "common/limits.cuh" // divide_up, lengths_fit
#include "sm90/common/tensor_map.h"
#include "sm90/serve/kernel.cuh"
#include "sm90/serve/plan.cuh"

namespace fa::sm90::serve {

/* An instance as the host knows it. */
struct Form {
    int columns, rows, blocks_per_sm, threads; // rows: of a job
    size_t shared, state;                      // state: of a pair of rows
    fa_dtype dtype;
    Launch *launch; // null: this build leaves it out
};
template <int Columns> constexpr Form form_of(fa_dtype dtype, Launch *launch) {
    using C = Config<uint16_t, Columns>;
    return {Columns, C::kJobRows, C::kBlocksPerSm, C::kThreads, Shared<C>::bytes(), Slots<C>::bytes(1), dtype, launch};
}
#define FA_ENTRY(name, columns, T) form_of<columns>(kDtypeOf<T>, name),
FA_INSTANCES(FA_DECLARE_INSTANCE)
static const Form kForms[] = {FA_INSTANCES(FA_ENTRY)};

/* The first that has the columns; NULL: they are left out. */
static const Form *form_for(int64_t columns, fa_dtype dtype) {
    for (const Form &form : kForms)
        if (form.launch && form.dtype == dtype && columns <= form.columns) return &form;
    return nullptr;
}

constexpr int kSmallestBox = 8;          // keys
constexpr int kFewest = 4;               // chunks of a block, at least
constexpr int64_t kLeastShared = 1024;   // keys of a job of a list that blocks share, more than
constexpr int64_t kJobsABlock = 2;       // that share, of a list
constexpr int64_t kMostKeys = 8192;      // of a job that is shared equally, where lengths may differ
constexpr int64_t kMostClustered = 4096; // keys of a job whose blocks are a cluster, where lengths may differ
constexpr int64_t kMostRoom = 5;         // blocks of a job that there is room for where a cluster of 2 takes it

/* Whether its rows, if there are any, are 16-byte chunks that start at multiples of 16 bytes. */
static bool takes_rows(const fa_operand &x, int64_t rows, fa_operand_number name, fa_why *why) {
    if (rows == 0) return true; // whose strides say nothing
    fa_reason reason = FA_WHY_NONE;
    for (int axis = 0; axis < 3; ++axis)
        if (x.stride[axis] % 8 || x.stride[axis] < 0) reason = FA_WHY_STRIDES;
    if (x.stride[3] != 1) reason = FA_WHY_NOT_CONTIGUOUS;
    if (reinterpret_cast<uintptr_t>(x.data) % 16) reason = FA_WHY_UNALIGNED;
    if (reason != FA_WHY_NONE) fa_because(why, FA_REFUSES, reason, name, 0, 0);
    return reason == FA_WHY_NONE;
}

static int64_t group_of(const fa_forward &p) { return p.heads_kv > 0 ? p.heads / p.heads_kv : 1; }

/* Queries that a sequence has at most. */
static int64_t queries_at_most(const fa_problem *problem) {
    const fa_sequences &s = problem->sequences;
    return s.packed_q && !s.q.starts ? 1 : std::min(problem->forward.seq_q, s.most_q);
}

/* Sequences whose rows one job holds, so that their keys are read once; of more than 16 rows those alone whose pages
 * are too small for TMA, where prefill_sm90 takes 2.5 times as long. Elsewhere it takes 1.0 to 1.2 of this kernel's
 * time for 64 rows on 8k keys or more, but 0.65 on 512 and 1,024 (bench/log/serve_sm90.md), and lengths may not decide.
 * Of packed queries shapes say only how many there are in all, and a sequence has one kernel in every batch. Of dense
 * calls those with few jobs of few rows over many keys: one query of 32/8 heads of 128 columns takes 0.79 to 1.0 of
 * mma_sm80's time on an H200 (4k to 128k keys, but 1.1 over 6,000), two of 28/4 heads 1.2. Others are about as fast, or
 * faster, there or on wgmma_sm90 or prefill_sm90. */
static fa_answer choose(const fa_problem *problem, const Form &form, const Own &own, int64_t sms, fa_why *why) {
    constexpr int64_t kRowsBesideBoxes = 16, kManyKeys = 4096, kDenseRows = 4;
    constexpr int64_t kFewJobs = 14; // of so many multiprocessors one
    const fa_sequences &s = problem->sequences;
    const int64_t rows = queries_at_most(problem) * group_of(problem->forward);
    const bool boxes = !s.pages.table || (s.pages.size & -s.pages.size) >= kSmallestBox;
    const int64_t most = boxes ? std::min<int64_t>(form.rows, kRowsBesideBoxes) : form.rows;
    if (s.given && !s.q.starts && rows <= most) return FA_TAKES;
    const bool few_jobs = own.jobs * kFewJobs <= sms && form.columns == 128 && problem->forward.seq_k >= kManyKeys;
    if (!s.given && rows <= kDenseRows && few_jobs)
        return problem->batch_invariant ? fa_because(why, FA_DECLINES, FA_WHY_CHOICE_BY_BATCH, 0, 0, 0) : FA_TAKES;
    return fa_because(why, FA_DECLINES, FA_WHY_FEW_ROWS, 0, 0, 0);
}

/* Keys that the queries of a sequence see at most, from the first to the last. */
static int64_t keys_at_most(const fa_problem *problem, int64_t queries) {
    const fa_forward &p = problem->forward;
    if (problem->sequences.positions && queries > 1) return p.seq_k; // which may stand anywhere
    const int64_t seen = std::min(p.left, FA_UNBOUNDED) + std::min(p.right, FA_UNBOUNDED) + queries;
    return fa_clamp(seen, 0, p.seq_k);
}

/* Shares the jobs among blocks: one block a job if jobs fill the device, else as many as there is room for. Where there
 * is room for few, a cluster of two takes the job and needs no second kernel: 40 us where blocks that leave their
 * states to serve_fold_kernel took 44 and clusters of four, which do not all fit at once, 58 (8 sequences of 4k keys,
 * 32/8 heads, bfloat16, on an H200). */
static void share(const fa_problem *problem, const Form &form, int64_t sms, int64_t keys, bool thin, Own &own) {
    const fa_forward &p = problem->forward;
    const fa_sequences &s = problem->sequences;
    const int64_t room = sms * form.blocks_per_sm, jobs = std::max<int64_t>(own.jobs, 1);
    const int64_t most = std::max<int64_t>(std::min(divide_up(keys, kChunkKeys), int64_t(kMaxChunks)) / kFewest, 1);
    const bool differ = s.given && p.batch > 1;
    // Packed keys have room for all of them in each sequence: twice the mean is the guess.
    if (s.k.starts) keys = std::min(keys, divide_up(p.seq_k, std::max<int64_t>(p.batch, 1)) * 2);
    int64_t parts = 1;
    if (jobs * 4 < sms * 3 || (s.given && jobs * 2 <= room)) parts = room / jobs;
    if (differ) parts = std::max(parts, divide_up(keys, kMostKeys));
    parts = std::min(parts, most);
    if (thin) { // no more blocks than make the longest share shorter
        const int64_t chunks = fa_clamp(divide_up(keys, kThinChunkKeys), 1, kThinChunks);
        parts = divide_up(chunks, divide_up(chunks, parts));
    }
    own.parts = static_cast<int>(parts);
    own.clustered = s.given && !(differ && keys > kMostClustered) && own.parts > 1 && parts <= kMostRoom;
    if (own.clustered) own.parts = 2;
}

/* Room for the states of a job, whose sequence may be of few rows where others are thin. A block that has a whole thin
 * job needs one slot. */
static void size_states(const fa_problem *problem, const Form &form, int64_t rows, int64_t keys, bool thin, Own &own) {
    const fa_sequences &s = problem->sequences;
    const auto need = [&](int64_t slots, int64_t pairs) {
        own.slots = static_cast<int>(slots), own.pairs = static_cast<int>(pairs);
        own.job_bytes = std::max(own.job_bytes, slots * pairs * int64_t(form.state));
    };
    own.job_bytes = own.own_bytes = 0;
    if (!thin || s.q.used || s.q.starts)
        need(std::min<int64_t>(divide_up(keys, kChunkKeys) + 1, kMaxChunks),
             (std::min<int64_t>(rows, kFewRows) + 1) / 2);
    own.own_bytes = std::max(own.job_bytes, kThinRows / 2 * int64_t(form.state)); // of a thin job a slot
    if (!thin) return;
    const int64_t chunks = std::min<int64_t>(divide_up(keys, kThinChunkKeys) + 1, kThinChunks),
                  most = std::min<int64_t>(rows, kThinRows);
    need(own.parts == 1 ? 1 : chunks, most / 16 * 8 + std::min<int64_t>(most % 16, 8));
}

/* Blocks that fold a job: as many as there is room for, and enough for each to fold the groups of its columns side by
 * side where it has threads left over (fold_job). State after state, 94 of them are 12 reads of memory in a row. */
static int fold_parts_of(const Form &form, const Own &own, int64_t sms) {
    constexpr int64_t kBlocksPerSm = 4;
    const int64_t units = form.columns / 8, groups = std::max<int64_t>(divide_up(own.slots - 1, kGroup), 1);
    const int64_t parts = fa_clamp(kBlocksPerSm * sms / std::max<int64_t>(own.jobs, 1), 1, units),
                  columns = own.pairs * kFoldItems * groups;
    const int64_t items = divide_up(units, parts) * own.pairs * kFoldItems;
    const bool apart = items >= form.threads || items * groups <= kFoldParts || columns > kFoldParts;
    return static_cast<int>(apart ? parts : divide_up(units, kFoldParts / columns));
}

/* Blocks that stay take the jobs of a list; as many as there is room for. */
static fa_answer plan_list(const Form &form, int64_t keys, int64_t sms, int64_t limit, Own &own, fa_why *why) {
    const auto up = [](int64_t bytes) { return (bytes + 127) / 128 * 128; };
    own.own_bytes = up(own.own_bytes), own.job_bytes = up(own.job_bytes);
    own.blocks = static_cast<int>(std::min(sms * form.blocks_per_sm, limit / own.own_bytes));
    if (!own.blocks) return fa_because(why, FA_NOT_HERE, FA_WHY_STATE_WORKSPACE, 0, 0, 0);
    const int64_t left = limit - own.blocks * own.own_bytes - 128;
    const int64_t most = std::min(own.jobs, kJobsABlock * own.blocks),
                  fit = left / (own.job_bytes + int64_t(sizeof(uint32_t)));
    own.shared_jobs = keys > kLeastShared ? static_cast<int>(fa_clamp(fit, 0, most)) : 0;
    return FA_TAKES;
}

/* The plan of a call, but for the choice. */
fa_answer plan_call(const fa_problem *problem, const fa_device_info *device, fa_plan *plan, Jobs how, fa_why *why) {
    const fa_forward &p = problem->forward;
    if (p.head_dim > 256) return fa_because(why, FA_REFUSES, FA_WHY_HEAD_DIM, 256, 0, 0);
    if (p.head_dim % 8 || p.head_dim == 0) return fa_because(why, FA_REFUSES, FA_WHY_HEAD_DIM_MULTIPLE, 8, 0, 0);
    if (!lengths_fit(p.seq_q * group_of(p), p.seq_k, kBitsInPairs, why)) return FA_REFUSES;
    const fa_sequences &s = problem->sequences;
    const int64_t rows_q = s.packed_q ? p.seq_q : p.seq_q * p.batch, rows_k = s.pages.table
                                                                                  ? s.pages.count * s.pages.size
                                                                              : s.packed_k ? p.seq_k
                                                                                           : p.seq_k * p.batch;
    if (!takes_rows(p.q, rows_q, FA_OPERAND_q, why) || !takes_rows(p.k, rows_k, FA_OPERAND_k, why) ||
        !takes_rows(p.v, rows_k, FA_OPERAND_v, why))
        return FA_REFUSES;

    Own &own = fa_own<Own>(plan);
    own = {};
    const Form *found = form_for(p.head_dim, p.dtype);
    if (!found) return fa_because(why, FA_REFUSES, FA_WHY_INSTANCE, 0, 0, 0);
    const Form &form = *found;
    own.instance = static_cast<int>(found - kForms);
    const int64_t group = group_of(p);
    const int64_t queries = std::min(queries_at_most(problem), how == Jobs::tiles ? FA_UNBOUNDED : form.rows / group),
                  most = queries * group;
    own.by_number = how == Jobs::by_number;
    own.tiles_m = divide_up(most, form.rows);
    own.jobs = (how != Jobs::tiles ? p.batch
                : s.q.starts       ? tiles_of_packed(p, group, form.rows)
                                   : p.batch * own.tiles_m) *
               p.heads_kv;
    const int64_t keys = keys_at_most(problem, queries), sms = device->sm_count, jobs = std::max<int64_t>(own.jobs, 1);
    const bool thin = own.thin = is_thin(most, form.columns);
    share(problem, form, sms, keys, thin, own);
    if (how == Jobs::listed) own.parts = 2; // several blocks may share a job, so that it has room for all its states
    size_states(problem, form, most, keys, thin, own);
    // So short a sequence leaves most warps of a block without work, and has one state: of one chunk all but one, so
    // that few jobs go without workspace, too.
    const int64_t brief_keys = jobs >= 4 * sms ? kGroup * kChunkKeys : kChunkKeys;
    own.brief = !thin && p.seq_k <= brief_keys && !s.q.starts && !s.k.starts;
    own.fold_parts = fold_parts_of(form, own, sms);
    if (own.jobs * own.parts > INT32_MAX) return fa_because(why, FA_REFUSES, FA_WHY_TILES, 31, 0, 0);
    // Where FA_EXT_WORKSPACE_MB leaves no room for all jobs, one launch follows the other.
    const int64_t each = own.brief ? 0 : own.job_bytes, limit = device->workspace_limit;
    own.at_once = own.jobs;
    plan->threads = form.threads;
    plan->smem_bytes = form.shared;
    plan->keep = true;
    if (how == Jobs::listed) {
        if (own.jobs) {
            const fa_answer answer = plan_list(form, keys, sms, device->workspace_limit, own, why);
            if (answer != FA_TAKES) return answer;
        }
        plan->workspace_bytes = own.arrivals_at() + own.shared_jobs * sizeof(uint32_t);
        plan->blocks = own.blocks;
        return FA_TAKES;
    }
    if (own.jobs * each > limit) own.at_once = limit / each / p.heads_kv * p.heads_kv;
    if (own.jobs && !own.at_once) return fa_because(why, FA_NOT_HERE, FA_WHY_STATE_WORKSPACE, 0, 0, 0);
    plan->workspace_bytes = own.at_once * each;
    plan->blocks = own.brief ? divide_up(own.jobs, form.threads / 32) : own.jobs * own.parts;
    return FA_TAKES;
}

static fa_answer serve_plan(const fa_problem *problem, const fa_device_info *device, fa_plan *plan, fa_why *why) {
    const fa_answer answer = plan_call(problem, device, plan, Jobs::tiles, why);
    const Own &own = fa_own<Own>(plan);
    return answer == FA_TAKES ? choose(problem, kForms[own.instance], own, device->sm_count, why) : answer;
}

int columns_of(const Own &own) { return kForms[own.instance].columns; }

/* A box has 128 bytes of each row: more would be fetched twice. */
constexpr CUtensorMapL2promotion kPromotion = CU_TENSOR_MAP_L2_PROMOTION_L2_128B;

/* Keys of a box that lies in one page and one tile, or 0. */
static int box_keys(const fa_forward &p, const fa_sequences &s, const fa_launch &launch) {
    fa_why why;
    const int64_t rows = s.pages.table ? s.pages.size : s.k.rows, batch = s.pages.table ? s.pages.count : p.batch;
    if (!launch.encode_tensor_map || rows == 0 || batch == 0 || batch >> 31) return 0;
    if (!takes_tensor_map(p.k, FA_OPERAND_k, p.head_dim, rows, &why) ||
        !takes_tensor_map(p.v, FA_OPERAND_v, p.head_dim, rows, &why))
        return 0;
    const int64_t keys = s.pages.table ? std::min<int64_t>(rows & -rows, kTileKeys) : kTileKeys;
    return keys >= kSmallestBox ? static_cast<int>(keys) : 0;
}

struct CachedMaps {
    CachedTensorMap k = {FA_OPERAND_k}, v = {FA_OPERAND_v};
};
static thread_local CachedMaps cached_maps;

/* Whether each row starts at a multiple of 4 bytes. */
static bool all_even(const fa_operand &x) {
    return reinterpret_cast<uintptr_t>(x.data) % 4 == 0 && x.stride[0] % 2 == 0 && x.stride[1] % 2 == 0 &&
           x.stride[2] % 2 == 0;
}

static fa_code params_of(const fa_problem *problem, const Own &own, const fa_launch *launch, Params &params) {
    const fa_forward &p = problem->forward;
    params = {
        .call = serving(*problem),
        .score = score_params(p),
        .heads_kv = Divider::of(p.heads_kv),
        .group = Divider::of(p.heads / p.heads_kv),
        .page = Divider::of(std::max<int64_t>(1, std::min<int64_t>(problem->sequences.pages.size, INT32_MAX))),
        .tiles_m = Divider::of(std::max<int64_t>(own.tiles_m, 1)),
        .job_bytes = own.job_bytes,
        .parts = Divider::of(own.parts),
        .by_number = own.by_number,
        .in_pairs = p.out_dtype == p.dtype && p.out.stride[3] == 1 && all_even(p.out),
        .clustered = own.clustered,
        .workspace = static_cast<char *>(launch->workspace),
    };
    fa_sequences &s = params.call.s;
    if (!s.given) s.q.rows = p.seq_q, s.k.rows = p.seq_k;
    if (!s.given) {
        fa_entry entry = {p.seq_q, p.seq_k, 0, 0, p.diagonal, nullptr, p.key_begin, p.key_end};
        const int64_t rows = p.seq_q * group_of(p);
        params.dense = Sight::of(fa_entry_keys(&entry, p.left, p.right), is_thin(rows, kForms[own.instance].columns));
    }
    if (const int keys = box_keys(p, s, *launch)) {
        params.boxes = keys;
        const int64_t rows = s.pages.table ? s.pages.size : s.k.rows, batch = s.pages.table ? s.pages.count : p.batch;
        FA_TRY(tensor_map_encode(&params.k_map, cached_maps.k, *launch, p.k, p.dtype, p.head_dim, rows, p.heads_kv,
                                 batch, keys, kPromotion));
        FA_TRY(tensor_map_encode(&params.v_map, cached_maps.v, *launch, p.v, p.dtype, p.head_dim_v, rows, p.heads_kv,
                                 batch, keys, kPromotion));
    }
    return FA_OK;
}

fa_code launch_call(const fa_problem *problem, const fa_plan *plan, const fa_launch *launch) {
    const Own &own = fa_own<Own>(plan);
    if (own.jobs == 0) return FA_OK;
    Params params;
    FA_TRY(params_of(problem, own, launch, params));
    for (int64_t first = 0; first < own.jobs; first += own.at_once) {
        params.first = static_cast<int>(first), params.jobs = static_cast<int>(std::min(own.at_once, own.jobs - first));
        FA_TRY(kForms[own.instance].launch(params, own, *launch));
    }
    return FA_OK;
}

fa_code launch_listed(const fa_problem *problem, const fa_plan *plan, const fa_launch *launch, void *list, bool alone,
                      bool first) {
    const Own &own = fa_own<Own>(plan);
    if (own.jobs == 0) return FA_OK;
    Params params;
    FA_TRY(params_of(problem, own, launch, params));
    params.listed = {static_cast<ListHeader *>(list),
                     reinterpret_cast<uint32_t *>(params.workspace + own.arrivals_at()),
                     params.workspace + own.own_at(),
                     own.own_bytes,
                     alone,
                     first};
    return kForms[own.instance].launch(params, own, *launch);
}

} // namespace fa::sm90::serve

FA_DEFINE_KERNEL(serve_sm90) = {
    .abi = FA_KERNEL_ABI,
    .op = FA_FORWARD,
    .device = FA_CUDA,
    .name = "serve_sm90",
    .summary = "Hopper, few queries over long sequences: lengths, pages; chunks folded in an order of their own",
    .cc_from = 90,
    .cc_to = 90,
    .dtypes = fa::kFloat16Bits,
    .takes = FA_WITH_SINKS | FA_WITH_SOFTCAP | FA_WITH_WINDOW | FA_WITH_ALIBI | FA_WITH_LENGTHS | FA_WITH_PAGES |
             FA_WITH_RANGES | FA_WITH_POSITIONS | FA_WITH_OUT_FLOAT32,
    .plan = fa::sm90::serve::serve_plan,
    .launch = fa::sm90::serve::launch_call,
};
