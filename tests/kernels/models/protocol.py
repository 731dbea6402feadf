"""A model of barrier protocols between warps, and three ways to look for a schedule that breaks one.

A protocol is a set of actors (warps, lanes, copies in flight, tensor cores), each with a straight list of operations on
barriers. A barrier counts arrivals and completes a phase with each full count. Two kinds:

- `parity`: an mbarrier. Its waiter knows but the parity of the phase that it waits for and passes while the barrier is
  in a phase of the other parity. A waiter of phase n that finds phase n + 1 complete is two phases behind: it reads its
  own parity again and waits for ever, or, three behind, takes one phase for another. A waiter of phase n passes too
  early while phase n - 1 is not complete.
- exact: a named barrier, __syncthreads(), a barrier of the cluster, the end of a copy or of a wgmma group. The hardware
  knows whose generation a waiter belongs to: it can be late, not behind.

The bytes that TMA or st.async deliver are one more arrival. Delays need no operation of their own: any actor may pause
before any operation for as long as others can move. What is searched for, at every state:

- a waiter two phases behind or too early;
- an arrival in another phase than its own (a stage released twice, or before its turn);
- an event before one that has to precede it (`precede`: a stage refilled before it is read, read before it is filled);
- a state in which nobody can move and somebody is not done.

`slowest_actors` is exact. Guards are monotone: until the first violation a wait that can pass stays passable, arrivals
only add up, and no actor chooses. So let each actor in turn be the slowest, moving one operation when nothing else can
move at all. Take any schedule that breaks the protocol and the operation of its actor A that came too late: before that
operation the slowest-A schedule takes every step that the other one took, by induction over it, and meets the same
violation, or one before. Too early is too late for the one whose arrival is missing. One run an actor decides over all
schedules. `all_schedules` and `random_schedules` do not rely on this: they take waits by parity, as the hardware does,
and try orders.
"""

import random
from dataclasses import dataclass, field
from typing import Literal, NamedTuple


class Op(NamedTuple):
    """One operation. `phase`: which phase of the barrier the wait is meant for or the arrival belongs to."""

    kind: Literal["wait", "arrive", "step"]
    barrier: str
    phase: int
    site: str


class Event(NamedTuple):
    """Operation number `place` of an actor."""

    actor: str
    place: int


@dataclass
class Violation:
    """A fault, its place, and the operations that led there."""

    kind: Literal["behind", "early", "wrong phase", "order", "deadlock"]
    actor: str
    op: Op
    detail: str
    schedule: list[str]

    def __str__(self) -> str:
        return f"{self.kind}: {self.actor} at '{self.op.site}' ({self.op.barrier}): {self.detail}"


@dataclass
class Model:
    """Barriers, the actors' operations, and which event must precede which."""

    counts: dict[str, int] = field(default_factory=dict)
    parity: set[str] = field(default_factory=set)
    programs: dict[str, list[Op]] = field(default_factory=dict)
    before: dict[Event, list[Event]] = field(default_factory=dict)

    def barrier(self, name: str, count: int, parity: bool = False) -> str:
        """A barrier whose phases take `count` arrivals; naming it again changes nothing."""
        assert self.counts.setdefault(name, count) == count, name
        if parity:
            self.parity.add(name)
        return name

    def actor(self, name: str) -> "Actor":
        return Actor(self, name)

    def precede(self, first: Event, second: Event) -> None:
        """`second` must not happen before `first`."""
        self.before.setdefault(second, []).append(first)


class Actor:
    """Writes the program of one actor."""

    def __init__(self, model: Model, name: str) -> None:
        self.model, self.name = model, name
        self.ops = model.programs.setdefault(name, [])
        self.uses: dict[str, int] = {}

    def _add(self, kind: Literal["wait", "arrive", "step"], barrier: str, phase: int, site: str) -> Event:
        assert kind == "step" or barrier in self.model.counts, barrier
        self.ops.append(Op(kind, barrier, phase, site))
        return Event(self.name, len(self.ops) - 1)

    def wait(self, barrier: str, phase: int, site: str) -> Event:
        return self._add("wait", barrier, phase, site)

    def arrive(self, barrier: str, phase: int, site: str) -> Event:
        return self._add("arrive", barrier, phase, site)

    def step(self, site: str) -> Event:
        """Something that takes time and meets nobody: an epilogue, a read of shared memory."""
        return self._add("step", "", 0, site)

    def join_arrive(self, barrier: str, site: str) -> int:
        """bar.arrive: an arrival at this actor's next generation of an exact barrier, which is returned."""
        generation = self.uses.get(barrier, 0)
        self.uses[barrier] = generation + 1
        self.arrive(barrier, generation, site)
        return generation

    def join(self, barrier: str, site: str) -> Event:
        """bar.sync: arrives and waits for the generation to end."""
        return self.wait(barrier, self.join_arrive(barrier, site), site)


class Ring:
    """Position in a ring of stages; the n-th use of a stage is the phase n of its barriers."""

    def __init__(self, stages: int) -> None:
        self.stages, self.use = stages, 0

    @property
    def stage(self) -> int:
        return self.use % self.stages

    @property
    def phase(self) -> int:
        return self.use // self.stages

    def advance(self) -> None:
        self.use += 1


State = Literal["blocked", "ready", "done"]


class Run:
    """One execution: where each actor stands and how often each barrier was arrived at. With `trusting`, waits go by
    parity alone and nothing is checked, as on the hardware."""

    def __init__(self, model: Model, trusting: bool = False) -> None:
        self.model, self.trusting = model, trusting
        self.names = list(model.programs)
        self.programs = list(model.programs.values())
        self.place = [0] * len(self.names)
        self.arrivals = dict.fromkeys(model.counts, 0)
        self.taken: list[tuple[int, int]] = []
        self.asleep: dict[str, list[int]] = {}
        index = {name: i for i, name in enumerate(self.names)}
        self.before = {
            (index[second.actor], second.place): [(index[first.actor], first.place) for first in firsts]
            for second, firsts in model.before.items()
        }

    def violation(self, kind: Literal["behind", "early", "wrong phase", "order", "deadlock"], actor: int, detail: str):
        op = self.programs[actor][self.place[actor]]
        steps = ((self.names[i], self.programs[i][place]) for i, place in self.taken)
        schedule = [f"{name}: {step.kind} {step.barrier} ({step.site})" for name, step in steps]
        return Violation(kind, self.names[actor], op, detail, schedule)

    def look(self, actor: int) -> "State | Violation":
        """The state, or the violation, that an actor's next operation would meet."""
        program, place = self.programs[actor], self.place[actor]
        if place == len(program):
            return "done"
        kind, barrier, phase, _ = program[place]
        if kind == "step":
            return self._ordered(actor)
        complete = self.arrivals[barrier] // self.model.counts[barrier]
        if kind == "arrive":
            if complete != phase and not self.trusting:
                return self.violation("wrong phase", actor, f"arrives for phase {phase} in phase {complete}")
            return self._ordered(actor)
        if barrier not in self.model.parity:
            return self._ordered(actor) if complete > phase else "blocked"
        if not self.trusting:
            if complete >= phase + 2:
                return self.violation("behind", actor, f"waits for phase {phase}, and {complete} are complete")
            if complete <= phase - 1:
                return self.violation("early", actor, f"waits for phase {phase}, and {complete} are complete")
        return self._ordered(actor) if (complete - phase) % 2 else "blocked"

    def _ordered(self, actor: int) -> "State | Violation":
        if not self.trusting:
            for other, place in self.before.get((actor, self.place[actor]), ()):
                if self.place[other] <= place:
                    site = self.programs[other][place].site
                    return self.violation("order", actor, f"before {self.names[other]} at '{site}'")
        return "ready"

    def take(self, actor: int) -> list[int]:
        """The actor's next operation, which must be ready. Returns whom it wakes (see settle)."""
        place = self.place[actor]
        kind, barrier, _, _ = self.programs[actor][place]
        self.place[actor] = place + 1
        self.taken.append((actor, place))
        if kind != "arrive":
            return []
        self.arrivals[barrier] += 1
        return self.asleep.pop(barrier, [])

    def unfinished(self) -> int | None:
        """An actor that is not done."""
        return next((i for i, program in enumerate(self.programs) if self.place[i] < len(program)), None)

    def stuck(self) -> Violation | None:
        """The verdict where nobody can move."""
        actor = self.unfinished()
        return None if actor is None else self.violation("deadlock", actor, "nobody can move")

    def settle(self, awake: list[int]) -> Violation | None:
        """Those that `awake` names, and whom they wake, go as far as they can. Who is blocked sleeps at the barrier."""
        while awake:
            actor = awake.pop()
            while True:
                state = self.look(actor)
                if isinstance(state, Violation):
                    return state
                if state == "ready":
                    awake += self.take(actor)
                    continue
                if state == "blocked":
                    self.asleep.setdefault(self.programs[actor][self.place[actor]].barrier, []).append(actor)
                break
        return None


def slowest_actors(model: Model, among: tuple[str, ...] | None = None) -> Violation | None:
    """Each actor (`among`: those of these names) in turn moves only when no other can. Exact: see above."""
    names = list(model.programs)
    for slow in range(len(names)):
        if among is not None and names[slow] not in among:
            continue
        run = Run(model)
        awake = [actor for actor in range(len(names)) if actor != slow]
        while True:
            found = run.settle(awake)
            if found:
                return found
            state = run.look(slow)
            if isinstance(state, Violation):
                return state
            if state != "ready":
                break
            awake = run.take(slow)
        found = run.stuck()
        if found:
            return found
    return None


def random_schedules(model: Model, runs: int, seed: int, trusting: bool = False) -> Violation | None:
    """Random orders: each run draws a priority an actor, lowers that of a few on the way, and always moves the highest
    that can move; every other run draws each move anew. With `trusting` it finds nothing but hangs."""
    rng = random.Random(seed)
    for number in range(runs):
        run, uniform = Run(model, trusting), number % 2 == 1
        actors = list(range(len(run.names)))
        rng.shuffle(actors)
        while True:
            if uniform:
                rng.shuffle(actors)
            elif rng.random() < 0.02:
                actors.append(actors.pop(rng.randrange(len(actors))))
            for actor in actors:
                state = run.look(actor)
                if isinstance(state, Violation):
                    return state
                if state == "ready":
                    run.take(actor)
                    break
            else:
                found = run.stuck()
                if found:
                    return found
                break
    return None


class Explored(NamedTuple):
    violation: Violation | None
    states: int
    complete: bool  # every reachable state was seen, or a violation found


def all_schedules(model: Model, limit: int) -> Explored:
    """Every order, up to `limit` states. A state is the actors' places, on which all else depends. Reduction: what
    commutes with all others and cannot itself be in time or late (`_unseen`) is taken as soon as it is ready."""
    run = Run(model)
    unseen = _unseen(run)
    seen: set[tuple[int, ...]] = set()
    stack: list[tuple[list[int], dict[str, int]]] = [(list(run.place), dict(run.arrivals))]
    while stack:
        run.place, run.arrivals = stack.pop()
        run.taken = []
        ready = _settle_unseen(run, unseen)
        if isinstance(ready, Violation):
            return Explored(ready, len(seen), True)
        key = tuple(run.place)
        if key in seen:
            continue
        seen.add(key)
        if len(seen) > limit:
            return Explored(None, len(seen), False)
        if not ready and (found := run.stuck()):
            return Explored(found, len(seen), True)
        place, arrivals = run.place, run.arrivals
        for actor in ready:
            run.place, run.arrivals = list(place), dict(arrivals)
            run.take(actor)
            stack.append((run.place, run.arrivals))
    return Explored(None, len(seen), True)


def _unseen(run: Run) -> set[tuple[int, int]]:
    """Operations that no check looks at: steps, waits on exact barriers, what belongs to the only phase of a barrier,
    and waits whose phase is neither followed by another nor preceded by one; less what `precede` names."""
    model, total = run.model, dict.fromkeys(run.model.counts, 0)
    for op in (op for program in run.programs for op in program if op.kind == "arrive"):
        total[op.barrier] += 1
    single = {name for name, count in model.counts.items() if total[name] <= count}
    named = set(run.before) | {first for firsts in run.before.values() for first in firsts}
    unseen = set()
    for actor, program in enumerate(run.programs):
        for place, (kind, barrier, phase, _) in enumerate(program):
            hidden = kind == "step" or (barrier in single and phase == 0)
            if kind == "wait":
                last = phase <= 0 and total[barrier] // model.counts[barrier] < phase + 2
                hidden = hidden or last or barrier not in model.parity
            if hidden and (actor, place) not in named:
                unseen.add((actor, place))
    return unseen


def _settle_unseen(run: Run, unseen: set[tuple[int, int]]) -> list[int] | Violation:
    """Takes what need not be ordered; returns the actors that are ready then."""
    while True:
        ready, moved = [], False
        for actor in range(len(run.programs)):
            while True:
                state = run.look(actor)
                if isinstance(state, Violation):
                    return state
                if state != "ready":
                    break
                if (actor, run.place[actor]) not in unseen:
                    ready.append(actor)
                    break
                run.take(actor)
                moved = True
        if not moved:
            return ready
