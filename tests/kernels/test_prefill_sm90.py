"""prefill_sm90: on the emulator against float64, by other schedules, races, what is counted, bits of every storage and batch;
the same on a GPU; which calls it leaves to others."""

import itertools
import re

import numpy as np
import pytest

import fa_ext
from bench.problems import stored
from bench.problems.case import Case
from bench.problems.stored import INT_MAX, INT_MIN
from fa_ext import _core
from tests import emulator
from tests.contract import lse_views, runner
from tests.contract.devices import DEVICES
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
    parts_of,
    random_cases,
)

KERNEL = "prefill_sm90"
emulated = emulated_builds(KERNEL, "^d64_(masked|capped)_bf16$")
SMALL = dict(heads=4, heads_kv=2, head_dim=64, dtype="bfloat16")
ODD = dict(heads=3, heads_kv=1, head_dim=64, dtype="bfloat16")  # 63 of a warpgroup's 64 rows
CASES = [
    Case.sequences((200, 70, 0, 5), (200, 333, 4, 700), causal="bottom_right", **SMALL),
    Case.sequences((239, 1, 130), (511, 3, 129), k="packed", slack=2, causal="bottom_right", sinks=True, **SMALL),
    Case.sequences((200, 1, 130), (500, 3, 129), q="padded", k="padded", slack=2, window=(70, 10), scale=-0.3, layout="bhsd", **SMALL),
    Case.sequences((34,) * 5, (34,) * 5, k="packed", slack=0, causal="bottom_right", seed=1, **ODD),
    Case.sequences((34, 9, 300), (134, 9, 300), page_size=8, k_range=True, positions="random", softcap=2.0, scale=-1.0, **SMALL),
    Case.sequences((60, 127, 128), (700, 127, 64), page_size=24, layout="bhsd", window=(30, 4), scale=0.0, **ODD),
    Case.sequences((1, 1, 0, 1), (5, 333, 4, 700), q="one", page_size=544, causal="bottom_right", cache="pair", **SMALL),
    Case.sequences((60, 190), (200, 190), page_size=5, k_range=True, causal="bottom_right", layout="bhsd", seed=2, **ODD),
    Case.sequences((34, 1), (2300, 2100), causal="bottom_right", sinks=True, **SMALL),  # in chunks
    Case.sequences((6,), (1500,), q="padded", k="padded", window=(900, 5), positions="random", softcap=3.0, **ODD),
    Case.sequences((200, 3, 0, 70), (500, 90, 3, 0), page_size=16, seed=4, **SMALL),
    Case.sequences((129, 0, 3), (0, 50, 2), page_size=64, causal="top_left", sinks=True, cache="swapped", **SMALL),
]


@pytest.fixture
def prefill(emulated):
    return emulated()


@emulates
@pytest.mark.parametrize("kind", ["swapped", "negative", "step"])
@pytest.mark.parametrize("case", [CASES[1], CASES[6], CASES[7]], ids=str)
def test_an_lse_has_any_strides(prefill, case, kind):
    lse_views.assert_written(prefill, case.host_inputs(), kind, check=False)


STORES = [dict(q=q, k=k, layout=at) for (q, k), at in zip(itertools.product(("padded", "packed"), ("padded", "packed", "paged")), ("bshd", "bhsd") * 3)]
STORES += [dict(page_size=size, slack=n, cache=cache) for n, (size, cache) in enumerate(((3, "two"), (24, "twice"), (64, "heads"), (256, "first")))]


ORDERS = ([2], [1, 0], [3, 1, 1], [0, 2] * 9 + [1])


# ---- on the emulator ----


@emulates
@pytest.mark.parametrize("blocks, seed", [(132, 0), (1, 5)])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_sequences(prefill, monkeypatch, case, blocks, seed):
    monkeypatch.setenv("FA_EMULATOR_SMS", str(blocks))
    monkeypatch.setenv("FA_EMULATOR_SEED", str(seed))
    holds(prefill, case)


@emulates
@pytest.mark.parametrize("case", ["B2,H4/2,S200x333,D64,bfloat16,causal=bottom_right", "B1,H2,S70,D40,bfloat16,sinks=same"])
def test_dense_calls(prefill, monkeypatch, case):
    monkeypatch.setenv("FA_EMULATOR_SMS", "2")
    report = runner.verdict(prefill, Case.parse(case))
    assert report, report


@emulates
def test_many_sequences(prefill, monkeypatch):
    """More than threads of the kernel that lists them, most of them empty."""
    monkeypatch.setenv("FA_EMULATOR_SMS", "7")
    lengths = tuple(3 if n % 100 == 0 else 0 for n in range(1100))
    holds(prefill, Case.sequences(lengths, tuple(9 * (n > 0) for n in lengths), k="packed", slack=1, causal="bottom_right", **SMALL))


@emulates
def test_the_bits_of_a_sequence_are_its_own(prefill, monkeypatch):
    base = Case.sequences((130, 34, 1, 200), (130, 333, 97, 340), causal="bottom_right", seed=3, **SMALL)

    def other_blocks(n):
        monkeypatch.setenv("FA_EMULATOR_SMS", str((2, 132, 7)[n % 3]))

    assert_same_bits(prefill, base, STORES, ORDERS, other_blocks)
    assert_same_bits(prefill, base.changed(softcap=3.0, window=(100, 0), sinks=True), STORES, ORDERS)


@emulates
@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128])  # states are folded in memory, and in registers
def test_chunks_are_folded_to_the_same_bits_with_and_without_room(emulated, monkeypatch, head_dim):
    room, none = (emulated(instances=f"^d{head_dim}_masked_bf16$", edit=edit) for edit in (None, without_room))
    for n, case in enumerate([
        Case.sequences((34, 1, 130), (2500, 3700, 2100), causal="bottom_right", sinks=True, **SMALL),
        Case.sequences((60, 3), (2500, 3000), page_size=3, k_range=True, scale=-0.4, **ODD),
        Case.sequences((60, 3), (3500, 3000), k="packed", window=(2500, None), causal="bottom_right", **ODD),
        Case.sequences((5, 2), (4200, 300), page_size=16, causal="bottom_right", **SMALL | {"heads": 20, "heads_kv": 20}),
    ]):  # fmt: skip
        case = case.changed(head_dim=head_dim, head_dim_v=head_dim)
        values = stored.values_of(case)
        monkeypatch.setenv("FA_EMULATOR_SMS", "16")  # so that tiles are longer than what each has on average
        wanted = parts_of(room, case, values)
        assert parts_of(none, case, values) == wanted, case
        monkeypatch.setenv("FA_EMULATOR_SMS", "2")
        assert parts_of(room, case, values) == wanted, case
        holds(none, case)
        assert parts_of(room, case.changed(n_q=case.n_q[:1], n_k=case.n_k[:1]), values[:1]) == wanted[:1], case


def without_room(text):
    """One slot for states, which is never enough."""
    pattern = r"workspace\.slots = std::min<int64_t>\(kSplitSequences, p\.batch\) \* \(kSplitTarget \+ kSplitUnits\)"
    text, count = re.subn(pattern, "workspace.slots = 1", text)
    assert count == (0 if "prefill_sm90_kernel" in text else 1)
    return text


@emulates
def test_it_looks_at_nothing_that_nobody_may_see(prefill):
    case = Case.sequences((40, 130), (300, 190), page_size=8, causal="bottom_right", window=(20, 0), **SMALL)
    arguments = case.host_inputs()
    wanted = fa_ext.attention(**arguments, kernel=prefill)
    table = arguments["page_table"] = arguments["page_table"].copy()
    table[0, : (300 - 40 - 20) // 8], table[0, 38:], table[1, : (190 - 130 - 20) // 8] = 99999, -7, INT_MIN
    for name in "kv":  # pages in front of the windows
        x = arguments[name] = arguments[name].copy()
        x[np.unique(case.host_inputs()["page_table"][0, : (300 - 40 - 20) // 8])] = np.nan
    assert fa_ext.attention(**arguments, kernel=prefill, check=True).tobytes() == wanted.tobytes()
    table[0, 35] = 10**6  # a page that somebody would see: its keys are hidden
    report = fa_ext.verify(**arguments, kernel=prefill, check=False)
    assert report, report


PAGED = Case.sequences((1, 30, 0, 140), (5, 33, 4, 170), slack=2, **SMALL)
PACKED = Case.sequences((2, 30, 1, 20), (20, 40, 9, 170), k="packed", slack=0, **SMALL)
BROKEN = [
    (PAGED, "seqlens_k", 1, -5),
    (PAGED, "seqlens_k", 0, INT_MAX),
    (PAGED, "page_table", (1, 0), -1),
    (PAGED, "page_table", (3, slice(2, 9)), INT_MAX),
    (PAGED, "page_table", slice(None), INT_MIN),
    (PAGED.changed(page_size=3), "page_table", (3, slice(5, 19)), -2),
    (PACKED, "cu_seqlens_q", 2, 1),
    (PACKED, "cu_seqlens_q", 0, -1),
    (PACKED, "cu_seqlens_k", 2, INT_MAX),
]


@emulates
@pytest.mark.parametrize("blocks", [132, 3])
@pytest.mark.parametrize(("case", "name", "at", "value"), BROKEN, ids=[f"{x[1]} {x[3]}" for x in BROKEN])
def test_bad_contents_are_counted(emulated, prefill, monkeypatch, case, name, at, value, blocks):
    monkeypatch.setenv("FA_EMULATOR_SMS", str(blocks))
    arguments = case.host_inputs()
    arguments[name][at] = value
    assert_counts_as_the_reference(prefill, lambda: emulator.faults(emulated.library[prefill]), arguments)


@emulates
@pytest.mark.parametrize("case", [PAGED, PACKED], ids=str)
def test_a_promise_of_the_longest_sequence(emulated, prefill, case):
    assert_keeps_a_promise(prefill, case, lambda: emulator.faults(emulated.library[prefill]))


@emulates
@pytest.mark.parametrize("case", [CASES[1], CASES[4], CASES[5]], ids=str)
def test_no_race(emulated, monkeypatch, case):
    monkeypatch.setenv("FA_EMULATOR_SEED", "1")
    monkeypatch.setenv("FA_EMULATOR_SMS", "1")
    holds(emulated(races=True), case)


@emulates
@pytest.mark.slow
@pytest.mark.parametrize("head_dim, dtype", [(64, "float16"), (96, "bfloat16"), (128, "float16"), (128, "bfloat16"), (168, "bfloat16"), (256, "float16")])
def test_at_random(emulated, monkeypatch, head_dim, dtype):
    columns = next(d for d in (64, 96, 128, 192, 256) if d >= head_dim)
    kernel = emulated(instances=f"^d{columns}_.*_{'bf16' if dtype == 'bfloat16' else 'f16'}$")
    for seed, blocks in enumerate((1, 3, 132)):
        monkeypatch.setenv("FA_EMULATOR_SEED", str(seed))
        monkeypatch.setenv("FA_EMULATOR_SMS", str(blocks))
        for case in random_cases(60, 400 + seed, head_dim, dtype, longest=700, alibi=None):
            holds(kernel, case)


# ---- the choice ----


@pytest.mark.skipif(KERNEL not in fa_ext.kernels(), reason="is not built")
def test_which_calls_it_takes():
    """Of calls on a described device: by how q is stored, whatever the lengths and however many sequences there are."""
    wide = dict(heads=32, heads_kv=8, head_dim=128, dtype="bfloat16", causal="bottom_right")
    packed = [Case.sequences((n,) * b, (700,) * b, page_size=16, **wide) for n, b in ((1, 1), (300, 1), (1, 40), (34, 9))]
    padded = Case.sequences((300, 5), (700, 800), q="padded", k="padded", **wide)
    one = wide | {"heads_kv": 1}  # 32 rows of a kv head
    few = [Case.sequences((1, 1), (700, 800), q="one", page_size=size, **one) for size in (16, 24, 256)]
    for case in (padded, *few):
        assert fa_ext.explain(**case.host_inputs(), device=DEVICES["h200"])[0] == KERNEL, case
    for case in packed:  # of which packed_sm90 leaves it the sequences of many rows, where it is built
        assert fa_ext.explain(**case.host_inputs(), device=DEVICES["h200"])[0] in (KERNEL, "packed_sm90"), case
    for case in (
        Case.sequences((1, 1), (700, 800), q="one", page_size=3, **one),
        Case.sequences((1, 1), (700, 800), q="one", k="padded", **one),
        Case.sequences((1, 9), (700, 800), q="padded", k="padded", slack=0, **wide),
        Case.sequences((300, 5), (700, 800), page_size=16, alibi="heads", **wide),
    ):
        assert fa_ext.explain(**case.host_inputs(), device=DEVICES["h200"])[0] == "mma_sm80", case
    dense = Case.parse("B2,H4/2,S200x333,D64,bfloat16,causal=bottom_right")
    assert _core.answers(**dense.host_inputs(), device=DEVICES["h200"])[KERNEL][0] == "declines"


# ---- on a GPU ----


@on_gpu(KERNEL)
@pytest.mark.parametrize("head_dim, dtype", ON_A_GPU)
def test_on_a_gpu_against_float64(head_dim, dtype):
    cases = [case.changed(page_size=size) for case in CASES[:2] for size in (1, 3, 8, 16, 24, 64, 256)]
    cases += [*CASES, Case.sequences((34,) * 300, (34,) * 300, k="packed", causal="bottom_right", **SMALL)]
    cases += [Case.sequences((64, 1, 300), (40000, 9000, 5000), page_size=size, causal="bottom_right", **SMALL) for size in (3, 16)]
    cases += [Case.sequences((1023, 3, 799), (1023, 3, 2000), causal="bottom_right", k=k, **SMALL) for k in ("packed", "paged")]
    cases = [case.changed(head_dim=head_dim, head_dim_v=head_dim, dtype=dtype) for case in cases]
    for case in [*cases, *random_cases(200, 7, head_dim, dtype, longest=3000, alibi=None)]:
        holds(KERNEL, case, on_device)


@on_gpu(KERNEL)
def test_on_a_gpu_the_bits_of_a_sequence_are_its_own():
    base = Case.sequences((1300, 34, 1, 700), (1300, 9333, 97, 5000), causal="bottom_right", seed=3, **SMALL | {"head_dim": 128})
    for _ in range(20):
        assert_same_bits(KERNEL, base, STORES, ORDERS, put=on_device)


@on_gpu(KERNEL)
def test_on_a_gpu_a_graph_takes_other_lengths():
    case = Case.sequences((500,) * 8, (1500,) * 8, page_size=16, causal="bottom_right", **SMALL | {"head_dim": 128})

    def change(arguments, rng):
        import torch

        arguments["seqlens_k"].copy_(torch.from_numpy(rng.integers(0, 1501, 8).astype(np.int32)))
        arguments["cu_seqlens_q"].copy_(torch.from_numpy(np.sort(rng.integers(0, 4001, 9)).astype(np.int32)))

    assert_graph_takes_other_lengths(KERNEL, case, change, 300)
