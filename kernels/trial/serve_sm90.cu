/* serve_sm90: attention of few queries over long sequences on Hopper: decode, speculative steps, short chunks of
 * prefill.
 *
 * Dense, padded, packed and paged keys of any page size, lengths and tables on the device. A worker, one warp or a few,
 * takes chunks of 64 * 2^e keys from its own ring of tiles (serve_load.cuh), multiplies by mma.sync (serve_chunk.cuh)
 * and leaves states of rows, which are folded in an order that only a sequence's keys fix (serve_fold.cuh): who worked
 * out which chunk changes no bit, so the number of blocks, the batch around a sequence and its storage do not either.
 *
 *     cluster form: few chunks a job; a cluster each, states by shared memory                      (serve_cluster.cuh)
 *     split form: few long jobs; equal shares for all multiprocessors, states by workspace           (serve_split.cuh)
 *     persistent form: any; a block a multiprocessor, ranges of equal cost, states by workspace (serve_persistent.cuh)
 *
 * Float16 and bfloat16, head_dim = head_dim_v a multiple of 8 up to 256, rows of 16-byte chunks; no bias, no mask. Rows
 * beyond 64 of a kv head read its keys again.
 *
 * @arch sm_90a
 * @instance d64_r8_f16 -DFA_COLUMNS=64 -DFA_SHAPE=kRows8 -DFA_ELEMENT=__half
 * @instance d64_r8_bf16 -DFA_COLUMNS=64 -DFA_SHAPE=kRows8 -DFA_ELEMENT=__nv_bfloat16
 * @instance d64_r16_f16 -DFA_COLUMNS=64 -DFA_SHAPE=kRows16 -DFA_ELEMENT=__half
 * @instance d64_r16_bf16 -DFA_COLUMNS=64 -DFA_SHAPE=kRows16 -DFA_ELEMENT=__nv_bfloat16
 * @instance d64_r32_f16 -DFA_COLUMNS=64 -DFA_SHAPE=kRows32 -DFA_ELEMENT=__half
 * @instance d64_r32_bf16 -DFA_COLUMNS=64 -DFA_SHAPE=kRows32 -DFA_ELEMENT=__nv_bfloat16
 * @instance d64_r64_f16 -DFA_COLUMNS=64 -DFA_SHAPE=kRows64 -DFA_ELEMENT=__half
 * @instance d64_r64_bf16 -DFA_COLUMNS=64 -DFA_SHAPE=kRows64 -DFA_ELEMENT=__nv_bfloat16
 * @instance d128_r8_f16 -DFA_COLUMNS=128 -DFA_SHAPE=kRows8 -DFA_ELEMENT=__half
 * @instance d128_r8_bf16 -DFA_COLUMNS=128 -DFA_SHAPE=kRows8 -DFA_ELEMENT=__nv_bfloat16
 * @instance d128_r16_f16 -DFA_COLUMNS=128 -DFA_SHAPE=kRows16 -DFA_ELEMENT=__half
 * @instance d128_r16_bf16 -DFA_COLUMNS=128 -DFA_SHAPE=kRows16 -DFA_ELEMENT=__nv_bfloat16
 * @instance d128_r32_f16 -DFA_COLUMNS=128 -DFA_SHAPE=kRows32 -DFA_ELEMENT=__half
 * @instance d128_r32_bf16 -DFA_COLUMNS=128 -DFA_SHAPE=kRows32 -DFA_ELEMENT=__nv_bfloat16
 * @instance d128_r64_f16 -DFA_COLUMNS=128 -DFA_SHAPE=kRows64 -DFA_ELEMENT=__half
 * @instance d128_r64_bf16 -DFA_COLUMNS=128 -DFA_SHAPE=kRows64 -DFA_ELEMENT=__nv_bfloat16
 * @instance d192_r8_f16 -DFA_COLUMNS=192 -DFA_SHAPE=kRows8 -DFA_ELEMENT=__half
 * @instance d192_r8_bf16 -DFA_COLUMNS=192 -DFA_SHAPE=kRows8 -DFA_ELEMENT=__nv_bfloat16
 * @instance d192_r16_f16 -DFA_COLUMNS=192 -DFA_SHAPE=kRows16 -DFA_ELEMENT=__half
 * @instance d192_r16_bf16 -DFA_COLUMNS=192 -DFA_SHAPE=kRows16 -DFA_ELEMENT=__nv_bfloat16
 * @instance d192_r32_f16 -DFA_COLUMNS=192 -DFA_SHAPE=kRows32 -DFA_ELEMENT=__half
 * @instance d192_r32_bf16 -DFA_COLUMNS=192 -DFA_SHAPE=kRows32 -DFA_ELEMENT=__nv_bfloat16
 * @instance d192_r64_f16 -DFA_COLUMNS=192 -DFA_SHAPE=kRows64 -DFA_ELEMENT=__half
 * @instance d192_r64_bf16 -DFA_COLUMNS=192 -DFA_SHAPE=kRows64 -DFA_ELEMENT=__nv_bfloat16
 * @instance d256_r8_f16 -DFA_COLUMNS=256 -DFA_SHAPE=kRows8 -DFA_ELEMENT=__half
 * @instance d256_r8_bf16 -DFA_COLUMNS=256 -DFA_SHAPE=kRows8 -DFA_ELEMENT=__nv_bfloat16
 * @instance d256_r16_f16 -DFA_COLUMNS=256 -DFA_SHAPE=kRows16 -DFA_ELEMENT=__half
 * @instance d256_r16_bf16 -DFA_COLUMNS=256 -DFA_SHAPE=kRows16 -DFA_ELEMENT=__nv_bfloat16
 * @instance d256_r32_f16 -DFA_COLUMNS=256 -DFA_SHAPE=kRows32 -DFA_ELEMENT=__half
 * @instance d256_r32_bf16 -DFA_COLUMNS=256 -DFA_SHAPE=kRows32 -DFA_ELEMENT=__nv_bfloat16
 * @instance d256_r64_f16 -DFA_COLUMNS=256 -DFA_SHAPE=kRows64 -DFA_ELEMENT=__half
 * @instance d256_r64_bf16 -DFA_COLUMNS=256 -DFA_SHAPE=kRows64 -DFA_ELEMENT=__nv_bfloat16
 */
#include <algorithm> // std::max, std::min
#include <cuda_runtime.h>

#include "common/launch.cuh"
#include "fa.h"
#include "sm90/tensor_map.h"
#include "trial/serve_cluster.cuh"
#include "trial/serve_persistent.cuh"
#include "trial/serve_split.cuh"

namespace fa::sm90::serve {

/* Shapes of a team, by the rows that a job may have. */
enum Shape { kRows8, kRows16, kRows32, kRows64, kShapes };

enum Form { kPersistent, kCluster, kSplit };

/* The plan's own part. */
struct Own {
    int slabs; // of 64 columns
    Shape shape;
    Form form;
    int parts;        // blocks of a job; of the persistent form: of all
    int states;       // of a worker: persistent form
    int rows, chunks; // of a job, at most
};

template <class C> Landing<C> landing_of(const Own &own, int cluster) {
    const int fewest = own.chunks / kGroup + 2 + (kGroup - 1) * (cluster * C::kTeams - 1);
    return {std::min(own.chunks, fewest), own.rows, cluster, nullptr};
}
template <class C> inline constexpr size_t kLandingRoom = 227 * 1024 - (C::kSharedBytes - C::kTotalBytes);
inline size_t fold_bytes(const Own &own) {
    return size_t(own.chunks / kGroup + 2) * ((own.rows + 1) / 2) * 8 * sizeof(Part);
}

using Launch = fa_code(Params &, const fa_plan &, const fa_launch &);

/* A warp for each 8 rows: with two row tiles a warp reads tiles half as often, but the accumulators of chunk and group
 * then leave no registers at 128 columns. */
template <class T, int Columns, int S> using ShapeConfig = Config<T, Columns, 1, 1 << S>;

#ifdef FA_INSTANCE

/* A launch that may start before the one before it has ended; `cluster`: blocks of one, along y, or 0. Points into
 * itself. */
struct Configuration {
    cudaLaunchAttribute attributes[2];
    cudaLaunchConfig_t config = {};

    Configuration(dim3 blocks, int threads, size_t shared, int cluster, const fa_launch &launch) {
        attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[0].val.programmaticStreamSerializationAllowed = 1;
        attributes[1].id = cudaLaunchAttributeClusterDimension;
        attributes[1].val.clusterDim.y = static_cast<unsigned>(cluster);
        attributes[1].val.clusterDim.x = attributes[1].val.clusterDim.z = 1;
        config.gridDim = blocks;
        config.blockDim = dim3(static_cast<unsigned>(threads));
        config.dynamicSmemBytes = shared;
        config.stream = static_cast<cudaStream_t>(launch.stream);
        config.attrs = attributes;
        config.numAttrs = cluster ? 2 : 1;
    }
    Configuration(const Configuration &) = delete;
};

template <class Kernel>
fa_code launch_kernel(Kernel *kernel, const Params &params, const Configuration &c, const fa_launch &launch) {
    if (c.config.dynamicSmemBytes > kSmemFree) FA_TRY(fa_allow_smem(kernel, c.config.dynamicSmemBytes, launch));
    FA_CHAOS_ARM(launch.stream, launch);
    FA_CUDA_TRY(launch, cudaLaunchKernelEx(&c.config, kernel, params));
    return FA_OK;
}

template <class C> fa_code launch_shape(Params &params, const fa_plan &plan, const fa_launch &launch) {
    const Own &own = fa_own<Own>(&plan);
    const unsigned heads = static_cast<unsigned>(params.p.heads_kv), batch = static_cast<unsigned>(params.p.batch),
                   parts = static_cast<unsigned>(own.parts);
    if constexpr (C::kClusters)
        if (own.form == kCluster) {
            const Landing<C> landing = landing_of<C>(own, own.parts);
            params.slots = landing.slots;
            const size_t shared = C::kSharedBytes - C::kTotalBytes + landing.bytes();
            const Configuration c(dim3(heads, parts, batch), C::kThreads, shared, own.parts, launch);
            return launch_kernel(serve_cluster_sm90_kernel<C>, params, c, launch);
        }
    if (own.form == kSplit) {
        const size_t shared = C::kSharedBytes - C::kTotalBytes;
        const Configuration c(dim3(heads, parts, batch), C::kThreads, shared, 0, launch);
        FA_TRY(launch_kernel(serve_split_sm90_kernel<C>, params, c, launch));
        const unsigned units = static_cast<unsigned>((params.p.head_dim_v + 7) / 8);
        const Configuration fold(dim3(heads, units, batch), kFoldThreads, fold_bytes(own), 0, launch);
        return launch_kernel(serve_fold_kernel<C>, params, fold, launch);
    }
    const Configuration all(dim3(parts), C::kThreads, C::kSharedBytes, 0, launch);
    FA_TRY(launch_kernel(serve_sm90_kernel<C>, params, all, launch));
    const Configuration merge(dim3(parts * C::kTeams), kMergeThreads, 0, 0, launch);
    return launch_kernel(serve_merge_kernel<C>, params, merge, launch);
}

#define FA_JOIN_(a, b) a##b
#define FA_JOIN(a, b)  FA_JOIN_(a, b)
fa_code FA_JOIN(serve_launch_, FA_INSTANCE)(Params &params, const fa_plan &plan, const fa_launch &launch) {
    return launch_shape<ShapeConfig<FA_ELEMENT, FA_COLUMNS, FA_SHAPE>>(params, plan, launch);
}

#else

#define FA_SERVE_PAIR(D, R) serve_launch_d##D##_r##R##_f16, serve_launch_d##D##_r##R##_bf16
#define FA_SERVE_ALL(D)     FA_SERVE_PAIR(D, 8), FA_SERVE_PAIR(D, 16), FA_SERVE_PAIR(D, 32), FA_SERVE_PAIR(D, 64)
Launch FA_SERVE_ALL(64), FA_SERVE_ALL(128), FA_SERVE_ALL(192), FA_SERVE_ALL(256);
static Launch *const kLaunches[][kShapes * 2] = {
    {FA_SERVE_ALL(64)}, {FA_SERVE_ALL(128)}, {FA_SERVE_ALL(192)}, {FA_SERVE_ALL(256)}};

/* What the host knows of a configuration. */
struct Choice {
    int threads, teams, rows;
    size_t shared, state;
    bool (*has_room)(const Own &own, int cluster); // the states of a job in a cluster
    size_t (*slot)(int pairs);
};
template <class C> static bool has_room(const Own &own, int cluster) {
    return C::kClusters && landing_of<C>(own, cluster).fits(kLandingRoom<C>);
}
template <int Columns, int S> constexpr Choice form_of() {
    using C = ShapeConfig<uint16_t, Columns, S>;
    return {C::kThreads, C::kTeams, C::kRows, C::kSharedBytes, Workspace<C>::kState, has_room<C>, SplitSlots<C>::bytes};
}
#define FA_SERVE_FORMS(D)   form_of<D, kRows8>(), form_of<D, kRows16>(), form_of<D, kRows32>(), form_of<D, kRows64>()
constexpr Choice kForms[][kShapes] = {
    {FA_SERVE_FORMS(64)}, {FA_SERVE_FORMS(128)}, {FA_SERVE_FORMS(192)}, {FA_SERVE_FORMS(256)}};

static int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* Whether its rows, if there are any, are 16-byte chunks that start at multiples of 16 bytes. */
static bool takes_rows(const fa_operand &x, int64_t rows, fa_operand_name name, fa_why *why) {
    if (rows == 0) return true; // whose strides say nothing
    fa_reason reason = FA_WHY_NONE;
    for (int axis = 0; axis < 3; ++axis)
        if (x.stride[axis] % 8 || x.stride[axis] < 0) reason = FA_WHY_STRIDES;
    if (x.stride[3] != 1) reason = FA_WHY_NOT_CONTIGUOUS;
    if (reinterpret_cast<uintptr_t>(x.data) % 16) reason = FA_WHY_UNALIGNED;
    if (reason != FA_WHY_NONE) fa_because(why, FA_REFUSES, reason, name, 0, 0);
    return reason == FA_WHY_NONE;
}

/* Queries that a sequence has at most. */
static int64_t queries_at_most(const fa_problem *problem) {
    return problem->sequences.packed_q && !problem->sequences.q.starts ? 1 : problem->forward.seq_q;
}

/* Rows that a job of most sequences has at most: packed sequences are taken for equally long. */
static int64_t rows_of_job(const fa_problem *problem) {
    const fa_forward &p = problem->forward;
    const fa_sequences &s = problem->sequences;
    const int64_t queries = !s.packed_q ? p.seq_q : s.q.starts ? divide_up(p.seq_q, std::max<int64_t>(p.batch, 1)) : 1;
    return queries * (p.heads / p.heads_kv);
}

/* Chooses the form by shapes alone. Where lengths may differ, no job is to last long by itself. */
static void choose_form(const fa_problem *problem, const Choice &config, int multiprocessors, Own *own) {
    const fa_forward &p = problem->forward;
    const int64_t jobs = p.batch * p.heads_kv;
    own->form = kPersistent;
    if (own->rows == 0 || jobs == 0 || jobs > multiprocessors) return;
    const bool alike = !problem->sequences.given || p.batch == 1;
    const int room = static_cast<int>(multiprocessors / jobs);
    // A block each if that fills the device, else a cluster if it has a worker for each chunk.
    for (int size = 1; size <= std::min(room, kMaxCluster); size *= 2)
        if ((size == 1 ? alike && jobs * 4 >= multiprocessors * 3 : own->chunks <= size * config.teams) &&
            (size == 1 || jobs * size * 10 <= multiprocessors * 9) && config.has_room(*own, size)) {
            own->form = kCluster, own->parts = size;
            return;
        }
    const int parts = std::min(room, static_cast<int>((own->chunks + config.teams - 1) / config.teams));
    if (parts > 1 && (alike || p.seq_k <= 4096 * int64_t(parts)) && fold_bytes(*own) <= 227 * 1024 &&
        (parts < room || jobs * parts * 10 >= multiprocessors * 9))
        own->form = kSplit, own->parts = parts;
}

/* Workspace of the split form. */
static size_t slots_bytes(const fa_forward &p, const Own &own, const Choice &config) {
    return size_t(p.batch * p.heads_kv) * own.chunks * config.slot((own.rows + 1) / 2);
}

static fa_answer serve_plan(const fa_problem *problem, const fa_device_info *device, fa_plan *plan, fa_why *why) {
    const fa_forward &p = problem->forward;
    if (p.head_dim > 256) return fa_because(why, FA_REFUSES, FA_WHY_HEAD_DIM, 256, 0, 0);
    if (p.head_dim % 8 || p.head_dim == 0) return fa_because(why, FA_REFUSES, FA_WHY_HEAD_DIM_MULTIPLE, 8, 0, 0);
    if (std::max(p.seq_q * (p.heads / p.heads_kv), p.seq_k) >> kMaxLengthBits)
        return fa_because(why, FA_REFUSES, FA_WHY_LENGTH, kMaxLengthBits, 0, 0);
    const fa_sequences &s = problem->sequences;
    const int64_t rows_q = s.packed_q ? p.seq_q : p.seq_q * p.batch, rows_k = s.pages.table
                                                                                  ? s.pages.count * s.pages.size
                                                                              : s.packed_k ? p.seq_k
                                                                                           : p.seq_k * p.batch;
    if (!takes_rows(p.q, rows_q, FA_OPERAND_Q, why) || !takes_rows(p.k, rows_k, FA_OPERAND_K, why) ||
        !takes_rows(p.v, rows_k, FA_OPERAND_V, why))
        return FA_REFUSES;
    if (!device->tensor_maps) return fa_because(why, FA_NOT_HERE, FA_WHY_TENSOR_MAPS, 0, 0, 0);

    Own &own = fa_own<Own>(plan);
    own.slabs = (p.head_dim + 63) / 64;
    const int64_t rows = rows_of_job(problem);
    own.shape = rows <= 8 ? kRows8 : rows <= 16 ? kRows16 : rows <= 32 ? kRows32 : kRows64;
    const Choice &form = kForms[own.slabs - 1][own.shape];
    // At most: each sequence has one job more than its rows fill.
    const int64_t group = p.heads / p.heads_kv, batch = std::max<int64_t>(p.batch, 1);
    const int64_t jobs = (rows_q * group / form.rows + batch) * p.heads_kv;
    const int64_t tiles = divide_up(p.seq_k, kTileKeys) + 1, cost = jobs * (tiles + kJobCost);
    int64_t blocks = std::max<int64_t>(1, std::min<int64_t>(device->sm_count, divide_up(cost, form.teams)));
    const int64_t groups = std::min<int64_t>(kMaxChunks + 1, tiles) / kGroup + 2;
    for (;; blocks = divide_up(blocks, 2)) {
        const int64_t share = divide_up(cost, blocks * form.teams);
        own.states = static_cast<int>(std::min(share + 2, kGroup - 1 + groups + 2));
        plan->workspace_bytes = size_t(blocks * form.teams) * (sizeof(Record) + own.states * form.state);
        if (plan->workspace_bytes <= device->workspace_limit || blocks == 1) break;
    }
    const int64_t most = queries_at_most(problem) * group;
    own.chunks = static_cast<int>(std::min<int64_t>(kMaxChunks + 1, tiles));
    own.rows = most <= form.rows ? static_cast<int>(most) : 0;
    own.parts = static_cast<int>(blocks);
    choose_form(problem, form, device->sm_count, &own);
    if (own.form == kSplit && slots_bytes(p, own, form) > device->workspace_limit)
        own.form = kPersistent, own.parts = static_cast<int>(blocks);
    if (own.form == kCluster) plan->workspace_bytes = 0;
    if (own.form == kSplit) plan->workspace_bytes = slots_bytes(p, own, form);
    plan->blocks = own.form == kPersistent ? blocks : p.batch * p.heads_kv * own.parts;
    plan->threads = form.threads;
    plan->smem_bytes = form.shared;
    plan->keep = true;
    return FA_TAKES;
}

/* Keys of a box that lies in one page and one tile, or 0. */
static int box_keys(const fa_forward &p, const fa_sequences &s, const fa_launch &launch) {
    fa_why why;
    const int64_t rows = s.pages.table ? s.pages.size : s.k.rows, batch = s.pages.table ? s.pages.count : p.batch;
    if (!launch.encode_tensor_map || rows == 0 || batch == 0 || batch >> 31) return 0;
    if (!takes_tensor_map(p.k, FA_OPERAND_K, p.head_dim, rows, &why) ||
        !takes_tensor_map(p.v, FA_OPERAND_V, p.head_dim, rows, &why))
        return 0;
    const int64_t keys = s.pages.table ? std::min<int64_t>(rows & -rows, kTileKeys) : kTileKeys;
    return keys >= 8 ? static_cast<int>(keys) : 0;
}

static fa_code serve_launch(const fa_problem *problem, const fa_plan *plan, const fa_launch *launch) {
    const fa_forward &p = problem->forward;
    const Own &own = fa_own<Own>(plan);
    Params params = {};
    params.p = p;
    params.s = problem->sequences;
    params.alibi = problem->extra.alibi;
    params.score = score_params(p);
    if (!params.s.given) params.s.q.rows = p.seq_q, params.s.k.rows = p.seq_k;
    params.group = static_cast<int>(p.heads / p.heads_kv);
    params.workspace = static_cast<char *>(launch->workspace);
    params.states = own.states;
    params.slots = own.chunks, params.job_rows = own.rows, params.parts = own.parts;
    params.load = Load::kRows;
    params.faults = problem->faults;
    if (!params.s.given) params.dense = sequence_of(params, kForms[own.slabs - 1][own.shape].rows, 0, 0, 0);
    const fa_sequences &s = params.s;
    if (const int keys = box_keys(p, s, *launch)) {
        params.load = Load::kBoxes;
        while (1 << params.box_shift < keys) ++params.box_shift;
        const int64_t rows = s.pages.table ? s.pages.size : s.k.rows, batch = s.pages.table ? s.pages.count : p.batch;
        FA_TRY(tensor_map_encode(&params.k_map, *launch, p.k, p.dtype, p.head_dim, rows, p.heads_kv, batch, keys,
                                 FA_OPERAND_K));
        FA_TRY(tensor_map_encode(&params.v_map, *launch, p.v, p.dtype, p.head_dim_v, rows, p.heads_kv, batch, keys,
                                 FA_OPERAND_V));
    }
    return kLaunches[own.slabs - 1][2 * own.shape + (p.dtype == FA_BF16)](params, *plan, *launch);
}

#endif

} // namespace fa::sm90::serve

#ifndef FA_INSTANCE
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
    .launch = fa::sm90::serve::serve_launch,
};
#endif
