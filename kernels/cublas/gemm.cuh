/* Matrices with any strides that a leading dimension can express, and products of them over several batch axes. */
#pragma once

#include <limits.h> // INT_MAX
#include <stdint.h> // int64_t
#include <utility>  // std::swap

#include "cublas/api.cuh" // Session
#include "fa.h"           // fa_code

namespace fa::cublas {

/* Element (i, j) lies at data + i * row + j * column, in elements of `type` (`bytes` each). */
struct Matrix {
    char *data;
    int type;
    int bytes;
    int64_t row, column;

    Matrix transposed() const { return {data, type, bytes, column, row}; }
};

/* How a rows x columns matrix looks to cuBLAS, which counts by columns: as it is (kOpN) or as the transpose of what is
 * stored (kOpT). The stride along an axis of length 1 has no meaning. */
struct Form {
    int op;
    int64_t ld;
};

/* False when neither axis is contiguous, the other's stride is too short (0 and negative ones are), or it overflows. */
inline bool express(int64_t row, int64_t column, int64_t rows, int64_t columns, Form *form) {
    if ((row == 1 || rows == 1) && (columns == 1 || column >= rows))
        *form = {kOpN, columns == 1 ? rows : column};
    else if ((column == 1 || columns == 1) && (rows == 1 || row >= columns))
        *form = {kOpT, rows == 1 ? columns : row};
    else
        return false;
    return form->ld <= INT_MAX;
}

/* A batch axis: how many products, and the distance in elements between neighbours in A, B and C. */
struct Axis {
    int64_t count, a, b, c;
};

/* The product's rows grow by an axis along which B repeats, where the strides of A and C allow it. */
inline bool fold_rows(const Axis &axis, Matrix *a, Matrix *c, int64_t *m, int64_t n, int64_t k) {
    if (axis.b != 0) return false;
    const int64_t rows = *m * axis.count, a_row = *m == 1 ? axis.a : a->row, c_row = *m == 1 ? axis.c : c->row;
    Form form;
    if (rows > INT_MAX || axis.a != *m * a_row || axis.c != *m * c_row) return false;
    if (!express(a_row, a->column, rows, k, &form) || !express(c_row, c->column, rows, n, &form)) return false;
    a->row = a_row, c->row = c_row, *m = rows;
    return true;
}

/* C (m x n) = alpha A (m x k) B (k x n) for every index of the batch axes, outermost first: axes become rows where they
 * can, neighbouring axes become one, the longest that is left is cuBLAS's batch, and calls go over the others. */
inline fa_code multiply(const Session &session, Matrix a, Matrix b, Matrix c, int64_t m, int64_t n, int64_t k,
                        float alpha, const Axis (&axes)[3]) {
    int innermost = 2;
    while (innermost >= 0 && (axes[innermost].count == 1 || fold_rows(axes[innermost], &a, &c, &m, n, k))) --innermost;

    Axis loops[3], batch = {1, 0, 0, 0};
    int count = 0, chosen = -1;
    for (int i = 0; i <= innermost; ++i) {
        const Axis &x = axes[i];
        if (x.count == 1) continue;
        if (count > 0) {
            const Axis &outer = loops[count - 1];
            if (outer.a == x.count * x.a && outer.b == x.count * x.b && outer.c == x.count * x.c) {
                loops[count - 1] = {outer.count * x.count, x.a, x.b, x.c};
                continue;
            }
        }
        loops[count++] = x;
    }
    for (int i = 0; i < count; ++i) {
        const bool forward = loops[i].a >= 0 && loops[i].b >= 0 && loops[i].c >= 0;
        if (forward && loops[i].count <= INT_MAX && loops[i].count > batch.count) batch = loops[i], chosen = i;
    }
    int64_t calls = 1;
    if (chosen >= 0) loops[chosen] = {1, 0, 0, 0};
    for (int i = 0; i < count; ++i) calls *= loops[i].count;

    Form form_a, form_b, form_c;
    if (express(c.column, c.row, n, m, &form_c) && form_c.op == kOpN) { // rows of C are contiguous: C^T = B^T A^T
        const Matrix left = b.transposed();
        b = a.transposed(), a = left, c = c.transposed();
        std::swap(m, n);
        std::swap(batch.a, batch.b);
        for (int i = 0; i < count; ++i) std::swap(loops[i].a, loops[i].b);
    }
    if (!express(a.row, a.column, m, k, &form_a) || !express(b.row, b.column, k, n, &form_b) ||
        !express(c.row, c.column, m, n, &form_c) || form_c.op != kOpN)
        return session.fail(FA_EUNSUPPORTED, "cublas: no leading dimension can express the strides");

    for (int64_t call = 0; call < calls; ++call) {
        int64_t at_a = 0, at_b = 0, at_c = 0, rest = call;
        for (int i = count - 1; i >= 0; --i) {
            const int64_t index = rest % loops[i].count;
            rest /= loops[i].count;
            at_a += index * loops[i].a, at_b += index * loops[i].b, at_c += index * loops[i].c;
        }
        FA_TRY(session.gemm(form_a.op, form_b.op, int(m), int(n), int(k), alpha, a.data + at_a * a.bytes, a.type,
                            int(form_a.ld), batch.a, b.data + at_b * b.bytes, b.type, int(form_b.ld), batch.b,
                            c.data + at_c * c.bytes, c.type, int(form_c.ld), batch.c, int(batch.count)));
    }
    return FA_OK;
}

} // namespace fa::cublas
