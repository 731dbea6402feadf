"""Rounds: each samples everything that is timed once, in random order, so that drift hits all alike."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from bench import machine
from bench.timing import stats

# Rounds between looks at the confidence interval, seconds between looks at clocks and power.
LOOK_EVERY = 12
CONDITIONS_EVERY = 0.05


@dataclass
class Samples:
    """Seconds a call, by implementation; entry i of each was taken in round i. `settling` counts the seconds of waiting for an idle machine after each sample,
    `waiting` the share of each sample for which threads were ready to run and had no core (0.5: one thread half of it).
    `conditions` are clocks and power, one entry a round with a GPU; on the CPU `load_average` is that of the last
    minute and `others` the share of the cores' time that other processes took during the rounds (None where the kernel
    does not tell, or they were too short)."""

    seconds: dict[str, np.ndarray]
    settling: dict[str, list[float]] = field(default_factory=dict)
    conditions: list[dict] = field(default_factory=list)
    waiting: dict[str, list[float]] = field(default_factory=dict)
    stopped: str = "rounds"
    load_average: float | None = None
    others: float | None = None

    def interval(self, candidate: str, baseline: str) -> stats.Interval:
        """Interval of candidate / baseline over the rounds that were not throttled (all, if most were)."""
        keep = self.unthrottled()
        return stats.ratio_interval(self.seconds[candidate][keep], self.seconds[baseline][keep])

    def unthrottled(self) -> np.ndarray:
        count = len(next(iter(self.seconds.values())))
        good = np.array([not c["throttled"] for c in self.conditions] or [True] * count)
        return good if good.sum() >= max(stats.MIN_ROUNDS, count // 2) else np.ones(count, bool)

    def conditions_summary(self) -> dict[str, Any] | None:
        """On a GPU median clock and power, and the share of rounds under each reason to throttle; on the CPU what
        others took of the cores, the load average, and by implementation the mean of `waiting` and the median of the
        milliseconds for which threads went on running after a sample."""
        if not self.conditions:
            if self.load_average is None:
                return None
            waited = {n: float(np.median(w)) * 1e3 for n, w in self.settling.items() if w and max(w) > 0}
            waiting = {n: float(np.mean(w)) for n, w in self.waiting.items()}
            return {"others": self.others, "load_average": self.load_average, "waiting": waiting, "settling_ms": waited}
        clocks = [c["sm_clock_mhz"] for c in self.conditions if c["sm_clock_mhz"] is not None]
        powers = [c["power_w"] for c in self.conditions if c["power_w"] is not None]
        reasons: dict[str, float] = {}
        for condition in self.conditions:
            for reason in condition["throttled"]:
                reasons[reason] = reasons.get(reason, 0.0) + 1 / len(self.conditions)
        return {
            "sm_clock_mhz": float(np.median(clocks)) if clocks else None,
            "power_w": float(np.median(powers)) if powers else None,
            "throttled": reasons,
        }


class Watch(Protocol):
    """A source of samples of one implementation: ``timer.Stopwatch`` here, ``duel.Remote`` in a process of its own."""

    device: Any

    @property
    def launches(self) -> int: ...

    def sample(self) -> float: ...


def take_rounds(
    watches: Mapping[str, Watch], rounds: int, seconds: float, seed: int = 0, tight: float | None = None,
    against: str | None = None, workers: Sequence[int] = (), say: Callable[[str], None] = lambda text: None,
) -> Samples:  # fmt: skip
    """Samples `watches` until `rounds` are done, `seconds` have passed (but at least MIN_ROUNDS rounds, or two when
    three times as long has passed), or every ratio to `against` is known within a relative interval width of `tight`.
    Before each sample the device settles, so that nobody runs beside the threads that another left spinning.

    `workers` are processes whose work is the implementations'. `say` hears about every round. Widths do not favour either
    side of a limit, so stopping by them does not bias a verdict; stopping by the verdict would.
    """
    rng = np.random.default_rng(seed)
    names = list(watches)
    taken: dict[str, list[float]] = {name: [] for name in names}
    settling: dict[str, list[float]] = {name: [] for name in names}
    waiting: dict[str, list[float]] = {name: [] for name in names}
    previous = names[0]
    on_gpu = any(w.device.kind == "cuda" for w in watches.values())
    monitor = machine.Monitor() if on_gpu else None
    cores = None if on_gpu else machine.Cores(workers)
    condition: dict[str, Any] = {}
    due = 0.0
    result = Samples({})
    began = time.perf_counter()
    for done in range(1, rounds + 1):
        for i in rng.permutation(len(names)):
            name = names[i]
            taken[name].append(_settled_sample(watches[name], settling[previous], waiting[name]))
            previous = name
        say(f"round {done} of at most {rounds}")
        elapsed = time.perf_counter() - began
        if monitor and monitor.handle:
            if elapsed >= due:
                condition, due = monitor.read() or {}, elapsed + CONDITIONS_EVERY
            result.conditions.append(condition)
        if (elapsed > 3 * seconds and done > 1) or (elapsed > seconds and done >= stats.MIN_ROUNDS):
            result.stopped = "time"
            break
        if tight and against and done >= stats.MIN_ROUNDS and done % LOOK_EVERY == 0:
            base = np.array(taken[against])
            if all(stats.ratio_interval(np.array(taken[n]), base).width <= tight for n in names if n != against):
                result.stopped = "tight"
                break
    result.seconds = {name: np.array(values) for name, values in taken.items()}
    result.settling, result.waiting = settling, waiting
    if cores:
        result.load_average, result.others = os.getloadavg()[0], cores.others()
    return result


def _settled_sample(watch: Watch, settling: list[float], waiting: list[float]) -> float:
    settling.append(watch.device.settle())
    before, began = watch.device.waited_for_cores(), time.perf_counter()
    seconds = watch.sample()
    # Of what the calls took: a watch may do more, such as looking at results.
    took = min(seconds * watch.launches, time.perf_counter() - began)
    waiting.append(max(0.0, watch.device.waited_for_cores() - before) / max(took, 1e-9))
    return seconds
