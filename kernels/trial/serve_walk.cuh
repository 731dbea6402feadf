/* serve_sm90: which keys belong to whom.
 *
 * A job is a kv head of a sequence with up to kRows of its rows (query i and head g of the group: row i * group + g).
 * It costs its tiles of 64 keys and kJobCost; jobs lie one after the other in the order of sequences, heads, rows, and
 * each worker (a team of warps) has a range of that line of the same length. The chunks that begin in it are its own.
 *
 * Chunks are cut at multiples of 64 * 2^e keys, counted from the sequence's first, with the least e that leaves at most
 * 127 * 64 * 2^e keys that the sequence's queries see. */
#pragma once
#include "serve_config.cuh"

namespace fa::sm90::serve {

/* A bad index that was met; the hook for counters in host-visible memory. */
__device__ __forceinline__ void report_fault() {}

/* One sequence of the batch. */
struct Sequence {
    fa_entry entry;
    int64_t rows_end; // of q: where its rows end, used or not; of the last sequence, where all end
    int low, high;    // keys that some query sees
    int tile, tile_end;
    int shift;  // log2 of the tiles of a chunk
    int blocks; // jobs a kv head

    __device__ __forceinline__ int tiles() const { return tile_end - tile; }
    __device__ __forceinline__ int64_t cost() const { return tiles() + kJobCost; }
};

template <class C>
__device__ __forceinline__ Sequence sequence_of(const Params &params, int b, int64_t before_q, int64_t before_k) {
    const fa_sequences &s = params.s;
    const fa_span q = fa_rows_of(&s.q, b, before_q, s.packed_q), k = fa_rows_of(&s.k, b, before_k, s.packed_k);
    Sequence x;
    x.entry = fa_entry_of(&s, b, q, k);
    if (!s.given) x.entry.diagonal = params.dense_diagonal;
    x.rows_end = s.packed_q && b + 1 == params.p.batch ? params.p.seq_q : q.end;
    const fa_span seen = fa_entry_keys(&x.entry, params.p.left, params.p.right);
    x.low = static_cast<int>(seen.begin), x.high = static_cast<int>(seen.end);
    x.tile = x.low / kTileKeys;
    x.tile_end = x.high > x.low ? (x.high + kTileKeys - 1) / kTileKeys : x.tile;
    x.shift = 0;
    while (x.high - x.low > (kMaxChunks - 1) * int64_t(kTileKeys) << x.shift) ++x.shift;
    const int64_t rows = x.entry.seq_q * params.group;
    x.blocks = rows > C::kRows ? static_cast<int>((rows + C::kRows - 1) / C::kRows) : 1;
    return x;
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

/* A worker's way through its jobs. The same in all lanes of its warps; what is not at work lies in shared memory. */
template <class C> struct Walk {
    int64_t begin, end, at; // the worker's range; where the present job begins
    int b, head, block, blocks;
    int before_q, before_k;
    int first_k;   // row of the sequence's key 0
    int low, high; // keys that the sequence's queries see
    int shift;
    int chunk, chunk_end; // the worker's part of the job
    int tile, tile_end;   // the part's tiles that are still to come

    __device__ __forceinline__ int first_tile() const { return low / kTileKeys; }
    __device__ __forceinline__ int last_tile() const {
        return high > low ? (high + kTileKeys - 1) / kTileKeys : first_tile();
    }
    __device__ __forceinline__ int first_chunk() const { return first_tile() >> shift; }
    __device__ __forceinline__ int last_chunk() const { // one past it
        return high > low ? ((last_tile() - 1) >> shift) + 1 : first_chunk();
    }
    __device__ __forceinline__ bool empty() const { return high <= low; }
    __device__ __forceinline__ bool begins() const { return chunk == first_chunk(); }
    __device__ __forceinline__ bool ends() const { return chunk_end == last_chunk(); }

    __device__ __forceinline__ void enter(const Params &params) {
        before_q = rows_before(params.s.q, b, before_q), before_k = rows_before(params.s.k, b, before_k);
        const Sequence x = sequence_of<C>(params, b, before_q, before_k);
        blocks = x.blocks, first_k = static_cast<int>(x.entry.first_k), low = x.low, high = x.high, shift = x.shift;
    }

    /* The first chunk that begins at `position` or after it. */
    __device__ __forceinline__ int chunk_from(int64_t position) const {
        if (position <= at) return first_chunk();
        const int64_t tile = min(position - at - kJobCost, int64_t(last_tile() - first_tile())) + first_tile();
        const int chunk = static_cast<int>((max(tile, int64_t(0)) + (1 << shift) - 1) >> shift);
        return min(max(chunk, first_chunk() + 1), last_chunk());
    }

    /* From the present job on, the first one that the worker has a part of. */
    __device__ __forceinline__ bool find(const Params &params) {
        while (at < end && b < params.p.batch) {
            const int64_t cost = last_tile() - first_tile() + kJobCost;
            if (at + cost > begin) {
                chunk = chunk_from(begin), chunk_end = chunk_from(end);
                tile = max(chunk << shift, first_tile()), tile_end = min(chunk_end << shift, last_tile());
                if (empty() ? at >= begin : chunk < chunk_end) return true;
            }
            step(params, cost);
        }
        return false;
    }
    __device__ __forceinline__ bool next(const Params &params) {
        leave(params);
        return find(params);
    }

    /* The same for tiles: false when no more are left. */
    __device__ __forceinline__ bool find_tile(const Params &params) {
        for (bool any = find(params); any; any = next(params))
            if (tile < tile_end) return true;
        return false;
    }
    __device__ __forceinline__ Tile here() const { return {b, head, first_k, low, high, tile, tile_end}; }

    __device__ __forceinline__ void leave(const Params &params) { step(params, last_tile() - first_tile() + kJobCost); }

  private:
    __device__ __forceinline__ void step(const Params &params, int64_t cost) {
        at += cost;
        if (at >= end) return;
        if (++block < blocks) return;
        block = 0;
        if (++head < params.p.heads_kv) return;
        head = 0;
        if (++b < params.p.batch) enter(params);
    }
};

/* What the lanes of a warp all have, to shared memory: one of them writes it when all have read what was there. */
template <class T> __device__ __forceinline__ void note(T *to, const T &x) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) *to = x;
    __syncwarp();
}

/* The next tile of the worker whose walk is at *walk; false when no more are left. */
template <class C> __device__ __forceinline__ bool next_tile(const Params &params, Tile &tile, Walk<C> *walk) {
    if (++tile.tile < tile.end) return true;
    Walk<C> ahead = *walk;
    const bool more = ahead.next(params) && ahead.find_tile(params);
    tile = ahead.here();
    note(walk, ahead);
    return more;
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
            const Sequence x = sequence_of<C>(params, b, before_q, before_k);
            each_one(here, x.cost() * x.blocks * params.p.heads_kv);
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
    walk.at = walk.end, walk.b = batch, walk.head = walk.block = 0, walk.blocks = 1;
    walk.low = walk.high = walk.shift = walk.before_q = walk.before_k = walk.first_k = 0;
    walk.chunk = walk.chunk_end = walk.tile = walk.tile_end = 0;
    if (walk.begin < walk.end) {
        const Start start = starts[team];
        walk.at = start.at, walk.b = start.b, walk.before_q = start.before_q, walk.before_k = start.before_k;
        walk.enter(params);
        const int64_t cost = walk.last_tile() - walk.first_tile() + kJobCost, job = (walk.begin - walk.at) / cost;
        walk.at += job * cost;
        walk.head = static_cast<int>(job / walk.blocks), walk.block = static_cast<int>(job % walk.blocks);
    }
    return walk;
}

} // namespace fa::sm90::serve
