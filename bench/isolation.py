"""Work in a process of its own: a candidate that crashes or hangs is reported, and the run goes on.

``Worker.call("bench.duel:duel", {...}, limit)`` runs that function in the worker with the arguments and a function
``tell(message)`` that reports on the way. Requests and replies are JSON lines; replies come over a pipe of their own,
so that a candidate may print what it likes. The parent stamps every message with its own clock, which nothing in the
worker can reach.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import report

ROOT = Path(__file__).resolve().parent.parent
# Seconds between two looks at whether a call has stalled.
LOOK = 0.25


@dataclass(frozen=True)
class Outcome:
    """`status`: done, failed (a Python exception), usage (a UsageError), crashed (the process died), "timed out" or
    "stalled" (the caller's own judgement)."""

    status: str
    value: Any = None
    reason: str = ""

    @property
    def ok(self) -> bool:
        return self.status == "done"


class Worker:
    """A child process that serves calls one after another; a new one takes over after a crash or a time-out."""

    def __init__(self, env: dict[str, str] | None = None):
        self.env = env or {}
        self.process: subprocess.Popen | None = None

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def _start(self) -> None:
        self.replies, child_end = os.pipe()
        self.printed = tempfile.TemporaryFile()
        env = {**os.environ, **self.env, "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bench.isolation", str(child_end)], cwd=ROOT, env=env, stdin=subprocess.PIPE,
            stdout=self.printed, stderr=subprocess.STDOUT, pass_fds=(child_end,), start_new_session=True,
        )  # fmt: skip
        os.close(child_end)
        self.buffer = b""

    def call(
        self, function: str, arguments: dict, limit_s: float, on_message: Callable[[Any, float], None] | None = None,
        stalled: Callable[[], bool] = lambda: False,
    ) -> Outcome:  # fmt: skip
        """Runs ``module:function`` in the worker. `on_message(message, seconds by this process's clock)`; the worker is
        ended when `stalled()`, asked several times a second, is true."""
        if self.process is None or self.process.poll() is not None:
            self.close()
            self._start()
        assert self.process and self.process.stdin
        request = json.dumps({"function": function, "arguments": report.plain(arguments)}).encode() + b"\n"
        deadline = time.monotonic() + limit_s
        try:
            self.process.stdin.write(request)
            self.process.stdin.flush()
        except BrokenPipeError:
            return self._died()
        while True:
            line = self._line(deadline, stalled)
            if line is None:
                self._kill()
                if time.monotonic() < deadline:
                    return Outcome("stalled", reason=f"no progress{self._tail()}")
                return Outcome("timed out", reason=f"no answer within {limit_s:g} s{self._tail()}")
            if line == b"":
                return self._died()
            reply = json.loads(line)
            if reply["kind"] == "message":
                if on_message:
                    on_message(reply["value"], time.perf_counter())
                continue
            return Outcome(reply["kind"], reply.get("value"), reply.get("reason", ""))

    def _line(self, deadline: float, stalled: Callable[[], bool]) -> bytes | None:
        """The next reply; b"" at the end of the pipe, None when the time is up or the call has stalled."""
        while b"\n" not in self.buffer:
            left = deadline - time.monotonic()
            if left <= 0 or stalled():
                return None
            if not select.select([self.replies], [], [], min(left, LOOK))[0]:
                continue
            piece = os.read(self.replies, 1 << 16)
            if not piece:
                return b""
            self.buffer += piece
        line, _, self.buffer = self.buffer.partition(b"\n")
        return line

    def _died(self) -> Outcome:
        assert self.process
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        self._kill()
        code = self.process.returncode
        how = f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit status {code}"
        return Outcome("crashed", reason=how + self._tail())

    def _tail(self) -> str:
        """The last lines that the process printed."""
        self.printed.seek(0)
        lines = self.printed.read().decode(errors="replace").strip().splitlines()[-6:]
        return (": " + " | ".join(lines)) if lines else ""

    def _kill(self) -> None:
        """Ends the worker and what it started; its process group is its own."""
        assert self.process
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        if self.process is None:
            return
        if self.process.poll() is None:
            assert self.process.stdin
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self._kill()
        os.close(self.replies)
        self.printed.close()
        self.process = None


def call_once(function: str, arguments: dict, limit_s: float, on_message=None, env=None) -> Outcome:
    """One call in a process of its own."""
    with Worker(env) as worker:
        return worker.call(function, arguments, limit_s, on_message)


def _serve(replies: int) -> None:
    def send(reply: dict) -> None:
        os.write(replies, json.dumps(report.plain(reply)).encode() + b"\n")

    for line in sys.stdin:
        request = json.loads(line)
        try:
            module, _, name = request["function"].partition(":")
            function = getattr(importlib.import_module(module), name)
            value = function(**request["arguments"], tell=lambda m: send({"kind": "message", "value": m}))
            reply = {"kind": "done", "value": value}
        except report.UsageError as error:
            reply = {"kind": "usage", "reason": str(error)}
        except BaseException as error:  # whatever a candidate raises, SystemExit included, is its result
            traceback.print_exc()
            first = str(error).splitlines()[0] if str(error) else ""
            reply = {"kind": "failed", "reason": f"{type(error).__name__}: {first}"}
        send(reply)


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
