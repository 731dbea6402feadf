"""wgmma_fused_backward_sm90 with a bias: against float64 on the emulator by broadcasts, bands and options, with the bias's gradient and
without; what tiles leave out of it; sums over batch and heads; one order, races, mutants."""

import os
import platform
import shutil
import subprocess
import sys

import numpy as np
import pytest

import fa_ext
from bench.problems.case import Case
from bench.problems.placement import Unplaceable, dtype_of, place
from fa_ext import _build
from tests import emulator
from tests.contract import gradients, runner
from tests.emulator.emulated import on_the_cpu, replaced
from tests.kernels.emulated_gradients import differ, given, held, schedule

KERNEL = "wgmma_fused_backward_sm90"
pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None or sys.platform != "linux" or platform.machine() != "x86_64",
    reason="the emulator is for g++ on x86-64 Linux",
)
#: Rows of whole 16 bytes: bands, groups, what nobody sees at both ends, all other options beside a bias.
CASES = [
    "B1,H1,S3x8,D64,bfloat16,bias=full",
    "B1,H2/1,S257x296,D64,bfloat16,bias=full,causal=bottom_right",
    "B1,H2/1,S113x240,D128,bfloat16,bias=full,sinks=same",
    "B2,H2,S133x152,D96,bfloat16,bias=holes",
    "B2,H4/2,S133x152,D64,bfloat16,bias=full,window=30:20,layout=bshd",
    "B2,H2/1,S133x248,D104,bfloat16,bias=full,mask=heads",
    "B2,H2/1,S239x120,D40,bfloat16,bias=full,mask=strided,sinks=float32",
    "B1,H2/1,S133x152,D64,bfloat16,bias=full,mask=none,sinks=same",
    "B1,H2/1,S133x352,D128,bfloat16,bias=holes,mask=one",
    "B1,H2,S113x520,D64,bfloat16,bias=full,mask=rows,window=100:60",
    "B1,H2,S70x904,D128,bfloat16,bias=full,window=9:5,causal=bottom_right",
    "B2,H4/2,S190x304,D64,bfloat16,bias=full,alibi=heads,causal=bottom_right",
    "B1,H3/1,S150x200,D128,bfloat16,bias=full,alibi=steep",
    "B1,H3/1,S290x200,D128,bfloat16,bias=shared,alibi=heads,mask=rows,causal=top_left,sinks=same",
    "B2,H2/1,S200x336,D64,bfloat16,bias=shared,intervals=documents",
    "B1,H2,S133x152,D64,bfloat16,bias=finfo_min",
]


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    """emulated(tag="", races=False, edit=None): the name under which it is loaded, once a tag."""
    folder, loaded = tmp_path_factory.mktemp("general"), {}

    def get(tag="", **options):
        if tag not in loaded:
            target = folder / f"{KERNEL}.{len(loaded)}.so"
            emulator.build(_build.kernel_files()[KERNEL], target, instances="_general_bf16$", **options)
            loaded[tag] = emulator.load(target, KERNEL)
            get.targets[loaded[tag]] = target
        return loaded[tag]

    get.targets = {}
    with on_the_cpu(loaded.values):
        yield get


@pytest.mark.parametrize("wrt", [("q", "k", "v"), ("q", "k", "v", "bias")], ids=["fixed", "learnt"])
@pytest.mark.parametrize("case", CASES)
def test_gradients(emulated, monkeypatch, case, wrt):
    for seed, blocks, together in ((0, 132, 1), (5, 1, 1), (1, 3, 3)):
        schedule(monkeypatch, seed, blocks, together)
        held(emulated(), gradients.make(Case.parse(case), dlse=seed == 0, wrt=wrt), deterministic=seed != 5)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("shape", [(2, 4), (1, 4), (2, 1), (1, 1), (4,), ()], ids=str)
def test_broadcasts(emulated, shape, head_dim):
    """Its gradient is the sum over what it is broadcast along."""
    bias = np.random.default_rng(len(shape)).standard_normal((*shape, 140, 272)).astype(dtype_of("bfloat16"))
    held(emulated(), given(f"B2,H4/2,S140x272,D{head_dim},bfloat16,causal=bottom_right", ("q", "k", "v", "bias"), bias=bias))


LIMITED = """
import sys
from pathlib import Path

import numpy as np

import fa_ext
from bench.problems.case import Case
from bench.problems.placement import dtype_of
from tests import emulator
from tests.contract import gradients, runner

kernel = emulator.load(Path(sys.argv[1]), "wgmma_fused_backward_sm90")
runner.device_of = lambda kernel: "cpu"
wrt = ("q", "k", "v", "bias")
for shape in ((1, 3), (4, 1), (1, 1)):
    for case in ("B4,H3,S200x336,D64,bfloat16,causal=bottom_right", "B4,H3,S200x336,D40,bfloat16,mask=batch,alibi=batch,intervals=heads"):
        problem = gradients.make(Case.parse(case), wrt=wrt)
        bias = np.random.default_rng(0).standard_normal((*shape, 200, 336)).astype(dtype_of("bfloat16"))
        known = {n: x for n, x in problem.inputs.items() if n not in ("dout", "dlse", "out", "lse")} | {"bias": bias}
        out, lse = fa_ext.reference.attention(**known)
        problem.inputs |= {"bias": bias, "out": out.astype(problem.inputs["out"].dtype), "lse": lse.astype(np.float32)}
        try:
            report = gradients.verdict(kernel, problem)
            assert report, (shape, case, report)
            print("right")
        except gradients.Unplaceable as error:
            print(error)
"""


def test_sums_in_groups(emulated):
    """The dS of a pair takes 134 KB; sums over the batch go in groups of heads, sums over heads in groups of the batch."""
    name = emulated()
    environment = os.environ | {"FA_EXT_WORKSPACE_MB": "1"}
    code = [sys.executable, "-c", LIMITED, str(emulated.targets[name])]
    done = subprocess.run(code, env=environment, capture_output=True, text=True, cwd=_build.ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    said = done.stdout.splitlines()
    assert said[:4] == ["right"] * 4 and all("2 bytes a pair" in line for line in said[4:]), said


def test_rows_that_lie_apart(emulated):
    rng = np.random.default_rng(3)
    wide = rng.standard_normal((2, 140, 2, 208)).astype(dtype_of("bfloat16"))
    held(emulated(), given("B2,H2,S140x203,D64,bfloat16", ("bias", "v"), bias=wide.transpose(0, 2, 1, 3)[..., :203]))


@pytest.mark.parametrize("what", ["keys", "queries", "float32", "odd rows"])
def test_what_is_refused(emulated, what):
    case, bias = "B1,H2,S140x200,D64,bfloat16", np.zeros((2, 140, 200), dtype_of("bfloat16"))
    bias = {"keys": bias[:, :1], "queries": bias[..., :1], "float32": bias.astype(np.float32), "odd rows": bias[..., :195].copy()}[what]
    if what == "odd rows":
        case = case.replace("200", "195")
    with pytest.raises(Unplaceable, match="takes a bias of q's dtype alone, with head_dim up to 128"):
        gradients.run(emulated(), given(case, bias=bias))


@pytest.mark.parametrize("kind", ["bfloat16", "float32"])
@pytest.mark.parametrize("accumulate", [False, True])
def test_results_of_other_kinds(emulated, kind, accumulate):
    """Added to what is there, in float32, rows of no whole 16 bytes."""
    case = Case.parse("B2,H4/2,S133x152,D72,bfloat16,bias=full,causal=bottom_right")
    kernel, rng, wrt = emulated(), np.random.default_rng(1), ("q", "k", "v", "bias")
    arrays = gradients.placed(gradients.make(case), kernel)
    grads = [rng.standard_normal(arrays[n].shape).astype(dtype_of(kind)) for n in wrt]
    grads[3] = np.zeros((*grads[3].shape[:-1], 155), grads[3].dtype)[..., 1:153]
    grads = tuple(place(x, runner.library_for(kernel, case)) for x in grads)
    report = fa_ext.verify_backward(**arrays, wrt=wrt, grads=grads, accumulate=accumulate, kernel=kernel)
    assert report, report


def test_a_gradient_of_pairs_that_tiles_leave_out(emulated):
    """It is 0, whatever its memory and the hidden elements of the bias hold."""
    rng = np.random.default_rng(7)
    mask = np.kron(rng.random((2, 3, 5)) < 0.4, np.ones((64, 64), bool))[:, :190, :304]
    bias = rng.standard_normal((2, 190, 304)).astype(dtype_of("bfloat16"))
    problem = given("B1,H2/1,S190x304,D64,bfloat16,causal=bottom_right", ("q", "k", "v", "bias"), bias=bias, mask=mask)
    clean = gradients.run(emulated(), problem)
    report = gradients.judged(emulated(), problem, clean)
    assert report, report
    visible = mask & (np.arange(304) <= np.arange(190)[:, None] + 304 - 190)
    assert (clean["bias"].astype(np.float32).reshape(2, 190, 304)[~visible] == 0).all()
    for value in (np.nan, np.inf, -np.inf):
        problem.inputs["bias"] = np.where(visible, bias, np.asarray(value, bias.dtype)).astype(bias.dtype)
        assert not differ(gradients.run(emulated(), problem), clean), value


@pytest.mark.parametrize("case", [CASES[1], CASES[2], CASES[13]])
def test_one_order(emulated, monkeypatch, case):
    problem, found = gradients.make(Case.parse(case), wrt=("q", "k", "v", "bias")), []
    for run in ((0, 132, 1), (0, 3, 3), (1, 132, 8), (2, 2, 2), (3, 1, 1)):
        schedule(monkeypatch, *run)
        found.append(gradients.run(emulated(), problem, deterministic=True))
    assert not [x for x in found[1:] if differ(x, found[0])]


@pytest.mark.parametrize("wrt", [("q", "k", "v"), ("q", "k", "v", "bias")], ids=["fixed", "learnt"])
@pytest.mark.parametrize("case", [CASES[1], CASES[2], CASES[9]])
def test_no_race(emulated, monkeypatch, case, wrt):
    schedule(monkeypatch, 1, 1)
    held(emulated("races", races=True), gradients.make(Case.parse(case), wrt=wrt), deterministic=True)


@pytest.mark.parametrize("old, new", [
    ("lane / 16 * 8 + lane % 8, chunk", "lane % 16, chunk"),
    ("(chunk ^ lane % 8)", "chunk"),
    ("query % 2 ? -of.y : -of.x", "query % 2 ? -of.x : -of.y"),
    ("key + wg * kBiasKeys, query,", "key, query,"),
    ("c.words + 16 * n + 4 * j", "c.words + 4 * j"),
    ("at.x + wg * kBiasKeys, at.y", "at.x, at.y"),
    ("parts_at < 0 && leaves_pairs_out(f)", "false"),
    ("stage + 1 == kBiasStages ? 0 : stage + 1;\n    }\n}\ntemplate", "stage;\n    }\n}\ntemplate"),
])  # fmt: skip
def test_mutants(emulated, monkeypatch, old, new):
    kernel, found = emulated(old, edit=replaced(old, new)), []
    schedule(monkeypatch, 1, 8, 8)
    for case in (CASES[1], CASES[2]):
        problem = gradients.make(Case.parse(case), wrt=("q", "k", "v", "bias"))
        try:
            found.append(bool(gradients.verdict(kernel, problem, deterministic=True)))
        except fa_ext.CudaError:
            found.append(False)
    assert not all(found)
