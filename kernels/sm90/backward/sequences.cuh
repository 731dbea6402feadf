/* Calls over sequences. A sequence is a dense problem of its own: it has the numbers that a dense call has (a
 * SequenceCall), and tensor maps that begin and end where its rows do, so that what lies around them is read as zeros
 * and its bits are those of the dense call. sequence_calls.cuh makes both in workspace.
 *
 * A warp of each block tells it tiles, ahead: a tile takes three reads of memory that depend on one another.
 * Tiles are numbered as place_sequences() has them, times heads; within a sequence the heads go in sections whose
 * streamed operands fit in L2, each section from its longest tile of a causal call to its shortest, or in turns from
 * the last one of keys to the first. A tile that is spare is not told.
 *
 * Here also what kernels ask of a call of either sort. */
#pragma once
#include "common/sequence_tiles.cuh"
#include "sm90/backward/kernel.cuh"
#include "sm90/common/sequence_maps.cuh"

namespace fa::sm90 {

/* Tensor maps of a sequence: of the first kernel before those that the second alone reads; wgmma_fused_backward_sm90
 * reads kMapOfQ, kMapOfDout and those of tiles of keys. Each kernel has boxes of its own (make_sequences()). */
enum MapOf { kMapOfQ, kMapOfDout, kMapOfOut, kMapOfKeys, kMapOfValues, kMapOfTileK, kMapOfTileV, kSequenceMaps };

/* A sequence as BackwardCall has a call; then where its rows and tiles are. */
struct alignas(16) SequenceCall {
    const CUtensorMap *maps; // kSequenceMaps
    ShiftedBand visible;
    int seq_q, seq_k, key_begin;
    int row_begin, row_end;
    int batch;                           // of operands that have a batch axis
    int first_q, first_k;                // its first row of what has q's rows; of keys alike
    int end_q, end_k;                    // where the rows of its gradients end
    int row_block;                       // its first one of a head
    int first_tile[kTilesOfKeys + 1];    // its first one of a head
    int tiles[kTilesOfKeys + 1];         // how many have rows
    int section_heads[kTilesOfKeys + 1]; // heads, or kv heads, walked together
};
static_assert(sizeof(SequenceCall) % 16 == 0, "copied 16 bytes at a time");

/* The tiles of a launch over sequences. */
struct SequenceList {
    const SequenceCall *calls; // of each span
    const int *span;           // of each tile of a head
    uint32_t units, heads;     // tiles of all heads; heads of the launch
    uint32_t *counter;         // zero at launch
    bool whole;                // every query sees every key of its sequence
};

/* Tiles that a block knows of; of a dense call as in ForwardSmem. Of sequences the next one alone, since who takes a
 * tile from the counter long before its turn leaves others without work at the end. */
template <class C> inline constexpr int tile_stages = C::kSequences ? 2 : 4;

template <bool Sequences, int Stages> struct SequenceCalls {};
template <int Stages> struct SequenceCalls<true, Stages> {
    SequenceCall of[Stages];
    uint64_t wanted; // the next tile, by the producer of a kernel whose tiles are taken late
    int acquired;    // the span whose maps the producer has acquired: its own, here since it is short of registers
};

/* Parameters of a kernel over sequences; maps of Base say nothing. */
template <class Base> struct OfSequences : Base { SequenceList list; };

/* ---- one call, of either sort ---- */

/* The same number, which is that of all lanes: in a uniform register, where those of a dense call are. */
template <class C> __device__ __forceinline__ int uniform(int x) {
    return C::kSequences ? __shfl_sync(0xffffffff, x, 0) : x;
}

__device__ __forceinline__ int first_query(const BackwardCall &) { return 0; }
__device__ __forceinline__ int first_query(const SequenceCall &call) { return call.first_q; }
__device__ __forceinline__ int first_key(const BackwardCall &) { return 0; }
__device__ __forceinline__ int first_key(const SequenceCall &call) { return call.first_k; }
/* Where the rows of gradients end that the call writes. */
__device__ __forceinline__ int end_of_queries(const BackwardCall &call) { return call.seq_q; }
__device__ __forceinline__ int end_of_queries(const SequenceCall &call) { return call.end_q; }
__device__ __forceinline__ int end_of_keys(const BackwardCall &call) { return call.seq_k; }
__device__ __forceinline__ int end_of_keys(const SequenceCall &call) { return call.end_k; }
__device__ __forceinline__ int first_tile(const BackwardCall &, Tiling) { return 0; }
__device__ __forceinline__ int first_tile(const SequenceCall &call, Tiling tiling) { return call.first_tile[tiling]; }
__device__ __forceinline__ int first_row_block(const BackwardCall &) { return 0; }
__device__ __forceinline__ int first_row_block(const SequenceCall &call) { return call.row_block; }
/* Row blocks of a head. */
template <int Rows, class Params> __device__ __forceinline__ int row_blocks_of(const Params &p, const BackwardCall &) {
    return p.row_block_count;
}
template <int Rows, class Params>
__device__ __forceinline__ int row_blocks_of(const Params &, const SequenceCall &call) {
    return (call.seq_q + Rows - 1) / Rows;
}

template <class C> __device__ __forceinline__ ShiftedBand uniform(const ShiftedBand &band) {
    return {uniform<C>(band.seq_k), uniform<C>(band.lower), uniform<C>(band.upper)};
}

/* A head of a tile, and its batch entry. */
struct CallHead {
    int head, batch;
};
template <class C> __device__ __forceinline__ CallHead head_of(int head, int heads, const Tile &tile) {
    if constexpr (C::kSequences) return {head, tile.batch};
    const int batch = head / heads;
    return {head - batch * heads, batch};
}
template <class C> __device__ __forceinline__ CallHead query_head_of(const BackwardCall &call, const Tile &tile) {
    return head_of<C>(call.first_pair * call.group + tile.head, call.heads, tile);
}
template <class C> __device__ __forceinline__ CallHead kv_head_of(const BackwardCall &call, const Tile &tile) {
    return head_of<C>(call.first_pair + tile.head, call.heads_kv, tile);
}

/* The call that the tile of `round` belongs to, once tile_row_of() has it. Where it lies is worked out again each time:
 * it would take a register from the products. */
template <class C, class Params, class Smem>
__device__ __forceinline__ const auto &call_of(const Params &p, const Smem &smem, uint32_t round) {
    if constexpr (C::kSequences)
        return smem.calls.of[fresh(round) % Smem::kTileStages];
    else
        return p.call;
}

/* Whether the producer has to acquire the maps of a tile. */
template <class Smem> __device__ __forceinline__ bool is_new_span(Smem &smem, const Tile &tile) {
    const bool is_new = tile.span != smem.calls.acquired;
    smem.calls.acquired = tile.span;
    return is_new;
}

/* A map of a tile's operands. */
template <MapOf kMap, class Params>
__device__ __forceinline__ const CUtensorMap *map_of(const Params &, const SequenceCall &call) {
    return call.maps + kMap;
}

/* ---- tiles ---- */

/* When a block takes its next tile: as the one before begins, or earlier where tiles are short; or where the producer
 * wants it, the first one from the counter too, and of each head from the last tile to the first. */
enum Taking { kTakenAhead, kTakenInTurns };

/* Tells the block its tiles of `Rows` rows. One thread. */
template <Tiling kTiling, int Rows, Taking kTaking = kTakenAhead, class Smem>
__device__ __forceinline__ void tell_tiles(const SequenceList &list, Smem &smem) {
    constexpr int kShort = 384; // rows that a tile walks over in less time than it takes to tell one
    constexpr bool kLastFirst = kTiling == kTilesOfQueries || kTaking == kTakenInTurns; // else that is the shortest
    RingState<Smem::kTileStages> ring(1);
    RingState<1> wanted(0);
    const auto take = [&] { return (kTaking == kTakenInTurns ? 0 : gridDim.x) + atomicAdd(list.counter, 1); };
    for (uint32_t unit = kTaking == kTakenInTurns ? take() : blockIdx.x; unit < list.units;) {
        const int span = list.span[unit / list.heads];
        const SequenceCall &of = list.calls[span];
        const uint32_t tiles = of.tiles[kTiling], width = of.section_heads[kTiling];
        const uint32_t inside = unit - of.first_tile[kTiling] * list.heads;
        if (inside >= tiles * list.heads) { // spare
            unit = take();
            continue;
        }
        const uint32_t section = inside / (tiles * width), rest = inside - section * tiles * width;
        const uint32_t here = min(width, list.heads - section * width), step = rest / here;
        const uint32_t tile = kLastFirst ? tiles - 1 - step : step;
        if constexpr (kTaking != kTakenAhead) mbarrier_wait(&smem.tile_empty[ring.stage], ring.parity);
        smem.tile[ring.stage] = {int(tile) * Rows, int(section * width + rest - step * here), of.batch, span};
        auto *to = reinterpret_cast<uint4 *>(&smem.calls.of[ring.stage]);
#pragma unroll 1 // few registers
        for (int n = 0; n < int(sizeof(SequenceCall) / 16); ++n) to[n] = reinterpret_cast<const uint4 *>(&of)[n];
        const bool is_short = (kTiling == kTilesOfQueries ? of.seq_k : of.seq_q) <= kShort;
        mbarrier_arrive(&smem.tile_full[ring.stage]);
        ring.advance();
        if constexpr (kTaking != kTakenAhead) {
            mbarrier_wait(&smem.calls.wanted, wanted.parity);
            wanted.advance();
            unit = take();
        } else {
            if (is_short) unit = take();
            mbarrier_wait(&smem.tile_empty[ring.stage], ring.parity);
            if (!is_short) unit = take();
        }
    }
    if constexpr (kTaking != kTakenAhead) mbarrier_wait(&smem.tile_empty[ring.stage], ring.parity);
    smem.tile[ring.stage].row = -1;
    mbarrier_arrive(&smem.tile_full[ring.stage]);
}

/* tile_row_of() for one thread. */
template <class Smem> __device__ __forceinline__ int told_row(Smem &smem, uint32_t round) {
    mbarrier_wait(&smem.tile_full[round % Smem::kTileStages], round / Smem::kTileStages % 2);
    return smem.tile[round % Smem::kTileStages].row;
}

/* The producer's tiles of `Rows` rows. body(call, tile, announce_next) loads one; it calls announce_next() where the
 * next one may be waited for. kLastFirst: a call from its last tile to its first. One thread. */
template <class C, int Rows, bool kLastFirst, class Params, class Smem, class Body>
__device__ __forceinline__ void produce_tiles(const Params &p, Smem &smem, Body &&body) {
    if constexpr (C::kSequences) {
        smem.calls.acquired = -1;
        for (uint32_t round = 0; told_row(smem, round) >= 0; ++round) {
            const uint32_t stage = round % Smem::kTileStages;
            body(smem.calls.of[stage], smem.tile[stage], [] {});
            mbarrier_arrive(&smem.tile_empty[stage]);
        }
    } else {
        RingState<Smem::kTileStages> ring(1);
        auto announce = [&](uint32_t index) {
            Tile tile = tile_at(p.schedule, index, kLastFirst ? 1 : Rows);
            if (kLastFirst && tile.row >= 0) tile.row = (int(p.schedule.query_tiles) - 1 - tile.row) * Rows;
            announce_tile(smem, ring, tile);
            return tile;
        };
        Tile tile = announce(next_tile<C::kMasked>(p.schedule, 0)), next;
        for (uint32_t round = 1; tile.row >= 0; ++round, tile = next) {
            const uint32_t next_index =
                next_tile<C::kMasked>(p.schedule, round); // early: the counter answers while this tile is loaded
            body(p.call, tile, [&] { next = announce(next_index); });
        }
    }
}

} // namespace fa::sm90
