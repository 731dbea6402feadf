"""Documents, which are runs of equal ids in the rows of a batch, as packed sequences.

Arrays are told apart by their axes: four have q, k, v, out and what is shaped as they are, three the LSE, and no others so many.
"""

from __future__ import annotations

import jax.numpy as jnp

from .._operands import IDS


def packed(named: dict, layout: str) -> dict:
    """The operands of the call over packed sequences, by name, that a call with ids is."""
    starts = _starts(named[IDS])
    made = {name: _joined(x, layout) for name, x in named.items() if name != IDS}
    return made | {"cu_seqlens_q": starts, "cu_seqlens_k": starts}


def _starts(ids):
    """int32 (B * S + 1,): where each run begins among the rows of (B, S), one behind the other, and B * S behind the last one."""
    batch, length = ids.shape
    first = (ids != jnp.roll(ids, 1, axis=1)) | (jnp.arange(length) == 0)[None]
    (starts,) = jnp.nonzero(first.reshape(batch * length), size=batch * length + 1, fill_value=batch * length)
    return starts.astype(jnp.int32)


def _joined(x, layout):
    """Batch and rows as one axis."""
    if x.ndim == 3:
        return x.swapaxes(0, 1).reshape(x.shape[1], x.shape[0] * x.shape[2])
    if x.ndim == 4:
        x = x if layout == "bshd" else x.swapaxes(1, 2)
        return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])
    return x


def unpacked(x, shape, layout):
    """A result of the packed call in the shape of the call with ids."""
    if len(shape) == 3:
        return x.reshape(shape[1], shape[0], shape[2]).swapaxes(0, 1)
    if len(shape) == 4 and layout == "bhsd":
        return x.reshape(shape[0], shape[2], shape[1], shape[3]).swapaxes(1, 2)
    return x.reshape(shape)
