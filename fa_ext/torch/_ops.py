"""``torch.ops.fa_ext.attention``, ``.varlen`` over sequences, ``.logits`` of either with max_logit, ``.attention_backward``,
``.varlen_backward`` and ``.draw``: what a compiled graph holds.

Their arguments are those of ``fa_ext.torch.attention``; causal and window travel as three integers (``_options.bounds``),
the names of the gradients as bits, and those that are asked for come back. The state of dropout is what ``draw`` returns,
and an argument of the others.
"""

import functools
import math
from typing import List, Optional, Tuple  # noqa: UP035

import torch
from torch import Tensor
from torch._prims_common import is_contiguous_or_false
from torch.fx.experimental.symbolic_shapes import guard_or_false, statically_known_true

from .._operands import DIFFERENTIABLE
from ._library import LIBRARY, operator
from ._options import ARRAYS, OTHERS, backward, forward, from_bounds, in_order, lse_shape, named
from ._vmap import mapped

#: Which operand the first arguments of the operators are. Those that are no tensors come after these, then the arrays that may be
#: left out.
_FORWARD = ("q", "k", "v")
_BACKWARD = ("dout", "dlse", "q", "k", "v", "out", "lse")
#: How many of the arguments are no tensors: of a dense call's operators, and of those over sequences.
_DENSE, _VARLEN = 10, 11
#: The place among them of the forward kernel's name, which the backward pass does not have; it has ``wrt`` at the end.
_KERNEL = 7


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
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(f"{name} has {x.dim()} axes; accepted: 4")
    shapes = _check(q, k, v, layout)
    torch._check_value(q.shape[0] == k.shape[0], lambda: f"{shapes}; accepted: one batch of q and k")
    return _fake_results(q, v, layout)


def _fake_varlen(q, k, v, left, right, diagonal, scale, softcap, layout, *rest):
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() not in (3, 4):
            raise ValueError(f"{name} has {x.dim()} axes; accepted: 3 or 4")
    _check(q, k, v, layout)
    return _fake_results(q, v, layout)


def _check(q, k, v, layout):
    """Raises for what does not fit, axis by axis, so that sizes which depend on data are left to the kernel; returns the shapes in
    words."""
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(f"{name} is {x.dtype} on {x.device}, but q {q.dtype} on {q.device}; accepted: one dtype and one device")
    shapes = f"q has shape {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    torch._check_value(q.shape[-1] == k.shape[-1], lambda: f"{shapes}; accepted: one head_dim of q and k")
    torch._check_value(k.dim() == v.dim(), lambda: f"{shapes}; accepted: k and v that share all axes but the last")
    for axis in range(k.dim() - 1):
        torch._check_value(k.shape[axis] == v.shape[axis], lambda: f"{shapes}; accepted: k and v that share all axes but the last")
    heads, heads_k = (x.shape[1 if x.dim() == 3 or layout == "bhsd" else 2] for x in (q, k))
    if not guard_or_false(heads == heads_k):
        words = f"{shapes}; accepted: heads of q that are a multiple of those of k"
        torch._check_value(heads_k > 0, lambda: words)
        torch._check_value(heads % heads_k == 0, lambda: words)
    return shapes


def _fake_results(q, v, layout):
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    ordered = q.dim() == 4 and layout == "bhsd"
    out = _fake_like(q, v.shape[-1]) if ordered else q.new_empty(*q.shape[:-1], v.shape[-1])
    return out, q.new_empty(lse_shape(q, layout), dtype=wide)


def _fake_like(x, width):
    if is_contiguous_or_false(x):
        return x.new_empty(*x.shape[:-1], width)
    return x.new_empty_strided(*in_order(x.shape, x.stride(), width, _less))


def _less(one, other):
    """Whether one stride is less than another; where that depends on data, whether the other is a multiple of it."""
    if guard_or_false(one < other):
        return True
    return not guard_or_false(one >= other) and statically_known_true(other % one == 0)


def _derivative(name, options, arrays):
    """``keep`` and ``differentiate`` of the operator whose gradients are those of ``torch.ops.fa_ext.<name>``. ``options``: how
    many of its arguments are no tensors; ``arrays``: the names of those that may be left out."""
    first = len(_FORWARD) + options
    places = tuple((n, (*_FORWARD, *(None,) * options, *arrays).index(grad)) for n, grad in enumerate(DIFFERENTIABLE))

    def keep(ctx, inputs, output):
        q, k, v, *rest = inputs[:first]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, *output, *inputs[first:])
        ctx.rest = *rest[:_KERNEL], *rest[_KERNEL + 1 :]

    def differentiate(ctx, dout, dlse):
        needs = ctx.needs_input_grad
        found = [None] * (len(needs) - 1)
        if dout is None and dlse is None:
            return tuple(found)
        asked = [(n, place) for n, place in places if place < len(found) and needs[place]]
        backward = getattr(torch.ops.fa_ext, name).default
        call = functools.partial(_Once.apply, backward) if torch.is_grad_enabled() else backward
        kept = ctx.saved_tensors
        grads = call(dout, dlse, *kept[:5], *ctx.rest, sum(1 << n for n, _ in asked), *kept[5:])
        for (_, place), grad in zip(asked, grads, strict=True):
            found[place] = grad
        return tuple(found)

    return {"keep": keep, "differentiate": differentiate}


@operator("attention", _fake_forward, **_derivative("attention_backward", _DENSE, OTHERS), others=OTHERS)
def attention(
    q: Tensor, k: Tensor, v: Tensor, left: int, right: int, diagonal: int, scale: Optional[float], softcap: float, layout: str,
    dropout_p: float, kernel: Optional[str], batch_invariant: bool, deterministic: bool, *others: Optional[Tensor],
) -> Tuple[Tensor, Tensor]:  # fmt: skip
    options = from_bounds(left, right, diagonal, scale, softcap, layout, dropout_p, kernel, batch_invariant, deterministic)
    return forward(q, k, v, options, named(OTHERS, others))


@operator("varlen", _fake_varlen, **_derivative("varlen_backward", _VARLEN, ARRAYS), others=ARRAYS)
def varlen(
    q: Tensor, k: Tensor, v: Tensor, left: int, right: int, diagonal: int, scale: Optional[float], softcap: float, layout: str,
    dropout_p: float, kernel: Optional[str], batch_invariant: bool, deterministic: bool, check: Optional[bool], *arrays: Optional[Tensor],
) -> Tuple[Tensor, Tensor]:  # fmt: skip
    options = from_bounds(left, right, diagonal, scale, softcap, layout, dropout_p, kernel, batch_invariant, deterministic, check)
    return forward(q, k, v, options, named(ARRAYS, arrays))


def _fake_logits(q, k, v, *rest):
    return *_fake_varlen(q, k, v, *rest), q.new_empty(_heads(q, layout=rest[5]), dtype=torch.float32)


def _heads(q, layout):
    return q.shape[1 if q.dim() == 3 or layout == "bhsd" else 2]


def _beside_logits(keep, differentiate):
    """A derivative's two functions, for an operator whose third result has none."""

    def keep_two(ctx, inputs, output):
        keep(ctx, inputs, output[:2])
        ctx.mark_non_differentiable(output[2])

    return {"keep": keep_two, "differentiate": lambda ctx, dout, dlse, _: differentiate(ctx, dout, dlse)}


@operator("logits", _fake_logits, **_beside_logits(**_derivative("varlen_backward", _VARLEN, ARRAYS)), others=ARRAYS)
def logits(
    q: Tensor, k: Tensor, v: Tensor, left: int, right: int, diagonal: int, scale: Optional[float], softcap: float, layout: str,
    dropout_p: float, kernel: Optional[str], batch_invariant: bool, deterministic: bool, check: Optional[bool], *arrays: Optional[Tensor],
) -> Tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    options = from_bounds(left, right, diagonal, scale, softcap, layout, dropout_p, kernel, batch_invariant, deterministic, check)
    max_logit = q.new_full((_heads(q, layout),), -math.inf, dtype=torch.float32)
    out, lse = forward(q, k, v, options, named(ARRAYS, arrays) | {"max_logit": max_logit})
    return out, lse, max_logit


def _fake_backward(options, names, dout, dlse, q, k, v, out, lse, *rest):
    known = {"q": q, "k": k, "v": v, **named(names, rest[options:])}
    wanted = {name: known[name] for name in _names(rest[options - 1])}
    return [_fake_like(x, x.shape[-1]) if name in ("q", "k", "v") else x.new_empty(x.shape) for name, x in wanted.items()]


class _Once(torch.autograd.Function):
    """The gradients where theirs may be asked for, which there are none of: of each transform around them, as this form of a
    function is. Its first argument is the operator."""

    @staticmethod
    def forward(backward, *args):
        return tuple(backward(*args))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.name = inputs[0].name().replace("::", ".")

    @staticmethod
    def vmap(info, in_dims, backward, *args):
        options, arrays = _OF_BACKWARD[backward]
        return _map_backward(options, arrays, functools.partial(_Once.apply, backward), info, in_dims[1:], *args)

    @staticmethod
    def backward(ctx, *cotangents):
        raise RuntimeError(
            f"torch.ops.{ctx.name} has no derivative; accepted: fa_ext.torch.attention of plain tensors, neither compiled nor under a "
            "dispatch mode, whose gradients have one"
        )


@operator("attention_backward", functools.partial(_fake_backward, _DENSE, OTHERS), others=OTHERS)
def attention_backward(
    dout: Optional[Tensor], dlse: Optional[Tensor], q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, left: int, right: int,
    diagonal: int, scale: Optional[float], softcap: float, layout: str, dropout_p: float, batch_invariant: bool, deterministic: bool,
    wrt: int, *others: Optional[Tensor],
) -> List[Tensor]:  # fmt: skip
    options = from_bounds(left, right, diagonal, scale, softcap, layout, dropout_p, None, batch_invariant, deterministic)
    return list(backward(dout, dlse, (q, k, v, out, lse), named(OTHERS, others), options, _names(wrt)))


@operator("varlen_backward", functools.partial(_fake_backward, _VARLEN, ARRAYS), others=ARRAYS)
def varlen_backward(
    dout: Optional[Tensor], dlse: Optional[Tensor], q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, left: int, right: int,
    diagonal: int, scale: Optional[float], softcap: float, layout: str, dropout_p: float, batch_invariant: bool, deterministic: bool,
    check: Optional[bool], wrt: int, *arrays: Optional[Tensor],
) -> List[Tensor]:  # fmt: skip
    options = from_bounds(left, right, diagonal, scale, softcap, layout, dropout_p, None, batch_invariant, deterministic, check)
    return list(backward(dout, dlse, (q, k, v, out, lse), named(ARRAYS, arrays), options, _names(wrt)))


#: How many arguments of the operators of a backward pass are no tensors, and the names of their arrays that may be left out.
_OF_BACKWARD = {attention_backward: (_DENSE, OTHERS), varlen_backward: (_VARLEN, ARRAYS)}


def _map_forward(call, options, arrays, info, in_dims, *args):
    return mapped(call, info, in_dims, args, (*_FORWARD, *(None,) * options, *arrays)[: len(args)])


def _map_backward(options, arrays, call, info, in_dims, *args):
    first = len(_BACKWARD) + options
    sums = args[first - 1] >> 3 != 0  # wrt
    return mapped(call, info, in_dims, args, (*_BACKWARD, *(None,) * options, *arrays)[: len(args)], sums)


for _forward, _backward in ((attention, attention_backward), (varlen, varlen_backward)):
    _options, _arrays = _OF_BACKWARD[_backward]
    torch.library.register_vmap(_forward, functools.partial(_map_forward, _forward, _options, _arrays), lib=LIBRARY)
    torch.library.register_vmap(_backward, functools.partial(_map_backward, _options, _arrays, _backward), lib=LIBRARY)
