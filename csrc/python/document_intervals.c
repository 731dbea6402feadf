/* document_intervals(): arguments -> views -> problem -> plan -> launch. */
#include "call.h"

#include <string.h>

#include "problem/documents.h"

typedef struct intervals {
    fa_call call;
    fa_intervals_request request;
    fa_array array[3]; /* ids, spans, out */
} intervals;

static void bind(fa_bound *bound, fa_argument argument, PyObject *value) {
    bound->value[argument] = value;
    if (value && value != Py_None) bound->given |= FA_ARGUMENT(argument);
}

/* The arguments by what documents() calls them. */
static fa_code read_arguments(PyObject *args, PyObject *keywords, fa_bound *bound, PyObject **spans, PyObject **causal,
                              PyObject **window, fa_status *status) {
    static char *names[] = {"ids", "spans", "causal", "window", "out", "stream", NULL};
    PyObject *ids = Py_None, *out = Py_None, *stream = Py_None;
    *spans = *window = Py_None, *causal = Py_True;
    memset(bound, 0, sizeof *bound);
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "|O$OOOOO:document_intervals", names, &ids, spans, causal, window,
                                     &out, &stream))
        return fa_python_error(status);
    bind(bound, FA_ARG_ids, ids);
    bind(bound, FA_ARG_documents_out, out);
    bind(bound, FA_ARG_stream, stream);
    return FA_OK;
}

static fa_code read_intervals(fa_state *state, PyObject *args, PyObject *keywords, intervals *d, fa_status *status) {
    fa_call *call = &d->call;
    fa_intervals_request *request = &d->request;
    PyObject *spans, *causal, *window;
    fa_call_begin(call, d->array);
    memset(request, 0, sizeof *request);
    FA_TRY(read_arguments(args, keywords, &call->bound, &spans, &causal, &window, status));
    FA_TRY(fa_read_boolean("causal", causal, &request->causal, status));
    long width = 0;
    if (window != Py_None)
        FA_TRY(fa_read_index("window", window, 1, INT32_MAX, "None, or an int from 1 to 2^31 - 1", &width, status));
    request->window = width;
    FA_TRY(fa_call_place(state, FA_DOCUMENTS, call, status));
    PyObject *ids = fa_given(&call->bound, FA_ARG_ids), *out = fa_given(&call->bound, FA_ARG_documents_out);
    if (!ids && spans == Py_None)
        return fa_fail(status, FA_EVALUE, "ids and spans are None; accepted: one at least, (batch, sequence)");
    if (ids) FA_TRY(fa_call_array(state, call, "ids", ids, &request->ids, status));
    if (spans != Py_None) FA_TRY(fa_call_array(state, call, "spans", spans, &request->spans, status));
    if (out) FA_TRY(fa_call_output(state, call, "out", out, &request->out, status));
    FA_TRY(fa_arrays_stream(state, call->array, call->count, &call->stream, &call->joins, status));
    FA_TRY(fa_document_intervals_build(request, &call->problem, status));
    FA_TRY(fa_device_info_get(state->context, call->problem.device, &call->info, status));
    return fa_arrays_check_stream(state, &call->array[0], &call->problem, &call->stream, status);
}

static fa_code make_result(fa_state *state, fa_call *call, fa_result *results, fa_status *status) {
    if (((const intervals *)call)->request.out) return FA_OK;
    fa_documents *p = &call->problem.documents;
    const int64_t shape[4] = {p->batch, 1, p->seq, 2};
    const fa_stream stream = fa_call_result_stream(call);
    FA_TRY(fa_result_make(state, &call->array[0], 4, shape, FA_I32, &stream, &results[0], status));
    p->starts.data = results[0].data;
    return FA_OK;
}

static PyObject *hand_over(fa_state *state, fa_call *call, fa_result *results) {
    return fa_call_give(state, call, fa_given(&call->bound, FA_ARG_documents_out), false, results);
}

PyObject *fa_document_intervals(PyObject *module, PyObject *args, PyObject *keywords) {
    static const fa_ending ending = {make_result, hand_over};
    fa_state *state = PyModule_GetState(module);
    intervals d;
    fa_call *call = &d.call;
    fa_plan plan;
    fa_status status;
    PyObject *returned = NULL;
    if (read_intervals(state, args, keywords, &d, &status) == FA_OK &&
        fa_plan_make(&call->problem, call->info, call->forced, &plan, &status) == FA_OK)
        returned = fa_call_run(state, call, &plan, &ending, &status);
    fa_call_end(call);
    return returned ? returned : fa_raise(state, &status);
}
