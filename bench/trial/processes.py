"""What Linux offers to hold a process: stop it, find and end what it started, keep it out of others' memory.

A worker that runs a candidate is *confined* (no new privileges, none that reach into other processes, dead when the
judge dies); judge and baselines are *hidden* (nobody but root with its privileges opens their memory or traces them);
the judge *adopts* what a worker leaves behind, so that nothing a candidate started leaves its sight.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_GET_DUMPABLE, _PR_SET_DUMPABLE = 1, 3, 4
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 36, 38
# CAP_KILL, SYS_MODULE, SYS_RAWIO, SYS_PTRACE, SYS_ADMIN, SYS_BOOT, SYS_NICE, SYS_RESOURCE, SYS_TIME, PERFMON, BPF,
# CHECKPOINT_RESTORE: what root would need to reach another process, its clock or its priority.
_REACHING = (5, 16, 17, 19, 21, 22, 23, 24, 25, 38, 39, 40)
_CAPABILITIES_V3 = 0x20080522
_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, argument: int = 0) -> int:
    return _libc.prctl(option, ctypes.c_ulong(argument), 0, 0, 0)


def end_with(parent: int) -> None:
    """For a worker, which may stand still: it ends when its parent does, however that ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
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
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found |= {int(word) for word in file.read_text().split()}
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
    """What this process adopted: its children of other sessions that are neither `workers` nor were there `earlier`."""
    session = os.getsid(0)
    return {pid for pid in children(os.getpid()) - workers - earlier if _session(pid) not in (None, session)}


def state(pid: int) -> str | None:
    """The letter of its main thread's state: R runs, S and D sleep, T stands still, Z has ended; None: gone."""
    fields = _stat(pid)
    return fields[0] if fields else None


def alive(pids: set[int]) -> set[int]:
    """Those that have not ended."""
    return {pid for pid in pids if state(pid) not in (None, "Z", "X")}


def stop(child: int) -> None:
    """Returns once every thread of a child of this process stands still, or the child has ended."""
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(child, signal.SIGSTOP)
        os.waitid(os.P_PID, child, os.WSTOPPED | os.WEXITED | os.WNOWAIT)


def go_on(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def halt(pids: set[int]) -> None:
    """Stops processes that need not be children of this one; returns when they stand still, after a second at most."""
    until = time.monotonic() + 1.0
    while moving := {pid for pid in alive(pids) if state(pid) not in ("T", "t")}:
        for pid in moving:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGSTOP)
        if time.monotonic() > until:
            return


def end(pids: set[int]) -> None:
    """Kills processes and takes note of those that were adopted."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


def waited_for_cores(pid: int) -> float:
    """Seconds for which threads of a process were ready to run and had no core, so far (0 where nobody counts)."""
    return _scheduled(pid, 1)


def _scheduled(pid: int, field: int) -> float:
    total = 0
    for task in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, IndexError):
            total += int(task.read_text().split()[field])
    return total * 1e-9


def favour(pid: int) -> dict[int, tuple] | None:
    """How the scheduler treats each thread of a process: {thread: (cores, nice value, policy)}; None when it is gone."""
    found = {}
    for task in Path(f"/proc/{pid}/task").glob("*"):
        thread = int(task.name)
        with contextlib.suppress(ProcessLookupError):
            found[thread] = (
                frozenset(os.sched_getaffinity(thread)),
                os.getpriority(os.PRIO_PROCESS, thread),
                os.sched_getscheduler(thread),
            )
    return found or None


def said(how: tuple) -> str:
    """What favour() says of a thread, in words."""
    cores, nice, policy = how
    return f"cores {','.join(map(str, sorted(cores)))} nice {nice} policy {policy}"


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
