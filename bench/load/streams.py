"""The load of ``bench soak``, inside the worker: one kernel called on many streams at once, beside other work.

A ``Stream`` is never idle for long: it queues a burst of one kind of work, waits for it and draws the
next. A thread drives a few streams. Every EVERY-th result is compared on its stream with what the same call gave alone on an
idle device, bit for bit unless the backend knows better; the output is filled with NaN before. Nothing here knows an array
library: that is the backend's business (``bench.load.soak_torch``; the tests have one that needs no GPU).
"""

from __future__ import annotations

import importlib
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench import problems

EVERY = 11
LONGEST_BURST = 50
# A burst alone should end within this, so that dozens of them on one device stay far below the watchdog's patience.
BURST_SECONDS = 0.03
# Attention calls in one graph, and problems that graphs are made of.
GRAPH_CALLS = 5
GRAPHS = 6
# The device's memory is read the first time after this share of the time, or these seconds: pools are filled by then.
WARM_SHARE, WARM_MOST = 0.2, 5.0
# Of the problems. A kernel of the backward pass takes those of attention too.
OPERATIONS = ("attention", "serving", "backward")
LOADS = ("copies", "elementwise", "products", "allocations", "graphs")
PAUSE = 2e-4
PULSE = 0.25


@dataclass
class Problem:
    """One call of the kernel, and its results alone."""

    case: problems.Case
    arguments: Any
    lse: bool
    expected: Any
    seconds: float

    def burst(self) -> int:
        return max(1, min(LONGEST_BURST, int(BURST_SECONDS / max(self.seconds, 1e-9))))


@dataclass
class Work:
    """One thing that a stream does again and again: `call` queues it on the current stream and returns its results."""

    name: str
    call: Callable[[], Any]
    burst: int
    calls: int = 0  #: of the kernel in one; 0: a load beside it
    expected: Any = None
    before: Callable[[], None] = lambda: None  #: ahead of a call whose results are compared
    after: Callable[[Any], None] = lambda results: None  #: behind every call


class Stream:
    """A stream that draws from `works`; how it stands is read by another thread."""

    def __init__(self, name: str, works: list[Work], backend: Any, handle: Any = None):
        self.name, self.works, self.backend = name, works, backend
        self.handle, self.event, self.tally = handle or backend.stream(), backend.event(), backend.tally()
        self.random = random.Random(name)
        self.work = works[0]
        self.steps = self.made = self.compared = self.queued = self.told = 0
        self.running = self.ended = False
        self.calls, self.wrong = ({work.name: 0 for work in works} for _ in range(2))

    def queue(self) -> None:
        """Queues the next burst."""
        work = self.work = self.random.choice(self.works)
        count = work.burst if self.random.random() < 0.5 else self.random.randint(1, work.burst)
        self.queued, self.steps = count * max(work.calls, 1), self.steps + 1
        with self.backend.on(self.handle):
            for _ in range(count):
                compare = work.expected is not None and self.made % EVERY == 0
                self.made += 1
                if compare:
                    work.before()
                results = work.call()
                if compare:
                    self.tally.add(results, work.expected)
                    self.compared += 1
                work.after(results)
            self.tally.send()
            self.backend.record(self.event, self.handle)
        self.running = True

    def settle(self) -> bool:
        """Whether nothing is under way; a burst that has just ended is counted."""
        if self.running and self.backend.done(self.event):
            wrong, self.told = self.tally.value() - self.told, self.tally.value()
            self.wrong[self.work.name] += wrong
            self.calls[self.work.name] += self.queued
            self.running, self.queued, self.steps = False, 0, self.steps + 1
        return not self.running

    def state(self) -> dict[str, Any]:
        return {
            "stream": self.name, "work": self.work.name, "load": not self.work.calls, "steps": self.steps,
            "calls": sum(self.calls.values()), "queued": self.queued, "compared": self.compared,
            "wrong": {name: count for name, count in self.wrong.items() if count}, "ended": self.ended,
        }  # fmt: skip


# ---- what the streams do ----


def alone(kernel: str, case: problems.Case, lse: bool, backend: Any, slowest: float) -> tuple[Problem | None, str, bool]:
    """(the problem, why it is left out, whether its results alone are wrong).

    Two calls on an idle device must agree and hold no NaN, which is what their output held before.
    """
    arguments = backend.problem(case)
    try:
        first = backend.attend(kernel, arguments, None, lse)
    except backend.REFUSALS as error:
        return None, str(error), False
    backend.synchronize()
    expected = backend.kept(first)
    outputs = backend.outputs(case, lse, backend.space(backend.bytes_of(case)))
    backend.poison(outputs)
    backend.synchronize()
    began = time.perf_counter()
    again = backend.attend(kernel, arguments, outputs, lse)
    backend.synchronize()
    seconds = time.perf_counter() - began
    tally = backend.tally()
    tally.add(again, expected)
    tally.send()
    backend.synchronize()
    wrong = bool(tally.value()) or not (_has_nan(case) or backend.written(again))
    if seconds > slowest:
        return None, f"a call takes {seconds:.2g} s alone: more than {slowest:g} s", wrong
    return Problem(case, arguments, lse, expected, seconds), "", wrong


def _has_nan(case: problems.Case) -> bool:
    return isinstance(case, problems.Case) and case.values.startswith("nan")


def into(kernel: str, problem: Problem, backend: Any, space: Any) -> Work:
    """Calls with ``out=`` in `space`, which other calls of the stream share."""
    outputs = backend.outputs(problem.case, problem.lse, space)
    return Work(
        str(problem.case), lambda: backend.attend(kernel, problem.arguments, outputs, problem.lse), problem.burst(), 1,
        problem.expected, lambda: backend.poison(outputs),
    )  # fmt: skip


def anew(kernel: str, problem: Problem, backend: Any) -> Work:
    """Calls that allocate their result, whose memory the next one gets: it is filled with NaN first."""
    return Work(
        str(problem.case), lambda: backend.attend(kernel, problem.arguments, None, problem.lse), problem.burst(), 1,
        problem.expected, after=backend.poison,
    )  # fmt: skip


def replayed(kernel: str, problem: Problem, backend: Any, handle: Any) -> Work:
    """GRAPH_CALLS calls captured into a graph."""
    outputs = backend.outputs(problem.case, problem.lse, backend.space(backend.bytes_of(problem.case)))

    def several():
        for _ in range(GRAPH_CALLS):
            backend.attend(kernel, problem.arguments, outputs, problem.lse)

    replay = backend.capture(several, handle)

    def call():
        replay()
        return outputs

    burst = max(1, problem.burst() // GRAPH_CALLS)
    return Work(str(problem.case), call, burst, GRAPH_CALLS, problem.expected, lambda: backend.poison(outputs))


def crews(kernel: str, found: list[Problem], threads: int, streams: int, loads: list[str], backend: Any) -> list[list[Stream]]:
    """The streams that each thread drives: `threads` times `streams` of the kernel, and one for each load beside it."""
    largest = max(backend.bytes_of(problem.case) for problem in found)
    made: list[list[Stream]] = []
    for thread in range(1, threads + 1):
        made.append([])
        for number in range(1, streams + 1):
            space = backend.space(largest)
            works = [work for p in found for work in (into(kernel, p, backend, space), anew(kernel, p, backend))]
            made[-1].append(Stream(f"thread {thread}, stream {number}", works, backend))
    for load in loads:
        handle = backend.stream()
        if load == "graphs":
            works = [replayed(kernel, p, backend, handle) for p in found[:: max(1, len(found) // GRAPHS)][:GRAPHS]]
        else:
            works = [Work(load, *backend.load(load))]
        made.append([Stream(load, works, backend, handle)])
    return made


# ---- running them ----


def drive(streams: list[Stream], over: threading.Event, pause: float = PAUSE) -> None:
    """Keeps the streams busy until `over`, then waits for what they have queued."""
    while not all(stream.ended for stream in streams):
        for stream in streams:
            if stream.settle():
                stream.ended = over.is_set()
                if not stream.ended:
                    stream.queue()
        time.sleep(pause)


def run(made: list[list[Stream]], seconds: float, tell: Callable[[Any], None]) -> None:
    """Drives each crew in a thread for `seconds` and tells how the streams stand. Raises what one of them raised."""
    over, raised = threading.Event(), []

    def work(streams: list[Stream]) -> None:
        try:
            drive(streams, over)
        except BaseException as error:
            where = "; ".join(f"{stream.name} ({stream.work.name})" for stream in streams)
            raised.append(RuntimeError(f"{where}: {type(error).__name__}: {error}"))
            raised[-1].__cause__ = error
            over.set()

    every = [stream for streams in made for stream in streams]
    for stream in every:
        stream.ended = False
    threads = [threading.Thread(target=work, args=(streams,), daemon=True) for streams in made]
    # Told before any thread starts: should this process die, it is known to have been under load.
    tell({"streams": [stream.state() for stream in every]})
    ends = time.monotonic() + seconds
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        tell({"streams": [stream.state() for stream in every]})
        time.sleep(min(PULSE, max(0.01, ends - time.monotonic())))
        if time.monotonic() >= ends:
            over.set()
    tell({"streams": [stream.state() for stream in every]})
    if raised:
        raise raised[0]


def soak(
    kernel: str, cases: list[str], seconds: float, threads: int, streams: int, loads: list[str], slowest: float,
    backend: str, tell: Callable[[Any], None],
) -> dict[str, Any]:  # fmt: skip
    """Soaks one kernel on those of `cases` that it takes; `backend` is ``module:class``."""
    module, _, name = backend.partition(":")
    device = getattr(importlib.import_module(module), name)()
    found: list[Problem] = []
    result: dict[str, Any] = {"left_out": {}, "wrong": {}, "loads": {}, "cases": {}}
    for number, line in enumerate(cases):
        tell({"step": f"{line}, alone"})
        problem, why, wrong = alone(kernel, problems.parse(line, OPERATIONS), number % 3 == 1, device, slowest)
        if wrong:
            result["wrong"][f"{line}, alone"] = 1
        if problem is None:
            result["left_out"][line] = why
        else:
            found.append(problem)
    if not found:
        return result | {"streams": []}
    tell({"step": "queues, buffers and graphs"})
    made = crews(kernel, found, threads, streams, loads, device)
    device.synchronize()
    warm = min(WARM_MOST, WARM_SHARE * seconds)
    run(made, warm, tell)
    tell({"step": "reading the device's memory"})
    before = device.memory()
    run(made, seconds - warm, tell)
    tell({"step": "reading the device's memory"})
    result |= {"memory_before": before, "memory_after": device.memory()}
    for problem in found:
        for what in device.damage(problem.arguments):
            result["wrong"][f"{problem.case}, {what}"] = 1
    every = [stream for crew in made for stream in crew]
    calls: Counter[str] = Counter()
    for stream in every:
        if stream.work.calls:
            calls.update(stream.calls)
        else:
            result["loads"][stream.name] = sum(stream.calls.values())
    return result | {"cases": {str(p.case): calls[str(p.case)] for p in found}, "streams": [stream.state() for stream in every]}
