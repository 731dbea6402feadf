/* serve_sm90: jobs of 9 to 64 rows. One warpgroup, the block, takes tiles of 64 keys by wgmma:
 *
 *     S (rows x keys) = Q K^T         P = 2^(S - shift)         O (rows x columns) += P V
 *
 * A thread has the rows lane / 4 + 8 {0, 1} of its warp's 16, and of them what softmax.cuh and wgmma.cuh say. Products
 * and weights of a block take turns: two blocks on a multiprocessor wait for memory longer than they compute.
 */
#pragma once
#include "sm90/common/softmax.cuh"
#include "sm90/common/wgmma.cuh"
#include "sm90/serve/fold.cuh"
#include "sm90/serve/thin_load.cuh"

namespace fa::sm90::serve {

/* The rows of a warp. */
struct ThinRows {
    const LaneRow *own;           // the thread's first row, the other is 8 further on
    int common_begin, common_end; // keys that every row of the warp sees
    bool any;                     // the warp has rows
};

/* Q to shared memory, K-major, zeros beyond its rows and columns. By the block. */
template <class C> __device__ __forceinline__ void load_thin_queries(const Params &params, const Job &job, char *to) {
    using T = typename C::T;
    constexpr int kPieces = C::kColumns / 8; // 16 bytes of a row
    const AttentionParams &p = params.call.p;
#pragma unroll 4
    for (int n = threadIdx.x; n < kThinRows * kPieces; n += C::kThreads) {
        const int row = n / kPieces, piece = n % kPieces;
        uint4 x = make_uint4(0, 0, 0, 0);
        if (row < job.count && piece * 8 < p.head_dim) {
            const RowPlace at = row_place(params, job, row);
            x = *reinterpret_cast<const uint4 *>(row_of<T>(p.q, at.batch, at.head, job.first_out + at.query) +
                                                 piece * 8);
        }
        *reinterpret_cast<uint4 *>(to + piece / 8 * Thin<C>::kQuerySlabBytes + row * 128 + (piece ^ row) % 8 * 16) = x;
    }
    tma_store_fence(); // the products read it
}

/* By the whole warp, of its 16 rows. */
__device__ __forceinline__ ThinRows load_thin_sight(const Params &params, const Job &job, LaneRow *row) {
    const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * 16;
    ThinRows rows = {row + first + lane / 4, 0, INT32_MAX, first < job.count};
    LaneRow mine = {0, 0, 0, 0.0f};
    if (lane < 16 && first + lane < job.count) {
        mine = sight_of(params, job, first + lane);
        rows.common_begin = mine.begin, rows.common_end = mine.end;
    }
    if (lane < 16) row[first + lane] = mine;
    __syncwarp();
    rows.common_begin = __reduce_max_sync(~0u, rows.common_begin);
    rows.common_end = __reduce_min_sync(~0u, rows.common_end);
    return rows;
}

/* A chunk of 64 rows that is worked out tile by tile, or a group of chunks. */
template <class C> struct ThinChunk {
    using T = typename C::T;
    using Scores = float[kThinKeys / 2];
    float out[C::kColumns / 2];
    RowState state[2]; // as in Chunk

    __device__ __forceinline__ void clear(float maximum) {
#pragma unroll
        for (int i = 0; i < C::kColumns / 2; ++i) out[i] = 0.0f;
#pragma unroll
        for (int r = 0; r < 2; ++r) state[r].maximum = maximum, state[r].sum = 0.0f;
    }

    /* As Chunk::score(). */
    static __device__ __forceinline__ void score(Scores &s, const Params &params, const ThinRows &rows, int first,
                                                 uint64_t valid) {
        constexpr int kScores = kThinKeys / 2;
        const int lane_column = 2 * (threadIdx.x % 4);
        if (params.score.cap_log2 > 0) {
#pragma unroll
            for (int i = 0; i < kScores; ++i)
                s[i] = __fmul_rn(params.score.cap_log2, tanhf(__fmul_rn(s[i], params.score.scale_cap)));
        } else {
#pragma unroll
            for (int i = 0; i < kScores; ++i) s[i] = round_score(s[i], params.score.scale_log2);
        }
        if (params.call.alibi.data) {
            const LaneRow own[2] = {rows.own[0], rows.own[8]};
#pragma unroll
            for (int i = 0; i < kScores; ++i)
                s[i] = add_alibi(s[i], own[i / 2 % 2], first + i / 4 * 8 + lane_column + i % 2);
        }
        if (first < rows.common_begin || first + kThinKeys > rows.common_end) {
            const int low[2] = {rows.own[0].begin - first, rows.own[8].begin - first},
                      high[2] = {rows.own[0].end - first, rows.own[8].end - first};
            mask_scores(s, low, high, lane_column);
        }
        if (~valid) {
            const uint64_t mine = valid >> lane_column;
#pragma unroll
            for (int i = 0; i < kScores; ++i) s[i] = mine >> (i / 4 * 8 + i % 2) & 1 ? s[i] : -INFINITY;
        }
    }

    /* As Chunk::soften(). */
    __device__ __forceinline__ void soften(Scores &s) {
        constexpr int kScores = kThinKeys / 2;
        float highest[2];
        bool outgrown = false;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            highest[r] = fmaxf(s[2 * r], s[2 * r + 1]);
#pragma unroll
            for (int i = 4 + 2 * r; i < kScores; i += 4) highest[r] = fmaxf(highest[r], fmaxf(s[i], s[i + 1]));
            outgrown |= __fsub_rn(highest[r], state[r].maximum) > 8.0f;
        }
        if (__any_sync(~0u, outgrown)) {
            float factor[2];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float top = quad_max(highest[r]), old = state[r].maximum,
                            raised = __fsub_rn(top, old) > 8.0f ? top : old;
                factor[r] = exp2_fast(__fsub_rn(old, raised));
                state[r].maximum = raised, state[r].sum = __fmul_rn(state[r].sum, factor[r]);
            }
#pragma unroll
            for (int i = 0; i < C::kColumns / 2; ++i) out[i] = __fmul_rn(out[i], factor[i / 2 % 2]);
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float sum[2] = {0.0f, 0.0f}; // half as many additions wait for each other
#pragma unroll
            for (int i = 2 * r; i < kScores; i += 4)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    s[i + e] = exp2_fast(__fsub_rn(s[i + e], state[r].maximum));
                    sum[e] = __fadd_rn(sum[e], s[i + e]);
                }
            state[r].sum = __fadd_rn(state[r].sum, __fadd_rn(sum[0], sum[1]));
        }
    }

    /* The sums of whole rows, in every thread that holds the row. */
    __device__ __forceinline__ void close() {
#pragma unroll
        for (int r = 0; r < 2; ++r) state[r].sum = quad_sum(state[r].sum);
    }

    /* this = fold(this, other), or other. */
    __device__ __forceinline__ void take(const ThinChunk &other, bool first) {
        Factors f[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            if (first)
                state[r] = other.state[r];
            else
                f[r] = fold_state(state[r], other.state[r].maximum, other.state[r].sum);
        }
#pragma unroll
        for (int i = 0; i < C::kColumns / 2; ++i)
            out[i] = first ? other.out[i] : fold_value(out[i], other.out[i], f[i / 2 % 2]);
    }

    /* The thread's pair of rows in workspace, if they are of the job. */
    static __device__ __forceinline__ int pair() { return threadIdx.x / 32 * 8 + threadIdx.x % 32 / 4; }

    __device__ __forceinline__ void leave(const Slots<C> &slots, int slot) const {
        if (pair() >= slots.pairs) return;
        const int column = 2 * (threadIdx.x % 4);
#pragma unroll
        for (int unit = 0; unit < C::kUnits; ++unit) {
            const float *x = out + 4 * unit;
            *reinterpret_cast<float4 *>(slots.value(slot, unit, pair()) + column) = make_float4(x[0], x[2], x[1], x[3]);
        }
        if (column == 0)
            *slots.state(slot, pair()) = make_float4(state[0].maximum, state[0].sum, state[1].maximum, state[1].sum);
    }

    /* this = fold(what the slot has, this). By the warp that left it; threads of no rows read those of the first. */
    __device__ __forceinline__ void join(const Slots<C> &slots, int slot) {
        __syncwarp();
        const int from = pair() < slots.pairs ? pair() : 0;
        const float4 left = *slots.state(slot, from);
        RowState total[2];
        total[0].maximum = left.x, total[0].sum = left.y, total[1].maximum = left.z, total[1].sum = left.w;
        Factors f[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) f[r] = fold_state(total[r], state[r].maximum, state[r].sum), state[r] = total[r];
#pragma unroll
        for (int unit = 0; unit < C::kUnits; ++unit) {
            const float4 x = *reinterpret_cast<const float4 *>(slots.value(slot, unit, from) + 2 * (threadIdx.x % 4));
            float *to = out + 4 * unit;
            to[0] = fold_value(x.x, to[0], f[0]), to[1] = fold_value(x.z, to[1], f[0]);
            to[2] = fold_value(x.y, to[2], f[1]), to[3] = fold_value(x.w, to[3], f[1]);
        }
        __syncwarp(); // the state has been read before it is left again
    }

    /* Writes a job of which this is all. */
    __device__ __forceinline__ void write(const Params &params, const Job &job) const {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int index = job.row_of_pair(pair(), r);
            if (index >= job.count) continue;
            const RowPlace row = row_place(params, job, index);
            const RowResult result = finish(params, row, state[r]);
            char *const to = row_out<T>(params, job, row);
            if (threadIdx.x % 4 == 0)
                store_lse(params.call.p, row.batch, row.head, job.first_out + row.query, result.lse);
#pragma unroll
            for (int i = 2 * r; i < C::kColumns / 2; i += 4)
                store_two<T>(params, to, i / 4 * 8 + 2 * (threadIdx.x % 4), scaled(out[i], result),
                             scaled(out[i + 1], result));
        }
    }
};

/* The same in every thread, for the compiler too: it keeps what follows from it in registers of the warp, where the
 * products and TMA want addresses. */
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(~0u, x, 0); }
__device__ __forceinline__ Tiles uniform(const Tiles &x) { return {uniform(x.next), uniform(x.end)}; }

/* Works out a chunk, whose first tiles are on their way. */
template <class C>
__device__ __forceinline__ void attend_thin_chunk(const Params &params, const Job &job, ThinRing<C> &ring,
                                                  const ThinRows &rows, uint32_t queries,
                                                  typename ThinRing<C>::State &at, typename ThinRing<C>::State &values,
                                                  bool &any, ThinChunk<C> &chunk, int k) {
    using T = typename C::T;
    using S = Thin<C>;
    const Tiles tiles = uniform(job.tiles(k, k + 1, kThinKeysLog2));
    chunk.clear(kNoShift);
#pragma unroll 1
    for (int tile = tiles.next; tile < tiles.end; ++tile) {
        typename ThinChunk<C>::Scores s;
        uint32_t weights[kThinKeys / 4];
        ring.wait(at);
        const uint64_t valid = ring.valid(at);
        wgmma_fence();
        gemm_qk<T, C::kColumns>(s, queries, S::kQuerySlabBytes, shared_address(ring.slot(at.stage)), S::kSlabBytes);
        wgmma_commit();
        if (any) ring.refill_values(values);
        wgmma_wait<0>();
        wgmma_pin(s);
        ring.release(at);
        const typename ThinRing<C>::State keys = at;
        at.advance();
        if (rows.any) {
            chunk.score(s, params, rows, tile * kThinKeys, valid);
            chunk.soften(s);
            pack_scores<T>(weights, s);
        } else {
#pragma unroll
            for (int i = 0; i < kThinKeys / 4; ++i) weights[i] = 0;
        }
        ring.wait(at);
        if (~valid) ring.clear_rows(at, valid);
        wgmma_pin(weights);
        wgmma_pin(chunk.out);
        wgmma_fence();
        gemm_pv<T>(chunk.out, weights, shared_address(ring.slot(at.stage)), S::kSlabBytes, 1);
        wgmma_commit();
        ring.refill_keys(keys);
        wgmma_wait<0>();
        wgmma_pin(chunk.out);
        ring.release(at);
        values = at, any = true;
        at.advance();
    }
    chunk.close();
}

/* Works out the chunks [begin, end) of a job; leaves their states, or where they are all of it writes what they make.
 * The groups of a whole job are folded one after the other in slot 0, since registers hold a group and a chunk. */
template <class C>
__device__ __forceinline__ void attend_thin(const Params &params, const Job &job, ThinRing<C> &ring,
                                            const ThinRows &rows, uint32_t queries, const Slots<C> &slots, int begin,
                                            int end, bool whole) {
    ThinChunk<C> group, chunk;
    group.clear(-INFINITY);
    int opened = -1; // the group's first chunk, if it is open
    bool folds = false;
    typename ThinRing<C>::State at(0), values(0);
    bool any = false;
    begin = uniform(begin), end = uniform(end), queries = uniform(static_cast<int>(queries));
    const auto close_group = [&] {
        if (folds) group.join(slots, 0);
        if (!whole) group.leave(slots, opened - job.first);
    };
#pragma unroll 1
    for (int k = begin; k < end; ++k) {
        attend_thin_chunk(params, job, ring, rows, queries, at, values, any, chunk, k);
        const bool opens = k % kGroup == 0 || k == job.first;
        if (opened >= 0 && opens) {
            close_group();
            if (whole) group.leave(slots, 0), folds = true;
            opened = -1;
        }
        if (opens) opened = k;
        if (opened >= 0)
            group.take(chunk, opens);
        else
            chunk.leave(slots, k - job.first);
    }
    if (opened >= 0) close_group();
    if (whole) group.write(params, job);
}

/* A block's part of a thin job. */
template <class C>
__device__ __forceinline__ void thin_part(const Params &params, const Job &found, Thin<C> &shared, char *ring_memory,
                                          const Slots<C> &slots, int begin, int end, bool whole) {
    if (threadIdx.x == 0) shared.job = found;
    __syncthreads();
    const Job &job = shared.job;
    ThinRing<C> ring{params,
                     job,
                     ring_memory,
                     shared,
                     uniform(job.tiles(begin, end, kThinKeysLog2)),
                     uniform(static_cast<int>(threadIdx.x / 32))};
    char *queries = ring_memory + Thin<C>::kRingBytes;
    ring.init();
    if (!params.call.s.given) dependency_wait();
    ring.fill();
    load_thin_queries<C>(params, job, queries);
    const ThinRows rows = load_thin_sight(params, job, shared.row);
    __syncthreads();
    attend_thin(params, job, ring, rows, shared_address(queries), slots, begin, end, whole);
}

} // namespace fa::sm90::serve
