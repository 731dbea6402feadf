"""PyTorch's own tests of attention, run inside sdpa(): FA_TORCH_TESTS names test/test_transformers.py of the version that is installed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import torchs_tests

pytest.importorskip("torch")
pytest.importorskip("expecttest", reason="needs what PyTorch's tests need: expecttest")

ROOT = Path(__file__).resolve().parents[2]
FILE = os.environ.get("FA_TORCH_TESTS")
CLASSES = ["TestTransformers", "TestSDPAFailureModes", "TestSDPA", "TestSDPACpuOnly", "TestSDPACudaOnly", "TestAttnBias"]

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not FILE, reason="needs PyTorch's tests: FA_TORCH_TESTS=.../test_transformers.py")]


def failing(folder, *arguments):
    """The names of the tests that fail."""
    found = folder / "failures"
    found.unlink(missing_ok=True)
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(Path(FILE).parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "torchs_tests", "-p", "no:cacheprovider", "--failures", str(found), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=os.environ | {"PYTHONPATH": paths})
    assert done.returncode in (0, 1, 5), done.stdout[-4000:] + done.stderr[-4000:]  # passed, failed, none of that name
    return found.read_text().splitlines() if found.exists() else []


@pytest.mark.parametrize("name", CLASSES)
def test_what_fails_inside_asks_for_a_refusal(name, tmp_path):
    inside = failing(tmp_path, FILE, "-k", f"{name}CPU or {name}CUDA")
    unknown = [test for test in inside if not torchs_tests.refusal(test)]
    outside = failing(tmp_path, "--outside", *(f"{FILE}::{test}" for test in unknown)) if unknown else []
    assert not set(unknown) - set(outside)  # what fails without fa_ext too is not its fault
