/* prefill_sm90: from a unit to a tile and the keys it sees. A warp of each block hands tiles to the others, ahead.
 */
#pragma once
#include "sm90/common/barrier.cuh"
#include "sm90/prefill/config.cuh"

namespace fa::sm90::prefill {

/* Positions from the lowest to the highest of the queries [first, last]. */
struct Stands {
    int64_t low, high;
};
__device__ __forceinline__ Stands stands(const fa_entry &e, int first, int last) {
    if (!e.positions) return {first + e.diagonal, last + e.diagonal};
    int low = INT32_MAX, high = INT32_MIN;
    for (int query = first + static_cast<int>(threadIdx.x % 32); query <= last; query += 32) {
        const int at =
            e.positions[query]; // keys are clamped to those there are; fa_index() costs spills at head_dim 64
        low = min(low, at), high = max(high, at);
    }
    return {__reduce_min_sync(~0u, low), __reduce_max_sync(~0u, high)};
}

/* Which tile unit `inside` of a sequence is. One thread. */
__device__ __forceinline__ void find_tile(const Call &call, Tile &tile, uint32_t inside) {
    const Record &of = tile.of;
    const bool packed = packs(call, of.seq_q);
    const uint32_t tiles = of.tiles, width = of.width, whole = tiles * width;
    const uint32_t section = inside < whole ? 0 : inside / whole, rest = inside - section * whole;
    const uint32_t here = min(width, tile_heads(call, packed) - section * width);
    const uint32_t step = rest < here ? 0 : rest / here;
    const int head = static_cast<int>(section * width + rest - step * here);
    tile.query = static_cast<int>(tiles - 1 - step) * tile_queries(call, packed);
    tile.kv_head = packed ? head : head / call.group, tile.head = packed ? head * call.group : head;
    tile.packed = packed;
}

/* The same of a sequence in chunks: unit `inside` is one of a tile's, or has all of them, of which this is `chunk`. One
 * thread. */
__device__ __forceinline__ void find_chunk(const Call &call, Tile &tile, uint32_t inside, int chunk) {
    Record &of = tile.of;
    const bool alone = of.slot < 0;
    const uint32_t chunks = of.chunks;
    find_tile(call, tile, alone ? inside : inside / chunks);
    if (!alone) chunk = static_cast<int>(inside % chunks);
    const int64_t first = int64_t(of.first_chunk + chunk) * of.chunk;
    of.key_begin = static_cast<int>(max(int64_t(of.key_begin), first));
    of.key_end = static_cast<int>(min(int64_t(of.key_end), first + of.chunk));
    tile.slot = static_cast<int>(alone ? call.workspace.slots + blockIdx.x : of.slot + inside);
    tile.first_slot = alone ? -1 : tile.slot - chunk;
    tile.folds = alone && chunk > 0, tile.ends = alone && chunk + 1 == of.chunks;
}

/* The keys that the tile and its warpgroups see. The warp calls it: lane n for warpgroup n. The first rows of a tile of
 * packed heads go to each warpgroup in turn, since the last such tile of a sequence has few: `turn` counts units. */
template <class C> __device__ __forceinline__ void see(const Call &call, Tile &tile, uint32_t turn) {
    constexpr int kWarpgroups = C::kConsumers;
    const int lane = threadIdx.x % 32;
    const bool turns = tile.packed && tile.slot < 0;
    const int queries = tile.packed ? call.group_queries : 64, rows = tile.packed ? call.group : 1;
    const int place = turns ? (lane + turn) % kWarpgroups : lane;
    const int first = tile.query + place * queries,
              count = lane < kWarpgroups ? min(queries, tile.of.seq_q - first) : 0;
    Stands at;
    if (!call.s.positions) {
        const int64_t diagonal = diagonal_of(call, tile.of);
        at = {first + diagonal, first + count - 1 + diagonal};
    } else {
        const fa_entry e = entry_of(call, tile.of);
#pragma unroll 1
        for (int wg = 0; wg < kWarpgroups; ++wg) {
            const int from = __shfl_sync(~0u, first, wg), some = __shfl_sync(~0u, count, wg);
            const Stands theirs = stands(e, from, from + some - 1);
            if (lane == wg) at = theirs;
        }
    }
    Part part = {max(count, 0) * rows, first, 0, 0, 0, 0, 0, -C::kTileN};
    int low = INT32_MAX, high = 0, common_begin = 0, common_end = 0;
    if (count > 0) {
        const auto bound_of = [](int64_t key) { return static_cast<int>(fa_clamp(key, -kNowhere, kNowhere)); };
        const int begin = tile.of.key_begin, key_end = tile.of.key_end;
        part.low = bound_of(at.low - call.left), part.high = bound_of(at.low + call.right + 1);
        common_begin = max(bound_of(at.high - call.left), begin), common_end = max(min(part.high, key_end), 0);
        const int first_key = max(part.low, begin), last_key = min(bound_of(at.high + call.right + 1), key_end);
        if (first_key < last_key) low = first_key, high = part.seen_end = last_key;
    }
    low = __reduce_min_sync(~0u, low), high = __reduce_max_sync(~0u, high);
    int end = (high + kCut - 1) / kCut * kCut;
    const int blocks = high > low ? (end - low + C::kTileN - 1) / C::kTileN : 0;
    const bool half = C::kHalfTiles && blocks == 1 && end - low <= kCut;
    if (half) end += kCut;
    part.first = min(blocks, max(end - part.seen_end, 0) / C::kTileN);
    part.plain = min((end - common_end + C::kTileN - 1) / C::kTileN, blocks);
    part.plain_end = min(max(end - common_begin, 0) / C::kTileN, blocks);
    if (lane < kWarpgroups) tile.part[lane] = part;
    if (lane == 0) tile.low = low, tile.high = high, tile.end = end, tile.blocks = blocks, tile.half = half;
}

/* Finds unit `unit`, or its next chunk, and hands it out. The warp calls it; true if the unit has more chunks. */
template <class C>
__device__ __forceinline__ bool tell_unit(const Call &call, Smem<C> &smem, Tile &tile, uint32_t unit) {
    const int lane = threadIdx.x % 32;
    int at = smem.scheduler.at;
    __syncwarp(); // before lane 0 writes it
    while (true) {
        const int n = at + lane;
        const bool begun = n < call.batch && static_cast<uint32_t>(call.workspace.record(n)->unit) <= unit;
        const int count = __popc(__ballot_sync(~0u, begun));
        at += count - 1;
        if (count == 32) continue;
        constexpr int kWords = sizeof(Record) / 4;
        if (lane < kWords)
            reinterpret_cast<int *>(&tile.of)[lane] = reinterpret_cast<const int *>(call.workspace.record(at))[lane];
        if (lane == 0) smem.scheduler.at = at;
        break;
    }
    __syncwarp();
    if (lane == 0) {
        tile.slot = -1;
        bool again = false;
        if (const int chunks = tile.of.chunks) {
            const int chunk = smem.scheduler.chunk;
            again = tile.of.slot < 0 && chunk + 1 < chunks;
            smem.scheduler.chunk = again ? chunk + 1 : 0;
            find_chunk(call, tile, unit - tile.of.unit, chunk);
        } else {
            find_tile(call, tile, unit - tile.of.unit);
        }
        smem.scheduler.again = again;
    }
    __syncwarp();
    see<C>(call, tile, unit);
    return smem.scheduler.again;
}

/* Tells the block its tiles, one after the other. One warp.
 *
 * A unit is taken from the counter when there is a place to tell it; where the tile before was short beside what the
 * counter takes to answer, it is asked one unit ahead. */
template <class C> __device__ __forceinline__ void schedule(const Params &params, Smem<C> &smem) {
    constexpr int kShort = 3; // blocks
    const Call &call = params.call;
    const int lane = threadIdx.x % 32;
    Scheduler &known = smem.scheduler;
    RingState<Smem<C>::kTileStages> ring(1);
    if (lane == 0) known = {0, 0, false, call.workspace.header()->units, blockIdx.x};
    __syncwarp();
    uint32_t answer = 0; // of the counter, in lane 0
    bool asked = false, ahead = false, again = true;
    const auto ask = [&] {
        if (lane == 0) answer = gridDim.x + atomicAdd(&call.workspace.header()->counter, 1u);
        asked = true;
    };
    while (true) {
        mbarrier_wait(&smem.tile_empty[ring.stage], ring.parity);
        if (!again) {
            if (!asked) ask();
            if (lane == 0) known.unit = answer;
            asked = false;
        }
        __syncwarp();
        if (known.unit >= known.units) break;
        if (ahead && !asked) ask();
        Tile &tile = smem.tile[ring.stage];
        again = tell_unit<C>(call, smem, tile, known.unit);
        __syncwarp();
        ahead = tile.blocks <= kShort;
        __syncwarp();
        if (lane == 0) mbarrier_arrive(&smem.tile_full[ring.stage]);
        ring.advance();
    }
    if (lane == 0) {
        smem.tile[ring.stage].blocks = -1;
        mbarrier_arrive(&smem.tile_full[ring.stage]);
    }
}

} // namespace fa::sm90::prefill
