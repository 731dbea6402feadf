/* serve_sm90: what a worker does, and the persistent form.
 *
 * Persistent form: as many blocks as there are multiprocessors, each worker with its range of all jobs. What it has
 * from its first to its last chunk it finishes by itself; of a job that others share it leaves states in workspace (at
 * most 7 single chunks until the first whole group, the groups, and at the other end all whole groups and the group
 * that is not whole), and serve_merge_kernel folds them, one block for each job that begins in one worker and ends in
 * another. */
#pragma once
#include "serve_chunk.cuh"
#include "serve_load.cuh"
#include "sm90_cluster.cuh"

namespace fa::sm90::serve {

/* Where a thread's part of shared memory lies: the ring, then barriers, valid words, scratch, then what a form needs.
 */
template <class C> struct Shared {
    char *base;
    __device__ __forceinline__ uint64_t *barriers() const { return reinterpret_cast<uint64_t *>(base + C::kRingBytes); }
    __device__ __forceinline__ uint64_t *arrived() const { return barriers() + C::kBarriers - 1; }
    __device__ __forceinline__ uint64_t *valid() const { return barriers() + C::kBarriers; }
    __device__ __forceinline__ char *scratch() const { return base + C::kRingBytes + C::kControlBytes; }
    __device__ __forceinline__ char *own() const { return scratch() + C::kScratchBytes; }

    __device__ __forceinline__ Ring<C> ring(const Params &params) const {
        const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), team = warp / C::kTeam;
        return {params,
                base + team * (C::kRingBytes / C::kTeams),
                barriers() + team * 2 * C::kStages,
                valid() + team * C::kStages,
                team,
                warp % C::kTeam,
                static_cast<int>(threadIdx.x % 32),
                {}};
    }
};

/* A worker's jobs, tile by tile. `sink` takes the states: emit(state, opens) one that is folded elsewhere (the first of
 * a group or group so far if it opens one), fold_total(state) a whole group of a job that begins here, end(...) what is
 * left when a part of a job is done. */
template <class C, class Sink>
__device__ __forceinline__ void attend(const Params &params, Ring<C> ring, Walk<C> work, Walk<C> ahead, bool more,
                                       Sink &sink) {
    int stage = 0;
    uint32_t parity = 0;
    for (bool any = work.find(params); any; any = work.next(params)) {
        const Sequence sequence = sequence_of<C>(params, work.b, work.before_q, work.before_k);
        Rows<C> rows;
        rows.load(params, sequence.entry, work.b, work.head, work.block * C::kRows + ring.member * C::kWarpRows);
        sink.begin(work);
        Chunk<C> group, chunk;
        bool open = false; // the group holds a chunk
        if (work.empty()) group.clear();
#pragma unroll 1
        for (int k = work.chunk; k < work.chunk_end; ++k) {
            const int first = max(k << work.shift, work.first_tile()),
                      last = min((k + 1) << work.shift, work.last_tile());
            chunk.clear();
#pragma unroll 1
            for (int tile = first; tile < last; ++tile) {
                typename Chunk<C>::Scores s;
                mbarrier_wait(ring.barrier(stage, 0), parity);
                const uint64_t valid = ring.valid[stage];
                chunk.multiply_keys(s, rows, ring.tile(stage, 0));
                ring.release();
                if (more) ring.start_keys(ahead, stage);
                chunk.score(s, params, rows, tile * kTileKeys, valid);
                chunk.soften(s, tile == first);
                mbarrier_wait(ring.barrier(stage, 1), parity);
                if (~valid) {
                    clear_rows<C>(ring.tile(stage, 1), valid, ring.member, ring.lane);
                    ring.release();
                }
                chunk.multiply_values(s, ring.tile(stage, 1));
                ring.release();
                if (more) {
                    ring.start_values(ahead, stage);
                    more = ahead.next_tile(params);
                }
                if (++stage == C::kStages) stage = 0, parity ^= 1;
            }
            chunk.close();
            const bool opens = k % kGroup == 0 || k == work.first_chunk();
            if (open && opens) {
                if (sink.folds(work))
                    sink.fold_total(group);
                else
                    sink.emit(group, true);
                open = false;
            }
            if (opens || open) {
                group.take(chunk, !open);
                open = true;
            } else {
                sink.emit(chunk, false);
            }
        }
        sink.end(work, sequence, group, open);
    }
}

/* The first tiles of a worker's range; false: there are no more. */
template <class C> __device__ __forceinline__ bool start(const Params &params, Ring<C> &ring, Walk<C> &ahead) {
    bool more = ahead.find_tile(params);
    for (int stage = 0; stage < C::kStages && more; ++stage) {
        ring.start_keys(ahead, stage);
        ring.start_values(ahead, stage);
        more = ahead.next_tile(params);
    }
    return more;
}

/* A lane's accumulators of a chunk, in the order in which they lie in memory. */
template <class C, class Each> __device__ __forceinline__ void each_quad(Each &&each) {
#pragma unroll
    for (int m = 0; m < C::kColumns / 16; ++m)
#pragma unroll
        for (int n = 0; n < C::kRowTiles; ++n) each(m, n, (m * C::kRowTiles + n) * 32 + threadIdx.x % 32);
}

template <class C> struct PersistentSink {
    using T = typename C::T;
    const Params &params;
    const Ring<C> &ring;
    float4 *totals; // of this warp
    RowState total[C::kLaneRows];
    bool has_total;
    Record record;
    int states; // left so far

    __device__ __forceinline__ int64_t workers() const { return int64_t(gridDim.x) * C::kTeams; }
    __device__ __forceinline__ int64_t worker() const { return int64_t(blockIdx.x) * C::kTeams + ring.team; }
    __device__ __forceinline__ Workspace<C> workspace() const { return {params.workspace, params.states}; }

    __device__ __forceinline__ void begin(const Walk<C> &) { has_total = false; }
    __device__ __forceinline__ bool folds(const Walk<C> &work) const { return work.begins(); }

    __device__ __forceinline__ void fold_total(const Chunk<C> &group) {
        Factors f[C::kLaneRows];
#pragma unroll
        for (int r = 0; r < C::kLaneRows; ++r)
            if (has_total)
                f[r] = fold_state(total[r], group.state[r].maximum, group.state[r].sum);
            else
                total[r] = group.state[r];
        each_quad<C>([&](int m, int n, int at) {
            const float(&x)[4] = group.out[m][n];
            float4 sum = make_float4(x[0], x[1], x[2], x[3]);
            if (has_total) {
                const float4 old = totals[at];
                sum.x = fold_value(old.x, sum.x, f[2 * n]), sum.y = fold_value(old.y, sum.y, f[2 * n + 1]);
                sum.z = fold_value(old.z, sum.z, f[2 * n]), sum.w = fold_value(old.w, sum.w, f[2 * n + 1]);
            }
            totals[at] = sum;
        });
        has_total = true;
    }

    /* The total, with the last group in it. */
    __device__ __forceinline__ void total_of(Chunk<C> &group) {
        if (!has_total) return;
        Factors f[C::kLaneRows];
#pragma unroll
        for (int r = 0; r < C::kLaneRows; ++r) {
            f[r] = fold_state(total[r], group.state[r].maximum, group.state[r].sum);
            group.state[r] = total[r];
        }
        each_quad<C>([&](int m, int n, int at) {
            const float4 old = totals[at];
            float(&x)[4] = group.out[m][n];
            x[0] = fold_value(old.x, x[0], f[2 * n]), x[1] = fold_value(old.y, x[1], f[2 * n + 1]);
            x[2] = fold_value(old.z, x[2], f[2 * n]), x[3] = fold_value(old.w, x[3], f[2 * n + 1]);
        });
    }

    template <class Quad> __device__ __forceinline__ void leave(const RowState *rows, Quad &&quad) {
        char *state = workspace().state(workers(), worker(), states++);
        float4 *to = reinterpret_cast<float4 *>(state) + ring.member * (C::kWarpRows * C::kColumns / 4);
        each_quad<C>([&](int m, int n, int at) { to[at] = quad(m, n, at); });
        float2 *stats = reinterpret_cast<float2 *>(state + Workspace<C>::kAccumulators) + ring.member * C::kWarpRows;
        if (ring.lane < 4)
#pragma unroll
            for (int r = 0; r < C::kLaneRows; ++r)
                stats[r / 2 * 8 + 2 * ring.lane + r % 2] = make_float2(rows[r].maximum, rows[r].sum);
    }
    __device__ __forceinline__ void leave(const Chunk<C> &x) {
        leave(x.state, [&](int m, int n, int) {
            return make_float4(x.out[m][n][0], x.out[m][n][1], x.out[m][n][2], x.out[m][n][3]);
        });
    }
    __device__ __forceinline__ void emit(const Chunk<C> &x, bool opens) {
        leave(x);
        opens ? ++record.head_groups : ++record.head_continues;
    }

    __device__ __forceinline__ void end(const Walk<C> &work, const Sequence &sequence, Chunk<C> &group, bool open) {
        if (!work.begins()) {
            if (open) emit(group, true);
            record.head_done = work.ends();
        } else if (work.ends()) {
            total_of(group);
            write(work, sequence, group);
        } else {
            record.b = work.b, record.head = work.head, record.block = work.block;
            record.before_q = work.before_q, record.before_k = work.before_k;
            if (has_total) leave(total, [&](int, int, int at) { return totals[at]; });
            record.total = has_total;
            leave(group);
            record.group = 1;
        }
        if (work.begins() && work.block == 0 && ring.member == 0) {
            const fa_entry &e = sequence.entry;
            write_nothing<T>(params, work.b, work.head, e.first_q + e.seq_q, sequence.rows_end);
            if (work.b == 0) write_nothing<T>(params, 0, work.head, 0, e.first_q);
        }
    }

    __device__ __forceinline__ void write(const Walk<C> &work, const Sequence &sequence, const Chunk<C> &x) const {
        const int first = work.block * C::kRows + ring.member * C::kWarpRows;
        const int64_t count = sequence.entry.seq_q * params.group;
#pragma unroll
        for (int r = 0; r < C::kLaneRows; ++r) {
            const int index = first + r / 2 * 8 + 2 * (ring.lane % 4) + r % 2;
            if (index >= count) continue;
            const RowPlace row = row_place(params, work.b, work.head, sequence.entry.first_q, index);
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
        if (params.load == BOXES) tensor_map_prefetch(&params.k_map), tensor_map_prefetch(&params.v_map);
    }
    __syncthreads();
    dependency_wait();
    dependency_release(); // the second kernel's blocks have room beside these
    Start *starts = reinterpret_cast<Start *>(shared.scratch() + C::kWarps * 8);
    const Walk<C> work = deal<C>(params, reinterpret_cast<int64_t *>(shared.scratch()), starts);
    Walk<C> ahead = work;
    const bool more = start(params, ring, ahead);
    if (params.p.batch == 0 && blockIdx.x == 0 && ring.member == 0) // rows of no sequence
        for (int head = ring.team; head < params.p.heads_kv; head += C::kTeams)
            write_nothing<typename C::T>(params, 0, head, 0, params.p.seq_q);
    float4 *totals = reinterpret_cast<float4 *>(shared.own()) + threadIdx.x / 32 * (C::kWarpRows * C::kColumns / 4);
    PersistentSink<C> sink{params, ring, totals, {}, false, {}, 0};
    attend<C>(params, ring, work, ahead, more, sink);
    if (ring.member == 0 && ring.lane == 0) *sink.workspace().record(sink.worker()) = sink.record;
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
    __device__ __forceinline__ void take(const char *state, int item, int row, bool opens) {
        const float4 x = reinterpret_cast<const float4 *>(state)[item];
        const float4 stats = *reinterpret_cast<const float4 *>(state + Workspace<C>::kAccumulators + row * 8);
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

template <class C>
__global__ void __launch_bounds__(kMergeThreads) serve_merge_kernel(const __grid_constant__ Params params) {
    FA_CHAOS_BEGIN();
    dependency_wait();
    dependency_release();
    const Workspace<C> workspace{params.workspace, params.states};
    const int64_t workers = gridDim.x;
    const Record record = *workspace.record(blockIdx.x);
    if (!record.group) return;
    const Sequence sequence = sequence_of<C>(params, record.b, record.before_q, record.before_k);
    const int64_t count = sequence.entry.seq_q * params.group;
    for (int item = threadIdx.x; item < C::kRows * C::kColumns / 4; item += kMergeThreads) {
        constexpr int kOfWarp = C::kWarpRows * C::kColumns / 4;
        const int lane = item % 32, tile = item % kOfWarp / 32, m = tile / C::kRowTiles, n = tile % C::kRowTiles;
        const int row = item / kOfWarp * C::kWarpRows + 8 * n + 2 * (lane % 4), first = record.block * C::kRows + row;
        if (first >= count) continue;
        Merge<C> merge;
        int left = record.head_continues + record.head_groups;
        if (record.total) {
            merge.take(workspace.state(workers, blockIdx.x, left++), item, row, true);
            merge.close_group();
        }
        merge.take(workspace.state(workers, blockIdx.x, left), item, row, true);
        for (int64_t worker = blockIdx.x + 1; worker < workers; ++worker) {
            const Record other = *workspace.record(worker);
            for (int n = 0; n < other.head_continues + other.head_groups; ++n)
                merge.take(workspace.state(workers, worker, n), item, row, n >= other.head_continues);
            if (other.head_done) break;
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
