/* check=: the contents of index arrays. See index_arrays.h. */
#include "faults/index_arrays.h"

#include <stdlib.h>

#include "device/device.h"
#include "problem/append.h"
#include "problem/sequences.h"

enum { ARRAYS = 9 };

/* Elements [low, high) from the pointer that an array has in the problem, which may lie before and after it. */
typedef struct piece {
    const void **place; /* that pointer */
    int64_t low, high;
    size_t item;
} piece;

bool fa_contents_given(const fa_problem *problem) {
    return problem->op == FA_APPEND || (problem->op == FA_FORWARD && problem->sequences.given);
}

void fa_contents_faults(const fa_problem *problem, fa_faults *faults) {
    if (problem->op == FA_APPEND)
        fa_append_faults(problem, faults);
    else
        fa_forward_faults(problem, faults);
}

static void add(piece *pieces, int *count, const void *place, int64_t rows, int64_t stride, int64_t columns,
                size_t item) {
    const void **pointer = (const void **)(uintptr_t)place;
    if (!*pointer || rows <= 0 || columns <= 0) return;
    const int64_t last = (rows - 1) * stride;
    pieces[(*count)++] = (piece){pointer, last < 0 ? last : 0, (last > 0 ? last : 0) + columns, item};
}

/* The arrays of a problem, which is a copy: its pointers will be others. */
static int collect(fa_problem *problem, piece pieces[ARRAYS]) {
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
