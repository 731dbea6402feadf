/* Tensor maps for sm90/common/tma.cuh, host side: which operands TMA can address, and their encoding. Host code only.
 */
#pragma once
#include <cstring> // std::memcmp

#include "fa.h"
#include <cuda.h>

namespace fa::sm90 {

inline constexpr const char *operand_names[] = {"q", "k", "v", "out"}; // by fa_operand_name

/* Whether TMA can address a 16-bit (batch, heads, rows, columns) operand; if not, `why` names it. Extents are those of
 * the operand itself; a stride of 0 is accepted for batch and heads (the coordinate is then multiplied by 0). */
inline bool takes_tensor_map(const fa_operand &x, fa_operand_name name, int64_t columns, int64_t rows, fa_why *why) {
    fa_reason reason = FA_WHY_NONE;
    for (int axis = 0; axis < 3; ++axis)
        if (x.stride[axis] % 8 || x.stride[axis] < 0 || x.stride[axis] >= INT64_C(1) << 38) reason = FA_WHY_STRIDES;
    if (rows > 1 && x.stride[2] == 0) reason = FA_WHY_STRIDES;
    if (columns > 1 && x.stride[3] != 1) reason = FA_WHY_NOT_CONTIGUOUS;
    if (reinterpret_cast<uintptr_t>(x.data) % 16) reason = FA_WHY_UNALIGNED;
    if (reason != FA_WHY_NONE) fa_because(why, FA_REFUSES, reason, name, 0, 0);
    return reason == FA_WHY_NONE;
}

/* The inputs of a map. Every bit counts: compared by memcmp(). */
struct TensorMapKey {
    void *data;
    cuuint64_t extent[4], stride[3]; // columns, rows, heads, batch; bytes, of axes 1..3
    cuuint32_t box_rows, dtype, promotion, unused;
};
static_assert(sizeof(TensorMapKey) == 80, "no padding");

/* The last map of an operand that a thread encoded: calls come in loops over the same arrays. Three such maps instead
 * of new ones make a launch of 2.28 us one of 2.12 us on an H200's host. */
struct TensorMapMemo {
    CUtensorMap map;
    TensorMapKey key; // data NULL: none yet
};
inline thread_local TensorMapMemo tensor_map_memo[4];

/* Encodes the map of a 16-bit operand, axes (columns, rows, heads, batch), boxes of 64 columns x `box_rows` rows (at
 * most 256), 128-byte swizzle. An axis of stride 0 gets extent 1: pass coordinate 0 there. `promotion`: what L2 fetches
 * for each 128 bytes of a row. */
inline fa_code tensor_map_encode(CUtensorMap *map, const fa_launch &launch, const fa_operand &x, fa_dtype dtype,
                                 int64_t columns, int64_t rows, int64_t heads, int64_t batch, int box_rows,
                                 fa_operand_name name,
                                 CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B) {
    using Encode = CUresult (*)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                                const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
                                CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
    TensorMapKey key = {
        x.data,
        {cuuint64_t(columns), cuuint64_t(rows), x.stride[1] ? cuuint64_t(heads) : 1,
         x.stride[0] ? cuuint64_t(batch) : 1},
        {},
        cuuint32_t(box_rows),
        cuuint32_t(dtype == FA_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16),
        cuuint32_t(promotion)};
    for (int axis = 0; axis < 3; ++axis) // an axis of one element never uses its stride
        key.stride[axis] = x.stride[2 - axis] ? cuuint64_t(x.stride[2 - axis]) * 2 : 16;
    TensorMapMemo &memo = tensor_map_memo[name];
    if (std::memcmp(&memo.key, &key, sizeof key) != 0) {
        const cuuint32_t box[4] = {64, key.box_rows, 1, 1}, step[4] = {1, 1, 1, 1};
        const CUresult result = reinterpret_cast<Encode>(launch.encode_tensor_map)(
            map, CUtensorMapDataType(key.dtype), 4, key.data, key.extent, key.stride, box, step,
            CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
        if (result != CUDA_SUCCESS)
            return launch.host->fail(
                launch.status, FA_ECUDA,
                "cuTensorMapEncodeTiled failed for %s with CUresult %d (shape %lld x %lld x %lld x %lld)",
                operand_names[name], int(result), (long long)batch, (long long)heads, (long long)rows,
                (long long)columns);
        memo.map = *map;
        memo.key = key;
    }
    *map = memo.map;
    return FA_OK;
}

} // namespace fa::sm90
