/* The batch entries of a call on the CPU, one after another: a dense call's from its problem, sequences from their
 * arrays. */
#ifndef FA_CPU_ENTRIES_H
#define FA_CPU_ENTRIES_H

#include "fa.h"

/* An entry and the rows of out and lse that are to be written along with it: those of its queries, and around them rows
 * that belong to no sequence. */
typedef struct fa_cpu_entry {
    fa_entry entry;
    fa_span rows;
    int64_t batch; /* of operands that have a batch axis */
} fa_cpu_entry;

/* Where the entry before ends. */
typedef struct fa_cpu_walk {
    int64_t q, k;
} fa_cpu_walk;

/* Any entry of a dense call. */
static inline fa_entry fa_cpu_dense(const fa_forward *p) {
    return (fa_entry){.seq_q = p->seq_q,
                      .seq_k = p->seq_k,
                      .diagonal = p->diagonal,
                      .key_begin = p->key_begin,
                      .key_end = p->key_end};
}

/* How many entries there are: after packed queries comes one without any, for the rows that are left. */
static inline int64_t fa_cpu_entries(const fa_problem *problem) {
    return problem->forward.batch + problem->sequences.packed_q;
}

/* Entry b; the walk is zeroed before the first. */
static inline fa_cpu_entry fa_cpu_next(const fa_problem *problem, int64_t b, fa_cpu_walk *walk) {
    const fa_forward *p = &problem->forward;
    const fa_sequences *s = &problem->sequences;
    fa_cpu_entry next = {.rows = {0, p->seq_q}, .batch = b};
    if (!s->given) {
        next.entry = fa_cpu_dense(p);
        return next;
    }
    if (b == p->batch) {
        next.rows.begin = walk->q;
        return next;
    }
    const fa_span q = fa_rows_of(&s->q, b, walk->q, s->packed_q), k = fa_rows_of(&s->k, b, walk->k, s->packed_k);
    next.entry = fa_entry_of(s, b, q, k);
    if (s->packed_q) next.rows = (fa_span){walk->q, q.end};
    walk->q = q.end, walk->k = k.end;
    return next;
}

/* Elements from the data of an operand to one of its own. */
static inline int64_t fa_at(const fa_operand *x, int64_t b, int64_t h, int64_t i, int64_t j) {
    return b * x->stride[0] + h * x->stride[1] + i * x->stride[2] + j * x->stride[3];
}

/* Elements from k's or v's data to key `key` of an entry and a head; the key's page is one. */
static inline int64_t fa_cpu_key_offset(const fa_problem *problem, const fa_operand *operand, const fa_cpu_entry *e,
                                        int64_t head, int64_t key) {
    const fa_pages *pages = &problem->sequences.pages;
    const int64_t *s = operand->stride;
    if (!pages->table) return e->batch * s[0] + head * s[1] + (e->entry.first_k + key) * s[2];
    return fa_page(pages, e->batch, key / pages->size) * s[0] + head * s[1] + key % pages->size * s[2];
}

/* Whether a key has no page. */
static inline bool fa_cpu_hidden(const fa_problem *problem, const fa_cpu_entry *e, int64_t key) {
    const fa_pages *pages = &problem->sequences.pages;
    return pages->table && fa_page(pages, e->batch, key / pages->size) < 0;
}

#endif
