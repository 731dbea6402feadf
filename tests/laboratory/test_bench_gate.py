"""The laboratory refuses candidates that cheat or err, and accepts the honest ones; each runs in its own worker."""

import gc
import json
import math
import mmap
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bench import machine, problems, report
from bench.__main__ import main
from bench.commands import gate
from bench.machine import device
from bench.trial import duel, isolation, processes, shared
from bench.trial.dice import Dice
from bench.trial.pool import FENCE, Pool, SharedOperands
from fa_ext import reference
from tests.laboratory.support.command import CHEATS

pytestmark = pytest.mark.usefixtures("one_thread", "any_load")

CASE = "B1,H2,S80x90,D32,float32"
QUICK = {"rounds": 24, "seconds": 3.0}


def judge(name, case=CASE, baselines=("numpy",), limit=0.95, time_limit=60.0, **options):
    return gate.judge_one(f"{CHEATS}:{name}", case, "cpu", list(baselines), limit, time_limit, **{**QUICK, **options})


# candidate: what the reasons must match
CAUGHT = {
    "zeros": "Frobenius",
    "mean_of_values": "Frobenius",
    "right_mean": "Frobenius",
    "first_seed_only": "trial 2",
    "caches_first": "trial 2",
    "caches_by_pointer": "timed sample 1: call .* off by",
    "lazy_after_warm_up": "timed sample .* (unwritten|off by)",
    "works_only_before_and_after": "timed sample .* (unwritten|off by)",
    "writes_part": "NaN",
    "returns_early": "NaN",
    "low_precision": "error",
    "patches_timer": "by the judge's clock",
    "patches_time": "by the judge's clock",
    "edits_stopwatch": "by the judge's clock",
    "patches_judge": "Frobenius",
    "forges_verdict": "forged during trials: a reply that does not belong to the request",
    "forges_with_token": "NaN",
    "floods_replies": "forged during trials",
    "answers_early": "timed sample .* (unwritten|off by)|forged",
    "copies_expected": "Frobenius",
    "writes_parent_memory": "raised PermissionError",
    "makes_inputs_easy": "Frobenius",
    "shrinks_memory": "Frobenius",
    "leaves_process": "processes that it started went on",
    "returns_unless_poisoned": "timed sample .* (unwritten|off by)",
    "lazy_object": "the result is a .*_Promise, not an array of numpy",
    "lazy_subclass": "the result is a .*_Later, not an array of numpy",
    "caches_queries": "timed sample .* off by",
    "computes_ahead": "timed sample .* off by",
    "half_precision_when_timed": "timed sample .* off by",
    "skips_a_head_when_timed": "timed sample .* off by",
    "ends_when_timed": "crashed during timing: exit status 0: .\\[32mPASS",
    "mutates_inputs": "read-only",
    "mutates_memory": "crashed during trials: killed by SIGSEGV",
    "writes_past_out": "wrote outside its memory, beside out",
    "reads_past_keys": "finite",
    "crashes": "crashed during trials: killed by SIGSEGV",
    "exits": "SystemExit",
    "raises": "no kernel for this shape",
    "clamped_exponentials": "error",
    "clamped_scores": "error",
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


@pytest.mark.parametrize("kind", ["sorted", "large"])
@pytest.mark.parametrize("name", ["clamped_exponentials", "clamped_scores"])
def test_more_than_one_kind_of_inputs_catches_a_clamp(name, kind):
    found = judge(name, values=[kind])
    assert found["verdict"] == "FAIL" and f"trial 1 ({kind} inputs" in found["failures"][0]


def test_a_baseline_is_not_slowed_down():
    """Root's candidates lack the privilege to lower another process's priority; here one has it."""
    with isolation.Worker() as worker:
        found = judge("slows_baseline", worker=worker)
    assert found["verdict"] == "FAIL" and "cores or priority of numpy were changed" in found["failures"][0]


def test_what_a_contender_frees_stays_with_its_process():
    """Whatever sizes it has freed before: else two processes pay differently for the same work."""
    calls, arrays, nbytes = 50, 3, 3 << 20  # glibc gives back from twice the largest array freed on
    with isolation.Worker() as worker:
        faults = worker.call("tests.laboratory.support.page_faults:of_arrays", {"calls": calls, "arrays": arrays, "nbytes": nbytes}, 60.0)
    assert faults.ok and faults.value < calls * arrays * nbytes // 4096 // 10, faults


def test_caching_by_content_gains_nothing():
    """No timed call repeats the inputs of another: the cache is right, and empty. With it the ratio would be 0.1."""
    case = "B1,H2,S384,D32,float32"
    found = judge("caches_content", case, baselines=[f"{CHEATS}:honest"], limit=0.4, seconds=10.0)
    assert found["correct"] and found["verdict"] == "FAIL", found


def test_what_a_candidate_started_ends_with_it(tmp_path, monkeypatch):
    """Even a daemon: a grandchild in a session of its own whose parent has ended."""
    file = tmp_path / "pid"
    monkeypatch.setenv("FA_TEST_PID_FILE", str(file))
    assert judge("leaves_daemon")["verdict"] == "FAIL"
    assert not Path(f"/proc/{file.read_text()}").exists()


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
    # The time that the winner lost to waiting speaks for the verdict.
    (2.0, 0.0, {"any": 0.9}, [], "UNDECIDED"), (2.0, 0.0, {"any": 0.2, "numpy": 0.9}, [], "FAIL"),
    (0.5, 0.0, {"numpy": 0.9}, [], "UNDECIDED"), (0.5, 0.0, {"any": 0.9, "numpy": 0.2}, [], "PASS"),
])  # fmt: skip
def test_times_on_crowded_cores_decide_nothing(ratio, others, waiting, failures, verdict, monkeypatch):
    """Nor those of threads that waited for a core; a wrong result stays wrong."""
    monkeypatch.undo()
    interval = {"ratio": ratio, "low": 0.9 * ratio, "high": 1.1 * ratio, "rounds": 240, "block": 7}
    found = {"failures": failures, "ratios": {"numpy": interval}, "seconds": {"numpy": 1.0},
             "conditions": {"others": others, "load_average": 3.25, "waiting": waiting}}  # fmt: skip
    found |= {"correct": not failures, "candidate": "any", "case": CASE, "seed": 1, "seed_given": False}
    monkeypatch.setattr(duel, "duel", lambda *args, **options: dict(found))
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
    with duel.Table("cpu") as table, isolation.Worker(confined=True) as worker:
        common = {"baselines": [], "case": CASE, "table": table, "worker": worker, "values": ["normal"], **QUICK}
        crashed, hung, fine = (duel.duel(f"{CHEATS}:{name}", time_limit=limit, **common)["failures"]
                               for name, limit in (("crashes", 60), ("hangs", 6), ("honest", 60)))  # fmt: skip
    assert "crashed during trials" in crashed[0] and "timed out during trials" in hung[0] and not fine
    assert worker.started == 3


def test_false_claims_contradict_the_judges_clock():
    """The time of its samples that a worker tells is held against the judge's clock; nonsense too."""
    def remote(observed, claimed):
        found = object.__new__(duel.Remote)
        found.kind, found.clocked = "cuda", list(zip(observed, claimed, strict=True))
        return found

    match = object.__new__(duel._Match)
    match.baselines = [remote([0.0203] * 30, [0.0201] * 30)]
    assert match._contradiction(remote([0.021] * 30, [0.0204] * 30)) is None
    assert match._contradiction(remote([0.5, *[0.021] * 29], [0.0204] * 30)) is None
    for claims in ([0.01] * 30, [0.0] * 30, [0.03] * 30, ["0.02"] * 30, [None] * 30, [float("nan")] * 30):
        assert "by the judge's clock" in match._contradiction(remote([0.021] * 30, claims))
    match.baselines = [remote([0.023] * 30, [0.02] * 30)]  # where waking a worker takes long
    assert match._contradiction(remote([0.029] * 30, [0.02] * 30)) is None
    assert "by the judge's clock" in match._contradiction(remote([0.023] * 30, [0.01] * 30))


def test_a_worker_stands_still_between_timed_calls():
    with isolation.Worker(confined=True) as worker:
        outcome, seconds = worker.timed("time:sleep", {}, 10)  # refuses its arguments
        assert outcome.status == "failed" and 0 < seconds < 5 and processes.state(worker.pid) == "T"
        assert worker.moving() == set()


def test_sealed_memory_cannot_be_written_by_anyone_else():
    region = shared.HostRegion(5000, writable=False)
    region.raw[:] = 7
    if not region.sealed:
        pytest.skip("this kernel does not know F_SEAL_FUTURE_WRITE")
    seen = shared.attach(region.description(), os.dup(region.fd), device.Cpu())
    region.raw[4999] = 9
    assert seen[4999] == 9 and not seen.flags.writeable
    for attempt in (lambda: os.pwrite(region.fd, b"x", 0), lambda: mmap.mmap(region.fd, 5000),
                    lambda: os.truncate(region.fd, 0)):  # fmt: skip
        with pytest.raises(PermissionError):
            attempt()


def out(pool, i):
    """The bytes of the result of a slot."""
    begin = FENCE + i * pool.out_step
    return pool.out.raw[begin : begin + 2 * math.prod(pool.case.out_shape)]


def test_timed_inputs_never_repeat_and_stay_the_judges_own():
    """Two windows of the store have no row in common; the judge computes from its own copy, whatever the memory holds."""
    case = problems.parse("B2,H4/2,S33x40,D8,float16,causal=bottom_right,layout=bshd,mask=full,sinks=float32")
    table = device.Cpu()
    pool = Pool(case, table, Dice(1), False)
    rows = set()
    for _ in range(5):
        pool.refill(4)
        before = len(rows)
        seen = pool.inputs.raw[: 4 * pool.step].reshape(4, -1)[:, : pool.places["mask"]].reshape(-1, 16)
        rows |= {row.tobytes() for row in seen}
        assert len(rows) > before + 0.9 * len(seen)
    masks = pool.inputs.raw[: 4 * pool.step].reshape(4, -1)[:, pool.places["mask"] :][:, : 2 * 4 * 33 * 40].view(bool).copy()
    sinks = pool.inputs.raw[: 4 * pool.step].reshape(4, -1)[:, pool.places["sinks"] :][:, :16].copy().view(np.float32)
    assert len({mask.tobytes() for mask in masks}) == 4
    pool.inputs.raw[:] = 0
    for i in range(4):
        inputs = {name: np.concatenate([np.concatenate([pool._input(i, name, b, h) for h in range(heads)], 1)
                                        for b in range(2)]) for name, heads in (("q", 4), ("k", 2), ("v", 2))}  # fmt: skip
        truth = reference.attention(**inputs, mask=masks[i].reshape(2, 4, 33, 40), sinks=sinks[i], causal="bottom_right")[0]
        out(pool, i)[:] = np.ascontiguousarray(truth.swapaxes(1, 2).astype(np.float16)).view(np.uint8).ravel()
    assert all(pool.look(2e-3, 2e-3) is None for _ in range(10)) and not pool.broken_fences()
    out(pool, 2)[5 * 32 : 6 * 32] = 0  # one query of one batch entry of one slot
    assert any(pool.look(2e-3, 2e-3) for _ in range(300))
    pool.out.raw[3] = 0
    assert pool.broken_fences()
    pool.close()


def test_progress_of_a_single_problem(capfd):
    assert main(["gate", f"{CHEATS}:zeros", "--case", CASE, "--device", "cpu", "--baseline", "numpy"]) == 1
    printed = capfd.readouterr()
    assert [stage in printed.err for stage in ("baselines", "load", "trials")] == [True] * 3
    assert "Frobenius" in printed.out


def test_the_memory_of_a_trial_goes_with_its_last_reference():
    """Not when Python looks for circles: a region has two descriptors, and one process may have 1024."""

    def descriptors():
        return len(os.listdir("/proc/self/fd"))

    gc.collect()
    before = descriptors()
    gc.disable()
    try:
        operands = SharedOperands(problems.parse("B1,H1,S8,D8,float32"), device.open_device("cpu"), 0, False)
        assert descriptors() > before
        operands.close()
        del operands
        assert descriptors() == before
    finally:
        gc.enable()
