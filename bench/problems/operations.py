"""The operands of each operation's call."""

from __future__ import annotations

from typing import Any

from bench.machine.device import Cpu, Cuda
from bench.problems import Case
from bench.problems.gradients import GradientArrays, Gradients
from bench.problems.cache_ops import NewTokens, Parts
from bench.problems.operands import Arrays, Operands
from bench.problems.memory import Block
from bench.problems.sequence_gradients import SequenceGradientArrays, SequenceGradients
from bench.problems.sequences import Sequences

OPERANDS: dict[str, type[Operands]] = {"attention": Operands, "backward": Gradients, "serving": Sequences, "merge": Parts, "append": NewTokens}

# The classes by which a process that only calls an implementation reads memory that another process fills.
ARRAYS: dict[str, type[Arrays]] = {"attention": Arrays, "backward": GradientArrays}


def arrays_of(case: Case, device: Cpu | Cuda, blocks: dict[str, Block], shapes: dict[str, tuple[tuple[int, ...], str]]) -> Arrays:
    """Of them those of one call."""
    kind = SequenceGradientArrays if case.lengths else ARRAYS[case.operation]
    return kind(case, device, blocks, shapes)


def operands_of(problem: Case, device: Cpu | Cuda, **options: Any) -> Operands:
    """The arrays of one call of the problem's operation."""
    if problem.lengths and problem.operation == "backward":
        return SequenceGradients(problem, device, **options)
    return OPERANDS[problem.operation](problem, device, **options)
