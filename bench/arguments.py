"""The values that the commands' options accept: types for argparse, whose refusals are bad usage (exit status 3)."""

from __future__ import annotations

import argparse
import math
import re
import sys
from typing import Any


class Parser(argparse.ArgumentParser):
    """Exits with 3 on bad usage: 1 and 2, argparse's own, are verdicts of ``bench gate``."""

    def error(self, message: str):
        self.print_usage(sys.stderr)
        self.exit(3, f"{self.prog}: error: {message}\n")


def common(parser: argparse.ArgumentParser, *names: str) -> None:
    """Adds options that several commands have, and that mean the same in all of them."""
    for name in names:
        parser.add_argument(f"--{name}", **COMMON[name])


def pattern(text: str) -> str:
    """A regular expression."""
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from None
    return text


def count(text: str) -> int:
    """A whole number of at least 1."""
    if not re.fullmatch(r"\+?\d+", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; accepted: whole numbers from 1 on")
    return int(text)


def positive(text: str) -> float:
    """A finite number over 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}; accepted: finite numbers over 0")
    return value


COMMON: dict[str, dict[str, Any]] = {
    "arrays": {"choices": ("numpy", "torch", "cupy", "jax"), "help": "array library that a callable takes"},
    "device": {"choices": ("cpu", "cuda"), "help": "default: cuda where there is a GPU"},
    "filter": {"type": pattern, "default": "", "help": "regular expression that a problem's line must contain"},
    "fresh": {"action": "store_true", "help": "do not resume"},
    "baseline": {"action": "append", "help": "kernel, peer or candidate to beat (repeatable; the fastest counts)"},
}
