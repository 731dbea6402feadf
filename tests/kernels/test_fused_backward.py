"""wgmma_fused_backward_sm90: gradients against float64 on the emulator, races, workspace; on a GPU, the contract."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import emulator
import fa_ext
import gradients
import rows
from case import Case
from fa_ext import _build
from operands import Unplaceable, dtype_of, place

NAME = "wgmma_fused_backward_sm90"
SOURCE = _build.KERNELS / "sm90" / f"{NAME}.cu"

on_emulator = pytest.mark.skipif(
    shutil.which("g++") is None or sys.platform != "linux" or platform.machine() != "x86_64",
    reason="the emulator is for g++ on x86-64 Linux",
)
#: Two tiles of keys or more each: two blocks or one, of one query or key too many; groups; what nobody sees at both ends.
CASES = [
    "B1,H2/1,S70x133,D64,bfloat16",
    "B1,H2/2,S257x129,D64,bfloat16,layout=bshd",
    "B1,H2/1,S130x257,D128,bfloat16",
    "B2,H2,S133,D64,bfloat16,causal=bottom_right,sinks=same",
    "B1,H4/2,S40x90,D64,bfloat16,window=30:none,layout=bshd",
    "B1,H2/1,S300x190,D128,bfloat16,causal=top_left,sinks=float32",
    "B1,H2/1,S190x300,D104,bfloat16,window=50:20",
    "B1,H3/1,S201x130,D40,bfloat16,causal=bottom_right",
    "B1,H1,S1x3,D64,bfloat16,causal=bottom_right",
    "B1,H1,S1x300,D128,bfloat16",
    "B1,H2/1,S200,D64,bfloat16,softcap=5.0,causal=top_left",
    "B1,H2/1,S200x130,D128,bfloat16,softcap=5.0",
]


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    """emulated(races=False): the name under which the kernel is loaded."""
    folder, loaded, device_of = tmp_path_factory.mktemp("fused"), {}, rows.device_of

    def get(races=False):
        if races not in loaded:
            target = folder / f"{NAME}.{races}.so"
            emulator.build(SOURCE, target, instances="^d(64|128)_(full|masked)_bf16$" if races else "_bf16$", races=races)
            loaded[races] = emulator.load(target, NAME)
            get.targets[loaded[races]] = target
        return loaded[races]

    get.targets = {}
    rows.device_of = lambda kernel: "cpu" if kernel in loaded.values() else device_of(kernel)
    yield get
    rows.device_of = device_of


def verdict(kernel, problem):
    return gradients.verdict(kernel, problem)


@on_emulator
@pytest.mark.parametrize("seed, blocks", [(0, 132), (5, 1)])
@pytest.mark.parametrize("case", CASES)
def test_gradients(emulated, monkeypatch, case, seed, blocks):
    monkeypatch.setenv("FA_EMULATOR_SEED", str(seed))
    monkeypatch.setenv("FA_EMULATOR_SMS", str(blocks))
    report = verdict(emulated(), gradients.make(Case.parse(case), dlse=seed == 0))
    assert report, report


@on_emulator
@pytest.mark.parametrize("case", ["B1,H2/1,S300x190,D64,bfloat16", "B1,H2/1,S70x300,D128,bfloat16,causal=bottom_right"])
def test_no_race(emulated, monkeypatch, case):
    monkeypatch.setenv("FA_EMULATOR_SEED", "1")
    monkeypatch.setenv("FA_EMULATOR_SMS", "1")
    assert verdict(emulated(races=True), gradients.make(Case.parse(case)))


@on_emulator
@pytest.mark.parametrize("wrt", [("v",), ("k",), ("q",), ("sinks",), ("v", "q")])
def test_some_gradients(emulated, wrt):
    problem = gradients.make(Case.parse("B1,H2/1,S133x150,D64,bfloat16,causal=top_left,sinks=same"), wrt=wrt)
    assert verdict(emulated(), problem)


@on_emulator
@pytest.mark.parametrize("dout", ["none", "normal"])
def test_without_dout_or_dlse(emulated, dout):
    assert verdict(emulated(), gradients.make(Case.parse("B1,H2/1,S133x150,D64,bfloat16"), dlse=dout == "none", dout=dout))


@on_emulator
@pytest.mark.parametrize("kind", ["bfloat16", "float32"])
@pytest.mark.parametrize("head_dim", [64, 104])
def test_accumulate_adds_before_it_rounds(emulated, kind, head_dim):
    case = Case.parse(f"B1,H4/2,S133x150,D{head_dim},bfloat16,causal=bottom_right,sinks=same")
    kernel, rng, wrt = emulated(), np.random.default_rng(1), ("q", "k", "v", "sinks")
    arrays = gradients.placed(gradients.make(case), kernel)
    grads = tuple(rng.standard_normal(arrays[n].shape).astype(dtype_of(kind)) for n in wrt)
    grads = tuple(place(x, rows.library_for(kernel, case)) for x in grads)
    report = fa_ext.verify_backward(**arrays, wrt=wrt, grads=grads, accumulate=True, kernel=kernel, deterministic=False)
    assert report, report


@on_emulator
def test_what_nobody_sees_reaches_nothing(emulated):
    """Keys beyond every window and queries that see no key hold NaN, LSE far below what float32 exponentiates."""
    problem = gradients.make(Case.parse("B1,H2/1,S150x300,D64,bfloat16,window=40:0,causal=top_left"))
    before = gradients.run(emulated(), problem)
    for name in "kv":
        problem.inputs[name][:, :, 150:] = np.nan
    after = gradients.run(emulated(), problem)
    for name in "qkv":
        np.testing.assert_array_equal(rows.bits(before[name]), rows.bits(after[name]))
    shifted = gradients.make(Case.parse("B1,H2/1,S150x200,D64,bfloat16,scale=40.0"))  # rows with LSE of hundreds, both signs
    shifted.inputs["q"][:, :, :, :8] += 4.0
    shifted.inputs["k"][:, :, :, :8] -= 4.0
    out, lse = fa_ext.reference.attention(**{n: shifted.inputs[n] for n in "qkv"}, scale=40.0)
    shifted.inputs |= {"out": out.astype(shifted.inputs["out"].dtype), "lse": lse.astype(np.float32)}
    assert (lse < -1000).any()
    assert verdict(emulated(), shifted)


LIMITED = """
import sys
import emulator, fa_ext, gradients, rows
from case import Case
from operands import Unplaceable
from pathlib import Path

kernel = emulator.load(Path(sys.argv[1]), sys.argv[2])
rows.device_of = lambda kernel: "cpu"
report = gradients.verdict(kernel, gradients.make(Case.parse("B2,H4/2,S1000x130,D64,bfloat16,causal=top_left,sinks=same")), deterministic=False)
assert report, report
try:
    gradients.verdict(kernel, gradients.make(Case.parse("B1,H8/1,S1000x40,D64,bfloat16")), deterministic=False)
except Unplaceable as error:
    print(error)
"""


@on_emulator
def test_workspace_is_kept_to_its_limit(emulated):
    """Heads go in groups: one of these needs 264 KiB."""
    target = emulated.targets[emulated()]
    folders = os.pathsep.join(map(str, (_build.ROOT, Path(__file__).parent.parent)))
    environment = os.environ | {"PYTHONPATH": folders, "FA_EXT_WORKSPACE_MB": "1"}
    done = subprocess.run([sys.executable, "-c", LIMITED, str(target), NAME], env=environment, capture_output=True, text=True)
    assert not done.returncode and "FA_EXT_WORKSPACE_MB" in done.stdout, done.stdout + done.stderr


@on_emulator
def test_sums_in_one_order_are_refused(emulated):
    with pytest.raises(Unplaceable, match="deterministic"):
        gradients.verdict(emulated(), gradients.make(Case.parse("B1,H2,S70,D64,bfloat16")), deterministic=True)


@pytest.mark.gpu
@pytest.mark.slow
def test_long_sequences_on_a_gpu():
    if reason := gradients.absent(NAME):
        pytest.skip(reason)
    cases = [Case.parse(case) for case in CASES]
    cases += [Case.parse(f"B2,H4/2,S{n},D{d},{t}{mask}") for n in (511, 1023, 4096) for d in (64, 128) for t in ("bfloat16", "float16")
              for mask in ("", ",causal=bottom_right")]  # fmt: skip
    wrong = []
    for n, case in enumerate(cases):
        report = verdict(NAME, gradients.make(case, dlse=n % 2 == 0))
        if not report:
            wrong.append(f"{case}: {report}")
    assert not wrong, "\n".join(wrong[:5])
