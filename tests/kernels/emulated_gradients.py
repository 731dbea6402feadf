"""Shared by tests of Hopper's gradients on the emulator: schedules, problems with arrays of a test's own, verdicts."""

import numpy as np

import fa_ext
from bench.problems.case import Case
from tests.contract import gradients, runner


def schedule(monkeypatch, seed, blocks, together=1):
    for name, value in (("SEED", seed), ("SMS", blocks), ("TOGETHER", together)):
        monkeypatch.setenv(f"FA_EMULATOR_{name}", str(value))


def given(case, wrt=None, **arrays):
    """The problem of a case, some of its arrays replaced; out and LSE are those of the reference."""
    problem = gradients.make(Case.parse(case), **({"wrt": wrt} if wrt else {}))
    known = {n: x for n, x in problem.inputs.items() if n not in ("dout", "dlse", "out", "lse")} | arrays
    out, lse = fa_ext.reference.attention(**known)
    problem.inputs |= arrays | {"out": out.astype(problem.inputs["out"].dtype), "lse": lse.astype(np.float32)}
    return problem


def held(kernel, problem, **order):
    report = gradients.verdict(kernel, problem, **order)
    assert report, report


def differ(a, b):
    return [name for name in a if (runner.bits(a[name]) != runner.bits(b[name])).any()]
