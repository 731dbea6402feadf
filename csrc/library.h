/* Libraries that are never linked but opened at run time, where they are installed. */
#ifndef FA_LIBRARY_H
#define FA_LIBRARY_H

#include "fa.h"

/* The file to try first; NULL: the dynamic loader's alone. */
void fa_library_set_path(fa_context *context, fa_library_name library, const char *path);

/* Why the library cannot be opened, in text that lasts as long as the context, or NULL. With the context locked. */
const char *fa_library_error(fa_context *context, fa_library_name library);

/* A handle for dlsym(). The library stays open: others in the process may use it. FA_EUNSUPPORTED with the loader's
 * reason. */
fa_code fa_library_open(fa_context *context, fa_library_name library, void **handle, fa_status *status);

#endif
