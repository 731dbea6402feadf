/* Sequences of few rows (query i and head g of the group of a kv head), which serve_sm90 takes: classes by their rows,
 * and chunks of their keys. The class says which loop multiplies and how chunks are cut, so both are part of what a
 * sequence's bits are, and follow from its own lengths alone: never from the batch. */
#pragma once
#include <stdint.h> // int64_t

#include "common/fold.cuh" // kChunkKeys, chunk_shift
#include "fa.h"            // fa_span

namespace fa::sm90 {

constexpr int kFewRows = 8;       // of a job by mma.sync (serve/chunk.cuh)
constexpr int kThinRows = 64;     // of a job by wgmma (serve/thin.cuh)
constexpr int kThinColumns = 128; // of q, at most, where jobs are thin

/* Rows of a kv head that a sequence of packed queries has at most, to be serve_sm90's. */
__host__ __device__ constexpr int sequence_rows(int head_dim) { return head_dim > kThinColumns ? kFewRows : kThinRows; }

/* Whether jobs of a sequence that has `rows` are thin, in an instance of `columns`. */
__host__ __device__ inline bool is_thin(int64_t rows, int columns) {
    return rows > kFewRows && columns <= kThinColumns;
}

constexpr int kThinChunkKeys = 256, kThinChunks = 32; // as kChunkKeys and kMaxChunks

/* The keys that a sequence's queries see, and their chunks: cut at multiples of 64 * 2^e keys, counted from the
 * sequence's first, with the least e that leaves at most 127 * 64 * 2^e keys; where it is thin of 256 * 2^e, and at
 * most 31. */
struct Sight {
    int low, high;
    int shift;       // log2 of the keys of a chunk
    int first, last; // chunks

    __host__ __device__ static Sight of(const fa_span &seen, bool thin) {
        static_assert(kChunkKeys == 1 << 6 && kThinChunkKeys == 1 << 8);
        Sight x;
        x.low = static_cast<int>(seen.begin), x.high = static_cast<int>(seen.end);
        x.shift = thin ? chunk_shift(x.high - x.low, kThinChunkKeys, kThinChunks) + 8 : chunk_shift(x.high - x.low) + 6;
        x.first = x.low >> x.shift;
        x.last = x.high > x.low ? ((x.high - 1) >> x.shift) + 1 : x.first;
        return x;
    }
};

} // namespace fa::sm90
