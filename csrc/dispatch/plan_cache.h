/* Request -> problem and plan: validation, choice of a kernel and its plan, kept for calls of the thread that differ in
 * pointers alone. */
#ifndef FA_PLAN_CACHE_H
#define FA_PLAN_CACHE_H

#include "device/device.h"
#include "fa.h"
#include "problem/append.h"
#include "problem/backward.h"

/* As fa_forward_build(), fa_device_info_get() and fa_plan_make() one after another. `forced` as there. */
fa_code fa_dispatch(fa_context *context, const fa_request *request, const fa_kernel *forced, fa_problem *problem,
                    const fa_device_info **info, fa_plan *plan, fa_status *status);
/* As fa_backward_build() and the others. */
fa_code fa_dispatch_backward(fa_context *context, const fa_backward_request *request, const fa_kernel *forced,
                             fa_problem *problem, const fa_device_info **info, fa_plan *plan, fa_status *status);
/* As fa_append_build() and the others. */
fa_code fa_dispatch_append(fa_context *context, const fa_append_request *request, const fa_kernel *forced,
                           fa_problem *problem, const fa_device_info **info, fa_plan *plan, fa_status *status);

#endif
