"""A record in one line, and whether it belongs to the machine code of today."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from bench import machine, report
from bench.recording import record, suites
from bench.recording.record import FOLDER

ON_DEMAND = ("soak", "chaos", "training")
# The parts without which a record of a device is not whole.
NEEDED = {"cuda": ("tests", "alone", "sanitizer", "sweep", "overhead", "references", "measure"), "cpu": ("tests", "measure")}


def summary(document: dict) -> str:
    """One line: machine, date, tests, sanitizer, sweep, cells."""
    parts = document["parts"]
    dates = [holder["date"] for _, holder in record.holders(document)]
    said = [f"{document['machine']['name']}, {max(dates)}" if dates else document["machine"]["name"]]
    for part, word in (("tests", ""), ("alone", " alone")):
        total: dict[str, Counter[str]] = {}
        for found in parts.get(part, {}).values():
            counted = total.setdefault(found.get("files", ""), Counter())
            counted.update({k: found.get(k, 0) for k in ("passed", "failed", "skipped")})
            counted["failed"] += "error" in found
        said += [suites.counts(counted) + word + (f" of {files}" if files else "") for files, counted in sorted(total.items())]
    if sanitizer := parts.get("sanitizer"):
        not_run = sanitizer.get("all", {}).get("not_run")
        clean = sum(str(f.get("sanitizer", "")).startswith("0 ") for f in sanitizer.values())
        said.append(f"sanitizer not run: {not_run}" if not_run else f"sanitizer clean in {clean} of {len(sanitizer)} runs")
    if sweep := parts.get("sweep"):
        judged, failed = (sum(found[k] for found in sweep.values()) for k in ("judged", "failed"))
        said.append(f"{judged} random problems judged, {failed} failed")
    said += [f"{name}: {len(parts[name])} {'runs' if name == 'training' else 'kernels'}" for name in ON_DEMAND if parts.get(name)]
    if cells := document["cells"]:
        said.append(f"{len(cells)} cells")
    absent = [p for p in NEEDED[document["machine"]["device"]] if not (cells if p == "measure" else parts.get(p))]
    if absent:
        said.append(f"without {', '.join(absent)}")
    return "; ".join(said)


def check(strict: bool = False, as_json: bool = False, folder: Path = FOLDER) -> int:
    """Prints a line for each record and for each of its kernels: fresh, stale or unknown, and why."""
    built, found = machine.built_codes(), []
    records, codes = {}, {}
    for path in sorted(folder.glob("*.json")):
        try:
            document = json.loads(path.read_text())
        except ValueError as error:
            found.append({"file": path.name, "state": "stale", "why": f"not JSON: {error}", "kernels": {}})
            continue
        records[path] = document
        codes |= document.get("codes", {})
    for path, document in records.items():
        if document.get("format") == record.FORMAT:
            kernels = record.states(document, built)
            found.append({"file": path.name, "state": _worst(kernels), "why": summary(document), "kernels": kernels})
        elif document.get("identity", {}).get("command") == "score":
            kernels = _score_states(document, codes, built)
            shares = "  ".join(f"{name} {100 * share:.1f}%" for name, share in document["fast"].items())
            why = f"{document['identity']['candidate']} on {len(document['cells'])} problems: {shares}"
            found.append({"file": path.name, "state": _worst(kernels), "why": why, "kernels": kernels})
    if not found:
        where = folder.relative_to(machine.ROOT) if folder.is_relative_to(machine.ROOT) else folder
        found.append({"file": "", "state": "stale", "why": f"no file in {where}", "kernels": {}})
    if as_json:
        report.print_json(found)
    for entry in [] if as_json else found:
        print(f"evidence {entry['file']}: {entry['state']}: {entry['why']}".replace(" :", ":"))
        for kernel, said in entry["kernels"].items():
            held = ", ".join(f"{count} {part}" for part, count in sorted(said["parts"].items()))
            state, why, count = said.get("times", ("", "", 0))
            times = f"; its {count} times are {state}: {why}" if count else ""
            print(f"  {kernel}: {said['state']}: {said['why']}{f' ({held})' if held else ''}{times}")
    return int(strict and any(entry["state"] != "fresh" for entry in found))


def _worst(kernels: dict[str, dict]) -> str:
    return min((entry["state"] for entry in kernels.values()), key=record.STATES.index, default="stale")


def _score_states(document: dict, codes: dict[str, dict], built: dict[str, dict]) -> dict[str, dict]:
    """States of the kernels that a score was made with: any of them may have been the library's choice."""
    found = {}
    codes_then = document["context"].get("codes", {}).items()
    for kernel, key in ((k, key) for k, key in codes_then if record.is_of(k, document["identity"]["device"])):
        same = built.get(kernel, {}).get("id") == key
        unknown = ("fresh", "the same machine code") if same else ("unknown", "of machine code that no record describes")
        state, why = record.freshness(codes[key], built) if key in codes else unknown
        found[kernel] = {"state": state, "why": why, "parts": {}}
    return found
