/* prefill_sm90: sequences in the order of the work, by class; which places and which slots are whose. */
#pragma once
#include "sm90/prefill/few.cuh"

namespace fa::sm90::prefill {

/* The sequences of a thread of the list kernel: one is kept in registers, of several there are drafts. */
struct Mine {
    int first, last, each; // each: of a thread, at most
    Record kept;
};

/* join() of x of the threads before this one in the block; 0 for the first. */
template <class Join> __device__ __forceinline__ int scan_before(int x, int *scratch, Join join) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
        const int other = __shfl_up_sync(~0u, x, by);
        if (lane >= by) x = join(x, other);
    }
    const int left = __shfl_up_sync(~0u, x, 1);
    if (lane == 31) scratch[warp] = x;
    __syncthreads();
    int before = lane ? left : 0;
#pragma unroll 1
    for (int w = 0; w < warp; ++w) before = join(before, scratch[w]);
    __syncthreads();
    return before;
}

__device__ __forceinline__ uint32_t units_of(const Call &call, const Record &r) {
    return r.tiles * tile_heads(call, packs(call, r.seq_q));
}

/* Of its longest tile. */
__device__ __forceinline__ int64_t tile_keys(const Call &call, const Record &r) {
    return min(int64_t(max(r.key_end - r.key_begin, 0)), call.left + call.right + call.tile_m);
}

/* The longest last; 0: no units. */
__device__ __forceinline__ int class_of(const Call &call, const Record &r, uint32_t units) {
    return units ? kClasses + class_of_keys(128 + tile_keys(call, r)) : 0;
}

/* Whether the chunks of a tile are units of their own: where it has a third more keys than a block has of all tiles. */
__device__ __forceinline__ bool is_apart(const Call &call, const Found &found, const Record &r) {
    return r.chunks && static_cast<uint64_t>(tile_keys(call, r)) * 3 * call.blocks > found.tile_keys * 4;
}

/* From how much each class holds to where it begins, the highest first; the header is written. One warp. */
__device__ __forceinline__ void begin_classes(const Call &call, unsigned long long (&place)[2 * kClasses],
                                              const FewShare &share) {
    constexpr int kEach = 2 * kClasses / 32;
    const int lane = threadIdx.x, top = 2 * kClasses - 1 - lane * kEach;
    unsigned long long mine = 0, all;
#pragma unroll 1
    for (int n = 0; n < kEach; ++n) mine += place[top - n];
    all = mine;
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
        const unsigned long long other = __shfl_up_sync(~0u, all, by);
        if (lane >= by) all += other;
    }
    unsigned long long here = all - mine;
#pragma unroll 1
    for (int n = 0; n < kEach; ++n) {
        const unsigned long long count = place[top - n];
        place[top - n] = here;
        here += count;
    }
    __syncwarp();
    if (lane) return;
    const unsigned long long few = place[kClasses - 1], whole = place[share.shared_class - 1];
    ListHeader *header = call.workspace.header();
    header->units = static_cast<uint32_t>(few);
    header->counter = header->few_counter = 0;
    header->few_units = static_cast<uint32_t>(whole) - static_cast<uint32_t>(few);
    header->few_shared = static_cast<int>(few >> 32), header->few_whole = static_cast<int>(whole >> 32);
    header->few_brief = static_cast<int>(place[share.brief_class] >> 32);
    header->few_end = static_cast<int>(place[0] >> 32);
    if (call.batch == 0) header->tail = 0;
}

/* A sequence whose turn it is. */
struct Turn {
    Record record;
    uint32_t units;
    int of;        // its class
    bool has, few; // whether there is one; of few rows
};

/* Adds a sequence and its units to the place of its class; returns what was there. By the warp, so that threads whose
 * sequences are alike, as most are, do not wait for each other's atomics. */
__device__ __forceinline__ unsigned long long take_places(unsigned long long *place, const Turn &turn) {
    const int lane = threadIdx.x % 32;
    unsigned long long taken = 0;
#pragma unroll 1
    for (uint32_t left = __ballot_sync(~0u, turn.has); left;) {
        const int leader = __ffs(left) - 1, of = __shfl_sync(~0u, turn.of, leader);
        const bool in = turn.has && turn.of == of;
        const uint32_t all = __ballot_sync(~0u, in);
        uint32_t sum = in ? turn.units : 0;
#pragma unroll
        for (int by = 1; by < 32; by *= 2) {
            const uint32_t other = __shfl_up_sync(~0u, sum, by);
            if (lane >= by) sum += other;
        }
        unsigned long long before = 0;
        if (lane == 31) before = atomicAdd(place + of, static_cast<unsigned long long>(__popc(all)) << 32 | sum);
        before = __shfl_sync(~0u, before, 31);
        if (in)
            taken =
                before + (static_cast<unsigned long long>(__popc(all & ((1u << lane) - 1))) << 32 | (sum - turn.units));
        left &= ~all;
    }
    return taken;
}

/* Writes the records in their order: slots are counted, then units of each class, then records are written; by whole
 * warps, of which some threads have no sequence. A loop, since a launch runs this code once, from memory. */
__device__ __forceinline__ void put_in_order(const Call &call, Mine &mine, const FewShare &share, Found &found,
                                             unsigned long long (&place)[2 * kClasses], int *scratch) {
    constexpr int kEnough = 1 << 20; // slots: more than there are, and no sum of 1024 of them overflows
    int slots_before = 0;
#pragma unroll 1
    for (int pass = call.workspace.slots ? 0 : 1; pass < 3; ++pass) {
        int slots = slots_before;
#pragma unroll 1
        for (int n = 0; n < mine.each; ++n) {
            Turn turn = {mine.kept, 0, 0, mine.first + n < mine.last, false};
            Record &record = turn.record;
            if (mine.each > 1 && turn.has) record = *call.workspace.draft(mine.first + n);
            turn.few = turn.has && is_few(call, record);
            if (turn.few) {
                if (pass == 1) {
                    share.cut(call, found, record);
                    mine.kept = record;
                    if (mine.each > 1) *call.workspace.draft(record.b) = record;
                }
                turn.units = max(record.chunks, 1), turn.of = share.class_of(call, record);
            } else if (turn.has) {
                turn.units = units_of(call, record), turn.of = class_of(call, record, turn.units);
                const int needs = static_cast<int>(turn.units) * record.chunks;
                const bool apart = is_apart(call, found, record) && slots + needs <= call.workspace.slots;
                record.slot = apart ? slots : -1;
                if (is_apart(call, found, record)) slots = min(slots + needs, kEnough);
                if (apart) turn.units *= record.chunks;
                if (pass == 1 && apart)
#pragma unroll 1
                    for (int at = 0; at < needs; at += record.chunks) *call.workspace.left(record.slot + at) = {};
            }
            if (pass == 0) continue;
            const unsigned long long at = take_places(place, turn);
            if (pass == 1 || !turn.has) continue;
            record.unit = static_cast<int>(at & 0xffffffff);
            *call.workspace.record(static_cast<int>(at >> 32)) = record;
            if (record.b + 1 == call.batch) call.workspace.header()->tail = record.rows_end;
        }
        if (pass == 0) slots_before = scan_before(slots, scratch, [](int a, int b) { return min(a + b, kEnough); });
        __syncthreads();
        if (pass == 1 && threadIdx.x < 32) begin_classes(call, place, share);
        __syncthreads();
    }
}

} // namespace fa::sm90::prefill
