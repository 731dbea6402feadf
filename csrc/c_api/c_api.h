/* The C interface: what the table of fa_ext/include/fa_ext.h does. Front ends in C use it as programs do. */
#ifndef FA_C_API_H
#define FA_C_API_H

#include "device/device.h"
#include "fa_ext.h"

/* The table. Its functions work in the context that the first call of the process gives, which is then never freed. */
const fa_ext_api *fa_capi_table(fa_context *context);

/* The same once fa_capi_table() has been called. */
extern const fa_ext_api fa_capi;

/* A function of the table that runs an operation. `stream_known`: the stream is one of the arrays' device for sure, and
 * is not asked. */
int fa_capi_run(fa_op op, const void *arguments, const fa_ext_run *run, bool stream_known);

/* fa_ext_array.device of memory that CUDA knows; FA_EXT_CPU for host memory. */
fa_code fa_capi_device(const void *pointer, int32_t *device, fa_status *status);
/* The same of a stream; false where that is not known. In a fraction of the time. */
bool fa_capi_stream_device(void *stream, int32_t *device);

#endif
