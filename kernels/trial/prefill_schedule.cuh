/* prefill_sm90: from a unit to a tile and what it sees. A warp of each block tells the others its tiles, ahead of them.
 */
#pragma once
#include "sm90/barrier.cuh"
#include "trial/prefill_config.cuh"

namespace fa::sm90::prefill {

/* KiB of keys and values of a section, given those of a kv head: as wgmma_sm90 has it. */
__device__ __forceinline__ uint32_t section_kib(uint32_t head_kib) {
    return (head_kib <= 256 ? 16 : head_kib <= 1 << 10 ? 32 : 64) << 10;
}

/* Positions from the lowest to the highest of the queries [first, last]. */
struct Stands {
    int64_t low, high;
};
__device__ __forceinline__ Stands stands(const fa_entry &e, int first, int last) {
    if (!e.positions) return {first + e.diagonal, last + e.diagonal};
    int low = INT32_MAX, high = INT32_MIN;
    for (int query = first + static_cast<int>(threadIdx.x % 32); query <= last; query += 32) {
        const int at = e.positions[query];
        low = min(low, at), high = max(high, at);
    }
    return {__reduce_min_sync(~0u, low), __reduce_max_sync(~0u, high)};
}

/* Which tile unit `inside` of a sequence is. One thread. */
__device__ __forceinline__ void find_tile(const Call &call, Tile &tile, uint32_t inside) {
    const Record &of = tile.of;
    const bool packed = packs(call, of.seq_q);
    const uint32_t queries = tile_queries(call, packed), tiles = (of.seq_q + queries - 1) / queries,
                   heads = tile_heads(call, packed), each = packed ? 1 : call.group;
    const uint32_t row = (call.p.head_dim + call.p.head_dim_v) * 2; // bytes of a key and its value
    const uint32_t kib = max(static_cast<uint32_t>((uint64_t(of.seq_k) * row) >> 10), 1u), fit = section_kib(kib) / kib;
    const uint32_t width = min(each * max(fit, 1u), heads);
    const uint32_t section = inside / (tiles * width), rest = inside - section * tiles * width;
    const uint32_t here = min(width, heads - section * width), step = rest / here;
    const int head = static_cast<int>(section * width + rest - step * here);
    tile.query = static_cast<int>((tiles - 1 - step) * queries);
    tile.kv_head = head / static_cast<int>(each), tile.head = packed ? head * call.group : head;
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
    tile.folds = alone && chunk > 0, tile.ends = alone && chunk + 1 == of.chunks;
    tile.parts = !alone && chunk == 0 ? of.chunks : 0;
}

/* Which keys the tile and its warpgroups see. The warp calls it. */
template <class C> __device__ __forceinline__ void see(const Call &call, Tile &tile) {
    const int lane = threadIdx.x % 32, seq_k = tile.of.seq_k;
    const int queries = tile.packed ? call.group_queries : 64, rows = tile.packed ? call.group : 1;
    const auto key_of = [&](int64_t key) { return static_cast<int>(fa_clamp(key, 0, seq_k)); };
    const auto bound_of = [](int64_t key) { return static_cast<int>(fa_clamp(key, -kNowhere, kNowhere)); };
    int low = INT32_MAX, high = 0;
#pragma unroll 1
    for (int wg = 0; wg < C::kConsumers; ++wg) {
        const int first = tile.query + wg * queries, count = min(queries, tile.of.seq_q - first);
        Part part = {max(count, 0) * rows, 0, 0, 0, 0, 0, -C::kTileN};
        if (count > 0) {
            const fa_entry e = entry_of(call, tile.of);
            const Stands at = stands(e, first, first + count - 1);
            const fa_span seen = fa_tile_keys(&e, call.p.left, call.p.right, at.low, at.high);
            const fa_span common = fa_common_keys(&e, call.p.left, call.p.right, at.low, at.high);
            part.plain_end = key_of(common.begin), part.plain = key_of(common.end); // keys, until the end is known
            part.low = bound_of(at.low - call.p.left), part.high = bound_of(at.low + call.p.right + 1);
            if (seen.begin < seen.end) {
                part.seen_end = key_of(seen.end);
                low = min(low, key_of(seen.begin)), high = max(high, part.seen_end);
            }
        }
        if (lane == 0) tile.part[wg] = part;
    }
    if (lane) return;
    const int end = (high + kCut - 1) / kCut * kCut;
    const int blocks = high > low ? (end - low + C::kTileN - 1) / C::kTileN : 0;
    tile.low = low, tile.high = high, tile.end = end, tile.blocks = blocks;
    tile.spans = tile.packed || call.s.positions;
#pragma unroll 1
    for (int wg = 0; wg < C::kConsumers; ++wg) {
        Part &part = tile.part[wg];
        part.first = min(blocks, max(end - part.seen_end, 0) / C::kTileN);
        part.plain = min((end - part.plain + C::kTileN - 1) / C::kTileN, blocks);
        part.plain_end = min(max(end - part.plain_end, 0) / C::kTileN, blocks);
    }
}

/* Finds unit `unit`, or its next chunk, and tells it. The warp calls it; true if the unit has more chunks. */
template <class C>
__device__ __forceinline__ bool tell_unit(const Call &call, Smem<C> &smem, Tile &tile, uint32_t unit) {
    const int lane = threadIdx.x % 32;
    int at = smem.scheduler.at;
    __syncwarp(); // before lane 0 writes it
    while (true) {
        const int n = at + lane;
        const bool begun = n < call.p.batch && static_cast<uint32_t>(call.workspace.record(n)->unit) <= unit;
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
    see<C>(call, tile);
    return smem.scheduler.again;
}

/* Tells the block its tiles, one after the other. One warp.
 *
 * A unit is taken from the counter when there is a place to tell it, or, where a tile is short beside what the counter
 * takes to answer, right after the tile before. */
template <class C> __device__ __forceinline__ void schedule(const Params &params, Smem<C> &smem) {
    constexpr int kShort = 3; // blocks
    const Call &call = params.call;
    const int lane = threadIdx.x % 32;
    Header *const header = call.workspace.header();
    const auto take = [&] {
        uint32_t taken = 0;
        if (lane == 0) taken = atomicAdd(&header->counter, 1u);
        return gridDim.x + __shfl_sync(~0u, taken, 0);
    };
    RingState<Smem<C>::kTileStages> ring(1);
    if (lane == 0) smem.scheduler = {0, 0, false};
    __syncwarp();
    const uint32_t units = header->units;
    uint32_t unit = blockIdx.x;
    bool taken = true;
    while (true) {
        Tile &tile = smem.tile[ring.stage];
        mbarrier_wait(&smem.tile_empty[ring.stage], ring.parity);
        __syncwarp();
        if (!taken) unit = take();
        taken = true;
        if (unit >= units) break;
        if (!tell_unit<C>(call, smem, tile, unit)) taken = false;
        __syncwarp();
        const int blocks = tile.blocks;
        __syncwarp();
        if (lane == 0) mbarrier_arrive(&smem.tile_full[ring.stage]);
        __syncwarp();
        ring.advance();
        if (!taken && blocks <= kShort) {
            unit = take();
            taken = true;
        }
    }
    if (lane == 0) {
        smem.tile[ring.stage].blocks = -1;
        mbarrier_arrive(&smem.tile_full[ring.stage]);
    }
}

} // namespace fa::sm90::prefill
