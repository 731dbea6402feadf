"""A candidate against baselines on one problem, inside a worker: trials, paired timing, trials again.

Everything a candidate could lean on is changed while the clock is off: outputs are poisoned before each sample and
looked at after it, V changes its sign between samples under the same pointers, and afterwards the trials are repeated
with seeds it has not seen.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from bench import device as devices
from bench import integrity, named, peers, report, timer, trials
from bench.contender import Contender, Thunk
from bench.device import Cpu, Cuda
from bench.memory import GUARD_BYTES
from bench.operands import Operands
from bench.problems import Case
from bench.rounds import Samples, take_turns

# Work the host saw beyond the contender's clock, as a share of the clocked time, that is no longer an accident.
HIDDEN_SHARE = 0.5
HIDDEN_SECONDS = 2e-4
AUDITS = 3
AUDIT_SECONDS = 0.15
_now = time.perf_counter


def duel(
    candidate: str,
    baselines: list[str],
    case: str,
    device: str,
    arrays: str | None = None,
    rounds: int = 240,
    seconds: float = 20.0,
    seed: int = 0,
    cold: bool = False,
    values: list[str] | None = None,
    audit_seconds: float = AUDIT_SECONDS,
    sample_seconds: float | None = None,
    tell: Callable[[Any], None] = print,
) -> dict[str, Any]:
    """Judges and times; returns a JSON document with `correct`, `failures` and, per baseline, samples and interval.

    What is timed works on ordinary inputs, drawn on the GPU where there is one: the candidate on arrays of its own
    between guard zones, the baselines on others that they share.
    """
    target = devices.open_device(device)
    problem = Case.parse(case)
    values = list(values or trials.HARD)
    opponents, refused = _usable(baselines, problem, target, seed)
    before = integrity.snapshot()
    tell({"stage": "load"})
    challenger = named.open_contender(candidate, target, arrays)
    refusal = challenger.refuses(problem)
    document: dict[str, Any] = {
        "case": case,
        "candidate": candidate,
        "refused": refused,
        "failures": [],
        "correct": False,
    }
    if refusal:
        document["failures"] = [f"refused: {refusal}"]
        return document

    tell({"stage": "trials"})
    first = trials.check(challenger, problem, target, seed + 100, values)
    document |= {"frobenius": first.frobenius, "max_abs": first.max_abs, "failures": first.failures}
    if not first.passed:
        return document

    tell({"stage": "timing"})
    with target.working():
        count = timer.slots_for_cold(problem.bytes(), target) if cold else 1
        slots, shared = (
            [Operands(_seeded(problem, seed + i), target, guard=guard) for i in range(count)]
            for guard in (GUARD_BYTES, 0)
        )
        keeper = Keeper(challenger, slots, target, first.bound, seed, sample_seconds)
        watches = {candidate: keeper.watch}
        for opponent in opponents:
            thunks = [opponent.bind(operands) for operands in shared]
            watches[opponent.name] = timer.Stopwatch(thunks, target, opponent.timing, sample_seconds)
        samples = take_turns(watches, rounds, seconds, seed, around=lambda name, sample: (
            keeper.around(sample) if name == candidate else sample()))  # fmt: skip
        failures = list(keeper.failures)
        failures += _hidden_work(samples.hidden[candidate], samples.seconds[candidate], keeper.watch)
        _audit(keeper.watch, audit_seconds, tell)
        failures += [f"after timing: wrote to its inputs: {n}" for s in keeper.slots for n in s.changed_inputs()]
        failures += [f"after timing: wrote beside {n}" for s in keeper.slots for n in s.broken_guards()]

    tell({"stage": "trials again"})
    again = trials.check(challenger, problem, target, seed + 7919, values[:3])
    failures += [f"after timing: {text}" for text in again.failures]
    failures += [f"tampered with {name}" for name in integrity.tampered(before)]

    document |= {"failures": failures, "correct": not failures}
    return document | _figures(candidate, [o.name for o in opponents], watches, samples)


def _figures(
    candidate: str, baselines: list[str], watches: dict[str, timer.Stopwatch], samples: Samples
) -> dict[str, Any]:
    """How it was timed, every sample, and the interval of candidate / baseline for each baseline."""
    return {
        "clock": {name: w.clock for name, w in watches.items()},
        "notes": {name: w.note for name, w in watches.items() if w.note},
        "rounds": len(samples.seconds[candidate]),
        "stopped": samples.stopped,
        "conditions": samples.conditions_summary(),
        "seconds": {name: float(np.median(s)) for name, s in samples.seconds.items()},
        "samples": {name: s.tolist() for name, s in samples.seconds.items()},
        "ratios": {name: samples.interval(candidate, name).as_dict() for name in baselines},
    }


def _usable(names: list[str], case: Case, device: Cpu | Cuda, seed: int) -> tuple[list[Contender], dict[str, str]]:
    """(baselines that run this problem correctly, {baseline: why not})."""
    usable, refused = [], {}
    for name in names:
        try:
            opponent = named.open_contender(name, device, role="baseline")
        except report.UsageError as error:
            if name not in peers.PEERS:  # a typing error, not a library that is not installed
                raise
            refused[name] = str(error)
            continue
        why = opponent.refuses(case)
        if why is None:
            checked = trials.check(opponent, case, device, seed + 50, ("normal",))
            why = None if checked.passed else checked.failures[0]
        if why:
            refused[name] = why
        else:
            usable.append(opponent)
    return usable, refused


def _keeping(thunk: Thunk, results: list[Any], i: int) -> Thunk:
    def call():
        results[i] = thunk()

    return call


def _seeded(case: Case, seed: int) -> Case:
    return dataclasses.replace(case, seed=seed, values="normal")


class Keeper:
    """Holds what each slot's right result is, and checks after every sample that the timed calls gave it."""

    # Slots whose right result is known, and how many of them are looked at after a sample; drawn anew each time.
    WATCHED = 12
    LOOKS = 2

    def __init__(self, entrant: Contender, slots: list[Operands], device: Cpu | Cuda, bound: float, seed: int,
                 sample_seconds: float | None = None):  # fmt: skip
        self.slots, self.bound = slots, bound
        self.results: list[Any] = [None] * len(slots)
        thunks = [_keeping(entrant.bind(operands), self.results, i) for i, operands in enumerate(slots)]
        self.watch = timer.Stopwatch(thunks, device, entrant.timing, sample_seconds)
        self.rng = np.random.default_rng([seed, 5])
        self.signs = [1.0] * len(slots)
        self.failures: list[str] = []
        self.samples = 0
        self.expected: dict[int, Any] = {}
        if self.watch.clock == "graph":
            self.watch.launch()  # results of captured calls live in the graph's own memory
        for i in self.rng.choice(len(slots), size=min(self.WATCHED, len(slots)), replace=False).tolist():
            if self.watch.clock != "graph":
                thunks[i]()
            device.synchronize()
            self.expected[i] = self._values(i)
            judged = slots[i].judge(self.results[i])
            if not judged.passed and not self.failures:
                self.failures.append(f"before timing: {'; '.join(judged.failures)}")

    def _values(self, i: int) -> Any:
        """The latest result of a slot in float32, where the judge computes."""
        return self.slots[i].values_of(self.results[i]).astype(np.float32)

    def around(self, sample: Callable[[], tuple[float, float]]) -> tuple[float, float]:
        """Poisons, flips the sign of V in a slot or two, takes the sample, looks at the results."""
        upcoming = [i for i in self.watch.upcoming() if i in self.expected]
        drawn = self.rng.choice(upcoming, size=min(self.LOOKS, len(upcoming)), replace=False) if upcoming else ()
        for i in drawn:
            if self.samples == 0 or self.rng.random() < 0.5:
                self.slots[i].negate_values()
                self.signs[i] = -self.signs[i]
            self.slots[i].poison()
            _fill_nan(self.results[i])
        taken = sample()
        self.samples += 1
        for i in drawn if not self.failures else ():
            got = self._values(i)
            error = abs(got - self.signs[i] * self.expected[i])
            # Both calls may err by the bound, in opposite directions.
            if not bool((error <= 2 * self.bound).all()):
                unwritten = int((got != got).sum())
                what = f"{unwritten} elements unwritten" if unwritten else f"off by {float(error.max()):.3g}"
                self.failures.append(f"timed sample {self.samples}: {what} after the inputs changed under its pointers")
        return taken


def _fill_nan(array: Any) -> None:
    """Poisons a result that the contender allocated itself, where it can be written to."""
    if type(array).__module__.partition(".")[0] in ("numpy", "torch", "cupy"):
        try:
            array[...] = float("nan")
        except (ValueError, TypeError, RuntimeError):  # a read-only view
            pass


def _hidden_work(hidden: np.ndarray, seconds: np.ndarray, watch: timer.Stopwatch) -> list[str]:
    """Time that passed until the device was idle, but not on the stream that was timed."""
    extra, clocked = float(np.median(hidden)) * watch.launches, float(np.median(seconds)) * watch.launches
    if extra > HIDDEN_SHARE * clocked + HIDDEN_SECONDS:
        return [f"{extra * 1e3:.3g} ms of work a sample lie outside the timed stream (clocked: {clocked * 1e3:.3g} ms)"]
    return []


def _audit(watch: timer.Stopwatch, seconds: float, tell: Callable[[Any], None]) -> None:
    """Takes samples between two messages, a few times over: the parent holds what they claim against its own clock."""
    for _ in range(AUDITS):
        watch.device.synchronize()
        tell({"audit": "begin"})
        claimed, samples, began = 0.0, 0, _now()
        while samples == 0 or (_now() - began < seconds and samples < 100_000):
            claimed += watch.sample_both()[1] * watch.launches
            samples += 1
        tell({"audit": "end", "claimed_s": claimed})


class Auditor:
    """The parent's side of the audit: ``on_message`` for ``Worker.call``."""

    # More than the claim passes between two messages (waiting, starting clocks), but never so much more each time.
    MOST = 1.7
    SLACK_SECONDS = 0.01

    def __init__(self):
        self.began: float | None = None
        self.seen: list[tuple[float, float]] = []
        self.stage = "start"

    def __call__(self, message: Any, at: float) -> None:
        self.stage = message.get("stage", self.stage)
        if message.get("audit") == "begin":
            self.began = at
        elif message.get("audit") == "end" and self.began is not None:
            self.seen.append((at - self.began, message["claimed_s"]))

    @property
    def failure(self) -> str | None:
        """Why the claims cannot be true; None when one of the audits bears them out."""
        if not self.seen or any(seen <= self.MOST * claimed + self.SLACK_SECONDS for seen, claimed in self.seen):
            return None
        seen, claimed = min(self.seen, key=lambda pair: pair[0] / max(pair[1], 1e-9))
        return f"its calls took {seen:.3g} s by the parent's clock where {claimed:.3g} s were claimed"
