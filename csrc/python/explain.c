/* explain() and answers(): what the kernels say to a call, on its own device or on one that is only described. */
#include "core.h"

#include <string.h>

/* ---- a device that is described ---- */

static fa_code read_size(PyObject *given, const char *key, bool required, size_t *size, fa_status *status) {
    PyObject *value = PyMapping_GetItemString(given, key);
    if (!value) {
        PyErr_Clear();
        if (!required) return FA_OK;
        return fa_fail(status, FA_EVALUE, "device has no \"%s\"; accepted: what _core.device_info() returns", key);
    }
    const unsigned long long number = PyLong_Check(value) ? PyLong_AsUnsignedLongLong(value) : 0;
    fa_code code = FA_OK;
    if (!PyLong_Check(value) || PyErr_Occurred()) {
        PyErr_Clear();
        char name[64];
        snprintf(name, sizeof name, "device's \"%s\"", key);
        code = fa_wrong_type(name, value, "an int >= 0", status);
    }
    *size = (size_t)number;
    Py_DECREF(value);
    return code;
}

/* The keys that plans ask about; cuBLAS is there unless "cublas_error" says otherwise. */
static fa_code read_device(PyObject *given, fa_device_info *info, fa_status *status) {
    size_t cc = 0, sm_count = 0, tensor_maps = 0;
    if (!PyDict_Check(given))
        return fa_wrong_type("device", given, "None, or a dict such as _core.device_info() returns", status);
    info->device = (fa_device){FA_CUDA, 0};
    FA_TRY(read_size(given, "cc", true, &cc, status));
    FA_TRY(read_size(given, "sm_count", true, &sm_count, status));
    FA_TRY(read_size(given, "smem_per_block", true, &info->smem_per_block, status));
    FA_TRY(read_size(given, "smem_per_sm", true, &info->smem_per_sm, status));
    FA_TRY(read_size(given, "l2_bytes", true, &info->l2_bytes, status));
    FA_TRY(read_size(given, "tensor_maps", true, &tensor_maps, status));
    FA_TRY(read_size(given, "workspace_limit", false, &info->workspace_limit, status));
    info->cc = (int)cc;
    info->sm_count = (int)sm_count;
    info->tensor_maps = tensor_maps != 0;
    PyObject *error = PyMapping_GetItemString(given, "cublas_error");
    if (error && error != Py_None) info->library_error[FA_CUBLAS] = "cuBLAS was not found on the device described";
    PyErr_Clear();
    Py_XDECREF(error);
    return FA_OK;
}

fa_code fa_explain_device(fa_state *state, PyObject *given, fa_device_info *described, fa_status *status) {
    const fa_device_info *here;
    FA_TRY(fa_device_info_get(state->context, (fa_device){FA_CPU, 0}, &here, status));
    *described = (fa_device_info){.workspace_limit = here->workspace_limit};
    return read_device(given, described, status);
}

/* ---- a question ---- */

enum { MAX_ARGUMENTS = FA_ARG_COUNT + 2 };

/* A call and what it is held against. */
typedef struct question {
    fa_call call;
    fa_device_info described;
    const fa_device_info *device; /* `described`, or the call's own */
} question;

/* Takes the keyword `name` out of the arguments: its value, or NULL. `keywords` is replaced by a new tuple. */
static fa_code take_keyword(PyObject **args, Py_ssize_t count, PyObject **keywords, const char *name, PyObject **value,
                            fa_status *status) {
    const Py_ssize_t named = *keywords ? PyTuple_Size(*keywords) : 0;
    *value = NULL;
    for (Py_ssize_t n = 0; n < named; n++) {
        if (!fa_text_equals(PyTuple_GetItem(*keywords, n), name)) continue;
        *value = args[count + n];
        PyObject *rest = PyTuple_New(named - 1);
        if (!rest) return fa_python_error(status);
        for (Py_ssize_t m = 0, to = 0; m < named; m++) {
            if (m == n) continue;
            args[count + to] = args[count + m];
            PyTuple_SetItem(rest, to++, Py_NewRef(PyTuple_GetItem(*keywords, m)));
        }
        Py_DECREF(*keywords);
        *keywords = rest;
        break;
    }
    return FA_OK;
}

/* The problem of a call on `device`, a description or NULL. */
static fa_code ask(fa_state *state, PyObject *const *args, Py_ssize_t count, PyObject *keywords, PyObject *device,
                   question *q, fa_status *status) {
    fa_call *call = &q->call;
    FA_TRY(fa_call_read(state, args, count, keywords, call, status));
    q->device = &q->described;
    if (device && device != Py_None) {
        FA_TRY(fa_explain_device(state, device, &q->described, status));
        for (int n = 0; n < FA_ARRAYS; n++) call->array[n].view.device = q->described.device;
    }
    FA_TRY(fa_forward_build(&call->request, &call->problem, status));
    if (!device || device == Py_None)
        return fa_device_info_get(state->context, call->problem.device, &q->device, status);
    return FA_OK;
}

/* ---- explain() ---- */

/* Why `kernel` is not the one that runs: `forced`, or `chosen`. */
static int add_reason(PyObject *reasons, const fa_kernel *kernel, const fa_problem *problem,
                      const fa_device_info *device, const char *forced, const char *chosen) {
    fa_plan plan;
    fa_why why;
    char reason[512];
    PyObject *text;
    if (fa_kernel_ask(kernel, problem, device, &plan, &why) != FA_TAKES) {
        fa_why_text(&why, device, reason, sizeof reason);
        text = PyUnicode_DecodeUTF8(reason, (Py_ssize_t)strlen(reason), "replace");
    } else if (forced) {
        text = PyUnicode_FromFormat("could take it, but \"%s\" is forced", forced);
    } else {
        text = PyUnicode_FromFormat("could take it, but comes after \"%s\" in order of preference", chosen);
    }
    int code = text ? PyDict_SetItemString(reasons, kernel->name, text) : -1;
    Py_XDECREF(text);
    return code;
}

PyObject *fa_explain_problem(fa_state *state, const fa_problem *problem, const fa_device_info *device,
                             const fa_kernel *forced, const char *forced_name) {
    fa_plan plan;
    fa_status status;
    const char *chosen = NULL;
    const fa_code code = fa_plan_make(problem, device, forced, &plan, &status);
    if (code == FA_OK)
        chosen = forced ? forced_name : plan.kernel->name;
    else if (!forced && code != FA_EUNSUPPORTED) /* an error of the call, too */
        return fa_raise(state, &status);
    PyObject *reasons = PyDict_New();
    if (!reasons) return NULL;
    if (!chosen && forced) {
        PyObject *text = PyUnicode_DecodeUTF8(status.message, (Py_ssize_t)strlen(status.message), "replace");
        if (!text || PyDict_SetItemString(reasons, forced_name, text) < 0) Py_CLEAR(reasons);
        Py_XDECREF(text);
    }
    for (int n = 0; reasons && fa_kernel_at(n); n++) {
        const fa_kernel *kernel = fa_kernel_at(n);
        if (kernel->op != problem->op || kernel == forced || (chosen && kernel == plan.kernel)) continue;
        if (add_reason(reasons, kernel, problem, device, forced ? forced_name : NULL, chosen) < 0) Py_CLEAR(reasons);
    }
    if (!reasons) return NULL;
    return Py_BuildValue("(zN)", chosen, reasons);
}

/* ---- answers() ---- */

static PyObject *plan_dict(const fa_plan *plan) {
    return Py_BuildValue("{s:L,s:i,s:n,s:n,s:O,s:y#}", "blocks", (long long)plan->blocks, "threads", plan->threads,
                         "smem_bytes", (Py_ssize_t)plan->smem_bytes, "workspace_bytes",
                         (Py_ssize_t)plan->workspace_bytes, "keep", plan->keep ? Py_True : Py_False, "own", plan->own,
                         (Py_ssize_t)sizeof plan->own);
}

static int add_answer(PyObject *answers, const fa_kernel *kernel, const char *name, const question *q) {
    static const char *const words[] = {"takes", "declines", "refuses", "not here", "fails"};
    fa_answer answer;
    fa_plan plan;
    fa_why why;
    char reason[512];
    answer = fa_kernel_ask(kernel, &q->call.problem, q->device, &plan, &why);
    fa_why_text(&why, q->device, reason, sizeof reason);
    PyObject *planned = answer == FA_TAKES || answer == FA_DECLINES ? plan_dict(&plan) : Py_NewRef(Py_None);
    PyObject *text = PyUnicode_DecodeUTF8(reason, (Py_ssize_t)strlen(reason), "replace");
    PyObject *entry = planned && text ? Py_BuildValue("(sOO)", words[answer], text, planned) : NULL;
    int code = entry ? PyDict_SetItemString(answers, name, entry) : -1;
    Py_XDECREF(entry);
    Py_XDECREF(text);
    Py_XDECREF(planned);
    return code;
}

static PyObject *answers(const question *q) {
    PyObject *found = PyDict_New();
    for (int n = 0; found && fa_kernel_at(n); n++)
        if (fa_kernel_at(n)->op == q->call.problem.op &&
            add_answer(found, fa_kernel_at(n), fa_kernel_at(n)->name, q) < 0)
            Py_CLEAR(found);
    if (found && q->call.forced && add_answer(found, q->call.forced, q->call.forced_name, q) < 0) Py_CLEAR(found);
    return found;
}

/* Both functions; answers() alone has `features`. */
static PyObject *respond(PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *keywords, bool all) {
    fa_state *state = PyModule_GetState(module);
    const Py_ssize_t given = count + (keywords ? PyTuple_Size(keywords) : 0);
    PyObject *own[MAX_ARGUMENTS], *device = NULL, *features = NULL, *result = NULL;
    question q;
    fa_status status;
    fa_code code = FA_OK;
    fa_call_begin(&q.call);
    Py_XINCREF(keywords);
    if (given <= MAX_ARGUMENTS) {
        memcpy(own, args, (size_t)given * sizeof *own);
        args = own;
        code = take_keyword(own, count, &keywords, "device", &device, &status);
        if (code == FA_OK && all) code = take_keyword(own, count, &keywords, "features", &features, &status);
    }
    if (code == FA_OK) code = ask(state, args, count, keywords, device, &q, &status);
    if (code == FA_OK && features) {
        q.call.problem.features |= (uint32_t)PyLong_AsUnsignedLongMask(features);
        if (PyErr_Occurred()) code = fa_python_error(&status);
    }
    if (code == FA_OK)
        result =
            all ? answers(&q) : fa_explain_problem(state, &q.call.problem, q.device, q.call.forced, q.call.forced_name);
    fa_call_end(&q.call);
    Py_XDECREF(keywords);
    return code == FA_OK ? result : fa_raise(state, &status);
}

PyObject *fa_explain(PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *keywords) {
    return respond(module, args, count, keywords, false);
}

PyObject *fa_answers(PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *keywords) {
    return respond(module, args, count, keywords, true);
}
