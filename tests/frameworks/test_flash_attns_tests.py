"""FlashAttention's own tests on fa_ext.torch.flash_attn. FA_FLASH_ATTN_TESTS names a folder with its files, as
tests/frameworks/support/flash_attns_tests.py says; FA_FLASH_ATTN_TESTS_DRAW how many sets of parameters of each test are drawn."""

import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from tests.frameworks.support import flash_attns_tests  # noqa: E402
from tests.frameworks.support.torch_calls import DEVICES  # noqa: E402

FOLDER = os.environ.get("FA_FLASH_ATTN_TESTS")
DRAW = os.environ.get("FA_FLASH_ATTN_TESTS_DRAW", "90")


@pytest.mark.slow
@pytest.mark.skipif(not FOLDER, reason="needs FlashAttention's test files: FA_FLASH_ATTN_TESTS")
def test_a_sample_passes():
    small = [] if "cuda" in DEVICES else ["--on", "cpu", "--longest", "256"]
    command = [sys.executable, "-m", flash_attns_tests.__name__, FOLDER, "--draw", DRAW, *small]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).resolve().parents[2])
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def test_sets_are_drawn():
    """None twice, all where they are few, pairs together, none that is too long."""
    marks = [SimpleNamespace(args=x) for x in (("a", [1, 2, 3]), ("b, c", [(10, True), (20, False)]), (["d"], ["x", "y"]))]
    names, sets = flash_attns_tests.drawn(marks, 100, None, random.Random(0))
    assert names == ["a", "b", "c", "d"]
    assert sorted(sets) == sorted((a, b, c, d) for a in (1, 2, 3) for b, c in ((10, True), (20, False)) for d in "xy")
    assert len(flash_attns_tests.drawn(marks, 5, None, random.Random(1))[1]) == 5
    _, sets = flash_attns_tests.drawn(marks, 100, 10, random.Random(0))
    assert len(sets) == 6 and {x[1] for x in sets} == {10}
    assert len(flash_attns_tests.drawn([SimpleNamespace(args=("a", range(10_000)))] * 4, 3, None, random.Random(0))[1]) == 3


def test_what_is_an_exception():
    """A NotImplementedError of fa_ext by name, and rounding where the file wants exactly 0; all else is a failure."""
    words = "return_attn_probs is True with dropout_p > 0, whose weights fa_ext does not return"
    assert flash_attns_tests.exception(NotImplementedError(words)) == "refused: the weights of dropout"
    assert flash_attns_tests.exception(RuntimeError(words)) is None
    assert flash_attns_tests.exception(NotImplementedError("another")) is None
    for found, bound, allowed in (("1.1e-06", "0.0", True), ("2e-05", "0.0", False), ("nan", "0.0", False), ("1e-06", "1e-07", False)):
        error = AssertionError(f"assert {found} <= ((2 * {bound}) + 0.0)\n +  where {found} = ...")
        assert (flash_attns_tests.exception(error) is not None) == allowed


def test_files_of_another_version_are_told(tmp_path):
    for file in flash_attns_tests.FILES.values():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("import torch\n")
    with pytest.raises(SystemExit, match="tests/test_flash_attn.py has no"):
        flash_attns_tests.copy(tmp_path, tmp_path, "cuda")
