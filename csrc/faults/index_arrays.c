/* check=: the contents of index arrays. See index_arrays.h. */
#include "faults/index_arrays.h"

#include <stdlib.h>

#include "device/device.h"
#include "documents.h"
#include "tokens.h"

enum { ARRAYS = 9 };

/* Elements [low, high) from the pointer that an array has in the problem, which may lie before and after it. */
typedef struct piece {
    const void **place; /* that pointer */
    int64_t low, high;
    size_t item;
} piece;

bool fa_contents_given(const fa_problem *problem) {
    return problem->op == FA_APPEND || problem->op == FA_DOCUMENTS ||
           (problem->op != FA_MERGE && problem->sequences.given);
}

/* Adds those in the lengths and starts of sequence b, whose rows fa_rows_of() has, `most` of them at most for use;
 * `index` as in fa_fault. */
static void length_faults(const fa_lengths *lengths, int64_t b, fa_span rows, int64_t most, int64_t index,
                          fa_faults *faults) {
    for (int64_t n = b == 0 ? 0 : b + 1; lengths->starts && n <= b + 1; n++) {
        const int64_t start = fa_index(lengths->starts, n);
        if (start != (n == b + 1 ? rows.end : rows.begin)) fa_fault_add(faults, FA_FAULT_cu_seqlens, n, index, start);
    }
    const int64_t room = rows.end - rows.begin, used = lengths->used ? fa_index(lengths->used, b) : room;
    if (used < 0 || used > room || used > most) fa_fault_add(faults, FA_FAULT_length, b, index, used);
}

/* Reads lengths, starts, and the entries of the table for keys that a query may see. */
static void attention_faults(const fa_problem *problem, fa_faults *faults) {
    const fa_forward *p = &problem->forward;
    const fa_sequences *s = &problem->sequences;
    const fa_pages *pages = &s->pages;
    int64_t end_q = 0, end_k = 0;
    for (int64_t b = 0; b < p->batch && s->given; b++) {
        const fa_span q = fa_rows_of(&s->q, b, end_q, s->packed_q), k = fa_rows_of(&s->k, b, end_k, s->packed_k);
        end_q = q.end, end_k = k.end;
        length_faults(&s->q, b, q, s->most_q, 0, faults);
        length_faults(&s->k, b, k, FA_UNBOUNDED, 1, faults);
        if (!pages->table) continue;
        const fa_entry entry = fa_entry_of(s, b, q, k);
        const fa_span seen = fa_entry_keys(&entry, p->left, p->right);
        for (int64_t column = seen.begin / pages->size; column * pages->size < seen.end; column++) {
            const int32_t entry = fa_page_entry(pages, b, column);
            if (fa_page_of(pages, entry) < 0) fa_fault_add(faults, FA_FAULT_page, b, column, entry);
        }
    }
}

static void append_faults(const fa_problem *problem, fa_faults *faults) {
    const fa_append *p = &problem->append;
    const fa_sequences *s = &problem->sequences;
    for (int64_t t = 0; t < p->slots.count && p->slots.data; t++) {
        const fa_token token = fa_token_of_slot(&p->slots, s, t);
        if (token.fault != FA_FAULT_COUNT) fa_fault_add(faults, token.fault, -1, token.index, token.value);
    }
    int64_t before = 0;
    for (int64_t b = 0; b < p->batch && !p->slots.data; b++) {
        const fa_span rows = fa_rows_of(&s->q, b, before, s->packed_q);
        const int64_t count = fa_used(&s->q, b, rows.end - rows.begin);
        int64_t column = -1; /* the last whose page was bad */
        length_faults(&s->q, b, rows, s->most_q, 0, faults);
        for (int64_t t = 0; t < count; t++) {
            const fa_token token = fa_token_of_sequence(&p->slots, s, b, rows.begin, count, t);
            if (token.fault == FA_FAULT_COUNT || (token.fault == FA_FAULT_page && token.index == column)) continue;
            if (token.fault == FA_FAULT_page) column = token.index;
            fa_fault_add(faults, token.fault, b, token.index, token.value);
        }
        before = rows.end;
    }
}

static void documents_faults(const fa_problem *problem, fa_faults *faults) {
    const fa_documents *p = &problem->documents;
    int64_t found = 0;
    for (int64_t b = 0; b < p->batch; b++)
        for (int64_t n = 0; n < p->seq; n++) found += fa_document_begins(p, b, n);
    if (found > p->count) fa_fault_add(faults, FA_FAULT_documents, -1, p->count, found);
}

void fa_contents_faults(const fa_problem *problem, fa_faults *faults) {
    if (problem->op == FA_APPEND)
        append_faults(problem, faults);
    else if (problem->op == FA_DOCUMENTS)
        documents_faults(problem, faults);
    else
        attention_faults(problem, faults);
}

static void add(piece *pieces, int *count, const void *place, int64_t rows, int64_t stride, int64_t columns,
                size_t item) {
    const void **pointer = (const void **)(uintptr_t)place;
    if (!*pointer || rows <= 0 || columns <= 0) return;
    const int64_t last = (rows - 1) * stride;
    pieces[(*count)++] = (piece){pointer, last < 0 ? last : 0, (last > 0 ? last : 0) + columns, item};
}

/* Ids of any strides. */
static int collect_ids(fa_documents *p, piece *ids) {
    const int64_t last[2] = {(p->batch - 1) * p->ids.stride[0], (p->seq - 1) * p->ids.stride[1]};
    *ids = (piece){(const void **)(uintptr_t)&p->ids.data, 0, 1, p->dtype == FA_I64 ? 8 : 4};
    if (p->batch < 1 || p->seq < 1) return 0;
    for (int axis = 0; axis < 2; axis++) *(last[axis] < 0 ? &ids->low : &ids->high) += last[axis];
    return 1;
}

/* The arrays of a problem, which is a copy: its pointers will be others. */
static int collect(fa_problem *problem, piece pieces[ARRAYS]) {
    if (problem->op == FA_DOCUMENTS) return collect_ids(&problem->documents, pieces);
    const bool append = problem->op == FA_APPEND;
    fa_sequences *s = &problem->sequences;
    const int64_t batch = append ? problem->append.batch : problem->forward.batch;
    const int64_t queries = append ? problem->append.rows : problem->forward.seq_q;
    int count = 0;
    add(pieces, &count, &s->q.starts, 1, 0, batch + 1, 4);
    add(pieces, &count, &s->q.used, 1, 0, batch, 4);
    add(pieces, &count, &s->k.starts, 1, 0, batch + 1, 4);
    add(pieces, &count, &s->k.used, 1, 0, batch, 4);
    add(pieces, &count, &s->begin, 1, 0, batch, 4);
    add(pieces, &count, &s->end, 1, 0, batch, 4);
    add(pieces, &count, &s->positions, s->packed_q || !s->given ? 1 : batch, s->positions_stride, queries, 4);
    add(pieces, &count, &s->pages.table, batch, s->pages.stride, s->pages.width, 4);
    if (append)
        add(pieces, &count, &problem->append.slots.data, 1, 0, problem->append.slots.count,
            problem->append.slots.dtype == FA_I64 ? 8 : 4);
    return count;
}

fa_code fa_contents_fetch(const fa_problem *problem, void *stream, fa_faults *faults, fa_status *status) {
    fa_problem here = *problem;
    piece pieces[ARRAYS];
    const int count = collect(&here, pieces);
    size_t bytes = 0;
    for (int n = 0; n < count; n++) bytes += ((size_t)(pieces[n].high - pieces[n].low) * pieces[n].item + 7) / 8 * 8;
    char *memory = malloc(bytes ? bytes : 1), *at = memory;
    if (!memory) return fa_fail(status, FA_EMEMORY, "out of memory: check=True copies %zu bytes", bytes);
    fa_code code = FA_OK;
    for (int n = 0; n < count && code == FA_OK; n++) {
        const piece *p = &pieces[n];
        const size_t size = (size_t)(p->high - p->low) * p->item;
        const char *from = (const char *)*p->place + p->low * (int64_t)p->item;
        code = fa_memory_copy(at, from, size, stream, status);
        *p->place = at - p->low * (int64_t)p->item;
        at += (size + 7) / 8 * 8;
    }
    if (code == FA_OK) fa_contents_faults(&here, faults);
    free(memory);
    return code;
}
