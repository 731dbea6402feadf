"""Records of what was run where, on which machine code: one a machine under bench/evidence/, made in parts.

  tests      pytest: the tests of each kernel and those of no kernel (called core), several processes of --jobs each; on several
             GPUs a kernel's in turn
  alone      pytest: those marked `idle`, one kernel after another, on a machine that does nothing else
  sanitizer  compute-sanitizer memcheck, racecheck and synccheck on the tests marked `sanitize`, kernel by kernel
  sweep      random problems, each judged by float64, kernel by kernel, of both passes
  overhead   python -m bench overhead
  references each framework backend against float64
  measure    kernels beside peers, preset by preset
  soak       on demand: each kernel on many streams beside other work, watched for hangs
  training   on demand: GPT-2 124M through fa_ext and through other attention, in torch and in JAX (bench/examples/train_*.py)
  chaos      on demand, what `bench chaos --output FILE` found in a build with delays of the same sources: --merge FILE

Each piece belongs to the machine code of its kernel, or of the core (`bench/recording/record.py`). What is there for the code of this
build is kept, so the same line redoes just what a change made stale, and a run may be split (--parts, --kernels, --filter,
--within) and resumed. --refresh adds nothing new: parts that the record has, and in each cell the kernels that are in it.
--check says for each kernel whether its figures belong to these sources; it needs neither a GPU
nor a compiled module, but without a build it cannot tell what an edit did to the machine code; --renew, with a build,
notes the sources of today where it did nothing and, on the record's GPU, compares what each measured call launches: a time
whose call launches what it did then is one of today's code. --merge adds what was measured elsewhere on the same machine code.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import arguments, machine, report
from bench.machine import device as devices
from bench.recording import record, suites
from bench.recording.check import NEEDED, ON_DEMAND, check, summary
from bench.recording.record import CORE, FOLDER, Record
from bench.trial import isolation

if TYPE_CHECKING:
    from bench.problems import Case

SUMMARY = "write or check the committed record of tests and figures"
PARTS = NEEDED["cuda"]
GPU_PRESETS = {"history": "both", "small": "hot", "gqa": "hot", "decode": "cold", "options": "hot", "extras": "hot",
               "paper": "hot", "paper-backward": "hot", "options-backward": "hot", "dropout": "hot", "serving": "cold",
               "cache_ops": "cold", "sequences-backward": "hot"}  # fmt: skip
# Presets, or some cells of one, that are measured without peers: what an option costs shows only where the call with it and the
# one without run at like power.
ALONE: dict[str, tuple[str, ...]] = {"options": ("costs",), "dropout": ()}
CPU_PRESETS = {"cpu": "hot", "cpu-backward": "hot", "cpu-serving": "hot"}
OPERATIONS = ("attention", "backward", "merge", "append", "documents")
SANITIZERS = ("memcheck", "racecheck", "synccheck")
# Of the bitwise tests on a GPU.
REPEATS = 250
# Processes of a kernel's tests: half a minute of each goes into collecting them.
SHARDS = 5
# The sweep of a kernel: processes side by side, each with a seed of its own, and random problems for each of them.
SWEEP_SEEDS = range(11, 17)
SWEEP_PROBLEMS = 1600
SWEEP_FLOPS = 6e7
# GPT-2 124M
GPT2 = ["--layers=12", "--width=768", "--heads=12", "--seq=1024", "--vocab=50304", "--batch=8", "--steps=300", "--rate=3e-4", "--warmup=30"]
TRAINING = {"torch": ["train_torch", "--device=cuda"], "torch, dropout 0.1": ["train_torch", "--device=cuda", "--dropout=0.1"],
            "jax": ["train_jax"]}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--check", action="store_true", help="say whether the records fit the machine code, and stop")
    parser.add_argument("--strict", action="store_true", help="with --check: exit status 1 unless all is fresh")
    parser.add_argument("--renew", action="store_true", help="note today's sources beside unchanged machine code, compare launches on a GPU, and stop")
    parser.add_argument("--merge", type=Path, nargs="+", metavar="FILE", help="add pieces measured elsewhere, and stop")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"comma-separated: {', '.join(PARTS)}; on demand {', '.join(ON_DEMAND)}")
    parser.add_argument("--filter", type=arguments.pattern, default="", help="regular expression of test files and of problems to measure")
    parser.add_argument("--kernels", type=arguments.pattern, default="", help="regular expression of kernels, and of core")
    parser.add_argument("--presets", help="comma-separated presets to measure (default: all of the device's)")
    parser.add_argument("--within", type=float, default=3600.0, help="seconds after which no new piece is begun")
    parser.add_argument("--seconds", type=arguments.positive, help="rounds of one measured problem (GPU 1, CPU 8)")
    parser.add_argument("--minutes", type=arguments.positive, default=1.0, help="soak of one kernel (1); the problems that hung once take one each")
    parser.add_argument("--jobs", type=arguments.count, default=1, help="processes of pytest or compute-sanitizer side by side (default 1)")
    parser.add_argument("--output", type=Path, help="default: bench/evidence/<machine>.json")
    parser.add_argument("--refresh", action="store_true", help="only what the record has, where it is no longer fresh")
    parser.add_argument("--fresh", action="store_true", help="redo pieces that are there already")
    arguments.common(parser, "device")


def run(args: argparse.Namespace) -> int:
    if args.check:
        return check(args.strict, args.json)
    if args.renew:
        return renew()
    if args.merge:
        return merge(args.merge, args.output)
    unknown = set(parts := [p for p in args.parts.split(",") if p]) - {*PARTS, *ON_DEMAND}
    if unknown:
        raise report.UsageError(f"parts are {', '.join(sorted(unknown))}; accepted: {', '.join(PARTS + ON_DEMAND)}")
    taking = Run(args)
    for part in parts:
        if not args.refresh or taking.record.part(part) or part == "measure":
            getattr(taking, part)()
    if args.json:
        report.print_json(taking.record.document)
    else:
        print(f"{taking.record.path}: {summary(taking.record.document)}")
    return 0


def place_of(where: dict[str, str]) -> Path:
    """The record of a machine {"device", "name"}."""
    return FOLDER / f"{re.sub(r'[^a-z0-9]+', '-', where['name'].lower()).strip('-')}.json"


def alone(preset: str) -> set[Case]:
    """The problems of a preset that are measured without peers."""
    from bench import problems

    if preset not in ALONE:
        return set()
    return set(problems.cells(preset, ALONE[preset]) if ALONE[preset] else problems.preset(preset))


class Run:
    """One run of the command: the pieces it has to make, each on disk as soon as it is there."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.ends = args, time.monotonic() + args.within
        self.device = args.device or devices.default()
        self.context = machine.context(self.device)
        where = where_of(self.context, self.device)
        self.record = Record(args.output or place_of(where), where)

    def kernels(self, operation: str = "attention") -> list[str]:
        """The wanted kernels of the device."""
        from bench.implementations import implementation

        compiled = implementation.compiled_kernels(devices.open_device(self.device), operation)
        return [k for k in compiled if re.search(self.args.kernels, k)]

    def of_every_operation(self) -> list[str]:
        return [kernel for operation in OPERATIONS for kernel in self.kernels(operation)]

    def has(self, part: str, key: str, kernel: str | None = None) -> bool:
        """Whether a piece is there, ended as it should, and of the machine code that is here."""
        piece = self.record.part(part).get(key)
        there = piece is not None and "error" not in piece and not self.args.fresh
        return there and (kernel is None or self.record.covers(piece, kernel))

    def late(self) -> bool:
        return time.monotonic() > self.ends

    def left(self, least: float) -> float:
        """Seconds that a piece may take."""
        return max(least, self.ends - time.monotonic())

    def add(self, part: str, key: str, piece: dict, kernels: list[str], said: str = "") -> None:
        about = {"code": self.record.of_kernels(kernels), "context": self.record.context(self.context)}
        self.record.put(part, key, report.plain(piece | about | {"date": machine.now()}))
        self.record.save()
        print(f"{part} {key}{': ' * bool(said)}{said}", file=sys.stderr, flush=True)

    # ---- the parts ----

    def tests(self) -> None:
        jobs, gpus, taken = self.args.jobs, self._gpus(), 0
        shards: dict[str, list[tuple[list[str], str | None]]] = {}
        for kernel in self._untested("tests"):
            count = max(1, jobs // 2) if kernel == CORE else min(jobs, SHARDS)
            shards[kernel] = [([*self._pytest(kernel, "not idle"), f"--shard={n}/{count}"],
                               None if kernel == CORE or len(gpus) < 2 else gpus[(taken + n) % len(gpus)]) for n in range(count)]  # fmt: skip
            taken += count
        for kernel, found in suites.run_shards(shards, jobs, self.ends):
            self._add_tests("tests", kernel, found)

    def alone(self) -> None:
        for kernel in self._untested("alone"):
            if self.late():
                break
            self._add_tests("alone", kernel, suites.run_pytest(self._pytest(kernel, "idle"), limit=self.left(30)))

    def _add_tests(self, part: str, kernel: str, found: dict[str, Any]) -> None:
        about: dict[str, Any] = {"files": self.args.filter} if self.args.filter else {}
        if self.device == "cuda":
            about["repeats"] = REPEATS
        self.add(part, f"{kernel} {self.args.filter}".strip(), found | about, [kernel], suites.counts(found))

    def _pytest(self, kernel: str, which: str) -> list[str]:
        """Arguments for the tests of a kernel, or of core, of these marks."""
        files = sorted(f for f in (machine.ROOT / "tests").rglob("test_*.py") if re.search(self.args.filter, f.name))
        if which == "idle":
            files = [file for file in files if "idle" in file.read_text()]
        options = [f"--of={kernel}"]
        if self.device == "cuda":  # what needs no GPU runs in CI
            options.append(f"--repeats={REPEATS}")
            which = f"not emulated and not on_cpu and {which}"
            if kernel == CORE:
                files = [file for file in files if re.search("gpu|cuda|DEVICES", file.read_text())]
        return [*map(str, files), *options, "-m", which]

    def _gpus(self) -> list[str]:
        """The GPUs that this process sees, as CUDA_VISIBLE_DEVICES names them."""
        if self.device != "cuda":
            return []
        from fa_ext import _core

        return machine.named_gpus() or [str(n) for n in range(_core.device_count())]

    def _untested(self, part: str) -> list[str]:
        """Core, and kernels, whose tests have to be run. What a run of some files found (--filter) stands beside the piece of all: it
        may be of another machine's GPUs."""
        pieces = [p for p in self.record.part(part).values() if "error" not in p and p.get("files", "") == self.args.filter]
        wanted = [*([CORE] if re.search(self.args.kernels, CORE) else []), *self.of_every_operation()]
        return [k for k in wanted if self.args.fresh or not any(self.record.covers(p, k) for p in pieces)]

    def sanitizer(self) -> None:
        if self.device != "cuda":
            return
        why = suites.sanitizer_unusable()
        if why:
            self.add("sanitizer", "all", {"not_run": why}, [], f"not run: {why}")
            return
        self.record.part("sanitizer").pop("all", None)
        wanted = [(tool, kernel) for kernel in self.of_every_operation() for tool in SANITIZERS
                  if not self.has("sanitizer", f"{tool} {kernel}", kernel)]  # fmt: skip

        def run(tool: str, kernel: str) -> dict[str, Any] | None:
            prefix = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--target-processes", "all"]
            marked = ["tests", "-m", "sanitize", f"--of={kernel}"]
            return None if self.late() else suites.run_pytest(marked, prefix, self.left(60), self.args.jobs)

        with ThreadPoolExecutor(self.args.jobs) as pool:
            for (tool, kernel), found in zip(wanted, pool.map(lambda pair: run(*pair), wanted)):
                if found:
                    said = found.get("sanitizer") or suites.counts(found)
                    self.add("sanitizer", f"{tool} {kernel}", found, [kernel], said)

    def sweep(self) -> None:
        for kernel in [*self.kernels(), *self.kernels("backward")] if self.device == "cuda" else []:
            if self.late() or self.has("sweep", kernel, kernel):
                continue
            lines = [[sys.executable, "-m", "tests.contract", "--sweep", str(SWEEP_PROBLEMS), "--seed", str(seed), "--kernel", kernel,
                      "--limit", str(SWEEP_FLOPS), "--seconds", str(self.left(0))] for seed in SWEEP_SEEDS]  # fmt: skip
            running = [subprocess.Popen(line, cwd=machine.ROOT, stdout=subprocess.PIPE, text=True, env=suites.beside(len(lines)))
                       for line in lines]  # fmt: skip
            found = suites.sweep_result([process.communicate()[0] for process in running])
            self.add("sweep", kernel, found, [kernel], f"{found['judged']} judged, {found['failed']} failed")

    def overhead(self) -> None:
        if self.device != "cuda" or self.late() or self.has("overhead", "figures", CORE):
            return
        figures = _printed(["bench", "overhead"], 600)
        self.add("overhead", "figures", figures if isinstance(figures, dict) else {"figures": figures}, [CORE])

    def references(self) -> None:
        from bench.commands import references

        if not self.late() and not self.has("references", "errors"):
            found = references.collect(self.device, quiet=True)
            self.add("references", "errors", {k: v for k, v in found.items() if k not in ("context", "identity")}, [])

    def soak(self) -> None:
        from bench.commands import soak

        for kernel in [*self.kernels(), *self.kernels("backward")]:
            if not self.late() and not self.has("soak", kernel, kernel):
                self.add("soak", kernel, soak.soak_piece(kernel=f"^{kernel}$", minutes=self.args.minutes), [kernel])
            key = f"{kernel} hang"
            if re.search(soak.HANG_KERNEL, kernel) and not self.late() and not self.has("soak", key, kernel):
                self.add("soak", key, soak.soak_piece(preset="hang", kernel=f"^{kernel}$"), [kernel])

    def chaos(self) -> None:
        raise report.UsageError("chaos runs on a build of its own, which writes a file: add that by --merge FILE")

    def training(self) -> None:
        for key, line in TRAINING.items() if self.device == "cuda" else ():
            piece = self.record.part("training").get(key, {"code": [""]})
            if self.late() or (self.has("training", key) and all(self.record.state(code) == "fresh" for code in piece["code"])):
                continue
            found = {"kernels": self.kernels()} | _printed([f"bench.examples.{line[0]}", *line[1:], *GPT2], self.left(60))
            self.add("training", key, found, found["kernels"], str({name: run["milliseconds"] for name, run in found.get("runs", {}).items()}))

    def measure(self) -> None:
        from bench.commands import measure
        from bench.implementations import peers

        found, missing = peers.available(devices.open_device(self.device))
        renew_times(self.record, self.device)
        for kind, cases, kernels, without_peers in self._unmeasured():
            if self.late():
                break

            def keep(key: str, cell: dict, context: dict, kernels: list[str] = kernels) -> None:
                about = {"code": self.record.of_kernels(kernels), "context": self.record.context(context)}
                self.record.put_run(key, report.plain(record.as_run(cell) | about | {"date": machine.now()}))
                self.record.save()

            settings = measure.Settings(self.device, kernels, [] if without_peers else [p.name for p in found], 60,
                                        self.args.seconds or (1.0 if self.device == "cuda" else 8.0), 0.01)  # fmt: skip
            measure.measure(settings, cases, [kind], missing=missing, deadline=self.late, on_cell=keep)

    def _unmeasured(self) -> Iterator[tuple[str, list, list[str], bool]]:
        """(cache, problems, the kernels of which they need new figures, whether these are measured without peers): those that lack the
        same go together."""
        from bench import problems
        from bench.commands import measure

        every = GPU_PRESETS if self.device == "cuda" else CPU_PRESETS
        presets = self.args.presets.split(",") if self.args.presets else every
        kernels = {operation: self.kernels(operation) for operation in problems.OPERATIONS}
        for preset in presets:
            without_peers = alone(preset)
            for kind in measure.caches(every.get(preset, "hot")):
                lacking: dict[tuple[tuple[str, ...], bool], list] = {}
                for case in problems.preset(preset):
                    if re.search(self.args.filter, str(case)) and (names := self._lacks(f"{case} {kind}", kernels[case.operation])):
                        lacking.setdefault((tuple(names), case in without_peers), []).append(case)
                yield from ((kind, cases, list(names), without) for (names, without), cases in lacking.items())

    def _lacks(self, key: str, kernels: list[str]) -> list[str]:
        """Kernels without figures of their code of today in a cell; a refusal is an answer too."""
        runs = [r for r in self.record.cells.get(key, []) if "error" not in r]
        if self.args.refresh:
            kernels = [k for k in kernels if any(k in self.record.kernels_of(r) for r in self.record.cells.get(key, []))]
        return [
            kernel for kernel in kernels
            if self.args.fresh or not any(
                self.record.covers(run, kernel) and kernel in {*run["figures"], *run.get("refused", {})} for run in runs
            )
        ]  # fmt: skip


def _printed(line: list[str], limit: float) -> Any:
    """The document that a module of this package prints with --json; {"error"} where it prints none."""
    try:
        done = subprocess.run([sys.executable, "-m", *line, "--json"], cwd=machine.ROOT, capture_output=True, text=True, timeout=limit)
        return json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return {"error": f"not finished after {limit:.0f} s"}
    except ValueError:
        return {"error": (done.stderr or done.stdout).strip()[-500:]}


# ---- renewing ----


def renew(folder: Path = FOLDER) -> int:
    """After an edit that left the machine code as it was: prints whose sources each record now names anew; on a GPU also how
    many of the times of its record are those of today's launches."""
    device = devices.default()
    here = place_of(where_of(machine.context(device), device)).name
    for path in sorted(folder.glob("*.json")):
        if document := record.read(path):
            target = Record(path, document["machine"])
            renewed = target.renew_sources()
            said = ", ".join(renewed) or "nothing to renew"
            if path.name == here and (changed := renew_times(target, device)):
                said += f"; {changed[0]} times launch what they did, the launches of {changed[1]} are noted"
            target.save()
            print(f"{path.name}: {said}")
    return 0


def where_of(context: dict, device: str) -> dict[str, str]:
    """The machine of a record, from a context."""
    return {"device": device, "name": (context.get("gpu") or {}).get("name") or context["cpu"]}


def renew_times(target: Record, device: str) -> tuple[int, int] | None:
    """``Record.renew_times`` by calls in a worker; None on the CPU, whose times belong to the host's code."""
    if device == "cpu":
        return None
    with isolation.Worker() as worker:

        def launched(case: str, kernels: list[str]) -> dict[str, list[str] | None]:
            asked = {"case": case, "device": device, "kernels": kernels}
            outcome = worker.call("bench.commands.measure:launched", asked, 120.0)
            if not outcome.ok:
                print(f"{case}: its launches are not known: {outcome.status}: {outcome.reason}", file=sys.stderr)
            return outcome.value if outcome.ok else {}

        return target.renew_times(launched)


# ---- merging ----


def merge(files: list[Path], output: Path | None = None) -> int:
    """Adds the pieces of `files` to the record of their machine. Exit status 1 where a piece is of other machine code."""
    refused = []
    for file in files:
        document = report.read_json(file)
        where = document.get("machine") if isinstance(document, dict) else None
        if not where or not ("pieces" in document or document.get("format") == record.FORMAT):
            raise report.UsageError(f"{file} holds neither a record nor pieces of one part")
        target = Record(output or place_of(where), where)
        add: Callable[[Record, dict], list[str]] = _merge_pieces if "pieces" in document else record.merge
        refused += [f"{file.name}: {why}" for why in add(target, document)]
        target.save()
        print(f"{target.path}: {summary(target.document)}")
    for why in refused:
        print(f"not merged: {why}", file=sys.stderr)
    return int(bool(refused))


def _merge_pieces(target: Record, document: dict) -> list[str]:
    """Pieces made with another build of the same sources, such as one with delays in it: {"part", "machine", "date",
    "sources": machine.source_hashes() there, "pieces": {kernel: piece}}."""
    if document["part"] not in ON_DEMAND:
        raise report.UsageError(f"pieces of {document['part']}; accepted: {', '.join(ON_DEMAND)}")
    refused = []
    for kernel, piece in document["pieces"].items():
        known = target.built.get(kernel, {"sources": {}})["sources"]
        texts = {path: text for path, text in known.items() if path.startswith(("csrc/", "kernels/"))}
        other = [path for path, text in texts.items() if document["sources"].get(path) != text]
        if other or not texts:
            why = f"of other sources than the build here: {', '.join(other) or 'none built'}"
            refused.append(f"{document['part']} {kernel}: {why}")
        else:
            target.put(document["part"], kernel, piece | {"code": target.of_kernels([kernel]), "date": document["date"]})
    return refused
