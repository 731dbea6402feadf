/* Instances of wgmma_backward_sm90: the two kernels of a head_dim, kind and dtype. */
#include "common/launch.cuh"
#include "sm90/backward/config.cuh"

namespace fa::sm90 {
namespace {

template <class C, class Smem, class Params>
fa_code start(void (*kernel)(Params), const Params &params, int64_t blocks, const fa_launch &launch) {
#ifdef FA_CHAOS
    constexpr size_t kCounts = 1024; // of the chaos build, from a multiple of 1024 on
#else
    constexpr size_t kCounts = 0;
#endif
    static_assert(sizeof(Smem) + kCounts <= 227 * 1024, "shared memory of a block");
    return fa_start(kernel, blocks, 128 * (C::kConsumers + 1), sizeof(Smem), launch, params);
}

template <class C> fa_code start_queries(const BackwardWork &work, const fa_launch &launch) {
    using Smem = QueriesSmem<C>;
    if constexpr (C::kSequences)
        return start<C, Smem>(backward_queries_of_sequences<C>, work.queries, work.query_blocks, launch);
    else
        return start<C, Smem, QueriesParams>(backward_queries<C>, work.queries, work.query_blocks, launch);
}

template <class C> fa_code start_keys(const BackwardWork &work, const fa_launch &launch) {
    if constexpr (C::kSequences && C::kRoles)
        return start<C, WideKeysSmem<C>>(backward_keys_wide_of_sequences<C>, work.keys, work.key_blocks, launch);
    else if constexpr (C::kSequences && C::kPair)
        return start<C, KeysSmem<C>>(backward_keys_pair_of_sequences<C>, work.keys, work.key_blocks, launch);
    else if constexpr (C::kSequences)
        return start<C, KeysSmem<C>>(backward_keys_of_sequences<C>, work.keys, work.key_blocks, launch);
    else if constexpr (C::kRoles)
        return start<C, WideKeysSmem<C>, KeysParams>(backward_keys_wide<C>, work.keys, work.key_blocks, launch);
    else if constexpr (C::kPair)
        return start<C, KeysSmem<C>, KeysParams>(backward_keys_pair<C>, work.keys, work.key_blocks, launch);
    else
        return start<C, KeysSmem<C>, KeysParams>(backward_keys<C>, work.keys, work.key_blocks, launch);
}

template <class T, int HeadDim, int HeadDimV, int Kind, bool Sequences>
fa_code launch_backward(const BackwardWork &work, const fa_launch &launch) {
    FA_TRY((start_queries<QueriesConfig<T, HeadDim, HeadDimV, Kind, Sequences>>(work, launch)));
    return start_keys<KeysConfig<T, HeadDim, HeadDimV, Kind, Sequences>>(work, launch);
}

} // namespace

#define FA_DEFINE(name, head_dim, head_dim_v, kind, sequences, T)                                                      \
    extern "C" Launch name;                                                                                            \
    fa_code name(const BackwardWork &work, const fa_launch &launch) {                                                  \
        return launch_backward<T, head_dim, head_dim_v, kind, sequences>(work, launch);                                \
    }
FA_INSTANCES(FA_DEFINE)

} // namespace fa::sm90
