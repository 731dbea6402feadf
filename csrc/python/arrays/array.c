/* PyObject -> fa_view: the way to the file that reads the protocol of an object's library: numpy.c, cuda_interface.c,
 * dlpack.c. */
#include "python/arrays/arrays.h"

#include <string.h>

/* Whether the library has gradients off, as it says once a call: asking a tensor what it wants takes as long. */
static fa_code ask_grad_off(fa_array *array, const fa_array *first, fa_status *status) {
    if (first && first->type == array->type) {
        array->grad_off = first->grad_off;
    } else if (array->type->grad_enabled) {
        PyObject *enabled = PyObject_CallNoArgs(array->type->grad_enabled);
        if (!enabled) return fa_python_error(status);
        const int truth = PyObject_IsTrue(enabled);
        Py_DECREF(enabled);
        if (truth < 0) return fa_python_error(status);
        array->grad_off = !truth;
    }
    return FA_OK;
}

/* A tensor that takes part in autograd would lose its gradients silently, unless gradients are off. */
static fa_code refuse_grad(fa_array *array, const fa_array *first, fa_status *status) {
    FA_TRY(ask_grad_off(array, first, status));
    if (array->grad_off) return FA_OK;
    const int truth = fa_flag_ask(&array->type->requires_grad, array->object);
    if (truth == 0) return FA_OK;
    if (truth < 0) return fa_python_error(status);
    return fa_fail(status, FA_EVALUE,
                   "%s requires grad, and autograd does not see this call: gradients would be lost silently; call "
                   "fa_ext.torch.attention, which is differentiable, or pass %s.detach()",
                   array->name, array->name);
}

/* A tensor that stands for the negative of its memory. One is the imaginary part of a conjugate, whose elements lie two
 * apart: where a stride is odd there is no need to ask, which takes longer than all the rest of reading a tensor. */
static fa_code refuse_negative(const fa_array *array, fa_status *status) {
    const fa_view *view = &array->view;
    for (int axis = view->ndim - 1; axis >= 0 && !array->needs_stream; axis--)
        if (view->shape[axis] > 1 && (view->strides[axis] & 1)) return FA_OK;
    int truth = fa_flag_ask(&array->type->is_neg, array->object);
    if (truth == 0) return FA_OK;
    if (truth < 0) return fa_python_error(status);
    return fa_fail(status, FA_EVALUE, "%s is a negative view; pass %s.resolve_neg()", array->name, array->name);
}

/* Conjugate views are complex, so that their dtype has been refused; this says it better. */
static fa_code refuse_conjugate(const fa_array *array, fa_status *status) {
    int truth = fa_flag_ask(&array->type->is_conj, array->object);
    if (truth < 0) return fa_python_error(status);
    if (truth == 0) return status->code;
    return fa_fail(status, FA_EVALUE,
                   "%s is a conjugate view, and complex; pass a real array (%s.resolve_conj() first)", array->name,
                   array->name);
}

/* A type that offers nothing may have instances that do. */
static fa_code read_unknown(fa_state *state, fa_array *array, fa_status *status) {
    PyObject *found;
    int has = fa_optional_attribute(array->object, state->names.__cuda_array_interface__, &found);
    if (has < 0) return fa_python_error(status);
    if (has) {
        fa_code code = fa_interface_read(state, array, found, status);
        Py_DECREF(found);
        return code;
    }
    has = fa_optional_attribute(array->object, state->names.__dlpack__, &found);
    if (has < 0) return fa_python_error(status);
    Py_XDECREF(found);
    if (has) return fa_dlpack_device(state, array, status);
    return fa_wrong_type(array->name, array->object,
                         "an array: NumPy, or an object with __cuda_array_interface__ or __dlpack__", status);
}

/* Scalars broadcast, which a mask and a bias may. */
static fa_code read_scalar(fa_state *state, fa_array *array, fa_status *status) {
    if (strcmp(array->name, "bias") == 0) return FA_OK;
    if (strcmp(array->name, "mask") != 0) return read_unknown(state, array, status);
    PyTypeObject *type = Py_TYPE(array->object);
    if (type == &PyLong_Type || type == &PyFloat_Type)
        return fa_wrong_type("mask", array->object, "a bool array, True or False", status);
    return FA_OK;
}

static fa_code read_memory(fa_state *state, fa_array *array, const fa_array *first, fa_status *status) {
    switch (array->type->protocol) {
    case FA_BY_NUMPY: return FA_OK;
    case FA_BY_SCALAR: return read_scalar(state, array, status);
    case FA_BY_OWN: fa_device_array_read(array->object, array); return FA_OK;
    case FA_BY_EXCHANGE: return fa_exchange_read(state, array, first, status);
    case FA_BY_DLPACK: return fa_dlpack_device(state, array, status);
    case FA_BY_INTERFACE:
        return array->type->library == FA_LIB_CUPY ? fa_cupy_read(state, array, first, status)
                                                   : read_unknown(state, array, status);
    default: return read_unknown(state, array, status);
    }
}

fa_code fa_array_read(fa_state *state, fa_array *array, const char *name, PyObject *object, const fa_array *first,
                      fa_status *status) {
    array->name = name;
    array->object = object;
    array->has_stream = array->device_unknown = array->needs_stream = array->grad_off = false;
    array->view.readonly = false;
    array->view.device = (fa_device){FA_CPU, 0};
    array->type = fa_type_of(state, object, &array->type_uncached);
    if (!array->type) return fa_python_error(status);
    if (array->type->requires_grad.name) FA_TRY(refuse_grad(array, first, status));
    fa_code code = read_memory(state, array, first, status);
    if (code == FA_OK && array->type->is_neg.name) return refuse_negative(array, status);
    return code == FA_ETYPE && array->type->is_conj.name ? refuse_conjugate(array, status) : code;
}

fa_code fa_arrays_settle(fa_state *state, fa_array *arrays, int count, void *stream, fa_status *status) {
    bool asked = false;
    for (int n = 0; n < count; n++) {
        if (!arrays[n].object || !arrays[n].needs_stream) continue;
        asked = true;
        FA_TRY(fa_dlpack_read(state, &arrays[n], stream, status));
    }
    for (int n = 0; n < count && asked; n++) /* what is only borrowed may have moved meanwhile */
        if (arrays[n].object && arrays[n].type->protocol == FA_BY_EXCHANGE && !arrays[n].managed_versioned)
            FA_TRY(fa_exchange_read(state, &arrays[n], n ? &arrays[0] : NULL, status));
    for (int n = 0; n < count; n++) {
        if (!arrays[n].object) continue;
        const fa_protocol protocol = arrays[n].type->protocol;
        if (protocol == FA_BY_SCALAR)
            FA_TRY(fa_numpy_of_scalar(arrays[n].object, arrays[0].view.dtype, &arrays[n].made, status));
        if (protocol == FA_BY_SCALAR || protocol == FA_BY_NUMPY) FA_TRY(fa_numpy_read(state, &arrays[n], status));
    }
    return FA_OK;
}

/* Gives capsules back. Their deleters may run Python code, which must not meet the exception of a failed call. */
static void release_managed(fa_array *array) {
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    if (array->managed && array->managed->deleter) array->managed->deleter(array->managed);
    if (array->managed_versioned && array->managed_versioned->deleter)
        array->managed_versioned->deleter(array->managed_versioned);
    array->managed = NULL;
    array->managed_versioned = NULL;
    PyErr_Restore(type, value, traceback);
}

void fa_array_release(fa_array *array) {
    if (array->managed || array->managed_versioned) release_managed(array);
    Py_CLEAR(array->made);
    if (array->type == &array->type_uncached) fa_type_drop(&array->type_uncached);
    array->type = NULL;
}
