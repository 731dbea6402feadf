/* Host side of the bias of wgmma_fused_backward_sm90 and of its gradient. */
#pragma once
#include "sm90/backward/host.cuh"
#include "sm90/fused_backward/bias_sum.cuh"
#include "sm90/fused_backward/config.cuh"
#include "sm90/score/make_map.cuh" // has_map
#include <cstdint>                 // uintptr_t

namespace fa::sm90 {

inline bool wants_bias(const fa_backward &p) { return p.wants >> FA_GRAD_BIAS & 1; }

/* Whether the bias is broadcast along axis 0 or 1, batch or heads, so that its gradient sums over several entries. */
inline bool is_bias_summed_over(const fa_backward &p, int axis) {
    return (p.bias_sums >> axis & 1) && (axis ? p.forward.heads : p.forward.batch) > 1;
}

/* Whether TMA stores the gradient of the bias where it belongs: a row of whole 16 bytes for each query, rows one behind
 * the other. */
inline bool is_bias_stored(const fa_backward &p) {
    const fa_forward &f = p.forward;
    const fa_operand &x = p.grad[FA_GRAD_BIAS];
    bool stored =
        p.grad_dtype[FA_GRAD_BIAS] == f.dtype && !p.accumulate && reinterpret_cast<uintptr_t>(x.data) % 16 == 0;
    stored = stored && x.stride[3] == 1 && x.stride[2] % 8 == 0 && x.stride[2] >= f.seq_k;
    stored = stored && (f.heads == 1 || x.stride[1] == f.seq_q * x.stride[2]);
    stored = stored && (f.batch == 1 || x.stride[0] == f.heads * f.seq_q * x.stride[2]);
    return stored && !is_bias_summed_over(p, 0) && !is_bias_summed_over(p, 1);
}
/* Whether it is made of what the pairs leave in workspace. */
inline bool is_bias_summed(const fa_backward &p) { return wants_bias(p) && !is_bias_stored(p); }

/* Of rows of dS in workspace. */
inline int64_t bias_row_elements(const fa_forward &f) { return (f.seq_k + 7) / 8 * 8; }
inline int64_t bias_parts_bytes(const fa_forward &f) {
    return divide_up(f.batch * f.heads * f.seq_q * bias_row_elements(f) * 2, 256) * 256;
}

/* Whether TMA reads the bias, if there is one, and its gradient has a row a query. */
inline bool takes_bias_tiles(const fa_backward &p, int widest_head_dim, fa_why *why) {
    const fa_forward &f = p.forward;
    const fa_operand &x = f.bias;
    if (!x.data) return true;
    bool taken = f.bias_dtype == f.dtype && x.stride[3] == 1 && x.stride[2] > 0 && !(p.bias_sums >> 2);
    for (int axis = 0; axis < 3; ++axis)
        taken = taken && x.stride[axis] % 8 == 0 && x.stride[axis] >= 0 && x.stride[axis] < INT64_C(1) << 38;
    taken = taken && reinterpret_cast<uintptr_t>(x.data) % 16 == 0;
    if (!taken) fa_because(why, FA_REFUSES, FA_WHY_BIAS_ROWS, widest_head_dim, 0, 0);
    return taken;
}

/* Maps of the kernel that includes this. */
static thread_local CachedTensorMap cached_bias_maps[2] = {{FA_OPERAND_bias}, {FA_OPERAND_bias}};

/* The maps of a call's bias and of where its gradient goes, which becomes 0 where tiles may leave pairs out. */
static fa_code fused_bias(const fa_backward &p, int64_t parts_at, GeneralFusedParams *to, const fa_launch &launch) {
    const fa_forward &f = p.forward;
    if (f.seq_q == 0 || f.seq_k == 0) return FA_OK; // no tile touches a map
    const auto encode = [&](CUtensorMap *map, const fa_operand &x, CachedTensorMap &cached) {
        return tensor_map_encode(map, cached, launch, x, f.dtype, f.seq_k, f.seq_q, f.heads, f.batch, kBiasQueries);
    };
    to->bias_step[0] = f.bias.stride[1] != 0, to->bias_step[1] = f.bias.stride[0] != 0;
    FA_TRY(encode(&to->bias, f.bias, cached_bias_maps[0]));
    to->stores_bias = wants_bias(p);
    if (!to->stores_bias) return FA_OK;

    fa_operand x = p.grad[FA_GRAD_BIAS];
    if (parts_at >= 0) {
        const int64_t row = bias_row_elements(f);
        x.data = static_cast<char *>(launch.workspace) + parts_at;
        x.stride[2] = row, x.stride[1] = f.seq_q * row, x.stride[0] = f.heads * x.stride[1];
    }
    const bool whole =
        !has_map(f) && f.left >= FA_UNBOUNDED && f.right >= FA_UNBOUNDED && f.key_begin == 0 && f.key_end == f.seq_k;
    if (!whole)
        FA_CUDA_TRY(launch,
                    cudaMemset2DAsync(x.data, size_t(x.stride[2]) * 2, 0, size_t(f.seq_k) * 2,
                                      size_t(f.batch * f.heads * f.seq_q), static_cast<cudaStream_t>(launch.stream)));
    return encode(&to->dbias, x, cached_bias_maps[1]);
}

/* The gradient of the bias from what has been left in workspace. */
static fa_code launch_bias_sum(const fa_backward &p, int64_t parts_at, const fa_launch &launch) {
    const fa_forward &f = p.forward;
    const BiasSumParams params = {
        .parts = static_cast<char *>(launch.workspace) + parts_at,
        .batch = f.batch,
        .heads = f.heads,
        .seq_q = f.seq_q,
        .seq_k = f.seq_k,
        .row_elements = bias_row_elements(f),
        .sums_batch = is_bias_summed_over(p, 0),
        .sums_heads = is_bias_summed_over(p, 1),
        .to = gradient(p, FA_GRAD_BIAS),
    };
    const int64_t blocks = divide_up(bias_sum_threads(params), kBiasSumThreads);
    return f.dtype == FA_F16 ? fa_start(sum_bias<__half>, blocks, kBiasSumThreads, 0, launch, params)
                             : fa_start(sum_bias<__nv_bfloat16>, blocks, kBiasSumThreads, 0, launch, params);
}

} // namespace fa::sm90
