/* The C interface: the table's functions, each as a call from Python from the problem on. See c_api.h. */
#include "c_api/c_api.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "c_api/arguments.h"
#include "device/host_mapped.h"
#include "device/threads.h"
#include "dispatch/registry.h"
#include "faults/counters.h"
#include "faults/index_arrays.h"
#include "philox.h"

#define WORKSPACE_UNIT 256 /* bytes that kernels want their workspace aligned to */

_Static_assert(FA_EXT_EVALUE == (int)FA_EVALUE && FA_EXT_ECUDA == (int)FA_ECUDA, "a code is a code");

static _Atomic(fa_context *) shared;

/* ---- how it runs ---- */

static fa_code find_kernel(fa_capi_call *c, fa_status *status) {
    c->forced = c->run.kernel ? fa_kernel_find(c->op, c->run.kernel) : NULL;
    if (c->forced || !c->run.kernel) return FA_OK;
    char names[1024] = "";
    size_t used = 0;
    for (int n = 0; fa_kernel_at(n) && used < sizeof names; n++)
        if (fa_kernel_at(n)->op == c->op)
            used +=
                (size_t)snprintf(names + used, sizeof names - used, "%s%s", used ? ", " : "", fa_kernel_at(n)->name);
    return fa_fail(status, FA_EVALUE, "kernel is \"%.80s\", which names no kernel of this build; accepted: %s",
                   c->run.kernel, names);
}

/* Every function of the table calls this first and finish() last. A thread that is cancelled meanwhile ends behind the
 * call: between the two it may hold a lock, or other threads may work on what lies on its stack. */
static void start(fa_capi_call *c) {
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &c->cancel);
    c->kept = NULL;
    c->run = (fa_ext_run){.size = sizeof c->run};
}

static fa_code begin(const fa_ext_run *run, fa_op op, fa_capi_call *c, fa_status *status) {
    start(c);
    c->context = atomic_load(&shared);
    c->op = op;
    c->forced = NULL;
    c->alignment = 0;
    c->checks = c->checks_device = false;
    if (!run) return FA_OK;
    FA_TRY(FA_CAPI_STRUCT(fa_ext_run, run, &c->run, status));
    return find_kernel(c, status);
}

/* Bytes that serve a plan wherever a caller's workspace begins. */
static size_t workspace_of(const fa_plan *plan, const fa_problem *problem) {
    return plan->workspace_bytes && !problem->empty ? plan->workspace_bytes + WORKSPACE_UNIT - 1 : 0;
}

static void *stream_of(const fa_capi_call *c) {
    return c->problem.device.kind == FA_CUDA && !c->run.stream ? FA_STREAM_LEGACY : c->run.stream;
}

static fa_code launch(fa_capi_call *c, fa_status *status) {
    void *stream = stream_of(c);
    const size_t needed = workspace_of(&c->plan, &c->problem);
    if (!c->run.workspace || !needed) return fa_plan_run(&c->problem, &c->plan, c->context, c->info, stream, status);
    const uintptr_t begin = ((uintptr_t)c->run.workspace + WORKSPACE_UNIT - 1) & ~(uintptr_t)(WORKSPACE_UNIT - 1);
    return fa_plan_launch(&c->problem, &c->plan, c->context, c->info, stream, (void *)begin, status);
}

static fa_code check_run(const fa_capi_call *c, fa_status *status) {
    const size_t needed = workspace_of(&c->plan, &c->problem);
    if (c->run.workspace && c->run.workspace_bytes < needed)
        return fa_fail(status, FA_EVALUE,
                       "workspace_bytes is %zu, but kernel %s needs %zu for this call; accepted: what "
                       "workspace() says, or more",
                       c->run.workspace_bytes, c->plan.kernel->name, needed);
    if (!c->run.stream || c->stream_known) return FA_OK;
    if (c->problem.device.kind == FA_CPU)
        return fa_fail(status, FA_EVALUE, "stream is given, but the arrays are on the CPU; accepted there: NULL");
    return fa_stream_check(c->context, c->problem.device, "stream", c->run.stream, status);
}

/* With the device current. */
static fa_code look_at_contents(const fa_capi_call *c, fa_status *status) {
    bool capturing;
    void *stream = stream_of(c);
    if (!c->checks_device || c->problem.device.kind == FA_CPU || !fa_contents_given(&c->problem)) return FA_OK;
    FA_TRY(fa_stream_capturing(stream, &capturing, status));
    if (capturing)
        return fa_fail(status, FA_EVALUE,
                       "check is FA_EXT_CHECK_ALWAYS, which waits for the stream, but the stream is being captured");
    return fa_faults_look(&c->problem, stream, status);
}

static fa_code execute(const void *arguments, const fa_ext_run *run, fa_op op, fa_capi_call *c, fa_status *status) {
    int previous;
    FA_TRY(begin(run, op, c, status));
    FA_TRY(fa_capi_prepare(arguments, c, status));
    FA_TRY(check_run(c, status));
    FA_TRY(fa_faults_meet(c->context, &c->problem, c->checks, status));
    FA_TRY(fa_device_enter(c->context, c->problem.device, &previous, status));
    fa_code code = look_at_contents(c, status);
    if (code == FA_OK) code = launch(c, status);
    fa_device_leave(c->problem.device, previous);
    return code;
}

/* Hands the words to the caller's buffer, if `run` is known to have one. */
static int finish(fa_capi_call *c, fa_code code, const fa_status *status) {
    free(c->kept);
    if (code != FA_OK && c->run.message && c->run.message_bytes)
        snprintf(c->run.message, c->run.message_bytes, "%s", status->message);
    pthread_setcancelstate(c->cancel, NULL);
    return (int)code;
}

int fa_capi_run(fa_op op, const void *arguments, const fa_ext_run *run, bool stream_known) {
    fa_capi_call c;
    fa_status status;
    c.stream_known = stream_known;
    const fa_code code = execute(arguments, run, op, &c, &status);
    return finish(&c, code, &status);
}

static int run_forward(const fa_ext_forward *arguments, const fa_ext_run *run) {
    return fa_capi_run(FA_FORWARD, arguments, run, false);
}

static int run_backward(const fa_ext_backward *arguments, const fa_ext_run *run) {
    return fa_capi_run(FA_BACKWARD, arguments, run, false);
}

static int run_merge(const fa_ext_merge *arguments, const fa_ext_run *run) {
    return fa_capi_run(FA_MERGE, arguments, run, false);
}

static int run_append(const fa_ext_append *arguments, const fa_ext_run *run) {
    return fa_capi_run(FA_APPEND, arguments, run, false);
}

static int run_documents(const fa_ext_documents *arguments, const fa_ext_run *run) {
    return fa_capi_run(FA_DOCUMENTS, arguments, run, false);
}

static fa_code ask_workspace(const void *arguments, fa_capi_call *c, size_t *bytes, fa_status *status) {
    *bytes = 0;
    for (c->alignment = WORKSPACE_UNIT; c->alignment; c->alignment /= 2) {
        FA_TRY(fa_capi_prepare(arguments, c, status));
        const size_t needed = workspace_of(&c->plan, &c->problem);
        if (needed > *bytes) *bytes = needed;
    }
    return FA_OK;
}

static int ask(int operation, const void *arguments, const fa_ext_run *run, size_t *bytes) {
    static const fa_op operations[] = {[FA_EXT_FORWARD] = FA_FORWARD,
                                       [FA_EXT_BACKWARD] = FA_BACKWARD,
                                       [FA_EXT_MERGE] = FA_MERGE,
                                       [FA_EXT_APPEND] = FA_APPEND,
                                       [FA_EXT_DOCUMENTS] = FA_DOCUMENTS};
    const bool known = operation >= FA_EXT_FORWARD && operation <= FA_EXT_DOCUMENTS;
    fa_capi_call c;
    fa_status status;
    fa_code code = begin(run, known ? operations[operation] : FA_FORWARD, &c, &status);
    if (code == FA_OK && !known)
        code = fa_fail(&status, FA_EVALUE, "operation is %d; accepted: a value of fa_ext_operation, %d to %d",
                       operation, FA_EXT_FORWARD, FA_EXT_DOCUMENTS);
    if (code == FA_OK && !bytes) code = fa_fail(&status, FA_EVALUE, "bytes is NULL; accepted: where the answer goes");
    if (code == FA_OK) code = ask_workspace(arguments, &c, bytes, &status);
    return finish(&c, code, &status);
}

/* ---- other functions ---- */

/* Refuses what only an operation has. */
static fa_code begin_plain(const fa_ext_run *run, const char *name, fa_capi_call *c, fa_status *status) {
    start(c);
    if (!run) return FA_OK;
    FA_TRY(FA_CAPI_STRUCT(fa_ext_run, run, &c->run, status));
    if (c->run.kernel) return fa_fail(status, FA_EVALUE, "kernel is given, but %s has none; accepted: NULL", name);
    if (c->run.stream)
        return fa_fail(status, FA_EVALUE, "stream is given, but %s queues no work; accepted: NULL", name);
    return FA_OK;
}

typedef struct keep {
    fa_view out;
    fa_dropout dropout;
} keep;

/* A row of the mask. */
static void keep_step(const void *context, int64_t index, int worker) {
    (void)worker;
    const keep *k = context;
    const int64_t *shape = k->out.shape, *stride = k->out.strides;
    const int64_t i = index % shape[2], h = index / shape[2] % shape[1], b = index / shape[2] / shape[1];
    char *to = (char *)k->out.data + b * stride[0] + h * stride[1] + i * stride[2];
    for (int64_t j = 0; j < shape[3]; j++) to[j * stride[3]] = fa_dropout_keeps(&k->dropout, b, h, i, j);
}

static int run_dropout_keep(const fa_ext_dropout_keep *arguments, const fa_ext_run *run) {
    fa_capi_call c;
    fa_status status;
    keep k;
    fa_code code = begin_plain(run, "dropout_keep", &c, &status);
    if (code == FA_OK) code = fa_capi_read_keep(arguments, &k.out, &k.dropout, &status);
    if (code == FA_OK) fa_cpu_loop(fa_cpu_threads(), k.out.shape[0] * k.out.shape[1] * k.out.shape[2], keep_step, &k);
    return finish(&c, code, &status);
}

static fa_code take_faults(const fa_ext_faults *arguments, fa_status *status) {
    fa_ext_faults given;
    fa_faults found;
    FA_TRY(FA_CAPI_STRUCT(fa_ext_faults, arguments, &given, status));
    if (given.device < 0)
        return fa_fail(status, FA_EVALUE, "device is %d; accepted: FA_EXT_CPU or FA_EXT_CUDA(ordinal)",
                       (int)given.device);
    if (!given.found && given.count)
        return fa_fail(status, FA_EVALUE, "found is NULL, but count is %zu; accepted: where `count` of them go",
                       given.count);
    fa_device device = {FA_CPU, 0};
    if (given.device != FA_EXT_CPU) device = (fa_device){FA_CUDA, given.device - FA_EXT_CUDA(0)};
    FA_TRY(fa_faults_take(atomic_load(&shared), device, given.keep == 0, &found, status));
    for (size_t kind = 0; kind < given.count; kind++) {
        const fa_fault none = {0}, *f = kind < FA_FAULT_COUNT ? &found.of[kind] : &none;
        given.found[kind] = (fa_ext_fault){f->count, f->sequence, f->index, f->value};
    }
    return FA_OK;
}

static int run_faults(const fa_ext_faults *arguments, const fa_ext_run *run) {
    fa_capi_call c;
    fa_status status;
    fa_code code = begin_plain(run, "faults", &c, &status);
    if (code == FA_OK) code = take_faults(arguments, &status);
    return finish(&c, code, &status);
}

const fa_ext_api fa_capi = {
    .abi = FA_EXT_ABI,
    .size = sizeof(fa_ext_api),
    .version = FA_VERSION,
    .forward = run_forward,
    .backward = run_backward,
    .workspace = ask,
    .merge = run_merge,
    .append = run_append,
    .dropout_keep = run_dropout_keep,
    .faults = run_faults,
    .documents = run_documents,
};

const fa_ext_api *fa_capi_table(fa_context *context) {
    fa_context *none = NULL;
    if (atomic_compare_exchange_strong(&shared, &none, context)) fa_context_hold(context);
    return &fa_capi;
}

fa_code fa_capi_device(const void *pointer, int32_t *device, fa_status *status) {
    fa_device found;
    FA_TRY(fa_pointer_device(atomic_load(&shared), pointer, true, &found, status));
    *device = found.kind == FA_CPU ? FA_EXT_CPU : FA_EXT_CUDA(found.id);
    return FA_OK;
}

bool fa_capi_stream_device(void *stream, int32_t *device) {
    fa_device found;
    if (!fa_stream_device(atomic_load(&shared), stream, &found)) return false;
    *device = FA_EXT_CUDA(found.id);
    return true;
}
