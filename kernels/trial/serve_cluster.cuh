/* serve_sm90: the form of low latency. A cluster works out one job; the states of all its workers meet in shared
 * memory, distributed over the cluster, where each block folds and writes 8 columns, or a few times 8, of the output.
 *
 * A slot is a state: as many as the workers leave, which every block knows from the keys alone. Each block gets its
 * columns of all slots, and the maxima and sums of all rows, and counts the bytes on `arrived`, which has one phase:
 * all wait for its end, so nobody can be two phases behind. Nobody sends before the cluster's barrier, after which
 * every block's `arrived` is ready, and no block ends before all that is sent to it has arrived. */
#pragma once
#include "trial/serve_kernel.cuh"

namespace fa::sm90::serve {

/* Where states arrive in a block's shared memory; the same layout in all blocks of a cluster. */
template <class C> struct Landing {
    static constexpr int kMaxGroups = kMaxChunks / kGroup + 2;
    static constexpr int kMaxWorkers = kMaxCluster * C::kTeams;
    int slots, rows, cluster; // there is room for
    char *base;

    __host__ __device__ int pairs() const { return (rows + 1) / 2; }                      // of rows
    __host__ __device__ int units() const { return (C::kUnits + cluster - 1) / cluster; } // of 8 columns, a block
    __host__ __device__ int value_bytes() const { return units() * pairs() * 64; }        // of a slot
    __host__ __device__ int state_bytes() const { return 2 * pairs() * 8; }
    __host__ __device__ size_t bytes() const {
        return size_t(slots) * (value_bytes() + state_bytes()) + (kMaxGroups + 1 + kMaxWorkers + 1) * 4;
    }
    /* What the groups of its columns are folded to has room in the ring. */
    __host__ __device__ bool fits(size_t room) const {
        return bytes() <= room && size_t(units()) * pairs() * 8 * kMaxGroups * sizeof(Part) <= C::kRingBytes;
    }

    struct Part { // two rows of a column
        float2 value, state[2];
    };

    /* Units of 8 columns [first_unit(rank), first_unit(rank + 1)) are the block's of that rank. */
    __device__ __forceinline__ int first_unit(int rank) const { return (rank * C::kUnits + cluster - 1) / cluster; }
    __device__ __forceinline__ int owner(int unit) const { return unit * cluster / C::kUnits; }
    __device__ __forceinline__ float2 *value(int slot, int unit, int pair) const {
        return reinterpret_cast<float2 *>(base + slot * value_bytes()) + (unit * pairs() + pair) * 8;
    }
    __device__ __forceinline__ float2 *state(int slot, int row) const {
        return reinterpret_cast<float2 *>(base + slots * value_bytes() + slot * state_bytes()) + row;
    }
    __device__ __forceinline__ int *group_first() const { // slot of each group's first state, and one past the last
        return reinterpret_cast<int *>(base + slots * (value_bytes() + state_bytes()));
    }
    __device__ __forceinline__ int *
    worker_first() const { // slot of each worker's first state, and how many groups there are
        return group_first() + kMaxGroups + 1;
    }
};

/* Where the range of a worker of a cluster begins. */
__device__ __forceinline__ int share_from(unsigned cost, unsigned worker, unsigned workers) {
    return static_cast<int>(cost * worker / workers);
}

/* Deals the slots: each worker leaves single chunks until the first whole group, then groups. One warp. Returns how
 * many slots there are; `groups`: how many groups. */
template <class C>
__device__ __forceinline__ int deal_slots(const Landing<C> &landing, const Walk<C, int> &job, unsigned cost,
                                          int *groups) {
    const int lane = threadIdx.x % 32, workers = landing.cluster * C::kTeams;
    int slot = 0, group = 0;
    for (int base = 0; base < workers; base += 32) {
        const int worker = base + lane;
        int continues = 0, opens = 0;
        if (worker < workers && !job.empty()) {
            const int from = job.chunk_from(share_from(cost, worker, workers)),
                      to = job.chunk_from(share_from(cost, worker + 1, workers));
            const int head = from == job.first_chunk() ? from : min((from + kGroup - 1) / kGroup * kGroup, to);
            if (from < to) continues = head - from;
            if (from < to && head < to) opens = (to - 1) / kGroup - head / kGroup + 1;
        }
        int before = continues + opens << 16 | opens; // sums of both; there are fewer than 2^15
#pragma unroll
        for (int by = 1; by < 32; by *= 2) {
            const int other = __shfl_up_sync(~0u, before, by);
            if (lane >= by) before += other;
        }
        const int all = __shfl_sync(~0u, before, 31);
        before -= continues + opens << 16 | opens;
        const int first = slot + (before >> 16);
        if (worker < workers) landing.worker_first()[worker] = first;
        for (int n = 0; n < opens; ++n) landing.group_first()[group + (before & 0xffff) + n] = first + continues + n;
        slot += all >> 16, group += all & 0xffff;
    }
    if (lane == 0) landing.group_first()[group] = slot;
    *groups = group;
    return slot;
}

template <class C> struct ClusterSink {
    const Params &params;
    const Ring<C> &ring;
    const Landing<C> &landing;
    uint64_t *arrived;
    int slot, rows; // the next one; rows of the job

    __device__ __forceinline__ bool folds(const Walk<C, int> &) const { return false; }
    __device__ __forceinline__ void fold_total(const Chunk<C> &, bool) const {}

    __device__ __forceinline__ void emit(const Chunk<C> &x, bool) {
        const uint32_t barrier = shared_address(arrived);
#pragma unroll
        for (int n = 0; n < C::kRowTiles; ++n) {
            const int row = ring.member * C::kWarpRows + 8 * n + 2 * (ring.lane % 4);
            if (row >= rows) continue;
            int owner = -1, local = 0;
#pragma unroll
            for (int unit = 0; unit < C::kUnits; ++unit) {
                const int next = landing.owner(unit);
                local = next == owner ? local + 1 : 0, owner = next;
                const float2 *to = landing.value(slot, local, row / 2) + ring.lane / 4;
                const float *from = x.out[unit / 2][n] + unit % 2 * 2;
                cluster_send(cluster_address(shared_address(to), owner), cluster_address(barrier, owner),
                             make_float2(from[0], from[1]));
            }
#pragma unroll
            for (int r = 2 * n; r < 2 * n + 2; ++r) {
                const uint32_t to = shared_address(landing.state(slot, row + r % 2));
                for (int rank = ring.lane / 4; rank < landing.cluster; rank += 8)
                    cluster_send(cluster_address(to, rank), cluster_address(barrier, rank),
                                 make_float2(x.state[r].maximum, x.state[r].sum));
            }
        }
        ++slot;
    }
    __device__ __forceinline__ void end(Chunk<C> &group, bool open, bool) {
        if (open) emit(group, true);
    }
};

/* A state of two rows of one column, and another folded into it. */
template <class Part>
__device__ __forceinline__ void fold_part(Part &to, float2 value, float2 a, float2 b, bool first) {
    if (first) {
        to = {value, {a, b}};
        return;
    }
    const auto fold = [](float &old, float2 &state, float added, float2 other) {
        RowState row;
        row.maximum = state.x, row.sum = state.y;
        const Factors f = fold_state(row, other.x, other.y);
        old = fold_value(old, added, f), state = make_float2(row.maximum, row.sum);
    };
    fold(to.value.x, to.state[0], value.x, a);
    fold(to.value.y, to.state[1], value.y, b);
}

/* Folds what has arrived and writes this block's columns: first the groups side by side, then each column's groups. */
template <class C>
__device__ __forceinline__ void finish_columns(const Params &params, const Landing<C> &landing, const Walk<C, int> &job,
                                               const fa_entry &entry, int rank, int groups, char *memory) {
    using Part = typename Landing<C>::Part;
    Part *parts = reinterpret_cast<Part *>(memory);
    const int rows = static_cast<int>(entry.seq_q) * params.group, pairs = (rows + 1) / 2;
    const int first_unit = landing.first_unit(rank), items = (landing.first_unit(rank + 1) - first_unit) * pairs * 8;
    for (int n = threadIdx.x; n < items * groups; n += C::kThreads) {
        const int group = n / items, item = n - group * items, column = item % 8, pair = item / 8 % pairs;
        Part part = {};
        const int first = landing.group_first()[group], last = landing.group_first()[group + 1];
        for (int slot = first; slot < last; ++slot) {
            const float2 *state = landing.state(slot, 2 * pair);
            fold_part(part, landing.value(slot, item / 8 / pairs, pair)[column], state[0], state[1], slot == first);
        }
        parts[n] = part;
    }
    __syncthreads();
    for (int item = threadIdx.x; item < items; item += C::kThreads) {
        const int pair = item / 8 % pairs, unit = first_unit + item / 8 / pairs, column = unit * 8 + item % 8;
        Part part = {make_float2(0.0f, 0.0f), {make_float2(-INFINITY, 0.0f), make_float2(-INFINITY, 0.0f)}};
        for (int group = 0; group < groups; ++group) {
            const Part &x = parts[group * items + item];
            fold_part(part, x.value, x.state[0], x.state[1], group == 0);
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            if (2 * pair + r >= rows) continue;
            const RowPlace row = row_place(params, job.b, job.head, entry.first_q, 2 * pair + r);
            RowState state;
            state.maximum = part.state[r].x, state.sum = part.state[r].y;
            const float factor = finish(params, row, state, column == 0), value = r ? part.value.y : part.value.x;
            store_out<typename C::T>(params, row, column, factor == 0.0f ? 0.0f : __fmul_rn(value, factor));
        }
    }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) serve_cluster_sm90_kernel(const __grid_constant__ Params params) {
    FA_CHAOS_BEGIN();
    extern __shared__ __align__(1024) char shared_memory[];
    const Shared<C> shared{shared_memory};
    Ring<C> ring = shared.ring(params);
    const int rank = static_cast<int>(cluster_rank()), index = static_cast<int>(cluster_index());
    const Landing<C> landing{params.landing_slots, params.landing_rows, params.cluster, shared.own()};
    if (ring.member == 0 && ring.lane == 0) {
        ring.init();
        if (ring.team == 0) mbarrier_init(shared.arrived(), 1);
        mbarrier_init_fence();
        if (params.load == Load::kBoxes) tensor_map_prefetch(&params.k_map), tensor_map_prefetch(&params.v_map);
    }
    __syncthreads();
    cluster_arrive_relaxed();
    dependency_wait();
    dependency_release();

    Walk<C, int> job = {};
    job.b = index / static_cast<int>(params.p.heads_kv), job.head = index - job.b * static_cast<int>(params.p.heads_kv);
    const bool packed = params.s.q.starts || params.s.k.starts;
#pragma unroll 1
    for (int b = 0; packed && b < job.b; ++b) {
        job.before_q = rows_before(params.s.q, b, job.before_q);
        job.before_k = rows_before(params.s.k, b, job.before_k);
    }
    job.enter(params);
    const unsigned cost = job.sequence.cost(); // below 2^25: times workers it is below 2^31
    const int worker = rank * C::kTeams + ring.team, workers = params.cluster * C::kTeams;
    job.begin = share_from(cost, worker, workers), job.end = share_from(cost, worker + 1, workers);
    Notes<C, int> *notes = shared.template notes<int>();
    Tile ahead;
    const bool more = start(params, ring, job, notes, ahead);

    const Sequence &sequence = job.sequence;
    const int rows = static_cast<int>(sequence.entry.seq_q) * params.group;
    if (threadIdx.x < 32) {
        int groups;
        const int slots = deal_slots(landing, job, cost, &groups);
        if (threadIdx.x == 0) {
            const int units = landing.first_unit(rank + 1) - landing.first_unit(rank);
            mbarrier_arrive_expect(shared.arrived(), slots * (units * ((rows + 1) / 2) * 64 + (rows + 1) / 2 * 16));
            landing.worker_first()[workers] = groups;
        }
    }
    __syncthreads();
    cluster_wait();
    ClusterSink<C> sink{params, ring, landing, shared.arrived(), landing.worker_first()[worker], rows};
    attend(params, ring, notes, ahead, more, sink);
    if (rank == 0 && threadIdx.x < 32) {
        write_nothing<typename C::T>(params, job.b, job.head, sequence.entry.first_q + sequence.entry.seq_q,
                                     sequence.rows_end);
        if (job.b == 0) write_nothing<typename C::T>(params, 0, job.head, 0, sequence.entry.first_q);
    }
    __syncthreads(); // the ring is free: what is in flight has been waited for
    mbarrier_wait(shared.arrived(), 0);
    finish_columns<C>(params, landing, job, sequence.entry, rank, landing.worker_first()[workers], shared.base);
}

} // namespace fa::sm90::serve
