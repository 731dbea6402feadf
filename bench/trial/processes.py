"""Processes under Linux: stop one, find and end what it started, keep it out of others' memory.

A worker that runs a candidate is *confined* (no new privileges, none that reach into other processes, dead when the
judge dies); judge and baselines are *hidden* (nobody but root with its privileges opens their memory or traces them);
the judge *adopts* what a worker leaves behind, so that nothing a candidate started leaves its sight.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG, _PR_GET_DUMPABLE, _PR_SET_DUMPABLE = 1, 3, 4
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 36, 38
# CAP_KILL, SYS_MODULE, SYS_RAWIO, SYS_PTRACE, SYS_ADMIN, SYS_BOOT, SYS_NICE, SYS_RESOURCE, SYS_TIME, PERFMON, BPF,
# CHECKPOINT_RESTORE: what root would need to reach another process, its clock or its priority.
_REACHING = (5, 16, 17, 19, 21, 22, 23, 24, 25, 38, 39, 40)
_CAPABILITIES_V3 = 0x20080522
# Seconds after which what neither stands still nor ends has refused to.
LIMIT = 10.0
_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, argument: int = 0) -> int:
    return _libc.prctl(option, ctypes.c_ulong(argument), 0, 0, 0)


def end_with(parent: int, number: int = signal.SIGKILL) -> None:
    """For a worker, which may stand still: it ends when its parent does, however that ends. `number`: of the signal."""
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it died before the call
        os._exit(1)


def confine() -> None:
    """For a worker, before it loads a candidate. What this kernel does not know is left out."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES_V3, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable of capabilities 0 to 31, then of 32 to 63
    if _libc.capget(header, sets) == 0:
        for capability in _REACHING:
            for which in range(3):
                sets[3 * (capability // 32) + which] &= ~(1 << (capability % 32)) & 0xFFFFFFFF
        _libc.capset(header, sets)


def hide() -> None:
    """Closes this process's memory to other processes of its user."""
    _prctl(_PR_SET_DUMPABLE, 0)


@contextlib.contextmanager
def hidden() -> Iterator[None]:
    """``hide`` for as long as the block runs."""
    before = _prctl(_PR_GET_DUMPABLE)
    hide()
    try:
        yield
    finally:
        if before == 1:
            _prctl(_PR_SET_DUMPABLE, 1)


def adopt_orphans() -> None:
    """Processes whose parents end become children of this one instead of init's."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def children(pid: int) -> set[int]:
    """Processes whose parent is `pid`, zombies included."""
    found: set[int] = set()
    listed = False
    for task in _tasks(pid):
        with contextlib.suppress(OSError):
            found |= {int(word) for word in (task / "children").read_text().split()}
            listed = True
    if listed or not Path(f"/proc/{pid}").exists():
        return found
    return {child for child in _every_process() if (_stat(child) or [""] * 2)[1] == str(pid)}


def descendants(pid: int) -> set[int]:
    """Children of `pid`, their children, and so on."""
    found, look = set(), [pid]
    while look:
        new = children(look.pop()) - found
        found |= new
        look += new
    return found


def orphans(workers: set[int], earlier: set[int]) -> set[int]:
    """The processes that this one adopted: its children of other sessions that are neither `workers` nor were there `earlier`."""
    session = os.getsid(0)
    return {pid for pid in children(os.getpid()) - workers - earlier if _session(pid) not in (None, session)}


def state(pid: int) -> str | None:
    """The letter of its main thread's state: R runs, S and D sleep, T stands still, Z has ended; None: gone."""
    fields = _stat(pid)
    return fields[0] if fields else None


def alive(pids: set[int]) -> set[int]:
    """Those of which a thread has not ended: the first one may have, and the others go on."""
    return {pid for pid in pids if any(letter not in "ZX" for letter in _letters(pid))}


def still(pid: int) -> bool:
    """Whether every thread that has not ended stands still."""
    return all(letter in "TtZX" for letter in _letters(pid))


def _letters(pid: int) -> list[str]:
    """The letters of the states of its threads."""
    found = []
    for task in _tasks(pid):
        with contextlib.suppress(OSError):
            found.append((task / "stat").read_text().rpartition(")")[2].split()[0])
    return found


def stand_still() -> None:
    """Stops this process, until somebody lets it go on."""
    signal.raise_signal(signal.SIGSTOP)  # to this thread: it does not go one instruction further


def stopped(child: int) -> bool:
    """Waits until every thread of a child of this process stands still: True; or until it has ended: False."""
    found = os.waitid(os.P_PID, child, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    return found is not None and found.si_code == os.CLD_STOPPED


def stop(child: int) -> bool:
    """Returns once every thread of a child of this process stands still, or the child has ended: True. False: it does
    neither within LIMIT seconds, however often it is told to."""
    began = time.monotonic()
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(child, signal.SIGSTOP)
        while os.waitid(os.P_PID, child, os.WSTOPPED | os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
            if (waited := time.monotonic() - began) > LIMIT:
                return False
            if waited > 1e-3:  # it takes some microseconds, but not where threads wait for a core
                time.sleep(waited / 16)
                os.kill(child, signal.SIGSTOP)
    return True


def go_on(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGCONT)


def halt(pids: set[int]) -> None:
    """Stops processes that need not be children of this one; returns when they stand still, after a second at most."""
    until = time.monotonic() + 1.0
    while moving := {pid for pid in alive(pids) if not still(pid)}:
        for pid in moving:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGSTOP)
        if time.monotonic() > until:
            return


def end(pids: set[int]) -> None:
    """Kills processes and takes note of those that were adopted; gives up after LIMIT seconds."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    until = time.monotonic() + LIMIT
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(pid, os.WNOHANG)[0] == 0 and time.monotonic() < until:
                time.sleep(1e-3)


def end_all(find: Callable[[], set[int]]) -> None:
    """Ends what `find` finds until it finds nothing alive: what is killed starts nothing, but its children may have."""
    for _ in range(100):
        if not (left := alive(find())):
            break
        halt(left)
        end(left)


def ran(pid: int) -> float:
    """Seconds that all threads of a process have run so far, those that have ended too, as the kernel's scheduler counts."""
    try:
        return time.clock_gettime(~pid << 3 | 2)  # the clock of another process: CPUCLOCK_SCHED of linux/posix-timers.h
    except OSError:
        return _scheduled(pid, 0)


class Watch:
    """Kills a child of this process that takes longer than it may, or says something before it is asked to (``over``): this
    process may wait for the child meanwhile, without a limit. `why` says what it was killed for."""

    def __init__(self, child: int, channel: socket.socket, seconds: float):
        self.child, self.channel, self.seconds, self.why = child, channel, seconds, ""
        self.told, self.tell = os.pipe()
        self.expected = False
        self.thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Watch:
        self.thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.over()
        self.thread.join()
        os.close(self.told)
        os.close(self.tell)

    def over(self) -> None:
        """From now on it may speak, and take as long as it likes."""
        if not self.expected:
            self.expected = True
            os.write(self.tell, b".")

    def _look(self) -> None:
        ready = select.select([self.channel, self.told], [], [], self.seconds)[0]
        if self.expected:
            return
        self.why = "early" if ready else "late"
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.child, signal.SIGKILL)


class Ended(SystemExit):
    """A signal asked this process to end."""


@contextlib.contextmanager
def cleaning_up() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block as an exception does, so that what it started is ended: where they would have ended
    the process at once, and in its first thread, which alone may say so."""

    def ended(number: int, frame: Any) -> None:
        for each in asked:  # once is enough
            signal.signal(each, signal.SIG_IGN)
        raise Ended(128 + number)

    mine = threading.current_thread() is threading.main_thread()
    asked = [n for n in (signal.SIGTERM, signal.SIGHUP) if mine and signal.getsignal(n) is signal.SIG_DFL]
    for number in asked:
        signal.signal(number, ended)
    try:
        yield
    finally:
        for number in asked:
            signal.signal(number, signal.SIG_DFL)


def waited_for_cores(pid: int) -> float:
    """Seconds for which threads of a process were ready to run and had no core, so far (0 where nobody counts)."""
    return _scheduled(pid, 1)


def _scheduled(pid: int, field: int) -> float:
    total = 0
    for task in _tasks(pid):
        with contextlib.suppress(OSError, IndexError):
            total += int((task / "schedstat").read_text().split()[field])
    return total * 1e-9


def favour(pid: int) -> dict[int, tuple] | None:
    """How the scheduler treats each thread of a process: {thread: (cores, nice value, policy)}; None when it is gone."""
    found = {}
    for task in _tasks(pid):
        thread = int(task.name)
        with contextlib.suppress(ProcessLookupError):
            found[thread] = (frozenset(os.sched_getaffinity(thread)), os.getpriority(os.PRIO_PROCESS, thread), os.sched_getscheduler(thread))
    return found or None


def said(how: tuple) -> str:
    """The answer of favour() about a thread, in words."""
    cores, nice, policy = how
    return f"cores {','.join(map(str, sorted(cores)))} nice {nice} policy {policy}"


def _tasks(pid: int) -> list[Path]:
    """Folders of the threads of a process; it may end at any moment."""
    try:
        return [Path(f"/proc/{pid}/task", name) for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat from the state on: state, parent, group, session, ..."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _session(pid: int) -> int | None:
    fields = _stat(pid)
    return int(fields[3]) if fields else None


def _every_process() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
