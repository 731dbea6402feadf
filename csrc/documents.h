/* Where documents begin, and what their tokens see. C11, C++20 and device code; ids may be anything. */
#ifndef FA_DOCUMENTS_H
#define FA_DOCUMENTS_H

#include "fa.h"

/* Id `n` of a row, 64 bits wide. */
FA_INLINE int64_t fa_id_at(const fa_operand *ids, fa_dtype dtype, int64_t row, int64_t n) {
    const int64_t at = row * ids->stride[0] + n * ids->stride[1];
    return dtype == FA_I64 ? fa_index_64((const int64_t *)ids->data, at) : fa_index((const int32_t *)ids->data, at);
}

/* Whether a run of equal ids begins at id `n` of a row; one run is all of a row without ids. */
FA_INLINE bool fa_run_begins(const fa_operand *ids, fa_dtype dtype, int64_t row, int64_t n) {
    if (n == 0) return true;
    return ids->data && fa_id_at(ids, dtype, row, n) != fa_id_at(ids, dtype, row, n - 1);
}

/* Whether a document begins at id `n` of a row: a document is a maximal run of equal ids in a row. */
FA_INLINE bool fa_document_begins(const fa_documents *documents, int64_t row, int64_t n) {
    return fa_run_begins(&documents->ids, documents->dtype, row, n);
}

/* Whether token n is in a span: those are maximal runs of one positive number. */
FA_INLINE bool fa_in_span(const fa_operand *spans, fa_dtype dtype, int64_t row, int64_t n) {
    return spans->data && fa_id_at(spans, dtype, row, n) > 0;
}

/* The first key that token n sees, whose document begins at `start`. */
FA_INLINE int64_t fa_seen_begin(int64_t window, int64_t n, int64_t start) {
    return window && n - window + 1 > start ? n - window + 1 : start;
}

/* The end of the keys that token n sees: its document ends at `end`, and its span, where it is in one, at `of_span`. */
FA_INLINE int64_t fa_seen_end(bool causal, int64_t n, int64_t end, int64_t of_span, bool in_span) {
    if (!causal) return end;
    const int64_t span = !in_span ? 0 : of_span < end ? of_span : end;
    return span > n + 1 ? span : n + 1;
}

#endif
