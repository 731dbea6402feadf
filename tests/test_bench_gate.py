"""The laboratory refuses candidates that cheat or err, and accepts the honest ones; each runs in its own worker."""

import json
import os
import re
import subprocess
import sys

import pytest

from bench import duel, gate, isolation, machine, report
from laboratory import CHEATS

pytestmark = pytest.mark.usefixtures("one_thread", "any_load")

CASE = "B1,H2,S80x90,D32,float32"
QUICK = {"rounds": 24, "seconds": 3.0, "seed": 3}


def judge(name, case=CASE, baselines=("numpy",), limit=0.95, time_limit=60.0, **options):
    return gate.judge_one(f"{CHEATS}:{name}", case, "cpu", list(baselines), limit, time_limit, **{**QUICK, **options})


# candidate: what the reasons must match
CAUGHT = {
    "zeros": "Frobenius",
    "mean_of_values": "Frobenius",
    "right_mean": "Frobenius",
    "first_seed_only": "trial 2",
    "caches_first": "trial 2",
    "caches_by_pointer": "changed under its pointers|before timing|seed",
    "lazy_after_warm_up": "unwritten",
    "works_only_before_and_after": "unwritten",
    "writes_part": "NaN",
    "returns_early": "NaN",
    "low_precision": "error",
    "patches_timer": "tampered with bench.timer.Stopwatch.sample_both",
    "patches_time": "tampered with time.perf_counter_ns",
    "mutates_inputs": "wrote to its inputs: q",
    "writes_past_out": "wrote outside its memory, beside out",
    "reads_past_keys": "finite",
    "crashes": "crashed during trials: killed by SIGSEGV",
    "exits": "SystemExit",
    "raises": "no kernel for this shape",
    "clamped_exponentials": "error",
    "isfinite_fallback": "inputs",
    "state_of_each_warp": "error",
    "skipped_rescale": "error",
    "stale_sum": "error",
}


@pytest.mark.parametrize("name", CAUGHT)
def test_caught(name):
    found = judge(name)
    assert found["verdict"] == "FAIL" and not found["correct"]
    assert re.search(CAUGHT[name], " ".join(found["failures"])), found["failures"]


def test_patched_judge_is_noticed():
    """A candidate that replaces what judges it may pass the trials, but not unnoticed."""
    found = judge("patches_judge")
    assert found["verdict"] == "FAIL"
    reasons = " ".join(found["failures"])
    assert "tampered with numpy.linalg.norm" in reasons or "NaN" in reasons or "error" in reasons


def test_hang_is_ended():
    found = judge("hangs", time_limit=6.0)
    assert found["verdict"] == "FAIL" and "timed out during trials" in found["failures"][0]


@pytest.mark.parametrize("name", ["honest", "online_softmax"])
@pytest.mark.parametrize("case", [CASE, "B2,H4/2,S65,D40,float16,causal=True", "B1,H2,S70x50,D32,bfloat16,layout=bshd"])
def test_honest_is_correct(name, case):
    found = judge(name, case)
    assert found["correct"], found["failures"]
    assert 0 < found["ratios"]["numpy"]["rounds"] <= QUICK["rounds"] and found["baseline"] == "numpy"


def test_a_sure_win_passes_and_a_sure_loss_fails():
    """NumPy against itself: far under the limit 20, and surely not under 0.05."""
    assert judge("honest", limit=50.0, seconds=30.0)["verdict"] == "PASS"
    assert judge("honest", limit=0.02, seconds=30.0)["verdict"] == "FAIL"


def test_without_a_baseline_nothing_is_decided():
    found = judge("honest", "B1,H2,S64,D32,float32,values=normal", baselines=["torch-cudnn"])
    assert found["verdict"] == "UNDECIDED" and "torch-cudnn" in found["refused"]


@pytest.mark.parametrize("ratio, others, waiting, failures, verdict", [
    (0.5, 0.1, {}, [], "PASS"), (2.0, 0.1, {}, [], "FAIL"), (0.5, None, {}, [], "PASS"),
    (0.5, 0.6, {}, [], "UNDECIDED"), (2.0, 0.6, {}, [], "UNDECIDED"), (0.5, 0.6, {}, ["wrong"], "FAIL"),
    # What the winner lost to waiting speaks for the verdict.
    (2.0, 0.0, {"any": 0.9}, [], "UNDECIDED"), (2.0, 0.0, {"any": 0.2, "numpy": 0.9}, [], "FAIL"),
    (0.5, 0.0, {"numpy": 0.9}, [], "UNDECIDED"), (0.5, 0.0, {"any": 0.9, "numpy": 0.2}, [], "PASS"),
])  # fmt: skip
def test_times_on_crowded_cores_decide_nothing(ratio, others, waiting, failures, verdict, monkeypatch):
    """Nor those of threads that waited for a core; a wrong result stays wrong."""
    monkeypatch.undo()
    interval = {"ratio": ratio, "low": 0.9 * ratio, "high": 1.1 * ratio, "rounds": 240, "block": 7}
    found = {"failures": failures, "ratios": {"numpy": interval}, "seconds": {"numpy": 1.0},
             "conditions": {"others": others, "load_average": 3.25, "waiting": waiting}}  # fmt: skip
    monkeypatch.setattr(isolation.Worker, "call", lambda *args: isolation.Outcome("done", found))
    judged = gate.judge_one("any", CASE, "cpu", ["numpy"])
    assert judged["verdict"] == verdict
    why = (
        "waited for a core for 90%"
        if waiting
        else "60% of the cores during the rounds, 25% are accepted (load average 3.2)"
    )
    assert any(why in text for text in judged["failures"]) == (verdict == "UNDECIDED")


def test_what_others_take_of_the_cores_is_seen():
    """As many busy processes as cores; what this process does itself is not counted."""
    cores = machine.Cores()
    spin = "import time\nend = time.monotonic() + 1.5\nwhile time.monotonic() < end: pass"
    busy = [subprocess.Popen([sys.executable, "-c", spin]) for _ in os.sched_getaffinity(0)]
    for process in busy:
        process.wait()
    assert cores.others() > 0.5
    before, after = (100.0, 40.0, 7.0), (110.0, 48.0, 12.0)  # total, busy and own seconds
    cores.began = before
    cores._read = lambda: after
    assert cores.others() == pytest.approx(0.3)
    cores._read = lambda: (100.0, 40.0, 9.0)
    assert cores.others() is None


def test_candidate_that_cannot_be_called_for_the_problem_says_so():
    found = judge("zeros", "B1,H2,S64,D32,float32,causal=True")
    assert found["verdict"] == "FAIL" and "takes no argument causal" in found["failures"][0]


def test_command_line(tmp_path, capfd):
    from bench.__main__ import main

    output = tmp_path / "gate.json"
    status = main(["gate", f"{CHEATS}:zeros", "--case", CASE, "--device", "cpu", "--baseline", "numpy", "--json",
                   "--output", str(output)])  # fmt: skip
    printed = json.loads(capfd.readouterr().out)
    assert status == 1 and printed["gates"][0]["verdict"] == "FAIL"
    assert json.loads(output.read_text())["gates"][0]["case"] == CASE


@pytest.mark.parametrize("text", ["nothing", "nothing.so", "cheats_missing.py:zeros", "json:no_such_function"])
def test_unknown_candidates_are_named(text):
    with pytest.raises(report.UsageError, match=r"candidate"):
        gate.judge_one(text, CASE, "cpu", ["numpy"], **QUICK)


def test_worker_survives_what_it_is_given():
    """After a crash and a time-out the next call gets a new process."""
    with isolation.Worker() as worker:
        arguments = {"baselines": ["numpy"], "case": CASE, "device": "cpu", **QUICK}
        crashed = worker.call("bench.duel:duel", {"candidate": f"{CHEATS}:crashes", **arguments}, 60)
        hung = worker.call("bench.duel:duel", {"candidate": f"{CHEATS}:hangs", **arguments}, 5)
        fine = worker.call("bench.duel:duel", {"candidate": f"{CHEATS}:honest", **arguments}, 60)
    assert (crashed.status, hung.status, fine.status) == ("crashed", "timed out", "done")


def test_parent_clock_contradicts_false_claims():
    """What the worker says its samples took is held against the parent's clock, whatever was patched in the worker."""
    auditor = duel.Auditor()
    for begin, end, claimed in ((0.0, 0.3, 0.1), (1.0, 1.4, 0.15), (2.0, 2.3, 0.15)):
        auditor({"audit": "begin"}, begin)
        auditor({"audit": "end", "claimed_s": claimed}, end)
    assert "0.15 s were claimed" in auditor.failure
    auditor({"audit": "begin"}, 3.0)
    auditor({"audit": "end", "claimed_s": 0.25}, 3.3)
    assert auditor.failure is None
