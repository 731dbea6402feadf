/* Which keys a query sees: a contiguous range from causal, window and the call's key range, less the boolean mask.
 *
 * Key j is visible to query i iff key_begin <= j < key_end and -left <= j - (i + diagonal) <= right. For a fixed i that
 * is one range, and both of its ends grow with i: the ranges of a tile's first and last query give the tile's. This is
 * what geometry.h says of an entry, for problems without sequences. Kernels whose lengths fit in 32 bits carry one of
 * two packed forms of it: Band, as the call has it, and ShiftedBand, keys counted from the first visible one. */
#pragma once

#include <stdint.h> // int64_t

namespace fa {

/* Rows, or keys, [begin, end); none when end <= begin. */
template <class Int> struct Span {
    Int begin, end;

    __host__ __device__ bool empty() const { return end <= begin; }
    /* Whether some, or all, of [first, first + count) are in. */
    __host__ __device__ bool meets(Int first, Int count) const { return first < end && first + count > begin; }
    __host__ __device__ bool holds(Int first, Int count) const { return begin <= first && first + count <= end; }
};

using KeyRange = Span<int64_t>;

/* ---- in 64 bits: of what has the members left, right, diagonal, key_begin and key_end of fa_forward ---- */

/* Keys that query `row` sees (the boolean mask aside). */
template <class Problem> __host__ __device__ __forceinline__ KeyRange row_keys(const Problem &p, int64_t row) {
    int64_t begin = row + p.diagonal - p.left, end = row + p.diagonal + p.right + 1;
    return {begin > p.key_begin ? begin : p.key_begin, end < p.key_end ? end : p.key_end};
}

/* Smallest range that holds every key that some query of the non-empty tile [row_begin, row_end) sees. */
template <class Problem>
__host__ __device__ __forceinline__ KeyRange tile_keys(const Problem &p, int64_t row_begin, int64_t row_end) {
    return {row_keys(p, row_begin).begin, row_keys(p, row_end - 1).end};
}

/* Keys that every query of the non-empty tile sees: key blocks inside need no test. May be empty. */
template <class Problem>
__host__ __device__ __forceinline__ KeyRange tile_common_keys(const Problem &p, int64_t row_begin, int64_t row_end) {
    return {row_keys(p, row_end - 1).begin, row_keys(p, row_begin).end};
}

/* Smallest range of queries that holds every one that sees some key of the tile `keys`; none for an empty tile. */
template <class Problem>
__host__ __device__ __forceinline__ KeyRange tile_queries(const Problem &p, const KeyRange &keys) {
    if (keys.empty()) return {0, 0};
    const int64_t begin = keys.begin - p.diagonal - p.right, end = keys.end - p.diagonal + p.left;
    return {begin > 0 ? begin : 0, end < p.seq_q ? end : p.seq_q};
}

/* The same test inside one block of keys, in 32-bit arithmetic relative to a query `row` and a key `key0` that is not
 * before key_begin: query row + i sees key0 + c iff begin <= c - i < end and c < limit. |i| and c stay below 2^28. */
struct KeyBand {
    int begin, end, limit;

    __host__ __device__ __forceinline__ bool sees(int i, int c) const {
        return c - i >= begin && c - i < end && c < limit;
    }
};

template <class Problem>
__host__ __device__ __forceinline__ KeyBand key_band(const Problem &p, int64_t row, int64_t key0) {
    constexpr int64_t kFar = 1 << 29;
    auto clamp = [](int64_t x) { return static_cast<int>(x < -kFar ? -kFar : x > kFar ? kFar : x); };
    const int64_t centre = row + p.diagonal - key0;
    return {clamp(centre - p.left), clamp(centre + p.right + 1), clamp(p.key_end - key0)};
}

/* ---- in 32 bits: row i sees the keys [begin_of(form, i), end_of(form, i)) ---- */

/* As the call has it; `left` and `right` are cut to what keeps sums of four such numbers in 32 bits. Of a Band, or of
 * what has its members. */
struct Band {
    int left, right, diagonal, key_begin, key_end;
};
template <class Form> __device__ __forceinline__ int begin_of(const Form &form, int row) {
    return max(form.key_begin, row + form.diagonal - form.left);
}
template <class Form> __device__ __forceinline__ int end_of(const Form &form, int row) {
    return min(form.key_end, row + form.diagonal + form.right + 1);
}

/* With keys counted from the call's first visible one: row i sees keys j, max(0, i + lower) <= j < min(seq_k, i +
 * upper). Bounds that exclude nothing are cut to +-2^30. */
struct ShiftedBand {
    int seq_k, lower, upper;
};
__device__ __forceinline__ int begin_of(const ShiftedBand &band, int row) { return max(0, row + band.lower); }
__device__ __forceinline__ int end_of(const ShiftedBand &band, int row) { return min(band.seq_k, row + band.upper); }

/* Keys that row `row` sees; that some row from `first` to `last` sees; that every one of them sees. */
template <class Form> __device__ __forceinline__ Span<int> row_span(const Form &form, int row) {
    return {begin_of(form, row), end_of(form, row)};
}
template <class Form> __device__ __forceinline__ Span<int> tile_span(const Form &form, int first, int last) {
    return {begin_of(form, first), end_of(form, last)};
}
template <class Form> __device__ __forceinline__ Span<int> common_span(const Form &form, int first, int last) {
    return {begin_of(form, last), end_of(form, first)};
}

} // namespace fa
