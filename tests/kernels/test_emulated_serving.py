"""Sequences, pages, ALiBi, dropout and append on the emulator of CUDA: a part of what test_serving.py, test_append.py,
test_alibi.py and test_dropout.py hold kernels to, by other orders of threads, what a device counts, and races."""

import dataclasses
import itertools
import platform
import re
import shutil
import sys

import numpy as np
import pytest

import emulator
import fa_ext
import rows
import serving_cases
from case import Case
from emulated import replaced, seeds_that_fail
from fa_ext import dropout_keep
from serving_calls import attend, parts_of, same_bits
from serving_cases import INT_MAX, INT_MIN, ServingCase, append_call

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None or sys.platform != "linux" or platform.machine() != "x86_64",
    reason="the emulator is for g++ on x86-64 Linux",
)

SIMT = dict(flags=("-DHEAD_DIM=64",), instances="^serve_(f16|f32)$")


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    """emulated(kernel, tag, **options): (the name under which a build of it is loaded, its library), once for each tag."""
    folder, loaded, device_of = tmp_path_factory.mktemp("serving"), {}, rows.device_of

    def get(kernel, tag="right", **options):
        if (kernel, tag) not in loaded:
            target = emulator.build(kernel, folder / f"{kernel}.{tag}.so", **(SIMT if kernel == "simt" else {}) | options)
            loaded[kernel, tag] = emulator.load(target, kernel), target
        return loaded[kernel, tag]

    rows.device_of = lambda row: "cpu" if row in [name for name, _ in loaded.values()] else device_of(row)
    yield get
    rows.device_of = device_of


@pytest.fixture(params=(0, 1, 2))
def seed(request, monkeypatch):
    monkeypatch.setenv("FA_EMULATOR_SEED", str(request.param))
    return request.param


@pytest.fixture(params=("1", "132"))
def sms(request, monkeypatch):
    """With one multiprocessor a block of append takes several tokens."""
    monkeypatch.setenv("FA_EMULATOR_SMS", request.param)


def some_cases(seed):
    """A part of the grid, another for each seed."""
    found = [c for c in serving_cases.grid() if max(c.head_dim, c.head_dim_v) <= 64 and c.dtype in ("float16", "float32")]
    found += [c for c in serving_cases.lengths() if len(c.n_q) <= 33 and c.dtype == "float32"]
    return found[seed::3][::2]


# ---- what is computed ----


def test_sequences(emulated, seed):
    row, _ = emulated("simt")
    for case in some_cases(seed):
        report = fa_ext.verify(**case.arguments(), kernel=row)
        assert report, f"{case}\n{report}"


def test_a_block_walks_over_several_tiles(emulated, seed, monkeypatch):
    """The grid is not bound by multiprocessors: an edit bounds it, since no test has 2^31 tiles."""

    def edit(text):
        pattern = r"(?<=plan->blocks = o\.tiles <)\s*\(2147483647\)\s*\? o\.tiles :.*?;"
        text, count = re.subn(pattern, "3 ? o.tiles : 3;", text)
        assert count == (2 if "fa_answer plan_serving" in text else 0)
        return text

    row, _ = emulated("simt", "few", instances="^serve_f16$", edit=edit)
    case = ServingCase((3, 70, 0, 33), (50, 90, 3, 200), 2, 1, 16, dtype="float16", causal="bottom_right", page_size=5)
    assert fa_ext.verify(**case.arguments(), kernel=row)


def test_the_bits_of_a_sequence_are_its_own(emulated, seed):
    row, _ = emulated("simt")
    base = ServingCase((1, 35, 0, 17), (5, 133, 4, 97), 4, 2, 40, dtype="float16", causal="bottom_right", seed=3)
    values, wanted = base.values(), None
    stores = [dict(q=q, k=k) for q, k in itertools.product(("padded", "packed"), ("padded", "packed", "paged"))]
    stores += [dict(page_size=size, layout="bhsd", cache="swapped") for size in (1, 3, 64)]
    for store in stores:
        case = dataclasses.replace(base, **store)
        parts = [x for pair in parts_of(case, case.arguments(values), *attend(row, case.arguments(values))) for x in pair]
        wanted = wanted or parts
        assert same_bits(parts, wanted), case
    alone = dataclasses.replace(base, n_q=base.n_q[1:2], n_k=base.n_k[1:2])
    part = parts_of(alone, alone.arguments(values[1:2]), *attend(row, alone.arguments(values[1:2])))[0]
    assert same_bits(part, wanted[2:4])


def test_dense_calls_with_what_dense_instances_lack(emulated, seed):
    row, _ = emulated("simt")
    case = Case(1, 4, 2, 37, 75, 40, 64, dtype="float16", causal="bottom_right", sinks="same", alibi="batch")
    assert rows.verdict(row, case)
    assert fa_ext.verify(**case.host_inputs(), dropout=(0.3, 7, 1), kernel=row)
    inputs = Case(1, 2, 2, 39, 50, 16, 50, dtype="float32").host_inputs()
    inputs["v"] = np.broadcast_to(np.eye(50, dtype=np.float32), (1, 2, 50, 50))
    drawn = (0.4, 11, 3, (5, 3, 77, 1001), 9)
    np.testing.assert_array_equal(fa_ext.attention(**inputs, dropout=drawn, kernel=row) != 0, dropout_keep(1, 2, 39, 50, drawn))


def test_append(emulated, seed, sms):
    row, _ = emulated("append")
    for n, (q, dtype) in enumerate(itertools.product(("packed", "padded", "one"), ("float32", "float16"))):
        case = ServingCase((1, 1, 1, 1) if q == "one" else (1, 30, 0, 7), (5, 33, 4, 7), q=q, dtype=dtype, page_size=n + 1, head_dim=40)
        for options in ({}, {"rotary": 8, "q": True, "interleaved": bool(n % 2)}, {"rotary": 3, "q": True, "values": False}):
            report = fa_ext.verify_append(**append_call(case, seed=seed, **options), kernel=row)
            assert report, report


def test_slots_and_doubles(emulated, seed, sms):
    row, _ = emulated("append")
    call = append_call(ServingCase((60,), (60,), page_size=4, dtype="float16"), rotary=4, q=True, positions=True)
    for name in ("page_table", "seqlens_k", "cu_seqlens_q"):
        del call[name]
    slots = np.random.default_rng(seed).integers(-2, 20, len(call["k"]))
    positions = call["positions"].copy()
    positions[::7] = 5000  # beyond the tables: such a token replaces no other
    assert fa_ext.verify_append(**call | {"slots": slots}, kernel=row)
    assert fa_ext.verify_append(**call | {"slots": slots, "positions": positions}, check=False, kernel=row)
    fa_ext.faults(None)


# ---- what a device counts ----


def noisy(arguments, rng, names=("cu_seqlens_q", "seqlens_q", "cu_seqlens_k", "seqlens_k", "page_table")):
    for name in names:
        if name in arguments:
            x = arguments[name]
            noise = rng.choice([-3, 0, 40, INT_MAX, INT_MIN], x.shape)
            arguments[name] = np.where(rng.random(x.shape) < 0.2, noise, x).astype(np.int32)
    return arguments


def counts(found):
    return {kind: count for kind, count, *_ in found}


def test_attention_counts_on_the_device_what_the_host_counts(emulated, seed):
    row, library = emulated("simt")
    rng = np.random.default_rng(seed)
    emulator.faults(library), fa_ext.faults(None)
    for case in serving_cases.random_cases(40, seed + 70, longest=80):
        case = dataclasses.replace(case, dtype="float16", head_dim=16, head_dim_v=16)
        arguments = noisy(case.arguments(), rng)
        for name in "qkv":
            arguments[name] = np.nan_to_num(arguments[name], nan=0.5)
        report = fa_ext.verify(**arguments, check=False, kernel=row)
        assert report, f"{case}\n{report}"
        met, wanted = emulator.faults(library), fa_ext.faults(None)
        if not arguments["q"].size:
            continue  # nothing is launched
        if case.positions in (None, "same") or "page" not in counts(wanted):
            assert counts(met) == counts(wanted), case
        else:  # a page may be met by several tiles, or by none whose queries look at it
            assert {**counts(met), "page": 0} == {**counts(wanted), "page": 0}, case


def test_append_counts_on_the_device_what_the_host_counts(emulated, seed, sms):
    row, library = emulated("append")
    rng = np.random.default_rng(seed)
    emulator.faults(library), fa_ext.faults(None)
    for n in range(40):
        case = ServingCase(tuple(rng.integers(0, 6, 4)), tuple(rng.integers(6, 40, 4)), page_size=int(rng.integers(1, 9)))
        call = append_call(case, rotary=4, q=True, positions=bool(n % 2))
        fa_ext.append(**noisy(call, rng, ("page_table", "seqlens_k", "cu_seqlens_q", "positions")), check=False, kernel=row)
        assert counts(emulator.faults(library)) == counts(fa_ext.faults(None)), n


def test_the_first_of_an_epoch_is_told(emulated, seed):
    row, library = emulated("simt")
    arguments = ServingCase().arguments()
    for bad in (-5, 99, INT_MAX):
        arguments["seqlens_k"][1] = bad
        fa_ext.attention(**arguments, check=False, kernel=row)
        assert emulator.faults(library)[0] == ("length", 1, 1, 1, bad)
    fa_ext.faults(None)


# ---- races, and what is wrong ----


def test_no_race(emulated, seed):
    row, _ = emulated("simt", "races", races=True)
    case = ServingCase((3, 40), (50, 90), 2, 1, 40, dtype="float16", causal="bottom_right", page_size=5, positions="random")
    for options in ({}, {"softcap": 3.0, "alibi": "heads"}):
        assert fa_ext.verify(**dataclasses.replace(case, **options).arguments(), kernel=row)
    dense = Case(1, 2, 1, 39, 50, 16, dtype="float32")
    assert fa_ext.verify(**dense.host_inputs(), dropout=(0.3, 7), kernel=row)


def test_append_has_no_race(emulated, seed, sms):
    row, _ = emulated("append", "races", races=True)
    assert fa_ext.verify_append(**append_call(ServingCase(dtype="float16"), rotary=8, q=True), kernel=row)
    call = append_call(ServingCase((30,), (30,), dtype="float16"))
    for name in ("page_table", "seqlens_k", "cu_seqlens_q"):
        del call[name]
    assert fa_ext.verify_append(**call | {"slots": np.arange(len(call["k"])) % 11}, kernel=row)


@pytest.mark.parametrize("barrier", (5, 6))
def test_mutant_without_a_barrier(emulated, monkeypatch, barrier):
    """Of the key loop: the index is there, K is there. The barriers of the dense kernel's come before."""
    edit = replaced("lane.sync_group();", ";", barrier)
    row, _ = emulated("simt", f"barrier{barrier}", instances="^serve_f16$", edit=edit)
    arguments = ServingCase((40,), (200,), 1, 1, 64, dtype="float16").arguments()
    assert "wrong" in seeds_that_fail(monkeypatch, lambda: fa_ext.verify(**arguments, kernel=row))


def test_mutant_that_reads_behind_the_last_key(emulated, monkeypatch):
    """There is garbage, which a weight of 0 does not take out."""
    edit = replaced("if (key >= shared.keys.end) return {-1, 0};", "")
    row, _ = emulated("simt", "hidden", instances="^serve_f16$", edit=edit)
    arguments = ServingCase((2,), (20,), 1, 1, 64, dtype="float16").arguments()
    found = seeds_that_fail(monkeypatch, lambda: fa_ext.verify(**arguments, kernel=row), 3)
    assert len(found) == 3
