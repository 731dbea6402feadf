"""prefill_sm90's sequences of few rows, which serve_sm90's products take by their lengths on the device: on the emulator, and on
a GPU. Mixed batches against float64, bits of a sequence in every batch, storage and division of the work, what is counted."""

import dataclasses
import itertools
import re

import numpy as np
import pytest

import emulator
import fa_ext
import lse_views
from devices import DEVICES
from fa_ext import _core
from hopper_sequences import (
    ON_A_GPU,
    assert_graph_takes_other_lengths,
    assert_same_bits,
    emulated_builds,
    emulates,
    holds,
    on_device,
    on_gpu,
    parts_of,
    random_cases,
)
from serving_calls import assert_counts_as_the_reference
from serving_cases import INT_MAX, INT_MIN, ServingCase

KERNEL = "prefill_sm90"
emulated = emulated_builds(KERNEL, "^(d64_(masked|capped)|few_d64)_bf16$")
serving = emulated_builds("serve_sm90", "^d64_r(8|16)_bf16$")
SMALL = dict(heads=4, heads_kv=2, head_dim=64, dtype="bfloat16")  # 8 queries have 16 rows, 16 are the most
SEVEN = dict(heads=14, heads_kv=2, head_dim=64, dtype="bfloat16")  # 2 queries have 14, 4 are the most
CASES = [
    ServingCase((1, 8, 0, 200, 9, 17), (1333, 700, 90, 260, 1100, 500), causal="bottom_right", **SMALL),
    ServingCase((1, 2, 3, 0, 130), (2100, 530, 0, 5, 333), page_size=3, window=(600, None), causal="bottom_right", sinks=True, **SEVEN),
    ServingCase((4, 70, 1), (1500, 190, 64), k="packed", slack=0, softcap=2.0, scale=-0.3, positions="random", seed=1, **SMALL),
    ServingCase((2, 150, 1, 1), (900, 150, 3, 1), page_size=8, k_range=True, causal="bottom_right", layout="bhsd", seed=2, **SEVEN),
    ServingCase((3, 16, 0, 5), (700, 333, 9, 1200), q="padded", k="padded", slack=2, window=(70, 10), seed=3, **SMALL),
    ServingCase((1, 1, 0, 1), (5, 1333, 4, 700), q="one", page_size=24, causal="bottom_right", sinks=True, **SMALL),  # few alone
    ServingCase((30, 140, 0, 17), (900, 300, 9, 17), page_size=16, causal="bottom_right", seed=4, **SMALL),  # none
    ServingCase((1, 5), (0, 0), page_size=16, sinks=True, **SMALL),  # without keys
    ServingCase((1, 13), (8200, 4100), k="packed", causal="bottom_right", scale=0.0, seed=5, **SMALL),  # longer chunks
    ServingCase((3, 4, 2, 4), (1100, 2500, 70, 9), page_size=3, causal="bottom_right", sinks=True, seed=6, **SEVEN),  # pairs of warps
    ServingCase((16, 12, 9, 90), (600, 1700, 0, 64), page_size=16, window=(900, 3), positions="random", seed=7, **SMALL),
]


@pytest.fixture
def prefill(emulated):
    return emulated()


# ---- on the emulator ----


@emulates
@pytest.mark.parametrize("blocks, seed", [(132, 0), (2, 3), (1, 5)])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_sequences(prefill, monkeypatch, case, blocks, seed):
    monkeypatch.setenv("FA_EMULATOR_SMS", str(blocks))
    monkeypatch.setenv("FA_EMULATOR_SEED", str(seed))
    holds(prefill, case)


@emulates
@pytest.mark.parametrize("kind", ["swapped", "negative", "step"])
def test_an_lse_has_any_strides(prefill, kind):
    lse_views.assert_written(prefill, CASES[0].arguments(), kind, check=False)


@emulates
@pytest.mark.parametrize("case", [CASES[0], CASES[4], CASES[8], CASES[9]], ids=str)
def test_their_bits_are_those_of_serve_sm90(prefill, serving, case):
    """So it is no matter of bits which of the two a call goes to."""
    few = [b for b, n in enumerate(case.n_q) if n * case.heads // case.heads_kv <= 32]
    values = case.values()
    ours, theirs = (parts_of(kernel, case, values) for kernel in (prefill, serving()))
    assert [ours[b] for b in few] == [theirs[b] for b in few]


STORES = [dict(q=q, k=k, layout=at) for (q, k), at in zip(itertools.product(("padded", "packed"), ("padded", "packed", "paged")), ("bshd", "bhsd") * 3)]
STORES += [dict(page_size=size, slack=n, cache=cache) for n, (size, cache) in enumerate(((3, "two"), (24, "twice"), (64, "heads")))]
ORDERS = ([2], [0], [1, 0], [3, 1, 1], [0] * 15 + [2], [3])


@emulates
def test_the_bits_of_a_sequence_are_its_own(prefill, monkeypatch):
    """Alone, among tiles, among others of few rows; in units of 1, 2, 4 and 8 chunks, and whole."""
    base = ServingCase((1, 8, 15, 150), (1333, 700, 4150, 340), causal="bottom_right", seed=3, **SMALL)

    def other_blocks(n):
        monkeypatch.setenv("FA_EMULATOR_SMS", str((2, 132, 7, 1, 24)[n % 5]))

    assert_same_bits(prefill, base, STORES, ORDERS, other_blocks)
    assert_same_bits(prefill, dataclasses.replace(base, softcap=3.0, window=(1100, 0), sinks=True), STORES[4:6], ORDERS, other_blocks)


def with_little_room(text):
    """Workspace for some of the states, or for none."""
    text, count = re.subn(r"\bkMostSlots = \d+\b", "kMostSlots = 40", text)
    assert count
    return text


@emulates
def test_room_for_states_changes_no_bit(emulated, prefill, monkeypatch):
    tight = emulated(edit=with_little_room)
    for blocks, case in itertools.product(("132", "3"), (CASES[0], CASES[1], CASES[8], CASES[9])):
        monkeypatch.setenv("FA_EMULATOR_SMS", blocks)
        values = case.values()
        assert parts_of(tight, case, values) == parts_of(prefill, case, values), case


@emulates
@pytest.mark.parametrize("case", [CASES[0], CASES[2], CASES[8], CASES[9], CASES[10]], ids=str)
def test_no_race(emulated, monkeypatch, case):
    monkeypatch.setenv("FA_EMULATOR_SEED", "1")
    monkeypatch.setenv("FA_EMULATOR_SMS", "1")
    holds(emulated(races=True), case)


@emulates
def test_it_looks_at_nothing_that_nobody_may_see(prefill):
    case = ServingCase((1, 130, 13), (1300, 190, 90), page_size=8, causal="bottom_right", window=(700, 0), **SMALL)
    arguments = case.arguments()
    wanted = fa_ext.attention(**arguments, kernel=prefill)
    table = arguments["page_table"] = arguments["page_table"].copy()
    table[0, : (1300 - 1 - 700) // 8], table[0, 163:], table[2, 12:] = 99999, -7, INT_MIN
    assert fa_ext.attention(**arguments, kernel=prefill, check=True).tobytes() == wanted.tobytes()
    table[0, 100] = 10**6  # a page that somebody would see: its keys are hidden
    report = fa_ext.verify(**arguments, kernel=prefill, check=False)
    assert report, report


PAGED = ServingCase((1, 13, 0, 140, 8), (5, 1033, 4, 170, 90), slack=2, **SMALL)
PACKED = ServingCase((2, 30, 1, 15), (20, 40, 9, 1170), k="packed", slack=0, **SMALL)
BROKEN = [
    (PAGED, "seqlens_k", 1, -5),
    (PAGED, "seqlens_k", 0, INT_MAX),
    (PAGED, "page_table", (1, 0), -1),
    (PAGED, "page_table", (1, slice(20, 50)), INT_MAX),
    (PAGED, "page_table", slice(None), INT_MIN),
    (dataclasses.replace(PAGED, page_size=3), "page_table", (1, slice(5, 19)), -2),
    (PACKED, "cu_seqlens_q", 2, 1),
    (PACKED, "cu_seqlens_q", 0, -1),
    (PACKED, "cu_seqlens_k", 2, INT_MAX),
]


@emulates
@pytest.mark.parametrize("blocks", [132, 3])
@pytest.mark.parametrize(("case", "name", "at", "value"), BROKEN, ids=[f"{x[1]} {x[3]}" for x in BROKEN])
def test_bad_contents_are_counted(emulated, prefill, monkeypatch, case, name, at, value, blocks):
    monkeypatch.setenv("FA_EMULATOR_SMS", str(blocks))
    arguments = case.arguments()
    arguments[name][at] = value
    assert_counts_as_the_reference(prefill, lambda: emulator.faults(emulated.library[prefill]), arguments)


@emulates
def test_many_sequences(prefill, monkeypatch):
    """More than threads of the kernel that lists them."""
    monkeypatch.setenv("FA_EMULATOR_SMS", "3")
    lengths = tuple((1, 0, 0, 3, 0, 70)[n % 6] if n % 50 < 6 else 0 for n in range(1100))
    holds(prefill, ServingCase(lengths, tuple(40 + n % 90 if x else 0 for n, x in enumerate(lengths)), page_size=8, causal="bottom_right", **SMALL))


@emulates
@pytest.mark.slow
@pytest.mark.parametrize("head_dim, dtype", [(64, "float16"), (72, "bfloat16"), (128, "float16"), (168, "bfloat16"), (256, "float16")])
def test_at_random(emulated, monkeypatch, head_dim, dtype):
    columns, few = (next(d for d in dims if d >= head_dim) for dims in ((64, 96, 128, 192, 256), (64, 128, 256)))
    kernel = emulated(instances=f"^(d{columns}_.*|few_d{few})_{'bf16' if dtype == 'bfloat16' else 'f16'}$")
    for seed, blocks in enumerate((1, 3, 132)):
        monkeypatch.setenv("FA_EMULATOR_SEED", str(seed))
        monkeypatch.setenv("FA_EMULATOR_SMS", str(blocks))
        for case in random_cases(40, 700 + seed, head_dim, dtype, longest=1300, alibi=None):
            holds(kernel, dataclasses.replace(case, n_q=tuple(n if b % 3 == 2 else min(n, 1 + 3 * b) for b, n in enumerate(case.n_q))))


# ---- the plan ----


@pytest.mark.skipif(KERNEL not in fa_ext.kernels(), reason="is not built")
def test_room_is_asked_for_where_sequences_may_have_few_rows():
    def workspace(case):
        return _core.answers(**case.arguments(), device=DEVICES["h200"])[KERNEL][2]["workspace_bytes"]

    may = ServingCase((40, 30), (900, 900), causal="bottom_right", **SMALL)
    cannot = dataclasses.replace(may, heads=66)  # 33 rows a query
    assert workspace(may) > workspace(cannot) + (1 << 20)
    padded = dataclasses.replace(may, q="padded", k="padded", n_q=(40, 40), slack=0)
    assert workspace(padded) < workspace(may)


# ---- on a GPU ----


@on_gpu(KERNEL)
@pytest.mark.parametrize("head_dim, dtype", ON_A_GPU)
def test_on_a_gpu_against_float64(head_dim, dtype):
    cases = [*CASES, *(dataclasses.replace(CASES[0], page_size=size) for size in (1, 8, 16, 64, 256))]
    cases += [ServingCase((1, 4, 2048, 1), (40000, 9000, 2048, 131000), page_size=16, causal="bottom_right", **SMALL)]
    cases += [ServingCase((700, *(1,) * 128), (700, *(2048,) * 128), page_size=16, causal="bottom_right", **SEVEN)]
    cases += [ServingCase((4,) * 300, (600,) * 300, k="packed", causal="bottom_right", **SMALL)]
    cases = [dataclasses.replace(case, head_dim=head_dim, head_dim_v=head_dim, dtype=dtype) for case in cases]
    for case in [*cases, *random_cases(200, 9, head_dim, dtype, longest=3000, alibi=None)]:
        holds(KERNEL, case, on_device)


@on_gpu(KERNEL)
def test_on_a_gpu_the_bits_of_a_sequence_are_its_own():
    base = ServingCase((1, 4, 3, 700), (41333, 9333, 97, 5000), causal="bottom_right", seed=3, **SMALL | {"head_dim": 128})
    for _ in range(20):
        assert_same_bits(KERNEL, base, STORES, (*ORDERS, [3] + [0, 1, 2] * 60), put=on_device)


@on_gpu(KERNEL)
def test_on_a_gpu_a_graph_takes_other_lengths():
    case = ServingCase((50,) * 32, (3000,) * 32, page_size=16, causal="bottom_right", **SMALL | {"head_dim": 128})

    def change(arguments, rng):
        import torch

        arguments["seqlens_k"].copy_(torch.from_numpy(rng.integers(0, 3001, 32).astype(np.int32)))
        lengths = np.where(rng.random(32) < rng.random(), rng.integers(0, 20, 32), rng.integers(0, 51, 32))
        arguments["cu_seqlens_q"].copy_(torch.from_numpy(np.cumsum([0, *lengths]).astype(np.int32)))

    assert_graph_takes_other_lengths(KERNEL, case, change, 300)
