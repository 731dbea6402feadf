/* Request -> problem: validation. See forward.h. */
#include "problem/forward.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device/threads.h"
#include "philox.h"
#include "problem/check.h"
#include "problem/operands.h"
#include "problem/sequences.h"

/* A softcap of LARGEST_SOFTCAP changes no score below 1e22 in float64, nor below 1e26 in float32, and is none. Scores
 * within +-SMALLEST_SOFTCAP have the exponential 1 to the last bit of float64, and what is smaller is raised to it.
 * Beyond both, kernels would multiply 0 by what is infinite in float32. */
#define LARGEST_SOFTCAP  1e30
#define SMALLEST_SOFTCAP 1e-20

static const char *layout_axes(fa_layout layout, bool kv) {
    if (layout == FA_BHSD) return kv ? "(batch, heads_kv, seq_k, head_dim)" : "(batch, heads, seq_q, head_dim)";
    return kv ? "(batch, seq_k, heads_kv, head_dim)" : "(batch, seq_q, heads, head_dim)";
}

static fa_code check_qkv(const char *name, const fa_view *view, const fa_request *request, fa_status *status) {
    const fa_view *q = request->q;
    if (view->ndim != 4 && view->ndim != 3)
        return fa_fail(status, FA_EVALUE,
                       "%s has %d dimensions, shape %s; accepted: 4, %s with layout=\"%s\", or 3, (tokens, heads, "
                       "head_dim), for packed sequences",
                       name, view->ndim, fa_show_shape(view->shape, view->ndim).text,
                       layout_axes(request->options.layout, view != q),
                       request->options.layout == FA_BHSD ? "bhsd" : "bshd");
    if (!fa_is_float(view->dtype))
        return fa_fail(status, FA_ETYPE,
                       "%s has dtype %s; accepted: float16, bfloat16, float32, and float64 on the CPU", name,
                       fa_dtype_name(view->dtype));
    if (view->dtype != q->dtype)
        return fa_fail(status, FA_ETYPE, "%s has dtype %s, but q has %s; q, k and v must share one dtype", name,
                       fa_dtype_name(view->dtype), fa_dtype_name(q->dtype));
    FA_TRY(fa_check_device(name, view, "q", q, status));
    return fa_check_extents(name, view, status);
}

static fa_code check_sizes(const fa_request *request, bool sequences, fa_forward *p, fa_status *status) {
    const fa_view *q = request->q, *k = request->k, *v = request->v;
    const fa_layout layout = request->options.layout;
    const int64_t dim = q->shape[q->ndim - 1], dim_k = k->shape[k->ndim - 1], dim_v = v->shape[v->ndim - 1];
    p->batch = fa_view_extent(q, layout, 0);
    p->heads = fa_view_extent(q, layout, 1);
    p->seq_q = fa_view_extent(q, layout, 2);
    p->heads_kv = fa_view_extent(k, layout, 1);
    p->seq_k = fa_view_extent(k, layout, 2);
    if (!sequences && k->shape[0] != p->batch)
        return fa_fail(status, FA_EVALUE, "k has batch size %lld, shape %s, but q has %lld", (long long)k->shape[0],
                       fa_show_shape(k->shape, 4).text, (long long)p->batch);
    bool same = v->ndim == k->ndim;
    for (int axis = 0; axis < 3 && same; axis++)
        same = fa_view_extent(v, layout, axis) == fa_view_extent(k, layout, axis);
    if (!same)
        return fa_fail(status, FA_EVALUE, "v has shape %s, but k has shape %s; %s must be the same",
                       fa_show_shape(v->shape, v->ndim).text, fa_show_shape(k->shape, k->ndim).text,
                       request->page_table ? "pages, heads_kv and page_size"
                       : k->ndim == 3      ? "tokens and heads_kv"
                                           : "batch, heads_kv and seq_k");
    if (dim < 1 || dim > FA_MAX_HEAD_DIM)
        return fa_fail(status, FA_EVALUE, "q has head_dim %lld, shape %s; accepted: 1 to %d", (long long)dim,
                       fa_show_shape(q->shape, q->ndim).text, FA_MAX_HEAD_DIM);
    if (dim_k != dim)
        return fa_fail(status, FA_EVALUE, "k has head_dim %lld, shape %s, but q has %lld", (long long)dim_k,
                       fa_show_shape(k->shape, k->ndim).text, (long long)dim);
    if (dim_v < 1 || dim_v > FA_MAX_HEAD_DIM)
        return fa_fail(status, FA_EVALUE, "v has head_dim %lld, shape %s; accepted: 1 to %d", (long long)dim_v,
                       fa_show_shape(v->shape, v->ndim).text, FA_MAX_HEAD_DIM);
    if (p->heads_kv ? p->heads % p->heads_kv != 0 || p->heads == 0 : p->heads != 0)
        return fa_fail(status, FA_EVALUE,
                       "q has %lld heads and k has %lld; the heads of q must be a multiple of those of k "
                       "(both 0 only together; is layout=\"%s\" right?)",
                       (long long)p->heads, (long long)p->heads_kv,
                       request->options.layout == FA_BHSD ? "bhsd" : "bshd");
    p->head_dim = (int)dim;
    p->head_dim_v = (int)dim_v;
    return FA_OK;
}

/* A scale whose product with log2(e) is finite in the arithmetic of the call: infinity times 0 would be NaN. */
static double limited(double scale, fa_dtype dtype) {
    const double limit = dtype == FA_F64 ? FA_LIMIT_F64 : FA_LIMIT;
    return fabs(scale) > limit ? copysign(limit, scale) : scale;
}

static fa_code check_options(const fa_request *request, fa_forward *p, fa_status *status) {
    if (request->options.has_scale && !isfinite(request->options.scale))
        return fa_fail(status, FA_EVALUE, "scale is %g; accepted: a finite number, or None for 1/sqrt(head_dim)",
                       request->options.scale);
    if (!isfinite(request->options.softcap) || request->options.softcap < 0)
        return fa_fail(status, FA_EVALUE, "softcap is %g; accepted: a finite number >= 0 (0: none)",
                       request->options.softcap);
    if (request->options.window_left < 0 || request->options.window_right < 0)
        return fa_fail(status, FA_EVALUE,
                       "window is (%lld, %lld); accepted: each side an int >= 0, or None for unbounded (not -1)",
                       (long long)request->options.window_left, (long long)request->options.window_right);
    if (request->options.causal == FA_CAUSAL_TRUE && p->seq_q != p->seq_k)
        return fa_fail(status, FA_EVALUE,
                       "causal=True with seq_q %lld and seq_k %lld is ambiguous; say causal=\"top_left\" (query i sees "
                       "keys j <= i) or causal=\"bottom_right\" (the last query sees every key)",
                       (long long)p->seq_q, (long long)p->seq_k);
    p->scale = request->options.has_scale ? limited(request->options.scale, p->dtype) : 1.0 / sqrt((double)p->head_dim);
    p->softcap = request->options.softcap >= LARGEST_SOFTCAP ? 0 : request->options.softcap;
    if (p->softcap > 0 && p->softcap < SMALLEST_SOFTCAP) p->softcap = SMALLEST_SOFTCAP;
    return FA_OK;
}

/* Folds causal and window into left/right, drops bounds that exclude nothing, and clips the key range. */
static void resolve_visibility(const fa_request *request, bool sequences, fa_forward *p) {
    p->diagonal = request->options.causal == FA_CAUSAL_TOP_LEFT ? 0 : p->seq_k - p->seq_q;
    p->left = request->options.window_left;
    p->right = request->options.causal == FA_CAUSAL_NONE ? request->options.window_right : 0;
    if (sequences) return; /* lengths are not known here */
    if (p->left >= p->seq_q - 1 + p->diagonal) p->left = FA_UNBOUNDED;
    if (p->right >= p->seq_k - 1 - p->diagonal) p->right = FA_UNBOUNDED;
    p->key_begin = 0;
    p->key_end = p->seq_k;
    if (p->left != FA_UNBOUNDED && p->diagonal > p->left) p->key_begin = p->diagonal - p->left;
    if (p->right != FA_UNBOUNDED && p->seq_q + p->diagonal + p->right < p->seq_k)
        p->key_end = p->seq_q + p->diagonal + p->right;
    if (p->seq_q == 0 || p->key_begin >= p->key_end) p->key_begin = p->key_end = 0;
}

/* bias and mask: right-aligned broadcast to (B, H, Sq, Sk). */
static fa_code broadcast(const char *name, const fa_view *view, const fa_forward *p, const fa_view *q,
                         fa_operand *operand, fa_status *status) {
    const int64_t target[4] = {p->batch, p->heads, p->seq_q, p->seq_k};
    FA_TRY(fa_check_device(name, view, "q", q, status));
    FA_TRY(fa_check_extents(name, view, status));
    bool fits = view->ndim <= 4;
    operand->data = view->data;
    for (int axis = 0; fits && axis < 4; axis++) {
        int source = axis - (4 - view->ndim);
        int64_t extent = source < 0 ? 1 : view->shape[source];
        fits = extent == target[axis] || extent == 1;
        operand->stride[axis] = extent == 1 ? 0 : view->strides[source];
    }
    if (!fits)
        return fa_fail(status, FA_EVALUE,
                       "%s has shape %s; accepted: what broadcasts to (batch, heads, seq_q, seq_k) = %s", name,
                       fa_show_shape(view->shape, view->ndim).text, fa_show_shape(target, 4).text);
    return FA_OK;
}

/* Slopes (H) or (B, H). */
static fa_code check_alibi(const fa_request *request, const fa_forward *p, fa_operand *operand, fa_status *status) {
    static char none; /* data of slopes for no head: never read, but not NULL */
    const fa_view *slopes = request->alibi;
    const int64_t shape[2] = {p->batch, p->heads};
    if (slopes->dtype != FA_F32)
        return fa_fail(status, FA_ETYPE, "alibi has dtype %s; accepted: float32", fa_dtype_name(slopes->dtype));
    FA_TRY(fa_check_device("alibi", slopes, "q", request->q, status));
    bool fits = slopes->ndim == 1 || slopes->ndim == 2;
    for (int axis = 0; axis < slopes->ndim && fits; axis++)
        fits = slopes->shape[axis] == shape[axis + 2 - slopes->ndim];
    if (!fits)
        return fa_fail(status, FA_EVALUE, "alibi has shape %s; accepted: (heads,) = (%lld,) or (batch, heads) = %s",
                       fa_show_shape(slopes->shape, slopes->ndim).text, (long long)p->heads,
                       fa_show_shape(shape, 2).text);
    operand->data = slopes->data ? slopes->data : &none;
    for (int axis = 0; axis < slopes->ndim; axis++)
        operand->stride[axis + 2 - slopes->ndim] = slopes->shape[axis] == 1 ? 0 : slopes->strides[axis];
    return FA_OK;
}

/* Intervals (B, H, Sq, 2) or (B, H, Sq, n, 2), the first three axes broadcast. */
static fa_code check_intervals(const fa_request *request, fa_forward *p, fa_status *status) {
    static char none; /* data of intervals of no query: never read, but not NULL */
    const fa_view *view = request->intervals;
    const int64_t target[3] = {p->batch, p->heads, p->seq_q};
    const int64_t count = view->ndim == 5 ? view->shape[3] : 1;
    fa_operand *operand = &p->intervals;
    if (view->dtype != FA_I32)
        return fa_fail(status, FA_ETYPE, "intervals has dtype %s; accepted: int32", fa_dtype_name(view->dtype));
    FA_TRY(fa_check_device("intervals", view, "q", request->q, status));
    FA_TRY(fa_check_extents("intervals", view, status));
    bool fits = (view->ndim == 4 || view->ndim == 5) && view->shape[view->ndim - 1] == 2 && count > 0;
    for (int axis = 0; fits && axis < 3; axis++) {
        fits = view->shape[axis] == target[axis] || view->shape[axis] == 1;
        operand->stride[axis] = view->shape[axis] == 1 ? 0 : view->strides[axis];
    }
    if (!fits)
        return fa_fail(status, FA_EVALUE,
                       "intervals has shape %s; accepted: (batch, heads, seq_q, 2) or (batch, heads, seq_q, n, 2), n 1 "
                       "or 2, where (batch, heads, seq_q) is %s, or 1 in place of any of them",
                       fa_show_shape(view->shape, view->ndim).text, fa_show_shape(target, 3).text);
    if (count > 2)
        return fa_fail(status, FA_EVALUE,
                       "intervals has shape %s, %lld intervals a query; at most two intervals a query; use mask",
                       fa_show_shape(view->shape, view->ndim).text, (long long)count);
    operand->data = view->data ? view->data : &none;
    operand->stride[3] = count > 1 ? view->strides[3] : 0;
    p->intervals_end = view->strides[view->ndim - 1];
    p->intervals_count = (int)count;
    return FA_OK;
}

/* Maxima (H) or (B, H), read and written. */
static fa_code check_max_logit(const fa_request *request, fa_forward *p, fa_status *status) {
    static char none; /* data of maxima of no head: never read, but not NULL */
    const fa_view *view = request->max_logit;
    const int64_t shape[2] = {p->batch, p->heads};
    if (!view) return FA_OK;
    const bool own = view->ndim == 2; /* of each entry */
    bool fits = own || view->ndim == 1;
    for (int axis = 0; fits && axis < view->ndim; axis++) fits = view->shape[axis] == shape[axis + !own];
    if (view->dtype != FA_F32)
        return fa_fail(status, FA_ETYPE, "max_logit has dtype %s; accepted: float32", fa_dtype_name(view->dtype));
    if (!fits)
        return fa_fail(status, FA_EVALUE, "max_logit has shape %s; accepted: (heads,) = (%lld,) or (batch, heads) = %s",
                       fa_show_shape(view->shape, view->ndim).text, (long long)p->heads, fa_show_shape(shape, 2).text);
    FA_TRY(fa_check_output("max_logit", view, shape + !own, view->ndim, 1u << FA_F32, "q", request->q, status));
    FA_TRY(fa_check_apart(FA_FORWARD, "max_logit", view, request, NULL, status));
    FA_TRY(fa_check_disjoint("max_logit", view, "out", request->out, status));
    FA_TRY(fa_check_disjoint("max_logit", view, "lse", request->lse, status));
    p->max_logit.data = view->data ? view->data : &none;
    for (int axis = 0; axis < view->ndim; axis++)
        p->max_logit.stride[axis + !own] = view->shape[axis] == 1 ? 0 : view->strides[axis];
    return FA_OK;
}

/* The coordinates of the whole stay within what the generator counts. */
fa_code fa_dropout_resolve(const fa_dropout *asked, int64_t heads, int64_t seq_q, int64_t seq_k, fa_dropout *dropout,
                           fa_status *status) {
    const int64_t longest = INT64_C(1) << 31, extent[2] = {seq_q, seq_k};
    *dropout = *asked;
    if (!dropout->heads) dropout->heads = (uint32_t)heads;
    if (asked->origin[1] + heads > dropout->heads)
        return fa_fail(status, FA_EVALUE,
                       "dropout's heads is %u; accepted: at least origin's h0 and the call's heads, %lld",
                       (unsigned)dropout->heads, (long long)(asked->origin[1] + heads));
    for (int n = 0; n < 2; n++)
        if (asked->origin[2 + n] + extent[n] > longest)
            return fa_fail(status, FA_EVALUE,
                           "dropout's origin[%d] is %u; accepted: up to 2^31 with the call's own length", 2 + n,
                           (unsigned)asked->origin[2 + n]);
    return FA_OK;
}

/* Eight words of 32 bits. Those on the host are read here, those on a device by the kernel: what they say of heads and
 * lengths is not looked at then, and counters wrap. */
static fa_code check_state(const fa_view *state, const fa_view *q, fa_dropout *dropout, fa_status *status) {
    const int64_t count = state->dtype == FA_I32 || state->dtype == FA_U32 ? 8 : state->dtype == FA_I64 ? 4 : -1;
    if (state->ndim != 1 || state->shape[0] != count)
        return fa_fail(status, FA_EVALUE,
                       "dropout's state has shape %s and dtype %s; accepted: (8,) of uint32 or int32, (4,) of int64",
                       fa_show_shape(state->shape, state->ndim).text, fa_dtype_name(state->dtype));
    if (state->device.kind == FA_CPU) {
        uint32_t read[8] = {0};
        const size_t item = fa_dtype_size(state->dtype);
        for (size_t n = 0; n < sizeof read / item; n++)
            memcpy((char *)read + n * item,
                   (const char *)state->data + (ptrdiff_t)n * state->strides[0] * (ptrdiff_t)item, item);
        fa_dropout_set(dropout, read);
        return FA_OK;
    }
    FA_TRY(fa_check_device("dropout's state", state, "q", q, status));
    if (state->strides[0] != 1)
        return fa_fail(status, FA_EVALUE, "dropout's state has strides %s; accepted on a device: contiguous words",
                       fa_show_shape(state->strides, 1).text);
    dropout->state = state->data;
    return FA_OK;
}

static fa_code check_dropout(const fa_request *request, fa_forward *p, fa_status *status) {
    fa_dropout asked = request->options.dropout;
    if (request->dropout_state) FA_TRY(check_state(request->dropout_state, request->q, &asked, status));
    return fa_dropout_resolve(&asked, p->heads, p->seq_q, p->seq_k, &p->dropout, status);
}

static fa_code check_extras(const fa_request *request, fa_problem *problem, fa_status *status) {
    fa_forward *p = &problem->forward;
    const fa_view *q = request->q;
    static char all_absent; /* data of a zero-sized mask or bias: never read, but not NULL, which means none */
    if (request->bias) {
        FA_TRY(fa_check_extra_dtype("bias", request->bias, "q", q, status));
        FA_TRY(broadcast("bias", request->bias, p, q, &p->bias, status));
        p->bias_dtype = request->bias->dtype;
        if (!p->bias.data) p->bias.data = &all_absent;
    }
    if (request->mask) {
        if (request->mask->dtype != FA_BOOL)
            return fa_fail(status, FA_ETYPE,
                           "mask has dtype %s; accepted: bool (True: attend); use bias for added scores",
                           fa_dtype_name(request->mask->dtype));
        FA_TRY(broadcast("mask", request->mask, p, q, &p->mask, status));
        if (!p->mask.data) p->mask.data = &all_absent;
    }
    if (request->sinks) FA_TRY(fa_check_sinks(request->sinks, p->heads, "q", q, &p->sinks, &p->sinks_dtype, status));
    if (request->alibi) FA_TRY(check_alibi(request, p, &p->alibi, status));
    if (request->intervals) FA_TRY(check_intervals(request, p, status));
    FA_TRY(check_max_logit(request, p, status));
    return check_dropout(request, p, status);
}

static fa_code check_result(const char *name, const fa_view *view, const int64_t *shape, int ndim, uint32_t dtypes,
                            const fa_request *request, fa_status *status) {
    FA_TRY(fa_check_output(name, view, shape, ndim, dtypes, "q", request->q, status));
    return fa_check_apart(FA_FORWARD, name, view, request, NULL, status);
}

static fa_code check_lse(const fa_view *lse, const fa_problem *problem, const fa_request *request, fa_status *status) {
    int64_t shape[3];
    const int ndim = fa_forward_lse_shape(problem, shape);
    FA_TRY(check_result("lse", lse, shape, ndim, 1u << problem->forward.lse_dtype, request, status));
    return fa_check_disjoint("lse", lse, "out", request->out, status);
}

/* Strides of a new C-contiguous output in the user's layout. */
static void contiguous_out(fa_problem *problem, fa_layout layout) {
    fa_view view = {0};
    view.ndim = fa_forward_out_shape(problem, layout, view.shape);
    fa_view_contiguous(&view);
    fa_view_operand(&problem->forward.out, &view, layout);
}

static void contiguous_lse(fa_problem *problem) {
    fa_view view = {0};
    view.ndim = fa_forward_lse_shape(problem, view.shape);
    fa_view_contiguous(&view);
    fa_lse_operand(&problem->forward.lse, &view);
}

/* The features that the call asks for and a kernel may lack. */
static uint32_t features_of(const fa_problem *problem) {
    const fa_forward *p = &problem->forward;
    uint32_t features = fa_sequences_features(&problem->sequences);
#define FEATURE(number, name, words) features |= p->name.data ? FA_WITH_##number : 0;
#define NO_FEATURE
#define FA_OPERAND(name, words, role, forward, backward, merge, append, gradient, feature, ...) feature
#include "operands.def"
#undef FA_OPERAND
#undef NO_FEATURE
#undef FEATURE
    return features | (p->softcap > 0 ? FA_WITH_SOFTCAP : 0) | (p->left != FA_UNBOUNDED ? FA_WITH_WINDOW : 0) |
           (p->head_dim_v != p->head_dim ? FA_WITH_HEAD_DIM_V : 0) | (p->dropout.threshold ? FA_WITH_DROPOUT : 0);
}

fa_code fa_forward_inputs(const fa_request *request, fa_problem *problem, fa_status *status) {
    fa_forward *p = &problem->forward;
    const bool sequences = fa_sequences_given(request);
    problem->sequences = (fa_sequences){.most_q = FA_UNBOUNDED};
    problem->workspace = NULL;
    problem->faults = NULL;
    problem->stopped = NULL;
    problem->device = request->q->device;
    problem->threads = request->q->device.kind == FA_CPU ? fa_cpu_threads() : 0;
    problem->batch_invariant = request->options.batch_invariant;
    /* what is absent; all other fields are set below */
    p->lse = p->bias = p->mask = p->sinks = p->alibi = p->intervals = p->q_segments = p->k_segments = (fa_operand){0};
    p->intervals_end = p->intervals_count = 0;
    p->max_logit = (fa_operand){0};
    p->dropout = (fa_dropout){0};
    p->out.data = NULL;
    p->dtype = p->bias_dtype = p->sinks_dtype = p->out_dtype = request->q->dtype;
    p->lse_dtype = p->dtype == FA_F64 ? FA_F64 : FA_F32;
    p->wants_lse = request->options.return_lse || request->lse;
    FA_TRY(check_qkv("q", request->q, request, status));
    FA_TRY(check_qkv("k", request->k, request, status));
    FA_TRY(check_qkv("v", request->v, request, status));
    if (sequences) FA_TRY(fa_sequences_check(request, status));
    FA_TRY(check_sizes(request, sequences, p, status));
    if (sequences) FA_TRY(fa_sequences_build(request, problem, status));
    FA_TRY(check_options(request, p, status));
    resolve_visibility(request, sequences, p);
    fa_view_operand(&p->q, request->q, request->options.layout);
    fa_view_operand(&p->k, request->k, request->options.layout);
    fa_view_operand(&p->v, request->v, request->options.layout);
    FA_TRY(check_extras(request, problem, status));
    problem->features = features_of(problem);
    return FA_OK;
}

fa_code fa_forward_build(const fa_request *request, fa_problem *problem, fa_status *status) {
    fa_forward *p = &problem->forward;
    problem->op = FA_FORWARD;
    FA_TRY(fa_forward_inputs(request, problem, status));
    int64_t shape[4], elements = 1;
    const int ndim = fa_forward_out_shape(problem, request->options.layout, shape);
    for (int axis = 0; axis < ndim; axis++)
        if (__builtin_mul_overflow(elements, shape[axis] ? shape[axis] : 1, &elements) || elements > FA_MAX_EXTENT)
            return fa_fail(status, FA_EVALUE, "the output would have shape %s, which is too large to address",
                           fa_show_shape(shape, ndim).text);
    if (request->out) {
        const bool half = p->dtype == FA_F16 || p->dtype == FA_BF16;
        FA_TRY(
            check_result("out", request->out, shape, ndim, 1u << p->dtype | (uint32_t)half << FA_F32, request, status));
        p->out_dtype = request->out->dtype;
        if (p->out_dtype != p->dtype) problem->features |= FA_WITH_OUT_FLOAT32;
        fa_view_operand(&p->out, request->out, request->options.layout);
    } else {
        contiguous_out(problem, request->options.layout);
    }
    if (request->lse) {
        FA_TRY(check_lse(request->lse, problem, request, status));
        fa_lse_operand(&p->lse, request->lse);
    } else {
        contiguous_lse(problem);
    }
    if (problem->device.kind == FA_CUDA && p->dtype == FA_F64)
        return fa_fail(status, FA_EUNSUPPORTED,
                       "float64 runs on the CPU only; accepted on a CUDA device: float16, bfloat16, float32");
    problem->empty = (p->batch == 0 && !problem->sequences.packed_q) || p->heads == 0 || p->seq_q == 0;
    return FA_OK;
}

fa_code fa_forward_workspace(const fa_request *request, size_t bytes, fa_problem *problem, fa_status *status) {
    const fa_view *view = request->workspace;
    if (!view) return FA_OK;
    fa_view contiguous = *view;
    int64_t elements = 1;
    fa_view_contiguous(&contiguous);
    if (view->dtype != FA_U8)
        return fa_fail(status, FA_ETYPE, "workspace has dtype %s; accepted: uint8", fa_dtype_name(view->dtype));
    for (int axis = 0; axis < view->ndim; axis++) {
        elements *= view->shape[axis];
        if (view->shape[axis] > 1 && view->strides[axis] != contiguous.strides[axis] && !fa_view_empty(view))
            return fa_fail(status, FA_EVALUE, "workspace is not C-contiguous; accepted: one piece of memory");
    }
    FA_TRY(fa_check_device("workspace", view, "q", request->q, status));
    if (view->readonly) return fa_fail(status, FA_EVALUE, "workspace is read-only; accepted: a writable array");
    if ((uint64_t)elements < bytes)
        return fa_fail(status, FA_EVALUE,
                       "workspace has %lld bytes; accepted: at least %llu, what workspace_size() says",
                       (long long)elements, (unsigned long long)bytes);
    if (bytes && (uintptr_t)view->data % 256)
        return fa_fail(status, FA_EVALUE, "workspace is not aligned in memory; accepted: a multiple of 256 bytes");
    FA_TRY(fa_check_apart(FA_FORWARD, "workspace", view, request, NULL, status));
    FA_TRY(fa_check_disjoint("workspace", view, "out", request->out, status));
    FA_TRY(fa_check_disjoint("workspace", view, "lse", request->lse, status));
    FA_TRY(fa_check_disjoint("workspace", view, "max_logit", request->max_logit, status));
    problem->workspace = bytes ? view->data : NULL;
    return FA_OK;
}

int fa_forward_out_shape(const fa_problem *problem, fa_layout layout, int64_t shape[4]) {
    const fa_forward *p = &problem->forward;
    if (problem->sequences.packed_q) {
        shape[0] = p->seq_q, shape[1] = p->heads, shape[2] = p->head_dim_v;
        return 3;
    }
    shape[0] = p->batch;
    shape[fa_axis_of(layout, 1)] = p->heads;
    shape[fa_axis_of(layout, 2)] = p->seq_q;
    shape[3] = p->head_dim_v;
    return 4;
}

int fa_forward_lse_shape(const fa_problem *problem, int64_t shape[3]) {
    const fa_forward *p = &problem->forward;
    const int packed = problem->sequences.packed_q;
    shape[0] = p->batch;
    shape[1 - packed] = p->heads;
    shape[2 - packed] = p->seq_q;
    return 3 - packed;
}

void fa_forward_set_outputs(fa_forward *problem, void *out, void *lse) {
    problem->out.data = out;
    problem->lse.data = lse;
}
