/* cpu_append: new keys and values into caches, with rotary position embedding (Su et al. 2021).
 *
 *     x0' = x0 cos - x1 sin    x1' = x1 cos + x0 sin    for each pair of the first R columns of k and q
 *
 * In float64, rounded once to float32 and once to the dtype; other columns and values are copied byte for byte. One
 * thread, in the order of the tokens: of two with one place the last is there, whole.
 */
#include <string.h>

#include "cpu/element.h"
#include "tokens.h"

static fa_answer plan(const fa_problem *problem, const fa_device_info *device, fa_plan *plan, fa_why *why) {
    (void)problem, (void)device, (void)why;
    plan->blocks = 1;
    plan->threads = 1;
    plan->keep = true;
    return FA_TAKES;
}

static int64_t offset_of(const fa_operand *x, int64_t a, int64_t b, int64_t c) {
    return a * x->stride[0] + b * x->stride[1] + c * x->stride[2];
}

/* `count` elements from `index` of one array to `at` of another. */
static void copy(const fa_operand *x, int64_t index, const fa_operand *to, int64_t at, int count, fa_dtype dtype) {
    const int64_t size = (int64_t)fa_dtype_size(dtype), step = x->stride[3] * size, stride = to->stride[3] * size;
    const char *from = (const char *)x->data + index * size;
    char *into = (char *)to->data + at * size;
    for (int d = 0; d < count; d++) memmove(into + d * stride, from + d * step, (size_t)size);
}

/* One row of one head, its first columns rotated. */
static void rotate(const fa_append *p, const fa_operand *x, int64_t index, const fa_operand *to, int64_t at,
                   int64_t position) {
    const int half = p->cos.data ? p->half : 0;
    const fa_operand rest = {x->data, {0, 0, 0, x->stride[3]}}, rest_to = {to->data, {0, 0, 0, to->stride[3]}};
    for (int n = 0; n < half; n++) {
        const int first = p->interleaved ? 2 * n : n, second = p->interleaved ? 2 * n + 1 : n + half;
        const double a = fa_load(x->data, p->dtype, index + first * x->stride[3]);
        const double b = fa_load(x->data, p->dtype, index + second * x->stride[3]);
        const double c = fa_load(p->cos.data, p->rotary_dtype, position * p->cos.stride[0] + n * p->cos.stride[1]);
        const double s = fa_load(p->sin.data, p->rotary_dtype, position * p->sin.stride[0] + n * p->sin.stride[1]);
        fa_store(to->data, p->dtype, at + first * to->stride[3], a * c - b * s);
        fa_store(to->data, p->dtype, at + second * to->stride[3], b * c + a * s);
    }
    copy(&rest, index + 2 * half * x->stride[3], &rest_to, at + 2 * half * to->stride[3], p->head_dim - 2 * half,
         p->dtype);
}

static void write_token(const fa_append *p, const fa_token *token) {
    for (int64_t h = 0; h < p->heads_kv; h++) {
        rotate(p, &p->k, offset_of(&p->k, token->batch, h, token->row), &p->k_cache,
               offset_of(&p->k_cache, token->page, h, token->place), token->position);
        if (p->v_cache.data)
            copy(&p->v, offset_of(&p->v, token->batch, h, token->row), &p->v_cache,
                 offset_of(&p->v_cache, token->page, h, token->place), p->head_dim_v, p->dtype);
    }
    for (int64_t h = 0; h < p->heads && p->out.data; h++)
        rotate(p, &p->q, offset_of(&p->q, token->batch, h, token->row), &p->out,
               offset_of(&p->out, token->batch, h, token->row), token->position);
}

/* Rows [begin, end) of out whose tokens are not written. */
static void clear(const fa_problem *problem, int64_t batch, int64_t begin, int64_t end) {
    const fa_append *p = &problem->append;
    for (int64_t row = begin; row < end && p->out.data && !fa_stopped(problem); row++)
        for (int64_t h = 0; h < p->heads; h++)
            for (int d = 0; d < p->head_dim; d++)
                fa_store(p->out.data, p->dtype, offset_of(&p->out, batch, h, row) + d * p->out.stride[3], 0);
}

static void write_or_clear(const fa_problem *problem, const fa_token *token) {
    if (token->skipped)
        clear(problem, token->batch, token->row, token->row + 1);
    else
        write_token(&problem->append, token);
}

static fa_code launch(const fa_problem *problem, const fa_plan *plan, const fa_launch *launch) {
    (void)plan, (void)launch;
    const fa_append *p = &problem->append;
    const fa_sequences *s = &problem->sequences;
    for (int64_t t = 0; t < p->rows && p->slots.data && !fa_stopped(problem); t++) {
        const fa_token token = fa_token_of_slot(&p->slots, s, t);
        write_or_clear(problem, &token);
    }
    if (p->slots.data) return FA_OK;
    int64_t before = 0;
    for (int64_t b = 0; b < p->batch; b++) {
        const fa_span rows = fa_rows_of(&s->q, b, before, s->packed_q);
        const int64_t count = fa_used(&s->q, b, rows.end - rows.begin);
        for (int64_t t = 0; t < count && !fa_stopped(problem); t++) {
            const fa_token token = fa_token_of_sequence(&p->slots, s, b, rows.begin, count, t);
            write_or_clear(problem, &token);
        }
        clear(problem, s->packed_q ? 0 : b, s->packed_q ? before : 0, rows.begin);
        clear(problem, s->packed_q ? 0 : b, rows.begin + count, rows.end);
        before = rows.end;
    }
    if (s->packed_q) clear(problem, 0, before, p->rows);
    return FA_OK;
}

extern const fa_kernel fa_kernel_cpu_append;
FA_EXPORT const fa_kernel fa_kernel_cpu_append = {
    .abi = FA_KERNEL_ABI,
    .op = FA_APPEND,
    .device = FA_CPU,
    .name = "cpu_append",
    .summary = "new keys and values into caches, with rotary embedding: portable C",
    .dtypes = 1 << FA_F16 | 1 << FA_BF16 | 1 << FA_F32 | 1 << FA_F64,
    .takes = FA_WITH_LENGTHS | FA_WITH_PAGES | FA_WITH_POSITIONS | FA_WITH_SLOTS | FA_WITH_ROTARY | FA_WITH_HEAD_DIM_V,
    .plan = plan,
    .launch = launch,
};
