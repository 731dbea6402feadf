"""Running cases on kernels of the table: which kernels and devices there are, inputs, guarded outputs, the verdict."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
import re
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import fa_ext
from bench.problems import cases
from bench.problems.case import Case
from bench.problems.placement import BFLOAT16, Unplaceable, dtype_of, place
from fa_ext import _core, reference
from fa_ext.judge import OTHER_ORDER, Report, judge, spread
from tests.library.support import stub

# Elements around each output that no kernel may touch; keeps the output's alignment.
_GUARD = 256

# Kernels whose float32 sums are a library's, in an order that is not plain's.
LIBRARY_SUMS = {"cublas"}

# For tables of every kernel's answers, which the set core makes others.
needs_every_instance = pytest.mark.skipif(
    bool(_core.build_info()["left_out"]), reason="the build leaves out instances: FA_INSTANCES=all has them"
)

# A call that every kernel takes on the devices it is made for.
SIMPLEST = Case(1, 1, 1, 64, 64, 64)


def device_of(kernel: str) -> str:
    """ "cpu" or "cuda"."""
    built = _core.build_info()["kernels"]
    return built[kernel][0] if kernel in built else ("cpu" if kernel.startswith("cpu") else "cuda")


def listed_name(kernel: str) -> str:
    """A kernel's name in the table: a second copy, loaded at run time, is called name@2."""
    return kernel.partition("@")[0]


def refusal_of(error: fa_ext.UnsupportedError) -> tuple[str, str] | None:
    """(the kernel that the call names, its reason); None where the call names none."""
    found = re.fullmatch(r'kernel "([^"]*)" cannot take this call: (.*)', str(error), re.DOTALL)
    return (found[1], found[2]) if found else None


@functools.cache
def lacks_instance() -> str:
    """The reason of a kernel whose instance for the call FA_INSTANCES left out. Its words are in the sources, which tests of an
    installed wheel do without."""
    return stub.reasons()["INSTANCE"]


def is_left_out(error: fa_ext.UnsupportedError) -> bool:
    """Whether the kernel that the call names lacks an instance by its build's choice: of this build's kernels those of which it
    left something out, and all that were loaded."""
    kernel, reason = refusal_of(error) or ("", "")
    built = _core.build_info()
    of = {"packed_sm90": {"serve_sm90", "prefill_sm90"}}.get(kernel, {kernel})  # whose instances it has
    chosen = kernel not in built["kernels"] or bool(of & {name.partition(".")[0] for name in built["left_out"]})
    return chosen and reason == lacks_instance()


def first_device() -> None:
    """Makes the first of several CUDA devices current: JAX, as it begins, leaves the last one so."""
    if "jax" not in sys.modules or no_device() or _core.device_count() < 2:
        return
    if "torch" in sys.modules:
        sys.modules["torch"].cuda.set_device(0)
    if "cupy" in sys.modules:
        sys.modules["cupy"].cuda.Device(0).use()


@functools.cache
def no_device() -> str | None:
    """Why CUDA kernels cannot run here, or None."""
    try:
        count = _core.device_count()
    except fa_ext.CudaError as error:
        return str(error)
    if not count:
        return "no CUDA device"
    if not (has("cupy") or has("torch")):
        return "neither CuPy nor torch is installed"
    return None


@functools.cache
def has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


@functools.cache
def absent(kernel: str) -> str | None:
    """Why a kernel cannot run on this machine at all, or None."""
    if device_of(kernel) == "cpu":
        return None
    reason = no_device()
    if reason:
        return reason
    inputs = SIMPLEST.make_inputs(library_for(kernel, SIMPLEST))
    answer, reason, _ = _core.answers(**inputs, kernel=kernel)[kernel]
    return reason if answer == "not here" else None


@functools.cache
def _cupy_has_bfloat16() -> bool:
    import cupy

    try:
        array = cupy.asarray(np.ones(4, BFLOAT16))
        return bool(fa_ext.to_numpy(array)[0] == 1)
    except Exception:
        return False


def library_for(kernel: str, case: Case) -> str:
    """The array library that holds a case's inputs for a kernel."""
    if device_of(kernel) == "cpu":
        return "numpy"
    if has("cupy") and (case.dtype != "bfloat16" or _cupy_has_bfloat16()):
        return "cupy"
    if not has("torch"):
        raise Unplaceable("bfloat16 on a device needs torch, or a CuPy that knows it")
    return "torch"


def takes(kernel: str, **arguments) -> bool:
    """Whether a kernel of attention takes a call on NumPy arrays, or one on an H200 takes it there."""
    from tests.contract.devices import DEVICES

    device = None if device_of(kernel) == "cpu" else DEVICES["h200"]
    return _core.answers(**arguments, device=device, kernel=kernel)[kernel][0] in ("takes", "declines")


def has_float64(kernel: str) -> bool:
    """Kernels for a device have not, where they are emulated too."""
    return listed_name(kernel).startswith("cpu")


@functools.cache
def has_dtype(kernel: str, dtype: str) -> bool:
    """Whether a kernel of attention takes arrays of a dtype."""
    if dtype == "bfloat16" and BFLOAT16 is None or dtype == "float64" and not has_float64(kernel):
        return False
    if kernel in cases.OF_PACKED_QUERIES:
        return dtype in ("float16", "bfloat16")
    return takes(kernel, **dataclasses.replace(SIMPLEST, dtype=dtype).host_inputs())


def narrowest(kernel: str) -> str:
    """The dtype of the smallest errors that a kernel has on a device: float32, or float16."""
    return "float32" if has_dtype(kernel, "float32") else "float16"


def library_of(kernel: str) -> str:
    """The array library for a kernel's arguments, of any dtype."""
    return "numpy" if device_of(kernel) == "cpu" else "torch" if has("torch") else "cupy"


def on(kernel: str, arguments: dict) -> dict:
    """NumPy arrays among the arguments of a call, and in pairs of them, on the kernel's device with their strides."""
    library = library_of(kernel)

    def put(x):
        if isinstance(x, tuple) and any(isinstance(y, np.ndarray) for y in x):
            return tuple(put(y) for y in x)
        return place(x, library) if isinstance(x, np.ndarray) else x

    return arguments if library == "numpy" else {name: put(x) for name, x in arguments.items()}


def attention(kernel: str, q, k, v, **arguments):
    """fa_ext.attention by a kernel, from NumPy arrays to NumPy arrays."""
    found = fa_ext.attention(**on(kernel, {"q": q, "k": k, "v": v} | arguments), kernel=kernel)
    return tuple(map(to_host, found)) if isinstance(found, tuple) else to_host(found)


@dataclass
class Prepared:
    """A case's inputs in one library, and on the host what float64 says about them."""

    inputs: dict[str, Any]
    truth: tuple
    ordinary: tuple
    exempt: Any  #: where NaN may spread to on kernels other than cpu_ref


@functools.lru_cache(maxsize=3)
def known(case: Case):
    """(inputs, truth, ordinary, exempt) of a case on the host: the kernels that a case runs on share it."""
    inputs = case.host_inputs()
    truth = reference.attention(**inputs)
    ordinary = reference.plain(**inputs, exact=case.exact)
    return inputs, truth, ordinary, spread(inputs["k"], inputs["v"], truth[0], case.layout, case.causal, case.window)


@functools.lru_cache(maxsize=3)
def prepared(case: Case, library: str) -> Prepared:
    # NumPy judges the device's results too: compiling CuPy's kernels would take longer than all these small cases.
    inputs, *judgement = known(case)
    return Prepared(inputs if library == "numpy" else case.make_inputs(library), *judgement)


def filled(library: str, count: int, dtype: str, value: float):
    """A 1-D array of ``library`` (on the current device)."""
    if library == "cupy":
        import cupy

        return cupy.zeros(count, dtype_of(dtype)) if value == 0 else cupy.asarray(np.full(count, value, dtype_of(dtype)))
    if library == "torch":
        import torch

        return torch.full((count,), value, dtype=getattr(torch, dtype), device="cuda")
    return np.full(count, value, dtype_of(dtype))


def to_host(x) -> np.ndarray:
    """An array of any library as NumPy, without help from fa_ext."""
    if isinstance(x, np.ndarray):
        return x
    if type(x).__module__.startswith("cupy"):
        return x.get()
    if str(x.dtype) == "torch.bfloat16":
        import torch

        return x.view(torch.int16).cpu().numpy().view(BFLOAT16)
    return x.cpu().numpy()


class Outputs:
    """out and lse, filled with NaN, inside memory that is filled with NaN too."""

    def __init__(self, case: Case, library: str):
        lse_dtype = "float64" if case.dtype == "float64" else "float32"
        shapes = (case.out_shape, case.dtype), ((case.batch, case.heads, case.seq_q), lse_dtype)
        self._memory = [(filled(library, math.prod(s) + 2 * _GUARD, d, np.nan), s) for s, d in shapes]
        self.out, self.lse = (m[_GUARD : _GUARD + math.prod(s)].reshape(s) for m, s in self._memory)

    def poison(self):
        """Fills everything with NaN again."""
        for memory, _ in self._memory:
            memory.set(np.full(memory.shape, np.nan, memory.dtype))

    def on_host(self) -> list[np.ndarray]:
        """[out, lse] as NumPy arrays; fails when something was written around them."""
        results = []
        for memory, shape in self._memory:
            count, host = math.prod(shape), to_host(memory)
            guards = np.concatenate((host[:_GUARD], host[_GUARD + count :]))
            assert np.isnan(guards).all(), f"a write outside an output of shape {shape}"
            results.append(host[_GUARD : _GUARD + count].reshape(shape))
        return results


def run(kernel: str, case: Case, **extra) -> list[np.ndarray]:
    """[out, lse] of a case on a kernel, as NumPy arrays. UnsupportedError when the kernel rejects it."""
    library = library_for(kernel, case)
    outputs = Outputs(case, library)
    fa_ext.attention(**prepared(case, library).inputs, **extra, kernel=kernel, out=(outputs.out, outputs.lse))
    return outputs.on_host()


def verdict(kernel: str, case: Case, **extra) -> Report:
    """Runs a case on a kernel and judges it. UnsupportedError when the kernel rejects it."""
    return judged(kernel, case, *run(kernel, case, **extra))


def judged(kernel: str, case: Case, out: np.ndarray, lse: np.ndarray | None) -> Report:
    """The verdict of float64 on a result of a kernel. Where the sums of float32 are a library's, the errors may be
    OTHER_ORDER times the bound: how often they exceed it, ``tests.contract.large_logits`` counts."""
    _, truth, ordinary, exempt = known(case)
    exempt = None if listed_name(kernel) == "cpu_ref" else exempt
    slack = OTHER_ORDER if case.dtype == "float32" and listed_name(kernel) in LIBRARY_SUMS else 1.0
    return judge(out, lse, truth, ordinary, case.dtype, layout=case.layout, kernel=kernel, exempt=exempt, slack=slack)


def bits(x) -> np.ndarray:
    """An array of any library as bytes on the host, for bitwise comparison."""
    return np.ascontiguousarray(to_host(x)).view(np.uint8)


def synchronize():
    """Waits for the device through whichever library is here."""
    if has("cupy"):
        import cupy

        cupy.cuda.Device().synchronize()
    else:
        import torch

        torch.cuda.synchronize()


def free_memory(library: str):
    """Gives device memory that a library keeps for itself back to the device."""
    if library == "cupy":
        import cupy

        cupy.get_default_memory_pool().free_all_blocks()
    elif library == "torch":
        import torch

        torch.cuda.empty_cache()


def free_bytes(library: str) -> int:
    """Free memory of the current device."""
    if library == "cupy":
        import cupy

        return cupy.cuda.Device().mem_info[0]
    import torch

    return torch.cuda.mem_get_info()[0]
