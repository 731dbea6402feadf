/* The module's interface to programs in C and to XLA: capsules, and the values that fa_ext/jax reads while it traces.
 */
#include "c_api/c_api.h"
#include "call.h"
#include "xla/ffi.h"

#include <string.h>

enum { FORWARD_ARRAYS = 9, BACKWARD_ARRAYS = 16 };

/* (dtype, shape) of an array that need not be there; None: absent. */
static fa_code read_described(PyObject *item, fa_view *view, fa_ext_array *array, fa_status *status) {
    const char *dtype, *accepted = "None or (dtype, shape)";
    PyObject *shape;
    if (!PyTuple_Check(item)) return fa_wrong_type("an item of arrays", item, accepted, status);
    if (!PyArg_ParseTuple(item, "sO!", &dtype, &PyTuple_Type, &shape)) return fa_python_error(status);
    view->ndim = (int)PyTuple_Size(shape);
    if (view->ndim > FA_MAX_NDIM) return fa_fail(status, FA_EVALUE, "an item of arrays has %d axes", view->ndim);
    for (int axis = 0; axis < view->ndim; axis++) view->shape[axis] = PyLong_AsLongLong(PyTuple_GetItem(shape, axis));
    if (PyErr_Occurred()) return fa_python_error(status);
    for (int n = 0; n <= FA_BOOL; n++)
        if (strcmp(dtype, fa_dtype_name((fa_dtype)n)) == 0) array->dtype = FA_EXT_FLOAT16 + n;
    if (!array->dtype)
        return fa_fail(status, FA_ETYPE,
                       "dtype %.40s is not accepted; accepted: float16, bfloat16, float32, float64 (on the CPU), and "
                       "bool for a mask",
                       dtype);
    array->ndim = view->ndim;
    array->shape = view->shape;
    return FA_OK;
}

/* `arrays` -> `pointers`, all on `device`. */
static fa_code read_all(PyObject *arrays, int count, int device, fa_view *views, fa_ext_array *described,
                        const fa_ext_array **pointers, fa_status *status) {
    if (PyTuple_Size(arrays) != count)
        return fa_fail(status, FA_EVALUE, "arrays has %zd items; accepted: %d", (ssize_t)PyTuple_Size(arrays), count);
    for (int n = 0; n < count; n++) {
        PyObject *item = PyTuple_GetItem(arrays, n);
        memset(&described[n], 0, sizeof described[n]);
        described[n].device = FA_EXT_CUDA(device);
        pointers[n] = item == Py_None ? NULL : &described[n];
        if (pointers[n]) FA_TRY(read_described(item, &views[n], &described[n], status));
    }
    return FA_OK;
}

static fa_code ask(bool backward, const fa_ext_array **a, const fa_ext_options *options, int unordered,
                   const char *kernel, size_t *bytes, fa_status *status) {
    const fa_ext_forward forward = {.size = sizeof forward,
                                    .q = a[0],
                                    .k = a[1],
                                    .v = a[2],
                                    .bias = a[3],
                                    .mask = a[4],
                                    .sinks = a[5],
                                    .alibi = a[6],
                                    .out = a[7],
                                    .lse = a[8],
                                    .options = options};
    const fa_ext_run run = {.size = sizeof run,
                            .kernel = *kernel ? kernel : NULL,
                            .message = status->message,
                            .message_bytes = sizeof status->message};
    if (!backward) {
        status->code = (fa_code)fa_capi.workspace(FA_EXT_FORWARD, &forward, &run, bytes);
        return status->code;
    }
    const fa_ext_backward call = {.size = sizeof call,
                                  .q = a[0],
                                  .k = a[1],
                                  .v = a[2],
                                  .out = a[3],
                                  .lse = a[4],
                                  .dout = a[5],
                                  .dlse = a[6],
                                  .bias = a[7],
                                  .mask = a[8],
                                  .sinks = a[9],
                                  .alibi = a[10],
                                  .dq = a[11],
                                  .dk = a[12],
                                  .dv = a[13],
                                  .dbias = a[14],
                                  .dsinks = a[15],
                                  .options = options,
                                  .unordered = unordered};
    status->code = (fa_code)fa_capi.workspace(FA_EXT_BACKWARD, &call, &run, bytes);
    return status->code;
}

PyDoc_STRVAR(
    xla_workspace_doc,
    "xla_workspace($module, backward, device, arrays, options, kernel, /)\n--\n\n"
    "Bytes of workspace that a custom call of fa_ext.jax needs on a CUDA device; on the CPU where that is -1.\n"
    "\n"
    "`arrays` are (dtype, shape) or None where absent: q, k, v, bias, mask, sinks, alibi, out, lse; of the backward\n"
    "pass q, k, v, out, lse, dout, dlse, bias, mask, sinks, alibi, dq, dk, dv, dbias, dsinks. `options` are\n"
    "the attributes options_given, causal, layout, batch_invariant, scale, softcap, window_left, window_right,\n"
    "unordered, dropout.");

static PyObject *xla_workspace(PyObject *module, PyObject *args) {
    fa_state *state = PyModule_GetState(module);
    fa_view views[BACKWARD_ARRAYS];
    fa_ext_array described[BACKWARD_ARRAYS];
    const fa_ext_array *pointers[BACKWARD_ARRAYS];
    fa_ext_options o = {.size = sizeof o};
    fa_status status;
    PyObject *arrays;
    const char *kernel;
    int backward, device, unordered;
    long long left, right;
    size_t bytes = 0;
    if (!PyArg_ParseTuple(args, "piO!(IiiiddLLid)s:xla_workspace", &backward, &device, &PyTuple_Type, &arrays, &o.given,
                          &o.causal, &o.layout, &o.batch_invariant, &o.scale, &o.softcap, &left, &right, &unordered,
                          &o.dropout, &kernel))
        return NULL;
    o.window_left = left;
    o.window_right = right;
    if (!atomic_load_explicit(&state->cublas_sought, memory_order_acquire) && !fa_cublas_seek(state)) return NULL;
    fa_code code =
        read_all(arrays, backward ? BACKWARD_ARRAYS : FORWARD_ARRAYS, device, views, described, pointers, &status);
    if (code == FA_OK) code = ask(backward, pointers, &o, unordered, kernel, &bytes, &status);
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
