"""wgmma_fused_backward_sm90 and wgmma_dropout_backward_sm90 with boolean masks and ALiBi: against float64 on the emulator by masks,
broadcasts, bands and schedules, rows that see no key, one order of sums, races, mutants; on a GPU, equal bits and large calls."""

import os
import platform
import shutil
import subprocess
import sys

import numpy as np
import pytest

import fa_ext
from bench.problems.case import Case
from bench.problems.placement import dtype_of, place
from fa_ext import _build
from tests import emulator
from tests.contract import gradients, runner
from tests.emulator.emulated import on_the_cpu, replaced
from tests.kernels.emulated_gradients import differ, given, held, schedule

PLAIN, DROPOUT = "wgmma_fused_backward_sm90", "wgmma_dropout_backward_sm90"
on_emulator = pytest.mark.skipif(
    shutil.which("g++") is None or sys.platform != "linux" or platform.machine() != "x86_64",
    reason="the emulator is for g++ on x86-64 Linux",
)
#: Axes of a mask that are kept; the others have extent 1.
AXES = [a + b + c + d for a in ("", "b") for b in ("", "h") for c in ("", "q") for d in ("", "k")]
#: Tiles of keys that the mask hides from all, some or no queries; groups; what nobody sees at both ends; odd sizes.
CASES = [
    "B1,H1,S1,D64,bfloat16,mask=full",
    "B1,H2/1,S3x5,D64,bfloat16,mask=rows,alibi=heads",
    "B1,H2/1,S257x290,D64,bfloat16,mask=rows,causal=bottom_right",
    "B1,H2/1,S113x239,D128,bfloat16,mask=rows,sinks=same",
    "B2,H2,S133x150,D96,bfloat16,mask=keys",
    "B2,H4/2,S133x150,D64,bfloat16,mask=batch,window=30:20,layout=bshd",
    "B2,H2/1,S133x250,D104,bfloat16,mask=heads",
    "B2,H2/1,S239x113,D40,bfloat16,mask=strided,sinks=float32",
    "B1,H2/1,S133x150,D64,bfloat16,mask=none,sinks=same",
    "B1,H2/1,S133x150,D128,bfloat16,mask=none",
    "B1,H2/1,S133x350,D128,bfloat16,mask=one",
    "B1,H2,S113x520,D64,bfloat16,mask=rows,window=100:60",
    "B1,H2,S70x900,D128,bfloat16,mask=full,window=9:5,causal=bottom_right",
    "B2,H4/2,S190x300,D64,bfloat16,alibi=heads,causal=bottom_right",
    "B1,H2/1,S190x300,D128,bfloat16,alibi=batch",
    "B2,H3/1,S290x200,D64,bfloat16,alibi=strided,window=30:50",
    "B1,H3/1,S290x200,D64,bfloat16,alibi=steep,causal=bottom_right",
    "B1,H3/1,S150x200,D128,bfloat16,alibi=steep",
    "B1,H3/1,S290x200,D128,bfloat16,alibi=heads,mask=rows,causal=top_left,sinks=same",
    "B2,H2/1,S200x333,D64,bfloat16,intervals=full",
    "B1,H2,S150x333,D128,bfloat16,intervals=two,causal=bottom_right",
    "B2,H2,S113x130,D64,bfloat16,intervals=wild,sinks=same",
    "B1,H2,S300x290,D64,bfloat16,intervals=documents,window=200:90",
    "B2,H2/1,S140x333,D128,bfloat16,intervals=keys,alibi=heads",
    "B1,H2,S140x333,D64,bfloat16,intervals=heads,mask=keys,sinks=same",
    "B2,H2,S70x90,D64,bfloat16,intervals=none",
]
DROPPED = [
    "B1,H2/1,S113x330,D128,bfloat16,causal=bottom_right,dropout=0.3:7,mask=rows",
    "B1,H2,S150x200,D72,bfloat16,dropout=0.5:1,alibi=heads",
    "B2,H2/1,S200x333,D64,bfloat16,causal=top_left,dropout=0.1:12345678901,mask=full,alibi=heads,sinks=same",
    "B1,H2,S150x300,D64,bfloat16,window=100:30,dropout=0.2:3,layout=bshd,mask=keys",
]


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    """emulated(kernel=PLAIN, tag="", races=False, edit=None): the name under which it is loaded, once a kernel and tag."""
    folder, loaded = tmp_path_factory.mktemp("light"), {}

    def get(kernel=PLAIN, tag="", instances="_light_bf16$", **options):
        if (kernel, tag) not in loaded:
            target = folder / f"{kernel}.{len(loaded)}.so"
            emulator.build(_build.kernel_files()[kernel], target, instances=instances, **options)
            loaded[kernel, tag] = emulator.load(target, kernel)
            get.targets[loaded[kernel, tag]] = target
        return loaded[kernel, tag]

    get.targets = {}
    with on_the_cpu(loaded.values):
        yield get


def finite(got):
    return all(np.isfinite(x.astype(np.float32)).all() for x in got.values())


@on_emulator
@pytest.mark.parametrize("seed, blocks, together", [(0, 132, 1), (5, 1, 1), (1, 3, 3)])
@pytest.mark.parametrize("case", CASES)
def test_gradients(emulated, monkeypatch, case, seed, blocks, together):
    """Of one order, also where none is asked for."""
    schedule(monkeypatch, seed, blocks, together)
    held(emulated(), gradients.make(Case.parse(case), dlse=seed == 0), deterministic=seed != 5)


@on_emulator
@pytest.mark.parametrize("seed, blocks, together", [(0, 132, 1), (1, 3, 3)])
@pytest.mark.parametrize("case", DROPPED)
def test_beside_dropout(emulated, monkeypatch, case, seed, blocks, together):
    schedule(monkeypatch, seed, blocks, together)
    held(emulated(DROPOUT), gradients.make(Case.parse(case)), deterministic=True)


@on_emulator
@pytest.mark.parametrize("axes", AXES)
def test_broadcasts(emulated, axes):
    shape = [extent if axis in axes else 1 for axis, extent in zip("bhqk", (2, 4, 140, 270))]
    mask = np.random.default_rng(len(axes)).random(shape) < 0.5
    head_dim = 128 if "h" in axes else 64
    held(emulated(), given(f"B2,H4/2,S140x270,D{head_dim},bfloat16,causal=bottom_right", mask=mask))


@on_emulator
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("density", [0, 1e-4, 0.5, 1 - 1e-4, 1])
def test_densities(emulated, density, head_dim):
    mask = np.random.default_rng(3).random((1, 2, 300, 270)) < density
    held(emulated(), given(f"B1,H2/1,S300x270,D{head_dim},bfloat16", mask=mask))


@on_emulator
def test_any_byte_but_0_is_true(emulated):
    """At an address that vectors do not take, with keys that lie apart, and backwards."""
    rng = np.random.default_rng(4)
    values = rng.choice([0, 1, 2, 128, 255], (1, 1, 140, 2 * 200 + 3)).astype(np.uint8)
    for view in (values[..., 3:203], values[..., 1:401:2], values[..., 203:3:-1]):
        problem = given("B1,H2/1,S140x200,D64,bfloat16", mask=view != 0)
        problem.inputs["mask"] = view.view(bool)
        held(emulated(), problem)


@on_emulator
@pytest.mark.parametrize("kernel", [PLAIN, DROPOUT])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("sinks", ["", ",sinks=same", ",sinks=large"])
def test_queries_that_the_mask_hides_from_all_keys(emulated, kernel, head_dim, sinks):
    """Their contents reach nothing, their dq is 0, and their dlse goes to the sink alone. Hidden by the mask, and by
    the mask where causal leaves keys."""
    mask = np.random.default_rng(5).random((140, 200)) < 0.5
    mask[[0, 17, 64, 127, 139]] = False
    mask[70, :131] = False
    problem = given(f"B1,H2/1,S140x200,D{head_dim},bfloat16,causal=bottom_right{sinks}", mask=mask)
    hidden = [0, 17, 64, 70, 127, 139]
    clean = gradients.run(emulated(kernel), problem)
    report = gradients.judged(emulated(kernel), problem, clean)
    assert report, report
    for value in (np.nan, np.inf):
        for name in ("q", "dout", "out"):
            problem.inputs[name] = problem.inputs[name].copy()
            problem.inputs[name][:, :, hidden] = value
        got = gradients.run(emulated(kernel), problem)
        assert not differ(got, clean), value
    assert finite(got)
    problem.inputs["k"] = problem.inputs["k"].copy()
    problem.inputs["k"][:, :, 100] = np.nan
    assert (gradients.run(emulated(kernel), problem)["q"].astype(np.float32)[:, :, hidden] == 0).all()


@on_emulator
@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
def test_scores_of_hidden_pairs_reach_nothing(emulated, name):
    """Of any size, infinite as exponents, in tiles whose other pairs are visible."""
    mask = np.zeros((200, 300), bool)
    mask[:, ::3] = True
    problem = given("B1,H1,S200x300,D64,bfloat16", mask=mask)
    clean = gradients.run(emulated(), problem)
    if name in "kv":
        problem.inputs[name] = problem.inputs[name].copy()
        problem.inputs[name][:, :, 1::3] *= 1e4
    got = gradients.run(emulated(), problem)
    assert not differ(got, clean)


@on_emulator
@pytest.mark.parametrize("slope", [np.nan, np.inf, -np.inf, 1e38, -1e38])
def test_slopes_at_the_ends(emulated, slope):
    """One that is not finite makes NaN of its own head alone; others make finite gradients."""
    slopes = np.array([0.25, slope], np.float32)
    problem = given("B1,H2,S140x200,D64,bfloat16", alibi=slopes)
    got = gradients.run(emulated(), problem)
    wanted = gradients.run(emulated(), given("B1,H2,S140x200,D64,bfloat16", alibi=np.array([0.25, 0.25], np.float32)))
    for name in "qkv":
        assert (runner.bits(got[name][:, :1]) == runner.bits(wanted[name][:, :1])).all(), name
        assert np.isfinite(slope) == np.isfinite(got[name][:, 1].astype(np.float32)).all(), name


@on_emulator
@pytest.mark.parametrize("head_dim", [64, 128])
def test_far_keys_keep_their_bits(emulated, head_dim):
    """Slopes by which scores of keys far from the first are thousands."""
    case = f"B1,H2/1,S130x3000,D{head_dim},bfloat16,causal=bottom_right,window=140:none"
    held(emulated(), given(case, alibi=np.array([3.0, -2.5], np.float32)))


@on_emulator
@pytest.mark.parametrize("kind", ["bfloat16", "float32"])
def test_accumulate(emulated, kind):
    case = Case.parse("B1,H4/2,S133x150,D72,bfloat16,causal=bottom_right,sinks=same,mask=rows,alibi=heads")
    kernel, rng, wrt = emulated(), np.random.default_rng(1), ("q", "k", "v", "sinks")
    arrays = gradients.placed(gradients.make(case), kernel)
    grads = tuple(rng.standard_normal(arrays[n].shape).astype(dtype_of(kind)) for n in wrt)
    grads = tuple(place(x, runner.library_for(kernel, case)) for x in grads)
    report = fa_ext.verify_backward(**arrays, wrt=wrt, grads=grads, accumulate=True, kernel=kernel)
    assert report, report


@on_emulator
@pytest.mark.parametrize("wrt", [("v",), ("k",), ("q",), ("sinks",)])
def test_some_gradients(emulated, wrt):
    held(emulated(), gradients.make(Case.parse("B1,H2/1,S133x150,D64,bfloat16,mask=rows,sinks=same"), wrt=wrt))


@on_emulator
@pytest.mark.parametrize("case", [CASES[2], CASES[11], CASES[15], CASES[18]])
def test_one_order(emulated, monkeypatch, case):
    problem, found = gradients.make(Case.parse(case)), []
    for run in ((0, 132, 1), (0, 3, 3), (1, 132, 8), (2, 2, 2), (3, 1, 1)):
        schedule(monkeypatch, *run)
        found.append(gradients.run(emulated(), problem, deterministic=True))
    assert not [x for x in found[1:] if differ(x, found[0])]


def blocks(heads, rows, columns, density, seed):
    """A mask of blocks of 64 x 64 pairs, a share of which is visible; rows and columns of blocks that see nothing."""
    rng = np.random.default_rng(seed)
    seen = rng.random((1, heads, -(-rows // 64), -(-columns // 64))) < density
    seen[:, :, 1], seen[:, 0, :, 2:4] = False, False
    return np.kron(seen, np.ones((64, 64), bool))[:, :, :rows, :columns] & (rng.random((1, heads, rows, columns)) < 0.9)


SPARSE = [
    ("B1,H2/1,S520x900,D64,bfloat16,causal=bottom_right", 0.3),
    ("B1,H2/1,S390x700,D128,bfloat16,window=300:200", 0.4),
    ("B1,H2,S300x1000,D64,bfloat16,sinks=same", 0.15),
    ("B1,H4/2,S333x470,D128,bfloat16,alibi=heads", 0.3),
    ("B1,H1,S200x4700,D64,bfloat16", 0.1),
]


@on_emulator
@pytest.mark.parametrize("case, density", SPARSE)
def test_blocks_that_are_left_out(emulated, monkeypatch, case, density):
    """Turns count the tiles that see a block: one order, whatever runs when; and the same numbers where none is left out."""
    heads, (rows, columns) = Case.parse(case).heads, (Case.parse(case).seq_q, Case.parse(case).seq_k)
    problem = given(case, mask=blocks(heads, rows, columns, density, 7))
    every = emulated(PLAIN, "every", edit=replaced("if (!map.seen) return ~0u;", "return ~0u;"))
    wanted = gradients.run(every, problem, deterministic=True)
    report = gradients.judged(every, problem, wanted)
    assert report, report
    for run in ((0, 132, 1), (0, 3, 3), (1, 132, 8), (2, 2, 2), (3, 1, 1), (4, 4, 4)):
        schedule(monkeypatch, *run)
        got = gradients.run(emulated(), problem, deterministic=True)
        assert all((got[name] == wanted[name]).all() for name in wanted), run


@on_emulator
@pytest.mark.parametrize("old, new, long", [
    ("before += __popc(seen & bits_between(tile + 1, end, 32 * word));", "before += end - tile - 1;", False),
    ("(after ? 0 : kAddsLast)", "(tile > begin ? 0 : kAddsLast)", False),
    ("is_done<TileQ>(p, call, block) && some_row_sees<TileQ>(p, block, lane)", "is_done<TileQ>(p, call, block)", False),
    ("(a >> 8 & 0xff00)", "(a >> 16 & 0xff00)", True),
    ("block * (TileQ / 64) + n, map.row_blocks", "block * (TileQ / 64), map.row_blocks", False),
    ("member = step->member, block = step->block", "member = 0, block = step->block", False),
])  # fmt: skip
def test_mutants_of_lists(emulated, monkeypatch, old, new, long):
    """A wait for a turn that never comes is an error of the emulator."""
    kernel, found = emulated(PLAIN, old + new, edit=replaced(old, new)), []
    schedule(monkeypatch, 1, 8, 8)
    for case, density in SPARSE[4:] if long else SPARSE[:3]:
        heads, (rows, columns) = Case.parse(case).heads, (Case.parse(case).seq_q, Case.parse(case).seq_k)
        problem = given(case, mask=blocks(heads, rows, columns, density, 7))
        try:
            found.append(bool(gradients.verdict(kernel, problem, deterministic=True)))
        except fa_ext.CudaError:
            found.append(False)
    assert not all(found)


@on_emulator
@pytest.mark.parametrize("kernel, case", [(PLAIN, CASES[2]), (PLAIN, CASES[3]), (PLAIN, CASES[18]), (DROPOUT, DROPPED[2])])
def test_no_race(emulated, monkeypatch, kernel, case):
    schedule(monkeypatch, 1, 1)
    held(emulated(kernel, "races", races=True), gradients.make(Case.parse(case)), deterministic=True)


LIMITED = """
import sys
from pathlib import Path
from bench.problems.case import Case
from bench.problems.placement import Unplaceable
from tests import emulator
from tests.contract import gradients, runner

kernel = emulator.load(Path(sys.argv[1]), sys.argv[2])
runner.device_of = lambda kernel: "cpu"
report = gradients.verdict(kernel, gradients.make(Case.parse("B2,H4/2,S700x130,D64,bfloat16,mask=keys,sinks=same")))
assert report, report
try:
    gradients.verdict(kernel, gradients.make(Case.parse("B2,H2,S1500x1500,D64,bfloat16,mask=full")))
except Unplaceable as error:
    print(error)
"""


@on_emulator
def test_workspace_is_kept_to_its_limit(emulated):
    """Heads go in groups; the map of the second call alone needs 1.1 MB."""
    environment = os.environ | {"PYTHONPATH": str(_build.ROOT), "FA_EXT_WORKSPACE_MB": "1"}
    argv = [sys.executable, "-c", LIMITED, str(emulated.targets[emulated()]), PLAIN]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True)
    assert not done.returncode and "FA_EXT_WORKSPACE_MB" in done.stdout, done.stdout + done.stderr


@on_emulator
@pytest.mark.parametrize("old, new", [
    ("if (!visible.all()) visible.hide(weights, words);", ""),
    ("a[i] &= kept, b[i] &= kept;", "b[i] &= kept;"),
    ("a[i] &= kept, b[i] &= kept;", "a[i] &= kept;"),
    ("byte % 2 * 4 + pair", "byte % 2 + 2 * pair"),
    ("n ? 0x7632 : 0x5410", "0x5410"),
    ("at.head * p.call.group + member()", "at.head * p.call.group"),
    ("(tile().row - light().map_key) / 16", "tile().row / 16"),
    ("min(sixteenth, map.row_blocks * 4 - 1)", "sixteenth % 4"),
    ("float high = fmaf(slope, fabsf(distance + float(column - 8))", "float high = fmaf(slope, fabsf(distance + float(column + 8))"),
    ("float low = fmaf(slope, fabsf(distance + float(column))", "float low = fmaf(slope, (distance + float(column))"),
    ("if constexpr (C::kLight) clear_unseeing();", ""),
    ("if (rows.unseeing[part] >> (thread % 32 / 4 + 8 * r) & 1) factor[r] = 0.0f;", ""),
    ("f.key_begin / kFusedTileK * kFusedTileK", "f.key_begin"),
    ("sees = sees && !(unseeing >> (row - first) & 1);", ""),
    ("if (!p.sinks) return", "return"),
])  # fmt: skip
def test_mutants(emulated, old, new):
    kernel, found = emulated(PLAIN, old + new, edit=replaced(old, new)), []
    problems = [gradients.make(Case.parse(case)) for case in (*CASES[2:6], *CASES[11:16])]
    mask = np.random.default_rng(5).random((140, 200)) < 0.5
    mask[[17, 64]] = False
    for head_dim, sinks in ((64, ""), (128, ",sinks=large")):
        problem = given(f"B1,H2/1,S140x200,D{head_dim},bfloat16,causal=bottom_right{sinks}", mask=mask)
        for name in ("q", "dout", "out"):
            problem.inputs[name] = problem.inputs[name].copy()
            problem.inputs[name][:, :, [17, 64]] = np.nan
        found.append(finite(gradients.run(kernel, problem)))
        problem.inputs["k"] = problem.inputs["k"].copy()
        problem.inputs["k"][:, :, 100] = np.nan
        found.append((gradients.run(kernel, problem)["q"].astype(np.float32)[:, :, [17, 64]] == 0).all())
    assert not all(found) or not all(gradients.verdict(kernel, problem) for problem in problems)


def reason(options, kernel=PLAIN):
    problem = gradients.make(Case.parse(f"B1,H2,S256,{options}"))
    chosen, reasons = fa_ext.explain_backward(**problem.inputs, device=gradients.DEVICES["h200"], kernel=kernel)
    return reasons[kernel] if chosen is None else None


@pytest.mark.parametrize("options, said", [
    ("D64,bfloat16,mask=full,softcap=5.0", "no softcap beside a bias, a boolean mask"),
    ("D64,bfloat16,alibi=heads,softcap=5.0", "no softcap beside a bias, a boolean mask"),
    ("D192,bfloat16,mask=full", "up to 128"),
    ("D64,bfloat16,bias=full32,mask=full", "a bias of q's dtype alone"),
])  # fmt: skip
def test_what_is_refused(options, said):
    if PLAIN not in fa_ext.kernels("backward"):
        pytest.skip("a build without CUDA")
    assert said in reason(options)


#: More tiles of keys than a large GPU has multiprocessors; groups, causal, both sides, all ends.
LONG = ["B2,H16,S2048,D64,bfloat16,mask=full", "B1,H16,S4096,D128,bfloat16,mask=batch,causal=top_left", "B2,H24/8,S1111,D64,bfloat16,mask=rows,causal=bottom_right",
        "B1,H16,S3000x2500,D128,bfloat16,mask=heads,window=700:20", "B2,H16,S2048,D128,float16,alibi=heads,causal=top_left",
        "B1,H16/4,S1500x2500,D64,float16,alibi=batch,mask=keys,sinks=same"]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("kernel, dropout", [(PLAIN, ""), (DROPOUT, ",dropout=0.1:7")])
@pytest.mark.parametrize("case", LONG)
def test_equal_bits_on_a_gpu(request, kernel, dropout, case):
    if why := gradients.absent(PLAIN):
        pytest.skip(why)
    problem = gradients.make(Case.parse(case + dropout))
    first = gradients.run(kernel, problem, deterministic=True)
    report = gradients.judged(kernel, problem, first)
    assert report, report
    for _ in range(request.config.getoption("--repeats")):
        assert not differ(gradients.run(kernel, problem, deterministic=True), first)
