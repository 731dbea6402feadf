/* serve_sm90: which rows and keys a block works on, and which of the chunks are whose.
 *
 * A job is a kv head of a sequence with up to kJobRows of its rows (query i and head g of the group: row i * group +
 * g). The warps of its blocks have equal shares of its chunks, or where it is thin the blocks.
 *
 * Of each group of 8 chunks the worker that has the first one leaves one state of all its chunks; every other chunk of
 * the group is a state by itself. So the keys alone say which states there are; each is known by its first chunk. */
#pragma once
#include "sm90/serve/config.cuh"

namespace fa::sm90::serve {

/* Tiles of keys, counted from the sequence's first key. */
struct Tiles {
    int next, end;
};

struct Job {
    fa_entry entry;
    fa_span rows;                      // of q and out, of the sequence
    int64_t first_out;                 // the first of them
    int b, head;                       // kv head; b < 0: rows of no sequence
    int row, count;                    // the first of its rows; those of queries
    int rows_out;                      // rows that are written
    bool counts;                       // faults
    bool thin;                         // its sequence
    int low, high, shift, first, last; // see Sight

    __device__ __forceinline__ void see(const Sight &sight) {
        low = sight.low, high = sight.high, shift = sight.shift;
        first = sight.first, last = count ? sight.last : sight.first;
    }
    /* Tiles of 2^keys_log2 keys of the chunks [chunk, chunk_end). */
    __device__ __forceinline__ Tiles tiles(int chunk, int chunk_end, int keys_log2 = kTileKeysLog2) const {
        const int by = shift - keys_log2;
        return {max(chunk << by, low >> keys_log2),
                chunk < chunk_end ? min(chunk_end << by, ((high - 1) >> keys_log2) + 1) : 0};
    }
    /* Those that share its chunks, of so many blocks. */
    template <class C> __device__ __forceinline__ int workers(int blocks) const {
        return thin ? blocks : blocks * C::kWarps;
    }
    /* Rows are kept in pairs: neighbours, or where it is thin those 8 apart of each 16, which a thread has. */
    __device__ __forceinline__ int pairs() const {
        return thin ? count / 16 * 8 + min(count % 16, 8) : (count + 1) / 2;
    }
    __device__ __forceinline__ int row_of_pair(int pair, int r) const {
        return thin ? pair / 8 * 16 + pair % 8 + 8 * r : 2 * pair + r;
    }
};

__device__ __forceinline__ int rows_from(int64_t all, int64_t first, int most) {
    return static_cast<int>(fa_clamp(all - first, 0, most));
}

/* Those of the call, in plain kernels without what they do not know. */
template <class C> __device__ __forceinline__ fa_sequences sequences(const Params &params) {
    fa_sequences s = params.call.s;
    if constexpr (C::kPlain) s.begin = s.end = s.positions = nullptr;
    return s;
}

/* Job n of the call. By the block, or with joined NULL by a warp where q and k have no starts; `leads`: of its cluster.
 */
template <class C> __device__ __forceinline__ Job find_job(const Params &params, int n, bool leads, int64_t *joined) {
    Job job;
    const struct {
        const AttentionParams &p;
        fa_sequences s;
        fa_fault_board *faults;
    } call = {params.call.p, sequences<C>(params), params.call.faults};
    const int of_head = params.heads_kv.quotient(n), group = params.group.divisor;
    job.head = n - of_head * static_cast<int>(params.heads_kv.divisor);
    leads = leads && job.head == 0;
    Spot spot = {};
    if (params.by_number) {
        spot.batch = of_head;
        spot.rows.begin = largest_start(call.s.q, spot.batch + 1, joined);
        find_entry(call, spot, leads, joined);
    } else if (!C::kPlain && call.s.q.starts) {
        spot = find_spot(call, of_head, 0, group, C::kJobRows, leads, joined);
    } else {
        spot.batch = params.tiles_m.quotient(of_head);
        spot.tile = of_head - spot.batch * params.tiles_m.divisor;
        spot.rows = {call.s.packed_q ? spot.batch : 0, call.s.packed_q ? spot.batch + 1 : call.p.seq_q};
        find_entry(call, spot, leads && spot.tile == 0, joined);
    }
    const int64_t first = spot.tile * C::kJobRows, rows = spot.entry.seq_q * group;
    job.entry = spot.entry;
    job.rows = spot.rows, job.first_out = spot.rows.begin;
    job.b = static_cast<int>(spot.batch);
    job.row = static_cast<int>(first);
    job.count = rows_from(rows, first, C::kJobRows);
    job.rows_out = rows_from((spot.rows.end - spot.rows.begin) * group, first, C::kJobRows);
    if (params.by_number) job.rows_out = static_cast<int>((spot.rows.end - spot.rows.begin) * group);
    job.counts = job.head == 0 && spot.tile == 0;
    job.thin = C::kThin && is_thin(rows, C::kColumns);
    job.see(call.s.given ? Sight::of(entry_keys(spot.entry, call.p.left, call.p.right, joined), job.thin)
                         : params.dense);
    return job;
}

/* A row of a call. */
struct RowPlace {
    int64_t query; // of the sequence
    int batch, head;
};
/* Row `row` of a job. */
__device__ __forceinline__ RowPlace row_place(const Params &params, const Job &job, int row) {
    const int index = job.row + row, query = params.group.quotient(index), group = params.group.divisor;
    return {query, params.call.s.packed_q ? 0 : job.b, job.head * group + index - query * group};
}

/* Chunks [first, last) in shares that differ by one at most. */
struct Shares {
    int first, last, each, more; // the first `more` workers have one more than `each`

    __device__ __forceinline__ Shares(const Job &job, int workers) : first(job.first), last(job.last) {
        each = static_cast<int>(unsigned(last - first) / unsigned(workers)), more = last - first - each * workers;
    }
    __device__ __forceinline__ int begin(int worker) const { return first + worker * each + min(worker, more); }
    __device__ __forceinline__ int owner(int chunk) const {
        const unsigned n = chunk - first, longer = unsigned(each + 1) * more;
        return static_cast<int>(n < longer ? n / (each + 1) : more + (n - longer) / each);
    }
    __device__ __forceinline__ int groups() const {
        return last > first ? (last - 1) / kGroup + 1 - first / kGroup : 0;
    }
    /* The end of the state that begins at a group's first chunk. */
    __device__ __forceinline__ int opened_end(int chunk) const {
        return min(min((chunk / kGroup + 1) * kGroup, last), begin(owner(chunk) + 1));
    }
};

} // namespace fa::sm90::serve
