"""Running cases on rows of the kernel table: which rows and devices there are, inputs, guarded outputs, the verdict."""

from __future__ import annotations

import functools
import importlib.util
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

import fa_ext
from case import Case
from fa_ext import _core, reference
from fa_ext.verify import Report, judge, spread
from operands import BFLOAT16, Unplaceable, dtype_of

# Elements around each output that no kernel may touch; keeps the output's alignment.
_GUARD = 256

# A call that every row takes on the devices it is made for.
SIMPLEST = Case(1, 1, 1, 64, 64, 64)


def device_of(row: str) -> str:
    """ "cpu" or "cuda"."""
    rows = _core.build_info()["rows"]
    return rows[row][0] if row in rows else ("cpu" if row.startswith("cpu") else "cuda")


def listed_name(row: str) -> str:
    """A row's name in the table: a second copy, loaded at run time, is called name@2."""
    return row.partition("@")[0]


@functools.cache
def no_device() -> str | None:
    """Why CUDA rows cannot run here, or None."""
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
def absent(row: str) -> str | None:
    """Why a row cannot run on this machine at all, or None."""
    if device_of(row) == "cpu":
        return None
    reason = no_device()
    if reason:
        return reason
    inputs = SIMPLEST.make_inputs(library_for(row, SIMPLEST))
    try:
        fa_ext.attention(**inputs, kernel=row)
    except fa_ext.UnsupportedError as error:
        return str(error) if re.search(r"sm_\d\d|compute capability|cuBLAS", str(error)) else None
    return None


@functools.cache
def _cupy_has_bfloat16() -> bool:
    import cupy

    try:
        array = cupy.asarray(np.ones(4, BFLOAT16))
        return bool(fa_ext.to_numpy(array)[0] == 1)
    except Exception:
        return False


def library_for(row: str, case: Case) -> str:
    """The array library that holds a case's inputs for a row."""
    if device_of(row) == "cpu":
        return "numpy"
    if has("cupy") and (case.dtype != "bfloat16" or _cupy_has_bfloat16()):
        return "cupy"
    if not has("torch"):
        raise Unplaceable("bfloat16 on a device needs torch, or a CuPy that knows it")
    return "torch"


@dataclass
class Prepared:
    """A case's inputs in one library and what float64 says about them (arrays of ``xp``)."""

    inputs: dict[str, Any]
    truth: tuple
    ordinary: tuple
    exempt: Any  #: where NaN may spread to on rows other than cpu_ref
    xp: Any


@functools.lru_cache(maxsize=3)
def prepared(case: Case, library: str) -> Prepared:
    inputs = case.host_inputs()
    on_device = {n: x for n, x in inputs.items()} if library == "numpy" else case.make_inputs(library)
    xp = np
    if library != "numpy" and has("cupy"):
        import cupy as xp
    arrays = {n: _upload(xp, x) if isinstance(x, np.ndarray) else x for n, x in inputs.items()}
    truth = reference.attention(**arrays, xp=xp)
    ordinary = reference.plain(**arrays, xp=xp, dtype=case.dtype)
    exempt = spread(arrays["k"], arrays["v"], truth[0], case.layout, case.causal, case.window)
    return Prepared(on_device, truth, ordinary, exempt, xp)


def _upload(xp, x):
    if xp is np:
        return x
    return xp.asarray(np.ascontiguousarray(x.astype(np.float32) if x.dtype == BFLOAT16 else x))


def filled(library: str, count: int, dtype: str, value: float):
    """A 1-D array of ``library`` (on the current device)."""
    if library == "numpy":
        return np.full(count, value, dtype_of(dtype))
    if library == "cupy":
        import cupy

        return cupy.full(count, value, dtype_of(dtype))
    import torch

    return torch.full((count,), value, dtype=getattr(torch, dtype), device="cuda")


class Outputs:
    """out and lse, filled with NaN, inside memory that is filled with NaN too."""

    def __init__(self, case: Case, library: str):
        self.library = library
        lse_dtype = "float64" if case.dtype == "float64" else "float32"
        shapes = (case.out_shape, case.dtype), ((case.batch, case.heads, case.seq_q), lse_dtype)
        self._memory = [(filled(library, int(np.prod(s)) + 2 * _GUARD, d, np.nan), s) for s, d in shapes]
        self.out, self.lse = (m[_GUARD : _GUARD + int(np.prod(s))].reshape(s) for m, s in self._memory)

    def check_guards(self):
        for memory, shape in self._memory:
            count = int(np.prod(shape))
            for guard in (memory[:_GUARD], memory[_GUARD + count :]):
                assert bool((guard != guard).all()), f"a write outside an output of shape {shape}"


def as_reference(x, prepared: Prepared):
    """A result as an array of the reference's module."""
    if isinstance(x, np.ndarray) or type(x).__module__.startswith("cupy"):
        return x
    x = x.float() if str(x.dtype) == "torch.bfloat16" else x
    return prepared.xp.asarray(x) if prepared.xp is not np else x.cpu().numpy()


def run(row: str, case: Case, **extra):
    """(out, lse) of a case on a row, in the row's library. UnsupportedError when the row rejects it."""
    library = library_for(row, case)
    outputs = Outputs(case, library)
    fa_ext.attention(**prepared(case, library).inputs, **extra, kernel=row, out=(outputs.out, outputs.lse))
    outputs.check_guards()
    return outputs.out, outputs.lse


def verdict(row: str, case: Case, **extra) -> Report:
    """Runs a case on a row and judges it. UnsupportedError when the row rejects it."""
    known = prepared(case, library_for(row, case))
    out, lse = (as_reference(x, known) for x in run(row, case, **extra))
    exempt = None if listed_name(row) == "cpu_ref" else known.exempt
    return judge(out, lse, known.truth, known.ordinary, case.dtype, layout=case.layout, kernel=row, exempt=exempt)


def bits(x) -> np.ndarray:
    """An array of any library as bytes on the host, for bitwise comparison."""
    if isinstance(x, np.ndarray):
        host = x
    elif type(x).__module__.startswith("cupy"):
        host = x.get()
    else:
        import torch

        host = x.contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32).cpu().numpy()
    return np.ascontiguousarray(host).view(np.uint8)


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
