/* Bias and boolean mask on their way to the scores: from global to shared memory with the keys of their tile, and from
 * there to the registers that hold the tile's products.
 *
 * Read element by element where the scores are, both cost more than the two products: a warp's scores lie eight rows
 * apart, so that each load touches eight lines for 64 elements. A tile is therefore copied in rows, 16 bytes a thread,
 * one key tile ahead. It has a row a query and lies in the layout of sm80/tile.cuh, in which 16-bit elements are the
 * accumulators of mma.sync as ldmatrix delivers them. */
#pragma once

#include <math.h>      // INFINITY
#include <stdint.h>    // int64_t, uint8_t
#include <type_traits> // conditional_t

#include "common/ptx.cuh"   // cp_async_16, ldmatrix_x4, store_shared, unpack
#include "common/score.cuh" // add_bias
#include "fa.h"             // fa_operand
#include "sm80/config.cuh"  // MmaArgs, BlockPlace
#include "sm80/scores.cuh"  // Scores
#include "sm80/tile.cuh"    // TileLayout, BlockAddress

namespace fa {

/* A tile of kQueries x kKeys elements of kBytes bytes. A row takes at least 64 bytes, half of them unused where a mask
 * is 32 keys wide. */
template <int kBytes, int kQueries, int kKeys> struct BiasTile {
    static constexpr int kElements = 16 / kBytes;       // of a chunk
    static constexpr int kChunks = kKeys / kElements;   // of a row
    static constexpr int kColumns = kKeys * kBytes / 2; // 16-bit units of a row
    using Layout = TileLayout<(kColumns < 32 ? 32 : kColumns)>;
    static constexpr int kRowBytes = Layout::kRowBytes, kTileBytes = kQueries * kRowBytes;
    using Bits = std::conditional_t<kBytes == 1, uint8_t, std::conditional_t<kBytes == 2, uint16_t, uint32_t>>;

    /* Starts the copy of the elements of the queries [query, query + kQueries) that are below `queries` and the keys
     * [key, key + kKeys) that are below `keys`; the others become zeros and are not read. `chunks`: rows are
     * whole 16-byte aligned chunks of neighbouring elements, as kAligned knows, and so are `keys`; otherwise the
     * elements are read when this returns. */
    template <int kThreads, bool kAligned>
    __device__ static __forceinline__ void copy(uint32_t tile, const fa_operand &x, int64_t batch, int64_t head,
                                                int query, int queries, int key, int keys, bool chunks) {
        constexpr int kStep = kThreads / kChunks; // rows between two chunks of a thread
        static_assert(kStep % 8 == 0 && kQueries % kStep == 0, "a thread's rows share one key of the layout");
        const int row = threadIdx.x / kChunks, chunk = threadIdx.x % kChunks, first = key + chunk * kElements;
        const int count = min(max(keys - first, 0), kElements), rows = queries - query - row;
        const uint32_t to = tile + Layout::offset(row, chunk);
        const Bits *from = static_cast<const Bits *>(x.data) + batch * x.stride[0] + head * x.stride[1] +
                           (query + row) * x.stride[2] + first * x.stride[3];
        if (kAligned || chunks) {
#pragma unroll 4
            for (int r = 0; r < kQueries; r += kStep, from += kStep * x.stride[2])
                cp_async_16(to + r * kRowBytes, from, r < rows && count > 0);
        } else {
            constexpr int kBatch = kBytes == 1 || kQueries / kStep < 2 ? 1 : 2; // rows whose loads overlap
#pragma unroll 1
            for (int r = 0; r < kQueries; r += kBatch * kStep, from += kBatch * kStep * x.stride[2]) {
                uint32_t word[kBatch][4] = {};
#pragma unroll
                for (int e = 0; e < 4 / kBytes; ++e) // of the elements in a word
#pragma unroll
                    for (int n = 0; n < kBatch; ++n)
#pragma unroll
                        for (int w = 0; w < 4; ++w) {
                            const int i = w * (4 / kBytes) + e;
                            if (r + n * kStep < rows && i < count)
                                word[n][w] |= uint32_t(from[n * kStep * x.stride[2] + i * x.stride[3]])
                                              << e * kBytes * 8;
                        }
#pragma unroll
                for (int n = 0; n < kBatch; ++n)
                    store_shared(to + (r + n * kStep) * kRowBytes,
                                 make_uint4(word[n][0], word[n][1], word[n][2], word[n][3]));
            }
        }
    }
};

/* Both tiles of a block of configuration C; either may be absent. */
template <class C> class BiasTiles {
    using T = typename C::T;
    using Wide = BiasTile<4, C::kTileM, C::kTileN>;
    using Half = BiasTile<2, C::kTileM, C::kTileN>;
    using Mask = BiasTile<1, C::kTileM, C::kTileN>;
    static_assert(C::kWarpsN == 1, "a warp reads whole rows");

  public:
    static constexpr int kWideBytes = Wide::kTileBytes, kHalfBytes = Half::kTileBytes, kMaskBytes = Mask::kTileBytes;

    /* Starts the copies for the tile of keys that starts at `key`. `shared`: where the block's shared memory begins. */
    __device__ static __forceinline__ void copy(const MmaArgs &args, const BlockPlace &block, uint32_t shared,
                                                int key) {
        const AttentionParams &p = args.problem;
        if (!p.bias.data && !p.mask.data) return;
        const BlockPlace place = C::kShort ? BlockPlace(args) : block;
        const auto copy_tile = [&](auto tile, uint32_t to, const fa_operand &x, bool chunks) {
            tile.template copy<C::kThreads, !C::kGeneral>(to, x, place.batch, place.head, place.row_block * C::kTileM,
                                                          int(p.seq_q), key, int(p.seq_k), chunks);
        };
        if (p.bias.data) {
            if (p.bias_dtype == FA_F32)
                copy_tile(Wide(), shared + args.bias_at, p.bias, args.chunks_bias);
            else
                copy_tile(Half(), shared + args.bias_at, p.bias, args.chunks_bias);
        }
        if (p.mask.data) copy_tile(Mask(), shared + args.mask_at, p.mask, args.chunks_mask);
    }

    /* Adds the bias in base 2 to this lane's scores and excludes what the mask does. `row`: the warp's first in the
     * tiles. */
    __device__ static __forceinline__ void apply(const MmaArgs &args, uint32_t shared, int row, int lane,
                                                 Scores<C::kRowTiles, C::kKeys> &s) {
        const AttentionParams &p = args.problem;
        if (p.bias.data) {
            if (p.bias_dtype == FA_F32)
                add_wide(shared + args.bias_at + row * Wide::kRowBytes, lane, s);
            else
                add_half(shared + args.bias_at + row * Half::kRowBytes, lane, s);
        }
        if (p.mask.data) exclude(shared + args.mask_at + row * Mask::kRowBytes, lane, s);
    }

  private:
    __device__ static __forceinline__ void add_pair(float &low, float &high, float2 bias) {
        low = add_bias(low, bias.x);
        high = add_bias(high, bias.y);
    }

    __device__ static __forceinline__ void add_half(uint32_t rows, int lane, Scores<C::kRowTiles, C::kKeys> &s) {
        const BlockAddress<C::kTileN, BlockOrder::kRowsFirst> address(rows, lane);
#pragma unroll
        for (int r = 0; r < C::kRowTiles; ++r)
#pragma unroll
            for (int n = 0; n < C::kKeys / 16; ++n) {
                uint32_t x[4];
                ldmatrix_x4<false>(x, address.at(n) + r * 16 * Half::kRowBytes);
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    add_pair(s[r][2 * n + i / 2][i % 2 * 2], s[r][2 * n + i / 2][i % 2 * 2 + 1], unpack<T>(x[i]));
            }
    }

    /* Calls body(low, high, row, j) for this lane's scores of each query, pair by pair: those of row `row` + lane / 4
     * of the warp's, keys 8 j + 2 (lane % 4) + {0, 1}. */
    template <class Body>
    __device__ static __forceinline__ void each_pair(Scores<C::kRowTiles, C::kKeys> &s, Body &&body) {
#pragma unroll
        for (int r = 0; r < C::kRowTiles; ++r)
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
                for (int j = 0; j < C::kKeys / 8; ++j) body(s[r][j][2 * i], s[r][j][2 * i + 1], r * 16 + i * 8, j);
    }

    __device__ static __forceinline__ void add_wide(uint32_t rows, int lane, Scores<C::kRowTiles, C::kKeys> &s) {
        each_pair(s, [&](float &low, float &high, int row, int j) {
            const uint32_t chunk = rows + row * Wide::kRowBytes + Wide::Layout::offset(lane / 4, 2 * j + lane % 4 / 2);
            add_pair(low, high, load_shared_pair(chunk + lane % 2 * 8));
        });
    }

    __device__ static __forceinline__ void exclude(uint32_t rows, int lane, Scores<C::kRowTiles, C::kKeys> &s) {
        each_pair(s, [&](float &low, float &high, int row, int j) {
            const uint32_t chunk = rows + row * Mask::kRowBytes + Mask::Layout::offset(lane / 4, j / 2);
            const uint32_t attend = load_shared_2(chunk + j % 2 * 8 + lane % 4 * 2);
            if (!(attend & 0xff)) low = -INFINITY;
            if (!(attend & 0xff00)) high = -INFINITY;
        });
    }
};

} // namespace fa
