"""The tiles of wgmma_backward_sm90 over sequences, which a thread of its own tells, as models: see test_protocol.py and
protocol_backward.py."""

import random
from dataclasses import replace

import pytest

from tests.kernels.models.protocol import all_schedules, random_schedules, slowest_actors
from tests.kernels.models.protocol_backward import SPARE, Backward, KeyTile, QueryTile, key_tiles, keys_model, queries_model, query_tiles
from tests.kernels.models.protocol_pair import pair_model
from tests.kernels.models.protocol_wide import wide_model

WARPS = ("teller", "producer", "wg0.warp0", "wg0.warp1", "wg1.warp0", "wg1.warp1")
MODELS = {"queries": queries_model, "keys": keys_model, "wide": wide_model, "pair": pair_model}
#: A tile whose queries see no key, or whose keys no query sees: the producer loads nothing.
EMPTY = {"queries": QueryTile(0, (0, 0), seen=False)} | dict.fromkeys(("keys", "wide", "pair"), KeyTile(0, ((0, 0), (0, 0))))
ONE = {"queries": QueryTile(1, (0, 0))} | dict.fromkeys(("keys", "wide", "pair"), KeyTile(1, ((0, 1), (0, 1))))
LONG = {"queries": QueryTile(3, (1, 0))} | dict.fromkeys(("keys", "wide", "pair"), KeyTile(3, ((0, 3), (1, 3)), 2))
#: Lists by kind of unit: nothing, spare units alone, tiles that follow one another or spare units, first, between and last.
LISTS = ("", "s", "sss", "o", "so", "os", "e", "oo", "oso", "seo", "lel", "eee", "sesoss", "oloelo", "sslesseeol")


def units(name: str, word: str) -> tuple:
    return tuple({"s": SPARE, "e": EMPTY[name], "o": ONE[name], "l": LONG[name]}[kind] for kind in word)


def told(name: str, units: tuple, **options) -> Backward:
    """Each third tile is not short."""
    options = {"short": frozenset(n for n in range(len(units)) if n % 3), "stages": 3 if name == "wide" else 2} | options
    return Backward(units, told=True, **options)


@pytest.fixture(params=MODELS)
def name(request) -> str:
    return request.param


@pytest.mark.parametrize("joins", [True, False])
def test_lists_are_sound_with_every_actor_the_slowest(name: str, joins: bool) -> None:
    for word in LISTS:
        shape = told(name, units(name, word), wgmma_joins=joins)
        assert (violation := slowest_actors(MODELS[name](shape))) is None, (word, str(violation))


def test_lists_are_sound_whatever_the_tiles_skip(name: str) -> None:
    """Tiles of the dense tests, among spare units, in random order."""
    rng = random.Random(name)
    kinds = [*(query_tiles((0, 1, 3)) if name == "queries" else key_tiles((0, 1, 2), (1, 3))), SPARE, SPARE, SPARE]
    for n in range(40):
        shape = told(name, tuple(rng.choices(kinds, k=rng.randint(1, 7))), value_stages=n % 3 if name == "queries" else 0)
        assert (violation := slowest_actors(MODELS[name](shape), WARPS)) is None, (shape, str(violation))


@pytest.mark.parametrize("word", ["s", "e", "o", "se", "eo", "ese", "eee"])
def test_lists_in_every_schedule(name: str, word: str) -> None:
    explored = all_schedules(MODELS[name](told(name, units(name, word), warps=1, data=False)), 400_000)
    assert explored.complete and explored.violation is None, str(explored.violation)


def test_four_warps_survive_random_schedules(name: str) -> None:
    shape = told(name, units(name, "lsoel"), warps=4)
    assert (violation := random_schedules(MODELS[name](shape), 10, seed=5)) is None, str(violation)


#: {mistake: what is found}
MISTAKES = {
    "of consumers": {"wrong phase", "order", "behind"},
    "without the producer": {"behind", "order"},
    "unread": {"order", "wrong phase"},
    "not waited for": {"order", "wrong phase", "behind"},
    "taken early": {"order"},
    "tile early": {"order"},
    "tile by one": {"behind", "order"},
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_rejected(name: str, mistake: str) -> None:
    for word in ("oooo", "eeee", "elsole"):
        shape = told(name, units(name, word))
        assert slowest_actors(MODELS[name](shape)) is None
        violation = slowest_actors(MODELS[name](replace(shape, mistakes=frozenset({mistake}))))
        assert violation is not None and violation.kind in MISTAKES[mistake], (word, str(violation))
