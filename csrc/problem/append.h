/* Request of append() -> problem: its validation. */
#ifndef FA_PROBLEM_APPEND_H
#define FA_PROBLEM_APPEND_H

#include "problem/sequences.h"

/* `forward` has the arrays and the layout; k, v and q are the new tokens. */
typedef struct fa_append_request {
    fa_request forward;
    bool interleaved;
} fa_append_request;

/* Validates `request` and fills `problem`. An absent out gets the strides of a new C-contiguous array like q, and NULL
 * data.
 */
fa_code fa_append_build(const fa_append_request *request, fa_problem *problem, fa_status *status);

#endif
