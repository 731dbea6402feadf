"""The gradients of attention in float64, written to be read: what every backward kernel is judged by.

``attention_backward`` is the truth; ``plain_backward`` is the same formula in the arithmetic of a straightforward unfused
computation in the dtype. Both start from q, k, v, dout and dlse alone: out and LSE are their own, not the rounded ones
that a kernel is given. They cover the whole surface of ``fa_ext.attention_backward``, take NumPy or CuPy arrays and share
no code with the library: dense calls are ``dense_backward``'s, those with sequences ``serving_backward``'s.
"""

from __future__ import annotations

import sys

from . import dense, serving_backward
from .dense_backward import Backward, Gradients

__all__ = ["Gradients", "attention_backward", "gradients", "plain_backward"]

_NAMES = ("q", "k", "v", "bias", "sinks")


def attention_backward(dout, q, k, v, *, wrt=("q", "k", "v"), **options):
    """Gradients in float64, a tuple in the order of ``wrt``. Arguments as for ``gradients``."""
    found = gradients(dout, q, k, v, wrt=wrt, **options)
    return tuple(found[name] for name in wrt)


def plain_backward(dout, q, k, v, *, wrt=("q", "k", "v"), dtype=None, **options):
    """Gradients as an unfused computation in ``dtype`` (a name; default: q's) finds them, a tuple of float64 arrays.

    out and LSE are those of the plain forward; S, P, dP, dS and the results are rounded to the dtype; delta and all sums
    are float32 (float64 for float64), those of float32 products by eights as in ``reference.plain``. dbias and dsinks are
    rounded to the dtype of their argument.
    """
    found = gradients(dout, q, k, v, wrt=wrt, dtype=dtype or q.dtype.name, **options)
    return tuple(found[name] for name in wrt)


def gradients(dout, q, k, v, *, dlse=None, wrt=("q", "k", "v"), xp=None, dtype=None, **options) -> Gradients:
    """Both evaluations: exact for ``dtype`` None, else plain in the dtype of that name.

    Arguments as in ``fa_ext.attention_backward`` (``reference.Options``), as NumPy or CuPy arrays of any real dtype;
    ``dout`` may be None (zeros). ``xp`` is the array module; inferred from q. NaN and Inf of a query or a key reach only
    what the pairs that see each other touch; a query without a visible key touches nothing. Sequences, and what is stored
    packed, mean what they mean in ``serving``; rows of no sequence are not read, and their gradients are 0.
    """
    xp = xp or sys.modules[type(q).__module__.partition(".")[0]]
    for name in wrt:
        if name not in _NAMES:
            raise ValueError(f"wrt names {name!r}; accepted: {', '.join(_NAMES)}")
    given = dense.Options(**options)
    layout = given.layout
    if given.sequences(q, k):
        return serving_backward.gradients(dout, q, k, v, dlse=dlse, wrt=wrt, xp=xp, dtype=dtype, options=given)
    if layout == "bshd":
        q, k, v = (xp.swapaxes(x, 1, 2) for x in (q, k, v))
        dout = None if dout is None else xp.swapaxes(dout, 1, 2)
    elif layout != "bhsd":
        raise ValueError(f"layout is {layout!r}; accepted: 'bhsd', 'bshd'")
    call = Backward(xp, q, k, v, dout, dlse, given, wrt, dtype)
    call.run()
    found = call.results()
    if layout == "bshd":
        for name in "qkv":
            if name in found:
                found[name] = xp.swapaxes(found[name], 1, 2)
    return found
