/* The C interface: structs of arguments -> views -> request, and from there as a call from Python. See capi.h. */
#include "capi.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "dispatch.h"
#include "problem_backward.h"
#include "problem_merge.h"
#include "registry.h"

#define LARGEST_STRUCT 4096 /* bytes; a size beyond is no size of a struct */
#define WORKSPACE_UNIT 256  /* bytes that kernels want their workspace aligned to */

_Static_assert(FA_EXT_EVALUE == (int)FA_EVALUE && FA_EXT_ECUDA == (int)FA_ECUDA, "a code is a code");

static _Atomic(fa_context *) shared;

typedef struct call {
    fa_ext_run run;
    fa_op op;
    const fa_kernel *forced;
    uintptr_t alignment; /* of made-up addresses while only planning; 0: the arrays' own count */
    fa_problem problem;
    const fa_device_info *info;
    fa_plan plan;
    void *kept; /* what the problem points into; freed at the end */
} call;

/* Copies a struct that begins with its size; what a caller of an older header lacks is 0. `least`: its first size. */
static fa_code read_struct(const char *name, const void *given, size_t least, void *read, size_t known,
                           fa_status *status) {
    size_t size;
    if (!given) return fa_fail(status, FA_EVALUE, "%s is NULL; accepted: its address", name);
    memcpy(&size, given, sizeof size);
    if (size < least || size > LARGEST_STRUCT)
        return fa_fail(status, FA_EVALUE, "%s.size is %zu; accepted: sizeof(%s), which is %zu in this version", name,
                       size, name, known);
    memset(read, 0, known);
    memcpy(read, given, size < known ? size : known);
    for (size_t n = known; n < size; n++)
        if (((const char *)given)[n] != 0)
            return fa_fail(status, FA_EUNSUPPORTED,
                           "%s has a field beyond its first %zu bytes that is not 0, and this version of fa_ext does "
                           "not know it",
                           name, known);
    return FA_OK;
}

#define READ_STRUCT(type, given, read, status) read_struct(#type, given, sizeof(type), read, sizeof(type), status)

/* ---- arrays ---- */

/* Index of an array among those of a call, for made-up addresses: inputs from 0, results from RESULTS. */
enum { RESULTS = 100, INPUTS_APART = 90 };

/* An address apart from those of the call's other arrays, at an odd multiple of the alignment. */
static void *made_up(uintptr_t alignment, size_t item, int index) {
    const uintptr_t offset = alignment > item ? alignment : item;
    return (void *)(((uintptr_t)index + 1) << 56 | offset);
}

static fa_code read_array(const char *name, const fa_ext_array *given, int index, const call *c, fa_view *view,
                          fa_status *status) {
    static const fa_dtype dtypes[] = {[FA_EXT_FLOAT16] = FA_F16,
                                      [FA_EXT_BFLOAT16] = FA_BF16,
                                      [FA_EXT_FLOAT32] = FA_F32,
                                      [FA_EXT_FLOAT64] = FA_F64,
                                      [FA_EXT_BOOL] = FA_BOOL};
    if (given->ndim < 0 || given->ndim > FA_EXT_MAX_NDIM)
        return fa_fail(status, FA_EVALUE, "%s.ndim is %d; accepted: 0 to %d", name, (int)given->ndim, FA_EXT_MAX_NDIM);
    if (given->dtype < FA_EXT_FLOAT16 || given->dtype > FA_EXT_BOOL)
        return fa_fail(status, FA_ETYPE, "%s.dtype is %d; accepted: a value of fa_ext_dtype, %d to %d", name,
                       (int)given->dtype, FA_EXT_FLOAT16, FA_EXT_BOOL);
    if (given->device < 0)
        return fa_fail(status, FA_EVALUE, "%s.device is %d; accepted: FA_EXT_CPU or FA_EXT_CUDA(ordinal)", name,
                       (int)given->device);
    if (given->reserved != 0)
        return fa_fail(status, FA_EVALUE, "%s.reserved is %d; accepted: 0", name, (int)given->reserved);
    if (given->ndim && !given->shape) return fa_fail(status, FA_EVALUE, "%s.shape is NULL", name);
    *view = (fa_view){.ndim = given->ndim, .dtype = dtypes[given->dtype]};
    if (given->device != FA_EXT_CPU) view->device = (fa_device){FA_CUDA, given->device - FA_EXT_CUDA(0)};
    if (given->ndim) memcpy(view->shape, given->shape, (size_t)given->ndim * sizeof *view->shape);
    FA_TRY(fa_check_extents(name, view, status));
    if (given->strides)
        memcpy(view->strides, given->strides, (size_t)given->ndim * sizeof *view->strides);
    else
        fa_view_contiguous(view);
    view->data = c->alignment ? made_up(c->alignment, fa_item_size(view->dtype), index) : given->data;
    return fa_view_check(name, view, status);
}

/* One array of a struct of arguments. */
typedef struct slot {
    const char *name;
    const fa_ext_array *given;
    const fa_view **view; /* of the request: NULL where the array is absent */
    bool needed, is_result;
} slot;

static fa_code read_arrays(const slot *slots, int count, const call *c, fa_view *views, fa_status *status) {
    for (int n = 0; n < count; n++) {
        *slots[n].view = NULL;
        if (slots[n].given) {
            *slots[n].view = &views[n];
            FA_TRY(
                read_array(slots[n].name, slots[n].given, slots[n].is_result ? RESULTS + n : n, c, &views[n], status));
        } else if (slots[n].needed) {
            return fa_fail(status, FA_EVALUE, "%s is NULL; accepted: an array", slots[n].name);
        }
    }
    return FA_OK;
}

/* ---- options ---- */

static fa_code read_dropout(const fa_ext_options *read, fa_dropout *dropout, fa_status *status) {
    if (!(read->dropout >= 0 && read->dropout <= 1))
        return fa_fail(status, FA_EVALUE, "options.dropout is %g; accepted: 0 to 1", read->dropout);
    if (read->dropout_heads > INT32_MAX)
        return fa_fail(status, FA_EVALUE, "options.dropout_heads is %u; accepted: 0 to %d",
                       (unsigned)read->dropout_heads, (int)INT32_MAX);
    dropout->threshold = (uint32_t)(65536 * read->dropout + 0.5);
    if (!dropout->threshold) return FA_OK;
    dropout->seed[0] = (uint32_t)read->dropout_seed, dropout->seed[1] = (uint32_t)(read->dropout_seed >> 32);
    dropout->offset = read->dropout_offset;
    dropout->heads = read->dropout_heads;
    memcpy(dropout->origin, read->dropout_origin, sizeof dropout->origin);
    return FA_OK;
}

static fa_code read_options(const fa_ext_options *given, fa_options *options, fa_status *status) {
    fa_ext_options read = {.size = sizeof read};
    memset(options, 0, sizeof *options);
    if (given) FA_TRY(READ_STRUCT(fa_ext_options, given, &read, status));
    if (read.given & ~(uint32_t)(FA_EXT_SCALE | FA_EXT_WINDOW_LEFT | FA_EXT_WINDOW_RIGHT))
        return fa_fail(status, FA_EVALUE, "options.given is %#x; accepted: bits of fa_ext_given", (unsigned)read.given);
    if (read.causal < FA_EXT_CAUSAL_NONE || read.causal > FA_EXT_CAUSAL_BOTTOM_RIGHT)
        return fa_fail(status, FA_EVALUE, "options.causal is %d; accepted: a value of fa_ext_causal, %d to %d",
                       (int)read.causal, FA_EXT_CAUSAL_NONE, FA_EXT_CAUSAL_BOTTOM_RIGHT);
    if (read.layout != FA_EXT_BHSD && read.layout != FA_EXT_BSHD)
        return fa_fail(status, FA_EVALUE, "options.layout is %d; accepted: FA_EXT_BHSD or FA_EXT_BSHD",
                       (int)read.layout);
    options->has_scale = read.given & FA_EXT_SCALE;
    options->scale = options->has_scale ? read.scale : 0;
    options->softcap = read.softcap;
    options->window_left = read.given & FA_EXT_WINDOW_LEFT ? read.window_left : FA_UNBOUNDED;
    options->window_right = read.given & FA_EXT_WINDOW_RIGHT ? read.window_right : FA_UNBOUNDED;
    options->causal = (fa_causal)read.causal;
    options->layout = (fa_layout)read.layout;
    options->has_layout = true;
    options->batch_invariant = read.batch_invariant != 0;
    return read_dropout(&read, &options->dropout, status);
}

/* ---- the operations: arguments -> problem and plan ---- */

static fa_code plan_call(call *c, fa_status *status) {
    FA_TRY(fa_device_info_get(atomic_load(&shared), c->problem.device, &c->info, status));
    return fa_plan_make(&c->problem, c->info, c->forced, &c->plan, status);
}

static fa_code prepare_forward(const void *arguments, call *c, fa_status *status) {
    fa_ext_forward given;
    fa_request request = {0};
    fa_view views[9];
    FA_TRY(READ_STRUCT(fa_ext_forward, arguments, &given, status));
    const slot slots[9] = {
        {"q", given.q, &request.q, true, false},
        {"k", given.k, &request.k, true, false},
        {"v", given.v, &request.v, true, false},
        {"bias", given.bias, &request.bias, false, false},
        {"mask", given.mask, &request.mask, false, false},
        {"sinks", given.sinks, &request.sinks, false, false},
        {"out", given.out, &request.out, true, true},
        {"lse", given.lse, &request.lse, false, true},
        {"alibi", given.alibi, &request.alibi, false, false},
    };
    FA_TRY(read_options(given.options, &request.options, status));
    FA_TRY(read_arrays(slots, 9, c, views, status));
    return fa_dispatch(atomic_load(&shared), &request, c->forced, &c->problem, &c->info, &c->plan, status);
}

static fa_code prepare_backward(const void *arguments, call *c, fa_status *status) {
    fa_ext_backward given;
    fa_backward_request request = {0};
    fa_request *forward = &request.forward;
    fa_view views[16];
    FA_TRY(READ_STRUCT(fa_ext_backward, arguments, &given, status));
    const slot slots[16] = {
        {"q", given.q, &forward->q, true, false},
        {"k", given.k, &forward->k, true, false},
        {"v", given.v, &forward->v, true, false},
        {"out", given.out, &forward->out, true, false},
        {"lse", given.lse, &forward->lse, true, false},
        {"dout", given.dout, &request.dout, false, false},
        {"dlse", given.dlse, &request.dlse, false, false},
        {"bias", given.bias, &forward->bias, false, false},
        {"mask", given.mask, &forward->mask, false, false},
        {"sinks", given.sinks, &forward->sinks, false, false},
        {"dq", given.dq, &request.grad[FA_GRAD_Q], false, true},
        {"dk", given.dk, &request.grad[FA_GRAD_K], false, true},
        {"dv", given.dv, &request.grad[FA_GRAD_V], false, true},
        {"dbias", given.dbias, &request.grad[FA_GRAD_BIAS], false, true},
        {"dsinks", given.dsinks, &request.grad[FA_GRAD_SINKS], false, true},
        {"alibi", given.alibi, &forward->alibi, false, false},
    };
    FA_TRY(read_options(given.options, &forward->options, status));
    FA_TRY(read_arrays(slots, 16, c, views, status));
    for (int n = 0; n < FA_GRAD_COUNT; n++) request.wants |= request.grad[n] ? 1u << n : 0;
    if (!request.wants)
        return fa_fail(status, FA_EVALUE, "dq, dk, dv, dbias and dsinks are NULL; accepted: at least one array");
    request.accumulate = given.accumulate != 0;
    request.deterministic = given.unordered == 0;
    FA_TRY(fa_backward_build(&request, &c->problem, status));
    return plan_call(c, status);
}

typedef struct merge_views {
    fa_part *parts;
    fa_view *views; /* outs, lses, then sinks, out, lse */
    const fa_view **pointers;
} merge_views;

static fa_code allocate_merge(size_t count, call *c, merge_views *m, fa_status *status) {
    const size_t arrays = 2 * count + 3;
    free(c->kept);
    c->kept = malloc(count * sizeof(fa_part) + arrays * (sizeof(fa_view) + sizeof(fa_view *)));
    if (!c->kept) return fa_fail(status, FA_EMEMORY, "no memory for the description of %zu parts", count);
    m->parts = c->kept;
    m->views = (fa_view *)(m->parts + count);
    m->pointers = (const fa_view **)(m->views + arrays);
    return FA_OK;
}

static fa_code read_parts(const fa_ext_merge *given, const call *c, merge_views *m, fa_status *status) {
    for (size_t n = 0; n < 2 * given->count; n++) {
        const bool is_out = n < given->count;
        const size_t index = is_out ? n : n - given->count;
        char name[40];
        snprintf(name, sizeof name, "%s[%zu]", is_out ? "outs" : "lses", index);
        m->pointers[n] = &m->views[n];
        FA_TRY(read_array(name, &(is_out ? given->outs : given->lses)[index], (int)(n % INPUTS_APART), c, &m->views[n],
                          status));
    }
    return FA_OK;
}

static fa_code prepare_merge(const void *arguments, call *c, fa_status *status) {
    fa_ext_merge given;
    merge_views m = {NULL, NULL, NULL};
    FA_TRY(READ_STRUCT(fa_ext_merge, arguments, &given, status));
    if (given.count < 1 || given.count > INT32_MAX / 8)
        return fa_fail(status, FA_EVALUE, "count is %zu; accepted: 1 to %d", given.count, (int)(INT32_MAX / 8));
    if (!given.outs || !given.lses)
        return fa_fail(status, FA_EVALUE, "%s is NULL; accepted: `count` arrays", given.outs ? "lses" : "outs");
    if (given.layout != FA_EXT_BHSD && given.layout != FA_EXT_BSHD)
        return fa_fail(status, FA_EVALUE, "layout is %d; accepted: FA_EXT_BHSD or FA_EXT_BSHD", (int)given.layout);
    if (given.reserved != 0) return fa_fail(status, FA_EVALUE, "reserved is %d; accepted: 0", (int)given.reserved);
    FA_TRY(allocate_merge(given.count, c, &m, status));
    FA_TRY(read_parts(&given, c, &m, status));
    fa_merge_request request = {.count = (int)given.count,
                                .outs = m.pointers,
                                .lses = m.pointers + given.count,
                                .layout = (fa_layout)given.layout};
    const slot slots[3] = {
        {"sinks", given.sinks, &request.sinks, false, false},
        {"out", given.out, &request.out, true, true},
        {"lse", given.lse, &request.lse, true, true},
    };
    FA_TRY(read_arrays(slots, 3, c, m.views + 2 * given.count, status));
    FA_TRY(fa_merge_build(&request, m.parts, &c->problem, status));
    return plan_call(c, status);
}

static fa_code prepare(const void *arguments, call *c, fa_status *status) {
    switch (c->op) {
    case FA_FORWARD: return prepare_forward(arguments, c, status);
    case FA_BACKWARD: return prepare_backward(arguments, c, status);
    default: return prepare_merge(arguments, c, status);
    }
}

/* ---- how it runs ---- */

static fa_code find_kernel(call *c, fa_status *status) {
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

static fa_code begin(const fa_ext_run *run, fa_op op, call *c, fa_status *status) {
    c->op = op;
    c->forced = NULL;
    c->alignment = 0;
    c->kept = NULL;
    c->run = (fa_ext_run){.size = sizeof c->run};
    if (!run) return FA_OK;
    FA_TRY(READ_STRUCT(fa_ext_run, run, &c->run, status));
    return find_kernel(c, status);
}

/* Bytes that serve a plan wherever a caller's workspace begins. */
static size_t workspace_of(const fa_plan *plan, const fa_problem *problem) {
    return plan->workspace_bytes && !problem->empty ? plan->workspace_bytes + WORKSPACE_UNIT - 1 : 0;
}

static fa_code launch(call *c, fa_status *status) {
    fa_context *context = atomic_load(&shared);
    void *stream = c->problem.device.kind == FA_CUDA && !c->run.stream ? FA_STREAM_LEGACY : c->run.stream;
    const size_t needed = workspace_of(&c->plan, &c->problem);
    if (!c->run.workspace || !needed) return fa_plan_run(&c->problem, &c->plan, context, c->info, stream, status);
    const uintptr_t begin = ((uintptr_t)c->run.workspace + WORKSPACE_UNIT - 1) & ~(uintptr_t)(WORKSPACE_UNIT - 1);
    return fa_plan_launch(&c->problem, &c->plan, context, c->info, stream, (void *)begin, status);
}

static fa_code check_run(const call *c, fa_status *status) {
    const size_t needed = workspace_of(&c->plan, &c->problem);
    if (c->run.workspace && c->run.workspace_bytes < needed)
        return fa_fail(status, FA_EVALUE,
                       "workspace_bytes is %zu, but kernel %s needs %zu for this call; accepted: what "
                       "workspace() says, or more",
                       c->run.workspace_bytes, c->plan.kernel->name, needed);
    if (!c->run.stream) return FA_OK;
    if (c->problem.device.kind == FA_CPU)
        return fa_fail(status, FA_EVALUE, "stream is given, but the arrays are on the CPU; accepted there: NULL");
    return fa_stream_check(atomic_load(&shared), c->problem.device, "stream", c->run.stream, status);
}

static fa_code execute(const void *arguments, const fa_ext_run *run, fa_op op, call *c, fa_status *status) {
    int previous;
    FA_TRY(begin(run, op, c, status));
    FA_TRY(prepare(arguments, c, status));
    FA_TRY(check_run(c, status));
    FA_TRY(fa_device_enter(atomic_load(&shared), c->problem.device, &previous, status));
    const fa_code code = launch(c, status);
    fa_device_leave(c->problem.device, previous);
    return code;
}

/* Hands the words to the caller's buffer, if `run` is known to have one. */
static int finish(call *c, fa_code code, const fa_status *status) {
    free(c->kept);
    if (code != FA_OK && c->run.message && c->run.message_bytes)
        snprintf(c->run.message, c->run.message_bytes, "%s", status->message);
    return (int)code;
}

static int run_operation(const void *arguments, const fa_ext_run *run, fa_op op) {
    call c;
    fa_status status;
    const fa_code code = execute(arguments, run, op, &c, &status);
    return finish(&c, code, &status);
}

static int run_forward(const fa_ext_forward *arguments, const fa_ext_run *run) {
    return run_operation(arguments, run, FA_FORWARD);
}

static int run_backward(const fa_ext_backward *arguments, const fa_ext_run *run) {
    return run_operation(arguments, run, FA_BACKWARD);
}

static int run_merge(const fa_ext_merge *arguments, const fa_ext_run *run) {
    return run_operation(arguments, run, FA_MERGE);
}

static fa_code ask_workspace(const void *arguments, call *c, size_t *bytes, fa_status *status) {
    *bytes = 0;
    for (c->alignment = WORKSPACE_UNIT; c->alignment; c->alignment /= 2) {
        FA_TRY(prepare(arguments, c, status));
        const size_t needed = workspace_of(&c->plan, &c->problem);
        if (needed > *bytes) *bytes = needed;
    }
    return FA_OK;
}

static int ask(int operation, const void *arguments, const fa_ext_run *run, size_t *bytes) {
    static const fa_op operations[] = {
        [FA_EXT_FORWARD] = FA_FORWARD, [FA_EXT_BACKWARD] = FA_BACKWARD, [FA_EXT_MERGE] = FA_MERGE};
    const bool known = operation >= FA_EXT_FORWARD && operation <= FA_EXT_MERGE;
    call c;
    fa_status status;
    fa_code code = begin(run, known ? operations[operation] : FA_FORWARD, &c, &status);
    if (code == FA_OK && !known)
        code = fa_fail(&status, FA_EVALUE, "operation is %d; accepted: a value of fa_ext_operation, %d to %d",
                       operation, FA_EXT_FORWARD, FA_EXT_MERGE);
    if (code == FA_OK && !bytes) code = fa_fail(&status, FA_EVALUE, "bytes is NULL; accepted: where the answer goes");
    if (code == FA_OK) code = ask_workspace(arguments, &c, bytes, &status);
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
