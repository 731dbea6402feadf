/* Tensor maps for sm90/common/tma.cuh, host side: which operands TMA can address, and their encoding. Host code only.
 */
#pragma once
#include <cstdint> // int64_t, uintptr_t
#include <cstring> // std::memcmp

#include "fa.h"
#include <cuda.h>

namespace fa::sm90 {

/* The words of messages for an operand, by fa_operand_number. */
inline constexpr const char *operand_names[FA_OPERAND_COUNT] = {
#define FA_OPERAND(name, words, ...) words,
#include "operands.def"
#undef FA_OPERAND
};

/* Whether TMA can address a 16-bit (batch, heads, rows, columns) operand; if not, `why` names it. Extents are those of
 * the operand itself; a stride of 0 is accepted for batch and heads (the coordinate is then multiplied by 0). */
inline bool takes_tensor_map(const fa_operand &x, fa_operand_number name, int64_t columns, int64_t rows, fa_why *why) {
    fa_reason reason = FA_WHY_NONE;
    for (int axis = 0; axis < 3; ++axis)
        if (x.stride[axis] % 8 || x.stride[axis] < 0 || x.stride[axis] >= INT64_C(1) << 38) reason = FA_WHY_STRIDES;
    if (rows > 1 && x.stride[2] == 0) reason = FA_WHY_STRIDES;
    if (columns > 1 && x.stride[3] != 1) reason = FA_WHY_NOT_CONTIGUOUS;
    if (reinterpret_cast<uintptr_t>(x.data) % 16) reason = FA_WHY_UNALIGNED;
    if (reason != FA_WHY_NONE) fa_because(why, FA_REFUSES, reason, name, 0, 0);
    return reason == FA_WHY_NONE;
}

/* The inputs of a map, whose axes are columns, rows, heads and batch, or have heads before rows. Every bit counts:
 * compared by memcmp(). */
struct TensorMapKey {
    void *data;
    cuuint64_t extent[4], stride[3]; // bytes, of axes 1..3
    cuuint32_t box[2];               // extents of a box along axes 1 and 2; it has 64 columns and one batch entry
    cuuint32_t dtype, promotion;
};
static_assert(sizeof(TensorMapKey) == 80, "no padding");

/* The last map that a thread encoded for one map of a kernel: calls come in loops over the same arrays. Three such maps
 * instead of new ones make a launch of 2.28 us one of 2.12 us on an H200's host. Each map of each kernel has a place of
 * its own, so that none evicts another. */
struct CachedTensorMap {
    fa_operand_number operand; // for messages
    CUtensorMap map;
    TensorMapKey key; // data NULL: none yet
};

/* A key without extents, strides and box. */
inline TensorMapKey tensor_map_key(const fa_operand &x, fa_dtype dtype, CUtensorMapL2promotion promotion) {
    TensorMapKey key = {};
    key.data = x.data;
    key.dtype = cuuint32_t(dtype == FA_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16);
    key.promotion = cuuint32_t(promotion);
    return key;
}

/* Bytes of a stride. An axis of one element never uses its own. */
inline cuuint64_t tensor_map_stride(int64_t stride) { return stride ? cuuint64_t(stride) * 2 : 16; }

inline fa_code tensor_map_encode(CUtensorMap *map, CachedTensorMap &cached, const fa_launch &launch,
                                 const TensorMapKey &key) {
    using Encode = CUresult (*)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                                const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
                                CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
    if (std::memcmp(&cached.key, &key, sizeof key) != 0) {
        const cuuint32_t box[4] = {64, key.box[0], key.box[1], 1}, step[4] = {1, 1, 1, 1};
        const CUresult result = reinterpret_cast<Encode>(launch.encode_tensor_map)(
            map, CUtensorMapDataType(key.dtype), 4, key.data, key.extent, key.stride, box, step,
            CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CUtensorMapL2promotion(key.promotion),
            CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
        if (result != CUDA_SUCCESS)
            return launch.host->fail(
                launch.status, FA_ECUDA,
                "cuTensorMapEncodeTiled failed for %s with CUresult %d (extents %lld x %lld x %lld x %lld)",
                operand_names[cached.operand], int(result), (long long)key.extent[3], (long long)key.extent[2],
                (long long)key.extent[1], (long long)key.extent[0]);
        cached.map = *map;
        cached.key = key;
    }
    *map = cached.map;
    return FA_OK;
}

/* Encodes the map of a 16-bit operand, axes (columns, rows, heads, batch), boxes of 64 columns x `box_rows` rows (at
 * most 256), 128-byte swizzle. An axis of stride 0 gets extent 1: pass coordinate 0 there. `promotion`: what L2 fetches
 * for each 128 bytes of a row. */
inline fa_code tensor_map_encode(CUtensorMap *map, CachedTensorMap &cached, const fa_launch &launch,
                                 const fa_operand &x, fa_dtype dtype, int64_t columns, int64_t rows, int64_t heads,
                                 int64_t batch, int box_rows,
                                 CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B) {
    TensorMapKey key = tensor_map_key(x, dtype, promotion);
    key.extent[0] = cuuint64_t(columns), key.extent[1] = cuuint64_t(rows);
    key.extent[2] = x.stride[1] ? cuuint64_t(heads) : 1, key.extent[3] = x.stride[0] ? cuuint64_t(batch) : 1;
    for (int axis = 0; axis < 3; ++axis) key.stride[axis] = tensor_map_stride(x.stride[2 - axis]);
    key.box[0] = cuuint32_t(box_rows), key.box[1] = 1;
    return tensor_map_encode(map, cached, launch, key);
}

} // namespace fa::sm90
