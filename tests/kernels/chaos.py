"""The report of a chaos build (kernels/common/chaos.cuh): which of its waits ended."""

import ctypes

from fa_ext import _core


class _Report(ctypes.Structure):
    """fa_chaos_report_t."""

    _fields_ = [("site", ctypes.c_uint32), ("block", ctypes.c_uint32 * 3), ("warp", ctypes.c_uint32),
                ("lane", ctypes.c_uint32), ("phase", ctypes.c_uint32), ("hung", ctypes.c_uint32)]  # fmt: skip


def is_chaos() -> bool:
    return _core.build_info()["chaos"]


def hung() -> dict | None:
    """{site (a source line), block, warp, lane, phase} of a wait of this process that ended after its limit; else None."""
    if not is_chaos():
        return None
    ask = ctypes.CDLL(_core.__file__).fa_chaos_report
    ask.restype = ctypes.POINTER(_Report)
    found = ask()
    if not found or not found.contents.hung:
        return None
    return {name: list(value) if name == "block" else value
            for name, _ in _Report._fields_[:-1] for value in [getattr(found.contents, name)]}  # fmt: skip
