/* attention(): arguments -> views -> problem -> plan -> launch. Nothing is allocated or written before validation and
 * choice have ended. */
#include "call.h"

#include <limits.h>
#include <string.h>
#include <time.h>

fa_code fa_attention_read(fa_state *state, fa_function function, PyObject *const *args, Py_ssize_t count,
                          PyObject *keywords, fa_attention *a, fa_status *status) {
    fa_call *call = &a->call;
    fa_call_begin(call, a->array);
    FA_TRY(fa_bind(&state->signature[function], args, count, keywords, &call->bound, status));
    memset(&a->request, 0, sizeof a->request);
    fa_options *options = &a->request.options;
    options->window_left = options->window_right = options->max_seqlen_q = FA_UNBOUNDED;
    options->has_layout = fa_given(&call->bound, FA_ARG_layout) != NULL;
    FA_TRY(fa_read_options(&call->bound, &a->request, status));
    FA_TRY(fa_read_check(&call->bound, &a->check, status));
    FA_TRY(fa_call_place(state, FA_FORWARD, call, status));
    FA_TRY(fa_call_arrays(state, call, FA_ARG_q, &a->request, status));
    FA_TRY(fa_call_pairs(state, call, &a->request, status));
    FA_TRY(fa_call_dropout(state, call, &a->request, status));
    FA_TRY(fa_call_outputs(state, call, fa_given(&call->bound, FA_ARG_out), &a->request.out, &a->request.lse, status));
    FA_TRY(fa_arrays_stream(state, call->array, call->count, &call->stream, &call->joins, status));
    if (a->request.q->device.kind == FA_CUDA && !atomic_load_explicit(&state->cublas_sought, memory_order_acquire) &&
        !fa_cublas_seek(state))
        return fa_python_error(status);
    return FA_OK;
}

/* Arguments -> problem and plan. */
static fa_code prepare(fa_state *state, PyObject *const *args, Py_ssize_t count, PyObject *keywords, fa_attention *a,
                       fa_plan *plan, fa_status *status) {
    fa_call *call = &a->call;
    FA_TRY(fa_attention_read(state, FA_FN_attention, args, count, keywords, a, status));
    FA_TRY(fa_dispatch(state->context, &a->request, call->forced, &call->problem, &call->info, plan, status));
    FA_TRY(fa_arrays_check_stream(state, &call->array[0], &call->problem, &call->stream, status));
    const size_t bytes = call->problem.device.kind == FA_CUDA ? plan->workspace_bytes : 0;
    FA_TRY(fa_forward_workspace(&a->request, bytes, &call->problem, status));
    return fa_call_check(state, call, a->check, status);
}

static fa_code make_outputs(fa_state *state, fa_call *call, fa_result *results, fa_status *status) {
    const fa_request *request = &((fa_attention *)call)->request;
    fa_forward *problem = &call->problem.forward;
    const fa_array *q = &call->array[0];
    const fa_stream stream = fa_call_result_stream(call);
    void *out = request->out ? request->out->data : NULL;
    void *lse = request->lse ? request->lse->data : NULL;
    if (!request->out) {
        int64_t shape[4];
        const int ndim = fa_forward_out_shape(&call->problem, request->options.layout, shape);
        FA_TRY(fa_result_make(state, q, ndim, shape, problem->out_dtype, &stream, &results[0], status));
        out = results[0].data;
    }
    if (problem->wants_lse && !request->lse) {
        int64_t shape[3];
        const int ndim = fa_forward_lse_shape(&call->problem, shape);
        FA_TRY(fa_result_make(state, q, ndim, shape, problem->lse_dtype, &stream, &results[1], status));
        lse = results[1].data;
    }
    fa_forward_set_outputs(problem, out, lse);
    return FA_OK;
}

static PyObject *hand_over(fa_state *state, fa_call *call, fa_result *results) {
    return fa_call_give(state, call, fa_given(&call->bound, FA_ARG_out), call->problem.forward.wants_lse, results);
}

PyObject *fa_py_attention(PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *keywords) {
    static const fa_ending ending = {make_outputs, hand_over};
    fa_state *state = PyModule_GetState(module);
    fa_attention a;
    fa_plan plan;
    fa_status status;
    PyObject *returned = NULL;
    if (prepare(state, args, count, keywords, &a, &plan, &status) == FA_OK)
        returned = fa_call_run(state, &a.call, &plan, &ending, &status);
    fa_call_end(&a.call);
    return returned ? returned : fa_raise(state, &status);
}

PyObject *fa_py_workspace_size(PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *keywords) {
    fa_state *state = PyModule_GetState(module);
    fa_attention a;
    fa_call *call = &a.call;
    fa_plan plan;
    fa_status status;
    fa_code code = fa_attention_read(state, FA_FN_workspace_size, args, count, keywords, &a, &status);
    if (code == FA_OK)
        code = fa_dispatch(state->context, &a.request, call->forced, &call->problem, &call->info, &plan, &status);
    fa_call_end(call);
    if (code != FA_OK) return fa_raise(state, &status);
    return PyLong_FromSize_t(call->problem.device.kind == FA_CUDA ? plan.workspace_bytes : 0);
}

/* ---- a bare launch ---- */

/* A prepared call that is launched `count` times from an empty queue. */
typedef struct burst {
    fa_attention attention;
    const fa_plan *plan;
    long count;
} burst;

static fa_code launch_all(fa_state *state, burst *b, double *seconds, fa_status *status) {
    const fa_call *call = &b->attention.call;
    const bool on_device = call->problem.device.kind == FA_CUDA;
    void *stream = on_device ? call->stream.handle : NULL;
    struct timespec begun, ended;
    fa_code code = on_device ? fa_stream_synchronize(stream, status) : FA_OK;
    clock_gettime(CLOCK_MONOTONIC, &begun);
    for (long n = 0; n < b->count && code == FA_OK && !fa_stopped(&call->problem); n++)
        code = fa_plan_run(&call->problem, b->plan, state->context, call->info, stream, status);
    clock_gettime(CLOCK_MONOTONIC, &ended);
    *seconds =
        ((double)(ended.tv_sec - begun.tv_sec) + 1e-9 * (double)(ended.tv_nsec - begun.tv_nsec)) / (double)b->count;
    if (code == FA_OK && on_device) code = fa_stream_synchronize(stream, status);
    return code;
}

PyObject *fa_time_launches(PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *keywords) {
    fa_state *state = PyModule_GetState(module);
    burst b;
    fa_call *call = &b.attention.call;
    fa_plan plan;
    fa_status status;
    fa_result results[FA_RESULTS] = {{NULL, NULL}};
    double seconds = 0;
    int previous;
    fa_code code;
    const char *accepted = "an int >= 1, then attention()'s arguments";
    b.plan = &plan;
    fa_call_begin(call, NULL); /* nothing is read yet */
    code = count > 0 ? fa_read_index("count", args[0], 1, LONG_MAX, accepted, &b.count, &status)
                     : fa_fail(&status, FA_EVALUE, "count is missing; accepted: %s", accepted);
    if (code != FA_OK) goto done;
    FA_TRY_GOTO(code, prepare(state, args + 1, count - 1, keywords, &b.attention, &plan, &status), done);
    FA_TRY_GOTO(code, fa_device_enter(state->context, call->problem.device, &previous, &status), done);
    code = make_outputs(state, call, results, &status);
    if (code == FA_OK) {
        fa_gil gil;
        fa_gil_release(&gil, &call->problem);
        code = fa_gil_take(&gil, launch_all(state, &b, &seconds, &status), &status);
    }
    fa_device_leave(call->problem.device, previous);
done:
    for (int n = 0; n < FA_RESULTS; n++) Py_XDECREF(results[n].object);
    fa_call_end(call);
    return code == FA_OK ? PyFloat_FromDouble(seconds) : fa_raise(state, &status);
}
