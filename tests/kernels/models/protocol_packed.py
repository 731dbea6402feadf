"""The order of packed_sm90's launches by a list, in the same vocabulary as the barriers of a kernel."""

from tests.kernels.models.protocol import Event, Model


def packed_model(tiles: str | None = "before", blocks: int = 2, mistakes: frozenset[str] = frozenset()) -> Model:
    """A call of packed_sm90 between two other kernels of the stream. A kernel may start when all blocks of the one before
    have released it; dependency_wait() waits for the end of the one before alone.

    list     releases at once, waits, then reads lengths and writes its list.
    tiles    "before" or "after" listed, or not launched: waits for the one before, then releases, so that what starts
             behind that finds the list.
    listed   behind tiles releases and works at once, and its first block waits for tiles at its end: so its end is that
             of tiles, too. Behind list it waits for list first.

    Mistakes: "tiles released early" (before their wait), "no wait of list", "no wait of tiles", "no wait of listed"."""
    model = Model()
    names = ["before", "list", *["tiles"] * (tiles == "before"), "listed", *["tiles"] * (tiles == "after"), "after"]
    for name in names:
        model.barrier(f"released {name}", blocks)
        model.barrier(f"done {name}", blocks)
    work: dict[str, list[Event]] = {}
    for n, name in enumerate(names):
        follows = name == "listed" and tiles == "before"
        late = name == "tiles" and "tiles released early" not in mistakes or name == "listed" and not follows
        waits = n > 0 and f"no wait of {name}" not in mistakes
        work[name] = []
        for b in range(blocks):
            actor = model.actor(f"{name}.block{b}")
            if n:
                actor.wait(f"released {names[n - 1]}", 0, "starts")
            if not late:
                actor.arrive(f"released {name}", 0, "dependency_release")
            if waits and not follows:
                actor.wait(f"done {names[n - 1]}", 0, "dependency_wait")
            if late:
                actor.arrive(f"released {name}", 0, "dependency_release")
            work[name].append(actor.step("reads and writes"))
            if waits and follows and b == 0:
                actor.wait(f"done {names[n - 1]}", 0, "dependency_wait")
            actor.arrive(f"done {name}", 0, "ends")
    needs = [("before", later) for later in names[1:]] + [(earlier, "after") for earlier in names[1:-1]]
    for earlier, later in (*needs, ("list", "listed"), *[("list", "tiles")] * bool(tiles)):
        for first in work[earlier]:
            for second in work[later]:
                model.precede(first, second)
    return model
