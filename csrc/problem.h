/* Request -> problem: ALL validation of shapes, strides, dtypes, devices and options. */
#ifndef FA_PROBLEM_H
#define FA_PROBLEM_H

#include "fa.h"

/* Validates `request` and fills `problem`. Absent outputs get the strides of a new C-contiguous array in the request's
 * layout and NULL data; fa_forward_set_outputs() supplies the memory later. Every failure names the argument, what was
 * given and what is accepted. */
fa_code fa_forward_build(const fa_request *request, fa_problem *problem, fa_status *status);

/* The part of it that concerns inputs and options; leaves out and lse absent. */
fa_code fa_forward_inputs(const fa_request *request, fa_problem *problem, fa_status *status);

/* Refuses an output that meets an input of attention(). */
fa_code fa_forward_apart(const char *name, const fa_view *view, const fa_request *request, fa_status *status);

/* Shape of a new output in `layout`: (B, H, Sq, Dv) or (B, Sq, H, Dv). */
void fa_forward_out_shape(const fa_forward *problem, fa_layout layout, int64_t shape[4]);

/* Gives `problem` the memory of outputs allocated after fa_forward_build() (C-contiguous in the request's layout). */
void fa_forward_set_outputs(fa_forward *problem, void *out, void *lse);

#endif
