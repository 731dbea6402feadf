/* Where documents begin. C11, C++20 and device code; ids may be anything. */
#ifndef FA_DOCUMENTS_H
#define FA_DOCUMENTS_H

#include "fa.h"

/* Id `n` of a row, 64 bits wide. */
FA_INLINE int64_t fa_document_id(const fa_documents *documents, int64_t row, int64_t n) {
    const int64_t at = row * documents->ids.stride[0] + n * documents->ids.stride[1];
    return documents->dtype == FA_I64 ? fa_index_64((const int64_t *)documents->ids.data, at)
                                      : fa_index((const int32_t *)documents->ids.data, at);
}

/* Whether a document begins at id `n` of a row: a document is a maximal run of equal ids in a row. */
FA_INLINE bool fa_document_begins(const fa_documents *documents, int64_t row, int64_t n) {
    return n == 0 || fa_document_id(documents, row, n) != fa_document_id(documents, row, n - 1);
}

#endif
