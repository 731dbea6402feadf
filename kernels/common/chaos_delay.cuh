/* The delays and reports of a chaos build (chaos.cuh). The build includes this before anything else of a CUDA
 * compilation, so that __syncthreads and __syncwarp are points too. */
#pragma once
// Before __syncthreads becomes a macro: headers that call it.
#include <atomic>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <mma.h>
#include <stdint.h> // uint32_t

/* Where a wait ended that lasted too long. `hung` is written last. */
struct fa_chaos_report_t {
    uint32_t site, block[3], warp, lane, phase, hung;
};

namespace fa::chaos {

struct State {
    fa_chaos_report_t *report; // mapped host memory
    uint32_t seed;
};
static __constant__ State state;

constexpr uint32_t kLongestWait = 2'000'000'000; // ns

__device__ __forceinline__ uint32_t now() { // ns, of 4.3 s
    uint32_t ns;
    asm volatile("mov.u32 %0, %%globaltimer_lo;" : "=r"(ns));
    return ns;
}

__device__ __forceinline__ uint32_t warp_index() { return threadIdx.x / 32; } // blocks have one axis

__device__ __forceinline__ uint32_t mixed(uint32_t x) { // the finaliser of MurmurHash3
    x = (x ^ x >> 16) * 0x85ebca6bu;
    x = (x ^ x >> 13) * 0xc2b2ae35u;
    return x ^ x >> 16;
}

/* Visits of this block's warps, in shared memory; they begin at the time of its start. */
__device__ __forceinline__ uint32_t *visits() {
    __shared__ uint32_t counts[32];
    return counts;
}

__device__ __forceinline__ void begin() {
    if (threadIdx.x < 32) visits()[threadIdx.x] = now();
    __syncthreads();
}

/* Few registers: these stand between products of a kernel that has none to spare. */
__device__ __forceinline__ void point(uint32_t site) {
    const unsigned active = __activemask();
    uint32_t draw = 0;
    if ((active & ((1u << threadIdx.x % 32) - 1)) == 0) { // the first of the active lanes
        const uint32_t warp = warp_index();
        draw = mixed(state.seed * 0x9e3779b9u + blockIdx.x + (blockIdx.y << 12) + (blockIdx.z << 20));
        draw = mixed(draw + (warp << 16 | site));
        draw = mixed(draw + atomicAdd(visits() + warp, 1u));
    }
    draw = __reduce_or_sync(active, draw);
    const uint32_t kind = draw % 16'000, begun = now(), amount = mixed(draw);
    if (kind < 16) {
        while (now() - begun < 200'000 + amount % 1'800'000) __nanosleep(500);
    } else if (kind < 1'016) {
        while (now() - begun < 1'000 + amount % 19'000) {
        }
    }
    __syncwarp(active);
}

/* For a loop that waits since `begun`: ends the kernel where it has done so for too long. */
__device__ __forceinline__ void limit(uint32_t begun, uint32_t site, uint32_t phase) {
    if (now() - begun < kLongestWait) return;
    if (fa_chaos_report_t *report = state.report) {
        report->site = site, report->warp = warp_index(), report->phase = phase;
        report->lane = threadIdx.x % 32;
        report->block[0] = blockIdx.x, report->block[1] = blockIdx.y, report->block[2] = blockIdx.z;
        __threadfence_system();
        report->hung = 1;
        __threadfence_system();
    }
    __trap();
}

} // namespace fa::chaos

/* kernels/chaos.cu: the seed of this process (FA_CHAOS_SEED) and where reports go. */
extern "C" cudaError_t fa_chaos_settings(uint32_t *seed, fa_chaos_report_t **report);

namespace fa::chaos {

/* Gives the kernels of this compilation seed and report, before their first launch on the device: a copy before each
 * would keep dependent launches apart. */
inline cudaError_t arm(cudaStream_t stream) {
    static State host; // a captured copy reads it again when its graph is launched
    static std::atomic<uint64_t> armed;
    int device;
    if (cudaError_t error = cudaGetDevice(&device)) return error;
    if (armed >> device & 1) return cudaSuccess;
    if (cudaError_t error = fa_chaos_settings(&host.seed, &host.report)) return error;
    cudaStreamCaptureStatus capturing;
    if (cudaError_t error = cudaStreamIsCapturing(stream, &capturing)) return error;
    if (cudaError_t error = cudaMemcpyToSymbolAsync(state, &host, sizeof host, 0, cudaMemcpyHostToDevice, stream))
        return error;
    if (capturing == cudaStreamCaptureStatusNone) armed |= uint64_t(1) << device;
    return cudaSuccess;
}

} // namespace fa::chaos

#define FA_CHAOS_POINT(site)         fa::chaos::point(site)
#define FA_CHAOS_BEGIN()             fa::chaos::begin()
#define FA_CHAOS_ARM(stream, launch) FA_CUDA_TRY(launch, fa::chaos::arm(static_cast<cudaStream_t>(stream)))

#define __syncthreads()              (fa::chaos::point(__LINE__), __syncthreads())
#define __syncwarp(...)              (fa::chaos::point(__LINE__), __syncwarp(__VA_ARGS__))
