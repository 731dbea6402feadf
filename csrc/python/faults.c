/* check= and faults(): bad contents of index arrays that calls meet. */
#include "core.h"

fa_code fa_read_check(const fa_bound *bound, int *check, fa_status *status) {
    PyObject *given = fa_given(bound, FA_ARG_check);
    bool truth = false;
    if (given) FA_TRY(fa_read_boolean("check", given, &truth, status));
    *check = given ? truth : -1;
    return FA_OK;
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

static fa_code read_device(PyObject *given, fa_device *device, fa_status *status) {
    const char *accepted = "None, or the index of a CUDA device, from 0";
    long index = 0;
    *device = (fa_device){given == Py_None ? FA_CPU : FA_CUDA, 0};
    if (given && given != Py_None) FA_TRY(fa_read_index("device", given, 0, 4095, accepted, &index, status));
    device->id = (int)index;
    return FA_OK;
}

PyObject *fa_py_faults(PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *keywords) {
    fa_state *state = PyModule_GetState(module);
    fa_status status;
    fa_bound bound;
    fa_faults found;
    fa_device device;
    bool clear = true;
    fa_code code = fa_bind(&state->signature[FA_FN_faults], args, count, keywords, &bound, &status);
    PyObject *given = code == FA_OK ? fa_given(&bound, FA_ARG_clear) : NULL;
    if (code == FA_OK && given) code = fa_read_boolean("clear", given, &clear, &status);
    if (code == FA_OK) code = read_device(fa_given(&bound, FA_ARG_faults_device), &device, &status);
    if (code == FA_OK) code = fa_faults_take(state->context, device, clear, &found, &status);
    return code == FA_OK ? listed(&found) : fa_raise(state, &status);
}
