"""kernels/sm90/fused_backward/turns.cuh as a protocol model: what opens the steps of a CTA, adds dQ and passes turns on.

A tile of keys visits blocks of queries and adds to each after the tile that comes before it in the order of the launch. CTAs
take tiles in that order; which CTA has which of them is the machine's choice.
"""

from dataclasses import dataclass

from tests.kernels.models.protocol import Actor, Event, Model


@dataclass(frozen=True)
class Turns:
    """CTAs whose tiles are numbers of `blocks`, the blocks that each tile visits, both in the order of the launch. Mistakes:
    "not seen" (steps are opened without a wait for `seen`), "not done" (a turn is passed on before dQ is added), "no turn"
    (a step is opened without a wait for its turn), "ahead" (a CTA does its tiles in another order than that in which it took
    them)."""

    blocks: tuple[tuple[int, ...], ...]
    ctas: tuple[tuple[int, ...], ...]
    warps: int = 2  # of each of two warpgroups
    mistakes: frozenset[str] = frozenset()


def turns_model(shape: Turns) -> Model:
    model, blocks = Model(), sorted({block for visited in shape.blocks for block in visited})
    for block in blocks:
        model.barrier(f"turn of {block}", 1)
    added: dict[tuple[int, int], list[Event]] = {}  # (tile, block): the warps' additions
    for number, tiles in enumerate(shape.ctas):
        if "ahead" in shape.mistakes:
            tiles = tiles[::-1]
        _Cta(model, shape, f"cta{number}", tiles, added)
    for block in blocks:
        visitors = [tile for tile, visited in enumerate(shape.blocks) if block in visited]
        for earlier, later in zip(visitors, visitors[1:]):
            for first in added[earlier, block]:
                for second in added[later, block]:
                    model.precede(first, second)
    return model


class _Cta:
    def __init__(self, model: Model, shape: Turns, name: str, tiles: tuple[int, ...], added: dict[tuple[int, int], list[Event]]):
        self.shape, self.name, self.added = shape, name, added
        consumers = [f"{name}.wg{g}.warp{w}" for g in range(2) for w in range(shape.warps)]
        for at in range(2):
            for kind, count in (("open", 1), ("done", len(consumers)), ("seen", 1), ("ds_full", len(consumers))):
                model.barrier(f"{name}.{kind}[{at}]", count, parity=True)
        self.steps = [(tile, block) for tile in tiles for block in shape.blocks[tile]]
        self.reads: list[list[Event]] = [[] for _ in self.steps]  # of what a step's opening says
        self.written: list[Event] = []
        opener, passer = model.actor(f"{name}.opener"), model.actor(f"{name}.passer")
        for step in range(len(self.steps)):
            self.open(opener, step)
            self.pass_on(passer, step)
        for consumer in consumers:
            self.consume(model.actor(consumer))
        for step, read in enumerate(self.reads):
            for event in read:
                model.precede(self.written[step], event)
                if step + 2 < len(self.steps):
                    model.precede(event, self.written[step + 2])

    def turn(self, step: int) -> tuple[str, int]:
        """The block's barrier, and how many tiles add to it before the step's."""
        tile, block = self.steps[step]
        return f"turn of {block}", sum(block in visited for visited in self.shape.blocks[:tile])

    def open(self, actor: Actor, step: int) -> None:
        barrier, before = self.turn(step)
        if before and "no turn" not in self.shape.mistakes:
            actor.wait(barrier, before - 1, f"step {step}: wait for the turn")
        if step >= 2 and "not seen" not in self.shape.mistakes:
            actor.wait(f"{self.name}.seen[{step % 2}]", step // 2 - 1, f"step {step}: wait for seen")
        self.written.append(actor.step(f"step {step}: say which block"))
        actor.arrive(f"{self.name}.open[{step % 2}]", step // 2, f"step {step}: open")

    def pass_on(self, actor: Actor, step: int) -> None:
        barrier, before = self.turn(step)
        actor.wait(f"{self.name}.open[{step % 2}]", step // 2, f"step {step}: wait for open")
        self.reads[step].append(actor.step(f"step {step}: which block to pass on"))
        if "not done" not in self.shape.mistakes:
            actor.wait(f"{self.name}.done[{step % 2}]", step // 2, f"step {step}: wait for done")
        actor.arrive(f"{self.name}.seen[{step % 2}]", step // 2, f"step {step}: seen")
        actor.arrive(barrier, before, f"step {step}: pass the turn on")

    def consume(self, actor: Actor) -> None:
        for step, place in enumerate(self.steps):
            at, phase = step % 2, step // 2
            actor.arrive(f"{self.name}.ds_full[{at}]", phase, f"step {step}: dT is stored")
            actor.wait(f"{self.name}.ds_full[{at}]", phase, f"step {step}: wait for dT of all")
            actor.wait(f"{self.name}.open[{at}]", phase, f"step {step}: wait for open")
            self.reads[step].append(actor.step(f"step {step}: which block to add to"))
            self.added.setdefault(place, []).append(actor.step(f"step {step}: add dQ"))
            actor.arrive(f"{self.name}.done[{at}]", phase, f"step {step}: done")
