/* Dense calls of few queries that other kernels than wgmma_sm90 are faster for. On the host: the kernels that take such
 * calls and those that decline them ask the same questions. The figures are of `bench audit` on an H200 and of an H100,
 * without softcap, which none of these calls has. */
#pragma once
#include "common/limits.cuh" // divide_up
#include "fa.h"              // fa_forward

namespace fa::sm90 {

constexpr int64_t kFewDense = 16;  // queries, at most, for which wgmma_sm90 is slower than mma_sm80
constexpr int64_t kHalfTile = 64;  // rows of a warpgroup: queries, at most, that fill no more than half of a tile
constexpr int64_t kShortKeys = 64; // keys seen, at most, with which it is slower for up to kHalfTile queries
constexpr int64_t kGathered = 128; // queries from which on prefill_sm90 has a tile for each head

/* Whether so few queries see so few keys that most of a call is its start and end: 47 queries and keys of 15 x 16/2
 * heads of 96 columns take 7.8 us on mma_sm80 and 8.9 on wgmma_sm90. Where tiles are many and wide they take as long on
 * wgmma_sm90, or less: 64 of 64 x 32/8 heads of 128 columns 49.9 and 46.5. With batch_invariant `sms` is 0: how many
 * tiles there are does not count. */
inline bool is_short(const fa_forward &p, int64_t sms) {
    constexpr int64_t kNarrow = 96; // columns
    const bool starts = p.head_dim <= kNarrow || p.heads * p.batch <= sms;
    return p.seq_q <= kHalfTile && p.key_end - p.key_begin <= kShortKeys && starts && p.softcap == 0;
}

/* Whether tiles are so few and keys so many that mma_sm80 is faster, which splits keys, of head_dims that
 * wgmma_split_sm90 does not take: 64 queries of 8 heads of 256 columns on 8,192 keys take 149 us on wgmma_sm90 and 39.5
 * on mma_sm80, 6 heads of 192 on 1,024 keys 18.6 and 12.5, but 64 heads on 5,567 96 and 114. */
inline bool wants_splits(const fa_forward &p, int64_t sms) {
    constexpr int64_t kSplitColumns = 128, kManyKeys = 1024, kPart = 8; // of the multiprocessors one
    const int64_t tiles = p.heads * p.batch;
    return p.head_dim > kSplitColumns && p.seq_q <= kHalfTile && tiles * kPart <= sms &&
           p.key_end - p.key_begin >= kManyKeys && p.softcap == 0;
}

/* Whether prefill_sm90, whose tiles hold all heads of a kv head, is faster than kernels with a tile for each head. It
 * is where the waves of tiles that it saves take longer than its list kernel. A wave of its tiles, whose rows are full,
 * counts as 1.9. 17 queries of 32 x 64/8 heads of 128 columns on 4,096 keys take 659 us on wgmma_sm90 in 16 waves and
 * 295 on prefill_sm90 in 4, two take 847 on mma_sm80 and 209, but one 174 and 208. 40 of 8 x 32/16 heads, in two waves
 * and one, take 98 and 127. It does not take q with one head for all. */
inline bool saves_waves(const fa_forward &p, int64_t sms) {
    constexpr double kWave = 1.9, kLeastNs = 9500;
    constexpr double kKeyNs = 9.2, kKeyColumns = 128; // of a wave of tiles, for each key and so many columns
    if (p.seq_q <= 1 || p.seq_q >= kGathered || p.heads_kv == 0 || p.softcap > 0 || p.q.stride[1] == 0) return false;
    const int64_t group = p.heads / p.heads_kv;
    if (group > kHalfTile) return false; // heads have tiles of their own
    const int64_t tiles = divide_up(p.seq_q, 2 * (kHalfTile / group)) * p.heads_kv * p.batch;
    const auto waves = [&](int64_t tiles) { return static_cast<double>(divide_up(tiles, sms)); };
    const double saved = waves(p.heads * p.batch) - kWave * waves(tiles);
    return saved * static_cast<double>(p.key_end - p.key_begin) * kKeyNs * p.head_dim / kKeyColumns > kLeastNs;
}

} // namespace fa::sm90
