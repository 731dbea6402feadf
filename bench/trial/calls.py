"""The worker's side of a duel: one implementation, called with memory that the judge fills, reads and times.

Everything here shares its process with the candidate and may be read or rewritten by it. So nothing here knows an
expected result, and nothing that it replies counts but admissions of failure: the judge looks at the memory, and at its
own clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from bench import report
from bench.implementations import named
from bench.implementations.implementation import Implementation
from bench.machine import device as devices
from bench.machine.device import Cpu, Cuda
from bench.problems import Case
from bench.problems.memory import Block, address_of
from bench.problems.operands import Arrays, WrongResult
from bench.problems.operations import arrays_of
from bench.trial import processes, shared

_now = time.perf_counter
MAX_GRAPH_CALLS = 1024


class Session:
    """The state of one worker between the judge's calls."""

    def __init__(self, device: Cpu | Cuda):
        self.device = device
        self.implementation: Any = None
        self.slots: list[Slot] = []
        self.regions: list[Region] = []
        self.trials: list[tuple[Slot, list[Region]]] = []
        self.replay: Callable[[], None] | None = None


class Region:
    """Memory of the judge as this process uses it. Host memory behind a GPU's implementation has a mirror on the device,
    which ``load`` and ``store`` bring up to date: only where device memory cannot be shared."""

    def __init__(self, description: dict[str, Any], fd: int | None, device: Cpu | Cuda):
        self.seen = shared.attach(description, fd, device)
        self.writable = description.get("writable", True)
        self.mirrored = device.kind == "cuda" and description["kind"] == "host"
        self.raw = Block(len(self.seen), device, guard=0) if self.mirrored else None
        self.device = device

    def bytes(self) -> Any:
        return self.raw.inside if self.raw else self.seen

    def load(self) -> None:
        if self.raw:
            self.raw.fill(self.seen)

    def store(self) -> None:
        if self.raw and self.writable:
            self.seen[:] = self.raw.host_bytes()


_kept: list[Session] = []


def probe(region: dict, tell: Callable[[Any], None]) -> bool:
    """Whether this process can open device memory of the judge."""
    shared.attach(region, None, devices.open_device("cuda"))
    return True


def load(name: str, device: str, arrays: str | None, role: str, tell: Callable[[Any], None]) -> dict[str, Any]:
    """Opens the implementation that `name` stands for; a second call replaces it. -> its library."""
    if not _kept:
        _kept.append(Session(devices.open_device(device)))
    leave(tell)
    me = _kept[0]
    me.implementation = named.open_implementation(name, me.device, arrays, role)
    return {"library": me.implementation.library}


def refuses(case: str, tell: Callable[[Any], None]) -> str | None:
    """Why it cannot do the problem; None when it can try."""
    implementation, problem = _kept[0].implementation, Case.parse(case)
    if problem.operation not in implementation.operations:
        return f"no {problem.operation}"
    return implementation.refuses(problem) or implementation.refuses_trials(problem)


def trial(case: str, regions: list[dict], slot: dict[str, list], tell: Callable[[Any], None], fds: list[int] = ()) -> None:
    """One call in memory of its own, which stays; what it returned is copied to operands result_... on its stream."""
    me = _kept[0]
    with me.device.working():
        attached = _attach(regions, list(fds), me.device)
        held = Slot(me, Case.parse(case), attached, slot, "result_")
        me.trials.append((held, attached))
        for region in attached:
            region.load()
        held.bind()()
        if me.device.kind == "cuda":
            # Its own stream alone: what still runs elsewhere is late, and was not copied.
            me.device.wait_for_stream()
        for region in attached:
            region.store()


def prepare(case: str, regions: list[dict], slots: list[dict[str, list]], kept: bool, tell: Callable[[Any], None], fds: list[int] = ()) -> None:
    """Attaches the slots of timed calls. `kept`: results are to be found in each slot's outputs; else they are
    dropped, as those of a baseline are."""
    me = _kept[0]
    me.regions = _attach(regions, list(fds), me.device)
    me.slots = [Slot(me, Case.parse(case), me.regions, slot, "" if kept else None) for slot in slots]


def arrange(calls: int, tell: Callable[[Any], None]) -> dict[str, Any]:
    """Makes ready for samples of that many calls: on a GPU as a graph of them where it can be. -> {clock, note, seconds
    of a call}."""
    me = _kept[0]
    device, implementation, note = me.device, me.implementation, None
    with device.working():
        slots = me.slots[:calls]
        for region in me.regions:
            region.load()
        for slot in slots:
            slot.bound = slot.bind()
        _call_each(slots)
        device.synchronize()
        seconds = _median_call(slots[0], device)
        me.replay = None
        if device.kind == "cuda" and implementation.timing == "graph" and calls <= MAX_GRAPH_CALLS:
            try:
                me.replay = device.capture(lambda: _call_each(slots))
            except Exception as error:  # what cannot be captured is called, and the table says so
                device.synchronize()
                note = f"not captured: {report.first_line(error)}"
    return {"clock": "graph" if me.replay else "calls", "note": note, "seconds": seconds}


def _call_each(slots: list[Slot]) -> None:
    for slot in slots:
        slot.bound()


def _median_call(slot: Slot, device: Cpu | Cuda) -> float:
    """The time of a call here, over a few in a row: how many make a sample follows from it, nothing else."""
    taken: list[float] = []
    while len(taken) < 3 or (sum(taken) < 0.03 and len(taken) < 50):
        began = _now()
        slot.bound()
        device.synchronize()
        taken.append(_now() - began)
    return float(np.median(taken))


def steps(calls: int, tell: Callable[[Any], None]) -> None:
    """Calls slots 0 to `calls` - 1 once each, and stands still before the first and after each: the judge writes a slot's
    inputs meanwhile, and takes the time."""
    slots = _kept[0].slots[:calls]
    processes.stand_still()
    for slot in slots:
        slot.call()
        processes.stand_still()


def idle_steps(calls: int, tell: Callable[[Any], None]) -> None:
    """The waits of ``steps`` without the calls."""
    for _ in range(calls + 1):
        processes.stand_still()


def sample(calls: int, tell: Callable[[Any], None]) -> float:
    """Calls slots 0 to `calls` - 1 once each and waits for the whole device. -> seconds, by this process's clock."""
    me = _kept[0]
    with me.device.working():
        began = _now()
        if me.replay:
            me.replay()
        else:
            for slot in me.slots[:calls]:
                slot.call()
        me.device.synchronize()
        return _now() - began


def transfer(direction: str, tell: Callable[[Any], None]) -> None:
    """Brings mirrored memory up to date before ("load") or after ("store") a sample, off the clock."""
    for region in _kept[0].regions:
        getattr(region, direction)()


def leave(tell: Callable[[Any], None]) -> None:
    """Lets go of the memory of the last problem."""
    me = _kept[0]
    me.device.synchronize()
    regions = me.regions + [region for _, attached in me.trials for region in attached]
    me.slots, me.regions, me.trials, me.replay = [], [], [], None
    for region in regions:
        shared.detach(region.seen)


class Slot:
    """One binding of the implementation: its arrays, and before the names of which outputs what it returns is to be found
    (``prefix``; None: nowhere)."""

    def __init__(self, me: Session, case: Case, regions: list[Region], tensors: dict[str, list], prefix: str | None):
        self.implementation: Implementation = me.implementation
        blocks, shapes = {}, {}
        for name, (region, begin, nbytes, shape, dtype) in tensors.items():
            if region is None:
                blocks[name] = Block(nbytes, me.device, guard=0)
            else:
                blocks[name] = Block.over(regions[region].bytes(), begin, nbytes, me.device)
            shapes[name] = (tuple(shape), dtype)
        self.arrays = arrays_of(case, me.device, blocks, shapes)
        self.prefix = prefix
        self.bound: Callable[[], Any] = self.bind
        # Arrays of JAX are made anew for each call where it does not share the judge's memory, but copied it.
        copied = self.implementation.library == "jax" and (self.implementation.rearranges(case) or self.arrays.copied("jax"))
        self.renewed = copied and prefix == ""

    def bind(self) -> Callable[[], Any]:
        call, implementation, prefix, arrays = self.implementation.bind(self.arrays), self.implementation, self.prefix, self.arrays
        targets = None if prefix is None else [prefix + name for name in arrays.outputs]

        def real() -> Any:
            result = call()
            if implementation.library == "jax" and hasattr(result, "block_until_ready"):
                result.block_until_ready()
            if targets:
                results = (result,) if len(targets) == 1 else tuple(result)
                if len(results) != len(targets):
                    raise WrongResult(f"{len(results)} results were returned, the problem asks for {', '.join(arrays.outputs)}")
                for one, target in zip(results, targets, strict=True):
                    deliver(one, arrays, target, implementation.library)
            return result

        return real

    def call(self) -> Any:
        if self.renewed:
            self.arrays.renew()
            self.bound = self.bind()
        return self.bound()


def deliver(result: Any, arrays: Arrays, target: str, library: str) -> None:
    """Makes sure that `result` is an array of `library` and lies in the operand `target`, where the judge reads it."""
    require_kind(result, library)
    shape, dtype = arrays.shapes[target]
    if tuple(result.shape) != shape:
        raise WrongResult(f"the result has shape {tuple(result.shape)}, the problem asks for {shape}")
    given = str(result.dtype).rpartition(".")[2]
    if given != dtype:
        raise WrongResult(f"the result is {given}, the problem asks for {dtype}")
    holder = library
    if library == "jax":
        holder = "numpy" if arrays.device.kind == "cpu" else arrays.device.default_arrays
    place = arrays.array(target, holder)
    if holder == library and address_of(result) == address_of(place) and _steps(result) == _steps(place):
        return
    if library == "numpy":
        np.copyto(place, result)
    elif library == "torch":
        place.copy_(result.detach())
    elif library == "cupy":
        place[...] = result
    elif holder == "numpy":
        np.copyto(place, np.asarray(result))
    elif holder == "torch":
        place.copy_(arrays.device.torch.from_dlpack(result))
    else:
        place[...] = arrays.device.cupy.from_dlpack(result)


def require_kind(result: Any, library: str) -> None:
    """WrongResult unless `result` is an array of `library` itself: anything else may do its work when it is looked at."""
    kind = type(result)
    if library == "numpy":
        right = kind is np.ndarray
    elif library == "jax":
        right = kind.__module__.partition(".")[0] in ("jax", "jaxlib") and hasattr(kind, "unsafe_buffer_pointer")
    elif library == "torch":
        import torch

        right = kind in (torch.Tensor, torch.nn.Parameter)
    else:
        import cupy

        right = kind is cupy.ndarray
    if not right:
        raise WrongResult(f"the result is a {kind.__module__}.{kind.__qualname__}, not an array of {library}")


def _steps(array: Any) -> tuple[int, ...]:
    return tuple(array.stride()) if hasattr(array, "stride") else tuple(array.strides)


def _attach(descriptions: list[dict], fds: list[int], device: Cpu | Cuda) -> list[Region]:
    try:
        return [Region(d, fds.pop(0) if d["kind"] == "host" else None, device) for d in descriptions]
    except OSError as error:
        raise report.UsageError(f"memory cannot be shared: {error}") from error
