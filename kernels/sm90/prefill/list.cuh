/* prefill_sm90: the order of the work.
 *
 * A unit is a tile of queries of a sequence and a head, or kv head where heads are packed into rows.
 * prefill_list_kernel (one block) writes a record for each sequence, those with the longest tiles first, with the
 * number of units before it; blocks of the main kernel take units from a counter. Within a sequence the heads go in
 * sections whose keys and values fit in L2, each section from its last tile of queries, the longest of a causal call,
 * to its first.
 *
 * Sequences of few units and many keys are cut into chunks, each a unit of its own with a state in workspace as long as
 * there is room for it; else each unit goes through the chunks of its tile and folds their states in the same order:
 * the bits do not depend on that room.
 *
 * The order of sequences of one class is that of the atomics: it decides which block computes what, but no bit.
 *
 * Lengths may change while this runs. Each is read once, by the thread that has the sequence; how many units there are
 * of a class and where they come in the order follows from one record. So packed sequences lie apart from each other,
 * and every record of workspace is written once, whatever the arrays hold. The main kernel reads records alone. */
#pragma once
#include "common/faults.cuh"       // count_faults_of_q, count_faults_of_k
#include "sm90/common/cluster.cuh" // dependency_wait
#include "sm90/prefill/few.cuh"

namespace fa::sm90::prefill {

/* A start of q's or of k's; 0 where there are none. */
__device__ __forceinline__ int start_of(const fa_lengths &lengths, int n) {
    return lengths.starts ? static_cast<int>(fa_start(&lengths, n)) : 0;
}

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

/* KiB of keys and values of a section, given those of a kv head: as wgmma_sm90 has it. */
__device__ __forceinline__ uint32_t section_kib(uint32_t head_kib) {
    return (head_kib <= 256 ? 16 : head_kib <= 1 << 10 ? 32 : 64) << 10;
}

__device__ __forceinline__ void prefetch_lengths(const fa_sequences &s, int b) {
    const int32_t *const arrays[] = {s.q.used, s.k.used, s.begin, s.end};
    for (const int32_t *x : arrays)
        if (x) asm volatile("prefetch.global.L2 [%0];" ::"l"(x + b));
}

/* How a sequence is cut: by its own lengths and what its queries see. */
__device__ __forceinline__ void cut(const Call &call, Record &r, uint32_t units) {
    if (units == 0 || units > kSplitUnits) return;
    const fa_entry e = entry_of(call, r);
    fa_span seen = {e.key_begin, e.key_end};
    if (!e.positions) seen = fa_tile_keys(&e, call.left, call.right, e.diagonal, e.seq_q - 1 + e.diagonal);
    const int64_t keys = seen.end - seen.begin, most = min(int64_t(kSplitTarget / units), keys / kChunk);
    if (keys <= kSplitKeys) return;
    int64_t chunk = kChunk;
#pragma unroll 1
    while (chunk * most < keys) chunk *= 2;
    r.chunk = static_cast<int>(chunk), r.first_chunk = static_cast<int>(seen.begin / chunk);
    r.chunks = static_cast<int>((seen.end - 1) / chunk) - r.first_chunk + 1;
    if (r.chunks == 1) r.chunks = 0;
}

__device__ __forceinline__ Record record_of(const Call &call, int b, fa_span q, fa_span k) {
    const fa_entry e = fa_entry_of(&call.s, b, q, k);
    Record r = {};
    r.b = b;
    r.first_q = static_cast<int>(q.begin), r.seq_q = static_cast<int>(e.seq_q);
    r.first_k = static_cast<int>(k.begin), r.seq_k = static_cast<int>(e.seq_k);
    r.key_begin = static_cast<int>(e.key_begin), r.key_end = static_cast<int>(e.key_end);
    r.rows_begin = static_cast<int>(q.begin), r.rows_end = static_cast<int>(q.end);
    const bool packed = packs(call, r.seq_q);
    const uint32_t queries = tile_queries(call, packed), heads = tile_heads(call, packed);
    const uint32_t row = (call.head_dim + call.head_dim_v) * 2; // bytes of a key and its value
    const uint32_t kib = max(static_cast<uint32_t>((uint64_t(r.seq_k) * row) >> 10), 1u), fit = section_kib(kib) / kib;
    r.tiles = is_few(call, r) ? 0 : (r.seq_q + queries - 1) / queries;
    r.width = min((packed ? 1 : call.group) * max(fit, 1u), heads);
    return r;
}

__device__ __forceinline__ uint32_t units_of(const Call &call, const Record &r) {
    return r.tiles * tile_heads(call, packs(call, r.seq_q));
}

/* By the keys of its longest tile, the longest last; 0: no units. */
__device__ __forceinline__ int class_of(const Call &call, const Record &r, uint32_t units) {
    if (!units) return 0;
    const int64_t window = call.left + call.right + call.tile_m, keys = max(r.key_end - r.key_begin, 0);
    return kClasses + class_of_keys(128 + min(keys, window));
}

/* The record of a sequence that is met, but for the place in the order and the slot. Counts what is bad in its lengths.
 */
__device__ __forceinline__ Record meet(const Call &call, int b, const fa_span &q, const fa_span &k) {
    Record record = record_of(call, b, q, k);
    if (call.workspace.slots) cut(call, record, units_of(call, record));
    if (call.faults) {
        count_faults_of_q(call.faults, call.s, b, q);
        count_faults_of_k(call.faults, call.s, b, k);
    }
    return record;
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
    Header *header = call.workspace.header();
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

__global__ void __launch_bounds__(kListThreads, 1) prefill_list_kernel(const __grid_constant__ Call call) {
    FA_CHAOS_BEGIN();
    __shared__ int scratch[kListThreads / 32];
    __shared__ unsigned long long place[2 * kClasses]; // sequences and, in the low half, units before the next of a
                                                       // class
    __shared__ FewFound few;
    const fa_sequences &s = call.s;
    const int threads = blockDim.x, batch = static_cast<int>(call.batch), each = (batch + threads - 1) / threads;
    const int first = min(static_cast<int>(threadIdx.x) * each, batch), last = min(first + each, batch);
#pragma unroll 1
    for (int n = threadIdx.x; n < 2 * kClasses; n += threads) place[n] = 0;
    if (threadIdx.x == 0) few = {};
    dependency_release(); // blocks of the main kernel may start; they wait for this one to end
    dependency_wait();
#pragma unroll 1
    for (int b = first; b < last; ++b) prefetch_lengths(s, b); // those below are read one after the other

    /* Where the thread's first sequence begins, and where the one at hand ends, if there are starts. Of several, the
     * ends wait in drafts of their records. */
    int begin[2] = {0, 0}, end[2] = {0, 0};
    if (s.q.starts || s.k.starts) {
        const auto larger = [](int a, int b) { return max(a, b); };
        if (threadIdx.x == 0) begin[0] = start_of(s.q, 0), begin[1] = start_of(s.k, 0);
        int highest[2] = {begin[0], begin[1]};
#pragma unroll 1
        for (int b = first; b < last; ++b) {
            end[0] = start_of(s.q, b + 1), end[1] = start_of(s.k, b + 1);
            highest[0] = max(highest[0], end[0]), highest[1] = max(highest[1], end[1]);
            if (each > 1) call.workspace.draft(b)->rows_end = end[0], call.workspace.draft(b)->first_k = end[1];
        }
        const int before[2] = {scan_before(highest[0], scratch, larger), scan_before(highest[1], scratch, larger)};
        if (threadIdx.x > 0) begin[0] = before[0], begin[1] = before[1];
    }
    Record kept; // the thread's only sequence; several are drafts
    FewFound met = {};
#pragma unroll 1
    for (int b = first; b < last; ++b) {
        if (each > 1) end[0] = call.workspace.draft(b)->rows_end, end[1] = call.workspace.draft(b)->first_k;
        const fa_span q = fa_rows_to(&s.q, b, begin[0], end[0], s.packed_q);
        const fa_span k = fa_rows_to(&s.k, b, begin[1], end[1], s.packed_k);
        begin[0] = static_cast<int>(q.end), begin[1] = static_cast<int>(k.end);
        kept = meet(call, b, q, k);
        if (is_few(call, kept)) {
            const fa_span span = few_span(call, kept);
            const int keys = static_cast<int>(span.end - span.begin);
            met.keys += keys, met.longest = max(met.longest, keys), ++met.sequences;
        }
        if (each > 1) *call.workspace.draft(b) = kept;
    }
    const FewShare share = call.few.rows ? FewShare::of(call, few, met) : FewShare{0, 1, 0};
    constexpr int kEnough = 1 << 20; // slots: more than there are, and no sum of 1024 of them overflows
    int slots_before = 0;
    __syncthreads();
    // Slots are counted, then units of each class, then records are written; by whole warps, of which some threads have
    // no sequence. A loop, since a launch runs this code once, from memory.
#pragma unroll 1
    for (int pass = call.workspace.slots ? 0 : 1; pass < 3; ++pass) {
        int slots = slots_before;
#pragma unroll 1
        for (int n = 0; n < each; ++n) {
            Turn turn = {kept, 0, 0, first + n < last, false};
            Record &record = turn.record;
            if (each > 1 && turn.has) record = *call.workspace.draft(first + n);
            turn.few = turn.has && is_few(call, record);
            if (turn.few) {
                if (pass == 1) {
                    share.cut(call, few, record);
                    kept = record;
                    if (each > 1) *call.workspace.draft(record.b) = record;
                }
                turn.units = max(record.chunks, 1), turn.of = share.class_of(call, record);
            } else if (turn.has) {
                turn.units = units_of(call, record), turn.of = class_of(call, record, turn.units);
                const int needs = static_cast<int>(turn.units) * record.chunks;
                record.slot = slots + needs <= call.workspace.slots ? slots : -1;
                slots = min(slots + needs, kEnough);
                if (record.chunks && record.slot >= 0) turn.units *= record.chunks;
                if (pass == 1 && record.chunks && record.slot >= 0)
#pragma unroll 1
                    for (int at = 0; at < needs; at += record.chunks) *call.workspace.left(record.slot + at) = {};
            }
            if (pass == 0) continue;
            const unsigned long long at = take_places(place, turn);
            if (pass == 1 || !turn.has) continue;
            record.unit = static_cast<int>(at & 0xffffffff);
            *call.workspace.record(static_cast<int>(at >> 32)) = record;
            if (record.b + 1 == batch) call.workspace.header()->tail = record.rows_end;
        }
        if (pass == 0) slots_before = scan_before(slots, scratch, [](int a, int b) { return min(a + b, kEnough); });
        __syncthreads();
        if (pass == 1 && threadIdx.x < 32) begin_classes(call, place, share);
        __syncthreads();
    }
    if (call.few.rows) __threadfence(); // serve_listed_kernel reads the list without waiting for it
}

} // namespace fa::sm90::prefill
