/* Reader of dropout=: see fa_dropout in fa.h. */
#include "call.h"

#include <string.h>

#define ACCEPTED "None, (p, seed), (p, seed, offset), (p, seed, offset, origin, heads) or (p, state)"
#define STATE    "(8,) of uint32 or int32, (4,) of int64"

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

/* The 32 bytes of a state. *found: the object is an array with axes. */
static fa_code read_state(PyObject *value, fa_dropout *dropout, bool *found, fa_status *status) {
    Py_buffer view;
    uint32_t words[8];
    *found = false;
    if (PyLong_Check(value) || !PyObject_CheckBuffer(value)) return FA_OK;
    if (PyObject_GetBuffer(value, &view, PyBUF_STRIDES | PyBUF_FORMAT) < 0) return fa_python_error(status);
    *found = view.ndim > 0;
    const char *format = view.format ? view.format : "B";
    const bool integers = strlen(format) == 1 && strchr("IiLlQq", *format) && *format != 'L' && *format != 'Q';
    const bool fits = *found && integers && view.ndim == 1 && view.len == sizeof words &&
                      (view.itemsize == 4 || (view.itemsize == 8 && (*format == 'l' || *format == 'q')));
    for (Py_ssize_t n = 0; fits && n < view.shape[0]; n++)
        memcpy((char *)words + n * view.itemsize, (const char *)view.buf + n * view.strides[0], (size_t)view.itemsize);
    PyBuffer_Release(&view);
    if (!*found) return FA_OK;
    if (!fits) return fa_fail(status, FA_EVALUE, "dropout's state has another shape or dtype; accepted: " STATE);
    memcpy(dropout->seed, words, sizeof dropout->seed);
    dropout->offset = words[2];
    memcpy(dropout->origin, words + 3, sizeof dropout->origin);
    dropout->heads = words[7];
    return FA_OK;
}

/* The items after p. */
static fa_code read_rest(PyObject *const *item, Py_ssize_t count, fa_dropout *dropout, fa_status *status) {
    uint64_t seed;
    bool state = false;
    if (count == 2) FA_TRY(read_state(item[1], dropout, &state, status));
    if (state) return FA_OK;
    FA_TRY(read_whole("seed", item[1], UINT64_MAX, &seed, status));
    dropout->seed[0] = (uint32_t)seed, dropout->seed[1] = (uint32_t)(seed >> 32);
    if (count > 2) FA_TRY(read_word("offset", item[2], UINT32_MAX, &dropout->offset, status));
    if (count < 5) return FA_OK;
    FA_TRY(read_origin(item[3], dropout->origin, status));
    FA_TRY(read_word("heads", item[4], INT32_MAX, &dropout->heads, status));
    if (!dropout->heads) return fa_fail(status, FA_EVALUE, "dropout's heads is 0; accepted: 1 to %d", INT32_MAX);
    return FA_OK;
}

fa_code fa_read_dropout(const char *name, PyObject *value, void *field, fa_status *status) {
    fa_dropout *dropout = field;
    double p;
    if (!PyTuple_Check(value) && !PyList_Check(value)) return fa_wrong_type(name, value, ACCEPTED, status);
    PyObject *items = PySequence_Tuple(value), *item[5];
    if (!items) return fa_python_error(status);
    const Py_ssize_t count = PyTuple_Size(items);
    fa_code code = FA_OK;
    if (count != 2 && count != 3 && count != 5)
        code = fa_fail(status, FA_EVALUE, "%s has %zd items; accepted: " ACCEPTED, name, (ssize_t)count);
    for (Py_ssize_t n = 0; n < count && code == FA_OK; n++) item[n] = PyTuple_GetItem(items, n);
    if (code == FA_OK) code = fa_read_number("dropout's p", item[0], &p, status);
    if (code == FA_OK && !(p >= 0 && p <= 1))
        code = fa_fail(status, FA_EVALUE, "dropout's p is %g; accepted: 0 to 1", p);
    if (code == FA_OK) code = read_rest(item, count, dropout, status);
    if (code == FA_OK) dropout->threshold = (uint32_t)(65536 * p + 0.5);
    Py_DECREF(items);
    return code;
}
