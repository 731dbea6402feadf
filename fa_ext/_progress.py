"""How far a build is, on the terminal or in what is printed. Imports nothing of ``fa_ext``."""

from __future__ import annotations

import contextlib
import os
import time
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from pathlib import Path

#: Seconds between two lines of progress where there is no terminal.
LOG_EVERY = 10.0


def _terminal() -> int | None:
    """The terminal of this process, which pip leaves alone when it keeps what a build prints, as a file descriptor; None
    where there is none, or where this process runs in its background (writing there may stop it)."""
    try:
        terminal = os.open("/dev/tty", os.O_WRONLY | os.O_NOCTTY)
    except OSError:
        return None
    with contextlib.suppress(OSError):
        if os.tcgetpgrp(terminal) == os.getpgrp():
            return terminal
    os.close(terminal)
    return None


def show(futures: list[Future[Path]]) -> None:
    """Waits for compilations until all have ended or one has failed. Says each second how many have ended: on the
    terminal, in a line that is wiped in the end; without one, on standard output, every ten seconds."""
    begun = logged = time.monotonic()
    terminal = _terminal()

    def write(text: str) -> None:
        if terminal is not None:
            with contextlib.suppress(OSError):  # it may have been closed
                os.write(terminal, text.encode())

    while True:
        done, waiting = wait(futures, timeout=1, return_when=FIRST_EXCEPTION)
        if not waiting or any(future.exception() for future in done):
            break
        now = time.monotonic()
        line = f"fa_ext: {len(done)} of {len(futures)} files compiled, {now - begun:.0f} s"
        if terminal is not None:
            write(f"\r{line}")
        elif now - logged >= LOG_EVERY:
            logged = now
            print(line, flush=True)
    if terminal is not None:
        write("\r\x1b[K")
        os.close(terminal)
