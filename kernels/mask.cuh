/* Which keys a query sees: a contiguous range from causal, window and the call's key range, less the boolean mask.
 *
 * Key j is visible to query i iff key_begin <= j < key_end and -left <= j - (i + diagonal) <= right. For a fixed i that
 * is one range, and both of its ends grow with i: the ranges of a tile's first and last query give the tile's. */
#ifndef FA_MASK_CUH
#define FA_MASK_CUH

#include <stdint.h> // int64_t

#include "fa.h" // fa_forward

namespace fa {

/* Keys [begin, end); none when end <= begin. */
struct KeyRange {
    int64_t begin, end;

    __host__ __device__ bool empty() const { return end <= begin; }
};

/* Keys that query `row` sees (the boolean mask aside). `Problem` is fa_forward, or what has its members left, right,
 * diagonal, key_begin and key_end. */
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

__host__ __device__ __forceinline__ KeyBand key_band(const fa_forward &p, int64_t row, int64_t key0) {
    constexpr int64_t FAR = 1 << 29;
    auto clamp = [](int64_t x) { return static_cast<int>(x < -FAR ? -FAR : x > FAR ? FAR : x); };
    const int64_t centre = row + p.diagonal - key0;
    return {clamp(centre - p.left), clamp(centre + p.right + 1), clamp(p.key_end - key0)};
}

/* Row of the boolean mask for one query; element `key` lies at mask_row[key * p.mask.stride[3]], not 0 = attend. */
__device__ __forceinline__ const uint8_t *mask_row(const fa_forward &p, int64_t batch, int64_t head, int64_t row) {
    return static_cast<const uint8_t *>(p.mask.data) + batch * p.mask.stride[0] + head * p.mask.stride[1] +
           row * p.mask.stride[2];
}

} // namespace fa

#endif
