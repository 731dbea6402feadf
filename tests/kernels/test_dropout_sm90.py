"""wgmma_dropout_sm90 and wgmma_dropout_backward_sm90 on the emulator: against float64 by schedules, races, shards whose origin is no
multiple of 16, one order of sums, mutants. What they have to do on a GPU is in tests/contract, as for every kernel."""

import platform
import shutil
import sys

import numpy as np
import pytest

import fa_ext
from bench.problems.case import Case
from fa_ext import _build
from tests import emulator
from tests.contract import gradients, runner
from tests.emulator.emulated import on_the_cpu, replaced

FORWARD, BACKWARD = "wgmma_dropout_sm90", "wgmma_dropout_backward_sm90"
pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None or sys.platform != "linux" or platform.machine() != "x86_64",
    reason="the emulator is for g++ on x86-64 Linux",
)
#: Blocks that begin or end within 16 keys; tiles that see all, some and none of the keys; groups; more tiles than CTAs.
CASES = [
    "B1,H1,S3x5,D64,bfloat16,dropout=0.3:7",
    "B1,H2/1,S113x130,D64,bfloat16,causal=bottom_right,dropout=0.3:7",
    "B2,H2,S64x67,D56,bfloat16,window=9:20,sinks=float32,dropout=0.5:99",
    "B2,H4/2,S200x333,D64,bfloat16,causal=top_left,dropout=0.1:12345678901",
    "B1,H2,S150x700,D64,bfloat16,window=100:30,dropout=0.2:3,layout=bshd",
    "B1,H3/1,S201x130,D40,bfloat16,causal=bottom_right,dropout=0.9:3",
    "B1,H2/1,S128x133,D64,bfloat16,sinks=same,dropout=0.1:1",
    "B1,H1,S70x90,D64,bfloat16,dropout=1:3",
    "B1,H2/1,S113x130,D64,bfloat16,causal=bottom_right",
]
WIDE = ["B1,H2/1,S113x330,D128,bfloat16,causal=bottom_right,dropout=0.3:7", "B1,H2,S150x200,D72,bfloat16,dropout=0.5:1"]


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    """emulated(kernel, tag="", races=False, edit=None): the name under which it is loaded, once a kernel and tag."""
    folder, loaded = tmp_path_factory.mktemp("dropout"), {}

    def get(kernel, tag="", **options):
        if (kernel, tag) not in loaded:
            target = folder / f"{kernel}.{len(loaded)}.so"
            emulator.build(_build.kernel_files()[kernel], target, instances="_masked_bf16$", **options)
            loaded[kernel, tag] = emulator.load(target, kernel)
        return loaded[kernel, tag]

    with on_the_cpu(loaded.values):
        yield get


def schedule(monkeypatch, seed, blocks, together=1):
    for name, value in (("SEED", seed), ("SMS", blocks), ("TOGETHER", together)):
        monkeypatch.setenv(f"FA_EMULATOR_{name}", str(value))


@pytest.mark.parametrize("seed, blocks", [(0, 132), (5, 1)])
@pytest.mark.parametrize("case", CASES + WIDE)
def test_forward(emulated, monkeypatch, case, seed, blocks):
    schedule(monkeypatch, seed, blocks)
    if seed:
        monkeypatch.setenv("FA_EMULATOR_STATE", "1")
    assert (report := runner.verdict(emulated(FORWARD), Case.parse(case))), report


@pytest.mark.parametrize("seed, blocks, together", [(0, 132, 1), (5, 1, 1), (1, 3, 3)])
@pytest.mark.parametrize("case", CASES + WIDE)
def test_backward(emulated, monkeypatch, case, seed, blocks, together):
    schedule(monkeypatch, seed, blocks, together)
    if seed:
        monkeypatch.setenv("FA_EMULATOR_STATE", "1")
    assert (report := gradients.verdict(emulated(BACKWARD), gradients.make(Case.parse(case)), deterministic=True)), report


@pytest.mark.parametrize("origin", [(1, 2, 16, 48), (1, 2, 17, 25)])
def test_shards(emulated, origin):
    """An origin at multiples of 16 and one elsewhere, where each pair has a call of the generator."""
    case, drawn = Case.parse("B1,H4/2,S70x133,D64,bfloat16,causal=bottom_right,sinks=same"), (0.3, 5, 7, origin, 9)
    inputs = case.host_inputs()
    report = fa_ext.verify(**runner.on(emulated(FORWARD), inputs), dropout=drawn, kernel=emulated(FORWARD))
    assert report, report
    problem = gradients.make(case)
    out, lse = fa_ext.reference.attention(**inputs, dropout=drawn)
    problem.inputs |= {"dropout": drawn, "out": out.astype(inputs["q"].dtype), "lse": lse.astype(np.float32)}
    assert (report := gradients.verdict(emulated(BACKWARD), problem, deterministic=True)), report


@pytest.mark.parametrize("kernel", [FORWARD, BACKWARD])
def test_no_race(emulated, monkeypatch, kernel):
    schedule(monkeypatch, 1, 1)
    name, case = emulated(kernel, "races", races=True), Case.parse("B1,H2/1,S300x190,D64,bfloat16,causal=bottom_right,dropout=0.2:1")
    if kernel == FORWARD:
        assert runner.verdict(name, case)
    else:
        assert gradients.verdict(name, gradients.make(case), deterministic=True)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_one_order(emulated, monkeypatch, head_dim):
    problem, found = gradients.make(Case.parse(f"B1,H1,S400x520,D{head_dim},bfloat16,window=150:60,dropout=0.2:1")), []
    for run in ((0, 132, 1), (1, 8, 8), (4, 4, 4)):
        schedule(monkeypatch, *run)
        found.append(gradients.run(emulated(BACKWARD), problem, deterministic=True))
    for other in found[1:]:
        for name, values in found[0].items():
            np.testing.assert_array_equal(runner.bits(values), runner.bits(other[name]), err_msg=name)


@pytest.mark.parametrize("old, new", [
    ("0xbbaa : 0x9988", "0x9988 : 0x9988"),
    ("(word & low) | (word & threshold.not_high) | (low & threshold.not_high)", "(word & low) | (low & threshold.not_high)"),
    ("(high << 15)) * 0x10001u, high - 1", "(high << 15)) * 0x10001u, ~0u"),
    ("blocks.end += -(dropout_of(p).key_begin + blocks.end) & 15;", ";"),
    ("factor[r] *= dropout_of(p).kept;", ""),
])  # fmt: skip
def test_mutants_of_the_forward(emulated, old, new):
    kernel = emulated(FORWARD, old, edit=replaced(old, new))
    assert not all(runner.verdict(kernel, Case.parse(case)) for case in CASES)


@pytest.mark.parametrize("old, new", [
    ("keeps(low) ? products[low] : own.x", "keeps(low) ? products[low] : 0.0f"),
    ("keeps(high) ? scores[high] : 0.0f", "scores[high]"),
    ("-delta * p.delta_factor", "-delta"),
    ("else if (!IsFirst)\n                at.advance();", ""),
])  # fmt: skip
def test_mutants_of_the_backward(emulated, old, new):
    kernel = emulated(BACKWARD, old, edit=replaced(old, new))
    assert not all(gradients.verdict(kernel, gradients.make(Case.parse(case)), deterministic=True) for case in CASES)


def test_a_dropout_of_1_is_refused_by_the_backward(emulated):
    problem = gradients.make(Case.parse("B1,H1,S9x11,D64,bfloat16"))
    problem.inputs["dropout"] = (1, 3)
    with pytest.raises(fa_ext.UnsupportedError, match="a dropout of 1 keeps no weight"):
        fa_ext.attention_backward(**gradients.placed(problem, emulated(BACKWARD)), kernel=emulated(BACKWARD))
