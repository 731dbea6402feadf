"""``verify_merge``: a call of ``merge`` judged by float64 (``reference.merge``).

Per element, |error| <= half an ulp of the result in out's dtype + 2^-20 of the largest part there; |LSE error| <= 2e-3 +
1e-5 |LSE| (float64: 1e-10 in each); finite where the reference is finite, not finite where it is not, and exactly 0 in
rows where every part is empty.
"""

from __future__ import annotations

import math

import numpy

from .. import reference
from ..reference.dense import LARGEST
from . import Report, _device_of, _judge_lse, _largest, _ratio

__all__ = ["judge_merge", "verify_merge"]

# Bits of a dtype's fraction and the exponent of its smallest normal number.
_FLOATS = {"float16": (10, -14), "bfloat16": (7, -126), "float32": (23, -126), "float64": (52, -1022)}


def half_ulp(x, dtype):
    """Half the distance between neighbours of ``dtype`` at the values ``x`` (float64)."""
    bits, least = _FLOATS[dtype]
    _, exponent = numpy.frexp(numpy.where(numpy.isfinite(x), x, 0.0))
    exponent = numpy.where(x == 0, least, numpy.maximum(exponent - 1, least))
    return numpy.ldexp(0.5, exponent - bits)


def judge_merge(out, lse, outs, lses, *, sinks=None, layout=None, kernel=None) -> Report:
    """Applies the rule to a result. All are NumPy arrays; ``outs`` and the rest are the arguments of the call."""
    want, want_lse = reference.merge(outs, lses, sinks=sinks, layout=layout)
    dtype = out.dtype.name
    failures: list[str] = []
    with numpy.errstate(all="ignore"):
        got = out.astype(numpy.float64)
        swapped = want.ndim == 3 or layout == "bshd"
        empty = numpy.stack([numpy.isinf(x) for x in lses])
        empty = (numpy.swapaxes(empty, -1, -2) if swapped else empty)[..., None]
        parts = numpy.where(empty, 0.0, numpy.abs(numpy.stack([x.astype(numpy.float64) for x in outs])))
        largest = numpy.nan_to_num(parts.max(axis=0), posinf=0.0)
        overflow = numpy.abs(want) > float(LARGEST.get(dtype, math.inf))
        bound = half_ulp(want, dtype) + largest * (2.0**-20 if dtype != "float64" else 1e-10)
        finite = numpy.isfinite(want) & ~overflow
        wrong = numpy.isfinite(got) != finite
        error = numpy.where(wrong & ~overflow, numpy.inf, numpy.where(finite, numpy.abs(got - want), 0.0))
    over = error > bound
    if over.any():
        failures.append(f"{int(over.sum())} elements are off by more than half an ulp and 2^-20 of the largest part")
    nothing = numpy.broadcast_to(empty.all(axis=0), want.shape)
    if (nothing & (got != 0)).any():
        failures.append("a row that every part leaves empty is not exactly 0")
    judged = numpy.ones(want_lse.shape, bool)
    part_dtype = "float64" if lse.dtype == numpy.float64 else "float32"
    with numpy.errstate(all="ignore"):
        lse_max, lse_bound, worst_lse = _judge_lse(numpy, lse, want_lse, judged, part_dtype, failures)
    ratio = numpy.where(bound > 0, error / numpy.where(bound > 0, bound, 1.0), 0.0)
    worst = tuple(int(i) for i in numpy.unravel_index(int(ratio.argmax()), want.shape)) if want.size else None
    truth = numpy.where(finite, want, 0.0)
    large = numpy.abs(truth) >= max(1e-3 * _largest(numpy, numpy.abs(truth)), 1e-300)
    relative = numpy.where(large, error / numpy.where(large, numpy.abs(truth), 1.0), 0.0)
    frobenius = _ratio(float(numpy.linalg.norm(error)), float(numpy.linalg.norm(truth)))
    return Report(
        passed=not failures, dtype=dtype, shape=tuple(int(n) for n in want.shape), kernel=kernel,
        max_abs=_largest(numpy, error), max_abs_bound=0.0 if worst is None else float(bound[worst]),
        max_rel=_largest(numpy, relative), frobenius=frobenius, frobenius_bound=math.inf, lse_max_abs=lse_max,
        lse_bound=lse_bound, worst=worst, worst_lse=worst_lse, plain_max_abs=0.0, plain_frobenius=0.0,
        failures=tuple(failures),
    )  # fmt: skip


def verify_merge(outs, lses, *, sinks=None, layout=None, out=None, stream=None, kernel=None) -> Report:
    """Runs ``fa_ext.merge`` with these arguments, on a result poisoned with NaN, and judges it against float64.

    Accepts what ``fa_ext.merge`` accepts. ``out`` is overwritten; where it is the first part itself, the judgement is by
    what that part was before. Raises what the call raises, with nothing written.
    """
    import fa_ext

    options = {"sinks": sinks, "layout": layout, "stream": stream, "kernel": kernel}
    ran, _ = fa_ext.explain_merge(outs, lses, **options, out=out)
    if ran is None:
        fa_ext.merge(outs, lses, **options, out=out)  # raises
    host = [fa_ext.to_numpy(x) for x in outs], [fa_ext.to_numpy(x) for x in lses]
    if out is None:
        out = tuple(numpy.full(x[0].shape, numpy.nan, x[0].dtype) for x in host)
        device = _device_of(outs[0])
        if device is not None:
            out = tuple(fa_ext.to_device(x, device=device) for x in out)
    got, lse = (fa_ext.to_numpy(x) for x in fa_ext.merge(outs, lses, **options, out=out))
    host_sinks = None if sinks is None else fa_ext.to_numpy(sinks)
    return judge_merge(got, lse, *host, sinks=host_sinks, layout=layout, kernel=ran)
