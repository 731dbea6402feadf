"""Barrier protocols of wgmma_backward_sm90's kernels, as models: see test_protocol.py."""

import random
from dataclasses import replace
from itertools import product

import pytest

from tests.kernels.models.protocol import Violation, all_schedules, random_schedules, slowest_actors
from tests.kernels.models.protocol_backward import Backward, KeyTile, QueryTile, key_tiles, keys_model, queries_model, query_tiles
from tests.kernels.models.protocol_pair import pair_model
from tests.kernels.models.protocol_told import Told, told_model
from tests.kernels.models.protocol_turns import Turns, turns_model
from tests.kernels.models.protocol_wide import wide_model

WARPS = ("producer", "wg0.warp0", "wg0.warp1", "wg1.warp0", "wg1.warp1")
MODELS = {"queries": queries_model, "keys": keys_model, "wide": wide_model, "pair": pair_model}
ALL = ((0, 3), (0, 3))
PLAIN = {"queries": QueryTile(3, (0, 0)), "keys": KeyTile(3, ALL, 2), "wide": KeyTile(3, ALL, 2), "pair": KeyTile(3, ALL, 2)}


def found(violation: Violation | None, kinds: set[str]) -> bool:
    return violation is not None and violation.kind in kinds


# ---- the queries kernel ----


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("stages, counts", [(2, (0, 3)), (2, (1, 2)), (4, (0, 1, 2))])
def test_queries_are_sound_whatever_the_tiles_skip(stages: int, counts: tuple[int, ...], overlap: bool) -> None:
    """Two tiles in every combination, and random threes."""
    kinds, rng = query_tiles(counts), random.Random(stages)
    for tiles in [*product(kinds, repeat=2), *(tuple(rng.choices(kinds, k=3)) for _ in range(20))]:
        model = queries_model(Backward(tiles, stages, overlap=overlap))
        assert (violation := slowest_actors(model, WARPS)) is None, (tiles, str(violation))


@pytest.mark.parametrize("turns, overlap", list(product([True, False], repeat=2)))
def test_queries_are_sound_in_other_shapes(turns: bool, overlap: bool) -> None:
    """Every actor the slowest in turn, copies and tensor cores too. Tiles enough for tile[] to come round."""
    rng, kinds = random.Random(turns), query_tiles((0, 1, 2, 4))
    for stages in (2, 3):
        shape = Backward(tuple(rng.choices(kinds, k=6)), stages, turns=turns, overlap=overlap)
        assert (violation := slowest_actors(queries_model(shape))) is None, (shape, str(violation))


@pytest.mark.parametrize("tile", [QueryTile(1, (1, 0)), QueryTile(1, (0, 1)), QueryTile(0, (0, 0))])
@pytest.mark.parametrize("overlap", [True, False])
def test_queries_in_every_schedule(tile: QueryTile, overlap: bool) -> None:
    shape = Backward((tile, tile), overlap=overlap, data=False)
    explored = all_schedules(queries_model(shape), 400_000)
    assert explored.complete and explored.violation is None, str(explored.violation)


@pytest.mark.parametrize("tile", [QueryTile(3, (1, 0)), QueryTile(0, (0, 0)), QueryTile(1, (0, 0))])
def test_queries_need_every_warp_to_free(tile: QueryTile) -> None:
    """Skipped blocks, and queries that only delta is made of, or delta under the products."""
    shape = Backward((tile,) * 3, turns=False)
    assert slowest_actors(queries_model(shape)) is None
    violation = slowest_actors(queries_model(replace(shape, mistakes=frozenset({"freed by one"}))))
    assert found(violation, {"behind", "order"}), str(violation)


@pytest.mark.parametrize("mistake", ["no block_empty", "no q_empty", "tile by one"])
@pytest.mark.parametrize("overlap", [True, False])
def test_queries_with_a_planted_mistake_are_rejected(mistake: str, overlap: bool) -> None:
    tile = QueryTile(0, (0, 0), seen=False) if mistake == "tile by one" else PLAIN["queries"]
    shape = Backward((tile,) * 8, overlap=overlap, mistakes=frozenset({mistake}))
    assert found(slowest_actors(queries_model(shape)), {"behind", "order", "wrong phase"})


def test_queries_free_blocks_after_dq_and_take_their_turns() -> None:
    shape = Backward((PLAIN["queries"],) * 2, overlap=False, mistakes=frozenset({"block early"}))
    assert found(slowest_actors(queries_model(shape)), {"order"})
    shape = Backward((QueryTile(3, (1, 0)),) * 2, mistakes=frozenset({"no turn"}))
    assert slowest_actors(queries_model(shape)) is not None


def test_queries_with_one_stage_stop() -> None:
    """A block is held while the next one is waited for: the static_assert on kStages."""
    assert found(slowest_actors(queries_model(Backward((PLAIN["queries"],), stages=1))), {"deadlock"})


@pytest.mark.parametrize("turns, overlap", list(product([True, False], repeat=2)))
@pytest.mark.parametrize("values", [1, 2])
def test_queries_are_sound_with_values_apart(values: int, turns: bool, overlap: bool) -> None:
    rng, kinds = random.Random(values), query_tiles((0, 1, 2, 4))
    for stages in (2, 3):
        for _ in range(4):
            shape = Backward(tuple(rng.choices(kinds, k=4)), stages, turns=turns, overlap=overlap, value_stages=values)
            assert (violation := slowest_actors(queries_model(shape))) is None, (shape, str(violation))


@pytest.mark.parametrize("tile", [QueryTile(1, (1, 0)), QueryTile(1, (0, 1)), QueryTile(0, (0, 0))])
def test_queries_with_values_apart_in_every_schedule(tile: QueryTile) -> None:
    explored = all_schedules(queries_model(Backward((tile,), value_stages=1, data=False)), 400_000)
    assert explored.complete and explored.violation is None, str(explored.violation)


def test_values_are_waited_for() -> None:
    shape = Backward((PLAIN["queries"],) * 3, value_stages=1)
    assert slowest_actors(queries_model(shape)) is None
    for mistake in ("no value_empty", "freed by one"):
        model = queries_model(replace(shape, mistakes=frozenset({mistake}), wgmma_joins=False))
        assert found(slowest_actors(model), {"behind", "order", "wrong phase"}), mistake


# ---- the keys kernel ----


@pytest.mark.parametrize("stages, key_stages, counts", [(2, 1, (0, 3)), (2, 1, (1, 2)), (4, 1, (2,)), (3, 2, (1, 3))])
def test_keys_are_sound_whatever_the_tiles_skip(stages: int, key_stages: int, counts: tuple[int, ...]) -> None:
    kinds, rng = key_tiles(counts), random.Random(stages)
    pairs = list(product(kinds, repeat=2))
    for tiles in rng.sample(pairs, min(len(pairs), 250)):
        model = keys_model(Backward(tiles, stages, key_stages))
        assert (violation := slowest_actors(model, WARPS)) is None, (tiles, str(violation))


@pytest.mark.parametrize("key_stages", [1, 2])
def test_keys_are_sound_in_other_shapes(key_stages: int) -> None:
    rng, kinds = random.Random(key_stages), key_tiles((0, 1, 2, 3), (1, 3))
    for stages in (2, 3, 4):
        shape = Backward(tuple(rng.choices(kinds, k=6)), stages, key_stages)
        assert (violation := slowest_actors(keys_model(shape))) is None, (shape, str(violation))


@pytest.mark.parametrize("own", [((0, 1), (0, 1)), ((0, 1), (0, 0)), ((0, 0), (0, 0))])
def test_keys_in_every_schedule(own: tuple[tuple[int, int], ...]) -> None:
    shape = Backward((KeyTile(1, own), KeyTile(1, own)), data=False)
    explored = all_schedules(keys_model(shape), 400_000)
    assert explored.complete and explored.violation is None, str(explored.violation)


@pytest.mark.parametrize("own", [((0, 0), (0, 4)), ((0, 4), (0, 4)), ((0, 0), (0, 1))])
def test_keys_need_every_warp_to_free(own: tuple[tuple[int, int], ...]) -> None:
    shape = Backward((KeyTile(own[1][1], own, 2),) * 3, wgmma_joins=False)
    assert slowest_actors(keys_model(shape)) is None
    violation = slowest_actors(keys_model(replace(shape, mistakes=frozenset({"freed by one"}))))
    assert found(violation, {"behind", "order"}), str(violation)


@pytest.mark.parametrize("mistake", ["no step_empty", "no kv_empty", "step early", "tile by one"])
def test_keys_with_a_planted_mistake_are_rejected(mistake: str) -> None:
    tile = KeyTile(0, ((0, 0), (0, 0))) if mistake == "tile by one" else PLAIN["keys"]
    shape = Backward((tile,) * 8, mistakes=frozenset({mistake}))
    assert found(slowest_actors(keys_model(shape)), {"behind", "order", "wrong phase"})


def test_keys_with_one_stage_stop() -> None:
    assert found(slowest_actors(keys_model(Backward((PLAIN["keys"],), stages=1))), {"deadlock"})


# ---- the wide keys kernel ----


def wide_tiles(*counts: tuple[int, int]) -> tuple[KeyTile, ...]:
    return tuple(KeyTile(count, ((0, count), (0, count)), members) for count, members in counts)


@pytest.mark.parametrize("stages, dout_stages", [(2, 2), (3, 1), (2, 1), (3, 3)])
@pytest.mark.parametrize("joins", [True, False])
def test_wide_keys_are_sound(stages: int, dout_stages: int, joins: bool) -> None:
    tiles = wide_tiles((3, 1), (0, 1), (1, 1), (2, 2), (1, 3), (4, 1))
    rng = random.Random(stages)
    for _ in range(6):
        shape = Backward(tuple(rng.choices(tiles, k=4)), stages, dout_stages=dout_stages, wgmma_joins=joins)
        assert (violation := slowest_actors(wide_model(shape))) is None, (shape, str(violation))


@pytest.mark.parametrize("count", [1, 2])
def test_wide_keys_in_every_schedule(count: int) -> None:
    explored = all_schedules(wide_model(Backward(wide_tiles((count, 1)), data=False, warps=1)), 400_000)
    assert explored.complete and explored.violation is None, str(explored.violation)


def test_wide_keys_with_one_stage_of_queries_stop() -> None:
    shape = Backward(wide_tiles((3, 1)), stages=1)
    assert found(slowest_actors(wide_model(shape)), {"deadlock"})


WIDE_MISTAKES = ["no q_empty", "no dout_empty", "no k_empty", "no v_empty", "q early", "no weights_empty", "delta late", "freed by one", "tile by one"]


@pytest.mark.parametrize("mistake", WIDE_MISTAKES)
def test_wide_keys_with_a_planted_mistake_are_rejected(mistake: str) -> None:
    tiles = wide_tiles((0, 1)) if mistake == "tile by one" else wide_tiles((3, 2))
    shape = Backward(tiles * 8, stages=3, wgmma_joins=False)  # with two, that Q comes hides two of the mistakes
    assert slowest_actors(wide_model(shape)) is None
    violation = slowest_actors(wide_model(replace(shape, mistakes=frozenset({mistake}))))
    assert found(violation, {"behind", "order", "wrong phase"}), str(violation)


# ---- the keys kernel of pairs of widths ----


@pytest.mark.parametrize("turns", [True, False])
@pytest.mark.parametrize("stages, counts", [(2, (0, 3)), (2, (1, 2)), (3, (1, 3))])
def test_pairs_are_sound_whatever_the_tiles_skip(stages: int, counts: tuple[int, ...], turns: bool) -> None:
    kinds, rng = key_tiles(counts), random.Random(stages)
    pairs = list(product(kinds, repeat=2))
    for tiles in rng.sample(pairs, min(len(pairs), 150)):
        model = pair_model(Backward(tiles, stages, turns=turns))
        assert (violation := slowest_actors(model, WARPS)) is None, (tiles, str(violation))


@pytest.mark.parametrize("joins", [True, False])
def test_pairs_are_sound_with_every_actor_the_slowest(joins: bool) -> None:
    rng, kinds = random.Random(joins), key_tiles((0, 1, 2, 3), (1, 3))
    for stages in (2, 3):
        shape = Backward(tuple(rng.choices(kinds, k=6)), stages, wgmma_joins=joins)
        assert (violation := slowest_actors(pair_model(shape))) is None, (shape, str(violation))


@pytest.mark.parametrize("own", [((0, 1), (0, 1)), ((0, 1), (0, 0)), ((0, 0), (0, 0))])
def test_pairs_in_every_schedule(own: tuple[tuple[int, int], ...]) -> None:
    explored = all_schedules(pair_model(Backward((KeyTile(1, own), KeyTile(1, own)), data=False)), 400_000)
    assert explored.complete and explored.violation is None, str(explored.violation)


@pytest.mark.parametrize("mistake", ["no step_empty", "no kv_empty", "step early", "tile by one", "no turn"])
def test_pairs_with_a_planted_mistake_are_rejected(mistake: str) -> None:
    tile = {"tile by one": KeyTile(0, ((0, 0), (0, 0))), "no turn": KeyTile(3, ((0, 3), (1, 3)))}.get(mistake, PLAIN["pair"])
    assert slowest_actors(pair_model(Backward((tile,) * 8))) is None
    assert slowest_actors(pair_model(Backward((tile,) * 8, mistakes=frozenset({mistake})))) is not None


# ---- all ----


@pytest.mark.parametrize("name", MODELS)
def test_four_warps_survive_random_schedules(name: str) -> None:
    tiles = {
        "queries": (QueryTile(3, (1, 0)), QueryTile(1, (0, 1)), QueryTile(2, (2, 0))),
        "keys": (KeyTile(2, ((0, 2), (1, 2)), 2), KeyTile(3, ((0, 0), (0, 3)))),
        "wide": wide_tiles((2, 2), (0, 1), (3, 1)),
        "pair": (KeyTile(2, ((0, 2), (1, 2)), 2), KeyTile(3, ((0, 0), (0, 3)))),
    }
    model = MODELS[name](Backward(tiles[name], warps=4))
    assert (violation := random_schedules(model, 20, seed=3)) is None, str(violation)


@pytest.mark.parametrize("name", ["queries", "keys"])
def test_neither_rests_on_wgmma_joining_the_warps(name: str) -> None:
    rng, kinds = random.Random(4), {"queries": query_tiles((0, 1, 3)), "keys": key_tiles((0, 1, 3))}[name]
    for _ in range(20):
        shape = Backward(tuple(rng.choices(kinds, k=3)), wgmma_joins=False)
        assert (violation := slowest_actors(MODELS[name](shape))) is None, (shape, str(violation))


# ---- turns of the fused kernel ----

#: Blocks that tiles of keys visit, in the order of the launch: the last tile of each head first, of two heads in a section.
BLOCKS = {
    "full": ((0, 1, 2, 3),) * 4,
    "causal": ((3,), (2, 3), (1, 2, 3), (0, 1, 2, 3)),
    "two heads": ((3,), (7,), (2, 3), (6, 7), (1, 2, 3), (5, 6, 7)),
    "window": ((2, 3), (1, 2), (0, 1), (0,)),
    "unseen": ((3,), (), (1, 2, 3)),
    "sequences": ((1,), (0, 1), (), (2,), (), (4,), (6,), (3, 4), (5, 6)),  # of two tiles, of none, of one; of two heads
}


def dealt(tiles: int, ctas: int, rng: random.Random) -> tuple[tuple[int, ...], ...]:
    """Tiles to CTAs at random, each with its own in order."""
    owner = [rng.randrange(ctas) for _ in range(tiles)]
    return tuple(tuple(tile for tile in range(tiles) if owner[tile] == cta) for cta in range(ctas))


@pytest.mark.parametrize("blocks", BLOCKS.values(), ids=BLOCKS)
@pytest.mark.parametrize("ctas", [1, 2, 3])
def test_turns_are_sound_whoever_has_which_tile(blocks: tuple[tuple[int, ...], ...], ctas: int) -> None:
    rng = random.Random(ctas)
    for _ in range(8):
        shape = Turns(blocks, dealt(len(blocks), ctas, rng))
        assert (violation := slowest_actors(turns_model(shape))) is None, (shape, str(violation))
        assert random_schedules(turns_model(shape), 10, ctas) is None


def test_turns_in_every_schedule() -> None:
    explored = all_schedules(turns_model(Turns(((0, 1), (0, 1)), ((0,), (1,)), warps=1)), 400_000)
    assert explored.complete and explored.violation is None, str(explored.violation)


@pytest.mark.parametrize("mistake, kinds", [
    ("not seen", {"behind", "order", "wrong phase"}),
    ("not done", {"order", "wrong phase", "behind"}),
    ("no turn", {"order", "wrong phase"}),
    ("ahead", {"deadlock"}),
])  # fmt: skip
def test_turns_with_a_planted_mistake_are_rejected(mistake: str, kinds: set[str]) -> None:
    shape = Turns(BLOCKS["causal"], ((0, 2), (1, 3)), mistakes=frozenset({mistake}))
    if mistake == "ahead":
        shape = replace(shape, ctas=((0, 3), (1, 2)))
    violation = slowest_actors(turns_model(shape))
    assert found(violation, kinds), str(violation)


# ---- tiles of sequences, told to the fused kernel ----


@pytest.mark.parametrize("tiles", [(), (0,), (0, 0, 0, 0, 0), (1, 1, 1, 1, 1), (5, 0, 1), (2, 3, 0, 0, 4, 1), (1, 0, 7, 1)])
@pytest.mark.parametrize("ring", [2, 3])
def test_told_tiles_are_sound(tiles: tuple[int, ...], ring: int) -> None:
    model = told_model(Told(tiles, ring))
    assert (violation := slowest_actors(model)) is None, str(violation)
    assert random_schedules(model, 20, ring) is None


@pytest.mark.parametrize("tiles", [(1, 1), (0, 1), (3,)])
def test_told_tiles_in_every_schedule(tiles: tuple[int, ...]) -> None:
    explored = all_schedules(told_model(Told(tiles, warps=1)), 400_000)
    assert explored.complete and explored.violation is None, str(explored.violation)


@pytest.mark.parametrize("mistake", ["no tile_empty", "tile by one", "tile early"])
def test_told_tiles_with_a_planted_mistake_are_rejected(mistake: str) -> None:
    shape = Told((1, 0, 0, 3, 1, 1, 0, 2), mistakes=frozenset({mistake}))
    assert found(slowest_actors(told_model(shape)), {"behind", "order", "wrong phase"})
