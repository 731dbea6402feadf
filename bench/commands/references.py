"""Which reference is off, and by how much? Each framework backend against float64 on the same inputs.

A kernel that "differs from SDPA" may be the one that is right. This prints, for the versions installed, the largest and
the relative Frobenius error of every backend, whether it keeps to the bounds that kernels of fa_ext are held to, and at the
end for each backend and dtype how its error compares with that of matmul, softmax, matmul in the same precision.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import arguments, machine, problems, report
from bench.implementations import implementation, named, peers
from bench.machine import device as devices
from bench.problems import Case
from bench.problems.operands import Operands, WrongResult
from bench.trial import isolation

SUMMARY = "errors of each framework backend against float64"
# Ordinary inputs, and those on which implementations part: large scores, a common offset of V, growing maxima.
VALUES = ("normal", "large", "offset", "sorted")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--case", action="append", help="a problem by its line (repeatable)")
    parser.add_argument("--kernels", action="store_true", help="kernels of fa_ext beside the peers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="JSON file; resumed if it is of the same machine code and options")
    arguments.common(parser, "device", "fresh")


def default_cases(device: str) -> list[Case]:
    dtypes = ("float16", "bfloat16", "float32")
    sizes = ((1, 8, 512, 64), (2, 8, 1024, 128)) if device == "cuda" else ((1, 4, 256, 64),)
    return [Case(b, h, h, s, s, d, dtype=t, causal=causal) for b, h, s, d in sizes for t in dtypes for causal in (False, True)]


def run(args: argparse.Namespace) -> int:
    device = args.device or devices.default()
    cases = [problems.parse(text) for text in args.case] if args.case else None
    report.deliver(collect(device, cases, args.kernels, args.seed, args.json, args.output, args.fresh), args.json, show)
    return 0


def collect(
    device: str, cases: list[Case] | None = None, kernels: bool = False, seed: int = 0, quiet: bool = False,
    output: Path | None = None, fresh: bool = False,
) -> dict:  # fmt: skip
    """{"cells": {problem: {"errors": [one entry for each kind of inputs and backend]}}, "summary", "context", ...}.

    Problems that `output` holds already are not run again; a problem whose worker ended early is.
    """
    target = devices.open_device(device)
    found, missing = peers.available(target)
    names = [p.name for p in found if "attention" in p.operations] + (list(implementation.compiled_kernels(target)) if kernels else [])
    context = machine.context(device)
    identity = {"command": "references", "digest": context["digest"], "versions": context["versions"],
                "device": device, "names": names, "seed": seed}  # fmt: skip
    results = report.Results(output, identity, context | {"missing_peers": missing}, fresh)
    todo = [case for case in cases or default_cases(device) if not judged_already(results.cells.get(str(case)))]
    progress = report.Progress(len(todo), quiet)
    with isolation.Worker() as worker:
        for case in todo:
            asked = {"case": str(case), "device": device, "names": names, "seed": seed}
            outcome = worker.call("bench.commands.references:errors", asked, 300)
            found = outcome.value if outcome.ok else [{"case": str(case), "refused": outcome.reason}]
            results.add(str(case), {"errors": found})
            progress.step(str(case))
    results.document["summary"] = summarize(every_entry(results.document))
    results.save()
    return results.document


def judged_already(cell: dict | None) -> bool:
    return cell is not None and all("name" in entry for entry in cell["errors"])


def every_entry(document: dict) -> list[dict]:
    """Every entry of a document of this command, in the order of its problems."""
    return [entry for cell in document["cells"].values() for entry in cell["errors"]]


def summarize(errors: list[dict]) -> list[dict]:
    """For each backend and dtype: problems judged, how many outside the bounds, and the median and largest of its
    relative Frobenius error over that of a plain computation in the same precision."""
    groups: dict[tuple[str, str], list[dict]] = {}
    for e in errors:
        if "frobenius" in e:
            groups.setdefault((e["name"], Case.parse(e["case"]).dtype), []).append(e)
    found = []
    for (name, dtype), entries in groups.items():
        ratios = [e["frobenius"] / max(e["plain"], 1e-300) for e in entries]
        worst = entries[ratios.index(max(ratios))]
        outside = sum(not e["within"] for e in entries)
        found.append({"name": name, "dtype": dtype, "judged": len(entries), "outside": outside,
                      "median": statistics.median(ratios), "largest": max(ratios),
                      "at": f"{worst['case']}, {worst['values']} inputs"})  # fmt: skip
    return found


def errors(case: str, device: str, names: list[str], seed: int, tell: Callable[[Any], None] = print) -> list[dict]:
    """One problem with each kind of inputs: what each implementation errs by."""
    target = devices.open_device(device)
    found = []
    for values in VALUES:
        with target.working():
            operands = Operands(dataclasses.replace(Case.parse(case), values=values, seed=seed), target)
            for name in names:
                one = named.open_implementation(name, target)
                entry: dict[str, Any] = {"case": case, "values": values, "name": name}
                found.append(entry)
                if refusal := one.refuses(operands.case):
                    entry["refused"] = refusal
                    continue
                try:
                    judged = one.judged_on(operands)
                except WrongResult as error:
                    entry["refused"] = f"WRONG: {error}"
                except Exception as error:  # libraries say "not supported" with whatever exception they like
                    entry["refused"] = report.first_line(error, 200)
                else:
                    entry |= {"max_abs": judged.max_abs, "bound": judged.max_abs_bound, "frobenius": judged.frobenius,
                              "plain": judged.plain_frobenius, "within": judged.passed,
                              "worst": judged.worst}  # fmt: skip
    return found


def show(document: dict) -> None:
    rows = [
        [e["case"], e["values"], e["name"], e["frobenius"], e["max_abs"], e["bound"], e["plain"],
         "yes" if e["within"] else "NO"]
        for e in every_entry(document) if "frobenius" in e
    ]  # fmt: skip
    columns = ("problem", "inputs", "backend", "Frobenius", "max abs", "bound", "plain's Frobenius", "within")
    versions = ", ".join(f"{k} {v}" for k, v in document["context"]["versions"].items())
    report.table(f"errors against float64 ({versions})", columns, rows)
    columns = ("backend", "dtype", "judged", "outside the bounds", "error / plain's: median", "largest", "at")
    report.table("in short: relative Frobenius errors over those of a plain computation in the same precision", columns,
                 [list(s.values()) for s in document["summary"]])  # fmt: skip
    for e in every_entry(document):
        if "refused" in e and e.get("values", "normal") == "normal":
            print(f"  {e.get('name', '')} {e['case']}: {e['refused']}")
