/* The Hopper forward kernel: its parameters, shared memory, and the key blocks of a tile. */
#pragma once
#include "common/dropout.cuh"
#include "sm90/common/schedule.cuh"
#include "sm90/common/softmax.cuh"
#include "sm90/common/tma.cuh"
#include "sm90/score/light.cuh"

namespace fa::sm90 {

struct ForwardParams {
    CUtensorMap q, k, v;   // k and v cover the call's visible keys alone
    CUtensorMap out_map;   // of out, boxes of 16 rows; with C::kStaged
    void *out;             // (B, H, Sq, D); without
    int64_t out_stride[3]; // elements, of B, H, Sq
    float *lse;            // (B, H, Sq) or NULL
    int64_t lse_stride[3]; // elements
    const void *sinks;     // (H) or NULL
    int64_t sinks_stride;
    fa_dtype sinks_dtype;
    Schedule schedule;
    ShiftedBand visible;
    int seq_q, head_dim, group;          // group: query heads a key head
    int q_step[2], k_step[2], v_step[2]; // factors 0 or 1 of the head and batch coordinates
    float score_factor;                  // 2^(score_factor * s): scale or softcap, times log2(e)
    float cap_factor;                    // softcap: s = tanh(cap_factor * product)
    CapPolynomial cap_polynomial;        // the same below a limit, without the MUFU
};

struct DropoutForwardParams : ForwardParams {
    fa_dropout dropout;
    float kept;    // what a weight is multiplied by that dropout keeps
    int key_begin; // the first visible key
};
__device__ __forceinline__ const DropoutForwardParams &dropout_of(const ForwardParams &p) {
    return static_cast<const DropoutForwardParams &>(p);
}

struct LightForwardParams : DropoutForwardParams {
    LightParams light;
};
__device__ __forceinline__ const LightParams &light_of(const ForwardParams &p) {
    return static_cast<const LightForwardParams &>(p).light;
}

template <bool Dropout> struct ForwardDropout {};
template <> struct ForwardDropout<true> {
    fa_dropout words; // as they were when the block began
};

/* The words of the blocks in the ring of keys, where the producer leaves blocks out. */
template <bool Listed, int Stages> struct ForwardBlocks {};
template <int Stages> struct ForwardBlocks<true, Stages> { BlockWord of[Stages]; };

template <class C> struct ForwardSmem {
    static constexpr int kSlabs = (C::kHeadDim + kSlabColumns - 1) / kSlabColumns;
    static constexpr int kQuerySlabBytes = 64 * kSlabRowBytes;
    static constexpr int kKeySlabBytes = C::kTileN * kSlabRowBytes;
    static constexpr int kQueryBytes = kSlabs * kQuerySlabBytes; // of one warpgroup
    static constexpr int kKeyBytes = kSlabs * kKeySlabBytes;
    static constexpr int kTileStages = 4; // of tile[]: at least this tile, the next and the one after; a power of 2

    alignas(1024) char q[C::kQueryStages][C::kConsumers][kQueryBytes];
    alignas(1024) char k[C::kStages][kKeyBytes];
    alignas(1024) char v[C::kStages][kKeyBytes];
    alignas(C::kStaged ? 1024 : 16) char out[C::kStaged ? C::kConsumers : 1][4][C::kStaged ? kQueryBytes / 4 : 16];
    alignas(16) Tile tile[kTileStages];
    uint64_t q_full[C::kQueryStages][C::kConsumers], q_empty[C::kQueryStages][C::kConsumers];
    uint64_t k_full[C::kStages], k_empty[C::kStages], v_full[C::kStages], v_empty[C::kStages];
    uint64_t tile_full[kTileStages], tile_empty[kTileStages]; // the producer hands tiles to the consumers
    [[no_unique_address]] ForwardDropout<C::kDropout> dropout;
    [[no_unique_address]] ForwardBlocks<C::kLight, C::kStages> blocks;
};

/* Key blocks of the tile of queries from `row`. With dropout the last ends with a whole 16 keys, of which a lane has
 * what one call of the generator serves; of the light kind with a whole block of a map. */
template <class C> __device__ __forceinline__ KeyBlocks forward_blocks(const ForwardParams &p, int row) {
    const int row_end = min(row + C::kTileM, p.seq_q);
    KeyBlocks blocks = key_blocks<C::kMasked, C::kTileN>(p.visible, row, row_end);
    if constexpr (C::kDropout || C::kLight) {
        if (blocks.count == 0) return blocks;
        if constexpr (C::kLight)
            blocks.end += -blocks.end & 63;
        else
            blocks.end += -(dropout_of(p).key_begin + blocks.end) & 15;
        blocks.count = (blocks.end - begin_of(p.visible, row) + C::kTileN - 1) / C::kTileN;
    }
    return blocks;
}

} // namespace fa::sm90
