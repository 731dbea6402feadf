"""Dropout's mask: Philox4x32-7 (Salmon et al., 2011) keyed by the seed and counted by the position of a pair.

The mask depends on (seed, offset) and on the batch entry, head, query and key alone: it is the same for every kernel,
device, tiling and shard. Written to be read, in NumPy or CuPy; shares no code with the kernels.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any

import numpy

__all__ = ["Dropout", "dropout_keep", "philox"]

_ACCEPTED = "None, (p, seed), (p, seed, offset), (p, seed, offset, origin, heads) or (p, state)"
_LONGEST = 1 << 31


@dataclass(frozen=True)
class Dropout:
    """The value of ``dropout=``. ``threshold``: a weight is kept if its 16 random bits are at least that."""

    threshold: int
    seed: int
    offset: int
    origin: tuple[int, int, int, int]  #: (b0, h0, i0, j0) of the call within the whole
    heads: int  #: of the whole

    @property
    def scale(self) -> float:
        """Factor of a kept weight: one over the probability that it is kept; 0 where none is."""
        return 65536 / (65536 - self.threshold) if self.threshold < 65536 else 0.0

    @classmethod
    def read(cls, dropout, batch, heads, seq_q, seq_k) -> Dropout | None:
        """From the argument of a call of this shape; ValueError or TypeError names the field."""
        if dropout is None:
            return None
        if not isinstance(dropout, (tuple, list)) or len(dropout) not in (2, 3, 5):
            error = ValueError if isinstance(dropout, (tuple, list)) else TypeError
            raise error(f"dropout is {dropout!r}; accepted: {_ACCEPTED}")
        p = dropout[0]
        if isinstance(p, (bool, numpy.bool_)) or not isinstance(p, (int, float, numpy.floating, numpy.integer)):
            raise TypeError(f"dropout's p has type {type(p).__name__}; accepted: a float from 0 to 1")
        if not 0 <= p <= 1:
            raise ValueError(f"dropout's p is {p}; accepted: 0 to 1")
        threshold = int(65536 * float(p) + 0.5)
        if len(dropout) == 2 and getattr(dropout[1], "shape", ()) != ():
            seed, offset, origin, whole = cls._state(dropout[1])
            whole = whole or heads
        else:
            seed = _integer("seed", dropout[1], 1 << 64)
            offset = _integer("offset", dropout[2], 1 << 32) if len(dropout) > 2 else 0
            origin, whole = (0, 0, 0, 0), heads
            if len(dropout) == 5:
                if not isinstance(dropout[3], (tuple, list)) or len(dropout[3]) != 4:
                    raise ValueError(f"dropout's origin is {dropout[3]!r}; accepted: four ints (b0, h0, i0, j0)")
                b0, h0, i0, j0 = (_integer(f"origin[{n}]", x, _LONGEST) for n, x in enumerate(dropout[3]))
                origin = b0, h0, i0, j0
                whole = _integer("heads", dropout[4], _LONGEST)
        if origin[1] + heads > whole:
            least = origin[1] + heads
            raise ValueError(f"dropout's heads is {whole}; accepted: at least origin's h0 and the call's heads, {least}")
        for n, extent in ((2, seq_q), (3, seq_k)):
            if origin[n] + extent > _LONGEST:
                raise ValueError(f"dropout's origin[{n}] is {origin[n]}; accepted: up to 2^31 with the call's own length")
        return cls(threshold, seed, offset, origin, whole)

    def moved(self, b: int, j: int) -> Dropout:
        """Of a call whose batch entry 0 and key 0 are this call's b and j."""
        b0, h0, i0, j0 = self.origin
        return replace(self, origin=(b0 + b, h0, i0, j0 + j))

    @staticmethod
    def _state(state):
        """(seed, offset, origin, heads) of eight 32-bit words {seed low, seed high, offset, b0, h0, i0, j0, heads}."""
        from ._core import to_numpy

        state = state if isinstance(state, numpy.ndarray) else to_numpy(state)
        words = state.shape == (8,) and state.dtype in (numpy.uint32, numpy.int32)
        if not words and not (state.shape == (4,) and state.dtype == numpy.int64):
            raise ValueError(
                f"dropout's state has shape {state.shape} and dtype {state.dtype}; accepted: (8,) of uint32 or int32, "
                "(4,) of int64"
            )
        word = [int(w) for w in numpy.ascontiguousarray(state).view(numpy.uint32)]
        return word[0] | word[1] << 32, word[2], (word[3], word[4], word[5], word[6]), word[7]

    def keeps(self, xp, b, h, i, j):
        """Boolean array over index arrays that broadcast against each other: True where a weight is kept."""
        b, h, i, j = (xp.asarray(x).astype(xp.uint64) + xp.uint64(first) for x, first in zip((b, h, i, j), self.origin, strict=True))
        low = xp.uint64(0xFFFFFFFF)

        def part(x, shift, mask):
            return (x >> xp.uint64(shift)) & xp.uint64(mask)

        c0 = part(j, 4, 0xFFFFFFFF) << xp.uint64(5) | part(i, 0, 7) << xp.uint64(2) | part(j, 1, 3)
        c2 = (b * xp.uint64(self.heads) + h) & low
        c0, c1, c2, c3 = xp.broadcast_arrays(c0, i >> xp.uint64(4), c2, xp.asarray(self.offset, dtype=xp.uint64))
        words = philox(xp, (c0, c1, c2, c3), (self.seed & 0xFFFFFFFF, self.seed >> 32))
        row, odd, high = part(i, 3, 1), part(j, 0, 1), part(j, 3, 1)
        word = xp.where(odd == 1, xp.where(row == 1, words[3], words[2]), xp.where(row == 1, words[1], words[0]))
        return (word >> (high * xp.uint64(16))) & xp.uint64(0xFFFF) >= xp.uint64(self.threshold)


def _integer(name, value, past):
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"dropout's {name} has type {type(value).__name__}; accepted: an int") from None
    if isinstance(value, (bool, numpy.bool_)):
        raise TypeError(f"dropout's {name} has type bool; accepted: an int")
    if not 0 <= number < past:
        raise ValueError(f"dropout's {name} is {number}; accepted: 0 to 2^{past.bit_length() - 1} - 1")
    return number


def philox(xp, counter, key, rounds=7):
    """Four arrays of 32 random bits (uint64) from four of 32-bit counters and a key of two 32-bit ints."""
    low, half = xp.uint64(0xFFFFFFFF), xp.uint64(32)
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        a, b = xp.uint64(0xD2511F53) * c0, xp.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (b >> half) ^ c1 ^ xp.uint64(k0), b & low, (a >> half) ^ c3 ^ xp.uint64(k1), a & low
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def dropout_keep(batch, heads, seq_q, seq_k, dropout, *, device: int | None = None, out: Any = None):
    """The mask of ``dropout=`` for a call of this shape: a boolean array (B, H, Sq, Sk), True where a weight is kept.

    dropout: as in ``fa_ext.attention``, but not None. device: None for a NumPy array; the ordinal of a CUDA device is
    refused with ``UnsupportedError`` in this release. out: a writable boolean NumPy array of the shape to fill and return.

    Raises ValueError or TypeError that names the argument or the field of ``dropout``.
    """
    import fa_ext

    shape = tuple(_extent(name, n) for name, n in (("batch", batch), ("heads", heads), ("seq_q", seq_q), ("seq_k", seq_k)))
    if dropout is None:
        raise TypeError(f"dropout is None; accepted: {_ACCEPTED[6:]}")
    if device is not None:
        raise fa_ext.UnsupportedError(f"device is {device!r}; accepted: None: the mask is made on the CPU in this release")
    drawn = Dropout.read(dropout, *shape)
    assert drawn is not None
    if out is None:
        out = numpy.empty(shape, bool)
    elif not isinstance(out, numpy.ndarray) or out.shape != shape or out.dtype != bool or not out.flags.writeable:
        given = f"{type(out).__name__}"
        if isinstance(out, numpy.ndarray):
            given = f"{'' if out.flags.writeable else 'read-only '}array of shape {out.shape} and dtype {out.dtype}"
        raise ValueError(f"out is a {given}; accepted: a writable boolean NumPy array of shape {shape}")
    i, j = numpy.arange(shape[2])[:, None], numpy.arange(shape[3])
    for b in range(shape[0]):
        for h in range(shape[1]):
            out[b, h] = drawn.keeps(numpy, b, h, i, j)
    return out


def _extent(name, value):
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} has type {type(value).__name__}; accepted: an int") from None
    if not 0 <= number <= _LONGEST:
        raise ValueError(f"{name} is {number}; accepted: 0 to 2^31")
    return number
