/* Libraries opened at run time. See library.h. */
#include "device/library.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct {
    const char *name;
    const char *files[2]; /* as the dynamic loader knows them, newest first */
} known[FA_LIBRARY_COUNT] = {
    [FA_CUBLAS] = {"cuBLAS", {"libcublas.so.13", "libcublas.so.12"}},
};

void fa_libraries_begin(fa_libraries *libraries) { pthread_mutex_init(&libraries->lock, NULL); }

void fa_libraries_end(fa_libraries *libraries) {
    for (int n = 0; n < FA_LIBRARY_COUNT; n++) free(libraries->path[n]);
    pthread_mutex_destroy(&libraries->lock);
}

void fa_library_set_path(fa_libraries *libraries, fa_library_name library, const char *path) {
    pthread_mutex_lock(&libraries->lock);
    free(libraries->path[library]);
    libraries->path[library] = path ? strdup(path) : NULL;
    pthread_mutex_unlock(&libraries->lock);
}

static void *open_first(const fa_libraries *libraries, fa_library_name library) {
    const char *path = libraries->path[library];
    void *handle = path ? dlopen(path, RTLD_LAZY | RTLD_LOCAL) : NULL;
    for (int n = 0; n < 2 && !handle; n++) handle = dlopen(known[library].files[n], RTLD_LAZY | RTLD_LOCAL);
    return handle;
}

/* With the lock held. */
static const char *try_to_open(fa_libraries *libraries, fa_library_name library) {
    if (libraries->handle[library]) return NULL;
    void *handle = open_first(libraries, library);
    if (handle) {
        dlclose(handle); /* what it takes is spent by a launch alone */
        return NULL;
    }
    const char *error = dlerror();
    snprintf(libraries->error[library], sizeof libraries->error[library], "%s was not found (%s)", known[library].name,
             error ? error : "?");
    return libraries->error[library];
}

const char *fa_library_error(fa_libraries *libraries, fa_library_name library) {
    pthread_mutex_lock(&libraries->lock);
    const char *error = try_to_open(libraries, library);
    pthread_mutex_unlock(&libraries->lock);
    return error;
}

fa_code fa_library_open(fa_libraries *libraries, fa_library_name library, void **handle, fa_status *status) {
    fa_code code = FA_OK;
    pthread_mutex_lock(&libraries->lock);
    if (!libraries->handle[library]) libraries->handle[library] = open_first(libraries, library);
    *handle = libraries->handle[library];
    if (!*handle) code = fa_fail(status, FA_EUNSUPPORTED, "%s cannot be opened: %s", known[library].name, dlerror());
    pthread_mutex_unlock(&libraries->lock);
    return code;
}
