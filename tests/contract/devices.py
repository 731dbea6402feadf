"""Devices that need not be here: what ``explain(..., device=)`` and ``answers(..., device=)`` are held against.

``devices.json`` says of each where its figures are from: ``recorded`` on the device itself, by the line below, or
NVIDIA's documentation::

    python -m tests.contract.devices h200        (on the device; replaces its entry in devices.json)
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from bench.problems.case import Case
from bench.problems.placement import dtype_of

FILE = Path(__file__).with_name("devices.json")
PLANNED = ("cc", "sm_count", "smem_per_block", "smem_per_sm", "l2_bytes", "tensor_maps")  # what plans ask about

#: {short name: description}; with the workspace that a call has unless the environment says otherwise.
DEVICES = {name: found | {"workspace_limit": 512 << 20} for name, found in json.loads(FILE.read_text()).items()}

_memory = np.zeros(4096, np.uint8)
_aligned = _memory[-_memory.ctypes.data % 1024 :]


def like(shape, dtype) -> np.ndarray:
    """An array of a shape and dtype, C-contiguous and aligned, for what looks at neither its elements nor its memory:
    that is a few bytes."""
    dtype = np.dtype(dtype)
    strides = [dtype.itemsize * int(np.prod(shape[axis + 1 :], dtype=np.int64)) for axis in range(len(shape))]
    return np.lib.stride_tricks.as_strided(_aligned[: dtype.itemsize].view(dtype), shape, strides)


def shapes_only(case: Case) -> dict:
    """The arguments of a case whose arrays are contiguous, without their memory."""
    dtype = dtype_of(case.dtype)
    arrays = {"q": case.q_shape, "k": case.k_shape, "v": case.v_shape}
    arrays = {name: like(shape, dtype) for name, shape in arrays.items()}
    scores = (case.batch, case.heads, case.seq_q, case.seq_k)
    if case.bias:
        arrays["bias"] = like(scores, dtype)
    if case.mask:
        arrays["mask"] = like(scores, bool)
    if case.sinks:
        arrays["sinks"] = like((case.heads,), dtype)
    if case.alibi:
        arrays["alibi"] = like((case.heads,), np.float32)
    if case.intervals:
        arrays["intervals"] = like((case.batch, case.heads, case.seq_q, 2), np.int32)
    return arrays | case.options()


def record(name: str):
    """Describes CUDA device 0 as ``name``."""
    from fa_ext import _core

    found = _core.device_info(0)
    devices = json.loads(FILE.read_text())
    devices[name] = {"name": found["name"], "source": "recorded"} | {key: found[key] for key in PLANNED}
    entries = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in devices.items()]
    FILE.write_text("{\n" + ",\n".join(entries) + "\n}\n")


if __name__ == "__main__":
    record(sys.argv[1])
