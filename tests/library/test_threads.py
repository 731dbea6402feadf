"""Many threads in one process, and forked children, on the CPU; the device's part is in test_device_arrays.py."""

import ctypes
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import fa_ext
from tests.arrays.producers import exchange_type, ran_alone

pytestmark = pytest.mark.native

WORKERS = 8


def operands(seed=0, sequence=64):
    random = np.random.default_rng(seed)
    return [random.standard_normal((2, 4, sequence, 32)).astype(np.float32) for _ in range(3)]


def together(work):
    """Runs ``work(n)`` in WORKERS threads that start at once; raises what any of them raised."""
    barrier, raised = threading.Barrier(WORKERS), []

    def run(n):
        barrier.wait()
        try:
            work(n)
        except BaseException as error:  # noqa: BLE001
            raised.append(error)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(WORKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]


@pytest.mark.parametrize("kernel", [name for name in fa_ext.kernels() if name.startswith("cpu")])
def test_same_bits_in_all_threads(kernel, request):
    if ran_alone(request):
        return
    inputs = [operands(n) for n in range(WORKERS)]
    wanted = [fa_ext.attention(*arrays, causal=True, kernel=kernel) for arrays in inputs]

    def work(n):
        out = np.empty_like(wanted[n])
        for _ in range(20):
            fa_ext.attention(*inputs[n], causal=True, kernel=kernel, out=out)
            np.testing.assert_array_equal(out, wanted[n])

    together(work)


def test_new_types_in_all_threads():
    q, k, v = operands()
    wanted = fa_ext.attention(q, k, v)
    kinds = [exchange_type(requires_grad=False) for _ in range(40)]

    def work(n):
        for turn in range(40):
            kind = kinds[(turn + n) % 40]
            np.testing.assert_array_equal(fa_ext.attention(kind(q), k, v).array, wanted)

    together(work)


def test_errors_in_all_threads():
    q, k, v = operands()

    def work(n):
        for _ in range(200):
            with pytest.raises(ValueError, match=f'kernel is "none{n}"'):
                fa_ext.attention(q, k, v, kernel=f"none{n}")

    together(work)


def test_the_gil_is_released():
    arrays = operands(sequence=1024)
    fa_ext.attention(*arrays, kernel="cpu_ref")
    ticks, done = [], threading.Event()

    def tick():
        while not done.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.001)

    before = sys.getswitchinterval()
    sys.setswitchinterval(60)  # only a release of the GIL lets the other thread run
    thread = threading.Thread(target=tick)
    try:
        thread.start()
        begun = time.perf_counter()
        fa_ext.attention(*arrays, kernel="cpu_ref")
        ended = time.perf_counter()
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(before)
    inside = sum(begun < moment < ended for moment in ticks)
    assert ended - begun > 0.02, "the call is too short to tell"
    assert inside > 3


def _in_child(work, seconds=60):
    """Forks, runs ``work`` there, and returns the exit status; a child that hangs is killed and fails."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    pytest.fail("the forked child hangs")


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("kernel", [None, *(name for name in fa_ext.kernels() if name.startswith("cpu"))])
def test_fork_after_use(kernel, request):
    if ran_alone(request):
        return
    arrays = operands(sequence=200)
    wanted = fa_ext.attention(*arrays, kernel=kernel)

    def work():
        np.testing.assert_array_equal(fa_ext.attention(*arrays, kernel=kernel), wanted)

    assert _in_child(work) == 0
    np.testing.assert_array_equal(fa_ext.attention(*arrays, kernel=kernel), wanted)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_fork_from_a_thread_pool(request):
    """As a data loader does: several children of a process whose other threads are inside calls."""
    if "libasan" in os.environ.get("LD_PRELOAD", ""):
        pytest.skip("ASan's allocator may hang in a child that was forked while another thread was in it")
    if ran_alone(request):
        return
    arrays = operands(sequence=200)
    wanted = fa_ext.attention(*arrays)
    stop = threading.Event()

    def busy():
        while not stop.is_set():
            fa_ext.attention(*arrays)

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        for _ in range(5):
            assert _in_child(lambda: np.testing.assert_array_equal(fa_ext.attention(*arrays), wanted)) == 0
    finally:
        stop.set()
        thread.join()


def _spawned(arrays, wanted):
    np.testing.assert_array_equal(fa_ext.attention(*arrays), wanted)


def test_spawn():
    arrays = operands()
    process = multiprocessing.get_context("spawn").Process(target=_spawned, args=(arrays, fa_ext.attention(*arrays)))
    process.start()
    process.join(60)
    assert process.exitcode == 0


def test_the_gil_stays_off():
    if not sysconfig.get_config_var("Py_GIL_DISABLED") or os.environ.get("PYTHON_GIL") == "1":
        pytest.skip("this Python has a GIL")
    assert not sys._is_gil_enabled()


def test_sub_interpreters_are_refused():
    """NumPy supports none, so the import must fail with an exception there."""
    interpreters = pytest.importorskip("_interpreters", reason="CPython 3.13 has the module")
    made = interpreters.create("isolated")
    try:
        failure = interpreters.exec(made, "import fa_ext")
        assert failure is not None
    finally:
        interpreters.destroy(made)


def test_a_loop_does_not_wait_for_threads_that_are_busy_elsewhere(tmp_path):
    """One loop holds all threads of the pool; the loops of others end without them, each step done once."""
    compiler, sources = shutil.which("cc"), Path(__file__).parents[2] / "csrc"
    if compiler is None or not sources.is_dir():
        pytest.skip("needs a C compiler and the sources")
    library = tmp_path / "threads.so"
    subprocess.run([compiler, "-std=gnu11", "-D_GNU_SOURCE", "-O2", "-fPIC", "-shared", "-fopenmp", f"-I{sources}", sources / "device/threads.c",
                    "-o", library], check=True)  # fmt: skip
    step_type = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int)
    loop = ctypes.CDLL(str(library)).fa_cpu_loop
    loop.argtypes, loop.restype = (ctypes.c_int, ctypes.c_int64, step_type, ctypes.c_void_p), None
    inside, release, threads = threading.Semaphore(0), threading.Event(), 4
    held = []

    def hold(_, n, thread):
        held.append(thread)
        inside.release()
        release.wait(60)

    holding = step_type(hold)
    holder = threading.Thread(target=loop, args=(threads, threads, holding, None))
    holder.start()
    try:
        for _ in range(threads):
            assert inside.acquire(timeout=60)
        for count in (1, 2, 7, 100):
            done = []
            stepping = step_type(lambda _, n, thread: done.append((n, thread)))
            loop(threads, count, stepping, None)
            assert done == [(n, 0) for n in range(count)]
    finally:
        release.set()
        holder.join()
    assert sorted(held) == list(range(threads))
    for count in (2, 50, 1000):
        done = []
        stepping = step_type(lambda _, n, thread: done.append((n, thread)))
        loop(threads, count, stepping, None)
        assert sorted(n for n, _ in done) == list(range(count)) and {thread for _, thread in done} <= set(range(threads))


SMALL_STACK = """
import sys, threading
import numpy as np
import fa_ext

rng = np.random.default_rng(0)
q, k, v, dout = rng.standard_normal((4, 1, 2, 40, 256)).astype("f4")
bias, sinks = rng.standard_normal((1, 2, 40, 40)).astype("f4"), rng.standard_normal(2).astype("f4")
extras = dict(bias=bias, sinks=sinks, softcap=2.0, alibi=np.ones(2, "f4"))
out, lse = fa_ext.attention(q, k, v, return_lse=True, **extras)
cache = np.zeros((2, 1, 2, 64, 256), "f4")
angles = np.ones((40, 128), "f4")
lengths = dict(seqlens_k=np.array([40], "i4"))
pages = dict(page_table=np.zeros((1, 1), "i4"), layout="bhsd", causal="bottom_right")
calls = {
    "attention": lambda kernel: [fa_ext.attention(q, k, v, kernel=kernel, **extras),
                                 fa_ext.attention(q, k, v, kernel=kernel, **lengths, **pages)],
    "backward": lambda kernel: fa_ext.attention_backward(dout, q, k, v, out, lse, wrt=("q", "k", "v", "bias", "sinks"),
                                                          kernel=kernel, **extras),
    "merge": lambda kernel: fa_ext.merge([out, out], [lse, lse], sinks=sinks, kernel=kernel),
    "append": lambda kernel: fa_ext.append(*cache, k, v, q=q, rotary=(angles, angles), kernel=kernel, layout="bhsd", **lengths),
    "documents": lambda kernel: fa_ext.documents(np.arange(40), kernel=kernel),
}
operation, kernel = sys.argv[1:]
call = calls[operation]
wanted, found = call(kernel), []
threading.stack_size(64 << 10)
thread = threading.Thread(target=lambda: found.append(call(kernel)))
thread.start()
thread.join()
def same(a, b):
    if a is None or isinstance(a, np.ndarray):
        return a is b or a.tobytes() == b.tobytes()
    return all(map(same, a, b))
assert same(found[0], wanted)
"""
OPERATIONS = {"attention": fa_ext.kernels(), **{name: fa_ext.kernels(name) for name in ("backward", "merge", "append", "documents")}}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("operation", "kernel"), [(a, b) for a, names in OPERATIONS.items() for b in names if b.startswith("cpu")])
def test_a_call_on_a_small_stack(operation, kernel, threads):
    """Of 64 kB, as threads of servers have that are many."""
    if "libasan" in os.environ.get("LD_PRELOAD", ""):
        pytest.skip("ASan's frames are larger")
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(Path(fa_ext.__file__).parents[1])}
    command = [sys.executable, "-c", SMALL_STACK, operation, kernel]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
