"""Work in a process of its own: a candidate that crashes or hangs is reported, and the run goes on.

``Worker.call("bench.commands.measure:cell", {...}, limit)`` runs that function in the worker with the arguments and a function
``tell(message)`` that reports on the way. Requests and replies are JSON lines over a socket of their own, so that a
candidate may print what it likes. A reply counts only with the token of its request, which did not exist before. A
worker can be made to stand still; ``timed`` takes the time of a call from the outside, from before the worker goes on
until all of it stands still again; ``steps`` takes that of each step of a call whose worker stops itself after each.
Whether what should stand still does, the kernel's count of the time that it ran says (``strayed``). Nothing that a worker
says is a measurement or a verdict.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import report
from bench.trial import processes

ROOT = Path(__file__).resolve().parents[2]
# No reply of ours is longer; descriptors that one request may carry.
LONGEST_REPLY = 1 << 23
MOST_FDS = 250
KINDS = ("done", "failed", "usage")
# Seconds between two looks at whether a call has stalled.
LOOK = 0.25
# The C library keeps what is freed, from the start (glibc; 32 MiB is its largest threshold for mmap). By default it learns
# that from the sizes a process has freed so far: one of them then paid for fresh pages in every call, and another, whose
# process had seen larger arrays, did not: the faster of two that did the same work was so by its history.
KEEP_FREED = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}


@dataclass(frozen=True)
class Outcome:
    """`status`: done, failed (a Python exception), usage (a UsageError), crashed (the process died), "timed out",
    "stalled" (the caller's own judgement) or forged (the reply does not belong to the request)."""

    status: str
    value: Any = None
    reason: str = ""

    @property
    def ok(self) -> bool:
        return self.status == "done"


class Worker:
    """A child process that serves calls one after another; a new one takes over after a crash or a time-out.

    `confined` is for processes that run a candidate, others keep their memory to themselves; see ``processes``.
    """

    living: set[int] = set()

    def __init__(self, env: dict[str, str] | None = None, confined: bool = False):
        self.env, self.confined = env or {}, confined
        self.process: subprocess.Popen | None = None
        self.started = 0

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    @property
    def pid(self) -> int:
        assert self.process
        return self.process.pid

    def start(self) -> None:
        """Starts the process unless it runs. `started` counts how often that was necessary."""
        if self.process is not None and self.process.poll() is None:
            return
        self.close()
        processes.adopt_orphans()
        self.earlier = processes.children(os.getpid())
        self.socket, child_end = socket.socketpair()
        self.printed = tempfile.TemporaryFile()
        env = {**KEEP_FREED, **os.environ, **self.env, "PYTHONUNBUFFERED": "1"}
        role = "confined" if self.confined else "hidden"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bench.trial.isolation", str(child_end.fileno()), role, str(os.getpid())], cwd=ROOT,
            env=env, stdin=subprocess.DEVNULL, stdout=self.printed, stderr=subprocess.STDOUT,
            pass_fds=(child_end.fileno(),), start_new_session=True,
        )  # fmt: skip
        child_end.close()
        Worker.living.add(self.process.pid)
        self.buffer, self.frozen, self.halted = b"", False, set()
        self.ran: dict[int, float] = {}
        self.started += 1

    def call(
        self, function: str, arguments: dict, limit_s: float, on_message: Callable[[Any, float], None] | None = None,
        fds: Sequence[int] = (), stalled: Callable[[], bool] = lambda: False,
    ) -> Outcome:  # fmt: skip
        """Runs ``module:function`` in the worker. `on_message(message, seconds by this process's clock)`. `fds` are
        handed over as the argument of that name. The worker is ended when `stalled()`, asked several times a second, is
        true."""
        self.start()
        self.thaw()
        return self._exchange(function, arguments, limit_s, on_message, fds, stalled)

    def timed(self, function: str, arguments: dict, limit_s: float) -> tuple[Outcome, float]:
        """A call of a worker that stands still before and afterwards, and the seconds between."""
        self.start()
        self.freeze()
        began = time.perf_counter()
        self._go_on()
        outcome = self._exchange(function, arguments, limit_s, None, ())
        stood = self._stop()
        return outcome if stood else _restless(), time.perf_counter() - began

    def steps(self, function: str, arguments: dict, limit_s: float, count: int, before: Callable[[int], None],
              after: Callable[[int], None]) -> tuple[Outcome, list[float]]:  # fmt: skip
        """A call whose worker stands still (``processes.stand_still``) before the first of `count` steps and after each; the
        seconds of each step. While it stands still, `before(step)` and `after(step)` are called. `limit_s` is for all."""
        self.start()
        self.freeze()
        deadline, taken = time.monotonic() + limit_s, []
        with processes.Watch(self.pid, self.socket, limit_s) as watch:
            try:
                token = self._request(function, arguments, ())
                self._go_on()
                for step in range(count + 1):
                    stood = processes.stopped(self.pid)
                    if step:
                        taken.append(time.perf_counter() - began)
                    if not stood:
                        break
                    self.ran[self.pid] = processes.ran(self.pid)
                    if step:
                        after(step - 1)
                    if step < count:
                        before(step)
                    else:
                        watch.over()
                    began = time.perf_counter()
                    self._go_on()
            except BaseException:  # it would wait for its next step for ever
                self.kill()
                raise
        if watch.why == "late":
            self.kill()
            return Outcome("timed out", reason=f"no answer within {limit_s:g} s{self._tail()}"), taken
        outcome = self._answer(token, deadline, limit_s, None)
        if watch.why and outcome.ok:
            self.kill()
            return Outcome("forged", reason=f"a reply after {len(taken)} of {count} steps"), taken
        return outcome if self._stop() else _restless(), taken

    def _exchange(self, function: str, arguments: dict, limit_s: float, on_message: Callable[[Any, float], None] | None,
                  fds: Sequence[int], stalled: Callable[[], bool] = lambda: False) -> Outcome:  # fmt: skip
        deadline = time.monotonic() + limit_s
        return self._answer(self._request(function, arguments, fds), deadline, limit_s, on_message, stalled)

    def _request(self, function: str, arguments: dict, fds: Sequence[int]) -> str:
        """Asks for a call. -> the token of its reply."""
        token = secrets.token_hex(8)
        request = {"function": function, "arguments": report.plain(arguments), "token": token, "fds": len(fds)}
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # what it said before it ended is read first
            _send(self.socket, json.dumps(request).encode() + b"\n", fds)
        return token

    def _answer(self, token: str, deadline: float, limit_s: float, on_message: Callable[[Any, float], None] | None,
                stalled: Callable[[], bool] = lambda: False) -> Outcome:  # fmt: skip
        while True:
            line = self._line(deadline, stalled)
            if line is None or time.monotonic() > deadline:
                self.kill()
                if time.monotonic() < deadline:
                    return Outcome("stalled", reason=f"no progress{self._tail()}")
                return Outcome("timed out", reason=f"no answer within {limit_s:g} s{self._tail()}")
            if line == b"":
                return self._died()
            reply = _parsed(line, token)
            if reply is None:
                self.kill()
                return Outcome("forged", reason=f"a reply that does not belong to the request: {printable(line[:120])}")
            if reply["kind"] != "message":
                return Outcome(reply["kind"], reply.get("value"), printable(str(reply.get("reason", ""))))
            if on_message:
                on_message(reply.get("value"), time.perf_counter())

    def _line(self, deadline: float, stalled: Callable[[], bool]) -> bytes | None:
        """The next reply; b"" at the end of the stream, None when the time is up or the call has stalled."""
        while b"\n" not in self.buffer and len(self.buffer) < LONGEST_REPLY:
            left = deadline - time.monotonic()
            if left <= 0 or stalled():
                return None
            if not select.select([self.socket], [], [], min(left, LOOK))[0]:
                continue
            try:
                piece = self.socket.recv(1 << 16)
            except ConnectionResetError:
                piece = b""
            if not piece:
                return b""
            self.buffer += piece
        line, _, self.buffer = self.buffer.partition(b"\n")
        return line or b" "

    def _died(self) -> Outcome:
        assert self.process
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        code = self.process.poll()
        self.kill()
        how = "closed its connection" if code is None else f"exit status {code}"
        if code is not None and code < 0:
            how = f"killed by {signal.Signals(-code).name}"
        return Outcome("crashed", reason=how + self._tail())

    def _tail(self) -> str:
        """The last lines that the process printed."""
        self.printed.seek(0)
        lines = printable(self.printed.read()[-4096:]).splitlines()
        return (": " + " | ".join(lines[-6:])) if lines else ""

    # ---- standing still ----

    def freeze(self) -> Outcome | None:
        """Stops the worker and whatever it started; what it started stays so until the next ``call``. A worker that does not
        stand still is ended; -> what it comes to then."""
        if not self._stop():
            return _restless()
        started = self.offspring() - self.halted
        processes.halt(started)
        self.halted |= started
        self.ran |= {pid: processes.ran(pid) for pid in started}
        return None

    def _stop(self) -> bool:
        if self.process and not self.frozen:
            if not processes.stop(self.pid):
                self.kill()
                return False
            self.frozen = True
            self.ran[self.pid] = processes.ran(self.pid)
        return True

    def _go_on(self) -> None:
        self.frozen = False
        processes.go_on(self.pid)

    def thaw(self) -> None:
        if self.frozen:
            for pid in self.halted:
                processes.go_on(pid)
            self.halted, self.ran = set(), {}
            self._go_on()

    def strayed(self) -> float:
        """Seconds that what stands still ran all the same, since it was stopped or since the last look."""
        found = 0.0
        for pid, before in self.ran.items():
            now = processes.ran(pid)
            found += max(0.0, now - before)  # nothing is counted of what has ended
            self.ran[pid] = now
        return found

    def offspring(self) -> set[int]:
        """The processes that the worker started and that have not ended."""
        if self.process is None:
            return set()
        orphaned = processes.orphans(Worker.living, self.earlier)
        return processes.alive(processes.descendants(self.pid).union(orphaned, *map(processes.descendants, orphaned)))

    def moving(self) -> set[int]:
        """Processes of a worker that stands still which do not."""
        return {pid for pid in self.offspring() if pid not in self.halted or not processes.still(pid)}

    # ---- the end ----

    def kill(self) -> None:
        """Ends the worker and everything that it started, whatever session that is in."""
        assert self.process
        if self.process.poll() is None:
            processes.stop(self.pid)
        processes.end_all(self.offspring)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(processes.LIMIT)
        processes.end(processes.orphans(Worker.living, self.earlier))
        Worker.living.discard(self.process.pid)

    def close(self) -> None:
        if self.process is None:
            return
        if self.process.poll() is None and not self.confined:
            self.thaw()
            self.socket.shutdown(socket.SHUT_WR)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5)
        self.kill()
        self.socket.close()
        self.printed.close()
        self.process = None


def _restless() -> Outcome:
    return Outcome("timed out", reason=f"it did not stand still within {processes.LIMIT:g} s")


def printable(text: bytes | str) -> str:
    """The text of a candidate without what a terminal would obey."""
    text = text.decode(errors="replace") if isinstance(text, bytes) else text
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text).strip()


def _parsed(line: bytes, token: str) -> dict | None:
    """A reply to the request of that token; None for anything else."""
    try:
        reply = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(reply, dict) or reply.get("token") != token or reply.get("kind") not in (*KINDS, "message"):
        return None
    return reply


def _send(channel: socket.socket, line: bytes, fds: Sequence[int]) -> None:
    sent = socket.send_fds(channel, [line], list(fds)) if fds else 0
    if sent < len(line):  # nothing more may be sent to a worker that has the request: it may have ended by now
        channel.sendall(line[sent:])


def _serve(channel: socket.socket) -> None:
    def send(reply: dict) -> None:
        channel.sendall(json.dumps({**report.plain(reply), "token": request["token"]}).encode() + b"\n")

    buffer, received = b"", []
    while True:
        while b"\n" not in buffer:
            piece, fds, _, _ = socket.recv_fds(channel, 1 << 16, MOST_FDS)
            received += fds
            if not piece:
                return
            buffer += piece
        line, _, buffer = buffer.partition(b"\n")
        request = json.loads(line)
        arguments = request["arguments"]
        if request["fds"]:
            arguments["fds"], received = received, []
        try:
            module, _, name = request["function"].partition(":")
            function = getattr(importlib.import_module(module), name)
            reply = {"kind": "done", "value": function(**arguments, tell=lambda m: send({"kind": "message", "value": m}))}
        except report.UsageError as error:
            reply = {"kind": "usage", "reason": str(error)}
        except BaseException as error:  # whatever a candidate raises, SystemExit included, is its result
            traceback.print_exc()
            reply = {"kind": "failed", "reason": report.first_line(error, None)}
        send(reply)


if __name__ == "__main__":
    processes.end_with(int(sys.argv[3]))
    {"confined": processes.confine, "hidden": processes.hide}[sys.argv[2]]()
    _serve(socket.socket(fileno=int(sys.argv[1])))
