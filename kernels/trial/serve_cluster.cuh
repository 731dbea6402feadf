/* serve_sm90: the cluster form, for jobs of few chunks. A cluster works out one job; the states of all its workers meet
 * in shared memory, distributed over the cluster, where each block folds and writes 8 columns, or a few times 8, of the
 * output.
 *
 * Each block gets its columns of all states, and the maxima and sums of all rows, and counts the bytes on `arrived`,
 * which has one phase: all wait for its end, so nobody can be two phases behind. Nobody sends before the cluster's
 * barrier, after which every block's `arrived` is ready, and no block ends before all that is sent to it has arrived.
 */
#pragma once
#include "sm90/cluster.cuh"
#include "trial/serve_job.cuh"

namespace fa::sm90::serve {

/* Where states arrive in a block's shared memory; the same layout in all blocks of a cluster. */
template <class C> struct Landing {
    int slots, rows, cluster; // there is room for
    char *base;

    __host__ __device__ int pairs() const { return (rows + 1) / 2; }                      // of rows
    __host__ __device__ int units() const { return (C::kUnits + cluster - 1) / cluster; } // of 8 columns, a block
    __host__ __device__ int value_bytes() const { return units() * pairs() * 64; }        // of a slot
    __host__ __device__ int state_bytes() const { return pairs() * 16; }
    __host__ __device__ size_t bytes() const { return size_t(slots) * (value_bytes() + state_bytes()); }
    /* What the groups of its columns are folded to has room in the ring. */
    __host__ __device__ bool fits(size_t room) const {
        return bytes() <= room && size_t(units()) * pairs() * 8 * (slots / kGroup + 2) * sizeof(Part) <= C::kRingBytes;
    }

    /* The slot of the state that begins at `chunk`, the first one of `group` or (-1) a single one. */
    __device__ __forceinline__ int slot(const Shares &shares, int chunk, int group) const {
        if (slots >= shares.last - shares.first) return chunk - shares.first;
        if (group >= 0) return group;
        const int owner = shares.owner(chunk); // has fewer than 8 single ones, and the first owner has none
        return shares.groups() + (owner - 1) * (kGroup - 1) + chunk - shares.begin(owner);
    }
    /* Units of 8 columns [first_unit(rank), first_unit(rank + 1)) are the block's of that rank. */
    __device__ __forceinline__ int first_unit(int rank) const { return (rank * C::kUnits + cluster - 1) / cluster; }
    __device__ __forceinline__ int owner(int unit) const { return unit * cluster / C::kUnits; }
    __device__ __forceinline__ float2 *value(int slot, int unit, int pair) const {
        return reinterpret_cast<float2 *>(base + slot * value_bytes()) + (unit * pairs() + pair) * 8;
    }
    __device__ __forceinline__ float4 *state(int slot, int pair) const {
        return reinterpret_cast<float4 *>(base + slots * value_bytes() + slot * state_bytes()) + pair;
    }
};

template <class C> struct ClusterSink {
    const Ring<C> &ring;
    const Landing<C> &landing;
    const Shares &shares;
    uint64_t *arrived;
    int rows; // of the job

    __device__ __forceinline__ void fold_total(const Chunk<C> &, bool) const {}

    __device__ __forceinline__ void emit(const Chunk<C> &x, int chunk, bool opens) const {
        const uint32_t barrier = shared_address(arrived);
        const int slot = landing.slot(shares, chunk, opens ? chunk / kGroup - shares.first_group() : -1);
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
            const RowState &a = x.state[2 * n], &b = x.state[2 * n + 1];
            const uint32_t to = shared_address(landing.state(slot, row / 2));
#pragma unroll 1
            for (int rank = ring.lane / 4; rank < landing.cluster; rank += 8)
                cluster_send(cluster_address(to, rank), cluster_address(barrier, rank),
                             make_float4(a.maximum, a.sum, b.maximum, b.sum));
        }
    }
    __device__ __forceinline__ void end(const Chunk<C> &group, int opened, bool open, bool) const {
        if (open) emit(group, opened, true);
    }
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) serve_cluster_sm90_kernel(const __grid_constant__ Params params) {
    FA_CHAOS_BEGIN();
    extern __shared__ __align__(1024) char shared_memory[];
    const Shared<C> shared{shared_memory};
    Ring<C> ring = shared.ring(params);
    const int rank = static_cast<int>(cluster_rank());
    const Landing<C> landing{params.slots, params.job_rows, params.parts, shared.own()};
    if (ring.member == 0 && ring.lane == 0) {
        if (params.load == Load::kBoxes) tensor_map_prefetch(&params.k_map), tensor_map_prefetch(&params.v_map);
        ring.init();
        if (ring.team == 0) mbarrier_init(shared.arrived(), 1);
        mbarrier_init_fence();
    }
    dependency_release();
    __syncthreads();
    cluster_arrive_relaxed();
    const bool reads = params.s.given; // memory, to know the job
    if (reads) {
        if (threadIdx.x < 32) prefetch_job(params, rank);
        dependency_wait();
    }
    const Job job = job_of_block<C>(params);
    const Shares shares(job, params.parts * C::kTeams);
    const int worker = rank * C::kTeams + ring.team, rows = job.rows(params), groups = shares.groups();
    ShareAhead ahead(job, shares, worker);
    if (!reads) {
        ring.prefetch(ahead.tile);
        ring.find(ahead.tile); // no table
        dependency_wait();
    } else if (ahead.more) {
        ring.find(ahead.tile);
    }
    fill(ring, ahead);
    if (threadIdx.x < 32) {
        const int states = ring.lane < groups ? States(shares, ring.lane).count : 0; // fewer groups than lanes
        const int all = __reduce_add_sync(~0u, states), units = landing.first_unit(rank + 1) - landing.first_unit(rank);
        if (threadIdx.x == 0) mbarrier_arrive_expect(shared.arrived(), all * (units * 64 + 16) * ((rows + 1) / 2));
    }
    cluster_wait();
    const ClusterSink<C> sink{ring, landing, shares, shared.arrived(), rows};
    attend_share<C>(params, ring, job, shares, worker, reinterpret_cast<LaneRow *>(shared.notes()), ahead, sink);
    __syncthreads(); // the ring is free: what is in flight has been waited for
    mbarrier_wait(shared.arrived(), 0);
    const int first_unit = landing.first_unit(rank);
    fold_job<C>(
        params, job, shares, first_unit, landing.first_unit(rank + 1) - first_unit,
        reinterpret_cast<Part *>(shared.base), [] {},
        [&](int unit, int pair, int column) {
            return [&, unit, pair, column](int chunk, int group) {
                const int slot = landing.slot(shares, chunk, group);
                return Part{landing.value(slot, unit, pair)[column], *landing.state(slot, pair)};
            };
        });
}

} // namespace fa::sm90::serve
