"""What the commands' options accept: types for argparse, whose refusals are bad usage (exit status 3)."""

from __future__ import annotations

import argparse
import math
import re
import sys


class Parser(argparse.ArgumentParser):
    """Exits with 3 on bad usage: 1 and 2, argparse's own, are verdicts of ``bench gate``."""

    def error(self, message: str):
        self.print_usage(sys.stderr)
        self.exit(3, f"{self.prog}: error: {message}\n")


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
