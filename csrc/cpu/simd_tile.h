/* One query tile over all its keys: the body of an instance of cpu_simd.
 *
 * A tile of query rows is a few blocks (simd_block.h) that share each tile of FA_CPU_TILE_N keys. Key tiles lie on a
 * fixed grid, so a row's bits depend on its own inputs alone (and on the instruction set).
 */
#ifndef FA_CPU_SIMD_TILE_H
#define FA_CPU_SIMD_TILE_H

#include "cpu/simd_narrow.h"

/* ---- key tiles ---- */

/* How many of the keys [begin, end) lie one stride apart from `begin` on. */
static int64_t run_of(const work *w, int64_t begin, int64_t end) {
    const fa_pages *pages = &w->problem->sequences.pages;
    if (!pages->table) return end - begin;
    const int64_t left = pages->size - begin % pages->size;
    return left < end - begin ? left : end - begin;
}

static const char *key_row(const work *w, const fa_operand *operand, int64_t key) {
    const fa_pages *pages = &w->problem->sequences.pages;
    const fa_cpu_entry *e = w->entry;
    if (!pages->table) return element(operand, w->p->dtype, e->batch, w->head_kv, e->entry.first_k + key);
    const int64_t page = w->page[key / pages->size - w->column];
    return element(operand, w->p->dtype, page, w->head_kv, key % pages->size);
}

/* Rows [begin, end) of K as the products read them; those of several pages are copied. */
static const key_number *read_keys(const work *w, int64_t begin, int64_t end, int64_t *pitch) {
    const fa_forward *p = w->p;
    int64_t run = run_of(w, begin, end);
    if (run == end - begin) return keys_at(&p->k, p->dtype, key_row(w, &p->k, begin), run, p->head_dim, w->k, pitch);
    *pitch = OPERAND_NUMBERS * OPERANDS(p->head_dim);
    for (int64_t at = begin; at < end; at += run) {
        run = run_of(w, at, end);
        copy_keys(&p->k, p->dtype, key_row(w, &p->k, at), run, p->head_dim, w->k + (at - begin) * *pitch);
    }
    return w->k;
}

/* The same of V. */
#if FA_CPU_AMX
static const value_number *read_values(const work *w, int64_t begin, int64_t end, int64_t *pitch) {
    const fa_operand *v = &w->p->v;
    *pitch = VALUE_PITCH;
    for (int64_t first = begin / CHUNK_KEYS * CHUNK_KEYS; first < end; first += CHUNK_KEYS) {
        const char *rows[CHUNK_KEYS];
        for (int n = 0; n < CHUNK_KEYS; n++)
            rows[n] = first + n < begin || first + n >= end ? NULL : key_row(w, v, first + n);
        transpose_values(w->v + VALUES_AT(begin, first, *pitch), rows, v->stride[3], w->p->head_dim_v, w->buffer);
    }
    return w->v;
}
#elif FA_CPU_BF16
static const value_number *read_values(const work *w, int64_t begin, int64_t end, int64_t *pitch) {
    const fa_operand *v = &w->p->v;
    *pitch = w->p->head_dim_v;
    for (int64_t even = begin / 2 * 2; even < end; even += 2)
        join_value_rows(w->v + VALUES_AT(begin, even, *pitch), even < begin ? NULL : key_row(w, v, even),
                        even + 1 < end ? key_row(w, v, even + 1) : NULL, v->stride[3], w->p->head_dim_v);
    return w->v;
}
#else
static const value_number *read_values(const work *w, int64_t begin, int64_t end, int64_t *pitch) {
    const fa_forward *p = w->p;
    int64_t run = run_of(w, begin, end);
    if (run == end - begin) return rows_at(&p->v, p->dtype, key_row(w, &p->v, begin), run, p->head_dim_v, w->v, pitch);
    *pitch = p->head_dim_v;
    for (int64_t at = begin; at < end; at += run) {
        run = run_of(w, at, end);
        copy_rows(&p->v, p->dtype, key_row(w, &p->v, at), run, p->head_dim_v, w->v + (at - begin) * *pitch);
    }
    return w->v;
}
#endif

/* The part of a tile that lies in [begin, end). */
static key_tile clipped(const key_tile *tile, int64_t begin, int64_t end) {
    key_tile t = *tile;
    if (begin > t.begin) t.begin = begin;
    if (end < t.end) t.end = end;
    t.k += (t.begin - tile->begin) * t.k_pitch;
    t.v += VALUES_AT(tile->begin, t.begin, t.v_pitch);
    return t;
}

/* Keys [begin, end) as the products read them. */
static key_tile read_tile(const work *w, int64_t begin, int64_t end) {
    key_tile t = {.begin = begin, .end = end};
    t.k = read_keys(w, begin, end, &t.k_pitch);
    t.v = read_values(w, begin, end, &t.v_pitch);
    return t;
}

/* The same for a narrow task. */
#if FA_CPU_AMX
static key_tile read_narrow_tile(work *w, int64_t begin, int64_t end) {
    key_tile t = {.begin = begin, .end = end, .v = w->v};
    t.k = read_keys(w, begin, end, &t.k_pitch);
    w->value_begin = begin;
    for (int64_t at = begin, run; at < end; at += run) {
        const char *row = key_row(w, &w->p->v, at);
        const int64_t stride = w->p->v.stride[2] * (int64_t)fa_dtype_size(w->p->dtype);
        run = run_of(w, at, end);
        for (int64_t n = 0; n < run; n++) w->value_rows[at - begin + n] = row + n * stride;
    }
    return t;
}
#else
static key_tile read_narrow_tile(const work *w, int64_t begin, int64_t end) { return read_tile(w, begin, end); }
#endif

static void tile_step(work *w, int64_t begin, int64_t end) {
    const key_tile tile = read_tile(w, begin, end);
    for (int n = 0; n < w->blocks; n++) {
        block *b = &w->block[n];
        const key_tile t = clipped(&tile, b->keys.begin, b->keys.end);
        if (t.begin >= t.end) continue;
        if (w->problem->forward.intervals.data && !holds_some(b, t.begin, t.end)) continue;
        block_step(w, b, &t, b->common.begin > t.begin || b->common.end < t.end);
    }
}

/* ---- a task ---- */

/* Where the tile of keys that begins at `begin` ends on the grid, or at `end`. */
static int64_t grid_end(int64_t begin, int64_t end) {
    const int64_t grid = (begin / FA_CPU_TILE_N + 1) * FA_CPU_TILE_N;
    return grid < end ? grid : end;
}

/* The first tile of keys that begins at `begin` or later; empty if there is none. It ends on the grid, or before a page
 * that hides its keys. The table is read here alone, since it may change: w->page has the pages of the tile. */
static fa_span next_tile(work *w, int64_t begin, int64_t end) {
    const fa_pages *pages = &w->problem->sequences.pages;
    if (!pages->table) return (fa_span){begin, grid_end(begin, end)};
    w->column = begin / pages->size;
    for (; begin < end && (w->page[0] = fa_page(pages, w->entry->batch, w->column)) < 0; w->column++)
        begin = (w->column + 1) * pages->size;
    if (begin >= end) return (fa_span){end, end};
    const int64_t grid = grid_end(begin, end);
    int64_t next = 1, stop = (w->column + 1) * pages->size;
    for (; stop < grid && (w->page[next] = fa_page(pages, w->entry->batch, w->column + next)) >= 0; next++)
        stop += pages->size;
    return (fa_span){begin, stop < grid ? stop : grid};
}

/* The same after a tile; empty where the call was stopped, too. */
static fa_span tile_after(work *w, int64_t begin, int64_t end) {
    const fa_span next = next_tile(w, begin, end);
    return next.begin < next.end && fa_stopped(w->problem) ? (fa_span){end, end} : next;
}

static void lay_out(arena *a, work *w, const fa_problem *problem, int tile_m) {
    const fa_forward *p = &problem->forward;
    const int blocks = (tile_m + BLOCK_ROWS - 1) / BLOCK_ROWS;
    int widest = p->head_dim > p->head_dim_v ? p->head_dim : p->head_dim_v;
    if (widest < FA_CPU_TILE_N) widest = FA_CPU_TILE_N;
    const size_t scores = (size_t)FA_CPU_TILE_N * BLOCK_ROWS;
    w->block = take(a, (size_t)blocks, sizeof *w->block);
    w->scores = take(a, scores, sizeof(real));
    w->joined = take(a, JOINED_ROOM(FA_CPU_TILE_N) * BLOCK_ROWS, sizeof(real));
    w->bias = take(a, is_biased(problem) ? scores : 0, sizeof(real));
    w->mask = take(a, p->mask.data ? scores : 0, sizeof(real));
    w->factors = take(a, problem->forward.dropout.threshold ? LANES * (DROPOUT_ROOM(FA_CPU_TILE_N) + FA_CPU_TILE_N) : 0,
                      sizeof(real));
    w->k = take(a, (size_t)FA_CPU_TILE_N * (size_t)(OPERAND_NUMBERS * OPERANDS(p->head_dim)), sizeof *w->k);
    w->v = take(a, VALUE_ROOM(FA_CPU_TILE_N, p->head_dim_v), sizeof *w->v);
    w->buffer = take(a, (size_t)LANES * (size_t)padded(widest), sizeof(real));
    w->page = take(a, problem->sequences.pages.table ? FA_CPU_TILE_N : 0, sizeof *w->page);
    for (int n = 0; n < blocks; n++) {
        real *q = take(a, (size_t)BLOCK_ROWS * (size_t)OPERANDS(p->head_dim), sizeof(real));
        real *o = take(a, (size_t)BLOCK_ROWS * (size_t)OUT_ROOM(p->head_dim_v), sizeof(real));
        if (a->base) w->block[n].q = q, w->block[n].o = o;
    }
}

static size_t scratch_bytes(const fa_problem *problem, int tile_m) {
    arena a = {NULL, 0};
    work w;
    lay_out(&a, &w, problem, tile_m);
    return a.used;
}

/* Runs the blocks over all their key tiles. True when a NaN was met. */
static bool run(work *w, const fa_simd_task *task) {
    fa_span keys = {w->entry->entry.key_end, w->entry->entry.key_begin};
    for (int n = 0; n < w->blocks; n++) {
        block *b = &w->block[n];
        const int row = n * BLOCK_ROWS, left = task->rows - row;
        b->first_row = task->first_row + row;
        b->rows = left < BLOCK_ROWS ? left : BLOCK_ROWS;
        b->mr = (b->rows + LANES - 1) / LANES;
        block_begin(w, b);
        keys = fa_span_joined(keys, b->keys);
    }
    for (fa_span t = next_tile(w, keys.begin, keys.end); t.begin < t.end; t = tile_after(w, t.end, keys.end))
        tile_step(w, t.begin, t.end);
    bool nan = false;
    for (int n = 0; n < w->blocks; n++) nan |= block_end(w, &w->block[n]);
    return nan;
}

/* Runs the rows of a narrow task over all their key tiles. */
static void run_narrow(work *w, const fa_simd_task *task) {
    const fa_forward *p = w->p;
    narrow_row rows[NARROW_ROWS];
    fa_span keys = {w->entry->entry.key_end, w->entry->entry.key_begin};
    for (int n = 0; n < task->rows; n++) {
        narrow_row *r = &rows[n];
        r->query = (task->first_row + n) / w->group;
        r->head = w->head_kv * w->group + (task->first_row + n) % w->group;
        r->q = w->block->q + n * p->head_dim;
        r->o = w->block->o + n * p->head_dim_v;
        narrow_begin(w, r);
        keys = fa_span_joined(keys, r->keys);
    }
    for (fa_span span = next_tile(w, keys.begin, keys.end); span.begin < span.end;
         span = tile_after(w, span.end, keys.end)) {
        const key_tile tile = read_narrow_tile(w, span.begin, span.end);
        for (int n = 0; n < task->rows; n++) {
            const key_tile t = clipped(&tile, rows[n].keys.begin, rows[n].keys.end);
            if (t.begin < t.end) narrow_step(w, &rows[n], &t);
        }
    }
    for (int n = 0; n < task->rows; n++) narrow_end(w, &rows[n]);
}

static void attend(const fa_problem *problem, const fa_simd_task *task, void *scratch) {
    const fa_forward *p = &problem->forward;
    work w = {.problem = problem,
              .p = p,
              .biased = is_biased(problem),
              .entry = task->entry,
              .head_kv = task->head_kv,
              .group = p->heads / p->heads_kv};
    arena a = {scratch, 0};
    lay_out(&a, &w, problem, task->rows);
    w.blocks = (task->rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    w.scale = (real)p->scale;
    w.cap = (real)p->softcap;
    w.cap_factor = p->softcap > 0 ? (real)(2 * LOG2E / p->softcap) : 0;
    if (is_narrow(&w, task)) {
        begin_products(true);
        run_narrow(&w, task);
        end_products();
        return;
    }
    const bool excludes =
        p->mask.data || p->intervals.data || w.biased || p->left < FA_UNBOUNDED || p->right < FA_UNBOUNDED;
    begin_products(false);
    if (run(&w, task) && excludes) {
        w.contained = true;
        run(&w, task);
    }
    end_products();
}

/* ---- the vector functions alone ---- */

static void apply_exp2(const void *x, void *y, size_t count) {
    for (size_t n = 0; n + LANES <= count; n += LANES) v_store((real *)y + n, v_exp2(v_load((const real *)x + n)));
}

static void apply_tanh(const void *x, void *y, size_t count) {
    for (size_t n = 0; n + LANES <= count; n += LANES)
        v_store((real *)y + n, v_tanh_scaled(v_load((const real *)x + n) * (real)(2 * LOG2E)));
}

#define INSTANCE_NAME_(name) fa_simd_##name
#define INSTANCE_NAME(name)  INSTANCE_NAME_(name)

const fa_simd_instance INSTANCE_NAME(FA_INSTANCE) = {
    .block_rows = BLOCK_ROWS,
    .tile_m = FA_CPU_TILE_M,
    .tile_n = FA_CPU_TILE_N,
    .scratch_bytes = scratch_bytes,
    .attend = attend,
    .exp2 = apply_exp2,
    .tanh = apply_tanh,
};

#endif
