/* simt_backward: its tiles, and the plan of a launch as the host's file makes it and instances read it. */
#pragma once
#include "common/launch.cuh" // fa_own
#include "common/spot.cuh"   // tiles_of_packed
#include "philox.h"          // fa_dropout_scale
#include "simt/backward.cuh" // Tile, Work

namespace simt_backward {

/* By head_dim, the first that fits: the larger tile, then one within the 99 KB a thread block of sm_86 and sm_89. */
constexpr Tile kTiles[] = {
    {64, 64},  //  87 KB
    {128, 64}, // 153 KB
    {128, 32}, //  73 KB
    {256, 32}, // 138 KB
    {256, 16}, //  68 KB
};
constexpr int kTileCount = sizeof(kTiles) / sizeof(kTiles[0]);

/* Shared memory that kernels of sequences have beside a tile's. */
constexpr size_t kSequenceBytes = 3072;

/* The plan's own part. */
struct Own {
    int tile;       // of kTiles
    bool sequences; // instances for them
    int64_t pairs;  // batch entries times kv heads whose rows the workspace holds; with sequences kv heads
};

/* Rows of a head that the workspace holds of sequences. */
inline int64_t stored_rows(const fa_problem &problem) {
    const fa_forward &f = problem.backward.forward;
    return problem.sequences.packed_q ? f.seq_q : f.batch * f.seq_q;
}

/* Tiles of q, or of k and v: of all sequences, and of each where the rows of a sequence are known without starts; one,
 * too, of no rows, which counts what is bad. */
struct Tiles {
    int64_t count, each;
};
inline Tiles tiles_of(const fa_lengths &lengths, int64_t batch, bool one_row_each, int64_t rows, int64_t block) {
    const int64_t some = (rows + block - 1) / block, each = one_row_each || some < 1 ? 1 : some;
    return {lengths.starts ? fa::tiles_of_packed(rows, batch, 1, block) : batch * each, each};
}
template <class Forward> Tiles tiles_of_queries(const fa_sequences &s, const Forward &f, int64_t block) {
    return tiles_of(s.q, f.batch, s.packed_q, f.seq_q, block);
}
template <class Forward> Tiles tiles_of_keys(const fa_sequences &s, const Forward &f, int64_t block) {
    return tiles_of(s.k, f.batch, false, f.seq_k, block);
}

/* Without pairs. */
inline Work work_of(const fa_problem &problem, const fa_launch &launch) {
    const fa_forward &f = problem.backward.forward;
    return {.score = fa::score_params(f),
            .scale = static_cast<float>(f.scale),
            .softcap = static_cast<float>(f.softcap),
            .rows = static_cast<float2 *>(launch.workspace),
            .first_pair = 0,
            .pairs = 0,
            .group = f.heads_kv ? f.heads / f.heads_kv : 1,
            .alibi = f.alibi,
            .dropout = f.dropout,
            .kept = static_cast<float>(fa_dropout_scale(&f.dropout)),
            .intervals = fa::intervals_of(f)};
}

/* Tiles of dbias' own elements. */
inline int64_t bias_tiles(const fa::GradientParams &p, int64_t block) {
    const fa::AttentionParams &f = p.forward;
    const int64_t lengths[4] = {f.batch, f.heads, (f.seq_q + block - 1) / block, (f.seq_k + block - 1) / block};
    int64_t count = 1;
    for (int axis = 0; axis < 4; ++axis) count *= p.bias_sums >> axis & 1 ? 1 : lengths[axis];
    return count;
}

/* Launches the instance of a dtype. */
using Launch = fa_code(const fa_problem &, const fa_plan &, const fa_launch &);

} // namespace simt_backward
