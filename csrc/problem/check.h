/* Shared by the validation of every operation. Each failure names the argument, what was given and what is accepted;
 * `first` is the array that decides for the call, and `first_name` the argument it is. */
#ifndef FA_CHECK_H
#define FA_CHECK_H

#include "fa.h"

/* Extents beyond this cannot be real data; below it index arithmetic with FA_UNBOUNDED stays inside 64 bits. */
#define FA_MAX_EXTENT (INT64_C(1) << 47)

typedef struct fa_shape_text {
    char text[200];
} fa_shape_text;

/* "(2, 8, 512, 64)" */
fa_shape_text fa_show_shape(const int64_t *shape, int ndim);

/* Axis of batch, head, sequence or head_dim (0..3) in the user's layout. */
static inline int fa_axis_of(fa_layout layout, int axis) {
    return layout == FA_BSHD && (axis == 1 || axis == 2) ? 3 - axis : axis;
}

/* Axis of batch, head, row or head_dim (0..3) in a view of four axes, or of three, (rows, heads, head_dim), which has
 * no batch: -1. */
static inline int fa_view_axis(const fa_view *view, fa_layout layout, int axis) {
    static const int packed[4] = {-1, 1, 0, 2};
    return view->ndim == 3 ? packed[axis] : fa_axis_of(layout, axis);
}

static inline int64_t fa_view_extent(const fa_view *view, fa_layout layout, int axis) {
    const int source = fa_view_axis(view, layout, axis);
    return source < 0 ? 1 : view->shape[source];
}

/* A view of four axes, or of three, as an operand of (batch, heads, rows, head_dim). */
void fa_view_operand(fa_operand *operand, const fa_view *view, fa_layout layout);
/* A view of an LSE, (B, H, S) or of packed rows (H, T), as an operand of (B, H, S). */
void fa_lse_operand(fa_operand *operand, const fa_view *view);

/* Bytes from view->data to the first that the view covers and past the last; both 0 when it is empty. */
void fa_view_range(const fa_view *view, int64_t *low, int64_t *high);
bool fa_view_empty(const fa_view *view);
/* Whether the memory from the first to the last element of each has a byte in common. */
bool fa_views_overlap(const fa_view *view, const fa_view *other);
/* Gives a view the strides of a C-contiguous array. */
void fa_view_contiguous(fa_view *view);
/* Each element has memory of its own. */
bool fa_view_distinct(const fa_view *view);

/* Checks any description, with strides in elements: extents are not negative, products and offsets fit 64 bits, data
 * is aligned. */
fa_code fa_view_check(const char *name, const fa_view *view, fa_status *status);
fa_code fa_check_device(const char *name, const fa_view *view, const char *first_name, const fa_view *first,
                        fa_status *status);
fa_code fa_check_extents(const char *name, const fa_view *view, fa_status *status);
/* The dtype of bias and sinks. */
fa_code fa_check_extra_dtype(const char *name, const fa_view *view, const char *first_name, const fa_view *first,
                             fa_status *status);
/* Shape, dtype (a set of bits), device. */
fa_code fa_check_array(const char *name, const fa_view *view, const int64_t *shape, int ndim, uint32_t dtypes,
                       const char *first_name, const fa_view *first, fa_status *status);
/* The same, and writable, each element with memory of its own. */
fa_code fa_check_output(const char *name, const fa_view *view, const int64_t *shape, int ndim, uint32_t dtypes,
                        const char *first_name, const fa_view *first, fa_status *status);
/* `other` may be NULL. */
fa_code fa_check_disjoint(const char *name, const fa_view *view, const char *other_name, const fa_view *other,
                          fa_status *status);
/* int32, this shape, contiguous along its last axis. `axes` names the extents: "(batch,)". */
fa_code fa_check_indices(const char *name, const fa_view *view, const int64_t *shape, int ndim, const char *axes,
                         const char *first_name, const fa_view *first, fa_status *status);
fa_code fa_check_sinks(const fa_view *sinks, int64_t heads, const char *first_name, const fa_view *first,
                       fa_operand *operand, fa_dtype *dtype, fa_status *status);

#endif
