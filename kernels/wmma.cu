/* wmma: fused attention through nvcuda::wmma, the tensor-core interface of CUDA C++, for Ampere and newer.
 *
 * A block takes TILE_M query rows of one head and walks over the keys TILE_N at a time. One producer warp copies K and
 * V into a ring of two slots each with cp.async; consumer warps own 16 or 32 query rows each and, per key tile,
 *
 *     1. multiply Q K^T into accumulator fragments and store them to a strip of shared memory of their own,
 *     2. run the online softmax there, one owner a row, and leave the weights in the strip, rounded to 16 bits,
 *     3. rescale the output fragments and add weights times V.
 *
 * The warps meet at the ring's barriers alone. WMMA hides which element of a fragment a thread holds, so a factor a row
 * reaches the fragments through the interface itself: an accumulator fragment loaded with a leading dimension of 0
 * holds at every element its row's factor, and fragments of one type agree on where an element is.
 *
 * Float16 and bfloat16, head_dim and head_dim_v up to 128 (padded with zeros to 64 or 128), everything a call can ask
 * for, any strides; rows that are not 16-byte aligned are copied element by element. The scores' trip through shared
 * memory is what mma_sm80 saves.
 *
 *     python -m bench measure --preset history --rows wmma
 *
 * @instance d64 -DFA_WMMA_HEAD_DIM=64
 * @instance d128 -DFA_WMMA_HEAD_DIM=128
 */
#include "fa.h"       // fa_problem, fa_kernel
#include "launch.cuh" // FA_CUDA_TRY
#include "mask.cuh"   // tile_keys, tile_common_keys
#include "score.cuh"
#include "softmax.cuh"
#include "wmma_fragment.cuh"
#include "wmma_pipeline.cuh"
#include "wmma_softmax.cuh"
#include "wmma_tile.cuh"

namespace fa::wmma_row {

/* What a launch adds to the problem. */
struct Params {
    fa_problem p;
    ScoreParams score;
    unsigned tiles_m;
    bool q_aligned, k_aligned, v_aligned, out_aligned;
};

fa_code launch_64(const fa_problem *p, const fa_plan *plan, cudaStream_t stream, fa_status *status);
fa_code launch_128(const fa_problem *p, const fa_plan *plan, cudaStream_t stream, fa_status *status);

/* Block shapes for a padded head_dim: consumer warps, 16-row tiles a warp, TILE_N, blocks wanted on a multiprocessor,
 * query fragments in registers or loaded anew for each key tile. One block of many consumers keeps one producer busy
 * and every register in use; where that leaves multiprocessors without a block, and where its shared memory does not
 * fit (99 KB on sm_86 and sm_89), the small shape runs. */
#ifndef FA_WMMA_64
#define FA_WMMA_64 4, 1, 64, 3, false
#endif
#ifndef FA_WMMA_64_WIDE
#define FA_WMMA_64_WIDE 15, 1, 64, 1, false
#endif
#ifndef FA_WMMA_128
#define FA_WMMA_128 5, 1, 48, 2, false
#endif
#ifndef FA_WMMA_128_WIDE
#define FA_WMMA_128_WIDE 10, 1, 64, 1, false
#endif

template <int HEAD_DIM_, int CONSUMERS_, int ROW_TILES_, int TILE_N_, int BLOCKS_, bool QREG_> struct Shape {
    static constexpr int HEAD_DIM = HEAD_DIM_;
    static constexpr int CONSUMERS = CONSUMERS_; // warps
    static constexpr int ROW_TILES = ROW_TILES_; // 16-row tiles a consumer
    static constexpr int TILE_N = TILE_N_;
    static constexpr int BLOCKS = BLOCKS_; // wanted on a multiprocessor
    static constexpr int STAGES = 2;
    static constexpr int STRIP_ROWS = 16 * ROW_TILES;
    static constexpr int TILE_M = CONSUMERS * STRIP_ROWS;
    static constexpr int THREADS = (CONSUMERS + 1) * WARP;
    static constexpr bool QUERY_IN_REGISTERS = QREG_;
    static constexpr int SCORE_PITCH = wmma_row::SCORE_PITCH<TILE_N>; // floats
    static constexpr int WEIGHT_PITCH = PITCH<TILE_N>;
    static constexpr int OUT_COLUMNS = TILE_N < 64 ? 32 : 64; // of the output that pass through a strip at a time

    struct Shared {
        alignas(128) char k[STAGES][TILE_N * PITCH<HEAD_DIM> * 2];
        alignas(128) char v[STAGES][TILE_N * PITCH<HEAD_DIM> * 2];
        alignas(128) float strip[CONSUMERS][STRIP_ROWS * SCORE_PITCH];
        alignas(128) char q[CONSUMERS][QUERY_IN_REGISTERS ? 128 : STRIP_ROWS * PITCH<HEAD_DIM> * 2];
        alignas(128) float factor[CONSUMERS][STRIP_ROWS];
        alignas(8) uint64_t k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
    };
    static_assert(ROW_TILES == 1 || ROW_TILES == 2, "a row has one owner lane or two");
    static_assert(HEAD_DIM % OUT_COLUMNS == 0 && TILE_N % 16 == 0);
    static_assert(!QUERY_IN_REGISTERS || SCORE_PITCH * 4 >= PITCH<HEAD_DIM> * 2, "the strip must hold the query rows");
};

template <int HEAD_DIM, bool WIDE> struct Config;
template <> struct Config<64, false> : Shape<64, FA_WMMA_64> {};
template <> struct Config<64, true> : Shape<64, FA_WMMA_64_WIDE> {};
template <> struct Config<128, false> : Shape<128, FA_WMMA_128> {};
template <> struct Config<128, true> : Shape<128, FA_WMMA_128_WIDE> {};
static_assert(sizeof(Config<64, false>::Shared) <= 99 << 10 && sizeof(Config<128, false>::Shared) <= 99 << 10,
              "a small shape runs everywhere");
static_assert(sizeof(Config<64, true>::Shared) <= 163 << 10 && sizeof(Config<128, true>::Shared) <= 163 << 10,
              "a wide shape fits sm_80");

#ifdef FA_INSTANCE

template <typename T, class C>
__device__ __forceinline__ void produce(const Params &params, typename C::Shared &shared, int64_t batch,
                                        int64_t head_kv, const Keys &keys, int lane) {
    const fa_problem &p = params.p;
    const HeadRows<T> k = {row_of<T>(p.k, batch, head_kv, 0), p.k.stride[2], p.k.stride[3], p.head_dim,
                           params.k_aligned};
    const HeadRows<T> v = {row_of<T>(p.v, batch, head_kv, 0), p.v.stride[2], p.v.stride[3], p.head_dim_v,
                           params.v_aligned};
    const auto fetch = [&](const HeadRows<T> &rows, char *slot, uint64_t *full, int key) {
        load_tile<C::TILE_N, C::HEAD_DIM>(reinterpret_cast<T *>(slot), rows, key, p.key_begin, p.key_end, lane);
        if (rows.aligned)
            barrier_arrive_after_copies(full);
        else
            barrier_arrive(full);
    };
    RingIndex<C::STAGES> at;
    for (int key = keys.begin; key < keys.end; key += C::TILE_N, at.advance()) {
        barrier_wait(&shared.k_empty[at.slot], at.parity ^ 1);
        fetch(k, shared.k[at.slot], &shared.k_full[at.slot], key);
        barrier_wait(&shared.v_empty[at.slot], at.parity ^ 1);
        fetch(v, shared.v[at.slot], &shared.v_full[at.slot], key);
    }
    wait_copies();
}

template <typename T, class C, bool SIMPLE>
__device__ __forceinline__ void consume(const Params &params, typename C::Shared &shared, int64_t batch, int64_t head,
                                        int first_row, const Keys &keys, int warp, int lane) {
    constexpr int STEPS = C::HEAD_DIM / 16, BLOCKS_N = C::TILE_N / 16, ROW_TILES = C::ROW_TILES;
    const fa_problem &p = params.p;
    float *strip = shared.strip[warp], *factor = shared.factor[warp];
    T *const q_tile = reinterpret_cast<T *>(C::QUERY_IN_REGISTERS ? reinterpret_cast<char *>(strip) : shared.q[warp]);
    const int warp_row = first_row + warp * C::STRIP_ROWS;

    OwnedRow owned = {warp_row + lane % C::STRIP_ROWS, {0, 0}, {}};
    if (owned.row < p.seq_q) owned.keys = row_keys(p, owned.row);
    const int end_row = min(warp_row + C::STRIP_ROWS, int(p.seq_q));
    Keys seen = {0, 0}, common = {0, 0};
    if (warp_row < p.seq_q) {
        const HeadRows<T> q = {row_of<T>(p.q, batch, head, 0), p.q.stride[2], p.q.stride[3], p.head_dim,
                               params.q_aligned};
        load_tile<C::STRIP_ROWS, C::HEAD_DIM>(q_tile, q, warp_row, 0, p.seq_q, lane);
        seen = tile_keys(p, warp_row, end_row);
        common = tile_common_keys(p, warp_row, end_row);
        wait_copies();
    }
    __syncwarp();
    Left<T> query[ROW_TILES][C::QUERY_IN_REGISTERS ? STEPS : 1];
    if constexpr (C::QUERY_IN_REGISTERS) {
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
            for (int d = 0; d < STEPS; ++d)
                load_block(query[r][d], q_tile + 16 * r * PITCH<C::HEAD_DIM> + 16 * d, PITCH<C::HEAD_DIM>);
        __syncwarp();
    }

    Accumulator out[ROW_TILES][STEPS];
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
        for (int d = 0; d < STEPS; ++d) wmma::fill_fragment(out[r][d], 0.0f);

    RingIndex<C::STAGES> at;
    for (int key = keys.begin; key < keys.end; key += C::TILE_N, at.advance()) {
        const bool needed = key < seen.end && key + C::TILE_N > seen.begin;
        const T *k = reinterpret_cast<const T *>(shared.k[at.slot]),
                *v = reinterpret_cast<const T *>(shared.v[at.slot]);
        barrier_wait(&shared.k_full[at.slot], at.parity);
        if (needed) {
            Accumulator scores[ROW_TILES][BLOCKS_N];
#pragma unroll
            for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
                for (int n = 0; n < BLOCKS_N; ++n) wmma::fill_fragment(scores[r][n], 0.0f);
#pragma unroll
            for (int d = 0; d < STEPS; ++d) {
                if constexpr (!C::QUERY_IN_REGISTERS) {
#pragma unroll
                    for (int r = 0; r < ROW_TILES; ++r)
                        load_block(query[r][0], q_tile + 16 * r * PITCH<C::HEAD_DIM> + 16 * d, PITCH<C::HEAD_DIM>);
                }
#pragma unroll
                for (int n = 0; n < BLOCKS_N; ++n) {
                    RightTransposed<T> block;
                    load_block(block, k + 16 * n * PITCH<C::HEAD_DIM> + 16 * d, PITCH<C::HEAD_DIM>);
#pragma unroll
                    for (int r = 0; r < ROW_TILES; ++r)
                        wmma::mma_sync(scores[r][n], query[r][C::QUERY_IN_REGISTERS ? d : 0], block, scores[r][n]);
                }
            }
#pragma unroll
            for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
                for (int n = 0; n < BLOCKS_N; ++n)
                    wmma::store_matrix_sync(strip + 16 * r * C::SCORE_PITCH + 16 * n, scores[r][n], C::SCORE_PITCH,
                                            wmma::mem_row_major);
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(&shared.k_empty[at.slot]);
        if (needed) {
            const bool all_visible = common.begin <= key && key + C::TILE_N <= common.end;
            const float rescale = softmax_strip<T, C::STRIP_ROWS, C::TILE_N, C::WEIGHT_PITCH, SIMPLE>(
                p, params.score, batch, head, owned, strip, key, all_visible, lane);
            if (lane < C::STRIP_ROWS) factor[lane] = rescale;
            const bool changed = __any_sync(~0u, rescale != 1.0f);
            __syncwarp();
            if (changed) scale_rows(out, factor);
        }
        barrier_wait(&shared.v_full[at.slot], at.parity);
        if (needed) {
            const T *weights = reinterpret_cast<const T *>(strip);
#pragma unroll
            for (int n = 0; n < BLOCKS_N; ++n) {
                Left<T> left[ROW_TILES];
#pragma unroll
                for (int r = 0; r < ROW_TILES; ++r)
                    load_block(left[r], weights + 16 * r * C::WEIGHT_PITCH + 16 * n, C::WEIGHT_PITCH);
#pragma unroll
                for (int d = 0; d < STEPS; ++d) {
                    Right<T> block;
                    load_block(block, v + 16 * n * PITCH<C::HEAD_DIM> + 16 * d, PITCH<C::HEAD_DIM>);
#pragma unroll
                    for (int r = 0; r < ROW_TILES; ++r) wmma::mma_sync(out[r][d], left[r], block, out[r][d]);
                }
            }
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(&shared.v_empty[at.slot]);
    }

    if constexpr (ROW_TILES == 1) owned.state.sum += __shfl_xor_sync(~0u, owned.state.sum, 16);
    const RowResult result = finish_row(p, head, owned.state);
    if (lane < C::STRIP_ROWS) factor[lane] = result.factor;
    if (p.lse && lane < C::STRIP_ROWS && owned.row < p.seq_q)
        static_cast<float *>(p.lse)[(batch * p.heads + head) * p.seq_q + owned.row] = result.lse;
    __syncwarp();
    scale_rows(out, factor);
    constexpr int PARTS = C::OUT_COLUMNS / 16;
#pragma unroll
    for (int d = 0; d < STEPS; d += PARTS) {
        __syncwarp();
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
            for (int i = 0; i < PARTS; ++i)
                wmma::store_matrix_sync(strip + 16 * r * C::SCORE_PITCH + 16 * i, out[r][d + i], C::SCORE_PITCH,
                                        wmma::mem_row_major);
        __syncwarp();
        store_rows<C::STRIP_ROWS, C::OUT_COLUMNS>(row_of<T>(p.out, batch, head, 0), p.out.stride[2], p.out.stride[3],
                                                  params.out_aligned, p.head_dim_v, 16 * d, warp_row, p.seq_q, strip,
                                                  C::SCORE_PITCH, lane);
    }
}

template <typename T, class C, bool SIMPLE>
__global__ void __launch_bounds__(C::THREADS, C::BLOCKS) wmma_kernel(const __grid_constant__ Params params) {
    extern __shared__ __align__(128) char memory[];
    typename C::Shared &shared = *reinterpret_cast<typename C::Shared *>(memory);
    const fa_problem &p = params.p;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const unsigned tiles = params.tiles_m, unit = blockIdx.x / tiles, heads = p.heads;
    const int first_row = int(tiles - 1 - blockIdx.x % tiles) * C::TILE_M; // causal: the longest first
    const int64_t head = unit % heads, batch = unit / heads;
    const Keys keys = tile_keys(p, first_row, min(first_row + C::TILE_M, int(p.seq_q)));

    if (threadIdx.x == 0) {
        for (int s = 0; s < C::STAGES; ++s) {
            barrier_init(&shared.k_full[s], WARP);
            barrier_init(&shared.v_full[s], WARP);
            barrier_init(&shared.k_empty[s], C::CONSUMERS);
            barrier_init(&shared.v_empty[s], C::CONSUMERS);
        }
    }
    __syncthreads();
    if (warp == C::CONSUMERS)
        produce<T, C>(params, shared, batch, head / (p.heads / p.heads_kv), keys, lane);
    else
        consume<T, C, SIMPLE>(params, shared, batch, head, first_row, keys, warp, lane);
}

template <typename T, class C, bool SIMPLE>
fa_code launch_as(const Params &params, const fa_plan *plan, cudaStream_t stream, fa_status *status) {
    const auto kernel = wmma_kernel<T, C, SIMPLE>;
    FA_CUDA_TRY(status,
                cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(plan->smem_bytes)));
    kernel<<<unsigned(plan->blocks), C::THREADS, plan->smem_bytes, stream>>>(params);
    FA_CUDA_TRY(status, cudaGetLastError());
    return FA_OK;
}

template <class C>
fa_code launch_shape(const fa_problem *p, const fa_plan *plan, cudaStream_t stream, fa_status *status) {
    const Params params = {
        .p = *p,
        .score = score_params(*p),
        .tiles_m = unsigned((p->seq_q + C::TILE_M - 1) / C::TILE_M),
        .q_aligned = rows_aligned<__half>(p->q, p->head_dim),
        .k_aligned = rows_aligned<__half>(p->k, p->head_dim),
        .v_aligned = rows_aligned<__half>(p->v, p->head_dim_v),
        .out_aligned = rows_aligned<__half>(p->out, p->head_dim_v),
    };
    const bool simple = p->scale > 0 && p->softcap == 0 && !p->bias.data && !p->mask.data;
    if (p->dtype == FA_F16)
        return simple ? launch_as<__half, C, true>(params, plan, stream, status)
                      : launch_as<__half, C, false>(params, plan, stream, status);
    return simple ? launch_as<__nv_bfloat16, C, true>(params, plan, stream, status)
                  : launch_as<__nv_bfloat16, C, false>(params, plan, stream, status);
}

#define FA_JOIN_(a, b) a##b
#define FA_JOIN(a, b)  FA_JOIN_(a, b)

fa_code FA_JOIN(launch_, FA_WMMA_HEAD_DIM)(const fa_problem *p, const fa_plan *plan, cudaStream_t stream,
                                           fa_status *status) {
    return plan->config ? launch_shape<Config<FA_WMMA_HEAD_DIM, true>>(p, plan, stream, status)
                        : launch_shape<Config<FA_WMMA_HEAD_DIM, false>>(p, plan, stream, status);
}

#else

namespace {

constexpr int MAX_HEAD_DIM = 128;
constexpr int64_t MAX_LENGTH = 1 << 30;  // so that 32-bit row and key numbers hold
constexpr int64_t WIDE_FROM_KEYS = 1024; // batch_invariant: the shape follows from seq_k alone

int padded(const fa_problem *p) { return (p->head_dim > p->head_dim_v ? p->head_dim : p->head_dim_v) <= 64 ? 64 : 128; }

template <class C> int64_t blocks_of(const fa_problem *p) {
    return (p->seq_q + C::TILE_M - 1) / C::TILE_M * p->heads * p->batch;
}

const char *rejects(const fa_problem *p, const fa_device_info *device) {
    if (device->cc < 80) return "needs compute capability 8.0 (Ampere) or newer";
    if (p->dtype != FA_F16 && p->dtype != FA_BF16) return "takes float16 and bfloat16";
    if (p->head_dim > MAX_HEAD_DIM || p->head_dim_v > MAX_HEAD_DIM) return "takes head_dim and head_dim_v up to 128";
    if (p->seq_q > MAX_LENGTH || p->seq_k > MAX_LENGTH) return "takes sequences of up to 2^30 rows";
    const int64_t blocks = padded(p) == 64 ? blocks_of<Config<64, false>>(p) : blocks_of<Config<128, false>>(p);
    if (blocks > INT32_MAX) return "takes up to 2^31 tiles of queries";
    return nullptr;
}

template <class C> fa_code plan_shape(const fa_problem *p, int config, fa_plan *plan) {
    plan->config = config;
    plan->tile_m = C::TILE_M;
    plan->tile_n = C::TILE_N;
    plan->splits = 1;
    plan->stages = C::STAGES;
    plan->threads = C::THREADS;
    plan->blocks = blocks_of<C>(p);
    plan->smem_bytes = sizeof(typename C::Shared);
    return FA_OK;
}

/* The wide shape from three quarters of a block a multiprocessor on. */
template <int HEAD_DIM> fa_code plan_dim(const fa_problem *p, const fa_device_info *device, fa_plan *plan) {
    using Wide = Config<HEAD_DIM, true>;
    const bool enough =
        p->batch_invariant ? p->seq_k >= WIDE_FROM_KEYS : 4 * blocks_of<Wide>(p) >= 3 * int64_t(device->sm_count);
    if (enough && sizeof(typename Wide::Shared) <= device->smem_per_block) return plan_shape<Wide>(p, 1, plan);
    return plan_shape<Config<HEAD_DIM, false>>(p, 0, plan);
}

fa_code plan(const fa_problem *p, const fa_device_info *device, fa_plan *plan, fa_status *) {
    return padded(p) == 64 ? plan_dim<64>(p, device, plan) : plan_dim<128>(p, device, plan);
}

fa_code launch(const fa_problem *p, const fa_plan *plan, const fa_launch *launch, fa_status *status) {
    cudaStream_t stream = static_cast<cudaStream_t>(launch->stream);
    if (plan->blocks == 0) return FA_OK;
    return padded(p) == 64 ? launch_64(p, plan, stream, status) : launch_128(p, plan, stream, status);
}

} // namespace

#endif

} // namespace fa::wmma_row

#ifndef FA_INSTANCE
extern "C" FA_EXPORT const fa_kernel fa_row_wmma;
const fa_kernel fa_row_wmma = {
    .abi = FA_ROW_ABI,
    .device = FA_CUDA,
    .name = "wmma",
    .summary = "fused kernel through nvcuda::wmma, scores in shared memory",
    .rejects = fa::wmma_row::rejects,
    .declines = nullptr,
    .plan = fa::wmma_row::plan,
    .launch = fa::wmma_row::launch,
};
#endif
