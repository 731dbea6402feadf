"""Where cuBLAS is. The compiled module asks once, before its first CUDA call, and loads what is named here."""

from __future__ import annotations

import importlib
import importlib.util
import re
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


def _wheels() -> str | None:
    """cuBLAS of the nvidia wheels, which other packages bring: nvidia/cu13/lib, or nvidia/cublas/lib for CUDA 12."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for found in sorted(Path(folder).glob("*/lib/libcublas.so.1[23]"), reverse=True):
            return str(found)
    return None


def find() -> str | None:
    """Path of cuBLAS 13 or 12, or None, which leaves the search to the dynamic loader."""
    return _loaded() or _installed() or _wheels()
