/* The part of the CUDA runtime that kernels use, over the emulator. */
#pragma once
#include <algorithm>
#include <cmath>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <tuple>

#include "emulator.h"

#define __CUDACC_EMULATED__ 1
#define __CUDA_ARCH__       FA_EMULATED_ARCH
#define __global__
#define __device__
#define __host__
#define __grid_constant__
#define __restrict__ __restrict
#define __forceinline__  inline __attribute__((always_inline))
#define __align__(bytes) alignas(bytes)
#define __launch_bounds__(...)

#define threadIdx (::emu::self->thread)
#define blockIdx  (::emu::self->block)
inline emu::Index &blockDim = emu::block_dim, &gridDim = emu::grid_dim;
constexpr int warpSize = 32;

#include "cuda_math.h"
#include "cuda_vectors.h"
#include "cuda_warp.h"

/* ---- errors ---- */

enum cudaError_t {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInvalidConfiguration = 9,
    cudaErrorLaunchTimeout = 702,
    cudaErrorIllegalAddress = 700,
    cudaErrorAssert = 710,
    cudaErrorHardwareStackError = 714,
    cudaErrorIllegalInstruction = 715,
    cudaErrorMisalignedAddress = 716,
    cudaErrorInvalidPc = 718,
    cudaErrorLaunchFailure = 719,
    cudaErrorEmulator = 9999, // the emulator stopped the kernel: cudaGetErrorString() says why
};
cudaError_t cudaGetLastError();
cudaError_t cudaPeekAtLastError();
const char *cudaGetErrorName(cudaError_t error);
const char *cudaGetErrorString(cudaError_t error);

/* ---- launches; streams run at once ---- */

using cudaStream_t = void *;
struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

enum cudaLaunchAttributeID {
    cudaLaunchAttributeClusterDimension = 4,
    cudaLaunchAttributeProgrammaticStreamSerialization = 6,
};
struct cudaLaunchAttribute {
    cudaLaunchAttributeID id;
    struct {
        dim3 clusterDim;
        int programmaticStreamSerializationAllowed;
    } val;
};
struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    cudaStream_t stream;
    cudaLaunchAttribute *attrs;
    unsigned numAttrs;
};

enum cudaFuncAttribute {
    cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
    cudaFuncAttributeNonPortableClusterSizeAllowed = 14,
};
cudaError_t emu_allow_shared(const void *kernel, int bytes);
void emu_allow_large_clusters(const void *kernel);
int emu_active_clusters(const cudaLaunchConfig_t &config);
template <class Kernel> cudaError_t cudaFuncSetAttribute(Kernel *kernel, cudaFuncAttribute attribute, int value) {
    const void *address = reinterpret_cast<const void *>(kernel);
    if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize) return emu_allow_shared(address, value);
    if (value) emu_allow_large_clusters(address);
    return cudaSuccess;
}
template <class Kernel>
cudaError_t cudaOccupancyMaxActiveClusters(int *count, Kernel *, const cudaLaunchConfig_t *config) {
    return *count = emu_active_clusters(*config), cudaSuccess;
}

enum cudaStreamCaptureMode { cudaStreamCaptureModeGlobal, cudaStreamCaptureModeRelaxed = 2 };
inline cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *) { return cudaSuccess; }

inline cudaError_t cudaGetDevice(int *device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t) {
    return memset(to, value, bytes), cudaSuccess;
}
inline cudaError_t cudaMemset2DAsync(void *to, size_t pitch, int value, size_t width, size_t rows, cudaStream_t) {
    for (size_t row = 0; row < rows; ++row) memset(static_cast<char *>(to) + row * pitch, value, width);
    return cudaSuccess;
}

namespace emu {

/* Runs a kernel whose arguments are converted as a launch converts them; the error is kept for cudaGetLastError(). */
cudaError_t launch_checked(const void *kernel, const Grid &grid, void (*body)(void *), void *context);

template <class... Params, class... Args>
cudaError_t launch(void (*kernel)(Params...), const Grid &grid, Args &&...args) {
    struct Call {
        void (*kernel)(Params...);
        std::tuple<std::decay_t<Params>...> params;
    } call{kernel, {std::forward<Args>(args)...}};
    return launch_checked(
        reinterpret_cast<const void *>(kernel), grid,
        [](void *context) {
            const Call &call = *static_cast<Call *>(context);
            std::apply(call.kernel, call.params);
        },
        &call);
}

/* kernel<<<grid, block, shared, stream>>>(...) becomes this. */
template <class... Params> struct Launcher {
    void (*kernel)(Params...);
    Grid grid;
    template <class... Args> void operator()(Args &&...args) const {
        (void)launch(kernel, grid, std::forward<Args>(args)...);
    }
};
template <class... Params>
Launcher<Params...> launcher(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared = 0,
                             cudaStream_t = nullptr) {
    return {kernel, {{grid.x, grid.y, grid.z}, {block.x, block.y, block.z}, {1, 1, 1}, shared}};
}

} // namespace emu

template <class... Params, class... Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *config, void (*kernel)(Params...), Args &&...args) {
    emu::Grid grid = {{config->gridDim.x, config->gridDim.y, config->gridDim.z},
                      {config->blockDim.x, config->blockDim.y, config->blockDim.z},
                      {1, 1, 1},
                      config->dynamicSmemBytes};
    for (unsigned n = 0; n < config->numAttrs; ++n)
        if (config->attrs[n].id == cudaLaunchAttributeClusterDimension) {
            const dim3 &c = config->attrs[n].val.clusterDim;
            grid.cluster = {c.x, c.y, c.z};
        }
    return emu::launch(kernel, grid, std::forward<Args>(args)...);
}
