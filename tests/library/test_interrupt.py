"""Ctrl-C during a call on the CPU: it ends soon, wherever the kernel is, and leaves nothing behind but undefined outputs."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import fa_ext
from tests.contract.shares import some_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads CPU seconds in /proc")

#: Calls of many seconds by kernel: Python expressions. `wide(*shape)` takes no memory.
LONG = {
    "cpu_ref": {
        "rows": "fa_ext.attention(*[wide(1, 8, 4000, 128)] * 3, kernel=kernel)",
        "one row": "fa_ext.attention(wide(1, 1, 1, 256), *[wide(1, 1, 50_000_000, 256)] * 2, kernel=kernel)",
        "rows of no query": "fa_ext.attention(wide(100, 8, 5000, 256), *[wide(100, 8, 9, 256)] * 2, seqlens_q=ints(100), kernel=kernel)",
    },
    "cpu_simd": {
        "tiles": "fa_ext.attention(*[wide(1, 8, 60_000, 128)] * 3, kernel=kernel)",
        "one tile": "fa_ext.attention(wide(1, 1, 64, 128), *[wide(1, 1, 1 << 28, 128)] * 2, kernel=kernel)",
        "one row": "fa_ext.attention(wide(1, 1, 1, 128), *[wide(1, 1, 1 << 31, 128)] * 2, kernel=kernel)",
        "pages": "fa_ext.attention(wide(1, 8, 60_000, 128), *[wide(9, 8, 64, 128)] * 2, page_table=ints(1, 1000), layout='bhsd',"
                 " seqlens_k=np.full(1, 64_000, 'i4'), kernel=kernel)",
    },
    "cpu_ref_backward": {
        what: f"fa_ext.attention_backward(*gradient(1, 8, {rows}, 128), wrt=('{what}',), kernel=kernel, **extras(8, {rows}))"
        for what, rows in {"q": 3000, "k": 3000, "bias": 3000, "sinks": 4_000_000}.items()
    },
    "cpu_simd_backward": {
        what: f"fa_ext.attention_backward(*gradient(1, {heads}, {rows}, 128), wrt=('{what}',), kernel=kernel, **extras({heads}, {rows}))"
        for what, rows, heads in (("q", 40_000, 8), ("k", 100_000, 1), ("bias", 20_000, 8), ("sinks", 4_000_000, 8))
    },
    "cpu_merge": {"rows": "fa_ext.merge([wide(1, 256, 100_000, 1)] * 40, [wide(1, 256, 100_000)] * 40, kernel=kernel)"},
    "cpu_append": {
        "tokens": "fa_ext.append(*np.zeros((2, 1, 1, 64, 128), 'f4'), *[wide(1_000_000, 64, 128)] * 2, slots=ints(1_000_000),"
                  " layout='bshd', kernel=kernel)",
        "sequences": "fa_ext.append(*np.zeros((2, 1, 4, 64, 128), 'f4'), *[wide(4, 1_000_000, 64, 128)] * 2, layout='bshd',"
                     " page_table=ints(4, 250_000), seqlens_k=np.full(4, 1_000_000, 'i4'), kernel=kernel)",
    },
}  # fmt: skip
for _kernel, _rows in (("cpu_ref_backward", 3000), ("cpu_simd_backward", 20_000)):  # of each of eight packed sequences
    _starts = f"np.arange(9, dtype='i4') * {_rows}"
    LONG[_kernel]["sequences"] = (f"fa_ext.attention_backward(*[wide({8 * _rows}, 1, 128)] * 5, wide(1, {8 * _rows}), kernel=kernel,"
                                  f" cu_seqlens_q={_starts}, cu_seqlens_k={_starts})")  # fmt: skip
SCRIPT = """
import signal, sys, threading, time
import numpy as np
import fa_ext

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background process begins without it

def wide(*shape):
    return np.broadcast_to(np.float32(0.5), shape)
def ints(*shape):
    return np.zeros(shape, "i4")
def gradient(*shape):
    return [wide(*shape)] * 5 + [wide(*shape[:3])]
def extras(heads, rows):
    return dict(bias=wide(1, 1, 1, rows), sinks=wide(heads))
def small():
    x = np.random.default_rng(0).standard_normal((1, 4, 300, 64)).astype("f4")
    return fa_ext.attention(x, x, x, causal=True)
kernel, wanted = sys.argv[1], small().tobytes()
def say(*words):
    print(*words, flush=True)
"""


def cpu_seconds(process):
    """Those of a process so far, by clocks that it shares with its own time.process_time()."""
    after_name = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, after_name[11:13])) / os.sysconf("SC_CLK_TCK")


def interrupted(code, kernel, threads=2, after=0.6):
    """CPU seconds of a script from a SIGINT to what it says next, and all that it says. Seconds of a clock on the wall would
    depend on what else the machine does; a script that waits and does nothing is ended after a minute of them."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(Path(fa_ext.__file__).parents[1])}
    child = subprocess.Popen([sys.executable, "-c", SCRIPT + code, kernel], env=environment, text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip
    try:
        assert child.stdout and child.stdout.readline() == "begun\n", child.communicate(timeout=60)
        time.sleep(after)
        sent = cpu_seconds(child.pid)
        child.send_signal(signal.SIGINT)
        said, errors = child.communicate(timeout=60)
    finally:
        child.kill()
    assert child.returncode == 0, said + errors
    return float(said.split()[0]) - sent, said.split()[1:]


@pytest.mark.parametrize(
    "kernel, which, threads", some_of([(kernel, which, threads) for kernel, calls in LONG.items() for which in calls for threads in (1, 2)])
)
def test_a_call_ends_soon(kernel, which, threads):
    code = f"""
try:
    say("begun")
    {LONG[kernel][which]}
except KeyboardInterrupt:
    say(time.process_time(), "interrupted")
else:
    say(time.process_time(), "too short")
assert small().tobytes() == wanted
"""
    took, said = interrupted(code, kernel, threads)
    assert said == ["interrupted"]
    assert took < threads, f"{took:.2f} s"  # 0.1 s a thread


def test_a_call_of_another_thread_goes_on():
    """Signals are the main thread's."""
    code = """
def work():
    q = np.random.default_rng(0).standard_normal((1, 2, 3000, 64)).astype("f4")
    results.append(fa_ext.attention(q, q, q, kernel=kernel))
    results.append(time.monotonic())
results = []
thread = threading.Thread(target=work)
thread.start()
say("begun")
while thread.is_alive():
    try:
        while thread.is_alive():  # within: the signal may come between two waits
            thread.join(0.05)
    except KeyboardInterrupt:
        say(time.process_time(), len(results))
q = np.random.default_rng(0).standard_normal((1, 2, 3000, 64)).astype("f4")
assert fa_ext.attention(q, q, q, kernel=kernel).tobytes() == results[0].tobytes()
assert small().tobytes() == wanted
"""
    took, said = interrupted(code, "cpu_ref", after=0.3)
    assert said == ["0"] and took < 2


def test_a_handler_may_call_and_return():
    code = """
signal.signal(signal.SIGINT, lambda *_: say(time.process_time(), small().tobytes() == wanted))
q = np.random.default_rng(0).standard_normal((1, 2, 3000, 64)).astype("f4")
say("begun")
out = fa_ext.attention(q, q, q, kernel=kernel)
signal.signal(signal.SIGINT, signal.SIG_IGN)
assert fa_ext.attention(q, q, q, kernel=kernel).tobytes() == out.tobytes()
"""
    took, said = interrupted(code, "cpu_ref", after=0.3)
    assert said == ["True"] and took < 2
