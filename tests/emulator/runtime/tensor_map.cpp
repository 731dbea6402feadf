/* Tensor maps and the boxes that they move, tiled mode. */
#include "machine.h"

#include <cuda.h>
#include <stdlib.h>
#include <string.h>

#include "fa.h"

/* The maps that were encoded, for tests of what kernels keep of them. */
extern "C" FA_EXPORT uint64_t emulated_encodings;
uint64_t emulated_encodings;

namespace emu {

/* The contents that encode_tensor_map() leaves in a CUtensorMap. */
struct TensorMap {
    uint32_t magic, element_bytes, rank, swizzle_span; // 16: none
    char *data;
    uint64_t extent[5], stride[5]; // elements; bytes, stride[0] that of an element
    uint8_t box[5], spare[3];
};
static_assert(sizeof(TensorMap) <= sizeof(CUtensorMap));
constexpr uint32_t MAGIC = 0x7e45ae0b;

static uint32_t box_of(const TensorMap &map, int axis) { return map.box[axis] + 1u; }

CUresult encode_tensor_map(CUtensorMap *to, CUtensorMapDataType type, cuuint32_t rank, void *data,
                           const cuuint64_t *extent, const cuuint64_t *stride, const cuuint32_t *box,
                           const cuuint32_t *step, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                           CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill) {
    static const uint32_t sizes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2};
    TensorMap map = {};
    const char *refused = getenv("FA_EMULATOR_REFUSES");
    ++emulated_encodings;
    if (refused && strtoull(refused, nullptr, 0) == reinterpret_cast<uintptr_t>(data)) return CUDA_ERROR_INVALID_VALUE;
    if (rank < 1 || rank > 5 || reinterpret_cast<uintptr_t>(data) % 16 || !data ||
        type > CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 || interleave != CU_TENSOR_MAP_INTERLEAVE_NONE ||
        fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)
        return CUDA_ERROR_INVALID_VALUE;
    map.magic = MAGIC, map.element_bytes = sizes[type], map.rank = rank, map.data = static_cast<char *>(data);
    map.swizzle_span = swizzle == CU_TENSOR_MAP_SWIZZLE_NONE ? 16 : 16u << swizzle;
    map.stride[0] = map.element_bytes;
    for (uint32_t axis = 0; axis < rank; ++axis) {
        if (!extent[axis] || extent[axis] >> 32 || !box[axis] || box[axis] > 256 || step[axis] != 1)
            return CUDA_ERROR_INVALID_VALUE;
        if (axis && (stride[axis - 1] % 16 || stride[axis - 1] >> 40)) return CUDA_ERROR_INVALID_VALUE;
        map.extent[axis] = extent[axis];
        map.box[axis] = static_cast<uint8_t>(box[axis] - 1);
        if (axis) map.stride[axis] = stride[axis - 1];
    }
    const uint32_t row = box[0] * map.element_bytes;
    if (row % 16 || (swizzle != CU_TENSOR_MAP_SWIZZLE_NONE && row > map.swizzle_span)) return CUDA_ERROR_INVALID_VALUE;
    memcpy(to, &map, sizeof map);
    return CUDA_SUCCESS;
}

const TensorMap &tensor_map(const void *opaque, int rank) {
    const TensorMap &map = *static_cast<const TensorMap *>(opaque);
    if (reinterpret_cast<uintptr_t>(opaque) % 64) fail("a tensor map at %p: not aligned to 64 bytes", opaque);
    if (map.magic != MAGIC) fail("a tensor map that was not encoded");
    if (int(map.rank) != rank) fail("a tensor map of %u axes where the instruction names %d", map.rank, rank);
    return map;
}

uint32_t tensor_bytes(const TensorMap &map) {
    uint32_t bytes = map.element_bytes;
    for (uint32_t axis = 0; axis < map.rank; ++axis) bytes *= box_of(map, axis);
    return bytes;
}

/* Moves a box whose first element is at coordinates `at`. What lies outside the tensor is loaded as zeros and not
 * stored. */
void tensor_move(const TensorMap &map, const int *at, uint32_t shared, bool store) {
    const uint32_t row_bytes = box_of(map, 0) * map.element_bytes, rows = tensor_bytes(map) / row_bytes;
    if (map.swizzle_span > 16 && (shared & 0xffffff) % (8 * map.swizzle_span))
        fail("a swizzled box at shared address %#x: not aligned to %u bytes", shared, 8 * map.swizzle_span);
    for (uint32_t row = 0; row < rows; ++row) {
        bool inside = true;
        char *line = map.data;
        for (uint32_t axis = 1, rest = row; axis < map.rank; ++axis) {
            const int64_t n = int64_t(at[axis]) + rest % box_of(map, axis);
            rest /= box_of(map, axis);
            inside = inside && n >= 0 && uint64_t(n) < map.extent[axis];
            line += n * int64_t(map.stride[axis]);
        }
        for (uint32_t column = 0; column < box_of(map, 0); ++column) {
            uint32_t to = shared + row * row_bytes + column * map.element_bytes;
            to ^= (to >> 7 & (map.swizzle_span / 16 - 1)) << 4;
            void *here = shared_pointer(to, map.element_bytes, map.element_bytes);
            const int64_t n = int64_t(at[0]) + column;
            char *there = line + n * map.element_bytes;
            const bool exists = inside && n >= 0 && uint64_t(n) < map.extent[0];
            if (store && exists) memcpy(there, here, map.element_bytes);
            if (!store && exists) memcpy(here, there, map.element_bytes);
            if (!store && !exists) memset(here, 0, map.element_bytes);
        }
    }
}

} // namespace emu
