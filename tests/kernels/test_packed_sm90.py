"""packed_sm90: on the emulator sequences of every class against float64, bits that are a sequence's own in every form of launch,
promises, bad starts; the same on a GPU, where batches are large, and graphs that meet other lengths."""

import numpy as np
import pytest

import fa_ext
from bench.problems.case import Case
from bench.problems.stored import INT_MAX, INT_MIN
from tests import emulator
from tests.contract.serving_calls import assert_counts_as_the_reference, assert_keeps_a_promise
from tests.kernels.hopper_sequences import (
    ON_A_GPU,
    assert_graph_takes_other_lengths,
    assert_same_bits,
    emulated_builds,
    emulates,
    holds,
    on_device,
    on_gpu,
    random_cases,
)

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


# ---- on a GPU ----

PACKED = dict(heads=8, heads_kv=2, head_dim=128, dtype="bfloat16", causal="bottom_right")
#: Rows of a kv head: few to 8, thin to 64, then tiles.
MIXED = ((1, 2, 3, 16, 17, 1, 0, 150, 1, 9), (9000, 5000, 40000, 3000, 2500, 64, 77, 900, 0, 513))
ORDERS = [[0], [2], [3, 7], [7, 0, 1], [9, 8, 5, 0, 0, 0, 2], [4, 7, 7, 1] * 30, [5, 0] * 40, [5] * 700 + [0, 2]]
ON_GPU = [
    Case.sequences(*MIXED, **PACKED),
    Case.sequences(*MIXED, page_size=3, **PACKED),
    Case.sequences(*MIXED, k="packed", slack=3, sinks=True, softcap=2.0, scale=-0.3, **PACKED),
    Case.sequences(*MIXED, k="padded", k_range=True, positions="random", **PACKED),
    Case.sequences((1,) * 700, (300, 7, 512, 129) * 175, page_size=16, **PACKED),  # a warp each
    Case.sequences((1, 0, 2) * 200, (300, 2000, 640) * 200, page_size=16, window=(700, 0), **PACKED),
    Case.sequences((34, 1) * 400, (34, 90) * 400, k="packed", **PACKED),
    Case.sequences((1,) * 40, (9000,) + (200,) * 39, page_size=16, max_seqlen_q=1, **PACKED),
    Case.sequences((1,) * 200, (1900,) + (700,) * 199, page_size=24, max_seqlen_q=2, **PACKED),  # a list without tiles
    Case.sequences((2, 1) * 20, (700, 90) * 20, alibi="heads", max_seqlen_q=2, **PACKED),
]


@on_gpu(KERNEL)
@pytest.mark.parametrize("head_dim, dtype", ON_A_GPU)
def test_on_a_gpu_against_float64(head_dim, dtype):
    cases = [case.changed(head_dim=head_dim, head_dim_v=head_dim, dtype=dtype) for case in ON_GPU if head_dim <= 128 or not case.max_seqlen_q]
    drawn = random_cases(120, 17, head_dim, dtype, longest=3000, alibi=None, q="packed")
    for case in [*cases, *drawn]:
        holds(KERNEL, case, on_device)


@on_gpu(KERNEL)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_on_a_gpu_the_bits_of_a_sequence_are_its_own(head_dim):
    base = Case.sequences(*MIXED, **PACKED | {"head_dim": head_dim}, seed=3)
    stores = [dict(page_size=size) for size in (1, 16, 48)] + [dict(k="packed"), dict(k="padded"), dict(slack=5)]
    for _ in range(3):
        assert_same_bits(KERNEL, base, stores, ORDERS, put=on_device)


@on_gpu(KERNEL)
def test_on_a_gpu_the_bits_of_a_window_are_its_own():
    """Chunks lie at multiples, counted from the first key, so that a window's may be of two groups, which are merged one by one."""
    base = Case.sequences((1, 1, 2), (5000, 2777, 9100), window=(500, 0), page_size=16, **PACKED, seed=5)
    assert_same_bits(KERNEL, base, [dict(k="packed")], [[1], [2, 0], [0] * 20, [0, 1, 2] * 120, [2, 2, 0] * 200], put=on_device)


@on_gpu(KERNEL)
@pytest.mark.parametrize("most", [1, 2, 16, 17])
@pytest.mark.parametrize("batch", [1, 40])
def test_on_a_gpu_a_promise_that_is_broken(most, batch):
    case = Case.sequences((5, 40, 1, 0, 30) * batch, (700, 900, 90, 3, 40) * batch, slack=4, **PACKED)
    report = fa_ext.verify(**on_device(case.host_inputs()), max_seqlen_q=most, kernel=KERNEL, check=False)
    assert report, report


@on_gpu(KERNEL)
@pytest.mark.parametrize("tokens, most", [(1, None), (1, 1), (8, None), (8, 16), (200, None)])
def test_on_a_gpu_a_graph_takes_other_lengths(tokens, most):
    case = Case.sequences((tokens,) * 8, (1500,) * 8, page_size=16, max_seqlen_q=most, **PACKED)

    def change(arguments, rng):
        import torch

        starts = rng.integers(-3, 8 * tokens + 3, 9)  # some fall, some are nowhere
        starts = np.sort(starts) if rng.integers(2) else starts
        arguments["seqlens_k"].copy_(torch.from_numpy(rng.integers(0, 1501, 8).astype(np.int32)))
        arguments["cu_seqlens_q"].copy_(torch.from_numpy(starts.astype(np.int32)))

    assert_graph_takes_other_lengths(KERNEL, case, change, 100)
