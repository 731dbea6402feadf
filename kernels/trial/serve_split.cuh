/* serve_sm90: the split form. As many blocks a job as all multiprocessors have room for at once, each by itself; what
 * their workers leave lies in workspace, a slot for each chunk of a job, and serve_fold_kernel folds it, a block for
 * each 8 columns of a job. Its launch does not wait for the end of the one before: its blocks have room beside them. */
#pragma once
#include "sm90/cluster.cuh" // dependency_wait, dependency_release
#include "trial/serve_job.cuh"

namespace fa::sm90::serve {

/* A job's slots in workspace: float2 [units of 8 columns][pairs of rows][8], then the states of the pairs. */
template <class C> struct SplitSlots {
    char *base; // of the job
    int pairs;

    __host__ __device__ static size_t bytes(int pairs) { return size_t(pairs) * (C::kUnits * 64 + 16); } // of a slot
    __device__ __forceinline__ SplitSlots(const Params &params, const Job &job) : pairs((params.job_rows + 1) / 2) {
        const int64_t number = int64_t(job.b) * params.p.heads_kv + job.head;
        base = params.workspace + number * params.slots * bytes(pairs);
    }
    __device__ __forceinline__ float2 *value(int slot, int unit, int pair) const {
        return reinterpret_cast<float2 *>(base + slot * bytes(pairs)) + (unit * pairs + pair) * 8;
    }
    __device__ __forceinline__ float4 *state(int slot, int pair) const {
        return reinterpret_cast<float4 *>(base + slot * bytes(pairs) + pairs * (C::kUnits * 64)) + pair;
    }
};

template <class C> struct SplitSink {
    const Ring<C> &ring;
    const SplitSlots<C> slots;
    int first_chunk, rows; // of the job

    __device__ __forceinline__ void fold_total(const Chunk<C> &, bool) const {}

    __device__ __forceinline__ void emit(const Chunk<C> &x, int chunk, bool) const {
        const int slot = chunk - first_chunk;
#pragma unroll
        for (int n = 0; n < C::kRowTiles; ++n) {
            const int row = ring.member * C::kWarpRows + 8 * n + 2 * (ring.lane % 4);
            if (row >= rows) continue;
            float2 *to = slots.value(slot, 0, row / 2) + ring.lane / 4;
#pragma unroll
            for (int unit = 0; unit < C::kUnits; ++unit) {
                const float *from = x.out[unit / 2][n] + unit % 2 * 2;
                to[unit * slots.pairs * 8] = make_float2(from[0], from[1]);
            }
            const RowState &a = x.state[2 * n], &b = x.state[2 * n + 1];
            if (ring.lane < 4) *slots.state(slot, row / 2) = make_float4(a.maximum, a.sum, b.maximum, b.sum);
        }
    }
    __device__ __forceinline__ void end(const Chunk<C> &group, int opened, bool open, bool) const {
        if (open) emit(group, opened, true);
    }
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) serve_split_sm90_kernel(const __grid_constant__ Params params) {
    FA_CHAOS_BEGIN();
    extern __shared__ __align__(1024) char shared_memory[];
    const Shared<C> shared{shared_memory};
    Ring<C> ring = shared.ring(params);
    if (ring.member == 0 && ring.lane == 0) {
        if (params.load == Load::kBoxes) tensor_map_prefetch(&params.k_map), tensor_map_prefetch(&params.v_map);
        ring.init();
        mbarrier_init_fence();
    }
    dependency_release();
    ring.release();                    // nobody but the team uses its ring
    const bool reads = params.s.given; // memory, to know the job
    if (reads) {
        if (threadIdx.x < 32) prefetch_job(params, static_cast<int>(blockIdx.y));
        dependency_wait();
    }
    const Job job = job_of_block<C>(params);
    const Shares shares(job, params.parts * C::kTeams);
    const int worker = static_cast<int>(blockIdx.y) * C::kTeams + ring.team;
    ShareAhead ahead(job, shares, worker);
    if (!reads) {
        ring.prefetch(ahead.tile);
        ring.find(ahead.tile); // no table
        dependency_wait();
    } else if (ahead.more) {
        ring.find(ahead.tile);
    }
    fill(ring, ahead);
    const SplitSink<C> sink{ring, SplitSlots<C>(params, job), job.first, job.rows(params)};
    attend_share<C>(params, ring, job, shares, worker, reinterpret_cast<LaneRow *>(shared.notes()), ahead, sink);
}

constexpr int kFoldThreads = 256;

/* Block (kv head, unit, sequence): 8 columns of a job. */
template <class C>
__global__ void __launch_bounds__(kFoldThreads) serve_fold_kernel(const __grid_constant__ Params params) {
    FA_CHAOS_BEGIN();
    extern __shared__ __align__(16) char shared_memory[];
    dependency_release();
    if (params.s.given) dependency_wait();
    const Job job = job_of_block<C>(params);
    const Shares shares(job, params.parts * C::kTeams);
    const SplitSlots<C> slots(params, job);
    const int unit = static_cast<int>(blockIdx.y), slot_bytes = static_cast<int>(slots.bytes(slots.pairs));
    fold_job<C>(
        params, job, shares, unit, 1, reinterpret_cast<Part *>(shared_memory), [] { dependency_wait(); },
        [&](int, int pair, int column) {
            const char *value = reinterpret_cast<const char *>(slots.value(0, unit, pair) + column),
                       *state = reinterpret_cast<const char *>(slots.state(0, pair));
            keep(value), keep(state);
            return [=, first = job.first](int chunk, int) {
                const int at = (chunk - first) * slot_bytes;
                return Part{*reinterpret_cast<const float2 *>(value + at),
                            *reinterpret_cast<const float4 *>(state + at)};
            };
        });
}

} // namespace fa::sm90::serve
