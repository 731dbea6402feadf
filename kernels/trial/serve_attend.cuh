/* serve_sm90: a worker's chunks of one job, tile by tile, in whatever form it works. */
#pragma once
#include "common/ring.cuh" // RingState
#include "trial/serve_chunk.cuh"
#include "trial/serve_load.cuh"

namespace fa::sm90::serve {

/* Where a thread's part of shared memory lies: the ring, then barriers, valid words, scratch, then what a form needs.
 */
template <class C> struct Shared {
    char *base;
    __device__ __forceinline__ uint64_t *barriers() const { return reinterpret_cast<uint64_t *>(base + C::kRingBytes); }
    __device__ __forceinline__ uint64_t *arrived() const { return barriers() + C::kBarriers - 1; }
    __device__ __forceinline__ uint64_t *valid() const { return barriers() + C::kBarriers; }
    __device__ __forceinline__ char *scratch() const { return base + C::kRingBytes + C::kControlBytes; }
    __device__ __forceinline__ char *notes() const { // of this warp
        return scratch() + threadIdx.x / 32 * C::kNotesBytes;
    }
    __device__ __forceinline__ char *dealing() const { return scratch() + C::kWarps * C::kNotesBytes; }
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

/* Chunks [chunk, chunk_end) of a job whose first one is first_chunk. */
struct Span {
    int chunk, chunk_end, first_chunk;
    int shift;          // log2 of the tiles of a chunk
    int tile, tile_end; // of the job
};

/* A lane's accumulators of a chunk, in the order in which they lie in memory. */
template <class C, class Each> __device__ __forceinline__ void each_quad(Each &&each) {
#pragma unroll
    for (int m = 0; m < C::kColumns / 16; ++m)
#pragma unroll
        for (int n = 0; n < C::kRowTiles; ++n) each(m, n, (m * C::kRowTiles + n) * 32 + threadIdx.x % 32);
}

/* What the ring is asked for first: as many tiles as it has stages, of which the first has been found. `ahead`: `tile`,
 * the next one to ask for, if there are `more`, and next(), which goes on to the one after it. */
template <class C, class Ahead> __device__ __forceinline__ void fill(Ring<C> &ring, Ahead &ahead) {
#pragma unroll 1
    for (int stage = 0; stage < C::kStages && ahead.more; ++stage) {
        ring.start_keys(ahead.tile, stage);
        ring.start_values(ahead.tile, stage);
        ahead.next();
        if (ahead.more) ring.find(ahead.tile);
    }
}

/* Works out the span's chunks. `sink` takes the states: emit(state, chunk, opens) one that is folded elsewhere, which
 * begins at that chunk (and opens its group or is a single chunk of it); if it `folds`, fold_total(state, total) a
 * whole group of a job that begins here; end(state, chunk, open, total) what is left. */
template <class C, class Ahead, class Sink>
__device__ __forceinline__ void attend(const Params &params, Ring<C> &ring, RingState<C::kStages> &at,
                                       const Rows<C> &rows, const Span &span, bool folds, Ahead &ahead, Sink &sink) {
    Chunk<C> group, chunk;
    bool open = false, total = false; // the group holds a chunk; there is a total
    int opened = span.chunk;
    if (span.chunk >= span.chunk_end) group.clear();
#pragma unroll 1
    for (int k = span.chunk; k < span.chunk_end; ++k) {
        const int first = max(k << span.shift, span.tile), last = min((k + 1) << span.shift, span.tile_end);
        chunk.clear();
#pragma unroll 1
        for (int tile = first; tile < last; ++tile) {
            typename Chunk<C>::Scores s;
            mbarrier_wait(ring.barrier(at.stage, 0), at.parity);
            const uint64_t valid = ring.valid[at.stage];
            chunk.multiply_keys(s, rows, ring.tile(at.stage, 0));
            ring.release();
            if (ahead.more) {
                if constexpr (!C::kFindsAhead) ring.find(ahead.tile);
                ring.start_keys(ahead.tile, at.stage);
            }
            chunk.score(s, params, rows, tile * kTileKeys, valid);
            chunk.soften(s, tile == first);
            mbarrier_wait(ring.barrier(at.stage, 1), at.parity);
            if (~valid) {
                clear_rows<C>(ring.tile(at.stage, 1), valid, ring.member, ring.lane);
                ring.release();
            }
            chunk.multiply_values(s, ring.tile(at.stage, 1));
            ring.release();
            if (ahead.more) {
                ring.start_values(ahead.tile, at.stage);
                ahead.next();
                if (C::kFindsAhead && ahead.more) ring.find(ahead.tile);
            }
            at.advance();
        }
        chunk.close();
        const bool opens = k % kGroup == 0 || k == span.first_chunk;
        if (open && opens) {
            if (folds) {
                sink.fold_total(group, total);
                total = true;
            } else {
                sink.emit(group, opened, true);
            }
            open = false;
        }
        if (opens || open) {
            if (!open) opened = k;
            group.take(chunk, !open);
            open = true;
        } else {
            sink.emit(chunk, k, false);
        }
    }
    sink.end(group, opened, open, total);
}

} // namespace fa::sm90::serve
