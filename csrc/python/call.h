/* A call from its arguments to what the caller gets, whatever the operation; and the functions of the module. */
#ifndef FA_CALL_H
#define FA_CALL_H

#include "device/threads.h"
#include "dispatch/plan_cache.h"
#include "dispatch/registry.h"
#include "dispatch/why.h"
#include "problem/forward.h"
#include "python/arrays/arrays.h"

/* ---- arguments ---- */

/* args.c. Readers of options: `field` is what to fill, of the type that the kind of signature.def has. */
fa_code fa_read_causal(const char *name, PyObject *value, void *field, fa_status *status);
fa_code fa_read_scale(const char *name, PyObject *value, void *field, fa_status *status);
fa_code fa_read_window(const char *name, PyObject *value, void *field, fa_status *status);
fa_code fa_read_number(const char *name, PyObject *value, void *field, fa_status *status);
/* A number that no length reaches counts as the largest. */
fa_code fa_read_count(const char *name, PyObject *value, void *field, fa_status *status);
fa_code fa_read_layout(const char *name, PyObject *value, void *field, fa_status *status);
fa_code fa_read_boolean(const char *name, PyObject *value, void *field, fa_status *status);
/* An int within [low, high]; booleans are none. */
fa_code fa_read_index(const char *name, PyObject *value, long low, long high, const char *accepted, long *number,
                      fa_status *status);

/* docs.c: a docstring, with its signature; NULL: memory is out. */
char *fa_doc_new(fa_function function);

/* described.c: a device that a dict describes. */
fa_code fa_device_described(fa_state *state, PyObject *given, fa_device_info *described, fa_status *status);

/* ---- a call ---- */

/* run.c. The first array decides for the call. Arrays without an object are absent. */
/* The stream of the call, and then what could only be read knowing it; *joins: some library works on another stream. */
fa_code fa_arrays_stream(fa_state *state, fa_array *array, int count, fa_stream *stream, bool *joins,
                         fa_status *status);
/* Refuses a stream, named by the caller or an interface, that does not belong to the problem's device. */
fa_code fa_arrays_check_stream(fa_state *state, const fa_array *first, const fa_problem *problem,
                               const fa_stream *stream, fa_status *status);
/* From fa_gil_release() to fa_gil_take() other threads of Python run. A problem on the CPU is stopped when a signal's
 * handler raises, as that of Ctrl-C does; then fa_gil_take() returns FA_EPYTHON, else `code`. */
typedef struct fa_gil {
    PyThreadState *thread;
    fa_cpu_watch watch;
    bool watches;
} fa_gil;
void fa_gil_release(fa_gil *gil, fa_problem *problem);
fa_code fa_gil_take(fa_gil *gil, fa_code code, fa_status *status);
/* Launches without the GIL, after the streams of the arrays' libraries and before what comes on them. */
fa_code fa_arrays_run(fa_state *state, const fa_array *array, int count, fa_problem *problem, const fa_plan *plan,
                      const fa_device_info *info, const fa_stream *stream, bool joins, fa_status *status);

/* The fields of calls of all operations. A struct of an operation's own begins with it. */
typedef struct fa_call {
    fa_bound bound;
    fa_array *array; /* those that are there; the first decides for the others */
    int count;
    PyObject *dropout; /* strong: the items of dropout=, one of which may be an array; NULL: none */
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
    call->dropout = NULL;
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
/* dropout.c. dropout=, whose state may be an array. */
fa_code fa_call_dropout(fa_state *state, fa_call *call, fa_request *request, fa_status *status);
/* Reads the arrays that are given into the function's request. `first` decides for the others. */
fa_code fa_call_arrays(fa_state *state, fa_call *call, fa_argument first, void *request, fa_status *status);
/* Reads k_range= and segments=, pairs of arrays. */
fa_code fa_call_pairs(fa_state *state, fa_call *call, fa_request *request, fa_status *status);
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

/* The hooks of an operation for its results, all NULL at first: one makes those that are absent, with the device
 * current, one hands over what the caller gets. */
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
    FA_FORWARD_ARRAYS = 7 /* out, lse, two of k_range and of segments, dropout's state */
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

/* explain.c. The answer that all explain functions give: {name: reason} beside the kernel that runs. */
PyObject *fa_explain_problem(fa_state *state, const fa_call *call);

/* Functions of the module that signature.def describes. */
#define FA_DECLARE(name)                                                                                               \
    PyObject *fa_py_##name(PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *keywords);
FA_FUNCTIONS(FA_DECLARE)
#undef FA_DECLARE
PyObject *fa_time_launches(PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *keywords);

/* capsule.c: _C_API, xla_attention_cpu and the other handlers, xla_workspace() */
int fa_capsules_add(PyObject *module, fa_context *context);

/* operands.c */
PyObject *fa_operands_py(PyObject *module, PyObject *unused);

/* copy.c */
PyObject *fa_to_numpy(PyObject *module, PyObject *object);
/* document_intervals.c */
PyObject *fa_document_intervals(PyObject *module, PyObject *args, PyObject *keywords);

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
