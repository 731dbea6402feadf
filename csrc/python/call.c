/* attention(): arguments -> views -> problem -> plan -> launch. Nothing is allocated or written before
 * validation and selection have ended. */
#include "core.h"

#include <limits.h>
#include <time.h>

static fa_code read_arrays(fa_state *state, fa_call *call, fa_status *status) {
    static const struct {
        int slot;
        fa_argument argument;
        const char *name;
    } inputs[] = {
        {FA_Q, FA_ARG_q, "q"},          {FA_K, FA_ARG_k, "k"},          {FA_V, FA_ARG_v, "v"},
        {FA_BIAS, FA_ARG_bias, "bias"}, {FA_MASK, FA_ARG_mask, "mask"}, {FA_SINKS, FA_ARG_sinks, "sinks"},
    };
    fa_array *array = call->array;
    for (size_t n = 0; n < sizeof inputs / sizeof *inputs; n++) {
        PyObject *object = call->argument[inputs[n].argument];
        if (object)
            FA_TRY(
                fa_array_read(state, &array[inputs[n].slot], inputs[n].name, object, n ? &array[FA_Q] : NULL, status));
    }
    static const char *const outputs[] = {"out", "lse"};
    for (int n = 0; n < 2; n++) {
        fa_array *output = &array[FA_OUT + n];
        if (!output->object) continue;
        FA_TRY(fa_array_read(state, output, outputs[n], output->object, &array[FA_Q], status));
        if (output->type->library == FA_LIB_JAX)
            return fa_fail(status, FA_EBUFFER, "%s is a JAX array, which is immutable; leave it out", outputs[n]);
    }
    return FA_OK;
}

static const fa_view *view_or_null(const fa_array *array) { return array->object ? &array->view : NULL; }

fa_code fa_call_read(fa_state *state, PyObject *const *args, Py_ssize_t count, PyObject *keywords, fa_call *call,
                     fa_status *status) {
    fa_array *array = call->array;
    FA_TRY(fa_args_bind(state, args, count, keywords, call, status));
    FA_TRY(fa_args_options(state, call, status));
    FA_TRY(fa_stream_parse(state, call->argument[FA_ARG_stream], &call->stream, status));
    FA_TRY(read_arrays(state, call, status));
    FA_TRY(fa_arrays_stream(state, call->array, FA_ARRAYS, &call->stream, &call->joins, status));
    fa_request *request = &call->request;
    request->q = &array[FA_Q].view;
    request->k = &array[FA_K].view;
    request->v = &array[FA_V].view;
    request->bias = view_or_null(&array[FA_BIAS]);
    request->mask = view_or_null(&array[FA_MASK]);
    request->sinks = view_or_null(&array[FA_SINKS]);
    request->out = view_or_null(&array[FA_OUT]);
    request->lse = view_or_null(&array[FA_LSE]);
    if (request->q->device.kind == FA_CUDA && !atomic_load_explicit(&state->cublas_sought, memory_order_acquire) &&
        !fa_cublas_seek(state))
        return fa_python_error(status);
    return FA_OK;
}

/* Arguments -> problem and plan. */
static fa_code prepare(fa_state *state, PyObject *const *args, Py_ssize_t count, PyObject *keywords, fa_call *call,
                       fa_plan *plan, fa_status *status) {
    FA_TRY(fa_call_read(state, args, count, keywords, call, status));
    FA_TRY(fa_dispatch(state->context, &call->request, call->forced, &call->problem, &call->info, plan, status));
    return fa_arrays_check_stream(state, &call->array[FA_Q], &call->problem, &call->stream, status);
}

void fa_call_begin(fa_call *call) {
    for (int n = 0; n < FA_ARRAYS; n++) {
        fa_array *array = &call->array[n];
        array->object = NULL;
        array->type = NULL;
        array->managed = NULL;
        array->managed_versioned = NULL;
        array->made = NULL;
        array->has_stream = array->needs_stream = false;
    }
}

void fa_call_end(fa_call *call) {
    for (int n = 0; n < FA_ARRAYS; n++)
        if (call->array[n].type) fa_array_release(&call->array[n]);
}

/* Outputs that the caller did not give. The device is current. */
static fa_code make_outputs(fa_state *state, fa_call *call, fa_result results[2], fa_status *status) {
    fa_forward *problem = &call->problem.forward;
    const fa_array *q = &call->array[FA_Q];
    const bool on_device = call->problem.device.kind == FA_CUDA;
    fa_stream stream = on_device ? call->stream : (fa_stream){NULL, false, NULL};
    void *out = call->array[FA_OUT].object ? call->array[FA_OUT].view.data : NULL;
    void *lse = call->array[FA_LSE].object ? call->array[FA_LSE].view.data : NULL;
    if (!call->array[FA_OUT].object) {
        int64_t shape[4];
        fa_forward_out_shape(problem, call->request.options.layout, shape);
        FA_TRY(fa_result_make(state, q, 4, shape, problem->out_dtype, &stream, &results[0], status));
        out = results[0].data;
    }
    if (problem->wants_lse && !call->array[FA_LSE].object) {
        const int64_t shape[3] = {problem->batch, problem->heads, problem->seq_q};
        FA_TRY(fa_result_make(state, q, 3, shape, problem->lse_dtype, &stream, &results[1], status));
        lse = results[1].data;
    }
    fa_forward_set_outputs(problem, out, lse);
    return FA_OK;
}

/* out, or (out, lse): the caller's own objects where given. */
static PyObject *hand_over(fa_state *state, fa_call *call, fa_result results[2]) {
    if (call->pair) return Py_NewRef(call->argument[FA_ARG_out]);
    const fa_array *q = &call->array[FA_Q];
    PyObject *out =
        call->array[FA_OUT].object ? Py_NewRef(call->array[FA_OUT].object) : fa_result_finish(state, q, &results[0]);
    if (!out || !call->problem.forward.wants_lse) return out;
    PyObject *lse = fa_result_finish(state, q, &results[1]);
    PyObject *both = lse ? PyTuple_Pack(2, out, lse) : NULL;
    Py_DECREF(out);
    Py_XDECREF(lse);
    return both;
}

PyObject *fa_attention(PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *keywords) {
    fa_state *state = PyModule_GetState(module);
    fa_call call;
    fa_plan plan;
    fa_status status;
    fa_result results[2] = {{NULL, NULL}, {NULL, NULL}};
    PyObject *returned = NULL;
    fa_code code;
    fa_call_begin(&call);
    FA_TRY_GOTO(code, prepare(state, args, count, keywords, &call, &plan, &status), done);
    int previous;
    FA_TRY_GOTO(code, fa_device_enter(state->context, call.problem.device, &previous, &status), done);
    code = make_outputs(state, &call, results, &status);
    if (code == FA_OK)
        code = fa_arrays_run(state, call.array, FA_ARRAYS, &call.problem, &plan, call.info, &call.stream, call.joins,
                             &status);
    if (code == FA_OK) {
        returned = hand_over(state, &call, results);
        if (!returned) code = fa_python_error(&status);
    }
    fa_device_leave(call.problem.device, previous);
done:
    Py_XDECREF(results[0].object);
    Py_XDECREF(results[1].object);
    fa_call_end(&call);
    return code == FA_OK ? returned : fa_raise(state, &status);
}

/* Launches one prepared call `count` times from an empty queue; host seconds a launch. */
static fa_code burst(fa_state *state, fa_call *call, const fa_plan *plan, long count, double *seconds,
                     fa_status *status) {
    const bool on_device = call->problem.device.kind == FA_CUDA;
    void *stream = on_device ? call->stream.handle : NULL;
    struct timespec begun, ended;
    fa_code code = on_device ? fa_stream_synchronize(stream, status) : FA_OK;
    clock_gettime(CLOCK_MONOTONIC, &begun);
    for (long n = 0; n < count && code == FA_OK; n++)
        code = fa_plan_run(&call->problem, plan, state->context, call->info, stream, status);
    clock_gettime(CLOCK_MONOTONIC, &ended);
    *seconds = ((double)(ended.tv_sec - begun.tv_sec) + 1e-9 * (double)(ended.tv_nsec - begun.tv_nsec)) / (double)count;
    if (code == FA_OK && on_device) code = fa_stream_synchronize(stream, status);
    return code;
}

PyObject *fa_time_launches(PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *keywords) {
    fa_state *state = PyModule_GetState(module);
    fa_call call;
    fa_plan plan;
    fa_status status;
    fa_result results[2] = {{NULL, NULL}, {NULL, NULL}};
    double seconds = 0;
    int previous;
    fa_code code;
    long repeats;
    const char *accepted = "an int >= 1, then attention()'s arguments";
    fa_call_begin(&call);
    code = count > 0 ? fa_index_read("count", args[0], 1, LONG_MAX, accepted, &repeats, &status)
                     : fa_fail(&status, FA_EVALUE, "count is missing; accepted: %s", accepted);
    if (code != FA_OK) goto done;
    FA_TRY_GOTO(code, prepare(state, args + 1, count - 1, keywords, &call, &plan, &status), done);
    FA_TRY_GOTO(code, fa_device_enter(state->context, call.problem.device, &previous, &status), done);
    code = make_outputs(state, &call, results, &status);
    if (code == FA_OK) {
        PyThreadState *thread = PyEval_SaveThread();
        code = burst(state, &call, &plan, repeats, &seconds, &status);
        PyEval_RestoreThread(thread);
    }
    fa_device_leave(call.problem.device, previous);
done:
    Py_XDECREF(results[0].object);
    Py_XDECREF(results[1].object);
    fa_call_end(&call);
    return code == FA_OK ? PyFloat_FromDouble(seconds) : fa_raise(state, &status);
}
