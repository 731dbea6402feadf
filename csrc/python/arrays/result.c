/* Results in the caller's own kind of array: their allocation, and how the array is handed over. */
#include "python/arrays/arrays.h"

static fa_code read_address(PyObject *number, void **data, fa_status *status) {
    if (!number) return fa_python_error(status);
    unsigned long long address = PyLong_AsUnsignedLongLong(number);
    Py_DECREF(number);
    if (PyErr_Occurred()) return fa_python_error(status);
    *data = (void *)(uintptr_t)address;
    return FA_OK;
}

/* cupy.ndarray(shape, dtype), which cupy.empty comes down to: from CuPy's pool of the current device and stream. */
static fa_code make_cupy(fa_state *state, const fa_array *like, int ndim, const int64_t *shape, fa_dtype dtype,
                         fa_result *result, fa_status *status) {
    PyObject *extents = fa_shape_tuple(ndim, shape);
    PyObject *type =
        dtype == like->view.dtype ? PyObject_GetAttr(like->object, state->names.dtype) : fa_numpy_dtype(state, dtype);
    if (extents && type) result->object = PyObject_CallFunctionObjArgs(like->type->maker, extents, type, NULL);
    Py_XDECREF(extents);
    Py_XDECREF(type);
    if (!result->object) return fa_python_error(status);
    PyObject *memory = PyObject_GetAttr(result->object, state->names.data);
    PyObject *pointer = memory ? PyObject_GetAttr(memory, state->names.ptr) : NULL;
    Py_XDECREF(memory);
    return read_address(pointer, &result->data, status);
}

/* torch.empty(shape, dtype=, device=), where torch has no exchange API. */
static fa_code make_torch(fa_state *state, const fa_array *like, int ndim, const int64_t *shape, fa_dtype dtype,
                          fa_result *result, fa_status *status) {
    PyObject *module = PyImport_ImportModule("torch");
    PyObject *type = NULL, *device = PyObject_GetAttrString(like->object, "device");
    if (dtype == like->view.dtype)
        type = PyObject_GetAttr(like->object, state->names.dtype);
    else if (module)
        type = PyObject_GetAttrString(module, fa_dtype_name(dtype));
    PyObject *args = module && type && device ? Py_BuildValue("(N)", fa_shape_tuple(ndim, shape)) : NULL;
    PyObject *keywords = args ? Py_BuildValue("{s:O,s:O}", "dtype", type, "device", device) : NULL;
    if (keywords) result->object = PyObject_Call(like->type->maker, args, keywords);
    Py_XDECREF(keywords);
    Py_XDECREF(args);
    Py_XDECREF(device);
    Py_XDECREF(type);
    Py_XDECREF(module);
    if (!result->object) return fa_python_error(status);
    return read_address(PyObject_CallMethod(result->object, "data_ptr", NULL), &result->data, status);
}

fa_code fa_result_make(fa_state *state, const fa_array *like, int ndim, const int64_t *shape, fa_dtype dtype,
                       const fa_stream *stream, fa_result *result, fa_status *status) {
    *result = (fa_result){NULL, NULL};
    const fa_device device = like->view.device;
    if (like->type->protocol == FA_BY_NUMPY) {
        result->object = fa_numpy_empty(state, ndim, shape, dtype, &result->data);
        return result->object ? FA_OK : fa_python_error(status);
    }
    if (like->type->protocol == FA_BY_EXCHANGE)
        return fa_exchange_empty(state, like->type, device, ndim, shape, dtype, &result->object, &result->data, status);
    if (like->type->library == FA_LIB_CUPY && like->type->maker && device.kind == FA_CUDA)
        return make_cupy(state, like, ndim, shape, dtype, result, status);
    if (like->type->library == FA_LIB_TORCH && like->type->maker)
        return make_torch(state, like, ndim, shape, dtype, result, status);
    return fa_device_array_make(state, device, ndim, shape, dtype, stream, result, status);
}

/* numba.cuda.as_cuda_array(array, sync=False): bound to the stream of the call, so no wait on the host is needed. */
static PyObject *into_numba(PyObject *maker, PyObject *array) {
    PyObject *args = PyTuple_Pack(1, array);
    PyObject *keywords = args ? Py_BuildValue("{s:O}", "sync", Py_False) : NULL;
    PyObject *made = keywords ? PyObject_Call(maker, args, keywords) : NULL;
    Py_XDECREF(keywords);
    Py_XDECREF(args);
    return made;
}

/* A library that follows the array API standard takes DLPack through its namespace. */
static PyObject *into_namespace(fa_state *state, PyObject *like, PyObject *array) {
    PyObject *method;
    int has = fa_optional_attribute(like, state->names.__array_namespace__, &method);
    if (has <= 0) return has < 0 ? NULL : Py_NewRef(array);
    PyObject *space = PyObject_CallNoArgs(method);
    Py_DECREF(method);
    PyObject *made = space ? PyObject_CallMethodObjArgs(space, state->names.from_dlpack, array, NULL) : NULL;
    Py_XDECREF(space);
    return made;
}

PyObject *fa_result_finish(fa_state *state, const fa_array *like, fa_result *result) {
    PyObject *array = result->object, *made;
    result->object = NULL;
    if (Py_TYPE(array) != state->device_array || like->type->protocol == FA_BY_OWN) return array;
    PyObject *maker = like->type->maker;
    if (like->type->library == FA_LIB_JAX && maker) {
        made = PyObject_CallFunctionObjArgs(maker, array, NULL);
        fa_device_array_outlived(array);
    } else if (like->type->library == FA_LIB_NUMBA && maker && like->view.device.kind == FA_CUDA)
        made = into_numba(maker, array);
    else
        made = into_namespace(state, like->object, array);
    Py_DECREF(array);
    return made;
}
