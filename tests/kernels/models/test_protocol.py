"""Barrier protocols of the warp-specialised kernels, as models: no schedule leaves a waiter two phases behind, frees a
stage twice, reads a stage before it is filled, refills it before it is read, or stops."""

import random
from dataclasses import replace
from itertools import product
from unittest.mock import ANY

import pytest

from tests.kernels.models.protocol import Model, Violation, all_schedules, random_schedules, slowest_actors
from tests.kernels.models.protocol_forward import Forward, Tile, forward_model, tiles_of
from tests.kernels.models.protocol_others import launches_model, mma_model, serve_model, simt_model, split_model, thin_model, wmma_model
from tests.kernels.models.protocol_packed import packed_model

JOINED = frozenset("kvq")
WARPS = ("producer", "wg0.warp0", "wg0.warp1", "wg1.warp0", "wg1.warp1")
SKIPPING = (Tile(3, (1, 0)), Tile(1, (0, 1)), Tile(3, (3, 0)))


def found(violation: Violation | None, kind: str, barrier: str = "") -> bool:
    return violation is not None and violation.kind == kind and violation.op.barrier.startswith(barrier)


# ---- the searches ----


def handshake(rounds: int, mistake: str = "") -> Model:
    """A producer fills one stage again and again; of two consumers the first frees it, after a join of both."""
    model = Model()
    model.barrier("full", 1, parity=True)
    model.barrier("empty", 1, parity=True)
    model.barrier("join", 2)
    producer, consumers = model.actor("producer"), [model.actor(f"consumer{i}") for i in range(2)]
    for n in range(rounds):
        if mistake != "no empty":
            producer.wait("empty", n - 1, "refill")
        producer.arrive("full", n, "fill")
        for i, consumer in enumerate(consumers):
            consumer.wait("full", n, "use")
            if mistake != "no join":
                consumer.join("join", "used")
            if i == 0 and not (mistake == "never freed" and n == 0):
                consumer.arrive("empty", n, "free")
            if i == 0 and mistake == "freed twice":
                consumer.arrive("empty", n, "free again")
    return model


@pytest.mark.parametrize(
    "mistake, kinds",
    [
        ("", set()),
        ("no join", {"behind"}),
        ("no empty", {"behind"}),
        ("freed twice", {"wrong phase"}),
        ("never freed", {"deadlock", "wrong phase"}),
    ],
)
def test_all_searches_find_a_mistake(mistake: str, kinds: set[str]) -> None:
    model = handshake(3, mistake)
    verdicts = [slowest_actors(model), random_schedules(model, 200, seed=1), all_schedules(model, 10_000).violation]
    assert all((v is None) if not kinds else (v is not None and v.kind in kinds) for v in verdicts), verdicts


def test_a_waiter_can_be_too_early() -> None:
    model = Model()
    model.barrier("full", 1, parity=True)
    producer = model.actor("producer")
    producer.arrive("full", 0, "fill")
    producer.arrive("full", 1, "fill again")
    model.actor("hasty").wait("full", 1, "has not waited for phase 0: a fresh barrier lets it pass")
    for search in (slowest_actors(model), random_schedules(model, 20, seed=1), all_schedules(model, 100).violation):
        assert found(search, "early", "full")


def any_protocol(rng: random.Random) -> Model:
    """A few actors that wait and arrive at random, mostly sensibly: of each barrier they take the phases in order."""
    model = Model()
    names = [f"b{i}" for i in range(rng.choice((1, 2, 3)))]
    for name in names:
        model.barrier(name, rng.choice((1, 1, 2)), parity=rng.random() < 0.8)
    arrived = dict.fromkeys(names, 0)
    actors = [model.actor(f"a{i}") for i in range(rng.choice((2, 3)))]
    waited = {(actor.name, name): rng.choice((-1, 0, 0, 1)) for actor in actors for name in names}
    for _ in range(rng.randrange(4, 14)):
        actor, name = rng.choice(actors), rng.choice(names)
        if rng.random() < 0.5:
            actor.arrive(name, arrived[name] // model.counts[name], "arrive")
            arrived[name] += 1
        else:
            actor.wait(name, waited[actor.name, name], "wait")
            waited[actor.name, name] += 1
    return model


def test_one_run_an_actor_decides_as_all_schedules_do() -> None:
    """On 1,500 protocols of all verdicts."""
    rng, kinds = random.Random(10), set()
    for _ in range(1500):
        model = any_protocol(rng)
        everything, slow = all_schedules(model, 20_000), slowest_actors(model)
        assert everything.complete
        assert (everything.violation is None) == (slow is None), (model.programs, everything.violation, slow)
        kinds.add(slow.kind if slow else "")
        if slow is None:
            assert random_schedules(model, 4, seed=1) is None
    assert kinds == {"", "behind", "early", "wrong phase", "deadlock"}


# ---- wgmma_sm90 ----


@pytest.mark.parametrize(
    "stages, query_stages, counts", [(2, 1, (3,)), (2, 2, (3,)), (2, 1, (1, 2)), (2, 2, (0, 1)), (4, 2, (0, 1, 2))]
)
def test_forward_is_sound_whatever_the_tiles_skip(stages: int, query_stages: int, counts: tuple[int, ...]) -> None:
    """Three tiles in every combination of first = 0, 1 and count over tiles and warpgroups."""
    for tiles in product(tiles_of(counts), repeat=3):
        model = forward_model(Forward(tiles, stages, query_stages))
        assert (violation := slowest_actors(model, WARPS)) is None, (tiles, str(violation))


@pytest.mark.parametrize(
    "stages, query_stages, turns, late", [(2, 1, True, True), (2, 2, False, False), (4, 1, True, True)]
)
@pytest.mark.parametrize("consumers", [1, 2, 3])
def test_forward_is_sound_in_other_shapes(
    stages: int, query_stages: int, turns: bool, late: bool, consumers: int
) -> None:
    """Every actor the slowest in turn, copies and tensor cores too. Tiles enough for tile[] to come round."""
    rng, kinds = random.Random(stages), tiles_of((0, 1, 2, 3, 5), consumers)
    for _ in range(2):
        tiles = tuple(rng.choices(kinds, k=5))
        shape = Forward(tiles, stages, query_stages, turns and consumers > 1, late)
        assert (violation := slowest_actors(forward_model(shape))) is None, (shape, str(violation))


@pytest.mark.parametrize("stages, query_stages", [(2, 1), (2, 2), (4, 2)])
def test_forward_with_four_warps_survives_random_schedules(stages: int, query_stages: int) -> None:
    model = forward_model(Forward(SKIPPING, stages, query_stages, warps=4))
    assert (violation := random_schedules(model, 20, seed=stages)) is None, str(violation)


def first_rejected(kind: str, **shape) -> Violation | None:
    """The first violation among three equal tiles of each sort, with everything joined but `kind`."""
    for tile in tiles_of((1, 2, 3)):
        model = forward_model(Forward((tile,) * 3, joins=JOINED - set(kind), **shape))
        if violation := slowest_actors(model, WARPS):
            return violation
    return None


@pytest.mark.parametrize(
    "kind, stages, query_stages, turns",
    [
        *[(kind, stages, query_stages, True) for kind in "kv" for stages, query_stages in ((2, 1), (2, 2), (4, 2))],
        *[("k", 2, 2, False), ("v", 2, 2, False)],
        *[("q", stages, 1, turns) for stages in (2, 4) for turns in (True, False)],
    ],
)
def test_forward_needs_the_join_for(kind: str, stages: int, query_stages: int, turns: bool) -> None:
    """Keys, values and queries each: with the barrier left out before this release alone, a warp falls behind. Queries
    with one stage; with two, the joins of keys and values hold the elected warp back."""
    violation = first_rejected(kind, stages=stages, query_stages=query_stages, turns=turns)
    assert found(violation, "behind", f"{kind}_full"), str(violation)


@pytest.mark.parametrize("kind, counts", [("k", (1, 3)), ("v", (1, 3)), ("q", (1,))])
def test_every_skipping_tile_needs_the_joins(kind: str, counts: tuple[int, ...]) -> None:
    """Not one sort of tile that skips is safe by itself in the protocol without joins."""
    for tile in tiles_of(counts):
        model = forward_model(Forward((tile,) * 3, joins=frozenset()))
        violation = slowest_actors(model, WARPS)
        assert (violation is not None) == any(tile.first), (tile, str(violation))
    assert first_rejected(kind) is not None


@pytest.mark.parametrize("tile", [Tile(3, (1, 0)), Tile(3, (3, 0)), Tile(1, (1, 0))])
def test_without_joins_four_warps_hang(tile: Tile) -> None:
    """By parity alone and unchecked, as the hardware goes: some schedule ends in a hang, with joins none does."""
    shape = Forward((tile,) * 3, warps=4, joins=frozenset())
    assert found(random_schedules(forward_model(shape), 100, seed=1, trusting=True), "deadlock")
    assert random_schedules(forward_model(replace(shape, joins=JOINED)), 20, seed=1, trusting=True) is None


@pytest.mark.parametrize(
    "joins, tiles, stages, barrier",
    [
        ("kvq", (Tile(1, (1, 0)),) * 2, 1, None),
        ("kvq", (Tile(1, (0, 1)), Tile(1, (1, 0))), 1, None),
        ("kvq", (Tile(2, (2, 0)),), 1, None),
        ("vq", (Tile(1, (1, 0)),) * 2, 1, "k_full"),
        ("kq", (Tile(2, (1, 0)),), 1, "v_full"),
        ("kv", (Tile(1, (1, 0)),) * 2, 2, "q_full"),
    ],
)
def test_forward_in_every_schedule(joins: str, tiles: tuple[Tile, ...], stages: int, barrier: str | None) -> None:
    """Small cases in all orders, without recourse to the argument of slowest_actors."""
    model = forward_model(Forward(tiles, stages, joins=frozenset(joins), data=False))
    explored = all_schedules(model, 100_000)
    assert explored.complete
    assert explored.violation is None if barrier is None else found(explored.violation, "behind", barrier)


def test_forward_rests_on_wgmma_joining_the_warps() -> None:
    shape = Forward((Tile(3, (0, 0)),) * 3)
    assert slowest_actors(forward_model(shape)) is None
    assert slowest_actors(forward_model(replace(shape, wgmma_joins=False))) is not None


@pytest.mark.parametrize(
    "mistake, kinds",
    [
        ("no k_empty", {"behind", "order", "wrong phase"}),
        ("no v_empty", {"behind", "order", "wrong phase"}),
        ("no q_empty", {"behind", "order", "wrong phase"}),
        ("no v_full", {"order"}),
        ("no turn first", {"deadlock"}),
        ("free twice", {"wrong phase"}),
        ("free early", {"order"}),
    ],
)
def test_forward_with_a_planted_mistake_is_rejected(mistake: str, kinds: set[str]) -> None:
    shape = Forward((Tile(3, (0, 0)),) * 3, mistakes=frozenset({mistake}))
    violation = slowest_actors(forward_model(shape))
    assert violation is not None and violation.kind in kinds, str(violation)


@pytest.mark.parametrize("mistake", ["no tile_empty", "tile by one"])
def test_forward_needs_every_warp_to_free_a_tile(mistake: str) -> None:
    """It shows in a row of tiles without keys; keys let nobody run ahead by four tiles."""
    shape = Forward((Tile(0, (0, 0)),) * 8)
    assert slowest_actors(forward_model(shape)) is None
    violation = slowest_actors(forward_model(replace(shape, mistakes=frozenset({mistake}))))
    assert violation is not None and violation.kind in {"behind", "order"}, str(violation)


# ---- the other kernels ----

CLUSTER = ((3, 2), (2, 0))  # blocks of keys a warpgroup, in two blocks


@pytest.mark.parametrize("counts, stages", [(CLUSTER, 1), (CLUSTER, 2), (((5, 4, 4, 4),), 1), (((1, 0),) * 4, 1)])
@pytest.mark.parametrize("wgmma_joins", [True, False])
def test_split_is_sound(counts: tuple[tuple[int, ...], ...], stages: int, wgmma_joins: bool) -> None:
    """And does not rest on wgmma."""
    warps = 4 if len(counts) > 2 else 2
    model = split_model(counts, stages, warps, wgmma_joins)
    assert (violation := slowest_actors(model)) is None, str(violation)
    assert random_schedules(model, 4, seed=1) is None


@pytest.mark.parametrize("mistake", ["no join", "no cluster barrier", "no arrived", "read early"])
def test_split_with_a_planted_mistake_is_rejected(mistake: str) -> None:
    model = split_model(CLUSTER, wgmma_joins=False, mistakes=frozenset({mistake}))
    assert found(slowest_actors(model), "order")


@pytest.mark.parametrize("needed", [(True, True), (True, False), (False, False)])
def test_wmma_is_sound(needed: tuple[bool, ...]) -> None:
    model = wmma_model(6, needed)
    assert (violation := slowest_actors(model)) is None, str(violation)
    assert random_schedules(model, 20, seed=1) is None


@pytest.mark.parametrize("mistake", ["no empty", "full early", "free early", "one lane frees"])
def test_wmma_with_a_planted_mistake_is_rejected(mistake: str) -> None:
    violation = slowest_actors(wmma_model(6, (True, False), mistakes=frozenset({mistake})))
    assert violation is not None and violation.kind in ("order", "behind"), str(violation)


def test_wmma_where_one_lane_frees_for_its_warp_leaves_a_lane_behind() -> None:
    """Consumers that need no tile read nothing: what is left is the hazard of wgmma_sm90's skipped blocks."""
    model = wmma_model(6, (False, False), mistakes=frozenset({"one lane frees"}))
    assert found(slowest_actors(model), "behind")


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_mma_is_sound_and_needs_its_barrier(stages: int) -> None:
    assert slowest_actors(mma_model(7, stages)) is None
    for mistake in ("no barrier", "short wait", "refill early"):
        assert found(slowest_actors(mma_model(7, stages, mistakes=frozenset({mistake}))), "order"), mistake


def test_serving_of_mma_is_sound_and_needs_its_barrier_and_its_places() -> None:
    assert slowest_actors(serve_model(7)) is None
    assert random_schedules(serve_model(5), 20, seed=1) is None
    for mistake in ("no barrier", "refill early"):
        assert found(slowest_actors(serve_model(7, mistakes=frozenset({mistake}))), "order"), mistake
    assert found(slowest_actors(serve_model(7, places=2)), "order")


@pytest.mark.parametrize("asking, clears, joins", list(product((2, 4), (False, True), (False, True))))
def test_thin_jobs_are_sound_and_need_their_waits(asking: int, clears: bool, joins: bool) -> None:
    shape = {"asking": asking, "clears": clears, "wgmma_joins": joins}
    for slots in (5, 11):
        assert (violation := slowest_actors(thin_model(9, slots, **shape))) is None, str(violation)
    assert (violation := random_schedules(thin_model(7, **shape), 10, seed=1)) is None, str(violation)
    if joins:
        return  # a wgmma that waits for all warps hides the mistakes
    for mistake in ("freed early", "no empty", *["no join"] * clears):
        assert found(slowest_actors(thin_model(9, **shape, mistakes=frozenset({mistake}))), "order"), mistake


@pytest.mark.parametrize("separate, barriers", [(True, 2), (False, 4)])
def test_simt_is_sound_and_needs_each_barrier(separate: bool, barriers: int) -> None:
    assert slowest_actors(simt_model(3, separate)) is None
    for without in range(barriers):
        assert found(slowest_actors(simt_model(3, separate, without=without)), "order"), without


def test_dependent_launches_are_sound_and_need_their_waits() -> None:
    assert slowest_actors(launches_model(4)) is None
    for mistake in ("read early", "no wait"):
        assert found(slowest_actors(launches_model(4, mistakes=frozenset({mistake}))), "order"), mistake


@pytest.mark.parametrize("tiles", ["before", "after", None])
def test_the_launches_of_packed_queries_are_sound_and_need_their_waits(tiles: str | None) -> None:
    assert slowest_actors(packed_model(tiles)) is None
    assert all_schedules(packed_model(tiles), 100_000) == (None, ANY, True)
    of_tiles = {"before": ("tiles released early", "no wait of tiles"), "after": ("no wait of tiles",), None: ()}[tiles]
    for mistake in ("no wait of list", "no wait of listed", *of_tiles):
        violations = [slowest_actors(packed_model(tiles, mistakes=frozenset({mistake})))]
        violations.append(all_schedules(packed_model(tiles, mistakes=frozenset({mistake})), 100_000).violation)
        assert all(found(violation, "order") for violation in violations), mistake
