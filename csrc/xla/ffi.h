/* Handlers of XLA's typed FFI: attention and its gradients as custom calls, "fa_ext_attention" and
 * "fa_ext_attention_backward" of fa_ext/jax. */
#ifndef FA_XLA_FFI_H
#define FA_XLA_FFI_H

#include "xla/xla_abi.h"

/* A handler of each operation for "cpu" and for "CUDA". Operands are the data, options and index arrays of operands.def
 * that the operation reads, in the order of their lines, then the state of dropout; the attribute `given` has a bit for
 * each that may be absent and is there, 1 << fa_operand_number. The forward makes out, lse where there is one result
 * more, max_logit in the place of the operand where that is given, and a workspace; the backward the gradients that the
 * attribute `wants` names, 1 << fa_grad, then the workspace. All are C-contiguous; a workspace is bytes, of which the
 * CPU needs none. The other attributes are the fields of fa_ext_options, its own `given` as `options_given`;
 * `unordered` of the backward; and `kernel`, a name or "". With a state of dropout, the eight words of dropout=(p,
 * state), the attribute `dropout` is p. Bad contents of index arrays are an error on the CPU; on a CUDA device they
 * hide what they speak of and are counted. */
xla_handler fa_xla_attention_cpu, fa_xla_attention_cuda, fa_xla_backward_cpu, fa_xla_backward_cuda;
/* Takes anything, does nothing: what a custom call costs by itself. */
xla_handler fa_xla_nothing;

#endif
