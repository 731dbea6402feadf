"""Is a candidate correct, and faster than a baseline? One verdict a problem, exit status 0 PASS, 1 FAIL, 2 UNDECIDED.

PASS: correct, and the upper bound of the 95% interval of candidate / baseline time is under the limit (0.95).
FAIL: incorrect, or the lower bound is at or over the limit. UNDECIDED: everything else, and on the CPU a
verdict on times while other processes took more than a quarter of the cores, or while the threads of the side that lost
waited for a core for more than a quarter of its samples.

The default baseline on a GPU is the fastest backend of torch's scaled_dot_product_attention, timed beside the others;
on the CPU it is torch if it imports, else NumPy. Several problems: the worst verdict counts.

  python -m bench gate simt
  python -m bench gate bench/examples/candidate.py:attention --case B1,H8,S512,D64,float32
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from bench import device as devices
from bench import arguments, duel, isolation, machine, peers, problems, report, stats

SUMMARY = "PASS, FAIL or UNDECIDED: is a candidate correct and faster than a baseline?"
DEFAULT_LIMIT = 0.95
# On the CPU: the share of the cores that other processes may take during the rounds of a verdict on times, and that of
# the samples for which threads of the slower side may wait for a core. Taking turns cancels neither: in the record of the
# CPU cpu_simd's two threads wait for up to 46% of a sample on an otherwise idle machine.
OTHERS = 0.25
WAITING = 0.25


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("candidate", help="a row, a peer, module:function, file.py:function, or a .cu, .c or .so file")
    parser.add_argument(
        "--baseline", action="append", help="contender to beat (repeat for several; the fastest counts)"
    )
    parser.add_argument(
        "--case", action="append", help="problem, such as B1,H8,S512,D64,float16,causal=True (repeatable)"
    )
    parser.add_argument("--preset", help=f"problems by name: {', '.join(problems.preset_names())}")
    parser.add_argument("--filter", default="", help="only problems whose line contains this")
    parser.add_argument(
        "--limit", type=arguments.positive, default=DEFAULT_LIMIT, help="time ratio to stay under (0.95)"
    )
    parser.add_argument("--rounds", type=arguments.count, default=240, help="paired rounds at most (240)")
    parser.add_argument(
        "--seconds", type=arguments.positive, default=20.0, help="time for the rounds of one problem (20)"
    )
    parser.add_argument(
        "--time-limit", type=arguments.positive, default=300.0, help="seconds until a candidate counts as hung (300)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of inputs and order (0)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is a GPU")
    parser.add_argument(
        "--arrays", choices=("numpy", "torch", "cupy", "jax"), help="array library that a callable takes"
    )
    parser.add_argument("--cold", action="store_true", help="rotate operands past five times the last-level cache")
    parser.add_argument("--output", type=Path, help="write the samples and verdicts to this JSON file")


def default_case(device: str) -> str:
    return "B1,H8,S512,D64,float16" if device == "cuda" else "B1,H8,S512,D64,float32"


def default_baselines(device: str) -> list[str]:
    if device == "cuda":
        return list(peers.SDPA)
    import importlib.util

    return ["torch-flash"] if importlib.util.find_spec("torch") else ["numpy"]


def judge_one(candidate: str, case: str, device: str, baselines: list[str], limit: float = DEFAULT_LIMIT,
              time_limit: float = 300.0, worker: isolation.Worker | None = None, **options: Any) -> dict:  # fmt: skip
    """The duel in a worker and what follows from it: a JSON document with `verdict` and `reasons`."""
    auditor = duel.Auditor()
    arguments = {"candidate": candidate, "baselines": baselines, "case": case, "device": device, **options}
    with isolation.Worker() if worker is None else _borrowed(worker) as process:
        outcome = process.call("bench.duel:duel", arguments, time_limit, auditor)
    document: dict[str, Any] = {"case": case, "candidate": candidate, "limit": limit, "failures": [], "correct": False}
    if outcome.status == "usage":
        raise report.UsageError(outcome.reason)
    if outcome.ok:
        document |= outcome.value
    else:
        document["failures"] = [f"{outcome.status} during {auditor.stage}: {outcome.reason}"]
    if auditor.failure:
        document["failures"] = [*document["failures"], auditor.failure]
    document["correct"] = not document["failures"]
    interval, against = None, None
    if document.get("ratios"):
        against = min(document["ratios"], key=lambda name: document["seconds"][name])
        interval = stats.Interval(**document["ratios"][against])
    verdict = stats.decide(document["correct"], interval, limit)
    if document["correct"] and interval is None:
        document["failures"].append("no baseline runs this problem")
    elif document["correct"] and (why := crowded(verdict, candidate, against, document.get("conditions") or {})):
        verdict = stats.Verdict.UNDECIDED
        document["failures"].append(why)
    return document | {"verdict": verdict.name, "baseline": against}


def crowded(verdict: stats.Verdict, candidate: str, baseline: str | None, conditions: dict[str, Any]) -> str | None:
    """Why times taken under these conditions do not bear the verdict out; None where they do."""
    others = conditions.get("others") or 0.0
    if others > OTHERS:
        return (f"other processes took {100 * others:.0f}% of the cores during the rounds, {100 * OTHERS:.0f}% are "
                f"accepted (load average {conditions['load_average']:.1f}): measure on an idle machine")  # fmt: skip
    slower = {stats.Verdict.PASS: baseline, stats.Verdict.FAIL: candidate}.get(verdict)
    waiting = conditions.get("waiting", {}).get(slower, 0.0)
    if waiting > WAITING:
        return (f"threads of {slower} waited for a core for {100 * waiting:.0f}% of its samples, {100 * WAITING:.0f}% "
                "are accepted: two of them shared one, or other processes held it; try "
                "OMP_WAIT_POLICY=passive")  # fmt: skip
    return None


class _borrowed:
    """A worker that outlives the call."""

    def __init__(self, worker: isolation.Worker):
        self.worker = worker

    def __enter__(self) -> isolation.Worker:
        return self.worker

    def __exit__(self, *exc) -> None:
        pass


def run(args: argparse.Namespace) -> int:
    device = args.device or ("cuda" if devices.has_gpu() else "cpu")
    wanted = [str(problems.parse(text)) for text in args.case or ()]
    if args.preset:
        wanted += [str(case) for case in problems.preset(args.preset)]
    wanted = [text for text in wanted or [default_case(device)] if args.filter in text]
    if not wanted:
        raise report.UsageError(f"no problem contains {args.filter!r}")
    baselines = args.baseline or default_baselines(device)
    document: dict[str, Any] = {"command": "gate", "context": machine.context(device), "limit": args.limit, "gates": []}
    progress = report.Progress(len(wanted), quiet=args.json or len(wanted) == 1)
    try:
        for case in wanted:
            found = judge_one(
                args.candidate, case, device, baselines, args.limit, args.time_limit, arrays=args.arrays,
                rounds=args.rounds, seconds=args.seconds, seed=args.seed, cold=args.cold,
            )  # fmt: skip
            document["gates"].append(found)
            progress.step(f"{case}: {found['verdict']}")
            if args.output:
                report.write_json(args.output, document)
    finally:
        if document["gates"]:
            report.deliver(document, args.json, show)
    return max((stats.Verdict[g["verdict"]].value for g in document["gates"]), key=(0, 2, 1).index)


def show(document: dict) -> None:
    gates, rows = document["gates"], []
    for gate in gates:
        seconds = gate.get("seconds", {})
        for name, ratio in (gate.get("ratios") or {None: None}).items():
            mark = " *" if name and name == gate.get("baseline") and len(gate["ratios"]) > 1 else ""
            rows.append(
                [
                    gate["case"],
                    gate["verdict"] if not name or name == gate.get("baseline") else "",
                    f"{name or ''}{mark}",
                    seconds.get(gate["candidate"], 0.0) * 1e6 or None,
                    seconds.get(name, 0.0) * 1e6 or None,
                    f"{ratio['ratio']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]" if ratio else "",
                    gate.get("frobenius"),
                ]
            )
    candidate = gates[0]["candidate"] if gates else ""
    columns = ("problem", "verdict", "baseline", "candidate us", "baseline us", "ratio [95%]", "error vs float64")
    report.table(
        f"{candidate}: time ratio must stay under {document['limit']:g} (* the fastest baseline, which counts)",
        columns,
        rows,
    )
    for gate in gates:
        for failure in gate["failures"]:
            print(f"  {gate['case']}: {failure}")
