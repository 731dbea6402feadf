"""Index arrays that somebody changes during a call: whatever they hold at any moment, every kernel stays inside its arrays."""

import os
import platform
import shutil
import subprocess
import sys

import pytest

import fa_ext
from fa_ext import _build
from tests import emulator
from tests.contract import changing, runner
from tests.contract.shares import some_of

OTHERS = fa_ext.kernels("append") + fa_ext.kernels("documents")
KERNELS = [name for name in (*fa_ext.kernels(), *fa_ext.kernels("backward"), *OTHERS) if next(changing.cases(name), None)]

#: The instances of a kernel that the emulator builds, for float16 and head_dim 64.
EMULATED = {
    "append": {},
    "documents": {},
    "simt": dict(flags=("-DHEAD_DIM=64",), instances="^serve_f16$"),
    "mma_sm80": dict(instances="^serve_d64$"),
    "serve_sm90": dict(instances="^d64_f16$"),
    "prefill_sm90": dict(instances="^d64_masked_f16$"),
    "packed_sm90": dict(instances="^d64_(masked_)?f16$"),
}


def survives(*arguments):
    command = [sys.executable, "-m", changing.__name__, *arguments]
    done = subprocess.run(command, cwd=_build.ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("kernel", some_of((name for name in KERNELS if runner.device_of(name) == "cpu"), 2))
def test_a_thread_changes_them(kernel):
    survives(kernel, "0.2")


@pytest.fixture
def emulated(tmp_path):
    """A build of a kernel for the emulator."""
    if "libasan" in os.environ.get("LD_PRELOAD", ""):
        pytest.skip("the emulator switches stacks, which ASan does not follow")
    if shutil.which("g++") is None or sys.platform != "linux" or platform.machine() != "x86_64":
        pytest.skip("the emulator is for g++ on x86-64 Linux")
    return lambda kernel: emulator.build(kernel, tmp_path / f"{kernel}.so", **EMULATED[kernel])


@pytest.mark.parametrize("kernel", EMULATED)
def test_a_thread_changes_them_under_a_kernel_of_a_device(kernel, emulated):
    """On the emulator, whose threads read the same element at moments that lie far apart."""
    survives(kernel, "1", str(emulated(kernel)))


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.skipif(not runner.has("torch"), reason="needs torch")
@pytest.mark.parametrize("kernel", [name for name in KERNELS if runner.device_of(name) == "cuda"])
def test_copies_of_another_stream_change_them(kernel):
    if reason := runner.absent(kernel) if kernel in fa_ext.kernels() else runner.no_device():
        pytest.skip(reason)
    changing.run_on_a_device(kernel, 0.3)
