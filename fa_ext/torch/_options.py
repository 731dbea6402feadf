"""The options of a call, listed once: as the core takes them, and as the custom operators carry them."""

import inspect
from typing import Any

from .. import _core

#: What can have a gradient, in the order of the bits of the operators' ``wrt``.
NAMES = ("q", "k", "v", "bias", "sinks")

#: Whether this build of the core drops weights.
HAS_DROPOUT = "dropout" in inspect.signature(_core.attention).parameters


class Options:
    """The options of one call that are no tensors.

    ``shared``: what both passes take, by the core's names; ``kernel``: of the forward; ``deterministic``: of the backward;
    ``dropout_p``: the state that goes with it is a tensor, and travels with the tensors.
    """

    __slots__ = ("deterministic", "dropout_p", "kernel", "shared")

    def __init__(self, causal, scale, window, softcap, layout, dropout_p, kernel, batch_invariant, deterministic):
        self.shared: dict[str, Any] = {
            "causal": causal,
            "scale": scale,
            "window": window,
            "softcap": softcap,
            "layout": layout,
            "batch_invariant": batch_invariant,
        }
        self.dropout_p = dropout_p
        self.kernel = kernel
        self.deterministic = deterministic


def forward(q, k, v, bias, mask, sinks, state, options, return_lse=True):
    """The core's forward pass: (out, lse), or out alone."""
    more: dict[str, Any] = {} if state is None else {"dropout": (options.dropout_p, state)}
    return _core.attention(
        q, k, v, bias=bias, mask=mask, sinks=sinks, return_lse=return_lse, kernel=options.kernel, **options.shared, **more
    )  # fmt: skip


def backward(dout, dlse, q, k, v, out, lse, bias, mask, sinks, state, options, wrt):
    """The core's gradients, in the order of ``wrt``."""
    more: dict[str, Any] = {} if state is None else {"dropout": (options.dropout_p, state)}
    return _core.attention_backward(
        dout, q, k, v, out, lse, dlse=dlse, bias=bias, mask=mask, sinks=sinks, wrt=wrt,
        deterministic=options.deterministic, **options.shared, **more
    )  # fmt: skip


def bounds(causal, window, seq_q, seq_k):
    """(left, right, diagonal): key j is visible to query i iff -left <= j - (i + d) <= right, where -1 has no bound and d is
    0 for diagonal 0, seq_k - seq_q for diagonal 1. Raises ValueError and TypeError as the core does."""
    if causal not in (False, True, "top_left", "bottom_right"):
        raise ValueError(f"causal is {causal!r}; accepted: False, True, 'top_left', 'bottom_right'")
    if causal is True and seq_q != seq_k:
        raise ValueError(f"causal=True with {seq_q} queries and {seq_k} keys; accepted: 'top_left' or 'bottom_right' then")
    left, right = (None, None) if window is None else window
    for name, bound in (("left", left), ("right", right)):
        if bound is not None and bound < 0:
            raise ValueError(f"window's {name} bound is {bound}; accepted: None (no bound) or an int >= 0")
    left, right = -1 if left is None else left, -1 if right is None else right
    return left, right if causal is False else 0, 1 if causal in (False, "bottom_right") else 0


def from_bounds(left, right, diagonal, scale, softcap, layout, dropout_p, kernel, batch_invariant, deterministic):
    """The options behind an operator's arguments: the inverse of ``bounds``."""
    causal = "top_left" if diagonal == 0 else "bottom_right" if right == 0 else False
    window = (None if left < 0 else left, None if right < 0 or causal else right)
    return Options(causal, scale, window, softcap, layout, dropout_p, kernel, batch_invariant, deterministic)
