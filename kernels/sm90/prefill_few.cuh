/* prefill_sm90: the kernel of sequences of few rows (prefill_few_config.cuh). A block a multiprocessor, each of whose
 * warps takes units from a counter and works alone: its ring of tiles, its queries, its states. Before that, pairs of
 * warps take the units of more rows: the rings of both are one, which the first of them fills.
 *
 * The kernel of tiles is launched behind this one: its blocks come where blocks here have ended, and wait for all.
 *
 * Why no waiter falls two phases behind: as serve_load.cuh says. A warp's barriers live as long as the block; a unit
 * ends when all that was asked for has been waited for, and the next begins at the stage where it ended. A pair's slot
 * is asked for again when both warps have met behind their reads of it. */
#pragma once
#include "sm90/prefill_few_config.cuh"
#include "sm90/serve_kernel.cuh"

namespace fa::sm90::prefill {

/* serve_sm90's shapes: of up to 8 rows and, where there are such sequences, of up to 16. */
template <class T, int Columns> struct FewConfig {
    static constexpr int kWarps = few_warps(Columns), kThreads = kWarps * 32;
    using Least = serve::Config<T, Columns, 1>;
    using Most = serve::Config<T, Columns, few_rows_of_warp(Columns) / 8>;
    static constexpr int kSlots = Most::kSlots, kRingBytes = kSlots * Most::kSlotBytes;
    static constexpr bool kPairs = few_rows_at_most(Columns) > Most::kRows;
    struct Pair : Most {
        static constexpr int kSlots = 2 * Most::kSlots;
    };
};

template <class F> struct FewShared {
    alignas(1024) char ring[F::kWarps][F::kRingBytes];
    alignas(16) char queries[F::kWarps][serve::Rows<typename F::Most>::kQueryBytes + 16];
    serve::LaneRow row[F::kWarps][F::Most::kRows];
    uint64_t full[F::kWarps][F::kSlots], pair_full[F::kWarps / 2][F::Pair::kSlots];
    uint32_t valid[F::kWarps][F::kSlots], pair_valid[F::kWarps / 2][F::Pair::kSlots];
    uint32_t unit[F::kWarps / 2]; // of a pair
};

/* A unit: chunks [begin, end) of a kv head. */
struct FewUnit {
    int head, begin, end;
};

__device__ __forceinline__ FewUnit few_unit(const FewJob &of, int heads_kv, int inside) {
    const int part = inside / heads_kv; // heads first: they read the same rows of memory
    FewUnit unit = {inside - part * heads_kv, of.sight.first, of.sight.last};
    if (of.cut) {
        const int begin = (of.sight.first / of.cut + part) * of.cut;
        unit.begin = max(unit.begin, begin), unit.end = min(unit.end, begin + of.cut);
    }
    return unit;
}

/* The job of which `unit` is one. The warp calls it. */
__device__ __forceinline__ int find_few(const Few &few, uint32_t unit, int jobs) {
    int low = 0, high = jobs;
#pragma unroll 1
    while (high - low > 1) {
        const int step = (high - low + 31) / 32, n = low + static_cast<int>(threadIdx.x % 32) * step;
        const bool begun = n < high && static_cast<uint32_t>(few_job(few, n)->of.unit) <= unit;
        low += (__popc(__ballot_sync(~0u, begun)) - 1) * step;
        high = min(low + step, high);
    }
    return low;
}

/* The rows from `row` on, as many as a warp has. */
__device__ __forceinline__ serve::Job few_serve_job(const Call &call, const FewJob &of, int head, int row, int most) {
    serve::Job job;
    job.entry = entry_of(call, of.of);
    job.b = of.of.b, job.head = head;
    job.rows = {of.of.first_q, of.of.first_q + of.of.seq_q}, job.first_out = of.of.first_q;
    job.row = row, job.count = job.rows_out = min(of.of.seq_q * call.group - row, most);
    job.counts = head == 0; // bad pages, by the one warp that asks for them of this head
    job.low = of.sight.low, job.high = of.sight.high, job.shift = of.sight.shift;
    job.first = of.sight.first, job.last = of.sight.last;
    return job;
}

/* ---- states in memory ---- */

template <class C> __device__ __forceinline__ void store_few(float4 *to, const serve::Chunk<C> &x) {
    constexpr int kTiles = serve::Chunk<C>::kColumnTiles;
    to += threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < C::kRowTiles; ++n, to += 32 * (kTiles + 1)) {
#pragma unroll
        for (int m = 0; m < kTiles; ++m)
            to[32 * m] = make_float4(x.out[m][n][0], x.out[m][n][1], x.out[m][n][2], x.out[m][n][3]);
        const RowState &a = x.state[2 * n], &b = x.state[2 * n + 1];
        to[32 * kTiles] = make_float4(a.maximum, a.sum, b.maximum, b.sum);
    }
}

template <class C> __device__ __forceinline__ void load_few(const float4 *from, serve::Chunk<C> &x) {
    constexpr int kTiles = serve::Chunk<C>::kColumnTiles;
    from += threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < C::kRowTiles; ++n, from += 32 * (kTiles + 1)) {
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
            const float4 y = from[32 * m];
            x.out[m][n][0] = y.x, x.out[m][n][1] = y.y, x.out[m][n][2] = y.z, x.out[m][n][3] = y.w;
        }
        const float4 y = from[32 * kTiles];
        x.state[2 * n].maximum = y.x, x.state[2 * n].sum = y.y;
        x.state[2 * n + 1].maximum = y.z, x.state[2 * n + 1].sum = y.w;
    }
}

/* One of `count` has left its state; true for the last, which may read all of them. The warp calls it. */
__device__ __forceinline__ bool few_ends(uint32_t *ended, int count) {
    __threadfence();
    __syncwarp();
    uint32_t before = 0;
    if (threadIdx.x % 32 == 0) before = atomicAdd(ended, 1u);
    if (__shfl_sync(~0u, before, 0) + 1 != static_cast<uint32_t>(count)) return false;
    __threadfence();
    return true;
}

/* to = fold of the states in `first`, then in `more` slots from `next` on, every `step`-th. */
template <class C>
__device__ __forceinline__ void fold_few(const Few &few, serve::Chunk<C> &to, serve::Chunk<C> &spare, int first,
                                         int next, int step, int more) {
    load_few<C>(few_state(few, first), to);
#pragma unroll 1
    for (int n = 0; n < more; ++n) {
        load_few<C>(few_state(few, next + n * step), spare);
        to.take(spare, false);
    }
}

/* ---- a unit ---- */

__device__ __forceinline__ int few_warp() { return __shfl_sync(~0u, threadIdx.x / 32, 0); }

/* Both warps of a pair have come here, and see what the other has written to shared memory. */
__device__ __forceinline__ void join_pair() { named_barrier_sync(1 + threadIdx.x / 64, 64); }

/* The first of a pair. */
__device__ __forceinline__ bool leads_pair() { return threadIdx.x % 64 < 32; }

/* The ring of a pair. A warp that asks for what comes next has read the slot; the first asks for both. */
template <class C> struct PairRing : serve::Ring<C> {
    __device__ __forceinline__ void start_keys(int at) {
        join_pair();
        if (leads_pair()) serve::Ring<C>::start_keys(at);
    }
    __device__ __forceinline__ void start_values(int at) {
        join_pair();
        if (leads_pair()) serve::Ring<C>::start_values(at);
    }
    __device__ __forceinline__ void clear_rows(int at, uint32_t all) {
        if (leads_pair()) serve::Ring<C>::clear_rows(at, all);
        join_pair();
    }
};

/* Asks for the first tiles of a unit, from the ring's present stage on. */
template <class C> __device__ __forceinline__ void fill_ring(serve::Ring<C> &ring, const RingState<C::kSlots> &at) {
    ring.place[0] = ring.find(ring.tiles.next), ring.place[1] = ring.find(ring.tiles.next + 1);
    int stage = at.stage;
#pragma unroll 1
    for (int n = 0; n < C::kSlots; ++n) {
        n % 2 ? ring.start_values(stage) : ring.start_keys(stage);
        if (++stage == C::kSlots) stage = 0;
    }
}

/* The ring of a warp, or of its pair, for the tiles of a unit. */
template <class C, class F>
__device__ __forceinline__ auto few_ring(const FewParams &params, FewShared<F> &shared, const serve::Job &job,
                                         serve::Tiles tiles) {
    const int warp = few_warp(), pair = warp / 2;
    if constexpr (C::kSlots == F::kSlots)
        return serve::Ring<C>{params.serve, job, shared.ring[warp], shared.full[warp], shared.valid[warp], tiles};
    else
        return PairRing<C>{
            {params.serve, job, shared.ring[2 * pair], shared.pair_full[pair], shared.pair_valid[pair], tiles}};
}

/* A warp's rows of a unit of job n: those of a pair have 16 each, and states of their own. It is made anew where it is
 * needed: no registers are left for it while there are products. */
template <class C, class F> struct FewPart {
    static constexpr bool kPair = C::kSlots != F::kSlots;
    static constexpr int kEights = kPair ? 2 * C::kRowTiles : C::kRowTiles; // of all rows
    const FewJob &of;
    FewUnit unit;
    serve::Job job;
    int second; // warp of its pair

    __device__ __forceinline__ FewPart(const Call &call, int n, uint32_t unit_of_all)
        : of(*few_job(call.few, n)), second(kPair ? few_warp() % 2 : 0) {
        unit = few_unit(of, static_cast<int>(call.p.heads_kv), static_cast<int>(unit_of_all - of.of.unit));
        job = few_serve_job(call, of, unit.head, second * C::kRows, C::kRows);
    }
    /* The n-th of the job; of a chunk, where a unit is less than a group. */
    __device__ __forceinline__ int slot(int n) const {
        return of.of.slot + (unit.head * of.slots + n) * kEights + second * C::kRowTiles;
    }
    __device__ __forceinline__ int slot_of_chunk(int chunk) const { return slot(chunk - job.first / kGroup * kGroup); }
};

/* Works a unit out: `group` is its group so far, true if it has the group's first chunk, or where it is the whole job
 * the end. */
template <class C, class F>
__device__ __forceinline__ bool attend_part(const FewParams &params, FewShared<F> &shared, RingState<C::kSlots> &at,
                                            int n, uint32_t unit, serve::Chunk<C> &group, serve::Chunk<C> &chunk) {
    const Few &few = params.call.few;
    const int warp = few_warp();
    const auto make = [&] { return FewPart<C, F>(params.call, n, unit); };
    const FewPart<C, F> part = make();
    const serve::Job &job = part.job;
    auto ring = few_ring<C>(params, shared, job, job.tiles(part.unit.begin, part.unit.end));
    if (part.second == 0) fill_ring<C>(ring, at);
    if (part.kPair) join_pair(); // valid[] is written
    serve::Rows<C> rows;
    rows.row = shared.row[warp];
    rows.queries = reinterpret_cast<typename serve::Rows<C>::Query *>(shared.queries[warp]);
    rows.template load_queries<true>(params.serve, job);
    rows.load_sight(params.serve, job);
    group.clear();
#pragma unroll
    for (int r = 0; r < C::kLaneRows; ++r) group.state[r].maximum = -INFINITY;
    bool opened = false, folded = false; // the group is in registers; groups before it are in the warp's own state
#pragma unroll 1
    for (int k = part.unit.begin; k < part.unit.end; ++k) {
        serve::attend_chunk(params.serve, job, ring, rows, at, chunk, k);
        const bool opens = k % kGroup == 0 || k == job.first;
        opened |= opens;
        if (!opened) {
            store_few<C>(few_state(few, make().slot_of_chunk(k)), chunk);
            continue;
        }
        group.take(chunk, opens);
        if (few_job(few, n)->cut || ((k + 1) % kGroup && k + 1 < job.last)) continue;
        if (folded) {
            load_few<C>(few_state_of_warp(few, blockIdx.x * F::kWarps + few_warp()), chunk);
            chunk.take(group, false);
            group = chunk;
        }
        folded = true;
        if (k + 1 < job.last) store_few<C>(few_state_of_warp(few, blockIdx.x * F::kWarps + few_warp()), group);
    }
    return opened;
}

/* A unit, and what ends with it. */
template <class C, class F>
__device__ __forceinline__ void attend_few(const FewParams &params, FewShared<F> &shared, RingState<C::kSlots> &at,
                                           int n, uint32_t unit) {
    const Few &few = params.call.few;
    serve::Chunk<C> group, chunk;
    const bool opened = attend_part<C>(params, shared, at, n, unit, group, chunk);
    const FewPart<C, F> part(params.call, n, unit);
    const FewJob &of = part.of;
    if (const int cut = of.cut) {
        const serve::Job &job = part.job;
        const int at_group = part.unit.begin / kGroup,
                  here = part.slot((at_group - job.first / kGroup) * of.group_slots());
        const int begin = max(at_group * kGroup, job.first), end = min((at_group + 1) * kGroup, job.last); // the group
        const int units = (end - 1) / cut - begin / cut + 1, groups = of.groups();
        if (units > 1) {
            if (opened) store_few<C>(few_state(few, here), group);
            if (!few_ends(&few_left(few, here)->group, units)) return;
            const int next = (begin / cut + 1) * cut; // the first chunk behind the unit that opened the group
            fold_few<C>(few, group, chunk, here, part.slot_of_chunk(next), part.kEights, end - next);
        }
        if (groups > 1) {
            store_few<C>(few_state(few, here), group);
            const int slot = part.slot(0), step = of.group_slots() * part.kEights;
            if (!few_ends(&few_left(few, slot)->job, groups)) return;
            fold_few<C>(few, group, chunk, slot, slot + step, step, groups - 1);
        }
    }
    serve::write_chunk(params.serve, part.job, group);
}

/* The units of pairs. Beside the other units, in one function, some registers would be spilled. */
template <class F> __device__ __noinline__ void attend_pairs(const FewParams &params, const FewHeader &header) {
    extern __shared__ __align__(1024) char memory[];
    auto &shared = *reinterpret_cast<FewShared<F> *>(memory);
    const Few &few = params.call.few;
    const int pair = few_warp() / 2, pairs = header.blocks * F::kWarps / 2;
    RingState<F::Pair::kSlots> at(0);
    uint32_t unit = pair * header.blocks + blockIdx.x;
#pragma unroll 1
    while (unit < header.pair_units) {
        attend_few<typename F::Pair>(params, shared, at, find_few(few, unit, header.jobs), unit);
        if (threadIdx.x % 64 == 0) shared.unit[pair] = pairs + atomicAdd(&few_header(few)->pair_counter, 1u);
        join_pair(); // it is read before the pair meets in the unit that it names
        unit = shared.unit[pair];
    }
}

template <class F>
__global__ void __launch_bounds__(F::kThreads, 1) prefill_few_kernel(const __grid_constant__ FewParams params) {
    FA_CHAOS_BEGIN();
    extern __shared__ __align__(1024) char memory[];
    auto &shared = *reinterpret_cast<FewShared<F> *>(memory);
    const int warp = few_warp(), lane = threadIdx.x % 32;
    if (params.serve.boxes && threadIdx.x == 0)
        tensor_map_prefetch(&params.serve.k_map), tensor_map_prefetch(&params.serve.v_map);
    const uint32_t arrivals = params.serve.boxes ? 1 : 32;
    if (lane < F::kSlots) mbarrier_init(&shared.full[warp][lane], arrivals);
    if (F::kPairs && warp % 2 == 0 && lane < F::Pair::kSlots)
        mbarrier_init(&shared.pair_full[warp / 2][lane], arrivals);
    mbarrier_init_fence();
    __syncthreads();
    dependency_release();
    dependency_wait();
    const Few &few = params.call.few;
    const FewHeader &header = *few_header(few);
    const int block = static_cast<int>(blockIdx.x);
    if (block >= header.blocks) return;
    RingState<F::kSlots> at(0);
    if constexpr (F::kPairs) attend_pairs<F>(params, header);
    uint32_t unit = header.pair_units + warp * header.blocks + block;
#pragma unroll 1
    while (unit < header.units) {
        const int n = find_few(few, unit, header.jobs);
        if (F::Most::kRowTiles > 1 && few_job(few, n)->eights(params.call.group) > 1)
            attend_few<typename F::Most>(params, shared, at, n, unit);
        else
            attend_few<typename F::Least>(params, shared, at, n, unit);
        if (lane == 0) unit = header.pair_units + header.blocks * F::kWarps + atomicAdd(&few_header(few)->counter, 1u);
        unit = __shfl_sync(~0u, unit, 0);
    }
}

} // namespace fa::sm90::prefill
