/* prefill_sm90: queries, keys and values on their way to shared memory: a warp for queries and keys, one for values.
 *
 * A block of keys is one box of packed or padded storage, or one of each piece of a page; lane n asks for box n. Keys
 * that no row of the tile sees are not looked up, and come as zeros (a page) or as they are (a part of a box). Values
 * of the latter kind become zeros before the consumers see them, since a weight of 0 times NaN is NaN.
 *
 * Pages that are no whole number of boxes come row by row, in pieces of 16 bytes (cp.async): box_rows is 0. A block is
 * signalled when the copies of the next have started, so that two are on their way. */
#pragma once
#include "common/rows.cuh"
#include "sm90/prefill/config.cuh"

namespace fa::sm90::prefill {

/* The tiles of a block, as a warp that is no consumer gets them. */
template <class C> struct Tiles {
    Smem<C> &smem;
    RingState<Smem<C>::kTileStages> ring{0};

    /* The next one; NULL: there are no more. */
    __device__ __forceinline__ const Tile *next() {
        mbarrier_wait(&smem.tile_full[ring.stage], ring.parity);
        const Tile *tile = &smem.tile[ring.stage];
        return tile->blocks < 0 ? nullptr : tile;
    }
    __device__ __forceinline__ void release() {
        __syncwarp();
        if (threadIdx.x % 32 == 0) mbarrier_arrive(&smem.tile_empty[ring.stage]);
        ring.advance();
    }
};

/* Where the lane's box lies. */
struct Box {
    int row, batch;
    bool asks;   // the lane has a box
    bool hidden; // somebody may see its keys, but the table names no page
};
template <class C> __device__ __forceinline__ Box locate(const Params &params, const Tile &tile, int first_key) {
    const fa_pages &pages = params.call.s.pages;
    const int offset = static_cast<int>(threadIdx.x % 32) * params.box_rows, key = first_key + offset;
    Box box = {tile.of.first_k + key, tile.of.b, offset < C::kTileN, false};
    if (!pages.table) return box;
    box.row = kNowhere, box.batch = 0;
    if (box.asks && key + params.box_rows > tile.low && key < tile.high) {
        const int size = static_cast<int>(pages.size), column = key / size;
        const int page = static_cast<int>(fa_page(&pages, tile.of.b, column));
        box.hidden = page < 0;
        if (page >= 0) box.row = key - column * size, box.batch = page;
    }
    return box;
}

/* Asks for a block; the barrier expects its bytes already. The warp calls it: coordinates that are uniform cost no loop
 * over its lanes. */
template <class C>
__device__ __forceinline__ void load_block(const Params &params, const Tile &tile, const Box &box, char *to,
                                           const CUtensorMap &map, const fa_operand &x, uint64_t *barrier, int boxes) {
    const int head = x.stride[1] ? __shfl_sync(~0u, tile.kv_head, 0) : 0, mine = x.stride[0] ? box.batch : 0;
    const int bytes = params.box_rows * kSlabRowBytes;
#pragma unroll 2
    for (int n = 0; n < boxes; ++n, to += bytes) {
        const int row = __shfl_sync(~0u, box.row, n), batch = __shfl_sync(~0u, mine, n);
        if (elect_one()) {
#pragma unroll
            for (int slab = 0; slab < Smem<C>::kSlabs; ++slab)
                tma_load(to + slab * Smem<C>::kKeySlabBytes, &map, barrier, slab * kSlabColumns, row, head, batch,
                         kEvictLast);
        }
        __syncwarp();
    }
}

template <class C>
__device__ __forceinline__ void load_queries(const Params &params, Smem<C> &smem, const Tile &tile,
                                             RingState<C::kQueryStages> &ring) {
    const Call &call = params.call;
    const fa_operand &x = call.q;
    const int lane = threadIdx.x % 32, batch = x.stride[0] ? __shfl_sync(~0u, tile.of.b, 0) : 0;
    const int head = x.stride[1] ? __shfl_sync(~0u, tile.head, 0) : 0;
    const bool packed = __shfl_sync(~0u, tile.packed, 0);
    const int queries = packed ? call.group_queries : 64, rows = packed ? call.group * queries : 64;
    const CUtensorMap *const map = packed ? &params.q_heads : &params.q;
#pragma unroll 1
    for (int wg = 0; wg < C::kConsumers; ++wg) {
        uint64_t *full = &smem.q_full[ring.stage][wg];
        const bool some = tile.blocks > 0 && tile.part[wg].rows > 0; // else the warpgroup learns that nothing comes
        mbarrier_wait(&smem.q_empty[ring.stage][wg], ring.parity);
        __syncwarp();
        if (lane == 0) mbarrier_arrive_expect(full, some ? rows * kSlabRowBytes * Smem<C>::kSlabs : 0);
        __syncwarp();
        if (!some) continue;
        const int row = __shfl_sync(~0u, tile.of.first_q + tile.part[wg].query, 0);
        if (elect_one()) {
#pragma unroll
            for (int slab = 0; slab < Smem<C>::kSlabs; ++slab)
                tma_load(smem.q[ring.stage][wg] + slab * Smem<C>::kQuerySlabBytes, map, full, slab * kSlabColumns,
                         packed ? head : row, packed ? row : head, batch, kEvictFirst);
        }
        __syncwarp();
    }
    ring.advance();
}

/* Tells the consumers which keys of a block have no page. */
__device__ __forceinline__ void tell_hidden(uint32_t (&words)[4], const Box &box, int box_rows) {
    const int lane = threadIdx.x % 32;
    const uint32_t hidden = __ballot_sync(~0u, box.hidden);
    if (lane >= 4) return;
    uint32_t word = 0;
    if (hidden) {
#pragma unroll 1
        for (int n = 0; n < 32; ++n) word |= (hidden >> (lane * 32 + n) / box_rows & 1) << n;
    }
    words[lane] = word;
}

/* Asks for a block row by row; rows that no query sees become zeros. `hidden`: as of tell_hidden(), or NULL. */
template <class C>
__device__ __forceinline__ void load_rows(const Params &params, const Tile &tile, int first_key, char *to,
                                          const fa_operand &x, uint32_t *hidden) {
    constexpr int kPieces = Smem<C>::kSlabs * 8; // of a row
    const fa_pages &pages = params.call.s.pages;
    const int lane = threadIdx.x % 32, size = static_cast<int>(pages.size), columns = params.call.head_dim;
    const uint32_t shared = shared_address(to);
#pragma unroll 1
    for (int group = 0; group < C::kTileN / 32; ++group) { // 32 rows, one a lane
        const int key = first_key + group * 32 + lane;
        int64_t offset = -1;
        bool lacks = false;
        if (key >= tile.low && key < tile.high) {
            const int column = key / size;
            const int64_t page = fa_page(&pages, tile.of.b, column);
            lacks = page < 0;
            if (page >= 0)
                offset = page * x.stride[0] + tile.kv_head * x.stride[1] + (key - column * size) * x.stride[2];
        }
        const uint32_t word = __ballot_sync(~0u, lacks);
        if (hidden && lane == 0) hidden[group] = word;
#pragma unroll 1
        for (int n = 0; n < kPieces; ++n) {
            const int row = (n * 32 + lane) / kPieces, piece = (n * 32 + lane) % kPieces;
            const int64_t from = __shfl_sync(~0u, offset, row);
            const bool exists = from >= 0 && piece * 8 < columns;
            const uint32_t at = shared + piece / 8 * Smem<C>::kKeySlabBytes + (group * 32 + row) * kSlabRowBytes +
                                ((piece ^ row) % 8) * 16;
            const char *there = static_cast<const char *>(x.data);
            cp_async_16(at, exists ? there + (from + piece * 8) * 2 : there, exists);
        }
    }
}

/* Blocks whose copies a warp has started, but not signalled yet: at most one. */
struct Copies {
    int untold = -1; // its stage

    __device__ __forceinline__ void started(uint64_t *full, int stage) {
        cp_async_commit();
        if (untold >= 0) {
            cp_async_wait<1>();
            tell(full);
        }
        untold = stage;
    }
    __device__ __forceinline__ void finish(uint64_t *full) {
        if (untold < 0) return;
        cp_async_wait<0>();
        tell(full);
        untold = -1;
    }

  private:
    __device__ __forceinline__ void tell(uint64_t *full) {
        tma_store_fence(); // the products read what the copies wrote
        __syncwarp();
        if (threadIdx.x % 32 == 0) mbarrier_arrive(&full[untold]);
    }
};

/* Queries and keys. One warp. */
template <class C, bool kRows> __device__ __forceinline__ void produce_keys(const Params &params, Smem<C> &smem) {
    const int lane = threadIdx.x % 32;
    Tiles<C> tiles{smem};
    RingState<C::kStages> ring(1);
    RingState<C::kQueryStages> q_ring(1);
    Copies copies;
#pragma unroll 1
    for (const Tile *tile; (tile = tiles.next()); tiles.release()) {
        // Where there is room for two tiles of queries, theirs is free long before that of keys.
        constexpr bool kQueriesFirst = C::kQueryStages > 1;
        if (kQueriesFirst || tile->blocks == 0) load_queries(params, smem, *tile, q_ring);
        const int half = C::kHalfTiles ? tile->half : 0;
#pragma unroll 1
        for (int block = 0; block < tile->blocks; ++block) {
            const int first = tile->end - (block + 1) * C::kTileN;
            uint32_t(&hidden)[4] = smem.hidden[ring.stage + C::kStages * (ring.parity ^ 1)];
            if constexpr (kRows) {
                mbarrier_wait(&smem.k_empty[ring.stage], ring.parity);
                __syncwarp();
                load_rows<C>(params, *tile, first, smem.k[ring.stage], params.call.k, hidden);
                copies.started(smem.k_full, ring.stage);
            } else {
                uint64_t *full = &smem.k_full[ring.stage];
                const Box box = locate<C>(params, *tile, first);
                mbarrier_wait(&smem.k_empty[ring.stage], ring.parity);
                if (params.call.s.pages.table) tell_hidden(hidden, box, params.box_rows);
                __syncwarp();
                if (lane == 0) mbarrier_arrive_expect(full, Smem<C>::kKeyBytes >> half);
                __syncwarp();
                load_block<C>(params, *tile, box, smem.k[ring.stage], params.k, params.call.k, full,
                              params.boxes >> half);
            }
            ring.advance();
            if (!kQueriesFirst && block == 0) load_queries(params, smem, *tile, q_ring);
        }
        if constexpr (kRows) copies.finish(smem.k_full);
    }
}

/* Rows [first, last) of a block of values become 0. The warp calls it. */
template <class C> __device__ __forceinline__ void clear_values(char *values, int first, int last) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int slab = 0; slab < Smem<C>::kSlabs; ++slab)
#pragma unroll 1
        for (int row = first + lane / 8; row < last; row += 4)
            *reinterpret_cast<uint4 *>(values + slab * Smem<C>::kKeySlabBytes + row * kSlabRowBytes + lane % 8 * 16) =
                make_uint4(0, 0, 0, 0);
}

/* Values. One warp. */
template <class C, bool kRows> __device__ __forceinline__ void produce_values(const Params &params, Smem<C> &smem) {
    const int lane = threadIdx.x % 32;
    Tiles<C> tiles{smem};
    RingState<C::kStages> ring(1);
    RingState<1> landed(0);
    Copies copies;
#pragma unroll 1
    for (const Tile *tile; (tile = tiles.next()); tiles.release()) {
        const int half = C::kHalfTiles ? tile->half : 0;
#pragma unroll 1
        for (int block = 0; block < tile->blocks; ++block, ring.advance()) {
            const int first = tile->end - (block + 1) * C::kTileN;
            char *to = smem.v[ring.stage];
            if constexpr (kRows) {
                mbarrier_wait(&smem.v_empty[ring.stage], ring.parity);
                __syncwarp();
                load_rows<C>(params, *tile, first, to, params.call.v, nullptr);
                copies.started(smem.v_full, ring.stage);
                continue;
            }
            const Box box = locate<C>(params, *tile, first);
            const int keys = C::kTileN >> half;
            const bool whole = first >= tile->low && first + keys <= tile->high;
            uint64_t *full = whole ? &smem.v_full[ring.stage] : &smem.v_landed;
            mbarrier_wait(&smem.v_empty[ring.stage], ring.parity);
            __syncwarp();
            if (lane == 0) mbarrier_arrive_expect(full, Smem<C>::kKeyBytes >> half);
            __syncwarp();
            load_block<C>(params, *tile, box, to, params.v, params.call.v, full, params.boxes >> half);
            if (whole) continue;
            mbarrier_wait(&smem.v_landed, landed.parity);
            landed.advance();
            clear_values<C>(to, 0, tile->low - first);
            clear_values<C>(to, max(tile->high - first, 0), keys);
            tma_store_fence(); // the products read what was written here
            __syncwarp();
            if (lane == 0) mbarrier_arrive(&smem.v_full[ring.stage]);
        }
        if constexpr (kRows) copies.finish(smem.v_full);
    }
}

} // namespace fa::sm90::prefill
