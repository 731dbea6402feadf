"""Correctness of one contender on one problem: fresh seeds, fresh pointers, poisoned outputs, guarded memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from bench.contender import Contender
from bench.device import Cpu, Cuda
from bench.memory import LARGE_BYTE, NAN_BYTE
from bench.operands import Operands, WrongResult
from bench.problems import Case

# What the inputs hold in each trial: ordinary numbers, then those that shortcuts of the softmax do not survive
# (growing maxima, far-apart scores, one dominant key, a NaN that a query sees).
ORDINARY = ("normal", "normal")
HARD = ("normal", "sorted", "large", "offset", "normal", "dominant", "nan_tail")


@dataclasses.dataclass
class Checked:
    """What the trials found. `failures` is empty for a correct contender."""

    trials: int = 0
    failures: list[str] = dataclasses.field(default_factory=list)
    frobenius: float = 0.0
    max_abs: float = 0.0
    # Largest error that the judge would let pass on ordinary inputs: what timed results are held to.
    bound: float = 0.0

    @property
    def passed(self) -> bool:
        return self.trials > 0 and not self.failures

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"passed": self.passed}


def check(
    contender: Contender,
    case: Case,
    device: Cpu | Cuda,
    seed: int,
    values: Sequence[str] = HARD,
    keep_going: bool = False,
) -> Checked:
    """Runs one trial for each entry of `values`. Stops at the first failure unless `keep_going`.

    All trials' arrays stay alive, so that each trial has pointers of its own.
    """
    found = Checked()
    held: list[Operands] = []
    for i, kind in enumerate(values):
        guard = NAN_BYTE if i % 2 == 0 else LARGE_BYTE
        trial = dataclasses.replace(case, seed=seed + i, values=kind)
        with device.working():
            operands = Operands(trial, device, guard)
            held.append(operands)
            failures = run_trial(contender, operands, found)
        found.trials += 1
        found.failures += [f"trial {i + 1} ({kind} inputs, seed {seed + i}): {text}" for text in failures]
        if found.failures and not keep_going:
            break
    return found


def run_trial(contender: Contender, operands: Operands, found: Checked) -> list[str]:
    """One call and all checks of it; adds its errors to `found`."""
    device = operands.device
    try:
        result = contender.bind(operands)()
        if device.kind == "cuda":
            # Its own stream alone: what still runs elsewhere is late, and is seen as unwritten.
            device.wait_for_stream()
        judged = operands.judge(result)
    except WrongResult as error:
        return [str(error)]
    except Exception as error:  # a candidate may raise anything; that is its result
        first = str(error).splitlines()[0] if str(error) else ""
        return [f"raised {type(error).__name__}: {first}"]
    failures = list(judged.failures)
    changed, broken = operands.changed_inputs(), operands.broken_guards()
    if changed:
        failures.append(f"wrote to its inputs: {', '.join(changed)}")
    if broken:
        failures.append(f"wrote outside its memory, beside {', '.join(broken)}")
    found.max_abs = max(found.max_abs, judged.max_abs if operands.case.values == "normal" else 0.0)
    if operands.case.values == "normal":
        found.frobenius = max(found.frobenius, judged.frobenius)
        found.bound = max(found.bound, judged.max_abs_bound)
    return failures
