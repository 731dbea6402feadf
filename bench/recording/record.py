"""One machine's record under bench/evidence/: pieces and cells, each tied to the machine code that it was measured on.

  codes     {id: a kernel's (or the core's) digests of device and host code, its compilers and the hashes of its sources}
  contexts  {id: processor, GPU, driver, versions, ceilings}
  parts     {part: {key: piece}}; a piece has the ids of its codes and of its context, and its date
  cells     {problem and cache: [run]}; what was timed in the rounds of one run stays together, since ratios of one run hold better

A piece belongs to machine code and not to text (`fa_ext/_digests.py` says what a digest covers), and each kernel has its
own, so that a comment, a rename or another kernel's change makes nothing stale. What the front end and the core do (checks,
choice, the time of a call) belongs to the code called ``core``: a change there does not make a kernel's figures stale.

A time on a GPU belongs to what was launched: functions of the device, grids, shared memory, clusters. A run of a cell holds a
hash of that for each kernel (`bench/timing/launches.py`). Where the code has changed, host or device, tests are stale, but
times are unknown until `evidence --renew` has compared the launches on such a GPU: equal ones make the run one of today's
code. A run that noted no launches is unknown where the host's code alone has changed, and stale where the device's has.

`freshness` asks the text first: where every file that the compilers read is as it was, so is the machine code, and nothing
needs to be built. Otherwise it takes the digests inside the built extension; without a build of these sources by the
recorded compilers it answers "unknown", never "stale".

A piece gives way to a newer one of its key, one of some test files to a newer whole one; a run of a cell
keeps the kernels that no newer run measured. So two records of one machine can be merged in any order. Files are sorted,
with a line for each piece or kernel.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from bench import machine, report
from bench.machine import build

FORMAT = 3
FOLDER = machine.ROOT / "bench" / "evidence"
CORE = build.rules.digests.CORE
DIGITS = 7
# Of kernels that are not the forward's, by operation: what their record must hold.
OTHER_PARTS = {"BACKWARD": ("tests", "sanitizer", "sweep", "chaos", "soak"), "MERGE": ("tests", "sanitizer"), "APPEND": ("tests", "sanitizer"),
               "DOCUMENTS": ("tests", "sanitizer")}  # fmt: skip
# From worse to better: what a whole is when its pieces differ.
STATES = ("stale", "unknown", "fresh")
# Follows from the time, the problem and the ceilings.
_DERIVED = ("gbs", "ceiling", "ceiling_share")


# ---- machine code ----


def changed_sources(code: dict, root: Path = machine.ROOT) -> list[str]:
    """Files that the compilers read for a code and that are others now."""
    return [path for path, text in code["sources"].items() if build.rules.digests.text_hash(root / path) != text]


def freshness(code: dict, built: dict[str, dict], root: Path = machine.ROOT) -> tuple[str, str]:
    """("fresh", "stale" or "unknown", why) of a recorded code against the tree and its build."""
    changed = changed_sources(code, root)
    if not changed:
        return "fresh", "the same sources"
    named = _listed([path for path in changed if path.startswith(("csrc/", "kernels/"))] or changed)
    here = built.get(code["kernel"])
    if here is None:
        kernels = [*build.rules.kernel_names(), CORE]
        if code["kernel"] not in kernels:
            return "stale", "no kernel of that name is left"
        return "unknown", f"changed: {named}; no build here tells whether its machine code did"
    if older := changed_sources(here, root):
        return "unknown", f"changed: {named}; the build here is older than {_listed(older)}"
    if (here["scheme"], here["device"], here["host"]) == (code["scheme"], code["device"], code["host"]):
        return "fresh", f"the same machine code; changed: {named}"
    if here["scheme"] != code["scheme"]:
        return "unknown", f"changed: {named}; digests of scheme {here['scheme']} here, of {code['scheme']} then"
    if here["compilers"] != code["compilers"]:
        return "unknown", f"changed: {named}; built by {here['compilers']} here, by {code['compilers']} then"
    parts = [part for part in ("device", "host") if here[part] != code[part]]
    return "stale", f"other {' and '.join(parts)} code; changed: {named}"


def times_freshness(code: dict, built: dict[str, dict], found: tuple[str, str], noted: bool) -> tuple[str, str]:
    """``freshness`` of the times of a code's kernel, from that of its tests; `noted`: what it launched was."""
    state, why = found
    here = built.get(code["kernel"])
    if state != "stale" or here is None or not code["device"]:
        return state, why
    if noted:
        return "unknown", f"{why}; `evidence --renew` on such a GPU compares what is launched"
    if here["device"] == code["device"]:
        return "unknown", f"{why}; what was launched then was not noted"
    return state, why


def _listed(names: list[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


# ---- a record ----


class Record:
    """The document of one machine; `save` keeps what is still referred to, sorted."""

    def __init__(self, path: Path, where: dict[str, str], built: dict[str, dict] | None = None, root: Path = machine.ROOT):
        self.path, self.root = path, root
        self.built = machine.built_codes() if built is None else built
        self.document: dict[str, Any] = {"format": FORMAT, "machine": where, "codes": {}, "contexts": {}, "parts": {}, "cells": {}}
        if path.exists():
            earlier = report.read_json(path)
            if earlier.get("format") != FORMAT or earlier["machine"]["device"] != where["device"]:
                raise report.UsageError(f"{path} is no record of format {FORMAT} of this device: move it away")
            self.document = earlier
        self._known: dict[str, str] = {}

    @property
    def cells(self) -> dict[str, list[dict]]:
        return self.document["cells"]

    def part(self, name: str) -> dict[str, dict]:
        return self.document["parts"].setdefault(name, {})

    def state(self, code: str) -> str:
        if code not in self._known:
            self._known[code] = freshness(self.document["codes"][code], self.built, self.root)[0]
        return self._known[code]

    def covers(self, holder: dict, kernel: str) -> bool:
        """Whether a piece or run belongs to a kernel's code as it is now."""
        return any(self.document["codes"][c]["kernel"] == kernel and self.state(c) == "fresh" for c in holder["code"])

    def of_kernels(self, names: Iterable[str]) -> list[str]:
        """Ids of the codes that run here; they are kept with the record."""
        absent = [name for name in names if name not in self.built]
        if absent:
            raise report.UsageError(f"the extension carries no digests of {', '.join(absent)}: build it with setup.py,"
                                    " without FA_DEBUG, FA_SANITIZE and FA_CHAOS")  # fmt: skip
        found = [self.built[name] for name in names]
        self.document["codes"] |= {code["id"]: {k: v for k, v in code.items() if k != "id"} for code in found}
        return sorted(code["id"] for code in found)

    def context(self, found: dict) -> str:
        """Id of a context; it is kept with the record."""
        kept = report.plain({k: v for k, v in found.items() if k not in ("date", "digest", "codes", "unfinished")})
        key = machine.short_hash(kept)
        self.document["contexts"][key] = kept
        return key

    def kernels_of(self, holder: dict) -> set[str]:
        return {self.document["codes"][code]["kernel"] for code in holder["code"]}

    def excludes(self, part: str, one: dict, other: dict) -> bool:
        """Whether two pieces of a part cannot stand together: what a run of some files found, and a later whole one of its kernel."""
        if part == "training" or is_whole(one) == is_whole(other):
            return False
        whole, some = (one, other) if is_whole(one) else (other, one)
        return some["date"] < whole["date"] and self.kernels_of(some) <= self.kernels_of(whole)

    def put(self, part: str, key: str, piece: dict) -> None:
        """Adds a piece, which has `code`, `context` and `date`, in place of those that it excludes."""
        pieces = self.part(part)
        for name in [name for name, found in pieces.items() if self.excludes(part, found, piece)]:
            del pieces[name]
        pieces[key] = rounded(piece)

    def put_run(self, key: str, run: dict) -> None:
        """Adds a run of a cell, which has `code`, `context`, `date` and `figures`; the other runs lose its kernels."""
        left = [self.without(other, self.kernels_of(run)) for other in self.cells.get(key, [])]
        self.cells[key] = sorted([*(other for other in left if other["code"]), rounded(run)], key=lambda one: one["date"])

    def without(self, run: dict, kernels: set[str]) -> dict:
        """A run without some of its kernels; their peers stay."""
        return run | {
            "code": [code for code in run["code"] if self.document["codes"][code]["kernel"] not in kernels],
            "figures": {name: figures for name, figures in run["figures"].items() if name not in kernels},
            "refused": {name: why for name, why in run.get("refused", {}).items() if name not in kernels},
        }

    def renew_times(self, launched: Callable[[str, list[str]], dict[str, list[str] | None]]) -> tuple[int, int]:
        """Compares times of other code with what is launched now, and notes that beside times of this code which lack it.
        `launched(problem, kernels)`: what each of them launches here. -> how many times became those of today's code, how
        many got their launches noted."""
        renewed = noted = 0
        for key, runs in self.cells.items():
            open_times = [(run, code) for run in runs for code in run["code"] if self._open(run, code)]
            kernels = sorted({self.document["codes"][code]["kernel"] for _, code in open_times})
            found = launched(key.rsplit(" ", 1)[0], kernels) if kernels else {}
            for run, code in open_times:
                kernel = self.document["codes"][code]["kernel"]
                if not (here := found.get(kernel)):
                    continue
                figures, now = run["figures"][kernel], machine.short_hash(here)
                if self.state(code) == "fresh":
                    figures["launches"] = now
                    noted += 1
                elif figures["launches"] == now:
                    run["code"] = sorted({*run["code"], *self.of_kernels([kernel])} - {code})
                    renewed += 1
        return renewed, noted

    def _open(self, run: dict, code: str) -> bool:
        """Whether asking what a kernel launches now would tell something of its times in a run."""
        kernel = self.document["codes"][code]["kernel"]
        if kernel not in run["figures"] or kernel not in self.built or not self.document["codes"][code]["device"]:
            return False
        return ("launches" in run["figures"][kernel]) != (self.state(code) == "fresh")

    def renew_sources(self) -> list[str]:
        """Notes the sources of today beside codes that are the machine code built here: a reader without a build then finds
        the same text again. Returns their kernels."""
        renewed = []
        for code in self.document["codes"].values():
            here = self.built.get(code["kernel"])
            digests = ("scheme", "device", "host")
            if here and not changed_sources(here, self.root) and all(here[name] == code[name] for name in digests):
                if code["sources"] != here["sources"]:
                    code["sources"] = here["sources"]
                    renewed.append(code["kernel"])
        return sorted(renewed)

    def save(self) -> None:
        document = report.plain(self.document)
        held = [holder for _, holder in holders(document)]
        used = {*(code for holder in held for code in holder["code"]), *(holder.get("context") for holder in held)}
        for table in ("codes", "contexts"):
            document[table] = {key: value for key, value in document[table].items() if key in used}
        document["parts"] = {part: pieces for part, pieces in document["parts"].items() if pieces}
        report.write_text(self.path, written(document) + "\n")


def rounded(value: Any) -> Any:
    """`value` with floats of ``DIGITS`` significant digits; more would only be noise in a diff."""
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(v) for v in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def as_run(cell: dict) -> dict:
    """A measured cell without what its key and its times tell."""
    kept = {k: v for k, v in cell.items() if k not in ("case", "cache")}
    figures = {
        name: {k: v for k, v in figures.items() if k not in _DERIVED}
        | ({"ratio": {k: figures["ratio"][k] for k in ("ratio", "low", "high")}} if "ratio" in figures else {})
        | ({"launches": machine.short_hash(figures["launches"])} if "launches" in figures else {})
        for name, figures in cell.get("figures", {}).items()
    }
    return kept | {"figures": figures}


def written(value: Any, depth: int = 0) -> str:
    """JSON with sorted keys; what holds no object, or is short, stands on one line."""
    line = json.dumps(value, sort_keys=True, ensure_ascii=False)
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if not any(isinstance(v, dict) for v in inside) or depth > 1 and len(line) < 240:
        if not (isinstance(value, dict) and any(isinstance(v, list) and v and isinstance(v[0], dict) for v in inside)):
            return line
    space = "\n" + " " * (depth + 1)
    if isinstance(value, dict):
        items = [f"{json.dumps(key, ensure_ascii=False)}: {written(v, depth + 1)}" for key, v in sorted(value.items())]
    else:
        items = [written(v, depth + 1) for v in value]
    opens, closes = "{}" if isinstance(value, dict) else "[]"
    return f"{opens}{space}{(',' + space).join(items)}{space[:-1]}{closes}"


# ---- reading ----


def read(path: Path) -> dict | None:
    """A record of this format; None for a JSON file that is none."""
    document = json.loads(path.read_text())
    return document if isinstance(document, dict) and document.get("format") == FORMAT else None


def newest(runs: list[dict], name: str) -> dict | None:
    """The newest run of a cell that timed a kernel or peer; runs are sorted by date."""
    return next((run for run in reversed(runs) if name in run["figures"]), None)


def cell(key: str, runs: list[dict]) -> dict[str, Any]:
    """The runs of a cell as one, each kernel and peer with its newest figures; `case` and `cache` are those of the key."""
    found: dict[str, Any] = dict(zip(("case", "cache"), key.rsplit(" ", 1), strict=True)) | {"figures": {}, "refused": {}}
    for run in runs:
        both = {name: found[name] | run.get(name, {}) for name in ("figures", "refused")}
        found |= run | both
    return found


def cells(folder: Path = FOLDER, today: bool = False) -> dict[str, dict]:
    """{"<file> <problem> <cache>": cell} of every committed measurement; ``today``: without the figures of kernels whose
    machine code has changed since."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        document = read(path) or {"cells": {}}
        held = Record(path, document["machine"]) if today and document["cells"] else None
        for key, runs in document["cells"].items():
            if held:
                runs = [held.without(run, {k for k in held.kernels_of(run) if not held.covers(run, k)}) for run in runs]
            found[f"{path.stem} {key}"] = cell(key, runs)
    return found


def holders(document: dict) -> Iterator[tuple[str, dict]]:
    """(its part, a piece) and ("measure", a run of a cell) for all of a record."""
    for part, pieces in document["parts"].items():
        yield from ((part, piece) for piece in pieces.values())
    for runs in document["cells"].values():
        yield from (("measure", run) for run in runs)


def context_of(document: dict, part: str) -> dict[str, Any]:
    """The newest context of a part, with its date."""
    dated = [(piece["date"], piece["context"]) for name, piece in holders(document) if name == part and piece.get("context")]
    date, key = max(dated, default=("", ""))
    return document["contexts"].get(key, {}) | {"date": date}


# ---- the state of a record ----


def states(document: dict, built: dict[str, dict], root: Path = machine.ROOT) -> dict[str, dict[str, Any]]:
    """{kernel: {"state", "why", "parts": {part: pieces in that state}, "times": (state, why, how many) where those of its times
    are in a better state}}: each kernel is in the worst state of its pieces, and stale where it has none of a part that others
    have."""
    found = {key: freshness(code, built, root) for key, code in document["codes"].items()}
    kernels: dict[str, dict[str, Any]] = {}
    times: dict[str, list[tuple[str, str]]] = {}
    for part, holder in holders(document):
        for code in holder["code"]:
            name = document["codes"][code]["kernel"]
            state, why = found[code]
            if part == "measure" and name in holder["figures"]:
                noted = "launches" in holder["figures"][name]
                state, why = times_freshness(document["codes"][code], built, found[code], noted)
                times.setdefault(name, []).append((state, why))
            entry = kernels.setdefault(name, {"state": "fresh", "why": why, "parts": Counter()})
            if STATES.index(state) < STATES.index(entry["state"]):
                entry |= {"state": state, "why": why, "parts": Counter()}
            if state == entry["state"]:
                entry["parts"][part] += 1
    for name, of in times.items():
        state, why = min(of, key=lambda one: STATES.index(one[0]))
        if state != kernels[name]["state"]:
            kernels[name]["times"] = state, why, sum(one[0] == state for one in of)
    for name, parts in gaps(document).items():
        without = f"without {', '.join(parts)}"
        if name in kernels and kernels[name]["state"] == "stale":
            kernels[name]["why"] += f"; {without}"
        else:
            kernels[name] = {"state": "stale", "why": without, "parts": Counter()}
    return dict(sorted(kernels.items()))


def gaps(document: dict) -> dict[str, list[str]]:
    """{kernel of the record's device, or core: parts that speak of others of its kind and not of it}. A training run speaks
    of the two kernels that its call takes, and lacks none."""
    held: dict[str, set[str]] = {}
    for part, holder in holders(document):
        if is_whole(holder):
            held.setdefault(part, set()).update(document["codes"][code]["kernel"] for code in holder["code"])
    device = document["machine"]["device"]
    others = other_kernels(device)
    kernels = [k for k in build.rules.kernel_names() if is_of(k, device) and k not in others]
    asked = {part for part, names in held.items() if part != "training" and any(name in names for name in kernels)}
    found = {kernel: sorted(part for part in asked if kernel not in held[part]) for kernel in kernels}
    for name, parts in ({CORE: ("tests", "alone")} | others).items():
        found[name] = [part for part in parts if part in held and name not in held[part]]
    return {kernel: parts for kernel, parts in found.items() if parts}


def is_whole(holder: dict) -> bool:
    """Whether a piece speaks of all tests, and not of some files."""
    return "files" not in holder


def other_kernels(device: str) -> dict[str, tuple[str, ...]]:
    """{kernel of a device for another operation than the forward: parts that it must not lack where forward kernels have them}"""
    listed = build.rules.listed_kernels()
    return {name: OTHER_PARTS[operation] for operation, name in listed if operation != "FORWARD" and is_of(name, device)}


def is_of(kernel: str, device: str) -> bool:
    """Whether a kernel, or the core, runs on a device "cpu" or "cuda"."""
    return kernel == CORE or kernel.startswith("cpu_") == (device == "cpu")


def merge(record: Record, other: dict) -> list[str]:
    """Adds what another record of the same machine holds and this one lacks or has older; what was refused, and why."""
    refused = []
    record.document["codes"] = other["codes"] | record.document["codes"]
    record.document["contexts"] = other["contexts"] | record.document["contexts"]

    def admitted(name: str, holder: dict) -> bool:
        stale = any(record.state(code) == "stale" for code in holder["code"])
        refused.extend([f"{name}: of other machine code than is here"] * stale)
        return not stale

    for part, pieces in other["parts"].items():
        for key, piece in pieces.items():
            rivals = [mine for name, mine in record.part(part).items() if name == key or record.excludes(part, mine, piece)]
            if admitted(f"{part} {key}", piece) and all(rival["date"] <= piece["date"] for rival in rivals):
                record.put(part, key, piece)
    for key, runs in other["cells"].items():
        for run in runs:
            newer = [mine for mine in record.cells.get(key, []) if mine["date"] > run["date"]]
            measured = {name for mine in newer for name in record.kernels_of(mine)}
            left = record.without(run, measured)
            if admitted(f"measure {key}", run) and left["code"]:
                record.put_run(key, left)
    return refused
