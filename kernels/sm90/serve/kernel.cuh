/* serve_sm90: the kernels, but for that of a list (listed.cuh). A block takes a part of a job, each of its warps a
 * share of the chunks, or where the job is thin the warps together; what they leave in workspace is folded by the block
 * itself if it has the whole job, by the blocks of a cluster if they have it, else by serve_fold_kernel. */
#pragma once
#include "sm90/common/cluster.cuh"
#include "sm90/serve/listed.cuh"
#include "sm90/serve/parts.cuh"

namespace fa::sm90::serve {

/* Brings to L2 what says where the keys of job n lie: all this is read one after the other, but not yet. */
__device__ __forceinline__ void prefetch_lengths(const Params &params, int n, int part) {
    const fa_sequences &s = params.call.s;
    if (s.q.starts) return;
    const int b = params.tiles_m.quotient(params.heads_kv.quotient(n)), lane = static_cast<int>(threadIdx.x);
    const int32_t *at = lane == 0   ? s.k.used
                        : lane == 1 ? s.q.used
                        : lane == 2 ? s.k.starts
                        : lane == 3 ? s.begin
                        : lane == 4 ? s.end
                                    : nullptr;
    if (at) at += b;
    if (lane >= 32 && s.pages.table) {
        constexpr int kLine = 32; // entries
        const int64_t from = s.pages.width * part / params.parts.divisor + (lane - 32) * kLine,
                      to = s.pages.width * (part + 1) / params.parts.divisor;
        if (from < to) at = s.pages.table + b * s.pages.stride + from;
    }
    if (at) asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
}

/* Heads come first, since they read the same rows of memory, then the parts of a job, so that those of a long sequence
 * begin together; where the parts are a cluster they come first. */
template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocksPerSm)
    serve_sm90_kernel(const __grid_constant__ Params params) {
    FA_CHAOS_BEGIN();
    extern __shared__ __align__(1024) char memory[];
    static_assert(sizeof(Shared<C>) <= Shared<C>::kRoom);
    auto &shared = *reinterpret_cast<Shared<C> *>(memory);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), heads = static_cast<int>(params.heads_kv.divisor),
              parts = static_cast<int>(params.parts.divisor), block = static_cast<int>(blockIdx.x);
    const int of_heads = params.heads_kv.quotient(block), tile = params.parts.quotient(of_heads),
              in_order = params.parts.quotient(block);
    const int n = params.first + (params.clustered ? in_order : tile * heads + block - of_heads * heads),
              part = params.clustered ? block - in_order * parts : of_heads - tile * parts;
    const bool reads = params.call.s.given; // memory, to know a job
    if (params.boxes && threadIdx.x == 0) tensor_map_prefetch(&params.k_map), tensor_map_prefetch(&params.v_map);
    if constexpr (!C::kThin) Ring<C>::init(params, shared.few.full[warp]); // before anything is waited for
    if (reads) {
        prefetch_lengths(params, n, part);
        dependency_wait();
    }
    // Only now, since serve_fold_kernel reads lengths without waiting for what wrote them; or in few_part.
    if constexpr (C::kThin) dependency_release();
    Job job = find_job<C>(params, n, part == 0, shared.joined);
    const Slots<C> slots(params, job, n - params.first);
    const int each = job.template workers<C>(1); // of a block
    const Shares shares(job, parts * each);
    if (part > 0 && !params.clustered && shares.begin(part * each) == shares.begin((part + 1) * each)) return;
    const int worker = part * each + warp % each, begin = shares.begin(worker), end = shares.begin(worker + 1);
    char *rings = memory + Shared<C>::kRoom;
    const bool thin = C::kThin && job.thin, whole = parts == 1;
    if constexpr (C::kThin)
        if (thin) {
            thin_part(params, job, shared.thin, rings, slots, begin, end, whole);
            job = shared.thin.job; // so that registers need not keep it
        }
    if (!thin) few_part<C, C::kThin>(params, job, shared.few, rings, slots, begin, end, false);
    if (part == 0) {
        write_nothing<C>(params, job, threadIdx.x, C::kThreads);
        if (params.by_number) write_around<C>(params, job);
    }
    if (whole ? thin : !params.clustered) return;
    if (params.clustered) cluster_arrive();
    const Shares all(job, parts * job.template workers<C>(1));
    if (warp == 0) list_states(shared.list, all);
    __syncthreads();
    if (params.clustered) cluster_wait(); // behind it, all states of the job can be read
    const int columns_of = params.clustered ? part : 0, blocks = params.clustered ? parts : 1;
    if (job.count)
        fold_job<C>(params, job, slots, all, shared.list, C::kUnits * columns_of / blocks,
                    C::kUnits * (columns_of + 1) / blocks, reinterpret_cast<Part *>(rings), [] {});
}

/* A job a warp, where no sequence has more keys than a group of chunks: it writes what it has. Of sequences that have
 * no starts, since those are read by the block. */
template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocksPerSm)
    serve_short_kernel(const __grid_constant__ Params params) {
    FA_CHAOS_BEGIN();
    extern __shared__ __align__(1024) char memory[];
    auto &shared = *reinterpret_cast<Shared<C> *>(memory);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32,
              n = static_cast<int>(blockIdx.x) * C::kWarps + warp;
    if (params.boxes && threadIdx.x == 0) tensor_map_prefetch(&params.k_map), tensor_map_prefetch(&params.v_map);
    dependency_release();
    dependency_wait();
    if (n >= params.jobs) return;
    const Job job = find_job<C>(params, n, false, nullptr);
    const fa_sequences &s = params.call.s;
    if (s.given && job.counts && lane == 0) {
        count_faults_of_q(params.call.faults, s, job.b, job.rows);
        count_faults_of_k(params.call.faults, s, job.b, fa_rows_of(&s.k, job.b, 0, s.packed_k));
    }
    few_part<C, true>(params, job, shared.few, memory + Shared<C>::kRoom, Slots<C>(nullptr, job), job.first, job.last,
                      true);
    write_nothing<C>(params, job, lane, 32);
}

/* Block (job, part of the columns). */
template <class C>
__global__ void __launch_bounds__(C::kThreads) serve_fold_kernel(const __grid_constant__ Params params) {
    FA_CHAOS_BEGIN();
    __shared__ StateList list;
    __shared__ Part parts[kFoldParts];
    __shared__ int64_t joined[C::kWarps];
    dependency_release();
    const Job job = find_job<C>(params, params.first + static_cast<int>(blockIdx.x), false, joined);
    if (job.count == 0) return dependency_wait(); // so that a later launch waits for serve_sm90_kernel, too
    const Shares shares(job, job.template workers<C>(static_cast<int>(params.parts.divisor)));
    if (threadIdx.x < 32) list_states(list, shares);
    __syncthreads();
    const int y = static_cast<int>(blockIdx.y), blocks = static_cast<int>(gridDim.y);
    fold_job<C>(params, job, Slots<C>(params, job, blockIdx.x), shares, list, C::kUnits * y / blocks,
                C::kUnits * (y + 1) / blocks, parts, [] { dependency_wait(); });
}

} // namespace fa::sm90::serve
