/* Request of merge() -> problem. See merge.h. */
#include "problem/merge.h"

#include <stdio.h>

#include "device/threads.h"
#include "problem/check.h"
#include "problem/operands.h"

#define FIRST "outs[0]"

typedef struct name {
    char text[32];
} name;

/* "outs[3]": made for a message alone, since it takes longer than a check. */
static name name_of(const char *list, int index) {
    name made;
    snprintf(made.text, sizeof made.text, "%s[%d]", list, index);
    return made;
}

static bool same_shape(const fa_view *view, const int64_t *shape, int ndim) {
    bool same = view->ndim == ndim;
    for (int axis = 0; same && axis < ndim; axis++) same = view->shape[axis] == shape[axis];
    return same;
}

/* The first part, whose shape, dtype and device the others share. */
static fa_code check_first(const fa_merge_request *request, fa_merge *p, fa_status *status) {
    const fa_view *first = request->outs[0];
    if (first->ndim != 3 && first->ndim != 4)
        return fa_fail(status, FA_EVALUE,
                       FIRST " has %d dimensions, shape %s; accepted: 4, or 3 for packed results (tokens, heads, "
                             "head_dim)",
                       first->ndim, fa_show_shape(first->shape, first->ndim).text);
    if (!fa_is_float(first->dtype))
        return fa_fail(status, FA_ETYPE,
                       FIRST " has dtype %s; accepted: float16, bfloat16, float32, and float64 on the CPU",
                       fa_dtype_name(first->dtype));
    FA_TRY(fa_check_extents(FIRST, first, status));
    const int64_t head_dim = first->shape[first->ndim - 1];
    if (head_dim < 1 || head_dim > FA_MAX_HEAD_DIM)
        return fa_fail(status, FA_EVALUE, FIRST " has head_dim %lld, shape %s; accepted: 1 to %d", (long long)head_dim,
                       fa_show_shape(first->shape, first->ndim).text, FA_MAX_HEAD_DIM);
    const bool packed = first->ndim == 3;
    p->batch = packed ? 1 : first->shape[0];
    p->heads = first->shape[packed ? 1 : fa_axis_of(request->forward.options.layout, 1)];
    p->seq = first->shape[packed ? 0 : fa_axis_of(request->forward.options.layout, 2)];
    p->head_dim = (int)head_dim;
    p->dtype = p->out_dtype = p->sinks_dtype = first->dtype;
    p->lse_dtype = first->dtype == FA_F64 ? FA_F64 : FA_F32;
    return FA_OK;
}

/* Extents of the lse of a part. */
static int lse_shape(const fa_merge_request *request, const fa_merge *p, int64_t shape[3]) {
    const bool packed = request->outs[0]->ndim == 3;
    shape[0] = packed ? p->heads : p->batch;
    shape[1] = packed ? p->seq : p->heads;
    shape[2] = p->seq;
    return packed ? 2 : 3;
}

static fa_code check_device(const char *list, int n, const fa_view *view, const fa_view *first, fa_status *status) {
    if (view->device.kind == first->device.kind && view->device.id == first->device.id) return FA_OK;
    return fa_check_device(name_of(list, n).text, view, FIRST, first, status);
}

static fa_code check_part(const fa_merge_request *request, const fa_merge *p, int n, fa_status *status) {
    const fa_view *first = request->outs[0], *out = request->outs[n], *lse = request->lses[n];
    int64_t shape[3];
    const int ndim = lse_shape(request, p, shape);
    if (!same_shape(out, first->shape, first->ndim))
        return fa_fail(status, FA_EVALUE, "%s has shape %s, but " FIRST " has %s; the parts must have one shape",
                       name_of("outs", n).text, fa_show_shape(out->shape, out->ndim).text,
                       fa_show_shape(first->shape, first->ndim).text);
    if (out->dtype != first->dtype)
        return fa_fail(status, FA_ETYPE, "%s has dtype %s, but " FIRST " has %s; the parts must share one dtype",
                       name_of("outs", n).text, fa_dtype_name(out->dtype), fa_dtype_name(first->dtype));
    FA_TRY(check_device("outs", n, out, first, status));
    if (!same_shape(lse, shape, ndim))
        return fa_fail(status, FA_EVALUE, "%s has shape %s; accepted: %s = %s", name_of("lses", n).text,
                       fa_show_shape(lse->shape, lse->ndim).text, ndim == 2 ? "(heads, tokens)" : "(batch, heads, seq)",
                       fa_show_shape(shape, ndim).text);
    if (lse->dtype != p->lse_dtype)
        return fa_fail(status, FA_ETYPE, "%s has dtype %s; accepted: %s", name_of("lses", n).text,
                       fa_dtype_name(lse->dtype), fa_dtype_name(p->lse_dtype));
    return check_device("lses", n, lse, first, status);
}

/* Whether a result is the first part itself: each element is read before it is written. */
static bool is_itself(const fa_view *result, const fa_view *part) {
    bool same = result->data == part->data && result->dtype == part->dtype;
    for (int axis = 0; same && axis < part->ndim; axis++)
        same = part->shape[axis] == 1 || result->strides[axis] == part->strides[axis];
    return same;
}

/* `result` may be `own`, the first part's, and meets nothing else. */
static fa_code check_apart(const char *name_given, const fa_view *result, const fa_view *own,
                           const fa_merge_request *request, fa_status *status) {
    for (int n = 0; n < request->count; n++) {
        const struct {
            const char *list;
            const fa_view *view;
        } inputs[2] = {{"outs", request->outs[n]}, {"lses", request->lses[n]}};
        for (int i = 0; i < 2; i++)
            if (fa_views_overlap(result, inputs[i].view) && (inputs[i].view != own || !is_itself(result, own)))
                return fa_check_disjoint(name_given, result, name_of(inputs[i].list, n).text, inputs[i].view, status);
    }
    return fa_check_apart(FA_MERGE, name_given, result, &request->forward, NULL, status);
}

static fa_code check_results(const fa_merge_request *request, fa_merge *p, fa_status *status) {
    const fa_view *first = request->outs[0], *out = request->forward.out, *lse = request->forward.lse;
    const uint32_t dtypes = p->dtype == FA_F64 ? 1u << FA_F64 : 1u << FA_F16 | 1u << FA_BF16 | 1u << FA_F32;
    fa_view made_out = *first, made_lse = *request->lses[0];
    fa_view_contiguous(&made_out);
    fa_view_contiguous(&made_lse);
    made_out.data = made_lse.data = NULL;
    if (out) {
        FA_TRY(fa_check_output("out", out, first->shape, first->ndim, dtypes, FIRST, first, status));
        FA_TRY(check_apart("out", out, first, request, status));
        p->out_dtype = out->dtype;
    }
    if (lse) {
        FA_TRY(fa_check_output("lse", lse, made_lse.shape, made_lse.ndim, 1u << p->lse_dtype, FIRST, first, status));
        FA_TRY(check_apart("lse", lse, request->lses[0], request, status));
        FA_TRY(fa_check_disjoint("lse", lse, "out", out, status));
    }
    fa_view_operand(&p->out, out ? out : &made_out, request->forward.options.layout);
    fa_lse_operand(&p->lse, lse ? lse : &made_lse);
    return FA_OK;
}

fa_code fa_merge_build(const fa_merge_request *request, fa_part *parts, fa_problem *problem, fa_status *status) {
    const fa_view *first = request->outs[0];
    fa_merge *p = &problem->merge;
    *problem = (fa_problem){.op = FA_MERGE, .device = first->device};
    problem->threads = first->device.kind == FA_CPU ? fa_cpu_threads() : 0;
    FA_TRY(check_first(request, p, status));
    for (int n = 0; n < request->count; n++) {
        FA_TRY(check_part(request, p, n, status));
        fa_view_operand(&parts[n].out, request->outs[n], request->forward.options.layout);
        fa_lse_operand(&parts[n].lse, request->lses[n]);
    }
    p->parts = parts;
    p->count = request->count;
    if (request->forward.sinks)
        FA_TRY(fa_check_sinks(request->forward.sinks, p->heads, FIRST, first, &p->sinks, &p->sinks_dtype, status));
    FA_TRY(check_results(request, p, status));
    if (problem->device.kind == FA_CUDA && p->dtype == FA_F64)
        return fa_fail(status, FA_EUNSUPPORTED,
                       "float64 runs on the CPU only; accepted on a CUDA device: float16, bfloat16, float32");
    problem->workspace = NULL;
    problem->faults = NULL;
    problem->stopped = NULL;
    problem->features = p->sinks.data ? FA_WITH_SINKS : 0;
    problem->empty = p->batch == 0 || p->heads == 0 || p->seq == 0;
    return FA_OK;
}
