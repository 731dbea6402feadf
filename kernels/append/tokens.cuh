/* Where append's tokens go: a row's sequence, its slot, and the other rows with that slot. See append.cu. */
#pragma once
#include "common/faults.cuh" // count_fault, count_faults_of_q
#include "fa.h"
#include "tokens.h" // fa_token_of_slot, fa_token_of_sequence

namespace fa {

constexpr int kWarp = 32, kThreads = 256, kWarps = kThreads / kWarp;
constexpr int kBlocks = 3;  // of a multiprocessor
constexpr int kTokens = 32; // the most of a block: a lane of one warp each
constexpr int kRows = 4;    // of a unit: rows of one token and operand, that a group of lanes reads at a time
constexpr int kAhead = 8;   // starts a lane reads at a time

/* The fields of the problem (fa_append) that the kernel reads. */
struct Params {
    fa_operand k_cache, v_cache, k, v, q, out;
    fa_operand cos, sin;
    fa_slots slots;
    int64_t batch, heads, heads_kv, rows;
    int head_dim, head_dim_v;
    fa_dtype rotary_dtype;
    bool interleaved;
};

/* Computed on the host for a launch. */
struct Work {
    int64_t rows;          // of k and q, one after another over all batch entries
    int tokens;            // a block
    int parts;             // blocks that share the units of the same tokens
    int units, steps;      // of a token; of a row, a step is an item a lane
    int half;              // of the columns that are rotated
    int lanes, lanes_log2; // threads that share a row: a power of two
    bool vectors;          // 16 bytes an item are possible everywhere
    bool tables;           // two neighbours of cos and sin can be read at once
};

/* The sequence of a row of packed k. */
struct Owner {
    int64_t sequence; // -1: of none
    fa_span rows;
};

/* By one warp, for a row of each lane. Ends of sequences are the running maximum of the starts, so a row is of the
 * sequence before the first start that is larger than it. */
__device__ __forceinline__ Owner owner_of(const fa_sequences &s, int64_t batch, int64_t row) {
    if (!s.q.starts) return {row, {row, row + 1}};
    const int lane = threadIdx.x % kWarp;
    const int most = s.q.rows < INT32_MAX ? static_cast<int>(s.q.rows) : INT32_MAX;
    const unsigned last = static_cast<unsigned>(batch);
    int before = 0;
    bool found = false;
    Owner owner = {-1, {0, s.q.rows}};
    const bool same = __all_sync(~0u, row == __shfl_sync(~0u, row, 0));
    for (unsigned first = 0; first <= last && !__all_sync(~0u, found); first += kAhead * kWarp) {
        int ahead[kAhead] = {};
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            const unsigned b = first + i * kWarp + lane;
            if (b <= last) ahead[i] = fa_index(s.q.starts, b);
        }
#pragma unroll 1
        for (unsigned b = first; b <= last && b < first + kAhead * kWarp && !__all_sync(~0u, found); b += kWarp) {
            int largest = min(max(ahead[0], 0), most);
#pragma unroll
            for (int i = 1; i < kAhead; ++i) ahead[i - 1] = ahead[i];
            if (same) { // a vote is sooner there than sums over lanes
                const unsigned larger = __ballot_sync(~0u, largest > row);
                const int count = larger ? __ffs(static_cast<int>(larger)) - 1 : kWarp;
                const int begin = __reduce_max_sync(~0u, lane < count ? largest : 0);
                const int end = __shfl_sync(~0u, largest, count);
                before = begin > before ? begin : before;
                found = larger;
                if (found) owner = {static_cast<int64_t>(b) + count - 1, {before, end}};
                continue;
            }
            if (lane == 0 && before > largest) largest = before;
#pragma unroll
            for (int offset = 1; offset < kWarp; offset *= 2) {
                const int other = __shfl_up_sync(~0u, largest, offset);
                if (lane >= offset && other > largest) largest = other;
            }
            int count = 0; // of those here that are not larger than the row
#pragma unroll
            for (int step = kWarp / 2; step; step /= 2)
                if (__shfl_sync(~0u, largest, count + step - 1) <= row) count += step;
            const int end = __shfl_sync(~0u, largest, count);
            const int begin = __shfl_sync(~0u, largest, count ? count - 1 : 0);
            if (!found && end > row) {
                found = true;
                owner = {static_cast<int64_t>(b) + count - 1, {count ? begin : before, end}};
            }
            before = __shfl_sync(~0u, largest, kWarp - 1);
        }
    }
    return owner;
}

__device__ __forceinline__ fa_token no_token(int64_t batch, int64_t row) {
    fa_token token = {};
    token.batch = batch;
    token.row = row;
    token.skipped = true;
    token.fault = FA_FAULT_COUNT;
    return token;
}

/* The batch entry and row of operands where row n lies. */
__device__ __forceinline__ void find_row(const Params &p, const fa_sequences &s, int64_t n, int64_t &batch,
                                         int64_t &row) {
    batch = 0, row = n;
    if (!s.packed_q && !p.slots.data) batch = n / p.rows, row = n - batch * p.rows;
}

/* Finds where row n of k goes: one warp, a row a lane where it has one. Counts its fault, once. */
__device__ __forceinline__ fa_token find_token(const Params &p, const fa_sequences &s, fa_fault_board *faults,
                                               int64_t n, bool has, bool counts) {
    int64_t batch, row;
    find_row(p, s, n, batch, row);
    const Owner owner = p.slots.data || !s.packed_q ? Owner{batch, {0, p.rows}} : owner_of(s, p.batch, row);
    fa_token token = no_token(batch, row);
    if (!has) return token;
    if (p.slots.data) {
        token = fa_token_of_slot(&p.slots, &s, n);
    } else if (owner.sequence >= 0) {
        const int64_t count = fa_used(&s.q, owner.sequence, owner.rows.end - owner.rows.begin);
        const int64_t t = row - owner.rows.begin;
        if (t < count) token = fa_token_of_sequence(&p.slots, &s, owner.sequence, owner.rows.begin, count, t);
        /* A bad page is one fault, whatever the number of its tokens. */
        counts &= token.fault != FA_FAULT_page || t == 0 || token.place == 0;
    }
    if (counts && token.fault != FA_FAULT_COUNT)
        count_fault(faults, token.fault, token.sequence, token.index, token.value);
    return token;
}

/* Which slots a block's tokens may have: a bit for each remainder of slots. */
struct Marks {
    static constexpr int kBits = 2048;
    unsigned word[kBits / 32];

    __device__ __forceinline__ static unsigned bit_of(int64_t slot) {
        return static_cast<unsigned>(slot ^ slot >> 11) % kBits;
    }
    __device__ __forceinline__ bool has(int64_t slot) const {
        const unsigned bit = bit_of(slot);
        return word[bit / 32] >> bit % 32 & 1;
    }

    /* Of the tokens of one warp's lanes, by that warp. */
    __device__ __forceinline__ void set(const Params &p, const fa_token &token) {
        const int lane = threadIdx.x % kWarp;
#pragma unroll
        for (int i = 0; i < kBits / 32; i += kWarp) word[i + lane] = 0;
        __syncwarp();
        const unsigned bit = bit_of(token.page * p.slots.page_size + token.place);
        if (!token.skipped) atomicOr(&word[bit / 32], 1u << bit % 32);
    }
};

/* Slots that a thread reads at a time: those of tokens begin + threadIdx.x + i * kThreads; -1 where there is none. */
struct Slots {
    static constexpr int kCount = 4;
    int64_t slot[kCount];

    __device__ __forceinline__ void load(const Params &p, int64_t begin) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            const int64_t other = begin + threadIdx.x + i * kThreads;
            slot[i] = other < p.slots.count ? fa_slot(&p.slots, other) : -1;
        }
    }
};

/* Says which of a block's tokens, the first of them token `first`, have a later one with the same slot: by all threads,
 * which look at each later slot once. `slots` has been loaded for first + 1. */
__device__ __forceinline__ void mark_replaced(const Params &p, const fa_sequences &s, int64_t first, int tokens,
                                              const fa_token *token, const Marks &marks, Slots &slots, int *replaced) {
    constexpr int kTogether = Slots::kCount * kThreads;
#pragma unroll 1
    for (int64_t begin = first + 1; begin < p.slots.count; begin += kTogether) {
        if (begin > first + 1) slots.load(p, begin);
        unsigned marked = 0;
#pragma unroll
        for (int i = 0; i < Slots::kCount; ++i)
            if (slots.slot[i] >= 0 && marks.has(slots.slot[i])) marked |= 1u << i;
        for (; marked; marked &= marked - 1) { // rare
            const int64_t other = begin + threadIdx.x + (__ffs(static_cast<int>(marked)) - 1) * kThreads;
            const fa_token later = fa_token_of_slot(&p.slots, &s, other);
#pragma unroll 1
            for (int n = 0; n < tokens && first + n < other; ++n)
                if (!token[n].skipped && !later.skipped && token[n].page == later.page && token[n].place == later.place)
                    atomicExch(&replaced[n], 1);
        }
    }
}

/* Counts what is bad in starts and lengths, by one block. */
__device__ __forceinline__ void check_lengths(const Params &p, const fa_sequences &s, fa_fault_board *faults,
                                              int64_t *ends) {
    if (!s.q.starts && !s.q.used) return;
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    int64_t before = s.q.starts ? fa_start(&s.q, 0) : 0; // the end of the sequence before
    for (int64_t first = 0; first < p.batch; first += kThreads) {
        const int64_t b = first + threadIdx.x;
        fa_span rows = s.packed_q ? fa_span{b, b + 1} : fa_span{0, p.rows};
        if (s.q.starts) {
            int64_t end = b < p.batch ? fa_start(&s.q, b + 1) : 0;
#pragma unroll
            for (int offset = 1; offset < kWarp; offset *= 2) {
                const int64_t other = __shfl_up_sync(~0u, end, offset);
                if (lane >= offset && other > end) end = other;
            }
            if (lane == kWarp - 1) ends[warp] = end;
            __syncthreads();
            int64_t largest = before;
            for (int w = 0; w < kWarps; ++w) {
                if (w == warp) rows.begin = largest;
                largest = ends[w] > largest ? ends[w] : largest;
            }
            const int64_t earlier = __shfl_up_sync(~0u, end, 1);
            rows.end = end > rows.begin ? end : rows.begin;
            if (lane > 0 && earlier > rows.begin) rows.begin = earlier;
            before = largest;
            __syncthreads();
        }
        if (b < p.batch) count_faults_of_q(faults, s, b, rows);
    }
}

} // namespace fa
