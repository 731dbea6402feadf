/* Host side of a launch: CUDA errors become text in the fa_status. */
#ifndef FA_LAUNCH_CUH
#define FA_LAUNCH_CUH

#include <cuda_runtime.h> // cudaError_t, cudaGetErrorName, cudaGetLastError

#include "fa.h" // fa_status, fa_fail

/* Turns a CUDA error into FA_ECUDA with its name and the call that failed, and clears CUDA's last error. A context that
 * is lost (illegal address, launch failure ...) keeps failing, which the message says. */
inline fa_code fa_cuda_fail(fa_status *status, cudaError_t error, const char *what) {
    cudaGetLastError();
    bool lost = error == cudaErrorIllegalAddress || error == cudaErrorLaunchFailure || error == cudaErrorAssert ||
                error == cudaErrorHardwareStackError || error == cudaErrorIllegalInstruction ||
                error == cudaErrorMisalignedAddress || error == cudaErrorInvalidPc || error == cudaErrorLaunchTimeout;
    fa_code code = error == cudaErrorMemoryAllocation ? FA_EMEMORY : FA_ECUDA;
    return fa_fail(status, code, "%s: %s (%s)%s", what, cudaGetErrorName(error), cudaGetErrorString(error),
                   lost ? "; this process's CUDA context is lost, restart the process" : "");
}

/* Evaluates a call that returns cudaError_t; leaves the enclosing function with FA_ECUDA unless it succeeded. */
#define FA_CUDA_TRY(status, call)                                                                                      \
    do {                                                                                                               \
        cudaError_t fa_cuda_error = (call);                                                                            \
        if (fa_cuda_error != cudaSuccess) return fa_cuda_fail((status), fa_cuda_error, #call);                         \
    } while (0)

#endif
