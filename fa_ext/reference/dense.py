"""Attention of dense arrays in float64, the merging of results over parts of the keys, and the options of a call.

What ``fa_ext.reference`` is made of: see there. Works in chunks of heads and queries, so that the scores of a large call
are never held at once.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy

from ..dropout import Dropout

__all__ = ["Options", "attend", "band", "merge", "round_to", "visible_keys"]

# Scores held at once: cache-sized pieces for NumPy, pieces that fill a GPU for CuPy.
CHUNK_SCORES_CPU = 1 << 20
CHUNK_SCORES_GPU = 1 << 26
# Sums that ``by_eights`` has at work at once.
_BLOCK_CPU = 1 << 16
_BLOCK_GPU = 1 << 24

# A scale, or finite bias or sinks, beyond this count as this: times log2(e) it just fits float32, in float64 calls float64.
LIMIT, LIMIT_F64 = 2.35865e38, 1.24606e308
# Softcaps that no score feels are none, and those that leave every exponential at 1 are alike.
_LARGEST_SOFTCAP, _SMALLEST_SOFTCAP = 1e30, 1e-20

LARGEST = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38, "float32": 3.4028234663852886e38}


@dataclass(frozen=True)
class Options:
    """The options of ``fa_ext.attention`` besides q, k and v, with their defaults. The verifiers and the tests' cases
    speak of options by this class, so that a new one is a field here and its meaning below. ``dropout`` may be a ``Dropout``
    that was read already.
    ``max_logit`` changes no result: what it is raised to, ``reference.max_logit`` says."""

    causal: bool | str = False
    scale: float | None = None
    window: Any = None
    softcap: float = 0.0
    bias: Any = None
    mask: Any = None
    sinks: Any = None
    alibi: Any = None
    intervals: Any = None
    max_logit: Any = None
    cu_seqlens_q: Any = None
    seqlens_q: Any = None
    max_seqlen_q: int | None = None
    cu_seqlens_k: Any = None
    seqlens_k: Any = None
    page_table: Any = None
    k_range: Any = None
    positions: Any = None
    segments: Any = None
    dropout: Any = None
    layout: str | None = None

    INDICES = ("cu_seqlens_q", "seqlens_q", "cu_seqlens_k", "seqlens_k", "page_table", "positions")
    ARRAYS = ("bias", "mask", "sinks", "alibi", "intervals", "max_logit", *INDICES)
    PAIRS = ("k_range", "segments")

    def __post_init__(self):
        if self.layout is None:
            object.__setattr__(self, "layout", "bhsd")

    def converted(self, convert: Callable[[Any], Any]) -> Options:
        """With ``convert`` applied to each array that is there."""
        arrays = {name: getattr(self, name) for name in self.ARRAYS}
        found = {name: convert(x) for name, x in arrays.items() if x is not None}
        for name in self.PAIRS:
            if (pair := getattr(self, name)) is not None:
                found[name] = tuple(None if x is None else convert(x) for x in pair)
        return replace(self, **found)

    def sequences(self, q, k) -> bool:
        """Whether the call says more than dense arrays do."""
        indices = (getattr(self, name) for name in (*self.PAIRS, *self.INDICES))
        return q.ndim == 3 or k.ndim == 3 or any(x is not None for x in indices)


def merge(outs, lses, *, sinks=None, layout=None, xp=None):
    """Results over parts of the keys -> the result over all of them, in float64.

    outs: (B, H, S, D), (B, S, H, D) with ``layout`` "bshd", or packed (T, H, D); lses: (B, H, S), or (H, T); sinks:
    (H,) or None. A part is empty at a row where its LSE is -inf or +inf; its out does not matter there. NumPy or CuPy.

    Returns (out, lse), both float64, shaped as outs[0] and lses[0].
    """
    xp = xp or sys.modules[type(outs[0]).__module__.partition(".")[0]]
    packed = outs[0].ndim == 3
    if layout not in (None, "bhsd", "bshd"):
        raise ValueError(f"layout is {layout!r}; accepted: 'bhsd', 'bshd', None")
    lses = xp.stack([x.astype(xp.float64) for x in lses])
    # (parts, ..., heads, rows, D), as the lses have it
    swapped = packed or layout == "bshd"
    parts = xp.stack([(xp.swapaxes(x, -3, -2) if swapped else x).astype(xp.float64) for x in outs])
    empty = xp.isinf(lses)
    sink = xp.full((1,), -math.inf)
    if sinks is not None:
        limit = LIMIT_F64 if outs[0].dtype == xp.float64 else LIMIT
        sink = sinks.astype(xp.float64)
        sink = xp.where(xp.isinf(sink), sink, xp.clip(sink, -limit, limit))
    sink = xp.broadcast_to(sink.reshape((-1, 1) if packed else (1, -1, 1)), lses.shape[1:])
    with numpy.errstate(all="ignore"):
        seen = xp.where(empty, -math.inf, lses)
        peak = xp.maximum(xp.max(seen, axis=0), sink)
        weights = xp.where(empty, 0.0, xp.exp(seen - peak))
        total = weights.sum(axis=0) + xp.where(sink == -math.inf, 0.0, xp.where(sink == peak, 1.0, xp.exp(sink - peak)))
        out = (weights[..., None] * xp.where(empty[..., None], 0.0, parts)).sum(axis=0) / total[..., None]
        lse = peak + xp.log(total)
    nothing = empty.all(axis=0)
    out, lse = xp.where(nothing[..., None], 0.0, out), xp.where(nothing, sink, lse)
    return (xp.swapaxes(out, -3, -2) if swapped else out), lse


def visible_keys(rows, seq_q, seq_k, causal=False, window=None, xp=numpy):
    """Boolean (len(rows), seq_k): True where the query at position rows[i] may see key j through causal and window."""
    left, right, diagonal = band(seq_q, seq_k, causal, window)
    offset = xp.arange(seq_k)[None, :] - (xp.asarray(rows)[:, None] + diagonal)
    return (offset >= -left) & (offset <= right)


def round_to(x, dtype, xp=numpy):
    """``x`` rounded to nearest even in ``dtype`` (a name), returned as float32 (float64 for "float64")."""
    if dtype == "float64":
        return x.astype(xp.float64)
    x = x.astype(xp.float32)
    if dtype == "float32":
        return x
    if dtype == "float16":
        return x.astype(xp.float16).astype(xp.float32)
    if dtype != "bfloat16":
        raise ValueError(f"dtype is {dtype!r}; accepted: float16, bfloat16, float32, float64")
    bits = x.view(xp.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1)).astype(xp.uint32)) & xp.uint32(0xFFFF0000)).view(xp.float32)
    return xp.where(xp.isnan(x), x, rounded)


def band(seq_q, seq_k, causal, window):
    """(left, right, diagonal): query i may see key j iff -left <= j - (i + diagonal) <= right."""
    if causal is True and seq_q != seq_k:
        raise ValueError(f"causal=True needs seq_q == seq_k, got {seq_q} and {seq_k}: say top_left or bottom_right")
    if causal not in (False, True, "top_left", "bottom_right"):
        raise ValueError(f"causal is {causal!r}; accepted: False, True, 'top_left', 'bottom_right'")
    left, right = (None, None) if window is None else window
    left = math.inf if left is None else left
    right = math.inf if right is None else right
    return left, min(right, 0) if causal else right, 0 if causal == "top_left" else seq_k - seq_q


def held(intervals, keys, xp):
    """Boolean (..., keys): which keys of a slice one of the intervals (..., n, 2) holds."""
    at = xp.arange(keys.start, keys.stop)
    found = xp.zeros((*intervals.shape[:-2], len(at)), bool)
    for n in range(intervals.shape[-2]):
        found |= (intervals[..., n, :1] <= at) & (at < intervals[..., n, 1:])
    return found


def _pairs_of(intervals, rows, xp):
    """Intervals, with n axes or without, as (B, H, Sq, n, 2)."""
    given = intervals if intervals.ndim == 5 else intervals[:, :, :, None]
    return xp.broadcast_to(given, (*rows, *given.shape[3:]))


def by_eights(xp, a, b, fused=False):
    """a @ b in float32, (..., M, N) from (..., M, K) and (..., K, N), with this order of the sums over K:

    eight consecutive products are summed one after the other, and the sum joins the total of the eights before. The
    last eight is filled up with zeros. ``fused``: a product is not rounded before it joins the sum of its eight. This is
    computed in float64, where products of float32 are exact and a sum is rounded to 53 bits before it is to 24, which
    differs from a fused multiply-add once in some 2^29 additions.
    """
    if a.shape[-2] > b.shape[-1]:  # the long axis last, where it is contiguous
        return xp.swapaxes(by_eights(xp, xp.swapaxes(b, -1, -2), xp.swapaxes(a, -1, -2), fused), -1, -2)
    terms, eights = a.shape[-1], -(-a.shape[-1] // 8)

    def split(x):  # (..., K, W) -> (..., K / 8, 8, W)
        padded = xp.zeros((*x.shape[:-2], 8 * eights, x.shape[-1]), xp.float64 if fused else xp.float32)
        padded[..., :terms, :] = x
        return padded.reshape(*x.shape[:-2], eights, 8, x.shape[-1])

    x, y = split(xp.swapaxes(a, -1, -2))[..., None], split(b)[..., None, :]
    total = xp.zeros((*numpy.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1]), xp.float32)
    block, row = _BLOCK_CPU if xp is numpy else _BLOCK_GPU, max(1, total.size // max(1, a.shape[-2]))
    rows = min(a.shape[-2], max(1, block // row))
    step = max(1, block // max(1, row * rows))
    for begin in range(0, a.shape[-2], max(1, rows)):
        some = slice(begin, begin + rows)
        for first in range(0, eights, step):
            left, right = x[..., first : first + step, :, some, :], y[..., first : first + step, :, :, :]
            product = left[..., 0, :, :] * right[..., 0, :, :]
            part = product.astype(xp.float32)
            for n in range(1, 8):
                xp.multiply(left[..., n, :, :], right[..., n, :, :], out=product)
                xp.add(product, part, out=part)
            for n in range(part.shape[-3]):
                total[..., some, :] += part[..., n, :, :]
    return total


def attend(q, k, v, options: Options, *, rows=None, xp=None, dtype=None, out_dtype=None, exact=False, logits=None):
    """``reference.attention`` of dense arrays, or with a ``dtype`` ``reference.plain``. ``logits``: (B, H), which scaled products raise."""
    xp = xp or sys.modules[type(q).__module__.partition(".")[0]]
    layout = options.layout
    if layout == "bshd":
        q, k, v = (xp.swapaxes(x, 1, 2) for x in (q, k, v))
    elif layout != "bhsd":
        raise ValueError(f"layout is {layout!r}; accepted: 'bhsd', 'bshd'")
    work = xp.float64 if dtype in (None, "float64") else xp.float32
    batch, heads, seq_q, head_dim = q.shape
    heads_kv, seq_k, head_dim_v = k.shape[1], k.shape[2], v.shape[3]
    group = heads // heads_kv if heads_kv else 1
    positions = xp.arange(seq_q) if rows is None else xp.asarray(rows)
    count = len(positions)

    out = xp.zeros((batch * heads_kv, group, count, head_dim_v), xp.float64)
    lse = xp.full((batch * heads_kv, group, count), -math.inf, xp.float64)
    call = Call(xp, work, dtype, options, q, k)
    call.out, call.lse, call.out_dtype, call.exact = out, lse, out_dtype, exact
    if logits is not None:
        call.logits = logits.reshape(batch * heads_kv, group)
    if out.size or lse.size:
        call.q = xp.ascontiguousarray(q.astype(work)).reshape(batch * heads_kv, group, seq_q, head_dim)
        call.k = xp.ascontiguousarray(k.astype(work)).reshape(batch * heads_kv, 1, seq_k, head_dim)
        call.v = xp.ascontiguousarray(v.astype(work)).reshape(batch * heads_kv, 1, seq_k, head_dim_v)
        budget = CHUNK_SCORES_CPU if xp is numpy else CHUNK_SCORES_GPU
        step_q = max(1, min(count, budget // max(1, group * seq_k)))
        step_n = max(1, budget // max(1, group * seq_k * step_q))
        with numpy.errstate(all="ignore"):
            for n in range(0, batch * heads_kv, step_n):
                for i in range(0, count, step_q):
                    call.chunk(slice(n, n + step_n), slice(i, i + step_q), positions[i : i + step_q])
    out = out.reshape(batch, heads, count, head_dim_v)
    return (xp.swapaxes(out, 1, 2) if layout == "bshd" else out), lse.reshape(batch, heads, count)


class Call:
    """One evaluation; axis 0 of its arrays is (batch, kv head), axis 1 the query heads that share the kv head."""

    q: Any
    k: Any
    v: Any
    out: Any
    lse: Any
    out_dtype: str | None
    exact = False  # of ``reference.plain``
    logits: Any = None  # of ``reference.max_logit``

    def __init__(self, xp, work, dtype, options: Options, q, k):
        """q and k as (B, H, S, D), for their shapes and q's dtype."""
        self.xp, self.work, self.dtype = xp, work, dtype
        self.limit = LIMIT_F64 if q.dtype == xp.float64 else LIMIT
        scale = 1 / math.sqrt(q.shape[3]) if options.scale is None else options.scale
        self.scale = work(min(max(scale, -self.limit), self.limit))
        softcap = 0.0 if options.softcap >= _LARGEST_SOFTCAP else options.softcap
        self.softcap = work(max(softcap, _SMALLEST_SOFTCAP) if softcap > 0 else 0.0)
        batch, heads, seq_q, _ = q.shape
        self.heads_kv, seq_k = k.shape[1], k.shape[2]
        shape = (batch, heads, seq_q, seq_k)
        self.bias = None if options.bias is None else xp.broadcast_to(options.bias, shape)
        self.mask = None if options.mask is None else xp.broadcast_to(options.mask, shape)
        group = heads // self.heads_kv if self.heads_kv else 1
        self.sinks = None if options.sinks is None else self.bounded(options.sinks).reshape(self.heads_kv, group)
        self.slopes = None if options.alibi is None else xp.broadcast_to(options.alibi, shape[:2]).astype(xp.float64)
        self.intervals = None if options.intervals is None else _pairs_of(options.intervals, shape[:3], xp)
        drop = options.dropout
        self.dropout = drop if isinstance(drop, Dropout) else Dropout.read(drop, *shape)
        self.band = band(seq_q, seq_k, options.causal, options.window)

    def dropped(self, x, b, h, positions, keys):
        """x, a number a pair, times dropout's factors."""
        if self.dropout is None or not self.dropout.threshold:
            return x
        xp = self.xp
        kept = self.dropout.keeps(xp, b[:, :, None, None], h[:, :, None, None], positions[:, None], xp.arange(keys.start, keys.stop))
        return x * xp.where(kept, self.work(self.dropout.scale), self.work(0))

    def bounded(self, added):
        """Bias or sinks in the dtype of the evaluation, finite ones limited; NaN and infinities as they are."""
        return self._limited(added.astype(self.work))

    def _limited(self, x):
        xp = self.xp
        return xp.where(xp.isinf(x), x, xp.clip(x, -self.limit, self.limit))

    def chunk(self, pairs, queries, positions):
        """Fills out[pairs, :, queries] and lse[pairs, :, queries]; ``positions`` are the queries' indices."""
        xp = self.xp
        left, right, diagonal = self.band
        seq_k = self.k.shape[2]
        first, last = int(positions.min()) + diagonal, int(positions.max()) + diagonal
        begin = int(min(max(0, first - left), seq_k))
        end = int(max(min(seq_k, last + right + 1), begin))
        keys = slice(begin, end)
        pair = xp.arange(*pairs.indices(self.q.shape[0]))
        if begin == end:
            if self.sinks is not None:
                self.lse[pairs, :, queries] = self.sinks[pair % self.heads_kv][:, :, None].astype(xp.float64)
            return
        group = self.q.shape[1]
        b = (pair // self.heads_kv)[:, None]
        h = (pair % self.heads_kv)[:, None] * group + xp.arange(group)[None, :]

        seen = self._visible(b, h, positions, keys, diagonal)
        s = self._scores(pairs, b, h, positions, keys)
        s = xp.where(seen, s, -math.inf)
        seen = seen & (s != -math.inf)
        if self.logits is not None:
            self._raise_logits(pairs, positions, keys, seen)

        peak = xp.max(s, axis=-1, keepdims=True)
        sink = None
        # In base 2 a score, and the sink, is rounded once more.
        exp, base = (xp.exp2, self.work(math.log2(math.e))) if self.exact else (xp.exp, self.work(1))
        if self.sinks is not None:
            sink = self.sinks[pair % self.heads_kv][:, :, None, None] * base
            peak = xp.maximum(peak, sink)
        shift = xp.where(peak == -math.inf, self.work(0), peak)
        p = exp(s - shift)
        total = p.sum(axis=-1, keepdims=True)
        if sink is not None:
            total = total + exp(sink - shift)
        lse = shift / base + xp.log(total)
        p = p / xp.where(total == 0, self.work(1), total)
        if sink is not None:  # a query without keys: 0, and the sink as it is, be it infinite or NaN
            empty = ~seen.any(axis=-1, keepdims=True)
            lse, p = xp.where(empty, sink / base, lse), xp.where(empty, self.work(0), p)
        self.lse[pairs, :, queries] = lse[..., 0].astype(xp.float64)
        p = self.dropped(p, b, h, positions, keys)
        if self.dtype:
            p = round_to(p, self.dtype, xp)
        o = self._times_values(p, seen, self.v[pairs, :, keys])
        if self.dtype:
            o = round_to(o, self.out_dtype, xp)
        self.out[pairs, :, queries] = o.astype(xp.float64)

    def _visible(self, b, h, positions, keys, diagonal):
        xp = self.xp
        left, right, _ = self.band
        offset = xp.arange(keys.start, keys.stop)[None, :] - (positions[:, None] + diagonal)
        seen = ((offset >= -left) & (offset <= right))[None, None]
        if self.mask is not None:
            seen = seen & (self.mask[:, :, :, keys][b[..., None], h[..., None], positions] != 0)
        if self.intervals is not None:
            seen = seen & held(self.intervals[b[..., None], h[..., None], positions], keys, xp)
        return seen

    def _scores(self, pairs, b, h, positions, keys):
        xp = self.xp
        s = self._product(self.q[pairs][:, :, positions], xp.swapaxes(self.k[pairs, :, keys], -1, -2), fused=True)
        s = s * self.scale
        if self.softcap > 0:
            s = self.softcap * xp.tanh(s / self.softcap)
        added = None
        if self.bias is not None:
            added = self.bounded(self.bias[:, :, :, keys][b[..., None], h[..., None], positions])
        if self.slopes is not None:
            added = self._with_alibi(added, self.slopes[b, h], positions, keys)
        if added is not None:
            s = xp.where(added == -math.inf, added, s + added)  # excludes like a mask, whatever the score is
        if self.dtype in ("float16", "bfloat16") and not self.exact:
            s = xp.where(xp.isinf(s), s, self._rounded_scores(s))
        return s * self.work(math.log2(math.e)) if self.exact else s

    def _raise_logits(self, pairs, positions, keys, seen):
        xp = self.xp
        s = self.scale * xp.matmul(self.q[pairs][:, :, positions], xp.swapaxes(self.k[pairs, :, keys], -1, -2))
        s = xp.where(seen & ~xp.isnan(s), s, -math.inf)
        self.logits[pairs] = xp.maximum(self.logits[pairs], xp.max(s, axis=(-2, -1)))

    def _rounded_scores(self, s):
        """Scores with as many bits as the dtype has, those beyond float16's largest number too."""
        xp = self.xp
        limit = self.work(LARGEST["bfloat16"])
        s = xp.clip(s, -limit, limit)
        if self.dtype == "bfloat16":
            return round_to(s, "bfloat16", xp)
        held = xp.abs(s) <= LARGEST["float16"]
        down = xp.where(held, self.work(1), self.work(2.0**-114))  # a power of two: the bits stay, and the exponent fits
        return round_to(s * down, "float16", xp) / down

    def _with_alibi(self, bias, slopes, positions, keys):
        """bias - slope |j - (i + diagonal)|: product and difference are rounded to the dtype of the evaluation, and
        limited as the bias is. A slope that is not finite gives NaN; a bias of -inf stays."""
        xp = self.xp
        distance = xp.abs(xp.arange(keys.start, keys.stop)[None, :] - (positions[:, None] + self.band[2]))
        slopes = xp.where(xp.isfinite(slopes), slopes, math.nan)[:, :, None, None]
        product = xp.clip(slopes * distance, -self.limit, self.limit).astype(self.work).astype(xp.float64)
        if bias is None:
            return -product.astype(self.work)
        difference = self._limited(bias.astype(xp.float64) - product)
        return xp.where(bias == -math.inf, bias, difference).astype(self.work)

    def _product(self, a, b, fused=False):
        if self.work == self.xp.float64:
            return self.xp.matmul(a, b)
        if self.dtype != "float32":
            return self.xp.matmul(a.astype(self.xp.float64), b.astype(self.xp.float64)).astype(self.xp.float32)
        return by_eights(self.xp, a, b, fused)

    def _times_values(self, p, seen, v):
        """p @ v, where a NaN or Inf in v reaches only the queries that see its key: 0 * NaN is no longer 0."""
        xp = self.xp
        finite = xp.isfinite(v)
        if bool(finite.all()):
            return self._product(p, v)
        o = self._product(p, xp.where(finite, v, self.work(0)))
        broken = xp.where(finite, self.work(0), v)
        somewhere = (~finite).any(axis=(0, 1, 3)) & xp.broadcast_to(seen, p.shape).any(axis=(0, 1, 2))
        for j in xp.nonzero(somewhere)[0].tolist():
            o = o + xp.where(seen[..., j, None], p[..., j, None] * broken[:, :, j, None, :], self.work(0))
        return o
