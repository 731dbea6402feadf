/* The arrays of a call of any operation: their stream, and the launch between the streams of their libraries. */
#include "call.h"

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

fa_code fa_arrays_run(fa_state *state, const fa_array *array, int count, const fa_problem *problem, const fa_plan *plan,
                      const fa_device_info *info, const fa_stream *stream, bool joins, fa_status *status) {
    const bool on_device = problem->device.kind == FA_CUDA;
    void *handle = on_device ? stream->handle : NULL;
    joins = joins && on_device;
    if (joins) FA_TRY(fa_stream_join(array, count, handle, true, status));
    const bool wait = on_device && must_wait(array, count, stream);
    fa_code code;
    PyThreadState *thread = PyEval_SaveThread();
    code = fa_plan_run(problem, plan, state->context, info, handle, status);
    if (code == FA_OK && wait) code = fa_stream_synchronize(handle, status);
    PyEval_RestoreThread(thread);
    if (!joins) return code;
    fa_status second;
    fa_code joined = fa_stream_join(array, count, handle, false, code == FA_OK ? status : &second);
    return code == FA_OK ? joined : code;
}
