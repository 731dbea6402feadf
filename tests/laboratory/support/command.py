"""The common part of the tests of ``python -m bench``."""

import json
from pathlib import Path

from bench.__main__ import main

CHEATS = Path(__file__).with_name("cheats.py")
CHEATS_TIMED = Path(__file__).with_name("cheats_timed.py")
SMALL = "B1,H2,S96,D32,float32"


def command(capfd, *arguments):
    """(exit status, JSON that the command printed)."""
    status = main([*map(str, arguments), "--json"])
    return status, json.loads(capfd.readouterr().out)
