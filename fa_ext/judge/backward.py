"""Gradients judged by float64: ``verify_backward`` runs a call beside ``fa_ext.reference.backward``, ``judge_backward``
applies the pass rule.

The rule for dq, dk, dv and dbias, with "plain" the same formulas in the plain arithmetic of the dtype and R the largest
magnitude of the reference:

* max |error| <= 2 max |plain's error| + {2e-4 float16, 2e-3 bfloat16, 2e-6 float32, 1e-10 float64} R;
* Frobenius norm of the error <= {2e-3, 1.6e-2, 2e-5, 1e-10} of the reference's, or twice plain's;
* finite where the reference is finite, and not finite where it is not;
* exactly 0 for queries without a visible key, and for keys that causal, window and seq_k hide from every query.

dq, dk and dv of sequences are held to it once as a whole and once a sequence, with plain's error and R of that sequence, so
that the error of a short one does not hide behind a long one's maximum. Rows of no sequence are exactly 0, and so are keys
that causal, window and range hide from all queries of their sequence. A short sequence has few elements, and plain errs there
as luck has it: each bound of sequences is at least what half an ulp of each element of out, dS and P makes of the gradient,
added up as below.

dsinks: |error| <= 2 max |plain's error| + the same constant times the sum of the magnitudes of that head's terms, of which
those with a weight near or below the smallest normal float32 may be missing, + what half an ulp of each element of out makes
of delta = dout . out: a kernel is given the rounded out. dbias, of which a sum over keys may leave little
else (the gradients of a softmax add up to 0), is allowed it as what it is, many independent errors: squared, added up and
joined to both bounds by the root of the sum of squares, twice as much to the first, which is of the largest of many.

Gradients are linear in dout and dlse, and so is every bound: no verdict changes when both are scaled by a power of two.
A gradient may be 0 because its terms cancel (one key: P = 1 and dS = 0); no sum in floating point gives that 0, so each
bound is at least 2 eps (float32; float64 for float64) of the magnitude of those terms. And P = exp(s - LSE) is as exact as
s and the LSE, each rounded for itself: 1.5 ulp (float32) of the largest LSE or of the largest sum of the magnitudes of a
score's products, 1e-4 at 1000, join both constants.
"""

from __future__ import annotations

import math
import sys
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy

from .. import reference
from ..reference.backward import gradients
from ..reference.serving import four_axes
from . import ABSOLUTE, _device_of, _largest, _upload, on_host
from .merge import half_ulp

__all__ = ["BackwardReport", "GradientReport", "judge_backward", "judge_sequences", "verify_backward"]

FROBENIUS = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 2e-5, "float64": 1e-10}
# Of a number, at most, relative to it.
HALF_ULP = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}
# FLOPs of the seven products from which CuPy, with the seconds it takes to compile its kernels, is faster than NumPy.
_WORTH_A_DEVICE = 2e10


@dataclass(frozen=True)
class GradientReport:
    """Errors of one gradient and the bounds they were held to."""

    name: str
    shape: tuple[int, ...]
    max_abs: float  #: largest error; inf where one of result and reference is finite and the other is not
    max_abs_bound: float  #: at ``worst`` for dsinks
    frobenius: float  #: norm of the error over norm of the reference (0 / 0 is 0)
    frobenius_bound: float
    worst: tuple[int, ...] | None  #: index of the largest error; None for an empty result
    plain_max_abs: float
    failures: tuple[str, ...] = ()


@dataclass(frozen=True)
class BackwardReport:
    """Of one call. ``str(report)`` is a table; truth is ``passed``."""

    passed: bool
    dtype: str
    kernel: str | None
    gradients: tuple[GradientReport, ...]

    def __bool__(self) -> bool:
        return self.passed

    def as_dict(self) -> dict[str, Any]:
        """The fields as plain Python values, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"{self.kernel or 'result'}: gradients, {self.dtype}, {'passed' if self.passed else 'FAILED'}"]
        for g in self.gradients:
            lines.append(
                f"  d{g.name:<6} {str(g.shape):<22} max abs {g.max_abs:<10.3g} <= {g.max_abs_bound:<10.3g} frobenius "
                f"{g.frobenius:<10.3g} <= {g.frobenius_bound:<10.3g} at {g.worst}"
            )
            lines += [f"    {failure}" for failure in g.failures]
        return "\n".join(lines)


def judge_backward(
    got, truth, plain, dtype, *, kernel=None, exempt=None, zero=None, old=None, widths=None, slack=1.0,
) -> BackwardReport:  # fmt: skip
    """Applies the rule. All arrays are NumPy's or all are CuPy's.

    got: {name: gradient}; truth, plain: ``backward.gradients`` without and with the dtype (a name); exempt:
    {name: boolean array, True where NaN and Inf of the inputs may spread}; zero: {name: boolean array, True where the
    gradient must be 0}; both broadcast. old: {name: what the result was added to}, with the names of the results' dtypes in
    ``widths``: half an ulp of the sum is then allowed. kernel: the name to report. slack: how many times the bounds count
    (``OTHER_ORDER`` for float32 sums in another order than plain's, as in ``judge``; the contract's own rule is 1).
    """
    if dtype not in ABSOLUTE:
        raise ValueError(f"dtype is {dtype!r}; accepted: {', '.join(ABSOLUTE)}")
    reports = []
    for name, result in got.items():
        if tuple(result.shape) != tuple(truth[name].shape):
            raise ValueError(f"d{name} has shape {tuple(result.shape)}, the reference {tuple(truth[name].shape)}")
        before = None if old is None else (old[name], (widths or {}).get(name, dtype))
        spared, hidden = (exempt or {}).get(name), (zero or {}).get(name)
        reports.append(_judge(name, result, truth, plain, dtype, spared, hidden, before, slack))
    return BackwardReport(not any(r.failures for r in reports), dtype, kernel, tuple(reports))


def _judge(name, got, truth, plain, dtype, exempt, zero, before, slack) -> GradientReport:
    want, plain = truth[name], plain[name]
    xp = sys.modules[type(want).__module__.partition(".")[0]]
    failures = []
    with numpy.errstate(all="ignore"):
        got = got.astype(xp.float64)
        rounding = 0.0
        if before is not None:
            old = before[0].astype(xp.float64)
            rounding = xp.asarray(half_ulp(_host(old + want), before[1]))
            got = got - old
        finite = xp.isfinite(want)
        judged = xp.ones(want.shape, bool) if exempt is None else xp.isfinite(got) | ~exempt
        wrong = judged & (xp.isfinite(got) != finite)
        error = xp.where(finite, xp.maximum(xp.abs(got - want) - rounding, 0.0), 0.0)
        error = xp.where(judged, xp.where(wrong, xp.inf, error), 0.0)
        kept = judged & finite
        size = xp.where(kept, xp.abs(want), 0.0)
        plain_error = xp.where(kept & xp.isfinite(plain), xp.abs(plain - xp.where(kept, want, 0.0)), 0.0)
        plain_max, terms = _largest(xp, plain_error), truth.terms[name]
        wide = "float64" if dtype == "float64" else "float32"
        resolution = 3 * float(half_ulp(numpy.float64(truth.largest_score), wide))
        floor = 2 * (2.0**-52 if dtype == "float64" else 2.0**-23) * terms
        of_out = HALF_ULP[dtype] * truth.out_terms.get(name, xp.zeros(1))
        of_out = xp.where(xp.isfinite(of_out), of_out, 0.0)
        joined, most_of_out, norm_of_out = _of_many(xp, name, of_out)
        if name == "sinks":
            bound = 2 * plain_max + (ABSOLUTE[dtype] + resolution) * terms
            bound += truth.faint if dtype != "float64" else 0.0
            bound = slack * (xp.where(finite, bound, 0.0) + of_out)  # where the reference is not finite, only that is judged
            error_bound = float(bound[int((error - bound).argmax())]) if want.size else 0.0
        else:
            bound = 2 * plain_max + (ABSOLUTE[dtype] + resolution) * _largest(xp, size) + floor
            bound = error_bound = slack * joined(bound, most_of_out)
        norm, error_norm = float(xp.linalg.norm(size)), float(xp.linalg.norm(error))
        allowed = max((FROBENIUS[dtype] + resolution) * norm, 2 * float(xp.linalg.norm(plain_error)))
        allowed = max(allowed, _largest(xp, xp.asarray(floor)) * math.sqrt(max(want.size, 1)))
        allowed = slack * joined(allowed, norm_of_out)
        if int(wrong.sum()):
            failures.append(f"{int(wrong.sum())} elements are finite where the reference is not, or the reverse")
        if not bool((error <= bound).all()):
            failures.append(f"|error| {_largest(xp, error):.3g} is over its bound, {error_bound:.3g}")
        if name != "sinks" and not error_norm <= allowed:
            failures.append(f"the norm of the error, {error_norm:.3g}, is over {allowed:.3g}")
        if zero is not None and bool((zero & (got != 0)).any()):
            failures.append("not exactly 0 where no query, or no key, is seen")
    worst = tuple(int(i) for i in numpy.unravel_index(int(error.argmax()), want.shape)) if want.size else None
    return GradientReport(
        name=name, shape=tuple(int(n) for n in want.shape), max_abs=_largest(xp, error), max_abs_bound=error_bound,
        frobenius=_ratio(error_norm, norm), frobenius_bound=_ratio(allowed, norm), worst=worst, plain_max_abs=plain_max,
        failures=tuple(failures),
    )  # fmt: skip


def _of_many(xp, name, of_out):
    """(how they join a bound, the largest, the norm) of independent errors of about these magnitudes. Those of dq, dk and dv may be of
    one row, where luck has a say: three times, and of many rows less."""
    largest, norm = _largest(xp, of_out), float(xp.linalg.norm(of_out))
    if name in ("bias", "sinks"):
        return math.hypot, 2 * largest, norm
    return max, 3 * largest, norm + 2 * _largest(xp, xp.sqrt((of_out**2).sum(axis=-1)))


def _ratio(a, b):
    return 0.0 if a == 0 else a / b if b else math.inf


def _host(x):
    return x if isinstance(x, numpy.ndarray) else x.get()


def zeros_of(truth, q, k, layout, causal, window):
    """Where gradients must be exactly 0: {name: boolean array that broadcasts to it}."""
    xp = sys.modules[type(truth.empty).__module__.partition(".")[0]]
    axis = 1 if layout == "bshd" else 2
    begin, end = _seen_keys(q.shape[axis], k.shape[axis], causal, window)
    keys = xp.arange(k.shape[axis])
    hidden = ((keys < begin) | (keys >= end)).reshape((-1, 1, 1) if layout == "bshd" else (-1, 1))
    empty = truth.empty[..., None]
    return {"q": xp.swapaxes(empty, 1, 2) if layout == "bshd" else empty, "k": hidden, "v": hidden}


def _seen_keys(seq_q, seq_k, causal, window):
    """[begin, end): the keys that some query may see through causal and window."""
    left, right, diagonal = reference.band(seq_q, seq_k, causal, window)
    begin, end = max(0, diagonal - left), min(seq_k, seq_q + diagonal + right)
    return (int(begin), int(end)) if seq_q and begin < end else (0, 0)


def spread_backward(truth, dout, q, k, v, out, lse, dlse, layout, causal, window):
    """Where NaN and Inf may spread on kernels that work in tiles: those of a key seen by some to queries of its head, those
    of a query, its dout, out, LSE or dlse to its own dq and to keys of its head. {name: boolean array} or None."""
    xp = sys.modules[type(truth.empty).__module__.partition(".")[0]]
    if layout == "bshd":
        q, k, v, out = (xp.swapaxes(x, 1, 2) for x in (q, k, v, out))
        dout = None if dout is None else xp.swapaxes(dout, 1, 2)
    begin, end = _seen_keys(q.shape[2], k.shape[2], causal, window)
    keys = xp.zeros(k.shape[2], bool)
    keys[begin:end] = True
    found = _spread(truth.empty, dout, q, k, v, out, lse, dlse, keys)
    if found is None:
        return None
    if layout == "bshd":
        found = {name: xp.swapaxes(where, 1, 2) for name, where in found.items()}
    return {name: where & xp.isfinite(truth[name]) for name, where in found.items() if name in truth}


def _spread(empty, dout, q, k, v, out, lse, dlse, seen):
    """The same of arrays (B, H, S, D), whether truth is finite there or not. seen: boolean (Sk), the keys seen by some."""
    xp = sys.modules[type(empty).__module__.partition(".")[0]]
    group = q.shape[1] // k.shape[1] if k.shape[1] else 1
    key = (~(xp.isfinite(k).all(axis=-1) & xp.isfinite(v).all(axis=-1)) & seen).any(axis=2)
    row = ~xp.isfinite(q).all(axis=-1) | ~(xp.isfinite(lse) | (lse == -xp.inf)) | ~xp.isfinite(out).all(axis=-1)
    for x in (None if dout is None else dout, None if dlse is None else dlse[..., None]):
        row = row if x is None else row | ~xp.isfinite(x).all(axis=-1)
    row = row & ~empty
    of_head = row.any(axis=2).reshape(q.shape[0], k.shape[1], group).any(axis=2) if q.shape[1] else row.any(axis=2)
    if not bool(key.any()) and not bool(row.any()):
        return None
    rows = ((xp.repeat(key, group, axis=1)[:, :, None] | row) & ~empty)[..., None]
    keys = (of_head[:, :, None] & seen)[..., None]
    return {"q": rows, "k": keys, "v": keys}


def judge_sequences(got, truth, plain, dtype, layout, *, kernel=None, exempt=None, old=None, widths=None, slack=1.0) -> BackwardReport:
    """``judge_backward`` of the whole call, and of each of its sequences: what fails there joins the report of the whole."""
    zero = _zeros_of_sequences(truth, layout)
    whole = judge_backward(got, truth, plain, dtype, kernel=kernel, exempt=exempt, zero=zero, old=old, widths=widths, slack=slack)
    xp = sys.modules[type(truth.empty).__module__.partition(".")[0]]
    failures: dict[str, list[str]] = {g.name: list(g.failures) for g in whole.gradients}
    for part, ordinary in zip(truth.parts, plain.parts, strict=True):

        def cut(arrays, part=part):
            return arrays and {n: part.of(xp, n, x, layout) for n, x in arrays.items() if n in ("q", "k", "v")}

        judged = judge_backward(
            cut(got), part.found, ordinary.found, dtype, exempt=cut(exempt), old=cut(old), widths=widths, slack=slack
        )
        for g in judged.gradients:
            failures[g.name] += [f"sequence {part.b}: {why}" for why in g.failures]
    reports = tuple(replace(g, failures=tuple(failures[g.name])) for g in whole.gradients)
    return replace(whole, passed=not any(r.failures for r in reports), gradients=reports)


def _zeros_of_sequences(truth, layout):
    """As ``zeros_of``, for a call over sequences: rows of none of them too."""
    xp = sys.modules[type(truth.empty).__module__.partition(".")[0]]
    zero = {}
    for name in truth:
        if name == "sinks":
            continue
        zero[name] = xp.ones(truth[name].shape, bool)
        where = zero[name].reshape((1,) * (4 - truth[name].ndim) + truth[name].shape) if name == "bias" else four_axes(xp, zero[name], layout)
        for part in truth.parts:
            if name == "bias":
                where[part.bias] = False
            elif name == "q":
                where[part.queries] = part.found.empty[..., None]
            else:
                where[part.keys] = part.unseen[:, None]
    return zero


def spread_sequences(truth, dout, q, k, v, out, lse, dlse, layout):
    """As ``spread_backward``, within each sequence of a call."""
    xp = sys.modules[type(truth.empty).__module__.partition(".")[0]]
    found = {name: xp.zeros(x.shape, bool) for name, x in truth.items() if name in ("q", "k", "v")}
    where = {name: four_axes(xp, x, layout) for name, x in found.items()}  # views
    lse, dlse = (x[None] if x is not None and q.ndim == 3 else x for x in (lse, dlse))
    for part in truth.parts:
        some_dout, some_q, some_out = (None if x is None else part.of(xp, "q", x, layout) for x in (dout, q, out))
        some_k, some_v = (part.of(xp, "k", x, layout) for x in (k, v))
        some_lse, some_dlse = (None if x is None else x[part.queries] for x in (lse, dlse))
        spared = _spread(part.found.empty, some_dout, some_q, some_k, some_v, some_out, some_lse, some_dlse, ~part.unseen)
        for name, x in (spared or {}).items():
            if name in where:
                where[name][part.queries if name == "q" else part.keys] = x
    return {name: x & xp.isfinite(truth[name]) for name, x in found.items()}


def verify_backward(
    dout, q, k, v, out, lse, *, dlse=None, wrt=("q", "k", "v"), grads=None, accumulate=False, deterministic=True, stream=None,
    kernel=None, check=None, batch_invariant=False, **options: Any,
) -> BackwardReport:  # fmt: skip
    """Runs ``fa_ext.attention_backward`` with these arguments and judges its gradients against float64.

    Accepts what ``fa_ext.attention_backward`` accepts (``options``: ``reference.Options``). Results are poisoned with NaN
    first; given ``grads`` are overwritten, or with ``accumulate`` compared with what they held plus the gradient. Raises what the call raises, with nothing
    written. The reference of a large call on a device runs through CuPy if the program has imported it, else NumPy.
    """
    import fa_ext

    asked = reference.Options(**options)
    layout = asked.layout
    call: dict[str, Any] = dict(options, dlse=dlse, wrt=wrt, accumulate=accumulate, deterministic=deterministic,
                                stream=stream, kernel=kernel, check=check, batch_invariant=batch_invariant)  # fmt: skip
    inputs = (dout, q, k, v, out, lse)
    ran, _ = fa_ext.explain_backward(*inputs, **call, grads=grads)
    if ran is None:
        fa_ext.attention_backward(*inputs, **call, grads=grads)  # raises
    host: list[Any] = [None if x is None else fa_ext.to_numpy(x) for x in inputs]
    host.append(None if dlse is None else fa_ext.to_numpy(dlse))
    asked = asked.converted(on_host)
    of: dict[str, Any] = dict(zip(("q", "k", "v", "bias", "sinks"), (*host[1:4], asked.bias, asked.sinks), strict=True))
    given = grads or (None,) * len(wrt)
    old = {n: fa_ext.to_numpy(g) for n, g in zip(wrt, given, strict=True)} if accumulate else None
    if not accumulate:
        grads = tuple(_poisoned(g, of[n], _device_of(q)) for n, g in zip(wrt, given, strict=True))
    results = fa_ext.attention_backward(*inputs, **call, grads=grads)
    got = {n: fa_ext.to_numpy(g) for n, g in zip(wrt, results, strict=True)}
    widths = {n: g.dtype.name for n, g in got.items()}
    dtype = host[1].dtype.name

    large = not asked.sequences(host[1], host[2]) and 14 * host[1].size * host[2].shape[1 if layout == "bshd" else 2] > _WORTH_A_DEVICE
    if large and _device_of(q) is not None and "cupy" in sys.modules:
        xp = sys.modules["cupy"]
        host = [None if x is None else _upload(xp, x) for x in host]
        asked = asked.converted(lambda x: _upload(xp, x))
        got = {n: _upload(xp, g) for n, g in got.items()}
        old = old and {n: _upload(xp, g) for n, g in old.items()}
    x_dout, x_q, x_k, x_v, x_out, x_lse, x_dlse = host
    truth, ordinary = (
        gradients(x_dout, x_q, x_k, x_v, dlse=x_dlse, **vars(asked), wrt=wrt, dtype=d) for d in (None, dtype)
    )
    held: dict[str, Any] = dict(kernel=ran, old=old, widths=widths)
    arrays, exempt = (x_dout, x_q, x_k, x_v, x_out, x_lse, x_dlse), None
    if truth.parts is not None:
        if ran != "cpu_ref_backward":
            exempt = spread_sequences(truth, *arrays, layout)
        return judge_sequences(got, truth, ordinary, dtype, layout, exempt=exempt, **held)
    band: dict[str, Any] = dict(layout=layout, causal=asked.causal, window=asked.window)
    if ran != "cpu_ref_backward":
        exempt = spread_backward(truth, *arrays, **band)
    return judge_backward(got, truth, ordinary, dtype, exempt=exempt, zero=zeros_of(truth, x_q, x_k, **band), **held)


def _poisoned(given, like, device):
    """The caller's array filled with NaN, or a new one of the shape and dtype of ``like``."""
    import fa_ext

    if given is not None:
        if not hasattr(type(given), "__setitem__"):
            raise TypeError("grads holds an array without item assignment, which cannot be filled with NaN; leave it out")
        given[...] = float("nan")
        return given
    made = numpy.full(like.shape, numpy.nan, like.dtype)
    return made if device is None else fa_ext.to_device(made, device=device)
