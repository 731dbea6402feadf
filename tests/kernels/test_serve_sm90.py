"""serve_sm90: on the emulator against float64, by other schedules and numbers of blocks, races, what is counted, bits of every
storage and batch; the same on a GPU; which calls it takes."""

import itertools
import re

import numpy as np
import pytest

import fa_ext
from bench.problems import stored
from bench.problems.case import Case
from bench.problems.lengths import K_STORAGE, Q_STORAGE
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

KERNEL = "serve_sm90"
emulated = emulated_builds(KERNEL, "^d64_bf16$")
FEW = dict(heads=4, heads_kv=2, head_dim=64, dtype="bfloat16")
MORE = dict(heads=6, heads_kv=1, head_dim=64, dtype="bfloat16")  # 30 rows a job
THIN = dict(heads=20, heads_kv=2, head_dim=64, dtype="bfloat16")  # of one query
CASES = [
    Case.sequences((1, 1, 0, 1), (5, 333, 4, 700), q="one", causal="bottom_right", sinks=True, **FEW),
    Case.sequences((1, 3, 0, 2), (90, 333, 4, 129), page_size=3, alibi="batch", window=(70, None), positions="random", **FEW),
    Case.sequences((2, 1, 0, 3), (64, 200, 70, 1), q="padded", k="padded", slack=1, k_range=True, softcap=2.0, scale=-0.3, seed=1, **FEW),
    Case.sequences((5, 1, 4), (300, 64, 129), q="padded", k="packed", slack=0, causal="bottom_right", **MORE),
    Case.sequences((1, 14, 0, 0), (65, 200, 9, 0), page_size=24, causal="bottom_right", alibi="heads", **MORE),  # 84 rows
    Case.sequences((1, 3, 0, 6), (2300, 333, 4, 129), page_size=3, alibi="batch", window=(900, 0), positions="random", **THIN),
    Case.sequences((2, 1, 0, 3), (64, 600, 70, 1), q="padded", k="padded", slack=1, k_range=True, sinks=True, softcap=2.0, **THIN),
]


@pytest.fixture
def serve(emulated):
    return emulated()


# ---- on the emulator ----


@emulates
@pytest.mark.parametrize("blocks, seed", [(132, 0), (16, 3), (2, 5)])  # many blocks a job, few, one; or a warp a job
@pytest.mark.parametrize("case", CASES, ids=str)
def test_sequences(serve, monkeypatch, case, blocks, seed):
    monkeypatch.setenv("FA_EMULATOR_SMS", str(blocks))
    monkeypatch.setenv("FA_EMULATOR_SEED", str(seed))
    holds(serve, case)


@emulates
@pytest.mark.parametrize("blocks", [132, 2])  # many blocks a job; one
@pytest.mark.parametrize("kind", ["swapped", "negative", "step"])
@pytest.mark.parametrize("case", CASES[:3], ids=str)
def test_an_lse_has_any_strides(serve, monkeypatch, case, kind, blocks):
    monkeypatch.setenv("FA_EMULATOR_SMS", str(blocks))
    lse_views.assert_written(serve, case.host_inputs(), kind, check=False)


@emulates
@pytest.mark.parametrize("blocks", [132, 10, 3])
@pytest.mark.parametrize(
    "case",
    ["B1,H4/2,S2x700,D64,bfloat16,causal=bottom_right", "B50,H4/2,S1x200,D40,bfloat16,sinks=same", "B1,H14/2,S1x4400,D64,bfloat16"],
)
def test_dense_calls(serve, monkeypatch, case, blocks):
    monkeypatch.setenv("FA_EMULATOR_SMS", str(blocks))
    report = runner.verdict(serve, Case.parse(case))
    assert report, report


STORES = [dict(q=q, k=k, layout=at) for (q, k), at in zip(itertools.product(Q_STORAGE, K_STORAGE), ("bshd", "bhsd") * 5)]
STORES += [dict(page_size=size, slack=n) for n, size in enumerate((1, 8, 24, 64, 100))]
ORDERS = ([2], [1, 0], [3, 1, 1], [0] * 20 + [1] * 14)


@emulates
@pytest.mark.parametrize("rows", [FEW, THIN], ids=("few", "thin"))
@pytest.mark.parametrize("n_k", [(5, 1330, 97, 600), (8192, 1, 8200, 4097), (5, 400, 97, 64)], ids=str)
def test_the_bits_of_a_sequence_are_its_own(serve, monkeypatch, n_k, rows):
    base = Case.sequences((1, 1, 1, 1), n_k, causal="bottom_right", seed=3, **rows)

    def other_blocks(n):
        monkeypatch.setenv("FA_EMULATOR_SMS", str((2, 132, 7, 1, 24)[n % 5]))

    assert_same_bits(serve, base, STORES, ORDERS, other_blocks, q="one")


@emulates
@pytest.mark.parametrize("n_q", [(1, 2, 3, 7), (8, 1, 9, 33)], ids=str)
def test_bits_of_sequences_of_every_class(serve, monkeypatch, n_q):
    """Of one batch: of few rows, of up to 64 and of more, beside sequences of another class."""
    rows = dict(heads=8, heads_kv=2, head_dim=64, dtype="bfloat16")
    base = Case.sequences(n_q, (600, 2100, 97, 8300), causal="bottom_right", seed=5, **rows)

    def other_blocks(n):
        monkeypatch.setenv("FA_EMULATOR_SMS", str((2, 132, 7, 1, 24)[n % 5]))

    stores = [store for store in STORES if store.get("q") != "one"]
    assert_same_bits(serve, base, stores, ([0], [1], [2], [3], [3, 0], [1, 2]), other_blocks)


@emulates
def test_any_number_of_blocks_makes_the_same_bits(serve, monkeypatch):
    """Of a thin job: from the whole of it to a chunk each, with a fold by the block, by a cluster and by a kernel."""
    case, found = Case.sequences((1,), (7800,), page_size=16, seed=2, **THIN), []
    values = stored.values_of(case)
    for sms in range(1, 33):
        monkeypatch.setenv("FA_EMULATOR_SMS", str(sms))
        found.append(parts_of(serve, case, values))
        assert found[-1] == found[0], sms


def with_little_room(text):
    """Workspace for the states of one sequence, or of two."""
    text, count = re.subn(r"\blimit = device->workspace_limit;", "limit = 30000;", text)
    assert count == (0 if "serve_sm90_kernel" in text and "serve_plan" not in text else 1)
    return text


@emulates
@pytest.mark.parametrize("blocks", [132, 2])
def test_it_goes_over_the_sequences_in_turn_where_workspace_is_short(emulated, serve, monkeypatch, blocks):
    monkeypatch.setenv("FA_EMULATOR_SMS", str(blocks))
    tight = emulated(edit=with_little_room)
    for case in (CASES[0], CASES[2], CASES[0].changed(n_k=(1330, 1, 600, 90))):
        values = stored.values_of(case)
        assert parts_of(tight, case, values) == parts_of(serve, case, values), case


@emulates
def test_it_looks_at_nothing_that_nobody_may_see(serve):
    case = Case.sequences((1, 2), (100, 90), page_size=8, causal="bottom_right", window=(20, 0), **FEW)
    arguments = case.host_inputs()
    wanted = fa_ext.attention(**arguments, kernel=serve)
    table = arguments["page_table"] = arguments["page_table"].copy()
    table[0, : (100 - 1 - 20) // 8], table[0, 13:], table[1, : (90 - 2 - 20) // 8] = 99999, -7, INT_MIN
    assert fa_ext.attention(**arguments, kernel=serve, check=True).tobytes() == wanted.tobytes()
    table[0, 11] = 10**6  # a page that somebody would see: its keys are hidden
    report = fa_ext.verify(**arguments, kernel=serve, check=False)
    assert report, report


PAGED = Case.sequences((1, 3, 0, 2), (5, 33, 4, 7), slack=2, **FEW)
PACKED = Case.sequences((2, 3, 1, 2), (20, 40, 9, 17), k="packed", slack=0, **FEW)
BROKEN = [
    (PAGED, "seqlens_k", 1, -5),
    (PAGED, "seqlens_k", 0, INT_MAX),
    (PAGED, "page_table", (1, 0), -1),
    (PAGED, "page_table", (1, 2), INT_MAX),
    (PAGED, "page_table", slice(None), INT_MIN),
    (Case.sequences((1,), (1000,), page_size=16, slack=2, **THIN), "page_table", (0, slice(9, 12)), -1),  # thin, by several blocks
    (PACKED, "cu_seqlens_q", 2, 1),
    (PACKED, "cu_seqlens_q", 0, -1),
    (PACKED, "cu_seqlens_k", 2, INT_MAX),
]


@emulates
@pytest.mark.parametrize("blocks", [132, 3, 1])
@pytest.mark.parametrize(("case", "name", "at", "value"), BROKEN, ids=[f"{x[1]} {x[3]}" for x in BROKEN])
def test_bad_contents_are_counted(emulated, serve, monkeypatch, case, name, at, value, blocks):
    monkeypatch.setenv("FA_EMULATOR_SMS", str(blocks))
    arguments = case.host_inputs()
    arguments[name][at] = value
    assert_counts_as_the_reference(serve, lambda: emulator.faults(emulated.library[serve]), arguments)


@emulates
@pytest.mark.parametrize("blocks", [132, 2])
@pytest.mark.parametrize("case", [PAGED, PACKED, CASES[1], CASES[4]], ids=str)
def test_a_promise_of_the_longest_sequence(emulated, serve, monkeypatch, case, blocks):
    monkeypatch.setenv("FA_EMULATOR_SMS", str(blocks))
    assert_keeps_a_promise(serve, case, lambda: emulator.faults(emulated.library[serve]))


@emulates
@pytest.mark.parametrize("case, blocks", [(CASES[0], 132), (CASES[0], 16), (CASES[1], 1), *itertools.product(CASES[3:], (132, 1))], ids=str)
def test_no_race(emulated, monkeypatch, case, blocks):
    monkeypatch.setenv("FA_EMULATOR_SEED", "1")
    monkeypatch.setenv("FA_EMULATOR_SMS", str(blocks))
    holds(emulated(races=True), case)


@emulates
@pytest.mark.slow
@pytest.mark.parametrize("head_dim, dtype", [(64, "bfloat16"), (128, "float16"), (200, "bfloat16")])
def test_at_length(emulated, monkeypatch, head_dim, dtype):
    columns = (head_dim + 63) // 64 * 64
    kernel = emulated(instances=f"^d{columns}_{'bf16' if dtype == 'bfloat16' else 'f16'}$")
    long = Case.sequences((1, 1, 2), (8128, 8129, 20000), page_size=16, heads=3, heads_kv=1, head_dim=head_dim, dtype=dtype)
    parts = []
    for seed, blocks in enumerate((1, 3, 24, 132)):
        monkeypatch.setenv("FA_EMULATOR_SEED", str(seed))
        monkeypatch.setenv("FA_EMULATOR_SMS", str(blocks))
        for case in random_cases(60, 300 + seed, head_dim, dtype, longest=700):
            holds(kernel, case)
        parts.append(parts_of(kernel, long, stored.values_of(long)))
        assert parts[-1] == parts[0]
    holds(kernel, long)


# ---- the choice ----


@pytest.mark.skipif(KERNEL not in fa_ext.kernels(), reason="is not built")
def test_which_calls_it_takes():
    """Sequences whose rows one job holds, by how q is stored and whatever the lengths; dense calls with few jobs over many keys."""
    wide = dict(heads=32, heads_kv=8, head_dim=128, dtype="bfloat16", causal="bottom_right")

    def answer(case):
        return _core.answers(**case.host_inputs(), device=DEVICES["h200"])[KERNEL][:2]

    taken = [Case.sequences((1,) * b, (700,) * b, q="one", page_size=size, **wide) for b, size in ((1, 16), (300, 3), (2, 256))]
    taken += [Case.sequences((1, 1), (700, 800), q="one", k=k, **wide) for k in ("padded", "packed")]
    taken += [Case.sequences((4, 1), (700, 800), q="padded", slack=0, **wide)]
    taken += [Case.sequences((16, 1), (700, 800), q="padded", page_size=3, slack=0, **wide)]
    for case in taken:
        assert fa_ext.explain(**case.host_inputs(), device=DEVICES["h200"])[0] == KERNEL, case
    for case in (
        Case.sequences((1, 1), (700, 800), page_size=16, **wide),
        Case.sequences((5, 1), (700, 800), q="padded", slack=0, **wide),
        Case.sequences((17, 1), (700, 800), q="padded", page_size=3, slack=0, **wide),
        Case.sequences((1, 1), (700, 800), q="one", **wide | {"heads_kv": 1}),
        Case.sequences((3, 1), (700, 800), q="padded", slack=0, **wide | {"head_dim": 256}),
    ):
        assert answer(case) == ("declines", "faster only for sequences of few rows each, queries times heads of a kv head"), case
    for name, answers in (("B1,H32/8,S1x4096,D128", "takes"), ("B1,H32/8,S1x2048,D128", "declines"), ("B4,H32/8,S1x4096,D128", "declines"),
                          ("B2,H28/4,S1x4096,D128", "declines"),
                          ("B1,H32/8,S1x4096,D64", "declines")):  # fmt: skip
        dense = Case.parse(f"{name},bfloat16")
        assert _core.answers(**dense.host_inputs(), device=DEVICES["h200"])[KERNEL][0] == answers, name
    tight = DEVICES["h200"] | {"workspace_limit": 1 << 10}
    found = _core.answers(**taken[0].host_inputs(), device=tight)[KERNEL]
    assert found[:2] == ("not here", "its states of chunks of keys do not fit into FA_EXT_WORKSPACE_MB")


# ---- on a GPU ----


@on_gpu(KERNEL)
@pytest.mark.parametrize("head_dim, dtype", ON_A_GPU)
def test_on_a_gpu_against_float64(head_dim, dtype):
    cases = [case.changed(**FEW, page_size=size) for case in CASES[:2] for size in (1, 3, 8, 16, 24, 64, 256)]
    cases += [*CASES, Case.sequences((1, 1, 2), (8128, 8129, 140000), **MORE), Case.sequences((1,) * 300, (70,) * 300, q="one", **FEW)]
    cases = [case.changed(head_dim=head_dim, head_dim_v=head_dim, dtype=dtype) for case in cases]
    for case in [*cases, *random_cases(200, 7, head_dim, dtype, longest=3000)]:
        holds(KERNEL, case, on_device)


@on_gpu(KERNEL)
def test_on_a_gpu_the_bits_of_a_sequence_are_its_own():
    base = Case.sequences((1, 1, 1, 1), (5, 40000, 97, 9000), causal="bottom_right", seed=3, **FEW | {"head_dim": 128})
    for _ in range(20):
        assert_same_bits(KERNEL, base, STORES, (*ORDERS, [1], [2, 3] * 100), put=on_device, q="one")


@on_gpu(KERNEL)
def test_on_a_gpu_a_graph_takes_other_lengths():
    case = Case.sequences((1,) * 8, (3000,) * 8, q="one", causal="bottom_right", **FEW | {"head_dim": 128})

    def change(arguments, rng):
        import torch

        arguments["seqlens_k"].copy_(torch.from_numpy(rng.integers(0, 3001, 8).astype(np.int32)))

    assert_graph_takes_other_lengths(KERNEL, case, change, 1000)
