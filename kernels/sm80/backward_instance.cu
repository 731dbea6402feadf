/* Instances of mma_backward_sm80: the kernels of one padded head_dim, each Family's in one of their own. */
#include "common/launch.cuh" // fa_start
#include "sm80/mma_backward_kinds.cuh"
#include "sm80/mma_backward_rows.cuh" // backward_rows, backward_sinks

namespace fa {
namespace {

template <class C> fa_code start_role(ArgsOf<C::kSequences> args, const fa_launch &launch) {
    TaskOrder &order = C::kQueries ? args.queries : args.keys;
    const int64_t length = C::kQueries ? args.problem.forward.seq_q : args.problem.forward.seq_k;
    order.blocks = unsigned((length + C::kOwn - 1) / C::kOwn);
    if constexpr (C::kSequences)
        order.blocks = unsigned(args.sequences.tiles[C::kQueries ? kTilesOfQueries : kTilesOfKeys]);
    return fa_start(backward_kernel<C>, int64_t(order.blocks) * order.items, C::kThreads, C::kSharedBytes, launch,
                    args);
}

template <typename T, int D, Family kFamily, Role kRole>
fa_code start_kind(const ArgsOf<kFamily == Family::kSequences> &args, int kind, const fa_launch &launch) {
    constexpr bool kSequences = kFamily == Family::kSequences;
    if constexpr (kFamily == Family::kGeneral) {
        return start_role<Choose<T, D, kRole, kGeneral>>(args, launch);
    } else {
        if (kind == kLarge) return start_role<Choose<T, D, kRole, kLarge, kSequences>>(args, launch);
        if constexpr (!kSequences)
            if (kind == kSmall) return start_role<Choose<T, D, kRole, kSmall>>(args, launch);
        return start_role<Choose<T, D, kRole, kExtended, kSequences>>(args, launch);
    }
}

template <typename T, int D, Family kFamily>
fa_code launch_pairs(const ArgsOf<kFamily == Family::kSequences> &args, fa_mma_kinds kinds, const fa_launch &launch) {
    const uint32_t wants = args.problem.wants;
    if (wants >> FA_GRAD_Q & 1) FA_TRY((start_kind<T, D, kFamily, Role::kQueries>(args, kinds.queries, launch)));
    if constexpr (has_both(D)) {
        if (wants >> FA_GRAD_K & 3) FA_TRY((start_kind<T, D, kFamily, Role::kKeys>(args, kinds.keys, launch)));
    } else {
        if (wants >> FA_GRAD_K & 1) FA_TRY((start_kind<T, D, kFamily, Role::kKey>(args, kinds.keys, launch)));
        if (wants >> FA_GRAD_V & 1) FA_TRY((start_kind<T, D, kFamily, Role::kValue>(args, kinds.keys, launch)));
    }
    return FA_OK;
}

template <class C> fa_code start_bias(const ArgsOf<C::kSequences> &args, const fa_launch &launch) {
    const int64_t tasks = BiasAxes(args.problem, C::kQueries, C::kKeys).tasks();
    return fa_start(backward_bias<C>, tasks * args.parts, C::kThreads, C::kSharedBytes, launch, args);
}

template <typename T, int D, Family kFamily>
fa_code launch_dtype(const ArgsOf<kFamily == Family::kSequences> &args, fa_mma_kinds kinds, bool bias,
                     const fa_launch &launch) {
    constexpr bool kSequences = kFamily == Family::kSequences;
    const BackwardArgs &dense = args;
    const AttentionParams &f = args.problem.forward;
    if (bias) {
        FA_TRY((start_bias<BiasConfig<T, D, kFamily != Family::kGeneral, kSequences>>(args, launch)));
        if (args.parts == 1) return FA_OK;
        return fa_start(backward_bias_sum, (bias_elements(args.problem) + 127) / 128, 128, 0, launch, dense);
    }
    if constexpr (kSequences)
        if (args.first_pair == 0)
            FA_TRY(fa_start(place_sequences<kPlaceThreads>, 1, kPlaceThreads, 0, launch, args.sequences));
    const int64_t heads = int64_t(args.pairs) * args.group;
    constexpr int kRows = kRowsWarps * 32 / row_lanes(D); // of a block
    auto rows = backward_rows<T, D, kSequences>;
    if constexpr (kFamily == Family::kDense)
        if (args.intervals.begins) rows = backward_rows<T, D, false, true>;
    FA_TRY(fa_start(rows, (heads * args.pitch + kRows - 1) / kRows, 32 * kRowsWarps, 0, launch, args));
    if (args.problem.wants >> FA_GRAD_SINKS & 1) {
        const int64_t of_head = kSequences ? sink_parts<true>(args) : 1;
        FA_TRY(fa_start(backward_sink_parts<T, kSequences>, heads * of_head, kSinksThreads, 0, launch, dense));
        if (args.first_pair + args.pairs == (kSequences ? 1 : f.batch) * f.heads_kv)
            FA_TRY(fa_start(backward_sinks<kSequences>, (f.heads + kSinksThreads - 1) / kSinksThreads, kSinksThreads, 0,
                            launch, dense));
    }
    return launch_pairs<T, D, kFamily>(args, kinds, launch);
}

} // namespace

#define FA_DEFINE(name, D, kFamily)                                                                                    \
    extern "C" Launch name;                                                                                            \
    fa_code name(const SequenceArgs &args, fa_dtype dtype, fa_mma_kinds kinds, bool bias, const fa_launch &launch) {   \
        if (dtype == FA_F16) return launch_dtype<__half, D, kFamily>(args, kinds, bias, launch);                       \
        return launch_dtype<__nv_bfloat16, D, kFamily>(args, kinds, bias, launch);                                     \
    }
FA_INSTANCES(FA_DEFINE)

} // namespace fa
