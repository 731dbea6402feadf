/* A problem as kernels take it, by value: the fields that some of them read, filled at launch. The problem itself
 * (fa.h) gains a field without a change of any kernel. Names and meanings are those of fa_forward and fa_backward. */
#pragma once

#include <stdint.h> // int64_t, uint32_t

#include "common/convert.cuh" // write_gradient
#include "fa.h"               // fa_forward, fa_backward

namespace fa {

struct AttentionParams {
    fa_operand q, k, v, out, lse;
    fa_operand bias, mask, sinks; // data NULL: none
    int64_t batch, heads, heads_kv, seq_q, seq_k;
    int64_t left, right, diagonal, key_begin, key_end;
    int head_dim, head_dim_v;
    fa_dtype out_dtype, bias_dtype, sinks_dtype;
};

inline AttentionParams attention_params(const fa_forward &p) {
    return {
        .q = p.q,
        .k = p.k,
        .v = p.v,
        .out = p.out,
        .lse = p.lse,
        .bias = p.bias,
        .mask = p.mask,
        .sinks = p.sinks,
        .batch = p.batch,
        .heads = p.heads,
        .heads_kv = p.heads_kv,
        .seq_q = p.seq_q,
        .seq_k = p.seq_k,
        .left = p.left,
        .right = p.right,
        .diagonal = p.diagonal,
        .key_begin = p.key_begin,
        .key_end = p.key_end,
        .head_dim = p.head_dim,
        .head_dim_v = p.head_dim_v,
        .out_dtype = p.out_dtype,
        .bias_dtype = p.bias_dtype,
        .sinks_dtype = p.sinks_dtype,
    };
}

struct GradientParams {
    AttentionParams forward;
    fa_operand dout, lse, dlse;
    fa_operand grad[FA_GRAD_COUNT];
    fa_dtype grad_dtype[FA_GRAD_COUNT];
    uint32_t wants, bias_sums;
    bool accumulate;
};

inline GradientParams gradient_params(const fa_backward &p) {
    GradientParams params = {
        .forward = attention_params(p.forward),
        .dout = p.dout,
        .lse = p.lse,
        .dlse = p.dlse,
        .wants = p.wants,
        .bias_sums = p.bias_sums,
        .accumulate = p.accumulate,
    };
    for (int n = 0; n < FA_GRAD_COUNT; ++n) params.grad[n] = p.grad[n], params.grad_dtype[n] = p.grad_dtype[n];
    return params;
}

/* Writes one element of a gradient. */
__device__ __forceinline__ void write_gradient(const GradientParams &p, fa_grad grad, int64_t index, float value) {
    write_gradient(p.grad[grad].data, p.grad_dtype[grad], p.accumulate, index, value);
}

} // namespace fa
