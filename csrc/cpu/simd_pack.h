/* Rows of any dtype and stride to contiguous rows of `real` and back, as they are or transposed. */
#ifndef FA_CPU_SIMD_PACK_H
#define FA_CPU_SIMD_PACK_H

#include <math.h>

#include "cpu/simd_vector.h"
#include "fa.h"

#define REAL_DTYPE (FA_CPU_REAL_BYTES == 4 ? FA_F32 : FA_F64)

static inline real load_one(const char *from, fa_dtype dtype, int64_t index) {
    switch (dtype) {
#if FA_CPU_REAL_BYTES == 4
    case FA_F16: return fa_float_from_f16(((const uint16_t *)from)[index]);
    case FA_BF16: return fa_float_from_bf16(((const uint16_t *)from)[index]);
#else
    case FA_F64: return ((const double *)from)[index];
#endif
    case FA_BOOL: return ((const uint8_t *)from)[index] ? 0 : -(real)INFINITY;
    default: return ((const float *)from)[index];
    }
}

static inline void store_one(char *to, fa_dtype dtype, int64_t index, real value) {
    switch (dtype) {
#if FA_CPU_REAL_BYTES == 4
    case FA_F16: ((uint16_t *)to)[index] = fa_f16_from_float(value); break;
    case FA_BF16: ((uint16_t *)to)[index] = fa_bf16_from_float(value); break;
#else
    case FA_F32: ((float *)to)[index] = (float)value; break;
#endif
    default: ((real *)to)[index] = value;
    }
}

/* LANES consecutive elements from `index` on. */
INLINE vreal load_lanes(const char *from, fa_dtype dtype, int64_t index) {
    switch (dtype) {
#if FA_CPU_REAL_BYTES == 4
    case FA_F16: return v_load_f16((const uint16_t *)from + index);
    case FA_BF16: return v_load_bf16((const uint16_t *)from + index);
    case FA_F32: return v_load((const float *)from + index);
#else
    case FA_F32: return v_load_f32((const float *)from + index);
    case FA_F64: return v_load((const double *)from + index);
#endif
    default: return v_load_mask((const uint8_t *)from + index);
    }
}

/* to[n] = from[n * stride] as a real; a boolean becomes 0 (set) or -inf (zero). */
static void read_row(real *to, const char *from, fa_dtype dtype, int64_t stride, int count) {
    int n = 0;
    for (; stride == 1 && n + LANES <= count; n += LANES) v_store(to + n, load_lanes(from, dtype, n));
    for (; n < count; n++) to[n] = load_one(from, dtype, n * stride);
}

/* to[n * stride] = from[n], rounded to nearest even. */
static void write_row(char *to, fa_dtype dtype, int64_t stride, const real *from, int count) {
    int n = 0;
    if (stride == 1) {
#if FA_CPU_REAL_BYTES == 4
        if (dtype == FA_F16)
            for (; n + LANES <= count; n += LANES) v_store_f16((uint16_t *)to + n, v_load(from + n));
        if (dtype == FA_BF16)
            for (; n + LANES <= count; n += LANES) v_store_bf16((uint16_t *)to + n, v_load(from + n));
#endif
        if (dtype == REAL_DTYPE)
            for (; n + LANES <= count; n += LANES) v_store((real *)to + n, v_load(from + n));
    }
    for (; n < count; n++) store_one(to, dtype, n * stride, from[n]);
}

/* Row pitch of the buffers that the transposing functions work in. */
static inline int padded(int count) { return (count + LANES - 1) / LANES * LANES; }

/* to[c * pitch + lane] = rows[lane][c * stride] for c < count: LANES rows become one lane each. `buffer` holds
 * LANES * padded(count) values. */
static void read_transposed(real *to, int pitch, const char *const rows[LANES], fa_dtype dtype, int64_t stride,
                            int count, real *buffer) {
    const int width = padded(count);
    bool same = true;
    for (int lane = 1; lane < LANES; lane++) same &= rows[lane] == rows[0];
    if (same) {
        read_row(buffer, rows[0], dtype, stride, count);
        for (int c = 0; c < count; c++) v_store(to + c * pitch, v_set1(buffer[c]));
        return;
    }
    const int whole = stride == 1 ? count / LANES * LANES : 0; /* columns that need no buffer */
    for (int lane = 0; lane < LANES && whole < count; lane++)
        read_row(buffer + lane * width + whole, rows[lane] + whole * (int)fa_dtype_size(dtype), dtype, stride,
                 count - whole);
    for (int first = 0; first < count; first += LANES) {
        vreal tile[LANES];
        for (int lane = 0; lane < LANES; lane++)
            tile[lane] = first < whole ? load_lanes(rows[lane], dtype, first) : v_load(buffer + lane * width + first);
        v_transpose(tile);
        const int columns = count - first < LANES ? count - first : LANES;
        for (int c = 0; c < columns; c++) v_store(to + (first + c) * pitch, tile[c]);
    }
}

/* buffer[lane * padded(count) + c] = from[c * pitch + lane] for c < count: one lane each becomes LANES rows. */
static void transpose_lanes(const real *from, int pitch, int count, real *buffer) {
    for (int first = 0; first < count; first += LANES) {
        vreal tile[LANES];
        for (int c = 0; c < LANES; c++) tile[c] = first + c < count ? v_load(from + (first + c) * pitch) : v_set1(0);
        v_transpose(tile);
        for (int lane = 0; lane < LANES; lane++) v_store(buffer + lane * padded(count) + first, tile[lane]);
    }
}

#endif
