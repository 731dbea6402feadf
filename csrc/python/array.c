/* PyObject -> fa_view: which library an object belongs to (found out once per type), and what every description of
 * memory is checked for. The protocols themselves are read in numpy.c, interface.c and dlpack.c. */
#include "core.h"

#include <string.h>

/* ---- types ---- */

/* Looks through the classes a type derives from for one called `name` in a module whose name starts with `package`. */
static int derives_from(fa_state *state, PyTypeObject *type, const char *package, const char *name) {
    PyObject *mro = PyObject_GetAttr((PyObject *)type, state->names.__mro__);
    Py_ssize_t count = mro ? PyTuple_Size(mro) : -1;
    int found = count < 0 ? -1 : 0;
    for (Py_ssize_t n = 0; n < count && found == 0; n++) {
        PyObject *base = PyTuple_GetItem(mro, n), *module = NULL, *own = NULL;
        if (fa_optional_attribute(base, state->names.__module__, &module) < 0 ||
            fa_optional_attribute(base, state->names.__name__, &own) < 0) {
            found = -1;
        } else if (module && own && PyUnicode_Check(module)) {
            const char *text = PyUnicode_AsUTF8AndSize(module, NULL);
            size_t length = strlen(package);
            bool inside = text && strncmp(text, package, length) == 0;
            if (!text) PyErr_Clear();
            found = inside && (!name || fa_text_equals(own, name));
        }
        Py_XDECREF(module);
        Py_XDECREF(own);
    }
    Py_XDECREF(mro);
    return found;
}

/* A function of a library that has been imported: there is an array of its. NULL, without an exception, if it lacks it.
 */
static PyObject *function_of(const char *module_name, const char *name) {
    PyObject *module = module_name ? PyImport_ImportModule(module_name) : NULL;
    PyObject *function = module ? PyObject_GetAttrString(module, name) : NULL;
    Py_XDECREF(module);
    if (!function) PyErr_Clear();
    return function;
}

static void find_functions(fa_type *entry) {
    static const char *const makers[][2] = {
        [FA_LIB_OTHER] = {NULL, NULL},
        [FA_LIB_CUPY] = {"cupy", "ndarray"},
        [FA_LIB_JAX] = {"jax.dlpack", "from_dlpack"},
        [FA_LIB_NUMBA] = {"numba.cuda", "as_cuda_array"},
        [FA_LIB_TORCH] = {"torch", "empty"},
    };
    entry->maker = function_of(makers[entry->library][0], makers[entry->library][1]);
    if (entry->library == FA_LIB_CUPY) entry->current_stream = function_of("cupy.cuda", "get_current_stream");
    if (entry->library == FA_LIB_CUPY && !(entry->maker && entry->current_stream)) entry->library = FA_LIB_OTHER;
}

static fa_library library_of(fa_state *state, PyTypeObject *type) {
    static const struct {
        const char *package, *name;
        fa_library library;
    } known[] = {
        {"cupy", "ndarray", FA_LIB_CUPY}, {"jax", "Array", FA_LIB_JAX},      {"jax", "ArrayImpl", FA_LIB_JAX},
        {"numba", NULL, FA_LIB_NUMBA},    {"torch", "Tensor", FA_LIB_TORCH},
    };
    for (size_t n = 0; n < sizeof known / sizeof *known; n++) {
        int found = derives_from(state, type, known[n].package, known[n].name);
        if (found > 0) return known[n].library;
        if (found < 0) PyErr_Clear();
    }
    return FA_LIB_OTHER;
}

/* Flags of an array are asked for on the way of each call. Where C code answers, it is called directly, which saves 25
 * to 50 ns an array; `ask` says how. */
static int find_flag(fa_state *state, PyObject *object, PyObject *name, fa_flag *flag) {
    PyObject *class = NULL, *found;
    int has = fa_optional_attribute((PyObject *)Py_TYPE(object), name, &found);
    if (has <= 0) return has;
    flag->name = name;
    PyObject *bound;
    if (fa_optional_attribute(object, name, &bound) < 0) goto failed;
    if (bound && Py_IS_TYPE(bound, &PyCFunction_Type) && PyCFunction_GetFlags(bound) == METH_NOARGS &&
        PyCFunction_GetSelf(bound) == object)
        flag->function = PyCFunction_GetFunction(bound);
    flag->is_method = bound && PyCallable_Check(bound);
    Py_XDECREF(bound);
    if (Py_IS_TYPE(found, &PyGetSetDescr_Type)) {
        if (fa_optional_attribute(found, state->names.__objclass__, &class) < 0) goto failed;
        const PyGetSetDef *definition = class ? PyType_GetSlot((PyTypeObject *)class, Py_tp_getset) : NULL;
        for (; definition && definition->name; definition++)
            if (fa_text_equals(name, definition->name)) flag->getter = definition;
        Py_XDECREF(class);
    }
    Py_DECREF(found);
    return 1;
failed:
    Py_DECREF(found);
    return -1;
}

/* 1, 0, or -1 with an exception. */
static int ask(const fa_flag *flag, PyObject *object) {
    PyObject *value;
    if (flag->getter)
        value = flag->getter->get(object, flag->getter->closure);
    else if (flag->function)
        value = flag->function(object, NULL);
    else if (flag->is_method)
        value = PyObject_CallMethodObjArgs(object, flag->name, NULL);
    else
        value = PyObject_GetAttr(object, flag->name);
    if (!value) return -1;
    int truth = value == Py_False ? 0 : PyObject_IsTrue(value);
    Py_DECREF(value);
    return truth;
}

static fa_code classify(fa_state *state, PyObject *object, fa_type *entry, fa_status *status) {
    const fa_names *names = &state->names;
    PyTypeObject *type = Py_TYPE(object);
    PyObject *class = (PyObject *)type, *found;
    memset(entry, 0, sizeof *entry);
    entry->type = type;
    if (type == state->device_array) {
        entry->protocol = FA_BY_OWN;
        return FA_OK;
    }
    if (fa_numpy_is_array_type(type)) {
        entry->protocol = FA_BY_NUMPY;
        entry->masked = derives_from(state, type, "numpy.ma", "MaskedArray") > 0;
        if (PyErr_Occurred()) return fa_python_error(status);
        return FA_OK;
    }
    entry->library = library_of(state, type);
    find_functions(entry);
    if (find_flag(state, object, names->requires_grad, &entry->requires_grad) < 0 ||
        find_flag(state, object, names->is_neg, &entry->is_neg) < 0 ||
        find_flag(state, object, names->is_conj, &entry->is_conj) < 0)
        return fa_python_error(status);

    int has = fa_optional_attribute(class, names->__dlpack_c_exchange_api__, &found);
    if (has < 0) return fa_python_error(status);
    if (has) {
        fa_code code = fa_exchange_find(found, &entry->exchange, status);
        Py_DECREF(found);
        FA_TRY(code);
        entry->protocol = FA_BY_EXCHANGE;
        if (entry->exchange) return FA_OK;
    }
    int interface = fa_optional_attribute(class, names->__cuda_array_interface__, &found);
    Py_XDECREF(found);
    int dlpack = interface < 0 ? -1 : fa_optional_attribute(class, names->__dlpack__, &found);
    Py_XDECREF(found);
    if (interface < 0 || dlpack < 0) return fa_python_error(status);
    /* JAX's interface says neither its stream nor that it is ready; torch's neither its stream nor bfloat16. */
    bool prefers_dlpack = dlpack && (entry->library == FA_LIB_JAX || entry->library == FA_LIB_TORCH);
    entry->protocol = interface && !prefers_dlpack ? FA_BY_INTERFACE : dlpack ? FA_BY_DLPACK : FA_BY_UNKNOWN;
    return FA_OK;
}

static void drop_type(fa_type *entry) {
    Py_CLEAR(entry->maker);
    Py_CLEAR(entry->current_stream);
}

const fa_type *fa_type_of(fa_state *state, PyObject *object, fa_type *space) {
    PyTypeObject *type = Py_TYPE(object);
    int count = atomic_load_explicit(&state->type_count, memory_order_acquire);
    for (int n = 0; n < count; n++)
        if (state->types[n].type == type) return &state->types[n];

    fa_status status;
    if (classify(state, object, space, &status) != FA_OK) {
        drop_type(space);
        fa_raise(state, &status);
        return NULL;
    }
    pthread_mutex_lock(&state->lock);
    count = atomic_load_explicit(&state->type_count, memory_order_relaxed);
    const fa_type *entry = space;
    for (int n = 0; n < count; n++)
        if (state->types[n].type == type) entry = &state->types[n];
    if (entry == space && count < FA_TYPES_MAX) {
        state->types[count] = *space;
        Py_INCREF((PyObject *)type);
        entry = &state->types[count];
        atomic_store_explicit(&state->type_count, count + 1, memory_order_release);
    }
    pthread_mutex_unlock(&state->lock);
    if (entry != space && entry != &state->types[count]) drop_type(space); /* another thread was first */
    return entry;
}

void fa_types_clear(fa_state *state) {
    int count = atomic_exchange(&state->type_count, 0);
    for (int n = 0; n < count; n++) {
        drop_type(&state->types[n]);
        Py_CLEAR(state->types[n].type);
    }
}

/* ---- descriptions of memory ---- */

int64_t fa_view_elements(const fa_view *view) {
    int64_t elements = 1;
    for (int axis = 0; axis < view->ndim; axis++) elements *= view->shape[axis];
    return elements;
}

void fa_view_contiguous(fa_view *view) {
    uint64_t stride = 1; /* may wrap for shapes that fa_view_check() refuses */
    for (int axis = view->ndim - 1; axis >= 0; axis--) {
        view->strides[axis] = (int64_t)stride;
        stride *= view->shape[axis] > 0 ? (uint64_t)view->shape[axis] : 1;
    }
}

/* Largest |offset| of an element, in bytes, that a description may reach. */
#define REACH_MAX (INT64_C(1) << 62)

fa_code fa_view_check(const char *name, const fa_view *view, fa_status *status) {
    const int64_t size = (int64_t)fa_dtype_size(view->dtype);
    int64_t bytes = size, reach = 0, span;
    bool empty = false;
    for (int axis = 0; axis < view->ndim; axis++) {
        int64_t extent = view->shape[axis], stride = view->strides[axis];
        if (extent < 0)
            return fa_fail(status, FA_EVALUE, "%s has extent %lld on axis %d; accepted: extents >= 0", name,
                           (long long)extent, axis);
        if (extent == 0) empty = true;
        if (extent && (__builtin_mul_overflow(bytes, extent, &bytes) || bytes > REACH_MAX))
            return fa_fail(status, FA_EVALUE, "%s has extents whose product overflows 64 bits", name);
        if (extent > 1 &&
            (stride < -REACH_MAX || __builtin_mul_overflow(stride < 0 ? -stride : stride, extent, &span) ||
             __builtin_mul_overflow(span, size, &span) || __builtin_add_overflow(reach, span, &reach) ||
             reach > REACH_MAX))
            return fa_fail(status, FA_EVALUE, "%s has strides that overflow 64 bits", name);
    }
    if (empty) return FA_OK;
    if (((uintptr_t)view->data & (uintptr_t)(size - 1)) != 0)
        return fa_fail(status, FA_EBUFFER, "%s is not aligned in memory; accepted: a multiple of the item size, %lld",
                       name, (long long)size);
    if (!view->data) return fa_fail(status, FA_EBUFFER, "%s has a NULL data pointer, but it is not empty", name);
    return FA_OK;
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

fa_code fa_typestr_parse(const char *name, const char *text, fa_dtype *dtype, bool *unclear, fa_status *status) {
    static const struct {
        const char *text;
        fa_dtype dtype;
    } known[] = {{"f2", FA_F16}, {"f4", FA_F32}, {"f8", FA_F64}, {"b1", FA_BOOL}};
    *unclear = false;
    if (strlen(text) < 3 || !strchr("<>|=", text[0]))
        return fa_fail(status, FA_EBUFFER, "%s has the ill-formed typestr \"%.40s\"; accepted: such as \"<f2\"", name,
                       text);
    for (size_t n = 0; n < sizeof known / sizeof *known; n++)
        if (strcmp(text + 1, known[n].text) == 0) {
            if (text[0] == '>' && known[n].dtype != FA_BOOL)
                return fa_fail(status, FA_EBUFFER, "%s is big-endian; accepted: little-endian arrays", name);
            *dtype = known[n].dtype;
            return FA_OK;
        }
    if (strcmp(text + 1, "V2") == 0) {
        *dtype = FA_BF16;
        *unclear = true;
        return FA_OK;
    }
    return fa_fail(status, FA_ETYPE,
                   "%s has the typestr \"%.40s\"; accepted dtypes: float16, bfloat16, float32, float64 on the CPU, and "
                   "bool for a mask",
                   name, text);
}

/* ---- one array ---- */

/* What takes part in autograd, or stands for the negative of its memory, would lose that silently. */
static fa_code refuse_lazy(const fa_array *array, fa_status *status) {
    const fa_type *type = array->type;
    int truth = type->requires_grad.name ? ask(&type->requires_grad, array->object) : 0;
    if (truth > 0)
        return fa_fail(status, FA_EVALUE,
                       "%s requires grad, and there is no backward pass: gradients would be lost silently; pass "
                       "%s.detach()",
                       array->name, array->name);
    if (truth == 0 && type->is_neg.name) truth = ask(&type->is_neg, array->object);
    if (truth > 0)
        return fa_fail(status, FA_EVALUE, "%s is a negative view; pass %s.resolve_neg()", array->name, array->name);
    return truth < 0 ? fa_python_error(status) : FA_OK;
}

/* Conjugate views are complex, so that their dtype has been refused; this says it better. */
static fa_code refuse_conjugate(const fa_array *array, fa_status *status) {
    int truth = ask(&array->type->is_conj, array->object);
    if (truth < 0) return fa_python_error(status);
    if (truth == 0) return status->code;
    return fa_fail(status, FA_EVALUE,
                   "%s is a conjugate view, and complex; pass a real array (%s.resolve_conj() first)", array->name,
                   array->name);
}

/* A type that offers nothing may have instances that do. */
static fa_code read_unknown(fa_state *state, fa_array *array, fa_status *status) {
    PyObject *found;
    int has = fa_optional_attribute(array->object, state->names.__cuda_array_interface__, &found);
    if (has < 0) return fa_python_error(status);
    if (has) {
        fa_code code = fa_interface_read(state, array, found, status);
        Py_DECREF(found);
        return code;
    }
    has = fa_optional_attribute(array->object, state->names.__dlpack__, &found);
    if (has < 0) return fa_python_error(status);
    Py_XDECREF(found);
    if (has) return fa_dlpack_device(state, array, status);
    return fa_wrong_type(array->name, array->object,
                         "an array: NumPy, or an object with __cuda_array_interface__ or __dlpack__", status);
}

static fa_code read_memory(fa_state *state, fa_array *array, const fa_array *first, fa_status *status) {
    switch (array->type->protocol) {
    case FA_BY_NUMPY: return fa_numpy_read(state, array, status);
    case FA_BY_OWN: fa_device_array_read(array->object, array); return FA_OK;
    case FA_BY_EXCHANGE: return fa_exchange_read(state, array, first, status);
    case FA_BY_DLPACK: return fa_dlpack_device(state, array, status);
    case FA_BY_INTERFACE:
        return array->type->library == FA_LIB_CUPY ? fa_cupy_read(state, array, first, status)
                                                   : read_unknown(state, array, status);
    default: return read_unknown(state, array, status);
    }
}

fa_code fa_array_read(fa_state *state, fa_array *array, const char *name, PyObject *object, const fa_array *first,
                      fa_status *status) {
    array->name = name;
    array->object = object;
    array->has_stream = array->device_unknown = array->needs_stream = false;
    array->view.readonly = false;
    array->type = fa_type_of(state, object, &array->type_uncached);
    if (!array->type) return fa_python_error(status);
    FA_TRY(refuse_lazy(array, status));
    fa_code code = read_memory(state, array, first, status);
    return code == FA_ETYPE && array->type->is_conj.name ? refuse_conjugate(array, status) : code;
}

void fa_array_release(fa_array *array) {
    if (array->managed && array->managed->deleter) array->managed->deleter(array->managed);
    if (array->managed_versioned && array->managed_versioned->deleter)
        array->managed_versioned->deleter(array->managed_versioned);
    array->managed = NULL;
    array->managed_versioned = NULL;
    if (array->type == &array->type_uncached) drop_type(&array->type_uncached);
    array->type = NULL;
}
