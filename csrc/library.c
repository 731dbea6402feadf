/* Libraries opened at run time. See library.h. */
#include "library.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device.h"

static const struct {
    const char *name;
    const char *files[2]; /* as the dynamic loader knows them, newest first */
} known[FA_LIBRARY_COUNT] = {
    [FA_CUBLAS] = {"cuBLAS", {"libcublas.so.13", "libcublas.so.12"}},
};

typedef struct state {
    char *path[FA_LIBRARY_COUNT];
    void *handle[FA_LIBRARY_COUNT];
    char error[FA_LIBRARY_COUNT][512];
} state;

static void free_state(void *slot) {
    state *s = slot;
    for (int n = 0; n < FA_LIBRARY_COUNT; n++) free(s->path[n]);
    free(s);
}

/* NULL: out of memory. With the context locked. */
static state *state_of(fa_context *context) {
    static const char key;
    void **slot = fa_context_slot(context, &key, free_state);
    if (slot && !*slot) *slot = calloc(1, sizeof(state));
    return slot ? *slot : NULL;
}

void fa_library_set_path(fa_context *context, fa_library_name library, const char *path) {
    fa_context_lock(context);
    state *s = state_of(context);
    if (s) {
        free(s->path[library]);
        s->path[library] = path ? strdup(path) : NULL;
    }
    fa_context_unlock(context);
}

static void *open_first(const state *s, fa_library_name library) {
    void *handle = s->path[library] ? dlopen(s->path[library], RTLD_LAZY | RTLD_LOCAL) : NULL;
    for (int n = 0; n < 2 && !handle; n++) handle = dlopen(known[library].files[n], RTLD_LAZY | RTLD_LOCAL);
    return handle;
}

const char *fa_library_error(fa_context *context, fa_library_name library) {
    state *s = state_of(context);
    if (!s) return "out of memory";
    if (s->handle[library]) return NULL;
    void *handle = open_first(s, library);
    if (handle) {
        dlclose(handle); /* what it takes is spent by a launch alone */
        return NULL;
    }
    const char *error = dlerror();
    snprintf(s->error[library], sizeof s->error[library], "%s was not found (%s)", known[library].name,
             error ? error : "?");
    return s->error[library];
}

fa_code fa_library_open(fa_context *context, fa_library_name library, void **handle, fa_status *status) {
    fa_code code = FA_OK;
    fa_context_lock(context);
    state *s = state_of(context);
    if (s && !s->handle[library]) s->handle[library] = open_first(s, library);
    if (!s)
        code = fa_fail(status, FA_EMEMORY, "out of memory");
    else if (!s->handle[library])
        code = fa_fail(status, FA_EUNSUPPORTED, "%s cannot be opened: %s", known[library].name, dlerror());
    else
        *handle = s->handle[library];
    fa_context_unlock(context);
    return code;
}
