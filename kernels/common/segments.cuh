/* Ids of documents: a query sees the keys of its own id alone. */
#pragma once

#include <stdint.h> // int32_t, int64_t

#include "fa.h"       // fa_forward
#include "geometry.h" // fa_index

namespace fa {

/* By value: rows of ids, one a batch entry, `stride` apart; NULL: none. */
struct Segments {
    const int32_t *q, *k;
    int64_t q_stride, k_stride;

    /* Of query i, or key j, of an entry; 0 without ids. */
    __device__ __forceinline__ int32_t of_query(int64_t batch, int64_t i) const {
        return q ? fa_index(q, batch * q_stride + i) : 0;
    }
    __device__ __forceinline__ int32_t of_key(int64_t batch, int64_t j) const {
        return k ? fa_index(k, batch * k_stride + j) : 0;
    }
};

inline Segments segments_of(const fa_forward &p) {
    return {static_cast<const int32_t *>(p.q_segments.data), static_cast<const int32_t *>(p.k_segments.data),
            p.q_segments.stride[0], p.k_segments.stride[0]};
}

} // namespace fa
