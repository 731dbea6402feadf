/* check=: the contents of the index arrays of a call, wherever they lie. */
#ifndef FA_INDEX_ARRAYS_H
#define FA_INDEX_ARRAYS_H

#include "faults/faults.h"

/* Whether a problem has index arrays. */
bool fa_contents_given(const fa_problem *problem);

/* Adds the faults of a problem on the CPU to `faults`. */
void fa_contents_faults(const fa_problem *problem, fa_faults *faults);

/* The same of a problem on the current device: copies the arrays to the host, after the work on `stream`, and waits. */
fa_code fa_contents_fetch(const fa_problem *problem, void *stream, fa_faults *faults, fa_status *status);

#endif
