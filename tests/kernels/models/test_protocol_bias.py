"""The ring of tiles of a bias in the fused backward: no waiter behind, none early, none for ever."""

import pytest

from tests.kernels.models.protocol import all_schedules, random_schedules, slowest_actors
from tests.kernels.models.protocol_bias import Bias, bias_model

SHAPES = [(1, 3), (2, 3), (2, 2), (1, 2), (1, 1)]  # tiles of a step, and of the ring


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("tiles, ring", SHAPES)
@pytest.mark.parametrize("stores", [False, True])
def test_sound(steps: int, tiles: int, ring: int, stores: bool) -> None:
    model = bias_model(Bias(steps, tiles, ring=ring, stores=stores))
    assert (violation := slowest_actors(model)) is None, str(violation)
    assert random_schedules(model, 20, steps) is None


@pytest.mark.parametrize("stores", [False, True])
def test_every_schedule(stores: bool) -> None:
    explored = all_schedules(bias_model(Bias(3, stores=stores, warps=1)), 400_000)
    assert explored.complete and explored.violation is None, str(explored.violation)


def test_a_step_of_more_tiles_than_the_ring_has_stops() -> None:
    """dS goes to all tiles of a step at its end."""
    violation = slowest_actors(bias_model(Bias(2, 3, ring=2)))
    assert violation and violation.kind == "deadlock"


@pytest.mark.parametrize("mistake, stores", [
    ("free early", True), ("not done", True), ("free unread", True), ("free by one", False),
])  # fmt: skip
def test_planted_mistakes_are_rejected(mistake: str, stores: bool) -> None:
    violation = slowest_actors(bias_model(Bias(7, stores=stores, mistakes=frozenset({mistake}))))
    assert violation and violation.kind in {"behind", "order", "wrong phase"}, str(violation)
