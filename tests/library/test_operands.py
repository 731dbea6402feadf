"""The axes in csrc/operands.def as front ends in Python read them."""

import pytest

from fa_ext import _operands as operands


def names(name, ndim):
    return [axis.name for axis in operands.axes_of(name, ndim)]


def test_axes_that_may_be_left_out_are_from_the_first_on():
    assert names("q", 4) == ["B", "H", "Sq", "D"] and names("k", 4) == ["B", "Hk", "Sk", "D"]
    assert [names("bias", ndim) for ndim in range(5)] == [[], ["Sk"], ["Sq", "Sk"], ["H", "Sq", "Sk"], ["B", "H", "Sq", "Sk"]]
    assert names("alibi", 1) == ["H"] and names("alibi", 2) == ["B", "H"]
    assert names("positions", 1) == ["Sq"]
    assert names("intervals", 4) == ["B", "H", "Sq", "2"] and names("intervals", 5) == ["B", "H", "Sq", "n", "2"]


def test_left_out_axes_have_extent_1():
    assert operands.filled("bias", (5, 7)) == (1, 1, 5, 7) and operands.filled("bias", ()) == (1, 1, 1, 1)
    assert operands.filled("alibi", (4,)) == (1, 4) and operands.filled("alibi", (2, 4)) == (2, 4)
    assert operands.filled("intervals", (2, 1, 5, 2)) == (2, 1, 5, 1, 2) and operands.broadcasts("intervals")
    assert operands.filled("sinks", (4,)) == (4,) and operands.filled("v", (2, 3, 5, 7)) == (2, 3, 5, 7)


@pytest.mark.parametrize(
    "name, shape, shared",
    [("q", (1, 4, 5, 8), False), ("sinks", (4,), True), ("alibi", (4,), True), ("alibi", (1, 4), False), ("bias", (5, 7), True),
     ("bias", (), True), ("bias", (1, 4, 5, 7), True), ("mask", (2, 1, 1, 7), False), ("lse", (1, 4, 5), False)],
)  # fmt: skip
def test_what_the_batch_shares(name, shape, shared):
    assert operands.batch_is_shared(name, shape) == shared


def test_what_has_an_axis_for_the_batch():
    assert {name: operands.has_batch(name) for name in ("q", "bias", "sinks", "alibi")} == {"q": True, "bias": True, "sinks": False, "alibi": True}
    assert operands.broadcasts("bias") and operands.broadcasts("sinks") and not operands.broadcasts("alibi")


def test_keywords_are_the_options():
    given = {"sinks": 1, "bias": None, "mask": 2}
    assert operands.given_options(given) == {"sinks": 1, "mask": 2}
    known = ", ".join(operands.OPTIONS)
    assert known.startswith("bias, mask, sinks")
    with pytest.raises(TypeError, match=f"unknown argument slopes; accepted: those of the signature, of arrays {known}"):
        operands.given_options(given | {"slopes": 1})
