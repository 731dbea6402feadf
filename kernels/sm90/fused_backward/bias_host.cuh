/* Host side of the bias of wgmma_fused_backward_sm90 and of its gradient. */
#pragma once
#include "sm90/backward/host.cuh"
#include "sm90/fused_backward/config.cuh"
#include "sm90/score/make_map.cuh" // has_map
#include <cstdint>                 // uintptr_t
#include <utility>                 // swap

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

constexpr int64_t kBiasAlignment = 256;

/* Of rows of dS in workspace. */
inline int64_t bias_row_elements(const fa_forward &f) { return (f.seq_k + 7) / 8 * 8; }
/* Of a kv head's query heads. */
inline int64_t bias_pair_bytes(const fa_forward &f) {
    return f.heads_kv ? f.heads / f.heads_kv * f.seq_q * bias_row_elements(f) * 2 : 0;
}
/* How many pairs of a batch entry and a kv head of at most `pairs` one launch has: whole batch entries where their dS
 * goes to workspace, all of them if it is summed over the batch. 0: too few fit. */
inline int64_t pairs_of_launch(const fa_backward &p, int64_t pairs) {
    const fa_forward &f = p.forward;
    if (!is_bias_summed(p) || pairs >= f.batch * f.heads_kv) return pairs;
    return is_bias_summed_over(p, 0) ? 0 : pairs / f.heads_kv * f.heads_kv;
}

/* The call with batch and heads exchanged if that lets sums over the batch go in groups of heads: without sinks, which
 * heads have, and groups of query heads. `room` is for it. */
inline const fa_problem *by_heads(const fa_problem *problem, fa_problem *room) {
    const fa_backward &given = problem->backward;
    if (!is_bias_summed(given) || !is_bias_summed_over(given, 0) || is_bias_summed_over(given, 1) ||
        given.forward.sinks.data || given.forward.heads != given.forward.heads_kv)
        return problem;
    *room = *problem;
    fa_backward &p = room->backward;
    fa_forward &f = p.forward;
    std::swap(f.batch, f.heads), f.heads_kv = f.heads;
    for (fa_operand *x : {&f.q, &f.k, &f.v, &f.out, &f.bias, &f.mask, &f.alibi, &f.intervals, &p.dout, &p.lse, &p.dlse})
        std::swap(x->stride[0], x->stride[1]);
    for (const fa_grad grad : {FA_GRAD_Q, FA_GRAD_K, FA_GRAD_V, FA_GRAD_BIAS})
        std::swap(p.grad[grad].stride[0], p.grad[grad].stride[1]);
    p.bias_sums = (p.bias_sums & ~3u) | (p.bias_sums & 1) << 1 | (p.bias_sums >> 1 & 1);
    return room;
}

/* Whether TMA reads the bias, if there is one, and its gradient has a row a query. */
inline bool takes_bias_tiles(const fa_backward &p, int widest_head_dim, fa_why *why) {
    const fa_forward &f = p.forward;
    const fa_operand &x = f.bias;
    if (!x.data) return true;
    const bool taken =
        f.bias_dtype == f.dtype && !(p.bias_sums >> 2) && takes_tensor_map(x, FA_OPERAND_bias, f.seq_k, f.seq_q, why);
    if (!taken) fa_because(why, FA_REFUSES, FA_WHY_BIAS_ROWS, widest_head_dim, 0, 0);
    return taken;
}

/* Maps of the kernel that includes this. */
static thread_local CachedTensorMap cached_bias_maps[2] = {{FA_OPERAND_bias}, {FA_OPERAND_bias}};

/* `batch` entries of dS become 0. */
static fa_code clear_bias(const fa_operand &x, const fa_forward &f, int64_t batch, const fa_launch &launch) {
    FA_CUDA_TRY(launch, cudaMemset2DAsync(x.data, size_t(x.stride[2]) * 2, 0, size_t(f.seq_k) * 2,
                                          size_t(batch * f.heads * f.seq_q), static_cast<cudaStream_t>(launch.stream)));
    return FA_OK;
}
/* Whether tiles leave pairs out, whose dS is 0. */
inline bool leaves_pairs_out(const fa_forward &f) {
    return has_map(f) || f.left < FA_UNBOUNDED || f.right < FA_UNBOUNDED || f.key_begin > 0 || f.key_end < f.seq_k;
}
/* Where dS goes: into the gradient, or, from a launch's first batch entry on, to workspace. */
inline fa_operand bias_target(const fa_backward &p, int64_t parts_at, const fa_launch &launch) {
    fa_operand x = p.grad[FA_GRAD_BIAS];
    if (parts_at < 0) return x;
    x.data = static_cast<char *>(launch.workspace) + parts_at;
    x.stride[2] = bias_row_elements(p.forward), x.stride[1] = p.forward.seq_q * x.stride[2];
    x.stride[0] = p.forward.heads * x.stride[1], x.stride[3] = 1;
    return x;
}

/* The maps of a call's bias and of where its dS goes. */
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

    const fa_operand x = bias_target(p, parts_at, launch);
    if (parts_at < 0 && leaves_pairs_out(f)) FA_TRY(clear_bias(x, f, f.batch, launch));
    return encode(&to->dbias, x, cached_bias_maps[1]);
}

} // namespace fa::sm90
