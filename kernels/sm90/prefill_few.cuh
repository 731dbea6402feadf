/* prefill_sm90: the kernel of sequences of few rows (prefill_few_config.cuh). A block a multiprocessor, each of whose
 * warps takes units from a counter and works alone: its ring of tiles, its queries, its states.
 *
 * The kernel of tiles is launched behind this one and runs beside it: blocks that prefill_list_kernel does not want
 * here end at once, and tiles have their multiprocessors. That kernel may start when every block here has passed
 * dependency_wait(), so that the list is there; it waits for this one in the end.
 *
 * Why no waiter falls two phases behind: as serve_load.cuh says. A warp's barriers live as long as the block; a unit
 * ends when all that was asked for has been waited for, and the next begins at the stage where it ended. */
#pragma once
#include "sm90/prefill_few_config.cuh"
#include "sm90/serve_kernel.cuh"

namespace fa::sm90::prefill {

/* serve_sm90's shapes: of up to 8 rows and, where there are such sequences, of up to 16. */
template <class T, int Columns> struct FewConfig {
    static constexpr int kWarps = few_warps(Columns), kThreads = kWarps * 32;
    using Least = serve::Config<T, Columns, 1>;
    using Most = serve::Config<T, Columns, few_rows_at_most(Columns) / 8>;
    static constexpr int kSlots = Most::kSlots, kRingBytes = kSlots * Most::kSlotBytes;
};

template <class F> struct FewShared {
    alignas(1024) char ring[F::kWarps][F::kRingBytes];
    alignas(16) char queries[F::kWarps][serve::Rows<typename F::Most>::kQueryBytes + 16];
    serve::LaneRow row[F::kWarps][F::Most::kRows];
    uint64_t full[F::kWarps][F::kSlots];
    uint32_t valid[F::kWarps][F::kSlots];
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

__device__ __forceinline__ serve::Job few_serve_job(const Call &call, const FewJob &of, int head) {
    serve::Job job;
    job.entry = entry_of(call, of.of);
    job.b = of.of.b, job.head = head;
    job.rows = {of.of.first_q, of.of.first_q + of.of.seq_q}, job.first_out = of.of.first_q;
    job.row = 0, job.count = job.rows_out = of.of.seq_q * call.group;
    job.counts = head == 0; // bad pages, by the one warp that reads them of this head
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

/* What a warp has for itself. */
template <class F> struct FewWarp {
    FewShared<F> &shared;
    int warp;
    float4 *state; // of groups so far
    RingState<F::kSlots> at{0};
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

/* Works a unit out, and what ends with it. */
template <class C, class F>
__device__ __forceinline__ void attend_few(const FewParams &params, FewWarp<F> &own, const FewJob &of,
                                           const FewUnit &unit) {
    const Few &few = params.call.few;
    const int warp = own.warp;
    const serve::Job job = few_serve_job(params.call, of, unit.head);
    serve::Ring<C> ring{params.serve,           job,
                        own.shared.ring[warp],  own.shared.full[warp],
                        own.shared.valid[warp], job.tiles(unit.begin, unit.end)};
    fill_ring(ring, own.at);
    serve::Rows<C> rows;
    rows.row = own.shared.row[warp];
    rows.queries = reinterpret_cast<typename serve::Rows<C>::Query *>(own.shared.queries[warp]);
    rows.template load_queries<true>(params.serve, job);
    rows.load_sight(params.serve, job);

    serve::Chunk<C> group, chunk;
    group.clear();
#pragma unroll
    for (int r = 0; r < C::kLaneRows; ++r) group.state[r].maximum = -INFINITY;
    const int halves = C::kRowTiles, first_group = job.first / kGroup, step = of.group_slots() * halves,
              slot = of.of.slot + unit.head * of.slots * halves;                                    // of the job
    const auto slot_of = [&](int chunk) { return slot + (chunk - first_group * kGroup) * halves; }; // where cut < 8
    bool opened = false, folded = false; // the group is in registers; groups before it are in the warp's own state
#pragma unroll 1
    for (int k = unit.begin; k < unit.end; ++k) {
        serve::attend_chunk(params.serve, job, ring, rows, own.at, chunk, k);
        const bool opens = k % kGroup == 0 || k == job.first;
        opened |= opens;
        if (!opened) {
            store_few<C>(few_state(few, slot_of(k)), chunk);
            continue;
        }
        group.take(chunk, opens);
        if (of.cut || ((k + 1) % kGroup && k + 1 < job.last)) continue;
        if (folded) {
            load_few<C>(own.state, chunk);
            chunk.take(group, false);
            group = chunk;
        }
        folded = true;
        if (k + 1 < job.last) store_few<C>(own.state, group);
    }
    if (of.cut) {
        const int at = unit.begin / kGroup, here = slot + (at - first_group) * step; // the group, and its slot
        const int begin = max(at * kGroup, job.first), end = min((at + 1) * kGroup, job.last);
        const int units = (end - 1) / of.cut - begin / of.cut + 1, groups = of.groups();
        if (units > 1) {
            if (opened) store_few<C>(few_state(few, here), group);
            if (!few_ends(&few_left(few, here)->group, units)) return;
            const int next = (begin / of.cut + 1) * of.cut; // the first chunk behind the unit that opened the group
            fold_few<C>(few, group, chunk, here, slot_of(next), halves, end - next);
        }
        if (groups > 1) {
            store_few<C>(few_state(few, here), group);
            if (!few_ends(&few_left(few, slot)->job, groups)) return;
            fold_few<C>(few, group, chunk, slot, slot + step, step, groups - 1);
        }
    }
    serve::write_chunk(params.serve, job, group);
}

template <class F>
__global__ void __launch_bounds__(F::kThreads, 1) prefill_few_kernel(const __grid_constant__ FewParams params) {
    FA_CHAOS_BEGIN();
    extern __shared__ __align__(1024) char memory[];
    auto &shared = *reinterpret_cast<FewShared<F> *>(memory);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    if (params.serve.boxes && threadIdx.x == 0)
        tensor_map_prefetch(&params.serve.k_map), tensor_map_prefetch(&params.serve.v_map);
    if (lane < F::kSlots) mbarrier_init(&shared.full[warp][lane], params.serve.boxes ? 1 : 32);
    mbarrier_init_fence();
    __syncwarp();
    dependency_wait();
    dependency_release(); // only now: who is launched behind reads the list without waiting for it
    const Few &few = params.call.few;
    const FewHeader header = *few_header(few);
    const int block = static_cast<int>(blockIdx.x), heads_kv = static_cast<int>(params.call.p.heads_kv);
    if (block >= header.blocks) return;
    FewWarp<F> own{shared, warp, few_state_of_warp(few, block * F::kWarps + warp)};
    uint32_t unit = warp * header.blocks + block;
#pragma unroll 1
    while (unit < header.units) {
        const FewJob of = *few_job(few, find_few(few, unit, header.jobs));
        const FewUnit part = few_unit(of, heads_kv, static_cast<int>(unit - of.of.unit));
        if constexpr (F::Most::kRowTiles > 1) {
            if (of.halves(params.call.group) > 1)
                attend_few<typename F::Most>(params, own, of, part);
            else
                attend_few<typename F::Least>(params, own, of, part);
        } else {
            attend_few<typename F::Least>(params, own, of, part);
        }
        if (lane == 0) unit = header.blocks * F::kWarps + atomicAdd(&few_header(few)->counter, 1u);
        unit = __shfl_sync(~0u, unit, 0);
    }
}

} // namespace fa::sm90::prefill
