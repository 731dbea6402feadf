/* Call frame of XLA -> a call of the C interface. See ffi.h. */
#include "xla/ffi.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "c_api/arguments.h"
#include "c_api/c_api.h"
#include "problem/operands.h"

typedef struct frame_call {
    const xla_frame *frame;
    int64_t next_argument, next_result, next_attribute;
    int32_t device;
    fa_ext_options options;
    int32_t given, wants, unordered;
    char kernel[80];
    fa_ext_run run;
    fa_status *status;
} frame_call;

/* ---- what the frame holds ---- */

/* The names of a frame are sorted, and are asked for in that order: the next is where the last one was found, or just
 * behind. */
static const void *attribute(frame_call *c, const char *name, size_t length, int type) {
    const xla_attributes *all = &c->frame->attributes;
    for (int64_t n = 0; n < all->count; n++) {
        const int64_t at = c->next_attribute < all->count ? c->next_attribute++ : (c->next_attribute = 1, 0);
        if (all->types[at] == type && all->names[at]->length == length &&
            memcmp(all->names[at]->text, name, length) == 0)
            return all->items[at];
    }
    return NULL;
}

static fa_code read_kernel(frame_call *c) {
    const xla_span *kernel = attribute(c, "kernel", strlen("kernel"), XLA_STRING);
    if (!kernel || kernel->length >= sizeof c->kernel)
        return fa_fail(c->status, FA_EVALUE, "attribute kernel is missing or too long");
    memcpy(c->kernel, kernel->text, kernel->length);
    c->kernel[kernel->length] = 0;
    c->run.kernel = kernel->length ? c->kernel : NULL;
    return FA_OK;
}

static fa_code read_attributes(frame_call *c, bool backward) {
    fa_ext_options *o = &c->options;
#define NAMED(name) name, sizeof name - 1
    const struct {
        const char *name;
        size_t length;
        int dtype;
        bool of_backward;
        void *value;
    } scalars[] = {
        {NAMED("batch_invariant"), XLA_S32, false, &o->batch_invariant},
        {NAMED("causal"), XLA_S32, false, &o->causal},
        {NAMED("dropout"), XLA_F64, false, &o->dropout},
        {NAMED("given"), XLA_S32, false, &c->given},
        {NAMED("layout"), XLA_S32, false, &o->layout},
        {NAMED("max_seqlen_q"), XLA_S64, false, &o->max_seqlen_q},
        {NAMED("options_given"), XLA_S32, false, &o->given},
        {NAMED("scale"), XLA_F64, false, &o->scale},
        {NAMED("softcap"), XLA_F64, false, &o->softcap},
        {NAMED("unordered"), XLA_S32, true, &c->unordered},
        {NAMED("wants"), XLA_S32, true, &c->wants},
        {NAMED("window_left"), XLA_S64, false, &o->window_left},
        {NAMED("window_right"), XLA_S64, false, &o->window_right},
    };
#undef NAMED
    o->size = sizeof *o;
    for (size_t n = 0; n < sizeof scalars / sizeof *scalars; n++) {
        if (scalars[n].of_backward && !backward) continue;
        const xla_scalar *scalar = attribute(c, scalars[n].name, scalars[n].length, XLA_SCALAR);
        if (!scalar || scalar->dtype != scalars[n].dtype)
            return fa_fail(c->status, FA_EVALUE, "attribute %s is missing, or not of XLA's type %d", scalars[n].name,
                           scalars[n].dtype);
        memcpy(scalars[n].value, scalar->value, scalars[n].dtype == XLA_S32 ? 4 : 8);
    }
    return read_kernel(c);
}

static fa_code take(frame_call *c, const xla_buffers *from, int64_t *next, const xla_buffer **buffer) {
    if (*next >= from->count || from->types[*next] != XLA_BUFFER)
        return fa_fail(c->status, FA_EVALUE, "%s %lld is missing, or no array",
                       from == &c->frame->results ? "result" : "operand", (long long)*next);
    *buffer = from->items[(*next)++];
    return FA_OK;
}

/* The next operand or result as an array; `present` false: none, NULL. */
static fa_code take_array(frame_call *c, bool present, bool is_result, fa_ext_array *space,
                          const fa_ext_array **array) {
    static const struct {
        int theirs, ours;
    } dtypes[] = {{XLA_F16, FA_EXT_FLOAT16}, {XLA_BF16, FA_EXT_BFLOAT16}, {XLA_F32, FA_EXT_FLOAT32},
                  {XLA_F64, FA_EXT_FLOAT64}, {XLA_PRED, FA_EXT_BOOL},     {XLA_S32, FA_EXT_INT32}};
    const xla_buffer *buffer = NULL;
    *array = NULL;
    if (!present) return FA_OK;
    FA_TRY(take(c, is_result ? &c->frame->results : &c->frame->arguments,
                is_result ? &c->next_result : &c->next_argument, &buffer));
    *space =
        (fa_ext_array){.data = buffer->data, .device = c->device, .ndim = (int32_t)buffer->rank, .shape = buffer->dims};
    for (size_t n = 0; n < sizeof dtypes / sizeof *dtypes; n++)
        if (dtypes[n].theirs == buffer->dtype) space->dtype = dtypes[n].ours;
    *array = space;
    return FA_OK;
}

/* The eight words of dropout's state. */
static fa_code take_dropout(frame_call *c) {
    const xla_buffer *buffer = NULL;
    if (!(c->given >> FA_OPERAND_dropout_state & 1)) return FA_OK;
    FA_TRY(take(c, &c->frame->arguments, &c->next_argument, &buffer));
    if ((buffer->dtype != XLA_U32 && buffer->dtype != XLA_S32) || buffer->rank != 1 || buffer->dims[0] != 8)
        return fa_fail(c->status, FA_EVALUE, "dropout's state has another shape or dtype; accepted: (8,) of uint32");
    c->options.dropout_state = buffer->data;
    return FA_OK;
}

static bool is_empty(const xla_buffer *buffer) {
    for (int64_t axis = 0; axis < buffer->rank; axis++)
        if (buffer->dims[axis] == 0) return true;
    return false;
}

/* The device of the stream. Where it does not say, or is the default stream, which belongs to whichever device is
 * current: that of the results, whose last is the workspace. *idle: they have no elements, nothing is to be done. */
static fa_code find_device(frame_call *c, bool *idle) {
    const xla_buffers *results = &c->frame->results;
    const void *memory = NULL;
    for (int64_t n = 0; n + 1 < results->count && !memory; n++) {
        const xla_buffer *buffer = results->items[n];
        if (results->types[n] == XLA_BUFFER && !is_empty(buffer)) memory = buffer->data;
    }
    *idle = !memory;
    if (*idle || (c->run.stream && fa_capi_stream_device(c->run.stream, &c->device))) return FA_OK;
    return fa_capi_device(memory, &c->device, c->status);
}

/* The last result. Of the CPU's the library takes its own: the number of threads may have changed since it was asked.
 */
static fa_code take_workspace(frame_call *c) {
    const xla_buffer *buffer = NULL;
    static char none;
    FA_TRY(take(c, &c->frame->results, &c->next_result, &buffer));
    if (c->device == FA_EXT_CPU) return FA_OK;
    c->run.workspace_bytes = (size_t)(buffer->rank == 1 ? buffer->dims[0] : 0);
    c->run.workspace = c->run.workspace_bytes ? buffer->data : &none;
    return FA_OK;
}

/* ---- the operations ---- */

/* All that the operation reads, and max_logit, which it goes on from, into the struct of its arguments; `space`:
 * FA_OPERAND_COUNT arrays. */
static fa_code take_operands(frame_call *c, fa_op op, void *arguments, fa_ext_array *space) {
    for (int n = 0; n < fa_capi_operands[op].count; n++) {
        const fa_capi_field *field = &fa_capi_operands[op].field[n];
        const fa_operand_line *line = &fa_operands[field->operand];
        const bool present = line->use[op] == FA_USE_IN || (c->given >> field->operand & 1);
        if (fa_operand_is_read(field->operand, op) || field->operand == FA_OPERAND_max_logit)
            FA_TRY(take_array(c, present, false, &space[field->operand], fa_capi_array(arguments, field->offset)));
    }
    return take_dropout(c);
}

static fa_code run_forward(frame_call *c) {
    fa_ext_array space[FA_OPERAND_COUNT];
    fa_ext_forward call = {.size = sizeof call, .options = &c->options};
    FA_TRY(take_operands(c, FA_FORWARD, &call, space));
    FA_TRY(take_array(c, true, true, &space[FA_OPERAND_out], &call.out));
    const bool logits = call.max_logit != NULL; /* then the last result but the workspace is in the operand's place */
    FA_TRY(take_array(c, c->frame->results.count == 3 + logits, true, &space[FA_OPERAND_lse], &call.lse));
    FA_TRY(take_array(c, logits, true, &space[FA_OPERAND_max_logit], &call.max_logit));
    FA_TRY(take_workspace(c));
    return (fa_code)fa_capi_run(FA_FORWARD, &call, &c->run, true);
}

static fa_code run_backward(frame_call *c) {
    fa_ext_array space[FA_OPERAND_COUNT], gradients[FA_GRAD_COUNT];
    fa_ext_backward call = {.size = sizeof call, .options = &c->options, .unordered = c->unordered};
    FA_TRY(take_operands(c, FA_BACKWARD, &call, space));
    for (int n = 0; n < FA_GRAD_COUNT; n++)
        FA_TRY(take_array(c, c->wants >> n & 1, true, &gradients[n], fa_capi_array(&call, fa_capi_gradients[n])));
    FA_TRY(take_workspace(c));
    return (fa_code)fa_capi_run(FA_BACKWARD, &call, &c->run, true);
}

/* ---- handlers ---- */

static xla_error *fail(const xla_frame *frame, const fa_status *status) {
    static const int codes[] = {[FA_EVALUE] = XLA_INVALID_ARGUMENT,    [FA_ETYPE] = XLA_INVALID_ARGUMENT,
                                [FA_EBUFFER] = XLA_INVALID_ARGUMENT,   [FA_EMEMORY] = XLA_RESOURCE_EXHAUSTED,
                                [FA_EUNSUPPORTED] = XLA_UNIMPLEMENTED, [FA_ECUDA] = XLA_INTERNAL};
    char message[sizeof status->message + 16];
    snprintf(message, sizeof message, "fa_ext: %s", status->message);
    xla_error_create made = {sizeof made, NULL, message, codes[status->code]};
    /* cppcheck-suppress returnDanglingLifetime ; XLA copies what it needs */
    return frame->api->error_create(&made);
}

/* The first call of a handler: which API it was written for. Of those in which all that it uses has the same place, the
 * one that is running, since XLA refuses what is older than its minimum and what is newer than itself; minor 1, which
 * jaxlib 0.5.0 has, does not say. */
static bool is_asked_for_metadata(xla_frame *frame) {
    if (!frame->extension || frame->extension->type != XLA_EXTENSION_METADATA) return false;
    xla_metadata *metadata = ((xla_metadata_extension *)frame->extension)->metadata;
    const int running = frame->api ? frame->api->version.minor : 1;
    metadata->version =
        (xla_version){sizeof metadata->version, NULL, XLA_MAJOR, running < XLA_MINOR ? running : XLA_MINOR};
    metadata->traits = XLA_TRAIT_COMMAND_BUFFER;
    return true;
}

static xla_error *handle(xla_frame *frame, bool on_cuda, bool backward) {
    if (is_asked_for_metadata(frame) || frame->stage != XLA_EXECUTE) return NULL;
    fa_status status;
    frame_call c = {.frame = frame, .status = &status, .run = {.size = sizeof c.run}};
    c.run.message = status.message, c.run.message_bytes = sizeof status.message;
    bool idle = false;
    if (on_cuda) {
        xla_stream_get asked = {sizeof asked, NULL, frame->context, NULL};
        xla_error *error = frame->api->stream_get(&asked);
        /* cppcheck-suppress returnDanglingLifetime ; an error is an object of XLA's */
        if (error) return error;
        c.run.stream = asked.stream;
    }
    fa_code code = read_attributes(&c, backward);
    if (code == FA_OK && on_cuda) code = find_device(&c, &idle);
    if (code == FA_OK && !idle) code = backward ? run_backward(&c) : run_forward(&c);
    status.code = code;
    return code == FA_OK ? NULL : fail(frame, &status);
}

xla_error *fa_xla_nothing(xla_frame *frame) {
    (void)is_asked_for_metadata(frame);
    return NULL;
}

xla_error *fa_xla_attention_cpu(xla_frame *frame) { return handle(frame, false, false); }
xla_error *fa_xla_attention_cuda(xla_frame *frame) { return handle(frame, true, false); }
xla_error *fa_xla_backward_cpu(xla_frame *frame) { return handle(frame, false, true); }
xla_error *fa_xla_backward_cuda(xla_frame *frame) { return handle(frame, true, true); }
