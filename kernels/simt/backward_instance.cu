/* Instances of simt_backward: the kernels of one dtype. */
#include "simt/backward_config.cuh"

namespace simt_backward {
namespace {

template <int kIndex> struct Config { static constexpr Tile tile = kTiles[kIndex]; };

/* Launches a kernel on `count` tasks. */
template <class Kernel, class... Args>
fa_code start(Kernel *kernel, int64_t count, size_t smem_bytes, const fa_launch &launch, const Args &...args) {
    return fa_start(kernel, count, kThreads, smem_bytes, launch, args...);
}

inline int64_t tiles(int64_t length, int64_t block) { return (length + block - 1) / block; }

/* Everything that works on the rows of work.pairs. */
template <typename T, class C>
fa_code launch_pairs(const fa::GradientParams &p, const Work &work, const fa_plan &plan, const fa_launch &launch) {
    const fa::AttentionParams &f = p.forward;
    const int64_t block = C::tile.block, heads = work.pairs * work.group;
    FA_TRY(start(rows_kernel<T>, tiles(heads * f.seq_q, kThreads), 0, launch, p, work));
    if (p.wants >> FA_GRAD_Q & 1)
        FA_TRY(start(queries_kernel<T, C>, heads * tiles(f.seq_q, block), plan.smem_bytes, launch, p, work));
    if (p.wants >> FA_GRAD_K & 3)
        FA_TRY(start(keys_kernel<T, C>, work.pairs * tiles(f.seq_k, block), plan.smem_bytes, launch, p, work));
    return FA_OK;
}

template <typename T, int kIndex>
fa_code launch_tile(const fa_problem &problem, const fa_plan &plan, const fa_launch &launch) {
    if constexpr (kIndex < kTileCount) {
        const Own &own = fa_own<Own>(&plan);
        if (own.tile != kIndex) return launch_tile<T, kIndex + 1>(problem, plan, launch);
        const fa_forward &f = problem.backward.forward;
        const fa::GradientParams p = fa::gradient_params(problem.backward);
        const int64_t all = f.batch * f.heads_kv;
        Work work = work_of(problem, launch);
        for (; work.first_pair < all && own.pairs; work.first_pair += own.pairs) {
            work.pairs = all - work.first_pair < own.pairs ? all - work.first_pair : own.pairs;
            FA_TRY((launch_pairs<T, Config<kIndex>>(p, work, plan, launch)));
        }
        if (p.wants >> FA_GRAD_BIAS & 1)
            FA_TRY(start(bias_kernel<T, Config<kIndex>>, bias_tiles(p, Config<kIndex>::tile.block), plan.smem_bytes,
                         launch, p, work));
        if (p.wants >> FA_GRAD_SINKS & 1) FA_TRY(start(sinks_kernel<T>, f.heads, 0, launch, p, work.intervals));
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
