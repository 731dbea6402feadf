/* Request of append() -> problem: its validation, and what bad contents of its index arrays are found on the CPU. */
#ifndef FA_PROBLEM_APPEND_H
#define FA_PROBLEM_APPEND_H

#include "problem/sequences.h"

/* `forward` has what append() shares with attention(): k, v and q, here the new tokens, out, the indices and the
 * layout. */
typedef struct fa_append_request {
    fa_request forward;
    const fa_view *k_cache, *v_cache; /* v NULL when absent, as is forward.v then */
    const fa_view *slots;
    const fa_view *cos, *sin;
    bool interleaved;
} fa_append_request;

/* Validates `request` and fills `problem`. An absent out gets the strides of a new C-contiguous array like q, and NULL
 * data.
 */
fa_code fa_append_build(const fa_append_request *request, fa_problem *problem, fa_status *status);

/* Adds what is bad in an append problem on the CPU. */
void fa_append_faults(const fa_problem *problem, fa_faults *faults);

#endif
