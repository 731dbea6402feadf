/* Kernels for test_sequence_maps.py: the maps of sequences are made and boxes are loaded by them. They run on the
 * emulator and on a GPU. */
#include <cuda_runtime.h>
#include <stdio.h> // snprintf

#include "sm90/common/sequence_maps.cuh"
#include "sm90/common/tma.cuh"

namespace {

using namespace fa::sm90;

constexpr int kColumns = 64, kRows = 8, kBox = kColumns * kRows; // of a box

struct Sequence {
    int first, rows;
};
struct Box {
    int map, row, head;
};

/* Misuses that the emulator names. */
enum Fault { NONE, NOT_ACQUIRED, ACQUIRED_BY_ANOTHER, PUBLISHED_SINCE, PUBLISHED_IN_USE, STORED, NO_ROWS, MISALIGNED };

/* Two warps make the maps of all sequences in turn. */
__global__ void make_maps(const __grid_constant__ CUtensorMap origin, CUtensorMap *maps, const uint16_t *data,
                          int row_stride, const Sequence *sequences, int count, Fault fault) {
    __shared__ alignas(128) CUtensorMap scratch[2];
    const int warp = threadIdx.x / 32;
    for (int n = warp; n < count; n += 2) {
        const Sequence sequence = sequences[n];
        const uint16_t *first = data + int64_t(sequence.first) * row_stride + (fault == MISALIGNED);
        make_sequence_map(maps + n, scratch + warp, origin, first, fault == NO_ROWS ? 0 : sequence.rows);
    }
    if (fault == STORED && threadIdx.x < 16) maps[0].opaque[threadIdx.x] = origin.opaque[threadIdx.x];
}

/* Block b loads box b: by a sequence's map, or, where `maps` is NULL, by the parameter. */
__global__ void load_boxes(const __grid_constant__ CUtensorMap origin, CUtensorMap *maps, const uint16_t *data,
                           const Box *boxes, uint16_t *out, Fault fault) {
    __shared__ alignas(1024) uint16_t landed[kBox];
    __shared__ alignas(128) CUtensorMap scratch;
    __shared__ uint64_t barrier;
    const Box box = boxes[blockIdx.x];
    CUtensorMap *const map = maps ? maps + box.map : nullptr;
    if (threadIdx.x == 0) {
        mbarrier_init(&barrier, 1);
        mbarrier_init_fence();
    }
    __syncthreads();
    if (map && fault != NOT_ACQUIRED && threadIdx.x == (fault == ACQUIRED_BY_ANOTHER)) acquire_sequence_map(map);
    __syncthreads();
    if (fault == PUBLISHED_SINCE) make_sequence_map(map, &scratch, origin, data, 1);
    if (threadIdx.x == 0) {
        mbarrier_arrive_expect(&barrier, sizeof landed);
        tma_load(landed, map ? map : &origin, &barrier, 0, box.row, box.head, 0, kEvictFirst);
    }
    __syncwarp();
    if (fault == PUBLISHED_IN_USE) make_sequence_map(map, &scratch, origin, data, 1);
    mbarrier_wait(&barrier, 0);
    for (int n = threadIdx.x; n < kBox; n += blockDim.x) {
        const int row = n / kColumns, chunk = n % kColumns / 8 ^ row % 8;
        out[int64_t(blockIdx.x) * kBox + n] = landed[row * kColumns + chunk * 8 + n % 8];
    }
}

} // namespace

#ifdef __CUDACC_EMULATED__
namespace emu {
CUresult encode_tensor_map(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                           const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
                           CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
}
static void *const kEmulated = reinterpret_cast<void *>(&emu::encode_tensor_map);
static cudaError_t wait_for_end() { return cudaGetLastError(); }
#else
static void *const kEmulated = nullptr;
static cudaError_t wait_for_end() { return cudaDeviceSynchronize(); }
#endif

/* `data`: `rows` rows of `heads` x 64 values of 16 bits; `maps`: memory for `count` maps, NULL: boxes come by the map
 * of the whole. Writes each box to `out`. `encode`: the driver's cuTensorMapEncodeTiled, NULL on the emulator. Returns
 * whether all went well, or writes why not. */
extern "C" __attribute__((visibility("default"))) int run_sequence_maps(void *encode, uint16_t *data, int rows,
                                                                        int heads, const Sequence *sequences, int count,
                                                                        CUtensorMap *maps, const Box *boxes,
                                                                        int box_count, uint16_t *out, int fault,
                                                                        char *message, size_t size) {
    using Encode = CUresult (*)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                                const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
                                CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
    const cuuint64_t extent[4] = {kColumns, cuuint64_t(rows), cuuint64_t(heads), 1};
    const cuuint64_t row_bytes = cuuint64_t(heads) * kColumns * 2;
    const cuuint64_t stride[3] = {row_bytes, kColumns * 2, row_bytes * cuuint64_t(rows)};
    const cuuint32_t box[4] = {kColumns, kRows, 1, 1}, step[4] = {1, 1, 1, 1};
    CUtensorMap origin;
    const CUresult encoded = reinterpret_cast<Encode>(encode ? encode : kEmulated)(
        &origin, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 4, data, extent, stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
        CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (encoded != CUDA_SUCCESS) return snprintf(message, size, "no map: CUresult %d", int(encoded)), 0;
    if (maps) make_maps<<<1, 64>>>(origin, maps, data, heads * kColumns, sequences, count, Fault(fault));
    cudaError_t error = cudaGetLastError();
    if (error == cudaSuccess) {
        load_boxes<<<box_count, 32>>>(origin, maps, data, boxes, out, Fault(fault));
        error = wait_for_end();
    }
    snprintf(message, size, "%s", cudaGetErrorString(error));
    return error == cudaSuccess;
}
