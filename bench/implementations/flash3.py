"""FlashAttention-3 by its operators, wherever a library that registers them is installed.

``torch.ops.flash_attn_3`` comes from the package ``flash_attn_interface`` or from a file ``flash_attn_3/_C*.so``: wheels of
xformers carry one under ``xformers/``. ``torch.ops._vllm_fa3_C`` comes from ``vllm_flash_attn/_vllm_fa3_C*.so`` of vLLM's wheel.
The packages need not import. A file wants the CUDA runtime that it was linked to; one that lies beside it is taken, else that of
the ``nvidia-cuda-runtime`` packages, of a toolkit, or of the system.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.implementations.implementation import Thunk
from bench.implementations.peer import Peer, bshd, scale_of
from bench.problems import Case
from bench.problems.operands import Arrays

# The libraries that the wheels of xformers 0.0.34 and vLLM 0.25.1 are linked to.
RUNTIMES = ("libcudart.so.12", "libcudart.so.13")
# Up to so many queries the operator is left to split the keys as it likes; with more it is told not to, as by its package.
FEW_QUERIES = 64
# namespace of the operators: (a package whose import registers them, [(package, path inside it)] of files that do)
SOURCES: dict[str, tuple[str | None, tuple[tuple[str, str], ...]]] = {
    "flash_attn_3": ("flash_attn_interface", (("flash_attn_3", "_C*.so"), ("xformers", "flash_attn_3/_C*.so"))),
    "_vllm_fa3_C": (None, (("vllm_flash_attn", "_vllm_fa3_C*.so"), ("vllm", "vllm_flash_attn/_vllm_fa3_C*.so"))),
}
# For arguments of an operator that has no default for them, where nothing is said.
UNSAID = {"is_rotary_interleaved": True, "sm_margin": 0, "cp_world_size": 1, "cp_rank": 0, "attention_chunk": 0}


class FlashAttention3(Peer):
    """Forward and backward, also over sequences; ``deterministic``: the backward pass that sums in order, which head_dim 256
    does not have."""

    extras = frozenset({"window", "softcap"})
    causal = "last"
    packed_causal = "last"

    def __init__(self, name: str, deterministic: bool = False):
        super().__init__(name, "torch")
        self.deterministic = deterministic
        self.operations = frozenset({"backward"} if deterministic else {"attention", "backward", "serving"})
        self.ops = operators("flash_attn_3")

    def refuses(self, case: Case) -> str | None:
        if self.deterministic and not case.deterministic:
            return "sums in order, where any order is asked for"
        if self.deterministic and max(case.head_dim, case.head_dim_v) > 192:
            return "no order of sums at head_dim 256, whatever it is asked"
        return super().refuses(case)

    def bind(self, operands: Arrays) -> Thunk:
        case = operands.case
        if case.operation == "serving":
            return over_sequences(self.ops.fwd, operands, self.library)
        if case.lengths:
            return gradients_over_sequences(self.ops, operands, self.library, self.deterministic)
        q, k, v = (bshd(operands, name, self.library) for name in "qkv")
        options = options_of(case)
        forward, backward, swap = self.ops.fwd, self.ops.bwd, case.layout == "bhsd"
        splits = 0 if case.seq_q <= FEW_QUERIES and case.operation == "attention" else 1

        def attend():
            out = forward(q, k, v, num_splits=splits, **options)[0]
            return out.swapaxes(1, 2) if swap else out

        if case.operation == "attention":
            return attend
        dout = bshd(operands, "dout", self.library)
        out, lse = forward(q, k, v, num_splits=splits, **options)[:2]
        deterministic = self.deterministic

        def differentiate():
            found = backward(dout, q, k, v, out, lse, deterministic=deterministic, **options)[:3]
            return tuple(g.swapaxes(1, 2) for g in found) if swap else tuple(found)

        return differentiate


class VllmFlashAttention3(Peer):
    """vLLM's: over sequences, with sinks."""

    extras = frozenset({"window", "softcap", "sinks"})
    operations = frozenset({"serving"})
    causal = "last"

    def __init__(self, name: str):
        super().__init__(name, "torch")
        self.ops = operators("_vllm_fa3_C")

    def bind(self, operands: Arrays) -> Thunk:
        return over_sequences(self.ops.fwd, operands, self.library)


def options_of(case: Case) -> dict[str, Any]:
    left, right = (-1 if side is None else side for side in case.window or (None, None))
    return {"softmax_scale": scale_of(case), "is_causal": bool(case.causal), "window_size_left": left, "window_size_right": right,
            "softcap": case.softcap}  # fmt: skip


def over_sequences(forward: Any, operands: Arrays, library: str) -> Thunk:
    """A call of an operator ``fwd`` over sequences; the number of splits is left to it."""
    positional = arguments_for(forward, sequence_values(operands, library))
    return lambda: as_stored(operands.case, "q", forward(*positional)[0])


def gradients_over_sequences(ops: Any, operands: Arrays, library: str, deterministic: bool) -> Thunk:
    """A call of an operator ``bwd`` over sequences. It leaves rows of no sequence as they are: they are 0 from the start."""
    case, values = operands.case, sequence_values(operands, library)
    out, lse = ops.fwd(*arguments_for(ops.fwd, values | {"num_splits": 1}))[:2]
    grads = {name: values[name[1]] * 0 for name in ("dq", "dk", "dv")}
    dout = as_rows(case, "q", operands.array("dout", library))
    values |= {"dout": dout, "out": out, "softmax_lse": lse, "deterministic": deterministic}
    positional = arguments_for(ops.bwd, values | grads)

    def call():
        ops.bwd(*positional)
        return tuple(as_stored(case, name[1], grad) for name, grad in grads.items())

    return call


def sequence_values(operands: Arrays, library: str) -> dict[str, Any]:
    """Arguments of the operators by name; None: not given."""
    case, given = operands.case, operands.arguments(library)
    values = options_of(case) | {name: as_rows(case, name, given[name]) for name in "qkv"} | {
        "num_splits": 0,
        "cu_seqlens_q": given.get("cu_seqlens_q"), "cu_seqlens_k": given.get("cu_seqlens_k"), "seqused_q": given.get("seqlens_q"),
        "seqused_k": given.get("seqlens_k"), "page_table": given.get("page_table"), "s_aux": given.get("sinks"),
        "max_seqlen_q": max(case.n_q) if case.storage.q == "packed" else None, "max_seqlen_k": max(case.n_k) if case.storage.k == "packed" else None,
    }  # fmt: skip
    if case.sinks:
        values["s_aux"] = values["s_aux"].to(values["q"].dtype)
    return values


def as_rows(case: Case, name: str, array: Any) -> Any:
    """An operand, stored as q, k or v is, with its heads behind its rows, which are packed, or a sequence's each; a view."""
    storage = case.storage.q if name == "q" else case.storage.k
    if storage == "one":
        return array[:, None]
    return array.swapaxes(1, 2) if storage != "packed" and case.layout == "bhsd" else array


def as_stored(case: Case, name: str, rows: Any) -> Any:
    """An operand as it is stored, of its rows: the inverse of ``as_rows``."""
    storage = case.storage.q if name == "q" else case.storage.k
    if storage == "one":
        return rows[:, 0]
    return rows.swapaxes(1, 2) if storage != "packed" and case.layout == "bhsd" else rows


def arguments_for(operator: Any, values: dict[str, Any]) -> list[Any]:
    """The arguments of an operator, by the names of its schema: releases differ in how many there are."""
    found = []
    for argument in operator.default._schema.arguments:
        if values.get(argument.name) is not None:
            found.append(values[argument.name])
        elif argument.has_default_value():
            found.append(argument.default_value)
        else:
            found.append(UNSAID.get(argument.name))
    return found


def operators(namespace: str) -> Any:
    """``torch.ops.<namespace>``, registered now if it was not. ImportError where nothing does that."""
    import torch

    package, files = SOURCES[namespace]
    if not hasattr(getattr(torch.ops, namespace), "fwd"):
        if package and importlib.util.find_spec(package) is not None:
            importlib.import_module(package)
        else:
            library = next(libraries(namespace), None)
            if library is None:
                ways = [f"no package {package}"] * bool(package) + [f"no file {inside} in {holder}" for holder, inside in files]
                raise ImportError(", ".join(ways))
            load_runtimes(library.parent)
            torch.ops.load_library(str(library))
    return getattr(torch.ops, namespace)


def libraries(namespace: str) -> Iterator[Path]:
    """Files that register the operators; nothing is imported to find them."""
    for package, inside in SOURCES[namespace][1]:
        spec = importlib.util.find_spec(package)
        for folder in (spec and spec.submodule_search_locations) or ():
            yield from sorted(Path(folder).glob(inside))


def load_runtimes(beside: Path) -> None:
    """Loads CUDA runtimes, so that the loader finds by its name the one that a file is linked to. ImportError without any."""
    places: dict[str, list[Path]] = {name: [beside / name] for name in RUNTIMES}
    spec = importlib.util.find_spec("nvidia")
    for name, found in places.items():
        for folder in (spec and spec.submodule_search_locations) or ():
            found += sorted(Path(folder).glob(f"*/lib/{name}"))
        found += sorted(Path("/usr/local").glob(f"cuda*/lib64/{name}"))
    errors = []
    for name, found in places.items():
        try:
            ctypes.CDLL(str(next((place for place in found if place.exists()), name)), mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            errors.append(str(error))
    if len(errors) == len(RUNTIMES):
        raise ImportError(f"needs one of {', '.join(RUNTIMES)}, as of the package nvidia-cuda-runtime-cu12: {errors[0]}")
