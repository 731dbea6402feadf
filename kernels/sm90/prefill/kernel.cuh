/* prefill_sm90: the persistent kernel. The warps of the first warpgroup fetch queries and keys, fetch values, hand out
 * tiles, and write rows without a query and count bad pages; the other warpgroups have 64 rows each.
 *
 * Why no waiter falls two phases behind. A wait names a parity, so a barrier that has moved on by two phases looks as
 * if it had not moved. So no phase of a barrier may end before all threads that wait for the phase before have passed:
 *
 *   k_full, v_full, q_full: all warps of the consumers wait. The next phase ends after the arrival of the warp that
 *   fetches, and that after its wait for `empty`. There one thread a warpgroup arrives, when its four warps have passed
 *   `full`: where the block is multiplied, wgmma has joined them (as in wgmma_sm90: PTX does not promise it), and where
 *   it is skipped, join_warps() has. Queries that are changed in place are changed between q_full and join_warps().
 *
 *   k_empty, v_empty, q_empty: one warp waits, and its own arrival on `full`, after __syncwarp(), allows what follows.
 *
 *   v_landed: only the warp that fetches values waits, and it arrives there itself the next time, after __syncwarp().
 *
 *   tile_full: all warps of the consumers and the two that fetch wait. The scheduler arrives after its wait for
 *   tile_empty, where each of those warps arrives for itself. tile_empty: only the scheduler waits.
 *
 *   Turns, named barriers 1 to kConsumers: a warpgroup arrives for its neighbour again after a turn of its own. That
 *   turn has come round through the neighbour, all of whose warps had left the barrier to pass it on. Each warpgroup
 *   has one turn for each block of a tile but the first, whether it multiplies it or not.
 *
 *   join_warps, the named barriers above those: only the warpgroup's own 128 threads, and all of them wait.
 *
 * hidden[] has twice as many slots as there are stages: a slot is written again when the block that has its stage next
 * is free, and so multiplied, by four warps that have read the slot before. */
#pragma once
#include "sm90/common/cluster.cuh" // dependency_wait
#include "sm90/prefill/consume.cuh"
#include "sm90/prefill/load.cuh"
#include "sm90/prefill/schedule.cuh"
#include "sm90/prefill/side.cuh"

namespace fa::sm90::prefill {

template <class C> __device__ __forceinline__ void init(const Params &params, Smem<C> &smem) {
    tensor_map_prefetch(&params.q);
    tensor_map_prefetch(&params.q_heads);
    tensor_map_prefetch(&params.k);
    tensor_map_prefetch(&params.v);
    if (C::kStaged) tensor_map_prefetch(&params.out_map);
    for (int stage = 0; stage < C::kQueryStages; ++stage)
        for (int consumer = 0; consumer < C::kConsumers; ++consumer) {
            mbarrier_init(&smem.q_full[stage][consumer], 1);
            mbarrier_init(&smem.q_empty[stage][consumer], 1);
        }
    for (int stage = 0; stage < Smem<C>::kTileStages; ++stage) {
        mbarrier_init(&smem.tile_full[stage], 1);
        mbarrier_init(&smem.tile_empty[stage], C::kConsumers * 4 + 2);
    }
    for (int stage = 0; stage < C::kStages; ++stage) {
        mbarrier_init(&smem.k_full[stage], 1);
        mbarrier_init(&smem.v_full[stage], 1);
        mbarrier_init(&smem.k_empty[stage], C::kConsumers);
        mbarrier_init(&smem.v_empty[stage], C::kConsumers);
    }
    mbarrier_init(&smem.v_landed, 1);
    mbarrier_init_fence();
}

template <class C>
__global__ void __launch_bounds__(128 * (C::kConsumers + 1), 1)
    prefill_sm90_kernel(const __grid_constant__ Params params) {
    FA_CHAOS_BEGIN();
    extern __shared__ __align__(1024) char raw[];
    auto &smem = *reinterpret_cast<Smem<C> *>(raw);
    const int wg = __shfl_sync(0xffffffff, threadIdx.x / 128, 0); // uniform for the compiler too
    if (threadIdx.x == 0) init(params, smem);
    if (threadIdx.x < sizeof smem.hidden / 4) (&smem.hidden[0][0])[threadIdx.x] = 0;
    __syncthreads();
    const bool beside = params.call.few.rows > 0; // serve_listed_kernel, which starts behind a list that is complete
    if (!beside) dependency_release();
    dependency_wait(); // what the sequences are, and all that the kernels before wrote
    if (beside) dependency_release();

    if (wg == 0) {
        registers_lower<C::kProducerRegisters>();
        const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
        const bool boxes = params.box_rows > 0;
        if (warp == 0) boxes ? produce_keys<C, false>(params, smem) : produce_keys<C, true>(params, smem);
        if (warp == 1) boxes ? produce_values<C, false>(params, smem) : produce_values<C, true>(params, smem);
        if (warp == 2) schedule(params, smem);
        if (warp == 3) attend_to_the_rest(params.call);
    } else {
        registers_raise<C::kConsumerRegisters>();
        consume<C>(params, smem, wg - 1);
    }
}

} // namespace fa::sm90::prefill
