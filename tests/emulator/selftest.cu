/* The checks of the emulator itself: instructions against their definition, and faults that it must name.
 *
 * `emulator_selftest(name, message, size)` runs one of the kernels below; returns how many of its checks fail, or -1
 * with the emulator's message. */
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdio.h>
#include <string.h>

namespace {

__device__ int failures;
__device__ void expect(bool right) { failures += !right; }

__device__ uint32_t address_of(const void *pointer) { return uint32_t(__cvta_generic_to_shared(pointer)); }

/* ---- right ---- */

__global__ void shuffles() {
    const int lane = threadIdx.x % 32;
    expect(__shfl_sync(~0u, lane, 5) == 5);
    expect(__shfl_sync(~0u, lane, 1, 8) == (lane & ~7) + 1);
    expect(__shfl_xor_sync(~0u, lane, 3) == (lane ^ 3));
    expect(__shfl_up_sync(~0u, lane, 2) == (lane < 2 ? lane : lane - 2));
    expect(__shfl_down_sync(~0u, lane, 2) == (lane > 29 ? lane : lane + 2));
    expect(__ballot_sync(~0u, lane % 3 == 0) == 0x49249249u);
    expect(__any_sync(~0u, lane == 7) && !__any_sync(~0u, 0) && __all_sync(~0u, 1) && !__all_sync(~0u, lane != 7));
    expect(__reduce_add_sync(~0u, lane) == 496 && __reduce_max_sync(~0u, lane) == 31);
    if (lane < 7) expect(__reduce_add_sync(0x7fu, lane) == 21);
    __syncwarp();
}

__global__ void barriers() {
    __shared__ int sum;
    __shared__ int part[4];
    if (threadIdx.x == 0) sum = 0;
    __syncthreads();
    atomicAdd(&sum, int(threadIdx.x));
    expect(__syncthreads_count(threadIdx.x < 40) == 40);
    expect(sum == 128 * 127 / 2);
    const int pair = threadIdx.x / 64; // warps of a pair: the first only arrives, the second waits
    if (threadIdx.x / 32 % 2 == 0) {
        if (threadIdx.x % 32 == 0) part[pair] = 10 + pair;
        __syncwarp();
        asm volatile("bar.arrive %0, 64;" ::"r"(1 + pair) : "memory");
    } else {
        asm volatile("bar.sync %0, 64;" ::"r"(1 + pair) : "memory");
        expect(part[pair] == 10 + pair);
    }
}

/* Matrix m holds 64 m + 8 row + column at each element. */
__global__ void matrices() {
    __shared__ __align__(16) uint16_t x[4][8][8];
    const int lane = threadIdx.x;
    for (int i = lane; i < 256; i += 32) (&x[0][0][0])[i] = uint16_t(i);
    __syncwarp();
    uint32_t r[4];
    const uint32_t row = address_of(x[lane / 8][lane % 8]);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row));
    for (int m = 0; m < 4; ++m) {
        const uint32_t first = 64 * m + 8 * (lane / 4) + 2 * (lane % 4);
        expect(r[m] == (first | (first + 1) << 16));
    }
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row));
    for (int m = 0; m < 4; ++m) {
        const uint32_t first = 64 * m + 8 * (2 * (lane % 4)) + lane / 4;
        expect(r[m] == (first | (first + 8) << 16));
    }
    uint32_t back;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(back) : "r"(r[1]));
    const uint32_t first = 64 + 8 * (lane / 4) + 2 * (lane % 4);
    expect(back == (first | (first + 1) << 16));
    __syncwarp();
    for (int i = lane; i < 256; i += 32) (&x[0][0][0])[i] = 0;
    __syncwarp();
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(r[0]),
                 "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
    __syncwarp();
    for (int i = lane; i < 256; i += 32) expect((&x[0][0][0])[i] == i);
}

/* A is the row plus 1 on its diagonal, B counts: D = A B. */
__global__ void products() {
    const int lane = threadIdx.x, g = lane / 4, t = 2 * (lane % 4);
    const auto pair = [](float low, float high) {
        const __half2 both = __floats2half2_rn(low, high);
        return *reinterpret_cast<const uint32_t *>(&both);
    };
    const auto at_a = [](int r, int c) { return r == c ? float(r + 1) : 0.0f; };
    const auto at_b = [](int r, int c) { return float(8 * r + c); };
    float d[4] = {0.5f, 0.5f, 0.5f, 0.5f};
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(pair(at_a(g, t), at_a(g, t + 1))), "r"(pair(at_a(g + 8, t), at_a(g + 8, t + 1))),
                   "r"(pair(at_a(g, t + 8), at_a(g, t + 9))), "r"(pair(at_a(g + 8, t + 8), at_a(g + 8, t + 9))),
                   "r"(pair(at_b(t, g), at_b(t + 1, g))), "r"(pair(at_b(t + 8, g), at_b(t + 9, g))));
    for (int i = 0; i < 4; ++i) {
        const int r = g + i / 2 * 8, c = t + i % 2;
        expect(d[i] == 0.5f + float(r + 1) * at_b(r, c));
    }
}

__global__ void copies(const uint4 *from) {
    __shared__ uint4 to[32];
    const uint32_t at = address_of(&to[threadIdx.x]);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from + threadIdx.x),
                 "r"(threadIdx.x < 16 ? 16 : 4)
                 : "memory");
    asm volatile("cp.async.commit_group;" ::: "memory");
    asm volatile("cp.async.wait_group %0;" ::"n"(0) : "memory");
    __syncthreads();
    const uint4 x = to[31 - threadIdx.x];
    expect(x.x == 31 - threadIdx.x && x.w == (31 - threadIdx.x < 16 ? 7 : 0));
}

/* Each warp in its turn, last to first. */
__global__ void turns(int *turn) {
    const int warp = threadIdx.x / 32;
    if (threadIdx.x % 32 == 0) {
        while (atomicAdd(turn, 0) != warp) {
        }
        atomicAdd(turn, -1);
    }
    __syncwarp();
}

__global__ void unwritten(float *out) {
    extern __shared__ float x[];
    out[threadIdx.x] = x[threadIdx.x];
    expect(isnan(x[threadIdx.x]));
}

/* ---- wrong: the emulator says what ---- */

__global__ void unjoined() {
    if (threadIdx.x < 32) __syncthreads();
}
__global__ void diverged() {
    if (threadIdx.x < 16)
        __syncwarp();
    else
        __any_sync(~0u, 1);
}
__global__ void beyond() {
    extern __shared__ float x[];
    if (threadIdx.x == 5) x[256] = 1;
}
__global__ void before() {
    extern __shared__ float x[];
    if (threadIdx.x == 5) x[-1] = 1;
}
__global__ void null_pointer(int *p) { p[threadIdx.x] = 1; }
__global__ void beyond_the_window() {
    extern __shared__ float x[];
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(address_of(x) + 4096), "r"(1) : "memory");
}
__global__ void misaligned_shared() {
    extern __shared__ float x[];
    reinterpret_cast<float4 *>(x)[threadIdx.x] = make_float4(0, 0, 0, 0);
    if (threadIdx.x == 3) *reinterpret_cast<float4 *>(x + 130) = make_float4(1, 2, 3, 4);
}
__global__ void misaligned_global(const uint4 *from, float *to) {
    to[threadIdx.x] = reinterpret_cast<const float2 *>(from)[threadIdx.x].x;
    if (threadIdx.x == 2) to[0] = reinterpret_cast<const float2 *>(reinterpret_cast<const float *>(from) + 5)->y;
}
__global__ void uninitialised() {
    __shared__ uint64_t barrier;
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address_of(&barrier)) : "memory");
}
__global__ void too_many_threads() {}
__global__ void race(int *out) {
    __shared__ int x[64];
    x[threadIdx.x] = int(threadIdx.x);
    out[threadIdx.x] = x[threadIdx.x ^ 32]; // no barrier
    expect(out[threadIdx.x] == int(threadIdx.x ^ 32));
}

} // namespace

extern "C" __attribute__((visibility("default"))) int emulator_selftest(const char *name, char *message, size_t size) {
    alignas(16) uint4 given[32];
    for (unsigned n = 0; n < 32; ++n) given[n] = {n, 0, 0, 7};
    float floats[64];
    int ints[64];
    failures = 0;
    const auto is = [&](const char *other) { return !strcmp(name, other); };
    if (is("shuffles")) shuffles<<<2, 64>>>();
    if (is("barriers")) barriers<<<3, 128>>>();
    if (is("matrices")) matrices<<<1, 32>>>();
    if (is("products")) products<<<1, 32>>>();
    if (is("copies")) copies<<<1, 32>>>(given);
    ints[0] = 3;
    if (is("turns")) turns<<<1, 128>>>(ints);
    if (is("turns")) failures += ints[0] != -1;
    if (is("unwritten")) unwritten<<<1, 64, 1024>>>(floats);
    if (is("unjoined")) unjoined<<<1, 64>>>();
    if (is("diverged")) diverged<<<1, 32>>>();
    if (is("beyond")) beyond<<<1, 32, 1024>>>();
    if (is("before")) before<<<1, 32, 1024>>>();
    if (is("null_pointer")) null_pointer<<<1, 32>>>(nullptr);
    if (is("beyond_the_window")) beyond_the_window<<<1, 32, 1024>>>();
    if (is("misaligned_shared")) misaligned_shared<<<1, 32, 1024>>>();
    if (is("misaligned_global")) misaligned_global<<<1, 32>>>(given, floats);
    if (is("uninitialised")) uninitialised<<<1, 32>>>();
    if (is("too_many_threads")) too_many_threads<<<1, 1056>>>();
    if (is("race")) race<<<1, 64>>>(ints);
    const cudaError_t error = cudaGetLastError();
    snprintf(message, size, "%s", cudaGetErrorString(error));
    return error == cudaSuccess ? failures : -1;
}
