/* explain() and answers(): what the kernels say to a call, on its own device or on one that is only described. */
#include "call.h"

#include <string.h>

/* A call and the device it may be held against instead of its own. */
typedef struct question {
    fa_attention attention;
    fa_device_info described;
} question;

/* Arguments -> problem. */
static fa_code ask(fa_state *state, fa_function function, PyObject *const *args, Py_ssize_t count, PyObject *keywords,
                   question *q, fa_status *status) {
    fa_attention *a = &q->attention;
    fa_call *call = &a->call;
    FA_TRY(fa_attention_read(state, function, args, count, keywords, a, status));
    PyObject *device = fa_given(&call->bound, FA_ARG_device), *features = fa_given(&call->bound, FA_ARG_features);
    if (device) FA_TRY(fa_call_describe(state, call, device, &q->described, status));
    FA_TRY(fa_forward_build(&a->request, &call->problem, status));
    if (!device) FA_TRY(fa_device_info_get(state->context, call->problem.device, &call->info, status));
    if (features) call->problem.features |= (uint32_t)PyLong_AsUnsignedLongMask(features);
    return features && PyErr_Occurred() ? fa_python_error(status) : FA_OK;
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

PyObject *fa_explain_problem(fa_state *state, const fa_call *call) {
    const fa_problem *problem = &call->problem;
    const fa_device_info *device = call->info;
    const fa_kernel *forced = call->forced;
    const char *forced_name = call->forced_name;
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

static int add_answer(PyObject *answers, const fa_kernel *kernel, const char *name, const fa_call *call) {
    static const char *const words[] = {"takes", "declines", "refuses", "not here", "fails"};
    fa_answer answer;
    fa_plan plan;
    fa_why why;
    char reason[512];
    answer = fa_kernel_ask(kernel, &call->problem, call->info, &plan, &why);
    fa_why_text(&why, call->info, reason, sizeof reason);
    PyObject *planned = answer == FA_TAKES || answer == FA_DECLINES ? plan_dict(&plan) : Py_NewRef(Py_None);
    PyObject *text = PyUnicode_DecodeUTF8(reason, (Py_ssize_t)strlen(reason), "replace");
    PyObject *entry = planned && text ? Py_BuildValue("(sOO)", words[answer], text, planned) : NULL;
    int code = entry ? PyDict_SetItemString(answers, name, entry) : -1;
    Py_XDECREF(entry);
    Py_XDECREF(text);
    Py_XDECREF(planned);
    return code;
}

static PyObject *answers(const fa_call *call) {
    PyObject *found = PyDict_New();
    for (int n = 0; found && fa_kernel_at(n); n++)
        if (fa_kernel_at(n)->op == call->problem.op &&
            add_answer(found, fa_kernel_at(n), fa_kernel_at(n)->name, call) < 0)
            Py_CLEAR(found);
    if (found && call->forced && add_answer(found, call->forced, call->forced_name, call) < 0) Py_CLEAR(found);
    return found;
}

static PyObject *respond(PyObject *module, fa_function function, PyObject *const *args, Py_ssize_t count,
                         PyObject *keywords) {
    fa_state *state = PyModule_GetState(module);
    PyObject *result = NULL;
    question q;
    fa_status status;
    const fa_code code = ask(state, function, args, count, keywords, &q, &status);
    if (code == FA_OK)
        result = function == FA_FN_answers ? answers(&q.attention.call) : fa_explain_problem(state, &q.attention.call);
    fa_call_end(&q.attention.call);
    return code == FA_OK ? result : fa_raise(state, &status);
}

PyObject *fa_py_explain(PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *keywords) {
    return respond(module, FA_FN_explain, args, count, keywords);
}

PyObject *fa_py_answers(PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *keywords) {
    return respond(module, FA_FN_answers, args, count, keywords);
}
