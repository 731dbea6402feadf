/* A kernel's reason in words. */
#ifndef FA_WHY_H
#define FA_WHY_H

#include "fa.h"

/* Writes what `why` says about a problem on `device`, in words that a user understands, cut to `size` bytes; returns
 * `text`. */
const char *fa_why_text(const fa_why *why, const fa_device_info *device, char *text, size_t size);

#endif
