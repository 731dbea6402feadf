/* attention_backward() and explain_backward(): arguments -> views -> problem -> plan -> launch, as call.c does for
 * attention(). */
#include "core.h"

#include <string.h>

#include "problem_backward.h"

/* Arguments in the order of the signature; those up to lse may be positional. What attention() has too is read as
 * there: `shared` is its number, or -1. `none`: None stands for its absence. */
#define ARGUMENTS(X)                                                                                                   \
    X(dout, -1, true)                                                                                                  \
    X(q, FA_ARG_q, false)                                                                                              \
    X(k, FA_ARG_k, false)                                                                                              \
    X(v, FA_ARG_v, false)                                                                                              \
    X(out, -1, false)                                                                                                  \
    X(lse, -1, false)                                                                                                  \
    X(dlse, -1, true)                                                                                                  \
    X(causal, FA_ARG_causal, false)                                                                                    \
    X(scale, FA_ARG_scale, true)                                                                                       \
    X(window, FA_ARG_window, true)                                                                                     \
    X(softcap, FA_ARG_softcap, false)                                                                                  \
    X(bias, FA_ARG_bias, true)                                                                                         \
    X(mask, FA_ARG_mask, true)                                                                                         \
    X(sinks, FA_ARG_sinks, true)                                                                                       \
    X(layout, FA_ARG_layout, false)                                                                                    \
    X(wrt, -1, false)                                                                                                  \
    X(grads, -1, true)                                                                                                 \
    X(accumulate, -1, false)                                                                                           \
    X(deterministic, -1, false)                                                                                        \
    X(stream, FA_ARG_stream, true)                                                                                     \
    X(kernel, FA_ARG_kernel, true)                                                                                     \
    X(batch_invariant, FA_ARG_batch_invariant, false)                                                                  \
    X(device, -1, true)

enum {
#define NUMBER(name, shared, none) ARG_##name,
    ARGUMENTS(NUMBER)
#undef NUMBER
        ARG_COUNT
};
enum { POSITIONAL = ARG_lse + 1 };

static const struct {
    const char *name;
    int shared;
    bool none;
} arguments[ARG_COUNT] = {
#define ENTRY(name, shared, none) {#name, shared, none},
    ARGUMENTS(ENTRY)
#undef ENTRY
};

/* Arrays of a call. q comes first: it decides for the others. */
enum {
    A_Q,
    A_K,
    A_V,
    A_OUT,
    A_LSE,
    A_DOUT,
    A_DLSE,
    A_BIAS,
    A_MASK,
    A_SINKS,
    A_GRADS,
    A_COUNT = A_GRADS + FA_GRAD_COUNT
};

typedef struct backward {
    PyObject *argument[ARG_COUNT]; /* borrowed; NULL when absent, or None where that means absent */
    PyObject *wrt, *grads;         /* as tuples, strong; grads NULL when absent */
    int count;                     /* names in wrt */
    fa_grad order[FA_GRAD_COUNT];  /* what they name */
    fa_array array[A_COUNT];       /* object NULL when absent */
    char name[FA_GRAD_COUNT][32];  /* of the arrays of grads */
    fa_stream stream;
    bool joins;
    const fa_kernel *forced;
    const char *forced_name;
    fa_device_info described;
    const fa_device_info *info;
    fa_backward_request request;
    fa_problem problem;
} backward;

static fa_code refuse_name(PyObject *keyword, bool asks, fa_status *status) {
    char accepted[400] = "";
    size_t used = 0;
    for (int n = 0; n < (asks ? ARG_COUNT : ARG_device); n++)
        used += (size_t)snprintf(accepted + used, sizeof accepted - used, "%s%s", n ? ", " : "", arguments[n].name);
    const char *text = PyUnicode_AsUTF8AndSize(keyword, NULL);
    if (!text) PyErr_Clear();
    return fa_fail(status, FA_ETYPE, "unknown argument %.80s; accepted: %s", text ? text : "?", accepted);
}

/* `asks`: explain_backward(), which alone has device=. */
static fa_code bind(PyObject *const *args, Py_ssize_t count, PyObject *keywords, bool asks, backward *b,
                    fa_status *status) {
    const Py_ssize_t named = keywords ? PyTuple_Size(keywords) : 0;
    bool given[ARG_COUNT] = {false};
    if (count > POSITIONAL)
        return fa_fail(status, FA_ETYPE,
                       "%zd positional arguments given; accepted: dout, q, k, v, out, lse; the rest by keyword",
                       (ssize_t)count);
    for (Py_ssize_t n = 0; n < count + named; n++) {
        int slot = (int)n;
        if (n >= count) {
            PyObject *keyword = PyTuple_GetItem(keywords, n - count);
            for (slot = 0; slot < ARG_COUNT && !fa_text_equals(keyword, arguments[slot].name); slot++) {
            }
            if (slot == ARG_COUNT || (slot == ARG_device && !asks)) return refuse_name(keyword, asks, status);
            if (given[slot]) return fa_fail(status, FA_ETYPE, "argument %s was given twice", arguments[slot].name);
        }
        given[slot] = true;
        b->argument[slot] = arguments[slot].none && args[n] == Py_None ? NULL : args[n];
    }
    for (int n = 0; n < POSITIONAL; n++)
        if (!given[n])
            return fa_fail(status, FA_ETYPE, "argument %s is missing; accepted: an array%s", arguments[n].name,
                           n == ARG_dout ? ", or None for zeros" : "");
    return FA_OK;
}

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
    PyObject *value = b->argument[ARG_wrt];
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
    PyObject *value = b->argument[ARG_grads];
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
        fa_array *array = &b->array[A_GRADS + b->order[n]];
        if (item == Py_None) continue;
        snprintf(b->name[n], sizeof b->name[n], "grads[\"%s\"]", fa_grad_name(b->order[n]));
        FA_TRY(fa_array_read(state, array, b->name[n], item, &b->array[A_Q], status));
        if (array->type->library == FA_LIB_JAX)
            return fa_fail(status, FA_EBUFFER, "%s is a JAX array, which is immutable; leave it out", b->name[n]);
    }
    return FA_OK;
}

static fa_code read_arrays(fa_state *state, backward *b, fa_status *status) {
    static const int slots[A_GRADS] = {ARG_q,    ARG_k,    ARG_v,    ARG_out,  ARG_lse,
                                       ARG_dout, ARG_dlse, ARG_bias, ARG_mask, ARG_sinks};
    for (int n = 0; n < A_GRADS; n++)
        if (b->argument[slots[n]])
            FA_TRY(fa_array_read(state, &b->array[n], arguments[slots[n]].name, b->argument[slots[n]],
                                 n ? &b->array[A_Q] : NULL, status));
    return read_grads(state, b, status);
}

static fa_code read_options(fa_state *state, backward *b, fa_status *status) {
    PyObject *shared[FA_ARG_COUNT] = {NULL};
    for (int n = 0; n < ARG_COUNT; n++)
        if (arguments[n].shared >= 0) shared[arguments[n].shared] = b->argument[n];
    FA_TRY(fa_args_values(shared, &b->request.forward.options, status));
    FA_TRY(read_wrt(b, status));
    FA_TRY(fa_args_bool("accumulate", b->argument[ARG_accumulate], &b->request.accumulate, status));
    b->request.deterministic = true;
    if (b->argument[ARG_deterministic])
        FA_TRY(fa_args_bool("deterministic", b->argument[ARG_deterministic], &b->request.deterministic, status));
    FA_TRY(fa_args_kernel(state, FA_BACKWARD, b->argument[ARG_kernel], &b->forced, &b->forced_name, status));
    return fa_stream_parse(state, b->argument[ARG_stream], &b->stream, status);
}

static const fa_view *view_or_null(const fa_array *array) { return array->object ? &array->view : NULL; }

static void fill_request(backward *b) {
    fa_request *forward = &b->request.forward;
    forward->q = &b->array[A_Q].view;
    forward->k = &b->array[A_K].view;
    forward->v = &b->array[A_V].view;
    forward->out = &b->array[A_OUT].view;
    forward->lse = &b->array[A_LSE].view;
    forward->bias = view_or_null(&b->array[A_BIAS]);
    forward->mask = view_or_null(&b->array[A_MASK]);
    forward->sinks = view_or_null(&b->array[A_SINKS]);
    b->request.dout = view_or_null(&b->array[A_DOUT]);
    b->request.dlse = view_or_null(&b->array[A_DLSE]);
    for (int n = 0; n < FA_GRAD_COUNT; n++) b->request.grad[n] = view_or_null(&b->array[A_GRADS + n]);
}

/* Arguments -> problem. */
static fa_code read_backward(fa_state *state, PyObject *const *args, Py_ssize_t count, PyObject *keywords, bool asks,
                             backward *b, fa_status *status) {
    memset(b, 0, sizeof *b);
    FA_TRY(bind(args, count, keywords, asks, b, status));
    FA_TRY(read_options(state, b, status));
    FA_TRY(read_arrays(state, b, status));
    FA_TRY(fa_arrays_stream(state, b->array, A_COUNT, &b->stream, &b->joins, status));
    if (b->argument[ARG_device]) {
        FA_TRY(fa_explain_device(state, b->argument[ARG_device], &b->described, status));
        for (int n = 0; n < A_COUNT; n++) b->array[n].view.device = b->described.device;
        b->info = &b->described;
    }
    fill_request(b);
    FA_TRY(fa_backward_build(&b->request, &b->problem, status));
    if (b->info) return FA_OK;
    FA_TRY(fa_device_info_get(state->context, b->problem.device, &b->info, status));
    return fa_arrays_check_stream(state, &b->array[A_Q], &b->problem, &b->stream, status);
}

static void release(backward *b) {
    for (int n = 0; n < A_COUNT; n++)
        if (b->array[n].type) fa_array_release(&b->array[n]);
    Py_XDECREF(b->wrt);
    Py_XDECREF(b->grads);
}

/* Gradients that the caller did not give. The device is current. */
static fa_code make_results(fa_state *state, backward *b, fa_result results[FA_GRAD_COUNT], fa_status *status) {
    static const int subjects[FA_GRAD_COUNT] = {A_Q, A_K, A_V, A_BIAS, A_SINKS};
    const fa_stream stream = b->problem.device.kind == FA_CUDA ? b->stream : (fa_stream){NULL, false, NULL};
    for (int n = 0; n < b->count; n++) {
        const fa_grad grad = b->order[n];
        if (b->array[A_GRADS + grad].object) continue;
        const fa_view *view = &b->array[subjects[grad]].view;
        FA_TRY(fa_result_make(state, &b->array[A_Q], view->ndim, view->shape, b->problem.backward.grad_dtype[grad],
                              &stream, &results[grad], status));
        b->problem.backward.grad[grad].data = results[grad].data;
    }
    return FA_OK;
}

/* The gradients in the order of wrt: the caller's own objects where given. */
static PyObject *hand_over(fa_state *state, backward *b, fa_result results[FA_GRAD_COUNT]) {
    PyObject *tuple = PyTuple_New(b->count);
    for (int n = 0; tuple && n < b->count; n++) {
        const fa_array *given = &b->array[A_GRADS + b->order[n]];
        PyObject *item =
            given->object ? Py_NewRef(given->object) : fa_result_finish(state, &b->array[A_Q], &results[b->order[n]]);
        if (!item || PyTuple_SetItem(tuple, n, item) < 0) Py_CLEAR(tuple);
    }
    return tuple;
}

PyObject *fa_attention_backward(PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *keywords) {
    fa_state *state = PyModule_GetState(module);
    backward b;
    fa_plan plan;
    fa_status status;
    fa_result results[FA_GRAD_COUNT] = {{NULL, NULL}};
    PyObject *returned = NULL;
    fa_code code;
    int previous;
    FA_TRY_GOTO(code, read_backward(state, args, count, keywords, false, &b, &status), done);
    FA_TRY_GOTO(code, fa_plan_make(&b.problem, b.info, b.forced, &plan, &status), done);
    FA_TRY_GOTO(code, fa_device_enter(state->context, b.problem.device, &previous, &status), done);
    code = make_results(state, &b, results, &status);
    if (code == FA_OK)
        code = fa_arrays_run(state, b.array, A_COUNT, &b.problem, &plan, b.info, &b.stream, b.joins, &status);
    if (code == FA_OK) {
        returned = hand_over(state, &b, results);
        if (!returned) code = fa_python_error(&status);
    }
    fa_device_leave(b.problem.device, previous);
done:
    for (int n = 0; n < FA_GRAD_COUNT; n++) Py_XDECREF(results[n].object);
    release(&b);
    return code == FA_OK ? returned : fa_raise(state, &status);
}

PyObject *fa_explain_backward(PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *keywords) {
    fa_state *state = PyModule_GetState(module);
    backward b;
    fa_status status;
    PyObject *answer = NULL;
    const fa_code code = read_backward(state, args, count, keywords, true, &b, &status);
    if (code == FA_OK) answer = fa_explain_problem(state, &b.problem, b.info, b.forced, b.forced_name);
    release(&b);
    return code == FA_OK ? answer : fa_raise(state, &status);
}
