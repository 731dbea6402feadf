/* cpu_documents: where documents begin, in one pass over their ids; or what their tokens see, in two passes a row. */
#include "documents.h"
#include "fa.h"

enum { CHECKED = 1 << 20 }; /* ids between looks at whether the call is stopped */

static fa_answer plan(const fa_problem *problem, const fa_device_info *device, fa_plan *plan, fa_why *why) {
    (void)problem, (void)device, (void)why;
    plan->blocks = plan->threads = 1;
    return FA_TAKES;
}

/* Ends from the last token of each row on, then begins from its first on. */
static void intervals(const fa_problem *problem) {
    const fa_documents *p = &problem->documents;
    const int64_t *stride = p->starts.stride;
    for (int64_t b = 0; b < p->batch; b++) {
        int32_t *row = (int32_t *)p->starts.data + b * stride[0];
        int64_t end = p->seq, span_end = end, start = 0;
        for (int64_t n = p->seq - 1; n >= 0; n--) {
            if (n % CHECKED == 0 && fa_stopped(problem)) return;
            const bool in_span = fa_in_span(&p->spans, p->spans_dtype, b, n);
            row[n * stride[1] + stride[2]] = (int32_t)fa_seen_end(p->causal, n, end, span_end, in_span);
            if (fa_document_begins(p, b, n)) end = n;
            if (fa_run_begins(&p->spans, p->spans_dtype, b, n)) span_end = n;
        }
        for (int64_t n = 0; n < p->seq; n++) {
            if (fa_document_begins(p, b, n)) start = n;
            row[n * stride[1]] = (int32_t)fa_seen_begin(p->window, n, start);
        }
    }
}

/* Starts beyond `count` are those of documents that have no place. */
static fa_code launch(const fa_problem *problem, const fa_plan *plan, const fa_launch *launch) {
    (void)plan, (void)launch;
    const fa_documents *p = &problem->documents;
    if (p->intervals) {
        intervals(problem);
        return FA_OK;
    }
    int32_t *starts = p->starts.data;
    int64_t found = 0, row = 0;
    for (int64_t b = 0; b < p->batch; b++)
        for (int64_t n = 0; n < p->seq; n++, row++) {
            if (row % CHECKED == 0 && fa_stopped(problem)) return FA_OK;
            if (!fa_document_begins(p, b, n)) continue;
            if (found <= p->count) starts[found * p->starts.stride[0]] = (int32_t)row;
            found++;
        }
    for (; found <= p->count; found++) starts[found * p->starts.stride[0]] = (int32_t)row;
    return FA_OK;
}

extern const fa_kernel fa_kernel_cpu_documents;
FA_EXPORT const fa_kernel fa_kernel_cpu_documents = {
    .abi = FA_KERNEL_ABI,
    .op = FA_DOCUMENTS,
    .device = FA_CPU,
    .name = "cpu_documents",
    .summary = "where documents begin, or what their tokens see, from their ids: portable C",
    .dtypes = 1 << FA_I32 | 1 << FA_I64,
    .takes = 0,
    .plan = plan,
    .launch = launch,
};
