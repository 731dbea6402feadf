"""The ring of tiles of a bias beside that of steps, as a protocol model: load_steps(), weigh_biased(), leave_bias() and
store_bias_tiles() of kernels/sm90/fused_backward.
"""

from dataclasses import dataclass

from tests.kernels.models.protocol import Actor, Event, Model, Ring


@dataclass(frozen=True)
class Bias:
    """A block of so many steps, each with its tiles of the bias. Mistakes: "free early" (a warp lets a tile go that its dS goes to),
    "not done" (a tile is stored before all warps have left dS in it), "free unread" (it is free before the store has read it), "free
    by one" (one warp frees a tile for all)."""

    steps: int
    tiles: int = 2  # of a step
    stages: int = 2  # of steps
    ring: int = 3  # of tiles
    stores: bool = True
    warps: int = 8
    mistakes: frozenset[str] = frozenset()


def bias_model(shape: Bias) -> Model:
    model = Model()
    by_one = not shape.stores and "free by one" in shape.mistakes
    for at in range(shape.stages):
        model.barrier(f"full[{at}]", 1, parity=True)
        model.barrier(f"empty[{at}]", shape.warps, parity=True)
    for at in range(shape.ring):
        model.barrier(f"bias_full[{at}]", 1, parity=True)
        model.barrier(f"bias_done[{at}]", shape.warps, parity=True)
        model.barrier(f"bias_empty[{at}]", 1 if shape.stores or by_one else shape.warps, parity=True)
    loads = _load(model.actor("producer"), shape)
    uses: list[list[Event]] = [[] for _ in loads]  # the last look at each tile
    for warp in range(shape.warps):
        _multiply(model, model.actor(f"warp{warp}"), shape, loads, uses, frees=warp == 0 or not by_one)
    if shape.stores:
        _store(model, model.actor("storer"), shape, loads, uses)
    for tile, load in enumerate(loads):
        for use in uses[tile - shape.ring] if tile >= shape.ring else ():
            model.precede(use, load)
    return model


def _load(actor: Actor, shape: Bias) -> list[Event]:
    """The asking for each tile of the bias."""
    loads, steps, tiles = [], Ring(shape.stages), Ring(shape.ring)
    for step in range(shape.steps):
        if steps.phase:
            actor.wait(f"empty[{steps.stage}]", steps.phase - 1, f"step {step}: wait for room")
        actor.arrive(f"full[{steps.stage}]", steps.phase, f"step {step}: load")
        steps.advance()
        for n in range(shape.tiles):
            if tiles.phase:
                actor.wait(f"bias_empty[{tiles.stage}]", tiles.phase - 1, f"step {step}, bias {n}: wait for room")
            loads.append(actor.step(f"step {step}, bias {n}: say which it is"))
            actor.arrive(f"bias_full[{tiles.stage}]", tiles.phase, f"step {step}, bias {n}: load")
            tiles.advance()
    if shape.stores:
        if tiles.phase:
            actor.wait(f"bias_empty[{tiles.stage}]", tiles.phase - 1, "wait for room to end")
        actor.arrive(f"bias_full[{tiles.stage}]", tiles.phase, "end")
    return loads


def _multiply(model: Model, actor: Actor, shape: Bias, loads: list[Event], uses: list[list[Event]], frees: bool) -> None:
    steps, tiles = Ring(shape.stages), Ring(shape.ring)
    for step in range(shape.steps):
        actor.wait(f"full[{steps.stage}]", steps.phase, f"step {step}: wait for full")
        if step:
            before = step - 1
            actor.arrive(f"empty[{before % shape.stages}]", before // shape.stages, f"step {step}: free the step before")
        for n in range(shape.tiles):
            tile = step * shape.tiles + n
            actor.wait(f"bias_full[{tiles.stage}]", tiles.phase, f"step {step}, bias {n}: wait for it")
            read = actor.step(f"step {step}, bias {n}: read it")
            model.precede(loads[tile], read)
            uses[tile].append(read)
            if not shape.stores and frees:
                actor.arrive(f"bias_empty[{tiles.stage}]", tiles.phase, f"step {step}, bias {n}: free it")
            tiles.advance()
        for n in range(shape.tiles if shape.stores else 0):
            tile = step * shape.tiles + n
            if "free early" in shape.mistakes:
                actor.arrive(f"bias_done[{tile % shape.ring}]", tile // shape.ring, f"step {step}, bias {n}: done")
            uses[tile].append(actor.step(f"step {step}, bias {n}: leave dS"))
            if "free early" not in shape.mistakes:
                actor.arrive(f"bias_done[{tile % shape.ring}]", tile // shape.ring, f"step {step}, bias {n}: done")
        steps.advance()
    if shape.steps:
        last = shape.steps - 1
        actor.arrive(f"empty[{last % shape.stages}]", last // shape.stages, "free the last step")


def _store(model: Model, actor: Actor, shape: Bias, loads: list[Event], uses: list[list[Event]]) -> None:
    for tile in range(len(loads)):
        at, phase = tile % shape.ring, tile // shape.ring
        actor.wait(f"bias_full[{at}]", phase, f"tile {tile}: wait until it is there")
        if "not done" not in shape.mistakes:
            actor.wait(f"bias_done[{at}]", phase, f"tile {tile}: wait for dS")
        if "free unread" in shape.mistakes:
            actor.arrive(f"bias_empty[{at}]", phase, f"tile {tile}: free it")
        store = actor.step(f"tile {tile}: store it")
        for use in uses[tile]:
            model.precede(use, store)
        uses[tile].append(store)
        if "free unread" not in shape.mistakes:
            actor.arrive(f"bias_empty[{at}]", phase, f"tile {tile}: free it")
    actor.wait(f"bias_full[{len(loads) % shape.ring}]", len(loads) // shape.ring, "wait for the end")
