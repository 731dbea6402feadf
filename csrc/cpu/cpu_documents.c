/* cpu_documents: where documents begin, in one pass over their ids. */
#include "documents.h"
#include "fa.h"

enum { CHECKED = 1 << 20 }; /* ids between looks at whether the call is stopped */

static fa_answer plan(const fa_problem *problem, const fa_device_info *device, fa_plan *plan, fa_why *why) {
    (void)problem, (void)device, (void)why;
    plan->blocks = plan->threads = 1;
    return FA_TAKES;
}

/* Starts beyond `count` are those of documents that have no place. */
static fa_code launch(const fa_problem *problem, const fa_plan *plan, const fa_launch *launch) {
    (void)plan, (void)launch;
    const fa_documents *p = &problem->documents;
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
    .summary = "where documents begin, from their ids: portable C",
    .dtypes = 1 << FA_I32 | 1 << FA_I64,
    .takes = 0,
    .plan = plan,
    .launch = launch,
};
