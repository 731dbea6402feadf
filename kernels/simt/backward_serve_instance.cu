/* Instances of simt_backward for sequences: the kernels of one dtype. */
#include "simt/backward_config.cuh"
#include "simt/backward_serve.cuh"

namespace simt_backward {
namespace {

template <int kIndex> struct Config { static constexpr Tile tile = kTiles[kIndex]; };

/* Everything that works on the rows of work.pairs. */
template <typename T, class C>
fa_code launch_pairs(const SequenceCall &c, const Work &work, const fa_plan &plan, const fa_launch &launch) {
    const fa::AttentionParams &f = c.p.forward;
    const int64_t block = C::tile.block, heads = work.pairs * work.group;
    const Tiles rows = tiles_of_queries(c.s, f, kRowTile), queries = tiles_of_queries(c.s, f, block);
    const Tiles keys = tiles_of_keys(c.s, f, block);
    FA_TRY(fa_start(serve_rows_kernel<T>, work.pairs * rows.count, kThreads, 0, launch, c, work, rows));
    if (c.p.wants >> FA_GRAD_Q & 1)
        FA_TRY(fa_start(serve_queries_kernel<T, C>, heads * queries.count, kThreads, plan.smem_bytes, launch, c, work,
                        queries));
    if (c.p.wants >> FA_GRAD_K & 3)
        FA_TRY(fa_start(serve_keys_kernel<T, C>, work.pairs * keys.count, kThreads, plan.smem_bytes, launch, c, work,
                        keys));
    if (c.p.wants >> FA_GRAD_SINKS & 1) FA_TRY(fa_start(serve_sinks_kernel, heads, kThreads, 0, launch, c, work));
    return FA_OK;
}

template <typename T, int kIndex>
fa_code launch_tile(const fa_problem &problem, const fa_plan &plan, const fa_launch &launch) {
    if constexpr (kIndex < kTileCount) {
        const Own &own = fa_own<Own>(&plan);
        if (own.tile != kIndex) return launch_tile<T, kIndex + 1>(problem, plan, launch);
        using C = Config<kIndex>;
        static_assert(sizeof(Alone<C::tile.block>) <= kSequenceBytes);
        const fa_forward &f = problem.backward.forward;
        const SequenceCall c = {fa::gradient_params(problem.backward), problem.sequences, problem.faults,
                                stored_rows(problem), fa::segments_of(f)};
        Work work = work_of(problem, launch);
        for (; work.first_pair < f.heads_kv; work.first_pair += own.pairs) {
            work.pairs = f.heads_kv - work.first_pair < own.pairs ? f.heads_kv - work.first_pair : own.pairs;
            FA_TRY((launch_pairs<T, C>(c, work, plan, launch)));
        }
        work.first_pair = 0;
        if (c.p.wants >> FA_GRAD_BIAS & 1)
            FA_TRY(fa_start(serve_bias_kernel<T, C>, bias_tiles(c.p, C::tile.block), kThreads, plan.smem_bytes, launch,
                            c, work));
    }
    return FA_OK;
}

} // namespace

#define FA_DEFINE(name, sequences, T)                                                                                  \
    extern "C" Launch name;                                                                                            \
    fa_code name(const fa_problem &problem, const fa_plan &plan, const fa_launch &launch) {                            \
        return launch_tile<T, 0>(problem, plan, launch);                                                               \
    }
FA_INSTANCES(FA_DEFINE)

} // namespace simt_backward
