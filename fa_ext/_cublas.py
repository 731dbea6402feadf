"""Where cuBLAS is. The compiled module asks once, before its first CUDA call, and loads what is named here."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
import sys
from pathlib import Path


def _loaded() -> str | None:
    """cuBLAS of this process, where another library has loaded it: sharing it saves memory and a second start-up."""
    try:
        with open("/proc/self/maps") as maps:
            for line in maps:
                found = re.search(r"(/\S*/libcublas\.so\.(?:13|12)[\d.]*)$", line.rstrip())
                if found:
                    return found.group(1)
    except OSError:
        pass
    return None


def _installed() -> str | None:
    """cuBLAS of the nvidia wheels, of conda or of the system, by cuda-pathfinder where it is installed."""
    try:
        pathfinder = importlib.import_module("cuda.pathfinder")
        return pathfinder.load_nvidia_dynamic_lib("cublas").abs_path
    except Exception:  # not installed, or nothing found: its errors differ by version
        return None


def _is_elsewhere(path: str) -> bool:
    """Whether there is such a path, and it is not the current directory."""
    try:
        return not os.path.samefile(path, os.curdir)
    except OSError:
        return False


def _wheels() -> str | None:
    """cuBLAS of the nvidia wheels, which other packages bring. Asks what pip wrote of them: a folder nvidia/ of the current
    directory, which may be among the paths of imports, is no wheel."""
    paths = [path for path in sys.path if _is_elsewhere(path)]
    for name, library in (("nvidia-cublas", "libcublas.so.13"), ("nvidia-cublas-cu12", "libcublas.so.12")):
        for wheel in importlib.metadata.distributions(name=name, path=paths):
            for file in wheel.files or ():
                if file.name == library and (found := Path(str(wheel.locate_file(file)))).is_file():
                    return str(found)
    return None


def find() -> str | None:
    """Path of cuBLAS 13 or 12, or None, which leaves the search to the dynamic loader."""
    return _loaded() or _installed() or _wheels()
