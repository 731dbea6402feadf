/* Host memory that a device sees, and streams that are captured: CUDA, beside device.h. */
#ifndef FA_HOST_MAPPED_H
#define FA_HOST_MAPPED_H

#include "fa.h"

/* Zeroed host memory and its address on the current device. It is there until the process ends: a kernel or a graph may
 * still hold the address. Allowed while a stream is captured. */
fa_code fa_mapped_alloc(size_t bytes, void **host, void **device, fa_status *status);

/* Whether work on a stream of the current device is being captured. */
fa_code fa_stream_capturing(void *stream, bool *capturing, fa_status *status);

#endif
