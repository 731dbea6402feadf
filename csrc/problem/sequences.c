/* The sequences of a call. See sequences.h. */
#include "problem/sequences.h"

#include "problem/check.h"
#include "problem/operands.h"

bool fa_sequences_given(const fa_request *request) {
    return request->q->ndim == 3 || request->k->ndim == 3 || fa_request_has(request, FA_ROLE_INDEX) ||
           request->options.max_seqlen_q != FA_UNBOUNDED;
}

uint32_t fa_sequences_features(const fa_sequences *s) {
    const bool lengths = s->q.starts || s->q.used || s->k.starts || s->k.used || s->packed_q || s->packed_k;
    return (lengths ? FA_WITH_LENGTHS : 0) | (s->pages.table ? FA_WITH_PAGES : 0) |
           (s->begin || s->end ? FA_WITH_RANGES : 0) | (s->positions ? FA_WITH_POSITIONS : 0);
}

/* How q, k and v are stored must be said once, and fit their axes. */
static fa_code check_storage(const fa_request *request, fa_status *status) {
    const fa_view *q = request->q, *k = request->k;
    const bool unbatched = q->ndim == 3 && !request->cu_seqlens_q; /* and so is k */
    if (request->cu_seqlens_q && q->ndim != 3)
        return fa_fail(status, FA_EVALUE,
                       "cu_seqlens_q is given, but q has shape %s; accepted: packed q, (tokens, heads, head_dim)",
                       fa_show_shape(q->shape, q->ndim).text);
    if (request->page_table && request->cu_seqlens_k)
        return fa_fail(status, FA_EVALUE,
                       "page_table and cu_seqlens_k are both given; accepted: one, for paged or for packed k and v");
    if (request->page_table && k->ndim != 4)
        return fa_fail(status, FA_EVALUE, "page_table is given, but k has shape %s; accepted: pages, %s",
                       fa_show_shape(k->shape, k->ndim).text,
                       request->options.layout == FA_BSHD ? "(pages, page_size, heads_kv, head_dim)"
                                                          : "(pages, heads_kv, page_size, head_dim)");
    if (request->page_table && !request->seqlens_k)
        return fa_fail(status, FA_EVALUE, "page_table needs seqlens_k, how many keys each sequence has");
    if (request->page_table && !request->options.has_layout)
        return fa_fail(status, FA_EVALUE,
                       "page_table needs layout: \"bshd\" for (pages, page_size, heads_kv, head_dim), \"bhsd\" for "
                       "(pages, heads_kv, page_size, head_dim)");
    if (request->page_table && fa_view_extent(k, request->options.layout, 2) < 1)
        return fa_fail(status, FA_EVALUE, "k has shape %s, with a page_size of 0; accepted: 1 or more",
                       fa_show_shape(k->shape, 4).text);
    if (k->ndim == 3 && !request->cu_seqlens_k)
        return fa_fail(status, FA_EVALUE,
                       "%s has shape %s and there is no cu_seqlens_k; accepted: 4 axes, the first of them batch, of 1 "
                       "for a single "
                       "entry, or packed k and v, (tokens, heads_kv, head_dim), with cu_seqlens_k",
                       unbatched ? "q" : "k", fa_show_shape(unbatched ? q->shape : k->shape, 3).text);
    if (request->cu_seqlens_k && k->ndim != 3)
        return fa_fail(
            status, FA_EVALUE,
            "cu_seqlens_k is given, but k has shape %s; accepted: packed k and v, (tokens, heads_kv, head_dim)",
            fa_show_shape(k->shape, k->ndim).text);
    return FA_OK;
}

static fa_code check_promise(const fa_request *request, fa_status *status) {
    const int64_t most = request->options.max_seqlen_q;
    if (most < 0) return fa_fail(status, FA_EVALUE, "max_seqlen_q is %lld; accepted: an int >= 0", (long long)most);
    if (most == FA_UNBOUNDED || request->cu_seqlens_q) return FA_OK;
    return fa_fail(status, FA_EVALUE,
                   "max_seqlen_q is %lld, but q has shape %s and there is no cu_seqlens_q; accepted with max_seqlen_q: "
                   "packed q, (tokens, heads, head_dim), with cu_seqlens_q",
                   (long long)most, fa_show_shape(request->q->shape, request->q->ndim).text);
}

/* Whether there is nothing to sequences but segments, so that all of them are as long as their arrays. */
static bool segments_alone(const fa_request *request) {
    for (int n = 0; n < FA_OPERAND_COUNT; n++)
        if (n != FA_OPERAND_q_segments && n != FA_OPERAND_k_segments && fa_operands[n].role == FA_ROLE_INDEX &&
            fa_request_view(request, (fa_operand_number)n))
            return false;
    return request->q->ndim == 4 && request->k->ndim == 4;
}

static fa_code check_segments(const fa_request *request, fa_status *status) {
    const fa_view *q = request->q, *k = request->k;
    if (!request->q_segments && !request->k_segments) return FA_OK;
    if (!request->q_segments || !request->k_segments)
        return fa_fail(status, FA_EVALUE, "segments' %s is absent, but %s is given; accepted: both, or neither",
                       request->q_segments ? "k_ids" : "q_ids", request->q_segments ? "q_ids" : "k_ids");
    if (q->ndim == 3 || k->ndim == 3)
        return fa_fail(status, FA_EVALUE,
                       "segments is given, but %s is packed, shape %s; packed sequences are documents already",
                       q->ndim == 3 ? "q" : "k", fa_show_shape(q->ndim == 3 ? q->shape : k->shape, 3).text);
    if (request->page_table) return fa_fail(status, FA_EVALUE, "segments and page_table are both given; accepted: one");
    return FA_OK;
}

/* The argument that makes sequences of a call, other than axes of q and k; NULL: none. */
static const char *sequence_argument(const fa_request *request) {
    for (int n = 0; n < FA_OPERAND_COUNT; n++)
        if (fa_operands[n].role == FA_ROLE_INDEX && fa_request_view(request, (fa_operand_number)n))
            return fa_operands[n].words;
    return NULL;
}

static fa_code check_intervals(const fa_request *request, fa_status *status) {
    static const char *const where =
        "intervals belong to dense arrays; view a packed batch as B = 1 and give them for its rows";
    if (!request->intervals) return FA_OK;
    const char *other = sequence_argument(request);
    const fa_view *packed = request->q->ndim == 3 ? request->q : request->k;
    if (request->q_segments || request->k_segments)
        return fa_fail(
            status, FA_EVALUE,
            "intervals and segments are both given; accepted: one; document_intervals() makes intervals of ids "
            "that lie in runs");
    if (other) return fa_fail(status, FA_EVALUE, "intervals and %s are both given; %s", other, where);
    if (packed->ndim != 3) return FA_OK;
    return fa_fail(status, FA_EVALUE, "intervals is given, but %s is packed, shape %s; %s",
                   packed == request->q ? "q" : "k", fa_show_shape(packed->shape, 3).text, where);
}

/* Options that contradict what is only known on the device. */
static fa_code check_meaning(const fa_request *request, fa_status *status) {
    if (request->options.causal == FA_CAUSAL_TRUE && !segments_alone(request))
        return fa_fail(
            status, FA_EVALUE,
            "causal=True needs seq_q == seq_k, which the host cannot see in sequences; say "
            "causal=\"bottom_right\" (the last query sees every key) or causal=\"top_left\" (query i sees keys "
            "j <= i)");
    if (request->positions && request->options.causal == FA_CAUSAL_TOP_LEFT)
        return fa_fail(
            status, FA_EVALUE,
            "positions and causal=\"top_left\" both say where queries stand; accepted with positions: False, "
            "\"bottom_right\"");
    const char *extra = request->bias ? "bias" : request->mask ? "mask" : NULL;
    if (extra && (request->q->ndim == 3 || request->k->ndim == 3))
        return fa_fail(status, FA_EVALUE,
                       "%s is given, but %s is packed, shape %s; accepted with %s: q, k and v of 4 axes", extra,
                       request->q->ndim == 3 ? "q" : "k",
                       fa_show_shape(request->q->ndim == 3 ? request->q->shape : request->k->shape, 3).text, extra);
    return FA_OK;
}

/* An array of starts has one more element than there are sequences. */
static fa_code count_starts(const char *name, const fa_view *starts, int64_t *count, fa_status *status) {
    if (starts->ndim != 1 || starts->shape[0] < 1)
        return fa_fail(status, FA_EVALUE, "%s has shape %s; accepted: (batch + 1,)", name,
                       fa_show_shape(starts->shape, starts->ndim).text);
    *count = starts->shape[0] - 1;
    return FA_OK;
}

static fa_code count_batch(const fa_request *request, int64_t *batch, fa_status *status) {
    const fa_view *q = request->q;
    const char *name_q = request->cu_seqlens_q ? "cu_seqlens_q" : "q";
    const char *name_k = request->page_table ? "page_table" : request->cu_seqlens_k ? "cu_seqlens_k" : "k";
    int64_t of_q = q->shape[0];
    *batch = request->k->shape[0];
    if (request->page_table && request->page_table->ndim != 2)
        return fa_fail(status, FA_EVALUE, "page_table has shape %s; accepted: (batch, columns)",
                       fa_show_shape(request->page_table->shape, request->page_table->ndim).text);
    if (request->page_table) *batch = request->page_table->shape[0];
    if (request->cu_seqlens_k) FA_TRY(count_starts("cu_seqlens_k", request->cu_seqlens_k, batch, status));
    if (request->cu_seqlens_q) FA_TRY(count_starts("cu_seqlens_q", request->cu_seqlens_q, &of_q, status));
    if (of_q == *batch) return FA_OK;
    if (q->ndim == 3 && !request->cu_seqlens_q)
        return fa_fail(
            status, FA_EVALUE,
            "q has shape %s and there is no cu_seqlens_q, which means one query a sequence, but %s has %lld "
            "sequences; accepted: packed q with cu_seqlens_q, or 4 axes, the first of them batch, of 1 for a "
            "single entry",
            fa_show_shape(q->shape, 3).text, name_k, (long long)*batch);
    return fa_fail(status, FA_EVALUE, "%s has %lld sequences, but %s has %lld", name_k, (long long)*batch, name_q,
                   (long long)of_q);
}

static fa_code read_array(const char *name, const fa_view *view, int64_t extent, const char *axes, const fa_view *q,
                          const int32_t **data, fa_status *status) {
    if (!view) return FA_OK;
    FA_TRY(fa_check_indices(name, view, &extent, 1, axes, "q", q, status));
    *data = view->data;
    return FA_OK;
}

static fa_code read_pages(const fa_request *request, fa_problem *problem, fa_status *status) {
    static const int32_t none; /* data of a table without columns: never read, but not NULL, which means no pages */
    const fa_view *table = request->page_table;
    fa_forward *p = &problem->forward;
    fa_pages *pages = &problem->sequences.pages;
    if (!table) return FA_OK;
    FA_TRY(fa_check_indices("page_table", table, table->shape, 2, "(batch, columns)", "q", request->q, status));
    pages->table = table->data ? table->data : &none;
    pages->stride = table->shape[0] > 1 ? table->strides[0] : 0;
    pages->width = table->shape[1];
    pages->count = request->k->shape[0];
    pages->size = p->seq_k;
    if (pages->size > FA_MAX_EXTENT || __builtin_mul_overflow(pages->width, pages->size, &p->seq_k) ||
        p->seq_k > FA_MAX_EXTENT)
        return fa_fail(status, FA_EVALUE, "page_table has %lld columns for pages of %lld keys, too many to address",
                       (long long)pages->width, (long long)pages->size);
    return FA_OK;
}

static fa_code read_positions(const fa_request *request, fa_problem *problem, fa_status *status) {
    const fa_view *positions = request->positions, *q = request->q;
    const fa_forward *p = &problem->forward;
    if (!positions) return FA_OK;
    const bool packed = q->ndim == 3;
    const int64_t shape[2] = {packed ? p->seq_q : p->batch, p->seq_q};
    FA_TRY(fa_check_indices("positions", positions, shape, packed ? 1 : 2, packed ? "(tokens,)" : "(batch, seq_q)", "q",
                            q, status));
    problem->sequences.positions = positions->data;
    problem->sequences.positions_stride = packed || positions->shape[0] == 1 ? 0 : positions->strides[0];
    return FA_OK;
}

static fa_code read_segments(const fa_request *request, fa_forward *p, fa_status *status) {
    static const int32_t none; /* data of no ids: never read, but not NULL, which means no segments */
    const fa_view *views[2] = {request->q_segments, request->k_segments};
    static const char *const names[2] = {"segments' q_ids", "segments' k_ids"};
    static const char *const axes[2] = {"(batch, seq_q)", "(batch, seq_k)"};
    fa_operand *operands[2] = {&p->q_segments, &p->k_segments};
    for (int n = 0; n < 2 && views[n]; n++) {
        const int64_t shape[2] = {p->batch, n ? p->seq_k : p->seq_q};
        FA_TRY(fa_check_indices(names[n], views[n], shape, 2, axes[n], "q", request->q, status));
        operands[n]->data = views[n]->data ? views[n]->data : (void *)(uintptr_t)&none;
        operands[n]->stride[0] = views[n]->shape[0] > 1 ? views[n]->strides[0] : 0;
    }
    return FA_OK;
}

fa_code fa_sequences_check(const fa_request *request, fa_status *status) {
    FA_TRY(check_intervals(request, status));
    FA_TRY(check_promise(request, status));
    FA_TRY(check_storage(request, status));
    FA_TRY(check_segments(request, status));
    return check_meaning(request, status);
}

fa_code fa_sequences_build(const fa_request *request, fa_problem *problem, fa_status *status) {
    const fa_view *q = request->q;
    fa_forward *p = &problem->forward;
    fa_sequences *s = &problem->sequences;
    FA_TRY(count_batch(request, &p->batch, status));
    s->given = true;
    s->packed_q = q->ndim == 3;
    s->packed_k = request->k->ndim == 3;
    s->top_left = request->options.causal == FA_CAUSAL_TOP_LEFT;
    const int64_t batch = p->batch;
    FA_TRY(read_array("cu_seqlens_q", request->cu_seqlens_q, batch + 1, "(batch + 1,)", q, &s->q.starts, status));
    FA_TRY(read_array("seqlens_q", request->seqlens_q, batch, "(batch,)", q, &s->q.used, status));
    FA_TRY(read_array("cu_seqlens_k", request->cu_seqlens_k, batch + 1, "(batch + 1,)", q, &s->k.starts, status));
    FA_TRY(read_array("seqlens_k", request->seqlens_k, batch, "(batch,)", q, &s->k.used, status));
    FA_TRY(read_array("k_range's begin", request->k_range_begin, batch, "(batch,)", q, &s->begin, status));
    FA_TRY(read_array("k_range's end", request->k_range_end, batch, "(batch,)", q, &s->end, status));
    FA_TRY(read_pages(request, problem, status));
    FA_TRY(read_positions(request, problem, status));
    FA_TRY(read_segments(request, p, status));
    s->q.rows = p->seq_q;
    s->k.rows = p->seq_k;
    s->most_q = request->options.max_seqlen_q;
    return FA_OK;
}
