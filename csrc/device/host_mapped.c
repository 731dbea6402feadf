/* Host memory that a device sees, and streams that are captured. See host_mapped.h. */
#include "device/host_mapped.h"

#include <string.h>

#if FA_HAVE_CUDA
#include <cuda_runtime_api.h>

static fa_code cuda_fail(fa_status *status, cudaError_t error, const char *what) {
    cudaGetLastError();
    return fa_fail(status, error == cudaErrorMemoryAllocation ? FA_EMEMORY : FA_ECUDA, "%s: %s (%s)", what,
                   cudaGetErrorName(error), cudaGetErrorString(error));
}

fa_code fa_mapped_alloc(size_t bytes, void **host, void **device, fa_status *status) {
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed; /* in which a capture minds no allocation */
    cudaError_t error = cudaThreadExchangeStreamCaptureMode(&mode);
    if (error != cudaSuccess) return cuda_fail(status, error, "cudaThreadExchangeStreamCaptureMode");
    error = cudaHostAlloc(host, bytes, cudaHostAllocMapped | cudaHostAllocPortable);
    if (error == cudaSuccess) {
        memset(*host, 0, bytes);
        error = cudaHostGetDevicePointer(device, *host, 0);
    }
    cudaThreadExchangeStreamCaptureMode(&mode);
    return error == cudaSuccess ? FA_OK : cuda_fail(status, error, "mapped host memory");
}

fa_code fa_stream_capturing(void *stream, bool *capturing, fa_status *status) {
    enum cudaStreamCaptureStatus state = cudaStreamCaptureStatusNone;
    const cudaError_t error = cudaStreamIsCapturing(stream, &state);
    *capturing = state != cudaStreamCaptureStatusNone || error == cudaErrorStreamCaptureImplicit;
    if (error == cudaSuccess) return FA_OK;
    if (!*capturing) return cuda_fail(status, error, "cudaStreamIsCapturing");
    cudaGetLastError(); /* the legacy stream waits for one that is captured */
    return FA_OK;
}

#else /* a build without CUDA has no device */

fa_code fa_mapped_alloc(size_t bytes, void **host, void **device, fa_status *status) {
    (void)bytes, (void)host, (void)device;
    return fa_fail(status, FA_ECUDA, "this build of fa_ext has no CUDA kernels");
}

fa_code fa_stream_capturing(void *stream, bool *capturing, fa_status *status) {
    (void)stream, (void)status;
    *capturing = false;
    return FA_OK;
}

#endif
