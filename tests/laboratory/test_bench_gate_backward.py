"""``bench gate`` on gradients: who is right passes the trials and the looks at timed calls, and who is not is caught."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest

from bench import report
from bench.__main__ import main
from bench.commands import gate
from bench.machine import device
from bench.problems import Case
from bench.problems.operations import operands_of
from bench.trial.dice import Dice
from bench.trial.gradient_pool import GradientPool
from bench.trial.pool import FENCE, nbytes_of
from bench.trial.trials import HARD
from fa_ext.reference.backward import attention_backward
from tests.laboratory.support.cheats_backward import honest
from tests.laboratory.support.command import command

CHEATS = Path(__file__).parent / "support" / "cheats_backward.py"
CASE = "B1,H4/2,S96,D32,float32,causal=True,operation=backward"


def judge(candidate, **options):
    options = {"rounds": 24, "seconds": 1.0, "sample_seconds": 5e-3, **options}
    return gate.judge_one(candidate, CASE, "cpu", ["numpy"], **options)


@pytest.mark.parametrize("candidate", [f"{CHEATS}:honest", "cpu_simd_backward"])
def test_who_is_right_is_correct(candidate):
    found = judge(candidate)
    assert found["correct"], found["failures"]
    assert found["ratios"]["numpy"]["rounds"] > 0 and 0 < found["frobenius"] < 1e-5


@pytest.mark.parametrize("kind", HARD)
def test_sums_in_an_order_of_their_own_pass(kind):
    """NumPy's sums are not those of "plain": with steep scores one draw of 24 was over bounds that counted on plain's."""
    for seed in (78477401625239392, *range(24)):
        held = operands_of(dataclasses.replace(Case.parse(CASE), seed=seed, values=kind), device.Cpu())
        given = held.arguments("numpy")
        honest(**{name: given[name] for name in ("dout", "q", "k", "v", "out", "lse", "causal")}, grads=held.grads("numpy"))
        judged = held.judge(held.grads("numpy"))
        assert judged.passed, (seed, judged.failures)
        for name, gradient in zip(held.outputs, held.grads("numpy"), strict=True):
            if kind == "normal":
                kept = gradient.copy()
                gradient *= 1 + 1e-3
                assert f"{name}: " in " ".join(held.judge(held.grads("numpy")).failures)
                gradient[...] = kept


@pytest.mark.parametrize("name, words", [
    ("one_head_of_the_group", "dk: |dv: "), ("without_dv", "dv: "), ("remembers", "timed sample .* (off by|unwritten)"),
    ("clamps_when_timed", "timed sample .* in a head"), ("writes_to_lse", "read-only|wrote to its inputs: lse"),
])  # fmt: skip
def test_caught(name, words):
    found = judge(f"{CHEATS}:{name}")
    assert found["verdict"] == "FAIL" and not found["correct"]
    assert re.search(words, " ".join(found["failures"])), found["failures"]


@pytest.mark.parametrize("line", [
    "B2,H4/2,S33x40,D8,float32,causal=bottom_right,layout=bshd,operation=backward",
    "B1,H2,S40x24,D16/8,float16,window=9:3,softcap=2.0,scale=0.4,operation=backward",
])  # fmt: skip
def test_timed_gradients_meet_float64_of_the_judges_own_inputs(line):
    case = Case.parse(line)
    pool = GradientPool(case, device.Cpu(), Dice(1), False)
    pool.refill(3)
    pool.inputs.raw[:] = 0  # the judge looks at its own copies alone
    group = case.heads // case.heads_kv

    def whole(i, name, heads):
        found = [np.concatenate([pool._input(i, name, b, h) for h in range(heads)], 1) for b in range(case.batch)]
        return np.concatenate(found)

    def place(i, name):
        shape, dtype = pool.results[name]
        begin = FENCE + i * pool.out_step + pool.out_places[name]
        return pool.out.raw[begin : begin + nbytes_of(shape, dtype)].view(dtype).reshape(shape)

    options = {name: x for name, x in case.options().items() if name != "layout"}
    for i in range(3):
        inputs = {name: whole(i, name, heads) for name, heads in (("dout", case.heads), ("q", case.heads), ("k", case.heads_kv),
                                                                  ("v", case.heads_kv))}  # fmt: skip
        found = attention_backward(inputs.pop("dout"), *inputs.values(), **options)
        for name, x in zip(("dq", "dk", "dv"), found, strict=True):
            place(i, name)[...] = x.swapaxes(1, 2) if case.layout == "bshd" else x
    bounds = (1e-2, 5e-3 if case.dtype == "float16" else 1e-4)
    assert all(pool.look(*bounds) is None for _ in range(10)) and not pool.broken_fences()
    for name in pool.results:
        kept = place(1, name).copy()
        place(1, name)[...] *= 1.5
        wrong = {pool.look(*bounds) for _ in range(40)} - {None}
        assert wrong and all(f" of {name} off by" in why for why in wrong), wrong
        place(1, name)[...] = kept
    pool.out.raw[FENCE + pool.out_places["dk"] - 1] = 0
    assert pool.broken_fences() and group >= 1
    pool.close()


def test_gradients_with_arrays_are_refused_at_once():
    with pytest.raises(report.UsageError, match="gradients are judged without bias, mask, sinks"):
        GradientPool(Case.parse("B1,H2,S8,D8,float32,sinks=float32,operation=backward"), device.Cpu(), Dice(1), False)


def test_the_option_makes_gradients_of_all_problems(capfd):
    line = ["gate", f"{CHEATS}:without_dv", "--backward", "--case", "B1,H2,S40,D16,float32", "--baseline", "numpy", "--device", "cpu"]
    status, document = command(capfd, *line)
    (found,) = document["gates"]
    assert status == 1 and found["case"] == "B1,H2,S40,D16,float32,operation=backward" and not found["refused"]
    assert main(["gate", f"{CHEATS}:honest", "--case", "B1,H2,S40,D16,float32", "--baseline", "numpy", "--device", "cpu"]) == 1
    assert "refused: no attention" in capfd.readouterr().out
