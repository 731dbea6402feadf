/* Another shape of a block of wgmma_split_sm90, for more rows over many keys: tiles of 128 rows, of which the query
 * heads of a kv head have one row after the other of each query (place_of), a warpgroup 64 of them; both read the same
 * ring of keys and values, which a warp of its own fills, so that a key is brought once for twice the rows. The blocks
 * of a cluster share the keys out and merge as those of the other shapes do, each half of the tile for itself.
 *
 * Why no waiter falls two phases behind (see sm90/forward.cuh):
 *
 *   full of a ring: all four warps of each warpgroup with rows wait; the next phase ends after the producer's
 *   arrive_expect, and that after its wait for `empty`, where each of these warps arrives for itself, past its own
 * wait.
 *
 *   empty: only the producer's thread waits, and its own copies allow what follows.
 *
 *   named barriers 1 and 2: only the 128 threads of a warpgroup, and all of them wait.
 *
 *   arrived: one phase a launch. */
#pragma once
#include "sm90/split.cuh"

namespace fa::sm90::split {

template <int Columns, int TileN, int Stages> struct RowsConfig {
    static constexpr int kColumns = Columns;
    static constexpr int kTileN = TileN;
    static constexpr int kStages = Stages;
    static constexpr bool kPacked = true, kResident = false;
    static constexpr int kHalves = 2, kTileRows = kHalves * kTileM;
    static constexpr int kWarpgroups = 1, kWarps = 4; // of a half: what merges
    static constexpr int kThreads = 128 * (kHalves + 1);

    static constexpr int kQueryBytes = kTileBytes<Columns, kTileM>;
    static constexpr int kBlockBytes = kTileBytes<Columns, TileN>;
    static constexpr int kRingBytes = Stages * kBlockBytes;       // of K, and of V
    static constexpr int kSentBytes = kTileM * (Columns * 4 + 8); // outputs and states of a half, of all parts
    static constexpr int kPartialBytes = kTileM * Columns * 4, kStateBytes = kTileM * 8;
    static constexpr int kBarrierBytes = (1 + 4 * Stages) * 8;
    static constexpr int kSharedBytes =
        kHalves * (kQueryBytes + kPartialBytes + kStateBytes) + 2 * kRingBytes + kBarrierBytes;

    // 64 Ki registers: what the consumers leave is the producer's.
#ifdef FA_CHAOS // whose delays need some there too
    static constexpr int kConsumerRegisters = 232, kProducerRegisters = 40;
#else
    static constexpr int kConsumerRegisters = 240, kProducerRegisters = 24;
#endif

    static_assert(Columns % 64 == 0 && TileN % 16 == 0 && TileN <= 256 && Stages >= 2);
    static_assert(kSharedBytes <= 227 * 1024, "a block of sm_90 has 227 KB of shared memory");
};

struct RowsParams {
    Params call; // whose map of q nobody reads
    const void *q;
    int64_t q_batch, q_head, q_row; // strides, elements
    int rows;                       // of a kv head
};

/* K or V as a warpgroup with rows sees them. */
template <class C> struct SharedRing {
    char *blocks;
    uint64_t *full, *empty;

    __device__ __forceinline__ void init(int readers) const {
#pragma unroll
        for (int stage = 0; stage < C::kStages; ++stage)
            mbarrier_init(full + stage, 1), mbarrier_init(empty + stage, readers);
    }
    /* By the producer's thread: block `step`, once the one before it in its stage has been read. */
    __device__ __forceinline__ void fill(const CUtensorMap *map, int key, int head, int batch, int step) const {
        const int stage = step % C::kStages;
        mbarrier_wait(empty + stage, step / C::kStages & 1 ^ 1);
        mbarrier_arrive_expect(full + stage, C::kBlockBytes);
        tma_load_tile<C::kColumns, C::kTileN>(blocks + stage * C::kBlockBytes, map, full + stage, key, head, batch,
                                              kEvictLast);
    }
    /* Address of block `step` once it is there. */
    __device__ __forceinline__ uint32_t wait(int step) const {
        mbarrier_wait(full + step % C::kStages, step / C::kStages & 1);
        return shared_address(blocks + step % C::kStages * C::kBlockBytes);
    }
    /* This warp has read block `step`. */
    __device__ __forceinline__ void refill(const Params &, const Work &, int step) const {
        __syncwarp();
        if (threadIdx.x % 32 == 0) mbarrier_arrive(empty + step % C::kStages);
    }
};

/* What half `half` of the block's tile does. */
template <class C> __device__ __forceinline__ Work find_half(const RowsParams &params, int half) {
    const Params &call = params.call;
    const int tile = static_cast<int>(cluster_index()) * C::kTileRows;
    const auto keys_of = [&](int row) { return row_keys(call, query_of<C>(call, min(row, params.rows - 1))); };
    Work work;
    work.row = tile + half * kTileM;
    work.keys = {keys_of(tile).begin, keys_of(tile + C::kTileRows - 1).end};
    work.common = {keys_of(work.row + kTileM - 1).begin, keys_of(work.row).end};
    work.part = static_cast<int>(cluster_rank());
    work.parts = 1 << call.split_shift;
    const int blocks = (max(work.keys.end - work.keys.begin, 0) + C::kTileN - 1) / C::kTileN;
    work.count = max(blocks - work.part + work.parts - 1, 0) >> call.split_shift;
    return work;
}

/* The rows of a half as wgmma reads them: what TMA would lay out, had it an axis for the heads of a group. The
 * warpgroup calls it. */
template <class T, class C>
__device__ __forceinline__ void load_queries(const RowsParams &params, const Work &work, int half, char *to) {
    constexpr int kChunks = C::kColumns / 8, kLoads = kTileM * kChunks / 128; // of 16 bytes
    const int thread = threadIdx.x % 128;
    uint4 found[kLoads];
#pragma unroll
    for (int n = 0; n < kLoads; ++n) {
        const int item = thread + n * 128, chunk = item % kChunks, row = work.row + item / kChunks;
        const Place at = place_of<C>(params.call, row);
        const T *from = static_cast<const T *>(params.q) + blockIdx.z * params.q_batch + at.head * params.q_head +
                        at.query * params.q_row;
        found[n] = make_uint4(0, 0, 0, 0);
        if (row < params.rows && chunk * 8 < params.call.head_dim)
            found[n] = *reinterpret_cast<const uint4 *>(from + chunk * 8);
    }
#pragma unroll
    for (int n = 0; n < kLoads; ++n) {
        const int item = thread + n * 128, chunk = item % kChunks, row = item / kChunks;
        *reinterpret_cast<uint4 *>(to + chunk / 8 * (kTileM * kSlabRowBytes) + row * kSlabRowBytes +
                                   (chunk % 8 ^ row % 8) * 16) = found[n];
    }
    tma_store_fence();
    named_barrier_sync(1 + half, 128);
}

/* Writes the rows of a half that no other block has keys for. */
template <class T, class C>
__device__ __forceinline__ void finish_alone(const RowsParams &params, const Work &work,
                                             const float (&out)[C::kColumns / 2], const RowState (&state)[2]) {
    const Params &call = params.call;
    const int lane = threadIdx.x % 32, row = work.row + threadIdx.x % 128 / 32 * 16 + lane / 4;
    T *target[2];
    float factor[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const Place at = place_of<C>(call, row + 8 * half);
        const RowResult result = finish_total(call, state[half], at.head);
        factor[half] = result.factor;
        target[half] = at.query < call.seq_q ? static_cast<T *>(call.out) + blockIdx.z * call.out_batch +
                                                   at.head * call.out_head + at.query * call.out_row
                                             : nullptr;
        if (lane % 4 == 0) store_lse(call, at, result.lse);
    }
    store_rows(target, out, factor, call.head_dim, lane);
}

template <class T, class C, bool Capped>
__global__ void __launch_bounds__(C::kThreads, 1) wgmma_split_rows_kernel(const __grid_constant__ RowsParams params) {
    FA_CHAOS_BEGIN();
    extern __shared__ __align__(1024) char queries[];
    char *k_blocks = queries + C::kHalves * C::kQueryBytes, *v_blocks = k_blocks + C::kRingBytes;
    char *partials = v_blocks + C::kRingBytes, *states = partials + C::kHalves * C::kPartialBytes;
    uint64_t *arrived = reinterpret_cast<uint64_t *>(states + C::kHalves * C::kStateBytes), *full = arrived + 1;
    const SharedRing<C> k{k_blocks, full, full + C::kStages}, v{v_blocks, full + 2 * C::kStages, full + 3 * C::kStages};

    const Params &call = params.call;
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), half = warp / 4 - 1; // -1: the producer's
    const Work work = find_half<C>(params, max(half, 0));
    const int halves = params.rows - int(cluster_index()) * C::kTileRows > kTileM ? 2 : 1; // that have rows
    if (threadIdx.x == 0) {
        k.init(4 * halves), v.init(4 * halves);
        mbarrier_init(arrived, 1);
        mbarrier_init_fence();
        mbarrier_arrive_expect(arrived, halves * (C::kSentBytes - (C::kSentBytes >> call.split_shift)));
        tensor_map_prefetch(&call.k), tensor_map_prefetch(&call.v);
    }
    __syncthreads();
    if (call.split_shift) cluster_arrive_relaxed(); // `arrived` is ready
    dependency_wait();
    dependency_release();

    if (half < 0) {
        registers_lower<C::kProducerRegisters>();
        if (warp == 0 && elect_one()) {
            const int head = blockIdx.y, batch = blockIdx.z;
            for (int step = 0; step < work.count; ++step) {
                const int key = work.first_key<C>(step) - call.key_begin;
                k.fill(&call.k, key, call.k_head ? head : 0, call.k_batch ? batch : 0, step);
                v.fill(&call.v, key, call.v_head ? head : 0, call.v_batch ? batch : 0, step);
            }
        }
        __syncwarp();
        if (call.split_shift) cluster_wait();
        return;
    }
    registers_raise<C::kConsumerRegisters>();
    float out[C::kColumns / 2];
    RowState state[2];
    char *const own = queries + half * C::kQueryBytes;
    if (half < halves) {
#pragma unroll
        for (int i = 0; i < C::kColumns / 2; ++i) out[i] = 0;
        load_queries<T, C>(params, work, half, own);
        attend<T, C, Capped>(call, work, k, v, shared_address(own), out, state);
    }
    if (call.split_shift) cluster_wait();
    if (half >= halves) return;
    if (call.split_shift == 0) return finish_alone<T, C>(params, work, out, state);
    const Landing<C> landing{reinterpret_cast<float4 *>(partials + half * C::kPartialBytes),
                             reinterpret_cast<float2 *>(states + half * C::kStateBytes), arrived, work.parts};
    publish<C>(call, work.part, out, state, landing);
    named_barrier_sync(1 + half, 128);
    mbarrier_wait(arrived, 0);
    const int row = work.row + (int(cluster_rank()) * kTileM >> call.split_shift);
    if (call.split_shift == 1)
        finish<T, C, 2>(call, row, warp % 4, landing);
    else
        finish<T, C, 0>(call, row, warp % 4, landing);
}

} // namespace fa::sm90::split
