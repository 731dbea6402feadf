"""Running the tests, under a sanitizer or alone, and reading what pytest, the sanitizers and the sweeps say."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from bench import machine


def beside(jobs: int) -> dict[str, str]:
    """The environment of a process of this checkout that is one of ``jobs`` side by side: its share of the cores for
    NumPy, OpenMP and torch's compiler. Fourteen processes whose float64 products take sixteen threads each, or that begin 32
    compiler processes each, wait for one another most of the time."""
    path = os.pathsep.join(filter(None, [str(machine.ROOT), os.environ.get("PYTHONPATH")]))
    share = str(max(1, len(os.sched_getaffinity(0)) // jobs))
    names = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS")
    return {**os.environ, "PYTHONPATH": path, **dict.fromkeys(names, share)}


def run_pytest(arguments: list[str], prefix: list[str] | None = None, limit: float = 600.0, jobs: int = 1, gpu: str | None = None,
               environment: dict[str, str] | None = None) -> dict[str, Any]:  # fmt: skip
    """{passed, failed, skipped, seconds, failures: [...], reasons: {reason: count}, sanitizer?} of one pytest run, one of ``jobs``
    side by side, whatever the tree's own options leave out. ``gpu``: the only one it sees, as CUDA_VISIBLE_DEVICES names it; None:
    all."""
    with tempfile.TemporaryDirectory() as folder:
        xml = Path(folder) / "results.xml"
        argv = [*(prefix or []), sys.executable, "-m", "pytest", "-q", "-o", "addopts=--strict-markers", "-p", "no:cacheprovider",
                f"--junitxml={xml}", *arguments]  # fmt: skip
        began = time.monotonic()
        given = {**beside(jobs), "CI": "1", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | (environment or {})
        if gpu is not None:
            given["CUDA_VISIBLE_DEVICES"] = gpu
        try:
            done = subprocess.run(argv, cwd=machine.ROOT, capture_output=True, text=True, timeout=limit, env=given)
        except subprocess.TimeoutExpired:
            return {"error": f"not finished after {limit:.0f} s", "seconds": round(time.monotonic() - began, 1)}
        found = parse_junit(xml.read_text()) if xml.exists() else {"error": _last_words(done.stdout + done.stderr)}
        found["seconds"] = round(time.monotonic() - began, 1)
        if prefix:
            found["sanitizer"] = sanitizer_result(done.stdout + done.stderr)
        return found


def run_shards(suites: dict[str, list[tuple[list[str], str | None]]], jobs: int, ends: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, its counts) of each suite of tests, as it ends. A suite is its shards: pytest's arguments, and the GPU that the
    process sees or None for all of them. They are begun in the order given, ``jobs`` at a time; where one has not begun by
    `ends` (of time.monotonic()) its suite is left out."""

    def run(arguments: list[str], gpu: str | None) -> dict[str, Any] | None:
        left = ends - time.monotonic()
        return run_pytest(arguments, limit=max(30.0, left), jobs=jobs, gpu=gpu) if left > 0 else None

    found: dict[str, list[dict[str, Any] | None]] = {name: [] for name in suites}
    with ThreadPoolExecutor(jobs) as pool:
        running = {pool.submit(run, *shard): name for name, shards in suites.items() for shard in shards}
        for future in as_completed(running):
            name = running[future]
            found[name].append(future.result())
            whole = [part for part in found[name] if part]
            if len(whole) == len(suites[name]):
                yield name, merged(whole) | {"seconds": round(sum(part["seconds"] for part in whole), 1)}


def merged(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The counts of several runs as those of one; a run that did not come to its end is one more failure."""
    total: Counter[str] = Counter(passed=0, failed=0, skipped=0)
    failures, reasons = [], Counter[str]()
    for part in found:
        if "error" in part:
            part = {"failed": 1, "failures": [part["error"]]}
        total.update({name: part.get(name, 0) for name in total})
        failures += part["failures"]
        reasons.update(part.get("reasons", {}))
    return dict(total) | {"failures": failures, "reasons": dict(reasons)}


def _last_words(printed: str) -> str:
    """The output of a process that died: from the interpreter's own report of it on, else the end."""
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
            failures.append(f"{name}: {(wrong.get('message') or '').splitlines()[0][:200] if wrong.get('message') else ''}")
        elif skipped is not None:
            reasons[skipped.get("message") or "no reason given"] += 1
        else:
            passed += 1
    return {"passed": passed, "failed": len(failures), "skipped": sum(reasons.values()), "failures": failures, "reasons": dict(reasons)}


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


def counts(found: dict) -> str:
    """The result of pytest in words."""
    if "error" in found:
        return f"error: {found['error'].splitlines()[-1] if found['error'] else ''}"
    return f"{found['passed']} passed, {found['failed']} failed, {found['skipped']} skipped"
