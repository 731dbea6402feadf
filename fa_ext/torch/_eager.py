"""The eager path: autograd functions straight over the core.

There are two of each: torch's ``setup_context`` form, which torch.func needs, binds its arguments by
``inspect.signature`` at every call, which takes longer than the rest of it, so plain autograd has the older form.
"""

import functools
import warnings

import torch
from torch.autograd import Function

from . import _math
from ._options import NAMES, backward, forward
from ._vmap import map_backward, map_forward

_transformed = torch._C._are_functorch_transforms_active
_NONE = (None,) * 5


def differentiable(q, k, v, options, others, return_lse):
    """(out, lse) or out alone, with gradients. ``others``: (bias, mask, sinks, alibi, state), or () where all are None."""
    if _transformed():
        out, lse = _MappedForward.apply(q, k, v, options, *(others or _NONE))
        return (out, lse) if return_lse else out
    try:
        return (_apply_pair if return_lse else _apply)(q, k, v, options, *others)
    except BufferError:  # among others of tensors from transforms that have ended, which the longer way there unwraps
        return (_ForwardPair if return_lse else _Forward).apply(q, k, v, options, *others)


def _refuse_jvp(ctx, *tangents):
    raise NotImplementedError(
        "fa_ext.torch.attention has no forward-mode derivative (jvp); reverse mode (backward, torch.func.grad, vjp) works"
    )


def _compute(ctx, q, k, v, options, others):
    """(out, lse), kept for the backward pass with what they are made of."""
    out, lse = forward(q, k, v, options, others)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, out, lse, *others)
    ctx.options = options
    return out, lse


class _Forward(Function):
    """out of q, k, v, options, and bias, mask, sinks, alibi and state unless all of those are None: torch takes its time over
    each argument, over each tensor that is kept, also where it is None, and over each result."""

    @staticmethod
    def forward(ctx, q, k, v, options, *others):
        return _compute(ctx, q, k, v, options, others)[0]

    @staticmethod
    def backward(ctx, dout, dlse=None):
        needs = ctx.needs_input_grad
        if dout is None and dlse is None:
            return (None,) * len(needs)
        places, wrt, others = _asked(needs)
        kept = ctx.saved_tensors
        if _transformed():
            grads = _MappedBackward.apply(dout, dlse, *kept, *_NONE[: 10 - len(kept)], ctx.options, wrt)
        elif torch.is_grad_enabled():
            if _several(dout, dlse):
                grads = _gradients_of_several(dout, dlse, kept, ctx.options, wrt)
            else:
                grads = _Backward.apply(dout, dlse, *kept, *_NONE[: 10 - len(kept)], ctx.options, wrt)
        else:
            try:
                grads = backward(dout, dlse, kept, ctx.options, wrt)
            except BufferError:
                if not _several(dout, dlse):
                    raise
                grads = _gradients_of_several(dout, dlse, kept, ctx.options, wrt)
        if places == (0, 1, 2):
            return grads + others
        found = dict(zip(places, grads, strict=True))
        return tuple([found.get(n) for n in range(len(needs))])

    jvp = staticmethod(_refuse_jvp)


@functools.cache
def _asked(needs):
    """The places and the names of the arguments of ``_Forward`` whose gradients are needed, and None for each after q, k, v."""
    asked = [(n, name) for n, name in zip((0, 1, 2, 4, 6), NAMES, strict=True) if n < len(needs) and needs[n]]
    return tuple(n for n, _ in asked), tuple(name for _, name in asked), (None,) * (len(needs) - 3)


def _several(*cotangents):
    """Whether each cotangent stands for several, as in ``torch.autograd.grad(is_grads_batched=True)``; those have no memory."""
    return any(x is not None and torch._C._functorch.is_legacy_batchedtensor(x) for x in cotangents)


def _gradients_of_several(dout, dlse, kept, options, wrt):
    """The gradients for such cotangents, composed of torch's operations, which know them."""
    q, k, v, _, _, bias, mask, sinks, alibi, state = *kept, *_NONE[: 10 - len(kept)]
    given = {"dout": dout, "dlse": dlse, "q": q, "k": k, "v": v, "bias": bias, "sinks": sinks}
    given = {name: x for name, x in given.items() if x is not None}
    with torch.autocast(q.device.type, enabled=False):
        return _composed(given, mask, alibi, _math.dropped(q, k, state, options), options, wrt)


class _ForwardPair(_Forward):
    """(out, lse)."""

    @staticmethod
    def forward(ctx, q, k, v, options, *others):
        return _compute(ctx, q, k, v, options, others)


#: Their ``apply`` without what torch, before 2.15 in Python, does about each argument first.
_apply, _apply_pair = super(Function, _Forward).apply, super(Function, _ForwardPair).apply


class _MappedForward(_Forward):
    """(out, lse)."""

    @staticmethod
    def forward(q, k, v, options, *others):
        return forward(q, k, v, options, others)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:3], *output, *inputs[4:])
        ctx.options = inputs[3]

    @staticmethod
    def vmap(info, in_dims, q, k, v, options, *others):
        def call(q, k, v, *others):
            return differentiable(q, k, v, options, others, True)

        return map_forward(call, info, (*in_dims[:3], *in_dims[4:]), q, k, v, *others)


def _keep_backward(ctx, dout, dlse, q, k, v, out, lse, bias, mask, sinks, alibi, state, options, wrt):
    ctx.save_for_backward(dout, dlse, q, k, v, bias, mask, sinks, alibi, state)
    ctx.options, ctx.wrt = options, wrt


class _Backward(Function):
    """The gradients as a function of their own, which has a derivative again: composed of torch's operations, and only
    when it is asked for."""

    @staticmethod
    def forward(ctx, *args):
        _keep_backward(ctx, *args)
        return backward(*args[:2], args[2:12], *args[12:])

    @staticmethod
    def backward(ctx, *cotangents):
        _warn_of_memory()
        dout, dlse, q, k, v, bias, mask, sinks, alibi, state = ctx.saved_tensors
        given = {"dout": dout, "dlse": dlse, "q": q, "k": k, "v": v, "bias": bias, "sinks": sinks}
        given = {name: x for name, x in given.items() if x is not None}
        keep = _math.dropped(q, k, state, ctx.options)

        def gradients(*values):
            return _composed(dict(zip(given, values, strict=True)), mask, alibi, keep, ctx.options, ctx.wrt)

        with torch.autocast(q.device.type, enabled=False):
            second = dict(zip(given, torch.func.vjp(gradients, *given.values())[1](cotangents), strict=True))
        of = second.get
        found = of("dout"), of("dlse"), of("q"), of("k"), of("v"), None, None, of("bias"), None, of("sinks"), None, None, None, None
        return tuple(x if needed else None for x, needed in zip(found, ctx.needs_input_grad, strict=True))

    jvp = staticmethod(_refuse_jvp)


class _MappedBackward(_Backward):
    @staticmethod
    def forward(dout, dlse, q, k, v, out, lse, bias, mask, sinks, alibi, state, options, wrt):
        return backward(dout, dlse, (q, k, v, out, lse, bias, mask, sinks, alibi, state), options, wrt)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _keep_backward(ctx, *inputs)

    @staticmethod
    def vmap(info, in_dims, *args):
        def call(*args):
            return (_MappedBackward if _transformed() else _Backward).apply(*args)

        sums = not {"bias", "sinks"}.isdisjoint(args[-1])
        return map_backward(call, info, (*in_dims[:-1], None), *args, sums=sums)


def _composed(given, mask, alibi, keep, options, wrt):
    """The gradients named by ``wrt``, of differentiable operations."""

    def attention(*values):
        now = given | dict(zip(wrt, values, strict=True))
        bias, sinks = now.get("bias"), now.get("sinks")
        return _math.attention(now["q"], now["k"], now["v"], bias, mask, sinks, alibi, keep, options)

    (out, lse), pull = torch.func.vjp(attention, *(given[name] for name in wrt))
    cotangents = given.get("dout"), given.get("dlse")
    return pull(tuple(torch.zeros_like(x) if c is None else c for c, x in zip(cotangents, (out, lse), strict=True)))


_warned = False


def _warn_of_memory():
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            "fa_ext.torch.attention is differentiated twice: its second derivative takes memory for every pair of query and "
            "key (this is said once)",
            stacklevel=2,
        )
