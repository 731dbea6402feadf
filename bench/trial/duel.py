"""A candidate against baselines on one problem: trials, timing in rounds, trials again. All of it happens here, in the
judge's process; what is judged lives in workers, which are told what to call and are believed nothing.

Results are read from memory that the judge shares with a worker, expected ones exist here alone, and time is what passes
by the judge's clock from before a worker goes on until all of it stands still again. All others
stand still meanwhile. On the CPU each call is a step of its own, and its inputs are written right before it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bench import report
from bench.implementations import peers
from bench.machine import device as devices
from bench.machine.device import Cpu, Cuda
from bench.problems import Case
from bench.problems.operands import WrongResult
from bench.timing.rounds import Samples, take_rounds
from bench.trial import isolation, processes, trials
from bench.trial.dice import Dice
from bench.trial.gradient_pool import GradientPool
from bench.trial.pool import Pool, Shared, SharedGradients, SharedOperands
from bench.trial.sequence_pool import SequencePool, SharedSequenceGradients
from bench.trial.shared import DeviceRegion
from bench.trial.stillness import Stillness
from bench.trial.trials import Lost

# On a GPU a sample is long beside waking a worker and stopping it, which took 40 microseconds where it was looked at
# (2 cores, Zen 5); on the CPU that is taken off each call, 15 microseconds there.
SAMPLE_SECONDS = {"cpu": 2e-2, "cuda": 1e-2}
# Samples hold as many calls of each as of the fastest, unless they get so many times as long: waking a worker
# then costs each call of them the same.
LONGER = 5
# Samples of a baseline alone, before the candidate is loaded and after it has ended.
ALONE = 3
# A worker's clock reads less than the judge's by what a baseline's does; twice that, and this share of what is left, are
# accepted: half of samples of 20 ms is seen where waking and stopping a worker costs up to 4 ms. On the CPU so many samples of
# several calls at once, after the rounds, are for that alone.
CLOCK_SAMPLES = 20
CLAIM_SHARE = 0.3
# Steps of which a tenth takes less than what is taken off for waking a worker and stopping it, and the share of a sample that
# is left in any case.
IDLE_STEPS = 200
KEPT_SHARE = 0.1
# Steps of a sample before which the judge looks whether processes run that were not there when it began.
WATCHED_STEPS = 3
# A cold call begins after the caches were written over, which takes longer than many a call: so many make a sample at most.
COLD_CALLS = 8
# Seconds until a GPU answers on which nobody's work runs any more.
IDLE_SECONDS = 1e-3
Say = Callable[[str], None]


class Table:
    """The judge's device, what it shares with workers, and the workers of baselines, which go from problem to problem."""

    def __init__(self, device: str):
        self.home = _home(device)
        self.kind = device
        self.workers: dict[str, isolation.Worker] = {}
        self.on_device = device == "cuda" and self._shares()
        if device == "cuda" and not self.on_device:
            self.home = _home("cpu")

    def __enter__(self) -> Table:
        return self

    def __exit__(self, *exc) -> None:
        for worker in self.workers.values():
            worker.close()

    def worker(self, name: str) -> isolation.Worker:
        return self.workers.setdefault(name, isolation.Worker())

    @functools.cached_property
    def step_seconds(self) -> float:
        """The least time of a step without a call; what more it takes where threads wait for a core stays in the times."""
        with isolation.Worker() as worker:
            arguments = {"calls": IDLE_STEPS}
            outcome, taken = worker.steps("bench.trial.calls:idle_steps", arguments, 60.0, IDLE_STEPS, _nothing, _nothing)
        return float(np.quantile(taken, 0.1)) if outcome.ok else 0.0

    def _shares(self) -> bool:
        return _device_memory_is_shared(self.home)


@functools.cache
def _device_memory_is_shared(home: Cuda) -> bool:
    """Whether another process can open device memory of this one: not in every container."""
    try:
        region = DeviceRegion(1, home)
    except OSError:
        return False
    with processes.hidden(), isolation.Worker(confined=True) as worker:  # as it will be
        seen = worker.call("bench.trial.calls:probe", {"region": region.description()}, 120.0)
    region.close()
    return seen.ok and seen.value is True


@functools.cache
def _home(device: str) -> Cpu | Cuda:
    return devices.open_device(device)


def _nothing(step: int) -> None:
    pass


class Remote:
    """An implementation in a worker. `judged`: it fills outputs that are looked at, as the candidate does."""

    def __init__(self, name: str, worker: isolation.Worker, table: Table, time_limit: float, judged: bool):
        self.name, self.worker, self.table, self.limit, self.judged = name, worker, table, time_limit, judged
        self.device = self  # of which take_rounds asks what it asks a device
        self.kind = table.kind
        self.calls, self.clock, self.note = 1, "calls", None
        self.observed: list[float] = []  # seconds of each sample
        self.clocked: list[tuple[float, Any]] = []  # of samples at once: by the judge's clock, and what its own read
        self.held: list[Shared] = []
        self.check: Callable[[Remote], None] = lambda remote: None
        self.between_calls, self.between_samples = Stillness("between two calls"), Stillness("between two samples")

    # ---- what take_rounds asks ----

    @property
    def launches(self) -> int:
        return self.calls

    def settle(self) -> float:
        """Nobody else runs: there is nothing to wait for."""
        return 0.0

    def waited_for_cores(self) -> float:
        return processes.waited_for_cores(self.worker.pid) if self.kind == "cpu" else 0.0

    def sample(self) -> float:
        """Seconds a call of one sample, on inputs that nobody has seen."""
        self.pool.deal(self.calls)
        if self.judged:
            self.pool.poison()
        seconds = self._at_once() if self.kind == "cuda" else self._call_by_call()
        self.observed.append(seconds)
        self._transfer("store")
        self.check(self)
        return seconds / self.calls

    def _at_once(self) -> float:
        self.pool.reveal(0, self.calls)
        self.pool.settle()
        self._transfer("load")
        self.look_at_rest()
        outcome, seconds = self.worker.timed("bench.trial.calls:sample", {"calls": self.calls}, self.limit)
        self._require(outcome)
        self.clocked.append((seconds, outcome.value))
        return seconds

    def _call_by_call(self) -> float:
        late = [0.0]

        def before(i: int) -> None:
            self.pool.reveal(i)
            self.pool.settle()
            late.append(self.worker.strayed() if i else 0.0)
            if self.judged:
                self.between_calls.add(late[-1])
            if i in watched and (moving := self.worker.moving()):
                raise WrongResult(f"processes that it started went on between two calls: {len(moving)}")

        def after(i: int) -> None:
            if self.judged:
                self.pool.note(i)

        # To look for what it has just started takes longer than many a call.
        watched = self.pool.rng.integers(1, self.calls, WATCHED_STEPS).tolist() if self.judged and self.calls > 1 else []
        self.look_at_rest()
        outcome, taken = self.worker.steps("bench.trial.calls:steps", {"calls": self.calls}, self.limit, self.calls, before, after)
        self._require(outcome)
        whole = sum(taken) + sum(late)
        return max(whole - self.calls * self.table.step_seconds, KEPT_SHARE * whole)

    def look_at_rest(self) -> None:
        """WrongResult when the worker, or what it started, did not stand still since its last step."""
        if self.judged and self.worker.frozen:
            self.between_samples.add(self.worker.strayed())

    # ---- off the clock ----

    def ask(self, function: str, fds: list[int] | tuple = (), **arguments: Any) -> Any:
        """Calls a function of ``bench.trial.calls``; afterwards the worker stands still."""
        outcome = self.worker.call(f"bench.trial.calls:{function}", arguments, self.limit, fds=fds)
        if outcome.status == "usage" and function == "load":
            raise report.UsageError(outcome.reason)
        self._require(outcome)
        self._freeze()
        return outcome.value

    def _freeze(self) -> None:
        if restless := self.worker.freeze():
            raise Lost(f"{restless.status}: {restless.reason}")

    def _require(self, outcome: isolation.Outcome) -> None:
        if outcome.status in ("failed", "usage"):
            self._freeze()
            kind, _, text = outcome.reason.partition(": ")
            raise WrongResult(text if kind == "WrongResult" else f"raised {outcome.reason}")
        if not outcome.ok:
            raise Lost(f"{outcome.status}: {outcome.reason}")

    def load(self, arrays: str | None, role: str, case: Case) -> str | None:
        """Opens it in its worker. -> why it cannot do the problem."""
        self.ask("load", name=self.name, device=self.kind, arrays=arrays, role=role)
        refusal = self.ask("refuses", case=str(case))
        return None if refusal is None else str(refusal)

    def trials(self, case: Case, seeds: Sequence[int], values: Sequence[str], say: Say = lambda text: None) -> trials.Checked:
        def make(trial: Case, guard_byte: int) -> Shared:
            gradients = SharedSequenceGradients if trial.lengths else SharedGradients
            kind = gradients if trial.operation == "backward" else SharedOperands
            self.held.append(kind(trial, self.table.home, guard_byte, self.table.on_device))
            return self.held[-1]

        def attempt(operands: Any) -> Any:
            regions, slot, fds = operands.description()
            told = dataclasses.replace(operands.case, seed=case.seed, values=case.values)  # nothing of what was drawn
            self.ask("trial", fds, case=str(told), regions=regions, slot=slot)
            return operands.results(self.table.home.default_arrays)

        return trials.run(attempt, make, case, seeds, values, say)

    def join(self, pool: Pool, seconds: float) -> None:
        """Attaches the pool and finds how many calls make a sample of that many seconds."""
        self.pool = pool
        regions, slots, fds = pool.description(self.judged)
        self.ask("prepare", fds, case=str(pool.case), regions=regions, slots=slots, kept=self.judged)
        one = self._arrange(1)
        self._arrange(self._fitting(pool, seconds / max(one, 1e-7)))
        # Graphs take less than the calls that they are made of; a call may know its inputs, and take less than in samples.
        took = min(self.sample() for _ in range(2)) * self.calls
        if not 0.5 * seconds < took < 4 * seconds:
            self.lengthen(self._fitting(pool, self.calls * seconds / max(took, 1e-7)))
        self.observed, self.clocked = [], []

    def lengthen(self, calls: int) -> None:
        """Makes samples of that many calls."""
        if calls != self.calls:
            self._arrange(calls)
            self.sample()
        self.observed, self.clocked = [], []

    def _arrange(self, calls: int) -> float:
        """-> seconds of a call, as the worker tells: a lie makes its own samples too short or too long."""
        self.calls = calls
        arranged = self.ask("arrange", calls=calls)
        if not isinstance(arranged, dict) or arranged.get("clock") not in ("graph", "calls"):
            raise Lost("forged: a reply that answers another question")
        self.clock, self.note = arranged["clock"], arranged.get("note")
        told = arranged.get("seconds")
        return told if isinstance(told, float) and told > 0 else math.inf

    def _fitting(self, pool: Pool, calls: float) -> int:
        most = COLD_CALLS if pool.cold and self.kind == "cpu" else pool.slots
        return max(1, min(most, pool.slots, round(calls)))

    def alone(self) -> float:
        """Median seconds a call of a few samples that do not count."""
        seen = len(self.observed)
        found = float(np.median([self.sample() for _ in range(ALONE)]))
        del self.observed[seen:], self.clocked[seen:]
        return found

    def leave(self) -> None:
        """Lets the worker go of the problem's memory, unless it has ended, and gives that back."""
        if self.worker.process and self.worker.process.poll() is None:
            with contextlib.suppress(Lost, WrongResult):
                self.ask("leave")
        for operands in self.held:
            operands.close()
        self.held = []

    def behind(self) -> float:
        """Seconds by which its own clock read less than the judge's, in the sample where that was least, for others may hold
        the judge up; NaN where it read nonsense."""
        gaps = [seen - claim if isinstance(claim, float) and 0 < claim < seen else math.nan for seen, claim in self.clocked]
        return float(np.min(gaps))

    def read_clock(self) -> None:
        """Where calls are timed one by one: samples at once, of which the worker tells what its clock read."""
        while self.kind == "cpu" and len(self.clocked) < CLOCK_SAMPLES:
            self.pool.deal(self.calls)
            self._at_once()

    def _transfer(self, direction: str) -> None:
        if self.kind == "cuda" and not self.table.on_device:
            self.ask("transfer", direction=direction)


def duel(
    candidate: str, baselines: list[str], case: str, table: Table, worker: isolation.Worker | None = None,
    arrays: str | None = None, rounds: int = 240, seconds: float = 20.0, seed: int | None = None, cold: bool = False,
    values: list[str] | None = None, sample_seconds: float | None = None, time_limit: float = 300.0, say: Say = lambda text: None,
) -> dict[str, Any]:  # fmt: skip
    """Judges and times; returns a JSON document with `correct`, `failures` and, per baseline, samples and interval.

    What is timed works on ordinary inputs, but for a few heads. `worker` runs the candidate and goes on afterwards; by
    default it gets one of its own. `seconds` bounds the rounds, `time_limit` every single call of a worker. `seed` repeats
    the draws of the run whose document has it; by default they are secret.
    """
    if candidate in baselines:
        raise report.UsageError(f"baseline is {candidate!r}, which is the candidate; accepted: any other implementation")
    problem = Case.parse(case)
    dice, values = Dice(seed), list(trials.OF_SEQUENCES if problem.lengths else values or trials.HARD)
    document: dict[str, Any] = {"case": case, "candidate": candidate, "failures": [], "correct": False}
    match = _Match(problem, table, dice, cold, values, sample_seconds or SAMPLE_SECONDS[table.kind], time_limit, say)
    judged = Remote(candidate, worker or isolation.Worker(confined=True), table, time_limit, judged=True)
    try:
        document["refused"] = match.invite(baselines)
        with processes.hidden():
            try:
                match.judge(judged, document, arrays, values, rounds, seconds)
            except Lost as error:
                status, _, reason = str(error).partition(": ")
                document["failures"].append(f"{status} during {match.stage}: {reason}")
            except WrongResult as error:
                document["failures"].append(str(error))
            finally:
                if worker is None:
                    judged.worker.close()
        document["correct"] = not document["failures"]
        if document["correct"]:
            document["conditions"] = (document["conditions"] or {}) | {"slowed": match.slowed()}
    finally:
        judged.leave()
        match.close()
    return document | {"seed": dice.seed, "seed_given": dice.given}


class _Match:
    """One problem: its pool, the baselines that run it, and what happens to a candidate."""

    def __init__(self, problem: Case, table: Table, dice: Dice, cold: bool, values: Sequence[str], sample_seconds: float,
                 time_limit: float, say: Say):  # fmt: skip
        self.problem, self.table, self.dice = problem, table, dice
        self.sample_seconds, self.limit, self._say = sample_seconds, time_limit, say
        gradients = SequencePool if problem.lengths else GradientPool
        pool = gradients if problem.operation == "backward" else Pool
        self.pool = pool(problem, table.home, dice, table.on_device, cold, values)
        self.baselines: list[Remote] = []
        self.before: dict[str, float] = {}
        self.answers: list[float] = []
        self.stage = "start"

    def begin(self, stage: str) -> None:
        self.stage = stage
        self._say(stage)

    def within(self, text: str) -> None:
        self._say(f"{self.stage}: {text}")

    def invite(self, baselines: list[str]) -> dict[str, str]:
        """Keeps those that run the problem rightly, and times each alone. -> {baseline: why it does not}."""
        self.begin("baselines")
        refused: dict[str, str] = {}
        for name in baselines:
            baseline = Remote(name, self.table.worker(name), self.table, self.limit, judged=False)
            self.baselines.append(baseline)
            try:
                why = baseline.load(None, "baseline", self.problem)
                if why is None:
                    checked = baseline.trials(self.problem, [self.dice.number("baseline")], ("normal",))
                    why = None if checked.passed else checked.failures[0]
                if why is None:
                    baseline.join(self.pool, self.sample_seconds)
                    self.before[name] = baseline.alone()
            except report.UsageError as error:
                if name not in peers.PEERS:  # a typing error, not a library that is not installed
                    raise
                why = str(error)
            except (Lost, WrongResult) as error:
                why = str(error)
            if why is not None:
                self.baselines.remove(baseline)
                baseline.leave()
                refused[name] = why
        return refused

    def judge(self, candidate: Remote, document: dict[str, Any], arrays: str | None, values: list[str], rounds: int, seconds: float) -> None:
        """Adds to `document`; returns at the first failure, or raises it."""
        treated = {b.name: processes.favour(b.worker.pid) for b in self.baselines}
        self.begin("load")
        if refusal := candidate.load(arrays, "candidate", self.problem):
            document["failures"].append(f"refused: {refusal}")
            return
        self.begin("trials")
        first = candidate.trials(self.problem, self.dice.numbers("trials", len(values)), values, self.within)
        document |= {"frobenius": first.frobenius, "max_abs": first.max_abs, "failures": first.failures}
        if not first.passed:
            return
        self.begin("timing")
        candidate.check = lambda remote: self._check(remote, first, treated)
        candidate.join(self.pool, self.sample_seconds)
        watches = {r.name: r for r in (candidate, *self.baselines)}
        most = max(remote.calls for remote in watches.values())
        for remote in watches.values():
            remote.lengthen(min(most, LONGER * remote.calls))
        self.answers.clear()
        samples = take_rounds(watches, rounds, seconds, self.dice.number("rounds"),
                             workers=[r.worker.pid for r in watches.values()], say=self.within)  # fmt: skip
        failures = document["failures"]
        if self.pool.broken_fences():
            failures.append("after timing: wrote beside its outputs")
        if why := self._contradiction(candidate):
            failures.append(why)
        if self.answers and np.median(self.answers) > IDLE_SECONDS:
            failures.append("the GPU was still at work after its calls had returned")
        self.begin("trials again")
        again = candidate.trials(self.problem, self.dice.numbers("trials", len(values[:3])), values[:3], self.within)
        failures += [f"after timing: {text}" for text in again.failures]
        document |= _figures(candidate.name, [b.name for b in self.baselines], watches, samples)

    def _check(self, candidate: Remote, bounds: trials.Checked, treated: dict[str, Any]) -> None:
        """After each of the candidate's samples, while nobody runs: WrongResult when something is not as it should be."""
        number = len(candidate.observed)
        if moving := candidate.worker.moving():
            raise WrongResult(f"timed sample {number}: processes that it started went on after its calls had returned: {len(moving)}")
        for baseline in self.baselines:
            was, now = treated[baseline.name] or {}, processes.favour(baseline.worker.pid) or {}
            for before, after in ((how, now.get(thread, how)) for thread, how in was.items()):
                if before != after:
                    raise WrongResult(f"timed sample {number}: cores or priority of {baseline.name} were changed: "
                                      f"{processes.said(before)} became {processes.said(after)}")  # fmt: skip
        if self.table.on_device:
            self.answers.append(self.pool.answer_seconds())
        if wrong := self.pool.look(bounds.bound, bounds.frobenius_bound, bounds.bounds):
            raise WrongResult(f"timed sample {number}: {wrong}")
        candidate.look_at_rest()

    def _contradiction(self, candidate: Remote) -> str | None:
        """Why the times that its worker reported cannot be true."""
        for remote in (candidate, *self.baselines):
            remote.read_clock()
        behind, seen = candidate.behind(), float(np.quantile([seconds for seconds, _ in candidate.clocked], 0.1))
        usual = max([b.behind() for b in self.baselines], default=seen)
        if behind <= 2 * usual + CLAIM_SHARE * (seen - usual):
            return None
        return (f"its samples took {seen:.3g} s by the judge's clock, and its own read {behind:.3g} s less (a baseline's {usual:.3g} s)")

    def slowed(self) -> dict[str, float]:
        """By baseline: its time beside the candidate over that alone, before and after (the slower of both)."""
        found = {}
        for baseline in self.baselines:
            beside = float(np.median(baseline.observed)) / baseline.calls
            found[baseline.name] = beside / max(self.before[baseline.name], baseline.alone())
        return found

    def close(self) -> None:
        for baseline in self.baselines:
            baseline.leave()
        self.pool.close()


def _figures(candidate: str, baselines: list[str], watches: dict[str, Remote], samples: Samples) -> dict[str, Any]:
    """How it was timed, every sample, and the interval of candidate / baseline for each baseline."""
    return {
        "clock": {name: w.clock for name, w in watches.items()}, "notes": {name: w.note for name, w in watches.items() if w.note},
        "calls": {name: w.calls for name, w in watches.items()}, "rounds": len(samples.seconds[candidate]),
        "stopped": samples.stopped, "conditions": samples.conditions_summary(),
        "seconds": {name: float(np.median(s)) for name, s in samples.seconds.items()},
        "samples": {name: s.tolist() for name, s in samples.seconds.items()},
        "ratios": {name: samples.interval(candidate, name).as_dict() for name in baselines},
    }  # fmt: skip
