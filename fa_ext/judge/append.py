"""``verify_append``: a call of ``append`` judged by float64 (``reference.serving``).

Values and columns that are not rotated are exact; |error| of the rotated ones <= half an ulp of the dtype + 2^-22 (|x0 cos| +
|x1 sin|) (float64: 1e-14 in its place). Of tokens with one place, one is there, whole. All other bytes of the caches are what
they were, and the rotated q of a token that is not written is exactly 0.
"""

from __future__ import annotations

import math
from typing import Any

import numpy

from ..reference import serving
from ..reference.dense import LARGEST
from . import Report, _device_of, on_host
from .merge import half_ulp

__all__ = ["judge_append", "verify_append"]


class _Judge:
    """Holds rotated rows against their bounds and keeps the worst."""

    def __init__(self, dtype):
        self.dtype, self.worst, self.error, self.bound = dtype, 0.0, 0.0, 0.0
        self.slack = 1e-14 if dtype == "float64" else 2.0**-22

    def fits(self, got, x, rotary, position, interleaved) -> bool:
        """Whether (heads, D) rows are x, rotated."""
        if rotary is None:
            return _bits(got) == _bits(x)
        columns = 2 * rotary[0].shape[1]
        if _bits(got[:, columns:]) != _bits(x[:, columns:]):
            return False
        want, size = serving.rotate(x[:, :columns], rotary, position, interleaved)
        with numpy.errstate(all="ignore"):
            value = got[:, :columns].astype(numpy.float64)
            bound = half_ulp(want, self.dtype) + self.slack * size
            limit = float(LARGEST.get(self.dtype, math.inf))
            open_ = ~numpy.isfinite(want) | (numpy.abs(want) + bound > limit)  # it may overflow
            error = numpy.where(open_, 0.0, numpy.abs(value - want))
            wrong = numpy.where(numpy.isfinite(want), ~open_ & ~numpy.isfinite(value), numpy.isfinite(value))
        ratio = numpy.where(open_, 0.0, error / numpy.where(open_, 1.0, bound))
        largest = float(ratio.max(initial=0.0))
        if not wrong.any() and largest > self.worst:
            at = numpy.unravel_index(int(ratio.argmax()), error.shape)
            self.worst, self.error, self.bound = largest, float(error[at]), float(bound[at])
        return not wrong.any() and largest <= 1.0


def judge_append(before, after, k, v, *, rotated=None, layout, q=None, rotary=None, interleaved=False, kernel=None, **indices) -> Report:
    """Applies the rule to a result. before, after: (k_cache, v_cache or None); rotated: what ``append`` returned; the rest are
    the arguments of the call. All are NumPy arrays."""
    tokens, _ = serving.targets(before[0], k, layout=layout, rotary=rotary, **indices)
    swapped = layout == "bhsd"
    rows = serving._rows_first
    old, new = ([rows(x, swapped) for x in pair] for pair in (before, after))
    k, v, q, rotated = (rows(x, swapped) for x in (k, v, q, rotated))
    dtype = k.dtype.name
    judge, failures = _Judge(dtype), []
    places: dict[tuple[int, int], list] = {}
    for token in tokens:
        places.setdefault(token.place, []).append(token)
    untouched = numpy.full(old[0].shape[:2], True)
    for place, candidates in places.items():
        untouched[place] = False
        if not any(
            judge.fits(new[0][place], k[t.row], rotary, t.position, interleaved)
            and (v is None or _bits(new[1][place]) == _bits(v[t.row]))
            for t in candidates
        ):
            failures.append(f"row {place[1]} of page {place[0]} is not the token {candidates[0].row} that belongs there")
    for name, a, b in (("k_cache", old[0], new[0]), ("v_cache", old[1], new[1])):
        if a is not None and _bits(a[untouched]) != _bits(b[untouched]):
            failures.append(f"bytes of {name} that belong to no new token have changed")
    if q is not None:
        idle = numpy.full(q.shape[: q.ndim - 2], True)
        for token in tokens:
            idle[token.row] = False
            if not judge.fits(rotated[token.row], q[token.row], rotary, token.position, interleaved):
                failures.append(f"the rotated q of token {token.row} is off")
        if (rotated[idle] != 0).any():
            failures.append("the rotated q of a token that is not written is not 0")
    return Report(
        passed=not failures, dtype=dtype, shape=tuple(int(n) for n in after[0].shape), kernel=kernel, max_abs=judge.error,
        max_abs_bound=judge.bound, max_rel=0.0, frobenius=0.0, frobenius_bound=math.inf, lse_max_abs=None, lse_bound=None,
        worst=None, worst_lse=None, plain_max_abs=0.0, plain_frobenius=0.0, failures=tuple(failures),
    )  # fmt: skip


def verify_append(
    k_cache, v_cache, k, v, *, layout, q=None, rotary=None, interleaved=False, out=None, check=None, stream=None, kernel=None,
    **indices: Any,
) -> Report:  # fmt: skip
    """Runs ``fa_ext.append`` with these arguments, which writes into the caches, and judges it against float64.

    Accepts what ``fa_ext.append`` accepts; a new result for q is poisoned with NaN before. Raises what the call raises, with
    nothing written.
    """
    import fa_ext

    call: dict[str, Any] = dict(
        layout=layout, q=q, rotary=rotary, interleaved=interleaved, check=check, stream=stream, kernel=kernel, **indices
    )
    ran, _ = fa_ext.explain_append(k_cache, v_cache, k, v, **call, out=out)
    if ran is None:
        fa_ext.append(k_cache, v_cache, k, v, **call, out=out)  # raises

    def host(x):
        return None if x is None else numpy.array(on_host(x))

    before = host(k_cache), host(v_cache)
    tokens = host(k), host(v)
    on: dict[str, Any] = {"q": host(q), "rotary": None if rotary is None else tuple(host(x) for x in rotary)}
    arrays = {name: host(x) for name, x in indices.items()}
    if q is not None and out is None:
        poisoned = numpy.full(on["q"].shape, numpy.nan, on["q"].dtype)
        device = _device_of(q)
        out = poisoned if device is None else fa_ext.to_device(poisoned, device=device)
    rotated = fa_ext.append(k_cache, v_cache, k, v, **call, out=out)
    after = host(k_cache), host(v_cache)
    return judge_append(
        before, after, tokens[0], tokens[1], rotated=host(rotated), layout=layout, interleaved=interleaved, kernel=ran, **on,
        **arrays,
    )  # fmt: skip


def _bits(x) -> bytes:
    return numpy.ascontiguousarray(x).tobytes()
