/* merge() and explain_merge(): arguments -> views -> problem -> plan -> launch. */
#include "call.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "problem/merge.h"

/* A call. Its arrays are outs[0], the other outs, the lses, then sinks, out and lse where they are given. */
typedef struct merge {
    fa_call call;
    fa_merge_request request;
    PyObject *outs, *lses; /* the lists as tuples, strong */
    int count;
    char (*name)[32];
    const fa_view **view; /* of the outs, then of the lses */
    fa_part *parts;
} merge;

/* outs or lses as a tuple. */
static fa_code read_list(const char *name, PyObject *value, PyObject **items, fa_status *status) {
    if (!PyList_Check(value) && !PyTuple_Check(value)) return fa_wrong_type(name, value, "a list of arrays", status);
    *items = PySequence_Tuple(value);
    if (!*items) return fa_python_error(status);
    const Py_ssize_t size = PyTuple_Size(*items);
    if (size == 0) return fa_fail(status, FA_EVALUE, "%s is empty; accepted: a list of at least one array", name);
    if (size > INT_MAX / 8) return fa_fail(status, FA_EVALUE, "%s is too long", name);
    return FA_OK;
}

static fa_code allocate(merge *m, fa_status *status) {
    const size_t count = (size_t)PyTuple_Size(m->outs);
    m->count = (int)count;
    m->call.array = malloc((2 * count + 3) * sizeof *m->call.array);
    m->name = calloc(2 * count, sizeof *m->name);
    m->view = calloc(2 * count, sizeof *m->view);
    m->parts = calloc(count, sizeof *m->parts);
    if (m->call.array && m->name && m->view && m->parts) return FA_OK;
    return fa_fail(status, FA_EMEMORY, "no memory for the description of %d parts", m->count);
}

/* The parts are of one library. */
static fa_code check_kind(const fa_array *array, const fa_array *first, fa_status *status) {
    char given[80], wanted[80];
    if (array->type->protocol == first->type->protocol && array->type->library == first->type->library) return FA_OK;
    return fa_fail(status, FA_ETYPE, "%s is a %s, but %s is a %s; the parts must be of one library", array->name,
                   fa_type_name(array->object, given), first->name, fa_type_name(first->object, wanted));
}

static fa_code read_arrays(fa_state *state, merge *m, fa_status *status) {
    fa_call *call = &m->call;
    PyObject *sinks = fa_given(&call->bound, FA_ARG_merge_sinks);
    for (int n = 0; n < 2 * m->count; n++) {
        const bool is_out = n < m->count;
        const int index = is_out ? n : n - m->count;
        snprintf(m->name[n], sizeof m->name[n], "%s[%d]", is_out ? "outs" : "lses", index);
        PyObject *object = PyTuple_GetItem(is_out ? m->outs : m->lses, index);
        FA_TRY(fa_call_array(state, call, m->name[n], object, &m->view[n], status));
        FA_TRY(check_kind(&call->array[n], &call->array[0], status));
    }
    if (sinks) FA_TRY(fa_call_array(state, call, "sinks", sinks, &m->request.forward.sinks, status));
    return fa_call_outputs(state, call, fa_given(&call->bound, FA_ARG_merge_out), &m->request.forward.out,
                           &m->request.forward.lse, status);
}

/* Arguments -> problem. */
static fa_code read_merge(fa_state *state, fa_function function, PyObject *const *args, Py_ssize_t count,
                          PyObject *keywords, merge *m, fa_status *status) {
    fa_call *call = &m->call;
    memset(m, 0, sizeof *m);
    FA_TRY(fa_bind(&state->signature[function], args, count, keywords, &call->bound, status));
    FA_TRY(fa_read_options(&call->bound, &m->request, status));
    FA_TRY(fa_call_place(state, FA_MERGE, call, status));
    FA_TRY(read_list("outs", fa_given(&call->bound, FA_ARG_outs), &m->outs, status));
    FA_TRY(read_list("lses", fa_given(&call->bound, FA_ARG_lses), &m->lses, status));
    if (PyTuple_Size(m->outs) != PyTuple_Size(m->lses))
        return fa_fail(status, FA_EVALUE, "lses has %zd arrays, but outs has %zd; accepted: one for each",
                       (ssize_t)PyTuple_Size(m->lses), (ssize_t)PyTuple_Size(m->outs));
    FA_TRY(allocate(m, status));
    FA_TRY(read_arrays(state, m, status));
    FA_TRY(fa_arrays_stream(state, call->array, call->count, &call->stream, &call->joins, status));
    m->request.count = m->count;
    m->request.outs = m->view;
    m->request.lses = m->view + m->count;
    FA_TRY(fa_merge_build(&m->request, m->parts, &call->problem, status));
    FA_TRY(fa_device_info_get(state->context, call->problem.device, &call->info, status));
    return fa_arrays_check_stream(state, &call->array[0], &call->problem, &call->stream, status);
}

static void release(merge *m) {
    fa_call_end(&m->call);
    free(m->call.array);
    free(m->name);
    free(m->view);
    free(m->parts);
    Py_XDECREF(m->outs);
    Py_XDECREF(m->lses);
}

/* Results that the caller did not give. */
static fa_code make_results(fa_state *state, fa_call *call, fa_result *results, fa_status *status) {
    const merge *m = (merge *)call;
    fa_merge *p = &call->problem.merge;
    const fa_view *given[2] = {m->request.forward.out, m->request.forward.lse};
    const fa_view *const like[2] = {m->request.outs[0], m->request.lses[0]};
    fa_operand *operands[2] = {&p->out, &p->lse};
    const fa_dtype dtypes[2] = {p->out_dtype, p->lse_dtype};
    const fa_stream stream = fa_call_result_stream(call);
    for (int n = 0; n < 2; n++) {
        if (given[n]) continue;
        FA_TRY(fa_result_make(state, &call->array[0], like[n]->ndim, like[n]->shape, dtypes[n], &stream, &results[n],
                              status));
        operands[n]->data = results[n].data;
    }
    return FA_OK;
}

static PyObject *hand_over(fa_state *state, fa_call *call, fa_result *results) {
    return fa_call_give(state, call, fa_given(&call->bound, FA_ARG_merge_out), true, results);
}

PyObject *fa_py_merge(PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *keywords) {
    static const fa_ending ending = {make_results, hand_over};
    fa_state *state = PyModule_GetState(module);
    merge m;
    fa_call *call = &m.call;
    fa_plan plan;
    fa_status status;
    PyObject *returned = NULL;
    if (read_merge(state, FA_FN_merge, args, count, keywords, &m, &status) == FA_OK &&
        fa_plan_make(&call->problem, call->info, call->forced, &plan, &status) == FA_OK)
        returned = fa_call_run(state, call, &plan, &ending, &status);
    release(&m);
    return returned ? returned : fa_raise(state, &status);
}

PyObject *fa_py_explain_merge(PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *keywords) {
    fa_state *state = PyModule_GetState(module);
    merge m;
    fa_status status;
    PyObject *answer = NULL;
    const fa_code code = read_merge(state, FA_FN_explain_merge, args, count, keywords, &m, &status);
    if (code == FA_OK) answer = fa_explain_problem(state, &m.call);
    release(&m);
    return code == FA_OK ? answer : fa_raise(state, &status);
}
