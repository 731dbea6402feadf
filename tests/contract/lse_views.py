"""LSE outputs of any strides: views of poisoned memory, in which a kernel writes the elements and nothing between them."""

from __future__ import annotations

import numpy as np

import fa_ext
from bench.problems.placement import placed, strided
from tests.contract.runner import to_host

KINDS = ("swapped", "sliced", "odd", "negative", "column", "step", "absurd")


def _view(shape, dtype, kind: str) -> np.ndarray:
    rows = (*shape, 1) if len(shape) == 3 else (1, *shape, 1)
    view = strided(np.full(rows, np.nan, dtype), kind)[..., 0]
    return view if len(shape) == 3 else view[0]


def poisoned(shape, dtype, kind: str, library: str = "numpy"):
    """(a view of shape (B, H, S) or (H, T) with strides of this kind, the memory it lies in), NaN throughout."""
    return placed(_view(shape, dtype, kind), library)


def with_only(lse: np.ndarray, kind: str) -> bytes:
    """Memory of ``poisoned`` after `lse` was written into the view, and nothing else."""
    view, memory = poisoned(lse.shape, lse.dtype, kind)
    view[...] = lse
    return memory.tobytes()


def assert_written(kernel: str, arguments: dict, kind: str, library: str = "numpy", **options):
    """A call into an LSE of these strides writes the bits of one into a new LSE, and nothing between them. Returns both
    results, on the host. ``arguments`` are of ``library``."""
    out, lse = fa_ext.attention(**arguments, kernel=kernel, return_lse=True, **options)
    wanted = to_host(lse)
    view, memory = poisoned(wanted.shape, wanted.dtype, kind, library)
    again = fa_ext.attention(**arguments, kernel=kernel, out=(_new_like(out), view), **options)
    assert to_host(memory).tobytes() == with_only(wanted, kind), f"strides {kind}: other bits, or some between the elements"
    assert to_host(again[0]).tobytes() == to_host(out).tobytes()
    return to_host(out), wanted


def _new_like(out):
    if isinstance(out, np.ndarray):
        return np.full_like(out, np.nan)
    if type(out).__module__.startswith("torch"):
        return out.new_full(out.shape, float("nan"))
    import cupy

    return cupy.full_like(out, float("nan"))
