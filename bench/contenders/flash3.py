"""FlashAttention-3 by its operators ``torch.ops.flash_attn_3``, wherever the library that registers them is installed.

That is the package ``flash_attn_interface``, or a file ``flash_attn_3/_C*.so``: wheels of xformers carry one, under
``xformers/``, whose package need not import. The file wants the CUDA runtime that it was linked to; one that lies beside it
is taken, else that of the ``nvidia-cuda-runtime`` packages, of a toolkit, or of the system.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.contenders.contender import Thunk
from bench.contenders.peer import Peer, bshd, scale_of
from bench.problems import Case
from bench.problems.operands import Arrays

# What the wheel of xformers 0.0.34 is linked to.
RUNTIME = "libcudart.so.12"
# Up to so many queries the operator is left to split the keys as it likes; with more it is told not to, as by its package.
FEW_QUERIES = 64


class FlashAttention3(Peer):
    """Forward and backward; ``deterministic``: the backward pass that sums in order, which head_dim 256 does not have."""

    extras = frozenset({"window", "softcap"})

    def __init__(self, name: str, deterministic: bool = False):
        super().__init__(name, "torch")
        self.deterministic = deterministic
        self.operations = frozenset({"backward"} if deterministic else {"attention", "backward"})
        self.ops = operators()

    def refuses(self, case: Case) -> str | None:
        if case.causal == "top_left" and case.seq_q != case.seq_k:
            return "no top_left causal mask"
        if self.deterministic and not case.deterministic:
            return "sums in order, where any order is asked for"
        if self.deterministic and max(case.head_dim, case.head_dim_v) > 192:
            return "no order of sums at head_dim 256, whatever it is asked"
        return super().refuses(case)

    def bind(self, operands: Arrays) -> Thunk:
        case = operands.case
        q, k, v = (bshd(operands, name, self.library) for name in "qkv")
        left, right = (-1 if side is None else side for side in case.window or (None, None))
        options: dict[str, Any] = {"softmax_scale": scale_of(case), "is_causal": bool(case.causal), "window_size_left": left,
                                   "window_size_right": right, "softcap": case.softcap}  # fmt: skip
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


def operators() -> Any:
    """``torch.ops.flash_attn_3``, registered now if it was not. ImportError where nothing does that."""
    import torch

    if not hasattr(torch.ops.flash_attn_3, "fwd"):
        if importlib.util.find_spec("flash_attn_interface") is not None:
            importlib.import_module("flash_attn_interface")
        else:
            library = next(libraries(), None)
            if library is None:
                raise ImportError("no package flash_attn_interface, and no file flash_attn_3/_C*.so in one of xformers")
            load_runtime(library.parent)
            torch.ops.load_library(str(library))
    return torch.ops.flash_attn_3


def libraries() -> Iterator[Path]:
    """Files that register the operators; nothing is imported to find them."""
    for package, inside in (("flash_attn_3", ""), ("xformers", "flash_attn_3")):
        spec = importlib.util.find_spec(package)
        for folder in (spec and spec.submodule_search_locations) or ():
            yield from sorted((Path(folder) / inside).glob("_C*.so"))


def load_runtime(beside: Path) -> None:
    """Loads the CUDA runtime that the file is linked to, so that the loader finds it by its name."""
    places = [beside / RUNTIME]
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec and spec.submodule_search_locations) or ():
        places += sorted(Path(folder).glob(f"*/lib/{RUNTIME}"))
    places += sorted(Path("/usr/local").glob(f"cuda*/lib64/{RUNTIME}"))
    found = next((place for place in places if place.exists()), RUNTIME)
    try:
        ctypes.CDLL(str(found), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise ImportError(f"needs {RUNTIME}, as of the package nvidia-cuda-runtime-cu12: {error}") from error
