/* Streams: what stream= accepts, and the order between the stream of a call and those of the arrays' libraries. */
#include "python/arrays/arrays.h"

/* Number -> address; 0 stays 0. */
static fa_code read_address(const char *name, PyObject *number, void **handle, fa_status *status) {
    if (!PyLong_Check(number) || PyBool_Check(number))
        return fa_wrong_type(name, number, "an int (a CUDA stream's address), or an object with __cuda_stream__",
                             status);
    unsigned long long value = PyLong_AsUnsignedLongLong(number);
    if (PyErr_Occurred()) {
        PyErr_Clear();
        return fa_fail(status, FA_EVALUE,
                       "%s does not fit an address; accepted: a CUDA stream's address, 1 (legacy) "
                       "or 2 (per-thread)",
                       name);
    }
    *handle = (void *)(uintptr_t)value;
    return FA_OK;
}

fa_code fa_stream_number(const char *name, PyObject *number, void **handle, fa_status *status) {
    FA_TRY(read_address(name, number, handle, status));
    if (*handle) return FA_OK;
    return fa_fail(status, FA_EVALUE,
                   "%s is 0, which does not tell the default streams apart; accepted: a CUDA stream's address, "
                   "1 (legacy) or 2 (per-thread)",
                   name);
}

/* __cuda_stream__ is a method that returns (version, handle); version is 0. A handle of 0 is the default stream. */
static fa_code read_protocol(PyObject *found, fa_stream *stream, fa_status *status) {
    PyObject *pair = PyCallable_Check(found) ? PyObject_CallNoArgs(found) : Py_NewRef(found);
    if (!pair) return fa_python_error(status);
    fa_code code = FA_OK;
    long version = -1;
    if (PyTuple_Check(pair) && PyTuple_Size(pair) == 2 && PyLong_Check(PyTuple_GetItem(pair, 0)))
        version = PyLong_AsLong(PyTuple_GetItem(pair, 0));
    PyErr_Clear();
    unsigned long long handle = 0;
    if (version == 0) handle = PyLong_AsUnsignedLongLong(PyTuple_GetItem(pair, 1));
    if (version != 0 || PyErr_Occurred()) {
        PyErr_Clear();
        code = fa_fail(status, FA_EVALUE,
                       "stream has an ill-formed __cuda_stream__; accepted: (0, address of the stream)");
    }
    Py_DECREF(pair);
    stream->handle = handle ? (void *)(uintptr_t)handle : FA_STREAM_LEGACY;
    return code;
}

fa_code fa_stream_parse(fa_state *state, PyObject *object, fa_stream *stream, fa_status *status) {
    *stream = (fa_stream){NULL, object != NULL, object};
    if (!object) return FA_OK;
    if (PyLong_Check(object)) {
        FA_TRY(read_address("stream", object, &stream->handle, status));
        if (!stream->handle) stream->handle = FA_STREAM_LEGACY; /* what libraries call the default stream */
        return FA_OK;
    }
    PyObject *found;
    int has = fa_optional_attribute(object, state->names.__cuda_stream__, &found);
    if (has < 0) return fa_python_error(status);
    if (!has)
        return fa_wrong_type("stream", object,
                             "None, an int (such as .cuda_stream or .ptr), or an object with __cuda_stream__", status);
    fa_code code = read_protocol(found, stream, status);
    Py_DECREF(found);
    return code;
}

fa_code fa_stream_join(const fa_array *arrays, int count, void *stream, bool before, fa_status *status) {
    void *last = stream;
    for (int n = 0; n < count; n++) {
        if (!arrays[n].object || !arrays[n].has_stream || arrays[n].stream == stream || arrays[n].stream == last)
            continue;
        last = arrays[n].stream;
        FA_TRY(before ? fa_stream_wait(stream, last, status) : fa_stream_wait(last, stream, status));
    }
    return FA_OK;
}

/* torch.cuda.current_stream(device).cuda_stream, if torch has been imported. */
fa_code fa_torch_stream(int device, void **stream, bool *found, fa_status *status) {
    *found = false;
    PyObject *name = PyUnicode_FromString("torch.cuda");
    PyObject *cuda = name ? PyImport_GetModule(name) : NULL;
    Py_XDECREF(name);
    if (!cuda) return PyErr_Occurred() ? fa_python_error(status) : FA_OK;
    PyObject *current = PyObject_CallMethod(cuda, "current_stream", "i", device);
    Py_DECREF(cuda);
    PyObject *number = current ? PyObject_GetAttrString(current, "cuda_stream") : NULL;
    Py_XDECREF(current);
    unsigned long long value = number ? PyLong_AsUnsignedLongLong(number) : 0;
    Py_XDECREF(number);
    if (PyErr_Occurred()) return fa_python_error(status);
    *stream = value ? (void *)(uintptr_t)value : FA_STREAM_LEGACY;
    *found = true;
    return FA_OK;
}
