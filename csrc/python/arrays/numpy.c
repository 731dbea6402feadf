/* NumPy arrays, in and out. The only file that includes NumPy's headers. */
#include "python/arrays/arrays.h"

#include <numpy/arrayobject.h>
#include <numpy/arrayscalars.h>

#include <float.h>
#include <math.h>

int fa_numpy_import(void) { return PyArray_ImportNumPyAPI(); }

bool fa_numpy_is_array_type(PyTypeObject *type) {
    return type == &PyArray_Type || PyType_IsSubtype(type, &PyArray_Type);
}

bool fa_numpy_is_scalar_type(PyTypeObject *type) {
    return type == &PyBool_Type || type == &PyLong_Type || type == &PyFloat_Type ||
           PyType_IsSubtype(type, &PyGenericArrType_Type);
}

fa_code fa_numpy_of_scalar(PyObject *scalar, fa_dtype q_dtype, PyObject **made, fa_status *status) {
    if (PyLong_CheckExact(scalar) || PyFloat_CheckExact(scalar)) {
        double value = PyFloat_AsDouble(scalar);
        if (PyErr_Occurred()) { /* an int beyond float64 */
            PyErr_Clear();
            return fa_fail(status, FA_EVALUE, "bias is too large for a float");
        }
        const bool wide = q_dtype == FA_F64;
        if (!wide && isfinite(value) && fabs(value) > FLT_MAX) value = copysign(FLT_MAX, value);
        *made = PyArray_ZEROS(0, NULL, wide ? NPY_DOUBLE : NPY_FLOAT, 0);
        if (*made && wide)
            *(double *)PyArray_DATA((PyArrayObject *)*made) = value;
        else if (*made)
            *(float *)PyArray_DATA((PyArrayObject *)*made) = (float)value;
    } else {
        *made = PyArray_FromAny(scalar, NULL, 0, 0, 0, NULL);
    }
    return *made ? FA_OK : fa_python_error(status);
}

int fa_numpy_boolean(PyObject *object) {
    if (object == Py_True) return 1;
    if (object == Py_False) return 0;
    if (PyArray_IsScalar(object, Bool)) return PyObject_IsTrue(object);
    return -1;
}

/* ml_dtypes registers bfloat16 as a dtype of its own; its number is found by name, once. */
static bool is_bfloat16(fa_state *state, PyArray_Descr *descr) {
    int number = descr->type_num;
    int known = atomic_load_explicit(&state->bfloat16_number, memory_order_relaxed);
    if (known >= 0) return number == known;
    if (number < NPY_USERDEF || PyDataType_ELSIZE(descr) != 2) return false;
    PyObject *name = PyObject_GetAttr((PyObject *)descr->typeobj, state->names.__name__);
    bool found = name && fa_text_equals(name, "bfloat16");
    if (!name) PyErr_Clear();
    Py_XDECREF(name);
    if (found) atomic_store_explicit(&state->bfloat16_number, number, memory_order_relaxed);
    return found;
}

static fa_code dtype_of(fa_state *state, const char *name, PyArray_Descr *descr, fa_dtype *dtype, fa_status *status) {
    switch (descr->type_num) {
    case NPY_HALF: *dtype = FA_F16; break;
    case NPY_FLOAT: *dtype = FA_F32; break;
    case NPY_DOUBLE: *dtype = FA_F64; break;
    case NPY_BOOL: *dtype = FA_BOOL; break;
    case NPY_UBYTE: *dtype = FA_U8; break;
    case NPY_UINT: *dtype = FA_U32; break;
    case NPY_INT:
    case NPY_LONG:
    case NPY_LONGLONG: *dtype = PyDataType_ELSIZE(descr) == 8 ? FA_I64 : FA_I32; break;
    default:
        if (is_bfloat16(state, descr)) {
            *dtype = FA_BF16;
            break;
        }
        PyObject *shown = PyObject_Str((PyObject *)descr);
        const char *text = shown ? PyUnicode_AsUTF8AndSize(shown, NULL) : NULL;
        if (!text) PyErr_Clear();
        fa_fail(status, FA_ETYPE, "%s has dtype %.60s; accepted: %s", name, text ? text : "?",
                fa_accepted_dtypes(name));
        Py_XDECREF(shown);
        return FA_ETYPE;
    }
    if (PyDataType_ISNOTSWAPPED(descr)) return FA_OK;
    return fa_fail(status, FA_EBUFFER, "%s is big-endian; accepted: arrays in native byte order", name);
}

fa_code fa_numpy_dtype_read(fa_state *state, const char *name, PyObject *dtype, fa_dtype *out, fa_status *status) {
    if (!PyArray_DescrCheck(dtype)) return fa_wrong_type(name, dtype, "an array with a NumPy dtype", status);
    return dtype_of(state, name, (PyArray_Descr *)dtype, out, status);
}

fa_code fa_numpy_read(fa_state *state, fa_array *array, fa_status *status) {
    PyArrayObject *source = (PyArrayObject *)(array->made ? array->made : array->object);
    fa_view *view = &array->view;
    if (array->type->masked)
        return fa_fail(status, FA_ETYPE, "%s is a masked array; pass plain data, and mask= for what to leave out",
                       array->name);
    FA_TRY(dtype_of(state, array->name, PyArray_DESCR(source), &view->dtype, status));
    view->ndim = PyArray_NDIM(source);
    if (view->ndim > FA_MAX_NDIM)
        return fa_fail(status, FA_EVALUE, "%s has %d dimensions; accepted: 4", array->name, view->ndim);
    view->data = PyArray_DATA(source);
    view->device = (fa_device){FA_CPU, 0};
    view->readonly = !PyArray_ISWRITEABLE(source);
    int64_t byte_strides[FA_MAX_NDIM];
    for (int axis = 0; axis < view->ndim; axis++) {
        view->shape[axis] = PyArray_DIM(source, axis);
        byte_strides[axis] = PyArray_STRIDE(source, axis);
    }
    return fa_view_byte_strides(array->name, view, byte_strides, status);
}

PyObject *fa_numpy_dtype(fa_state *state, fa_dtype dtype) {
    static const int numbers[FA_DTYPE_COUNT] = {
        [FA_F16] = NPY_HALF,  [FA_F32] = NPY_FLOAT, [FA_F64] = NPY_DOUBLE, [FA_BOOL] = NPY_BOOL,
        [FA_I32] = NPY_INT32, [FA_I64] = NPY_INT64, [FA_U8] = NPY_UINT8,   [FA_U32] = NPY_UINT32};
    if (dtype != FA_BF16) return (PyObject *)PyArray_DescrFromType(numbers[dtype]);
    int known = atomic_load_explicit(&state->bfloat16_number, memory_order_relaxed);
    if (known >= 0) return (PyObject *)PyArray_DescrFromType(known);
    PyObject *module = PyImport_ImportModule("ml_dtypes");
    if (!module) {
        if (PyErr_ExceptionMatches(PyExc_ImportError)) {
            PyErr_Clear();
            PyErr_SetString(PyExc_ImportError, "NumPy has no bfloat16 of its own: pip install ml_dtypes");
        }
        return NULL;
    }
    PyObject *class = PyObject_GetAttrString(module, "bfloat16");
    PyArray_Descr *descr = NULL;
    if (class && PyArray_DescrConverter(class, &descr) == NPY_SUCCEED) is_bfloat16(state, descr);
    Py_XDECREF(class);
    Py_DECREF(module);
    return (PyObject *)descr;
}

PyObject *fa_numpy_empty(fa_state *state, int ndim, const int64_t *shape, fa_dtype dtype, void **data) {
    PyArray_Descr *descr = (PyArray_Descr *)fa_numpy_dtype(state, dtype);
    if (!descr) return NULL;
    npy_intp extents[FA_MAX_NDIM];
    for (int axis = 0; axis < ndim; axis++) extents[axis] = (npy_intp)shape[axis];
    PyObject *made = PyArray_NewFromDescr(&PyArray_Type, descr, ndim, extents, NULL, NULL, 0, NULL); /* steals descr */
    if (made) *data = PyArray_DATA((PyArrayObject *)made);
    return made;
}

PyObject *fa_numpy_over(fa_state *state, const fa_view *view, PyObject *owner) {
    PyArray_Descr *descr = (PyArray_Descr *)fa_numpy_dtype(state, view->dtype);
    if (!descr) return NULL;
    npy_intp shape[FA_MAX_NDIM], strides[FA_MAX_NDIM];
    for (int axis = 0; axis < view->ndim; axis++) {
        shape[axis] = (npy_intp)view->shape[axis];
        strides[axis] = (npy_intp)(view->strides[axis] * (int64_t)fa_dtype_size(view->dtype));
    }
    PyObject *made =
        PyArray_NewFromDescr(&PyArray_Type, descr, view->ndim, shape, strides, view->data, NPY_ARRAY_WRITEABLE, NULL);
    if (made && owner && view->data && PyArray_SetBaseObject((PyArrayObject *)made, Py_NewRef(owner)) < 0)
        Py_CLEAR(made);
    return made;
}

PyObject *fa_numpy_copy_of(fa_state *state, const fa_view *view) {
    PyObject *borrowed = fa_numpy_over(state, view, NULL);
    PyObject *copy = borrowed ? PyArray_NewCopy((PyArrayObject *)borrowed, NPY_CORDER) : NULL;
    Py_XDECREF(borrowed);
    return copy;
}

PyObject *fa_numpy_converted(PyObject *array, PyObject *dtype, PyObject *copy) {
    PyArrayObject *source = (PyArrayObject *)array;
    PyArray_Descr *wanted = NULL;
    PyObject *made = NULL;
    const int copies = copy == Py_None ? 0 : PyObject_IsTrue(copy);
    if (copies < 0 || PyArray_DescrConverter2(dtype, &wanted) != NPY_SUCCEED) goto done;
    if (wanted && !PyArray_EquivTypes(wanted, PyArray_DESCR(source))) {
        if (copy != Py_None && !copies)
            PyErr_SetString(PyExc_ValueError, "copy=False, but another dtype than the array's own needs a copy");
        else
            made = PyArray_CastToType(source, (PyArray_Descr *)Py_NewRef((PyObject *)wanted), 0);
    } else {
        made = copies ? PyArray_NewCopy(source, NPY_CORDER) : Py_NewRef(array);
    }
done:
    Py_XDECREF((PyObject *)wanted);
    Py_DECREF(array);
    return made;
}

PyObject *fa_numpy_contiguous(PyObject *object) {
    return PyArray_FROM_OF(object, NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_ALIGNED | NPY_ARRAY_NOTSWAPPED);
}
