/* serve_sm90: tiles of K and V on their way to shared memory.
 *
 * Each warp has a ring of slots, which take K and V of its tiles in turn. It fills them itself: when it has read a
 * slot, it asks for what comes next there, so that no barrier has to say that a slot is empty. By TMA, a box for the
 * keys of a page or a whole tile, or where pages are too small for that by cp.async, 16 bytes a lane.
 *
 * Why no waiter falls two phases behind: a phase of `full` ends with the bytes of TMA, or with the copies of every
 * lane. The next one can only end after the slot has been asked for again, which comes after the __syncwarp behind the
 * wait for the phase before.
 *
 * A key that no query sees, or without a page, becomes zeros, since a weight of 0 times NaN would be NaN: cp.async
 * writes them, TMA where the whole box is nowhere; V's rows in a box of which others are seen are cleared by the warp.
 * `valid` says which keys of a tile some query may see and have a page. */
#pragma once
#include "common/ptx.cuh"
#include "common/ring.cuh" // RingState
#include "sm90/common/barrier.cuh"
#include "sm90/common/tma.cuh"
#include "sm90/serve/job.cuh"

namespace fa::sm90::serve {

/* Counts a bad entry of the table, by the first key of its page that somebody may see. */
static __device__ __noinline__ void count_page(const Params &params, int b, int low, int high, int key, int entry) {
    const fa_sequences &s = params.call.s;
    if (!s.pages.table || key < low || key >= high) return;
    const int column = params.page.quotient(static_cast<uint32_t>(key)),
              first = column * static_cast<int>(s.pages.size);
    if (key == max(first, low)) count_fault(params.call.faults, FA_FAULT_page, b, column, entry);
}

/* Adds this thread's arrival on the barrier, which must count it, once its copies so far have landed. */
__device__ __forceinline__ void cp_async_arrive(uint64_t *barrier, int site = __builtin_LINE()) {
    FA_CHAOS_POINT(site);
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

/* Copies `Rows` rows to slabs of SlabBytes, of which `all` exist; `offset`: of row `lane` from `base`. Whole rows one
 * after the other. */
template <int Columns, int Rows, int SlabBytes>
static __device__ __noinline__ void copy_rows(const char *base, int64_t offset, uint32_t to, uint32_t all,
                                              uint64_t *barrier) {
    constexpr int kPieces = Columns / 8, kStep = 32 / kPieces; // 16 bytes of a row; rows a step
    const int lane = static_cast<int>(threadIdx.x % 32), piece = lane % kPieces, first = lane / kPieces;
    to += piece / 8 * SlabBytes + first * 128;
    all >>= first;
#pragma unroll
    for (int n = 0; n < Rows / kStep; ++n) // `first` has none of the bits of n * kStep
        cp_async_16(to + n * kStep * 128 + ((piece ^ first) % 8 ^ n * kStep % 8) * 16,
                    base + __shfl_sync(~0u, offset, n * kStep + first), all >> n * kStep & 1);
    cp_async_arrive(barrier);
}

constexpr int kNowhere = 1 << 30; // a row that no array has: TMA writes zeros and reads nothing

/* Where a key lies; batch below 0, or of a page that there is not: nowhere. */
struct Place {
    int batch, row;
};

/* Where a key of a job lies. Of a table the entry is read if some query may see the key. No thread waits for it here,
 * well before the copy of the key begins. */
__device__ __forceinline__ Place place_of(const Params &params, const Job &job, int key) {
    if (key < job.low || key >= job.high) return {-1, 0};
    const fa_sequences &s = params.call.s;
    if (!s.pages.table) return {s.packed_k ? 0 : job.b, static_cast<int>(job.entry.first_k) + key};
    const int column = params.page.quotient(static_cast<uint32_t>(key));
    return {fa_page_entry(&s.pages, job.b, column), key - column * static_cast<int>(s.pages.size)};
}
__device__ __forceinline__ bool is_there(const Params &params, const Place &place) {
    const fa_pages &pages = params.call.s.pages;
    return place.batch >= 0 && (!pages.table || place.batch < pages.count);
}

/* Asks for the boxes of 32 keys, of which `all` are there, that lane n has the place of key n of. By the warp, after
 * the barrier has been told of the bytes. */
template <int Slabs, int SlabBytes>
__device__ __forceinline__ void ask_boxes(const Params &params, const Job &job, const CUtensorMap &map,
                                          const fa_operand &x, uint64_t *full, char *to, const Place &place,
                                          uint32_t all) {
    // The first key of a box that exists, and its box's first row.
    const int lane = static_cast<int>(threadIdx.x % 32), keys = params.boxes, first = lane & -keys;
    const uint32_t box = (all >> first) & (keys == 32 ? ~0u : (1u << keys) - 1);
    const bool leads = box ? lane == first + __ffs(box) - 1 : lane == first;
    if (!leads) return;
    const int row = box ? place.row - (lane - first) : kNowhere, head = x.stride[1] ? job.head : 0,
              batch = box && x.stride[0] ? place.batch : 0;
#pragma unroll
    for (int slab = 0; slab < Slabs; ++slab)
        tma_load(to + first * 128 + slab * SlabBytes, &map, full, slab * 64, row, head, batch, kEvictFirst);
}

template <class C> struct Ring {
    const Params &params;
    const Job &job;
    char *slots; // of this warp
    uint64_t *full;
    uint32_t *valid; // of each slot of K
    Tiles tiles;     // the next one to ask for, and the end
    Place place[2];  // of key `lane` of that, and of the tile after it

    __device__ __forceinline__ int lane() const { return static_cast<int>(threadIdx.x % 32); }
    __device__ __forceinline__ bool by_boxes() const { return C::kPlain || params.boxes; }
    __device__ __forceinline__ char *slot(int at) const { return slots + at * C::kSlotBytes; }

    /* Sets up the barriers of a warp. */
    static __device__ __forceinline__ void init(const Params &params, uint64_t *full) {
        const int lane = threadIdx.x % 32;
        if (lane < C::kSlots) mbarrier_init(full + lane, C::kPlain || params.boxes ? 1 : 32);
        mbarrier_init_fence();
        __syncwarp();
    }
    __device__ __forceinline__ void wait(const RingState<C::kSlots> &at) const {
        mbarrier_wait(full + at.stage, at.parity);
        __syncwarp();
    }

    __device__ __forceinline__ Place find(int tile) const {
        return tile < tiles.end ? place_of(params, job, tile * kTileKeys + lane()) : Place{-1, 0};
    }
    __device__ __forceinline__ bool exists() const { return is_there(params, place[0]); }

    /* Asks for K, or V, of the next tile, if there is one; then for the one after it. */
    __device__ __forceinline__ void start_keys(int at) {
        if (tiles.next >= tiles.end) return;
        const bool here = exists();
        const uint32_t all = __ballot_sync(~0u, here);
        if (lane() == 0) valid[at] = all;
        if (~all && job.counts && !here)
            count_page(params, job.b, job.low, job.high, tiles.next * kTileKeys + lane(), place[0].batch);
        start(at, params.k_map, params.call.p.k, params.call.p.head_dim, all);
    }
    __device__ __forceinline__ void start_values(int at) {
        if (tiles.next >= tiles.end) return;
        start(at, params.v_map, params.call.p.v, params.call.p.head_dim_v, __ballot_sync(~0u, exists()));
        ++tiles.next;
        place[0] = place[1], place[1] = find(tiles.next + 1);
    }

    /* Asks for the first tiles. */
    __device__ __forceinline__ void fill() {
        place[0] = find(tiles.next), place[1] = find(tiles.next + 1);
#pragma unroll 1
        for (int at = 0; at < C::kSlots; ++at) at % 2 ? start_values(at) : start_keys(at);
    }

    /* Clears the rows of V that no query sees. The fence comes before TMA writes there again. */
    __device__ __forceinline__ void clear_rows(int at, uint32_t all) const {
        if (!by_boxes()) return;
#pragma unroll 1
        for (int row = 0; row < kTileKeys; ++row)
            if (!(all >> row & 1) && lane() < C::kColumns / 8)
                *reinterpret_cast<uint4 *>(slot(at) + lane() / 8 * C::kSlabBytes + row * 128 + lane() % 8 * 16) =
                    make_uint4(0, 0, 0, 0);
        tma_store_fence();
        __syncwarp();
    }

  private:
    __device__ __forceinline__ void start(int at, const CUtensorMap &map, const fa_operand &x, int columns,
                                          uint32_t all) const {
        if (!by_boxes()) return copy(at, x, columns, all);
        if (lane() == 0) mbarrier_arrive_expect(full + at, C::kSlotBytes);
        __syncwarp();
        ask_boxes<C::kColumns / 64, C::kSlabBytes>(params, job, map, x, full + at, slot(at), place[0], all);
    }

    __device__ __forceinline__ void copy(int at, const fa_operand &x, int columns, uint32_t all) const {
        constexpr int kPieces = C::kColumns / 8; // 16 bytes of a row
        const int lane = this->lane(), piece = lane % kPieces;
        const char *base = static_cast<const char *>(x.data) + (job.head * x.stride[1] + piece * 8) * 2;
        const int64_t offset = (place[0].batch * x.stride[0] + place[0].row * x.stride[2]) * 2;
        copy_rows<C::kColumns, 32, C::kSlabBytes>(base, offset, shared_address(slot(at)), piece * 8 < columns ? all : 0,
                                                  full + at);
    }
    static_assert(C::kColumns <= 256, "a row of a slot is a step of a warp at most");
};

} // namespace fa::sm90::serve
