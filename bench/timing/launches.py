"""The launches of a call on a GPU: functions, grids, blocks, shared memory and clusters, read from a captured graph.

Two builds that launch the same take the same time, whatever else of their code differs. A function counts by the label of
its machine code on this architecture (`fa_ext/_digests.py`), one of another library, such as cuBLAS, by its name.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

from bench import machine
from bench.machine import build
from bench.machine.device import Cuda, DriverError, driver

_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
_KERNEL = 0  # CU_GRAPH_NODE_TYPE_KERNEL
_CLUSTER = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_BINARY_VERSION = 6  # CU_FUNC_ATTRIBUTE_BINARY_VERSION
_PROGRAMMATIC = 1  # CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC
_CAPTURE_ERRORS = range(900, 909)  # CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED to CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD


class _Kernel(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = (
        ("function", ctypes.c_void_p), ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
        ("parameters", ctypes.c_void_p), ("extra", ctypes.c_void_p), ("kernel", ctypes.c_void_p), ("context", ctypes.c_void_p),
    )  # fmt: skip


class _Edge(ctypes.Structure):
    """CUgraphEdgeData."""

    _fields_ = (("from_port", ctypes.c_ubyte), ("to_port", ctypes.c_ubyte), ("type", ctypes.c_ubyte), ("reserved", ctypes.c_ubyte * 5))


def of(call: Callable[[], Any], device: Cuda) -> list[str] | None:
    """The launches of a call, sorted, each "function grid block shared-memory cluster"; None for a call that cannot be captured.

    Any other failure is raised: of the call by itself, and of the driver when it is asked about the graph."""
    graph = ctypes.c_void_p()
    try:
        with device.working():
            call()  # what a first call does once is not part of it
            device.synchronize()
            if not _captured(call, ctypes.c_void_p(device.pointer), graph):
                device.synchronize()
                return None
        return _read(graph, _functions())
    finally:
        if graph.value:
            driver("cuGraphDestroy", graph)


def _captured(call: Callable[[], Any], stream: ctypes.c_void_p, graph: ctypes.c_void_p) -> bool:
    """Captures a call that has just succeeded; False where it does what a captured stream does not allow."""
    driver("cuStreamBeginCapture_v2", stream, ctypes.c_int(_THREAD_LOCAL))
    allowed = True
    try:
        call()
    except Exception:  # only the capture is new to it; libraries say so in whatever exception they like
        allowed = False
    finally:
        try:
            driver("cuStreamEndCapture", stream, ctypes.byref(graph))
        except DriverError as error:
            if error.code not in _CAPTURE_ERRORS:
                raise
            allowed = False
    return allowed


_functions = functools.cache(machine.built_functions)


def _read(graph: ctypes.c_void_p, functions: dict[str, dict[str, str]]) -> list[str]:
    chained = _chained(graph)
    found = []
    for node in _listed("cuGraphGetNodes", graph):
        kind = ctypes.c_int()
        driver("cuGraphNodeGetType", ctypes.c_void_p(node), ctypes.byref(kind))
        if kind.value == _KERNEL:
            found.append(_launch(ctypes.c_void_p(node), functions) + " programmatic" * (node in chained))
    return sorted(found)


def _launch(node: ctypes.c_void_p, functions: dict[str, dict[str, str]]) -> str:
    of, name, architecture, cluster = _Kernel(), ctypes.c_char_p(), ctypes.c_int(), (ctypes.c_uint * 16)()
    driver("cuGraphKernelNodeGetParams_v2", node, ctypes.byref(of))
    function = ctypes.c_void_p(of.function)
    if not of.function:
        driver("cuKernelGetFunction", ctypes.byref(function), ctypes.c_void_p(of.kernel))
    driver("cuFuncGetName", ctypes.byref(name), function)
    driver("cuFuncGetAttribute", ctypes.byref(architecture), ctypes.c_int(_BINARY_VERSION), function)
    driver("cuGraphKernelNodeGetAttribute", node, ctypes.c_int(_CLUSTER), ctypes.byref(cluster))
    key = build.rules.digests.function_key((name.value or b"").decode())
    label = functions.get(key, {}).get(str(architecture.value), f"named:{key}")
    return f"{label} {_axes(of.grid)} {_axes(of.block)} {of.shared} {_axes(cluster[:3])}"


def _axes(sizes: Any) -> str:
    return "x".join(map(str, sizes))


def _listed(name: str, graph: ctypes.c_void_p) -> list[int]:
    count = ctypes.c_size_t()
    driver(name, graph, None, ctypes.byref(count))
    nodes = (ctypes.c_void_p * count.value)()
    driver(name, graph, nodes, ctypes.byref(count))
    return [node for node in nodes if node]


def _chained(graph: ctypes.c_void_p) -> set[int]:
    """Nodes that may begin before the one ahead of them has ended: none where the driver (before 12.3) does not tell."""
    count = ctypes.c_size_t()
    try:
        driver("cuGraphGetEdges_v2", graph, None, None, None, ctypes.byref(count))
    except AttributeError:
        return set()
    if not count.value:  # a graph of one node; the driver refuses places for no edge
        return set()
    ahead, behind, edges = ((kind * count.value)() for kind in (ctypes.c_void_p, ctypes.c_void_p, _Edge))
    driver("cuGraphGetEdges_v2", graph, ahead, behind, edges, ctypes.byref(count))
    return {node for node, edge in zip(behind, edges, strict=True) if node and edge.type == _PROGRAMMATIC}
