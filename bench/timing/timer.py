"""Clocks: the host's, CUDA events, CUDA-graph replay. One `Stopwatch` times one implementation on one problem.

A stopwatch holds several bindings of the same problem (slots) and calls them in turn: one slot is the hot measurement,
as many as exceed five times the last-level cache the cold one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from bench import report
from bench.implementations.implementation import Thunk
from bench.machine.device import Cpu, Cuda

# The clock is bound here, before any candidate is imported: patching the module `time` later does not reach it.
_now = time.perf_counter_ns

# A sample must be long against what starting and stopping a clock costs. On a GPU it must also be long enough for the
# clocks to follow the implementation's own power: among samples of one launch each, an implementation that draws little lifts the
# clock of the next one. On an H200 the ratio of two implementations at a 383 us problem was 1.23 with samples of 0.3 ms,
# 1.33 with 3 ms, 1.35 with 10 ms and 1.34 with 40 ms.
SAMPLE_SECONDS = {"host clock": 2e-3, "events": 1e-2, "graph": 1e-2}
MAX_GRAPH_CALLS = 200


class Stopwatch:
    """Times calls of `slots` in turn. `clock` says how: "graph", "events" or "host clock"."""

    def __init__(self, slots: Sequence[Thunk], device: Cpu | Cuda, timing: str = "graph", sample_seconds: float | None = None):
        self.slots, self.device = list(slots), device
        self.note: str | None = None
        self._replay: Any = None
        if device.kind == "cpu" or timing == "wall":
            self.clock = "host clock"
        elif timing == "events":
            self.clock = "events"
        else:
            self.clock = "graph"
        once = self._warm_up()
        target = sample_seconds or SAMPLE_SECONDS[self.clock]
        wanted = max(1, round(target / max(once, 1e-7)))
        self.calls, self.replays, self._next = wanted, 1, 0
        if self.clock == "graph":
            # Every slot is in the graph, so that each replay goes through all of them.
            count = len(self.slots)
            self.calls = count * max(1, min(MAX_GRAPH_CALLS, wanted) // count)
            self._capture()
        if self._replay:
            self.replays = max(1, round(target / max(self._warm_up_graph() * self.calls, 1e-7)))
        else:
            self.calls = wanted

    def _warm_up(self) -> float:
        """Calls the slots (on the CPU one of them) twice and returns the seconds a call takes the second time."""
        slots = self.slots if self.device.kind == "cuda" else self.slots[:1]
        seconds = 0.0
        for _ in range(2):
            self.device.synchronize()
            began = _now()
            for slot in slots:
                slot()
            self.device.synchronize()
            seconds = (_now() - began) * 1e-9 / len(slots)
        return seconds

    def _capture(self) -> None:
        def work():
            for i in range(self.calls):
                self.slots[i % len(self.slots)]()

        try:
            self._replay = self.device.capture(work)
        except Exception as error:  # an implementation that cannot be captured is timed by events, and the table says so
            self.device.synchronize()
            self.note = f"not captured: {report.first_line(error)}"
            self.clock, self._replay = "events", None

    def _warm_up_graph(self) -> float:
        self._replay()
        self.device.synchronize()
        began = _now()
        self._replay()
        self.device.synchronize()
        return (_now() - began) * 1e-9 / self.calls

    def launch(self) -> None:
        """The work of a sample, without the clock."""
        if self._replay:
            for _ in range(self.replays):
                self._replay()
            return
        slots, count, begin = self.slots, len(self.slots), self._next
        for i in range(begin, begin + self.calls):
            slots[i % count]()
        self._next = (begin + self.calls) % count

    @property
    def launches(self) -> int:
        """Calls of the implementation that one sample holds."""
        return self.calls * self.replays

    def sample(self) -> float:
        """Seconds a call, over one sample."""
        device = self.device
        if self.clock == "host clock":
            began = _now()
            self.launch()
            device.synchronize()
            return (_now() - began) * 1e-9 / self.launches
        device.synchronize()
        first, last = device.event(), device.event()
        device.record(first)
        self.launch()
        device.record(last)
        seconds = device.seconds_between(first, last) / self.launches
        device.synchronize()
        return seconds


def slots_for_cold(bytes_a_call: int, device: Cpu | Cuda, memory_limit: float = 8e9) -> int:
    """How many copies of a problem's operands exceed five times the last-level cache: at least 2."""
    wanted = -(-5 * device.cache_bytes // max(bytes_a_call, 1))
    return int(max(2, min(wanted, memory_limit // max(bytes_a_call, 1), 512)))
