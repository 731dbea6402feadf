/* serve_sm90: the persistent form.
 *
 * As many blocks as there are multiprocessors, each worker with its range of all jobs. What it has
 * from its first to its last chunk it finishes by itself; of a job that others share it leaves states in workspace (at
 * most 7 single chunks until the first whole group, the groups, and at the other end all whole groups and the group
 * that is not whole), and serve_merge_kernel folds them, one block for each job that begins in one worker and ends in
 * another. */
#pragma once
#include "sm90/cluster.cuh"
#include "trial/serve_attend.cuh"

namespace fa::sm90::serve {

/* What a warp writes down: what is the same in all its lanes and seldom read. */
template <class C> struct Notes {
    Walk<C> work, ahead; // the job at hand; that of the next tile to ask for
    Record record;
    LaneRow row[C::kWarpRows];
};

/* The tiles of a worker's range, in their order. */
template <class C> struct WalkAhead {
    const Params &params;
    Walk<C> *walk;
    Tile tile = {};
    bool more = false;

    __device__ __forceinline__ void begin(const Walk<C> &work) {
        Walk<C> first = work;
        more = first.find(params, false, true);
        tile = first.here();
        note(walk, first);
    }
    __device__ __forceinline__ void next() {
        if (++tile.tile < tile.end) return;
        Walk<C> ahead = *walk;
        more = ahead.find(params, true, true);
        tile = ahead.here();
        note(walk, ahead);
    }
};

template <class C> struct PersistentSink {
    using T = typename C::T;
    const Params &params;
    const Ring<C> &ring;
    Notes<C> *notes;
    float4 *totals; // of this warp: all whole groups of a job that begins here; then a maximum and sum a lane and row

    __device__ __forceinline__ int64_t workers() const { return int64_t(gridDim.x) * C::kTeams; }
    __device__ __forceinline__ int64_t worker() const { return int64_t(blockIdx.x) * C::kTeams + ring.team; }
    __device__ __forceinline__ Workspace<C> workspace() const { return {params.workspace, params.states}; }
    __device__ __forceinline__ float2 *total_state(int r) const {
        return reinterpret_cast<float2 *>(totals + C::kWarpRows * C::kColumns / 4) + r * 32 + ring.lane;
    }

    /* Factors for the total and a group that is folded into it; the group's states become those of both. */
    __device__ __forceinline__ void fold_states(Chunk<C> &group, bool total, Factors (&f)[C::kLaneRows]) const {
#pragma unroll
        for (int r = 0; r < C::kLaneRows; ++r) {
            if (!total) continue;
            const float2 old = *total_state(r);
            RowState state;
            state.maximum = old.x, state.sum = old.y;
            f[r] = fold_state(state, group.state[r].maximum, group.state[r].sum);
            group.state[r] = state;
        }
    }
    /* The group becomes the total with it folded in. */
    __device__ __forceinline__ void take_total(Chunk<C> &group, bool total) const {
        if (!total) return;
        Factors f[C::kLaneRows];
        fold_states(group, total, f);
        each_quad<C>([&](int m, int n, int at) {
            const float4 old = totals[at];
            float(&x)[4] = group.out[m][n];
            x[0] = fold_value(old.x, x[0], f[2 * n]), x[1] = fold_value(old.y, x[1], f[2 * n + 1]);
            x[2] = fold_value(old.z, x[2], f[2 * n]), x[3] = fold_value(old.w, x[3], f[2 * n + 1]);
        });
    }
    __device__ __forceinline__ void fold_total(Chunk<C> &group, bool total) const {
        take_total(group, total);
        each_quad<C>([&](int m, int n, int at) {
            const float(&x)[4] = group.out[m][n];
            totals[at] = make_float4(x[0], x[1], x[2], x[3]);
        });
#pragma unroll
        for (int r = 0; r < C::kLaneRows; ++r)
            *total_state(r) = make_float2(group.state[r].maximum, group.state[r].sum);
    }

    /* Leaves a state in workspace: quad(m, n, at) are accumulators, state(r) is of a row. */
    template <class Quad, class State>
    __device__ __forceinline__ void leave(int slot, Quad &&quad, State &&state) const {
        char *const place = workspace().state(workers(), worker(), slot);
        float4 *to = reinterpret_cast<float4 *>(place) + ring.member * (C::kWarpRows * C::kColumns / 4);
        each_quad<C>([&](int m, int n, int at) { to[at] = quad(m, n, at); });
        float2 *states = reinterpret_cast<float2 *>(place + Workspace<C>::kAccumulators) + ring.member * C::kWarpRows;
        if (ring.lane < 4)
#pragma unroll
            for (int r = 0; r < C::kLaneRows; ++r) states[r / 2 * 8 + 2 * ring.lane + r % 2] = state(r);
    }
    __device__ __forceinline__ void leave(int slot, const Chunk<C> &x) const {
        leave(
            slot,
            [&](int m, int n, int) {
                return make_float4(x.out[m][n][0], x.out[m][n][1], x.out[m][n][2], x.out[m][n][3]);
            },
            [&](int r) { return make_float2(x.state[r].maximum, x.state[r].sum); });
    }
    __device__ __forceinline__ void emit(const Chunk<C> &x, int, bool opens) const {
        Record record = notes->record;
        leave(record.head_continues + record.head_groups, x);
        opens ? ++record.head_groups : ++record.head_continues;
        note(&notes->record, record);
    }

    __device__ __forceinline__ void end(Chunk<C> &group, int opened, bool open, bool total) const {
        const Walk<C> work = notes->work;
        if (!work.begins()) {
            if (open) emit(group, opened, true);
            Record record = notes->record;
            record.head_done = work.ends();
            note(&notes->record, record);
        } else if (work.ends()) {
            take_total(group, total);
            write(work, group);
        } else {
            Record record = notes->record;
            record.b = work.b, record.head = work.head, record.block = work.block;
            record.before_q = work.before_q, record.before_k = work.before_k;
            record.total = total, record.group = 1;
            note(&notes->record, record);
            int slot = record.head_continues + record.head_groups;
            if (total)
                leave(
                    slot++, [&](int, int, int at) { return totals[at]; }, [&](int r) { return *total_state(r); });
            leave(slot, group);
        }
        if (work.begins() && work.block == 0 && ring.member == 0) {
            const fa_entry e = notes->work.sequence.entry;
            write_nothing<T>(params, work.b, work.head, e.first_q + e.seq_q, notes->work.sequence.rows_end);
            if (work.b == 0) write_nothing<T>(params, 0, work.head, 0, e.first_q);
        }
    }

    __device__ __forceinline__ void write(const Walk<C> &work, const Chunk<C> &x) const {
        const int first = work.block * C::kRows + ring.member * C::kWarpRows;
        const int64_t count = notes->work.sequence.entry.seq_q * params.group,
                      first_q = notes->work.sequence.entry.first_q;
#pragma unroll
        for (int r = 0; r < C::kLaneRows; ++r) {
            const int index = first + r / 2 * 8 + 2 * (ring.lane % 4) + r % 2;
            if (index >= count) continue;
            const RowPlace row = row_place(params, work.b, work.head, first_q, index);
            const float factor = finish(params, row, x.state[r], ring.lane < 4);
#pragma unroll
            for (int m = 0; m < C::kColumns / 16; ++m)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const float value = x.out[m][r / 2][2 * half + r % 2];
                    store_out<T>(params, row, 16 * m + 8 * half + ring.lane / 4,
                                 factor == 0.0f ? 0.0f : __fmul_rn(value, factor));
                }
        }
    }
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) serve_sm90_kernel(const __grid_constant__ Params params) {
    FA_CHAOS_BEGIN();
    extern __shared__ __align__(1024) char shared_memory[];
    const Shared<C> shared{shared_memory};
    Ring<C> ring = shared.ring(params);
    if (ring.member == 0 && ring.lane == 0) {
        ring.init();
        mbarrier_init_fence();
        if (params.load == Load::kBoxes) tensor_map_prefetch(&params.k_map), tensor_map_prefetch(&params.v_map);
    }
    dependency_release(); // the second kernel's blocks have room beside these
    __syncthreads();
    dependency_wait();
    static_assert(sizeof(Notes<C>) <= C::kNotesBytes);
    Notes<C> *notes = reinterpret_cast<Notes<C> *>(shared.notes());
    note(&notes->record, Record());
    int64_t *scratch = reinterpret_cast<int64_t *>(shared.dealing());
    const Walk<C> start = deal<C>(params, scratch, reinterpret_cast<Start *>(scratch + C::kWarps));
    note(&notes->work, start);
    WalkAhead<C> ahead{params, &notes->ahead};
    ahead.begin(start);
    if (ahead.more) ring.find(ahead.tile);
    fill(ring, ahead);
    if (params.p.batch == 0 && blockIdx.x == 0 && ring.member == 0) // rows of no sequence
        for (int head = ring.team; head < params.p.heads_kv; head += C::kTeams)
            write_nothing<typename C::T>(params, 0, head, 0, params.p.seq_q);
    float4 *totals = reinterpret_cast<float4 *>(shared.own() + threadIdx.x / 32 * (C::kTotalBytes / C::kWarps));
    PersistentSink<C> sink{params, ring, notes, totals};
    RingState<C::kStages> at(0);
#pragma unroll 1
    for (bool leaves = false;; leaves = true) {
        Walk<C> work = notes->work;
        if (!work.find(params, leaves, false)) break;
        note(&notes->work, work);
        if (params.faults && ring.member == 0 && !work.head && !work.block)
            report_faults(params, work.before_q, work.before_k, work.begins(), work.here());
        Rows<C> rows;
        rows.row = notes->row;
        rows.load(params, work.sequence.entry, work.b, work.head, work.block * C::kRows + ring.member * C::kWarpRows);
        const Span span = {work.chunk,          work.chunk_end,     work.first_chunk(),
                           work.sequence.shift, work.sequence.tile, work.sequence.tile_end};
        attend(params, ring, at, rows, span, work.begins(), ahead, sink);
    }
    if (ring.member == 0 && ring.lane == 0) *sink.workspace().record(sink.worker()) = notes->record;
}

/* Folds the states of the job that begins in worker blockIdx.x, if it does not end there, and writes its rows. */
template <class C> struct Merge {
    RowState total[2], group[2];
    float4 total_out, group_out;
    bool has_total = false, open = false;

    static __device__ __forceinline__ float4 fold4(const float4 &old, const float4 &x, const Factors (&f)[2]) {
        return make_float4(fold_value(old.x, x.x, f[0]), fold_value(old.y, x.y, f[1]), fold_value(old.z, x.z, f[0]),
                           fold_value(old.w, x.w, f[1]));
    }
    __device__ __forceinline__ void close_group() {
        if (!open) return;
        open = false;
        if (has_total) {
            const Factors f[2] = {fold_state(total[0], group[0].maximum, group[0].sum),
                                  fold_state(total[1], group[1].maximum, group[1].sum)};
            total_out = fold4(total_out, group_out, f);
        } else {
            has_total = true;
            total[0] = group[0], total[1] = group[1], total_out = group_out;
        }
    }
    __device__ __forceinline__ void take(const float4 &x, const float4 &stats, bool opens) {
        if (opens) close_group();
        if (open) {
            const Factors f[2] = {fold_state(group[0], stats.x, stats.y), fold_state(group[1], stats.z, stats.w)};
            group_out = fold4(group_out, x, f);
        } else {
            open = true;
            group[0].maximum = stats.x, group[0].sum = stats.y, group[1].maximum = stats.z, group[1].sum = stats.w;
            group_out = x;
        }
    }
};

constexpr int kMergeThreads = 256;

/* The states of a job in the order in which they are folded: twice their number in workspace, plus 1 if they open a
 * group (or the total of those before). */
struct MergeList {
    int count;
    int state[kMaxChunks + 8];
};

/* Those of the job that begins in worker blockIdx.x. One warp. */
__device__ __forceinline__ void list_states(MergeList &list, const Record *records, const Record &own, int states) {
    const int lane = threadIdx.x % 32, workers = static_cast<int>(gridDim.x), mine = static_cast<int>(blockIdx.x);
    const int left = mine * states + own.head_continues + own.head_groups;
    int count = own.total + 1;
    if (lane < count) list.state[lane] = 2 * (left + lane) + 1;
#pragma unroll 1
    for (int base = mine + 1; base < workers; base += 32) {
        const int worker = base + lane;
        int continues = 0, opens = 0, done = worker >= workers;
        if (!done) {
            const Record *record = records + worker;
            continues = record->head_continues, opens = record->head_groups, done = record->head_done;
        }
        const uint32_t ends = __ballot_sync(~0u, done);
        if (ends & ((1u << lane) - 1)) continues = opens = 0; // the job has ended before
        int upto = continues + opens;
#pragma unroll
        for (int by = 1; by < 32; by *= 2) {
            const int other = __shfl_up_sync(~0u, upto, by);
            if (lane >= by) upto += other;
        }
        const int first = count + upto - continues - opens;
        for (int n = 0; n < continues + opens; ++n)
            list.state[first + n] = 2 * (worker * states + n) + (n >= continues);
        count += __shfl_sync(~0u, upto, 31);
        if (ends) break;
    }
    if (lane == 0) list.count = count;
}

template <class C>
__global__ void __launch_bounds__(kMergeThreads) serve_merge_kernel(const __grid_constant__ Params params) {
    FA_CHAOS_BEGIN();
    __shared__ MergeList list;
    dependency_release();
    dependency_wait();
    const Workspace<C> workspace{params.workspace, params.states};
    const Record record = *workspace.record(blockIdx.x);
    if (!record.group) return;
    if (threadIdx.x < 32) list_states(list, workspace.record(0), record, params.states);
    __syncthreads();
    const Sequence sequence = known<C>(params, record.b, record.before_q, record.before_k);
    const int64_t count = sequence.entry.seq_q * params.group;
    const char *states = workspace.state(gridDim.x, 0, 0);
    for (int item = threadIdx.x; item < C::kRows * C::kColumns / 4; item += kMergeThreads) {
        constexpr int kOfWarp = C::kWarpRows * C::kColumns / 4, kAtOnce = 4;
        const int lane = item % 32, tile = item % kOfWarp / 32, m = tile / C::kRowTiles, n = tile % C::kRowTiles;
        const int row = item / kOfWarp * C::kWarpRows + 8 * n + 2 * (lane % 4), first = record.block * C::kRows + row;
        if (first >= count) continue;
        Merge<C> merge;
#pragma unroll 1
        for (int base = 0; base < list.count; base += kAtOnce) {
            float4 x[kAtOnce], stats[kAtOnce];
            bool opens[kAtOnce];
#pragma unroll
            for (int k = 0; k < kAtOnce; ++k) {
                const int at = list.state[min(base + k, list.count - 1)];
                const char *state = states + at / 2 * Workspace<C>::kState;
                x[k] = reinterpret_cast<const float4 *>(state)[item], opens[k] = at % 2;
                stats[k] = *reinterpret_cast<const float4 *>(state + Workspace<C>::kAccumulators + row * 8);
            }
#pragma unroll
            for (int k = 0; k < kAtOnce; ++k)
                if (base + k < list.count) merge.take(x[k], stats[k], opens[k]);
        }
        merge.close_group();
        const float value[4] = {merge.total_out.x, merge.total_out.y, merge.total_out.z, merge.total_out.w};
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            if (first + r >= count) continue;
            const RowPlace place = row_place(params, record.b, record.head, sequence.entry.first_q, first + r);
            const float factor = finish(params, place, merge.total[r], m == 0 && lane < 4);
#pragma unroll
            for (int half = 0; half < 2; ++half)
                store_out<typename C::T>(params, place, 16 * m + 8 * half + lane / 4,
                                         factor == 0.0f ? 0.0f : __fmul_rn(value[2 * half + r], factor));
        }
    }
}

} // namespace fa::sm90::serve
