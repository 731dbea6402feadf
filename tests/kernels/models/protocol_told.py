"""How a warp of the producer's warpgroup tells a block its tiles of sequences, as a protocol model: tell_tiles() of
kernels/sm90/backward/sequences.cuh, taken late, with the producer, the consumers and the thread that opens steps of
kernels/sm90/fused_backward.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tests.kernels.models.protocol import Actor, Event, Model

STAGES = 2  # of tiles


@dataclass(frozen=True)
class Told:
    """A block whose tiles have so many steps. Mistakes: "no tile_empty" (the teller does not wait for it), "tile by one" (one
    warp frees a tile for all), "tile early" (a tile is freed before the last reads of it)."""

    tiles: tuple[int, ...]
    ring: int = 2  # stages of steps
    wanted_before: int = 2
    warps: int = 4
    mistakes: frozenset[str] = frozenset()


def told_model(shape: Told) -> Model:
    model, warps = Model(), 1 if "tile by one" in shape.mistakes else shape.warps
    for at in range(STAGES):
        model.barrier(f"tile_full[{at}]", 1, parity=True)
        model.barrier(f"tile_empty[{at}]", warps + 2, parity=True)
    for at in range(shape.ring):
        model.barrier(f"full[{at}]", 1, parity=True)
        model.barrier(f"empty[{at}]", shape.warps, parity=True)
    model.barrier("wanted", 1, parity=True)
    written = _tell(model.actor("teller"), shape)
    reads: list[list[Event]] = [[] for _ in written]
    _go_over(model.actor("producer"), shape, reads, _load)
    _go_over(model.actor("opener"), shape, reads, None)
    for warp in range(shape.warps):
        frees = warp == 0 or "tile by one" not in shape.mistakes
        _go_over(model.actor(f"warp{warp}"), shape, reads, _multiply, frees=frees)
    for tile, write in enumerate(written):
        for read in reads[tile]:
            model.precede(write, read)
            if tile + STAGES < len(written):
                model.precede(read, written[tile + STAGES])
    return model


def _tell(actor: Actor, shape: Told) -> list[Event]:
    """The writing of each tile, and of the end of them."""
    written = []
    for tile in range(len(shape.tiles) + 1):
        at, phase = tile % STAGES, tile // STAGES
        if tile:
            actor.wait("wanted", tile - 1, f"tile {tile}: wait until it is wanted")
        if phase and "no tile_empty" not in shape.mistakes:
            actor.wait(f"tile_empty[{at}]", phase - 1, f"tile {tile}: wait for tile_empty")
        written.append(actor.step(f"tile {tile}: write it"))
        actor.arrive(f"tile_full[{at}]", phase, f"tile {tile}: tell it")
    return written


def _go_over(actor: Actor, shape: Told, reads: list[list[Event]], steps: Callable | None, frees: bool = True) -> None:
    """The tiles of one who is told; `steps(actor, shape, tile, first, count)` does those of a tile."""
    first = 0
    for tile, count in enumerate((*shape.tiles, 0)):
        at, phase = tile % STAGES, tile // STAGES
        actor.wait(f"tile_full[{at}]", phase, f"tile {tile}: wait for tile_full")
        reads[tile].append(actor.step(f"tile {tile}: which it is"))
        if tile == len(shape.tiles):
            return
        early = "tile early" in shape.mistakes
        if frees and early:
            actor.arrive(f"tile_empty[{at}]", phase, f"tile {tile}: free it")
        if steps:
            steps(actor, shape, tile, first, count)
        reads[tile].append(actor.step(f"tile {tile}: the last read"))
        if frees and not early:
            actor.arrive(f"tile_empty[{at}]", phase, f"tile {tile}: free it")
        first += count


def _load(actor: Actor, shape: Told, tile: int, first: int, count: int) -> None:
    if not count:
        actor.arrive("wanted", tile, f"tile {tile}: want the next")
    for step in range(first, first + count):
        if first + count - step == min(count, shape.wanted_before):
            actor.arrive("wanted", tile, f"step {step}: want the next tile")
        at, phase = step % shape.ring, step // shape.ring
        if phase:
            actor.wait(f"empty[{at}]", phase - 1, f"step {step}: wait for room")
        actor.arrive(f"full[{at}]", phase, f"step {step}: load")


def _multiply(actor: Actor, shape: Told, tile: int, first: int, count: int) -> None:
    for step in range(first, first + count):
        at, phase = step % shape.ring, step // shape.ring
        actor.wait(f"full[{at}]", phase, f"step {step}: wait for full")
        actor.arrive(f"empty[{at}]", phase, f"step {step}: free")
