/* Instances of wgmma_fused_backward_sm90 and wgmma_dropout_backward_sm90: the kernels of a head_dim, kind and dtype. */
#include "common/launch.cuh"
#include "sm90/fused_backward/kernel.cuh"
#include "sm90/fused_backward/light_steps.cuh"
#include <type_traits> // conditional_t

namespace fa::sm90 {
namespace {

template <class C> fa_code launch_fused(const FusedWork &work, const fa_launch &launch) {
    static_assert(sizeof(FusedSmem<C>) <= 227 * 1024, "shared memory of a block");
    using T = typename C::Element;
    constexpr int kHeadDim = C::kHeadDim, kTileQ = C::kTileQ;
    const auto run = [&](auto rows, const auto &rows_params, auto fused, const auto &fused_params, auto finish,
                         const auto &finish_params) {
        FA_TRY(fa_start(rows, work.query_blocks * (kTileQ / kFusedRowsQueries), kFusedRowsThreads, 0, launch,
                        rows_params));
        if constexpr (C::kLight)
            FA_TRY(fa_start(light_steps<kTileQ>, (work.steps.tiles + kLightStepsWarps - 1) / kLightStepsWarps,
                            32 * kLightStepsWarps, 0, launch, work.steps));
        FA_TRY(fa_start(fused, work.key_blocks, 128 * (C::kConsumers + 1), sizeof(FusedSmem<C>), launch, fused_params));
        return fa_start(finish, work.finish_blocks, kFusedFinishThreads, 0, launch, finish_params);
    };
    if constexpr (C::kSequences) {
        static_assert(C::kOrdered);
        using Rows = OrderedRowsParams;
        using Fused = OrderedFusedParams;
        return run(fused_rows_of_sequences<T, kHeadDim, kTileQ, Rows>, OfSequences<Rows>{work.rows, work.row_list},
                   backward_fused_of_sequences<C, Fused>, OfSequences<Fused>{work.fused, work.key_list},
                   fused_finish_of_sequences<T, kHeadDim, kTileQ>,
                   OfSequences<FusedFinishParams>{work.finish, work.row_list});
    } else {
        constexpr auto kFinish = fused_finish<T, kHeadDim, kTileQ>;
        if constexpr (C::kBias)
            return run(fused_rows_light<T, kHeadDim, kTileQ>, work.rows, backward_fused_general<C>, work.fused,
                       fused_finish_light<T, kHeadDim, kTileQ>, work.finish);
        else if constexpr (C::kLight)
            return run(fused_rows_light<T, kHeadDim, kTileQ>, work.rows, backward_fused_light<C>, work.fused,
                       fused_finish_light<T, kHeadDim, kTileQ>, work.finish);
        else if constexpr (C::kDropout)
            return run(fused_rows_dropout<T, kHeadDim, kTileQ>, work.rows, backward_fused_dropout<C>, work.fused,
                       kFinish, work.finish);
        else if constexpr (C::kOrdered)
            return run(fused_rows_ordered<T, kHeadDim, kTileQ>, work.rows, backward_fused_ordered<C>, work.fused,
                       kFinish, work.finish);
        else
            return run(fused_rows<T, kHeadDim, kTileQ>, work.rows, backward_fused<C>, work.fused, kFinish, work.finish);
    }
}

} // namespace

#define FA_DEFINE(name, Config, head_dim, kind, T)                                                                     \
    extern "C" Launch name;                                                                                            \
    fa_code name(const FusedWork &work, const fa_launch &launch) {                                                     \
        return launch_fused<Config<T, head_dim, kind>>(work, launch);                                                  \
    }
FA_INSTANCES(FA_DEFINE)

} // namespace fa::sm90
