/* The calls of kernels over sequences: a SequenceCall of each span and its tensor maps, made of what place_sequences()
 * has left in workspace. For the host's compilation of a kernel alone. */
#pragma once
#include "common/limits.cuh" // kBitsInPairs
#include "sm90/backward/host.cuh"
#include "sm90/backward/sequences.cuh"

namespace fa::sm90 {

struct SequenceMaking {
    SequenceTiles t;
    CUtensorMap origin[kSequenceMaps]; // of the whole operand, as one batch entry
    fa_operand of[kSequenceMaps];      // which operand that is; data NULL: nobody reads the map
    SequenceCall *calls;
    CUtensorMap *maps;
    int64_t query_row_bytes, key_row_bytes; // what a query, or a key, adds to the operands that tiles stream
    int heads, heads_kv;                    // of the call
    bool whole, accumulate;
};

__device__ __forceinline__ SequenceCall make_call(const SequenceMaking &p, int n) {
    constexpr int64_t kFar = INT64_C(1) << kBitsInPairs; // as shifted_band_of()
    const SequencePlace place = p.t.places[n];
    SequenceCall call = {};
    const int64_t first = int64_t(place.diagonal) - place.key_begin;
    const int keys = place.key_end - place.key_begin;
    call.maps = p.maps + int64_t(n) * kSequenceMaps;
    call.visible = {keys, int(fa_clamp(first - p.t.left, -kFar, kFar)),
                    int(fa_clamp(first + p.t.right + 1, -kFar, kFar))};
    call.seq_q = place.seq_q, call.seq_k = place.seq_k, call.key_begin = place.key_begin;
    if (keys > 0) {
        call.row_begin = max(0, 1 - call.visible.upper);
        call.row_end = min(place.seq_q, keys - call.visible.lower);
    }
    call.batch = place.batch, call.first_q = place.first_q, call.first_k = place.first_k;
    // Rows that belong to no query or key get zeros, or are left as they are.
    call.end_q = place.first_q + (p.accumulate ? place.seq_q : place.rows_q);
    call.end_k = place.first_k + (p.accumulate ? place.seq_k : place.rows_k);
    call.row_block = place.tile[kTilesOfRows];
    const int rows[] = {place.rows_q, place.rows_k}, group = p.heads_kv ? p.heads / p.heads_kv : 1;
    for (const int tiling : {kTilesOfQueries, kTilesOfKeys}) {
        call.first_tile[tiling] = place.tile[tiling];
        call.tiles[tiling] = (rows[tiling] + p.t.rows[tiling] - 1) / p.t.rows[tiling];
        call.section_heads[tiling] = 1;
    }
    if (p.whole) return call;
    call.section_heads[kTilesOfQueries] =
        int(fa_clamp(section_heads(keys * p.key_row_bytes, group), 1, max(p.heads, 1)));
    call.section_heads[kTilesOfKeys] =
        int(fa_clamp(section_heads(group * place.seq_q * p.query_row_bytes, 1), 1, max(p.heads_kv, 1)));
    return call;
}

/* A block a span, a warp a map. */
static __global__ void __launch_bounds__(32 * kSequenceMaps)
    make_sequence_calls(const __grid_constant__ SequenceMaking p) {
    FA_CHAOS_BEGIN();
    __shared__ alignas(128) CUtensorMap scratch[kSequenceMaps];
    const int64_t n = blockIdx.x;
    const int map = int(threadIdx.x / 32);
    const SequenceCall call = make_call(p, int(n));
    if (threadIdx.x == 0) p.calls[n] = call;
    const fa_operand &x = p.of[map];
    if (call.row_begin >= call.row_end || !x.data) return; // nobody touches the map
    const bool of_keys = map >= kMapOfKeys;
    const int64_t row = of_keys ? call.first_k + call.key_begin : call.first_q + call.row_begin;
    const uint32_t rows = of_keys ? call.visible.seq_k : call.row_end - call.row_begin;
    const char *const from = static_cast<const char *>(x.data) + (call.batch * x.stride[0] + row * x.stride[2]) * 2;
    make_sequence_map(p.maps + n * kSequenceMaps + map, &scratch[map], p.origin[map], from, rows);
}

} // namespace fa::sm90
