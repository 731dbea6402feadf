/* merge() and explain_merge(): arguments -> views -> problem -> plan -> launch, as call.c does for attention(). */
#include "core.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "problem_merge.h"

enum { M_OUTS, M_LSES, M_SINKS, M_LAYOUT, M_OUT, M_STREAM, M_KERNEL, M_ARGUMENTS };

static const char *const names[M_ARGUMENTS] = {"outs", "lses", "sinks", "layout", "out", "stream", "kernel"};

/* A call. Its arrays are outs[0], the other outs, the lses, then sinks, out and lse. */
typedef struct merge {
    PyObject *argument[M_ARGUMENTS]; /* borrowed; NULL when absent or None */
    PyObject *outs, *lses;           /* the lists as tuples, strong */
    int count, arrays;
    fa_array *array;
    char (*name)[32];
    const fa_view **view;
    fa_part *parts;
    fa_stream stream;
    bool joins, pair;
    const fa_kernel *forced;
    const char *forced_name;
    const fa_device_info *info;
    fa_merge_request request;
    fa_problem problem;
} merge;

static fa_code bind(PyObject *const *args, Py_ssize_t count, PyObject *keywords, merge *m, fa_status *status) {
    const Py_ssize_t named = keywords ? PyTuple_Size(keywords) : 0;
    memset(m->argument, 0, sizeof m->argument);
    if (count > 2)
        return fa_fail(status, FA_ETYPE, "merge() takes 2 positional arguments, but %zd were given", (ssize_t)count);
    for (Py_ssize_t n = 0; n < count + named; n++) {
        int slot = (int)n;
        if (n >= count) {
            PyObject *keyword = PyTuple_GetItem(keywords, n - count);
            for (slot = 0; slot < M_ARGUMENTS && !fa_text_equals(keyword, names[slot]); slot++) {
            }
            char given[80] = "?";
            const char *text = slot == M_ARGUMENTS ? PyUnicode_AsUTF8AndSize(keyword, NULL) : NULL;
            if (text) snprintf(given, sizeof given, "%s", text);
            PyErr_Clear();
            if (slot == M_ARGUMENTS) return fa_fail(status, FA_ETYPE, "merge() has no argument '%s'", given);
            if (slot < count) return fa_fail(status, FA_ETYPE, "merge() got %s twice", names[slot]);
        }
        m->argument[slot] = args[n] == Py_None ? NULL : args[n];
    }
    return FA_OK;
}

/* outs or lses as a tuple. */
static fa_code read_list(const char *name, PyObject *value, PyObject **items, fa_status *status) {
    if (!value) return fa_fail(status, FA_ETYPE, "%s is missing; accepted: a list of arrays", name);
    if (!PyList_Check(value) && !PyTuple_Check(value)) return fa_wrong_type(name, value, "a list of arrays", status);
    *items = PySequence_Tuple(value);
    if (!*items) return fa_python_error(status);
    const Py_ssize_t size = PyTuple_Size(*items);
    if (size == 0) return fa_fail(status, FA_EVALUE, "%s is empty; accepted: a list of at least one array", name);
    if (size > INT_MAX / 8) return fa_fail(status, FA_EVALUE, "%s is too long", name);
    return FA_OK;
}

static fa_code allocate(merge *m, fa_status *status) {
    m->count = (int)PyTuple_Size(m->outs);
    m->arrays = 2 * m->count + 3;
    m->array = calloc((size_t)m->arrays, sizeof *m->array);
    m->name = calloc((size_t)m->arrays, sizeof *m->name);
    m->view = calloc((size_t)m->arrays, sizeof *m->view);
    m->parts = calloc((size_t)m->count, sizeof *m->parts);
    if (m->array && m->name && m->view && m->parts) return FA_OK;
    m->arrays = m->array ? m->arrays : 0;
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
    fa_array *first = &m->array[0], *sinks = &m->array[2 * m->count];
    for (int n = 0; n < 2 * m->count; n++) {
        const bool is_out = n < m->count;
        const int index = is_out ? n : n - m->count;
        snprintf(m->name[n], sizeof m->name[n], "%s[%d]", is_out ? "outs" : "lses", index);
        PyObject *object = PyTuple_GetItem(is_out ? m->outs : m->lses, index);
        FA_TRY(fa_array_read(state, &m->array[n], m->name[n], object, n ? first : NULL, status));
        FA_TRY(check_kind(&m->array[n], first, status));
    }
    if (m->argument[M_SINKS]) FA_TRY(fa_array_read(state, sinks, "sinks", m->argument[M_SINKS], first, status));
    PyObject *results[2];
    static const char *const result_names[2] = {"out", "lse"};
    FA_TRY(fa_args_out(m->argument[M_OUT], &results[0], &results[1], status));
    for (int n = 0; n < 2; n++) {
        fa_array *result = sinks + 1 + n;
        if (!results[n]) continue;
        FA_TRY(fa_array_read(state, result, result_names[n], results[n], first, status));
        if (result->type->library == FA_LIB_JAX)
            return fa_fail(status, FA_EBUFFER, "%s is a JAX array, which is immutable; leave it out", result_names[n]);
    }
    return FA_OK;
}

/* Arguments -> problem. */
static fa_code read_merge(fa_state *state, PyObject *const *args, Py_ssize_t count, PyObject *keywords, merge *m,
                          fa_status *status) {
    memset(m, 0, sizeof *m);
    FA_TRY(bind(args, count, keywords, m, status));
    m->pair = m->argument[M_OUT] && PyTuple_Check(m->argument[M_OUT]);
    FA_TRY(fa_args_layout(m->argument[M_LAYOUT], &m->request.layout, status));
    FA_TRY(fa_args_kernel(state, FA_MERGE, m->argument[M_KERNEL], &m->forced, &m->forced_name, status));
    FA_TRY(fa_stream_parse(state, m->argument[M_STREAM], &m->stream, status));
    FA_TRY(read_list("outs", m->argument[M_OUTS], &m->outs, status));
    FA_TRY(read_list("lses", m->argument[M_LSES], &m->lses, status));
    if (PyTuple_Size(m->outs) != PyTuple_Size(m->lses))
        return fa_fail(status, FA_EVALUE, "lses has %zd arrays, but outs has %zd; accepted: one for each",
                       (ssize_t)PyTuple_Size(m->lses), (ssize_t)PyTuple_Size(m->outs));
    FA_TRY(allocate(m, status));
    FA_TRY(read_arrays(state, m, status));
    FA_TRY(fa_arrays_stream(state, m->array, m->arrays, &m->stream, &m->joins, status));
    for (int n = 0; n < m->arrays; n++) m->view[n] = m->array[n].object ? &m->array[n].view : NULL;
    const fa_view *const *rest = m->view + 2 * m->count;
    m->request.count = m->count;
    m->request.outs = m->view;
    m->request.lses = m->view + m->count;
    m->request.sinks = rest[0], m->request.out = rest[1], m->request.lse = rest[2];
    FA_TRY(fa_merge_build(&m->request, m->parts, &m->problem, status));
    FA_TRY(fa_device_info_get(state->context, m->problem.device, &m->info, status));
    return fa_arrays_check_stream(state, &m->array[0], &m->problem, &m->stream, status);
}

static void release(merge *m) {
    for (int n = 0; n < m->arrays; n++)
        if (m->array[n].type) fa_array_release(&m->array[n]);
    free(m->array);
    free(m->name);
    free(m->view);
    free(m->parts);
    Py_XDECREF(m->outs);
    Py_XDECREF(m->lses);
}

/* Results that the caller did not give. The device is current. */
static fa_code make_results(fa_state *state, merge *m, fa_result results[2], fa_status *status) {
    const fa_array *first = &m->array[0];
    const fa_view *views[2] = {m->request.outs[0], m->request.lses[0]};
    fa_merge *p = &m->problem.merge;
    fa_operand *operands[2] = {&p->out, &p->lse};
    const fa_dtype dtypes[2] = {p->out_dtype, p->lse_dtype};
    const fa_stream stream = m->problem.device.kind == FA_CUDA ? m->stream : (fa_stream){NULL, false, NULL};
    for (int n = 0; n < 2; n++) {
        if (operands[n]->data || m->array[2 * m->count + 1 + n].object) continue;
        FA_TRY(fa_result_make(state, first, views[n]->ndim, views[n]->shape, dtypes[n], &stream, &results[n], status));
        operands[n]->data = results[n].data;
    }
    return FA_OK;
}

/* (out, lse): the caller's own objects where given. */
static PyObject *hand_over(fa_state *state, merge *m, fa_result results[2]) {
    if (m->pair) return Py_NewRef(m->argument[M_OUT]);
    PyObject *out =
        m->argument[M_OUT] ? Py_NewRef(m->argument[M_OUT]) : fa_result_finish(state, &m->array[0], &results[0]);
    PyObject *lse = out ? fa_result_finish(state, &m->array[0], &results[1]) : NULL;
    PyObject *both = lse ? PyTuple_Pack(2, out, lse) : NULL;
    Py_XDECREF(out);
    Py_XDECREF(lse);
    return both;
}

PyObject *fa_merge_py(PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *keywords) {
    fa_state *state = PyModule_GetState(module);
    merge m;
    fa_plan plan;
    fa_status status;
    fa_result results[2] = {{NULL, NULL}, {NULL, NULL}};
    PyObject *returned = NULL;
    fa_code code;
    int previous;
    FA_TRY_GOTO(code, read_merge(state, args, count, keywords, &m, &status), done);
    FA_TRY_GOTO(code, fa_plan_make(&m.problem, m.info, m.forced, &plan, &status), done);
    FA_TRY_GOTO(code, fa_device_enter(state->context, m.problem.device, &previous, &status), done);
    code = make_results(state, &m, results, &status);
    if (code == FA_OK)
        code = fa_arrays_run(state, m.array, m.arrays, &m.problem, &plan, m.info, &m.stream, m.joins, &status);
    if (code == FA_OK) {
        returned = hand_over(state, &m, results);
        if (!returned) code = fa_python_error(&status);
    }
    fa_device_leave(m.problem.device, previous);
done:
    Py_XDECREF(results[0].object);
    Py_XDECREF(results[1].object);
    release(&m);
    return code == FA_OK ? returned : fa_raise(state, &status);
}

PyObject *fa_explain_merge(PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *keywords) {
    fa_state *state = PyModule_GetState(module);
    merge m;
    fa_status status;
    PyObject *answer = NULL;
    const fa_code code = read_merge(state, args, count, keywords, &m, &status);
    if (code == FA_OK) answer = fa_explain_problem(state, &m.problem, m.info, m.forced, m.forced_name);
    release(&m);
    return code == FA_OK ? answer : fa_raise(state, &status);
}
