"""Candidates that cheat or err, for the tests of the laboratory: each must be refused by ``bench gate``.

``honest`` is the same computation without the trick, and must be accepted. All take NumPy arrays (B, H, S, D).
"""

import ctypes
import gc
import json
import math
import os
import sys
import threading
import time

import numpy as np

from tests.contract import emulations


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


# ---- the clock ----


def patches_timer(q, k, v, *, out):
    """Halves what the worker's clock reads."""
    from bench.trial import calls

    if not _state["calls"]:
        now, begun = calls._now, calls._now()
        calls._now = lambda: begun + (now() - begun) / 2
    _state["calls"] += 1
    return honest(q, k, v, out=out)


def patches_time(q, k, v, *, out):
    """Stops every clock of the process."""
    from bench.trial import calls

    calls._now = time.perf_counter = lambda: 0.0
    return honest(q, k, v, out=out)


def edits_stopwatch(q, k, v, *, out):
    """Moves the beginning of the measurement, a local variable of a calling frame, to now."""
    honest(q, k, v, out=out)
    for frame in _frames():
        if isinstance(frame.f_locals.get("began"), float):
            _set_local(frame, "began", time.perf_counter())


# ---- the judge ----


def patches_judge(q, k, v, *, out):
    """Makes every error 0."""
    np.linalg.norm = lambda *args, **options: np.float64(0)
    np.isfinite = lambda x: np.ones(np.shape(x), bool)
    np.abs = np.zeros_like
    out[...] = 0


def forges_verdict(q, k, v, *, out):
    """Writes a verdict wherever it can be written to, and ends."""
    verdict = {"kind": "done", "value": {"correct": True, "failures": [], "ratios": {"numpy": {"ratio": 0.1}}}}
    _write_everywhere(verdict)
    os._exit(0)


def forges_with_token(q, k, v, *, out):
    """The same with the token of the request, which it finds in a calling frame: the call counts as done."""
    _write_everywhere({"kind": "done", "value": 1e-6, "token": _request()["token"]})
    os._exit(0)


def floods_replies(q, k, v, *, out):
    """So much nonsense that reading it should hurt."""
    for fd in _sockets():
        os.write(fd, b"[" * 100_000 + b"\n")
    honest(q, k, v, out=out)


def answers_early(q, k, v, *, out):
    """Ends the clock by the right reply while the work has only begun."""
    _state["calls"] += 1
    if _state["calls"] > 12:
        _write_everywhere({"kind": "done", "value": 1e-3, "token": _request()["token"]})
        time.sleep(0.05)
    honest(q, k, v, out=out)


def copies_expected(q, k, v, *, out):
    """Looks through every frame and every object for an array that could be the result."""
    found = [x for frame in _frames() for x in frame.f_locals.values()]
    for x in found + gc.get_objects():
        held = list(vars(x).values()) if type(x).__module__.startswith(("bench", "fa_ext")) and hasattr(x, "__dict__") else [x]
        for y in held:
            if type(y) is np.ndarray and y.shape == out.shape and y.dtype.kind == "f" and not any(
                np.shares_memory(y, z) for z in (q, k, v, out)
            ) and np.isfinite(y).all() and 0.01 < np.abs(y).max() < 10:  # fmt: skip
                out[...] = y
                return
    out[...] = v.mean(axis=2, keepdims=True)


def writes_parent_memory(q, k, v, *, out):
    """Opens the judge's memory to change it."""
    with open(f"/proc/{os.getppid()}/mem", "r+b"):
        out[...] = 0


def makes_inputs_easy(q, k, v, *, out):
    """Makes V zero, so that zeros are right: through its own mapping, and through a new one."""
    libc = ctypes.CDLL(None, use_errno=True)
    page = v.ctypes.data & ~4095
    if libc.mprotect(ctypes.c_void_p(page), v.nbytes + v.ctypes.data - page, 3) == 0:
        ctypes.memset(v.ctypes.data, 0, v.nbytes)
    for line in open("/proc/self/maps"):
        area = line.split()[0]
        if "memfd:bench" in line:
            try:
                fd = os.open(f"/proc/self/map_files/{area}", os.O_RDWR)
                os.pwrite(fd, bytes(os.fstat(fd).st_size), 0)
            except OSError:
                continue
    out[...] = 0


def shrinks_memory(q, k, v, *, out):
    """Takes the memory away from under the judge."""
    for line in open("/proc/self/maps"):
        if "memfd:bench" in line:
            try:
                os.truncate(f"/proc/self/map_files/{line.split()[0]}", 0)
            except OSError:
                continue
    out[...] = 0


def slows_baseline(q, k, v, *, out):
    """Gives every other worker of its judge the lowest priority; those of judges beside it are other tests'."""
    honest(q, k, v, out=out)
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            try:
                parent = int(open(f"/proc/{entry}/stat").read().rpartition(")")[2].split()[1])
                if parent == os.getppid() and b"bench.trial.isolation" in open(f"/proc/{entry}/cmdline", "rb").read():
                    os.setpriority(os.PRIO_PROCESS, int(entry), 19)
            except OSError:
                continue


def leaves_process(q, k, v, *, out):
    """A grandchild in a session of its own goes on working when the call has returned."""
    honest(q, k, v, out=out)
    _state["calls"] += 1
    if _state["calls"] % 5 == 0:
        _daemon(lambda: [None for _ in iter(int, 1)])


def leaves_daemon(q, k, v, *, out):
    """A daemon that would outlive the run; its process id goes to a file. The result is wrong."""
    if not _state["calls"]:
        _daemon(lambda: (open(os.environ["FA_TEST_PID_FILE"], "w").write(str(os.getpid())), time.sleep(600)))
        time.sleep(0.5)
    _state["calls"] += 1
    out[...] = 0


def leaves_daemon_and_hangs(q, k, v, *, out):
    leaves_daemon(q, k, v, out=out)
    time.sleep(600)


def _daemon(work):
    child = os.fork()
    if child == 0:
        os.setsid()
        if os.fork() == 0:
            work()
        os._exit(0)
    os.waitpid(child, 0)


def _frames():
    frame = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _set_local(frame, name, value):
    frame.f_locals[name] = value
    if hasattr(ctypes.pythonapi, "PyFrame_LocalsToFast"):  # before Python 3.13
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))


def _request():
    return next(f.f_locals["request"] for f in _frames() if isinstance(f.f_locals.get("request"), dict))


def _sockets():
    return [fd for fd in map(int, os.listdir("/proc/self/fd")) if _link(fd).startswith("socket:")]


def _link(fd):
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:  # the one that listed them
        return ""


def _write_everywhere(reply):
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            os.write(fd, json.dumps(reply).encode() + b"\n")
        except OSError:
            continue


# ---- work that is done when nobody looks ----


def returns_unless_poisoned(q, k, v, *, out):
    """Three lines that could be an accident: an output that is not NaN has been computed already."""
    if not np.isnan(out.flat[0]):
        return out
    return honest(q, k, v, out=out)


class _Later(np.ndarray):
    """An array that is computed when somebody looks at it."""


class _Promise:
    def __init__(self, *arguments):
        self.arguments = arguments
        self.shape, self.dtype = arguments[0].shape, arguments[0].dtype

    def __array__(self, dtype=None, copy=None):
        return honest(*self.arguments)


def lazy_object(q, k, v):
    """Something that does its work in ``__array__``."""
    return _Promise(q, k, v)


def lazy_subclass(q, k, v):
    """An instance of a subclass of the library's array."""
    return honest(q, k, v).view(_Later)


def caches_content(q, k, v, *, out):
    """Knows inputs by what they hold, whatever the sign of V."""
    key = hash((q.tobytes(), k.tobytes(), np.abs(v).tobytes()))
    if key not in _state["by_pointer"]:
        _state["by_pointer"][key] = honest(q, k, v) / np.sign(v.flat[0])
    out[...] = _state["by_pointer"][key] * np.sign(v.flat[0])


def caches_queries(q, k, v, *, out):
    """Thinks that only V is changed under its pointers: keeps the weights of Q and K."""
    key = (q.ctypes.data, k.ctypes.data)
    if key not in _state["by_pointer"]:
        s = _scores(q, k, False, None)
        p = np.exp(s - s.max(-1, keepdims=True))
        _state["by_pointer"][key] = p / p.sum(-1, keepdims=True)
    out[...] = _state["by_pointer"][key] @ v


def computes_ahead(q, k, v, *, out):
    """A thread watches the inputs and computes as soon as they change, so that the timed call has only to copy."""
    done = _state["by_pointer"]
    key = (q.ctypes.data, out.ctypes.data)
    _state["calls"] += 1
    if key in done:
        out[...] = done[key][1]
        return

    def watch():
        while True:
            mark = q.tobytes()
            if mark != done[key][0]:
                done[key] = (mark, honest(q, k, v))
            time.sleep(1e-4)

    done[key] = (q.tobytes(), honest(q, k, v))
    threading.Thread(target=watch, daemon=True).start()
    out[...] = done[key][1]


def half_precision_when_timed(q, k, v, *, out):
    """As precise as asked while it is tried, by the hundredth of its memory when time counts."""
    _state["calls"] += 1
    (honest if _state["calls"] <= 8 else low_precision)(q, k, v, out=out)


def skips_a_head_when_timed(q, k, v, *, out):
    _state["calls"] += 1
    if _state["calls"] <= 8:
        return honest(q, k, v, out=out)
    out[:, 1:] = honest(q[:, 1:], k[:, 1:], v[:, 1:])
    out[:, :1] = v[:, :1].mean(axis=2, keepdims=True)


def ends_when_timed(q, k, v, *, out):
    """Prints what a user hopes to read, with a colour, and ends without an error."""
    _state["calls"] += 1
    if _state["calls"] > 8:
        print("\033[32mPASS\033[0m", flush=True)
        os._exit(0)
    honest(q, k, v, out=out)


# ---- memory ----


def mutates_inputs(q, k, v, *, out):
    """Scales the queries in place."""
    honest(q, k, v, out=out)
    q *= 0.5


def mutates_memory(q, k, v, *, out):
    """The same behind the array library's back."""
    honest(q, k, v, out=out)
    ctypes.memset(q.ctypes.data, 0, q.nbytes)


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


def clamped_scores(q, k, v, *, out):
    """No maximum is subtracted, and what exp() would not survive is cut off: right while scores stay within 80."""
    p = np.exp(np.clip(_scores(q, k, False, None), -80, 80))
    out[...] = (p / p.sum(-1, keepdims=True)) @ _expand(v, q)


online_softmax = _emulated(emulations.exact)
clamped_exponentials = _emulated(emulations.clamped_exponentials)
isfinite_fallback = _emulated(emulations.isfinite_fallback)
state_of_each_warp = _emulated(emulations.state_of_each_warp)
skipped_rescale = _emulated(emulations.skipped_rescale)
stale_sum = _emulated(emulations.stale_sum)
