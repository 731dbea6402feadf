/* A tile of queries against a chunk of keys: P, dS and dT of every pair, and what they add to the gradients. Lanes are
 * keys; the rows of q and dout are read one number at a time, in their own order:
 *   S = Q K^T    dP = dO V^T       (simd_gemm.h, scores)
 *   P = e^(S - LSE)    dS = P (dP - delta)    dT = dS (1 - tanh^2)
 *   dV^T += dO^T P    dK^T += Q^T dT    (values)
 *   dQ = dT K                      (scores, the lanes being columns of K)
 *
 * A pair that is not seen has weights of -0.0, which no seen one has. Where K, V, Q or dO hold NaN or Inf, products
 * pass over these pairs, with the same roundings for the others.
 */
#ifndef FA_CPU_SIMD_PAIRS_H
#define FA_CPU_SIMD_PAIRS_H

#include <math.h>
#include <string.h>

#include "cpu/alibi.h"
#include "cpu/cpu_simd_backward.h"
#include "cpu/intervals.h"
#include "cpu/limit.h"
#include "cpu/simd_dropout.h"
#include "cpu/simd_gemm.h"
#include "cpu/simd_math.h"
#include "cpu/simd_rows.h"

#define TILE   FA_CPU_TILE_Q
#define CHUNK  FA_CPU_CHUNK
#define BLOCKS (CHUNK / BLOCK_ROWS)
_Static_assert(CHUNK % BLOCK_ROWS == 0, "a chunk is whole blocks");

/* One thread's view of a task. Arrays lie in its scratch; those of lanes have BLOCK_ROWS of them a block, the last
 * block of a chunk as many as it has vectors. */
typedef struct work {
    const fa_backward *p;
    bool biased;            /* by a bias or ALiBi */
    bool dq, dk, dv, dbias; /* what this pass is for */
    bool excludes;          /* some pairs may not be seen */
    real scale, cap, cap_factor;
    /* the chunk */
    int64_t batch, head_kv, key;
    int keys;
    bool keys_finite;
    real *kt, *vt;   /* (D, lanes), (Dv, lanes) a block */
    real *panels;    /* K in panels of BLOCK_ROWS columns: (keys, lanes) each */
    real *dkt, *dvt; /* like kt, vt */
    /* the tile */
    int64_t head, row;
    int rows;
    bool rows_finite;
    const real *q, *dout;
    int64_t q_pitch, dout_pitch;
    real *q_copy, *dout_copy;
    real *lse, *delta;
    fa_held held[TILE]; /* by the intervals of each row, if there are any */
    fa_span held_keys;  /* from the first key that some row holds past the last */
    /* of a block: (TILE, lanes) */
    real *weight, *slope; /* S, then P; dP, then dT */
    real *bias, *mask;
    real *factors;    /* (TILE, DROPOUT_ROOM(CHUNK)): dropout's, from `kept` on those of the chunk's first key */
    const real *kept; /* NULL: no dropout */
    real *dt;         /* (TILE, CHUNK): dT, or dS for dbias */
    real *part;
    real *buffer;  /* LANES rows of max(D, Dv, CHUNK) */
    double *total; /* (TILE, CHUNK), for dbias */
} work;

static int vectors_of(int lanes) { return lanes < BLOCK_ROWS ? (lanes + LANES - 1) / LANES : FA_CPU_MR; }

/* ---- products of a block of `mr` vectors ---- */

#define EXCLUDED ((bits)1 << (8 * FA_CPU_REAL_BYTES - 1))

#if FA_CPU_MR >= 4
#define CASE_4(CALL)                                                                                                   \
    case 4:                                                                                                            \
        CALL(4);                                                                                                       \
        break;
#else
#define CASE_4(CALL)
#endif
#if FA_CPU_MR >= 3
#define CASE_3(CALL)                                                                                                   \
    case 3:                                                                                                            \
        CALL(3);                                                                                                       \
        break;
#else
#define CASE_3(CALL)
#endif
#if FA_CPU_MR >= 2
#define CASE_2(CALL)                                                                                                   \
    case 2:                                                                                                            \
        CALL(2);                                                                                                       \
        break;
#else
#define CASE_2(CALL)
#endif
#define FOR_VECTORS(mr, CALL)                                                                                          \
    switch (mr) {                                                                                                      \
        CASE_4(CALL)                                                                                                   \
        CASE_3(CALL)                                                                                                   \
        CASE_2(CALL)                                                                                                   \
    default: CALL(1);                                                                                                  \
    }

/* s[n][lane] = scale * sum over d < depth of rows[n * pitch + d] lanes[d][lane] for n < count. */
static __attribute__((noinline)) void scores(int mr, const real *lanes, const real *rows, int64_t pitch, int depth,
                                             int count, real scale, real *s) {
    real highest[BLOCK_ROWS] = {0}; /* not needed here */
#define SCORES(mr) multiply_scores(mr, lanes, rows, pitch, depth, count, scale, s, highest)
    FOR_VECTORS(mr, SCORES)
#undef SCORES
}

/* scores() that passes over pairs of weight -0.0, which `rows` holds. */
static __attribute__((noinline)) void scores_contained(int mr, const real *lanes, const real *rows, int64_t pitch,
                                                       int depth, int count, real scale, real *s) {
    for (int n = 0; n < count; n++)
        for (int m = 0; m < mr; m++) {
            vreal total = v_set1(0);
            for (int d = 0; d < depth;) {
                const int end = depth - d < EIGHT ? depth : d + EIGHT;
                vreal sum = v_set1(0);
                for (; d < end; d++) {
                    bits weight;
                    memcpy(&weight, rows + n * pitch + d, sizeof weight);
                    if (weight == EXCLUDED) continue;
                    sum = v_fma_once(v_load(lanes + (d * mr + m) * LANES), v_set1(rows[n * pitch + d]), sum);
                }
                total += sum;
            }
            v_store(s + (n * mr + m) * LANES, total * scale);
        }
}

/* o[c][lane] += sum over n < count of weights[n][lane] rows[n * pitch + c] for c < width. */
static __attribute__((noinline)) void values(int mr, const real *weights, const real *rows, int64_t pitch, int count,
                                             int width, real *o, bool contained) {
    real one[BLOCK_ROWS];
    for (int lane = 0; lane < BLOCK_ROWS; lane++) one[lane] = 1;
    if (contained) {
        multiply_values_contained(mr, weights, rows, pitch, count, width, o, one);
        return;
    }
#define VALUES(mr) multiply_values(mr, weights, rows, pitch, count, width, o, one)
    FOR_VECTORS(mr, VALUES)
#undef VALUES
}

/* ---- reading ---- */

static bool all_finite(const real *x, int64_t pitch, int count, int width) {
    vint broken = {0};
    bool rest = true;
    for (int n = 0; n < count; n++) {
        const real *row = x + n * pitch;
        int d = 0;
        for (; d + LANES <= width; d += LANES) {
            const vreal difference = v_load(row + d) - v_load(row + d);
            broken |= difference != 0;
        }
        for (; d < width; d++) rest &= row[d] - row[d] == 0;
    }
    return rest && !v_any(broken);
}

/* Rows of K or V as lanes: (dim, lanes) a block. */
static void read_lanes(work *w, const fa_operand *operand, int dim, real *to) {
    const fa_dtype dtype = w->p->forward.dtype;
    for (int first = 0; first < w->keys; first += BLOCK_ROWS, to += (int64_t)dim * BLOCK_ROWS) {
        const int mr = vectors_of(w->keys - first);
        for (int m = 0; m < mr; m++) {
            const char *rows[LANES];
            for (int lane = 0; lane < LANES; lane++) {
                const int n = first + m * LANES + lane, key = n < w->keys ? n : w->keys - 1;
                rows[lane] = element(operand, dtype, w->batch, w->head_kv, w->key + key);
            }
            read_transposed(to + m * LANES, mr * LANES, rows, dtype, operand->stride[3], dim, w->buffer);
        }
    }
}

static void read_panels(work *w) {
    const fa_forward *f = &w->p->forward;
    const int width = padded(f->head_dim);
    for (int n = 0; n < w->keys; n++) {
        read_row(w->buffer, element(&f->k, f->dtype, w->batch, w->head_kv, w->key + n), f->dtype, f->k.stride[3],
                 f->head_dim);
        for (int d = f->head_dim; d < width; d++) w->buffer[d] = 0;
        for (int first = 0; first < width; first += BLOCK_ROWS) {
            const int lanes = width - first < BLOCK_ROWS ? width - first : BLOCK_ROWS;
            memcpy(w->panels + (int64_t)first * CHUNK + n * lanes, w->buffer + first, (size_t)lanes * sizeof(real));
        }
    }
}

/* Keys of a chunk that causal, window and seq_k leave. */
static void set_chunk(work *w, int64_t batch, int64_t head_kv, int64_t chunk) {
    const fa_forward *f = &w->p->forward;
    const int64_t begin = chunk * CHUNK, from = begin > f->key_begin ? begin : f->key_begin;
    const int64_t to = begin + CHUNK < f->key_end ? begin + CHUNK : f->key_end;
    w->batch = batch, w->head_kv = head_kv, w->key = from;
    w->keys = to > from ? (int)(to - from) : 0;
}

static void read_chunk(work *w) {
    const fa_forward *f = &w->p->forward;
    const int whole = (w->keys + BLOCK_ROWS - 1) / BLOCK_ROWS * BLOCK_ROWS;
    read_lanes(w, &f->k, f->head_dim, w->kt);
    if (w->dq) read_panels(w);
    if (w->dk) memset(w->dkt, 0, (size_t)whole * (size_t)f->head_dim * sizeof(real));
    if (w->dv) memset(w->dvt, 0, (size_t)whole * (size_t)f->head_dim_v * sizeof(real));
    w->keys_finite = true;
    if (w->dq || w->dk || w->dbias) read_lanes(w, &f->v, f->head_dim_v, w->vt);
    if (!w->dq || !w->excludes) return;
    for (int first = 0; first < w->keys; first += BLOCK_ROWS) {
        const int lanes = vectors_of(w->keys - first) * LANES;
        w->keys_finite &= all_finite(w->kt + (int64_t)first * f->head_dim, 0, 1, lanes * f->head_dim);
    }
}

/* delta = dout . out - dlse of row n of the tile. */
static real delta_of(work *w, int n) {
    const fa_backward *p = w->p;
    const fa_forward *f = &p->forward;
    const int64_t i = w->row + n, *s = p->dlse.stride;
    const real dlse =
        p->dlse.data ? load_one(p->dlse.data, f->lse_dtype, w->batch * s[0] + w->head * s[1] + i * s[2]) : 0;
    if (!p->dout.data) return -dlse;
    const real *dout = w->dout + n * w->dout_pitch;
    vreal sum = v_set1(0);
    real rest = 0;
    int d = 0;
    read_row(w->buffer, element(&f->out, f->out_dtype, w->batch, w->head, i), f->out_dtype, f->out.stride[3],
             f->head_dim_v);
    for (; d + LANES <= f->head_dim_v; d += LANES) sum = v_fma(v_load(dout + d), v_load(w->buffer + d), sum);
    for (; d < f->head_dim_v; d++) rest += dout[d] * w->buffer[d];
    for (int lane = 0; lane < LANES; lane++) rest += sum[lane];
    return rest - dlse;
}

/* Stands for an absent dout: one element for all places. */
static const double nothing = 0;

/* Rows of a head from `row` on, and what intervals leave them. */
static void set_tile(work *w, int64_t head, int64_t row) {
    const fa_forward *f = &w->p->forward;
    w->head = head, w->row = row;
    w->rows = (int)(f->seq_q - row < TILE ? f->seq_q - row : TILE);
    w->held_keys = (fa_span){0, f->intervals.data ? 0 : f->seq_k};
    for (int n = 0; n < w->rows && f->intervals.data; n++) {
        w->held[n] = fa_held_keys(f, w->batch, head, row + n);
        w->held_keys = fa_span_joined(w->held_keys, fa_held_within(&w->held[n], (fa_span){0, f->seq_k}));
    }
}

static void read_tile(work *w) {
    const fa_backward *p = w->p;
    const fa_forward *f = &p->forward;
    const fa_operand none = {.data = (void *)&nothing};
    const fa_operand *dout = p->dout.data ? &p->dout : &none;
    const int64_t head = w->head, row = w->row;
    w->q = rows_of(&f->q, f->dtype, w->batch, head, row, row + w->rows, f->head_dim, w->q_copy, &w->q_pitch);
    w->dout = rows_of(dout, f->dtype, w->batch, head, row, row + w->rows, f->head_dim_v, w->dout_copy, &w->dout_pitch);
    for (int n = 0; n < w->rows; n++) {
        const int64_t *s = p->lse.stride;
        w->lse[n] = load_one(p->lse.data, f->lse_dtype, w->batch * s[0] + head * s[1] + (row + n) * s[2]);
        w->delta[n] = w->dq || w->dk || w->dbias ? delta_of(w, n) : 0;
    }
    w->rows_finite = true;
    if (w->dk && w->excludes) w->rows_finite = all_finite(w->q, w->q_pitch, w->rows, f->head_dim);
    if (w->dv && w->excludes) w->rows_finite &= all_finite(w->dout, w->dout_pitch, w->rows, f->head_dim_v);
}

/* (TILE, lanes) of bias or mask; a mask reads as 0 and -inf. */
static void read_added(const work *w, int first, int lanes, const fa_operand *operand, fa_dtype dtype, real *to) {
    const int keys = w->keys - first < lanes ? w->keys - first : lanes;
    const int64_t offset = (w->key + first) * operand->stride[3] * (int64_t)fa_dtype_size(dtype);
    for (int n = 0; n < w->rows; n++, to += lanes)
        read_row(to, element(operand, dtype, w->batch, w->head, w->row + n) + offset, dtype, operand->stride[3], keys);
}

/* The block's bias, or 0, less slope * |key - position|. */
static void add_alibi(const work *w, int first, int lanes) {
    const vreal slope = v_set1((real)fa_slope(&w->p->forward, w->batch, w->head));
    for (int m = 0; m < lanes; m += LANES) {
        vreal key = {0};
        for (int lane = 0; lane < LANES; lane++)
            key[lane] = (real)(w->key + first + m + lane - w->row - w->p->forward.diagonal);
        for (int n = 0; n < w->rows; n++) {
            real *at = w->bias + n * lanes + m;
            const vreal bias = w->p->forward.bias.data ? v_bounded(v_load(at)) : v_set1(0);
            v_store(at, v_with_alibi(bias, slope, key - (real)n));
        }
    }
}

/* ---- a block of keys ---- */

/* The largest power of 2 that v_exp2() is asked for: infinity in float. */
#define EXP2_HIGHEST ((real)(EXPONENT_BIAS + 1))

/* P with dropout's factor, and dT, of one vector of pairs. */
INLINE void differentiate(const work *w, const int plain, vint hidden, vreal added, vreal tanh_slope, vreal factor,
                          int n, real *s, real *dp, real *wide) {
    const vreal no = v_set1(-(real)0);
    vreal x = (v_load(s) + added - w->lse[n]) * (real)LOG2E;
    x = v_select(x > EXP2_HIGHEST, v_set1(EXP2_HIGHEST), x);
    vreal p = v_exp2(x);
    vreal dt = p * (v_load(dp) * factor - w->delta[n]) * tanh_slope + (real)0; /* never -0.0 */
    p *= factor;
    if (!plain) p = v_select(hidden, no, p), dt = v_select(hidden, no, dt);
    v_store(s, p);
    v_store(dp, dt);
    v_store(wide, dt);
}

/* Which keys of a vector, the first of which is `key`, the intervals of row n leave out. */
INLINE vint left_out(const work *w, int n, int64_t key, vint lane) {
    vint found = {0};
    for (int i = 0; i < w->p->forward.intervals_count; i++) {
        const fa_span *held = &w->held[n].of[i];
        const integer low = (integer)fa_clamp(held->begin - key, 0, LANES);
        const integer high = (integer)fa_clamp(held->end - key, 0, LANES);
        found |= (lane >= low) & (lane < high);
    }
    return ~found;
}

/* S, dP -> P, dT in place, and dT beside those of the chunk's other blocks. `windowed`: causal or window hide some. */
static void weigh(const work *w, int first, int mr, bool windowed) {
    const fa_forward *f = &w->p->forward;
    const bool plain = !windowed && w->cap <= 0 && !w->biased && !f->mask.data && !f->intervals.data && !w->kept;
    vint lanes = {0};
    for (int lane = 0; lane < LANES; lane++) lanes[lane] = (integer)lane;
    for (int m = 0; m < mr; m++) {
        vint low = {0}, high = {0}; /* rows [low, high) of the tile see the key of a lane */
        for (int lane = 0; lane < LANES && windowed; lane++) {
            const int64_t centre = w->key + first + m * LANES + lane - f->diagonal - w->row;
            const int64_t from = centre - f->right, to = centre + f->left + 1;
            low[lane] = (integer)(from < 0 ? 0 : from > w->rows ? w->rows : from);
            high[lane] = (integer)(to < 0 ? 0 : to > w->rows ? w->rows : to);
        }
        for (int n = 0; n < w->rows; n++) {
            const int at = (n * mr + m) * LANES;
            real *s = w->weight + at, *dp = w->slope + at, *wide = w->dt + n * CHUNK + first + m * LANES;
            if (plain) {
                differentiate(w, true, low, v_set1(0), v_set1(1), v_set1(1), n, s, dp, wide);
                continue;
            }
            vint hidden = {0};
            vreal added = v_set1(0), slope = v_set1(1);
            if (windowed) hidden |= (low > (integer)n) | (high <= (integer)n);
            if (f->mask.data) hidden |= v_load(w->mask + at) != 0;
            if (f->intervals.data) hidden |= left_out(w, n, w->key + first + m * LANES, lanes);
            if (w->biased) {
                const vreal bias = v_load(w->bias + at);
                hidden |= bias == -(real)INFINITY;
                added = v_bounded(bias);
            }
            if (w->cap > 0) {
                const vreal capped = v_tanh_scaled(v_load(s) * w->cap_factor);
                v_store(s, capped * w->cap);
                if (!w->dbias) slope = 1 - capped * capped;
            }
            const vreal factor = w->kept ? v_load(w->kept + n * DROPOUT_ROOM(CHUNK) + first + m * LANES) : v_set1(1);
            differentiate(w, false, hidden, added, slope, factor, n, s, dp, wide);
        }
    }
}

static void block_step(work *w, int first) {
    const fa_forward *f = &w->p->forward;
    const int mr = vectors_of(w->keys - first), lanes = mr * LANES;
    const int64_t key = w->key + first, last = w->row + w->rows - 1;
    const int64_t past = w->keys - first < lanes ? w->key + w->keys : key + lanes;
    const bool windowed = last + f->diagonal - f->left > key || w->row + f->diagonal + f->right + 1 < past;
    scores(mr, w->kt + (int64_t)first * f->head_dim, w->q, w->q_pitch, f->head_dim, w->rows, w->scale, w->weight);
    if (w->dq || w->dk || w->dbias)
        scores(mr, w->vt + (int64_t)first * f->head_dim_v, w->dout, w->dout_pitch, f->head_dim_v, w->rows, 1, w->slope);
    if (f->bias.data) read_added(w, first, lanes, &f->bias, f->bias_dtype, w->bias);
    if (w->p->forward.alibi.data) add_alibi(w, first, lanes);
    if (f->mask.data) read_added(w, first, lanes, &f->mask, FA_BOOL, w->mask);
    weigh(w, first, mr, windowed);
    if (w->dv)
        values(mr, w->weight, w->dout, w->dout_pitch, w->rows, f->head_dim_v, w->dvt + (int64_t)first * f->head_dim_v,
               !w->rows_finite);
    if (w->dk)
        values(mr, w->slope, w->q, w->q_pitch, w->rows, f->head_dim, w->dkt + (int64_t)first * f->head_dim,
               !w->rows_finite);
}

/* Keys [*begin, *end) of the chunk, whole blocks but for the last, that some row of the tile sees through causal,
 * window and intervals. */
static bool seen_keys(const work *w, int *begin, int *end) {
    const fa_forward *f = &w->p->forward;
    const fa_span window = {w->row + f->diagonal - f->left, w->row + w->rows + f->diagonal + f->right};
    const fa_span seen = fa_span_cut(window, w->held_keys);
    const int64_t low = seen.begin - w->key, high = seen.end - w->key;
    *begin = low <= 0 ? 0 : low >= w->keys ? w->keys : (int)(low / BLOCK_ROWS * BLOCK_ROWS);
    *end = high <= 0 ? 0 : high >= w->keys ? w->keys : (int)((high + BLOCK_ROWS - 1) / BLOCK_ROWS * BLOCK_ROWS);
    if (*end > w->keys) *end = w->keys;
    return *begin < *end;
}

/* All blocks of the chunk that the tile sees. */
static void tile_step(work *w, int begin, int end) {
    w->kept = NULL;
    for (int n = 0; n < w->rows && w->p->forward.dropout.threshold; n++) {
        const real *row = dropout_row(&w->p->forward.dropout, w->batch, w->head, w->row + n, w->key, w->keys,
                                      w->factors + n * DROPOUT_ROOM(CHUNK));
        if (n == 0) w->kept = row;
    }
    for (int first = begin; first < end; first += BLOCK_ROWS) block_step(w, first);
}

#endif
