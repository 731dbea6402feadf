/* simt: tiled online softmax on the ordinary floating-point units; the row that takes every call on float types.
 *
 * A block of NUM_WARPS warps owns BLOCK_M query rows of one head and walks over the keys they see, BLOCK_N at a time.
 * Both products are register-blocked float32 matrix products from shared memory:
 *
 *     S = Q K^T (BLOCK_M x BLOCK_N) -> base-2 scores, softmax state in registers -> P to shared memory -> O += P V
 *
 * Each warp owns BLOCK_M / NUM_WARPS rows alone, so P and the row state never cross warps. Its lanes form a grid of
 * 4 row groups x 8 column groups: a lane holds the rows rg + 4i, the key columns cg + 8j of S and the head_dim columns
 * 4cg + 32c + {0..3} of O. Lane bits are dealt so that neighbours at distance 1 share K and V addresses and neighbours
 * at distance 2 share Q and P addresses; rows are padded by 16 bytes: 16-byte loads then meet no bank conflict.
 * Q, K and V lie in shared memory as float32, zero beyond head_dim and beyond the tile's keys.
 *
 * Whole dense surface: float16, bfloat16, float32; any strides (16-byte loads where they allow it, else element loads);
 * GQA, causal, window, softcap, bias, boolean mask, sinks, LSE; head_dim and head_dim_v 1..256 apart; zero keys.
 * Limits: no tensor cores, so at most the float32 rate; keys are not split over blocks, so that one query row against
 * many keys leaves most of the GPU idle.
 *
 * @instance f16 -DSIMT_TYPE=__half
 * @instance bf16 -DSIMT_TYPE=__nv_bfloat16
 * @instance f32 -DSIMT_TYPE=float
 *
 *     python -m bench measure --preset history --rows simt
 *     python fa_ext/_build.py simt -o variant.so -DHEAD_DIM=64 -DBLOCK_M=64 -DNUM_WARPS=2     (one tile alone)
 */
#include "convert.cuh" // Chunk, store_chunk, takes_chunks
#include "fa.h"        // fa_problem, fa_kernel
#include "launch.cuh"  // FA_CUDA_TRY
#include "mask.cuh"    // tile_keys, key_band
#include "score.cuh"   // ScoreParams
#include "softmax.cuh" // RowState, finish_row

/* ---- configuration ---- */

/* How K and V blocks are handed over. */
#define SYNC_SHARED    0 // K and V take turns in one buffer: least shared memory, four barriers a key block
#define SYNC_SEPARATE  1 // a buffer each: two barriers a key block
#define SYNC_PREFETCH  2 // as SEPARATE; the next block waits in registers while the present one is multiplied

/* How the 8 lanes that share a row find its maximum. */
#define REDUCE_SHUFFLE 0 // butterfly of warp shuffles
#define REDUCE_SHARED  1 // through shared memory

#ifndef REDUCE
#define REDUCE REDUCE_SHUFFLE
#endif
#ifndef VEC_WIDTH
#define VEC_WIDTH 0 // elements a global load; 0: 16 bytes
#endif

namespace simt {

struct Tile {
    int head_dim; // the largest head_dim and head_dim_v
    int block_m, block_n, warps, sync;

    constexpr int row_floats() const { return head_dim + 4; } // of Q, K and V in shared memory
    constexpr int score_floats() const { return block_n + 4; }
    constexpr int key_buffer() const { return block_n * row_floats(); }
    constexpr int reduce_floats() const { return REDUCE == REDUCE_SHARED ? block_m * 8 : 0; }
    constexpr size_t smem_bytes() const {
        return sizeof(float) * (block_m * row_floats() + (sync == SYNC_SHARED ? 1 : 2) * key_buffer() +
                                block_m * score_floats() + reduce_floats());
    }
};

/* For each head_dim the tile for many query rows first, then the one that fills the GPU with few. The last of each
 * head_dim fits the 99 KB a block that sm_86 and sm_89 have. Any of the macros BLOCK_M, BLOCK_N, NUM_WARPS and
 * SYNC_POLICY makes a build with one tile alone, for head_dim up to HEAD_DIM. */
#if defined(BLOCK_M) || defined(BLOCK_N) || defined(NUM_WARPS) || defined(SYNC_POLICY)
#ifndef HEAD_DIM
#define HEAD_DIM 64
#endif
#ifndef BLOCK_M
#define BLOCK_M 128
#endif
#ifndef BLOCK_N
#define BLOCK_N 64
#endif
#ifndef NUM_WARPS
#define NUM_WARPS 4
#endif
#ifndef SYNC_POLICY
#define SYNC_POLICY SYNC_SHARED
#endif
constexpr Tile TILES[] = {{HEAD_DIM, BLOCK_M, BLOCK_N, NUM_WARPS, SYNC_POLICY}};
#else
constexpr Tile TILES[] = {
    {64, 128, 64, 4, SYNC_SHARED}, {64, 32, 64, 4, SYNC_PREFETCH}, {128, 64, 32, 4, SYNC_SEPARATE},
    {128, 32, 32, 4, SYNC_SHARED}, {256, 64, 32, 4, SYNC_SHARED},  {256, 32, 32, 4, SYNC_SHARED},
};
#endif
constexpr int TILE_COUNT = sizeof(TILES) / sizeof(TILES[0]);

constexpr bool tiles_are_valid() {
    for (const Tile &t : TILES) {
        if (t.head_dim % 32 || t.head_dim > FA_MAX_HEAD_DIM || t.warps < 1 || t.warps > 32) return false;
        if (t.block_m % (4 * t.warps) || t.block_n % 8 || t.block_m < 1 || t.block_n < 1) return false;
        if (t.sync < SYNC_SHARED || t.sync > SYNC_PREFETCH || t.smem_bytes() > 227 * 1024) return false;
    }
    return true;
}
static_assert(tiles_are_valid(), "BLOCK_M is a multiple of 4 NUM_WARPS and BLOCK_N of 8, HEAD_DIM a multiple of 32 up "
                                 "to 256, SYNC_POLICY 0..2, and the tile fits 227 KB of shared memory");
static_assert(REDUCE == REDUCE_SHUFFLE || REDUCE == REDUCE_SHARED, "REDUCE is 0 (shuffle) or 1 (shared memory)");

/* What the host works out once a launch. */
struct Options {
    fa::ScoreParams score;
    int64_t tiles;                                 // of the whole launch
    int64_t tiles_m;                               // of one head
    bool longest_first;                            // later query rows see more keys: start with them
    bool general;                                  // softcap, bias or mask: scores pass through shared memory
    bool q_chunks, k_chunks, v_chunks, out_chunks; // vector loads and stores are possible
};

using Launcher = fa_code(int tile, const fa_problem &, const Options &, const fa_plan &, cudaStream_t, fa_status *);
Launcher launch_f16, launch_bf16, launch_f32;

} // namespace simt

#ifdef FA_INSTANCE

/* ---- device ---- */

namespace simt {

constexpr int WARP = 32, ROW_GROUPS = 4, COLUMN_GROUPS = 8;

/* threadIdx.x, in a way that keeps the compiler from holding the addresses made of it in registers over the key loop. */
__device__ __forceinline__ int thread_index() {
    int t = threadIdx.x;
    asm volatile("" : "+r"(t));
    return t;
}

/* ROWS rows of Q, K or V on their way from global to shared memory, dealt in chunks over the block's threads. Rows from
 * `end` on and elements from `length` on are zero in shared memory and not read. */
template <typename T, int ROWS, int DIM, int THREADS> struct Loader {
    static constexpr int WIDTH = VEC_WIDTH ? VEC_WIDTH : 16 / sizeof(T);
    static constexpr int CHUNKS = DIM / WIDTH, ITEMS = (ROWS * CHUNKS + THREADS - 1) / THREADS;
    static_assert(DIM % WIDTH == 0, "VEC_WIDTH divides the head_dim of the tile");

    const T *base; // row 0 of the head
    int64_t stride_row, stride_dim;
    int length;
    bool chunks; // whole chunks may be loaded

    __device__ Loader(const fa_operand &x, int64_t batch, int64_t head, int length, bool chunks)
        : base(fa::row_of<T>(x, batch, head, 0)), stride_row(x.stride[2]), stride_dim(x.stride[3]), length(length),
          chunks(chunks) {}

    /* Chunk `item` of this thread, of the block of rows that starts at `first`. */
    __device__ fa::Chunk<T, WIDTH> fetch(int item, int64_t first, int64_t end) const {
        const int n = thread_index() + item * THREADS, row = n / CHUNKS, dim = n % CHUNKS * WIDTH;
        if (row < ROWS && first + row < end && dim < length)
            return *reinterpret_cast<const fa::Chunk<T, WIDTH> *>(base + (first + row) * stride_row + dim);
        fa::Chunk<T, WIDTH> zero;
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) zero.element[i] = fa::from_float<T>(0.0f);
        return zero;
    }

    __device__ static void store(float *smem, int item, const fa::Chunk<T, WIDTH> &chunk) {
        const int n = thread_index() + item * THREADS, row = n / CHUNKS, dim = n % CHUNKS * WIDTH;
        if (item >= ITEMS || row >= ROWS) return;
        float *target = smem + row * (DIM + 4) + dim;
        if constexpr (WIDTH % 4 == 0) {
#pragma unroll
            for (int i = 0; i < WIDTH; i += 4)
                *reinterpret_cast<float4 *>(target + i) =
                    make_float4(fa::to_float(chunk.element[i]), fa::to_float(chunk.element[i + 1]),
                                fa::to_float(chunk.element[i + 2]), fa::to_float(chunk.element[i + 3]));
        } else {
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) target[i] = fa::to_float(chunk.element[i]);
        }
    }

    /* Global to shared memory. Rolled, BATCH chunks at a time: their loads overlap without holding many registers. */
    __device__ void copy(float *smem, int64_t first, int64_t end) const {
        if (!chunks) return copy_elements(smem, first, end);
        constexpr int BATCH = ITEMS < 4 ? ITEMS : 4;
#pragma unroll 1
        for (int item = 0; item < ITEMS; item += BATCH) {
            fa::Chunk<T, WIDTH> chunk[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; ++i) chunk[i] = fetch(item + i, first, end);
#pragma unroll
            for (int i = 0; i < BATCH; ++i) store(smem, item + i, chunk[i]);
        }
    }

    __device__ void copy_elements(float *smem, int64_t first, int64_t end) const {
#pragma unroll 4
        for (int n = thread_index(); n < ROWS * DIM; n += THREADS) {
            const int row = n / DIM, dim = n % DIM;
            const bool inside = first + row < end && dim < length;
            smem[row * (DIM + 4) + dim] =
                inside ? fa::to_float(base[(first + row) * stride_row + dim * stride_dim]) : 0.0f;
        }
    }
};

/* The next block of rows: it waits in registers where chunks can be loaded, else in global memory. */
template <typename T, typename L> struct NextBlock {
    fa::Chunk<T, L::WIDTH> chunk[L::ITEMS];

    __device__ void fetch(const L &loader, int64_t first, int64_t end) {
        if (!loader.chunks) return;
#pragma unroll
        for (int i = 0; i < L::ITEMS; ++i) chunk[i] = loader.fetch(i, first, end);
    }
    __device__ void store(const L &loader, float *smem, int64_t first, int64_t end) const {
        if (!loader.chunks) return loader.copy_elements(smem, first, end);
#pragma unroll
        for (int i = 0; i < L::ITEMS; ++i) L::store(smem, i, chunk[i]);
    }
};

__device__ __forceinline__ float4 load4(const float *p) { return *reinterpret_cast<const float4 *>(p); }

/* Softcap, bias and mask for the rows [0, ROWS) of one warp's scores in shared memory: products in, base-2 scores out.
 * Rolled over elements in memory order: coalesced reads of bias and mask, and little code. */
template <int ROWS, int KEYS, int STRIDE>
__device__ __noinline__ void general_scores(const fa_problem &p, const Options &o, float *scores, int64_t batch,
                                            int64_t head, int64_t row0, int64_t key0) {
    for (int r = 0; r < ROWS && row0 + r < p.seq_q; ++r) {
        const fa::KeyRange keys = fa::row_keys(p, row0 + r);
        const int64_t bias = fa::bias_row(p, batch, head, row0 + r);
        const uint8_t *mask = fa::mask_row(p, batch, head, row0 + r);
        for (int c = threadIdx.x % WARP; c < KEYS; c += WARP) {
            const int64_t key = key0 + c;
            float score = -INFINITY;
            if (keys.contains(key) && (!p.mask.data || mask[key * p.mask.stride[3]])) {
                score = fa::score_of(o.score, scores[r * STRIDE + c]);
                if (p.bias.data) score += fa::bias_of(p, bias, key);
            }
            scores[r * STRIDE + c] = score;
        }
    }
}

template <typename T, int TILE>
__global__ void __launch_bounds__(TILES[TILE].warps *WARP)
    simt_kernel(const __grid_constant__ fa_problem p, const __grid_constant__ Options o) {
    constexpr Tile t = TILES[TILE];
    constexpr int M = t.block_m, N = t.block_n, DIM = t.head_dim, THREADS = t.warps * WARP;
    constexpr int TM = M / t.warps / ROW_GROUPS, TN = N / COLUMN_GROUPS, TD = DIM / 32;
    constexpr int STRIDE = t.row_floats(), P_STRIDE = t.score_floats();
    using QLoader = Loader<T, M, DIM, THREADS>;
    using KeyLoader = Loader<T, N, DIM, THREADS>;

    extern __shared__ float4 smem[];
    float *sq = reinterpret_cast<float *>(smem);                  // M x STRIDE
    float *sk = sq + M * STRIDE;                                  // N x STRIDE
    float *sv = t.sync == SYNC_SHARED ? sk : sk + t.key_buffer(); // N x STRIDE
    float *scores = sv + t.key_buffer();                          // M x P_STRIDE
    [[maybe_unused]] float *partial = scores + M * P_STRIDE;      // M x 8

    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int rg = (lane & 1) | (lane >> 4 << 1), cg = lane >> 1 & 7;
    const int warp_row = warp * (M / t.warps), lane_row = warp_row + rg;

    for (int64_t tile = blockIdx.x; tile < o.tiles; tile += gridDim.x) {
        const int64_t tile_m = o.longest_first ? o.tiles_m - 1 - tile % o.tiles_m : tile % o.tiles_m;
        const int64_t head = tile / o.tiles_m % p.heads, batch = tile / o.tiles_m / p.heads;
        const int64_t head_kv = head / (p.heads / p.heads_kv), row0 = tile_m * M;
        const int64_t row_end = row0 + M < p.seq_q ? row0 + M : p.seq_q;
        const fa::KeyRange keys = fa::tile_keys(p, row0, row_end), common = fa::tile_common_keys(p, row0, row_end);

        fa::RowState state[TM]; // `sum` is this lane's part of the row's
        float out[TM][TD][4] = {};

        const KeyLoader k_loader(p.k, batch, head_kv, p.head_dim, o.k_chunks);
        const KeyLoader v_loader(p.v, batch, head_kv, p.head_dim_v, o.v_chunks);
        NextBlock<T, KeyLoader> next;
        if (!keys.empty()) QLoader(p.q, batch, head, p.head_dim, o.q_chunks).copy(sq, row0, row_end);
        if constexpr (t.sync == SYNC_PREFETCH) next.fetch(k_loader, keys.begin, keys.end);

        for (int64_t key0 = keys.begin; key0 < keys.end; key0 += N) {
            if constexpr (t.sync == SYNC_PREFETCH)
                next.store(k_loader, sk, key0, keys.end);
            else
                k_loader.copy(sk, key0, keys.end);
            __syncthreads(); // Q and K are there, and every warp is done with V
            if constexpr (t.sync == SYNC_PREFETCH) next.fetch(v_loader, key0, keys.end);

            float s[TM][TN] = {};
#pragma unroll 1
            for (int d = 0; d < p.head_dim; d += 4) {
                float4 q[TM];
#pragma unroll
                for (int i = 0; i < TM; ++i) q[i] = load4(sq + (lane_row + ROW_GROUPS * i) * STRIDE + d);
#pragma unroll
                for (int j = 0; j < TN; ++j) {
                    const float4 k = load4(sk + (cg + COLUMN_GROUPS * j) * STRIDE + d);
#pragma unroll
                    for (int i = 0; i < TM; ++i) {
                        s[i][j] = fmaf(q[i].x, k.x, s[i][j]);
                        s[i][j] = fmaf(q[i].y, k.y, s[i][j]);
                        s[i][j] = fmaf(q[i].z, k.z, s[i][j]);
                        s[i][j] = fmaf(q[i].w, k.w, s[i][j]);
                    }
                }
            }

            if (o.general) {
#pragma unroll
                for (int i = 0; i < TM; ++i)
#pragma unroll
                    for (int j = 0; j < TN; ++j)
                        scores[(lane_row + ROW_GROUPS * i) * P_STRIDE + cg + COLUMN_GROUPS * j] = s[i][j];
                __syncwarp();
                general_scores<M / t.warps, N, P_STRIDE>(p, o, scores + warp_row * P_STRIDE, batch, head,
                                                         row0 + warp_row, key0);
                __syncwarp();
#pragma unroll
                for (int i = 0; i < TM; ++i)
#pragma unroll
                    for (int j = 0; j < TN; ++j)
                        s[i][j] = scores[(lane_row + ROW_GROUPS * i) * P_STRIDE + cg + COLUMN_GROUPS * j];
            } else {
#pragma unroll
                for (int i = 0; i < TM; ++i)
#pragma unroll
                    for (int j = 0; j < TN; ++j) s[i][j] *= o.score.scale_log2;
                if (key0 < common.begin || key0 + N > common.end) {
                    const fa::KeyBand band = fa::key_band(p, row0 + lane_row, key0);
#pragma unroll
                    for (int i = 0; i < TM; ++i)
#pragma unroll
                        for (int j = 0; j < TN; ++j)
                            if (!band.sees(ROW_GROUPS * i, cg + COLUMN_GROUPS * j)) s[i][j] = -INFINITY;
                }
            }

            if constexpr (REDUCE == REDUCE_SHARED) {
#pragma unroll
                for (int i = 0; i < TM; ++i) {
                    float maximum = s[i][0];
#pragma unroll
                    for (int j = 1; j < TN; ++j) maximum = fmaxf(maximum, s[i][j]);
                    partial[(lane_row + ROW_GROUPS * i) * COLUMN_GROUPS + cg] = maximum;
                }
                __syncwarp();
            }
#pragma unroll
            for (int i = 0; i < TM; ++i) {
                const int row = lane_row + ROW_GROUPS * i;
                float maximum = s[i][0];
                if constexpr (REDUCE == REDUCE_SHARED) {
                    const float4 a = load4(partial + row * COLUMN_GROUPS), b = load4(partial + row * COLUMN_GROUPS + 4);
                    maximum = fmaxf(fmaxf(fmaxf(a.x, a.y), fmaxf(a.z, a.w)), fmaxf(fmaxf(b.x, b.y), fmaxf(b.z, b.w)));
                } else {
#pragma unroll
                    for (int j = 1; j < TN; ++j) maximum = fmaxf(maximum, s[i][j]);
#pragma unroll
                    for (int offset = 2; offset <= 8; offset *= 2)
                        maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, offset));
                }
                const float factor = state[i].raise(maximum);
#pragma unroll
                for (int j = 0; j < TN; ++j) {
                    const float weight = state[i].weight(s[i][j]);
                    state[i].sum += weight;
                    scores[row * P_STRIDE + cg + COLUMN_GROUPS * j] = weight;
                }
#pragma unroll
                for (int c = 0; c < TD; ++c)
#pragma unroll
                    for (int e = 0; e < 4; ++e) out[i][c][e] *= factor;
            }

            if constexpr (t.sync == SYNC_SHARED) __syncthreads(); // every warp is done with K
            if constexpr (t.sync == SYNC_PREFETCH)
                next.store(v_loader, sv, key0, keys.end);
            else
                v_loader.copy(sv, key0, keys.end);
            __syncthreads(); // V is there, and every warp is done with Q and K
            if constexpr (t.sync == SYNC_PREFETCH) next.fetch(k_loader, key0 + N, keys.end);

#pragma unroll 1
            for (int n = 0; n < N; n += 4) {
                float weight[TM][4];
#pragma unroll
                for (int i = 0; i < TM; ++i)
                    *reinterpret_cast<float4 *>(weight[i]) = load4(scores + (lane_row + ROW_GROUPS * i) * P_STRIDE + n);
#pragma unroll
                for (int m = 0; m < 4; ++m)
#pragma unroll
                    for (int c = 0; c < TD; ++c) {
                        const float4 v = load4(sv + (n + m) * STRIDE + 4 * cg + 32 * c);
#pragma unroll
                        for (int i = 0; i < TM; ++i) {
                            out[i][c][0] = fmaf(weight[i][m], v.x, out[i][c][0]);
                            out[i][c][1] = fmaf(weight[i][m], v.y, out[i][c][1]);
                            out[i][c][2] = fmaf(weight[i][m], v.z, out[i][c][2]);
                            out[i][c][3] = fmaf(weight[i][m], v.w, out[i][c][3]);
                        }
                    }
            }
            if constexpr (t.sync == SYNC_SHARED) __syncthreads(); // every warp is done with V
        }

#pragma unroll
        for (int i = 0; i < TM; ++i) {
            const int64_t row = row0 + lane_row + ROW_GROUPS * i;
#pragma unroll
            for (int offset = 2; offset <= 8; offset *= 2) state[i].sum += __shfl_xor_sync(~0u, state[i].sum, offset);
            if (row >= p.seq_q) continue;
            const fa::RowResult result = fa::finish_row(p, head, state[i]);
            T *target = fa::row_of<T>(p.out, batch, head, row);
#pragma unroll
            for (int c = 0; c < TD; ++c) {
                const int dim = 4 * cg + 32 * c;
                fa::Chunk<T, 4> chunk;
#pragma unroll
                for (int e = 0; e < 4; ++e) chunk.element[e] = fa::from_float<T>(out[i][c][e] * result.factor);
                fa::store_chunk(target, p.out.stride[3], dim, p.head_dim_v, o.out_chunks, chunk);
            }
            if (p.lse && cg == 0) static_cast<float *>(p.lse)[(batch * p.heads + head) * p.seq_q + row] = result.lse;
        }
    }
}

template <typename T, int TILE>
fa_code launch_tile(int tile, const fa_problem &p, const Options &o, const fa_plan &plan, cudaStream_t stream,
                    fa_status *status) {
    if constexpr (TILE < TILE_COUNT) {
        if (tile != TILE) return launch_tile<T, TILE + 1>(tile, p, o, plan, stream, status);
        auto kernel = simt_kernel<T, TILE>;
        if (plan.smem_bytes > 48 * 1024)
            FA_CUDA_TRY(status, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                     static_cast<int>(plan.smem_bytes)));
        kernel<<<static_cast<unsigned>(plan.blocks), plan.threads, plan.smem_bytes, stream>>>(p, o);
        FA_CUDA_TRY(status, cudaGetLastError());
        return FA_OK;
    } else {
        return fa_fail(status, FA_EUNSUPPORTED, "simt: no tile %d", tile);
    }
}

#define SIMT_JOIN(a, b)         a##b
#define SIMT_LAUNCHER(instance) SIMT_JOIN(launch_, instance)
fa_code SIMT_LAUNCHER(FA_INSTANCE)(int tile, const fa_problem &p, const Options &o, const fa_plan &plan,
                                   cudaStream_t stream, fa_status *status) {
    return launch_tile<SIMT_TYPE, 0>(tile, p, o, plan, stream, status);
}

} // namespace simt

#else

/* ---- host: rejects, plan, launch ---- */

namespace {

using simt::TILES;

int64_t tiles_m(const fa_problem *p, int tile) { return (p->seq_q + TILES[tile].block_m - 1) / TILES[tile].block_m; }

/* The first tile for this head_dim that gives each multiprocessor a block, else the last one; -1: none fits. With
 * batch_invariant the choice looks at head_dim alone, so that a batch entry's bits do not depend on the others. */
int choose_tile(const fa_problem *p, const fa_device_info *device) {
    const int head_dim = p->head_dim > p->head_dim_v ? p->head_dim : p->head_dim_v;
    int chosen = -1;
    for (int i = 0; i < simt::TILE_COUNT; ++i) {
        if (TILES[i].head_dim < head_dim || TILES[i].smem_bytes() > device->smem_per_block) continue;
        if (chosen >= 0 && TILES[i].head_dim != TILES[chosen].head_dim) break;
        chosen = i;
        if (p->batch_invariant || p->batch * p->heads * tiles_m(p, i) >= device->sm_count) break;
    }
    return chosen;
}

const char *rejects(const fa_problem *p, const fa_device_info *device) {
    if (device->cc < 80) return "needs compute capability 8.0 (Ampere) or newer";
    if (p->dtype == FA_F64) return "takes float16, bfloat16 and float32, not float64";
    if (choose_tile(p, device) < 0) return "no tile of this build takes this head_dim in the device's shared memory";
    return nullptr;
}

fa_code plan(const fa_problem *p, const fa_device_info *device, fa_plan *plan, fa_status *) {
    const int tile = choose_tile(p, device);
    const int64_t tiles = p->batch * p->heads * tiles_m(p, tile);
    plan->config = tile;
    plan->tile_m = TILES[tile].block_m;
    plan->tile_n = TILES[tile].block_n;
    plan->splits = 1;
    plan->stages = 1;
    plan->threads = TILES[tile].warps * 32;
    plan->blocks = tiles < INT32_MAX ? tiles : INT32_MAX; // the kernel strides over the rest
    plan->smem_bytes = TILES[tile].smem_bytes();
    return FA_OK;
}

template <typename T> void find_chunks(const fa_problem *p, simt::Options *o) {
    constexpr int width = VEC_WIDTH ? VEC_WIDTH : 16 / sizeof(T);
    o->q_chunks = fa::takes_chunks<T>(p->q, p->head_dim, width);
    o->k_chunks = fa::takes_chunks<T>(p->k, p->head_dim, width);
    o->v_chunks = fa::takes_chunks<T>(p->v, p->head_dim_v, width);
    o->out_chunks = fa::takes_chunks<T>(p->out, p->head_dim_v, 4);
}

fa_code launch(const fa_problem *p, const fa_plan *plan, const fa_launch *launch, fa_status *status) {
    if (plan->blocks == 0) return FA_OK;
    simt::Options o = {};
    o.score = fa::score_params(*p);
    o.tiles_m = tiles_m(p, plan->config);
    o.tiles = p->batch * p->heads * o.tiles_m;
    o.longest_first = p->right != FA_UNBOUNDED;
    o.general = p->softcap > 0 || p->bias.data || p->mask.data;
    cudaStream_t stream = static_cast<cudaStream_t>(launch->stream);
    if (p->dtype == FA_F16) {
        find_chunks<__half>(p, &o);
        return simt::launch_f16(plan->config, *p, o, *plan, stream, status);
    }
    if (p->dtype == FA_BF16) {
        find_chunks<__nv_bfloat16>(p, &o);
        return simt::launch_bf16(plan->config, *p, o, *plan, stream, status);
    }
    find_chunks<float>(p, &o);
    return simt::launch_f32(plan->config, *p, o, *plan, stream, status);
}

} // namespace

extern "C" FA_EXPORT const fa_kernel fa_row_simt;
const fa_kernel fa_row_simt = {
    .abi = FA_ROW_ABI,
    .device = FA_CUDA,
    .name = "simt",
    .summary = "tiled online softmax without tensor cores: takes every call on float types",
    .rejects = rejects,
    .declines = nullptr,
    .plan = plan,
    .launch = launch,
};

#endif
