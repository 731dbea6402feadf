"""kernels/sm90/backward/queries.cuh and backward/keys.cuh as protocol models, site by site; protocol_wide.py and
protocol_pair.py have the others.

Actors and assumptions are those of protocol_forward.py: the producer (one thread), each copy, each consumer warp, each
warpgroup's tensor cores; a warpgroup has two warps unless asked for four. Reads by ordinary loads (delta from dO and out, LSE and delta of a step) are steps of the warp that reads.

Every warp frees stages for itself, so that nothing rests on what wgmma does for the other warps: the models hold without
that assumption too.

Over sequences (`told`) a thread of its own tells tiles, through a ring of two: it takes a unit of the list, and the next
one once the stage for it is free, or before where the tile is `short`. A unit that is SPARE it passes over. The producer is then among those that wait for
tile_full and free the tile; all of them read the tile's call to their ends.
"""

from dataclasses import dataclass
from itertools import product

from tests.kernels.models.protocol import Event, Model, Ring
from tests.kernels.models.protocol_parts import Buffers, TensorCore, Wgmma

CONSUMERS = 2
SPARE = "spare"  # a unit of a list that is no tile


@dataclass(frozen=True)
class QueryTile:
    """`count` key blocks, of which warpgroup w does not see the first `first[w]`. Not `seen`: no query sees a key."""

    count: int
    first: tuple[int, ...]
    seen: bool = True


@dataclass(frozen=True)
class KeyTile:
    """`count` query blocks for each of `members` heads, of which warpgroup w sees own[w] = [begin, end)."""

    count: int
    own: tuple[tuple[int, int], ...]
    members: int = 1


@dataclass(frozen=True)
class Backward:
    """The run of one CTA. `mistakes`: planted ones; "freed by one" in both models: a warp frees for its warpgroup. With
    `told` in all: "taken early" (a unit, before its stage is free), "not waited for" (by the thread that tells), "unread"
    (the producer does not wait for a tile), "of consumers" (the producer frees a tile whose barrier counts the consumers
    alone), "without the producer" (which frees no tile), "tile early" (freed before its results are stored)."""

    units: tuple
    stages: int = 2
    key_stages: int = 1
    value_stages: int = 0  # of the queries kernel with C::kWide; 0: values come with keys
    dout_stages: int = 2  # of the wide keys kernel
    turns: bool = True
    overlap: bool = True
    warps: int = 2
    wgmma_joins: bool = True
    mistakes: frozenset[str] = frozenset()
    data: bool = True  # whether what the buffers hold is followed too
    told: bool = False  # over sequences
    short: frozenset[int] = frozenset()  # numbers of tiles

    @property
    def tiles(self) -> list:
        return [unit for unit in self.units if unit != SPARE]

    @property
    def tile_stages(self) -> int:
        return 2 if self.told else 4


def query_tiles(counts: tuple[int, ...]) -> list[QueryTile]:
    """Every tile with one of these counts and first = 0, 1 or count, and a tile without keys."""
    kinds = {
        QueryTile(count, first)
        for count in counts
        for first in product(sorted({0, min(1, count), count}), repeat=CONSUMERS)
        if 0 in first or count == 0
    }
    kinds.add(QueryTile(0, (0,) * CONSUMERS, seen=False))
    return sorted(kinds, key=lambda tile: (tile.count, tile.first, tile.seen))


def key_tiles(counts: tuple[int, ...], members: tuple[int, ...] = (1, 2)) -> list[KeyTile]:
    """Every tile in which a warpgroup sees all blocks, all but the first or the last, or none."""
    kinds = {
        KeyTile(count, own, m)
        for count in counts
        for m in members
        for own in product(sorted({(0, count), (min(1, count), count), (0, max(count - 1, 0)), (0, 0)}), repeat=CONSUMERS)
    }
    return sorted(kinds, key=lambda tile: (tile.count, tile.own, tile.members))


class _Machine:
    """Barriers and buffers of one CTA, and its producer's rings."""

    def __init__(self, shape: Backward, stages: dict[str, int]) -> None:
        self.shape, self.model = shape, Model()
        self.buffers = Buffers(self.model)
        self.buffers.stages = stages | {"tile": shape.tile_stages}
        self.frees_tiles = shape.told and "without the producer" not in shape.mistakes
        for s in range(shape.tile_stages):
            self.model.barrier(f"tile_full[{s}]", 1, parity=True)
            frees = CONSUMERS * shape.warps + (self.frees_tiles and "of consumers" not in shape.mistakes)
            self.model.barrier(f"tile_empty[{s}]", frees, parity=True)
        for g in range(CONSUMERS):
            self.model.barrier(f"turn[{g}]", 2 * shape.warps)
        self.producer = self.model.actor("producer")
        self.teller = self.model.actor("teller") if shape.told else self.producer
        self.tile_ring = Ring(shape.tile_stages)

    def ring(self, kind: str, stages: int, frees: int) -> None:
        for s in range(stages):
            self.model.barrier(f"{kind}_full[{s}]", 2, parity=True)  # the producer's arrival and the bytes
            self.model.barrier(f"{kind}_empty[{s}]", frees * self.shape.warps, parity=True)

    def load(self, kind: str, ring: Ring, site: str) -> None:
        """Waits for a stage and fills it."""
        s, producer = ring.stage, self.producer
        if f"no {kind.rstrip('01')}_empty" not in self.shape.mistakes:
            producer.wait(f"{kind}_empty[{s}]", ring.phase - 1, f"{site}: wait empty")  # a fresh barrier lets it pass
        producer.arrive(f"{kind}_full[{s}]", ring.phase, f"{site}: arrive_expect")
        self.buffers.copy(producer, kind, ring.use, f"{kind}_full[{s}]", ring.phase, site)

    def announce(self) -> None:
        """The next tile of a dense call, or that there is none."""
        self.wait_for_stage()
        self.tell(self.producer.step(f"tile {self.tile_ring.use}: write"))

    def wait_for_stage(self) -> None:
        ring = self.tile_ring
        if "not waited for" not in self.shape.mistakes:
            self.teller.wait(f"tile_empty[{ring.stage}]", ring.phase - 1, f"wait to tell tile {ring.use}")

    def tell(self, begins: Event) -> None:
        ring = self.tile_ring
        there = self.teller.arrive(f"tile_full[{ring.stage}]", ring.phase, f"tell tile {ring.use}")
        self.buffers.fill("tile", ring.use, begins, there)
        ring.advance()

    def tell_tiles(self) -> None:
        """tell_tiles(). Behind a tile that is not short the fill of a stage begins where the unit is taken, since who takes one
        early keeps it from other CTAs."""
        shape, taken, begins = self.shape, self.teller.step("take the first unit"), None
        for unit in (*shape.units, None):
            begins = begins or taken
            if unit == SPARE:
                taken = self.teller.step("take the unit behind a spare one")
                continue
            number, writes = self.tile_ring.use, self.teller.step(f"tile {self.tile_ring.use}: write")
            self.tell(begins if number - 1 not in shape.short else writes)
            if unit is None:
                return
            early = number in shape.short or "taken early" in shape.mistakes
            for what in ("take", "wait") if early else ("wait", "take"):
                if what == "take":
                    begins = self.teller.step(f"take the unit behind tile {number}")
                else:
                    self.wait_for_stage()

    def produce(self, body) -> None:
        """produce_tiles(): body(tile, at, announce_next) for each."""
        shape, producer = self.shape, self.producer
        if not shape.told:
            self.announce()
            for number, tile in enumerate(shape.tiles):
                body(tile, f"tile {number}", self.announce)
            return
        self.tell_tiles()
        for number, tile in enumerate((*shape.tiles, None)):
            s, phase, site = number % shape.tile_stages, number // shape.tile_stages, f"tile {number}"
            if "unread" not in shape.mistakes:
                producer.wait(f"tile_full[{s}]", phase, site)
            begins = producer.step(f"{site}: read the tile")
            if tile is not None:
                body(tile, site, lambda: None)
            self.buffers.read("tile", number, begins, producer.step(f"{site}: all is asked for"))
            if tile is not None and self.frees_tiles:
                producer.arrive(f"tile_empty[{s}]", phase, site)

    def consumers(self, make) -> Model:
        shape = self.shape
        for g in range(CONSUMERS):
            tensors = [TensorCore(self.buffers, f"wg{g}.tensor", shape.warps)] * shape.warps
            if not shape.wgmma_joins:
                tensors = [TensorCore(self.buffers, f"wg{g}.tensor{w}", 1) for w in range(shape.warps)]
            for w in range(shape.warps):
                make(shape, self.buffers, g, w, tensors[w]).consume()
        return self.buffers.link() if shape.data else self.model


class _Consumer:
    """One consumer warp: what both kernels do."""

    def __init__(self, shape: Backward, buffers: Buffers, g: int, w: int, tensor: TensorCore) -> None:
        self.shape, self.buffers, self.g, self.elected = shape, buffers, g, w == 0
        self.actor = buffers.model.actor(f"wg{g}.warp{w}")
        self.wgmma = Wgmma(self.actor, tensor)
        self.at = ""

    def consume(self) -> None:
        shape, actor = self.shape, self.actor
        self.begin()
        for number, tile in enumerate((*shape.tiles, None)):
            s, phase, site = number % shape.tile_stages, number // shape.tile_stages, f"tile {number}"
            actor.wait(f"tile_full[{s}]", phase, site)
            begins = ends = actor.step(f"{site}: read the tile")
            if tile is not None:
                self.at = site
                self.work(tile)
                ends = self.finish(s, phase, site)
            self.buffers.read("tile", number, begins, ends)

    def finish(self, s: int, phase: int, site: str) -> Event:
        """Frees the tile and stores; returns the last read of the tile."""
        shape, actor = self.shape, self.actor
        read = actor.step(f"{site}: read the tile again")
        late = shape.told and "tile early" not in shape.mistakes
        for what in ("store", "free") if late else ("free", "store"):
            if what == "store":
                stored = actor.step(f"{site}: epilogue")
            elif "tile by one" not in shape.mistakes:
                actor.arrive(f"tile_empty[{s}]", phase, site)
            elif self.elected:
                for _ in range(shape.warps):
                    actor.arrive(f"tile_empty[{s}]", phase, site)
        return stored if shape.told else read

    def begin(self) -> None:
        pass

    def work(self, tile) -> None:
        raise NotImplementedError

    def wait_full(self, kind: str, ring: Ring) -> None:
        self.actor.wait(f"{kind}_full[{ring.stage}]", ring.phase, f"{self.at}: wait {kind}_full")

    def free(self, kind: str, use: int, stages: int) -> None:
        by_one = "freed by one" in self.shape.mistakes
        for _ in range((self.shape.warps if self.elected else 0) if by_one else 1):
            self.actor.arrive(f"{kind}_empty[{use % stages}]", use // stages, f"{self.at}: free {kind}")

    def turn_wait(self) -> None:
        if self.shape.turns:
            self.actor.join(f"turn[{self.g}]", f"{self.at}: turn_wait")

    def turn_pass(self) -> None:
        if self.shape.turns:
            self.actor.join_arrive(f"turn[{(self.g + 1) % CONSUMERS}]", f"{self.at}: turn_pass")

    def look(self, buffer: str, use: int, what: str) -> None:
        read = self.actor.step(f"{self.at}: read {what}")
        self.buffers.read(buffer, use, read, read)


# ---- backward/queries.cuh ----


def queries_model(shape: Backward) -> Model:
    """Mistakes: "no block_empty", "no q_empty" (the producer does not wait), "block early" (a stage is freed before its
    dQ is waited for; without overlap), "no turn" (a skipped block takes none), "tile by one"."""
    values = shape.value_stages
    machine = _Machine(shape, {"block": shape.stages, "value": values} | {f"q{g}": 1 for g in range(CONSUMERS)})
    machine.ring("block", shape.stages, CONSUMERS)
    machine.ring("value", values, CONSUMERS)
    for g in range(CONSUMERS):
        machine.ring(f"q{g}", 1, 1)
    ring, v_ring, q_ring = Ring(shape.stages), Ring(values), Ring(1)

    def load_block(site: str) -> None:
        machine.load("block", ring, site)
        ring.advance()
        if values:
            machine.load("value", v_ring, f"{site}, values")
            v_ring.advance()

    def load_tile(tile: QueryTile, at: str, announce_next) -> None:
        if not tile.seen:
            return announce_next()
        for g in range(CONSUMERS):
            machine.load(f"q{g}", q_ring, f"{at} queries {g}")
        q_ring.advance()
        if tile.count:
            load_block(f"{at} block 0")
        announce_next()
        for block in range(1, tile.count):
            load_block(f"{at} block {block}")

    machine.produce(load_tile)
    return machine.consumers(_Queries)


class _Queries(_Consumer):
    """queries_consume."""

    def begin(self) -> None:
        self.ring, self.v_ring, self.q_ring = Ring(self.shape.stages), Ring(self.shape.value_stages), Ring(1)
        if self.shape.turns and self.g == CONSUMERS - 1:
            self.turn_pass()

    def wait_block(self) -> None:
        self.wait_full("block", self.ring)

    def issue_scores(self) -> None:
        q = (f"q{self.g}", self.q_ring.use)
        self.wgmma.issue([q, ("block", self.ring.use)], f"{self.at}: S")
        if self.shape.value_stages:
            self.turn_pass()
            self.wait_full("value", self.v_ring)
        v = ("value", self.v_ring.use) if self.shape.value_stages else ("block", self.ring.use)
        self.wgmma.issue([q, v], f"{self.at}: dP")
        if not self.shape.value_stages:
            self.turn_pass()

    def free_values(self) -> None:
        if self.shape.value_stages:
            self.free("value", self.v_ring.use, self.shape.value_stages)
            self.v_ring.advance()

    def free_queries(self) -> None:
        self.free(f"q{self.g}", self.q_ring.use, 1)

    def rows(self, tile: QueryTile) -> None:
        if tile.seen:
            self.look(f"q{self.g}", self.q_ring.use, "dO and out")

    def work(self, tile: QueryTile) -> None:
        at, shape, stages = self.at, self.shape, self.shape.stages
        first = tile.first[self.g]
        if tile.seen:
            self.wait_full(f"q{self.g}", self.q_ring)
        for block in range(first):
            self.at = f"{at} block {block}, skipped"
            self.wait_block()
            if "no turn" not in shape.mistakes:
                self.turn_wait()
                self.turn_pass()
            self.free("block", self.ring.use, stages)
            self.ring.advance()
            if shape.value_stages:
                self.wait_full("value", self.v_ring)
            self.free_values()
        if first == tile.count:
            self.rows(tile)
            if tile.seen:
                self.free_queries()
        else:
            self.blocks(at, tile, first)
        if tile.seen:
            self.q_ring.advance()

    def blocks(self, at: str, tile: QueryTile, first: int) -> None:
        shape, stages = self.shape, self.shape.stages
        self.at = f"{at} block {first}"
        self.wait_block()
        self.turn_wait()
        self.issue_scores()
        self.rows(tile)
        use = 0
        for block in range(first, tile.count):
            self.at = f"{at} block {block}"
            self.wgmma.wait(1, self.at)
            if shape.overlap and block > first:
                self.free("block", use, stages)
            use = self.ring.use
            self.ring.advance()
            self.wgmma.wait(0, self.at)
            self.free_values()
            if block + 1 == tile.count:
                self.free_queries()
                break
            early = "block early" in shape.mistakes
            if shape.overlap:
                self.wait_block()
                self.turn_wait()
                self.wgmma.issue([("block", use)], f"{self.at}: dQ")
            else:
                self.wgmma.issue([("block", use)], f"{self.at}: dQ")
                if early:
                    self.free("block", use, stages)
                self.wait_block()
                self.wgmma.wait(0, self.at)
                if not early:
                    self.free("block", use, stages)
                self.turn_wait()
            self.issue_scores()
        self.wgmma.issue([("block", use)], f"{self.at}: last dQ")
        self.wgmma.wait(0, self.at)
        self.free("block", use, stages)


# ---- backward/keys.cuh ----


def keys_model(shape: Backward, consumer: type | None = None) -> Model:
    """With another consumer: what else goes over these tiles. Mistakes: "no step_empty", "no kv_empty" (the producer does not wait), "step early" (a stage is freed before its
    dK is waited for), "tile by one"."""
    stages = {"step": shape.stages} | {f"kv{g}": shape.key_stages for g in range(CONSUMERS)}
    machine = _Machine(shape, stages)
    machine.ring("step", shape.stages, CONSUMERS)
    for g in range(CONSUMERS):
        machine.ring(f"kv{g}", shape.key_stages, 1)
    ring, kv_ring = Ring(shape.stages), Ring(shape.key_stages)

    def load_tile(tile: KeyTile, at: str, announce_next) -> None:
        if tile.count == 0:
            return announce_next()
        for g in range(CONSUMERS):
            machine.load(f"kv{g}", kv_ring, f"{at} keys {g}")
        kv_ring.advance()
        announce_next()
        for member, block in product(range(tile.members), range(tile.count)):
            machine.load("step", ring, f"{at} head {member} block {block}")
            ring.advance()

    machine.produce(load_tile)
    return machine.consumers(consumer or _Keys)


class _Keys(_Consumer):
    """keys_consume."""

    def begin(self) -> None:
        self.ring, self.kv_ring = Ring(self.shape.stages), Ring(self.shape.key_stages)

    def skip(self, count: int) -> None:
        for _ in range(count):
            self.wait_full("step", self.ring)
            self.free("step", self.ring.use, self.shape.stages)
            self.ring.advance()

    def issue(self, what: str, keys: bool, use: int) -> None:
        reads = [("step", use)] + ([(f"kv{self.g}", self.kv_ring.use)] if keys else [])
        self.wgmma.issue(reads, f"{self.at}: {what}")

    def work(self, tile: KeyTile) -> None:
        if tile.count == 0:
            return
        at, kv = self.at, f"kv{self.g}"
        begin, end = tile.own[self.g]
        self.wait_full(kv, self.kv_ring)
        for member in range(tile.members):
            self.at = f"{at} head {member}, skipped"
            if begin >= end:
                self.skip(tile.count)
                continue
            self.skip(begin)
            self.steps(f"{at} head {member}", begin, end)
            self.at = f"{at} head {member}, skipped"
            self.skip(tile.count - end)
        self.at = at
        self.free(kv, self.kv_ring.use, self.shape.key_stages)
        self.kv_ring.advance()

    def steps(self, at: str, begin: int, end: int) -> None:
        shape, use = self.shape, 0
        self.at = f"{at} block {begin}"
        self.wait_full("step", self.ring)
        self.issue("S", True, self.ring.use)
        self.issue("dP", True, self.ring.use)
        for block in range(begin, end):
            self.at = f"{at} block {block}"
            self.wgmma.wait(1, self.at)
            if block > begin:
                self.free("step", use, shape.stages)
            use = self.ring.use
            self.look("step", use, "LSE")
            self.issue("dV", False, use)
            self.wgmma.wait(1, self.at)
            self.look("step", use, "delta")
            self.ring.advance()
            if block + 1 == end:
                break
            self.wait_full("step", self.ring)
            self.issue("S", True, self.ring.use)
            self.wgmma.wait(1, self.at)
            self.issue("dK", False, use)
            self.issue("dP", True, self.ring.use)
        self.wgmma.wait(0, self.at)
        self.issue("dK", False, use)
        if "step early" not in shape.mistakes:
            self.wgmma.wait(0, self.at)
            self.free("step", use, shape.stages)
        else:
            self.free("step", use, shape.stages)
            self.wgmma.wait(0, self.at)
