"""``bench gate`` refuses who is right when it is tried and cheats when it is timed, stopped, or can foresee the draws; and what a
candidate started ends with the gate, however that ends."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from bench import problems
from bench.__main__ import main
from bench.commands import gate
from bench.machine import device
from bench.problems.operands import WrongResult
from bench.trial import duel, isolation, processes
from bench.trial.dice import Dice
from bench.trial.extras import Extra
from bench.trial.pool import HARD_KINDS, Pool
from bench.trial.stillness import Stillness
from tests.laboratory.support.command import CHEATS, CHEATS_TIMED

pytestmark = pytest.mark.usefixtures("one_thread", "any_load")

CASE = "B1,H2,S80x90,D32,float32"
ROOT = Path(__file__).parents[2]


def judge(name, case=CASE, **options):
    options = {"baselines": ["numpy"], "rounds": 24, "seconds": 30.0, "time_limit": 60.0, **options}
    return gate.judge_one(f"{CHEATS_TIMED}:{name}", case, "cpu", **options)


# ---- candidates ----

CAUGHT = {
    "wakes_itself": "after .* steps|changed after the call had returned|ran between two",
    "wakes_a_helper": "ran between two|processes that it started went on",
    "works_behind_a_dead_leader": "processes that it started went on",
    "works_ahead_in_a_child": "processes that it started went on",
    "knows_small_seeds": "trial 1",
    "without_maximum_when_timed": "timed sample .* inputs in a head",
    "without_maximum_where_it_looks_easy": "timed sample .*outliers inputs in a head",
    "keeps_the_mask": "timed sample .* off by",
    "keeps_the_bias": "timed sample .* off by",
    "keeps_the_sinks": "timed sample .* off by",
    "computes_later_calls": "timed sample .* off by",
    "leaves_the_result_for_later": "changed after the call had returned",
}
OF_CASES = {"keeps_the_mask": "mask=full", "keeps_the_bias": "bias=keys", "keeps_the_sinks": "sinks=float32"}


@pytest.mark.parametrize("name", CAUGHT)
def test_caught(name):
    found = judge(name, ",".join([CASE, *filter(None, [OF_CASES.get(name)])]))
    assert found["verdict"] == "FAIL" and not found["correct"]
    assert re.search(CAUGHT[name], " ".join(found["failures"])), found["failures"]


@pytest.mark.parametrize("option", ["mask=full", "mask=keys", "mask=batch", "bias=holes", "bias=alibi", "sinks=same", "alibi=heads"])
def test_who_takes_each_mask_as_it_is_is_correct(option):
    found = gate.judge_one("cpu_simd", f"B2,H4/2,S33x40,D16,float32,{option}", "cpu", ["cpu_ref"], rounds=6, seconds=0.5)
    assert found["correct"] and found["ratios"]["cpu_ref"]["rounds"] > 0, found


# ---- dice ----


def test_draws_are_secret_unless_they_are_given():
    assert Dice().seed != Dice().seed and not Dice().given
    given, again, other = Dice(5), Dice(5), Dice(6)
    drawn = given.numbers("trials", 3)
    assert again.number("pool") != drawn[0] and again.numbers("trials", 3) == drawn and given.given
    assert other.number("trials") not in drawn and len(set(drawn)) == 3 and max(drawn) < 2**60


def test_a_given_seed_repeats_a_run_and_never_passes():
    first = judge("keeps_the_mask", limit=50.0)
    assert first["verdict"] == "FAIL" and not first["seed_given"] and first["seed"] > 2**32
    found = gate.judge_one(f"{CHEATS}:honest", CASE, "cpu", ["numpy"], 50.0, rounds=24, seconds=30.0, seed=7)
    assert found["correct"] and found["verdict"] == "UNDECIDED" and (found["seed"], found["seed_given"]) == (7, True)
    assert "seed 7 was given" in found["failures"][-1]
    assert gate.judge_one(f"{CHEATS}:zeros", CASE, "cpu", ["numpy"], seed=7)["verdict"] == "FAIL"


def test_the_command_says_that_a_seed_was_given(capfd):
    line = ["gate", f"{CHEATS}:honest", "--case", CASE, "--device", "cpu", "--baseline", "numpy", "--rounds", "24",
            "--seconds", "30", "--limit", "50"]  # fmt: skip
    assert main([*line, "--seed", "7"]) == 2
    assert "repeated with seed 7, which was given" in capfd.readouterr().out
    assert main([*line, "--json"]) == 0  # 24 rounds decide; a machine that takes long for them still ends
    printed = json.loads(capfd.readouterr().out)["gates"][0]
    assert printed["seed_given"] is False and printed["verdict"] == "PASS"


def test_a_worker_is_told_nothing_of_what_was_drawn(monkeypatch):
    """The seed of a trial would tell its inputs, and the kind of its values which of them are hard."""
    told = []
    request = isolation.Worker._request
    monkeypatch.setattr(isolation.Worker, "_request", lambda self, function, arguments, fds: (
        told.append(json.dumps(arguments)), request(self, function, arguments, fds))[1])  # fmt: skip
    found = gate.judge_one(f"{CHEATS}:honest", CASE, "cpu", ["numpy"], rounds=4, seconds=0.5)
    assert found["correct"] and len(told) > 10
    assert not re.search(r"seed|values|sorted|large|outliers|nan_tail", " ".join(told))


# ---- inputs ----


@pytest.mark.parametrize("line", ["B2,H4/2,S33x40,D8,float16,layout=bshd", "B1,H2,S80x90,D32,float32", "B1,H1,S20,D8,bfloat16"])
def test_every_sample_has_hard_heads_that_the_judge_knows(line):
    """The memory holds the judge's copy, and the scores are beyond what exp() takes; ordinary heads are left."""
    case = problems.parse(line)
    pool = Pool(case, device.Cpu(), Dice(), False)
    kinds, group = set(), case.heads // case.heads_kv
    samples, count = [], 40 if case.heads > 1 else 400  # of a single head every other sample is hard: 40 lacked a kind in 1 run of 70
    for _ in range(count):
        pool.refill(3 if case.heads > 1 else 1)
        samples.append(sum(map(len, pool.hard.values())))
        assert samples[-1] <= pool.filled * case.batch * case.heads_kv / 2 or samples[-1] == pool.filled == 1
        for i, heads in pool.hard.items():
            for head in heads:
                kinds.add(head.kind)
                held = {n: pool._raw_input(i, n).view(problems_dtype(case)).reshape(pool.shapes[n][0]).astype(np.float64) for n in "qk"}
                if case.layout == "bshd":
                    held = {n: x.swapaxes(1, 2) for n, x in held.items()}
                q, k = held["q"][head.batch, head.head_kv * group], held["k"][head.batch, head.head_kv]
                assert (pool._input(i, "q", head.batch, head.head_kv * group)[0, 0] == q).all()
                assert (pool._input(i, "k", head.batch, head.head_kv)[0, 0] == k).all()
                assert (q @ k.T).max() / case.head_dim**0.5 > 20
    assert kinds == set(HARD_KINDS) and (min(samples) > 0 or (case.heads == 1 and 0 < sum(samples) < count))
    pool.close()


def problems_dtype(case):
    from bench.problems.memory import numpy_dtype

    return numpy_dtype(case.dtype)


@pytest.mark.parametrize("option, name", [
    ("mask=full", "mask"), ("mask=keys", "mask"), ("mask=heads", "mask"), ("bias=full32", "bias"), ("bias=shared", "bias"),
    ("bias=queries", "bias"), ("sinks=same", "sinks"), ("alibi=heads", "alibi"), ("alibi=batch", "alibi"),
])  # fmt: skip
def test_what_a_head_sees_of_an_array_is_what_the_call_is_given(option, name):
    case = problems.parse(f"B2,H4/2,S7x9,D8,bfloat16,{option}")
    extra = Extra(case, name, device.Cpu(), Dice())
    rng, seen = np.random.default_rng(), set()
    for _ in range(100):  # slopes of 4 heads have 4 orders: 20 draws lacked one in 1 run of 70
        extra.renew(rng)
        drawn = extra.draw(rng)
        raw = np.zeros(int(np.prod(extra.shape)) * np.dtype(extra.variants[0].dtype).itemsize, np.uint8)
        extra.put(drawn, raw)
        seen.add(raw.tobytes())
        array = raw.view(extra.variants[0].dtype).reshape(extra.shape)
        for batch, head in ((0, 0), (1, 3)):
            found = extra.of_head(drawn, batch, head)
            if name in ("mask", "bias"):
                whole = np.broadcast_to(array, (2, 4, 7, 9))[batch, head]
                assert (np.broadcast_to(found, (1, 1, 7, 9))[0, 0] == whole).all()
            else:
                assert found == np.broadcast_to(array, (2, 4))[batch, head]
    assert len(seen) > 3


# ---- standing still ----


def test_the_kernel_counts_what_a_stopped_worker_runs():
    with isolation.Worker(confined=True) as worker:
        assert worker.call("time:monotonic", {}, 30).status == "failed"  # refuses its arguments, and is awake
        worker.freeze()
        time.sleep(0.05)
        assert worker.strayed() == 0.0
        processes.go_on(worker.pid)
        time.sleep(0.05)
        processes.stop(worker.pid)
        assert worker.strayed() > 0.0 and worker.strayed() == 0.0


def test_running_while_standing_still_is_bad_luck_a_few_times():
    still = Stillness("between two calls")
    for _ in range(1000):
        still.add(0.0)
    for _ in range(23):
        still.add(1e-3)
    with pytest.raises(WrongResult, match="ran between two calls, while it should have stood still: 24 of 1024 times"):
        still.add(1e-3)


def test_what_a_turn_runs_too_much_counts_as_its_time():
    """Whatever wakes it while the judge writes the next inputs."""
    remote = duel.Remote("any", isolation.Worker(), duel.Table("cpu"), 30.0, judged=False)
    remote.calls, remote.pool = 3, Idle()
    remote.table.step_seconds = 0.0
    remote.worker.strayed = lambda: 5.0
    remote.worker.steps = lambda function, arguments, limit, count, before, after: (
        [(before(i), after(i)) for i in range(count)], (isolation.Outcome("done"), [0.1] * count))[1]  # fmt: skip
    assert remote._call_by_call() == pytest.approx(0.3 + 2 * 5.0)


class Idle:
    def reveal(self, i):
        pass

    def settle(self):
        pass


def test_a_stop_that_is_ignored_ends_in_time(monkeypatch):
    """Its worker is woken faster than it can be seen to stand still."""
    monkeypatch.setattr(processes, "LIMIT", 0.5)
    with isolation.Worker(confined=True) as worker:
        worker.call("time:monotonic", {}, 30)
        pid, over = worker.pid, threading.Event()

        def wake():
            while not over.is_set():
                processes.go_on(pid)

        thread = threading.Thread(target=wake)
        monkeypatch.setattr(os, "waitid", lambda *arguments: None)
        thread.start()
        began = time.monotonic()
        assert worker.freeze().reason == "it did not stand still within 0.5 s"
        over.set()
        thread.join()
    assert time.monotonic() - began < 5 and not Path(f"/proc/{pid}").exists()


def test_a_worker_that_answers_before_its_steps_is_not_waited_for():
    with isolation.Worker(confined=True) as worker:
        began = time.monotonic()
        outcome, taken = worker.steps("bench.trial.calls:idle_steps", {"calls": -1}, 60.0, 5, print, print)
    assert outcome.status == "forged" and outcome.reason == "a reply after 0 of 5 steps" and time.monotonic() - began < 20


def test_a_process_whose_first_thread_has_ended_is_alive_and_can_be_stopped():
    code = ("import ctypes, threading\nthreading.Thread(target=lambda: [None for _ in iter(int, 1)]).start()\n"
            "print(flush=True)\nctypes.CDLL(None).syscall(60, 0)")  # fmt: skip
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        while processes.state(process.pid) != "Z":
            time.sleep(0.01)
        assert processes.alive({process.pid}) and not processes.still(process.pid)
        processes.halt({process.pid})
        assert processes.still(process.pid)
        process.kill()


# ---- the end ----


def hear_signals():
    """A process that a shell puts into its background, or that nohup begins, is deaf to some of them, and so are its children."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def begin_gate(tmp_path, monkeypatch, *arguments):
    """A gate on a candidate that leaves a daemon, once that runs. -> (gate, process id of the daemon)."""
    file = tmp_path / "pid"
    monkeypatch.setenv("FA_TEST_PID_FILE", str(file))
    line = [sys.executable, *arguments]
    process = subprocess.Popen(
        line, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True, preexec_fn=hear_signals
    )
    until = time.monotonic() + 60
    while not (file.exists() and file.read_text()):
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.02)
    return process, int(file.read_text())


COMMAND = ("-m", "bench", "gate", f"{CHEATS}:leaves_daemon_and_hangs", "--case", CASE, "--device", "cpu", "--baseline", "numpy")
PROGRAM = ("-c", "from bench.commands import gate\n"
           f"gate.judge_one({f'{CHEATS}:leaves_daemon_and_hangs'!r}, {CASE!r}, 'cpu', ['numpy'])")  # fmt: skip


def gone(pids):
    until = time.monotonic() + 20
    while left := processes.alive(pids):
        if time.monotonic() > until:
            return left
        time.sleep(0.05)
    return set()


@pytest.mark.parametrize("number, command", [
    (signal.SIGTERM, COMMAND), (signal.SIGHUP, COMMAND), (signal.SIGINT, COMMAND), (signal.SIGKILL, COMMAND),
    (signal.SIGTERM, PROGRAM), (signal.SIGINT, PROGRAM),
])  # fmt: skip
def test_what_a_candidate_started_ends_with_the_gate(number, command, tmp_path, monkeypatch):
    """Either is told to end: the process that a shell knows, or a program that calls the gate."""
    process, daemon = begin_gate(tmp_path, monkeypatch, *command)
    every = {daemon} | processes.descendants(process.pid)
    process.send_signal(number)
    assert process.wait(30) != 0 and gone(every) == set()


def test_what_a_candidate_started_ends_when_the_judge_is_killed(tmp_path, monkeypatch):
    process, daemon = begin_gate(tmp_path, monkeypatch, *COMMAND)
    every = {daemon} | processes.descendants(process.pid)
    (judge_itself,) = processes.children(process.pid)
    os.kill(judge_itself, signal.SIGKILL)
    assert process.wait(30) == 128 + signal.SIGKILL and gone(every) == set()
