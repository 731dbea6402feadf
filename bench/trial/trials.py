"""Correctness of one implementation on one problem: fresh seeds, fresh pointers, poisoned outputs, guarded memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from bench.implementations.implementation import Implementation
from bench.machine.device import Cpu, Cuda
from bench.problems import Case
from bench.problems.memory import LARGE_BYTE, NAN_BYTE
from bench.problems.operands import Operands, WrongResult
from bench.trial import sequence_pool

# The inputs of each trial: ordinary numbers, then those that shortcuts of the softmax do not survive
# (growing maxima, far-apart scores, a few large keys, one dominant key, a NaN that a query sees).
HARD = ("normal", "sorted", "large", "outliers", "offset", "normal", "dominant", "nan_tail")
# Sequences have ordinary numbers, and lengths that are drawn.
OF_SEQUENCES = ("normal",) * len(HARD)


class Lost(Exception):
    """The process of an implementation crashed, hung, or does not answer as it should; the run with it is over."""


@dataclasses.dataclass
class Checked:
    """The findings of the trials. `failures` is empty for a correct implementation."""

    trials: int = 0
    failures: list[str] = dataclasses.field(default_factory=list)
    frobenius: float = 0.0
    max_abs: float = 0.0
    # Largest errors that the judge would let pass on ordinary inputs: what timed results are held to.
    bound: float = 0.0
    frobenius_bound: float = 0.0
    # Largest errors that the judge would let pass, by kind of values.
    bounds: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return self.trials > 0 and not self.failures

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"passed": self.passed}


def check(implementation: Implementation, case: Case, device: Cpu | Cuda, seed: int, values: Sequence[str] = HARD) -> Checked:
    """The trials of an implementation that is trusted, in this process."""

    def attempt(operands: Operands) -> Any:
        result = implementation.bind(operands)()
        if device.kind == "cuda":
            device.wait_for_stream()
        return result

    with device.working():
        return run(attempt, lambda trial, guard: Operands(trial, device, guard), case, range(seed, seed + len(values)), values)


def run(
    attempt: Callable[[Operands], Any], make: Callable[[Case, int], Operands], case: Case, seeds: Sequence[int],
    values: Sequence[str] = HARD, say: Callable[[str], None] = lambda text: None,
) -> Checked:  # fmt: skip
    """One trial for each entry of `values`, with the seed beside it, until the first that fails: `make(case, guard byte)`
    the operands, let `attempt` call the implementation with them, judge what it returns. All trials' arrays stay alive
    meanwhile, so that each has pointers of its own."""
    found = Checked()
    held: list[Operands] = []
    for i, (kind, seed) in enumerate(zip(values, seeds, strict=True)):
        say(f"{i + 1} of {len(values)}")
        problem = dataclasses.replace(case, seed=seed, values=kind)
        operands = make(sequence_pool.trial(problem, i == 0) if case.lengths else problem, NAN_BYTE if i % 2 == 0 else LARGE_BYTE)
        held.append(operands)
        failures = run_trial(attempt, operands, found)
        found.trials += 1
        found.failures += [f"trial {i + 1} ({kind} inputs, seed {seed}): {text}" for text in failures]
        if found.failures:
            break
    return found


def run_trial(attempt: Callable[[Operands], Any], operands: Operands, found: Checked) -> list[str]:
    """One call and all checks of it; adds its errors to `found`."""
    try:
        judged = operands.judge(attempt(operands))
    except WrongResult as error:
        return [str(error)]
    except Lost:
        raise
    except Exception as error:  # a candidate may raise anything; that is its result
        first = str(error).splitlines()[0] if str(error) else ""
        return [f"raised {type(error).__name__}: {first}"]
    failures = list(judged.failures)
    changed, broken = operands.changed_inputs(), operands.broken_guards()
    if changed:
        failures.append(f"wrote to its inputs: {', '.join(changed)}")
    if broken:
        failures.append(f"wrote outside its memory, beside {', '.join(broken)}")
    kind = operands.case.values
    found.bounds[kind] = max(found.bounds.get(kind, 0.0), judged.max_abs_bound)
    if kind == "normal":
        found.max_abs = max(found.max_abs, judged.max_abs)
        found.frobenius = max(found.frobenius, judged.frobenius)
        found.bound = max(found.bound, judged.max_abs_bound)
        found.frobenius_bound = max(found.frobenius_bound, judged.frobenius_bound)
    return failures
