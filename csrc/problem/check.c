/* Shared by the validation of every operation. See check.h. */
#include "problem/check.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

fa_shape_text fa_show_shape(const int64_t *shape, int ndim) {
    fa_shape_text shown = {"("};
    size_t used = 1;
    for (int axis = 0; axis < ndim && used < sizeof shown.text; axis++)
        used += (size_t)snprintf(shown.text + used, sizeof shown.text - used, axis ? ", %lld" : "%lld",
                                 (long long)shape[axis]);
    if (used < sizeof shown.text) snprintf(shown.text + used, sizeof shown.text - used, ndim == 1 ? ",)" : ")");
    return shown;
}

static const char *device_text(fa_device device, char buffer[32]) {
    if (device.kind == FA_CPU) return "the CPU";
    snprintf(buffer, 32, "CUDA device %d", device.id);
    return buffer;
}

static bool same_device(fa_device a, fa_device b) { return a.kind == b.kind && a.id == b.id; }

fa_code fa_check_device(const char *name, const fa_view *view, const char *first_name, const fa_view *first,
                        fa_status *status) {
    if (same_device(view->device, first->device)) return FA_OK;
    char given[32], wanted[32];
    return fa_fail(status, FA_EVALUE, "%s is on %s, but %s is on %s; all arrays of a call must be on one device", name,
                   device_text(view->device, given), first_name, device_text(first->device, wanted));
}

/* Largest |offset| of an element, in bytes, that a description may reach. */
#define REACH_MAX (INT64_C(1) << 62)

/* Neither empty nor near anything that overflows: what most views are, without a product. */
static bool is_small(const fa_view *view) {
    uint64_t extents = 0, strides = 0;
    bool empty = false;
    for (int axis = 0; axis < view->ndim; axis++) {
        const int64_t stride = view->strides[axis];
        extents |= (uint64_t)view->shape[axis];
        strides |= (uint64_t)(stride < 0 ? ~stride : stride);
        empty |= view->shape[axis] == 0;
    }
    return view->ndim <= 4 && !empty && extents >> 14 == 0 && strides >> 40 == 0;
}

static fa_code check_reach(const char *name, const fa_view *view, int64_t size, bool *empty, fa_status *status) {
    int64_t bytes = size, reach = 0, span;
    for (int axis = 0; axis < view->ndim; axis++) {
        int64_t extent = view->shape[axis], stride = view->strides[axis];
        if (extent < 0)
            return fa_fail(status, FA_EVALUE, "%s has extent %lld on axis %d; accepted: extents >= 0", name,
                           (long long)extent, axis);
        if (extent == 0) *empty = true;
        if (extent && (__builtin_mul_overflow(bytes, extent, &bytes) || bytes > REACH_MAX))
            return fa_fail(status, FA_EVALUE, "%s has extents whose product overflows 64 bits", name);
        if (extent > 1 &&
            (stride < -REACH_MAX || __builtin_mul_overflow(stride < 0 ? -stride : stride, extent, &span) ||
             __builtin_mul_overflow(span, size, &span) || __builtin_add_overflow(reach, span, &reach) ||
             reach > REACH_MAX))
            return fa_fail(status, FA_EVALUE, "%s has strides that overflow 64 bits", name);
    }
    return FA_OK;
}

fa_code fa_view_check(const char *name, const fa_view *view, fa_status *status) {
    const int64_t size = (int64_t)fa_dtype_size(view->dtype);
    bool empty = false;
    if (!is_small(view)) FA_TRY(check_reach(name, view, size, &empty, status));
    if (empty) return FA_OK;
    if (((uintptr_t)view->data & (uintptr_t)(size - 1)) != 0)
        return fa_fail(status, FA_EBUFFER, "%s is not aligned in memory; accepted: a multiple of the item size, %lld",
                       name, (long long)size);
    if (!view->data)
        return fa_fail(status, FA_EBUFFER,
                       "%s has a NULL data pointer, but it is not empty; accepted: an array that has memory", name);
    return FA_OK;
}

fa_code fa_check_extents(const char *name, const fa_view *view, fa_status *status) {
    int64_t elements = 1;
    for (int axis = 0; axis < view->ndim; axis++) {
        int64_t extent = view->shape[axis];
        if (extent < 0) return fa_fail(status, FA_EVALUE, "%s has a negative extent on axis %d", name, axis);
        if (extent > FA_MAX_EXTENT || __builtin_mul_overflow(elements, extent ? extent : 1, &elements))
            return fa_fail(status, FA_EVALUE, "%s has shape %s, which is too large to address", name,
                           fa_show_shape(view->shape, view->ndim).text);
    }
    return FA_OK;
}

fa_code fa_check_extra_dtype(const char *name, const fa_view *view, const char *first_name, const fa_view *first,
                             fa_status *status) {
    if (view->dtype == first->dtype || view->dtype == FA_F32) return FA_OK;
    return fa_fail(status, FA_ETYPE, "%s has dtype %s; accepted: %s's dtype (%s) or float32", name,
                   fa_dtype_name(view->dtype), first_name, fa_dtype_name(first->dtype));
}

typedef struct byte_range {
    uintptr_t begin, end; /* empty when equal */
} byte_range;

void fa_view_range(const fa_view *view, int64_t *low, int64_t *high) {
    int64_t first = 0, end = 1;
    *low = *high = 0;
    for (int axis = 0; axis < view->ndim; axis++) {
        if (view->shape[axis] == 0) return;
        int64_t reach = (view->shape[axis] - 1) * view->strides[axis];
        if (reach < 0)
            first += reach;
        else
            end += reach;
    }
    int64_t size = (int64_t)fa_dtype_size(view->dtype);
    *low = first * size;
    *high = end * size;
}

static byte_range range_of(const fa_view *view) {
    int64_t low, high;
    fa_view_range(view, &low, &high);
    return (byte_range){(uintptr_t)view->data + (uintptr_t)low, (uintptr_t)view->data + (uintptr_t)high};
}

bool fa_views_overlap(const fa_view *view, const fa_view *other) {
    const byte_range a = range_of(view), b = range_of(other);
    return a.begin < b.end && b.begin < a.end && a.begin != a.end && b.begin != b.end;
}

fa_code fa_check_disjoint(const char *name, const fa_view *view, const char *other_name, const fa_view *other,
                          fa_status *status) {
    if (!other || !fa_views_overlap(view, other)) return FA_OK;
    return fa_fail(status, FA_EVALUE, "%s overlaps %s in memory; give it memory of its own", name, other_name);
}

void fa_view_contiguous(fa_view *view) {
    uint64_t stride = 1; /* may wrap for shapes that are refused later */
    for (int axis = view->ndim - 1; axis >= 0; axis--) {
        view->strides[axis] = (int64_t)stride;
        stride *= view->shape[axis] > 0 ? (uint64_t)view->shape[axis] : 1;
    }
}

/* Strides of empty arrays carry no meaning; NumPy sets them to 0. */
bool fa_view_empty(const fa_view *view) {
    for (int axis = 0; axis < view->ndim; axis++)
        if (view->shape[axis] == 0) return true;
    return false;
}

/* Along every axis a step leads beyond all that the axes of smaller steps span. */
bool fa_view_distinct(const fa_view *view) {
    for (int axis = 0; axis < view->ndim && !fa_view_empty(view); axis++) {
        if (view->shape[axis] == 1) continue;
        const int64_t step = llabs(view->strides[axis]);
        int64_t span = 0;
        for (int other = 0; other < view->ndim; other++)
            if (other != axis &&
                (llabs(view->strides[other]) < step || (llabs(view->strides[other]) == step && other > axis)))
                span += (view->shape[other] - 1) * llabs(view->strides[other]);
        if (step <= span || step == 0) return false;
    }
    return true;
}

fa_code fa_check_array(const char *name, const fa_view *view, const int64_t *shape, int ndim, uint32_t dtypes,
                       const char *first_name, const fa_view *first, fa_status *status) {
    bool same = view->ndim == ndim;
    for (int axis = 0; axis < ndim && same; axis++) same = view->shape[axis] == shape[axis];
    if (!same)
        return fa_fail(status, FA_EVALUE, "%s has shape %s; accepted: %s", name,
                       fa_show_shape(view->shape, view->ndim).text, fa_show_shape(shape, ndim).text);
    if (!(dtypes >> view->dtype & 1)) {
        char accepted[64] = "";
        for (int n = 0; n < FA_DTYPE_COUNT; n++)
            if (dtypes >> n & 1)
                snprintf(accepted + strlen(accepted), sizeof accepted - strlen(accepted), "%s%s", *accepted ? ", " : "",
                         fa_dtype_name((fa_dtype)n));
        return fa_fail(status, FA_ETYPE, "%s has dtype %s; accepted: %s", name, fa_dtype_name(view->dtype), accepted);
    }
    return fa_check_device(name, view, first_name, first, status);
}

fa_code fa_check_output(const char *name, const fa_view *view, const int64_t *shape, int ndim, uint32_t dtypes,
                        const char *first_name, const fa_view *first, fa_status *status) {
    FA_TRY(fa_check_array(name, view, shape, ndim, dtypes, first_name, first, status));
    if (view->readonly) return fa_fail(status, FA_EVALUE, "%s is read-only; accepted: a writable array", name);
    if (!fa_view_distinct(view))
        return fa_fail(status, FA_EVALUE, "%s has strides %s; its elements must be distinct", name,
                       fa_show_shape(view->strides, view->ndim).text);
    return FA_OK;
}

fa_code fa_check_indices(const char *name, const fa_view *view, const int64_t *shape, int ndim, const char *axes,
                         const char *first_name, const fa_view *first, fa_status *status) {
    if (view->dtype == FA_I64)
        return fa_fail(status, FA_ETYPE, "%s has dtype int64; accepted: int32, such as %s.astype(\"int32\")", name,
                       name);
    if (view->dtype != FA_I32)
        return fa_fail(status, FA_ETYPE, "%s has dtype %s; accepted: int32", name, fa_dtype_name(view->dtype));
    FA_TRY(fa_check_device(name, view, first_name, first, status));
    bool same = view->ndim == ndim;
    for (int axis = 0; axis < ndim && same; axis++) same = view->shape[axis] == shape[axis];
    if (!same)
        return fa_fail(status, FA_EVALUE, "%s has shape %s; accepted: %s = %s", name,
                       fa_show_shape(view->shape, view->ndim).text, axes, fa_show_shape(shape, ndim).text);
    if (view->shape[ndim - 1] > 1 && view->strides[ndim - 1] != 1 && !fa_view_empty(view))
        return fa_fail(status, FA_EVALUE, "%s has strides %s; accepted: 1 along its last axis", name,
                       fa_show_shape(view->strides, ndim).text);
    return FA_OK;
}

fa_code fa_check_sinks(const fa_view *sinks, int64_t heads, const char *first_name, const fa_view *first,
                       fa_operand *operand, fa_dtype *dtype, fa_status *status) {
    static char none; /* data of zero sinks: never read, but not NULL, which means none are given */
    FA_TRY(fa_check_extra_dtype("sinks", sinks, first_name, first, status));
    FA_TRY(fa_check_device("sinks", sinks, first_name, first, status));
    if (sinks->ndim != 1 || sinks->shape[0] != heads)
        return fa_fail(status, FA_EVALUE, "sinks has shape %s; accepted: (heads,) = (%lld,)",
                       fa_show_shape(sinks->shape, sinks->ndim).text, (long long)heads);
    operand->data = sinks->data ? sinks->data : &none;
    operand->stride[0] = sinks->shape[0] == 1 ? 0 : sinks->strides[0];
    *dtype = sinks->dtype;
    return FA_OK;
}

void fa_view_operand(fa_operand *operand, const fa_view *view, fa_layout layout) {
    operand->data = view->data;
    for (int axis = 0; axis < 4; axis++) {
        const int source = fa_view_axis(view, layout, axis);
        operand->stride[axis] = source < 0 || view->shape[source] == 1 ? 0 : view->strides[source];
    }
}

void fa_lse_operand(fa_operand *operand, const fa_view *view) {
    *operand = (fa_operand){.data = view->data};
    for (int axis = 0; axis < view->ndim; axis++)
        operand->stride[axis + 3 - view->ndim] = view->shape[axis] == 1 ? 0 : view->strides[axis];
}
