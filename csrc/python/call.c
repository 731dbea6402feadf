/* Shared by calls of all operations: arrays, kernel and stream, and the way from a plan to the results. */
#include "call.h"

#include <stdlib.h>

#include "device/host_mapped.h"

/* ---- arrays ---- */

fa_code fa_call_array(fa_state *state, fa_call *call, const char *name, PyObject *object, const fa_view **view,
                      fa_status *status) {
    fa_array *array = &call->array[call->count++];
    array->type = NULL;
    array->managed = NULL;
    array->managed_versioned = NULL;
    array->made = NULL;
    *view = &array->view;
    return fa_array_read(state, array, name, object, call->count > 1 ? &call->array[0] : NULL, status);
}

fa_code fa_call_output(fa_state *state, fa_call *call, const char *name, PyObject *object, const fa_view **view,
                       fa_status *status) {
    FA_TRY(fa_call_array(state, call, name, object, view, status));
    if (call->array[call->count - 1].type->library != FA_LIB_JAX) return FA_OK;
    return fa_fail(status, FA_EBUFFER, "%s is a JAX array, which is immutable; leave it out", name);
}

fa_code fa_call_outputs(fa_state *state, fa_call *call, PyObject *given, const fa_view **out, const fa_view **lse,
                        fa_status *status) {
    if (!given) return FA_OK;
    if (!PyTuple_Check(given)) return fa_call_output(state, call, "out", given, out, status);
    const Py_ssize_t size = PyTuple_Size(given);
    if (size != 2)
        return fa_fail(status, FA_EVALUE, "out has %zd items; accepted: an array, or a pair (out, lse)", (ssize_t)size);
    FA_TRY(fa_call_output(state, call, "out", PyTuple_GetItem(given, 0), out, status));
    return fa_call_output(state, call, "lse", PyTuple_GetItem(given, 1), lse, status);
}

fa_code fa_call_arrays(fa_state *state, fa_call *call, fa_argument first, void *request, fa_status *status) {
    const fa_bound *bound = &call->bound;
    fa_arguments left = bound->given & fa_array_arguments;
    for (fa_argument argument = first; left; argument = fa_first_of(left)) {
        const fa_parameter *p = &fa_parameters[argument];
        left &= ~FA_ARGUMENT(argument);
        const fa_view **view = (const fa_view **)((char *)request + p->field);
        FA_TRY((argument == FA_ARG_max_logit ? fa_call_output : fa_call_array)(state, call, p->name,
                                                                               bound->value[argument], view, status));
        if (!left) break;
    }
    return FA_OK;
}

/* An argument that is a pair of arrays. `some`: each of them may be None. */
static fa_code read_pair(fa_state *state, fa_call *call, fa_argument argument, const char *accepted, bool some,
                         const char *const names[2], const fa_view **const views[2], fa_status *status) {
    PyObject *pair = fa_given(&call->bound, argument);
    const char *name = fa_parameters[argument].name;
    if (!pair) return FA_OK;
    if (!PyTuple_Check(pair) && !PyList_Check(pair)) return fa_wrong_type(name, pair, accepted, status);
    if (PySequence_Size(pair) != 2)
        return fa_fail(status, FA_EVALUE, "%s has %zd items; accepted: %s", name, (ssize_t)PySequence_Size(pair),
                       accepted);
    for (int n = 0; n < 2; n++) {
        PyObject *one = PyTuple_Check(pair) ? PyTuple_GetItem(pair, n) : PyList_GetItem(pair, n);
        if (one && (one != Py_None || !some)) FA_TRY(fa_call_array(state, call, names[n], one, views[n], status));
    }
    return FA_OK;
}

fa_code fa_call_pairs(fa_state *state, fa_call *call, fa_request *request, fa_status *status) {
    static const char *const ends[2] = {"k_range's begin", "k_range's end"};
    static const char *const ids[2] = {"segments' q_ids", "segments' k_ids"};
    const fa_view **const ranges[2] = {&request->k_range_begin, &request->k_range_end};
    const fa_view **const segments[2] = {&request->q_segments, &request->k_segments};
    FA_TRY(read_pair(state, call, FA_ARG_k_range, "None or a pair (begin, end), each an array (batch,) or None", true,
                     ends, ranges, status));
    return read_pair(state, call, FA_ARG_segments, "None or a pair of arrays (q_ids, k_ids)", false, ids, segments,
                     status);
}

fa_code fa_call_describe(fa_state *state, fa_call *call, PyObject *device, fa_device_info *described,
                         fa_status *status) {
    FA_TRY(fa_device_described(state, device, described, status));
    for (int n = 0; n < call->count; n++) call->array[n].view.device = described->device;
    call->info = described;
    return FA_OK;
}

void fa_call_end(fa_call *call) {
    for (int n = 0; n < call->count; n++)
        if (call->array[n].type) fa_array_release(&call->array[n]);
    Py_CLEAR(call->dropout);
}

/* ---- kernel and stream ---- */

/* A look into the dict of os.environ takes a third of the time of getenv(). */
fa_code fa_environment(fa_state *state, PyObject *name, const char *variable, const char **text, PyObject **held,
                       fa_status *status) {
    *text = NULL;
    *held = NULL;
    if (!state->environment)
        *text = getenv(variable);
    else if (fa_dict_get(state->environment, name, held) < 0)
        return fa_python_error(status);
    if (*held && PyBytes_Check(*held)) *text = PyBytes_AsString(*held);
    return FA_OK;
}

static fa_code read_environment(fa_state *state, fa_op op, fa_call *call, fa_status *status) {
    static const char *const variables[FA_OP_COUNT] = FA_KERNEL_VARIABLES;
    PyObject *value;
    const char *name;
    FA_TRY(fa_environment(state, state->names.kernel_variable[op], variables[op], &name, &value, status));
    fa_code code = FA_OK;
    if (name && *name)
        code = fa_kernel_named(state, op, variables[op], name, &call->forced, &call->forced_name, status);
    Py_XDECREF(value);
    return code;
}

static fa_code read_kernel(fa_state *state, fa_op op, fa_call *call, fa_status *status) {
    PyObject *value = fa_given(&call->bound, FA_ARG_kernel);
    call->forced = NULL;
    if (!value) return read_environment(state, op, call, status);
    if (!PyUnicode_Check(value)) return fa_wrong_type("kernel", value, "None or a name of fa_ext.kernels()", status);
    char shown[160];
    return fa_kernel_named(state, op, "kernel", fa_shown(value, shown), &call->forced, &call->forced_name, status);
}

fa_code fa_call_place(fa_state *state, fa_op op, fa_call *call, fa_status *status) {
    FA_TRY(read_kernel(state, op, call, status));
    return fa_stream_parse(state, fa_given(&call->bound, FA_ARG_stream), &call->stream, status);
}

/* ---- from a plan to the results ---- */

fa_stream fa_call_result_stream(const fa_call *call) {
    return call->problem.device.kind == FA_CUDA ? call->stream : (fa_stream){NULL, false, NULL};
}

/* The workspace from the allocator of q's library, on whose current stream the call runs, so that what is given back
 * after the launch is written by nobody before. That library may hold all of the device's memory that it does not use,
 * and its allocator has just made the results: a pool of ours finds nothing then, and takes two calls of the driver
 * more. Not while a graph records the call, which has the memory for longer. NULL: none, and nothing is wrong. */
static DLManagedVersioned *borrow_workspace(fa_call *call, const fa_plan *plan) {
    enum { ALIGNMENT = 256 };
    const fa_array *first = &call->array[0];
    const int64_t bytes = (int64_t)plan->workspace_bytes;
    DLManagedVersioned *made;
    fa_status status;
    bool capturing;
    if (bytes == 0 || call->problem.workspace || call->problem.device.kind != FA_CUDA ||
        first->type->protocol != FA_BY_EXCHANGE || !first->has_stream || first->stream != call->stream.handle ||
        fa_stream_capturing(call->stream.handle, &capturing, &status) != FA_OK || capturing)
        return NULL;
    if (fa_exchange_allocate(first->type, call->problem.device, 1, &bytes, FA_U8, &made, &status) != FA_OK) {
        PyErr_Clear();
        return NULL;
    }
    char *memory = (char *)made->tensor.data + made->tensor.byte_offset;
    if ((uintptr_t)memory % ALIGNMENT == 0) call->problem.workspace = memory;
    return made;
}

PyObject *fa_call_run(fa_state *state, fa_call *call, const fa_plan *plan, const fa_ending *ending, fa_status *status) {
    fa_result results[FA_RESULTS] = {{NULL, NULL}};
    PyObject *returned = NULL;
    int previous;
    if (fa_device_enter(state->context, call->problem.device, &previous, status) != FA_OK) return NULL;
    fa_code code = ending->make(state, call, results, status);
    if (code == FA_OK) {
        DLManagedVersioned *borrowed = call->problem.empty ? NULL : borrow_workspace(call, plan);
        code = fa_arrays_run(state, call->array, call->count, &call->problem, plan, call->info, &call->stream,
                             call->joins, status);
        if (borrowed) borrowed->deleter(borrowed);
    }
    if (code == FA_OK) {
        returned = ending->give(state, call, results);
        if (!returned) fa_python_error(status);
    }
    fa_device_leave(call->problem.device, previous);
    for (int n = 0; n < FA_RESULTS; n++) Py_XDECREF(results[n].object);
    return returned;
}

PyObject *fa_call_give(fa_state *state, const fa_call *call, PyObject *given, bool wants_lse, fa_result *results) {
    const fa_array *first = &call->array[0];
    if (given && PyTuple_Check(given)) return Py_NewRef(given);
    PyObject *out = given ? Py_NewRef(given) : fa_result_finish(state, first, &results[0]);
    if (!out || !wants_lse) return out;
    PyObject *lse = fa_result_finish(state, first, &results[1]);
    PyObject *both = lse ? PyTuple_Pack(2, out, lse) : NULL;
    Py_DECREF(out);
    Py_XDECREF(lse);
    return both;
}
