/* mma_sm80 serving, on the host: which calls, in how many units, with how much workspace. */
#pragma once

#include <algorithm> // std::max, std::min
#include <stdint.h>  // INT32_MAX

#include "common/launch.cuh"     // FA_CUDA_TRY, fa_allow_smem
#include "common/limits.cuh"     // lengths_fit
#include "common/rows.cuh"       // takes_chunks
#include "sm80/serve_config.cuh" // ServeArgs
#include "sm80/serve_job.cuh"    // serve_bytes

namespace fa::sm80 {

/* The features that only the serving instances have. */
constexpr uint32_t kServed = FA_WITH_LENGTHS | FA_WITH_PAGES | FA_WITH_RANGES | FA_WITH_POSITIONS | FA_WITH_SEGMENTS |
                             FA_WITH_OUT_FLOAT32 | FA_WITH_ALIBI | FA_WITH_INTERVALS | FA_WITH_DROPOUT |
                             FA_WITH_MAX_LOGIT;

inline bool serves(const fa_problem *problem) { return problem->sequences.given || problem->features & kServed; }

/* An instance as the host knows it. */
struct ServeForm {
    int head_dim, shared_bytes, threads, blocks_per_sm;
};
template <class C> constexpr ServeForm serve_form() {
    return {C::kHeadDim, serve_bytes<C>(), C::kThreads, C::kBlocksPerSm};
}

/* The part of a plan. */
struct ServeOwn {
    int64_t units, tiles, tiles_m, slots;
    int pack, parts;
    bool dressed, cuts, chunk_parts, whole, slots_by_query;
    bool chunks_q, chunks_k, chunks_v, chunks_o;
};

/* Whether a sequence may be cut into chunks, and in how many units a K/V head: a chunk each where groups of them leave
 * the device idle. States of parts have a slot a row of out or, where that is less, a slot a row of a sequence's one
 * tile. Where they take too much workspace, a unit takes all chunks of a sequence, and there are fewer blocks. */
inline void plan_parts(const fa_problem *problem, const fa_device_info *device, const ServeForm &form, ServeOwn &own,
                       fa_plan *plan) {
    const fa_forward &p = problem->forward;
    const fa_sequences &s = problem->sequences;
    const int64_t packs = p.heads / own.pack, sequences = p.batch * packs;
    const int64_t state = (form.head_dim + 2) * 4, limit = int64_t(device->workspace_limit);
    const int64_t tiles = (p.seq_k + kChunkKeys - 1) / kChunkKeys, chunks = std::min<int64_t>(tiles, kMaxChunks);
    const int64_t groups = std::min<int64_t>((chunks + kGroup - 1) / kGroup + (tiles > chunks), 1 + chunks);
    const bool fixed = !s.packed_q && !s.q.used, one = s.packed_q && !s.q.starts;
    const int64_t least = one ? (s.q.used ? 0 : 1) : fixed ? p.seq_q : 0; // queries of a sequence
    own.units = own.tiles * packs;
    own.parts = 1;
    plan->blocks = std::min<int64_t>(own.units, INT32_MAX);
    if (!own.cuts || chunks <= 1 || least * own.pack > kServeRows || own.units == 0) return;
    const int64_t by_query = (s.packed_q ? p.seq_q : p.batch * p.seq_q) * p.heads, by_tile = sequences * kServeRows;
    own.slots_by_query = by_query < by_tile;
    own.slots = std::min(by_query, by_tile);
    own.chunk_parts = sequences * groups < 2 * int64_t(device->sm_count);
    const auto bytes = [&](int64_t parts) { return parts * own.slots * state; };
    if (own.chunk_parts && bytes(chunks) > limit) own.chunk_parts = false;
    own.parts = int(own.chunk_parts ? chunks : groups);
    plan->workspace_bytes = size_t(bytes(own.parts));
    own.units += sequences * (own.parts - 1);
    plan->blocks = std::min<int64_t>(own.units, INT32_MAX);
    if (bytes(own.parts) <= limit) return;
    own.whole = true, own.parts = 1, own.slots_by_query = false;
    own.units = own.tiles * packs;
    int64_t blocks = std::min<int64_t>(own.units, int64_t(device->sm_count) * form.blocks_per_sm);
    while (blocks > 1 && 2 * blocks * kServeRows * state > limit) blocks /= 2;
    own.slots = blocks * kServeRows;
    plan->blocks = blocks;
    plan->workspace_bytes = size_t(2 * own.slots * state);
}

inline fa_answer plan_serving(const fa_problem *problem, const fa_device_info *device, const ServeForm &form,
                              ServeOwn &own, fa_plan *plan, fa_why *why) {
    const fa_forward &p = problem->forward;
    const fa_sequences &s = problem->sequences;
    if (!s.pages.table && !lengths_fit(0, p.seq_k, kBitsAlone, why)) return FA_REFUSES;
    if (size_t(form.shared_bytes) > device->smem_per_block)
        return fa_because(why, FA_NOT_HERE, FA_WHY_SHARED_MEMORY, form.shared_bytes, int64_t(device->smem_per_block),
                          0);
    const bool dropout = problem->forward.dropout.threshold;
    own = {};
    own.dressed = p.bias.data || p.mask.data || p.q_segments.data || p.intervals.data || p.max_logit.data || dropout;
    own.cuts = !dropout;
    own.pack = dropout || p.heads_kv == 0 ? 1 : int(p.heads / p.heads_kv);
    own.tiles_m = ((s.packed_q ? 1 : p.seq_q) * own.pack + kServeRows - 1) / kServeRows;
    own.tiles = s.q.starts ? tiles_of_packed(p, own.pack, kServeRows) : p.batch * own.tiles_m;
    own.chunks_q = takes_chunks<uint16_t>(p.q, p.head_dim, 8);
    own.chunks_k = takes_chunks<uint16_t>(p.k, p.head_dim, 8);
    own.chunks_v = takes_chunks<uint16_t>(p.v, p.head_dim_v, 8);
    own.chunks_o = takes_chunks<uint16_t>(p.out, p.head_dim_v, 8);
    plan_parts(problem, device, form, own, plan);
    plan->threads = form.threads;
    plan->smem_bytes = form.shared_bytes;
    plan->keep = true;
    return FA_TAKES;
}

inline ServeArgs serve_args(const fa_problem *problem, const ServeOwn &own, void *workspace) {
    const fa_forward &p = problem->forward;
    return {
        .call = serving(*problem),
        .score = score_params(p),
        .pack = Divider::of(own.pack),
        .page = Divider::of(std::max<int64_t>(1, std::min<int64_t>(problem->sequences.pages.size, INT32_MAX))),
        .units = own.units,
        .tiles = own.tiles,
        .tiles_m = own.tiles_m,
        .slots = own.slots,
        .workspace = static_cast<float *>(workspace),
        .packed_heads = int(p.heads / own.pack),
        .parts = own.parts,
        .cuts = own.cuts,
        .chunk_parts = own.chunk_parts,
        .whole = own.whole,
        .slots_by_query = own.slots_by_query,
        .chunks_q = own.chunks_q,
        .chunks_k = own.chunks_k,
        .chunks_v = own.chunks_v,
        .chunks_o = own.chunks_o,
        .segments = segments_of(p),
        .intervals = intervals_of(p),
        .max_logit = max_logit_of(p),
    };
}

} // namespace fa::sm80
