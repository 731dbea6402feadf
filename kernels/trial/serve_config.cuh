/* serve_sm90: shape and parameters of a launch. */
#pragma once
#include <cuda.h>

#include "common/fold.cuh" // kChunkKeys, kMaxChunks, kGroup
#include "common/score.cuh"
#include "fa.h"
#include "faults.h" // fa_fault_board

namespace fa::sm90::serve {

constexpr int kTileKeys = kChunkKeys; // keys of a tile of K and of V
constexpr int kJobCost = 1;           // what a job costs beside its tiles, in tiles
constexpr int kMaxCluster = 8;        // what every device has
constexpr int kMaxLengthBits = 30;

/* A team of warps shares a ring of tiles, and each warp has 8 * RowTiles of the team's rows. Rows are the columns of
 * the products (S^T = K Q^T, O^T = V^T P^T), so that few rows waste little of them: 8 fill a tile. */
template <class T_, int Columns, int RowTiles, int Team> struct Config {
    using T = T_;
    static constexpr int kColumns = Columns; // head_dim, zero-padded
    static constexpr int kRowTiles = RowTiles;
    static constexpr int kTeam = Team;
    static constexpr int kWarps = Team > 2 ? 8 : Columns > 128 ? 2 * Team : 4 * Team; // a stage a team at least
    static constexpr int kThreads = kWarps * 32;
    static constexpr int kTeams = kWarps / Team;
    static constexpr int kWarpRows = 8 * RowTiles;
    static constexpr int kRows = kWarpRows * Team; // of a job
    static constexpr int kLaneRows = 2 * RowTiles; // whose columns a lane holds
    static constexpr int kSlabs = (Columns + 63) / 64;
    static constexpr int kSlabBytes = kTileKeys * 128;
    static constexpr int kTileBytes = kSlabs * kSlabBytes; // one tile of K, or of V
    static constexpr int kRingBytes = 128 * 1024;
    static constexpr int kStages = kRingBytes / (2 * kTileBytes * kTeams); // of a team, each K and V
    static constexpr int kUnits = Columns / 8;                             // of 8 columns of the output
    static constexpr int kTotalBytes = kWarps * (kWarpRows * Columns * 4 + kLaneRows * 32 * 8);
    static constexpr int kBarriers = kTeams * kStages * 2 + 1;
    static constexpr int kValidWords = kTeams * kStages;
    static constexpr int kControlBytes = ((kBarriers + kValidWords) * 8 + 127) / 128 * 128;
    static constexpr int kNotesBytes = 768;                          // of a warp
    static constexpr int kScratchBytes = kWarps * kNotesBytes + 512; // and for dealing work out
    static constexpr int kSharedBytes = kRingBytes + kTotalBytes + kControlBytes + kScratchBytes;

    static constexpr bool kClusters = Columns <= 128;   // else a state on its way leaves no registers
    static constexpr bool kFindsAhead = Columns <= 128; // nor does the place of the next tile

    static_assert(Columns % 64 == 0 && kStages >= 1);
    static_assert(kSharedBytes <= 227 * 1024, "a block of sm_90 has 227 KB of shared memory");
    static_assert(kTotalBytes / kWarps % 16 == 0 && (kRingBytes + kControlBytes + kScratchBytes) % 16 == 0 &&
                      kNotesBytes % 16 == 0,
                  "accumulators are float4");
};

/* How K and V get to shared memory. */
enum class Load : int {
    kBoxes, // TMA: a tile a box, or page by page
    kRows,  // cp.async, 16 bytes each
};

/* One sequence of the batch. */
struct Sequence {
    fa_entry entry;
    int64_t rows_end; // of q: where its rows end, used or not; of the last sequence, where all end
    int low, high;    // keys that some query sees
    int tile, tile_end;
    int shift;  // log2 of the tiles of a chunk
    int blocks; // jobs a kv head

    __host__ __device__ int tiles() const { return tile_end - tile; }
    __host__ __device__ int cost() const { return tiles() + kJobCost; }
};

/* What a launch reads of its call. */
struct Params {
    CUtensorMap k_map, v_map; // of kBoxes
    fa_forward p;
    fa_sequences s; // of a dense call too: all rows of every batch entry
    fa_operand alibi;
    ScoreParams score;
    Sequence dense; // of a call without sequences: every batch entry
    int group;      // query heads a kv head
    int box_shift;  // log2 of the keys of a box
    Load load;
    fa_fault_board *faults; // NULL: nobody counts
    char *workspace;        // what workers leave for others to fold
    int states;             // of a worker there: persistent form
    int slots, job_rows;    // cluster and split form: chunks of a job that have room, rows of each
    int parts;              // blocks of a job there
};

/* One worker's part of a job that it does not have alone; a worker has at most two such. */
struct Record {
    int b, head, block; // the job that begins here and ends elsewhere
    int before_q, before_k;
    int total, group;                // states of it: all whole groups folded, and the last one as far as it goes
    int head_continues, head_groups; // states of the job that began elsewhere
    int head_done;                   // it ends here
    int unused[2];
};

/* Workspace: a record for each worker, then its states, each the accumulators of the warps of a team in their own
 * order, then maximum and sum of each row. */
template <class C> struct Workspace {
    static constexpr size_t kAccumulators = size_t(C::kRows) * C::kColumns * 4;
    static constexpr size_t kState = kAccumulators + C::kRows * 8;
    static_assert(sizeof(Record) % 16 == 0 && kAccumulators % 16 == 0 && kState % 16 == 0, "states are read as float4");
    char *base;
    int states;

    __host__ __device__ static size_t bytes(int64_t workers, int states) {
        return size_t(workers) * (sizeof(Record) + states * kState);
    }
    __device__ Record *record(int64_t worker) const { return reinterpret_cast<Record *>(base) + worker; }
    __device__ char *state(int64_t workers, int64_t worker, int n) const {
        return base + workers * sizeof(Record) + (worker * states + n) * kState;
    }
};

} // namespace fa::sm90::serve
