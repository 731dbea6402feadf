/* The kernel table: choose a row for a problem, explain the choice, run it. */
#ifndef FA_REGISTRY_H
#define FA_REGISTRY_H

#include "fa.h"

/* Rows of this build in order of preference. */
int fa_kernel_count(void);
const fa_kernel *fa_kernel_at(int index);
/* NULL when no row has that name. */
const fa_kernel *fa_kernel_find(const char *name);

/* Why `row` does not take `problem`: NULL when it can. With `choosing`, also its reason to decline. A row of another
 * kind of device says so. */
const char *fa_kernel_refusal(const fa_kernel *row, const fa_problem *problem, const fa_device_info *device,
                              bool choosing);

/* Chooses and plans. `forced` is NULL for the first row that takes the problem; a row that is forced and rejects is
 * FA_EUNSUPPORTED with its reason. */
fa_code fa_plan_make(const fa_problem *problem, const fa_device_info *device, const fa_kernel *forced, fa_plan *plan,
                     fa_status *status);

/* Workspace and launch. The device is current; a problem without output elements is done at once. */
fa_code fa_plan_run(const fa_problem *problem, const fa_plan *plan, fa_context *context, const fa_device_info *device,
                    void *stream, fa_status *status);

#endif
