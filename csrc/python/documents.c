/* documents() and explain_documents(): arguments -> views -> problem -> plan -> launch. */
#include "call.h"

#include <limits.h>
#include <string.h>

#include "problem/documents.h"

typedef struct documents {
    fa_call call;
    fa_documents_request request;
    int check;         /* check=: 1, 0, or -1 for None */
    fa_array array[2]; /* ids, out */
} documents;

/* Arguments -> problem. */
static fa_code read_documents(fa_state *state, fa_function function, PyObject *const *args, Py_ssize_t count,
                              PyObject *keywords, documents *d, fa_status *status) {
    fa_call *call = &d->call;
    const fa_bound *bound = &call->bound;
    fa_call_begin(call, d->array);
    FA_TRY(fa_bind(&state->signature[function], args, count, keywords, &call->bound, status));
    memset(&d->request, 0, sizeof d->request);
    FA_TRY(fa_read_check(bound, &d->check, status));
    FA_TRY(fa_call_place(state, FA_DOCUMENTS, call, status));
    PyObject *most = fa_given(bound, FA_ARG_count), *out = fa_given(bound, FA_ARG_documents_out);
    long number = 0;
    if (most)
        FA_TRY(fa_read_index("count", most, 1, INT_MAX - 1, "None, or an int from 1 to 2^31 - 2", &number, status));
    d->request.count = number;
    FA_TRY(fa_call_array(state, call, "ids", bound->value[FA_ARG_ids], &d->request.ids, status));
    if (out) FA_TRY(fa_call_output(state, call, "out", out, &d->request.forward.out, status));
    FA_TRY(fa_arrays_stream(state, call->array, call->count, &call->stream, &call->joins, status));
    FA_TRY(fa_documents_build(&d->request, &call->problem, status));
    FA_TRY(fa_device_info_get(state->context, call->problem.device, &call->info, status));
    return fa_arrays_check_stream(state, &call->array[0], &call->problem, &call->stream, status);
}

static fa_code make_result(fa_state *state, fa_call *call, fa_result *results, fa_status *status) {
    if (((const documents *)call)->request.forward.out) return FA_OK;
    fa_documents *p = &call->problem.documents;
    const int64_t shape = p->count + 1;
    const fa_stream stream = fa_call_result_stream(call);
    FA_TRY(fa_result_make(state, &call->array[0], 1, &shape, FA_I32, &stream, &results[0], status));
    p->starts.data = results[0].data;
    return FA_OK;
}

static PyObject *hand_over(fa_state *state, fa_call *call, fa_result *results) {
    return fa_call_give(state, call, fa_given(&call->bound, FA_ARG_documents_out), false, results);
}

PyObject *fa_py_documents(PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *keywords) {
    static const fa_ending ending = {make_result, hand_over};
    fa_state *state = PyModule_GetState(module);
    documents d;
    fa_call *call = &d.call;
    fa_plan plan;
    fa_status status;
    PyObject *returned = NULL;
    if (read_documents(state, FA_FN_documents, args, count, keywords, &d, &status) == FA_OK &&
        fa_plan_make(&call->problem, call->info, call->forced, &plan, &status) == FA_OK &&
        fa_call_check(state, call, d.check, &status) == FA_OK)
        returned = fa_call_run(state, call, &plan, &ending, &status);
    fa_call_end(call);
    return returned ? returned : fa_raise(state, &status);
}

PyObject *fa_py_explain_documents(PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *keywords) {
    fa_state *state = PyModule_GetState(module);
    documents d;
    fa_status status;
    PyObject *answer = NULL;
    const fa_code code = read_documents(state, FA_FN_explain_documents, args, count, keywords, &d, &status);
    if (code == FA_OK) answer = fa_explain_problem(state, &d.call);
    fa_call_end(&d.call);
    return code == FA_OK ? answer : fa_raise(state, &status);
}
