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
#ifndef FA_SIMT_KERNEL_CUH
#define FA_SIMT_KERNEL_CUH

#include "common/chaos.cuh"
#include "common/convert.cuh" // to_float, from_float
#include "common/mask.cuh"    // tile_keys, key_band
#include "common/rows.cuh"    // Chunk, store_chunk, row_of, bias_row, mask_row
#include "common/score.cuh"   // kLog2E
#include "common/softmax.cuh" // RowState, finish_row, scaled_down
#include "simt/loader.cuh"    // Loader, NextBlock

namespace simt {

__device__ __forceinline__ float4 load4(const float *p) { return *reinterpret_cast<const float4 *>(p); }

/* What sees which keys in general_scores(): a band, or what the caller gives. */
__device__ __forceinline__ fa::KeyBand sight_of(const fa_forward &p, int64_t row0, int64_t key0) {
    return fa::key_band(p, row0, key0);
}
template <class Sight>
__device__ __forceinline__ const Sight &sight_of(const fa_forward &, int64_t, int64_t, const Sight &sight) {
    return sight;
}

/* Softcap, bias and mask for the rows [0, ROWS) of one warp's scores in shared memory: products in, scores out (not in
 * base 2, whose logarithm of e would be one more rounding). Lanes lie along the keys, so that bias and mask are read in
 * order, four rows at a time, so that reads overlap. `sight`: none in a dense call; else an object that says of every
 * row what it sees, and what ALiBi takes from a bias. */
template <typename T, int ROWS, int KEYS, int STRIDE, class... Sight>
__device__ __noinline__ void general_scores(const fa_forward &p, const Options &o, float *scores, int64_t batch,
                                            int64_t head, int64_t row0, int64_t key0, const Sight &...sight) {
    constexpr int BATCH = 4, COLUMNS = (KEYS + WARP - 1) / WARP;
    static_assert(ROWS % BATCH == 0);
    const int lane = threadIdx.x % WARP;
    constexpr bool DENSE = sizeof...(Sight) == 0;
    const auto &band = sight_of(p, row0, key0, sight...);
    const float scale = static_cast<float>(p.scale), cap = static_cast<float>(p.softcap);
    const int rows = DENSE && p.seq_q - row0 < ROWS ? static_cast<int>(p.seq_q - row0) : ROWS;

#pragma unroll 1
    for (int r = 0; r < rows; r += BATCH) {
        bool seen[BATCH][COLUMNS];
        float add[BATCH][COLUMNS];
        const auto each = [&](auto &&body) {
#pragma unroll
            for (int i = 0; i < BATCH; ++i)
#pragma unroll
                for (int j = 0; j < COLUMNS; ++j) body(seen[i][j], add[i][j], r + i, lane + WARP * j);
        };
        each([&](bool &sees, float &sum, int row, int column) {
            sees = row < rows && column < KEYS && band.sees(row, column);
            sum = 0.0f;
        });
        if (p.bias.data) {
            const int64_t first = fa::bias_row(p, batch, head, row0) + key0 * p.bias.stride[3];
            const auto add_bias = [&](const auto *bias) {
                each([&](bool sees, float &sum, int row, int column) {
                    if (sees) sum = fa::to_float(bias[first + row * p.bias.stride[2] + column * p.bias.stride[3]]);
                });
            };
            if (p.bias_dtype == FA_F32)
                add_bias(static_cast<const float *>(p.bias.data));
            else
                add_bias(static_cast<const T *>(p.bias.data));
        }
        if (p.mask.data) {
            const uint8_t *mask = fa::mask_row(p, batch, head, row0) + key0 * p.mask.stride[3];
            each([&](bool &sees, float &, int row, int column) {
                if (sees) sees = mask[row * p.mask.stride[2] + column * p.mask.stride[3]] != 0;
            });
        }
        each([&](bool sees, float sum, int row, int column) {
            if (column >= KEYS) return;
            float &score = scores[row * STRIDE + column];
            if (!sees || sum == -INFINITY) {
                score = -INFINITY;
                return;
            }
            if constexpr (!DENSE) sum = band.with_slope(sum, row, column);
            asm("max.NaN.f32 %0, %0, %1;" : "+f"(sum) : "f"(-FA_LIMIT)); // larger ones saturate by themselves
            score =
                cap > 0 ? fmaf(cap, tanhf(score * o.score.scale_cap), sum) : __fadd_rn(__fmul_rn(score, scale), sum);
        });
    }
}

/* One lane's part of a tile: row states and output in registers, and the steps that a block of keys goes through. */
template <typename T, Tile t> struct LaneTile {
    static constexpr int TM = t.lane_rows(), TN = t.lane_keys(), TD = t.lane_quads();
    static constexpr int STRIDE = t.row_floats(), P_STRIDE = t.score_floats();
    static constexpr int WARP_ROWS = t.block_m / t.group_warps();

    float *q, *k, *v, *scores, *partial; // shared memory
    int group, warp_row, row, column;    // row = warp_row + rg, column = cg
    fa::RowState state[TM];              // `sum` is this lane's part of the row's
    float out[TM][TD][4];

    __device__ __forceinline__ explicit LaneTile(float *smem) {
        const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
        group = t.groups == 1 ? 0 : warp / t.group_warps();
        warp_row = warp % t.group_warps() * WARP_ROWS;
        row = warp_row + ((lane & 1) | (lane >> 4 << 1));
        column = lane >> 1 & 7;
        q = smem;                                               // block_m x STRIDE
        k = smem + t.query_floats() + group * t.group_floats(); // block_n x STRIDE
        v = t.separate() ? k + t.key_floats() : k;              // block_n x STRIDE
        scores = v + t.key_floats();                            // block_m x P_STRIDE
        partial = scores + t.block_m * P_STRIDE;                // block_m x 8, for REDUCE_SHARED
    }

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < TM; ++i) {
            state[i] = fa::RowState();
#pragma unroll
            for (int c = 0; c < TD; ++c)
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
    __device__ __forceinline__ void multiply_keys(float (&s)[TM][TN], int head_dim) const {
        constexpr int QUADS = sizeof(T) == 4 ? 2 : 1, ROWS = QUADS > 1 && TM > 4 && TM % 2 == 0 ? TM / 2 : TM;
#pragma unroll
        for (int i = 0; i < TM; ++i)
#pragma unroll
            for (int j = 0; j < TN; ++j) s[i][j] = 0.0f;
#pragma unroll 1
        for (int d = 0; d < head_dim; d += 4 * QUADS) {
#pragma unroll
            for (int first = 0; first < TM; first += ROWS) {
                float4 a[ROWS][QUADS];
#pragma unroll
                for (int i = 0; i < ROWS; ++i)
#pragma unroll
                    for (int n = 0; n < QUADS; ++n)
                        a[i][n] = load4(q + (row + ROW_GROUPS * (first + i)) * STRIDE + d + 4 * n);
#pragma unroll
                for (int j = 0; j < TN; ++j) {
                    float4 b[QUADS];
#pragma unroll
                    for (int n = 0; n < QUADS; ++n) b[n] = load4(k + (column + COLUMN_GROUPS * j) * STRIDE + d + 4 * n);
#pragma unroll
                    for (int i = 0; i < ROWS; ++i) {
                        float &total = s[first + i][j], sum = QUADS == 1 ? total : 0.0f;
#pragma unroll
                        for (int n = 0; n < QUADS; ++n) {
                            sum = fmaf(a[i][n].x, b[n].x, sum);
                            sum = fmaf(a[i][n].y, b[n].y, sum);
                            sum = fmaf(a[i][n].z, b[n].z, sum);
                            sum = fmaf(a[i][n].w, b[n].w, sum);
                        }
                        total = QUADS == 1 ? sum : total + sum;
                    }
                }
            }
        }
    }

    /* Products to scores by way of shared memory, where softcap, bias or mask take part. */
    __device__ __forceinline__ void score_general(float (&s)[TM][TN], const fa_forward &p, const Options &o,
                                                  int64_t batch, int64_t head, int64_t row0, int64_t key0) const {
        put(s);
        __syncwarp();
        general_scores<T, WARP_ROWS, t.block_n, P_STRIDE>(p, o, scores + warp_row * P_STRIDE, batch, head,
                                                          row0 + warp_row, key0);
        __syncwarp();
        get(s);
    }

    /* Scores to shared memory and back. */
    __device__ __forceinline__ void put(const float (&s)[TM][TN]) const {
#pragma unroll
        for (int i = 0; i < TM; ++i)
#pragma unroll
            for (int j = 0; j < TN; ++j) score_at(i, j) = s[i][j];
    }
    __device__ __forceinline__ void get(float (&s)[TM][TN]) const {
#pragma unroll
        for (int i = 0; i < TM; ++i)
#pragma unroll
            for (int j = 0; j < TN; ++j) s[i][j] = score_at(i, j);
    }

    /* Products times the scale, rounded as the plain formula rounds them: an unrounded score is closer to the truth,
     * but not to plain, whose own rounding may bring it closer by luck; 5 of 6,000 problems of large scores then leave
     * the bound that plain's error makes. */
    __device__ __forceinline__ static void scale_products(float (&s)[TM][TN], float scale) {
#pragma unroll
        for (int i = 0; i < TM; ++i)
#pragma unroll
            for (int j = 0; j < TN; ++j) s[i][j] = __fmul_rn(s[i][j], scale);
    }

    /* Without softcap, bias and mask: what belongs to keys that a row does not see becomes `excluded`. The band counts
     * rows from this lane's first. */
    template <class Band>
    __device__ __forceinline__ void exclude(float (&s)[TM][TN], const Band &band, float excluded) const {
#pragma unroll
        for (int i = 0; i < TM; ++i)
#pragma unroll
            for (int j = 0; j < TN; ++j)
                if (!band.sees(ROW_GROUPS * i, column + COLUMN_GROUPS * j)) s[i][j] = excluded;
    }

    /* Takes the base-2 scores `scale` s into the row states, leaves the weights P in shared memory, rescales the
     * output. The product with the scale is not rounded before the maximum is subtracted. GENERAL: it may be as large
     * as bias makes it. */
    template <bool GENERAL> __device__ __forceinline__ void absorb(const float (&s)[TM][TN], float scale) {
        const auto scaled = [&](float x) { return GENERAL ? fa::scaled_down(x, scale) : x * scale; };
        float maximum[TM];
#pragma unroll
        for (int i = 0; i < TM; ++i) {
            maximum[i] = scaled(s[i][0]);
#pragma unroll
            for (int j = 1; j < TN; ++j) maximum[i] = fmaxf(maximum[i], scaled(s[i][j]));
        }
        row_maximum(maximum);
#pragma unroll
        for (int i = 0; i < TM; ++i) {
            const float factor = state[i].raise(maximum[i]);
#pragma unroll
            for (int j = 0; j < TN; ++j) {
                const float weight =
                    GENERAL ? state[i].bounded_weight(s[i][j], scale) : state[i].weight(s[i][j], scale);
                state[i].sum += weight;
                score_at(i, j) = weight;
            }
#pragma unroll
            for (int c = 0; c < TD; ++c)
#pragma unroll
                for (int e = 0; e < 4; ++e) out[i][c][e] *= factor;
        }
    }

    /* out += P V */
    __device__ __forceinline__ void multiply_values() {
#pragma unroll 1
        for (int n = 0; n < t.block_n; n += 4) {
            float weight[TM][4];
#pragma unroll
            for (int i = 0; i < TM; ++i)
                *reinterpret_cast<float4 *>(weight[i]) = load4(scores + (row + ROW_GROUPS * i) * P_STRIDE + n);
#pragma unroll
            for (int m = 0; m < 4; ++m)
#pragma unroll
                for (int c = 0; c < TD; ++c) {
                    const float4 b = load4(v + (n + m) * STRIDE + 4 * column + 32 * c);
#pragma unroll
                    for (int i = 0; i < TM; ++i) {
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
        constexpr int LANES = t.group_threads(), QUADS = TM * TD, ITEMS = QUADS + (TM + 1) / 2;
        static_assert(ITEMS * 4 * LANES * (t.groups - 1) <= t.smem_bytes() / sizeof(float));
        const int lane = threadIdx.x % LANES;
        float4 *quads = reinterpret_cast<float4 *>(smem) + lane;
        __syncthreads();
        if (group > 0) {
            float4 *mine = quads + (group - 1) * ITEMS * LANES;
#pragma unroll
            for (int i = 0; i < TM; ++i)
#pragma unroll
                for (int c = 0; c < TD; ++c)
                    mine[(i * TD + c) * LANES] = make_float4(out[i][c][0], out[i][c][1], out[i][c][2], out[i][c][3]);
#pragma unroll
            for (int i = 0; i < TM; i += 2) {
                const fa::RowState &a = state[i], &b = state[i + 1 < TM ? i + 1 : i];
                mine[(QUADS + i / 2) * LANES] = make_float4(a.maximum, a.sum, b.maximum, b.sum);
            }
        }
        __syncthreads();
        if (group == 0) {
#pragma unroll 1
            for (int g = 0; g < t.groups - 1; ++g) {
                const float4 *theirs = quads + g * ITEMS * LANES;
#pragma unroll
                for (int i = 0; i < TM; ++i) {
                    const float4 pair = theirs[(QUADS + i / 2) * LANES];
                    const float maximum = i % 2 ? pair.z : pair.x, sum = i % 2 ? pair.w : pair.y;
                    const float factor = state[i].raise(maximum), other = state[i].weight(maximum);
                    state[i].sum = fmaf(sum, other, state[i].sum);
#pragma unroll
                    for (int c = 0; c < TD; ++c) {
                        const float4 b = theirs[(i * TD + c) * LANES];
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
    __device__ __forceinline__ void finish(const fa_forward &p, const Options &o, int64_t batch, int64_t head,
                                           int64_t row0) {
#pragma unroll
        for (int i = 0; i < TM; ++i) {
#pragma unroll
            for (int offset = 2; offset <= 8; offset *= 2) state[i].sum += __shfl_xor_sync(~0u, state[i].sum, offset);
            const int64_t n = row0 + row + ROW_GROUPS * i;
            if (n >= p.seq_q) continue;
            const fa::RowResult result = fa::finish_row(p, head, state[i]);
            T *target = fa::row_of<T>(p.out, batch, head, n);
#pragma unroll
            for (int c = 0; c < TD; ++c) {
                fa::Chunk<T, 4> chunk;
#pragma unroll
                for (int e = 0; e < 4; ++e) chunk.element[e] = fa::from_float<T>(out[i][c][e] * result.factor);
                fa::store_chunk(target, p.out.stride[3], 4 * column + 32 * c, p.head_dim_v, o.out_chunks, chunk);
            }
            if (p.lse && column == 0) static_cast<float *>(p.lse)[(batch * p.heads + head) * p.seq_q + n] = result.lse;
        }
    }

  private:
    __device__ __forceinline__ float &score_at(int i, int j) const {
        return scores[(row + ROW_GROUPS * i) * P_STRIDE + column + COLUMN_GROUPS * j];
    }

    /* Maximum over the 8 lanes of each row, in all of them. */
    __device__ __forceinline__ void row_maximum(float (&maximum)[TM]) const {
        if constexpr (t.reduce == REDUCE_SHARED) {
#pragma unroll
            for (int i = 0; i < TM; ++i) partial[(row + ROW_GROUPS * i) * COLUMN_GROUPS + column] = maximum[i];
            __syncwarp();
#pragma unroll
            for (int i = 0; i < TM; ++i) {
                const float *of_row = partial + (row + ROW_GROUPS * i) * COLUMN_GROUPS;
                const float4 a = load4(of_row), b = load4(of_row + 4);
                maximum[i] = fmaxf(fmaxf(fmaxf(a.x, a.y), fmaxf(a.z, a.w)), fmaxf(fmaxf(b.x, b.y), fmaxf(b.z, b.w)));
            }
        } else {
#pragma unroll
            for (int i = 0; i < TM; ++i)
#pragma unroll
                for (int offset = 2; offset <= 8; offset *= 2)
                    maximum[i] = fmaxf(maximum[i], __shfl_xor_sync(~0u, maximum[i], offset));
        }
    }
};

/* CONFIG::tile is the tile: nvcc takes no class values as arguments of a __global__ template. */
template <typename T, typename CONFIG>
__global__ void __launch_bounds__(CONFIG::tile.threads(), CONFIG::tile.blocks)
    simt_kernel(const __grid_constant__ fa_forward p, const __grid_constant__ Options o) {
    FA_CHAOS_BEGIN();
    constexpr Tile t = CONFIG::tile;
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
        const fa::KeyRange keys = fa::tile_keys(p, row0, row_end), common = fa::tile_common_keys(p, row0, row_end);

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

            float s[lane.TM][lane.TN];
            lane.multiply_keys(s, p.head_dim);
            next.fetch(v_loader, key0, keys.end);
            if (o.general) {
                lane.score_general(s, p, o, batch, head, row0, key0);
                lane.template absorb<true>(s, fa::kLog2E);
            } else {
                constexpr bool SCALED = sizeof(T) == 4;
                const float to_log2 = SCALED ? fa::kLog2E : o.score.scale_log2;
                if constexpr (SCALED) lane.scale_products(s, static_cast<float>(p.scale));
                if (key0 < common.begin || key0 + t.block_n > common.end)
                    lane.exclude(s, fa::key_band(p, row0 + lane.row, key0), to_log2 > 0 ? -INFINITY : INFINITY);
                lane.template absorb<false>(s, to_log2);
            }

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

} // namespace simt

#endif
