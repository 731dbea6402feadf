/* Request of attention_backward() -> problem. See backward.h. */
#include "problem/backward.h"

#include <string.h>

#include "problem/check.h"
#include "problem/forward.h"
#include "problem/operands.h"

#define NO_GRADIENT
#define FA_OPERAND(name, words, role, forward, backward, merge, append, gradient, ...) gradient

const char *fa_grad_name(fa_grad grad) {
    static const char *const names[FA_GRAD_COUNT] = {
#define GRADIENT(number, name) #name,
#include "operands.def"
#undef GRADIENT
    };
    return names[grad];
}

const char *fa_grads_item(fa_grad grad) {
    static const char *const items[FA_GRAD_COUNT] = {
#define GRADIENT(number, name) "grads[\"" #name "\"]",
#include "operands.def"
#undef GRADIENT
    };
    return items[grad];
}

const fa_view *fa_grad_subject(const fa_request *request, fa_grad grad) {
    static const fa_operand_number subjects[FA_GRAD_COUNT] = {
#define GRADIENT(number, name) FA_OPERAND_##name,
#include "operands.def"
#undef GRADIENT
    };
    return fa_request_view(request, subjects[grad]);
}

#undef FA_OPERAND
#undef NO_GRADIENT

/* out, lse, dout, dlse. */
static fa_code check_inputs(const fa_backward_request *request, fa_problem *problem, fa_status *status) {
    fa_backward *p = &problem->backward;
    fa_forward *forward = &p->forward;
    const fa_view *q = request->forward.q, *out = request->forward.out, *lse = request->forward.lse;
    const uint32_t own = 1u << forward->dtype, of_lse = 1u << forward->lse_dtype;
    const uint32_t of_out = forward->dtype == FA_F64 ? own : own | 1u << FA_F32;
    int64_t shape[4], rows[3];
    const int axes = fa_forward_out_shape(problem, request->forward.options.layout, shape);
    const int axes_of_rows = fa_forward_lse_shape(problem, rows);
    FA_TRY(fa_check_array("out", out, shape, axes, of_out, "q", q, status));
    FA_TRY(fa_check_array("lse", lse, rows, axes_of_rows, of_lse, "q", q, status));
    fa_view_operand(&forward->out, out, request->forward.options.layout);
    forward->out_dtype = out->dtype;
    fa_lse_operand(&p->lse, lse);
    if (request->forward.dout) {
        FA_TRY(fa_check_array("dout", request->forward.dout, shape, axes, own, "q", q, status));
        fa_view_operand(&p->dout, request->forward.dout, request->forward.options.layout);
    }
    if (request->forward.dlse) {
        FA_TRY(fa_check_array("dlse", request->forward.dlse, rows, axes_of_rows, of_lse, "q", q, status));
        fa_lse_operand(&p->dlse, request->forward.dlse);
    }
    if (!request->forward.dout && !request->forward.dlse)
        return fa_fail(status, FA_EVALUE, "dout is None and dlse is not given; accepted: dout, dlse or both");
    return FA_OK;
}

static fa_code check_wants(const fa_backward_request *request, fa_status *status) {
    if (request->wants == 0) return fa_fail(status, FA_EVALUE, "wrt is empty; accepted: at least one name");
    for (int n = FA_GRAD_BIAS; n < FA_GRAD_COUNT; n++)
        if ((request->wants >> n & 1) && !fa_grad_subject(&request->forward, (fa_grad)n))
            return fa_fail(status, FA_EVALUE, "wrt names \"%s\", but no %s is given", fa_grad_name((fa_grad)n),
                           fa_grad_name((fa_grad)n));
    for (int n = 0; n < FA_GRAD_COUNT && request->accumulate; n++)
        if ((request->wants >> n & 1) && !request->grad[n])
            return fa_fail(
                status, FA_EVALUE,
                "accumulate=True, but grads has no array for \"%s\"; accepted: an array for each name of wrt",
                fa_grad_name((fa_grad)n));
    return FA_OK;
}

/* A gradient that is given meets no input and no other gradient. */
static fa_code check_apart(const fa_backward_request *request, fa_grad grad, fa_status *status) {
    const char *name = fa_grads_item(grad);
    FA_TRY(fa_check_apart(FA_BACKWARD, name, request->grad[grad], &request->forward, NULL, status));
    for (int n = 0; n < (int)grad; n++)
        FA_TRY(fa_check_disjoint(name, request->grad[grad], fa_grads_item((fa_grad)n), request->grad[n], status));
    return FA_OK;
}

static fa_code check_given(const fa_backward_request *request, fa_grad grad, fa_status *status) {
    const fa_view *given = request->grad[grad], *of = fa_grad_subject(&request->forward, grad);
    const char *name = fa_grads_item(grad);
    const uint32_t dtypes = 1u << of->dtype | 1u << FA_F32;
    if (given->ndim == of->ndim && !fa_view_distinct(given))
        return fa_fail(status, FA_EBUFFER, "%s has strides %s, so that it overlaps itself; accepted: distinct elements",
                       name, fa_show_shape(given->strides, given->ndim).text);
    FA_TRY(fa_check_output(name, given, of->shape, of->ndim, dtypes, "q", request->forward.q, status));
    return check_apart(request, grad, status);
}

/* The strides of `view`, of the shape of what the gradient is of, in the order of the operand's axes. */
static void grad_operand(fa_operand *operand, const fa_view *view, fa_grad grad, fa_layout layout) {
    if (grad < FA_GRAD_BIAS) {
        fa_view_operand(operand, view, layout);
        return;
    }
    *operand = (fa_operand){.data = view->data};
    for (int axis = 0; axis < view->ndim; axis++) {
        const int to = grad == FA_GRAD_BIAS ? axis + 4 - view->ndim : axis;
        operand->stride[to] = view->shape[axis] == 1 ? 0 : view->strides[axis];
    }
}

static fa_code check_gradients(const fa_backward_request *request, fa_backward *p, fa_status *status) {
    for (int n = 0; n < FA_GRAD_COUNT; n++) {
        const fa_grad grad = (fa_grad)n;
        if (!(request->wants >> n & 1)) continue;
        fa_view made = *fa_grad_subject(&request->forward, grad);
        made.data = NULL;
        fa_view_contiguous(&made);
        if (request->grad[n]) FA_TRY(check_given(request, grad, status));
        p->grad_dtype[n] = request->grad[n] ? request->grad[n]->dtype : made.dtype;
        grad_operand(&p->grad[n], request->grad[n] ? request->grad[n] : &made, grad, request->forward.options.layout);
    }
    if (request->forward.bias)
        for (int axis = 0; axis < 4; axis++) {
            const int source = axis - (4 - request->forward.bias->ndim);
            if (source < 0 || request->forward.bias->shape[source] == 1) p->bias_sums |= 1u << axis;
        }
    return FA_OK;
}

/* No gradient has an element. */
static bool nothing_to_write(const fa_backward_request *request) {
    for (int n = 0; n < FA_GRAD_COUNT; n++)
        if ((request->wants >> n & 1) && !fa_view_empty(fa_grad_subject(&request->forward, (fa_grad)n))) return false;
    return true;
}

fa_code fa_backward_build(const fa_backward_request *request, fa_problem *problem, fa_status *status) {
    fa_backward *p = &problem->backward;
    *problem = (fa_problem){.op = FA_BACKWARD};
    if (request->forward.page_table)
        return fa_fail(status, FA_EVALUE,
                       "page_table has no backward: gradients would go into pages that sequences share; gather the "
                       "keys, and pass them packed or padded");
    FA_TRY(fa_forward_inputs(&request->forward, problem, status));
    FA_TRY(check_inputs(request, problem, status));
    FA_TRY(check_wants(request, status));
    FA_TRY(check_gradients(request, p, status));
    if (problem->device.kind == FA_CUDA && p->forward.dtype == FA_F64)
        return fa_fail(status, FA_EUNSUPPORTED,
                       "float64 runs on the CPU only; accepted on a CUDA device: float16, bfloat16, float32");
    p->wants = request->wants;
    p->accumulate = request->accumulate;
    p->ordered = request->deterministic;
    problem->features |= (request->forward.dlse ? FA_WITH_DLSE : 0) |
                         (p->wants >> FA_GRAD_BIAS & 1 ? FA_WITH_DBIAS : 0) |
                         (p->wants >> FA_GRAD_SINKS & 1 ? FA_WITH_DSINKS : 0) |
                         (p->accumulate ? FA_WITH_ACCUMULATE : 0) | (p->ordered ? FA_WITH_ORDERED : 0);
    problem->empty = nothing_to_write(request);
    return FA_OK;
}
