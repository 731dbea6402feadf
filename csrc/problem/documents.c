/* Requests of documents() and document_intervals() -> problem. See documents.h. */
#include "problem/documents.h"

#include <stdint.h>

#include "problem/check.h"

_Static_assert(sizeof(fa_documents) <= sizeof(fa_backward), "fa_problem keeps its layout");

static fa_code check_dtype(const char *name, const fa_view *ids, fa_status *status) {
    if (ids->dtype == FA_I32 || ids->dtype == FA_I64) return FA_OK;
    return fa_fail(status, FA_ETYPE, "%s has dtype %s; accepted: int32, int64", name, fa_dtype_name(ids->dtype));
}

static fa_code check_ids(const fa_view *ids, fa_documents *p, fa_status *status) {
    FA_TRY(check_dtype("ids", ids, status));
    if (ids->ndim != 1 && ids->ndim != 2)
        return fa_fail(status, FA_EVALUE, "ids has shape %s; accepted: (batch, sequence) or (sequence,)",
                       fa_show_shape(ids->shape, ids->ndim).text);
    FA_TRY(fa_check_extents("ids", ids, status));
    const int last = ids->ndim - 1;
    p->batch = last ? ids->shape[0] : 1;
    p->seq = ids->shape[last];
    if (p->seq && p->batch > INT32_MAX / p->seq)
        return fa_fail(status, FA_EVALUE, "ids has shape %s; accepted: fewer than 2^31 ids, which int32 starts count",
                       fa_show_shape(ids->shape, ids->ndim).text);
    p->dtype = ids->dtype;
    p->ids.data = ids->data;
    p->ids.stride[0] = last && p->batch > 1 ? ids->strides[0] : 0;
    p->ids.stride[1] = p->seq > 1 ? ids->strides[last] : 0;
    return FA_OK;
}

/* `out` without `count` says how many documents there may be. */
static fa_code check_count(const fa_documents_request *request, fa_documents *p, fa_status *status) {
    const fa_view *out = request->forward.out;
    p->count = request->count ? request->count : p->batch * p->seq;
    if (request->count || !out) return FA_OK;
    if (out->ndim != 1 || out->shape[0] < 1 || out->shape[0] > INT32_MAX)
        return fa_fail(status, FA_EVALUE, "out has shape %s; accepted: (count + 1,)",
                       fa_show_shape(out->shape, out->ndim).text);
    p->count = out->shape[0] - 1;
    return FA_OK;
}

fa_code fa_documents_build(const fa_documents_request *request, fa_problem *problem, fa_status *status) {
    const fa_view *ids = request->ids, *out = request->forward.out;
    fa_documents *p = &problem->documents;
    *problem = (fa_problem){.op = FA_DOCUMENTS, .device = ids->device};
    problem->threads = ids->device.kind == FA_CPU ? 1 : 0;
    FA_TRY(check_ids(ids, p, status));
    FA_TRY(check_count(request, p, status));
    p->starts.stride[0] = 1;
    if (!out) return FA_OK;
    const int64_t shape = p->count + 1;
    FA_TRY(fa_check_output("out", out, &shape, 1, 1u << FA_I32, "ids", ids, status));
    FA_TRY(fa_check_disjoint("out", out, "ids", ids, status));
    p->starts = (fa_operand){.data = out->data, .stride = {out->shape[0] > 1 ? out->strides[0] : 0}};
    return FA_OK;
}

/* Rows of ids or spans: (B, S). */
static fa_code read_rows(const char *name, const fa_view *view, const fa_view *first, fa_operand *rows, fa_dtype *dtype,
                         fa_status *status) {
    FA_TRY(check_dtype(name, view, status));
    if (view->ndim != 2)
        return fa_fail(status, FA_EVALUE, "%s has shape %s; accepted: (batch, sequence)", name,
                       fa_show_shape(view->shape, view->ndim).text);
    FA_TRY(fa_check_extents(name, view, status));
    if (view->shape[0] != first->shape[0] || view->shape[1] != first->shape[1])
        return fa_fail(status, FA_EVALUE, "%s has shape %s, but ids has shape %s; accepted: one shape", name,
                       fa_show_shape(view->shape, 2).text, fa_show_shape(first->shape, 2).text);
    FA_TRY(fa_check_device(name, view, "ids", first, status));
    rows->data = view->data;
    *dtype = view->dtype;
    for (int axis = 0; axis < 2; axis++) rows->stride[axis] = view->shape[axis] > 1 ? view->strides[axis] : 0;
    return FA_OK;
}

fa_code fa_document_intervals_build(const fa_intervals_request *request, fa_problem *problem, fa_status *status) {
    const fa_view *ids = request->ids, *spans = request->spans, *out = request->out, *first = ids ? ids : spans;
    const char *const name = ids ? "ids" : "spans";
    fa_documents *p = &problem->documents;
    *problem = (fa_problem){.op = FA_DOCUMENTS, .device = first->device};
    problem->threads = first->device.kind == FA_CPU ? 1 : 0;
    p->dtype = p->spans_dtype = first->dtype;
    if (ids) FA_TRY(read_rows("ids", ids, first, &p->ids, &p->dtype, status));
    if (spans) FA_TRY(read_rows("spans", spans, first, &p->spans, &p->spans_dtype, status));
    if (spans && !request->causal)
        return fa_fail(status, FA_EVALUE,
                       "spans is given with causal=False, without which a document is one span; accepted: causal=True");
    if (first->shape[1] >= INT32_MAX)
        return fa_fail(status, FA_EVALUE, "%s has shape %s; accepted: rows of fewer than 2^31 - 1, which int32 counts",
                       name, fa_show_shape(first->shape, 2).text);
    p->batch = first->shape[0], p->seq = first->shape[1];
    p->window = request->window, p->causal = request->causal, p->intervals = true;
    fa_view made = {.ndim = 4, .shape = {p->batch, 1, p->seq, 2}};
    if (out) {
        FA_TRY(fa_check_output("out", out, made.shape, 4, 1u << FA_I32, name, first, status));
        FA_TRY(fa_check_disjoint("out", out, "ids", ids, status));
        FA_TRY(fa_check_disjoint("out", out, "spans", spans, status));
    } else {
        fa_view_contiguous(&made);
        out = &made;
    }
    p->starts = (fa_operand){.data = out->data, .stride = {out->strides[0], out->strides[2], out->strides[3]}};
    problem->empty = p->batch == 0 || p->seq == 0;
    return FA_OK;
}
