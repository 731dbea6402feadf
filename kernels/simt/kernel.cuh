/* The simt kernel: one tile of query rows against the keys they see.
 *
 * The warps of a thread block form `groups`; each group walks over its own blocks of keys with its own K, V and P
 * buffers and row states for all rows of the tile, and the groups are merged at the end. Within a group each warp owns
 * block_m / group_warps rows alone, so that P and the row states never cross warps. A warp's lanes form a grid of
 * 4 row groups x 8 column groups: a lane holds the rows rg + 4i, the key columns cg + 8j of S and the head_dim columns
 * 4cg + 32c + {0..3} of O. Lane bits are dealt so that neighbours at distance 1 share K and V addresses and neighbours
 * at distance 2 share Q and P addresses; rows are padded by 16 bytes: 16-byte loads then meet no bank conflict.
 *
 * No phases are counted: groups meet at __syncthreads alone, the warps of a group at a named barrier of their own that
 * all of them wait at, before a buffer is read and before it is written again. */
#pragma once

#include "common/chaos.cuh"
#include "common/convert.cuh" // to_float, from_float
#include "common/mask.cuh"    // tile_keys, key_band
#include "common/params.cuh"  // AttentionParams
#include "common/rows.cuh"    // Chunk, store_chunk, row_of, bias_row, mask_row, store_lse
#include "common/score.cuh"   // bounded, finite_score
#include "common/softmax.cuh" // NaturalRowState, finish_row
#include "simt/loader.cuh"    // Loader, NextBlock

namespace fa::simt {

__device__ __forceinline__ float4 load4(const float *p) { return *reinterpret_cast<const float4 *>(p); }

/* The keys that a query sees in general_scores(): a band, or a value from the caller. */
__device__ __forceinline__ KeyBand sight_of(const AttentionParams &p, int64_t row0, int64_t key0) {
    return key_band(p, row0, key0);
}
template <class Sight>
__device__ __forceinline__ const Sight &sight_of(const AttentionParams &, int64_t, int64_t, const Sight &sight) {
    return sight;
}

/* Softcap, bias and mask for the rows [0, kRows) of one warp's scores in shared memory: products in, scores out (not in
 * base 2, whose logarithm of e would be one more rounding). Lanes lie along the keys, so that bias and mask are read in
 * order, four rows at a time, so that reads overlap. `sight`: none in a dense call; else an object that says of every
 * row what it sees, and what ALiBi takes from a bias; then comes back the largest scaled product that some row sees,
 * where it `wants_logit`. */
template <typename T, int kRows, int kKeys, int kStride, class... Sight>
__device__ __noinline__ auto general_scores(const AttentionParams &p, const Options &o, float *scores, int64_t batch,
                                            int64_t head, int64_t row0, int64_t key0, const Sight &...sight) {
    constexpr int kBatch = 4, kColumns = (kKeys + kWarp - 1) / kWarp;
    static_assert(kRows % kBatch == 0);
    const int lane = threadIdx.x % kWarp;
    constexpr bool kDense = sizeof...(Sight) == 0;
    const auto &band = sight_of(p, row0, key0, sight...);
    const float scale = o.scale, cap = o.softcap;
    const int rows = kDense && p.seq_q - row0 < kRows ? static_cast<int>(p.seq_q - row0) : kRows;
    [[maybe_unused]] float logit = -INFINITY;

#pragma unroll 1
    for (int r = 0; r < rows; r += kBatch) {
        bool seen[kBatch][kColumns];
        float add[kBatch][kColumns];
        const auto each = [&](auto &&body) {
#pragma unroll
            for (int i = 0; i < kBatch; ++i)
#pragma unroll
                for (int j = 0; j < kColumns; ++j) body(seen[i][j], add[i][j], r + i, lane + kWarp * j);
        };
        each([&](bool &sees, float &sum, int row, int column) {
            sees = row < rows && column < kKeys && band.sees(row, column);
            sum = 0.0f;
        });
        if (p.bias.data) {
            const int64_t first = bias_row(p, batch, head, row0) + key0 * p.bias.stride[3];
            const auto add_bias = [&](const auto *bias) {
                each([&](bool sees, float &sum, int row, int column) {
                    if (sees) sum = to_float(bias[first + row * p.bias.stride[2] + column * p.bias.stride[3]]);
                });
            };
            if (p.bias_dtype == FA_F32)
                add_bias(static_cast<const float *>(p.bias.data));
            else
                add_bias(static_cast<const T *>(p.bias.data));
        }
        if (p.mask.data) {
            const uint8_t *mask = mask_row(p, batch, head, row0) + key0 * p.mask.stride[3];
            each([&](bool &sees, float &, int row, int column) {
                if (sees) sees = mask[row * p.mask.stride[2] + column * p.mask.stride[3]] != 0;
            });
        }
        each([&](bool sees, float sum, int row, int column) {
            if (column >= kKeys) return;
            float &score = scores[row * kStride + column];
            if (!sees || sum == -INFINITY) {
                score = -INFINITY;
                return;
            }
            if constexpr (!kDense) {
                if (band.wants_logit) logit = fmaxf(logit, __fmul_rn(score, scale));
                sum = band.with_slope(sum, row, column);
            }
            sum = bounded(sum);
            score =
                cap > 0 ? fmaf(cap, tanhf(score * o.score.scale_cap), sum) : __fadd_rn(__fmul_rn(score, scale), sum);
            if (sum < INFINITY) score = finite_score(score);
        });
    }
    if constexpr (!kDense) return logit;
}

/* One lane's part of a tile: row states and output in registers, and the steps that a block of keys goes through. */
template <typename T, Tile t> struct LaneTile {
    static constexpr int kLaneRows = t.lane_rows(), kLaneKeys = t.lane_keys(), kLaneQuads = t.lane_quads();
    static constexpr int kStride = t.row_floats(), kScoreStride = t.score_floats();
    static constexpr int kWarpRows = t.block_m / t.group_warps();

    float *q, *k, *v, *scores, *partial; // shared memory
    int group, warp_row, row, column;    // row = warp_row + rg, column = cg
    NaturalRowState state[kLaneRows];    // `sum` is this lane's part of the row's
    float out[kLaneRows][kLaneQuads][4];

    __device__ __forceinline__ explicit LaneTile(float *smem) {
        const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
        group = t.groups == 1 ? 0 : warp / t.group_warps();
        warp_row = warp % t.group_warps() * kWarpRows;
        row = warp_row + ((lane & 1) | (lane >> 4 << 1));
        column = lane >> 1 & 7;
        q = smem;                                               // block_m x kStride
        k = smem + t.query_floats() + group * t.group_floats(); // block_n x kStride
        v = t.separate() ? k + t.key_floats() : k;              // block_n x kStride
        scores = v + t.key_floats();                            // block_m x kScoreStride
        partial = scores + t.block_m * kScoreStride;            // block_m x 8, for kReduceShared
    }

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < kLaneRows; ++i) {
            state[i] = NaturalRowState();
#pragma unroll
            for (int c = 0; c < kLaneQuads; ++c)
#pragma unroll
                for (int e = 0; e < 4; ++e) out[i][c][e] = 0.0f;
        }
    }

    /* Barrier among the warps of a group. */
    __device__ __forceinline__ void sync_group() const {
        if constexpr (t.groups == 1)
            __syncthreads();
        else if constexpr (t.group_warps() == 1)
            __syncwarp();
        else {
            FA_CHAOS_POINT(__LINE__);
            asm volatile("bar.sync %0, %1;" ::"r"(1 + group), "n"(t.group_threads()) : "memory");
        }
    }

    /* s = Q K^T. Float32 sums eight products at a time, in the order of the plain formula
     * (fa_ext/reference/__init__.py): with one chain over head_dim, scores in the hundreds come out two to three times
     * as far off, which float32 alone is precise enough to show. It then takes half of the rows at a time, since
     * registers hold no more; 6% slower with 8 rows a lane at head_dim 64, no slower elsewhere. */
    __device__ __forceinline__ void multiply_keys(float (&s)[kLaneRows][kLaneKeys], int head_dim) const {
        constexpr int kQuads = sizeof(T) == 4 ? 2 : 1,
                      kRows = kQuads > 1 && kLaneRows > 4 && kLaneRows % 2 == 0 ? kLaneRows / 2 : kLaneRows;
#pragma unroll
        for (int i = 0; i < kLaneRows; ++i)
#pragma unroll
            for (int j = 0; j < kLaneKeys; ++j) s[i][j] = 0.0f;
#pragma unroll 1
        for (int d = 0; d < head_dim; d += 4 * kQuads) {
#pragma unroll
            for (int first = 0; first < kLaneRows; first += kRows) {
                float4 a[kRows][kQuads];
#pragma unroll
                for (int i = 0; i < kRows; ++i)
#pragma unroll
                    for (int n = 0; n < kQuads; ++n)
                        a[i][n] = load4(q + (row + kRowGroups * (first + i)) * kStride + d + 4 * n);
#pragma unroll
                for (int j = 0; j < kLaneKeys; ++j) {
                    float4 b[kQuads];
#pragma unroll
                    for (int n = 0; n < kQuads; ++n)
                        b[n] = load4(k + (column + kColumnGroups * j) * kStride + d + 4 * n);
#pragma unroll
                    for (int i = 0; i < kRows; ++i) {
                        float &total = s[first + i][j], sum = kQuads == 1 ? total : 0.0f;
#pragma unroll
                        for (int n = 0; n < kQuads; ++n) {
                            sum = fmaf(a[i][n].x, b[n].x, sum);
                            sum = fmaf(a[i][n].y, b[n].y, sum);
                            sum = fmaf(a[i][n].z, b[n].z, sum);
                            sum = fmaf(a[i][n].w, b[n].w, sum);
                        }
                        total = kQuads == 1 ? sum : total + sum;
                    }
                }
            }
        }
    }

    /* Products to scores by way of shared memory, where softcap, bias or mask take part. */
    __device__ __forceinline__ void score_general(float (&s)[kLaneRows][kLaneKeys], const AttentionParams &p,
                                                  const Options &o, int64_t batch, int64_t head, int64_t row0,
                                                  int64_t key0) const {
        put(s);
        __syncwarp();
        general_scores<T, kWarpRows, t.block_n, kScoreStride>(p, o, scores + warp_row * kScoreStride, batch, head,
                                                              row0 + warp_row, key0);
        __syncwarp();
        get(s);
    }

    /* Scores to shared memory and back. */
    __device__ __forceinline__ void put(const float (&s)[kLaneRows][kLaneKeys]) const {
#pragma unroll
        for (int i = 0; i < kLaneRows; ++i)
#pragma unroll
            for (int j = 0; j < kLaneKeys; ++j) score_at(i, j) = s[i][j];
    }
    __device__ __forceinline__ void get(float (&s)[kLaneRows][kLaneKeys]) const {
#pragma unroll
        for (int i = 0; i < kLaneRows; ++i)
#pragma unroll
            for (int j = 0; j < kLaneKeys; ++j) s[i][j] = score_at(i, j);
    }

    /* Products times the scale, rounded as the plain formula rounds them: an unrounded score is closer to the truth,
     * but not to plain, whose own rounding may bring it closer by luck; 5 of 6,000 problems of large scores then leave
     * the bound that plain's error makes. */
    __device__ __forceinline__ static void scale_products(float (&s)[kLaneRows][kLaneKeys], float scale) {
#pragma unroll
        for (int i = 0; i < kLaneRows; ++i)
#pragma unroll
            for (int j = 0; j < kLaneKeys; ++j) s[i][j] = __fmul_rn(s[i][j], scale);
        if (fabsf(scale) <= 1.0f) return;
#pragma unroll
        for (int i = 0; i < kLaneRows; ++i)
#pragma unroll
            for (int j = 0; j < kLaneKeys; ++j) s[i][j] = finite_score(s[i][j]);
    }

    /* Without softcap, bias and mask: -inf for keys that a row does not see. The band counts rows from this lane's
     * first. */
    template <class Band>
    __device__ __forceinline__ void exclude(float (&s)[kLaneRows][kLaneKeys], const Band &band) const {
#pragma unroll
        for (int i = 0; i < kLaneRows; ++i)
#pragma unroll
            for (int j = 0; j < kLaneKeys; ++j)
                if (!band.sees(kRowGroups * i, column + kColumnGroups * j)) s[i][j] = -INFINITY;
    }

    /* Takes scores into the row states, leaves the weights P in shared memory, rescales the output. */
    __device__ __forceinline__ void absorb(const float (&s)[kLaneRows][kLaneKeys]) {
        float maximum[kLaneRows];
#pragma unroll
        for (int i = 0; i < kLaneRows; ++i) {
            maximum[i] = s[i][0];
#pragma unroll
            for (int j = 1; j < kLaneKeys; ++j) maximum[i] = fmaxf(maximum[i], s[i][j]);
        }
        row_maximum(maximum);
#pragma unroll
        for (int i = 0; i < kLaneRows; ++i) {
            const float factor = state[i].raise(maximum[i]);
#pragma unroll
            for (int j = 0; j < kLaneKeys; ++j) {
                const float weight = state[i].weight(s[i][j]);
                state[i].sum += weight;
                score_at(i, j) = weight;
            }
#pragma unroll
            for (int c = 0; c < kLaneQuads; ++c)
#pragma unroll
                for (int e = 0; e < 4; ++e) out[i][c][e] *= factor;
        }
    }

    /* out += P V */
    __device__ __forceinline__ void multiply_values() {
#pragma unroll 1
        for (int n = 0; n < t.block_n; n += 4) {
            float weight[kLaneRows][4];
#pragma unroll
            for (int i = 0; i < kLaneRows; ++i)
                *reinterpret_cast<float4 *>(weight[i]) = load4(scores + (row + kRowGroups * i) * kScoreStride + n);
#pragma unroll
            for (int m = 0; m < 4; ++m)
#pragma unroll
                for (int c = 0; c < kLaneQuads; ++c) {
                    const float4 b = load4(v + (n + m) * kStride + 4 * column + 32 * c);
#pragma unroll
                    for (int i = 0; i < kLaneRows; ++i) {
                        out[i][c][0] = fmaf(weight[i][m], b.x, out[i][c][0]);
                        out[i][c][1] = fmaf(weight[i][m], b.y, out[i][c][1]);
                        out[i][c][2] = fmaf(weight[i][m], b.z, out[i][c][2]);
                        out[i][c][3] = fmaf(weight[i][m], b.w, out[i][c][3]);
                    }
                }
        }
    }

    /* Adds what the other groups have to the first, in the order of the groups. Lanes meet their own kind alone: the
     * layout in shared memory, which is all free by now, is by lane. */
    __device__ __forceinline__ void merge_groups(float *smem) {
        constexpr int kLanes = t.group_threads(), kQuads = kLaneRows * kLaneQuads,
                      kItems = kQuads + (kLaneRows + 1) / 2;
        static_assert(kItems * 4 * kLanes * (t.groups - 1) <= t.smem_bytes() / sizeof(float));
        const int lane = threadIdx.x % kLanes;
        float4 *quads = reinterpret_cast<float4 *>(smem) + lane;
        __syncthreads();
        if (group > 0) {
            float4 *mine = quads + (group - 1) * kItems * kLanes;
#pragma unroll
            for (int i = 0; i < kLaneRows; ++i)
#pragma unroll
                for (int c = 0; c < kLaneQuads; ++c)
                    mine[(i * kLaneQuads + c) * kLanes] =
                        make_float4(out[i][c][0], out[i][c][1], out[i][c][2], out[i][c][3]);
#pragma unroll
            for (int i = 0; i < kLaneRows; i += 2) {
                const NaturalRowState &a = state[i], &b = state[i + 1 < kLaneRows ? i + 1 : i];
                mine[(kQuads + i / 2) * kLanes] = make_float4(a.maximum, a.sum, b.maximum, b.sum);
            }
        }
        __syncthreads();
        if (group == 0) {
#pragma unroll 1
            for (int g = 0; g < t.groups - 1; ++g) {
                const float4 *theirs = quads + g * kItems * kLanes;
#pragma unroll
                for (int i = 0; i < kLaneRows; ++i) {
                    const float4 pair = theirs[(kQuads + i / 2) * kLanes];
                    const float maximum = i % 2 ? pair.z : pair.x, sum = i % 2 ? pair.w : pair.y;
                    const float factor = state[i].raise(maximum), other = state[i].weight(maximum);
                    state[i].sum = fmaf(sum, other, state[i].sum);
#pragma unroll
                    for (int c = 0; c < kLaneQuads; ++c) {
                        const float4 b = theirs[(i * kLaneQuads + c) * kLanes];
                        out[i][c][0] = fmaf(b.x, other, out[i][c][0] * factor);
                        out[i][c][1] = fmaf(b.y, other, out[i][c][1] * factor);
                        out[i][c][2] = fmaf(b.z, other, out[i][c][2] * factor);
                        out[i][c][3] = fmaf(b.w, other, out[i][c][3] * factor);
                    }
                }
            }
        }
        __syncthreads();
    }

    /* Normalises and writes the rows and their LSE. */
    __device__ __forceinline__ void finish(const AttentionParams &p, const Options &o, int64_t batch, int64_t head,
                                           int64_t row0) {
#pragma unroll
        for (int i = 0; i < kLaneRows; ++i) {
#pragma unroll
            for (int offset = 2; offset <= 8; offset *= 2) state[i].sum += __shfl_xor_sync(~0u, state[i].sum, offset);
            const int64_t n = row0 + row + kRowGroups * i;
            if (n >= p.seq_q) continue;
            const RowResult result = finish_row(p, head, state[i]);
            T *target = row_of<T>(p.out, batch, head, n);
#pragma unroll
            for (int c = 0; c < kLaneQuads; ++c) {
                Chunk<T, 4> chunk;
#pragma unroll
                for (int e = 0; e < 4; ++e) chunk.element[e] = from_float<T>(out[i][c][e] * result.factor);
                store_chunk(target, p.out.stride[3], 4 * column + 32 * c, p.head_dim_v, o.out_chunks, chunk);
            }
            if (column == 0) store_lse(p, batch, head, n, result.lse);
        }
    }

  private:
    __device__ __forceinline__ float &score_at(int i, int j) const {
        return scores[(row + kRowGroups * i) * kScoreStride + column + kColumnGroups * j];
    }

    /* Maximum over the 8 lanes of each row, in all of them. */
    __device__ __forceinline__ void row_maximum(float (&maximum)[kLaneRows]) const {
        if constexpr (t.reduce == kReduceShared) {
#pragma unroll
            for (int i = 0; i < kLaneRows; ++i) partial[(row + kRowGroups * i) * kColumnGroups + column] = maximum[i];
            __syncwarp();
#pragma unroll
            for (int i = 0; i < kLaneRows; ++i) {
                const float *of_row = partial + (row + kRowGroups * i) * kColumnGroups;
                const float4 a = load4(of_row), b = load4(of_row + 4);
                maximum[i] = fmaxf(fmaxf(fmaxf(a.x, a.y), fmaxf(a.z, a.w)), fmaxf(fmaxf(b.x, b.y), fmaxf(b.z, b.w)));
            }
        } else {
#pragma unroll
            for (int i = 0; i < kLaneRows; ++i)
#pragma unroll
                for (int offset = 2; offset <= 8; offset *= 2)
                    maximum[i] = fmaxf(maximum[i], __shfl_xor_sync(~0u, maximum[i], offset));
        }
    }
};

/* C::tile is the tile: nvcc takes no class values as arguments of a __global__ template. */
template <typename T, class C>
__global__ void __launch_bounds__(C::tile.threads(), C::tile.blocks)
    simt_kernel(const __grid_constant__ AttentionParams p, const __grid_constant__ Options o) {
    FA_CHAOS_BEGIN();
    constexpr Tile t = C::tile;
    using KeyLoader = Loader<T, t, t.block_n, t.group_threads()>;
    extern __shared__ float4 shared[];
    float *smem = reinterpret_cast<float *>(shared);
    LaneTile<T, t> lane(smem);

    for (int64_t tile = blockIdx.x; tile < o.tiles; tile += gridDim.x) {
        const int64_t heads = p.batch * p.heads;
        const int64_t tile_m = o.longest_first ? o.tiles_m - 1 - tile / heads : tile % o.tiles_m;
        const int64_t n = o.longest_first ? tile % heads : tile / o.tiles_m, head = n % p.heads, batch = n / p.heads;
        const int64_t head_kv = head / (p.heads / p.heads_kv), row0 = tile_m * t.block_m;
        const int64_t row_end = row0 + t.block_m < p.seq_q ? row0 + t.block_m : p.seq_q;
        const KeyRange keys = tile_keys(p, row0, row_end), common = tile_common_keys(p, row0, row_end);

        const KeyLoader k_loader(p.k, batch, head_kv, p.head_dim, o.k_chunks);
        const KeyLoader v_loader(p.v, batch, head_kv, p.head_dim_v, o.v_chunks);
        NextBlock<t, KeyLoader> next;
        int64_t key0 = keys.begin + lane.group * t.block_n;

        lane.clear();
        if (!keys.empty()) {
            using QueryLoader = Loader<T, t, t.block_m, t.threads()>;
            QueryLoader(p.q, batch, head, p.head_dim, o.q_chunks).copy(lane.q, row0, row_end);
            if constexpr (t.groups > 1) __syncthreads();
        }
        next.fetch(k_loader, key0, keys.end);

        for (; key0 < keys.end; key0 += t.groups * t.block_n) {
            next.store(k_loader, lane.k, key0, keys.end);
            lane.sync_group(); // Q and K are there; every warp is done with a V apart

            float s[lane.kLaneRows][lane.kLaneKeys];
            lane.multiply_keys(s, p.head_dim);
            next.fetch(v_loader, key0, keys.end);
            if (o.general) {
                lane.score_general(s, p, o, batch, head, row0, key0);
            } else {
                lane.scale_products(s, o.scale);
                if (key0 < common.begin || key0 + t.block_n > common.end)
                    lane.exclude(s, key_band(p, row0 + lane.row, key0));
            }
            lane.absorb(s);

            if constexpr (!t.separate()) lane.sync_group(); // every warp is done with K
            next.store(v_loader, lane.v, key0, keys.end);
            lane.sync_group(); // V and P are there; every warp is done with a K apart
            next.fetch(k_loader, key0 + t.groups * t.block_n, keys.end);
            lane.multiply_values();
            if constexpr (!t.separate()) lane.sync_group(); // every warp is done with V
        }

        if constexpr (t.groups > 1) {
            if constexpr (t.separate()) lane.sync_group(); // every warp is done with V, as above; racecheck asks for it
            lane.merge_groups(smem);
        }
        if (lane.group == 0) lane.finish(p, o, batch, head, row0);
    }
}

} // namespace fa::simt
