/* DLPack in: the C exchange API of a type, and the capsules of __dlpack__. */
#include "python/arrays/arrays.h"

#include <stdio.h>
#include <string.h>

static fa_code ill_formed(const fa_array *array, const char *what, fa_status *status) {
    return fa_fail(status, FA_EBUFFER, "%s has an ill-formed DLPack tensor: %s", array->name, what);
}

/* ---- dtypes and devices ---- */

void fa_dlpack_dtype(fa_dtype dtype, DLDataType *out) {
    static const DLDataType types[FA_DTYPE_COUNT] = {
        [FA_F16] = {DLPACK_FLOAT, 16, 1}, [FA_BF16] = {DLPACK_BFLOAT, 16, 1}, [FA_F32] = {DLPACK_FLOAT, 32, 1},
        [FA_F64] = {DLPACK_FLOAT, 64, 1}, [FA_BOOL] = {DLPACK_BOOL, 8, 1},    [FA_I32] = {DLPACK_INT, 32, 1},
        [FA_I64] = {DLPACK_INT, 64, 1},   [FA_U8] = {DLPACK_UINT, 8, 1},      [FA_U32] = {DLPACK_UINT, 32, 1},
    };
    *out = types[dtype];
}

static fa_code read_dtype(const fa_array *array, DLDataType given, fa_dtype *dtype, fa_status *status) {
    for (int n = 0; n < FA_DTYPE_COUNT; n++) {
        DLDataType type;
        fa_dlpack_dtype((fa_dtype)n, &type);
        if (type.code == given.code && type.bits == given.bits && given.lanes == 1) {
            *dtype = (fa_dtype)n;
            return FA_OK;
        }
    }
    static const char *const kinds[] = {"int", "uint", "float", "opaque", "bfloat", "complex", "bool"};
    return fa_fail(status, FA_ETYPE, "%s has dtype %s%d%s; accepted: %s", array->name,
                   given.code < 7                       ? kinds[given.code]
                   : given.code < 15 && given.bits == 8 ? "float" /* e3m4 to e8m0fnu */
                                                        : "of an unknown kind, bits ",
                   given.bits, given.lanes == 1 ? "" : " in vectors", fa_accepted_dtypes(array->name));
}

static fa_code read_device(const fa_array *array, DLDevice given, fa_device *device, fa_status *status) {
    switch (given.type) {
    case DLPACK_CPU:
    case DLPACK_CUDA_HOST: *device = (fa_device){FA_CPU, 0}; return FA_OK;
    case DLPACK_CUDA:
    case DLPACK_CUDA_MANAGED:
        *device = (fa_device){FA_CUDA, given.id};
        if (given.id < 0) return ill_formed(array, "its device id is negative", status);
        return FA_OK;
    default:
        return fa_fail(status, FA_EBUFFER, "%s is on a device of DLPack type %d; accepted: the CPU and CUDA devices",
                       array->name, (int)given.type);
    }
}

static fa_code read_tensor(fa_array *array, const DLTensor *tensor, fa_status *status) {
    fa_view *view = &array->view;
    FA_TRY(read_dtype(array, tensor->dtype, &view->dtype, status));
    FA_TRY(read_device(array, tensor->device, &view->device, status));
    if (tensor->ndim < 0) return ill_formed(array, "its number of dimensions is negative", status);
    if (tensor->ndim > FA_MAX_NDIM)
        return fa_fail(status, FA_EVALUE, "%s has %d dimensions; accepted: 4", array->name, (int)tensor->ndim);
    if (tensor->ndim > 0 && !tensor->shape) return ill_formed(array, "its shape is NULL", status);
    view->ndim = tensor->ndim;
    view->data = tensor->data ? (char *)tensor->data + tensor->byte_offset : NULL;
    for (int axis = 0; axis < view->ndim; axis++) {
        view->shape[axis] = tensor->shape[axis];
        if (tensor->strides) view->strides[axis] = tensor->strides[axis];
    }
    if (!tensor->strides) fa_view_contiguous(view);
    return fa_view_check(array->name, view, status);
}

/* ---- the C exchange API ---- */

fa_code fa_exchange_find(PyObject *capsule, const DLExchange **exchange, fa_status *status) {
    *exchange = NULL;
    if (!PyCapsule_IsValid(capsule, "dlpack_exchange_api"))
        return fa_wrong_type("__dlpack_c_exchange_api__", capsule, "a capsule named \"dlpack_exchange_api\"", status);
    const DLExchangeHeader *header = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    while (header && header->version.major != DLPACK_MAJOR) header = header->previous;
    const DLExchange *table = (const DLExchange *)header;
    bool complete =
        table && table->allocate && table->managed_from_object && table->managed_to_object && table->current_stream;
    if (complete) *exchange = table; /* else another protocol of the type serves */
    return FA_OK;
}

static fa_code current_stream(const fa_array *array, void **stream, fa_status *status) {
    *stream = NULL;
    if (array->type->exchange->current_stream(DLPACK_CUDA, array->view.device.id, stream) != 0)
        return fa_python_error(status);
    if (!*stream) *stream = FA_STREAM_LEGACY;
    return FA_OK;
}

/* Appends ", name: what an array says of itself", if it does. */
static void append_said(PyObject *object, const char *name, char *text, size_t size) {
    char shown[160];
    PyObject *value = PyObject_GetAttrString(object, name), *said = value ? PyObject_Str(value) : NULL;
    if (said && strlen(text) < size)
        snprintf(text + strlen(text), size - strlen(text), ", %s %s", name, fa_shown(said, shown));
    Py_XDECREF(said);
    Py_XDECREF(value);
    PyErr_Clear();
}

/* The array's library raised: it is sparse or nested, on no device, or a transform's. An error of ours says which
 * argument it is about, what that is, and the first line of the library's message. */
static fa_code cannot_read(const fa_array *array, fa_status *status) {
    if (!PyErr_ExceptionMatches(PyExc_RuntimeError) && !PyErr_ExceptionMatches(PyExc_BufferError))
        return fa_python_error(status);
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyObject *shown = value ? PyObject_Str(value) : NULL;
    const char *text = shown ? PyUnicode_AsUTF8AndSize(shown, NULL) : NULL;
    PyErr_Clear();
    if (!text) text = "no reason given";
    char kind[80], given[240];
    snprintf(given, sizeof given, "a %.60s", fa_type_name(array->object, kind));
    append_said(array->object, "layout", given, sizeof given);
    append_said(array->object, "device", given, sizeof given);
    fa_fail(status, FA_EBUFFER, "%s cannot be read: %.*s; given: %s; accepted: a dense array that has memory%s",
            array->name, (int)strcspn(text, "\n"), text, given,
            array->type->library == FA_LIB_TORCH ? " (in transforms and compiled graphs: fa_ext.torch)" : "");
    Py_XDECREF(shown);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(traceback);
    return FA_EBUFFER;
}

fa_code fa_exchange_read(fa_state *state, fa_array *array, const fa_array *first, fa_status *status) {
    (void)state;
    const DLExchange *exchange = array->type->exchange;
    if (exchange->tensor_from_object) {
        DLTensor tensor;
        if (exchange->tensor_from_object(array->object, &tensor) != 0) return cannot_read(array, status);
        FA_TRY(read_tensor(array, &tensor, status));
    } else {
        if (exchange->managed_from_object(array->object, &array->managed_versioned) != 0 || !array->managed_versioned)
            return cannot_read(array, status);
        FA_TRY(read_tensor(array, &array->managed_versioned->tensor, status));
        array->view.readonly = array->managed_versioned->flags & (DLPACK_READ_ONLY | DLPACK_IS_COPIED);
    }
    if (array->view.device.kind != FA_CUDA) return FA_OK;
    array->has_stream = true;
    if (first && first->has_stream && first->type == array->type && first->view.device.kind == FA_CUDA &&
        first->view.device.id == array->view.device.id) {
        array->stream = first->stream;
        return FA_OK;
    }
    return current_stream(array, &array->stream, status);
}

static void set_error(void *context, const char *kind, const char *message) {
    bool memory = kind && strstr(kind, "emory");
    fa_fail(context, memory ? FA_EMEMORY : FA_ECUDA, "the allocator of q's library failed: %s: %s",
            kind ? kind : "error", message ? message : "");
}

fa_code fa_exchange_allocate(const fa_type *type, fa_device device, int ndim, const int64_t *shape, fa_dtype dtype,
                             DLManagedVersioned **managed, fa_status *status) {
    int64_t extents[FA_MAX_NDIM];
    memcpy(extents, shape, (size_t)ndim * sizeof *shape);
    DLTensor prototype = {
        .device = {device.kind == FA_CPU ? DLPACK_CPU : DLPACK_CUDA, device.id}, .ndim = ndim, .shape = extents};
    fa_dlpack_dtype(dtype, &prototype.dtype);
    *managed = NULL;
    status->code = FA_OK;
    if (type->exchange->allocate(&prototype, managed, status, set_error) == 0 && *managed) return FA_OK;
    if (PyErr_Occurred()) return fa_python_error(status);
    if (status->code == FA_OK) return fa_fail(status, FA_EMEMORY, "the allocator of q's library failed");
    return status->code;
}

fa_code fa_exchange_empty(fa_state *state, const fa_type *type, fa_device device, int ndim, const int64_t *shape,
                          fa_dtype dtype, PyObject **object, void **data, fa_status *status) {
    (void)state;
    DLManagedVersioned *managed;
    FA_TRY(fa_exchange_allocate(type, device, ndim, shape, dtype, &managed, status));
    *data = managed->tensor.data ? (char *)managed->tensor.data + managed->tensor.byte_offset : NULL;
    void *made = NULL;
    if (type->exchange->managed_to_object(managed, &made) != 0 || !made) return fa_python_error(status);
    *object = made;
    return FA_OK;
}

/* ---- __dlpack__ ---- */

fa_code fa_dlpack_device(fa_state *state, fa_array *array, fa_status *status) {
    PyObject *pair = PyObject_CallMethodObjArgs(array->object, state->names.__dlpack_device__, NULL);
    if (!pair && PyErr_ExceptionMatches(PyExc_AttributeError)) { /* a tracer of JAX, for one */
        PyErr_Clear();
        return fa_wrong_type(array->name, array->object, "an array with memory: __dlpack_device__ is missing", status);
    }
    if (!pair) return fa_python_error(status);
    fa_code code = FA_OK;
    long type = -1, id = -1;
    if (PyTuple_Check(pair) && PyTuple_Size(pair) == 2) {
        long given = PyLong_AsLong(PyTuple_GetItem(pair, 0)); /* an IntEnum counts */
        if (!PyErr_Occurred()) id = PyLong_AsLong(PyTuple_GetItem(pair, 1));
        if (!PyErr_Occurred()) type = given;
    }
    if (!fa_forget_error())
        code = fa_python_error(status);
    else if (type < 0 || type > INT32_MAX || id < INT32_MIN || id > INT32_MAX)
        code = ill_formed(array, "__dlpack_device__() must return (device type, device id)", status);
    Py_DECREF(pair);
    FA_TRY(code);
    FA_TRY(read_device(array, (DLDevice){(int32_t)type, (int32_t)id}, &array->view.device, status));
    array->needs_stream = true;
    if (array->view.device.kind == FA_CUDA && array->type->library == FA_LIB_TORCH)
        return fa_torch_stream((int)id, &array->stream, &array->has_stream, status);
    return FA_OK;
}

static PyObject *ask(fa_state *state, PyObject *object, PyObject *stream) {
    const fa_names *names = &state->names;
    PyObject *method = PyObject_GetAttr(object, names->__dlpack__);
    PyObject *empty = method ? PyTuple_New(0) : NULL, *keywords = empty ? PyDict_New() : NULL, *capsule = NULL;
    if (keywords && (stream == Py_None || PyDict_SetItem(keywords, names->stream, stream) == 0) &&
        PyDict_SetItem(keywords, names->max_version, names->dlpack_version) == 0) {
        capsule = PyObject_Call(method, empty, keywords);
        if (!capsule && PyErr_ExceptionMatches(PyExc_TypeError)) { /* older than DLPack 1.0 */
            PyErr_Clear();
            if (PyDict_DelItem(keywords, names->max_version) == 0) capsule = PyObject_Call(method, empty, keywords);
        }
    }
    Py_XDECREF(keywords);
    Py_XDECREF(empty);
    Py_XDECREF(method);
    return capsule;
}

/* Takes the tensor out of its capsule: from here on the deleter is ours to call. */
static fa_code consume(fa_array *array, PyObject *capsule, const DLTensor **tensor, fa_status *status) {
    if (PyCapsule_IsValid(capsule, "dltensor_versioned")) {
        DLManagedVersioned *managed = PyCapsule_GetPointer(capsule, "dltensor_versioned");
        if (PyCapsule_SetName(capsule, "used_dltensor_versioned") < 0) return fa_python_error(status);
        array->managed_versioned = managed;
        if (managed->version.major != DLPACK_MAJOR)
            return fa_fail(status, FA_EBUFFER, "%s is exported as DLPack %u.%u; accepted: 1.x", array->name,
                           managed->version.major, managed->version.minor);
        array->view.readonly = managed->flags & (DLPACK_READ_ONLY | DLPACK_IS_COPIED);
        *tensor = &managed->tensor;
        return FA_OK;
    }
    if (PyCapsule_IsValid(capsule, "dltensor")) {
        DLManaged *managed = PyCapsule_GetPointer(capsule, "dltensor");
        if (PyCapsule_SetName(capsule, "used_dltensor") < 0) return fa_python_error(status);
        array->managed = managed;
        *tensor = &managed->tensor;
        return FA_OK;
    }
    if (PyCapsule_IsValid(capsule, "used_dltensor") || PyCapsule_IsValid(capsule, "used_dltensor_versioned"))
        return fa_fail(status, FA_EBUFFER, "%s gave a DLPack capsule that has been consumed before", array->name);
    char what[160], given[80];
    snprintf(what, sizeof what, "__dlpack__() returned a %s; accepted: a capsule named dltensor or dltensor_versioned",
             fa_type_name(capsule, given));
    return ill_formed(array, what, status);
}

fa_code fa_dlpack_read(fa_state *state, fa_array *array, void *stream, fa_status *status) {
    const fa_device device = array->view.device;
    const fa_device_info *info;
    int previous;
    FA_TRY(fa_device_info_get(state->context, device, &info, status)); /* there is such a device */
    PyObject *number = device.kind == FA_CUDA ? PyLong_FromVoidPtr(stream) : Py_NewRef(Py_None);
    if (!number) return fa_python_error(status);
    /* The streams 1 and 2 are those of the current device. */
    fa_code code = fa_device_enter(state->context, device, &previous, status);
    PyObject *capsule = code == FA_OK ? ask(state, array->object, number) : NULL;
    if (code == FA_OK) fa_device_leave(device, previous);
    Py_DECREF(number);
    FA_TRY(code);
    if (!capsule) return fa_python_error(status);
    const DLTensor *tensor = NULL;
    code = consume(array, capsule, &tensor, status);
    Py_DECREF(capsule);
    FA_TRY(code);
    FA_TRY(read_tensor(array, tensor, status));
    if (array->view.device.kind != device.kind || array->view.device.id != device.id)
        return ill_formed(array, "its device is not that of __dlpack_device__()", status);
    if (device.kind != FA_CUDA || fa_view_elements(&array->view) == 0) return FA_OK;
    fa_device found;
    fa_status inner;
    code = fa_pointer_device(state->context, array->view.data, true, &found, &inner);
    if (code != FA_OK) return fa_fail(status, code, "%s: %.2000s", array->name, inner.message);
    if (found.kind != device.kind || found.id != device.id)
        return ill_formed(array, "its pointer does not belong to the device it names", status);
    return FA_OK;
}
