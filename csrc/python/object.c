/* Python objects for the files above: errors as exceptions, names, attributes. */
#include "call.h"

#include <stdio.h>
#include <string.h>

static PyObject *exception_of(fa_state *state, fa_code code) {
    switch (code) {
    case FA_EVALUE: return PyExc_ValueError;
    case FA_ETYPE: return PyExc_TypeError;
    case FA_EBUFFER: return PyExc_BufferError;
    case FA_EMEMORY: return PyExc_MemoryError;
    case FA_EUNSUPPORTED: return state->unsupported_error;
    case FA_ECUDA: return state->cuda_error;
    default: return PyExc_SystemError;
    }
}

PyObject *fa_raise(fa_state *state, const fa_status *status) {
    if (status->code != FA_EPYTHON) {
        /* A message may be cut inside a character, and a path or a variable in it need not be UTF-8. */
        PyObject *text = PyUnicode_DecodeUTF8(status->message, (Py_ssize_t)strlen(status->message), "replace");
        if (text) PyErr_SetObject(exception_of(state, status->code), text);
        Py_XDECREF(text);
    } else if (!PyErr_Occurred()) {
        PyErr_SetString(PyExc_SystemError, "fa_ext: an error was reported without an exception");
    }
    return NULL;
}

const char *fa_type_name(PyObject *object, char buffer[80]) {
    PyObject *name = PyObject_GetAttrString((PyObject *)Py_TYPE(object), "__name__");
    const char *text = name ? PyUnicode_AsUTF8AndSize(name, NULL) : NULL;
    snprintf(buffer, 80, "%s", text ? text : "object of an unnamed type");
    if (!text) PyErr_Clear();
    Py_XDECREF(name);
    return buffer;
}

fa_code fa_wrong_type(const char *name, PyObject *value, const char *accepted, fa_status *status) {
    char given[80];
    return fa_fail(status, FA_ETYPE, "%s has type %s; accepted: %s", name, fa_type_name(value, given), accepted);
}

bool fa_forget_error(void) {
    if (PyErr_Occurred() && (!PyErr_ExceptionMatches(PyExc_Exception) || PyErr_ExceptionMatches(PyExc_MemoryError)))
        return false;
    PyErr_Clear();
    return true;
}

const char *fa_shown(PyObject *text, char buffer[160]) {
    Py_ssize_t size;
    const char *plain = PyUnicode_AsUTF8AndSize(text, &size);
    if (plain && strlen(plain) == (size_t)size) return plain;
    PyErr_Clear();
    PyObject *escaped = PyUnicode_AsUnicodeEscapeString(text);
    if (!escaped) PyErr_Clear();
    snprintf(buffer, 160, "%s", escaped ? PyBytes_AsString(escaped) : "?");
    Py_XDECREF(escaped);
    return buffer;
}

bool fa_text_equals(PyObject *object, const char *text) {
    Py_ssize_t size;
    const char *given = PyUnicode_Check(object) ? PyUnicode_AsUTF8AndSize(object, &size) : NULL;
    if (!given) {
        PyErr_Clear();
        return false;
    }
    return (size_t)size == strlen(text) && memcmp(given, text, (size_t)size) == 0;
}

int fa_optional_attribute(PyObject *object, PyObject *name, PyObject **value) {
    *value = PyObject_GetAttr(object, name);
    if (*value) return 1;
    if (!PyErr_ExceptionMatches(PyExc_AttributeError)) return -1;
    PyErr_Clear();
    return 0;
}

int fa_dict_get(PyObject *dict, PyObject *key, PyObject **value) {
#ifdef Py_GIL_DISABLED /* another thread may drop the value between the look-up and the reference */
    return PyDict_GetItemRef(dict, key, value);
#else
    *value = Py_XNewRef(PyDict_GetItemWithError(dict, key));
    return *value ? 1 : PyErr_Occurred() ? -1 : 0;
#endif
}
