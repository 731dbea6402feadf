/* The arrays of a call: read through the protocol of their library, ordered by its streams; results made for it. */
#ifndef FA_ARRAYS_H
#define FA_ARRAYS_H

#include "problem/check.h"
#include "python/state.h"

typedef struct fa_array {
    const char *name; /* of the argument, for messages */
    PyObject *object; /* borrowed */
    const fa_type *type;
    DLManaged *managed; /* DLPack capsules taken over: released after the launch */
    DLManagedVersioned *managed_versioned;
    void *stream;
    bool has_stream;     /* its library works on `stream` */
    bool device_unknown; /* an empty array without a pointer: on whichever device the others are */
    bool needs_stream;   /* to be read by fa_dlpack_read() once the stream of the call is known */
    bool grad_off;       /* its library makes no gradients now */
    PyObject *made;      /* strong: the 0-d array of a scalar, or NULL */
    fa_view view;
    fa_type type_uncached; /* what `type` points to when the cache is full */
} fa_array;

/* Describes `object`, all but what fa_arrays_settle() reads: arrays that can only be asked through __dlpack__(stream=),
 * left with needs_stream set, and NumPy's. A mask or a bias may be a scalar. */
fa_code fa_array_read(fa_state *state, fa_array *array, const char *name, PyObject *object, const fa_array *first,
                      fa_status *status);
/* Reads the rest of the arrays of a call, of which the first is q; NumPy's come last, since Python code that runs until
 * then may resize them. */
fa_code fa_arrays_settle(fa_state *state, fa_array *arrays, int count, void *stream, fa_status *status);
void fa_array_release(fa_array *array);
/* The way to speak to objects of a type; NULL with an exception. `space` is used when the cache is full. */
const fa_type *fa_type_of(fa_state *state, PyObject *object, fa_type *space);
void fa_types_clear(fa_state *state);
void fa_type_drop(fa_type *entry);
/* 1, 0, or -1 with an exception. */
int fa_flag_ask(const fa_flag *flag, PyObject *object);

/* view.c */
/* Strides in bytes, multiples of the item size, -> elements; and fa_view_check(). */
fa_code fa_view_byte_strides(const char *name, fa_view *view, const int64_t *byte_strides, fa_status *status);
int64_t fa_view_elements(const fa_view *view);
PyObject *fa_shape_tuple(int ndim, const int64_t *shape);
/* The dtypes that an argument of this name may have, for messages. */
const char *fa_accepted_dtypes(const char *name);
/* Reads a type string such as "<f2". *unclear is set for the two-byte void that stands for bfloat16 in places. */
fa_code fa_typestr_parse(const char *name, const char *text, fa_dtype *dtype, bool *unclear, fa_status *status);

/* numpy.c: the only file that includes NumPy's headers. */
int fa_numpy_import(void);
bool fa_numpy_is_array_type(PyTypeObject *type);
bool fa_numpy_is_scalar_type(PyTypeObject *type);
/* A 0-d array of a scalar; of Python's numbers as float64 if that is the dtype of q, else float32. */
fa_code fa_numpy_of_scalar(PyObject *scalar, fa_dtype q_dtype, PyObject **made, fa_status *status);
fa_code fa_numpy_read(fa_state *state, fa_array *array, fa_status *status);
PyObject *fa_numpy_empty(fa_state *state, int ndim, const int64_t *shape, fa_dtype dtype, void **data);
PyObject *fa_numpy_dtype(fa_state *state, fa_dtype dtype);
/* dtype of a numpy.dtype object; FA_ETYPE for one that is not ours. */
fa_code fa_numpy_dtype_read(fa_state *state, const char *name, PyObject *dtype, fa_dtype *out, fa_status *status);
/* A writable NumPy array over host memory, which `owner` keeps alive. */
PyObject *fa_numpy_over(fa_state *state, const fa_view *view, PyObject *owner);
/* A copy of it, C-contiguous: strides may be any. */
PyObject *fa_numpy_copy_of(fa_state *state, const fa_view *view);
/* The result of __array__(dtype, copy) of an array: itself, or a copy; NULL with an exception. Steals the array. */
PyObject *fa_numpy_converted(PyObject *array, PyObject *dtype, PyObject *copy);
/* C-contiguous NumPy array of what `object` holds (a new reference, maybe `object` itself). */
PyObject *fa_numpy_contiguous(PyObject *object);
/* True or False for True, False and NumPy's booleans; -1, without an exception, for anything else. */
int fa_numpy_boolean(PyObject *object);

/* cuda_interface.c */
fa_code fa_interface_read(fa_state *state, fa_array *array, PyObject *interface, fa_status *status);
fa_code fa_cupy_read(fa_state *state, fa_array *array, const fa_array *first, fa_status *status);

/* dlpack.c */
fa_code fa_exchange_find(PyObject *capsule, const DLExchange **exchange, fa_status *status);
fa_code fa_exchange_read(fa_state *state, fa_array *array, const fa_array *first, fa_status *status);
fa_code fa_exchange_empty(fa_state *state, const fa_type *type, fa_device device, int ndim, const int64_t *shape,
                          fa_dtype dtype, PyObject **object, void **data, fa_status *status);
/* The memory of a new array alone; its deleter gives it back. */
fa_code fa_exchange_allocate(const fa_type *type, fa_device device, int ndim, const int64_t *shape, fa_dtype dtype,
                             DLManagedVersioned **managed, fa_status *status);
/* The second reading: asks __dlpack__ for an array whose consumer works on `stream`. */
fa_code fa_dlpack_read(fa_state *state, fa_array *array, void *stream, fa_status *status);
/* Device of an array by __dlpack_device__. */
fa_code fa_dlpack_device(fa_state *state, fa_array *array, fa_status *status);
void fa_dlpack_dtype(fa_dtype dtype, DLDataType *out);

/* ---- streams ---- */

/* The stream a call runs on. */
typedef struct fa_stream {
    void *handle;    /* NULL on the CPU */
    bool given;      /* by stream= */
    PyObject *owner; /* borrowed: the object given as stream=, or NULL */
} fa_stream;

/* Reads stream=, where 0 is the legacy stream; a handle of NULL with given set never happens. */
fa_code fa_stream_parse(fa_state *state, PyObject *object, fa_stream *stream, fa_status *status);
/* Number of an interface or of __dlpack__ -> handle; refuses 0, as their specifications do, and negative numbers. */
fa_code fa_stream_number(const char *name, PyObject *number, void **handle, fa_status *status);
/* Orders `stream` after the streams of the arrays' libraries (before the launch), and those after it (afterwards). */
fa_code fa_stream_join(const fa_array *arrays, int count, void *stream, bool before, fa_status *status);
/* torch's current stream without the exchange API. */
fa_code fa_torch_stream(int device, void **stream, bool *found, fa_status *status);

/* ---- results ---- */

typedef struct fa_result {
    PyObject *object; /* strong */
    void *data;
} fa_result;

/* A new C-contiguous array of the kind of `like`. With the device current. */
fa_code fa_result_make(fa_state *state, const fa_array *like, int ndim, const int64_t *shape, fa_dtype dtype,
                       const fa_stream *stream, fa_result *result, fa_status *status);
/* Hands the array over to `like`'s library once the work is queued; steals result->object. With the device current.
 * NULL with an exception. */
PyObject *fa_result_finish(fa_state *state, const fa_array *like, fa_result *result);

/* device_array.c: fa_ext.DeviceArray */
PyTypeObject *fa_device_array_new_type(PyObject *module);
fa_code fa_device_array_make(fa_state *state, fa_device device, int ndim, const int64_t *shape, fa_dtype dtype,
                             const fa_stream *stream, fa_result *result, fa_status *status);
void fa_device_array_read(PyObject *object, fa_array *array);
/* The library that took the array through DLPack keeps its stream for as long as the process lives. */
void fa_device_array_outlived(PyObject *object);

#endif
