/* attention_backward() and explain_backward(): arguments -> views -> problem -> plan -> launch. */
#include "call.h"

#include <string.h>

#include "problem/backward.h"

enum {
#define FA_PARAMETER(argument, name, passing, functions, kind, ...)                                                    \
    +(FA_KIND_##kind == FA_KIND_array && ((functions)&IN_BACKWARD))
    ARRAYS = FA_GRAD_COUNT + 5 /* two of k_range and of segments, dropout's state */
#include "signature.def"
#undef FA_PARAMETER
};

typedef struct backward {
    fa_call call;
    fa_backward_request request;
    PyObject *wrt, *grads;          /* as tuples, strong; grads NULL when absent */
    int count;                      /* names in wrt */
    fa_grad order[FA_GRAD_COUNT];   /* what they name */
    PyObject *given[FA_GRAD_COUNT]; /* items of grads in the order of wrt, borrowed; NULL where absent */
    int check;                      /* check=: 1, 0, or -1 for None */
    fa_array array[ARRAYS];
    fa_device_info described;
} backward;

static fa_code read_name(PyObject *item, backward *b, fa_status *status) {
    const char *accepted = "\"q\", \"k\", \"v\", \"bias\", \"sinks\"";
    const char *text = PyUnicode_Check(item) ? PyUnicode_AsUTF8AndSize(item, NULL) : NULL;
    if (!text) {
        PyErr_Clear();
        return fa_wrong_type("an item of wrt", item, accepted, status);
    }
    for (int n = 0; n < FA_GRAD_COUNT; n++) {
        if (strcmp(text, fa_grad_name((fa_grad)n)) != 0) continue;
        if (b->request.wants >> n & 1) return fa_fail(status, FA_EVALUE, "wrt names \"%s\" twice", text);
        b->request.wants |= 1u << n;
        b->order[b->count++] = (fa_grad)n;
        return FA_OK;
    }
    return fa_fail(status, FA_EVALUE, "wrt names \"%.80s\"; accepted: %s", text, accepted);
}

static fa_code read_wrt(backward *b, fa_status *status) {
    PyObject *value = fa_given(&b->call.bound, FA_ARG_wrt);
    if (!value) {
        for (b->count = 0; b->count < 3; b->count++) b->order[b->count] = (fa_grad)b->count;
        b->request.wants = 7;
        return FA_OK;
    }
    if (!PyTuple_Check(value) && !PyList_Check(value))
        return fa_wrong_type("wrt", value, "a tuple of \"q\", \"k\", \"v\", \"bias\", \"sinks\"", status);
    b->wrt = PySequence_Tuple(value);
    if (!b->wrt) return fa_python_error(status);
    for (Py_ssize_t n = 0; n < PyTuple_Size(b->wrt); n++) FA_TRY(read_name(PyTuple_GetItem(b->wrt, n), b, status));
    return FA_OK;
}

static fa_code read_grads(fa_state *state, backward *b, fa_status *status) {
    PyObject *value = fa_given(&b->call.bound, FA_ARG_grads);
    if (!value) return FA_OK;
    const char *accepted = "None, or a tuple of arrays or None, one for each name of wrt";
    if (!PyTuple_Check(value) && !PyList_Check(value)) return fa_wrong_type("grads", value, accepted, status);
    b->grads = PySequence_Tuple(value);
    if (!b->grads) return fa_python_error(status);
    if (PyTuple_Size(b->grads) != b->count)
        return fa_fail(status, FA_EVALUE, "grads has %zd items, but wrt has %d; accepted: %s",
                       (ssize_t)PyTuple_Size(b->grads), b->count, accepted);
    for (int n = 0; n < b->count; n++) {
        PyObject *item = PyTuple_GetItem(b->grads, n);
        if (item == Py_None) continue;
        b->given[n] = item;
        const fa_grad grad = b->order[n];
        FA_TRY(fa_call_output(state, &b->call, fa_grads_item(grad), item, &b->request.grad[grad], status));
    }
    return FA_OK;
}

/* Arguments -> request. */
static fa_code read_backward(fa_state *state, fa_function function, PyObject *const *args, Py_ssize_t count,
                             PyObject *keywords, backward *b, fa_status *status) {
    fa_call *call = &b->call;
    memset(&b->request, 0, sizeof b->request);
    memset(b->given, 0, sizeof b->given);
    b->wrt = b->grads = NULL;
    b->count = 0;
    fa_call_begin(call, b->array);
    FA_TRY(fa_bind(&state->signature[function], args, count, keywords, &call->bound, status));
    fa_options *options = &b->request.forward.options;
    options->window_left = options->window_right = options->max_seqlen_q = FA_UNBOUNDED;
    b->request.deterministic = true;
    FA_TRY(fa_read_options(&call->bound, &b->request, status));
    FA_TRY(fa_read_check(&call->bound, &b->check, status));
    FA_TRY(read_wrt(b, status));
    FA_TRY(fa_call_place(state, FA_BACKWARD, call, status));
    FA_TRY(fa_call_arrays(state, call, FA_ARG_q, &b->request, status));
    FA_TRY(fa_call_pairs(state, call, &b->request.forward, status));
    FA_TRY(fa_call_dropout(state, call, &b->request.forward, status));
    FA_TRY(read_grads(state, b, status));
    return fa_arrays_stream(state, call->array, call->count, &call->stream, &call->joins, status);
}

/* Arguments -> problem and plan. */
static fa_code prepare(fa_state *state, PyObject *const *args, Py_ssize_t count, PyObject *keywords, backward *b,
                       fa_plan *plan, fa_status *status) {
    fa_call *call = &b->call;
    FA_TRY(read_backward(state, FA_FN_attention_backward, args, count, keywords, b, status));
    FA_TRY(fa_dispatch_backward(state->context, &b->request, call->forced, &call->problem, &call->info, plan, status));
    FA_TRY(fa_arrays_check_stream(state, &call->array[0], &call->problem, &call->stream, status));
    return fa_call_check(state, call, b->check, status);
}

/* Arguments -> problem, of the device that is described or that the arrays are on. */
static fa_code prepare_question(fa_state *state, PyObject *const *args, Py_ssize_t count, PyObject *keywords,
                                backward *b, fa_status *status) {
    fa_call *call = &b->call;
    FA_TRY(read_backward(state, FA_FN_explain_backward, args, count, keywords, b, status));
    PyObject *device = fa_given(&call->bound, FA_ARG_device);
    if (device) FA_TRY(fa_call_describe(state, call, device, &b->described, status));
    FA_TRY(fa_backward_build(&b->request, &call->problem, status));
    if (device) return FA_OK;
    FA_TRY(fa_device_info_get(state->context, call->problem.device, &call->info, status));
    return fa_arrays_check_stream(state, &call->array[0], &call->problem, &call->stream, status);
}

static void release(backward *b) {
    fa_call_end(&b->call);
    Py_XDECREF(b->wrt);
    Py_XDECREF(b->grads);
}

/* Gradients that the caller did not give. */
static fa_code make_results(fa_state *state, fa_call *call, fa_result *results, fa_status *status) {
    const backward *b = (backward *)call;
    fa_backward *problem = &call->problem.backward;
    const fa_stream stream = fa_call_result_stream(call);
    for (int n = 0; n < b->count; n++) {
        const fa_grad grad = b->order[n];
        if (b->given[n]) continue;
        const fa_view *subject = fa_grad_subject(&b->request.forward, grad);
        FA_TRY(fa_result_make(state, &call->array[0], subject->ndim, subject->shape, problem->grad_dtype[grad], &stream,
                              &results[n], status));
        problem->grad[grad].data = results[n].data;
    }
    return FA_OK;
}

/* The gradients in the order of wrt: the caller's own objects where given. */
static PyObject *hand_over(fa_state *state, fa_call *call, fa_result *results) {
    const backward *b = (backward *)call;
    PyObject *tuple = PyTuple_New(b->count);
    for (int n = 0; tuple && n < b->count; n++) {
        PyObject *item = b->given[n] ? Py_NewRef(b->given[n]) : fa_result_finish(state, &call->array[0], &results[n]);
        if (!item || PyTuple_SetItem(tuple, n, item) < 0) Py_CLEAR(tuple);
    }
    return tuple;
}

PyObject *fa_py_attention_backward(PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *keywords) {
    static const fa_ending ending = {make_results, hand_over};
    fa_state *state = PyModule_GetState(module);
    backward b;
    fa_call *call = &b.call;
    fa_plan plan;
    fa_status status;
    PyObject *returned = NULL;
    if (prepare(state, args, count, keywords, &b, &plan, &status) == FA_OK)
        returned = fa_call_run(state, call, &plan, &ending, &status);
    release(&b);
    return returned ? returned : fa_raise(state, &status);
}

PyObject *fa_py_explain_backward(PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *keywords) {
    fa_state *state = PyModule_GetState(module);
    backward b;
    fa_status status;
    PyObject *answer = NULL;
    const fa_code code = prepare_question(state, args, count, keywords, &b, &status);
    if (code == FA_OK) answer = fa_explain_problem(state, &b.call);
    release(&b);
    return code == FA_OK ? answer : fa_raise(state, &status);
}
