/* Request of attention_backward() -> problem: its validation. */
#ifndef FA_PROBLEM_BACKWARD_H
#define FA_PROBLEM_BACKWARD_H

#include "fa.h"

typedef struct fa_backward_request {
    fa_request forward;                 /* its out and lse are inputs and given */
    const fa_view *grad[FA_GRAD_COUNT]; /* NULL when the front end allocates them, or not wanted */
    uint32_t wants;                     /* 1 << fa_grad */
    bool accumulate, deterministic;
} fa_backward_request;

/* "q", ..., "sinks" */
const char *fa_grad_name(fa_grad grad);
/* The name of an array of grads= in messages: grads["q"], ... */
const char *fa_grads_item(fa_grad grad);
/* The array that a gradient is of; NULL when absent. */
const fa_view *fa_grad_subject(const fa_request *request, fa_grad grad);

/* Validates `request` and fills `problem`. Wanted gradients that are not given get the strides of a new C-contiguous
 * array and NULL data. */
fa_code fa_backward_build(const fa_backward_request *request, fa_problem *problem, fa_status *status);

#endif
