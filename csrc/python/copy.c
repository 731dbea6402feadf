/* to_device() and to_numpy(): copies, so that checks need no framework. */
#include "call.h"

#include <stdlib.h>
#include <string.h>

static fa_code copy_to(fa_state *state, const fa_array *source, int index, fa_result *result, fa_status *status) {
    const fa_device device = {FA_CUDA, index};
    const fa_device_info *info;
    FA_TRY(fa_device_info_get(state->context, device, &info, status));
    int previous;
    FA_TRY(fa_device_enter(state->context, device, &previous, status));
    const fa_view *view = &source->view;
    const fa_stream stream = {FA_STREAM_PER_THREAD, false, NULL};
    fa_code code = fa_device_array_make(state, device, view->ndim, view->shape, view->dtype, &stream, result, status);
    size_t bytes = (size_t)fa_view_elements(view) * fa_dtype_size(view->dtype);
    if (code == FA_OK && bytes) {
        PyThreadState *thread = PyEval_SaveThread();
        code = fa_memory_copy(result->data, view->data, bytes, stream.handle, status);
        PyEval_RestoreThread(thread);
    }
    fa_device_leave(device, previous);
    return code;
}

PyObject *fa_py_to_device(PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *keywords) {
    fa_state *state = PyModule_GetState(module);
    fa_status status;
    fa_bound bound;
    fa_code code = fa_bind(&state->signature[FA_FN_to_device], args, count, keywords, &bound, &status);
    if (code != FA_OK) return fa_raise(state, &status);
    PyObject *source = fa_given(&bound, FA_ARG_host_array), *device = fa_given(&bound, FA_ARG_ordinal);

    fa_array array = {0};
    fa_result result = {NULL, NULL};
    PyObject *contiguous = NULL;
    long index = 0;
    if (device)
        FA_TRY_GOTO(code,
                    fa_read_index("device", device, 0, 4095, "the index of a CUDA device, from 0", &index, &status),
                    done);
    FA_TRY_GOTO(code, fa_array_read(state, &array, "array", source, NULL, &status), done);
    if (array.type->protocol != FA_BY_NUMPY) {
        code = fa_wrong_type("array", source, "a NumPy array", &status);
        goto done;
    }
    FA_TRY_GOTO(code, fa_arrays_settle(state, &array, 1, NULL, &status), done);
    contiguous = fa_numpy_contiguous(source);
    if (!contiguous) {
        code = fa_python_error(&status);
        goto done;
    }
    FA_TRY_GOTO(code, fa_array_read(state, &array, "array", contiguous, NULL, &status), done);
    FA_TRY_GOTO(code, fa_arrays_settle(state, &array, 1, NULL, &status), done);
    code = copy_to(state, &array, (int)index, &result, &status);
done:
    fa_array_release(&array);
    Py_XDECREF(contiguous);
    if (code == FA_OK) return result.object;
    Py_XDECREF(result.object);
    return fa_raise(state, &status);
}

/* Gathers what was copied: the elements of `view`, read at `from`, to C-contiguous memory. */
static char *pack(const fa_view *view, int axis, const char *from, char *to) {
    const size_t size = fa_dtype_size(view->dtype);
    if (axis == view->ndim) {
        memcpy(to, from, size);
        return to + size;
    }
    if (axis == view->ndim - 1 && view->strides[axis] == 1) {
        memcpy(to, from, (size_t)view->shape[axis] * size);
        return to + (size_t)view->shape[axis] * size;
    }
    for (int64_t n = 0; n < view->shape[axis]; n++)
        to = pack(view, axis + 1, from + n * view->strides[axis] * (int64_t)size, to);
    return to;
}

/* Elements from the first to the last that a view reaches, and how far below its pointer the lowest lies. */
static int64_t span_of(const fa_view *view, int64_t *low) {
    int64_t high = *low = 0;
    for (int axis = 0; axis < view->ndim; axis++) {
        int64_t reach = view->shape[axis] > 1 ? (view->shape[axis] - 1) * view->strides[axis] : 0;
        *(reach < 0 ? low : &high) += reach;
    }
    return high - *low + 1;
}

/* Copies a device view that is not empty to C-contiguous host memory: as one span, or, where that would fetch far more
 * than there is, the parts along its first axis. */
static fa_code fetch(const fa_view *view, int axis, const char *from, char *to, void *stream, fa_status *status) {
    const int64_t size = (int64_t)fa_dtype_size(view->dtype);
    fa_view part = *view;
    part.ndim = view->ndim - axis;
    memmove(part.shape, view->shape + axis, (size_t)part.ndim * sizeof *part.shape);
    memmove(part.strides, view->strides + axis, (size_t)part.ndim * sizeof *part.strides);
    int64_t low, span = span_of(&part, &low), elements = fa_view_elements(&part);
    if (span > 4 * elements + 65536 && part.ndim > 0) {
        const int64_t step = elements / part.shape[0] * size;
        for (int64_t n = 0; n < part.shape[0]; n++)
            FA_TRY(fetch(view, axis + 1, from + n * part.strides[0] * size, to + n * step, stream, status));
        return FA_OK;
    }
    fa_view plain = part;
    fa_view_contiguous(&plain);
    bool contiguous = true;
    for (int n = 0; n < part.ndim; n++)
        contiguous = contiguous && (part.shape[n] == 1 || part.strides[n] == plain.strides[n]);
    if (contiguous) return fa_memory_copy(to, from, (size_t)(span * size), stream, status);
    char *scratch = malloc((size_t)(span * size));
    if (!scratch) return fa_fail(status, FA_EMEMORY, "no host memory for %zu bytes", (size_t)span * (size_t)size);
    fa_code code = fa_memory_copy(scratch, from + low * size, (size_t)(span * size), stream, status);
    if (code == FA_OK) pack(&part, 0, scratch - low * size, to);
    free(scratch);
    return code;
}

static fa_code copy_from(fa_state *state, const fa_array *array, PyObject **copy, fa_status *status) {
    const fa_view *view = &array->view;
    void *to;
    int previous;
    FA_TRY(fa_device_enter(state->context, view->device, &previous, status));
    fa_code code = FA_OK;
    *copy = fa_numpy_empty(state, view->ndim, view->shape, view->dtype, &to);
    if (!*copy) code = fa_python_error(status);
    if (code == FA_OK && fa_view_elements(view) > 0) {
        void *stream = array->has_stream ? array->stream : FA_STREAM_PER_THREAD;
        PyThreadState *thread = PyEval_SaveThread();
        code = fetch(view, 0, view->data, to, stream, status);
        PyEval_RestoreThread(thread);
    }
    fa_device_leave(view->device, previous);
    if (code != FA_OK) Py_CLEAR(*copy);
    return code;
}

PyObject *fa_to_numpy(PyObject *module, PyObject *object) {
    fa_state *state = PyModule_GetState(module);
    fa_status status;
    fa_array array = {0};
    PyObject *copy = NULL;
    fa_code code = fa_array_read(state, &array, "array", object, NULL, &status);
    if (code == FA_OK)
        code = fa_arrays_settle(state, &array, 1, array.has_stream ? array.stream : FA_STREAM_PER_THREAD, &status);
    if (code == FA_OK && array.view.device.kind == FA_CUDA)
        code = copy_from(state, &array, &copy, &status);
    else if (code == FA_OK) {
        copy = fa_numpy_copy_of(state, &array.view);
        if (!copy) code = fa_python_error(&status);
    }
    fa_array_release(&array);
    return code == FA_OK ? copy : fa_raise(state, &status);
}
