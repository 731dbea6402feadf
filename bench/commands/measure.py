"""Kernels beside every peer that imports, problem by problem; each round times all of them in random order.

A problem's line names its operation: a call of attention, its backward pass (operation=backward), a call over sequences
(q= and k= say how they are stored), merging (operation=merge) or appending (operation=append).

What is wrong by float64 is reported and not timed. GPU work is replayed from a CUDA graph where it can be captured, else
bracketed by events; the table says which. "hot"
calls one set of operands, "cold" rotates through as many as exceed five times the last-level cache. On the CPU each
sample begins once no thread of the process runs any more: pools go on spinning after a call, and would slow whoever
comes next. With --output a run that was interrupted carries on where it stopped. The exit status is 1 when a problem
ended in an error or nothing ran it.

  python -m bench measure --preset cpu
  python -m bench measure --preset paper --filter D128 --kernels wgmma --output paper.json
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench import arguments, machine, problems, report
from bench.implementations import dense_rows, implementation, named, peers
from bench.implementations.implementation import Implementation
from bench.machine import device as devices
from bench.machine.device import Cpu, Cuda
from bench.problems import Case
from bench.problems.operands import Operands, WrongResult
from bench.problems.operations import operands_of
from bench.timing import ceiling, conditions, launches, timer
from bench.timing.rounds import Samples, take_rounds
from bench.trial import isolation

SUMMARY = "time kernels beside every peer that imports"
# How the figures of a document came about, kept in it.
METHOD = {
    "cpu": "rounds in random order; a sample begins when no other thread of the process has run in three looks a "
    "millisecond apart (at most 0.5 s are waited); median of the samples by the host's clock",
    "cuda": "rounds in random order; a sample begins with an idle device; median of the samples by graph replay, events "
    "or the host's clock, as `clock` says; samples under throttling are left out",
}
# A column where there are sequences of one length: the rate as a share of that of fa_ext's dense call on the same rows.
DENSE = "of our dense rate"
# On the CPU a problem of more work than this is tried with fewer queries first, so that none holds up a run for hours.
LARGE_FLOPS = 1e11
# Seconds that a problem may take besides its rounds: gigabytes of bias are drawn on the host, and peers compile kernels for it.
SETUP_SECONDS = 240
# Both live as long as the worker: loading a library twice is not what is measured.
_devices: dict[str, Cpu | Cuda] = {}
_open: dict[tuple, Implementation] = {}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--preset", action="append", help=f"repeatable: {', '.join(problems.preset_names())}")
    add("--only", type=lambda text: text.split(","), help=f"comma-separated cells of the presets that have some: {_cells_of_presets()}")
    add("--case", action="append", default=[], help="a problem by its line (repeatable)")
    add("--kernels", type=arguments.pattern, default="", help="regular expression of kernels (default: all)")
    add("--peers", help="comma-separated peers, or none (default: all that import)")
    add("--candidate", action="append", default=[], help="a candidate beside the kernels, as in bench gate")
    add("--cache", default="hot", choices=("hot", "cold", "both"), help="operands in the cache or not (hot)")
    add("--rounds", type=arguments.count, default=80, help="rounds at most (80)")
    add("--seconds", type=arguments.positive, help="time for the rounds of one problem (GPU 1.5, CPU 8)")
    add("--tight", type=float, default=0.01, help="stop when every ratio's interval is this narrow (0.01)")
    add("--seed", type=int, default=0)
    add("--output", type=Path, help="JSON file; resumed if it is of the same machine code and options")
    arguments.common(parser, "filter", "device", "fresh")


@dataclasses.dataclass(frozen=True)
class Settings:
    """How problems are measured. Names are those of kernels, candidates and peers."""

    device: str
    candidates: list[str]
    peers: list[str]
    rounds: int
    seconds: float  #: of the rounds of one problem
    tight: float  #: rounds end when every ratio's interval is this narrow
    seed: int = 0


def run(args: argparse.Namespace) -> int:
    device = args.device or devices.default()
    target = devices.open_device(device)
    cases = chosen(args.preset, args.case, args.filter, device, args.only)
    operations = dict.fromkeys(case.operation for case in cases)
    compiled = list(dict.fromkeys(k for operation in operations for k in implementation.compiled_kernels(target, operation)))
    kernels = [name for name in compiled if re.search(args.kernels, name)]
    wanted = None if args.peers is None else [p for p in args.peers.split(",") if p and p != "none"]
    if unknown := set(wanted or ()) - set(peers.PEERS):
        raise report.UsageError(f"peers are {', '.join(sorted(unknown))}; accepted: none, {', '.join(peers.PEERS)}")
    found, missing = peers.available(target, wanted)
    if not (kernels or args.candidate or found):
        raise report.UsageError(f"nothing to measure: no kernel matches {args.kernels!r}, and no peer is left"
                                f" (kernels: {', '.join(compiled) or 'none compiled'})")  # fmt: skip
    settings = Settings(device, kernels + args.candidate, [p.name for p in found], args.rounds,
                        args.seconds or (1.5 if device == "cuda" else 8.0), args.tight, args.seed)  # fmt: skip
    document = measure(settings, cases, caches(args.cache), args.output, args.fresh, args.json, missing)
    report.deliver(document, args.json, show)
    return int(any(not cell.get("figures") for cell in document["cells"].values()))


def chosen(presets: list[str] | None, lines: list[str], pattern: str, device: str, only: list[str] | None = None) -> list[Case]:
    found = [problems.parse(text, problems.OPERATIONS) for text in lines]
    for name in presets or ([] if lines else ["cpu" if device == "cpu" else "history"]):
        found += problems.preset(name) if only is None else problems.cells(name, only)
    found = [case for case in dict.fromkeys(found) if re.search(pattern, str(case))]
    if not found:
        raise report.UsageError(f"no problem matches {pattern!r}")
    return found


def _cells_of_presets() -> str:
    return "; ".join(f"{name}: {', '.join(cells)}" for name, cells in problems.CELLS.items())


def caches(name: str) -> list[str]:
    return ["hot", "cold"] if name == "both" else [name]


def measure(
    settings: Settings, cases: list[Case], cache: list[str], output: Path | None = None, fresh: bool = False, quiet: bool = False,
    missing: dict[str, str] | None = None, deadline: Callable[[], bool] = lambda: False,
    on_cell: Callable[[str, dict, dict], None] = lambda key, cell, context: None,
) -> dict:  # fmt: skip
    """Measures every (case, cache) that `output` does not hold yet, each in the worker, until `deadline()` is true."""
    context, how = machine.context(settings.device), dataclasses.asdict(settings)
    identity = how | {"command": "measure", "digest": context["digest"], "gpu": (context.get("gpu") or {}).get("name"), "cpu": context["cpu"]}
    results = report.Results(output, identity, context | {"method": METHOD[settings.device], "missing_peers": missing or {}}, fresh)
    todo = [(case, kind) for case in cases for kind in cache if f"{case} {kind}" not in results.cells]
    progress = report.Progress(len(todo), quiet)
    limit = SETUP_SECONDS + 6 * settings.seconds * (1 + len(settings.candidates) + len(settings.peers))
    context = results.document["context"]
    with isolation.Worker() as worker:
        if todo and "ceilings" not in context:
            asked = {"device": settings.device, "dtypes": sorted({case.dtype for case in cases})}
            outcome = worker.call("bench.timing.ceiling:measure", asked, 120)
            context["ceilings"] = outcome.value if outcome.ok else {"error": outcome.reason}
        for case, kind in todo:
            if deadline():
                context["unfinished"] = True
                break
            key = {"case": str(case), "cache": kind}
            outcome = worker.call("bench.commands.measure:cell", key | how, limit)
            found = outcome.value if outcome.ok else key | {"error": f"{outcome.status}: {outcome.reason}"}
            _add_rates(found, case, context.get("ceilings", {}))
            results.add(f"{case} {kind}", found)
            on_cell(f"{case} {kind}", found, context)
            progress.step(f"{case} {kind}: {_best_line(found)}")
    return results.document


# ---- one problem, inside the worker ----


def cell(case: str, cache: str, tell: Callable[[Any], None] = print, **settings: Any) -> dict[str, Any]:
    """The implementations that run the problem rightly, and how fast. Ratios are to the fastest peer."""
    how, problem = Settings(**settings), problems.parse(case, problems.OPERATIONS)
    target = _device(how.device)
    refused: dict[str, str] = {}
    found: dict[str, dict[str, Any]] = {}
    watches: dict[str, timer.Stopwatch] = {}
    with target.working():
        count = timer.slots_for_cold(problem.bytes(), target) if cache == "cold" else 1
        seeded = (dataclasses.replace(problem, seed=how.seed + i) for i in range(count))
        slots = [operands_of(case, target, guard=0) for case in seeded]
        for name in [*how.candidates, *how.peers]:
            one = _opened(name, target)
            if problem.operation not in one.operations or name == dense_rows.NAME and not problem.lengths:
                if name in how.candidates:
                    refused[name] = f"no {problem.operation}"
                continue
            why = one.refuses(problem)
            try:
                why = why or _too_slow(one, problem, target, how.seconds)
                if why is None:
                    found[name] = _checked(one, slots[0]) if one.judged else {}
                    if slow := _timed_alone(one, slots, target, how.seconds):
                        found[name] |= slow
                    else:
                        watches[name] = timer.Stopwatch([one.bind(s) for s in slots], target, one.timing_of(problem))
            except WrongResult as error:
                why = f"WRONG: {error}"
            except Exception as error:  # kernels and libraries say "not supported" with whatever exception they like
                why = report.first_line(error)
            if why:
                found.pop(name, None)
                refused[name] = why
        document: dict[str, Any] = {"case": case, "cache": cache, "picked": slots[0].picked(), "refused": refused, "figures": found}
        if watches:
            others = [name for name in watches if name != dense_rows.NAME] or list(watches)
            base = _fastest([name for name in how.peers if name in others] or others, watches)
            samples = take_rounds(watches, how.rounds, how.seconds, how.seed, how.tight, base)
            for name, watch in watches.items():
                found[name] |= _figures(name, base, samples, watch)
            document |= {"slots": count, "baseline": base, "conditions": samples.conditions_summary(), "stopped": samples.stopped}
        for name in found:
            found[name] |= _launched(name, slots[0])
    return document


def launched(case: str, device: str, kernels: list[str], tell: Callable[[Any], None] = print) -> dict[str, list[str] | None]:
    """The launches of kernels for a problem, inside the worker; None for one that refuses it, or whose launches are not known."""
    from fa_ext import UnsupportedError

    target = _device(device)
    found: dict[str, list[str] | None] = dict.fromkeys(kernels)
    with target.working():
        operands = operands_of(problems.parse(case, problems.OPERATIONS), target, guard=0)
        for name in kernels:
            with contextlib.suppress(UnsupportedError):
                found[name] = _launched(name, operands).get("launches")
    return found


def _launched(name: str, operands: Operands) -> dict[str, list[str]]:
    """{"launches": those of a kernel of fa_ext on a GPU}; empty for others, and for calls that cannot be captured."""
    kernel = _opened(name, operands.device)
    if operands.device.kind == "cpu" or not isinstance(kernel, implementation.Kernel):
        return {}
    found = launches.of(kernel.bind(operands), operands.device)
    return {"launches": found} if found else {}


def _device(name: str) -> Cpu | Cuda:
    if name not in _devices:
        _devices[name] = devices.open_device(name)
    return _devices[name]


def _opened(name: str, device: Cpu | Cuda) -> Implementation:
    key = (name, device.kind)
    if key not in _open:
        _open[key] = named.open_implementation(name, device)
    return _open[key]


def _too_slow(one: Implementation, case: Case, device: Cpu | Cuda, seconds: float) -> str | None:
    """Why a large problem is not begun on the CPU: a 64th of its queries says that a call would outlast the rounds."""
    if device.kind == "cuda" or case.flops() < LARGE_FLOPS or case.lengths or case.operation == "merge" or case.seq_q < 1024:
        return None
    share = 64
    part = operands_of(dataclasses.replace(case, seq_q=case.seq_q // share, causal=False, mask=None, bias=None), device)
    call = one.bind(part)
    began = time.perf_counter()
    call()
    expected = share * (time.perf_counter() - began)
    return f"too slow here: a call would take about {expected:.0f} s" if expected > 4 * seconds else None


def _checked(one: Implementation, operands: Operands) -> dict[str, float]:
    """Errors against float64; WrongResult when they are over the bound."""
    judged = one.judged_on(operands)
    if not judged.passed:
        raise WrongResult("; ".join(judged.failures))
    return {"frobenius": judged.frobenius, "max_abs": judged.max_abs}


def _timed_alone(one: Implementation, slots: list[Operands], device: Cpu | Cuda, seconds: float) -> dict | None:
    """Figures of an implementation so slow that its samples would take up all the others' time; None for any other."""
    call = one.bind(slots[0])

    def once(calls: int = 1) -> float:
        device.synchronize()
        device.settle()
        began = time.perf_counter()
        for _ in range(calls):
            call()
        device.synchronize()
        return (time.perf_counter() - began) / calls

    first, calls = once(), len(slots) if device.kind == "cuda" else 1
    if calls > 1 and first < 1e-3:  # most of one short call is the way to the device and back
        first = min(first, once(8))
    if first * calls <= seconds / 20:
        return None
    taken = [first] + [once() for _ in range(min(4, int(seconds / 2 / first)))]
    return {"us": float(np.median(taken)) * 1e6, "rounds": len(taken), "clock": "host clock", "note": "slow: median of a few calls alone"}


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


def _add_rates(cell: dict, case: Case, ceilings: dict) -> None:
    dense = cell.get("figures", {}).get(dense_rows.NAME)
    for figures in cell.get("figures", {}).values():
        seconds = figures["us"] * 1e-6
        figures["tflops"] = case.flops() / seconds / 1e12
        figures["gbs"] = case.bytes() / seconds / 1e9
        if dense:
            figures["dense_share"] = dense["us"] / figures["us"]
        share = ceiling.share(case, seconds, ceilings)
        if share:
            figures["ceiling_share"], figures["ceiling"] = share


def _best_line(cell: dict) -> str:
    if not cell.get("figures"):
        return cell.get("error") or "; ".join(f"{k}: {v}" for k, v in cell.get("refused", {}).items()) or "nothing ran"
    name, figures = min(cell["figures"].items(), key=lambda item: item[1]["us"])
    busy = ", on a busy machine" if conditions.busy(cell.get("conditions")) else ""
    return f"{name} {figures['us']:.4g} us, {figures['tflops']:.3g} TFLOP/s{busy}"


def show(document: dict) -> None:
    """The table of a measure document."""
    rows = []
    for cell in document["cells"].values():
        for name, f in sorted(cell.get("figures", {}).items(), key=lambda item: item[1]["us"]):
            shown = "1" if name == cell.get("baseline") else ""
            if ratio := f.get("ratio"):
                shown = f"{ratio['ratio']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]"
            share = f"{100 * f['ceiling_share']:.1f}% {f['ceiling']}" if "ceiling_share" in f else ""
            dense = f"{f['dense_share']:.3f}" if "dense_share" in f else ""
            rows.append([problems.shortened(cell["case"]), cell["cache"], name, f["us"], f["tflops"], f["gbs"], shown, dense, f.get("frobenius"),
                         share, f["clock"], conditions.mark(cell)])  # fmt: skip
    context = document["context"]
    where = (context.get("gpu") or {}).get("name") or f"{context['cpu']}, {context['threads']} threads"
    columns = ("problem", "cache", "kernel or peer", "us", "TFLOP/s", "GB/s", "time / fastest peer [95%]", DENSE,
               "error vs float64", "of product or stream", "clock", "load")  # fmt: skip
    if not any(row[columns.index(DENSE)] for row in rows):
        columns, rows = tuple(c for c in columns if c != DENSE), [row[: columns.index(DENSE)] + row[columns.index(DENSE) + 1 :] for row in rows]
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
                print(f"  {name} did not run {problems.shortened(cell['case'])}: {why}")
    for name, why in context.get("missing_peers", {}).items():
        print(f"  {name}: {why}")
