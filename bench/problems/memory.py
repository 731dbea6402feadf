"""Arrays between guard zones, as NumPy, torch, CuPy or JAX sees them.

Every operand lies in bytes of its own with a guard zone before and behind it. All bytes 0xFF are a NaN in float16,
bfloat16, float32 and float64 alike: that is the poison of outputs and the first content of the guards, so a kernel
that reads past its tensors computes with NaN, and one that does not write leaves NaN.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.machine.device import Cpu, Cuda

# A whole key tile of the largest head dimension in float32, so that reading one tile too far stays inside.
GUARD_BYTES = 128 * 256 * 4
ALIGNMENT = 256
NAN_BYTE = 0xFF
# 0x7B7B...: 61280 as float16 and about 1.3e36 as bfloat16 and float32: finite, so 0 * x hides it and x itself does not.
LARGE_BYTE = 0x7B


class Block:
    """`nbytes` bytes on a device between two guard zones of at least `guard` bytes."""

    def __init__(self, nbytes: int, device: Cpu | Cuda, guard_byte: int = NAN_BYTE, guard: int = GUARD_BYTES,
                 allocate: Callable[[int], Any] | None = None):  # fmt: skip
        """`allocate(bytes)` gives the memory as a uint8 array of the device's library; default: the library's own."""
        self.nbytes, self.device, self.guard_byte = nbytes, device, guard_byte
        total = nbytes + 2 * guard + ALIGNMENT
        self.raw: Any = allocate(total) if allocate else empty_bytes(total, device)
        self.begin = guard + (-(address_of(self.raw) + guard)) % ALIGNMENT
        self.end = self.begin + nbytes
        self.fill_guards(guard_byte)

    @classmethod
    def over(cls, raw: Any, begin: int, nbytes: int, device: Cpu | Cuda) -> Block:
        """Bytes `begin` to `begin + nbytes` of memory that is somebody else's: nothing is written."""
        block = cls.__new__(cls)
        block.nbytes, block.device, block.guard_byte = nbytes, device, NAN_BYTE
        block.raw, block.begin, block.end = raw, begin, begin + nbytes
        return block

    @property
    def inside(self) -> Any:
        return self.raw[self.begin : self.end]

    def fill_guards(self, byte: int) -> None:
        self.guard_byte = byte
        self.raw[: self.begin] = byte
        self.raw[self.end :] = byte

    def guards_intact(self) -> bool:
        """False when somebody wrote into a guard zone."""
        return bool((self.raw[: self.begin] == self.guard_byte).all() and (self.raw[self.end :] == self.guard_byte).all())

    def poison(self) -> None:
        self.raw[self.begin : self.end] = NAN_BYTE

    def host_bytes(self) -> np.ndarray:
        """A copy of the inside on the host, uint8."""
        if self.device.kind == "cpu":
            return self.inside.copy()
        if self.device.torch:
            return self.inside.cpu().numpy()
        return self.inside.get()

    def fill(self, array: np.ndarray) -> None:
        """Copies a C-contiguous host array of exactly this size in."""
        data = np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)
        if self.device.kind == "cpu":
            self.inside[:] = data
        elif self.device.torch:
            self.inside.copy_(self.device.torch.from_numpy(data.copy()))
        else:
            self.inside.set(data)

    def digest(self) -> str:
        """A hash of the inside: BLAKE2 on the CPU, on a GPU a sum of 8-byte words times random factors, modulo 2^64."""
        if self.device.kind == "cpu":
            return hashlib.blake2b(self.host_bytes(), digest_size=16).hexdigest()
        words = self.raw[self.begin : self.begin + -(-self.nbytes // 8) * 8]  # the last may take in some guard bytes
        words = words.view(self.device.torch.int64 if self.device.torch else np.int64)
        return f"{int((words * self._factors(len(words))).sum()) & (2**64 - 1):016x}"

    def _factors(self, count: int) -> Any:
        held = self.device.factors
        if held is None or len(held) < count:
            drawn = np.random.default_rng(2).integers(0, 2**63, max(count, 1 << 20), np.int64) | 1
            held = self.device.torch.from_numpy(drawn).cuda() if self.device.torch else self.device.cupy.asarray(drawn)
            self.device.factors = held
        return held[:count]

    def view(self, shape: tuple[int, ...], dtype: str, library: str) -> Any:
        """The inside as a C-contiguous array of `library` (numpy, torch, cupy or jax), sharing memory."""
        if library == "numpy":
            if self.device.kind != "cpu":
                raise ValueError("NumPy arrays live on the CPU; this block is on the GPU")
            return self.inside.view(numpy_dtype(dtype)).reshape(shape)
        if library == "torch":
            import torch

            raw = _from_numpy(self.inside) if self.device.kind == "cpu" else self._as_torch()
            return raw.view(getattr(torch, dtype)).view(shape)
        if library == "cupy":
            import cupy

            raw = cupy.asarray(self.inside) if self.device.cupy else None
            if raw is None:
                raise ValueError("CuPy does not import here")
            return raw.view(cupy.dtype(numpy_dtype(dtype))).reshape(shape)
        if library == "jax":
            import jax

            if self.device.kind == "cpu":
                return jax.device_put(self.view(shape, dtype, "numpy"), jax.devices("cpu")[0], may_alias=True)
            return jax.dlpack.from_dlpack(self.view(shape, dtype, "torch" if self.device.torch else "cupy"))
        raise ValueError(f"array library is {library!r}; accepted: numpy, torch, cupy, jax")

    def _as_torch(self) -> Any:
        if self.device.torch:
            return self.inside
        import torch

        return torch.from_dlpack(self.inside)


def empty_bytes(nbytes: int, device: Cpu | Cuda) -> Any:
    """Memory of this process as a uint8 array of the library that drives the device."""
    if device.kind == "cpu":
        return np.empty(nbytes, np.uint8)
    if device.torch:
        return device.torch.empty(nbytes, dtype=device.torch.uint8, device="cuda")
    return device.cupy.empty(nbytes, dtype=np.uint8)


def address_of(array: Any) -> int:
    """Where an array of any library begins."""
    library = type(array).__module__.partition(".")[0]
    if library == "numpy":
        return array.ctypes.data
    if library == "torch":
        return array.data_ptr()
    return array.data.ptr if library == "cupy" else array.unsafe_buffer_pointer()


def _from_numpy(array: np.ndarray) -> Any:
    import torch

    with warnings.catch_warnings():  # that writing to memory which is mapped for reading ends the process
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array)


def numpy_dtype(name: str) -> np.dtype:
    """A NumPy dtype by name; bfloat16 comes from ml_dtypes. Importing ml_dtypes registers it with NumPy."""
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(bool if name == "bool" else name)


def to_host(array: Any) -> np.ndarray:
    """Any implementation's result as a NumPy array of the same dtype."""
    if isinstance(array, np.ndarray):
        return array
    kind = type(array).__module__.partition(".")[0]
    if kind == "torch":
        import torch

        array = array.detach().contiguous()
        if array.dtype == torch.bfloat16:
            return array.view(torch.int16).cpu().numpy().view(numpy_dtype("bfloat16"))
        return array.cpu().numpy()
    if kind == "cupy":
        return array.get()
    return np.asarray(array)
