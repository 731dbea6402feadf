"""Variants of a kernel for the tuner: built with other macros, and evaluated in a worker beside the hand-set build."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench import machine
from bench.implementations import implementation
from bench.machine import device as devices
from bench.problems import Case
from bench.problems.operands import Operands
from bench.timing import timer
from bench.timing.rounds import take_rounds
from bench.trial import trials
from bench.tuning.spaces import SPACES, Config, Space

# Inputs that a variant must survive before it is timed.
VALUES = ("normal", "sorted", "large")
_alive: list[Any] = []


@dataclass(frozen=True)
class Built:
    """A shared library, or why there is none. `notes` are spills and the like from the compiler's report."""

    library: Path | None
    reason: str = ""
    notes: str = ""


def sources_digest(space: Space) -> str:
    """Hash of everything a variant of this kernel is compiled from; a variant does not see what the tuner wrote."""
    from bench.machine.build import rules

    tables = {other.table for other in SPACES.values()}
    instances = {instance.source for instance in rules.directives(space.source).instances.values()} - {None}
    files = [space.source, *instances, machine.ROOT / "fa_ext" / "_build.py"]
    for folder in ("csrc", "kernels") if space.device == "cuda" else ("csrc",):
        files += [f for f in (machine.ROOT / folder).rglob("*") if f.suffix in (".h", ".cuh") and f not in tables]
    return hashlib.sha256(b"".join(f.read_bytes() for f in sorted(files))).hexdigest()[:16]


def build(space: Space, config: Config, folder: Path | None = None) -> Built:
    """Compiles one configuration; a compiler's refusal is a result."""
    from bench.machine.build import rules

    try:
        library = implementation.build_kernel(space.source, space.flags(config), folder)
    except rules.BuildError as error:
        lines = [line for line in str(error).splitlines() if re.search(r"error|assert", line, re.IGNORECASE)]
        return Built(None, (lines or str(error).splitlines() or ["compiler failed"])[-1].strip()[:300])
    spills = 0
    for log in library.with_suffix(".objects").glob("*.log"):
        spills += sum(int(n) for n in re.findall(r"(\d+) bytes spill", log.read_text()))
    return Built(library, notes=f"{spills} bytes of spills" if spills else "")


def build_each(space: Space, configs: Iterable[Config], folder: Path | None = None) -> Iterator[tuple[Config, Built]]:
    """Compiles side by side and yields in order, each as soon as it is there: the caller measures while the rest still
    compile. One variant compiles its own units in turn."""
    configs = list(configs)
    jobs = os.environ.get("MAX_JOBS")
    os.environ["MAX_JOBS"] = "1"
    try:
        with ThreadPoolExecutor(max_workers=int(jobs or devices.cores())) as pool:
            yield from zip(configs, pool.map(lambda config: build(space, config, folder), configs), strict=True)
    finally:
        if jobs is None:
            os.environ.pop("MAX_JOBS", None)
        else:
            os.environ["MAX_JOBS"] = jobs


def evaluate(library: str, anchor: str, case: str, device: str, rounds: int, seconds: float, seed: int,
             tell: Callable[[Any], None] = print) -> dict[str, Any]:  # fmt: skip
    """Inside the worker: checks the variant, then times it in rounds with the anchor (the hand-set build).

    {us, anchor_us, ratio: interval, frobenius, max_abs} or {error}. Ratios to an anchor of the same rounds compare
    across hours and clocks; microseconds do not.
    """
    if not _alive:
        _alive.append(devices.open_device(device))
    target, problem = _alive[0], Case.parse(case)
    timed = {}
    for name, path in (("anchor", anchor), ("variant", library)):
        timed[name] = implementation.Kernel(implementation.load_kernel(Path(path)), target.default_arrays, shown=name)
    tell({"stage": "trials"})
    checked = trials.check(timed["variant"], problem, target, seed, VALUES)
    if not checked.passed:
        return {"error": checked.failures[0]}
    tell({"stage": "timing"})
    with target.working():
        operands = Operands(problem, target)
        watches = {name: timer.Stopwatch([e.bind(operands)], target, e.timing) for name, e in timed.items()}
        samples = take_rounds(watches, rounds, seconds, seed, tight=0.004, against="anchor")
    return {
        "us": float(np.median(samples.seconds["variant"])) * 1e6, "anchor_us": float(np.median(samples.seconds["anchor"])) * 1e6,
        "ratio": samples.interval("variant", "anchor").as_dict(), "clock": watches["variant"].clock, "frobenius": checked.frobenius,
        "max_abs": checked.max_abs,
    }  # fmt: skip


def identity(space: Space, case: str, device: str) -> dict[str, Any]:
    """The key of a cached evaluation: sources, flags, compiler, driver, machine, problem."""
    from bench.machine.build import rules

    context = machine.context(device)
    options = rules.options_from_environment()
    return {
        "command": "tune", "row": space.kernel, "case": case, "sources": sources_digest(space), "fixed": space.fixed,
        "archs": list(options.archs), "compiler": context.get("nvcc") or context["gcc"], "cpu": context["cpu"],
        "threads": context["threads"], "gpu": context.get("gpu"),
    }  # fmt: skip


def table(space: Space, document: dict[str, Any]) -> str:
    """The winner of a run as the header that the kernel's configuration includes, with the measurement behind it."""
    final, ratio = document["final"], document["final"]["ratio"]
    kept = ", which stands" if document["winner"] == document["hand_set"] else ""
    guard = "FA_" + re.sub(r"[^A-Z0-9]", "_", space.table.name.upper())
    once = space.table.suffix == ".cuh"  # as kernels/ has it; headers of C have guards
    opening = ["#pragma once", ""] if once else [f"#ifndef {guard}", f"#define {guard}", ""]
    closing = [] if once else ["", "#endif"]
    return "\n".join([
        f"/* Written by `python -m bench tune {space.kernel} --write`, not by hand; the run: "
        f"bench/evidence/tune-{space.kernel}.json.",
        f" * {document['identity']['case']} on {document['where']}, {document['date']}: {final['us']:.4g} us,",
        f" * {ratio['ratio']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}] of the time of the configuration set by "
        f"hand{kept};",
        f" * error against float64 {final['frobenius']:.2e}; {document['evaluated']} of {document['space']} "
        f"configurations tried; sources {document['identity']['sources']}. */",
        *opening, *space.render({**space.fixed, **document["winner"]}), *closing, "",
    ])  # fmt: skip
