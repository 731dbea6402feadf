/* The CUDA Array Interface (versions 1 to 3), and CuPy's attributes, which say the same in a third of the time. */
#include "python/arrays/arrays.h"

#include <stdio.h>
#include <string.h>

static fa_code ill_formed(const fa_array *array, const char *what, fa_status *status) {
    return fa_fail(status, FA_EBUFFER, "%s has an ill-formed __cuda_array_interface__: %s", array->name, what);
}

static fa_code not_ints(const fa_array *array, const char *key, fa_status *status) {
    char text[100];
    snprintf(text, sizeof text, "'%s' must be a tuple of ints that fit 64 bits", key);
    return ill_formed(array, text, status);
}

/* A tuple of at most FA_MAX_NDIM ints; `count` is -1 before it is known. */
static fa_code read_ints(const fa_array *array, PyObject *tuple, const char *key, int64_t *values, int *count,
                         fa_status *status) {
    if (!tuple || !PyTuple_Check(tuple)) return not_ints(array, key, status);
    Py_ssize_t size = PyTuple_Size(tuple);
    if (size > FA_MAX_NDIM)
        return fa_fail(status, FA_EVALUE, "%s has %zd dimensions; accepted: 4", array->name, (ssize_t)size);
    if (*count >= 0 && size != *count) return ill_formed(array, "'strides' and 'shape' differ in length", status);
    for (Py_ssize_t n = 0; n < size; n++) {
        PyObject *item = PyTuple_GetItem(tuple, n);
        values[n] = PyLong_Check(item) ? PyLong_AsLongLong(item) : -1;
        if (values[n] == -1 && (!PyLong_Check(item) || PyErr_Occurred())) {
            PyErr_Clear();
            return not_ints(array, key, status);
        }
    }
    *count = (int)size;
    return FA_OK;
}

static fa_code read_pointer(const fa_array *array, PyObject *number, void **pointer, fa_status *status) {
    if (!number || !PyLong_Check(number)) return ill_formed(array, "the pointer in 'data' must be an int", status);
    unsigned long long address = PyLong_AsUnsignedLongLong(number);
    if (PyErr_Occurred()) {
        PyErr_Clear();
        return ill_formed(array, "the pointer in 'data' does not fit 64 bits", status);
    }
    *pointer = (void *)(uintptr_t)address;
    return FA_OK;
}

/* Device of the pointer; an empty array may have none. */
static fa_code find_device(fa_state *state, fa_array *array, fa_status *status) {
    fa_view *view = &array->view;
    view->device = (fa_device){FA_CUDA, 0};
    if (fa_view_elements(view) == 0) {
        array->device_unknown = true;
        return FA_OK;
    }
    fa_status inner;
    fa_code code = fa_pointer_device(state->context, view->data, true, &view->device, &inner);
    return code == FA_OK ? FA_OK : fa_fail(status, code, "%s: %.2000s", array->name, inner.message);
}

/* The values that are read, borrowed from the dict. */
typedef struct entries {
    PyObject *version, *shape, *typestr, *data, *mask, *stream, *strides;
} entries;

static bool look_up(PyObject *dict, PyObject *key, PyObject **value) {
    *value = PyDict_GetItemWithError(dict, key);
    return *value || !PyErr_Occurred();
}

static fa_code read_entries(fa_array *array, const entries *e, bool *unclear, fa_status *status) {
    fa_view *view = &array->view;
    long number = e->version && PyLong_Check(e->version) ? PyLong_AsLong(e->version) : -1;
    if (PyErr_Occurred() || number < 1) {
        PyErr_Clear();
        return ill_formed(array, "'version' must be an int >= 1", status);
    }
    view->ndim = -1;
    FA_TRY(read_ints(array, e->shape, "shape", view->shape, &view->ndim, status));
    const char *text = e->typestr && PyUnicode_Check(e->typestr) ? PyUnicode_AsUTF8AndSize(e->typestr, NULL) : NULL;
    if (!text) {
        PyErr_Clear();
        return ill_formed(array, "'typestr' must be a str", status);
    }
    FA_TRY(fa_typestr_parse(array->name, text, &view->dtype, unclear, status));

    if (!e->data || !PyTuple_Check(e->data) || PyTuple_Size(e->data) != 2)
        return ill_formed(array, "'data' must be a pair (pointer, readonly)", status);
    FA_TRY(read_pointer(array, PyTuple_GetItem(e->data, 0), &view->data, status));
    int readonly = PyObject_IsTrue(PyTuple_GetItem(e->data, 1));
    if (readonly < 0) return fa_python_error(status);
    view->readonly = readonly;

    if (e->mask && e->mask != Py_None)
        return fa_fail(status, FA_ETYPE, "%s is a masked array; pass plain data, and mask= for what to leave out",
                       array->name);
    if (e->stream && e->stream != Py_None) {
        char label[64];
        snprintf(label, sizeof label, "%s's interface stream", array->name);
        FA_TRY(fa_stream_number(label, e->stream, &array->stream, status));
        array->has_stream = true;
    }
    int64_t byte_strides[FA_MAX_NDIM];
    if (e->strides && e->strides != Py_None) {
        FA_TRY(read_ints(array, e->strides, "strides", byte_strides, &view->ndim, status));
        return fa_view_byte_strides(array->name, view, byte_strides, status);
    }
    fa_view_contiguous(view);
    return fa_view_check(array->name, view, status);
}

static fa_code read_dict(fa_state *state, fa_array *array, PyObject *interface, bool *unclear, fa_status *status) {
    const fa_names *names = &state->names;
    if (!PyDict_Check(interface)) return ill_formed(array, "it must be a dict", status);
    PyObject *own = PyDict_Copy(interface); /* theirs may change while it is read */
    if (!own) return fa_python_error(status);
    entries e;
    fa_code code;
    if (look_up(own, names->version, &e.version) && look_up(own, names->shape, &e.shape) &&
        look_up(own, names->typestr, &e.typestr) && look_up(own, names->data, &e.data) &&
        look_up(own, names->mask, &e.mask) && look_up(own, names->stream, &e.stream) &&
        look_up(own, names->strides, &e.strides))
        code = read_entries(array, &e, unclear, status);
    else
        code = fa_python_error(status);
    Py_DECREF(own);
    return code;
}

/* Two-byte voids are what bfloat16 is exported as, where it is: the dtype attribute, or DLPack, must confirm it. */
static fa_code confirm_bfloat16(fa_state *state, fa_array *array, fa_status *status) {
    PyObject *dtype, *shown = NULL;
    int has = fa_optional_attribute(array->object, state->names.dtype, &dtype);
    if (has < 0) return fa_python_error(status);
    if (has) shown = PyObject_Str(dtype);
    Py_XDECREF(dtype);
    bool confirmed = shown && (fa_text_equals(shown, "bfloat16") || fa_text_equals(shown, "torch.bfloat16"));
    Py_XDECREF(shown);
    if (!fa_forget_error()) return fa_python_error(status);
    if (confirmed) return FA_OK;
    return fa_fail(status, FA_ETYPE, "%s has a two-byte void dtype; accepted: %s", array->name,
                   fa_accepted_dtypes(array->name));
}

fa_code fa_interface_read(fa_state *state, fa_array *array, PyObject *interface, fa_status *status) {
    bool unclear = false;
    FA_TRY(read_dict(state, array, interface, &unclear, status));
    if (unclear) FA_TRY(confirm_bfloat16(state, array, status));
    return find_device(state, array, status);
}

static fa_code read_tuple_attribute(fa_array *array, PyObject *name, const char *key, int64_t *values, int *count,
                                    fa_status *status) {
    PyObject *tuple = PyObject_GetAttr(array->object, name);
    if (!tuple) return fa_python_error(status);
    fa_code code = read_ints(array, tuple, key, values, count, status);
    Py_DECREF(tuple);
    return code;
}

static fa_code read_number_attribute(PyObject *object, PyObject *name, long long *number, fa_status *status) {
    PyObject *value = object ? PyObject_GetAttr(object, name) : NULL;
    if (!value) return fa_python_error(status);
    *number = PyLong_AsLongLong(value);
    Py_DECREF(value);
    return *number == -1 && PyErr_Occurred() ? fa_python_error(status) : FA_OK;
}

/* cupy.cuda.get_current_stream(device).ptr; 0 is the legacy stream. Each device has a current stream of its own. */
static fa_code cupy_stream(fa_state *state, const fa_array *array, void **stream, fa_status *status) {
    PyObject *device = PyLong_FromLong(array->device_unknown ? -1 : array->view.device.id);
    PyObject *current = device ? PyObject_CallFunctionObjArgs(array->type->current_stream, device, NULL) : NULL;
    Py_XDECREF(device);
    long long address;
    fa_code code = read_number_attribute(current, state->names.ptr, &address, status);
    Py_XDECREF(current);
    FA_TRY(code);
    *stream = address ? (void *)(uintptr_t)address : FA_STREAM_LEGACY;
    return FA_OK;
}

fa_code fa_cupy_read(fa_state *state, fa_array *array, const fa_array *first, fa_status *status) {
    const fa_names *names = &state->names;
    fa_view *view = &array->view;
    int64_t byte_strides[FA_MAX_NDIM];
    view->ndim = -1;
    FA_TRY(read_tuple_attribute(array, names->shape, "shape", view->shape, &view->ndim, status));
    const int contiguous = array->type->contiguous.name ? fa_flag_ask(&array->type->contiguous, array->object) : 0;
    if (contiguous < 0) return fa_python_error(status);
    if (!contiguous) FA_TRY(read_tuple_attribute(array, names->strides, "strides", byte_strides, &view->ndim, status));
    PyObject *dtype = PyObject_GetAttr(array->object, names->dtype);
    if (!dtype) return fa_python_error(status);
    fa_code code = fa_numpy_dtype_read(state, array->name, dtype, &view->dtype, status);
    Py_DECREF(dtype);
    FA_TRY(code);
    PyObject *memory = PyObject_GetAttr(array->object, names->data);
    long long address = 0, device = 0;
    code = read_number_attribute(memory, names->ptr, &address, status);
    if (code == FA_OK) code = read_number_attribute(memory, names->device_id, &device, status);
    Py_XDECREF(memory);
    FA_TRY(code);
    view->data = (void *)(uintptr_t)address;
    view->device = (fa_device){FA_CUDA, (int)device};
    array->device_unknown = device < 0; /* an empty array may own no memory */
    array->has_stream = true;
    if (first && first->type == array->type && first->has_stream)
        array->stream = first->stream;
    else
        FA_TRY(cupy_stream(state, array, &array->stream, status));
    if (contiguous) {
        fa_view_contiguous(view);
        return fa_view_check(array->name, view, status);
    }
    return fa_view_byte_strides(array->name, view, byte_strides, status);
}
