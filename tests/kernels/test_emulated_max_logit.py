"""``max_logit`` on the emulator of CUDA: what test_max_logit.py holds kernels to, by other orders of threads, on the kernels of a GPU that
take it; and mistakes that they must notice."""

import platform
import shutil
import sys

import pytest

from tests.contract import max_logit
from tests.emulator.emulated import builds, replaced

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None or sys.platform != "linux" or platform.machine() != "x86_64",
    reason="the emulator is for g++ on x86-64 Linux",
)

INSTANCES = {"simt": "^serve_f32$", "mma_sm80": "^serve_d64$"}


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    with builds(tmp_path_factory.mktemp("max_logit"), INSTANCES) as get:
        yield get


@pytest.fixture(params=(0, 1))
def seed(request, monkeypatch):
    monkeypatch.setenv("FA_EMULATOR_SEED", str(request.param))


@pytest.mark.parametrize("name", max_logit.OPTIONS)
@pytest.mark.parametrize("kernel", INSTANCES)
def test_against_float64(emulated, seed, kernel, name):
    for size in max_logit.SIZES:
        max_logit.check(emulated(kernel), max_logit.case_of(kernel, name, *size))


@pytest.mark.parametrize("check", max_logit.CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("kernel", INSTANCES)
def test_signs_nan_hidden_keys_and_empty_arrays(emulated, kernel, check):
    check(emulated(kernel))


@pytest.mark.parametrize("kernel", INSTANCES)
def test_no_races(emulated, kernel):
    max_logit.check(emulated(kernel, "races", races=True), max_logit.case_of(kernel, "intervals", 30, 70, 40))


MISTAKES = {
    "hidden keys seen": ("simt", "if (!sees || sum == -", "if constexpr (!kDense) logit = fmaxf(logit, score * scale);\nif (!sees || sum == -", "mask, softcap"),
    "plain products lost": ("simt", "if (max_logit.at) logit = lane.largest(s);", "", "causal"),
    "before the mask": ("mma_sm80", "if (!of_products) score(s, row, first);",
                        "if (of_products) rows.note_logits(s, args, job, shared, row, first);\nof_products = false;\nscore(s, row, first);", "causal"),
    "a bias that hides": ("mma_sm80", "if (p.bias.data) hide_biased(s, args, job, shared, row, key);", "", None),
    "the pack's first head": ("mma_sm80", "args.max_logit.raise(job.batch, job.at(args, row + 8 * i).head, top);", "args.max_logit.raise(job.batch, job.first_head, top);", "none"),
    "signed order below 0": ("simt", "atomicMin(reinterpret_cast<unsigned *>(to), __float_as_uint(logit));", "atomicMax(reinterpret_cast<int *>(to), __float_as_int(logit));", "negative"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_noticed(emulated, mistake):
    kernel, old, new, name = MISTAKES[mistake]
    wrong = emulated(kernel, mistake, edit=replaced(old, new))
    with pytest.raises(AssertionError):
        if name == "negative":
            max_logit.all_negative(wrong)
        elif name is None:
            max_logit.largest_is_hidden(wrong)
        else:
            max_logit.check(wrong, max_logit.case_of(kernel, name, 40, 60, 40))
