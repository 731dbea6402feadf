"""PyTorch's own tests of attention run inside sdpa(). FA_TORCH_TESTS names the test/test_transformers.py of the installed
version; FA_TORCH_TESTS_EVERY=N takes every N-th test."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.frameworks.support import torchs_tests

pytest.importorskip("torch")
pytest.importorskip("expecttest", reason="needs what PyTorch's tests need: expecttest")

from tests.frameworks.support.torch_calls import DEVICES  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
FILE = os.environ.get("FA_TORCH_TESTS")
EVERY = os.environ.get("FA_TORCH_TESTS_EVERY", "1")
CLASSES = {
    "cpu": ["TestTransformersCPU", "TestSDPAFailureModesCPU", "TestSDPACPU", "TestSDPACpuOnlyCPU", "TestAttnBiasCPU"],
    "cuda": ["TestTransformersCUDA", "TestSDPAFailureModesCUDA", "TestSDPACUDA", "TestSDPACudaOnlyCUDA", "TestAttnBiasCUDA"],
}

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not FILE, reason="needs PyTorch's test_transformers.py: FA_TORCH_TESTS")]


def failing(folder, *arguments):
    """The names of the tests that fail."""
    found = folder / "failures"
    found.unlink(missing_ok=True)
    paths = os.pathsep.join([str(ROOT), str(Path(FILE).parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-q", "-p", torchs_tests.__name__, "-p", "no:cacheprovider", "--failures", str(found)]
    env = os.environ | {"PYTHONPATH": paths}
    done = subprocess.run(command + list(arguments), capture_output=True, text=True, cwd=folder, env=env)
    assert done.returncode in (0, 1), done.stdout[-4000:] + done.stderr[-4000:]
    return found.read_text().splitlines() if found.exists() else []


@pytest.mark.parametrize("name", [name for device in DEVICES for name in CLASSES[device]])
def test_what_fails_inside_is_known(name, tmp_path):
    inside = failing(tmp_path, "--every", EVERY, f"{FILE}::{name}")
    unknown = [test for test in inside if not torchs_tests.refusal(test)]
    outside = failing(tmp_path, "--outside", *(f"{FILE}::{test}" for test in unknown)) if unknown else []
    assert not set(unknown) - set(outside)  # what fails without fa_ext too is not its fault
