/* Intervals of keys: what a query sees of the keys that all else leaves it. */
#pragma once

#include <stdint.h> // int32_t, int64_t

#include "common/mask.cuh" // KeyRange
#include "fa.h"            // fa_forward
#include "geometry.h"      // fa_interval

namespace fa {

/* The keys that the intervals of a query hold: those of one, or of the other. */
struct Held {
    KeyRange of[2];

    __device__ __forceinline__ bool holds(int64_t key) const {
        return (of[0].begin <= key && key < of[0].end) || (of[1].begin <= key && key < of[1].end);
    }

    /* The smallest range that has all keys of `keys` that are held; {0, 0} when there are none. */
    __device__ __forceinline__ KeyRange within(const KeyRange &keys) const {
        KeyRange all = {0, 0};
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            const KeyRange one = {of[n].begin > keys.begin ? of[n].begin : keys.begin,
                                  of[n].end < keys.end ? of[n].end : keys.end};
            if (one.empty()) continue;
            const bool first = all.empty();
            all = {first || one.begin < all.begin ? one.begin : all.begin,
                   first || one.end > all.end ? one.end : all.end};
        }
        return all;
    }

    /* Keys between those of one and those of the other; empty where the two meet. */
    __device__ __forceinline__ KeyRange gap() const {
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
    int64_t keys;
    int count;

    /* Read where it is used, or once: somebody may write there meanwhile. */
    __device__ __forceinline__ Held of_query(int64_t batch, int64_t head, int64_t query) const {
        Held held = {{{0, keys}, {0, 0}}};
        if (!begins) return held;
        const int32_t *first = begins + batch * stride[0] + head * stride[1] + query * stride[2];
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            if (n == count) break;
            const fa_span span = fa_interval(first + n * stride[3], to_end, keys);
            held.of[n] = {span.begin, span.end};
        }
        return held;
    }
};

inline Intervals intervals_of(const fa_forward &p) {
    const int64_t *stride = p.intervals.stride;
    return {static_cast<const int32_t *>(p.intervals.data),
            {stride[0], stride[1], stride[2], stride[3]},
            p.intervals_end,
            p.seq_k,
            p.intervals_count};
}

} // namespace fa
