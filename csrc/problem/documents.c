/* Request of documents() -> problem. See documents.h. */
#include "problem/documents.h"

#include <stdint.h>

#include "problem/check.h"

_Static_assert(sizeof(fa_documents) <= sizeof(fa_backward), "fa_problem keeps its layout");

static fa_code check_ids(const fa_view *ids, fa_documents *p, fa_status *status) {
    if (ids->dtype != FA_I32 && ids->dtype != FA_I64)
        return fa_fail(status, FA_ETYPE, "ids has dtype %s; accepted: int32, int64", fa_dtype_name(ids->dtype));
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
