"""``torch.ops.fa_ext.attention`` and ``.attention_backward``: what a compiled graph holds.

Their arguments are those of ``fa_ext.torch.attention``; causal and window travel as three integers (``_options.bounds``),
the names of the gradients as bits. No operator draws random numbers: the state of dropout is an argument.
"""

from typing import Optional, Tuple  # noqa: UP035

import torch
from torch import Tensor

from ._options import NAMES, backward, forward, from_bounds
from ._vmap import map_backward, map_forward


@torch.library.custom_op("fa_ext::attention", mutates_args=(), device_types=("cpu", "cuda"))
def attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Optional[Tensor], mask: Optional[Tensor], sinks: Optional[Tensor],
    alibi: Optional[Tensor], state: Optional[Tensor], left: int, right: int, diagonal: int, scale: Optional[float],
    softcap: float, layout: str, dropout_p: float, kernel: Optional[str], batch_invariant: bool, deterministic: bool,
) -> Tuple[Tensor, Tensor]:  # fmt: skip
    options = from_bounds(
        left, right, diagonal, scale, softcap, layout, dropout_p, kernel, batch_invariant, deterministic
    )  # fmt: skip
    return forward(q, k, v, options, (bias, mask, sinks, alibi, state))


@attention.register_fake
def _(q, k, v, bias, mask, sinks, alibi, state, left, right, diagonal, scale, softcap, layout, *rest):
    batch, heads, queries = q.shape[0], *(q.shape[1:3] if layout == "bhsd" else (q.shape[2], q.shape[1]))
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(batch, heads, queries, dtype=wide)


@torch.library.custom_op("fa_ext::attention_backward", mutates_args=(), device_types=("cpu", "cuda"))
def attention_backward(
    dout: Optional[Tensor], dlse: Optional[Tensor], q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    bias: Optional[Tensor], mask: Optional[Tensor], sinks: Optional[Tensor], alibi: Optional[Tensor],
    state: Optional[Tensor], left: int, right: int, diagonal: int, scale: Optional[float], softcap: float, layout: str,
    dropout_p: float, batch_invariant: bool, deterministic: bool, wrt: int,
) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    options = from_bounds(
        left, right, diagonal, scale, softcap, layout, dropout_p, None, batch_invariant, deterministic
    )  # fmt: skip
    names = tuple(name for n, name in enumerate(NAMES) if wrt >> n & 1)
    kept = (q, k, v, out, lse, bias, mask, sinks, alibi, state)
    grads = dict(zip(names, backward(dout, dlse, kept, options, names), strict=True))
    return tuple(grads[name] if name in grads else q.new_empty(0) for name in NAMES)


@attention_backward.register_fake
def _(dout, dlse, q, k, v, out, lse, bias, mask, sinks, *rest):
    subjects = zip((q, k, v, bias, sinks), range(len(NAMES)), strict=True)
    return tuple(x.new_empty(x.shape) if rest[-1] >> n & 1 else q.new_empty(0) for x, n in subjects)


def _keep(ctx, inputs, output):
    q, k, v, *others = inputs[:8]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, *others)
    ctx.rest = *inputs[8:15], *inputs[16:]  # without the forward kernel's name


def _differentiate(ctx, dout, dlse):
    found = [None] * 18
    if dout is None and dlse is None:
        return tuple(found)
    places = (0, 1, 2, 3, 5)
    wrt = sum(1 << n for n, place in enumerate(places) if ctx.needs_input_grad[place])
    grads = attention_backward(dout, dlse, *ctx.saved_tensors, *ctx.rest, wrt)
    for n, place in enumerate(places):
        if wrt >> n & 1:
            found[place] = grads[n]
    return tuple(found)


attention.register_autograd(_differentiate, setup_context=_keep)


@attention.register_vmap
def _(info, in_dims, *args):
    return map_forward(attention, info, in_dims, *args)


@attention_backward.register_vmap
def _(info, in_dims, *args):
    return map_backward(attention_backward, info, in_dims, *args, sums=args[-1] >> 3 != 0)
