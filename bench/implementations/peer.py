"""The base of other implementations: the options they know, and how they see operands."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from bench.implementations.implementation import Implementation, Thunk
from bench.problems import Case
from bench.problems.operands import Arrays


class Peer(Implementation):
    """Knows the options it has (`extras`); everything else is a refusal by name. `causal` says which causal masks it has: "any",
    "last" (the last query sees the last key) or "square" (as many queries as keys); `packed_causal` those of gradients of sequences,
    None: it has no such gradients."""

    extras: frozenset[str] = frozenset()
    dtypes: frozenset[str] = frozenset({"float16", "bfloat16"})
    causal = "any"
    packed_causal: str | None = None

    def refuses(self, case: Case) -> str | None:
        if case.dtype not in self.dtypes:
            return f"no {case.dtype}"
        causal, square = self.causal, case.n_q == case.n_k
        if case.lengths and case.operation == "backward":
            if self.packed_causal is None:
                return "no backward pass of sequences"
            causal = self.packed_causal
        if causal == "last" and case.causal == "top_left" and (case.operation == "serving" or not square):
            return "no top_left causal mask"
        if causal == "square" and case.causal and not square:
            return "causal only for seq_q == seq_k"
        needed = {n for n in ("window", "softcap", "dropout", "dlse", "accumulate") if getattr(case, n, None)} | set(case.arrays())
        missing = sorted(needed - self.extras)
        return f"no {', '.join(missing)}" if missing else None


class Dense(Peer):
    """Attention of whole tensors by a function of q, k and v, which `attend` makes; `order` is that of its axes."""

    order = "bshd"

    def attend(self, case: Case) -> Callable[[Any, Any, Any], Any]:
        raise NotImplementedError

    def bind(self, operands: Arrays) -> Thunk:
        view = bshd if self.order == "bshd" else bhsd
        q, k, v = (view(operands, name, self.library) for name in "qkv")
        attend, swap = self.attend(operands.case), operands.case.layout != self.order

        def call():
            out = attend(q, k, v)
            return out.swapaxes(1, 2) if swap else out

        return call


def bhsd(operands: Arrays, name: str, library: str) -> Any:
    """The operand as (B, H, S, D), a view."""
    array = operands.array(name, library)
    return array.swapaxes(1, 2) if operands.case.layout == "bshd" else array


def bshd(operands: Arrays, name: str, library: str) -> Any:
    """The operand as (B, S, H, D), a view."""
    array = operands.array(name, library)
    return array if operands.case.layout == "bshd" else array.swapaxes(1, 2)


def scale_of(case: Case) -> float:
    return 1 / math.sqrt(case.head_dim) if case.scale is None else case.scale


def bias_dtype(case: Case) -> str:
    """Name of the dtype that the case's kind of bias has, from one of a single key."""
    return dataclasses.replace(case, batch=1, seq_q=1, seq_k=1, mask=None).host_inputs()["bias"].dtype.name
