/* Handlers of XLA's typed FFI: attention and its gradients as custom calls, "fa_ext_attention" and
 * "fa_ext_attention_backward" of fa_ext/jax. */
#ifndef FA_XLA_FFI_H
#define FA_XLA_FFI_H

#include "xla/xla_abi.h"

/* A handler of each operation for "cpu" and for "CUDA". Operands, in this order; the attribute `given` has a bit for
 * each that is optional, and the attribute `wants` one for each gradient: forward:  q, k, v, [1: bias], [2: mask], [4:
 * sinks] -> out, [lse], workspace backward: q, k, v, out, lse, [8: dout], [16: dlse], [1: bias], [2: mask], [4: sinks]
 * -> dq, dk, dv, dbias, dsinks of which wants has 1, 2, 4, 8, 16; workspace All arrays are C-contiguous. `workspace` is
 * bytes: on the CPU none is needed. The other attributes are the fields of fa_ext_options, with its `given` as
 * `options_given`, `unordered` of the backward, and `kernel`, a name or "". */
xla_handler fa_xla_attention_cpu, fa_xla_attention_cuda, fa_xla_backward_cpu, fa_xla_backward_cuda;

enum { FA_XLA_BIAS = 1, FA_XLA_MASK = 2, FA_XLA_SINKS = 4, FA_XLA_DOUT = 8, FA_XLA_DLSE = 16 };

#endif
