/* simt_backward for sequences. A tile of queries or keys is found with the sequence that it belongs to; one thread then
 * moves the call to that sequence, in shared memory, and the bodies of the dense kernels run on it (simt/backward.cuh).
 * So a sequence has the bits of its dense call, and what its neighbours hold reaches nothing.
 *
 * The batch entry stays the sequence's number, by which padded operands and slopes are found and dropout counts: packed
 * operands have no stride there. Where queries stand, and which keys each sees, lies in shared memory for a tile of
 * them, so that positions are read once. Rows of no sequence belong to the tiles of the sequence before them. */
#pragma once

#include "common/segments.cuh"      // Segments
#include "common/spot.cuh"          // Side, Spot, find_spot, find_sequence, entry_keys
#include "simt/backward.cuh"        // own_queries, own_keys, add_bias
#include "simt/backward_config.cuh" // Tiles

namespace simt_backward {

/* Rows of a head that serve_rows_kernel takes at a time. */
constexpr int kRowTile = 64;

/* A call by value. A pair of Work is a kv head. */
struct SequenceCall {
    fa::GradientParams p;
    fa_sequences s;
    fa_fault_board *faults;
    int64_t rows; // of a head in work.rows: as many as q stores
    fa::Segments segments;
};

/* Of find_spot(). */
struct CallView {
    const fa::AttentionParams &p;
    const fa_sequences &s;
    fa_fault_board *faults;
};
__device__ __forceinline__ CallView view_of(const SequenceCall &c) { return {c.p.forward, c.s, c.faults}; }

/* A sequence, and a tile of its queries, in shared memory. */
template <int kBlock> struct Alone {
    fa::GradientParams p;     // the call, moved to the sequence
    const int32_t *positions; // of its queries; NULL: by the diagonal
    fa::Segments segments;    // of its queries and keys
    int64_t joined[kThreads / 32];
    int64_t position[kBlock];  // where each query of the tile stands
    fa::KeyRange keys[kBlock]; // that it sees
    float2 unseen[kBlock];     // x: INFINITY for a key that none of them sees

    __device__ __forceinline__ bool alike(int64_t i, int64_t j) const {
        return !segments.q || segments.of_query(0, i) == segments.of_key(0, j);
    }
};

/* How the queries of a sequence see its keys: as Alone says. */
template <Tile t> struct RowSight {
    Alone<t.block> &alone;

    __device__ __forceinline__ static constexpr bool empties() { return true; }
    __device__ __forceinline__ const RowSight &of_head(int64_t) const { return *this; }

    __device__ __forceinline__ fa::KeyRange place(const fa::AttentionParams &f, int64_t first, int64_t end) const {
        __syncthreads(); // all threads are done with the tile before
        for (int n = threadIdx.x; n < t.block; n += kThreads) {
            const int64_t query = first + n, by_diagonal = query + f.diagonal;
            const bool there = query < end;
            const int64_t position = there && alone.positions ? fa_index(alone.positions, query) : by_diagonal;
            alone.position[n] = position;
            alone.keys[n] = there ? fa::row_keys(f, position - f.diagonal) : fa::KeyRange{0, 0};
        }
        if (first >= end) return {0, 0};
        if (!alone.positions) return fa::tile_keys(f, first, end);
        __syncthreads();
        int64_t low = alone.position[0], high = low;
        for (int n = 1; n < t.block && first + n < end; ++n) {
            const int64_t position = alone.position[n];
            low = position < low ? position : low, high = position > high ? position : high;
        }
        return {fa::row_keys(f, low - f.diagonal).begin, fa::row_keys(f, high - f.diagonal).end};
    }
    __device__ __forceinline__ bool meets(const fa::AttentionParams &f, int64_t first, int64_t end,
                                          const fa::KeyRange &seen) const {
        const fa::KeyRange keys = place(f, first, end);
        return keys.begin < seen.end && keys.end > seen.begin;
    }
    /* Those that see some of the keys are no range where there are positions. */
    __device__ __forceinline__ fa::KeyRange queries(const fa::AttentionParams &f, const fa::KeyRange &keys) const {
        if (!alone.positions) return fa::tile_queries(f, keys);
        return {0, keys.empty() ? 0 : f.seq_q};
    }
    __device__ __forceinline__ const float2 *unseen(int64_t key0) const {
        if (!alone.positions) return nullptr;
        for (int n = threadIdx.x; n < t.block; n += kThreads) {
            bool seen = false;
            for (int m = 0; m < t.block; ++m) seen |= key0 + n >= alone.keys[m].begin && key0 + n < alone.keys[m].end;
            alone.unseen[n] = make_float2(seen ? 0.0f : INFINITY, 0.0f);
        }
        __syncthreads();
        return alone.unseen;
    }

    struct Band {
        const Alone<t.block> &alone;
        int64_t query0, key0;

        __device__ __forceinline__ bool sees(int query, int key) const {
            return key0 + key >= alone.keys[query].begin && key0 + key < alone.keys[query].end &&
                   alone.alike(query0 + query, key0 + key);
        }
    };
    __device__ __forceinline__ Band band(const fa::AttentionParams &, int64_t query0, int64_t key0) const {
        return {alone, query0, key0};
    }
    __device__ __forceinline__ int64_t distance(const fa::AttentionParams &, int64_t, int64_t key0, int query,
                                                int key) const {
        return key0 + key - alone.position[query];
    }
};

/* ---- a tile and its sequence ---- */

__device__ __forceinline__ void move_rows(fa_operand &x, int64_t row, size_t size) {
    if (x.data) x.data = static_cast<char *>(x.data) + row * x.stride[2] * int64_t(size);
}

/* Moves the call to sequence `batch`, whose first query and key are rows first_q and first_k. By the block. */
template <typename T, int kBlock>
__device__ __forceinline__ void settle(const SequenceCall &c, const fa_entry &e, int64_t batch, int64_t first_q,
                                       int64_t first_k, Alone<kBlock> &alone) {
    static_assert(sizeof(fa::GradientParams) % sizeof(int64_t) == 0);
    const fa_span keys = fa::entry_keys(e, c.p.forward.left, c.p.forward.right, alone.joined);
    __syncthreads(); // all threads are done with the sequence before
    const auto *from = reinterpret_cast<const int64_t *>(&c.p);
    auto *to = reinterpret_cast<int64_t *>(&alone.p);
    for (unsigned n = threadIdx.x; n < sizeof(fa::GradientParams) / sizeof(int64_t); n += kThreads) to[n] = from[n];
    __syncthreads();
    if (threadIdx.x == 0) {
        fa::GradientParams &p = alone.p;
        fa::AttentionParams &f = p.forward;
        f.seq_q = e.seq_q, f.seq_k = e.seq_k, f.diagonal = e.diagonal;
        f.key_begin = keys.begin, f.key_end = keys.end;
        const auto size_of = [](fa_dtype dtype) { return dtype == FA_F32 ? sizeof(float) : sizeof(T); };
        move_rows(f.q, first_q, sizeof(T));
        move_rows(f.k, first_k, sizeof(T));
        move_rows(f.v, first_k, sizeof(T));
        move_rows(f.out, first_q, size_of(f.out_dtype));
        move_rows(p.dout, first_q, sizeof(T));
        move_rows(p.lse, first_q, sizeof(float));
        move_rows(p.dlse, first_q, sizeof(float));
        move_rows(p.grad[FA_GRAD_Q], first_q, size_of(p.grad_dtype[FA_GRAD_Q]));
        move_rows(p.grad[FA_GRAD_K], first_k, size_of(p.grad_dtype[FA_GRAD_K]));
        move_rows(p.grad[FA_GRAD_V], first_k, size_of(p.grad_dtype[FA_GRAD_V]));
        alone.positions = e.positions;
        alone.segments = c.segments;
        if (c.segments.q) alone.segments.q += batch * c.segments.q_stride;
        if (c.segments.k) alone.segments.k += batch * c.segments.k_stride;
    }
    __syncthreads();
}

/* A tile: rows [first, end) of its sequence, and up to `room` those of none. The sequence's queries begin at `rows` of
 * a head in work.rows. */
struct Place {
    int64_t batch, first, end, room, rows;
};

/* Finds tile n of a side, and its sequence; false where it has no rows. By the block. */
template <typename T, fa::Side side, int kBlock>
__device__ __forceinline__ bool find_tile(const SequenceCall &c, int64_t n, const Tiles &tiles, int block, bool counts,
                                          Alone<kBlock> &alone, Place *place) {
    constexpr bool of_keys = side == fa::Side::keys;
    const fa::Spot spot = fa::find_spot<side>(view_of(c), n, tiles.each, 1, block, counts, alone.joined);
    const fa_entry &e = spot.entry;
    const int64_t begin = spot.rows.begin, stored = spot.rows.end - begin, first = spot.tile * block;
    if (first >= stored) return false; // the same in all threads
    const int64_t first_q = of_keys ? e.first_q : begin, first_k = of_keys ? begin : e.first_k;
    const int64_t length = of_keys ? e.seq_k : e.seq_q, batch = spot.batch < 0 ? 0 : spot.batch;
    settle<T>(c, e, batch, first_q, first_k, alone);
    const int64_t last = first + block < stored ? first + block : stored;
    *place = {batch, first, last < length ? last : length, last, c.s.packed_q ? first_q : batch * c.p.forward.seq_q};
    return true;
}

/* Up to where gradients are written: rows of no sequence are left alone where something is added. */
__device__ __forceinline__ int64_t written(const SequenceCall &c, const Place &place) {
    return c.p.accumulate ? place.end : place.room;
}

/* ---- the kernels ---- */

/* Fills work.rows, a tile of the queries of a kv head's group a thread block. Of a query that sees no key there is dlse
 * in place of delta, for the sink that has all the weight. Counts what is bad in index arrays. */
template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    serve_rows_kernel(const __grid_constant__ SequenceCall c, const __grid_constant__ Work work, Tiles tiles) {
    FA_CHAOS_BEGIN();
    __shared__ Alone<kRowTile> alone;
    const fa::GradientParams &p = alone.p;
    const fa::AttentionParams &f = p.forward;
    for (int64_t n = blockIdx.x; n < work.pairs * tiles.count; n += gridDim.x) {
        const int64_t pair = n / tiles.count;
        Place place;
        if (!find_tile<T, fa::Side::queries>(c, n % tiles.count, tiles, kRowTile, work.first_pair + pair == 0, alone,
                                             &place))
            continue;
        const int64_t count = place.room - place.first, b = place.batch;
        for (int64_t m = threadIdx.x; m < work.group * count; m += kThreads) {
            const int64_t i = place.first + m % count, head = pair * work.group + m / count;
            const int64_t h = work.first_pair * work.group + head;
            float2 row = make_float2(INFINITY, 0.0f);
            if (i < place.end) {
                const int64_t position = alone.positions ? fa_index(alone.positions, i) : i + f.diagonal;
                row = row_values<T>(p, fa::row_keys(f, position - f.diagonal), b, h, i,
                                    [&](int64_t j) { return alone.alike(i, j); });
                if (row.x == INFINITY) row.y = p.dlse.data ? lse_of(p.dlse, b, h, i) : 0.0f;
            }
            work.rows[head * c.rows + place.rows + i] = row;
        }
    }
}

template <typename T, class C>
__global__ void __launch_bounds__(kThreads, 1)
    serve_queries_kernel(const __grid_constant__ SequenceCall c, const __grid_constant__ Work work, Tiles tiles) {
    FA_CHAOS_BEGIN();
    constexpr Tile t = C::tile;
    constexpr int kBlock = t.block;
    extern __shared__ float4 memory[];
    __shared__ Alone<kBlock> alone;
    const Shared<t> shared(reinterpret_cast<float *>(memory), work);
    for (int64_t n = blockIdx.x; n < work.pairs * work.group * tiles.count; n += gridDim.x) {
        const int64_t head = n / tiles.count, h = work.first_pair * work.group + head;
        Place place;
        if (!find_tile<T, fa::Side::queries>(c, n % tiles.count, tiles, t.block, false, alone, &place)) continue;
        own_queries<T, t>(alone.p, work, shared, RowSight<t>{alone}, place.batch, h, h / work.group, place.first,
                          place.end, written(c, place), work.rows + head * c.rows + place.rows);
    }
}

template <typename T, class C>
__global__ void __launch_bounds__(kThreads, 1)
    serve_keys_kernel(const __grid_constant__ SequenceCall c, const __grid_constant__ Work work, Tiles tiles) {
    FA_CHAOS_BEGIN();
    constexpr Tile t = C::tile;
    constexpr int kBlock = t.block;
    extern __shared__ float4 memory[];
    __shared__ Alone<kBlock> alone;
    const Shared<t> shared(reinterpret_cast<float *>(memory), work);
    for (int64_t n = blockIdx.x; n < work.pairs * tiles.count; n += gridDim.x) {
        const int64_t pair = n / tiles.count;
        Place place;
        if (!find_tile<T, fa::Side::keys>(c, n % tiles.count, tiles, t.block, false, alone, &place)) continue;
        own_keys<T, t>(alone.p, work, shared, RowSight<t>{alone}, place.batch, work.first_pair + pair, place.first,
                       written(c, place), work.rows + pair * work.group * c.rows + place.rows, c.rows);
    }
}

/* Of q, k and v that are padded: of each sequence those pairs that exist. */
template <typename T, class C>
__global__ void __launch_bounds__(kThreads, 1)
    serve_bias_kernel(const __grid_constant__ SequenceCall c, const __grid_constant__ Work work) {
    FA_CHAOS_BEGIN();
    constexpr Tile t = C::tile;
    constexpr int kBlock = t.block;
    extern __shared__ float4 memory[];
    __shared__ Alone<kBlock> alone;
    const Shared<t> shared(reinterpret_cast<float *>(memory), work);
    const fa::AttentionParams &f = alone.p.forward;
    own_biases<t>(c.p, shared, [&](int64_t b, const Span &heads, const Span &rows, const Span &keys, auto &sums) {
        settle<T>(c, fa::find_sequence(view_of(c), b, alone.joined).entry, b, 0, 0, alone);
        const int64_t row_end = rows.end < f.seq_q ? rows.end : f.seq_q,
                      key_end = keys.end < f.seq_k ? keys.end : f.seq_k;
        for (int64_t h = heads.begin; h < heads.end; ++h)
            for (int64_t query0 = rows.begin; query0 < row_end; query0 += t.block)
                for (int64_t key0 = keys.begin; key0 < key_end; key0 += t.block)
                    add_bias<T, t>(alone.p, work, shared, RowSight<t>{alone}, b, h, query0, key0,
                                   work.rows + h * c.rows + b * c.p.forward.seq_q, sums);
    });
}

/* A head a thread block, over the rows that q stores: those of no sequence add 0. */
static __global__ void __launch_bounds__(kThreads, 1)
    serve_sinks_kernel(const __grid_constant__ SequenceCall c, const __grid_constant__ Work work) {
    FA_CHAOS_BEGIN();
    __shared__ double parts[kThreads];
    const fa::AttentionParams &f = c.p.forward;
    for (int64_t head = blockIdx.x; head < work.pairs * work.group; head += gridDim.x) {
        const int64_t h = work.first_pair * work.group + head;
        const float sink = sink_of(f, h);
        const float2 *rows = work.rows + head * c.rows;
        double sum = 0;
        for (int64_t n = threadIdx.x; n < c.rows && sink != -INFINITY; n += kThreads) {
            const float2 row = rows[n];
            if (row.x == INFINITY)
                sum += row.y;
            else
                sum -= fa::sink_weight(sink, lse_of(c.p.lse, n / f.seq_q, h, n % f.seq_q)) * row.y;
        }
        write_sink(c.p, h, sum, parts);
    }
}

} // namespace simt_backward
