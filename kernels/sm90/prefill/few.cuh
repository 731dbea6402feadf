/* prefill_sm90: sequences of few rows a kv head in its list. They are serve_sm90's, by packed_sm90; each follows from
 * its own length whether it is one, so that its bits are its own.
 *
 * Their records come after all others, those of the most keys first: first the ones whose kv heads blocks of
 * serve_listed_kernel share, then those that a block has alone, then those of so few keys that a warp has one. How many
 * blocks share a kv head follows from the keys of all of them, and changes no bit. */
#pragma once
#include "sm90/common/few_rows.cuh" // Sight, is_thin
#include "sm90/prefill/config.cuh"

namespace fa::sm90::prefill {

constexpr int kClasses = 128;  // of sequences in tiles, four an octave of keys; as many of few rows come after them
constexpr int kBriefClass = 8; // and those before it have up to 512 keys, which may be a group of serve_sm90's chunks

/* From 128 on. */
__device__ __forceinline__ int class_of_keys(int64_t keys) {
    const float cost = static_cast<float>(keys);
    return min(static_cast<int>(__float_as_uint(cost) >> 21) - (134 << 2) + 1, kClasses - 1); // 128 is 2^(134 - 127)
}

/* Sequences without queries are nobody's, but that somebody writes their rows. */
__device__ __forceinline__ bool is_few(const Call &call, const Record &r) {
    return call.few.rows > 0 && int64_t(r.seq_q) * call.group <= call.few.rows && (r.seq_q > 0 || call.few.alone);
}
__device__ __forceinline__ bool is_thin(const Call &call, const Record &r) {
    return sm90::is_thin(int64_t(r.seq_q) * call.group, call.few.columns);
}
/* The keys that its queries see; where they have positions, those that they may see. */
__device__ __forceinline__ fa_span few_span(const Call &call, const Record &r) {
    const fa_entry e = entry_of(call, r);
    if (!e.positions) return fa_seen_keys(&e, call.left, call.right, e.diagonal, e.seq_q - 1 + e.diagonal);
    return {e.key_begin, e.key_end > e.key_begin ? e.key_end : e.key_begin};
}

/* Of all sequences. */
struct Found {
    unsigned long long tile_keys; // of all tiles
    // Of the sequences of few rows:
    unsigned long long keys; // of a kv head
    int longest, sequences;
    int slots; // taken

    /* Becomes the sum of what the threads have found; it is in shared memory, and 0. By the block. */
    __device__ __forceinline__ void gather(Found mine) {
#pragma unroll
        for (int by = 16; by; by /= 2) {
            mine.tile_keys += __shfl_xor_sync(~0u, mine.tile_keys, by);
            mine.keys += __shfl_xor_sync(~0u, mine.keys, by);
            mine.sequences += __shfl_xor_sync(~0u, mine.sequences, by);
        }
        mine.longest = __reduce_max_sync(~0u, mine.longest);
        if (threadIdx.x % 32 == 0) {
            atomicAdd(&tile_keys, mine.tile_keys), atomicAdd(&keys, mine.keys);
            atomicAdd(&sequences, mine.sequences), atomicMax(&longest, mine.longest);
        }
        __syncthreads();
    }
};

/* How the work on them is shared. */
struct FewShare {
    static constexpr int kAlone = 2; // times so many a block has to itself
    int64_t keys;                    // that a block has where several share a kv head
    int shared_class, brief_class;   // blocks share from here on; a warp has a kv head up to here

    /* Where lengths differ a block is to have no more than half of what all of them have on average, so that those who
     * end early find something short; where they are alike, as much as leaves few of the blocks idle, since every kv
     * head that is shared costs a fold. */
    static __device__ __forceinline__ FewShare of(const Call &call, const Found &all) {
        constexpr int64_t kLeastKeys = 512;
        constexpr int kBriefJobs = 2; // a block, at least, so that its warps need not work together
        const int64_t mean = max(static_cast<int64_t>(all.keys * call.heads_kv / call.few.blocks), kLeastKeys);
        const bool alike = int64_t(all.longest) * all.sequences * 2 <= static_cast<int64_t>(all.keys) * 3;
        FewShare share;
        share.keys = alike ? mean : max(mean / 2, kLeastKeys);
        share.shared_class = class_of_keys(kAlone * share.keys);
        share.brief_class = all.sequences * call.heads_kv >= kBriefJobs * call.few.blocks ? kBriefClass : 0;
        return share;
    }

    /* Lets blocks share each kv head of a sequence that one block would have for too long. */
    __device__ __forceinline__ void cut(const Call &call, Found &all, Record &r) const {
        constexpr int kFewestChunks = 4; // of a block, a warp each
        const fa_span span = few_span(call, r);
        if (span.end - span.begin <= kAlone * keys) return;
        const bool thin = is_thin(call, r);
        const Sight sight = Sight::of(span, thin);
        const int64_t most = (sight.last - sight.first) / (thin ? 1 : kFewestChunks);
        const int blocks = static_cast<int>(min((span.end - span.begin) / keys, most)), // so that all find room at once
            heads = static_cast<int>(call.heads_kv);
        if (blocks < 2) return;
        const int slot = atomicAdd(&all.slots, heads);
        if (slot + heads > call.few.slots) return;
        r.chunks = blocks, r.slot = slot;
#pragma unroll 1
        for (int n = 0; n < heads; ++n) call.few.arrivals[slot + n] = 0;
    }

    /* In which records of few rows are ordered. Those that have rows of no query beside them are a block's. */
    __device__ __forceinline__ int class_of(const Call &call, const Record &r) const {
        const fa_span span = few_span(call, r);
        const int of = class_of_keys(max(span.end - span.begin - 1, int64_t(128)));
        const Sight sight = Sight::of(span, false);
        const bool groups =
            sight.last > sight.first && (sight.last - 1) / kGroup != sight.first / kGroup; // more than one
        const bool beside = r.rows_end - r.rows_begin > r.seq_q || r.b == 0 || r.b + 1 == call.batch;
        return groups || is_thin(call, r) || (call.few.alone && beside) ? max(of, brief_class + 1) : of;
    }
};

} // namespace fa::sm90::prefill
