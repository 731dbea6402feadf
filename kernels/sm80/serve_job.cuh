/* mma_sm80 serving: which rows a unit of work has, what they see, and where its keys lie. */
#pragma once

#include <limits.h> // INT_MAX

#include "common/alibi.cuh"  // slope_of
#include "common/faults.cuh" // count_fault
#include "common/spot.cuh"   // Spot, find_spot, find_sequence, join_block
#include "sm80/serve_config.cuh"

namespace fa::sm80 {

/* A query and one of its heads. */
struct RowPlace {
    int64_t query; // of the sequence
    int head;
};

/* The rows of a tile. */
struct Job {
    int64_t batch, tile;
    fa_entry entry;
    int64_t query;   // of the first row
    int head;        // of the first row, in its pack
    int first_head;  // of the pack
    int packed_head; // which pack
    int head_kv;
    int part;
    int count;    // rows of queries; those behind, up to
    int rows_out; // this, are rows of out that belong to no query
    int64_t first_out;

    __device__ __forceinline__ RowPlace at(const ServeArgs &args, int row) const {
        const int n = args.pack.quotient(head + row);
        return {query + n, first_head + head + row - n * int(args.pack.divisor)};
    }
    /* The keys of a sequence of so few rows are cut into chunks. */
    __device__ __forceinline__ bool chunked(const ServeArgs &args) const {
        return args.cuts && entry.seq_q * args.pack.divisor <= kServeRows;
    }
    /* False where the part is beyond all keys that the sequence has, or where it has no parts. */
    __device__ __forceinline__ bool may_exist(const ServeArgs &args) const {
        const int64_t keys = args.chunk_parts ? kChunkKeys : kChunkKeys * kGroup; // of a part, at least
        return rows_out > 0 && (part == 0 || (chunked(args) && part * keys < entry.seq_k));
    }
    __device__ __forceinline__ int64_t out_batch(const ServeArgs &args) const {
        return args.call.s.packed_q ? 0 : batch;
    }
};

__device__ __forceinline__ int rows_from(int64_t all, int64_t first) {
    const int64_t left = all - first;
    return left < 0 ? 0 : left > kServeRows ? kServeRows : int(left);
}

__device__ __forceinline__ Job job_of(const ServeArgs &args, const Spot &spot, int packed_head, int part) {
    Job job;
    const int64_t pack = args.pack.divisor, first = spot.tile * kServeRows;
    job.batch = spot.batch, job.tile = spot.tile, job.entry = spot.entry;
    job.query = first / pack;
    job.head = int(first - job.query * pack);
    job.first_head = packed_head * int(pack), job.packed_head = packed_head;
    job.head_kv = job.first_head / int(args.call.p.heads / args.call.p.heads_kv);
    job.part = part;
    job.count = rows_from(spot.entry.seq_q * pack, first);
    job.rows_out = rows_from((spot.rows.end - spot.rows.begin) * pack, first);
    job.first_out = spot.rows.begin;
    return job;
}

/* Unit n: first the tiles of all rows, the last ones, which see the most keys, first; then parts of sequences beyond
 * their first. By the block. */
__device__ __forceinline__ Job find_job(const ServeArgs &args, int64_t n, int64_t *joined) {
    const int64_t tiles = args.tiles * args.packed_heads;
    const bool first = n < tiles;
    const int64_t m = first ? n : n - tiles;
    const int packed_head = int(m % args.packed_heads);
    const int64_t rest = m / args.packed_heads;
    if (first)
        return job_of(args,
                      find_spot(args.call, args.tiles - 1 - rest, args.tiles_m, args.pack.divisor, kServeRows,
                                packed_head == 0, joined),
                      packed_head, 0);
    const int64_t b = rest / (args.parts - 1);
    return job_of(args, find_sequence(args.call, b, joined), packed_head, 1 + int(rest - b * (args.parts - 1)));
}

/* Shared by the threads of a block, beside the tiles. The job lies here, too: registers are few. */
template <class C> struct ServeShared {
    static constexpr int kPlaces = 3; // of tiles: at work, on its way, looked up
    static_assert(C::kThreads / 32 >= kFewestWarps);
    KeyPlace place[kPlaces][C::kTileN];
    uint32_t held[kPlaces][C::kTileN / 32]; // a bit a key: it has a place
    ServeRow row[kServeRows];
    int64_t joined[C::kThreads / 32];
    fa_span keys; // that some row sees
    Job job;
    fa_dropout dropout; // as it was when the block began; of dressed instances
    /* Of dressed instances: ids of segments that some row has lie between; or [low, high) has the keys that the
     * intervals of some row hold. */
    int32_t low, high;
};
template <class C> constexpr int serve_bytes() { return C::kSharedBytes + int(sizeof(ServeShared<C>)); }

/* Fills the rows, and the keys from the first to the last that some row sees. By the block. */
template <class Shared>
__device__ __forceinline__ void place_rows(const ServeArgs &args, const Job &job, Shared &shared) {
    const AttentionParams &p = args.call.p;
    int64_t low = INT64_MAX, high = 0;
    if (const int row = threadIdx.x; row < kServeRows) {
        ServeRow mine = {0, 0, 0, 0.0f};
        if (row < job.count) {
            const RowPlace at = job.at(args, row);
            const int64_t position = fa_position(&job.entry, at.query);
            const fa_span seen = fa_row_keys(&job.entry, p.left, p.right, position);
            mine.position = int(position);
            if (seen.begin < seen.end) {
                mine.begin = int(seen.begin), mine.end = int(seen.end);
                low = seen.begin, high = seen.end;
            }
            mine.slope = slope_of(args.call.alibi, job.batch, at.head);
        }
        shared.row[row] = mine;
    }
    low = join_block(low, shared.joined, [](int64_t a, int64_t b) { return a < b ? a : b; });
    high = join_block(high, shared.joined, [](int64_t a, int64_t b) { return a > b ? a : b; });
    if (threadIdx.x == 0) shared.keys = low < high ? fa_span{low, high} : fa_span{0, 0};
    __syncthreads();
}

/* Fills the bounds of the rows' ids. By the block. */
template <class Shared>
__device__ __forceinline__ void place_ids(const ServeArgs &args, const Job &job, Shared &shared) {
    int64_t low = INT32_MAX, high = INT32_MIN;
    if (int(threadIdx.x) < job.count) low = high = args.segments.of_query(job.batch, job.at(args, threadIdx.x).query);
    low = join_block(low, shared.joined, [](int64_t a, int64_t b) { return a < b ? a : b; });
    high = join_block(high, shared.joined, [](int64_t a, int64_t b) { return a > b ? a : b; });
    if (threadIdx.x == 0) shared.low = int32_t(low), shared.high = int32_t(high);
    __syncthreads();
}

/* Cuts what the rows see to their intervals, and fills the bounds of that; keys.begin and end stay as they are, so that
 * all blocks cut a sequence alike. By the block. */
template <class Shared>
__device__ __forceinline__ void place_intervals(const ServeArgs &args, const Job &job, Shared &shared) {
    int64_t low = INT32_MAX, high = 0;
    if (const int row = threadIdx.x; row < job.count) {
        const RowPlace at = job.at(args, row);
        ServeRow &mine = shared.row[row];
        const Held held = args.intervals.of_query(job.batch, at.head, at.query);
        const Span<int> seen = held.within(Span<int>{mine.begin, mine.end});
        mine.begin = seen.begin, mine.end = seen.end;
        if (!seen.empty()) low = seen.begin, high = seen.end;
    }
    low = join_block(low, shared.joined, [](int64_t a, int64_t b) { return a < b ? a : b; });
    high = join_block(high, shared.joined, [](int64_t a, int64_t b) { return a > b ? a : b; });
    if (threadIdx.x == 0) shared.low = int32_t(low), shared.high = int32_t(high);
    __syncthreads();
}

/* The chunks of a sequence that is cut, or one that holds all keys. */
struct Chunks {
    int shift;       // log2 of their keys
    int first, last; // [first, last)

    __device__ __forceinline__ Chunks(bool cut, const fa_span &keys) : shift(31), first(0), last(1) {
        if (!cut) return;
        shift = chunk_shift(keys.end - keys.begin) + 6;
        first = int(keys.begin >> shift), last = keys.end > keys.begin ? int((keys.end - 1) >> shift) + 1 : first + 1;
    }
    /* How many parts; the chunks [first_of(n), first_of(n + 1)) are those of part n. */
    __device__ __forceinline__ int parts(const ServeArgs &args) const {
        if (args.whole) return 1;
        return args.chunk_parts ? last - first : (last - 1) / kGroup - first / kGroup + 1;
    }
    __device__ __forceinline__ int first_of(const ServeArgs &args, int part) const {
        if (part == 0) return first;
        if (args.whole) return last;
        return min(args.chunk_parts ? first + part : (first / kGroup + part) * kGroup, last);
    }
};
static_assert(1 << 6 == kChunkKeys);

/* Whether a tile of the sequence before this one looks at the page whose first key is `first`. */
__device__ __forceinline__ bool seen_before(const ServeArgs &args, const Job &job, int64_t first) {
    if (job.tile == 0 || args.call.s.positions) return false;
    const int64_t row = job.tile * kServeRows, pack = args.pack.divisor;
    const fa_span keys =
        fa_tile_keys(&job.entry, args.call.p.left, args.call.p.right,
                     fa_position(&job.entry, (row - kServeRows) / pack), fa_position(&job.entry, (row - 1) / pack));
    return keys.begin < keys.end && first < keys.end;
}

/* Where key `key` of the sequence lies; its page's entry is read if some row sees it. `counts`: this thread counts a
 * bad one. */
template <class Shared>
__device__ __forceinline__ KeyPlace find_key(const ServeArgs &args, const Job &job, const Shared &shared, int64_t key,
                                             bool counts) {
    const AttentionParams &p = args.call.p;
    const fa_sequences &s = args.call.s;
    const fa_pages &pages = s.pages;
    if (key < shared.keys.begin || key >= shared.keys.end) return {kNowhere, kNowhere};
    if (s.positions) { // between the keys that its rows see there may be some that none of them sees
        bool seen = false;
        for (int m = 0; m < job.count; ++m) seen |= key >= shared.row[m].begin && key < shared.row[m].end;
        if (!seen) return {kNowhere, kNowhere};
    }
    int64_t page = s.packed_k ? 0 : job.batch, row = job.entry.first_k + key;
    if (pages.table) {
        const uint32_t column = args.page.quotient(uint32_t(key));
        const int64_t first = int64_t(column) * pages.size;
        const int32_t entry = fa_page_entry(&pages, job.batch, column);
        page = fa_page_of(&pages, entry), row = key - first;
        if (page < 0) {
            if (counts && (key == first || key == shared.keys.begin) && !seen_before(args, job, first))
                count_fault(args.call.faults, FA_FAULT_page, job.batch, column, entry);
            return {kNowhere, kNowhere};
        }
    }
    return {page * p.k.stride[0] + row * p.k.stride[2], page * p.v.stride[0] + row * p.v.stride[2]};
}

/* Looks up the keys of tile `tile`, one a thread of the first warps. */
template <class C> struct KeyLookup {
    KeyPlace mine = {kNowhere, kNowhere};

    __device__ __forceinline__ void find(const ServeArgs &args, const Job &job, const ServeShared<C> &shared, int tile,
                                         bool exists) {
        mine = {kNowhere, kNowhere};
        if (exists && threadIdx.x < C::kTileN)
            mine = find_key(args, job, shared, int64_t(tile) * C::kTileN + threadIdx.x, job.packed_head == 0);
        if constexpr (C::kDressed) {
            const int64_t key = int64_t(tile) * C::kTileN + threadIdx.x;
            if (args.intervals.begins && (key < shared.low || key >= shared.high)) mine = {kNowhere, kNowhere};
            if (args.segments.q && mine.k != kNowhere) { // keys of ids that no row has are not read
                const int32_t id = args.segments.of_key(job.batch, key);
                if (id < shared.low || id > shared.high) mine = {kNowhere, kNowhere};
            }
        }
    }
    /* Whole warps. */
    __device__ __forceinline__ void store(ServeShared<C> &shared, int at) const {
        if (threadIdx.x >= C::kTileN) return;
        shared.place[at][threadIdx.x] = mine;
        const uint32_t held = __ballot_sync(~0u, mine.k != kNowhere);
        if (threadIdx.x % 32 == 0) shared.held[at][threadIdx.x / 32] = held;
    }
};

} // namespace fa::sm80
