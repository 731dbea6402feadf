/* Types: which library an object belongs to and how it is spoken to, found out once per type. */
#include "python/arrays/arrays.h"

#include <pthread.h>
#include <string.h>

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

/* A function of a library that has been imported: there is an array of its. NULL, without an exception, if it lacks it;
 * false with an exception. */
static bool find_function(const char *module_name, const char *name, PyObject **function) {
    PyObject *module = module_name ? PyImport_ImportModule(module_name) : NULL;
    *function = module ? PyObject_GetAttrString(module, name) : NULL;
    Py_XDECREF(module);
    return *function || fa_forget_error();
}

static bool find_functions(fa_type *entry) {
    static const char *const makers[][2] = {
        [FA_LIB_OTHER] = {NULL, NULL},
        [FA_LIB_CUPY] = {"cupy", "ndarray"},
        [FA_LIB_JAX] = {"jax.dlpack", "from_dlpack"},
        [FA_LIB_NUMBA] = {"numba.cuda", "as_cuda_array"},
        [FA_LIB_TORCH] = {"torch", "empty"},
    };
    if (!find_function(makers[entry->library][0], makers[entry->library][1], &entry->maker)) return false;
    if (entry->library == FA_LIB_CUPY && !find_function("cupy.cuda", "get_current_stream", &entry->current_stream))
        return false;
    if (entry->library == FA_LIB_CUPY && !(entry->maker && entry->current_stream)) entry->library = FA_LIB_OTHER;
    if (entry->library == FA_LIB_TORCH && !find_function("torch", "is_grad_enabled", &entry->grad_enabled))
        return false;
    return true;
}

static bool find_library(fa_state *state, PyTypeObject *type, fa_library *library) {
    static const struct {
        const char *package, *name;
        fa_library library;
    } known[] = {
        {"cupy", "ndarray", FA_LIB_CUPY}, {"jax", "Array", FA_LIB_JAX},      {"jax", "ArrayImpl", FA_LIB_JAX},
        {"numba", NULL, FA_LIB_NUMBA},    {"torch", "Tensor", FA_LIB_TORCH},
    };
    for (size_t n = 0; n < sizeof known / sizeof *known; n++) {
        int found = derives_from(state, type, known[n].package, known[n].name);
        if (found > 0) *library = known[n].library;
        if (found > 0) return true;
        if (found < 0 && !fa_forget_error()) return false;
    }
    *library = FA_LIB_OTHER;
    return true;
}

/* Flags of an array are asked for on the way of each call. Where C code answers, it is called directly, which saves 25
 * to 50 ns an array; fa_flag_ask() does. */
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

int fa_flag_ask(const fa_flag *flag, PyObject *object) {
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
    if (fa_numpy_is_scalar_type(type)) {
        entry->protocol = FA_BY_SCALAR;
        return FA_OK;
    }
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
    if (!find_library(state, type, &entry->library) || !find_functions(entry) ||
        find_flag(state, object, names->requires_grad, &entry->requires_grad) < 0 ||
        find_flag(state, object, names->is_neg, &entry->is_neg) < 0 ||
        find_flag(state, object, names->is_conj, &entry->is_conj) < 0)
        return fa_python_error(status);
    if (entry->library == FA_LIB_CUPY && find_flag(state, object, names->_c_contiguous, &entry->contiguous) < 0)
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

void fa_type_drop(fa_type *entry) {
    Py_CLEAR(entry->maker);
    Py_CLEAR(entry->current_stream);
    Py_CLEAR(entry->grad_enabled);
}

const fa_type *fa_type_of(fa_state *state, PyObject *object, fa_type *space) {
    PyTypeObject *type = Py_TYPE(object);
    int count = atomic_load_explicit(&state->type_count, memory_order_acquire);
    for (int n = 0; n < count; n++)
        if (state->types[n].type == type) return &state->types[n];

    fa_status status;
    if (classify(state, object, space, &status) != FA_OK) {
        fa_type_drop(space);
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
    if (entry != space && entry != &state->types[count]) fa_type_drop(space); /* another thread was first */
    return entry;
}

void fa_types_clear(fa_state *state) {
    int count = atomic_exchange(&state->type_count, 0);
    for (int n = 0; n < count; n++) {
        fa_type_drop(&state->types[n]);
        Py_CLEAR(state->types[n].type);
    }
}
