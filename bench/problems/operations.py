"""What each operation's call is made of."""

from __future__ import annotations

from typing import Any

from bench.machine.device import Cpu, Cuda
from bench.problems import Problem
from bench.problems.gradients import Gradients
from bench.problems.moves import NewTokens, Parts
from bench.problems.operands import Operands
from bench.problems.sequences import Sequences

OPERANDS: dict[str, type[Operands]] = {"attention": Operands, "backward": Gradients, "serving": Sequences, "merge": Parts,
                                       "append": NewTokens}  # fmt: skip


def operands_of(problem: Problem, device: Cpu | Cuda, **options: Any) -> Operands:
    """The arrays of one call of the problem's operation."""
    return OPERANDS[problem.operation](problem, device, **options)
