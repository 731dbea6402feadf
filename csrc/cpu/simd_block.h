/* A block of query rows, FA_CPU_MR vectors wide, and its online softmax. For each tile of keys:
 *   S^T = K Q^T                     (simd_gemm.h; times the scale)
 *   softcap, bias, ALiBi, mask, window, intervals     (only where there are any)
 *   m' = max(m, max S);  P = e^(S - m');  l = l e^(m - m') + sum P;  O^T = O^T e^(m - m') + V^T P^T
 * and at the end O / l and LSE = m + ln l. A sink enters as a key of score sink and value 0 before the first.
 *
 * Each row's sums run over the keys in order within a tile, and a key that the row does not see adds an exact zero.
 */
#ifndef FA_CPU_SIMD_BLOCK_H
#define FA_CPU_SIMD_BLOCK_H

#include <math.h>
#include <string.h>

#include "cpu/alibi.h"
#include "cpu/cpu_simd.h"
#include "cpu/intervals.h"
#include "cpu/limit.h"
#include "cpu/max_logit.h"
#include "cpu/simd_dropout.h"
#if FA_CPU_AMX
#include "cpu/simd_amx.h"
#else
#include "cpu/simd_gemm.h"
#endif
#include "cpu/simd_math.h"

/* Rows [first_row, first_row + rows) of the task's numbering, in `mr` vectors; pitch of its arrays: mr * LANES. */
typedef struct block {
    int64_t first_row;
    int rows, mr;
    int64_t query[BLOCK_ROWS], head[BLOCK_ROWS]; /* of each lane; lanes past `rows` repeat the last row */
    int64_t position[BLOCK_ROWS];                /* where the query stands among the keys */
    fa_span keys, common;     /* that some row of it sees through causal, window and intervals, that every one does */
    fa_held held[BLOCK_ROWS]; /* by the intervals of each lane, cut to what causal and window leave it */
    real *q;                  /* (D, pitch) */
    real *o;                  /* (Dv, pitch) */
    real maximum[BLOCK_ROWS], sum[BLOCK_ROWS];
    real logit[BLOCK_ROWS]; /* the largest scaled product of each lane, where max_logit is wanted */
} block;

/* One thread's view of a task. The arrays below `block` lie in its scratch. */
typedef struct work {
    const fa_problem *problem;
    const fa_forward *p;
    const fa_cpu_entry *entry;
    int64_t head_kv, group;
    bool biased;    /* by a bias or by ALiBi, which becomes a part of it */
    bool contained; /* keep NaN and Inf of excluded keys away from each row, at some cost */
    real scale;
    real cap, cap_factor; /* softcap, 0: none; what makes of a score what v_tanh_scaled() takes */
    int blocks;
    block *block;      /* [blocks] */
    real *scores;      /* (TILE_N, BLOCK_ROWS): S^T, then P^T */
    real *joined;      /* (JOINED_ROOM(TILE_N), BLOCK_ROWS): P^T where the product with V takes it from elsewhere */
    real *bias, *mask; /* (TILE_N, BLOCK_ROWS) */
    real *factors;     /* LANES rows for dropout_row(), then (TILE_N, LANES) */
    key_number *k;     /* keys and values where they cannot be used in place */
    value_number *v;
#if FA_CPU_AMX
    const char
        *value_rows[FA_CPU_TILE_N]; /* of a narrow task: the rows of V of its tile, which begins at `value_begin` */
    int64_t value_begin;
#endif
    real *buffer;   /* for simd_pack.h: LANES rows of max(D, Dv, TILE_N) */
    int64_t *page;  /* of paged keys: the pages of a tile, as the table had them; */
    int64_t column; /* the first of them is that of this column */
} work;

/* One key tile as the products read it. */
typedef struct key_tile {
    int64_t begin, end;
    const key_number *k;
    const value_number *v;
    int64_t k_pitch, v_pitch;
} key_tile;

/* ---- where a block begins and what it sees ---- */

static const char *row_of(const work *w, const block *b, int lane, const fa_operand *operand, fa_dtype dtype) {
    return element(operand, dtype, w->entry->batch, b->head[lane], w->entry->entry.first_q + b->query[lane]);
}

/* A row's maximum before its first key: the sink of its head, or -inf. */
static real first_maximum(const fa_forward *p, int64_t head) {
    if (!p->sinks.data) return -(real)INFINITY;
    return (real)fa_bounded(load_one(p->sinks.data, p->sinks_dtype, head * p->sinks.stride[0]), REAL_DTYPE);
}

/* Intervals: what each lane sees, and some, and every one through one of its intervals. */
static void hold_keys(const work *w, block *b) {
    const fa_forward *p = w->p;
    fa_span keys = {0, 0}, common = b->common;
    for (int lane = 0; lane < b->mr * LANES; lane++) {
        const fa_span seen = fa_row_keys(&w->entry->entry, p->left, p->right, b->position[lane]);
        fa_held *held = &b->held[lane];
        *held = fa_held_keys(p, w->entry->batch, b->head[lane], b->query[lane]);
        for (int n = 0; n < 2; n++) held->of[n] = fa_span_cut(held->of[n], seen);
        const fa_span *longer = &held->of[held->of[1].end - held->of[1].begin > held->of[0].end - held->of[0].begin];
        keys = fa_span_joined(keys, fa_held_within(held, b->keys));
        common = fa_span_cut(common, *longer);
    }
    b->keys = keys, b->common = common;
}

/* Whether the intervals of some lane hold keys of [begin, end). */
static bool holds_some(const block *b, int64_t begin, int64_t end) {
    for (int lane = 0; lane < b->mr * LANES; lane++)
        for (int n = 0; n < 2; n++)
            if (b->held[lane].of[n].begin < end && b->held[lane].of[n].end > begin) return true;
    return false;
}

static void block_begin(const work *w, block *b) {
    const fa_forward *p = w->p;
    const fa_entry *e = &w->entry->entry;
    const int pitch = b->mr * LANES;
    int64_t first = 0, last = 0; /* position */
    const bool held = w->problem->forward.intervals.data;
    for (int lane = 0; lane < pitch; lane++) {
        const int64_t row = b->first_row + (lane < b->rows ? lane : b->rows - 1);
        b->query[lane] = row / w->group;
        b->head[lane] = w->head_kv * w->group + row % w->group;
        b->position[lane] = fa_position(e, b->query[lane]);
        if (lane == 0 || b->position[lane] < first) first = b->position[lane];
        if (lane == 0 || b->position[lane] > last) last = b->position[lane];
    }
    b->keys = fa_tile_keys(e, p->left, p->right, first, last);
    b->common = fa_common_keys(e, p->left, p->right, first, last);
    if (held) hold_keys(w, b);
    for (int m = 0; m < b->mr; m++) {
        const char *rows[LANES];
        for (int lane = 0; lane < LANES; lane++) rows[lane] = row_of(w, b, m * LANES + lane, &p->q, p->dtype);
        read_queries(b->q + m * LANES, pitch, rows, p->dtype, p->q.stride[3], p->head_dim, w->buffer);
    }
    memset(b->o, 0, (size_t)OUT_ROOM(p->head_dim_v) * (size_t)pitch * sizeof(real));
    for (int lane = 0; lane < pitch; lane++) {
        b->maximum[lane] = first_maximum(p, b->head[lane]);
        b->sum[lane] = b->maximum[lane] == -(real)INFINITY ? 0 : 1;
        b->logit[lane] = -(real)INFINITY;
    }
}

/* ---- what is added to the scores ---- */

/* (keys, pitch) of bias or mask under the block; a mask reads as 0 and -inf. */
static void read_score_operand(const work *w, const block *b, const key_tile *t, const fa_operand *operand,
                               fa_dtype dtype, real *to) {
    const int64_t offset = t->begin * operand->stride[3] * (int64_t)fa_dtype_size(dtype);
    for (int m = 0; m < b->mr; m++) {
        const char *rows[LANES];
        for (int lane = 0; lane < LANES; lane++) rows[lane] = row_of(w, b, m * LANES + lane, operand, dtype) + offset;
        read_transposed(to + m * LANES, b->mr * LANES, rows, dtype, operand->stride[3], (int)(t->end - t->begin),
                        w->buffer);
    }
}

/* The block's bias, or 0, less slope * |key - position|. */
static void add_alibi(const work *w, const block *b, const key_tile *t) {
    const int pitch = b->mr * LANES, keys = (int)(t->end - t->begin);
    for (int m = 0; m < b->mr; m++) {
        vreal slope = {0}, first = {0}; /* of each lane: its distance to the first key */
        for (int lane = 0; lane < LANES; lane++) {
            slope[lane] = (real)fa_slope(&w->problem->forward, w->entry->batch, b->head[m * LANES + lane]);
            first[lane] = (real)(t->begin - b->position[m * LANES + lane]);
        }
        for (int n = 0; n < keys; n++) {
            real *at = w->bias + n * pitch + m * LANES;
            const vreal bias = w->p->bias.data ? v_bounded(v_load(at)) : v_set1(0);
            v_store(at, v_with_alibi(bias, slope, first + (real)n));
        }
    }
}

static bool all_excluded(const real *mask, int count) {
    vint seen = {0};
    for (int n = 0; n < count; n += LANES) seen |= v_load(mask + n) == 0;
    return !v_any(seen);
}

/* Keys [low, high) of a tile that a lane sees, twice: through causal and window, or through one interval or another. */
typedef struct lanes_seen {
    vint low[2], high[2];
} lanes_seen;

static lanes_seen seen_by(const work *w, const block *b, const key_tile *t, int first) {
    const int64_t keys = t->end - t->begin;
    lanes_seen seen = {0};
    for (int lane = 0; lane < LANES; lane++) {
        const fa_forward *p = w->p;
        const int64_t position = b->position[first + lane];
        const fa_held window = {{fa_row_keys(&w->entry->entry, p->left, p->right, position), {0, 0}}};
        const fa_held *held = w->problem->forward.intervals.data ? &b->held[first + lane] : &window;
        for (int n = 0; n < 2; n++) {
            seen.low[n][lane] = (integer)fa_clamp(held->of[n].begin - t->begin, 0, keys);
            seen.high[n][lane] = (integer)fa_clamp(held->of[n].end - t->begin, 0, keys);
        }
    }
    return seen;
}

INLINE vint is_seen(const lanes_seen *seen, int key, bool two) {
    const vint one = (seen->low[0] <= (integer)key) & (seen->high[0] > (integer)key);
    return two ? one | ((seen->low[1] <= (integer)key) & (seen->high[1] > (integer)key)) : one;
}

/* Raises each lane's largest product by those of the tile's keys that it sees. Before adjust_scores(). */
static void raise_logits(const work *w, block *b, const key_tile *t, bool windowed) {
    const fa_forward *p = w->p;
    const int pitch = b->mr * LANES, keys = (int)(t->end - t->begin);
    const vreal nothing = v_set1(-(real)INFINITY);
    for (int m = 0; m < b->mr; m++) {
        lanes_seen seen = {0};
        if (windowed) seen = seen_by(w, b, t, m * LANES);
        vreal top = v_load(b->logit + m * LANES);
        for (int n = 0; n < keys; n++) {
            const int at = n * pitch + m * LANES;
            vreal s = v_load(w->scores + at);
            if (w->biased) s = v_select(v_load(w->bias + at) == nothing, nothing, s);
            if (p->mask.data) s = v_select(v_load(w->mask + at) == 0, s, nothing);
            if (windowed) s = v_select(is_seen(&seen, n, p->intervals_count == 2), s, nothing);
            top = v_max(s, top);
        }
        v_store(b->logit + m * LANES, top);
    }
}

/* Applies softcap, bias, mask, window and intervals to S^T in place and gives the tile's maximum of each row. */
static void adjust_scores(const work *w, const block *b, const key_tile *t, bool windowed, real *maximum) {
    const fa_forward *p = w->p;
    const int pitch = b->mr * LANES, keys = (int)(t->end - t->begin);
    const vreal nothing = v_set1(-(real)INFINITY);
    for (int m = 0; m < b->mr; m++) {
        lanes_seen seen = {0};
        if (windowed) seen = seen_by(w, b, t, m * LANES);
        vreal top = nothing;
        for (int n = 0; n < keys; n++) {
            real *at = w->scores + n * pitch + m * LANES;
            vreal s = v_load(at);
            if (w->cap > 0) s = v_tanh_scaled(s * w->cap_factor) * w->cap;
            if (w->biased) {
                const vreal bias = v_load(w->bias + n * pitch + m * LANES);
                s = v_select(bias == nothing, nothing, v_bounded(bias) + s);
            }
            if (p->mask.data) s = v_select(v_load(w->mask + n * pitch + m * LANES) == 0, s, nothing);
            if (windowed) s = v_select(is_seen(&seen, n, p->intervals_count == 2), s, nothing);
            top = v_max(s, top);
            v_store(at, s);
        }
        v_store(maximum + m * LANES, top);
    }
}

/* ---- one key tile against one block ---- */

/* The weight of a key; of one that the row does not see, whose score is -inf, 0 or, where NaN has to be contained,
 * -0.0. */
INLINE vreal weight_at(const real *score, vreal origin, const bool contained) {
    const vreal s = v_load(score), p = v_exp2((s - origin) * (real)LOG2E);
    return contained ? v_select(s == -(real)INFINITY, v_set1(-(real)0), p) : p;
}

/* P^T of one vector of rows, in place: its sum over the keys. */
INLINE vreal soften_in_place(real *scores, int pitch, int keys, vreal origin, const bool contained) {
    vreal sum = v_set1(0);
    for (int n = 0; n < keys; n++, scores += pitch) {
        const vreal p = weight_at(scores, origin, contained);
        sum += p;
        v_store(scores, p);
    }
    return sum;
}

#if FA_CPU_AMX
/* Cache lines that are asked for as a pair of keys is weighed: of O, which comes next, and of what lies behind it, the
 * next block's Q and O. Xeon with AMX, one core, S 2048 D64: 13.1 ms, 15.0 without. */
#define LINES_AHEAD 4

/* The same to `joined`. `out`: the first of O's rows of this vector. */
INLINE vreal soften_joined(const real *scores, real *joined, int pitch, int64_t begin, int keys, vreal origin,
                           const bool contained, const real *out) {
    const int before = (int)(begin % CHUNK_KEYS), count = pairs_of_chunks(begin, keys);
    vreal sum = v_set1(0);
    for (int n = 0; n < count; n++, joined += pitch) {
        const int at = 2 * n - before;
        vreal low = v_set1(-(real)0), high = low;
        if (at >= 0 && at < keys) low = weight_at(scores + at * pitch, origin, contained);
        if (at >= -1 && at + 1 < keys) high = weight_at(scores + (at + 1) * pitch, origin, contained);
        sum += low;
        sum += high;
        v_store(joined, (vreal)v_join(low, high));
        UNROLL
        for (int line = 0; line < LINES_AHEAD; line++, out += pitch) __builtin_prefetch(out, 1);
    }
    return sum;
}
#endif

/* S^T -> P^T, in place or, with `joined`, to there as join_weights() makes it; m and l move on; decay[lane] is what O
 * must be multiplied by. `maximum` is the tile's. One vector of rows at a time: the constants of v_exp2() leave no
 * registers for a second. */
INLINE void soften(const int mr, block *b, real *scores, real *joined, int64_t begin, int keys, const real *maximum,
                   real *decay, const bool contained) {
    for (int m = 0; m < mr; m++) {
        const vreal before = v_load(b->maximum + m * LANES), highest = v_load(maximum + m * LANES);
        const vreal top = v_next_maximum(before, highest);
        const vint none = highest == -(real)INFINITY; /* of these keys; `before` can be a sink that is not finite */
        const vreal origin = v_select(none, v_set1(0), top);
        const vreal factor = v_select(none, v_set1(1), v_exp2((before - origin) * (real)LOG2E));
#if FA_CPU_AMX
        const vreal sum = joined ? soften_joined(scores + m * LANES, joined + m * LANES, mr * LANES, begin, keys,
                                                 origin, contained, b->o + m * LANES)
                                 : soften_in_place(scores + m * LANES, mr * LANES, keys, origin, contained);
#else
        (void)joined, (void)begin;
        const vreal sum = soften_in_place(scores + m * LANES, mr * LANES, keys, origin, contained);
#endif
        v_store(b->maximum + m * LANES, top);
        v_store(decay + m * LANES, factor);
        v_store(b->sum + m * LANES, v_fma(v_load(b->sum + m * LANES), factor, sum));
    }
}

/* P^T times dropout's factors. A weight of -0.0 stays. */
static void drop_weights(const work *w, const block *b, const key_tile *t) {
    const int pitch = b->mr * LANES, keys = (int)(t->end - t->begin);
    real *turned = w->factors + LANES * DROPOUT_ROOM(FA_CPU_TILE_N);
    for (int m = 0; m < b->mr; m++) {
        const char *rows[LANES];
        for (int lane = 0; lane < LANES; lane++) {
            const int64_t head = b->head[m * LANES + lane], query = b->query[m * LANES + lane];
            rows[lane] = (const char *)dropout_row(&w->problem->forward.dropout, w->entry->batch, head, query, t->begin,
                                                   keys, w->factors + lane * DROPOUT_ROOM(FA_CPU_TILE_N));
        }
        read_transposed(turned, LANES, rows, REAL_DTYPE, 1, keys, w->buffer);
        for (int n = 0; n < keys; n++) {
            real *at = w->scores + n * pitch + m * LANES;
            v_store(at, v_load(at) * v_load(turned + n * LANES));
        }
    }
}

INLINE void block_step_of(const int mr, const work *w, block *b, const key_tile *t, bool windowed) {
    const fa_forward *p = w->p;
    const int keys = (int)(t->end - t->begin), pitch = mr * LANES;
    real maximum[BLOCK_ROWS], decay[BLOCK_ROWS];
    for (int lane = 0; lane < pitch; lane++) maximum[lane] = -(real)INFINITY;
    if (p->mask.data) {
        read_score_operand(w, b, t, &p->mask, FA_BOOL, w->mask);
        if (all_excluded(w->mask, keys * pitch)) return;
    }
    multiply_scores(mr, b->q, t->k, t->k_pitch, p->head_dim, keys, w->scale, w->scores, maximum);
    if (p->bias.data) read_score_operand(w, b, t, &p->bias, p->bias_dtype, w->bias);
    if (w->problem->forward.alibi.data) add_alibi(w, b, t);
    if (w->problem->forward.max_logit.data) raise_logits(w, b, t, windowed);
    if (windowed || w->cap > 0 || w->biased || p->mask.data) adjust_scores(w, b, t, windowed, maximum);
    const bool drops = w->problem->forward.dropout.threshold;
    real *const joined = JOINED_ROOM(FA_CPU_TILE_N) && !drops ? w->joined : NULL;
    if (w->contained)
        soften(mr, b, w->scores, joined, t->begin, keys, maximum, decay, true);
    else
        soften(mr, b, w->scores, joined, t->begin, keys, maximum, decay, false);
    if (drops) drop_weights(w, b, t);
    int count;
    const real *weights = join_weights(mr, joined ? NULL : w->scores, w->joined, t->begin, keys, &count);
    if (w->contained)
        multiply_values_contained(mr, weights, t->v, t->v_pitch, count, p->head_dim_v, b->o, decay);
    else
        multiply_values(mr, weights, t->v, t->v_pitch, count, p->head_dim_v, b->o, decay);
}

static void block_step(const work *w, block *b, const key_tile *t, bool windowed) {
    switch (b->mr) {
#if FA_CPU_MR >= 4
    case 4: block_step_of(4, w, b, t, windowed); break;
#endif
#if FA_CPU_MR >= 3
    case 3: block_step_of(3, w, b, t, windowed); break;
#endif
#if FA_CPU_MR >= 2
    case 2: block_step_of(2, w, b, t, windowed); break;
#endif
    default: block_step_of(1, w, b, t, windowed);
    }
}

/* ---- results ---- */

static void write_lse(const work *w, int64_t head, int64_t query, real maximum, real sum) {
    const int64_t row = w->entry->entry.first_q + query;
    ((real *)w->p->lse.data)[fa_at(&w->p->lse, w->entry->batch, head, row, 0)] =
        sum == 0 ? -(real)INFINITY : (real)(maximum + log(sum));
}

/* Normalises and writes a block. True when a NaN was met. */
static bool block_end(const work *w, block *b) {
    const fa_forward *p = w->p;
    const int pitch = b->mr * LANES;
    vint nan = {0};
    for (int m = 0; m < b->mr; m++) {
        const vreal whole = v_load(b->sum + m * LANES);
        const vint empty = whole == 0;
        const vreal sum = v_select(empty, v_set1(1), whole), inverse = 1 / sum;
        for (int c = 0; c < p->head_dim_v; c++) {
            real *at = b->o + c * pitch + m * LANES;
            const vreal value = v_quotient(v_select(empty, v_set1(0), v_load(at)), sum, inverse);
            nan |= value != value;
            v_store(at, value);
        }
    }
    for (int m = 0; m * LANES < b->rows; m++) {
        const int lanes = b->rows - m * LANES < LANES ? b->rows - m * LANES : LANES;
        transpose_lanes(b->o + m * LANES, pitch, p->head_dim_v, w->buffer);
        for (int lane = 0; lane < lanes; lane++)
            write_row((char *)row_of(w, b, m * LANES + lane, &p->out, p->out_dtype), p->out_dtype, p->out.stride[3],
                      w->buffer + lane * padded(p->head_dim_v), p->head_dim_v);
    }
    for (int lane = 0; lane < b->rows && p->lse.data; lane++)
        write_lse(w, b->head[lane], b->query[lane], b->maximum[lane], b->sum[lane]);
    for (int lane = 0; lane < b->rows && w->problem->forward.max_logit.data; lane++)
        fa_raise_logit(&w->problem->forward, w->entry->batch, b->head[lane], b->logit[lane]);
    return v_any(nan);
}

#endif
