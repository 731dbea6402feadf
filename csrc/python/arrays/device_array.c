/* fa_ext.DeviceArray: memory of ours, for results whose library has no allocator that we could ask, and for
 * to_device(). C-contiguous, on a CUDA device or the CPU; speaks DLPack, the CUDA Array Interface and, on the CPU,
 * Python's buffer protocol and __array__(); freed in stream order. */
#include "python/arrays/arrays.h"

#include <stdlib.h>
#include <string.h>

#define SEVERAL ((void *)UINTPTR_MAX)

typedef struct device_array {
    PyObject_HEAD fa_view view;
    Py_ssize_t extents[FA_MAX_NDIM], byte_strides[FA_MAX_NDIM]; /* what buffers point to */
    void *stream;                                               /* the work that fills the memory is queued here */
    unsigned long thread;       /* that made it: the per-thread stream is another one elsewhere */
    PyObject *stream_owner;     /* keeps `stream` alive, or NULL */
    _Atomic(void *) consumer;   /* stream of the library it was handed to, NULL or SEVERAL */
    atomic_bool consumer_lives; /* that stream outlives the array, so that it may be named when the memory is freed */
} device_array;

static fa_state *state_of(PyObject *self) { return PyType_GetModuleState(Py_TYPE(self)); }

static device_array *as_array(PyObject *self) { return (device_array *)self; }

/* The per-thread stream of another thread cannot be named; the legacy stream waits for it. */
static void *own_stream(const device_array *array) {
    if (array->stream == FA_STREAM_PER_THREAD && array->thread != PyThread_get_thread_ident()) return FA_STREAM_LEGACY;
    return array->stream;
}

fa_code fa_device_array_make(fa_state *state, fa_device device, int ndim, const int64_t *shape, fa_dtype dtype,
                             const fa_stream *stream, fa_result *result, fa_status *status) {
    PyObject *self = PyType_GenericAlloc(state->device_array, 0);
    if (!self) return fa_python_error(status);
    device_array *array = as_array(self);
    fa_view *view = &array->view;
    view->device = device;
    view->dtype = dtype;
    view->ndim = ndim;
    memcpy(view->shape, shape, (size_t)ndim * sizeof *shape);
    fa_view_contiguous(view);
    for (int axis = 0; axis < ndim; axis++) {
        array->extents[axis] = (Py_ssize_t)shape[axis];
        array->byte_strides[axis] = (Py_ssize_t)(view->strides[axis] * (int64_t)fa_dtype_size(dtype));
    }
    array->stream = stream->handle;
    array->thread = PyThread_get_thread_ident();
    array->stream_owner = Py_XNewRef(stream->owner);
    size_t bytes = (size_t)fa_view_elements(view) * fa_dtype_size(dtype);
    if (bytes) {
        fa_code code = fa_memory_alloc(state->context, device, bytes, array->stream, &view->data, status);
        if (code != FA_OK) {
            Py_DECREF(self);
            return code;
        }
    }
    *result = (fa_result){self, view->data};
    return FA_OK;
}

void fa_device_array_read(PyObject *object, fa_array *array) {
    const device_array *source = as_array(object);
    array->view = source->view;
    if (source->view.device.kind != FA_CUDA) return;
    array->has_stream = true;
    array->stream = own_stream(source);
}

void fa_device_array_outlived(PyObject *object) {
    device_array *array = as_array(object);
    array->consumer_lives = array->consumer != SEVERAL;
}

static void add_consumer(device_array *array, void *stream) {
    void *before = NULL;
    if (!atomic_compare_exchange_strong(&array->consumer, &before, stream) && before != stream)
        array->consumer = SEVERAL;
}

/* The work that a library queued on the array must end before the memory is used again. The library's stream may be
 * gone by now; then this waits for the whole device. */
static void await_consumer(const device_array *array, void *stream) {
    fa_status ignored;
    void *consumer = array->consumer;
    if (!consumer) return;
    if (consumer == FA_STREAM_LEGACY || consumer == FA_STREAM_PER_THREAD) /* blocking streams */
        fa_stream_wait(stream, FA_STREAM_LEGACY, &ignored);
    else if (array->consumer_lives)
        fa_stream_wait(stream, consumer, &ignored);
    else
        fa_device_synchronize(array->view.device, &ignored);
}

static void array_dealloc(PyObject *self) {
    device_array *array = as_array(self);
    PyTypeObject *type = Py_TYPE(self);
    fa_state *state = state_of(self);
    fa_status ignored;
    int previous;
    if (array->view.data && fa_device_enter(state->context, array->view.device, &previous, &ignored) == FA_OK) {
        void *stream = own_stream(array);
        await_consumer(array, stream);
        fa_memory_free(array->view.device, array->view.data, stream, &ignored);
        fa_device_leave(array->view.device, previous);
    }
    Py_XDECREF(array->stream_owner);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF((PyObject *)type);
}

/* ---- attributes ---- */

static PyObject *get_shape(PyObject *self, void *unused) {
    (void)unused;
    return fa_shape_tuple(as_array(self)->view.ndim, as_array(self)->view.shape);
}

static PyObject *get_dtype(PyObject *self, void *unused) {
    (void)unused;
    return PyUnicode_FromString(fa_dtype_name(as_array(self)->view.dtype));
}

static PyObject *get_ndim(PyObject *self, void *unused) {
    (void)unused;
    return PyLong_FromLong(as_array(self)->view.ndim);
}

static PyObject *get_nbytes(PyObject *self, void *unused) {
    (void)unused;
    const fa_view *view = &as_array(self)->view;
    return PyLong_FromLongLong(fa_view_elements(view) * (long long)fa_dtype_size(view->dtype));
}

static PyObject *get_device(PyObject *self, void *unused) {
    (void)unused;
    fa_device device = as_array(self)->view.device;
    return device.kind == FA_CPU ? PyUnicode_FromString("cpu") : PyUnicode_FromFormat("cuda:%d", device.id);
}

static PyObject *get_interface(PyObject *self, void *unused) {
    (void)unused;
    static const char *const typestrs[FA_DTYPE_COUNT] = {
        [FA_F16] = "<f2", [FA_BF16] = "<V2", [FA_F32] = "<f4", [FA_F64] = "<f8", [FA_BOOL] = "|b1",
        [FA_I32] = "<i4", [FA_I64] = "<i8",  [FA_U8] = "|u1",  [FA_U32] = "<u4"};
    device_array *array = as_array(self);
    if (array->view.device.kind != FA_CUDA) {
        PyErr_SetString(PyExc_AttributeError, "__cuda_array_interface__: the array is on the CPU");
        return NULL;
    }
    PyObject *shape = fa_shape_tuple(array->view.ndim, array->view.shape);
    if (!shape) return NULL;
    void *nobody = NULL;
    atomic_compare_exchange_strong(&array->consumer, &nobody, FA_STREAM_LEGACY); /* it does not tell who asks */
    return Py_BuildValue("{s:N,s:s,s:(KO),s:O,s:i,s:K}", "shape", shape, "typestr", typestrs[array->view.dtype], "data",
                         (unsigned long long)(uintptr_t)array->view.data, Py_False, "strides", Py_None, "version", 3,
                         "stream", (unsigned long long)(uintptr_t)own_stream(array));
}

static PyObject *array_repr(PyObject *self) {
    PyObject *shape = get_shape(self, NULL), *device = get_device(self, NULL), *text = NULL;
    if (shape && device)
        text = PyUnicode_FromFormat("<fa_ext.DeviceArray %s %R on %U>", fa_dtype_name(as_array(self)->view.dtype),
                                    shape, device);
    Py_XDECREF(shape);
    Py_XDECREF(device);
    return text;
}

/* ---- the CPU's protocols ---- */

static bool on_host(PyObject *self, PyObject *error) {
    fa_device device = as_array(self)->view.device;
    if (device.kind == FA_CPU) return true;
    PyErr_Format(error, "the array is on CUDA device %d; fa_ext.to_numpy(array) copies it to the CPU", device.id);
    return false;
}

static bool is_f_contiguous(const fa_view *view) {
    int long_axes = 0;
    for (int axis = 0; axis < view->ndim; axis++) long_axes += view->shape[axis] != 1;
    return long_axes <= 1 || fa_view_elements(view) == 0;
}

static int array_get_buffer(PyObject *self, Py_buffer *buffer, int flags) {
    static const char *const formats[FA_DTYPE_COUNT] = {
        [FA_F16] = "e", [FA_F32] = "f", [FA_F64] = "d", [FA_BOOL] = "?",
        [FA_I32] = "i", [FA_I64] = "q", [FA_U8] = "B",  [FA_U32] = "I"}; /* bfloat16 has none */
    static char nothing;                                                 /* an empty buffer has an address, too */
    device_array *array = as_array(self);
    const fa_view *view = &array->view;
    buffer->obj = NULL;
    if (!on_host(self, PyExc_BufferError)) return -1;
    const char *refusal = NULL;
    if ((flags & PyBUF_FORMAT) && !formats[view->dtype])
        refusal = "the buffer protocol has no format for bfloat16; numpy.asarray(array) reads it, with ml_dtypes";
    else if ((flags & PyBUF_F_CONTIGUOUS) == PyBUF_F_CONTIGUOUS && !is_f_contiguous(view))
        refusal = "the array is C-contiguous, not Fortran-contiguous";
    if (refusal) {
        PyErr_SetString(PyExc_BufferError, refusal);
        return -1;
    }
    const Py_ssize_t size = (Py_ssize_t)fa_dtype_size(view->dtype);
    *buffer = (Py_buffer){
        .buf = view->data ? view->data : &nothing,
        .obj = Py_NewRef(self),
        .len = (Py_ssize_t)fa_view_elements(view) * size,
        .itemsize = size,
        .ndim = view->ndim,
        .format = (flags & PyBUF_FORMAT) ? (char *)formats[view->dtype] : NULL,
        .shape = (flags & PyBUF_ND) == PyBUF_ND ? array->extents : NULL,
        .strides = (flags & PyBUF_STRIDES) == PyBUF_STRIDES ? array->byte_strides : NULL,
    };
    return 0;
}

static PyObject *array_array(PyObject *self, PyObject *args, PyObject *keywords) {
    static char *names[] = {"dtype", "copy", NULL};
    PyObject *dtype = Py_None, *copy = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "|OO:__array__", names, &dtype, &copy)) return NULL;
    if (!on_host(self, PyExc_TypeError)) return NULL;
    PyObject *array = fa_numpy_over(state_of(self), &as_array(self)->view, self);
    return array ? fa_numpy_converted(array, dtype, copy) : NULL;
}

/* ---- DLPack out ---- */

/* One allocation: the managed tensor of either version, then shape and strides. */
typedef struct exported {
    union {
        DLManaged plain;
        DLManagedVersioned versioned;
    };
    int64_t shape[FA_MAX_NDIM], strides[FA_MAX_NDIM];
} exported;

static void drop_exported(exported *memory, PyObject *owner) {
    free(memory);
    if (!Py_IsInitialized()) return;
    PyGILState_STATE gil = PyGILState_Ensure();
    Py_DECREF(owner);
    PyGILState_Release(gil);
}

static void delete_plain(DLManaged *managed) { drop_exported((exported *)managed, managed->context); }
static void delete_versioned(DLManagedVersioned *managed) { drop_exported((exported *)managed, managed->context); }

/* A capsule that was not consumed still owns its tensor. */
static void destroy_capsule(PyObject *capsule) {
    if (PyCapsule_IsValid(capsule, "dltensor")) {
        DLManaged *managed = PyCapsule_GetPointer(capsule, "dltensor");
        managed->deleter(managed);
    } else if (PyCapsule_IsValid(capsule, "dltensor_versioned")) {
        DLManagedVersioned *managed = PyCapsule_GetPointer(capsule, "dltensor_versioned");
        managed->deleter(managed);
    }
}

static PyObject *export(PyObject *self, bool versioned) {
    const fa_view *view = &as_array(self)->view;
    exported *memory = calloc(1, sizeof *memory);
    if (!memory) return PyErr_NoMemory();
    memcpy(memory->shape, view->shape, sizeof memory->shape);
    memcpy(memory->strides, view->strides, sizeof memory->strides);
    DLTensor tensor = {.data = view->data,
                       .device = {view->device.kind == FA_CPU ? DLPACK_CPU : DLPACK_CUDA, view->device.id},
                       .ndim = view->ndim,
                       .shape = memory->shape,
                       .strides = memory->strides};
    fa_dlpack_dtype(view->dtype, &tensor.dtype);
    if (versioned)
        memory->versioned = (DLManagedVersioned){{DLPACK_MAJOR, DLPACK_MINOR}, self, delete_versioned, 0, tensor};
    else
        memory->plain = (DLManaged){tensor, self, delete_plain};
    PyObject *capsule = PyCapsule_New(memory, versioned ? "dltensor_versioned" : "dltensor", destroy_capsule);
    if (!capsule) {
        free(memory);
        return NULL;
    }
    Py_INCREF(self);
    return capsule;
}

/* stream=: None is the legacy stream, -1 asks for no order at all. */
static fa_code order_consumer(PyObject *self, PyObject *stream, fa_status *status) {
    device_array *array = as_array(self);
    if (array->view.device.kind == FA_CPU) {
        if (stream == Py_None) return FA_OK;
        return fa_fail(status, FA_EBUFFER, "stream must be None: the array is on the CPU");
    }
    void *consumer = FA_STREAM_LEGACY;
    if (stream != Py_None) {
        if (PyLong_Check(stream) && PyLong_AsLong(stream) == -1 && !PyErr_Occurred()) {
            array->consumer = SEVERAL;
            return FA_OK;
        }
        PyErr_Clear();
        FA_TRY(fa_stream_number("stream", stream, &consumer, status));
    }
    int previous;
    FA_TRY(fa_device_enter(state_of(self)->context, array->view.device, &previous, status));
    fa_code code = fa_stream_wait(consumer, own_stream(array), status);
    fa_device_leave(array->view.device, previous);
    add_consumer(array, consumer);
    array->consumer_lives = false;
    return code;
}

static bool parse_pair(const char *name, PyObject *pair, int *first, int *second) {
    if (PyTuple_Check(pair) && PyArg_ParseTuple(pair, "ii", first, second)) return true;
    if (!fa_forget_error()) return false;
    PyErr_Format(PyExc_TypeError, "%s is %R; accepted: a pair of ints", name, pair);
    return false;
}

static PyObject *array_dlpack(PyObject *self, PyObject *args, PyObject *keywords) {
    static char *names[] = {"stream", "max_version", "dl_device", "copy", NULL};
    PyObject *stream = Py_None, *max_version = Py_None, *device = Py_None, *copy = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "|$OOOO:__dlpack__", names, &stream, &max_version, &device, &copy))
        return NULL;
    int major = 0, minor = 0, type, id;
    if (max_version != Py_None && !parse_pair("max_version", max_version, &major, &minor)) return NULL;
    const fa_view *view = &as_array(self)->view;
    if (device != Py_None) {
        if (!parse_pair("dl_device", device, &type, &id)) return NULL;
        if (type != (view->device.kind == FA_CPU ? DLPACK_CPU : DLPACK_CUDA) || id != view->device.id) {
            PyErr_SetString(PyExc_BufferError, "dl_device: the array can only be exported where it is");
            return NULL;
        }
    }
    if (copy == Py_True) {
        PyErr_SetString(PyExc_BufferError, "copy=True: the array can only be exported without a copy");
        return NULL;
    }
    fa_status status;
    if (order_consumer(self, stream, &status) != FA_OK) return fa_raise(state_of(self), &status);
    return export(self, major >= 1);
}

static PyObject *array_dlpack_device(PyObject *self, PyObject *unused) {
    (void)unused;
    fa_device device = as_array(self)->view.device;
    return Py_BuildValue("(ii)", device.kind == FA_CPU ? DLPACK_CPU : DLPACK_CUDA, device.id);
}

static PyMethodDef array_methods[] = {
    {"__dlpack__", (PyCFunction)(void (*)(void))array_dlpack, METH_VARARGS | METH_KEYWORDS,
     "__dlpack__($self, /, *, stream=None, max_version=None, dl_device=None, copy=None)\n--\n\nDLPack capsule."},
    {"__dlpack_device__", array_dlpack_device, METH_NOARGS,
     "__dlpack_device__($self, /)\n--\n\n(DLPack device type, device id)."},
    {"__array__", (PyCFunction)(void (*)(void))array_array, METH_VARARGS | METH_KEYWORDS,
     "__array__($self, /, dtype=None, copy=None)\n--\n\nNumPy array over the same memory; on the CPU only."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef array_attributes[] = {
    {"shape", get_shape, NULL, "Extents.", NULL},
    {"dtype", get_dtype, NULL, "Name of the dtype: float16, bfloat16, float32, float64 or bool.", NULL},
    {"ndim", get_ndim, NULL, "Number of dimensions.", NULL},
    {"nbytes", get_nbytes, NULL, "Bytes of memory.", NULL},
    {"device", get_device, NULL, "'cuda:<index>' or 'cpu'.", NULL},
    {"__cuda_array_interface__", get_interface, NULL, "CUDA Array Interface, version 3.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyTypeObject *fa_device_array_new_type(PyObject *module) {
    static PyType_Slot slots[] = {
        {Py_tp_dealloc, array_dealloc},
        {Py_tp_repr, array_repr},
        {Py_tp_methods, array_methods},
        {Py_tp_getset, array_attributes},
        {Py_bf_getbuffer, array_get_buffer},
        {Py_tp_doc,
         "A C-contiguous array of fa_ext's own, on a CUDA device or the CPU.\n\n"
         "Any library takes it through __dlpack__ or __cuda_array_interface__; to_numpy() copies it. On the\n"
         "CPU numpy.asarray() and memoryview() share its memory."},
        {0, NULL},
    };
    static PyType_Spec spec = {
        .name = "fa_ext.DeviceArray",
        .basicsize = sizeof(device_array),
        .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE,
        .slots = slots,
    };
    return (PyTypeObject *)PyType_FromModuleAndSpec(module, &spec, NULL);
}
