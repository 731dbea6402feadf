"""Is a candidate correct, and faster than a baseline? One verdict a problem, exit status 0 PASS, 1 FAIL, 2 UNDECIDED.

The candidate runs in a process of its own and is believed nothing; README says what that contains and what it does not.

PASS: correct, and the upper bound of the 95% interval of candidate / baseline time is under the limit (0.95).
FAIL: incorrect, or the lower bound is at or over the limit. UNDECIDED: everything else, and on the CPU a
verdict on times while other processes took more than a quarter of the cores, or while the threads of the side that lost
waited for a core for more than a quarter of its samples. A run whose draws --seed gives may be foreseen: it FAILs, or is
UNDECIDED.

The default baseline on a GPU is the fastest backend of torch's scaled_dot_product_attention, timed beside the others;
on the CPU it is torch if it imports, else NumPy; where no peer has gradients of sequences, cpu_ref_backward. Gradients of packed
sequences have other lengths in every call: in the trials, and in each timed call, in arrays of one shape. Several problems: the worst verdict counts.

  python -m bench gate simt
  python -m bench gate bench/examples/candidate.py:attention --case B1,H8,S512,D64,float32
  python -m bench gate simt_backward --backward --case B1,H8,S512,D64,float16,causal=True
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import sys
import time
from pathlib import Path
from typing import Any

from bench import arguments, machine, problems, report
from bench.implementations import peers
from bench.machine import device as devices
from bench.timing import conditions, stats
from bench.trial import duel, isolation, processes

SUMMARY = "PASS, FAIL or UNDECIDED: is a candidate correct and faster than a baseline?"
DEFAULT_LIMIT = 0.95
OPERATIONS = ("attention", "backward")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("candidate", help="a kernel, a peer, module:function, file.py:function, or a .cu, .c or .so file")
    parser.add_argument("--case", action="append", help="problem, such as B1,H8,S512,D64,float16,causal=True (repeatable)")
    parser.add_argument("--preset", help=f"problems by name: {', '.join(problems.preset_names(OPERATIONS))}")
    parser.add_argument("--backward", action="store_true", help="gradients of the problems: operation=backward for all of them")
    parser.add_argument("--filter", default="", help="only problems whose line contains this")
    parser.add_argument("--limit", type=arguments.positive, default=DEFAULT_LIMIT, help="time ratio to stay under (0.95)")
    parser.add_argument("--rounds", type=arguments.count, default=240, help="paired rounds at most (240)")
    parser.add_argument("--seconds", type=arguments.positive, default=20.0, help="time for the rounds of one problem (20)")
    parser.add_argument("--time-limit", type=arguments.positive, default=300.0, help="seconds until one call counts as hung (300)")
    parser.add_argument("--seed", type=int, help="repeat the draws of the run whose record has it; never PASSes (secret ones)")
    parser.add_argument("--cold", action="store_true", help="write five times the last-level cache before each sample")
    parser.add_argument("--output", type=Path, help="write the samples and verdicts to this JSON file")
    arguments.common(parser, "device", "arrays", "baseline")


def default_case(device: str) -> str:
    return "B1,H8,S512,D64,float16" if device == "cuda" else "B1,H8,S512,D64,float32"


def default_baselines(device: str, sequences: bool = False) -> list[str]:
    """Of problems with `sequences` among them, on the CPU, also a kernel that takes them: no peer there does."""
    if device == "cuda":
        return list(peers.SDPA)
    if sequences:
        return [*default_baselines(device), "cpu_ref_backward"]
    return ["torch-flash"] if importlib.util.find_spec("torch") else ["numpy"]


def judge_one(candidate: str, case: str, device: str, baselines: list[str], limit: float = DEFAULT_LIMIT,
              time_limit: float = 300.0, worker: isolation.Worker | None = None, table: duel.Table | None = None,
              say: duel.Say = lambda text: None, **options: Any) -> dict:  # fmt: skip
    """The duel and what follows from it: a JSON document with `verdict` and `reasons`. `worker` and `table` outlive the
    call; by default it has its own."""
    with processes.cleaning_up(), contextlib.nullcontext(table) if table else duel.Table(device) as own:
        found = duel.duel(candidate, baselines, case, own, worker, time_limit=time_limit, say=say, **options)
    document: dict[str, Any] = {"limit": limit, **found}
    interval, against = None, None
    if document.get("ratios"):
        against = min(document["ratios"], key=lambda name: document["seconds"][name])
        interval = stats.Interval(**document["ratios"][against])
    verdict = stats.decide(document["correct"], interval, limit)
    if document["correct"] and interval is None:
        document["failures"].append("no baseline runs this problem")
    elif document["correct"]:
        why = conditions.crowded(verdict, candidate, against, document.get("conditions") or {})
        if why:
            verdict = stats.Verdict.UNDECIDED
            document["failures"].append(why)
    if document["seed_given"] and verdict is stats.Verdict.PASS:
        verdict = stats.Verdict.UNDECIDED
        document["failures"].append(f"seed {document['seed']} was given, and could be foreseen: such a run repeats another, and never PASSes")
    return document | {"verdict": verdict.name, "baseline": against}


def run(args: argparse.Namespace) -> int:
    device = args.device or devices.default()
    cases = [problems.parse(text, (*OPERATIONS, "serving")) for text in args.case or ()]
    if args.preset:
        cases += problems.preset(args.preset, OPERATIONS)
    cases = cases or [problems.parse(default_case(device))]
    if args.backward:
        cases = [dataclasses.replace(case, operation="backward") for case in cases]
    for case in cases:
        if case.storage and (case.operation, case.storage.q, case.storage.k) != ("backward", "packed", "packed"):
            raise report.UsageError(f"case is {problems.shortened(str(case))!r}; accepted by gate: cases without sequences, and gradients of packed"
                                    " ones (q=packed, k=packed, operation=backward)")  # fmt: skip
    wanted = [text for text in dict.fromkeys(map(str, cases)) if args.filter in text]
    if not wanted:
        raise report.UsageError(f"no problem contains {args.filter!r}")
    baselines = args.baseline or default_baselines(device, any(case.lengths for case in cases))
    document: dict[str, Any] = {"command": "gate", "context": machine.context(device), "limit": args.limit, "gates": []}
    progress = report.Progress(len(wanted), quiet=args.json or len(wanted) == 1)
    stages = Stages(quiet=args.json)
    try:
        with duel.Table(device) as table:
            for case in wanted:
                stages.begin(case)
                found = judge_one(
                    args.candidate, case, device, baselines, args.limit, args.time_limit, table=table, say=stages,
                    arrays=args.arrays, rounds=args.rounds, seconds=args.seconds, seed=args.seed, cold=args.cold,
                )  # fmt: skip
                stages.clear()
                document["gates"].append(found)
                progress.step(f"{case}: {found['verdict']}")
                if args.output:
                    report.write_json(args.output, document)
    finally:
        if document["gates"]:
            report.deliver(document, args.json, show)
    return max((stats.Verdict[g["verdict"]].value for g in document["gates"]), key=(0, 2, 1).index)


class Stages:
    """Says on stderr how far the problem under way is: a live line on a terminal, otherwise a line a stage."""

    def __init__(self, quiet: bool = False, stream=None):
        self.quiet, self.stream = quiet, stream or sys.stderr
        self.begin("")

    def begin(self, case: str) -> None:
        self.case, self.stage, self.began = case, "", time.perf_counter()

    def __call__(self, text: str) -> None:
        if self.quiet:
            return
        line = f"{self.case}: {text} ({time.perf_counter() - self.began:.0f}s)"
        if self.stream.isatty():
            print(f"\r\033[K{line}", end="", file=self.stream, flush=True)
        elif (stage := text.partition(":")[0]) != self.stage:
            self.stage = stage
            print(line, file=self.stream, flush=True)

    def clear(self) -> None:
        if not self.quiet and self.stream.isatty():
            print("\r\033[K", end="", file=self.stream, flush=True)


def show(document: dict) -> None:
    gates, rows = document["gates"], []
    for gate in gates:
        seconds = gate.get("seconds", {})
        for name, ratio in (gate.get("ratios") or {None: None}).items():
            mark = " *" if name and name == gate.get("baseline") and len(gate["ratios"]) > 1 else ""
            rows.append(
                [
                    problems.shortened(gate["case"]), gate["verdict"] if not name or name == gate.get("baseline") else "", f"{name or ''}{mark}",
                    seconds.get(gate["candidate"], 0.0) * 1e6 or None, seconds.get(name, 0.0) * 1e6 or None,
                    f"{ratio['ratio']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]" if ratio else "", gate.get("frobenius"),
                ]  # fmt: skip
            )
    candidate = gates[0]["candidate"] if gates else ""
    columns = ("problem", "verdict", "baseline", "candidate us", "baseline us", "ratio [95%]", "error vs float64")
    report.table(f"{candidate}: time ratio must stay under {document['limit']:g} (* the fastest baseline, which counts)", columns, rows)
    for gate in gates:
        for failure in gate["failures"]:
            print(f"  {problems.shortened(gate['case'])}: {failure}")
        if gate["seed_given"]:
            print(f"  {problems.shortened(gate['case'])}: repeated with seed {gate['seed']}, which was given")
        if line := conditions.load_line(gate.get("conditions")):
            print(f"  {problems.shortened(gate['case'])}: {line}")
