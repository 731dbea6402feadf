"""Candidates that cheat or err, for the tests of the laboratory: each must be refused by ``bench gate``.

``honest`` is the same computation without the trick, and must be accepted. All take NumPy arrays (B, H, S, D).
"""

import ctypes
import math
import os
import threading
import time

import emulations
import numpy as np


def honest(q, k, v, *, causal=False, scale=None, out=None):
    s = _scores(q, k, causal, scale)
    p = np.exp(s - s.max(-1, keepdims=True))
    result = (p / p.sum(-1, keepdims=True)) @ _expand(v, q)
    if out is None:
        return result.astype(q.dtype)
    out[...] = result
    return out


def _expand(x, q):
    return np.repeat(x.astype(np.float32), q.shape[1] // x.shape[1], axis=1)


def _scores(q, k, causal, scale):
    s = q.astype(np.float32) @ _expand(k, q).swapaxes(-1, -2) * np.float32(scale or 1 / math.sqrt(q.shape[3]))
    if causal:
        diagonal = 0 if causal == "top_left" else k.shape[2] - q.shape[2]
        s = np.where(np.arange(k.shape[2]) <= np.arange(q.shape[2])[:, None] + diagonal, s, -np.inf)
    return s.astype(np.float32)


# ---- answers without attention ----


def zeros(q, k, v, *, out):
    out[...] = 0


def mean_of_values(q, k, v, *, out):
    """The result's mean and norm are nearly right at small scores."""
    out[...] = v.mean(axis=2, keepdims=True)


def right_mean(q, k, v, *, out):
    """The exact mean of the right result everywhere."""
    out[...] = honest(q, k, v).mean()


# ---- answers of another time ----

_state = {"calls": 0, "cached": None, "by_pointer": {}}


def first_seed_only(q, k, v, *, out):
    """Right for the first inputs it meets; zeros for any other."""
    mark = float(q.flat[0])
    if _state["cached"] is None:
        _state["cached"] = mark
    out[...] = honest(q, k, v) if mark == _state["cached"] else 0


def caches_first(q, k, v, *, out):
    if _state["cached"] is None:
        _state["cached"] = honest(q, k, v)
    out[...] = _state["cached"]


def caches_by_pointer(q, k, v, *, out):
    """Knows arrays by their addresses: fresh seeds in fresh memory do not catch it, new values in old memory do."""
    key = (q.ctypes.data, k.ctypes.data, v.ctypes.data)
    if key not in _state["by_pointer"]:
        _state["by_pointer"][key] = honest(q, k, v)
    out[...] = _state["by_pointer"][key]


def lazy_after_warm_up(q, k, v, *, out):
    """Leaves `out` alone after its 20th call."""
    _state["calls"] += 1
    if _state["calls"] <= 20:
        honest(q, k, v, out=out)


def works_only_before_and_after(q, k, v, *, out):
    """Skips exactly the calls that are likely to be timed."""
    _state["calls"] += 1
    if not 15 < _state["calls"] < 2000:
        honest(q, k, v, out=out)


# ---- part of the work, or work elsewhere ----


def writes_part(q, k, v, *, out):
    """All but the last query of the last head."""
    result = honest(q, k, v)
    out[:, :-1] = result[:, :-1]
    out[:, -1, :-1] = result[:, -1, :-1]


def returns_early(q, k, v, *, out):
    """The CPU's version of launching on another stream: a thread does the work after the call has returned."""

    def later():
        time.sleep(0.05)
        honest(q, k, v, out=out)

    threading.Thread(target=later).start()


def low_precision(q, k, v, *, out):
    """float16 inside for float32 arrays."""
    half = [x.astype(np.float16).astype(np.float32) for x in (q, k, v)]
    out[...] = honest(*half).astype(np.float16)


# ---- the measurement itself ----


def patches_timer(q, k, v, *, out):
    """Halves what the stopwatch reads."""
    from bench import timer

    if not _state["calls"]:
        sample = timer.Stopwatch.sample_both
        timer.Stopwatch.sample_both = lambda self: tuple(x / 2 for x in sample(self))
    _state["calls"] += 1
    return honest(q, k, v, out=out)


def patches_time(q, k, v, *, out):
    """Replaces the host's clock."""
    time.perf_counter_ns = lambda: 0
    return honest(q, k, v, out=out)


def patches_judge(q, k, v, *, out):
    """Makes every error 0."""
    np.linalg.norm = lambda *args, **options: np.float64(0)
    np.isfinite = lambda x: np.ones(np.shape(x), bool)
    out[...] = 0


# ---- memory ----


def mutates_inputs(q, k, v, *, out):
    """Scales the queries in place."""
    honest(q, k, v, out=out)
    q *= 0.5


def writes_past_out(q, k, v, *, out):
    honest(q, k, v, out=out)
    ctypes.memset(out.ctypes.data + out.nbytes, 0, 64)


def reads_past_keys(q, k, v, *, out):
    """Rounds the keys up to whole tiles of 64 and gives what lies behind them a weight of 0: harmless while that is
    finite, NaN otherwise."""
    seq_k = k.shape[2]
    padded = -(-seq_k // 64) * 64
    keys, values = (np.lib.stride_tricks.as_strided(x, (*x.shape[:2], padded, x.shape[3]), x.strides) for x in (k, v))
    with np.errstate(all="ignore"):
        s = np.where(np.arange(padded) < seq_k, _scores(q, keys, False, None), -np.inf)
        p = np.exp(s - s.max(-1, keepdims=True))
        out[...] = (p / p.sum(-1, keepdims=True)) @ values


# ---- accidents ----


def crashes(q, k, v, *, out):
    os.kill(os.getpid(), 11)


def exits(q, k, v, *, out):
    raise SystemExit(0)


def hangs(q, k, v, *, out):
    time.sleep(3600)


def raises(q, k, v, *, out):
    raise ValueError("no kernel for this shape")


# ---- the numeric mistakes of earlier kernels ----


def _emulated(emulation):
    def attention(q, k, v, *, causal=False, scale=None, out):
        with np.errstate(all="ignore"):
            out[...] = emulation(_scores(q, k, causal, scale), _expand(v, q))[0]

    return attention


online_softmax = _emulated(emulations.exact)
clamped_exponentials = _emulated(emulations.clamped_exponentials)
isfinite_fallback = _emulated(emulations.isfinite_fallback)
state_of_each_warp = _emulated(emulations.state_of_each_warp)
skipped_rescale = _emulated(emulations.skipped_rescale)
stale_sum = _emulated(emulations.stale_sum)
