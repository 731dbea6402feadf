"""``intervals`` on the emulator of CUDA: what test_intervals.py holds kernels to, by other orders of threads, on the kernels of a GPU that
take them; and mistakes that they must notice."""

import platform
import shutil
import sys

import numpy as np
import pytest

import fa_ext
from bench.problems.dense import INTERVALS
from tests.contract import gradients, intervals
from tests.emulator.emulated import builds, replaced

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None or sys.platform != "linux" or platform.machine() != "x86_64",
    reason="the emulator is for g++ on x86-64 Linux",
)

INSTANCES = {"simt": "^serve_f32$", "mma_sm80": "^serve_d64$", "simt_backward": "^f32$", "mma_backward_sm80": "^d64$"}
FORWARD = ("simt", "mma_sm80")
BACKWARD = ("simt_backward", "mma_backward_sm80")
SIZES = ((13, 17, 40), (70, 133, 40))


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    with builds(tmp_path_factory.mktemp("intervals"), INSTANCES) as get:
        yield get


@pytest.fixture(params=(0, 1))
def seed(request, monkeypatch):
    monkeypatch.setenv("FA_EMULATOR_SEED", str(request.param))


@pytest.mark.parametrize("kind", INTERVALS)
@pytest.mark.parametrize("kernel", (*FORWARD, *BACKWARD))
def test_against_float64(emulated, seed, kernel, kind):
    for n, name in enumerate(intervals.OPTIONS):
        intervals.check(emulated(kernel), intervals.case_of(kernel, kind, name, *SIZES[n % 2], seed=n))


@pytest.mark.parametrize("kernel", FORWARD)
def test_few_queries_and_many_keys(emulated, seed, kernel):
    """Parts of the keys, by blocks of their own, are cut alike whatever intervals hold."""
    for kind in INTERVALS:
        intervals.check(emulated(kernel), intervals.case_of(kernel, kind, "causal", 3, 1500, 64))


@pytest.mark.parametrize("name", ("none", "causal", "mask, softcap", "slopes"))
@pytest.mark.parametrize("kernel", FORWARD)
def test_the_bits_of_a_mask(emulated, kernel, name):
    for kind in INTERVALS:
        case = intervals.case_of(kernel, kind, name, 70, 333, 40)
        intervals.as_one_mask(emulated(kernel), case, {"seqlens_q": np.full(2, 70, np.int32)})


@pytest.mark.parametrize("kernel", FORWARD)
def test_broadcasts_strides_documents_and_empty_arrays(emulated, kernel):
    for check in intervals.CHECKS:
        check(emulated(kernel))


@pytest.mark.parametrize("kernel", (*FORWARD, *BACKWARD))
def test_no_races(emulated, kernel):
    intervals.check(emulated(kernel, "races", races=True), intervals.case_of(kernel, "two", "causal", 30, 70, 40))


MISTAKES = {
    "the first end included": ("simt", "seen = held.within(KeyRange{row.begin, row.end})", "seen = held.within(KeyRange{row.begin, row.end}), ++seen.end"),
    "what lies between seen": ("simt", "gap = held.gap();", "gap = {0, 0};"),
    "what lies between seen by the tensor cores": ("mma_sm80", "if (args.intervals.count > 1) hide_between(s, args, job, row, key);", ""),
    "intervals of the first row": ("mma_sm80", "const Held held = args.intervals.of_query(job.batch, at.head, at.query);",
                                   "const Held held = args.intervals.of_query(job.batch, at.head, 0);"),
    "intervals of another head": ("simt_backward", "return {intervals, batch, other};", "return {intervals, batch, head};"),
    "intervals of the key": ("mma_backward_sm80", "if ((kQueries ? own : other) != apart) return;", "if ((kQueries ? other : own) != apart) return;"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_noticed(emulated, mistake):
    kernel, old, new = MISTAKES[mistake]
    found = []

    def edit(text):
        found.append(text.count(old))
        return replaced(old, new)(text)

    name = emulated(kernel, mistake, edit=edit)
    assert sum(found)
    case = intervals.case_of(kernel, "two", "none", 40, 60, 40)
    if kernel in FORWARD:
        assert not fa_ext.verify(**case.host_inputs(), kernel=name)
        return
    assert not gradients.verdict(name, gradients.make(case))
