/* Gradients of a chunk of keys, of the rows of dq and of a bias: the body of an instance of cpu_simd_backward. */
#ifndef FA_CPU_SIMD_GRADIENT_H
#define FA_CPU_SIMD_GRADIENT_H

#include <string.h>

#include "cpu/gradient.h"
#include "cpu/simd_pairs.h"

/* ---- scratch ---- */

static int widest(const fa_forward *f) {
    const int dim = f->head_dim > f->head_dim_v ? f->head_dim : f->head_dim_v;
    return dim > CHUNK ? dim : CHUNK;
}

static void lay_out(arena *a, work *w, const fa_problem *problem) {
    const fa_backward *p = &problem->backward;
    const fa_forward *f = &p->forward;
    const size_t d = (size_t)f->head_dim, dv = (size_t)f->head_dim_v, tile = (size_t)TILE * BLOCK_ROWS;
    w->kt = take(a, CHUNK * d, sizeof(real));
    w->vt = take(a, CHUNK * dv, sizeof(real));
    w->panels = take(a, CHUNK * (size_t)padded(f->head_dim), sizeof(real));
    w->dkt = take(a, CHUNK * d, sizeof(real));
    w->dvt = take(a, CHUNK * dv, sizeof(real));
    w->q_copy = take(a, TILE * d, sizeof(real));
    w->dout_copy = take(a, TILE * dv, sizeof(real));
    w->lse = take(a, TILE, sizeof(real));
    w->delta = take(a, TILE, sizeof(real));
    w->weight = take(a, tile, sizeof(real));
    w->slope = take(a, tile, sizeof(real));
    w->bias = take(a, is_biased(problem) ? tile : 0, sizeof(real));
    w->mask = take(a, f->mask.data ? tile : 0, sizeof(real));
    w->factors = take(a, problem->forward.dropout.threshold ? (size_t)TILE * DROPOUT_ROOM(CHUNK) : 0, sizeof(real));
    w->dt = take(a, (size_t)TILE * CHUNK, sizeof(real));
    w->part = take(a, tile, sizeof(real));
    w->buffer = take(a, (size_t)LANES * (size_t)padded(widest(f)), sizeof(real));
    w->total = take(a, p->wants >> FA_GRAD_BIAS & 1 ? (size_t)TILE * CHUNK : 0, sizeof(double));
}

static size_t scratch_bytes(const fa_problem *problem) {
    arena a = {NULL, 0};
    work w;
    lay_out(&a, &w, problem);
    return a.used;
}

static work work_on(const fa_problem *problem, void *scratch) {
    const fa_forward *f = &problem->forward;
    work w = {.p = &problem->backward, .biased = is_biased(problem), .scale = (real)f->scale, .cap = (real)f->softcap};
    arena a = {scratch, 0};
    lay_out(&a, &w, problem);
    w.cap_factor = f->softcap > 0 ? (real)(2 * LOG2E / f->softcap) : 0;
    w.excludes = f->mask.data || f->intervals.data || w.biased || f->left < FA_UNBOUNDED || f->right < FA_UNBOUNDED;
    return w;
}

/* ---- dq ---- */

static int dq_width(const fa_backward *p) { return padded(p->forward.head_dim); }

static size_t dq_bytes(const fa_backward *p) {
    const fa_forward *f = &p->forward;
    return rounded((size_t)fa_group(f) * (size_t)f->seq_q * (size_t)dq_width(p) * sizeof(real));
}

/* Rows of the tile: the share of the keys [begin, end) of the chunk. */
static void add_tile(work *w, real *dq, bool add, int begin, int end) {
    const int width = dq_width(w->p), depth = end - begin;
    for (int first = 0; first < width; first += BLOCK_ROWS) {
        const int mr = vectors_of(width - first), lanes = mr * LANES;
        const real *panel = w->panels + (int64_t)first * CHUNK + begin * lanes;
        (w->keys_finite ? scores : scores_contained)(mr, panel, w->dt + begin, CHUNK, depth, w->rows, w->scale,
                                                     w->part);
        for (int n = 0; n < w->rows; n++)
            for (int m = 0; m < mr; m++) {
                real *to = dq + (int64_t)n * width + first + m * LANES;
                const vreal share = v_load(w->part + (n * mr + m) * LANES);
                v_store(to, add ? v_load(to) + share : share);
            }
    }
}

static void add_dq(const fa_backward *p, void *to, const void *from, int64_t begin, int64_t end) {
    const int64_t width = dq_width(p);
    real *a = (real *)to + begin * width;
    const real *b = (const real *)from + begin * width;
    for (int64_t n = 0; n < (end - begin) * width; n += LANES) v_store(a + n, v_load(a + n) + v_load(b + n));
}

/* ---- results ---- */

/* Row i of dq, dk or dv, `values` of them, contiguous; they are overwritten. */
static void write_gradient(const fa_backward *p, fa_grad grad, int64_t b, int64_t h, int64_t i, real *row, int count,
                           real *buffer) {
    const fa_operand *to = &p->grad[grad];
    const fa_dtype dtype = p->grad_dtype[grad];
    char *at = (char *)element(to, dtype, b, h, i);
    if (p->accumulate) {
        read_row(buffer, at, dtype, to->stride[3], count);
        for (int d = 0; d < count; d++) row[d] += buffer[d];
    }
    write_row(at, dtype, to->stride[3], row, count);
}

static void write_dq(const fa_backward *p, int64_t batch, int64_t head_kv, const void *dq, int64_t begin, int64_t end,
                     void *scratch) {
    const fa_forward *f = &p->forward;
    const int64_t group = fa_group(f);
    real *row = scratch, *buffer = row + padded(widest(f));
    for (int64_t r = begin; r < end; r++) {
        memcpy(row, (const real *)dq + r * dq_width(p), (size_t)f->head_dim * sizeof(real));
        write_gradient(p, FA_GRAD_Q, batch, head_kv * group + r / f->seq_q, r % f->seq_q, row, f->head_dim, buffer);
    }
}

/* dk or dv of all keys [begin, end), of which those of the chunk have sums and the others 0. */
static void write_keys(work *w, fa_grad grad, int64_t begin, int64_t end, const real *sums, int dim, real scale) {
    real *rows = w->buffer, *old = w->dt;
    for (int64_t j = begin; j < end; j++) {
        const int64_t n = j - w->key;
        if (n >= 0 && n < w->keys && n % LANES) continue; /* with the first of its vector */
        if (n < 0 || n >= w->keys) {
            memset(rows, 0, (size_t)dim * sizeof(real));
            write_gradient(w->p, grad, w->batch, w->head_kv, j, rows, dim, old);
            continue;
        }
        const int64_t block = n / BLOCK_ROWS * BLOCK_ROWS;
        const int pitch = vectors_of((int)(w->keys - block)) * LANES, width = padded(dim);
        const real *from = sums + block * dim + (n - block);
        transpose_lanes(from, pitch, dim, rows);
        for (int e = 0; e < LANES * width; e += LANES) v_store(rows + e, v_load(rows + e) * scale);
        for (int lane = 0; lane < LANES && n + lane < w->keys; lane++)
            write_gradient(w->p, grad, w->batch, w->head_kv, j + lane, rows + lane * width, dim, old);
    }
}

/* ---- a chunk ---- */

static void queries(const fa_backward *p, int64_t chunk, int64_t *begin, int64_t *end) {
    const fa_forward *f = &p->forward;
    work w = {.p = p};
    set_chunk(&w, 0, 0, chunk);
    const int64_t from = w.key - f->diagonal - f->right, to = w.key + w.keys - f->diagonal + f->left;
    *begin = from > 0 ? from / TILE * TILE : 0;
    *end = to >= f->seq_q ? f->seq_q : (to + TILE - 1) / TILE * TILE;
    if (*end > f->seq_q) *end = f->seq_q;
    if (!w.keys || *end < *begin) *begin = *end = 0;
}

static void chunk_gradients(const fa_problem *problem, const fa_gradient_task *task, void *scratch) {
    const fa_backward *p = &problem->backward;
    const fa_forward *f = &p->forward;
    const int64_t group = fa_group(f), first = task->chunk * CHUNK;
    const int64_t past = first + CHUNK < f->seq_k ? first + CHUNK : f->seq_k;
    int64_t row_begin, row_end;
    work w = work_on(problem, scratch);
    w.dq = task->dq;
    w.dk = p->wants >> FA_GRAD_K & 1;
    w.dv = p->wants >> FA_GRAD_V & 1;
    set_chunk(&w, task->batch, task->head_kv, task->chunk);
    if (w.keys) read_chunk(&w);
    queries(p, task->chunk, &row_begin, &row_end);
    for (int64_t h = 0; h < group; h++)
        for (int64_t row = row_begin; row < row_end && !fa_stopped(problem); row += TILE) {
            int begin, end;
            real *dq = (real *)task->dq + (w.dq ? (h * f->seq_q + row) * dq_width(p) : 0);
            set_tile(&w, task->head_kv * group + h, row);
            if (seen_keys(&w, &begin, &end)) {
                read_tile(&w);
                tile_step(&w, begin, end);
                if (w.dq) add_tile(&w, dq, task->add, begin, end);
            } else if (w.dq && !task->add) {
                memset(dq, 0, (size_t)w.rows * (size_t)dq_width(p) * sizeof(real));
            }
        }
    if (w.dk) write_keys(&w, FA_GRAD_K, first, past, w.dkt, f->head_dim, w.scale);
    if (w.dv) write_keys(&w, FA_GRAD_V, first, past, w.dvt, f->head_dim_v, 1);
}

/* ---- dbias ---- */

/* Parts of dbias along an axis of (B, H, tiles of Sq, chunks of Sk), and what a part sums over. */
static int64_t parts_along(const fa_backward *p, int axis, bool summed) {
    const fa_forward *f = &p->forward;
    const int64_t extent[4] = {f->batch, f->heads, (f->seq_q + TILE - 1) / TILE, (f->seq_k + CHUNK - 1) / CHUNK};
    return summed ? 1 : extent[axis];
}

static int64_t bias_parts(const fa_backward *p) {
    int64_t parts = 1;
    for (int axis = 0; axis < 4; axis++) parts *= parts_along(p, axis, p->bias_sums >> axis & 1);
    return parts;
}

/* Adds dS of a chunk and a tile to the totals, a row for all where queries are summed. */
static void add_bias(work *w, int begin, int end) {
    const bool one_row = w->p->bias_sums >> 2 & 1;
    for (int n = 0; n < w->rows; n++) {
        double *to = w->total + (one_row ? 0 : n) * CHUNK;
        for (int j = begin; j < end; j++) to[w->key % CHUNK + j] += w->dt[n * CHUNK + j];
    }
}

static void write_bias(const work *w, const int64_t own[4]) {
    const fa_backward *p = w->p;
    const fa_forward *f = &p->forward;
    const bool one_row = p->bias_sums >> 2 & 1, one_key = p->bias_sums >> 3 & 1;
    const int64_t row = own[2] * TILE, key = own[3] * CHUNK;
    for (int64_t n = 0; n < (one_row ? 1 : f->seq_q - row) && n < TILE; n++) {
        const double *from = w->total + n * CHUNK;
        double sum = 0;
        for (int64_t j = 0; j < (one_key ? CHUNK : f->seq_k - key) && j < CHUNK; j++) {
            const int64_t at = fa_at(&p->grad[FA_GRAD_BIAS], own[0], own[1], row + n, key + j);
            if (one_key)
                sum += from[j];
            else
                fa_write_gradient(p, FA_GRAD_BIAS, at, from[j]);
        }
        if (one_key) fa_write_gradient(p, FA_GRAD_BIAS, fa_at(&p->grad[FA_GRAD_BIAS], own[0], own[1], row + n, 0), sum);
    }
}

/* Adds the tiles [tile, past) of queries of a head and a chunk to the totals in `scratch`. */
static void add_chunk(const fa_problem *problem, int64_t batch, int64_t head, int64_t chunk, int64_t tile, int64_t past,
                      void *scratch) {
    const fa_forward *f = &problem->forward;
    work w = work_on(problem, scratch);
    w.dbias = true;
    set_chunk(&w, batch, head / fa_group(f), chunk);
    if (!w.keys) return;
    read_chunk(&w);
    for (; tile < past && tile * TILE < f->seq_q && !fa_stopped(problem); tile++) {
        int begin, end;
        set_tile(&w, head, tile * TILE);
        if (!seen_keys(&w, &begin, &end)) continue;
        read_tile(&w);
        tile_step(&w, begin, end);
        add_bias(&w, begin, end);
    }
}

static void bias_gradient(const fa_problem *problem, int64_t part, void *scratch) {
    const fa_backward *p = &problem->backward;
    int64_t own[4], first[4], past[4];
    for (int axis = 3; axis >= 0; axis--) {
        const bool summed = p->bias_sums >> axis & 1;
        const int64_t parts = parts_along(p, axis, summed);
        own[axis] = part % parts, part /= parts;
        first[axis] = own[axis], past[axis] = summed ? parts_along(p, axis, false) : own[axis] + 1;
    }
    const work w = work_on(problem, scratch);
    memset(w.total, 0, (size_t)TILE * CHUNK * sizeof *w.total);
    for (int64_t b = first[0]; b < past[0]; b++) {
        fa_problem alone;
        int64_t at = b; /* the entry, of `of` */
        const fa_problem *of = fa_cpu_padded(problem, &at, &alone);
        for (int64_t h = first[1]; h < past[1]; h++)
            for (int64_t chunk = first[3]; chunk < past[3]; chunk++)
                add_chunk(of, at, h, chunk, first[2], past[2], scratch);
    }
    write_bias(&w, own);
}

#define INSTANCE_NAME_(name) fa_gradient_##name
#define INSTANCE_NAME(name)  INSTANCE_NAME_(name)

const fa_gradient_instance INSTANCE_NAME(FA_INSTANCE) = {
    .chunk = CHUNK,
    .tile = TILE,
    .scratch_bytes = scratch_bytes,
    .dq_bytes = dq_bytes,
    .queries = queries,
    .chunk_gradients = chunk_gradients,
    .add_dq = add_dq,
    .write_dq = write_dq,
    .bias_parts = bias_parts,
    .bias_gradient = bias_gradient,
};

#endif
