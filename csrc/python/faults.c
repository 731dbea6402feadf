/* check= and faults(): bad contents of index arrays that calls meet. Kernels on the CPU leave the counting to the front
 * end, those on a device count by themselves (faults.h). */
#include "call.h"

#include <string.h>

#include "device/host_mapped.h"

fa_code fa_read_check(const fa_bound *bound, int *check, fa_status *status) {
    PyObject *given = fa_given(bound, FA_ARG_check);
    bool truth = false;
    if (given) FA_TRY(fa_read_boolean("check", given, &truth, status));
    *check = given ? truth : -1;
    return FA_OK;
}

/* FA_EXT_CHECK, which makes check=None True on devices. */
static fa_code checked_by_environment(fa_state *state, bool *checked, fa_status *status) {
    const char *text;
    PyObject *held;
    FA_TRY(fa_environment(state, state->names.check_variable, FA_CHECK_VARIABLE, &text, &held, status));
    fa_code code = FA_OK;
    *checked = text && strcmp(text, "1") == 0;
    if (text && *text && !*checked && strcmp(text, "0") != 0)
        code = fa_fail(status, FA_EVALUE, FA_CHECK_VARIABLE " is \"%.80s\"; accepted: 0, 1", text);
    Py_XDECREF(held);
    return code;
}

/* With the device current. `asked`: by the caller, not by the environment. */
static fa_code check_on_device(const fa_call *call, bool asked, fa_status *status) {
    void *stream = call->stream.handle;
    bool capturing;
    FA_TRY(fa_stream_capturing(stream, &capturing, status));
    if (capturing && !asked) return FA_OK;
    if (capturing)
        return fa_fail(status, FA_EVALUE,
                       "check is True, which waits for the stream, but the stream is being captured; accepted then: "
                       "None, False");
    if (call->joins) FA_TRY(fa_stream_join(call->array, call->count, stream, true, status));
    PyThreadState *thread = PyEval_SaveThread();
    const fa_code code = fa_faults_look(&call->problem, stream, status);
    PyEval_RestoreThread(thread);
    return code;
}

fa_code fa_call_check(fa_state *state, fa_call *call, int check, fa_status *status) {
    fa_problem *problem = &call->problem;
    if (!fa_contents_given(problem)) return FA_OK;
    if (problem->device.kind == FA_CPU) return fa_faults_meet(state->context, problem, check != 0, status);
    bool checked = check == 1;
    int previous;
    if (check < 0) FA_TRY(checked_by_environment(state, &checked, status));
    if (!checked) return FA_OK;
    FA_TRY(fa_device_enter(state->context, problem->device, &previous, status));
    const fa_code code = check_on_device(call, check == 1, status);
    fa_device_leave(problem->device, previous);
    return code;
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
