/* Ids of documents, and of spans -> the intervals of keys that their tokens see (documents.h).
 *
 * A block takes a row at a time, a token a thread. From the last tile to the first it finds where the next document,
 * and the next span, begins, which is where each ends; then, from the first tile on, where each begins. Within a tile a
 * vote finds the place in a warp, and the edges of the warps, in shared memory, beyond it. */
#pragma once

#include <stdint.h> // int32_t, int64_t

#include "common/chaos.cuh" // FA_CHAOS_BEGIN
#include "documents.h"      // fa_run_begins, fa_seen_begin

namespace fa {

constexpr int kTokens = 1024, kTokenWarps = 32; // of a tile

/* The threads' tokens, from `first` on, and the edges of the warps. */
struct TokenTile {
    int64_t first;
    int *edge; // a place, or what stands for none, of each warp

    __device__ __forceinline__ static int lane() { return threadIdx.x % 32; }
    __device__ __forceinline__ static int warp() { return threadIdx.x / 32; }
    __device__ __forceinline__ int64_t token() const { return first + threadIdx.x; }
    __device__ __forceinline__ int of_warp() const { return int(first) + warp() * 32; }

    /* Leaves a warp's edge, which each warp then reads, a lane a warp. */
    __device__ __forceinline__ int exchange(int mine) const {
        __syncthreads(); // all have read the edges before
        if (lane() == 0) edge[warp()] = mine;
        __syncthreads();
        return edge[lane()];
    }

    /* The first token behind one's own whose flag is set; `next`, the first such behind the tile, if none of the tile's
     * is. Moves `next` on to the tile. */
    __device__ __forceinline__ int behind(bool flag, int &next) const {
        const unsigned flags = __ballot_sync(~0u, flag), later = flags & ~((2u << lane()) - 1);
        const int edges = exchange(flags ? of_warp() + __ffs(int(flags)) - 1 : INT32_MAX);
        const int of_others = __reduce_min_sync(~0u, lane() > warp() ? edges : INT32_MAX);
        const int beyond = of_others < next ? of_others : next, all = __reduce_min_sync(~0u, edges);
        next = all < next ? all : next;
        return later ? of_warp() + __ffs(int(later)) - 1 : beyond;
    }

    /* The last token up to one's own whose flag is set; `last`, the last such before the tile, if none of the tile's
     * is. Moves `last` on to the tile. */
    __device__ __forceinline__ int up_to(bool flag, int &last) const {
        const unsigned flags = __ballot_sync(~0u, flag), earlier = flags & ((2u << lane()) - 1);
        const int edges = exchange(flags ? of_warp() + 31 - __clz(int(flags)) : -1);
        const int of_others = __reduce_max_sync(~0u, lane() < warp() ? edges : -1);
        const int before = of_others > last ? of_others : last, all = __reduce_max_sync(~0u, edges);
        last = all > last ? all : last;
        return earlier ? of_warp() + 31 - __clz(int(earlier)) : before;
    }
};

/* By value; names as of fa_documents. */
struct TokenArgs {
    fa_operand ids, spans, intervals;
    int64_t batch, seq, window;
    fa_dtype dtype, spans_dtype;
    bool causal;
};

inline TokenArgs token_args(const fa_documents &p) {
    return {p.ids, p.spans, p.starts, p.batch, p.seq, p.window, p.dtype, p.spans_dtype, p.causal};
}

static __global__ void __launch_bounds__(kTokens) document_intervals_kernel(const __grid_constant__ TokenArgs p) {
    FA_CHAOS_BEGIN();
    __shared__ int edge[kTokenWarps];
    const int seq = static_cast<int>(p.seq);
    const int64_t *stride = p.intervals.stride;
    for (int64_t row = blockIdx.x; row < p.batch; row += gridDim.x) {
        int32_t *out = static_cast<int32_t *>(p.intervals.data) + row * stride[0];
        int end = seq, span_end = seq, start = 0;
        for (int64_t first = (p.seq - 1) / kTokens * kTokens; first >= 0; first -= kTokens) {
            const TokenTile tile = {first, edge};
            const int64_t n = tile.token();
            const bool there = n < p.seq;
            const int my_end = tile.behind(there && fa_run_begins(&p.ids, p.dtype, row, n), end);
            const bool begins = there && fa_run_begins(&p.spans, p.spans_dtype, row, n);
            const int my_span = p.spans.data ? tile.behind(begins, span_end) : 0;
            if (!there) continue;
            const bool in_span = fa_in_span(&p.spans, p.spans_dtype, row, n);
            out[n * stride[1] + stride[2]] = static_cast<int32_t>(fa_seen_end(p.causal, n, my_end, my_span, in_span));
        }
        for (int64_t first = 0; first < p.seq; first += kTokens) {
            const TokenTile tile = {first, edge};
            const int64_t n = tile.token();
            const bool there = n < p.seq;
            const int my_start = tile.up_to(there && fa_run_begins(&p.ids, p.dtype, row, n), start);
            if (there) out[n * stride[1]] = static_cast<int32_t>(fa_seen_begin(p.window, n, my_start));
        }
    }
}

} // namespace fa
