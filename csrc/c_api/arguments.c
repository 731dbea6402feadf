/* Arguments of the C interface. See arguments.h. */
#include "c_api/arguments.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "dispatch/plan_cache.h"
#include "dispatch/registry.h"
#include "philox.h"
#include "problem/append.h"
#include "problem/backward.h"
#include "problem/check.h"
#include "problem/documents.h"
#include "problem/forward.h"
#include "problem/merge.h"
#include "problem/operands.h"

#define LARGEST_STRUCT 4096 /* bytes; a size beyond is no size of a struct */

fa_code fa_capi_struct(const char *name, const void *given, size_t least, void *read, size_t known, fa_status *status) {
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

/* ---- arrays ---- */

/* Index of an array among those of a call, for made-up addresses: parts of a merge, operands by number, gradients. */
enum { PARTS = 90, OPERANDS = 100, GRADIENTS = OPERANDS + FA_OPERAND_COUNT, INDICES = GRADIENTS + FA_GRAD_COUNT };
_Static_assert(INDICES < 255, "made-up addresses differ in their first byte");

/* An address apart from those of the call's other arrays, at an odd multiple of the alignment. */
static void *made_up(uintptr_t alignment, size_t item, int index) {
    const uintptr_t offset = alignment > item ? alignment : item;
    return (void *)(((uintptr_t)index + 1) << 56 | offset);
}

fa_dtype fa_capi_dtype(int number) {
    static const fa_dtype dtypes[] = {
        [FA_EXT_FLOAT16] = FA_F16, [FA_EXT_BFLOAT16] = FA_BF16, [FA_EXT_FLOAT32] = FA_F32, [FA_EXT_FLOAT64] = FA_F64,
        [FA_EXT_BOOL] = FA_BOOL,   [FA_EXT_INT32] = FA_I32,     [FA_EXT_INT64] = FA_I64};
    return number < FA_EXT_FLOAT16 || number > FA_EXT_INT64 ? FA_DTYPE_COUNT : dtypes[number];
}

static fa_code read_array(const char *name, const fa_ext_array *given, int index, const fa_capi_call *c, fa_view *view,
                          fa_status *status) {
    if (given->ndim < 0 || given->ndim > FA_EXT_MAX_NDIM)
        return fa_fail(status, FA_EVALUE, "%s.ndim is %d; accepted: 0 to %d", name, (int)given->ndim, FA_EXT_MAX_NDIM);
    if (fa_capi_dtype(given->dtype) == FA_DTYPE_COUNT)
        return fa_fail(status, FA_ETYPE, "%s.dtype is %d; accepted: a value of fa_ext_dtype, %d to %d", name,
                       (int)given->dtype, FA_EXT_FLOAT16, FA_EXT_INT64);
    if (given->device < 0)
        return fa_fail(status, FA_EVALUE, "%s.device is %d; accepted: FA_EXT_CPU or FA_EXT_CUDA(ordinal)", name,
                       (int)given->device);
    if (given->reserved != 0)
        return fa_fail(status, FA_EVALUE, "%s.reserved is %d; accepted: 0", name, (int)given->reserved);
    if (given->ndim && !given->shape) return fa_fail(status, FA_EVALUE, "%s.shape is NULL", name);
    view->ndim = given->ndim;
    view->dtype = fa_capi_dtype(given->dtype);
    view->readonly = false;
    view->device = (fa_device){FA_CPU, 0};
    if (given->device != FA_EXT_CPU) view->device = (fa_device){FA_CUDA, given->device - FA_EXT_CUDA(0)};
    if (given->ndim) memcpy(view->shape, given->shape, (size_t)given->ndim * sizeof *view->shape);
    FA_TRY(fa_check_extents(name, view, status));
    if (given->strides)
        memcpy(view->strides, given->strides, (size_t)given->ndim * sizeof *view->strides);
    else
        fa_view_contiguous(view);
    view->data = c->alignment ? made_up(c->alignment, fa_dtype_size(view->dtype), index) : given->data;
    return fa_view_check(name, view, status);
}

/* Where the structs of arguments have operands; dropout's state and a workspace are elsewhere. */
#define FIELD_OF_DATA(type, name)   {FA_OPERAND_##name, offsetof(type, name)},
#define FIELD_OF_OPTION(type, name) {FA_OPERAND_##name, offsetof(type, name)},
#define FIELD_OF_INDEX(type, name)  {FA_OPERAND_##name, offsetof(type, name)},
#define FIELD_OF_STATE(type, name)
#define FIELD_OF_MEMORY(type, name)
#define FIELD_NO(role, type, name)
#define FIELD_IN(role, type, name)      FIELD_OF_##role(type, name)
#define FIELD_IN_OPT(role, type, name)  FIELD_OF_##role(type, name)
#define FIELD_OUT(role, type, name)     FIELD_OF_##role(type, name)
#define FIELD_OUT_OPT(role, type, name) FIELD_OF_##role(type, name)

static const fa_capi_field forward_fields[] = {
#define FA_OPERAND(name, words, role, forward, ...) FIELD_##forward(role, fa_ext_forward, name)
#include "operands.def"
#undef FA_OPERAND
};
static const fa_capi_field backward_fields[] = {
#define FA_OPERAND(name, words, role, forward, backward, ...) FIELD_##backward(role, fa_ext_backward, name)
#include "operands.def"
#undef FA_OPERAND
};
static const fa_capi_field merge_fields[] = {
#define FA_OPERAND(name, words, role, forward, backward, merge, ...) FIELD_##merge(role, fa_ext_merge, name)
#include "operands.def"
#undef FA_OPERAND
};
static const fa_capi_field append_fields[] = {
#define FA_OPERAND(name, words, role, forward, backward, merge, append, ...) FIELD_##append(role, fa_ext_append, name)
#include "operands.def"
#undef FA_OPERAND
};

#define COUNT(fields) (sizeof(fields) / sizeof *(fields))
const fa_capi_fields fa_capi_operands[FA_OP_COUNT] = {
    [FA_FORWARD] = {forward_fields, COUNT(forward_fields)},
    [FA_BACKWARD] = {backward_fields, COUNT(backward_fields)},
    [FA_MERGE] = {merge_fields, COUNT(merge_fields)},
    [FA_APPEND] = {append_fields, COUNT(append_fields)},
};

const size_t fa_capi_gradients[FA_GRAD_COUNT] = {
#define GRADIENT(number, name) offsetof(fa_ext_backward, d##name),
#define NO_GRADIENT
#define FA_OPERAND(name, words, role, forward, backward, merge, append, gradient, ...) gradient
#include "operands.def"
#undef FA_OPERAND
#undef NO_GRADIENT
#undef GRADIENT
};

/* The operands of a struct of arguments -> the request's; `views`: FA_OPERAND_COUNT of them. */
static fa_code read_arrays(const void *given, const fa_capi_call *c, fa_request *request, fa_view *views,
                           fa_status *status) {
    for (int n = 0; n < fa_capi_operands[c->op].count; n++) {
        const fa_capi_field *field = &fa_capi_operands[c->op].field[n];
        const fa_operand_line *line = &fa_operands[field->operand];
        const fa_ext_array *array = *fa_capi_array((void *)(uintptr_t)given, field->offset);
        fa_view *view = &views[field->operand];
        if (!array && (line->use[c->op] == FA_USE_IN || line->use[c->op] == FA_USE_OUT))
            return fa_fail(status, FA_EVALUE, "%s is NULL; accepted: an array", line->name);
        if (!array) continue;
        FA_TRY(read_array(line->name, array, OPERANDS + (int)field->operand, c, view, status));
        *fa_request_place(request, field->operand) = view;
    }
    return FA_OK;
}

/* ---- options ---- */

static fa_code read_layout(const char *name, int32_t given, fa_layout *layout, fa_status *status) {
    if (given != FA_EXT_BHSD && given != FA_EXT_BSHD)
        return fa_fail(status, FA_EVALUE, "%s is %d; accepted: FA_EXT_BHSD or FA_EXT_BSHD", name, (int)given);
    *layout = given == FA_EXT_BSHD ? FA_BSHD : FA_BHSD;
    return FA_OK;
}

static fa_code check_reserved(int32_t given, fa_status *status) {
    return given == 0 ? FA_OK : fa_fail(status, FA_EVALUE, "reserved is %d; accepted: 0", (int)given);
}

static fa_code read_check(int32_t given, int32_t reserved, fa_capi_call *c, fa_status *status) {
    if (given < FA_EXT_CHECK_DEFAULT || given > FA_EXT_CHECK_ALWAYS)
        return fa_fail(status, FA_EVALUE,
                       "check is %d; accepted: FA_EXT_CHECK_DEFAULT, FA_EXT_CHECK_NEVER or FA_EXT_CHECK_ALWAYS",
                       (int)given);
    c->checks = given != FA_EXT_CHECK_NEVER;
    c->checks_device = given == FA_EXT_CHECK_ALWAYS;
    return check_reserved(reserved, status);
}

static fa_code read_dropout(const fa_ext_options *read, fa_dropout *dropout, fa_status *status) {
    if (!(read->dropout >= 0 && read->dropout <= 1))
        return fa_fail(status, FA_EVALUE, "options.dropout is %g; accepted: 0 to 1", read->dropout);
    if (read->dropout_heads > INT32_MAX)
        return fa_fail(status, FA_EVALUE, "options.dropout_heads is %u; accepted: 0 to %d",
                       (unsigned)read->dropout_heads, (int)INT32_MAX);
    dropout->threshold = (uint32_t)(65536 * read->dropout + 0.5);
    if (!dropout->threshold || read->dropout_state) return FA_OK;
    dropout->seed[0] = (uint32_t)read->dropout_seed, dropout->seed[1] = (uint32_t)(read->dropout_seed >> 32);
    dropout->offset = read->dropout_offset;
    dropout->heads = read->dropout_heads;
    memcpy(dropout->origin, read->dropout_origin, sizeof dropout->origin);
    return FA_OK;
}

/* Options as they were before the state of dropout are accepted, too. `state`: that. */
static fa_code read_options(const fa_ext_options *given, fa_options *options, const void **state, fa_status *status) {
    const size_t least = offsetof(fa_ext_options, dropout_state);
    fa_ext_options read = {.size = sizeof read};
    memset(options, 0, sizeof *options);
    if (given) FA_TRY(fa_capi_struct("fa_ext_options", given, least, &read, sizeof read, status));
    if (read.given & ~(uint32_t)(FA_EXT_SCALE | FA_EXT_WINDOW_LEFT | FA_EXT_WINDOW_RIGHT | FA_EXT_MAX_SEQLEN_Q))
        return fa_fail(status, FA_EVALUE, "options.given is %#x; accepted: bits of fa_ext_given", (unsigned)read.given);
    if (read.causal < FA_EXT_CAUSAL_NONE || read.causal > FA_EXT_CAUSAL_BOTTOM_RIGHT)
        return fa_fail(status, FA_EVALUE, "options.causal is %d; accepted: a value of fa_ext_causal, %d to %d",
                       (int)read.causal, FA_EXT_CAUSAL_NONE, FA_EXT_CAUSAL_BOTTOM_RIGHT);
    FA_TRY(read_layout("options.layout", read.layout, &options->layout, status));
    options->has_scale = read.given & FA_EXT_SCALE;
    options->scale = options->has_scale ? read.scale : 0;
    options->softcap = read.softcap;
    options->window_left = read.given & FA_EXT_WINDOW_LEFT ? read.window_left : FA_UNBOUNDED;
    options->window_right = read.given & FA_EXT_WINDOW_RIGHT ? read.window_right : FA_UNBOUNDED;
    options->max_seqlen_q = FA_UNBOUNDED;
    if (read.given & FA_EXT_MAX_SEQLEN_Q)
        options->max_seqlen_q = read.max_seqlen_q < FA_UNBOUNDED ? read.max_seqlen_q : FA_UNBOUNDED - 1;
    options->causal = (fa_causal)read.causal;
    options->has_layout = true;
    options->batch_invariant = read.batch_invariant != 0;
    *state = read.dropout > 0 ? read.dropout_state : NULL;
    return read_dropout(&read, &options->dropout, status);
}

/* The state of dropout as an array of q's device; none where addresses are made up. */
static fa_code read_state(const void *state, const fa_capi_call *c, fa_request *request, fa_view *view,
                          fa_status *status) {
    if (!state || c->alignment) return FA_OK;
    *view = (fa_view){.data = (void *)(uintptr_t)state, .ndim = 1, .dtype = FA_U32, .device = request->q->device};
    view->shape[0] = 8, view->strides[0] = 1;
    request->dropout_state = view;
    return fa_view_check("options.dropout_state", view, status);
}

/* ---- the operations: arguments -> problem and plan ---- */

/* A struct that ended in `last` at first: fields behind it came later. */
#define GROWN_STRUCT(type, last, given, read, status)                                                                  \
    fa_capi_struct(#type, given, offsetof(type, last) + sizeof((read)->last), read, sizeof *(read), status)

static fa_code prepare_forward(const void *arguments, fa_capi_call *c, fa_status *status) {
    fa_ext_forward given;
    fa_request request = {0};
    fa_view views[FA_OPERAND_COUNT], words;
    const void *state;
    FA_TRY(GROWN_STRUCT(fa_ext_forward, reserved, arguments, &given, status));
    FA_TRY(read_options(given.options, &request.options, &state, status));
    FA_TRY(read_check(given.check, given.reserved, c, status));
    FA_TRY(read_arrays(&given, c, &request, views, status));
    FA_TRY(read_state(state, c, &request, &words, status));
    return fa_dispatch(c->context, &request, c->forced, &c->problem, &c->info, &c->plan, status);
}

static fa_code read_gradients(const fa_ext_backward *given, const fa_capi_call *c, fa_backward_request *request,
                              fa_view *views, fa_status *status) {
    for (int n = 0; n < FA_GRAD_COUNT; n++) {
        const fa_ext_array *array = *fa_capi_array((void *)(uintptr_t)given, fa_capi_gradients[n]);
        char name[32];
        if (!array) continue;
        snprintf(name, sizeof name, "d%s", fa_grad_name((fa_grad)n));
        FA_TRY(read_array(name, array, GRADIENTS + n, c, &views[n], status));
        request->grad[n] = &views[n];
        request->wants |= 1u << n;
    }
    if (request->wants) return FA_OK;
    return fa_fail(status, FA_EVALUE, "dq, dk, dv, dbias and dsinks are NULL; accepted: at least one array");
}

static fa_code prepare_backward(const void *arguments, fa_capi_call *c, fa_status *status) {
    fa_ext_backward given;
    fa_backward_request request = {0};
    fa_request *forward = &request.forward;
    fa_view views[FA_OPERAND_COUNT], gradients[FA_GRAD_COUNT], words;
    const void *state;
    FA_TRY(GROWN_STRUCT(fa_ext_backward, unordered, arguments, &given, status));
    FA_TRY(read_options(given.options, &forward->options, &state, status));
    if (forward->options.max_seqlen_q != FA_UNBOUNDED)
        return fa_fail(status, FA_EVALUE,
                       "options.max_seqlen_q is given to a backward call; accepted: in forward calls alone");
    FA_TRY(read_check(given.check, given.reserved, c, status));
    FA_TRY(read_arrays(&given, c, forward, views, status));
    FA_TRY(read_gradients(&given, c, &request, gradients, status));
    FA_TRY(read_state(state, c, forward, &words, status));
    request.accumulate = given.accumulate != 0;
    request.deterministic = given.unordered == 0;
    return fa_dispatch_backward(c->context, &request, c->forced, &c->problem, &c->info, &c->plan, status);
}

typedef struct merge_views {
    fa_part *parts;
    fa_view *views; /* outs, then lses */
    const fa_view **pointers;
} merge_views;

static fa_code allocate_merge(size_t count, fa_capi_call *c, merge_views *m, fa_status *status) {
    const size_t arrays = 2 * count;
    free(c->kept);
    c->kept = malloc(count * sizeof(fa_part) + arrays * (sizeof(fa_view) + sizeof(fa_view *)));
    if (!c->kept) return fa_fail(status, FA_EMEMORY, "no memory for the description of %zu parts", count);
    m->parts = c->kept;
    m->views = (fa_view *)(m->parts + count);
    m->pointers = (const fa_view **)(m->views + arrays);
    return FA_OK;
}

static fa_code read_parts(const fa_ext_merge *given, const fa_capi_call *c, merge_views *m, fa_status *status) {
    for (size_t n = 0; n < 2 * given->count; n++) {
        const bool is_out = n < given->count;
        const size_t index = is_out ? n : n - given->count;
        char name[40];
        snprintf(name, sizeof name, "%s[%zu]", is_out ? "outs" : "lses", index);
        m->pointers[n] = &m->views[n];
        FA_TRY(
            read_array(name, &(is_out ? given->outs : given->lses)[index], (int)(n % PARTS), c, &m->views[n], status));
    }
    return FA_OK;
}

static fa_code prepare_merge(const void *arguments, fa_capi_call *c, fa_status *status) {
    fa_ext_merge given;
    fa_merge_request request = {0};
    fa_view views[FA_OPERAND_COUNT];
    merge_views m = {NULL, NULL, NULL};
    FA_TRY(GROWN_STRUCT(fa_ext_merge, reserved, arguments, &given, status));
    if (given.count < 1 || given.count > INT32_MAX / 8)
        return fa_fail(status, FA_EVALUE, "count is %zu; accepted: 1 to %d", given.count, (int)(INT32_MAX / 8));
    if (!given.outs || !given.lses)
        return fa_fail(status, FA_EVALUE, "%s is NULL; accepted: `count` arrays", given.outs ? "lses" : "outs");
    FA_TRY(read_layout("layout", given.layout, &request.forward.options.layout, status));
    FA_TRY(check_reserved(given.reserved, status));
    FA_TRY(allocate_merge(given.count, c, &m, status));
    FA_TRY(read_parts(&given, c, &m, status));
    request.count = (int)given.count;
    request.outs = m.pointers;
    request.lses = m.pointers + given.count;
    FA_TRY(read_arrays(&given, c, &request.forward, views, status));
    FA_TRY(fa_merge_build(&request, m.parts, &c->problem, status));
    FA_TRY(fa_device_info_get(c->context, c->problem.device, &c->info, status));
    return fa_plan_make(&c->problem, c->info, c->forced, &c->plan, status);
}

static fa_code prepare_append(const void *arguments, fa_capi_call *c, fa_status *status) {
    fa_ext_append given;
    fa_append_request request = {0};
    fa_request *forward = &request.forward;
    fa_view views[FA_OPERAND_COUNT];
    FA_TRY(GROWN_STRUCT(fa_ext_append, reserved, arguments, &given, status));
    FA_TRY(read_layout("layout", given.layout, &forward->options.layout, status));
    forward->options.has_layout = true;
    request.interleaved = given.interleaved != 0;
    FA_TRY(read_check(given.check, given.reserved, c, status));
    FA_TRY(read_arrays(&given, c, forward, views, status));
    if (forward->q && !forward->out) return fa_fail(status, FA_EVALUE, "out is NULL; accepted: an array");
    if (!forward->rotary_cos != !forward->rotary_sin)
        return fa_fail(status, FA_EVALUE, "%s is NULL, but %s is not; accepted: both, or neither",
                       forward->rotary_cos ? "rotary_sin" : "rotary_cos",
                       forward->rotary_cos ? "rotary_cos" : "rotary_sin");
    return fa_dispatch_append(c->context, &request, c->forced, &c->problem, &c->info, &c->plan, status);
}

static fa_code prepare_documents(const void *arguments, fa_capi_call *c, fa_status *status) {
    fa_ext_documents given;
    fa_documents_request request = {0};
    fa_view ids, out;
    FA_TRY(GROWN_STRUCT(fa_ext_documents, reserved, arguments, &given, status));
    FA_TRY(read_check(given.check, given.reserved, c, status));
    if (!given.ids || !given.out)
        return fa_fail(status, FA_EVALUE, "%s is NULL; accepted: an array", given.ids ? "out" : "ids");
    FA_TRY(read_array("ids", given.ids, 0, c, &ids, status));
    FA_TRY(read_array("out", given.out, 1, c, &out, status));
    request.ids = &ids;
    request.forward.out = &out;
    FA_TRY(fa_documents_build(&request, &c->problem, status));
    FA_TRY(fa_device_info_get(c->context, c->problem.device, &c->info, status));
    return fa_plan_make(&c->problem, c->info, c->forced, &c->plan, status);
}

fa_code fa_capi_prepare(const void *arguments, fa_capi_call *c, fa_status *status) {
    switch (c->op) {
    case FA_FORWARD: return prepare_forward(arguments, c, status);
    case FA_BACKWARD: return prepare_backward(arguments, c, status);
    case FA_APPEND: return prepare_append(arguments, c, status);
    case FA_DOCUMENTS: return prepare_documents(arguments, c, status);
    default: return prepare_merge(arguments, c, status);
    }
}

fa_code fa_capi_read_keep(const void *arguments, fa_view *out, fa_dropout *dropout, fa_status *status) {
    static const fa_capi_call none;
    fa_ext_dropout_keep given;
    fa_options options;
    const void *state;
    uint32_t words[8];
    FA_TRY(FA_CAPI_STRUCT(fa_ext_dropout_keep, arguments, &given, status));
    FA_TRY(read_options(given.options, &options, &state, status));
    if (!given.out) return fa_fail(status, FA_EVALUE, "out is NULL; accepted: an array");
    FA_TRY(read_array("out", given.out, 0, &none, out, status));
    if (out->device.kind != FA_CPU)
        return fa_fail(status, FA_EUNSUPPORTED,
                       "out is on CUDA device %d; accepted: the CPU, where the mask is made in this release",
                       out->device.id);
    if (out->ndim != 4)
        return fa_fail(status, FA_EVALUE, "out has shape %s; accepted: (batch, heads, seq_q, seq_k)",
                       fa_show_shape(out->shape, out->ndim).text);
    FA_TRY(fa_check_output("out", out, out->shape, 4, 1u << FA_BOOL, "out", out, status));
    if (state) fa_dropout_set(&options.dropout, memcpy(words, state, sizeof words));
    return fa_dropout_resolve(&options.dropout, out->shape[1], out->shape[2], out->shape[3], dropout, status);
}
