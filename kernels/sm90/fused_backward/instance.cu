/* Instances of wgmma_fused_backward_sm90 and wgmma_dropout_backward_sm90: the kernels of a head_dim, kind and dtype. */
#include "common/launch.cuh"
#include "sm90/fused_backward/kernel.cuh"

namespace fa::sm90 {
namespace {

template <class C> fa_code launch_fused(const FusedWork &work, const fa_launch &launch) {
    static_assert(sizeof(FusedSmem<C>) <= 227 * 1024, "shared memory of a block");
    using T = typename C::Element;
    const auto run = [&](auto rows, auto fused) {
        constexpr auto kFinish = fused_finish<T, C::kHeadDim, C::kTileQ>;
        FA_TRY(fa_start(rows, work.query_blocks * (C::kTileQ / kFusedRowsQueries), kFusedRowsThreads, 0, launch,
                        work.rows));
        FA_TRY(fa_start(fused, work.key_blocks, 128 * (C::kConsumers + 1), sizeof(FusedSmem<C>), launch, work.fused));
        return fa_start(kFinish, work.finish_blocks, kFusedFinishThreads, 0, launch, work.finish);
    };
    if constexpr (C::kDropout)
        return run(fused_rows_dropout<T, C::kHeadDim, C::kTileQ>, backward_fused_dropout<C>);
    else if constexpr (C::kOrdered)
        return run(fused_rows_ordered<T, C::kHeadDim, C::kTileQ>, backward_fused_ordered<C>);
    else
        return run(fused_rows<T, C::kHeadDim, C::kTileQ>, backward_fused<C>);
}

} // namespace

#define FA_DEFINE(name, Config, head_dim, kind, T)                                                                     \
    extern "C" Launch name;                                                                                            \
    fa_code name(const FusedWork &work, const fa_launch &launch) {                                                     \
        return launch_fused<Config<T, head_dim, kind>>(work, launch);                                                  \
    }
FA_INSTANCES(FA_DEFINE)

} // namespace fa::sm90
