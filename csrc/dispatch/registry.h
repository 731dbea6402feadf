/* The kernel table: ask a kernel, choose one for a problem, run a plan. */
#ifndef FA_REGISTRY_H
#define FA_REGISTRY_H

#include "fa.h"

/* Kernels of this build, of every operation, in order of preference; index from 0. NULL past the last. */
const fa_kernel *fa_kernel_at(int index);
/* NULL when no kernel of the operation has that name. */
const fa_kernel *fa_kernel_find(fa_op op, const char *name);

/* The answer of `kernel` to `problem` on a device such as `device`: `plan` is filled if it takes or declines, `why`
 * unless it takes. The one place where `device`, `dtypes`, `takes` and compute capabilities of a kernel are applied. */
fa_answer fa_kernel_ask(const fa_kernel *kernel, const fa_problem *problem, const fa_device_info *device, fa_plan *plan,
                        fa_why *why);

/* Chooses and plans. `forced` is NULL for the first kernel that takes the problem, or declines it if none takes it; one
 * that is forced and cannot is FA_EUNSUPPORTED with its reason. */
fa_code fa_plan_make(const fa_problem *problem, const fa_device_info *device, const fa_kernel *forced, fa_plan *plan,
                     fa_status *status);

/* Workspace and launch. The device is current; a problem without output elements is done at once. */
fa_code fa_plan_run(const fa_problem *problem, const fa_plan *plan, fa_context *context, const fa_device_info *device,
                    void *stream, fa_status *status);

/* Launch alone, with plan->workspace_bytes at `workspace`, 256-byte aligned; NULL when there are none. */
fa_code fa_plan_launch(const fa_problem *problem, const fa_plan *plan, fa_context *context,
                       const fa_device_info *device, void *stream, void *workspace, fa_status *status);

#endif
