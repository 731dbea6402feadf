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
    uint64_t published; // the number of the publication that wrote this to global memory; 0 as the host encodes it
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

/* A parameter lies on the thread's stack. Any other map is one that the device published, and this thread acquired it
 * since. */
static void check_acquired(const void *opaque, const TensorMap &map) {
    const Fiber &fiber = current();
    const char *at = static_cast<const char *>(opaque);
    if (at >= fiber.stack && at < fiber.stack + STACK_BYTES) return;
    const auto found = fiber.acquired.find(opaque);
    if (map.published && found != fiber.acquired.end() && found->second == map.published) return;
    fail("the tensor map at %p %s\n%s", opaque,
         map.published ? "is used by a thread that has not acquired it since it was published"
                       : "is used, but is no parameter and was not published",
         place_of(fiber, nullptr).c_str());
}

const TensorMap &tensor_map(const void *opaque, int rank) {
    const TensorMap &map = *static_cast<const TensorMap *>(opaque);
    if (reinterpret_cast<uintptr_t>(opaque) % 64) fail("a tensor map at %p: not aligned to 64 bytes", opaque);
    if (map.magic != MAGIC) fail("a tensor map that was not encoded");
    if (int(map.rank) != rank) fail("a tensor map of %u axes where the instruction names %d", map.rank, rank);
    check_acquired(opaque, map);
    return map;
}

/* ---- maps that the device makes ---- */

static TensorMap &map_to_change(uint32_t shared) {
    TensorMap &map = *static_cast<TensorMap *>(shared_pointer(shared, sizeof(CUtensorMap), sizeof(CUtensorMap)));
    race_access(current(), shared, sizeof(CUtensorMap), true, __builtin_return_address(0));
    if (map.magic != MAGIC) fail("tensormap.replace: shared address %#x holds no tensor map", shared);
    return map;
}

void tensor_map_replace_address(uint32_t shared, const void *address) {
    if (!address || reinterpret_cast<uintptr_t>(address) % 16)
        fail("tensormap.replace: the address %p is no multiple of 16 bytes", address);
    map_to_change(shared).data = static_cast<char *>(const_cast<void *>(address));
}

void tensor_map_replace_extent(uint32_t shared, uint32_t axis, uint32_t extent) {
    TensorMap &map = map_to_change(shared);
    if (axis >= map.rank) fail("tensormap.replace: axis %u of a map of %u", axis, map.rank);
    if (!extent) fail("tensormap.replace: axis %u gets no elements", axis);
    map.extent[axis] = extent;
}

void tensor_map_publish(void *to, uint32_t from, unsigned bytes) {
    static uint64_t publications;
    struct Slot {
        void *to;
        uint32_t from;
    } slot = {to, from};
    if (bytes != sizeof(CUtensorMap)) fail("tensormap.cp_fenceproxy of %u bytes", bytes);
    together("tensormap.cp_fenceproxy", ~0u, slot, [](Slot *const(&lane)[32]) {
        const Slot one = *lane[0];
        for (const Slot *each : lane)
            if (each->to != one.to || each->from != one.from)
                fail("tensormap.cp_fenceproxy: the lanes of a warp name different maps");
        if (reinterpret_cast<uintptr_t>(one.to) % sizeof(CUtensorMap))
            fail("tensormap.cp_fenceproxy to %p: not aligned to %zu bytes", one.to, sizeof(CUtensorMap));
        for (const Pending &pending : machine.pending)
            if (pending.map == one.to)
                fail("the tensor map at %p is published anew before a %s that uses it was done", one.to, pending.what);
        CUtensorMap copy;
        read_shared(self->lane, &copy, one.from, sizeof copy);
        TensorMap &map = reinterpret_cast<TensorMap &>(copy);
        if (map.magic != MAGIC) fail("tensormap.cp_fenceproxy: shared address %#x holds no tensor map", one.from);
        map.published = ++publications;
        memcpy(one.to, &copy, sizeof copy);
    });
}

void tensor_map_acquire(const void *opaque, unsigned bytes) {
    if (bytes != sizeof(CUtensorMap) || reinterpret_cast<uintptr_t>(opaque) % sizeof(CUtensorMap))
        fail("fence.proxy.tensormap of %u bytes at %p: maps are of %zu", bytes, opaque, sizeof(CUtensorMap));
    current().acquired[opaque] = static_cast<const TensorMap *>(opaque)->published;
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
