"""The common parts of the kernels' protocol models: buffers that are filled and read, and wgmma groups.

Assumption of the wgmma kernels, which PTX does not promise and CUTLASS and FlashAttention-3 share: a wgmma group that
one warp has seen complete was issued by all four warps of the warpgroup and has read its shared operands for all four.
A `TensorCore` for the warpgroup is that assumption, one for each warp is a model without it.
"""

from tests.kernels.models.protocol import Actor, Event, Model


class Buffers:
    """The fills and reads of each use of each buffer. `stages`: uses that a buffer holds at a time."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.stages: dict[str, int] = {}
        self.fills: dict[tuple[str, int], list[tuple[Event, Event]]] = {}  # begins, is there
        self.reads: dict[tuple[str, int], list[tuple[Event, Event]]] = {}  # begins, ends

    def fill(self, buffer: str, use: int, begins: Event, there: Event) -> None:
        self.fills.setdefault((buffer, use), []).append((begins, there))

    def read(self, buffer: str, use: int, begins: Event, ends: Event) -> None:
        self.reads.setdefault((buffer, use), []).append((begins, ends))

    def copy(self, actor: Actor, buffer: str, use: int, landed: str, phase: int, site: str) -> Event:
        """Starts an asynchronous copy, an actor of its own that arrives at `landed` when it is there."""
        name = f"copy of {buffer} {use} by {actor.name}"
        issued = self.model.barrier(f"{name} issued", 1)
        begins = actor.arrive(issued, 0, f"{site}: start copy")
        copy = self.model.actor(name)
        copy.wait(issued, 0, site)
        self.fill(buffer, use, begins, copy.arrive(landed, phase, f"{site}: copy is there"))
        return begins

    def link(self) -> Model:
        """Every read lies between the fills of its use and the next fill of its stage."""
        for (buffer, use), reads in self.reads.items():
            for begins, ends in reads:
                for _, there in self.fills[buffer, use]:
                    self.model.precede(there, begins)
                for refill, _ in self.fills.get((buffer, use + self.stages[buffer]), ()):
                    self.model.precede(ends, refill)
        return self.model


class TensorCore:
    """The wgmma groups of `warps` warps, in order."""

    def __init__(self, buffers: Buffers, name: str, warps: int) -> None:
        self.buffers, self.actor, self.warps = buffers, buffers.model.actor(name), warps
        self.groups = 0

    def group(self, number: int, reads: list[tuple[str, int]], site: str) -> str:
        """Group `number`, whichever warp names it first; returns the barrier at which its warps arrive."""
        name, model = f"{self.actor.name} group {number}", self.buffers.model
        issued, done = model.barrier(f"{name} issued", self.warps), model.barrier(f"{name} done", 1)
        if number == self.groups:
            self.groups += 1
            begins, ends = self.actor.wait(issued, 0, site), self.actor.arrive(done, 0, site)
            for buffer, use in reads:
                self.buffers.read(buffer, use, begins, ends)
        return issued


class Wgmma:
    """One warp's use of a tensor core."""

    def __init__(self, actor: Actor, tensor: TensorCore) -> None:
        self.actor, self.tensor, self.groups = actor, tensor, 0

    def issue(self, reads: list[tuple[str, int]], site: str) -> None:
        """The instructions and wgmma_commit."""
        self.actor.arrive(self.tensor.group(self.groups, reads, site), 0, f"{site}: issue")
        self.groups += 1

    def wait(self, pending: int, site: str) -> None:
        """wgmma_wait<pending>"""
        done = f"{self.tensor.actor.name} group {self.groups - 1 - pending} done"
        self.actor.wait(done, 0, f"{site}: wgmma_wait")
