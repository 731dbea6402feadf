"""Search over a kernel's compile-time parameters: build, check against float64, time beside the hand-set configuration.

Combinations that cannot work (shared memory, registers, threads) are ruled out before they are compiled. Each variant
is checked and timed in a worker with a time limit, so that one that crashes or hangs is a counted failure. Evaluations
are cached by sources, flags, compiler, driver and machine, and a run that was interrupted carries on. The best three
are timed again at length against the hand-set configuration; it is replaced only by one that is surely better. With an
objective such as ``time*dram_traffic`` each variant also runs under Nsight Compute, as in bench profile.

--write keeps the winner as a header that the kernel's configuration includes, with the measurement that justifies it.

  python -m bench tune cpu_simd --evaluations 40 --output bench/evidence/tune-cpu_simd.json --write
  python -m bench tune simt --build variants --sample 40        (on a machine with nvcc)
  python -m bench tune simt --measure variants                  (on a machine with a GPU)
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench import arguments, machine, report
from bench.machine import device as devices
from bench.trial import isolation
from bench.tuning import ncu, objective, search, variants
from bench.tuning.spaces import SPACES, Config, Space, label

SUMMARY = "search over a kernel's compile-time parameters"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kernel", choices=sorted(SPACES), help="the kernel to tune")
    parser.add_argument("--strategy", default="genetic_algorithm", choices=list(search.STRATEGIES), help="(genetic_algorithm)")
    figures = ", ".join(objective.FIGURES)
    parser.add_argument("--objective", default="time", help=f"time, or with figures of ncu time*NAME/NAME, of {figures}")
    parser.add_argument("--evaluations", type=arguments.count, default=48, help="variants at most (48)")
    parser.add_argument("--time", type=arguments.positive, default=3600.0, help="seconds at most (3600)")
    parser.add_argument("--time-limit", type=arguments.positive, default=60.0, help="seconds until a variant counts as hung (60)")
    parser.add_argument("--seconds", type=arguments.positive, default=2.0, help="paired rounds of one variant (2)")
    parser.add_argument("--final-seconds", type=arguments.positive, default=10.0, help="paired rounds of each of the best three (10)")
    parser.add_argument("--case", help="the problem to tune for (default: the kernel's own)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--build", type=Path, metavar="FOLDER", help="only compile, into this folder")
    parser.add_argument(
        "--sample",
        type=arguments.count,
        help="with --build: the hand-set configuration's neighbours and random ones, so many in all",
    )
    parser.add_argument("--measure", type=Path, metavar="FOLDER", help="only measure what --build left in this folder")
    parser.add_argument("--output", type=Path, help="history as JSON (default build/bench/tune-<kernel>.json); resumed")
    parser.add_argument("--write", action="store_true", help="write the winner as the header that the kernel includes")
    parser.add_argument("--from", dest="finished", type=Path, metavar="FILE", help="write that of a finished run")
    arguments.common(parser, "fresh")


def run(args: argparse.Namespace) -> int:
    space = SPACES[args.kernel]
    if args.finished:
        return write(space, report.read_json(args.finished))
    if args.build:
        return build_only(space, args.build, args.sample, args.seed, args.json)
    if not args.measure and space.device == "cuda" and not devices.has_gpu():
        raise report.UsageError(f"{space.kernel} needs a GPU to measure on; --build compiles its variants without one")
    if objective.parse(args.objective) and space.device == "cpu":
        raise report.UsageError(f"objective is {args.objective!r}: its figures are a GPU's, {space.kernel} runs on the CPU")
    case = args.case or space.case
    found = variants.identity(space, case, space.device) | {"objective": args.objective}
    if args.measure:  # the compiler of another machine made them
        found |= {"compiler": "as built", "archs": []}
    output = args.output or machine.ROOT / "build" / "bench" / f"tune-{space.kernel}.json"
    results = report.Results(output, found, machine.context(space.device), args.fresh)
    with isolation.Worker() as worker:
        session = Session(space, case, results, worker, args)
        searched = search.search(space, session.configs, args.strategy, args.evaluations, args.time, session.evaluate, args.seed)
        document = results.document
        document |= {"strategy": args.strategy, "seed": args.seed, "evaluated": len(searched), "row": space.kernel,
                     "date": document["context"]["date"], "space": len(space.configs()), "hand_set": space.hand_set,
                     "where": (document["context"].get("gpu") or {}).get("name") or document["context"]["cpu"],
                     "failures": dict(Counter(c["error"] for c in results.cells.values() if "error" in c)),
                     "pareto": search.pareto(list(results.cells.values()))}  # fmt: skip
        document |= session.finals()
    results.save()
    if args.write and document.get("final"):
        write(space, document)
    report.deliver(document, args.json, show)
    return 0


def write(space: Space, document: dict[str, Any]) -> int:
    """The winner of a run becomes the kernel's choice, from the next build on."""
    space.table.write_text(variants.table(space, document))
    print(f"{space.table}: {label(document['winner'])}", file=sys.stderr)
    return 0


class Session:
    """Builds and evaluates configurations, each once, and remembers them in the results file."""

    def __init__(self, space: Space, case: str, results: report.Results, worker: isolation.Worker, args: argparse.Namespace):
        self.space, self.case, self.results, self.worker, self.args = space, case, results, worker, args
        self.aim = objective.parse(args.objective)
        self.anchor_figures: dict[str, float] = {}
        self.libraries: dict[str, variants.Built] = {}
        if args.measure:
            manifest = report.read_json(args.measure / "manifest.json")
            if manifest["sources"] != variants.sources_digest(space):
                raise report.UsageError(f"{args.measure} was built from other sources: run --build again")
            self.configs: list[Config] = [entry["config"] for entry in manifest["variants"]]
            for entry in manifest["variants"]:
                library = args.measure / entry["library"] if entry["library"] else None
                self.libraries[label(entry["config"])] = variants.Built(library, entry["reason"], entry["notes"])
        else:
            self.configs = space.configs()
        self.progress = report.Progress(min(args.evaluations, len(self.configs)), quiet=args.json)
        _, anchor = next(self._each([space.hand_set]))
        if anchor.library is None:
            raise report.UsageError(f"the hand-set configuration does not build: {anchor.reason}")
        self.anchor = anchor.library

    def _each(self, configs: list[Config]) -> Iterator[tuple[Config, variants.Built]]:
        """Each configuration with its library. Those that are not built yet compile while a GPU measures; a CPU that is
        measured does nothing else."""
        missing = [c for c in configs if label(c) not in self.libraries]
        building = variants.build_each(self.space, missing) if missing else iter(())
        if self.space.device == "cpu":
            building = iter(list(building))
        for config in configs:
            while label(config) not in self.libraries:
                built_config, built = next(building)
                self.libraries[label(built_config)] = built
            yield config, self.libraries[label(config)]

    def evaluate(self, configs: list[Config]) -> list[dict[str, Any]]:
        """One step of the search: what the cache does not hold compiles side by side and is measured one by one."""
        for config, built in self._each([c for c in configs if label(c) not in self.results.cells]):
            cell: dict[str, Any] = {"config": config, "notes": built.notes}
            if built.library is None:
                cell["error"] = f"does not compile: {built.reason}"
            else:
                found = self._measured(built.library, self.args.seconds, 60)
                found |= {} if "error" in found else self._profiled(built.library)
                cell |= {"error": found["error"]} if "error" in found else found
            self.results.add(label(config), cell)
            said = cell.get("error") or f"{cell['ratio']['ratio']:.3f} of the hand-set time, {cell['us']:.4g} us"
            self.progress.step(f"{label(config)}: {said}")
        cells = [self.results.cells[label(c)] for c in configs]
        return [{"error": c["error"]} if "error" in c else {"objective": objective.value(c)} for c in cells]

    def _measured(self, library: Path, seconds: float, rounds: int) -> dict[str, Any]:
        arguments = {
            "library": str(library), "anchor": str(self.anchor), "case": self.case, "device": self.space.device,
            "rounds": rounds, "seconds": seconds, "seed": self.args.seed,
        }  # fmt: skip
        stages: list[str] = []
        outcome = self.worker.call("bench.tuning.variants:evaluate", arguments, self.args.time_limit,
                                   lambda message, at: stages.append(message["stage"]))  # fmt: skip
        if outcome.ok:
            return outcome.value
        return {"error": f"{outcome.status} during {stages[-1] if stages else 'load'}: {outcome.reason[:200]}"}

    def _profiled(self, library: Path) -> dict[str, Any]:
        """{"figures" of the longest kernel under ncu, "factors" of the objective}; empty where time alone counts."""
        if not self.aim:
            return {}

        def figures_of(path: Path) -> dict[str, float]:
            return ncu.profile(str(path), self.case, limit=self.args.time_limit)["kernels"][0]["figures"]

        try:
            self.anchor_figures = self.anchor_figures or figures_of(self.anchor)
            figures = self.anchor_figures if library == self.anchor else figures_of(library)
            return {"figures": figures, "factors": self.aim.factors(figures, self.anchor_figures)}
        except report.UsageError as error:
            return {"error": f"during profiling: {error}"}

    def finals(self) -> dict[str, Any]:
        """{"winner", "final", "finalists"}: the best three again, at length; the hand-set one unless surely beaten."""
        good = sorted((c for c in self.results.cells.values() if "ratio" in c), key=objective.value)
        finalists = []
        for cell in [c for c in good if c["config"] != self.space.hand_set][:3]:
            _, built = next(self._each([cell["config"]]))
            library = built.library
            again = self._measured(library, self.args.final_seconds, 240) if library else {"error": "gone"}
            known = {name: cell[name] for name in ("figures", "factors") if name in cell}
            finalists.append({"config": cell["config"], **again, **known})
        better = [f for f in finalists if "ratio" in f and objective.value(f) * f["ratio"]["high"] / f["ratio"]["ratio"] < 1.0]
        if better:
            final = min(better, key=objective.value)
        else:
            final = {"config": self.space.hand_set, **self._measured(self.anchor, self.args.final_seconds, 60)}
        return {"winner": final["config"], "final": final if "ratio" in final else None, "finalists": finalists}


def build_only(space: Space, folder: Path, sample: int | None, seed: int, quiet: bool) -> int:
    """Compiles configurations into `folder` with a manifest that --measure reads; the hand-set one is always there."""
    configs = space.sample(sample or len(space.configs()), seed)
    folder.mkdir(parents=True, exist_ok=True)
    progress = report.Progress(len(configs), quiet)
    entries: list[dict[str, Any]] = []
    for i, (config, built) in enumerate(variants.build_each(space, configs, folder / "objects")):
        # Loading takes the kernel's name from a file's name up to its first dot.
        name = f"{i}/{space.kernel}.so" if built.library else None
        if built.library and name:
            (folder / str(i)).mkdir(exist_ok=True)
            shutil.copyfile(built.library, folder / name)
            os.chmod(folder / name, 0o755)
        entries.append({"config": config, "library": name, "reason": built.reason, "notes": built.notes})
        progress.step(f"{label(config)}: {built.reason or built.notes or 'built'}")
    manifest = {"row": space.kernel, "sources": variants.sources_digest(space), "variants": entries}
    report.write_json(folder / "manifest.json", manifest)
    if quiet:
        report.print_json(manifest)
    else:
        failed = sum(not e["library"] for e in entries)
        print(f"{folder}: {len(entries) - failed} variants of {space.kernel} built, {failed} failed")
    return 0


def show(document: dict) -> None:
    cells = sorted((c for c in document["cells"].values() if "ratio" in c), key=objective.value)
    factors = list(cells[0].get("factors", {})) if cells else []
    rows = [[label(c["config"]), c["us"], c["ratio"]["ratio"], c["ratio"]["low"], c["ratio"]["high"],
             *(c["factors"][name] for name in factors), c["frobenius"], c["notes"]] for c in cells[:12]]  # fmt: skip
    report.table(
        f"{document['row']} on {document['where']}, {document['identity']['case']}: {document['evaluated']} of "
        f"{document['space']} configurations, by {document['strategy']}",
        ("configuration", "us", "of hand-set", "low", "high", *factors, "error vs float64", "compiler"),
        rows,
    )
    if document["failures"]:
        report.table("failures", ("count", "reason"), [[n, why] for why, n in document["failures"].items()])
    front = ", ".join(f"{label(c['config'])} ({c['ratio']['ratio']:.3f}, {c['frobenius']:.2e})" for c in document["pareto"])
    print(f"Pareto front of time and error: {front or 'empty'}")
    final = document.get("final")
    if final:
        r = final["ratio"]
        kept = " (the hand-set one stands)" if document["winner"] == document["hand_set"] else ""
        print(f"winner: {label(document['winner'])}{kept}: {final['us']:.4g} us, {r['ratio']:.3f} "
              f"[{r['low']:.3f}, {r['high']:.3f}] of the hand-set time")  # fmt: skip
