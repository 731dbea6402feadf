/* Counting what is bad in index arrays, where the host can read it: see fa_fault_board. */
#pragma once

#include "faults/faults.h" // fa_fault_board, fa_fault_kind
#include "geometry.h"      // FA_UNBOUNDED, fa_index, fa_sequences, fa_span

namespace fa {

/* Counts one fault, and says what it is if it is the first. Rare: kept out of the way of what is not. */
static __device__ __noinline__ void count_fault(fa_fault_board *board, fa_fault_kind kind, int64_t sequence,
                                                int64_t index, int64_t value) {
    if (!board) return;
    auto &of = board->of[kind];
    const uint32_t epoch = *static_cast<volatile uint32_t *>(&board->epoch);
    const uint32_t owner = *static_cast<volatile uint32_t *>(&of.owner);
    if (owner != epoch && atomicCAS(&of.owner, owner, epoch) == owner) {
        of.sequence = sequence, of.index = index, of.value = value;
        __threadfence_system();
    }
    atomicAdd(reinterpret_cast<unsigned long long *>(&of.count), 1ull);
}

/* Counts what is bad in the start after sequence b, in the first of all for sequence 0, and in its length. `rows` is
 * fa_rows_of(), `most` of them at most for use; `index` as in fa_fault. By one thread, and not inlined, as
 * count_fault(). */
static __device__ __noinline__ void count_length_faults(fa_fault_board *board, const int32_t *starts,
                                                        const int32_t *used, int64_t b, fa_span rows, int64_t most,
                                                        int64_t index) {
    for (int64_t n = b == 0 ? 0 : b + 1; starts && n <= b + 1; ++n) {
        const int64_t start = fa_index(starts, n);
        if (start != (n == b + 1 ? rows.end : rows.begin)) count_fault(board, FA_FAULT_cu_seqlens, n, index, start);
    }
    const int64_t room = rows.end - rows.begin, length = used ? fa_index(used, b) : room;
    if (length < 0 || length > room || length > most) count_fault(board, FA_FAULT_length, b, index, length);
}
/* The same for the queries of a call, and for its keys. */
__device__ __forceinline__ void count_faults_of_q(fa_fault_board *board, const fa_sequences &s, int64_t b,
                                                  const fa_span &rows) {
    count_length_faults(board, s.q.starts, s.q.used, b, rows, s.most_q, 0);
}
__device__ __forceinline__ void count_faults_of_k(fa_fault_board *board, const fa_sequences &s, int64_t b,
                                                  const fa_span &rows) {
    count_length_faults(board, s.k.starts, s.k.used, b, rows, FA_UNBOUNDED, 1);
}

} // namespace fa
