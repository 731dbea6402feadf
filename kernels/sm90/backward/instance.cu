/* Instances of wgmma_backward_sm90: the two kernels of a head_dim, kind and dtype. */
#include "common/launch.cuh"
#include "sm90/backward/config.cuh"

namespace fa::sm90 {
namespace {

template <class C, class Smem, class Params>
fa_code start(void (*kernel)(Params), const Params &params, int64_t blocks, const fa_launch &launch) {
    static_assert(sizeof(Smem) <= 227 * 1024, "shared memory of a block");
    return fa_start(kernel, blocks, 128 * (C::kConsumers + 1), sizeof(Smem), launch, params);
}

template <class C> fa_code start_keys(const BackwardWork &work, const fa_launch &launch) {
    if constexpr (C::kRoles)
        return start<C, WideKeysSmem<C>>(backward_keys_wide<C>, work.keys, work.key_blocks, launch);
    else if constexpr (C::kPair)
        return start<C, KeysSmem<C>>(backward_keys_pair<C>, work.keys, work.key_blocks, launch);
    else
        return start<C, KeysSmem<C>>(backward_keys<C>, work.keys, work.key_blocks, launch);
}

template <class T, int HeadDim, int HeadDimV, int Kind>
fa_code launch_backward(const BackwardWork &work, const fa_launch &launch) {
    using Queries = QueriesConfig<T, HeadDim, HeadDimV, Kind>;
    using Keys = KeysConfig<T, HeadDim, HeadDimV, Kind>;
    FA_TRY((start<Queries, QueriesSmem<Queries>>(backward_queries<Queries>, work.queries, work.query_blocks, launch)));
    return start_keys<Keys>(work, launch);
}

} // namespace

#define FA_DEFINE(name, head_dim, head_dim_v, kind, T)                                                                 \
    extern "C" Launch name;                                                                                            \
    fa_code name(const BackwardWork &work, const fa_launch &launch) {                                                  \
        return launch_backward<T, head_dim, head_dim_v, kind>(work, launch);                                           \
    }
FA_INSTANCES(FA_DEFINE)

} // namespace fa::sm90
