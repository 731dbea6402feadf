/* The kernel table as Python sees it: names, kernels loaded at run time, and what the build and its devices have. */
#include "call.h"
#include "device/library.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cpu/cpu_simd.h"

static fa_code read_operation(PyObject *value, fa_op *op, fa_status *status) {
    static const char *const names[FA_OP_COUNT] = FA_OPERATION_NAMES;
    const char *accepted = fa_parameters[FA_ARG_operation].doc;
    *op = FA_FORWARD;
    for (int n = 0; n < FA_OP_COUNT && value; n++) {
        *op = (fa_op)n;
        if (fa_text_equals(value, names[n])) return FA_OK;
    }
    if (!value) return FA_OK;
    if (!PyUnicode_Check(value)) return fa_wrong_type("operation", value, accepted, status);
    char shown[160];
    return fa_fail(status, FA_EVALUE, "operation is \"%.80s\"; accepted: %s", fa_shown(value, shown), accepted);
}

PyObject *fa_py_kernels(PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *keywords) {
    fa_state *state = PyModule_GetState(module);
    fa_op op;
    fa_bound bound;
    fa_status status;
    if (fa_bind(&state->signature[FA_FN_kernels], args, count, keywords, &bound, &status) != FA_OK ||
        read_operation(fa_given(&bound, FA_ARG_operation), &op, &status) != FA_OK)
        return fa_raise(state, &status);
    PyObject *names = PyList_New(0);
    for (int n = 0; names && fa_kernel_at(n); n++) {
        if (fa_kernel_at(n)->op != op) continue;
        PyObject *name = PyUnicode_FromString(fa_kernel_at(n)->name);
        if (!name || PyList_Append(names, name) < 0) Py_CLEAR(names);
        Py_XDECREF(name);
    }
    PyObject *fixed = names ? PyList_AsTuple(names) : NULL;
    Py_XDECREF(names);
    return fixed;
}

static const fa_loaded *find_loaded(fa_state *state, const char *name) {
    const fa_loaded *entry = atomic_load_explicit(&state->loaded, memory_order_acquire);
    while (entry && strcmp(entry->name, name) != 0) entry = entry->next;
    return entry;
}

fa_code fa_kernel_named(fa_state *state, fa_op op, const char *argument, const char *name, const fa_kernel **kernel,
                        const char **listed_name, fa_status *status) {
    *kernel = fa_kernel_find(op, name);
    if (*kernel) {
        *listed_name = (*kernel)->name;
        return FA_OK;
    }
    const fa_loaded *found = find_loaded(state, name);
    if (found && found->kernel->op == op) {
        *kernel = found->kernel;
        *listed_name = found->name;
        return FA_OK;
    }
    char names[1024] = "";
    size_t used = 0;
    for (int n = 0; fa_kernel_at(n) && used < sizeof names; n++)
        if (fa_kernel_at(n)->op == op)
            used +=
                (size_t)snprintf(names + used, sizeof names - used, "%s%s", used ? ", " : "", fa_kernel_at(n)->name);
    const fa_loaded *entry = atomic_load_explicit(&state->loaded, memory_order_acquire);
    for (; entry && used < sizeof names; entry = entry->next)
        if (entry->kernel->op == op)
            used += (size_t)snprintf(names + used, sizeof names - used, "%s%s", used ? ", " : "", entry->name);
    return fa_fail(status, FA_EVALUE, "%s is \"%.80s\", which names no kernel of this build; accepted: %s", argument,
                   name, names);
}

/* ---- kernels loaded at run time ---- */

/* "/tmp/simt.v3.so" -> "simt" */
static void name_of_path(const char *path, char *name, size_t size) {
    const char *slash = strrchr(path, '/');
    snprintf(name, size, "%s", slash ? slash + 1 : path);
    name[strcspn(name, ".")] = 0;
}

static fa_code check_kernel(const char *path, const char *name, const fa_kernel *found, fa_status *status) {
    if (!found)
        return fa_fail(
            status, FA_EVALUE,
            "path: %.500s does not export fa_kernel_%.100s; accepted: a library that exports that kernel, or "
            "another name as kernel=",
            path, name);
    if (found->abi != FA_KERNEL_ABI)
        return fa_fail(status, FA_EVALUE, "path: %.500s was built for kernel ABI %d; accepted: %d, build it again",
                       path, found->abi, FA_KERNEL_ABI);
    if (!found->name || !found->summary || !found->plan || !found->launch || (unsigned)found->op >= FA_OP_COUNT)
        return fa_fail(status, FA_EVALUE, "path: fa_kernel_%.100s in %.500s is incomplete", name, path);
    return FA_OK;
}

/* The kernel's name, or <name>@<n> where that is taken. With the lock held. */
static char *free_name(fa_state *state, const fa_kernel *kernel) {
    char text[160];
    snprintf(text, sizeof text, "%.120s", kernel->name);
    for (int n = 1; fa_kernel_find(kernel->op, text) || find_loaded(state, text); n++)
        snprintf(text, sizeof text, "%.120s@%d", kernel->name, n);
    return strdup(text);
}

static void drop_loaded(fa_loaded *entry) {
    free(entry->name);
    free(entry->path);
    free(entry);
}

/* An entry that will stand first in the list; NULL: out of memory. With the lock held. */
static fa_loaded *new_loaded(fa_state *state, const char *path, void *handle, const fa_kernel *kernel) {
    fa_loaded *entry = calloc(1, sizeof *entry);
    if (!entry) return NULL;
    entry->name = free_name(state, kernel);
    entry->path = strdup(path);
    entry->handle = handle;
    entry->kernel = kernel;
    entry->next = atomic_load_explicit(&state->loaded, memory_order_relaxed);
    if (entry->name && entry->path) return entry;
    drop_loaded(entry);
    return NULL;
}

/* `path` is absolute: dlopen() would look for a bare file name on the library path. */
static fa_code load_kernel(fa_state *state, const char *path, const char *kernel, const char **name,
                           fa_status *status) {
    void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!handle) return fa_fail(status, FA_EVALUE, "path: %.1500s", dlerror());
    char symbol[160];
    snprintf(symbol, sizeof symbol, "fa_kernel_%.120s", kernel);
    const fa_kernel *found = dlsym(handle, symbol);
    fa_code code = check_kernel(path, kernel, found, status);
    if (code != FA_OK) {
        dlclose(handle);
        return code;
    }
    pthread_mutex_lock(&state->lock);
    fa_loaded *entry = atomic_load_explicit(&state->loaded, memory_order_relaxed);
    while (entry && entry->kernel != found) entry = entry->next;
    if (entry) { /* the same library again */
        dlclose(handle);
    } else {
        entry = new_loaded(state, path, handle, found);
        if (entry)
            atomic_store_explicit(&state->loaded, entry, memory_order_release);
        else
            dlclose(handle);
    }
    pthread_mutex_unlock(&state->lock);
    if (!entry) return fa_fail(status, FA_EMEMORY, "no memory for a loaded kernel");
    *name = entry->name;
    return FA_OK;
}

PyObject *fa_py_load(PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *keywords) {
    fa_state *state = PyModule_GetState(module);
    fa_status status;
    fa_bound bound;
    if (fa_bind(&state->signature[FA_FN_load], args, count, keywords, &bound, &status) != FA_OK)
        return fa_raise(state, &status);
    PyObject *path = fa_given(&bound, FA_ARG_path), *kernel = fa_given(&bound, FA_ARG_exported), *encoded = NULL;
    if (kernel && !PyUnicode_Check(kernel)) {
        fa_wrong_type("kernel", kernel, fa_parameters[FA_ARG_exported].doc, &status);
        return fa_raise(state, &status);
    }
    if (!PyUnicode_FSConverter(path, &encoded)) return NULL;
    const char *path_text = PyBytes_AsString(encoded);
    const char *name = NULL;
    char derived[160];
    const char *kernel_text = kernel ? fa_shown(kernel, derived) : derived;
    if (!kernel) name_of_path(path_text, derived, sizeof derived);
    char *absolute = realpath(path_text, NULL);
    fa_code code;
    if (!absolute)
        code = fa_fail(&status, FA_EVALUE, "path: %.1500s: %s", path_text, strerror(errno));
    else
        code = load_kernel(state, absolute, kernel_text, &name, &status);
    free(absolute);
    Py_DECREF(encoded);
    return code == FA_OK ? PyUnicode_FromString(name) : fa_raise(state, &status);
}

PyObject *fa_loaded_kernels(PyObject *module, PyObject *unused) {
    (void)unused;
    fa_state *state = PyModule_GetState(module);
    PyObject *kernels = PyDict_New();
    const fa_loaded *entry = atomic_load_explicit(&state->loaded, memory_order_acquire);
    for (; kernels && entry; entry = entry->next) {
        PyObject *value = Py_BuildValue("(ss)", entry->path, entry->kernel->summary);
        if (!value || PyDict_SetItemString(kernels, entry->name, value) < 0) Py_CLEAR(kernels);
        Py_XDECREF(value);
    }
    return kernels;
}

/* Libraries stay open: a plan elsewhere may still point into them. */
void fa_loaded_clear(fa_state *state) {
    fa_loaded *entry = atomic_exchange(&state->loaded, NULL);
    while (entry) {
        fa_loaded *next = entry->next;
        drop_loaded(entry);
        entry = next;
    }
}

/* ---- what there is ---- */

bool fa_cublas_seek(fa_state *state) {
    if (atomic_exchange(&state->cublas_sought, true) || !fa_kernel_find(FA_FORWARD, "cublas")) return true;
    PyObject *module = PyImport_ImportModule("fa_ext._cublas");
    PyObject *found = module ? PyObject_CallMethod(module, "find", NULL) : NULL;
    const char *path = found && found != Py_None ? PyUnicode_AsUTF8AndSize(found, NULL) : NULL;
    if (path) fa_library_set_path(fa_context_libraries(state->context), FA_CUBLAS, path);
    const bool told = fa_forget_error(); /* the loader's own search remains */
    Py_XDECREF(found);
    Py_XDECREF(module);
    if (!told) atomic_store(&state->cublas_sought, false);
    return told;
}

/* The build's: FA_INSTANCES, and the names of the instances that it left out, apart by spaces. */
extern const char fa_instance_set[], fa_left_out[];

PyObject *fa_build_info(PyObject *module, PyObject *unused) {
    (void)module;
    (void)unused;
    const int version = fa_cuda_toolkit();
    char toolkit[32];
    snprintf(toolkit, sizeof toolkit, "%d.%d", version / 1000, version % 1000 / 10);
    PyObject *kernels = PyDict_New();
    for (int n = 0; kernels && fa_kernel_at(n); n++) {
        const fa_kernel *kernel = fa_kernel_at(n);
        PyObject *value = Py_BuildValue("(ss)", kernel->device == FA_CPU ? "cpu" : "cuda", kernel->summary);
        if (!value || PyDict_SetItemString(kernels, kernel->name, value) < 0) Py_CLEAR(kernels);
        Py_XDECREF(value);
    }
    if (!kernels) return NULL;
#ifdef FA_HAVE_CHAOS
    PyObject *chaos = Py_True;
#else
    PyObject *chaos = Py_False;
#endif
    PyObject *names = PyUnicode_FromString(fa_left_out), *left_out = names ? PyUnicode_Split(names, NULL, -1) : NULL;
    Py_XDECREF(names);
    if (!left_out) {
        Py_DECREF(kernels);
        return NULL;
    }
    return Py_BuildValue("{s:s,s:O,s:O,s:z,s:s,s:N,s:N}", "version", FA_VERSION, "cuda", version ? Py_True : Py_False,
                         "chaos", chaos, "toolkit", version ? toolkit : NULL, "instances", fa_instance_set, "left_out",
                         left_out, "kernels", kernels);
}

PyObject *fa_cpu_info(PyObject *module, PyObject *unused) {
    (void)unused;
    fa_state *state = PyModule_GetState(module);
    fa_status status;
    const fa_device_info *info;
    if (fa_device_info_get(state->context, (fa_device){FA_CPU, 0}, &info, &status) != FA_OK)
        return fa_raise(state, &status);
    const char *isa = NULL;
#if FA_HAVE_cpu_simd
    isa = fa_cpu_simd_isa(info);
#endif
    return Py_BuildValue("{s:s,s:z,s:i,s:K,s:K}", "name", info->name, "cpu_simd", isa, "threads", info->sm_count,
                         "memory_bytes", (unsigned long long)info->memory_bytes, "workspace_limit",
                         (unsigned long long)info->workspace_limit);
}

PyObject *fa_device_count_py(PyObject *module, PyObject *unused) {
    (void)unused;
    fa_state *state = PyModule_GetState(module);
    fa_status status;
    int count = 0;
    if (fa_device_count(state->context, &count, &status) != FA_OK) return fa_raise(state, &status);
    return PyLong_FromLong(count);
}

PyObject *fa_device_info_py(PyObject *module, PyObject *index) {
    fa_state *state = PyModule_GetState(module);
    fa_status status;
    const fa_device_info *info;
    long number;
    if (fa_read_index("index", index, 0, 4095, "the index of a CUDA device, from 0", &number, &status) != FA_OK)
        return fa_raise(state, &status);
    if (!atomic_load(&state->cublas_sought) && !fa_cublas_seek(state)) return NULL;
    if (fa_device_info_get(state->context, (fa_device){FA_CUDA, (int)number}, &info, &status) != FA_OK)
        return fa_raise(state, &status);
    return Py_BuildValue(
        "{s:i,s:s,s:i,s:i,s:K,s:K,s:K,s:K,s:K,s:i,s:i,s:O,s:z}", "index", (int)number, "name", info->name, "cc",
        info->cc, "sm_count", info->sm_count, "smem_per_block", (unsigned long long)info->smem_per_block, "smem_per_sm",
        (unsigned long long)info->smem_per_sm, "l2_bytes", (unsigned long long)info->l2_bytes, "memory_bytes",
        (unsigned long long)info->memory_bytes, "workspace_limit", (unsigned long long)info->workspace_limit,
        "driver_version", info->driver_version, "runtime_version", info->runtime_version, "tensor_maps",
        info->tensor_maps ? Py_True : Py_False, "cublas_error", info->library_error[FA_CUBLAS]);
}
