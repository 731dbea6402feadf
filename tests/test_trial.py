"""Kernels on trial (kernels/trial) on the emulator: gradients against float64, schedules, races."""

import platform
import shutil
import sys

import pytest

import emulator
import gradients
import rows
from case import Case
from fa_ext import _build

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None or sys.platform != "linux" or platform.machine() != "x86_64",
    reason="the emulator is for g++ on x86-64 Linux",
)

TRIAL = _build.KERNELS / "trial"
INSTANCES = {"mma_backward_sm80": "^d64$", "wgmma_backward_sm90": "^d64_(full|masked)_bf16$"}
CASES = [
    "B1,H2/1,S70x133,D64,bfloat16",
    "B2,H2,S133,D64,bfloat16,causal=bottom_right,sinks=same",
    "B1,H4/2,S40x90,D64,bfloat16,window=30:none,layout=bshd",
]
OF_MMA = ["B1,H2/1,S33x71,D60/44,bfloat16,bias=full,mask=rows,softcap=5.0,sinks=float32"]


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    """emulated(kernel, **options): the name under which a build of it is loaded, once for each set of options."""
    folder, loaded, device_of = tmp_path_factory.mktemp("trial"), {}, rows.device_of

    def get(kernel, **options):
        key = kernel, *options
        if key not in loaded:
            target = folder / f"{kernel}.{len(loaded)}.so"
            emulator.build(TRIAL / f"{kernel}.cu", target, instances=INSTANCES[kernel], **options)
            loaded[key] = emulator.load(target, kernel)
        return loaded[key]

    rows.device_of = lambda kernel: "cpu" if kernel in loaded.values() else device_of(kernel)
    yield get
    rows.device_of = device_of


@pytest.mark.parametrize("seed", (0, 5))
@pytest.mark.parametrize("kernel, case", [(k, c) for k in INSTANCES for c in CASES] + [("mma_backward_sm80", c) for c in OF_MMA])
def test_gradients(emulated, monkeypatch, kernel, case, seed):
    monkeypatch.setenv("FA_EMULATOR_SEED", str(seed))
    monkeypatch.setenv("FA_EMULATOR_SMS", "2")
    report = gradients.verdict(emulated(kernel), gradients.make(Case.parse(case)))
    assert report, report


@pytest.mark.parametrize("kernel", INSTANCES)
def test_no_race(emulated, monkeypatch, kernel):
    monkeypatch.setenv("FA_EMULATOR_SEED", "1")
    assert gradients.verdict(emulated(kernel, races=True), gradients.make(Case.parse("B1,H2/1,S70x133,D64,bfloat16")))


def test_every_one_is_described():
    text = (TRIAL / "README.md").read_text()
    kernels = sorted(path.stem for path in TRIAL.glob("*.cu"))
    assert kernels == sorted(INSTANCES) and all(f"| `{kernel}` |" in text for kernel in kernels)
    assert not set(kernels) & set(_build.kernel_names())
