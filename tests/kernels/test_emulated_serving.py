"""Sequences, pages, ALiBi, dropout and append on the emulator of CUDA: a part of what test_serving.py, test_append.py,
test_alibi.py and test_dropout.py hold kernels to, by other orders of threads, what a device counts, and races."""

import itertools
import platform
import re
import shutil
import sys

import numpy as np
import pytest

import fa_ext
from bench.problems import magnitudes, serving_cases, stored
from bench.problems.case import Case
from bench.problems.lengths import Q_STORAGE
from bench.problems.serving_cases import append_call
from bench.problems.stored import INT_MAX, INT_MIN
from fa_ext import _core, dropout_keep
from tests import emulator
from tests.contract import lse_views, runner
from tests.contract.serving_calls import assert_keeps_a_promise, attend, exact_verdict, parts_of, same_bits
from tests.emulator.emulated import on_the_cpu, replaced, seeds_that_fail

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None or sys.platform != "linux" or platform.machine() != "x86_64",
    reason="the emulator is for g++ on x86-64 Linux",
)

#: How each kernel that serves is built: what the cases here need of it.
SERVING = {
    "simt": dict(flags=("-DHEAD_DIM=64",), instances="^serve_(f16|f32)$"),
    "mma_sm80": dict(instances="^serve_d64$"),
}
FEWER = {"simt": dict(instances="^serve_f16$"), "mma_sm80": {}}  # for mutants


@pytest.fixture(params=SERVING)
def kernel(request):
    return request.param


def adapted(kernel, case):
    """The case, or one like it that the kernel's build takes: mma_sm80 has 16-bit types, and its narrow head_dims are left out."""
    if kernel != "mma_sm80":
        return case
    dims = {"head_dim": max(case.head_dim, 33)} | ({"head_dim_v": max(case.head_dim_v, 33)} if case.head_dim_v else {})
    return case.changed(dtype="bfloat16" if case.dtype == "float32" else case.dtype, **dims)


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    """emulated(kernel, tag, **options): (the name under which a build of it is loaded, its library), once for each tag."""
    folder, loaded = tmp_path_factory.mktemp("serving"), {}

    def get(kernel, tag="right", **options):
        if (kernel, tag) not in loaded:
            target = emulator.build(kernel, folder / f"{kernel}.{tag}.so", **SERVING.get(kernel, {}) | options)
            loaded[kernel, tag] = emulator.load(target, kernel), target
        return loaded[kernel, tag]

    with on_the_cpu(lambda: [name for name, _ in loaded.values()]):
        yield get


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


def test_sequences(emulated, kernel, seed):
    row, _ = emulated(kernel)
    for case in some_cases(seed):
        case = adapted(kernel, case)
        report = fa_ext.verify(**case.host_inputs(), kernel=row)
        assert report, f"{case}\n{report}"


@pytest.mark.slow
@pytest.mark.parametrize("kind", magnitudes.KINDS)
def test_scores_of_every_magnitude(emulated, kernel, kind):
    row, _ = emulated(kernel)
    wrong = []
    for case in serving_cases.magnitude(kind)[::3]:
        case = adapted(kernel, case)
        if kernel == "simt" and case.dtype == "bfloat16":
            case = case.changed(dtype="float32")
        if magnitudes.holds(*case.logits, case.head_dim, case.dtype, 1 / 16):
            report = exact_verdict(row, case)
            wrong += [] if report else [f"{case}: {report.failures[0]}"]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("kind", ["swapped", "negative", "step"])
@pytest.mark.parametrize("storage", Q_STORAGE)
def test_an_lse_has_any_strides(emulated, kernel, storage, kind):
    row, _ = emulated(kernel)
    n_q = (1, 1, 0, 1) if storage == "one" else (1, 7, 0, 37)
    case = Case.sequences(n_q, (5, 900, 4, 90), q=storage, head_dim=64, dtype="float16", causal="bottom_right")
    lse_views.assert_written(row, case.host_inputs(), kind)


#: Where plans of serving say how many blocks there are.
BLOCKS = {
    "simt": (r"(?<=plan->blocks = o\.tiles <)\s*\(2147483647\)\s*\? o\.tiles :.*?;", "3 ? o.tiles : 3;", "fa_answer plan_serving"),
    "mma_sm80": (r"(?<=plan->blocks = std::min<int64_t>\(own\.units, )\s*\(2147483647\)\s*\);", "3);", "inline void plan_parts"),
}


def test_a_block_walks_over_several_tiles(emulated, kernel, seed):
    """The grid is not bound by multiprocessors: an edit bounds it, since no test has 2^31 tiles."""

    def edit(text):
        pattern, new, where = BLOCKS[kernel]
        text, count = re.subn(pattern, new, text)
        assert count == (2 if where in text else 0)
        return text

    row, _ = emulated(kernel, "few", edit=edit, **FEWER[kernel])
    case = Case.sequences((3, 70, 0, 33), (50, 90, 3, 200), 2, 1, 40, dtype="float16", causal="bottom_right", page_size=5)
    assert fa_ext.verify(**case.host_inputs(), kernel=row)


def test_the_bits_of_a_sequence_are_its_own(emulated, kernel, seed):
    row, _ = emulated(kernel)
    base = Case.sequences((1, 35, 0, 17), (5, 133, 4, 97), 4, 2, 40, dtype="float16", causal="bottom_right", seed=3)
    values, wanted = stored.values_of(base), None
    stores = [dict(q=q, k=k) for q, k in itertools.product(("padded", "packed"), ("padded", "packed", "paged"))]
    stores += [dict(page_size=size, layout="bhsd", cache="swapped") for size in (1, 3, 64)]
    for store in stores:
        case = base.changed(**store)
        parts = [x for pair in parts_of(case, case.host_inputs(values), *attend(row, case.host_inputs(values))) for x in pair]
        wanted = wanted or parts
        assert same_bits(parts, wanted), case
    alone = base.changed(n_q=base.n_q[1:2], n_k=base.n_k[1:2])
    part = parts_of(alone, alone.host_inputs(values[1:2]), *attend(row, alone.host_inputs(values[1:2])))[0]
    assert same_bits(part, wanted[2:4])


#: Sequences of few queries in chunks: in one group, in several, in more keys than 127 chunks of 64 have.
LONG = Case.sequences((1, 3, 0, 2, 14), (300, 1300, 9, 8200, 700), 4, 2, 40, dtype="float16", causal="bottom_right", seed=4)


def in_whole(text):
    """No workspace is enough for parts: a block takes a sequence's chunks one after another."""
    return text.replace("limit = int64_t(device->workspace_limit)", "limit = 300000")


def test_who_folds_the_chunks_changes_no_bit(emulated, monkeypatch):
    """A unit is a chunk where multiprocessors are many, else a group of chunks, else all of them."""
    found, shared = [], {"window": (8150, None), "alibi": "batch", "sinks": True, "positions": "shifted"}
    for case in (LONG, LONG.changed(q="padded", k="padded", slack=0, **shared)):
        parts = []
        for seed, (sms, options) in enumerate((("132", {}), ("1", {}), ("2", {"edit": in_whole, "tag": "whole"}))):
            monkeypatch.setenv("FA_EMULATOR_SMS", sms)
            monkeypatch.setenv("FA_EMULATOR_SEED", str(seed))
            row, _ = emulated("mma_sm80", **options)
            found.append(_core.answers(**case.host_inputs(), kernel=row)[row][2]["workspace_bytes"])
            arguments = case.host_inputs()
            assert fa_ext.verify(**arguments, kernel=row)
            parts.append([x.tobytes() for pair in parts_of(case, arguments, *attend(row, arguments)) for x in pair])
        assert parts[0] == parts[1] == parts[2]
        assert found[-3] > found[-2] > 300000 >= found[-1] > 0, found


FOLDS = [
    ("132", "part == 0 || chunk % kGroup == 0", "part == 0"),
    ("1", "chunk % kGroup) rows.fold(states, job, slots, row, slot);", "chunk % kGroup) ;"),
    ("1", "if (parted) rows.leave(", "if (parted && job.part) rows.leave("),
]


@pytest.mark.parametrize("sms, old, new", FOLDS, ids=("group", "chunk", "part"))
def test_mutants_that_fold_wrongly(emulated, monkeypatch, sms, old, new):
    monkeypatch.setenv("FA_EMULATOR_SMS", sms)
    row, _ = emulated("mma_sm80", f"fold {old}", edit=replaced(old, new))
    assert not fa_ext.verify(**LONG.host_inputs(), kernel=row)


def test_dense_calls_with_what_dense_instances_lack(emulated, kernel, seed):
    row, _ = emulated(kernel)
    case = Case(1, 4, 2, 37, 75, 40, 64, dtype="float16", causal="bottom_right", sinks="same", alibi="batch")
    assert runner.verdict(row, case)
    assert fa_ext.verify(**case.host_inputs(), dropout=(0.3, 7, 1), kernel=row)
    dressed = Case(1, 4, 2, 37, 75, 40, 64, dtype="float16", bias="holes", mask="rows", alibi="heads", softcap=3.0)
    assert fa_ext.verify(**dressed.host_inputs(), kernel=row)
    inputs = Case(1, 2, 2, 39, 50, 40, 50, dtype="float16" if kernel == "mma_sm80" else "float32").host_inputs()
    inputs["v"] = np.broadcast_to(np.eye(50, dtype=inputs["q"].dtype), (1, 2, 50, 50))
    for drawn in ((0.4, 11, 3, (5, 3, 77, 1001), 9), (0.4, 11, 3, (5, 3, 64, 1008), 9)):
        found = fa_ext.attention(**inputs, dropout=drawn, kernel=row)
        np.testing.assert_array_equal(found != 0, dropout_keep(1, 2, 39, 50, drawn))


@pytest.mark.parametrize("races", (False, True))
def test_the_words_of_dropout_in_memory(emulated, kernel, seed, monkeypatch, races):
    """Read there, they give the bits that they give as arguments."""
    row, _ = emulated(kernel, "races" if races else "right", races=races)
    x = Case(2, 4, 2, 75, 90, 40, dtype="float16", bias="keys").host_inputs()
    for drawn in ((0.3, 0x123456789ABCDEF0, 7, (1, 2, 16, 32), 9), (0.3, 5, 1, (0, 0, 3, 5), 4)):
        bits = []
        for heads in (None, "", "0"):
            monkeypatch.delenv("FA_EMULATOR_STATE", raising=False)
            if heads is not None:
                monkeypatch.setenv("FA_EMULATOR_STATE", heads)
            bits.append(runner.bits(fa_ext.attention(**x, dropout=drawn, kernel=row)))
        assert np.array_equal(bits[0], bits[1]) and np.array_equal(bits[0], bits[2])


def test_dropout_of_sequences(emulated, kernel, seed):
    """In chunks, too, and of pages; some of the cases drop all or next to nothing."""
    row, _ = emulated(kernel)
    found = [*some_cases(seed)[::3], LONG.changed(n_k=(90, 600, 9, 1300, 130)), LONG.changed(n_k=(90, 600, 9, 700, 130), q="padded", k="padded", alibi="batch")]
    for n, case in enumerate(found):
        case = adapted(kernel, case.changed(dropout=((0.3, 1.0, 0.5, 1 / 65536)[n % 4], n)))
        report = fa_ext.verify(**case.host_inputs(), kernel=row)
        assert report, f"{case}\n{report}"


@pytest.mark.parametrize("q", Q_STORAGE)
def test_dropout_counts_within_the_sequence(emulated, kernel, q):
    """With values that are an identity out holds the weights; sequence, head, query and key are shifted by the origin."""
    row, _ = emulated(kernel)
    n_q, n_k, drawn = (1, 0, 1, 1) if q == "one" else (3, 0, 35, 8), (5, 2, 50, 16), (0.5, 11, 2, (1, 0, 5, 9), 7)
    keep = dropout_keep(4, 2, max(n_q), max(n_k), drawn)
    for k in ("padded", "packed", "paged"):
        case = Case.sequences(n_q, n_k, 2, 1, 40, 50, "float16", q, k, "bshd", page_size=8)
        values = stored.values_of(case)
        for _, _, v in values:
            v[...] = np.eye(len(v), 50)[:, None, :]
        arguments = case.host_inputs(values) | {"dropout": drawn}
        for b, (out, _) in enumerate(parts_of(case, arguments, *attend(row, arguments))):
            np.testing.assert_array_equal(out[:, :, : n_k[b]] != 0, np.swapaxes(keep[b, :, : n_q[b], : n_k[b]], 0, 1))


def test_append(emulated, seed, sms):
    row, _ = emulated("append")
    for n, (q, dtype) in enumerate(itertools.product(("packed", "padded", "one"), ("float32", "float16"))):
        case = Case.sequences((1, 1, 1, 1) if q == "one" else (1, 30, 0, 7), (5, 33, 4, 7), q=q, dtype=dtype, page_size=n + 1, head_dim=40)
        for options in ({}, {"rotary": 8, "q": True, "interleaved": bool(n % 2)}, {"rotary": 3, "q": True, "values": False}):
            report = fa_ext.verify_append(**append_call(case, seed=seed, **options), kernel=row)
            assert report, report


def test_slots_and_doubles(emulated, seed, sms):
    row, _ = emulated("append")
    call = append_call(Case.sequences((60,), (60,), page_size=4, dtype="float16"), rotary=4, q=True, positions=True)
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


def test_attention_counts_on_the_device_what_the_host_counts(emulated, kernel, seed):
    row, library = emulated(kernel)
    rng = np.random.default_rng(seed)
    emulator.faults(library), fa_ext.faults(None)
    for case in serving_cases.random_cases(40, seed + 70, longest=80):
        case = case.changed(dtype="float16", head_dim=40, head_dim_v=40)
        arguments = noisy(case.host_inputs(), rng)
        if "cu_seqlens_q" in arguments and rng.random() < 0.5:
            arguments["max_seqlen_q"] = int(rng.integers(0, 12))
        for name in "qkv":
            arguments[name] = np.nan_to_num(arguments[name], nan=0.5)
        report = fa_ext.verify(**arguments, check=False, kernel=row)
        assert report, f"{case}\n{report}"
        met, wanted = emulator.faults(library), fa_ext.faults(None)
        if not arguments["q"].size:
            continue  # nothing is launched
        if case.positions is None or "page" not in counts(wanted):
            assert counts(met) == counts(wanted), case
        else:  # a page may be met by several tiles, or by none whose queries look at it
            assert {**counts(met), "page": 0} == {**counts(wanted), "page": 0}, case


def test_a_promise_of_the_longest_sequence(emulated, kernel, seed):
    row, library = emulated(kernel)
    case = Case.sequences((3, 35, 0, 17, 1), (5, 133, 4, 97, 600), 4, 2, 40, dtype="float16", causal="bottom_right", slack=2, seed=seed)
    assert_keeps_a_promise(row, case, lambda: emulator.faults(library))
    fa_ext.faults(None)


def test_append_counts_on_the_device_what_the_host_counts(emulated, seed, sms):
    row, library = emulated("append")
    rng = np.random.default_rng(seed)
    emulator.faults(library), fa_ext.faults(None)
    for n in range(40):
        case = Case.sequences(tuple(rng.integers(0, 6, 4)), tuple(rng.integers(6, 40, 4)), page_size=int(rng.integers(1, 9)))
        call = append_call(case, rotary=4, q=True, positions=bool(n % 2))
        fa_ext.append(**noisy(call, rng, ("page_table", "seqlens_k", "cu_seqlens_q", "positions")), check=False, kernel=row)
        assert counts(emulator.faults(library)) == counts(fa_ext.faults(None)), n


def test_the_first_of_an_epoch_is_told(emulated, kernel, seed):
    row, library = emulated(kernel)
    arguments = adapted(kernel, Case.sequences()).host_inputs()
    for bad in (-5, 99, INT_MAX):
        arguments["seqlens_k"][1] = bad
        fa_ext.attention(**arguments, check=False, kernel=row)
        assert emulator.faults(library)[0] == ("length", 1, 1, 1, bad)
    fa_ext.faults(None)


# ---- races, and what is wrong ----


def test_no_race(emulated, kernel, seed):
    row, _ = emulated(kernel, "races", races=True)
    case = Case.sequences((3, 40), (50, 90), 2, 1, 40, dtype="float16", causal="bottom_right", page_size=5, positions="random")
    for options in ({}, {"softcap": 3.0, "alibi": "heads"}):
        assert fa_ext.verify(**case.changed(**options).host_inputs(), kernel=row)
    dense = Case(1, 2, 1, 39, 50, 40, dtype="float16", bias="full")
    assert fa_ext.verify(**dense.host_inputs(), dropout=(0.3, 7), kernel=row)
    if kernel == "mma_sm80":
        assert fa_ext.verify(**LONG.changed(n_k=(90, 600, 9, 700, 130)).host_inputs(), kernel=row)


def test_append_has_no_race(emulated, seed, sms):
    row, _ = emulated("append", "races", races=True)
    assert fa_ext.verify_append(**append_call(Case.sequences(dtype="float16"), rotary=8, q=True), kernel=row)
    call = append_call(Case.sequences((30,), (30,), dtype="float16"))
    for name in ("page_table", "seqlens_k", "cu_seqlens_q"):
        del call[name]
    assert fa_ext.verify_append(**call | {"slots": np.arange(len(call["k"])) % 11}, kernel=row)


#: Barriers of the loop over keys: what to replace, by what, and which of several. Of simt those of the dense kernel come before.
BARRIERS = [
    ("simt", "lane.sync_group();", ";", 5),  # the index is there
    ("simt", "lane.sync_group();", ";", 6),  # K is there
    ("mma_sm80", "__syncthreads();\n            if (tile == tile_begin)", "if (tile == tile_begin)", 0),
]


@pytest.mark.parametrize("kernel, barrier, instead, at", BARRIERS, ids=("simt index", "simt keys", "mma_sm80"))
def test_mutant_without_a_barrier(emulated, monkeypatch, kernel, barrier, instead, at):
    row, _ = emulated(kernel, f"barrier{at}", edit=replaced(barrier, instead, at), **FEWER[kernel])
    arguments = Case.sequences((40,), (200,), 1, 1, 64, dtype="float16").host_inputs()
    assert "wrong" in seeds_that_fail(monkeypatch, lambda: fa_ext.verify(**arguments, kernel=row))


HIDDEN = {
    "simt": "if (key >= shared.keys.end || key < shared.held.begin || key >= shared.held.end) return {-1, 0};",
    "mma_sm80": "if (key < shared.keys.begin || key >= shared.keys.end) return {kNowhere, kNowhere};",
}


def test_mutant_that_reads_behind_the_last_key(emulated, monkeypatch, kernel):
    """There is garbage, which a weight of 0 does not take out."""
    row, _ = emulated(kernel, "hidden", edit=replaced(HIDDEN[kernel], ""), **FEWER[kernel])
    arguments = Case.sequences((2,), (20,), 1, 1, 64, dtype="float16").host_inputs()
    found = seeds_that_fail(monkeypatch, lambda: fa_ext.verify(**arguments, kernel=row), 3)
    assert len(found) == 3
