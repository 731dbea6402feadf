"""Judges from outside whether a process that keeps many streams busy still gets on.

The process tells of steps (``{"step": "..."}``) while it prepares, then several times a second how each of its streams
stands: ``{"streams": [{"stream", "work", "steps", ...}]}``. `steps` of a stream grow
whenever work of the stream is queued or found done. What hangs cannot tell of it, so only this side decides.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

# Seconds without progress after which a stream, or a process that tells of its streams, counts as hung.
PATIENCE = 10.0
# And a step of the preparation: importing torch, drawing inputs on the host, the first call of a kernel.
PATIENCE_STEP = 90.0


class Watchdog:
    """A watch over one process: what was heard of it, and when, by the clock of this one."""

    def __init__(self, patience: float = PATIENCE, step: float = PATIENCE_STEP, now: Callable[[], float] = time.monotonic):
        self.patience, self.step_patience, self.now = patience, step, now
        self.heard = now()
        self.step = "starting"
        self.streams: list[dict[str, Any]] = []
        self._moved: dict[str, tuple[Any, float]] = {}  # stream: (steps, since when)

    def hear(self, message: dict[str, Any], _at: float = 0.0) -> None:
        self.heard = self.now()
        if "step" in message:
            self.step, self._moved = message["step"], {}
            return
        self.streams, self.step = message["streams"], ""
        for stream in self.streams:
            name, steps = stream["stream"], stream["steps"]
            if name not in self._moved or self._moved[name][0] != steps:
                self._moved[name] = (steps, self.heard)

    def stalled(self) -> bool:
        """Whether a stream, or the process as a whole, made no progress for longer than is patient."""
        silence = self.now() - self.heard
        if self.step:
            return silence > self.step_patience
        return silence > self.patience or any(self._still(stream) > self.patience for stream in self.streams)

    def _still(self, stream: dict[str, Any]) -> float:
        """Seconds since the stream moved; a stream that has ended its work is not waited for."""
        return 0.0 if stream.get("ended") else self.now() - self._moved[stream["stream"]][1]

    def hang(self) -> dict[str, Any]:
        """Where it hangs: the step, or the stream of the kernel that stopped first, and under `also` what stands still with it.

        One kernel that never ends holds up what is queued behind it, so those that stopped later may be innocent.
        """
        if self.step:
            return {"work": self.step, "stream": "alone", "calls": 0, "still_s": round(self.now() - self.heard, 1)}

        def suspect(stream):
            return not stream["load"] and self._still(stream) > self.patience / 2, self._still(stream)

        still = sorted((stream for stream in self.streams if not stream.get("ended")), key=suspect, reverse=True)
        told = [
            {"work": stream["work"], "stream": stream["stream"], "calls": stream["calls"], "queued": stream["queued"],
             "still_s": round(self._still(stream), 1)}
            for stream in still
        ]  # fmt: skip
        if not told:
            return {"work": "ending", "stream": "none", "calls": 0, "still_s": round(self.now() - self.heard, 1)}
        return told[0] | {"also": [stream for stream in told[1:] if stream["still_s"] > self.patience / 2]}
