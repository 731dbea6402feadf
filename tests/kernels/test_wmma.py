"""The wmma kernel alone: its wide block shape, which the contract's small calls do not reach.

With ``batch_invariant`` the shape follows from seq_k alone, so that 1024 keys are enough to get the wide one.
"""

import pytest

import fa_ext
from bench.problems.case import Case
from tests.contract import runner

KERNEL = "wmma"

WIDE = (
    Case(1, 2, 1, 200, 1024, 64),
    Case(1, 2, 2, 200, 1024, 128, dtype="bfloat16", layout="bshd"),
    Case(2, 2, 1, 353, 1100, 64, dtype="bfloat16", causal="bottom_right"),
    Case(1, 3, 3, 177, 1025, 128, causal="top_left", sinks="float32"),
    Case(1, 2, 2, 1030, 1030, 96, 72, causal=True, window=(100, None), softcap=20.0),
    Case(1, 2, 2, 500, 1500, 40, 56, dtype="bfloat16", window=(9, 300), mask="rows"),
    Case(1, 4, 2, 90, 1200, 64, 128, bias="full", mask="keys", sinks="same"),
    Case(2, 4, 2, 90, 1200, 64, dtype="bfloat16", alibi="batch", bias="keys", causal="bottom_right"),
    Case(1, 2, 2, 1300, 1040, 64, causal="bottom_right"),
    Case(1, 2, 1, 1, 2000, 128, scale=-0.3),
    Case(1, 2, 2, 200, 1024, 61, strides="odd"),
    Case(1, 2, 1, 70, 1300, 128, values="nan_outside", causal="top_left"),
    Case(1, 2, 1, 130, 1300, 64, values="large"),
)


@pytest.fixture(autouse=True)
def available():
    if KERNEL not in fa_ext.kernels():
        pytest.skip("this build has no wmma kernel")
    reason = runner.absent(KERNEL)
    if reason:
        pytest.skip(reason)


@pytest.mark.gpu
@pytest.mark.parametrize("case", WIDE, ids=str)
def test_wide_shape(case):
    report = runner.verdict(KERNEL, case, batch_invariant=True)
    assert report, report
