"""Merging and appending in the laboratory: their lines, operands and judges, kernels, and the copy beside them."""

import numpy as np
import pytest

from bench import problems, report
from bench.commands import tables
from bench.implementations import implementation, named
from bench.machine import device
from bench.problems.operations import operands_of
from bench.problems.presets import PRESETS
from tests.laboratory.support.command import command

CPU = device.Cpu()
MERGE = ["B2,H4,S30,D16,bfloat16,layout=bshd,operation=merge", "B1,H2,S33,D40/8,float32,operation=merge,parts=5"]
APPEND = ["B3,H4/2,S1x40*2+1x7,D16,bfloat16,q=packed,k=paged,slack=0,operation=append",
          "B2,H4/2,S9+5x30,D16,float32,q=packed,k=paged,layout=bhsd,page_size=7,slack=0,operation=append"]  # fmt: skip


def of(line):
    return operands_of(problems.parse(line, problems.OPERATIONS), CPU)


@pytest.mark.parametrize("line", MERGE + APPEND)
def test_a_line_names_the_operation_and_its_bytes(line):
    case = problems.parse(line, problems.OPERATIONS)
    assert str(case) == line and case.operation in ("merge", "append")
    with pytest.raises(report.UsageError, match="accepted here: attention"):
        problems.parse(line)
    held = of(line)
    moved = sum(held.blocks[name].nbytes for name in held.blocks if name not in ("k_cache", "v_cache", "cos", "sin", "cu_seqlens_q",
                                                                                  "seqlens_k", "page_table"))  # fmt: skip
    if case.operation == "append":  # each new row is written once more, into a cache
        moved += sum(held.blocks[name].nbytes for name in "kv")
    assert case.bytes() == moved and case.flops() > 0


def test_parts_are_of_a_merge():
    with pytest.raises(report.UsageError, match="parts are of operation=merge"):
        problems.parse("B1,H1,S8,D8,float32,parts=3")


@pytest.mark.parametrize("line, kernel", [(line, "cpu_merge") for line in MERGE] + [(line, "cpu_append") for line in APPEND])
def test_kernels_are_right_and_others_are_not(line, kernel):
    held = of(line)
    for name in (kernel, "fa_ext"):
        one = named.open_implementation(name, CPU)
        assert one.refuses(held.case) is None
        held.poison()
        result = one.bind(held)()
        judged = held.judge(result)
        assert judged.passed and not held.changed_inputs() and not held.broken_guards()
    assert held.picked() == kernel and implementation.table_of(kernel) == held.case.operation
    if held.case.operation == "merge":
        out, lse = result
        assert held.judge((out + np.asarray(0.5, out.dtype), lse)).failures and held.judge((out, lse + 1)).failures
    else:
        assert held.judge(result * 2).failures
        cache = held.array("k_cache", "numpy")
        cache[...] = 3
        assert "k_cache" in " ".join(held.judge(result).failures)


def test_a_copy_moves_as_many_bytes_and_is_not_judged(capfd):
    copy = named.open_implementation("copy", CPU)
    held = of(MERGE[0])
    assert not copy.judged and copy.refuses(held.case) is None and copy.operations == {"merge", "append"}
    copy.bind(held)()
    status, document = command(capfd, "measure", "--case", MERGE[0], "--case", APPEND[0], "--device", "cpu", "--seconds", "0.2",
                               "--rounds", "3")  # fmt: skip
    assert status == 0
    for cell, kernel in zip(document["cells"].values(), ("cpu_merge", "cpu_append"), strict=True):
        assert set(cell["figures"]) == {"copy", kernel} and cell["baseline"] == "copy"
        assert "frobenius" not in cell["figures"]["copy"] and "frobenius" in cell["figures"][kernel]


def test_the_table_of_cache_ops():
    assert tables.BLOCKS["cache_ops"]({"gpu": {"cells": {}}}) == "The record holds no figures of merging and appending yet."
    merged, one = PRESETS["cache_ops"][:2]
    cells = {f"{case} cold": [{"figures": {ours: {"us": 4.0}, "copy": {"us": 3.0}}}] for case, ours in ((merged, "merge"), (one, "append"))}
    assert tables.BLOCKS["cache_ops"]({"gpu": {"cells": cells}}).splitlines()[2:] == [
        "| merge | 4,096 | 4.00 | 3.00 | 0.75 |", "| append | 1 | 4.00 | 3.00 | 0.75 |",
    ]  # fmt: skip


def test_the_preset_holds_both():
    assert [case.operation for case in PRESETS["cache_ops"]] == ["merge"] + ["append"] * 3
    assert [sum(case.n_q) for case in PRESETS["cache_ops"][1:]] == [1, 128, 8192]
