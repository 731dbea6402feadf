/* serve_sm90: tiles of K and V of a thin job on their way to shared memory.
 *
 * The block has one ring of slots, which take K and V of its tiles in turn. A slot that all four warps have read takes
 * what comes next there: each warp asks for 16 keys of it, by TMA or where pages are too small for boxes of so many by
 * cp.async, and two warps for 32 each where a box has so many. They ask once the next product is on its way. One
 * warp that asked for all of a tile would hold up the others, since products are of all four; for the same reason they
 * ask in few instructions. Where the boxes of 32 tiles lie is looked up at once, a tile a lane, 32 tiles ahead.
 *
 * Why no waiter falls two phases behind. `full`: its next phase needs that the slot is asked for again, which comes
 * after all warps' arrivals on `empty`, and each arrives there after its own wait for the phase before. `empty`:
 * only warps that ask wait. Its next phase needs that all warps have read what comes into the slot next, and that is
 * there only when each that asks has asked for its part, after its wait.
 *
 * Keys that no query sees become zeros as load.cuh says. */
#pragma once
#include "sm90/serve/load.cuh"

namespace fa::sm90::serve {

/* Shape of the shared memory of a thin job. */
template <class C> struct Thin {
    static constexpr int kSlabBytes = kThinKeys * 128;
    static constexpr int kSlotBytes = C::kColumns / 64 * kSlabBytes; // one tile of K, or of V
    static constexpr int kSlots = C::kColumns == 64 ? 11 : 5;        // odd: a slot takes K and V by turns
    static constexpr int kRingBytes = kSlots * kSlotBytes;
    static constexpr int kQuerySlabBytes = kThinRows * 128;
    static constexpr int kQueryBytes = C::kColumns / 64 * kQuerySlabBytes;
    static_assert(kSlots % 2);

    Job job; // registers have no room for it
    LaneRow row[kThinRows];
    uint64_t full[kSlots], empty[kSlots];
    uint4 valid[kSlots]; // of K, 16 keys a word: which some query may see and have a page
};

template <class C> struct ThinRing {
    using S = Thin<C>;
    using State = RingState<S::kSlots>;
    static constexpr int kCleared = kThinKeys / C::kWarps; // keys of a warp
    static constexpr int kLanes = 32;

    const Params &params;
    const Job &job;
    char *slots;
    S &shared;
    Tiles tiles; // the next one to ask for, and the end
    int warp;    // all three the same in every thread for the compiler, too
    Place
        place[2]; // of the lane's key of that tile and of the one after it; by boxes of the warp's keys of tile n * 32
                  // + lane: the box of those from which the next one is, and what was found for those that follow

    __device__ __forceinline__ int lane() const { return static_cast<int>(threadIdx.x % 32); }
    __device__ __forceinline__ char *slot(int at) const { return slots + at * S::kSlotBytes; }
    __device__ __forceinline__ bool by_boxes() const { return params.boxes >= kThinKeys / C::kWarps; }
    /* Keys of a tile that a warp asks for, if it does. */
    __device__ __forceinline__ int width() const { return params.boxes == 32 ? 32 : kThinKeys / C::kWarps; }
    __device__ __forceinline__ bool asks() const { return warp * width() < kThinKeys; }

    /* By the block. */
    __device__ __forceinline__ void init() const {
        const int at = static_cast<int>(threadIdx.x);
        if (at < S::kSlots) {
            mbarrier_init(shared.full + at, by_boxes() ? kThinKeys / width() : C::kThreads + C::kWarps);
            mbarrier_init(shared.empty + at, C::kWarps);
        }
        mbarrier_init_fence();
        __syncthreads();
    }

    /* Asks for the first tiles. */
    __device__ __forceinline__ void fill() {
        if (!asks()) return;
        if (by_boxes()) {
            const int from = tiles.next & -kLanes;
            place[1] = find_box(from), place[0] = box_of(place[1], from), place[1] = find_box(from + kLanes);
        } else {
            place[0] = find(tiles.next), place[1] = find(tiles.next + 1);
        }
#pragma unroll 1
        for (int at = 0; at < S::kSlots; ++at) at % 2 ? start_values(at) : start_keys(at);
    }

    __device__ __forceinline__ void wait(const State &at) const {
        mbarrier_wait(shared.full + at.stage, at.parity);
        if (!by_boxes()) tma_store_fence(); // the products read what the copies wrote
        __syncwarp();
    }
    __device__ __forceinline__ uint64_t valid(const State &at) const {
        const uint4 x = shared.valid[at.stage];
        return x.x | x.y << 16 | uint64_t(x.z | x.w << 16) << 32;
    }

    /* This warp has read K, or V, of a tile. */
    __device__ __forceinline__ void release(const State &at) const {
        __syncwarp();
        if (lane() == 0) mbarrier_arrive(shared.empty + at.stage);
    }
    /* Asks for what comes next in a slot that had K, or V, when all warps have read it. */
    __device__ __forceinline__ void refill_keys(const State &at) {
        if (wait_empty(at)) start_values(at.stage);
    }
    __device__ __forceinline__ void refill_values(const State &at) {
        if (wait_empty(at)) start_keys(at.stage);
    }

    /* Clears the rows of V that no query sees, before the products read them and TMA writes there again. By the block.
     */
    __device__ __forceinline__ void clear_rows(const State &at, uint64_t all) const {
        if (!by_boxes()) return;
#pragma unroll 1
        for (int row = warp * kCleared; row < (warp + 1) * kCleared; ++row)
            if (!(all >> row & 1) && lane() < C::kColumns / 8)
                *reinterpret_cast<uint4 *>(slot(at.stage) + lane() / 8 * S::kSlabBytes + row * 128 + lane() % 8 * 16) =
                    make_uint4(0, 0, 0, 0);
        tma_store_fence();
        __syncthreads();
    }

  private:
    /* Whether this warp asks for more, whose slot is free. */
    __device__ __forceinline__ bool wait_empty(const State &at) const {
        if (!asks() || tiles.next >= tiles.end) return false;
        mbarrier_wait(shared.empty + at.stage, at.parity);
        __syncwarp();
        return true;
    }

    /* The first key that some query sees of the warp's keys of a tile; -1 where there is none, and of tiles before the
     * next one, which may be another block's. */
    __device__ __forceinline__ int seen_key(int tile) const {
        const int first = tile * kThinKeys + warp * width(), key = max(first, job.low);
        return tile >= tiles.next && tile < tiles.end && key < min(first + width(), job.high) ? key : -1;
    }
    /* Where that key of the lane's tile lies, of those from `from` on. */
    __device__ __forceinline__ Place find_box(int from) const { return place_of(params, job, seen_key(from + lane())); }
    /* The box that begins with the first of the warp's keys, given where the one that some query sees lies. */
    __device__ __forceinline__ Place box_of(const Place &found, int from) const {
        const int tile = from + lane(), key = seen_key(tile);
        if (is_there(params, found)) return {found.batch, found.row - (key - tile * kThinKeys - warp * width())};
        if (job.counts && key >= 0) count_page(params, job.b, job.low, job.high, key, found.batch);
        return {0, kNowhere};
    }

    __device__ __forceinline__ int key_of(int tile) const { return tile * kThinKeys + warp * width() + lane(); }
    __device__ __forceinline__ Place find(int tile) const {
        return tile < tiles.end && lane() < width() ? place_of(params, job, key_of(tile)) : Place{-1, 0};
    }

    /* Asks for K, or V, of the next tile, if there is one; then for the one after it. */
    __device__ __forceinline__ void start_keys(int at) {
        if (tiles.next >= tiles.end) return;
        if (by_boxes()) return ask<true>(at, params.k_map, params.call.p.k);
        const bool here = is_there(params, place[0]);
        const uint32_t all = __ballot_sync(~0u, here);
        if (job.counts && !here && lane() < width())
            count_page(params, job.b, job.low, job.high, key_of(tiles.next), place[0].batch);
        if (lane() == 0) reinterpret_cast<uint32_t *>(shared.valid + at)[warp] = all;
        copy(at, params.call.p.k, params.call.p.head_dim, all);
    }
    __device__ __forceinline__ void start_values(int at) {
        if (tiles.next >= tiles.end) return;
        if (by_boxes()) {
            ask<false>(at, params.v_map, params.call.p.v);
            if (++tiles.next & (kLanes - 1)) return;
            place[0] = box_of(place[1], tiles.next), place[1] = find_box(tiles.next + kLanes);
            return;
        }
        copy(at, params.call.p.v, params.call.p.head_dim_v, __ballot_sync(~0u, is_there(params, place[0])));
        ++tiles.next;
        place[0] = place[1], place[1] = find(tiles.next + 1);
    }

    /* Asks for the warp's box of the next tile. One thread arrives, after it has written `valid`. */
    template <bool kKeys>
    __device__ __forceinline__ void ask(int at, const CUtensorMap &map, const fa_operand &x) const {
        const int of = tiles.next & (kLanes - 1), batch = __shfl_sync(~0u, place[0].batch, of),
                  row = __shfl_sync(~0u, place[0].row, of), keys = width(), head = x.stride[1] ? job.head : 0;
        char *const to = slot(at) + warp * keys * 128;
        uint64_t *const full = shared.full + at;
        if (elect_one()) {
            if (kKeys) {
                const int first = tiles.next * kThinKeys + warp * keys;
                uint32_t seen = row == kNowhere ? 0 : ~0u;
                if (first < job.low || first + keys > job.high) [[unlikely]] {
                    if (first < job.low) seen &= ~0u << min(job.low - first, 31);
                    if (first + keys > job.high) seen &= (1u << max(job.high - first, 0)) - 1;
                }
                auto *words = reinterpret_cast<uint32_t *>(shared.valid + at) + warp * keys / 16;
                words[0] = seen & 0xffff;
                if (keys == 32) words[1] = seen >> 16;
            }
            mbarrier_arrive_expect(full, static_cast<uint32_t>(keys * (C::kColumns * 2)));
#pragma unroll
            for (int slab = 0; slab < C::kColumns / 64; ++slab)
                tma_load(to + slab * S::kSlabBytes, &map, full, slab * 64, row, head, x.stride[0] ? batch : 0,
                         kEvictFirst);
        }
        __syncwarp();
    }

    __device__ __forceinline__ void copy(int at, const fa_operand &x, int columns, uint32_t all) const {
        constexpr int kPieces = C::kColumns / 8; // 16 bytes of a row
        const Place &from = place[0];
        const int piece = lane() % kPieces;
        const char *base = static_cast<const char *>(x.data) + (job.head * x.stride[1] + piece * 8) * 2;
        const int64_t offset = (from.batch * x.stride[0] + from.row * x.stride[2]) * 2;
        if (lane() == 0) mbarrier_arrive(shared.full + at);
        copy_rows<C::kColumns, kCleared, S::kSlabBytes>(base, offset, shared_address(slot(at) + warp * kCleared * 128),
                                                        piece * 8 < columns ? all : 0, shared.full + at);
    }
};

} // namespace fa::sm90::serve
