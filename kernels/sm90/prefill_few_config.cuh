/* prefill_sm90, sequences of few rows (queries times heads of a kv head): shape, parameters and workspace of the kernel
 * that takes them by serve_sm90's products, before the one that takes tiles.
 *
 * What belongs to such a sequence is serve_sm90's: its chunks of keys, its groups of 8 chunks, the order in which their
 * states are folded, and so its bits. A unit is a range of its chunks for one kv head, one warp's work: all of them,
 * or within a group 1, 2, 4 or 8 chunks, cut at multiples of that. prefill_list_kernel says which by the keys of all
 * such sequences together: it decides who computes what, and so no bit. The first unit of a group leaves one state of
 * its chunks, the others one a chunk; who ends a group last folds these, and who ends a job's last group folds groups.
 *
 * Beyond 16 rows a pair of warps takes a unit, 16 rows each, and the tiles of keys come once for both.
 */
#pragma once
#include "sm90/prefill_config.cuh"
#include "sm90/serve_config.cuh"

namespace fa::sm90::prefill {

constexpr int kFewClasses = 64; // of units, half of them for pairs of warps, by their keys

/* Rows that a sequence of few has at most, those of a warp, and warps of a block, each with a ring of tiles of keys. By
 * columns: head_dim as serve_sm90 rounds it up. */
constexpr int few_rows_at_most(int columns) { return columns <= 128 ? 32 : 8; }
constexpr int few_rows_of_warp(int columns) { return columns <= 128 ? 16 : 8; }
constexpr int few_warps(int columns) { return columns <= 128 ? 8 : 4; }
constexpr int few_columns(int64_t head_dim) { return head_dim <= 64 ? 64 : head_dim <= 128 ? 128 : 256; }

/* Bytes of the state of eight rows: what the lanes hold of the output, then maxima and sums. */
constexpr int few_state_bytes(int columns) { return 32 * 4 * (columns / 4 + 4); }

/* A sequence of few rows. Its slots hold eight rows each; jobs of more rows have two or four in a row. */
struct alignas(16) FewJob {
    Record of; // unit: before it, of the list; slot: the first
    serve::Sight sight;
    int cut;   // chunks of a unit; 0: all
    int slots; // states of a kv head
    int unused;

    __device__ __forceinline__ int eights(int group) const {
        const int rows = of.seq_q * group;
        return rows > 16 ? 4 : rows > 8 ? 2 : 1;
    }
    /* Units of a kv head. */
    __device__ __forceinline__ int parts() const { return cut ? (sight.last - 1) / cut - sight.first / cut + 1 : 1; }
    __device__ __forceinline__ int groups() const {
        return sight.last > sight.first ? (sight.last - 1) / kGroup - sight.first / kGroup + 1 : 0;
    }
    /* Slots from one group to the next. */
    __device__ __forceinline__ int group_slots() const { return cut == kGroup ? 1 : kGroup; }
};

struct alignas(16) FewHeader {
    uint32_t units, counter;           // all of them; how many were taken beside the first of each warp
    uint32_t pair_units, pair_counter; // the same of those that pairs of warps take, which come first
    int blocks;                        // that have work
    int jobs, unused[2];
};

/* How many units of a group, and how many groups, have ended. In the group's slot, and in the job's first. */
struct FewLeft {
    uint32_t group, job;
};

/* Header, jobs, for each slot how many have ended, states: two for each warp, then the slots. */
__host__ __device__ inline int64_t few_left_at(const Few &few) {
    return sizeof(FewHeader) + sizeof(FewJob) * few.batch;
}
__host__ __device__ inline int64_t few_states_at(const Few &few) {
    return (few_left_at(few) + int64_t(sizeof(FewLeft)) * few.slots + 127) / 128 * 128;
}
__host__ __device__ inline int64_t few_bytes(const Few &few) {
    return few_states_at(few) + (few.slots ? (2 * int64_t(few.blocks) * few.warps + few.slots) * few.state_bytes : 0);
}
__device__ __forceinline__ FewHeader *few_header(const Few &few) { return reinterpret_cast<FewHeader *>(few.base); }
__device__ __forceinline__ FewJob *few_job(const Few &few, int n) {
    return reinterpret_cast<FewJob *>(few.base + sizeof(FewHeader)) + n;
}
__device__ __forceinline__ FewLeft *few_left(const Few &few, int slot) {
    return reinterpret_cast<FewLeft *>(few.base + few_left_at(few)) + slot;
}
__device__ __forceinline__ float4 *few_state_of_warp(const Few &few, int warp) {
    return reinterpret_cast<float4 *>(few.base + few_states_at(few) + 2 * int64_t(warp) * few.state_bytes);
}
__device__ __forceinline__ float4 *few_state(const Few &few, int slot) {
    const int64_t before = 2 * int64_t(few.blocks) * few.warps;
    return reinterpret_cast<float4 *>(few.base + few_states_at(few) + (before + slot) * few.state_bytes);
}

struct FewParams {
    serve::Params serve; // but for what names jobs and their workspace
    Call call;
};

} // namespace fa::sm90::prefill
