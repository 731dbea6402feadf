/* serve_sm90, on the host: the boxes in which TMA brings keys and values. */
#pragma once
#include <algorithm> // std::min

#include "sm90/serve_config.cuh"
#include "sm90/tensor_map.h"

namespace fa::sm90::serve {

/* A box has 128 bytes of each row: more would be fetched twice. */
constexpr CUtensorMapL2promotion kPromotion = CU_TENSOR_MAP_L2_PROMOTION_L2_128B;

/* Keys of a box that lies in one page and one tile, or 0. */
inline int box_keys(const fa_forward &p, const fa_sequences &s, const fa_launch &launch) {
    fa_why why;
    const int64_t rows = s.pages.table ? s.pages.size : s.k.rows, batch = s.pages.table ? s.pages.count : p.batch;
    if (!launch.encode_tensor_map || rows == 0 || batch == 0 || batch >> 31) return 0;
    if (!takes_tensor_map(p.k, FA_OPERAND_K, p.head_dim, rows, &why) ||
        !takes_tensor_map(p.v, FA_OPERAND_V, p.head_dim, rows, &why))
        return 0;
    const int64_t keys = s.pages.table ? std::min<int64_t>(rows & -rows, kTileKeys) : kTileKeys;
    return keys >= 8 ? static_cast<int>(keys) : 0;
}

/* params.boxes and the maps, after params.call. */
inline fa_code encode_boxes(Params &params, const fa_launch &launch) {
    const fa_forward &p = params.call.p;
    const fa_sequences &s = params.call.s;
    params.boxes = box_keys(p, s, launch);
    if (params.boxes == 0) return FA_OK;
    const int64_t rows = s.pages.table ? s.pages.size : s.k.rows, batch = s.pages.table ? s.pages.count : p.batch;
    FA_TRY(tensor_map_encode(&params.k_map, launch, p.k, p.dtype, p.head_dim, rows, p.heads_kv, batch, params.boxes,
                             FA_OPERAND_K, kPromotion));
    return tensor_map_encode(&params.v_map, launch, p.v, p.dtype, p.head_dim_v, rows, p.heads_kv, batch, params.boxes,
                             FA_OPERAND_V, kPromotion);
}

} // namespace fa::sm90::serve
