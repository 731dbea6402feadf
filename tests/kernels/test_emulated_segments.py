"""``segments`` on the emulator of CUDA: what test_segments.py holds kernels to, by other orders of threads, on the kernels of a GPU that take it;
and mistakes that they must notice."""

import platform
import shutil
import sys

import numpy as np
import pytest

import fa_ext
from bench.problems import serving_cases
from tests.contract import segments
from tests.emulator.emulated import builds, replaced

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None or sys.platform != "linux" or platform.machine() != "x86_64",
    reason="the emulator is for g++ on x86-64 Linux",
)

INSTANCES = {"simt": "^serve_f32$", "mma_sm80": "^serve_d64$", "simt_backward": "^serve_f32$", "mma_backward_sm80": "^sequences_d64$"}
FORWARD = ("simt", "mma_sm80")
BACKWARD = ("simt_backward", "mma_backward_sm80")
SIZES = ((13, 17, 16), (70, 133, 40))


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    with builds(tmp_path_factory.mktemp("segments"), INSTANCES) as get:
        yield get


@pytest.fixture(params=(0, 1))
def seed(request, monkeypatch):
    monkeypatch.setenv("FA_EMULATOR_SEED", str(request.param))


@pytest.mark.parametrize("name", segments.OPTIONS)
@pytest.mark.parametrize("kernel", FORWARD)
def test_forward(emulated, seed, kernel, name):
    for size in SIZES:
        segments.forward(emulated(kernel), name, *size)


@pytest.mark.parametrize("name", segments.OPTIONS)
@pytest.mark.parametrize("kernel", BACKWARD)
def test_backward(emulated, seed, kernel, name):
    if name == "positions" and "mma" in kernel:
        pytest.skip("takes no positions")
    for size in SIZES:
        segments.backward(emulated(kernel), name, *size)


@pytest.mark.parametrize("name", ("none", "causal", "window, bias", "dropout", "lengths"))
@pytest.mark.parametrize("kernel", (*FORWARD, *BACKWARD))
def test_documents_in_order(emulated, kernel, name):
    (segments.backward if kernel in BACKWARD else segments.forward)(emulated(kernel), name, 200, 290, 40, ordered=True)


@pytest.mark.parametrize("kernel", (*FORWARD, *BACKWARD))
def test_random_calls(emulated, kernel):
    cases = [case.changed(head_dim=48, head_dim_v=48) for case in serving_cases.random_segments(20, 9, kernel in BACKWARD, longest=90)]
    wrong = segments.failures(emulated(kernel), cases)
    assert not wrong, "\n".join(wrong[:3])


@pytest.mark.parametrize("kernel", FORWARD)
def test_layouts_documents_and_empty_arrays(emulated, kernel):
    for check in segments.CHECKS:
        check(emulated(kernel))


@pytest.mark.parametrize("kernel", (*FORWARD, *BACKWARD))
def test_no_races(emulated, kernel):
    name = emulated(kernel, "races", races=True)
    test = segments.backward if kernel in BACKWARD else segments.forward
    test(name, "causal", *SIZES[1])


@pytest.mark.parametrize(("kernel", "old", "new"), [
    ("simt", "query_id[row] == key_id[column]", "query_id[row] <= key_id[column]"),
    ("mma_sm80", "id != mine[1]", "id != mine[0]"),
    ("simt_backward", "segments.of_query(0, i) == segments.of_key(0, j)", "segments.of_query(0, i) == segments.of_key(0, i)"),
    ("mma_backward_sm80", "own[r][e / 2] != other[j][e % 2]", "own[r][0] != other[j][e % 2]"),
])  # fmt: skip
def test_mistakes_are_noticed(emulated, kernel, old, new):
    given, _ = segments.drawn("none", 30, 30, dtype=segments.width(kernel))

    name = emulated(kernel, "mutant", edit=replaced(old, new))
    if kernel in FORWARD:
        report = fa_ext.verify(**given, kernel=name)
    else:
        out, lse = fa_ext.reference.attention(**given)
        out, lse = out.astype(given["q"].dtype), lse.astype(np.float32)
        report = fa_ext.verify_backward(np.ones_like(out), out=out, lse=lse, **given, kernel=name)
    assert not report
