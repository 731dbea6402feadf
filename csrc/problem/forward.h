/* Request -> problem: ALL validation of shapes, strides, dtypes, devices and options. */
#ifndef FA_PROBLEM_FORWARD_H
#define FA_PROBLEM_FORWARD_H

#include "fa.h"

/* Validates `request` and fills `problem`. Absent outputs get the strides of a new C-contiguous array in the request's
 * layout and NULL data; fa_forward_set_outputs() supplies the memory later. Every failure names the argument, what was
 * given and what is accepted. */
fa_code fa_forward_build(const fa_request *request, fa_problem *problem, fa_status *status);

/* The part of it that concerns inputs and options; leaves out and lse absent. */
fa_code fa_forward_inputs(const fa_request *request, fa_problem *problem, fa_status *status);

/* The dropout that was asked for, of a call of these extents: with its heads, and within the bounds of its counters. */
fa_code fa_dropout_resolve(const fa_dropout *asked, int64_t heads, int64_t seq_q, int64_t seq_k, fa_dropout *dropout,
                           fa_status *status);

/* Shape of a new output in `layout`: (B, H, Sq, Dv) or (B, Sq, H, Dv), for packed q (T, H, Dv). Returns its axes. */
int fa_forward_out_shape(const fa_problem *problem, fa_layout layout, int64_t shape[4]);
/* Shape of a new LSE: (B, H, Sq), for packed q (H, T). Returns its axes. */
int fa_forward_lse_shape(const fa_problem *problem, int64_t shape[3]);

/* Validates workspace=, `bytes` of which the plan needs, and gives it to `problem`. */
fa_code fa_forward_workspace(const fa_request *request, size_t bytes, fa_problem *problem, fa_status *status);

/* Gives `problem` the memory of outputs allocated after fa_forward_build() (C-contiguous in the request's layout). */
void fa_forward_set_outputs(fa_forward *problem, void *out, void *lse);

#endif
