"""serve_sm90 where sequences are of unequal lengths: no bit depends on how many blocks there are, on whether those of a job are a
cluster, or on the batch; a mutant of the cluster; the same on a GPU."""

import random

import numpy as np
import pytest

import fa_ext
from bench.problems import stored
from bench.problems.case import Case
from bench.problems.stored import INT_MAX
from tests import emulator
from tests.contract.serving_calls import assert_counts_as_the_reference
from tests.emulator.emulated import replaced, seeds_that_fail
from tests.kernels.hopper_sequences import (
    assert_graph_takes_other_lengths,
    emulated_builds,
    emulates,
    holds,
    on_device,
    on_gpu,
    parts_of,
)

KERNEL = "serve_sm90"
emulated = emulated_builds(KERNEL, "^d64_bf16$")
FEW = dict(heads=4, heads_kv=2, head_dim=64, dtype="bfloat16")  # 8 rows a job
MORE = dict(heads=5, heads_kv=1, head_dim=64, dtype="bfloat16")  # 16

OPTIONS = (
    {},
    {"window": (70, None), "causal": "bottom_right"},
    {"sinks": True, "softcap": 2.0},
    {"k_range": True, "alibi": "heads"},
    {"positions": "random", "window": (200, 30)},
)


def in_parts(text):
    """An edit: no clusters, what blocks have in common is folded by another kernel."""
    return replaced("constexpr int64_t kMostRoom = 5;", "constexpr int64_t kMostRoom = 0;")(text)


def ragged(count, seed, longest, **replacing):
    """Batches in which sequences without keys or queries, short ones and a long one lie in any order."""
    rng = random.Random(seed)
    for n in range(count):
        batch = rng.choice((2, 3, 5, 9, 17, 140))
        shape = rng.choice((FEW, MORE))
        q = rng.choice(("one", "padded"))
        most = 1 if q == "one" else 3
        n_q = tuple(rng.choice((0, 1, 1, 1, most)) for _ in range(batch))
        top = longest if batch < 100 else 150
        n_k = [rng.choice((0, 1, 63, 64, 65, rng.randrange(150), rng.randrange(top))) for _ in range(batch)]
        n_k[rng.randrange(batch)] = top
        store = rng.choice(({"k": "padded"}, {"page_size": 16}, {"page_size": 3}))
        options = shape | store | rng.choice(OPTIONS) | replacing
        yield Case.sequences(n_q, tuple(n_k), q=q, slack=rng.randrange(3), seed=seed + n, **options)


def alone(case, b):
    """Sequence b by itself."""
    return case.changed(n_q=(case.n_q[b],), n_k=(case.n_k[b],), q="padded" if case.n_q[b] > 1 else case.storage.q)


def on_one(monkeypatch):
    monkeypatch.setenv("FA_EMULATOR_SMS", "1")  # a block a job


@emulates
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_no_bit_depends_on_who_works_on_what(emulated, monkeypatch, seed):
    whole, parts = emulated(), emulated(edit=in_parts)
    for n, case in enumerate(ragged(8, 100 * seed, 1500)):
        values = stored.values_of(case)
        on_one(monkeypatch)
        monkeypatch.setenv("FA_EMULATOR_SEED", "0")
        wanted = parts_of(whole, case, values)
        monkeypatch.setenv("FA_EMULATOR_SEED", str(seed))
        for kernel, blocks in ((whole, 132), (whole, (6, 9, 20)[n % 3]), (parts, 132), (parts, (2, 3, 11)[n % 3])):
            monkeypatch.setenv("FA_EMULATOR_SMS", str(blocks))
            assert parts_of(kernel, case, values) == wanted, (blocks, kernel == parts, case)
        if n % 4 == 0:
            holds(parts, case)


@emulates
@pytest.mark.parametrize("blocks", [1, 3, 40, 132])
def test_a_sequence_has_its_bits_in_every_batch(emulated, monkeypatch, blocks):
    whole, parts = emulated(), emulated(edit=in_parts)
    base = Case.sequences((1, 1, 3, 1, 1), (1, 1200, 130, 0, 577), q="padded", k="padded", causal="bottom_right",
                       window=(600, None), **FEW)  # fmt: skip
    values = stored.values_of(base)
    on_one(monkeypatch)
    wanted = [parts_of(whole, alone(base, b), [values[b]])[0] for b in range(5)]
    monkeypatch.setenv("FA_EMULATOR_SMS", str(blocks))
    for order in ([0, 1, 2, 3, 4], [1, 3], [3, 3, 3, 2], [4, 4, 1, 0, 3, 0, 1], [3, 0] * 100 + [4] + [2] * 100):
        case = base.changed(n_q=tuple(base.n_q[b] for b in order), n_k=tuple(base.n_k[b] for b in order))
        for kernel in (whole, parts):
            assert parts_of(kernel, case, [values[b] for b in order]) == [wanted[b] for b in order], order


@emulates
def test_long_sequences_among_short_ones(emulated, monkeypatch):
    """Chunks of several units, as the kernel is."""
    kernel = emulated()
    case = Case.sequences((1,) * 9, (70, 9000, 0, 512, 33000, 1, 8128, 8129, 300), page_size=64, heads=2, heads_kv=2, head_dim=64,
                       dtype="bfloat16", q="one")  # fmt: skip
    values = stored.values_of(case)
    found = []
    for blocks in (1, 2, 13, 132):
        monkeypatch.setenv("FA_EMULATOR_SMS", str(blocks))
        found.append(parts_of(kernel, case, values))
    assert all(x == found[0] for x in found)
    holds(kernel, case)


PAGED = Case.sequences((1, 3, 0, 2), (5, 633, 4, 700), q="padded", slack=2, **FEW)
BROKEN = [
    ("seqlens_k", 1, -5),
    ("seqlens_k", 0, INT_MAX),
    ("seqlens_q", 2, INT_MAX),
    ("page_table", (1, 0), -1),
    ("page_table", (3, 20), INT_MAX),
    ("page_table", slice(None), -3),
]


@emulates
@pytest.mark.parametrize("blocks", [132, 9, 1])
@pytest.mark.parametrize(("name", "at", "value"), BROKEN, ids=[f"{x[0]} {x[2]}" for x in BROKEN])
def test_bad_contents_are_counted_once(emulated, monkeypatch, name, at, value, blocks):
    monkeypatch.setenv("FA_EMULATOR_SMS", str(blocks))
    for kernel in (emulated(edit=in_parts), emulated()):
        arguments = PAGED.host_inputs()
        arguments[name][at] = value
        assert_counts_as_the_reference(kernel, lambda kernel=kernel: emulator.faults(emulated.library[kernel]), arguments)


@emulates
@pytest.mark.parametrize("blocks", [20, 2])
def test_no_race(emulated, monkeypatch, blocks):
    monkeypatch.setenv("FA_EMULATOR_SEED", "1")
    monkeypatch.setenv("FA_EMULATOR_SMS", str(blocks))
    for kernel in (emulated(races=True, edit=in_parts), emulated(races=True)):
        for case in (PAGED, PAGED.changed(n_k=(1100, 64, 1, 300), **MORE)):
            holds(kernel, case)


@emulates
def test_a_cluster_that_does_not_wait_shows(emulated, monkeypatch):
    monkeypatch.setenv("FA_EMULATOR_SMS", "9")
    case = Case.sequences((1, 1, 1), (1500, 900, 64), q="one", page_size=16, **FEW)
    edit = replaced("if (params.clustered) cluster_wait();", "")
    hasty = emulated(instances="^d64_bf16$", edit=lambda text: edit(text).replace("if (params.clustered) cluster_arrive();", ""))
    holds(emulated(), case)
    assert seeds_that_fail(monkeypatch, lambda: fa_ext.verify(**case.host_inputs(), kernel=hasty, check=False), 4)


# ---- on a GPU ----


@on_gpu(KERNEL)
def test_on_a_gpu_no_bit_depends_on_the_batch():
    for head_dim, dtype in ((64, "float16"), (128, "bfloat16"), (256, "bfloat16")):
        wide = dict(head_dim=head_dim, head_dim_v=head_dim, dtype=dtype)
        for case in ragged(60, 9, 9000, **wide):
            if case.positions or case.k_range or len(case.n_q) > 9:  # options that say something of each sequence; slow
                continue
            values = stored.values_of(case)
            found = parts_of(KERNEL, case, values, on_device)
            for b in range(len(case.n_q)):
                assert parts_of(KERNEL, alone(case, b), [values[b]], on_device) == [found[b]], (b, case)


@on_gpu(KERNEL)
def test_on_a_gpu_ragged_batches_against_float64():
    for case in ragged(60, 77, 9000, head_dim=128, head_dim_v=128):
        holds(KERNEL, case, on_device)


@on_gpu(KERNEL)
def test_on_a_gpu_a_graph_takes_other_lengths():
    for batch, width in ((16, 3000), (12, 9000)):  # a cluster a job; parts of it
        case = Case.sequences((1,) * batch, (width,) * batch, q="one", causal="bottom_right", **FEW | {"head_dim": 128})

        def change(arguments, rng, batch=batch, width=width):
            import torch

            lengths = rng.integers(0, width + 1, batch) * rng.integers(0, 2, batch)
            arguments["seqlens_k"].copy_(torch.from_numpy(lengths.astype(np.int32)))

        assert_graph_takes_other_lengths(KERNEL, case, change, 200)
