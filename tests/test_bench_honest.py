"""``bench gate`` and honest candidates on the CPU: each array library is judged on its own arrays; faster passes, slower
fails."""

import importlib.util
from pathlib import Path

import pytest

from bench import gate

pytestmark = pytest.mark.usefixtures("one_thread", "any_load")

HONEST = Path(__file__).with_name("honest.py")
LIBRARIES = [pytest.param(n, marks=pytest.mark.skipif(importlib.util.find_spec(n) is None, reason=f"{n} is not installed"))
             for n in ("numpy", "torch", "jax")]  # fmt: skip
CASE = "B1,H2,S96x112,D32,float32"


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")


def judge(name, baseline, case=CASE, **options):
    options = {"rounds": 60, "seconds": 5.0, "seed": 3, **options}
    return gate.judge_one(f"{HONEST}:{name}", case, "cpu", [f"{HONEST}:{baseline}"], **options)


def summary(found):
    return {name: value for name, value in found.items() if name != "samples"}


@pytest.mark.parametrize("case", [CASE, "B2,H4/2,S65,D40,float16,causal=True", "B1,H2,S70x50,D32,bfloat16,layout=bshd"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_honest_is_correct(library, case):
    found = judge(f"{library}_", "twice_numpy", case, rounds=24, seconds=1.0)
    assert found["correct"], found["failures"]


@pytest.mark.parametrize("library", LIBRARIES)
def test_faster_passes_and_slower_fails(library):
    """Half the work against all of it; and the reverse."""
    faster = judge(f"{library}_", f"twice_{library}")
    assert faster["verdict"] == "PASS", summary(faster)
    slower = judge(f"twice_{library}", f"{library}_")
    assert slower["correct"] and slower["verdict"] == "FAIL", summary(slower)


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_tenth_slower_does_not_pass(library):
    """15% more time: FAIL, or UNDECIDED where other processes widen the interval over the 10% to the limit."""
    found = judge(f"tenth_{library}", f"{library}_", rounds=240, seconds=8.0)
    assert found["correct"] and found["verdict"] in ("FAIL", "UNDECIDED"), summary(found)
    ratio = next(iter(found["ratios"].values()))
    assert ratio["high"] > 1.0 and (found["verdict"] == "FAIL" or ratio["low"] < 0.95), summary(found)


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="jax is not installed")
def test_the_time_of_jax_is_that_of_the_work(monkeypatch):
    """A call returns before its work is done: the work counts all the same."""
    found = judge("jax_", "numpy_", "B1,H8,S512,D64,float32", rounds=24, seconds=2.0)
    seconds = found["seconds"]
    assert found["correct"] and min(seconds.values()) > 5e-4, summary(found)
    assert max(seconds.values()) < 100 * min(seconds.values()), summary(found)
