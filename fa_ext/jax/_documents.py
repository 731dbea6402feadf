"""Documents, which are runs of equal ids in the rows of a batch, as packed sequences.

Arrays are told apart by their axes: four have q, k, v, out and what is shaped as they are, three the LSE, and no others so many.
"""

from __future__ import annotations

import operator

import jax
import jax.numpy as jnp

from .._operands import IDS
from . import _arguments as accept

_COUNT = "None, or an int from 1 to 2^31 - 2"


def documents(ids, *, count: int | None = None):
    """Ids of documents -> cu_seqlens of the packed view of the rows that they stand in, as ``fa_ext.documents``.

    Parameters
    ----------
    ids : integer array, (B, S) or (S,)
        The document of each token. Each maximal run of equal ids in a row is one, and rows end documents.
    count : int or None
        How many documents there may be, a number that is known while tracing; None: one a token.

    Returns
    -------
    int32 array, (count + 1,)
        Where documents begin, then B * S: the sequences that are left are empty. Documents beyond count belong to none.
    """
    made = accept.array("ids", ids)
    if not jnp.issubdtype(made.dtype, jnp.integer):
        raise TypeError(f"ids has dtype {made.dtype.name}; accepted: integers")
    if made.ndim not in (1, 2):
        raise ValueError(f"ids has shape {made.shape}; accepted: (batch, sequence) or (sequence,)")
    if count is not None:
        try:
            number = None if isinstance(count, (bool, jax.core.Tracer)) else operator.index(count)
        except TypeError:
            number = None
        if number is None:
            raise TypeError(f"count has type {type(count).__name__}; accepted: {_COUNT}")
        if not 1 <= number < 2**31 - 1:
            raise ValueError(f"count is {number}, out of range; accepted: {_COUNT}")
        count = number
    return _starts(made.reshape(-1, made.shape[-1]) if made.size else made.reshape(1, 0), made.size if count is None else count)


def packed(named: dict, layout: str) -> dict:
    """The operands of the call over packed sequences, by name, that a call with ids is."""
    starts = _starts(named[IDS], named[IDS].size)
    made = {name: _joined(x, layout) for name, x in named.items() if name != IDS}
    return made | {"cu_seqlens_q": starts, "cu_seqlens_k": starts}


def _starts(ids, count):
    """int32 (count + 1,): where each run begins among the rows of (B, S), one behind the other, and B * S behind the last one."""
    batch, length = ids.shape
    first = (ids != jnp.roll(ids, 1, axis=1)) | (jnp.arange(length) == 0)[None]
    (starts,) = jnp.nonzero(first.reshape(batch * length), size=count + 1, fill_value=batch * length)
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
