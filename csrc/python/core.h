/* What the files of the Python front end share: module state, how an array's library is spoken to, and the stages of a
 * call. The only header besides Python's own that includes Python.h.
 *
 * Functions that can fail return fa_code and fill a status; FA_EPYTHON means that a Python exception is already set.
 * fa_raise() is the one place where a code becomes an exception. Everything here runs with the GIL held (or on a
 * free-threaded interpreter), except fa_plan_run().
 */
#ifndef FA_CORE_H
#define FA_CORE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>

#include "check.h"
#include "contents.h"
#include "device.h"
#include "dispatch.h"
#include "dlpack_abi.h"
#include "fa.h"
#include "fault_counts.h"
#include "library.h"
#include "problem.h"
#include "problem_sequences.h"
#include "registry.h"
#include "signature.h"
#include "why.h"

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
    X(strides) X(typestr) X(version) X(max_version) X(from_dlpack) X(mask) X(stream) X(__objclass__) X(_c_contiguous)

/* The environment variables that force a kernel, by fa_op. */
#define FA_KERNEL_VARIABLES                                                                                            \
    { "FA_EXT_KERNEL", "FA_EXT_KERNEL_MERGE", "FA_EXT_KERNEL_BACKWARD", "FA_EXT_KERNEL_APPEND" }
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

/* ---- arrays of a call ---- */

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
/* What an argument of this name may hold, for messages. */
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
/* What __array__(dtype, copy) makes of an array: itself, or a copy; NULL with an exception. Steals it. */
PyObject *fa_numpy_converted(PyObject *array, PyObject *dtype, PyObject *copy);
/* C-contiguous NumPy array of what `object` holds (a new reference, maybe `object` itself). */
PyObject *fa_numpy_contiguous(PyObject *object);
/* True or False for True, False and NumPy's booleans; -1, without an exception, for anything else. */
int fa_numpy_boolean(PyObject *object);

/* interface.c */
fa_code fa_interface_read(fa_state *state, fa_array *array, PyObject *interface, fa_status *status);
fa_code fa_cupy_read(fa_state *state, fa_array *array, const fa_array *first, fa_status *status);

/* dlpack.c */
fa_code fa_exchange_find(PyObject *capsule, const DLExchange **exchange, fa_status *status);
fa_code fa_exchange_read(fa_state *state, fa_array *array, const fa_array *first, fa_status *status);
fa_code fa_exchange_empty(fa_state *state, const fa_type *type, fa_device device, int ndim, const int64_t *shape,
                          fa_dtype dtype, PyObject **object, void **data, fa_status *status);
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

/* run.c. The first array decides for the call. Arrays without an object are absent. */
/* The stream of the call, and then what could only be read knowing it; *joins: some library works on another stream. */
fa_code fa_arrays_stream(fa_state *state, fa_array *array, int count, fa_stream *stream, bool *joins,
                         fa_status *status);
/* Refuses a stream that the caller or an interface names and that is none of the problem's device. */
fa_code fa_arrays_check_stream(fa_state *state, const fa_array *first, const fa_problem *problem,
                               const fa_stream *stream, fa_status *status);
/* Launches without the GIL, after the streams of the arrays' libraries and before what comes on them. */
fa_code fa_arrays_run(fa_state *state, const fa_array *array, int count, const fa_problem *problem, const fa_plan *plan,
                      const fa_device_info *info, const fa_stream *stream, bool joins, fa_status *status);

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

/* owned.c: fa_ext.DeviceArray */
PyTypeObject *fa_device_array_new_type(PyObject *module);
fa_code fa_device_array_make(fa_state *state, fa_device device, int ndim, const int64_t *shape, fa_dtype dtype,
                             const fa_stream *stream, fa_result *result, fa_status *status);
void fa_device_array_read(PyObject *object, fa_array *array);
/* The library that took the array through DLPack keeps its stream for as long as the process lives. */
void fa_device_array_outlived(PyObject *object);

/* ---- arguments ---- */

/* args.c. Readers of options: `field` is what to fill, of the type that the kind of signature.def has. */
fa_code fa_read_causal(const char *name, PyObject *value, void *field, fa_status *status);
fa_code fa_read_scale(const char *name, PyObject *value, void *field, fa_status *status);
fa_code fa_read_window(const char *name, PyObject *value, void *field, fa_status *status);
fa_code fa_read_number(const char *name, PyObject *value, void *field, fa_status *status);
fa_code fa_read_layout(const char *name, PyObject *value, void *field, fa_status *status);
fa_code fa_read_boolean(const char *name, PyObject *value, void *field, fa_status *status);
fa_code fa_read_dropout(const char *name, PyObject *value, void *field, fa_status *status);
/* An int within [low, high]; booleans are none. */
fa_code fa_read_index(const char *name, PyObject *value, long low, long high, const char *accepted, long *number,
                      fa_status *status);

/* docs.c: a docstring, with its signature; NULL: memory is out. */
char *fa_doc_new(fa_function function);

/* described.c: a device that a dict describes. */
fa_code fa_device_described(fa_state *state, PyObject *given, fa_device_info *described, fa_status *status);

/* ---- a call ---- */

/* What calls of all operations have. A struct of an operation's own begins with it. */
typedef struct fa_call {
    fa_bound bound;
    fa_array *array; /* those that are there; the first decides for the others */
    int count;
    fa_stream stream;
    bool joins; /* some library works on another stream than the call */
    const fa_kernel *forced;
    const char *forced_name; /* what it was asked for by: a loaded kernel may go by another name than its own */
    const fa_device_info *info;
    fa_problem problem;
} fa_call;

enum { FA_RESULTS = 8 }; /* at most of a call */

/* Without arrays: what fa_call_end() may be called on. */
static inline void fa_call_begin(fa_call *call, fa_array *array) {
    call->array = array;
    call->count = 0;
}
void fa_call_end(fa_call *call);
/* Reads one more array and sets *view to its view. */
fa_code fa_call_array(fa_state *state, fa_call *call, const char *name, PyObject *object, const fa_view **view,
                      fa_status *status);
/* The same for one that will be written. */
fa_code fa_call_output(fa_state *state, fa_call *call, const char *name, PyObject *object, const fa_view **view,
                       fa_status *status);
/* out=, an array or the pair (out, lse), or NULL; what is absent stays as it is. */
fa_code fa_call_outputs(fa_state *state, fa_call *call, PyObject *given, const fa_view **out, const fa_view **lse,
                        fa_status *status);
/* Reads the arrays that are given into the function's request. `first` decides for the others. */
fa_code fa_call_arrays(fa_state *state, fa_call *call, fa_argument first, void *request, fa_status *status);
/* A variable of the environment as os.environ has it, or NULL; `name` is `variable` as bytes. *held: to be released
 * when the text is no longer needed. */
fa_code fa_environment(fa_state *state, PyObject *name, const char *variable, const char **text, PyObject **held,
                       fa_status *status);
/* Reads kernel=, or where it is absent the environment variable of the operation, and stream=. */
fa_code fa_call_place(fa_state *state, fa_op op, fa_call *call, fa_status *status);
/* Puts the arrays on a device that a dict describes, and the call with them. */
fa_code fa_call_describe(fa_state *state, fa_call *call, PyObject *device, fa_device_info *described,
                         fa_status *status);
/* The stream that results are made on. */
fa_stream fa_call_result_stream(const fa_call *call);

/* What an operation does about its results, all NULL at first: makes those that are absent, with the device current;
 * hands over what the caller gets. */
typedef struct fa_ending {
    fa_code (*make)(fa_state *state, fa_call *call, fa_result *results, fa_status *status);
    PyObject *(*give)(fa_state *state, fa_call *call, fa_result *results);
} fa_ending;

/* Runs a planned call to its end: what the caller gets, or NULL with `status` filled. */
PyObject *fa_call_run(fa_state *state, fa_call *call, const fa_plan *plan, const fa_ending *ending, fa_status *status);

/* out, or (out, lse), of which results[0] and results[1] hold what the caller did not give as out=. */
PyObject *fa_call_give(fa_state *state, const fa_call *call, PyObject *given, bool wants_lse, fa_result *results);

/* attention.c */
enum {
#define FA_PARAMETER(argument, name, passing, functions, kind, ...)                                                    \
    +(FA_KIND_##kind == FA_KIND_array && ((functions)&IN_FORWARD))
    FA_FORWARD_ARRAYS = 4 /* out, lse, begin and end of k_range */
#include "signature.def"
#undef FA_PARAMETER
};

typedef struct fa_attention {
    fa_call call;
    fa_request request;
    int check; /* check=: 1, 0, or -1 for None */
    fa_array array[FA_FORWARD_ARRAYS];
} fa_attention;

/* Arguments -> request. `function` is attention, explain or answers. fa_call_end() whatever comes back. */
fa_code fa_attention_read(fa_state *state, fa_function function, PyObject *const *args, Py_ssize_t count,
                          PyObject *keywords, fa_attention *a, fa_status *status);

/* faults.c. Reads check=: 1, 0, or -1 for None. */
fa_code fa_read_check(const fa_bound *bound, int *check, fa_status *status);
/* Bad contents of the index arrays of a planned call: an error where check= asks for it, with nothing written; on the
 * CPU counted where it does not. */
fa_code fa_call_check(fa_state *state, fa_call *call, int check, fa_status *status);

/* explain.c. What functions for a question have in common: {name: reason} beside the kernel that runs. */
PyObject *fa_explain_problem(fa_state *state, const fa_call *call);

/* Functions of the module that signature.def describes. */
#define FA_DECLARE(name)                                                                                               \
    PyObject *fa_py_##name(PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *keywords);
FA_FUNCTIONS(FA_DECLARE)
#undef FA_DECLARE
PyObject *fa_time_launches(PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *keywords);

/* capsule.c: _C_API, xla_attention_cpu and the other handlers, xla_workspace() */
int fa_capsules_add(PyObject *module, fa_context *context);

/* copy.c */
PyObject *fa_to_numpy(PyObject *module, PyObject *object);

/* kernels.c */
PyObject *fa_loaded_kernels(PyObject *module, PyObject *unused);
PyObject *fa_build_info(PyObject *module, PyObject *unused);
PyObject *fa_cpu_info(PyObject *module, PyObject *unused);
PyObject *fa_device_info_py(PyObject *module, PyObject *index);
PyObject *fa_device_count_py(PyObject *module, PyObject *unused);
/* A kernel of an operation by name, compiled or loaded, and its name in lasting storage; a ValueError that lists the
 * operation's names. */
fa_code fa_kernel_named(fa_state *state, fa_op op, const char *argument, const char *name, const fa_kernel **kernel,
                        const char **listed_name, fa_status *status);
void fa_loaded_clear(fa_state *state);
/* Finds cuBLAS through fa_ext._cublas once, before the first CUDA call. False with an exception: it was interrupted. */
bool fa_cublas_seek(fa_state *state);

#endif
