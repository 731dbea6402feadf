"""Did a candidate tamper with the clock or the judge? Compares the functions that measure before it loads and after."""

from __future__ import annotations

import sys
import types
from typing import Any

# Modules whose every function counts, and single attributes of large ones.
_WHOLE = ("time", "numpy", "numpy.linalg", "fa_ext.reference", "fa_ext.verify", "hashlib")
_SINGLE = {
    "torch": ("equal", "allclose", "empty", "from_numpy"),
    "torch.cuda": ("Event", "Stream", "CUDAGraph", "graph", "synchronize", "current_stream"),
    "cupy": ("abs", "isfinite", "matmul", "exp", "where", "asarray"),
    "cupy.cuda": ("Event", "Stream", "Graph", "get_elapsed_time"),
}


def snapshot() -> dict[str, Any]:
    """{name: what it is bound to} of everything watched; holds the objects, so an identity cannot be reused."""
    found: dict[str, Any] = {}
    names = [*_WHOLE, *(m for m in sys.modules if m == "bench" or m.startswith("bench."))]
    for module_name in names:
        module = sys.modules.get(module_name)
        if module is not None:
            for name, value in list(vars(module).items()):
                _record(found, f"{module_name}.{name}", value)
    for module_name, attributes in _SINGLE.items():
        module = sys.modules.get(module_name)
        for name in attributes:
            if module is not None and hasattr(module, name):
                _record(found, f"{module_name}.{name}", getattr(module, name))
    return found


def _record(found: dict[str, Any], name: str, value: Any) -> None:
    if isinstance(value, types.FunctionType):
        found[name] = (value, value.__code__)
    elif isinstance(value, type):
        found[name] = value
        if value.__module__.partition(".")[0] in ("bench", "fa_ext", "torch", "cupy"):
            for attribute, member in list(vars(value).items()):
                if isinstance(member, types.FunctionType):
                    found[f"{name}.{attribute}"] = (member, member.__code__)
    elif callable(value):
        found[name] = value


def tampered(before: dict[str, Any]) -> list[str]:
    """Names that are bound to something else than in `before`, or gone."""
    after = snapshot()
    return sorted(name for name, value in before.items() if name not in after or not _same(value, after[name]))


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, tuple) and isinstance(b, tuple):
        return a[0] is b[0] and a[1] is b[1]
    return a is b
