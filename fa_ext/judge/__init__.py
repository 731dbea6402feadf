"""A call judged by float64: ``verify`` runs it beside ``fa_ext.reference``, ``judge`` applies the pass rule.

The rule, with "plain" the same formula in the plain arithmetic of the dtype (``reference.plain``):

* max |error| <= 2 max |plain's error| + {2e-4 float16, 2e-3 bfloat16, 2e-6 float32} * max(1, max |reference|);
* relative Frobenius error <= the larger of {1e-3, 8e-3, 1e-5} and twice plain's;
* |LSE error| <= 2e-3 + 1e-5 |LSE|; an LSE that float32 cannot hold is what float32 makes of it, an infinity;
* finite where the reference is finite, not finite where it is not, and exactly 0 in rows whose LSE is -inf.

float64, which plain computes exactly, is held to 1e-10 in each.

The rule holds at every magnitude that q . k has in float32. Plain rounds scores to as many bits as the dtype has, and to
no largest number, so that plain is finite where the call is. Inputs whose q . k is exact in float32 may be judged by
``plain(exact=True)``, whose scores are rounded once, in float32 to base 2: keys whose scores are alike, or lie some units
in the last place apart, then have a bound that zeros, and rescales of a maximum that forget its rounding, exceed.
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy

from .. import reference
from . import max_logit as logits

__all__ = ["Report", "judge", "spread", "verify"]

ABSOLUTE = {"float16": 2e-4, "bfloat16": 2e-3, "float32": 2e-6, "float64": 1e-10}
# Where scores are large, few keys decide a row and what rounding does to their scores is a matter of luck: float32 sums in
# another order than plain's, such as a library's, may exceed plain's error more than twice.
OTHER_ORDER = 8.0
FROBENIUS = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 1e-5, "float64": 1e-10}
# FLOPs of Q K^T from which CuPy, with the seconds it takes to compile its kernels, is faster than NumPy.
_WORTH_A_DEVICE = 2e10

LSE_ABSOLUTE = {"float64": 1e-10}
LSE_RELATIVE = {"float64": 1e-10}


@dataclass(frozen=True)
class Report:
    """Errors of one result and the bounds they were held to. ``str(report)`` is a table; truth is ``passed``."""

    passed: bool
    dtype: str
    shape: tuple[int, ...]
    kernel: str | None
    max_abs: float  #: largest |out - reference|; inf where one of them is finite and the other is not
    max_abs_bound: float
    max_rel: float  #: largest |out - reference| / |reference| where |reference| is at least 1e-3 of its maximum
    frobenius: float  #: norm of the error over norm of the reference
    frobenius_bound: float
    lse_max_abs: float | None  #: largest |LSE error|; None when no LSE was given
    lse_bound: float | None  #: the bound at the entry that came closest to its own
    worst: tuple[int, ...] | None  #: index of max_abs in out; None for an empty result
    worst_lse: tuple[int, ...] | None  #: (b, h, i) of the LSE entry that came closest to its bound
    plain_max_abs: float  #: what the plain computation in this dtype errs by
    plain_frobenius: float
    failures: tuple[str, ...] = field(default=())

    def __bool__(self) -> bool:
        return self.passed

    def as_dict(self) -> dict[str, Any]:
        """The fields as plain Python values, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        def line(name, value, held, note=""):
            return f"  {name:<12} {value:<10.3g} {held:<22} {note}".rstrip()

        def within(value, bound):
            return f"<= {bound:<10.3g} {'ok' if value <= bound else 'FAILED'}"

        lines = [
            f"{self.kernel or 'result'}: {self.dtype} {self.shape} {'passed' if self.passed else 'FAILED'}",
            line("max abs", self.max_abs, within(self.max_abs, self.max_abs_bound),
                 f"at {self.worst}, plain {self.plain_max_abs:.3g}"),
            line("max rel", self.max_rel, ""),
            line("frobenius", self.frobenius, within(self.frobenius, self.frobenius_bound),
                 f"plain {self.plain_frobenius:.3g}"),
        ]  # fmt: skip
        if self.lse_max_abs is not None:
            # Each LSE has a bound of its own: the largest error may lie elsewhere than the one closest to its bound.
            failed = any(failure.startswith("LSE at") for failure in self.failures)
            closest = "" if self.worst_lse is None else f"closest to its bound, {self.lse_bound:.3g}, at {self.worst_lse}"
            lines.append(line("LSE max abs", self.lse_max_abs, "FAILED" if failed else "ok", closest))
        return "\n".join(lines + [f"  {failure}" for failure in self.failures])


def judge(out, lse, reference, plain, dtype, *, layout="bhsd", kernel=None, exempt=None, slack=1.0) -> Report:
    """Applies the pass rule of the contract.

    out: the result; lse: (B, H, Sq) or None; reference: (out, lse) of ``reference.attention``; plain: out, or
    (out, lse), of ``reference.plain``; dtype: "float16", "bfloat16", "float32" or "float64". All are NumPy or all are
    CuPy arrays; all but the LSE in ``layout``. exempt: boolean array that broadcasts to out; True where NaN and Inf of the inputs may
    spread (elements there may also be not finite). kernel: the name to report. slack: how many times the bounds of out count
    (``OTHER_ORDER`` for float32 sums in another order than plain's; the contract's own rule is 1).
    """
    want, want_lse = reference
    plain = plain[0] if isinstance(plain, tuple) else plain
    xp = sys.modules[type(want).__module__.partition(".")[0]]
    if dtype not in ABSOLUTE:
        raise ValueError(f"dtype is {dtype!r}; accepted: {', '.join(ABSOLUTE)}")
    if tuple(out.shape) != tuple(want.shape):
        raise ValueError(f"out has shape {tuple(out.shape)}, the reference {tuple(want.shape)}")
    if lse is not None and tuple(lse.shape) != tuple(want_lse.shape):
        raise ValueError(f"lse has shape {tuple(lse.shape)}, the reference {tuple(want_lse.shape)}")
    failures = []
    with numpy.errstate(all="ignore"):
        got = out.astype(xp.float64)
        judged = xp.ones(want.shape, bool) if exempt is None else xp.isfinite(got) | ~exempt
        finite = xp.isfinite(want)
        error = xp.where(finite, xp.abs(got - want), 0.0)
        wrong = xp.isfinite(got) != finite
        error = xp.where(judged, xp.where(wrong, xp.inf, error), 0.0)
        kept = finite & judged
        truth = xp.where(kept, want, 0.0)
        plain_error = xp.where(kept & xp.isfinite(plain), xp.abs(plain.astype(xp.float64) - truth), 0.0)
        size = max(1.0, _largest(xp, xp.abs(truth)))
        norm = float(xp.linalg.norm(truth))
        max_abs, plain_max = _largest(xp, error), _largest(xp, plain_error)
        frobenius = _ratio(float(xp.linalg.norm(error)), norm)
        plain_frobenius = _ratio(float(xp.linalg.norm(plain_error)), norm)
        large = xp.abs(truth) >= max(1e-3 * _largest(xp, xp.abs(truth)), 1e-300)
        max_rel = _largest(xp, xp.where(large, error / xp.where(large, xp.abs(truth), 1.0), 0.0))
        max_abs_bound = slack * (2 * plain_max + ABSOLUTE[dtype] * size)
        frobenius_bound = slack * max(FROBENIUS[dtype], 2 * plain_frobenius)

        count = int(wrong[judged].sum())
        if count:
            failures.append(f"{count} elements are finite where the reference is not, or the reverse (NaN: unwritten?)")
        if not max_abs <= max_abs_bound:
            failures.append(f"max |error| {max_abs:.3g} is over {max_abs_bound:.3g}")
        if not frobenius <= frobenius_bound:
            failures.append(f"relative Frobenius error {frobenius:.3g} is over {frobenius_bound:.3g}")
        empty = want_lse == -xp.inf
        empty = (xp.swapaxes(empty, 1, 2) if layout == "bshd" else empty)[..., None]
        if bool((empty & judged & (got != 0)).any()):
            failures.append("a row that sees no key is not exactly 0")

        lse_max = lse_bound = worst_lse = None
        if lse is not None:
            judged_lse = judged.all(axis=-1)
            judged_lse = xp.swapaxes(judged_lse, 1, 2) if layout == "bshd" else judged_lse
            lse_max, lse_bound, worst_lse = _judge_lse(xp, lse, want_lse, judged_lse, dtype, failures)

    worst = None
    if want.size:
        worst = tuple(int(i) for i in numpy.unravel_index(int(error.argmax()), want.shape))
    return Report(
        passed=not failures, dtype=dtype, shape=tuple(int(n) for n in want.shape), kernel=kernel, max_abs=max_abs,
        max_abs_bound=max_abs_bound, max_rel=max_rel, frobenius=frobenius, frobenius_bound=frobenius_bound,
        lse_max_abs=lse_max, lse_bound=lse_bound, worst=worst, worst_lse=worst_lse, plain_max_abs=plain_max,
        plain_frobenius=plain_frobenius, failures=tuple(failures),
    )  # fmt: skip


def verify(
    q, k, v, *, out=None, return_lse=True, workspace=None, check=None, stream=None, kernel=None, batch_invariant=False,
    **options: Any,
) -> Report:  # fmt: skip
    """Runs ``fa_ext.attention`` with these arguments on outputs poisoned with NaN, and judges it against float64.

    Accepts what ``fa_ext.attention`` accepts (``options``: ``reference.Options``), arrays of any library on any device.
    ``out`` may be given as there (it is overwritten, with NaN first); with ``return_lse`` (the default here) the LSE is judged too.
    ``max_logit`` is raised from what it holds, and judged. Raises what the call
    raises, with nothing written. The reference of a large call on a device runs through CuPy if the program has
    imported it, else NumPy.
    """
    import fa_ext

    asked = reference.Options(**options)
    layout = asked.layout or "bhsd"
    call: dict[str, Any] = dict(
        options, return_lse=return_lse, workspace=workspace, check=check, stream=stream, kernel=kernel,
        batch_invariant=batch_invariant,
    )  # fmt: skip
    ran, _ = fa_ext.explain(q, k, v, **call, out=out)
    if ran is None:
        fa_ext.attention(q, k, v, **call, out=out)  # raises: no kernel takes the call, or the forced one does not
    host: list[Any] = [fa_ext.to_numpy(x) for x in (q, k, v)]
    asked = asked.converted(on_host)
    dtype = host[0].dtype.name
    device = _device_of(q)
    if out is None:
        out = _poisoned_outputs(host, layout, device, return_lse)
    else:
        _poison(out, host, layout, device, stream)
    before = None if asked.max_logit is None else asked.max_logit.copy()
    result = fa_ext.attention(q, k, v, **call, out=out)
    got, lse = result if isinstance(result, tuple) else (result, None)
    got, lse = fa_ext.to_numpy(got), None if lse is None else fa_ext.to_numpy(lse)

    packed, sequences = host[0].ndim == 3, asked.sequences(host[0], host[1])
    large = not sequences and 2 * host[0].size * host[1].shape[1 if layout == "bshd" else 2] > _WORTH_A_DEVICE
    xp = sys.modules.get("cupy", numpy) if device is not None and large else numpy
    if xp is not numpy:
        host = [_upload(xp, x) for x in host]
        asked = asked.converted(lambda x: _upload(xp, x))
        got, lse = _upload(xp, got), None if lse is None else xp.asarray(lse)
    truth = reference.attention(host[0], host[1], host[2], **vars(asked), xp=xp)
    ordinary = reference.plain(host[0], host[1], host[2], **vars(asked), xp=xp, dtype=dtype, out_dtype=got.dtype.name)
    if ran == "cpu_ref":
        exempt = None
    elif sequences:
        from ..reference import serving

        exempt = serving.spread(host[0], host[1], host[2], truth[0], **vars(asked))
    else:
        exempt = spread(host[1], host[2], truth[0], layout, asked.causal, asked.window)
    found: tuple[str, ...] = ()
    if before is not None:
        raised = xp.asarray(fa_ext.to_numpy(options["max_logit"]))
        found = logits.failures(raised, xp.asarray(before), host[0], host[1], **vars(asked))
    if packed:  # one batch entry of (T, H, Dv)
        truth, ordinary = tuple(x[None] for x in truth), tuple(x[None] for x in ordinary)
        got, lse, exempt = (None if x is None else x[None] for x in (got, lse, exempt))
        layout = "bshd"
    report = judge(got, lse, truth, ordinary, dtype, layout=layout, kernel=ran, exempt=exempt)
    return replace(report, passed=report.passed and not found, failures=report.failures + found)


def on_host(x):
    """An array of any library, or a scalar that a bias or a mask may be, as a NumPy array."""
    import fa_ext

    return numpy.asarray(x) if isinstance(x, (bool, int, float, numpy.generic)) else fa_ext.to_numpy(x)


def _judge_lse(xp, lse, want, judged, dtype, failures):
    """(largest error, bound, index) of the LSE; appends to ``failures``."""
    got = lse.astype(xp.float64)
    finite = xp.isfinite(want)
    bound = LSE_ABSOLUTE.get(dtype, 2e-3) + LSE_RELATIVE.get(dtype, 1e-5) * xp.where(finite, xp.abs(want), 0.0)
    same = xp.where(want == -xp.inf, got == -xp.inf, ~xp.isfinite(got) & (got != -xp.inf))
    error = xp.where(finite, xp.abs(got - want), xp.where(same, 0.0, xp.inf))
    held = want if dtype == "float64" else want.astype(xp.float32).astype(xp.float64)
    error = xp.where(finite & xp.isinf(held) & (got == held), 0.0, error)
    error = xp.where(xp.isnan(error), xp.inf, error)
    error = xp.where(judged, error, 0.0)
    if not want.size:
        return 0.0, float(LSE_ABSOLUTE.get(dtype, 2e-3)), None
    index = numpy.unravel_index(int((error / bound).argmax()), want.shape)
    index = tuple(int(i) for i in index)
    if not bool((error <= bound).all()):
        failures.append(f"LSE at {index} is {float(got[index]):.9g}, the reference {float(want[index]):.9g}")
    return _largest(xp, error), float(bound[index]), index


def _largest(xp, x) -> float:
    return float(x.max()) if x.size else 0.0


def _ratio(error: float, norm: float) -> float:
    if error == 0:
        return 0.0
    return error / norm if norm > 0 else float("inf")


def spread(k, v, truth, layout, causal, window):
    """Where NaN and Inf in K and V may spread: to every query of a kv head that has one at a key some query may see
    through causal and window. A boolean array that broadcasts to ``truth``, or None; elements that are not finite in
    ``truth`` itself stay judged."""
    xp = sys.modules[type(truth).__module__.partition(".")[0]]
    axis = 1 if layout == "bhsd" else 2
    k, v, truth = (xp.moveaxis(x, axis, 1) for x in (k, v, truth))
    seq_q, seq_k = truth.shape[2], k.shape[2]
    left, right, diagonal = reference.band(seq_q, seq_k, causal, window)
    keys = slice(int(min(max(0, diagonal - left), seq_k)), int(max(0, min(seq_k, seq_q + diagonal + right))))
    broken = ~(xp.isfinite(k[:, :, keys]).all(axis=(2, 3)) & xp.isfinite(v[:, :, keys]).all(axis=(2, 3)))
    if not bool(broken.any()):
        return None
    heads = xp.repeat(broken, truth.shape[1] // k.shape[1], axis=1)[:, :, None, None]
    return xp.moveaxis(heads & xp.isfinite(truth), 1, axis)


def _device_of(q) -> int | None:
    """CUDA ordinal of an array's device; None on the CPU."""
    if isinstance(q, numpy.ndarray):
        return None
    if hasattr(type(q), "__dlpack_device__"):
        kind, ordinal = q.__dlpack_device__()
        return int(ordinal) if int(kind) in (2, 13) else None
    return 0 if hasattr(q, "__cuda_array_interface__") else None


def _poisoned_outputs(host, layout, device, return_lse):
    import fa_ext

    q, _, v = host
    rows = q.shape[1::-1] if q.ndim == 3 else q.shape[:3] if layout == "bhsd" else (q.shape[0], q.shape[2], q.shape[1])
    out = numpy.full((*q.shape[:-1], v.shape[-1]), numpy.nan, q.dtype)
    lse = numpy.full(rows, numpy.nan, "f8" if q.dtype == numpy.float64 else "f4")
    if device is not None:
        out, lse = fa_ext.to_device(out, device=device), fa_ext.to_device(lse, device=device)
    return (out, lse) if return_lse else out


def _poison(out, host, layout, device, stream):
    """Fills the caller's outputs with NaN. Arrays without item assignment are written by the plainest kernel that takes
    them, from queries of NaN, which every kernel hands on."""
    import fa_ext

    outputs = out if isinstance(out, tuple) else (out,)
    if all(hasattr(type(array), "__setitem__") for array in outputs):
        for array in outputs:
            array[...] = float("nan")
        return
    q, k, v = host
    heads_kv = k.shape[2 if layout == "bshd" and k.ndim == 4 else 1]
    shapes = [(q.shape[0], heads_kv, 1, x.shape[-1]) for x in (k, v)]  # for q of three axes one sequence a row
    one_key = [numpy.zeros((n, 1, h, d) if layout == "bshd" else (n, h, 1, d), q.dtype) for n, h, _, d in shapes]
    nan = [numpy.full(q.shape, numpy.nan, q.dtype), *one_key]
    if device is not None:
        nan = [fa_ext.to_device(x, device=device) for x in nan]
    for kernel in reversed(fa_ext.kernels()):
        with contextlib.suppress(fa_ext.UnsupportedError):
            fa_ext.attention(*nan, layout=layout, out=out, stream=stream, kernel=kernel)
            return
    raise TypeError("out has no item assignment, and no kernel can fill it with NaN; leave it out")


def _upload(xp, x):
    """A NumPy array on CuPy's current device; bfloat16, which CuPy may not know, as the same values in float32."""
    return xp.asarray(x.astype(numpy.float32) if x.dtype.name == "bfloat16" else x)
