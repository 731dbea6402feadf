/* The simt kernel for calls with more than dense arrays: sequences of any length, paged keys, positions, segments,
 * intervals, ALiBi, dropout, max_logit, float32 results. Its steps on a block of keys are those of simt/kernel.cuh.
 *
 * The tile follows from head_dim alone, its rows are counted from the first query of its sequence and its blocks of
 * keys from the first key that they see: so the bits of a sequence depend on that sequence alone. Lengths and tables
 * are read here and nowhere else; a row of keys is found through an index of the block's rows in shared memory, in
 * which a key that no query sees has no page. */
#pragma once

#include "common/alibi.cuh"  // slope_of, with_alibi
#include "common/faults.cuh" // count_fault
#include "common/intervals.cuh"
#include "common/max_logit.cuh"
#include "common/score.cuh" // bounded
#include "common/segments.cuh"
#include "common/spot.cuh" // Serving, Spot, find_spot
#include "philox.h"        // fa_dropout_keeps, fa_dropout_read, fa_dropout_scale
#include "simt/kernel.cuh" // LaneTile, general_scores, load4

namespace fa::simt {

/* Where a query of the tile stands, and the keys that it sees. */
struct QueryRow {
    int64_t position;
    int64_t begin, end;
};

/* Where a row of k and v lies: on the first axis, -1 where it is not to be looked at, and on that of rows. */
struct KeyRow {
    int64_t page, row;
};

/* Shared by the threads of a block, beside the buffers of the tile. */
template <Tile t> struct Shared {
    KeyRow key[t.groups][t.block_n];
    QueryRow query[t.block_m];
    int32_t key_id[t.groups][t.block_n], query_id[t.block_m]; // of segments; all alike without
    Span<int> gap[t.block_m]; // keys that a query does not see between its two intervals
    fa_span keys, held;       // that some query sees through causal and window; through intervals, too
    int64_t joined[t.warps];
    fa_dropout dropout; // as it was when the block began
};

template <Tile t> constexpr size_t serve_bytes() { return (t.smem_bytes() + 15) / 16 * 16 + sizeof(Shared<t>); }

/* A tile of queries: rows [begin, end) of out, the first of them query `query` of the entry. */
struct TileSpot : Spot {
    int64_t query;
};

/* `n`: which of the tiles of a head. */
__device__ __forceinline__ TileSpot find_tile(const Serving &c, int64_t n, int64_t head, int64_t tiles_m, int block_m,
                                              int64_t *joined) {
    TileSpot spot = {find_spot(c, n, tiles_m, 1, block_m, head == 0, joined), 0};
    spot.query = spot.tile * block_m;
    spot.rows.begin += spot.query;
    if (spot.rows.end > spot.rows.begin + block_m) spot.rows.end = spot.rows.begin + block_m;
    return spot;
}

/* The least and the largest of the lanes' values. */
__device__ __forceinline__ fa_span bounds_of(int64_t first, int64_t last) {
#pragma unroll
    for (int offset = kWarp / 2; offset; offset /= 2) {
        const int64_t a = __shfl_xor_sync(~0u, first, offset), b = __shfl_xor_sync(~0u, last, offset);
        first = a < first ? a : first;
        last = b > last ? b : last;
    }
    return {first, last};
}

/* Cuts what each query sees to its intervals, and fills Shared::gap and held: by the first warp, a row a lane. */
template <Tile t>
__device__ __forceinline__ void place_intervals(const Intervals &intervals, const TileSpot &spot, int64_t head,
                                                Shared<t> &shared) {
    const int lane = threadIdx.x;
    if (lane >= kWarp) return;
    KeyRange seen = {0, 0};
    Span<int> gap = {0, 0};
    if (lane < t.block_m && spot.query + lane < spot.entry.seq_q) {
        const Held held = intervals.of_query(spot.batch, head, spot.query + lane);
        QueryRow &row = shared.query[lane];
        seen = held.within(KeyRange{row.begin, row.end}), gap = held.gap();
        row.begin = seen.begin, row.end = seen.end;
    }
    if (lane < t.block_m) shared.gap[lane] = gap;
    const fa_span all = bounds_of(seen.empty() ? INT64_MAX : seen.begin, seen.end);
    if (lane == 0) shared.held = all;
}

/* Fills Shared::query, query_id, keys, gap and held: by the first warp, a row a lane. */
template <Tile t>
__device__ __forceinline__ void place_queries(const Serving &c, const Segments &segments, const TileSpot &spot,
                                              Shared<t> &shared) {
    static_assert(t.block_m <= kWarp);
    const int lane = threadIdx.x;
    if (lane >= kWarp) return;
    const fa_entry &e = spot.entry;
    const int64_t left = e.seq_q - spot.query, rows = left < t.block_m ? left : t.block_m;
    const bool there = lane < rows;
    const int64_t position = rows > 0 ? fa_position(&e, spot.query + (there ? lane : 0)) : 0;
    const fa_span stand = bounds_of(position, position);
    const fa_span keys = fa_tile_keys(&e, c.p.left, c.p.right, stand.begin, stand.end);
    const fa_span seen = fa_row_keys(&e, c.p.left, c.p.right, position);
    if (lane < t.block_m)
        shared.query[lane] = there ? QueryRow{position, seen.begin, seen.end} : QueryRow{position, 0, 0};
    if (lane < t.block_m) shared.query_id[lane] = there ? segments.of_query(spot.batch, spot.query + lane) : 0;
    if (lane < t.block_m) shared.gap[lane] = {0, 0};
    if (lane == 0) shared.keys = shared.held = rows > 0 && keys.begin < keys.end ? keys : fa_span{0, 0};
}

/* Whether a tile of the sequence before this one looks at the page of a column, whose first key is `first`. */
__device__ __forceinline__ bool seen_before(const Serving &c, const TileSpot &spot, int64_t first, int block_m) {
    if (spot.tile == 0 || c.s.positions) return false;
    const int64_t at = fa_position(&spot.entry, spot.query);
    const fa_span keys = fa_tile_keys(&spot.entry, c.p.left, c.p.right, at - block_m, at - 1);
    return keys.begin < keys.end && first < keys.end;
}

/* Where key `key` of the entry lies. `count`: this thread counts a bad page. */
template <Tile t>
__device__ __forceinline__ KeyRow find_key(const Serving &c, const TileSpot &spot, const Shared<t> &shared, int64_t key,
                                           bool count) {
    const fa_pages &pages = c.s.pages;
    if (key >= shared.keys.end || key < shared.held.begin || key >= shared.held.end) return {-1, 0};
    if (c.s.positions) { /* between the keys that its queries see there may be some that none of them sees */
        bool seen = false;
        for (int m = 0; m < t.block_m; ++m) seen |= key >= shared.query[m].begin && key < shared.query[m].end;
        if (!seen) return {-1, 0};
    }
    if (!pages.table) return {c.s.packed_k ? 0 : spot.batch, spot.entry.first_k + key};
    const uint32_t size = pages.size < INT32_MAX ? static_cast<uint32_t>(pages.size) : INT32_MAX; // of 2^31 - 1 keys
    const uint32_t column = static_cast<uint32_t>(key) / size;
    const int32_t entry = fa_page_entry(&pages, spot.batch, column);
    const int64_t first = int64_t(column) * pages.size, page = fa_page_of(&pages, entry);
    if (page < 0 && count && (key == first || key == shared.keys.begin) && !seen_before(c, spot, first, t.block_m))
        count_fault(c.faults, FA_FAULT_page, spot.batch, column, entry);
    return {page, key - first};
}

/* The rows of a block of keys, of k or v, as float32 to shared memory; those without a page are zero and not read. */
template <typename T, Tile t> struct RowLoader {
    using Plain = Loader<T, t, t.block_n, t.group_threads()>;
    using Raw = typename Plain::Raw;

    const T *base; // of the head
    int64_t stride_page, stride_row, stride_dim;
    int length;
    bool chunks;

    __device__ RowLoader(const fa_operand &x, int64_t head, int length, bool chunks)
        : base(row_of<T>(x, 0, head, 0)), stride_page(x.stride[0]), stride_row(x.stride[2]), stride_dim(x.stride[3]),
          length(length), chunks(chunks) {}

    __device__ const T *at(const KeyRow &key) const { return base + key.page * stride_page + key.row * stride_row; }

    __device__ Raw fetch(int item, const KeyRow *keys) const {
        const int n = thread_index() % t.group_threads() + item * t.group_threads();
        const int row = n / Plain::kChunks, dim = n % Plain::kChunks * Plain::kWidth;
        if (row < t.block_n && keys[row].page >= 0 && dim < length)
            return *reinterpret_cast<const Raw *>(at(keys[row]) + dim);
        return Raw{};
    }

    __device__ void copy(float *smem, const KeyRow *keys) const {
        if (!chunks) return copy_elements(smem, keys);
        constexpr int kBatch = Plain::kItems < 4 ? Plain::kItems : 4;
#pragma unroll 1
        for (int item = 0; item < Plain::kItems; item += kBatch) {
            Raw raw[kBatch];
#pragma unroll
            for (int i = 0; i < kBatch; ++i) raw[i] = fetch(item + i, keys);
#pragma unroll
            for (int i = 0; i < kBatch; ++i) Plain::store(smem, item + i, raw[i]);
        }
    }

    __device__ void copy_elements(float *smem, const KeyRow *keys) const {
#pragma unroll 4
        for (int n = thread_index() % t.group_threads(); n < t.block_n * t.head_dim; n += t.group_threads()) {
            const int row = n / t.head_dim, dim = n % t.head_dim;
            const bool inside = keys[row].page >= 0 && dim < length;
            smem[row * t.row_floats() + dim] = inside ? to_float(at(keys[row])[dim * stride_dim]) : 0.0f;
        }
    }
};

/* The visibility that general_scores() needs for the rows of one warp and the keys of one block. */
struct Sight {
    const QueryRow *query;
    const KeyRow *key;
    int64_t key0;
    float slope;

    __device__ bool sees(int row, int column) const {
        const int64_t j = key0 + column;
        return j >= query[row].begin && j < query[row].end && key[column].page >= 0;
    }

    /* Bias less slope times distance, within the limit of a bias. The slope is 0 without ALiBi, NaN if not finite. */
    __device__ float with_slope(float bias, int row, int column) const {
        if (slope == 0) return bias;
        const int64_t distance = query[row].position - (key0 + column);
        return with_alibi(bounded(bias), slope, static_cast<float>(distance));
    }
};

/* The same with segments, and with two intervals. */
struct GeneralSight : Sight {
    const int32_t *query_id, *key_id;
    const Span<int> *gap;
    bool wants_logit;

    __device__ bool sees(int row, int column) const {
        const int64_t j = key0 + column;
        return query_id[row] == key_id[column] && Sight::sees(row, column) && (j < gap[row].begin || j >= gap[row].end);
    }
};

/* Zeroes the weights that dropout takes, of a warp's rows and a block of keys in shared memory. */
template <int kRows, int kKeys, int kStride>
__device__ __noinline__ void drop(const fa_dropout &dropout, float *weights, int64_t batch, int64_t head, int64_t row0,
                                  int64_t key0) {
#pragma unroll 1
    for (int n = threadIdx.x % kWarp; n < kRows * kKeys; n += kWarp) {
        const int row = n / kKeys, column = n % kKeys;
        if (!fa_dropout_keeps(&dropout, batch, head, row0 + row, key0 + column)) weights[row * kStride + column] = 0.0f;
    }
}

/* Raises the maximum of a head to the largest of a warp's. */
__device__ __forceinline__ void raise_logit(const MaxLogit &max_logit, int64_t batch, int64_t head, float logit) {
#pragma unroll
    for (int offset = kWarp / 2; offset; offset /= 2) logit = fmaxf(logit, __shfl_xor_sync(~0u, logit, offset));
    if (threadIdx.x % kWarp == 0) max_logit.raise(batch, head, logit);
}

template <typename T, Tile t> struct ServeTile : LaneTile<T, t> {
    using Base = LaneTile<T, t>;
    using Base::Base, Base::kLaneRows, Base::kLaneKeys, Base::kLaneQuads;

    /* Products to scores, by way of shared memory. The largest scaled product of this lane, where it is wanted. */
    __device__ __forceinline__ float score(float (&s)[kLaneRows][kLaneKeys], const Serving &c, const Options &o,
                                           const TileSpot &spot, int64_t head, const GeneralSight &sight) const {
        float *mine = this->scores + this->warp_row * Base::kScoreStride;
        this->put(s);
        __syncwarp();
        const float logit = general_scores<T, Base::kWarpRows, t.block_n, Base::kScoreStride>(
            c.p, o, mine, spot.batch, head, spot.query + this->warp_row, sight.key0, sight);
        __syncwarp();
        this->get(s);
        return logit;
    }

    /* The largest of scores that are scaled products or, where they are hidden, -inf. */
    __device__ __forceinline__ static float largest(const float (&s)[kLaneRows][kLaneKeys]) {
        float logit = -INFINITY;
#pragma unroll
        for (int i = 0; i < kLaneRows; ++i)
#pragma unroll
            for (int j = 0; j < kLaneKeys; ++j) logit = fmaxf(logit, s[i][j]);
        return logit;
    }

    /* Normalises and writes the rows and their LSE; rows of no query get 0 and -inf. */
    __device__ __forceinline__ void finish(const Serving &c, const Options &o, const TileSpot &spot, int64_t head) {
        const AttentionParams &p = c.p;
        const int64_t batch = spot.batch < 0 ? 0 : spot.batch;
        const float kept = c.dropout.threshold ? static_cast<float>(fa_dropout_scale(&c.dropout)) : 1.0f;
#pragma unroll
        for (int i = 0; i < kLaneRows; ++i) {
            NaturalRowState &state = this->state[i];
#pragma unroll
            for (int offset = 2; offset <= 8; offset *= 2) state.sum += __shfl_xor_sync(~0u, state.sum, offset);
            const int of_tile = this->row + kRowGroups * i;
            const int64_t row = spot.rows.begin + of_tile;
            if (row >= spot.rows.end) continue;
            RowResult result = {0.0f, -INFINITY};
            if (spot.query + of_tile < spot.entry.seq_q) result = finish_row(p, head, state);
            const bool seen = spot.query + of_tile < spot.entry.seq_q && state.sum != 0.0f;
            const float factor = result.factor * kept;
#pragma unroll
            for (int d = 0; d < kLaneQuads; ++d) {
                float value[4];
#pragma unroll
                for (int e = 0; e < 4; ++e) value[e] = seen ? this->out[i][d][e] * factor : 0.0f;
                if (sizeof(T) == 4 || p.out_dtype != FA_F32)
                    write<T>(p, o, batch, head, row, 4 * this->column + 32 * d, value);
                else
                    write<float>(p, o, batch, head, row, 4 * this->column + 32 * d, value);
            }
            if (this->column == 0) store_lse(p, batch, head, row, result.lse);
        }
    }

  private:
    template <typename O>
    __device__ __forceinline__ static void write(const AttentionParams &p, const Options &o, int64_t batch,
                                                 int64_t head, int64_t row, int dim, const float (&value)[4]) {
        Chunk<O, 4> chunk;
#pragma unroll
        for (int e = 0; e < 4; ++e) chunk.element[e] = from_float<O>(value[e]);
        store_chunk(row_of<O>(p.out, batch, head, row), p.out.stride[3], dim, p.head_dim_v, o.out_chunks, chunk);
    }
};

template <typename T, class C>
__global__ void __launch_bounds__(C::tile.threads(), C::tile.blocks)
    simt_serve(const __grid_constant__ Serving c, const __grid_constant__ Options o,
               const __grid_constant__ Segments segments, const __grid_constant__ Intervals intervals,
               const __grid_constant__ MaxLogit max_logit) {
    FA_CHAOS_BEGIN();
    constexpr Tile t = C::tile;
    static_assert(!t.separate() && !t.prefetch() && t.warps >= kFewestWarps);
    extern __shared__ float4 memory[];
    float *smem = reinterpret_cast<float *>(memory);
    auto &shared = *reinterpret_cast<Shared<t> *>(memory + (t.smem_bytes() + 15) / 16);
    const AttentionParams &p = c.p;
    ServeTile<T, t> lane(smem);
    KeyRow *index = shared.key[lane.group];
    int32_t *key_id = shared.key_id[lane.group];
    if (threadIdx.x == 0 && c.dropout.threshold) shared.dropout = fa_dropout_read(&c.dropout);

    for (int64_t tile = blockIdx.x; tile < o.tiles; tile += gridDim.x) {
        const int64_t head = tile % p.heads, head_kv = head / (p.heads / p.heads_kv);
        const TileSpot spot = find_tile(c, tile / p.heads, head, o.tiles_m, t.block_m, shared.joined);
        if (spot.rows.begin >= spot.rows.end) continue; // the same in all threads
        place_queries(c, segments, spot, shared);
        if (intervals.begins && spot.batch >= 0) place_intervals(intervals, spot, head, shared);
        __syncthreads();
        const fa_span keys = shared.keys, held = shared.held;
        const bool idle = spot.query + lane.warp_row >= spot.entry.seq_q; // the warp has no query

        lane.clear();
        if (keys.begin < keys.end) {
            using QueryLoader = Loader<T, t, t.block_m, t.threads()>;
            const int64_t first = spot.entry.first_q + spot.query, end = spot.entry.first_q + spot.entry.seq_q;
            QueryLoader(p.q, spot.batch, head, p.head_dim, o.q_chunks).copy(lane.q, first, end);
            __syncthreads();
        }
        const RowLoader<T, t> k_loader(p.k, head_kv, p.head_dim, o.k_chunks);
        const RowLoader<T, t> v_loader(p.v, head_kv, p.head_dim_v, o.v_chunks);
        const float slope = spot.batch < 0 ? 0.0f : slope_of(c.alibi, spot.batch, head);

        for (int64_t key0 = keys.begin + lane.group * t.block_n; key0 < keys.end; key0 += t.groups * t.block_n) {
            if (key0 >= held.end || key0 + t.block_n <= held.begin) continue; // the same in all threads of the group
            for (int n = thread_index() % t.group_threads(); n < t.block_n; n += t.group_threads()) {
                index[n] = find_key(c, spot, shared, key0 + n, head == 0);
                key_id[n] = key0 + n < keys.end ? segments.of_key(spot.batch, key0 + n) : 0;
            }
            lane.sync_group(); // the index is there
            k_loader.copy(lane.k, index);
            lane.sync_group(); // K is there

            if (!idle) {
                float s[lane.kLaneRows][lane.kLaneKeys];
                lane.multiply_keys(s, p.head_dim);
                float logit = -INFINITY;
                if (o.general) {
                    const Sight sight = {shared.query + lane.warp_row, index, key0, slope};
                    logit = lane.score(s, c, o, spot, head,
                                       {sight, shared.query_id + lane.warp_row, key_id, shared.gap + lane.warp_row,
                                        max_logit.at != nullptr});
                } else {
                    lane.scale_products(s, o.scale);
                    lane.exclude(s, Sight{shared.query + lane.row, index, key0, slope});
                    if (max_logit.at) logit = lane.largest(s);
                }
                if (max_logit.at) raise_logit(max_logit, spot.batch, head, logit);
                lane.absorb(s);
                if (c.dropout.threshold) {
                    __syncwarp();
                    drop<lane.kWarpRows, t.block_n, lane.kScoreStride>(
                        shared.dropout, lane.scores + lane.warp_row * lane.kScoreStride, spot.batch, head,
                        spot.query + lane.warp_row, key0);
                }
            }

            lane.sync_group(); // every warp is done with K
            v_loader.copy(lane.v, index);
            lane.sync_group(); // V and P are there
            if (!idle) lane.multiply_values();
            lane.sync_group(); // every warp is done with V
        }

        if constexpr (t.groups > 1) lane.merge_groups(smem);
        if (lane.group == 0) lane.finish(c, o, spot, head);
        __syncthreads(); // all threads are done with the shared memory
    }
}

} // namespace fa::simt
