"""The parent of a process that runs candidates: it outlives that process, however that ends, and then ends what is left.

What a candidate started is a descendant of its judge, and becomes a child of the keeper when the judge ends. The judge in
turn is asked to end, and ends what it started, when the keeper does. Only who kills both at once leaves something behind.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from bench.trial import processes

_ASKED = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


def keep(work: Callable[[], int]) -> int:
    """Exit status of `work`, which a child of this process does: 128 and the number of the signal that ended it. The child
    returns from here as well, with what `work` returned. To be called before there are threads."""
    processes.adopt_orphans()
    keeper = os.getpid()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*_ASKED, signal.SIGCHLD})
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        processes.end_with(keeper, signal.SIGTERM)
        return work()
    status = _status_of(child)
    processes.end_all(lambda: processes.descendants(keeper))
    return status


def _status_of(child: int) -> int:
    """Waits for the child and hands on what this process is asked."""
    while True:
        heard = signal.sigwaitinfo({*_ASKED, signal.SIGCHLD})
        if heard.si_signo != signal.SIGCHLD:
            if heard.si_code <= 0:  # from a process to this one; what a terminal sends, the child has got itself
                os.kill(child, heard.si_signo)
            continue
        while (found := os.waitpid(-1, os.WNOHANG))[0]:  # adopted ones end too
            if found[0] == child:
                code = os.waitstatus_to_exitcode(found[1])
                return code if code >= 0 else 128 - code
