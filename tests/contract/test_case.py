"""The language of cases: a line names each call, dense or of sequences, of any operation, and the line is read again."""

import json
from pathlib import Path

import numpy as np
import pytest

from bench import problems, report
from bench.problems import serving_cases
from bench.problems.case import Case
from bench.problems.lengths import Lengths, Storage
from tests.contract import gradients

EVIDENCE = Path(problems.__file__).parents[1] / "evidence"
PACKED = "B4,H8/2,S130*2+7x9+0x12,D64,bfloat16,q=packed,k=packed,slack=0,causal=bottom_right,operation=backward,dlse=True"


def test_lines_of_records_are_read_as_they_were_written():
    records = [record for path in EVIDENCE.glob("*.json") if "machine" in (record := json.loads(path.read_text()))]
    lines = {key.rpartition(" ")[0] for record in records for key in record["cells"]}
    assert len(lines) > 300 and [line for line in lines if str(Case.parse(line)) != line] == []


@pytest.mark.parametrize("cases", [serving_cases.grid, serving_cases.lengths, lambda: serving_cases.random_cases(200, 5)])
def test_sequences_are_read_as_they_were_written(cases):
    assert all(Case.parse(str(case)) == case for case in cases())


def test_a_packed_backward_pass_is_a_case():
    case = Case.parse(PACKED)
    assert str(case) == PACKED and case.operation == "backward" and case.dlse
    assert (case.lengths, case.storage) == (Lengths((130, 130, 7, 0), (130, 130, 9, 12)), Storage("packed", "packed", slack=0))
    alone = [Case(1, 8, 2, a, b, 64, dtype="bfloat16", causal="bottom_right", operation="backward") for a, b in zip(case.n_q, case.n_k)]
    assert case.flops() == sum(one.flops() for one in alone) and case.wrt() == ("q", "k", "v")
    inputs = case.host_inputs()
    assert inputs["q"].shape == (267, 8, 64) and np.array_equal(inputs["cu_seqlens_q"], (0, 130, 260, 267, 267))
    assert problems.parse(PACKED, problems.OPERATIONS) == case
    with pytest.raises(report.UsageError, match="paged keys have no backward pass"):
        problems.parse(PACKED.replace("k=packed", "k=paged"), problems.OPERATIONS)


@pytest.mark.parametrize("options", ["dlse=True", "deterministic=False", "accumulate=True,dlse=True", "dropout=0.2:3,sinks=same"])
def test_a_backward_case_is_a_problem(options):
    case = Case.parse(f"B2,H4/2,S9x13,D16,float16,causal=bottom_right,operation=backward,{options}")
    problem = gradients.make(case)
    assert ("dlse" in problem.inputs) == case.dlse and problem.call == {"deterministic": case.deterministic, "accumulate": case.accumulate}
    found = gradients.run("cpu_ref_backward", problem)
    assert {x.dtype for x in found.values()} == {np.dtype("float32" if case.accumulate else "float16")}
    assert (report := gradients.judged("cpu_ref_backward", problem, found)), report


def test_a_batch_is_sequences_of_one_length():
    case = Case(3, 2, seq_q=5, seq_k=7)
    assert case.n_q == (5, 5, 5) and case.n_k == (7, 7, 7) and case.changed(seq_q=4).n_q == (4, 4, 4)
    some = Case.sequences((1, 4), (6, 3))
    assert (some.batch, some.seq_q, some.seq_k) == (2, 4, 6) and some.changed(n_q=(2, 9)).seq_q == 9


@pytest.mark.parametrize("line, words", [
    ("B2,H2,S5+6,D16,float16", "'S5[+]6' names sequences, and needs q= and k="),
    ("B2,H2,S5,D16,float16,page_size=3", "page_size without q= and k="),
    ("B2,H2,S5,D16,float16,q=one", "q without q= and k="),
    ("B2,H2,S5x6x7,D16,float16", "'S5x6x7' is not S and a number, or two with x between them"),
    ("B3,H2,S5+6,D16,float16,q=packed,k=packed", "names 2 sequences, B3 says 3"),
    ("B1,H2,S5*x,D16,float16,q=packed,k=packed", "'[*]x' is not [*] and a number"),
    ("B1,H2,S5,D16,float16,q=packed,k=dense", "k is 'dense'; accepted: padded, packed, paged"),
    ("B1,H2,S5,D16,float16,q=packed,k=paged,cache=none", "cache is 'none'; accepted: two, pair"),
    ("B1,H2,S5,D16,float16,q=packed,k=paged,slack=-1", "slack is '-1'; accepted: a whole number"),
    ("B1,H2,S5,D16,float16,q=packed,k=paged,values=large", "'values' is no option of sequences"),
    ("B1,H2,S5,D16,float16,q=packed,k=paged,sinks=large", "sinks is 'large'; accepted: True"),
    ("B1,H2,S5,D16,float16,q=packed,k=paged,alibi=steep", "alibi is 'steep'; accepted: heads, batch"),
    ("B1,H2,S5,D16,float16,q=packed,k=paged,operation=merge", "operation is 'merge'; accepted here: serving, backward, append"),
    ("B1,H2,S5,D16,float16,operation=append", "operation is 'append'; accepted here: attention, backward, merge"),
    ("B1,H2,S5,D16,float16,sinks=True", "sinks is True; accepted: same, float32"),
    ("B1,H2,S5,D16,float16,k_range=True", "'k_range' is no option without sequences"),
])  # fmt: skip
def test_a_line_that_names_no_case_says_why(line, words):
    with pytest.raises(ValueError, match=words):
        Case.parse(line)
