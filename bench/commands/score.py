"""KernelBench's measure over attention problems: fast_p is the share that is correct and more than p times as fast.

108 problems (head_dim 64, 80, 96 and 128; full and causal; float16, bfloat16, float32; 36 of them with at least 1024
queries). A problem counts as correct when all five trials pass, with fresh seeds, fresh pointers, poisoned outputs and
hashed inputs, when every timed call that was looked at gave the right result, and when the trials pass again after
timing. Beside the bounds of the contract, a problem whose judge would accept zeros or the mean of V is refused as
meaningless. fast_p uses a strict >, p in 0, 0.5, 0.8, 1, 1.5, 2. The baseline is the fastest of those that run the problem: on a GPU, as in
KernelBench, torch's scaled_dot_product_attention with the backend that torch chooses; on the CPU as in bench gate. GPU
operands are cold: five times the last-level cache is written before each sample. What the candidate refuses counts as not
correct.

  python -m bench score fa_ext --output score.json     (on an interruption the same line carries on)
  python -m bench score cpu_simd --filter S128
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import arguments, machine, problems, report
from bench.commands import gate
from bench.machine import device as devices
from bench.problems import Case
from bench.problems.operands import Operands, trivial_answers
from bench.timing import conditions
from bench.trial import duel, isolation

SUMMARY = "KernelBench's fast_p over 108 attention problems"
THRESHOLDS = (0.0, 0.5, 0.8, 1.0, 1.5, 2.0)
# Five trials, as KernelBench runs; three kinds of inputs on which shortcuts show.
TRIALS = ["normal", "outliers", "sorted", "normal", "large"]
# A third of bench gate's, so that 108 problems take two minutes; bench.timing.timer says what longer samples change.
GPU_SAMPLE_SECONDS = 3e-3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("candidate", help="as in bench gate")
    parser.add_argument("--every", type=arguments.count, default=1, help="only every n-th problem")
    parser.add_argument("--seconds", type=arguments.positive, help="time for the rounds of one problem (GPU 0.2, CPU 1)")
    parser.add_argument("--time-limit", type=arguments.positive, default=120.0, help="seconds until a problem counts as hung (120)")
    parser.add_argument("--seed", type=int, help="repeat the draws of a run; a candidate may foresee them (secret ones)")
    parser.add_argument("--output", type=Path, help="JSON file; resumed if it is of the same sources, candidate and options")
    arguments.common(parser, "filter", "device", "arrays", "fresh", "baseline")


def run(args: argparse.Namespace) -> int:
    device = args.device or devices.default()
    chosen = [c for c in problems.scored(device) if re.search(args.filter, str(c))][:: args.every]
    if not chosen:
        raise report.UsageError(f"no problem matches {args.filter!r}")
    baselines = args.baseline or (["torch-sdpa"] if device == "cuda" else gate.default_baselines(device))
    document = score(
        args.candidate, device, chosen, baselines, args.seconds or (0.2 if device == "cuda" else 1.0), args.time_limit,
        args.seed, args.arrays, args.output, args.fresh, quiet=args.json,
    )  # fmt: skip
    report.deliver(document, args.json, show)
    return 0


def score(
    candidate: str, device: str, chosen: list[Case], baselines: list[str], seconds: float, time_limit: float,
    seed: int | None = None, arrays: str | None = None, output: Path | None = None, fresh: bool = False, quiet: bool = False,
) -> dict:  # fmt: skip
    """Scores every problem that `output` does not hold yet. A crash or a hang costs its own problem only."""
    context = machine.context(device)
    identity = {"command": "score", "candidate": candidate, "content": _content(candidate), "digest": context["digest"],
                "device": device, "baselines": baselines, "seconds": seconds, "arrays": arrays, "seed": seed}  # fmt: skip
    results = report.Results(output, identity, context, fresh)
    todo = [case for case in chosen if str(case) not in results.cells]
    document = results.document
    progress = report.Progress(len(todo), quiet)
    with isolation.Worker() as own, isolation.Worker(confined=True) as shared, duel.Table(device) as table:
        for case in todo:
            meaning = own.call("bench.commands.score:meaningless", {"case": str(case), "seed": seed or 0}, time_limit)
            if not meaning.ok or meaning.value:
                found = {"case": str(case), "correct": False, "speedup": None, "us": None,
                         "failures": [f"meaningless problem: {meaning.value or meaning.reason}"]}  # fmt: skip
            else:
                # A candidate gets a process for each problem: what it did to one must not reach the next.
                worker = shared if _is_ours(candidate) else None
                found = score_one(candidate, str(case), device, baselines, seconds, time_limit, seed, arrays, worker, table)
            document["fast"] = fast_p([*results.cells.values(), found])
            results.add(str(case), found)
            speedup = f", {found['speedup']:.2f}x" if found["speedup"] else ""
            busy = ", on a busy machine" if conditions.busy(found.get("conditions")) else ""
            progress.step(f"{case}: {'correct' if found['correct'] else 'WRONG: ' + found['failures'][0]}{speedup}{busy}")
    document["fast"] = fast_p([document["cells"][str(case)] for case in chosen])
    results.save()
    return document


def score_one(
    candidate: str, case: str, device: str, baselines: list[str], seconds: float, time_limit: float, seed: int | None = None,
    arrays: str | None = None, worker: isolation.Worker | None = None, table: duel.Table | None = None,
) -> dict:  # fmt: skip
    """{correct, failures, speedup over the fastest baseline or None, baseline, microseconds, conditions}."""
    quick = {"cold": True, "sample_seconds": GPU_SAMPLE_SECONDS} if device == "cuda" else {}
    found = gate.judge_one(candidate, case, device, baselines, 1.0, time_limit, worker, table, arrays=arrays,
                           rounds=100, seconds=seconds, seed=seed, values=TRIALS, **quick)  # fmt: skip
    times, base = found.get("seconds", {}), found["baseline"]
    speedup = times[base] / times[candidate] if found["correct"] and base else None
    return {
        "case": case, "correct": found["correct"], "failures": found["failures"], "speedup": speedup, "baseline": base,
        "us": {name: s * 1e6 for name, s in times.items()}, "ratio": found.get("ratios", {}).get(base),
        "conditions": found.get("conditions"),
    }  # fmt: skip


def _is_ours(candidate: str) -> bool:
    """Kernels and peers do not tamper with the process, and keep it from problem to problem."""
    return ":" not in candidate and not Path(candidate).suffix


def meaningless(case: str, seed: int, tell: Callable[[Any], None] = print) -> str | None:
    """Which answer that needs no attention the judge would accept; None when it refuses them all."""
    import dataclasses

    target = devices.open_device("cpu")
    operands = Operands(dataclasses.replace(problems.parse(case), seed=seed, heads=1, heads_kv=1, batch=1), target)
    accepted = [name for name, answer in trivial_answers(operands).items() if operands.judge(answer).passed]
    return ", ".join(accepted) or None


def fast_p(scored: list[dict]) -> dict[str, float]:
    """Share of problems that are correct with a speedup strictly over p; p = 0 counts every correct one."""
    total = max(1, len(scored))
    return {f"fast_{p:g}": sum(s["correct"] and (p == 0 or (s["speedup"] or 0.0) > p) for s in scored) / total for p in THRESHOLDS}


def _content(candidate: str) -> str | None:
    """A hash of the candidate's file, so that an edited candidate is scored anew."""
    import hashlib

    path = Path(candidate.rpartition(":")[0] if ".py:" in candidate else candidate)
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.is_file() else None


def show(document: dict) -> None:
    cells = list(document["cells"].values())
    rows = [[c["case"], "yes" if c["correct"] else "NO", c["speedup"], c.get("baseline"), conditions.mark(c),
             "" if c["correct"] else c["failures"][0][:90]] for c in cells]  # fmt: skip
    candidate = document["identity"]["candidate"]
    report.table(f"{candidate} on {len(cells)} problems", ("problem", "correct", "speedup", "baseline", "load", "why not"), rows)
    if line := conditions.summary(cells):
        print(line)
    print("  ".join(f"{name} {100 * share:.1f}%" for name, share in document["fast"].items()))
