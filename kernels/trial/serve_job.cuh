/* serve_sm90: one job by several blocks, all of whose workers have equal shares of its chunks (the cluster form and the
 * split form): which chunks are whose, and how the states that they leave are folded.
 *
 * Of each group of 8 chunks the worker that has the first one leaves one state of all its chunks; every other chunk of
 * the group is a state by itself. So the keys alone say which states there are; each is known by its first chunk. */
#pragma once
#include "trial/serve_attend.cuh"

namespace fa::sm90::serve {

/* Of a sequence's rows and chunks what a block needs. */
struct Job {
    Sequence sequence;
    int b, head, before_q, before_k;
    int first, last; // chunks

    __device__ __forceinline__ int rows(const Params &params) const {
        return static_cast<int>(sequence.entry.seq_q) * params.group;
    }
};

/* Brings to L2 what says where the job of kv head blockIdx.x of sequence blockIdx.z lies, and the entries of the table
 * that are its part's if the sequence fills its row: all this is read one after the other, but not yet. One warp. */
__device__ __forceinline__ void prefetch_job(const Params &params, int part) {
    const fa_sequences &s = params.s;
    const int lane = threadIdx.x % 32;
    const int64_t b = blockIdx.z;
    const int32_t *at = lane == 0   ? s.k.used
                        : lane == 1 ? s.q.used
                        : lane == 2 ? s.k.starts
                        : lane == 3 ? s.q.starts
                        : lane == 4 ? s.begin
                        : lane == 5 ? s.end
                                    : nullptr;
    if (at) at += b;
    if (lane >= 8 && s.pages.table) {
        constexpr int kLine = 32; // entries
        const int64_t from = s.pages.width * part / params.parts + (lane - 8) * kLine,
                      to = s.pages.width * (part + 1) / params.parts;
        if (from < to) at = s.pages.table + b * s.pages.stride + from;
    }
    if (at) asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
}

/* Where the rows of q or k end that belong to sequences before b. One warp, or each of them. */
__device__ __forceinline__ int rows_before_all(const fa_lengths &lengths, int b) {
    if (!lengths.starts) return 0;
    int highest = 0;
#pragma unroll 4
    for (int at = threadIdx.x % 32; at < b; at += 32)
        highest = max(highest, static_cast<int>(fa_clamp(lengths.starts[at], 0, lengths.rows)));
    return __reduce_max_sync(~0u, highest);
}

/* The job of kv head blockIdx.x of sequence blockIdx.z. */
template <class C> __device__ __forceinline__ Job job_of_block(const Params &params) {
    Job job;
    job.head = static_cast<int>(blockIdx.x), job.b = static_cast<int>(blockIdx.z);
    job.before_q = job.before_k = 0;
    if (params.s.given) {
        job.before_q = rows_before_all(params.s.q, job.b), job.before_k = rows_before_all(params.s.k, job.b);
        job.sequence = sequence_of(params, C::kRows, job.b, job.before_q, job.before_k);
    } else {
        job.sequence = params.dense;
    }
    const Sequence &x = job.sequence;
    job.first = x.tile >> x.shift;
    job.last = x.tiles() ? ((x.tile_end - 1) >> x.shift) + 1 : job.first;
    return job;
}

/* Chunks [first, last) in shares that differ by one at most. */
struct Shares {
    int first, last, each, more; // the first `more` workers have one more than `each`

    __device__ __forceinline__ Shares(const Job &job, int workers) : first(job.first), last(job.last) {
        each = static_cast<int>(unsigned(last - first) / unsigned(workers)), more = last - first - each * workers;
    }
    __device__ __forceinline__ int begin(int worker) const { return first + worker * each + min(worker, more); }
    __device__ __forceinline__ int owner(int chunk) const {
        const unsigned n = chunk - first, longer = unsigned(each + 1) * more;
        return static_cast<int>(n < longer ? n / (each + 1) : more + (n - longer) / each);
    }
    __device__ __forceinline__ int first_group() const { return first / kGroup; }
    __device__ __forceinline__ int groups() const { return last > first ? (last - 1) / kGroup + 1 - first_group() : 0; }
};

/* The states of a group: that of its first chunk, then the chunks from `single` on. */
struct States {
    int opening, single, count;
    __device__ __forceinline__ States(const Shares &shares, int group) {
        const int number = shares.first_group() + group;
        opening = max(number * kGroup, shares.first);
        const int end = min((number + 1) * kGroup, shares.last);
        single = min(shares.begin(shares.owner(opening) + 1), end), count = 1 + end - single;
    }
    __device__ __forceinline__ int chunk(int n) const { return n ? single + n - 1 : opening; }
};

/* The tiles of a worker's share. */
struct ShareAhead {
    Tile tile;
    bool more;
    __device__ __forceinline__ ShareAhead(const Job &job, const Shares &shares, int worker) {
        const Sequence &x = job.sequence;
        const int chunk = shares.begin(worker), chunk_end = shares.begin(worker + 1);
        tile = {job.b,
                job.head,
                static_cast<int>(x.entry.first_k),
                x.low,
                x.high,
                max(chunk << x.shift, x.tile),
                min(chunk_end << x.shift, x.tile_end)};
        more = chunk < chunk_end;
    }
    __device__ __forceinline__ void next() { more = ++tile.tile < tile.end; }
};

/* What a worker does once its ring is being filled: all its chunks. */
template <class C, class Sink>
__device__ __forceinline__ void attend_share(const Params &params, Ring<C> &ring, const Job &job, const Shares &shares,
                                             int worker, LaneRow *row, ShareAhead &ahead, Sink &sink) {
    const Sequence &x = job.sequence;
    const Tile part = ShareAhead(job, shares, worker).tile;
    Rows<C> rows;
    rows.row = row;
    rows.load(params, x.entry, job.b, job.head, ring.member * C::kWarpRows);
    const Span span = {shares.begin(worker), shares.begin(worker + 1), job.first, x.shift, x.tile, x.tile_end};
    RingState<C::kStages> at(0);
    if (span.chunk < span.chunk_end) attend(params, ring, at, rows, span, false, ahead, sink);
    if (params.faults && job.head == 0 && ring.member == 0)
        report_faults(params, job.before_q, job.before_k, worker == 0, part);
    if (worker == 0 && ring.member == 0) {
        write_nothing<typename C::T>(params, job.b, job.head, x.entry.first_q + x.entry.seq_q, x.rows_end);
        if (job.b == 0) write_nothing<typename C::T>(params, 0, job.head, 0, x.entry.first_q);
    }
}

/* States of two rows, and one column of what was accumulated. */
struct Part {
    float2 value;
    float4 state; // maximum, sum of each row
};

__device__ __forceinline__ Part fold_parts(const Part &to, const Part &x) {
    RowState a, b;
    a.maximum = to.state.x, a.sum = to.state.y, b.maximum = to.state.z, b.sum = to.state.w;
    const Factors f = fold_state(a, x.state.x, x.state.y), g = fold_state(b, x.state.z, x.state.w);
    return {make_float2(fold_value(to.value.x, x.value.x, f), fold_value(to.value.y, x.value.y, g)),
            make_float4(a.maximum, a.sum, b.maximum, b.sum)};
}

constexpr int kAtOnce = 8; // states that a thread reads before it folds them

/* Folds read(0) .. read(count - 1), at most kMost, from left to right. Nothing: no key. */
template <int kMost, class Read> __device__ __forceinline__ Part fold_in_order(int count, Read &&read) {
    Part to = {make_float2(0.0f, 0.0f), make_float4(-INFINITY, 0.0f, -INFINITY, 0.0f)};
#pragma unroll 1
    for (int first = 0; first < count; first += kAtOnce) {
        Part x[kAtOnce];
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n) x[n] = read(min(first + n, count - 1)); // one too many costs no branch
        if (first == 0) to = x[0];
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n) {
            const Part both = fold_parts(to, x[n]);
            if (first + n > 0 && first + n < count) to = both;
        }
        if constexpr (kMost <= kAtOnce) break;
    }
    return to;
}

/* What is worked out so far is there: the compiler puts it off to where it is used, behind a wait. */
__device__ __forceinline__ void keep(int &x) { asm volatile("" : "+r"(x)); }
__device__ __forceinline__ void keep(const char *&x) { asm volatile("" : "+l"(x)); }

/* Folds the states of a job and writes `units` times 8 columns of its rows, from first_unit on: groups side by side,
 * then the groups of each column. states_at(unit, pair, column), by units of these, gives what reads the states there:
 * of (chunk, group) that which begins at a chunk, the first one of a group or (group -1) a single one. `parts` has room
 * for a Part for each group, unit, pair of rows and column. ready() comes before what is read. All threads of the
 * block. */
template <class C, class Ready, class StatesAt>
__device__ __forceinline__ void fold_job(const Params &params, const Job &job, const Shares &shares, int first_unit,
                                         int units, Part *parts, Ready &&ready, StatesAt &&states_at) {
    const int rows = job.rows(params), pairs = (rows + 1) / 2, groups = shares.groups(), items = units * pairs * 8;
    for (int n = threadIdx.x; n < items * groups; n += blockDim.x) {
        const int group = n / items, item = n - group * items, unit = item / 8 / pairs, pair = item / 8 - unit * pairs;
        States states(shares, group);
        auto read = states_at(unit, pair, item % 8);
        keep(states.opening), keep(states.single), keep(states.count);
        ready();
        parts[n] = fold_in_order<kGroup>(states.count, [&](int at) { return read(states.chunk(at), at ? -1 : group); });
    }
    __syncthreads();
    for (int item = threadIdx.x; item < items; item += blockDim.x) {
        const int unit = item / 8 / pairs, pair = item / 8 - unit * pairs, column = (first_unit + unit) * 8 + item % 8;
        ready();
        const Part part =
            fold_in_order<kMaxChunks / kGroup + 2>(groups, [&](int group) { return parts[group * items + item]; });
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            if (2 * pair + r >= rows) continue;
            const RowPlace row = row_place(params, job.b, job.head, job.sequence.entry.first_q, 2 * pair + r);
            RowState state;
            state.maximum = r ? part.state.z : part.state.x, state.sum = r ? part.state.w : part.state.y;
            const float factor = finish(params, row, state, column == 0), value = r ? part.value.y : part.value.x;
            store_out<typename C::T>(params, row, column, factor == 0.0f ? 0.0f : __fmul_rn(value, factor));
        }
    }
}

} // namespace fa::sm90::serve
