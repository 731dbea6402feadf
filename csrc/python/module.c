/* The module fa_ext._core: its state, its functions and the one place where status codes become exceptions. */
#include "core.h"

#include <string.h>

static PyObject *exception_of(fa_state *state, fa_code code) {
    switch (code) {
    case FA_EVALUE: return PyExc_ValueError;
    case FA_ETYPE: return PyExc_TypeError;
    case FA_EBUFFER: return PyExc_BufferError;
    case FA_EMEMORY: return PyExc_MemoryError;
    case FA_EUNSUPPORTED: return state->unsupported_error;
    case FA_ECUDA: return state->cuda_error;
    default: return PyExc_SystemError;
    }
}

PyObject *fa_raise(fa_state *state, const fa_status *status) {
    if (status->code != FA_EPYTHON) {
        /* What was given may be cut inside a character, and a path or a variable need not be UTF-8. */
        PyObject *text = PyUnicode_DecodeUTF8(status->message, (Py_ssize_t)strlen(status->message), "replace");
        if (text) PyErr_SetObject(exception_of(state, status->code), text);
        Py_XDECREF(text);
    } else if (!PyErr_Occurred()) {
        PyErr_SetString(PyExc_SystemError, "fa_ext: an error was reported without an exception");
    }
    return NULL;
}

const char *fa_type_name(PyObject *object, char buffer[80]) {
    PyObject *name = PyObject_GetAttrString((PyObject *)Py_TYPE(object), "__name__");
    const char *text = name ? PyUnicode_AsUTF8AndSize(name, NULL) : NULL;
    snprintf(buffer, 80, "%s", text ? text : "object of an unnamed type");
    if (!text) PyErr_Clear();
    Py_XDECREF(name);
    return buffer;
}

fa_code fa_wrong_type(const char *name, PyObject *value, const char *accepted, fa_status *status) {
    char given[80];
    return fa_fail(status, FA_ETYPE, "%s has type %s; accepted: %s", name, fa_type_name(value, given), accepted);
}

bool fa_forget_error(void) {
    if (PyErr_Occurred() && (!PyErr_ExceptionMatches(PyExc_Exception) || PyErr_ExceptionMatches(PyExc_MemoryError)))
        return false;
    PyErr_Clear();
    return true;
}

const char *fa_shown(PyObject *text, char buffer[160]) {
    Py_ssize_t size;
    const char *plain = PyUnicode_AsUTF8AndSize(text, &size);
    if (plain && strlen(plain) == (size_t)size) return plain;
    PyErr_Clear();
    PyObject *escaped = PyUnicode_AsUnicodeEscapeString(text);
    if (!escaped) PyErr_Clear();
    snprintf(buffer, 160, "%s", escaped ? PyBytes_AsString(escaped) : "?");
    Py_XDECREF(escaped);
    return buffer;
}

bool fa_text_equals(PyObject *object, const char *text) {
    Py_ssize_t size;
    const char *given = PyUnicode_Check(object) ? PyUnicode_AsUTF8AndSize(object, &size) : NULL;
    if (!given) {
        PyErr_Clear();
        return false;
    }
    return (size_t)size == strlen(text) && memcmp(given, text, (size_t)size) == 0;
}

int fa_optional_attribute(PyObject *object, PyObject *name, PyObject **value) {
    *value = PyObject_GetAttr(object, name);
    if (*value) return 1;
    if (!PyErr_ExceptionMatches(PyExc_AttributeError)) return -1;
    PyErr_Clear();
    return 0;
}

int fa_dict_get(PyObject *dict, PyObject *key, PyObject **value) {
#ifdef Py_GIL_DISABLED /* another thread may drop the value between the look-up and the reference */
    return PyDict_GetItemRef(dict, key, value);
#else
    *value = Py_XNewRef(PyDict_GetItemWithError(dict, key));
    return *value ? 1 : PyErr_Occurred() ? -1 : 0;
#endif
}

static int add_names(fa_names *names) {
#define FA_INTERN(name)                                                                                                \
    if (!(names->argument[FA_ARG_##name] = PyUnicode_InternFromString(#name))) return -1;
    FA_ARGUMENTS(FA_INTERN)
#undef FA_INTERN
#define FA_INTERN(text)                                                                                                \
    if (!(names->text = PyUnicode_InternFromString(#text))) return -1;
    FA_ATTRIBUTES(FA_INTERN)
#undef FA_INTERN
    names->dlpack_version = Py_BuildValue("(ii)", DLPACK_MAJOR, DLPACK_MINOR);
    static const char *const variables[FA_OP_COUNT] = FA_KERNEL_VARIABLES;
    for (int op = 0; op < FA_OP_COUNT; op++)
        if (!(names->kernel_variable[op] = PyBytes_FromString(variables[op]))) return -1;
    return names->dlpack_version ? 0 : -1;
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
    if (fa_numpy_import() < 0 || add_names(&state->names) < 0) return -1;
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
    for (int n = 0; n < FA_ARG_COUNT; n++) Py_CLEAR(state->names.argument[n]);
#define FA_DROP(text) Py_CLEAR(state->names.text);
    FA_ATTRIBUTES(FA_DROP)
#undef FA_DROP
    Py_CLEAR(state->names.dlpack_version);
    for (int op = 0; op < FA_OP_COUNT; op++) Py_CLEAR(state->names.kernel_variable[op]);
    fa_loaded_clear(state);
    if (state->context) fa_context_free(state->context);
    state->context = NULL;
}

#define FA_CALL_PARAMETERS                                                                                             \
    "(q, k, v, *, causal=False, scale=None, window=None, softcap=0.0, bias=None, mask=None, sinks=None, "              \
    "layout='bhsd', out=None, return_lse=False, stream=None, kernel=None, batch_invariant=False"
#define FA_CALL_SIGNATURE FA_CALL_PARAMETERS ")\n--\n\n"

PyDoc_STRVAR(attention_doc,
             "attention" FA_CALL_SIGNATURE
             "softmax(scale * q k^T + bias, over the visible keys) v, for any array library.\n"
             "\n"
             "Parameters\n"
             "----------\n"
             "q : array, (B, H, Sq, D), or (B, Sq, H, D) with layout='bshd'\n"
             "    Queries: float16, bfloat16 or float32; float64 on the CPU. D is 1 to 256. Any strides.\n"
             "k : array, (B, Hk, Sk, D), or (B, Sk, Hk, D)\n"
             "    Keys, of q's dtype. H is a multiple of Hk: query head h uses key head h // (H // Hk).\n"
             "v : array, (B, Hk, Sk, Dv), or (B, Sk, Hk, Dv)\n"
             "    Values, of q's dtype. Dv is 1 to 256.\n"
             "causal : False, True, 'top_left' or 'bottom_right'\n"
             "    Query i sees key j iff j <= i + d; d is 0 for 'top_left' and Sk - Sq for 'bottom_right'. True needs\n"
             "    Sq == Sk, where both are the same.\n"
             "scale : float or None\n"
             "    Factor of q k^T; None: 1 / sqrt(D).\n"
             "window : (left, right) or None\n"
             "    Query i sees key j iff -left <= j - (i + d) <= right; each an int >= 0, or None for unbounded.\n"
             "softcap : float\n"
             "    > 0: scores become softcap * tanh(score / softcap), before the bias.\n"
             "bias : array that broadcasts to (B, H, Sq, Sk), scalar, or None\n"
             "    Added to the scores; q's dtype or float32; -inf excludes a key. Finite values beyond +-2.35865e38\n"
             "    count as that (so do sinks and scale; float64 calls: 1.24606e308).\n"
             "mask : bool array that broadcasts to (B, H, Sq, Sk), bool, or None\n"
             "    True: attend. A scalar mask or bias counts as a NumPy array without axes: on the CPU only.\n"
             "sinks : array, (H,), or None\n"
             "    Logits that join the softmax's denominator alone; q's dtype or float32.\n"
             "layout : 'bhsd' or 'bshd'\n"
             "    Axis order of q, k, v and out.\n"
             "out : array or (array, array)\n"
             "    Where the result goes: q's dtype, (B, H, Sq, Dv) in `layout`; a pair also takes the LSE.\n"
             "return_lse : bool\n"
             "    Also return the LSE.\n"
             "stream : int, object with __cuda_stream__, or None\n"
             "    Of q's device; None: the current stream of q's library, else the per-thread stream. 0 and 1 are\n"
             "    the legacy default stream, 2 is the per-thread one.\n"
             "    A stream given here outlives a DeviceArray that the call returns, and arrays that are only\n"
             "    reachable through __dlpack__ outlive the work on it.\n"
             "kernel : str or None\n"
             "    A name of kernels() forces that kernel; the environment variable FA_EXT_KERNEL does the same.\n"
             "batch_invariant : bool\n"
             "    The bits of a batch entry do not depend on the other entries.\n"
             "\n"
             "Returns\n"
             "-------\n"
             "out : array of q's kind, (B, H, Sq, Dv) or (B, Sq, H, Dv), q's dtype, C-contiguous\n"
             "    0 where a query sees no key.\n"
             "lse : array, (B, H, Sq), float32 (float64 for float64)\n"
             "    With return_lse, or with a pair as `out`: natural logarithm of the softmax's denominator,\n"
             "    sinks included; -inf where a query sees no key and there are no sinks.\n"
             "\n"
             "Raises\n"
             "------\n"
             "ValueError, TypeError, BufferError\n"
             "    An argument is not accepted; the message names it, what was given and what is accepted.\n"
             "UnsupportedError\n"
             "    No kernel takes the call, or the forced one refuses it, with its reason.\n"
             "CudaError, MemoryError\n"
             "    CUDA is missing or failed; memory ran out.");

PyDoc_STRVAR(
    explain_doc,
    "explain" FA_CALL_PARAMETERS ", device=None)\n--\n\n"
    "Which kernel attention() would run for these arguments, and why not each other.\n"
    "\n"
    "Runs nothing. Returns (name, {other name: reason}); name is None when no kernel takes the call. Raises\n"
    "what attention() raises for arguments that are not accepted. With a description of a CUDA device, a dict\n"
    "such as _core.device_info() returns, it says what would run there: the arrays may be NumPy's, and no\n"
    "GPU is needed.");

PyDoc_STRVAR(
    answers_doc,
    "answers" FA_CALL_PARAMETERS ", device=None, features=0)\n--\n\n"
    "What each kernel says to a call: {name: (answer, reason, plan)}; a loaded kernel that is forced included.\n"
    "\n"
    "`answer` is 'takes', 'declines' (could, but another kernel is faster), 'refuses' (cannot), 'not here'\n"
    "(this machine lacks what it needs) or 'fails' (the environment asks for what is not there). `plan` is\n"
    "None unless the kernel takes or declines: blocks, threads, smem_bytes, workspace_bytes, keep, own (bytes).\n"
    "`device` as for explain(); `features` are bits that the problem shall have besides its own.");

#define FA_BACKWARD_PARAMETERS                                                                                         \
    "(dout, q, k, v, out, lse, *, dlse=None, causal=False, scale=None, window=None, softcap=0.0, bias=None, "          \
    "mask=None, sinks=None, layout='bhsd', wrt=('q', 'k', 'v'), grads=None, accumulate=False, deterministic=True, "    \
    "stream=None, kernel=None, batch_invariant=False"

PyDoc_STRVAR(
    attention_backward_doc,
    "attention_backward" FA_BACKWARD_PARAMETERS ")\n--\n\n"
    "Gradients of attention().\n"
    "\n"
    "P = exp(s - lse), delta = dout . out - dlse, dS = P (dout . v - delta), dT = dS (1 - (c / softcap)^2):\n"
    "dv = P^T dout, dk = scale dT^T q, dq = scale dT k, dbias = dS, dsinks = -sum exp(sink - lse) delta\n"
    "(FlashAttention-2's formulas, Dao 2023, with softcap, bias, sinks and LSE). P is never renormalised:\n"
    "a call over a block of the keys, with the out and lse of all of them, gives the block's exact share.\n"
    "\n"
    "Parameters\n"
    "----------\n"
    "dout : array, (B, H, Sq, Dv) in `layout`, or None\n"
    "    Gradient of out, q's dtype; None: zeros, which needs dlse. Any strides, 0 included, as for all inputs.\n"
    "q, k, v, causal, scale, window, softcap, bias, mask, sinks, layout\n"
    "    Those of the call of attention() that made out and lse.\n"
    "out, lse : arrays\n"
    "    What it returned.\n"
    "dlse : array, (B, H, Sq), or None\n"
    "    Gradient of lse, of its dtype.\n"
    "wrt : tuple\n"
    "    Which gradients: names out of 'q', 'k', 'v', 'bias', 'sinks'. Only what they need is computed.\n"
    "    The scale's own gradient is sum(dq * q) / scale.\n"
    "grads : tuple or None\n"
    "    Where they go, aligned with wrt: None, or a writable array of the gradient's shape, of its dtype or\n"
    "    float32, that meets no other array of the call.\n"
    "accumulate : bool\n"
    "    Add to what `grads` hold, all of which must be given: round(old + g), g in float32 (float64).\n"
    "deterministic : bool\n"
    "    True: the same bits from run to run. False: the order of sums is free.\n"
    "stream, kernel, batch_invariant\n"
    "    As for attention(); kernel is a name of kernels('backward'), FA_EXT_KERNEL_BACKWARD the variable.\n"
    "    Gradients of bias and sinks that sum over the batch depend on all of it.\n"
    "\n"
    "Returns\n"
    "-------\n"
    "tuple of arrays of q's kind, in the order of wrt\n"
    "    dq, dk, dv: shape of q, k, v, q's dtype. dbias, dsinks: shape and dtype of bias and sinks; dbias sums\n"
    "    over axes of size 1. C-contiguous where they are new. A query that sees no key gets and gives 0.\n"
    "    Where |lse| is so large that float32 does not resolve it to a part of 1, P is as coarse.\n"
    "\n"
    "Raises\n"
    "------\n"
    "ValueError, TypeError, BufferError, UnsupportedError, CudaError, MemoryError\n"
    "    As attention(). Nothing is written then.");

PyDoc_STRVAR(explain_backward_doc, "explain_backward" FA_BACKWARD_PARAMETERS ", device=None)\n--\n\n"
                                   "Which kernel attention_backward() would run for these arguments, and why not each "
                                   "other; see explain().");

#define FA_MERGE_SIGNATURE "(outs, lses, *, sinks=None, layout=None, out=None, stream=None, kernel=None)\n--\n\n"

PyDoc_STRVAR(
    merge_doc,
    "merge" FA_MERGE_SIGNATURE "Results of attention over parts of the keys -> the result over all of them.\n"
    "\n"
    "m = max(lse_i, sink), w_i = exp(lse_i - m), W = sum w_i + exp(sink - m): out = sum w_i out_i / W and\n"
    "lse = m + log W, in float32 in the order of the lists (float64 for float64). A part whose LSE is -inf or\n"
    "+inf at a row is empty there, and its out is not read; where all are, out is 0 and lse the sink or -inf.\n"
    "\n"
    "Parameters\n"
    "----------\n"
    "outs : list of arrays, (B, H, S, D), or (B, S, H, D) with layout='bshd', or packed (T, H, D)\n"
    "    What attention() returned for each part: one shape, dtype, library and device.\n"
    "lses : list of arrays, (B, H, S), or (H, T) for packed ones; float32, float64 for float64\n"
    "    Their LSEs, any strides.\n"
    "sinks : array, (H,), or None\n"
    "    Logits that join the denominator once, for parts that were computed without; outs' dtype or float32.\n"
    "layout : 'bhsd', 'bshd' or None\n"
    "    Axis order of outs and out of four axes; None: 'bhsd'.\n"
    "out : array or (array, array)\n"
    "    Where the result goes: outs' shape; float16, bfloat16 or float32 (float64 for float64); a pair also\n"
    "    takes the LSE. Each may be the first part's own.\n"
    "stream, kernel\n"
    "    As for attention(); kernel is a name of kernels('merge'), FA_EXT_KERNEL_MERGE the variable.\n"
    "\n"
    "Returns\n"
    "-------\n"
    "out, lse : arrays of outs' kind\n"
    "    One part without sinks comes back bit for bit.\n"
    "\n"
    "Raises\n"
    "------\n"
    "ValueError, TypeError, BufferError, UnsupportedError, CudaError, MemoryError\n"
    "    As attention(). Nothing is written then.");

PyDoc_STRVAR(explain_merge_doc, "explain_merge" FA_MERGE_SIGNATURE
                                "Which kernel merge() would run for these arguments, and why not each other; see "
                                "explain().");

PyDoc_STRVAR(kernels_doc, "kernels(operation='attention')\n--\n\n"
                          "Names of an operation's kernels compiled into this build, in order of preference.\n"
                          "\n"
                          "`operation` is 'attention', 'backward' or 'merge'.");

PyDoc_STRVAR(to_device_doc,
             "to_device(array, device=0)\n--\n\n"
             "Copies a NumPy array (float16, bfloat16, float32, float64 or bool) to a CUDA device.\n"
             "\n"
             "Returns a DeviceArray, C-contiguous, of the same shape and dtype. Blocks until it is there.");

PyDoc_STRVAR(to_numpy_doc, "to_numpy($module, array, /)\n--\n\n"
                           "Copies an array of any library and device into a new C-contiguous NumPy array.\n"
                           "\n"
                           "Waits for the work queued on its library's stream. bfloat16 needs ml_dtypes.");

PyDoc_STRVAR(time_launches_doc, "time_launches($module, count, /, q, k, v, **options)\n--\n\n"
                                "Host seconds a bare launch takes: one call, prepared once and launched `count` times\n"
                                "from an empty queue. What attention() costs above it is the front end's.");

PyDoc_STRVAR(load_doc,
             "load(path, kernel=None)\n--\n\n"
             "Loads a shared library that exports one kernel, fa_kernel_<kernel>, for kernel=<name>.\n"
             "\n"
             "`kernel` defaults to the file's name up to its first dot. Returns the name to force it by: the\n"
             "kernel's own, or <kernel>@<n> where that is taken. Loaded kernels are never chosen by\n"
             "themselves. A path is loaded once; a rebuilt library needs a new path.");

static PyMethodDef core_methods[] = {
    {"attention", (PyCFunction)(void (*)(void))fa_attention, METH_FASTCALL | METH_KEYWORDS, attention_doc},
    {"explain", (PyCFunction)(void (*)(void))fa_explain, METH_FASTCALL | METH_KEYWORDS, explain_doc},
    {"answers", (PyCFunction)(void (*)(void))fa_answers, METH_FASTCALL | METH_KEYWORDS, answers_doc},
    {"attention_backward", (PyCFunction)(void (*)(void))fa_attention_backward, METH_FASTCALL | METH_KEYWORDS,
     attention_backward_doc},
    {"explain_backward", (PyCFunction)(void (*)(void))fa_explain_backward, METH_FASTCALL | METH_KEYWORDS,
     explain_backward_doc},
    {"merge", (PyCFunction)(void (*)(void))fa_merge_py, METH_FASTCALL | METH_KEYWORDS, merge_doc},
    {"explain_merge", (PyCFunction)(void (*)(void))fa_explain_merge, METH_FASTCALL | METH_KEYWORDS, explain_merge_doc},
    {"kernels", (PyCFunction)(void (*)(void))fa_kernels, METH_FASTCALL | METH_KEYWORDS, kernels_doc},
    {"to_device", (PyCFunction)(void (*)(void))fa_to_device, METH_FASTCALL | METH_KEYWORDS, to_device_doc},
    {"to_numpy", fa_to_numpy, METH_O, to_numpy_doc},
    {"time_launches", (PyCFunction)(void (*)(void))fa_time_launches, METH_FASTCALL | METH_KEYWORDS, time_launches_doc},
    {"load", (PyCFunction)(void (*)(void))fa_load, METH_FASTCALL | METH_KEYWORDS, load_doc},
    {"loaded", fa_loaded_kernels, METH_NOARGS,
     "loaded($module, /)\n--\n\nKernels loaded at run time: {name: (path, summary)}."},
    {"build_info", fa_build_info, METH_NOARGS,
     "build_info($module, /)\n--\n\nWhat this build has: version, cuda, chaos, toolkit, kernels ({name: (device, "
     "summary)})."},
    {"cpu_info", fa_cpu_info, METH_NOARGS, "cpu_info($module, /)\n--\n\nThe CPU as kernels see it."},
    {"device_count", fa_device_count_py, METH_NOARGS,
     "device_count($module, /)\n--\n\nNumber of CUDA devices. CudaError says why there are none to use."},
    {"device_info", fa_device_info_py, METH_O,
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
    if (Py_Version >= 0x030C0000) /* as NumPy: one interpreter a process */
        core_slots[used++] = (PyModuleDef_Slot){SLOT_MULTIPLE_INTERPRETERS, (void *)0};
    if (Py_Version >= 0x030D0000) /* works without the GIL */
        core_slots[used++] = (PyModuleDef_Slot){SLOT_GIL, (void *)1};
    core_slots[used] = (PyModuleDef_Slot){0, NULL};
    return PyModuleDef_Init(&fa_core_module);
}
