/* Request -> problem and plan. See plan_cache.h.
 *
 * Calls come in loops that differ in their pointers alone, so each thread keeps what its last call came to. A call that
 * is the same in all that validation, choice and plan look at takes it over and sets its own pointers: a tenth of a
 * microsecond less. It compares options, extents, strides, dtypes, devices, the forced kernel, how pointers are
 * aligned, and whether what is written meets anything. Options are compared as bytes, and a call that has any array
 * besides q, k, v, `out` and `lse` is made anew each time: what a request gains is looked at without a word here. Calls
 * for gradients have a place of their own, where what comes through `out` and the LSE, and given gradients of q, k and
 * v may be, too. Plans that do not ask to be kept, such as those that depend on the threads of the moment, are made
 * anew. */
#include "dispatch/plan_cache.h"

#include <string.h>

#include "device/threads.h"
#include "dispatch/registry.h"
#include "problem/check.h"
#include "problem/forward.h"

/* q, k, v, out, lse, and of calls for gradients dout, dlse, and where the gradients of q, k and v go. */
enum { OUT = 3, LSE = 4, FORWARD_VIEWS = 5, DLSE = 6, GIVEN = 7, GRADIENT_VIEWS = GIVEN + FA_GRAD_V + 1 };

/* Where a request has the arrays that few calls have. */
#define FEW_BEGIN offsetof(fa_request, bias)
#define FEW_BYTES (offsetof(fa_request, options) - FEW_BEGIN)
_Static_assert(FEW_BEGIN == GIVEN * sizeof(fa_view *), "q, k, v, out, lse, dout and dlse come first");

/* A problem up to the end of its forward: other operations have more there. Its `extra` follows. */
#define FORWARD_BYTES (offsetof(fa_problem, forward) + sizeof(fa_forward))

/* Kernels look at the alignment of a pointer up to this many bytes. */
#define ALIGNMENT     256

/* An array of the last call. */
typedef struct seen {
    bool given;
    fa_view view;
    int64_t low, high; /* bytes from its pointer on that it covers; equal when it is empty */
} seen;

/* Of a call for gradients. */
typedef struct gradient_memo {
    unsigned long serial;
    fa_options options;
    const fa_kernel *forced;
    uint32_t wants;
    bool accumulate, deterministic;
    seen arrays[GRADIENT_VIEWS];
    fa_problem problem;
    const fa_device_info *info;
    fa_plan plan;
} gradient_memo;

typedef struct memo {
    unsigned long serial; /* of the context; 0: nothing remembered */
    fa_options options;
    const fa_kernel *forced;
    seen arrays[FORWARD_VIEWS];
    fa_problem problem;
    const fa_device_info *info;
    fa_plan plan;
    gradient_memo gradients;
} memo;

static _Thread_local memo last;

static bool has_more(const fa_request *request) {
    static const char none[FEW_BYTES];
    return memcmp((const char *)request + FEW_BEGIN, none, FEW_BYTES) != 0;
}

/* `axes` is what the remembered one has. */
static inline bool same_view(const fa_view *a, const fa_view *b, int axes) {
    if (a->ndim != axes || b->ndim != axes || a->dtype != b->dtype || a->device.kind != b->device.kind ||
        a->device.id != b->device.id || a->readonly != b->readonly)
        return false;
    uint64_t differ = ((uintptr_t)a->data ^ (uintptr_t)b->data) % ALIGNMENT;
    for (int axis = 0; axis < axes; axis++)
        differ |= (uint64_t)(a->shape[axis] ^ b->shape[axis]) | (uint64_t)(a->strides[axis] ^ b->strides[axis]);
    return differ == 0;
}

static bool meet(const fa_view *a, const seen *like_a, const fa_view *b, const seen *like_b) {
    const uintptr_t at = (uintptr_t)a->data, bt = (uintptr_t)b->data;
    return like_a->low != like_a->high && like_b->low != like_b->high &&
           at + (uintptr_t)like_a->low < bt + (uintptr_t)like_b->high &&
           bt + (uintptr_t)like_b->low < at + (uintptr_t)like_a->high;
}

/* Whether arrays, NULL where absent, are like those of the last call, and those from `written` on meet none before
 * them. */
static inline bool are_seen(const fa_view *const *views, const seen *arrays, int count, int written) {
    for (int n = 0; n < count; n++) {
        if (arrays[n].given != (views[n] != NULL)) return false;
        if (!views[n]) continue;
        if (!same_view(views[n], &arrays[n].view, n == LSE || n == DLSE ? 3 : 4)) return false;
        for (int other = 0; n >= written && other < n; other++)
            if (views[other] && meet(views[n], &arrays[n], views[other], &arrays[other])) return false;
    }
    return true;
}

static void see(const fa_view *const *views, seen *arrays, int count) {
    for (int n = 0; n < count; n++) {
        arrays[n].given = views[n] != NULL;
        if (!views[n]) continue;
        arrays[n].view = *views[n];
        fa_view_range(views[n], &arrays[n].low, &arrays[n].high);
    }
}

static bool is_remembered(unsigned long serial, const fa_request *request, const fa_kernel *forced,
                          const fa_view *const views[FORWARD_VIEWS]) {
    return last.serial == serial && last.forced == forced &&
           memcmp(&last.options, &request->options, sizeof last.options) == 0 && !has_more(request) &&
           are_seen(views, last.arrays, FORWARD_VIEWS, OUT);
}

static void remember(unsigned long serial, const fa_request *request, const fa_kernel *forced,
                     const fa_view *const views[FORWARD_VIEWS], const fa_problem *problem, const fa_device_info *info,
                     const fa_plan *plan) {
    last.serial = 0;
    if (has_more(request) || problem->sequences.given) return;
    see(views, last.arrays, FORWARD_VIEWS);
    last.options = request->options;
    last.forced = forced;
    memcpy(&last.problem, problem, FORWARD_BYTES);
    last.problem.extra = problem->extra;
    last.info = info;
    last.plan = *plan;
    last.serial = serial;
}

fa_code fa_dispatch(fa_context *context, const fa_request *request, const fa_kernel *forced, fa_problem *problem,
                    const fa_device_info **info, fa_plan *plan, fa_status *status) {
    const unsigned long serial = fa_context_serial(context);
    const fa_view *const views[FORWARD_VIEWS] = {request->q, request->k, request->v, request->out, request->lse};
    if (is_remembered(serial, request, forced, views)) {
        memcpy(problem, &last.problem, FORWARD_BYTES);
        problem->extra = last.problem.extra;
        fa_forward *forward = &problem->forward;
        problem->sequences = (fa_sequences){0};
        problem->workspace = NULL;
        problem->faults = NULL;
        problem->stopped = NULL;
        forward->q.data = request->q->data;
        forward->k.data = request->k->data;
        forward->v.data = request->v->data;
        if (request->out) forward->out.data = request->out->data;
        if (request->lse) forward->lse.data = request->lse->data;
        *info = last.info;
        if (last.plan.keep) {
            *plan = last.plan;
            return FA_OK;
        }
        if (problem->device.kind == FA_CPU) problem->threads = fa_cpu_threads();
        return fa_plan_make(problem, *info, forced, plan, status);
    }
    FA_TRY(fa_forward_build(request, problem, status));
    FA_TRY(fa_device_info_get(context, problem->device, info, status));
    FA_TRY(fa_plan_make(problem, *info, forced, plan, status));
    remember(serial, request, forced, views, problem, *info, plan);
    return FA_OK;
}

/* ---- gradients ---- */

static bool are_remembered(unsigned long serial, const fa_backward_request *request, const fa_kernel *forced,
                           const fa_view *const views[GRADIENT_VIEWS]) {
    const gradient_memo *m = &last.gradients;
    return m->serial == serial && m->forced == forced && m->wants == request->wants &&
           m->accumulate == request->accumulate && m->deterministic == request->deterministic &&
           memcmp(&m->options, &request->forward.options, sizeof m->options) == 0 && !has_more(&request->forward) &&
           are_seen(views, m->arrays, GRADIENT_VIEWS, GIVEN);
}

static void remember_gradients(unsigned long serial, const fa_backward_request *request, const fa_kernel *forced,
                               const fa_view *const views[GRADIENT_VIEWS], const fa_problem *problem,
                               const fa_device_info *info, const fa_plan *plan) {
    gradient_memo *m = &last.gradients;
    if (has_more(&request->forward)) return;
    see(views, m->arrays, GRADIENT_VIEWS);
    m->serial = serial;
    m->options = request->forward.options;
    m->forced = forced;
    m->wants = request->wants;
    m->accumulate = request->accumulate;
    m->deterministic = request->deterministic;
    m->problem = *problem;
    m->info = info;
    m->plan = *plan;
}

fa_code fa_dispatch_backward(fa_context *context, const fa_backward_request *request, const fa_kernel *forced,
                             fa_problem *problem, const fa_device_info **info, fa_plan *plan, fa_status *status) {
    const unsigned long serial = fa_context_serial(context);
    const fa_request *given = &request->forward;
    const fa_view *const views[GRADIENT_VIEWS] = {given->q,
                                                  given->k,
                                                  given->v,
                                                  given->out,
                                                  given->lse,
                                                  given->dout,
                                                  given->dlse,
                                                  request->grad[FA_GRAD_Q],
                                                  request->grad[FA_GRAD_K],
                                                  request->grad[FA_GRAD_V]};
    if (are_remembered(serial, request, forced, views)) {
        *problem = last.gradients.problem;
        *plan = last.gradients.plan;
        *info = last.gradients.info;
        fa_backward *b = &problem->backward;
        fa_operand *const operands[GRADIENT_VIEWS] = {
            &b->forward.q, &b->forward.k, &b->forward.v,       &b->forward.out,     &b->lse,
            &b->dout,      &b->dlse,      &b->grad[FA_GRAD_Q], &b->grad[FA_GRAD_K], &b->grad[FA_GRAD_V]};
        for (int n = 0; n < GRADIENT_VIEWS; n++)
            if (views[n]) operands[n]->data = views[n]->data;
        if (plan->keep) return FA_OK;
        if (problem->device.kind == FA_CPU) problem->threads = fa_cpu_threads();
        return fa_plan_make(problem, *info, forced, plan, status);
    }
    FA_TRY(fa_backward_build(request, problem, status));
    FA_TRY(fa_device_info_get(context, problem->device, info, status));
    FA_TRY(fa_plan_make(problem, *info, forced, plan, status));
    remember_gradients(serial, request, forced, views, problem, *info, plan);
    return FA_OK;
}
