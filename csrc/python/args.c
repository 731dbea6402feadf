/* Arguments of attention() and explain(): binding names, reading options. Arrays are read in array.c, stream= in
 * stream.c. */
#include "core.h"

#include <stdlib.h>
#include <string.h>

static int argument_of(fa_state *state, PyObject *keyword) {
    PyObject *const *names = state->names.argument;
    int slot = -1;
    for (int n = 0; n < FA_ARG_COUNT; n++) /* keywords in source code are interned; no exit to mispredict */
        slot = names[n] == keyword ? n : slot;
    for (int n = 0; n < FA_ARG_COUNT && slot < 0; n++)
        if (PyUnicode_Compare(names[n], keyword) == 0) slot = n;
    return slot;
}

fa_code fa_index_read(const char *name, PyObject *value, long low, long high, const char *accepted, long *number,
                      fa_status *status) {
    PyObject *index = PyBool_Check(value) ? NULL : PyNumber_Index(value);
    if (!index) {
        if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_TypeError)) return fa_python_error(status);
        PyErr_Clear();
        return fa_wrong_type(name, value, accepted, status);
    }
    int overflow;
    *number = PyLong_AsLongAndOverflow(index, &overflow);
    Py_DECREF(index);
    if (overflow || *number < low || *number > high)
        return fa_fail(status, FA_EVALUE, "%s is out of range; accepted: %s", name, accepted);
    return FA_OK;
}

fa_code fa_args_bind(fa_state *state, PyObject *const *args, Py_ssize_t count, PyObject *keywords, fa_call *call,
                     fa_status *status) {
    char shown[160];
    memset(call->argument, 0, sizeof call->argument);
    if (count > 3)
        return fa_fail(status, FA_ETYPE, "%zd positional arguments given; accepted: q, k, v; the rest by keyword",
                       (ssize_t)count);
    for (Py_ssize_t n = 0; n < count; n++) call->argument[n] = args[n];
    Py_ssize_t named = keywords ? PyTuple_Size(keywords) : 0;
    for (Py_ssize_t n = 0; n < named; n++) {
        PyObject *keyword = PyTuple_GetItem(keywords, n);
        int slot = argument_of(state, keyword);
        if (slot < 0)
            return fa_fail(status, FA_ETYPE,
                           "unknown argument %.80s; accepted: q, k, v, causal, scale, window, softcap, bias, mask, "
                           "sinks, layout, out, return_lse, stream, kernel, batch_invariant",
                           fa_shown(keyword, shown));
        if (slot < count) return fa_fail(status, FA_ETYPE, "argument %s was given twice", fa_shown(keyword, shown));
        call->argument[slot] = args[count + n];
    }
    for (int n = FA_ARG_q; n <= FA_ARG_v; n++)
        if (!call->argument[n])
            return fa_fail(status, FA_ETYPE, "argument %s is missing; accepted: an array",
                           fa_shown(state->names.argument[n], shown));
    static const fa_argument optional[] = {FA_ARG_scale, FA_ARG_window, FA_ARG_bias,   FA_ARG_mask,
                                           FA_ARG_sinks, FA_ARG_out,    FA_ARG_stream, FA_ARG_kernel};
    for (size_t n = 0; n < sizeof optional / sizeof *optional; n++)
        if (call->argument[optional[n]] == Py_None) call->argument[optional[n]] = NULL;
    return FA_OK;
}

static fa_code read_causal(PyObject *value, fa_causal *causal, fa_status *status) {
    const char *accepted = "False, True, \"top_left\" or \"bottom_right\"";
    *causal = FA_CAUSAL_NONE;
    if (!value || value == Py_False) return FA_OK;
    if (value == Py_True) {
        *causal = FA_CAUSAL_TRUE;
        return FA_OK;
    }
    char shown[160];
    if (PyUnicode_Check(value)) {
        if (fa_text_equals(value, "top_left"))
            *causal = FA_CAUSAL_TOP_LEFT;
        else if (fa_text_equals(value, "bottom_right"))
            *causal = FA_CAUSAL_BOTTOM_RIGHT;
        else
            return fa_fail(status, FA_EVALUE, "causal is \"%.80s\"; accepted: %s", fa_shown(value, shown), accepted);
        return FA_OK;
    }
    int truth = fa_numpy_boolean(value);
    if (truth < 0) return fa_wrong_type("causal", value, accepted, status);
    *causal = truth ? FA_CAUSAL_TRUE : FA_CAUSAL_NONE;
    return FA_OK;
}

fa_code fa_args_layout(PyObject *value, fa_layout *layout, fa_status *status) {
    *layout = FA_BHSD;
    if (!value || fa_text_equals(value, "bhsd")) return FA_OK;
    *layout = FA_BSHD;
    if (fa_text_equals(value, "bshd")) return FA_OK;
    char shown[160];
    if (!PyUnicode_Check(value)) return fa_wrong_type("layout", value, "\"bhsd\" or \"bshd\"", status);
    return fa_fail(status, FA_EVALUE, "layout is \"%.80s\"; accepted: \"bhsd\" or \"bshd\"", fa_shown(value, shown));
}

fa_code fa_args_bool(const char *name, PyObject *value, bool *result, fa_status *status) {
    *result = false;
    if (!value || value == Py_False) return FA_OK;
    int truth = fa_numpy_boolean(value);
    if (truth < 0) return fa_wrong_type(name, value, "True or False", status);
    *result = truth;
    return FA_OK;
}

static fa_code read_number(const char *name, PyObject *value, double *number, fa_status *status) {
    if (fa_numpy_boolean(value) >= 0)
        return fa_wrong_type(name, value, "a float", status); /* scale=True is no factor */
    *number = PyFloat_AsDouble(value);
    if (*number != -1.0 || !PyErr_Occurred()) return FA_OK;
    const bool overflow = PyErr_ExceptionMatches(PyExc_OverflowError);
    if (!overflow && !PyErr_ExceptionMatches(PyExc_TypeError)) return fa_python_error(status); /* raised by __float__ */
    PyErr_Clear();
    if (overflow) return fa_fail(status, FA_EVALUE, "%s is too large for a float", name);
    return fa_wrong_type(name, value, "a float", status);
}

static fa_code refuse_window_side(const char *name, PyObject *number, fa_status *status) {
    char buffer[160];
    PyObject *shown = PyObject_Str(number); /* fails beyond sys.get_int_max_str_digits() */
    if (!shown) PyErr_Clear();
    fa_fail(status, FA_EVALUE, "%s bound is %.200s; accepted: an int >= 0, or None for unbounded (not -1)", name,
            shown ? fa_shown(shown, buffer) : "a negative number of thousands of digits");
    Py_XDECREF(shown);
    return status->code;
}

static fa_code read_window_side(const char *side, PyObject *value, int64_t *bound, fa_status *status) {
    *bound = FA_UNBOUNDED;
    if (value == Py_None) return FA_OK;
    char name[32];
    snprintf(name, sizeof name, "window's %s", side);
    PyObject *index = PyBool_Check(value) ? NULL : PyNumber_Index(value);
    if (!index) {
        if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_TypeError)) return fa_python_error(status);
        PyErr_Clear();
        return fa_wrong_type(name, value, "an int >= 0, or None for unbounded", status);
    }
    int overflow = 0;
    long long number = PyLong_AsLongLongAndOverflow(index, &overflow);
    fa_code code = FA_OK;
    if (overflow < 0 || (!overflow && number < 0))
        code = refuse_window_side(name, index, status);
    else
        *bound = overflow || number > FA_UNBOUNDED ? FA_UNBOUNDED : number;
    Py_DECREF(index);
    return code;
}

static fa_code read_window(PyObject *value, int64_t *left, int64_t *right, fa_status *status) {
    *left = *right = FA_UNBOUNDED;
    if (!value) return FA_OK;
    const char *accepted = "None or a pair (left, right), each an int >= 0 or None";
    if (!PyTuple_Check(value) && !PyList_Check(value)) return fa_wrong_type("window", value, accepted, status);
    Py_ssize_t size = PySequence_Size(value);
    if (size != 2) return fa_fail(status, FA_EVALUE, "window has %zd items; accepted: %s", (ssize_t)size, accepted);
    const char *const sides[2] = {"left", "right"};
    int64_t *const bounds[2] = {left, right};
    for (int n = 0; n < 2; n++) {
        PyObject *item = PySequence_GetItem(value, n);
        if (!item) return fa_python_error(status);
        fa_code code = read_window_side(sides[n], item, bounds[n], status);
        Py_DECREF(item);
        FA_TRY(code);
    }
    return FA_OK;
}

fa_code fa_args_out(PyObject *value, PyObject **out, PyObject **lse, fa_status *status) {
    const bool pair = value && PyTuple_Check(value);
    *out = pair ? NULL : value;
    *lse = NULL;
    if (!pair) return FA_OK;
    Py_ssize_t size = PyTuple_Size(value);
    if (size != 2)
        return fa_fail(status, FA_EVALUE, "out has %zd items; accepted: an array, or a pair (out, lse)", (ssize_t)size);
    *out = PyTuple_GetItem(value, 0);
    *lse = PyTuple_GetItem(value, 1);
    return FA_OK;
}

static fa_code read_out(fa_call *call, fa_status *status) {
    PyObject *value = call->argument[FA_ARG_out];
    call->pair = value && PyTuple_Check(value);
    return fa_args_out(value, &call->array[FA_OUT].object, &call->array[FA_LSE].object, status);
}

/* The operation's variable as os.environ has it: a look into its dict, which takes a third of the time of getenv(). */
static fa_code read_environment(fa_state *state, fa_op op, const fa_kernel **kernel, const char **listed_name,
                                fa_status *status) {
    static const char *const variables[FA_OP_COUNT] = FA_KERNEL_VARIABLES;
    PyObject *value = NULL;
    const char *name = NULL;
    if (!state->environment)
        name = getenv(variables[op]);
    else if (fa_dict_get(state->environment, state->names.kernel_variable[op], &value) < 0)
        return fa_python_error(status);
    if (value && PyBytes_Check(value)) name = PyBytes_AsString(value);
    fa_code code = FA_OK;
    if (name && *name) code = fa_kernel_named(state, op, variables[op], name, kernel, listed_name, status);
    Py_XDECREF(value);
    return code;
}

fa_code fa_args_kernel(fa_state *state, fa_op op, PyObject *value, const fa_kernel **kernel, const char **listed_name,
                       fa_status *status) {
    *kernel = NULL;
    if (!value) return read_environment(state, op, kernel, listed_name, status);
    if (!PyUnicode_Check(value)) return fa_wrong_type("kernel", value, "None or a name of fa_ext.kernels()", status);
    char shown[160];
    return fa_kernel_named(state, op, "kernel", fa_shown(value, shown), kernel, listed_name, status);
}

fa_code fa_args_values(PyObject *const *arg, fa_options *options, fa_status *status) {
    memset(options, 0, sizeof *options);
    options->has_scale = arg[FA_ARG_scale] != NULL;
    FA_TRY(read_causal(arg[FA_ARG_causal], &options->causal, status));
    if (options->has_scale) FA_TRY(read_number("scale", arg[FA_ARG_scale], &options->scale, status));
    FA_TRY(read_window(arg[FA_ARG_window], &options->window_left, &options->window_right, status));
    if (arg[FA_ARG_softcap]) FA_TRY(read_number("softcap", arg[FA_ARG_softcap], &options->softcap, status));
    FA_TRY(fa_args_layout(arg[FA_ARG_layout], &options->layout, status));
    FA_TRY(fa_args_bool("return_lse", arg[FA_ARG_return_lse], &options->return_lse, status));
    return fa_args_bool("batch_invariant", arg[FA_ARG_batch_invariant], &options->batch_invariant, status);
}

fa_code fa_args_options(fa_state *state, fa_call *call, fa_status *status) {
    PyObject *const *arg = call->argument;
    FA_TRY(fa_args_values(arg, &call->request.options, status));
    FA_TRY(read_out(call, status));
    return fa_args_kernel(state, FA_FORWARD, arg[FA_ARG_kernel], &call->forced, &call->forced_name, status);
}
