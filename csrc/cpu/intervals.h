/* Intervals of keys: what a query sees of the keys that all else leaves it. */
#ifndef FA_CPU_INTERVALS_H
#define FA_CPU_INTERVALS_H

#include "cpu/entries.h"
#include "fa.h"

/* The keys that a query's intervals hold, cut to those there are: one of `of`, or the other. */
typedef struct fa_held {
    fa_span of[2];
} fa_held;

/* Read once a query: what it sees stays the same, whatever is written there meanwhile. Without intervals all keys. */
static inline fa_held fa_held_keys(const fa_forward *f, int64_t b, int64_t h, int64_t query) {
    fa_held held = {{{0, f->seq_k}, {0, 0}}};
    const int32_t *first = f->intervals.data;
    for (int n = 0; first && n < f->intervals_count; n++)
        held.of[n] = fa_interval(first + fa_at(&f->intervals, b, h, query, n), f->intervals_end, f->seq_k);
    return held;
}

static inline bool fa_holds(const fa_held *held, int64_t key) {
    return (held->of[0].begin <= key && key < held->of[0].end) || (held->of[1].begin <= key && key < held->of[1].end);
}

/* The keys that are in both ranges; empty ones are {0, 0}. */
static inline fa_span fa_span_cut(fa_span a, fa_span b) {
    const fa_span cut = {a.begin > b.begin ? a.begin : b.begin, a.end < b.end ? a.end : b.end};
    return cut.begin < cut.end ? cut : (fa_span){0, 0};
}

/* Both ranges and what lies between; b may be empty, and so may a. */
static inline fa_span fa_span_joined(fa_span a, fa_span b) {
    if (b.end <= b.begin) return a;
    if (a.end <= a.begin) return b;
    return (fa_span){a.begin < b.begin ? a.begin : b.begin, a.end > b.end ? a.end : b.end};
}

/* The smallest range that has all keys of `keys` that are held; it begins with one of them. */
static inline fa_span fa_held_within(const fa_held *held, fa_span keys) {
    return fa_span_joined(fa_span_cut(keys, held->of[0]), fa_span_cut(keys, held->of[1]));
}

#endif
