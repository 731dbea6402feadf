/* serve_sm90: classes of sequences by their rows (query i and head g of the group of a kv head). The class says which
 * loop multiplies and how chunks are cut, so it is part of what a sequence's bits are, and follows from its own rows
 * alone: never from the batch. */
#pragma once
#include <stdint.h> // int64_t

namespace fa::sm90::serve {

constexpr int kFewRows = 8;       // of a job by mma.sync (chunk.cuh)
constexpr int kThinRows = 64;     // of a job by wgmma (thin.cuh)
constexpr int kThinColumns = 128; // of q, at most, where jobs are thin

/* Rows of a kv head that a sequence of packed queries has at most, to be this kernel's. */
__host__ __device__ constexpr int sequence_rows(int head_dim) { return head_dim > kThinColumns ? kFewRows : kThinRows; }

/* Whether jobs of a sequence that has `rows` are thin, in an instance of `columns`. */
__host__ __device__ inline bool is_thin(int64_t rows, int columns) {
    return rows > kFewRows && columns <= kThinColumns;
}

} // namespace fa::sm90::serve
