"""The options of a call, listed once: as the core takes them, and as the custom operators carry them."""

import functools
import operator
from typing import Any

import numpy as np
import torch

from .. import _core
from .._operands import DIFFERENTIABLE, OPTIONS, SEQUENCES, STATE, operand_pair

#: The tensors of a dense call besides q, k and v, in the order of the operators' arguments.
OTHERS = (STATE, *OPTIONS)
#: The tensors of any call with gradients besides q, k and v.
ARRAYS = (*OTHERS, *SEQUENCES)
#: Those that can have a gradient.
DIFFERENTIABLE_OTHERS = frozenset(DIFFERENTIABLE) & frozenset(OTHERS)

#: The options of both passes, by the core's names, with their defaults.
SHARED = {"causal": False, "scale": None, "window": None, "softcap": 0.0, "layout": "bhsd", "batch_invariant": False, "check": None}
#: The index arrays of packed sequences, and of most calls over sequences.
_STARTS = frozenset(("cu_seqlens_q", "cu_seqlens_k"))
_TENSOR, _INT32 = torch.Tensor, torch.int32


class Options:
    """The options of one call that are no tensors.

    ``shared``: of ``SHARED``, what is not the default, since the core finds each keyword by its name; ``causal`` and ``layout``: by
    themselves, and ``plain``: nothing else is given, which is written out below, alone and with ``_STARTS``, in half of the time of a
    call with ``**`` on the way there; ``kernel``: of the forward; ``deterministic``: of the backward; ``dropout_p``: the state that
    goes with it is a tensor, and travels with the tensors.
    """

    __slots__ = ("causal", "deterministic", "dropout_p", "kernel", "layout", "plain", "shared")

    def __init__(self, causal, scale, window, softcap, layout, dropout_p, kernel, batch_invariant, deterministic, check=None):
        self.shared = shared = {}
        if scale is not None:
            shared["scale"] = scale
        if window is not None:
            shared["window"] = window
        if softcap != 0.0:
            shared["softcap"] = softcap
        if batch_invariant is not False:
            shared["batch_invariant"] = batch_invariant
        if check is not None:
            shared["check"] = check
        self.plain = kernel is None and not shared
        if layout != "bhsd":
            shared["layout"] = layout
        if causal is not False:
            shared["causal"] = causal
        self.causal = causal
        self.layout = layout
        self.dropout_p = dropout_p
        self.kernel = kernel
        self.deterministic = deterministic

    def __getitem__(self, name):
        return self.shared.get(name, SHARED[name])


def named(names, tensors):
    """{name: tensor} of those that are there."""
    for x in tensors:
        if x is not None:
            return {name: x for name, x in zip(names, tensors) if x is not None}
    return {}


def forward(q, k, v, options, others, return_lse=True):
    """The core's forward pass: (out, lse), or out alone. ``others``: by name, of ``ARRAYS``."""
    ordered = not q.is_contiguous() and options.layout == "bhsd" and q.dim() == 4 and v.dim() >= 3
    out = empty_in_order(q, v.shape[-1]) if ordered else None
    if options.plain:
        if not others:
            return _core.attention(q, k, v, causal=options.causal, layout=options.layout, out=out, return_lse=return_lse)
        if others.keys() == _STARTS:
            return _core.attention(
                q, k, v, causal=options.causal, layout=options.layout, out=out, return_lse=return_lse,
                cu_seqlens_q=others["cu_seqlens_q"], cu_seqlens_k=others["cu_seqlens_k"],
            )  # fmt: skip
    given = _given(options, others)
    if options.kernel is not None:
        return _core.attention(q, k, v, out=out, return_lse=return_lse, kernel=options.kernel, **given)
    return _core.attention(q, k, v, out=out, return_lse=return_lse, **given)


def backward(dout, dlse, kept, others, options, wrt):
    """The core's gradients, in the order of ``wrt``. ``kept``: q, k, v, out, lse; ``others`` as above."""
    deterministic, grads = options.deterministic, None
    q, k, v, out, lse = kept
    if not (q.is_contiguous() and k.is_contiguous() and v.is_contiguous()):
        known = {"q": q, "k": k, "v": v}
        grads = tuple([empty_in_order(known[name], known[name].shape[-1]) if name in known else None for name in wrt])
    if options.plain:
        if not others:
            return _core.attention_backward(
                dout, q, k, v, out, lse, dlse=dlse, wrt=wrt, grads=grads, causal=options.causal, layout=options.layout,
                deterministic=deterministic,
            )  # fmt: skip
        if others.keys() == _STARTS:
            return _core.attention_backward(
                dout, q, k, v, out, lse, dlse=dlse, wrt=wrt, grads=grads, causal=options.causal, layout=options.layout,
                deterministic=deterministic, cu_seqlens_q=others["cu_seqlens_q"], cu_seqlens_k=others["cu_seqlens_k"],
            )  # fmt: skip
    given = _given(options, others)
    return _core.attention_backward(
        dout, q, k, v, out, lse, dlse=dlse, wrt=wrt, grads=grads, deterministic=deterministic, **given
    )


def empty_in_order(x, width):
    """An empty tensor of x's shape, but for ``width`` of its last axis, whose axes are in memory in the order of x's, the last
    innermost: torch's rule for the results of FLASH and cuDNN."""
    return x.new_empty_strided(*_in_order(x.shape, x.stride(), width))


def in_order(shape, strides, width, less=operator.lt):
    """Shape and strides of ``empty_in_order``. ``less`` compares two strides."""
    order, last = [0], len(shape) - 1
    for axis in range(1, last):
        place = axis
        while place and less(strides[order[place - 1]], strides[axis]):
            place -= 1
        order.insert(place, axis)
    found, step = [1] * len(shape), width
    for axis in reversed(order):
        found[axis] = step
        step *= shape[axis]
    return (*shape[:last], width), tuple(found)


def lse_shape(q, layout):
    if q.dim() == 3:
        return q.shape[1], q.shape[0]
    return (q.shape[0], q.shape[2], q.shape[1]) if layout == "bshd" else tuple(q.shape[:3])


_in_order = functools.lru_cache(maxsize=1024)(in_order)


def _given(options, others):
    """The core's keywords for what was given."""
    if not others:
        return options.shared
    given: dict[str, Any] = {**options.shared, **others}
    if STATE in given:
        given["dropout"] = (options.dropout_p, given.pop(STATE))
    return with_pairs(given)


#: Keywords that are pairs of arrays: the operands behind them, and what is accepted.
_PAIRS = {
    "k_range": (("k_range_begin", "k_range_end"), "None or a pair (begin, end), each a tensor (batch,) or None"),
    "segments": (("q_segments", "k_segments"), "None or a pair of tensors (q_ids, k_ids), (batch, seq_q) and (batch, seq_k)"),
}
#: The words for those operands in messages.
_WORDS = {"k_range_begin": "k_range's begin", "k_range_end": "k_range's end", "q_segments": "segments' q_ids", "k_segments": "segments' k_ids"}


def with_pairs(given):
    """Operands that are two of one keyword of the core, where one is given, as that keyword."""
    for keyword, ((first, second), _) in _PAIRS.items():
        if first in given or second in given:
            given[keyword] = given.pop(first, None), given.pop(second, None)
    return given


def _pair(keyword, pair):
    names, accepted = _PAIRS[keyword]
    return operand_pair(keyword, pair, names, accepted)


def index_arrays(k_range, segments, given, through_op=True):
    """Those of index arrays that are given, by the core's names: of int32, which int64 is turned into. ``through_op``: by an
    operator."""
    if k_range is not None:
        given |= _pair("k_range", k_range)
    if segments is not None:
        given |= _pair("segments", segments)
    found = {}
    for name, x in given.items():
        if x is None:
            continue
        if type(x) is _TENSOR and x.dtype is _INT32 and not through_op:
            found[name] = x  # the core looks at the rest
            continue
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{_WORDS.get(name, name)} has type {type(x).__name__}; accepted: torch.Tensor of int32 or int64")
        refuse_layout(name, x)
        if x.dtype != torch.int64:
            found[name] = x
        elif name == "cu_seqlens_k" and x is given["cu_seqlens_q"]:
            found[name] = found["cu_seqlens_q"]
        else:
            found[name] = x.to(torch.int32)
    return found


def refuse_layout(name, x):
    """Raises a TypeError for a tensor without strides."""
    if x.is_nested:
        raise TypeError(
            f"{name} is a nested tensor ({x.layout}); accepted: strided tensors; sequences of any length lie in one, with "
            "cu_seqlens_q and cu_seqlens_k"
        )
    if x.layout is not torch.strided:
        raise TypeError(f"{name} has layout {x.layout}; accepted: torch.strided")


def refuse_layouts(**given):
    """``refuse_layout`` for each that is a tensor."""
    for name, x in given.items():
        if isinstance(x, torch.Tensor):
            refuse_layout(name, x)


def checked_causal(causal):
    """``causal``; ValueError or TypeError for what the core does not take, which an operator would not say so well."""
    if isinstance(causal, np.bool_):
        return bool(causal)
    if not isinstance(causal, (bool, str)):
        raise TypeError(f"causal has type {type(causal).__name__}; accepted: {_CAUSALS}")
    if causal not in (False, True, "top_left", "bottom_right"):
        raise ValueError(f"causal is {causal!r}; accepted: {_CAUSALS}")
    return causal


def ends_of(window):
    """(left, right) of ``window``, each None for no bound; ValueError or TypeError as ``checked_causal``."""
    if window is None:
        return None, None
    if not isinstance(window, (tuple, list)):
        raise TypeError(f"window has type {type(window).__name__}; accepted: {_WINDOWS}")
    if len(window) != 2:
        raise ValueError(f"window has {len(window)} items; accepted: {_WINDOWS}")
    for name, bound in zip(("left", "right"), window, strict=True):
        if bound is None:
            continue
        if isinstance(bound, bool) or not hasattr(bound, "__index__"):
            raise TypeError(f"window's {name} bound has type {type(bound).__name__}; accepted: None (no bound) or an int >= 0")
        if bound < 0:
            raise ValueError(f"window's {name} bound is {bound}; accepted: None (no bound) or an int >= 0")
    return tuple(_integer(bound) for bound in window)


def count_of(name, value):
    """An int or None as an operator takes it; whether it is negative the kernel says, so that no graph depends on it."""
    if isinstance(value, (bool, float)):  # which operators take for ints; they refuse all else
        raise TypeError(f"{name} has type {type(value).__name__}; accepted: an int >= 0, or None")
    return _integer(value)


def _integer(bound):
    """A bound as an operator takes it: beyond 64 bits there are no keys."""
    if isinstance(bound, (np.integer, torch.Tensor)):
        bound = int(bound)
    return min(bound, 2**63 - 1) if type(bound) is int else bound


_CAUSALS = "False, True, 'top_left', 'bottom_right'"
_WINDOWS = "None or a pair (left, right), each an int >= 0 or None"


def bounds(causal, window, lengths):
    """(left, right, diagonal): key j is visible to query i iff -left <= j - (i + d) <= right, where -1 has no bound and d is
    0 for diagonal 0, seq_k - seq_q for diagonal 1. ``lengths``: (seq_q, seq_k), or None for sequences, which have each their
    own. Raises ValueError and TypeError as the core does."""
    causal = checked_causal(causal)
    if causal is True and (lengths is None or lengths[0] != lengths[1]):
        words = "sequences" if lengths is None else f"{lengths[0]} queries and {lengths[1]} keys"
        raise ValueError(f"causal=True with {words}; accepted: 'top_left' or 'bottom_right' then")
    left, right = ends_of(window)
    left, right = -1 if left is None else left, -1 if right is None else right
    return left, right if causal is False else 0, 1 if causal in (False, "bottom_right") else 0


@functools.lru_cache(maxsize=1024, typed=True)
def from_bounds(left, right, diagonal, scale, softcap, layout, dropout_p, kernel, batch_invariant, deterministic, check=None):
    """The options behind an operator's arguments: the inverse of ``bounds``."""
    causal = "top_left" if diagonal == 0 else "bottom_right" if right == 0 else False
    ends = (None if left < 0 else left, None if right < 0 or causal else right)
    window = None if ends == (None, None) else ends
    return Options(causal, scale, window, softcap, layout, dropout_p, kernel, batch_invariant, deterministic, check)
