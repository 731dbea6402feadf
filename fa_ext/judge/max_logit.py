"""``max_logit`` judged by float64: a maximum is what was there, or within 1e-5 of the largest product and float32's rounding of a product's
sum, 2^-22 |scale| times the longest rows of q and k."""

from __future__ import annotations

import math
import sys

import numpy

from .. import reference

__all__ = ["failures"]


def failures(got, before, q, k, *, rows=None, **options) -> tuple[str, ...]:
    """The faults of ``got``, which was ``before`` before a call with these arguments: (H,) or (B, H), NumPy or CuPy. ``rows``: only
    these queries are looked at, so that what is too large for them may be right."""
    xp = sys.modules[type(got).__module__.partition(".")[0]]
    asked = reference.Options(**options)
    want = reference.max_logit(q, k, xp=xp, rows=rows, **options)
    scale = abs(1 / math.sqrt(q.shape[-1]) if asked.scale is None else asked.scale)
    with numpy.errstate(all="ignore"):
        lengths = [xp.sqrt(xp.nan_to_num(x.astype(xp.float64) ** 2, posinf=0.0).sum(axis=-1)) for x in (q, k)]
        size = scale * math.prod(float(x.max()) if x.size else 0.0 for x in lengths)
        if got.ndim == 1:
            want = xp.max(want, axis=0) if len(want) else xp.full(got.shape, -math.inf)
        want = xp.where(want > before, want, before)
        error = xp.abs(got.astype(xp.float64) - want)
        bound = 1e-5 * xp.abs(want) + 2.0**-22 * size
        same = (got == want.astype(xp.float32)) | (xp.isnan(got) & xp.isnan(want))
        if rows is not None:
            same |= xp.isfinite(got) & (got > want)
        wrong = ~(same | (xp.isfinite(want) & (error <= bound)))
    return tuple(
        f"max_logit at {at} is {float(got[at]):.9g}, the reference {float(want[at]):.9g}"
        for at in (tuple(int(x) for x in index) for index in zip(*xp.nonzero(wrong)))
    )[:4]
