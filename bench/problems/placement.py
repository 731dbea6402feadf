"""How test operands lie in memory: strided views, and the same views in the arrays of other libraries."""

from __future__ import annotations

import numpy as np

try:
    import ml_dtypes

    BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
except ImportError:  # bfloat16 cases are then skipped
    BFLOAT16 = None

LAYOUTS = ("contiguous", "swapped", "sliced", "odd", "negative", "zero", "column", "step", "absurd")


class Unplaceable(Exception):
    """An array library cannot hold this operand (torch: negative strides; NumPy without ml_dtypes: bfloat16)."""


def dtype_of(name: str) -> np.dtype:
    """The NumPy dtype of a name; Unplaceable for bfloat16 without ml_dtypes."""
    if name == "bfloat16":
        if BFLOAT16 is None:
            raise Unplaceable("bfloat16 needs the package ml_dtypes")
        return BFLOAT16
    return np.dtype(name)


def strided(x: np.ndarray, kind: str, shared: bool = False) -> np.ndarray:
    """A view that holds ``x`` with strides of this kind; the memory between its elements holds NaN.

    zero: stride 0 over the batch, and over the heads too with ``shared`` (the values are then those of the first).
    """
    n0, n1, n2, n3 = x.shape

    def around(shape):
        return np.full(shape, np.nan, x.dtype)

    if kind == "contiguous":
        view = around(x.shape)
    elif kind == "swapped":  # the other layout in memory
        view = around((n0, n2, n1, n3)).swapaxes(1, 2)
    elif kind == "sliced":  # rows stay aligned to 16 bytes where head_dim allows
        view = around((n0, n1, n2 + 3, n3 + 8))[:, :, 2 : 2 + n2, 8:]
    elif kind == "odd":  # no row is aligned
        view = around((n0, n1, n2, n3 + 3))[..., 1 : 1 + n3]
    elif kind == "negative":
        view = around(x.shape)[::-1, :, ::-1, ::-1]
    elif kind == "column":  # head_dim is not the fastest axis
        view = around((n0, n1, n3, n2)).swapaxes(2, 3)
    elif kind == "step":
        view = around((n0, n1, 2 * n2, 2 * n3))[:, :, ::2, ::2]
    elif kind == "zero":
        source = x[:1, :1] if shared else x[:1]
        return np.broadcast_to(source.copy(), x.shape) if x.size else x
    elif kind == "absurd":  # strides of size-1 axes carry no meaning
        view = around(x.shape)
        wild = [s if n != 1 else x.itemsize * w for s, n, w in zip(view.strides, x.shape, (-3, 1 << 40, 7, -12345))]
        view = np.lib.stride_tricks.as_strided(view, x.shape, wild)
    else:
        raise ValueError(f"strides is {kind!r}; accepted: {', '.join(LAYOUTS)}")
    view[...] = x
    return view


def _memory(x: np.ndarray) -> tuple[np.ndarray, int, list[int]]:
    """(the 1-D memory under a view, offset of its first element, strides), offset and strides in elements."""
    base = x
    while isinstance(base.base, np.ndarray):
        base = base.base
    strides = [s // x.itemsize for s in x.strides]
    if not x.size:
        return np.empty(0, x.dtype), 0, strides
    offset = (x.__array_interface__["data"][0] - base.__array_interface__["data"][0]) // x.itemsize
    return base.ravel(order="K"), offset, strides


def place(x: np.ndarray, library: str):
    """A copy of ``x`` in the arrays of ``library`` with the same strides (views of one buffer stay views of copies)."""
    return x if library == "numpy" else placed(x, library)[0]


def placed(x: np.ndarray, library: str):
    """(a copy of ``x`` with the same strides, the 1-D array whose memory it lies in), of ``library``: all of that memory
    is copied. NumPy's are ``x`` itself and its memory."""
    memory, offset, strides = _memory(x)
    if library == "numpy":
        return x, memory
    if library == "cupy":
        import cupy

        storage = cupy.asarray(memory)
        pointer = storage.data + offset * x.itemsize
        return cupy.ndarray(x.shape, x.dtype, memptr=pointer, strides=[s * x.itemsize for s in strides]), storage
    if library == "torch":
        import torch

        if any(s < 0 and n > 1 for s, n in zip(strides, x.shape)):
            raise Unplaceable("torch has no negative strides")
        strides = [max(s, 0) for s in strides]
        if x.dtype == BFLOAT16:
            storage = torch.from_numpy(memory.view(np.int16).copy()).cuda().view(torch.bfloat16)
        else:
            storage = torch.from_numpy(memory.copy()).cuda()
        return torch.as_strided(storage, x.shape, strides, offset), storage
    raise ValueError(f"library is {library!r}; accepted: numpy, cupy, torch")
