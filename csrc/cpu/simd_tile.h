/* Online softmax over one query tile: the body of an instance of cpu_simd.
 *
 * A tile of query rows is a few blocks of FA_CPU_MR vectors of rows. For each tile of FA_CPU_TILE_N keys and each
 * block: S^T = K Q^T                     (simd_gemm.h; Q holds the scale, so S is in units of log2) softcap, bias,
 * mask, window     (only where there are any) m' = max(m, max S);  P = 2^(S - m');  l = l 2^(m - m') + sum P;  O^T =
 * O^T 2^(m - m') + V^T P^T and at the end O / l and LSE = m ln 2 + ln l. A sink enters as a key of score sink and value
 * 0 before the first.
 *
 * Key tiles lie on a fixed grid, each row's sums run over keys in order within a tile, and keys outside a row's range
 * add an exact zero: a row's bits depend on its own inputs alone (and on the instruction set).
 */
#ifndef FA_CPU_SIMD_TILE_H
#define FA_CPU_SIMD_TILE_H

#include "cpu/cpu_simd.h"
#include "cpu/simd_gemm.h"
#include "cpu/simd_math.h"
#include "cpu/simd_pack.h"

#define BLOCK_ROWS (FA_CPU_MR * LANES)
#define LOG2E      1.4426950408889634
#define LN2        0.6931471805599453

/* Rows [first_row, first_row + rows) of the task's numbering, in `mr` vectors; pitch of its arrays: mr * LANES. */
typedef struct block {
    int64_t first_row;
    int rows, mr;
    int64_t first_query, last_query;
    int64_t key_begin, key_end; /* union of what its rows see through causal and window */
    real *q;                    /* (D, pitch), times `Score scale` */
    real *o;                    /* (Dv, pitch) */
    real maximum[BLOCK_ROWS], sum[BLOCK_ROWS];
} block;

/* One thread's view of a task. The arrays below `block` lie in its scratch. */
typedef struct work {
    const fa_problem *p;
    int64_t batch, head_kv, group;
    bool contained; /* keep NaN and Inf of excluded keys away from each row, at some cost */
    real q_factor;  /* folded into Q: the scores leave the product in log2 units, or ready for tanh */
    real cap;       /* softcap in log2 units; 0: none */
    int blocks;
    block *block;      /* [blocks] */
    real *scores;      /* (TILE_N, BLOCK_ROWS): S^T, then P^T */
    real *bias, *mask; /* (TILE_N, BLOCK_ROWS) */
    real *k, *v;       /* (TILE_N, D), (TILE_N, Dv): keys and values where they cannot be used in place */
    real *buffer;      /* for simd_pack.h: LANES rows of max(D, Dv, TILE_N) */
} work;

/* One key tile as the products read it. */
typedef struct key_tile {
    int64_t begin, end;
    const real *k, *v;
    int64_t k_pitch, v_pitch;
} key_tile;

static const char *element(const fa_operand *operand, fa_dtype dtype, int64_t a, int64_t b, int64_t c) {
    const int64_t *s = operand->stride;
    return (const char *)operand->data + (a * s[0] + b * s[1] + c * s[2]) * (int64_t)fa_dtype_size(dtype);
}

/* ---- where a block begins and what it sees ---- */

static int64_t query_of(const work *w, const block *b, int lane) {
    return (b->first_row + (lane < b->rows ? lane : b->rows - 1)) / w->group;
}

static int64_t head_of(const work *w, const block *b, int lane) {
    return w->head_kv * w->group + (b->first_row + (lane < b->rows ? lane : b->rows - 1)) % w->group;
}

static void block_begin(const work *w, block *b) {
    const fa_problem *p = w->p;
    const int pitch = b->mr * LANES;
    b->first_query = query_of(w, b, 0);
    b->last_query = query_of(w, b, b->rows - 1);
    const int64_t low = b->first_query + p->diagonal - p->left, high = b->last_query + p->diagonal + p->right + 1;
    b->key_begin = low > p->key_begin ? low : p->key_begin;
    b->key_end = high < p->key_end ? high : p->key_end;
    for (int m = 0; m < b->mr; m++) {
        const char *rows[LANES];
        for (int lane = 0; lane < LANES; lane++)
            rows[lane] =
                element(&p->q, p->dtype, w->batch, head_of(w, b, m * LANES + lane), query_of(w, b, m * LANES + lane));
        read_transposed(b->q + m * LANES, pitch, rows, p->dtype, p->q.stride[3], p->head_dim, w->q_factor, w->buffer);
    }
    memset(b->o, 0, (size_t)p->head_dim_v * (size_t)pitch * sizeof(real));
    for (int lane = 0; lane < pitch; lane++) {
        b->maximum[lane] = -(real)INFINITY;
        b->sum[lane] = 0;
        if (!p->sinks.data) continue;
        const real sink = load_one(p->sinks.data, p->sinks_dtype, head_of(w, b, lane) * p->sinks.stride[0]);
        b->maximum[lane] = sink * (real)LOG2E;
        b->sum[lane] = sink == -(real)INFINITY ? 0 : 1;
    }
}

/* ---- what is added to the scores ---- */

/* (keys, pitch) of bias or mask under the block; a mask reads as 0 and -inf. */
static void read_score_operand(const work *w, const block *b, const key_tile *t, const fa_operand *operand,
                               fa_dtype dtype, real *to) {
    const int64_t offset = t->begin * operand->stride[3] * (int64_t)fa_dtype_size(dtype);
    for (int m = 0; m < b->mr; m++) {
        const char *rows[LANES];
        for (int lane = 0; lane < LANES; lane++)
            rows[lane] =
                element(operand, dtype, w->batch, head_of(w, b, m * LANES + lane), query_of(w, b, m * LANES + lane)) +
                offset;
        read_transposed(to + m * LANES, b->mr * LANES, rows, dtype, operand->stride[3], (int)(t->end - t->begin), 1,
                        w->buffer);
    }
}

static bool all_excluded(const real *mask, int count) {
    vint seen = {0};
    for (int n = 0; n < count; n += LANES) seen |= v_load(mask + n) == 0;
    return !v_any(seen);
}

/* Applies softcap, bias, mask and window to S^T in place and gives the tile's maximum of each row. */
static void adjust_scores(const work *w, const block *b, const key_tile *t, bool windowed, real *maximum) {
    const fa_problem *p = w->p;
    const int pitch = b->mr * LANES, keys = (int)(t->end - t->begin);
    const vreal nothing = v_set1(-(real)INFINITY);
    for (int m = 0; m < b->mr; m++) {
        vint low = {0}, high = {0}; /* a lane sees keys [low, high) of the tile */
        for (int lane = 0; lane < LANES && windowed; lane++) {
            const int64_t centre = query_of(w, b, m * LANES + lane) + p->diagonal - t->begin;
            const int64_t from = centre - p->left, to = centre + p->right + 1;
            low[lane] = (integer)(from < 0 ? 0 : from > keys ? keys : from);
            high[lane] = (integer)(to < 0 ? 0 : to > keys ? keys : to);
        }
        vreal top = nothing;
        for (int n = 0; n < keys; n++) {
            real *at = w->scores + n * pitch + m * LANES;
            vreal s = v_load(at);
            if (w->cap > 0) s = v_tanh_scaled(s) * w->cap;
            if (p->bias.data) {
                const vreal bias = v_load(w->bias + n * pitch + m * LANES);
                s = v_select(bias == nothing, nothing, v_fma(bias, v_set1((real)LOG2E), s));
            }
            if (p->mask.data) s = v_select(v_load(w->mask + n * pitch + m * LANES) == 0, s, nothing);
            if (windowed) s = v_select((low <= (integer)n) & (high > (integer)n), s, nothing);
            top = v_max(s, top);
            v_store(at, s);
        }
        v_store(maximum + m * LANES, top);
    }
}

/* ---- one key tile against one block ---- */

/* S^T -> P^T in place; m and l move on; decay[lane] is what O must be multiplied by. `maximum` is the tile's. */
INLINE void soften(const int mr, block *b, real *scores, int keys, const real *maximum, real *decay, bool contained) {
    vreal origin[FA_CPU_MR], sum[FA_CPU_MR];
    UNROLL
    for (int m = 0; m < mr; m++) {
        const vreal before = v_load(b->maximum + m * LANES), top = v_max(v_load(maximum + m * LANES), before);
        origin[m] = v_select(top == -(real)INFINITY, v_set1(0), top); /* a row without a key yet */
        v_store(b->maximum + m * LANES, top);
        v_store(decay + m * LANES, v_exp2(before - origin[m]));
        sum[m] = v_set1(0);
    }
    for (int n = 0; n < keys; n++) UNROLL
    for (int m = 0; m < mr; m++) {
        real *at = scores + (n * mr + m) * LANES;
        const vreal s = v_load(at);
        vreal p = v_exp2(s - origin[m]);
        if (contained) p = v_select(s == -(real)INFINITY, v_set1(-(real)0), p);
        sum[m] += p;
        v_store(at, p);
    }
    UNROLL
    for (int m = 0; m < mr; m++)
        v_store(b->sum + m * LANES, v_fma(v_load(b->sum + m * LANES), v_load(decay + m * LANES), sum[m]));
}

INLINE void block_step(const int mr, const work *w, block *b, const key_tile *t, bool windowed) {
    const fa_problem *p = w->p;
    const int keys = (int)(t->end - t->begin), pitch = mr * LANES;
    real maximum[BLOCK_ROWS], decay[BLOCK_ROWS];
    for (int lane = 0; lane < pitch; lane++) maximum[lane] = -(real)INFINITY;
    if (p->mask.data) {
        read_score_operand(w, b, t, &p->mask, FA_BOOL, w->mask);
        if (all_excluded(w->mask, keys * pitch)) return;
    }
    multiply_scores(mr, b->q, t->k, t->k_pitch, p->head_dim, keys, w->scores, maximum);
    if (p->bias.data) read_score_operand(w, b, t, &p->bias, p->bias_dtype, w->bias);
    if (windowed || w->cap > 0 || p->bias.data || p->mask.data) adjust_scores(w, b, t, windowed, maximum);
    if (w->contained) {
        soften(mr, b, w->scores, keys, maximum, decay, true);
        multiply_values_contained(mr, w->scores, t->v, t->v_pitch, keys, p->head_dim_v, b->o, decay);
    } else {
        soften(mr, b, w->scores, keys, maximum, decay, false);
        multiply_values(mr, w->scores, t->v, t->v_pitch, keys, p->head_dim_v, b->o, decay);
    }
}

static void block_step_1(const work *w, block *b, const key_tile *t, bool windowed) {
    block_step(1, w, b, t, windowed);
}
#if FA_CPU_MR >= 2
static void block_step_2(const work *w, block *b, const key_tile *t, bool windowed) {
    block_step(2, w, b, t, windowed);
}
#endif
#if FA_CPU_MR >= 3
static void block_step_3(const work *w, block *b, const key_tile *t, bool windowed) {
    block_step(3, w, b, t, windowed);
}
#endif
#if FA_CPU_MR >= 4
static void block_step_4(const work *w, block *b, const key_tile *t, bool windowed) {
    block_step(4, w, b, t, windowed);
}
#endif

static void (*const block_steps[])(const work *, block *, const key_tile *, bool) = {
    block_step_1,
#if FA_CPU_MR >= 2
    block_step_2,
#endif
#if FA_CPU_MR >= 3
    block_step_3,
#endif
#if FA_CPU_MR >= 4
    block_step_4,
#endif
};

/* ---- key tiles ---- */

/* Rows [begin, end) of K or V: in place where the products can read them, else converted into `copy`. Rows that lie far
 * apart are copied too: at power-of-two distances they would fall into a few sets of the first-level cache. */
static const real *key_rows(const work *w, const fa_operand *operand, int64_t begin, int64_t end, int dim, real *copy,
                            int64_t *pitch) {
    const int64_t stride = operand->stride[2];
    const fa_dtype dtype = w->p->dtype;
    const char *from = element(operand, dtype, w->batch, w->head_kv, begin);
    if (dtype == REAL_DTYPE && (operand->stride[3] == 1 || dim == 1) && stride >= 0 && stride <= 2 * dim) {
        *pitch = stride;
        return (const real *)from;
    }
    *pitch = dim;
    for (int64_t n = 0; n < end - begin; n++)
        read_row(copy + n * dim, from + n * stride * (int64_t)fa_dtype_size(dtype), dtype, operand->stride[3], dim);
    return copy;
}

static void tile_step(work *w, int64_t begin, int64_t end) {
    const fa_problem *p = w->p;
    int64_t k_pitch, v_pitch;
    const real *k = key_rows(w, &p->k, begin, end, p->head_dim, w->k, &k_pitch);
    const real *v = key_rows(w, &p->v, begin, end, p->head_dim_v, w->v, &v_pitch);
    for (int n = 0; n < w->blocks; n++) {
        block *b = &w->block[n];
        key_tile t = {.begin = begin > b->key_begin ? begin : b->key_begin,
                      .end = end < b->key_end ? end : b->key_end,
                      .k_pitch = k_pitch,
                      .v_pitch = v_pitch};
        if (t.begin >= t.end) continue;
        t.k = k + (t.begin - begin) * k_pitch;
        t.v = v + (t.begin - begin) * v_pitch;
        const bool windowed =
            b->last_query + p->diagonal - p->left > t.begin || b->first_query + p->diagonal + p->right + 1 < t.end;
        block_steps[b->mr - 1](w, b, &t, windowed);
    }
}

/* ---- results ---- */

/* Normalises and writes a block. True when a NaN was met. */
static bool block_end(const work *w, block *b) {
    const fa_problem *p = w->p;
    const int pitch = b->mr * LANES;
    vint nan = {0};
    for (int m = 0; m < b->mr; m++) {
        const vreal sum = v_load(b->sum + m * LANES);
        for (int c = 0; c < p->head_dim_v; c++) {
            real *at = b->o + c * pitch + m * LANES;
            const vreal value = v_select(sum == 0, v_set1(0), v_load(at) / sum);
            nan |= value != value;
            v_store(at, value);
        }
    }
    for (int m = 0; m * LANES < b->rows; m++) {
        const int lanes = b->rows - m * LANES < LANES ? b->rows - m * LANES : LANES;
        char *rows[LANES];
        for (int lane = 0; lane < lanes; lane++)
            rows[lane] = (char *)element(&p->out, p->dtype, w->batch, head_of(w, b, m * LANES + lane),
                                         query_of(w, b, m * LANES + lane));
        write_transposed(rows, lanes, p->dtype, p->out.stride[3], b->o + m * LANES, pitch, p->head_dim_v, w->buffer);
    }
    for (int lane = 0; lane < b->rows && p->lse; lane++) {
        const double lse = b->sum[lane] == 0 ? -INFINITY : b->maximum[lane] * LN2 + log(b->sum[lane]);
        ((real *)p->lse)[(w->batch * p->heads + head_of(w, b, lane)) * p->seq_q + query_of(w, b, lane)] = (real)lse;
    }
    return v_any(nan);
}

/* ---- a task ---- */

static size_t rounded(size_t bytes) { return (bytes + 255) / 256 * 256; }

/* Hands out consecutive pieces of the scratch; with base NULL only their sizes add up. */
typedef struct arena {
    char *base;
    size_t used;
} arena;

static void *take(arena *a, size_t count, size_t size) {
    void *piece = a->base ? a->base + a->used : NULL;
    a->used += rounded(count * size);
    return piece;
}

static void lay_out(arena *a, work *w, const fa_problem *p, int tile_m) {
    const int blocks = (tile_m + BLOCK_ROWS - 1) / BLOCK_ROWS;
    int widest = p->head_dim > p->head_dim_v ? p->head_dim : p->head_dim_v;
    if (widest < FA_CPU_TILE_N) widest = FA_CPU_TILE_N;
    const size_t scores = (size_t)FA_CPU_TILE_N * BLOCK_ROWS;
    w->block = take(a, (size_t)blocks, sizeof *w->block);
    w->scores = take(a, scores, sizeof(real));
    w->bias = take(a, p->bias.data ? scores : 0, sizeof(real));
    w->mask = take(a, p->mask.data ? scores : 0, sizeof(real));
    w->k = take(a, (size_t)FA_CPU_TILE_N * (size_t)p->head_dim, sizeof(real));
    w->v = take(a, (size_t)FA_CPU_TILE_N * (size_t)p->head_dim_v, sizeof(real));
    w->buffer = take(a, (size_t)LANES * (size_t)padded(widest), sizeof(real));
    for (int n = 0; n < blocks; n++) {
        real *q = take(a, (size_t)BLOCK_ROWS * (size_t)p->head_dim, sizeof(real));
        real *o = take(a, (size_t)BLOCK_ROWS * (size_t)p->head_dim_v, sizeof(real));
        if (a->base) w->block[n].q = q, w->block[n].o = o;
    }
}

static size_t scratch_bytes(const fa_problem *p, int tile_m) {
    arena a = {NULL, 0};
    work w;
    lay_out(&a, &w, p, tile_m);
    return a.used;
}

/* Runs the blocks over all their key tiles. True when a NaN was met. */
static bool run(work *w, const fa_simd_task *task) {
    const fa_problem *p = w->p;
    int64_t begin = p->key_end, end = p->key_begin;
    for (int n = 0; n < w->blocks; n++) {
        block *b = &w->block[n];
        const int row = n * BLOCK_ROWS, left = task->rows - row;
        b->first_row = task->first_row + row;
        b->rows = left < BLOCK_ROWS ? left : BLOCK_ROWS;
        b->mr = (b->rows + LANES - 1) / LANES;
        block_begin(w, b);
        if (b->key_begin < begin) begin = b->key_begin;
        if (b->key_end > end) end = b->key_end;
    }
    while (begin < end) {
        const int64_t grid = (begin / FA_CPU_TILE_N + 1) * FA_CPU_TILE_N, stop = grid < end ? grid : end;
        tile_step(w, begin, stop);
        begin = stop;
    }
    bool nan = false;
    for (int n = 0; n < w->blocks; n++) nan |= block_end(w, &w->block[n]);
    return nan;
}

static void attend(const fa_problem *p, const fa_simd_task *task, void *scratch) {
    work w = {.p = p, .batch = task->batch, .head_kv = task->head_kv, .group = p->heads / p->heads_kv};
    arena a = {scratch, 0};
    lay_out(&a, &w, p, task->rows);
    w.blocks = (task->rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    w.cap = (real)(p->softcap * LOG2E);
    w.q_factor = (real)(p->softcap > 0 ? p->scale / p->softcap * 2 * LOG2E : p->scale * LOG2E);
    const bool excludes = p->mask.data || p->bias.data || p->left < FA_UNBOUNDED || p->right < FA_UNBOUNDED;
    if (run(&w, task) && excludes) {
        w.contained = true;
        run(&w, task);
    }
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
