"""packed_sm90: sequences of every class on the emulator against float64; bits that are a sequence's own in every form of launch
and as serve_sm90 and prefill_sm90 make them; rows of no query, bad contents; which calls it takes."""

import numpy as np
import pytest

from bench.problems.case import Case
from bench.problems.stored import INT_MAX, INT_MIN
from tests import emulator
from tests.contract.serving_calls import assert_counts_as_the_reference, assert_keeps_a_promise
from tests.kernels.hopper_sequences import assert_same_bits, emulated_builds, emulates, holds

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


@emulates
@pytest.mark.parametrize("megabytes", ["1", "256"])
def test_the_bits_of_a_sequence_are_its_own(packed, monkeypatch, megabytes):
    """Alone it is found by its number where its rows are few; beside more of them by a list."""
    base = Case.sequences((1, 2, 3, 16, 17), (700, 70, 129, 300, 90), seed=3, **SMALL)  # of 4, 8, 12, 64 and 68 rows

    def other_blocks(n):
        monkeypatch.setenv("FA_EMULATOR_SMS", str((132, 3)[n % 2]))

    monkeypatch.setenv("FA_EXT_WORKSPACE_MB", megabytes)
    orders = [[0], [1], [2], [3], [4], [3, 0, 0], [0] * 20]
    assert_same_bits(packed, base, [dict(page_size=3), dict(k="packed"), dict(slack=5)], orders, other_blocks)


@emulates
@pytest.mark.parametrize("lengths", [(1, 3, 0, 9), (2, 17, 1)], ids=str)
def test_a_promise_changes_no_bit_while_it_is_kept(emulated, packed, lengths):
    case = Case.sequences(lengths, (90, 133, 5, 40)[: len(lengths)], **SMALL)
    assert_keeps_a_promise(packed, case, lambda: emulator.faults(emulated.library[packed]))


@emulates
@pytest.mark.parametrize("lengths", [(1, 2, 1), (1, 40, 2)], ids=str)  # by number, by a list
@pytest.mark.parametrize("starts", [(0, 3, 1, 4), (-5, 1, 2, 3), (INT_MIN, 0, INT_MAX, 2), (0, 0, 0, INT_MAX), (2, 2, 2, 2)], ids=str)
def test_bad_starts(emulated, packed, lengths, starts):
    arguments = Case.sequences(lengths, (90, 133, 40), **SMALL).host_inputs()
    arguments["cu_seqlens_q"] = np.array(starts, np.int32)
    assert_counts_as_the_reference(packed, lambda: emulator.faults(emulated.library[packed]), arguments)
