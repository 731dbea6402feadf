"""The backward pass of sequences in the laboratory: lines, operands and their judge, kernels and peers, the command."""

import numpy as np
import pytest

import fa_ext
from bench import problems, report
from bench.implementations import implementation, named
from bench.machine import device
from bench.problems import sequence_gradients
from bench.problems.case import Case
from bench.problems.operands import WrongResult
from bench.problems.operations import operands_of
from bench.problems.placement import dtype_of
from fa_ext.reference.backward import attention_backward
from tests.laboratory.support.command import command

CPU = device.Cpu()
OF_BACKWARD = {"operation": "backward", "slack": 0}
CASES = [
    Case.sequences((3, 0, 20), (40, 9, 20), q="packed", k="packed", causal="bottom_right", dtype="float16", dlse=True, **OF_BACKWARD),
    Case.sequences((3, 5), (40, 30), q="padded", k="padded", layout="bhsd", sinks=True, alibi="batch", scale=0.4, head_dim_v=16, **OF_BACKWARD),
    Case.sequences((3, 50), (40, 3), q="padded", k="packed", causal="top_left", softcap=3.0, window=(9, None), accumulate=True,
                   dtype="bfloat16", **OF_BACKWARD),
    Case.sequences((1, 0, 1), (33, 7, 64), q="one", k="padded", deterministic=False, dtype="float64", **OF_BACKWARD),
]


def parsed(case):
    return problems.parse(str(case), problems.OPERATIONS)


def of(case):
    return operands_of(case, CPU)


def exact(held):
    """Gradients of the reference on the operands, in the dtype of the results."""
    options = {name: value for name, value in held.arguments("numpy").items() if name not in ("out", "lse", "deterministic", "accumulate")}
    found = attention_backward(**options, wrt=held.wrt)
    return [g.astype(dtype_of(held.shapes[name][1])) for g, name in zip(found, held.outputs, strict=True)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_line_names_the_operation(case):
    found = parsed(case)
    assert found == case and found.operation == "backward" and found.wrt()[:3] == ("q", "k", "v")


def test_paged_keys_are_refused():
    with pytest.raises(report.UsageError, match="paged keys have no backward pass; accepted with operation=backward: k=packed, k=padded"):
        parsed(CASES[0].changed(k="paged"))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_judge_takes_the_reference_and_no_other(case):
    held = of(case)
    right = exact(held)
    assert held.judge(right).passed
    for b, n in enumerate(case.n_q):  # twice a gradient of one sequence
        for i, (name, rows) in enumerate((("dq", held._queries), ("dk", held._stored_keys), ("dv", held._stored_keys))):
            wrong = [g.copy() for g in right]
            rows(wrong[i], b)[...] = 2 * rows(wrong[i], b) if n else 1
            failures = held.judge(wrong).failures
            if n:
                assert failures and any(why.startswith(f"{name}: sequence {b}: ") for why in failures)
            elif rows(wrong[i], b).size:
                assert f"{name}: not exactly 0 where no query, or no key, is seen" in failures
    if "dsinks" in held.outputs:
        assert not held.judge([*right[:3], 2 * right[3]]).passed
    with pytest.raises(WrongResult, match="gradients were returned, the problem asks for dq, dk, dv"):
        held.judge(right[:2])
    right[1].flat[0] = np.nan
    with pytest.raises(WrongResult, match="dk holds NaN"):
        held.judge(right)


def test_rows_of_no_sequence_must_be_zero():
    held = of(CASES[1])
    right = exact(held)
    right[0][0, 0, -1, 0] = 1e-30
    assert held.judge(right).failures == ("dq: not exactly 0 where no query, or no key, is seen",)


@pytest.mark.parametrize("sinks", [None, True])
def test_large_problems_meet_the_reference_in_drawn_sequences_and_heads(sinks, monkeypatch):
    lengths = (0, *(20 + n for n in range(12)))
    held = of(Case.sequences(lengths, lengths, 6, 3, 16, q="packed", k="packed", causal="bottom_right", sinks=sinks, alibi="batch", **OF_BACKWARD))
    monkeypatch.setattr(sequence_gradients, "CHECK_FLOPS_CPU", held.case.flops() / 3)
    right = exact(held)
    assert held.judge(right).passed
    chosen, heads = held._drawn()
    assert len(chosen) == 9 and {0, 1, 12} <= set(chosen) and len(heads) == 1
    for i, b, head in ((0, 12, 2 * heads[0] + 1), (1, 1, heads[0]), (2, 12, heads[0])):
        wrong = [g.copy() for g in right]
        rows = held._queries(wrong[i], b) if i == 0 else held._stored_keys(wrong[i], b)
        rows[:, :, head] *= 2
        assert any(f"sequence {b}" in why for why in held.judge(wrong).failures)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("kernel", ["cpu_ref_backward", "fa_ext"])
def test_kernels_are_right(kernel, case):
    held, one = of(case), named.open_implementation(kernel, CPU)
    assert one.refuses(case) is None
    assert held.judge(one.bind(held)()).passed and not held.changed_inputs() and not held.broken_guards()
    assert held.picked() in fa_ext.kernels("backward")


def test_others_say_that_they_have_none():
    assert named.open_implementation("numpy", CPU).refuses(CASES[1].changed(dtype="float32", sinks=None, alibi=None)) == "no backward pass of sequences"

    def mine(dout, q, k, v, **options):
        raise AssertionError("it is not called")

    assert implementation.Function(mine, "mine", "numpy").refuses(CASES[0].changed(operation="serving", dlse=False)) == "no serving"


def test_measure_times_backward_kernels(capfd):
    status, document = command(capfd, "measure", "--case", CASES[0], "--device", "cpu", "--seconds", "0.1", "--rounds", "3")
    (cell,) = document["cells"].values()
    assert status == 0 and "cpu_ref_backward" in cell["figures"]
    assert cell["refused"]["numpy"] == "no backward pass of sequences" or "numpy" not in cell["figures"]
