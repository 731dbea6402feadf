/* documents: ids of documents -> where each begins, as starts of packed sequences; or what their tokens see, as
 * intervals (common/document_intervals.cuh).
 *
 * A document begins at the first id of a row, and where an id differs from the one before it. The blocks of one cluster
 * share the ids: each counts those beginnings in its share, tells the others over distributed shared memory, and writes
 * where they lie from the number of documents before its share on. Starts that are left are the number of ids. So one
 * launch does it, without memory that somebody has to clear first. Before Hopper one block does it alone.
 *
 * int32 and int64 ids of any strides, fewer than 2^31 of them.
 *
 * @pass-an-arch
 */
#include <algorithm> // std::max, std::min

#include "common/chaos.cuh"   // FA_CHAOS_BEGIN
#include "common/cluster.cuh" // cluster_arrive, cluster_store
#include "common/document_intervals.cuh"
#include "common/faults.cuh" // count_fault
#include "common/launch.cuh" // FA_CUDA_TRY
#include "common/ptx.cuh"    // shared_address
#include "fa.h"              // fa_documents

namespace fa {
namespace {

constexpr int kWarp = 32, kThreads = 1024, kWarps = kThreads / kWarp;
constexpr int kMostBlocks = 8; // the largest portable cluster
constexpr int kAhead = 4;      // ids that a thread reads at a time
constexpr int kShare = kThreads * kAhead;

struct Args {
    fa_operand ids, starts;
    unsigned rows, columns;           // of the ids
    unsigned step_rows, step_columns; // from an id to the one that is kWarp behind it
    unsigned share;                   // ids of a block, a multiple of kShare
    int64_t count;                    // documents that have a place
};

/* The blocks of the launch. */
struct Cluster {
    unsigned found[kMostBlocks]; // documents that begin in each block's share

#if __CUDA_ARCH__ >= 900
    __device__ __forceinline__ static unsigned size() { return gridDim.x; }
    __device__ __forceinline__ static void begin() { cluster_arrive_relaxed(); }
    /* Thread n tells block n. */
    __device__ __forceinline__ void tell(unsigned mine) {
        cluster_wait(); // all blocks have begun
        if (threadIdx.x < size()) cluster_store(cluster_address(shared_address(&found[blockIdx.x]), threadIdx.x), mine);
        cluster_arrive();
        cluster_wait();
    }
#else
    __device__ __forceinline__ static unsigned size() { return 1; }
    __device__ __forceinline__ static void begin() {}
    __device__ __forceinline__ void tell(unsigned mine) {
        if (threadIdx.x == 0) found[0] = mine;
        __syncthreads();
    }
#endif
};

/* Calls take(begins, id) for the ids of a warp's segment, a multiple of kAhead * kWarp that begins with id `first`: an
 * array of kAhead flags, whether a document begins at the lane's ids `id`, id + kWarp and so on. Rows and columns are
 * counted along, since a division takes longer than the rest. */
template <typename Id, class Take>
__device__ __forceinline__ void walk(const Args &a, unsigned first, unsigned segment, Take take) {
    const unsigned lane = threadIdx.x % kWarp;
    unsigned row = (first + lane) / a.columns, column = (first + lane) % a.columns;
    for (unsigned n = 0; n < segment; n += kAhead * kWarp) {
        bool begins[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            begins[i] = row < a.rows;
            if (begins[i] && column) {
                const Id *at = static_cast<const Id *>(a.ids.data) + row * a.ids.stride[0] + column * a.ids.stride[1];
                begins[i] = at[0] != at[-a.ids.stride[1]];
            }
            row += a.step_rows, column += a.step_columns;
            if (column >= a.columns) column -= a.columns, ++row;
        }
        take(begins, first + n + lane);
    }
}

template <typename Id>
__global__ void __launch_bounds__(kThreads) documents_kernel(const __grid_constant__ Args a, fa_fault_board *faults) {
    FA_CHAOS_BEGIN();
    __shared__ Cluster cluster;
    __shared__ unsigned of_warp[kWarps];
    const unsigned rank = blockIdx.x, lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    if (rank >= Cluster::size()) return; // machine code without clusters on a device that has them
    Cluster::begin();
    const unsigned share = a.share * (gridDim.x / Cluster::size()), segment = share / kWarps;
    const unsigned first = rank * share + warp * segment;
    unsigned begun = 0;
    walk<Id>(a, first, segment, [&](const bool(&begins)[kAhead], unsigned) {
        for (int i = 0; i < kAhead; ++i) begun += begins[i];
    });
    begun = __reduce_add_sync(~0u, begun);
    if (lane == 0) of_warp[warp] = begun;
    __syncthreads();
    cluster.tell(__reduce_add_sync(~0u, of_warp[lane]));

    int64_t total = 0, index = __reduce_add_sync(~0u, lane < warp ? of_warp[lane] : 0); // documents, those before
    for (unsigned n = 0; n < Cluster::size(); ++n) {
        if (n < rank) index += cluster.found[n];
        total += cluster.found[n];
    }
    int32_t *const starts = static_cast<int32_t *>(a.starts.data);
    walk<Id>(a, first, segment, [&](const bool(&begins)[kAhead], unsigned id) {
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            const unsigned lanes = __ballot_sync(~0u, begins[i]);
            const int64_t mine = index + __popc(lanes & ((1u << lane) - 1));
            if (begins[i] && mine <= a.count) starts[mine * a.starts.stride[0]] = static_cast<int32_t>(id + i * kWarp);
            index += __popc(lanes);
        }
    });
    for (int64_t n = total + rank * kThreads + threadIdx.x; n <= a.count; n += Cluster::size() * kThreads)
        starts[n * a.starts.stride[0]] = static_cast<int32_t>(a.rows * a.columns);
    if (total > a.count && rank == 0 && threadIdx.x == 0) count_fault(faults, FA_FAULT_documents, -1, a.count, total);
}

fa_answer plan(const fa_problem *problem, const fa_device_info *device, fa_plan *plan, fa_why *) {
    const fa_documents &p = problem->documents;
    plan->threads = kThreads;
    plan->blocks = p.intervals ? std::min<int64_t>(p.batch, device->sm_count * 2) : 1;
    if (p.intervals) return FA_TAKES;
    while (device->cc >= 90 && plan->blocks < kMostBlocks && std::max(p.batch * p.seq, p.count) > plan->blocks * kShare)
        plan->blocks *= 2;
    return FA_TAKES;
}

template <typename Id>
fa_code launch_as(const Args &args, const fa_problem *problem, const fa_plan *plan, const fa_launch *launch) {
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = static_cast<unsigned>(plan->blocks);
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(plan->blocks));
    config.blockDim = dim3(kThreads);
    config.stream = static_cast<cudaStream_t>(launch->stream);
    config.attrs = &attribute;
    config.numAttrs = plan->blocks > 1;
    FA_CHAOS_ARM(launch->stream, *launch);
    FA_CUDA_TRY(*launch, cudaLaunchKernelEx(&config, documents_kernel<Id>, args, problem->faults));
    return FA_OK;
}

fa_code launch(const fa_problem *problem, const fa_plan *plan, const fa_launch *launch) {
    const fa_documents &p = problem->documents;
    if (p.intervals) return fa_start(document_intervals_kernel, plan->blocks, kTokens, 0, *launch, token_args(p));
    const int64_t ids = p.batch * p.seq, shares = (ids + kShare - 1) / kShare;
    Args args = {};
    args.ids = p.ids, args.starts = p.starts, args.count = p.count;
    args.columns = static_cast<unsigned>(std::max<int64_t>(p.seq, 1));
    args.rows = ids ? static_cast<unsigned>(p.batch) : 0;
    args.step_rows = kWarp / args.columns, args.step_columns = kWarp % args.columns;
    args.share = static_cast<unsigned>((shares + plan->blocks - 1) / plan->blocks * kShare);
    return p.dtype == FA_I64 ? launch_as<int64_t>(args, problem, plan, launch)
                             : launch_as<int32_t>(args, problem, plan, launch);
}

} // namespace
} // namespace fa

FA_DEFINE_KERNEL(documents) = {
    .abi = FA_KERNEL_ABI,
    .op = FA_DOCUMENTS,
    .device = FA_CUDA,
    .name = "documents",
    .summary = "where documents begin, by the blocks of one cluster, or what their tokens see, a row a block",
    .cc_from = 80,
    .cc_to = 0,
    .dtypes = 1 << FA_I32 | 1 << FA_I64,
    .takes = 0,
    .plan = fa::plan,
    .launch = fa::launch,
};
