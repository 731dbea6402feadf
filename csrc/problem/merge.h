/* Request of merge() -> problem: its validation. */
#ifndef FA_PROBLEM_MERGE_H
#define FA_PROBLEM_MERGE_H

#include "fa.h"

typedef struct fa_merge_request {
    fa_request forward; /* its sinks, out, lse and layout, which is that of results of four axes */
    int count;
    const fa_view *const *outs, *const *lses; /* `count` of each */
} fa_merge_request;

/* Validates `request` and fills `problem` and the `request->count` parts that it then points to. Absent outputs get the
 * strides of a new C-contiguous array and NULL data. */
fa_code fa_merge_build(const fa_merge_request *request, fa_part *parts, fa_problem *problem, fa_status *status);

#endif
