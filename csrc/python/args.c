/* Readers of arguments that are no arrays: a name for messages, the value, and the field of the request to fill. Which
 * argument has which reader is said in signature.def. */
#include "call.h"

#include <stdio.h>

fa_code fa_read_index(const char *name, PyObject *value, long low, long high, const char *accepted, long *number,
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
    if (!overflow && *number >= low && *number <= high) return FA_OK;
    char given[32] = "";
    if (!overflow) snprintf(given, sizeof given, "%ld, ", *number);
    return fa_fail(status, FA_EVALUE, "%s is %sout of range; accepted: %s", name, given, accepted);
}

fa_code fa_read_causal(const char *name, PyObject *value, void *field, fa_status *status) {
    const char *accepted = "False, True, \"top_left\" or \"bottom_right\"";
    fa_causal *causal = field;
    if (value == Py_False || value == Py_True) {
        *causal = value == Py_True ? FA_CAUSAL_TRUE : FA_CAUSAL_NONE;
        return FA_OK;
    }
    char shown[160];
    if (PyUnicode_Check(value)) {
        if (fa_text_equals(value, "top_left"))
            *causal = FA_CAUSAL_TOP_LEFT;
        else if (fa_text_equals(value, "bottom_right"))
            *causal = FA_CAUSAL_BOTTOM_RIGHT;
        else
            return fa_fail(status, FA_EVALUE, "%s is \"%.80s\"; accepted: %s", name, fa_shown(value, shown), accepted);
        return FA_OK;
    }
    int truth = fa_numpy_boolean(value);
    if (truth < 0) return fa_wrong_type(name, value, accepted, status);
    *causal = truth ? FA_CAUSAL_TRUE : FA_CAUSAL_NONE;
    return FA_OK;
}

fa_code fa_read_layout(const char *name, PyObject *value, void *field, fa_status *status) {
    const char *accepted = "\"bhsd\" or \"bshd\"";
    fa_layout *layout = field;
    *layout = FA_BHSD;
    if (fa_text_equals(value, "bhsd")) return FA_OK;
    *layout = FA_BSHD;
    if (fa_text_equals(value, "bshd")) return FA_OK;
    char shown[160];
    if (!PyUnicode_Check(value)) return fa_wrong_type(name, value, accepted, status);
    return fa_fail(status, FA_EVALUE, "%s is \"%.80s\"; accepted: %s", name, fa_shown(value, shown), accepted);
}

fa_code fa_read_boolean(const char *name, PyObject *value, void *field, fa_status *status) {
    const int truth = value == Py_True ? 1 : value == Py_False ? 0 : fa_numpy_boolean(value);
    if (truth < 0) return fa_wrong_type(name, value, "True or False", status);
    *(bool *)field = truth;
    return FA_OK;
}

static fa_code read_number(const char *name, PyObject *value, const char *accepted, double *number, fa_status *status) {
    if (fa_numpy_boolean(value) >= 0) return fa_wrong_type(name, value, accepted, status); /* scale=True is no factor */
    *number = PyFloat_AsDouble(value);
    if (*number != -1.0 || !PyErr_Occurred()) return FA_OK;
    const bool overflow = PyErr_ExceptionMatches(PyExc_OverflowError);
    if (!overflow && !PyErr_ExceptionMatches(PyExc_TypeError)) return fa_python_error(status); /* raised by __float__ */
    PyErr_Clear();
    if (overflow) return fa_fail(status, FA_EVALUE, "%s is too large for a float; accepted: %s", name, accepted);
    return fa_wrong_type(name, value, accepted, status);
}

fa_code fa_read_number(const char *name, PyObject *value, void *field, fa_status *status) {
    return read_number(name, value, "a finite number", field, status);
}

/* `field` is the scale of options. */
fa_code fa_read_scale(const char *name, PyObject *value, void *field, fa_status *status) {
    fa_options *options = (fa_options *)((char *)field - offsetof(fa_options, scale));
    options->has_scale = true;
    return read_number(name, value, "a finite number, or None for 1/sqrt(head_dim)", field, status);
}

static fa_code refuse_negative(const char *name, PyObject *number, const char *accepted, fa_status *status) {
    char buffer[160];
    PyObject *shown = PyObject_Str(number); /* fails beyond sys.get_int_max_str_digits() */
    if (!shown) PyErr_Clear();
    fa_fail(status, FA_EVALUE, "%s is %.200s; accepted: %s", name,
            shown ? fa_shown(shown, buffer) : "a negative number of thousands of digits", accepted);
    Py_XDECREF(shown);
    return status->code;
}

/* An int >= 0; what is above `most` counts as that. */
static fa_code read_count(const char *name, PyObject *value, int64_t most, const char *accepted, int64_t *count,
                          fa_status *status) {
    PyObject *index = PyBool_Check(value) ? NULL : PyNumber_Index(value);
    if (!index) {
        if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_TypeError)) return fa_python_error(status);
        PyErr_Clear();
        return fa_wrong_type(name, value, accepted, status);
    }
    int overflow = 0;
    long long number = PyLong_AsLongLongAndOverflow(index, &overflow);
    fa_code code = FA_OK;
    if (overflow < 0 || (!overflow && number < 0))
        code = refuse_negative(name, index, accepted, status);
    else
        *count = overflow || number > most ? most : number;
    Py_DECREF(index);
    return code;
}

fa_code fa_read_count(const char *name, PyObject *value, void *field, fa_status *status) {
    return read_count(name, value, FA_UNBOUNDED - 1, "an int >= 0, or None", field, status);
}

static fa_code read_window_side(const char *window, const char *side, PyObject *value, int64_t *bound,
                                fa_status *status) {
    *bound = FA_UNBOUNDED;
    if (value == Py_None) return FA_OK;
    char name[32];
    snprintf(name, sizeof name, "%s's %s bound", window, side);
    return read_count(name, value, FA_UNBOUNDED, "an int >= 0, or None for unbounded (not -1)", bound, status);
}

/* `field` is the left bound of options. */
fa_code fa_read_window(const char *name, PyObject *value, void *field, fa_status *status) {
    fa_options *options = (fa_options *)((char *)field - offsetof(fa_options, window_left));
    const char *accepted = "None or a pair (left, right), each an int >= 0 or None";
    if (!PyTuple_Check(value) && !PyList_Check(value)) return fa_wrong_type(name, value, accepted, status);
    Py_ssize_t size = PySequence_Size(value);
    if (size != 2) return fa_fail(status, FA_EVALUE, "%s has %zd items; accepted: %s", name, (ssize_t)size, accepted);
    const char *const sides[2] = {"left", "right"};
    int64_t *const bounds[2] = {&options->window_left, &options->window_right};
    for (int n = 0; n < 2; n++) {
        PyObject *item = PySequence_GetItem(value, n);
        if (!item) return fa_python_error(status);
        fa_code code = read_window_side(name, sides[n], item, bounds[n], status);
        Py_DECREF(item);
        FA_TRY(code);
    }
    return FA_OK;
}
