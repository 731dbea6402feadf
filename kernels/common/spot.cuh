/* Calls over sequences: which sequence a tile of queries, or of keys, belongs to, and where its rows lie.
 *
 * Lengths are read here. They may change while the kernel runs, so that two threads that read the same element may know
 * two values: what a block decides by comes from one read, or one join of reads, and is the same in all its threads.
 * Blocks may still disagree; what each makes of a sequence lies inside the arrays and inside its place in workspace. */
#pragma once

#include <stdint.h> // int64_t

#include "common/faults.cuh" // count_faults_of_q, count_faults_of_k
#include "common/params.cuh" // AttentionParams
#include "fa.h"              // fa_problem

namespace fa {

/* A call by value. */
struct Serving {
    AttentionParams p;
    fa_sequences s;
    fa_operand alibi;
    fa_dropout dropout;
    fa_fault_board *faults;
};

inline Serving serving(const fa_problem &problem) {
    return {attention_params(problem.forward), problem.sequences, problem.forward.alibi, problem.forward.dropout,
            problem.faults};
}

constexpr int kFewestWarps = 4; // of a block that looks for its spot: `joined` then has room for fa_words, too
static_assert(kFewestWarps * sizeof(int64_t) >= FA_SEQUENCE_WORDS * sizeof(int32_t));

/* All threads' values in one, in all of them. `joined` has room for one a warp; NULL: a warp is by itself. */
template <class Join> __device__ __forceinline__ int64_t join_block(int64_t x, int64_t *joined, Join join) {
#pragma unroll
    for (int offset = 16; offset; offset /= 2) x = join(x, __shfl_xor_sync(~0u, x, offset));
    if (!joined) return x;
    __syncthreads();
    if (threadIdx.x % 32 == 0) joined[threadIdx.x / 32] = x;
    __syncthreads();
    for (unsigned warp = 0; warp < blockDim.x / 32; ++warp) x = join(x, joined[warp]);
    return x;
}

/* The largest of the first `count` starts, within the rows there are; 0 of none. */
static __device__ __noinline__ int64_t largest_start(const int32_t *starts, int64_t rows, int64_t count,
                                                     int64_t *joined) {
    int64_t largest = 0;
    for (int64_t b = threadIdx.x; b < count; b += blockDim.x) {
        const int64_t start = fa_clamp(fa_index(starts, b), 0, rows);
        largest = start > largest ? start : largest;
    }
    return join_block(largest, joined, [](int64_t a, int64_t b) { return a > b ? a : b; });
}
__device__ __forceinline__ int64_t largest_start(const fa_lengths &lengths, int64_t count, int64_t *joined) {
    return largest_start(lengths.starts, lengths.rows, count, joined);
}

/* Words of sequence b, the same in all threads: a lane reads each. By the block, or with joined NULL by a warp. */
__device__ __forceinline__ fa_words read_words(const fa_sequences &s, int64_t b, int64_t *joined) {
    const int lane = threadIdx.x % 32;
    const int32_t *const from = lane < FA_SEQUENCE_WORDS ? fa_words_from(&s, lane) : nullptr;
    const int32_t mine = from && (!joined || threadIdx.x < 32) ? fa_index(from, b) : 0;
    int32_t all[FA_SEQUENCE_WORDS];
    if (joined) {
        auto *shared = reinterpret_cast<int32_t *>(joined);
        __syncthreads();
        if (threadIdx.x < FA_SEQUENCE_WORDS) shared[threadIdx.x] = mine;
        __syncthreads();
#pragma unroll
        for (int n = 0; n < FA_SEQUENCE_WORDS; ++n) all[n] = shared[n];
    } else {
#pragma unroll
        for (int n = 0; n < FA_SEQUENCE_WORDS; ++n) all[n] = __shfl_sync(~0u, mine, n);
    }
    return {all[0], all[1], all[2], all[3], all[4], all[5]};
}

/* The lowest and the highest of an entry's positions, the same in all threads. By the block, or with joined NULL by a
 * warp. Not inlined: the kernels that need no positions would be longer by it, and short launches feel that. */
static __device__ __noinline__ fa_span position_bounds(const int32_t *positions, int64_t queries, int64_t *joined) {
    int64_t first = INT32_MAX, last = INT32_MIN;
    const int threads = joined ? static_cast<int>(blockDim.x) : 32;
    for (int64_t query = threadIdx.x % threads; query < queries; query += threads) {
        const int64_t at = fa_index(positions, query);
        first = at < first ? at : first, last = at > last ? at : last;
    }
    first = join_block(first, joined, [](int64_t a, int64_t b) { return a < b ? a : b; });
    last = join_block(last, joined, [](int64_t a, int64_t b) { return a > b ? a : b; });
    return {first, last};
}

/* Keys that some query of an entry sees, the same in all threads: as fa_entry_keys(). By the block, or with joined NULL
 * by a warp. */
__device__ __forceinline__ fa_span entry_keys(const fa_entry &e, int64_t left, int64_t right, int64_t *joined) {
    int64_t first = e.diagonal, last = e.seq_q - 1 + e.diagonal;
    if (e.positions) {
        const fa_span bounds = position_bounds(e.positions, e.seq_q, joined);
        first = bounds.begin, last = bounds.end;
    }
    return fa_seen_keys(&e, left, right, first, last);
}

/* The rows that tiles divide: those of q and out, or those of k and v. */
enum class Side { queries, keys };

/* A tile is the `tile`-th of the rows [begin, end) of its side, which are of the sequence `batch` where that is not
 * below 0, and then `entry` says how many of them are its queries, or keys. */
struct Spot {
    int64_t batch, tile;
    fa_span rows;
    fa_entry entry;
};

/* The entry of spot.batch, and where its rows end; where they begin is known. By the block, or with joined NULL by a
 * warp where there are no starts; `counts`: it counts what is bad in its lengths. A Call has p, s and faults of a
 * Serving. */
template <Side side = Side::queries, class Call>
__device__ __forceinline__ void find_entry(const Call &c, Spot &spot, bool counts, int64_t *joined) {
    constexpr bool of_keys = side == Side::keys;
    const fa_sequences &s = c.s;
    if (!s.given) {
        spot.entry.seq_q = c.p.seq_q;
        spot.entry.seq_k = c.p.seq_k;
        spot.entry.diagonal = c.p.diagonal;
        spot.entry.key_begin = c.p.key_begin;
        spot.entry.key_end = c.p.key_end;
        return;
    }
    const fa_lengths &own = of_keys ? s.k : s.q, &other = of_keys ? s.q : s.k;
    const int64_t begin = other.starts ? largest_start(other, spot.batch + 1, joined) : 0;
    const fa_words words = read_words(s, spot.batch, joined);
    const fa_span rows =
        fa_rows_to(&other, spot.batch, begin, of_keys ? words.end_q : words.end_k, of_keys ? s.packed_q : s.packed_k);
    spot.rows = fa_rows_to(&own, spot.batch, spot.rows.begin, of_keys ? words.end_k : words.end_q,
                           of_keys ? s.packed_k : s.packed_q);
    const fa_span &rows_q = of_keys ? rows : spot.rows, &rows_k = of_keys ? spot.rows : rows;
    spot.entry = fa_entry_by(&s, &words, spot.batch, rows_q, rows_k);
    if (counts && threadIdx.x == 0) {
        count_faults_of_q(c.faults, s, spot.batch, rows_q);
        count_faults_of_k(c.faults, s, spot.batch, rows_k);
    }
}

/* Tiles that cover all `rows` of packed queries, or keys, with starts, whatever the starts are: span n has the rows of
 * sequence n - 1, the first those before any, the last those behind all. It begins where the one before ends, at
 * `begin`, and its tiles are those from begin * pack / block_m + n on, where a tile has block_m rows and a query `pack`
 * of them; so this many are enough. */
inline int64_t tiles_of_packed(int64_t rows, int64_t batch, int64_t pack, int64_t block_m) {
    return rows * pack / block_m + batch + 2;
}
inline int64_t tiles_of_packed(const fa_forward &p, int64_t pack, int64_t block_m) {
    return tiles_of_packed(p.seq_q, p.batch, pack, block_m);
}

/* Tile n of those, or of `tiles_m` a sequence where the rows of a sequence are known without its starts. `counts`: the
 * first tile of a sequence counts what is bad in its lengths. By the block. */
template <Side side = Side::queries, class Call>
__device__ __forceinline__ Spot find_spot(const Call &c, int64_t n, int64_t tiles_m, int64_t pack, int block_m,
                                          bool counts, int64_t *joined) {
    constexpr bool of_keys = side == Side::keys;
    const fa_sequences &s = c.s;
    const fa_lengths &own = of_keys ? s.k : s.q;
    Spot spot = {};
    if (own.starts) {
        /* Span m is the first with end_m * pack / block_m + m >= n, where end_m is the largest of the starts up to m.
         */
        const int64_t batch = c.p.batch;
        int64_t span = batch + 1;
        for (int64_t b = threadIdx.x; b <= batch; b += blockDim.x) {
            const int64_t needed = n - fa_start(&own, b) * pack / block_m;
            const int64_t least = needed > b ? needed : b;
            span = least < span ? least : span;
        }
        span = join_block(span, joined, [](int64_t a, int64_t b) { return a < b ? a : b; });
        spot.rows.begin = largest_start(own, span, joined);
        spot.rows.end = span == 0 ? largest_start(own, 1, joined) : own.rows;
        spot.batch = span <= batch ? span - 1 : -1;
        spot.tile = n - spot.rows.begin * pack / block_m - span;
    } else {
        spot.batch = n / tiles_m;
        spot.tile = n % tiles_m;
        spot.rows = {!of_keys && s.packed_q ? spot.batch : 0, !of_keys && s.packed_q ? spot.batch + 1
                                                              : of_keys              ? c.p.seq_k
                                                                                     : c.p.seq_q};
    }
    if (spot.batch >= 0) find_entry<side>(c, spot, counts && spot.tile == 0, joined);
    if (spot.tile < 0) // starts grew since the span was found: the tile has no rows
        spot.tile = 0, spot.rows.end = spot.rows.begin, spot.entry.seq_q = 0;
    return spot;
}

/* Sequence b, from its first tile on. By the block. */
template <class Call> __device__ __forceinline__ Spot find_sequence(const Call &c, int64_t b, int64_t *joined) {
    Spot spot = {};
    spot.batch = b;
    spot.rows = {0, c.p.seq_q};
    if (c.s.q.starts) spot.rows.begin = largest_start(c.s.q, b + 1, joined);
    find_entry(c, spot, false, joined);
    return spot;
}

} // namespace fa
