/* Descriptions of memory, whichever protocol they came by. */
#include "python/arrays/arrays.h"

#include <string.h>

#include "problem/operands.h"

int64_t fa_view_elements(const fa_view *view) {
    int64_t elements = 1;
    for (int axis = 0; axis < view->ndim; axis++) elements *= view->shape[axis];
    return elements;
}

PyObject *fa_shape_tuple(int ndim, const int64_t *shape) {
    PyObject *tuple = PyTuple_New(ndim);
    for (int axis = 0; tuple && axis < ndim; axis++) {
        PyObject *extent = PyLong_FromLongLong(shape[axis]);
        if (!extent || PyTuple_SetItem(tuple, axis, extent) < 0) Py_CLEAR(tuple);
    }
    return tuple;
}

fa_code fa_view_byte_strides(const char *name, fa_view *view, const int64_t *byte_strides, fa_status *status) {
    const int64_t size = (int64_t)fa_dtype_size(view->dtype);
    const int shift = __builtin_ctzll((unsigned long long)size); /* item sizes are powers of two */
    bool empty = false;
    for (int axis = 0; axis < view->ndim; axis++) empty |= view->shape[axis] == 0;
    for (int axis = 0; axis < view->ndim; axis++) {
        view->strides[axis] = byte_strides[axis] >> shift;
        if ((byte_strides[axis] & (size - 1)) != 0 && view->shape[axis] > 1 && !empty) /* else it means nothing */
            return fa_fail(status, FA_EBUFFER,
                           "%s has a stride of %lld bytes on axis %d; accepted: multiples of the item size, %lld", name,
                           (long long)byte_strides[axis], axis, (long long)size);
    }
    return fa_view_check(name, view, status);
}

const char *fa_accepted_dtypes(const char *name) {
    for (int n = 0; n < FA_OPERAND_COUNT; n++)
        if (strcmp(name, fa_operands[n].words) == 0) return fa_operands[n].dtypes;
    if (strcmp(name, "ids") == 0) return "int32, int64";
    return strcmp(name, "array") == 0
               ? "float16, bfloat16 (ml_dtypes), float32, float64, bool, int32, int64, uint8 and uint32"
               : fa_operands[FA_OPERAND_q].dtypes;
}

fa_code fa_typestr_parse(const char *name, const char *text, fa_dtype *dtype, bool *unclear, fa_status *status) {
    static const struct {
        const char *text;
        fa_dtype dtype;
    } known[] = {{"f2", FA_F16}, {"f4", FA_F32}, {"f8", FA_F64}, {"b1", FA_BOOL},
                 {"i4", FA_I32}, {"i8", FA_I64}, {"u1", FA_U8},  {"u4", FA_U32}};
    *unclear = false;
    if (strlen(text) < 3 || !strchr("<>|=", text[0]))
        return fa_fail(status, FA_EBUFFER, "%s has the ill-formed typestr \"%.40s\"; accepted: such as \"<f2\"", name,
                       text);
    for (size_t n = 0; n < sizeof known / sizeof *known; n++)
        if (strcmp(text + 1, known[n].text) == 0) {
            if (text[0] == '>' && fa_dtype_size(known[n].dtype) > 1)
                return fa_fail(status, FA_EBUFFER, "%s is big-endian; accepted: little-endian arrays", name);
            *dtype = known[n].dtype;
            return FA_OK;
        }
    if (strcmp(text + 1, "V2") == 0) {
        *dtype = FA_BF16;
        *unclear = true;
        return FA_OK;
    }
    return fa_fail(status, FA_ETYPE, "%s has the typestr \"%.40s\"; accepted dtypes: %s", name, text,
                   fa_accepted_dtypes(name));
}
