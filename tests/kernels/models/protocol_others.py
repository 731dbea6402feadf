"""The other kernels' protocols in the same vocabulary. Each docstring says why no waiter is two phases behind.

`mistakes` are planted ones, which the tests want rejected.
"""

from itertools import product

from tests.kernels.models.protocol import Actor, Event, Model, Ring
from tests.kernels.models.protocol_parts import Buffers, TensorCore, Wgmma


def split_model(
    counts: tuple[tuple[int, ...], ...],
    stages: int = 1,
    warps: int = 2,
    wgmma_joins: bool = True,
    mistakes: frozenset[str] = frozenset(),
) -> Model:
    """wgmma_split_sm90: `counts[c][g]` key blocks of warpgroup g in block c of the cluster, rings of `stages`.

    full_q, arrived  One phase in a launch: nobody can be behind. `arrived` is initialised before the cluster's barrier,
                     which each block passes before it sends; a block ends after its `arrived`, so that no bytes come
                     to a block that has not begun or is gone.
    k full, v full   All four warps wait. A stage is filled again only behind the warpgroup's named barrier, at which
                     each warp arrives after its own wait and the end of its own products: no assumption about wgmma.
    There is no `empty` barrier; the thread that fills is one of those that the named barrier joins.

    Mistakes: "no join" (the refill does not wait for the warpgroup), "no cluster barrier", "no arrived" (the merge does
    not wait), "read early" (before the kernel before has ended)."""
    model = Model()
    buffers = Buffers(model)
    blocks = range(len(counts))
    model.barrier("kernel before", 1)
    before = model.actor("kernel before")
    written = before.step("writes")
    before.arrive("kernel before", 0, "ends")
    groups = len(counts[0])
    model.barrier("cluster", len(counts) * groups * warps)
    for c in blocks:
        senders = sum(_owner(w, warps, len(counts)) == c for _, w in product(range(groups), range(warps)))
        model.barrier(f"full_q[{c}]", 2, parity=True)
        model.barrier(f"arrived[{c}]", 1 + senders * (len(counts) - 1), parity=True)
        model.barrier(f"syncthreads[{c}]", groups * warps)
        model.barrier(f"exit[{c}]", groups * warps)
        buffers.stages[f"q{c}"] = 1
        for g in range(groups):
            model.barrier(f"join[{c}][{g}]", warps)
            for x in "kv":
                buffers.stages[f"{x}{c}{g}"] = stages
                for s in range(stages):
                    model.barrier(f"{x}{c}{g} full[{s}]", 2, parity=True)
    inits: dict[int, Event] = {}
    landings: list[tuple[int, Event, Event]] = []  # owner, sent, there
    merges: list[tuple[int, Event]] = []
    for c, g in product(blocks, range(groups)):
        tensors = [TensorCore(buffers, f"block{c}.wg{g}.tensor", warps)] * warps
        if not wgmma_joins:
            tensors = [TensorCore(buffers, f"block{c}.wg{g}.tensor{w}", 1) for w in range(warps)]
        for w in range(warps):
            warp = _SplitWarp(buffers, (c, g, w), counts[c][g], stages, tensors[w], mistakes)
            init, loads = warp.prologue()
            if init:
                inits[c] = init
            for load in loads:
                model.precede(written, load)
            warp.attend()
            owner = _owner(w, warps, len(counts))
            if owner != c:
                sent = model.barrier(f"{warp.actor.name} sent", 1)
                send = warp.actor.arrive(sent, 0, "publish: send")
                bytes_ = model.actor(f"bytes of {warp.actor.name}")
                bytes_.wait(sent, 0, "publish")
                landings.append((owner, send, bytes_.arrive(f"arrived[{owner}]", 0, "publish: bytes are there")))
            warp.actor.join(f"syncthreads[{c}]", "published")
            if "no arrived" not in mistakes:
                warp.actor.wait(f"arrived[{c}]", 0, "wait arrived")
            merges.append((c, warp.actor.step("merge")))
            warp.actor.arrive(f"exit[{c}]", 0, "exit")
    for c in blocks:
        block = model.actor(f"block{c}")
        block.wait(f"exit[{c}]", 0, "all warps are done")
        gone = block.step("shared memory is gone")
        for owner, send, there in landings:
            if owner == c:
                model.precede(inits[c], send)
                model.precede(there, gone)
                for merging, merge in merges:
                    if merging == c:
                        model.precede(there, merge)
    return buffers.link()


def _owner(warp: int, warps: int, blocks: int) -> int:
    """The block that finishes a warp's rows: rows are dealt to blocks in order."""
    return warp * blocks // warps


class _SplitWarp:
    """wgmma_split_sm90_kernel of one warp up to publish()."""

    def __init__(
        self,
        buffers: Buffers,
        place: tuple[int, int, int],
        count: int,
        stages: int,
        tensor: TensorCore,
        mistakes: frozenset[str],
    ) -> None:
        self.buffers, self.count, self.stages, self.mistakes = buffers, count, stages, mistakes
        self.c, self.g, w = place
        self.actor, self.elected = buffers.model.actor(f"block{self.c}.wg{self.g}.warp{w}"), w == 0
        self.wgmma = Wgmma(self.actor, tensor)

    def load(self, buffer: str, use: int, full: str, phase: int, expected: bool = False) -> Event:
        if not expected:
            self.actor.arrive(full, phase, f"{buffer} {use}: arrive_expect")
        return self.buffers.copy(self.actor, buffer, use, full, phase, f"{buffer} {use}")

    def fill(self, x: str, step: int) -> Event:
        buffer = f"{x}{self.c}{self.g}"
        return self.load(buffer, step, f"{buffer} full[{step % self.stages}]", step // self.stages)

    def wait(self, x: str, step: int) -> None:
        barrier = f"{x}{self.c}{self.g} full[{step % self.stages}]"
        self.actor.wait(barrier, step // self.stages, f"wait {x} {step}")

    def refill(self, x: str, step: int) -> None:
        if step + self.stages >= self.count:
            return
        if "no join" not in self.mistakes:
            self.actor.join(f"join[{self.c}][{self.g}]", f"refill {x} {step}")
        if self.elected:
            self.fill(x, step + self.stages)

    def prologue(self) -> tuple[Event | None, list[Event]]:
        """Up to the wait for Q. Returns where `arrived` was initialised, and the loads from global memory."""
        actor, init, loads = self.actor, None, []
        first_steps = range(min(self.stages, self.count))
        if self.elected:
            if self.g == 0:
                init = actor.step("init")
                actor.arrive(f"full_q[{self.c}]", 0, "expect Q")
                actor.arrive(f"arrived[{self.c}]", 0, "expect what the others send")
            if "read early" not in self.mistakes:
                actor.wait("kernel before", 0, "dependency_wait")
            if self.g == 0:
                loads.append(self.load(f"q{self.c}", 0, f"full_q[{self.c}]", 0, expected=True))
            loads += [self.fill("k", step) for step in first_steps]
        actor.join(f"syncthreads[{self.c}]", "barriers are ready")
        if self.elected:
            loads += [self.fill("v", step) for step in first_steps]
        generation = actor.join_arrive("cluster", "cluster_arrive")
        actor.wait("kernel before", 0, "dependency_wait")
        if "no cluster barrier" not in self.mistakes:
            actor.wait("cluster", generation, "cluster_wait")
        actor.wait(f"full_q[{self.c}]", 0, "wait Q")
        return init, loads

    def start_scores(self, step: int) -> None:
        self.wait("k", step)
        self.wgmma.issue([(f"q{self.c}", 0), (f"k{self.c}{self.g}", step)], f"Q K {step}")

    def start_out(self, step: int) -> None:
        self.wait("v", step)
        self.wgmma.issue([(f"v{self.c}{self.g}", step)], f"P V {step}")

    def attend(self) -> None:
        """The ring's branch. The resident one is the same without refills, which it never needs."""
        if self.count == 0:
            return
        self.start_scores(0)
        self.wgmma.wait(0, "Q K 0")
        self.refill("k", 0)
        for step in range(1, self.count):
            self.start_scores(step)
            self.start_out(step - 1)
            self.wgmma.wait(1, f"Q K {step}")
            self.refill("k", step)
            self.wgmma.wait(0, f"P V {step - 1}")
            self.refill("v", step - 1)
        self.start_out(self.count - 1)
        self.wgmma.wait(0, "last product")


def wmma_model(
    tiles: int, needed: tuple[bool, ...], lanes: int = 2, mistakes: frozenset[str] = frozenset()
) -> Model:
    """wmma: a producer warp and len(needed) consumer warps over `tiles` key tiles in two stages; a consumer that does
    not need the tiles lets them go by. Actors are lanes, as the barriers count them.

    full    Each lane of each consumer waits for itself. Phase n + 1 needs the producer's refill, hence phase n of
            `empty`, at which every lane arrives itself, after its own wait: no lane speaks for another.
    empty   Each producer lane waits for itself. Phase n + 1 needs consumers to free use n + 1, hence phase n + 1 of
            `full`, at which every producer lane arrives (once its copies are there), after its wait of phase n.

    Mistakes: "no empty" (the producer does not wait), "full early" (its lanes arrive before their copies are there),
    "free early" (before the product), "one lane frees" (one arrives for its warp, and nothing joins the lanes)."""
    stages = 2
    model = Model()
    buffers = Buffers(model)
    one_frees = "one lane frees" in mistakes
    for x in "kv":
        buffers.stages[x] = stages
        for s in range(stages):
            model.barrier(f"{x}_full[{s}]", lanes, parity=True)
            model.barrier(f"{x}_empty[{s}]", len(needed) * (1 if one_frees else lanes), parity=True)
    for lane in range(lanes):
        actor, ring = model.actor(f"producer.lane{lane}"), Ring(stages)
        for _ in range(tiles):
            for x in "kv":
                site, full = f"{x} {ring.use}", f"{x}_full[{ring.stage}]"
                if "no empty" not in mistakes:
                    actor.wait(f"{x}_empty[{ring.stage}]", ring.phase - 1, site)
                if "full early" in mistakes:
                    landed = model.barrier(f"{x} {ring.use} landed {lane}", 1)
                    buffers.copy(actor, x, ring.use, landed, 0, site)
                    actor.arrive(full, ring.phase, site)
                else:
                    buffers.copy(actor, x, ring.use, full, ring.phase, site)
            ring.advance()
    for w, lane in product(range(len(needed)), range(lanes)):
        actor, ring = model.actor(f"consumer{w}.lane{lane}"), Ring(stages)
        syncwarp = model.barrier(f"syncwarp[{w}]", lanes)
        for _ in range(tiles):
            for x in "kv":
                site, empty = f"{x} {ring.use}", f"{x}_empty[{ring.stage}]"
                actor.wait(f"{x}_full[{ring.stage}]", ring.phase, site)
                if "free early" in mistakes:
                    actor.arrive(empty, ring.phase, f"{site}: free")
                if needed[w]:
                    read = actor.step(f"{site}: multiply")
                    buffers.read(x, ring.use, read, read)
                if not one_frees:
                    actor.join(syncwarp, f"{site}: __syncwarp")
                if "free early" not in mistakes and (lane == 0 or not one_frees):
                    actor.arrive(empty, ring.phase, f"{site}: free")
            ring.advance()
    return buffers.link()


def mma_model(tiles: int, stages: int, warps: int = 2, mistakes: frozenset[str] = frozenset()) -> Model:
    """mma_sm80 with stages >= 2: every warp copies its share of each tile and reads all of it. No phase to be behind:
    cp.async groups are counted by the thread that waits, and one __syncthreads() a tile follows the wait. It says that
    everybody's share is there, and that everybody has read the stage that is filled next.

    Mistakes: "no barrier", "short wait" (one group more may be missing), "refill early" (before the barrier)."""
    model = Model()
    buffers = Buffers(model)
    buffers.stages["kv"] = stages
    model.barrier("syncthreads", warps)
    for w in range(warps):
        actor = model.actor(f"warp{w}")
        groups: list[str] = []

        def load(tile: int, actor: Actor = actor, groups: list[str] = groups) -> None:
            """The tile's copies, if there is such a tile, and cp_async_commit."""
            if tile < tiles:
                groups.append(model.barrier(f"{actor.name} tile {tile}", 1))
                buffers.copy(actor, "kv", tile, groups[-1], 0, f"tile {tile}")
            else:
                groups.append("")

        def wait(pending: int, actor: Actor = actor, groups: list[str] = groups) -> None:
            for group in filter(None, groups[: len(groups) - pending]):
                actor.wait(group, 0, "cp_async_wait")

        for tile in range(stages - 1):
            load(tile)
        for tile in range(tiles):
            wait(stages - 2 + ("short wait" in mistakes))
            if "refill early" in mistakes:
                load(tile + stages - 1)
            if "no barrier" not in mistakes:
                actor.join("syncthreads", f"tile {tile}")
            if "refill early" not in mistakes:
                load(tile + stages - 1)
            read = actor.step(f"tile {tile}: multiply")
            buffers.read("kv", tile, read, read)
    return buffers.link()


def serve_model(tiles: int, warps: int = 2, places: int = 3, mistakes: frozenset[str] = frozenset()) -> Model:
    """mma_sm80 serving: two stages as in mma_model, filled by rows whose places the first warp has looked up two tiles
    before, in a ring of `places`: copies read those of their tile, as does the mask when the tile is at work.

    Mistakes: "no barrier", "refill early" (copies before the barrier)."""
    model = Model()
    buffers = Buffers(model)
    buffers.stages = {"kv": 2, "place": places}
    model.barrier("syncthreads", warps)
    for w in range(warps):
        actor = model.actor(f"warp{w}")
        groups: list[str] = []

        def look_up(tile: int, actor: Actor = actor, mine: bool = w == 0) -> None:
            if mine and tile < tiles:
                store = actor.step(f"tile {tile}: store places")
                buffers.fill("place", tile, store, store)

        def load(tile: int, actor: Actor = actor, groups: list[str] = groups) -> None:
            if tile < tiles:
                read = actor.step(f"tile {tile}: read places")
                buffers.read("place", tile, read, read)
                groups.append(model.barrier(f"{actor.name} tile {tile}", 1))
                buffers.copy(actor, "kv", tile, groups[-1], 0, f"tile {tile}")

        look_up(0), look_up(1)
        actor.join("syncthreads", "places of the first tiles")
        load(0)
        for tile in range(tiles):
            actor.wait(groups[tile], 0, "cp_async_wait")
            if "refill early" in mistakes:
                load(tile + 1)
            if "no barrier" not in mistakes:
                actor.join("syncthreads", f"tile {tile}")
            if "refill early" not in mistakes:
                load(tile + 1)
            read = actor.step(f"tile {tile}: multiply and mask")
            buffers.read("kv", tile, read, read)
            buffers.read("place", tile, read, read)
            look_up(tile + 2)
    return buffers.link()


def thin_model(
    tiles: int,
    slots: int = 5,
    warps: int = 4,
    asking: int = 4,
    clears: bool = False,
    wgmma_joins: bool = True,
    mistakes: frozenset[str] = frozenset(),
) -> Model:
    """serve_sm90's thin jobs: K and V of `tiles` tiles by turns in one ring of `slots`. Each warp asks for its keys, or each of
    the first `asking`, under the product that comes next. `clears`: each warp clears rows of V, then __syncthreads().

    full    All warps wait. The next phase needs that the slot is asked for again, behind `empty`, at which each arrives
            after its own wait.
    empty   Those wait that ask. The next phase needs the arrivals of all warps for a tile that is asked for after that wait.
    Neither assumes that a wgmma waits for all four warps (wgmma_joins).

    Mistakes: "freed early" (before the product has ended), "no empty" (the asker does not wait), "no join" (behind clearing)."""
    model = Model()
    buffers = Buffers(model)
    askers = range(asking)
    buffers.stages = {"cleared": slots} | {f"kv{w}": slots for w in askers}
    for s in range(slots):
        model.barrier(f"full[{s}]", 2 * len(askers), parity=True)
        model.barrier(f"empty[{s}]", warps, parity=True)
    model.barrier("syncthreads", warps)
    tensors = [TensorCore(buffers, "tensor", warps)] * warps
    if not wgmma_joins:
        tensors = [TensorCore(buffers, f"tensor{w}", 1) for w in range(warps)]
    for w in range(warps):
        actor = model.actor(f"warp{w}")
        tensor = Wgmma(actor, tensors[w])

        def ask(use: int, actor: Actor = actor, mine: bool = w in askers, buffer: str = f"kv{w}") -> None:
            if mine and use < 2 * tiles:
                actor.arrive(f"full[{use % slots}]", use // slots, f"use {use}: arrive_expect")
                buffers.copy(actor, buffer, use, f"full[{use % slots}]", use // slots, f"use {use}")

        for use in range(slots):
            ask(use)
        for use in range(2 * tiles):
            slot, phase = use % slots, use // slots
            actor.wait(f"full[{slot}]", phase, f"use {use}: wait")
            if clears and use % 2:
                cleared = actor.step(f"use {use}: clear rows")
                buffers.fill("cleared", use, cleared, cleared)
                for a in askers:
                    buffers.read(f"kv{a}", use, cleared, cleared)
                if "no join" not in mistakes:
                    actor.join("syncthreads", f"use {use}: cleared")
            reads = [(f"kv{a}", use) for a in askers] + [("cleared", use)] * (clears and use % 2)
            tensor.issue(reads, f"use {use}")
            if "freed early" in mistakes:
                actor.arrive(f"empty[{slot}]", phase, f"use {use}: free")
            before = use - 1
            if w in askers and 0 <= before < 2 * tiles - slots:
                if "no empty" not in mistakes:
                    actor.wait(f"empty[{before % slots}]", before // slots, f"use {before}: all have read")
                ask(before + slots)
            tensor.wait(0, f"use {use}")
            if "freed early" not in mistakes:
                actor.arrive(f"empty[{slot}]", phase, f"use {use}: free")
    return buffers.link()


def simt_model(blocks: int, separate: bool, warps: int = 2, without: int | None = None) -> Model:
    """One group of the simt kernel: its warps store their shares of K and of V and read all of them. bar.sync of the
    group's own id (__syncthreads() where there is one group, __syncwarp() for a group of one warp): generations, no
    parity, so that nobody can be behind. `without`: this one of a block's barriers is left out."""
    model = Model()
    buffers = Buffers(model)
    buffers.stages = {"k": 1, "v": 1} if separate else {"kv": 1}
    model.barrier("group", warps)
    for w in range(warps):
        actor = model.actor(f"warp{w}")
        for block in range(blocks):
            barriers = iter(range(4))

            def sync(site: str, actor: Actor = actor, barriers=barriers) -> None:
                if next(barriers) != without:
                    actor.join("group", site)

            for x in "kv":
                buffer, use = (x, block) if separate else ("kv", 2 * block + (x == "v"))
                store = actor.step(f"block {block}: store {x}")
                buffers.fill(buffer, use, store, store)
                sync(f"block {block}: {x} is there")
                read = actor.step(f"block {block}: multiply {x}")
                buffers.read(buffer, use, read, read)
                if not separate:
                    sync(f"block {block}: {x} is read")
    return buffers.link()


def launches_model(kernels: int = 3, blocks: int = 2, mistakes: frozenset[str] = frozenset()) -> Model:
    """wgmma_split_sm90 launches behind each other, each allowed to start when all blocks of the one before have said so
    (dependency_release) and working on what all before it wrote. dependency_wait() waits for the kernel before alone;
    since no block ends without it, that one's end is the end of all before.

    Mistakes: "read early" (before dependency_wait), "no wait" (the second kernel's blocks end without it)."""
    model = Model()
    model.barrier("released 0", 1)
    model.barrier("done 0", 1)
    host = model.actor("host")
    host.arrive("released 0", 0, "nothing runs")
    host.arrive("done 0", 0, "nothing runs")
    writes: list[list[Event]] = []
    for kernel in range(1, kernels + 1):
        model.barrier(f"released {kernel}", blocks)
        model.barrier(f"done {kernel}", blocks)
        written = []
        for b in range(blocks):
            actor = model.actor(f"kernel{kernel}.block{b}")
            actor.wait(f"released {kernel - 1}", 0, "starts")
            idle = "no wait" in mistakes and kernel == 2
            reads = [actor.step("reads")] if "read early" in mistakes else []
            if not idle:
                actor.wait(f"done {kernel - 1}", 0, "dependency_wait")
            actor.arrive(f"released {kernel}", 0, "dependency_release")
            if not idle:
                reads.append(actor.step("reads"))
                written.append(actor.step("writes"))
                for write in (write for earlier in writes for write in earlier):
                    for event in (*reads, written[-1]):
                        model.precede(write, event)
            actor.arrive(f"done {kernel}", 0, "ends")
        writes.append(written)
    return model
