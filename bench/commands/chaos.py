"""Runs every CUDA kernel under random delays: the tests of a chaos build, in processes that may hang.

A build with FA_CHAOS=1 delays warps at random wherever a kernel synchronises and ends a wait that lasts two seconds
(kernels/common/chaos.cuh). This command runs a kernel's contract and the cases of tests/kernels/test_chaos.py there, in batches of a
process and a seed each, and says which waits ended. Exit status 0 when every test of every kernel ran and passed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench import arguments, machine, report
from bench.machine import device as devices
from bench.recording import record, suites

SUMMARY = "run the kernels of a chaos build (FA_CHAOS=1) under random delays"
FILES = ("contract/test_contract.py", "contract/test_serving.py", "kernels/test_chaos.py")
BACKWARD_FILES = ("contract/test_backward.py", "contract/test_backward_numerics.py", "contract/test_packed_backward.py",
                  "contract/test_packed_backward_bits.py", "kernels/test_chaos.py")  # fmt: skip
OWN_FILE = "kernels/test_{kernel}.py"  # of a kernel that has tests of its own


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kernel", type=arguments.pattern, default="", help="regular expression of kernels")
    parser.add_argument("--seeds", type=arguments.count, default=1, help="rounds, each with other delays (default 1)")
    parser.add_argument("--tests", type=arguments.pattern, default="", help="regular expression of test files")
    parser.add_argument("--batches", type=arguments.count, default=4, help="processes a kernel's file is dealt to")
    parser.add_argument("--jobs", type=arguments.count, default=4, help="processes at a time")
    parser.add_argument("--limit", type=arguments.positive, default=240.0, help="seconds a process may take")
    parser.add_argument("--within", type=arguments.positive, default=3600.0, help="seconds after which no new process is begun")
    parser.add_argument("--output", type=Path, help="write the result as JSON, kernel after kernel")


def run(args: argparse.Namespace) -> int:
    kernels, ends = chosen(args.kernel), time.monotonic() + args.within
    batches = list(plan(kernels, args.tests, args.seeds, args.batches))
    waiting, pieces = Counter(kernel for kernel, *_ in batches), {kernel: empty() for kernel in kernels}
    context = machine.context("cuda")
    where = {"device": "cuda", "name": (context["gpu"] or {}).get("name", "an unknown GPU")}
    document = {"part": "chaos", "machine": where, "context": context, "date": machine.now(), "sources": machine.source_hashes(), "pieces": {}}

    def found_in(batch: tuple[str, int, str, int, int]) -> dict[str, Any] | None:
        return run_batch(*batch, limit=args.limit) if time.monotonic() < ends else None

    with ThreadPoolExecutor(args.jobs) as pool:
        for (kernel, seed, *_), found in zip(batches, pool.map(found_in, batches)):
            if found is None:
                continue
            add(pieces[kernel], seed, found)
            waiting[kernel] -= 1
            if not waiting[kernel]:  # a kernel of which a part has run is not said to have held
                document["pieces"][kernel] = pieces[kernel]
                if args.output:
                    report.write_json(args.output, document)
    report.deliver(document, args.json, show, args.output)
    if late := [kernel for kernel, count in waiting.items() if count]:
        print(f"not come to an end within {args.within:.0f} s: {', '.join(late)}", file=sys.stderr)
    return int(bool(late) or any(piece["failed"] for piece in pieces.values()))


def chosen(pattern: str) -> list[str]:
    """The CUDA kernels of this build whose names match, those of merge and append left out, which have no barrier between
    warps; UsageError where there is nothing to run."""
    from fa_ext import _core

    info = _core.build_info()
    if not info["chaos"]:
        raise report.UsageError("this is no chaos build: build with FA_CHAOS=1")
    if not devices.has_gpu():
        raise report.UsageError("there is no GPU here")
    others = record.other_kernels("cuda")
    cuda = [name for name, (device, _) in info["kernels"].items() if device == "cuda" and "chaos" in others.get(name, ["chaos"])]
    found = [name for name in cuda if re.search(pattern, name)]
    if not found:
        raise report.UsageError(f"no kernel matches {pattern!r}; accepted: {', '.join(cuda)}")
    return found


def plan(kernels: list[str], tests: str, seeds: int, batches: int) -> Iterator[tuple[str, int, str, int, int]]:
    """(kernel, seed, test file, batch, batches) of every process, those with few tests in one."""
    others = record.other_kernels("cuda")
    for kernel in kernels:
        files, own = BACKWARD_FILES if kernel in others else FILES, OWN_FILE.format(kernel=kernel)
        for seed in range(1, seeds + 1):
            for file in (*files, *([own] if (machine.ROOT / "tests" / own).exists() else [])):
                if re.search(tests, file):
                    count = 1 if file == files[-1] else batches
                    yield from ((kernel, seed, file, batch, count) for batch in range(count))


def run_batch(kernel: str, seed: int, file: str, batch: int, batches: int, limit: float) -> dict[str, Any]:
    """The findings of one process: counts, failures, and the wait that ended, if one did."""
    with tempfile.TemporaryDirectory() as folder:
        hung = Path(folder) / "hung.json"
        asked = [f"tests/{file}", "--of", kernel, "--shard", f"{batch}/{batches}", "--repeats", "8"]
        environment = {"FA_CHAOS_SEED": str(seed), "FA_CHAOS_HUNG": str(hung), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2")}
        ran = suites.run_pytest(asked, limit=limit, environment=environment)
        found = suites.merged([ran]) | {"seconds": ran["seconds"], "hung": json.loads(hung.read_text()) if hung.exists() else None}
    print(f"{kernel} {file} {batch + 1}/{batches} seed {seed}: {found['passed']} passed, {found['failed']} failed"
          + (f"; a wait ended: {found['hung']}" if found["hung"] else ""), file=sys.stderr, flush=True)  # fmt: skip
    return found


def empty() -> dict[str, Any]:
    return {"passed": 0, "failed": 0, "skipped": 0, "seconds": 0.0, "seeds": [], "hangs": [], "failures": []}


def add(piece: dict[str, Any], seed: int, found: dict[str, Any]) -> None:
    """Adds what one process found to what is known of its kernel; of many failures the first few are kept."""
    for key in ("passed", "failed", "skipped"):
        piece[key] += found[key]
    piece["seconds"] = round(piece["seconds"] + found["seconds"], 1)
    piece["seeds"] = sorted({*piece["seeds"], seed})
    piece["hangs"] += [found["hung"]] if found["hung"] else []
    piece["failures"] = (piece["failures"] + found["failures"])[:5]


def show(document: dict[str, Any]) -> None:
    rows = [(kernel, p["passed"], p["failed"], p["skipped"], len(p["seeds"]), len(p["hangs"]),
             "; ".join(f"line {h['site']}, warp {h['warp']}, block {h['block']}, phase {h['phase']}" for h in p["hangs"]))
            for kernel, p in document["pieces"].items()]  # fmt: skip
    report.table("Under random delays", ("kernel", "passed", "failed", "skipped", "seeds", "hangs", "waits that ended"), rows)
