"""``torch.ops.fa_ext.attention``, ``.attention_backward`` and ``.draw``: what a compiled graph holds.

Their arguments are those of ``fa_ext.torch.attention``; causal and window travel as three integers (``_options.bounds``),
the names of the gradients as bits, and those that are asked for come back. The state of dropout is what ``draw`` returns,
and an argument of the other two.
"""

import functools
from typing import List, Optional, Tuple  # noqa: UP035

import torch
from torch import Tensor
from torch._prims_common import is_contiguous_or_false
from torch.fx.experimental.symbolic_shapes import guard_or_false, statically_known_true

from .._operands import DIFFERENTIABLE
from ._library import LIBRARY, operator
from ._options import OTHERS, backward, forward, from_bounds, in_order, named
from ._vmap import mapped

#: Which operand each argument of the operators is; the others, which may be left out, come after these.
_FORWARD = ("q", "k", "v", *(None,) * 10)
_BACKWARD = ("dout", "dlse", "q", "k", "v", "out", "lse", *(None,) * 10)
#: (bit, place among the forward's arguments) of all that can have a gradient.
_PLACES = tuple((n, (*_FORWARD, *OTHERS).index(name)) for n, name in enumerate(DIFFERENTIABLE))


@functools.cache
def _names(wrt):
    return tuple(name for n, name in enumerate(DIFFERENTIABLE) if wrt >> n & 1)


def _fake_draw(*, device):
    return torch.empty(4, dtype=torch.int64, device=device)


@operator("draw", _fake_draw, draws=True)
def draw(*, device: torch.device) -> Tensor:
    return drawn(device)


def drawn(device):
    """The core's 32 bytes of dropout's state, which kernels on a GPU read there: a seed from torch's generator of the device,
    offset, origin and heads 0."""
    state = torch.zeros(4, dtype=torch.int64, device=device)
    state[:1].random_(-(2**63), 2**63 - 1)  # with the seed that randint() and pad() have, in two kernels instead of three
    return state


def _fake_forward(q, k, v, left, right, diagonal, scale, softcap, layout, *rest):
    heads_at, keys_at = (1, 2) if layout == "bhsd" else (2, 1)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(f"{name} has {x.dim()} axes; accepted: 4")
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(f"{name} is {x.dtype} on {x.device}, but q {q.dtype} on {q.device}; accepted: one dtype and one device")
    shapes = f"q has shape {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    for axis in (0, 3):  # axis by axis, so that sizes which depend on data are left to the kernel
        torch._check_value(q.shape[axis] == k.shape[axis], lambda: f"{shapes}; accepted: one batch, one head_dim of q and k")
    for axis in range(3):
        torch._check_value(k.shape[axis] == v.shape[axis], lambda: f"{shapes}; accepted: k and v that share all axes but the last")
    batch, heads, queries, heads_k = q.shape[0], q.shape[heads_at], q.shape[keys_at], k.shape[heads_at]
    if not guard_or_false(heads == heads_k):
        words = f"{shapes}; accepted: heads of q that are a multiple of those of k"
        torch._check_value(heads_k > 0, lambda: words)
        torch._check_value(heads % heads_k == 0, lambda: words)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = _fake_like(q, v.shape[3]) if layout == "bhsd" else q.new_empty(*q.shape[:3], v.shape[3])
    return out, q.new_empty(batch, heads, queries, dtype=wide)


def _fake_like(x, width):
    if is_contiguous_or_false(x):
        return x.new_empty(*x.shape[:3], width)
    return x.new_empty_strided(*in_order(x.shape, x.stride(), width, _less))


def _less(one, other):
    """Whether one stride is less than another; where that depends on data, whether the other is a multiple of it."""
    if guard_or_false(one < other):
        return True
    return not guard_or_false(one >= other) and statically_known_true(other % one == 0)


def _keep(ctx, inputs, output):
    q, k, v, *rest = inputs[:13]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, *inputs[13:])
    ctx.rest = *rest[:7], *rest[8:]  # without the forward kernel's name


def _differentiate(ctx, dout, dlse):
    needs = ctx.needs_input_grad
    found = [None] * (len(needs) - 1)
    if dout is None and dlse is None:
        return tuple(found)
    places = [(n, place) for n, place in _PLACES if place < len(found) and needs[place]]
    call = _Once.apply if torch.is_grad_enabled() else attention_backward
    kept = ctx.saved_tensors
    grads = call(dout, dlse, *kept[:5], *ctx.rest, sum(1 << n for n, _ in places), *kept[5:])
    for (_, place), grad in zip(places, grads, strict=True):
        found[place] = grad
    return tuple(found)


@operator("attention", _fake_forward, keep=_keep, differentiate=_differentiate, others=OTHERS)
def attention(
    q: Tensor, k: Tensor, v: Tensor, left: int, right: int, diagonal: int, scale: Optional[float], softcap: float, layout: str,
    dropout_p: float, kernel: Optional[str], batch_invariant: bool, deterministic: bool, *others: Optional[Tensor],
) -> Tuple[Tensor, Tensor]:  # fmt: skip
    options = from_bounds(left, right, diagonal, scale, softcap, layout, dropout_p, kernel, batch_invariant, deterministic)
    return forward(q, k, v, options, named(OTHERS, others))


def _fake_backward(dout, dlse, q, k, v, out, lse, *rest):
    options = len(_BACKWARD) - 7
    known = {"q": q, "k": k, "v": v, **named(OTHERS, rest[options:])}
    wanted = {name: known[name] for name in _names(rest[options - 1])}
    return [_fake_like(x, x.shape[3]) if name in ("q", "k", "v") else x.new_empty(x.shape) for name, x in wanted.items()]


class _Once(torch.autograd.Function):
    """The gradients where theirs may be asked for, which there are none of: of each transform around them, as this form of a
    function is."""

    @staticmethod
    def forward(*args):
        return tuple(attention_backward(*args))

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Nothing is kept."""

    @staticmethod
    def vmap(info, in_dims, *args):
        return _map_backward(info, in_dims, *args, call=_Once.apply)

    @staticmethod
    def backward(ctx, *cotangents):
        raise RuntimeError(
            "torch.ops.fa_ext.attention_backward has no derivative; accepted: fa_ext.torch.attention of plain tensors, neither compiled "
            "nor under a dispatch mode, whose gradients have one"
        )


@operator("attention_backward", _fake_backward, others=OTHERS)
def attention_backward(
    dout: Optional[Tensor], dlse: Optional[Tensor], q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, left: int, right: int,
    diagonal: int, scale: Optional[float], softcap: float, layout: str, dropout_p: float, batch_invariant: bool, deterministic: bool,
    wrt: int, *others: Optional[Tensor],
) -> List[Tensor]:  # fmt: skip
    options = from_bounds(left, right, diagonal, scale, softcap, layout, dropout_p, None, batch_invariant, deterministic)
    return list(backward(dout, dlse, (q, k, v, out, lse), named(OTHERS, others), options, _names(wrt)))


def _map_forward(info, in_dims, *args):
    return mapped(attention, info, in_dims, args, (*_FORWARD, *OTHERS)[: len(args)])


def _map_backward(info, in_dims, *args, call=attention_backward):
    sums = args[len(_BACKWARD) - 1] >> 3 != 0  # wrt
    return mapped(call, info, in_dims, args, (*_BACKWARD, *OTHERS)[: len(args)], sums)


torch.library.register_vmap("fa_ext::attention", _map_forward, lib=LIBRARY)
torch.library.register_vmap("fa_ext::attention_backward", _map_backward, lib=LIBRARY)
