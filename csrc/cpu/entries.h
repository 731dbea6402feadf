/* The batch entries of a call on the CPU, one after another: a dense call's from its problem, sequences from their
 * arrays. */
#ifndef FA_CPU_ENTRIES_H
#define FA_CPU_ENTRIES_H

#include "fa.h"

/* An entry and the rows of q, and of k and v, that are to be written along with it: those of its queries and keys, and
 * around them rows that belong to no sequence. */
typedef struct fa_cpu_entry {
    fa_entry entry;
    fa_span rows, key_rows;
    int64_t batch; /* of operands that have a batch axis */
} fa_cpu_entry;

/* Where the entry before ends. */
typedef struct fa_cpu_walk {
    int64_t q, k;
} fa_cpu_walk;

/* Any entry of a dense call, or the one of a sequence that was made a problem of its own, which may have positions. */
static inline fa_entry fa_cpu_dense(const fa_problem *problem) {
    const fa_forward *p = &problem->forward;
    return (fa_entry){.seq_q = p->seq_q,
                      .seq_k = p->seq_k,
                      .diagonal = p->diagonal,
                      .positions = problem->sequences.positions,
                      .key_begin = p->key_begin,
                      .key_end = p->key_end};
}

/* How many entries there are: after packed queries, or keys, comes one without any, for the rows that are left. */
static inline int64_t fa_cpu_entries(const fa_problem *problem) {
    return problem->forward.batch + (problem->sequences.packed_q || problem->sequences.packed_k);
}

/* Entry b; the walk is zeroed before the first. */
static inline fa_cpu_entry fa_cpu_next(const fa_problem *problem, int64_t b, fa_cpu_walk *walk) {
    const fa_forward *p = &problem->forward;
    const fa_sequences *s = &problem->sequences;
    fa_cpu_entry next = {.rows = {0, p->seq_q}, .key_rows = {0, p->seq_k}, .batch = b};
    if (!s->given) {
        next.entry = fa_cpu_dense(problem);
        return next;
    }
    if (b == p->batch) { /* of storage that is not packed nothing is left */
        next.rows.begin = s->packed_q ? walk->q : next.rows.end;
        next.key_rows.begin = s->packed_k ? walk->k : next.key_rows.end;
        return next;
    }
    const fa_span q = fa_rows_of(&s->q, b, walk->q, s->packed_q), k = fa_rows_of(&s->k, b, walk->k, s->packed_k);
    next.entry = fa_entry_of(s, b, q, k);
    if (s->packed_q) next.rows = (fa_span){walk->q, q.end};
    if (s->packed_k) next.key_rows = (fa_span){walk->k, k.end};
    walk->q = q.end, walk->k = k.end;
    return next;
}

/* Pairs of a query and a key that an entry's heads see, if all queries saw as many as the one in the middle. */
static inline double fa_cpu_pairs(const fa_forward *p, const fa_entry *e) {
    if (e->seq_q <= 0) return 0;
    const fa_span keys = fa_row_keys(e, p->left, p->right, fa_position(e, e->seq_q / 2));
    return keys.end > keys.begin ? (double)p->heads * (double)e->seq_q * (double)(keys.end - keys.begin) : 0;
}

/* An entry whose tasks begin with number `first`. */
typedef struct fa_cpu_queued {
    fa_cpu_entry entry;
    double work; /* multiplications */
    int64_t first;
} fa_cpu_queued;

/* Bytes of a queue of all entries; a multiple of 256. */
static inline size_t fa_cpu_queue_bytes(const fa_problem *problem) {
    return ((size_t)fa_cpu_entries(problem) * sizeof(fa_cpu_queued) + 255) / 256 * 256;
}

/* The last of the entries whose tasks begin at `index` or before: it has that task. */
static inline const fa_cpu_queued *fa_cpu_owner(const fa_cpu_queued *queue, int64_t entries, int64_t index) {
    int64_t low = 0, high = entries;
    while (high - low > 1) {
        const int64_t middle = low + (high - low) / 2;
        if (queue[middle].first <= index)
            low = middle;
        else
            high = middle;
    }
    return &queue[low];
}

/* Elements from the data of an operand to one of its own. */
static inline int64_t fa_at(const fa_operand *x, int64_t b, int64_t h, int64_t i, int64_t j) {
    return b * x->stride[0] + h * x->stride[1] + i * x->stride[2] + j * x->stride[3];
}

/* Whether a query and a key of batch entry b have one id, or there are none. */
static inline bool fa_same_segment(const fa_forward *p, int64_t b, int64_t query, int64_t key) {
    if (!p->q_segments.data) return true;
    return fa_index(p->q_segments.data, b * p->q_segments.stride[0] + query) ==
           fa_index(p->k_segments.data, b * p->k_segments.stride[0] + key);
}

/* Where a key lies in k and v: which batch entry or page, -1 where it has no page, and which row there. */
typedef struct fa_cpu_place {
    int64_t first, row;
} fa_cpu_place;

/* The place of key `key` of an entry at this moment: the table may change before the next look. */
static inline fa_cpu_place fa_cpu_find(const fa_problem *problem, const fa_cpu_entry *e, int64_t key) {
    const fa_pages *pages = &problem->sequences.pages;
    if (!pages->table) return (fa_cpu_place){e->batch, e->entry.first_k + key};
    return (fa_cpu_place){fa_page(pages, e->batch, key / pages->size), key % pages->size};
}

#endif
