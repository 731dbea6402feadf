/* The Hopper forward kernel: one producer warp, C::kConsumers warpgroups of 64 query rows each, persistent CTAs.
 *
 * The producer fills rings of key and value blocks and each warpgroup's own queries by TMA. A warpgroup computes
 * S = Q K^T into registers, turns it into weights there, and feeds them back as the A operand of O += P V:
 *
 *     issue S(b) = Q K(b), then O += P(b-1) V(b-1)
 *     wait for S(b); P(b) = weights of S(b)       with C::kOverlap under the second product
 *     wait for O; where S(b) outgrew the maximum: rescale O
 *
 * With C::kTurns the warpgroups issue their products in turns, so that one's run under another's exponentials. The
 * instruction path of one warpgroup is the limit (sm90/common/softmax.cuh shortens it), then power. In short sequences
 * the costs of a tile besides its blocks count: on an H200 at head_dim 128 some 390 cycles to its first product,
 * 590 for that, 1500 for the first weights, 700 for the last product and 1000 for the output; a block takes 2090.
 *
 * In the light kinds (sm90/score/light.cuh) the producer reads which blocks a tile has from a list and tells each
 * beside its stage of keys: its first key, which warpgroups see some of it, for which some pairs are hidden, and
 * whether it is the last. A warpgroup skips blocks before the first that it sees; of later ones that another sees it
 * computes all, hidden.
 *
 * Why no waiter falls two phases behind. A wait names a parity, so a barrier that has moved on by two phases looks as
 * if it had not moved, and the waiting thread then waits for ever. So no phase of a barrier may end before all
 * threads that wait for the phase before it have passed:
 *
 *   k_full, v_full, q_full: all warps of the consumers wait. The next phase ends after the producer's arrive_expect,
 *   and that after its wait for `empty`. There one thread a warpgroup arrives, when its four warps have passed `full`:
 *   where the block is multiplied, wgmma has joined them (it runs once all four warps have issued it, and is done
 *   when it has read for all four; PTX does not promise that, CUTLASS and FlashAttention-3 rely on it too), and where
 *   the block is skipped, join_warps() has.
 *
 *   k_empty, v_empty, q_empty, tile_empty: only the producer's thread waits, and its own arrival allows what follows.
 *   In the light kinds each warp arrives at k_empty for itself, past its read of the block's word.
 *
 *   tile_full: all warps of the consumers wait. The producer waits for tile_empty, where each warp arrives for itself.
 *
 *   Turns, named barriers 1 to kConsumers: a warpgroup arrives for its neighbour again after a turn of its own. That
 *   turn has come round through the neighbour, all of whose warps had left the barrier to pass it on.
 *
 *   join_warps, the named barriers above those: only the warpgroup's own 128 threads, and all of them wait.
 *
 * Shared memory, 16-bit, swizzled: queries [stage][warpgroup][slab][64][64], keys and values [stage][slab][tile_n][64],
 * with C::kStaged the output [warpgroup][warp][slab][16][64].
 */
#pragma once
#include "sm90/forward/consume.cuh"
#include "sm90/forward/load.cuh"

namespace fa::sm90 {

template <class C, class Params> __device__ __forceinline__ void forward_block(const Params &p) {
    FA_CHAOS_BEGIN();
    extern __shared__ __align__(1024) char raw[];
    auto &smem = *reinterpret_cast<ForwardSmem<C> *>(raw);
    const int wg = __shfl_sync(0xffffffff, threadIdx.x / 128, 0); // uniform for the compiler too

    if (threadIdx.x == 0) {
        tensor_map_prefetch(&p.q);
        tensor_map_prefetch(&p.k);
        tensor_map_prefetch(&p.v);
        if (C::kStaged) tensor_map_prefetch(&p.out_map);
        for (int stage = 0; stage < C::kQueryStages; ++stage)
            for (int consumer = 0; consumer < C::kConsumers; ++consumer) {
                mbarrier_init(&smem.q_full[stage][consumer], 1);
                mbarrier_init(&smem.q_empty[stage][consumer], 1);
            }
        for (int stage = 0; stage < ForwardSmem<C>::kTileStages; ++stage) {
            mbarrier_init(&smem.tile_full[stage], 1);
            mbarrier_init(&smem.tile_empty[stage], C::kConsumers * 4);
        }
        for (int stage = 0; stage < C::kStages; ++stage) {
            mbarrier_init(&smem.k_full[stage], 1);
            mbarrier_init(&smem.v_full[stage], 1);
            mbarrier_init(&smem.k_empty[stage], C::kLight ? C::kConsumers * 4 : C::kConsumers);
            mbarrier_init(&smem.v_empty[stage], C::kConsumers);
        }
        mbarrier_init_fence();
        if constexpr (C::kDropout) smem.dropout.words = fa_dropout_read(&p.dropout);
    }
    __syncthreads();

    if (wg == 0) {
        registers_lower<C::kProducerRegisters>();
        if (threadIdx.x / 32 == 0 && elect_one()) forward_produce<C>(p, smem);
    } else {
        registers_raise<C::kConsumerRegisters>();
        forward_consume<C>(p, smem, wg - 1);
    }
}

template <class C>
__global__ void __launch_bounds__(128 * (C::kConsumers + 1), 1) forward(const __grid_constant__ ForwardParams p) {
    forward_block<C>(p);
}
template <class C>
__global__ void __launch_bounds__(128 * (C::kConsumers + 1), 1)
    forward_dropout(const __grid_constant__ DropoutForwardParams p) {
    forward_block<C>(p);
}
template <class C>
__global__ void __launch_bounds__(128 * (C::kConsumers + 1), 1)
    forward_light(const __grid_constant__ LightForwardParams p) {
    forward_block<C>(p);
}

} // namespace fa::sm90
