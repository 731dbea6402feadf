/* The two products of attention by AMX, for bfloat16 operands, in place of simd_gemm.h: S^T = K Q^T and O^T += V^T P^T,
 * each of tiles of 16 rows x 16 lanes that sum 32 terms at a time. The rows are those of K, which are read where they
 * lie, and of V^T; the lanes are query rows, whose operands are pairs as in simd_bf16.h.
 *
 * tdpbf16ps sums the 16 terms of even number and the 16 of odd number of a lane apart, each in order with one rounding
 * a term, and adds the sum of both to the lane. Chunks of 32 keys begin where the key's number in the sequence is a
 * multiple of 32, so that a row's products meet in the same chunks wherever a tile is cut; keys outside the tile have
 * weight 0 there. Subnormal numbers count as 0.
 */
#ifndef FA_CPU_SIMD_AMX_H
#define FA_CPU_SIMD_AMX_H

#include <math.h>
#include <string.h>

#include "cpu/simd_bf16.h"

#define CHUNK_KEYS     32
#define CHUNK_PAIRS    (CHUNK_KEYS / 2)
#define TILE_ROWS      16

/* Value columns that a pass over a tile of V sums for one query, in vectors: three registers each. */
#define NARROW_COLUMNS 8

/* Rows of K and V that one query asks for ahead of their use, K's in the order in which they lie. Xeon with AMX, two
 * cores, 134 MB of K and V, time over torch's in the same run, two runs each: 0.83 and 0.88 with 8 rows, 0.87 and 0.87
 * with 16, 0.96 and 0.99 with 32, 1.02 and 1.01 with 64. */
#define AHEAD          16

_Static_assert(LANES == TILE_ROWS && CHUNK_PAIRS == LANES, "a tile is 16 x 16 words");
_Static_assert(FA_CPU_TILE_N % CHUNK_KEYS == 0, "the grid of key tiles is one of chunks");

/* V^T of a tile: a row of FA_CPU_TILE_N / 2 pairs of keys a column of V, whole chunks from that of the first key on. */
#define VALUE_PITCH                  (FA_CPU_TILE_N / 2)
#define VALUES_AT(begin, key, pitch) (((key) / CHUNK_KEYS - (begin) / CHUNK_KEYS) * CHUNK_PAIRS)
#define VALUE_ROOM(keys, dim)        ((size_t)((keys) / 2) * (size_t)padded(dim))
#define JOINED_ROOM(keys)            ((keys) / 2)
#define OUT_ROOM(dim)                padded(dim)

/* ---- tiles ---- */

/* GCC's intrinsics of loads do not say that they read memory. */
#define TILE_LOAD(tile, from, pitch)                                                                                   \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(from), "r"((int64_t)(pitch)) : "memory")
#define TILE_STORE(tile, to, pitch)                                                                                    \
    __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(to), "r"((int64_t)(pitch)) : "memory")
#define TILE_ZERO(tile)          __asm__ volatile("tilezero %%tmm" #tile ::)
#define TILE_MULTIPLY(sum, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #sum ::)

/* Between these a thread can multiply: all eight tiles have 16 rows of 64 bytes; `narrow`, for one query, those of sums
 * (0 to 3) and of the query (7) have rows of one word. */
static void begin_products(bool narrow) {
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } config = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        config.row_bytes[tile] = narrow && (tile < 4 || tile == 7) ? 4 : 64;
        config.rows[tile] = TILE_ROWS;
    }
    __asm__ volatile("ldtilecfg %0" ::"m"(config));
}
static void end_products(void) { __asm__ volatile("tilerelease" ::); }

/* c = A B, or with `onto` c += A B, of `rows` x `lanes` tiles, 1 or 2 each, over `steps` tiles of 32 terms: of A 64
 * bytes apart, of B `b_step`. Pitches and b_step are bytes. */
INLINE void multiply_tiles(const int rows, const int lanes, const bool onto, const void *a, int64_t a_pitch,
                           const void *b, int64_t b_pitch, int64_t b_step, int steps, real *c, int64_t c_pitch) {
    const char *left = a, *right = b;
    char *to = (char *)c;
    if (onto) {
        TILE_LOAD(0, to, c_pitch);
        if (lanes == 2) TILE_LOAD(1, to + 64, c_pitch);
        if (rows == 2) TILE_LOAD(2, to + TILE_ROWS * c_pitch, c_pitch);
        if (rows == 2 && lanes == 2) TILE_LOAD(3, to + TILE_ROWS * c_pitch + 64, c_pitch);
    } else {
        TILE_ZERO(0);
        if (lanes == 2) TILE_ZERO(1);
        if (rows == 2) TILE_ZERO(2);
        if (rows == 2 && lanes == 2) TILE_ZERO(3);
    }
    for (int n = 0; n < steps; n++, left += 64, right += b_step) {
        TILE_LOAD(4, left, a_pitch);
        TILE_LOAD(6, right, b_pitch);
        TILE_MULTIPLY(0, 4, 6);
        if (lanes == 2) {
            TILE_LOAD(7, right + 64, b_pitch);
            TILE_MULTIPLY(1, 4, 7);
        }
        if (rows == 2) {
            TILE_LOAD(5, left + TILE_ROWS * a_pitch, a_pitch);
            TILE_MULTIPLY(2, 5, 6);
            if (lanes == 2) TILE_MULTIPLY(3, 5, 7);
        }
    }
    TILE_STORE(0, to, c_pitch);
    if (lanes == 2) TILE_STORE(1, to + 64, c_pitch);
    if (rows == 2) {
        TILE_STORE(2, to + TILE_ROWS * c_pitch, c_pitch);
        if (lanes == 2) TILE_STORE(3, to + TILE_ROWS * c_pitch + 64, c_pitch);
    }
}

/* The same for a block of `mr` vectors of lanes, b_pitch and c_pitch of which are mr * 64 bytes. */
INLINE void multiply_block(const int mr, const int rows, const bool onto, const void *a, int64_t a_pitch, const real *b,
                           int steps, real *c) {
    const int64_t pitch = mr * (int64_t)sizeof(vreal);
    for (int m = 0; m + 2 <= mr; m += 2)
        multiply_tiles(rows, 2, onto, a, a_pitch, b + m * LANES, pitch, TILE_ROWS * pitch, steps, c + m * LANES, pitch);
    if (mr % 2)
        multiply_tiles(rows, 1, onto, a, a_pitch, b + (mr - 1) * LANES, pitch, TILE_ROWS * pitch, steps,
                       c + (mr - 1) * LANES, pitch);
}

/* ---- the products, as in simd_gemm.h ---- */

/* The last keys of a tile, fewer than TILE_ROWS, behind which may be nobody's memory, and rows of zeros: their pitch in
 * bytes. */
static int64_t copy_rest(key_number *rest, const key_number *k, int64_t k_pitch, int head_dim, int keys) {
    const int width = WHOLE(head_dim);
    memset(rest, 0, (size_t)(TILE_ROWS * width) * sizeof *rest);
    for (int n = 0; n < keys; n++) memcpy(rest + n * width, k + n * k_pitch, (size_t)width * sizeof *rest);
    return width * (int64_t)sizeof *rest;
}

/* `s` has room for whole tiles of keys. */
INLINE void multiply_scores(const int mr, const real *q, const key_number *k, int64_t k_pitch, int head_dim, int keys,
                            real scale, real *s, real *maximum) {
    const int64_t pitch = k_pitch * (int64_t)sizeof *k;
    const int steps = WHOLE(head_dim) / 32;
    int n = 0;
    for (; n + 2 * TILE_ROWS <= keys; n += 2 * TILE_ROWS)
        multiply_block(mr, 2, false, k + n * k_pitch, pitch, q, steps, s + n * mr * LANES);
    if (n + TILE_ROWS <= keys) {
        multiply_block(mr, 1, false, k + n * k_pitch, pitch, q, steps, s + n * mr * LANES);
        n += TILE_ROWS;
    }
    if (n < keys) {
        key_number rest[TILE_ROWS * FA_MAX_HEAD_DIM];
        const int64_t rest_pitch = copy_rest(rest, k + n * k_pitch, k_pitch, head_dim, keys - n);
        multiply_block(mr, 1, false, rest, rest_pitch, q, steps, s + n * mr * LANES);
    }
    for (int m = 0; m < mr; m++) {
        vreal top[4];
        UNROLL
        for (int i = 0; i < 4; i++) top[i] = v_load(maximum + m * LANES);
        for (n = 0; n + 4 <= keys; n += 4) {
            UNROLL
            for (int i = 0; i < 4; i++) {
                real *at = s + ((n + i) * mr + m) * LANES;
                const vreal score = v_load(at) * scale;
                top[i] = v_max(score, top[i]);
                v_store(at, score);
            }
        }
        for (; n < keys; n++) {
            real *at = s + (n * mr + m) * LANES;
            const vreal score = v_load(at) * scale;
            top[0] = v_max(score, top[0]);
            v_store(at, score);
        }
        v_store(maximum + m * LANES, v_max(v_max(top[0], top[1]), v_max(top[2], top[3])));
    }
}

/* Pairs of the chunks that hold the keys [begin, begin + keys). */
INLINE int pairs_of_chunks(int64_t begin, int keys) {
    return ((int)(begin % CHUNK_KEYS) + keys + CHUNK_KEYS - 1) / CHUNK_KEYS * CHUNK_PAIRS;
}

/* Weights of the keys [begin, begin + keys) to pairs in `joined`, of whole chunks; *count: how many. Without p they are
 * there. */
INLINE const real *join_weights(const int mr, real *p, real *joined, int64_t begin, int keys, int *count) {
    const int before = (int)(begin % CHUNK_KEYS);
    const vreal none = v_set1(-(real)0);
    *count = pairs_of_chunks(begin, keys);
    if (!p) return joined;
    for (int n = 0; n < *count; n++) {
        const int at = 2 * n - before;
        UNROLL
        for (int m = 0; m < mr; m++) {
            const vreal low = at >= 0 && at < keys ? v_load(p + (at * mr + m) * LANES) : none;
            const vreal high = at + 1 >= 0 && at + 1 < keys ? v_load(p + ((at + 1) * mr + m) * LANES) : none;
            v_store(joined + (n * mr + m) * LANES, (vreal)v_join(low, high));
        }
    }
    return joined;
}

/* o *= decay, where that is not 1 for all lanes. */
INLINE void decay_values(const int mr, int head_dim_v, real *o, const real *decay) {
    vint other = {0};
    for (int m = 0; m < mr; m++) other |= v_load(decay + m * LANES) != 1;
    if (!v_any(other)) return;
    for (int m = 0; m < mr; m++) {
        const vreal factor = v_load(decay + m * LANES);
        for (int c = 0; c < head_dim_v; c++)
            v_store(o + (c * mr + m) * LANES, v_load(o + (c * mr + m) * LANES) * factor);
    }
}

/* `count` pairs of keys. `o` has room for whole tiles of columns. */
INLINE void multiply_values(const int mr, const real *p, const value_number *v, int64_t v_pitch, int count,
                            int head_dim_v, real *o, const real *decay) {
    const int64_t pitch = v_pitch * (int64_t)sizeof *v;
    decay_values(mr, head_dim_v, o, decay);
    int c = 0;
    for (; c + TILE_ROWS < head_dim_v; c += 2 * TILE_ROWS)
        multiply_block(mr, 2, true, v + c * v_pitch, pitch, p, count / CHUNK_PAIRS, o + c * mr * LANES);
    if (c < head_dim_v) multiply_block(mr, 1, true, v + c * v_pitch, pitch, p, count / CHUNK_PAIRS, o + c * mr * LANES);
}

/* multiply_values() that passes over excluded keys (p is -0.0 there) whatever v holds: term by term as tdpbf16ps. */
static void multiply_values_contained(int mr, const real *p, const value_number *v, int64_t v_pitch, int count,
                                      int head_dim_v, real *o, const real *decay) {
    const vint low = (vint)v_value(0xffff), high = (vint)v_value(0xffff0000);
    decay_values(mr, head_dim_v, o, decay);
    for (int c = 0; c < head_dim_v; c++)
        for (int m = 0; m < mr; m++) {
            vreal sum = v_load(o + (c * mr + m) * LANES);
            for (int n = 0; n < count; n += CHUNK_PAIRS) {
                vreal even = v_set1(0), odd = v_set1(0);
                for (int pair = n; pair < n + CHUNK_PAIRS; pair++) {
                    const voperand weights = v_operands(p + (pair * mr + m) * LANES);
                    const voperand value = v_value(v[c * v_pitch + pair]);
                    even = v_add_seen_value(even, weights & low, value & low);
                    odd = v_add_seen_value(odd, weights & high, value & high);
                }
                sum += even + odd;
            }
            v_store(o + (c * mr + m) * LANES, sum);
        }
}

/* ---- one query alone, rounding by rounding as above ---- */

/* Scores of 16 * groups keys, 1, 2 or 4; pitch in bytes. */
INLINE void narrow_groups(const int groups, const real *q, const char *k, int64_t pitch, int steps, real *s) {
    const char *const first = k;
    TILE_ZERO(0);
    if (groups > 1) TILE_ZERO(1);
    if (groups > 2) {
        TILE_ZERO(2);
        TILE_ZERO(3);
    }
    for (int n = 0; n < steps; n++, q += LANES, k += 64) {
        for (int line = 0; line < 4 * TILE_ROWS && groups == 4; line++)
            __builtin_prefetch(first + (AHEAD * pitch + (n * 4 * TILE_ROWS + line) * 64));
        TILE_LOAD(7, q, 4);
        TILE_LOAD(4, k, pitch);
        TILE_MULTIPLY(0, 4, 7);
        if (groups > 1) {
            TILE_LOAD(5, k + TILE_ROWS * pitch, pitch);
            TILE_MULTIPLY(1, 5, 7);
        }
        if (groups > 2) {
            TILE_LOAD(6, k + 2 * TILE_ROWS * pitch, pitch);
            TILE_MULTIPLY(2, 6, 7);
            TILE_LOAD(4, k + 3 * TILE_ROWS * pitch, pitch);
            TILE_MULTIPLY(3, 4, 7);
        }
    }
    TILE_STORE(0, s, 4);
    if (groups > 1) TILE_STORE(1, s + TILE_ROWS, 4);
    if (groups > 2) {
        TILE_STORE(2, s + 2 * TILE_ROWS, 4);
        TILE_STORE(3, s + 3 * TILE_ROWS, 4);
    }
}

/* s[n] = scale * q . k[n * k_pitch] for n < keys: the largest. `s` has room for whole tiles of keys. */
INLINE real narrow_scores(const real *q, const key_number *k, int64_t k_pitch, int head_dim, int keys, real scale,
                          real *s) {
    const int64_t pitch = k_pitch * (int64_t)sizeof *k;
    const int steps = WHOLE(head_dim) / 32;
    const char *at = (const char *)k;
    int n = 0;
    for (; n + 4 * TILE_ROWS <= keys; n += 4 * TILE_ROWS) narrow_groups(4, q, at + n * pitch, pitch, steps, s + n);
    for (; n + 2 * TILE_ROWS <= keys; n += 2 * TILE_ROWS) narrow_groups(2, q, at + n * pitch, pitch, steps, s + n);
    for (; n + TILE_ROWS <= keys; n += TILE_ROWS) narrow_groups(1, q, at + n * pitch, pitch, steps, s + n);
    if (n < keys) {
        key_number rest[TILE_ROWS * FA_MAX_HEAD_DIM];
        const int64_t rest_pitch = copy_rest(rest, k + n * k_pitch, k_pitch, head_dim, keys - n);
        narrow_groups(1, q, (const char *)rest, rest_pitch, steps, s + n);
    }
    real highest = -(real)INFINITY;
    for (n = 0; n < keys; n++) {
        s[n] *= scale;
        highest = s[n] > highest ? s[n] : highest;
    }
    return highest;
}

/* terms[c] += weight * row[c] for c < LANES * columns; what lies `ahead` bytes further on is asked for. */
INLINE void narrow_terms(const int columns, vreal *terms, uint16_t weight, const char *row, int64_t ahead) {
    const voperand one = v_value(weight);
    UNROLL
    for (int c = 0; c < columns; c++) {
        const __m256i halves = _mm256_loadu_si256((const __m256i *)row + c);
        if (c % 2 == 0) __builtin_prefetch(row + 32 * c + ahead);
        terms[c] = v_add_score(terms[c], one, (voperand)_mm512_cvtepu16_epi32(halves));
    }
}

/* o[c] = o[c] * decay + sum over n of weights[n] rows[n][column + c] for c < LANES * columns. `begin`: the first key.
 */
INLINE void narrow_values(const int columns, const uint16_t *weights, const char *const *rows, int column,
                          int64_t begin, int keys, real *o, real decay, int64_t ahead) {
    const int64_t offset = column * (int64_t)sizeof *weights;
    vreal sum[NARROW_COLUMNS];
    UNROLL
    for (int c = 0; c < columns; c++) sum[c] = v_load(o + c * LANES) * decay;
    for (int n = 0; n < keys;) {
        const int left = CHUNK_KEYS - (int)((begin + n) % CHUNK_KEYS), end = n + left < keys ? n + left : keys;
        vreal even[NARROW_COLUMNS], odd[NARROW_COLUMNS];
        UNROLL
        for (int c = 0; c < columns; c++) even[c] = odd[c] = v_set1(0);
        if ((begin + n) % 2) {
            narrow_terms(columns, odd, weights[n], rows[n] + offset, ahead);
            n++;
        }
        for (; n + 2 <= end; n += 2) {
            narrow_terms(columns, even, weights[n], rows[n] + offset, ahead);
            narrow_terms(columns, odd, weights[n + 1], rows[n + 1] + offset, ahead);
        }
        if (n < end) {
            narrow_terms(columns, even, weights[n], rows[n] + offset, ahead);
            n++;
        }
        UNROLL
        for (int c = 0; c < columns; c++) sum[c] += even[c] + odd[c];
    }
    UNROLL
    for (int c = 0; c < columns; c++) v_store(o + c * LANES, sum[c]);
}

/* ---- V^T ---- */

/* A chunk of keys, rows[n] being that of its key n or NULL: zeros. `to` is the chunk's place in the first row of V^T;
 * `buffer` holds LANES * padded(dim) words. */
static void transpose_values(value_number *to, const char *const rows[CHUNK_KEYS], int64_t stride, int dim,
                             real *buffer) {
    value_number *pairs = (value_number *)buffer;
    for (int n = 0; n < CHUNK_PAIRS; n++) {
        join_value_rows(pairs + n * padded(dim), rows[2 * n], rows[2 * n + 1], stride, dim);
        for (int c = dim; c < padded(dim); c++) pairs[n * padded(dim) + c] = 0;
    }
    for (int c = 0; c < dim; c += LANES) {
        vreal tile[LANES];
        for (int n = 0; n < LANES; n++) tile[n] = v_load(buffer + n * padded(dim) + c);
        v_transpose(tile);
        for (int n = 0; n < LANES; n++) memcpy(to + (c + n) * VALUE_PITCH, &tile[n], sizeof tile[n]);
    }
}

/* ---- the softmax's own arithmetic, as in simd_gemm.h ---- */

/* A row's maximum after keys of which `highest` is the largest score. It stands until one exceeds it by so much:
 * weights up to e^5.5 lose nothing, and O, which tiles add to where it lies, is hardly ever multiplied. */
#define SMALL_RISE 5.5

INLINE vreal v_next_maximum(vreal before, vreal highest) {
    return v_select(highest - before > (real)SMALL_RISE, highest, before);
}
INLINE vreal v_quotient(vreal x, vreal y, vreal inverse) {
    (void)y;
    return x * inverse;
}

#endif
