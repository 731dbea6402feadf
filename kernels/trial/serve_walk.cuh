/* serve_sm90: which keys belong to whom.
 *
 * A job is a kv head of a sequence with up to kRows of its rows (query i and head g of the group: row i * group + g).
 * It costs its tiles of 64 keys and kJobCost; jobs lie one after the other in the order of sequences, heads, rows, and
 * each worker (a team of warps) has a range of that line of the same length. The chunks that begin in it are its own.
 *
 * Chunks are cut at multiples of 64 * 2^e keys, counted from the sequence's first, with the least e that leaves at most
 * 127 * 64 * 2^e keys that the sequence's queries see. */
#pragma once
#include "common/faults.cuh" // count_fault, count_length_faults
#include "trial/serve_config.cuh"

namespace fa::sm90::serve {

/* Sequence b, whose rows begin after `before_q` and `before_k`. */
__host__ __device__ inline Sequence sequence_of(const Params &params, int rows_of_job, int b, int64_t before_q,
                                                int64_t before_k) {
    const fa_sequences &s = params.s;
    const fa_span q = fa_rows_of(&s.q, b, before_q, s.packed_q), k = fa_rows_of(&s.k, b, before_k, s.packed_k);
    Sequence x;
    x.entry = fa_entry_of(&s, b, q, k);
    if (!s.given) x.entry.diagonal = params.p.diagonal;
    x.rows_end = s.packed_q && b + 1 == params.p.batch ? params.p.seq_q : q.end;
    const fa_span seen = fa_entry_keys(&x.entry, params.p.left, params.p.right);
    x.low = static_cast<int>(seen.begin), x.high = static_cast<int>(seen.end);
    x.tile = x.low / kTileKeys;
    x.tile_end = x.high > x.low ? (x.high + kTileKeys - 1) / kTileKeys : x.tile;
    x.shift = chunk_shift(x.high - x.low);
    const int64_t rows = x.entry.seq_q * params.group;
    x.blocks = rows > rows_of_job ? static_cast<int>((rows + rows_of_job - 1) / rows_of_job) : 1;
    return x;
}

/* The same; those of a dense call are all alike, and known to the host. */
template <class C> __device__ __forceinline__ Sequence known(const Params &params, int b, int before_q, int before_k) {
    if (!params.s.given) return params.dense;
    return sequence_of(params, C::kRows, b, before_q, before_k);
}

/* Where the rows of q or k end that belong to sequences before b (of packed ones; else 0): entry by entry. */
__device__ __forceinline__ int rows_before(const fa_lengths &lengths, int b, int before) {
    return lengths.starts ? max(before, static_cast<int>(fa_clamp(lengths.starts[b], 0, lengths.rows))) : 0;
}

/* A tile of keys of a job, and how far its neighbours go on. */
struct Tile {
    int b, head;
    int first_k;   // row of the sequence's key 0
    int low, high; // keys that the sequence's queries see
    int tile, end;
};

/* A worker's way through its jobs. The same in all lanes of its warps; it lies in shared memory while it is not needed.
 */
template <class C> struct Walk {
    int64_t begin, end, at; // the worker's range; where the present job begins
    int b, head, block;
    int before_q, before_k;
    int chunk, chunk_end; // the worker's part of the job
    Sequence sequence;

    __device__ __forceinline__ int first_chunk() const { return sequence.tile >> sequence.shift; }
    __device__ __forceinline__ int last_chunk() const { // one past it
        return empty() ? first_chunk() : ((sequence.tile_end - 1) >> sequence.shift) + 1;
    }
    __device__ __forceinline__ bool empty() const { return sequence.tiles() == 0; }
    __device__ __forceinline__ bool begins() const { return chunk == first_chunk(); }
    __device__ __forceinline__ bool ends() const { return chunk_end == last_chunk(); }

    __device__ __forceinline__ void enter(const Params &params) {
        before_q = rows_before(params.s.q, b, before_q), before_k = rows_before(params.s.k, b, before_k);
        sequence = known<C>(params, b, before_q, before_k);
    }

    /* The first chunk that begins at `position` or after it. */
    __device__ __forceinline__ int chunk_from(int64_t position) const {
        if (position <= at) return first_chunk();
        const int tile = static_cast<int>(min(position - at - kJobCost, int64_t(sequence.tiles()))) + sequence.tile;
        const int chunk = (max(tile, 0) + (1 << sequence.shift) - 1) >> sequence.shift;
        return min(max(chunk, first_chunk() + 1), last_chunk());
    }

    /* The first job that the worker has a part of, the present one or after it; with `leaves` after it. With `tiles`
     * only jobs that have tiles count. The present sequence is known unless `enters`. False: there is none. */
    __device__ __forceinline__ bool find(const Params &params, bool leaves, bool tiles, bool enters = false) {
#pragma unroll 1
        for (;; leaves = true) {
            if (leaves) {
                at += sequence.cost();
                if (at >= end) return false;
                if (++block >= sequence.blocks) {
                    block = 0;
                    if (++head >= params.p.heads_kv) head = 0, ++b, enters = true;
                }
            }
            if (at >= end || b >= params.p.batch) return false;
            if (enters) enter(params);
            enters = false;
            if (at + sequence.cost() <= begin) continue;
            chunk = chunk_from(begin), chunk_end = chunk_from(end);
            if (chunk < chunk_end || (empty() && at >= begin && !tiles)) return true;
        }
    }
    __device__ __forceinline__ int first_tile(int of_chunk) const {
        return max(of_chunk << sequence.shift, sequence.tile);
    }
    __device__ __forceinline__ Tile here() const {
        const int last = min(chunk_end << sequence.shift, sequence.tile_end);
        return {b,   head, static_cast<int>(sequence.entry.first_k), sequence.low, sequence.high, first_tile(chunk),
                last};
    }
};

/* Counts what is bad in the lengths of a sequence (if the worker begins its first job), and in the table's entries for
 * keys that somebody may see: once each, by the workers of its first kv head, each for its own tiles. One warp. */
__device__ __forceinline__ void report_faults(const Params &params, int before_q, int before_k, bool begins,
                                              const Tile &part) {
    const fa_sequences &s = params.s;
    const int lane = threadIdx.x % 32;
    if (begins && lane == 0) {
        count_length_faults(params.faults, s.q, part.b, fa_rows_of(&s.q, part.b, before_q, s.packed_q), 0);
        count_length_faults(params.faults, s.k, part.b, fa_rows_of(&s.k, part.b, before_k, s.packed_k), 1);
    }
    if (!s.pages.table) return;
    const int size = static_cast<int>(s.pages.size);
    const int low = max(part.tile * kTileKeys, part.low), high = min(part.end * kTileKeys, part.high);
#pragma unroll 1
    for (int column = low / size + lane; int64_t(column) * size < high; column += 32)
        if (fa_page(&s.pages, part.b, column) < 0 && max(column * size, part.low) >= low)
            count_fault(params.faults, FA_FAULT_page, part.b, column, s.pages.table[part.b * s.pages.stride + column]);
}

/* What the lanes of a warp all have, to shared memory: one of them writes it when all have read what was there. */
template <class T> __device__ __forceinline__ void note(T *to, const T &x) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) *to = x;
    __syncwarp();
}

/* Exclusive scan over the block of x; the whole in `all`. `scratch` has room for a number a warp. */
template <class C, class Join>
__device__ __forceinline__ int64_t block_scan(int64_t x, int64_t *scratch, int64_t *all, Join join) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int64_t inclusive = x;
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
        const int64_t other = __shfl_up_sync(~0u, inclusive, by);
        if (lane >= by) inclusive = join(other, inclusive);
    }
    const int64_t left = __shfl_up_sync(~0u, inclusive, 1);
    if (lane == 31) scratch[warp] = inclusive;
    __syncthreads();
    int64_t before = 0;
    *all = 0;
#pragma unroll
    for (int w = 0; w < C::kWarps; ++w) {
        const int64_t part = scratch[w];
        if (w < warp) before = join(before, part);
        *all = join(*all, part);
    }
    __syncthreads();
    return lane ? join(before, left) : before;
}

/* Where a worker begins. */
struct Start {
    int64_t at;
    int b, before_q, before_k;
    int unused;
};

/* Persistent form: the ranges of this block's workers. Every thread takes a run of sequences. `starts` has room for one
 * of each team. */
template <class C> __device__ __forceinline__ Walk<C> deal(const Params &params, int64_t *scratch, Start *starts) {
    const int batch = static_cast<int>(params.p.batch), each = (batch + C::kThreads - 1) / C::kThreads;
    const int first = min(static_cast<int>(threadIdx.x) * each, batch), last = min(first + each, batch);
    const auto larger = [](int64_t a, int64_t b) { return a > b ? a : b; };
    int before[2] = {0, 0};
    int64_t all;
    if (params.s.q.starts || params.s.k.starts) {
        int highest[2] = {0, 0};
        for (int b = first; b < last; ++b) {
            highest[0] = rows_before(params.s.q, b, highest[0]);
            highest[1] = rows_before(params.s.k, b, highest[1]);
        }
        before[0] = static_cast<int>(block_scan<C>(highest[0], scratch, &all, larger));
        before[1] = static_cast<int>(block_scan<C>(highest[1], scratch, &all, larger));
    }
    const auto visit = [&](auto &&each_one) {
        int before_q = before[0], before_k = before[1];
        for (int b = first; b < last; ++b) {
            const Start here = {0, b, before_q, before_k, 0};
            before_q = rows_before(params.s.q, b, before_q), before_k = rows_before(params.s.k, b, before_k);
            const Sequence x = known<C>(params, b, before_q, before_k);
            each_one(here, int64_t(x.cost()) * x.blocks * params.p.heads_kv);
        }
    };
    int64_t mine = 0;
    visit([&](const Start &, int64_t cost) { mine += cost; });
    const auto sum = [](int64_t a, int64_t b) { return a + b; };
    int64_t at = block_scan<C>(mine, scratch, &all, sum);
    const int64_t workers = int64_t(gridDim.x) * C::kTeams, share = all / workers, more = all % workers;
    const auto begin_of = [&](int64_t worker) { return worker * share + min(worker, more); };
    if (mine)
        visit([&](Start here, int64_t cost) {
            here.at = at;
#pragma unroll 1
            for (int team = 0; team < C::kTeams; ++team) {
                const int64_t begin = begin_of(int64_t(blockIdx.x) * C::kTeams + team);
                if (at <= begin && begin < at + cost) starts[team] = here;
            }
            at += cost;
        });
    __syncthreads();
    const int team = threadIdx.x / (32 * C::kTeam);
    const int64_t worker = int64_t(blockIdx.x) * C::kTeams + team;
    Walk<C> walk;
    walk.begin = begin_of(worker), walk.end = begin_of(worker + 1);
    walk.at = walk.end, walk.b = batch, walk.head = walk.block = walk.before_q = walk.before_k = 0;
    walk.chunk = walk.chunk_end = 0, walk.sequence = {};
    if (walk.begin < walk.end) {
        const Start start = starts[team];
        walk.at = start.at, walk.b = start.b, walk.before_q = start.before_q, walk.before_k = start.before_k;
        walk.enter(params);
        const int cost = walk.sequence.cost();
        const uint32_t job = static_cast<uint32_t>((walk.begin - walk.at) / cost), blocks = walk.sequence.blocks;
        walk.at += int64_t(job) * cost;
        walk.head = static_cast<int>(job / blocks), walk.block = static_cast<int>(job % blocks);
    }
    return walk;
}

} // namespace fa::sm90::serve
