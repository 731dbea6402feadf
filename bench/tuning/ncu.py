"""One kernel and problem under Nsight Compute, read into a short table with one line on what limits it.

ncu runs a small driver (this module as a script) with --clock-control none, so that the clocks are those that the
measurements saw. Where ncu is missing or may not read the counters, the command says so and exits with status 3.

  python -m bench profile wgmma_sm90 --case B1,H16,S16384,D128,bfloat16,causal=True --keep report.ncu-rep
"""

from __future__ import annotations

import argparse
import csv
import io
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench import machine, problems, report

SUMMARY = "one kernel and problem under Nsight Compute, as a short table"

# metric: (what it is called here, unit)
METRICS = {
    "gpu__time_duration.sum": ("time", "us"),
    "smsp__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active": ("tensor pipe", "%"),  # wgmma counts by cycles
    "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active": ("MUFU pipe", "%"),
    "sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active": ("FMA pipe", "%"),
    "sm__inst_executed.avg.pct_of_peak_sustained_active": ("issue slots", "%"),
    "lts__t_sectors.avg.pct_of_peak_sustained_elapsed": ("L2", "%"),
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": ("DRAM", "%"),
    "dram__bytes.sum": ("DRAM traffic", "MB"),
    "l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_active": ("shared memory", "%"),
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum": ("bank conflicts", ""),
    "sm__warps_active.avg.pct_of_peak_sustained_active": ("occupancy", "%"),
    "launch__registers_per_thread": ("registers a thread", ""),
    "launch__shared_mem_per_block_dynamic": ("dynamic shared memory", "KB"),
    "launch__block_size": ("threads a block", ""),
    "launch__grid_size": ("blocks", ""),
    "launch__waves_per_multiprocessor": ("waves", ""),
}
STALLS = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
STALL_NAMES = (
    "barrier", "branch_resolving", "dispatch_stall", "drain", "gmma", "imc_miss", "lg_throttle", "long_scoreboard",
    "math_pipe_throttle", "membar", "mio_throttle", "no_instruction", "not_selected", "selected", "short_scoreboard",
    "sleeping", "tex_throttle", "wait", "warpgroup_arrive",
)  # fmt: skip
# Above this share of its peak a unit counts as the limiter.
BUSY = 60.0
_TO_UNIT = {
    ("ns", "us"): 1e-3, ("us", "us"): 1.0, ("usecond", "us"): 1.0, ("nsecond", "us"): 1e-3, ("msecond", "us"): 1e3,
    ("ms", "us"): 1e3, ("byte/block", "KB"): 1 / 1024, ("Kbyte/block", "KB"): 1.0, ("byte", "KB"): 1 / 1024,
    ("byte", "MB"): 1e-6, ("Kbyte", "MB"): 1e-3, ("Gbyte", "MB"): 1e3,
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("candidate", help="a kernel, or any other candidate as in bench gate")
    parser.add_argument("--case", default="B1,H8,S512,D64,float16", help="the problem")
    parser.add_argument("--kernel", default="", help="regular expression of kernel names (default: the longest kernel)")
    parser.add_argument("--ncu", default="ncu", help="the profiler (ncu)")
    parser.add_argument("--keep", type=Path, help="keep ncu's report under this name")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds at most (180)")
    parser.add_argument("--output", type=Path, help="write the figures to this JSON file")


def run(args: argparse.Namespace) -> int:
    problems.parse(args.case)
    document = profile(args.candidate, args.case, args.ncu, args.kernel, args.keep, args.limit)
    report.deliver(document, args.json, show, args.output)
    return 0


def profile(candidate: str, case: str, ncu: str = "ncu", kernel: str = "", keep: Path | None = None, limit: float = 180.0) -> dict[str, Any]:
    """{"kernels": [{name, figures, stalls, reading}], ...} of one call after two warm-up calls."""
    path = shutil.which(ncu)
    if path is None:
        raise report.UsageError(f"{ncu} is not installed here (Nsight Compute); give its path with --ncu")
    metrics = [*METRICS, *(STALLS.format(name) for name in STALL_NAMES)]
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "report"
        argv = [
            path, "--clock-control", "none", "--profile-from-start", "off", "--metrics", ",".join(metrics), "--export",
            str(saved), "--force-overwrite", sys.executable, "-m", "bench.tuning.ncu", candidate, case,
        ]  # fmt: skip
        try:
            done = subprocess.run(argv, cwd=machine.ROOT, capture_output=True, text=True, timeout=limit)
        except subprocess.TimeoutExpired:
            raise report.UsageError(f"ncu did not finish within {limit:.0f} s") from None
        made = saved.with_suffix(".ncu-rep")
        if done.returncode or not made.exists():
            raise report.UsageError(refusal(done.stdout + done.stderr))
        if keep:
            shutil.copyfile(made, keep)
        printed = subprocess.run([path, "--import", str(made), "--page", "raw", "--csv"], capture_output=True, text=True)
    kernels = [k for k in parse(printed.stdout) if re.search(kernel, k["name"])]
    if not kernels:
        raise report.UsageError(f"no kernel of this call matches {kernel!r}")
    return {"candidate": candidate, "case": case, "context": machine.context("cuda"), "kernels": kernels}


def refusal(printed: str) -> str:
    """Why ncu gave no report, in its own words and what to do about it."""
    lines = [line.strip("= ") for line in printed.splitlines() if line.strip("= ")]
    telling = [line for line in lines if re.search(r"ERR_NVGPUCTRPERM|rror|ailed|not supported", line)]
    said = (telling or lines or ["nothing was printed"])[0]
    hint = (": reading the counters needs administrator rights (NVIDIA's ERR_NVGPUCTRPERM page)" if "PERM" in said else "")
    return f"ncu made no report: {said}{hint}"


def parse(text: str) -> list[dict[str, Any]]:
    """Kernels of ncu's ``--page raw --csv``: a header row, a row of units, one row a launch."""
    begin = text.find('"ID"')
    if begin < 0:
        return []
    rows = list(csv.DictReader(io.StringIO(text[begin:])))
    if len(rows) < 2:
        return []
    units, launches = rows[0], rows[1:]
    kernels = []
    for launch in launches:
        figures = {}
        for metric, (name, unit) in METRICS.items():
            value = _number(launch.get(metric))
            if value is not None:
                figures[name] = value * _TO_UNIT.get((units.get(metric, ""), unit), 1.0)
        stalls = {name: _number(launch.get(STALLS.format(name))) for name in STALL_NAMES}
        found = {k: v for k, v in stalls.items() if v and k not in ("selected", "not_selected")}
        top = dict(sorted(found.items(), key=lambda item: -item[1])[:4])
        kernels.append({"name": launch.get("Kernel Name", "?"), "figures": figures, "stalls": top, "reading": reading(figures, top)})
    return sorted(kernels, key=lambda k: -k["figures"].get("time", 0.0))


def _number(text: str | None) -> float | None:
    try:
        return float((text or "").replace(",", ""))
    except ValueError:
        return None


def reading(figures: dict[str, float], stalls: dict[str, float]) -> str:
    """One line: what limits the kernel."""
    units = {n: figures[n] for n in ("tensor pipe", "MUFU pipe", "FMA pipe", "issue slots", "shared memory", "L2", "DRAM") if n in figures}
    if not units:
        return "no utilisation was read"
    name, share = max(units.items(), key=lambda item: item[1])
    most = next(iter(stalls), None)
    waits = f"; warps wait most on {most.replace('_', ' ')} ({stalls[most]:.2g} a slot)" if most else ""
    if share >= BUSY:
        return f"limited by {name} ({share:.0f}% of its peak){waits}"
    if figures.get("waves", 1.0) < 0.9:
        return f"too few blocks: {figures['waves']:.2f} waves, busiest unit {name} at {share:.0f}%{waits}"
    return f"limited by latency: the busiest unit, {name}, reaches {share:.0f}%{waits}"


def show(document: dict) -> None:
    for kernel in document["kernels"]:
        units = {name: unit for name, unit in METRICS.values()}
        rows = [[name, value, units[name]] for name, value in kernel["figures"].items()]
        rows += [[f"stall: {name.replace('_', ' ')}", value, "warps a slot"] for name, value in kernel["stalls"].items()]
        report.table(f"{kernel['name'][:100]} ({document['candidate']}, {document['case']})", ("figure", "value", "unit"), rows)
        print(f"  {kernel['reading']}")


def _drive(candidate: str, case: str) -> None:
    """The program that ncu runs: two calls to warm up, one between cudaProfilerStart and Stop."""
    from bench.implementations import named
    from bench.machine import device as devices
    from bench.problems.operands import Operands

    target = devices.Cuda()
    with target.working():
        operands = Operands(problems.parse(case), target)
        call = named.open_implementation(candidate, target).bind(operands)
        call()
        call()
        target.synchronize()
        runtime = target.torch.cuda.cudart() if target.torch else target.cupy.cuda.runtime
        start, stop = ("cudaProfilerStart", "cudaProfilerStop") if target.torch else ("profilerStart", "profilerStop")
        getattr(runtime, start)()
        call()
        target.synchronize()
        getattr(runtime, stop)()


if __name__ == "__main__":
    _drive(sys.argv[1], sys.argv[2])
