"""``python -m fa_ext``: what this build has, which devices it sees, and whether each kernel works here.

Per kernel the stages build -> load -> launch -> sanity -> correctness -> time, on real input: B1 H8 S512 D64 float16 (S128
for a kernel that is slow on this machine), and for correctness a ragged causal GQA call as well. A line on the terminal says
which stage of which kernel is under way. Exit status 1 if a stage fails, if a kernel refuses that input on the
device it is made for, or if no kernel could run; a kernel whose device is not here is shown as absent and is no failure.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import statistics
import sys
import time
from pathlib import Path

import numpy

STAGES = ("build", "load", "launch", "sanity", "correctness", "time")
TIMED = dict(batch=1, heads=8, heads_kv=8, seq_q=512, seq_k=512, head_dim=64)
SMALL = TIMED | dict(seq_q=128, seq_k=128)
#: Seconds of a call on SMALL from which a kernel is checked on that alone: the same kernel takes 16 times as long on TIMED.
SLOW = 0.004
RAGGED = dict(batch=2, heads=4, heads_kv=2, seq_q=113, seq_k=203, head_dim=64)


def inputs(size, seed=0):
    """q, k, v: float16 (B, H, S, D), random normal."""
    rng = numpy.random.default_rng(seed)
    shapes = [(size["batch"], size[h], size[s], size["head_dim"]) for h, s in
              (("heads", "seq_q"), ("heads_kv", "seq_k"), ("heads_kv", "seq_k"))]  # fmt: skip
    return [rng.standard_normal(shape, numpy.float32).astype(numpy.float16) for shape in shapes]


class Failed(Exception):
    """A stage's own finding; the message says what was wrong."""


def name_of(size):
    """Such as "B1 H8 S512 D64 float16"."""
    return f"B{size['batch']} H{size['heads']} S{size['seq_q']} D{size['head_dim']} float16"


class Progress:
    """One line on the terminal, wiped in the end; nothing where standard error is no terminal."""

    def __init__(self, stream=None):
        self.stream = sys.stderr if stream is None else stream
        self.shown = self.stream.isatty()

    def __call__(self, text):
        if self.shown:
            self.stream.write(f"\r\x1b[K{text}")
            self.stream.flush()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self("")


def launched(kernel, size, put, fa_ext):
    """(the arguments of a call, its out and LSE, poisoned before)."""
    q, k, v = (put(x) for x in inputs(size))
    out, lse = (put(numpy.full(shape, numpy.nan, dtype)) for shape, dtype in ((q.shape, "f2"), (q.shape[:3], "f4")))
    fa_ext.attention(q, k, v, out=(out, lse), kernel=kernel)
    return (q, k, v), out, lse


def right_size(kernel, put, fa_ext):
    """TIMED, or SMALL for a slow kernel."""
    arrays, out, lse = launched(kernel, SMALL, put, fa_ext)  # the first call also loads the kernel
    taken = []
    for _ in range(2):
        start = time.perf_counter()
        fa_ext.attention(*arrays, out=(out, lse), kernel=kernel)
        fa_ext.to_numpy(lse)
        taken.append(time.perf_counter() - start)
    return SMALL if min(taken) > SLOW else TIMED


def check_kernel(kernel, device, fa_ext, no_device, show=lambda stage: None):
    """The stages of one kernel: {"kernel", "device", "status", "stages": {stage: text}, "note", "input", "us", "max_abs", ...};
    ``show`` hears of each stage that begins."""
    result = {"kernel": kernel, "device": device, "status": "ok", "stages": dict.fromkeys(STAGES, "-"), "note": ""}
    stages = result["stages"]
    stages["build"] = "ok"
    if device == "cuda" and no_device:
        return result | {"status": "absent", "note": no_device}
    put = fa_ext.to_device if device == "cuda" else lambda x: x
    stage = "load"
    show(stage)
    try:
        q, k, v = (put(x) for x in inputs(TIMED))
        answer, reason, _ = fa_ext._core.answers(q, k, v, return_lse=True, kernel=kernel)[kernel]
        if answer in ("refuses", "not here"):
            return result | {"status": "absent" if answer == "not here" else "refuses", "note": reason}
        stages["load"] = "ok"

        show(stage := "launch")
        size = right_size(kernel, put, fa_ext)
        (q, k, v), out, lse = launched(kernel, size, put, fa_ext)
        result["input"] = name_of(size)
        host_out, host_lse = fa_ext.to_numpy(out), fa_ext.to_numpy(lse)
        stages["launch"] = "ok"

        show(stage := "sanity")
        for name, array in (("out", host_out), ("the LSE", host_lse)):
            bad = int((~numpy.isfinite(array)).sum())
            if bad:
                raise Failed(f"{bad} of {array.size} elements of {name} are not written or not finite")
        stages["sanity"] = "ok"

        show(stage := "correctness")
        reports = [fa_ext.verify(q, k, v, kernel=kernel)]
        reports.append(fa_ext.verify(*(put(x) for x in inputs(RAGGED, 1)), causal="bottom_right", kernel=kernel))
        worst = max(reports, key=lambda report: (not report.passed, report.max_abs / report.max_abs_bound))
        result |= {"max_abs": worst.max_abs, "max_abs_bound": worst.max_abs_bound, "frobenius": worst.frobenius}
        if not worst:
            raise Failed("; ".join(worst.failures))
        stages["correctness"] = f"{worst.max_abs:.1e} <= {worst.max_abs_bound:.1e}"

        show(stage := "time")
        result["us"] = time_call(lambda: fa_ext.attention(q, k, v, out=out, kernel=kernel), lambda: fa_ext.to_numpy(lse))
        stages["time"] = f"{result['us']:.1f} us{' at S128' if size is SMALL else ''}"
    except (Failed, RuntimeError, ValueError, TypeError, BufferError, MemoryError) as error:
        stages[stage] = "FAILED"
        result |= {"status": "FAILED", "note": f"{type(error).__name__}: {error}".removeprefix("Failed: ")}
    return result


def time_call(call, wait):
    """Microseconds a call: bursts of n and 2n calls differ by n calls, whatever it costs to wait for the last. The median
    of five such differences, or of what a second holds."""

    def burst(count):
        start = time.perf_counter()
        for _ in range(count):
            call()
        wait()
        return time.perf_counter() - start

    once = max(burst(1), 1e-6)
    count = max(1, min(200, int(0.03 / once)))
    burst(count)
    differences, begun = [], time.perf_counter()
    while not differences or (len(differences) < 5 and time.perf_counter() - begun < 1):
        differences.append((burst(2 * count) - burst(count)) / count)
    taken = statistics.median(differences)
    return 1e6 * (taken if taken > 0 else burst(count) / count)  # <= 0: others held the machine meanwhile


def cpu_model() -> str:
    """The name that the CPU gives itself."""
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(\S.*)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine() or "unknown CPU"


def survey():
    """Everything the command shows, as plain values for JSON."""
    import fa_ext
    from fa_ext import _core

    build, devices, no_device = _core.build_info(), [], None
    cpu = _core.cpu_info() | {"name": cpu_model()}
    try:
        devices = [_core.device_info(i) for i in range(_core.device_count())]
        no_device = None if devices else "no CUDA device"
    except fa_ext.CudaError as error:
        no_device = str(error)
    kernels = []
    with Progress() as progress:
        for number, kernel in enumerate(fa_ext.kernels(), 1):

            def show(stage, shown=f"fa_ext: {kernel}, {number} of {len(fa_ext.kernels())} kernels: "):
                progress(shown + stage)

            kernels.append(check_kernel(kernel, build["kernels"][kernel][0], fa_ext, no_device, show))
    return {
        "version": build["version"], "python": platform.python_version(), "numpy": numpy.__version__,
        "cuda": build["cuda"], "chaos": build["chaos"], "toolkit": build["toolkit"], "cpu": cpu, "devices": devices,
        "no_device": no_device, "input": name_of(TIMED), "kernels": kernels, "passed": passes(kernels),
    }  # fmt: skip


def passes(kernels) -> bool:
    """Whether some kernel works, and every other one too or is absent."""
    states = {kernel["status"] for kernel in kernels}
    return "ok" in states and states <= {"ok", "absent"}


def verdict(found) -> str:
    """The last line of the table."""
    if found["passed"]:
        return "every kernel that can run here works"
    if not found["kernels"]:
        return "FAILED: this build has no kernel"
    if all(kernel["status"] == "absent" for kernel in found["kernels"]):
        return "FAILED: no kernel of this build can run here"
    return "FAILED"


def table(found) -> str:
    """The survey as text."""
    with_cuda = f"CUDA {found['toolkit']}" if found["cuda"] else "without CUDA"
    lines = [f"fa_ext {found['version']}, {with_cuda}, Python {found['python']}, NumPy {found['numpy']}"]
    if found["chaos"]:
        lines.append("A chaos build: its CUDA kernels wait at random, and no time means anything")
    simd = f", cpu_simd with {found['cpu']['cpu_simd']}" if found["cpu"]["cpu_simd"] else ""
    lines.append(f"CPU: {found['cpu']['name']}, {found['cpu']['threads']} threads{simd}")
    for device in found["devices"]:
        cc = f"sm_{device['cc']}, {device['sm_count']} multiprocessors, {device['memory_bytes'] / 2**30:.0f} GiB"
        lines.append(f"CUDA device {device['index']}: {device['name']}, {cc}")
    if found["no_device"]:
        lines.append(f"CUDA device: none ({found['no_device']})")
    lines += ["", f"{found['input']}; correctness also on a ragged causal call: largest error <= its bound", ""]
    head = ("kernel", "device", *STAGES, "")
    body = []
    for kernel in found["kernels"]:
        state = "" if kernel["status"] == "ok" else kernel["status"]
        body.append((kernel["kernel"], kernel["device"], *kernel["stages"].values(), state))
    widths = [max(len(line[i]) for line in (head, *body)) for i in range(len(head))]
    for line in (head, *body):
        lines.append("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip())
    notes = [
        f"{kernel['kernel']}: {kernel['note']}" for kernel in found["kernels"] if kernel["note"] and kernel["note"] != found["no_device"]
    ]
    lines += ["", *notes] if notes else []
    lines += ["", verdict(found)]
    return "\n".join(lines)


def main(arguments=None) -> int:
    """Prints the survey. 0, or 1 where it did not pass; 130 when interrupted."""
    parser = argparse.ArgumentParser(prog="python -m fa_ext", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--json", action="store_true", help="print the survey as JSON")
    given = parser.parse_args(arguments)
    try:
        found = survey()
    except KeyboardInterrupt:
        return 130
    except ValueError as error:  # a variable of the environment
        print(f"fa_ext: {error}", file=sys.stderr)
        return 1
    print(json.dumps(found, indent=1) if given.json else table(found))
    return 0 if found["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
