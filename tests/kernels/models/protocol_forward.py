"""kernels/sm90/forward/kernel.cuh as a protocol model, site by site.

Actors: the producer (one thread), each copy by TMA, each consumer warp, each warpgroup's tensor cores. A consumer
warpgroup has two warps here unless asked for four: the elected one, whose thread frees the stages, and one that does
not. The others of the real four do as the second, and where all must arrive one that is missing holds up as well as
three.

The epilogue is a step like any other: a warp may pause in it for as long as anybody else can move.

With `wgmma_joins` the assumption of protocol_parts.py holds; without it every release after wgmma_wait would need a
barrier too.

Why no waiter is two phases behind. A barrier's phase n + 1 completes only after some actor has passed its wait of phase
n on the partner barrier; the question is whether that actor spoke for every waiter of phase n.

k_full, v_full   All warps wait. Phase n + 1 of a stage needs its refill, that the producer has passed phase n of
                 k_empty, that each warpgroup's elected thread has freed use n. Where the warpgroup multiplied, that
                 thread waited for a wgmma group which all four warps issued after their own wait (the assumption).
                 Where it skipped, nothing but the join (named barrier of the warpgroup's 128 threads between wait and
                 release) says that the other three have passed; the turn does for all skipped keys but a tile's first,
                 and never for values.
k_empty, v_empty The producer alone waits. Phase n + 1 needs consumers to free use n + 1, hence k_full's phase n + 1,
                 hence the producer's refill after its wait of phase n.
q_full           As k_full, per warpgroup: freed with the tile's last keys, after a wgmma or the join. Each warp waits
                 for Q before the tile's first keys, so that what has passed the join has passed q_full.
q_empty          The producer alone; as k_empty.
tile_full        All warps wait. Phase n + 1 needs phase n of tile_empty, at which every warp arrives itself, after its
                 wait. No assumption.
tile_empty       The producer alone; as k_empty.
turns            Named barriers: generations, not parities. A warp arrives again only after its own turn, which the
                 generation before precedes, so that no two generations mix.
"""

from dataclasses import dataclass
from itertools import product

from tests.kernels.models.protocol import Model, Ring
from tests.kernels.models.protocol_parts import Buffers, TensorCore, Wgmma

TILE_STAGES = 4


@dataclass(frozen=True)
class Tile:
    """`count` key blocks, of which warpgroup w does not see the first `first[w]`."""

    count: int
    first: tuple[int, ...]


@dataclass(frozen=True)
class Forward:
    """The run of one CTA. `joins`: of which releases of skipped blocks ("k", "v", "q") the warpgroup's barrier comes
    first. `mistakes`: planted ones, see `forward_model`."""

    tiles: tuple[Tile, ...]
    stages: int = 2
    query_stages: int = 1
    turns: bool = True
    late_turns: bool = False
    warps: int = 2
    joins: frozenset[str] = frozenset("kvq")
    wgmma_joins: bool = True
    mistakes: frozenset[str] = frozenset()
    data: bool = True  # whether what the buffers hold is followed too

    @property
    def consumers(self) -> int:
        return len(self.tiles[0].first)


def tiles_of(counts: tuple[int, ...], consumers: int = 2) -> list[Tile]:
    """Every tile with one of these block counts and first = 0, 1 or count. A tile's keys end with the last that one of
    its rows sees: some warpgroup begins with the first block. (The last one; or, where it has no row left, the last
    that has.)"""
    kinds = {
        Tile(count, first)
        for count in counts
        for first in product(sorted({0, min(1, count), count}), repeat=consumers)
        if 0 in first
    }
    return sorted(kinds, key=lambda tile: (tile.count, tile.first))


def _declare(shape: Forward) -> Buffers:
    """The barriers and buffers of ForwardSmem."""
    model = Model()
    buffers = Buffers(model)
    buffers.stages = {"k": shape.stages, "v": shape.stages, "tile": TILE_STAGES}
    for s, x in product(range(shape.stages), "kv"):
        model.barrier(f"{x}_full[{s}]", 2, parity=True)  # the producer's arrival and the bytes
        model.barrier(f"{x}_empty[{s}]", shape.consumers, parity=True)
    for s in range(TILE_STAGES):
        model.barrier(f"tile_full[{s}]", 1, parity=True)
        model.barrier(f"tile_empty[{s}]", shape.consumers * shape.warps, parity=True)
    for g in range(shape.consumers):
        buffers.stages[f"q{g}"] = shape.query_stages
        for s in range(shape.query_stages):
            model.barrier(f"q_full[{s}][{g}]", 2, parity=True)
            model.barrier(f"q_empty[{s}][{g}]", 1, parity=True)
        model.barrier(f"turn[{g}]", 2 * shape.warps)
        model.barrier(f"join[{g}]", shape.warps)
    return buffers


def forward_model(shape: Forward) -> Model:
    """Mistakes: "no k_empty", "no v_empty", "no q_empty", "no tile_empty" (the producer does not wait), "no v_full"
    (the last product does not), "no turn first" (nobody has the first turn), "free twice" (keys, in the last block),
    "free early" (keys, before the product is waited for), "tile by one" (one warp frees the tile for all)."""
    buffers = _declare(shape)
    _produce(shape, buffers)
    for g in range(shape.consumers):
        tensors = [TensorCore(buffers, f"wg{g}.tensor", shape.warps)] * shape.warps
        if not shape.wgmma_joins:
            tensors = [TensorCore(buffers, f"wg{g}.tensor{w}", 1) for w in range(shape.warps)]
        for w in range(shape.warps):
            _Consumer(shape, buffers, g, w, tensors[w]).consume()
    return buffers.link() if shape.data else buffers.model


def _produce(shape: Forward, buffers: Buffers) -> None:
    """forward_produce."""
    producer = buffers.model.actor("producer")
    k_ring, v_ring, q_ring = Ring(shape.stages), Ring(shape.stages), Ring(shape.query_stages)
    tile_ring = Ring(TILE_STAGES)

    def wait_empty(kind: str, barrier: str, ring: Ring, site: str) -> None:
        if f"no {kind}_empty" not in shape.mistakes:
            producer.wait(barrier, ring.phase - 1, site)  # parity 1 at first: a fresh barrier lets it pass

    def announce() -> None:
        s, site = tile_ring.stage, f"announce tile {tile_ring.use}"
        wait_empty("tile", f"tile_empty[{s}]", tile_ring, site)
        begins = producer.step(f"{site}: write")
        there = producer.arrive(f"tile_full[{s}]", tile_ring.phase, site)
        buffers.fill("tile", tile_ring.use, begins, there)
        tile_ring.advance()

    def load(buffer: str, ring: Ring, full: str, site: str) -> None:
        producer.arrive(full, ring.phase, f"{site}: arrive_expect")
        buffers.copy(producer, buffer, ring.use, full, ring.phase, site)

    def load_block(kind: str, ring: Ring, site: str) -> None:
        s = ring.stage
        wait_empty(kind, f"{kind}_empty[{s}]", ring, site)
        load(kind, ring, f"{kind}_full[{s}]", site)
        ring.advance()

    announce()
    for number, tile in enumerate(shape.tiles):
        if tile.count == 0:
            announce()
            continue
        at = f"tile {number}"
        load_block("k", k_ring, f"{at} keys 0")
        for g in range(shape.consumers):
            wait_empty("q", f"q_empty[{q_ring.stage}][{g}]", q_ring, f"{at} queries {g}")
            load(f"q{g}", q_ring, f"q_full[{q_ring.stage}][{g}]", f"{at} queries {g}")
        q_ring.advance()
        announce()
        for block in range(1, tile.count):
            load_block("k", k_ring, f"{at} keys {block}")
            load_block("v", v_ring, f"{at} values {block - 1}")
        load_block("v", v_ring, f"{at} values {tile.count - 1}")


class _Consumer:
    """forward_consume of one warp."""

    def __init__(self, shape: Forward, buffers: Buffers, g: int, w: int, tensor: TensorCore) -> None:
        self.shape, self.buffers, self.g, self.elected = shape, buffers, g, w == 0
        self.actor = buffers.model.actor(f"wg{g}.warp{w}")
        self.wgmma = Wgmma(self.actor, tensor)
        self.k_ring, self.v_ring, self.q_ring = Ring(shape.stages), Ring(shape.stages), Ring(shape.query_stages)
        self.at = ""

    def consume(self) -> None:
        shape, actor = self.shape, self.actor
        if shape.turns and self.g == shape.consumers - 1 and "no turn first" not in shape.mistakes:
            self.turn_pass()
        for number, tile in enumerate(shape.tiles):
            s, phase = number % TILE_STAGES, number // TILE_STAGES
            actor.wait(f"tile_full[{s}]", phase, f"tile {number}")
            if tile.count > 0:
                self.attend(number, tile)
            read = actor.step(f"tile {number}: read the tile")
            self.buffers.read("tile", number, read, read)
            if "tile by one" not in shape.mistakes:
                actor.arrive(f"tile_empty[{s}]", phase, f"tile {number}")
            elif self.elected:
                for _ in range(shape.warps):
                    actor.arrive(f"tile_empty[{s}]", phase, f"tile {number}")
            actor.step(f"tile {number}: epilogue")  # wait for the stores of the tile before, write this one
        number = len(shape.tiles)
        actor.wait(f"tile_full[{number % TILE_STAGES}]", number // TILE_STAGES, "no more tiles")

    def turn_wait(self) -> None:
        if self.shape.turns:
            self.actor.join(f"turn[{self.g}]", f"{self.at}: turn_wait")

    def turn_pass(self) -> None:
        if self.shape.turns:
            self.actor.join_arrive(f"turn[{(self.g + 1) % self.shape.consumers}]", f"{self.at}: turn_pass")

    def wait_full(self, kind: str, ring: Ring) -> None:
        self.actor.wait(f"{kind}_full[{ring.stage}]", ring.phase, f"{self.at}: wait {kind}_full")

    def free(self, kind: str, ring: Ring) -> None:
        if self.elected:
            self.actor.arrive(f"{kind}_empty[{ring.stage}]", ring.phase, f"{self.at}: free {kind}")

    def free_query(self) -> None:
        if self.elected:
            barrier = f"q_empty[{self.q_ring.stage}][{self.g}]"
            self.actor.arrive(barrier, self.q_ring.phase, f"{self.at}: free q")

    def free_keys(self, last: bool) -> None:
        self.free("k", self.k_ring)
        if last:
            if "free twice" in self.shape.mistakes:
                self.free("k", self.k_ring)
            self.free_query()
        self.k_ring.advance()

    def free_values(self) -> None:
        self.free("v", self.v_ring)
        self.v_ring.advance()

    def join(self) -> None:
        self.actor.join(f"join[{self.g}]", f"{self.at}: join")

    def skip_keys(self, last: bool) -> None:
        """The releases that `joins` does not name go before the barrier, the others after it."""
        joins = self.shape.joins
        if "k" not in joins:
            self.free("k", self.k_ring)
        if last and "q" not in joins:
            self.free_query()
        if "k" in joins or (last and "q" in joins):
            self.join()
        if "k" in joins:
            self.free("k", self.k_ring)
        if last and "q" in joins:
            self.free_query()
        self.k_ring.advance()

    def skip_values(self) -> None:
        self.wait_full("v", self.v_ring)
        if "v" in self.shape.joins:
            self.join()
        self.free_values()

    def issue_qk(self) -> None:
        self.wgmma.issue([(f"q{self.g}", self.q_ring.use), ("k", self.k_ring.use)], f"{self.at}: Q K")

    def issue_pv(self) -> None:
        self.wgmma.issue([("v", self.v_ring.use)], f"{self.at}: P V")

    def begin(self, last: bool) -> None:
        self.issue_qk()
        if "free early" in self.shape.mistakes:
            self.free_keys(last)
        self.wgmma.wait(0, self.at)
        if "free early" not in self.shape.mistakes:
            self.free_keys(last)

    def step(self, last: bool) -> None:
        self.wait_full("k", self.k_ring)
        self.turn_wait()
        self.issue_qk()
        self.wait_full("v", self.v_ring)
        self.issue_pv()
        if not self.shape.late_turns:
            self.turn_pass()
        self.wgmma.wait(1, self.at)
        if self.shape.late_turns:
            self.turn_pass()
        self.free_keys(last)
        self.wgmma.wait(0, self.at)
        self.free_values()

    def attend(self, number: int, tile: Tile) -> None:
        first = tile.first[self.g]
        self.at = f"tile {number}"
        q = self.q_ring
        self.actor.wait(f"q_full[{q.stage}][{self.g}]", q.phase, f"{self.at}: wait q_full")
        for block in range(first):
            self.at = f"tile {number} block {block}, skipped"
            self.wait_full("k", self.k_ring)
            if block > 0:
                self.turn_wait()
                self.turn_pass()
            self.skip_keys(block + 1 == tile.count)
            if block > 0:
                self.skip_values()
        if first < tile.count:
            self.at = f"tile {number} block {first}"
            self.wait_full("k", self.k_ring)
            if first > 0:
                self.turn_wait()
                self.turn_pass()
            self.begin(first + 1 == tile.count)
        if first > 0:
            self.skip_values()
        for block in range(first + 1, tile.count):
            self.at = f"tile {number} block {block}"
            self.step(block + 1 == tile.count)
        if first < tile.count:
            self.at = f"tile {number}: last product"
            if "no v_full" not in self.shape.mistakes:
                self.wait_full("v", self.v_ring)
            self.issue_pv()
            self.wgmma.wait(0, self.at)
            self.free_values()
        q.advance()
