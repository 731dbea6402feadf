"""The size of a build in words: its first and last line, and ``python fa_ext/_build.py --count [FOLDER]``, instances, objects
and CPU seconds of each kernel in the sets core and all, and what the objects of a finished build took. Imports nothing of
``fa_ext``."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ENTRY = re.compile(r"Compiling entry function '(\S+)' for '(\S+)'")


@dataclass
class Row:
    """Of one kernel in one set."""

    instances: int = 0
    objects: int = 0
    seconds: float = 0


@dataclass
class Made:
    """Of one kernel in a finished build: CPU seconds, the device's functions by architecture."""

    seconds: float = 0
    functions: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))


def expected(build: Any, options: Any) -> dict[str, Row]:
    """{kernel, or C: its row} of a build with these options."""
    rows: dict[str, Row] = defaultdict(Row)
    for unit in build.plan_units(options)[0]:
        row = rows[unit.kernel if unit.is_cuda else "C"]
        row.instances += unit.count
        row.objects += 1
        row.seconds += build.seconds_of(unit, options)
    return rows


def made(folder: Path) -> dict[str, Made]:
    """{kernel, or C: what its objects took}, from what the compilers printed."""
    found: dict[str, Made] = defaultdict(Made)
    for log in sorted(folder.rglob("*.log")):
        is_cuda = log.with_suffix(".device.json").exists()
        of = found[log.name.partition(".")[0] if is_cuda else "C"]
        seconds = log.with_suffix(".seconds")
        of.seconds += float(seconds.read_text()) if seconds.exists() else 0
        for name, arch in ENTRY.findall(log.read_text()):
            of.functions[arch].add(name)
    return found


def show(build: Any, folder: Path | None) -> None:
    """Prints the table; with a folder of objects also what they took."""
    options = build.options_from_environment()
    by_set = {name: expected(build, replace(options, instances=name)) for name in (build.sets.CORE, build.sets.ALL)}
    took = made(folder) if folder else {}
    core, everything = by_set.values()
    print(f"for {' '.join(options.archs) or 'the CPU alone'}; instances, objects, CPU seconds (expected)")
    print(f"{'kernel':30}{'core':>22}{'all':>22}{'took':>18}" if took else f"{'kernel':30}{'core':>22}{'all':>22}")
    for kernel in sorted(everything, key=lambda k: -everything[k].seconds):
        cells = [f"{r.instances:4} {r.objects:4} {r.seconds:7.0f} s" for r in (core.get(kernel, Row()), everything[kernel])]
        line = f"{kernel:30}{cells[0]:>22}{cells[1]:>22}"
        if kernel in took:
            functions = max(map(len, took[kernel].functions.values()), default=0)
            line += f"{functions:6} functions {took[kernel].seconds:6.1f} s"
        print(line)
    for name, rows in by_set.items():
        objects, seconds = sum(r.objects for r in rows.values()), sum(r.seconds for r in rows.values())
        print(f"{name}: {objects} objects, {seconds:.0f} CPU seconds; limit of core: {build.sets.CORE_SECONDS}")
    if took:
        print(f"took {sum(m.seconds for m in took.values()):.0f} CPU seconds")


def first_line(build: Any, units: list[Any], options: Any) -> str:
    """The first line: what is built for which machine, how long it takes where nothing is built yet, and how to ask for less or more."""
    seconds = sum(build.seconds_of(unit, options) for unit in units)
    size = f"{len(units)} compilations, about {seconds / 60:.0f} CPU minutes, {seconds / 60 / options.jobs:.0f} with {options.jobs} jobs"
    if not options.nvcc:
        return f"fa_ext: for the CPU alone (no nvcc, or FA_CUDA=0): {size}"
    named = {arch for unit in units if unit.is_cuda for arch in build.archs_of(unit.archs, options)}
    return (
        f"fa_ext: CUDA kernels for {' '.join(sorted(named))} by {options.nvcc}, instances {options.instances}: {size}. "
        "Less: FA_CUDA=0 (the CPU alone), FA_ARCHS, FA_INSTANCES=<regex>; more: FA_INSTANCES=all, FA_ARCHS=wheel"
    )


def last_line(left_out: list[str], options: Any) -> str | None:
    """The last line: what a build leaves out; None if nothing."""
    kernels = Counter(name.partition(".")[0] for name in left_out)
    held = ", ".join(f"{count} of {kernel}" for kernel, count in kernels.items())
    return f"fa_ext: FA_INSTANCES={options.instances} leaves out instances that FA_INSTANCES=all has: {held}" if held else None
