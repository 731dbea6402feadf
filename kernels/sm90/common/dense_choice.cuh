/* Dense calls of few queries that other kernels than wgmma_sm90 are faster for. On the host: the kernels that take such
 * calls and those that decline them ask the same questions. `bench audit` measured the figures on an H200, without
 * softcap, which none of these calls has. */
#pragma once
#include "common/limits.cuh" // divide_up
#include "fa.h"              // fa_forward

namespace fa::sm90 {

constexpr int64_t kFewDense = 16;  // queries, at most, for which wgmma_sm90 is slower than mma_sm80
constexpr int64_t kHalfTile = 64;  // rows of a warpgroup: queries, at most, that fill no more than half of a tile
constexpr int64_t kShortKeys = 64; // keys seen, at most, with which it is slower for up to kHalfTile queries

/* Whether so few queries see so few keys that most of a call is its start and end: 47 queries and keys of 15 x 16/2
 * heads of 96 columns took 6.9 us on mma_sm80 and 10.3 on wgmma_sm90. */
inline bool is_short(const fa_forward &p) {
    return p.seq_q <= kHalfTile && p.key_end - p.key_begin <= kShortKeys && p.softcap == 0;
}

/* Whether prefill_sm90, whose tiles hold all heads of a kv head, is faster than kernels with a tile for each head. It
 * is where the waves of tiles that it saves take longer than what it has beside its tiles: its list kernel and the
 * states of chunks. A wave of its tiles, whose rows are full, counts twice. Tiles that fill no wave are cut into
 * chunks, which share it. 11 queries of 8 x 28/4 heads on 19,920 keys took 367 us on wgmma_sm90, two waves, 246 on
 * mma_sm80, 155 on prefill_sm90. prefill_sm90 does not take q with one head for all. */
inline bool saves_waves(const fa_forward &p, int64_t sms) {
    constexpr double kKeyNs = 9.2, kKeyColumns = 128; // of a wave of tiles, for each key and so many columns
    constexpr double kLeastNs = 16000;
    if (p.seq_q > kHalfTile || p.heads_kv == 0 || p.softcap > 0 || p.q.stride[1] == 0) return false;
    const int64_t group = p.heads / p.heads_kv;
    if (group > kHalfTile || p.seq_q * group <= kHalfTile) return false; // heads have tiles of their own, or fill none
    const int64_t tile_queries = 2 * (kHalfTile / group);
    const int64_t tiles = divide_up(p.seq_q, tile_queries) * p.heads_kv * p.batch;
    const double waves = static_cast<double>(divide_up(p.heads * p.batch, sms));
    const double packed = static_cast<double>(tiles) / static_cast<double>(sms);
    const double saved = waves - 2 * (tiles <= sms ? packed : static_cast<double>(divide_up(tiles, sms)));
    return saved * static_cast<double>(p.key_end - p.key_begin) * kKeyNs * p.head_dim / kKeyColumns > kLeastNs;
}

} // namespace fa::sm90
