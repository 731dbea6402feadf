/* serve_sm90: what blocks and warps do with their share of a job. */
#pragma once
#include "sm90/common/cluster.cuh" // dependency_wait
#include "sm90/serve/chunk.cuh"
#include "sm90/serve/fold.cuh"
#include "sm90/serve/load.cuh"
#include "sm90/serve/thin.cuh"

namespace fa::sm90::serve {

/* Of a job of few rows. */
template <class C> struct Few {
    LaneRow row[C::kWarps][kFewRows];
    uint64_t full[C::kWarps][C::kSlots];
    uint32_t valid[C::kWarps][C::kSlots];
};

/* Shared by the threads of a block, beside the rings, which come after it. */
template <class C> struct Shared {
    union {
        Few<C> few;
        Thin<C> thin;
    };
    int64_t joined[C::kWarps];
    StateList list;
    static constexpr size_t kRoom = 2048; // before the rings
    static constexpr size_t bytes() {
        const size_t few = C::kRingBytes, thin = C::kThin ? Thin<C>::kRingBytes + Thin<C>::kQueryBytes : 0;
        return kRoom + (few > thin ? few : thin);
    }
};

/* Leaves a state in its slot. */
template <class C>
__device__ __forceinline__ void leave(const Slots<C> &slots, const Job &job, const Chunk<C> &x, int chunk) {
    const int lane = threadIdx.x % 32, slot = chunk - job.first;
    const int row = 2 * (lane % 4);
    if (row >= job.count) return;
    float2 *to = slots.value(slot, 0, row / 2) + lane / 4;
#pragma unroll
    for (int unit = 0; unit < C::kUnits; ++unit) {
        const float *from = x.out[unit / 2] + unit % 2 * 2;
        to[unit * slots.pairs * 8] = make_float2(from[0], from[1]);
    }
    const RowState &a = x.state[0], &b = x.state[1];
    if (lane < 4) *slots.state(slot, row / 2) = make_float4(a.maximum, a.sum, b.maximum, b.sum);
}

/* Works out a chunk, whose first tiles are on their way. */
template <class C>
__device__ __forceinline__ void attend_chunk(const Params &params, const Job &job, Ring<C> &ring, const Rows<C> &rows,
                                             RingState<C::kSlots> &at, Chunk<C> &chunk, int k) {
    const Tiles tiles = job.tiles(k, k + 1);
    chunk.clear();
#pragma unroll 1
    for (int tile = tiles.next; tile < tiles.end; ++tile) {
        typename Chunk<C>::Scores s;
        ring.wait(at);
        const uint32_t valid = ring.valid[at.stage];
        chunk.multiply_keys(s, rows, ring.slot(at.stage));
        __syncwarp();
        C::kSlots % 2 ? ring.start_values(at.stage) : ring.start_keys(at.stage);
        at.advance();
        chunk.score(s, params, rows, tile * kTileKeys, valid);
        chunk.soften(s);
        ring.wait(at);
        if (~valid) ring.clear_rows(at.stage, valid);
        chunk.multiply_values(s, ring.slot(at.stage));
        __syncwarp();
        C::kSlots % 2 ? ring.start_keys(at.stage) : ring.start_values(at.stage);
        at.advance();
    }
    chunk.close();
}

/* Works out the chunks [begin, end) of a job and leaves their states, or with `alone`, where they are all of it and of
 * one group, writes what they make. */
template <class C>
__device__ __forceinline__ void attend(const Params &params, const Job &job, Ring<C> &ring, const Rows<C> &rows,
                                       const Slots<C> &slots, int begin, int end, bool alone) {
    Chunk<C> group, chunk;
    if (alone) {
        group.clear();
#pragma unroll
        for (int r = 0; r < kLaneRows; ++r) group.state[r].maximum = -INFINITY;
    }
    int opened = -1; // the group's first chunk, if it is open
    RingState<C::kSlots> at(0);
#pragma unroll 1
    for (int k = begin; k < end; ++k) {
        attend_chunk(params, job, ring, rows, at, chunk, k);
        const bool opens = k % kGroup == 0 || k == job.first;
        if (!alone && opened >= 0 && opens) leave(slots, job, group, opened), opened = -1;
        if (opens) opened = k;
        if (alone || opened >= 0)
            group.take(chunk, opens);
        else
            leave(slots, job, chunk, k);
    }
    if (alone)
        write_chunk(params, job, group);
    else if (opened >= 0)
        leave(slots, job, group, opened);
}

/* The chunks [begin, end) of a warp of few rows. SetUp: its barriers are not yet. */
template <class C, bool SetUp>
__device__ __forceinline__ void few_part(const Params &params, const Job &job, Few<C> &shared, char *ring_memory,
                                         const Slots<C> &slots, int begin, int end, bool alone) {
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    Ring<C> ring{params,
                 job,
                 ring_memory + warp * C::kSlots * C::kSlotBytes,
                 shared.full[warp],
                 shared.valid[warp],
                 job.tiles(begin, end)};
    if constexpr (SetUp) ring.init(params, shared.full[warp]);
    if (!params.call.s.given) dependency_wait();
    if (begin >= end && !alone) return;
    ring.fill();
    if constexpr (!SetUp) dependency_release(); // so that serve_fold_kernel begins beside the copies, not before
    Rows<C> rows;
    rows.row = shared.row[warp];
    rows.load_queries(params, job);
    rows.load_sight(params, job);
    attend(params, job, ring, rows, slots, begin, end, alone);
}

} // namespace fa::sm90::serve
