"""Gradients of sequences on the emulator of CUDA: a part of what test_packed_backward.py holds kernels to, by other orders of threads;
the bits of a sequence, what a device counts, indices that change, races, and mutants."""

import itertools
import platform
import shutil
import sys

import numpy as np
import pytest

import fa_ext
from bench.problems import serving_cases
from bench.problems.case import Case
from bench.problems.placement import Unplaceable
from tests import emulator
from tests.contract import changing, gradients
from tests.contract.gradients import Problem, make, run, verdict
from tests.contract.sequence_gradients import arguments_of, as_dense, elsewhere, parts_of, values_of
from tests.emulator.emulated import on_the_cpu, replaced, seeds_that_fail

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None or sys.platform != "linux" or platform.machine() != "x86_64",
    reason="the emulator is for g++ on x86-64 Linux",
)

#: How each kernel is built: with the dense instances that bits are compared with, and without.
KERNELS = {
    "mma_backward_sm80": dict(instances="^(sequences_)?d64$"),
    "wgmma_backward_sm90": dict(instances="^(sequences_)?d64_[a-z]+_f16$"),
    "wgmma_fused_backward_sm90": dict(instances="^(sequences_(ordered_)?|ordered_)d64_(full|masked)_f16$"),
}
ALONE = {
    "mma_backward_sm80": dict(instances="^sequences_d64$"),
    "wgmma_backward_sm90": dict(instances="^sequences_d64_masked_f16$"),
    "wgmma_fused_backward_sm90": dict(instances="^sequences_ordered_d64_masked_f16$"),
}
#: The workspace that there is: what to replace, and by what.
SHORT = {
    "mma_backward_sm80": ("double(device->workspace_limit)", "11000.0"),
    "wgmma_backward_sm90": ("std::min<size_t>(device->workspace_limit,", "std::min<size_t>(14000,"),
    "wgmma_fused_backward_sm90": ("std::min<size_t>(device->workspace_limit,", "std::min<size_t>(400000,"),
}
#: Options that a kernel does not take, as a case has them.
REFUSED = {
    "mma_backward_sm80": {},
    "wgmma_backward_sm90": {"alibi": None, "dropout": None},
    "wgmma_fused_backward_sm90": {"alibi": None, "dropout": None, "softcap": 0.0},
}
WRT = ("q", "k", "v")
BACKWARD = {"operation": "backward", "dlse": True, "dtype": "float16", "head_dim": 64}


@pytest.fixture(params=KERNELS)
def kernel(request):
    return request.param


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    """emulated(kernel, tag, **options): (the name under which a build of it is loaded, its library), once for each tag."""
    folder, loaded = tmp_path_factory.mktemp("gradients"), {}

    def get(kernel, tag="right", **options):
        if (kernel, tag) not in loaded:
            built = KERNELS if tag == "right" else ALONE
            target = emulator.build(kernel, folder / f"{kernel}.{tag}.so", **built[kernel] | options)
            loaded[kernel, tag] = emulator.load(target, kernel), target
        return loaded[kernel, tag]

    with on_the_cpu(lambda: [name for name, _ in loaded.values()]):
        yield get


@pytest.fixture(params=(0, 1, 2))
def seed(request, monkeypatch):
    monkeypatch.setenv("FA_EMULATOR_SEED", str(request.param))
    return request.param


def sequences(n_q, n_k, heads=2, heads_kv=1, **options) -> Case:
    return Case.sequences(n_q, n_k, heads, heads_kv, **{"k": "packed"} | BACKWARD | options)


def fitted(case, kernel):
    """The case as a kernel with 16-bit types of head_dim 33 to 64 and no positions takes it."""
    case = taken(case, kernel).changed(positions=None)
    if kernel.startswith("wgmma"):
        columns = max(40, min(case.head_dim // 8 * 8, 64))
        return case.changed(dtype="float16", head_dim=columns, head_dim_v=columns)
    dtype = case.dtype if case.dtype in ("float16", "bfloat16") else "float16"
    return case.changed(dtype=dtype, head_dim=max(40, min(case.head_dim, 64)), head_dim_v=max(40, min(case.head_dim_v, 64)))


def taken(case, kernel):
    """The case without what a kernel does not take."""
    return case.changed(**REFUSED[kernel])


# ---- what is computed ----


def test_sequences(emulated, kernel, seed):
    row, _ = emulated(kernel)
    found = [*serving_cases.gradient_grid()[::4], *serving_cases.gradient_lengths()[::3], *serving_cases.random_gradients(30, seed, longest=70)]
    for case in found[seed::3]:
        report = verdict(row, make(fitted(case, kernel)))
        assert report, f"{case}\n{report}"


TILES = sequences((127, 1, 64, 129, 65, 0, 63), (1, 130, 64, 65, 128, 7, 0), causal="bottom_right", sinks=True)


@pytest.mark.parametrize("options", [
    {}, {"window": (60, 3), "causal": False, "k_range": True}, {"alibi": "batch", "softcap": 4.0, "dropout": (0.3, 7)},
    {"q": "padded", "k": "padded", "layout": "bhsd", "causal": "top_left", "accumulate": True},
])  # fmt: skip
def test_lengths_beside_those_of_tiles(emulated, kernel, options):
    row, _ = emulated(kernel)
    assert (report := verdict(row, make(taken(TILES.changed(**options), kernel)))), report


def test_many_sequences(emulated, kernel, monkeypatch):
    """More than a pass of the list takes, and than a part of dsinks has."""
    monkeypatch.setenv("FA_EMULATOR_SEED", "1")
    row, _ = emulated(kernel)
    n_q, n_k = tuple(n * 5 % 4 for n in range(600)), tuple(n * 7 % 11 for n in range(600))
    for q, k in (("packed", "packed"), ("padded", "packed")):
        case = sequences(n_q, n_k, 1, sinks=True, q=q, k=k, causal="bottom_right")
        assert (report := verdict(row, make(case))), report


def test_bias_and_mask_of_padded_arrays(emulated, seed):
    row, _ = emulated("mma_backward_sm80")
    case, rng = sequences((3, 0, 70, 1), (7, 4, 90, 5), 4, 2, q="padded", k="padded", layout="bhsd", causal="bottom_right"), np.random.default_rng(seed)
    shape = ((4, 4, 73, 93), (1, 1, 73, 93), (4, 1, 1, 93))[seed]
    inputs = arguments_of(case) | {"bias": rng.standard_normal(shape).astype(np.float32), "mask": rng.random((4, 1, 73, 93)) < 0.7}
    out, lse = fa_ext.reference.attention(**{n: x for n, x in inputs.items() if n not in ("dout", "dlse", "out", "lse")})
    given = inputs | {"out": out.astype(np.float16), "lse": lse.astype(np.float32)}
    report = fa_ext.verify_backward(**given, wrt=(*WRT, "bias"), kernel=row)
    assert report, report


def test_heads_in_groups_where_workspace_is_short(emulated, kernel):
    """Of two kv heads the rows of one fit at a time."""
    row, _ = emulated(kernel)
    short, _ = emulated(kernel, "short", edit=replaced(*SHORT[kernel]))
    problem = make(sequences((70, 3), (90, 40), 4, 2, sinks=True, causal="bottom_right"))
    few, many = run(short, problem), run(row, problem)
    for name in problem.wrt:
        assert few[name].tobytes() == many[name].tobytes()
    with pytest.raises(Unplaceable, match="8 bytes a query row"):
        run(short, make(sequences((700, 3), (90, 40), 4, 2)))


# ---- bits ----

BASE = sequences((1, 135, 0, 17, 70), (5, 133, 4, 197, 3), 4, 2, causal="bottom_right", seed=3)
OPTIONS = {
    "plain": {}, "whole": {"causal": False}, "window": {"window": (50, 9), "causal": False}, "top left": {"causal": "top_left"}, "one head a group": {"heads_kv": 4},
    "one kv head": {"heads_kv": 1}, "every score": {"alibi": "heads", "softcap": 4.0}, "dropout": {"dropout": (0.3, 7)},
}  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_bits_of_a_sequence_are_its_own(emulated, kernel, options, monkeypatch):
    """In every storage, alone, among others, and as those of a dense call."""
    monkeypatch.setenv("FA_EMULATOR_SMS", "1")  # dense calls, too, are large
    row, _ = emulated(kernel)
    base = taken(BASE.changed(**options), kernel)
    values, wanted = values_of(base), []
    for b, x in enumerate(values):
        got = fa_ext.attention_backward(**as_dense(base, x, b), kernel=row)
        wanted.append([g[0].swapaxes(0, 1).tobytes() for g in got])
    stores = [dict(q=q, k=k) for q, k in itertools.product(("padded", "packed"), ("padded", "packed"))]
    stores += [dict(slack=0), dict(q="padded", k="padded", layout="bhsd", slack=70)]
    for seed, store in enumerate(stores):
        monkeypatch.setenv("FA_EMULATOR_SEED", str(seed))
        case = base.changed(**store)
        inputs = arguments_of(case, values)
        got = run(row, Problem(case, inputs, WRT))
        for b, part in enumerate(parts_of(case, inputs, got)):
            assert [part[name].tobytes() for name in WRT] == wanted[b], (store, b)
        for name in WRT:
            assert (elsewhere(case, inputs, name, got[name]) == 0).all()
    if not base.dropout:  # of sequence 0, not of sequence 1
        alone = base.changed(n_q=base.n_q[1:2], n_k=base.n_k[1:2])
        inputs = arguments_of(alone, values[1:2])
        part = parts_of(alone, inputs, run(row, Problem(alone, inputs, WRT)))[0]
        assert [part[name].tobytes() for name in WRT] == wanted[1]


# ---- index arrays ----


def test_a_device_counts_what_the_host_counts(emulated, kernel, seed):
    row, library = emulated(kernel)
    rng = np.random.default_rng(seed)
    emulator.faults(library), fa_ext.faults(None)
    for case in serving_cases.random_gradients(12, seed + 70, longest=40):
        problem = make(fitted(case, kernel).changed(accumulate=False))
        inputs = {n: np.nan_to_num(x, nan=0.5) if isinstance(x, np.ndarray) else x for n, x in problem.inputs.items()}
        for name in ("cu_seqlens_q", "seqlens_q", "cu_seqlens_k", "seqlens_k"):
            if name in inputs:
                noise = rng.choice([-3, 0, 40, changing.INT_MAX, changing.INT_MIN], inputs[name].shape)
                inputs[name] = np.where(rng.random(inputs[name].shape) < 0.2, noise, inputs[name]).astype(np.int32)
        given = {n: x for n, x in inputs.items() if n not in ("deterministic", "accumulate")}
        out, lse = fa_ext.reference.attention(**{n: x for n, x in given.items() if n not in ("dout", "dlse", "out", "lse")})
        given |= {"out": out.astype(given["out"].dtype), "lse": lse.astype(np.float32)}
        report = fa_ext.verify_backward(**given, wrt=problem.wrt, check=False, kernel=row)
        assert report, f"{case}\n{report}"
        met, wanted = emulator.faults(library), fa_ext.faults(None)
        if any(inputs[name].size for name in problem.wrt):
            assert [x[:2] for x in met] == [x[:2] for x in wanted], case


def test_indices_may_change_meanwhile(emulated, kernel):
    changing.run(emulated(kernel)[0], 0.3, dtypes=("float16",))


# ---- races, and what is wrong ----


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0, "dropout": (0.3, 7)}])
def test_no_race(emulated, kernel, monkeypatch, options):
    monkeypatch.setenv("FA_EMULATOR_SEED", "1")
    row, _ = emulated(kernel, "races", races=True)
    case = sequences((3, 70), (50, 90), causal="bottom_right", sinks=True, **options)
    assert verdict(row, make(taken(case, kernel)))


#: {mistake: (kernel, the right text, the wrong one, how often the files have it)}
MUTANTS = {
    "the list's totals before all have written them": (
        "mma_backward_sm80", "if (lane == 31) scratch[warp] = x;\n    __syncthreads();", "if (lane == 31) scratch[warp] = x;", 2),
    "keys of no sequence as they were": ("mma_backward_sm80", "args.problem.accumulate ? place.seq_k : place.rows_k", "place.seq_k", 2),
    "keys of no sequence as they were, on Hopper": ("wgmma_backward_sm90", "p.accumulate ? place.seq_k : place.rows_k", "place.seq_k", 1),
    "maps that end one row late": ("wgmma_backward_sm90", "call.row_end - call.row_begin;", "call.row_end - call.row_begin + 1;", 1),
    "maps that are not acquired": ("wgmma_backward_sm90", "for (const int map : {kMapOfQ, kMapOfDout, kMapOfTileK, kMapOfTileV})",
                                   "for (const int map : {kMapOfQ, kMapOfDout, kMapOfTileK})", 2),
    "row blocks of the sequence before": ("wgmma_backward_sm90", "call.row_block = place.tile[kTilesOfRows];", "call.row_block = 0;", 1),
    "LSE to the row blocks of the sequence before": ("wgmma_fused_backward_sm90", "first_row_block(call) + row / TileQ", "row / TileQ", 2),
    "queries of no sequence as they were": ("wgmma_fused_backward_sm90", "p.accumulate ? place.seq_q : place.rows_q", "place.seq_q", 1),
}  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants(emulated, monkeypatch, mutant):
    (kernel, old, new, times), found = MUTANTS[mutant], []

    def edit(text):
        found.append(text.count(old))
        return text.replace(old, new)

    row, _ = emulated(kernel, mutant, edit=edit)
    assert sum(found) == times
    lengths = (2,) * 300 if "list" in mutant else (3, 70)
    problem = make(sequences(lengths, lengths, 1, causal="bottom_right"))
    fault = "has not acquired" if "acquired" in mutant else "wrong"
    assert any(fault in found for found in seeds_that_fail(monkeypatch, lambda: verdict(row, problem), 4))


# ---- tiles that a block is told ----

TOLD = {
    "tiles over tiles": ("mbarrier_wait(&smem.tile_empty[ring.stage], ring.parity);\n            if (!is_short)", "if (!is_short)"),
    "freed without the producer": ("C::kConsumers * 4 + C::kSequences", "C::kConsumers * 4"),
    "not waited for by the producer": ("told_row(smem, round) >= 0", "smem.tile[round % Smem::kTileStages].row >= 0"),
}
#: Sections of two heads, which without this such short sequences have not.
SECTIONS = {"section_heads(call.visible.seq_k * row_bytes, group)": "2", "section_heads(group * call.seq_q * row_bytes, 1)": "2"}
FIRST = {"int(section * width + rest - step * here)": "int(rest - step * here)"}  # the heads of the first section again


def edits(changes):
    """An edit of several texts, each of which some unit has."""

    def edit(text):
        left.difference_update(old for old in changes if old in text)
        for old, new in changes.items():
            text = text.replace(old, new)
        return text

    left = set(changes)
    return edit, left


def several_tiles(heads):
    lengths = (3, 70, 1, 9, 70, 2, 140)
    return make(sequences(lengths, lengths, heads, heads, causal="bottom_right"))


@pytest.mark.parametrize("mutant", TOLD)
def test_tiles_that_are_told_wrong(emulated, monkeypatch, mutant):
    monkeypatch.setenv("FA_EMULATOR_SMS", "1")
    edit, left = edits(dict([TOLD[mutant]]))
    row, _ = emulated("wgmma_backward_sm90", mutant, edit=edit)
    assert not left
    assert seeds_that_fail(monkeypatch, lambda: verdict(row, several_tiles(1)), 4)


def test_sections_of_heads(emulated, monkeypatch):
    monkeypatch.setenv("FA_EMULATOR_SMS", "1")
    problem = several_tiles(5)
    for tag, changes in (("sections", SECTIONS), ("the first section", SECTIONS | FIRST)):
        edit, left = edits(changes)
        row, _ = emulated("wgmma_backward_sm90", tag, edit=edit)
        assert not left
        assert bool(seeds_that_fail(monkeypatch, lambda: verdict(row, problem), 2)) == (changes != SECTIONS)
