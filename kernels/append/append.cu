/* append: new keys and values into caches, with rotary position embedding (Su et al. 2021).
 *
 *     x0' = x0 cos - x1 sin    x1' = x1 cos + x0 sin    for each pair of the first R columns of k and q
 *
 * In float32, rounded once to the dtype; other columns and values are copied bit for bit. A thread block takes a few
 * tokens: one warp finds where they go (tokens.h), a lane each, and leaves that in shared memory, while all threads
 * read the first rows; then groups of lanes share out the rows of k, v and q, kRows of one token at a time, which share
 * cos and sin: two loads of 8 bytes a row and lane where strides allow it, else by elements. One block more looks at
 * what is bad in the starts and lengths, which costs the others nothing.
 *
 * Limits: bound by memory only for many tokens; with slots each block looks at every later one. Of two tokens with one
 * slot the later is written; two sequences whose tables lead new keys to one row leave elements of either there.
 */
#include <algorithm> // std::clamp, std::max, std::min

#include "append/kernel.cuh" // Work, append_tokens
#include "common/launch.cuh" // fa_own, FA_CUDA_TRY
#include "fa.h"              // fa_append, fa_kernel

namespace fa {
namespace {

template <typename T> bool takes_vectors(const fa_append &p) {
    const int width = 16 / static_cast<int>(sizeof(T));
    const auto takes = [=](const fa_operand &x, int length) { return !x.data || takes_chunks<T>(x, length, width); };
    return p.half % (width / 2) == 0 && takes(p.k, p.head_dim) && takes(p.k_cache, p.head_dim) &&
           takes(p.v, p.head_dim_v) && takes(p.v_cache, p.head_dim_v) && takes(p.q, p.head_dim) &&
           takes(p.out, p.head_dim);
}

/* Two neighbours of cos or sin at once: of pairs side by side in a vector, which float32 has one of if interleaved. */
bool takes_two(const fa_append &p, const fa_operand &x) {
    const size_t bytes = fa_dtype_size(p.rotary_dtype) * 2;
    return x.data && x.stride[1] == 1 && x.stride[0] % 2 == 0 && reinterpret_cast<uintptr_t>(x.data) % bytes == 0 &&
           !(p.interleaved && p.dtype == FA_F32);
}

/* Tokens a block: as few as let all blocks be at work at once, since each begins with its look-up. */
fa_answer plan(const fa_problem *problem, const fa_device_info *device, fa_plan *plan, fa_why *) {
    const fa_append &p = problem->append;
    Work &work = fa_own<Work>(plan);
    work.rows = problem->sequences.packed_q || p.slots.data ? p.rows : p.batch * p.rows;
    work.half = p.cos.data ? p.half : 0;
    work.vectors = fa_dtype_size(p.dtype) == 2 ? takes_vectors<uint16_t>(p) : takes_vectors<float>(p);
    const int longest = p.head_dim > p.head_dim_v ? p.head_dim : p.head_dim_v;
    const int items = work.vectors ? longest * static_cast<int>(fa_dtype_size(p.dtype)) / 16 : longest;
    for (work.lanes = 1, work.lanes_log2 = 0; work.lanes < items && work.lanes < kWarp; ++work.lanes_log2)
        work.lanes *= 2;
    const auto of_heads = [](int64_t heads) { return static_cast<int>((heads + kRows - 1) / kRows); };
    work.steps = (items + work.lanes - 1) / work.lanes;
    work.units = of_heads(p.heads_kv) * (p.v_cache.data ? 2 : 1) + (p.q.data ? of_heads(p.heads) : 0);
    work.units *= work.steps;
    work.tables = takes_two(p, p.cos) && takes_two(p, p.sin);
    const int64_t places = kBlocks * int64_t(device->sm_count), each = (work.rows + places - 1) / places;
    work.tokens = static_cast<int>(std::clamp<int64_t>(each, 1, kTokens));
    const int64_t blocks = (work.rows + work.tokens - 1) / work.tokens;
    const int together = kThreads / work.lanes, units = work.tokens * work.units;
    work.parts = blocks >= device->sm_count ? 1 : std::min(4, std::max(1, (units + together - 1) / together));
    plan->blocks = blocks < INT32_MAX - 1 ? blocks : INT32_MAX - 1; // the kernel strides over the rest
    plan->threads = kThreads;
    plan->keep = true;
    return FA_TAKES;
}

Params params_of(const fa_append &p) {
    return {
        .k_cache = p.k_cache,
        .v_cache = p.v_cache,
        .k = p.k,
        .v = p.v,
        .q = p.q,
        .out = p.out,
        .cos = p.cos,
        .sin = p.sin,
        .slots = p.slots,
        .batch = p.batch,
        .heads = p.heads,
        .heads_kv = p.heads_kv,
        .rows = p.rows,
        .head_dim = p.head_dim,
        .head_dim_v = p.head_dim_v,
        .rotary_dtype = p.rotary_dtype,
        .interleaved = p.interleaved,
    };
}

template <typename T> fa_code launch_as(const fa_problem &problem, const fa_plan &plan, const fa_launch &launch) {
    const Work &work = fa_own<Work>(&plan);
    auto kernel = work.vectors ? append_tokens<T, true> : append_tokens<T, false>;
    const dim3 grid(static_cast<unsigned>(plan.blocks + (problem.append.slots.data ? 0 : 1)), work.parts);
    FA_CHAOS_ARM(launch.stream, launch);
    kernel<<<grid, plan.threads, 0, static_cast<cudaStream_t>(launch.stream)>>>(
        params_of(problem.append), problem.sequences, problem.faults, work);
    FA_CUDA_TRY(launch, cudaGetLastError());
    return FA_OK;
}

fa_code launch(const fa_problem *problem, const fa_plan *plan, const fa_launch *launch) {
    const fa_dtype dtype = problem->append.dtype;
    if (dtype == FA_F16) return launch_as<__half>(*problem, *plan, *launch);
    if (dtype == FA_BF16) return launch_as<__nv_bfloat16>(*problem, *plan, *launch);
    return launch_as<float>(*problem, *plan, *launch);
}

} // namespace
} // namespace fa

FA_DEFINE_KERNEL(append) = {
    .abi = FA_KERNEL_ABI,
    .op = FA_APPEND,
    .device = FA_CUDA,
    .name = "append",
    .summary = "new keys and values into caches, with rotary embedding: one pass over memory",
    .cc_from = 80,
    .cc_to = 0,
    .dtypes = fa::kFloatBits,
    .takes = FA_WITH_LENGTHS | FA_WITH_PAGES | FA_WITH_POSITIONS | FA_WITH_SLOTS | FA_WITH_ROTARY | FA_WITH_HEAD_DIM_V,
    .plan = fa::plan,
    .launch = fa::launch,
};
