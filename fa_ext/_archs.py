"""For which GPUs the CUDA files are compiled: what FA_ARCHS says, else which GPUs are in sight.

A file has machine code for some architectures, and PTX, from which a driver makes code for others. One pass of nvcc's
front end, for the least of them, serves all, but where the code itself asks for its architecture. Hopper's own
instructions need sm_90a: such a file says so by ``@arch``, and is compiled where sm_90 is wanted.

Imports nothing of ``fa_ext``, so that it runs before anything is built.
"""

from __future__ import annotations

import contextlib
import ctypes
import re

PTX = "compute_80"
#: Without a GPU in sight, as where a container is built: Hopper, and PTX for the others.
DEFAULT = ("sm_90", PTX)
WHEEL = ("sm_80", "sm_86", "sm_89", "sm_90", PTX)
LEAST = 80
_ARCH = re.compile(r"(sm|compute)_(\d{2,3})[af]?")
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR


def number(arch: str) -> int:
    """90 of sm_90, sm_90a and compute_90."""
    found = _ARCH.fullmatch(arch)
    assert found, arch
    return int(found[2])


def parsed(given: str, known: list[str] | None = None) -> tuple[str, ...]:
    """The architectures that FA_ARCHS names, () if none. ValueError says what is accepted; ``known`` is what nvcc has."""
    if given.strip() == "wheel":
        return WHEEL
    archs = tuple(re.findall(r"[^\s;,]+", given))
    exist = ", ".join(known or ()) or "architectures of nvcc such as 'sm_80 sm_90a compute_80'"
    strangers = [arch for arch in archs if not _ARCH.fullmatch(arch) or (known and re.sub("[af]$", "", arch) not in known)]
    old = [arch for arch in archs if arch not in strangers and number(arch) < LEAST]
    if strangers or old:
        least = f" from sm_{LEAST} on" if old else ""
        raise ValueError(f"FA_ARCHS is {given!r}; accepted: {exist}{least}, or wheel ({' '.join(WHEEL)})")
    return archs


def in_sight() -> list[int]:
    """Architectures of this machine's GPUs, such as [90]: the driver is asked, without any framework."""
    found: set[int] = set()
    with contextlib.suppress(OSError):
        cuda = ctypes.CDLL("libcuda.so.1")
        count, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
            return []
        for device in range(count.value):
            if not cuda.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, device) and not cuda.cuDeviceGetAttribute(
                ctypes.byref(minor), _MINOR, device
            ):
                found.add(10 * major.value + minor.value)
    return sorted(arch for arch in found if arch >= LEAST)


def for_machine(known: list[str]) -> tuple[str, ...]:
    """Without FA_ARCHS: code for the GPUs in sight as far as nvcc knows them, and PTX."""
    gpus = in_sight()
    return (*(f"sm_{gpu}" for gpu in gpus if f"sm_{gpu}" in known), PTX) if gpus else DEFAULT


def of_file(own: tuple[str, ...], archs: tuple[str, ...]) -> tuple[str, ...]:
    """The architectures that a file is compiled for, () if for none, where ``archs`` are wanted and ``own`` are those of its @arch."""
    if own:
        machine = {number(arch) for arch in archs if arch.startswith("sm_")}
        return tuple(arch for arch in own if number(arch) in machine)
    return tuple(dict.fromkeys(re.sub("[af]$", "", arch) if arch.startswith("sm_") else arch for arch in archs))


def gencode(archs: tuple[str, ...], pass_an_arch: bool) -> list[str]:
    """nvcc's flags: one pass of the front end for all, for the least of them, or one for each."""
    if pass_an_arch or len(archs) == 1:
        return [word for arch in archs for word in ("-gencode", f"arch=compute_{arch.partition('_')[2]},code={arch}")]
    return ["-gencode", f"arch=compute_{min(map(number, archs))},code=[{','.join(archs)}]"]
