/* The part of a problem that says what its sequences are: validation of what the host can see. */
#ifndef FA_PROBLEM_SEQUENCES_H
#define FA_PROBLEM_SEQUENCES_H

#include "fa.h"

/* Whether a request says more than dense arrays do. */
bool fa_sequences_given(const fa_request *request);

/* Refuses arguments that contradict each other, or the axes of q, k and v. */
fa_code fa_sequences_check(const fa_request *request, fa_status *status);

/* Validates what else concerns sequences and fills problem->sequences, and of its forward batch and seq_k. q, k and v
 * have been held against each other. */
fa_code fa_sequences_build(const fa_request *request, fa_problem *problem, fa_status *status);

/* FA_WITH_... of them. */
uint32_t fa_sequences_features(const fa_sequences *sequences);

#endif
