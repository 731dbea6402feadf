"""The objective that the tuner minimises: ``time``, or a product and quotient of it and figures of ncu such as ``time*dram_traffic``.

Every factor is relative to the configuration set by hand, so that the objective of that one is 1.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from bench import report
from bench.tuning import ncu

# name on the command line: what bench profile calls it
FIGURES = {name.replace(" ", "_").lower(): name for name, _ in ncu.METRICS.values() if name != "time"}


@dataclass(frozen=True)
class Objective:
    """`powers`: 1 for what should be small (``*name``), -1 for what should be large (``/name``); time has power 1."""

    powers: dict[str, int]

    def factors(self, figures: dict[str, float], anchor: dict[str, float]) -> dict[str, float]:
        """{name: the variant's figure over the anchor's, or the inverse}; both as ``bench profile`` names them."""
        found = {}
        for name, power in self.powers.items():
            mine, other = figures.get(FIGURES[name]), anchor.get(FIGURES[name])
            if not mine or not other:
                raise report.UsageError(f"ncu gave no {FIGURES[name]}: it cannot be part of the objective")
            found[name] = (mine / other) ** power
        return found

    def __bool__(self) -> bool:
        """Whether it takes more than the time."""
        return bool(self.powers)


def parse(text: str) -> Objective:
    """``time``, ``time*registers_a_thread``, ``time*dram_traffic/tensor_pipe``."""
    terms = re.findall(r"([*/])(\w+)", text)
    powers = {name: 1 if sign == "*" else -1 for sign, name in terms}
    if text != "time" + "".join(map("".join, terms)) or len(powers) < len(terms) or set(powers) - set(FIGURES):
        raise report.UsageError(
            f"objective is {text!r}; accepted: time, then *NAME for what should be small or /NAME for what should be "
            f"large, each once, of {', '.join(FIGURES)}"
        )
    return Objective(powers)


def value(cell: dict[str, Any]) -> float:
    """The objective of an evaluated configuration."""
    return cell["ratio"]["ratio"] * math.prod(cell.get("factors", {}).values())
