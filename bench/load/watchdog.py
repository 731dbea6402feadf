"""Judges from outside whether a process that keeps many streams busy still gets on.

The process tells of steps (``{"step": "..."}``) while it prepares, then several times a second how each of its lanes
stands: ``{"lanes": [{"lane", "work", "turns", ...}]}``. A lane is a stream and the thread that feeds it; `turns` grows
whenever work of the lane is queued or found done. What hangs cannot tell of it, so only this side decides.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

# Seconds without progress after which a lane, or a process that tells of its lanes, counts as hung.
PATIENCE = 10.0
# And a step of the preparation: importing torch, drawing inputs on the host, the first call of a kernel.
PATIENCE_STEP = 90.0


class Watchdog:
    """What was heard of one process, and when, by the clock of this one."""

    def __init__(self, patience: float = PATIENCE, step: float = PATIENCE_STEP, now: Callable[[], float] = time.monotonic):
        self.patience, self.step_patience, self.now = patience, step, now
        self.heard = now()
        self.step = "starting"
        self.lanes: list[dict[str, Any]] = []
        self._moved: dict[str, tuple[Any, float]] = {}  # lane: (turns, since when)

    def hear(self, message: dict[str, Any], _at: float = 0.0) -> None:
        self.heard = self.now()
        if "step" in message:
            self.step, self._moved = message["step"], {}
            return
        self.lanes, self.step = message["lanes"], ""
        for lane in self.lanes:
            name, turns = lane["lane"], lane["turns"]
            if name not in self._moved or self._moved[name][0] != turns:
                self._moved[name] = (turns, self.heard)

    def stalled(self) -> bool:
        """Whether a lane, or the process as a whole, made no progress for longer than is patient."""
        silence = self.now() - self.heard
        if self.step:
            return silence > self.step_patience
        return silence > self.patience or any(self._still(lane) > self.patience for lane in self.lanes)

    def _still(self, lane: dict[str, Any]) -> float:
        """Seconds since the lane moved; a lane that has ended its work is not waited for."""
        return 0.0 if lane.get("ended") else self.now() - self._moved[lane["lane"]][1]

    def hang(self) -> dict[str, Any]:
        """Where it hangs: the step, or the lane of the kernel that stopped first, and under `also` what stands still with it.

        One kernel that never ends holds up what is queued behind it, so those that stopped later may be innocent.
        """
        if self.step:
            return {"work": self.step, "lane": "alone", "calls": 0, "still_s": round(self.now() - self.heard, 1)}

        def suspect(lane):
            return not lane["load"] and self._still(lane) > self.patience / 2, self._still(lane)

        still = sorted((lane for lane in self.lanes if not lane.get("ended")), key=suspect, reverse=True)
        told = [
            {"work": lane["work"], "lane": lane["lane"], "calls": lane["calls"], "queued": lane["queued"],
             "still_s": round(self._still(lane), 1)}
            for lane in still
        ]  # fmt: skip
        if not told:
            return {"work": "ending", "lane": "none", "calls": 0, "still_s": round(self.now() - self.heard, 1)}
        return told[0] | {"also": [lane for lane in told[1:] if lane["still_s"] > self.patience / 2]}
