/* The bias of the kind kGeneral, and its gradient.
 *
 * TMA brings a bias as tiles of 64 queries x 128 keys, a box of 64 keys for each warpgroup, to a ring of its own beside
 * the steps' Q and dO: two tiles a step at head_dim 64, one at 128. Accumulators have keys as rows: transposed loads of
 * 8 x 8 matrices give each lane the elements that it has scores of.
 *
 * Where the gradient is wanted, dS takes the place of the bias by transposed stores: a warp writes the very elements
 * that it has read. A thread of the producer's warpgroup has TMA store each tile and lets the producer have it again.
 * Sums over the batch or heads are made of what each pair leaves in workspace (bias_sum.cuh).
 *
 * Why no waiter falls two phases behind (see sm90/forward/kernel.cuh): of `full` all warps of the consumers wait, and
 * the thread that stores; its next phase ends after the same phase of `empty`, for which, without the gradient, each of
 * those warps arrives past its own wait, and with it the thread that stores, past its waits for `full` and `done`. For
 * a phase of `done`, which that thread alone waits for, each warp arrives past its wait for `full`. The producer alone
 * waits for `empty`.
 *
 * Why every wait ends: the producer asks for a step's tiles once its Q and dO are on their way, so that a consumer
 * waits for no tile behind a stage that it holds; the tiles that it holds are those of its step and, until they are
 * stored, of the one before. */
#pragma once
#include <climits> // INT_MIN

#include "common/ptx.cuh" // ldmatrix_x4, unpack
#include "sm90/backward/kernel.cuh"

namespace fa::sm90 {

inline constexpr int kBiasStages = 3, kBiasQueries = 64, kBiasKeys = 64; // of the ring; of a box
inline constexpr int kBiasBoxBytes = kBiasQueries * kSlabRowBytes;

template <bool Bias, int Consumers> struct BiasTiles {};
template <int Consumers> struct BiasTiles<true, Consumers> {
    alignas(1024) char box[kBiasStages][Consumers][kBiasBoxBytes]; // a row a query
    int4 at[kBiasStages]; // the first key and query, head and batch; INT_MIN: there are no more
    uint64_t full[kBiasStages], done[kBiasStages], empty[kBiasStages]; // done: dS stands in place of the bias
};

template <class C>
__device__ __forceinline__ void init_bias_barriers(BiasTiles<true, C::kConsumers> &bias, bool stores) {
    for (int stage = 0; stage < kBiasStages; ++stage) {
        mbarrier_init(&bias.full[stage], 1);
        mbarrier_init(&bias.done[stage], C::kConsumers * 4);
        mbarrier_init(&bias.empty[stage], stores ? 1 : C::kConsumers * 4);
    }
}

/* This lane's row of the matrices of a warp's 16 keys and the first 16 queries of a box: those of 8 queries and 8 keys,
 * then of the next 8 keys, then of the next 8 queries. */
__device__ __forceinline__ uint32_t bias_place(int warp, int lane) {
    const int query = lane / 16 * 8 + lane % 8, chunk = 2 * warp + lane / 8 % 2;
    return query * kSlabRowBytes + (chunk ^ lane % 8) * 16;
}

__device__ __forceinline__ void stmatrix_x4_transposed(uint32_t row, uint32_t *r) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(r[0]),
                 "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

/* ---- of a consumer's step: C is FusedConsumer ---- */

/* weigh() of all queries with a bias, and with ALiBi if `Sloped`. */
template <bool Sloped, class C, size_t Ahead>
__device__ __forceinline__ void weigh_biased(C &c, const float4 (&first)[Ahead]) {
    using T = typename C::T;
    const float slope = Sloped ? c.smem.rows[c.stage].slope : 0.0f;
    const float distance = Sloped ? c.first_distance() : 0.0f;
    const uint32_t place = bias_place(c.warp, c.lane);
#pragma unroll
    for (int n = 0; n < C::kTileQ / kBiasQueries; ++n) {
        const int stage = c.bias_ring.stage;
        mbarrier_wait(&c.smem.bias.full[stage], c.bias_ring.parity);
        const uint32_t box = shared_address(c.smem.bias.box[stage][c.wg]) + place;
#pragma unroll
        for (int j = 4 * n; j < 4 * n + 4; ++j) {
            uint32_t words[4];
            ldmatrix_x4<true>(words, box + j % 4 * 16 * kSlabRowBytes);
            const float4 own = j < int(Ahead) ? first[j] : c.lse_of(j);
            const float lse[4] = {own.x, own.y, own.z, own.w};
#pragma unroll
            for (int query = 0; query < 4; ++query) {
                const int column = 16 * j + query / 2 * 8 + query % 2;
                const float2 low = unpack<T>(words[query / 2 * 2]), high = unpack<T>(words[query / 2 * 2 + 1]);
                float less[2] = {lse[query], lse[query]};
                if constexpr (Sloped) {
                    less[0] = fmaf(slope, fabsf(distance + float(column)), less[0]);
                    less[1] = fmaf(slope, fabsf(distance + float(column - 8)), less[1]);
                }
                float *const score = c.scores + 8 * j + query / 2 * 4 + query % 2;
#pragma unroll
                for (int r = 0; r < 2; ++r) { // toward zero, as add_bias(): what is finite remains so
                    const float2 of = r ? high : low;
                    const float rest = __fmaf_rz(query % 2 ? -of.y : -of.x, kLog2E, less[r]);
                    score[2 * r] = weight_of(score[2 * r], c.p.call.score.scale_log2, rest);
                }
            }
        }
        if (!c.general().stores_bias) warp_arrive(&c.smem.bias.empty[stage], c.lane);
        c.bias_ring.advance();
    }
}

/* A step's dS in place of its bias. The warp's reads of that lie behind it; a fence follows, then pass_bias(). */
template <class C> __device__ __forceinline__ void leave_bias(C &c) {
    if (!c.general().stores_bias) return;
    const uint32_t place = bias_place(c.warp, c.lane);
    int stage = c.first_bias_stage();
#pragma unroll
    for (int n = 0; n < C::kTileQ / kBiasQueries; ++n) {
        const uint32_t box = shared_address(c.smem.bias.box[stage][c.wg]) + place;
#pragma unroll
        for (int j = 0; j < 4; ++j) stmatrix_x4_transposed(box + j * 16 * kSlabRowBytes, c.words + 16 * n + 4 * j);
        stage = stage + 1 == kBiasStages ? 0 : stage + 1;
    }
}
template <class C> __device__ __forceinline__ void pass_bias(C &c) {
    if (!c.general().stores_bias) return;
    int stage = c.first_bias_stage();
#pragma unroll
    for (int n = 0; n < C::kTileQ / kBiasQueries; ++n) {
        warp_arrive(&c.smem.bias.done[stage], c.lane);
        stage = stage + 1 == kBiasStages ? 0 : stage + 1;
    }
}

/* ---- of the producer's warpgroup ---- */

/* Stores each tile that the consumers have left dS in. One thread. */
template <class C, class Params, class Smem>
__device__ __forceinline__ void store_bias_tiles(const Params &p, Smem &smem) {
    auto &bias = smem.bias;
    for (RingState<kBiasStages> ring{0};; ring.advance()) {
        mbarrier_wait(&bias.full[ring.stage], ring.parity);
        const int4 at = bias.at[ring.stage];
        if (at.x == INT_MIN) break;
        mbarrier_wait(&bias.done[ring.stage], ring.parity);
        for (int wg = 0; wg < C::kConsumers; ++wg)
            tma_store(&p.dbias, bias.box[ring.stage][wg], at.x + wg * kBiasKeys, at.y, at.z, at.w - p.bias_first);
        tma_store_commit();
        tma_store_wait_read();
        mbarrier_arrive(&bias.empty[ring.stage]);
    }
    tma_store_wait();
}

} // namespace fa::sm90
