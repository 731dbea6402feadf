"""The eager path: autograd functions straight over the core.

There are two of each: torch's ``setup_context`` form, which torch.func needs, binds its arguments by
``inspect.signature`` at every call, which takes longer than the rest of it, so plain autograd has the older form.
"""

import functools
import warnings

import torch
from torch.autograd import Function

from .._operands import DIFFERENTIABLE, OPTIONS, STATE
from . import _math, _math_sequences
from ._options import ARRAYS, DIFFERENTIABLE_OTHERS, SEQUENCES, backward, forward, named
from ._vmap import mapped

_transformed = torch._C._are_functorch_transforms_active
_KEPT = ("dout", "dlse", "q", "k", "v", "out", "lse")
_NOTHING: dict = {}


def differentiable(q, k, v, options, others, return_lse):
    """(out, lse) or out alone, with gradients. ``others``: by name, of ``ARRAYS``."""
    if _transformed():
        out, lse = _MappedForward.apply(q, k, v, options, *map(others.get, ARRAYS))
        return (out, lse) if return_lse else out
    given = _arguments(others) if others else ()
    try:
        return (_apply_pair if return_lse else _apply)(q, k, v, options, *given)
    except BufferError:  # among others of tensors from transforms that have ended, which the longer way there unwraps
        given = (_NOTHING, tuple(others), *others.values()) if others else ()
        return (_ForwardPair if return_lse else _Forward).apply(q, k, v, options, *given)


def _arguments(others):
    """``others`` behind the options of ``_Forward``: those that have no gradient in one argument, since torch takes its time over each."""
    if DIFFERENTIABLE_OTHERS.isdisjoint(others):
        return (others,)
    names = tuple([name for name in others if name in DIFFERENTIABLE_OTHERS])
    return {name: x for name, x in others.items() if name not in names}, names, *[others[name] for name in names]


def _refuse_jvp(ctx, *tangents):
    raise NotImplementedError(
        "fa_ext.torch.attention has no forward-mode derivative (jvp); reverse mode (backward, torch.func.grad, vjp) works"
    )


def _compute(ctx, q, k, v, options, fixed, names, others):
    """(out, lse), kept for the backward pass with what they are made of."""
    if names:
        fixed = fixed | dict(zip(names, others, strict=True))
    out, lse = forward(q, k, v, options, fixed)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, out, lse, *fixed.values())
    ctx.call = options, tuple(fixed), names
    return out, lse


class _Forward(Function):
    """out of q, k, v, options, and what ``_arguments`` makes of other tensors, where there are any: torch takes its time over each
    argument, over each tensor that is kept, also where it is None, and over each result."""

    @staticmethod
    def forward(ctx, q, k, v, options, fixed=_NOTHING, names=(), *others):
        return _compute(ctx, q, k, v, options, fixed, names, others)[0]

    @staticmethod
    def backward(ctx, dout, dlse=None):
        needs = ctx.needs_input_grad
        if dout is None and dlse is None:
            return (None,) * len(needs)
        options, given, names = ctx.call
        places, wrt, rest = _asked(needs, names)
        kept, others = ctx.saved_tensors, {}
        if given:
            kept, others = kept[:5], dict(zip(given, kept[5:]))
        if _transformed():
            grads = _MappedBackward.apply(dout, dlse, *kept, options, wrt, *map(others.get, ARRAYS))
        elif torch.is_grad_enabled():
            if _several(dout, dlse):
                grads = _gradients_of_several(dout, dlse, kept, others, options, wrt)
            else:
                grads = _Backward.apply(dout, dlse, *kept, options, wrt, *map(others.get, ARRAYS))
        else:
            try:
                grads = backward(dout, dlse, kept, others, options, wrt)
            except BufferError:
                if not _several(dout, dlse):
                    raise
                grads = _gradients_of_several(dout, dlse, kept, others, options, wrt)
        if places == (0, 1, 2):
            return grads + rest
        found = dict(zip(places, grads, strict=True))
        return tuple([found.get(n) for n in range(len(needs))])

    jvp = staticmethod(_refuse_jvp)


@functools.cache
def _asked(needs, names):
    """The places and the names of the arguments of ``_Forward`` whose gradients are needed, and None for each after q, k, v."""
    places = {"q": 0, "k": 1, "v": 2} | {name: len(needs) - len(names) + n for n, name in enumerate(names)}
    asked = [(places[name], name) for name in DIFFERENTIABLE if name in places and needs[places[name]]]
    return tuple(n for n, _ in asked), tuple(name for _, name in asked), (None,) * (len(needs) - 3)


def _several(*cotangents):
    """Whether each cotangent stands for several, as in ``torch.autograd.grad(is_grads_batched=True)``; those have no memory."""
    return any(x is not None and torch._C._functorch.is_legacy_batchedtensor(x) for x in cotangents)


def _gradients_of_several(dout, dlse, kept, others, options, wrt):
    """The gradients for such cotangents, composed of torch's operations, which know them."""
    given = named(_KEPT, (dout, dlse, *kept[:3])) | others
    with torch.autocast(kept[0].device.type, enabled=False):
        return _composed(given, _composition(given, options), wrt)


class _ForwardPair(_Forward):
    """(out, lse)."""

    @staticmethod
    def forward(ctx, q, k, v, options, fixed=_NOTHING, names=(), *others):
        return _compute(ctx, q, k, v, options, fixed, names, others)


#: Their ``apply`` without what torch, before 2.15 in Python, does about each argument first.
_apply, _apply_pair = super(Function, _Forward).apply, super(Function, _ForwardPair).apply


class _MappedForward(_Forward):
    """(out, lse), of all of ``ARRAYS`` behind the options, None where absent."""

    @staticmethod
    def forward(q, k, v, options, *others):
        return forward(q, k, v, options, named(ARRAYS, others))

    @staticmethod
    def setup_context(ctx, inputs, output):
        q, k, v, options, *others = inputs
        given = named(ARRAYS, others)
        ctx.call = options, tuple(given), ARRAYS
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, *output, *given.values())

    @staticmethod
    def vmap(info, in_dims, *args):
        def call(q, k, v, options, *others):
            return differentiable(q, k, v, options, named(ARRAYS, others), True)

        return mapped(call, info, in_dims, args, ("q", "k", "v", None, *ARRAYS))


def _keep_backward(ctx, dout, dlse, q, k, v, out, lse, options, wrt, *others):
    ctx.save_for_backward(dout, dlse, q, k, v, *others)
    ctx.options, ctx.wrt = options, wrt


class _Backward(Function):
    """The gradients as a function of their own, which has a derivative again: composed of torch's operations, and only
    when it is asked for."""

    @staticmethod
    def forward(ctx, dout, dlse, q, k, v, out, lse, options, wrt, *others):
        _keep_backward(ctx, dout, dlse, q, k, v, out, lse, options, wrt, *others)
        return backward(dout, dlse, (q, k, v, out, lse), named(ARRAYS, others), options, wrt)

    @staticmethod
    def backward(ctx, *cotangents):
        _warn_of_memory()
        known = named((*_KEPT[:5], *ARRAYS), ctx.saved_tensors)
        call = _composition(known, ctx.options)
        fixed = {name: x for name, x in known.items() if name in ARRAYS and name not in DIFFERENTIABLE_OTHERS}
        given = {name: x for name, x in known.items() if name not in fixed}

        def gradients(*values):
            return _composed(dict(zip(given, values, strict=True)) | fixed, call, ctx.wrt)

        with torch.autocast(known["q"].device.type, enabled=False):
            second = dict(zip(given, torch.func.vjp(gradients, *given.values())[1](cotangents), strict=True))
        found = (*map(second.get, _KEPT), None, None, *map(second.get, ARRAYS))
        return tuple(x if needed else None for x, needed in zip(found, ctx.needs_input_grad, strict=True))

    jvp = staticmethod(_refuse_jvp)


class _MappedBackward(_Backward):
    @staticmethod
    def forward(dout, dlse, q, k, v, out, lse, options, wrt, *others):
        return backward(dout, dlse, (q, k, v, out, lse), named(ARRAYS, others), options, wrt)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _keep_backward(ctx, *inputs)

    @staticmethod
    def vmap(info, in_dims, *args):
        def call(*args):
            return (_MappedBackward if _transformed() else _Backward).apply(*args)

        wrt = args[len(_KEPT) + 1]
        return mapped(call, info, in_dims, args, (*_KEPT, None, None, *ARRAYS), sums=not DIFFERENTIABLE_OTHERS.isdisjoint(wrt))


def _composition(known, options):
    """Attention of torch's operations: a function of q, k, v and options by name. ``known``: the arrays of the call by name."""
    q, k = known["q"], known["k"]
    indices = {name: known[name] for name in SEQUENCES if name in known}
    if indices or q.dim() == 3:
        sequences = _math_sequences.sequences_of(q, k, indices, options)
        attention = functools.partial(_math_sequences.attention, sequences=sequences)
        pairs = _math_sequences.pairs_of(q, sequences, options)
    else:
        attention, pairs = _math.attention, _math.pairs_of(q, k, options)
    return functools.partial(attention, keep=_math.dropped(pairs, known.get(STATE), options, q.device), options=options)


def _composed(given, call, wrt):
    """The gradients named by ``wrt``, of ``call``, a ``_composition``, on what is given by name."""

    def attention(*values):
        now = given | dict(zip(wrt, values, strict=True))
        return call(now["q"], now["k"], now["v"], {name: now[name] for name in OPTIONS if name in now})

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
