"""Candidates that are right when they are tried and cheat when they are timed, or while they should stand still; NumPy
arrays (B, H, S, D). Each must be refused by ``bench gate``.
"""

import ctypes
import mmap
import os
import signal
import sys
import threading
import time

import numpy as np

from tests.laboratory.support.cheats import _expand, _scores, honest

_state = {"seen": set(), "kept": {}, "ready": {}, "calls": 0, "last": None, "worker": None}


def _timed(q):
    """Memory that comes again is that of timed calls: each trial has its own."""
    again = q.ctypes.data in _state["seen"]
    _state["seen"].add(q.ctypes.data)
    return again


# ---- work while nobody should work ----


def wakes_itself(q, k, v, *, out):
    """A timer of the kernel ends each stop; what the last call of a sample left is then done by a thread."""
    if _state["worker"] is None:
        _state["worker"] = threading.Thread(target=_finish_late, daemon=True)
        _state["worker"].start()
        _wake_every(1e-3)
    _leave_last(q, k, v, out)


def _leave_last(q, k, v, out):
    """A call does the work of the one before it, and leaves its own to whoever finds it, behind a first guess."""
    if not _timed(q):
        return honest(q, k, v, out=out)
    last, _state["last"] = _state["last"], (q, k, v, out, time.monotonic())
    out[...] = 1
    if last:
        honest(*last[:3], out=last[3])


def _finish_late():
    while True:
        time.sleep(2e-4)
        last = _state["last"]
        if last and time.monotonic() > last[4] + 1e-3:  # no other call has come
            honest(*last[:3], out=last[3])
            if _state["last"] is last:
                _state["last"] = None


class _Event(ctypes.Structure):
    """sigevent: SIGEV_SIGNAL with SIGCONT."""

    _fields_ = (("value", ctypes.c_uint64), ("signal", ctypes.c_int), ("notify", ctypes.c_int), ("rest", ctypes.c_byte * 48))


def _wake_every(seconds):
    """SIGCONT from the kernel, again and again: it moves whoever is stopped. Each timer goes off once, for a stop forgets a
    signal that it finds, and with it a timer that would be set again when the signal is taken."""
    libc = ctypes.CDLL(None)
    for turn in range(1, 10_000):
        timer, after = ctypes.c_void_p(), int(turn * seconds * 1e9)
        libc.timer_create(1, ctypes.byref(_Event(0, signal.SIGCONT, 0)), ctypes.byref(timer))
        libc.timer_settime(timer, 0, (ctypes.c_long * 4)(0, 0, after // 10**9, after % 10**9), None)


def wakes_a_helper(q, k, v, *, out):
    """The timer belongs to a process that the candidate started, which stops itself when it has looked."""
    _with_helper(_wake_every, q, k, v, out)


def works_behind_a_dead_leader(q, k, v, *, out):
    """The first thread of a process that it leaves has ended: the kernel calls it a zombie, and its other thread goes on."""
    honest(q, k, v, out=out)
    if _timed(q):
        _state["calls"] += 1
        if _state["calls"] % 100 == 1 and os.fork() == 0:
            threading.Thread(target=lambda: [None for _ in iter(int, 1)]).start()
            ctypes.CDLL(None).syscall(60, 0)  # exit of this thread alone


def _with_helper(wake, q, k, v, out):
    if _state["worker"] is None:
        _state["worker"] = memory = mmap.mmap(-1, 4096)
        if os.fork() == 0:
            _help(memory, wake)
    np.frombuffer(_state["worker"], np.int64)[0] += _timed(q)
    honest(q, k, v, out=out)


def _help(memory, wake):
    """Looks for work, stops itself, and is woken again."""
    number = np.frombuffer(memory, np.int64)
    wake(1e-3)
    while True:
        number[1] = number[0] + sum(i * i for i in range(4000))
        os.kill(os.getpid(), signal.SIGSTOP)


def works_ahead_in_a_child(q, k, v, *, out):
    """A child of the first call computes what the judge writes between two calls, and has ended long before the last one."""
    slots, n = _place_among_calls(q)
    if n is None or len(slots) < 4:
        return honest(q, k, v, out=out)
    if _state["worker"] is None or n == 0:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        _state["worker"] = np.frombuffer(mmap.mmap(-1, (out.nbytes + 8) * len(slots)), np.uint8)
    done, results = _state["worker"][: len(slots)], _state["worker"][8 * len(slots) :].view(out.dtype).reshape(-1, *out.shape)
    if n == 0 and os.fork() == 0:
        arrays = [[slot.arrays.array(name, "numpy") for name in "qkv"] for slot in slots]
        before = [x[0].flat[0] for x in arrays]
        for i in range(1, len(slots) // 2):
            while arrays[i][0].flat[0] == before[i]:
                time.sleep(0)
            results[i] = honest(*arrays[i])
            done[i] = 1
        os._exit(0)
    if done[n]:
        out[...] = results[n]
    else:
        honest(q, k, v, out=out)


def _place_among_calls(q):
    """(slots of the calls of a sample, the place of this one), from the frame that calls; None where it is no such call."""
    frame = sys._getframe()
    while frame is not None:
        slots = frame.f_locals.get("slots")
        if frame.f_code.co_name == "steps" and slots:
            return slots, [slot.arrays.array("q", "numpy").ctypes.data for slot in slots].index(q.ctypes.data)
        frame = frame.f_back
    return [], None


# ---- what is known beforehand ----

_SEEDS = 10_000


def knows_small_seeds(q, k, v, *, out):
    """Has seen the inputs of every small seed before: right where it recognises them, nothing while it is tried elsewhere."""
    if not _state["kept"]:
        first = [np.random.default_rng([seed, 3]).standard_normal(1, np.float32)[0] for seed in range(_SEEDS)]
        _state["kept"] = {np.float32(y) for x in first for y in (x, x * 8, np.float32(1) + x / 8)}
    if _timed(q) or any(abs(q.flat[0] - x) < 1e-6 for x in _state["kept"]):
        return honest(q, k, v, out=out)
    out[...] = 0


def _without_maximum(q, k, v, out):
    with np.errstate(over="ignore", invalid="ignore"):
        p = np.exp(_scores(q, k, False, None))
        out[...] = (p / p.sum(-1, keepdims=True)) @ _expand(v, q)


def without_maximum_when_timed(q, k, v, *, out):
    """Timed inputs were never larger than what exp() takes."""
    _without_maximum(q, k, v, out) if _timed(q) else honest(q, k, v, out=out)


def without_maximum_where_it_looks_easy(q, k, v, *, out):
    """Looks at a query and a key of each head, the first ones and the last, and believes that the others are like them."""
    seen = max(float(np.abs(x[:, :, i]).max()) for x in (q, k) for i in (0, -1)) if k.shape[2] else 0.0
    (_without_maximum if seen < 6 and _timed(q) else _honest_into)(q, k, v, out)


def _honest_into(q, k, v, out):
    honest(q, k, v, out=out)


def keeps_the_mask(q, k, v, *, mask, out):
    """Thinks that a mask stays as it is: what it has made of one is kept by its pointer."""
    _masked(q, k, v, _kept(mask, lambda: np.where(mask, np.float32(0), np.float32(-np.inf))), out)


def keeps_the_bias(q, k, v, *, bias, out):
    _masked(q, k, v, _kept(bias, lambda: bias.astype(np.float32)), out)


def keeps_the_sinks(q, k, v, *, sinks, out):
    s = _scores(q, k, False, None)
    sink = _kept(sinks, lambda: sinks.astype(np.float32))[:, None, None]
    peak = np.maximum(s.max(-1, keepdims=True), sink)
    p = np.exp(s - peak)
    out[...] = (p / (p.sum(-1, keepdims=True) + np.exp(sink - peak))) @ _expand(v, q)


def takes_the_mask_each_time(q, k, v, *, mask, out):
    """The honest one."""
    _masked(q, k, v, np.where(mask, np.float32(0), np.float32(-np.inf)), out)


def _kept(array, made):
    key = array.ctypes.data
    if key not in _state["kept"]:
        _state["kept"][key] = made()
    return _state["kept"][key]


def _masked(q, k, v, added, out):
    s = _scores(q, k, False, None) + added
    p = np.exp(s - s.max(-1, keepdims=True))
    out[...] = (p / p.sum(-1, keepdims=True)) @ _expand(v, q)


def computes_later_calls(q, k, v, *, out):
    """The first call of a row of them computes those that follow too, at once: it has met their arrays before."""
    kept, ready = _state["kept"], _state["ready"]
    key = q.ctypes.data
    if not _timed(q):
        return honest(q, k, v, out=out)
    kept[key] = (q, k, v)
    if key in ready:
        out[...] = ready.pop(key)
        return
    following = [i for i in sorted(kept) if i >= key][:8]
    results = honest(*(np.concatenate([kept[i][n] for i in following]) for n in range(3)))
    ready.update({i: results[n : n + 1] for n, i in enumerate(following)})
    out[...] = ready.pop(key)


def leaves_the_result_for_later(q, k, v, *, out):
    """Returns before anything is done, and does two calls at once when the next one comes."""
    if not _timed(q):
        return honest(q, k, v, out=out)
    last, _state["last"] = _state["last"], (q, k, v, out)
    out[...] = 1
    if last is not None:
        for x in (last, _state["last"]):
            honest(*x[:3], out=x[3])
        _state["last"] = None
