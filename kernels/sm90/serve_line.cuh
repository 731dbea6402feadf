/* serve_sm90: equal shares of what all sequences of a call see, whatever their lengths, which lie on the device.
 *
 * The line: the jobs of one kv head in their order, each kOpening units long for what comes before a job's first key,
 * then a unit for 64 keys of its chunks. It is cut into parts of equal length. A team, a block for each kv head since
 * they read the same rows of memory, walks over a part from job to job: it takes the chunks that end there, shared
 * among the warps of the block. The team in whose part a job begins writes rows of no query and counts faults. A job of
 * one team is folded by its blocks; the others, of which serve_fold_kernel finds the same cuts, by that. */
#pragma once
#include "sm90/serve_job.cuh"

namespace fa::sm90::serve {

constexpr int kOpening = 1;         // units of a job beside its keys; above 0, so that each job begins in some part
constexpr int kLeastUnits = 2;      // of a part
constexpr int kMostOnLine = 1024;   // jobs of a kv head: a thread reads the lengths of up to 8 sequences
constexpr int kLineLengthBits = 25; // of a sequence: so many of them stay below 2^31 units

/* Where a job begins on the line. */
struct LineJob {
    int job, begin;
};

/* What the line is cut into, and where this thread's jobs begin on it. Every block works it out for itself. */
template <class C> class Line {
    const Params &params;
    int from, to; // this thread's jobs
    int begin;    // of the first of them
    int mine;     // units of all of them

    __device__ __forceinline__ int units(int job) const {
        const Serving &call = params.call;
        const fa_sequences &s = call.s;
        const int of_head = params.heads_kv.quotient(params.first) + job, b = params.tiles_m.quotient(of_head);
        const int tile = of_head - b * static_cast<int>(params.tiles_m.divisor);
        const fa_span rows = {s.packed_q ? b : 0, s.packed_q ? b + 1 : call.p.seq_q};
        const fa_entry entry = fa_entry_of(&s, b, rows, fa_rows_of(&s.k, b, 0, s.packed_k));
        const Sight sight = Sight::of(entry, call.p.left, call.p.right);
        const bool any = tile * C::kRows < entry.seq_q * static_cast<int>(params.group.divisor);
        return kOpening + (any ? (sight.last - sight.first) << (sight.shift - kChunkTilesLog2) : 0);
    }

  public:
    int total, each; // units of the line, of a part

    /* By the block; `shared` has room for kRoom. */
    static constexpr int kRoom = C::kWarps + 2;
    __device__ __forceinline__ Line(const Params &params, int *shared) : params(params) {
        const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
        const int jobs = params.heads_kv.quotient(params.jobs), run = (jobs + C::kThreads - 1) / C::kThreads;
        from = min(thread * run, jobs), to = min(from + run, jobs);
        mine = 0;
        for (int job = from; job < to; ++job) mine += units(job);
        int up_to = mine;
#pragma unroll
        for (int by = 1; by < 32; by *= 2) {
            const int before = __shfl_up_sync(~0u, up_to, by);
            up_to += lane >= by ? before : 0;
        }
        if (lane == 31) shared[warp] = up_to;
        __syncthreads();
        begin = up_to - mine, total = 0;
#pragma unroll
        for (int n = 0; n < C::kWarps; ++n) begin += n < warp ? shared[n] : 0, total += shared[n];
        each = max((total + params.teams - 1) / params.teams, kLeastUnits);
    }

    /* The job that has a unit below `total`. By the block, once. */
    __device__ __forceinline__ LineJob job_at(int unit, int *shared) const {
        int at = begin;
        for (int job = from; job < to; ++job) {
            const int end = at + (to - from == 1 ? mine : units(job));
            if (at <= unit && unit < end) shared[C::kWarps] = job, shared[C::kWarps + 1] = at; // this thread alone
            at = end;
        }
        __syncthreads();
        return {shared[C::kWarps], shared[C::kWarps + 1]};
    }
};

/* A job on the line: which of its chunks are which team's. Has what list_states() asks of Shares. */
template <class C> struct LineShares {
    int first, last; // chunks
    int begin, each; // of the job on the line, units; of a part
    int log2;        // of the units of a chunk

    __device__ __forceinline__ LineShares(const Job &job, int begin, int each)
        : first(job.first), last(job.last), begin(begin), each(each), log2(job.shift - kChunkTilesLog2) {}
    __device__ __forceinline__ int end() const { return begin + kOpening + ((last - first) << log2); }
    /* The first chunk that ends behind the part of the team before. */
    __device__ __forceinline__ int border(int team) const {
        return first + min(max((team * each - begin - kOpening) >> log2, 0), last - first);
    }
    __device__ __forceinline__ int team(int chunk) const {
        return unsigned(begin + kOpening + ((chunk + 1 - first) << log2) - 1) / unsigned(each);
    }
    /* A team's chunks in shares of its block's warps. */
    __device__ __forceinline__ Shares of_team(int team) const {
        return Shares(border(team), border(team + 1), C::kWarps);
    }
    __device__ __forceinline__ int groups() const { return Shares(first, last, 1).groups(); }
    __device__ __forceinline__ int opened_end(int chunk) const { return of_team(team(chunk)).opened_end(chunk); }
};

/* Brings to L2 what the blocks are about to read one after the other: the lengths, and of the table of pages as much as
 * the grid has threads, 32 entries each. */
template <class C> __device__ __forceinline__ void prefetch_line(const Params &params) {
    constexpr int kEntries = 32; // a line of the cache
    const fa_sequences &s = params.call.s;
    const int batch = static_cast<int>(params.call.p.batch), thread = static_cast<int>(threadIdx.x);
    const int32_t *const arrays[] = {s.k.used, s.q.used, s.begin, s.end};
#pragma unroll
    for (const int32_t *array : arrays)
        if (array && thread * kEntries < batch) prefetch_l2(array + thread * kEntries);
    if (!s.pages.table || !s.pages.width) return;
    const unsigned rows = unsigned(s.pages.width + kEntries - 1) / kEntries, line = blockIdx.x * C::kThreads + thread;
    if (line / rows < unsigned(batch))
        prefetch_l2(s.pages.table + line / rows * s.pages.stride + line % rows * kEntries);
}

} // namespace fa::sm90::serve
