/* Which rows are a sequence's queries and keys, where a key lies, and which keys a query sees.
 *
 * C11, C++20 and device code; includes nothing of the library. Index arrays may hold anything, and something else at
 * any moment: what comes out of them here lies inside the arrays they speak of. All positions and lengths are 64-bit,
 * so that no sum of them overflows.
 */
#ifndef FA_GEOMETRY_H
#define FA_GEOMETRY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __CUDACC__
#define FA_INLINE static inline __host__ __device__
#else
#define FA_INLINE static inline
#endif

/* A window bound that excludes nothing. Small enough that i + d + right never overflows. */
#define FA_UNBOUNDED (INT64_C(1) << 60)

/* How the rows of q, or of k and v, belong to sequences. The arrays of indices lie on the device of the call. */
typedef struct fa_lengths {
    const int32_t
        *starts; /* (B + 1): sequence b has rows [starts[b], starts[b + 1]) of a packed array; NULL: not packed */
    const int32_t *used; /* (B): how many of its rows are used; NULL: all */
    int64_t rows;        /* of a packed array; else those each sequence has room for */
} fa_lengths;

/* Pages of keys. Key j of sequence b is row j % size of page table[b * stride + j / size]. */
typedef struct fa_pages {
    const int32_t *table; /* (B, width); NULL: keys are not paged */
    int64_t stride;       /* elements from one row of the table to the next */
    int64_t width, count; /* columns of the table; pages there are */
    int64_t size;         /* keys a page */
} fa_pages;

/* The sequences of a call; all 0 in a dense call, but most_q. */
typedef struct fa_sequences {
    fa_lengths q, k; /* of paged keys k.rows is width * size */
    fa_pages pages;
    const int32_t *begin, *end; /* (B): only keys [begin, end) take part; NULL: no bound */
    const int32_t *positions;   /* (T) or (B, Sq): where the queries stand among the keys; NULL: by the diagonal */
    int64_t positions_stride;   /* of the batch; 0 for packed q */
    int64_t most_q;             /* queries that a sequence has at most, by the caller's promise; FA_UNBOUNDED: none */
    bool given;                 /* the call says any of this, or its q has three axes */
    bool packed_q, packed_k;    /* q, or k and v, have one axis of rows for all sequences */
    bool top_left;              /* query i stands at i, not at i + seq_k - seq_q */
} fa_sequences;

/* A range of rows or keys: empty where end <= begin. */
typedef struct fa_span {
    int64_t begin, end;
} fa_span;

/* One batch entry. Query i is row first_q + i of the operand q, and key j, unless paged, row first_k + j of k and v; it
 * stands at positions[i], else at i + diagonal. */
typedef struct fa_entry {
    int64_t seq_q, seq_k;
    int64_t first_q, first_k;
    int64_t diagonal;
    const int32_t *positions;   /* of its queries, or NULL */
    int64_t key_begin, key_end; /* keys that take part, whatever the window */
} fa_entry;

/* Element n of an index array, by one load: somebody may write there meanwhile, so that what was tested has to be what
 * is used. A compiler may load an ordinary variable again. */
FA_INLINE int32_t fa_index(const int32_t *array, int64_t n) {
#ifdef __CUDA_ARCH__
    int32_t x;
    asm volatile("ld.relaxed.cta.global.s32 %0, [%1];" : "=r"(x) : "l"(array + n));
    return x;
#else
    return __atomic_load_n(array + n, __ATOMIC_RELAXED);
#endif
}

/* The same of 64 bits. */
FA_INLINE int64_t fa_index_64(const int64_t *array, int64_t n) {
#ifdef __CUDA_ARCH__
    int64_t x;
    asm volatile("ld.relaxed.cta.global.s64 %0, [%1];" : "=l"(x) : "l"(array + n));
    return x;
#else
    return __atomic_load_n(array + n, __ATOMIC_RELAXED);
#endif
}

/* A bound for a, where low <= high. */
FA_INLINE int64_t fa_clamp(int64_t a, int64_t low, int64_t high) { return a < low ? low : a > high ? high : a; }

/* A start within the rows there are. */
FA_INLINE int64_t fa_start(const fa_lengths *lengths, int64_t b) {
    return fa_clamp(fa_index(lengths->starts, b), 0, lengths->rows);
}

/* Rows of sequence b, of packed sequences with starts from `begin` to the start of the next one, which was read. */
FA_INLINE fa_span fa_rows_to(const fa_lengths *lengths, int64_t b, int64_t begin, int32_t next, bool packed) {
    fa_span span = {0, lengths->rows};
    if (lengths->starts) {
        const int64_t end = fa_clamp(next, 0, lengths->rows);
        span.begin = begin;
        span.end = end > begin ? end : begin;
    } else if (packed) { /* one row each */
        span.begin = b;
        span.end = b + 1;
    }
    return span;
}

/* Rows of sequence b. `before` is where the sequence before it ends, 0 for the first: starts that fall count as their
 * running maximum. */
FA_INLINE fa_span fa_rows_of(const fa_lengths *lengths, int64_t b, int64_t before, bool packed) {
    if (!lengths->starts) return fa_rows_to(lengths, b, 0, 0, packed);
    const int64_t begin = fa_start(lengths, b);
    return fa_rows_to(lengths, b, begin > before ? begin : before, fa_index(lengths->starts, b + 1), packed);
}

/* How many of `room` rows sequence b uses. */
FA_INLINE int64_t fa_used(const fa_lengths *lengths, int64_t b, int64_t room) {
    return lengths->used ? fa_clamp(fa_index(lengths->used, b), 0, room) : room;
}

/* The elements of the index arrays that belong to a sequence; any value stands for an absent array. */
typedef struct fa_words {
    int32_t used_q, used_k, key_begin, key_end;
    int32_t end_q, end_k; /* the starts of the next one */
} fa_words;
#define FA_SEQUENCE_WORDS 6

/* The array of word n, from the element of sequence 0 on; or NULL. */
FA_INLINE const int32_t *fa_words_from(const fa_sequences *s, int n) {
    if (n >= 4) {
        const int32_t *starts = n == 4 ? s->q.starts : s->k.starts;
        return starts ? starts + 1 : NULL;
    }
    return n == 0 ? s->q.used : n == 1 ? s->k.used : n == 2 ? s->begin : s->end;
}

/* How many of `room` rows the queries of a sequence may take. */
FA_INLINE int64_t fa_room_q(const fa_sequences *s, int64_t room) { return room < s->most_q ? room : s->most_q; }

/* Sequence b, whose rows are known, by the words that were read of it. */
FA_INLINE fa_entry fa_entry_by(const fa_sequences *s, const fa_words *words, int64_t b, fa_span rows_q,
                               fa_span rows_k) {
    const int64_t room_q = fa_room_q(s, rows_q.end - rows_q.begin), room_k = rows_k.end - rows_k.begin;
    fa_entry e;
    e.seq_q = s->q.used ? fa_clamp(words->used_q, 0, room_q) : room_q;
    e.seq_k = s->k.used ? fa_clamp(words->used_k, 0, room_k) : room_k;
    e.first_q = rows_q.begin;
    e.first_k = rows_k.begin;
    e.diagonal = s->top_left ? 0 : e.seq_k - e.seq_q;
    e.positions = s->positions ? s->positions + b * s->positions_stride + e.first_q : NULL;
    e.key_begin = s->begin ? fa_clamp(words->key_begin, 0, e.seq_k) : 0;
    e.key_end = s->end ? fa_clamp(words->key_end, 0, e.seq_k) : e.seq_k;
    return e;
}

/* Sequence b, whose rows are those of fa_rows_of(). */
FA_INLINE fa_entry fa_entry_of(const fa_sequences *s, int64_t b, fa_span rows_q, fa_span rows_k) {
    fa_words words = {0, 0, 0, 0, 0, 0};
    if (s->q.used) words.used_q = fa_index(s->q.used, b);
    if (s->k.used) words.used_k = fa_index(s->k.used, b);
    if (s->begin) words.key_begin = fa_index(s->begin, b);
    if (s->end) words.key_end = fa_index(s->end, b);
    return fa_entry_by(s, &words, b, rows_q, rows_k);
}

FA_INLINE int64_t fa_position(const fa_entry *e, int64_t query) {
    return e->positions ? (int64_t)fa_index(e->positions, query) : query + e->diagonal;
}

/* Keys that some query sees of those that stand from `first` to `last`: the union of their ranges, and what lies
 * between. */
FA_INLINE fa_span fa_tile_keys(const fa_entry *e, int64_t left, int64_t right, int64_t first, int64_t last) {
    const int64_t low = first - left, high = last + right + 1;
    const fa_span span = {low > e->key_begin ? low : e->key_begin, high < e->key_end ? high : e->key_end};
    return span;
}

/* Keys that a query at `position` sees: j with -left <= j - position <= right. */
FA_INLINE fa_span fa_row_keys(const fa_entry *e, int64_t left, int64_t right, int64_t position) {
    return fa_tile_keys(e, left, right, position, position);
}

/* Keys that every query sees of those that stand from `first` to `last`. */
FA_INLINE fa_span fa_common_keys(const fa_entry *e, int64_t left, int64_t right, int64_t first, int64_t last) {
    return fa_tile_keys(e, left, right, last, first);
}

/* Keys that some query of the entry sees, whose queries stand from `first` to `last`; {0, 0} when there is none. */
FA_INLINE fa_span fa_seen_keys(const fa_entry *e, int64_t left, int64_t right, int64_t first, int64_t last) {
    const fa_span seen = fa_tile_keys(e, left, right, first, last), none = {0, 0};
    return e->seq_q > 0 && seen.begin < seen.end ? seen : none;
}
FA_INLINE fa_span fa_entry_keys(const fa_entry *e, int64_t left, int64_t right) {
    int64_t first = e->diagonal, last = e->seq_q - 1 + e->diagonal;
    for (int64_t i = 0; e->positions && i < e->seq_q; i++) {
        const int64_t at = fa_position(e, i);
        if (i == 0 || at < first) first = at;
        if (i == 0 || at > last) last = at;
    }
    return fa_seen_keys(e, left, right, first, last);
}

/* The keys that an interval holds of those there are; its end lies `to_end` elements behind its begin. */
FA_INLINE fa_span fa_interval(const int32_t *begin, int64_t to_end, int64_t keys) {
    const fa_span span = {fa_clamp(fa_index(begin, 0), 0, keys), fa_clamp(fa_index(begin, to_end), 0, keys)};
    return span;
}

/* The entry of the table in row b and column `column`. */
FA_INLINE int32_t fa_page_entry(const fa_pages *pages, int64_t b, int64_t column) {
    return fa_index(pages->table, b * pages->stride + column);
}

/* The page that an entry of the table names; -1: none. */
FA_INLINE int64_t fa_page_of(const fa_pages *pages, int32_t entry) {
    return entry >= 0 && entry < pages->count ? entry : -1;
}

FA_INLINE int64_t fa_page(const fa_pages *pages, int64_t b, int64_t column) {
    return fa_page_of(pages, fa_page_entry(pages, b, column));
}

#endif
