"""Under what conditions samples are taken on the CPU, and what the machine reaches there on plain work."""

import hashlib
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from bench.machine import device
from bench.timing import ceiling, rounds, timer


def test_a_sample_waits_for_threads_that_still_run(monkeypatch):
    """A pool's workers go on spinning after a call has returned; the next implementation begins when they have stopped."""
    monkeypatch.setattr(device.Cpu, "SETTLE_SECONDS", 60.0)
    load, done = bytes(1 << 27), threading.Event()
    spinning = threading.Thread(target=lambda: (hashlib.sha256(load).digest(), done.set()))  # outside the GIL
    cpu = device.Cpu()
    spinning.start()
    waited = cpu.settle()
    assert done.is_set() and waited > 0.003
    spinning.join()
    assert cpu.settle() < waited


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this kernel does not count")
def test_threads_that_wait_for_a_core_are_seen():
    """Two threads outside the GIL on one core: each waits for half of the time."""
    load, cores, cpu = bytes(1 << 27), os.sched_getaffinity(0), device.Cpu()
    hashed, measured = threading.Barrier(3), threading.Event()

    def work():
        hashlib.sha256(load).digest()
        hashed.wait(60)
        measured.wait(60)  # a thread that has ended is not counted any more

    try:
        os.sched_setaffinity(0, {min(cores)})
        threads = [threading.Thread(target=work) for _ in range(2)]
        before = cpu.waited_for_cores()
        for thread in threads:
            thread.start()
        hashed.wait(60)
        assert cpu.waited_for_cores() - before > 0.01
    finally:
        measured.set()
        os.sched_setaffinity(0, cores)


def test_settling_has_a_bound(monkeypatch):
    monkeypatch.setattr(device, "others_run", lambda: True)
    monkeypatch.setattr(device.Cpu, "SETTLE_SECONDS", 0.05)
    assert 0.05 <= device.Cpu().settle() < 1.0


def test_every_sample_of_every_contender_settles_first(monkeypatch):
    events = []
    cpu = device.Cpu()
    monkeypatch.setattr(cpu, "settle", lambda: events.append("settle") or 0.25)
    watches = {n: timer.Stopwatch([lambda n=n: events.append(n)], cpu, sample_seconds=1e-9) for n in ("a", "b")}
    events.clear()
    found = rounds.take_rounds(watches, rounds=30, seconds=10.0)
    assert events[::2] == ["settle"] * 60 and set(events[1::2]) == {"a", "b"}
    conditions = found.conditions_summary()
    assert conditions["settling_ms"] == {"a": 250.0, "b": 250.0}
    assert (
        set(conditions["waiting"]) == {"a", "b"}
        and 0 <= (conditions["others"] or 0.0) <= 1
        and conditions["load_average"] >= 0
    )


# ---- the ceiling ----


def test_the_ceiling_is_the_fastest_of_several_products(monkeypatch):
    seconds = {32: 4e-6, 64: 5e-6, 48: 5e-6}
    monkeypatch.setattr(ceiling, "sizes", lambda device, dtype: tuple(seconds))
    monkeypatch.setattr(ceiling, "_best", lambda work, device: seconds.get(len(np.atleast_1d(work())), 1.0))
    found = ceiling.measure("cpu", ["float32", "bfloat16"])
    assert found["gemm_tflops"] == {"float32": pytest.approx(2 * 64**3 / 5e-6 / 1e12)}
    assert found["gemm_size"] == {"float32": 64} and found["read_gbs"] > 0 and found["copy_gbs"] > 0
    monkeypatch.undo()
    assert all(len(ceiling.sizes(kind, dtype)) >= 2 for kind in ("cpu", "cuda") for dtype in ("float16", "float32"))


def test_the_ceiling_of_a_slow_machine_takes_three_samples(monkeypatch):
    calls = []
    monkeypatch.setattr(ceiling, "SECONDS", 0.0)
    monkeypatch.setattr(timer.Stopwatch, "sample", lambda watch: calls.append(1) or 1.0 / len(calls))
    assert ceiling._best(lambda: None, device.Cpu()) == pytest.approx(1 / 3) and len(calls) == 3
