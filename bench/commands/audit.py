"""Does the library choose the fastest of its kernels? Shapes are drawn, and every kernel that takes one is timed beside the choice.

Results are held against each other once, and against float64 where they differ. Kernels that are within a quarter of the fastest,
and the one that fa_ext chooses, are then timed in turns, on a GPU by graph replay. A claim fails where the lower bound of the 95%
interval of the ratio is over its limit and the difference over 0.3 us, in two of three processes:

  chosen / fastest                                                  1.03
  the backward pass: deterministic=False / deterministic=True       1.01
  packed, one query each: with cu_seqlens_q / without               1 / 0.97

Shapes that failed stay in the record and are asked first by the next run on such a machine; runs of several seeds join there.
bench/audit.accepted lists shapes that may fail, with the reason. The exit status is 1 where another one fails.

  python -m bench audit --op serving --count 120 --seed 7
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bench import arguments, machine, report
from bench.implementations import implementation
from bench.machine import device as devices
from bench.machine.device import Cpu, Cuda
from bench.problems import audited, shortened
from bench.problems.case import Case
from bench.problems.operands import Operands
from bench.problems.operations import operands_of
from bench.timing import timer
from bench.timing.rounds import take_rounds
from bench.timing.stats import MIN_ROUNDS
from bench.trial import isolation

SUMMARY = "does the library choose the fastest of its kernels"
ACCEPTED = machine.ROOT / "bench" / "audit.accepted"
MOST_ACCEPTED = 10
# Limits of ratios, and the seconds by which the slower one must be slower.
CHOICE, ANY_ORDER, PACKED = 1.03, 1.01, 1 / 0.97
LEAST = 0.3e-6
PROCESSES, FAILURES = 3, 2
# The share of --time in which shapes are asked for the first time; the others are for those that failed.
FIRST_SHARE = 0.7
# Kernels that take any call but are not made for speed, and the FLOPs up to which they are asked.
SIMPLE = {"simt": 2e10, "simt_backward": 2e10, "minimal": 2e9, "cpu_ref": 3e7, "cpu_ref_backward": 3e7}
# Kernels so much slower than the fastest are not timed in turns.
NEAR = 1.25
# Copies of a short call's operands at most, so that its keys come from memory.
COPIES = 16
# Differences between two right results, relative to the norm and to the largest value.
AGREE = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2.0**-17, "float64": 2.0**-40}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--op", action="append", choices=audited.OPERATIONS, help="repeatable (default: all)")
    add("--count", type=arguments.count, default=120, help="shapes of each operation (120)")
    add("--seed", type=int, default=0)
    add("--seconds", type=arguments.positive, default=0.15, help="rounds of each kernel on one shape (0.15)")
    add("--time", type=arguments.positive, default=3600.0, help="seconds at most (3600)")
    add("--output", type=Path, help="the record (default build/bench/audit-<device>.json)")
    arguments.common(parser, "device", "fresh")


def run(args: argparse.Namespace) -> int:
    device = args.device or devices.default()
    excused = accepted(ACCEPTED)
    if device == "cpu":
        print("bench audit: the CPU kernels alone are audited" + ("" if devices.has_gpu() else ", for want of a GPU"), file=sys.stderr)
    context = machine.context(device)
    identity = {"command": "audit", "gpu": (context.get("gpu") or {}).get("name"), "cpu": context["cpu"]}
    path = args.output or machine.ROOT / "build" / "bench" / f"audit-{device}.json"
    results = report.Results(path, identity, context, args.fresh)
    cases = asked(results.cells, args.op or list(audited.OPERATIONS), args.count, args.seed, device)
    asker = Processes(device, args.seconds)
    try:
        done = audit(cases, results, asker, args.time, args.seed, args.json)
    finally:
        asker.close()
    cells = [results.cells[line] | {"accepted": excused.get(line)} for line in done]
    document = {"context": context, "asked": len(cases), "cells": cells}
    report.deliver(document, args.json, show)
    return int(any(failed(cell) and not cell["accepted"] for cell in cells))


def accepted(path: Path) -> dict[str, str]:
    """{line of a case: why it may fail}, from a file of lines "CASE  # reason"; those that begin with # are of the file itself."""
    found = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.startswith("#") or not line.strip():
            continue
        case, _, reason = (part.strip() for part in line.partition("#"))
        try:
            Case.parse(case)
        except (ValueError, TypeError, IndexError) as error:
            raise report.UsageError(f"{path}:{number}: {case!r} is no case ({error})") from None
        if not reason:
            raise report.UsageError(f"{path}:{number}: {case} has no reason; accepted: CASE  # reason")
        found[case] = reason
    if len(found) > MOST_ACCEPTED:
        raise report.UsageError(f"{path} has {len(found)} cases; accepted: at most {MOST_ACCEPTED}")
    return found


def asked(cells: dict[str, dict], operations: list[str], count: int, seed: int, device: str) -> list[Case]:
    """Shapes that failed before, those that lost once, and drawn ones, of all operations in turns."""
    kinds = {"forward": "attention", "serving": "serving", "backward": "backward"}
    again = [Case.parse(line) for line, cell in cells.items() if failed(cell) or suspect(cell)]
    found = [case for case in again if case.operation in {kinds[operation] for operation in operations}]
    found += [case for operation in operations for case in audited.first(operation, device)]
    found += [case for turn in zip(*(audited.drawn(operation, count, seed, device) for operation in operations)) for case in turn]
    return list(dict.fromkeys(found))


# ---- processes ----


class Processes:
    """Asks about a shape in one of several processes."""

    def __init__(self, device: str, seconds: float):
        self.how = {"device": device, "seconds": seconds}
        self.workers = [isolation.Worker() for _ in range(PROCESSES)]

    def __call__(self, process: int, case: Case, seed: int) -> dict[str, Any]:
        outcome = self.workers[process].call("bench.commands.audit:cell", {"case": str(case), "seed": seed + process} | self.how, 60)
        return outcome.value if outcome.ok else {"case": str(case), "error": f"{outcome.status}: {outcome.reason}"}

    def close(self) -> None:
        for worker in self.workers:
            worker.close()


def audit(cases: list[Case], results: report.Results, ask: Callable[[int, Case, int], dict], limit: float, seed: int, quiet: bool = False) -> list[str]:
    """Asks about each case in one process and, where a claim failed, in others until it failed in two or cannot. -> the lines
    that were asked about within `limit` seconds; what was found is in `results`."""
    began, progress, done = time.monotonic(), report.Progress(len(cases), quiet), []
    digest = results.document["context"].get("digest")

    def keep(case: Case, runs: list[dict]) -> None:
        results.add(str(case), {**runs[-1], "seed": seed, "digest": digest, "runs": runs})

    for case in cases:
        if time.monotonic() - began > FIRST_SHARE * limit:
            break
        found = ask(0, case, seed)
        keep(case, [found])
        done.append(case)
        progress.step(f"{shortened(str(case))}: {found.get('error') or said(found)}")
    for process in range(1, PROCESSES):
        for case in done:
            runs = results.cells[str(case)]["runs"]
            if suspect(results.cells[str(case)]) and len(runs) == process and time.monotonic() - began < limit:
                keep(case, [*runs, ask(process, case, seed)])
    return [str(case) for case in done]


def broken(run: dict) -> list[str]:
    """Claims that failed in one process."""
    return [claim["claim"] for claim in run.get("claims", ()) if claim["broken"]] + ["runs"] * ("error" in run)


def counts(cell: dict) -> dict[str, int]:
    """In how many processes each claim failed."""
    every = [name for run in cell["runs"] for name in broken(run)]
    return {name: every.count(name) for name in dict.fromkeys(every)}


def failed(cell: dict) -> list[str]:
    """Claims that failed in two processes; a wrong result or a crash counts by itself."""
    return [name for name, count in counts(cell).items() if count >= FAILURES or name == "runs"]


def suspect(cell: dict) -> list[str]:
    """Claims that failed, and may fail in two processes yet."""
    left = PROCESSES - len(cell["runs"])
    return [name for name, count in counts(cell).items() if count < FAILURES <= count + left and name != "runs"]


# ---- one shape, inside a worker ----


def cell(case: str, device: str, seconds: float, seed: int = 0, tell: Callable[[Any], None] = print) -> dict[str, Any]:
    """{"chosen", "us" by call, "claims"}; a call is a kernel, with its mode where there are several."""
    problem = Case.parse(case)
    target = _device(device)
    found: dict[str, Any] = {"case": case, "chosen": {}, "refused": {}}
    watches: dict[str, timer.Stopwatch] = {}
    with target.working():
        for mode, variant in modes(problem):
            slots = [operands_of(dataclasses.replace(variant, seed=variant.seed + i), target, guard=0) for i in range(copies(variant, target))]
            found["chosen"][mode] = named(mode, slots[0].picked())
            calls, wrong = right_calls(slots, mode, problem, found["refused"])
            if wrong:
                return found | {"error": f"WRONG: {'; '.join(wrong)}"}
            watches |= {name: timer.Stopwatch(every, target, sample_seconds=seconds / MIN_ROUNDS) for name, every in calls.items()}
        if missing := [name for name in found["chosen"].values() if name not in watches]:
            return found | {"error": f"the choice {', '.join(missing)} did not run: {found['refused'].get(missing[0], 'no kernel')}"}
        return found | timed(watches, found["chosen"], seconds, seed)


@functools.cache
def _device(name: str) -> Cpu | Cuda:
    return devices.open_device(name)


def modes(case: Case) -> Iterator[tuple[str, Case]]:
    """The calls of a shape: of the backward pass in any order and in one; of packed queries of one each also without packing."""
    if case.operation == "backward":
        yield "any order", case.changed(deterministic=False)
        yield "in order", case.changed(deterministic=True)
    else:
        yield "", case
        if other := audited.twin(case):
            yield "unpacked", other


def named(mode: str, kernel: str | None) -> str:
    return f"{kernel} {mode}".strip()


def copies(case: Case, device: Cpu | Cuda) -> int:
    """How many sets of operands a call goes through: several where it reads a cache that other work has pushed out of the GPU's."""
    decoding = case.operation == "serving" or case.operation == "attention" and 16 * case.seq_q <= case.seq_k
    return min(COPIES, timer.slots_for_cold(case.bytes(), device)) if decoding and device.kind == "cuda" else 1


def right_calls(slots: list[Operands], mode: str, case: Case, refused: dict[str, str]) -> tuple[dict[str, list], list[str]]:
    """({name: calls, one a slot} of the kernels that take the problem, what is wrong with results). The choice is among them."""
    device, chosen = slots[0].device, slots[0].picked()
    names = [name for name in implementation.compiled_kernels(device, case.operation)
             if name == chosen or mode != "unpacked" and case.flops() <= SIMPLE.get(name, np.inf)]  # fmt: skip
    found: dict[str, list] = {}
    results: dict[str, Any] = {}
    for name in sorted(names, key=lambda name: name != chosen):
        if mode == "unpacked" and name != chosen:
            continue
        calls = [slot.bound(name, device.default_arrays) for slot in slots]
        slots[0].poison()
        try:
            results[name] = _copied(calls[0]())
            device.synchronize()
        except Exception as error:  # kernels say "not supported" with whatever exception they like
            refused[named(mode, name)] = report.first_line(error)
            continue
        found[named(mode, name)] = calls
    return found, disagreeing(slots[0], results)


def disagreeing(operands: Operands, results: dict[str, Any]) -> list[str]:
    """Of results that differ from the first one's, those that float64 refuses."""
    first, *others = results or [""]
    apart = [name for name in others if not _agree(results[name], results[first], operands.case.dtype)]
    if not apart:
        return []
    judged = {name: operands.judge(results[name]) for name in (first, *apart)}
    return [f"{name}: {'; '.join(found.failures)}" for name, found in judged.items() if not found.passed]


def _copied(result: Any) -> Any:
    if isinstance(result, tuple):
        return tuple(map(_copied, result))
    return result.clone() if hasattr(result, "clone") else result.copy()


def _agree(a: Any, b: Any, dtype: str) -> bool:
    if isinstance(a, tuple):
        return all(_agree(x, y, dtype) for x, y in zip(a, b, strict=True))
    x, y = (array.float() if hasattr(array, "float") else array.astype(np.float32) for array in (a, b))
    apart, norm = float(((x - y) ** 2).sum()) ** 0.5, float((y**2).sum()) ** 0.5
    if not x.shape or 0 in x.shape:
        return True
    furthest, largest = float(abs(x - y).max()), float(abs(y).max())
    return apart <= AGREE[dtype] * norm and furthest <= 8 * AGREE[dtype] * largest


def timed(watches: dict[str, timer.Stopwatch], chosen: dict[str, str], seconds: float, seed: int) -> dict[str, Any]:
    """{"us", "claims"} of calls: first a few samples of all, then rounds of those that claims are about."""
    quick = {name: min(watch.sample() for _ in range(3)) for name, watch in watches.items()}
    groups = {mode: [name for name in watches if in_mode(name, mode)] for mode in chosen}
    near = {name for names in groups.values() for name in names if quick[name] <= NEAR * min(quick[n] for n in names)}
    near |= set(chosen.values())
    if len(near) < 2:
        return {"us": {name: 1e6 * value for name, value in quick.items()}, "claims": []}
    samples = take_rounds({name: watches[name] for name in watches if name in near}, 10 * MIN_ROUNDS, seconds * len(near), seed)
    keep = samples.unthrottled()
    medians = {name: float(np.median(values[keep])) for name, values in samples.seconds.items()}

    def claim(words: str, name: str, against: str, limit: float) -> dict[str, Any]:
        interval, slower = samples.interval(name, against), medians[name] - medians[against]
        return {"claim": words, "calls": [name, against], "limit": limit, "us": slower * 1e6, "ratio": interval.as_dict(),
                "broken": interval.low > limit and slower > LEAST}  # fmt: skip

    claims = []
    for mode, names in groups.items():
        best = min((name for name in names if name in near), key=medians.__getitem__)
        if best != chosen[mode]:
            claims.append(claim("choice" + f", {mode}" * bool(mode), chosen[mode], best, CHOICE))
    if "any order" in chosen:
        claims.append(claim("any order", chosen["any order"], chosen["in order"], ANY_ORDER))
    if "unpacked" in chosen:
        claims.append(claim("packed", chosen[""], chosen["unpacked"], PACKED))
    return {"us": {name: 1e6 * medians.get(name, value) for name, value in quick.items()}, "claims": claims}


def in_mode(name: str, mode: str) -> bool:
    """Whether a call is of this mode; kernels' names have no space."""
    return name.partition(" ")[2] == mode


# ---- what is said ----


def said(cell: dict) -> str:
    """The calls from the fastest on, and the claims that failed."""
    times = ", ".join(f"{name} {us:.4g}" for name, us in sorted(cell["us"].items(), key=lambda item: item[1]))
    return times + "".join(f"; {name} FAILED once" for name in broken(cell))


def show(document: dict) -> None:
    """A table of failed and doubtful claims, and the counts of shapes."""
    rows = []
    for cell in document["cells"]:
        for name in [*failed(cell), *suspect(cell)]:
            verdict = f"accepted: {cell['accepted']}" if cell["accepted"] else "FAIL" if name in failed(cell) else "once"
            claim = next((c for run in reversed(cell["runs"]) for c in run.get("claims", ()) if c["claim"] == name and c["broken"]), None)
            if claim is None:
                rows.append([verdict, name, shortened(cell["case"]), cell.get("error", ""), "", None, None])
                continue
            (slow, fast), ratio = claim["calls"], claim["ratio"]
            us = next(run["us"] for run in reversed(cell["runs"]) if claim in run.get("claims", ()))
            rows.append([verdict, name, shortened(cell["case"]), f"{slow} {us[slow]:.4g}", f"{fast} {us[fast]:.4g}", ratio["ratio"], ratio["low"]])
    where = (document["context"].get("gpu") or {}).get("name") or document["context"]["cpu"]
    if rows:
        report.table(f"choices on {where}, us", ("verdict", "claim", "problem", "slower", "faster", "ratio", "at least"), rows)
    cells = document["cells"]
    bad, excused = (sum(bool(failed(cell)) and bool(cell["accepted"]) == state for cell in cells) for state in (False, True))
    doubtful = sum(bool(suspect(cell)) and not failed(cell) for cell in cells)
    print(f"{where}: {len(cells)} of {document['asked']} shapes asked, {bad} failed, {excused} accepted, {doubtful} failed once and were not asked again")
