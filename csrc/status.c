/* Status codes and their text. */
#include "fa.h"

#include <stdarg.h>
#include <stdio.h>

fa_code fa_fail(fa_status *status, fa_code code, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    /* cppcheck-suppress ctuuninitvar ; the message is an output */
    vsnprintf(status->message, sizeof status->message, format, arguments);
    va_end(arguments);
    status->code = code;
    return code;
}

const char *fa_dtype_name(fa_dtype dtype) {
    static const char *const names[] = {
#define FA_WORD(name, word, bytes) word,
        FA_DTYPES(FA_WORD)
#undef FA_WORD
    };
    return (unsigned)dtype < FA_DTYPE_COUNT ? names[dtype] : "unknown";
}
