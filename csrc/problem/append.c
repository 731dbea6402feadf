/* Request of append() -> problem. See append.h. */
#include "problem/append.h"

#include <string.h>

#include "device/threads.h"
#include "problem/check.h"
#include "problem/operands.h"

#define FIRST "k_cache"

/* Kernels of other operations were compiled for a problem of this size. */
_Static_assert(sizeof(fa_append) <= sizeof(fa_backward), "fa_problem keeps its layout");

static fa_code check_given(const fa_append_request *request, fa_status *status) {
    const fa_request *r = &request->forward;
    if (!r->options.has_layout)
        return fa_fail(status, FA_EVALUE,
                       "layout must be said: \"bshd\" for (pages, page_size, heads_kv, head_dim), \"bhsd\" for (pages, "
                       "heads_kv, page_size, head_dim)");
    if (!r->v_cache != !r->v)
        return fa_fail(status, FA_EVALUE, "%s is None, but %s is not; accepted: both, or neither",
                       r->v_cache ? "v" : "v_cache", r->v_cache ? "v_cache" : "v");
    if (!r->seqlens_k == !r->slots)
        return fa_fail(status, FA_EVALUE, "%s; accepted: one of seqlens_k and slots",
                       r->slots ? "seqlens_k and slots are both given" : "seqlens_k and slots are both absent");
    const char *extra = r->page_table     ? "page_table"
                        : r->cu_seqlens_q ? "cu_seqlens_q"
                        : r->seqlens_q    ? "seqlens_q"
                                          : NULL;
    if (r->slots && extra) return fa_fail(status, FA_EVALUE, "%s is given, but slots say where each token goes", extra);
    if (r->slots && r->k->ndim != 3)
        return fa_fail(status, FA_EVALUE, "k has shape %s; accepted with slots: (tokens, heads_kv, head_dim)",
                       fa_show_shape(r->k->shape, r->k->ndim).text);
    if (r->slots && r->rotary_cos && !r->positions)
        return fa_fail(status, FA_EVALUE, "rotary with slots needs positions");
    const char *idle = r->q ? "q" : r->positions ? "positions" : request->interleaved ? "interleaved" : NULL;
    if (!r->rotary_cos && idle) return fa_fail(status, FA_EVALUE, "%s is given, but rotary is not", idle);
    if (!r->q && r->out) return fa_fail(status, FA_EVALUE, "out is given, but q, which goes there, is not");
    if (r->cu_seqlens_q && r->k->ndim != 3)
        return fa_fail(status, FA_EVALUE,
                       "cu_seqlens_q is given, but k has shape %s; accepted: packed k, (tokens, heads_kv, head_dim)",
                       fa_show_shape(r->k->shape, r->k->ndim).text);
    return FA_OK;
}

/* Rank, dtype and device of an array of keys or values. */
static fa_code check_kv(const char *name, const fa_view *view, bool cache, const fa_view *first, fa_status *status) {
    if (view->ndim != 4 && (cache || view->ndim != 3))
        return fa_fail(status, FA_EVALUE, "%s has %d dimensions, shape %s; accepted: 4%s", name, view->ndim,
                       fa_show_shape(view->shape, view->ndim).text, cache ? "" : ", or 3 for packed tokens");
    if (!fa_is_float(view->dtype))
        return fa_fail(status, FA_ETYPE,
                       "%s has dtype %s; accepted: float16, bfloat16, float32, and float64 on the CPU", name,
                       fa_dtype_name(view->dtype));
    if (view->dtype != first->dtype)
        return fa_fail(status, FA_ETYPE, "%s has dtype %s, but " FIRST " has %s; they must share one dtype", name,
                       fa_dtype_name(view->dtype), fa_dtype_name(first->dtype));
    FA_TRY(fa_check_device(name, view, FIRST, first, status));
    return fa_check_extents(name, view, status);
}

static fa_code check_cache(const char *name, const fa_view *view, fa_status *status) {
    if (view->readonly) return fa_fail(status, FA_EVALUE, "%s is read-only; accepted: a writable array", name);
    if (!fa_view_distinct(view))
        return fa_fail(status, FA_EVALUE, "%s has strides %s; its elements must be distinct", name,
                       fa_show_shape(view->strides, view->ndim).text);
    return FA_OK;
}

/* Two arrays share extents of the axes (batch, heads, rows, head_dim) in `axes`, a set of bits. */
static fa_code check_like(const char *name, const fa_view *view, const char *other_name, const fa_view *other, int axes,
                          const char *words, fa_layout layout, fa_status *status) {
    bool same = view->ndim == other->ndim || axes == (1 << 1 | 1 << 3);
    for (int axis = 0; axis < 4 && same; axis++)
        if (axes >> axis & 1) same = fa_view_extent(view, layout, axis) == fa_view_extent(other, layout, axis);
    if (same) return FA_OK;
    return fa_fail(status, FA_EVALUE, "%s has shape %s, but %s has shape %s; %s must be the same", name,
                   fa_show_shape(view->shape, view->ndim).text, other_name,
                   fa_show_shape(other->shape, other->ndim).text, words);
}

enum { BATCH = 1, HEADS = 2, ROWS = 4, DIM = 8 };

static fa_code check_shapes(const fa_append_request *request, fa_append *p, fa_status *status) {
    const fa_request *r = &request->forward;
    const fa_layout layout = r->options.layout;
    const fa_view *cache = r->k_cache, *k = r->k;
    FA_TRY(check_like("k", k, FIRST, cache, HEADS | DIM, "heads_kv and head_dim", layout, status));
    if (r->v) {
        FA_TRY(check_like("v_cache", r->v_cache, FIRST, cache, BATCH | HEADS | ROWS, "pages, heads_kv and page_size",
                          layout, status));
        FA_TRY(check_like("v", r->v, "k", k, BATCH | HEADS | ROWS, "all but head_dim", layout, status));
        FA_TRY(check_like("v", r->v, "v_cache", r->v_cache, HEADS | DIM, "heads_kv and head_dim", layout, status));
    }
    if (r->q) FA_TRY(check_like("q", r->q, "k", k, BATCH | ROWS | DIM, "all but the heads", layout, status));
    const int64_t dims[2] = {cache->shape[3], r->v ? r->v_cache->shape[3] : 1};
    for (int n = 0; n < 2; n++)
        if (dims[n] < 1 || dims[n] > FA_MAX_HEAD_DIM)
            return fa_fail(status, FA_EVALUE, "%s has head_dim %lld; accepted: 1 to %d", n ? "v_cache" : FIRST,
                           (long long)dims[n], FA_MAX_HEAD_DIM);
    p->head_dim = (int)dims[0];
    p->head_dim_v = r->v ? (int)dims[1] : p->head_dim;
    p->heads = r->q ? fa_view_extent(r->q, layout, 1) : 0;
    p->heads_kv = fa_view_extent(k, layout, 1);
    p->rows = fa_view_extent(k, layout, 2);
    p->slots.pages = cache->shape[0];
    p->slots.page_size = fa_view_extent(cache, layout, 2);
    return FA_OK;
}

static fa_code read_rotary(const fa_append_request *request, fa_append *p, fa_status *status) {
    const fa_view *tables[2] = {request->forward.rotary_cos, request->forward.rotary_sin};
    static const char *const names[2] = {"rotary's cos", "rotary's sin"};
    fa_operand *operands[2] = {&p->cos, &p->sin};
    static char none; /* data of tables without rows: never read, but not NULL */
    p->slots.positions = -1;
    for (int n = 0; n < 2 && tables[0]; n++) {
        const fa_view *x = tables[n];
        FA_TRY(fa_check_extra_dtype(names[n], x, FIRST, request->forward.k_cache, status));
        FA_TRY(fa_check_device(names[n], x, FIRST, request->forward.k_cache, status));
        if (x->ndim != 2 || x->shape[1] < 1 || 2 * x->shape[1] > p->head_dim || x->shape[0] != tables[0]->shape[0] ||
            x->shape[1] != tables[0]->shape[1])
            return fa_fail(
                status, FA_EVALUE,
                "%s has shape %s; accepted: (positions, n), one shape for both, with n from 1 to head_dim / 2 "
                "= %d",
                names[n], fa_show_shape(x->shape, x->ndim).text, p->head_dim / 2);
        if (x->dtype != tables[0]->dtype)
            return fa_fail(status, FA_ETYPE, "rotary's sin has dtype %s, but rotary's cos has %s",
                           fa_dtype_name(x->dtype), fa_dtype_name(tables[0]->dtype));
        operands[n]->data = x->data ? x->data : &none;
        for (int axis = 0; axis < 2; axis++) operands[n]->stride[axis] = x->shape[axis] == 1 ? 0 : x->strides[axis];
        p->rotary_dtype = x->dtype;
        p->slots.positions = x->shape[0];
        p->half = (int)x->shape[1];
    }
    return FA_OK;
}

static fa_code read_slots(const fa_append_request *request, fa_append *p, fa_status *status) {
    static const int32_t none; /* data of no slots: never read, but not NULL, which means sequences */
    const fa_view *slots = request->forward.slots;
    if (slots->dtype != FA_I32 && slots->dtype != FA_I64)
        return fa_fail(status, FA_ETYPE, "slots has dtype %s; accepted: int32, int64", fa_dtype_name(slots->dtype));
    FA_TRY(fa_check_device("slots", slots, FIRST, request->forward.k_cache, status));
    if (slots->ndim != 1 || slots->shape[0] > p->rows)
        return fa_fail(status, FA_EVALUE,
                       "slots has shape %s; accepted: (n,), at most one for each of the %lld tokens of k",
                       fa_show_shape(slots->shape, slots->ndim).text, (long long)p->rows);
    if (slots->shape[0] > 1 && slots->strides[0] != 1)
        return fa_fail(status, FA_EVALUE, "slots has strides %s; accepted: 1", fa_show_shape(slots->strides, 1).text);
    p->slots.data = slots->data ? slots->data : &none;
    p->slots.dtype = slots->dtype;
    p->slots.count = slots->shape[0];
    return FA_OK;
}

static fa_code read_positions(const fa_append_request *request, fa_problem *problem, fa_status *status) {
    const fa_view *positions = request->forward.positions, *k = request->forward.k;
    const fa_append *p = &problem->append;
    if (!positions) return FA_OK;
    const bool packed = k->ndim == 3;
    const int64_t shape[2] = {packed ? p->rows : p->batch, p->rows};
    FA_TRY(fa_check_indices("positions", positions, shape, packed ? 1 : 2, packed ? "(tokens,)" : "(batch, seq)", FIRST,
                            request->forward.k_cache, status));
    problem->sequences.positions = positions->data;
    problem->sequences.positions_stride = packed || positions->shape[0] == 1 ? 0 : positions->strides[0];
    return FA_OK;
}

/* Lengths, starts and the table. */
static fa_code read_sequences(const fa_append_request *request, fa_problem *problem, fa_status *status) {
    static const int32_t none; /* as for slots */
    const fa_request *r = &request->forward;
    const fa_view *first = r->k_cache, *k = r->k, *table = r->page_table;
    fa_append *p = &problem->append;
    fa_sequences *s = &problem->sequences;
    const int64_t batch = r->seqlens_k->ndim == 1 ? r->seqlens_k->shape[0] : -1, starts = batch + 1;
    FA_TRY(fa_check_indices("seqlens_k", r->seqlens_k, &batch, 1, "(batch,)", FIRST, first, status));
    s->given = true;
    s->packed_q = k->ndim == 3;
    s->q.rows = p->rows;
    s->k.used = r->seqlens_k->data ? r->seqlens_k->data : &none;
    s->k.rows = p->slots.page_size;
    p->batch = batch;
    if (r->cu_seqlens_q) {
        FA_TRY(fa_check_indices("cu_seqlens_q", r->cu_seqlens_q, &starts, 1, "(batch + 1,)", FIRST, first, status));
        s->q.starts = r->cu_seqlens_q->data;
    } else if (k->shape[0] != batch) {
        return fa_fail(status, FA_EVALUE, "k has shape %s, but seqlens_k has %lld sequences%s",
                       fa_show_shape(k->shape, k->ndim).text, (long long)batch,
                       s->packed_q ? "; packed k needs cu_seqlens_q, unless it holds one token a sequence" : "");
    }
    if (r->seqlens_q) {
        FA_TRY(fa_check_indices("seqlens_q", r->seqlens_q, &batch, 1, "(batch,)", FIRST, first, status));
        s->q.used = r->seqlens_q->data;
    }
    if (!table) {
        if (p->slots.pages == batch) return FA_OK;
        return fa_fail(status, FA_EVALUE,
                       FIRST " has shape %s, but seqlens_k has %lld sequences; pages need page_table",
                       fa_show_shape(first->shape, 4).text, (long long)batch);
    }
    const int64_t shape[2] = {batch, table->ndim == 2 ? table->shape[1] : -1};
    FA_TRY(fa_check_indices("page_table", table, shape, 2, "(batch, columns)", FIRST, first, status));
    if (p->slots.page_size < 1)
        return fa_fail(status, FA_EVALUE, FIRST " has shape %s, with a page_size of 0; accepted: 1 or more",
                       fa_show_shape(first->shape, 4).text);
    s->pages = (fa_pages){table->data ? table->data : &none, batch > 1 ? table->strides[0] : 0, shape[1],
                          p->slots.pages, p->slots.page_size};
    if (__builtin_mul_overflow(shape[1], p->slots.page_size, &s->k.rows) || s->k.rows > FA_MAX_EXTENT)
        return fa_fail(status, FA_EVALUE, "page_table has %lld columns for pages of %lld keys, too many to address",
                       (long long)shape[1], (long long)p->slots.page_size);
    return FA_OK;
}

/* Written arrays overlap nothing else, except out, which may be q itself, and the caches, which may lie in one array.
 */
static fa_code check_apart(const fa_append_request *request, fa_status *status) {
    const fa_request *r = &request->forward;
    bool itself = r->out && r->q && r->out->data == r->q->data && r->out->ndim == r->q->ndim;
    for (int axis = 0; itself && axis < r->q->ndim; axis++)
        itself = r->q->shape[axis] == 1 || r->out->strides[axis] == r->q->strides[axis];
    const fa_view *const caches[2] = {r->k_cache, r->v_cache};
    for (int n = 0; n < 2 && caches[n]; n++) {
        FA_TRY(fa_check_apart(FA_APPEND, n ? "v_cache" : FIRST, caches[n], r, NULL, status));
        FA_TRY(fa_check_disjoint(n ? "v_cache" : FIRST, caches[n], "out", r->out, status));
    }
    return r->out ? fa_check_apart(FA_APPEND, "out", r->out, r, itself ? r->q : NULL, status) : FA_OK;
}

static void set_operands(const fa_append_request *request, fa_append *p) {
    const fa_request *r = &request->forward;
    const fa_layout layout = r->options.layout;
    static char none; /* data of an empty cache of values: never read, but not NULL, which means none */
    fa_view_operand(&p->k_cache, r->k_cache, layout);
    fa_view_operand(&p->k, r->k, layout);
    if (r->v) {
        fa_view_operand(&p->v_cache, r->v_cache, layout);
        fa_view_operand(&p->v, r->v, layout);
        if (!p->v_cache.data) p->v_cache.data = &none;
    }
    if (!r->q) return;
    fa_view_operand(&p->q, r->q, layout);
    fa_view out = *r->q;
    out.data = NULL;
    fa_view_contiguous(&out);
    fa_view_operand(&p->out, r->out ? r->out : &out, layout);
}

fa_code fa_append_build(const fa_append_request *request, fa_problem *problem, fa_status *status) {
    const fa_request *r = &request->forward;
    const fa_view *first = r->k_cache;
    memset(problem, 0, sizeof *problem);
    fa_append *p = &problem->append;
    problem->op = FA_APPEND;
    problem->device = first->device;
    problem->threads = first->device.kind == FA_CPU ? fa_cpu_threads() : 0;
    p->dtype = p->rotary_dtype = first->dtype;
    p->interleaved = request->interleaved;
    problem->sequences.most_q = FA_UNBOUNDED;
    FA_TRY(check_given(request, status));
    FA_TRY(check_kv(FIRST, first, true, first, status));
    FA_TRY(check_kv("k", r->k, false, first, status));
    if (r->v) FA_TRY(check_kv("v_cache", r->v_cache, true, first, status));
    if (r->v) FA_TRY(check_kv("v", r->v, false, first, status));
    if (r->q) FA_TRY(check_kv("q", r->q, false, first, status));
    FA_TRY(check_cache(FIRST, first, status));
    if (r->v) FA_TRY(check_cache("v_cache", r->v_cache, status));
    FA_TRY(check_shapes(request, p, status));
    FA_TRY(read_rotary(request, p, status));
    if (r->slots)
        FA_TRY(read_slots(request, p, status));
    else
        FA_TRY(read_sequences(request, problem, status));
    FA_TRY(read_positions(request, problem, status));
    if (r->out) FA_TRY(fa_check_output("out", r->out, r->q->shape, r->q->ndim, 1u << p->dtype, FIRST, first, status));
    FA_TRY(check_apart(request, status));
    set_operands(request, p);
    if (problem->device.kind == FA_CUDA && p->dtype == FA_F64)
        return fa_fail(status, FA_EUNSUPPORTED,
                       "float64 runs on the CPU only; accepted on a CUDA device: float16, bfloat16, float32");
    problem->features = fa_sequences_features(&problem->sequences) | (p->slots.data ? FA_WITH_SLOTS : 0) |
                        (p->cos.data ? FA_WITH_ROTARY : 0) | (p->head_dim_v != p->head_dim ? FA_WITH_HEAD_DIM_V : 0);
    problem->empty = p->rows == 0 || (p->heads_kv == 0 && p->heads == 0);
    return FA_OK;
}
