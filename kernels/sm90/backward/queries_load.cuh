/* The first kernel of wgmma_backward_sm90 (queries.cuh): parameters, shared memory and the producer. */
#pragma once
#include "sm90/backward/sequences.cuh"

namespace fa::sm90 {

/* Rows of the call's out in global memory, columns contiguous, 16-byte aligned. */
struct OutRows {
    const void *data;
    int64_t stride[3]; // elements, of B, H, Sq
};

struct QueriesParams {
    BackwardCall call;
    CUtensorMap q, dout; // boxes of 64 rows, queries that see a key
    union {
        CUtensorMap out;  // the same
        OutRows out_rows; // with C::kWide
    };
    CUtensorMap k, v;                                               // boxes of tile_n rows, visible keys
    int q_step[2], dout_step[2], out_step[2], k_step[2], v_step[2]; // factors 0 or 1 of head and batch coordinates
    Gradient dq;                                                    // without data: no products, LSE and delta alone
    float scale;
    Schedule schedule; // a "head" is a query head of the launch; tile rows are queries
    const float *lse, *dlse;
    int64_t lse_stride[3], dlse_stride[3]; // of (B, H, Sq)
    char *row_blocks;                      // RowBlock<C::kRowBlock> [head of the launch][block]; NULL: not wanted
    int row_block_count;                   // a head
    const void *sinks;
    int64_t sinks_stride;
    fa_dtype sinks_dtype;
    float *sink_parts; // [head of the call][tile][warp], sums over 16 queries; NULL: dsinks is not wanted
};
using SequenceQueriesParams = OfSequences<QueriesParams>; // a "head" of the list is a query head of the launch

template <MapOf kMap>
__device__ __forceinline__ const CUtensorMap *map_of(const QueriesParams &p, const BackwardCall &) {
    return kMap == kMapOfQ      ? &p.q
           : kMap == kMapOfDout ? &p.dout
           : kMap == kMapOfOut  ? &p.out
           : kMap == kMapOfKeys ? &p.k
                                : &p.v;
}

template <class C> struct QueriesSmem {
    static constexpr int kQuerySlabBytes = 64 * kSlabRowBytes;
    static constexpr int kKeySlabBytes = C::kTileN * kSlabRowBytes;
    static constexpr int kQueryBytes = kTileBytes<C::kHeadDim, 64>; // of one warpgroup
    static constexpr int kDoutBytes = kTileBytes<C::kHeadDimV, 64>;
    static constexpr int kKeyBytes = kTileBytes<C::kHeadDim, C::kTileN>;
    static constexpr int kValueBytes = kTileBytes<C::kHeadDimV, C::kTileN>;
    static constexpr int kTileStages = tile_stages<C>;

    alignas(1024) char q[C::kConsumers][kQueryBytes];
    alignas(1024) char dout[C::kConsumers][kDoutBytes];
    alignas(C::kWide ? 16 : 1024) char out[C::kConsumers][C::kWide ? 16 : kDoutBytes];
    alignas(1024) char k[C::kStages][kKeyBytes];
    alignas(1024) char v[C::kValueStages][kValueBytes];
    alignas(16) Tile tile[kTileStages];
    [[no_unique_address]] SequenceCalls<C::kSequences, kTileStages> calls; // of the tiles
    uint64_t q_full[C::kConsumers], q_empty[C::kConsumers];
    uint64_t full[C::kStages], empty[C::kStages]; // keys and values of a block; with C::kWide keys
    uint64_t tile_full[kTileStages], tile_empty[kTileStages];
    uint64_t v_full[C::kValueStages], v_empty[C::kValueStages]; // with C::kWide
};

/* Blocks of a tile: `seen` says whether a query of it sees a key, `count` how many blocks are multiplied. */
struct TileBlocks {
    int end, count;
    bool seen;
};
template <class C, class Params, class Call>
__device__ __forceinline__ TileBlocks tile_blocks(const Params &p, const Call &call, int row) {
    KeyBlocks blocks = key_blocks<C::kMasked, C::kTileN>(call.visible, row, min(row + C::kTileM, call.seq_q));
    if constexpr (C::kSequences)
        if (p.list.whole) blocks.end = blocks.count * C::kTileN;
    return {blocks.end, p.dq.data ? blocks.count : 0, blocks.count > 0};
}

template <class C> __device__ __forceinline__ TileBlocks uniform_blocks(const TileBlocks &blocks) {
    return {uniform<C>(blocks.end), uniform<C>(blocks.count), uniform<C>(blocks.seen) != 0};
}

template <class C, class Params>
__device__ __forceinline__ void queries_produce(const Params &p, QueriesSmem<C> &smem) {
    using Smem = QueriesSmem<C>;
    RingState<C::kStages> ring(1); // of keys and of values
    RingState<1> q_ring(1);
    RingState<C::kValueStages> v_ring(1); // with C::kWide
    produce_tiles<C, C::kTileM, false>(p, smem, [&](const auto &call, const Tile &tile, auto &&announce_next) {
        const TileBlocks blocks = tile_blocks<C>(p, call, tile.row);
        if (!blocks.seen) return announce_next();
        const CallHead at = query_head_of<C>(p.call, tile);
        const int batch = C::kSequences ? 0 : at.batch, own = at.head, kv_head = own / p.call.group;
        if constexpr (C::kSequences)
            if (is_new_span(smem, tile))
                for (int map = kMapOfQ; map <= kMapOfValues; ++map)
                    if (!C::kWide || map != kMapOfOut) acquire_sequence_map(call.maps + map);
        auto load_values = [&](int key) {
            uint64_t *full = &smem.v_full[v_ring.stage];
            mbarrier_wait(&smem.v_empty[v_ring.stage], v_ring.parity);
            mbarrier_arrive_expect(full, Smem::kValueBytes);
            tma_load_tile<C::kHeadDimV, C::kTileN>(smem.v[v_ring.stage], map_of<kMapOfValues>(p, call), full, key,
                                                   kv_head * p.v_step[0], batch * p.v_step[1], kEvictLast);
            v_ring.advance();
        };
        auto load_block = [&](int block) {
            const int key = blocks.end - (block + 1) * C::kTileN;
            uint64_t *full = &smem.full[ring.stage];
            mbarrier_wait(&smem.empty[ring.stage], ring.parity);
            mbarrier_arrive_expect(full, Smem::kKeyBytes + (C::kWide ? 0 : Smem::kValueBytes));
            tma_load_tile<C::kHeadDim, C::kTileN>(smem.k[ring.stage], map_of<kMapOfKeys>(p, call), full, key,
                                                  kv_head * p.k_step[0], batch * p.k_step[1], kEvictLast);
            if constexpr (C::kWide) {
                load_values(key);
            } else {
                tma_load_tile<C::kHeadDimV, C::kTileN>(smem.v[ring.stage], map_of<kMapOfValues>(p, call), full, key,
                                                       kv_head * p.v_step[0], batch * p.v_step[1], kEvictLast);
            }
            ring.advance();
        };
        for (int wg = 0; wg < C::kConsumers; ++wg) {
            const int row = tile.row + wg * 64 - call.row_begin;
            uint64_t *full = &smem.q_full[wg];
            mbarrier_wait(&smem.q_empty[wg], q_ring.parity);
            mbarrier_arrive_expect(full, Smem::kQueryBytes + (C::kWide ? 1 : 2) * Smem::kDoutBytes);
            tma_load_tile<C::kHeadDim, 64>(smem.q[wg], map_of<kMapOfQ>(p, call), full, row, own * p.q_step[0],
                                           batch * p.q_step[1], kEvictNormal);
            tma_load_tile<C::kHeadDimV, 64>(smem.dout[wg], map_of<kMapOfDout>(p, call), full, row + p.call.dout_row,
                                            own * p.dout_step[0], batch * p.dout_step[1], kEvictNormal);
            if constexpr (!C::kWide)
                tma_load_tile<C::kHeadDimV, 64>(smem.out[wg], map_of<kMapOfOut>(p, call), full, row,
                                                own * p.out_step[0], batch * p.out_step[1], kEvictFirst);
        }
        q_ring.advance();
        if (blocks.count > 0) load_block(0);
        announce_next();
        for (int block = 1; block < blocks.count; ++block) load_block(block);
    });
}

} // namespace fa::sm90
