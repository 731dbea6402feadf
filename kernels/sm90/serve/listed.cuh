/* serve_sm90: sequences of packed queries as prefill_list_kernel lists them (prefill/few.cuh), those of the most keys
 * first. Blocks that stay take units from a counter: a part of a job that blocks share, a job, or of the shortest
 * sequences a job for each warp. A block that finds itself the last of a shared job folds its states.
 *
 * Where prefill_sm90_kernel has sequences, too, this one starts behind its release, so behind a list that is complete,
 * and runs beside it: it reads the list past L1, and of the rest only what was complete before. They write other rows
 * and other workspace. Its first block ends after that kernel, so that whoever waits for this one waits for both. */
#pragma once
#include "sm90/common/cluster.cuh"
#include "sm90/serve/parts.cuh"

namespace fa::sm90::serve {

/* Shared by the threads of a block, beside Shared: registers have no room for it. */
struct SharedListed {
    ListHeader found;
    Record of;        // of the unit
    int head, part;   // of it
    Job job;          // of which the unit is a part
    uint32_t next[2]; // units, by turns: a thread that reads one has passed the barrier behind the other
    uint32_t arrived; // before this block
};

/* A copy of what lies in workspace, by words of a lane each. By the warp. */
template <class T> __device__ __forceinline__ T read_past_l1(const T *from) {
    constexpr int kWords = sizeof(T) / 4;
    static_assert(kWords <= 32);
    const int lane = threadIdx.x % 32, mine = lane < kWords ? __ldcg(reinterpret_cast<const int *>(from) + lane) : 0;
    T x;
#pragma unroll
    for (int n = 0; n < kWords; ++n) reinterpret_cast<int *>(&x)[n] = __shfl_sync(~0u, mine, n);
    return x;
}

/* The last record from `first` on whose units begin at or before `unit`. By the warp. */
__device__ __forceinline__ int find_record(const Record *records, int first, int end, uint32_t unit) {
    while (true) {
        const int n = first + static_cast<int>(threadIdx.x % 32);
        const bool begun = n < end && static_cast<uint32_t>(__ldcg(&records[n].unit)) <= unit;
        const int count = __popc(__ballot_sync(~0u, begun));
        first += count - 1;
        if (count < 32) return first;
    }
}

/* All rows of a kv head of a sequence. By the block, or with joined NULL by a warp. */
template <class C>
__device__ __forceinline__ Job listed_job(const Params &params, const Record &of, int head, int64_t *joined) {
    const Serving &call = params.call;
    const int group = params.group.divisor;
    Job job;
    job.entry = entry_at(call.s, of, call.s.top_left ? 0 : of.seq_k - of.seq_q);
    job.rows = {of.rows_begin, of.rows_end}, job.first_out = of.rows_begin;
    job.b = of.b, job.head = head, job.row = 0;
    const int64_t rows = int64_t(of.seq_q) * group;
    job.count = rows_from(rows, 0, C::kJobRows);
    job.rows_out = params.listed.alone ? static_cast<int>((job.rows.end - job.rows.begin) * group) : job.count;
    job.counts = head == 0;
    job.thin = is_thin(rows, C::kColumns);
    job.see(Sight::of(entry_keys(job.entry, call.p.left, call.p.right, joined), job.thin));
    return job;
}

/* The barriers of a unit are used no more: those of a warp behind its last wait, of a block behind that of all. Every
 * unit sets them up anew, so that what load.cuh and thin_load.cuh say of phases holds within a unit, and nobody waits
 * for a phase of the unit before. */
template <class C> __device__ __forceinline__ void retire(Shared<C> &shared, bool thin) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (!thin) {
        __syncwarp();
        if (lane < C::kSlots) mbarrier_invalidate(&shared.few.full[warp][lane]);
        __syncwarp();
        return;
    }
    __syncthreads();
    if constexpr (C::kThin)
        if (threadIdx.x < Thin<C>::kSlots)
            mbarrier_invalidate(&shared.thin.full[threadIdx.x]), mbarrier_invalidate(&shared.thin.empty[threadIdx.x]);
    __syncthreads();
}

/* Finds the unit's record. By warp 0. */
__device__ __forceinline__ void find_unit(const Params &params, SharedListed &listed, uint32_t unit) {
    const auto *records = reinterpret_cast<const Record *>(params.listed.list + 1);
    const ListHeader &found = listed.found;
    const uint32_t heads = params.heads_kv.divisor, in_parts = found.few_units * heads;
    const bool shared = unit < in_parts;
    if (!shared) unit -= in_parts;
    const uint32_t of_heads = params.heads_kv.quotient(unit), first = found.units + of_heads;
    const Record of = read_past_l1(records + (shared ? find_record(records, found.few_shared, found.few_whole, first)
                                                     : found.few_whole + of_heads));
    if (threadIdx.x) return;
    listed.of = of;
    listed.head = static_cast<int>(unit - of_heads * heads);
    listed.part = shared ? static_cast<int>(first - of.unit) : 0;
}

/* Unit `unit`: a part of a job, or from `in_blocks` on a job for each warp, of which there are `brief`. By the block.
 */
template <class C>
__device__ __forceinline__ void attend_listed(const Params &params, Shared<C> &shared, SharedListed &listed,
                                              char *rings, uint32_t unit, uint32_t in_blocks, uint32_t brief) {
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    const auto parts = [&] { return max(listed.of.chunks, 1); };
    const bool alone = unit >= in_blocks;
    bool thin = false;
    int begin = 0, end = 0;
    Job own;
    if (alone) {
        const uint32_t at = (unit - in_blocks) * C::kWarps + warp, n = params.heads_kv.quotient(at);
        if (at >= brief) return;
        const auto *records = reinterpret_cast<const Record *>(params.listed.list + 1);
        own = listed_job<C>(params, read_past_l1(records + listed.found.few_brief + n),
                            static_cast<int>(at - n * params.heads_kv.divisor), nullptr);
        begin = own.first, end = own.last;
    } else {
        if (warp == 0) find_unit(params, listed, unit);
        __syncthreads();
        own = listed_job<C>(params, listed.of, listed.head, shared.joined);
        if (threadIdx.x == 0) listed.job = own;
        __syncthreads();
        thin = C::kThin && own.thin;
        const int each = own.template workers<C>(1), worker = listed.part * each + warp % each;
        const Shares shares(own, parts() * each);
        begin = shares.begin(worker), end = shares.begin(worker + 1);
    }
    const Job &job = listed.job;
    const auto slots = [&] {
        return Slots<C>(parts() == 1 ? params.listed.own + blockIdx.x * params.listed.own_bytes
                                     : params.workspace + (listed.of.slot + listed.head) * params.job_bytes,
                        job);
    };
    if constexpr (C::kThin)
        if (thin) thin_part(params, job, shared.thin, rings, slots(), begin, end, parts() == 1);
    if (!thin) few_part<C, true>(params, own, shared.few, rings, slots(), begin, end, alone);
    retire(shared, thin);
    if (alone) return;
    if (listed.part == 0 && params.listed.alone) {
        write_nothing<C>(params, job, threadIdx.x, C::kThreads);
        write_around<C>(params, job);
    }
    const bool whole = parts() == 1;
    if (whole && thin) return;
    if (!whole) { // as a release and an acquire of all threads
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) listed.arrived = atomicAdd(params.listed.arrivals + listed.of.slot + listed.head, 1u);
        __syncthreads();
        if (listed.arrived + 1 < static_cast<uint32_t>(parts())) return;
        __threadfence();
    }
    const Shares all(job, parts() * job.template workers<C>(1));
    if (warp == 0) list_states(shared.list, all);
    __syncthreads();
    if (job.count)
        fold_job<C>(params, job, slots(), all, shared.list, 0, C::kUnits, reinterpret_cast<Part *>(rings), [] {});
    tma_store_fence(); // the next unit's copies come to where fold_job has written
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocksPerSm)
    serve_listed_kernel(const __grid_constant__ Params params) {
    FA_CHAOS_BEGIN();
    extern __shared__ __align__(1024) char memory[];
    __shared__ SharedListed listed;
    auto &shared = *reinterpret_cast<Shared<C> *>(memory);
    char *const rings = memory + Shared<C>::kRoom;
    if (params.boxes && threadIdx.x == 0) tensor_map_prefetch(&params.k_map), tensor_map_prefetch(&params.v_map);
    const bool follows = !params.listed.alone && !params.listed.first; // prefill_sm90_kernel
    if (!follows) dependency_wait();
    dependency_release();
    if (threadIdx.x < 32) {
        const ListHeader found = read_past_l1(params.listed.list);
        if (threadIdx.x == 0) listed.found = found;
    }
    __syncthreads();
    int turn = 0;
    for (uint32_t unit = blockIdx.x;; turn ^= 1) {
        const uint32_t heads = params.heads_kv.divisor,
                       in_blocks = (listed.found.few_units + listed.found.few_brief - listed.found.few_whole) * heads,
                       brief = (listed.found.few_end - listed.found.few_brief) * heads;
        if (unit >= in_blocks + (brief + C::kWarps - 1) / C::kWarps) break;
        if (threadIdx.x == 0) listed.next[turn] = gridDim.x + atomicAdd(&params.listed.list->few_counter, 1u);
        attend_listed<C>(params, shared, listed, rings, unit, in_blocks, brief);
        __syncthreads();
        unit = listed.next[turn];
    }
    if (follows && blockIdx.x == 0) dependency_wait();
}

} // namespace fa::sm90::serve
