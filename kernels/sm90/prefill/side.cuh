/* prefill_sm90: what a warp does beside the work: rows of q that belong to no sequence, and pages that do not exist. */
#pragma once
#include "common/faults.cuh"
#include "common/rows.cuh"
#include "sm90/prefill/schedule.cuh"

namespace fa::sm90::prefill {

/* Rows [begin, end) of all heads, every `step`-th of them, belong to no query: 0 and -inf. One warp. */
__device__ __forceinline__ void write_nothing(const Call &call, int batch, int64_t begin, int64_t end, int64_t step) {
    const int lane = threadIdx.x % 32, heads = static_cast<int>(call.heads), pieces = call.head_dim / 8;
#pragma unroll 1
    for (int64_t query = begin; query < end; query += step) {
#pragma unroll 1
        for (int n = lane; n < heads * pieces; n += 32)
            *reinterpret_cast<uint4 *>(row_of<uint16_t>(call.out, batch, n / pieces, query) + n % pieces * 8) =
                make_uint4(0, 0, 0, 0);
#pragma unroll 1
        for (int head = lane; head < heads; head += 32) store_lse(call, batch, head, query, -INFINITY);
    }
}

/* Counts the table's entries that are no page, for keys that some query of the sequence may see: every `step`-th run of
 * 32 columns from `part` on. One warp. */
__device__ __forceinline__ void count_bad_pages(const Call &call, const Record &r, int part, int step) {
    const fa_pages &pages = call.s.pages;
    if (r.tiles == 0) return; // serve_listed_kernel counts those of few rows
    const fa_entry e = entry_of(call, r);
    const Stands at = stands(e, 0, r.seq_q - 1);
    const fa_span seen = fa_tile_keys(&e, call.left, call.right, at.low, at.high);
    if (seen.begin >= seen.end) return;
    const int size = static_cast<int>(pages.size), end = static_cast<int>(seen.end);
#pragma unroll 1
    for (int column = static_cast<int>(seen.begin) / size + part * 32 + static_cast<int>(threadIdx.x % 32);
         int64_t(column) * size < end; column += 32 * step) {
        const int32_t entry = fa_page_entry(&pages, r.b, column);
        if (fa_page_of(&pages, entry) < 0) count_fault(call.faults, FA_FAULT_page, r.b, column, entry);
    }
}

/* Writes the rows of out that no query has, and counts bad page entries. One warp of each block. */
__device__ __forceinline__ void attend_to_the_rest(const Call &call) {
    const fa_sequences &s = call.s;
    if (!s.given) return;
    const int block = static_cast<int>(blockIdx.x), blocks = static_cast<int>(gridDim.x);
    const int batch = static_cast<int>(call.batch), parts = max(blocks / max(batch, 1), 1); // blocks a sequence
    if (s.packed_q) write_nothing(call, 0, call.workspace.header()->tail + block, call.seq_q, blocks);
    if (s.q.used || s.q.starts)
#pragma unroll 1
        for (int n = block / parts; n < batch; n += blocks / parts) {
            const Record &r = *call.workspace.record(n);
            write_nothing(call, s.packed_q ? 0 : r.b, r.first_q + r.seq_q + block % parts, r.rows_end, parts);
            if (r.b == 0 && s.packed_q) write_nothing(call, 0, block % parts, r.rows_begin, parts);
        }
    if (call.faults && s.pages.table)
#pragma unroll 1
        for (int n = block / parts; n < batch; n += blocks / parts)
            count_bad_pages(call, *call.workspace.record(n), block % parts, parts);
}

} // namespace fa::sm90::prefill
