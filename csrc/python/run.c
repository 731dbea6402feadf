/* The arrays of a call of any operation: their stream, and the launch between the streams of their libraries. */
#include "call.h"

#include <stdio.h>
#include <sys/syscall.h>
#include <unistd.h>

fa_code fa_arrays_stream(fa_state *state, fa_array *array, int count, fa_stream *stream, bool *joins,
                         fa_status *status) {
    if (stream->given && array[0].view.device.kind == FA_CPU)
        return fa_fail(status, FA_EVALUE, "stream is given, but %s is on the CPU; accepted there: None", array[0].name);
    if (!stream->given) stream->handle = array[0].has_stream ? array[0].stream : FA_STREAM_PER_THREAD;
    FA_TRY(fa_arrays_settle(state, array, count, stream->handle, status));
    const fa_array *known = NULL;
    bool unknown = false;
    *joins = false;
    for (int n = count - 1; n >= 0; n--) {
        if (!array[n].object) continue;
        unknown |= array[n].device_unknown;
        *joins |= array[n].has_stream && array[n].stream != stream->handle;
        if (!array[n].device_unknown && array[n].view.device.kind == FA_CUDA) known = &array[n];
    }
    for (int n = 0; n < count && unknown && known; n++)
        if (array[n].object && array[n].device_unknown) array[n].view.device = known->view.device;
    return FA_OK;
}

/* A stream that no library of the arrays keeps for their device, but the caller or an interface names. */
fa_code fa_arrays_check_stream(fa_state *state, const fa_array *first, const fa_problem *problem,
                               const fa_stream *stream, fa_status *status) {
    const bool described = first->type->protocol == FA_BY_INTERFACE || first->type->protocol == FA_BY_UNKNOWN;
    const bool named = described && first->has_stream && first->type->library != FA_LIB_CUPY;
    if (problem->device.kind == FA_CPU || !(stream->given || named)) return FA_OK;
    char name[64];
    snprintf(name, sizeof name, "%s's interface stream", first->name);
    return fa_stream_check(state->context, problem->device, stream->given ? "stream" : name, stream->handle, status);
}

/* Memory that came through __dlpack__ goes back to its library when the call returns, and that library knows nothing
 * of our stream: wait, unless the caller named a stream and with it took charge of lifetimes. */
static bool must_wait(const fa_array *array, int count, const fa_stream *stream) {
    if (stream->given) return false;
    for (int n = 0; n < count; n++)
        if (array[n].object && array[n].needs_stream && !array[n].has_stream) return true;
    return false;
}

/* ---- the launch ---- */

/* Runs the handlers of signals that have come, as Python does between its steps, on its main thread; true: one of them
 * raised. */
static bool handlers_raise(void *context) {
    PyThreadState **thread = context;
    if (syscall(SYS_gettid) != getpid()) return false; /* nothing to do there, and the GIL may be long in coming */
    PyEval_RestoreThread(*thread);
    const bool raised = PyErr_CheckSignals() < 0;
    *thread = PyEval_SaveThread();
    return raised;
}

void fa_gil_release(fa_gil *gil, fa_problem *problem) {
    const bool on_cpu = problem->device.kind == FA_CPU;
    problem->stopped = on_cpu ? fa_cpu_stopped : NULL;
    gil->thread = PyEval_SaveThread();
    gil->watch = (fa_cpu_watch){.stops = handlers_raise, .context = &gil->thread};
    gil->watches = on_cpu;
    if (on_cpu) fa_cpu_watch_begin(&gil->watch);
}

fa_code fa_gil_take(fa_gil *gil, fa_code code, fa_status *status) {
    if (gil->watches) fa_cpu_watch_end(&gil->watch);
    PyEval_RestoreThread(gil->thread);
    return gil->watch.stopped ? fa_python_error(status) : code;
}

fa_code fa_arrays_run(fa_state *state, const fa_array *array, int count, fa_problem *problem, const fa_plan *plan,
                      const fa_device_info *info, const fa_stream *stream, bool joins, fa_status *status) {
    const bool on_device = problem->device.kind == FA_CUDA;
    void *handle = on_device ? stream->handle : NULL;
    joins = joins && on_device;
    if (joins) FA_TRY(fa_stream_join(array, count, handle, true, status));
    const bool wait = on_device && must_wait(array, count, stream);
    fa_code code;
    fa_gil gil;
    fa_gil_release(&gil, problem);
    code = fa_plan_run(problem, plan, state->context, info, handle, status);
    if (code == FA_OK && wait) code = fa_stream_synchronize(handle, status);
    code = fa_gil_take(&gil, code, status);
    if (!joins) return code;
    fa_status second;
    fa_code joined = fa_stream_join(array, count, handle, false, code == FA_OK ? status : &second);
    return code == FA_OK ? joined : code;
}
