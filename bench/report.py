"""Output for people and machines: tables, progress, JSON files that are valid at every moment."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any


class UsageError(Exception):
    """The command line asks for something that does not exist or does not fit together."""


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], stream=None) -> None:
    """Prints a table: with rich on a terminal that is wide enough, as aligned text otherwise. Numbers stand right."""
    stream = stream or sys.stdout
    cells = [[_text(value) for value in row] for row in rows]
    numeric = [all(_is_number(row[i]) for row in cells if row[i]) and bool(cells) for i in range(len(columns))]
    widths = [max([len(name), *(len(row[i]) for row in cells)]) for i, name in enumerate(columns)]
    if stream.isatty() and sum(widths) + 3 * len(widths) + 1 <= shutil.get_terminal_size().columns:
        try:
            from rich.console import Console
            from rich.table import Table
        except ImportError:
            pass
        else:
            drawn = Table(title=title, title_justify="left")
            for name, right in zip(columns, numeric, strict=True):
                drawn.add_column(name, justify="right" if right else "left", no_wrap=True)
            for row in cells:
                drawn.add_row(*row)
            Console(file=stream).print(drawn)
            return
    print(title, file=stream)
    for row in [list(columns), *cells]:
        aligned = (c.rjust(w) if right else c.ljust(w) for c, w, right in zip(row, widths, numeric))
        print("  " + "  ".join(aligned).rstrip(), file=stream)


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        if math.isnan(value):
            return "nan"
        magnitude = abs(value)
        if magnitude == 0:
            return "0"
        if magnitude < 1e-2 or magnitude >= 1e6:
            return f"{value:.2e}"
        return f"{value:.3f}" if magnitude < 10 else f"{value:.1f}"
    return str(value)


def _is_number(text: str) -> bool:
    try:
        float(text.rstrip("%x"))
    except ValueError:
        return False
    return True


class Progress:
    """Says on stderr how far a run is and when it will end: a live line on a terminal, otherwise one line a step."""

    def __init__(self, total: int, quiet: bool = False, stream=None):
        self.total, self.done, self.quiet = total, 0, quiet
        self.stream = stream or sys.stderr
        self.began = time.perf_counter()

    def step(self, text: str) -> None:
        self.done += 1
        if self.quiet:
            return
        elapsed = time.perf_counter() - self.began
        remaining = elapsed / self.done * (self.total - self.done)
        line = f"[{self.done}/{self.total}, {_duration(elapsed)}, about {_duration(remaining)} left] {text}"
        if self.stream.isatty():
            print(f"\r\033[K{line}", end="" if self.done < self.total else "\n", file=self.stream, flush=True)
        else:
            print(line, file=self.stream, flush=True)


def _duration(seconds: float) -> str:
    seconds = round(seconds)
    return f"{seconds}s" if seconds < 100 else f"{seconds // 60}m{seconds % 60:02d}s"


def first_line(error: BaseException, most: int | None = 300) -> str:
    """An exception in one line: its class and the first line of what it says."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:most]}"


def plain(value: Any) -> Any:
    """`value` as JSON can hold it: NumPy scalars become Python's, NaN and infinities become strings."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, str | int | float | bool | type(None)) else str(value)


def write_json(path: Path, document: Any) -> None:
    """Writes through a temporary file and a rename: a reader, or Ctrl-C, never sees half a file."""
    write_text(path, json.dumps(plain(document), indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """As ``write_json``, for a document that is text already."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    os.replace(temporary, path)


def read_json(path: Path) -> Any:
    """A document that a command wrote; a file that holds none is bad usage."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: {error}") from None


def deliver(document: Any, as_json: bool, show: Callable[[Any], None], output: Path | None = None) -> None:
    """The end of a command: writes the document to `output` if given, and prints it as JSON or as ``show`` has it."""
    if output:
        write_json(output, document)
    if as_json:
        print_json(document)
    else:
        show(document)


def print_json(document: Any) -> None:
    print(json.dumps(plain(document), indent=1))


class Results:
    """Finished pieces of a long run, by key, on disk after each one; a second run of the same thing carries on.

    `identity` says what the pieces depend on (sources, device, options). A file with another identity is not resumed:
    it is started over. `context`, where and when the figures were taken, stays that of the first run.
    """

    def __init__(self, path: Path | None, identity: dict, context: dict, fresh: bool = False):
        self.path = path
        self.document = {"identity": plain(identity), "context": plain(context), "cells": {}}
        self.resumed = 0
        if path and path.exists() and not fresh:
            try:
                earlier = json.loads(path.read_text())
            except ValueError:
                earlier = {}
            if earlier.get("identity") == self.document["identity"]:
                self.document |= {"context": earlier["context"], "cells": earlier.get("cells", {})}
                self.resumed = len(self.cells)

    @property
    def cells(self) -> dict[str, Any]:
        return self.document["cells"]

    def add(self, key: str, cell: Any) -> None:
        self.cells[key] = plain(cell)
        self.save()

    def save(self) -> None:
        if self.path:
            write_json(self.path, self.document)
