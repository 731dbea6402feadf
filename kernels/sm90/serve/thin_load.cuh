/* serve_sm90: tiles of K and V of a thin job on their way to shared memory.
 *
 * The block has one ring of slots, which take K and V of its tiles in turn. A slot that all four warps have read takes
 * what comes next there: by TMA the last warp asks for it, which has rows to soften only where a job has more than 48;
 * where pages are too small for boxes each warp copies 16 keys by cp.async.
 *
 * Why no waiter falls two phases behind. `full`: its next phase needs that the slot is asked for again, which comes
 * after all warps' arrivals on `empty`, and each arrives there after its own wait for the phase before. `empty`: only
 * those wait that ask, and its next phase needs the arrivals of all warps, those that ask among them, for a tile that
 * they asked for after their wait.
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
    static constexpr int kAsker = C::kWarps - 1, kCopied = kThinKeys / C::kWarps; // keys that a warp copies

    const Params &params;
    const Job &job;
    char *slots;
    S &shared;
    int warp;
    Tiles tiles;       // the next one to ask for, and the end
    Place place[2][2]; // of that, and of the tile after it: of the lane's key of each 32, by cp.async of each 16

    __device__ __forceinline__ int lane() const { return static_cast<int>(threadIdx.x % 32); }
    __device__ __forceinline__ char *slot(int at) const { return slots + at * S::kSlotBytes; }
    __device__ __forceinline__ bool asks() const { return !params.boxes || warp == kAsker; }

    /* By the block. */
    __device__ __forceinline__ void init() const {
        const int at = static_cast<int>(threadIdx.x);
        if (at < S::kSlots) {
            mbarrier_init(shared.full + at, params.boxes ? 1 : C::kThreads + C::kWarps);
            mbarrier_init(shared.empty + at, C::kWarps);
        }
        mbarrier_init_fence();
        __syncthreads();
    }

    /* Asks for the first tiles. */
    __device__ __forceinline__ void fill() {
        if (!asks()) return;
        find(tiles.next, place[0]), find(tiles.next + 1, place[1]);
#pragma unroll 1
        for (int at = 0; at < S::kSlots; ++at) at % 2 ? start_values(at) : start_keys(at);
    }

    __device__ __forceinline__ void wait(const State &at) const {
        mbarrier_wait(shared.full + at.stage, at.parity);
        if (!params.boxes) tma_store_fence(); // the products read what the copies wrote
        __syncwarp();
    }
    __device__ __forceinline__ uint64_t valid(const State &at) const {
        const uint4 x = shared.valid[at.stage];
        return x.x | x.y << 16 | uint64_t(x.z | x.w << 16) << 32;
    }

    /* This warp has read K, or V, of a tile: what comes next there is asked for when all have. */
    __device__ __forceinline__ void free_keys(const State &at) {
        if (released(at)) start_values(at.stage);
    }
    __device__ __forceinline__ void free_values(const State &at) {
        if (released(at)) start_keys(at.stage);
    }

    /* Clears the rows of V that no query sees, before the products read them and TMA writes there again. By the block.
     */
    __device__ __forceinline__ void clear_rows(const State &at, uint64_t all) const {
        if (!params.boxes) return;
#pragma unroll 1
        for (int row = warp * kCopied; row < (warp + 1) * kCopied; ++row)
            if (!(all >> row & 1) && lane() < C::kColumns / 8)
                *reinterpret_cast<uint4 *>(slot(at.stage) + lane() / 8 * S::kSlabBytes + row * 128 + lane() % 8 * 16) =
                    make_uint4(0, 0, 0, 0);
        tma_store_fence();
        __syncthreads();
    }

  private:
    /* Whether this warp asks for more, whose slot is free. */
    __device__ __forceinline__ bool released(const State &at) const {
        __syncwarp();
        if (lane() == 0) mbarrier_arrive(shared.empty + at.stage);
        if (!asks() || tiles.next >= tiles.end) return false;
        mbarrier_wait(shared.empty + at.stage, at.parity);
        __syncwarp();
        return true;
    }

    __device__ __forceinline__ int key_of(int tile, int half) const {
        return tile * kThinKeys + (params.boxes ? half * 32 + lane() : warp * kCopied + lane() % kCopied);
    }
    __device__ __forceinline__ void find(int tile, Place (&to)[2]) const {
#pragma unroll
        for (int half = 0; half < 2; ++half)
            to[half] = tile < tiles.end ? place_of(params, job, key_of(tile, half)) : Place{-1, 0};
    }

    /* Asks for K, or V, of the next tile, if there is one; then for the one after it. */
    __device__ __forceinline__ void start_keys(int at) {
        if (tiles.next >= tiles.end) return;
        uint32_t all[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const bool here = is_there(params, place[0][half]);
            all[half] = __ballot_sync(~0u, here);
            if (job.counts && !here && (params.boxes || (half == 0 && lane() < kCopied)))
                count_page(params, job.b, job.low, job.high, key_of(tiles.next, half), place[0][half].batch);
        }
        if (lane() == 0) {
            if (params.boxes)
                shared.valid[at] = make_uint4(all[0] & 0xffff, all[0] >> 16, all[1] & 0xffff, all[1] >> 16);
            else
                reinterpret_cast<uint32_t *>(shared.valid + at)[warp] = all[0] & 0xffff;
        }
        start(at, params.k_map, params.call.p.k, params.call.p.head_dim, all);
    }
    __device__ __forceinline__ void start_values(int at) {
        if (tiles.next >= tiles.end) return;
        const uint32_t all[2] = {__ballot_sync(~0u, is_there(params, place[0][0])),
                                 __ballot_sync(~0u, is_there(params, place[0][1]))};
        start(at, params.v_map, params.call.p.v, params.call.p.head_dim_v, all);
        ++tiles.next;
#pragma unroll
        for (int half = 0; half < 2; ++half) place[0][half] = place[1][half];
        find(tiles.next + 1, place[1]);
    }

    /* Lane 0 arrives after it has written `valid`. */
    __device__ __forceinline__ void start(int at, const CUtensorMap &map, const fa_operand &x, int columns,
                                          const uint32_t (&all)[2]) const {
        uint64_t *full = shared.full + at;
        if (!params.boxes) {
            if (lane() == 0) mbarrier_arrive(full);
            return copy(at, x, columns, all[0]);
        }
        if (lane() == 0) mbarrier_arrive_expect(full, S::kSlotBytes);
        __syncwarp();
#pragma unroll
        for (int half = 0; half < 2; ++half)
            ask_boxes<C::kColumns / 64, S::kSlabBytes>(params, job, map, x, full, slot(at) + half * 32 * 128,
                                                       place[0][half], all[half]);
    }

    __device__ __forceinline__ void copy(int at, const fa_operand &x, int columns, uint32_t all) const {
        constexpr int kPieces = C::kColumns / 8; // 16 bytes of a row
        const Place &from = place[0][0];
        const int piece = lane() % kPieces;
        const char *base = static_cast<const char *>(x.data) + (job.head * x.stride[1] + piece * 8) * 2;
        const int64_t offset = (from.batch * x.stride[0] + from.row * x.stride[2]) * 2;
        copy_rows<C::kColumns, kCopied, S::kSlabBytes>(base, offset, shared_address(slot(at) + warp * kCopied * 128),
                                                       piece * 8 < columns ? all : 0, shared.full + at);
    }
};

} // namespace fa::sm90::serve
