/* The module fa_ext._core: its state and its functions. */
#include "call.h"

#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

static int add_names(fa_names *names) {
#define FA_INTERN(text)                                                                                                \
    if (!(names->text = PyUnicode_InternFromString(#text))) return -1;
    FA_ATTRIBUTES(FA_INTERN)
#undef FA_INTERN
    names->dlpack_version = Py_BuildValue("(ii)", DLPACK_MAJOR, DLPACK_MINOR);
    static const char *const variables[FA_OP_COUNT] = FA_KERNEL_VARIABLES;
    for (int op = 0; op < FA_OP_COUNT; op++)
        if (!(names->kernel_variable[op] = PyBytes_FromString(variables[op]))) return -1;
    names->check_variable = PyBytes_FromString(FA_CHECK_VARIABLE);
    return names->dlpack_version && names->check_variable ? 0 : -1;
}

/* os.environ keeps what it shows in a dict of bytes; where it does not, getenv() serves. */
static void find_environment(fa_state *state) {
    PyObject *os = PyImport_ImportModule("os");
    PyObject *shown = os ? PyObject_GetAttrString(os, "environ") : NULL;
    PyObject *data = shown ? PyObject_GetAttrString(shown, "_data") : NULL;
    Py_XDECREF(shown);
    Py_XDECREF(os);
    if (!data) PyErr_Clear();
    if (data && PyDict_CheckExact(data))
        state->environment = data;
    else
        Py_XDECREF(data);
}

static int add_exception(PyObject *module, const char *name, const char *text, PyObject **slot) {
    char full[64];
    snprintf(full, sizeof full, "fa_ext.%s", name);
    *slot = PyErr_NewExceptionWithDoc(full, text, PyExc_RuntimeError, NULL);
    return *slot ? PyModule_AddObjectRef(module, name, *slot) : -1;
}

static int core_exec(PyObject *module) {
    fa_state *state = PyModule_GetState(module);
    memset(state, 0, sizeof *state);
    atomic_init(&state->bfloat16_number, -1);
    pthread_mutex_init(&state->lock, NULL);
    if (fa_numpy_import() < 0 || add_names(&state->names) < 0 || !fa_signatures_make(state->signature)) return -1;
    find_environment(state);
    if (add_exception(module, "UnsupportedError", "No kernel takes the call, or the one asked for refuses it.",
                      &state->unsupported_error) < 0 ||
        add_exception(module, "CudaError", "CUDA is not there, or one of its calls failed.", &state->cuda_error) < 0)
        return -1;
    state->device_array = fa_device_array_new_type(module);
    if (!state->device_array || PyModule_AddObjectRef(module, "DeviceArray", (PyObject *)state->device_array) < 0)
        return -1;
    state->context = fa_context_new();
    if (!state->context) {
        PyErr_NoMemory();
        return -1;
    }
    if (fa_capsules_add(module, state->context) < 0) return -1;
    return PyModule_AddStringConstant(module, "__version__", FA_VERSION);
}

static int core_traverse(PyObject *module, visitproc visit, void *arg) {
    fa_state *state = PyModule_GetState(module);
    if (!state) return 0;
    Py_VISIT(state->unsupported_error);
    Py_VISIT(state->cuda_error);
    Py_VISIT(state->device_array);
    Py_VISIT(state->environment);
    int count = atomic_load(&state->type_count);
    for (int n = 0; n < count; n++) {
        Py_VISIT(state->types[n].type);
        Py_VISIT(state->types[n].maker);
        Py_VISIT(state->types[n].current_stream);
        Py_VISIT(state->types[n].grad_enabled);
    }
    return 0;
}

static int core_clear(PyObject *module) {
    fa_state *state = PyModule_GetState(module);
    if (!state) return 0;
    fa_types_clear(state);
    Py_CLEAR(state->unsupported_error);
    Py_CLEAR(state->cuda_error);
    Py_CLEAR(state->device_array);
    Py_CLEAR(state->environment);
    return 0;
}

static void core_free(void *module) {
    fa_state *state = PyModule_GetState(module);
    if (!state) return;
    core_clear(module);
    fa_signatures_clear(state->signature);
#define FA_DROP(text) Py_CLEAR(state->names.text);
    FA_ATTRIBUTES(FA_DROP)
#undef FA_DROP
    Py_CLEAR(state->names.dlpack_version);
    for (int op = 0; op < FA_OP_COUNT; op++) Py_CLEAR(state->names.kernel_variable[op]);
    Py_CLEAR(state->names.check_variable);
    fa_loaded_clear(state);
    if (state->context) fa_context_free(state->context);
    state->context = NULL;
}

PyDoc_STRVAR(to_numpy_doc, "to_numpy($module, array, /)\n--\n\n"
                           "Copies an array of any library and device into a new C-contiguous NumPy array.\n"
                           "\n"
                           "Waits for the work queued on its library's stream. bfloat16 needs ml_dtypes.");

PyDoc_STRVAR(time_launches_doc, "time_launches($module, count, /, q, k, v, **options)\n--\n\n"
                                "Host seconds a bare launch takes: one call, prepared once and launched `count` times\n"
                                "from an empty queue. What attention() costs above it is the front end's.");

PyDoc_STRVAR(
    document_intervals_doc,
    "document_intervals($module, ids=None, *, spans=None, causal=True, window=None, out=None, stream=None)\n--\n\n"
    "Ids of documents -> what their tokens see, as intervals= of attention() takes it.\n"
    "\n"
    "Token i of a document [s, e) sees the keys from max(s, i - window + 1) on up to i; up to e without causal; up to\n"
    "the end of its span, within the document, where it is in one.\n"
    "\n"
    "Parameters\n"
    "----------\n"
    "ids : int32 or int64 array, (B, S), or None\n"
    "    The document of each token: each maximal run of equal ids in a row is one. None: a row is one.\n"
    "spans : int32 or int64 array, (B, S), or None\n"
    "    Runs of one positive number are spans, whose tokens see each other both ways, as those of an image do; 0: "
    "none.\n"
    "    ids or spans is given. Any strides, any values.\n"
    "causal : bool\n"
    "    False: a token sees its document to the end, and there are no spans.\n"
    "window : int or None\n"
    "    Keys that a token sees to the left, its own included, as models count them; 1 or more.\n"
    "out : int32 array, (B, 1, S, 2), or None\n"
    "    Where the result goes, with any strides.\n"
    "stream : int, object with __cuda_stream__, or None\n"
    "    As in attention().\n"
    "\n"
    "Returns\n"
    "-------\n"
    "int32 array of ids' kind, (B, 1, S, 2)\n"
    "    On a device one kernel makes it, and nobody waits.\n"
    "\n"
    "Raises\n"
    "------\n"
    "ValueError, TypeError, BufferError\n"
    "    As attention(). Nothing is written then. FA_EXT_KERNEL_DOCUMENTS names the kernel.");

/* ---- calls within calls ---- */

/* Whatever gives an array or a number, such as __dlpack__ or __index__, may call the module again. A call takes some
 * 10 KB of stack, which Python's own limit of its recursion does not know. */
enum { MOST_CALLS = 24 }; /* of a thread at a time */
static _Thread_local int calls;

static bool begin_call(void) {
    if (++calls <= MOST_CALLS) return true;
    PyErr_Format(
        PyExc_RecursionError,
        "calls of fa_ext are nested %d deep; what gives an array or a number, such as __dlpack__, may not call "
        "fa_ext with itself",
        (int)MOST_CALLS);
    return false;
}

static PyObject *end_call(PyObject *returned) {
    calls--;
    return returned;
}

#define FA_GUARD(name)                                                                                                 \
    static PyObject *guarded_##name(PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *keywords) {   \
        return end_call(begin_call() ? fa_py_##name(module, args, count, keywords) : NULL);                            \
    }
FA_FUNCTIONS(FA_GUARD)
#undef FA_GUARD

static PyObject *time_launches(PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *keywords) {
    return end_call(begin_call() ? fa_time_launches(module, args, count, keywords) : NULL);
}

static PyObject *to_numpy(PyObject *module, PyObject *object) {
    return end_call(begin_call() ? fa_to_numpy(module, object) : NULL);
}

static PyObject *document_intervals(PyObject *module, PyObject *args, PyObject *keywords) {
    return end_call(begin_call() ? fa_document_intervals(module, args, keywords) : NULL);
}

static PyObject *device_info(PyObject *module, PyObject *index) {
    return end_call(begin_call() ? fa_device_info_py(module, index) : NULL);
}

/* ---- the module ---- */

/* The functions of the table of signatures come first; PyInit__core() sets their docstrings. */
static PyMethodDef core_methods[] = {
#define FA_METHOD(name) {#name, (PyCFunction)(void (*)(void))guarded_##name, METH_FASTCALL | METH_KEYWORDS, NULL},
    FA_FUNCTIONS(FA_METHOD)
#undef FA_METHOD
        {"to_numpy", to_numpy, METH_O, to_numpy_doc},
    {"time_launches", (PyCFunction)(void (*)(void))time_launches, METH_FASTCALL | METH_KEYWORDS, time_launches_doc},
    {"document_intervals", (PyCFunction)(void (*)(void))document_intervals, METH_VARARGS | METH_KEYWORDS,
     document_intervals_doc},
    {"loaded", fa_loaded_kernels, METH_NOARGS,
     "loaded($module, /)\n--\n\nKernels loaded at run time: {name: (path, summary)}."},
    {"build_info", fa_build_info, METH_NOARGS,
     "build_info($module, /)\n--\n\nWhat this build has: version, cuda, chaos, toolkit, instances (FA_INSTANCES), "
     "left_out (their names), kernels ({name: (device, summary)})."},
    {"operands", fa_operands_py, METH_NOARGS,
     "operands($module, /)\n--\n\nThe arrays that operations read and write, in the order of csrc/operands.def."},
    {"cpu_info", fa_cpu_info, METH_NOARGS, "cpu_info($module, /)\n--\n\nThe CPU as kernels see it."},
    {"device_count", fa_device_count_py, METH_NOARGS,
     "device_count($module, /)\n--\n\nNumber of CUDA devices. CudaError says why there are none to use."},
    {"device_info", device_info, METH_O,
     "device_info($module, index, /)\n--\n\nCapabilities of a CUDA device; sizes in bytes."},
    {NULL, NULL, 0, NULL},
};

/* Slots that CPython 3.11 does not know are appended by the running version, so that one abi3 build declares them. */
#define SLOT_MULTIPLE_INTERPRETERS 3 /* Py_mod_multiple_interpreters, 3.12 */
#define SLOT_GIL                   4 /* Py_mod_gil, 3.13 */
static PyModuleDef_Slot core_slots[4] = {{Py_mod_exec, (void *)core_exec}};

PyModuleDef fa_core_module = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "fa_ext._core",
    .m_doc = "The compiled part of fa_ext.",
    .m_size = sizeof(fa_state),
    .m_methods = core_methods,
    .m_slots = core_slots,
    .m_traverse = core_traverse,
    .m_clear = core_clear,
    .m_free = core_free,
};

PyMODINIT_FUNC PyInit__core(void);

PyMODINIT_FUNC PyInit__core(void) {
    int used = 1;
    for (int n = 0; n < FA_FN_COUNT; n++) {
        if (!core_methods[n].ml_doc) core_methods[n].ml_doc = fa_doc_new((fa_function)n);
        if (!core_methods[n].ml_doc) return PyErr_NoMemory();
    }
    if (Py_Version >= 0x030C0000) /* as NumPy: one interpreter a process */
        core_slots[used++] = (PyModuleDef_Slot){SLOT_MULTIPLE_INTERPRETERS, (void *)0};
    if (Py_Version >= 0x030D0000) /* works without the GIL */
        core_slots[used++] = (PyModuleDef_Slot){SLOT_GIL, (void *)1};
    core_slots[used] = (PyModuleDef_Slot){0, NULL};
    return PyModuleDef_Init(&fa_core_module);
}
