"""simt_backward on sequences, on the emulator of CUDA: a part of what test_packed_backward.py holds kernels to, by other orders of
threads, and what only it takes: positions, float32, every head_dim; the bits of its dense call, what a device counts, races."""

import itertools
import platform
import re
import shutil
import sys

import numpy as np
import pytest

import fa_ext
from bench.problems import serving_cases
from bench.problems.case import Case
from tests import emulator
from tests.contract import changing, gradients
from tests.contract.gradients import Problem, make, run, verdict
from tests.contract.sequence_gradients import arguments_of, elsewhere, parts_of, rows_of, values_of
from tests.emulator.emulated import on_the_cpu

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None or sys.platform != "linux" or platform.machine() != "x86_64",
    reason="the emulator is for g++ on x86-64 Linux",
)

WRT = ("q", "k", "v")
BACKWARD = {"operation": "backward", "dlse": True}


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    """emulated(tag, **options): (the name under which a build is loaded, its library), once for each tag."""
    folder, loaded = tmp_path_factory.mktemp("simt_backward"), {}

    def get(tag="right", instances="^serve_f32$", **options):
        if tag not in loaded:
            target = emulator.build("simt_backward", folder / f"{tag}.so", instances=instances, **options)
            loaded[tag] = emulator.load(target, "simt_backward"), target
        return loaded[tag]

    with on_the_cpu(lambda: [name for name, _ in loaded.values()]):
        yield get


@pytest.fixture
def right(emulated):
    return emulated(instances="^(serve_)?f32$")


@pytest.fixture(params=(0, 1, 2))
def seed(request, monkeypatch):
    monkeypatch.setenv("FA_EMULATOR_SEED", str(request.param))
    return request.param


def sequences(n_q, n_k, heads=2, heads_kv=1, head_dim=16, head_dim_v=None, **options) -> Case:
    return Case.sequences(n_q, n_k, heads, heads_kv, head_dim, head_dim_v, **{"k": "packed"} | BACKWARD | options)


# ---- what is computed ----


def test_sequences(right, seed):
    """The grid has every storage, causal kind, window, head_dim and option; a third of a part of it for each seed."""
    found = [*serving_cases.gradient_grid()[::2], *serving_cases.gradient_lengths()[::3], *serving_cases.random_gradients(30, seed, longest=70)]
    for case in found[seed::3]:
        report = verdict(right[0], make(case.changed(dtype="float32")))
        assert report, f"{case}\n{report}"


@pytest.mark.parametrize("positions", [None, "shifted", "random"])
def test_bias_and_mask_of_padded_arrays(right, positions):
    """dbias sums over the pairs that exist, along every axis that the bias is broadcast along."""
    case = sequences((3, 0, 70, 1), (7, 4, 80, 5), 4, 2, q="padded", k="padded", layout="bhsd", window=(30, None), positions=positions)
    rng, extents = np.random.default_rng(2), (4, 4, *arguments_of(case)["lse"].shape[2:], 83)
    for shape in (extents, (1, 1, *extents[2:]), (4, 1, 1, 83), (1,)):
        inputs = arguments_of(case) | {"bias": rng.standard_normal(shape).astype(np.float32), "mask": rng.random((4, 1, *extents[2:])) < 0.7}
        out, lse = fa_ext.reference.attention(**{n: x for n, x in inputs.items() if n not in ("dout", "dlse", "out", "lse")})
        given = Problem(case, inputs | {"out": out.astype(np.float32), "lse": lse.astype(np.float32)}, (*WRT, "bias"))
        report = gradients.judged(right[0], given, run(right[0], given))
        assert report, report


def test_what_no_query_sees_reaches_nothing(right):
    """Positions that lie far apart leave keys between them that nobody sees, and queries that see none."""
    case = sequences((5, 3), (200, 40), 2, 1, q="padded", window=(9, 9), positions="shifted", sinks=True)
    inputs = arguments_of(case)
    inputs["positions"] = np.zeros_like(inputs["positions"])
    inputs["positions"][:, :5] = [[3, 150, 30, 5000, 80], [-90, 20, 1, 0, 0]]
    seen = {0: [*range(13), *range(21, 40), *range(71, 90), *range(141, 160)], 1: [*range(30)]}
    given = {n: x for n, x in inputs.items() if n not in ("dout", "dlse", "out", "lse")}
    out, lse = fa_ext.reference.attention(**given)
    inputs |= {"out": out.astype(np.float32), "lse": lse.astype(np.float32)}
    problem = Problem(case, inputs, (*WRT, "sinks"))
    want = run(right[0], problem)
    assert (report := gradients.judged(right[0], problem, want)), report
    dirty = {n: inputs[n].copy() for n in ("q", "k", "v", "dout", "out")}
    for b, empty in ((0, 3), (1, 0)):
        for name in ("q", "dout", "out"):
            rows_of(case, inputs, name, dirty[name], b)[empty] = np.nan
        for name in ("k", "v"):
            rows = rows_of(case, inputs, name, dirty[name], b)
            rows[[n for n in range(len(rows)) if n not in seen[b]]] = np.nan
    got = run(right[0], Problem(case, inputs | dirty, problem.wrt))
    for name in problem.wrt:
        assert got[name].tobytes() == want[name].tobytes(), name


def test_rows_of_no_sequence(right):
    """They get 0, or with accumulate nothing; all that lies there is NaN."""
    for q, k in itertools.product(("padded", "packed"), ("padded", "packed")):
        case = sequences((3, 0, 67, 1), (7, 4, 5, 70), q=q, k=k, slack=70, causal="bottom_right", sinks=True)
        problem = make(case)
        got = run(right[0], problem)
        assert (report := gradients.judged(right[0], problem, got)), report
        for name in WRT:
            assert (outside := elsewhere(case, problem.inputs, name, got[name])).size and (outside == 0).all()
        old = tuple(np.full(got[name].shape, np.nan, np.float32) for name in WRT)
        for x, name in zip(old, WRT, strict=True):
            for b in range(4):
                rows_of(case, problem.inputs, name, x, b)[...] = 0
        fa_ext.attention_backward(**problem.inputs, grads=old, accumulate=True, kernel=right[0])
        for x, name in zip(old, WRT, strict=True):
            assert np.isnan(elsewhere(case, problem.inputs, name, x)).all()
            np.testing.assert_array_equal(np.nan_to_num(x), got[name])


# ---- bits ----

DIMS = ((40, 40), (64, 64), (72, 72), (128, 128), (192, 128), (256, 256))
OPTIONS = ({"causal": "bottom_right"}, {"window": (20, 3), "heads_kv": 2}, {"causal": "top_left", "softcap": 4.0}, {"dropout": (0.3, 7)},
           {"alibi": "heads", "window": (9, None)}, {"causal": "bottom_right", "dropout": (0.2, 3), "heads_kv": 4})  # fmt: skip


@pytest.mark.parametrize(("dims", "options"), list(zip(DIMS, OPTIONS, strict=True)), ids=str)
def test_a_sequence_has_the_bits_of_the_dense_call_of_its_rows(right, dims, options):
    case = sequences((1, 9, 0, 65), (5, 40, 4, 33), 4, options.get("heads_kv", 1), *dims, **{n: x for n, x in options.items() if n != "heads_kv"})
    values, found = values_of(case), []
    for q, k in (("packed", "packed"), ("padded", "packed"), ("packed", "padded"), ("padded", "padded")):
        stored = case.changed(q=q, k=k)
        inputs = arguments_of(stored, values)
        found.append(parts_of(stored, inputs, run(right[0], Problem(stored, inputs, WRT))))
    for b, x in enumerate(values):
        dense = {name: getattr(x, name).swapaxes(0, 1)[None] for name in ("dout", "q", "k", "v", "out")}
        dense |= {name: getattr(x, name).T[None] for name in ("lse", "dlse")}
        dense |= {name: inputs[name] for name in ("causal", "window", "softcap", "scale", "alibi") if name in inputs}
        dense |= {"dropout": (*case.dropout, 0, (b, 0, 0, 0), case.heads)} if case.dropout else {}
        want = run(right[0], Problem(case, dense, WRT))
        for parts, name in itertools.product(found, WRT):
            assert parts[b][name].swapaxes(0, 1).tobytes() == want[name][0].tobytes(), (b, name)


def test_the_words_of_dropout_in_memory(right, monkeypatch):
    """Read there, they give the bits that they give as arguments."""
    problem = make(sequences((3, 70), (40, 20), 4, 2))
    for drawn in ((0.3, 0x123456789ABCDEF0, 7, (1, 2, 16, 32), 9), (0.3, 5, 1, (0, 0, 3, 5), 4)):
        problem.inputs["dropout"], found = drawn, []
        for heads in (None, "", "0"):
            monkeypatch.delenv("FA_EMULATOR_STATE", raising=False)
            if heads is not None:
                monkeypatch.setenv("FA_EMULATOR_STATE", heads)
            found.append(run(right[0], problem))
        for name in problem.wrt:
            assert found[0][name].tobytes() == found[1][name].tobytes() == found[2][name].tobytes()


# ---- how it is launched ----


WORKSPACE = 5000


def few(text):
    """Three blocks a launch, and workspace for the rows of some kv heads: no test has 2^31 tiles, or rows that fill a device."""
    text, bounded = re.subn(r"count <\s*\(2147483647\)\s*\? count :\s*\(2147483647\)", "count < 3 ? count : 3", text)
    assert bounded == 1
    return text.replace("double(device->workspace_limit)", f"{WORKSPACE}.0")


def test_blocks_walk_over_tiles_and_heads_go_in_groups(emulated, right, seed):
    """Without a race in shared memory."""
    row, _ = emulated("few", edit=few, races=True)
    for options in ({"causal": "bottom_right", "sinks": True}, {"positions": "random", "window": (30, 30), "dropout": (0.3, 5)}):
        problem = make(sequences((3, 66, 0, 9), (20, 70, 3, 20), 8, 4, q="padded" if seed else "packed", **options))
        assert 8 * problem.inputs["lse"].size > WORKSPACE
        got, want = run(row, problem), run(right[0], problem)
        for name in problem.wrt:
            assert got[name].tobytes() == want[name].tobytes()
    with pytest.raises(fa_ext.UnsupportedError, match="8 bytes a query row"):
        run(row, make(sequences((3000,), (4,), 1, 1, q="padded")))


def counts(found):
    return {kind: count for kind, count, *_ in found}


def test_counts_on_the_device_what_the_host_counts(right, seed):
    """Once a call, whatever gradients are wanted."""
    row, library = right
    rng = np.random.default_rng(seed)
    emulator.faults(library), fa_ext.faults(None)
    for n, case in enumerate(serving_cases.random_gradients(30, seed + 70, longest=80)):
        problem = make(case.changed(dtype="float32", head_dim=16, head_dim_v=16, accumulate=False, sinks=True))
        inputs = {name: np.nan_to_num(x, nan=0.5) if isinstance(x, np.ndarray) else x for name, x in problem.inputs.items()}
        for name in ("cu_seqlens_q", "seqlens_q", "cu_seqlens_k", "seqlens_k"):
            if name in inputs:
                noise = rng.choice([-3, 0, 40, 2**31 - 1, -(2**31)], inputs[name].shape)
                inputs[name] = np.where(rng.random(inputs[name].shape) < 0.2, noise, inputs[name]).astype(np.int32)
        wrt = (("q",), ("k",), ("sinks",), ("q", "v"))[n % 4]
        run(row, Problem(problem.case, inputs, wrt), check=False)
        met, wanted = counts(emulator.faults(library)), counts(fa_ext.faults(None))
        assert met == wanted or not any(inputs[name].size for name in wrt), case  # of nothing to write nothing is launched


def test_index_arrays_may_change_meanwhile(right):
    """An access outside of an array ends the process."""
    changing.run(right[0], 0.3, dtypes=("float32",))
    fa_ext.faults(None)
