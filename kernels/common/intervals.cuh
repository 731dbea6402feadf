/* Intervals of keys: what a query sees of the keys that all else leaves it. */
#pragma once

#include <stdint.h> // int32_t, int64_t

#include "common/mask.cuh" // Span
#include "fa.h"            // fa_forward
#include "geometry.h"      // fa_index

namespace fa {

/* The keys that the intervals of a query hold: those of one, or of the other. Ends fit in 32 bits as they come. */
struct Held {
    Span<int> of[2];

    __device__ __forceinline__ bool holds(int64_t key) const {
        return (of[0].begin <= key && key < of[0].end) || (of[1].begin <= key && key < of[1].end);
    }

    /* The smallest range that has all keys of `keys` that are held; {0, 0} when there are none. */
    template <class Int> __device__ __forceinline__ Span<Int> within(const Span<Int> &keys) const {
        Span<Int> all = {0, 0};
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            const Int begin = of[n].begin, end = of[n].end;
            const Span<Int> one = {begin > keys.begin ? begin : keys.begin, end < keys.end ? end : keys.end};
            if (one.empty()) continue;
            const bool first = all.empty();
            all = {first || one.begin < all.begin ? one.begin : all.begin,
                   first || one.end > all.end ? one.end : all.end};
        }
        return all;
    }

    /* Keys between those of one and those of the other; empty where the two meet. */
    __device__ __forceinline__ Span<int> gap() const {
        if (of[0].empty() || of[1].empty()) return {0, 0};
        const bool swapped = of[1].begin < of[0].begin;
        return {swapped ? of[1].end : of[0].end, swapped ? of[0].begin : of[1].begin};
    }
};

/* By value: `begins` is NULL without intervals. */
struct Intervals {
    const int32_t *begins;
    int64_t stride[4]; // of the batch entry, the head, the query and the interval
    int64_t to_end;
    int keys;  // that there are, or as many as an end can name
    int count; // 0 without intervals

    /* Of a query, where there are intervals. Read where it is used, or once: somebody may write there meanwhile. */
    __device__ __forceinline__ Held of_query(int64_t batch, int64_t head, int64_t query) const {
        Held held = {{{0, 0}, {0, 0}}};
        const int32_t *first = begins + batch * stride[0] + head * stride[1] + query * stride[2];
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            if (n == count) break;
            held.of[n] = {cut(fa_index(first, n * stride[3])), cut(fa_index(first, n * stride[3] + to_end))};
        }
        return held;
    }

  private:
    __device__ __forceinline__ int cut(int end) const { return min(max(end, 0), keys); }
};

inline Intervals intervals_of(const fa_forward &p) {
    const int64_t *stride = p.intervals.stride;
    return {static_cast<const int32_t *>(p.intervals.data),
            {stride[0], stride[1], stride[2], stride[3]},
            p.intervals_end,
            p.seq_k < INT32_MAX ? static_cast<int>(p.seq_k) : INT32_MAX,
            p.intervals_count};
}

} // namespace fa
