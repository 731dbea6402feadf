"""packed_sm90: sequences of every class on the emulator against float64; bits that are a sequence's own in every form of launch
and as serve_sm90 and prefill_sm90 make them; rows of no query, bad contents; which calls it takes."""


import pytest

from bench.problems.case import Case
from tests.kernels.hopper_sequences import emulated_builds, emulates, holds

KERNEL = "packed_sm90"
emulated = emulated_builds(KERNEL, "^d64_(masked_)?bf16$")
SMALL = dict(heads=8, heads_kv=2, head_dim=64, dtype="bfloat16", causal="bottom_right")
CASES = [
    Case.sequences((1, 1, 0, 1), (5, 333, 4, 700), **SMALL),  # few alone, by their number
    Case.sequences((1, 200, 0, 5, 16, 17, 2), (200, 333, 4, 700, 90, 95, 1), sinks=True, **SMALL),  # every class
    Case.sequences((2, 1, 70), (511, 3, 129), k="packed", slack=2, window=(70, 10), scale=-0.3, **SMALL),
    Case.sequences((3, 150, 1), (134, 90, 300), page_size=3, k_range=True, positions="random", **SMALL),
    Case.sequences((1,) * 20, (17, 40) * 10, page_size=24, **SMALL),
    Case.sequences((0, 0, 130, 0), (9, 0, 130, 7), k="padded", **SMALL),
]


@pytest.fixture
def packed(emulated):
    return emulated()


@emulates
@pytest.mark.parametrize("blocks", [132, 3])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_sequences(packed, monkeypatch, case, blocks):
    monkeypatch.setenv("FA_EMULATOR_SMS", str(blocks))
    holds(packed, case)
