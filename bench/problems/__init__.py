"""The problems that are measured, scored and tested."""

from __future__ import annotations

import re
from collections.abc import Sequence

from bench import report
from bench.problems.case import ARRAYS, OPERATIONS_OF_SEQUENCES, Case  # noqa: F401
from bench.problems.case import OPERATIONS as WITHOUT_SEQUENCES
from bench.problems.presets import CELLS, PRESETS  # noqa: F401

OPERATIONS = tuple(dict.fromkeys((*WITHOUT_SEQUENCES, *OPERATIONS_OF_SEQUENCES)))
DTYPES = ("float16", "bfloat16", "float32", "float64")


def preset(name: str, operations: Sequence[str] = OPERATIONS) -> list[Case]:
    """The cases of one preset, which are of these operations."""
    if name not in preset_names(operations):
        raise report.UsageError(f"preset is {name!r}; accepted: {', '.join(preset_names(operations))}")
    return list(PRESETS[name])


def cells(name: str, chosen: Sequence[str]) -> list[Case]:
    """The cases of some cells of one preset, by the cells' names."""
    preset(name)
    of = CELLS.get(name, {})
    if unknown := [cell for cell in chosen if cell not in of]:
        accepted = f"those of {name}: {', '.join(of)}" if of else f"presets that have cells: {', '.join(CELLS)}"
        raise report.UsageError(f"cells are {', '.join(unknown)}; accepted: {accepted}")
    return [case for cell in chosen for case in of[cell]]


def shortened(line: str) -> str:
    """The line of a case; of many lengths the first three."""
    words = line.split(",")
    words[2] = re.sub(r"^((?:[^+]+\+){3})(?:[^+]+\+){5,}.*", r"\1...", words[2])
    return ",".join(words)


def preset_names(operations: Sequence[str] = OPERATIONS) -> tuple[str, ...]:
    return tuple(name for name, found in PRESETS.items() if all(case.operation in operations for case in found))


def parse(text: str, operations: Sequence[str] = ("attention",)) -> Case:
    """A case as ``str(case)`` writes it, such as ``B1,H8,S512,D64,float16,causal=True``; one of sequences says how they are
    stored, such as ``B4,H8/2,S1x512*3+1x64,D64,float16,q=one,k=paged``."""
    try:
        case = Case.parse(text)
        if case.storage:
            _check_measurable(case)
        if case.dtype not in DTYPES:
            raise ValueError(f"dtype {case.dtype}; accepted: {', '.join(DTYPES)}")
        if case.operation not in operations:
            raise ValueError(f"operation {case.operation}; accepted here: {', '.join(operations)}")
        return case
    except (ValueError, TypeError, IndexError) as error:
        example = "B1,H8,S512,D64,float16,causal=True"
        raise report.UsageError(f"case is {text!r} ({error}); accepted: lines such as {example!r}") from None


def _check_measurable(case: Case) -> None:
    """ValueError for sequences that the laboratory does not make."""
    if case.k_range or case.positions or case.segments or case.logits or case.storage.cache != "two" or case.storage.slack:
        raise ValueError("sequences are measured with slack=0, and without k_range, positions, segments, logits and cache")
    if case.operation == "backward" and case.storage.k == "paged":
        raise ValueError("paged keys have no backward pass; accepted with operation=backward: k=packed, k=padded")


def scored(device: str) -> list[Case]:
    """The problem set of ``bench score``: 108 problems, of which 36 have at least 1024 queries or keys.

    The same shapes, masks and dtypes on both devices; a GPU gets more heads, so that it is not idle.
    """
    dtypes = ("float16", "bfloat16", "float32")
    small = 2 if device == "cpu" else 16
    large = 1 if device == "cpu" else 16
    problems: list[Case] = []
    for dtype in dtypes:
        for seq in (128, 256, 384, 512):
            for dim in (64, 128):
                problems.append(Case(1, small, None, seq, None, dim, dtype=dtype))
                problems.append(Case(1, small, None, seq, None, dim, dtype=dtype, causal=True))
        for seq_q, seq_k, dim in ((113, 203, 64), (1, 512, 128), (64, 256, 96), (200, 200, 80)):
            problems.append(Case(2, small, None, seq_q, seq_k, dim, dtype=dtype, causal="bottom_right"))
            problems.append(Case(2, 2 * small, small, seq_q, seq_k, dim, dtype=dtype))
        for seq in (1024, 1536, 2048):
            for dim in (64, 128):
                problems.append(Case(1, large, None, seq, None, dim, dtype=dtype))
                problems.append(Case(1, large, None, seq, None, dim, dtype=dtype, causal=True))
    return problems
