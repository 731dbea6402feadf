"""What was run where, on which sources: one JSON file a machine under bench/evidence/, made in parts.

  tests      pytest, one test file after another: passed, failed, skipped with reasons
  sanitizer  compute-sanitizer memcheck, racecheck and synccheck on the tests marked `sanitize`, row by row
  sweep      random problems, each judged by float64, row by row
  overhead   python -m bench overhead
  references each framework backend against float64
  measure    rows beside peers, preset by preset

A part that is there for the same sources is kept, so a run may be split (--parts, --filter, --within) and resumed; when
the sources changed, the file is started anew. --check compares the files with the sources and needs neither a GPU nor
the compiled module.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import Any

from bench import device as devices
from bench import arguments, machine, report

SUMMARY = "write or check the committed record of tests and figures"
FOLDER = machine.ROOT / "bench" / "evidence"
PARTS = ("tests", "sanitizer", "sweep", "overhead", "references", "measure")
GPU_PRESETS = {"history": "both", "small": "hot", "gqa": "hot", "decode": "cold", "options": "hot", "extras": "hot",
               "paper": "hot"}  # fmt: skip
# Measured without peers: what an option costs shows only where the call with it and the one without run at like power.
ALONE = ("options",)
CPU_PRESETS = {"cpu": "hot"}
SANITIZERS = ("memcheck", "racecheck", "synccheck")
# Of the bitwise tests on a GPU.
REPEATS = 250
# The sweep of a row: processes side by side, each with a seed of its own, and random problems for each of them.
SWEEP_SEEDS = range(11, 17)
SWEEP_PROBLEMS = 1600
SWEEP_FLOPS = 6e7


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--check", action="store_true", help="say whether the files fit the sources, and stop")
    parser.add_argument("--strict", action="store_true", help="with --check: exit status 1 unless fresh")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"comma-separated: {', '.join(PARTS)}")
    parser.add_argument(
        "--filter",
        type=arguments.pattern,
        default="",
        help="regular expression of test files and of problems to measure",
    )
    parser.add_argument(
        "--rows", type=arguments.pattern, default="", help="regular expression of rows for tests, sanitizer and measure"
    )
    parser.add_argument("--presets", help="comma-separated presets to measure (default: all of the device's)")
    parser.add_argument("--within", type=float, default=3600.0, help="seconds after which no new piece is begun")
    parser.add_argument("--seconds", type=arguments.positive, help="rounds of one measured problem (GPU 1, CPU 8)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is a GPU")
    parser.add_argument("--output", type=Path, help="default: bench/evidence/<machine>.json")
    parser.add_argument("--fresh", action="store_true", help="redo pieces that are there already")


def run(args: argparse.Namespace) -> int:
    if args.check:
        return check(args.strict, args.json)
    unknown = set(parts := [p for p in args.parts.split(",") if p]) - set(PARTS)
    if unknown:
        raise report.UsageError(f"parts are {', '.join(sorted(unknown))}; accepted: {', '.join(PARTS)}")
    device = args.device or ("cuda" if devices.has_gpu() else "cpu")
    record = Record(args.output, device, args.fresh)
    ends = time.monotonic() + args.within
    for part in parts:
        globals()[f"_{part}"](record, args, ends)
    if args.json:
        report.print_json(record.document)
    else:
        print(f"{record.path}: {summary(record.document)}")
    return 0


class Record:
    """The document of one machine, on disk after every piece."""

    def __init__(self, path: Path | None, device: str, fresh: bool = False):
        context = machine.context(device)
        name = (context.get("gpu") or {}).get("name") or context["cpu"]
        self.device, self.fresh = device, fresh
        self.path = path or FOLDER / f"{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}.json"
        self.document: dict[str, Any] = {"digest": context["digest"], "sources": machine.source_hashes(),
                                         "context": context, "parts": {}}  # fmt: skip
        if self.path.exists():
            earlier = json.loads(self.path.read_text())
            if earlier.get("digest") == context["digest"] and earlier.get("context", {}).get("device") == device:
                self.document["parts"] = earlier["parts"]
            else:
                print(f"{self.path.name}: the sources changed; its parts are measured anew", file=sys.stderr)

    def part(self, name: str) -> dict[str, Any]:
        return self.document["parts"].setdefault(name, {})

    def has(self, part: str, key: str) -> bool:
        return key in self.part(part) and not self.fresh

    def add(self, part: str, key: str, piece: Any) -> None:
        piece = dict(piece, date=machine.context("cpu")["date"]) if isinstance(piece, dict) else piece
        self.part(part)[key] = report.plain(piece)
        report.write_json(self.path, self.document)


# ---- the parts ----


def _tests(record: Record, args: argparse.Namespace, ends: float) -> None:
    for file in sorted((machine.ROOT / "tests").glob("test_*.py")):
        if not re.search(args.filter, file.name) or record.has("tests", file.name) or time.monotonic() > ends:
            continue
        repeats = {"repeats": REPEATS} if record.device == "cuda" else {}
        options = [*_rows_option(args.rows), *(f"--{name}={value}" for name, value in repeats.items())]
        found = run_pytest([str(file), *options], limit=max(30.0, ends - time.monotonic())) | repeats
        record.add("tests", file.name, found)
        print(f"tests {file.name}: {_counts(found)}", file=sys.stderr, flush=True)


def _sanitizer(record: Record, args: argparse.Namespace, ends: float) -> None:
    if record.device != "cuda":
        return
    why = sanitizer_unusable()
    if why:
        record.add("sanitizer", "all", {"not_run": why})
        print(f"sanitizer: not run: {why}", file=sys.stderr)
        return
    record.part("sanitizer").pop("all", None)
    from bench import contender

    for row in contender.compiled_rows(devices.open_device("cuda")):
        for tool in SANITIZERS:
            key = f"{tool} {row}"
            if not re.search(args.rows, row) or record.has("sanitizer", key) or time.monotonic() > ends:
                continue
            prefix = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--target-processes", "all"]
            found = run_pytest(["tests", "-m", "sanitize", *_rows_option(f"^{row}$")], prefix,
                               max(60.0, ends - time.monotonic()))  # fmt: skip
            record.add("sanitizer", key, found)
            print(f"sanitizer {key}: {found.get('sanitizer') or _counts(found)}", file=sys.stderr, flush=True)


def _sweep(record: Record, args: argparse.Namespace, ends: float) -> None:
    if record.device != "cuda":
        return
    from bench import contender

    for row in contender.compiled_rows(devices.open_device("cuda")):
        if not re.search(args.rows, row) or record.has("sweep", row) or time.monotonic() > ends:
            continue
        lines = [[sys.executable, "tests/cases.py", "--sweep", str(SWEEP_PROBLEMS), "--seed", str(seed), "--kernel", row,
                  "--limit", str(SWEEP_FLOPS), "--seconds", str(ends - time.monotonic())] for seed in SWEEP_SEEDS]  # fmt: skip
        running = [subprocess.Popen(line, cwd=machine.ROOT, stdout=subprocess.PIPE, text=True) for line in lines]
        found = sweep_result([process.communicate()[0] for process in running])
        record.add("sweep", row, found)
        print(f"sweep {row}: {found['judged']} judged, {found['failed']} failed", file=sys.stderr, flush=True)


def _overhead(record: Record, args: argparse.Namespace, ends: float) -> None:
    if record.device != "cuda" or record.has("overhead", "figures"):
        return
    done = subprocess.run([sys.executable, "-m", "bench", "overhead", "--json"], cwd=machine.ROOT, capture_output=True,
                          text=True, timeout=600)  # fmt: skip
    try:
        figures = json.loads(done.stdout)
    except ValueError:
        figures = {"error": (done.stderr or done.stdout).strip()[-500:]}
    record.add("overhead", "figures", figures if isinstance(figures, dict) else {"figures": figures})


def _references(record: Record, args: argparse.Namespace, ends: float) -> None:
    from bench import references

    if not record.has("references", "errors"):
        record.add("references", "errors", references.collect(record.device, quiet=True))


def _measure(record: Record, args: argparse.Namespace, ends: float) -> None:
    from bench import contender, measure, peers, problems

    target = devices.open_device(record.device)
    rows = [name for name in contender.compiled_rows(target) if re.search(args.rows, name)]
    found, missing = peers.available(target)
    every = GPU_PRESETS if record.device == "cuda" else CPU_PRESETS
    wanted = {name: every.get(name, "hot") for name in args.presets.split(",")} if args.presets else every
    cells = record.part("measure").setdefault("cells", {})

    def keep(key: str, cell: dict) -> None:
        cells[key] = report.plain(cell)
        report.write_json(record.path, record.document)

    for preset, cache in wanted.items():
        for kind in measure.caches(cache):
            cases = [c for c in problems.preset(preset) if re.search(args.filter, str(c))
                     and (args.fresh or not _complete(cells.get(f"{c} {kind}"), rows))]  # fmt: skip
            if not cases or time.monotonic() > ends:
                continue
            seconds = args.seconds or (1.0 if record.device == "cuda" else 8.0)
            opponents = [] if preset in ALONE else [p.name for p in found]
            document = measure.measure(
                record.device, cases, rows, opponents, [kind], 60, seconds, 0.01, missing=missing,
                deadline=lambda: time.monotonic() > ends, on_cell=keep,
            )  # fmt: skip
            record.part("measure")["context"] = document["context"]
            report.write_json(record.path, record.document)


def _complete(cell: dict | None, rows: list[str]) -> bool:
    """Whether a recorded cell holds an answer for every row."""
    return (
        cell is not None
        and "error" not in cell
        and set(rows) <= {*cell.get("contenders", {}), *cell.get("refused", {})}
    )


# ---- running tests ----


def _rows_option(pattern: str) -> list[str]:
    return ["--rows", pattern] if pattern else []


def run_pytest(arguments: list[str], prefix: list[str] | None = None, limit: float = 600.0) -> dict[str, Any]:
    """{passed, failed, skipped, seconds, failures: [...], reasons: {reason: count}, sanitizer?} of one pytest run."""
    with tempfile.TemporaryDirectory() as folder:
        xml = Path(folder) / "results.xml"
        argv = [
            *(prefix or []),
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            f"--junitxml={xml}",
            *arguments,
        ]
        began = time.monotonic()
        try:
            done = subprocess.run(argv, cwd=machine.ROOT, capture_output=True, text=True, timeout=limit,
                                  env={**os.environ, "CI": "1"})  # fmt: skip
        except subprocess.TimeoutExpired:
            return {"error": f"not finished after {limit:.0f} s", "seconds": round(time.monotonic() - began, 1)}
        found = parse_junit(xml.read_text()) if xml.exists() else {"error": _last_words(done.stdout + done.stderr)}
        found["seconds"] = round(time.monotonic() - began, 1)
        if prefix:
            found["sanitizer"] = sanitizer_result(done.stdout + done.stderr)
        return found


def _last_words(printed: str) -> str:
    """What a process that died said: from the interpreter's own report of it on, else the end."""
    fatal = printed.find("Fatal Python error")
    return printed[fatal : fatal + 2000] if fatal >= 0 else printed.strip()[-500:]


def parse_junit(text: str) -> dict[str, Any]:
    """Counts, failures and reasons of skips of a JUnit file."""
    passed, failures = 0, []
    reasons: Counter[str] = Counter()
    for case in ElementTree.fromstring(text).iter("testcase"):
        name = f"{case.get('classname')}.{case.get('name')}"
        wrong = case.find("failure") if case.find("failure") is not None else case.find("error")
        skipped = case.find("skipped")
        if wrong is not None:
            failures.append(
                f"{name}: {(wrong.get('message') or '').splitlines()[0][:200] if wrong.get('message') else ''}"
            )
        elif skipped is not None:
            reasons[skipped.get("message") or "no reason given"] += 1
        else:
            passed += 1
    return {"passed": passed, "failed": len(failures), "skipped": sum(reasons.values()), "failures": failures,
            "reasons": dict(reasons)}  # fmt: skip


def sweep_result(printed: list[str]) -> dict[str, Any]:
    """{judged, failed, not_taken, failures} of what the processes of a sweep printed; one that died counts as failed."""
    total: Counter[str] = Counter(judged=0, failed=0, not_taken=0)
    failures = []
    for text in printed:
        counts = re.search(r"^\S+: (\d+) judged, (\d+) failed, (\d+) not taken$", text, re.MULTILINE)
        if not counts:
            total["failed"] += 1
            failures.append(f"ended early: {text[-300:]}")
            continue
        total.update(dict(zip(("judged", "failed", "not_taken"), map(int, counts.groups()), strict=True)))
        failures += [line.strip() for line in text.splitlines() if line.startswith("  python ")]
    return {**total, "failures": failures}


def sanitizer_unusable() -> str | None:
    """Why compute-sanitizer cannot be used here; None when a trivial kernel runs under it."""
    if shutil.which("compute-sanitizer") is None:
        return "compute-sanitizer is not installed"
    probe = "import numpy, fa_ext; fa_ext.to_numpy(fa_ext.to_device(numpy.ones(8, numpy.float32)))"
    try:
        done = subprocess.run(["compute-sanitizer", "--error-exitcode", "9", sys.executable, "-c", probe], timeout=120,
                              cwd=machine.ROOT, capture_output=True, text=True)  # fmt: skip
    except subprocess.TimeoutExpired:
        return "a trivial program did not end under it within 120 s"
    if done.returncode == 0:
        return None
    lines = [line.strip(" =") for line in (done.stdout + done.stderr).splitlines() if line.strip(" =")]
    telling = [line for line in lines if re.search(r"not supported|rror", line)]
    return (telling or lines or [f"exit status {done.returncode}"])[0][:300]


def sanitizer_result(printed: str) -> str:
    """The tool's own summary line."""
    found = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (.*)", printed)
    return found[-1].strip() if found else "no summary printed"


# ---- reading ----


def _counts(found: dict) -> str:
    if "error" in found:
        return f"error: {found['error'].splitlines()[-1] if found['error'] else ''}"
    return f"{found['passed']} passed, {found['failed']} failed, {found['skipped']} skipped"


def summary(document: dict) -> str:
    """One line: machine, date, tests, sanitizer, cells."""
    parts, context = document["parts"], document["context"]
    where = (context.get("gpu") or {}).get("name") or context["cpu"]
    said = [f"{where}, {context['date']}"]
    if tests := parts.get("tests"):
        total: Counter[str] = Counter()
        for found in tests.values():
            total.update({k: found.get(k, 0) for k in ("passed", "failed", "skipped")})
            total["failed"] += "error" in found
        said.append(_counts(total))
    if sanitizer := parts.get("sanitizer"):
        not_run = sanitizer.get("all", {}).get("not_run")
        clean = sum(str(f.get("sanitizer", "")).startswith("0 ") for f in sanitizer.values())
        said.append(
            f"sanitizer not run: {not_run}" if not_run else f"sanitizer clean in {clean} of {len(sanitizer)} runs"
        )
    if sweep := parts.get("sweep"):
        judged, failed = (sum(found[k] for found in sweep.values()) for k in ("judged", "failed"))
        said.append(f"{judged} random problems judged, {failed} failed")
    if cells := parts.get("measure", {}).get("cells"):
        said.append(f"{len(cells)} cells")
    needed = PARTS if context.get("device") == "cuda" else ("tests", "measure")
    absent = [p for p in needed if not parts.get(p)]
    if absent:
        said.append(f"without {', '.join(absent)}")
    return "; ".join(said)


def check(strict: bool = False, as_json: bool = False, folder: Path = FOLDER) -> int:
    """Prints one line a file: fresh, or stale and why."""
    sources = machine.source_hashes()
    now = machine.digest(sources)
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            document = json.loads(path.read_text())
        except ValueError as error:
            found.append({"file": path.name, "state": "stale", "why": f"not JSON: {error}"})
            continue
        if document.get("identity", {}).get("command") == "score":
            fresh = document["identity"]["digest"] == now
            shares = "  ".join(f"{name} {100 * share:.1f}%" for name, share in document["fast"].items())
            found.append({"file": path.name, "state": "fresh" if fresh else "stale",
                          "why": f"{document['identity']['candidate']} on {len(document['cells'])} problems: {shares}"
                          + ("" if fresh else "; sources have changed since")})  # fmt: skip
        if "digest" not in document or "parts" not in document:
            continue
        recorded = document.get("sources", {})
        changed = sorted(k for k in {*sources, *recorded} if sources.get(k) != recorded.get(k))
        fresh = document["digest"] == now
        why = summary(document) if fresh else f"changed since: {', '.join(changed[:6])}" + (
            f" and {len(changed) - 6} more" if len(changed) > 6 else "")  # fmt: skip
        found.append({"file": path.name, "state": "fresh" if fresh else "stale", "why": why})
    if not found:
        found.append({"file": "", "state": "stale", "why": f"no file in {folder.relative_to(machine.ROOT)}"
                      if folder.is_relative_to(machine.ROOT) else f"no file in {folder}"})  # fmt: skip
    if as_json:
        report.print_json(found)
    else:
        for entry in found:
            print(f"evidence {entry['file']}: {entry['state']}: {entry['why']}".replace(" :", ":"))
    return int(strict and any(entry["state"] != "fresh" for entry in found))


def cells(folder: Path = FOLDER) -> dict[str, dict]:
    """{"<file> <problem> <cache>": cell} of every committed measurement."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        document = json.loads(path.read_text())
        for key, cell in document.get("parts", {}).get("measure", {}).get("cells", {}).items():
            found[f"{path.stem} {key}"] = cell
    return found
