/* check= and faults(): bad contents of index arrays that calls meet. Kernels on the CPU leave the counting to the front
 * end.
 */
#include "core.h"

#include <string.h>

fa_code fa_read_check(const fa_bound *bound, int *check, fa_status *status) {
    PyObject *given = fa_given(bound, FA_ARG_check);
    bool truth = false;
    if (given) FA_TRY(fa_read_boolean("check", given, &truth, status));
    *check = given ? truth : -1;
    return FA_OK;
}

void fa_faults_count(fa_state *state, const fa_faults *faults) {
    pthread_mutex_lock(&state->lock);
    for (int kind = 0; kind < FA_FAULT_COUNT; kind++) {
        const fa_fault *met = &faults->of[kind];
        fa_fault *total = &state->cpu_faults.of[kind];
        if (!met->count) continue;
        const int64_t before = total->count;
        if (!before) *total = *met;
        total->count = before + met->count;
    }
    pthread_mutex_unlock(&state->lock);
}

static PyObject *listed(const fa_faults *faults) {
    PyObject *list = PyList_New(0);
    for (int kind = 0; list && kind < FA_FAULT_COUNT; kind++) {
        const fa_fault *f = &faults->of[kind];
        if (!f->count) continue;
        PyObject *item = Py_BuildValue("(sLLLL)", fa_fault_name((fa_fault_kind)kind), (long long)f->count,
                                       (long long)f->sequence, (long long)f->index, (long long)f->value);
        if (!item || PyList_Append(list, item) < 0) Py_CLEAR(list);
        Py_XDECREF(item);
    }
    return list;
}

/* Kernels on a device count none: each of them refuses what has index arrays. */
static fa_code check_ordinal(fa_state *state, PyObject *device, fa_status *status) {
    const fa_device_info *info;
    long index = 0;
    if (device)
        FA_TRY(fa_read_index("device", device, 0, 4095, "None, or the index of a CUDA device, from 0", &index, status));
    return fa_device_info_get(state->context, (fa_device){FA_CUDA, (int)index}, &info, status);
}

PyObject *fa_py_faults(PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *keywords) {
    fa_state *state = PyModule_GetState(module);
    fa_status status;
    fa_bound bound;
    fa_faults found;
    bool clear = true;
    fa_code code = fa_bind(&state->signature[FA_FN_faults], args, count, keywords, &bound, &status);
    PyObject *device = code == FA_OK ? fa_given(&bound, FA_ARG_faults_device) : NULL;
    PyObject *given = code == FA_OK ? fa_given(&bound, FA_ARG_clear) : NULL;
    memset(&found, 0, sizeof found);
    if (code == FA_OK && given) code = fa_read_boolean("clear", given, &clear, &status);
    if (code == FA_OK && device != Py_None) code = check_ordinal(state, device, &status);
    if (code != FA_OK) return fa_raise(state, &status);
    if (device == Py_None) {
        pthread_mutex_lock(&state->lock);
        found = state->cpu_faults;
        if (clear) memset(&state->cpu_faults, 0, sizeof state->cpu_faults);
        pthread_mutex_unlock(&state->lock);
    }
    return listed(&found);
}
