/* The list of a call's sequences that prefill_list_kernel leaves in workspace for the kernels after it. */
#pragma once
#include <stdint.h>

#include "fa.h"

namespace fa::sm90 {

/* A sequence, in the order of the work. */
struct alignas(16) Record {
    int b;                          // which of the batch
    int unit;                       // units before it
    int first_q, seq_q;             // its queries: rows of q
    int first_k, seq_k;             // its keys
    int key_begin, key_end;         // of those that take part
    int rows_end;                   // where the rows of q that are its own end, used or not
    int chunk, first_chunk, chunks; // keys a chunk, the first one that is seen, how many are; chunks 0: not cut
    int slot;                       // of the first chunk's state; negative: each unit has all chunks of its tile.
                                    // Of few rows (few.cuh) chunks and slot are those of its blocks
    uint32_t tiles, width;          // of queries; heads of a section (find_tile)
    int rows_begin;                 // where those rows begin
};

struct alignas(16) ListHeader {
    uint32_t units, counter; // all of them; how many were taken beside the first of each block
    int tail;                // rows of q from here on belong to no sequence
    uint32_t few_units;      // of a kv head of the records that blocks share: their units come after all others'
    int few_shared, few_whole, few_brief, few_end; // records of few rows: from where blocks share them, have one each,
                                                   // and warps have one each
    uint32_t few_counter;                          // how many units of those were taken beside the first of each block
};

/* Sequences of few rows a kv head, which are serve_sm90's (few.cuh). */
struct FewRows {
    int rows;           // of a kv head at most; 0: prefill_sm90 has all sequences
    int columns;        // of the instance of serve_sm90
    int blocks;         // that share the work
    int slots;          // for states of kv heads whose keys blocks share
    bool alone;         // no sequence has more rows
    uint32_t *arrivals; // of blocks that share a kv head, for each slot
};

/* Of a record. */
__device__ __forceinline__ fa_entry entry_at(const fa_sequences &s, const Record &of, int64_t diagonal) {
    fa_entry e;
    e.seq_q = of.seq_q, e.seq_k = of.seq_k, e.first_q = of.first_q, e.first_k = of.first_k;
    e.diagonal = diagonal;
    e.positions = s.positions ? s.positions + of.b * s.positions_stride + of.first_q : nullptr;
    e.key_begin = of.key_begin, e.key_end = of.key_end;
    return e;
}

} // namespace fa::sm90
