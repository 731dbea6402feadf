/* serve_sm90: shape and parameters of a launch. */
#pragma once
#include <cuda.h> // CUtensorMap

#include "common/fold.cuh" // kChunkKeys, kMaxChunks, kGroup
#include "common/score.cuh"
#include "common/spot.cuh"  // Serving
#include "common/tiles.cuh" // Divider
#include "sm90/common/few_rows.cuh"
#include "sm90/common/sequence_list.cuh"

namespace fa::sm90::serve {

constexpr int kTileKeysLog2 = 5, kTileKeys = 1 << kTileKeysLog2; // keys of a tile of K and of V: one a lane
constexpr int kThinKeysLog2 = 6, kThinKeys = 1 << kThinKeysLog2; // of a tile of a thin job
constexpr int kLaneRows = 2;                                     // of few, whose columns a lane holds
static_assert(kChunkKeys % kTileKeys == 0 && kThinChunkKeys % kThinKeys == 0);

/* A block has 4 warps, each with a ring of tiles of its own. Rows are the columns of the products (S^T = K Q^T, O^T =
 * V^T P^T), so that few rows waste little of them: 8 fill a tile. Of a thin job the block is one warpgroup.
 *
 * Plain: for calls without thin jobs, positions, ranges of keys, ALiBi and softcap, whose keys TMA brings. A short
 * launch runs all of its code once, from memory: such kernels have less of it. */
template <class T_, int Columns, bool Plain = false> struct Config {
    using T = T_;
    static constexpr int kColumns = Columns; // head_dim, zero-padded
    static constexpr bool kPlain = Plain;
    static constexpr bool kThin = !Plain && Columns <= kThinColumns;
    static constexpr int kJobRows = kThin ? kThinRows : kFewRows; // of a job, at most
    static constexpr int kWarps = 4, kThreads = kWarps * 32;
    static constexpr int kSlabBytes = kTileKeys * 128;
    static constexpr int kSlotBytes = Columns / 64 * kSlabBytes; // one tile of K, or of V
    static constexpr int kSlots = Columns == 64 ? 6 : 3;         // of a warp
    static constexpr int kRingBytes = kWarps * kSlots * kSlotBytes;
    static constexpr int kBlocksPerSm = Columns <= 128 ? 2 : 1;
    static constexpr int kUnits = Columns / 8; // of 8 columns of the output

    static_assert(Columns % 64 == 0 && kWarps >= kFewestWarps);
};

/* Of packed queries, where prefill_list_kernel says which sequences are whose (listed.cuh). */
struct Listed {
    ListHeader *list;   // NULL: no list
    uint32_t *arrivals; // of blocks that share a job, for each slot
    char *own;          // for the states of a block's own job
    int64_t own_bytes;
    bool alone; // nobody else has sequences
    bool first; // before prefill_sm90_kernel
};

/* The values that a launch reads of its call. */
struct Params {
    CUtensorMap k_map, v_map; // where boxes
    Serving call;
    ScoreParams score;
    Divider heads_kv, group, page; // group: query heads a kv head; page: keys of one
    Divider tiles_m;               // tiles of rows of a sequence, where q has no starts
    int first, jobs;               // of this launch: tiles of rows times kv heads
    int64_t job_bytes;             // of states in workspace
    Divider parts;                 // blocks of a job
    bool by_number;                // of packed queries: a job has all rows of a kv head of a sequence
    bool in_pairs;                 // two columns of out are a word
    bool clustered;                // the parts of a job are a cluster
    int boxes;                     // keys of a box of TMA; 0: cp.async
    char *workspace;
    Sight dense; // of a call without sequences: every batch entry
    Listed listed;
};

} // namespace fa::sm90::serve
