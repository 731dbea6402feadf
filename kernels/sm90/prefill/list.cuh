/* prefill_sm90: the order of the work.
 *
 * A unit is a tile of queries of a sequence and a head, or kv head where heads are packed into rows.
 * prefill_list_kernel (one block) writes a record for each sequence, those with the longest tiles first, with the
 * number of units before it; blocks of the main kernel take units from a counter. Within a sequence the heads go in
 * sections whose keys and values fit in L2, each section from its last tile of queries, the longest of a causal call,
 * to its first.
 *
 * Sequences of few units and many keys are cut into chunks. Where their tiles would end after all others, each chunk is
 * a unit of its own with a state in workspace, as long as there is room for it; else each unit goes through the chunks
 * of its tile and folds their states in the same order: no bit depends on the other sequences, or on that room.
 *
 * In calls of packed_sm90 sequences of few rows come after all others and have no units here (few.cuh).
 *
 * The order of sequences of one class is that of the atomics: it decides which block computes what, but no bit.
 *
 * Lengths may change while this runs. Each is read once, by the thread that has the sequence; how many units there are
 * of a class and where they come in the order follows from one record. So packed sequences lie apart from each other,
 * and every record of workspace is written once, whatever the arrays hold. The main kernel reads records alone. */
#pragma once
#include "common/faults.cuh"       // count_faults_of_q, count_faults_of_k
#include "sm90/common/cluster.cuh" // dependency_wait
#include "sm90/prefill/order.cuh"

namespace fa::sm90::prefill {

/* A start of q's or of k's; 0 where there are none. */
__device__ __forceinline__ int start_of(const fa_lengths &lengths, int n) {
    return lengths.starts ? static_cast<int>(fa_start(&lengths, n)) : 0;
}

/* KiB of keys and values of a section, given those of a kv head: as wgmma_sm90 has it. */
__device__ __forceinline__ uint32_t section_kib(uint32_t head_kib) {
    return (head_kib <= 256 ? 16 : head_kib <= 1 << 10 ? 32 : 64) << 10;
}

/* Brings to L2 the lengths that are read one after the other, but not yet. */
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
    const int64_t keys = seen.end - seen.begin;
    int64_t chunk = units > kManyUnits ? kManyChunk : kChunk;
    const int64_t most = min(int64_t(kSplitTarget / units), keys / chunk);
    if (most < 2) return;
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

/* Meets the thread's sequences; what it found of those of few rows. By the block, since packed sequences begin where
 * those before end. */
__device__ __forceinline__ Found meet_all(const Call &call, Mine &mine, int *scratch) {
    const fa_sequences &s = call.s;
    const bool drafts = mine.each > 1;
    // Where the thread's first sequence begins, and where the one at hand ends, if there are starts. Of several, the
    // ends wait in drafts of their records.
    int begin[2] = {0, 0}, end[2] = {0, 0};
    if (s.q.starts || s.k.starts) {
        const auto larger = [](int a, int b) { return max(a, b); };
        if (threadIdx.x == 0) begin[0] = start_of(s.q, 0), begin[1] = start_of(s.k, 0);
        int highest[2] = {begin[0], begin[1]};
#pragma unroll 1
        for (int b = mine.first; b < mine.last; ++b) {
            end[0] = start_of(s.q, b + 1), end[1] = start_of(s.k, b + 1);
            highest[0] = max(highest[0], end[0]), highest[1] = max(highest[1], end[1]);
            if (drafts) call.workspace.draft(b)->rows_end = end[0], call.workspace.draft(b)->first_k = end[1];
        }
        const int before[2] = {scan_before(highest[0], scratch, larger), scan_before(highest[1], scratch, larger)};
        if (threadIdx.x > 0) begin[0] = before[0], begin[1] = before[1];
    }
    Found met = {};
#pragma unroll 1
    for (int b = mine.first; b < mine.last; ++b) {
        if (drafts) end[0] = call.workspace.draft(b)->rows_end, end[1] = call.workspace.draft(b)->first_k;
        const fa_span q = fa_rows_to(&s.q, b, begin[0], end[0], s.packed_q);
        const fa_span k = fa_rows_to(&s.k, b, begin[1], end[1], s.packed_k);
        begin[0] = static_cast<int>(q.end), begin[1] = static_cast<int>(k.end);
        mine.kept = meet(call, b, q, k);
        met.tile_keys += uint64_t(units_of(call, mine.kept)) * tile_keys(call, mine.kept);
        if (is_few(call, mine.kept)) {
            const fa_span span = few_span(call, mine.kept);
            const int keys = static_cast<int>(span.end - span.begin);
            met.keys += keys, met.longest = max(met.longest, keys), ++met.sequences;
        }
        if (drafts) *call.workspace.draft(b) = mine.kept;
    }
    return met;
}

__global__ void __launch_bounds__(kListThreads, 1) prefill_list_kernel(const __grid_constant__ Call call) {
    FA_CHAOS_BEGIN();
    __shared__ int scratch[kListThreads / 32];
    __shared__ unsigned long long place[2 * kClasses]; // sequences and, in the low half, units before the next of a
                                                       // class
    __shared__ Found found;
    const int threads = blockDim.x, batch = static_cast<int>(call.batch);
    Mine mine;
    mine.each = (batch + threads - 1) / threads;
    mine.first = min(static_cast<int>(threadIdx.x) * mine.each, batch), mine.last = min(mine.first + mine.each, batch);
#pragma unroll 1
    for (int n = threadIdx.x; n < 2 * kClasses; n += threads) place[n] = 0;
    if (threadIdx.x == 0) found = {};
    dependency_release(); // blocks of the main kernel may start; they wait for this one to end
    dependency_wait();
#pragma unroll 1
    for (int b = mine.first; b < mine.last; ++b) prefetch_lengths(call.s, b);
    const Found met = meet_all(call, mine, scratch);
    __syncthreads();
    found.gather(met);
    const FewShare share = call.few.rows ? FewShare::of(call, found) : FewShare{0, 1, 0};
    put_in_order(call, mine, share, found, place, scratch);
    if (call.few.rows) __threadfence(); // serve_listed_kernel reads the list without waiting for it
}

} // namespace fa::sm90::prefill
