"""The two places an implementation runs: the CPU, and GPU 0 driven through torch or CuPy, whichever imports.

On a GPU everything of a run is queued on one stream that is made current in torch and in CuPy alike, so that events
and captured graphs see the work of any implementation that respects its library's current stream.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import os
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench import report

# Bound before any candidate is imported: patching the module `time` later does not reach it.
_now, _sleep = time.perf_counter, time.sleep


class Cpu:
    """Work is done when a call returns, but for worker threads that go on spinning: see ``settle``."""

    kind = "cpu"
    # OpenBLAS workers spin for 100 ms after a product, libgomp's for 15 (2 cores, Zen 5).
    SETTLE_SECONDS = 0.5
    SETTLE_LOOKS = 3  # a millisecond apart
    default_arrays = "numpy"
    torch: Any = None
    cupy: Any = None
    factors: Any = None

    def __init__(self):
        self.cache_bytes = _last_level_cache()

    def synchronize(self) -> None:
        pass

    def settle(self) -> float:
        """Waits until no other thread of this process runs in three looks, at most half a second; returns the seconds.

        Workers of a thread pool spin for a while after a call returned, on the cores of whoever comes next. Called
        before every sample of every implementation, so that each begins on the same idle machine.
        """
        began, quiet = _now(), 0
        while quiet < self.SETTLE_LOOKS and _now() - began < self.SETTLE_SECONDS:
            quiet = 0 if others_run() else quiet + 1
            _sleep(1e-3)
        return _now() - began

    def waited_for_cores(self) -> float:
        """Seconds for which threads of this process were ready to run and had no core, so far (Linux; else 0)."""
        waited = 0
        for task in Path("/proc/self/task").glob("*/schedstat"):
            try:
                waited += int(task.read_text().split()[1])
            except (OSError, IndexError):  # ended meanwhile, or not counted by this kernel
                continue
        return waited * 1e-9

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        yield


class Cuda:
    """GPU 0 through torch if it imports, else CuPy."""

    kind = "cuda"

    def __init__(self):
        self.torch = _importable("torch")
        self.cupy = _importable("cupy")
        if self.torch is not None and not self.torch.cuda.is_available():
            self.torch = None
        if self.torch is None and self.cupy is None:
            raise report.UsageError("a GPU run needs torch or CuPy to hold arrays and events; neither imports here")
        self.default_arrays = "torch" if self.torch else "cupy"
        if self.torch:
            properties = self.torch.cuda.get_device_properties(0)
            self.cache_bytes = properties.L2_cache_size
            self.name = properties.name
            self._stream = self.torch.cuda.Stream()
            self.pointer = self._stream.cuda_stream
        else:
            attributes = self.cupy.cuda.Device(0).attributes
            self.cache_bytes = attributes["L2CacheSize"]
            self.name = self.cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
            self._stream = self.cupy.cuda.Stream(non_blocking=True)
            self.pointer = self._stream.ptr
        self.factors: Any = None  # of bench.problems.memory's hash
        self._last: Any = None  # a reference to the last graph
        # Held from before any candidate is loaded, so that patching a library later changes nothing here.
        self._synchronize = self.torch.cuda.synchronize if self.torch else self.cupy.cuda.runtime.deviceSynchronize

    def synchronize(self) -> None:
        """Waits for the whole device, other streams included."""
        self._synchronize()

    def settle(self) -> float:
        """A sample begins with an idle device already: nothing to wait for."""
        return 0.0

    def waited_for_cores(self) -> float:
        """Not what a GPU's times depend on."""
        return 0.0

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Makes the run's stream current in both libraries."""
        with contextlib.ExitStack() as stack:
            if self.torch:
                stack.enter_context(self.torch.cuda.stream(self._stream))
            if self.cupy:
                stack.enter_context(self.cupy.cuda.ExternalStream(self.pointer) if self.torch else self._stream)
            yield

    def wait_for_stream(self) -> None:
        """Waits for the run's stream alone."""
        self._stream.synchronize()

    def event(self) -> Any:
        return self.torch.cuda.Event(enable_timing=True) if self.torch else self.cupy.cuda.Event()

    def record(self, event: Any) -> None:
        event.record(self._stream)

    def seconds_between(self, first: Any, last: Any) -> float:
        """Waits for `last`."""
        last.synchronize()
        if self.torch:
            return first.elapsed_time(last) * 1e-3
        return self.cupy.cuda.get_elapsed_time(first, last) * 1e-3

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """`work` captured into a CUDA graph; returns what launches it on the run's stream. Raises if it refuses. It shares what
        memory torch gives it with the one before, while that lives, since they run one after another."""
        if self.torch:
            graph = self.torch.cuda.CUDAGraph()
            self.synchronize()
            last, self._last = self._last and self._last(), None  # a capture that fails leaves the memory as it may be
            with self.torch.cuda.graph(graph, pool=last and last.pool(), stream=self._stream, capture_error_mode="thread_local"):
                if self.cupy:
                    with self.cupy.cuda.ExternalStream(self.pointer):
                        work()
                else:
                    work()
            self._last = weakref.ref(graph)
            return graph.replay
        self._stream.begin_capture(self.cupy.cuda.runtime.streamCaptureModeThreadLocal)
        try:
            work()
        finally:
            graph = self._stream.end_capture()
        return lambda: graph.launch(self._stream)


class DriverError(OSError):
    """A function of the CUDA driver returned another `code` than success."""

    def __init__(self, name: str, code: int):
        super().__init__(f"{name} failed with CUDA error {code}")
        self.code = code


def driver(name: str, *arguments: Any) -> None:
    """Calls the CUDA driver in the current context, which is the one of the array library."""
    code = getattr(ctypes.CDLL("libcuda.so.1"), name)(*arguments)
    if code:
        raise DriverError(name, code)


def open_device(name: str | None) -> Cpu | Cuda:
    """ "cpu", "cuda", or None for the GPU where there is one."""
    if name == "cpu":
        return Cpu()
    if name == "cuda":
        return Cuda()
    if name is not None:
        raise report.UsageError(f"device is {name!r}; accepted: cpu, cuda")
    return Cuda() if has_gpu() else Cpu()


def default() -> str:
    return "cuda" if has_gpu() else "cpu"


def has_gpu() -> bool:
    """True where an NVIDIA driver answers and a library that can hold device arrays imports."""
    if not (Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists()):
        return False
    torch = _importable("torch")
    if torch is not None and torch.cuda.is_available():
        return True
    cupy = _importable("cupy")
    if cupy is None:
        return False
    try:
        return cupy.cuda.runtime.getDeviceCount() > 0
    except cupy.cuda.runtime.CUDARuntimeError:
        return False


def _importable(name: str) -> Any:
    if importlib.util.find_spec(name) is None:
        return None
    try:
        return importlib.import_module(name)
    except Exception as error:  # a broken install of a peer must not stop a run that can do without it
        print(f"bench: {name} is installed but does not import: {error}", file=sys.stderr)
        return None


def _last_level_cache() -> int:
    """Bytes of the largest CPU cache as the kernel tells them; 32 MiB where it does not."""
    sizes = []
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        found = re.fullmatch(r"(\d+)([KM])", file.read_text().strip())
        if found:
            sizes.append(int(found.group(1)) << (10 if found.group(2) == "K" else 20))
    return max(sizes, default=32 << 20)


def others_run() -> bool:
    """Whether another thread of this process is running or ready to (Linux; False where the kernel does not tell)."""
    own = str(threading.get_native_id())
    for task in Path("/proc/self/task").glob("*"):
        try:
            if task.name != own and (task / "stat").read_text().rpartition(")")[2].split()[0] == "R":
                return True
        except OSError:  # ended meanwhile
            continue
    return False


def cores() -> int:
    return len(os.sched_getaffinity(0))
