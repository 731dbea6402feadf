"""Every CUDA kernel under load: does each call end, with the bits of the call made alone, and is no memory lost?

Threads with two streams each call one kernel on problems of many shapes and options, beside copies of 1 GiB,
elementwise kernels, matrix products, allocations and replays of captured calls. Each 11th result is compared on its
stream, bit for bit but for dq of a kernel that adds it up in any order. The load runs in a process of its own, one after
another for each kernel; this one watches: where a stream makes no progress for 10 s it names kernel, problem and stream,
ends that process and goes on with the next kernel. The exit status is 1 unless every kernel is sound.

  python -m bench soak                         all kernels, five minutes in all
  python -m bench soak --kernel wgmma --minutes 2
  python -m bench soak --preset hang --minutes 1   four causal problems in one stream beside copies, a minute each
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
from typing import Any

from bench import arguments, machine, problems, report
from bench.implementations import implementation
from bench.load.streams import LOADS, OPERATIONS
from bench.load.watchdog import Watchdog
from bench.machine import device as devices
from bench.trial import isolation

SUMMARY = "call kernels on many streams beside other work, and watch for hangs, wrong bits and lost memory"

# 16k tokens, 2048 hidden, causal: on these a protocol of wgmma_sm90 that let warps fall two phases behind hung, within
# seconds to minutes.
HANG = (
    "B32,H32,S512,D64,bfloat16,causal=True",
    "B16,H32,S1024,D64,bfloat16,causal=True",
    "B4,H32,S4096,D64,bfloat16,causal=True",
    "B18,H8,S900,D256,bfloat16,causal=True",
)
# Warpgroups whose rows lie past the last query or see no block or one, ragged tiles, each option, grouped heads, few
# queries over many keys, rows without keys; small ones, too, for kernels that are slow.
CASES = (
    *HANG, "B4,H8,S700,D128,bfloat16,causal=True", "B1,H8,S4000,D128,bfloat16,causal=True",
    "B8,H32,S128,D64,bfloat16,causal=True", "B8,H8,S64,D256,bfloat16,causal=True",
    "B8,H16,S64x128,D128,bfloat16,causal=bottom_right", "B4,H8,S512,D96,float16,causal=True", "B2,H8,S1000,D96,bfloat16",
    "B4,H8,S700,D192,bfloat16,causal=True", "B2,H8,S511,D192,float16", "B2,H8,S1023,D128,bfloat16,window=127:0",
    "B2,H8,S1500,D64,float16,causal=True,window=300:none", "B2,H8,S777,D128,bfloat16,causal=True,softcap=30.0",
    "B2,H8,S640,D64,float16,softcap=20.0", "B2,H8,S900,D64,bfloat16,causal=True,sinks=float32",
    "B2,H32/4,S600,D128,bfloat16,causal=True", "B2,H8,S512,D128,bfloat16,causal=True,layout=bshd",
    "B2,H16/2,S1x4096,D128,bfloat16", "B4,H32/8,S3x2000,D64,float16,causal=bottom_right", "B1,H8,S512,D64,float16",
    "B1,H8,S1024,D64,float16,causal=True", "B1,H16,S512,D128,float16,causal=True", "B4,H8,S300,D64,bfloat16,mask=batch",
    "B2,H4,S511,D64,bfloat16,mask=rows", "B1,H8,S400x200,D128,bfloat16,causal=bottom_right",
    "B2,H8,S384,D128,float16,bias=full", "B1,H4,S239,D64,float32,causal=True", "B1,H4,S256,D128,float32",
    "B1,H2,S113x203,D40,float16,causal=bottom_right", "B1,H4,S200,D64/128,bfloat16", "B2,H4,S128,D64,bfloat16",
)  # fmt: skip
# Of the forward pass beside them: packed and paged keys, one query each, a few, and prefixes of many.
SEQUENCES = (
    "B5,H8/2,S700+1+128+513+1024,D128,bfloat16,q=packed,k=packed,slack=0,causal=bottom_right",
    "B4,H16/4,S300x900+64x4096+1x777+128,D64,float16,q=packed,k=paged,slack=0,causal=bottom_right",
    "B3,H8,S200x1000+511x600+33,D256,bfloat16,q=packed,k=paged,page_size=64,slack=0,causal=bottom_right",
    "B16,H32/8,S1x2048*12+1*3+1x8000,D128,bfloat16,q=one,k=paged,slack=0",
    "B8,H16/2,S1x3000,D64,float16,q=one,k=paged,page_size=3,slack=0,window=999:none",
    "B6,H8/4,S4x1500,D128,bfloat16,q=padded,k=paged,page_size=32,slack=0,causal=bottom_right",
)
# Of the backward pass alone: sequences beside the ends of tiles among longer ones, such of one tile each, and such without keys.
GRADIENTS = (
    "B12,H8/4,S1+63+700+64+65+127+128+300+129+1+1024+2,D128,bfloat16,q=packed,k=packed,slack=0,causal=bottom_right,operation=backward",
    "B12,H8,S1x700+63x2+700x65+64+65+127x300+128x1+300x129+129+1+900+2,D64,float16,q=packed,k=packed,slack=0,operation=backward",
    "B64,H8,S64,D128,bfloat16,q=packed,k=packed,slack=0,causal=bottom_right,operation=backward",
    "B6,H4/2,S700+1+128+513+65+64,D256,bfloat16,q=packed,k=packed,slack=0,causal=bottom_right,operation=backward",
    "B6,H4,S700+1+128+513+65+64,D192/128,bfloat16,q=packed,k=packed,slack=0,causal=bottom_right,operation=backward",
    "B8,H4,S129x0+129+129x0+500x0+129+64+1+65,D64,bfloat16,q=packed,k=packed,slack=0,window=100:30,operation=backward",
    "B5,H8/2,S330+1+128+64+200,D96,bfloat16,q=padded,k=padded,layout=bhsd,slack=0,causal=top_left,sinks=True,operation=backward",
)
HANG_KERNEL = "^wgmma_sm90$"
HANG_LOADS = ("copies", "elementwise")
STREAMS = 2
# torch has 32 streams to give; each thread takes two, and each load one.
MOST_THREADS = 12
# Seconds of a call alone, from which on it is left out; of a problem that was asked for.
SLOWEST, SLOWEST_CHOSEN = 0.02, 0.2
# MB that the kernels' pool may keep between calls, so that its size says nothing else, and queues of the device, as many
# as there are streams: with the usual eight one stream would wait for another.
ENVIRONMENT = {"FA_EXT_WORKSPACE_MB": "64", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
# The memory that the pool keeps, and as much again for modules that CUDA loads late.
MAY_GROW_BYTES = 128 << 20
# A worker that has started may take this long beyond the time of the load, whatever it says.
SETUP_SECONDS = 900.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=arguments.positive, help="for all kernels together (5); with --preset hang for "
                        "each kernel and problem (1)")  # fmt: skip
    parser.add_argument("--kernel", type=arguments.pattern, help="regular expression of kernels (default: all CUDA kernels "
                        "of the build; with --preset hang wgmma_sm90)")  # fmt: skip
    parser.add_argument("--case", action="append", default=[], help="a problem by its line instead (repeatable)")
    parser.add_argument("--preset", choices=("hang",), help="hang: four causal problems, each in one stream beside copies")
    parser.add_argument("--threads", type=thread_count, help=f"threads with streams, up to {MOST_THREADS} (6; with --preset 1)")


def thread_count(text: str) -> int:
    """A whole number from 1 to MOST_THREADS."""
    value = arguments.count(text)
    if value > MOST_THREADS:
        raise argparse.ArgumentTypeError(f"{text!r}; accepted: whole numbers from 1 to {MOST_THREADS}")
    return value


def run(args: argparse.Namespace) -> int:
    document = collect(args.preset, args.minutes, args.kernel, args.case, args.threads, quiet=args.json)
    report.deliver(document, args.json, show)
    return int(not document["sound"])


def soak_piece(preset: str | None = None, minutes: float | None = None, kernel: str | None = None) -> dict[str, Any]:
    """A piece of the evidence record: what the command with these options finds, without its context."""
    document = collect(preset, minutes, kernel, quiet=False)
    return {key: value for key, value in document.items() if key != "context"}


def collect(
    preset: str | None = None, minutes: float | None = None, kernel: str | None = None, lines: list[str] | None = None,
    threads: int | None = None, quiet: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """The document of the command; UsageError where it cannot run."""
    given = lines or (HANG if preset else (*CASES, *SEQUENCES, *GRADIENTS))
    cases = {str(case): case.operation for case in (problems.parse(line, OPERATIONS) for line in given)}
    require_device()
    kernels = chosen_kernels(kernel if kernel is not None else HANG_KERNEL if preset else "")
    minutes = minutes or (1.0 if preset else 5.0)
    plan: list[dict[str, Any]]
    if preset:
        plan = [{"kernel": name, "cases": [case], "seconds": 60 * minutes} for name in kernels for case in cases]
        load: dict[str, Any] = {"threads": threads or 1, "streams": 1, "loads": HANG_LOADS}
    else:
        plan = [{"kernel": name, "cases": taken_by(name, cases), "seconds": 60 * minutes / len(kernels)} for name in kernels]
        load = {"threads": threads or 6, "streams": STREAMS, "loads": LOADS}
    load["slowest"] = SLOWEST_CHOSEN if preset or lines else SLOWEST
    options = {"preset": preset, "minutes": minutes} | load
    runs, progress = [], report.Progress(len(plan), quiet)
    for part in plan:
        runs.append(soak(**part, **load))
        progress.step(f"{part['kernel']}: {told(runs[-1])}")
    return {"context": machine.context("cuda"), "options": options, "sound": all_sound(runs), "runs": runs}


def taken_by(kernel: str, cases: dict[str, str]) -> list[str]:
    """The lines that the kernel may take: a dense one is of both passes."""
    of = "serving" if implementation.table_of(kernel) == "attention" else "backward"
    return [case for case, operation in cases.items() if operation in ("attention", of)]


def require_device() -> None:
    """UsageError without a GPU, without torch and with a build whose times are bent."""
    from fa_ext import _core

    if _core.build_info().get("chaos"):
        raise report.UsageError("this is a chaos build: its kernels wait at random; build without FA_CHAOS to soak")
    if not devices.has_gpu():
        raise report.UsageError("needs a GPU: it is the CUDA kernels that are put under load")
    if importlib.util.find_spec("torch") is None:
        raise report.UsageError("needs torch, which is not installed: it holds the streams, events and graphs of the load")


def chosen_kernels(pattern: str) -> list[str]:
    """CUDA kernels of the build that match, of attention and of its backward pass."""
    import fa_ext

    built = [name for name in (*fa_ext.kernels(), *fa_ext.kernels("backward")) if not name.startswith("cpu_")]
    found = [name for name in built if re.search(pattern, name)]
    if not found:
        raise report.UsageError(f"no kernel matches {pattern!r}; accepted: {', '.join(built) or 'none: built without CUDA'}")
    return found


def soak(
    kernel: str, cases: list[str], seconds: float, threads: int, streams: int, loads: tuple[str, ...], slowest: float,
    backend: str | None = None, watchdog: Watchdog | None = None,
) -> dict[str, Any]:  # fmt: skip
    """One kernel in a process of its own, watched from here."""
    watchdog = watchdog or Watchdog()
    backend = backend or f"bench.load.soak_torch:{'Backward' if implementation.table_of(kernel) == 'backward' else 'Torch'}"
    given = {"kernel": kernel, "cases": cases, "seconds": seconds, "threads": threads, "streams": streams,
             "loads": list(loads), "slowest": slowest, "backend": backend}  # fmt: skip
    environment = {name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()}
    with isolation.Worker(environment) as worker:
        outcome = worker.call("bench.load.streams:soak", given, seconds + SETUP_SECONDS, watchdog.hear, stalled=watchdog.stalled)
    if outcome.status == "usage":
        raise report.UsageError(outcome.reason)
    found = {"kernel": kernel, "seconds": seconds} | summed(outcome.value or {}, watchdog.streams, cases)
    if outcome.status in ("stalled", "timed out"):
        found["hung"] = {"kernel": kernel} | watchdog.hang()
    elif not outcome.ok:
        where = watchdog.step or "under load"
        found["error"] = f"{outcome.status} ({where}): {outcome.reason}"
    return found | {"verdict": verdict(found)}


def summed(value: dict[str, Any], heard: list[dict[str, Any]], cases: list[str]) -> dict[str, Any]:
    """The figures of one kernel, from what the worker returned or, where it did not, from what it told before."""
    streams = [stream for stream in value.get("streams", heard) if not stream["load"]]
    wrong: dict[str, int] = dict(value.get("wrong", {}))
    for stream in streams:
        for case, count in stream["wrong"].items():
            wrong[case] = wrong.get(case, 0) + count
    return {
        "calls": sum(stream["calls"] for stream in streams), "compared": sum(stream["compared"] for stream in streams),
        "wrong": wrong, "hung": None, "error": None, "memory_before": value.get("memory_before"),
        "memory_after": value.get("memory_after"), "cases": value.get("cases", cases), "left_out": value.get("left_out", {}),
        "loads": value.get("loads", {}),
    }  # fmt: skip


def verdict(found: dict[str, Any]) -> str:
    """sound, HANG, WRONG BITS, FAILED, MEMORY GREW, or "took nothing" of a kernel that every problem was left out for."""
    if found["hung"]:
        return "HANG"
    if found["wrong"]:
        return "WRONG BITS"
    if found["error"]:
        return "FAILED"
    if not found["cases"]:
        return "took nothing"
    if not found["compared"] or found["memory_after"] is None:
        return "FAILED"
    return "MEMORY GREW" if found["memory_after"] - found["memory_before"] > MAY_GROW_BYTES else "sound"


def all_sound(runs: list[dict[str, Any]]) -> bool:
    """Whether something ran, and nothing but sound calls."""
    verdicts = {found["verdict"] for found in runs}
    return "sound" in verdicts and verdicts <= {"sound", "took nothing"}


def told(found: dict[str, Any]) -> str:
    """One sentence."""
    text = f"{found['verdict']}, {found['calls']:,} calls, {found['compared']:,} compared"
    if hung := found["hung"]:
        also = f", {len(hung.get('also', []))} others stand still" if hung.get("also") else ""
        text += f"; hangs in {hung['work']} on {hung['stream']} after {hung['calls']:,} calls there{also}"
    if found["wrong"]:
        text += "; wrong: " + "; ".join(f"{case} ({count})" for case, count in found["wrong"].items())
    if found["error"]:
        text += f"; {found['error']}"
    if found["verdict"] == "took nothing":
        text += "; " + "; ".join(f"{case}: {why}" for case, why in list(found["left_out"].items())[:2])
    return text


def show(document: dict[str, Any]) -> None:
    """The table of a document, and a sentence for what is not sound."""
    rows = []
    for found in document["runs"]:
        before, after = found["memory_before"], found["memory_after"]
        ran = list(found["cases"])
        rows.append([
            found["kernel"], found["verdict"], found["calls"], found["compared"], sum(found["wrong"].values()),
            ran[0] if len(ran) == 1 else f"{len(ran)} problems", round(found["seconds"]),
            None if before is None else round(before / 2**20), None if after is None else round(after / 2**20),
        ])  # fmt: skip
    columns = ("kernel", "verdict", "calls", "compared", "wrong", "on", "seconds", "MiB before", "after")
    report.table("kernels under load", columns, rows)
    for found in document["runs"]:
        if found["verdict"] != "sound":
            print(f"{found['kernel']}: {told(found)}")
