"""``bench gate`` on gradients of packed sequences: lengths are drawn for every call, and who relies on earlier ones is caught."""

import re
from pathlib import Path

import numpy as np
import pytest

from bench import report
from bench.__main__ import main
from bench.commands import gate
from bench.machine import device
from bench.problems import Case
from bench.trial import sequence_pool
from bench.trial.dice import Dice
from bench.trial.pool import FENCE
from bench.trial.sequence_pool import SequencePool
from tests.laboratory.support.cheats_packed import honest
from tests.laboratory.support.command import command

CHEATS = Path(__file__).parent / "support" / "cheats_packed.py"
CASE = "B5,H4/2,S40+64+1+0+23,D16,float32,q=packed,k=packed,slack=0,causal=bottom_right,operation=backward"
CROSS = CASE.replace("S40+64+1+0+23", "S9x40+30x12+0x7+20x0+33").replace("causal=bottom_right", "window=9:3")


def judge(candidate, case=CASE, **options):
    options = {"rounds": 24, "seconds": 1.0, "sample_seconds": 5e-3, **options}
    return gate.judge_one(candidate, case, "cpu", ["cpu_ref_backward"], **options)


# ---- what is drawn ----


def test_lengths_are_drawn_below_those_of_the_problem():
    case = Case.parse(CASE)
    trials = [sequence_pool.trial(case.changed(seed=seed), seed == 0) for seed in range(8)]
    assert len({trial.n_q for trial in trials}) == 8 and all(trial.n_q == trial.n_k for trial in trials)
    assert max(trials[0].n_q) <= 48 < max(max(trial.n_q) for trial in trials[1:]) <= 64
    assert sequence_pool.trial(case, False) == sequence_pool.trial(case, False)
    cross = sequence_pool.trial(Case.parse(CROSS), False)
    assert cross.n_q != cross.n_k and max(cross.n_q) <= 33 and max(cross.n_k) <= 40


def test_each_timed_call_has_starts_of_its_own_in_arrays_of_one_shape():
    pool = SequencePool(Case.parse(CASE), device.Cpu(), Dice(3), False)
    pool.refill(6)
    starts = [pool.starts[i]["q"] for i in range(6)]
    assert len({tuple(at) for at in starts}) == 6 and all(at.dtype == np.int32 and 0 <= at[0] and at[-1] <= 128 for at in starts)
    assert any(at[0] for at in starts) or any(at[-1] < 128 for at in starts)
    for i, at in enumerate(starts):
        assert (pool._raw_input(i, "cu_seqlens_q").view(np.int32) == at).all()
        rows = np.isnan(pool._raw_input(i, "q").view(np.float32).reshape(128, -1)).any(axis=1)
        assert not rows[at[0] : at[-1]].any() and rows[: at[0]].all() and rows[at[-1] :].all()
    pool.close()


@pytest.mark.parametrize("line", [CASE, CROSS, CASE.replace("D16,float32", "D16/8,float16") + ",softcap=2.0", CASE.replace("S40+64+1+0+23", "S30")])
def test_timed_gradients_meet_float64_of_the_judges_own_inputs(line):
    import fa_ext

    case = Case.parse(line)
    pool = SequencePool(case, device.Cpu(), Dice(1), False)
    pool.refill(3)

    def array(raw, begin, shape, dtype):
        return raw[begin : begin + int(np.prod(shape)) * np.dtype(dtype).itemsize].view(dtype).reshape(shape)

    def place(i, name):
        return array(pool.out.raw, FENCE + i * pool.out_step + pool.out_places[name], *pool.results[name])

    options = {name: x for name, x in case.options().items() if name != "layout"}
    for i in range(3):
        given = {name: array(pool.inputs.raw, i * pool.step + pool.places[name], *of) for name, of in pool.shapes.items()}
        fa_ext.attention_backward(**given, **options, kernel="cpu_ref_backward", grads=[place(i, name) for name in pool.results])
    pool.inputs.raw[:] = 0  # the judge looks at its own copies alone
    bounds = (1e-2, 5e-3) if case.dtype == "float16" else (1e-4, 1e-4)
    assert all(pool.look(*bounds) is None for _ in range(20)) and not pool.broken_fences()
    for name in pool.results:
        kept = place(1, name).copy()
        place(1, name)[...] *= 1.5
        wrong = {pool.look(*bounds) for _ in range(60)} - {None}
        assert wrong and all(f" of {name} off by" in why for why in wrong), wrong
        place(1, name)[...] = kept
    gap = [i for i in range(3) if pool.starts[i]["q"][-1] < sum(case.n_q)]
    for i in gap:
        place(i, "dq")[-1, 0, 0] = 1e-30
    assert not gap or "dq is not 0 in rows of no sequence" in " ".join({pool.look(*bounds) or "" for _ in range(20)})
    pool.close()


# ---- candidates ----


@pytest.mark.parametrize("candidate", [f"{CHEATS}:honest", "cpu_simd_backward"])
def test_who_is_right_is_correct(candidate):
    found = judge(candidate)
    assert found["correct"], found["failures"]
    assert found["ratios"]["cpu_ref_backward"]["rounds"] > 0 and 0 < found["frobenius"] < 1e-5


@pytest.mark.parametrize("name, words", [
    ("list_by_pointer", "timed sample .* (off by|unwritten|NaN or Inf|not 0 in rows)"),
    ("last_lengths", "timed sample .* (off by|unwritten|NaN or Inf|not 0 in rows)"),
    ("frozen_bound", r"trial [2-8] .*(dk|dv): |timed sample"), ("leaves_gaps", "timed sample .* (unwritten|not 0 in rows|NaN or Inf)"),
    ("fills_gaps", "timed sample .* dq is not 0 in rows of no sequence"), ("sees_the_neighbour", r"trial \d .*d[qkv]: "),
])  # fmt: skip
def test_caught(name, words):
    found = judge(f"{CHEATS}:{name}")
    assert found["verdict"] == "FAIL" and not found["correct"]
    assert re.search(words, " ".join(found["failures"])), found["failures"]


def test_the_option_takes_sequences(capfd):
    case = CASE.removesuffix(",operation=backward")
    status, document = command(capfd, "gate", f"{CHEATS}:fills_gaps", "--backward", "--case", case, "--device", "cpu")
    (found,) = document["gates"]
    assert status == 1 and found["case"] == CASE and "cpu_ref_backward" not in found["refused"]


@pytest.mark.parametrize("case", [CASE.replace("k=packed", "k=padded"), CASE.replace("q=packed", "q=padded"), CASE.removesuffix(",operation=backward")])
def test_other_sequences_are_refused(case, capfd):
    assert main(["gate", "cpu_simd_backward", "--case", case, "--device", "cpu"]) == 3
    assert "accepted by gate: cases without sequences, and gradients of packed ones (q=packed, k=packed, operation=backward)" in capfd.readouterr().err


def test_what_the_judge_cannot_tell_is_refused():
    for line in (CASE + ",sinks=True", CASE + ",dlse=True"):
        with pytest.raises(report.UsageError, match="gradients are judged without bias, mask, sinks"):
            SequencePool(Case.parse(line), device.Cpu(), Dice(1), False)
    with pytest.raises(report.UsageError, match="sequences are judged with q=packed, k=packed"):
        SequencePool(Case.parse("B2,H2,S0,D8,float32,q=packed,k=packed,slack=0,operation=backward"), device.Cpu(), Dice(1), False)


def test_a_candidate_names_the_starts():
    from bench.implementations.implementation import Function

    assert Function(honest, "honest", "numpy").refuses(Case.parse(CASE)) is None

    def without(dout, q, k, v, cu_seqlens_q, causal, grads):
        raise AssertionError("it is not called")

    assert Function(without, "without", "numpy").refuses(Case.parse(CASE)) == "without takes no argument cu_seqlens_k"
