/* The calls of kernels over sequences: a SequenceCall of each span and its tensor maps, made of what place_sequences()
 * has left in workspace. For the host's compilation of a kernel alone. */
#pragma once
#include "common/limits.cuh" // kBitsInPairs
#include "sm90/backward/host.cuh"
#include "sm90/backward/sequences.cuh"

namespace fa::sm90 {

template <class Sections> struct SequenceMaking {
    SequenceTiles t;
    CUtensorMap origin[kSequenceMaps]; // of the whole operand, as one batch entry
    fa_operand of[kSequenceMaps];      // which operand that is; data NULL: nobody reads the map
    SequenceCall *calls;
    CUtensorMap *maps;
    Sections sections; // (call, tiling): heads, or kv heads, whose tiles are walked together
    int64_t heads[2];  // of the call, by Tiling: query heads and kv heads
    bool accumulate;
};

template <class Sections> __device__ __forceinline__ SequenceCall make_call(const SequenceMaking<Sections> &p, int n) {
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
    const int rows[] = {place.rows_q, place.rows_k};
    for (const int tiling : {kTilesOfQueries, kTilesOfKeys}) {
        call.first_tile[tiling] = place.tile[tiling];
        call.tiles[tiling] = (rows[tiling] + p.t.rows[tiling] - 1) / p.t.rows[tiling];
        call.section_heads[tiling] = int(fa_clamp(p.sections(call, tiling), 1, max(p.heads[tiling], int64_t(1))));
    }
    return call;
}

/* A block a span, a warp a map. */
template <class Sections>
static __global__ void __launch_bounds__(32 * kSequenceMaps)
    make_sequence_calls(const __grid_constant__ SequenceMaking<Sections> p) {
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

/* ---- host ---- */

/* Batch entries whose pairs a call has, and parts of dsinks: one of sequences, which lie one after another. */
[[maybe_unused]] static int64_t entries_of(const fa_problem *problem) {
    return problem->sequences.given ? 1 : problem->forward.batch;
}

/* Where lists, calls and maps lie in the workspace, in bytes from its beginning; `end`: what follows them. */
struct SequenceRoom {
    int64_t maps_at, lists_at, calls_at, end;
};

/* From `at` on, a multiple of 256; `end` is another. */
[[maybe_unused]] static SequenceRoom room_of_sequences(int64_t at, const SequenceTiles &tiles) {
    const int64_t spans = tiles.batch + 2;
    SequenceRoom room = {at};
    room.lists_at = room.maps_at + spans * kSequenceMaps * int64_t(sizeof(CUtensorMap));
    room.calls_at = room.lists_at + divide_up(sequence_tiles_bytes(tiles), 128) * 128;
    room.end = divide_up(room.calls_at + spans * int64_t(sizeof(SequenceCall)), 256) * 256;
    return room;
}

/* Launches the kernels that leave lists, calls and maps in the workspace, which begins with two counters, set to 0;
 * says in `making` where. `box`: rows of the boxes of each map; 0: nobody reads it. `unlisted`: tiles that nobody looks
 * up. */
template <class Sections>
static fa_code make_sequences(const fa_problem *problem, const SequenceTiles &tiles, const SequenceRoom &room,
                              const int (&box)[kSequenceMaps], Tiling unlisted, const Sections &sections,
                              SequenceMaking<Sections> *making, const fa_launch &launch) {
    static thread_local CachedTensorMap cached[kSequenceMaps] = {{FA_OPERAND_q}, {FA_OPERAND_dout}, {FA_OPERAND_out},
                                                                 {FA_OPERAND_k}, {FA_OPERAND_v},    {FA_OPERAND_k},
                                                                 {FA_OPERAND_v}};
    const fa_backward &p = problem->backward;
    const fa_forward &f = p.forward;
    char *const workspace = static_cast<char *>(launch.workspace);
    const cudaStream_t stream = static_cast<cudaStream_t>(launch.stream);
    *making = SequenceMaking<Sections>{.t = tiles,
                                       .of = {f.q, p.dout.data ? p.dout : f.q, f.out, f.k, f.v, f.k, f.v},
                                       .calls = reinterpret_cast<SequenceCall *>(workspace + room.calls_at),
                                       .maps = reinterpret_cast<CUtensorMap *>(workspace + room.maps_at),
                                       .sections = sections,
                                       .heads = {f.heads, f.heads_kv},
                                       .accumulate = p.accumulate};
    lay_out(making->t, workspace + room.lists_at);
    making->t.counters = reinterpret_cast<uint32_t *>(workspace);
    making->t.span[unlisted] = nullptr;
    for (int map = 0; map < kSequenceMaps; ++map) {
        if (!box[map]) making->of[map].data = nullptr;
        fa_operand whole = making->of[map]; // of one batch entry: a sequence's map begins in its own
        if (!whole.data || f.seq_q == 0 || f.seq_k == 0) continue;
        whole.stride[0] = 0;
        const bool of_keys = map >= kMapOfKeys, of_v = map != kMapOfQ && map != kMapOfKeys && map != kMapOfTileK;
        FA_TRY(tensor_map_encode(&making->origin[map], cached[map], launch, whole, f.dtype,
                                 of_v ? f.head_dim_v : f.head_dim, of_keys ? f.seq_k : f.seq_q,
                                 of_keys ? f.heads_kv : f.heads, 1, box[map]));
    }
    FA_CHAOS_ARM(launch.stream, launch);
    place_sequences<kPlaceThreads><<<1, kPlaceThreads, 0, stream>>>(making->t);
    FA_CUDA_TRY(launch, cudaGetLastError());
    return fa_start(make_sequence_calls<Sections>, f.batch + 2, 32 * kSequenceMaps, 0, launch, *making);
}

} // namespace fa::sm90
