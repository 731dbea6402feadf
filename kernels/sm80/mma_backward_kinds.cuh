/* mma_backward_sm80: tile shapes of each head_dim by what they are for, and the function that launches an instance. */
#pragma once
#include "sm80/mma_backward.cuh"      // BackwardConfig
#include "sm80/mma_backward_bias.cuh" // BiasConfig

namespace fa {

namespace { // of a file alone: both kernels of this folder have kinds

/* Whether dk and dv of 16 keys fit the registers of one warp together. */
constexpr bool has_both(int head_dim) { return head_dim <= 128; }

/* Instances of one side, by what they are for. kLarge and kSmall give the same bits: other rows come in the same tiles
 * and steps. */
enum Kind {
    kLarge,    // grids that fill the device
    kSmall,    // grids that do not: half the own rows a block, where kLarge has two row tiles
    kGeneral,  // softcap, bias, boolean mask, rows of any alignment
    kExtended, // the same, ALiBi, dropout, segments and intervals
    kKinds
};

/* Row tiles a warp, warps, other rows a tile and a step, blocks a multiprocessor. A warp of two row tiles reads each
 * operand b for twice as many products, which shared memory needs (mma_sm80.cu); its gradients must leave room for
 * that: 64 registers of dq at head_dim 64, 128 of dk and dv. */
constexpr BackwardShape shape_of(int head_dim, Role role, Kind kind) {
    constexpr BackwardShape kOwn[] = {{2, 4, 0, 0, 2}, {1, 4, 0, 0, 2}, {1, 8, 0, 0, 1}, {1, 8, 0, 0, 1}}; // by kind
    BackwardShape shape = head_dim <= 64 || (role == Role::kQueries && head_dim <= 128) ? kOwn[kind] : kOwn[kSmall];
    shape.tile = head_dim <= 64 ? 64 : head_dim <= 192 || role == Role::kValue ? 32 : 16;
    shape.step = shape.tile < 32 ? shape.tile : 32;
    return shape;
}

template <typename T, int kHeadDim, Role kRole, Kind kKind, bool kSequences = false>
using Choose = BackwardConfig<T, kHeadDim, kRole,
                              kKind == kExtended  ? Options::kExtended
                              : kKind == kGeneral ? Options::kGeneral
                                                  : Options::kNone,
                              shape_of(kHeadDim, kRole, kKind), kSequences>;

} // namespace

/* Kinds that an instance has. */
enum class Family {
    kDense,     // kLarge, kSmall and kExtended
    kGeneral,   // kGeneral alone
    kSequences, // kLarge and kExtended of sequences, whatever their number and lengths, on which no bit may depend
};

/* Of a launch: the kinds of the instances whose queries own, and whose keys do. */
struct fa_mma_kinds {
    int queries, keys;
};

/* Launches everything of a group of pairs, or dbias: an instance, of one padded head_dim. Only those of sequences look
 * at more than the BackwardArgs. */
using Launch = fa_code(const SequenceArgs &, fa_dtype dtype, fa_mma_kinds, bool bias, const fa_launch &);

} // namespace fa
