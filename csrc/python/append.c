/* append() and explain_append(): arguments -> views -> problem -> plan -> launch. */
#include "call.h"

#include <string.h>

#include "problem/append.h"

enum {
#define FA_PARAMETER(argument, name, passing, functions, kind, ...)                                                    \
    +(FA_KIND_##kind == FA_KIND_array && ((functions)&IN_APPEND))
    APPEND_ARRAYS = 5 /* k_cache, v_cache, cos, sin, out */
#include "signature.def"
#undef FA_PARAMETER
};

typedef struct append {
    fa_call call;
    fa_append_request request;
    int check; /* check=: 1, 0, or -1 for None */
    fa_array array[APPEND_ARRAYS];
} append;

/* rotary=: a pair of arrays. */
static fa_code read_rotary(fa_state *state, append *a, fa_status *status) {
    PyObject *pair = fa_given(&a->call.bound, FA_ARG_rotary);
    if (!pair) return FA_OK;
    const char *accepted = "None or a pair of arrays (cos, sin)";
    if (!PyTuple_Check(pair) && !PyList_Check(pair)) return fa_wrong_type("rotary", pair, accepted, status);
    if (PySequence_Size(pair) != 2)
        return fa_fail(status, FA_EVALUE, "rotary has %zd items; accepted: %s", (ssize_t)PySequence_Size(pair),
                       accepted);
    static const char *const names[2] = {"rotary's cos", "rotary's sin"};
    const fa_view **views[2] = {&a->request.forward.rotary_cos, &a->request.forward.rotary_sin};
    for (int n = 0; n < 2; n++) {
        PyObject *table = PyTuple_Check(pair) ? PyTuple_GetItem(pair, n) : PyList_GetItem(pair, n);
        if (!table) return fa_python_error(status);
        FA_TRY(fa_call_array(state, &a->call, names[n], table, views[n], status));
    }
    return FA_OK;
}

/* Arguments -> request. */
static fa_code read_append(fa_state *state, fa_function function, PyObject *const *args, Py_ssize_t count,
                           PyObject *keywords, append *a, fa_status *status) {
    fa_call *call = &a->call;
    const fa_bound *bound = &call->bound;
    fa_call_begin(call, a->array);
    FA_TRY(fa_bind(&state->signature[function], args, count, keywords, &call->bound, status));
    memset(&a->request, 0, sizeof a->request);
    a->request.forward.options.has_layout = fa_given(bound, FA_ARG_layout) != NULL;
    FA_TRY(fa_read_options(bound, &a->request, status));
    FA_TRY(fa_read_check(bound, &a->check, status));
    FA_TRY(fa_call_place(state, FA_APPEND, call, status));
    PyObject *v_cache = fa_given(bound, FA_ARG_v_cache), *out = fa_given(bound, FA_ARG_append_out);
    FA_TRY(fa_call_output(state, call, "k_cache", bound->value[FA_ARG_k_cache], &a->request.forward.k_cache, status));
    if (v_cache) FA_TRY(fa_call_output(state, call, "v_cache", v_cache, &a->request.forward.v_cache, status));
    FA_TRY(fa_call_arrays(state, call, FA_ARG_k, &a->request, status));
    FA_TRY(read_rotary(state, a, status));
    if (out) FA_TRY(fa_call_output(state, call, "out", out, &a->request.forward.out, status));
    return fa_arrays_stream(state, call->array, call->count, &call->stream, &call->joins, status);
}

/* Arguments -> problem and plan. */
static fa_code prepare(fa_state *state, PyObject *const *args, Py_ssize_t count, PyObject *keywords, append *a,
                       fa_plan *plan, fa_status *status) {
    fa_call *call = &a->call;
    FA_TRY(read_append(state, FA_FN_append, args, count, keywords, a, status));
    FA_TRY(fa_dispatch_append(state->context, &a->request, call->forced, &call->problem, &call->info, plan, status));
    FA_TRY(fa_arrays_check_stream(state, &call->array[0], &call->problem, &call->stream, status));
    return fa_call_check(state, call, a->check, status);
}

/* Arguments -> problem. */
static fa_code prepare_question(fa_state *state, PyObject *const *args, Py_ssize_t count, PyObject *keywords, append *a,
                                fa_status *status) {
    fa_call *call = &a->call;
    FA_TRY(read_append(state, FA_FN_explain_append, args, count, keywords, a, status));
    FA_TRY(fa_append_build(&a->request, &call->problem, status));
    FA_TRY(fa_device_info_get(state->context, call->problem.device, &call->info, status));
    return fa_arrays_check_stream(state, &call->array[0], &call->problem, &call->stream, status);
}

/* The array whose view is q's. */
static const fa_array *array_of_q(const fa_call *call) {
    const fa_view *q = ((const append *)call)->request.forward.q;
    for (int n = 0; n < call->count; n++)
        if (&call->array[n].view == q) return &call->array[n];
    return NULL;
}

static fa_code make_result(fa_state *state, fa_call *call, fa_result *results, fa_status *status) {
    const fa_request *request = &((const append *)call)->request.forward;
    if (!request->q || request->out) return FA_OK;
    const fa_stream stream = fa_call_result_stream(call);
    FA_TRY(fa_result_make(state, array_of_q(call), request->q->ndim, request->q->shape, request->q->dtype, &stream,
                          &results[0], status));
    call->problem.append.out.data = results[0].data;
    return FA_OK;
}

static PyObject *hand_over(fa_state *state, fa_call *call, fa_result *results) {
    PyObject *given = fa_given(&call->bound, FA_ARG_append_out);
    if (given) return Py_NewRef(given);
    if (!((const append *)call)->request.forward.q) return Py_NewRef(Py_None);
    return fa_result_finish(state, array_of_q(call), &results[0]);
}

PyObject *fa_py_append(PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *keywords) {
    static const fa_ending ending = {make_result, hand_over};
    fa_state *state = PyModule_GetState(module);
    append a;
    fa_call *call = &a.call;
    fa_plan plan;
    fa_status status;
    PyObject *returned = NULL;
    if (prepare(state, args, count, keywords, &a, &plan, &status) == FA_OK)
        returned = fa_call_run(state, call, &plan, &ending, &status);
    fa_call_end(call);
    return returned ? returned : fa_raise(state, &status);
}

PyObject *fa_py_explain_append(PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *keywords) {
    fa_state *state = PyModule_GetState(module);
    append a;
    fa_status status;
    PyObject *answer = NULL;
    const fa_code code = prepare_question(state, args, count, keywords, &a, &status);
    if (code == FA_OK) answer = fa_explain_problem(state, &a.call);
    fa_call_end(&a.call);
    return code == FA_OK ? answer : fa_raise(state, &status);
}
