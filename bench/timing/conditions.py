"""Do times bear a conclusion out? What else the machine did while they were taken."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from bench.timing import stats

# On the CPU: the share of the cores that other processes may take during the rounds of a verdict on times, and that of
# the samples for which threads of the slower side may wait for a core. Rounds cancel neither: in the record of the
# CPU cpu_simd's two threads wait for up to 46% of a sample on an otherwise idle machine.
OTHERS = 0.25
WAITING = 0.25
# How much longer a baseline may take beside the candidate than alone, before it was loaded and after it had ended.
SLOWED = 1.5


def busy(conditions: dict[str, Any] | None) -> bool:
    """Whether others took more of the cores than a figure bears."""
    return ((conditions or {}).get("others") or 0.0) > OTHERS


def load_line(conditions: dict[str, Any] | None) -> str | None:
    """The machine's other work meanwhile, in one line; None where nobody looked, as on a GPU."""
    if not conditions or "load_average" not in conditions:
        return None
    others = conditions.get("others")
    share = "an unknown share" if others is None else f"{100 * others:.0f}%"
    mark = f": more than {100 * OTHERS:.0f}%, so these figures are of a busy machine" if busy(conditions) else ""
    return f"other processes took {share} of the cores (load average {conditions['load_average']:.1f}){mark}"


def mark(cell: dict[str, Any]) -> str:
    """A note of a table beside a figure: the share of the cores that others took, and "busy" where that is too much."""
    others = (cell.get("conditions") or {}).get("others")
    if others is None:
        return ""
    return f"{100 * others:.0f}%" + (" busy" if busy(cell["conditions"]) else "")


def summary(cells: Iterable[dict[str, Any]]) -> str | None:
    """The load line of the cell under the most load, and how many of the figures a busy machine gave."""
    taken = [cell["conditions"] for cell in cells if load_line(cell.get("conditions"))]
    if not taken:
        return None
    count = sum(map(busy, taken))
    return (f"{count} of {len(taken)} problems were timed on a busy machine; at most, "
            + str(load_line(max(taken, key=lambda c: c.get("others") or 0.0))))  # fmt: skip


def crowded(verdict: stats.Verdict, candidate: str, baseline: str | None, conditions: dict[str, Any]) -> str | None:
    """Why times taken under these conditions do not bear the verdict out; None where they do."""
    if busy(conditions):
        return (f"other processes took {100 * conditions['others']:.0f}% of the cores during the rounds, "
                f"{100 * OTHERS:.0f}% are accepted (load average {conditions['load_average']:.1f}): measure on an idle "
                "machine")  # fmt: skip
    slower = {stats.Verdict.PASS: baseline, stats.Verdict.FAIL: candidate}.get(verdict)
    waiting = conditions.get("waiting", {}).get(slower, 0.0)
    if waiting > WAITING:
        return (f"threads of {slower} waited for a core for {100 * waiting:.0f}% of its samples, {100 * WAITING:.0f}% "
                "are accepted: two of them shared one, or other processes held it; try "
                "OMP_WAIT_POLICY=passive")  # fmt: skip
    slowed = conditions.get("slowed", {}).get(baseline, 0.0)
    if verdict is stats.Verdict.PASS and slowed > SLOWED:
        return (f"{baseline} took {slowed:.2f} times as long beside the candidate as before it was loaded and after it "
                f"had ended, {SLOWED:g} is accepted")  # fmt: skip
    return None
