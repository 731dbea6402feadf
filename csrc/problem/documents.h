/* Requests of documents() and document_intervals() -> problem: their validation. */
#ifndef FA_PROBLEM_DOCUMENTS_H
#define FA_PROBLEM_DOCUMENTS_H

#include "fa.h"

typedef struct fa_documents_request {
    fa_request forward; /* its out: the starts; NULL when the front end allocates them */
    const fa_view *ids;
    int64_t count; /* 0: by the extent of out, else as many as there are ids */
} fa_documents_request;

typedef struct fa_intervals_request {
    const fa_view *ids, *spans, *out; /* NULL when absent; ids or spans is there */
    int64_t window;                   /* 0: none */
    bool causal;
} fa_intervals_request;

/* Validates `request` and fills `problem`. An absent result gets the strides of a new array and NULL data. */
fa_code fa_document_intervals_build(const fa_intervals_request *request, fa_problem *problem, fa_status *status);

/* Validates `request` and fills `problem`. Absent starts get the stride of a new array and NULL data. */
fa_code fa_documents_build(const fa_documents_request *request, fa_problem *problem, fa_status *status);

#endif
