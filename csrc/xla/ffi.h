/* Handlers of XLA's typed FFI: attention and its gradients as custom calls, "fa_ext_attention" and
 * "fa_ext_attention_backward" of fa_ext/jax. */
#ifndef FA_XLA_FFI_H
#define FA_XLA_FFI_H

#include "xla/xla_abi.h"

/* A handler of each operation for "cpu" and for "CUDA". The forward takes q, k, v, then what is there of bias, mask,
 * sinks, alibi, and makes out, lse where there are three results, workspace; the backward takes q, k, v, out, lse, then
 * what is there of dout, dlse, bias, mask, sinks, alibi, and makes what is wanted of dq, dk, dv, dbias, dsinks, then
 * workspace. All are C-contiguous; `workspace` is bytes, of which the CPU needs none. The attribute `given` says what
 * is there by the bits below, `wants` has bits 1, 2, 4, 8, 16 for the gradients. The others are the fields of
 * fa_ext_options, its own `given` as `options_given`; `unordered` of the backward; and `kernel`, a name or "". */
/* With FA_XLA_DROPOUT the last operand is the state of dropout, the eight words of dropout=(p, state), and the
 * attribute `dropout` is p. */
xla_handler fa_xla_attention_cpu, fa_xla_attention_cuda, fa_xla_backward_cpu, fa_xla_backward_cuda;
/* Takes anything, does nothing: what a custom call costs by itself. */
xla_handler fa_xla_nothing;

enum {
    FA_XLA_BIAS = 1,
    FA_XLA_MASK = 2,
    FA_XLA_SINKS = 4,
    FA_XLA_DOUT = 8,
    FA_XLA_DLSE = 16,
    FA_XLA_ALIBI = 32,
    FA_XLA_DROPOUT = 64
};

#endif
