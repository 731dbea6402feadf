/* mma_sm80: tile shapes of each head_dim by what they are for, and the functions that launch its instances. */
#pragma once
#include "sm80/attention.cuh"    // MmaConfig, MmaArgs
#include "sm80/serve_config.cuh" // ServeArgs

namespace fa {

namespace { // of a file alone: both kernels of this folder have kinds

/* Instances of one head_dim and dtype, by what they are for. */
enum Kind {
    kLarge,   // grids that fill the device
    kMedium,  // the same where two blocks of kLarge do not fit the shared memory of a multiprocessor (sm_80)
    kCompact, // the same where two of kMedium do not (sm_86, sm_89)
    kSmall,   // grids that do not: 32 rows a block, two warps a row
    kGeneral, // softcap, bias, boolean mask, scale <= 0, operands of any alignment
    kBiased,  // bias or mask, all aligned, in grids that fill the device; of its own at head_dim 64 and 128 alone
    kKinds
};

/* Row tiles a warp, warps over rows, warps over keys, keys a warp, stages, Q in registers, blocks a multiprocessor.
 * Measured on the H200: 16-row warps are bound by shared memory and lose 5 to 25%; 32 keys lose 10% to 64; a second
 * stage gains 5% at head_dim 64 and 3% at 128; at 256, 8 warps in one block lose 6% to two blocks of 4. Under softcap
 * 12 warps of 16 rows do as well as 8 of 32, and better in small grids; under bias and mask they lose 10%. Q in
 * registers gains 4% there at head_dim 64. */
constexpr MmaShape shape_of(int head_dim, Kind kind) {
    if (kind == kGeneral) return {1, 4, 1, head_dim <= 192 ? 64 : 32, 1, head_dim <= 64, head_dim <= 128 ? 3 : 2};
    if (kind == kBiased) return {2, 4, 1, 64, 1, head_dim <= 64, 2};
    if (kind == kSmall && head_dim <= 64) return {1, 2, 2, 64, 2, true, 3};
    if (kind == kSmall) return {1, 2, 2, head_dim <= 128 ? 64 : 32, 1, head_dim <= 128, 2};
    switch (head_dim) {
    case 32:
    case 64: return {2, 4, 1, 64, 2, true, 2};                       // 48 KB
    case 96: return {2, 4, 1, 64, kind == kLarge ? 2 : 1, false, 2}; // 72, 48 KB
    case 128:
        if (kind == kCompact) return {2, 4, 1, 32, 1, false, 2};         // 48 KB
        return {2, 4, 1, 64, kind == kLarge ? 2 : 1, false, 2};          // 96, 64 KB
    case 192: return {1, 4, 1, kind == kCompact ? 32 : 64, 1, false, 2}; // 72, 48 KB
    default:
        if (kind == kLarge) return {1, 4, 1, 64, 1, false, 2}; // 96 KB
        return {1, 8, 1, 32, 1, false, 1};                     // 96 KB, eight warps in the one block that fits
    }
}

/* The kind whose instance does the work of another. */
constexpr Kind built(int head_dim, Kind kind) {
    return kind == kBiased && head_dim != 64 && head_dim != 128 ? kGeneral : kind;
}

constexpr Surface surface_of(Kind kind) {
    return kind == kGeneral ? Surface::kGeneral : kind == kBiased ? Surface::kBiased : Surface::kPlain;
}

template <typename T, int kHeadDim, Kind kKind>
using Choose = MmaConfig<T, kHeadDim, shape_of(kHeadDim, built(kHeadDim, kKind)), surface_of(built(kHeadDim, kKind))>;

} // namespace

/* Launch an instance, of one padded head_dim: a kind of the dense ones; one that serves, where `dressed` names the
 * options of ServeConfig. */
using Dense = fa_code(const MmaArgs &, fa_dtype dtype, int kind, unsigned blocks, const fa_launch &);
using Serve = fa_code(const sm80::ServeArgs &, fa_dtype dtype, bool dressed, const fa_plan &, const fa_launch &);

} // namespace fa
