"""Memory that the judge and a worker both see, as bytes: of the host, or of the GPU.

Host memory is an anonymous file. What a worker shall not write is sealed by the kernel after the judge has mapped it
(F_SEAL_FUTURE_WRITE, Linux 5.1): no process can map it for writing any more, and none can shrink it under the judge.
Device memory goes through CUDA's interprocess handles, which know no protection: there the judge keeps a copy.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from typing import Any

import numpy as np

from bench.machine.device import Cpu, Cuda, driver

# The driver deals out no less: an allocation of its own, and nothing else's bytes behind a handle.
_BLOCK = 2 << 20
_F_SEAL_FUTURE_WRITE = 0x10  # not named by every Python that runs here


class HostRegion:
    """`nbytes` bytes of host memory. `raw` is the judge's view; `sealed` says that a worker cannot write them."""

    def __init__(self, nbytes: int, writable: bool):
        self.nbytes = max(1, nbytes)
        self.fd = os.memfd_create("bench", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, self.nbytes)
        self.raw = np.frombuffer(mmap.mmap(self.fd, self.nbytes), np.uint8)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self.sealed = not writable and self._seal()
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)

    def _seal(self) -> bool:
        try:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)
        except OSError:  # an older kernel: the judge then finds out by hashes
            return False
        return True

    def description(self) -> dict[str, Any]:
        """The facts that ``attach`` needs beside the file descriptor."""
        return {"kind": "host", "nbytes": self.nbytes, "writable": not self.sealed}

    def close(self) -> None:
        """Gives up the descriptor; the memory lives as long as somebody maps it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class DeviceRegion:
    """`nbytes` bytes on GPU 0 that other processes can open by `handle`."""

    fd = -1
    sealed = False

    def __init__(self, nbytes: int, device: Cuda):
        self.nbytes = -(-max(1, nbytes) // _BLOCK) * _BLOCK
        pointer, handle = ctypes.c_uint64(), _Handle()
        driver("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(self.nbytes))
        self.pointer = pointer.value
        driver("cuIpcGetMemHandle", ctypes.byref(handle), pointer)
        self.handle = bytes(handle.reserved).hex()
        self.raw = bytes_at(self.pointer, self.nbytes, device)

    def description(self) -> dict[str, Any]:
        return {"kind": "device", "nbytes": self.nbytes, "handle": self.handle}

    def close(self) -> None:
        if self.pointer:
            driver("cuMemFree_v2", ctypes.c_uint64(self.pointer))
            self.pointer = 0


def attach(description: dict[str, Any], fd: int | None, device: Cpu | Cuda) -> Any:
    """A region of the judge as bytes of this process; takes the descriptor over."""
    if description["kind"] == "device":
        pointer = ctypes.c_uint64()
        handle = _Handle((ctypes.c_ubyte * 64)(*bytes.fromhex(description["handle"])))
        driver("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), handle, ctypes.c_uint(1))
        return bytes_at(pointer.value, description["nbytes"], device)
    assert fd is not None
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if description["writable"] else 0)
    try:
        return np.frombuffer(mmap.mmap(fd, description["nbytes"], prot=protection), np.uint8)
    finally:
        os.close(fd)


def detach(region: Any) -> None:
    """Closes a device region that ``attach`` opened; nothing may use it any more."""
    if not isinstance(region, np.ndarray):
        pointer = region.data_ptr() if hasattr(region, "data_ptr") else region.data.ptr
        driver("cuIpcCloseMemHandle", ctypes.c_uint64(pointer))


class _Handle(ctypes.Structure):
    """CUipcMemHandle: passed by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * 64),)


class _Bytes:
    """Device memory as an array library takes it over without a copy."""

    def __init__(self, pointer: int, nbytes: int):
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (pointer, False), "version": 3}


def bytes_at(pointer: int, nbytes: int, device: Cuda) -> Any:
    """Device memory as a uint8 array of the library that drives `device`."""
    held = _Bytes(pointer, nbytes)
    return device.torch.as_tensor(held, device="cuda") if device.torch else device.cupy.asarray(held)
