/* The module's interface to programs in C and to XLA: capsules, and the values that fa_ext/jax reads while it traces.
 */
#include "c_api/arguments.h"
#include "c_api/c_api.h"
#include "call.h"
#include "xla/ffi.h"

#include <stdio.h>
#include <string.h>

#include "problem/backward.h"
#include "problem/operands.h"

/* (dtype, shape) of an array. */
static fa_code read_described(PyObject *item, fa_view *view, fa_ext_array *array, fa_status *status) {
    const char *dtype, *accepted = "(dtype, shape)";
    PyObject *shape;
    if (!PyTuple_Check(item)) return fa_wrong_type("an item of arrays", item, accepted, status);
    if (!PyArg_ParseTuple(item, "sO!", &dtype, &PyTuple_Type, &shape)) return fa_python_error(status);
    view->ndim = (int)PyTuple_Size(shape);
    if (view->ndim > FA_MAX_NDIM) return fa_fail(status, FA_EVALUE, "an item of arrays has %d axes", view->ndim);
    for (int axis = 0; axis < view->ndim; axis++) view->shape[axis] = PyLong_AsLongLong(PyTuple_GetItem(shape, axis));
    if (PyErr_Occurred()) return fa_python_error(status);
    for (int n = FA_EXT_FLOAT16; n <= FA_EXT_INT64; n++)
        if (strcmp(dtype, fa_dtype_name(fa_capi_dtype(n))) == 0) array->dtype = n;
    if (!array->dtype)
        return fa_fail(status, FA_ETYPE,
                       "dtype %.40s is not accepted; accepted: float16, bfloat16, float32, float64 (on the CPU), "
                       "bool, int32 and int64",
                       dtype);
    array->ndim = view->ndim;
    array->shape = view->shape;
    return FA_OK;
}

/* Arrays that are only described, all on one device. */
typedef struct question {
    PyObject *arrays; /* {name: (dtype, shape)} */
    int device;
    Py_ssize_t found; /* items of `arrays` */
    fa_view views[FA_OPERAND_COUNT + FA_GRAD_COUNT];
    fa_ext_array described[FA_OPERAND_COUNT + FA_GRAD_COUNT];
} question;

/* Describes the array of this name in place `n`; NULL where there is none. */
static fa_code read_named(question *q, const char *name, int n, const fa_ext_array **array, fa_status *status) {
    PyObject *item = PyDict_GetItemString(q->arrays, name);
    if (!item) return FA_OK;
    q->found++;
    q->described[n] = (fa_ext_array){.device = FA_EXT_CUDA(q->device)};
    *array = &q->described[n];
    return read_described(item, &q->views[n], &q->described[n], status);
}

/* The arrays into the struct of arguments of an operation. */
static fa_code read_all(question *q, fa_op op, void *arguments, fa_status *status) {
    for (int n = 0; n < fa_capi_operands[op].count; n++) {
        const fa_capi_field *field = &fa_capi_operands[op].field[n];
        FA_TRY(read_named(q, fa_operands[field->operand].name, (int)field->operand,
                          fa_capi_array(arguments, field->offset), status));
    }
    for (int n = 0; n < FA_GRAD_COUNT && op == FA_BACKWARD; n++) {
        char name[32];
        snprintf(name, sizeof name, "d%s", fa_grad_name((fa_grad)n));
        FA_TRY(read_named(q, name, FA_OPERAND_COUNT + n, fa_capi_array(arguments, fa_capi_gradients[n]), status));
    }
    if (q->found == PyDict_Size(q->arrays)) return FA_OK;
    return fa_fail(status, FA_EVALUE, "arrays has %zd names that the operation does not know",
                   (ssize_t)(PyDict_Size(q->arrays) - q->found));
}

static fa_code ask(question *q, bool backward, const fa_ext_options *options, int unordered, const char *kernel,
                   size_t *bytes, fa_status *status) {
    fa_ext_forward forward = {.size = sizeof forward, .options = options};
    fa_ext_backward gradients = {.size = sizeof gradients, .options = options, .unordered = unordered};
    const fa_ext_run run = {.size = sizeof run,
                            .kernel = *kernel ? kernel : NULL,
                            .message = status->message,
                            .message_bytes = sizeof status->message};
    void *arguments = backward ? (void *)&gradients : (void *)&forward;
    FA_TRY(read_all(q, backward ? FA_BACKWARD : FA_FORWARD, arguments, status));
    status->code = (fa_code)fa_capi.workspace(backward ? FA_EXT_BACKWARD : FA_EXT_FORWARD, arguments, &run, bytes);
    return status->code;
}

PyDoc_STRVAR(
    xla_workspace_doc,
    "xla_workspace($module, backward, device, arrays, options, kernel, /)\n--\n\n"
    "Bytes of workspace that a custom call of fa_ext.jax needs on a CUDA device; on the CPU where that is -1.\n"
    "\n"
    "`arrays` are {name: (dtype, shape)} of its operands and results, by their names in operands() and, for "
    "gradients,\n"
    "those behind a d. `options` are the attributes options_given, causal, layout, batch_invariant, scale, softcap,\n"
    "window_left, window_right, max_seqlen_q, unordered, dropout.");

static PyObject *xla_workspace(PyObject *module, PyObject *args) {
    fa_state *state = PyModule_GetState(module);
    question q = {.found = 0};
    fa_ext_options o = {.size = sizeof o};
    fa_status status;
    const char *kernel;
    int backward, unordered;
    long long left, right, most;
    size_t bytes = 0;
    if (!PyArg_ParseTuple(args, "piO!(IiiiddLLLid)s:xla_workspace", &backward, &q.device, &PyDict_Type, &q.arrays,
                          &o.given, &o.causal, &o.layout, &o.batch_invariant, &o.scale, &o.softcap, &left, &right,
                          &most, &unordered, &o.dropout, &kernel))
        return NULL;
    o.window_left = left;
    o.window_right = right;
    o.max_seqlen_q = most;
    if (!atomic_load_explicit(&state->cublas_sought, memory_order_acquire) && !fa_cublas_seek(state)) return NULL;
    const fa_code code = ask(&q, backward, &o, unordered, kernel, &bytes, &status);
    return code == FA_OK ? PyLong_FromSize_t(bytes) : fa_raise(state, &status);
}

static PyMethodDef methods[] = {
    {"xla_workspace", xla_workspace, METH_VARARGS, xla_workspace_doc},
    {NULL, NULL, 0, NULL},
};

static int add(PyObject *module, const char *name, void *pointer, const char *capsule_name) {
    PyObject *capsule = PyCapsule_New(pointer, capsule_name, NULL);
    const int added = capsule ? PyModule_AddObjectRef(module, name, capsule) : -1;
    Py_XDECREF(capsule);
    return added;
}

#define XLA_CAPSULE "xla._CUSTOM_CALL_TARGET" /* what JAX names them */

int fa_capsules_add(PyObject *module, fa_context *context) {
    const struct {
        const char *name;
        xla_handler *handler;
    } handlers[] = {
        {"xla_attention_cpu", fa_xla_attention_cpu},
        {"xla_attention_cuda", fa_xla_attention_cuda},
        {"xla_attention_backward_cpu", fa_xla_backward_cpu},
        {"xla_attention_backward_cuda", fa_xla_backward_cuda},
        {"xla_nothing", fa_xla_nothing},
    };
    if (PyModule_AddFunctions(module, methods) < 0) return -1;
    for (size_t n = 0; n < sizeof handlers / sizeof *handlers; n++)
        if (add(module, handlers[n].name, (void *)(uintptr_t)handlers[n].handler, XLA_CAPSULE) < 0) return -1;
    return add(module, "_C_API", (void *)(uintptr_t)fa_capi_table(context), "fa_ext._core._C_API");
}
