/* Faults of a context. See counters.h. */
#include "faults/counters.h"

#include <stdlib.h>
#include <string.h>

#include "device/device.h"
#include "faults/index_arrays.h"

/* Those of the CPU, under the context's lock; NULL: out of memory. */
static fa_faults *of_cpu(fa_context *context) {
    static const char key;
    void **slot = fa_context_slot(context, &key, free);
    if (slot && !*slot) *slot = calloc(1, sizeof(fa_faults));
    return slot ? *slot : NULL;
}

static void add(fa_faults *total, const fa_faults *met) {
    for (int kind = 0; kind < FA_FAULT_COUNT; kind++) {
        const int64_t before = total->of[kind].count;
        if (!met->of[kind].count) continue;
        if (!before) total->of[kind] = met->of[kind];
        total->of[kind].count = before + met->of[kind].count;
    }
}

fa_code fa_faults_meet(fa_context *context, const fa_problem *problem, bool checks, fa_status *status) {
    fa_faults met = {0};
    if (problem->device.kind != FA_CPU || !fa_contents_given(problem)) return FA_OK;
    fa_contents_faults(problem, &met);
    if (checks) return fa_faults_check(&met, status);
    fa_context_lock(context);
    fa_faults *total = of_cpu(context);
    if (total) add(total, &met);
    fa_context_unlock(context);
    return total ? FA_OK : fa_fail(status, FA_EMEMORY, "out of memory");
}

fa_code fa_faults_look(const fa_problem *problem, void *stream, fa_status *status) {
    fa_faults met = {0};
    FA_TRY(fa_contents_fetch(problem, stream, &met, status));
    return fa_faults_check(&met, status);
}

fa_code fa_faults_take(fa_context *context, fa_device device, bool clear, fa_faults *found, fa_status *status) {
    const fa_device_info *info;
    memset(found, 0, sizeof *found);
    if (device.kind == FA_CUDA) {
        FA_TRY(fa_device_info_get(context, device, &info, status));
        fa_fault_board_read(context, info->device, clear, found);
        return FA_OK;
    }
    fa_context_lock(context);
    fa_faults *total = of_cpu(context);
    if (total) *found = *total;
    if (total && clear) memset(total, 0, sizeof *total);
    fa_context_unlock(context);
    return total ? FA_OK : fa_fail(status, FA_EMEMORY, "out of memory");
}
