/* The compile-time parameters of a simt kernel, and what its host part works out for a launch. */
#pragma once

#include <stddef.h> // size_t
#include <stdint.h> // int64_t

#include "common/score.cuh" // ScoreParams
#include "fa.h"             // FA_MAX_HEAD_DIM

namespace fa::simt {

constexpr int kWarp = 32;
constexpr int kRowGroups = 4, kColumnGroups = 8; // the lanes of a warp over a block of scores

/* How K and V blocks reach shared memory: a sum of these. */
constexpr int kSyncSeparate = 1; // a buffer each and two barriers a block; else one for both and four barriers
constexpr int kSyncPrefetch = 2; // V waits in registers during the softmax, the next K during the product P V

/* How the 8 lanes that share a row find its maximum. */
constexpr int kReduceShuffle = 0; // butterfly of warp shuffles
constexpr int kReduceShared = 1;  // through shared memory

struct Tile {
    int head_dim; // the largest head_dim and head_dim_v, a multiple of 32
    int block_m;  // query rows of a thread block
    int block_n;  // keys of a block of K and V
    int warps;
    int groups; // of warps; each has all rows, and every groups-th block of keys
    int sync;
    int blocks; // thread blocks that a multiprocessor shall hold: bounds the registers
    int vec, reduce;

    constexpr int threads() const { return warps * kWarp; }
    constexpr int group_threads() const { return threads() / groups; }
    constexpr int group_warps() const { return warps / groups; }
    constexpr int lane_rows() const { return block_m / group_warps() / kRowGroups; }
    constexpr int lane_keys() const { return block_n / kColumnGroups; }
    constexpr int lane_quads() const { return head_dim / 32; } // of four head_dim columns
    constexpr int registers() const { return 65536 / (threads() * blocks) < 255 ? 65536 / (threads() * blocks) : 255; }
    constexpr int accumulators() const { return lane_rows() * (lane_keys() + 4 * lane_quads()); } // of S and O, a lane
    constexpr bool separate() const { return sync & kSyncSeparate; }
    constexpr bool prefetch() const { return sync & kSyncPrefetch; }

    /* Shared memory in floats. Rows are padded by 16 bytes, see simt/kernel.cuh. */
    constexpr int row_floats() const { return head_dim + 4; }  // a row of Q, K or V
    constexpr int score_floats() const { return block_n + 4; } // a row of S or P
    constexpr int query_floats() const { return block_m * row_floats(); }
    constexpr int key_floats() const { return block_n * row_floats(); }
    constexpr int group_floats() const { // what each group has for itself: K, V, P, partial maxima
        return (separate() ? 2 : 1) * key_floats() + block_m * score_floats() + (reduce ? block_m * kColumnGroups : 0);
    }
    constexpr int merge_floats() const { // what the groups but the first hand over at the end
        return (groups - 1) * group_threads() * 4 * (lane_rows() * lane_quads() + (lane_rows() + 1) / 2);
    }
    constexpr size_t smem_bytes() const {
        const int work = query_floats() + groups * group_floats();
        return sizeof(float) * (work > merge_floats() ? work : merge_floats());
    }
    constexpr bool valid() const {
        return head_dim > 0 && head_dim % 32 == 0 && head_dim <= FA_MAX_HEAD_DIM && warps > 0 && warps <= 32 &&
               blocks > 0 && groups > 0 && warps % groups == 0 && groups < 16 && block_m > 0 &&
               block_m % (kRowGroups * group_warps()) == 0 && block_n > 0 && block_n % kColumnGroups == 0 &&
               sync >= 0 && sync <= 3 && (reduce == kReduceShuffle || reduce == kReduceShared) && vec >= 0 &&
               vec <= 8 && (vec & (vec - 1)) == 0 && smem_bytes() <= 227 * 1024;
    }
};

/* Elements of a global load. */
template <typename T> constexpr int chunk_width(const Tile &t) {
    return t.vec ? t.vec : 16 / static_cast<int>(sizeof(T));
}

/* Computed on the host, once a launch. */
struct Options {
    ScoreParams score;
    float scale, softcap;                          // of natural scores; softcap 0: none
    int64_t tiles;                                 // of the whole launch
    int64_t tiles_m;                               // of one head
    bool longest_first;                            // later query rows see more keys: start with them
    bool general;                                  // softcap, bias, mask: scores pass through shared memory
    bool q_chunks, k_chunks, v_chunks, out_chunks; // vector loads and stores are possible
};

} // namespace fa::simt
