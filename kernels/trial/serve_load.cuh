/* serve_sm90: tiles of K and V on their way to shared memory.
 *
 * Each team has a ring of stages and fills it itself: when all its warps have read a stage, it asks for what comes next
 * there, so that no barrier has to say that a stage is empty.
 *
 * Why no waiter falls two phases behind:
 *
 *   full: a phase ends with the bytes of TMA, or with the copies of every lane of the team. The next one can only end
 * after the stage has been asked for again, which comes after release(), where each warp of the team arrives after its
 * own wait for the phase before.
 *
 *   the named barrier of a team, in release(): all its warps wait, nobody only arrives.
 *
 * `valid` says which keys of a tile some query may see and have a page. Whoever writes it arrives on `full` of K
 * afterwards; it is read between the wait for that and release(), so never while it is written. */
#pragma once
#include "common/ptx.cuh"
#include "sm90/barrier.cuh"
#include "sm90/tma.cuh"
#include "trial/serve_walk.cuh"

namespace fa::sm90::serve {

/* Where a key lies; a batch below 0, or of a page that there is not: nowhere. */
struct Place {
    int batch, row;

    __device__ __forceinline__ bool exists(const Params &params) const {
        return batch >= 0 && (!params.s.pages.table || batch < params.s.pages.count);
    }
};

/* The place of the keys [key, key + count) of a sequence, which lie in one page. The table is read if somebody may see
 * one of them; nobody waits for that here. */
__device__ __forceinline__ Place locate(const Params &params, const Tile &at, int key, int count) {
    if (key + count <= at.low || key >= at.high) return {-1, 0};
    const fa_pages &pages = params.s.pages;
    if (!pages.table) return {params.s.packed_k ? 0 : at.b, at.first_k + key};
    const int size = static_cast<int>(pages.size), column = key / size;
    return {pages.table[at.b * pages.stride + column], key - column * size};
}

/* Adds this thread's arrival on the barrier, which must count it, once its copies so far have landed. */
__device__ __forceinline__ void cp_async_arrive(uint64_t *barrier, int site = __builtin_LINE()) {
    FA_CHAOS_POINT(site);
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

/* Brings a box to L2, where whoever writes it later finds it: it may come before dependency_wait(). One thread. */
__device__ __forceinline__ void tma_prefetch(const CUtensorMap *map, int column, int row, int head, int batch) {
    asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(map), "r"(column),
                 "r"(row), "r"(head), "r"(batch)
                 : "memory");
}

template <class C> struct Ring {
    static_assert(C::kColumns / 8 % C::kTeam == 0);
    const Params &params;
    char *tiles;     // stage s: K, V
    uint64_t *full;  // stage s: K, V
    uint64_t *valid; // stage s
    int team, member, lane;
    Place place[2]; // of the tile to ask for: the lane's box, or its rows `lane` and `lane + 32`

    __device__ __forceinline__ char *tile(int stage, int which) const {
        return tiles + (2 * stage + which) * C::kTileBytes;
    }
    __device__ __forceinline__ uint64_t *barrier(int stage, int which) const { return full + 2 * stage + which; }

    /* One thread of the team. */
    __device__ __forceinline__ void init() const {
#pragma unroll
        for (int n = 0; n < 2 * C::kStages; ++n) // rows: every lane's copies, and who writes `valid`
            mbarrier_init(full + n, params.load == Load::kBoxes ? 1 : 32 * C::kTeam + (n % 2 == 0));
    }

    /* All warps of the team have read what they join after. */
    __device__ __forceinline__ void release() const {
        if constexpr (C::kTeam == 1)
            __syncwarp();
        else
            named_barrier_sync(1 + team, 32 * C::kTeam);
    }

    /* Finds where a tile's keys lie: if there are registers, well before they are asked for; a table takes its time. */
    __device__ __forceinline__ void find(const Tile &at) {
        const int first = at.tile * kTileKeys;
        if (params.load == Load::kBoxes) {
            if (member) return;
            const int keys = 1 << params.box_shift;
            place[0] = lane * keys < kTileKeys ? locate(params, at, first + lane * keys, keys) : Place{-1, 0};
        } else {
            place[0] = locate(params, at, first + lane, 1), place[1] = locate(params, at, first + lane + 32, 1);
        }
    }

    /* Brings what the ring will take of [at.tile, at.end) nearer; of dense calls alone, since nothing may be read yet.
     */
    __device__ __forceinline__ void prefetch(const Tile &at) const {
        if (params.load != Load::kBoxes || member || lane) return;
        const int k_head = params.p.k.stride[1] ? at.head : 0, v_head = params.p.v.stride[1] ? at.head : 0,
                  k_batch = params.p.k.stride[0] ? at.b : 0, v_batch = params.p.v.stride[0] ? at.b : 0;
#pragma unroll 1
        for (int tile = at.tile; tile < min(at.end, at.tile + C::kStages); ++tile)
#pragma unroll
            for (int slab = 0; slab < C::kSlabs; ++slab) {
                tma_prefetch(&params.k_map, slab * 64, tile * kTileKeys, k_head, k_batch);
                tma_prefetch(&params.v_map, slab * 64, tile * kTileKeys, v_head, v_batch);
            }
    }

    /* Starts K of the tile that was found last. */
    __device__ __forceinline__ void start_keys(const Tile &at, int stage) const {
        start(at, stage, 0, params.k_map, params.p.k, params.p.head_dim);
    }
    /* Starts V of the same tile. */
    __device__ __forceinline__ void start_values(const Tile &at, int stage) const {
        start(at, stage, 1, params.v_map, params.p.v, params.p.head_dim_v);
    }

  private:
    template <class Held>
    __device__ __forceinline__ void write_valid(const Tile &at, int stage, Held held, int step) const {
        const int first = at.tile * kTileKeys, low = max(at.low - first, 0), high = min(at.high - first, 64);
        uint64_t bits = ~UINT64_C(0) >> (64 - (high - low)) << low; // a tile has a key that somebody sees
        const uint64_t box = step == 64 ? ~UINT64_C(0) : (UINT64_C(1) << step) - 1;
        for (int key = 0; key < kTileKeys; key += step)
            if (!held(key)) bits &= ~(box << key);
        valid[stage] = bits;
    }

    __device__ __forceinline__ void start(const Tile &at, int stage, int which, const CUtensorMap &map,
                                          const fa_operand &x, int columns) const {
        const int head = x.stride[1] ? at.head : 0;
        char *to = tile(stage, which);
        const bool exists = place[0].exists(params);
        if (params.load == Load::kBoxes) {
            if (member) return;
            const int keys = 1 << params.box_shift;
            const uint32_t held = __ballot_sync(~0u, exists);
            if (lane * keys < kTileKeys) {
                const int row = exists ? place[0].row : kNowhere, batch = exists && x.stride[0] ? place[0].batch : 0;
#pragma unroll
                for (int slab = 0; slab < C::kSlabs; ++slab)
                    tma_load(to + slab * C::kSlabBytes + lane * keys * 128, &map, barrier(stage, which), slab * 64, row,
                             head, batch, kEvictFirst);
            }
            if (lane) return;
            if (which == 0)
                write_valid(
                    at, stage, [&](int key) { return held >> (key >> params.box_shift) & 1; }, keys);
            mbarrier_arrive_expect(barrier(stage, which), C::kTileBytes); // the phase lasts until then, whatever lands
        } else {
            const bool exist[2] = {exists, place[1].exists(params)};
            if (which == 0) {
                const uint32_t low = __ballot_sync(~0u, exist[0]), high = __ballot_sync(~0u, exist[1]);
                if (member == 0 && lane == 0) {
                    valid[stage] = uint64_t(high) << 32 | low;
                    mbarrier_arrive(barrier(stage, 0));
                }
            }
            constexpr int kPieces = C::kColumns / 8; // of a row
            const char *base = static_cast<const char *>(x.data) + head * x.stride[1] * 2;
            const uint32_t shared = shared_address(to);
#pragma unroll
            for (int half = 0; half < 2; ++half) { // 32 rows, whose places the lanes hold
                const Place mine = place[half];
                const int64_t offset = !exist[half] ? -1 : mine.batch * x.stride[0] + mine.row * x.stride[2];
#pragma unroll 4
                for (int n = 0; n < kPieces / C::kTeam; ++n) {
                    const int index = (n * C::kTeam + member) * 32 + lane, row = index / kPieces,
                              piece = index % kPieces;
                    const int64_t from = __shfl_sync(~0u, offset, row);
                    const bool exists = from >= 0 && piece * 8 < columns;
                    cp_async_16(shared + piece / 8 * C::kSlabBytes + (32 * half + row) * 128 + ((piece ^ row) % 8) * 16,
                                exists ? base + (from + piece * 8) * 2 : x.data, exists);
                }
            }
            cp_async_arrive(barrier(stage, which));
        }
    }
    static constexpr int kNowhere = 1 << 30; // a row that no array has: TMA writes zeros and reads nothing
};

/* V's rows that nobody may see are 0, whatever lies there: a weight of 0 times NaN would be NaN. All warps of the team;
 * release() comes before anybody reads them, and the fence before TMA writes there again. */
template <class C> __device__ __forceinline__ void clear_rows(char *values, uint64_t valid, int member, int lane) {
    for (int row = member; row < kTileKeys; row += C::kTeam)
        if (!(valid >> row & 1) && lane < C::kColumns / 8)
            *reinterpret_cast<uint4 *>(values + lane / 8 * C::kSlabBytes + row * 128 + lane % 8 * 16) =
                make_uint4(0, 0, 0, 0);
    tma_store_fence();
}

} // namespace fa::sm90::serve
