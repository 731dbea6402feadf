/* Instances of mma_sm80 for sequences and more: the kernels of one padded head_dim. */
#include "common/launch.cuh" // fa_start
#include "sm80/kinds.cuh"
#include "sm80/serve.cuh" // mma_serve, fold_parts

namespace fa {
namespace {

template <typename T, int kHeadDim, bool kDressed>
fa_code launch_serve(const sm80::ServeArgs &args, const fa_plan &plan, const fa_launch &launch) {
    using C = sm80::ServeConfig<T, kHeadDim, kDressed>;
    FA_TRY(fa_start(sm80::mma_serve<C>, plan.blocks, C::kThreads, plan.smem_bytes, launch, args));
    if (args.parts == 1) return FA_OK;
    return fa_start(sm80::fold_parts<T, kHeadDim>, args.call.p.batch * args.packed_heads, 128, 0, launch, args);
}

template <int D>
fa_code launch_dtype(const sm80::ServeArgs &args, fa_dtype dtype, bool dressed, const fa_plan &plan,
                     const fa_launch &launch) {
    if (dtype == FA_F16)
        return dressed ? launch_serve<__half, D, true>(args, plan, launch)
                       : launch_serve<__half, D, false>(args, plan, launch);
    return dressed ? launch_serve<__nv_bfloat16, D, true>(args, plan, launch)
                   : launch_serve<__nv_bfloat16, D, false>(args, plan, launch);
}

} // namespace

#define FA_DEFINE(name, Type, D)                                                                                       \
    extern "C" Type name;                                                                                              \
    fa_code name(const sm80::ServeArgs &args, fa_dtype dtype, bool dressed, const fa_plan &plan,                       \
                 const fa_launch &launch) {                                                                            \
        return launch_dtype<D>(args, dtype, dressed, plan, launch);                                                    \
    }
FA_INSTANCES(FA_DEFINE)

} // namespace fa
