"""``bench gate`` and honest candidates on the CPU: each array library is judged on its own arrays; faster passes, slower
fails."""

import importlib.util
from pathlib import Path

import pytest

from bench.commands import gate

pytestmark = pytest.mark.usefixtures("one_thread", "any_load")

HONEST = Path(__file__).parent / "support" / "honest.py"
LIBRARIES = [pytest.param(n, marks=pytest.mark.skipif(importlib.util.find_spec(n) is None, reason=f"{n} is not installed"))
             for n in ("numpy", "torch", "jax")]  # fmt: skip
CASE = "B1,H2,S96x112,D32,float32"


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")


def judge(name, baseline, case=CASE, **options):
    options = {"rounds": 60, "seconds": 5.0, **options}
    return gate.judge_one(f"{HONEST}:{name}", case, "cpu", [f"{HONEST}:{baseline}"], **options)


def summary(found):
    return str({name: value for name, value in found.items() if name != "samples"})  # pytest shortens a dict


@pytest.mark.parametrize("case", [CASE, "B2,H4/2,S65,D40,float16,causal=True", "B1,H2,S70x50,D32,bfloat16,layout=bshd"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_honest_is_correct(library, case):
    found = judge(f"{library}_", "twice_numpy", case, rounds=24, seconds=1.0)
    assert found["correct"], found["failures"]


def require(found, verdict):
    """Skips what other processes left undecided; the opposite is a failure under any load."""
    assert found["correct"], found["failures"]
    if found["verdict"] == "UNDECIDED" and found["conditions"]["others"] > 0.25:
        pytest.skip(f"other processes took {100 * found['conditions']['others']:.0f}% of the cores")
    assert found["verdict"] == verdict, summary(found)


@pytest.mark.parametrize("library", LIBRARIES)
def test_faster_passes(library):
    """Half the work against all of it."""
    require(judge(f"{library}_", f"twice_{library}"), "PASS")


@pytest.mark.parametrize("library", LIBRARIES)
def test_slower_fails(library):
    require(judge(f"twice_{library}", f"{library}_"), "FAIL")


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_tenth_slower_fails(library):
    require(judge(f"tenth_{library}", f"{library}_", rounds=240, seconds=8.0), "FAIL")


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="jax is not installed")
def test_the_time_of_jax_is_that_of_the_work(monkeypatch):
    """A call returns before its work is done: the work counts all the same."""
    found = judge("jax_", "numpy_", "B1,H8,S512,D64,float32", rounds=24, seconds=2.0)
    seconds = found["seconds"]
    assert found["correct"] and min(seconds.values()) > 5e-4, summary(found)
    assert max(seconds.values()) < 100 * min(seconds.values()), summary(found)
