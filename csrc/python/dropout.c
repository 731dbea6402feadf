/* Reader of dropout=: see fa_dropout in fa.h. */
#include "call.h"

#include <stdio.h>

#define ACCEPTED "None, (p, seed), (p, seed, offset), (p, seed, offset, origin, heads) or (p, state)"

/* An int from 0 to `largest`. */
static fa_code read_whole(const char *field, PyObject *value, uint64_t largest, uint64_t *number, fa_status *status) {
    char name[48], shown[160];
    snprintf(name, sizeof name, "dropout's %s", field);
    PyObject *index = PyBool_Check(value) ? NULL : PyNumber_Index(value);
    if (!index) {
        if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_TypeError)) return fa_python_error(status);
        PyErr_Clear();
        return fa_wrong_type(name, value, "an int", status);
    }
    *number = PyLong_AsUnsignedLongLong(index);
    const bool outside = *number == UINT64_MAX && PyErr_Occurred();
    if (outside) PyErr_Clear();
    if (outside || *number > largest) {
        PyObject *text = PyObject_Str(index); /* fails beyond sys.get_int_max_str_digits() */
        if (!text) PyErr_Clear();
        fa_fail(status, FA_EVALUE, "%s is %.80s; accepted: 0 to %llu", name,
                text ? fa_shown(text, shown) : "a number of thousands of digits", (unsigned long long)largest);
        Py_XDECREF(text);
        Py_DECREF(index);
        return status->code;
    }
    Py_DECREF(index);
    return FA_OK;
}

static fa_code read_word(const char *field, PyObject *value, uint64_t largest, uint32_t *word, fa_status *status) {
    uint64_t number;
    FA_TRY(read_whole(field, value, largest, &number, status));
    *word = (uint32_t)number;
    return FA_OK;
}

static fa_code read_origin(PyObject *value, uint32_t origin[4], fa_status *status) {
    static const char *const names[4] = {"origin[0]", "origin[1]", "origin[2]", "origin[3]"};
    const char *accepted = "four ints (b0, h0, i0, j0)";
    if (!PyTuple_Check(value) && !PyList_Check(value))
        return fa_wrong_type("dropout's origin", value, accepted, status);
    if (PySequence_Size(value) != 4)
        return fa_fail(status, FA_EVALUE, "dropout's origin has %zd items; accepted: %s",
                       (ssize_t)PySequence_Size(value), accepted);
    for (int n = 0; n < 4; n++) {
        PyObject *item = PySequence_GetItem(value, n);
        if (!item) return fa_python_error(status);
        const fa_code code = read_word(names[n], item, INT32_MAX, &origin[n], status);
        Py_DECREF(item);
        FA_TRY(code);
    }
    return FA_OK;
}

/* Whether the value is an array with axes; an int, as an array without is, is a seed. */
static fa_code is_array(fa_state *state, PyObject *value, bool *found, fa_status *status) {
    PyObject *const protocols[] = {state->names.__dlpack__, state->names.__cuda_array_interface__};
    PyObject *attribute, *ndim;
    *found = false;
    for (int n = 0; n < 2 && !*found; n++) {
        const int has = fa_optional_attribute(value, protocols[n], &attribute);
        if (has < 0) return fa_python_error(status);
        Py_XDECREF(attribute);
        *found = has;
    }
    if (!*found) return FA_OK;
    if (fa_optional_attribute(value, state->names.ndim, &ndim) < 0) return fa_python_error(status);
    *found = !ndim || !PyLong_Check(ndim) || PyLong_AsLong(ndim) != 0;
    Py_XDECREF(ndim);
    return PyErr_Occurred() ? fa_python_error(status) : FA_OK;
}

/* The items after p. */
static fa_code read_rest(fa_state *state, fa_call *call, PyObject *const *item, Py_ssize_t count, fa_request *request,
                         fa_status *status) {
    fa_dropout *dropout = &request->options.dropout;
    uint64_t seed;
    bool array = false;
    if (count == 2 && !PyLong_Check(item[1])) FA_TRY(is_array(state, item[1], &array, status));
    if (array) return fa_call_array(state, call, "dropout's state", item[1], &request->dropout_state, status);
    FA_TRY(read_whole("seed", item[1], UINT64_MAX, &seed, status));
    dropout->seed[0] = (uint32_t)seed, dropout->seed[1] = (uint32_t)(seed >> 32);
    if (count > 2) FA_TRY(read_word("offset", item[2], UINT32_MAX, &dropout->offset, status));
    if (count < 5) return FA_OK;
    FA_TRY(read_origin(item[3], dropout->origin, status));
    FA_TRY(read_word("heads", item[4], INT32_MAX, &dropout->heads, status));
    if (!dropout->heads) return fa_fail(status, FA_EVALUE, "dropout's heads is 0; accepted: 1 to %d", INT32_MAX);
    return FA_OK;
}

fa_code fa_call_dropout(fa_state *state, fa_call *call, fa_request *request, fa_status *status) {
    PyObject *value = fa_given(&call->bound, FA_ARG_dropout), *item[5];
    double p;
    if (!value) return FA_OK;
    if (!PyTuple_Check(value) && !PyList_Check(value)) return fa_wrong_type("dropout", value, ACCEPTED, status);
    call->dropout = PySequence_Tuple(value);
    if (!call->dropout) return fa_python_error(status);
    const Py_ssize_t count = PyTuple_Size(call->dropout);
    if (count != 2 && count != 3 && count != 5)
        return fa_fail(status, FA_EVALUE, "dropout has %zd items; accepted: " ACCEPTED, (ssize_t)count);
    for (Py_ssize_t n = 0; n < count; n++) item[n] = PyTuple_GetItem(call->dropout, n);
    FA_TRY(fa_read_number("dropout's p", item[0], &p, status));
    if (!(p >= 0 && p <= 1)) return fa_fail(status, FA_EVALUE, "dropout's p is %g; accepted: 0 to 1", p);
    request->options.dropout.threshold = (uint32_t)(65536 * p + 0.5);
    return read_rest(state, call, item, count, request, status);
}
