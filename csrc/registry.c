/* The kernel table. See registry.h. */
#include "registry.h"

#include <stdio.h>
#include <string.h>

#include "device.h"

#define FA_JOIN_(a, b) a##b
#define FA_JOIN(a, b)  FA_JOIN_(a, b)
#define FA_ROW_0(row)
#define FA_ROW(name)  FA_JOIN(FA_ROW_, FA_JOIN(FA_HAVE_, name))(fa_row_##name)

#define FA_ROW_1(row) extern const fa_kernel row;
#include "kernels.def"
#undef FA_ROW_1

#define FA_ROW_1(row) &row,
static const fa_kernel *const rows[] = {
#include "kernels.def"
    NULL, /* a build may hold no row at all */
};

int fa_kernel_count(void) { return (int)(sizeof rows / sizeof *rows) - 1; }

const fa_kernel *fa_kernel_at(int index) { return rows[index]; }

const fa_kernel *fa_kernel_find(const char *name) {
    for (int n = 0; n < fa_kernel_count(); n++)
        if (strcmp(rows[n]->name, name) == 0) return rows[n];
    return NULL;
}

const char *fa_kernel_refusal(const fa_kernel *row, const fa_problem *problem, const fa_device_info *device,
                              bool choosing) {
    if (row->device != problem->device.kind)
        return row->device == FA_CPU ? "runs on the CPU, the arrays are on a CUDA device"
                                     : "runs on a CUDA device, the arrays are on the CPU";
    const char *reason = row->rejects(problem, device);
    if (!reason && choosing && row->declines) reason = row->declines(problem, device);
    return reason;
}

/* "no kernel takes this call: simt: needs ...; minimal: ..." */
static fa_code fail_unsupported(const fa_problem *problem, const fa_device_info *device, fa_status *status) {
    char reasons[1800] = "";
    size_t used = 0;
    for (int n = 0; n < fa_kernel_count() && used < sizeof reasons; n++)
        if (rows[n]->device == problem->device.kind)
            used += (size_t)snprintf(reasons + used, sizeof reasons - used, "%s%s: %s", used ? "; " : "", rows[n]->name,
                                     fa_kernel_refusal(rows[n], problem, device, false));
    if (!used)
        return fa_fail(status, FA_EUNSUPPORTED, "this build has no kernel for arrays on %s",
                       problem->device.kind == FA_CPU ? "the CPU" : "a CUDA device (it was built without CUDA)");
    return fa_fail(status, FA_EUNSUPPORTED, "no kernel takes this call: %s", reasons);
}

static const fa_kernel *choose(const fa_problem *problem, const fa_device_info *device) {
    for (int choosing = 1; choosing >= 0; choosing--) /* a row that only declined beats none */
        for (int n = 0; n < fa_kernel_count(); n++)
            if (!fa_kernel_refusal(rows[n], problem, device, choosing)) return rows[n];
    return NULL;
}

fa_code fa_plan_make(const fa_problem *problem, const fa_device_info *device, const fa_kernel *forced, fa_plan *plan,
                     fa_status *status) {
    const fa_kernel *row = forced;
    if (forced) {
        const char *reason = fa_kernel_refusal(forced, problem, device, false);
        if (reason)
            return fa_fail(status, FA_EUNSUPPORTED, "kernel \"%s\" cannot take this call: %s", forced->name, reason);
    } else {
        row = choose(problem, device);
        if (!row) return fail_unsupported(problem, device, status);
    }
    memset(plan, 0, sizeof *plan);
    plan->splits = 1;
    FA_TRY(row->plan(problem, device, plan, status));
    plan->kernel = row;
    return FA_OK;
}

fa_code fa_plan_run(const fa_problem *problem, const fa_plan *plan, fa_context *context, const fa_device_info *device,
                    void *stream, fa_status *status) {
    if (problem->batch == 0 || problem->heads == 0 || problem->seq_q == 0) return FA_OK;
    fa_launch launch = {.context = context, .device = device, .stream = stream};
    if (plan->workspace_bytes)
        FA_TRY(fa_memory_alloc(context, device->device, plan->workspace_bytes, stream, &launch.workspace, status));
    fa_code code = plan->kernel->launch(problem, plan, &launch, status);
    if (launch.workspace) {
        fa_status ignored;
        fa_code freed = fa_memory_free(device->device, launch.workspace, stream, code == FA_OK ? status : &ignored);
        if (code == FA_OK) code = freed;
    }
    return code;
}
