"""What other implementations have in common: the options they know, and how they see operands."""

from __future__ import annotations

import math
from typing import Any

from bench.implementations.implementation import Implementation
from bench.problems import Case
from bench.problems.operands import Arrays


class Peer(Implementation):
    """Knows the options it has (`extras`); everything else is a refusal by name."""

    extras: frozenset[str] = frozenset()
    dtypes: frozenset[str] = frozenset({"float16", "bfloat16"})

    def refuses(self, case: Case) -> str | None:
        if case.dtype not in self.dtypes:
            return f"no {case.dtype}"
        needed = {n for n in ("window", "softcap", "dropout", "dlse", "accumulate") if getattr(case, n, None)} | set(case.arrays())
        missing = sorted(needed - self.extras)
        return f"no {', '.join(missing)}" if missing else None


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
