/* Libraries that are never linked but opened at run time, where they are installed. */
#ifndef FA_LIBRARY_H
#define FA_LIBRARY_H

#include <pthread.h>

#include "fa.h"

/* The libraries that a context has found. */
typedef struct fa_libraries {
    pthread_mutex_t lock;
    char *path[FA_LIBRARY_COUNT]; /* NULL, or the file to try first */
    void *handle[FA_LIBRARY_COUNT];
    char error[FA_LIBRARY_COUNT][512];
} fa_libraries;

/* `libraries` is zeroed. */
void fa_libraries_begin(fa_libraries *libraries);
/* Libraries that were opened stay open: others in the process may use them. */
void fa_libraries_end(fa_libraries *libraries);

/* The file to try first; NULL: the dynamic loader's alone. */
void fa_library_set_path(fa_libraries *libraries, fa_library_name library, const char *path);

/* Why the library cannot be opened, in text that lasts as long as `libraries`, or NULL. */
const char *fa_library_error(fa_libraries *libraries, fa_library_name library);

/* A handle for dlsym(). FA_EUNSUPPORTED with the loader's reason. */
fa_code fa_library_open(fa_libraries *libraries, fa_library_name library, void **handle, fa_status *status);

#endif
