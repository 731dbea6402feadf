/* Calls over sequences whose tiles belong to one sequence each: where every sequence lies, and whose each tile is.
 *
 * Span 0 has the rows before all sequences, span b + 1 those of sequence b, span batch + 1 those behind all. Tiles of M
 * rows do not cross spans: of packed rows with starts span n takes the tiles from begin / M + n to end / M + n + 1, one
 * more than it needs at most; else each sequence has the same number of them. Those that follow one another leave no
 * gap, so that every tile is some span's.
 *
 * place_sequences() reads each element of the index arrays once, by one thread, and leaves what it makes of them in
 * workspace. Whatever the arrays hold and become, spans are disjoint, and no later kernel looks at them again. */
#pragma once

#include <stdint.h> // int64_t

#include "common/chaos.cuh"  // FA_CHAOS_BEGIN
#include "common/faults.cuh" // count_faults_of_q, count_faults_of_k
#include "common/mask.cuh"   // Band
#include "fa.h"              // fa_problem

namespace fa {

/* A span: rows [first_q, first_q + rows_q) of what has q's rows, the first seq_q of them queries; of keys alike. */
struct alignas(16) SequencePlace {
    int batch; // of operands that have a batch axis
    int first_q, seq_q, rows_q;
    int first_k, seq_k, rows_k;
    int diagonal, key_begin, key_end; // [key_begin, key_end): what its queries see
    int tile[3];                      // its first one, by Tiling
};

/* The ways in which rows are cut into tiles: by the queries and by the keys that a block owns, and by rows of LSE. */
enum Tiling { kTilesOfQueries, kTilesOfKeys, kTilesOfRows, kTilings };

/* By value. Lengths of a problem whose rows have kBitsInBand. */
struct SequenceTiles {
    fa_sequences sequences;
    int64_t batch, left, right;
    fa_fault_board *faults;
    uint32_t *counters;    // two, which place_sequences() sets to 0; NULL: none
    SequencePlace *places; // (batch + 2)
    int *span[kTilings];   // of each tile; NULL: nobody asks
    int rows[kTilings];    // of a tile
    int tiles[kTilings];

    __host__ __device__ const fa_lengths &lengths(int tiling) const {
        return tiling == kTilesOfKeys ? sequences.k : sequences.q;
    }
    __host__ __device__ bool packed(int tiling) const {
        return tiling == kTilesOfKeys ? sequences.packed_k : sequences.packed_q;
    }
    /* The first tile of span n, which begins with row `begin`; of span batch + 2, how many there are. */
    __host__ __device__ int64_t first_tile(int tiling, int64_t n, int64_t begin) const {
        const fa_lengths &of = lengths(tiling);
        if (of.starts) return begin / rows[tiling] + n;
        const int64_t each = packed(tiling) ? 1 : (of.rows + rows[tiling] - 1) / rows[tiling];
        return fa_clamp(n - 1, 0, batch) * each;
    }
    int64_t count(int tiling) const { return first_tile(tiling, batch + 2, lengths(tiling).rows); }
};

inline SequenceTiles sequence_tiles(const fa_problem *problem, const int (&rows)[kTilings]) {
    const fa_forward &f = problem->forward;
    SequenceTiles t = {
        .sequences = problem->sequences, .batch = f.batch, .left = f.left, .right = f.right, .faults = problem->faults};
    for (int n = 0; n < kTilings; ++n) t.rows[n] = rows[n];
    return t;
}

/* Bytes of workspace; a multiple of 64. */
inline int64_t sequence_tiles_bytes(const SequenceTiles &t) {
    int64_t bytes = (t.batch + 2) * int64_t(sizeof(SequencePlace));
    for (int n = 0; n < kTilings; ++n) bytes += t.count(n) * int64_t(sizeof(int));
    return (bytes + 63) / 64 * 64;
}

/* Gives the tiles their workspace. */
inline void lay_out(SequenceTiles &t, void *workspace) {
    t.places = static_cast<SequencePlace *>(workspace);
    int *spans = reinterpret_cast<int *>(t.places + t.batch + 2);
    for (int n = 0; n < kTilings; ++n) {
        t.tiles[n] = int(t.count(n)), t.span[n] = spans;
        spans += t.tiles[n];
    }
}

constexpr int kPlaceThreads = 512; // of place_sequences

/* The largest x of the threads before this one in the block and of this one, and `before`. `all` gets that of the
 * block. */
struct Largest {
    int before, all;
};
template <int kThreads> __device__ __forceinline__ Largest largest_before(int x, int before, int *scratch) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
        const int other = __shfl_up_sync(~0u, x, by);
        if (lane >= by) x = max(x, other);
    }
    const int left = __shfl_up_sync(~0u, x, 1);
    // All threads of the block make the same passes through both barriers: none is two ahead of another.
    __syncthreads(); // the pass before has been read
    if (lane == 31) scratch[warp] = x;
    __syncthreads();
    Largest found = {lane ? max(left, before) : before, before};
    for (int w = 0; w < kThreads / 32; ++w) {
        found.all = max(found.all, scratch[w]);
        if (w < warp) found.before = max(found.before, scratch[w]);
    }
    return found;
}

/* Where span n ends among packed rows with starts, if no start before is larger; 0 where there are none. */
__device__ __forceinline__ int end_of_span(const fa_lengths &lengths, int64_t n, int64_t batch) {
    if (!lengths.starts) return 0;
    return int(n <= batch ? fa_start(&lengths, n) : lengths.rows);
}

/* The rows of span n. */
__device__ __forceinline__ fa_span rows_of_span(const SequenceTiles &t, int tiling, int64_t n, int begin, int end) {
    const fa_lengths &of = t.lengths(tiling);
    if (of.starts) return {begin, end > begin ? end : begin};
    if (n == 0 || n > t.batch) return {0, 0};
    return fa_rows_to(&of, n - 1, 0, 0, t.packed(tiling));
}

/* The record of span n. */
__device__ __forceinline__ SequencePlace place_of_span(const SequenceTiles &t, int64_t n, fa_span q, fa_span k) {
    SequencePlace place = {};
    place.first_q = int(q.begin), place.rows_q = int(q.end - q.begin);
    place.first_k = int(k.begin), place.rows_k = int(k.end - k.begin);
    for (int tiling = 0; tiling < kTilings; ++tiling)
        place.tile[tiling] = int(t.first_tile(tiling, n, tiling == kTilesOfKeys ? k.begin : q.begin));
    if (n == 0 || n > t.batch) return place;
    const int64_t b = n - 1;
    const fa_entry e = fa_entry_of(&t.sequences, b, q, k);
    const fa_span keys = fa_seen_keys(&e, t.left, t.right, e.diagonal, e.seq_q - 1 + e.diagonal);
    place.batch = int(b);
    place.seq_q = int(e.seq_q), place.seq_k = int(e.seq_k), place.diagonal = int(e.diagonal);
    place.key_begin = int(keys.begin), place.key_end = int(keys.end);
    count_faults_of_q(t.faults, t.sequences, b, q);
    count_faults_of_k(t.faults, t.sequences, b, k);
    return place;
}

/* Writes the spans of the tiles [mine, end) of span n = first + threadIdx.x: a thread the first of its own, and of the
 * others each warp those of every kThreads / 32-th span. All threads of the block call it. */
template <int kThreads>
__device__ __forceinline__ void write_spans(int *span, int first, int mine, int end, int2 (&left)[kThreads]) {
    constexpr int kFirst = 2, kWarps = kThreads / 32;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const auto write = [&](int tile, int n) { span[tile] = n; };
#pragma unroll
    for (int tile = 0; tile < kFirst; ++tile)
        if (mine + tile < end) write(mine + tile, first + int(threadIdx.x));
    // All threads of the block make the same passes through both barriers: none is two ahead of another.
    __syncthreads(); // the pass before has been read
    left[threadIdx.x] = make_int2(mine + kFirst, end);
    __syncthreads();
    const int2 own = left[lane * kWarps + warp];
    for (unsigned some = __ballot_sync(~0u, own.x < own.y); some; some &= some - 1) {
        const int m = __ffs(int(some)) - 1, to = __shfl_sync(~0u, own.y, m);
        for (int tile = __shfl_sync(~0u, own.x, m) + lane; tile < to; tile += 32)
            write(tile, first + m * kWarps + warp);
    }
}

/* Writes places and spans. One block; sequences without positions. A template, for files that do not launch it. */
template <int kThreads>
__global__ void __launch_bounds__(kThreads) place_sequences(const __grid_constant__ SequenceTiles t) {
    FA_CHAOS_BEGIN();
    __shared__ int scratch[2][kThreads / 32];
    __shared__ int2 left[kThreads];
    if (t.counters && threadIdx.x < 2) t.counters[threadIdx.x] = 0;
    int end_q = 0, end_k = 0; // of the spans before this pass
    for (int64_t first = 0; first < t.batch + 2; first += kThreads) {
        const int64_t n = first + threadIdx.x;
        const bool there = n < t.batch + 2;
        const int q = there ? end_of_span(t.sequences.q, n, t.batch) : 0;
        const int k = there ? end_of_span(t.sequences.k, n, t.batch) : 0;
        const Largest of_q = largest_before<kThreads>(q, end_q, scratch[0]),
                      of_k = largest_before<kThreads>(k, end_k, scratch[1]);
        end_q = of_q.all, end_k = of_k.all;
        SequencePlace place = {};
        fa_span rows[2] = {};
        if (there) {
            rows[0] = rows_of_span(t, kTilesOfQueries, n, of_q.before, q);
            rows[1] = rows_of_span(t, kTilesOfKeys, n, of_k.before, k);
            place = place_of_span(t, n, rows[0], rows[1]);
            t.places[n] = place;
        }
#pragma unroll
        for (int tiling = 0; tiling < kTilings; ++tiling) {
            if (!t.span[tiling]) continue;
            const int mine = place.tile[tiling];
            const int end = there ? int(t.first_tile(tiling, n + 1, rows[tiling == kTilesOfKeys].end)) : 0;
            write_spans<kThreads>(t.span[tiling], int(first), mine, end, left);
        }
    }
}

/* ---- in kernels that run after it ---- */

/* The band of a sequence's queries and keys. */
__device__ __forceinline__ Band band_of(const Band &call, const SequencePlace &place) {
    return {call.left, call.right, place.diagonal, place.key_begin, place.key_end};
}

} // namespace fa
