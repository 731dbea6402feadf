"""Kernels beside every peer that imports, problem by problem; peers take turns within each round.

A problem's line names its operation: a call of attention, its backward pass (operation=backward), a call over sequences
(q= and k= say how they are stored), merging (operation=merge) or appending (operation=append).

A contender is checked against float64 before it is timed; one that is wrong is reported and not timed. GPU work is
replayed from a CUDA graph where the contender can be captured, else bracketed by events; the table says which. "hot"
calls one set of operands, "cold" rotates through as many as exceed five times the last-level cache. On the CPU each
sample begins once no thread of the process runs any more: pools go on spinning after a call, and would slow whoever
comes next. With --output a run that was interrupted carries on where it stopped. The exit status is 1 when a problem
ended in an error or nobody ran it.

  python -m bench measure --preset cpu
  python -m bench measure --preset paper --filter D128 --kernels wgmma --output paper.json
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench import arguments, machine, problems, report
from bench.contenders import contender, named, peers
from bench.contenders.contender import Contender
from bench.machine import device as devices
from bench.machine.device import Cpu, Cuda
from bench.problems import Case, Problem
from bench.problems.operands import Operands, WrongResult
from bench.problems.operations import operands_of
from bench.timing import ceiling, conditions, launches, timer
from bench.timing.rounds import Samples, take_turns
from bench.trial import isolation

SUMMARY = "time kernels beside every peer that imports"
# How the figures of a document came about, kept in it.
METHOD = {
    "cpu": "turns in random order; a sample begins when no other thread of the process has run in three looks a "
    "millisecond apart (at most 0.5 s are waited); median of the samples by the host's clock",
    "cuda": "turns in random order; a sample begins with an idle device; median of the samples by graph replay, events "
    "or the host's clock, as `clock` says; samples under throttling are left out",
}
# On the CPU a problem of more work than this is tried with fewer queries first: nobody holds up a run for hours.
LARGE_FLOPS = 1e11
# What lives as long as the worker: loading a library twice is not what is measured.
_devices: dict[str, Cpu | Cuda] = {}
_open: dict[tuple, Contender] = {}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preset", action="append", help=f"repeatable: {', '.join(problems.preset_names())}")
    parser.add_argument("--case", action="append", default=[], help="a problem by its line (repeatable)")
    parser.add_argument(
        "--filter", type=arguments.pattern, default="", help="regular expression that a problem's line must contain"
    )
    parser.add_argument("--kernels", type=arguments.pattern, default="", help="regular expression of kernels (default: all)")
    parser.add_argument("--peers", help="comma-separated peers, or none (default: all that import)")
    parser.add_argument(
        "--candidate", action="append", default=[], help="a candidate beside the kernels, as in bench gate"
    )
    parser.add_argument(
        "--cache", default="hot", choices=("hot", "cold", "both"), help="operands in the cache or not (hot)"
    )
    parser.add_argument("--rounds", type=arguments.count, default=80, help="rounds at most (80)")
    parser.add_argument(
        "--seconds", type=arguments.positive, help="time for the rounds of one problem (GPU 1.5, CPU 8)"
    )
    parser.add_argument(
        "--tight", type=float, default=0.01, help="stop when every ratio's interval is this narrow (0.01)"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is a GPU")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="JSON file; resumed if it is of the same machine code and options")
    parser.add_argument("--fresh", action="store_true", help="do not resume")


def run(args: argparse.Namespace) -> int:
    device = args.device or ("cuda" if devices.has_gpu() else "cpu")
    target = devices.open_device(device)
    cases = chosen(args.preset, args.case, args.filter, device)
    operations = dict.fromkeys(case.operation for case in cases)
    compiled = list(dict.fromkeys(k for operation in operations for k in contender.compiled_kernels(target, operation)))
    kernels = [name for name in compiled if re.search(args.kernels, name)]
    wanted = None if args.peers is None else [p for p in args.peers.split(",") if p and p != "none"]
    if unknown := set(wanted or ()) - set(peers.PEERS):
        raise report.UsageError(f"peers are {', '.join(sorted(unknown))}; accepted: none, {', '.join(peers.PEERS)}")
    found, missing = peers.available(target, wanted)
    if not (kernels or args.candidate or found):
        raise report.UsageError(
            f"nothing to measure: no kernel matches {args.kernels!r}, and no peer is left"
            f" (kernels: {', '.join(compiled) or 'none compiled'})"
        )
    document = measure(
        device, cases, kernels + args.candidate, [p.name for p in found], caches(args.cache), args.rounds,
        args.seconds or (1.5 if device == "cuda" else 8.0), args.tight, args.seed, args.output, args.fresh,
        quiet=args.json, missing=missing,
    )  # fmt: skip
    report.deliver(document, args.json, show)
    return int(any(not cell.get("contenders") for cell in document["cells"].values()))


def chosen(presets: list[str] | None, lines: list[str], pattern: str, device: str) -> list[Problem]:
    found = [problems.parse(text, problems.OPERATIONS) for text in lines]
    for name in presets or ([] if lines else ["cpu" if device == "cpu" else "history"]):
        found += problems.preset(name)
    found = [case for case in dict.fromkeys(found) if re.search(pattern, str(case))]
    if not found:
        raise report.UsageError(f"no problem matches {pattern!r}")
    return found


def caches(name: str) -> list[str]:
    return ["hot", "cold"] if name == "both" else [name]


def measure(
    device: str, cases: list[Problem], entrants: list[str], opponents: list[str], cache: list[str], rounds: int,
    seconds: float, tight: float, seed: int = 0, output: Path | None = None, fresh: bool = False, quiet: bool = False,
    missing: dict[str, str] | None = None, deadline: Callable[[], bool] = lambda: False,
    on_cell: Callable[[str, dict, dict], None] = lambda key, cell, context: None,
) -> dict:  # fmt: skip
    """Measures every (case, cache) that `output` does not hold yet, each in the worker, until `deadline()` is true."""
    context = machine.context(device)
    identity = {
        "command": "measure",
        "digest": context["digest"],
        "device": device,
        "entrants": entrants,
        "opponents": opponents,
        "rounds": rounds,
        "seconds": seconds,
        "tight": tight,
        "seed": seed,
        "gpu": (context.get("gpu") or {}).get("name"),
        "cpu": context["cpu"],
    }
    about = {"method": METHOD[device], "missing_peers": missing or {}}
    results = report.Results(output, identity, context | about, fresh)
    todo = [(case, kind) for case in cases for kind in cache if f"{case} {kind}" not in results.cells]
    progress = report.Progress(len(todo), quiet)
    with isolation.Worker() as worker:
        if todo and "ceilings" not in results.document["context"]:
            dtypes = sorted({case.dtype for case in cases})
            outcome = worker.call("bench.timing.ceiling:measure", {"device": device, "dtypes": dtypes}, 120)
            results.document["context"]["ceilings"] = outcome.value if outcome.ok else {"error": outcome.reason}
        for case, kind in todo:
            if deadline():
                results.document["context"]["unfinished"] = True
                break
            arguments = {
                "case": str(case),
                "device": device,
                "entrants": entrants,
                "opponents": opponents,
                "cache": kind,
                "rounds": rounds,
                "seconds": seconds,
                "tight": tight,
                "seed": seed,
            }
            outcome = worker.call(
                "bench.commands.measure:cell", arguments, 60 + 6 * seconds * (1 + len(entrants) + len(opponents))
            )
            cell = outcome.value if outcome.ok else {"case": str(case), "cache": kind,
                                                     "error": f"{outcome.status}: {outcome.reason}"}  # fmt: skip
            _add_rates(cell, case, results.document["context"].get("ceilings", {}))
            results.add(f"{case} {kind}", cell)
            on_cell(f"{case} {kind}", cell, results.document["context"])
            progress.step(f"{case} {kind}: {_best_line(cell)}")
    return results.document


def cell(
    case: str, device: str, entrants: list[str], opponents: list[str], cache: str, rounds: int, seconds: float,
    tight: float, seed: int, tell: Callable[[Any], None] = print,
) -> dict[str, Any]:  # fmt: skip
    """One problem, inside the worker: who runs it rightly, and how fast. Ratios are to the fastest opponent."""
    target = _device(device)
    problem = problems.parse(case, problems.OPERATIONS)
    refused: dict[str, str] = {}
    errors: dict[str, dict[str, float]] = {}
    watches: dict[str, timer.Stopwatch] = {}
    alone: dict[str, dict[str, Any]] = {}
    with target.working():
        count = timer.slots_for_cold(problem.bytes(), target) if cache == "cold" else 1
        seeded = (dataclasses.replace(problem, seed=seed + i) for i in range(count))
        slots = [operands_of(case, target, guard=0) for case in seeded]
        for name in [*entrants, *opponents]:
            entrant = _opened(name, target)
            if problem.operation not in entrant.operations:
                if name in entrants:
                    refused[name] = f"no {problem.operation}"
                continue
            why = entrant.refuses(problem)
            if why is None:
                try:
                    why = _too_slow(entrant, problem, target, seconds)
                    if why:
                        refused[name] = why
                        continue
                    errors[name] = _checked(entrant, slots[0]) if entrant.judged else {}
                    slow = _timed_alone(entrant, slots, target, seconds)
                    if slow:
                        alone[name] = slow
                        continue
                    watches[name] = timer.Stopwatch([entrant.bind(s) for s in slots], target, entrant.timing)
                except WrongResult as error:
                    why = f"WRONG: {error}"
                except Exception as error:  # kernels and libraries say "not supported" with whatever exception they like
                    why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"
            if why:
                refused[name] = why
        found = {name: figures | errors[name] | _launched(name, slots[0]) for name, figures in alone.items()}
        picked = slots[0].picked()
        if not watches:
            return {"case": case, "cache": cache, "contenders": found, "refused": refused, "picked": picked}
        base = _fastest([n for n in opponents if n in watches] or list(watches), watches)
        samples = take_turns(watches, rounds, seconds, seed, tight, base)
        found |= {n: _figures(n, base, samples, w) | errors[n] | _launched(n, slots[0]) for n, w in watches.items()}
    return {
        "case": case,
        "cache": cache,
        "slots": count,
        "baseline": base,
        "picked": picked,
        "refused": refused,
        "conditions": samples.conditions_summary(),
        "stopped": samples.stopped,
        "contenders": found,
    }


def launched(case: str, device: str, kernels: list[str], tell: Callable[[Any], None] = print) -> dict[str, list[str] | None]:
    """What kernels launch for a problem, inside the worker; None for one that refuses it."""
    target, found = _device(device), {}
    with target.working():
        operands = operands_of(problems.parse(case, problems.OPERATIONS), target, guard=0)
        for name in kernels:
            found[name] = _launched(name, operands).get("launches")
    return found


def _launched(name: str, operands: Operands) -> dict[str, list[str]]:
    """{"launches": those of a kernel of fa_ext on a GPU}; empty for others, and where they cannot be read."""
    kernel = _opened(name, operands.device)
    if operands.device.kind == "cpu" or not isinstance(kernel, contender.Kernel):
        return {}
    found = launches.of(kernel.bind(operands), operands.device)
    return {"launches": found} if found else {}


def _device(name: str) -> Cpu | Cuda:
    if name not in _devices:
        _devices[name] = devices.open_device(name)
    return _devices[name]


def _opened(name: str, device: Cpu | Cuda) -> Contender:
    key = (name, device.kind)
    if key not in _open:
        _open[key] = named.open_contender(name, device)
    return _open[key]


def _too_slow(entrant: Contender, case: Case, device: Cpu | Cuda, seconds: float) -> str | None:
    """Why a large problem is not begun on the CPU: a 64th of its queries says that a call would outlast the rounds."""
    if device.kind == "cuda" or case.flops() < LARGE_FLOPS or case.operation not in ("attention", "backward") or case.seq_q < 1024:
        return None
    share = 64
    part = operands_of(dataclasses.replace(case, seq_q=case.seq_q // share, causal=False, mask=None, bias=None), device)
    call = entrant.bind(part)
    began = time.perf_counter()
    call()
    expected = share * (time.perf_counter() - began)
    return f"too slow here: a call would take about {expected:.0f} s" if expected > 4 * seconds else None


def _checked(entrant: Contender, operands: Operands) -> dict[str, float]:
    """Errors against float64; WrongResult when they are over the bound."""
    operands.poison()
    operands.device.synchronize()
    result = entrant.bind(operands)()
    operands.device.synchronize()
    judged = operands.judge(result)
    if not judged.passed:
        raise WrongResult("; ".join(judged.failures))
    return {"frobenius": judged.frobenius, "max_abs": judged.max_abs}


def _timed_alone(entrant: Contender, slots: list[Operands], device: Cpu | Cuda, seconds: float) -> dict | None:
    """Figures of a contender so slow that its turns would take up all the others' time; None for any other."""
    call = entrant.bind(slots[0])

    def once(calls: int = 1) -> float:
        device.synchronize()
        device.settle()
        began = time.perf_counter()
        for _ in range(calls):
            call()
        device.synchronize()
        return (time.perf_counter() - began) / calls

    first, turns = once(), len(slots) if device.kind == "cuda" else 1
    if turns > 1 and first < 1e-3:  # most of one short call is the way to the device and back
        first = min(first, once(8))
    if first * turns <= seconds / 20:
        return None
    taken = [first] + [once() for _ in range(min(4, int(seconds / 2 / first)))]
    return {
        "us": float(np.median(taken)) * 1e6,
        "rounds": len(taken),
        "clock": "host clock",
        "note": "slow: median of a few calls alone",
    }


def _fastest(names: list[str], watches: dict[str, timer.Stopwatch]) -> str:
    quick = {name: min(watches[name].sample() for _ in range(3)) for name in names}
    return min(quick, key=lambda name: quick[name])


def _figures(name: str, base: str, samples: Samples, watch: timer.Stopwatch) -> dict[str, Any]:
    seconds = samples.seconds[name][samples.unthrottled()]
    figures = {
        "us": float(np.median(seconds)) * 1e6,
        "spread": float(np.subtract(*np.quantile(seconds, [0.75, 0.25])) / np.median(seconds)),
        "rounds": len(seconds),
        "clock": watch.clock,
    }
    if watch.note:
        figures["note"] = watch.note
    if name != base and len(seconds) >= 2:
        figures["ratio"] = samples.interval(name, base).as_dict()
    return figures


def _add_rates(cell: dict, case: Problem, ceilings: dict) -> None:
    for figures in cell.get("contenders", {}).values():
        seconds = figures["us"] * 1e-6
        figures["tflops"] = case.flops() / seconds / 1e12
        figures["gbs"] = case.bytes() / seconds / 1e9
        share = ceiling.share(case, seconds, ceilings)
        if share:
            figures["ceiling_share"], figures["ceiling"] = share


def _best_line(cell: dict) -> str:
    if not cell.get("contenders"):
        return cell.get("error") or "; ".join(f"{k}: {v}" for k, v in cell.get("refused", {}).items()) or "nothing ran"
    name, figures = min(cell["contenders"].items(), key=lambda item: item[1]["us"])
    busy = ", on a busy machine" if conditions.busy(cell.get("conditions")) else ""
    return f"{name} {figures['us']:.4g} us, {figures['tflops']:.3g} TFLOP/s{busy}"


def show(document: dict) -> None:
    """The table of a measure document."""
    rows = []
    for cell in document["cells"].values():
        for name, f in sorted(cell.get("contenders", {}).items(), key=lambda item: item[1]["us"]):
            if ratio := f.get("ratio"):
                shown = f"{ratio['ratio']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]"
            else:
                shown = "1" if name == cell.get("baseline") else ""
            share = f"{100 * f['ceiling_share']:.1f}% {f['ceiling']}" if "ceiling_share" in f else ""
            rows.append(
                [
                    cell["case"],
                    cell["cache"],
                    name,
                    f["us"],
                    f["tflops"],
                    f["gbs"],
                    shown,
                    f.get("frobenius"),
                    share,
                    f["clock"],
                    conditions.mark(cell),
                ]
            )
    context = document["context"]
    where = (context.get("gpu") or {}).get("name") or f"{context['cpu']}, {context['threads']} threads"
    columns = (
        "problem",
        "cache",
        "contender",
        "us",
        "TFLOP/s",
        "GB/s",
        "time / fastest peer [95%]",
        "error vs float64",
        "of product or stream",
        "clock",
        "load",
    )
    report.table(f"{where}, {context['date']}", columns, rows)
    if line := conditions.summary(document["cells"].values()):
        print(line)
    seen = set()
    for cell in document["cells"].values():
        if "error" in cell:
            print(f"  {cell['case']} {cell['cache']}: {cell['error']}")
        for name, why in cell.get("refused", {}).items():
            if (name, why) not in seen:
                seen.add((name, why))
                print(f"  {name} did not run {cell['case']}: {why}")
    for name, why in context.get("missing_peers", {}).items():
        print(f"  {name}: {why}")
