"""wgmma_backward_sm90 where v has another head_dim than q and k: gradients against float64 and races on the emulator; the same and
more on a GPU."""

import platform
import shutil
import sys

import numpy as np
import pytest

import fa_ext
from bench.problems.case import Case
from bench.problems.placement import Unplaceable, dtype_of, place
from fa_ext import _build
from tests import emulator
from tests.contract import gradients, runner
from tests.contract.gradients import described
from tests.emulator.emulated import on_the_cpu

NAME = "wgmma_backward_sm90"
SOURCE = _build.kernel_files()[NAME]
INSTANCES = "^d192v128_(full|masked)_bf16$|^d192v128_(masked|capped)_f16$"

on_emulator = pytest.mark.skipif(
    shutil.which("g++") is None or sys.platform != "linux" or platform.machine() != "x86_64",
    reason="the emulator is for g++ on x86-64 Linux",
)
#: Tiles of 128 keys and 64 queries (32 with softcap), blocks of 80 keys and tiles of 128 queries, one too few and one too many; a
#: warpgroup that sees blocks that the other does not, at either end; groups of heads; rows and keys that see nothing; padded widths.
CASES = [
    "B1,H1,S1,D192/128,bfloat16,causal=top_left",
    "B1,H1,S1x3,D192/128,bfloat16",
    "B1,H2/1,S3x511,D192/128,bfloat16,causal=bottom_right",
    "B2,H2/1,S113x239,D192/128,bfloat16",
    "B2,H4/2,S239x511,D192/128,bfloat16,causal=bottom_right",
    "B1,H2,S511x113,D192/128,bfloat16,causal=top_left,sinks=float32",
    "B1,H2/1,S300x70,D192/128,bfloat16,causal=bottom_right,sinks=same",
    "B1,H4/2,S40x90,D192/128,bfloat16,window=30:none,layout=bshd",
    "B1,H2/1,S239,D192/128,bfloat16,window=50:20",
    "B1,H2,S511,D192/128,float16,causal=bottom_right",
    "B1,H2/1,S113x239,D192/128,float16,softcap=5.0,causal=bottom_right",
    "B1,H2,S239x113,D192/128,float16,softcap=5.0,window=60:30,sinks=same",
    "B1,H4/1,S201x330,D160/96,bfloat16,causal=bottom_right",
    "B1,H2,S133x150,D136/8,bfloat16",
]


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    """emulated(races=False): the name under which the kernel is loaded."""
    folder, loaded = tmp_path_factory.mktemp("widths"), {}

    def get(races=False):
        if races not in loaded:
            target = folder / f"{NAME}.{races}.so"
            emulator.build(SOURCE, target, instances="^d192v128_masked_bf16$" if races else INSTANCES, races=races)
            loaded[races] = emulator.load(target, NAME)
        return loaded[races]

    with on_the_cpu(loaded.values):
        yield get


@on_emulator
@pytest.mark.parametrize("seed, blocks", [(0, 132), (5, 1)])
@pytest.mark.parametrize("case", CASES)
def test_gradients(emulated, monkeypatch, case, seed, blocks):
    monkeypatch.setenv("FA_EMULATOR_SEED", str(seed))
    monkeypatch.setenv("FA_EMULATOR_SMS", str(blocks))
    report = gradients.verdict(emulated(), gradients.make(Case.parse(case), dlse=seed == 0))
    assert report, report


@on_emulator
@pytest.mark.parametrize("case", ["B1,H2/1,S200x150,D192/128,bfloat16,causal=bottom_right", "B1,H2/1,S133x290,D192/128,bfloat16,window=40:0"])
def test_no_race(emulated, monkeypatch, case):
    monkeypatch.setenv("FA_EMULATOR_SEED", "1")
    monkeypatch.setenv("FA_EMULATOR_SMS", "1")
    assert gradients.verdict(emulated(races=True), gradients.make(Case.parse(case)))


@on_emulator
@pytest.mark.parametrize("wrt", [("v",), ("k",), ("q",), ("sinks",), ("v", "q")])
def test_some_gradients(emulated, wrt):
    problem = gradients.make(Case.parse("B1,H2/1,S133x150,D192/128,bfloat16,causal=top_left,sinks=same"), wrt=wrt)
    assert gradients.verdict(emulated(), problem)


@on_emulator
@pytest.mark.parametrize("dout", ["none", "ones"])
def test_without_dout_or_with_one_of_no_strides(emulated, dout):
    problem = gradients.make(Case.parse("B1,H2/1,S133x150,D192/128,bfloat16"), dout=dout)
    try:
        assert gradients.verdict(emulated(), problem)
    except Unplaceable as error:
        assert dout == "ones" and "dout" in str(error)


@on_emulator
@pytest.mark.parametrize("kind", ["bfloat16", "float32"])
def test_accumulate_adds_before_it_rounds(emulated, kind):
    case = Case.parse("B1,H4/2,S133x150,D192/128,bfloat16,causal=bottom_right,sinks=same")
    kernel, rng, wrt = emulated(), np.random.default_rng(1), ("q", "k", "v", "sinks")
    arrays = gradients.placed(gradients.make(case), kernel)
    grads = tuple(rng.standard_normal(arrays[n].shape).astype(dtype_of(kind)) for n in wrt)
    grads = tuple(place(x, runner.library_for(kernel, case)) for x in grads)
    report = fa_ext.verify_backward(**arrays, wrt=wrt, grads=grads, accumulate=True, kernel=kernel)
    assert report, report


@on_emulator
def test_what_nobody_sees_reaches_nothing_and_bits_stay(emulated, monkeypatch):
    """Keys beyond every window hold NaN; another order of threads gives the same bits."""
    problem = gradients.make(Case.parse("B1,H2/1,S150x300,D192/128,bfloat16,window=40:0,causal=top_left"))
    before = gradients.run(emulated(), problem)
    for name in "kv":
        problem.inputs[name][:, :, 150:] = np.nan
    monkeypatch.setenv("FA_EMULATOR_SEED", "7")
    after = gradients.run(emulated(), problem)
    for name in "qkv":
        np.testing.assert_array_equal(runner.bits(before[name]), runner.bits(after[name]))


@on_emulator
@pytest.mark.parametrize("widths", ["192/128", "160/128", "136/8", "192", "64"])
def test_which_widths_are_taken(emulated, widths):
    given = described(Case.parse(f"B1,H8,S512,D{widths},bfloat16,causal=True"))
    kernel = emulated()
    chosen, reasons = fa_ext.explain_backward(**given, kernel=kernel)
    # Of equal widths there is no instance in this build.
    assert chosen == kernel if "/" in widths else runner.lacks_instance() in reasons[kernel]


@on_emulator
@pytest.mark.parametrize("widths", ["128/64", "192/136", "200/128", "64/128", "192/100", "256/128"])
def test_which_widths_are_refused(emulated, widths):
    given = described(Case.parse(f"B1,H8,S512,D{widths},bfloat16,causal=True"))
    chosen, reasons = fa_ext.explain_backward(**given, kernel=emulated())
    assert chosen is None and "head_dim_v other than head_dim only beside a head_dim above 128 up to 192" in reasons[emulated()]


@pytest.mark.gpu
@pytest.mark.slow
def test_long_sequences_on_a_gpu():
    if reason := gradients.absent(NAME):
        pytest.skip(reason)
    cases = [Case.parse(case) for case in CASES]
    cases += [Case.parse(f"B2,H4/2,S{n},D192/128,{t}{options}") for n in (1, 3, 113, 239, 511, 1023, 4096) for t in ("bfloat16", "float16")
              for options in ("", ",causal=bottom_right", ",window=200:0,sinks=float32", ",causal=top_left,softcap=20.0")]  # fmt: skip
    wrong = []
    for n, case in enumerate(cases):
        report = gradients.verdict(NAME, gradients.make(case, dlse=n % 2 == 0))
        if not report:
            wrong.append(f"{case}: {report}")
    assert not wrong, "\n".join(wrong[:5])
