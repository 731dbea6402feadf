/* The state of the module and what every file of the Python front end needs of it: interned names, how the arrays of a
 * type are spoken to, exceptions. The lowest header that includes Python.h.
 *
 * Functions that can fail return fa_code and fill a status; FA_EPYTHON means that a Python exception is already set.
 * fa_raise() is the one place where a code becomes an exception. Everything here and in the headers above runs with the
 * GIL held (or on a free-threaded interpreter), except fa_plan_run().
 */
#ifndef FA_STATE_H
#define FA_STATE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>

#include "device/device.h"
#include "fa.h"
#include "faults/counters.h"
#include "faults/index_arrays.h"
#include "problem/sequences.h"
#include "python/arrays/dlpack_abi.h"
#include "python/signature.h"

/* ---- names: interned once, compared by pointer ---- */

#define FA_ATTRIBUTES(X)                                                                                               \
    X(__cuda_array_interface__)                                                                                        \
    X(__cuda_stream__)                                                                                                 \
    X(__dlpack__)                                                                                                      \
    X(__dlpack_device__)                                                                                               \
    X(__dlpack_c_exchange_api__)                                                                                       \
    X(__array_namespace__)                                                                                             \
    X(__mro__)                                                                                                         \
    X(__module__)                                                                                                      \
    X(__name__)                                                                                                        \
    X(requires_grad)                                                                                                   \
    X(is_neg)                                                                                                          \
    X(is_conj)                                                                                                         \
    X(data)                                                                                                            \
    X(ptr)                                                                                                             \
    X(device_id)                                                                                                       \
    X(dtype)                                                                                                           \
    X(shape)                                                                                                           \
    X(strides)                                                                                                         \
    X(ndim) X(typestr) X(version) X(max_version) X(from_dlpack) X(mask) X(stream) X(__objclass__) X(_c_contiguous)

/* The names of operations in Python, and the environment variables that force their kernels, by fa_op. */
#define FA_OPERATION_NAMES                                                                                             \
    {                                                                                                                  \
        [FA_FORWARD] = "attention", [FA_BACKWARD] = "backward", [FA_MERGE] = "merge", [FA_APPEND] = "append",          \
        [FA_DOCUMENTS] = "documents"                                                                                   \
    }
#define FA_KERNEL_VARIABLES                                                                                            \
    {                                                                                                                  \
        [FA_FORWARD] = "FA_EXT_KERNEL", [FA_BACKWARD] = "FA_EXT_KERNEL_BACKWARD", [FA_MERGE] = "FA_EXT_KERNEL_MERGE",  \
        [FA_APPEND] = "FA_EXT_KERNEL_APPEND", [FA_DOCUMENTS] = "FA_EXT_KERNEL_DOCUMENTS"                               \
    }
#define FA_CHECK_VARIABLE "FA_EXT_CHECK"

typedef struct fa_names {
#define FA_FIELD(name) PyObject *name;
    FA_ATTRIBUTES(FA_FIELD)
#undef FA_FIELD
    PyObject *dlpack_version;               /* (1, 3), what max_version= gets */
    PyObject *kernel_variable[FA_OP_COUNT]; /* b"FA_EXT_KERNEL", ... */
    PyObject *check_variable;               /* b"FA_EXT_CHECK" */
} fa_names;

/* ---- types: how the arrays of a type are read and made, found out once per type ---- */

typedef enum fa_protocol {
    FA_BY_NUMPY,     /* the NumPy C API */
    FA_BY_SCALAR,    /* Python's bool, int and float, and NumPy's scalars */
    FA_BY_OWN,       /* fa_ext.DeviceArray */
    FA_BY_EXCHANGE,  /* DLPack's C exchange API: torch >= 2.10 */
    FA_BY_INTERFACE, /* __cuda_array_interface__, else __dlpack__ */
    FA_BY_DLPACK,    /* __dlpack__ */
    FA_BY_UNKNOWN,   /* the type offers nothing; its instance may */
} fa_protocol;

/* Libraries whose results are made in a way of their own. */
typedef enum fa_library { FA_LIB_OTHER, FA_LIB_CUPY, FA_LIB_JAX, FA_LIB_NUMBA, FA_LIB_TORCH } fa_library;

/* A flag that instances of a type have, as an attribute or as a method without arguments; name NULL: they have not. */
typedef struct fa_flag {
    PyObject *name;            /* borrowed from fa_names */
    const PyGetSetDef *getter; /* of an attribute that C code answers, or NULL */
    PyCFunction function;      /* of a method that C code answers, or NULL */
    bool is_method;
} fa_flag;

typedef struct fa_type {
    PyTypeObject *type; /* strong, so that the address is not reused while cached */
    fa_protocol protocol;
    fa_library library;
    bool masked; /* numpy.ma.MaskedArray */
    fa_flag requires_grad, is_neg, is_conj;
    fa_flag contiguous;       /* CuPy's _c_contiguous: cheaper than its strides */
    PyObject *maker;          /* cupy.ndarray, jax.dlpack.from_dlpack, numba.cuda.as_cuda_array, torch.empty; or NULL */
    PyObject *current_stream; /* cupy.cuda.get_current_stream, or NULL */
    PyObject *grad_enabled;   /* torch.is_grad_enabled, or NULL: requires_grad always counts */
    const DLExchange *exchange;
} fa_type;

#define FA_TYPES_MAX 64

typedef struct fa_loaded {
    char *name;
    char *path;
    void *handle;
    const fa_kernel *kernel;
    struct fa_loaded *next;
} fa_loaded;

typedef struct fa_state {
    fa_context *context;
    fa_names names;
    fa_signature signature[FA_FN_COUNT];
    PyObject *unsupported_error, *cuda_error; /* exception types */
    PyObject *environment;                    /* the dict of bytes behind os.environ, or NULL */
    PyTypeObject *device_array;               /* fa_ext.DeviceArray */
    /* Types seen so far: entries below type_count never change, so readers need no lock. */
    fa_type types[FA_TYPES_MAX];
    atomic_int type_count;
    pthread_mutex_t lock; /* held while types and loaded kernels are added; never across Python code */
    _Atomic(fa_loaded *) loaded;
    atomic_int bfloat16_number; /* NumPy's number of ml_dtypes.bfloat16, or -1 while unseen */
    atomic_bool cublas_sought;
} fa_state;

extern PyModuleDef fa_core_module;

/* ---- object.c ---- */

/* Sets the exception that `status` stands for. Always returns NULL. */
PyObject *fa_raise(fa_state *state, const fa_status *status);

/* A Python exception is set: says so as a code. */
static inline fa_code fa_python_error(fa_status *status) {
    status->code = FA_EPYTHON;
    return FA_EPYTHON;
}

/* Clears an exception that an error of ours replaces, or that means that something is not there. False where it is
 * neither (KeyboardInterrupt, SystemExit, MemoryError): it stays set. */
bool fa_forget_error(void);
/* Error for a value of the wrong type: "scale is a str; accepted: ..." */
fa_code fa_wrong_type(const char *name, PyObject *value, const char *accepted, fa_status *status);
/* Name of an object's type, for messages, cut to fit. */
const char *fa_type_name(PyObject *object, char buffer[80]);
/* A str for messages: itself, or, where it has no UTF-8 or holds NUL, escaped and cut to fit, so that it equals no
 * name. */
const char *fa_shown(PyObject *text, char buffer[160]);
/* Compares a str with ASCII text. */
bool fa_text_equals(PyObject *object, const char *text);
/* Optional attribute: 1 and a new reference, 0 when it has none, -1 with an exception (AttributeError is cleared). */
int fa_optional_attribute(PyObject *object, PyObject *name, PyObject **value);
/* Value of a dict: 1 and a new reference, 0 when it has none, -1 with an exception. */
int fa_dict_get(PyObject *dict, PyObject *key, PyObject **value);

#endif
